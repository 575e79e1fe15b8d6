// delta_core of a prompt: convolution and gates of all tokens at once, the recurrence token by token, the gated norm.
//
// delta_conv_prefill: a block 16 tokens of one head's queries, keys or values (a thread a channel); keys leave scaled to length
// one. Reads and writes 33 KB a token: 60 us for 4,096 at 4.6 TB/s.
//
// delta_core_prefill: the scan, four blocks a value head, each 32 of its 128 value rows, eight lanes two rows, the state in registers
// all the way; sixteen tokens' keys, queries and values are on their way while those before are used. Nothing waits for another
// warp but once in sixteen tokens. A token costs a lane 128 multiplications and additions, and a warp has a scheduler to itself; with
// two rows a lane reads keys and queries half as often, which is what the scan waited for before. The chunked form on tensor cores would add in another order than decode.
//
// delta_round_prefill: the gated norm, rounded for the projection after it; a block a token, a warp a chunk of 256 (two heads).
#include "delta.cuh"
#include "gemm.cuh"

constexpr int CONV_TOKENS = 16;
constexpr int VECTORS = 2 * KEY_HEADS + VALUE_HEADS;  // heads of queries, keys, values

LAUNCH_ROWS(delta_conv_prefill, VECTORS, 128, 0, CONV_TOKENS)
// Grid (heads, tokens / 16). `scales`: of each query head; `gates`: of each value head.
extern "C" __global__ void __launch_bounds__(128)
    delta_conv_prefill(const Prompt* prompt, const float* proj, const float* conv, const float* a_log, const float* dt_bias, float* mixed,
                       float* scales, float2* gates, u32 ordinal) {
  __shared__ float lengths[CONV_TOKENS][4];
  begin();
  const int row0 = blockIdx.y * CONV_TOKENS, rows = prompt->rows, vector = blockIdx.x, thread = threadIdx.x;
  if (row0 >= rows) return;
  const int count = min(CONV_TOKENS, rows - row0), channel = vector * 128 + thread;
  const float* tails = (const float*)prompt->state + STATES + (u64)ordinal * TAIL * CHANNELS + channel;
  const float* in = proj + (u64)row0 * DELTA_STRIDE;
  float past[TAIL], value[CONV_TOKENS];
#pragma unroll
  for (int age = 0; age < TAIL; ++age) {  // oldest first; what lies before this pass is in the tail
    const int row = row0 + age - TAIL;
    past[age] = row < 0 ? tails[(row + TAIL) * CHANNELS] : in[(age - TAIL) * DELTA_STRIDE + channel];
  }
  const float4 taps = *(const float4*)(conv + channel * CONV_WIDTH);
#pragma unroll
  for (int i = 0; i < CONV_TOKENS; ++i) value[i] = i < count ? in[(u64)i * DELTA_STRIDE + channel] : 0.0f;
#pragma unroll
  for (int i = 0; i < CONV_TOKENS; ++i) value[i] = convolve(taps, past, value[i]);
  if (vector < 2 * KEY_HEADS) {
#pragma unroll
    for (int i = 0; i < CONV_TOKENS; ++i) {
      const float square = lanes_sum<32>(square_of(value[i]));
      if (thread % 32 == 0) lengths[i][thread / 32] = square;
    }
    __syncthreads();
    if (vector >= KEY_HEADS) {
#pragma unroll
      for (int i = 0; i < CONV_TOKENS; ++i) value[i] = __fmul_rn(value[i], length_scale(lengths[i]));
    } else if (thread < count) {
      scales[(u64)(row0 + thread) * KEY_HEADS + vector] = query_scale_of(lengths[thread]);
    }
  } else if (thread < count) {
    const int head = vector - 2 * KEY_HEADS;
    const float* at = in + (u64)thread * DELTA_STRIDE + CHANNELS + VALUE_WIDTH + head;
    gates[(u64)(row0 + thread) * VALUE_HEADS + head] = gates_of(at[VALUE_HEADS], at[0], -expf(a_log[head]), dt_bias[head]);
  }
#pragma unroll
  for (int i = 0; i < CONV_TOKENS; ++i)
    if (i < count) mixed[(u64)(row0 + i) * CHANNELS + channel] = value[i];
}

