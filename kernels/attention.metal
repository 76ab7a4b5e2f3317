// attention: y = softmax(scale * q . k^T) . v, fp32 softmax, keys taken a block at a time (online softmax).
//
// q [B, H, L, D]; k and v [B, H_kv, S, D] in any strides but the last, so slices of a cache are used in place;
// y [B, L, H * D]. Causal means that query i sees the first S - L + i + 1 keys.
// attention_matrix takes BQ queries of one head; attention_rows one query of all heads that share a key head, and
// attention_rows_split the same by several threadgroups, on a GPU where one can read what another has written.
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

// What one query of all heads sees among keys begin .. end.
template <int BK, typename Staged, typename Scores, typename Queries, typename K>
inline void attend_to(thread const Staged& staged, thread Scores& scores, thread Queries& outputs, K k, K v,
                      float scale, Index begin, Index end) {
  const K keys[] = {k};
  for (Index n = begin; n < end; n += BK) {
    outputs.expect(v, n);
    scores.multiply(staged, keys, n);
    outputs.softmax(scores, scale, n, k.rows);
    outputs.accumulate(scores, v, n);
  }
}

template <typename T, int D, int HEADS, int BK>
inline void attention_rows(Heads<const device T> q, Heads<const device T> k, Heads<const device T> v,
                           Heads<device T> y, float scale, Group group) {
  typedef RowAccumulator<T, 1, HEADS, BK, row_wn(BK, HEADS), 1, D> Scores;
  typedef QueryRows<T, HEADS, BK, D> Queries;
  const Index first = group.index % (q.heads / HEADS) * HEADS, batch = group.index / (q.heads / HEADS);
  const Index key_head = first * k.heads / q.heads;
  RowStage<T, HEADS> staged;
  staged.load(group, Scores::bytes + Queries::bytes, q.across(batch, first, HEADS), 0);
  Scores scores(group, 0);
  Queries outputs(group, Scores::bytes);
  attend_to<BK>(staged, scores, outputs, k.head(batch, key_head), v.head(batch, key_head), scale, 0, k.rows);
  outputs.store(y.across(batch, first, HEADS));
}

// The same where `parts` threadgroups share the keys of a head; a part past the end of the context has none. See
// `QueryRows::store_part` for `partials` [blocks][parts][HEADS][D + 2] and `counters` [blocks].
template <typename T, int D, int HEADS, int BK>
inline void attention_rows_split(Heads<const device T> q, Heads<const device T> k, Heads<const device T> v,
                                 Heads<device T> y, device float* partials, device uint* counters, float scale,
                                 Index parts, Group group) {
  typedef RowAccumulator<T, 1, HEADS, BK, row_wn(BK, HEADS), 1, D> Scores;
  typedef QueryRows<T, HEADS, BK, D> Queries;
  const Index part = group.index % parts, block = group.index / parts;
  const Index first = block % (q.heads / HEADS) * HEADS, batch = block / (q.heads / HEADS);
  const Index key_head = first * k.heads / q.heads;
  const Index span = round_up(ceil_div(k.rows, parts), BK), end = min_of(k.rows, (part + 1) * span);
  RowStage<T, HEADS> staged;
  staged.load(group, Scores::bytes + Queries::bytes, q.across(batch, first, HEADS), 0);
  Scores scores(group, 0);
  Queries outputs(group, Scores::bytes);
  attend_to<BK>(staged, scores, outputs, k.head(batch, key_head), v.head(batch, key_head), scale, part * span, end);
  outputs.store_part(y.across(batch, first, HEADS), partials + block * parts * HEADS * (D + 2),
                     counters + block, part, parts);
}
