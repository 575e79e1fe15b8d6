// moe_down: the down projections of the chosen experts and of the shared one, their weighted sum, added to the residual stream.
//
// Split, one row: a threadgroup of 256 threads stages the inner activations of all nine experts (19 KB), then takes tiles of 16 rows of the hidden
// size; a SIMD-group has two of them side by side, 16 lanes each, and goes through the experts, whose weights are nine loads that do not
// wait for each other. Full geometry: 128 tiles, a threadgroup each.
// Reads 5.3 MB: 8.6 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
//
// A batch: a tile of an item of moe_select's list (up to four rows of one expert) is a unit; the threadgroups take every grid-th.
// moe_sum then adds each row's nine products in the order of the row's choice, as the kernel for one row does.
#include "product.h"
#include "gemm.h"
#include "prompt.h"
#include "choice.h"

typedef Inputs<EXPERT_WIDTH> In;
constant constexpr uint TILE = PRODUCT_SIMDS * In::SIDE;
constant constexpr uint TILES = (HIDDEN + TILE - 1) / TILE;

inline float share_of(device const uint* choice, int slot) {
  return as_type<float>(choice[slot < TOP_K ? CHOICE_SHARES + slot : CHOICE_SHARED]);
}
inline Row down_row(Matrix downs, Matrix shared_down, uint expert, uint n) {
  const Matrix down = expert < EXPERTS ? at<HIDDEN, EXPERT_WIDTH>(downs, expert) : shared_down;
  return row_of<EXPERT_WIDTH, 4>(down, min(n, uint(HIDDEN - 1)));
}

kernel void moe_down(device const Step* step [[buffer(0)]],
                     device const uint* down_words [[buffer(1)]],
                     device const ushort* down_scales [[buffer(2)]],
                     device const ushort* down_biases [[buffer(3)]],
                     device const uint* shared_down_words [[buffer(4)]],
                     device const ushort* shared_down_scales [[buffer(5)]],
                     device const ushort* shared_down_biases [[buffer(6)]],
                     device const float* inner [[buffer(7)]],
                     device const uint* choice [[buffer(8)]],
                     device float* x [[buffer(9)]],
                     uint3 group [[threadgroup_position_in_grid]],
                     uint3 groups [[threadgroups_per_grid]],
                     uint thread_index [[thread_index_in_threadgroup]],
                     uint simd [[simdgroup_index_in_threadgroup]],
                     uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[SLOTS * Staged<EXPERT_WIDTH>::SIZE];
  const Matrix downs = matrix(down_words, down_scales, down_biases);
  const Matrix shared = matrix(shared_down_words, shared_down_scales, shared_down_biases);
  for (int slot = 0; slot < SLOTS; ++slot) {
    device const float4* from = (device const float4*)(inner + slot * EXPERT_WIDTH);
    stage<EXPERT_WIDTH, 4, false>(from, from, staged + slot * Staged<EXPERT_WIDTH>::SIZE, thread_index, 0.0f);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    const uint n = tile * TILE + row_in_tile<1, In::SIDE>(simd, 0, lane);
    float sum = 0.0f;
    for (int slot = 0; slot < SLOTS; ++slot) {
      const Row rows[1] = {down_row(downs, shared, slot < TOP_K ? choice[slot] : EXPERTS, n)};
      float results[1];
      product<1, EXPERT_WIDTH, 4>(rows, staged + slot * Staged<EXPERT_WIDTH>::SIZE, lane, results);
      sum = fma(share_of(choice, slot), results[0], sum);
    }
    if (lane % In::LANES == 0 && n < HIDDEN) x[n] += sum;
  }
}

