// Codes of quantized weights: some of a row side by side, from where they lie to values of the dtype of x.
#pragma once

// The level of a code, plus `level_above`. Integers become the highest bits of a float's fraction, 4 bits part of its
// second byte; floats are put where those of 32 bits have theirs, and multiplied by the difference of the exponents'
// biases: exact, subnormal ones too.
inline constexpr int raised_bits(int bits) { return bits == 4 ? 7 : bits; }
template <typename F>
inline constexpr float level_above() { return F::is_integer ? float(1 << raised_bits(F::bits)) : 0.0f; }
template <int BITS, int GROUP>
inline float raised_level(Affine<BITS, GROUP>, uint code) {
  constexpr int bits = raised_bits(BITS);
  return float_of_code(uint(127 + bits) << 23 | code << (23 - bits));
}
inline float exact_e2m1(uint code) {
  return float_of_code((code & 8) << 28 | (code & 7) << 22) * float_of_code(253u << 23);
}
inline float raised_level(Mxfp4, uint code) { return exact_e2m1(code); }
inline float raised_level(Nvfp4, uint code) { return exact_e2m1(code); }
inline float raised_level(Mxfp8, uint code) {
  return float_of_code((code & 128) << 24 | (code & 127) << 20) * float_of_code(247u << 23);
}

// Codes of 4 bits, in two halves of a register, as values of 16 bits: level * scale + bias, rounded once. They stand in
// the lowest bits of the halves, or in the next where HIGH. The bits of a bfloat below 2^-125 count 2^-133 each.
template <bool HIGH, int GROUP>
inline uint scaled_pair(Affine<4, GROUP>, Bfloat, uint word, uint scale, uint bias) {  // scale is times 64
  const uint code = word & (HIGH ? 0x00f000f0u : 0x000f000fu);
  return fused(Bfloat(), fused(Bfloat(), code, HIGH ? 0x7d007d00u : 0x7f007f00u, 0x80008000u), scale, bias);
}
template <bool HIGH, int GROUP>
inline uint scaled_pair(Affine<4, GROUP>, Half, uint word, uint scale, uint bias) {  // by way of 1024 + code
  const uint raised = word & (HIGH ? 0x00f000f0u : 0x000f000fu) | 0x64006400u;
  const uint code = fused(Half(), raised, HIGH ? 0x2c002c00u : 0x3c003c00u, HIGH ? 0xd400d400u : 0xe400e400u);
  return fused(Half(), code, scale, bias);
}
template <bool HIGH, typename F>
inline uint scaled_pair(F, Bfloat, uint word, uint scale, uint) {  // e2m1, times 2^126
  const uint sign = HIGH ? word << 8 : word << 12, size = HIGH ? word << 2 : word << 6;
  const uint placed = sign & 0x80008000u | size & 0x01c001c0u;
  return fused(Bfloat(), fused(Bfloat(), placed, 0x7e807e80u, 0x80008000u), scale, 0x80008000u);
}

// A scale in both halves of a register, as those take it.
template <typename F, typename T>
inline uint scale_pair(F, T scale) { return scale.bits * 0x10001u; }
template <int GROUP>
inline uint scale_pair(Affine<4, GROUP>, Bfloat scale) {
  return fused(Bfloat(), scale.bits * 0x10001u, 0x42804280u, 0x80008000u);
}
template <typename F>
inline uint scale_pair(F, uchar scale) { return (bits_of_float(F::scale(scale)) >> 16) * 0x10001u; }

inline constexpr bool is_bfloat(Bfloat) { return true; }
template <typename T>
inline constexpr bool is_bfloat(T) { return false; }

// Words before column k of a row of codes; k is a multiple of what a word or two of them hold.
template <typename F>
inline constexpr uint code_words(Index k) { return uint(k) / 8 * F::bits / 4; }

// COUNT codes, and what they are scaled by, as they lie in memory.
template <typename T, typename F, int COUNT>
struct Chunk {
  typedef typename F::template Scale<T> Scale;
  static constexpr int words_held = COUNT * F::bits / 32, at_once = words_held % 4 == 0 ? 4 : 2 - words_held % 2;
  static constexpr int groups = F::group < COUNT ? COUNT / F::group : 1;
  static constexpr bool paired = F::bits == 4 && (is_bfloat(T()) || F::is_integer && !is_float(T()));
  static_assert(COUNT * F::bits % 32 == 0, "whole words of codes");
  uint codes[words_held];
  Scale scales[groups];
  T biases[groups];

