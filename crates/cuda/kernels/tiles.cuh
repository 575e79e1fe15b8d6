// Products of quantized matrices (README.md, "tiles") with rows of activations.
//
// An activation row is rounded to 12 bits per group of 64 inputs and taken apart into two signed bytes, which are two
// columns of the tensor cores' right operand. A 4-bit weight costs an eighth of an instruction to unpack; the product of a
// tile of 16 rows with 64 inputs is two instructions, whose sums are exact. For one row, the four groups of a chunk use the
// eight columns together: each group meets its own two and zeros elsewhere, and one set of sums holds all four.
#pragma once
#include "common.cuh"

constexpr int PLANES = 512;        // bytes of a chunk of one activation row: [4 groups][high, low][4 lanes][16]
constexpr int FACTORS = 32;        // bytes: [4 groups] {scale, scale * sum} f32
constexpr int PARAMETERS = 256;    // bytes of a chunk's scales and biases
constexpr int CHUNK4 = 2048 + PARAMETERS;
constexpr int CHUNK8 = 4096 + PARAMETERS;
template <int BITS> __host__ __device__ constexpr int chunk_bytes() { return BITS == 4 ? CHUNK4 : CHUNK8; }

// A row's activations ready for the experts, as moe_route leaves them: planes, factors, 1 / rms.
constexpr int HIDDEN_CHUNKS = ceil_div(HIDDEN, CHUNK);
constexpr int PACKED_FACTORS = HIDDEN_CHUNKS * PLANES;
constexpr int PACKED_INVERSE = PACKED_FACTORS + HIDDEN_CHUNKS * FACTORS;
constexpr int PACKED_BYTES = PACKED_INVERSE + 16;

// The 8 inputs of each lane (`8 lane ..` of a chunk) as integers: q = rint(x / scale), the scale a power of two such that the largest of
// eight lanes' 64 inputs becomes 1024 to 2048. Eleven bits and a sign are what f16 has, which is what prompts round theirs to
// (gemm.cuh), and a power of two can be multiplied into anything without rounding it.
constexpr u32 EXPONENT = 0x7f800000u, EXPONENT_ONE = 0x00800000u;
constexpr u32 ROUNDED_BITS = 10;  // of the largest, below its first
struct Rounded {
  // 1.5 * 2^23 has room for a signed number in its lowest bits: adding it rounds, without a conversion.
  static constexpr float ROUNDER = 12582912.0f + 128.0f;
  int q[8];  // ROUNDER's bits and the integer
  int sum;   // of the group's integers
  float scale;
  __device__ __forceinline__ explicit Rounded(const float (&v)[8]) {
    const float largest = lanes_max<8>(fmaxf(fmaxf(fmaxf(fabsf(v[0]), fabsf(v[1])), fmaxf(fabsf(v[2]), fabsf(v[3]))),
                                             fmaxf(fmaxf(fabsf(v[4]), fabsf(v[5])), fmaxf(fabsf(v[6]), fabsf(v[7])))));
    // Neither the scale nor its inverse leaves the normal numbers, whatever the largest is.
    const u32 power = max(__float_as_uint(largest) & EXPONENT, (ROUNDED_BITS + 1) * EXPONENT_ONE) - ROUNDED_BITS * EXPONENT_ONE;
    const float inverse = __uint_as_float(2 * 127 * EXPONENT_ONE - power);
    scale = __uint_as_float(power);
    sum = (int)(0u - 8u * (0x4b400000u + 128u));
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      q[e] = __float_as_int(__fmaf_rn(v[e], inverse, ROUNDER));
      sum += q[e];
    }
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) sum += __shfl_xor_sync(~0u, sum, bit);
  }
  __device__ __forceinline__ float value(int e) const { return __int_as_float(q[e]) - ROUNDER; }
};

