// What the CPU kernels are held against: a streaming read, and the multiply-accumulate unit fed from its registers.
#pragma once

constexpr long streams = 4, ahead = 1024;  // read at once; bytes asked for beforehand: both made it faster

// The exclusive or of chunk `group.index` of all words of `data`: every byte is loaded once, nothing else is done.
inline void stream_read(Matrix<const device bfloat> data, long chunk, device uint* words, Group group) {
  constexpr long width = sizeof(vuint), turn = 2 * width;
  const long first = long(group.index) * chunk;
  const long count = min_of(data.rows * data.columns * long(sizeof(bfloat)) - first, chunk);
  const char* bytes = reinterpret_cast<const char*>(data.data) + first;
  const long part = count == chunk ? chunk / streams : 0;  // the ragged last chunk is read word by word
  vuint parts[streams][2] = {};
  for (long at = 0; at < part; at += turn)
#pragma clang loop unroll(full)
    for (int s = 0; s < streams; ++s) {
      const char* from = bytes + s * part + at;
      for (int byte = 0; byte < turn; byte += 64) __builtin_prefetch(from + ahead + byte, 0, 2);
      for (int i = 0; i < 2; ++i) parts[s][i] ^= metile::load_bits<vuint>(from + i * width);
    }
  uint word = 0;
  for (long at = streams * part; at + long(sizeof(uint)) <= count; at += sizeof(uint))
    word ^= metile::load_bits<uint>(bytes + at);
  for (int s = 0; s < streams; ++s)
    for (int lane = 0; lane < metile::lanes; ++lane) word ^= parts[s][0][lane] ^ parts[s][1][lane];
  words[group.index] = word;
}

#if METILE_ISA_AMX

constexpr int peak_results = 6 * 256;

// Six accumulator tiles += one tile of x . another, `steps` times.
template <int CHAINS>
inline void multiply_peak(Matrix<const device bfloat> x, long steps, device float* y) {
  __builtin_ia32_tileloadd64(6, x.data, 64);
  __builtin_ia32_tileloadd64(7, x.data + 512, 64);
  __builtin_ia32_tilezero(0);
  __builtin_ia32_tilezero(1);
  __builtin_ia32_tilezero(2);
  __builtin_ia32_tilezero(3);
  __builtin_ia32_tilezero(4);
  __builtin_ia32_tilezero(5);
  for (long step = 0; step < steps; ++step) {
    __builtin_ia32_tdpbf16ps(0, 6, 7);
    __builtin_ia32_tdpbf16ps(1, 6, 7);
    __builtin_ia32_tdpbf16ps(2, 6, 7);
    __builtin_ia32_tdpbf16ps(3, 6, 7);
    __builtin_ia32_tdpbf16ps(4, 6, 7);
    __builtin_ia32_tdpbf16ps(5, 6, 7);
  }
  __builtin_ia32_tilestored64(0, y, 64);
  __builtin_ia32_tilestored64(1, y + 256, 64);
  __builtin_ia32_tilestored64(2, y + 512, 64);
  __builtin_ia32_tilestored64(3, y + 768, 64);
  __builtin_ia32_tilestored64(4, y + 1024, 64);
  __builtin_ia32_tilestored64(5, y + 1280, 64);
}

#else

constexpr int peak_results = metile::lanes;

// CHAINS accumulators += x . x, `steps` times; their sum is the result.
template <int CHAINS>
inline void multiply_peak(Matrix<const device bfloat> x, long steps, device float* y) {
  typedef metile::LaneUnit<bfloat> Lane;
  const typename Lane::vector a = Lane::weights(x.data), b = Lane::weights(x.data + 512);
  vfloat sums[CHAINS];
  for (int i = 0; i < CHAINS; ++i) sums[i] = vfloat(float(i));  // all different, or one chain would do
  for (long step = 0; step < steps; ++step)
#pragma clang loop unroll(full)
    for (int i = 0; i < CHAINS; ++i) sums[i] = metile::lane_step(sums[i], a, b);
  for (int i = 1; i < CHAINS; ++i) sums[0] += sums[i];
  store(y, sums[0]);
}

#endif
