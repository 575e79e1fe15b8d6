// head: the last norm, the logits of the rows that want them, and the largest that each threadgroup saw.
//
// Split: a threadgroup of 256 threads stages the row once (8.4 KB), then takes tiles of 32 rows of the vocabulary, four to a SIMD-group, every
// grid-th of them, and keeps its largest logit in registers. Full geometry: 7,760 tiles, 311 threadgroups of 25 tiles.
// A batch: grid (groups of four rows that want logits, tiles).
// Reads 286 MB: 0.47 ms at 614 GB/s; it is long enough for bandwidth to be all that counts. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "choice.h"
#include "prompt.h"

constant constexpr int M = 4;  // rows of a SIMD-group
typedef Inputs<HIDDEN> In;
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint TILES = (VOCAB + TILE - 1) / TILE;

kernel void head(device const Step* step [[buffer(0)]],
                 device const uint* lm_head_words [[buffer(1)]],
                 device const ushort* lm_head_scales [[buffer(2)]],
                 device const ushort* lm_head_biases [[buffer(3)]],
                 device const float* norm [[buffer(4)]],
                 device const float* x [[buffer(5)]],
                 device float* logits [[buffer(6)]],
                 device uint2* best [[buffer(7)]],
                 uint3 group [[threadgroup_position_in_grid]],
                 uint3 groups [[threadgroups_per_grid]],
                 uint thread_index [[thread_index_in_threadgroup]],
                 uint simd [[simdgroup_index_in_threadgroup]],
                 uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<HIDDEN>::SIZE];
  threadgroup float partial[PRODUCT_SIMDS];
  threadgroup uint2 largest[PRODUCT_SIMDS];
  if (step->head_rows == 0) return;
  const Matrix weights = matrix(lm_head_words, lm_head_scales, lm_head_biases);
  device const float* from = x + step->head_row[0] * HIDDEN;
  const float squares = stage<HIDDEN, 4, true>((device const float4*)from, (device const float4*)norm, staged, thread_index, 0.0f);
  leave_squares(squares, partial, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float inverse = inverse_rms<HIDDEN>(partial);
  Best found = no_best();
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = row_of<HIDDEN, 4>(weights, min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(VOCAB - 1)));
    }
    float results[M];
    product<M, HIDDEN, 4>(rows, staged, lane, results);
    for (int m = 0; m < M; ++m) {
      const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
      const float logit = results[m] * inverse;
      if (n < VOCAB) {
        if (lane % In::LANES == 0) logits[n] = logit;
        found = better(found, logit, n);
      }
    }
  }
  found = best_of_simd(found);
  if (lane == 0) largest[simd] = packed(found);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) best[group.y] = packed(best_of(largest, PRODUCT_SIMDS));
}

kernel void head_batch(device const Step* step [[buffer(0)]],
                       device const uint* lm_head_words [[buffer(1)]],
                       device const ushort* lm_head_scales [[buffer(2)]],
                       device const ushort* lm_head_biases [[buffer(3)]],
                       device const float* norm [[buffer(4)]],
                       device const float* x [[buffer(5)]],
                       device float* logits [[buffer(6)]],
                       device uint2* best [[buffer(7)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint3 groups [[threadgroups_per_grid]],
                       uint thread_index [[thread_index_in_threadgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  threadgroup uint2 largest[ROW_GROUP][PRODUCT_SIMDS];
  const Matrix weights = matrix(lm_head_words, lm_head_scales, lm_head_biases);
  const uint first = group.x * ROW_GROUP;
  if (first >= step->head_rows) return;
  const int count = min(int(step->head_rows - first), ROW_GROUP);
  RowGroup inputs;
  for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = x + step->head_row[first + min(r, count - 1)] * HIDDEN;
  Best found[ROW_GROUP];
  for (int r = 0; r < ROW_GROUP; ++r) found[r] = no_best();
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = row_of<HIDDEN, 4>(weights, min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(VOCAB - 1)));
    }
    float results[ROW_GROUP][M], inverses[ROW_GROUP];
    product_batch<M, HIDDEN, 4, true>(rows, inputs, count, norm, staged, partial, thread_index, simd, lane, results, inverses);
    for (int r = 0; r < ROW_GROUP; ++r) {
      for (int m = 0; m < M; ++m) {
        const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (r < count && n < VOCAB) {
          const float logit = results[r][m] * inverses[r];
          if (lane % In::LANES == 0) logits[ulong(first + r) * VOCAB + n] = logit;
          found[r] = better(found[r], logit, n);
        }
      }
    }
  }
  for (int r = 0; r < ROW_GROUP; ++r) {
    const Best of_simd = best_of_simd(found[r]);
    if (lane == 0) largest[r][simd] = packed(of_simd);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (int(thread_index) < count) {
    best[(first + thread_index) * groups.y + group.y] = packed(best_of(largest[thread_index], PRODUCT_SIMDS));
  }
}

// A prompt: its last rows, as many as want logits, to where head_batch finds them as rows 0, 1, ... Grid (MAX_ROWS), 256 threads.
kernel void head_rows_prefill(device const Prompt* prompt [[buffer(0)]],
                              device const Step* step [[buffer(1)]],
                              device const float* x [[buffer(2)]],
                              device float* last [[buffer(3)]],
                              uint3 group [[threadgroup_position_in_grid]],
                              uint thread_index [[thread_index_in_threadgroup]]) {
  if (group.x >= step->head_rows) return;
  device const float* from = x + ulong(prompt->rows - step->head_rows + group.x) * HIDDEN;
  for (uint n = thread_index; n < HIDDEN; n += PRODUCT_THREADS) last[group.x * HIDDEN + n] = from[n];
}
