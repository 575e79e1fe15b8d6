// What the kernels of attention share: where a page's keys and values are and how they are stored, the norm of a head, rotary embedding, and products with
// the eight query heads of a KV head, which are the eight rows of a SIMD-group's matrices: so they share every key and value that is loaded.
//
// What the host stores keys and values as (KV_Q8) is known when this is compiled. Only what stands between `stored as` and its end knows of it:
// write_key, write_value, scales_of, score_tiles, add_values.
#pragma once
#include "common.h"
#include <metal_simdgroup_matrix>

constant constexpr int GROUP_HEADS = HEADS / KV_HEADS;                    // eight
constant constexpr int FIRST_KEY = 2 * ATTN_WIDTH, FIRST_VALUE = FIRST_KEY + KV_HEADS * HEAD_DIM;  // in a row of `projected`
constant constexpr int OWN_DIMS = HEAD_DIM / SIMD;                        // of a head that a lane has: eight
constant constexpr int TURN_LANES = ROTARY_DIM / 2 / OWN_DIMS;            // lanes with the lower half of what turns
constant constexpr int TILE = 8;                                          // rows and columns of a SIMD-group's matrix
constant constexpr int DIM_TILES = HEAD_DIM / TILE;
constant constexpr int POSITION_TILES = PAGE_TOKENS / TILE;
constant constexpr int ATTENTION_SIMDS = 4;
constant constexpr float LOG2_E = 1.44269504088896340736f;
constant constexpr float SCORE_SCALE = 0.0625f * LOG2_E;                  // 1 / sqrt(256), and scores in powers of two

// What a page has of one layer and KV head is keys, then values, PART elements each, then the scales of the keys and of the values, where there are any.
constant constexpr int PART = PAGE_TOKENS * HEAD_DIM;
#if KV_Q8
typedef char Kv;                                                          // [position][dim] in both parts
constant constexpr int SCALE_BYTES = PAGE_TOKENS * 4;                     // f32 [position] of each part
constant constexpr int HEAD_PAGE = 2 * (PART + SCALE_BYTES);
constant constexpr int STRIP = 64;                                        // dims of eight rows that a SIMD-group unpacks at once
constant constexpr int STRIP_QUADS = TILE * STRIP / 4;                    // in a SIMD-group's threadgroup memory
#else
typedef half Kv;                                                          // keys [position][dim], values [dim][position]
constant constexpr int HEAD_PAGE = 2 * PART;
constant constexpr int STRIP_QUADS = 1;                                   // nothing is unpacked, and no array is empty
#endif
constant constexpr int PAGE_KVS = ATTN_LAYERS * KV_HEADS * HEAD_PAGE;

// Keys of page `number` of the pool, of one layer and KV head; values follow PART later.
inline device Kv* page_at(device Kv* kv, uint number, uint ordinal, uint kv_head) {
  return kv + ulong(number) * PAGE_KVS + ulong(ordinal * KV_HEADS + kv_head) * HEAD_PAGE;
}
// The same of a sequence's `page`.
inline device Kv* page_of(device const Step* step, device const uint* page_table, device Kv* kv, uint segment, uint page, uint ordinal,
                          uint kv_head) {
  return page_at(kv, page_table[step->pages[segment] + page], ordinal, kv_head);
}

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

// One head's largest score and sum of weights so far.
struct Softmax {
  float most, total;
};
// What a lane's two positions of a page, `lane` and `SIMD + lane`, are multiplied with.
struct Scales {
  float key[2], value[2];
};
// Takes a page's scores of one head in, by one SIMD-group, and leaves the weights in their place, ready for add_values. Returns what earlier weights must be
// multiplied with.
inline float soften(threadgroup float* scores, thread const Scales& scales, uint first_position, uint position, uint lane, thread Softmax& softmax) {
  const float low = first_position + lane <= position ? scores[lane] * scales.key[0] : -INFINITY;
  const float high = first_position + SIMD + lane <= position ? scores[SIMD + lane] * scales.key[1] : -INFINITY;
  const float most = max(softmax.most, simd_max(max(low, high)));
  const float low_weight = exp2(low - most), high_weight = exp2(high - most);
  scores[lane] = low_weight * scales.value[0], scores[SIMD + lane] = high_weight * scales.value[1];
  const float shrink = exp2(softmax.most - most);
  softmax.total = fma(softmax.total, shrink, lanes_sum<SIMD>(low_weight + high_weight));
  softmax.most = most;
  return shrink;
}

// The new key of one KV head, by one SIMD-group.
inline HeadPart new_key(device const float* row, device const float* k_norm, Turns turns, uint kv_head, uint lane) {
  return norm_and_turn(load_head(row + FIRST_KEY + kv_head * HEAD_DIM, lane), load_head(k_norm, lane), turns, lane);
}

// ---- stored as 8-bit integers with a scale for each position of a KV head, or as f16 -----------------------------------------------------

