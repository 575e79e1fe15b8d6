// attn_core: head norms and rotary embedding, the new position into the cache, attention over the cache, the output gate.
//
// Split: a context of P pages of 64 positions is cut into at most 64 spans of ceil(P / 64) pages; a threadgroup of 128 threads has one span of one KV
// head of one row, with its eight query heads, which share all loads of keys and values. Grid (64, KV heads, rows); surplus threadgroups return.
// The cut depends on the row's own position alone. attn_merge (a threadgroup a query head) adds the spans and applies the gate.
// Reads 1 KB a position and KV head, 20 KB a position in all layers of the full geometry: 33 us at 1K, 4.4 ms at 128K of context at 614 GB/s. With keys and
// values in 8 bits 520 bytes, 10.2 KB: 17 us and 2.2 ms. Reached: unknown, it has run in the emulator only.
//
// Products are matrices of 8 x 8 of a SIMD-group: f32 queries (8 KB of threadgroup memory) times f16 keys, f32 weights times f16 values, f32 sums. Halves
// come from the page as they lie there. Of 8-bit rows a SIMD-group loads eight times 64 bytes, 16 a lane, and unpacks them into 1 KB of threadgroup memory,
// once for the eight query heads; the scale of a key is multiplied with its scores, that of a value with its weights. There are two
// layouts, and the plan takes the second where a context may pass 4,096 positions:
// - `attn_core`: a span is one page, which the four SIMD-groups share: two tiles of positions each, then two heads' softmax, then eight tiles of dims.
//   Least latency, for few pages.
// - `attn_core_long`: each SIMD-group has pages of its own, every fourth of the span, all sums in its registers (64 of them a lane), and waits for nobody until
//   the end, when the four are added one after the other.
// Where a span is one page both do the same operations in the same order, so that a row's bits do not depend on the plan.
#include "attention.h"
#include "prompt.h"

