// What all kernels share: the geometry's constants, the step block, and sums over SIMD-groups and threadgroups.
//
// The geometry comes as macros (README.md), so that every loop has a constant length.
#pragma once
#include <metal_stdlib>
using namespace metal;

// A multiplication and an addition become one where the source says fma and nowhere else: a row's bits must not depend on which kernel the compiler
// looks at.
#pragma STDC FP_CONTRACT OFF

constant constexpr int MAX_ROWS = 32;     // rows of a pass
constant constexpr int ROW_GROUP = 4;     // rows of a batch that a threadgroup multiplies at once
constant constexpr int PAGE_TOKENS = 64;  // positions in a page of the KV cache
constant constexpr int SPANS = 64;        // parts that a context is cut into at the most
constant constexpr int GROUP = 64;        // inputs that share a scale and a bias
constant constexpr int SIMD = 32;         // lanes of a SIMD-group
constant constexpr int PRODUCT_THREADS = 256;
constant constexpr int PRODUCT_SIMDS = PRODUCT_THREADS / SIMD;

constant constexpr int KEY_WIDTH = KEY_HEADS * KEY_DIM;
constant constexpr int VALUE_WIDTH = VALUE_HEADS * VALUE_DIM;
constant constexpr int CHANNELS = 2 * KEY_WIDTH + VALUE_WIDTH;                   // of the convolution: queries, keys, values
constant constexpr int TAIL = CONV_WIDTH - 1;                                    // past inputs that it looks at
constant constexpr int DELTA_ROWS = CHANNELS + VALUE_WIDTH + 2 * VALUE_HEADS;    // of delta_in: those, z, b, a
constant constexpr int DELTA_STRIDE = (DELTA_ROWS + 15) / 16 * 16;               // rows of `projected`: whole tiles of 16, as the plan says
constant constexpr int ATTN_WIDTH = HEADS * HEAD_DIM;
constant constexpr int ATTN_ROWS = 2 * ATTN_WIDTH + 2 * KV_HEADS * HEAD_DIM;     // of attn_in: query and gate per head, keys, values
constant constexpr int ATTN_STRIDE = (ATTN_ROWS + 15) / 16 * 16;
constant constexpr int ROUTER_STRIDE = (EXPERTS + 1 + 15) / 16 * 16;
constant constexpr int SLOTS = TOP_K + 1;                                        // experts of a row, the shared one last

// A state of the pool: recurrent matrices of all Gated DeltaNet layers, then their convolution tails, f32.
constant constexpr int HEAD_STATE = VALUE_DIM * KEY_DIM;
constant constexpr uint STATE_TAILS = uint(DELTA_LAYERS) * VALUE_HEADS * HEAD_STATE;
constant constexpr uint STATE_FLOATS = STATE_TAILS + uint(DELTA_LAYERS) * TAIL * CHANNELS;

static_assert(HEAD_DIM == 256 && ROTARY_DIM == 64, "attention is written for heads of 256 of which 64 turn");
static_assert(KEY_DIM == 128 && VALUE_DIM == 128 && CONV_WIDTH == 4, "the recurrence is written for heads of 128 and four taps");
static_assert(HEADS == 8 * KV_HEADS, "the eight query heads of a KV head are the rows of a SIMD-group's matrices");
static_assert(TOP_K == 8 && EXPERTS % 4 == 0 && EXPERTS <= PRODUCT_THREADS, "a thread ranks one of at most 256 experts");
static_assert(SHARED_WIDTH == EXPERT_WIDTH, "the shared expert is as wide as the others");
static_assert(VALUE_HEADS % KEY_HEADS == 0, "value heads share key heads evenly");

// What a pass works on; written by the host (README.md). A segment is one sequence's consecutive rows.
struct Step {
  uint rows, segments, head_rows, pad;
  uint token[MAX_ROWS];     // FROM_SAMPLE: the token that the sequence sampled last
  uint position[MAX_ROWS];
  uint segment[MAX_ROWS];
  uint first_row[MAX_ROWS];  // of a segment
  uint row_count[MAX_ROWS];
  uint head_row[MAX_ROWS];
  ulong state[MAX_ROWS];    // of a segment: its place in the pool of states
  ulong pages[MAX_ROWS];    // its first entry in the table of pages
  ulong sampled[MAX_ROWS];  // its place among the sampled tokens
};
static_assert(sizeof(Step) == 16 + 6 * 4 * MAX_ROWS + 3 * 8 * MAX_ROWS, "the host writes these bytes");
constant constexpr uint FROM_SAMPLE = 0xffffffffu;

// What a kernel gets that is no buffer: the layer's number among those of its kind.
struct LayerArgs {
  uint ordinal;
};

inline float bf16(ushort bits) { return as_type<float>(uint(bits) << 16); }
inline float sigmoid(float x) { return 1.0f / (1.0f + exp(-x)); }
inline float silu(float x) { return x * sigmoid(x); }

// Sums over lanes that differ in the bits of WIDTH - 1; every lane gets it, added in the same order whatever the others do.
template <int WIDTH> inline float lanes_sum(float x) {
  for (int bit = WIDTH / 2; bit > 0; bit /= 2) x += simd_shuffle_xor(x, ushort(bit));
  return x;
}
