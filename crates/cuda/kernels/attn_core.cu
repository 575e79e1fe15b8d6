// attn_core: head norms and rotary embedding, the new position into the cache, attention over the cache, the output gate.
//
// Split: a context of P pages of 64 positions is cut into at most 64 spans of ceil(P / 64) pages; a block has one span of one
// KV head of one row, with its eight query heads. Grid (64, KV heads, rows), 128 threads; surplus blocks exit. The cut depends
// on the row's own position alone. attn_merge (one block a query head) adds the spans and applies the gate.
// Reads 2 KB a position of context; pages are on their way to shared memory before the wait, `stages` of them deep.
// Reached: 4.5 us at 256 positions (bytes need 0.1), 4 TB/s at 128K; attn_merge 2.2 us.
//
// A page is multiplied on the tensor cores: scores are Q K^T with the eight queries as 16 rows, their f16 values and what
// those leave out, so that they count as 22-bit numbers; the same for the weights in W V. Keys lie in shared memory as
// in the page and values transposed, so both are right operands as they are; the order of positions in a tile is chosen so that
// a lane's scores are the left operand of the second product without a shuffle. 16-byte units are swapped by the lowest bit of
// their row, which keeps the eight lanes of a phase on different banks.
#include "common.cuh"

constexpr int THREADS = 128;
constexpr int ROW_BYTES = HEAD_DIM * 2;                    // of keys, of queries
constexpr int PART_BYTES = PAGE_TOKENS * ROW_BYTES;        // keys of a page; its values are as many
constexpr int VALUE_ROW_BYTES = PAGE_TOKENS * 2;
constexpr int STAGE_BYTES = 2 * PART_BYTES;
constexpr int GROUP_HEADS = HEADS / KV_HEADS;              // eight
constexpr int FIXED_BYTES = 2 * GROUP_HEADS * ROW_BYTES + THREADS * 16 + THREADS;  // of shared memory, beside the stages
constexpr float SCORE_SCALE = 0.0625f * LOG2_E;            // 1 / sqrt(256), and scores in powers of two

__device__ __forceinline__ int swap(int unit, int row) { return unit ^ (row & 1) << 2; }

__device__ __forceinline__ u8* page_of(const Step* step, u32 segment, int page, u32 ordinal, int kv_head) {
  const u64 base = ((const u64*)step->pages[segment])[page];
  return (u8*)base + ((u64)ordinal * KV_HEADS + kv_head) * STAGE_BYTES;
}

// cos and sin of `position * frequency`, an angle rounded to f32 as the reference does, brought near zero exactly enough.
__device__ __forceinline__ float2 turn_of(u32 position, float frequency) {
  const float angle = __fmul_rn((float)position, frequency);
  const double turns = (double)angle * 0.15915494309189533577;
  const float rest = (float)((turns - rint(turns)) * 6.28318530717958647693);
  return make_float2(__cosf(rest), __sinf(rest));
}

// RMS norm of a head whose dims `8 lane ..` each lane has, then rotary embedding of its first ROTARY_DIM.
__device__ __forceinline__ void norm_and_turn(float (&v)[8], const float (&weight)[8], const float2 (&turns)[8], int lane) {
  float sum = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) sum = __fmaf_rn(v[e], v[e], sum);
  const float inverse = rsqrtf(lanes_sum<32>(sum) * (1.0f / HEAD_DIM) + RMS_EPS);
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    v[e] = __fmul_rn(__fmul_rn(v[e], inverse), weight[e]);
    // Dim i of the lower half turns with dim i + ROTARY_DIM / 2, four lanes further.
    const float other = __shfl_xor_sync(~0u, v[e], ROTARY_DIM / 16);
    const float sign = lane < ROTARY_DIM / 16 ? -1.0f : 1.0f;
    if (lane < ROTARY_DIM / 8) v[e] = __fmaf_rn(__fmul_rn(sign, other), turns[e].y, __fmul_rn(v[e], turns[e].x));
  }
}
__device__ __forceinline__ void turns_of(u32 position, const float* inv_freq, int lane, float2 (&turns)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) turns[e] = make_float2(1, 0);
  if (lane < ROTARY_DIM / 8) {
#pragma unroll
    for (int e = 0; e < 8; ++e) turns[e] = turn_of(position, inv_freq[lane % (ROTARY_DIM / 16) * 8 + e]);
  }
}
__device__ __forceinline__ void load_head(const float* from, int lane, float (&v)[8]) {
  const float4 a = *(const float4*)(from + lane * 8), b = *(const float4*)(from + lane * 8 + 4);
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}
__device__ __forceinline__ uint4 pack8(const float (&v)[8]) {
  return make_uint4(pack_f16(to_f16(v[0]), to_f16(v[1])), pack_f16(to_f16(v[2]), to_f16(v[3])), pack_f16(to_f16(v[4]), to_f16(v[5])),
                    pack_f16(to_f16(v[6]), to_f16(v[7])));
}
constexpr int FIRST_KEY = 2 * ATTN_WIDTH, FIRST_VALUE = FIRST_KEY + KV_HEADS * HEAD_DIM;

