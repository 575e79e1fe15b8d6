// sample: the next token of each row of logits, where the sequence's next step finds it, in the host's list, and, where the step
// has a turn, in the host's ring.
//
// `sample` takes the greedy token from the blocks' largest: the lowest id among equals, never NaN, and none where all are. Grid (head rows), 256 threads, 3 us.
// It stands in every pass. `advance`, or a turn, moves the row's position on, so that the graph can be launched again as it is.
//
// Behind a pass in which a request asked for more (`Sampling`), the tokens of all rows are settled by
//   sample_adjust   bias and penalties, in place, and the largest of what they leave (where a row has some);
//   sample_weigh    a histogram of the row over the logits' distance from the largest (where a row has top_k or top_p);
//   sample_list     each part's mass of what surely stays, and the few tokens at whose place the histogram cannot tell;
//   sample_choose   decides among those, finds the part that the draw falls into, and the token in it.
// Grid (parts of 2,048 tokens, head rows), sample_choose (1, head rows); 256 threads, 8 tokens each. A row is read once by each kernel:
// 1 MB of the full model's, from L2, and 122 blocks share it. All of it is what crates/engine's sampler does, to the bit: weights are
// integers of 2^-44, sums of them have no order, and f64 is rounded as there, so nothing may be fused.
#include "common.cuh"

constexpr u32 RING = 64;               // turns that the host's ring holds
constexpr u32 DEFERRED = 0x80000000u;  // in a step's turn: the token is settled by sample_choose
constexpr u32 BROKEN = 0xfffffffeu;    // in place of a token: a logit is NaN or infinite, or none is left

// u64 [RING][MAX_ROWS] of the host's memory: turn << 32 | token. Written once by the host.
extern "C" { __device__ u64* token_ring; }

__device__ __forceinline__ void publish(const Step* step, u32 row, u32 token, u32* out) {
  out[row] = token;
  const u32 from = step->head_row[row], segment = step->segment[from];
  // Of a prompt's rows the last has the sequence's next token.
  const bool last = row + 1 == step->head_rows || step->segment[step->head_row[row + 1]] != segment;
  if (last) *(u32*)step->sampled[segment] = token;
}
__device__ __forceinline__ void announce(u32 turn, u32 row, u32 token) {
  *(volatile u64*)(token_ring + turn % RING * MAX_ROWS + row) = (u64)turn << 32 | token;
}

LAUNCH(sample, 1, 256, 0)
extern "C" __global__ void __launch_bounds__(256) sample(Step* step, const uint2* best, u32* out, u32 advance) {
  constexpr int TILES = ceil_div(VOCAB, TILE);
  constexpr u32 blocks = ceil_div(TILES, ceil_div(TILES, MULTIPROCESSORS));  // of head
  __shared__ uint2 largest[8];
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.x;
  if (row >= step->head_rows) return;
  float most = -infinity();
  u32 index = VOCAB;
  for (u32 i = threadIdx.x; i < blocks; i += blockDim.x) {
    const uint2 b = best[row * blocks + i];
    const float value = __uint_as_float(b.x);
    if (value > most || value == most && b.y < index) most = value, index = b.y;
  }
  for (int bit = 16; bit; bit /= 2) {
    const float other = __shfl_xor_sync(~0u, most, bit);
    const u32 other_index = __shfl_xor_sync(~0u, index, bit);
    if (other > most || other == most && other_index < index) most = other, index = other_index;
  }
  if (threadIdx.x % 32 == 0) largest[threadIdx.x / 32] = make_uint2(__float_as_uint(most), index);
  __syncthreads();
  if (threadIdx.x == 0) {
    for (int w = 1; w < 8; ++w) {
      const float other = __uint_as_float(largest[w].x);
      if (other > most || other == most && largest[w].y < index) most = other, index = largest[w].y;
    }
    const u32 token = index < VOCAB && most < infinity() ? index : BROKEN, turn = step->turn;
    publish(step, row, token, out);
    if (turn && !(turn & DEFERRED)) announce(turn, row, token);
    if (advance || turn) {
      const u32 from = step->head_row[row];
      step->position[from] += 1;
      step->token[from] = FROM_SAMPLE;
    }
  }
}

// ---- as a request asks -----------------------------------------------------------------------------------------------------

