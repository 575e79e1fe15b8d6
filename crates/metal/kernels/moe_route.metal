// moe_route: the post norm, the router's logits and the shared expert's gate (8-bit); and, since it needs no routing, the shared expert's gate and
// up projections. One threadgroup also leaves the normed activations for the experts ("packed").
//
// Split: a threadgroup of 256 threads stages the row once (8.4 KB) and has tiles of 16 rows of the router, two to a SIMD-group, or of 16 pairs of the
// shared expert's gate and up rows, two pairs to a SIMD-group. Full geometry: 17 and 32 threadgroups.
// A batch: grid (groups of four rows, tiles); then one threadgroup chooses experts for all rows and lists, for each expert, the rows that
// chose it, four to an item.
// Reads 1.7 MB: 2.8 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "gemm.h"
#include "prompt.h"
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

// ---- prompts --------------------------------------------------------------------------------------------------------------

// The router's logits: the product with a block of the rows (gemm.h). Grid (blocks of ROWS rows, tiles of 64 columns).
struct RouterColumns {
  Matrix router, shared_expert_gate;
  uint first;
  inline Row row(uint n) const { return first + n < EXPERTS ? row_of<HIDDEN, 8>(router, first + n) : row_of<HIDDEN, 8>(shared_expert_gate, 0); }
};

template <int ROWS>
kernel void moe_route_prefill(device const Prompt* prompt [[buffer(0)]],
                              device const uint* router_words [[buffer(1)]],
                              device const ushort* router_scales [[buffer(2)]],
                              device const ushort* router_biases [[buffer(3)]],
                              device const uint* shared_expert_gate_words [[buffer(4)]],
                              device const ushort* shared_expert_gate_scales [[buffer(5)]],
                              device const ushort* shared_expert_gate_biases [[buffer(6)]],
                              device const float* norm [[buffer(7)]],
                              device const float* x [[buffer(8)]],
                              device float* logits [[buffer(9)]],
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
  RouterColumns columns;
  columns.router = matrix(router_words, router_scales, router_biases);
  columns.shared_expert_gate = matrix(shared_expert_gate_words, shared_expert_gate_scales, shared_expert_gate_biases);
  columns.first = group.y * COLUMNS;
  gemm<ROWS, HIDDEN, 8, true>(rows, columns, norm, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * RESULT_QUADS; i += GEMM_THREADS) {
    const uint r = i / RESULT_QUADS, n = i % RESULT_QUADS * 4, to = columns.first + n;
    if (to < ROUTER_STRIDE) *(device float4*)(logits + ulong(first + r) * ROUTER_STRIDE + to) = result(room, r, n) * inverses[r];
  }
}
template [[host_name("moe_route_prefill_8")]] [[kernel]] decltype(moe_route_prefill<8>) moe_route_prefill<8>;
template [[host_name("moe_route_prefill_16")]] [[kernel]] decltype(moe_route_prefill<16>) moe_route_prefill<16>;
template [[host_name("moe_route_prefill_32")]] [[kernel]] decltype(moe_route_prefill<32>) moe_route_prefill<32>;
template [[host_name("moe_route_prefill_64")]] [[kernel]] decltype(moe_route_prefill<64>) moe_route_prefill<64>;

