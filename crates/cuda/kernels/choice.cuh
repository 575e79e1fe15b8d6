// The choice of experts: which eight of the router's logits are largest, and what share each has.
#pragma once
#include "common.cuh"

// A row's record, one of each layer: expert ids, their shares (f32), the shared expert's factor, and whether it is there.
constexpr int CHOICE_WORDS = 32;
constexpr int CHOICE_SHARES = 8;
constexpr int CHOICE_SHARED = 16;
constexpr int CHOICE_TAG = 17;

// A batch's items: up to eight rows of one expert. First a record that counts them, and those of routed experts; then for each
// its expert, its rows, and for each row its slot: row * SLOTS + place among its experts.
constexpr int ITEM_WORDS = 16;
constexpr int ITEM_SLOTS = 4;

// What a warp needs of shared memory to choose.
struct ChoiceRoom {
  u32 largest[32];
  uint2 candidates[EXPERTS], chosen[TOP_K];  // order, expert
};

// By one warp: lane i < 8 returns the expert with the i-th largest logit (the lower id among equals) and sets `logit`.
//
// Each lane has EXPERTS / 32 of the logits. Those that are at least the eighth largest of the lanes' largest are candidates,
// about ten as a rule; each is ranked by counting those before it. Eight rounds of "the largest, and without it" took four
// times as long: they are a chain of eight votes.
__device__ __forceinline__ u32 choose(const float* logits, int lane, ChoiceRoom& room, float& logit) {
  constexpr int EACH = EXPERTS / 32;
  u32 order[EACH], largest = 0;  // floats as numbers that sort alike
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
    largest = max(largest, order[i]);
  }
  room.largest[lane] = largest;
  __syncwarp();
  u32 before[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < 32; i += 4) {
    const uint4 other = *(const uint4*)(room.largest + i);
    before[0] += other.x > largest, before[1] += other.y > largest, before[2] += other.z > largest, before[3] += other.w > largest;
  }
  const u32 rank = (before[0] + before[1]) + (before[2] + before[3]);
  const u32 least = __reduce_min_sync(~0u, rank < TOP_K ? largest : ~0u);
  u32 count = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const u32 with = __ballot_sync(~0u, order[i] >= least);
    if (order[i] >= least) room.candidates[count + __popc(with & ((1u << lane) - 1))] = make_uint2(order[i], lane * EACH + i);
    count += __popc(with);
  }
  __syncwarp();
  for (u32 c = lane; c < count; c += 32) {
    const uint2 own = room.candidates[c];
    u32 place = 0;
#pragma unroll 4
    for (u32 i = 0; i < count; ++i) {
      const uint2 other = room.candidates[i];
      place += other.x > own.x || (other.x == own.x && other.y < own.y);
    }
    if (place < TOP_K) room.chosen[place] = own;
  }
  __syncwarp();
  const uint2 chosen = room.chosen[lane % TOP_K];
  logit = __uint_as_float(chosen.x & 0x80000000u ? chosen.x & 0x7fffffffu : ~chosen.x);
  return chosen.y;
}

// Writes the record. Shares are the softmax over the chosen: what scaling them to sum to one leaves.
__device__ __forceinline__ void write_choice(const float* logits, u32* choice, int lane, u32 id, float logit) {
  const float largest = __shfl_sync(~0u, logit, 0);
  const float e = lane < TOP_K ? __expf(logit - largest) : 0.0f;
  const float total = lanes_sum<TOP_K>(e);
  if (lane < TOP_K) {
    choice[lane] = id;
    choice[CHOICE_SHARES + lane] = __float_as_uint(__fdividef(e, total));
  }
  if (lane == 0) choice[CHOICE_SHARED] = __float_as_uint(sigmoid(logits[EXPERTS]));
}
// Says that the record is there, to kernels that look at it before this one is done.
__device__ __forceinline__ void tag_choice(u32* choice, int lane) {
  __threadfence();
  __syncwarp();
  if (lane == 0) store_release(choice + CHOICE_TAG, 1);
}
// Chooses, writes the record and tags it.
__device__ __forceinline__ u32 publish(const float* logits, u32* choice, int lane, ChoiceRoom& room) {
  float logit;
  const u32 id = choose(logits, lane, room, logit);
  write_choice(logits, choice, lane, id, logit);
  tag_choice(choice, lane);
  return id;
}