// How a sequence's tokens are chosen: written by the host, advanced by sample_choose.
struct Sampling {
  double inverse;     // 1 / temperature; 0: the largest
  float top_p, min_p;
  float repetition, presence, frequency;
  u32 top_k;          // 0: all
  u64 random[4];      // xoshiro256++
  u32* counts;        // [VOCAB]: 0 for a token not seen, else 1 and how often the answer holds it; null without penalties
  const float* bias;  // [VOCAB]; null without
};
static_assert(sizeof(Sampling) == 80, "the host writes these bytes");

constexpr int THREADS = 256;
constexpr int EACH = 8;               // tokens of a thread
constexpr int PART = THREADS * EACH;  // tokens of a block
constexpr int PARTS = ceil_div(VOCAB, PART);
constexpr int BINS = 2048;            // of the histogram, 1/64 wide in units of the temperature
constexpr int LIST = 4096;            // tokens that the histogram may leave undecided
constexpr int TOKEN_BITS = 20;        // of a token in an order
constexpr double ONE = 17592186044416.0;  // 2^44: the weight of the largest logit
constexpr double NEGLIGIBLE = -31.0;      // weights below e^-31 are zero
static_assert(PARTS <= THREADS && VOCAB < 1 << TOKEN_BITS, "a thread has a part's mass");

// An order is larger the earlier a token comes: larger logits first, then lower ids.
struct __align__(16) Element { u64 order, weight; };

// What the blocks of a row share. All but `parts` and `list` is zero between steps: sample_choose sees to it.
struct Shared {
  u64 largest;  // order of the largest adjusted logit
  u32 broken, listed;
  u32 counts[BINS];
  u64 masses[BINS];
  u64 parts[THREADS];
  Element list[LIST];
};
// For the host, which allocates MAX_ROWS of them.
extern "C" { __device__ u32 sample_shared_bytes[1] = {(u32)sizeof(Shared)}; }

__device__ __forceinline__ u64 order_of(float logit, u32 token) {
  const u32 bits = __float_as_uint(logit + 0.0f);  // 0 and -0 are equal
  const u32 key = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
  return (u64)key << TOKEN_BITS | ((1u << TOKEN_BITS) - 1 - token);
}
__device__ __forceinline__ u32 token_of(u64 order) { return (1u << TOKEN_BITS) - 1 - ((u32)order & ((1u << TOKEN_BITS) - 1)); }
__device__ __forceinline__ float logit_of(u64 order) {
  const u32 key = (u32)(order >> TOKEN_BITS);
  return __uint_as_float(key & 0x80000000u ? key & 0x7fffffffu : ~key);
}

// Exponents and weights relative to the largest logit.
struct Scale {
  double largest, inverse;
  __device__ __forceinline__ double exponent(float logit) const { return __dmul_rn(__dsub_rn((double)logit, largest), inverse); }
  // crates/engine/src/sampler/exp.rs, operation by operation.
  __device__ __forceinline__ u64 weight(double x) const {
    if (!(x >= NEGLIGIBLE)) return 0;
    constexpr double LOG2_E_64 = 1.44269504088896340736, ROUND = 6755399441055744.0, INTEGER = 4503599627370496.0;
    const double shifted = __dadd_rn(__dmul_rn(x, LOG2_E_64), ROUND), k = __dsub_rn(shifted, ROUND);
    const double high = __longlong_as_double(0x3fe62e42fee00000ll), low = __longlong_as_double(0x3dea39ef35793c76ll);
    const double r = __dsub_rn(__dsub_rn(x, __dmul_rn(k, high)), __dmul_rn(k, low));
    constexpr double C[14] = {1.0 / 6227020800.0, 1.0 / 479001600.0, 1.0 / 39916800.0, 1.0 / 3628800.0, 1.0 / 362880.0, 1.0 / 40320.0, 1.0 / 5040.0,
                              1.0 / 720.0,        1.0 / 120.0,       1.0 / 24.0,       1.0 / 6.0,       1.0 / 2.0,      1.0,           1.0};
    double series = 0.0;
#pragma unroll
    for (int i = 0; i < 14; ++i) series = __dadd_rn(__dmul_rn(series, r), C[i]);
    const double value = __longlong_as_double(__double_as_longlong(series) + (__double_as_longlong(shifted) << 52));
    return (u64)__double_as_longlong(__dadd_rn(__dmul_rn(value, ONE), INTEGER)) & ((1ull << 52) - 1);
  }
  __device__ __forceinline__ u64 weight(float logit) const { return weight(exponent(logit)); }
};
__device__ __forceinline__ int bin_of(double exponent) { return min((int)__dmul_rn(-exponent, 64.0), BINS - 1); }

