// Products of quantized matrices with many rows of activations on Hopper's warpgroup instructions: f16 operands, f32 sums that are exact,
// with the terms and the order of tiles.cuh, so that a token's results have the same bits here and in a decode step.
//
// Rounded activations are integers of at most 11 bits times a power of two for each group, and weights are integers of 4 bits: f16
// holds both, and a group's sum of 64 products is below 2^21 times that power, so that f32 adds them without rounding, in
// whatever order the instruction does. A weight is not converted: its four bits, alone in a 16-bit word, are the subnormal number
// w 2^-24, and where they stand four bits higher 16 w 2^-24; so activations that meet the former are multiplied by 16. The largest
// power of two of a chunk is taken out, and multiplied in again where the chunk's sum is added to the row's.
// (A group of which all inputs are below 2^-24 of the chunk's largest would lose bits here that decode keeps.)
//
// A block stays on its multiprocessor and takes one item of work after the other: 128 matrix rows by up to 64 rows of
// activations ("tokens"). A warpgroup fetches: tiles as they lie in memory through the copy engine, tokens sixteen bytes at a
// time to where the instruction looks for them (rows of 128 bytes, swizzled), STAGES chunks of 256 inputs ahead, across items.
// Two warpgroups multiply, 64 matrix rows each, weights in registers; while one waits for its sums the other turns sums into terms:
// a multiplication, one with addition and an addition for each result and group of 64 inputs, 96 cycles of the issue slots for
// 64 x 64 x 64 products, which are 128 cycles of the tensor cores.
// Bytes: 52 KB from L2 for 128 x 64 x 256 products, and some 2,200 cycles of shared memory, which is what it is bound by.
// Reached, of 786 TFLOP/s: 348 and 324 in the projections, 272 in moe_up, 226 in moe_down (4,096 tokens).
#pragma once

constexpr int GEMM_TOKENS = 64;     // of an item
constexpr int CONSUMERS = 2;        // warpgroups that multiply
constexpr int GEMM_THREADS = 128 * (CONSUMERS + 1);
constexpr int GROUP_BYTES = 128;    // of a token's group of 64 inputs
constexpr int CHUNK_GROUPS = CHUNK / GROUP;
constexpr int SWIZZLE_ROWS = 8, SWIZZLE_BYTES = SWIZZLE_ROWS * GROUP_BYTES;
constexpr float EVEN_UNIT = 16.0f;
constexpr float SUM_UNIT = 1.0f / 1048576;  // 2^-20: what a group's sums are multiplied with, of 16 and 2^-24
// A chunk's factors in a row: of its groups SUM_UNIT times the sum of its inputs, then what its sums are multiplied with.
constexpr int GROUP_FACTORS = CHUNK_GROUPS + 1;
static_assert(BLOCK_TILES * TILE == 64 * CONSUMERS, "an instruction has 64 matrix rows");

// What consumers must know of an item; tokens 0: there are no more.
struct __align__(16) Range {
  int tokens, tiles, first_tile, first_token;
};

