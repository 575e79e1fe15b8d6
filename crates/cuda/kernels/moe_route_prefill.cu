// moe_route of a prompt: the router's logits, each token's experts, and the tokens of each expert, all on the device.
//
// moe_route_prefill: the product with the router (8 bits); gemm.cuh says how blocks share it.
// moe_select_prefill: a warp a token chooses as in decode, and takes a number among the tokens of each of its experts.
// moe_sort_prefill: every block adds up the experts' counts, puts its tokens' slots in their places, and the first block lists the
// runs. Which of an expert's tokens comes first is left to chance: each has its own columns in the products.
#include "choice.cuh"
#include "gemm.cuh"

using Router = Gemm<8>;
LAUNCH_GEMM(moe_route_prefill, Router, ceil_div(ROUTER_TILES, Router::TILES))
extern "C" __global__ void GEMM_BOUNDS(Router)
    moe_route_prefill(const Prompt* prompt, const u8* router, const u8* packed, float* logits, u32* counts) {
  extern __shared__ __align__(16) u8 shared[];
  begin();
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i < EXPERTS; i += Router::THREADS) counts[i] = 0;
  }
  const int rows = prompt->rows;
  gemm<Router>(
      shared, packed, HIDDEN_PARTS, nullptr, [&](int i) { return dense_item<Router>(i, router, ROUTER_TILES, HIDDEN_PARTS, rows); },
      [](u32 row) { return row; }, NoPrior(),
      [&](int tile, u32 row, float low, float high, float, float) {
        float* at = logits + (u64)row * ROUTER_STRIDE + tile * TILE + threadIdx.x % 32 / 4;
        at[0] = low, at[8] = high;
      });
}

constexpr int SELECT_ROWS = 8;  // of a block
LAUNCH_PLANNED(moe_select_prefill, SELECT_ROWS * 32, 0)
// `places`: [rows][TOP_K], which of its expert's tokens a slot is.
extern "C" __global__ void __launch_bounds__(SELECT_ROWS * 32)
    moe_select_prefill(const Prompt* prompt, const float* logits, u32* choice, u32* counts, u32* places) {
  __shared__ __align__(16) ChoiceRoom rooms[SELECT_ROWS];
  begin();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 row = blockIdx.x * SELECT_ROWS + warp;
  if (row >= prompt->rows) return;
  const u32 expert = publish(logits + (u64)row * ROUTER_STRIDE, choice + (u64)row * CHOICE_WORDS, lane, rooms[warp]);
  if (lane < TOP_K) places[row * TOP_K + lane] = atomicAdd(&counts[expert], 1);
}

constexpr int SORT_THREADS = 256;
constexpr int SORT_ROWS = 128;  // of a block
static_assert(EXPERTS <= SORT_THREADS, "a thread has an expert");
LAUNCH_PLANNED(moe_sort_prefill, SORT_THREADS, 0)
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort_prefill(const Prompt* prompt, const u32* choice, const u32* counts, const u32* places, u32* sorted, u32* runs) {
  __shared__ uint2 sums[SORT_THREADS / 32];
  __shared__ u32 offsets[SORT_THREADS];
  begin();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, rows = prompt->rows, row0 = blockIdx.x * SORT_ROWS;
  if (row0 >= rows) return;
  const u32 count = thread < EXPERTS ? counts[thread] : 0, own_runs = (count + GEMM_TOKENS - 1) / GEMM_TOKENS;
  uint2 before = make_uint2(count, own_runs);  // slots and runs of the experts up to this one
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const u32 slots = __shfl_up_sync(~0u, before.x, bit), more = __shfl_up_sync(~0u, before.y, bit);
    if (lane >= bit) before.x += slots, before.y += more;
  }
  if (lane == 31) sums[warp] = before;
  __syncthreads();
  for (int w = 0; w < warp; ++w) before.x += sums[w].x, before.y += sums[w].y;
  before.x -= count, before.y -= own_runs;
  offsets[thread] = before.x;
  __syncthreads();
  if (blockIdx.x == 0) {
    u32 run = before.y;
    for (u32 done = 0; done < count; done += GEMM_TOKENS, ++run) {
      *(uint4*)(runs + RUN_WORDS * (1 + run)) = make_uint4(thread, before.x + done, min(count - done, (u32)GEMM_TOKENS), 0);
    }
    // The shared expert has all rows, and comes last.
    u32 routed = 0;
    for (int w = 0; w < SORT_THREADS / 32; ++w) routed += sums[w].y;
    for (int i = thread; i * GEMM_TOKENS < rows; i += SORT_THREADS) {
      *(uint4*)(runs + RUN_WORDS * (1 + routed + i)) = make_uint4(EXPERTS, rows * TOP_K + i * GEMM_TOKENS, min(rows - i * GEMM_TOKENS, GEMM_TOKENS), 0);
    }
    if (thread == 0) runs[0] = routed + ceil_div(rows, GEMM_TOKENS);
  }
  for (int i = thread; i < SORT_ROWS * SLOTS; i += SORT_THREADS) {
    const int row = row0 + i / SLOTS, place = i % SLOTS;
    if (row >= rows) break;
    const u32 at = place < TOP_K ? offsets[choice[(u64)row * CHOICE_WORDS + place]] + places[row * TOP_K + place] : rows * TOP_K + row;
    sorted[at] = row * SLOTS + place;
  }
}
