// Levels that are integers times x in 16 bits, by the instruction that adds neighbouring products of words. A group of x
// has a scale of its own: rounding costs less than x lost when it became a bfloat or half.
#pragma once

#if METILE_LANES >= 8 && defined(__AVX2__)

namespace metile {

typedef short vshorts __attribute__((ext_vector_type(2 * METILE_LANES)));
typedef unsigned short vwords __attribute__((ext_vector_type(2 * METILE_LANES)));

inline vint pair_sums(vwords codes, vshorts x) {
#if METILE_LANES == 16
  typedef short Words __attribute__((vector_size(64)));
  return __builtin_bit_cast(vint, __builtin_ia32_pmaddwd512(__builtin_bit_cast(Words, codes), __builtin_bit_cast(Words, x)));
#else
  typedef short Words __attribute__((vector_size(32)));
  return __builtin_bit_cast(vint, __builtin_ia32_pmaddwd256(__builtin_bit_cast(Words, codes), __builtin_bit_cast(Words, x)));
#endif
}

// How a format's codes become integers: as they are, or 12 more than twice the level of e2m1.
template <typename F>
struct IntegerLevels {
  static constexpr float unit = 1, offset = 0;
  static vwords of(vwords codes) { return codes; }
};
struct DoubledLevels {
  static constexpr float unit = 0.5f, offset = 12;
  static vwords of(vwords codes) {
    typedef char Bytes __attribute__((vector_size(4 * METILE_LANES)));
    const uchar table[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    Bytes repeated;
    for (int i = 0; i < 4 * lanes; i += 16) __builtin_memcpy(reinterpret_cast<char*>(&repeated) + i, table, 16);
    const Bytes places = __builtin_bit_cast(Bytes, codes | 0x8000);  // the high byte of a word becomes 0
#if METILE_LANES == 16
    return __builtin_bit_cast(vwords, __builtin_ia32_pshufb512(repeated, places));
#else
    return __builtin_bit_cast(vwords, __builtin_ia32_pshufb256(repeated, places));
#endif
  }
};
template <> struct IntegerLevels<Mxfp4> : DoubledLevels {};
template <> struct IntegerLevels<Nvfp4> : DoubledLevels {};

// A register of codes: a word holds `each` of them; codes of other widths than 2, 4 and 8 are spread to bytes first.
template <typename F>
struct CodeWords {
  static constexpr bool is_whole = F::bits == 2 || F::bits == 4 || F::bits == 8;
  static constexpr int bits = is_whole ? F::bits : 8, each = 16 / bits;
  static constexpr int count = 2 * lanes * each, size = count * F::bits / 8;
  vwords words;

  CodeWords(const uchar* row, long k, long left) {
    const uchar* from = row + k / 8 * F::bits;
    uchar part[size];
    if (left < count) {
      __builtin_memset(part, 0, size);
      __builtin_memcpy(part, from, left / 8 * F::bits);
      from = part;
    }
    if constexpr (is_whole) {
      words = load_bits<vwords>(from);
    } else {
      uchar spread[count];
      for (int i = 0; i < count; i += 32) {
        const auto bytes = Codes<F::bits, 32>::read(from + i / 8 * F::bits);
        __builtin_memcpy(spread + i, &bytes, 32);
      }
      words = load_bits<vwords>(spread);
    }
  }

  // Code j of each word.
  vwords part(int j) const {
    const vwords shifted = words >> (unsigned short)(j * bits);
    return IntegerLevels<F>::of(j == each - 1 ? shifted : shifted & (unsigned short)((1 << bits) - 1));
  }
};

template <typename F, int ROWS>
struct ShortRows : IntegerLevels<F> {
  typedef CodeWords<F> Codes;
  static constexpr int each = Codes::each, count = Codes::count;
  static constexpr int run = 2 * each;  // codes that one lane of sums covers
  static constexpr long block_bytes = 2 * count + 4 * lanes;  // words of x [each][2 * lanes], a scale a lane
  static constexpr long bytes(long columns) { return ceil_div(columns, count) * block_bytes; }

  static void stage(char* to, const float* group, long k) {
    float most = 0;
    for (int i = 0; i < F::group; ++i) most = larger(most, __builtin_fabsf(group[i]));
    const float scale = most / 32767, factor = most > 0 ? 32767 / most : 0;
    for (int i = 0; i < F::group; ++i) {
      char* block = to + (k + i) / count * block_bytes;
      const int place = (k + i) % count;
      reinterpret_cast<short*>(block)[place % each * 2 * lanes + place / each] =
          short(__builtin_roundevenf(group[i] * factor));
      if (place % run == 0) reinterpret_cast<float*>(block + 2 * count)[place / run] = scale;
    }
  }

  template <int R>
  static void multiply(vfloat (&sums)[R][ROWS], const char* x, const uchar* const (&codes)[R], const float* scales,
                       long apart, long columns) {
    const long row_bytes = bytes(columns);
    for (long k = 0; k < columns; k += count, x += block_bytes) {
#pragma clang loop unroll(full)
      for (int r = 0; r < R; ++r) {
        const Codes words(codes[r], k, columns - k);
        vwords parts[each];
#pragma clang loop unroll(full)
        for (int j = 0; j < each; ++j) parts[j] = words.part(j);
        const vfloat scale = spread(scales + r * apart + k / F::group);
#pragma clang loop unroll(full)
        for (int m = 0; m < ROWS; ++m) {
          const char* block = x + m * row_bytes;
          vint sum = pair_sums(parts[0], load_bits<vshorts>(block));
#pragma clang loop unroll(full)
          for (int j = 1; j < each; ++j) sum += pair_sums(parts[j], load_bits<vshorts>(block + j * 4 * lanes));
          const vfloat factor = load(reinterpret_cast<const float*>(block + 2 * count)) * scale;
          sums[r][m] += __builtin_convertvector(sum, vfloat) * factor;
        }
      }
    }
  }

 private:
  // The scales of a register's groups, each in the lanes of its group.
  static vfloat spread(const float* scales) {
    if constexpr (F::group >= count) return vfloat(*scales);
    else return spread(load(scales), __make_integer_seq<Order, int, lanes>());
  }
  template <typename Index, Index... Lane> struct Order {};
  template <int... Lane>
  static vfloat spread(vfloat scales, Order<int, Lane...>) {
    return __builtin_shufflevector(scales, scales, (Lane * run / F::group)...);
  }
};

template <typename F, int ROWS> struct PackedRows<bfloat, F, ROWS> { typedef ShortRows<F, ROWS> type; };
template <typename F, int ROWS> struct PackedRows<half, F, ROWS> { typedef ShortRows<F, ROWS> type; };
template <int ROWS> struct PackedRows<bfloat, Mxfp8, ROWS> { typedef FloatRows<Mxfp8, ROWS> type; };
template <int ROWS> struct PackedRows<half, Mxfp8, ROWS> { typedef FloatRows<Mxfp8, ROWS> type; };

}  // namespace metile

#endif
