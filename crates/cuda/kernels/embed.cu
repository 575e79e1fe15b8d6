// embed: the row of the 4-bit table for each row's token, as the residual stream.
//
// Grid (rows), 256 threads; a thread turns words of eight inputs. Reads HIDDEN * 0.5625 bytes a row, writes HIDDEN f32: it
// is the latency of two dependent loads (the token, its row) and nothing else: 2 us. It opens the graph, and counts its turns.
#include "common.cuh"

LAUNCH(embed, 1, 256, 0)
extern "C" __global__ void __launch_bounds__(256) embed(Step* step, const u32* words, const u32* pairs, float* x) {
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.x;
  if (row >= step->rows) return;
  if (row == 0 && threadIdx.x == 0 && step->turn) {
    // 31 bits, of which 0 is no turn; the bit above them stays.
    const u32 turn = step->turn, count = turn & 0x7fffffffu;
    step->turn = (turn & 0x80000000u) | (count == 0x7fffffffu ? 1 : count + 1);
  }
  u32 token = step->token[row];
  if (token == FROM_SAMPLE) token = *(const u32*)step->sampled[step->segment[row]];
  token = min(token, (u32)VOCAB - 1);
  for (int word = threadIdx.x; word < HIDDEN / 8; word += blockDim.x) {
    const u32 q = words[(u64)token * (HIDDEN / 8) + word];
    const u32 pair = pairs[(u64)token * (HIDDEN / GROUP) + word / 8];
    float v[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __fmaf_rn(pair_scale(pair), (float)(q >> 4 * i & 15), pair_bias(pair));
    float4* out = (float4*)(x + row * HIDDEN + word * 8);
    out[0] = make_float4(v[0], v[1], v[2], v[3]);
    out[1] = make_float4(v[4], v[5], v[6], v[7]);
  }
}
