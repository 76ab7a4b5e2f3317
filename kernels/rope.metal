// rope: turn each pair (i, i + D/2) of every head of q and k by the angle of its position, and lay k and v out as a
// cache keeps them. q [B, L, H * D], k and v [B, L, H_kv * D] as projections give them; table [positions, D], cosines
// then sines; out q [B, L, H * D], k and v [B, H_kv, L, D].
#pragma once

template <typename T, int D>
inline void rotate(const device T* x, const device float* angles, device T* y) {
  for (int i = 0; i < D / 2; i += fragment_width) {
    const long count = D / 2 - i;
    const Fragment c = load(angles + i, count), s = load(angles + D / 2 + i, count);
    const Fragment first = load(x + i, count), second = load(x + D / 2 + i, count);
    store(y + i, first * c - second * s, count);
    store(y + D / 2 + i, first * s + second * c, count);
  }
}

// Rows of ROWS positions of one sequence; `offset` positions are in the cache already.
template <typename T, int D, int ROWS>
inline void rope(Heads<const device T> q, Heads<const device T> k, Heads<const device T> v, const device float* table,
                 Heads<device T> q_out, Heads<device T> k_out, Heads<device T> v_out, long offset, Group group) {
  const long blocks = ceil_div(q.rows, ROWS), batch = group.index / blocks, first = group.index % blocks * ROWS;
  for (long m = first; m < min_of(first + ROWS, q.rows); ++m) {
    const device float* angles = table + (offset + m) * D;
    for (long h = 0; h < q.heads; ++h) rotate<T, D>(q.head(batch, h).row(m), angles, q_out.head(batch, h).row(m));
    for (long h = 0; h < k.heads; ++h) {
      rotate<T, D>(k.head(batch, h).row(m), angles, k_out.head(batch, h).row(m));
      const device T* value = v.head(batch, h).row(m);
      device T* to = v_out.head(batch, h).row(m);
      for (int i = 0; i < D; i += fragment_width) store(to + i, load(value + i, D - i), D - i);
    }
  }
}
