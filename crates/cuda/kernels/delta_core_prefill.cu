// delta_core of a prompt, in chunks of 64 tokens on tensor cores (delta_chunk.cuh has the formulas).
//
// delta_chunk_prefill: a block a chunk of one key head and its two value heads: convolution of keys and queries and their lengths, gates,
// their products with each other, the triangular inverses in f32, everything written as the next kernel wants it. Reads and writes 28 KB a
// token: 25 us for 4,096 at 4.6 TB/s. Reached: 69 us; it is bound by its instructions, some
// 5,000 of a warp (three blocks a multiprocessor, 80 registers a thread).
//
// delta_core_prefill: chunk after chunk. Four blocks a value head, each 32 of its 128 value rows. A pair of warps has 16 of them, each
// warp half of their keys, the state in registers as f32 all the way. Values are the rows of every product and tokens or keys the columns, so that
// the sums of one are the left operand of the next in the same lanes; only the two halves of S k go through shared memory. Two more warps answer
// the pair's queries a little later, and others convolve the values of the next chunk and fetch what belongs to it.
// A chunk takes a scheduler 336 products of 16 x 8 x 16, some 2,200 cycles. Reached: 5,500, 178 us for 4,096 tokens.
//
// delta_round_prefill: the gated norm, rounded for the projection after it; a block a token, a warp a chunk of 256 (two heads). Tails move on.
// Reads and writes 33 KB a token: 29 us for 4,096. Reached: 42 us.
#include "delta_chunk.cuh"
#include "gemm.cuh"

// ---- all chunks at once ----------------------------------------------------------------------------------------------------

constexpr int CHUNK_THREADS = 256, CHUNK_WARPS = CHUNK_THREADS / 32;
constexpr int PAIRED = KEY_DIM / 2;       // threads that have the channels of a head's queries or keys, two each
constexpr int CONV_PART = CHUNK_TOKENS / (CHUNK_THREADS / (2 * PAIRED));  // tokens of a thread
constexpr int CONV_TOKENS = 16;           // that it reads before it computes
static_assert(CONV_PART % CONV_TOKENS == 0, "whole steps");
constexpr int CONV_STRIDE = KEY_DIM + 4;  // floats from token to token of convolved keys and queries
constexpr int SOLVE_STRIDE = CHUNK_TOKENS + 4;
constexpr int STAGED_BYTES = CHUNK_TOKENS * CONV_STRIDE * 4;
// Of the block's memory: convolved queries and keys, then f16 of them in two parts, then A and T; and what the gates become.
constexpr int SOLVE_FLOATS = CHUNK_TOKENS * SOLVE_STRIDE;
constexpr int CHUNK_FLOATS = 2 * SHARERS * SOLVE_FLOATS;
static_assert(CHUNK_FLOATS * 4 >= 2 * STAGED_BYTES && STAGED_BYTES >= 2 * KEYS_BYTES && STAGED_BYTES % 128 == 0, "they share memory");
struct ChunkGates {
  float sum[SHARERS][CHUNK_TOKENS], rest[SHARERS][CHUNK_TOKENS];  // b[t], in two parts
  float strength[SHARERS][CHUNK_TOKENS];                          // beta[t]
};
constexpr int CHUNK_SHARED = CHUNK_FLOATS * 4 + sizeof(ChunkGates);
constexpr int CHUNK_BLOCKS = SHARED_LIMIT / CHUNK_SHARED < 3 ? SHARED_LIMIT / CHUNK_SHARED : 3;  // of a multiprocessor
static_assert(CHUNK_BLOCKS > 0, "a chunk fits into shared memory");
constexpr float LEAST_DECAY = -1000.0f;  // of a token, its logarithm: exp of it is zero, and 64 of them are a number

// A sum of f32 in two parts: differences of sums stay as good as the sums' terms.
struct Sum {
  float high, low;
  __device__ __forceinline__ void add(float more, float more_low) {
    const float s = high + more, part = s - high, lost = ((high - (s - part)) + (more - part)) + (low + more_low);
    high = s + lost, low = lost - (high - s);
  }
};