constexpr int AHEAD = 16;  // tokens of a stage
constexpr int THREADS = QUARTER / 2 * ROW_LANES;  // eight lanes have two rows
struct Stage {
  float vectors[AHEAD][2][KEY_DIM];  // key, query
  float values[AHEAD][QUARTER];
  float2 gates[AHEAD];
};
LAUNCH_ROWS(delta_core_prefill, 4 * VALUE_HEADS, THREADS, 2 * sizeof(Stage), 1)
// `out`: the state's answers, not yet scaled by the query's length. Tails move on by the rows of this pass.
extern "C" __global__ void __launch_bounds__(THREADS)
    delta_core_prefill(const Prompt* prompt, const float* mixed, const float2* gates, const float* proj, float* out, u32 ordinal) {
  extern __shared__ __align__(16) u8 shared[];
  Stage* stages = (Stage*)shared;
  begin();
  const int rows = prompt->rows, head = blockIdx.x / 4, quarter = blockIdx.x % 4, key_head = head / (VALUE_HEADS / KEY_HEADS);
  const int thread = threadIdx.x, state_row = thread / ROW_LANES, piece = thread % ROW_LANES;
  float* states = (float*)prompt->state;
  float4* at = (float4*)(states + (((u64)ordinal * VALUE_HEADS + head) * VALUE_DIM + quarter * QUARTER + state_row) * KEY_DIM) + piece;
  constexpr int NEXT_ROW = QUARTER / 2;
  float4 state[2][4];  // of rows state_row and state_row + NEXT_ROW
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) state[r][i] = at[r * NEXT_ROW * KEY_DIM / 4 + i * 8];
  // Tails: a channel a thread, once around the grid.
  for (int channel = blockIdx.x * THREADS + thread; channel < CHANNELS; channel += gridDim.x * THREADS) {
    float* tail = states + STATES + (u64)ordinal * TAIL * CHANNELS + channel;
    float kept[TAIL];
#pragma unroll
    for (int age = 0; age < TAIL; ++age) {
      const int row = rows + age - TAIL;
      kept[age] = row < 0 ? tail[(row + TAIL) * CHANNELS] : proj[(u64)row * DELTA_STRIDE + channel];
    }
#pragma unroll
    for (int age = 0; age < TAIL; ++age) tail[age * CHANNELS] = kept[age];
  }
  const auto fetch = [&](int first) {
    Stage& to = stages[first / AHEAD % 2];
    constexpr int UNITS = KEY_DIM / 4;  // 16-byte units of a vector
    for (int i = thread; i < AHEAD * 2 * UNITS; i += THREADS) {
      const int token = i / (2 * UNITS), query = i / UNITS % 2, unit = i % UNITS;
      const float* from = mixed + (u64)(first + token) * CHANNELS + (query ? 0 : KEY_WIDTH) + key_head * KEY_DIM + unit * 4;
      if (first + token < rows) copy16(shared_address(&to.vectors[token][query][unit * 4]), from);
    }
    for (int i = thread; i < AHEAD * QUARTER / 4; i += THREADS) {
      const int token = i / (QUARTER / 4), unit = i % (QUARTER / 4);
      const float* from = mixed + (u64)(first + token) * CHANNELS + 2 * KEY_WIDTH + head * VALUE_DIM + quarter * QUARTER + unit * 4;
      if (first + token < rows) copy16(shared_address(&to.values[token][unit * 4]), from);
    }
    if (thread < AHEAD && first + thread < rows) copy8(shared_address(&to.gates[thread]), gates + (u64)(first + thread) * VALUE_HEADS + head);
    copies_commit();
  };
  fetch(0);
  float* to = out + head * VALUE_DIM + quarter * QUARTER + state_row;
  // A token's recall takes three exchanges. Meanwhile the state answers the query of the token before, and the exchanges carry
  // along what it answered to the one before that.
  float answer[2] = {};
  float4 query[4] = {};  // of the token before
  for (int first = 0; first < rows; first += AHEAD) {
    copies_wait<0>();
    __syncthreads();
    fetch(first + AHEAD);
    const Stage& from = stages[first / AHEAD % 2];
    const auto token = [&](int i) {
      float4 key[4];
#pragma unroll
      for (int k = 0; k < 4; ++k) key[k] = *(const float4*)&from.vectors[i][0][k * 32 + piece * 4];
      const float2 gate = from.gates[i];
      float recalled[2] = {dot16(state[0], key), dot16(state[1], key)}, asked[2] = {dot16(state[0], query), dot16(state[1], query)};
#pragma unroll
      for (int k = 0; k < 4; ++k) query[k] = *(const float4*)&from.vectors[i][1][k * 32 + piece * 4];
#pragma unroll
      for (int bit = 1; bit < ROW_LANES; bit *= 2) {
#pragma unroll
        for (int r = 0; r < 2; ++r) recalled[r] += __shfl_xor_sync(~0u, recalled[r], bit);
#pragma unroll
        for (int r = 0; r < 2; ++r) answer[r] += __shfl_xor_sync(~0u, answer[r], bit);
      }
      if (piece < 2 && first + i > 1) to[(u64)(first + i - 2) * VALUE_WIDTH + piece * NEXT_ROW] = piece ? answer[1] : answer[0];
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        decay16(state[r], gate.x);
        write16(state[r], key, correction(from.values[i][state_row + r * NEXT_ROW], recalled[r], gate));
        answer[r] = asked[r];
      }
    };
    if (first + AHEAD <= rows) {
#pragma unroll 4
      for (int i = 0; i < AHEAD; ++i) token(i);
    } else {
#pragma unroll 1
      for (int i = 0; i < rows - first; ++i) token(i);
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float last = lanes_sum<ROW_LANES>(dot16(state[r], query)), before = lanes_sum<ROW_LANES>(answer[r]);
    if (piece == r && rows > 1) to[(u64)(rows - 2) * VALUE_WIDTH + r * NEXT_ROW] = before;
    if (piece == r) to[(u64)(rows - 1) * VALUE_WIDTH + r * NEXT_ROW] = last;
  }
