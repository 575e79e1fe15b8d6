// moe_route of a prompt: the router's logits, each token's experts, and the tokens of each expert, all on the device.
//
// moe_route_prefill: the product with the router (8 bits); gemm.cuh says how blocks share it.
// moe_select_prefill: a warp a token chooses as in decode, and takes a number among the tokens of each of its experts.
// moe_sort_prefill: every block adds up the experts' counts and says where its tokens' slots stand, and the first block lists the
// runs. Which of an expert's tokens comes first is left to chance: each has its own columns in the products.
#include "choice.cuh"
#include "gemm.cuh"

// Of an expert's count: a sector of its own, so that additions to several do not wait for each other.
constexpr int COUNT_WORDS = 8;
using Router = Gemm<8, 64, Floats>;
// Tiles of an item: the last one, which the shared expert's gate has almost for itself, makes two items, and they should be alike.
constexpr int ROUTER_BLOCK = ceil_div(ROUTER_TILES, ceil_div(ROUTER_TILES, Router::TILES));
LAUNCH_GEMM(moe_route_prefill, Router, ceil_div(ROUTER_TILES, Router::TILES))
extern "C" __global__ void GEMM_BOUNDS(Router)
    moe_route_prefill(const Prompt* prompt, const u8* router, const u8* operands, float* logits, u32* counts) {
  extern __shared__ __align__(16) u8 shared[];
  if (blockIdx.x == 0 && blockIdx.y == 0) {
    for (int i = threadIdx.x; i < EXPERTS; i += Router::THREADS) counts[i * COUNT_WORDS] = 0;
  }
  const int rows = prompt->rows, tokens = dense_tokens<Router>(ROUTER_TILES, rows);
  gemm<Router>(
      shared, HIDDEN_PARTS, [&](int i) { return dense_item<Router>(i, router, operands, ROUTER_TILES, HIDDEN_PARTS, rows, tokens, ROUTER_BLOCK); },
      {logits, ROUTER_STRIDE});
}

constexpr int SELECT_ROWS = 8;  // of a block
LAUNCH_PLANNED(moe_select_prefill, SELECT_ROWS * 32, 0)
// `places`: [rows][TOP_K], which of its expert's tokens a slot is.
extern "C" __global__ void __launch_bounds__(SELECT_ROWS * 32)
    moe_select_prefill(const Prompt* prompt, const float* logits, u32* choice, u32* counts, u32* places) {
  __shared__ __align__(16) ChoiceRoom rooms[SELECT_ROWS];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const u32 row = blockIdx.x * SELECT_ROWS + warp;
  if (row >= prompt->rows) return;
  float logit;
  const u32 expert = choose(logits + (u64)row * ROUTER_STRIDE, lane, rooms[warp], logit);
  write_choice(logits + (u64)row * ROUTER_STRIDE, choice + (u64)row * CHOICE_WORDS, lane, expert, logit);
  if (lane < TOP_K) places[row * TOP_K + lane] = atomicAdd(&counts[expert * COUNT_WORDS], 1);
}

constexpr int SORT_THREADS = 256;
constexpr int SORT_ROWS = 128;  // of a block
static_assert(EXPERTS <= SORT_THREADS, "a thread has an expert");
LAUNCH_PLANNED(moe_sort_prefill, SORT_THREADS, 0)
// `positions`: [rows][SLOTS], the place of a slot among all, sorted by expert.
extern "C" __global__ void __launch_bounds__(SORT_THREADS)
    moe_sort_prefill(const Prompt* prompt, const u32* choice, const u32* counts, const u32* places, u32* positions, u32* runs) {
  __shared__ u32 sums[SORT_THREADS / 32], offsets[SORT_THREADS], sizes[SIZES];
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, rows = prompt->rows, row0 = blockIdx.x * SORT_ROWS;
  if (row0 >= rows) return;
  const u32 count = thread < EXPERTS ? counts[thread * COUNT_WORDS] : 0, own_runs = (count + RUN_TOKENS - 1) / RUN_TOKENS;
  u32 before = eights(count);  // places of the experts up to this one
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const u32 more = __shfl_up_sync(~0u, before, bit);
    if (lane >= bit) before += more;
  }
  if (lane == 31) sums[warp] = before;
  if (thread < SIZES) sizes[thread] = 0;
  __syncthreads();
  u32 routed = 0;  // places of all experts but the shared one
  for (int w = 0; w < SORT_THREADS / 32; ++w) {
    if (w < warp) before += sums[w];
    routed += sums[w];
  }
  before -= eights(count);
  offsets[thread] = before;
  __syncthreads();
  if (blockIdx.x == 0) {
    // Runs by size, the longest first: so the products want them, and so blocks are done at about the same time. Runs of one expert are about
    // equally long. The shared expert has all rows; its places are the rows' numbers behind the others'.
    const auto each_run = [&](auto put) {
      u32 done = 0;
      for (u32 left = own_runs; left; --left) {
        const u32 length = left > 1 ? eights((count - done + left - 1) / left) : count - done;
        put(thread, before + done, length, 0);
        done += length;
      }
      for (int i = thread; i * RUN_TOKENS < rows; i += SORT_THREADS) put(EXPERTS, routed + i * RUN_TOKENS, min(rows - i * RUN_TOKENS, RUN_TOKENS), i * RUN_TOKENS);
    };
    each_run([&](u32, u32, u32 length, u32) { atomicAdd(&sizes[size_of(length)], 1); });
    __syncthreads();
    if (thread == 0) {
      u32 first = 0;
      for (int size = 0; size < SIZES; ++size) {
        const u32 of_size = sizes[size];
        sizes[size] = first;
        first += of_size;
      }
      runs[0] = first;
    }
    __syncthreads();
    each_run([&](u32 expert, u32 place, u32 length, u32 row) {
      *(uint4*)(runs + RUN_WORDS * (1 + atomicAdd(&sizes[size_of(length)], 1))) = make_uint4(expert, place, length, row);
    });
  }
  for (int i = thread; i < SORT_ROWS * SLOTS; i += SORT_THREADS) {
    const int row = row0 + i / SLOTS, place = i % SLOTS;
    if (row >= rows) break;
    positions[row * SLOTS + place] = place < TOP_K ? offsets[choice[(u64)row * CHOICE_WORDS + place]] + places[row * TOP_K + place] : routed + row;
  }
}