// The inverse of 1 + A, A strictly lower, of 16 x 16: column `column`, which is written into `to`.
__device__ __forceinline__ void invert_column(const float* a, float* to, int column) {
  float x[16];
#pragma unroll
  for (int row = 0; row < 16; ++row) {
    float sum[2] = {row == column ? 1.0f : 0.0f, 0};
#pragma unroll
    for (int i = 0; i < row; i += 4) {
      const float4 four = *(const float4*)(a + row * SOLVE_STRIDE + i);
      sum[0] = __fmaf_rn(-four.x, x[i], sum[0]);
      if (i + 1 < row) sum[1] = __fmaf_rn(-four.y, x[i + 1], sum[1]);
      if (i + 2 < row) sum[0] = __fmaf_rn(-four.z, x[i + 2], sum[0]);
      if (i + 3 < row) sum[1] = __fmaf_rn(-four.w, x[i + 3], sum[1]);
    }
    x[row] = sum[0] + sum[1];
    to[row * SOLVE_STRIDE + column] = x[row];
  }
}
// sums[0 ..] += a[0 .. COUNT) b[0 .. COUNT)[0 ..], b's rows SOLVE_STRIDE apart.
template <int COUNT, int COLUMNS> __device__ __forceinline__ void row_product(float (&sums)[COLUMNS], const float* a, const float* b) {
#pragma unroll 2
  for (int k = 0; k < COUNT; k += 4) {
    const float4 four = *(const float4*)(a + k);
    const float factor[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int c = 0; c < COLUMNS; c += 4) {
        const float4 row = *(const float4*)(b + (k + e) * SOLVE_STRIDE + c);
        sums[c] = __fmaf_rn(factor[e], row.x, sums[c]), sums[c + 1] = __fmaf_rn(factor[e], row.y, sums[c + 1]);
        sums[c + 2] = __fmaf_rn(factor[e], row.z, sums[c + 2]), sums[c + 3] = __fmaf_rn(factor[e], row.w, sums[c + 3]);
      }
  }
}
template <int COLUMNS> __device__ __forceinline__ void store_row(float* to, const float (&v)[COLUMNS], float sign) {
#pragma unroll
  for (int c = 0; c < COLUMNS; c += 4) *(float4*)(to + c) = make_float4(sign * v[c], sign * v[c + 1], sign * v[c + 2], sign * v[c + 3]);
}
// T = (1 + A)^-1 of both heads by all threads, in f32: blocks of 16 on the diagonal, then what is between two of them is
// -T22 (A21 T11), twice as large each time. A21 T11 waits where T is zero, above the diagonal.
__device__ __forceinline__ void invert(const float* solve, float* inverse, int warp, int lane) {
  {
    const int column = lane % 16, block = warp % 2 * 2 + lane / 16, head = warp / 2;
    const int at = head * SOLVE_FLOATS + block * 16 * (SOLVE_STRIDE + 1);
    if (head < SHARERS) invert_column(solve + at, inverse + at, column);
  }
  __syncthreads();
  {
    const int head = warp / 4, row = lane % 16, column = (warp % 2 * 2 + lane / 16) * 4, corner = warp / 2 % 2 * 32;
    const float* a = solve + head * SOLVE_FLOATS + (corner + 16) * SOLVE_STRIDE + corner;
    float* upper = inverse + head * SOLVE_FLOATS + corner * (SOLVE_STRIDE + 1);
    float* lower = upper + 16 * SOLVE_STRIDE;
    float sums[4] = {};
    row_product<16>(sums, a + row * SOLVE_STRIDE, upper + column);
    store_row(upper + row * SOLVE_STRIDE + 16 + column, sums, 1.0f);
    __syncthreads();
    float between[4] = {};
    row_product<16>(between, lower + row * SOLVE_STRIDE + 16, upper + 16 + column);
    store_row(lower + row * SOLVE_STRIDE + column, between, -1.0f);
  }
  __syncthreads();
  {
    const int head = warp / 4, row = lane, column = warp % 4 * 8;
    const float* a = solve + head * SOLVE_FLOATS + 32 * SOLVE_STRIDE;
    float* upper = inverse + head * SOLVE_FLOATS;
    float* lower = upper + 32 * SOLVE_STRIDE;
    float sums[8] = {};
    if (column < 16) row_product<16>(sums, a + row * SOLVE_STRIDE, upper + column);
    row_product<16>(sums, a + row * SOLVE_STRIDE + 16, upper + 16 * SOLVE_STRIDE + column);
    store_row(upper + row * SOLVE_STRIDE + 32 + column, sums, 1.0f);
    __syncthreads();
    float between[8] = {};
    row_product<16>(between, lower + row * SOLVE_STRIDE + 32, upper + 32 + column);
    if (row >= 16) row_product<16>(between, lower + row * SOLVE_STRIDE + 48, upper + 16 * SOLVE_STRIDE + 32 + column);
    store_row(lower + row * SOLVE_STRIDE + column, between, -1.0f);
  }
  __syncthreads();
}

// A lower triangle's block by its number.
__device__ __forceinline__ int lower_row(int block) { return (block >= 1) + (block >= 3) + (block >= 6); }

