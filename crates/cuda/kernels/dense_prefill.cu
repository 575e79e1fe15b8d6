// The dense projections of a prompt: delta_in, delta_out, attn_in, attn_out; and the norm before them.
//
// round_prefill: a row's RMS norm and rounding, a block a row, a warp a chunk of 256 inputs.
// dense_prefill: a product; gemm.cuh says how blocks share it.
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
  round_into(v, to, warp, HIDDEN_PARTS, lane);
  __syncthreads();
  if (threadIdx.x == 0) {
    float total = squares[0];
    for (int c = 1; c < HIDDEN_PARTS; ++c) total += squares[c];
    *(float*)(to + HIDDEN_PARTS * (PLANES + FACTORS)) = rsqrtf(__fmaf_rn(total, 1.0f / HIDDEN, RMS_EPS));
  }
}

using Dense = Gemm<4>;
LAUNCH_GEMM(dense_prefill, Dense, 0)
// `tiles` of the matrix, each of `chunks` chunks; `out` has rows of `stride` floats, which are added to if `add`.
extern "C" __global__ void GEMM_BOUNDS(Dense)
    dense_prefill(const Prompt* prompt, const u8* matrix, const u8* packed, float* out, u32 tiles, u32 chunks, u32 stride, u32 add) {
  extern __shared__ __align__(16) u8 shared[];
  begin();
  const int rows = prompt->rows;
  gemm<Dense>(
      shared, packed, chunks, nullptr, [&](int i) { return dense_item<Dense>(i, matrix, tiles, chunks, rows); },
      [](u32 row) { return row; },
      [&](int tile, u32 row, float& low, float& high) {
        const float* at = out + (u64)row * stride + tile * TILE + threadIdx.x % 32 / 4;
        if (add) low = at[0], high = at[8];
      },
      [&](int tile, u32 row, float low, float high, float low_prior, float high_prior) {
        float* at = out + (u64)row * stride + tile * TILE + threadIdx.x % 32 / 4;
        at[0] = add ? __fadd_rn(low_prior, low) : low;
        at[8] = add ? __fadd_rn(high_prior, high) : high;
      });
}
