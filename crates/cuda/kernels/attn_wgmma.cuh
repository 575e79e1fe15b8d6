// Attention of a prompt on Hopper's warpgroup instructions.
//
// A block stays on its multiprocessor and takes one item of work after the other: QUERY_POSITIONS consecutive positions with the eight
// query heads of one KV head, 128 rows. Two warpgroups have 64 of them each: while the products of weights and a page's values are
// under way, scores with the next page's keys, which were started before, are turned into weights. One thread of a third asks the copy engine
// for queries, keys and values, which lie in memory as the instructions want them: PART_BYTES at a time into a ring of places in the
// order of their use, across items.
// Pages come one after the other from position 0 on, and all rows of an item see the same ones, so that what a position gets does not depend on
// how a prompt was cut. For the same reason a context has spans of SPAN_PAGES pages counted from position 0, whose results are joined in their
// order: by one block, which leaves what it has so far in memory at the end of each (4 us, of a span's 170), or, where there are few positions,
// by the last of the blocks that have a span each.
// For a page and 128 rows: 2,048 cycles of the tensor cores and 1,920 of shared memory (512 for what the copy engine writes, 1,408 for what
// the tensor cores read: scores read queries, of which a quarter is in registers, and keys, 64 x 16 each); 64 KB from L2. At the end of an item 64 KB of gates and as many of results.
// Reached: 217 us for 4,096 positions from 0 on (632 TFLOP/s), 2,694 from 28,672 on (765 TFLOP/s), 16 query heads.
// No shuffle may stand in a branch that the compiler cannot prove the same for all lanes: it then keeps the ring's addresses out of uniform registers, and a
// page takes 572 instructions instead of 490 (5 % of the time).
#pragma once

constexpr int POSITIONS = QUERY_POSITIONS;
constexpr int ATTENTION_CONSUMERS = 2, ATTENTION_THREADS = 128 * (ATTENTION_CONSUMERS + 1);
constexpr int ATTENTION_OTHER = ALIGNED + 256;  // to begin at a multiple of that; barriers and what is to be done
constexpr int RING = (SHARED_LIMIT - QUERY_BYTES - ATTENTION_OTHER) / PART_BYTES;
static_assert(RING >= 4, "two places are in use at a time");
constexpr int ATTENTION_SHARED = QUERY_BYTES + RING * PART_BYTES + ATTENTION_OTHER;
// A context is cut into spans of so many pages, counted from its beginning; what spans give is joined in their order.
constexpr int SPAN_PAGES = 128;
// So many results of spans there is room for: about three for each block.
constexpr int MOST_PARTS = 384;
static_assert(MULTIPROCESSORS <= MOST_PARTS, "each block may have one");

// The compiler may not move reads or writes of `c` across this.
template <int N> __device__ __forceinline__ void pin(float (&c)[N]) {
#pragma unroll
  for (int i = 0; i < N; ++i) asm volatile("" : "+f"(c[i])::"memory");
}
// An operand in shared memory, whole: its address and its shape.
__device__ __forceinline__ u64 operand_of(u32 address) { return (u64)OPERAND_SHAPE << 32 | operand(address); }