LAUNCH_ROWS(delta_chunk_prefill, KEY_HEADS, CHUNK_THREADS, CHUNK_SHARED, CHUNK_TOKENS)
// Grid (key heads, chunks). `keys` has SHARED_PART bytes for each chunk and key head, `heads` HEAD_PART for each chunk and value head.
extern "C" __global__ void __launch_bounds__(CHUNK_THREADS, CHUNK_BLOCKS)
    delta_chunk_prefill(const Prompt* prompt, const u8* proj, const float* conv, const float* a_log, const float* dt_bias, u8* keys,
                        u8* heads, u32 ordinal) {
  extern __shared__ __align__(16) u8 shared[];
  const int key_head = blockIdx.x, chunk = blockIdx.y, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const int rows = prompt->rows, row0 = chunk * CHUNK_TOKENS - (int)(prompt->position % CHUNK_TOKENS);
  if (row0 >= rows) return;
  ChunkGates& gates = *(ChunkGates*)(shared + CHUNK_FLOATS * 4);
  const Inputs inputs(prompt, proj, ordinal);
  u8* keys_out = keys + ((u64)chunk * KEY_HEADS + key_head) * SHARED_PART;
  u8* heads_out = heads + ((u64)chunk * VALUE_HEADS + key_head * SHARERS) * HEAD_PART;

  // What the gates are of, of a value head a warp, two tokens a lane: asked for before the rest.
  const int gate_head = key_head * SHARERS + warp;
  float kept[2] = {}, strong[2] = {}, rate = 0, bias = 0;
  if (warp < SHARERS) {
    rate = a_log[gate_head], bias = dt_bias[gate_head];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int row = min(max(row0 + lane * 2 + i, 0), rows - 1), n = CHANNELS + VALUE_WIDTH + gate_head;
      strong[i] = one_result(proj, n, row, rows), kept[i] = one_result(proj, n + VALUE_HEADS, row, rows);
    }
  }
  float* staged = (float*)shared;
  {
    const int which = thread / PAIRED % 2, part = thread / (2 * PAIRED) * CONV_PART, in_head = thread % PAIRED * 2;
    const int channel = which * KEY_WIDTH + key_head * KEY_DIM + in_head, row = row0 + part;
    const float4 taps[2] = {((const float4*)conv)[channel], ((const float4*)conv)[channel + 1]};
    u32 v[TAIL + CONV_TOKENS], next[CONV_TOKENS];
#pragma unroll
    for (int i = 0; i < TAIL; ++i) v[i] = inputs.at(row - TAIL + i, channel);
    inputs.read(next, row, channel);
    float* to = staged + (which * CHUNK_TOKENS + part) * CONV_STRIDE + in_head;
#pragma unroll 1
    for (int first = 0; first < CONV_PART; first += CONV_TOKENS) {
#pragma unroll
      for (int i = 0; i < CONV_TOKENS; ++i) v[TAIL + i] = next[i];
      if (first + CONV_TOKENS < CONV_PART) inputs.read(next, row + first + CONV_TOKENS, channel);
      float2 convolved[CONV_TOKENS];
      quick_convolve(taps, v, convolved);
#pragma unroll
      for (int i = 0; i < CONV_TOKENS; ++i) *(float2*)(to + (first + i) * CONV_STRIDE) = convolved[i];
#pragma unroll
      for (int i = 0; i < TAIL; ++i) v[i] = v[CONV_TOKENS + i];
    }
    if (row < 0 || row + CONV_PART > rows)
      for (int i = 0; i < CONV_PART; ++i)
        if (!inputs.has(row + i)) *(float2*)(to + i * CONV_STRIDE) = make_float2(0, 0);
  }
  if (warp < SHARERS) {
    float log_keep[2], strength[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const bool has = inputs.has(row0 + lane * 2 + i);
      log_keep[i] = has ? fmaxf(-expf(rate) * softplus(kept[i] + bias), LEAST_DECAY) : 0.0f;
      strength[i] = has ? sigmoid(strong[i]) : 0.0f;
    }
    Sum through = {log_keep[0], 0};  // this lane's tokens and all before
    through.add(log_keep[1], 0);
#pragma unroll 1
    for (int step = 1; step < 32; step *= 2) {
      const float high = __shfl_up_sync(~0u, through.high, step), low = __shfl_up_sync(~0u, through.low, step);
      if (lane >= step) through.add(high, low);
    }
    Sum sums[2] = {through, through};
    sums[0].add(-log_keep[1], 0);
    const float all_high = __shfl_sync(~0u, through.high, 31), all_low = __shfl_sync(~0u, through.low, 31);
    float* vectors = (float*)(heads_out + warp * HEAD_PART + DECAYS) + lane * 2;
    float decay[2], rest[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      gates.sum[warp][lane * 2 + i] = sums[i].high;
      gates.rest[warp][lane * 2 + i] = sums[i].low;
      gates.strength[warp][lane * 2 + i] = strength[i];
      decay[i] = expf(sums[i].high + sums[i].low);
      rest[i] = expf(fminf((all_high - sums[i].high) + (all_low - sums[i].low), 0.0f));
    }
    *(float2*)vectors = make_float2(decay[0], decay[1]);
    *(float2*)(vectors + CHUNK_TOKENS) = make_float2(rest[0], rest[1]);
  }
  __syncthreads();
  // Lengths, and f16, where the numbers were: a lane a quarter of a token's channels, 32 i + 8 part.
#pragma unroll 1
  for (int which = 0; which < 2; ++which) {
    const int token = warp * 8 + lane % 8, part = lane / 8;
    float v[KEY_DIM / 4], square = 0;
#pragma unroll
    for (int i = 0; i < KEY_DIM / 4; i += 4) {
      const float4 four = *(const float4*)(staged + (which * CHUNK_TOKENS + token) * CONV_STRIDE + i / 8 * 32 + part * 8 + i % 8);
      v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
      square += (four.x * four.x + four.y * four.y) + (four.z * four.z + four.w * four.w);
    }
    square += __shfl_xor_sync(~0u, square, 8);
    square += __shfl_xor_sync(~0u, square, 16);
    const float scale = rsqrtf(square + L2_EPS);
    __syncthreads();
    u8* here = shared + which * STAGED_BYTES;
    u8* there = keys_out + (which ? KEYS_HIGH : QUERIES);
#pragma unroll
    for (int i = 0; i < KEY_DIM / 4; i += 8) {
      u32 high[4], low[4];
#pragma unroll
      for (int e = 0; e < 4; ++e) split(v[i + 2 * e] * scale, v[i + 2 * e + 1] * scale, high[e], low[e]);
      const int at = key_block(token / 16, i / 4 + part / 2) + token % 16 / 8 * 256 + part % 2 * 128 + token % 8 * 16;
      *(uint4*)(here + at) = *(uint4*)(there + at) = make_uint4(high[0], high[1], high[2], high[3]);
      *(uint4*)(here + KEYS_BYTES + at) = make_uint4(low[0], low[1], low[2], low[3]);
      if (which) *(uint4*)(there + KEYS_BYTES + at) = make_uint4(low[0], low[1], low[2], low[3]);
    }
  }
  __syncthreads();
  // Keys with keys, queries with keys: 20 blocks of 16 x 16, up to three a warp.
  constexpr int GRAM_BLOCKS = 2 * LOWER_BLOCKS, GRAM_EACH = ceil_div(GRAM_BLOCKS, CHUNK_WARPS);
  float gram[GRAM_EACH][2][4];
