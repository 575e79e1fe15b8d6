// attn_core of a prompt: keys and values into the cache, attention of all new positions over the cache, the output gate.
//
// attn_kv_prefill: as attn_kv_batch; grid (KV heads, rows).
//
// attn_core_prefill: grid (KV heads, groups of positions), the last positions first. A block has 2 PAIRS positions with the
// eight query heads of one KV head; two warps ("a pair") have two positions, which are 16 rows of the tensor cores: of a page each
// warp scores half of the 64 positions, the pair exchanges weights through shared memory, and each warp adds up half of the 256 dims.
// All positions of a block lie in one page, so they see the same pages and the same spans: as in decode, scores are added and
// pages weighed span by span, and spans joined in their order. What a span has so far and what the spans before it have are both
// in registers; pages are on their way to shared memory while the one before is used.
// Arithmetic: 4 * 256 a query head and position before it; bytes: 64 KB from L2 for each page and block.
#include "attention.cuh"
#include "gemm.cuh"

LAUNCH_ROWS(attn_kv_prefill, KV_HEADS, HEAD_DIM, 0, 1)
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    attn_kv_prefill(const Prompt* prompt, const float* proj, const float* k_norm, const float* inv_freq, u32 ordinal) {
  begin();
  const u32 row = blockIdx.y;
  if (row >= prompt->rows) return;
  const u32 position = prompt->position + row;
  const int kv_head = blockIdx.x, lane = threadIdx.x % 32, slot = position % PAGE_TOKENS;
  u8* page = page_of(prompt->pages, position / PAGE_TOKENS, ordinal, kv_head);
  const float* in = proj + (u64)row * ATTN_STRIDE;
  if (threadIdx.x < 32) {
    float2 turns[8];
    turns_of(position, inv_freq, lane, turns);
    float weight[8];
    load_head(k_norm, lane, weight);
    *(uint4*)(page + slot * ROW_BYTES + lane * 16) = new_key(in, weight, turns, kv_head, lane);
  }
  ((u16*)(page + PART_BYTES))[threadIdx.x * PAGE_TOKENS + slot] = to_f16(in[FIRST_VALUE + kv_head * HEAD_DIM + threadIdx.x]);
}

constexpr int PAIR_ROWS = 16;
constexpr int WEIGHT_BYTES = 2 * 2 * 32 * 16;          // of a pair: [half of the page][part][lane]
constexpr int EXCHANGE_BYTES = 2 * PAIR_ROWS * 4;      // of a pair: a number of each row from both warps
constexpr int attention_bytes(int pairs, int stages) { return stages * STAGE_BYTES + pairs * (PAIR_ROWS * ROW_BYTES + WEIGHT_BYTES + EXCHANGE_BYTES); }
constexpr int PAIRS = attention_bytes(4, 1) <= SHARED_LIMIT ? 4 : 2;
constexpr int STAGES = attention_bytes(PAIRS, 2) <= SHARED_LIMIT ? 2 : 1;
constexpr int POSITIONS = 2 * PAIRS, THREADS = 64 * PAIRS;
constexpr int TILES = HEAD_DIM / 2 / 8;  // of a warp's dims
#if __CUDA_ARCH__ >= 900
constexpr int HALVES_AT_ONCE = 2;
#else
constexpr int HALVES_AT_ONCE = 1;  // there are no registers for both halves' values
#endif
static_assert(attention_bytes(PAIRS, STAGES) <= SHARED_LIMIT && PAGE_TOKENS % POSITIONS == 0, "a block's positions are of one page");

__device__ __forceinline__ void pair_barrier(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); }