#define C8(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), "+f"(c[i + 7])
// c[64][64] = (more: +=) a[64][16] b[16][64], both in shared memory.
__device__ __forceinline__ void multiply_shared(float (&c)[32], u64 a, u64 b, int more) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, %34, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
               "%32, %33, p, 1, 1, 0, 0;}"
               : C8(c, 0), C8(c, 8), C8(c, 16), C8(c, 24)
               : "l"(a), "l"(b), "r"(more));
}
// c[64][256] += a[64][16] b[16][256], a in registers.
__device__ __forceinline__ void multiply_all(float (&c)[128], const u32* a, u64 b) {
  asm volatile("{.reg .pred p; setp.ne.b32 p, 1, 0;\n"
               "wgmma.mma_async.sync.aligned.m64n256k16.f32.f16.f16 "
               "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
               "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
               "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,"
               "%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108,%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
               "{%128,%129,%130,%131}, %132, p, 1, 1, 0;}"
               : C8(c, 0), C8(c, 8), C8(c, 16), C8(c, 24), C8(c, 32), C8(c, 40), C8(c, 48), C8(c, 56),
                 C8(c, 64), C8(c, 72), C8(c, 80), C8(c, 88), C8(c, 96), C8(c, 104), C8(c, 112), C8(c, 120)
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
#undef C8

using Place = Turn<RING>;

// Of the queries' dims so many are in registers, which spares the tensor cores reading them from shared memory for each page. For 128 there is no room.
constexpr int KEPT_DIMS = 64, KEPT_STEPS = KEPT_DIMS / 16;
using Kept = u32[KEPT_STEPS * 4];
// A warp's sixteen rows of them, as left operands.
__device__ __forceinline__ void keep_queries(Kept& kept, u32 rows, int lane) {
  const int row = lane / 8 % 2 * 8 + lane % 8;
#pragma unroll
  for (int i = 0; i < KEPT_STEPS; ++i) {
    const u32 from = rows + i / 4 * QUERY_BLOCK_BYTES + row * LINE_BYTES + line_unit(i % 4 * 2 + lane / 16, row) * 16;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(kept[4 * i]), "=r"(kept[4 * i + 1]), "=r"(kept[4 * i + 2]), "=r"(kept[4 * i + 3])
                 : "r"(from)
                 : "memory");
  }
}
// Starts the scores of a warpgroup's 64 rows with a page's keys.
__device__ __forceinline__ void start_scores(float (&s)[32], const Kept& kept, u64 queries, u64 keys) {
#pragma unroll
  for (int n = 0; n < HEAD_DIM / 16; ++n) {
    const int i = (n + KEPT_STEPS) % (HEAD_DIM / 16);
    const u64 b = keys + i / 4 * (KEY_BLOCK_BYTES >> 4) + i % 4 * STEP;
    if (i < KEPT_STEPS) multiply(s, kept + i * 4, (u32)b);
    else multiply_shared(s, queries + i / 4 * (QUERY_BLOCK_BYTES >> 4) + i % 4 * STEP, b, n);
  }
}
__device__ __forceinline__ void start_sums(float (&out)[128], const u32 (&weights)[16], u64 values) {
#pragma unroll
  for (int i = 0; i < PAGE_TOKENS / 16; ++i) multiply_all(out, weights + i * 4, values + i * STEP);
}

// What a row has seen: of rows g and g + 8 of the warp's sixteen.
struct Seen {
  float most[2], total[2];
};
// Turns scores into weights relative to the largest so far, and says by what the sums until now are multiplied.
__device__ __forceinline__ void weigh(float (&s)[32], Seen& seen, float (&shrink)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    float best = s[2 * r];
#pragma unroll
    for (int j = 0; j < 8; ++j) best = fmaxf(best, fmaxf(s[4 * j + 2 * r], s[4 * j + 2 * r + 1]));
    best = lanes_max<4>(best);
    const float before = seen.most[r];
    seen.most[r] = fmaxf(before, best);
    shrink[r] = fast_exp2(before - seen.most[r]);
    float sum[2] = {0, 0};
#pragma unroll
    for (int j = 0; j < 8; ++j)
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        float& w = s[4 * j + 2 * r + c];
        w = fast_exp2(w - seen.most[r]);
        sum[c] = __fadd_rn(sum[c], w);
      }
    seen.total[r] = __fadd_rn(__fmul_rn(seen.total[r], shrink[r]), __fadd_rn(sum[0], sum[1]));
  }
}
__device__ __forceinline__ void hide_later(float (&s)[32], int last, int t) {
#pragma unroll
  for (int j = 0; j < 8; ++j)
#pragma unroll
    for (int c = 0; c < 4; ++c)
      if (j * 8 + 2 * t + c % 2 > last + c / 2) s[4 * j + c] = -infinity();
}
__device__ __forceinline__ void pack_weights(u32 (&weights)[16], const float (&s)[32]) {
#pragma unroll
  for (int i = 0; i < 16; ++i) weights[i] = f16_pair(s[2 * i], s[2 * i + 1]);
}
// What a span gave, or several together, of all rows of a block: [32] float4 of each thread, then {most, total} of rows g and g + 8 of each.
constexpr int PARTIAL_THREADS = 128 * ATTENTION_CONSUMERS, PARTIAL_PARTS = HEAD_DIM / 8;
constexpr int PARTIAL_BYTES = PARTIAL_THREADS * (PARTIAL_PARTS + 1) * 16;
__device__ __forceinline__ float4 joined(const Shares (&shares)[2], float4 a, float4 b) {
  return make_float4(joined(shares[0], a.x, b.x), joined(shares[0], a.y, b.y), joined(shares[1], a.z, b.z), joined(shares[1], a.w, b.w));
}
// Joins the ends {most, total} of two spans.
__device__ __forceinline__ float4 join_ends(float4 earlier, float4 next, Shares (&shares)[2]) {
  shares[0] = join(earlier.x, next.x), shares[1] = join(earlier.y, next.y);
  return make_float4(earlier.x, earlier.y, joined(shares[0], earlier.z, next.z), joined(shares[1], earlier.w, next.w));
}
// Leaves what a span gave at `partial`, joined (MORE) with what is there.
template <bool MORE> __device__ __forceinline__ void leave(float4* partial, const float (&out)[128], const Seen& seen) {
  float4* end = partial + PARTIAL_PARTS * PARTIAL_THREADS;
  float4 ends = make_float4(seen.most[0], seen.most[1], seen.total[0], seen.total[1]);
  Shares shares[2];
  if (MORE) ends = join_ends(__ldcg(end), ends, shares);
  __stcg(end, ends);
  constexpr int AT_ONCE = 8;
#pragma unroll
  for (int i = 0; i < PARTIAL_PARTS; i += AT_ONCE) {
    float4 there[AT_ONCE];
    if (MORE) {
      __threadfence_block();  // there are no registers to ask for all at once
#pragma unroll
      for (int j = 0; j < AT_ONCE; ++j) there[j] = __ldcg(partial + (i + j) * PARTIAL_THREADS);
    }
#pragma unroll
    for (int j = 0; j < AT_ONCE; ++j) {
      const float* sum = out + 4 * (i + j);
      const float4 v = make_float4(sum[0], sum[1], sum[2], sum[3]);
      __stcg(partial + (i + j) * PARTIAL_THREADS, MORE ? joined(shares, there[j], v) : v);
    }
  }
}

