// Products of quantized matrices with many rows of activations: the tensor cores' int8, exact, with the terms and the order of
// tiles.cuh, so that a token's results have the same bits here and in a decode step.
//
// A block has 2 WARPS tiles of 16 matrix rows and up to GEMM_TOKENS rows of activations ("tokens"); a warp has two of the tiles and
// all tokens. Inputs come 256 at a time through shared memory: tiles as they lie in memory, and the tokens' planes. A warp
// unpacks two groups of its tiles into operands and meets eight tokens after the other with them: for each group of 64 inputs
// and each plane two products of 16x32 by 32x8; both planes' sums are put together as integers, and one conversion, two
// products and two sums in f32 make the term (two of the four instructions are what the bias costs).
//
// For 16x8 results and 64 inputs that is 4 matrix instructions, 24 others, and 1.5 loads from shared memory; unpacking adds 1.5.
// Reached: 185 TFLOP/s (cuBLAS in bf16: 746), with half of the issue slots and most of the tensor cores' time free.
#pragma once

template <int BITS> __host__ __device__ constexpr int gemm_stage(int warps, int tokens) { return 2 * warps * chunk_bytes<BITS>() + tokens * (PLANES + FACTORS); }
constexpr int GEMM_TOKENS = 32;  // of a block

// c[16][8] = or += a[16][32] (u8) b[32][8] (s8). Not volatile: the compiler may order these as it likes.
__device__ __forceinline__ void start_u8s8(int (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=r"(c[0]), "=r"(c[1]), "=r"(c[2]), "=r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "r"(0));
}
__device__ __forceinline__ void more_u8s8(int (&c)[4], const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// A tile's group of 64 inputs as left operands: of each sixteen inputs the first eight (even ones, odd ones), then the others.
template <int BITS> __device__ __forceinline__ void unpack(const u8* chunk, int group, int lane, u32 (&a)[8]) {
  if constexpr (BITS == 4) {
    const uint4 w = *(const uint4*)(chunk + group * 512 + lane * 16);
    a[0] = w.x & LOW_NIBBLES, a[1] = w.z & LOW_NIBBLES, a[2] = w.x >> 4 & LOW_NIBBLES, a[3] = w.z >> 4 & LOW_NIBBLES;
    a[4] = w.y & LOW_NIBBLES, a[5] = w.w & LOW_NIBBLES, a[6] = w.y >> 4 & LOW_NIBBLES, a[7] = w.w >> 4 & LOW_NIBBLES;
  } else {
    const uint4 low = *(const uint4*)(chunk + group * 1024 + lane * 16), high = *(const uint4*)(chunk + group * 1024 + 512 + lane * 16);
    a[0] = low.x, a[1] = high.x, a[2] = low.y, a[3] = high.y;
    a[4] = low.z, a[5] = high.z, a[6] = low.w, a[7] = high.w;
  }
}

template <int BITS_, bool SORTED_ = false> struct Gemm {
  static constexpr bool SORTED = SORTED_;
  static constexpr int BITS = BITS_, WARPS = BITS == 4 ? BLOCK_TILES / 2 : 2, TOKENS = GEMM_TOKENS, BYTES = chunk_bytes<BITS_>();
  static constexpr int TILES = 2 * WARPS, THREADS = 32 * WARPS;
  static constexpr int STAGE = gemm_stage<BITS_>(WARPS, TOKENS);
  static constexpr int ENDS = TOKENS * 12;  // [tokens] addresses of rows, then slots
  static constexpr int STAGES = 2 * STAGE + ENDS <= SHARED_LIMIT ? 2 : 1;
  static constexpr int SHARED = STAGES * STAGE + ENDS;
};
// A block an item, two blocks a multiprocessor.
#define LAUNCH_GEMM(kernel, G, blocks) LAUNCH_ROWS(kernel, blocks, G::THREADS, G::SHARED, G::TOKENS)
#define GEMM_BOUNDS(G) __launch_bounds__(G::THREADS, 2)

// The block's item, number blockIdx.x + gridDim.x blockIdx.y. `item_at(i)` says what item i is; tokens are slots `sorted[first_token ..]`,
// or those numbers themselves; `row_at(slot)` is the number of a slot's rounded row in `packed`, of `chunks` chunks. `store(tile, slot, low, high, ..)` gets
// the results of matrix rows 16 tile + lane / 4 and 8 more, times what the row says, and what `prior(tile, slot, ..)` found before.
template <class G, class ItemAt, class RowAt, class Prior, class Store>
__device__ __forceinline__ void gemm(u8* shared, const u8* packed, int chunks, const u32* sorted, ItemAt item_at, RowAt row_at, Prior prior, Store store) {
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const Item item = item_at(blockIdx.x + gridDim.x * blockIdx.y);
  const int tiles = item.tiles, tokens = item.tokens;
  if (tokens == 0) return;
  const u8** rows = (const u8**)(shared + G::STAGES * G::STAGE);
  u32* slots = (u32*)(rows + G::TOKENS);
  if (thread < tokens) {
    slots[thread] = G::SORTED ? sorted[item.first_token + thread] : item.first_token + thread;
    rows[thread] = packed + (u64)row_at(slots[thread]) * rounded_bytes(chunks);
  }
  __syncthreads();
  const u32 base = shared_address(shared);
  // A warp whose tiles do not exist goes along with those of another; what it finds is not kept.
  const int first = min(2 * warp, tiles - 1);
  const u8* from = item.matrix + (u64)first * chunks * G::BYTES;
  const u32 second = first + 1 < tiles ? (chunks - 1) * G::BYTES : 0u - G::BYTES;  // what its chunk lies further than behind the first's
  constexpr int OPERAND = G::TILES * G::BYTES, FACTOR = OPERAND + G::TOKENS * PLANES;
  const auto fetch = [&](int chunk) {
    const u32 to = base + chunk % G::STAGES * G::STAGE;
    const u32 own = to + warp * 2 * G::BYTES;
#pragma unroll
    for (int piece = 0; piece < 2 * G::BYTES / 16; piece += 32) {
      const int at = (piece + lane) * 16;
      if (piece + 32 <= 2 * G::BYTES / 16 || at < 2 * G::BYTES) copy16(own + at, from + (int)(chunk * G::BYTES + at + (at < G::BYTES ? 0u : second)));
    }
    // Tokens with an odd number have their planes the other way round: eight lanes then meet 32 banks.
#pragma unroll 4
    for (int token = warp; token < tokens; token += G::WARPS) {
      copy16(to + OPERAND + token * PLANES + (lane * 16 ^ (token & 1) << 6), rows[token] + chunk * PLANES + lane * 16);
    }
    for (int piece = thread; piece < 2 * tokens; piece += G::THREADS) {
      copy16(to + FACTOR + piece * 16, rows[piece / 2] + chunks * PLANES + chunk * FACTORS + piece % 2 * 16);
    }
    copies_commit();
  };
  float total[G::TOKENS / 8][2][4];
#pragma unroll
  for (int n = 0; n < G::TOKENS / 8; ++n)
#pragma unroll
    for (int m = 0; m < 2; ++m)
#pragma unroll
      for (int i = 0; i < 4; ++i) total[n][m][i] = -0.0f;  // to which adding anything changes nothing
  if (G::STAGES > 1) fetch(0);
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk) {
    if (G::STAGES == 1) fetch(chunk);
    copies_wait<0>();
    __syncthreads();
    if (G::STAGES > 1 && chunk + 1 < chunks) fetch(chunk + 1);
    const u8* stage = shared + chunk % G::STAGES * G::STAGE;
    const u8* own = stage + warp * 2 * G::BYTES;
    // Two groups at a time, so that fewer operands are kept: (g0 + g1) first, which waits for (g2 + g3).
    float first_two[G::TOKENS / 8][2][4];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      u32 a[2][2][8];
      float scale[2][2][2], bias[2][2][2];  // [tile][group][row]
#pragma unroll
      for (int m = 0; m < 2; ++m)
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          unpack<G::BITS>(own + m * G::BYTES, half * 2 + j, lane, a[m][j]);
          const uint2 pairs = *(const uint2*)(own + (m + 1) * G::BYTES - PARAMETERS + (g * 4 + half * 2 + j) * 8);
          scale[m][j][0] = pair_scale(pairs.x), bias[m][j][0] = pair_bias(pairs.x);
          scale[m][j][1] = pair_scale(pairs.y), bias[m][j][1] = pair_bias(pairs.y);
        }
#pragma unroll
      for (int n = 0; n < G::TOKENS / 8; ++n) {
        if (8 * n >= tokens) break;
        const u8* column = stage + OPERAND + (8 * n + g) * PLANES + t * 16 + half * 256;
        const u8* factor = stage + FACTOR + (8 * n + 2 * t) * FACTORS + half * 16;
        const float4 left = *(const float4*)factor, right = *(const float4*)(factor + FACTORS);  // scale and sum of both groups
        float sum[2][4];
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint4 high = *(const uint4*)(column + j * 128 + (g & 1) * 64), low = *(const uint4*)(column + j * 128 + (~g & 1) * 64);
#pragma unroll
          for (int m = 0; m < 2; ++m) {
            int c[4], d[4];
            start_u8s8(c, a[m][j], high.x, high.y);
            start_u8s8(d, a[m][j], low.x, low.y);
            more_u8s8(c, a[m][j] + 4, high.z, high.w);
            more_u8s8(d, a[m][j] + 4, low.z, low.w);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
              const float4 f = i % 2 ? right : left;
              const float term = __fmaf_rn(__fmul_rn(scale[m][j][i / 2], j ? f.z : f.x), (float)(c[i] * 256 + d[i]), __fmul_rn(bias[m][j][i / 2], j ? f.w : f.y));
              sum[m][i] = j ? __fadd_rn(sum[m][i], term) : term;
            }
          }
        }
