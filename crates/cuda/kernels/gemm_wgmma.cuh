// The products of gemm.cuh on Hopper's warpgroup instructions.
//
// A block stays on its multiprocessor and takes one item of work after the other: 256 matrix rows by up to TOKENS tokens.
// A third warpgroup asks the copy engine for tiles, a chunk of 256 inputs at a time, and for tokens, a group of 64 inputs at a time, as far ahead as
// there is room, across items. Two warpgroups multiply, each twice 64 matrix rows: weights are unpacked into registers while the
// products of those before are under way, tokens are read by the tensor cores from shared memory.
// For 256 rows, 128 tokens and 64 inputs: 1,024 cycles of the tensor cores; shared memory 64 KB read by them (512 cycles), 16 KB of
// tokens and 9 KB of tiles written and 9 KB read (270); about 300 of a scheduler's issue slots; 25 KB from L2.
// Reached, of 786 TFLOP/s: 753 in the projections in, 717 to 730 out, 513 to 536 in moe_up, 499 to 518 in moe_down (4,096 tokens). 512
// tokens are bound by reading the experts: 303 MB of moe_up in 133 us.
#pragma once

constexpr int RUN_TOKENS = 144;  // of an expert's item
// Items of the same size, which is what their tokens are rounded up to, follow each other: 144, 128, 112, 96, 64, 32, 16.
constexpr int SIZES = 7;
__device__ __forceinline__ int size_of(int tokens) { return tokens > 96 ? (144 - tokens) / 16 : 3 + (tokens <= 64) + (tokens <= 32) + (tokens <= 16); }
constexpr int DENSE_TOKENS = 128;
constexpr int CONSUMERS = 2;     // warpgroups that multiply
constexpr int PRODUCER_WARPS = 4;
static_assert(PRODUCER_WARPS == CHUNK_GROUPS, "a warp fetches one of a chunk's groups of tokens");
constexpr int ALIGNED = EIGHT * GROUP_BYTES;  // rows that are swizzled together begin at a multiple
constexpr int SIXTY_FOURS = 2;   // matrix rows of a warpgroup, in 64s
constexpr int GEMM_THREADS = 128 * (CONSUMERS + 1);
// What a thread may have: the multiprocessor's 65,536 registers are 168 for each of GEMM_THREADS, which are passed on.
constexpr int CONSUMER_REGISTERS = 224, PRODUCER_REGISTERS = 56;
static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS + 1) * 168, "more than there are would never be granted");

// What consumers must know of an item; tokens 0: there are no more.
struct __align__(16) Range {
  int tokens, tiles, first_tile, first_token;
};

template <int BITS_, int TOKENS_, class Store_> struct Gemm {
  using Store = Store_;
  static constexpr int BITS = BITS_, TOKENS = TOKENS_, THREADS = GEMM_THREADS, BYTES = chunk_bytes<BITS_>();
  static constexpr int TILES = 4 * CONSUMERS * SIXTY_FOURS;
  // Tokens of a group; then a chunk of the tiles and which item it is of; then results of each warpgroup; then barriers.
  static constexpr int TOKEN_STAGE = TOKENS * GROUP_BYTES, TILE_STAGE = TILES * BYTES + 128, TILE_STAGES = 2, STAGED = TOKENS * Store::STAGED;
  static constexpr int OTHER = ALIGNED + 512;  // to begin at a multiple of that; barriers
  static constexpr int TOKEN_STAGES_FIT = (SHARED_LIMIT - OTHER - TILE_STAGES * TILE_STAGE - CONSUMERS * STAGED) / TOKEN_STAGE;
  static constexpr int TOKEN_STAGES = TOKEN_STAGES_FIT < 12 ? TOKEN_STAGES_FIT : 12;
  static constexpr int TILE_AT = TOKEN_STAGES * TOKEN_STAGE, STAGED_AT = TILE_AT + TILE_STAGES * TILE_STAGE, BARRIERS_AT = STAGED_AT + CONSUMERS * STAGED;
  static constexpr int SHARED = BARRIERS_AT + OTHER;
  static_assert(TOKEN_STAGES >= 4, "a chunk's tokens fit");
};
// Blocks stay, as many as there are multiprocessors.
#define LAUNCH_GEMM(kernel, G, blocks) LAUNCH_ROWS(kernel, MULTIPROCESSORS, G::THREADS, G::SHARED, 0x7fffffff)
#define GEMM_BOUNDS(G) __launch_bounds__(G::THREADS, 1)

