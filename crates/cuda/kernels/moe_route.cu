// moe_route: the post norm, the router's logits and the shared expert's gate (8-bit); and, since it needs no routing, the
// shared expert's gate and up projections. One block also leaves the rounded activations for the experts ("packed").
//
// Split: one tile of 16 rows a block: 17 of the router, then 64 of the shared expert; a warp a chunk of 256 inputs.
// Full geometry: 81 blocks of 256 threads. Reads 0.6 MB + 1.2 MB: 0.4 us at 4.6 TB/s, all on its way before the wait. Reached: 2.5 us.
// In a batch, moe_select chooses experts for all rows and lists, for each expert, the rows that chose it, eight to an item.
#include "tiles.cuh"
#include "choice.cuh"

constexpr int WARPS = 8;
constexpr int UP_TILES = EXPERT_WIDTH / 8;  // of one expert: eight rows of gate, eight of up

// A block has one tile; what it is a tile of depends on the block.
template <int ROWS, int BITS> using Tile = Split<ROWS, HIDDEN, BITS, WARPS, 1, 1>;
template <int ROWS> constexpr int GATES = Tile<ROWS, 4>::SHARED;  // where a tile of the shared expert is put together
template <int ROWS>
constexpr int SHARED = GATES<ROWS> + ROWS * TILE * 4 > Tile<ROWS, 8>::SHARED ? GATES<ROWS> + ROWS * TILE * 4 : Tile<ROWS, 8>::SHARED;

// The rounded activations that a tile's product left in shared memory, and 1 / rms, for the experts.
template <int ROWS> __device__ __forceinline__ void pack(const u8* shared, int rows, u8* packed) {
  using T = Tile<ROWS, 8>;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const float* squares = (const float*)(shared + T::SQUARES);
  for (int row = 0; row < rows; ++row, packed += PACKED_BYTES) {
    if (warp < HIDDEN_CHUNKS) {
      const u8* planes = shared + T::OPERANDS + warp * T::OPERAND;
      *(uint4*)(packed + warp * PLANES + lane * 16) = *(const uint4*)(planes + row * PLANES + lane * 16);
      if (lane < 4) ((float2*)(packed + PACKED_FACTORS))[warp * 4 + lane] = ((const float2*)(planes + ROWS * PLANES))[row * 4 + lane];
    }
    if (threadIdx.x == 0) {
      float total = squares[row];
      for (int c = 1; c < HIDDEN_CHUNKS; ++c) total += squares[c * ROWS + row];
      *(float*)(packed + PACKED_INVERSE) = rsqrtf(__fmaf_rn(total, 1.0f / HIDDEN, RMS_EPS));
    }
  }
}

template <int ROWS>
__device__ __forceinline__ void body(const Step* step, const u8* router, const u8* up, const float* norm, const float* x, float* logits,
                                     u8* packed, float* inner, u32* reset) {
  extern __shared__ __align__(16) u8 shared[];
  launch_dependents();
  const int row0 = ROWS == 1 ? 0 : blockIdx.y * ROW_GROUP, all_rows = ROWS == 1 ? 1 : step->rows;
  if (row0 >= all_rows) return wait_predecessors();
  const int rows = min(ROWS, all_rows - row0);
  const auto load = [&](int row, int k, float(&v)[8]) { load8(x + row * HIDDEN, k, HIDDEN, v); };
  const auto none = [](int, int) { return 0.0f; };
  if (blockIdx.x < ROUTER_TILES) {
    project<Tile<ROWS, 8>, true>(shared, router, blockIdx.x, 1, all_rows, norm, NoBegin{}, load, NoFactor{}, none,
                                 [&](int row, int n, float value, float) { logits[row * ROUTER_STRIDE + n] = value; });
    // The last router tile has one row of its own: time to store what the others need.
    if (blockIdx.x == ROUTER_TILES - 1) {
      pack<ROWS>(shared, rows, packed + (u64)row0 * PACKED_BYTES);
      if (row0 == 0 && threadIdx.x == 0) reset[CHOICE_TAG] = 0;
    }
  } else {
    const int tile = blockIdx.x - ROUTER_TILES;
    float* gates = (float*)(shared + GATES<ROWS>);
    project<Tile<ROWS, 4>, true>(shared, up + (u64)EXPERTS * UP_TILES * HIDDEN_CHUNKS * CHUNK4, tile, 1, all_rows, norm, NoBegin{}, load,
                                 NoFactor{}, none, [&](int row, int n, float value, float) { gates[(row - row0) * TILE + n % TILE] = value; });
    __syncthreads();
    for (int o = threadIdx.x; o < rows * 8; o += WARPS * 32) {
      const int row = o / 8, i = o % 8;
      inner[((row0 + row) * SLOTS + TOP_K) * EXPERT_WIDTH + tile * 8 + i] = silu(gates[row * TILE + i]) * gates[row * TILE + 8 + i];
    }
  }
}