#pragma unroll
  for (int n = 0; n < GRAM_EACH; ++n) {
    const int item = warp + n * CHUNK_WARPS, block = item % LOWER_BLOCKS, row = lower_row(block), column = block - row * (row + 1) / 2;
    float main[2][4] = {}, minor[2][4] = {};
    if (item < GRAM_BLOCKS) {
      const u32 left = shared_address(shared) + (item < LOWER_BLOCKS ? STAGED_BYTES : 0) + key_block(row, 0) + lane * 16;
      const u32 right = shared_address(shared) + STAGED_BYTES + key_block(column, 0) + lane * 16;
#pragma unroll 2
      for (int k = 0; k < KEY_BLOCKS; ++k) {
        u32 a[4], a_low[4], b[4], b_low[4];
        load_block(a, left + k * BLOCK_BYTES), load_block(a_low, left + KEYS_BYTES + k * BLOCK_BYTES);
        load_block(b, right + k * BLOCK_BYTES), load_block(b_low, right + KEYS_BYTES + k * BLOCK_BYTES);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          mma_f16(main[half], a[0], a[2], a[1], a[3], b[2 * half], b[2 * half + 1]);
          mma_f16(minor[half], a_low[0], a_low[2], a_low[1], a_low[3], b[2 * half], b[2 * half + 1]);
          mma_f16(minor[half], a[0], a[2], a[1], a[3], b_low[2 * half], b_low[2 * half + 1]);
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half)
#pragma unroll
      for (int c = 0; c < 4; ++c) gram[n][half][c] = main[half][c] + minor[half][c];
  }
  __syncthreads();
  float* solve = (float*)shared;
  float* inverse = solve + SHARERS * SOLVE_FLOATS;
#pragma unroll
  for (int n = 0; n < GRAM_EACH; ++n) {
    const int item = warp + n * CHUNK_WARPS, block = item % LOWER_BLOCKS, row = lower_row(block), column = block - row * (row + 1) / 2;
    if (item >= GRAM_BLOCKS) continue;
#pragma unroll 1
    for (int head = 0; head < SHARERS; ++head)
#pragma unroll
      for (int half = 0; half < 2; ++half)
#pragma unroll
        for (int lower = 0; lower < 2; ++lower) {
          const int t = row * 16 + lower * 8 + lane / 4, s = column * 16 + half * 8 + lane % 4 * 2;
          float entry[2];
#pragma unroll
          for (int e = 0; e < 2; ++e) {
            const float log = (gates.sum[head][t] - gates.sum[head][s + e]) + (gates.rest[head][t] - gates.rest[head][s + e]);
            entry[e] = gram[n][half][lower * 2 + e] * fast_exp2(log * LOG2_E);
          }
          if (item < LOWER_BLOCKS) {
            const float strength = gates.strength[head][t];
            *(float2*)(solve + (head * CHUNK_TOKENS + t) * SOLVE_STRIDE + s) =
                make_float2(s < t ? strength * entry[0] : 0.0f, s + 1 < t ? strength * entry[1] : 0.0f);
          } else {
            *(u32*)(heads_out + head * HEAD_PART + MIX + block * BLOCK_BYTES + lower * 256 + half * 128 + lane * 4) =
                pair_f16(s <= t ? entry[0] : 0.0f, s + 1 <= t ? entry[1] : 0.0f);
          }
        }
  }
  __syncthreads();
  invert(solve, inverse, warp, lane);
  for (int i = thread; i < SHARERS * LOWER_BLOCKS * 32; i += CHUNK_THREADS) {  // eight columns of a row
    const int head = i / (LOWER_BLOCKS * 32), unit = i % (LOWER_BLOCKS * 32), block = unit / 32, row = lower_row(block);
    const int t = row * 16 + unit % 32 / 16 * 8 + unit % 8, s = (block - row * (row + 1) / 2) * 16 + unit % 16 / 8 * 8;
    const float* from = inverse + (head * CHUNK_TOKENS + t) * SOLVE_STRIDE + s;
    u32 high[4], low[4];
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 two = *(const float2*)(from + 2 * e), strength = *(const float2*)(gates.strength[head] + s + 2 * e);
      split(two.x * strength.x, two.y * strength.y, high[e], low[e]);
    }
    u8* to = heads_out + head * HEAD_PART + unit * 16;
    *(uint4*)(to + SOLVE_HIGH) = make_uint4(high[0], high[1], high[2], high[3]);
    *(uint4*)(to + SOLVE_LOW) = make_uint4(low[0], low[1], low[2], low[3]);
  }
}

// ---- chunk after chunk -----------------------------------------------------------------------------------------------------

constexpr int PAIR_ROWS = 16;                // value rows of two warps
constexpr int HALF_BLOCKS = KEY_BLOCKS / 2;  // of keys, a warp's
constexpr int TOKEN_TILES = CHUNK_TOKENS / 8;
// A stage of shared memory: what the other kernel made for a chunk.
constexpr int STAGE_HEAD = SHARED_PART, CORE_STAGE = STAGE_HEAD + HEAD_PART;
// Of a pair: what its warps tell each other of S k; the state as a chunk begins with it, as left operands; and what tokens write.
constexpr int EXCHANGE_BYTES = 2 * TOKEN_TILES * 512, STATE_BYTES = 2 * KEY_BLOCKS * 512, WRITTEN_BYTES = TOKEN_TILES * 512;
constexpr int VALUES_BYTES = CHUNK_TOKENS * PAIR_ROWS * 4;
constexpr int CORE_BARRIERS = 128;
constexpr int core_shared(int pairs, int stages) {
  return stages * CORE_STAGE + pairs * (stages * (EXCHANGE_BYTES + VALUES_BYTES) + STATE_BYTES + WRITTEN_BYTES) + CORE_BARRIERS;
}
constexpr int PAIRS = core_shared(2, 1) <= SHARED_LIMIT ? 2 : 1;  // of a block
constexpr int CORE_STAGES = core_shared(PAIRS, 2) <= SHARED_LIMIT ? 2 : 1;
constexpr int CORE_SHARED = core_shared(PAIRS, CORE_STAGES);
static_assert(CORE_SHARED <= SHARED_LIMIT, "a chunk fits into shared memory");
constexpr int SLICE = PAIRS * PAIR_ROWS, SLICES = VALUE_DIM / SLICE;  // value rows of a block
// Warps: those that have the state, those that answer, and those that convolve values (a lane eight tokens of two channels), of which the first
// fetches. A thirteenth warp would cost the others registers.
constexpr int STRIP = 8, STATE_WARPS = 2 * PAIRS, ANSWER_WARPS = 2 * PAIRS, CONV_WARPS = CHUNK_TOKENS / STRIP * SLICE / 2 / 32;
constexpr int FIRST_CONV = STATE_WARPS + ANSWER_WARPS, CORE_WARPS = FIRST_CONV + CONV_WARPS, CORE_THREADS = CORE_WARPS * 32;