constant constexpr int M = 2;  // rows of a SIMD-group, times those side by side
constant constexpr uint BATCH_TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint BATCH_TILES = (HIDDEN + BATCH_TILE - 1) / BATCH_TILE;
kernel void moe_down_batch(device const Step* step [[buffer(0)]],
                           device const uint* down_words [[buffer(1)]],
                           device const ushort* down_scales [[buffer(2)]],
                           device const ushort* down_biases [[buffer(3)]],
                           device const uint* shared_down_words [[buffer(4)]],
                           device const ushort* shared_down_scales [[buffer(5)]],
                           device const ushort* shared_down_biases [[buffer(6)]],
                           device const float* inner [[buffer(7)]],
                           device const uint* items [[buffer(8)]],
                           device float* products [[buffer(9)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint3 groups [[threadgroups_per_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  const Matrix downs = matrix(down_words, down_scales, down_biases);
  const Matrix shared = matrix(shared_down_words, shared_down_scales, shared_down_biases);
  const uint units = items[0] * BATCH_TILES;
  for (uint unit = group.y; unit < units; unit += groups.y) {
    device const uint* record = items + ITEM_WORDS * (1 + unit / BATCH_TILES);
    const uint tile = unit % BATCH_TILES;
    const int count = int(record[1]);
    Row rows[M];
    for (int m = 0; m < M; ++m) rows[m] = down_row(downs, shared, record[0], tile * BATCH_TILE + row_in_tile<M, In::SIDE>(simd, m, lane));
    RowGroup inputs;
    for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = inner + record[ITEM_SLOTS + min(r, count - 1)] * EXPERT_WIDTH;
    float results[ROW_GROUP][M], inverses[ROW_GROUP];
    product_batch<M, EXPERT_WIDTH, 4, false>(rows, inputs, count, inner, staged, partial, thread_index, simd, lane, results, inverses);
    for (int r = 0; r < ROW_GROUP; ++r) {
      for (int m = 0; m < M; ++m) {
        const uint n = tile * BATCH_TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (r < count && lane % In::LANES == 0 && n < HIDDEN) products[record[ITEM_SLOTS + r] * HIDDEN + n] = results[r][m];
      }
    }
  }
}

// Element n of a row's nine products together, in the order of its choice.
inline float sum_of_slots(device const float* products, device const uint* choice, uint row, uint n) {
  device const uint* record = choice + ulong(row) * CHOICE_WORDS;
  device const float* product = products + ulong(row) * SLOTS * HIDDEN + n;
  float sum = 0.0f;
  for (int slot = 0; slot < SLOTS; ++slot) sum = fma(share_of(record, slot), product[slot * HIDDEN], sum);
  return sum;
}
kernel void moe_sum_batch(device const Step* step [[buffer(0)]],
                          device const float* products [[buffer(1)]],
                          device const uint* choice [[buffer(2)]],
                          device float* x [[buffer(3)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
  const uint row = group.y, n = group.x * PRODUCT_THREADS + thread_index;
  if (row >= step->rows || n >= HIDDEN) return;
  x[row * HIDDEN + n] += sum_of_slots(products, choice, row, n);
}

// A prompt: the product of a block of an expert's rows (gemm.h), as moe_up_prefill; then each row's sum, as moe_sum_batch. Products go through memory, so that the
// order of the sum is that of the choice. Full geometry: 19 MFLOP a row; 74 KB of products a row, each way.
struct DownColumns {
  Matrix all;
  uint first;
  inline Row row(uint n) const { return row_of<EXPERT_WIDTH, 4>(all, first + n); }
};
static_assert(HIDDEN % COLUMNS == 0, "tiles are whole");

template <int ROWS>
kernel void moe_down_prefill(device const Prompt* prompt [[buffer(0)]],
                             device const uint* down_words [[buffer(1)]],
                             device const ushort* down_scales [[buffer(2)]],
                             device const ushort* down_biases [[buffer(3)]],
                             device const uint* shared_down_words [[buffer(4)]],
                             device const ushort* shared_down_scales [[buffer(5)]],
                             device const ushort* shared_down_biases [[buffer(6)]],
                             device const float* inner [[buffer(7)]],
                             device const uint* sorted [[buffer(8)]],
                             device const uint4* blocks [[buffer(9)]],
                             device float* products [[buffer(10)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint simd [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 aligned[Block<ROWS>::ROOM / 4];
  threadgroup float inverses[ROWS];
  threadgroup float* room = (threadgroup float*)aligned;
  if (group.x >= blocks[0].x) return;
  const uint4 block = blocks[1 + group.x];
  SlotRows<1> rows;
  rows.all = inner, rows.slots = sorted + block.y, rows.stride = EXPERT_WIDTH, rows.count = block.z;
  DownColumns columns;
  columns.all = block.x == EXPERTS ? matrix(shared_down_words, shared_down_scales, shared_down_biases)
                                   : at<HIDDEN, EXPERT_WIDTH>(matrix(down_words, down_scales, down_biases), block.x);
  columns.first = group.y * COLUMNS;
  gemm<ROWS, EXPERT_WIDTH, 4, false>(rows, columns, inner, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * RESULT_QUADS; i += GEMM_THREADS) {
    const uint r = i / RESULT_QUADS, n = i % RESULT_QUADS * 4;
    *(device float4*)(products + ulong(rows.slots[r]) * HIDDEN + columns.first + n) = result(room, r, n);
  }
}
template [[host_name("moe_down_prefill_8")]] [[kernel]] decltype(moe_down_prefill<8>) moe_down_prefill<8>;
template [[host_name("moe_down_prefill_16")]] [[kernel]] decltype(moe_down_prefill<16>) moe_down_prefill<16>;
template [[host_name("moe_down_prefill_32")]] [[kernel]] decltype(moe_down_prefill<32>) moe_down_prefill<32>;
template [[host_name("moe_down_prefill_64")]] [[kernel]] decltype(moe_down_prefill<64>) moe_down_prefill<64>;

kernel void moe_sum_prefill(device const Prompt* prompt [[buffer(0)]],
                            device const float* products [[buffer(1)]],
                            device const uint* choice [[buffer(2)]],
                            device float* x [[buffer(3)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint thread_index [[thread_index_in_threadgroup]]) {
  const uint row = group.y, n = group.x * PRODUCT_THREADS + thread_index;
  if (row >= prompt->rows || n >= HIDDEN) return;
  x[ulong(row) * HIDDEN + n] += sum_of_slots(products, choice, row, n);
}
