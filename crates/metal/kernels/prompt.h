// What the kernels of prompts are told: many consecutive tokens of one sequence. Written by the host (`lily_gpu::prompt`).
#pragma once
#include "common.h"

struct Prompt {
  uint rows, position;  // of the first token, absolute
  ulong state;          // its place in the pool of states
  ulong pages;          // the sequence's first entry in the table of pages
  ulong pad;
};
static_assert(sizeof(Prompt) == 32, "the tokens follow it");
inline device const uint* tokens_of(device const Prompt* prompt) { return (device const uint*)(prompt + 1); }

// Rows that one threadgroup chooses experts for, and sorts: a thread has one of their slots.
constant constexpr int SORT_ROWS = 32;
static_assert(SORT_ROWS * TOP_K == PRODUCT_THREADS, "a thread has a slot");
