// What all kernels share: the geometry's constants, the step block, and the few PTX instructions that C++ has no words for.
//
// The geometry comes as macros (README.md), so that every loop has a constant length. Nothing is included: NVRTC has no toolkit.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long s64;

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }

// Whether there are Hopper's warpgroup instructions.
#ifndef WARPGROUPS
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define WARPGROUPS 1
#else
#define WARPGROUPS 0
#endif
#endif

constexpr int MAX_ROWS = 32;     // rows of a pass
constexpr int ROW_GROUP = 8;     // rows that a batch kernel multiplies at once: two column tiles of the tensor cores
constexpr int PAGE_TOKENS = 64;  // positions in a page of the KV cache
constexpr int SPANS = 64;        // parts that a context is cut into at the most
constexpr int GROUP = 64;        // inputs that share a scale and a bias
constexpr int CHUNK = 256;       // inputs of a chunk: four groups
constexpr int TILE = 16;         // rows of a tile

constexpr int KEY_WIDTH = KEY_HEADS * KEY_DIM;
constexpr int VALUE_WIDTH = VALUE_HEADS * VALUE_DIM;
constexpr int CHANNELS = 2 * KEY_WIDTH + VALUE_WIDTH;             // of the convolution: queries, keys, values
constexpr int DELTA_ROWS = CHANNELS + VALUE_WIDTH + 2 * VALUE_HEADS;  // of delta_in: those, z, b, a
constexpr int DELTA_STRIDE = ceil_div(DELTA_ROWS, TILE) * TILE;
constexpr int ATTN_WIDTH = HEADS * HEAD_DIM;
constexpr int ATTN_ROWS = 2 * ATTN_WIDTH + 2 * KV_HEADS * HEAD_DIM;   // of attn_in: query and gate per head, keys, values
constexpr int ATTN_STRIDE = ceil_div(ATTN_ROWS, TILE) * TILE;
constexpr int ROUTER_TILES = ceil_div(EXPERTS + 1, TILE);
constexpr int ROUTER_STRIDE = ROUTER_TILES * TILE;
constexpr int SLOTS = TOP_K + 1;  // experts of a row, the shared one last

static_assert(HEAD_DIM == 256 && ROTARY_DIM == 64, "attention is written for heads of 256 of which 64 turn");
static_assert(KEY_DIM == 128 && VALUE_DIM == 128 && CONV_WIDTH == 4, "the recurrence is written for heads of 128 and four taps");
static_assert(HEADS == 8 * KV_HEADS, "the eight query heads of a KV head fill half a tile of the tensor cores");
static_assert(TOP_K == 8 && EXPERTS % 32 == 0 && EXPERTS <= 256, "a warp chooses 8 of at most 256 experts");
static_assert(SHARED_WIDTH == EXPERT_WIDTH && EXPERT_WIDTH % 32 == 0 && EXPERT_WIDTH <= 512, "the shared expert is stored as one more");
static_assert(HIDDEN % 128 == 0 && HIDDEN <= 2048 && VALUE_WIDTH <= 4096 && ATTN_WIDTH <= 4096, "a warp has one chunk of a row's inputs");
static_assert(MULTIPROCESSORS >= 16, "a thread of delta_out moves one channel's tail");
static_assert(VALUE_HEADS % KEY_HEADS == 0, "value heads share key heads evenly");

// What a pass works on; written by the host, README.md says when. A segment is one sequence's consecutive rows.
struct Step {
  u32 rows, segments, head_rows;
  u32 turn;                // which of the steps that the graph repeats by itself this is; 0: the host says each (embed.cu, sample.cu)
  u32 token[MAX_ROWS];     // FROM_SAMPLE: the token that the sequence sampled last
  u32 position[MAX_ROWS];
  u32 segment[MAX_ROWS];
  u32 seg_first[MAX_ROWS];
  u32 seg_rows[MAX_ROWS];
  u32 head_row[MAX_ROWS];
  u64 state[MAX_ROWS];     // f32: states of all Gated DeltaNet layers, then their convolution tails
  u64 pages[MAX_ROWS];     // table of page addresses
  u64 sampled[MAX_ROWS];   // u32*
};
static_assert(sizeof(Step) == 16 + 6 * 4 * MAX_ROWS + 3 * 8 * MAX_ROWS, "the host writes these bytes");
constexpr u32 FROM_SAMPLE = 0xffffffffu;

