// simd_* and quad_*: every active lane hands in its operand, and reads what the others handed in. What an inactive lane
// would have brought is undefined in Metal: all its bits are set here, which no kernel takes for a right value.
namespace metal {
template <class T>
METAL_FUNC T __msl_read(const __msl_phase* p, uint lane) {
  T r;
  if (p->active >> (lane & 31) & 1) {
    __builtin_memcpy((void*)&r, p->data[lane & 31], sizeof(T));
  } else {
    __builtin_memset((void*)&r, 0xff, sizeof(T));
  }
  return r;
}
template <class T>
METAL_FUNC __msl_phase* __msl_meet(T x) {
  static_assert(sizeof(T) <= 32, "the operand of a simdgroup function is larger than 32 bytes");
  return __msl_coll(&x, sizeof(T));
}
template <class T>
METAL_FUNC T __msl_from(T x, uint lane) {
  return __msl_read<T>(__msl_meet<T>(x), lane);
}

#define __MSL_SHUFFLE(name, lane, keep)                        \
  template <class A, class T = __value_t<A>>                   \
  METAL_FUNC T name(A data, ushort n) {                        \
    T x = data;                                                \
    uint l = __msl_lane();                                     \
    T y = metal::__msl_from<T>(x, lane);                       \
    return (keep) ? x : y;                                     \
  }
__MSL_SHUFFLE(simd_shuffle, n, false)
__MSL_SHUFFLE(simd_broadcast, n, false)
__MSL_SHUFFLE(simd_shuffle_xor, l ^ n, false)
__MSL_SHUFFLE(simd_shuffle_down, l + n, l + n > 31)
__MSL_SHUFFLE(simd_shuffle_up, l - n, l < n)
__MSL_SHUFFLE(simd_shuffle_rotate_down, l + n, false)
__MSL_SHUFFLE(simd_shuffle_rotate_up, l - n, false)
__MSL_SHUFFLE(quad_shuffle, (l & ~3u) + (n & 3u), false)
__MSL_SHUFFLE(quad_broadcast, (l & ~3u) + (n & 3u), false)
__MSL_SHUFFLE(quad_shuffle_xor, (l & ~3u) + ((l ^ n) & 3u), false)
__MSL_SHUFFLE(quad_shuffle_down, l + n, (l & 3) + n > 3)
__MSL_SHUFFLE(quad_shuffle_up, l - n, (l & 3) < n)
__MSL_SHUFFLE(quad_shuffle_rotate_down, (l & ~3u) + ((l + n) & 3u), false)
__MSL_SHUFFLE(quad_shuffle_rotate_up, (l & ~3u) + ((l - n) & 3u), false)
#undef __MSL_SHUFFLE

// Within groups of `modulo` lanes; lanes past the end come from the filling data.
template <class T>
METAL_FUNC T __msl_fill_down(T x, T fill, uint delta, uint modulo) {
  uint l = __msl_lane(), from = l % modulo + delta, start = l - l % modulo;
  T a = __msl_from<T>(x, start + from % modulo), b = __msl_from<T>(fill, start + from % modulo);
  return from < modulo ? a : b;
}
template <class T>
METAL_FUNC T __msl_fill_up(T x, T fill, uint delta, uint modulo) {
  uint l = __msl_lane(), at = l % modulo, start = l - at, from = (at + modulo - delta % modulo) % modulo;
  T a = __msl_from<T>(x, start + from), b = __msl_from<T>(fill, start + from);
  return at >= delta ? a : b;
}
template <class A, class T = __value_t<A>>
METAL_FUNC T simd_shuffle_and_fill_down(A data, T filling_data, ushort delta, ushort modulo = 32) {
  return __msl_fill_down<T>(data, filling_data, delta, modulo);
}
template <class A, class T = __value_t<A>>
METAL_FUNC T simd_shuffle_and_fill_up(A data, T filling_data, ushort delta, ushort modulo = 32) {
  return __msl_fill_up<T>(data, filling_data, delta, modulo);
}
template <class A, class T = __value_t<A>>
METAL_FUNC T quad_shuffle_and_fill_down(A data, T filling_data, ushort delta, ushort modulo = 4) {
  return __msl_fill_down<T>(data, filling_data, delta, modulo);
}
template <class A, class T = __value_t<A>>
METAL_FUNC T quad_shuffle_and_fill_up(A data, T filling_data, ushort delta, ushort modulo = 4) {
  return __msl_fill_up<T>(data, filling_data, delta, modulo);
}
METAL_FUNC uint __msl_first(uint active) { return (uint)__builtin_ctz(active); }
METAL_FUNC uint __msl_quad_mask() { return 15u << (__msl_lane() & ~3u); }
template <class A, class T = __value_t<A>>
METAL_FUNC T simd_broadcast_first(A data) {
  __msl_phase* p = __msl_meet<T>(data);
  return __msl_read<T>(p, __msl_first(p->active));
}
template <class A, class T = __value_t<A>>
METAL_FUNC T quad_broadcast_first(A data) {
  __msl_phase* p = __msl_meet<T>(data);
  return __msl_read<T>(p, __msl_first(p->active & __msl_quad_mask()));
}

// Combinations of two operands. A type without `max` of its own is compared.
template <class T>
METAL_FUNC T __msl_max(T a, T b) {
  if constexpr (is_floating_point_v<T>) {
    return isnan(a) ? b : isnan(b) ? a : a < b ? b : a;
  } else if constexpr (__count<T>::value == 1) {
    return a < b ? b : a;
  } else {
    return max(a, b);
  }
}
template <class T>
METAL_FUNC T __msl_min(T a, T b) {
  if constexpr (is_floating_point_v<T>) {
    return isnan(a) ? b : isnan(b) ? a : b < a ? b : a;
  } else if constexpr (__count<T>::value == 1) {
    return b < a ? b : a;
  } else {
    return min(a, b);
  }
}
struct __msl_adds {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return (T)(a + b); }
};
struct __msl_multiplies {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return (T)(a * b); }
};
struct __msl_maxes {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return __msl_max<T>(a, b); }
};
struct __msl_mins {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return __msl_min<T>(a, b); }
};
struct __msl_ands {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return (T)(a & b); }
};
struct __msl_ors {
  template <class T>
  static METAL_FUNC T of(T a, T b) { return (T)(a | b); }
};
struct __msl_xors {
  template <class T>
  static METAL_FUNC T of(T a, T b) {
    if constexpr (is_floating_point_v<T>) {
      typedef conditional_t<sizeof(T) == 4, uint, ushort> bits;
      return as_type<T>((bits)(as_type<bits>(a) ^ as_type<bits>(b)));
    } else {
      return (T)(a ^ b);
    }
  }
};

