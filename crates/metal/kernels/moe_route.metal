// moe_route: the post norm, the router's logits and the shared expert's gate (8-bit); and, since it needs no routing, the shared expert's gate and
// up projections. One threadgroup also leaves the normed activations for the experts ("packed").
//
// Split: a threadgroup of 256 threads stages the row once (8.4 KB) and has tiles of 16 rows of the router, two to a SIMD-group, or of 16 pairs of the
// shared expert's gate and up rows, two pairs to a SIMD-group. Full geometry: 17 and 32 threadgroups.
// A batch: grid (groups of four rows, tiles); then one threadgroup chooses experts for all rows and lists, for each expert, the rows that
// chose it, four to an item.
// Reads 1.7 MB: 2.8 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "choice.h"

typedef Inputs<HIDDEN> In;
constant constexpr int M = 2;  // rows, or pairs of rows, of a SIMD-group
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint ROUTER_TILES = (EXPERTS + 1 + TILE - 1) / TILE;
constant constexpr uint TILES = ROUTER_TILES + (SHARED_WIDTH + TILE - 1) / TILE;

// Rows of the router, the shared expert's factor behind them.
inline void router_rows(Matrix router, Matrix shared_expert_gate, uint tile, uint simd, uint lane, thread Row (&rows)[M]) {
  for (int m = 0; m < M; ++m) {
    const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
    rows[m] = n < EXPERTS ? row_of<HIDDEN, 8>(router, n) : row_of<HIDDEN, 8>(shared_expert_gate, 0);
  }
}
// Rows of gate, then the same of up.
inline void shared_rows(Matrix gate, Matrix up, uint tile, uint simd, uint lane, thread Row (&rows)[2 * M]) {
  for (int m = 0; m < M; ++m) {
    const uint n = min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(SHARED_WIDTH - 1));
    rows[m] = row_of<HIDDEN, 4>(gate, n), rows[M + m] = row_of<HIDDEN, 4>(up, n);
  }
}
// The row that the experts multiply, by all threads.
inline void pack(device const float* x, device const float* norm, float inverse, device float* packed, uint thread_index) {
  for (int i = thread_index; i < HIDDEN; i += PRODUCT_THREADS) packed[i] = x[i] * norm[i] * inverse;
}