// Attention of a warpgroup's 64 rows over a span's pages; of the last one those behind `last` are hidden, which may be all of them that there are.
__device__ __forceinline__ void attend_span(float (&out)[128], Seen& seen, u32 ring, u32 full, u32 empty, Place& place, const Kept& kept, u64 query,
                                            int pages, int last, int lane) {
  const int t = lane % 4;
  float s[32], shrink[2];
  u32 weights[16];
  seen = {{-infinity(), -infinity()}, {0, 0}};
#pragma unroll
  for (int i = 0; i < 128; ++i) out[i] = 0;
  barrier_wait(full + place.stage * 8, place.round);
  pin(s);
  warpgroup_fence();
  start_scores(s, kept, query, operand_of(ring + place.stage * PART_BYTES));
  warpgroup_commit();
  warpgroup_wait<0>();
  pin(s);
  if (lane == 0) barrier_arrive(empty + place.stage * 8);
  place.next();
  if (pages == 1) hide_later(s, last, t);
  weigh(s, seen, shrink);
  pack_weights(weights, s);
#pragma unroll 1
  for (int page = 1; page < pages; ++page) {
    const Place keys = place;
    place.next();
    barrier_wait(full + keys.stage * 8, keys.round);
    pin(s), pin(out);
    warpgroup_fence();
    start_scores(s, kept, query, operand_of(ring + keys.stage * PART_BYTES));
    warpgroup_commit();
    barrier_wait(full + place.stage * 8, place.round);
    warpgroup_fence();
    start_sums(out, weights, operand_of(ring + place.stage * PART_BYTES));
    warpgroup_commit();
    warpgroup_wait<1>();
    pin(s);
    if (lane == 0) barrier_arrive(empty + keys.stage * 8);
    if (page == pages - 1) hide_later(s, last, t);
    weigh(s, seen, shrink);
    // Multiplying with 1 changes nothing. The wait is in both branches, else the assembler moves it before the weights.
    if (__any_sync(~0u, shrink[0] != 1.0f || shrink[1] != 1.0f)) {
      warpgroup_wait<0>();
      pin(out);
#pragma unroll
      for (int i = 0; i < 128; ++i) out[i] = __fmul_rn(out[i], shrink[i / 2 % 2]);
    } else {
      warpgroup_wait<0>();
      pin(out);
    }
    if (lane == 0) barrier_arrive(empty + place.stage * 8);
    place.next();
    pack_weights(weights, s);
  }
  barrier_wait(full + place.stage * 8, place.round);
  pin(out);
  warpgroup_fence();
  start_sums(out, weights, operand_of(ring + place.stage * PART_BYTES));
  warpgroup_commit();
  warpgroup_wait<0>();
  pin(out);
  if (lane == 0) barrier_arrive(empty + place.stage * 8);
  place.next();
}

