// What the kernels of a prompt share: many consecutive tokens of one sequence.
#pragma once
#include "common.cuh"

// Which tokens; written by the host before the pass. Behind it stand `rows` token ids.
struct Prompt {
  u32 rows;      // tokens of this pass
  u32 position;  // absolute, of the first
  u64 state;     // f32: states of all Gated DeltaNet layers, then their convolution tails
  u64 pages;     // table of page addresses
  u64 pad;
};
static_assert(sizeof(Prompt) == 32, "the host writes these bytes");

// Rows of activations that meet quantized weights ("operands") are f16 and lie as the tensor cores look for them in shared memory:
// [groups of 64 inputs][rows, a multiple of eight][128 bytes], the 16-byte units of a row swapped by the row's number (Hopper's swizzle
// of 128 bytes). So the copy engine brings a group of many rows in one piece.
// Within a group, unit 4 h + i of a row has of each t < 4 the inputs 16 t + 8 h + {i, i + 4}: the order in which weights are unpacked.
constexpr int EIGHT = 8, GROUP_BYTES = GROUP * 2, CHUNK_GROUPS = CHUNK / GROUP;
__host__ __device__ constexpr u32 eights(u32 rows) { return (rows + EIGHT - 1) / EIGHT * EIGHT; }
// Bytes from a group to the next, of the rows of a pass and of all places for slots.
__host__ __device__ constexpr u32 group_bytes(u32 rows) { return eights(rows) * GROUP_BYTES; }
// What products leave is f16 and lies as they put it together ("results"): [matrix rows, in whole columns of 128][tokens][256 bytes], the
// 16-byte units of a token's column swapped by the token's number. The last column may be partly filled.
constexpr int COLUMN = 128;
constexpr int COLUMN_BYTES = COLUMN * 2;
// Where the results of `token` from matrix row `n` on are, of which it is a multiple of eight: a unit.
__device__ __forceinline__ const u8* results_at(const u8* results, u32 n, u32 token, u32 tokens) {
  return results + ((u64)(n / COLUMN) * tokens + token) * COLUMN_BYTES + ((n % COLUMN / 8) ^ token % EIGHT) * 16;
}
__device__ __forceinline__ float2 f16_floats(u32 pair) { return make_float2(from_f16((u16)pair), from_f16((u16)(pair >> 16))); }
// Eight of them, of a multiple of eight on; two, of an even one on, packed; one.
__device__ __forceinline__ void unpack_results(uint4 unit, float (&v)[8]) {
  const u32 words[4] = {unit.x, unit.y, unit.z, unit.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = f16_floats(words[i]);
    v[2 * i] = two.x, v[2 * i + 1] = two.y;
  }
}
__device__ __forceinline__ void eight_results(const u8* results, u32 n, u32 token, u32 tokens, float (&v)[8]) {
  unpack_results(*(const uint4*)results_at(results, n, token, tokens), v);
}
__device__ __forceinline__ u32 two_results(const u8* results, u32 n, u32 token, u32 tokens) {
  return *(const u32*)(results_at(results, n, token, tokens) + n % 8 * 2);
}
__device__ __forceinline__ float one_result(const u8* results, u32 n, u32 token, u32 tokens) {
  return from_f16(*(const u16*)(results_at(results, n, token, tokens) + n % 8 * 2));
}
constexpr int HIDDEN_PARTS = ceil_div(HIDDEN, CHUNK), EXPERT_PARTS = ceil_div(EXPERT_WIDTH, CHUNK);
constexpr int VALUE_PARTS = ceil_div(VALUE_WIDTH, CHUNK), ATTN_PARTS = ceil_div(ATTN_WIDTH, CHUNK);

// Rows of experts: a slot is 9 row + place among the row's experts, the shared one last. moe_route gives each slot a place, sorted by
// expert, an expert's first at a multiple of eight, the shared expert's last; and leaves runs of at most RUN_TOKENS places of one expert: how
// many, then {expert, first place, places, for the shared one its first row} of each.
constexpr int RUN_WORDS = 4;
// Places that there may be, an expert's last eight partly filled.
__host__ __device__ constexpr u32 places_of(u32 rows) { return rows * TOP_K + EIGHT * EXPERTS + eights(rows); }

// As LAUNCH; `rows` is what a block takes of what the plan counts along y. Where `blocks` is 0, x is the plan's to say.
#define LAUNCH_ROWS(kernel, blocks, threads, shared, rows) LAUNCH_GROUPS(kernel, blocks, threads, shared, rows)
#define LAUNCH_PLANNED(kernel, threads, shared) LAUNCH_ROWS(kernel, 0, threads, shared, 1)