// What a kernel's launch needs that does not depend on rows, for the host to read from the module: blocks, threads, dynamic
// shared memory; and whether a block of a batch takes all groups of eight rows itself.
#define LAUNCH_GROUPS(kernel, blocks, threads, shared, all_groups) \
  extern "C" { __device__ u32 kernel##_launch[4] = {(u32)(blocks), (u32)(threads), (u32)(shared), (u32)(all_groups)}; }
#define LAUNCH(kernel, blocks, threads, shared) LAUNCH_GROUPS(kernel, blocks, threads, shared, 0)

// ---- programmatic dependent launch -------------------------------------------------------------------------------------

// Lets the next kernel of the stream come onto the multiprocessors as far as there is room.
__device__ __forceinline__ void launch_dependents() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
// Until here only weights, the step block and what earlier launches of the graph left may be read, and nothing written.
__device__ __forceinline__ void wait_predecessors() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// ---- asynchronous copies ------------------------------------------------------------------------------------------------

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
__device__ __forceinline__ void copy16(u32 to, const void* from) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy8(u32 to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 8;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most N of this thread's groups are under way.
template <int N> __device__ __forceinline__ void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory"); }
__device__ __forceinline__ void copies_wait(u32 younger) {
  switch (younger) {
    case 0: copies_wait<0>(); break;
    case 1: copies_wait<1>(); break;
    case 2: copies_wait<2>(); break;
    default: copies_wait<3>(); break;
  }
}

// The copy engine of Hopper and later: one thread asks for a whole piece, a barrier in shared memory says when it is there.
#if __CUDA_ARCH__ >= 900
constexpr bool BULK_COPIES = true;
#else
constexpr bool BULK_COPIES = false;
#endif
__device__ __forceinline__ void barrier_init(u32 barrier, u32 arrivals = 1) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
#endif
}
// One arrival, which also says how many bytes of copies complete the phase.
__device__ __forceinline__ void barrier_expect(u32 barrier, u32 bytes) {
#if __CUDA_ARCH__ >= 900
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
#endif
}
__device__ __forceinline__ void barriers_ready() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}
// Of bytes that the barrier has been told of.
__device__ __forceinline__ void bulk_copy_expected(u32 to, const u8* from, u32 bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(bytes), "r"(barrier)
               : "memory");
#endif
}
__device__ __forceinline__ void bulk_copy(u32 to, const u8* from, u32 bytes, u32 barrier) {
#if __CUDA_ARCH__ >= 900
  barrier_expect(barrier, bytes);
  // Weights come by once a token: they are the first to leave the L2 again.
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(to),
               "l"(from), "r"(bytes), "r"(barrier), "l"(policy)
               : "memory");
#endif
}
__device__ __forceinline__ void barrier_wait(u32 barrier, u32 parity) {
#if __CUDA_ARCH__ >= 900
  asm volatile("{\n.reg .pred p;\nwaiting: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1;\n@!p bra waiting;\n}" ::"r"(barrier),
               "r"(parity)
               : "memory");
#endif
}