// Barriers: of a stage `full` and `empty`, of its values `ready` and `used`; of a pair, whether the state and what tokens write may be
// read, and written again.
struct CoreBarriers {
  u32 first;
  __device__ __forceinline__ u32 full(int stage) const { return first + stage * 32; }
  __device__ __forceinline__ u32 empty(int stage) const { return first + stage * 32 + 8; }
  __device__ __forceinline__ u32 values_ready(int stage) const { return first + stage * 32 + 16; }
  __device__ __forceinline__ u32 values_used(int stage) const { return first + stage * 32 + 24; }
  __device__ __forceinline__ u32 state_ready(int pair) const { return first + 64 + pair * 32; }
  __device__ __forceinline__ u32 state_used(int pair) const { return first + 64 + pair * 32 + 8; }
  __device__ __forceinline__ u32 written_ready(int pair) const { return first + 64 + pair * 32 + 16; }
  __device__ __forceinline__ u32 written_used(int pair) const { return first + 64 + pair * 32 + 24; }
};
// A warp arrives when all its lanes are done.
__device__ __forceinline__ void warp_arrive(u32 barrier, int lane) {
  __syncwarp();
  if (lane == 0) meet_arrive(barrier);
}
// Waits for the other warp of a pair.
__device__ __forceinline__ void wait_pair(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(pair + 1) : "memory"); }
// A left operand in shared memory, each lane's registers beside its neighbours'.
__device__ __forceinline__ void keep_left(u8* to, const Left& left, int lane) {
  *(uint4*)(to + lane * 16) = make_uint4(left.high[0], left.high[1], left.high[2], left.high[3]);
  *(uint4*)(to + 512 + lane * 16) = make_uint4(left.low[0], left.low[1], left.low[2], left.low[3]);
}
__device__ __forceinline__ void read_left(const u8* from, Left& left, int lane) {
  const uint4 high = *(const uint4*)(from + lane * 16), low = *(const uint4*)(from + 512 + lane * 16);
  left.high[0] = high.x, left.high[1] = high.y, left.high[2] = high.z, left.high[3] = high.w;
  left.low[0] = low.x, left.low[1] = low.y, left.low[2] = low.z, left.low[3] = low.w;
}

