// sample: the next token of each row of logits, where the sequence's next step finds it, and in the host's list.
//
// `sample` takes the greedy token from the threadgroups' largest: the lowest id among equals, or none where a logit is NaN or infinite. Grid (head rows), 256 threads. Reads 8 bytes for each
// threadgroup of head; it is latency alone. It stands in every pass.
//
// Where a request asked for more, four kernels stand behind it and settle the tokens of the rows that have a recipe:
//   sample_largest  each part's largest logit after bias and penalties, and whether one is NaN or infinite;
//   sample_weigh    a histogram of the row over the logits' distance from the largest (where top_k or top_p asks for it);
//   sample_list     each part's mass of what surely stays, and the few tokens at whose place the histogram cannot tell;
//   sample_choose   decides among those, finds the part that the draw falls into, and the token in it.
// Grid (parts of 2,048 tokens, head rows), sample_choose (1, head rows); 256 threads, 8 tokens each. Each reads the row once: 1 MB of the full model's,
// and as much again of penalties and of biases. All of it is what crates/engine's sampler does, to the bit: weights are integers, in units of 2^-44
// of the largest logit's, whose sums have no order, and f64 is done by integers (float64.h). A weight takes some 1,900 instructions on a processor of 64
// bits. top_k weighs no more than it lists; top_p, and no filter at all, what is within e^-32 of the largest; min_p alone, what it may keep.
#include "choice.h"
#include "float64.h"

constant constexpr uint BROKEN = 0xfffffffeu;  // in place of a token: a logit is NaN or infinite, or none is left

inline void publish(device const Step* step, uint row, uint token, device uint* sampled, device uint* tokens) {
  tokens[row] = token;
  // Of a sequence with several such rows the last one's token goes on.
  const uint segment = step->segment[step->head_row[row]];
  const bool is_last = row + 1 == step->head_rows || step->segment[step->head_row[row + 1]] != segment;
  if (is_last) sampled[step->sampled[segment]] = token;
}

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
    publish(step, row, fabs(all.logit) < INFINITY ? all.index : BROKEN, sampled, tokens);
  }
}

// ---- as a request asks ----------------------------------------------------------------------------------------------------

constant constexpr uint NONE = 0xffffffffu;  // in place of a recipe's or a table's number
constant constexpr uint THREADS = 256;
constant constexpr uint EACH = 8;               // tokens of a thread
constant constexpr uint PART = THREADS * EACH;  // tokens of a threadgroup
constant constexpr uint PARTS = (VOCAB + PART - 1) / PART;
constant constexpr uint BINS = 2048;      // of the histogram, 1/64 wide in units of the temperature; what is in the last weighs nothing
constant constexpr uint LIST = 4096;      // tokens that the histogram may leave undecided
constant constexpr uint TOKEN_BITS = 20;  // of a token in an order
constant constexpr ulong ANY_BROKEN = 0xffffffffffffffff;  // in place of an order
static_assert(PARTS <= THREADS && VOCAB < 1 << TOKEN_BITS, "a thread has a part's mass");

// How a sequence's tokens are chosen: written by the host, advanced by sample_choose.
struct Recipe {
  ulong inverse;    // 1 / temperature, the bits of an f64; 0: the largest
  ulong least;      // the weight that min_p asks for
  ulong random[4];  // xoshiro256++
  float top_p, repetition, presence, frequency;
  uint top_k;   // 0: all
  uint counts;  // number of the table that has 0 for a token not seen, else 1 and how often the answer holds it; or NONE
  uint bias;    // of the table of biases, f32; or NONE
  float per_unit;  // bins that a difference of logits of 1 comes to
  uint bins;       // what lies in a later bin weighs nothing, or less than min_p asks where nobody asks for its weight
  uint pad[3];
};
static_assert(sizeof(Recipe) == 96, "the host writes these bytes");

// An order is larger the earlier a token comes: larger logits first, then lower ids.
struct Element {
  ulong order, weight;
};