// What one warp fetches into shared memory, in pieces of BYTES that go round SLOTS places. On Hopper and later one lane asks
// the copy engine for a whole piece; before that the lanes copy 16 bytes at a time.
template <int BYTES, int SLOTS> struct Stream {
  u32 to, barriers;
  // `barriers`: 8 bytes for each slot.
  __device__ __forceinline__ Stream(const u8* slots, const u64* bars, int lane) : to(shared_address(slots)), barriers(shared_address(bars)) {
    if (!BULK_COPIES) return;
    if (lane == 0) {
#pragma unroll
      for (int slot = 0; slot < SLOTS; ++slot) barrier_init(barriers + slot * 8);
      barriers_ready();
    }
    __syncwarp();
  }
  // Every slot is started, with or without something to fetch, before the first wait, and again after each wait.
  __device__ __forceinline__ void start(int slot, const u8* from, bool wanted, int lane) {
    if (BULK_COPIES) {
      if (wanted && lane == 0) bulk_copy(to + slot * BYTES, from, BYTES, barriers + slot * 8);
      return;
    }
    if (wanted) {
#pragma unroll
      for (int piece = 0; piece < BYTES / 16; piece += 32)
        if (piece + 32 <= BYTES / 16 || lane < BYTES / 16 - piece) copy16(to + slot * BYTES + (piece + lane) * 16, from + (piece + lane) * 16);
    }
    copies_commit();
  }
  // `turn` counts how often the slot was waited for before.
  __device__ __forceinline__ void wait(int slot, u32 turn) {
    if (BULK_COPIES) return barrier_wait(barriers + slot * 8, turn & 1);
    copies_wait<SLOTS - 1>();
    __syncwarp();
  }
};

// Asks the L2 for this block's share of `bytes` from `from` on, which a later kernel reads.
__device__ __forceinline__ void prefetch_share(const u8* from, u32 bytes, u32 block, u32 blocks) {
#if __CUDA_ARCH__ >= 900
  constexpr u32 PIECE = 16384;
  for (u32 at = block * PIECE; at < bytes; at += blocks * PIECE) {
    const u32 size = min(PIECE, bytes - at) & ~15u;
    if (size) asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from + at), "r"(size) : "memory");
  }
#endif
}

// ---- loads and stores that other kernels' blocks see while both run -----------------------------------------------------

__device__ __forceinline__ u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ u32 load_relaxed(const u32* p) {
  u32 v;
  asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}
__device__ __forceinline__ void store_release(u32* p, u32 v) {
  asm volatile("st.release.gpu.global.u32 [%0], %1;" ::"l"(p), "r"(v) : "memory");
}

// ---- tensor cores -------------------------------------------------------------------------------------------------------

// c[16][8] += a[16][32] (u8) b[32][8] (s8), exact.
__device__ __forceinline__ void mma_u8s8(int (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k32.row.col.s32.u8.s8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
// c[16][8] += a[16][16] b[16][8], f16 into f32.
__device__ __forceinline__ void mma_f16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// ---- numbers ------------------------------------------------------------------------------------------------------------

// A pair (scale, bias) of bf16.
__device__ __forceinline__ float pair_scale(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float pair_bias(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

constexpr float F16_LARGEST = 65504.0f;
__device__ __forceinline__ u16 to_f16(float x) {
  u16 h;
  x = fminf(fmaxf(x, -F16_LARGEST), F16_LARGEST);
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
__device__ __forceinline__ float from_f16(u16 h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}
__device__ __forceinline__ u32 pack_f16(u16 low, u16 high) { return (u32)low | (u32)high << 16; }
__device__ __forceinline__ u32 f16_pair(float low, float high) {
  u32 pair;
  asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// exp(x) from the unit for powers of two: relative error below 2^-21 where it matters (|x| < 90).
__device__ __forceinline__ float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
__device__ __forceinline__ float infinity() { return __uint_as_float(0x7f800000u); }
constexpr float LOG2_E = 1.44269504088896340736f;
__device__ __forceinline__ float sigmoid(float x) { return __fdividef(1.0f, 1.0f + __expf(-x)); }
__device__ __forceinline__ float silu(float x) { return x * sigmoid(x); }

// Sums over the lanes that differ in the bits of WIDTH - 1; every lane gets it, added in the same order.
template <int WIDTH> __device__ __forceinline__ float lanes_sum(float x) {
#pragma unroll
  for (int bit = 1; bit < WIDTH; bit *= 2) x += __shfl_xor_sync(~0u, x, bit);
  return x;
}
template <int WIDTH> __device__ __forceinline__ float lanes_max(float x) {
#pragma unroll
  for (int bit = 1; bit < WIDTH; bit *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, bit));
  return x;
}
