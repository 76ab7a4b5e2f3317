// What one thread holds of a row: a float, or two or four side by side. Loads and stores of every dtype.
#pragma once

template <int N>
struct Floats {
  static constexpr int count = N;
  float at[N];
  Floats() = default;
  inline explicit Floats(float value) {
#pragma unroll
    for (int i = 0; i < N; ++i) at[i] = value;
  }
  inline Floats& operator+=(Floats other) { return *this = *this + other; }
};

#define METILE_OPERATOR(symbol, value)                          \
  template <int N>                                              \
  inline Floats<N> operator symbol(Floats<N> a, Floats<N> b) {  \
    Floats<N> to;                                               \
    _Pragma("unroll") for (int i = 0; i < N; ++i) {             \
      const float x = a.at[i], y = b.at[i];                     \
      to.at[i] = value;                                         \
    }                                                           \
    return to;                                                  \
  }                                                             \
  template <int N>                                              \
  inline Floats<N> operator symbol(Floats<N> a, float b) { return a symbol Floats<N>(b); } \
  template <int N>                                              \
  inline Floats<N> operator symbol(float a, Floats<N> b) { return Floats<N>(a) symbol b; }
METILE_OPERATOR(+, x + y)
METILE_OPERATOR(-, x - y)
METILE_OPERATOR(*, x * y)
METILE_OPERATOR(/, quotient(x, y))
#undef METILE_OPERATOR

template <int N>
inline Floats<N> operator-(Floats<N> a) { return Floats<N>(0.0f) - a; }

template <int N>
inline Floats<N> exponential(Floats<N> x) {
#pragma unroll
  for (int i = 0; i < N; ++i) x.at[i] = exponential(x.at[i]);
  return x;
}

// The value as dtype T holds it, back as floats.
template <typename T>
inline float round_to(float value) { return float(T(value)); }
template <typename T, int N>
inline Floats<N> round_to(Floats<N> value) {
#pragma unroll
  for (int i = 0; i < N; ++i) value.at[i] = round_to<T>(value.at[i]);
  return value;
}

inline float& element(float& value, int) { return value; }
template <int N>
inline float& element(Floats<N>& value, int i) { return value.at[i]; }

template <typename F>
struct Count {
  static constexpr int value = F::count;
};
template <>
struct Count<float> {
  static constexpr int value = 1;
};

// Elements that are moved at once, if they lie side by side at a multiple of their size.
template <typename T, int N>
struct alignas(sizeof(T) * N) Run {
  T at[N];
};
template <typename T, int N>
inline bool is_run(const T* of, Index count, long long step) {
  return N > 1 && count >= N && step == 1 && (unsigned long long)of % sizeof(Run<T, N>) == 0;
}

// Elements past `count` read zero.
template <typename F, typename T>
inline F load(const T* from, Index count, long long step = 1) {
  constexpr int n = Count<F>::value;
  F value = F(0.0f);
  if (is_run<T, n>(from, count, step)) {
    const Run<T, n> run = *(const Run<T, n>*)from;
#pragma unroll
    for (int i = 0; i < n; ++i) element(value, i) = float(run.at[i]);
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i < count) element(value, i) = float(from[i * step]);
  }
  return value;
}

template <typename F, typename T>
inline void store(T* to, F value, Index count, long long step = 1) {
  constexpr int n = Count<F>::value;
  if (is_run<T, n>(to, count, step)) {
    Run<T, n> run;
#pragma unroll
    for (int i = 0; i < n; ++i) run.at[i] = T(element(value, i));
    *(Run<T, n>*)to = run;
  } else {
#pragma unroll
    for (int i = 0; i < n; ++i)
      if (i < count) to[i * step] = T(element(value, i));
  }
}

// 16 bytes as floats.
template <typename T>
inline void unpack(T, float (&to)[8], Words words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    to[2 * i] = unpacked_low(T(), words.at[i]);
    to[2 * i + 1] = unpacked_high(T(), words.at[i]);
  }
}
inline void unpack(float, float (&to)[4], Words words) {
#pragma unroll
  for (int i = 0; i < 4; ++i) to[i] = float_of_bits(int(words.at[i]));
}

// 16 bytes of a row from `from` on, an element at a time, zero past `count` elements.
template <typename T>
inline Words gathered_words(const T* from, Index count, long long step) {
  constexpr int held = Held<T>::count;
  union {
    Words words;
    ushort shorts[8];
    uint bits[4];
  } to;
  to.words = Words{{0, 0, 0, 0}};
#pragma unroll
  for (int i = 0; i < held; ++i)
    if (i < count) {
      if constexpr (sizeof(T) == 2) to.shorts[i] = *(const ushort*)(from + i * step);
      else to.bits[i] = *(const uint*)(from + i * step);
    }
  return to.words;
}

// 16 bytes of a row from `from` on, zero past `count` elements; `whole` if they can be moved at once.
template <bool ONCE, typename T>
inline Words load_words(const T* from, Index count, long long step, bool whole) {
  if (count <= 0) return Words{{0, 0, 0, 0}};
  if (!whole) return gathered_words(from, count, step);
  return ONCE ? load_once(from) : load_again(from);
}
