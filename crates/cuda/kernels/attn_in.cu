// attn_in: the input norm of an attention layer, then queries and gates, keys and values in one product. Head norms and rotary
// embedding are attn_core's, which has whole heads.
//
// Split: a block has up to ceil(tiles / multiprocessors) tiles of 16 rows, a warp one chunk of 256 inputs of every second
// tile. Full geometry: 576 tiles, 5 a block, 116 blocks of 512 threads.
// Reads 10.6 MB: 2.3 us at 4.6 TB/s. Two thirds of a block's weights (74 of 92 KB) are on their way to shared memory before the wait;
// what is left after it is 8 KB of the residual stream from L2, the rounding, three products a warp, one barrier.
// Reached: 2.8 us from its wait to the next kernel's.
#include "tiles.cuh"

constexpr int TILES = ATTN_STRIDE / TILE;
constexpr int MOST_SLOTS = 8, MOST_SLOTS_BATCH = 3;  // of a warp
using One = Split<1, HIDDEN, 4, 16, TILES, MOST_SLOTS>;
using Eight = Split<ROW_GROUP, HIDDEN, 4, 16, TILES, MOST_SLOTS_BATCH>;

template <class S>
__device__ __forceinline__ void body(const Step* step, const u8* matrix, const float* norm, const float* x, float* proj) {
  extern __shared__ __align__(16) u8 shared[];
  launch_dependents();
  const int first = blockIdx.x * S::PER_BLOCK, rows = S::ROWS == 1 ? 1 : step->rows;
  if (S::ROWS > 1 && (int)blockIdx.y * ROW_GROUP >= rows) return wait_predecessors();
  project<S, true>(
      shared, matrix, first, min(S::PER_BLOCK, TILES - first), rows, norm, NoBegin{},
      [&](int row, int k, float(&v)[8]) { load8(x + row * HIDDEN, k, HIDDEN, v); }, NoFactor{}, [](int, int) { return 0.0f; },
      [&](int row, int n, float value, float) { proj[row * ATTN_STRIDE + n] = value; });
}

LAUNCH(attn_in, One::BLOCKS, 512, One::SHARED)
extern "C" __global__ void __launch_bounds__(512, 2)
    attn_in(const Step* step, const u8* matrix, const float* norm, const float* x, float* proj) {
  body<One>(step, matrix, norm, x, proj);
}
LAUNCH_GROUPS(attn_in_batch, Eight::BLOCKS, 512, Eight::SHARED, Eight::WHOLE)
extern "C" __global__ void __launch_bounds__(512, 1)
    attn_in_batch(const Step* step, const u8* matrix, const float* norm, const float* x, float* proj) {
  body<Eight>(step, matrix, norm, x, proj);
}
