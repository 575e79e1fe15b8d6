// Attention of a prompt on warps' tensor core instructions, for cards before Hopper.
//
// Grid (KV heads, groups of positions), the last positions first. A block has 2 PAIRS positions with the eight query heads of one KV
// head; two warps ("a pair") have two positions, which are 16 rows of the tensor cores: of a page each warp scores half of the 64
// positions, the pair exchanges weights through shared memory, and each warp adds up half of the 256 dims. All positions of a block
// lie in one page, so they see the same pages; these are on their way to shared memory while the one before is used.
// Arithmetic: 4 * 256 a query head and position before it; bytes: 64 KB from L2 for each page and block.
#pragma once

constexpr int PAIR_ROWS = 16;
constexpr int WEIGHT_BYTES = 2 * 2 * 32 * 16;          // of a pair: [half of the page][part][lane]
constexpr int EXCHANGE_BYTES = 2 * PAIR_ROWS * 4;      // of a pair: a number of each row from both warps
constexpr int attention_bytes(int pairs, int stages) { return stages * STAGE_BYTES + pairs * (PAIR_ROWS * ROW_BYTES + WEIGHT_BYTES + EXCHANGE_BYTES); }
constexpr int PAIRS = attention_bytes(4, 1) <= SHARED_LIMIT ? 4 : 2;
constexpr int STAGES = attention_bytes(PAIRS, 2) <= SHARED_LIMIT ? 2 : 1;
constexpr int POSITIONS = 2 * PAIRS, THREADS = 64 * PAIRS;
constexpr int TILES = HEAD_DIM / 2 / 8;  // of a warp's dims
static_assert(attention_bytes(PAIRS, STAGES) <= SHARED_LIMIT && PAGE_TOKENS % POSITIONS == 0, "a block's positions are of one page");

__device__ __forceinline__ void pair_barrier(int pair) { asm volatile("bar.sync %0, 64;" ::"r"(1 + pair) : "memory"); }

LAUNCH_ROWS(attn_core_prefill, KV_HEADS, THREADS, attention_bytes(PAIRS, STAGES), POSITIONS)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    attn_core_prefill(const Prompt* prompt, const u8* proj, const u8* prepared, u8* operands, u8*, u32*, const u8* expanded, u32 ordinal) {
  extern __shared__ __align__(16) u8 shared[];
  const int start = prompt->position, rows = prompt->rows, kv_head = blockIdx.x;
  const int groups = (start + rows - 1) / POSITIONS - start / POSITIONS + 1;
  if ((int)blockIdx.y >= groups) return;
  const int position0 = (start / POSITIONS + groups - 1 - blockIdx.y) * POSITIONS;
  const int pages = position0 / PAGE_TOKENS + 1;
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;
  const int pair = warp / 2, half = warp % 2;
  u8* queries = shared + STAGES * STAGE_BYTES;
  uint4* weights = (uint4*)(queries + PAIRS * PAIR_ROWS * ROW_BYTES + pair * WEIGHT_BYTES);
  float* exchange = (float*)(queries + PAIRS * (PAIR_ROWS * ROW_BYTES + WEIGHT_BYTES) + pair * EXCHANGE_BYTES);
  const auto fetch = [&](int page) {
    if (page < pages) fetch_page<THREADS>(shared_address(shared) + page % STAGES * STAGE_BYTES, prompt_page(prompt, expanded, page, ordinal, kv_head), thread);
    copies_commit();
  };
  const u8* tile = prepared + (u64)((position0 / QUERY_POSITIONS - start / QUERY_POSITIONS) * KV_HEADS + kv_head) * QUERY_BYTES;
  for (int i = thread; i < PAIRS * PAIR_ROWS * (ROW_BYTES / 16); i += THREADS) {
    const int row = i / (ROW_BYTES / 16), unit = i % (ROW_BYTES / 16);
    copy16(shared_address(queries) + row * ROW_BYTES + swap(unit, row) * 16, tile + query_place(position0 % QUERY_POSITIONS * GROUP_HEADS + row, unit));
  }
  if (STAGES > 1) fetch(0);
  queries += pair * PAIR_ROWS * ROW_BYTES;
  // Rows g and g + 8 of the pair are head g of its first and second position.
  float out[TILES][4] = {};  // dims 128 half + 8 n + 2 t + {0, 1}
  float most[2] = {-infinity(), -infinity()};
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
#pragma unroll
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
    if (STAGES == 1) __syncthreads();
  }
  // Both warps have read the largest scores; now their sums take those places.
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const float sum = lanes_sum<4>(total[0][r]) + lanes_sum<4>(total[1][r]);
    if (t == 0) exchange[half * PAIR_ROWS + r * 8 + g] = sum;
  }
  pair_barrier(pair);
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = position0 + 2 * pair + r - start, head = kv_head * GROUP_HEADS + g;
    if (row < 0 || row >= rows) continue;
    const float sum = exchange[r * 8 + g] + exchange[PAIR_ROWS + r * 8 + g];
#pragma unroll
    for (int first = 0; first < TILES; first += GROUP_EIGHTS) {
      const int dim = half * (HEAD_DIM / 2) + first * 8;
      float2 v[GROUP_EIGHTS];
#pragma unroll
      for (int i = 0; i < GROUP_EIGHTS; ++i) {
        const float2 z = f16_floats(two_results(proj, (head * 2 + 1) * HEAD_DIM + dim + i * 8 + 2 * t, row, rows));
        const float* sums = out[first + i] + 2 * r;
        v[i] = make_float2(__fdividef(sums[0], sum) * sigmoid(z.x), __fdividef(sums[1], sum) * sigmoid(z.y));
      }
      put_group(v, operands + (u64)(head * (HEAD_DIM / GROUP) + dim / GROUP) * group_bytes(rows), row, t, true);
    }
  }
}
