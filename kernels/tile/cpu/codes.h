// Codes of quantized weights: from their bits to levels in vector lanes, and to whole rows of weights.
#pragma once

namespace metile {

// COUNT codes of BITS bits, whole bytes of them, one to a byte.
template <int BITS, int COUNT>
struct Codes {
  typedef uchar Bytes __attribute__((ext_vector_type(COUNT)));

  static Bytes read(const uchar* from) {
    unsigned long spread[COUNT / 8];
#pragma clang loop unroll(full)
    for (int i = 0; i < COUNT / 8; ++i) {
      unsigned long bits = 0;
      __builtin_memcpy(&bits, from + i * BITS, BITS);
      spread[i] = to_bytes(bits);
    }
    return load_bits<Bytes>(spread);
  }

 private:
  static unsigned long to_bytes(unsigned long bits) {  // of a little-endian machine, as all here are
    constexpr unsigned long mask = (1ul << BITS) - 1;
#if defined(__BMI2__)
    return __builtin_ia32_pdep_di(bits, mask * 0x0101010101010101ul);
#else
    unsigned long bytes = 0;
#pragma clang loop unroll(full)
    for (int j = 0; j < 8; ++j) bytes |= (bits >> j * BITS & mask) << 8 * j;
    return bytes;
#endif
  }
};

template <int COUNT>
struct Codes<8, COUNT> {
  typedef uchar Bytes __attribute__((ext_vector_type(COUNT)));
  static Bytes read(const uchar* from) { return load_bits<Bytes>(from); }
};

template <int COUNT>
struct Codes<4, COUNT> {
  typedef uchar Bytes __attribute__((ext_vector_type(COUNT)));
  typedef uchar Half __attribute__((ext_vector_type(COUNT / 2)));

  static Bytes read(const uchar* from) {
    const Half pairs = load_bits<Half>(from);
    return interleave(pairs & 15, pairs >> 4, __make_integer_seq<Order, int, COUNT>());
  }

 private:
  template <typename Index, Index... Lane> struct Order {};
  template <int... Lane>
  static Bytes interleave(Half even, Half odd, Order<int, Lane...>) {
    return __builtin_shufflevector(even, odd, (Lane / 2 + Lane % 2 * COUNT / 2)...);
  }
};

// Levels of codes in vector lanes.
template <typename F>
inline vfloat levels(F, vuint codes) { return __builtin_convertvector(codes, vfloat); }
inline vfloat levels_e2m1(vuint codes) {
  const vuint size = codes & 7, sign = (codes & 8) << 28;
  return __builtin_bit_cast(vfloat, sign | (size < 2 ? size * 0x3F000000u : (size + 252) << 22));
}
inline vfloat levels(Mxfp4, vuint codes) { return levels_e2m1(codes); }
inline vfloat levels(Nvfp4, vuint codes) { return levels_e2m1(codes); }
inline vfloat levels(Mxfp8, vuint codes) {
  const vuint size = codes & 127;
  const vfloat small = __builtin_convertvector(size, vfloat) * 0.001953125f;
  const vuint bits = size < 8 ? __builtin_bit_cast(vuint, small) : (size + 960) << 20;
  return __builtin_bit_cast(vfloat, bits | (codes & 128) << 24);
}

// The codes of a row that share a scale, as many as are taken at once.
template <typename F>
struct Chunk {
  static constexpr int count = F::group < 32 ? F::group : 32, registers = count / lanes;
  typedef Codes<F::bits, count> Reader;
  typename Reader::Bytes bytes;

  explicit Chunk(const uchar* row, long k) : bytes(Reader::read(row + k / 8 * F::bits)) {}

  vfloat level(int i) const {
    typedef uchar Part __attribute__((ext_vector_type(METILE_LANES)));
    Part part;
    __builtin_memcpy(&part, reinterpret_cast<const uchar*>(&bytes) + i * lanes, sizeof part);
    return levels(F(), __builtin_convertvector(part, vuint));
  }
};

template <typename T, typename F>
inline const uchar* code_row(const PackedMatrix<T, F>& w, long n) {
  return reinterpret_cast<const uchar*>(w.codes.row(n));
}

inline void put_units(float* to, const vfloat* values, int count) {
  for (int i = 0; i < count; ++i) store(to + i * lanes, values[i]);
}
inline void put_units(uint* to, const vfloat* values, int count) {
  for (int i = 0; i < count; ++i) store(reinterpret_cast<bfloat*>(to) + i * lanes, values[i]);
}

// Weights n .. n+TN over k .. k+depth as units, zero-filled to whole rows and steps, `stride` units apart.
template <int TN, typename T, typename F, typename U>
inline void unpack_weights(U* to, long stride, const PackedMatrix<T, F>& w, long n, long k, long depth) {
  typedef Chunk<F> Part;
  constexpr int width = Unit<T>::width;
  for (int i = 0; i < TN; ++i, to += stride) {
    if (n + i >= w.rows) {
      __builtin_memset(to, 0, stride * sizeof(U));
      continue;
    }
    const uchar* row = code_row(w, n + i);
    long at = 0;
    for (; at < depth; at += Part::count) {
      const Part part(row, k + at);
      const vfloat scale = vfloat(w.scale(n + i, k + at)), bias = vfloat(w.bias(n + i, k + at));
      vfloat values[Part::registers];
      for (int r = 0; r < Part::registers; ++r) values[r] = part.level(r) * scale + bias;
      put_units(to + at / width, values, Part::registers);
    }
    for (; at < stride * width; at += lanes) put_units(to + at / width, (const vfloat[]){vfloat(0)}, 1);
  }
}

}  // namespace metile
