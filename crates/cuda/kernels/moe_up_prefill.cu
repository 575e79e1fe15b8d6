// moe_up of a prompt: gate and up projections of the chosen experts and of the shared one, joined by SwiGLU; then rounded.
//
// moe_up_prefill: grid (groups of eight tiles of an expert, runs), 128 threads; a run is up to 32 tokens of one expert, as
// moe_route lists them; surplus blocks exit. gemm.cuh says how a block works. A tile has eight rows of gate and the eight of up
// beside them, so a lane has both.
// moe_inner_prefill: rounds what comes out for the down projections; a block a token, a warp a chunk of a slot.
#include "gemm.cuh"

using Up = Gemm<4, GEMM_WARPS>;
constexpr int TILES = EXPERT_WIDTH / 8;  // of an expert

LAUNCH_ROWS(moe_up_prefill, ceil_div(TILES, Up::TILES), Up::THREADS, Up::SHARED, Up::TOKENS)
extern "C" __global__ void __launch_bounds__(Up::THREADS, 2)
    moe_up_prefill(const Prompt* prompt, const u8* up, const u8* packed, const u32* sorted, const u32* runs, float* inner) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ u32 slots[Up::TOKENS];
  begin();
  if (blockIdx.y >= runs[0]) return;
  const uint4 run = *(const uint4*)(runs + RUN_WORDS * (1 + blockIdx.y));
  const int tokens = run.z, first = blockIdx.x * Up::TILES;
  if (threadIdx.x < tokens) slots[threadIdx.x] = sorted[run.y + threadIdx.x];
  gemm<Up, 4>(
      shared, up + ((u64)run.x * TILES + first) * HIDDEN_PARTS * CHUNK4, min(Up::TILES, TILES - first), HIDDEN_PARTS, tokens,
      [&](int token) { return packed + (u64)(sorted[run.y + token] / SLOTS) * rounded_bytes(HIDDEN_PARTS); },
      [&](int tile, int token, float gate, float value) {
        inner[(u64)slots[token] * EXPERT_WIDTH + (first + tile) * 8 + threadIdx.x % 32 / 4] = silu(gate) * value;
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
  round_into(v, 1.0f, to, chunk, EXPERT_PARTS, lane);
  if (chunk == 0 && lane == 0) *(float*)(to + EXPERT_PARTS * (PLANES + FACTORS)) = 1.0f;
}