// The new key of one KV head by one warp, and its place in the cache.
__device__ __forceinline__ uint4 new_key(const float* in, const float (&weight)[8], const float2 (&turns)[8], int kv_head, int lane) {
  float v[8];
  load_head(in + FIRST_KEY + kv_head * HEAD_DIM, lane, v);
  norm_and_turn(v, weight, turns, lane);
  return pack8(v);
}

template <bool FRESH>
__device__ __forceinline__ void attend(const Step* step, const float* proj, const float* q_norm, const float* k_norm,
                                       const float* inv_freq, float* acc, float* sums, u32 ordinal, u32 stages) {
  extern __shared__ __align__(128) u8 shared[];
  u8* queries = shared + stages * STAGE_BYTES;                       // [high, low][8 heads][256] f16
  uint4* weights = (uint4*)(queries + 2 * GROUP_HEADS * ROW_BYTES);  // [4 warps][32 lanes]: left operands of W V
  float* exchange = (float*)(weights + THREADS);                     // [4 warps][8 heads]
  launch_dependents();
  const u32 row = blockIdx.z;
  if (row >= step->rows) return wait_predecessors();
  const u32 position = step->position[row], segment = step->segment[row];
  const int kv_head = blockIdx.y, pages = position / PAGE_TOKENS + 1, per_span = ceil_div(pages, SPANS);
  const int first = blockIdx.x * per_span, last = min(first + per_span, pages);
  if (first >= pages) return wait_predecessors();
  const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32, g = lane / 4, t = lane % 4;

  auto fetch = [&](int page) {
    if (page < last) {
      const u8* from = page_of(step, segment, page, ordinal, kv_head);
      const u32 to = shared_address(shared) + (page - first) % stages * STAGE_BYTES;
#pragma unroll 4
      for (int i = thread; i < PART_BYTES / 16; i += THREADS) {
        const int row_of = i / (ROW_BYTES / 16), unit = i % (ROW_BYTES / 16);
        copy16(to + row_of * ROW_BYTES + swap(unit, row_of) * 16, from + i * 16);
      }
#pragma unroll 4
      for (int i = thread; i < PART_BYTES / 16; i += THREADS) {
        const int row_of = i / (VALUE_ROW_BYTES / 16), unit = i % (VALUE_ROW_BYTES / 16);
        copy16(to + PART_BYTES + row_of * VALUE_ROW_BYTES + swap(unit, row_of) * 16, from + PART_BYTES + i * 16);
      }
    }
    copies_commit();
  };
  float2 turns[8];
  turns_of(position, inv_freq, lane, turns);
  float q_weight[8], k_weight[8];
  load_head(q_norm, lane, q_weight);
  load_head(k_norm, lane, k_weight);
  if (!FRESH) wait_predecessors();  // other rows of this pass may have written into these pages
  for (u32 i = 0; i < stages; ++i) fetch(first + i);
  if (FRESH) wait_predecessors();

  const float* in = proj + (u64)row * ATTN_STRIDE;
#pragma unroll
  for (int i = 0; i < GROUP_HEADS / 4; ++i) {
    const int head = warp * (GROUP_HEADS / 4) + i;
    float v[8], rest[8];
    load_head(in + (kv_head * GROUP_HEADS + head) * 2 * HEAD_DIM, lane, v);
    norm_and_turn(v, q_weight, turns, lane);
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      v[e] *= SCORE_SCALE;
      rest[e] = v[e] - from_f16(to_f16(v[e]));
    }
    const int at = head * ROW_BYTES + swap(lane, head) * 16;
    *(uint4*)(queries + at) = pack8(v);
    *(uint4*)(queries + GROUP_HEADS * ROW_BYTES + at) = pack8(rest);
  }
  // The block whose span ends the context has the new position, and keeps a copy from the cache's hands.
  const bool newest = FRESH && last == pages;
  const int slot = position % PAGE_TOKENS;
  uint4 key;
  u16 value[2];
  if (newest) {
    u8* page = page_of(step, segment, pages - 1, ordinal, kv_head);
    if (warp == 3) {
      key = new_key(in, k_weight, turns, kv_head, lane);
      *(uint4*)(page + slot * ROW_BYTES + lane * 16) = key;
    }
    const float* v = in + FIRST_VALUE + kv_head * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dim = thread + i * THREADS;
      value[i] = to_f16(v[dim]);
      ((u16*)(page + PART_BYTES))[dim * PAGE_TOKENS + slot] = value[i];
    }
  }

  const int half = warp / 2, part = warp % 2;  // this warp's scores: positions 32 half + 8 t + 4 part + 2 u + {0, 1}
  float out[8][4] = {};                        // dims 64 warp + 8 n + 2 t + {0, 1} of head g: from high, from low weights
  float most = -infinity(), total = 0;
  for (int page = first; page < last; ++page) {
    u8* stage = shared + (page - first) % stages * STAGE_BYTES;
    copies_wait(stages - 1);
    __syncthreads();
    if (newest && page == pages - 1) {
      if (warp == 3) *(uint4*)(stage + slot * ROW_BYTES + swap(lane, slot) * 16) = key;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int dim = thread + i * THREADS;
        ((u16*)(stage + PART_BYTES + dim * VALUE_ROW_BYTES + swap(slot / 8, dim) * 16))[slot % 8] = value[i];
      }
      __syncthreads();
    }
    float score[2][4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int at = g * ROW_BYTES + swap(i * 4 + t, g) * 16;
      const uint4 high = *(const uint4*)(queries + at), low = *(const uint4*)(queries + GROUP_HEADS * ROW_BYTES + at);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int token = half * 32 + g / 2 * 8 + part * 4 + u * 2 + g % 2;
        const uint4 k = *(const uint4*)(stage + token * ROW_BYTES + swap(i * 4 + t, token) * 16);
        mma_f16(score[u], high.x, low.x, high.y, low.y, k.x, k.y);
        mma_f16(score[u], high.z, low.z, high.w, low.w, k.z, k.w);
      }
    }
    float s[2][2], best = -infinity();
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const u32 at = page * PAGE_TOKENS + half * 32 + t * 8 + part * 4 + u * 2 + b;
        s[u][b] = at <= position ? score[u][b] + score[u][b + 2] : -infinity();
        best = fmaxf(best, s[u][b]);
      }
    best = lanes_max<4>(best);
    if (t == 0) exchange[warp * 8 + g] = best;
    __syncthreads();
    const float before = most;
    most = fmaxf(fmaxf(fmaxf(exchange[g], exchange[8 + g]), fmaxf(exchange[16 + g], exchange[24 + g])), most);
    const float shrink = fast_exp2(before - most);
    u32 packed[2][2];
    total *= shrink;
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      u16 high[2], low[2];
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const float p = fast_exp2(s[u][b] - most);
        total += p;
        high[b] = to_f16(p);
        low[b] = to_f16(p - from_f16(high[b]));
      }
      packed[u][0] = pack_f16(high[0], high[1]);
      packed[u][1] = pack_f16(low[0], low[1]);
    }
    weights[thread] = make_uint4(packed[0][0], packed[0][1], packed[1][0], packed[1][1]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 4; ++c) out[n][c] *= shrink;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const uint4 w0 = weights[(h * 2) * 32 + lane], w1 = weights[(h * 2 + 1) * 32 + lane];
