// delta_out: out_proj, added to the residual stream; and the convolution's tails move on by the rows of this pass, which delta_core cannot do,
// since several of its threadgroups read the same tail.
//
// Split: a threadgroup of 256 threads stages the row once (16.5 KB), then takes tiles of 16 matrix rows, two to a SIMD-group. Full geometry: 128
// tiles, a threadgroup each. A batch: grid (groups of four rows, tiles), 1,024 inputs of four rows staged at a time.
// Reads 4.7 MB: 7.7 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "product.h"
#include "gemm.h"
#include "prompt.h"

constant constexpr int M = 2;  // rows of a SIMD-group: with four there would be too few threadgroups
typedef Inputs<VALUE_WIDTH> In;
constant constexpr uint TILE = PRODUCT_SIMDS * M * In::SIDE;
constant constexpr uint TILES = (HIDDEN + TILE - 1) / TILE;

// The last TAIL inputs of the convolution of each channel of each sequence: those of this pass are in `projected`. All threads of the grid
// share them out.
inline void move_tails(device const Step* step, device const float* projected, device float* states, uint ordinal, uint thread_in_grid, uint threads) {
  for (uint i = thread_in_grid; i < step->segments * CHANNELS; i += threads) {
    const uint segment = i / CHANNELS, channel = i % CHANNELS;
    const int rows = int(step->row_count[segment]);
    device const float* newest = projected + ulong(step->first_row[segment] + rows - 1) * DELTA_STRIDE + channel;
    device float* tail = states + step->state[segment] * STATE_FLOATS + STATE_TAILS + ordinal * TAIL * CHANNELS + channel;
    float kept[TAIL];  // newest first
    for (int age = 0; age < TAIL; ++age) {
      kept[age] = age < rows ? newest[-age * DELTA_STRIDE] : tail[(TAIL - 1 - (age - rows)) * CHANNELS];
    }
    for (int age = 0; age < TAIL; ++age) tail[(TAIL - 1 - age) * CHANNELS] = kept[age];
  }
}

kernel void delta_out(device const Step* step [[buffer(0)]],
                      device const uint* out_words [[buffer(1)]],
                      device const ushort* out_scales [[buffer(2)]],
                      device const ushort* out_biases [[buffer(3)]],
                      device const float* mixed [[buffer(4)]],
                      device const float* projected [[buffer(5)]],
                      device float* states [[buffer(6)]],
                      device float* x [[buffer(7)]],
                      constant LayerArgs& args [[buffer(8)]],
                      uint3 group [[threadgroup_position_in_grid]],
                      uint3 groups [[threadgroups_per_grid]],
                      uint thread_index [[thread_index_in_threadgroup]],
                      uint simd [[simdgroup_index_in_threadgroup]],
                      uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[Staged<VALUE_WIDTH>::SIZE];
  const Matrix weights = matrix(out_words, out_scales, out_biases);
  move_tails(step, projected, states, args.ordinal, (group.y * groups.x + group.x) * PRODUCT_THREADS + thread_index,
             groups.x * groups.y * PRODUCT_THREADS);
  stage<VALUE_WIDTH, 4, false>((device const float4*)mixed, (device const float4*)mixed, staged, thread_index, 0.0f);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = row_of<VALUE_WIDTH, 4>(weights, min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(HIDDEN - 1)));
    }
    float results[M];
    product<M, VALUE_WIDTH, 4>(rows, staged, lane, results);
    for (int m = 0; m < M; ++m) {
      const uint n = tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane);
      if (lane % In::LANES == 0 && n < HIDDEN) x[n] += results[m];
    }
  }
}

kernel void delta_out_batch(device const Step* step [[buffer(0)]],
                            device const uint* out_words [[buffer(1)]],
                            device const ushort* out_scales [[buffer(2)]],
                            device const ushort* out_biases [[buffer(3)]],
                            device const float* mixed [[buffer(4)]],
                            device const float* projected [[buffer(5)]],
                            device float* states [[buffer(6)]],
                            device float* x [[buffer(7)]],
                            constant LayerArgs& args [[buffer(8)]],
                            uint3 group [[threadgroup_position_in_grid]],
                            uint3 groups [[threadgroups_per_grid]],
                            uint thread_index [[thread_index_in_threadgroup]],
                            uint simd [[simdgroup_index_in_threadgroup]],
                            uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 staged[ROW_GROUP * Staged<In::BLOCK_INPUTS>::SIZE];
  threadgroup float partial[ROW_GROUP][PRODUCT_SIMDS];
  const Matrix weights = matrix(out_words, out_scales, out_biases);
  move_tails(step, projected, states, args.ordinal, (group.y * groups.x + group.x) * PRODUCT_THREADS + thread_index,
             groups.x * groups.y * PRODUCT_THREADS);
  const uint first = group.x * ROW_GROUP;
  if (first >= step->rows) return;
  const int count = min(int(step->rows - first), ROW_GROUP);
  RowGroup inputs;
  for (int r = 0; r < ROW_GROUP; ++r) inputs.from[r] = mixed + (first + min(r, count - 1)) * VALUE_WIDTH;
  for (uint tile = group.y; tile < TILES; tile += groups.y) {
    Row rows[M];
    for (int m = 0; m < M; ++m) {
      rows[m] = row_of<VALUE_WIDTH, 4>(weights, min(tile * TILE + row_in_tile<M, In::SIDE>(simd, m, lane), uint(HIDDEN - 1)));
    }
    float results[ROW_GROUP][M], inverses[ROW_GROUP];
    product_batch<M, VALUE_WIDTH, 4, false>(rows, inputs, count, mixed, staged, partial, thread_index, simd, lane, results, inverses);
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
kernel void delta_out_prefill(device const Prompt* prompt [[buffer(0)]],
                              device const uint* out_words [[buffer(1)]],
                              device const ushort* out_scales [[buffer(2)]],
                              device const ushort* out_biases [[buffer(3)]],
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
  rows.first = mixed + ulong(first) * VALUE_WIDTH, rows.stride = VALUE_WIDTH, rows.count = min(prompt->rows - first, uint(ROWS));
  MatrixColumns<HIDDEN, VALUE_WIDTH, 4> columns;
  columns.all = matrix(out_words, out_scales, out_biases), columns.first = group.y * COLUMNS;
  gemm<ROWS, VALUE_WIDTH, 4, false>(rows, columns, mixed, room, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < rows.count * RESULT_QUADS; i += GEMM_THREADS) {
    const uint r = i / RESULT_QUADS, n = i % RESULT_QUADS * 4;
    device float4* to = (device float4*)(x + ulong(first + r) * HIDDEN + columns.first + n);
    *to = *to + result(room, r, n);
  }
}
template [[host_name("delta_out_prefill_8")]] [[kernel]] decltype(delta_out_prefill<8>) delta_out_prefill<8>;
template [[host_name("delta_out_prefill_16")]] [[kernel]] decltype(delta_out_prefill<16>) delta_out_prefill<16>;
template [[host_name("delta_out_prefill_32")]] [[kernel]] decltype(delta_out_prefill<32>) delta_out_prefill<32>;
template [[host_name("delta_out_prefill_64")]] [[kernel]] decltype(delta_out_prefill<64>) delta_out_prefill<64>;
