// moe_up: top 8 of the router's logits, and the chosen experts' gate and up projections, joined by SwiGLU.
//
// Split, one row: a threadgroup of 256 threads ranks the experts, a thread each (it needs no more than 64 reads of the logits from threadgroup memory and
// two barriers), while it stages the normed row (8.4 KB); then it takes tiles of 16 pairs of gate and up rows of one expert, two pairs to a
// SIMD-group. Full geometry: 256 tiles, a threadgroup each; all rank for themselves, the first writes the choice down.
// Reads 9.4 MB: 15 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
//
// A batch: a tile of an item of moe_select's list (up to four rows of one expert) is a unit; the threadgroups take every grid-th.
#include "product.h"
#include "gemm.h"
#include "prompt.h"
#include "choice.h"

typedef Inputs<HIDDEN> In;
constant constexpr int M = 2;  // pairs of rows of a SIMD-group
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint EXPERT_TILES = (EXPERT_WIDTH + TILE - 1) / TILE;

// Rows of gate of an expert, then the same of up.
inline void expert_rows(Matrix gates, Matrix ups, uint expert, uint tile, uint simd, uint lane, thread Row (&rows)[2 * M]) {
  const Matrix gate = at<EXPERT_WIDTH, HIDDEN>(gates, expert), up = at<EXPERT_WIDTH, HIDDEN>(ups, expert);
  for (int m = 0; m < M; ++m) {
    const uint n = min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(EXPERT_WIDTH - 1));
    rows[m] = row_of<HIDDEN, 4>(gate, n), rows[M + m] = row_of<HIDDEN, 4>(up, n);
  }
}