#pragma unroll
      for (int n = 0; n < 8; ++n) {
        const int dim = warp * 64 + n * 8 + g;
        const uint4 v = *(const uint4*)(stage + PART_BYTES + dim * VALUE_ROW_BYTES + swap(h * 4 + t, dim) * 16);
        mma_f16(out[n], w0.x, w0.y, w0.z, w0.w, v.x, v.y);
        mma_f16(out[n], w1.x, w1.y, w1.z, w1.w, v.z, v.w);
      }
    }
    __syncthreads();
    fetch(page + stages);
  }
  total = lanes_sum<4>(total);
  if (t == 0) exchange[warp * 8 + g] = total;
  __syncthreads();
  const int head = kv_head * GROUP_HEADS + g;
  const u64 span = ((u64)row * HEADS + head) * SPANS + blockIdx.x;
  if (warp == 0 && t == 0) {
    *(float2*)(sums + span * 2) = make_float2(most, (exchange[g] + exchange[8 + g]) + (exchange[16 + g] + exchange[24 + g]));
  }
#pragma unroll
  for (int n = 0; n < 8; ++n) {
    *(float2*)(acc + span * HEAD_DIM + warp * 64 + n * 8 + t * 2) = make_float2(out[n][0] + out[n][2], out[n][1] + out[n][3]);
  }
}