// Rounds and stores a chunk's planes and factors: q = 256 high + low with both signed; of q + 128 the second byte is high, and the
// first one low + 128.
__device__ __forceinline__ void round_chunk(const float (&v)[8], u8* planes, float2* factors, int lane) {
  const Rounded rounded(v);
  const auto& q = rounded.q;
  const auto pack = [&](int first, u32 selector) {
    return __byte_perm(__byte_perm(q[first], q[first + 2], selector), __byte_perm(q[first + 4], q[first + 6], selector), 0x5410);
  };
  const uint2 high = make_uint2(pack(0, 0x0051), pack(1, 0x0051));
  const uint2 low = make_uint2(pack(0, 0x0040) ^ 0x80808080u, pack(1, 0x0040) ^ 0x80808080u);
  const int group = lane / 8, piece = lane % 8;
  *(uint2*)(planes + group * 128 + piece * 8) = high;
  *(uint2*)(planes + group * 128 + 64 + piece * 8) = low;
  if (piece == 0) factors[group] = make_float2(rounded.scale, rounded.scale * (float)rounded.sum);
}

// One row's chunk as the right operand: of the columns, this lane has plane `lane / 4 % 2` of group `lane / 8`.
struct OneRow {
  u32 b[4][4];
  float2 factor;  // of group lane % 4
  __device__ __forceinline__ void set(uint4 planes, float2 factor_of_lane, int lane) {
    factor = factor_of_lane;
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const bool mine = lane / 8 == j;
      b[j][0] = mine ? planes.x : 0, b[j][1] = mine ? planes.y : 0, b[j][2] = mine ? planes.z : 0, b[j][3] = mine ? planes.w : 0;
    }
  }
  __device__ __forceinline__ void load(const u8* planes, const float2* factors, int lane) {
    set(*(const uint4*)(planes + lane * 16), factors[lane % 4], lane);
  }
};

constexpr u32 LOW_NIBBLES = 0x0f0f0f0fu, HIGH_NIBBLES = 0xf0f0f0f0u;

// Sums of products of one tile row with the two planes, in two parts that are kept apart because a 4-bit weight's byte is masked
// and not shifted: even inputs come as they are, odd ones sixteenfold. `EVEN` is what the even part must be multiplied with, and
// 1 / EVEN what the scale carries for it.
template <int BITS> constexpr int EVEN = BITS == 4 ? 16 : 1;

// A tile's chunk, in this lane's registers.
template <int BITS> struct Weights;
template <> struct Weights<4> {
  uint4 w[4];
  __device__ __forceinline__ void load(const u8* chunk, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j) w[j] = *(const uint4*)(chunk + j * 512 + lane * 16);
  }
  __device__ __forceinline__ void multiply(int j, int (&even)[4], int (&odd)[4], const u32 (&b)[4]) const {
    mma_u8s8(even, w[j].x & LOW_NIBBLES, w[j].z & LOW_NIBBLES, w[j].y & LOW_NIBBLES, w[j].w & LOW_NIBBLES, b[0], b[2]);
    mma_u8s8(odd, w[j].x & HIGH_NIBBLES, w[j].z & HIGH_NIBBLES, w[j].y & HIGH_NIBBLES, w[j].w & HIGH_NIBBLES, b[1], b[3]);
  }
};
template <> struct Weights<8> {
  uint4 w[4][2];
  __device__ __forceinline__ void load(const u8* chunk, int lane) {
#pragma unroll
    for (int j = 0; j < 4; ++j)
#pragma unroll
      for (int h = 0; h < 2; ++h) w[j][h] = *(const uint4*)(chunk + j * 1024 + h * 512 + lane * 16);
  }
  __device__ __forceinline__ void multiply(int j, int (&even)[4], int (&odd)[4], const u32 (&b)[4]) const {
    mma_u8s8(even, w[j][0].x, w[j][1].x, w[j][0].z, w[j][1].z, b[0], b[2]);
    mma_u8s8(odd, w[j][0].y, w[j][1].y, w[j][0].w, w[j][1].w, b[1], b[3]);
  }
};

// One group's share of a product: scale and bias of the weights, the sums of both bytes, factors of the activations (the first
// divided by EVEN).
template <int BITS> __device__ __forceinline__ float group_term(u32 pair, const int (&even)[4], const int (&odd)[4], int row, float2 factor) {
  const int sum = (even[row] * 256 + even[row + 1]) * EVEN<BITS> + (odd[row] * 256 + odd[row + 1]);
  return __fmaf_rn(__fmul_rn(pair_scale(pair), factor.x), (float)sum, __fmul_rn(pair_bias(pair), factor.y));
}

