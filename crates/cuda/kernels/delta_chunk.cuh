// The gated delta rule of 64 tokens at once: what the kernels of a prompt leave for each other, and the products it takes.
//
// In a chunk that begins with the state S (values x keys), with b[t] the sum of the logarithms of the decays up to and with token t:
//
//   A[t][s] = beta[t] exp(b[t] - b[s]) k[t].k[s]   for s < t              T = (1 + A)^-1
//   X = K S^T      Y[t] = v[t] - exp(b[t]) X[t]      D = (T diag(beta)) Y       (what each token writes along its key)
//   out[t] = exp(b[t]) S q[t] + sum over s <= t of P[t][s] D[s],          P[t][s] = exp(b[t] - b[s]) q[t].k[s]
//   S <- exp(b[63]) S + sum over t of exp(b[63] - b[t]) D[t] k[t]^T
//
// Only T, Q, K and P do not know S: they are made for all chunks at once. Chunks begin at positions that are multiples of 64, so that
// a prompt has the same bits wherever it is cut at such positions; tokens of a chunk that are not of the pass have k, q, v, beta
// zero and decay nothing. Products are of f16 with f32 sums; a factor that f16 would spoil is two, what f16 holds of it and f16 of the rest.
#pragma once
#include "delta.cuh"
#include "prompt.cuh"

constexpr int CHUNK_TOKENS = 64;
constexpr int SHARERS = VALUE_HEADS / KEY_HEADS;  // value heads of a key head
static_assert(SHARERS == 2, "a block prepares two value heads");

// f16 matrices lie in blocks of 16 x 16, of four 8 x 8, {upper left, upper right, lower left, lower right}, each 128 bytes: what ldmatrix
// reads without two lanes in a bank, and what the copy engine moves in one piece.
constexpr int BLOCK_BYTES = 512;
constexpr int TOKEN_BLOCKS = CHUNK_TOKENS / 16, KEY_BLOCKS = KEY_DIM / 16;
constexpr int LOWER_BLOCKS = TOKEN_BLOCKS * (TOKEN_BLOCKS + 1) / 2;  // of a lower triangle
constexpr int KEYS_BYTES = TOKEN_BLOCKS * KEY_BLOCKS * BLOCK_BYTES;
constexpr int LOWER_BYTES = LOWER_BLOCKS * BLOCK_BYTES;
__device__ constexpr int key_block(int token, int key) { return (token * KEY_BLOCKS + key) * BLOCK_BYTES; }
__device__ constexpr int lower_block(int row, int column) { return (row * (row + 1) / 2 + column) * BLOCK_BYTES; }

// Of a chunk and key head: keys (two parts), queries.
constexpr int KEYS_HIGH = 0, KEYS_LOW = KEYS_BYTES, QUERIES = 2 * KEYS_BYTES, SHARED_PART = 3 * KEYS_BYTES;
// Of a chunk and value head: T diag(beta) (two parts), P, then f32 exp(b[t]) and exp(b[63] - b[t]).
constexpr int SOLVE_HIGH = 0, SOLVE_LOW = LOWER_BYTES, MIX = 2 * LOWER_BYTES, DECAYS = 3 * LOWER_BYTES;
constexpr int RESTS = DECAYS + CHUNK_TOKENS * 4, HEAD_PART = RESTS + CHUNK_TOKENS * 4;

// ---- barriers in shared memory, on every card ------------------------------------------------------------------------------

