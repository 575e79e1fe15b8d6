// Prefill beside decode, prompts in pieces beside whole ones (equal bits), and times. Part of decode.cu.
#pragma once
#include "prompt.cuh"
#include "gemm.cuh"
namespace p_embed {
#include "embed_prefill.cu"
}
namespace p_dense {
#include "dense_prefill.cu"
}
namespace p_delta {
#include "delta_core_prefill.cu"
}
namespace p_attn {
#include "attn_core_prefill.cu"
}
namespace p_route {
#include "moe_route_prefill.cu"
}
namespace p_up {
#include "moe_up_prefill.cu"
}
namespace p_down {
#include "moe_down_prefill.cu"
}
using namespace p_embed; using namespace p_delta; using namespace p_attn; using namespace p_dense; using namespace p_route; using namespace p_up; using namespace p_down;

static Prompt* prompt; static u8 *pk_row, *pk_gathered, *pk_inner; static float *px, *pfloats, *pmixed, *prouter; static u8 *pproj, *pd_keys, *pd_heads; static u8* pproducts; static u8 *pqueries, *ppartials, *pexpanded; static u32 *parrived; static u32 *pchoice, *pcounts, *pplaces, *ppositions, *pruns; static int p_most;
// Bytes of a product's results for a token, of `stride` matrix rows; floats as f16 holds them; floats [tokens][stride] as results, and results as such floats.
constexpr u64 result_bytes(int stride) { return (u64)ceil_div(stride, COLUMN) * COLUMN_BYTES; }
__global__ void round_floats(float* v, u64 count) { for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) v[i] = from_f16(to_f16(v[i])); }
__global__ void as_results(const float* from, int stride, u32 tokens, u8* to) { const u32 token = blockIdx.x; for (int n = threadIdx.x; n < stride; n += blockDim.x) *(u16*)((u8*)results_at(to, n, token, tokens) + n % 8 * 2) = to_f16(from[(u64)token * stride + n]); }
__global__ void as_floats(const u8* from, int stride, u32 tokens, float* to) { const u32 token = blockIdx.x; for (int n = threadIdx.x; n < stride; n += blockDim.x) to[(u64)token * stride + n] = one_result(from, n, token, tokens); }
// Operands of `width` inputs as floats [tokens][width].
__global__ void operands_as_floats(const u8* from, int width, u32 tokens, float* to) { const u32 token = blockIdx.x; for (int k = threadIdx.x; k < width; k += blockDim.x) { const int in = k % GROUP, unit = in / 8 % 2 * 4 + in % 4, word = in / 16; to[(u64)token * width + k] = from_f16(*(const u16*)(from + (u64)(k / GROUP) * group_bytes(tokens) + token * GROUP_BYTES + (unit ^ token % EIGHT) * 16 + word * 4 + in / 4 % 2 * 2)); } }
// Random projections of `rows` tokens, which f16 holds.
static void fill_projections(float* to, int rows, int stride, u32 seed) { fill_floats<<<1024, 256, 0, stream>>>(to, (u64)rows * stride, seed, -2, 2); round_floats<<<1024, 256, 0, stream>>>(to, (u64)rows * stride); }
constexpr u64 ATTENTION_PART = 256 * 33 * 16;  // of a block of attention
static void prefill_room(int rows) {
  if (p_most >= rows) return; p_most = rows; const u64 R = rows, chunks = std::max(HIDDEN_PARTS, std::max(VALUE_PARTS, ATTN_PARTS)) * CHUNK_GROUPS;
  prompt = (Prompt*)room(sizeof(Prompt) + R * 4); px = room<float>(R * HIDDEN); pproj = room(R * std::max(result_bytes(DELTA_STRIDE), result_bytes(ATTN_STRIDE))); pfloats = room<float>(R * std::max(DELTA_STRIDE, ATTN_STRIDE)); pmixed = room<float>(R * std::max(VALUE_WIDTH, ATTN_WIDTH));
  pk_row = room(group_bytes(R) * chunks);
  prouter = room<float>(R * ROUTER_STRIDE); pk_gathered = room((u64)group_bytes(places_of(R)) * HIDDEN_PARTS * CHUNK_GROUPS); pk_inner = room((u64)group_bytes(places_of(R)) * EXPERT_PARTS * CHUNK_GROUPS); pproducts = room((u64)places_of(R) * HIDDEN * 2);
  pchoice = room<u32>(R * CHOICE_WORDS); pcounts = room<u32>(EXPERTS * 8); pplaces = room<u32>(R * TOP_K); ppositions = room<u32>(R * SLOTS); pruns = room<u32>(RUN_WORDS * (1 + R * SLOTS / 32 + EXPERTS + 2));
  pqueries = room((R / 16 + 2) * KV_HEADS * 65536); ppartials = room(384 * ATTENTION_PART), parrived = room<u32>(384);
  const u64 delta_chunks = R / p_delta::CHUNK_TOKENS + 2; pd_keys = room(delta_chunks * KEY_HEADS * p_delta::SHARED_PART); pd_heads = room(delta_chunks * VALUE_HEADS * p_delta::HEAD_PART);
}
// Pages of 8 bits as f16, up to position `end`.
static void expanded_room(int end) { static int most; if (!KV8 || end <= most) return; most = end; cudaFree(pexpanded); pexpanded = room((u64)(end / PAGE_TOKENS + 1) * KV_HEADS * STAGE_BYTES); }
// Grid.x is the module's where it says one, else `gx`.
// `gy` counts rows, of which the module says how many a block takes.
#define PLANNED(kernel, gx, gy, ...) do { static u32 shape[4]; if (!shape[1]) CK(cudaMemcpyFromSymbol(shape, kernel##_launch, 16)); \
  launch(name_of(#kernel), kernel, dim3(shape[0] ? shape[0] : (gx), ((u32)(gy) + shape[3] - 1) / shape[3], 1), shape[1], shape[2], __VA_ARGS__); } while (0)
static const char* name_of(const char* n) { const char* c = strrchr(n, ':'); return c ? c + 1 : n; }
static void run_delta(Layer& l, int R) {
  PLANNED(p_delta::delta_chunk_prefill, 0, R + p_delta::CHUNK_TOKENS - 1, prompt, pproj, l.conv, l.a_log, l.dt_bias, pd_keys, pd_heads, l.ordinal);
  PLANNED(p_delta::delta_core_prefill, 0, 1, prompt, pd_keys, pd_heads, pproj, l.conv, pmixed, l.ordinal);
}
static void expand_pages(u32 ordinal) {
#if KV_BITS == 8
  PLANNED(p_attn::attn_expand_prefill, 0, 1, prompt, pexpanded, ordinal);
#endif
}
// `alone`: nothing came before it.
static void prefill_layer(int i, int R, const std::function<void(const char*)>& after, bool alone = false) {
  Layer& l = layers[i]; auto did = [&](const char* n) { if (after) after(n); };
  const u32 o = l.ordinal;
  if (i == 0 || alone) PLANNED(round_prefill, R, 1, prompt, l.norm, (const u8*)nullptr, px, pk_row);
  const u32 tiles = l.in.tile_count();
  PLANNED(dense_prefill, ceil_div(tiles, Dense::TILES), R, prompt, l.in.tiles, pk_row, pproj, tiles, (u32)HIDDEN_PARTS);
  if (!is_attention(i)) {
    did("delta_in");
    run_delta(l, R); did("delta_core");
    PLANNED(p_delta::delta_round_prefill, R, 1, prompt, pmixed, pproj, l.gnorm, pk_row, o);
  } else {
    did("attn_in");
    PLANNED(p_attn::attn_kv_prefill, 0, R + 16, prompt, pproj, l.q_norm, l.k_norm, inv_freq, pqueries, o);
    expand_pages(o);
    PLANNED(p_attn::attn_core_prefill, 0, R + 16, prompt, pproj, pqueries, pk_row, ppartials, parrived, pexpanded, o); did("attn_core");
  }
  const u32 out_tiles = HIDDEN / TILE;
  PLANNED(dense_prefill, ceil_div(out_tiles, Dense::TILES), R, prompt, l.out.tiles, pk_row, pproj, out_tiles, (u32)(is_attention(i) ? ATTN_PARTS : VALUE_PARTS));
  PLANNED(round_prefill, R, 1, prompt, l.post_norm, pproj, px, pk_row); did(is_attention(i) ? "attn_out" : "delta_out");
  PLANNED(moe_route_prefill, 0, R, prompt, l.router.tiles, pk_row, prouter, pcounts); did("moe_route");
  PLANNED(moe_select_prefill, ceil_div(R, SELECT_ROWS), 1, prompt, prouter, pchoice, pcounts, pplaces);
  PLANNED(moe_sort_prefill, ceil_div(R, SORT_ROWS), 1, prompt, pchoice, pcounts, pplaces, ppositions, pruns);
  PLANNED(moe_gather_prefill, R, 1, prompt, pk_row, ppositions, pk_gathered, pk_inner);
  const int runs = R * SLOTS + EXPERTS * RUN_TOKENS;
  PLANNED(moe_up_prefill, 0, runs, prompt, l.up.tiles, pk_row, pk_gathered, pruns, pk_inner); did("moe_up");
  PLANNED(moe_down_prefill, 0, runs, prompt, l.down.tiles, pk_inner, pruns, pproducts);
  PLANNED(moe_sum_prefill, R, 1, prompt, pproducts, ppositions, pchoice, i + 1 < LAYERS ? layers[i + 1].norm : nullptr, px, pk_row); did("moe_down");
}
static void run_prefill(int R, const std::function<void(const char*)>& after = nullptr) {
  PLANNED(embed_prefill, R, 1, prompt, embed_words, embed_pairs, px); if (after) after("embed");
  for (int i = 0; i < LAYERS; ++i) prefill_layer(i, R, after);
}
static u32 token_at(int position, bool skewed) { return skewed ? 7u : mix(5, position, 3) % VOCAB; }
static void set_prompt(int rows, int position, bool skewed = false) {
  prefill_room(rows); expanded_room(position + rows); std::vector<u32> block(8 + rows); block[0] = rows; block[1] = position; u64 a[2] = {(u64)sequences[0].state, (u64)sequences[0].pages}; memcpy(&block[2], a, 16);
  for (int i = 0; i < rows; ++i) block[8 + i] = token_at(position + i, skewed);
  CK(cudaMemcpyAsync(prompt, block.data(), block.size() * 4, cudaMemcpyHostToDevice, stream)); CK(cudaStreamSynchronize(stream));
}
static std::vector<float> pages_now(int positions) { return down((float*)sequences[0].page[0], (u64)(positions / PAGE_TOKENS + 1) * PAGE_BYTES / 4); }
static void put(float* to, const std::vector<float>& v) { CK(cudaMemcpy(to, v.data(), v.size() * 4, cudaMemcpyHostToDevice)); }
static std::vector<float> minus(std::vector<float> a, const std::vector<float>& b) { for (size_t i = 0; i < a.size(); ++i) a[i] -= b[i]; return a; }
// Rows that `same` says.
static std::vector<float> rows_of(const std::vector<float>& v, const std::vector<bool>& same) { std::vector<float> to; const size_t w = v.size() / same.size(); for (size_t r = 0; r < same.size(); ++r) if (same[r]) to.insert(to.end(), v.begin() + r * w, v.begin() + (r + 1) * w); return to; }
// What a stage of a prompt may differ by from decode's, of its length: inputs, weights, what the experts' halves hand to each other and products are rounded to
// f16, decode's inputs to 12 bits; each by 2^-12 to 2^-10 of a number, in up to three products one after the other.
constexpr double PROMPT_ROUNDED = 3e-3;
// Keys and values that differ so little may be rounded to neighbours of 8 bits, half a step of which is this of a row's largest.
constexpr double STORED_ROUNDED = KV8 ? 1.0 / 254 : 0;
// Each of some layers on the same random residual stream, through decode's batch and through prefill.
static void check_prefill_stages(int position, int rows) {
  make_sequences(1, position, rows + 8); prefill_room(rows); const int end = position + rows; worst.clear();
  const auto state0 = down(sequences[0].state, STATE_FLOATS), pages0 = pages_now(end);
  set_step(1, position); now.rows = rows; now.seg_rows[0] = rows; now.head_rows = 1; now.head_row[0] = rows - 1; for (int i = 0; i < rows; ++i) now.position[i] = position + i, now.segment[i] = 0; upload(); set_prompt(rows, position);
  int others = 0;
  for (int i : {0, 3, LAYERS - 2, LAYERS - 1}) { typedef std::map<std::string, std::vector<float>> Trace; Trace want, got; const int width = is_attention(i) ? ATTN_STRIDE : DELTA_STRIDE;
    fill_floats<<<8, 256, 0, stream>>>(x, rows * HIDDEN, 4242 + position + i, -2, 2); const auto x0 = down(x, (u64)rows * HIDDEN); put(px, x0);
    const auto note = [&](Trace& to, float* xs, float* ps, float* rs, const std::string& k) {
      if (k == "delta_in" || k == "attn_in") to["1 " + k] = down(ps, (u64)rows * width); else if (k == "delta_core") to["2 state"] = down(sequences[0].state + (u64)layers[i].ordinal * VALUE_HEADS * 16384, VALUE_HEADS * 16384);
      else if (k == "delta_out" || k == "attn_out") to["3 " + k] = down(xs, (u64)rows * HIDDEN); else if (k == "moe_route") to["4 " + k] = down(rs, (u64)rows * ROUTER_STRIDE); else if (k == "moe_down") to["5 " + k] = down(xs, (u64)rows * HIDDEN); };
    run_layer(i, true, rows, [&](const char* k) { note(want, x, proj, router, k); });
    put(sequences[0].state, state0); put((float*)sequences[0].page[0], pages0);
    prefill_layer(i, rows, [&](const char* k) { if (strstr(k, "_in")) as_floats<<<rows, 256, 0, stream>>>(pproj, width, rows, pfloats); note(got, px, pfloats, prouter, k); }, true);
    std::vector<u32> a(rows * CHOICE_WORDS), b(a); CK(cudaMemcpy(a.data(), layers[i].choice, a.size() * 4, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(b.data(), pchoice, b.size() * 4, cudaMemcpyDeviceToHost));
    // Where two experts' logits are closer than that, the others' may be chosen: the row is left out, and counted.
    std::vector<bool> same; for (int r = 0; r < rows; ++r) { std::sort(&a[r * CHOICE_WORDS], &a[r * CHOICE_WORDS] + TOP_K); std::sort(&b[r * CHOICE_WORDS], &b[r * CHOICE_WORDS] + TOP_K); same.push_back(std::equal(&a[r * CHOICE_WORDS], &a[r * CHOICE_WORDS] + TOP_K, &b[r * CHOICE_WORDS])); others += !same.back(); }
    const std::string out = is_attention(i) ? "3 attn_out" : "3 delta_out";
    for (auto& w : want) { auto& g = got[w.first]; const bool added = w.first[0] == '3' || w.first[0] == '5'; const auto& before = w.first[0] == '5' ? want[out] : x0; auto& before_got = w.first[0] == '5' ? got[out] : x0;
      const double limit = PROMPT_ROUNDED + (is_attention(i) && w.first[0] > '2' ? STORED_ROUNDED : 0);
      if (w.first[0] == '5') compare(w.first, rows_of(minus(g, before_got), same), rows_of(minus(w.second, before), same), limit); else compare(w.first, added ? minus(g, before_got) : g, added ? minus(w.second, before) : w.second, limit); }
    put(sequences[0].state, state0); put((float*)sequences[0].page[0], pages0); }
  if (others * 20 > 4 * rows + 20) { ++failures; printf("FAILED: %d of %d rows chose other experts\n", others, 4 * rows); }
  printf("%d tokens from %d on beside decode, %d of %d rows with other experts;", rows, position, others, 4 * rows); for (auto& w : worst) printf("  %s %.2g", w.first.c_str() + 2, w.second); printf("\n");
}
// `rows` tokens from `position` on, in pieces that begin at multiples of 64: equal bits whatever the pieces.
static void check_prefill(int position, int rows, bool skewed, std::vector<int> cuts) {
  make_sequences(1, position, rows + 8); const int end = position + rows; prefill_room(rows);
  const auto state0 = down(sequences[0].state, STATE_FLOATS), pages0 = pages_now(end); std::vector<float> want_x, want_state, want_pages; char b[160];
  cuts.insert(cuts.begin(), rows);
  for (int cut : cuts) {
    put(sequences[0].state, state0); put((float*)sequences[0].page[0], pages0); std::vector<float> got_x;
    for (int first = 0; first < rows; first += cut) { const int n = std::min(cut, rows - first); set_prompt(n, position + first, skewed);
      CK(cudaMemset(pmixed, 0xff, (u64)n * VALUE_WIDTH * 4)); CK(cudaMemset(pproducts, 0xff, (u64)n * SLOTS * HIDDEN * 2)); run_prefill(n); CK(cudaGetLastError());
      auto v = down(px, (u64)n * HIDDEN); got_x.insert(got_x.end(), v.begin(), v.end()); CK(cudaGetLastError()); }
    const auto state = down(sequences[0].state, STATE_FLOATS), pages = pages_now(end);
    if (cut == rows) { want_x = got_x; want_state = state; want_pages = pages; for (float f : got_x) if (!(fabs(f) < 1e30)) { ++failures; printf("FAILED: not a number\n"); break; } continue; }
    sprintf(b, "%d tokens from %d on%s, in pieces of %d: residual stream", rows, position, skewed ? " (one token again and again)" : "", cut); equal_bits(b, got_x, want_x);
    sprintf(b, "   states and tails"); equal_bits(b, state, want_state);
    sprintf(b, "   pages"); equal_bits(b, pages, want_pages); }
}
static void check_prefills() {
  check_prefill_stages(0, 32); check_prefill_stages(70, 32); check_prefill_stages(5, 13); check_prefill_stages(4000, 32); check_prefill_stages(9000, 1);
  check_prefill(64, 201, false, {64, 128}); check_prefill(0, 300, true, {128, 64}); check_prefill(4032, 260, false, {64, 192}); check_prefill(8960, 129, false, {128, 64}); check_prefill(0, 1000, false, {512, 64});
}
// The recurrence token by token in double: a block a value head, a thread a value row; `states` f64 [VALUE_HEADS][128 keys][128 values].
__global__ void ref_delta(const float* proj, const float* conv, const float* a_log, const float* dt_bias, const float* tails, double* states, double* out, int rows) {
  __shared__ double q[128], k[128], part[2][128]; const int h = blockIdx.x, i = threadIdx.x, key_head = h * KEY_HEADS / VALUE_HEADS; double* s = states + (u64)h * 16384 + i;
  const auto mixed = [&](int row, int channel) { double sum = 0; for (int j = 0; j < 4; ++j) { const int from = row - 3 + j; sum += (double)conv[channel * 4 + j] * (from < 0 ? tails[(from + 3) * CHANNELS + channel] : proj[(u64)from * DELTA_STRIDE + channel]); } return sum / (1 + exp(-sum)); };
  for (int row = 0; row < rows; ++row) {
    const double a = mixed(row, key_head * 128 + i), b = mixed(row, KEY_WIDTH + key_head * 128 + i); part[0][i] = a * a, part[1][i] = b * b; __syncthreads();
    double lengths[2] = {1e-6, 1e-6}; for (int j = 0; j < 128; ++j) lengths[0] += part[0][j], lengths[1] += part[1][j];
    q[i] = a / sqrt(lengths[0] * 128), k[i] = b / sqrt(lengths[1]); __syncthreads();
    const float* gates = proj + (u64)row * DELTA_STRIDE + CHANNELS + VALUE_WIDTH + h; const double x = (double)gates[VALUE_HEADS] + dt_bias[h], keep = exp(-exp((double)a_log[h]) * (x > 30 ? x : log1p(exp(x)))), strength = 1 / (1 + exp(-(double)gates[0]));
    double recalled = 0; for (int j = 0; j < 128; ++j) { s[j * 128] *= keep; recalled += s[j * 128] * k[j]; }
    const double d = (mixed(row, 2 * KEY_WIDTH + h * 128 + i) - recalled) * strength; double o = 0; for (int j = 0; j < 128; ++j) { s[j * 128] += d * k[j]; o += s[j * 128] * q[j]; }
    out[(u64)row * VALUE_WIDTH + h * 128 + i] = o; __syncthreads(); } }
// Gates of all kinds: as they come, nothing kept at every third token, everything kept, almost nothing written.
__global__ void set_gates(float* proj, int rows, int kind) {
  for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < rows * VALUE_HEADS; i += gridDim.x * blockDim.x) {
    const int row = i / VALUE_HEADS, h = i % VALUE_HEADS; float* at = proj + (u64)row * DELTA_STRIDE + CHANNELS + VALUE_WIDTH + h;
    if (kind == 1 && row % 3 == 0) at[VALUE_HEADS] = h % 2 ? 1e4f : 300; if (kind == 2) at[VALUE_HEADS] = -40, at[0] = 20; if (kind == 3) at[0] = -20; } }
// Stage delta_core of a prompt alone, against double; in pieces too, which have the same bits if they are cut where chunks begin.
// A state of which nothing is left is judged by this of an element: halves end at 6e-8, and the norm that follows adds 1e-6 to a mean square.
constexpr double DELTA_LIMIT = 1e-3, DELTA_NOTHING = 1e-5;
static void check_delta(int position, int rows, int kind, std::vector<int> cuts) {
  make_sequences(1, 8, 8); prefill_room(rows); Layer& l = layers[1]; const u64 S = (u64)VALUE_HEADS * 16384, T = 3 * CHANNELS;
  float* all = room<float>((u64)(rows + 1) * DELTA_STRIDE); fill_projections(all, rows, DELTA_STRIDE, 31 * position + rows); set_gates<<<64, 256, 0, stream>>>(all, rows, kind);
  const auto state0 = down(sequences[0].state, STATE_FLOATS); const float *begin = state0.data() + l.ordinal * S, *tails = sequences[0].state + STATES + l.ordinal * T;
  std::vector<double> states(S), out((u64)rows * VALUE_WIDTH); for (u64 h = 0; h < VALUE_HEADS; ++h) for (int v = 0; v < 128; ++v) for (int k = 0; k < 128; ++k) states[h * 16384 + k * 128 + v] = begin[h * 16384 + v * 128 + k];
  double *dev_states = room<double>(S), *dev_out = room<double>(out.size()); CK(cudaMemcpy(dev_states, states.data(), S * 8, cudaMemcpyHostToDevice));
  ref_delta<<<VALUE_HEADS, 128, 0, stream>>>(all, l.conv, l.a_log, l.dt_bias, tails, dev_states, dev_out, rows); CK(cudaStreamSynchronize(stream));
  CK(cudaMemcpy(states.data(), dev_states, S * 8, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(out.data(), dev_out, out.size() * 8, cudaMemcpyDeviceToHost));
  std::vector<float> want_tails(T); for (int age = 0; age < 3; ++age) { const int row = rows - 3 + age; const auto from = row < 0 ? std::vector<float>() : down(all + (u64)row * DELTA_STRIDE, CHANNELS); for (int c = 0; c < CHANNELS; ++c) want_tails[age * CHANNELS + c] = row < 0 ? state0[STATES + l.ordinal * T + (row + 3) * CHANNELS + c] : from[c]; }
  std::vector<float> whole, whole_state;
  for (int cut : cuts) {
    put(sequences[0].state, state0); std::vector<float> got; bool aligned = true;
    for (int first = 0, n; first < rows; first += n) { n = std::min(cut, rows - first); set_prompt(n, position + first); aligned = aligned && (first == 0 || (position + first) % p_delta::CHUNK_TOKENS == 0); CK(cudaMemset(pmixed, 0xff, (u64)n * VALUE_WIDTH * 4));
      as_results<<<n, 256, 0, stream>>>(all + (u64)first * DELTA_STRIDE, DELTA_STRIDE, n, pproj); run_delta(l, n); PLANNED(p_delta::delta_round_prefill, n, 1, prompt, pmixed, pproj, l.gnorm, pk_row, l.ordinal); CK(cudaStreamSynchronize(stream)); CK(cudaGetLastError()); auto v = down(pmixed, (u64)n * VALUE_WIDTH); got.insert(got.end(), v.begin(), v.end()); }
    const auto end = down(sequences[0].state, STATE_FLOATS); double d = 0, n = 0, ds = 0, ns = 0; for (size_t i = 0; i < out.size(); ++i) d += pow(got[i] - out[i], 2), n += out[i] * out[i];
    for (u64 h = 0; h < VALUE_HEADS; ++h) for (int v = 0; v < 128; ++v) for (int k = 0; k < 128; ++k) { const double w = states[h * 16384 + k * 128 + v]; ds += pow(end[l.ordinal * S + h * 16384 + v * 128 + k] - w, 2), ns += w * w; }
    const double e = sqrt(d / n), es = sqrt(ds / (ns + S * pow(DELTA_NOTHING, 2))); bool good = e < DELTA_LIMIT && es < DELTA_LIMIT && !memcmp(&end[STATES + l.ordinal * T], want_tails.data(), T * 4);
    for (u64 i = 0; i < STATE_FLOATS; ++i) if (i / S != (u64)l.ordinal && i < STATES && memcmp(&end[i], &state0[i], 4)) { good = false; printf("another layer's state\n"); break; }
    if (whole.empty()) whole = got, whole_state = end; const bool equal = !memcmp(whole.data(), got.data(), got.size() * 4) && !memcmp(whole_state.data(), end.data(), STATE_FLOATS * 4); if (aligned && !equal) good = false;
    failures += !good; printf("%sdelta, %d tokens from %d on, gates %d, in pieces of %d: answers %.2e, state %.2e%s\n", good ? "" : "FAILED ", rows, position, kind, cut, e, es, equal ? ", equal bits" : ""); }
  cudaFree(all); cudaFree(dev_states); cudaFree(dev_out); }
static void check_deltas() {
  check_delta(0, 64, 0, {64}); check_delta(0, 300, 0, {300, 64, 128, 77}); check_delta(130, 263, 0, {263, 62 + 64}); check_delta(65, 1, 0, {1}); check_delta(63, 2, 0, {2, 1}); check_delta(5, 3, 0, {3, 2, 1}); check_delta(1, 63, 0, {63});
  check_delta(60, 200, 1, {200, 4}); check_delta(0, 256, 2, {256, 192}); check_delta(0, 200, 3, {200, 64}); check_delta(0, 2048, 0, {2048, 512}); check_delta(0, 2048, 2, {2048, 1024}); }
// The stage alone, over and over: us of each kernel of a layer.
static void time_delta(int rows) {
  make_sequences(1, 8, 8); set_prompt(rows, 0); fill_projections(pfloats, rows, DELTA_STRIDE, 3); as_results<<<rows, 256, 0, stream>>>(pfloats, DELTA_STRIDE, rows, pproj); std::map<std::string, std::vector<float>> us; std::vector<cudaEvent_t> events; names.clear();
  launched = [&] { cudaEvent_t e; CK(cudaEventCreate(&e)); CK(cudaEventRecord(e, stream)); events.push_back(e); };
  launched(); for (int i = 0; i < LAYERS; ++i) if (!is_attention(i)) { run_delta(layers[i], rows); PLANNED(p_delta::delta_round_prefill, rows, 1, prompt, pmixed, pproj, layers[i].gnorm, pk_row, layers[i].ordinal); }
  launched = nullptr; CK(cudaStreamSynchronize(stream)); CK(cudaGetLastError());
  for (size_t i = 0; i < names.size(); ++i) { float t; CK(cudaEventElapsedTime(&t, events[i], events[i + 1])); us[names[i]].push_back(t * 1e3f); } for (auto& e : events) cudaEventDestroy(e);
  double all = 0; printf("%d tokens:", rows); for (auto& n : us) { auto& v = n.second; std::sort(v.begin(), v.end()); const double m = v[v.size() / 2]; all += m; printf(" %s %.1f us,", n.first.c_str(), m); } printf(" in %d layers %.2f ms\n", DELTA_LAYERS, all * DELTA_LAYERS / 1e3); }
static void time_prefill(const std::vector<int>& lengths, int most) {
  for (int length : lengths) {
    make_sequences(1, 0, length + 64); prefill_room(std::min(length, most)); std::vector<double> all; const int repeats = length > 40000 ? 2 : length > 10000 ? 3 : 7;
    cudaEvent_t a, e; cudaEventCreate(&a); cudaEventCreate(&e);
    for (int r = 0; r < repeats; ++r) { double total = 0;
      for (int first = 0; first < length; first += most) { const int n = std::min(most, length - first); set_prompt(n, first); cudaEventRecord(a, stream); run_prefill(n); cudaEventRecord(e, stream); CK(cudaEventSynchronize(e)); float t; cudaEventElapsedTime(&t, a, e); total += t; }
      all.push_back(total); }
    CK(cudaGetLastError()); std::sort(all.begin(), all.end()); printf("prefill of %d tokens, %d at once: %.2f ms = %.0f tokens/s\n", length, most, all[all.size() / 2], length / all[all.size() / 2] * 1e3); }
}
// Each kernel's time, alone, summed over the pass, with its arithmetic.
static void time_prefill_stages(int rows, int position) {
  make_sequences(1, position, rows + 64); set_prompt(rows, position); run_prefill(rows); CK(cudaStreamSynchronize(stream));
  std::map<std::string, double> ms; std::map<std::string, int> count; std::vector<cudaEvent_t> events; std::vector<std::string> order; names.clear();
  launched = [&] { cudaEvent_t e; CK(cudaEventCreate(&e)); CK(cudaEventRecord(e, stream)); events.push_back(e); };
  launched(); run_prefill(rows); launched = nullptr; CK(cudaStreamSynchronize(stream)); double all = 0;
  for (size_t i = 0; i < names.size(); ++i) { float t; CK(cudaEventElapsedTime(&t, events[i], events[i + 1])); std::string n = names[i]; if (n == "dense_prefill") { static int turn; n += turn++ % 2 ? " out" : " in"; } if (!count[n]++) order.push_back(n); ms[n] += t; all += t; }
  for (auto& e : events) cudaEventDestroy(e);
  const double R = rows, H = HIDDEN, E = EXPERT_WIDTH; std::map<std::string, double> flop;
  flop["dense_prefill in"] = 2 * R * H * (DELTA_LAYERS * (double)DELTA_ROWS + ATTN_LAYERS * (double)ATTN_ROWS); flop["dense_prefill out"] = 2 * R * H * (DELTA_LAYERS * (double)VALUE_WIDTH + ATTN_LAYERS * (double)ATTN_WIDTH);
  flop["moe_route_prefill"] = 2 * R * H * (EXPERTS + 1) * LAYERS; flop["moe_up_prefill"] = 2 * R * SLOTS * 2 * E * H * LAYERS; flop["moe_down_prefill"] = 2 * R * SLOTS * E * H * LAYERS; flop["attn_core_prefill"] = 4 * R * (position + R / 2) * ATTN_WIDTH * ATTN_LAYERS;
  printf("%d tokens from %d on: %.2f ms in all\n", rows, position, all);
  for (auto& n : order) { printf("  %-22s %4d kernels %8.3f ms %8.1f us each", n.c_str(), count[n], ms[n], ms[n] / count[n] * 1e3); if (flop.count(n)) printf("  %6.1f TFLOP/s", flop[n] / ms[n] / 1e9); printf("\n"); }
}