// The first lane to go on combines for all: in halves when all 32 are active, else in order of the lanes.
template <class F, class T>
METAL_FUNC T __msl_reduce(T x) {
  __msl_phase* p = __msl_meet<T>(x);
  T r;
  if (!p->done) {
    T t[32];
    if (p->active == 0xffffffffu) {
      for (int i = 0; i < 32; i++) __builtin_memcpy((void*)&t[i], p->data[i], sizeof(T));
      for (int half_size = 16; half_size; half_size >>= 1)
        for (int i = 0; i < half_size; i++) t[i] = F::template of<T>(t[i], t[i + half_size]);
    } else {
      uint left = p->active;
      __builtin_memcpy((void*)&t[0], p->data[__msl_first(left)], sizeof(T));
      while (left &= left - 1) {
        __builtin_memcpy((void*)&t[1], p->data[__msl_first(left)], sizeof(T));
        t[0] = F::template of<T>(t[0], t[1]);
      }
    }
    __builtin_memcpy(p->result, &t[0], sizeof(T));
    p->done = 1;
  }
  __builtin_memcpy((void*)&r, p->result, sizeof(T));
  return r;
}
template <class F, class T>
METAL_FUNC T __msl_quad_reduce(T x) {
  __msl_phase* p = __msl_meet<T>(x);
  uint start = __msl_lane() & ~3u, active = p->active >> start & 15;
  if (active == 15) {
    return F::template of<T>(F::template of<T>(__msl_read<T>(p, start), __msl_read<T>(p, start + 2)),
                             F::template of<T>(__msl_read<T>(p, start + 1), __msl_read<T>(p, start + 3)));
  }
  T r = __msl_read<T>(p, start + __msl_first(active));
  while (active &= active - 1) r = F::template of<T>(r, __msl_read<T>(p, start + __msl_first(active)));
  return r;
}
template <class F, class T>
METAL_FUNC T __msl_scan(T x, T start, bool inclusive, uint width) {
  __msl_phase* p = __msl_meet<T>(x);
  uint lane = __msl_lane();
  T r = start;
  for (uint i = lane - lane % width; i < lane; i++)
    if (p->active >> i & 1) r = F::template of<T>(r, __msl_read<T>(p, i));
  return inclusive ? F::template of<T>(r, x) : r;
}
#define __MSL_REDUCTION(name, F)                 \
  template <class A, class T = __value_t<A>>     \
  METAL_FUNC T simd_##name(A data) {             \
    return metal::__msl_reduce<F, T>(data);      \
  }                                              \
  template <class A, class T = __value_t<A>>     \
  METAL_FUNC T quad_##name(A data) {             \
    return metal::__msl_quad_reduce<F, T>(data); \
  }