// One page, shared by the SIMD-groups.
inline void attend_page(device Kv* page, uint page_index, uint position, ulong first_part, threadgroup const float* queries, threadgroup float* scores,
                        threadgroup half4* strip, device float* parts, device float2* part_scalars, uint simd, uint lane) {
  const int tiles = POSITION_TILES / ATTENTION_SIMDS, heads = GROUP_HEADS / ATTENTION_SIMDS, dims = DIM_TILES / ATTENTION_SIMDS;
  score_tiles<tiles, 1>(queries, page, int(simd) * tiles, scores, strip, lane);
  const Scales page_scales = scales_of(page, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < heads; ++i) {
    const uint head = simd * heads + i;
    Softmax softmax;
    softmax.most = -INFINITY, softmax.total = 0.0f;
    soften(scores + head * PAGE_TOKENS, page_scales, page_index * PAGE_TOKENS, position, lane, softmax);
    if (lane == 0) part_scalars[first_part + head * SPANS] = float2(softmax.most, softmax.total);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 sums[1][dims];
  for (int i = 0; i < dims; ++i) sums[0][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  add_values<dims, 1>(scores, page + PART, int(simd) * dims, sums, strip, lane);
  for (int i = 0; i < dims; ++i) simdgroup_store(sums[0][i], parts + first_part * HEAD_DIM + (simd * dims + i) * TILE, SPANS * HEAD_DIM);
}

// Several pages, each SIMD-group its own.
inline void attend_span(device const Step* step, device const uint* page_table, device Kv* kv, uint segment, uint ordinal, uint kv_head, Span span,
                        uint position, ulong first_part, threadgroup float* queries, threadgroup float* scores, threadgroup float* scales,
                        threadgroup half4* strip, threadgroup float2 (*each)[GROUP_HEADS], device float* parts, device float2* part_scalars, uint simd,
                        uint lane) {
  simdgroup_float8x8 sums[1][DIM_TILES];
  const simdgroup_float8x8 nothing = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int i = 0; i < DIM_TILES; ++i) sums[0][i] = nothing;
  Softmax softmax[GROUP_HEADS];
  for (int head = 0; head < GROUP_HEADS; ++head) softmax[head].most = -INFINITY, softmax[head].total = 0.0f;
  // Sums are scaled by a diagonal matrix; off the diagonal it stays zero.
  scales[lane] = 0.0f, scales[SIMD + lane] = 0.0f;
  for (uint index = span.first + simd; index < span.last; index += ATTENTION_SIMDS) {
    device Kv* page = page_of(step, page_table, kv, segment, index, ordinal, kv_head);
    score_tiles<POSITION_TILES, 1>(queries, page, 0, scores, strip, lane);
    const Scales page_scales = scales_of(page, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
    bool shrinks = false;
    for (int head = 0; head < GROUP_HEADS; ++head) {
      const float shrink = soften(scores + head * PAGE_TOKENS, page_scales, index * PAGE_TOKENS, position, lane, softmax[head]);
      if (lane == uint(head)) scales[head * (TILE + 1)] = shrink;
      shrinks = shrinks || shrink != 1.0f;
    }
    simdgroup_barrier(mem_flags::mem_threadgroup);
    if (shrinks && index >= span.first + ATTENTION_SIMDS) {
      simdgroup_float8x8 scale;
      simdgroup_load(scale, scales, TILE);
      for (int i = 0; i < DIM_TILES; ++i) simdgroup_multiply_accumulate(sums[0][i], scale, sums[0][i], nothing);
    }
    add_values<DIM_TILES, 1>(scores, page + PART, 0, sums, strip, lane);
    simdgroup_barrier(mem_flags::mem_threadgroup);
  }
  for (int head = 0; head < GROUP_HEADS; ++head) {
    if (lane == uint(head)) each[simd][head] = float2(softmax[head].most, softmax[head].total);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The four together, in their order, through the memory of the queries.
  if (lane < uint(GROUP_HEADS)) {
    float most = -INFINITY, total = 0.0f;
    for (int i = 0; i < ATTENTION_SIMDS; ++i) most = max(most, each[i][lane].x);
    for (int i = 0; i < ATTENTION_SIMDS; ++i) total = fma(each[i][lane].y, exp2(each[i][lane].x - most), total);
    scales[lane * (TILE + 1)] = exp2(each[simd][lane].x - most);
    if (simd == 0) part_scalars[first_part + lane * SPANS] = float2(most, total);
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  simdgroup_float8x8 scale;
  simdgroup_load(scale, scales, TILE);
  for (uint turn = 0; turn < uint(ATTENTION_SIMDS); ++turn) {
    if (simd == turn) {
      for (int i = 0; i < DIM_TILES; ++i) {
        simdgroup_float8x8 before = nothing;
        if (turn > 0) simdgroup_load(before, queries + i * TILE, HEAD_DIM);
        simdgroup_multiply_accumulate(sums[0][i], scale, sums[0][i], before);
        if (turn + 1 < uint(ATTENTION_SIMDS)) {
          simdgroup_store(sums[0][i], queries + i * TILE, HEAD_DIM);
        } else {
          simdgroup_store(sums[0][i], parts + first_part * HEAD_DIM + i * TILE, SPANS * HEAD_DIM);
        }
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
}

// One row: the new position's key and value come from `projected`.
kernel void attn_core(device const Step* step [[buffer(0)]],
                      device const uint* page_table [[buffer(1)]],
                      device const float* projected [[buffer(2)]],
                      device const float* q_norm [[buffer(3)]],
                      device const float* k_norm [[buffer(4)]],
                      device const float* inv_freq [[buffer(5)]],
                      device Kv* kv [[buffer(6)]],
                      device float* parts [[buffer(7)]],
                      device float2* part_scalars [[buffer(8)]],
                      constant LayerArgs& args [[buffer(9)]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint thread_index [[thread_index_in_threadgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float queries[GROUP_HEADS * HEAD_DIM];
  threadgroup float scores[GROUP_HEADS * PAGE_TOKENS];
  threadgroup half4 strip[ATTENTION_SIMDS][STRIP_QUADS];
  const uint row = group.z, kv_head = group.y;
  if (row >= step->rows) return;
  const uint position = step->position[row], segment = step->segment[row];
  const Span span = span_of(position, group.x);
  if (span.first >= span.pages) return;
  device const float* in = projected + ulong(row) * ATTN_STRIDE;
  const Turns turns = turns_of(position, inv_freq, lane);
  stage_queries(in, q_norm, turns, kv_head, queries, simd, lane);
  // The threadgroup whose span ends the context has the new position.
  if (span.last == span.pages) {
    device Kv* page = page_of(step, page_table, kv, segment, span.pages - 1, args.ordinal, kv_head);
    const uint slot = position % PAGE_TOKENS;
    if (simd == ATTENTION_SIMDS - 1) write_key(in, k_norm, turns, kv_head, page, slot, lane);
    write_value<ATTENTION_SIMDS * SIMD>(in, kv_head, page, slot, thread_index);
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  const ulong first_part = (ulong(row) * HEADS + kv_head * GROUP_HEADS) * SPANS + group.x;
  device Kv* page = page_of(step, page_table, kv, segment, span.first, args.ordinal, kv_head);
  attend_page(page, span.first, position, first_part, queries, scores, strip[simd], parts, part_scalars, simd, lane);
}

kernel void attn_core_long(device const Step* step [[buffer(0)]],
                           device const uint* page_table [[buffer(1)]],
                           device const float* projected [[buffer(2)]],
                           device const float* q_norm [[buffer(3)]],
                           device const float* k_norm [[buffer(4)]],
                           device const float* inv_freq [[buffer(5)]],
                           device Kv* kv [[buffer(6)]],
                           device float* parts [[buffer(7)]],
                           device float2* part_scalars [[buffer(8)]],
                           constant LayerArgs& args [[buffer(9)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float queries[GROUP_HEADS * HEAD_DIM];
  threadgroup float scores[ATTENTION_SIMDS][GROUP_HEADS * PAGE_TOKENS];
  threadgroup float scales[ATTENTION_SIMDS][TILE * TILE];
  threadgroup half4 strip[ATTENTION_SIMDS][STRIP_QUADS];
  threadgroup float2 each[ATTENTION_SIMDS][GROUP_HEADS];
  const uint row = group.z, kv_head = group.y;
  if (row >= step->rows) return;
  const uint position = step->position[row], segment = step->segment[row];
  const Span span = span_of(position, group.x);
  if (span.first >= span.pages) return;
  device const float* in = projected + ulong(row) * ATTN_STRIDE;
  const Turns turns = turns_of(position, inv_freq, lane);
  stage_queries(in, q_norm, turns, kv_head, queries, simd, lane);
  // The threadgroup whose span ends the context has the new position.
  if (span.last == span.pages) {
    device Kv* page = page_of(step, page_table, kv, segment, span.pages - 1, args.ordinal, kv_head);
    const uint slot = position % PAGE_TOKENS;
    if (simd == ATTENTION_SIMDS - 1) write_key(in, k_norm, turns, kv_head, page, slot, lane);
    write_value<ATTENTION_SIMDS * SIMD>(in, kv_head, page, slot, thread_index);
  }
  threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
  const ulong first_part = (ulong(row) * HEADS + kv_head * GROUP_HEADS) * SPANS + group.x;
  attend_span(step, page_table, kv, segment, args.ordinal, kv_head, span, position, first_part, queries, scores[simd], scales[simd], strip[simd], each,
              parts, part_scalars, simd, lane);
}

// Any rows: attn_kv_batch has written theirs.
kernel void attn_core_batch(device const Step* step [[buffer(0)]],
                            device const uint* page_table [[buffer(1)]],
                            device const float* projected [[buffer(2)]],
                            device const float* q_norm [[buffer(3)]],
                            device const float* k_norm [[buffer(4)]],
                            device const float* inv_freq [[buffer(5)]],
                            device Kv* kv [[buffer(6)]],
                            device float* parts [[buffer(7)]],
                            device float2* part_scalars [[buffer(8)]],
                            constant LayerArgs& args [[buffer(9)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float queries[GROUP_HEADS * HEAD_DIM];
  threadgroup float scores[GROUP_HEADS * PAGE_TOKENS];
  threadgroup half4 strip[ATTENTION_SIMDS][STRIP_QUADS];
  const uint row = group.z, kv_head = group.y;
  if (row >= step->rows) return;
  const uint position = step->position[row], segment = step->segment[row];
  const Span span = span_of(position, group.x);
  if (span.first >= span.pages) return;
  device const float* in = projected + ulong(row) * ATTN_STRIDE;
  const Turns turns = turns_of(position, inv_freq, lane);
  stage_queries(in, q_norm, turns, kv_head, queries, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong first_part = (ulong(row) * HEADS + kv_head * GROUP_HEADS) * SPANS + group.x;
  device Kv* page = page_of(step, page_table, kv, segment, span.first, args.ordinal, kv_head);
  attend_page(page, span.first, position, first_part, queries, scores, strip[simd], parts, part_scalars, simd, lane);
}

kernel void attn_core_long_batch(device const Step* step [[buffer(0)]],
                                 device const uint* page_table [[buffer(1)]],
                                 device const float* projected [[buffer(2)]],
                                 device const float* q_norm [[buffer(3)]],
                                 device const float* k_norm [[buffer(4)]],
                                 device const float* inv_freq [[buffer(5)]],
                                 device Kv* kv [[buffer(6)]],
                                 device float* parts [[buffer(7)]],
                                 device float2* part_scalars [[buffer(8)]],
                                 constant LayerArgs& args [[buffer(9)]],
                                 uint3 group [[threadgroup_position_in_grid]],
                                 uint simd [[simdgroup_index_in_threadgroup]],
                                 uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float queries[GROUP_HEADS * HEAD_DIM];
  threadgroup float scores[ATTENTION_SIMDS][GROUP_HEADS * PAGE_TOKENS];
  threadgroup float scales[ATTENTION_SIMDS][TILE * TILE];
  threadgroup half4 strip[ATTENTION_SIMDS][STRIP_QUADS];
  threadgroup float2 each[ATTENTION_SIMDS][GROUP_HEADS];
  const uint row = group.z, kv_head = group.y;
  if (row >= step->rows) return;
  const uint position = step->position[row], segment = step->segment[row];
  const Span span = span_of(position, group.x);
  if (span.first >= span.pages) return;
  device const float* in = projected + ulong(row) * ATTN_STRIDE;
  const Turns turns = turns_of(position, inv_freq, lane);
  stage_queries(in, q_norm, turns, kv_head, queries, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const ulong first_part = (ulong(row) * HEADS + kv_head * GROUP_HEADS) * SPANS + group.x;
  attend_span(step, page_table, kv, segment, args.ordinal, kv_head, span, position, first_part, queries, scores[simd], scales[simd], strip[simd], each,
              parts, part_scalars, simd, lane);
}

// attn_kv_batch: keys and values of all rows into the cache; grid (KV heads, rows), a thread a dim.
kernel void attn_kv_batch(device const Step* step [[buffer(0)]],
                          device const uint* page_table [[buffer(1)]],
                          device const float* projected [[buffer(2)]],
                          device const float* k_norm [[buffer(3)]],
                          device const float* inv_freq [[buffer(4)]],
                          device Kv* kv [[buffer(5)]],
                          constant LayerArgs& args [[buffer(6)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group.y, kv_head = group.x;
  if (row >= step->rows) return;
  const uint position = step->position[row], slot = position % PAGE_TOKENS;
  device Kv* page = page_of(step, page_table, kv, step->segment[row], position / PAGE_TOKENS, args.ordinal, kv_head);
  device const float* in = projected + ulong(row) * ATTN_STRIDE;
  if (simd == 0) write_key(in, k_norm, turns_of(position, inv_freq, lane), kv_head, page, slot, lane);
  write_value<HEAD_DIM>(in, kv_head, page, slot, thread_index);
}

// attn_merge: the spans of one query head of one row together, times the sigmoid of the gate; grid (heads, rows), a thread a dim.
kernel void attn_merge(device const Step* step [[buffer(0)]],
                       device const float* parts [[buffer(1)]],
                       device const float2* part_scalars [[buffer(2)]],
                       device const float* projected [[buffer(3)]],
                       device float* mixed [[buffer(4)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]]) {
  threadgroup float2 scalars[SPANS];
  const uint row = group.y, head = group.x;
  if (row >= step->rows) return;
  const uint pages = step->position[row] / PAGE_TOKENS + 1, each = (pages + SPANS - 1) / SPANS;
  const uint spans = (pages + each - 1) / each;
  const ulong first = (ulong(row) * HEADS + head) * SPANS;
  if (thread_index < spans) scalars[thread_index] = part_scalars[first + thread_index];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  float most = -INFINITY;
  for (uint i = 0; i < spans; ++i) most = max(most, scalars[i].x);
  device const float* part = parts + first * HEAD_DIM + thread_index;
  float sum = 0.0f, total = 0.0f;
  for (uint i = 0; i < spans; ++i) {
    const float weight = exp2(scalars[i].x - most);
    sum = fma(weight, part[i * HEAD_DIM], sum);
    total = fma(weight, scalars[i].y, total);
  }
  const float gate = projected[ulong(row) * ATTN_STRIDE + (head * 2 + 1) * HEAD_DIM + thread_index];
  mixed[ulong(row) * ATTN_WIDTH + head * HEAD_DIM + thread_index] = sum / total * sigmoid(gate);
}

// ---- prompts --------------------------------------------------------------------------------------------------------------

// attn_kv_prefill: as attn_kv_batch.
kernel void attn_kv_prefill(device const Prompt* prompt [[buffer(0)]],
                            device const uint* page_table [[buffer(1)]],
                            device const float* projected [[buffer(2)]],
                            device const float* k_norm [[buffer(3)]],
                            device const float* inv_freq [[buffer(4)]],
                            device Kv* kv [[buffer(5)]],
                            constant LayerArgs& args [[buffer(6)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group.y, kv_head = group.x;
  if (row >= prompt->rows) return;
  const uint position = prompt->position + row, slot = position % PAGE_TOKENS;
  device Kv* page = page_at(kv, page_table[prompt->pages + position / PAGE_TOKENS], args.ordinal, kv_head);
  device const float* in = projected + ulong(row) * ATTN_STRIDE;
  if (simd == 0) write_key(in, k_norm, turns_of(position, inv_freq, lane), kv_head, page, slot, lane);
  write_value<HEAD_DIM>(in, kv_head, page, slot, thread_index);
}

// attn_core_prefill: attention of all new positions over the cache and each other, page after page from the first, never with more scores than a page's.
//
// Grid (KV heads, pairs of positions), those that see most first. A threadgroup of 128 threads has POSITIONS = 2 positions with the eight query heads of one KV head: 16 rows of
// matrices, which share all loads of keys and values. Of a page each SIMD-group scores 16 of the 64 positions, softens four of the 16 rows, and adds up
// 64 of the 256 dims; queries (f32, 16 KB) and weights (4 KB) are in threadgroup memory, sums in registers (32 of a lane).
// 1 kFLOP a query head and position before it; a page of 64 KB comes from the cache once for 1.05 MFLOP, or one of 32.5 KB in 8 bits, unpacked as in
// attn_core.
constant constexpr int POSITIONS = 2;
constant constexpr int SCORE_TILES = POSITION_TILES / ATTENTION_SIMDS, SUM_TILES = DIM_TILES / ATTENTION_SIMDS;  // of a SIMD-group
constant constexpr int SOFT_ROWS = POSITIONS * GROUP_HEADS / ATTENTION_SIMDS;
kernel void attn_core_prefill(device const Prompt* prompt [[buffer(0)]],
                              device const uint* page_table [[buffer(1)]],
                              device const float* projected [[buffer(2)]],
                              device const float* q_norm [[buffer(3)]],
                              device const float* inv_freq [[buffer(4)]],
                              device Kv* kv [[buffer(5)]],
                              device float* mixed [[buffer(6)]],
                              constant LayerArgs& args [[buffer(7)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]],
                              uint simd [[simdgroup_index_in_threadgroup]],
                              uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float queries[POSITIONS][GROUP_HEADS * HEAD_DIM];
  threadgroup float scores[POSITIONS][GROUP_HEADS * PAGE_TOKENS];
  threadgroup half4 strip[ATTENTION_SIMDS][STRIP_QUADS];
  threadgroup float scales[POSITIONS][TILE * TILE];  // diagonal matrices: off the diagonal they stay zero
  const uint rows = prompt->rows, start = prompt->position, kv_head = group.x, pairs = (rows + POSITIONS - 1) / POSITIONS;
  if (group.y >= pairs) return;
  const uint first = (pairs - 1 - group.y) * POSITIONS;
  uint row[POSITIONS];  // a second one that does not exist is the first again
  for (int p = 0; p < POSITIONS; ++p) {
    row[p] = min(first + uint(p), rows - 1);
    stage_queries(projected + ulong(row[p]) * ATTN_STRIDE, q_norm, turns_of(start + row[p], inv_freq, lane), kv_head, queries[p], simd, lane);
    if (thread_index < uint(TILE * TILE)) scales[p][thread_index] = 0.0f;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const simdgroup_float8x8 nothing = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  simdgroup_float8x8 sums[POSITIONS][SUM_TILES];
  for (int p = 0; p < POSITIONS; ++p) {
    for (int i = 0; i < SUM_TILES; ++i) sums[p][i] = nothing;
  }
  Softmax softmax[SOFT_ROWS];
  for (int i = 0; i < SOFT_ROWS; ++i) softmax[i].most = -INFINITY, softmax[i].total = 0.0f;
  const uint pages = (start + row[POSITIONS - 1]) / PAGE_TOKENS + 1;
  for (uint index = 0; index < pages; ++index) {
    device Kv* page = page_at(kv, page_table[prompt->pages + index], args.ordinal, kv_head);
    score_tiles<SCORE_TILES, POSITIONS>(queries[0], page, int(simd) * SCORE_TILES, scores[0], strip[simd], lane);
    const Scales page_scales = scales_of(page, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int i = 0; i < SOFT_ROWS; ++i) {
      const uint at = simd * SOFT_ROWS + i, p = at / GROUP_HEADS, head = at % GROUP_HEADS;
      const float shrink = soften(scores[p] + head * PAGE_TOKENS, page_scales, index * PAGE_TOKENS, start + row[p], lane, softmax[i]);
      if (lane == 0) scales[p][head * (TILE + 1)] = shrink;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int p = 0; p < POSITIONS && index > 0; ++p) {
      simdgroup_float8x8 scale;
      simdgroup_load(scale, scales[p], TILE);
      for (int i = 0; i < SUM_TILES; ++i) simdgroup_multiply_accumulate(sums[p][i], scale, sums[p][i], nothing);
    }
    add_values<SUM_TILES, POSITIONS>(scores[0], page + PART, int(simd) * SUM_TILES, sums, strip[simd], lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }
  // Sums take the place of the queries; totals that of the scales.
  for (int i = 0; i < SOFT_ROWS; ++i) {
    const uint at = simd * SOFT_ROWS + i;
    if (lane == 0) scales[at / GROUP_HEADS][at % GROUP_HEADS] = softmax[i].total;
  }
  for (int p = 0; p < POSITIONS; ++p) {
    for (int i = 0; i < SUM_TILES; ++i) simdgroup_store(sums[p][i], queries[p] + (simd * SUM_TILES + i) * TILE, HEAD_DIM);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint p = 0; p < min(uint(POSITIONS), rows - first); ++p) {
    device const float* in = projected + ulong(first + p) * ATTN_STRIDE;
    for (uint i = thread_index; i < uint(GROUP_HEADS * HEAD_DIM); i += ATTENTION_SIMDS * SIMD) {
      const uint head = kv_head * GROUP_HEADS + i / HEAD_DIM, dim = i % HEAD_DIM;
      const float gate = in[(head * 2 + 1) * HEAD_DIM + dim];
      mixed[ulong(first + p) * ATTN_WIDTH + head * HEAD_DIM + dim] = queries[p][i] / scales[p][i / HEAD_DIM] * sigmoid(gate);
    }
  }
}
