// embed: the row of the 4-bit table for each row's token, as the residual stream.
//
// Grid (rows), 256 threads; a thread turns words of eight inputs. Reads HIDDEN * 0.5625 bytes a row, writes HIDDEN f32: it is the
// latency of two dependent loads (the token, its row) and nothing else.
#include "common.h"
#include "prompt.h"

// The table's row of `token` into `to`, by the whole threadgroup.
inline void embed_row(device const uint* words, device const ushort* scales, device const ushort* biases, uint token, device float* to, uint thread_index) {
  token = min(token, uint(VOCAB - 1));
  for (uint word = thread_index; word < uint(HIDDEN / 8); word += 256) {
    const uint q = words[ulong(token) * (HIDDEN / 8) + word];
    const ulong pair = ulong(token) * (HIDDEN / GROUP) + word / 8;
    const float scale = bf16(scales[pair]), bias = bf16(biases[pair]);
    device float4* out = (device float4*)(to + word * 8);
    for (int half_word = 0; half_word < 2; ++half_word) {
      const uint4 nibbles = uint4(q >> (16 * half_word)) >> uint4(0, 4, 8, 12) & 15u;
      out[half_word] = fma(float4(scale), float4(nibbles), float4(bias));
    }
  }
}

kernel void embed(device const Step* step [[buffer(0)]],
                  device const uint* words [[buffer(1)]],
                  device const ushort* scales [[buffer(2)]],
                  device const ushort* biases [[buffer(3)]],
                  device const uint* sampled [[buffer(4)]],
                  device float* x [[buffer(5)]],
                  uint3 group [[threadgroup_position_in_grid]],
                  uint thread_index [[thread_index_in_threadgroup]]) {
  const uint row = group.x;
  if (row >= step->rows) return;
  uint token = step->token[row];
  if (token == FROM_SAMPLE) token = sampled[step->sampled[step->segment[row]]];
  embed_row(words, scales, biases, token, x + row * HIDDEN, thread_index);
}

kernel void embed_prefill(device const Prompt* prompt [[buffer(0)]],
                          device const uint* words [[buffer(1)]],
                          device const ushort* scales [[buffer(2)]],
                          device const ushort* biases [[buffer(3)]],
                          device float* x [[buffer(4)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]]) {
  const uint row = group.x;
  if (row >= prompt->rows) return;
  embed_row(words, scales, biases, tokens_of(prompt)[row], x + ulong(row) * HIDDEN, thread_index);
}