__MSL_REDUCTION(sum, __msl_adds)
__MSL_REDUCTION(product, __msl_multiplies)
__MSL_REDUCTION(max, __msl_maxes)
__MSL_REDUCTION(min, __msl_mins)
__MSL_REDUCTION(and, __msl_ands)
__MSL_REDUCTION(or, __msl_ors)
__MSL_REDUCTION(xor, __msl_xors)
#undef __MSL_REDUCTION
#define __MSL_SCAN(name, F, start, inclusive)                             \
  template <class A, class T = __value_t<A>>                              \
  METAL_FUNC T simd_prefix_##name(A data) {                               \
    return metal::__msl_scan<F, T>(data, T(start), inclusive, 32);        \
  }                                                                       \
  template <class A, class T = __value_t<A>>                              \
  METAL_FUNC T quad_prefix_##name(A data) {                               \
    return metal::__msl_scan<F, T>(data, T(start), inclusive, 4);         \
  }
__MSL_SCAN(inclusive_sum, __msl_adds, 0, true)
__MSL_SCAN(exclusive_sum, __msl_adds, 0, false)
__MSL_SCAN(inclusive_product, __msl_multiplies, 1, true)
__MSL_SCAN(exclusive_product, __msl_multiplies, 1, false)
#undef __MSL_SCAN

// Votes.
template <int lanes>
struct __msl_vote {
  typedef ulong vote_t;
  vote_t v;
  constexpr explicit __msl_vote(vote_t votes = 0) : v(votes) {}
  constexpr explicit operator vote_t() const { return v; }
  METAL_FUNC bool all() const { return (v & ((1ul << lanes) - 1)) == (1ul << lanes) - 1; }
  METAL_FUNC bool any() const { return (v & ((1ul << lanes) - 1)) != 0; }
};
typedef __msl_vote<32> simd_vote;
typedef __msl_vote<4> quad_vote;
METAL_FUNC ulong __msl_votes(bool x, bool or_inactive, uint lanes) {
  __msl_phase* p = __msl_meet<uchar>(x);
  ulong votes = 0;
  for (uint i = 0; i < 32; i++)
    if (lanes >> i & 1) votes |= (ulong)(p->active >> i & 1 ? p->data[i][0] : (uchar)or_inactive) << i;
  return votes;
}
METAL_FUNC simd_vote simd_ballot(bool x) { return simd_vote(__msl_votes(x, false, ~0u)); }
METAL_FUNC bool simd_all(bool x) { return __msl_votes(x, true, ~0u) == 0xffffffffu; }
METAL_FUNC bool simd_any(bool x) { return __msl_votes(x, false, ~0u) != 0; }
METAL_FUNC simd_vote simd_active_threads_mask() { return simd_vote(__msl_meet<uchar>(0)->active); }
METAL_FUNC bool simd_is_first() { return __msl_first(__msl_meet<uchar>(0)->active) == __msl_lane(); }
METAL_FUNC bool simd_is_helper_thread() { return false; }
METAL_FUNC quad_vote quad_ballot(bool x) {
  return quad_vote(__msl_votes(x, false, __msl_quad_mask()) >> (__msl_lane() & ~3u));
}
METAL_FUNC bool quad_all(bool x) { return __msl_votes(x, true, __msl_quad_mask()) == __msl_quad_mask(); }
METAL_FUNC bool quad_any(bool x) { return __msl_votes(x, false, __msl_quad_mask()) != 0; }
METAL_FUNC quad_vote quad_active_threads_mask() {
  return quad_vote(__msl_meet<uchar>(0)->active >> (__msl_lane() & ~3u) & 15);
}
METAL_FUNC bool quad_is_first() {
  return __msl_first(__msl_meet<uchar>(0)->active & __msl_quad_mask()) == __msl_lane();
}
}  // namespace metal
