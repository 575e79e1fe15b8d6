// Keys and values in 8 bits: how they lie in a page, how a row of 256 is rounded, and what is multiplied of it.
//
// A key or a value of a KV head is 256 integers from -127 to 127 and an f32 that they are multiplied with, as the CPU backend stores them. What meets
// the tensor cores is always the f16 next to integer * scale, in decode and in prompts.
#pragma once
#include "common.cuh"

// A page of a KV head: keys, values, scales of keys, scales of values. A row is a position's key, or a dim's values.
constexpr int PART8_BYTES = PAGE_TOKENS * HEAD_DIM;
constexpr int SCALES8 = 2 * PART8_BYTES, PAGE8_BYTES = SCALES8 + 2 * PAGE_TOKENS * 4;
// Rows are blocks of 64 bytes, in which stands together what lane t of four needs at once: numbers 8 t .. and 32 + 8 t ...
constexpr int BLOCK8 = 64;
__device__ __forceinline__ int place8(int i) { return i / 8 % 4 * 16 + i / 32 * 8 + i % 8; }
// A key's blocks are swapped by the lowest bit of its position, so that two lanes' keys are on different banks.
__device__ __forceinline__ int key8_block(int slot, int block) { return slot * HEAD_DIM + (block ^ (slot & 1)) * BLOCK8; }
__device__ __forceinline__ int key8_place(int slot, int dim) { return key8_block(slot, dim / BLOCK8) + place8(dim % BLOCK8); }
__device__ __forceinline__ int value8_place(int dim, int slot) { return PART8_BYTES + dim * BLOCK8 + place8(slot); }
static_assert(PAGE_TOKENS == BLOCK8 && HEAD_DIM % BLOCK8 == 0 && PAGE8_BYTES % 128 == 0, "whole blocks");

__device__ __forceinline__ float* key8_scales(u8* page) { return (float*)(page + SCALES8); }
__device__ __forceinline__ float* value8_scales(u8* page) { return (float*)(page + SCALES8) + PAGE_TOKENS; }

// A row, of which each lane of a warp has the numbers `8 lane ..`.
struct Row8 {
  uint2 bytes;
  float scale;
};
// The largest magnitude is 127 steps of the scale. NaN becomes 0, and infinity what it is beside the largest f32.
__device__ __forceinline__ Row8 round8(const float (&v)[8]) {
  constexpr float MOST = 127.0f, LARGEST = 3.402823466e38f;
  float largest = 0;
#pragma unroll
  for (int e = 0; e < 8; ++e) largest = fmaxf(largest, fabsf(v[e]));
  largest = fminf(lanes_max<32>(largest), LARGEST);
  u32 words[2] = {0, 0};
#pragma unroll
  for (int e = 0; e < 8; ++e) {
    const float steps = __fmul_rn(__fdiv_rn(v[e], largest), MOST);  // NaN in a row of zeros
    const int byte = steps == steps ? __float2int_rn(fminf(fmaxf(steps, -MOST), MOST)) : 0;
    words[e / 4] |= (u32)(byte & 255) << e % 4 * 8;
  }
  return {make_uint2(words[0], words[1]), __fdiv_rn(largest, MOST)};
}
__device__ __forceinline__ void put_key8(u8* page, int slot, int lane, const Row8& row) {
  *(uint2*)(page + key8_place(slot, lane * 8)) = row.bytes;
  if (lane == 0) key8_scales(page)[slot] = row.scale;
}
__device__ __forceinline__ void put_value8(u8* page, int slot, int lane, const Row8& row) {
#pragma unroll
  for (int e = 0; e < 8; ++e) page[value8_place(lane * 8 + e, slot)] = (u8)((e < 4 ? row.bytes.x : row.bytes.y) >> e % 4 * 8);
  if (lane == 0) value8_scales(page)[slot] = row.scale;
}

// Eight integers times their scales.
__device__ __forceinline__ float from_i8(u32 biased, int e, float scale) {
  // 2^23 + 128 + the integer, and the former taken off again: both exact.
  return __fmul_rn(__fsub_rn(__uint_as_float(__byte_perm(biased, 0x4b000000u, 0x7440 | e)), 8388736.0f), scale);
}
__device__ __forceinline__ uint4 expand8(u32 low, u32 high, const float (&scales)[8]) {
  low ^= 0x80808080u, high ^= 0x80808080u;
  return make_uint4(f16_pair(from_i8(low, 0, scales[0]), from_i8(low, 1, scales[1])), f16_pair(from_i8(low, 2, scales[2]), from_i8(low, 3, scales[3])),
                    f16_pair(from_i8(high, 0, scales[4]), from_i8(high, 1, scales[5])), f16_pair(from_i8(high, 2, scales[6]), from_i8(high, 3, scales[7])));
}
__device__ __forceinline__ uint4 expand8(u32 low, u32 high, float scale) {
  const float scales[8] = {scale, scale, scale, scale, scale, scale, scale, scale};
  return expand8(low, high, scales);
}
// The scales of a lane's values: of positions `8 t ..` and `32 + 8 t ..`.
__device__ __forceinline__ void load_scales8(const float* scales, int t, float (&of)[2][8]) {
#pragma unroll
  for (int h = 0; h < 2; ++h) {
    const float4 a = *(const float4*)(scales + h * 32 + t * 8), b = *(const float4*)(scales + h * 32 + t * 8 + 4);
    of[h][0] = a.x, of[h][1] = a.y, of[h][2] = a.z, of[h][3] = a.w, of[h][4] = b.x, of[h][5] = b.y, of[h][6] = b.z, of[h][7] = b.w;
  }
}
