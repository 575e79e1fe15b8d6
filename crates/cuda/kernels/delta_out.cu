// delta_out: out_proj, added to the residual stream; and the convolution's tails move on by the rows of this pass.
//
// The gated norm is finished here: delta_core leaves o * weight * silu(z) and the sums of squares of o by quarters of a
// head; 1 / rms of a head multiplies the scales of its two groups.
// Split: one tile of 16 rows a block, one chunk of the 4096 inputs a warp: 128 blocks of 512 threads.
// Reads 4.7 MB: 1.0 us at 4.6 TB/s, all of it (37 KB a block) on its way before the wait. Reached: 2.6 us.
#include "delta.cuh"
#include "tiles.cuh"

// The last CONV_WIDTH - 1 inputs of each channel; those of this pass are in `proj`. A thread has one channel.
struct Tails {
  float* at;
  float kept[TAIL];  // newest first
  __device__ __forceinline__ void read(const Step* step, const float* proj, u32 ordinal, u32 segment, int channel) {
    at = (float*)step->state[segment] + STATES + (u64)ordinal * TAIL * CHANNELS + channel;
    const int rows = step->seg_rows[segment];
    const float* newest = proj + (u64)(step->seg_first[segment] + rows - 1) * DELTA_STRIDE + channel;
#pragma unroll
    for (int age = 0; age < TAIL; ++age) {
      kept[age] = age < rows ? newest[-age * DELTA_STRIDE] : at[(TAIL - 1 - (age - rows)) * CHANNELS];
    }
  }
  __device__ __forceinline__ void write() {
#pragma unroll
    for (int age = 0; age < TAIL; ++age) at[(TAIL - 1 - age) * CHANNELS] = kept[age];
  }
};

constexpr int TILES = HIDDEN / TILE;
constexpr int MOST_SLOTS = 8, MOST_SLOTS_BATCH = 2;  // of a warp
constexpr int THREADS = 544;  // one warp asks the L2 for what comes next
using One = Split<1, VALUE_WIDTH, 4, 16, TILES, MOST_SLOTS>;
using Eight = Split<ROW_GROUP, VALUE_WIDTH, 4, 16, TILES, MOST_SLOTS_BATCH>;

template <class S>
__device__ __forceinline__ void body(const Step* step, const u8* matrix, const float* mixed, const float* squares, const float* proj,
                                     float* x, const u8* next, u32 ordinal, u32 next_bytes) {
  extern __shared__ __align__(16) u8 shared[];
  launch_dependents();
  const int first = blockIdx.x * S::PER_BLOCK, rows = S::ROWS == 1 ? 1 : step->rows;
  if (S::ROWS > 1 && (int)blockIdx.y * ROW_GROUP >= rows) return wait_predecessors();
  if (threadIdx.x >= S::WARPS * 32) {  // in a batch there is no such warp, and no idle memory
    wait_predecessors();
    if (threadIdx.x == S::WARPS * 32) prefetch_share(next, next_bytes, blockIdx.x, S::BLOCKS);
    return;
  }
  // Tails: a thread has one channel of one segment; groups of rows share the segments.
  constexpr int CHANNELS_EACH = ceil_div(CHANNELS, S::BLOCKS), AT_ONCE = 512 / CHANNELS_EACH;
  const int channel = blockIdx.x * CHANNELS_EACH + threadIdx.x % CHANNELS_EACH;
  const int first_segment = blockIdx.y + gridDim.y * (threadIdx.x / CHANNELS_EACH);
  const bool moves = channel < CHANNELS && (int)threadIdx.x < AT_ONCE * CHANNELS_EACH && first_segment < (int)step->segments;
  Tails tails;
  project<S, false>(
      shared, matrix, first, min(S::PER_BLOCK, TILES - first), rows, nullptr,
      [&] {
        if (S::ROWS == 1 && moves) tails.read(step, proj, ordinal, 0, channel);
      },
      [&](int row, int k, float(&v)[8]) { load8(mixed + row * VALUE_WIDTH, k, VALUE_WIDTH, v); },
      [&](int row, int group) {
        const int head = group / (VALUE_DIM / GROUP);
        if (head >= VALUE_HEADS) return 0.0f;
        const float4 s = *(const float4*)(squares + (row * VALUE_HEADS + head) * 4);
        return rsqrtf(__fmaf_rn((s.x + s.y) + (s.z + s.w), 1.0f / VALUE_DIM, RMS_EPS));
      },
      [&](int row, int n) { return x[row * HIDDEN + n]; },
      [&](int row, int n, float value, float prior) { x[row * HIDDEN + n] = prior + value; });
  // For one row they were read early; writing them holds up nobody.
  if constexpr (S::ROWS == 1) {
    if (moves) tails.write();
  } else if (moves) {
    for (u32 segment = first_segment; segment < step->segments; segment += gridDim.y * AT_ONCE) {
      tails.read(step, proj, ordinal, segment, channel);
      tails.write();
    }
  }
}

LAUNCH(delta_out, One::BLOCKS, THREADS, One::SHARED)
extern "C" __global__ void __launch_bounds__(THREADS, 2)
    delta_out(const Step* step, const u8* matrix, const float* mixed, const float* squares, const float* proj, float* x, const u8* next,
              u32 ordinal, u32 next_bytes) {
  body<One>(step, matrix, mixed, squares, proj, x, next, ordinal, next_bytes);
}
LAUNCH_GROUPS(delta_out_batch, Eight::BLOCKS, 512, Eight::SHARED, Eight::WHOLE)
extern "C" __global__ void __launch_bounds__(512, 1)
    delta_out_batch(const Step* step, const u8* matrix, const float* mixed, const float* squares, const float* proj, float* x,
                    const u8* next, u32 ordinal, u32 next_bytes) {
  body<Eight>(step, matrix, mixed, squares, proj, x, next, ordinal, next_bytes);
}
