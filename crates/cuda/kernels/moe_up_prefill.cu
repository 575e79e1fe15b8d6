// moe_up of a prompt: gate and up projections of the chosen experts and of the shared one, joined by SwiGLU.
//
// moe_gather_prefill: a row's operands to the places that its experts have for it, a block a row; 4 KB read and 33 KB written a token. The
// shared expert reads the rows themselves.
// moe_up_prefill: an item of work is some tiles of an expert and a run of its tokens, as moe_route lists them; gemm.cuh says how blocks
// share them. A tile has eight rows of gate and the eight of up beside them, so a lane has both; what comes out is written as operands.
#include "gemm.cuh"

constexpr int GATHER_THREADS = HIDDEN_PARTS * 32;  // 16 bytes of a row each
LAUNCH_PLANNED(moe_gather_prefill, GATHER_THREADS, 0)
extern "C" __global__ void __launch_bounds__(GATHER_THREADS)
    moe_gather_prefill(const Prompt* prompt, const u8* operands, const u32* positions, u8* gathered, u8* inner) {
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int group = threadIdx.x / 8, unit = threadIdx.x % 8;
  const u32 rows = prompt->rows, bytes = group_bytes(places_of(rows));
  const uint4 v = *(const uint4*)(operands + (u64)group * group_bytes(rows) + row * GROUP_BYTES + (unit ^ row % EIGHT) * 16);
  u32 to[SLOTS];
#pragma unroll
  for (int e = 0; e < SLOTS; ++e) to[e] = positions[row * SLOTS + e];
#pragma unroll
  for (int e = 0; e < TOP_K; ++e) *(uint4*)(gathered + (u64)group * bytes + to[e] * GROUP_BYTES + (unit ^ to[e] % EIGHT) * 16) = v;
  // Inputs of moe_down that do not exist: their weights are zero, and they must be numbers.
  constexpr int GROUPS = EXPERT_WIDTH / GROUP, MISSING = EXPERT_PARTS * CHUNK_GROUPS - GROUPS;
  if (MISSING && group < MISSING) {
#pragma unroll
    for (int e = 0; e < SLOTS; ++e) *(uint4*)(inner + (u64)(GROUPS + group) * bytes + to[e] * GROUP_BYTES + unit * 16) = make_uint4(0, 0, 0, 0);
  }
}

using Up = Gemm<4, RUN_TOKENS, Swiglu>;
constexpr int TILES = EXPERT_WIDTH / 8;  // of an expert
static_assert(EXPERT_WIDTH % GROUP == 0, "moe_down has whole groups");

LAUNCH_GEMM(moe_up_prefill, Up, ceil_div(TILES, Up::TILES))
extern "C" __global__ void GEMM_BOUNDS(Up)
    moe_up_prefill(const Prompt* prompt, const u8* up, const u8* operands, const u8* gathered, const u32* runs, u8* inner) {
  extern __shared__ __align__(16) u8 shared[];
  const int rows = prompt->rows;
  gemm<Up>(
      shared, HIDDEN_PARTS, [&](int i) { return expert_item<Up>(i, up, gathered, operands, TILES, HIDDEN_PARTS, rows, runs); },
      {inner, group_bytes(places_of(rows))});
}