kernel void moe_up(device const Step* step [[buffer(0)]],
                   device const uint* gate_words [[buffer(1)]],
                   device const ushort* gate_scales [[buffer(2)]],
                   device const ushort* gate_biases [[buffer(3)]],
                   device const uint* up_words [[buffer(4)]],
                   device const ushort* up_scales [[buffer(5)]],
                   device const ushort* up_biases [[buffer(6)]],
                   device const float* packed [[buffer(7)]],
                   device const float* logits [[buffer(8)]],
                   device float* inner [[buffer(9)]],
                   device uint* choice [[buffer(10)]],
                   uint3 group [[threadgroup_position_in_grid]],
                   uint3 groups [[threadgroups_per_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint simd [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<HIDDEN>::SIZE];
  threadgroup uint4 keys[EXPERTS / 4];
  threadgroup uint chosen[TOP_K];
  const Matrix gates = matrix(gate_words, gate_scales, gate_biases), ups = matrix(up_words, up_scales, up_biases);
  stage<HIDDEN, 4, false>((device const float4*)packed, (device const float4*)packed, staged, thread_index, 0.0f);
  choose_by_all(logits, keys, chosen, thread_index);
  if (group.y == 0 && simd == 0) write_choice(logits, chosen, choice, lane);
  for (uint unit = group.y; unit < TOP_K * EXPERT_TILES; unit += groups.y) {
    const uint slot = unit / EXPERT_TILES, tile = unit % EXPERT_TILES;
    Row rows[2 * M];
    expert_rows(gates, ups, chosen[slot], tile, simd, lane, rows);
    float results[2 * M];
    product<2 * M, HIDDEN, 4>(rows, staged, lane, results);
    for (int m = 0; m < M; ++m) {
      const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
      if (lane % In::LANES == 0 && n < EXPERT_WIDTH) inner[slot * EXPERT_WIDTH + n] = silu(results[m]) * results[M + m];
    }
  }
}

kernel void moe_up_batch(device const Step* step [[buffer(0)]],
                         device const uint* gate_words [[buffer(1)]],
                         device const ushort* gate_scales [[buffer(2)]],
                         device const ushort* gate_biases [[buffer(3)]],
                         device const uint* up_words [[buffer(4)]],
                         device const ushort* up_scales [[buffer(5)]],
                         device const ushort* up_biases [[buffer(6)]],
                         device const float* packed [[buffer(7)]],
                         device const uint* items [[buffer(8)]],
                         device float* inner [[buffer(9)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint3 groups [[threadgroups_per_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  const Matrix gates = matrix(gate_words, gate_scales, gate_biases), ups = matrix(up_words, up_scales, up_biases);
  const uint units = items[1] * EXPERT_TILES;
  for (uint unit = group.y; unit < units; unit += groups.y) {
    device const uint* record = items + ITEM_WORDS * (1 + unit / EXPERT_TILES);
    const uint tile = unit % EXPERT_TILES;
    const int count = int(record[1]);
    Row rows[2 * M];
    expert_rows(gates, ups, record[0], tile, simd, lane, rows);
    RowGroup inputs;
    for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = packed + record[ITEM_SLOTS + min(r, count - 1)] / SLOTS * HIDDEN;
    float results[ROW_GROUP][2 * M], inverses[ROW_GROUP];
    product_batch<2 * M, HIDDEN, 4, false>(rows, inputs, count, packed, staged, partial, thread_index, simd, lane, results, inverses);
    for (int r = 0; r < ROW_GROUP; ++r) {
      for (int m = 0; m < M; ++m) {
        const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
        if (r < count && lane % In::LANES == 0 && n < EXPERT_WIDTH) {
          inner[record[ITEM_SLOTS + r] * EXPERT_WIDTH + n] = silu(results[r][m]) * results[r][M + m];
        }
      }
    }
  }
}

// A prompt: the product of a block of an expert's rows (gemm.h) with 32 rows of its gate and the same of its up, which stand beside each other in the tile;
// the shared expert's too. Grid (blocks that moe_sort lists and more, tiles): surplus threadgroups return. Full geometry: 38 MFLOP a row.
constant constexpr int PAIRS = COLUMNS / 2;
struct PairColumns {
  Matrix gate, up;
  uint first;
  inline Row row(uint n) const {
    const uint at = first + n % PAIRS;
    return n < uint(PAIRS) ? row_of<HIDDEN, 4>(gate, at) : row_of<HIDDEN, 4>(up, at);
  }
};
static_assert(EXPERT_WIDTH % PAIRS == 0, "tiles are whole");

template <int ROWS>
kernel void moe_up_prefill(device const Prompt* prompt [[buffer(0)]],
                           device const uint* gate_words [[buffer(1)]],
                           device const ushort* gate_scales [[buffer(2)]],
                           device const ushort* gate_biases [[buffer(3)]],
                           device const uint* up_words [[buffer(4)]],
                           device const ushort* up_scales [[buffer(5)]],
                           device const ushort* up_biases [[buffer(6)]],
                           device const uint* shared_gate_words [[buffer(7)]],
                           device const ushort* shared_gate_scales [[buffer(8)]],
                           device const ushort* shared_gate_biases [[buffer(9)]],
                           device const uint* shared_up_words [[buffer(10)]],
                           device const ushort* shared_up_scales [[buffer(11)]],
                           device const ushort* shared_up_biases [[buffer(12)]],
                           device const float* norm [[buffer(13)]],
                           device const float* x [[buffer(14)]],
                           device const uint* sorted [[buffer(15)]],
                           device const uint4* blocks [[buffer(16)]],
                           device float* inner [[buffer(17)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 aligned[Block<ROWS>::ROOM / 4];
  threadgroup float inverses[ROWS];
  threadgroup float* room = (threadgroup float*)aligned;
  if (group.x >= blocks[0].x) return;
  const uint4 block = blocks[1 + group.x];
  SlotRows<SLOTS> rows;
  rows.all = x, rows.slots = sorted + block.y, rows.stride = HIDDEN, rows.count = block.z;
  const bool is_shared = block.x == EXPERTS;
  PairColumns columns;
  columns.gate = is_shared ? matrix(shared_gate_words, shared_gate_scales, shared_gate_biases)
                           : at<EXPERT_WIDTH, HIDDEN>(matrix(gate_words, gate_scales, gate_biases), block.x);
  columns.up = is_shared ? matrix(shared_up_words, shared_up_scales, shared_up_biases)
                         : at<EXPERT_WIDTH, HIDDEN>(matrix(up_words, up_scales, up_biases), block.x);
  columns.first = group.y * PAIRS;
  gemm<ROWS, HIDDEN, 4, true>(rows, columns, norm, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * PAIRS; i += GEMM_THREADS) {
    const uint r = i / PAIRS, n = i % PAIRS;
    const float gate = room[r * COLUMNS + n] * inverses[r], up = room[r * COLUMNS + PAIRS + n] * inverses[r];
    inner[ulong(rows.slots[r]) * EXPERT_WIDTH + columns.first + n] = silu(gate) * up;
  }
}
template [[host_name("moe_up_prefill_8")]] [[kernel]] decltype(moe_up_prefill<8>) moe_up_prefill<8>;
template [[host_name("moe_up_prefill_16")]] [[kernel]] decltype(moe_up_prefill<16>) moe_up_prefill<16>;
template [[host_name("moe_up_prefill_32")]] [[kernel]] decltype(moe_up_prefill<32>) moe_up_prefill<32>;
template [[host_name("moe_up_prefill_64")]] [[kernel]] decltype(moe_up_prefill<64>) moe_up_prefill<64>;
