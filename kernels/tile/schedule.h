// Block order: a pure function from a block's index to its (m, n) on a grid, the same on every target.
// Each is a permutation of any grid of tiles_m x tiles_n blocks.
#pragma once

enum Schedule { schedule_linear, schedule_grouped2, schedule_grouped4, schedule_grouped8, schedule_diagonal, schedule_morton, schedule_hilbert };

struct Block {
  uint m, n;
};

// Bands of `height` rows of blocks, walked down each column: neighbours in time share their weights.
inline Block grouped_block(uint index, uint tiles_m, uint tiles_n, uint height) {
  const uint band = index / (height * tiles_n);
  const uint first = band * height;
  const uint rows = tiles_m - first < height ? tiles_m - first : height;
  const uint inside = index - band * height * tiles_n;
  return Block{first + inside % rows, inside / rows};
}

inline uint clipped_extent(uint origin, uint size, uint limit) {
  return origin >= limit ? 0 : (limit - origin < size ? limit - origin : size);
}

// A quadtree curve over the power-of-two square that holds the grid, cells outside the grid left out: each level
// steps over the quadrants before the index by the number of their cells inside the grid.
// `order`: for each state the four quadrants in turn as m*2+n, one digit each, the last in the low digit;
// `turn`: the state each of them is walked in.
inline Block quadtree_block(uint index, uint tiles_m, uint tiles_n, constant uint* order, constant uint* turn) {
  uint size = 1, state = 0;
  while (size < tiles_m || size < tiles_n) size *= 2;
  Block at = {0, 0};
  while (size > 1) {
    size /= 2;
    for (uint step = 0; step < 4; ++step) {
      const uint quadrant = order[state * 4 + step];
      const uint m = at.m + (quadrant >> 1) * size, n = at.n + (quadrant & 1) * size;
      const uint cells = clipped_extent(m, size, tiles_m) * clipped_extent(n, size, tiles_n);
      if (index < cells) {
        at = Block{m, n};
        state = turn[state * 4 + step];
        break;
      }
      index -= cells;
    }
  }
  return at;
}

constant uint morton_order[4] = {0, 1, 2, 3};
constant uint morton_turn[4] = {0, 0, 0, 0};
constant uint hilbert_order[16] = {0, 1, 3, 2, 0, 2, 3, 1, 3, 1, 0, 2, 3, 2, 0, 1};
constant uint hilbert_turn[16] = {1, 0, 0, 2, 0, 1, 1, 3, 3, 2, 2, 0, 2, 3, 3, 1};

inline Block schedule_block(Schedule schedule, uint index, uint tiles_m, uint tiles_n) {
  switch (schedule) {
    case schedule_grouped2: return grouped_block(index, tiles_m, tiles_n, 2);
    case schedule_grouped4: return grouped_block(index, tiles_m, tiles_n, 4);
    case schedule_grouped8: return grouped_block(index, tiles_m, tiles_n, 8);
    case schedule_diagonal: return Block{(index / tiles_n + index % tiles_n) % tiles_m, index % tiles_n};
    case schedule_morton: return quadtree_block(index, tiles_m, tiles_n, morton_order, morton_turn);
    case schedule_hilbert: return quadtree_block(index, tiles_m, tiles_n, hilbert_order, hilbert_turn);
    default: return Block{index / tiles_n, index % tiles_n};
  }
}
