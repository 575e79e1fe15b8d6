// Products of quantized matrices with many rows of activations ("tokens"), on the tensor cores: f16 operands, f32 sums.
// gemm_wgmma.cuh is for Hopper, gemm_mma.cuh for other cards; both have:
//
//   Gemm<BITS, TOKENS, Store>   sizes: TILES of 16 matrix rows and TOKENS rows of activations at the most of an item of work
//   gemm<G>(shared, chunks, item_at, store)   the products of one item after the other, or of one item a block; item_at(i) says what
//                        item i is
//   LAUNCH_GEMM(kernel, G, blocks)   the launch shape: `blocks` items side by side for each TOKENS rows (0: the plan says)
//
// A weight is unpacked next to the tensor cores: its four or eight bits, alone in a 16-bit word, are a subnormal f16, and one
// multiplication with addition makes the weight of it (scale * q + bias, rounded to f16 once; a sixteenth of it, so that scales up to 1 can be
// multiplied with what a subnormal stands for). 4 bits: 11 instructions for eight weights. A token's sums are added in the order of its
// inputs, whatever else the block does, so that its results do not depend on the tokens beside it.
#pragma once
#include "prompt.cuh"
#include "tiles.cuh"

// Eight inputs a lane, one chunk a warp, as operands of one of `rows` rows.
__device__ __forceinline__ void round_into(const float (&v)[8], u8* operands, u32 row, u32 rows, int chunk, int lane) {
  const int group = lane / 8, piece = lane % 8;
  u8* to = operands + (u64)(chunk * CHUNK_GROUPS + group) * group_bytes(rows) + row * GROUP_BYTES + piece / 2 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) *(u32*)(to + ((piece % 2 * 4 + i) ^ row % EIGHT) * 16) = f16_pair(v[i], v[i + 4]);
}

// RMS norm of a row whose inputs 256 warp + 8 lane + {0 .. 7} each thread has, by all WARPS warps of a block, as operands.
template <int WARPS>
__device__ __forceinline__ void norm_into(float (&v)[8], const float (&weight)[8], float (&squares)[WARPS], u8* operands, u32 row, u32 rows) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float squared = 0.0f;
#pragma unroll
  for (int e = 0; e < 8; ++e) squared = __fmaf_rn(v[e], v[e], squared);
  squared = lanes_sum<32>(squared);
  if (lane == 0) squares[warp] = squared;
  __syncthreads();
  float total = squares[0];
#pragma unroll
  for (int c = 1; c < WARPS; ++c) total += squares[c];
  const float inverse = rsqrtf(__fmaf_rn(total, 1.0f / HIDDEN, RMS_EPS));
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(__fmul_rn(v[e], inverse), weight[e]);
  round_into(v, operands, row, rows, warp, lane);
}

// ---- weights --------------------------------------------------------------------------------------------------------------

