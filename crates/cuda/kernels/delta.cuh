// What the two forms of delta_core share: the arithmetic of one token, with every rounding written down, so that a token has
// the same bits whether it comes alone or as one of thousands.
#pragma once
#include "common.cuh"

constexpr int QUARTER = VALUE_DIM / 4;   // value rows of a block
constexpr int TAIL = CONV_WIDTH - 1;     // inputs that the convolution looks back
constexpr int ROW_LANES = 8;             // lanes that share a value row of the state
constexpr float L2_EPS = 1e-6f;
constexpr u64 STATES = (u64)DELTA_LAYERS * VALUE_HEADS * VALUE_DIM * KEY_DIM;  // floats before the tails

__device__ __forceinline__ float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

// The convolution of one channel, whose last inputs are in `past`, oldest first.
__device__ __forceinline__ float convolve(const float4& taps, float (&past)[TAIL], float now) {
  const float sum = __fmaf_rn(taps.w, now, __fmaf_rn(taps.z, past[2], __fmaf_rn(taps.y, past[1], __fmul_rn(taps.x, past[0]))));
  past[0] = past[1], past[1] = past[2], past[2] = now;
  return silu(sum);
}
// What a head keeps of its state, and how strongly it writes. `rate` is -exp(a_log).
__device__ __forceinline__ float2 gates_of(float a, float b, float rate, float bias) {
  return make_float2(expf(rate * softplus(a + bias)), sigmoid(b));
}
// What scales a key or a query to length one; `l`: sums of squares of the 32 channels of each of four warps.
__device__ __forceinline__ float length_scale(const float* l) { return rsqrtf((l[0] + l[1]) + (l[2] + l[3]) + L2_EPS); }
__device__ __forceinline__ float query_scale_of(const float* l) { return __fmul_rn(length_scale(l), rsqrtf((float)KEY_DIM)); }

// Sixteen keys of a value row of the state, four at 32 i, with as many of a key or a query.
__device__ __forceinline__ float dot16(const float4 (&state)[4], const float4 (&vector)[4]) {
  float4 sum = make_float4(__fmul_rn(state[0].x, vector[0].x), __fmul_rn(state[0].y, vector[0].y), __fmul_rn(state[0].z, vector[0].z), __fmul_rn(state[0].w, vector[0].w));
#pragma unroll
  for (int i = 1; i < 4; ++i) {
    sum.x = __fmaf_rn(state[i].x, vector[i].x, sum.x), sum.y = __fmaf_rn(state[i].y, vector[i].y, sum.y);
    sum.z = __fmaf_rn(state[i].z, vector[i].z, sum.z), sum.w = __fmaf_rn(state[i].w, vector[i].w, sum.w);
  }
  return (sum.x + sum.y) + (sum.z + sum.w);
}
// What a row writes along the key (which is of length one), of what it should answer and what the state before its decay answers.
__device__ __forceinline__ float correction(float value, float answer, float2 gate) { return __fmul_rn(value - __fmul_rn(answer, gate.x), gate.y); }
__device__ __forceinline__ void decay16(float4 (&state)[4], float keep) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    state[i].x = __fmul_rn(state[i].x, keep), state[i].y = __fmul_rn(state[i].y, keep);
    state[i].z = __fmul_rn(state[i].z, keep), state[i].w = __fmul_rn(state[i].w, keep);
  }
}
__device__ __forceinline__ void write16(float4 (&state)[4], const float4 (&key)[4], float delta) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    state[i].x = __fmaf_rn(delta, key[i].x, state[i].x), state[i].y = __fmaf_rn(delta, key[i].y, state[i].y);
    state[i].z = __fmaf_rn(delta, key[i].z, state[i].z), state[i].w = __fmaf_rn(delta, key[i].w, state[i].w);
  }
}
// A token of a row of which this lane has the keys 32 i + 4 (lane % 8) of eight lanes. Returns the answer to the query, the same
// in all of them, not yet scaled by the query's length.
__device__ __forceinline__ float recur(float4 (&state)[4], const float4 (&key)[4], const float4 (&query)[4], float value, float2 gate) {
  const float recalled = lanes_sum<ROW_LANES>(dot16(state, key));
  decay16(state, gate.x);
  write16(state, key, correction(value, recalled, gate));
  return lanes_sum<ROW_LANES>(dot16(state, query));
}

// An element of the gated norm but for its last factor, 1 / rms of the head.
__device__ __forceinline__ float gated(float out, float weight, float z) { return __fmul_rn(__fmul_rn(out, weight), silu(z)); }
__device__ __forceinline__ float square_of(float x) { return __fmul_rn(x, x); }
// `quarters`: sums of squares of a head's four quarters.
__device__ __forceinline__ float head_inverse(float4 quarters) {
  return rsqrtf(__fmaf_rn((quarters.x + quarters.y) + (quarters.z + quarters.w), 1.0f / VALUE_DIM, RMS_EPS));
}
