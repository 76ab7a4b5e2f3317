// What a thread knows of its launch: its threadgroup, its place in it, and the threadgroup's memory.
#pragma once

constexpr int simd_lanes = 32;
constexpr int group_simdgroups = METILE_SIMDGROUPS;
constexpr int group_threads = simd_lanes * group_simdgroups;
constexpr int group_stages = METILE_STAGES;

inline constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
inline constexpr Index round_up(Index a, Index b) { return ceil_div(a, b) * b; }
inline constexpr Index min_of(Index a, Index b) { return a < b ? a : b; }
inline constexpr Index max_of(Index a, Index b) { return a > b ? a : b; }

// Four registers: what a lane moves at once.
struct alignas(16) Words {
  uint at[4];
};

struct Lanes;
struct Threads;

struct Group {
  Index index;
  int thread_index, simdgroup, lane;
  char* scratch;

  // `bytes` of threadgroup memory at a fixed offset.
  template <typename U>
  inline U* memory(Index offset) const { return (U*)(scratch + offset); }

  // A lane's place in a fragment of sums: `four` picks among 8 rows of weights, `pair` two rows of x.
  inline int four() const { return lane / 4; }
  inline int pair() const { return lane % 4; }

  // What works on a row together: the lanes of a warp, or all threads of the threadgroup.
  inline Lanes lanes() const;
  inline Threads threads() const;
};
