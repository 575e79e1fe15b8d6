// attn_core: head norms and rotary embedding, the new position into the cache, attention over the cache, the output gate.
//
// Split: a context of P pages of 64 positions is cut into at most 64 spans of ceil(P / 64) pages; a block has one span of one
// KV head of one row, with its eight query heads. Grid (64, KV heads, rows), 128 threads; surplus blocks exit. The cut depends
// on the row's own position alone. attn_merge (one block a query head) adds the spans and applies the gate.
// Reads 2 KB a position of context (of 8 bits: 1,040 bytes); pages are on their way to shared memory before the wait, `stages` of them deep.
// Reached: 4.5 us at 256 positions (bytes need 0.1), 4 TB/s at 128K; attn_merge 2.2 us.
//
// A page is multiplied on the tensor cores: scores are Q K^T with the eight queries as the first rows of 16, then W V. Queries and
// weights are f16, as keys and values are; those of 8 bits become f16 on their way from shared memory to the tensor cores. Keys lie in shared memory in rows and values transposed, so both are right operands as
// they are; the order of positions in a tile is chosen so that a lane's scores are the left operand of the second product without
// a shuffle. 16-byte units are swapped by the lowest bit of their row, which keeps the eight lanes of a phase on different banks.
#include "attention.cuh"

constexpr int THREADS = 128;
constexpr int FIXED_BYTES = GROUP_HEADS * ROW_BYTES + THREADS * 8 + THREADS;  // of shared memory, beside the stages

template <bool FRESH>
__device__ __forceinline__ void attend(const Step* step, const float* proj, const float* q_norm, const float* k_norm,
                                       const float* inv_freq, float* acc, float* sums, u32 ordinal, u32 stages) {
  extern __shared__ __align__(128) u8 shared[];
  u8* queries = shared + stages * STORED_BYTES;                  // [8 heads][256] f16
  uint2* weights = (uint2*)(queries + GROUP_HEADS * ROW_BYTES);  // [4 warps][32 lanes]: left operands of W V
  float* exchange = (float*)(weights + THREADS);                 // [4 warps][8 heads]
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
      const u8* from = page_of(step->pages[segment], page, ordinal, kv_head);
      const u32 to = shared_address(shared) + (page - first) % stages * STORED_BYTES;
      if (KV8) fetch_page8<THREADS>(to, from, thread);
      else fetch_page<THREADS>(to, from, thread);
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
    float v[8];
    load_head(in + (kv_head * GROUP_HEADS + head) * 2 * HEAD_DIM, lane, v);
    norm_and_turn(v, q_weight, turns, lane);
    *(uint4*)(queries + head * ROW_BYTES + swap(lane, head) * 16) = query8(v);
  }
  // The block whose span ends the context has the new position, and keeps a copy from the cache's hands.
  const bool newest = FRESH && last == pages;
  const int slot = position % PAGE_TOKENS;
  uint4 key;
  u16 value[2];
  Row8 row8;  // KV8: of a key in warp 3, of a value in warp 2
  if (KV8 && newest && warp >= 2) {
    u8* page = page_of(step->pages[segment], pages - 1, ordinal, kv_head);
    row8 = warp == 3 ? new_key8(in, k_weight, turns, kv_head, lane) : new_value8(in, kv_head, lane);
    warp == 3 ? put_key8(page, slot, lane, row8) : put_value8(page, slot, lane, row8);
  }
  if (!KV8 && newest) {
    u8* page = page_of(step->pages[segment], pages - 1, ordinal, kv_head);
    if (warp == 3) {
      float v[8];
      new_key(in, k_weight, turns, kv_head, lane, v);
      key = pack8(v);
      *(uint4*)(page + key_place(slot, lane)) = key;
    }
    const float* v = in + FIRST_VALUE + kv_head * HEAD_DIM;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int dim = thread + i * THREADS;
      value[i] = to_f16(v[dim]);
      *(u16*)(page + value_place(dim, slot)) = value[i];
    }
  }

  const int half = warp / 2, part = warp % 2;  // this warp's scores: positions 32 half + 8 t + 4 part + 2 u + {0, 1}
  float out[8][4] = {};                        // dims 64 warp + 8 n + 2 t + {0, 1} of head g; rows 8 to 15 of the tile are empty
  float most = -infinity(), total = 0;
  for (int page = first; page < last; ++page) {
    u8* stage = shared + (page - first) % stages * STORED_BYTES;
    copies_wait(stages - 1);
    __syncthreads();
    if (KV8 && newest && page == pages - 1) {
      if (warp >= 2) warp == 3 ? put_key8(stage, slot, lane, row8) : put_value8(stage, slot, lane, row8);
      __syncthreads();
    }
    if (!KV8 && newest && page == pages - 1) {
      if (warp == 3) *(uint4*)(stage + slot * ROW_BYTES + swap(lane, slot) * 16) = key;
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int dim = thread + i * THREADS;
        ((u16*)(stage + PART_BYTES + dim * VALUE_ROW_BYTES + swap(slot / 8, dim) * 16))[slot % 8] = value[i];
      }
      __syncthreads();
    }
    float score[2][4] = {};
    uint4 bytes[2];  // KV8: of two tokens, for two steps
    float scales[2];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const uint4 q = *(const uint4*)(queries + g * ROW_BYTES + swap(i * 4 + t, g) * 16);
