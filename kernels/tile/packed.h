// Quantized weights as MLX keeps them. A code takes `bits` bits of a row, from the low bit up, so that 8 codes are
// `bits` bytes; `group` codes side by side share a scale, and a bias where the format has one:
// weight = level(code) * scale + bias.
#pragma once

inline float float_of_code(uint bits) { return float_of_bits(int(bits)); }

// Eight bits: sign, four of exponent, three of mantissa.
inline float level_e4m3(uint code) {
  const uint size = code & 127;
  const float value = size < 8 ? float(size) * 0.001953125f : float_of_code((size + 960) << 20);
  return code & 128 ? -value : value;
}

// Eight bits of exponent.
inline float level_e8m0(uint code) { return float_of_code(code == 0 ? 0x00400000u : code << 23); }

template <int BITS, int GROUP>
struct Affine {
  static constexpr constant int bits = BITS, group = GROUP;
  static constexpr constant bool is_biased = true, is_integer = true;
  template <typename T> using Scale = T;
  template <typename S> static inline float scale(S stored) { return float(stored); }
};

// Levels that are small floats, and a byte for a scale.
template <int BITS, int GROUP>
struct BlockScaled {
  static constexpr constant int bits = BITS, group = GROUP;
  static constexpr constant bool is_biased = false, is_integer = false;
  template <typename T> using Scale = uchar;
  static inline float scale(uint stored) { return level_e8m0(stored); }
};
struct Mxfp4 : BlockScaled<4, 32> {};  // levels of two bits of exponent and one of mantissa
struct Mxfp8 : BlockScaled<8, 32> {};  // of four and three
struct Nvfp4 : BlockScaled<4, 16> {    // as Mxfp4
  static inline float scale(uint stored) { return level_e4m3(stored); }
};

template <typename T, typename F>
struct PackedMatrix {  // [rows, columns], columns a multiple of the group
  Matrix<const device uint> codes;                            // [rows, columns * bits / 32]
  Matrix<const device typename F::template Scale<T>> scales;  // [rows, columns / group]
  Matrix<const device T> biases;                              // the same, where the format has them
  Index rows, columns;

  inline float scale(Index n, Index k) const { return F::scale(scales.row(n)[k / F::group]); }
  inline float bias(Index n, Index k) const { return F::is_biased ? float(biases.row(n)[k / F::group]) : 0.0f; }
};

template <typename T, typename F, typename A, typename B>
inline PackedMatrix<T, F> packed_matrix(A codes, B scales) {
  PackedMatrix<T, F> w;
  w.codes = matrix_of<const device uint>(codes);
  w.scales = matrix_of<const device typename F::template Scale<T>>(scales);
  w.rows = w.codes.rows;
  w.columns = w.codes.columns * 32 / F::bits;
  return w;
}
template <typename T, typename F, typename A, typename B, typename C>
inline PackedMatrix<T, F> packed_matrix(A codes, B scales, C biases) {
  PackedMatrix<T, F> w = packed_matrix<T, F>(codes, scales);
  w.biases = matrix_of<const device T>(biases);
  return w;
}

// The elements of a weight matrix: T itself, or T as format F packs it.
template <typename T, typename F> struct Packed {};

template <typename E>
struct Operand {
  typedef E element;  // of x and y beside it
  typedef Matrix<const device E> matrix;
};
template <typename T, typename F>
struct Operand<Packed<T, F>> {
  typedef T element;
  typedef PackedMatrix<T, F> matrix;
};
template <typename E> using ElementOf = typename Operand<E>::element;
template <typename E> using WeightsOf = typename Operand<E>::matrix;
