// The dense projections of a prompt: delta_in, delta_out, attn_in, attn_out; and the norm before them.
//
// round_prefill: a row's RMS norm and rounding, a block a row, a warp a chunk of 256 inputs.
// dense_prefill: grid (groups of eight tiles, groups of 32 tokens), 128 threads, two blocks a multiprocessor; gemm.cuh says how a
// block works. Neighbouring blocks have the same tokens.
#include "gemm.cuh"

constexpr int ROUND_WARPS = HIDDEN_PARTS;
LAUNCH_PLANNED(round_prefill, ROUND_WARPS * 32, 0)
extern "C" __global__ void __launch_bounds__(ROUND_WARPS * 32) round_prefill(const Prompt* prompt, const float* norm, const float* x, u8* packed) {
  __shared__ float squares[ROUND_WARPS];
  begin();
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, k = warp * CHUNK + lane * 8;
  float v[8], w[8], squared = 0.0f;
  load8(x + (u64)row * HIDDEN, k, HIDDEN, v);
  load8(norm, k, HIDDEN, w);
#pragma unroll
  for (int e = 0; e < 8; ++e) squared = __fmaf_rn(v[e], v[e], squared), v[e] *= w[e];
  squared = lanes_sum<32>(squared);
  if (lane == 0) squares[warp] = squared;
  u8* to = packed + (u64)row * rounded_bytes(HIDDEN_PARTS);
  round_into(v, 1.0f, to, warp, HIDDEN_PARTS, lane);
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = squares[0];
    for (int c = 1; c < HIDDEN_PARTS; ++c) total += squares[c];
    *(float*)(to + HIDDEN_PARTS * (PLANES + FACTORS)) = rsqrtf(__fmaf_rn(total, 1.0f / HIDDEN, RMS_EPS));
  }
}

using Dense = Gemm<4, GEMM_WARPS>;
LAUNCH_ROWS(dense_prefill, 0, Dense::THREADS, Dense::SHARED, Dense::TOKENS)
// `tiles` of the matrix, each of `chunks` chunks; `out` has rows of `stride` floats, which are added to if `add`.
extern "C" __global__ void __launch_bounds__(Dense::THREADS, 2)
    dense_prefill(const Prompt* prompt, const u8* matrix, const u8* packed, float* out, u32 tiles, u32 chunks, u32 stride, u32 add) {
  extern __shared__ __align__(16) u8 shared[];
  begin();
  const int first = blockIdx.x * Dense::TILES, row0 = blockIdx.y * Dense::TOKENS, rows = prompt->rows;
  if (row0 >= rows) return;
  const u32 bytes = rounded_bytes(chunks);
  gemm<Dense, 4>(
      shared, matrix + (u64)first * chunks * CHUNK4, min(Dense::TILES, (int)tiles - first), chunks, min(rows - row0, Dense::TOKENS),
      [&](int token) { return packed + (u64)(row0 + token) * bytes; },
      [&](int tile, int token, float low, float high) {
        float* at = out + (u64)(row0 + token) * stride + (first + tile) * TILE + threadIdx.x % 32 / 4;
        if (add) low = __fadd_rn(at[0], low), high = __fadd_rn(at[8], high);
        at[0] = low, at[8] = high;
      });
}
