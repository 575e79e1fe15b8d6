// moe_up of a prompt: gate and up projections of the chosen experts and of the shared one, joined by SwiGLU; then rounded.
//
// moe_up_prefill: an item of work is eight tiles of an expert and a run of its tokens, as moe_route lists them; gemm.cuh says how blocks
// share them. A tile has eight rows of gate and the eight of up beside them, so a lane has both.
// moe_inner_prefill: rounds what comes out for the down projections; a block a token, a warp a chunk of a slot.
#include "gemm.cuh"

using Up = Gemm<4, true>;
constexpr int TILES = EXPERT_WIDTH / 8;  // of an expert

LAUNCH_GEMM(moe_up_prefill, Up, ceil_div(TILES, Up::TILES))
extern "C" __global__ void GEMM_BOUNDS(Up)
    moe_up_prefill(const Prompt* prompt, const u8* up, const u8* packed, const u32* sorted, const u32* runs, float* inner) {
  extern __shared__ __align__(16) u8 shared[];
  begin();
  gemm<Up>(
      shared, packed, HIDDEN_PARTS, sorted, [&](int i) { return expert_item<Up>(i, up, TILES, HIDDEN_PARTS, runs); },
      [](u32 slot) { return slot / SLOTS; }, NoPrior(),
      [&](int tile, u32 slot, float gate, float value, float, float) {
        inner[(u64)slot * EXPERT_WIDTH + tile * 8 + threadIdx.x % 32 / 4] = silu(gate) * value;
      });
}

LAUNCH_PLANNED(moe_inner_prefill, SLOTS * EXPERT_PARTS * 32, 0)
extern "C" __global__ void __launch_bounds__(SLOTS * EXPERT_PARTS * 32) moe_inner_prefill(const Prompt* prompt, const float* inner, u8* packed) {
  begin();
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, chunk = warp % EXPERT_PARTS;
  const u64 slot = (u64)row * SLOTS + warp / EXPERT_PARTS;
  float v[8];
  load8(inner + slot * EXPERT_WIDTH, chunk * CHUNK + lane * 8, EXPERT_WIDTH, v);
  u8* to = packed + slot * rounded_bytes(EXPERT_PARTS);
  round_into(v, to, chunk, EXPERT_PARTS, lane);
  if (chunk == 0 && lane == 0) *(float*)(to + EXPERT_PARTS * (PLANES + FACTORS)) = 1.0f;
}