// Tokens of an item of a dense product: fewer where there would not be an item for each block.
template <class G> __device__ __forceinline__ int dense_tokens(int tiles, int rows) {
  int tokens = G::TOKENS;
  while (tokens > 32 && ceil_div(tiles, G::TILES) * ceil_div(rows, tokens) < MULTIPROCESSORS) tokens /= 2;
  return tokens;
}

// ---- the warpgroup's instructions ---------------------------------------------------------------------------------------

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// Of a right operand in shared memory: rows of 128 bytes, eight rows of them swizzled together.
constexpr u32 OPERAND_SHAPE = ALIGNED >> 4 | 1u << 30;
// c[64][N] += a[64][16] b[16][N], f16 into f32; b in shared memory.
#define C8(i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
#define MULTIPLY(n, results, list, operands, operand, ...)                                                                     \
  __device__ __forceinline__ void multiply(float (&c)[results], const u32* a, u32 b) {                                  \
    asm volatile("{.reg .pred p; .reg .b64 d; setp.eq.u32 p, 0, 0; mov.b64 d, {" operand "};\n"                          \
                 "wgmma.mma_async.sync.aligned.m64n" #n "k16.f32.f16.f16 {" list "}, " operands ", d, p, 1, 1, 0;}"     \
                 : __VA_ARGS__                                                                                          \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "n"(OPERAND_SHAPE));                                                 \
  }
#define R0 "%0,%1,%2,%3,%4,%5,%6,%7"
#define R8 "%8,%9,%10,%11,%12,%13,%14,%15"
#define R16 "%16,%17,%18,%19,%20,%21,%22,%23"
#define R24 "%24,%25,%26,%27,%28,%29,%30,%31"
#define R32 "%32,%33,%34,%35,%36,%37,%38,%39"
#define R40 "%40,%41,%42,%43,%44,%45,%46,%47"
#define R48 "%48,%49,%50,%51,%52,%53,%54,%55"
#define R56 "%56,%57,%58,%59,%60,%61,%62,%63"
#define R64 "%64,%65,%66,%67,%68,%69,%70,%71"
MULTIPLY(16, 8, R0, "{%8,%9,%10,%11}", "%12, %13", C8(0))
MULTIPLY(32, 16, R0 "," R8, "{%16,%17,%18,%19}", "%20, %21", C8(0), C8(8))
MULTIPLY(64, 32, R0 "," R8 "," R16 "," R24, "{%32,%33,%34,%35}", "%36, %37", C8(0), C8(8), C8(16), C8(24))
MULTIPLY(96, 48, R0 "," R8 "," R16 "," R24 "," R32 "," R40, "{%48,%49,%50,%51}", "%52, %53", C8(0), C8(8), C8(16), C8(24), C8(32), C8(40))
MULTIPLY(112, 56, R0 "," R8 "," R16 "," R24 "," R32 "," R40 "," R48, "{%56,%57,%58,%59}", "%60, %61", C8(0), C8(8), C8(16), C8(24), C8(32), C8(40), C8(48))
MULTIPLY(128, 64, R0 "," R8 "," R16 "," R24 "," R32 "," R40 "," R48 "," R56, "{%64,%65,%66,%67}", "%68, %69", C8(0), C8(8), C8(16), C8(24), C8(32), C8(40), C8(48), C8(56))
MULTIPLY(144, 72, R0 "," R8 "," R16 "," R24 "," R32 "," R40 "," R48 "," R56 "," R64, "{%72,%73,%74,%75}", "%76, %77", C8(0), C8(8), C8(16), C8(24), C8(32), C8(40), C8(48), C8(56), C8(64))
#undef R0
#undef R8
#undef R16
#undef R24
#undef R32
#undef R40
#undef R48
#undef R56
#undef R64
#undef MULTIPLY
#undef C8
// The lower half of a right operand's description.
__device__ __forceinline__ u32 operand(u32 address) { return (address & 0x3ffff) >> 4 | 1 << 16; }
constexpr int STEP = 32 >> 4;  // from sixteen inputs to the next, as the address in an operand counts