#if KV_Q8
constant constexpr float Q8_MOST = 127.0f;

inline device float* key_scales(device Kv* page) { return (device float*)(page + 2 * PART); }
inline device float* value_scales(device Kv* page) { return (device float*)(page + 2 * PART + SCALE_BYTES); }

// A key or a value into row `slot` of a part, by one SIMD-group: the bytes and the scale that the CPU stores of the same numbers (`quantize_row`). The largest
// magnitude is 127 steps of a scale; each number is off by half of one at the most, NaN becomes 0, and infinity what it is beside the largest f32.
inline void store_row(HeadPart row, device Kv* part, device float* scales, uint slot, uint lane) {
  float largest = 0.0f;
  for (int e = 0; e < OWN_DIMS; ++e) largest = fmax(largest, fabs(row.v[e]));
  largest = fmin(simd_max(largest), FLT_MAX);
  uint bytes[2] = {0, 0};
  for (int e = 0; e < OWN_DIMS; ++e) {
    const float steps = row.v[e] / largest * Q8_MOST;  // NaN in a row of zeros
    const int byte = isnan(steps) ? 0 : int(clamp(rint(steps), -Q8_MOST, Q8_MOST));
    bytes[e / 4] |= (uint(byte) & 0xffu) << (8 * (e % 4));
  }
  ((device uint2*)(part + slot * HEAD_DIM))[lane] = uint2(bytes[0], bytes[1]);
  if (lane == 0) scales[slot] = largest / Q8_MOST;
}
// The new key of one KV head into its page, by one SIMD-group.
inline void write_key(device const float* row, device const float* k_norm, Turns turns, uint kv_head, device Kv* page, uint slot, uint lane) {
  store_row(new_key(row, k_norm, turns, kv_head, lane), page, key_scales(page), slot, lane);
}
// The new value, by THREADS threads, of whom one SIMD-group does it.
template <int THREADS>
inline void write_value(device const float* row, uint kv_head, device Kv* page, uint slot, uint thread_index) {
  const uint lane = thread_index % SIMD;
  if (thread_index / SIMD == 1) store_row(load_head(row + FIRST_VALUE + kv_head * HEAD_DIM, lane), page + PART, value_scales(page), slot, lane);
}
inline Scales scales_of(device Kv* page, uint lane) {
  Scales scales;
  for (int i = 0; i < 2; ++i) scales.key[i] = key_scales(page)[i * SIMD + lane], scales.value[i] = value_scales(page)[i * SIMD + lane];
  return scales;
}

// STRIP elements of each of eight rows, 16 bytes a lane, into a SIMD-group's threadgroup memory as halves, which have them exactly: [8][STRIP].
inline void unpack(device const Kv* rows, threadgroup half4* strip, uint lane) {
  const uint row = lane / (STRIP / 16), part = lane % (STRIP / 16);
  const uint4 words = *(device const uint4*)(rows + row * HEAD_DIM + part * 16);
  simdgroup_barrier(mem_flags::mem_threadgroup);
  for (int i = 0; i < 4; ++i) strip[(row * STRIP + part * 16) / 4 + i] = half4(as_type<char4>(words[i]));
  simdgroup_barrier(mem_flags::mem_threadgroup);
}

// Scores of ROWS times eight queries with COUNT tiles of eight positions from tile `first` on, without the scales of the keys, by one SIMD-group, into
// `scores[ROWS][8][PAGE_TOKENS]`.
template <int COUNT, int ROWS>
inline void score_tiles(threadgroup const float* queries, device const Kv* keys, int first, threadgroup float* scores, threadgroup half4* strip, uint lane) {
  for (int i = 0; i < COUNT; ++i) {
    simdgroup_float8x8 sums[ROWS];
    for (int r = 0; r < ROWS; ++r) sums[r] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    for (int from = 0; from < HEAD_DIM; from += STRIP) {
      unpack(keys + (first + i) * TILE * HEAD_DIM + from, strip, lane);
      for (int dim = 0; dim < STRIP; dim += TILE) {
        simdgroup_half8x8 key;
        simdgroup_load(key, (threadgroup const half*)strip + dim, STRIP, ulong2(0, 0), true);
        for (int r = 0; r < ROWS; ++r) {
          simdgroup_float8x8 query;
          simdgroup_load(query, queries + r * GROUP_HEADS * HEAD_DIM + from + dim, HEAD_DIM);
          simdgroup_multiply_accumulate(sums[r], query, key, sums[r]);
        }
      }
    }
    for (int r = 0; r < ROWS; ++r) simdgroup_store(sums[r], scores + r * GROUP_HEADS * PAGE_TOKENS + (first + i) * TILE, PAGE_TOKENS);
  }
}

