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

// A row of activations rounded for quantized products, of `chunks` times 256 inputs: planes, factors, and what the sums are
// multiplied with. `packed` of decode's moe_route is the same for HIDDEN inputs.
__host__ __device__ constexpr int rounded_bytes(int chunks) { return chunks * (512 + 32) + 16; }
constexpr int HIDDEN_PARTS = ceil_div(HIDDEN, CHUNK), EXPERT_PARTS = ceil_div(EXPERT_WIDTH, CHUNK);
constexpr int VALUE_PARTS = ceil_div(VALUE_WIDTH, CHUNK), ATTN_PARTS = ceil_div(ATTN_WIDTH, CHUNK);

// Rows of experts: a slot is 9 row + place among the row's experts, the shared one last. moe_route sorts slots by expert and
// leaves runs of at most GEMM_TOKENS slots of one expert: how many, then {expert, first sorted slot, slots, -} of each.
constexpr int RUN_WORDS = 4;

// Kernels of a prompt start when the one before them is done.
__device__ __forceinline__ void begin() {
  launch_dependents();
  wait_predecessors();
}
// As LAUNCH; `rows` is what a block takes of what the plan counts along y. Where `blocks` is 0, x is the plan's to say.
#define LAUNCH_ROWS(kernel, blocks, threads, shared, rows) LAUNCH_GROUPS(kernel, blocks, threads, shared, rows)
#define LAUNCH_PLANNED(kernel, threads, shared) LAUNCH_ROWS(kernel, 0, threads, shared, 1)
