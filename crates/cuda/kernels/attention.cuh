// What attention of decode and of prompts share: how a page lies in memory, head norms, rotary embedding, and how the spans of a
// context come together.
#pragma once
#include "kv8.cuh"

// How pages store keys and values: f16, or integers of 8 bits with scales (kv8.cuh). The rest of attention has f16 in either case.
#ifndef KV_BITS
#define KV_BITS 16
#endif
static_assert(KV_BITS == 16 || KV_BITS == 8, "the formats that there are");
constexpr bool KV8 = KV_BITS == 8;

constexpr int ROW_BYTES = HEAD_DIM * 2;                    // of keys, of queries
constexpr int PART_BYTES = PAGE_TOKENS * ROW_BYTES;        // keys of a page; its values are as many
constexpr int VALUE_ROW_BYTES = PAGE_TOKENS * 2;
constexpr int STAGE_BYTES = 2 * PART_BYTES;
constexpr int STORED_BYTES = KV8 ? PAGE8_BYTES : STAGE_BYTES;  // of a KV head in a page of the cache
constexpr int GROUP_HEADS = HEADS / KV_HEADS;              // eight
constexpr float SCORE_SCALE = 0.0625f * LOG2_E;            // 1 / sqrt(256), and scores in powers of two

__device__ __forceinline__ int swap(int unit, int row) { return unit ^ (row & 1) << 2; }

// Where 16-byte units lie in a page, in memory as in the tensor cores' operands: rows of 128 bytes, whose units are swapped by the three
// lowest bits of the row's number. Keys are four blocks of 64 dims, in each a row for a position; a row of values is a dim.
constexpr int LINE_BYTES = 128, LINE_UNITS = LINE_BYTES / 16, KEY_BLOCK_BYTES = PAGE_TOKENS * LINE_BYTES;
__device__ __forceinline__ int line_unit(int unit, int row) { return unit ^ row % LINE_UNITS; }
// Of a position's key, the dims `8 unit ..`.
__device__ __forceinline__ int key_place(int slot, int unit) {
  return unit / LINE_UNITS * KEY_BLOCK_BYTES + slot * LINE_BYTES + line_unit(unit % LINE_UNITS, slot) * 16;
}
// Of a dim's values, the position `slot`.
__device__ __forceinline__ int value_place(int dim, int slot) {
  return PART_BYTES + dim * LINE_BYTES + line_unit(slot / 8, dim) * 16 + slot % 8 * 2;
}

// Keys and values of one KV head in a page of the table at `pages`.
__device__ __forceinline__ u8* page_of(u64 pages, int page, u32 ordinal, int kv_head) {
  return (u8*)((const u64*)pages)[page] + ((u64)ordinal * KV_HEADS + kv_head) * STORED_BYTES;
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

// The new key of one KV head by one warp.
__device__ __forceinline__ void new_key(const float* in, const float (&weight)[8], const float2 (&turns)[8], int kv_head, int lane, float (&v)[8]) {
  load_head(in + FIRST_KEY + kv_head * HEAD_DIM, lane, v);
  norm_and_turn(v, weight, turns, lane);
}
__device__ __forceinline__ Row8 new_key8(const float* in, const float (&weight)[8], const float2 (&turns)[8], int kv_head, int lane) {
  float v[8];
  new_key(in, weight, turns, kv_head, lane, v);
  return round8(v);
}
__device__ __forceinline__ Row8 new_value8(const float* in, int kv_head, int lane) {
  float v[8];
  load_head(in + FIRST_VALUE + kv_head * HEAD_DIM, lane, v);
  return round8(v);
}

// Asks for a page of f16, by all THREADS threads; in shared memory keys are rows of ROW_BYTES, and 16-byte units are swapped by the lowest bit of
// their row alone.
template <int THREADS> __device__ __forceinline__ void fetch_page(u32 to, const u8* from, int thread) {
  // A thread's rows are a multiple of eight apart, so that its units are swapped alike.
  constexpr int LINES = THREADS / LINE_UNITS;
  static_assert(LINES % LINE_UNITS == 0 && PAGE_TOKENS % LINES == 0, "whole steps");
  const int row = thread / LINE_UNITS, unit = swap(line_unit(thread % LINE_UNITS, row), row);
  from += thread * 16;
  const u32 keys = to + row * ROW_BYTES + unit * 16, values = to + PART_BYTES + row * LINE_BYTES + unit * 16;
#pragma unroll
  for (int i = 0; i < PART_BYTES / LINE_BYTES; i += LINES)
    copy16(keys + i % PAGE_TOKENS * ROW_BYTES + i / PAGE_TOKENS * LINE_BYTES, from + i * LINE_BYTES);
#pragma unroll
  for (int i = 0; i < PART_BYTES / LINE_BYTES; i += LINES) copy16(values + i * LINE_BYTES, from + PART_BYTES + i * LINE_BYTES);
}

// Asks for a page of 8 bits, as it is.
template <int THREADS> __device__ __forceinline__ void fetch_page8(u32 to, const u8* from, int thread) {
  constexpr int UNITS = PAGE8_BYTES / 16, WHOLE = UNITS / THREADS * THREADS;
  to += thread * 16, from += thread * 16;
#pragma unroll
  for (int i = 0; i < WHOLE; i += THREADS) copy16(to + i * 16, from + i * 16);
  if (thread < UNITS - WHOLE) copy16(to + WHOLE * 16, from + WHOLE * 16);
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
