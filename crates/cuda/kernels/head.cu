// head: the last norm, the logits of the rows that want them, and each block's largest.
//
// Split: tiles of 16 rows over the blocks in contiguous runs, a warp one chunk of 256 inputs of every second tile, its weights in a
// ring of `slots` chunks that the copies of later tiles refill. Full geometry: 15,520 tiles, 118 a block, 132 blocks.
// Reads 286 MB: 62 us at 4.6 TB/s; it is the one stage that is long enough for bandwidth to be all that counts.
// Reached: 67 us.
#include "tiles.cuh"

constexpr int TILES = ceil_div(VOCAB, TILE);
using One = Split<1, HIDDEN, 4, 16, TILES, 4>;
using Eight = Split<ROW_GROUP, HIDDEN, 4, 16, TILES, 3>;

template <class S>
__device__ __forceinline__ void body(const Step* step, const u8* matrix, const float* norm, const float* x, float* logits, uint2* best) {
  extern __shared__ __align__(16) u8 shared[];
  constexpr int ROWS = S::ROWS;
  __shared__ uint2 largest[16][ROWS];
  launch_dependents();
  const int first = blockIdx.x * S::PER_BLOCK;
  const int row0 = ROWS == 1 ? 0 : blockIdx.y * ROW_GROUP, rows = step->head_rows;
  if (row0 >= rows) return wait_predecessors();
  float most = -infinity();  // of this thread's row
  u32 index = VOCAB;
  project<S, true>(
      shared, matrix, first, min(S::PER_BLOCK, TILES - first), ROWS == 1 ? 1 : rows, norm, NoBegin{},
      [&](int row, int k, float(&v)[8]) { load8(x + step->head_row[row] * HIDDEN, k, HIDDEN, v); }, NoFactor{},
      [](int, int) { return 0.0f; },
      [&](int row, int n, float value, float) {
        if (n >= VOCAB) return;
        logits[(u64)row * VOCAB + n] = value;
        if (value > most) most = value, index = n;  // ascending: the first of equals stays
      });
  for (int bit = 16; bit >= ROWS; bit /= 2) {
    const float other = __shfl_xor_sync(~0u, most, bit);
    const u32 other_index = __shfl_xor_sync(~0u, index, bit);
    if (other > most || other == most && other_index < index) most = other, index = other_index;
  }
  if (threadIdx.x % 32 < ROWS) largest[threadIdx.x / 32][threadIdx.x % 32] = make_uint2(__float_as_uint(most), index);
  __syncthreads();
  if ((int)threadIdx.x < min(ROWS, rows - row0)) {
    uint2 b = largest[0][threadIdx.x];
    for (int w = 1; w < 16; ++w) {
      const uint2 o = largest[w][threadIdx.x];
      const float mine = __uint_as_float(b.x), other = __uint_as_float(o.x);
      if (other > mine || other == mine && o.y < b.y) b = o;
    }
    best[(row0 + threadIdx.x) * gridDim.x + blockIdx.x] = b;
  }
}

LAUNCH(head, One::BLOCKS, 512, One::SHARED)
extern "C" __global__ void __launch_bounds__(512, 1)
    head(const Step* step, const u8* matrix, const float* norm, const float* x, float* logits, uint2* best) {
  body<One>(step, matrix, norm, x, logits, best);
}
LAUNCH(head_batch, Eight::BLOCKS, 512, Eight::SHARED)
extern "C" __global__ void __launch_bounds__(512, 1)
    head_batch(const Step* step, const u8* matrix, const float* norm, const float* x, float* logits, uint2* best) {
  body<Eight>(step, matrix, norm, x, logits, best);
}