// ---- barriers -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// Where one is in a ring of STAGES, and which time around.
template <int STAGES> struct Turn {
  u32 stage = 0, round = 0;
  __device__ __forceinline__ void next() {
    if (++stage == STAGES) stage = 0, round ^= 1;
  }
};

// ---- products ---------------------------------------------------------------------------------------------------------

// Barriers of both rings, each [stage] full, then [stage] empty.
template <class G> struct Rings {
  u8* stages;
  u32 base, token_full, token_empty, tile_full, tile_empty;
  __device__ __forceinline__ explicit Rings(u8* unaligned) {
    stages = unaligned + ((0u - shared_address(unaligned)) & (ALIGNED - 1));
    base = shared_address(stages);
    token_full = base + G::BARRIERS_AT, token_empty = token_full + G::TOKEN_STAGES * 8;
    tile_full = token_empty + G::TOKEN_STAGES * 8, tile_empty = tile_full + G::TILE_STAGES * 8;
  }
  __device__ __forceinline__ const u8* tiles(u32 stage) const { return stages + G::TILE_AT + stage * G::TILE_STAGE; }
  __device__ __forceinline__ Range* range(u32 stage) const { return (Range*)(stages + G::TILE_AT + stage * G::TILE_STAGE + G::TILES * G::BYTES); }
};