LAUNCH_ROWS(delta_core_prefill, SLICES * VALUE_HEADS, CORE_THREADS, CORE_SHARED, 1)
// `out`: the state's answers.
extern "C" __global__ void __launch_bounds__(CORE_THREADS, 1)
    delta_core_prefill(const Prompt* prompt, const u8* keys, const u8* heads, const u8* proj, const float* conv, float* out, u32 ordinal) {
  extern __shared__ __align__(16) u8 shared[];
  const int head = blockIdx.x / SLICES, first_value = head * VALUE_DIM + blockIdx.x % SLICES * SLICE;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, pair = warp / 2 % PAIRS, half = warp % 2, g = lane / 4, t = lane % 4;
  const int rows = prompt->rows, before = prompt->position % CHUNK_TOKENS, chunks = ceil_div(before + rows, CHUNK_TOKENS);
  u8* exchange = shared + CORE_STAGES * CORE_STAGE;
  u8* values = exchange + CORE_STAGES * PAIRS * EXCHANGE_BYTES;
  u8* state_left = values + CORE_STAGES * PAIRS * VALUES_BYTES + pair * STATE_BYTES;
  u8* written_told = values + CORE_STAGES * PAIRS * VALUES_BYTES + PAIRS * STATE_BYTES + pair * WRITTEN_BYTES;
  const CoreBarriers barriers = {shared_address(shared + CORE_SHARED - CORE_BARRIERS)};
  if (thread == 0) {
    for (int s = 0; s < CORE_STAGES; ++s) {
      meet_init(barriers.full(s), FETCH_ARRIVALS), meet_init(barriers.empty(s), STATE_WARPS + ANSWER_WARPS);
      meet_init(barriers.values_ready(s), CONV_WARPS), meet_init(barriers.values_used(s), STATE_WARPS);
    }
    for (int p = 0; p < PAIRS; ++p) {
      meet_init(barriers.state_ready(p), 2), meet_init(barriers.state_used(p), 2);
      meet_init(barriers.written_ready(p), 2), meet_init(barriers.written_used(p), 2);
    }
    barriers_ready();
  }
  __syncthreads();

  if (warp >= FIRST_CONV) {
    // Rows g of a pair's first and second eight, tokens 2 t and 2 t + 1 are neighbours, and t is where neither those who write nor those who
    // read meet in a bank.
    const int strip = ((warp - FIRST_CONV) * 32 + lane) / (SLICE / 2), in_slice = lane % (SLICE / 2) * 2, channel = 2 * KEY_WIDTH + first_value + in_slice;
    const float4 taps[2] = {((const float4*)conv)[channel], ((const float4*)conv)[channel + 1]};
    const Inputs inputs(prompt, proj, ordinal);
    const u8* keys_from = keys + head / SHARERS * SHARED_PART;
    const u8* head_from = heads + head * HEAD_PART;
    const u32 place = in_slice / 16 * VALUES_BYTES + strip * 512 + in_slice % 8 * 64 + in_slice / 8 % 2 * 8;
    int row = strip * STRIP - before;
    u32 next[TAIL + STRIP];  // of the next chunk
    inputs.read(next, row - TAIL, channel);
    for (int chunk = 0; chunk < chunks; ++chunk, row += CHUNK_TOKENS) {
      const int slot = chunk % CORE_STAGES;
      if (warp == FIRST_CONV) {
        const u32 to = shared_address(shared) + slot * CORE_STAGE;
        if (chunk >= CORE_STAGES) meet_wait(barriers.empty(slot), chunk / CORE_STAGES - 1);
        fetch_two(to, keys_from + (u64)chunk * KEY_HEADS * SHARED_PART, SHARED_PART, to + STAGE_HEAD,
                  head_from + (u64)chunk * VALUE_HEADS * HEAD_PART, HEAD_PART, barriers.full(slot), lane);
      }
      u32 now[TAIL + STRIP];
#pragma unroll
      for (int i = 0; i < TAIL + STRIP; ++i) now[i] = next[i];
      if (chunk + 1 < chunks) inputs.read(next, row + CHUNK_TOKENS - TAIL, channel);
      float2 v[STRIP];
      quick_convolve(taps, now, v);
      if (row < 0 || row + STRIP > rows) {
#pragma unroll
        for (int i = 0; i < STRIP; ++i)
          if (!inputs.has(row + i)) v[i] = make_float2(0, 0);
      }
      if (chunk >= CORE_STAGES) meet_wait(barriers.values_used(slot), chunk / CORE_STAGES - 1);
      u8* to = values + slot * PAIRS * VALUES_BYTES + place;
#pragma unroll
      for (int i = 0; i < STRIP / 2; ++i) {
        u8* at = to + (i ^ in_slice / 2 % 4) * 16;
        *(float2*)at = make_float2(v[2 * i].x, v[2 * i + 1].x);
        *(float2*)(at + 64) = make_float2(v[2 * i].y, v[2 * i + 1].y);
      }
      warp_arrive(barriers.values_ready(slot), lane);
    }
    return;
  }
  if (warp >= STATE_WARPS) {
    // Answers, of two blocks of 16 tokens of four: P takes as many products of these as of the others.
    const int mine[2] = {half ? 1 : 0, half ? 2 : 3};
    float* to = out + first_value + pair * PAIR_ROWS + g;
    for (int chunk = 0; chunk < chunks; ++chunk) {
      const int slot = chunk % CORE_STAGES;
      const u8* stage = shared + slot * CORE_STAGE;
      const u32 tiles = shared_address(stage) + lane * 16;
      const float* decays = (const float*)(stage + STAGE_HEAD + DECAYS);
      float answers[4][4] = {};
      meet_wait(barriers.full(slot), chunk / CORE_STAGES);
      meet_wait(barriers.state_ready(pair), chunk);
#pragma unroll
      for (int k = 0; k < KEY_BLOCKS; ++k) {
        Left s;
        read_left(state_left + k * 1024, s, lane);
        u32 query[2][4];
#pragma unroll
        for (int b = 0; b < 2; ++b) load_block(query[b], tiles + QUERIES + key_block(mine[b], k));
#pragma unroll
        for (int n = 0; n < 4; ++n) product(answers[n], s.high, query[n / 2][n % 2 * 2], query[n / 2][n % 2 * 2 + 1]);
#pragma unroll
        for (int n = 0; n < 4; ++n) product(answers[n], s.low, query[n / 2][n % 2 * 2], query[n / 2][n % 2 * 2 + 1]);
      }
      warp_arrive(barriers.state_used(pair), lane);
#pragma unroll
      for (int n = 0; n < 4; ++n) {
        const float2 decay = *(const float2*)(decays + mine[n / 2] * 16 + n % 2 * 8 + 2 * t);
        answers[n][0] *= decay.x, answers[n][1] *= decay.y, answers[n][2] *= decay.x, answers[n][3] *= decay.y;
      }
      meet_wait(barriers.written_ready(pair), chunk);
#pragma unroll
      for (int k = 0; k < TOKEN_BLOCKS; ++k) {
        const float4 first = ((const float4*)written_told)[2 * k * 32 + lane], second = ((const float4*)written_told)[(2 * k + 1) * 32 + lane];
        const float tile[2][4] = {{first.x, first.y, first.z, first.w}, {second.x, second.y, second.z, second.w}};
        Left d;
        d.set(tile[0], tile[1]);
#pragma unroll
        for (int b = 0; b < 2; ++b) {
          if (k > mine[b]) continue;
          u32 mix[4];
          load_block(mix, tiles + STAGE_HEAD + MIX + lower_block(mine[b], k));
#pragma unroll
          for (int n = 0; n < 2; ++n) {
            product(answers[2 * b + n], d.high, mix[2 * n], mix[2 * n + 1]);
            product(answers[2 * b + n], d.low, mix[2 * n], mix[2 * n + 1]);
          }
        }
      }
      warp_arrive(barriers.written_used(pair), lane);
      if (lane == 0) meet_arrive(barriers.empty(slot));
      const float scale = rsqrtf((float)KEY_DIM);
#pragma unroll
      for (int n = 0; n < 4; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int row = chunk * CHUNK_TOKENS - before + mine[n / 2] * 16 + n % 2 * 8 + 2 * t + c;
          if (row < 0 || row >= rows) continue;
          to[(u64)row * VALUE_WIDTH] = answers[n][c] * scale;
          to[(u64)row * VALUE_WIDTH + 8] = answers[n][2 + c] * scale;
        }
    }
    return;
  }

  // Rows g and g + 8 of the pair's, of this warp's half of the keys those at 8 n + 2 t + {0, 1}.
  float* at = (float*)prompt->state + ((u64)ordinal * VALUE_WIDTH + first_value + pair * PAIR_ROWS + g) * KEY_DIM + half * KEY_DIM / 2 + 2 * t;
  float state[2 * HALF_BLOCKS][4];
#pragma unroll
  for (int n = 0; n < 2 * HALF_BLOCKS; ++n) {
    const float2 upper = *(const float2*)(at + n * 8), lower = *(const float2*)(at + 8 * KEY_DIM + n * 8);
    state[n][0] = upper.x, state[n][1] = upper.y, state[n][2] = lower.x, state[n][3] = lower.y;
  }
  for (int chunk = 0; chunk < chunks; ++chunk) {
    const int slot = chunk % CORE_STAGES;
    const u8* stage = shared + slot * CORE_STAGE;
    const u32 tiles = shared_address(stage) + lane * 16;
    const float* decays = (const float*)(stage + STAGE_HEAD + DECAYS);
    const float* rests = (const float*)(stage + STAGE_HEAD + RESTS);
    float4* told = (float4*)(exchange + (slot * PAIRS + pair) * EXCHANGE_BYTES) + half * TOKEN_TILES * 32 + lane;
    const float4* heard = (const float4*)(exchange + (slot * PAIRS + pair) * EXCHANGE_BYTES) + (1 - half) * TOKEN_TILES * 32 + lane;
    float4* told_written = (float4*)written_told + lane;
    const float4* value = (const float4*)(values + (slot * PAIRS + pair) * VALUES_BYTES) + (lane ^ g / 2);
    meet_wait(barriers.full(slot), chunk / CORE_STAGES);
    if (chunk > 0) meet_wait(barriers.state_used(pair), chunk - 1);

    float recalled[TOKEN_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < HALF_BLOCKS; ++k) {
      Left s;
      s.set(state[2 * k], state[2 * k + 1]);
      keep_left(state_left + (half * HALF_BLOCKS + k) * 1024, s, lane);
      const u32 block = tiles + (half * HALF_BLOCKS + k) * BLOCK_BYTES;
      u32 high[TOKEN_BLOCKS][4], low[TOKEN_BLOCKS][4];
#pragma unroll
      for (int b = 0; b < TOKEN_BLOCKS; ++b) load_block(high[b], block + KEYS_HIGH + key_block(b, 0));
#pragma unroll
      for (int b = 0; b < TOKEN_BLOCKS; ++b) load_block(low[b], block + KEYS_LOW + key_block(b, 0));
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; ++n) product(recalled[n], s.high, high[n / 2][n % 2 * 2], high[n / 2][n % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; ++n) product(recalled[n], s.low, high[n / 2][n % 2 * 2], high[n / 2][n % 2 * 2 + 1]);
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; ++n) product(recalled[n], s.high, low[n / 2][n % 2 * 2], low[n / 2][n % 2 * 2 + 1]);
    }
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) told[n * 32] = make_float4(recalled[n][0], recalled[n][1], recalled[n][2], recalled[n][3]);
    // What is wanted less what this warp's half of the keys recalls, then less the other's.
    meet_wait(barriers.values_ready(slot), chunk / CORE_STAGES);
    float2 decay[TOKEN_TILES];
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
      const float4 wanted = value[n * 32];
      decay[n] = *(const float2*)(decays + 8 * n + 2 * t);
      recalled[n][0] = wanted.x - decay[n].x * recalled[n][0], recalled[n][1] = wanted.y - decay[n].y * recalled[n][1];
      recalled[n][2] = wanted.z - decay[n].x * recalled[n][2], recalled[n][3] = wanted.w - decay[n].y * recalled[n][3];
    }
    wait_pair(pair);
    if (lane == 0) meet_arrive(barriers.state_ready(pair)), meet_arrive(barriers.values_used(slot));
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n) {
      const float4 other = heard[n * 32];
      recalled[n][0] -= decay[n].x * other.x, recalled[n][1] -= decay[n].y * other.y;
      recalled[n][2] -= decay[n].x * other.z, recalled[n][3] -= decay[n].y * other.w;
    }
    float written[TOKEN_TILES][4] = {};
