// The dense projections of a prompt: delta_in, delta_out, attn_in, attn_out; and the norms between them.
//
// round_prefill: adds what the projection before it left to a row of the residual stream; its RMS norm as operands. A block a row, a warp a chunk
// of 256 inputs. 24 KB a token: 21 us for 4,096 at 4.6 TB/s.
// dense_prefill: a product; gemm.cuh says how blocks share it.
#include "gemm.cuh"

constexpr int ROUND_WARPS = HIDDEN_PARTS;
LAUNCH_PLANNED(round_prefill, ROUND_WARPS * 32, 0)
// `added`: null before the first layer.
extern "C" __global__ void __launch_bounds__(ROUND_WARPS * 32) round_prefill(const Prompt* prompt, const float* norm, const u8* added, float* x, u8* operands) {
  __shared__ float squares[ROUND_WARPS];
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int k = threadIdx.x * 8;
  float v[8], weight[8];
  load8(x + (u64)row * HIDDEN, k, HIDDEN, v);
  load8(norm, k, HIDDEN, weight);
  if (added && k < HIDDEN) {
    float more[8];
    eight_results(added, k, row, prompt->rows, more);
#pragma unroll
    for (int e = 0; e < 8; ++e) v[e] = __fadd_rn(v[e], more[e]);
    float4* to = (float4*)(x + (u64)row * HIDDEN + k);
    to[0] = make_float4(v[0], v[1], v[2], v[3]), to[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
  norm_into(v, weight, squares, operands, row, prompt->rows);
}

using Dense = Gemm<4, DENSE_TOKENS, Halves>;
LAUNCH_GEMM(dense_prefill, Dense, 0)
// `tiles` of the matrix, each of `chunks` chunks.
extern "C" __global__ void GEMM_BOUNDS(Dense)
    dense_prefill(const Prompt* prompt, const u8* matrix, const u8* operands, u8* results, u32 tiles, u32 chunks) {
  extern __shared__ __align__(16) u8 shared[];
  const int rows = prompt->rows, tokens = dense_tokens<Dense>(tiles, rows);
  gemm<Dense>(shared, chunks, [&](int i) { return dense_item<Dense>(i, matrix, operands, tiles, chunks, rows, tokens); }, {results, (u32)rows});
}
