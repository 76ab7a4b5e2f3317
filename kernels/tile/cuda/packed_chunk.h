// Codes of quantized weights: some of a row side by side, from where they lie to values of the dtype of x.
#pragma once

// The level of a code, plus `level_above`. Integers become the low bits of a float of 2^bits; floats are put where those
// of 32 bits have theirs, and multiplied by the difference of the exponents' biases: exact, subnormal ones too.
template <typename F>
inline constexpr float level_above() { return F::is_integer ? float(1 << F::bits) : 0.0f; }
template <int BITS, int GROUP>
inline float raised_level(Affine<BITS, GROUP>, uint code) {
  return float_of_code(uint(127 + BITS) << 23 | code << (23 - BITS));
}
inline float exact_e2m1(uint code) {
  return float_of_code((code & 8) << 28 | (code & 7) << 22) * float_of_code(253u << 23);
}
inline float raised_level(Mxfp4, uint code) { return exact_e2m1(code); }
inline float raised_level(Nvfp4, uint code) { return exact_e2m1(code); }
inline float raised_level(Mxfp8, uint code) {
  return float_of_code((code & 128) << 24 | (code & 127) << 20) * float_of_code(247u << 23);
}

// Two codes of 4 bits in the halves of a register, as values of 16 bits: level * scale + bias, rounded once.
template <int GROUP>
inline uint scaled_pair(Affine<4, GROUP>, Bfloat, uint codes, uint scale, uint bias) {
  const uint raised = codes & 0x000f000fu | 0x43004300u;  // 128 + code
  return fused(Bfloat(), fused(Bfloat(), raised, 0x3f803f80u, 0xc300c300u), scale, bias);
}
template <int GROUP>
inline uint scaled_pair(Affine<4, GROUP>, Half, uint codes, uint scale, uint bias) {
  const uint raised = codes & 0x000f000fu | 0x64006400u;  // 1024 + code
  return fused(Half(), fused(Half(), raised, 0x3c003c00u, 0xe400e400u), scale, bias);
}
template <typename F>
inline uint scaled_pair(F, Bfloat, uint codes, uint scale, uint) {  // e2m1, times 2^126
  const uint placed = (codes & 0x00080008u) << 12 | (codes & 0x00070007u) << 6;
  return fused(Bfloat(), fused(Bfloat(), placed, 0x7e807e80u, 0x80008000u), scale, 0x80008000u);
}

inline constexpr bool is_bfloat(Bfloat) { return true; }
template <typename T>
inline constexpr bool is_bfloat(T) { return false; }

// A value of 16 bits in both halves of a register.
template <typename T>
inline uint twice(T value) { return value.bits * 0x10001u; }
inline uint twice(float value) { return (bits_of_float(value) >> 16) * 0x10001u; }  // as bfloat, which holds it

inline uint low_halves(uint a, uint b) { return a & 0xffffu | b << 16; }
inline uint high_halves(uint a, uint b) { return a >> 16 | b & 0xffff0000u; }

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

  // Of the row whose words and groups begin at `first_word` and `first_group`; zero from column `end` on. WHOLE if the
  // words can be moved at_once.
  template <bool WHOLE, bool ONCE>
  inline void load(const PackedMatrix<T, F>& w, uint first_word, uint first_group, Index k, Index end) {
    const uint* from = w.codes.data + (first_word + code_words<F>(k));
#pragma unroll
    for (int i = 0; i < words_held; i += at_once) {
      const bool inside = F::group < COUNT ? k + i * 32 / F::bits < end : k < end;
      load_run<WHOLE, ONCE>(codes + i, from + i, inside, k + i * 32 / F::bits, end);
    }
#pragma unroll
    for (int g = 0; g < groups; ++g) {
      const bool inside = k + g * F::group < end;
      const uint place = first_group + uint(k) / F::group + g;
      scales[g] = inside ? w.scales.data[place] : Scale();
      if (F::is_biased) biases[g] = inside ? w.biases.data[place] : T();
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

  // 16 bytes of values.
  inline Words words(int step) const {
    Words to;
    if constexpr (paired) {  // codes come apart as (c0, c4), (c1, c5), ..
      const int group = step * 8 / F::group % groups;
      uint scale, bias = 0, pairs[4];
      if constexpr (F::is_biased) scale = twice(scales[group]), bias = twice(biases[group]);
      else scale = twice(F::scale(scales[group]));
#pragma unroll
      for (int j = 0; j < 4; ++j) pairs[j] = scaled_pair(F(), T(), codes[step] >> 4 * j, scale, bias);
#pragma unroll
      for (int j = 0; j < 4; j += 2) {
        to.at[j / 2] = low_halves(pairs[j], pairs[j + 1]);
        to.at[2 + j / 2] = high_halves(pairs[j], pairs[j + 1]);
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
  static inline void load_run(uint* to, const uint* from, bool inside, Index k, Index end) {
    if constexpr (WHOLE && at_once == 4) {
      const Words all = inside ? ONCE ? load_once(from) : load_again(from) : Words{{0, 0, 0, 0}};
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i] = all.at[i];
    } else if constexpr (WHOLE && at_once == 2) {
      const Run<uint, 2> all = inside ? *(const Run<uint, 2>*)from : Run<uint, 2>{{0, 0}};
      to[0] = all.at[0], to[1] = all.at[1];
    } else {
#pragma unroll
      for (int i = 0; i < at_once; ++i) to[i] = inside && k + i * 32 / F::bits < end ? from[i] : 0;
    }
  }
};