LAUNCH_ROWS(attn_core_prefill, KV_HEADS, THREADS, attention_bytes(PAIRS, STAGES), POSITIONS)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attn_core_prefill(const Prompt* prompt, const float* proj, const float* q_norm, const float* inv_freq, float* mixed, u32 ordinal) {
  extern __shared__ __align__(16) u8 shared[];
  begin();
  const int start = prompt->position, rows = prompt->rows, kv_head = blockIdx.x;
  const int groups = (start + rows - 1) / POSITIONS - start / POSITIONS + 1;
  if ((int)blockIdx.y >= groups) return;
  const int position0 = (start / POSITIONS + groups - 1 - blockIdx.y) * POSITIONS;
  const int pages = position0 / PAGE_TOKENS + 1, per_span = ceil_div(pages, SPANS);
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int pair = warp / 2, half = warp % 2;
  u8* queries = shared + STAGES * STAGE_BYTES;
  uint4* weights = (uint4*)(queries + PAIRS * PAIR_ROWS * ROW_BYTES + pair * WEIGHT_BYTES);
  float* exchange = (float*)(queries + PAIRS * (PAIR_ROWS * ROW_BYTES + WEIGHT_BYTES) + pair * EXCHANGE_BYTES);
  const auto fetch = [&](int page) {
    if (page < pages) fetch_page<THREADS>(shared_address(shared) + page % STAGES * STAGE_BYTES, page_of(prompt->pages, page, ordinal, kv_head), thread);
    copies_commit();
  };
  if (STAGES > 1) fetch(0);
  {  // a warp's queries: eight heads of one position
    const int position = position0 + warp, row = position - start;
    float2 turns[8];
    turns_of(position, inv_freq, lane, turns);
    float weight[8];
    load_head(q_norm, lane, weight);
    for (int head = 0; head < GROUP_HEADS; ++head) {
      float v[8] = {0, 0, 0, 0, 0, 0, 0, 0};
      if (row >= 0 && row < rows) load_head(proj + (u64)row * ATTN_STRIDE + (kv_head * GROUP_HEADS + head) * 2 * HEAD_DIM, lane, v);
      norm_and_turn(v, weight, turns, lane);
      const int at = warp * GROUP_HEADS + head;
      *(uint4*)(queries + at * ROW_BYTES + swap(lane, at) * 16) = query8(v);
    }
  }
  queries += pair * PAIR_ROWS * ROW_BYTES;
  // Rows g and g + 8 of the pair are head g of its first and second position.
  float out[TILES][4], earlier[TILES][4];  // dims 128 half + 8 n + 2 t + {0, 1}: of this span, of the spans before it
#pragma unroll
  for (int n = 0; n < TILES; ++n)
#pragma unroll
    for (int c = 0; c < 4; ++c) out[n][c] = 0, earlier[n][c] = 0;
  float most[2] = {-infinity(), -infinity()}, all_most[2] = {-infinity(), -infinity()}, all_total[2] = {0, 0};
  float total[2][2] = {};  // [part][row]
  for (int page = 0; page < pages; ++page) {
    if (STAGES == 1) fetch(page);
    copies_wait<0>();
    __syncthreads();
    if (STAGES > 1) fetch(page + 1);
    const u8* stage = shared + page % STAGES * STAGE_BYTES;
    float score[2][2][4] = {};  // [part][u]: positions 32 half + 8 t + 4 part + 2 u + {0, 1} of rows g, g + 8
#pragma unroll 2
    for (int i = 0; i < 8; ++i) {
      const uint4 q0 = *(const uint4*)(queries + g * ROW_BYTES + swap(i * 4 + t, g) * 16);
      const uint4 q1 = *(const uint4*)(queries + (g + 8) * ROW_BYTES + swap(i * 4 + t, g) * 16);
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const int token = half * 32 + g / 2 * 8 + part * 4 + u * 2 + g % 2;
          const uint4 k = *(const uint4*)(stage + token * ROW_BYTES + swap(i * 4 + t, token) * 16);
          mma_f16(score[part][u], q0.x, q1.x, q0.y, q1.y, k.x, k.y);
          mma_f16(score[part][u], q0.z, q1.z, q0.w, q1.w, k.z, k.w);
        }
    }
    if (page == pages - 1) {
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int u = 0; u < 2; ++u)
#pragma unroll
          for (int c = 0; c < 4; ++c) {
            const int at = page * PAGE_TOKENS + half * 32 + t * 8 + part * 4 + u * 2 + c % 2;
            if (at > position0 + 2 * pair + c / 2) score[part][u][c] = -infinity();
          }
    }
    float best[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      best[r] = -infinity();
#pragma unroll
      for (int part = 0; part < 2; ++part)
#pragma unroll
        for (int u = 0; u < 2; ++u) best[r] = fmaxf(best[r], fmaxf(score[part][u][2 * r], score[part][u][2 * r + 1]));
      best[r] = lanes_max<4>(best[r]);
      if (t == 0) exchange[half * PAIR_ROWS + r * 8 + g] = best[r];
    }
    pair_barrier(pair);
    float shrink[2];
    uint4 mine[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float before = most[r];
      most[r] = fmaxf(fmaxf(exchange[r * 8 + g], exchange[PAIR_ROWS + r * 8 + g]), most[r]);
      shrink[r] = fast_exp2(before - most[r]);
    }