  // Those `ahead` of k, whole groups, of the row whose words and groups begin at `first_word` and `first_group`; zero
  // from column `end` on. WHOLE if the words can be moved at_once.
  template <bool WHOLE, bool ONCE>
  inline void load(const PackedMatrix<T, F>& w, uint first_word, uint first_group, Index k, int ahead, Index end) {
    const uint* from = w.codes.data + (first_word + code_words<F>(k)) + code_words<F>(ahead);
    const Index left = end - k - ahead;
#pragma unroll
    for (int i = 0; i < words_held; i += at_once) load_run<WHOLE, ONCE>(codes + i, from + i, left - i * 32 / F::bits);
    const uint place = first_group + uint(k) / F::group;
    const Scale* own_scales = w.scales.data + place + ahead / F::group;
    const T* own_biases = w.biases.data + place + ahead / F::group;
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const bool inside = g * F::group < left;
      scales[g] = inside ? own_scales[g] : Scale();
      if (F::is_biased) biases[g] = inside ? own_biases[g] : T();
    }
  }

  inline uint code(int i) const {
    const int word = i * F::bits / 32, shift = i * F::bits % 32;
    uint bits = codes[word] >> shift;
    if (shift + F::bits > 32) bits |= codes[word + 1 < words_held ? word + 1 : word] << (32 - shift);
    return bits & ((1u << F::bits) - 1);
  }
  inline float scale(int i) const { return F::scale(scales[i / F::group % groups]); }
  inline float bias(int i) const { return F::is_biased ? float(biases[i / F::group % groups]) : 0.0f; }
  inline float value(int i) const {
    return (raised_level(F(), code(i)) - level_above<F>()) * scale(i) + bias(i);
  }

  // Eight levels from code `first` on, each plus level_above.
  inline void levels(float (&to)[8], int first) const {
    if constexpr (F::bits == 4 && F::is_integer) {
      const uint word = codes[first / 8], even = word & 0x0f0f0f0fu, odd = word >> 4 & 0x0f0f0f0fu;
#pragma unroll
      for (int i = 0; i < 8; ++i)  // 0x43, the byte, and two of zero
        to[i] = float_of_code(picked_bytes(i % 2 ? odd : even, 0x43000000u, 0x7044u | uint(i / 2) << 8));
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i) to[i] = raised_level(F(), code(first + i));
    }
  }

  // 16 bytes of values.
  inline Words words(int step) const {
    Words to;
    if constexpr (paired) {  // codes come apart as (c0, c4), (c1, c5), ..
      const int group = step * 8 / F::group % groups;
      const uint word = codes[step], scale = scale_pair(F(), scales[group]);
      uint bias = 0;
      if constexpr (F::is_biased) bias = biases[group].bits * 0x10001u;
      const uint pairs[4] = {
          scaled_pair<false>(F(), T(), word, scale, bias), scaled_pair<true>(F(), T(), word, scale, bias),
          scaled_pair<false>(F(), T(), word >> 8, scale, bias), scaled_pair<true>(F(), T(), word >> 8, scale, bias)};
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        to.at[j] = picked_bytes(pairs[2 * j], pairs[2 * j + 1], 0x5410);
        to.at[2 + j] = picked_bytes(pairs[2 * j], pairs[2 * j + 1], 0x7632);
      }
    } else {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if constexpr (is_float(T())) to.at[j] = bits_of_float(value(step * 4 + j));
        else to.at[j] = packed(T(), value(step * 8 + 2 * j), value(step * 8 + 2 * j + 1));
      }
    }
    return to;
  }

 private:
  template <bool WHOLE, bool ONCE>
  static inline void load_run(uint* to, const uint* from, Index left) {
    const bool inside = left > 0;
    if constexpr (WHOLE && at_once == 4) {
      const Words all = inside ? ONCE ? load_once(from) : load_again(from) : Words{{0, 0, 0, 0}};
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = all.at[i];
    } else if constexpr (WHOLE && at_once == 2) {
      const Run<uint, 2> all = inside ? *(const Run<uint, 2>*)from : Run<uint, 2>{{0, 0}};
      to[0] = all.at[0], to[1] = all.at[1];
    } else {
#pragma unroll
      for (int i = 0; i < at_once; ++i) to[i] = i * 32 / F::bits < left ? from[i] : 0;
    }
  }
};