// An item of work: spans of a group of positions with a KV head.
struct Work {
  int kv_head, group;            // of the prompt's groups
  int position0, pages;          // of its first position; that it sees
  int first_span, end_span;      // that are added up; none: there is no more to do
  int parts;                     // results that are joined: 0, where there is one span; 1, where one block has all; else all spans
  u32 number;                    // where the first of them is left
};
// What the `turn`th item of this block is. Long ones come first, and who had the longest of a round has the shortest of the next.
__device__ __forceinline__ Work work_of(const Prompt* prompt, int& turn) {
  const int start = prompt->position, end = start + prompt->rows;
  const int first_group = start / POSITIONS, groups = (end - 1) / POSITIONS - first_group + 1;
  const int most_spans = ceil_div((end - 1) / PAGE_TOKENS + 1, SPAN_PAGES);
  // A few positions' spans are items of their own.
  const bool apart = most_spans > 1 && groups * KV_HEADS * most_spans <= MOST_PARTS;
  const int items = groups * KV_HEADS * (apart ? most_spans : 1);
  for (;; ++turn) {
    const int i = turn * gridDim.x + (turn % 2 ? gridDim.x - 1 - blockIdx.x : blockIdx.x);
    Work work;
    work.kv_head = i % KV_HEADS, work.group = groups - 1 - i / KV_HEADS % groups;
    work.position0 = (first_group + work.group) * POSITIONS, work.pages = work.position0 / PAGE_TOKENS + 1;
    const int spans = ceil_div(work.pages, SPAN_PAGES), span = i / KV_HEADS / groups;
    if (apart) {
      work.number = (work.group * KV_HEADS + work.kv_head) * most_spans, work.parts = spans > 1 ? spans : 0, work.first_span = span, work.end_span = span + 1;
    } else {
      work.number = blockIdx.x, work.parts = spans > 1, work.first_span = 0, work.end_span = spans;
    }
    if (i >= items) work.end_span = work.first_span;
    else if (span >= spans) continue;
    return work;
  }
}

