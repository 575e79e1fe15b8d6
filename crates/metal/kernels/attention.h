// What the kernels of attention share: where a page's keys and values are, the norm of a head, rotary embedding, and products with the eight
// query heads of a KV head, which are the eight rows of a SIMD-group's matrices: so they share every key and value that is loaded.
#pragma once
#include "common.h"
#include <metal_simdgroup_matrix>

constant constexpr int GROUP_HEADS = HEADS / KV_HEADS;                    // eight
constant constexpr int PART_HALVES = PAGE_TOKENS * HEAD_DIM;              // keys of a page of one layer and KV head: [position][dim]; values: [dim][position]
constant constexpr int PAGE_HALVES = ATTN_LAYERS * KV_HEADS * 2 * PART_HALVES;
constant constexpr int FIRST_KEY = 2 * ATTN_WIDTH, FIRST_VALUE = FIRST_KEY + KV_HEADS * HEAD_DIM;  // in a row of `projected`
constant constexpr int OWN_DIMS = HEAD_DIM / SIMD;                        // of a head that a lane has: eight
constant constexpr int TURN_LANES = ROTARY_DIM / 2 / OWN_DIMS;            // lanes with the lower half of what turns
constant constexpr int TILE = 8;                                          // rows and columns of a SIMD-group's matrix
constant constexpr int DIM_TILES = HEAD_DIM / TILE;
constant constexpr int POSITION_TILES = PAGE_TOKENS / TILE;
constant constexpr int ATTENTION_SIMDS = 4;
constant constexpr float LOG2_E = 1.44269504088896340736f;
constant constexpr float SCORE_SCALE = 0.0625f * LOG2_E;                  // 1 / sqrt(256), and scores in powers of two
constant constexpr float F16_LARGEST = 65504.0f;

// Keys of page `number` of the pool, of one layer and KV head; values follow PART_HALVES later.
inline device half* page_at(device half* kv, uint number, uint ordinal, uint kv_head) {
  return kv + ulong(number) * PAGE_HALVES + ulong(ordinal * KV_HEADS + kv_head) * (2 * PART_HALVES);
}
// The same of a sequence's `page`.
inline device half* page_of(device const Step* step, device const uint* page_table, device half* kv, uint segment, uint page, uint ordinal,
                            uint kv_head) {
  return page_at(kv, page_table[step->pages[segment] + page], ordinal, kv_head);
}
inline half to_half(float x) { return half(clamp(x, -F16_LARGEST, F16_LARGEST)); }

// cos and sin of `position * frequency`, an angle rounded to f32 as the reference does. Whole turns are taken off with 2 pi in two parts.
inline float2 turn_of(uint position, float frequency) {
  const float angle = float(position) * frequency;
  const float turns = rint(angle * 0.159154943f);
  const float rest = fma(turns, 1.7484555e-7f, fma(-turns, 6.28318548f, angle));
  return float2(cos(rest), sin(rest));
}

// A lane's part of a head: dims `8 lane ..`, and how each of them turns.
struct HeadPart {
  float v[OWN_DIMS];
};
struct Turns {
  float2 of[OWN_DIMS];
};
inline HeadPart load_head(device const float* from, uint lane) {
  const float4 low = ((device const float4*)from)[2 * lane], high = ((device const float4*)from)[2 * lane + 1];
  HeadPart part;
  for (int e = 0; e < 4; ++e) part.v[e] = low[e], part.v[4 + e] = high[e];
  return part;
}
inline Turns turns_of(uint position, device const float* inv_freq, uint lane) {
  Turns turns;
  for (int e = 0; e < OWN_DIMS; ++e) turns.of[e] = float2(1.0f, 0.0f);
  if (lane < uint(2 * TURN_LANES)) {
    for (int e = 0; e < OWN_DIMS; ++e) turns.of[e] = turn_of(position, inv_freq[lane % TURN_LANES * OWN_DIMS + e]);
  }
  return turns;
}

// RMS norm of a head, then rotary embedding of its first ROTARY_DIM, by one SIMD-group.
inline HeadPart norm_and_turn(HeadPart head, HeadPart weight, Turns turns, uint lane) {
  float squares = 0.0f;
  for (int e = 0; e < OWN_DIMS; ++e) squares = fma(head.v[e], head.v[e], squares);
  const float inverse = rsqrt(fma(lanes_sum<SIMD>(squares), 1.0f / HEAD_DIM, RMS_EPS));
  for (int e = 0; e < OWN_DIMS; ++e) {
    const float normed = head.v[e] * inverse * weight.v[e];
    // Dim i of the lower half turns with dim i + ROTARY_DIM / 2, four lanes further.
    const float other = simd_shuffle_xor(normed, ushort(TURN_LANES));
    head.v[e] = fma(lane < uint(TURN_LANES) ? -other : other, turns.of[e].y, normed * turns.of[e].x);
    if (lane >= uint(2 * TURN_LANES)) head.v[e] = normed;
  }
  return head;
}