// Threads of a warpgroup that multiplies wait for each other; what they wrote to shared memory the copy engine may then read.
__device__ __forceinline__ void warpgroup_barrier(int group) {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
  asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
}
// Shared memory may be written again when the copy engine has read it.
__device__ __forceinline__ void bulk_store(void* to, u32 from, u32 bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\ncp.async.bulk.commit_group;" ::"l"(to), "r"(from), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_stores_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void bulk_stores_done() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
// Four times eight by eight numbers: a lane has of matrix i its column lane / 4, rows 2 (lane % 4) + {0, 1}, and the address of row
// lane % 8 of matrix lane / 8.
__device__ __forceinline__ void store_columns(u32 address, u32 a, u32 b, u32 c, u32 d) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Results of a warpgroup's two times 64 matrix rows. What lies together is put together in shared memory, for the copy engine.
template <class G, int N> __device__ __forceinline__ void finish(const Rings<G>& rings, const Range& item, const float (&c)[SIXTY_FOURS][N], const typename G::Store& store) {
  using Store = typename G::Store;
  const int group = threadIdx.x / 128, warp = threadIdx.x / 32 % 4, lane = threadIdx.x % 32;
  const int first = group * 4 * SIXTY_FOURS;  // of the warpgroup's tiles
  if (first >= item.tiles) return;
  u8* to = store.base(item.first_tile + first, item.first_token);
  u8* staged = rings.stages + G::STAGED_AT + group * G::STAGED;
  if (Store::STAGED) {
    if (threadIdx.x % 128 == 0) bulk_stores_read();
    warpgroup_barrier(group);
  }
#pragma unroll
  for (int m = 0; m < SIXTY_FOURS; ++m) {
    const int own = first + 4 * m + warp;
    if (own >= item.tiles) break;
    if constexpr (is_halves<Store>) {
      const u32 row = shared_address(staged) + (lane / 16 * EIGHT + lane % 8) * Store::STAGED, unit = ((4 * m + warp) * 2 + lane / 8 % 2) ^ lane % 8;
#pragma unroll
      for (int i = 0; i < N; i += 8) {
        if (i * 2 >= item.tokens) break;
        u32 pairs[4];
#pragma unroll
        for (int e = 0; e < 4; ++e) pairs[e] = f16_pair(c[m][i + 2 * e] * WEIGHT_UNIT, c[m][i + 2 * e + 1] * WEIGHT_UNIT);
        store_columns(row + i * 2 * Store::STAGED + unit * 16, pairs[0], pairs[1], pairs[2], pairs[3]);
      }
    } else {
#pragma unroll
      for (int i = 0; i < N; i += 4) {
        const int at = i * 2 + lane % 4 * 2;
        if (i * 2 >= item.tokens) break;
        store.put(Store::STAGED ? staged : to, item.first_tile + own, at, item.tokens - at, c[m][i] * WEIGHT_UNIT, c[m][i + 1] * WEIGHT_UNIT,
                  c[m][i + 2] * WEIGHT_UNIT, c[m][i + 3] * WEIGHT_UNIT);
      }
    }
  }
  if (Store::STAGED) {
    warpgroup_barrier(group);
    if (threadIdx.x % 128 == 0) bulk_store(to, shared_address(staged), item.tokens * Store::STAGED);
  }
}

// A warpgroup's matrix rows of an item with at most TOKENS tokens.
template <class G, int TOKENS>
__device__ __forceinline__ void consume(const Rings<G>& rings, const Range item, Turn<G::TILE_STAGES>& tile, Turn<G::TOKEN_STAGES>& token,
                                        Turn<G::TOKEN_STAGES>& used, int chunks, const typename G::Store& store) {
  constexpr int N = TOKENS / 2, M = SIXTY_FOURS;  // results of a thread for 64 rows
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int first = warp / 4 * 4 * M + warp % 4;  // of this warp's tiles, the next one four further
  float c[M][N];
#pragma unroll
  for (int m = 0; m < M; ++m)
#pragma unroll
    for (int i = 0; i < N; ++i) c[m][i] = 0.0f;
  const auto release = [&] {
    if (lane == 0) barrier_arrive(rings.token_empty + used.stage * 8);
    used.next();
  };
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    barrier_wait(rings.tile_full + tile.stage * 8, tile.round);
    const u8* tiles = rings.tiles(tile.stage) + first * G::BYTES;
    u32 a[M][16];
    // What is unpacked next is read while the products before it are started.
    Packed<G::BITS> packed;
    packed.load(tiles, 0, lane);
#pragma unroll
    for (int group = 0; group < CHUNK_GROUPS; ++group) {
      barrier_wait(rings.token_full + token.stage * 8, token.round);
      const u32 b = operand(rings.base + token.stage * G::TOKEN_STAGE);
#pragma unroll
      for (int m = 0; m < M; ++m) {
        constexpr int BATCHES = CHUNK_GROUPS * M;
        const int next = group * M + m + 1;
        // The products before the last have read their weights.
        warpgroup_wait<M - 1>();
        if (m == M - 1 && (chunk > 0 || group > 0)) release();
        packed.unpack(a[m]);
        if (next < BATCHES) {
          packed.load(tiles + next % M * 4 * G::BYTES, next / M, lane);
        } else {
          __syncwarp();
          if (lane == 0) barrier_arrive(rings.tile_empty + tile.stage * 8);
        }
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s) multiply(c[m], a[m] + 4 * s, b + s * STEP);
        warpgroup_commit();
      }
      token.next();
    }
    tile.next();
  }
  warpgroup_wait<0>();
  release();
  finish<G>(rings, item, c, store);
}

