// The products of gemm.cuh for cards before Hopper: mma.sync, one item a block.
//
// A block has 2 WARPS tiles of 16 matrix rows and up to RUN_TOKENS tokens; a warp has two of the tiles and all tokens. Tiles come a chunk of
// 256 inputs at a time, tokens a group of 64 inputs at a time, three groups ahead of their use, as they lie in memory. For a group a
// warp unpacks its tiles once and meets sixteen tokens after the other with them: four matrix instructions for each load of operands.
#pragma once

constexpr int RUN_TOKENS = 64;  // of an expert's item
// The order of items does not matter.
constexpr int SIZES = 1;
__device__ __forceinline__ int size_of(int) { return 0; }
constexpr int DENSE_TOKENS = 64;

template <int BITS_, int TOKENS_, class Store_> struct Gemm {
  using Store = Store_;
  static constexpr int BITS = BITS_, TOKENS = TOKENS_, WARPS = BITS == 4 ? BLOCK_TILES / 2 : 2, BYTES = chunk_bytes<BITS_>();
  static constexpr int TILES = 2 * WARPS, THREADS = 32 * WARPS;
  static constexpr int TOKEN_STAGE = TOKENS * GROUP_BYTES, TOKEN_STAGES = 4, TILE_STAGE = TILES * BYTES, TILE_STAGES = 2;
  static constexpr int TILE_AT = TOKEN_STAGES * TOKEN_STAGE, SHARED = TILE_AT + TILE_STAGES * TILE_STAGE;
  static_assert(SHARED <= SHARED_LIMIT && TOKEN_STAGES == CHUNK_GROUPS, "a group is fetched into the place of the one before this");
};
// A block an item, two blocks a multiprocessor where there is room.
#define LAUNCH_GEMM(kernel, G, blocks) LAUNCH_ROWS(kernel, blocks, G::THREADS, G::SHARED, G::TOKENS)
#define GEMM_BOUNDS(G) __launch_bounds__(G::THREADS, 2)
template <class G> __device__ __forceinline__ int dense_tokens(int, int) { return G::TOKENS; }

// Operands of sixteen inputs of two times eight tokens.
__device__ __forceinline__ void load_tokens(u32 (&b)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];" : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address) : "memory");
}

// The block's item, number blockIdx.x + gridDim.x blockIdx.y.
template <class G, class ItemAt> __device__ __forceinline__ void gemm(u8* shared, int chunks, ItemAt item_at, const typename G::Store& store) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
  const Item item = item_at(blockIdx.x + gridDim.x * blockIdx.y);
  const int tiles = item.tiles, tokens = item.tokens, groups = chunks * CHUNK_GROUPS;
  if (tokens == 0) return;
  const u32 base = shared_address(shared);
  // A warp whose tiles do not exist goes along with those of another; what it finds is not kept.
  const int first = min(2 * warp, tiles - 1);
  const u8* from = item.matrix + (u64)first * chunks * G::BYTES;
  const u32 second = first + 1 < tiles ? (chunks - 1) * G::BYTES : 0u - G::BYTES;  // what its chunk lies further than behind the first's
  const auto fetch = [&](int group) {
    if (group < groups) {
      const u32 to = base + group % G::TOKEN_STAGES * G::TOKEN_STAGE;
      for (int piece = thread; piece < tokens * (GROUP_BYTES / 16); piece += G::THREADS) copy16(to + piece * 16, item.operands + (u64)group * item.group_bytes + piece * 16);
      if (group % CHUNK_GROUPS == 0) {
        const int chunk = group / CHUNK_GROUPS;
        const u32 own = base + G::TILE_AT + chunk % G::TILE_STAGES * G::TILE_STAGE + warp * 2 * G::BYTES;
#pragma unroll
        for (int piece = 0; piece < 2 * G::BYTES / 16; piece += 32) {
          const int at = (piece + lane) * 16;
          if (piece + 32 <= 2 * G::BYTES / 16 || at < 2 * G::BYTES) copy16(own + at, from + (int)(chunk * G::BYTES + at + (at < G::BYTES ? 0u : second)));
        }
      }
    }
    copies_commit();
  };
  constexpr int AHEAD = G::TOKEN_STAGES - 1;
#pragma unroll
  for (int group = 0; group < AHEAD; ++group) fetch(group);
  float c[G::TOKENS / 8][2][4];
#pragma unroll
  for (int n = 0; n < G::TOKENS / 8; ++n)
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) c[n][m][i] = 0.0f;
  // Of a lane's address: token lane % 8 of the first or the second eight, which half of sixteen inputs.
  const u32 row = (lane / 16 * EIGHT + lane % 8) * GROUP_BYTES, half = lane / 8 % 2;
#pragma unroll 1
  for (int group = 0; group < groups; ++group) {
    copies_wait<AHEAD - 1>();
    __syncthreads();
    fetch(group + AHEAD);
    const u8* own = shared + G::TILE_AT + group / CHUNK_GROUPS % G::TILE_STAGES * G::TILE_STAGE + warp * 2 * G::BYTES;
    const u32 stage = base + group % G::TOKEN_STAGES * G::TOKEN_STAGE + row;
    u32 a[2][16];
#pragma unroll
    for (int m = 0; m < 2; ++m) {
      Packed<G::BITS> packed;
      packed.load(own + m * G::BYTES, group % CHUNK_GROUPS, lane);
      packed.unpack(a[m]);
    }
#pragma unroll
    for (int n = 0; n < G::TOKENS / 8; n += 2) {
      if (8 * n >= tokens) break;
#pragma unroll
      for (int s = 0; s < 4; ++s) {
        u32 b[4];
        load_tokens(b, stage + n * EIGHT * GROUP_BYTES + ((2 * s + half) ^ lane % 8) * 16);
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int e = 0; e < 2; ++e) mma_f16(c[n + e][m], a[m][4 * s], a[m][4 * s + 1], a[m][4 * s + 2], a[m][4 * s + 3], b[2 * e], b[2 * e + 1]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < 2; ++m) {
    if (2 * warp + m >= tiles) break;
    const int tile = item.first_tile + 2 * warp + m;
    u8* to = store.base(tile, item.first_token);
#pragma unroll
    for (int n = 0; n < G::TOKENS / 8; ++n) {
      if (8 * n >= tokens) break;
      const int at = 8 * n + lane % 4 * 2;
      store.put(to, tile, at, tokens - at, c[n][m][0] * WEIGHT_UNIT, c[n][m][1] * WEIGHT_UNIT, c[n][m][2] * WEIGHT_UNIT, c[n][m][3] * WEIGHT_UNIT);
    }
  }
}