// A chunk of one row. Lane t = 0 of four returns the product of tile row g = lane / 4, lane t = 1 that of row g + 8.
template <int BITS> __device__ __forceinline__ float chunk_product(const u8* chunk, const OneRow& x, int lane) {
  Weights<BITS> weights;
  weights.load(chunk, lane);
  const uint2 pairs = *(const uint2*)(chunk + chunk_bytes<BITS>() - PARAMETERS + lane * 8);
  int even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
#pragma unroll
  for (int j = 0; j < 4; ++j) weights.multiply(j, even, odd, x.b[j]);
  const float2 factor = make_float2(x.factor.x * (1.0f / EVEN<BITS>), x.factor.y);
  const float low = group_term<BITS>(pairs.x, even, odd, 0, factor), high = group_term<BITS>(pairs.y, even, odd, 2, factor);
  // (g0 + g1) + (g2 + g3) of both, half of the exchanges of two sums.
  const bool second = lane & 1;
  const float sum = (second ? high : low) + __shfl_xor_sync(~0u, second ? low : high, 1);
  return sum + __shfl_xor_sync(~0u, sum, 2);
}
// Where those two lanes' results belong in a tile of 16; other lanes have none.
__device__ __forceinline__ bool has_result(int lane) { return lane % 4 < 2; }
__device__ __forceinline__ int result_place(int lane) { return lane / 4 + lane % 2 * 8; }

// The chunk of up to eight rows: column tile n has rows 4 n .. 4 n + 3, each as high and low plane.
struct EightRows {
  u32 b[2][4][4];
  float2 factor[2][4];  // of rows 4 n + lane % 4, all groups
  // `planes` and `factors` give the addresses of a row's.
  template <class Planes, class Factors>
  __device__ __forceinline__ void load(Planes planes, Factors factors, int rows, int lane) {
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (4 * n >= rows) break;
      const u8* column = planes(4 * n + lane / 8) + (lane / 4 % 2) * 64 + lane % 4 * 16;
      const float4* f = (const float4*)factors(4 * n + lane % 4);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint4 v = *(const uint4*)(column + j * 128);
        b[n][j][0] = v.x, b[n][j][1] = v.y, b[n][j][2] = v.z, b[n][j][3] = v.w;
      }
      const float4 f01 = f[0], f23 = f[1];
      factor[n][0] = make_float2(f01.x, f01.y), factor[n][1] = make_float2(f01.z, f01.w);
      factor[n][2] = make_float2(f23.x, f23.y), factor[n][3] = make_float2(f23.z, f23.w);
    }
  }
};

// The same for up to eight rows (four cost half): `low[n]` and `high[n]` are for row 4 n + lane % 4. Same terms, same order, same bits.
template <int BITS>
__device__ __forceinline__ void chunk_product(const Weights<BITS>& weights, const u8* parameters, const EightRows& x, int rows, int lane,
                                              float (&low)[2], float (&high)[2]) {
  float l[2][4] = {}, h[2][4] = {};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const uint2 pairs = *(const uint2*)(parameters + (lane / 4 * 4 + j) * 8);
#pragma unroll
    for (int n = 0; n < 2; ++n) {
      if (4 * n >= rows) break;
      int even[4] = {0, 0, 0, 0}, odd[4] = {0, 0, 0, 0};
      weights.multiply(j, even, odd, x.b[n][j]);
      const float2 factor = make_float2(x.factor[n][j].x * (1.0f / EVEN<BITS>), x.factor[n][j].y);
      l[n][j] = group_term<BITS>(pairs.x, even, odd, 0, factor);
      h[n][j] = group_term<BITS>(pairs.y, even, odd, 2, factor);
    }
  }
#pragma unroll
  for (int n = 0; n < 2; ++n) {
    low[n] = (l[n][0] + l[n][1]) + (l[n][2] + l[n][3]);
    high[n] = (h[n][0] + h[n][1]) + (h[n][2] + h[n][3]);
  }
}