constexpr int PUT_AT_ONCE = GROUP_EIGHTS;
// Where a thread's results go: rows g and g + 8 of the warp's sixteen, the same head of two positions.
struct Output {
  const u8* proj;
  u8* operands;
  int row, rows, head, t;
  __device__ __forceinline__ Output(const volatile Work* work, const Prompt* prompt, const u8* proj, u8* operands, int warp, int lane)
      : proj(proj), operands(operands), head(work->kv_head * GROUP_HEADS + lane / 4), t(lane % 4) {
    row = work->position0 + 2 * warp - (int)prompt->position, rows = prompt->rows;
  }
  // Dims 8 part + 2 t + {0, 1} of both rows, of so many parts: gates are asked for before anything is written.
  __device__ __forceinline__ void put(int part, const float4 (&sums)[PUT_AT_ONCE], const float (&shares)[2]) const {
    u32 gates[2][PUT_AT_ONCE];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
      for (int i = 0; i < PUT_AT_ONCE; ++i) gates[r][i] = there(r) ? two_results(proj, (head * 2 + 1) * HEAD_DIM + (part + i) * 8 + t * 2, row + r, rows) : 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      float2 v[PUT_AT_ONCE];
#pragma unroll
      for (int i = 0; i < PUT_AT_ONCE; ++i) {
        const float2 sum = r ? make_float2(sums[i].z, sums[i].w) : make_float2(sums[i].x, sums[i].y), z = f16_floats(gates[r][i]);
        v[i] = make_float2(sum.x * shares[r] * sigmoid(z.x), sum.y * shares[r] * sigmoid(z.y));
      }
      put_group(v, operands + (u64)(head * (HEAD_DIM / GROUP) + part / GROUP_EIGHTS) * group_bytes(rows), row + r, t, there(r));
    }
  }
  __device__ __forceinline__ bool there(int r) const { return row + r >= 0 && row + r < rows; }
};
// Joins `parts` results that lie one behind the other, and puts what they give.
__device__ __forceinline__ void put_joined(const float4* partial, int parts, const Output& output) {
#pragma unroll 1
  for (int j = 0; j < PARTIAL_PARTS; j += PUT_AT_ONCE) {
    float4 sum[PUT_AT_ONCE], all = __ldcg(partial + PARTIAL_PARTS * PARTIAL_THREADS);
#pragma unroll
    for (int i = 0; i < PUT_AT_ONCE; ++i) sum[i] = __ldcg(partial + (j + i) * PARTIAL_THREADS);
#pragma unroll 2
    for (int part = 1; part < parts; ++part) {
      const float4* next = partial + part * (PARTIAL_BYTES / 16);
      Shares shares[2];
      all = join_ends(all, __ldcg(next + PARTIAL_PARTS * PARTIAL_THREADS), shares);
#pragma unroll
      for (int i = 0; i < PUT_AT_ONCE; ++i) sum[i] = joined(shares, sum[i], __ldcg(next + (j + i) * PARTIAL_THREADS));
    }
    const float shares[2] = {__fdividef(1.0f, lanes_sum<4>(all.z)), __fdividef(1.0f, lanes_sum<4>(all.w))};
    output.put(j, sum, shares);
  }
}

