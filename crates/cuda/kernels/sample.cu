// sample: the greedy token of each row of logits, from the blocks' largest: the lowest id among equals, never NaN.
//
// Grid (head rows), 256 threads. The token goes where the sequence's next step finds it, and to the host's list. With
// `advance` the row's position moves on, so that the graph can be launched again as it is. 3 us.
#include "common.cuh"

LAUNCH(sample, 1, 256, 0)
extern "C" __global__ void __launch_bounds__(256) sample(Step* step, const uint2* best, u32* out, u32 advance) {
  constexpr int TILES = ceil_div(VOCAB, TILE);
  constexpr u32 blocks = ceil_div(TILES, ceil_div(TILES, MULTIPROCESSORS));  // of head
  __shared__ uint2 largest[8];
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.x;
  if (row >= step->head_rows) return;
  float most = -infinity();
  u32 index = VOCAB;
  for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) {
    const uint2 b = best[row * blocks + i];
    const float value = __uint_as_float(b.x);
    if (value > most || value == most && b.y < index) most = value, index = b.y;
  }
  for (int bit = 16; bit; bit /= 2) {
    const float other = __shfl_xor_sync(~0u, most, bit);
    const u32 other_index = __shfl_xor_sync(~0u, index, bit);
    if (other > most || other == most && other_index < index) most = other, index = other_index;
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = make_uint2(__float_as_uint(most), index);
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) {
      const float other = __uint_as_float(largest[w].x);
      if (other > most || other == most && largest[w].y < index) most = other, index = largest[w].y;
    }
    const u32 token = index < VOCAB ? index : 0;
    out[row] = token;
    const u32 from = step->head_row[row];
    *(u32*)step->sampled[step->segment[from]] = token;
    if (advance) step->position[from] += 1;
  }
}