// Items with at most TOKENS tokens, then those with fewer: a block's items are in that order. (A loop over items of all sizes has the
// compiler serialize the products: it counts the registers of all sizes together.)
template <class G, int TOKENS, int FEWER, int... MORE>
__device__ __forceinline__ void consume_all(const Rings<G>& rings, Turn<G::TILE_STAGES>& tile, Turn<G::TOKEN_STAGES>& token, Turn<G::TOKEN_STAGES>& used,
                                            int chunks, const typename G::Store& store) {
  if constexpr (TOKENS <= G::TOKENS) {
    for (;;) {
      barrier_wait(rings.tile_full + tile.stage * 8, tile.round);
      const Range item = *rings.range(tile.stage);
      if (item.tokens <= FEWER) break;
      consume<G, TOKENS>(rings, item, tile, token, used, chunks, store);
    }
  }
  if constexpr (sizeof...(MORE) > 0) consume_all<G, FEWER, MORE...>(rings, tile, token, used, chunks, store);
}

// All items of this block, those with more tokens first.
template <class G, class ItemAt> __device__ __forceinline__ void gemm(u8* unaligned, int chunks, ItemAt item_at, const typename G::Store& store) {
  const Rings<G> rings(unaligned);
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < G::TOKEN_STAGES; ++i) barrier_init(rings.token_full + i * 8), barrier_init(rings.token_empty + i * 8, 4 * CONSUMERS);
    for (int i = 0; i < G::TILE_STAGES; ++i) barrier_init(rings.tile_full + i * 8), barrier_init(rings.tile_empty + i * 8, 4 * CONSUMERS);
    barriers_ready();
  }
  __syncthreads();
  Turn<G::TILE_STAGES> tile;
  Turn<G::TOKEN_STAGES> token;
  if (thread < 128 * CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Turn<G::TOKEN_STAGES> used;
    consume_all<G, 144, 128, 112, 96, 64, 32, 16, 0>(rings, tile, token, used, chunks, store);
    if (G::STAGED && thread % 128 == 0) bulk_stores_done();
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    // A copy is asked for by one lane at a time, so the warps of the group share them.
    const int warp = thread / 32 % PRODUCER_WARPS, own = lane * PRODUCER_WARPS + warp;
    const bool leads = thread == 128 * CONSUMERS;
    Item item = item_at(blockIdx.x);
    for (int i = blockIdx.x; item.tokens > 0;) {
      // The next item is looked up meanwhile.
      i += gridDim.x;
      const Item next = item_at(i);
      const u8* matrix = item.matrix + (u64)own * chunks * G::BYTES;
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk) {
        barrier_wait(rings.tile_empty + tile.stage * 8, tile.round ^ 1);
        if (leads) {
          *rings.range(tile.stage) = {item.tokens, item.tiles, item.first_tile, item.first_token};
          barrier_expect(rings.tile_full + tile.stage * 8, item.tiles * G::BYTES);
        }
        if (own < item.tiles) {
          bulk_copy_expected(shared_address(rings.tiles(tile.stage)) + own * G::BYTES, matrix + chunk * G::BYTES, G::BYTES, rings.tile_full + tile.stage * 8);
        }
        __syncwarp();
        tile.next();
#pragma unroll 1
        for (int group = 0; group < CHUNK_GROUPS; ++group) {
          // The warps take groups in turn.
          if (group == warp) {
            barrier_wait(rings.token_empty + token.stage * 8, token.round ^ 1);
            if (lane == 0) {
              barrier_expect(rings.token_full + token.stage * 8, item.tokens * GROUP_BYTES);
              bulk_copy_expected(rings.base + token.stage * G::TOKEN_STAGE, item.operands + (u64)(chunk * CHUNK_GROUPS + group) * item.group_bytes,
                                 item.tokens * GROUP_BYTES, rings.token_full + token.stage * 8);
            }
            __syncwarp();
          }
          token.next();
        }
      }
      item = next;
    }
    // Says that there are no more.
    if (leads) {
      barrier_wait(rings.tile_empty + tile.stage * 8, tile.round ^ 1);
      rings.range(tile.stage)->tokens = 0;
      barrier_arrive(rings.tile_full + tile.stage * 8);
    }
  }
}
