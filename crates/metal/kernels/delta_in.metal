// delta_in: the input norm of a Gated DeltaNet layer, then q/k/v, z, b and a in one product.
//
// Split: a threadgroup of 256 threads stages the row once in threadgroup memory (8.4 KB: f32, and a sum for each 32 of them), then takes
// tiles of 32 matrix rows, four to a SIMD-group, every grid-th of them. The norm is folded: products are of x * weight, and 1 / rms multiplies
// the result, so that one barrier serves both. Full geometry: 12,352 rows, 386 tiles, 193 threadgroups of two tiles.
// A batch: grid (groups of four rows, tiles), 1,024 inputs of four rows staged at a time (16.5 KB); neighbours read the same tile.
// Reads 14.2 MB: 23 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "gemm.h"
#include "prompt.h"

constant constexpr int M = 4;  // rows of a SIMD-group
typedef Inputs<HIDDEN> In;
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint TILES = (DELTA_ROWS + TILE - 1) / TILE;

struct Projections {
  Matrix qkv, z, b, a;
};

inline Row weight_row(thread const Projections& all, uint n) {
  if (n < uint(CHANNELS)) return row_of<HIDDEN, 4>(all.qkv, n);
  n -= CHANNELS;
  if (n < uint(VALUE_WIDTH)) return row_of<HIDDEN, 4>(all.z, n);
  n -= VALUE_WIDTH;
  if (n < uint(VALUE_HEADS)) return row_of<HIDDEN, 4>(all.b, n);
  // Beyond the last row a lane multiplies that one, and nobody looks at the result.
  return row_of<HIDDEN, 4>(all.a, min(n - VALUE_HEADS, uint(VALUE_HEADS - 1)));
}

kernel void delta_in(device const Step* step [[buffer(0)]],
                     device const uint* qkv_words [[buffer(1)]],
                     device const ushort* qkv_scales [[buffer(2)]],
                     device const ushort* qkv_biases [[buffer(3)]],
                     device const uint* z_words [[buffer(4)]],
                     device const ushort* z_scales [[buffer(5)]],
                     device const ushort* z_biases [[buffer(6)]],
                     device const uint* b_words [[buffer(7)]],
                     device const ushort* b_scales [[buffer(8)]],
                     device const ushort* b_biases [[buffer(9)]],
                     device const uint* a_words [[buffer(10)]],
                     device const ushort* a_scales [[buffer(11)]],
                     device const ushort* a_biases [[buffer(12)]],
                     device const float* norm [[buffer(13)]],
                     device const float* x [[buffer(14)]],
                     device float* projected [[buffer(15)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint3 groups [[threadgroups_per_grid]],
                     uint thread_index [[thread_index_in_threadgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<HIDDEN>::SIZE];
  threadgroup float partial[PRODUCT_SIMDS];
  Projections all;
  all.qkv = matrix(qkv_words, qkv_scales, qkv_biases);
  all.z = matrix(z_words, z_scales, z_biases);
  all.b = matrix(b_words, b_scales, b_biases);
  all.a = matrix(a_words, a_scales, a_biases);
  const float squares = stage<HIDDEN, 4, true>((device const float4*)x, (device const float4*)norm, staged, thread_index, 0.0f);
  leave_squares(squares, partial, simd, lane);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const float inverse = inverse_rms<HIDDEN>(partial);
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) rows[m] = weight_row(all, tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane));
    float results[M];
    product<M, HIDDEN, 4>(rows, staged, lane, results);
    for (int m = 0; m < M; ++m) {
      const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
      if (lane % In::LANES == 0 && n < DELTA_ROWS) projected[n] = results[m] * inverse;
    }
  }
}

