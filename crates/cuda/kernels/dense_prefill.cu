// The dense projections of a prompt: delta_in, delta_out, attn_in, attn_out; and the norm before them.
//
// round_prefill: a row's RMS norm as operands, a block a row, a warp a chunk of 256 inputs.
// dense_prefill: a product; gemm.cuh says how blocks share it.
#include "gemm.cuh"

constexpr int ROUND_WARPS = HIDDEN_PARTS;
LAUNCH_PLANNED(round_prefill, ROUND_WARPS * 32, 0)
extern "C" __global__ void __launch_bounds__(ROUND_WARPS * 32) round_prefill(const Prompt* prompt, const float* norm, const float* x, u8* operands) {
  __shared__ float squares[ROUND_WARPS];
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int k = threadIdx.x * 8;
  float v[8], weight[8];
  load8(x + (u64)row * HIDDEN, k, HIDDEN, v);
  load8(norm, k, HIDDEN, weight);
  norm_into(v, weight, squares, operands, row, prompt->rows);
}

using Dense = Gemm<4, DENSE_TOKENS, Floats>;
LAUNCH_GEMM(dense_prefill, Dense, 0)
// `tiles` of the matrix, each of `chunks` chunks; `out` has rows of `stride` floats, which are added to if `add`.
extern "C" __global__ void GEMM_BOUNDS(Dense)
    dense_prefill(const Prompt* prompt, const u8* matrix, const u8* operands, float* out, u32 tiles, u32 chunks, u32 stride, u32 add) {
  extern __shared__ __align__(16) u8 shared[];
  const int rows = prompt->rows, tokens = dense_tokens<Dense>(tiles, rows);
  gemm<Dense>(shared, chunks, [&](int i) { return dense_item<Dense>(i, matrix, operands, tiles, chunks, rows, tokens); }, {out, stride, add != 0});
}
