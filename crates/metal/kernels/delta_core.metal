// delta_core: convolution, gates, the gated delta rule, and the gated norm.
//
// Split: a threadgroup of 512 threads a value head: its 128 x 128 state lies in their registers, four threads to a value row, 32 keys each, from the
// first load to the last store. Threads 0 to 383 convolve a channel of q, k or v each (two value heads convolve their key head's q and k both; it is less than
// a kernel of its own would cost), one more makes the gates. Two barriers a row. Grid (value heads, segments).
// Rows of a segment are taken in order, so that a prompt can come through in pieces; the state stays in registers between them.
// Reads and writes 2.1 MB of state each way (full geometry, one row): 6.8 us at 614 GB/s. Reached: unknown, it has run in the emulator only.
#include "common.h"
#include "prompt.h"

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
// What a head keeps of its state, and how strongly it writes.
inline float2 gates_of(float a, float b, float rate, float bias) { return float2(exp(-exp(rate) * softplus(a + bias)), sigmoid(b)); }
// The convolution of one channel, whose last inputs are in `past`, oldest first.
inline float convolve(float4 taps, thread float (&past)[TAIL], float newest) {
  const float sum = fma(taps.w, newest, fma(taps.z, past[2], fma(taps.y, past[1], taps.x * past[0])));
  past[0] = past[1], past[1] = past[2], past[2] = newest;
  return silu(sum);
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
      const float value = convolve(taps, past, in[channel]);
      ((threadgroup float*)convolved[turn])[thread_index] = value;
      const float square = lanes_sum<SIMD>(value * value);
      if (lane == 0 && thread_index < 2 * KEY_DIM) lengths[turn][simd] = square;
    } else if (thread_index == GATE_THREAD) {
      const float b = in[CHANNELS + VALUE_WIDTH + head], a = in[CHANNELS + VALUE_WIDTH + VALUE_HEADS + head];
      gates[turn] = gates_of(a, b, a_log[head], dt_bias[head]);
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

// ---- prompts --------------------------------------------------------------------------------------------------------------
//
// Three kernels, since what needs no order over the tokens is done for all of them at once:
// - delta_conv_prefill: convolution, lengths and gates. Grid (heads of q, k and v, groups of 16 tokens), a thread a channel.
// - delta_scan_prefill: the recurrence, token by token. Grid (value heads, 4): a threadgroup of 256 threads has 32 of a head's 128 value rows, eight threads to a row,
//   16 keys of the state each, in registers from the first token of the chunk to the last. Value rows know nothing of each other, so there is no barrier.
//   A token is 115 kFLOP a head: 0.11 GFLOP a token in the 30 layers of the full geometry, 2 % of what its products take.
// - delta_norm_prefill: the gated norm. Grid (heads / 8, tokens), a SIMD-group a head.
// The chunked form (WY) is not here: docs/lab/metal-prefill.md counts both.

constant constexpr int CONV_ROWS = 16;  // tokens of a threadgroup
kernel void delta_conv_prefill(device const Prompt* prompt [[buffer(0)]],
                               device const float* projected [[buffer(1)]],
                               device const float* conv [[buffer(2)]],
                               device const float* a_log [[buffer(3)]],
                               device const float* dt_bias [[buffer(4)]],
                               device const float* states [[buffer(5)]],
                               device float* convolved [[buffer(6)]],
                               device float2* gates [[buffer(7)]],
                               constant LayerArgs& args [[buffer(8)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint thread_index [[thread_index_in_threadgroup]],
                               uint simd [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float lengths[CONV_ROWS][KEY_DIM / SIMD];
  const uint first = group.y * CONV_ROWS;
  if (first >= prompt->rows) return;
  const uint count = min(prompt->rows - first, uint(CONV_ROWS)), vector = group.x, channel = vector * KEY_DIM + thread_index;
  device const float* tail = states + prompt->state * STATE_FLOATS + STATE_TAILS + args.ordinal * TAIL * CHANNELS + channel;
  device const float* in = projected + ulong(first) * DELTA_STRIDE;
  float past[TAIL], values[CONV_ROWS];
  for (int age = 0; age < TAIL; ++age) {  // oldest first; what lies before this chunk is in the tail
    const int row = int(first) + age - TAIL;
    past[age] = row < 0 ? tail[(row + TAIL) * CHANNELS] : projected[ulong(row) * DELTA_STRIDE + channel];
  }
  const float4 taps = ((device const float4*)conv)[channel];
  for (uint i = 0; i < uint(CONV_ROWS); ++i) values[i] = i < count ? convolve(taps, past, in[i * DELTA_STRIDE + channel]) : 0.0f;
  if (vector < 2 * KEY_HEADS) {
    for (int i = 0; i < CONV_ROWS; ++i) {
      const float square = lanes_sum<SIMD>(values[i] * values[i]);
      if (lane == 0) lengths[i][simd] = square;
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    // Keys have length one, and so have queries but for what scales scores.
    const float scale = vector < KEY_HEADS ? rsqrt(float(KEY_DIM)) : 1.0f;
    for (int i = 0; i < CONV_ROWS; ++i) {
      threadgroup const float* l = lengths[i];
      values[i] *= rsqrt((l[0] + l[1]) + (l[2] + l[3]) + L2_EPS) * scale;
    }
  } else if (thread_index < count) {
    const uint head = vector - 2 * KEY_HEADS;
    device const float* at = in + thread_index * DELTA_STRIDE + CHANNELS + VALUE_WIDTH + head;
    gates[ulong(first + thread_index) * VALUE_HEADS + head] = gates_of(at[VALUE_HEADS], at[0], a_log[head], dt_bias[head]);
  }
  for (uint i = 0; i < count; ++i) convolved[ulong(first + i) * CHANNELS + channel] = values[i];
}

constant constexpr int SCAN_THREADS = 256;
constant constexpr int SCAN_LANES = 8;                            // threads of a value row
constant constexpr int SCAN_ROWS = SCAN_THREADS / SCAN_LANES;     // value rows of a threadgroup
constant constexpr int SCAN_OWN = KEY_DIM / SCAN_LANES / 4;       // float4 of the state that a thread has
kernel void delta_scan_prefill(device const Prompt* prompt [[buffer(0)]],
                               device const float* convolved [[buffer(1)]],
                               device const float2* gates [[buffer(2)]],
                               device const float* projected [[buffer(3)]],
                               device float* states [[buffer(4)]],
                               device float* mixed [[buffer(5)]],
                               constant LayerArgs& args [[buffer(6)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint3 groups [[threadgroups_per_grid]],
                               uint thread_index [[thread_index_in_threadgroup]]) {
  const uint rows = prompt->rows, head = group.x, key_head = head / (VALUE_HEADS / KEY_HEADS);
  const uint value_row = group.y * SCAN_ROWS + thread_index / SCAN_LANES, piece = thread_index % SCAN_LANES;
  device float* of_sequence = states + prompt->state * STATE_FLOATS;
  device float4* own = (device float4*)(of_sequence + (args.ordinal * VALUE_HEADS + head) * HEAD_STATE + value_row * KEY_DIM) + piece;
  float4 state[SCAN_OWN];
  for (int i = 0; i < SCAN_OWN; ++i) state[i] = own[i * SCAN_LANES];
  for (uint row = 0; row < rows; ++row) {
    device const float* in = convolved + ulong(row) * CHANNELS;
    device const float4* query = (device const float4*)(in + key_head * KEY_DIM) + piece;
    device const float4* key = (device const float4*)(in + KEY_WIDTH + key_head * KEY_DIM) + piece;
    const float2 gate = gates[ulong(row) * VALUE_HEADS + head];
    float4 keys[SCAN_OWN];
    float4 recall = float4(0.0f), sums = float4(0.0f);
    for (int i = 0; i < SCAN_OWN; ++i) {
      keys[i] = key[i * SCAN_LANES];
      state[i] *= gate.x;
      recall = fma(state[i], keys[i], recall);
    }
    const float recalled = lanes_sum<SCAN_LANES>((recall.x + recall.y) + (recall.z + recall.w));
    const float delta = (in[2 * KEY_WIDTH + head * VALUE_DIM + value_row] - recalled) * gate.y;
    for (int i = 0; i < SCAN_OWN; ++i) {
      state[i] = fma(float4(delta), keys[i], state[i]);
      sums = fma(state[i], query[i * SCAN_LANES], sums);
    }
    const float out = lanes_sum<SCAN_LANES>((sums.x + sums.y) + (sums.z + sums.w));
    if (piece == 0) mixed[ulong(row) * VALUE_WIDTH + head * VALUE_DIM + value_row] = out;
  }
  for (int i = 0; i < SCAN_OWN; ++i) own[i * SCAN_LANES] = state[i];
  // The tails move on; delta_conv_prefill has read the old ones. All threads of the grid share the channels out.
  device float* tails = of_sequence + STATE_TAILS + args.ordinal * TAIL * CHANNELS;
  for (uint channel = (group.y * groups.x + group.x) * SCAN_THREADS + thread_index; channel < uint(CHANNELS); channel += groups.x * groups.y * SCAN_THREADS) {
    device float* tail = tails + channel;
    for (uint age = 0; age < uint(TAIL); ++age) {  // oldest first
      tail[age * CHANNELS] = age + rows < uint(TAIL) ? tail[(age + rows) * CHANNELS] : projected[ulong(age + rows - TAIL) * DELTA_STRIDE + channel];
    }
  }
}

constant constexpr int NORM_THREADS = 256;
constant constexpr int NORM_HEADS = NORM_THREADS / SIMD;  // of a threadgroup
kernel void delta_norm_prefill(device const Prompt* prompt [[buffer(0)]],
                               device const float* projected [[buffer(1)]],
                               device const float* norm [[buffer(2)]],
                               device float* mixed [[buffer(3)]],
                               uint3 group [[threadgroup_position_in_grid]],
                               uint simd [[simdgroup_index_in_threadgroup]],
                               uint lane [[thread_index_in_simdgroup]]) {
  const uint row = group.y, head = group.x * NORM_HEADS + simd;
  if (row >= prompt->rows || head >= VALUE_HEADS) return;
  device float4* at = (device float4*)(mixed + ulong(row) * VALUE_WIDTH + head * VALUE_DIM) + lane;
  const float4 out = *at, z = ((device const float4*)(projected + ulong(row) * DELTA_STRIDE + CHANNELS + head * VALUE_DIM))[lane];
  const float4 squares = out * out;
  const float total = lanes_sum<SIMD>((squares.x + squares.y) + (squares.z + squares.w));
  const float inverse = rsqrt(fma(total, 1.0f / VALUE_DIM, RMS_EPS));
  const float4 gate = float4(silu(z.x), silu(z.y), silu(z.z), silu(z.w));
  *at = out * inverse * ((device const float4*)norm)[lane] * gate;
}