// Experts of each row, and how many of these rows chose each expert: `histogram[groups][EXPERTS]`. Grid (groups of SORT_ROWS rows); a SIMD-group
// chooses for four rows, one after the other.
kernel void moe_select_prefill(device const Prompt* prompt [[buffer(0)]],
                               device const float* logits [[buffer(1)]],
                               device uint* choice [[buffer(2)]],
                               device uint* histogram [[buffer(3)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]],
                               uint simd [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint chosen[SORT_ROWS * TOP_K];
  const uint first = group.x * SORT_ROWS;
  if (first >= prompt->rows) return;
  const uint count = min(prompt->rows - first, uint(SORT_ROWS));
  for (uint r = simd; r < count; r += PRODUCT_SIMDS) {
    choose_by_simd(logits + ulong(first + r) * ROUTER_STRIDE, choice + ulong(first + r) * CHOICE_WORDS, lane, chosen + r * TOP_K);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < EXPERTS) {
    uint rows = 0;
    for (uint i = 0; i < count * TOP_K; ++i) rows += chosen[i] == thread_index ? 1 : 0;
    histogram[group.x * EXPERTS + thread_index] = rows;
  }
}

// `block_rows`: of the products with the experts.
struct SortArgs {
  uint block_rows;
};
// Slots (row * SLOTS + place) sorted by expert, the shared expert's last, and within an expert by row; and the list of blocks that the products work on. Grid
// (groups of SORT_ROWS rows). A thread has an expert: it adds up the histograms, all of them and those before its group's; a prefix sum over the experts says where
// each begins. Then a thread has a slot, whose place it finds by counting those before it. So the order depends on nothing but the choices.
// `blocks`: how many, then from the second on {expert, its first slot in `sorted`, slots, -}; the first group writes them.
kernel void moe_sort_prefill(device const Prompt* prompt [[buffer(0)]],
                             device const uint* choice [[buffer(1)]],
                             device const uint* histogram [[buffer(2)]],
                             device uint* sorted [[buffer(3)]],
                             device uint4* blocks [[buffer(4)]],
                             constant SortArgs& args [[buffer(5)]],
                             uint3 group [[threadgroup_position_in_grid]],
                             uint thread_index [[thread_index_in_threadgroup]],
                             uint simd [[simdgroup_index_in_threadgroup]],
                             uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint chosen[SORT_ROWS * TOP_K];
  threadgroup uint begins[EXPERTS];                     // the first place of this group's slots of each expert
  threadgroup uint2 of_simd[PRODUCT_SIMDS];             // slots and blocks of the experts of a SIMD-group
  const uint rows = prompt->rows, first = group.x * SORT_ROWS;
  if (first >= rows) return;
  const uint count = min(rows - first, uint(SORT_ROWS)), groups = (rows + SORT_ROWS - 1) / SORT_ROWS;
  uint slots = 0, earlier = 0;
  if (thread_index < EXPERTS) {
    for (uint g = 0; g < groups; ++g) {
      const uint more = histogram[g * EXPERTS + thread_index];
      slots += more;
      earlier += g < group.x ? more : 0;
    }
  }
  const uint own_blocks = (slots + args.block_rows - 1) / args.block_rows;
  uint slots_before = simd_prefix_exclusive_sum(slots), blocks_before = simd_prefix_exclusive_sum(own_blocks);
  const uint2 of_own_simd = uint2(simd_sum(slots), simd_sum(own_blocks));
  if (lane == 0) of_simd[simd] = of_own_simd;
  if (thread_index < count * TOP_K) chosen[thread_index] = choice[ulong(first + thread_index / TOP_K) * CHOICE_WORDS + thread_index % TOP_K];
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint routed_blocks = 0;
  for (uint i = 0; i < uint(PRODUCT_SIMDS); ++i) {
    const uint2 before = of_simd[i];
    if (i < simd) slots_before += before.x, blocks_before += before.y;
    routed_blocks += before.y;
  }
  if (thread_index < EXPERTS) begins[thread_index] = slots_before + earlier;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index < count * TOP_K) {
    const uint expert = chosen[thread_index];
    uint place = begins[expert];
    for (uint i = 0; i < thread_index; ++i) place += chosen[i] == expert ? 1 : 0;
    sorted[place] = (first + thread_index / TOP_K) * SLOTS + thread_index % TOP_K;
  }
  if (thread_index < count) sorted[rows * TOP_K + first + thread_index] = (first + thread_index) * SLOTS + TOP_K;
  if (group.x > 0) return;
  for (uint i = 0; i < own_blocks; ++i) {
    const uint done = i * args.block_rows;
    blocks[1 + blocks_before + i] = uint4(thread_index, slots_before + done, min(slots - done, args.block_rows), 0);
  }
  const uint shared_blocks = (rows + args.block_rows - 1) / args.block_rows;
  for (uint i = thread_index; i < shared_blocks; i += PRODUCT_THREADS) {
    const uint done = i * args.block_rows;
    blocks[1 + routed_blocks + i] = uint4(EXPERTS, rows * TOP_K + done, min(rows - done, args.block_rows), 0);
  }
  if (thread_index == 0) blocks[0] = uint4(routed_blocks + shared_blocks, 0, 0, 0);
}
