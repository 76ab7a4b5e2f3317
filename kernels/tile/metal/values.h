// What one thread holds of a row: a float, or two or four side by side. Loads and stores of every dtype.
#pragma once

template <typename F> struct Held;
template <> struct Held<float> { static constexpr constant int count = 1; };
template <> struct Held<float2> { static constexpr constant int count = 2; };
template <> struct Held<float4> { static constexpr constant int count = 4; };

template <typename T> inline void put(thread float& value, int, T element) { value = float(element); }
template <typename T> inline void put(thread float2& value, int i, T element) { value[i] = float(element); }
template <typename T> inline void put(thread float4& value, int i, T element) { value[i] = float(element); }
inline float get(float value, int) { return value; }
inline float get(float2 value, int i) { return value[i]; }
inline float get(float4 value, int i) { return value[i]; }

// Elements past `count` read zero.
template <typename F, typename T>
inline F load(const device T* from, Index count, long step = 1) {
  F value = F(0);
#pragma unroll
  for (int i = 0; i < Held<F>::count; ++i)
    if (i < count) put(value, i, from[i * step]);
  return value;
}

template <typename F, typename T>
inline void store(device T* to, F value, Index count, long step = 1) {
#pragma unroll
  for (int i = 0; i < Held<F>::count; ++i)
    if (i < count) to[i * step] = T(get(value, i));
}

// The value as dtype T holds it, back as floats.
template <typename T> inline float round_to(float value) { return float(T(value)); }
template <typename T> inline float2 round_to(float2 value) { return float2(round_to<T>(value.x), round_to<T>(value.y)); }
template <typename T> inline float4 round_to(float4 value) {
  return float4(round_to<T>(value.x), round_to<T>(value.y), round_to<T>(value.z), round_to<T>(value.w));
}

template <typename F> inline F exponential(F x) { return exp(x); }
inline float reciprocal_root(float x) { return precise::rsqrt(x); }
inline float float_of_bits(int bits) { return as_type<float>(bits); }
