// moe_up: top 8 of the router's logits, and the chosen experts' gate and up projections, joined by SwiGLU.
//
// Split, one row: the 512 tiles of the eight experts (a tile: eight rows of gate and the eight of up beside them) over the
// blocks, 4 to each of 128, 512 threads; a warp has a chunk of 256 inputs of every second tile. In each block one warp chooses
// the experts and asks the copy engine for the block's tiles at once, while the others make their operands ready.
// Reads 9.4 MB: 2.1 us at 4.6 TB/s, none of it before the wait. The activations come rounded from moe_route.
//
// A batch: a block has four tiles of one item of moe_select's list (up to eight rows of one expert), 256 threads, a warp a chunk.
#include "tiles.cuh"
#include "choice.cuh"

constexpr int WARPS = 16;
constexpr int UP_TILES = EXPERT_WIDTH / 8;
constexpr int TILES = TOP_K * UP_TILES;
constexpr int TILE_BYTES = HIDDEN_CHUNKS * CHUNK4;
constexpr int LANES = WARPS / HIDDEN_CHUNKS;
constexpr int PER_BLOCK = ceil_div(TILES, MULTIPROCESSORS), BLOCKS = ceil_div(TILES, PER_BLOCK);
constexpr int EACH = ceil_div(PER_BLOCK, LANES);  // tiles of a warp
constexpr int most_rounds(int tiles, int rounds) { return tiles * TILE_BYTES > (SHARED_LIMIT - 12288) * rounds ? most_rounds(tiles, rounds + 1) : rounds; }
// A block's tiles come in so many rounds, one after the other, where shared memory is small.
constexpr int ROUNDS = most_rounds(PER_BLOCK, 1), AT_ONCE = ceil_div(PER_BLOCK, ROUNDS);
constexpr int SUMS = AT_ONCE * TILE_BYTES, BARRIERS = SUMS + HIDDEN_CHUNKS * PER_BLOCK * TILE * 4, SHARED = BARRIERS + 8 * AT_ONCE;
static_assert(PER_BLOCK <= 32, "a lane asks for a tile");

LAUNCH(moe_up, BLOCKS, WARPS * 32, SHARED)
extern "C" __global__ void __launch_bounds__(WARPS * 32, 1)
    moe_up(const Step* step, const u8* up, const u8* packed, const float* logits, float* inner, u32* choice) {
  extern __shared__ __align__(16) u8 shared[];
  __shared__ u32 experts[PER_BLOCK];
  __shared__ __align__(16) ChoiceRoom room;
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = blockIdx.x * PER_BLOCK, count = TILES % PER_BLOCK == 0 ? PER_BLOCK : min(PER_BLOCK, TILES - first);
  const int chunk = warp % HIDDEN_CHUNKS, tile_lane = warp / HIDDEN_CHUNKS;
  const bool works = warp < HIDDEN_CHUNKS * LANES;
  float* products = (float*)(shared + SUMS);  // [chunks][tiles of the block][16]
  const u32 barriers = shared_address(shared + BARRIERS);
  if (threadIdx.x < AT_ONCE) barrier_init(barriers + threadIdx.x * 8);
  barriers_ready();
  __syncthreads();
  wait_predecessors();

  const float inverse = *(const float*)(packed + PACKED_INVERSE);
  OneRow x;
  if (works) x.set(*(const uint4*)(packed + chunk * PLANES + lane * 16), ((const float2*)(packed + PACKED_FACTORS))[chunk * 4 + lane % 4], lane);
  float logit;
  u32 id;
  if (warp == WARPS - 1) {
    id = choose(logits, lane, room, logit);
    const int tile = first + min(lane, count - 1);
    const u32 expert = __shfl_sync(~0u, id, tile / UP_TILES);
    if (lane < count) experts[lane] = expert;
    if (lane < min(count, AT_ONCE)) bulk_copy(shared_address(shared) + lane * TILE_BYTES, up + ((u64)expert * UP_TILES + tile % UP_TILES) * TILE_BYTES, TILE_BYTES, barriers + lane * 8);
    if (blockIdx.x == 0) write_choice(logits, choice, lane, id, logit);
  }
#pragma unroll
  for (int round = 0; round < ROUNDS; ++round) {
    const int done = round * AT_ONCE, now = min(count - done, AT_ONCE);
    if (!BULK_COPIES || round) {
      // Without a copy engine, or in a later round, all threads wait for the experts and for the room.
      __syncthreads();
      if (BULK_COPIES) {
        if ((int)threadIdx.x < now) {
          const int tile = first + done + threadIdx.x;
          bulk_copy(shared_address(shared) + threadIdx.x * TILE_BYTES, up + ((u64)experts[done + threadIdx.x] * UP_TILES + tile % UP_TILES) * TILE_BYTES, TILE_BYTES, barriers + threadIdx.x * 8);
        }
      } else {
        for (int piece = threadIdx.x; piece < now * (TILE_BYTES / 16); piece += WARPS * 32) {
          const int i = piece / (TILE_BYTES / 16), tile = first + done + i;
          copy16(shared_address(shared) + piece * 16, up + ((u64)experts[done + i] * UP_TILES + tile % UP_TILES) * TILE_BYTES + piece % (TILE_BYTES / 16) * 16);
        }
        copies_commit();
        copies_wait<0>();
        __syncthreads();
      }
    }
#pragma unroll
    for (int i = 0; i < EACH; ++i) {
      const int tile = done + tile_lane + i * LANES;
      if (works && tile < done + now) {
        if (BULK_COPIES) barrier_wait(barriers + (tile - done) * 8, round & 1);
        const float product = chunk_product<4>(shared + (tile - done) * TILE_BYTES + chunk * CHUNK4, x, lane);
        if (has_result(lane)) products[(chunk * PER_BLOCK + tile) * TILE + result_place(lane)] = product;
      }
    }
  }
  __syncthreads();
  for (int o = threadIdx.x; o < count * 8; o += WARPS * 32) {
    const float* at = products + o / 8 * TILE + o % 8;
    float gate = at[0], value = at[8];
#pragma unroll
    for (int c = 1; c < HIDDEN_CHUNKS; ++c) gate += at[c * PER_BLOCK * TILE], value += at[c * PER_BLOCK * TILE + 8];
    inner[first * 8 + o] = silu(gate * inverse) * (value * inverse);
  }
}

