// moe_up: top 8 of the router's logits, and the chosen experts' gate and up projections, joined by SwiGLU.
//
// Split, one row: the 512 tiles of the eight experts (a tile: eight rows of gate and the eight of up beside them) over the
// blocks, 4 to each of 128, 512 threads; a warp has a chunk of 256 inputs of every second tile. In each block one warp chooses
// the experts and asks the copy engine for the block's tiles at once, while the others make their operands ready.
// Reads 9.4 MB: 2.1 us at 4.6 TB/s, none of it before the wait. Reached: 7.1 us. The activations come rounded
// from moe_route.
//
// A batch: two blocks a multiprocessor, each with an even run of the tiles of all items of moe_select's list (an item: up to
// eight rows of one expert), several tiles on their way to shared memory; 256 threads, a warp a chunk.
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

  float logit;
  u32 id;
  if (warp == WARPS - 1) {
    id = choose(logits, lane, room, logit);
    const int tile = first + min(lane, count - 1);
    const u32 expert = __shfl_sync(~0u, id, tile / UP_TILES);
    if (lane < count) experts[lane] = expert;
    if (lane < min(count, AT_ONCE)) bulk_copy(shared_address(shared) + lane * TILE_BYTES, up + ((u64)expert * UP_TILES + tile % UP_TILES) * TILE_BYTES, TILE_BYTES, barriers + lane * 8);
    if (blockIdx.x == 0) {
      write_choice(logits, choice, lane, id, logit);
      tag_choice(choice, lane);
    }
  }
  OneRow x;
  if (works) x.set(*(const uint4*)(packed + chunk * PLANES + lane * 16), ((const float2*)(packed + PACKED_FACTORS))[chunk * 4 + lane % 4], lane);
  const float inverse = *(const float*)(packed + PACKED_INVERSE);
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

// ---- a batch
constexpr int BATCH_WARPS = 8;
static_assert(HIDDEN_CHUNKS <= BATCH_WARPS, "a warp has a chunk");
constexpr int ROW_SUMS = HIDDEN_CHUNKS * ROW_GROUP * TILE;  // f32 of a tile's products
constexpr int batch_bytes(int stages) { return stages * (TILE_BYTES + 8) + 2 * ROW_SUMS * 4; }
constexpr int fitting(int stages) { return stages > 1 && 2 * (batch_bytes(stages) + 1024) > SHARED_LIMIT ? fitting(stages - 1) : stages; }
constexpr int STAGES = fitting(5);  // tiles under way in a block, of which a multiprocessor has two

LAUNCH(moe_up_batch, 2 * MULTIPROCESSORS, BATCH_WARPS * 32, batch_bytes(STAGES))
extern "C" __global__ void __launch_bounds__(BATCH_WARPS * 32, 2)
    moe_up_batch(const Step* step, const u8* up, const u8* packed, const u32* items, float* inner) {
  extern __shared__ __align__(16) u8 shared[];
  launch_dependents();
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float* sums = (float*)(shared + STAGES * TILE_BYTES);
  const u32 barriers = shared_address(shared + STAGES * TILE_BYTES + 2 * ROW_SUMS * 4);
  if (threadIdx.x < STAGES) barrier_init(barriers + threadIdx.x * 8);
  barriers_ready();
  __syncthreads();
  wait_predecessors();
  // All tiles of all items in a row, cut into even runs.
  const u32 all = items[1] * UP_TILES, first = (u64)all * blockIdx.x / gridDim.x, last = (u64)all * (blockIdx.x + 1) / gridDim.x;
  u32 asked = ~0u, asked_expert = 0;
  const auto ask = [&](u32 unit) {  // all threads call it
    const u32 stage = (unit - first) % STAGES;
    if (unit < last && (!BULK_COPIES || threadIdx.x == 0)) {
      if (unit / UP_TILES != asked) asked = unit / UP_TILES, asked_expert = items[ITEM_WORDS * (1 + asked)];
      const u8* from = up + ((u64)asked_expert * UP_TILES + unit % UP_TILES) * TILE_BYTES;
      const u32 to = shared_address(shared) + stage * TILE_BYTES;
      if (BULK_COPIES) bulk_copy(to, from, TILE_BYTES, barriers + stage * 8);
      else
        for (int piece = threadIdx.x; piece < TILE_BYTES / 16; piece += BATCH_WARPS * 32) copy16(to + piece * 16, from + piece * 16);
    }
    if (!BULK_COPIES) copies_commit();
  };
  for (u32 i = 0; i < STAGES; ++i) ask(first + i);
  EightRows x;
  u32 item = ~0u, own_slot = 0;
  int rows = 0;
  float inverse = 0;
  for (u32 unit = first; unit < last; ++unit) {
    const u32 stage = (unit - first) % STAGES;
    if (unit / UP_TILES != item) {
      item = unit / UP_TILES;
      const u32* record = items + ITEM_WORDS * (1 + item);
      rows = record[1];
      const auto row_of = [&](int row) { return packed + (u64)(record[ITEM_SLOTS + min(row, rows - 1)] / SLOTS) * PACKED_BYTES; };
      if (warp < HIDDEN_CHUNKS) x.load([&](int row) { return row_of(row) + warp * PLANES; }, [&](int row) { return row_of(row) + PACKED_FACTORS + warp * FACTORS; }, rows, lane);
      own_slot = record[ITEM_SLOTS + min((int)threadIdx.x / 8 % ROW_GROUP, rows - 1)];
      inverse = *(const float*)(packed + (u64)(own_slot / SLOTS) * PACKED_BYTES + PACKED_INVERSE);
    }
    float* products = sums + (unit - first) % 2 * ROW_SUMS;
    if (BULK_COPIES) barrier_wait(barriers + stage * 8, (unit - first) / STAGES & 1);
    else {
      copies_wait<STAGES - 1>();
      __syncthreads();
    }
    if (warp < HIDDEN_CHUNKS) {
      const u8* chunk = shared + stage * TILE_BYTES + warp * CHUNK4;
      Weights<4> weights;
      weights.load(chunk, lane);
      float low[2], high[2];
      chunk_product<4>(weights, chunk + CHUNK4 - PARAMETERS, x, rows, lane, low, high);
#pragma unroll
      for (int n = 0; n < 2; ++n) {
        if (4 * n >= rows) break;
        float* out = products + (warp * ROW_GROUP + 4 * n + lane % 4) * TILE + lane / 4;
        out[0] = low[n], out[8] = high[n];
      }
    }
    __syncthreads();
    ask(unit + STAGES);
    if ((int)threadIdx.x < rows * 8) {
      const int i = threadIdx.x % 8;
      const float* at = products + threadIdx.x / 8 * TILE + i;
      float gate = at[0], value = at[8];
#pragma unroll
      for (int c = 1; c < HIDDEN_CHUNKS; ++c) gate += at[c * ROW_GROUP * TILE], value += at[c * ROW_GROUP * TILE + 8];
      inner[(u64)own_slot * EXPERT_WIDTH + unit % UP_TILES * 8 + i] = silu(gate * inverse) * (value * inverse);
    }
  }
}