kernel void moe_route(device const Step* step [[buffer(0)]],
                      device const uint* router_words [[buffer(1)]],
                      device const ushort* router_scales [[buffer(2)]],
                      device const ushort* router_biases [[buffer(3)]],
                      device const uint* shared_expert_gate_words [[buffer(4)]],
                      device const ushort* shared_expert_gate_scales [[buffer(5)]],
                      device const ushort* shared_expert_gate_biases [[buffer(6)]],
                      device const uint* shared_gate_words [[buffer(7)]],
                      device const ushort* shared_gate_scales [[buffer(8)]],
                      device const ushort* shared_gate_biases [[buffer(9)]],
                      device const uint* shared_up_words [[buffer(10)]],
                      device const ushort* shared_up_scales [[buffer(11)]],
                      device const ushort* shared_up_biases [[buffer(12)]],
                      device const float* norm [[buffer(13)]],
                      device const float* x [[buffer(14)]],
                      device float* logits [[buffer(15)]],
                      device float* packed [[buffer(16)]],
                      device float* inner [[buffer(17)]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint3 groups [[threadgroups_per_grid]],
                      uint thread_index [[thread_index_in_threadgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<HIDDEN>::SIZE];
  threadgroup float partial[PRODUCT_SIMDS];
  const Matrix routers = matrix(router_words, router_scales, router_biases);
  const Matrix factors = matrix(shared_expert_gate_words, shared_expert_gate_scales, shared_expert_gate_biases);
  const Matrix gates = matrix(shared_gate_words, shared_gate_scales, shared_gate_biases);
  const Matrix ups = matrix(shared_up_words, shared_up_scales, shared_up_biases);
  device const float4* from = (device const float4*)x;
  device const float4* weight = (device const float4*)norm;
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const bool routes = tile < ROUTER_TILES;
    const float squares = routes ? stage<HIDDEN, 8, true>(from, weight, staged, thread_index, 0.0f)
                                 : stage<HIDDEN, 4, true>(from, weight, staged, thread_index, 0.0f);
    leave_squares(squares, partial, simd, lane);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const float inverse = inverse_rms<HIDDEN>(partial);
    if (routes) {
      Row rows[M];
      router_rows(routers, factors, tile, simd, lane, rows);
      float results[M];
      product<M, HIDDEN, 8>(rows, staged, lane, results);
      for (int m = 0; m < M; ++m) {
        const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (lane % In::LANES == 0 && n <= EXPERTS) logits[n] = results[m] * inverse;
      }
      if (tile == ROUTER_TILES - 1) pack(x, norm, inverse, packed, thread_index);
    } else {
      Row rows[2 * M];
      shared_rows(gates, ups, tile - ROUTER_TILES, simd, lane, rows);
      float results[2 * M];
      product<2 * M, HIDDEN, 4>(rows, staged, lane, results);
      for (int m = 0; m < M; ++m) {
        const uint n = (tile - ROUTER_TILES) * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (lane % In::LANES == 0 && n < SHARED_WIDTH) {
          inner[TOP_K * EXPERT_WIDTH + n] = silu(results[m] * inverse) * (results[M + m] * inverse);
        }
      }
    }
  }
}

kernel void moe_route_batch(device const Step* step [[buffer(0)]],
                            device const uint* router_words [[buffer(1)]],
                            device const ushort* router_scales [[buffer(2)]],
                            device const ushort* router_biases [[buffer(3)]],
                            device const uint* shared_expert_gate_words [[buffer(4)]],
                            device const ushort* shared_expert_gate_scales [[buffer(5)]],
                            device const ushort* shared_expert_gate_biases [[buffer(6)]],
                            device const uint* shared_gate_words [[buffer(7)]],
                            device const ushort* shared_gate_scales [[buffer(8)]],
                            device const ushort* shared_gate_biases [[buffer(9)]],
                            device const uint* shared_up_words [[buffer(10)]],
                            device const ushort* shared_up_scales [[buffer(11)]],
                            device const ushort* shared_up_biases [[buffer(12)]],
                            device const float* norm [[buffer(13)]],
                            device const float* x [[buffer(14)]],
                            device float* logits [[buffer(15)]],
                            device float* packed [[buffer(16)]],
                            device float* inner [[buffer(17)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint3 groups [[threadgroups_per_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  const Matrix routers = matrix(router_words, router_scales, router_biases);
  const Matrix factors = matrix(shared_expert_gate_words, shared_expert_gate_scales, shared_expert_gate_biases);
  const Matrix gates = matrix(shared_gate_words, shared_gate_scales, shared_gate_biases);
  const Matrix ups = matrix(shared_up_words, shared_up_scales, shared_up_biases);
  const uint first = group.x * ROW_GROUP;
  if (first >= step->rows) return;
  const int count = min(int(step->rows - first), ROW_GROUP);
  RowGroup inputs;
  for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = x + (first + min(r, count - 1)) * HIDDEN;
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    float inverses[ROW_GROUP];
    if (tile < ROUTER_TILES) {
      Row rows[M];
      router_rows(routers, factors, tile, simd, lane, rows);
      float results[ROW_GROUP][M];
      product_batch<M, HIDDEN, 8, true>(rows, inputs, count, norm, staged, partial, thread_index, simd, lane, results, inverses);
      for (int r = 0; r < ROW_GROUP; ++r) {
        for (int m = 0; m < M; ++m) {
          const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
          if (r < count && lane % In::LANES == 0 && n <= EXPERTS) logits[(first + r) * ROUTER_STRIDE + n] = results[r][m] * inverses[r];
        }
        if (r < count && tile == ROUTER_TILES - 1) {
          pack(inputs.from[r], norm, inverses[r], packed + (first + r) * HIDDEN, thread_index);
        }
      }
    } else {
      Row rows[2 * M];
      shared_rows(gates, ups, tile - ROUTER_TILES, simd, lane, rows);
      float results[ROW_GROUP][2 * M];
      product_batch<2 * M, HIDDEN, 4, true>(rows, inputs, count, norm, staged, partial, thread_index, simd, lane, results, inverses);
      for (int r = 0; r < ROW_GROUP; ++r) {
        for (int m = 0; m < M; ++m) {
          const uint n = (tile - ROUTER_TILES) * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
          if (r < count && lane % In::LANES == 0 && n < SHARED_WIDTH) {
            inner[((first + r) * SLOTS + TOP_K) * EXPERT_WIDTH + n] = silu(results[r][m] * inverses[r]) * (results[r][M + m] * inverses[r]);
          }
        }
      }
    }
  }
}

// moe_select_batch: one threadgroup of 1,024 threads; a SIMD-group chooses for a row, then a thread of each slot finds its place among the slots
// of its expert by counting those before it, so that the list is the same whichever thread is first.
constant constexpr int SELECT_THREADS = 1024;
kernel void moe_select_batch(device const Step* step [[buffer(0)]],
                             device const float* logits [[buffer(1)]],
                             device uint* choice [[buffer(2)]],
                             device uint* items [[buffer(3)]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint simd [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint chosen[MAX_ROWS * TOP_K];       // the expert of each slot
  threadgroup uint slots_of[EXPERTS], first_item[EXPERTS], items_of_simd[SELECT_THREADS / SIMD];
  const uint rows = min(step->rows, uint(MAX_ROWS));
  if (simd < rows) choose_by_simd(logits + simd * ROUTER_STRIDE, choice + simd * CHOICE_WORDS, lane, chosen + simd * TOP_K);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // Slots of each expert, and where its items begin.
  uint count = 0;
  if (thread_index < EXPERTS) {
    for (uint i = 0; i < rows * TOP_K; ++i) count += chosen[i] == thread_index ? 1 : 0;
    slots_of[thread_index] = count;
  }
  const uint own = (count + ROW_GROUP - 1) / ROW_GROUP;
  const uint before = simd_prefix_exclusive_sum(own);
  const uint in_simd = simd_sum(own);
  if (lane == 0) items_of_simd[simd] = in_simd;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint routed = 0, item = before;
  for (uint i = 0; i < SELECT_THREADS / SIMD; ++i) {
    if (i < simd) item += items_of_simd[i];
    routed += items_of_simd[i];
  }
  if (thread_index < EXPERTS) {
    first_item[thread_index] = item;
    for (uint done = 0; done < count; done += ROW_GROUP, ++item) {
      device uint* record = items + ITEM_WORDS * (1 + item);
      record[0] = thread_index, record[1] = min(count - done, uint(ROW_GROUP));
    }
  }
  // The shared expert's items come last; all rows have it.
  const uint shared = (rows + ROW_GROUP - 1) / ROW_GROUP;
  if (thread_index < shared) {
    device uint* record = items + ITEM_WORDS * (1 + routed + thread_index);
    const uint first = thread_index * ROW_GROUP;
    record[0] = EXPERTS, record[1] = min(rows - first, uint(ROW_GROUP));
    for (uint i = 0; i < ROW_GROUP; ++i) record[ITEM_SLOTS + i] = min(first + i, rows - 1) * SLOTS + TOP_K;
  }
  if (thread_index == 0) items[0] = routed + shared, items[1] = routed;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < rows * TOP_K) {
    const uint expert = chosen[thread_index];
    uint place = 0;
    for (uint i = 0; i < thread_index; ++i) place += chosen[i] == expert ? 1 : 0;
    device uint* record = items + ITEM_WORDS * (1 + first_item[expert] + place / ROW_GROUP);
    record[ITEM_SLOTS + place % ROW_GROUP] = thread_index / TOP_K * SLOTS + thread_index % TOP_K;
  }
}