// The queries of a KV head, normed, turned and scaled, into threadgroup memory `[8][HEAD_DIM]`; by ATTENTION_SIMDS SIMD-groups.
inline void stage_queries(device const float* row, device const float* q_norm, Turns turns, uint kv_head, threadgroup float* queries, uint simd,
                          uint lane) {
  const HeadPart weight = load_head(q_norm, lane);
  for (uint head = simd; head < uint(GROUP_HEADS); head += ATTENTION_SIMDS) {
    const HeadPart query = norm_and_turn(load_head(row + (kv_head * GROUP_HEADS + head) * 2 * HEAD_DIM, lane), weight, turns, lane);
    for (int e = 0; e < OWN_DIMS; ++e) queries[head * HEAD_DIM + lane * OWN_DIMS + e] = query.v[e] * SCORE_SCALE;
  }
}
// The new key of one KV head into its page, by one SIMD-group.
inline void write_key(device const float* row, device const float* k_norm, Turns turns, uint kv_head, device half* page, uint slot, uint lane) {
  const HeadPart key = norm_and_turn(load_head(row + FIRST_KEY + kv_head * HEAD_DIM, lane), load_head(k_norm, lane), turns, lane);
  for (int e = 0; e < OWN_DIMS; ++e) page[slot * HEAD_DIM + lane * OWN_DIMS + e] = to_half(key.v[e]);
}
// One dim of the new value.
inline void write_value(device const float* row, uint kv_head, device half* page, uint slot, uint dim) {
  page[PART_HALVES + dim * PAGE_TOKENS + slot] = to_half(row[FIRST_VALUE + kv_head * HEAD_DIM + dim]);
}

// Which pages of a row's cache a threadgroup has.
struct Span {
  uint first, last, pages;
};
inline Span span_of(uint position, uint index) {
  Span span;
  span.pages = position / PAGE_TOKENS + 1;
  const uint each = (span.pages + SPANS - 1) / SPANS;
  span.first = index * each;
  span.last = min(span.first + each, span.pages);
  return span;
}

// Scores of COUNT tiles of eight positions from tile `first` on, by one SIMD-group, into `scores[8][PAGE_TOKENS]`.
template <int COUNT>
inline void score_tiles(threadgroup const float* queries, device const half* keys, int first, threadgroup float* scores) {
  simdgroup_float8x8 sums[COUNT];
  for (int i = 0; i < COUNT; ++i) sums[i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  for (int dim = 0; dim < HEAD_DIM; dim += TILE) {
    simdgroup_float8x8 query;
    simdgroup_load(query, queries + dim, HEAD_DIM);
    for (int i = 0; i < COUNT; ++i) {
      simdgroup_half8x8 key;
      simdgroup_load(key, keys + (first + i) * TILE * HEAD_DIM + dim, HEAD_DIM, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sums[i], query, key, sums[i]);
    }
  }
  for (int i = 0; i < COUNT; ++i) simdgroup_store(sums[i], scores + (first + i) * TILE, PAGE_TOKENS);
}

// One head's largest score and sum of weights so far.
struct Softmax {
  float most, total;
};
// Takes a page's scores of one head in, by one SIMD-group, and leaves the weights in their place. Returns what earlier weights must be multiplied with.
inline float soften(threadgroup float* scores, uint first_position, uint position, uint lane, thread Softmax& softmax) {
  const float low = first_position + lane <= position ? scores[lane] : -INFINITY;
  const float high = first_position + SIMD + lane <= position ? scores[SIMD + lane] : -INFINITY;
  const float most = max(softmax.most, simd_max(max(low, high)));
  const float low_weight = exp2(low - most), high_weight = exp2(high - most);
  scores[lane] = low_weight, scores[SIMD + lane] = high_weight;
  const float shrink = exp2(softmax.most - most);
  softmax.total = fma(softmax.total, shrink, lanes_sum<SIMD>(low_weight + high_weight));
  softmax.most = most;
  return shrink;
}

// Adds weights times values for COUNT tiles of eight dims from tile `first` on, by one SIMD-group.
template <int COUNT>
inline void add_values(threadgroup const float* weights, device const half* values, int first, thread simdgroup_float8x8 (&sums)[COUNT]) {
  for (int at = 0; at < PAGE_TOKENS; at += TILE) {
    simdgroup_float8x8 weight;
    simdgroup_load(weight, weights + at, PAGE_TOKENS);
    for (int i = 0; i < COUNT; ++i) {
      simdgroup_half8x8 value;
      simdgroup_load(value, values + (first + i) * TILE * PAGE_TOKENS + at, PAGE_TOKENS, ulong2(0, 0), true);
      simdgroup_multiply_accumulate(sums[i], weight, value, sums[i]);
    }
  }
}