// A row that a request chooses from.
struct Row {
  const Sampling* how;
  const float* logits;
  Scale scale;
  bool filtered, broken;
  u64 least;  // weight that min_p asks for
  __device__ __forceinline__ Row(const Sampling* how, const float* logits, const Shared* shared, u32 greedy) : how(how), logits(logits) {
    const bool adjusted = how->counts || how->bias;
    const float largest = adjusted ? logit_of(shared->largest) : greedy < VOCAB ? logits[greedy] : -infinity();
    broken = adjusted && shared->largest == 0 || !(largest > -infinity());
    scale = {(double)largest, how->inverse};
    filtered = how->inverse > 0.0 && (how->top_k != 0 && how->top_k < VOCAB || how->top_p < 1.0f);
    least = __double2ull_rz(__dmul_rn((double)how->min_p, ONE));
  }
};

// Sums before this thread's over the block, and the sum of all, in every thread. `warps`: 8 words.
__device__ __forceinline__ u64 sums_before(u64 mine, u64* warps, u64* all) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  u64 sum = mine;
  for (int step = 1; step < 32; step *= 2) {
    const u64 other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) warps[warp] = sum;
  __syncthreads();
  u64 before = 0, total = 0;
  for (int w = 0; w < THREADS / 32; ++w) {
    if (w < warp) before += warps[w];
    total += warps[w];
  }
  *all = total;
  return before + sum - mine;
}

// The order of the element at which the sum of `measure`, largest orders first, reaches `enough` (at least 1); 0 where it never does.
// Of at most THREADS elements: each thread adds up what comes before its own.
template <class Measure> __device__ __forceinline__ u64 reaches_few(const Element* few, int count, Measure measure, u64 enough, u64* found) {
  __syncthreads();
  if (threadIdx.x == 0) *found = 0;
  __syncthreads();
  if ((int)threadIdx.x < count) {
    const Element mine = few[threadIdx.x];
    u64 before = 0;
    for (int i = 0; i < count; ++i)
      if (few[i].order > mine.order) before += measure(few[i]);
    if (before < enough && before + measure(mine) >= enough) *found = mine.order;
  }
  __syncthreads();
  return *found;
}
// Of any number: eight bits of the order at a time, from the top. `bins`: THREADS + 9 words.
template <class At, class Measure>
__device__ __forceinline__ u64 reaches_many(At at, int count, Measure measure, u64 enough, u64* bins, u64* found) {
  u64 prefix = 0, all;
#pragma unroll 1
  for (int shift = 48; shift >= 0; shift -= 8) {
    __syncthreads();
    bins[threadIdx.x] = 0;
    __syncthreads();
#pragma unroll 1
    for (int i = threadIdx.x; i < count; i += THREADS) {
      const Element e = at(i);
      if (e.order >> shift >> 8 == prefix) atomicAdd(bins + (255 - (e.order >> shift & 255)), measure(e));
    }
    __syncthreads();
    const u64 mine = bins[threadIdx.x], before = sums_before(mine, bins + THREADS, &all);
    if (all < enough) return 0;  // in the first round, or never
    if (before < enough && before + mine >= enough) *found = 255 - threadIdx.x, bins[THREADS + 8] = before;
    __syncthreads();
    prefix = prefix << 8 | *found;
    enough -= bins[THREADS + 8];
  }
  __syncthreads();
  return prefix;
}