__device__ __forceinline__ void meet_init(u32 barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
__device__ __forceinline__ void meet_arrive(u32 barrier) {
  asm volatile("{\n.reg .b64 phase;\nmbarrier.arrive.shared.b64 phase, [%0];\n}" ::"r"(barrier) : "memory");
}
// Waits until all have arrived for time `time`, which counts from 0.
__device__ __forceinline__ void meet_wait(u32 barrier, u32 time) {
#if __CUDA_ARCH__ >= 900
  barrier_wait(barrier, time & 1);
#else
  asm volatile("{\n.reg .pred p;\nwaiting: mbarrier.test_wait.parity.shared.b64 p, [%0], %1;\n@!p bra waiting;\n}" ::"r"(barrier), "r"(time & 1) : "memory");
#endif
}
// Two pieces of memory as they are, asked for by one warp; `barrier` gets FETCH_ARRIVALS when they are there.
constexpr int FETCH_ARRIVALS = BULK_COPIES ? 1 : 32;
__device__ __forceinline__ void fetch_two(u32 to, const u8* from, int bytes, u32 to_other, const u8* other, int other_bytes, u32 barrier, int lane) {
#if __CUDA_ARCH__ >= 900
  if (lane == 0) {
    barrier_expect(barrier, bytes + other_bytes);
    bulk_copy_expected(to, from, bytes, barrier);
    bulk_copy_expected(to_other, other, other_bytes, barrier);
  }
  __syncwarp();
#else
#pragma unroll 4
  for (int i = lane * 16; i < bytes; i += 512) copy16(to + i, from + i);
  for (int i = lane * 16; i < other_bytes; i += 512) copy16(to_other + i, other + i);
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
#endif
}

// ---- inputs and products ---------------------------------------------------------------------------------------------------

// What the convolution reads, two neighbouring channels at a time: rows of `proj`, before this pass the tails'. A row that is neither has some
// numbers.
struct Inputs {
  const float* tails;
  const u8* proj;
  int rows;
  __device__ __forceinline__ Inputs(const Prompt* prompt, const u8* proj, u32 ordinal)
      : tails((const float*)prompt->state + STATES + (u64)ordinal * TAIL * CHANNELS), proj(proj), rows(prompt->rows) {}
  __device__ __forceinline__ bool has(int row) const { return row >= 0 && row < rows; }
  __device__ __forceinline__ u32 at(int row, int channel) const {
    if (row >= 0) return two_results(proj, channel, min(row, rows - 1), rows);
    const float2 tail = *(const float2*)(tails + max(row + TAIL, 0) * CHANNELS + channel);
    return f16_pair(tail.x, tail.y);
  }
  template <int COUNT> __device__ __forceinline__ void read(u32 (&to)[COUNT], int row, int channel) const {
    if (row >= 0 && row + COUNT <= rows) {
      // Rows that are eight apart are swapped alike.
      const u8* from = proj + ((u64)(channel / COLUMN) * rows + row) * COLUMN_BYTES + channel % 8 * 2;
      u32 at[EIGHT];
#pragma unroll
      for (int i = 0; i < EIGHT && i < COUNT; ++i) at[i] = i * COLUMN_BYTES + ((channel % COLUMN / 8) ^ (row + i) % EIGHT) * 16;
#pragma unroll
      for (int i = 0; i < COUNT; ++i) to[i] = *(const u32*)(from + at[i % EIGHT] + i / EIGHT * (EIGHT * COLUMN_BYTES));
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) to[i] = at(row + i, channel);
    }
  }
};
// As in decode, but for the last bits.
__device__ __forceinline__ float quick_silu(float x) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(1.0f + fast_exp2(-LOG2_E * x)));
  return x * inverse;
}
__device__ __forceinline__ float quick_convolve(const float4& taps, float oldest, float older, float old, float now) {
  return quick_silu(__fmaf_rn(taps.w, now, __fmaf_rn(taps.z, old, __fmaf_rn(taps.y, older, taps.x * oldest))));
}
// Two channels of COUNT tokens, from what they and the TAIL before them have.
template <int COUNT> __device__ __forceinline__ void quick_convolve(const float4 (&taps)[2], const u32* inputs, float2 (&to)[COUNT]) {
  float2 v[TAIL + COUNT];
#pragma unroll
  for (int i = 0; i < TAIL + COUNT; ++i) v[i] = f16_floats(inputs[i]);
#pragma unroll
  for (int i = 0; i < COUNT; ++i)
    to[i] = make_float2(quick_convolve(taps[0], v[i].x, v[i + 1].x, v[i + 2].x, v[i + 3].x), quick_convolve(taps[1], v[i].y, v[i + 1].y, v[i + 2].y, v[i + 3].y));
}

// Four 8 x 8 matrices of f16, a row of which each lane names: lane l that of matrix l / 8. A lane gets row l / 4, columns 2 (l % 4) and one more.
__device__ __forceinline__ void load_block(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
// The same of the matrices' transposes.
__device__ __forceinline__ void load_block_transposed(u32 (&r)[4], u32 from) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(from) : "memory");
}
__device__ __forceinline__ u32 pair_f16(float low, float high) {
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}
// Two numbers as what f16 holds of them, and f16 of the rest. Beyond f16's range they are clamped.
__device__ __forceinline__ void split(float a, float b, u32& high, u32& low) {
  high = pair_f16(a, b);
  low = pair_f16(a - from_f16((u16)high), b - from_f16((u16)(high >> 16)));
}
// Sums of a tile of 16 x 16, as left operand of a product: rows stay rows, columns are what is summed over.
struct Left {
  u32 high[4], low[4];
  __device__ __forceinline__ void set(const float (&first)[4], const float (&second)[4]) {
    split(first[0], first[1], high[0], low[0]);
    split(first[2], first[3], high[1], low[1]);
    split(second[0], second[1], high[2], low[2]);
    split(second[2], second[3], high[3], low[3]);
  }
};
__device__ __forceinline__ void product(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_f16(c, a[0], a[1], a[2], a[3], b0, b1); }