LAUNCH_ROWS(attn_core_prefill, MULTIPROCESSORS, ATTENTION_THREADS, ATTENTION_SHARED, 0x7fffffff)
extern "C" __global__ void __launch_bounds__(ATTENTION_THREADS, 1)
    attn_core_prefill(const Prompt* prompt, const u8* proj, const u8* queries, u8* operands, u8* partials, u32* arrived,
                      const u8* expanded, u32 ordinal) {
  extern __shared__ __align__(16) u8 shared[];
  const int thread = threadIdx.x, lane = thread % 32, warpgroup = __shfl_sync(~0u, thread / 128, 0);
  const u32 base = shared_address(shared) + ((0u - shared_address(shared)) & (ALIGNED - 1));
  const u32 ring = base + QUERY_BYTES, full = ring + RING * PART_BYTES, empty = full + RING * 8;
  const u32 query_full = empty + RING * 8, query_empty = query_full + 8;
  // Of this item and the next: read again wherever something is needed, there are no registers to keep it. Then who came last.
  volatile Work* works = (volatile Work*)(shared + (query_empty + 8 - shared_address(shared)));
  volatile u32* came_last = (volatile u32*)(works + 2);
  if (thread == 0) {
    for (int i = 0; i < RING; ++i) barrier_init(full + i * 8, 1), barrier_init(empty + i * 8, 4 * ATTENTION_CONSUMERS);
    barrier_init(query_full, 1), barrier_init(query_empty, 4 * ATTENTION_CONSUMERS);
    barriers_ready();
  }
  __syncthreads();
  Place place;
  if (warpgroup == ATTENTION_CONSUMERS) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
    if (thread != 128 * ATTENTION_CONSUMERS) return;
#pragma unroll 1
    for (int turn = 0, item = 0;; ++turn, ++item) {
      const Work work = work_of(prompt, turn);
      const bool done = work.first_span == work.end_span;
      int span = work.first_span, use = 0;
      // Keys of the first page come before the queries, for which the warpgroups must have done the last item's products.
      const auto fetch = [&] {
        const int first = span * SPAN_PAGES, pages = min(SPAN_PAGES, work.pages - first);
        // Keys are one page ahead of values.
        const bool last = use == 2 * pages - 1, values = last || (use % 2 == 0 && use > 0);
        const int page = first + (last ? pages - 1 : values ? use / 2 - 1 : (use + 1) / 2);
        const u8* from = prompt_page(prompt, expanded, page, ordinal, work.kv_head) + (values ? PART_BYTES : 0);
        barrier_wait(empty + place.stage * 8, place.round ^ 1);
        barrier_expect(full + place.stage * 8, PART_BYTES);
        bulk_copy_expected(ring + place.stage * PART_BYTES, from, PART_BYTES, full + place.stage * 8);
        place.next();
        if (++use == 2 * pages) use = 0, ++span;
      };
      if (!done) fetch();
      barrier_wait(query_empty, (item & 1) ^ 1);
      volatile Work* to = works + item % 2;
      to->kv_head = work.kv_head, to->group = work.group, to->position0 = work.position0, to->pages = work.pages;
      to->first_span = work.first_span, to->end_span = work.end_span, to->parts = work.parts, to->number = work.number;
      if (done) {
        barrier_arrive(query_full);
        break;
      }
      barrier_expect(query_full, QUERY_BYTES);
      bulk_copy_expected(base, queries + (u64)(work.group * KV_HEADS + work.kv_head) * QUERY_BYTES, QUERY_BYTES, query_full);
#pragma unroll 1
      while (span < work.end_span) fetch();
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
    const int warp = thread / 32;
    const u64 query = operand_of(base + warpgroup * 64 * LINE_BYTES);
    float out[128];
    Seen seen;
#pragma unroll 1
    for (int item = 0;; ++item) {
      const volatile Work* work = works + item % 2;
      barrier_wait(query_full, item & 1);
      const int end_span = work->end_span;
      if (work->first_span == end_span) break;
      Kept kept;
      keep_queries(kept, base + (warpgroup * 64 + warp % 4 * 16) * LINE_BYTES, lane);
#pragma unroll 1
      for (int span = work->first_span;;) {
        const int pages = min(SPAN_PAGES, work->pages - span * SPAN_PAGES);
        const int last = work->position0 + 2 * warp - (span * SPAN_PAGES + pages - 1) * PAGE_TOKENS;
        attend_span(out, seen, ring, full, empty, place, kept, query, pages, last, lane);
        if (work->parts == 0) break;
        float4* partial = (float4*)(partials + (u64)PARTIAL_BYTES * work->number) + thread;
        if (work->parts > 1) leave<false>(partial + span * (PARTIAL_BYTES / 16), out, seen);
        else if (span == 0) leave<false>(partial, out, seen);
        else leave<true>(partial, out, seen);
        if (++span == work->end_span) break;
      }
      if (lane == 0) barrier_arrive(query_empty);
      const int parts = work->parts;
      if (parts == 0) {
        const Output output(work, prompt, proj, operands, warp, lane);
        float shares[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) shares[r] = __fdividef(1.0f, lanes_sum<4>(seen.total[r]));
#pragma unroll
        for (int j = 0; j < PARTIAL_PARTS; j += PUT_AT_ONCE) {
          float4 sums[PUT_AT_ONCE];
#pragma unroll
          for (int i = 0; i < PUT_AT_ONCE; ++i) sums[i] = make_float4(out[4 * (j + i)], out[4 * (j + i) + 1], out[4 * (j + i) + 2], out[4 * (j + i) + 3]);
          output.put(j, sums, shares);
        }
        continue;
      }
      if (parts > 1) {
        // Who comes last has all spans' results, and joins them.
        __threadfence();
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (thread == 0) {
          const bool last = atomicAdd(arrived + work->number, 1) == parts - 1u;
          if (last) arrived[work->number] = 0;
          *came_last = last;
        }
        asm volatile("bar.sync 1, 256;" ::: "memory");
        if (!*came_last) continue;
        __threadfence();
      }
      put_joined((const float4*)(partials + (u64)PARTIAL_BYTES * work->number) + thread, parts, Output(work, prompt, proj, operands, warp, lane));
    }
  }
}
