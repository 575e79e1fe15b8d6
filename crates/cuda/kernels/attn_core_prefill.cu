// attn_core of a prompt: keys and values into the cache, attention of all new positions over the cache, the output gate.
//
// attn_kv_prefill: keys and values into the cache, queries to where attention finds them; grid (KV heads, groups of positions).
// attn_expand_prefill: what is stored in 8 bits as f16, as attention reads it.
// attn_core_prefill: attn_wgmma.cuh on Hopper, attn_mma.cuh elsewhere. What it gives is written as operands of the projection after it.
#include "attention.cuh"
#include "gemm.cuh"

// Queries of a group of positions with the eight query heads of a KV head, normed and turned: rows [position][head] of f16, in four blocks of
// 64 dims whose rows are LINE_BYTES and swapped like those of keys. Groups begin at multiples of QUERY_POSITIONS; `queries` is
// [groups][KV_HEADS] of them.
constexpr int QUERY_POSITIONS = 16, QUERY_ROWS = QUERY_POSITIONS * GROUP_HEADS;
constexpr int QUERY_BLOCK_BYTES = QUERY_ROWS * LINE_BYTES, QUERY_BYTES = QUERY_ROWS * ROW_BYTES;
static_assert(PAGE_TOKENS % QUERY_POSITIONS == 0, "a group's positions are of one page");
__device__ __forceinline__ int query_place(int row, int unit) {
  return unit / LINE_UNITS * QUERY_BLOCK_BYTES + row * LINE_BYTES + line_unit(unit % LINE_UNITS, row) * 16;
}

// A warp has a position's key and queries; a thread has a dim's values of eight positions.
constexpr int KV_THREADS = 32 * QUERY_POSITIONS;
static_assert(KV_THREADS == HEAD_DIM * QUERY_POSITIONS / 8, "16 bytes of values a thread");
LAUNCH_ROWS(attn_kv_prefill, KV_HEADS, KV_THREADS, 0, QUERY_POSITIONS)
extern "C" __global__ void __launch_bounds__(KV_THREADS)
    attn_kv_prefill(const Prompt* prompt, const u8* proj, const float* q_norm, const float* k_norm, const float* inv_freq, u8* queries, u32 ordinal) {
  const int start = prompt->position, rows = prompt->rows, kv_head = blockIdx.x, group = blockIdx.y;
  const int position0 = (start / QUERY_POSITIONS + group) * QUERY_POSITIONS, first_row = position0 - start;
  if (first_row >= rows) return;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = first_row + warp;
  const int dim = threadIdx.x % HEAD_DIM, eight = threadIdx.x / HEAD_DIM * 8;
  __shared__ u8 value_bytes[KV8 ? QUERY_POSITIONS : 1][HEAD_DIM];
  const auto there = [&](int row) { return row >= 0 && row < rows; };
  // All is asked for before anything is waited for.
  uint4 query[GROUP_HEADS] = {};
  float key[8], q_weight[8], k_weight[8], value[8];
  if (there(row)) {
#pragma unroll
    for (int head = 0; head < GROUP_HEADS; ++head) query[head] = *(const uint4*)results_at(proj, (kv_head * GROUP_HEADS + head) * 2 * HEAD_DIM + lane * 8, row, rows);
    eight_results(proj, FIRST_KEY + kv_head * HEAD_DIM + lane * 8, row, rows, key);
  }
  if (KV8 && there(row)) eight_results(proj, FIRST_VALUE + kv_head * HEAD_DIM + lane * 8, row, rows, value);
#pragma unroll
  for (int i = 0; i < 8 && !KV8; ++i) {
    const int of = first_row + eight + i;
    value[i] = there(of) ? one_result(proj, FIRST_VALUE + kv_head * HEAD_DIM + dim, of, rows) : 0;
  }
  load_head(k_norm, lane, k_weight);
  float2 turns[8];
  turns_of(position0 + warp, inv_freq, lane, turns);

  u8* page = page_of(prompt->pages, position0 / PAGE_TOKENS, ordinal, kv_head);
  const int slot = position0 % PAGE_TOKENS;
  if (KV8) {
    // A warp rounds a position's value; then a thread has a dim's of eight positions.
    if (there(row)) {
      const Row8 rounded = round8(value);
      *(uint2*)&value_bytes[warp][lane * 8] = rounded.bytes;
      if (lane == 0) value8_scales(page)[slot + warp] = rounded.scale;
    }
    __syncthreads();
    u8* to = page + value8_place(dim, slot + eight);
    if (there(first_row + eight) && there(first_row + eight + 7)) {
      u32 words[2] = {0, 0};
#pragma unroll
      for (int i = 0; i < 8; ++i) words[i / 4] |= (u32)value_bytes[eight + i][dim] << i % 4 * 8;
      *(uint2*)to = make_uint2(words[0], words[1]);
    } else {
#pragma unroll
      for (int i = 0; i < 8; ++i)
        if (there(first_row + eight + i)) to[i] = value_bytes[eight + i][dim];
    }
  } else if (there(first_row + eight) && there(first_row + eight + 7)) {
    *(uint4*)(page + value_place(dim, slot + eight)) = pack8(value);
  } else {
#pragma unroll
    for (int i = 0; i < 8; ++i)
      if (there(first_row + eight + i)) *(u16*)(page + value_place(dim, slot + eight + i)) = to_f16(value[i]);
  }
  if (there(row)) {
    norm_and_turn(key, k_weight, turns, lane);
    if (KV8) put_key8(page, slot + warp, lane, round8(key));
    else *(uint4*)(page + key_place(slot + warp, lane)) = pack8(key);
  }
  load_head(q_norm, lane, q_weight);
  u8* tile = queries + (u64)(group * KV_HEADS + kv_head) * QUERY_BYTES;
#pragma unroll
  for (int head = 0; head < GROUP_HEADS; ++head) {
    float v[8];
    unpack_results(query[head], v);
    norm_and_turn(v, q_weight, turns, lane);
    *(uint4*)(tile + query_place(warp * GROUP_HEADS + head, lane)) = query8(v);
  }
}