kernel void delta_in_batch(device const Step* step [[buffer(0)]],
                           device const uint* qkv_words [[buffer(1)]],
                           device const ushort* qkv_scales [[buffer(2)]],
                           device const ushort* qkv_biases [[buffer(3)]],
                           device const uint* z_words [[buffer(4)]],
                           device const ushort* z_scales [[buffer(5)]],
                           device const ushort* z_biases [[buffer(6)]],
                           device const uint* b_words [[buffer(7)]],
                           device const ushort* b_scales [[buffer(8)]],
                           device const ushort* b_biases [[buffer(9)]],
                           device const uint* a_words [[buffer(10)]],
                           device const ushort* a_scales [[buffer(11)]],
                           device const ushort* a_biases [[buffer(12)]],
                           device const float* norm [[buffer(13)]],
                           device const float* x [[buffer(14)]],
                           device float* projected [[buffer(15)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint3 groups [[threadgroups_per_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  Projections all;
  all.qkv = matrix(qkv_words, qkv_scales, qkv_biases);
  all.z = matrix(z_words, z_scales, z_biases);
  all.b = matrix(b_words, b_scales, b_biases);
  all.a = matrix(a_words, a_scales, a_biases);
  const uint first = group.x * ROW_GROUP;
  if (first >= step->rows) return;
  const int count = min(int(step->rows - first), ROW_GROUP);
  RowGroup inputs;
  for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = x + (first + min(r, count - 1)) * HIDDEN;
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) rows[m] = weight_row(all, tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane));
    float results[ROW_GROUP][M], inverses[ROW_GROUP];
    product_batch<M, HIDDEN, 4, true>(rows, inputs, count, norm, staged, partial, thread_index, simd, lane, results, inverses);
    for (int r = 0; r < ROW_GROUP; ++r) {
      for (int m = 0; m < M; ++m) {
        const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (r < count && lane % In::LANES == 0 && n < DELTA_ROWS) {
          projected[(first + r) * DELTA_STRIDE + n] = results[r][m] * inverses[r];
        }
      }
    }
  }
}

// A prompt: the product with a block of its rows (gemm.h). Grid (blocks of ROWS rows, tiles of 64 columns): neighbours read the same weights.
// Full geometry: 51 MFLOP and 81 KB of x and `projected` a row.
struct ProjectionColumns {
  Projections all;
  uint first;
  inline Row row(uint n) const { return weight_row(all, first + n); }
};

template <int ROWS>
kernel void delta_in_prefill(device const Prompt* prompt [[buffer(0)]],
                             device const uint* qkv_words [[buffer(1)]],
                             device const ushort* qkv_scales [[buffer(2)]],
                             device const ushort* qkv_biases [[buffer(3)]],
                             device const uint* z_words [[buffer(4)]],
                             device const ushort* z_scales [[buffer(5)]],
                             device const ushort* z_biases [[buffer(6)]],
                             device const uint* b_words [[buffer(7)]],
                             device const ushort* b_scales [[buffer(8)]],
                             device const ushort* b_biases [[buffer(9)]],
                             device const uint* a_words [[buffer(10)]],
                             device const ushort* a_scales [[buffer(11)]],
                             device const ushort* a_biases [[buffer(12)]],
                             device const float* norm [[buffer(13)]],
                             device const float* x [[buffer(14)]],
                             device float* projected [[buffer(15)]],
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
  rows.first = x + ulong(first) * HIDDEN, rows.stride = HIDDEN, rows.count = min(prompt->rows - first, uint(ROWS));
  ProjectionColumns columns;
  columns.all.qkv = matrix(qkv_words, qkv_scales, qkv_biases);
  columns.all.z = matrix(z_words, z_scales, z_biases);
  columns.all.b = matrix(b_words, b_scales, b_biases);
  columns.all.a = matrix(a_words, a_scales, a_biases);
  columns.first = group.y * COLUMNS;
  gemm<ROWS, HIDDEN, 4, true>(rows, columns, norm, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * RESULT_QUADS; i += GEMM_THREADS) {
    const uint r = i / RESULT_QUADS, n = i % RESULT_QUADS * 4, to = columns.first + n;
    if (to < DELTA_STRIDE) *(device float4*)(projected + ulong(first + r) * DELTA_STRIDE + to) = result(room, r, n) * inverses[r];
  }
}
template [[host_name("delta_in_prefill_8")]] [[kernel]] decltype(delta_in_prefill<8>) delta_in_prefill<8>;
template [[host_name("delta_in_prefill_16")]] [[kernel]] decltype(delta_in_prefill<16>) delta_in_prefill<16>;
template [[host_name("delta_in_prefill_32")]] [[kernel]] decltype(delta_in_prefill<32>) delta_in_prefill<32>;
template [[host_name("delta_in_prefill_64")]] [[kernel]] decltype(delta_in_prefill<64>) delta_in_prefill<64>;