#pragma unroll
    for (int part = 0; part < 2; ++part) {
      u32 packed[2][2];  // [u][row]
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        total[part][r] = __fmul_rn(total[part][r], shrink[r]);
#pragma unroll
        for (int u = 0; u < 2; ++u) {
          const float p0 = fast_exp2(score[part][u][2 * r] - most[r]), p1 = fast_exp2(score[part][u][2 * r + 1] - most[r]);
          total[part][r] = __fadd_rn(__fadd_rn(total[part][r], p0), p1);
          packed[u][r] = pack_f16(to_f16(p0), to_f16(p1));
        }
      }
      mine[part] = make_uint4(packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
      weights[(half * 2 + part) * 32 + lane] = mine[part];
    }
    pair_barrier(pair);
#pragma unroll
    for (int n = 0; n < TILES; ++n) out[n][0] *= shrink[0], out[n][1] *= shrink[0], out[n][2] *= shrink[1], out[n][3] *= shrink[1];
#pragma unroll(HALVES_AT_ONCE)
    for (int h = 0; h < 2; ++h) {
      const uint4 w0 = weights[h * 2 * 32 + lane], w1 = weights[(h * 2 + 1) * 32 + lane];
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const int dim = half * (HEAD_DIM / 2) + n * 8 + g;
        const uint4 v = *(const uint4*)(stage + PART_BYTES + dim * VALUE_ROW_BYTES + swap(h * 4 + t, dim) * 16);
        mma_f16(out[n], w0.x, w0.y, w0.z, w0.w, v.x, v.y);
        mma_f16(out[n], w1.x, w1.y, w1.z, w1.w, v.z, v.w);
      }
    }
    if ((page + 1) % per_span == 0 || page == pages - 1) {
      Shares shares[2];
      // Both warps have read the largest scores; now their sums take those places.
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float sum = lanes_sum<4>(total[0][r]) + lanes_sum<4>(total[1][r]);
        if (t == 0) exchange[half * PAIR_ROWS + r * 8 + g] = sum;
      }
      pair_barrier(pair);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        shares[r] = join(all_most[r], most[r]);
        all_total[r] = joined(shares[r], all_total[r], exchange[r * 8 + g] + exchange[PAIR_ROWS + r * 8 + g]);
        most[r] = -infinity(), total[0][r] = 0, total[1][r] = 0;
      }
#pragma unroll
      for (int n = 0; n < TILES; ++n)
#pragma unroll
        for (int c = 0; c < 4; ++c) earlier[n][c] = joined(shares[c / 2], earlier[n][c], out[n][c]), out[n][c] = 0;
    }
    if (STAGES == 1) __syncthreads();
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = position0 + 2 * pair + r - start, head = kv_head * GROUP_HEADS + g;
    if (row < 0 || row >= rows) continue;
    const float* gate = proj + (u64)row * ATTN_STRIDE + (head * 2 + 1) * HEAD_DIM;
    float* to = mixed + (u64)row * ATTN_WIDTH + head * HEAD_DIM;
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const int dim = half * (HEAD_DIM / 2) + n * 8 + 2 * t;
      const float2 z = *(const float2*)(gate + dim);
      *(float2*)(to + dim) = make_float2(__fdividef(earlier[n][2 * r], all_total[r]) * sigmoid(z.x), __fdividef(earlier[n][2 * r + 1], all_total[r]) * sigmoid(z.y));
    }
  }
}

// attn_round_prefill: the result rounded for the projection after it; a block a row, a warp a chunk of 256.
LAUNCH_PLANNED(attn_round_prefill, ATTN_PARTS * 32, 0)
extern "C" __global__ void __launch_bounds__(ATTN_PARTS * 32) attn_round_prefill(const Prompt* prompt, const float* mixed, u8* packed) {
  begin();
  const u32 row = blockIdx.x;
  if (row >= prompt->rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  float v[8];
  load8(mixed + (u64)row * ATTN_WIDTH, warp * CHUNK + lane * 8, ATTN_WIDTH, v);
  u8* to = packed + (u64)row * rounded_bytes(ATTN_PARTS);
  round_into(v, to, warp, ATTN_PARTS, lane);
  if (threadIdx.x == 0) *(float*)(to + ATTN_PARTS * (PLANES + FACTORS)) = 1.0f;
}