LAUNCH(sample_adjust, PARTS, THREADS, 0)
extern "C" __global__ void __launch_bounds__(THREADS) sample_adjust(const Step* step, Sampling* const* table, Shared* rows, float* logits) {
  __shared__ u64 warps[THREADS / 32];
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.y;
  const Sampling* how = row < step->head_rows ? table[row] : nullptr;
  if (!how || !how->counts && !how->bias) return;
  float* at = logits + (u64)row * VOCAB;
  u64 largest = 0;
  bool broken = false;
  for (int i = 0; i < EACH; ++i) {
    const u32 token = blockIdx.x * PART + i * THREADS + threadIdx.x;
    if (token >= VOCAB) break;
    float logit = at[token];
    broken |= !(logit < infinity());
    auto finite = [](float x) { return x != x ? -infinity() : fminf(x, 3.402823466e38f); };
    if (how->bias) logit = finite(__fadd_rn(logit, how->bias[token]));
    const u32 seen = how->counts ? how->counts[token] : 0;
    if (seen) {
      const float repeated = logit > 0.0f ? __fdiv_rn(logit, how->repetition) : __fmul_rn(logit, how->repetition);
      const float often = __fsub_rn(repeated, __fmul_rn((float)(seen - 1), how->frequency));
      logit = finite(__fsub_rn(often, seen > 1 ? how->presence : 0.0f));
    }
    at[token] = logit;
    const u64 order = order_of(logit, token);
    if (logit > -infinity() && order > largest) largest = order;
  }
  for (int bit = 16; bit; bit /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, bit));
  if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = largest;
  if (__syncthreads_or(broken) && threadIdx.x == 0) atomicOr(&rows[row].broken, 1u);
  if (threadIdx.x == 0) {
    for (int w = 1; w < THREADS / 32; ++w) largest = max(largest, warps[w]);
    atomicMax(&rows[row].largest, largest);
  }
}

LAUNCH(sample_weigh, PARTS, THREADS, 0)
extern "C" __global__ void __launch_bounds__(THREADS)
    sample_weigh(const Step* step, Sampling* const* table, Shared* rows, const float* logits, const u32* out) {
  __shared__ u32 counts[BINS];
  __shared__ u64 masses[BINS];
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.y;
  const Sampling* how = row < step->head_rows ? table[row] : nullptr;
  if (!how) return;
  Shared* shared = rows + row;
  const Row of(how, logits + (u64)row * VOCAB, shared, out[row]);
  if (!of.filtered || of.broken) return;
  for (int i = threadIdx.x; i < BINS; i += THREADS) counts[i] = 0, masses[i] = 0;
  __syncthreads();
  for (int i = 0; i < EACH; ++i) {
    const u32 token = blockIdx.x * PART + i * THREADS + threadIdx.x;
    if (token >= VOCAB) break;
    const double exponent = of.scale.exponent(of.logits[token]);
    const u64 weight = of.scale.weight(exponent);
    if (!weight) continue;
    const int bin = bin_of(exponent);
    atomicAdd(counts + bin, 1u);
    atomicAdd(masses + bin, weight);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < BINS; i += THREADS)
    if (counts[i]) {
      atomicAdd(shared->counts + i, counts[i]);
      atomicAdd(shared->masses + i, masses[i]);
    }
}

// Bins below `low` stay whole, those above `high` go; what comes before `low`, and the mass of all, where top_p counts alone.
struct Edge { int low, high; u32 listed; u64 before, all; };

// Where the histogram leaves off.
__device__ __forceinline__ Edge edge_of(const Row& of, const Shared* shared, u64* warps, Edge* edge) {
  constexpr int OF = BINS / THREADS;
  if (threadIdx.x == 0) *edge = {BINS, BINS, 0, 0, 0};
  if (!of.filtered) return __syncthreads(), *edge;
  u32 counts[OF];
  u64 masses[OF], count = 0, mass = 0, all_count, all_mass;
#pragma unroll
  for (int i = 0; i < OF; ++i) {
    counts[i] = shared->counts[threadIdx.x * OF + i], masses[i] = shared->masses[threadIdx.x * OF + i];
    count += counts[i], mass += masses[i];
  }
  u64 count_before = sums_before(count, warps, &all_count), mass_before = sums_before(mass, warps, &all_mass);
  const u32 top_k = of.how->top_k;
  const bool counted = top_k != 0 && top_k < all_count;
  const u64 enough = counted ? top_k : max(__double2ull_rz(__dmul_rn((double)of.how->top_p, __ull2double_rn(all_mass))), 1ull);
#pragma unroll
  for (int i = 0; i < OF; ++i) {
    const u64 before = counted ? count_before : mass_before, mine = counted ? counts[i] : masses[i];
    // With top_k all of what is left is looked at, as top_p is a part of its mass.
    if ((counted || of.how->top_p < 1.0f) && before < enough && before + mine >= enough)
      *edge = {counted ? 0 : (int)threadIdx.x * OF + i, (int)threadIdx.x * OF + i, (u32)(counted ? count_before + counts[i] : counts[i]),
               counted ? 0 : mass_before, all_mass};
    count_before += counts[i], mass_before += masses[i];
  }
  __syncthreads();
  return *edge;
}

