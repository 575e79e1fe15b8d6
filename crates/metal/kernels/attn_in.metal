// attn_in: the input norm of an attention layer, then queries and gates, keys and values in one product. Head norms and rotary embedding are
// attn_core's, which has whole heads.
//
// Split: as delta_in. Full geometry: 9,216 rows, 288 tiles of 32, a threadgroup each.
// Reads 10.6 MB: 17 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "gemm.h"
#include "prompt.h"

constant constexpr int M = 4;  // rows of a SIMD-group
typedef Inputs<HIDDEN> In;
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint TILES = (ATTN_ROWS + TILE - 1) / TILE;

struct Projections {
  Matrix q, k, v;
};

inline Row weight_row(thread const Projections& all, uint n) {
  if (n < uint(2 * ATTN_WIDTH)) return row_of<HIDDEN, 4>(all.q, n);
  n -= 2 * ATTN_WIDTH;
  if (n < uint(KV_HEADS * HEAD_DIM)) return row_of<HIDDEN, 4>(all.k, n);
  return row_of<HIDDEN, 4>(all.v, min(n - KV_HEADS * HEAD_DIM, uint(KV_HEADS * HEAD_DIM - 1)));
}

kernel void attn_in(device const Step* step [[buffer(0)]],
                    device const uint* q_words [[buffer(1)]],
                    device const ushort* q_scales [[buffer(2)]],
                    device const ushort* q_biases [[buffer(3)]],
                    device const uint* k_words [[buffer(4)]],
                    device const ushort* k_scales [[buffer(5)]],
                    device const ushort* k_biases [[buffer(6)]],
                    device const uint* v_words [[buffer(7)]],
                    device const ushort* v_scales [[buffer(8)]],
                    device const ushort* v_biases [[buffer(9)]],
                    device const float* norm [[buffer(10)]],
                    device const float* x [[buffer(11)]],
                    device float* projected [[buffer(12)]],
                    uint3 group [[threadgroup_position_in_grid]],
                    uint3 groups [[threadgroups_per_grid]],
                    uint thread_index [[thread_index_in_threadgroup]],
                    uint simd [[simdgroup_index_in_threadgroup]],
                    uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<HIDDEN>::SIZE];
  threadgroup float partial[PRODUCT_SIMDS];
  Projections all;
  all.q = matrix(q_words, q_scales, q_biases);
  all.k = matrix(k_words, k_scales, k_biases);
  all.v = matrix(v_words, v_scales, v_biases);
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
      if (lane % In::LANES == 0 && n < ATTN_ROWS) projected[n] = results[m] * inverse;
    }
  }
}

kernel void attn_in_batch(device const Step* step [[buffer(0)]],
                          device const uint* q_words [[buffer(1)]],
                          device const ushort* q_scales [[buffer(2)]],
                          device const ushort* q_biases [[buffer(3)]],
                          device const uint* k_words [[buffer(4)]],
                          device const ushort* k_scales [[buffer(5)]],
                          device const ushort* k_biases [[buffer(6)]],
                          device const uint* v_words [[buffer(7)]],
                          device const ushort* v_scales [[buffer(8)]],
                          device const ushort* v_biases [[buffer(9)]],
                          device const float* norm [[buffer(10)]],
                          device const float* x [[buffer(11)]],
                          device float* projected [[buffer(12)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint3 groups [[threadgroups_per_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  Projections all;
  all.q = matrix(q_words, q_scales, q_biases);
  all.k = matrix(k_words, k_scales, k_biases);
  all.v = matrix(v_words, v_scales, v_biases);
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
        if (r < count && lane % In::LANES == 0 && n < ATTN_ROWS) {
          projected[(first + r) * ATTN_STRIDE + n] = results[r][m] * inverses[r];
        }
      }
    }
  }
}

// A prompt: as delta_in_prefill. Full geometry: 38 MFLOP and 45 KB of x and `projected` a row.
struct ProjectionColumns {
  Projections all;
  uint first;
  inline Row row(uint n) const { return weight_row(all, first + n); }
};

template <int ROWS>
kernel void attn_in_prefill(device const Prompt* prompt [[buffer(0)]],
                            device const uint* q_words [[buffer(1)]],
                            device const ushort* q_scales [[buffer(2)]],
                            device const ushort* q_biases [[buffer(3)]],
                            device const uint* k_words [[buffer(4)]],
                            device const ushort* k_scales [[buffer(5)]],
                            device const ushort* k_biases [[buffer(6)]],
                            device const uint* v_words [[buffer(7)]],
                            device const ushort* v_scales [[buffer(8)]],
                            device const ushort* v_biases [[buffer(9)]],
                            device const float* norm [[buffer(10)]],
                            device const float* x [[buffer(11)]],
                            device float* projected [[buffer(12)]],
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
  columns.all.q = matrix(q_words, q_scales, q_biases);
  columns.all.k = matrix(k_words, k_scales, k_biases);
  columns.all.v = matrix(v_words, v_scales, v_biases);
  columns.first = group.y * COLUMNS;
  gemm<ROWS, HIDDEN, 4, true>(rows, columns, norm, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * RESULT_QUADS; i += GEMM_THREADS) {
    const uint r = i / RESULT_QUADS, n = i % RESULT_QUADS * 4, to = columns.first + n;
    if (to < ATTN_STRIDE) *(device float4*)(projected + ulong(first + r) * ATTN_STRIDE + to) = result(room, r, n) * inverses[r];
  }
}
template [[host_name("attn_in_prefill_8")]] [[kernel]] decltype(attn_in_prefill<8>) attn_in_prefill<8>;
template [[host_name("attn_in_prefill_16")]] [[kernel]] decltype(attn_in_prefill<16>) attn_in_prefill<16>;
template [[host_name("attn_in_prefill_32")]] [[kernel]] decltype(attn_in_prefill<32>) attn_in_prefill<32>;
template [[host_name("attn_in_prefill_64")]] [[kernel]] decltype(attn_in_prefill<64>) attn_in_prefill<64>;