#pragma unroll
        for (int m = 0; m < 2; ++m)
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            if (half == 0) first_two[n][m][i] = sum[m][i];
            else total[n][m][i] = __fadd_rn(total[n][m][i], __fadd_rn(first_two[n][m][i], sum[m][i]));
          }
      }
    }
    if (G::STAGES == 1) __syncthreads();
  }
#pragma unroll
  for (int n = 0; n < G::TOKENS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int token = 8 * n + 2 * t + i;
      if (token >= tokens) continue;
      const float times = *(const float*)(rows[token] + chunks * (PLANES + FACTORS));
#pragma unroll
      for (int m = 0; m < 2; ++m) {
        if (2 * warp + m >= tiles) continue;
        const int tile = item.first_tile + 2 * warp + m;
        float low, high;
        prior(tile, slots[token], low, high);
        store(tile, slots[token], __fmul_rn(total[n][m][i], times), __fmul_rn(total[n][m][i + 2], times), low, high);
      }
    }
  }
}

// Rounds eight inputs a lane, one chunk a warp, into the row at `to`.
__device__ __forceinline__ void round_into(const float (&v)[8], u8* to, int chunk, int chunks, int lane) {
  round_chunk(v, to + chunk * PLANES, (float2*)(to + chunks * PLANES + chunk * FACTORS), lane);
}