// The order from which on tokens stay: those of top_k, then the nucleus of them. `reaches` looks among what is undecided, `mass_from`
// adds up what of it has an order or a larger one; `before` is the mass that comes before all of it, `all` the mass of the row.
template <class Reaches, class MassFrom>
__device__ __forceinline__ u64 cutoff(const Row& of, Reaches reaches, MassFrom mass_from, u64 before, u64 all) {
  const u32 top_k = of.how->top_k;
  u64 cut = 0;
  if (top_k != 0 && top_k < VOCAB) {
    cut = reaches([](const Element& e) { return e.weight ? 1ull : 0ull; }, (u64)top_k);
    if (cut && of.how->top_p < 1.0f) all = mass_from(cut);
  }
  if (of.how->top_p < 1.0f) {
    const u64 enough = max(__double2ull_rz(__dmul_rn((double)of.how->top_p, __ull2double_rn(all))), 1ull) - before;
    cut = max(cut, reaches([](const Element& e) { return e.weight; }, enough));
  }
  return cut;
}

__device__ __forceinline__ u64 draw(u64 (&s)[4]) {
  auto rotate = [](u64 x, int by) { return x << by | x >> (64 - by); };
  const u64 result = rotate(s[0] + s[3], 23) + s[0], shifted = s[1] << 17;
  s[2] ^= s[0], s[3] ^= s[1], s[1] ^= s[2], s[0] ^= s[3], s[2] ^= shifted, s[3] = rotate(s[3], 45);
  return result >> 11;
}

LAUNCH(sample_list, PARTS, THREADS, 0)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_list(const Step* step, Sampling* const* table, Shared* rows, const float* logits, const u32* out) {
  __shared__ u64 warps[THREADS / 32];
  __shared__ Edge edge_slot;
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.y;
  const Sampling* how = row < step->head_rows ? table[row] : nullptr;
  if (!how || !(how->inverse > 0.0)) return;
  Shared* shared = rows + row;
  const Row of(how, logits + (u64)row * VOCAB, shared, out[row]);
  if (of.broken) return;
  const Edge edge = edge_of(of, shared, warps, &edge_slot);
  bool broken = false;
  u64 mass = 0, all;
  for (int i = 0; i < EACH; ++i) {
    const u32 token = blockIdx.x * PART + i * THREADS + threadIdx.x;
    if (token >= VOCAB) break;
    const float logit = of.logits[token];
    broken |= !(logit < infinity());
    const double exponent = of.scale.exponent(logit);
    const u64 weight = of.scale.weight(exponent);
    if (!weight) continue;
    const int bin = edge.low == BINS ? 0 : bin_of(exponent);
    if (bin < edge.low) mass += weight >= of.least ? weight : 0;
    else if (bin <= edge.high && edge.listed <= LIST) shared->list[atomicAdd(&shared->listed, 1u)] = {order_of(logit, token), weight};
  }
  sums_before(mass, warps, &all);
  if (__syncthreads_or(broken) && threadIdx.x == 0) atomicOr(&shared->broken, 1u);
  if (threadIdx.x == 0) shared->parts[blockIdx.x] = all;
}

