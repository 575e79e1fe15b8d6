// What the two forms of attn_core share: how a page lies in shared memory, head norms, rotary embedding, and how the spans of a
// context come together.
#pragma once
#include "common.cuh"

constexpr int ROW_BYTES = HEAD_DIM * 2;                    // of keys, of queries
constexpr int PART_BYTES = PAGE_TOKENS * ROW_BYTES;        // keys of a page; its values are as many
constexpr int VALUE_ROW_BYTES = PAGE_TOKENS * 2;
constexpr int STAGE_BYTES = 2 * PART_BYTES;
constexpr int GROUP_HEADS = HEADS / KV_HEADS;              // eight
constexpr float SCORE_SCALE = 0.0625f * LOG2_E;            // 1 / sqrt(256), and scores in powers of two

__device__ __forceinline__ int swap(int unit, int row) { return unit ^ (row & 1) << 2; }

// Keys and values of one KV head in a page of the table at `pages`.
__device__ __forceinline__ u8* page_of(u64 pages, int page, u32 ordinal, int kv_head) {
  return (u8*)((const u64*)pages)[page] + ((u64)ordinal * KV_HEADS + kv_head) * STAGE_BYTES;
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
// A query, normed and turned, in the unit of scores.
__device__ __forceinline__ uint4 query8(float (&v)[8]) {
#pragma unroll
  for (int e = 0; e < 8; ++e) v[e] = __fmul_rn(v[e], SCORE_SCALE);
  return pack8(v);
}
constexpr int FIRST_KEY = 2 * ATTN_WIDTH, FIRST_VALUE = FIRST_KEY + KV_HEADS * HEAD_DIM;

// The new key of one KV head by one warp, and its place in the cache.
__device__ __forceinline__ uint4 new_key(const float* in, const float (&weight)[8], const float2 (&turns)[8], int kv_head, int lane) {
  float v[8];
  load_head(in + FIRST_KEY + kv_head * HEAD_DIM, lane, v);
  norm_and_turn(v, weight, turns, lane);
  return pack8(v);
}

// Asks for a page as it lies in memory, 16-byte units swapped by the lowest bit of their row, by all THREADS threads.
template <int THREADS> __device__ __forceinline__ void fetch_page(u32 to, const u8* from, int thread) {
#pragma unroll 4
  for (int i = thread; i < PART_BYTES / 16; i += THREADS) {
    const int row = i / (ROW_BYTES / 16), unit = i % (ROW_BYTES / 16);
    copy16(to + row * ROW_BYTES + swap(unit, row) * 16, from + i * 16);
  }
#pragma unroll 4
  for (int i = thread; i < PART_BYTES / 16; i += THREADS) {
    const int row = i / (VALUE_ROW_BYTES / 16), unit = i % (VALUE_ROW_BYTES / 16);
    copy16(to + PART_BYTES + row * VALUE_ROW_BYTES + swap(unit, row) * 16, from + PART_BYTES + i * 16);
  }
}

// What the spans seen so far and the next one count for when they are added: the next one's largest score moves the common one.
struct Shares {
  float earlier, next;
};
__device__ __forceinline__ Shares join(float& most, float of_next) {
  const float before = most;
  most = fmaxf(most, of_next);
  return {fast_exp2(before - most), fast_exp2(of_next - most)};
}
__device__ __forceinline__ float joined(Shares shares, float earlier, float next) { return __fmaf_rn(shares.next, next, __fmul_rn(earlier, shares.earlier)); }