template <int BITS_, bool SORTED_ = false> struct Gemm {
  static constexpr bool SORTED = SORTED_;
  static constexpr int BITS = BITS_, TILES = BLOCK_TILES, THREADS = GEMM_THREADS, BYTES = chunk_bytes<BITS_>();
  // The router has few rows and needs more registers.
  static constexpr int TOKENS = BITS == 8 ? GEMM_TOKENS / 2 : GEMM_TOKENS;
  // What a thread may have: the multiprocessor's 65,536 registers are 168 for each of GEMM_THREADS, which are passed on.
  static constexpr int CONSUMER_REGISTERS = SORTED ? 208 : 216, PRODUCER_REGISTERS = SORTED ? 88 : 72;
  static_assert(CONSUMERS * CONSUMER_REGISTERS + PRODUCER_REGISTERS <= (CONSUMERS + 1) * 168, "more than there are would never be granted");
  // Factors of all tokens in a stage, f32 [GROUP_FACTORS][FACTOR_STRIDE]: lane t of four has tokens 8 j + 2 t + {0, 1}, from FACTOR_LANE t on.
  static constexpr int FACTOR_LANE = TOKENS / 4 + 4;  // four more, so that four lanes meet 16 banks
  static constexpr int FACTOR_STRIDE = 4 * FACTOR_LANE;
  static constexpr int GROUP_OPERANDS = TOKENS * GROUP_BYTES >> 4;  // from a group to the next, as an operand counts
  // A stage: [groups][tokens][128 bytes], tiles, factors, [tokens] {f32 what a row's sums are multiplied with, u32 slot}, which item it is of.
  static constexpr int WEIGHTS = TOKENS * PLANES, FACTOR = WEIGHTS + TILES * BYTES, ENDS = FACTOR + GROUP_FACTORS * FACTOR_STRIDE * 4, ITEM = ENDS + TOKENS * 8;
  static constexpr int STAGE = ceil_div(ITEM + (int)sizeof(Range), SWIZZLE_BYTES) * SWIZZLE_BYTES;
  static constexpr int OTHER = SWIZZLE_BYTES + 256;  // to begin at a multiple of that; barriers
  static constexpr int STAGES = 4 * STAGE + OTHER <= SHARED_LIMIT ? 4 : 3;
  static constexpr int SHARED = STAGES * STAGE + OTHER;
};
// Blocks stay, as many as there are multiprocessors.
#define LAUNCH_GEMM(kernel, G, blocks) LAUNCH_ROWS(kernel, MULTIPROCESSORS, G::THREADS, G::SHARED, 0x7fffffff)
#define GEMM_BOUNDS(G) __launch_bounds__(G::THREADS, 1)

// ---- the warpgroup's instructions ---------------------------------------------------------------------------------------

__device__ __forceinline__ void warpgroup_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ __forceinline__ void warpgroup_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int N> __device__ __forceinline__ void warpgroup_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory"); }
// The compiler may not move reads or writes of `c` across this.
template <int N> __device__ __forceinline__ void pin(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
// c[64][N] = (more: +=) a[64][16] b[16][N], f16 into f32; b in shared memory.
#define C8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
__device__ __forceinline__ void multiply(float (&c)[8], const u32* a, u64 b, int more) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %13, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n16k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7}, {%8,%9,%10,%11}, %12, p, 1, 1, 0;}"
               : C8(c, 0)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
__device__ __forceinline__ void multiply(float (&c)[16], const u32* a, u64 b, int more) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %21, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n32k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15}, "
               "{%16,%17,%18,%19}, %20, p, 1, 1, 0;}"
               : C8(c, 0), C8(c, 8)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
__device__ __forceinline__ void multiply(float (&c)[32], const u32* a, u64 b, int more) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %37, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 {%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,"
               "%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, {%32,%33,%34,%35}, %36, p, 1, 1, 0;}"
               : C8(c, 0), C8(c, 8), C8(c, 16), C8(c, 24)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(more));
}
#undef C8
// Rows of 128 bytes, eight rows of them swizzled together.
__device__ __forceinline__ u64 operand(u32 address) {
  return (u64)(address & 0x3ffff) >> 4 | (u64)1 << 16 | (u64)(SWIZZLE_BYTES >> 4) << 32 | (u64)1 << 62;
}
constexpr int STEP = 32 >> 4;  // from sixteen inputs to the next, as the address in an operand counts

// ---- barriers -----------------------------------------------------------------------------------------------------------