// The token of a row with a temperature.
__device__ __forceinline__ u32 drawn(const Row& of, Sampling* how, const Shared* shared) {
  __shared__ u64 bins[THREADS + 9], parts[THREADS], found;
  __shared__ Edge edge_slot;
  __shared__ Element few[THREADS];
  const Edge edge = edge_of(of, shared, bins, &edge_slot);
  // Too many for the list: then the whole row is looked through.
  const bool wide = edge.listed > LIST;
  const int listed = wide ? VOCAB : (int)shared->listed;
  auto element = [&](int i) {
    if (!wide) return shared->list[i];
    const float logit = of.logits[i];
    const u64 weight = of.scale.weight(logit);
    return Element{weight ? order_of(logit, i) : 0, weight};
  };
  auto mass_from = [&](u64 cut) {
    u64 mass = 0, all;
    for (int i = threadIdx.x; i < listed; i += THREADS) {
      const Element e = element(i);
      mass += e.order >= cut ? e.weight : 0;
    }
    sums_before(mass, bins, &all);
    return all;
  };
  // Which of the undecided stay.
  u64 cut = 0;
  if (listed > THREADS) {
    cut = cutoff(of, [&](auto measure, u64 enough) { return reaches_many(element, listed, measure, enough, bins, &found); }, mass_from,
                 wide ? 0 : edge.before, edge.all);
  } else if (listed) {
    if ((int)threadIdx.x < listed) few[threadIdx.x] = shared->list[threadIdx.x];
    cut = cutoff(of, [&](auto measure, u64 enough) { return reaches_few(few, listed, measure, enough, &found); }, mass_from, edge.before,
                 edge.all);
  }
  // Mass of each part of what stays.
  parts[threadIdx.x] = (int)threadIdx.x < PARTS && !wide ? shared->parts[threadIdx.x] : 0;
  __syncthreads();
  for (int i = threadIdx.x; i < listed; i += THREADS) {
    const Element e = element(i);
    if (e.weight && e.weight >= of.least && e.order >= cut) atomicAdd(parts + token_of(e.order) / PART, e.weight);
  }
  __syncthreads();
  // The part that the draw falls into, then the token: in the order of ids.
  u64 random[4] = {how->random[0], how->random[1], how->random[2], how->random[3]}, all;
  const u64 fraction = draw(random);
  u64 before = sums_before(parts[threadIdx.x], bins, &all);
  const u64 target = __umul64hi(fraction, all) << 11 | fraction * all >> 53;
  if (before <= target && before + parts[threadIdx.x] > target) found = threadIdx.x, bins[THREADS + 8] = before;
  __syncthreads();
  const u32 first = (u32)found * PART + threadIdx.x * EACH;
  before = bins[THREADS + 8];
  u64 weights[EACH], sum = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float logit = first + i < VOCAB ? of.logits[first + i] : -infinity();
    const u64 weight = of.scale.weight(logit);
    weights[i] = weight >= of.least && weight && order_of(logit, first + i) >= cut ? weight : 0;
    sum += weights[i];
  }
  before += sums_before(sum, bins, &all);
  if (before <= target && before + sum > target) {
    u32 past = 0;  // tokens that the draw is beyond
#pragma unroll
    for (int i = 0; i < EACH; ++i) before += weights[i], past += before <= target;
    found = first + past;
  }
  if (threadIdx.x == 0) how->random[0] = random[0], how->random[1] = random[1], how->random[2] = random[2], how->random[3] = random[3];
  __syncthreads();
  return (u32)found;
}

LAUNCH(sample_choose, 1, THREADS, 0)
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    sample_choose(const Step* step, Sampling* const* table, Shared* rows, const float* logits, u32* out) {
  launch_dependents();
  wait_predecessors();
  const u32 row = blockIdx.y, turn = step->turn & ~DEFERRED;
  if (row >= step->head_rows) return;
  Sampling* how = table[row];
  u32 token = out[row];
  if (how) {
    Shared* shared = rows + row;
    const Row of(how, logits + (u64)row * VOCAB, shared, token);
    if (of.broken || shared->broken) token = BROKEN;
    else if (how->inverse > 0.0) token = drawn(of, how, shared);
    else if (how->counts || how->bias) token = token_of(shared->largest);
    __syncthreads();
    // All is as it was, for the next step.
    for (int i = threadIdx.x; i < BINS; i += THREADS) shared->counts[i] = 0, shared->masses[i] = 0;
    if (threadIdx.x == 0) {
      shared->largest = 0, shared->broken = 0, shared->listed = 0;
      if (how->counts && token < VOCAB) how->counts[token] += how->counts[token] ? 1 : 2;
      publish(step, row, token, out);
    }
  }
  if (threadIdx.x == 0 && turn) announce(turn, row, token);
}