// What an unpacked weight is less than the weight.
constexpr float WEIGHT_UNIT = 16.0f;
// Scale and bias of a row's group, each twice; the scale times what a subnormal's integer counts: 4 bits stand four places higher.
template <int BITS> struct Affine {
  u32 scale, bias;
  __device__ __forceinline__ explicit Affine(u32 pair) {
    constexpr float UNIT = (BITS == 4 ? 1048576.0f : 16777216.0f) / WEIGHT_UNIT;  // 2^20, 2^24
    const float s = pair_scale(pair) * UNIT, b = pair_bias(pair) * (1.0f / WEIGHT_UNIT);
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(scale) : "f"(s));
    asm("cvt.rn.f16x2.f32 %0, %1, %1;" : "=r"(bias) : "f"(b));
  }
  __device__ __forceinline__ u32 of(u32 bits) const {
    u32 weights;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(weights) : "r"(bits), "r"(scale), "r"(bias));
    return weights;
  }
};
// A lane's part of a tile's group as it lies in memory: of rows g and g + 8, with their scales and biases.
template <int BITS> struct Packed {
  uint4 words[BITS / 4];
  uint2 pairs;
  __device__ __forceinline__ void load(const u8* chunk, int group, int lane) {
    pairs = *(const uint2*)(chunk + chunk_bytes<BITS>() - PARAMETERS + (lane / 4 * 4 + group) * 8);
#pragma unroll
    for (int i = 0; i < BITS / 4; ++i) words[i] = *(const uint4*)(chunk + (group * (BITS / 4) + i) * 512 + lane * 16);
  }
  // As left operands, four words for each of four times sixteen inputs: rows g and g + 8 of the first eight, then of the others.
  __device__ __forceinline__ void unpack(u32 (&a)[16]) const {
    const Affine<BITS> affine[2] = {Affine<BITS>(pairs.x), Affine<BITS>(pairs.y)};
    if constexpr (BITS == 4) {
      constexpr u32 MASK = 0x00f000f0u;
      const u32 w[4] = {words[0].x, words[0].z, words[0].y, words[0].w};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        u32* to = a + i / 2 * 8 + i % 2;
        const Affine<BITS>& row = affine[i % 2];
        to[0] = row.of(w[i] << 4 & MASK), to[2] = row.of(w[i] & MASK), to[4] = row.of(w[i] >> 4 & MASK), to[6] = row.of(w[i] >> 8 & MASK);
      }
    } else {
      constexpr u32 MASK = 0x00ff00ffu;
#pragma unroll
      for (int row = 0; row < 2; ++row) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // inputs 0 2 4 6, 1 3 5 7, and eight more
          const u32 even = half ? words[row].z : words[row].x, odd = half ? words[row].w : words[row].y;
          u32* to = a + half * 8 + row;
          to[0] = affine[row].of(even & MASK), to[2] = affine[row].of(odd & MASK);
          to[4] = affine[row].of(even >> 8 & MASK), to[6] = affine[row].of(odd >> 8 & MASK);
        }
      }
    }
  }
};

// ---- work -----------------------------------------------------------------------------------------------------------------

constexpr int BLOCK_TILES = 8;

// Some tiles by some tokens.
struct Item {
  const u8* matrix;    // of the first tile
  const u8* operands;  // of the first token
  u32 group_bytes;
  int tiles;           // that exist, at least one
  int tokens;          // 0: there is no such item
  int first_tile, first_token;
};
// Item `i` of the product of `rows` tokens with a matrix of `tiles`, of which an item has `block_tiles`; neighbours have the same tokens.
template <class G>
__device__ __forceinline__ Item dense_item(int i, const u8* matrix, const u8* operands, int tiles, int chunks, int rows, int tokens, int block_tiles = G::TILES) {
  const int blocks = ceil_div(tiles, block_tiles), first = i % blocks * block_tiles, token = i / blocks * tokens;
  return {matrix + (u64)first * chunks * G::BYTES, operands + (u64)token * GROUP_BYTES, group_bytes(rows), min(block_tiles, tiles - first),
          max(min(tokens, rows - token), 0), first, token};
}
// The same of experts of `tiles` each, with the runs of moe_route. The shared expert's tokens are those of `shared`, if there is such.
template <class G>
__device__ __forceinline__ Item expert_item(int i, const u8* matrix, const u8* operands, const u8* shared, int tiles, int chunks, int rows, const u32* runs) {
  const int blocks = ceil_div(tiles, G::TILES), first = i % blocks * G::TILES;
  const u32 number = i / blocks;
  if (number >= runs[0]) return {matrix, operands, 0, 1, 0, 0, 0};
  const uint4 run = *(const uint4*)(runs + RUN_WORDS * (1 + number));
  const bool own = shared && run.x == EXPERTS;
  return {matrix + ((u64)run.x * tiles + first) * chunks * G::BYTES, (own ? shared : operands) + (u64)(own ? run.w : run.y) * GROUP_BYTES,
          group_bytes(own ? rows : places_of(rows)), min(G::TILES, tiles - first), (int)run.z, first, (int)run.y};
}