// Eight consecutive inputs of a row of `width`, zero beyond it.
__device__ __forceinline__ void load8(const float* row, int k, int width, float (&v)[8]) {
  float4 a = make_float4(0, 0, 0, 0), b = a;
  if (k < width) a = *(const float4*)(row + k), b = *(const float4*)(row + k + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// ---- a projection: all of a block's tiles ---------------------------------------------------------------------------------
//
// Warp w has chunk w % CHUNKS of the inputs and every LANES-th tile of the block. It fetches its own weights, rounds its
// own inputs and waits for no other warp; then the block adds the chunks' products.

// How a matrix of TILES tiles is split over the card, and what of it a block keeps in shared memory: for each warp its slots,
// planes and factors; then the chunks' products, sums of squares, barriers.
template <int ROWS_, int K_, int BITS_, int WARPS_, int TILES_, int MOST_SLOTS> struct Split {
  static constexpr int ROWS = ROWS_, K = K_, BITS = BITS_, WARPS = WARPS_, TILES = TILES_;
  static constexpr int CHUNKS = ceil_div(K, CHUNK);
  static constexpr int LANES = WARPS / CHUNKS;
  static_assert(LANES >= 1, "a warp has one chunk");
  static_assert(WARPS * 32 % ROWS == 0, "a thread has one row");
  static constexpr int PER_BLOCK = ceil_div(TILES, MULTIPROCESSORS);
  static constexpr int BLOCKS = ceil_div(TILES, PER_BLOCK);
  static constexpr int EACH = ceil_div(PER_BLOCK, LANES);  // tiles of a warp
  static constexpr int BYTES = chunk_bytes<BITS>();
  static constexpr int OPERAND = ROWS * (PLANES + FACTORS);
  static constexpr int OPERANDS_COUNT = ROWS == 1 ? WARPS : CHUNKS;  // of a batch the warps of a chunk share one
  static constexpr int WAVE = PER_BLOCK < 4 * LANES ? PER_BLOCK : 4 * LANES;  // tiles between two sums
  static constexpr int BUFFERS = PER_BLOCK > WAVE && ROWS == 1 ? 2 : 1;
  static constexpr int PRODUCTS = CHUNKS * WAVE * TILE * ROWS;  // f32, of one buffer
  __host__ __device__ static constexpr int bytes(int slots) {
    return WARPS * slots * (BYTES + 8) + OPERANDS_COUNT * OPERAND + BUFFERS * PRODUCTS * 4 + WARPS * ROWS * 4;
  }
  __host__ __device__ static constexpr int fitting(int slots) { return slots > 1 && bytes(slots) > SHARED_LIMIT ? fitting(slots - 1) : slots; }
  static constexpr int SLOTS_ = fitting(EACH < MOST_SLOTS ? EACH : MOST_SLOTS);
  // What is asked for before the wait. More stands in the way of what the kernels at work still have to read: the third of the
  // input projections' three chunks costs them more than its absence costs here.
  static constexpr int EARLY = SLOTS_ < 2 ? SLOTS_ : 2;
  static constexpr int SHARED = bytes(SLOTS_);
  static constexpr bool WHOLE = PER_BLOCK <= WAVE && EACH <= SLOTS_;  // all tiles are in shared memory at once
  // Where things are.
  static constexpr int OPERANDS = WARPS * SLOTS_ * BYTES;
  static constexpr int SUMS = OPERANDS + OPERANDS_COUNT * OPERAND;
  static constexpr int SQUARES = SUMS + BUFFERS * PRODUCTS * 4;
  static constexpr int BARRIERS = SQUARES + WARPS * ROWS * 4;
  static_assert(BARRIERS % 8 == 0, "barriers are 8 bytes each");
};

// `NoFactor` stands for a factor of one, `NoBegin` for nothing to do.
struct NoFactor {};
struct NoBegin {
  __device__ void operator()() const {}
};
template <class T> constexpr bool has_factor = true;
template <> constexpr bool has_factor<NoFactor> = false;

// Tiles `first .. first + count` of `matrix`: S::PER_BLOCK, fewer only in the last block. Rows 0 .. all_rows, in groups of S::ROWS
// that blockIdx.y counts; where all tiles are in shared memory at once, fewer blocks can take several groups each.
// `begin()` is called after the wait. `load(row, k, v)` gives eight inputs of a row; with NORM they are squared for the RMS norm
// and multiplied by `norm`. `factor(row, group)` multiplies a group's inputs. `prior(row, n)` is read early,
// `store(row, n, value, prior)` gets the result.
template <class S, bool NORM, class Begin, class Load, class Factor, class Prior, class Store>
__device__ __forceinline__ void project(u8* shared, const u8* matrix, int first, int count, int all_rows, const float* norm, Begin begin,
                                        Load load, Factor factor, Prior prior, Store store) {
  constexpr int ROWS = S::ROWS, CHUNKS = S::CHUNKS, LANES = S::LANES, SLOTS_ = S::SLOTS_, BYTES = S::BYTES;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int chunk = warp % CHUNKS, tile_lane = warp / CHUNKS;
  const bool works = S::WARPS == CHUNKS * LANES || warp < CHUNKS * LANES;
  const u8* own = shared + warp * SLOTS_ * BYTES;
  u8* planes = shared + S::OPERANDS + (ROWS == 1 ? warp : chunk) * S::OPERAND;
  float2* factors = (float2*)(planes + ROWS * PLANES);
  float* products = (float*)(shared + S::SUMS);
  float* squares = (float*)(shared + S::SQUARES);
  const int total = S::TILES % S::PER_BLOCK == 0 ? S::PER_BLOCK : count;
  const int all = works ? total : 0;
  const u8* from = matrix + ((u64)(first + tile_lane) * CHUNKS + chunk) * BYTES;
  constexpr int STRIDE = LANES * CHUNKS * BYTES;
  Stream<BYTES, SLOTS_> stream(own, (const u64*)(shared + S::BARRIERS) + warp * SLOTS_, lane);
  const auto exists = [&](int i) { return tile_lane + i * LANES < all; };
#pragma unroll
  for (int i = 0; i < S::EARLY; ++i) stream.start(i, from + i * STRIDE, exists(i), lane);
  const int k = chunk * CHUNK + lane * 8;
  float w[8];
  if (NORM) load8(norm, k, S::K, w);
  wait_predecessors();

#pragma unroll
  for (int i = S::EARLY; i < SLOTS_; ++i) stream.start(i, from + i * STRIDE, exists(i), lane);
  begin();
#pragma unroll 1
  for (int row0 = ROWS == 1 ? 0 : blockIdx.y * ROWS; row0 < all_rows; row0 += ROWS * gridDim.y) {
    const int rows = ROWS == 1 ? 1 : min(all_rows - row0, ROWS);
    // Result o of a wave is row o % ROWS, matrix row o / ROWS: a thread has the same row all the time.
    const int result_row = threadIdx.x % ROWS;
    const bool has_row = ROWS == 1 || result_row < rows;
    const float early = has_row && (int)threadIdx.x < total * TILE * ROWS ? prior(row0 + result_row, first * TILE + threadIdx.x / ROWS) : 0.0f;
    float squared = 0.0f;  // of this lane's inputs of one row
    if (works) {
      // In a batch, the warps of a chunk share its rows.
#pragma unroll(ROWS == 1 ? 1 : 2)
      for (int row = ROWS == 1 ? 0 : tile_lane; row < (ROWS == 1 ? 1 : rows); row += ROWS == 1 ? 1 : LANES) {
        float v[8];
        if constexpr (has_factor<Factor>) {
          const float times = factor(row0 + row, chunk * 4 + lane / 8);
          load(row0 + row, k, v);
#pragma unroll
          for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(v[e], times);
        } else {
          load(row0 + row, k, v);
        }
        if (NORM) {
          squared = 0.0f;
#pragma unroll
          for (int e = 0; e < 8; ++e) squared = __fmaf_rn(v[e], v[e], squared), v[e] *= w[e];
          if (ROWS > 1) {
            squared = lanes_sum<32>(squared);
            if (lane == 0) squares[chunk * ROWS + row] = squared;
          }
        }
        round_chunk(v, planes + row * PLANES, factors + row * 4, lane);
      }
    }
    if (ROWS > 1 && LANES > 1) __syncthreads();
    else __syncwarp();
    OneRow one;
    EightRows eight;
    if constexpr (ROWS == 1) one.load(planes, factors, lane);
    else eight.load([&](int row) { return planes + row * PLANES; }, [&](int row) { return factors + row * 4; }, rows, lane);

    // The product of this warp's tile i, which lies in `slot`, to its place among the sums.
    const auto multiply = [&](const u8* weights, float* out) {
      if constexpr (ROWS == 1) {
        const float product = chunk_product<S::BITS>(weights, one, lane);
        if (has_result(lane)) out[result_place(lane)] = product;
      } else {
        float low[2], high[2];
        Weights<S::BITS> fragment;
        fragment.load(weights, lane);
        chunk_product<S::BITS>(fragment, weights + BYTES - PARAMETERS, eight, rows, lane, low, high);
#pragma unroll
        for (int n = 0; n < 2; ++n) {
          if (4 * n >= rows) break;
          out[(4 * n + lane % 4) * TILE + lane / 4] = low[n];
          out[(4 * n + lane % 4) * TILE + lane / 4 + 8] = high[n];
        }
      }
    };
    float inverse = 1.0f;
    const auto finish = [&](const float* sums, int start, int wave) {
      if (!has_row) return;
      if (NORM && start == 0) {
        float total = squares[result_row];
#pragma unroll
        for (int c = 1; c < CHUNKS; ++c) total += squares[c * ROWS + result_row];
        inverse = rsqrtf(__fmaf_rn(total, 1.0f / S::K, RMS_EPS));
      }
#pragma unroll 1
      for (int o = threadIdx.x; o < wave * TILE * ROWS; o += S::WARPS * 32) {
        const int n = o / ROWS, at_row = (first + start) * TILE + n;
        const float* at = sums + (n / TILE * ROWS + result_row) * TILE + n % TILE;
        float sum = at[0];
#pragma unroll
        for (int c = 1; c < CHUNKS; ++c) sum += at[c * S::WAVE * TILE * ROWS];
        if (NORM) sum *= inverse;
        store(row0 + result_row, at_row, sum, start == 0 && o == (int)threadIdx.x ? early : prior(row0 + result_row, at_row));
      }
    };
    // One row's sum of squares is nothing that its products wait for.
    const auto squares_of_one = [&] {
      if (!NORM || ROWS > 1 || tile_lane) return;
      squared = lanes_sum<32>(squared);
      if (works && lane == 0) squares[warp] = squared;
    };
    float* own_products = products + (chunk * S::WAVE + tile_lane) * TILE * ROWS;
    if constexpr (S::WHOLE) {
#pragma unroll
      for (int i = 0; i < S::EACH; ++i) {
        if (tile_lane + i * LANES < all) {
          stream.wait(i, 0);
          multiply(own + i * BYTES, own_products + i * LANES * TILE * ROWS);
        }
        if (!BULK_COPIES) copies_commit();
      }
      squares_of_one();
      __syncthreads();
      finish(products, 0, total);
      if (ROWS > 1) __syncthreads();
    } else {
      squares_of_one();
      int i = 0, slot = 0, buffer = 0;
      u32 turn = 0;
      for (int start = 0; start < total; start += S::WAVE) {
        const int end = min(start + S::WAVE, total);
        for (; tile_lane + i * LANES < min(end, all); ++i) {
          stream.wait(slot, turn);
          multiply(own + slot * BYTES, own_products + buffer * S::PRODUCTS + (i * LANES - start) * TILE * ROWS);
          __syncwarp();
          stream.start(slot, from + (u64)(i + SLOTS_) * STRIDE, exists(i + SLOTS_), lane);
          if (++slot == SLOTS_) slot = 0, ++turn;
        }
        __syncthreads();
        finish(products + buffer * S::PRODUCTS, start, end - start);
        if (S::BUFFERS == 1) __syncthreads();
        else buffer ^= 1;
      }
    }
    if (!S::WHOLE || ROWS == 1) break;
  }
}