__device__ __forceinline__ void barrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// What this thread wrote to shared memory, by ordinary copies, is there for the tensor cores' own reads.
__device__ __forceinline__ void show_to_tensor_cores() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }
__device__ __forceinline__ void bulk_copy_expected(u32 to, const u8* from, u32 bytes, u32 barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// ---- operands -----------------------------------------------------------------------------------------------------------

// Words of a token's group, in the order in which weights are unpacked: of sixteen inputs from 16 t on, lane t of four has as its words
// 16 {0 4}, {1 5}, 16 {2 6}, {3 7}, 16 {8 12}, {9 13}, 16 {10 14}, {11 15}; two words of the four lanes are one instruction's inputs.
__device__ __forceinline__ u32 f16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Rounds eight inputs a lane, one chunk a warp, into the row at `to`.
__device__ __forceinline__ void round_into(const float (&v)[8], u8* to, int chunk, int chunks, int lane) {
  const Rounded rounded(v);
  float largest = rounded.scale;
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 8));
  largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 16));
  const float relative = __uint_as_float(__float_as_uint(rounded.scale) + 127 * EXPONENT_ONE - __float_as_uint(largest));
  const int group = lane / 8, piece = lane % 8;
  u8* words = to + chunk * PLANES + group * GROUP_BYTES + piece % 2 * 64 + piece / 2 * 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float unit = i % 2 ? relative : relative * EVEN_UNIT;
    *(u32*)(words + i * 16) = f16_pair(rounded.value(i) * unit, rounded.value(i + 4) * unit);
  }
  float* factors = (float*)(to + chunks * PLANES + chunk * FACTORS);
  if (piece == 0) factors[group] = (float)rounded.sum * (relative * SUM_UNIT);
  if (lane == 0) factors[CHUNK_GROUPS] = largest * (1.0f / SUM_UNIT);
}

constexpr u32 LOW_FOURS = 0x000f000fu, HIGH_FOURS = 0x00f000f0u;
// A group of a tile as left operands, four words for each of four instructions: rows g and g + 8, then those of the odd inputs.
__device__ __forceinline__ void unpack4(const u8* chunk, int group, int lane, u32 (&a)[16]) {
  const uint4 w = *(const uint4*)(chunk + group * 512 + lane * 16);  // row g: x, y; row g + 8: z, w
  const u32 words[4] = {w.x, w.z, w.y, w.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    u32* to = a + i / 2 * 8 + i % 2;
    const u32 next = words[i] >> 8;
    to[0] = words[i] & LOW_FOURS, to[2] = words[i] & HIGH_FOURS, to[4] = next & LOW_FOURS, to[6] = next & HIGH_FOURS;
  }
}
// The lower or the higher four bits of bytes, the same way.
template <bool HIGHER> __device__ __forceinline__ void unpack8(const u8* chunk, int group, int lane, u32 (&a)[16]) {
#pragma unroll
  for (int row = 0; row < 2; ++row) {
    const uint4 w = *(const uint4*)(chunk + group * 1024 + row * 512 + lane * 16);  // inputs 0 2 4 6, 1 3 5 7, and eight more
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 even = half ? w.z : w.x, odd = half ? w.w : w.y;
      u32* to = a + half * 8 + row;
      to[0] = (HIGHER ? even >> 4 : even) & LOW_FOURS, to[2] = (HIGHER ? odd : odd << 4) & HIGH_FOURS;
      to[4] = (HIGHER ? even >> 12 : even >> 8) & LOW_FOURS, to[6] = (HIGHER ? odd >> 8 : odd >> 4) & HIGH_FOURS;
    }
  }
}

// ---- products ---------------------------------------------------------------------------------------------------------

// A lane's tokens' factors of a group.
template <int N> __device__ __forceinline__ void load_factors(float (&f)[N / 2], const float* factors) {
#pragma unroll
  for (int i = 0; i < N / 2; i += 4) {
    const float4 v = *(const float4*)(factors + i);
    f[i] = v.x, f[i + 1] = v.y, f[i + 2] = v.z, f[i + 3] = v.w;
  }
}
// Turns a group's sums into terms: of the results 4 j + {0, 1} and {2, 3} row g and row g + 8 of tokens 8 j + 2 t + {0, 1}.
template <int N> __device__ __forceinline__ void terms(float (&c)[N], const float (&f)[N / 2], uint2 pairs) {
  const float scale[2] = {pair_scale(pairs.x), pair_scale(pairs.y)}, bias[2] = {pair_bias(pairs.x), pair_bias(pairs.y)};
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const int row = i / 2 % 2;
    c[i] = __fmaf_rn(scale[row], c[i], __fmul_rn(bias[row], f[i / 4 * 2 + i % 2]));
  }
}

