// attention: y = softmax(scale * q . k^T) . v, fp32 softmax, keys taken a block at a time (online softmax).
//
// q [B, H, L, D]; k and v [B, H_kv, S, D] in any strides but the last, so slices of a cache are used in place;
// y [B, L, H * D]. Causal means that query i sees the first S - L + i + 1 keys.
// attention_matrix takes BQ queries of one head; attention_rows one query of all heads that share a key head.
#pragma once

template <typename T, int D, int BQ, int BK>
inline void attention_matrix(Heads<const device T> q, Heads<const device T> k, Heads<const device T> v,
                             Heads<device T> y, float scale, bool causal, Group group) {
  typedef Accumulator<T, 1, BQ, BK, score_wm(BQ), score_wn(BK), 1, 0> Scores;
  typedef QueryBlock<T, BQ, BK, D> Queries;
  const Index blocks = ceil_div(q.rows, BQ), head = group.index / blocks % q.heads;
  const Index batch = group.index / (blocks * q.heads);
  // The last block of queries sees the most keys: begin with it.
  const Index first = (blocks - 1 - group.index % blocks) * BQ, past = k.rows - q.rows;
  const Index key_head = head * k.heads / q.heads;
  const Index visible = causal ? min_of(k.rows, past + first + BQ) : k.rows;

  const Matrix<const device T> keys[] = {k.head(batch, key_head)};
  Stage<T, BQ, D> staged;
  staged.load(group, Scores::bytes(D) + Queries::bytes, q.head(batch, head), first, 0, D);
  Scores scores(group, 0);
  Queries outputs(group, Scores::bytes(D));
  for (Index n = 0; n < visible; n += BK) {
    scores.multiply_accumulate(staged, keys, n, 0, D, true);
    outputs.softmax(scores, scale, n, k.rows, causal ? past + first : k.rows);
    outputs.accumulate(scores, v.head(batch, key_head), n);
  }
  outputs.store(y.head(batch, head), first);
}

template <typename T, int D, int HEADS, int BK>
inline void attention_rows(Heads<const device T> q, Heads<const device T> k, Heads<const device T> v,
                           Heads<device T> y, float scale, Group group) {
  typedef RowAccumulator<T, 1, HEADS, BK, row_wn(BK, HEADS), 1, D> Scores;
  typedef QueryRows<T, HEADS, BK, D> Queries;
  const Index key_head = group.index % k.heads, batch = group.index / k.heads;
  const Matrix<const device T> keys[] = {k.head(batch, key_head)};
  RowStage<T, HEADS> staged;
  staged.load(group, Scores::bytes + Queries::bytes, q.across(batch, key_head * HEADS, HEADS), 0);
  Scores scores(group, 0);
  Queries outputs(group, Scores::bytes);
  for (Index n = 0; n < k.rows; n += BK) {
    scores.multiply(staged, keys, n);
    outputs.softmax(scores, scale, n, k.rows);
    outputs.accumulate(scores, v.head(batch, key_head), n);
  }
  outputs.store(y.across(batch, key_head * HEADS, HEADS));
}