#pragma unroll
  for (int r = 0; r < 2; ++r)
#pragma unroll
    for (int i = 0; i < 4; ++i) at[r * NEXT_ROW * KEY_DIM / 4 + i * 8] = state[r][i];
}

LAUNCH_PLANNED(delta_round_prefill, VALUE_PARTS * 32, 0)
extern "C" __global__ void __launch_bounds__(VALUE_PARTS * 32)
    delta_round_prefill(const Prompt* prompt, const float* out, const float* scales, const float* proj, const float* gnorm, u8* packed) {
  begin();
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = warp * CHUNK + lane * 8, head = k / VALUE_DIM;
  float v[8], z[8], weight[8];
  load8(out + (u64)row * VALUE_WIDTH, k, VALUE_WIDTH, v);
  load8(proj + (u64)row * DELTA_STRIDE + CHANNELS, k, VALUE_WIDTH, z);
  load8(gnorm, k % VALUE_DIM, VALUE_DIM, weight);
  const float scale = head < VALUE_HEADS ? scales[(u64)row * KEY_HEADS + head / (VALUE_HEADS / KEY_HEADS)] : 0.0f;
  // As in decode: four rows a warp, eight warps a quarter of a head.
  float squares[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float o = __fmul_rn(v[e], scale);
    squares[e] = square_of(o);
    v[e] = gated(o, weight[e], z[e]);
  }
  float sum = ((squares[0] + squares[1]) + (squares[2] + squares[3])) + ((squares[4] + squares[5]) + (squares[6] + squares[7]));
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const int first = lane & 16;
  const float4 quarters = make_float4(__shfl_sync(~0u, sum, first), __shfl_sync(~0u, sum, first + 4), __shfl_sync(~0u, sum, first + 8),
                                      __shfl_sync(~0u, sum, first + 12));
  u8* to = packed + (u64)row * rounded_bytes(VALUE_PARTS);
  const float inverse = head_inverse(quarters);
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(v[e], inverse);
  round_into(v, to, warp, VALUE_PARTS, lane);
  if (threadIdx.x == 0) *(float*)(to + VALUE_PARTS * (PLANES + FACTORS)) = 1.0f;
}