// What the kernels of a row hand to each other.
struct Notes {
  ulong largest[THREADS];  // of each part: the order of its largest logit, 0 where it has none, or ANY_BROKEN
  ulong masses[THREADS];   // of each part: the weights of what surely stays
  uint bins[BINS][3];      // tokens, and the low and the high half of their weights
  uint listed, pad[3];
  Element list[LIST];
};
static_assert(sizeof(Notes) == 16 * THREADS + 12 * BINS + 16 + 16 * LIST, "the plan has these bytes");

inline ulong order_of(float logit, uint token) {
  const uint bits = as_type<uint>(logit), key = sortable(as_type<float>(bits == 0x80000000u ? 0 : bits));  // 0 and -0 are equal
  return ulong(key) << TOKEN_BITS | ((1u << TOKEN_BITS) - 1 - token);
}
inline uint token_of(ulong order) { return (1u << TOKEN_BITS) - 1 - (uint(order) & ((1u << TOKEN_BITS) - 1)); }
inline float logit_of(ulong order) {
  const uint key = uint(order >> TOKEN_BITS);
  return as_type<float>(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// The weight of a logit beside the largest: crates/engine/src/sampler.rs and its exp.rs, operation by operation.
struct Scale {
  Double largest, inverse;
};
constant constexpr ulong LOG2_E_BITS = 0x3ff71547652b82fe, LN_2_HIGH_BITS = 0x3fe62e42fee00000, LN_2_LOW_BITS = 0x3dea39ef35793c76;
// 1/n! for n from 13 down to 0.
constant constexpr int TERMS = 14;
constant constexpr ulong TERM_BITS[TERMS] = {0x3de6124613a86d09, 0x3e21eed8eff8d898, 0x3e5ae64567f544e4, 0x3e927e4fb7789f5c, 0x3ec71de3a556c734,
                                             0x3efa01a01a01a01a, 0x3f2a01a01a01a01a, 0x3f56c16c16c16c17, 0x3f81111111111111, 0x3fa5555555555555,
                                             0x3fc5555555555555, 0x3fe0000000000000, 0x3ff0000000000000, 0x3ff0000000000000};
inline ulong weight_of(Scale scale, float logit) {
  const Double x = multiply(add(of_float(logit), negated(scale.largest)), scale.inverse);
  if (x.mantissa != 0 && is_smaller(of_bits(0x403f000000000000), x)) return 0;  // below e^-31
  Double turns = multiply(x, of_bits(LOG2_E_BITS));
  const ulong k = nearest(turns);
  Double of_k = of_integer(k);
  of_k.negative = !x.negative;
  const Double r = add(add(x, multiply(of_k, of_bits(LN_2_HIGH_BITS))), multiply(of_k, of_bits(LN_2_LOW_BITS)));
  Double series = of_bits(TERM_BITS[0]);
  for (int i = 1; i < TERMS; ++i) series = add(multiply(series, r), of_bits(TERM_BITS[i]));
  series.exponent += 44 - int(k);
  return nearest(series);
}

// A row that a request chooses from.
struct Row {
  device const Recipe* how;
  device const float* logits;
  device const uint* counts;
  device const uint* bias;
  device const Notes* notes;
  float largest;
  Scale scale;
};
inline device const uint* table(device const uint* tables, uint number) { return tables + ulong(number == NONE ? 0 : number) * VOCAB; }

// A logit after bias and penalties. Nothing becomes certain by an overflow.
inline float within(float logit) { return isnan(logit) ? -INFINITY : min(logit, MAXFLOAT); }
inline float logit_at(Row of, uint token) {
  float logit = of.logits[token];
  if (of.how->bias != NONE) logit = within(logit + as_type<float>(of.bias[token]));
  const uint seen = of.how->counts != NONE ? of.counts[token] : 0;
  if (seen != 0) {
    const float repeated = logit > 0.0f ? logit / of.how->repetition : logit * of.how->repetition;
    const float often = repeated - float(seen - 1) * of.how->frequency;
    logit = within(often - (seen > 1 ? of.how->presence : 0.0f));
  }
  return logit;
}
// Rounding keeps the order of logits, so equal ones and those between two of a bin are in it.
inline uint bin_of(Row of, float logit) {
  const float at = (of.largest - logit) * of.how->per_unit;
  return at < float(BINS - 1) ? uint(at) : BINS - 1;
}
inline bool is_counted(Row of) { return of.how->top_k != 0; }
inline bool is_filtered(Row of) { return is_counted(of) || of.how->top_p < 1.0f; }

inline ulong larger(ulong a, ulong b) { return a < b ? b : a; }
// The largest of a threadgroup's orders, in every thread. `simds`: 8 words.
inline ulong largest_of_all(ulong mine, threadgroup ulong* simds, uint simd, uint lane) {
  for (int bit = SIMD / 2; bit > 0; bit /= 2) mine = larger(mine, as_type<ulong>(simd_shuffle_xor(as_type<uint2>(mine), ushort(bit))));
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == 0) simds[simd] = mine;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < THREADS / SIMD; ++i) mine = larger(mine, simds[i]);
  return mine;
}
struct Sums {
  ulong before, all;
};
// The sum of what threads before this one have, and of what all have. `simds`: 8 words.
inline Sums sums_of_all(ulong mine, threadgroup ulong* simds, uint simd, uint lane) {
  ulong sum = mine;
  for (uint step = 1; step < SIMD; step *= 2) {
    const ulong other = as_type<ulong>(simd_shuffle_up(as_type<uint2>(sum), ushort(step)));
    if (lane >= step) sum += other;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  if (lane == SIMD - 1) simds[simd] = sum;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Sums sums;
  sums.before = sum - mine;
  sums.all = 0;
  for (uint i = 0; i < THREADS / SIMD; ++i) {
    if (i < simd) sums.before += simds[i];
    sums.all += simds[i];
  }
  return sums;
}

// Adds to 64 bits in two halves: each addition of a low half carries what it pushes over. Complete once all additions are.
inline void add_to(threadgroup uint* halves, ulong x) {
  const uint low = uint(x), old = atomic_fetch_add_explicit((threadgroup atomic_uint*)halves, low, memory_order_relaxed);
  const uint high = uint(x >> 32) + (old + low < low ? 1 : 0);
  if (high != 0) atomic_fetch_add_explicit((threadgroup atomic_uint*)(halves + 1), high, memory_order_relaxed);
}
inline void add_to_notes(device uint* halves, ulong x) {
  const uint low = uint(x), old = atomic_fetch_add_explicit((device atomic_uint*)halves, low, memory_order_relaxed);
  const uint high = uint(x >> 32) + (old + low < low ? 1 : 0);
  if (high != 0) atomic_fetch_add_explicit((device atomic_uint*)(halves + 1), high, memory_order_relaxed);
}

inline Row unmeasured_row(device const Recipe* how, device const uint* tables, device const float* logits, uint row) {
  Row of;
  of.how = how;
  of.logits = logits + ulong(row) * VOCAB;
  of.counts = table(tables, how->counts);
  of.bias = table(tables, how->bias);
  return of;
}
// By the whole threadgroup.
inline Row row_of(device const Recipe* how, device const uint* tables, device const float* logits, uint row, device const Notes* notes,
                  ulong largest) {
  Row of = unmeasured_row(how, tables, logits, row);
  of.notes = notes;
  of.largest = logit_of(largest);
  of.scale.largest = of_float(of.largest);
  of.scale.inverse = of_bits(how->inverse);
  return of;
}
inline bool is_broken(ulong largest) { return largest == 0 || largest == ANY_BROKEN; }
inline ulong largest_of_row(device const Notes* notes, threadgroup ulong* simds, uint thread_index, uint simd, uint lane) {
  return largest_of_all(thread_index < PARTS ? notes->largest[thread_index] : 0, simds, simd, lane);
}

kernel void sample_largest(device const Step* step [[buffer(0)]],
                           device const uint* row_recipes [[buffer(1)]],
                           device const Recipe* recipes [[buffer(2)]],
                           device const uint* tables [[buffer(3)]],
                           device const float* logits [[buffer(4)]],
                           device Notes* all_notes [[buffer(5)]],
                           uint3 group [[threadgroup_position_in_grid]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong simds[THREADS / SIMD];
  const uint row = group.y;
  if (row >= step->head_rows || row_recipes[row] == NONE) return;
  device Notes* notes = all_notes + row;
  device uint* words = (device uint*)notes->bins;
  for (uint i = group.x * THREADS + thread_index; i < BINS * 3; i += PARTS * THREADS) words[i] = 0;
  if (group.x == 0 && thread_index == 0) notes->listed = 0;
  const Row of = unmeasured_row(recipes + row_recipes[row], tables, logits, row);
  ulong largest = 0;
  for (uint i = 0; i < EACH; ++i) {
    const uint token = group.x * PART + i * THREADS + thread_index;
    if (token >= VOCAB) break;
    const float logit = logit_at(of, token);
    if (!(of.logits[token] < INFINITY)) largest = ANY_BROKEN;
    if (logit > -INFINITY) largest = larger(largest, order_of(logit, token));
  }
  largest = largest_of_all(largest, simds, simd, lane);
  if (thread_index == 0) notes->largest[group.x] = largest;
}

kernel void sample_weigh(device const Step* step [[buffer(0)]],
                         device const uint* row_recipes [[buffer(1)]],
                         device const Recipe* recipes [[buffer(2)]],
                         device const uint* tables [[buffer(3)]],
                         device const float* logits [[buffer(4)]],
                         device Notes* all_notes [[buffer(5)]],
                         uint3 group [[threadgroup_position_in_grid]],
                         uint thread_index [[thread_index_in_threadgroup]],
                         uint simd [[simdgroup_index_in_threadgroup]],
                         uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong simds[THREADS / SIMD];
  threadgroup uint bins[BINS][3];
  const uint row = group.y;
  if (row >= step->head_rows || row_recipes[row] == NONE) return;
  device Notes* notes = all_notes + row;
  const ulong largest = largest_of_row(notes, simds, thread_index, simd, lane);
  const Row of = row_of(recipes + row_recipes[row], tables, logits, row, notes, largest);
  if (is_broken(largest) || of.how->inverse == 0 || !is_filtered(of)) return;
  for (uint i = thread_index; i < BINS; i += THREADS) {
    for (uint word = 0; word < 3; ++word) bins[i][word] = 0;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = 0; i < EACH; ++i) {
    const uint token = group.x * PART + i * THREADS + thread_index;
    if (token >= VOCAB) break;
    const float logit = logit_at(of, token);
    const uint bin = bin_of(of, logit);
    if (bin >= of.how->bins) continue;
    atomic_fetch_add_explicit((threadgroup atomic_uint*)bins[bin], 1u, memory_order_relaxed);
    if (!is_counted(of)) add_to(bins[bin] + 1, weight_of(of.scale, logit));
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = thread_index; i < BINS; i += THREADS) {
    if (bins[i][0] == 0) continue;
    atomic_fetch_add_explicit((device atomic_uint*)notes->bins[i], bins[i][0], memory_order_relaxed);
    if (!is_counted(of)) add_to_notes(notes->bins[i] + 1, ulong(bins[i][2]) << 32 | bins[i][1]);
  }
}

// Where the histogram leaves off: bins below `low` stay whole, those above `high` go, and `listed` tokens at the most are between them. And the mass
// of what comes before them, and of all, where top_p asks for it.
struct Edge {
  uint low, high;
  ulong listed, before, all;
};
inline Edge edge_of(Row of, threadgroup ulong* simds, threadgroup ulong* slot, uint thread_index, uint simd, uint lane) {
  const uint bins = BINS / THREADS;
  Edge edge;
  edge.low = edge.high = BINS;
  edge.listed = edge.before = edge.all = 0;
  if (!is_filtered(of)) return edge;
  ulong each[bins], mine = 0;
  for (uint i = 0; i < bins; ++i) {
    device const uint* bin = of.notes->bins[thread_index * bins + i];
    each[i] = is_counted(of) ? bin[0] : ulong(bin[2]) << 32 | bin[1];
    mine += each[i];
  }
  const Sums sums = sums_of_all(mine, simds, simd, lane);
  const ulong share = whole(multiply(of_float(of.how->top_p), of_integer(sums.all)));
  const ulong enough = is_counted(of) ? of.how->top_k : larger(share, 1);
  if (thread_index == 0 && sums.all < enough) slot[0] = BINS - 1, slot[1] = sums.all, slot[2] = 0;
  ulong before = sums.before;
  for (uint i = 0; i < bins; ++i) {
    const uint bin = thread_index * bins + i;
    if (before < enough && before + each[i] >= enough) {
      slot[0] = bin, slot[1] = is_counted(of) ? before + each[i] : ulong(of.notes->bins[bin][0]), slot[2] = before;
    }
    before += each[i];
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  edge.high = uint(slot[0]);
  edge.listed = slot[1];
  // With top_k all of what is left is looked at, as top_p is a part of its mass.
  edge.low = is_counted(of) ? 0 : edge.high;
  edge.before = is_counted(of) ? 0 : slot[2];
  edge.all = sums.all;
  return edge;
}

kernel void sample_list(device const Step* step [[buffer(0)]],
                        device const uint* row_recipes [[buffer(1)]],
                        device const Recipe* recipes [[buffer(2)]],
                        device const uint* tables [[buffer(3)]],
                        device const float* logits [[buffer(4)]],
                        device Notes* all_notes [[buffer(5)]],
                        uint3 group [[threadgroup_position_in_grid]],
                        uint thread_index [[thread_index_in_threadgroup]],
                        uint simd [[simdgroup_index_in_threadgroup]],
                        uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong simds[THREADS / SIMD], slot[3];
  const uint row = group.y;
  if (row >= step->head_rows || row_recipes[row] == NONE) return;
  device Notes* notes = all_notes + row;
  const ulong largest = largest_of_row(notes, simds, thread_index, simd, lane);
  const Row of = row_of(recipes + row_recipes[row], tables, logits, row, notes, largest);
  if (is_broken(largest) || of.how->inverse == 0) return;
  const Edge edge = edge_of(of, simds, slot, thread_index, simd, lane);
  ulong mass = 0;
  for (uint i = 0; i < EACH; ++i) {
    const uint token = group.x * PART + i * THREADS + thread_index;
    if (token >= VOCAB) break;
    const float logit = logit_at(of, token);
    const uint bin = bin_of(of, logit);
    const bool stays = bin < edge.low, is_listed = !stays && bin <= edge.high && edge.listed <= LIST;
    if (bin >= of.how->bins || !(stays || is_listed)) continue;
    const ulong weight = weight_of(of.scale, logit);
    if (stays) {
      mass += weight >= of.how->least ? weight : 0;
    } else if (weight != 0) {
      device Element* element = notes->list + atomic_fetch_add_explicit((device atomic_uint*)&notes->listed, 1u, memory_order_relaxed);
      element->order = order_of(logit, token);
      element->weight = weight;
    }
  }
  const Sums sums = sums_of_all(mass, simds, simd, lane);
  if (thread_index == 0) notes->masses[group.x] = sums.all;
}

// What the histogram left undecided: the list, or, where it is too short, the whole row.
struct Undecided {
  bool is_wide;
  uint count;
};
// Its element `i`. What weighs nothing may be among them: those come last in the order.
inline ulong order_at(Row of, Undecided undecided, uint i) {
  return undecided.is_wide ? order_of(logit_at(of, i), i) : of.notes->list[i].order;
}
inline ulong weight_at(Row of, Undecided undecided, uint i, ulong order) {
  if (!undecided.is_wide) return of.notes->list[i].weight;
  const float logit = logit_of(order);
  return bin_of(of, logit) < of.how->bins ? weight_of(of.scale, logit) : 0;
}

// Threadgroup memory of the choice.
struct Tools {
  threadgroup ulong* simds;   // of a threadgroup's sums
  threadgroup ulong* slot;    // what one thread has found for all
  threadgroup uint* halves;   // of THREADS sums of 64 bits
  uint thread_index, simd, lane;
};

// The order of the element at which the sum of what elements measure, largest orders first, reaches `enough` (at least 1); 0 where it never does. They
// measure 1 where `counts`, else their weight. Eight bits of the order at a time, from the top.
inline ulong reaches(Row of, Undecided undecided, bool counts, ulong enough, Tools tools) {
  ulong prefix = 0;
  for (int shift = 48; shift >= 0; shift -= 8) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    tools.halves[2 * tools.thread_index] = 0;
    tools.halves[2 * tools.thread_index + 1] = 0;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (uint i = tools.thread_index; i < undecided.count; i += THREADS) {
      const ulong order = order_at(of, undecided, i), upper = order >> shift;
      if (upper >> 8 != prefix) continue;
      add_to(tools.halves + 2 * (255 - uint(upper & 255)), counts ? 1 : weight_at(of, undecided, i, order));
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const ulong mine = ulong(tools.halves[2 * tools.thread_index + 1]) << 32 | tools.halves[2 * tools.thread_index];
    const Sums sums = sums_of_all(mine, tools.simds, tools.simd, tools.lane);
    if (sums.all < enough) return 0;  // in the first round, or never
    if (sums.before < enough && sums.before + mine >= enough) tools.slot[0] = 255 - tools.thread_index, tools.slot[1] = sums.before;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    prefix = prefix << 8 | tools.slot[0];
    enough -= tools.slot[1];
  }
  return prefix;
}
inline ulong mass_from(Row of, Undecided undecided, ulong cut, Tools tools) {
  ulong mass = 0;
  for (uint i = tools.thread_index; i < undecided.count; i += THREADS) {
    const ulong order = order_at(of, undecided, i);
    if (order >= cut) mass += weight_at(of, undecided, i, order);
  }
  return sums_of_all(mass, tools.simds, tools.simd, tools.lane).all;
}
// The order from which on what is undecided stays: that of top_k, then the nucleus of it.
inline ulong cutoff(Row of, Undecided undecided, Edge edge, Tools tools) {
  ulong cut = 0, before = undecided.is_wide ? 0 : edge.before, all = edge.all;
  if (is_counted(of)) {
    cut = reaches(of, undecided, true, of.how->top_k, tools);
    if (of.how->top_p < 1.0f) all = mass_from(of, undecided, cut, tools);
  }
  if (of.how->top_p < 1.0f) {
    const ulong share = whole(multiply(of_float(of.how->top_p), of_integer(all)));
    cut = larger(cut, reaches(of, undecided, false, larger(share, 1) - before, tools));
  }
  return cut;
}

// The next number of xoshiro256++, uniform below 2^53.
inline ulong rotated(ulong x, int by) { return x << by | x >> (64 - by); }
inline ulong draw(device ulong* state) {
  ulong a = state[0], b = state[1], c = state[2], d = state[3];
  const ulong result = rotated(a + d, 23) + a, shifted = b << 17;
  c ^= a, d ^= b, b ^= c, a ^= d, c ^= shifted, d = rotated(d, 45);
  state[0] = a, state[1] = b, state[2] = c, state[3] = d;
  return result >> 11;
}

// The token of a row with a temperature, in every thread.
inline uint drawn(Row of, device Recipe* how, Tools tools) {
  const Edge edge = edge_of(of, tools.simds, tools.slot, tools.thread_index, tools.simd, tools.lane);
  Undecided undecided;
  undecided.is_wide = edge.listed > LIST;
  undecided.count = undecided.is_wide ? VOCAB : of.notes->listed;
  const ulong cut = undecided.count != 0 ? cutoff(of, undecided, edge, tools) : 0;
  // The mass of each part of what stays.
  const ulong mass = tools.thread_index < PARTS && !undecided.is_wide ? of.notes->masses[tools.thread_index] : 0;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  tools.halves[2 * tools.thread_index] = uint(mass);
  tools.halves[2 * tools.thread_index + 1] = uint(mass >> 32);
  if (tools.thread_index == 0) tools.slot[0] = draw(how->random);
  threadgroup_barrier(mem_flags::mem_threadgroup);
  for (uint i = tools.thread_index; i < undecided.count; i += THREADS) {
    const ulong order = order_at(of, undecided, i);
    const ulong weight = order >= cut ? weight_at(of, undecided, i, order) : 0;
    if (weight >= how->least) add_to(tools.halves + 2 * (token_of(order) / PART), weight);
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  // The part that the draw falls into, then the token: in the order of ids.
  const ulong of_part = ulong(tools.halves[2 * tools.thread_index + 1]) << 32 | tools.halves[2 * tools.thread_index], fraction = tools.slot[0];
  const Sums parts = sums_of_all(of_part, tools.simds, tools.simd, tools.lane);
  const Wide scaled = wide_product(fraction, parts.all);
  const ulong target = scaled.high << 11 | scaled.low >> 53;
  if (parts.before <= target && parts.before + of_part > target) tools.slot[0] = tools.thread_index, tools.slot[1] = parts.before;
  threadgroup_barrier(mem_flags::mem_threadgroup);
  const uint first = uint(tools.slot[0]) * PART + tools.thread_index * EACH;
  ulong before = tools.slot[1], weights[EACH], sum = 0;
  for (uint i = 0; i < EACH; ++i) {
    weights[i] = 0;
    if (first + i >= VOCAB) continue;
    const float logit = logit_at(of, first + i);
    if (bin_of(of, logit) >= how->bins || order_of(logit, first + i) < cut) continue;
    const ulong weight = weight_of(of.scale, logit);
    weights[i] = weight >= how->least ? weight : 0;
    sum += weights[i];
  }
  before += sums_of_all(sum, tools.simds, tools.simd, tools.lane).before;
  if (before <= target && before + sum > target) {
    uint past = 0;  // tokens that the draw is beyond
    for (uint i = 0; i < EACH; ++i) before += weights[i], past += before <= target ? 1 : 0;
    tools.slot[2] = first + past;
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  return uint(tools.slot[2]);
}

kernel void sample_choose(device const Step* step [[buffer(0)]],
                          device const uint* row_recipes [[buffer(1)]],
                          device Recipe* recipes [[buffer(2)]],
                          device uint* tables [[buffer(3)]],
                          device const float* logits [[buffer(4)]],
                          device const Notes* all_notes [[buffer(5)]],
                          device uint* sampled [[buffer(6)]],
                          device uint* tokens [[buffer(7)]],
                          uint3 group [[threadgroup_position_in_grid]],
                          uint thread_index [[thread_index_in_threadgroup]],
                          uint simd [[simdgroup_index_in_threadgroup]],
                          uint lane [[thread_index_in_simdgroup]]) {
  threadgroup ulong simds[THREADS / SIMD], slot[3];
  threadgroup uint halves[2 * THREADS];
  const uint row = group.y;
  if (row >= step->head_rows || row_recipes[row] == NONE) return;
  device const Notes* notes = all_notes + row;
  const ulong largest = largest_of_row(notes, simds, thread_index, simd, lane);
  device Recipe* how = recipes + row_recipes[row];
  const Row of = row_of(how, tables, logits, row, notes, largest);
  Tools tools;
  tools.simds = simds, tools.slot = slot, tools.halves = halves;
  tools.thread_index = thread_index, tools.simd = simd, tools.lane = lane;
  uint token = BROKEN;
  if (!is_broken(largest)) token = how->inverse == 0 ? token_of(largest) : drawn(of, how, tools);
  // Nobody looks at the counts any more.
  threadgroup_barrier(mem_flags::mem_device);
  if (thread_index != 0) return;
  if (how->counts != NONE && token < VOCAB) {
    device uint* seen = tables + ulong(how->counts) * VOCAB + token;
    *seen += *seen != 0 ? 1 : 2;
  }
  publish(step, row, token, sampled, tokens);
}
