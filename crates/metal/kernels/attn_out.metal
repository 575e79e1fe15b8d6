// attn_out: o_proj, added to the residual stream.
//
// Split: a threadgroup of 256 threads stages the row once (16.5 KB), then takes tiles of 16 matrix rows, two to a SIMD-group. Full geometry: 128
// tiles, a threadgroup each. A batch: grid (groups of four rows, tiles), 1,024 inputs of four rows staged at a time.
// Reads 4.7 MB: 7.7 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "gemm.h"
#include "prompt.h"

constant constexpr int M = 2;  // rows of a SIMD-group: with four there would be too few threadgroups
typedef Inputs<ATTN_WIDTH> In;
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint TILES = (HIDDEN + TILE - 1) / TILE;

kernel void attn_out(device const Step* step [[buffer(0)]],
                     device const uint* o_words [[buffer(1)]],
                     device const ushort* o_scales [[buffer(2)]],
                     device const ushort* o_biases [[buffer(3)]],
                     device const float* mixed [[buffer(4)]],
                     device float* x [[buffer(5)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint3 groups [[threadgroups_per_grid]],
                     uint thread_index [[thread_index_in_threadgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<ATTN_WIDTH>::SIZE];
  const Matrix weights = matrix(o_words, o_scales, o_biases);
  stage<ATTN_WIDTH, 4, false>((device const float4*)mixed, (device const float4*)mixed, staged, thread_index, 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = row_of<ATTN_WIDTH, 4>(weights, min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(HIDDEN - 1)));
    }
    float results[M];
    product<M, ATTN_WIDTH, 4>(rows, staged, lane, results);
    for (int m = 0; m < M; ++m) {
      const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
      if (lane % In::LANES == 0 && n < HIDDEN) x[n] += results[m];
    }
  }
}

kernel void attn_out_batch(device const Step* step [[buffer(0)]],
                           device const uint* o_words [[buffer(1)]],
                           device const ushort* o_scales [[buffer(2)]],
                           device const ushort* o_biases [[buffer(3)]],
                           device const float* mixed [[buffer(4)]],
                           device float* x [[buffer(5)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint3 groups [[threadgroups_per_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  const Matrix weights = matrix(o_words, o_scales, o_biases);
  const uint first = group.x * ROW_GROUP;
  if (first >= step->rows) return;
  const int count = min(int(step->rows - first), ROW_GROUP);
  RowGroup inputs;
  for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = mixed + (first + min(r, count - 1)) * ATTN_WIDTH;
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = row_of<ATTN_WIDTH, 4>(weights, min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(HIDDEN - 1)));
    }
    float results[ROW_GROUP][M], inverses[ROW_GROUP];
    product_batch<M, ATTN_WIDTH, 4, false>(rows, inputs, count, mixed, staged, partial, thread_index, simd, lane, results, inverses);
    for (int r = 0; r < ROW_GROUP; ++r) {
      for (int m = 0; m < M; ++m) {
        const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (r < count && lane % In::LANES == 0 && n < HIDDEN) x[(first + r) * HIDDEN + n] += results[r][m];
      }
    }
  }
}

// A prompt: the product with a block of its rows (gemm.h), added to the residual stream. Grid (blocks of ROWS rows, tiles of 64 columns).
// Full geometry: 17 MFLOP and 33 KB of `mixed` and x a row.
template <int ROWS>
kernel void attn_out_prefill(device const Prompt* prompt [[buffer(0)]],
                             device const uint* o_words [[buffer(1)]],
                             device const ushort* o_scales [[buffer(2)]],
                             device const ushort* o_biases [[buffer(3)]],
                             device const float* mixed [[buffer(4)]],
                             device float* x [[buffer(5)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint simd [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 aligned[Block<ROWS>::ROOM / 4];
  threadgroup float inverses[ROWS];
  threadgroup float* room = (threadgroup float*)aligned;
  const uint first = group.x * ROWS;
  if (first >= prompt->rows) return;
  ConsecutiveRows rows;
  rows.first = mixed + ulong(first) * ATTN_WIDTH, rows.stride = ATTN_WIDTH, rows.count = min(prompt->rows - first, uint(ROWS));
  MatrixColumns<HIDDEN, ATTN_WIDTH, 4> columns;
  columns.all = matrix(o_words, o_scales, o_biases), columns.first = group.y * COLUMNS;
  gemm<ROWS, ATTN_WIDTH, 4, false>(rows, columns, mixed, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * RESULT_QUADS; i += GEMM_THREADS) {
    const uint r = i / RESULT_QUADS, n = i % RESULT_QUADS * 4;
    device float4* to = (device float4*)(x + ulong(first + r) * HIDDEN + columns.first + n);
    *to = *to + result(room, r, n);
  }
}
template [[host_name("attn_out_prefill_8")]] [[kernel]] decltype(attn_out_prefill<8>) attn_out_prefill<8>;
template [[host_name("attn_out_prefill_16")]] [[kernel]] decltype(attn_out_prefill<16>) attn_out_prefill<16>;
template [[host_name("attn_out_prefill_32")]] [[kernel]] decltype(attn_out_prefill<32>) attn_out_prefill<32>;
template [[host_name("attn_out_prefill_64")]] [[kernel]] decltype(attn_out_prefill<64>) attn_out_prefill<64>;
