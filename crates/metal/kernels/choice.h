// The choice of experts: which eight of the router's logits are largest, and what share each has. And the choice of a token: the largest logit.
//
// All orders are total: a logit counts as the number that sorts alike, NaN included, and among equals the lower index is first. So ranks are
// a permutation, whatever the logits are, and an expert's number is always one.
#pragma once
#include "common.h"

// A row's record, one of each layer: expert ids, their shares (f32), the shared expert's factor.
constant constexpr int CHOICE_WORDS = 32;
constant constexpr int CHOICE_SHARES = 8;
constant constexpr int CHOICE_SHARED = 16;

// A batch's items: up to ROW_GROUP rows of one expert. First a record that counts them, and those of routed experts; then for each its
// expert, its rows, and for each row its slot: row * SLOTS + place among its experts.
constant constexpr int ITEM_WORDS = 16;
constant constexpr int ITEM_SLOTS = 4;

inline uint sortable(float value) {
  const uint bits = as_type<uint>(value);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
inline uint is_before(uint key, uint expert, uint other_key, uint other_expert) {
  return key > other_key || (key == other_key && expert < other_expert) ? 1 : 0;
}

// By the whole threadgroup: a thread ranks its expert. `keys` and `chosen` are threadgroup memory; a barrier stands between what was done before and
// what is done after.
inline void choose_by_all(device const float* logits, threadgroup uint4* keys, threadgroup uint* chosen, uint thread_index) {
  const uint own = thread_index < EXPERTS ? sortable(logits[thread_index]) : 0;
  if (thread_index < EXPERTS) ((threadgroup uint*)keys)[thread_index] = own;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  uint rank = 0;
  for (uint i = 0; i < EXPERTS; i += 4) {
    const uint4 others = keys[i / 4];
    rank += is_before(others.x, i, own, thread_index) + is_before(others.y, i + 1, own, thread_index);
    rank += is_before(others.z, i + 2, own, thread_index) + is_before(others.w, i + 3, own, thread_index);
  }
  if (thread_index < EXPERTS && rank < TOP_K) chosen[rank] = thread_index;
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Writes a row's record, by one SIMD-group. Shares are the softmax over the chosen: what scaling them to sum to one leaves.
inline void write_choice(device const float* logits, threadgroup const uint* chosen, device uint* choice, uint lane) {
  const uint expert = chosen[lane % TOP_K];
  const float e = exp(logits[expert] - logits[chosen[0]]);
  const float share = e / lanes_sum<TOP_K>(e);
  if (lane < TOP_K) {
    choice[lane] = expert;
    choice[CHOICE_SHARES + lane] = as_type<uint>(share);
  }
  if (lane == 0) choice[CHOICE_SHARED] = as_type<uint>(sigmoid(logits[EXPERTS]));
}

// The same choice by one SIMD-group, and its record.
inline void choose_by_simd(device const float* logits, device uint* choice, uint lane, threadgroup uint* chosen) {
  const int each = (EXPERTS + SIMD - 1) / SIMD;
  uint own[each], ranks[each];
  for (int i = 0; i < each; ++i) {
    const uint expert = lane + i * SIMD;
    own[i] = expert < EXPERTS ? sortable(logits[expert]) : 0;
    ranks[i] = 0;
  }
  for (uint other = 0; other < EXPERTS; ++other) {
    const uint key = sortable(logits[other]);
    for (int i = 0; i < each; ++i) ranks[i] += is_before(key, other, own[i], lane + i * SIMD);
  }
  for (int i = 0; i < each; ++i) {
    const uint expert = lane + i * SIMD;
    if (expert < EXPERTS && ranks[i] < TOP_K) chosen[ranks[i]] = expert;
  }
  simdgroup_barrier(mem_flags::mem_threadgroup);
  write_choice(logits, chosen, choice, lane);
}

// ---- the largest logit ----------------------------------------------------------------------------------------------------

// VOCAB as index: none yet.
struct Best {
  float logit;
  uint index;
};
inline Best no_best() {
  Best best;
  best.logit = -INFINITY, best.index = VOCAB;
  return best;
}
// NaN is better than all: a row that has one has no token.
inline Best better(Best best, float logit, uint index) {
  if (logit > best.logit || (logit == best.logit && index < best.index) || isnan(logit)) best.logit = logit, best.index = index;
  return best;
}
inline Best best_of_simd(Best best) {
  for (int bit = SIMD / 2; bit > 0; bit /= 2) {
    best = better(best, simd_shuffle_xor(best.logit, ushort(bit)), simd_shuffle_xor(best.index, ushort(bit)));
  }
  return best;
}
inline uint2 packed(Best best) { return uint2(as_type<uint>(best.logit), best.index); }
inline Best best_of(threadgroup const uint2* each, int count) {
  Best best = no_best();
  for (int i = 0; i < count; ++i) best = better(best, as_type<float>(each[i].x), each[i].y);
  return best;
}
