// rope: turn each pair (i, i + D/2) of every head of q and k by the angle of its position, and lay k and v out as a
// cache keeps them. q [B, L, H * D], k and v [B, L, H_kv * D] as projections give them; table [positions, D], cosines
// then sines; out q [B, L, H * D], k and v [B, H_kv, L, D].
#pragma once

template <typename T, int D>
inline void rotate(Lanes lanes, Matrix<const device T> x, Matrix<const device float> table, Index position,
                   Matrix<device T> y, Index m) {
  for (Index i = 0; i < D / 2; i += Lanes::width) {
    const Index count = D / 2 - i;
    const Lanes::Fragment c = lanes.load(table, position, i, count), s = lanes.load(table, position, D / 2 + i, count);
    const Lanes::Fragment first = lanes.load(x, m, i, count), second = lanes.load(x, m, D / 2 + i, count);
    lanes.store(y, m, i, first * c - second * s, count);
    lanes.store(y, m, D / 2 + i, first * s + second * c, count);
  }
}

// Rows of ROWS positions of one sequence; `offset` positions are in the cache already. The simdgroups share the heads.
template <typename T, int D, int ROWS>
inline void rope(Heads<const device T> q, Heads<const device T> k, Heads<const device T> v,
                 Matrix<const device float> table, Heads<device T> q_out, Heads<device T> k_out, Heads<device T> v_out,
                 Index offset, Group group) {
  const Lanes lanes = group.lanes();
  const Index blocks = ceil_div(q.rows, ROWS), batch = group.index / blocks, first = group.index % blocks * ROWS;
  for (Index m = first; m < min_of(first + ROWS, q.rows); ++m) {
    for (Index h = lanes.simdgroup; h < q.heads; h += Lanes::simdgroups)
      rotate<T, D>(lanes, q.head(batch, h), table, offset + m, q_out.head(batch, h), m);
    for (Index h = lanes.simdgroup; h < k.heads; h += Lanes::simdgroups) {
      rotate<T, D>(lanes, k.head(batch, h), table, offset + m, k_out.head(batch, h), m);
      const Matrix<const device T> value = v.head(batch, h);
      const Matrix<device T> to = v_out.head(batch, h);
      for (Index i = 0; i < D; i += Lanes::width) lanes.store(to, m, i, lanes.load(value, m, i, D - i), D - i);
    }
  }
}