// Adds ROWS times eight heads' weights, which have the scales of the values in them, times values for COUNT tiles of eight dims from tile `first` on, by one
// SIMD-group.
template <int COUNT, int ROWS>
inline void add_values(threadgroup const float* weights, device const Kv* values, int first, thread simdgroup_float8x8 (&sums)[ROWS][COUNT],
                       threadgroup half4* strip, uint lane) {
  static_assert(COUNT * TILE % STRIP == 0, "tiles of whole strips");
  for (int at = 0; at < PAGE_TOKENS; at += TILE) {
    simdgroup_float8x8 weight[ROWS];
    for (int r = 0; r < ROWS; ++r) simdgroup_load(weight[r], weights + r * GROUP_HEADS * PAGE_TOKENS + at, PAGE_TOKENS);
    for (int from = 0; from < COUNT * TILE; from += STRIP) {
      unpack(values + at * HEAD_DIM + first * TILE + from, strip, lane);
      for (int dim = 0; dim < STRIP; dim += TILE) {
        simdgroup_half8x8 value;
        simdgroup_load(value, (threadgroup const half*)strip + dim, STRIP);
        const int i = (from + dim) / TILE;
        for (int r = 0; r < ROWS; ++r) simdgroup_multiply_accumulate(sums[r][i], weight[r], value, sums[r][i]);
      }
    }
  }
}
#else
constant constexpr float F16_LARGEST = 65504.0f;
inline half to_half(float x) { return half(clamp(x, -F16_LARGEST, F16_LARGEST)); }

// The new key of one KV head into its page, by one SIMD-group.
inline void write_key(device const float* row, device const float* k_norm, Turns turns, uint kv_head, device Kv* page, uint slot, uint lane) {
  const HeadPart key = new_key(row, k_norm, turns, kv_head, lane);
  for (int e = 0; e < OWN_DIMS; ++e) page[slot * HEAD_DIM + lane * OWN_DIMS + e] = to_half(key.v[e]);
}
// The new value, by THREADS threads.
template <int THREADS>
inline void write_value(device const float* row, uint kv_head, device Kv* page, uint slot, uint thread_index) {
  for (uint dim = thread_index; dim < HEAD_DIM; dim += THREADS) {
    page[PART + dim * PAGE_TOKENS + slot] = to_half(row[FIRST_VALUE + kv_head * HEAD_DIM + dim]);
  }
}
inline Scales scales_of(device Kv*, uint) {
  Scales scales;
  for (int i = 0; i < 2; ++i) scales.key[i] = 1.0f, scales.value[i] = 1.0f;
  return scales;
}

// Scores of ROWS times eight queries with COUNT tiles of eight positions from tile `first` on, by one SIMD-group, into `scores[ROWS][8][PAGE_TOKENS]`.
template <int COUNT, int ROWS>
inline void score_tiles(threadgroup const float* queries, device const Kv* keys, int first, threadgroup float* scores, threadgroup half4*, uint) {
  simdgroup_float8x8 sums[ROWS][COUNT];
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < COUNT; ++i) sums[r][i] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int dim = 0; dim < HEAD_DIM; dim += TILE) {
    simdgroup_float8x8 query[ROWS];
    for (int r = 0; r < ROWS; ++r) simdgroup_load(query[r], queries + r * GROUP_HEADS * HEAD_DIM + dim, HEAD_DIM);
    for (int i = 0; i < COUNT; ++i) {
      simdgroup_half8x8 key;
      simdgroup_load(key, keys + (first + i) * TILE * HEAD_DIM + dim, HEAD_DIM, ulong2(0, 0), true);
      for (int r = 0; r < ROWS; ++r) simdgroup_multiply_accumulate(sums[r][i], query[r], key, sums[r][i]);
    }
  }
  for (int r = 0; r < ROWS; ++r) {
    for (int i = 0; i < COUNT; ++i) simdgroup_store(sums[r][i], scores + r * GROUP_HEADS * PAGE_TOKENS + (first + i) * TILE, PAGE_TOKENS);
  }
}

// Adds ROWS times eight heads' weights times values for COUNT tiles of eight dims from tile `first` on, by one SIMD-group.
template <int COUNT, int ROWS>
inline void add_values(threadgroup const float* weights, device const Kv* values, int first, thread simdgroup_float8x8 (&sums)[ROWS][COUNT],
                       threadgroup half4*, uint) {
  for (int at = 0; at < PAGE_TOKENS; at += TILE) {
    simdgroup_float8x8 weight[ROWS];
    for (int r = 0; r < ROWS; ++r) simdgroup_load(weight[r], weights + r * GROUP_HEADS * PAGE_TOKENS + at, PAGE_TOKENS);
    for (int i = 0; i < COUNT; ++i) {
      simdgroup_half8x8 value;
      simdgroup_load(value, values + (first + i) * TILE * PAGE_TOKENS + at, PAGE_TOKENS, ulong2(0, 0), true);
      for (int r = 0; r < ROWS; ++r) simdgroup_multiply_accumulate(sums[r][i], weight[r], value, sums[r][i]);
    }
  }
}
#endif
