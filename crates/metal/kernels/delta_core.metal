// delta_core: convolution, gates, the gated delta rule, and the gated norm.
//
// Split: a threadgroup of 512 threads a value head: its 128 x 128 state lies in their registers, four threads to a value row, 32 keys each, from the
// first load to the last store. Threads 0 to 383 convolve a channel of q, k or v each (two value heads convolve their key head's q and k both; it is less than
// a kernel of its own would cost), one more makes the gates. Two barriers a row. Grid (value heads, segments).
// Rows of a segment are taken in order, so that a prompt can come through in pieces; the state stays in registers between them.
// Reads and writes 2.1 MB of state each way (full geometry, one row): 6.8 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "common.h"

constant constexpr int THREADS = 512;
constant constexpr int SIMDS = THREADS / SIMD;
constant constexpr int SHARE = THREADS / VALUE_DIM;           // threads of a value row
constant constexpr int OWN = KEY_DIM / SHARE / 4;             // float4 of the state that a thread has
constant constexpr int GATE_THREAD = 2 * KEY_DIM + VALUE_DIM;  // the first that convolves nothing
constant constexpr float L2_EPS = 1e-6f;
static_assert(GATE_THREAD < THREADS, "a thread is left for the gates");

// log(1 + exp(x)); what 1 + e rounds away is put back.
inline float softplus(float x) {
  const float e = exp(x), u = 1.0f + e;
  if (x > 20.0f) return x;
  return u == 1.0f ? e : log(u) * (e / (u - 1.0f));
}

kernel void delta_core(device const Step* step [[buffer(0)]],
                       device const float* projected [[buffer(1)]],
                       device const float* conv [[buffer(2)]],
                       device const float* a_log [[buffer(3)]],
                       device const float* dt_bias [[buffer(4)]],
                       device const float* norm [[buffer(5)]],
                       device float* states [[buffer(6)]],
                       device float* mixed [[buffer(7)]],
                       constant LayerArgs& args [[buffer(8)]],
                       uint3 group [[threadgroup_position_in_grid]],
                       uint thread_index [[thread_index_in_threadgroup]],
                       uint simd [[simdgroup_index_in_threadgroup]],
                       uint lane [[thread_index_in_simdgroup]]) {
  // Of two turns, so that a row's are written while those of the row before are still read.
  threadgroup float4 convolved[2][(2 * KEY_DIM + VALUE_DIM) / 4];  // query, key, value
  threadgroup float lengths[2][2 * KEY_DIM / SIMD];                // sums of squares by SIMD-group: of the query, then of the key
  threadgroup float2 gates[2];                                     // decay, write strength
  threadgroup float squares[2][SIMDS];
  const uint segment = group.y;
  if (segment >= step->segments) return;
  const uint head = group.x, key_head = head / (VALUE_HEADS / KEY_HEADS);
  const uint value_row = thread_index / SHARE, piece = thread_index % SHARE;
  device float* of_sequence = states + step->state[segment] * STATE_FLOATS;
  device const float* tails = of_sequence + STATE_TAILS + args.ordinal * TAIL * CHANNELS;
  device float4* own = (device float4*)(of_sequence + (args.ordinal * VALUE_HEADS + head) * HEAD_STATE + value_row * KEY_DIM) + piece;
  float4 state[OWN];
  for (int i = 0; i < OWN; ++i) state[i] = own[i * SHARE];

  const bool convolves = thread_index < GATE_THREAD;
  uint channel = 0;
  float4 taps = float4(0.0f);
  float past[TAIL] = {0.0f, 0.0f, 0.0f};  // oldest first
  if (convolves) {
    const uint part = thread_index / KEY_DIM;
    channel = part * KEY_WIDTH + (part < 2 ? key_head : head) * KEY_DIM + thread_index % KEY_DIM;
    taps = ((device const float4*)conv)[channel];
    for (int age = 0; age < TAIL; ++age) past[age] = tails[age * CHANNELS + channel];
  }
  const float weight = norm[value_row];
  const uint first = step->first_row[segment], rows = step->row_count[segment];

  for (uint r = 0; r < rows; ++r) {
    const uint row = first + r, turn = r % 2;
    device const float* in = projected + ulong(row) * DELTA_STRIDE;
    const float z = in[CHANNELS + head * VALUE_DIM + value_row];
    if (convolves) {
      const float newest = in[channel];
      const float sum = fma(taps.w, newest, fma(taps.z, past[2], fma(taps.y, past[1], taps.x * past[0])));
      past[0] = past[1], past[1] = past[2], past[2] = newest;
      const float value = silu(sum);
      ((threadgroup float*)convolved[turn])[thread_index] = value;
      const float square = lanes_sum<SIMD>(value * value);
      if (lane == 0 && thread_index < 2 * KEY_DIM) lengths[turn][simd] = square;
    } else if (thread_index == GATE_THREAD) {
      const float b = in[CHANNELS + VALUE_WIDTH + head], a = in[CHANNELS + VALUE_WIDTH + VALUE_HEADS + head];
      gates[turn] = float2(exp(-exp(a_log[head]) * softplus(a + dt_bias[head])), sigmoid(b));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);

    threadgroup const float* l = lengths[turn];
    const float query_scale = rsqrt((l[0] + l[1]) + (l[2] + l[3]) + L2_EPS) * rsqrt(float(KEY_DIM));
    const float key_scale = rsqrt((l[4] + l[5]) + (l[6] + l[7]) + L2_EPS);
    const float2 gate = gates[turn];
    threadgroup const float4* query = convolved[turn] + piece;
    threadgroup const float4* key = convolved[turn] + KEY_DIM / 4 + piece;
    float4 recall = float4(0.0f);
    for (int i = 0; i < OWN; ++i) {
      state[i] *= gate.x;
      recall = fma(state[i], key[i * SHARE], recall);
    }
    const float recalled = lanes_sum<SHARE>((recall.x + recall.y) + (recall.z + recall.w)) * key_scale;
    const float value = ((threadgroup const float*)convolved[turn])[2 * KEY_DIM + value_row];
    const float delta = (value - recalled) * gate.y * key_scale;
    float4 sums = float4(0.0f);
    for (int i = 0; i < OWN; ++i) {
      state[i] = fma(float4(delta), key[i * SHARE], state[i]);
      sums = fma(state[i], query[i * SHARE], sums);
    }
    const float out = lanes_sum<SHARE>((sums.x + sums.y) + (sums.z + sums.w)) * query_scale;
    // Lanes of a value row have the same; so this adds the rows of the SIMD-group.
    float square = out * out;
    for (int bit = SIMD / 2; bit >= SHARE; bit /= 2) square += simd_shuffle_xor(square, ushort(bit));
    if (lane == 0) squares[turn][simd] = square;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    float total = squares[turn][0];
    for (int i = 1; i < SIMDS; ++i) total += squares[turn][i];
    const float inverse = rsqrt(fma(total, 1.0f / VALUE_DIM, RMS_EPS));
    if (piece == 0) mixed[ulong(row) * VALUE_WIDTH + head * VALUE_DIM + value_row] = out * inverse * weight * silu(z);
  }
  for (int i = 0; i < OWN; ++i) own[i * SHARE] = state[i];
}