#if KV_BITS == 8
// attn_expand_prefill: all pages of a layer up to the prompt's last, [pages][KV_HEADS] of STAGE_BYTES, as pages of f16 are. A block takes one page of
// a KV head after the other. 1,560 bytes a position and KV head from and to memory, which is a hundredth of a long prompt's attention.
constexpr int EXPAND_THREADS = 256, EXPAND_BLOCKS = 8;  // of a multiprocessor
LAUNCH_ROWS(attn_expand_prefill, EXPAND_BLOCKS * MULTIPROCESSORS, EXPAND_THREADS, 0, 0x7fffffff)
extern "C" __global__ void __launch_bounds__(EXPAND_THREADS) attn_expand_prefill(const Prompt* prompt, u8* expanded, u32 ordinal) {
  const int pages = (prompt->position + prompt->rows - 1) / PAGE_TOKENS + 1;
  constexpr int LINES = EXPAND_THREADS / 4;  // a thread has a quarter of a line, whose 16 numbers are two units of f16
  const int first_line = threadIdx.x / 4, t = threadIdx.x % 4;
  for (int i = blockIdx.x; i < pages * KV_HEADS; i += gridDim.x) {
    u8* page = page_of(prompt->pages, i / KV_HEADS, ordinal, i % KV_HEADS);
    u8* to = expanded + (u64)i * STAGE_BYTES;
    const auto put = [&](u8* part, int row, uint4 early, uint4 late) {
      *(uint4*)(part + row * LINE_BYTES + line_unit(t, row) * 16) = early;
      *(uint4*)(part + row * LINE_BYTES + line_unit(t + 4, row) * 16) = late;
    };
    uint4 keys[HEAD_DIM / BLOCK8], values[HEAD_DIM / LINES];
    float scales[2][8];
    static_assert(LINES == PAGE_TOKENS, "a thread has one position's keys");
#pragma unroll
    for (int block = 0; block < HEAD_DIM / BLOCK8; ++block) keys[block] = __ldcs((const uint4*)(page + key8_block(first_line, block) + t * 16));
#pragma unroll
    for (int j = 0; j < HEAD_DIM / LINES; ++j) values[j] = __ldcs((const uint4*)(page + PART8_BYTES + (j * LINES + first_line) * BLOCK8 + t * 16));
    const float scale = key8_scales(page)[first_line];
    load_scales8(value8_scales(page), t, scales);
#pragma unroll
    for (int block = 0; block < HEAD_DIM / BLOCK8; ++block)
      put(to + block * KEY_BLOCK_BYTES, first_line, expand8(keys[block].x, keys[block].y, scale), expand8(keys[block].z, keys[block].w, scale));
#pragma unroll
    for (int j = 0; j < HEAD_DIM / LINES; ++j)
      put(to + PART_BYTES, j * LINES + first_line, expand8(values[j].x, values[j].y, scales[0]), expand8(values[j].z, values[j].w, scales[1]));
  }
}
#endif
// Where attention of a prompt reads a page.
__device__ __forceinline__ const u8* prompt_page(const Prompt* prompt, const u8* expanded, int page, u32 ordinal, int kv_head) {
  return KV8 ? expanded + (u64)(page * KV_HEADS + kv_head) * STAGE_BYTES : page_of(prompt->pages, page, ordinal, kv_head);
}

// What attention gives for 64 dims of a head, of which a lane has 8 i + 2 t + {0, 1} (t = lane % 4), in the operands of a group of inputs. All four lanes
// of a row call it, whether it is `there` or not. An operand's word has inputs i and i + 4 of eight, which are two lanes apart.
constexpr int GROUP_EIGHTS = GROUP / 8;
__device__ __forceinline__ void put_group(const float2 (&v)[GROUP_EIGHTS], u8* group, u32 row, int t, bool there) {
  u32 units[2][GROUP_EIGHTS / 2];
#pragma unroll
  for (int i = 0; i < GROUP_EIGHTS; ++i) {
    const float other = __shfl_xor_sync(~0u, t < 2 ? v[i].y : v[i].x, 2);
    units[i % 2][i / 2] = t < 2 ? f16_pair(v[i].x, other) : f16_pair(other, v[i].y);
  }
  if (!there) return;
#pragma unroll
  for (int half = 0; half < 2; ++half)
    *(uint4*)(group + row * GROUP_BYTES + ((4 * half + t % 2 * 2 + t / 2) ^ row % EIGHT) * 16) =
        make_uint4(units[half][0], units[half][1], units[half][2], units[half][3]);
}

#if WARPGROUPS
#include "attn_wgmma.cuh"
#else
#include "attn_mma.cuh"
#endif
