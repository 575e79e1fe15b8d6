// moe_down: the down projections of the chosen experts and of the shared one, their weighted sum, added to the residual stream.
//
// Split, one row: one tile of 16 rows a block, an expert a warp with all of its 512 inputs: 128 blocks of 288 threads.
// Reads 5.3 MB: 1.2 us at 4.6 TB/s. Which experts is known as soon as moe_up has chosen; a block therefore looks for the
// choice's tag before its wait, and its weights (41 KB) arrive while moe_up still multiplies.
// Reached: 4.2 us.
//
// A batch: two blocks a multiprocessor, each with an even run of all items (up to eight rows of one expert) by eight tiles, a warp
// a tile; moe_sum then adds each row's nine products, in the order of the row's choice, as the block for one row does.
#include "tiles.cuh"
#include "choice.cuh"

constexpr int TILES = HIDDEN / TILE;
constexpr int CHUNKS = ceil_div(EXPERT_WIDTH, CHUNK);

// One row's inner activations of one expert by one warp.
__device__ __forceinline__ void round_inner(const float* inner, u8* planes, float2* factors, int lane) {
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    float v[8];
    load8(inner, c * CHUNK + lane * 8, EXPERT_WIDTH, v);
    round_chunk(v, planes + c * PLANES, factors + c * 4, lane);
  }
}

constexpr int PIECE = CHUNKS * CHUNK4;            // what a tile has of one expert
constexpr int OWN = PIECE + CHUNKS * (PLANES + FACTORS);  // of a warp

LAUNCH(moe_down, TILES, SLOTS * 32, SLOTS * OWN)
extern "C" __global__ void __launch_bounds__(SLOTS * 32)
    moe_down(const Step* step, const u8* down, const float* inner, const u32* choice, float* x) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ float products[SLOTS][TILE];
  __shared__ u64 barriers[SLOTS];
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, tile = blockIdx.x;
  u8* weights = shared + warp * OWN;  // this warp's, then its activations
  u8* planes = weights + PIECE;
  float2* factors = (float2*)(planes + CHUNKS * PLANES);
  Stream<PIECE, 1> stream(weights, barriers + warp, lane);
  u32 expert = EXPERTS;
  if (warp < TOP_K) {
    // moe_up's blocks are all running or done (this kernel came after they let it), so the tag will be set.
    if (lane == 0) {
      while (!load_acquire(choice + CHOICE_TAG)) __nanosleep(32);
      expert = load_relaxed(choice + warp);
    }
    expert = __shfl_sync(~0u, expert, 0);
  }
  stream.start(0, down + ((u64)expert * TILES + tile) * PIECE, true, lane);
  wait_predecessors();
  const float share = __uint_as_float(choice[warp < TOP_K ? CHOICE_SHARES + warp : CHOICE_SHARED]);
  const float before = threadIdx.x < TILE ? x[tile * TILE + threadIdx.x] : 0.0f;
  round_inner(inner + warp * EXPERT_WIDTH, planes, factors, lane);
  __syncwarp();
  stream.wait(0, 0);
  float sum = 0;
#pragma unroll
  for (int c = 0; c < CHUNKS; ++c) {
    OneRow operand;
    operand.load(planes + c * PLANES, factors + c * 4, lane);
    const float product = chunk_product<4>(weights + c * CHUNK4, operand, lane);
    sum = c ? sum + product : product;
  }
  if (has_result(lane)) products[warp][result_place(lane)] = __fmul_rn(share, sum);
  __syncthreads();
  if (threadIdx.x < TILE) {
    float all = products[0][threadIdx.x];
#pragma unroll
    for (int e = 1; e < SLOTS; ++e) all = __fadd_rn(all, products[e][threadIdx.x]);
    x[tile * TILE + threadIdx.x] = before + all;
  }
}

// ---- a batch
constexpr int BATCH_TILES = 8;
static_assert(TILES % BATCH_TILES == 0, "a block has eight tiles at once");
constexpr int UNITS = TILES / BATCH_TILES;  // of an item
constexpr int STAGES = 2;                   // pieces of a warp under way
constexpr int PLACES = BATCH_TILES * STAGES * PIECE, FACTOR_PLACE = PLACES + ROW_GROUP * CHUNKS * PLANES;