// Starts a group's products, its weights in `a`, which like `c` must then be left alone.
template <class G, int N>
__device__ __forceinline__ void start_group(float (&c)[N], u32 (&a)[16], const u8* tile, u64 b, int group, int lane) {
  unpack4(tile, group, lane, a);
  pin(c);
  warpgroup_fence();
#pragma unroll
  for (int s = 0; s < 4; ++s) multiply(c, a + 4 * s, b + group * G::GROUP_OPERANDS + s * STEP, s);
  warpgroup_commit();
}
// Waits until at most LATER groups that were started later are under way, and turns the sums into terms.
template <int LATER, int N> __device__ __forceinline__ void finish_group(float (&c)[N], const float (&f)[N / 2], uint2 pairs) {
  warpgroup_wait<LATER>();
  pin(c);
  terms(c, f, pairs);
}

// A warpgroup's 64 matrix rows of an item with at most TOKENS tokens; `turn` counts stages over all items.
template <class G, int TOKENS, class Prior, class Store>
__device__ __forceinline__ void consume(const u8* stages, u32 full, u32 empty, u32& turn, int chunks, Prior prior, Store store) {
  constexpr int N = TOKENS / 2;  // results of a thread
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, t = lane % 4;
  float total[N], pair[N], c[N], d[N];
#pragma unroll
  for (int i = 0; i < N; ++i) total[i] = -0.0f;  // to which adding anything changes nothing
#pragma unroll 1
  for (int chunk = 0; chunk < chunks; ++chunk, ++turn) {
    const u32 slot = turn % G::STAGES;
    const u8* stage = stages + slot * G::STAGE;
    barrier_wait(full + slot * 8, turn / G::STAGES & 1);
    const u8* tile = stage + G::WEIGHTS + warp * G::BYTES;
    const uint2* parameters = (const uint2*)(tile + G::BYTES - PARAMETERS) + lane / 4 * 4;
    const float* factors = (const float*)(stage + G::FACTOR) + t * G::FACTOR_LANE;
    const u64 b = operand(shared_address(stage));
    float f[N / 2];
    if constexpr (G::BITS == 4) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        u32 first[16], second[16];
        start_group<G>(c, first, tile, b, 2 * half, lane);
        start_group<G>(d, second, tile, b, 2 * half + 1, lane);
        load_factors<N>(f, factors + 2 * half * G::FACTOR_STRIDE);
        finish_group<1>(c, f, parameters[2 * half]);
        load_factors<N>(f, factors + (2 * half + 1) * G::FACTOR_STRIDE);
        finish_group<0>(d, f, parameters[2 * half + 1]);
        if (half == 0) {
#pragma unroll
          for (int i = 0; i < N; ++i) pair[i] = __fadd_rn(c[i], d[i]);
        }
      }
    } else {
      // Lower and higher four bits of one group after the other; put together they are rounded once.
#pragma unroll
      for (int group = 0; group < CHUNK_GROUPS; ++group) {
        u32 low[16], high[16];
        float e[N];
        unpack8<false>(tile, group, lane, low);
        unpack8<true>(tile, group, lane, high);
        pin(d), pin(e);
        warpgroup_fence();
#pragma unroll
        for (int s = 0; s < 4; ++s) multiply(d, low + 4 * s, b + group * G::GROUP_OPERANDS + s * STEP, s);
#pragma unroll
        for (int s = 0; s < 4; ++s) multiply(e, high + 4 * s, b + group * G::GROUP_OPERANDS + s * STEP, s);
        warpgroup_commit();
        load_factors<N>(f, factors + group * G::FACTOR_STRIDE);
        warpgroup_wait<0>();
        pin(d), pin(e);
#pragma unroll
        for (int i = 0; i < N; ++i) d[i] = __fmaf_rn(16.0f, e[i], d[i]);
        terms(d, f, parameters[group]);
#pragma unroll
        for (int i = 0; i < N; ++i) {
          if (group % 2 == 0) c[i] = d[i];
          if (group == 1) pair[i] = __fadd_rn(c[i], d[i]);
        }
      }
    }
    load_factors<N>(f, factors + CHUNK_GROUPS * G::FACTOR_STRIDE);