constexpr int BATCH_WARPS = 8;
constexpr int BATCH_TILES = 4;
static_assert(HIDDEN_CHUNKS <= BATCH_WARPS, "a warp has a chunk");

LAUNCH(moe_up_batch, UP_TILES / BATCH_TILES, BATCH_WARPS * 32, 0)
extern "C" __global__ void __launch_bounds__(BATCH_WARPS * 32)
    moe_up_batch(const Step* step, const u8* up, const u8* packed, const u32* items, float* inner) {
  __shared__ float products[HIDDEN_CHUNKS][BATCH_TILES][ROW_GROUP][TILE];
  __shared__ float inverses[ROW_GROUP];
  launch_dependents();
  wait_predecessors();
  if (blockIdx.y >= items[0]) return;
  const uint4 item = *(const uint4*)(items + 4 + blockIdx.y * 4);
  if (item.x == EXPERTS) return;  // the shared expert is moe_route's
  const u32* slots = items + ITEM_SLOTS + item.y;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, rows = item.z;
  auto row_of = [&](int row) { return packed + (u64)(slots[min(row, rows - 1)] / SLOTS) * PACKED_BYTES; };
  const u8* weights = up + (((u64)item.x * UP_TILES + blockIdx.x * BATCH_TILES) * HIDDEN_CHUNKS + warp) * CHUNK4;
  if (warp < HIDDEN_CHUNKS) {
    Weights<4> next;
    next.load(weights, lane);
    EightRows x;
    x.load([&](int row) { return row_of(row) + warp * PLANES; }, [&](int row) { return row_of(row) + PACKED_FACTORS + warp * FACTORS; }, lane);
#pragma unroll
    for (int tile = 0; tile < BATCH_TILES; ++tile) {
      const Weights<4> now = next;
      const u8* parameters = weights + CHUNK4 - PARAMETERS;
      weights += HIDDEN_CHUNKS * CHUNK4;
      if (tile + 1 < BATCH_TILES) next.load(weights, lane);
      float low[2], high[2];
      chunk_product<4>(now, parameters, x, lane, low, high);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        products[warp][tile][4 * n + lane % 4][lane / 4] = low[n];
        products[warp][tile][4 * n + lane % 4][lane / 4 + 8] = high[n];
      }
    }
  }
  if (threadIdx.x < ROW_GROUP) inverses[threadIdx.x] = *(const float*)(row_of(threadIdx.x) + PACKED_INVERSE);
  __syncthreads();
  for (int o = threadIdx.x; o < BATCH_TILES * rows * 8; o += BATCH_WARPS * 32) {
    const int row = o / (BATCH_TILES * 8), tile = o / 8 % BATCH_TILES, i = o % 8;
    float gate = products[0][tile][row][i], value = products[0][tile][row][i + 8];
#pragma unroll
    for (int c = 1; c < HIDDEN_CHUNKS; ++c) gate += products[c][tile][row][i], value += products[c][tile][row][i + 8];
    inner[slots[row] * EXPERT_WIDTH + (blockIdx.x * BATCH_TILES + tile) * 8 + i] = silu(gate * inverses[row]) * (value * inverses[row]);
  }
}