// ---- results --------------------------------------------------------------------------------------------------------------
//
// What becomes of them. Each has, where results are put together of eight tiles at a time whose first is a multiple of eight:
//   STAGED        bytes of a token's results, which lie together from token to token; 0: they do not, and any tile may be the first
//   base(tile, token)   where those of a run of tokens begin
//   put(to, tile, token, count, low, low_next, high, high_next)   the results of `token` and the next, counted from there, of which `count`
//                 exist (it may be 0 or less), in matrix rows lane / 4 and 8 more of a tile; the whole warp calls it

// f32 [tokens][stride].
struct Floats {
  static constexpr int STAGED = 0;
  float* out;
  u32 stride;
  __device__ __forceinline__ u8* base(int, u32 token) const { return (u8*)(out + (u64)token * stride); }
  __device__ __forceinline__ void put(u8* to, int tile, int token, int count, float low, float low_next, float high, float high_next) const {
    float* at = (float*)to + token * stride + tile * TILE + threadIdx.x % 32 / 4;
    if (count > 0) at[0] = low, at[8] = high;
    if (count > 1) at[stride] = low_next, at[stride + 8] = high_next;
  }
};
// Gate in the lower rows and up in the higher ones, joined by SwiGLU: a tile has eight of the 64 inputs of a group of operands.
struct Swiglu {
  static constexpr int STAGED = GROUP_BYTES;
  u8* operands;
  u32 group_bytes;
  __device__ __forceinline__ u8* base(int tile, u32 token) const { return operands + (u64)(tile / 8) * group_bytes + token * GROUP_BYTES; }
  __device__ __forceinline__ void put(u8* to, int tile, int token, int count, float gate, float gate_next, float value, float value_next) const {
    const float own = silu(gate) * value, next = silu(gate_next) * value_next;
    // Inputs e and e + 4 are a word: lanes of the first four rows write the first token's, the others the second's.
    const int e = threadIdx.x % 32 / 4;
    const bool second = e >= 4;
    const float other = __shfl_xor_sync(~0u, second ? own : next, 16);
    const u32 word = second ? f16_pair(other, next) : f16_pair(own, other);
    token += second;
    if (second < count) *(u32*)(to + token * GROUP_BYTES + ((tile % 2 * 4 + e % 4) ^ token % EIGHT) * 16 + tile % 8 / 2 * 4) = word;
  }
};
// Results: f16, units swapped, which spares conflicts where they are put together.
struct Halves {
  static constexpr int STAGED = COLUMN_BYTES;
  static_assert(COLUMN == 8 * TILE, "a column is eight tiles");
  u8* out;
  u32 tokens;
  __device__ __forceinline__ u8* base(int tile, u32 token) const { return out + ((u64)(tile / 8) * tokens + token) * STAGED; }
  __device__ __forceinline__ void put(u8* to, int tile, int token, int count, float low, float low_next, float high, float high_next) const {
    // Neighbouring rows are a word: lanes of even rows write the first token's, the others the second's.
    const int lane = threadIdx.x % 32, second = lane / 4 % 2;
    const float other_low = __shfl_xor_sync(~0u, second ? low : low_next, 4), other_high = __shfl_xor_sync(~0u, second ? high : high_next, 4);
    token += second;
    if (second < count) {
      u8* at = to + token * STAGED + lane / 8 * 4;
      *(u32*)(at + ((tile % 8 * 2) ^ token % EIGHT) * 16) = second ? f16_pair(other_low, low_next) : f16_pair(low, other_low);
      *(u32*)(at + ((tile % 8 * 2 + 1) ^ token % EIGHT) * 16) = second ? f16_pair(other_high, high_next) : f16_pair(high, other_high);
    }
  }
};

template <class Store> constexpr bool is_halves = false;
template <> constexpr bool is_halves<Halves> = true;

#if WARPGROUPS
#include "gemm_wgmma.cuh"
#else
#include "gemm_mma.cuh"
#endif