#pragma unroll
    for (int i = 0; i < N; ++i) total[i] = __fmaf_rn(__fadd_rn(pair[i], __fadd_rn(c[i], d[i])), f[i / 4 * 2 + i % 2], total[i]);
    if (chunk == chunks - 1 && warp < ((const Range*)(stage + G::ITEM))->tiles) {
      const Range item = *(const Range*)(stage + G::ITEM);
      const float2* ends = (const float2*)(stage + G::ENDS);
      const auto slot_of = [&](int token, float2 end) { return G::SORTED ? __float_as_uint(end.y) : item.first_token + token; };
      // All at once what is added to: c and d are free.
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const int token = i / 2 * 8 + 2 * t + i % 2;
        if (token < item.tokens) prior(item.first_tile + warp, slot_of(token, ends[token]), c[i], d[i]);
      }
#pragma unroll
      for (int i = 0; i < N / 2; ++i) {
        const int token = i / 2 * 8 + 2 * t + i % 2, at = i / 2 * 4 + i % 2;
        if (token >= item.tokens) continue;
        const float2 end = ends[token];
        store(item.first_tile + warp, slot_of(token, end), __fmul_rn(total[at], end.x), __fmul_rn(total[at + 2], end.x), c[i], d[i]);
      }
    }
    __syncwarp();
    if (lane == 0) barrier_arrive(empty + slot * 8);
  }
}