LAUNCH(moe_down_batch, 2 * MULTIPROCESSORS, BATCH_TILES * 32, FACTOR_PLACE + ROW_GROUP * CHUNKS * FACTORS)
extern "C" __global__ void __launch_bounds__(BATCH_TILES * 32, 2)
    moe_down_batch(const Step* step, const u8* down, const float* inner, const u32* items, float* products) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ u64 barriers[BATCH_TILES * STAGES];
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u8* planes = shared + PLACES;  // [8 rows][chunks]
  float2* factors = (float2*)(shared + FACTOR_PLACE);
  u8* own = shared + warp * STAGES * PIECE;
  Stream<PIECE, STAGES> stream(own, barriers + warp * STAGES, lane);
  wait_predecessors();
  // Eight tiles of an item are a unit; all units in a row, cut into even runs.
  const u32 all = items[0] * UNITS, first = (u64)all * blockIdx.x / gridDim.x, last = (u64)all * (blockIdx.x + 1) / gridDim.x;
  u32 asked = ~0u, asked_expert = 0;
  const auto ask = [&](u32 unit) {
    if (unit < last && unit / UNITS != asked) asked = unit / UNITS, asked_expert = items[ITEM_WORDS * (1 + asked)];
    stream.start((unit - first) % STAGES, down + ((u64)asked_expert * TILES + unit % UNITS * BATCH_TILES + warp) * PIECE, unit < last, lane);
  };
  for (u32 i = 0; i < STAGES; ++i) ask(first + i);
  u32 item = ~0u, slots[2] = {0, 0};
  int rows = 0;
  for (u32 unit = first; unit < last; ++unit) {
    if (unit / UNITS != item) {
      item = unit / UNITS;
      const u32* record = items + ITEM_WORDS * (1 + item);
      rows = record[1];
#pragma unroll
      for (int n = 0; n < 2; ++n) slots[n] = record[ITEM_SLOTS + min(4 * n + lane % 4, rows - 1)];
      __syncthreads();
      if (warp < rows) round_inner(inner + (u64)record[ITEM_SLOTS + warp] * EXPERT_WIDTH, planes + warp * CHUNKS * PLANES, factors + warp * CHUNKS * 4, lane);
      __syncthreads();
    }
    const u32 stage = (unit - first) % STAGES;
    stream.wait(stage, (unit - first) / STAGES);
    float low[2], high[2];
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
      EightRows operand;
      operand.load([&](int row) { return planes + (row * CHUNKS + c) * PLANES; }, [&](int row) { return factors + (row * CHUNKS + c) * 4; }, rows, lane);
      const u8* chunk = own + stage * PIECE + c * CHUNK4;
      Weights<4> weights;
      weights.load(chunk, lane);
      float l[2], h[2];
      chunk_product<4>(weights, chunk + CHUNK4 - PARAMETERS, operand, rows, lane, l, h);
#pragma unroll
      for (int n = 0; n < 2; ++n) low[n] = c ? low[n] + l[n] : l[n], high[n] = c ? high[n] + h[n] : h[n];
    }
    __syncwarp();
    ask(unit + STAGES);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (4 * n + lane % 4 < rows) {
        float* out = products + (u64)slots[n] * HIDDEN + (unit % UNITS * BATCH_TILES + warp) * TILE + lane / 4;
        out[0] = low[n], out[8] = high[n];
      }
    }
  }
}

LAUNCH(moe_sum_batch, ceil_div(HIDDEN, 256), 256, 0)
extern "C" __global__ void __launch_bounds__(256) moe_sum_batch(const Step* step, const float* products, const u32* choice, float* x) {
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.y;
  const int n = blockIdx.x * 256 + threadIdx.x;
  if (row >= step->rows || n >= HIDDEN) return;
  const u32* record = choice + row * CHOICE_WORDS;
  const float* at = products + (u64)row * SLOTS * HIDDEN + n;
  float sum = __fmul_rn(__uint_as_float(record[CHOICE_SHARES]), at[0]);
#pragma unroll
  for (int e = 1; e < SLOTS; ++e) {
    sum = __fadd_rn(sum, __fmul_rn(__uint_as_float(record[e < TOP_K ? CHOICE_SHARES + e : CHOICE_SHARED]), at[e * HIDDEN]));
  }
  x[row * HIDDEN + n] += sum;
}