#pragma unroll
    for (int k = 0; k < TOKEN_BLOCKS; ++k) {
      Left y;
      y.set(recalled[2 * k], recalled[2 * k + 1]);
      u32 high[TOKEN_BLOCKS][4], low[TOKEN_BLOCKS][4];
#pragma unroll
      for (int b = k; b < TOKEN_BLOCKS; ++b) {
        load_block(high[b], tiles + STAGE_HEAD + SOLVE_HIGH + lower_block(b, k));
        load_block(low[b], tiles + STAGE_HEAD + SOLVE_LOW + lower_block(b, k));
      }
#pragma unroll
      for (int n = 2 * k; n < TOKEN_TILES; ++n) product(written[n], y.high, high[n / 2][n % 2 * 2], high[n / 2][n % 2 * 2 + 1]);
#pragma unroll
      for (int n = 2 * k; n < TOKEN_TILES; ++n) product(written[n], y.low, high[n / 2][n % 2 * 2], high[n / 2][n % 2 * 2 + 1]);
#pragma unroll
      for (int n = 2 * k; n < TOKEN_TILES; ++n) product(written[n], y.high, low[n / 2][n % 2 * 2], low[n / 2][n % 2 * 2 + 1]);
    }
    if (chunk > 0) meet_wait(barriers.written_used(pair), chunk - 1);
    // Both warps have all of it, each tells a half.
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; ++n)
      if (n / (TOKEN_TILES / 2) == half) told_written[n * 32] = make_float4(written[n][0], written[n][1], written[n][2], written[n][3]);
    warp_arrive(barriers.written_ready(pair), lane);
    const float keep = decays[CHUNK_TOKENS - 1];
