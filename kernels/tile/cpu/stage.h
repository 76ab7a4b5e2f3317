// Staging: a block of x in threadgroup memory, repacked so that one register holds one position of k for as many rows
// as it has lanes. Layout: [panel of `lanes` rows][k unit][lane]. A unit is what one multiply-accumulate step takes
// from each row: a float, or a pair of bfloats where the machine multiplies pairs.
#pragma once

namespace metile {

template <typename T>
struct Unit {
  typedef float type;
  static constexpr int width = 1;  // elements of k a unit covers
};
#if METILE_ISA_AMX || METILE_ISA_AVX512_BF16
template <>
struct Unit<bfloat> {
  typedef uint type;
  static constexpr int width = 2;
};
#endif

inline vfloat load_units(const bfloat* from, long count, uint*) {  // `count` elements, zero-filled to whole pairs
  if (count >= 2 * lanes) return load_bits<vfloat>(from);
  bfloat part[2 * lanes] = {};
  for (long i = 0; i < count; ++i) part[i] = from[i];
  return load_bits<vfloat>(part);
}
template <typename T>
inline vfloat load_units(const T* from, long count, float*) { return load(from, count); }

}  // namespace metile

// x[m0 : m0+BM, k0 : k0+depth] in threadgroup memory at `offset`. Blocks that follow each other on a thread and
// share it load it once. The depth is that of the launch, whatever DEPTH says.
template <typename T, int BM, int DEPTH>
struct Stage {
  typedef typename metile::Unit<T>::type unit;
  static constexpr int width = metile::Unit<T>::width;
  static constexpr int step = width * metile::lanes;  // depth is padded to whole squares
  static constexpr int panels = BM / metile::lanes;
  unit* memory;
  long units;  // k units a panel holds

  static constexpr long bytes(long depth) { return BM * round_up(depth, step) / width * long(sizeof(unit)); }

  void load(const Group& group, long offset, Matrix<const T> x, long m0, long k0, long depth) {
    memory = group.memory<unit>(offset);
    units = round_up(depth, step) / width;
    unsigned long* tag = group.scratch->tag;
    const unsigned long held[3] = {(unsigned long)x.data, (unsigned long)m0, (unsigned long)k0};
    if (tag[0] == held[0] && tag[1] == held[1] && tag[2] == held[2]) return;
    tag[0] = held[0], tag[1] = held[1], tag[2] = held[2];
    for (int panel = 0; panel < panels; ++panel) load_panel(x, m0 + panel * metile::lanes, k0, depth, panel);
  }

  const unit* panel(int index) const { return memory + index * units * metile::lanes; }

 private:
  void load_panel(Matrix<const T> x, long m0, long k0, long depth, int panel) {
    unit* to = memory + panel * units * metile::lanes;
    for (long k = 0; k < depth; k += step) {
      vfloat square[metile::lanes];
      for (int i = 0; i < metile::lanes; ++i)
        square[i] = m0 + i < x.rows ? metile::load_units(x.row(m0 + i) + k0 + k, depth - k, (unit*)nullptr) : vfloat(0);
      metile::transpose(square);
      for (int i = 0; i < metile::lanes; ++i, to += metile::lanes) __builtin_memcpy(to, &square[i], sizeof square[i]);
    }
  }
};
