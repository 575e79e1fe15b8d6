// The choice of experts: which eight of the router's logits are largest, and what share each has.
#pragma once
#include "common.cuh"

// A row's record, one of each layer: expert ids, their shares (f32), the shared expert's factor, and whether it is there.
constexpr int CHOICE_WORDS = 32;
constexpr int CHOICE_SHARES = 8;
constexpr int CHOICE_SHARED = 16;
constexpr int CHOICE_TAG = 17;

// A batch's items: count, pad, then {expert, first slot, slots, 0}; then the slots: row * SLOTS + place among its experts.
constexpr int ITEMS = EXPERTS + MAX_ROWS / ROW_GROUP + 4;
constexpr int ITEM_SLOTS = 4 + 4 * ITEMS;

// By one warp: lane i < 8 returns the expert with the i-th largest logit (the lower id among equals) and sets `logit`.
__device__ __forceinline__ u32 choose(const float* logits, int lane, float& logit) {
  constexpr int EACH = EXPERTS / 32;
  u32 order[EACH];  // floats as numbers that sort alike; 0 is taken
  float value[EACH];
  if constexpr (EACH % 4 == 0) {
#pragma unroll
    for (int i = 0; i < EACH; i += 4) *(float4*)(value + i) = *(const float4*)(logits + lane * EACH + i);
  } else {
#pragma unroll
    for (int i = 0; i < EACH; ++i) value[i] = logits[lane * EACH + i];
  }
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const u32 bits = __float_as_uint(value[i]);
    order[i] = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  }
  u32 chosen = 0, chosen_order = 0;
#pragma unroll
  for (int round = 0; round < TOP_K; ++round) {
    u32 best = order[0], place = 0;
#pragma unroll
    for (int i = 1; i < EACH; ++i)
      if (order[i] > best) best = order[i], place = i;
    const u32 largest = __reduce_max_sync(~0u, best);
    const int winner = __ffs(__ballot_sync(~0u, best == largest)) - 1;
    const u32 expert = __shfl_sync(~0u, lane * EACH + place, winner);
    if (lane == round) chosen = expert, chosen_order = largest;
    if (lane == winner) {
#pragma unroll
      for (int i = 0; i < EACH; ++i)
        if (i == place) order[i] = 0;
    }
  }
  logit = __uint_as_float(chosen_order & 0x80000000u ? chosen_order & 0x7fffffffu : ~chosen_order);
  return chosen;
}

// Chooses and writes the record, its tag last. Shares are the softmax over the chosen: what scaling them to sum to one leaves.
__device__ __forceinline__ void write_choice(const float* logits, u32* choice, int lane, u32 id, float logit) {
  const float largest = __shfl_sync(~0u, logit, 0);
  const float e = lane < TOP_K ? __expf(logit - largest) : 0.0f;
  const float total = lanes_sum<TOP_K>(e);
  if (lane < TOP_K) {
    choice[lane] = id;
    choice[CHOICE_SHARES + lane] = __float_as_uint(__fdividef(e, total));
  }
  if (lane == 0) choice[CHOICE_SHARED] = __float_as_uint(sigmoid(logits[EXPERTS]));
  __threadfence();
  __syncwarp();
  if (lane == 0) store_release(choice + CHOICE_TAG, 1);
}
__device__ __forceinline__ u32 publish(const float* logits, u32* choice, int lane) {
  float logit;
  const u32 id = choose(logits, lane, logit);
  write_choice(logits, choice, lane, id, logit);
  return id;
}