// All items of this block. `item_at(i)` says what item i is; tokens are slots `sorted[first_token ..]`, or those numbers themselves;
// `row_at(slot)` is the number of a slot's rounded row in `packed`, of `chunks` chunks. `store(tile, slot, low, high, ..)` gets the results
// of matrix rows 16 tile + lane / 4 and 8 more, times what the row says, and what `prior(tile, slot, ..)` found before.
template <class G, class ItemAt, class RowAt, class Prior, class Store>
__device__ __forceinline__ void gemm(u8* unaligned, const u8* packed, int chunks, const u32* sorted, ItemAt item_at, RowAt row_at, Prior prior, Store store) {
  u8* stages = unaligned + ((0u - shared_address(unaligned)) & (SWIZZLE_BYTES - 1));
  const u32 base = shared_address(stages), full = base + G::STAGES * G::STAGE, empty = full + G::STAGES * 8;
  const int thread = threadIdx.x, lane = thread % 32;
  if (thread == 0) {
    for (int i = 0; i < G::STAGES; ++i) barrier_init(full + i * 8, 128 + 1), barrier_init(empty + i * 8, 4 * CONSUMERS);
    barriers_ready();
  }
  __syncthreads();
  u32 turn = 0;
  if (thread < 128 * CONSUMERS) {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(G::CONSUMER_REGISTERS));
    for (;;) {
      barrier_wait(full + turn % G::STAGES * 8, turn / G::STAGES & 1);
      const int tokens = ((const Range*)(stages + turn % G::STAGES * G::STAGE + G::ITEM))->tokens;
      if (tokens == 0) break;
      if (G::BITS == 4 && tokens <= 16) consume<G, 16>(stages, full, empty, turn, chunks, prior, store);
      else if (G::BITS == 4 && tokens <= 32) consume<G, 32>(stages, full, empty, turn, chunks, prior, store);
      else consume<G, G::TOKENS>(stages, full, empty, turn, chunks, prior, store);
    }
  } else {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(G::PRODUCER_REGISTERS));
    // A lane has the same sixteen of every 128 bytes, of every sixteenth token. Where there are fewer tokens the last comes again.
    const int own = thread - 128 * CONSUMERS, piece = lane % 8, first = own / 8;
    constexpr int EACH = G::TOKENS / 16;
    const u32 place = first * GROUP_BYTES + (piece ^ first % SWIZZLE_ROWS) * 16;
    // A stage's copies are waited for when so many later stages are under way too.
    constexpr int UNDER_WAY = G::STAGES - 2;
    const auto arrive = [&](u32 which) {
      show_to_tensor_cores();
      barrier_arrive(full + which % G::STAGES * 8);
    };
    // Slots of this lane's tokens of an item.
    const auto find = [&](const Item& item, u32* slots) {
#pragma unroll
      for (int n = 0; n < EACH; ++n) {
        const int slot = item.first_token + max(min(first + 16 * n, item.tokens - 1), 0);
        slots[n] = G::SORTED ? sorted[slot] : slot;
      }
    };
    Item item = item_at(blockIdx.x);
    u32 slots[EACH];
    find(item, slots);
    for (int i = blockIdx.x; item.tokens > 0;) {
      const u8* rows[EACH];
#pragma unroll
      for (int n = 0; n < EACH; ++n) rows[n] = packed + (u64)(row_at(slots[n]) * rounded_bytes(chunks)) + piece * 16;
      // The next item is looked up meanwhile.
      i += gridDim.x;
      const Item next = item_at(i);
#pragma unroll 1
      for (int chunk = 0; chunk < chunks; ++chunk, ++turn) {
        const u32 slot = turn % G::STAGES, to = base + slot * G::STAGE;
        barrier_wait(empty + slot * 8, (turn / G::STAGES & 1) ^ 1);
        if (own < 32) {
          if (own == 0) {
            *(Range*)(stages + slot * G::STAGE + G::ITEM) = {item.tokens, item.tiles, item.first_tile, item.first_token};
            barrier_expect(full + slot * 8, item.tiles * G::BYTES);
          }
          __syncwarp();
          if (own < item.tiles) {
            bulk_copy_expected(to + G::WEIGHTS + own * G::BYTES, item.matrix + (u64)(own * chunks + chunk) * G::BYTES, G::BYTES, full + slot * 8);
          }
        }
        const u32 at = to + place, factor = to + G::FACTOR + (piece * G::FACTOR_STRIDE + first / 2 % 4 * G::FACTOR_LANE + first / 8 * 2 + first % 2) * 4;
#pragma unroll
        for (int n = 0; n < EACH; ++n) {
          if (16 * n >= item.tokens) break;
          const u8* from = rows[n] + chunk * PLANES;
#pragma unroll
          for (int group = 0; group < CHUNK_GROUPS; ++group)
            copy16(at + n * 16 * GROUP_BYTES + group * G::TOKENS * GROUP_BYTES, from + group * GROUP_BYTES);
          if (piece < GROUP_FACTORS) copy4(factor + n * 16, rows[n] + chunks * PLANES + chunk * FACTORS - piece * 12);
        }
        if (chunk == chunks - 1) {
#pragma unroll
          for (int n = 0; n < EACH; ++n) {
            const int token = first + 16 * n;
            if (token >= item.tokens) break;
            if (piece == 0) copy4(to + G::ENDS + token * 8, rows[n] + chunks * (PLANES + FACTORS) - piece * 16);
            else if (G::SORTED && piece == 1) copy4(to + G::ENDS + token * 8 + 4, sorted + item.first_token + token);
          }
        }
        copies_commit();
        if (chunk == 0) find(next, slots);
        if (turn >= UNDER_WAY) {
          copies_wait<UNDER_WAY>();
          arrive(turn - UNDER_WAY);
        }
      }
      item = next;
    }
    copies_wait<0>();
    for (u32 which = turn - min(turn, (u32)UNDER_WAY); which != turn; ++which) arrive(which);
    // Says that there are no more.
    const u32 slot = turn % G::STAGES;
    barrier_wait(empty + slot * 8, (turn / G::STAGES & 1) ^ 1);
    if (own == 0) ((Range*)(stages + slot * G::STAGE + G::ITEM))->tokens = 0;
    barrier_arrive(full + slot * 8);
    if (own == 0) barrier_arrive(full + slot * 8);
  }
}
