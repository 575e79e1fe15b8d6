// moe_down of a prompt: the down projections of all slots, then each token's weighted sum, added to the residual stream; and the norm that follows.
//
// moe_down_prefill: as moe_up_prefill, with 512 inputs.
// moe_sum_prefill: a token's nine products in the order of its choice, and the norm before the next layer's projection; grid (rows), a thread
// eight of the row. Products go through memory in f16 (37 KB a token each way), so that this order does not depend on which block is done
// first. 50 KB a token: 45 us for 4,096 at 4.6 TB/s.
#include "choice.cuh"
#include "gemm.cuh"

using Down = Gemm<4, RUN_TOKENS, Halves>;
constexpr int TILES = HIDDEN / TILE;

LAUNCH_GEMM(moe_down_prefill, Down, ceil_div(TILES, Down::TILES))
extern "C" __global__ void GEMM_BOUNDS(Down) moe_down_prefill(const Prompt* prompt, const u8* down, const u8* inner, const u32* runs, u8* products) {
  extern __shared__ __align__(16) u8 shared[];
  const int rows = prompt->rows;
  gemm<Down>(
      shared, EXPERT_PARTS, [&](int i) { return expert_item<Down>(i, down, inner, nullptr, TILES, EXPERT_PARTS, rows, runs); }, {products, places_of(rows)});
}

constexpr int SUM_WARPS = HIDDEN_PARTS;
LAUNCH_PLANNED(moe_sum_prefill, SUM_WARPS * 32, 0)
// `norm`: of the layer that follows; after the last one null, and no operands are written.
extern "C" __global__ void __launch_bounds__(SUM_WARPS * 32) moe_sum_prefill(const Prompt* prompt, const u8* products, const u32* positions,
                                                                            const u32* choice, const float* norm, float* x, u8* operands) {
  __shared__ float squares[SUM_WARPS];
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const u32* record = choice + (u64)row * CHOICE_WORDS;
  const int n = threadIdx.x * 8;
  const u32 places = places_of(prompt->rows);
  float sum[8], weight[8];
  load8(x + (u64)row * HIDDEN, n, HIDDEN, sum);
  if (norm) load8(norm, n, HIDDEN, weight);
  if (n < HIDDEN) {
    uint4 product[SLOTS];
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) product[e] = *(const uint4*)results_at(products, n, positions[row * SLOTS + e], places);
    float added[8] = {};
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) {
      const float share = __uint_as_float(record[e < TOP_K ? CHOICE_SHARES + e : CHOICE_SHARED]);
      const u32 words[4] = {product[e].x, product[e].y, product[e].z, product[e].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const float2 p = f16_floats(words[i]);
        added[2 * i] = __fmaf_rn(share, p.x, added[2 * i]), added[2 * i + 1] = __fmaf_rn(share, p.y, added[2 * i + 1]);
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) sum[e] += added[e];
    float4* to = (float4*)(x + (u64)row * HIDDEN + n);
    to[0] = make_float4(sum[0], sum[1], sum[2], sum[3]), to[1] = make_float4(sum[4], sum[5], sum[6], sum[7]);
  }
  if (norm) norm_into(sum, weight, squares, operands, row, prompt->rows);
}
