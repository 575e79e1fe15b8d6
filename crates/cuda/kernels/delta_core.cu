// delta_core: convolution, gates, the gated delta rule, and what of the gated norm one quarter of a head can do.
//
// Split: four blocks a value head, each 32 of its 128 value rows of the state; 256 threads, eight to a row, each with 16 of
// its 128 keys in registers, before the wait already. Every block convolves its key head's q and k again (256 channels, a
// thread each) and its own 32 of v. Full geometry, one row: 128 blocks.
// Reads and writes 2.1 MB of state each way: 0.9 us at 4.6 TB/s. Reached: 2.8 us. Rows of a segment are taken in order, so that
// a prompt can come through in pieces; states stay in registers between them.
#include "delta.cuh"

LAUNCH(delta_core, 4 * VALUE_HEADS, 256, 0)
extern "C" __global__ void __launch_bounds__(256)
    delta_core(const Step* step, const float* proj, const float* conv, const float* a_log, const float* dt_bias, const float* gnorm,
               float* mixed, float* squares, u32 ordinal) {
  __shared__ float keys[2][2][KEY_DIM];  // [turn][query, key], before they are scaled to length one
  __shared__ float values[2][QUARTER];
  __shared__ float lengths[2][8];        // sums of squares by warp: four of the query, four of the key
  __shared__ float2 gates[2];            // decay, write strength
  __shared__ float outs[2][8];
  launch_dependents();
  const u32 segment = blockIdx.y;
  if (segment >= step->segments) return wait_predecessors();
  const int head = blockIdx.x / 4, quarter = blockIdx.x % 4, key_head = head / (VALUE_HEADS / KEY_HEADS);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int state_row = thread / 8, piece = thread % 8;
  float* states = (float*)step->state[segment];
  const float* tails = states + STATES + (u64)ordinal * TAIL * CHANNELS;
  float4* at = (float4*)(states + (((u64)ordinal * VALUE_HEADS + head) * VALUE_DIM + quarter * QUARTER + state_row) * KEY_DIM) + piece;
  float4 state[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) state[i] = at[i * 8];

  // This thread's channel of q or k, and for the first warp one of v.
  const int key_channel = (thread / KEY_DIM) * KEY_WIDTH + key_head * KEY_DIM + thread % KEY_DIM;
  const int value_row = head * VALUE_DIM + quarter * QUARTER + lane;
  const int value_channel = 2 * KEY_WIDTH + value_row;
  const float4 key_taps = *(const float4*)(conv + key_channel * CONV_WIDTH);
  float key_past[TAIL], value_past[TAIL] = {0, 0, 0};
  float4 value_taps = make_float4(0, 0, 0, 0);
#pragma unroll
  for (int age = 0; age < TAIL; ++age) key_past[age] = tails[age * CHANNELS + key_channel];
  if (warp == 0) {
    value_taps = *(const float4*)(conv + value_channel * CONV_WIDTH);
#pragma unroll
    for (int age = 0; age < TAIL; ++age) value_past[age] = tails[age * CHANNELS + value_channel];
  }
  const float keep_rate = -expf(a_log[head]), bias = dt_bias[head];
  const float weight = gnorm[quarter * QUARTER + state_row];
  const int first = step->seg_first[segment], rows = step->seg_rows[segment];
  wait_predecessors();

  for (int r = 0; r < rows; ++r) {
    const int row = first + r, turn = r % 2;
    const float* in = proj + (u64)row * DELTA_STRIDE;
    const float newest = in[key_channel];
    const float z = in[CHANNELS + head * VALUE_DIM + quarter * QUARTER + state_row];
    float value_newest = 0;
    if (warp == 0) value_newest = in[value_channel];
    if (warp == 1 && lane == 0) {
      const float b = in[CHANNELS + VALUE_WIDTH + head], a = in[CHANNELS + VALUE_WIDTH + VALUE_HEADS + head];
      gates[turn] = gates_of(a, b, keep_rate, bias);
    }
    const float mixed_key = convolve(key_taps, key_past, newest);
    keys[turn][thread / KEY_DIM][thread % KEY_DIM] = mixed_key;
    const float square = lanes_sum<32>(square_of(mixed_key));
    if (lane == 0) lengths[turn][warp] = square;
    if (warp == 0) values[turn][lane] = convolve(value_taps, value_past, value_newest);
    __syncthreads();

    const float query_scale = query_scale_of(lengths[turn]), key_scale = length_scale(lengths[turn] + 4);
    float4 key[4], query[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      query[i] = *(const float4*)&keys[turn][0][i * 32 + piece * 4];
      key[i] = *(const float4*)&keys[turn][1][i * 32 + piece * 4];
      key[i].x = __fmul_rn(key[i].x, key_scale), key[i].y = __fmul_rn(key[i].y, key_scale);
      key[i].z = __fmul_rn(key[i].z, key_scale), key[i].w = __fmul_rn(key[i].w, key_scale);
    }
    const float out = __fmul_rn(recur(state, key, query, values[turn][state_row], gates[turn]), query_scale);
    if (piece == 0) mixed[(u64)row * VALUE_WIDTH + head * VALUE_DIM + quarter * QUARTER + state_row] = gated(out, weight, z);
    float total = square_of(out);
    total += __shfl_xor_sync(~0u, total, 8);
    total += __shfl_xor_sync(~0u, total, 16);
    if (lane == 0) outs[turn][warp] = total;
    __syncthreads();
    if (thread == 0) {
      const float* o = outs[turn];
      squares[(row * VALUE_HEADS + head) * 4 + quarter] = ((o[0] + o[1]) + (o[2] + o[3])) + ((o[4] + o[5]) + (o[6] + o[7]));
    }
  }
#pragma unroll
  for (int i = 0; i < 4; ++i) at[i * 8] = state[i];
}
