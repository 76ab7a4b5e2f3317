// What a thread knows of its launch: its threadgroup, its place in it, and the threadgroup's memory.
#pragma once

constant constexpr int simd_lanes = 32;
constant constexpr int group_simdgroups = METILE_SIMDGROUPS;
constant constexpr int group_threads = simd_lanes * group_simdgroups;

constexpr Index ceil_div(Index a, Index b) { return (a + b - 1) / b; }
constexpr Index round_up(Index a, Index b) { return ceil_div(a, b) * b; }
constexpr Index min_of(Index a, Index b) { return a < b ? a : b; }

// Where a lane's two elements, side by side, stand in a fragment of 8 x 8.
struct Place {
  short row, column;
};

struct Lanes;
struct Threads;

struct Group {
  Index index;
  short thread_index, simdgroup, lane;
  threadgroup char* scratch;

  // `bytes` of threadgroup memory at a fixed offset.
  template <typename U>
  threadgroup U* memory(Index offset) const { return (threadgroup U*)(scratch + offset); }

  Place place() const {
    const short quad = lane / 4;
    return Place{short((quad & 4) + lane / 2 % 4), short((quad & 2) * 2 + lane % 2 * 2)};
  }

  // What works on a row together: the lanes of a simdgroup, or all threads of the threadgroup.
  inline Lanes lanes() const;
  inline Threads threads() const;
};

inline void settle() { threadgroup_barrier(mem_flags::mem_threadgroup); }
