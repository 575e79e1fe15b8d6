// sample: the greedy token of each row of logits, from the threadgroups' largest: the lowest id among equals, never NaN.
//
// Grid (head rows), 256 threads. The token goes where the sequence's next step finds it, and to the host's list. Reads 8 bytes for each threadgroup
// of head; it is latency alone.
#include "choice.h"

// `blocks`: threadgroups of head that a row has a largest logit of.
struct SampleArgs {
  uint blocks;
};

kernel void sample(device const Step* step [[buffer(0)]],
                   device const uint2* best [[buffer(1)]],
                   device uint* sampled [[buffer(2)]],
                   device uint* tokens [[buffer(3)]],
                   constant SampleArgs& args [[buffer(4)]],
                   uint3 group [[threadgroup_position_in_grid]],
                   uint thread_index [[thread_index_in_threadgroup]],
                   uint simd [[simdgroup_index_in_threadgroup]],
                   uint lane [[thread_index_in_simdgroup]]) {
  threadgroup uint2 largest[PRODUCT_SIMDS];
  const uint row = group.x;
  if (row >= step->head_rows) return;
  Best found = no_best();
  for (uint i = thread_index; i < args.blocks; i += PRODUCT_THREADS) {
    const uint2 one = best[row * args.blocks + i];
    found = better(found, as_type<float>(one.x), one.y);
  }
  found = best_of_simd(found);
  if (lane == 0) largest[simd] = packed(found);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (thread_index == 0) {
    const Best all = best_of(largest, PRODUCT_SIMDS);
    const uint token = all.index < VOCAB ? all.index : 0;
    tokens[row] = token;
    // Of a sequence with several such rows the last one's token goes on.
    const uint segment = step->segment[step->head_row[row]];
    const bool is_last = row + 1 == step->head_rows || step->segment[step->head_row[row + 1]] != segment;
    if (is_last) sampled[step->sampled[segment]] = token;
  }
}