LAUNCH(moe_route, ROUTER_TILES + UP_TILES, WARPS * 32, SHARED<1>)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 4)
    moe_route(const Step* step, const u8* router, const u8* up, const float* norm, const float* x, float* logits, u8* packed,
              float* inner, u32* reset) {
  body<1>(step, router, up, norm, x, logits, packed, inner, reset);
}
LAUNCH(moe_route_batch, ROUTER_TILES + UP_TILES, WARPS * 32, SHARED<ROW_GROUP>)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    moe_route_batch(const Step* step, const u8* router, const u8* up, const float* norm, const float* x, float* logits, u8* packed,
                    float* inner, u32* reset) {
  body<ROW_GROUP>(step, router, up, norm, x, logits, packed, inner, reset);
}

// moe_select_batch: one block; a warp a row to choose, a thread a slot to find its place among the rows of its expert. Which of
// an expert's rows comes first is left to chance: each has its own columns in the products, and its bits do not depend on it.
LAUNCH(moe_select_batch, 1, 1024, MAX_ROWS * sizeof(ChoiceRoom))
extern "C" __global__ void __launch_bounds__(1024) moe_select_batch(const Step* step, const float* logits, u32* choice, u32* items) {
  extern __shared__ __align__(16) ChoiceRoom rooms[];  // one for each row
  __shared__ u32 rows_of[256], first_item[256], items_before[8];
  launch_dependents();
  const int rows = step->rows, thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  if (thread < 256) rows_of[thread] = 0;
  __syncthreads();
  wait_predecessors();
  u32 expert = 0, place = 0;
  const bool has_slot = warp < rows && lane < TOP_K;
  if (warp < rows) {
    expert = publish(logits + warp * ROUTER_STRIDE, choice + warp * CHOICE_WORDS, lane, rooms[warp]);
    if (has_slot) place = atomicAdd(&rows_of[expert], 1);
  }
  __syncthreads();
  // How many items the experts before this thread's have.
  const u32 count = thread < 256 ? rows_of[thread] : 0, own = (count + ROW_GROUP - 1) / ROW_GROUP;
  u32 item = own;
#pragma unroll
  for (int bit = 1; bit < 32; bit *= 2) {
    const u32 other = __shfl_up_sync(~0u, item, bit);
    if (lane >= bit) item += other;
  }
  if (warp < 8 && lane == 31) items_before[warp] = item;
  __syncthreads();
  if (thread < 256) {
    item -= own;
    for (int w = 0; w < warp; ++w) item += items_before[w];
    first_item[thread] = item;
    for (u32 done = 0; done < count; done += ROW_GROUP, ++item) {
      *(uint2*)(items + ITEM_WORDS * (1 + item)) = make_uint2(thread, min(count - done, (u32)ROW_GROUP));
    }
    // The shared expert's items come last; all rows have it.
    if (thread == 255) {
      items[1] = item;
      for (int row = 0; row < rows; row += ROW_GROUP, ++item) {
        u32* record = items + ITEM_WORDS * (1 + item);
        *(uint2*)record = make_uint2(EXPERTS, min(rows - row, ROW_GROUP));
        for (int i = 0; i < ROW_GROUP; ++i) record[ITEM_SLOTS + i] = min(row + i, rows - 1) * SLOTS + TOP_K;
      }
      items[0] = item;
    }
  }
  __syncthreads();
  if (has_slot) items[ITEM_WORDS * (1 + first_item[expert] + place / ROW_GROUP) + ITEM_SLOTS + place % ROW_GROUP] = warp * SLOTS + lane;
}