#pragma unroll
      for (int u = 0; u < 2; ++u) {
        const int token = half * 32 + g / 2 * 8 + part * 4 + u * 2 + g % 2;
        uint4 k;
        if (KV8) {
          if (i == 0) scales[u] = key8_scales(stage)[token];
          if (i % 2 == 0) bytes[u] = *(const uint4*)(stage + key8_block(token, i / 2) + t * 16);
          k = i % 2 ? expand8(bytes[u].z, bytes[u].w, scales[u]) : expand8(bytes[u].x, bytes[u].y, scales[u]);
        } else {
          k = *(const uint4*)(stage + token * ROW_BYTES + swap(i * 4 + t, token) * 16);
        }
        mma_f16(score[u], q.x, 0, q.y, 0, k.x, k.y);
        mma_f16(score[u], q.z, 0, q.w, 0, k.z, k.w);
      }
    }
    float s[2][2], best = -infinity();
#pragma unroll
    for (int u = 0; u < 2; ++u)
#pragma unroll
      for (int b = 0; b < 2; ++b) {
        const u32 at = page * PAGE_TOKENS + half * 32 + t * 8 + part * 4 + u * 2 + b;
        s[u][b] = at <= position ? score[u][b] : -infinity();
        best = fmaxf(best, s[u][b]);
      }
    best = lanes_max<4>(best);
    if (t == 0) exchange[warp * 8 + g] = best;
    __syncthreads();
    const float before = most;
    most = fmaxf(fmaxf(fmaxf(exchange[g], exchange[8 + g]), fmaxf(exchange[16 + g], exchange[24 + g])), most);
    const float shrink = fast_exp2(before - most);
    u32 packed[2];
    total = __fmul_rn(total, shrink);
#pragma unroll
    for (int u = 0; u < 2; ++u) {
      const float p0 = fast_exp2(s[u][0] - most), p1 = fast_exp2(s[u][1] - most);
      total = __fadd_rn(__fadd_rn(total, p0), p1);
      packed[u] = pack_f16(to_f16(p0), to_f16(p1));
    }
    weights[thread] = make_uint2(packed[0], packed[1]);
    __syncthreads();
#pragma unroll
    for (int n = 0; n < 8; ++n)
#pragma unroll
      for (int c = 0; c < 2; ++c) out[n][c] *= shrink;
    constexpr int AT_ONCE = KV8 ? 4 : 8;  // tiles of dims, of which bytes of both halves are read together
#pragma unroll
    for (int n0 = 0; n0 < 8; n0 += AT_ONCE) {
      uint4 bytes[AT_ONCE];
      float scales[2][8];
      if (KV8) {
        load_scales8(value8_scales(stage), t, scales);
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) bytes[n] = *(const uint4*)(stage + PART8_BYTES + (warp * 64 + (n0 + n) * 8 + g) * BLOCK8 + t * 16);
      }
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        const uint2 w0 = weights[(h * 2) * 32 + lane], w1 = weights[(h * 2 + 1) * 32 + lane];
#pragma unroll
        for (int n = 0; n < AT_ONCE; ++n) {
          const int dim = warp * 64 + (n0 + n) * 8 + g;
          const uint4 v = !KV8 ? *(const uint4*)(stage + PART_BYTES + dim * VALUE_ROW_BYTES + swap(h * 4 + t, dim) * 16)
                          : h ? expand8(bytes[n].z, bytes[n].w, scales[1]) : expand8(bytes[n].x, bytes[n].y, scales[0]);
          mma_f16(out[n0 + n], w0.x, 0, w0.y, 0, v.x, v.y);
          mma_f16(out[n0 + n], w1.x, 0, w1.y, 0, v.z, v.w);
        }
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
    *(float2*)(acc + span * HEAD_DIM + warp * 64 + n * 8 + t * 2) = make_float2(out[n][0], out[n][1]);
  }
}

// One row: the new position's key and value come from `proj`.
LAUNCH(attn_core, SPANS, THREADS, FIXED_BYTES)  // and STORED_BYTES for each stage
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
  u8* page = page_of(step->pages[step->segment[row]], position / PAGE_TOKENS, ordinal, kv_head);
  float2 turns[8];
  turns_of(position, inv_freq, lane, turns);
  float weight[8];
  load_head(k_norm, lane, weight);
  wait_predecessors();
  const float* in = proj + (u64)row * ATTN_STRIDE;
  if (KV8) {
    if (threadIdx.x < 32) put_key8(page, slot, lane, new_key8(in, weight, turns, kv_head, lane));
    else if (threadIdx.x < 64) put_value8(page, slot, lane, new_value8(in, kv_head, lane));
    return;
  }
  if (threadIdx.x < 32) {
    float v[8];
    new_key(in, weight, turns, kv_head, lane, v);
    *(uint4*)(page + key_place(slot, lane)) = pack8(v);
  }
  const float value = in[FIRST_VALUE + kv_head * HEAD_DIM + threadIdx.x];
  *(u16*)(page + value_place(threadIdx.x, slot)) = to_f16(value);
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
  float sum = 0, total = 0, most = -infinity();
#pragma unroll 8
  for (int i = 0; i < spans; ++i) {
    const Shares shares = join(most, parts[i].x);
    sum = joined(shares, sum, at[i * HEAD_DIM]);
    total = joined(shares, total, parts[i].y);
  }
  mixed[(u64)row * ATTN_WIDTH + head * HEAD_DIM + dim] = __fdividef(sum, total) * sigmoid(gate);
}
