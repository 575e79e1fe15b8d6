// moe_down of a prompt: the down projections of all slots, then each token's weighted sum, added to the residual stream.
//
// moe_down_prefill: as moe_up_prefill, with 512 inputs.
// moe_sum_prefill: a token's nine products in the order of its choice, as decode adds them; grid (rows), 256 threads. Products go
// through memory (74 KB a token each way), so that this order does not depend on which block is done first.
#include "choice.cuh"
#include "gemm.cuh"

using Down = Gemm<4, true>;
constexpr int TILES = HIDDEN / TILE;

LAUNCH_GEMM(moe_down_prefill, Down, ceil_div(TILES, Down::TILES))
extern "C" __global__ void GEMM_BOUNDS(Down)
    moe_down_prefill(const Prompt* prompt, const u8* down, const u8* packed, const u32* sorted, const u32* runs, float* products) {
  extern __shared__ __align__(16) u8 shared[];
  begin();
  gemm<Down>(
      shared, packed, EXPERT_PARTS, sorted, [&](int i) { return expert_item<Down>(i, down, TILES, EXPERT_PARTS, runs); },
      [](u32 slot) { return slot; }, NoPrior(),
      [&](int tile, u32 slot, float low, float high, float, float) {
        float* at = products + (u64)slot * HIDDEN + tile * TILE + threadIdx.x % 32 / 4;
        at[0] = low, at[8] = high;
      });
}

LAUNCH_PLANNED(moe_sum_prefill, 256, 0)
extern "C" __global__ void __launch_bounds__(256) moe_sum_prefill(const Prompt* prompt, const float* products, const u32* choice, float* x) {
  begin();
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const u32* record = choice + (u64)row * CHOICE_WORDS;
  for (int n = threadIdx.x * 4; n < HIDDEN; n += 1024) {
    const float* at = products + (u64)row * SLOTS * HIDDEN + n;
    float4 sum;
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) {
      const float share = __uint_as_float(record[e < TOP_K ? CHOICE_SHARES + e : CHOICE_SHARED]);
      const float4 p = *(const float4*)(at + e * HIDDEN);
      const float4 s = make_float4(__fmul_rn(share, p.x), __fmul_rn(share, p.y), __fmul_rn(share, p.z), __fmul_rn(share, p.w));
      sum = e ? make_float4(__fadd_rn(sum.x, s.x), __fadd_rn(sum.y, s.y), __fadd_rn(sum.z, s.z), __fadd_rn(sum.w, s.w)) : s;
    }
    float4* to = (float4*)(x + (u64)row * HIDDEN + n);
    const float4 before = *to;
    *to = make_float4(before.x + sum.x, before.y + sum.y, before.z + sum.z, before.w + sum.w);
  }
}