// One row: the new position's key and value come from `proj`.
LAUNCH(attn_core, SPANS, THREADS, FIXED_BYTES)  // and STAGE_BYTES for each stage
extern "C" __global__ void __launch_bounds__(THREADS)
    attn_core(const Step* step, const float* proj, const float* q_norm, const float* k_norm, const float* inv_freq, float* acc,
              float* sums, u32 ordinal, u32 stages) {
  attend<true>(step, proj, q_norm, k_norm, inv_freq, acc, sums, ordinal, stages);
}
// Any rows: attn_kv_batch has written theirs.
LAUNCH(attn_core_batch, SPANS, THREADS, FIXED_BYTES)
extern "C" __global__ void __launch_bounds__(THREADS)
    attn_core_batch(const Step* step, const float* proj, const float* q_norm, const float* k_norm, const float* inv_freq, float* acc,
                    float* sums, u32 ordinal, u32 stages) {
  attend<false>(step, proj, q_norm, k_norm, inv_freq, acc, sums, ordinal, stages);
}

// attn_kv_batch: keys and values of all rows into the cache; grid (KV heads, rows), 256 threads.
LAUNCH(attn_kv_batch, KV_HEADS, HEAD_DIM, 0)
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    attn_kv_batch(const Step* step, const float* proj, const float* k_norm, const float* inv_freq, u32 ordinal) {
  launch_dependents();
  const u32 row = blockIdx.y;
  if (row >= step->rows) return wait_predecessors();
  const u32 position = step->position[row];
  const int kv_head = blockIdx.x, lane = threadIdx.x % 32, slot = position % PAGE_TOKENS;
  u8* page = page_of(step, step->segment[row], position / PAGE_TOKENS, ordinal, kv_head);
  float2 turns[8];
  turns_of(position, inv_freq, lane, turns);
  float weight[8];
  load_head(k_norm, lane, weight);
  wait_predecessors();
  const float* in = proj + (u64)row * ATTN_STRIDE;
  if (threadIdx.x < 32) *(uint4*)(page + slot * ROW_BYTES + lane * 16) = new_key(in, weight, turns, kv_head, lane);
  const float value = in[FIRST_VALUE + kv_head * HEAD_DIM + threadIdx.x];
  ((u16*)(page + PART_BYTES))[threadIdx.x * PAGE_TOKENS + slot] = to_f16(value);
}

// attn_merge: the spans of one query head of one row together, times the sigmoid of the gate; grid (heads, rows), a thread a dim.
LAUNCH(attn_merge, HEADS, HEAD_DIM, 0)
extern "C" __global__ void __launch_bounds__(HEAD_DIM)
    attn_merge(const Step* step, const float* acc, const float* sums, const float* proj, float* mixed) {
  __shared__ float2 parts[SPANS];
  launch_dependents();
  const u32 row = blockIdx.y;
  if (row >= step->rows) return wait_predecessors();
  const int head = blockIdx.x, dim = threadIdx.x, pages = step->position[row] / PAGE_TOKENS + 1;
  const int spans = ceil_div(pages, ceil_div(pages, SPANS));
  wait_predecessors();
  const u64 span = ((u64)row * HEADS + head) * SPANS;
  const float gate = proj[(u64)row * ATTN_STRIDE + (head * 2 + 1) * HEAD_DIM + dim];
  if (dim < spans) parts[dim] = *(const float2*)(sums + (span + dim) * 2);
  const float* at = acc + span * HEAD_DIM + dim;
  __syncthreads();
  float most = -infinity();
  for (int i = 0; i < spans; ++i) most = fmaxf(most, parts[i].x);
  float sum = 0, total = 0;
#pragma unroll 8
  for (int i = 0; i < spans; ++i) {
    const float w = fast_exp2(parts[i].x - most);
    sum = __fmaf_rn(w, at[i * HEAD_DIM], sum);
    total = __fmaf_rn(w, parts[i].y, total);
  }
  mixed[(u64)row * ATTN_WIDTH + head * HEAD_DIM + dim] = __fdividef(sum, total) * sigmoid(gate);
}
