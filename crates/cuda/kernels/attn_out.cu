// attn_out: o_proj, added to the residual stream.
//
// Split: one tile of 16 rows a block, one chunk of the 4096 inputs a warp: 128 blocks of 512 threads.
// Reads 4.7 MB: 1.0 us at 4.6 TB/s, all of it (37 KB a block) on its way before the wait. Reached: 2.4 us.
#include "tiles.cuh"

constexpr int TILES = HIDDEN / TILE;
constexpr int MOST_SLOTS = 8, MOST_SLOTS_BATCH = 2;  // of a warp
constexpr int THREADS = 544;  // one warp asks the L2 for what comes next
using One = Split<1, ATTN_WIDTH, 4, 16, TILES, MOST_SLOTS>;
using Eight = Split<ROW_GROUP, ATTN_WIDTH, 4, 16, TILES, MOST_SLOTS_BATCH>;

template <class S>
__device__ __forceinline__ void body(const Step* step, const u8* matrix, const float* mixed, float* x, const u8* next, u32 next_bytes) {
  extern __shared__ __align__(16) u8 shared[];
  launch_dependents();
  const int first = blockIdx.x * S::PER_BLOCK, rows = S::ROWS == 1 ? 1 : step->rows;
  if (S::ROWS > 1 && (int)blockIdx.y * ROW_GROUP >= rows) return wait_predecessors();
  if (threadIdx.x >= S::WARPS * 32) {  // in a batch there is no such warp, and no idle memory
    wait_predecessors();
    if (threadIdx.x == S::WARPS * 32) prefetch_share(next, next_bytes, blockIdx.x, S::BLOCKS);
    return;
  }
  project<S, false>(
      shared, matrix, first, min(S::PER_BLOCK, TILES - first), rows, nullptr,
      NoBegin{},
      [&](int row, int k, float(&v)[8]) { load8(mixed + row * ATTN_WIDTH, k, ATTN_WIDTH, v); }, NoFactor{},
      [&](int row, int n) { return x[row * HIDDEN + n]; },
      [&](int row, int n, float value, float prior) { x[row * HIDDEN + n] = prior + value; });
}

LAUNCH(attn_out, One::BLOCKS, THREADS, One::SHARED)
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    attn_out(const Step* step, const u8* matrix, const float* mixed, float* x, const u8* next, u32 next_bytes) {
  body<One>(step, matrix, mixed, x, next, next_bytes);
}
LAUNCH_GROUPS(attn_out_batch, Eight::BLOCKS, 512, Eight::SHARED, Eight::WHOLE)
extern "C" __global__ void __launch_bounds__(512, 1)
    attn_out_batch(const Step* step, const u8* matrix, const float* mixed, float* x, const u8* next, u32 next_bytes) {
  body<Eight>(step, matrix, mixed, x, next, next_bytes);
}