#pragma unroll
    for (int n = 0; n < 2 * HALF_BLOCKS; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) state[n][c] *= keep;
#pragma unroll
    for (int k = 0; k < TOKEN_BLOCKS; ++k) {
#pragma unroll
      for (int n = 2 * k; n < 2 * k + 2; ++n) {
        const float2 rest = *(const float2*)(rests + 8 * n + 2 * t);
        written[n][0] *= rest.x, written[n][1] *= rest.y, written[n][2] *= rest.x, written[n][3] *= rest.y;
      }
      Left d;
      d.set(written[2 * k], written[2 * k + 1]);
      u32 high[HALF_BLOCKS][4], low[HALF_BLOCKS][4];
      const u32 block = tiles + half * HALF_BLOCKS * BLOCK_BYTES + key_block(k, 0);
#pragma unroll
      for (int b = 0; b < HALF_BLOCKS; ++b) load_block_transposed(high[b], block + b * BLOCK_BYTES + KEYS_HIGH);
#pragma unroll
      for (int b = 0; b < HALF_BLOCKS; ++b) load_block_transposed(low[b], block + b * BLOCK_BYTES + KEYS_LOW);
#pragma unroll
      for (int n = 0; n < 2 * HALF_BLOCKS; ++n) product(state[n], d.high, high[n / 2][n % 2], high[n / 2][n % 2 + 2]);
#pragma unroll
      for (int n = 0; n < 2 * HALF_BLOCKS; ++n) product(state[n], d.low, high[n / 2][n % 2], high[n / 2][n % 2 + 2]);
#pragma unroll
      for (int n = 0; n < 2 * HALF_BLOCKS; ++n) product(state[n], d.high, low[n / 2][n % 2], low[n / 2][n % 2 + 2]);
    }
    warp_arrive(barriers.empty(slot), lane);
    if (CORE_STAGES == 1) wait_pair(pair);  // before the exchange is used again
  }
#pragma unroll
  for (int n = 0; n < 2 * HALF_BLOCKS; ++n) {
    *(float2*)(at + n * 8) = make_float2(state[n][0], state[n][1]);
    *(float2*)(at + 8 * KEY_DIM + n * 8) = make_float2(state[n][2], state[n][3]);
  }
}

// ---- the gated norm --------------------------------------------------------------------------------------------------------

// Tails move on by the rows of the pass: a channel a thread.
__device__ __forceinline__ void move_tails(const Prompt* prompt, const u8* proj, u32 ordinal, int first, int step) {
  const int rows = prompt->rows;
  for (int channel = first; channel < CHANNELS; channel += step) {
    float* tail = (float*)prompt->state + STATES + (u64)ordinal * TAIL * CHANNELS + channel;
    float kept[TAIL];
#pragma unroll
    for (int age = 0; age < TAIL; ++age) {
      const int row = rows + age - TAIL;
      kept[age] = row < 0 ? tail[(row + TAIL) * CHANNELS] : one_result(proj, channel, row, rows);
    }
#pragma unroll
    for (int age = 0; age < TAIL; ++age) tail[age * CHANNELS] = kept[age];
  }
}

LAUNCH_PLANNED(delta_round_prefill, VALUE_PARTS * 32, 0)
extern "C" __global__ void __launch_bounds__(VALUE_PARTS * 32)
    delta_round_prefill(const Prompt* prompt, const float* out, const u8* proj, const float* gnorm, u8* operands, u32 ordinal) {
  const u32 row = blockIdx.x, rows = prompt->rows;
  if (row >= rows) return;
  move_tails(prompt, proj, ordinal, row * VALUE_PARTS * 32 + threadIdx.x, rows * VALUE_PARTS * 32);
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = warp * CHUNK + lane * 8;
  float v[8], z[8] = {}, weight[8];
  load8(out + (u64)row * VALUE_WIDTH, k, VALUE_WIDTH, v);
  if (k < VALUE_WIDTH) eight_results(proj, CHANNELS + k, row, rows, z);
  load8(gnorm, k % VALUE_DIM, VALUE_DIM, weight);
  float squares[8];
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    squares[e] = square_of(v[e]);
    v[e] = gated(v[e], weight[e], z[e]);
  }
  float sum = ((squares[0] + squares[1]) + (squares[2] + squares[3])) + ((squares[4] + squares[5]) + (squares[6] + squares[7]));
  sum += __shfl_xor_sync(~0u, sum, 1);
  sum += __shfl_xor_sync(~0u, sum, 2);
  const int first = lane & 16;
  const float4 quarters = make_float4(__shfl_sync(~0u, sum, first), __shfl_sync(~0u, sum, first + 4), __shfl_sync(~0u, sum, first + 8),
                                      __shfl_sync(~0u, sum, first + 12));
  const float inverse = head_inverse(quarters);
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(v[e], inverse);
  round_into(v, operands, row, prompt->rows, warp, lane);
}
