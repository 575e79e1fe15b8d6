// Prefill beside decode: equal bits, and times. Part of decode.cu.
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

static Prompt* prompt; static u8 *pk_row, *pk_inner; static float *px, *pproj, *pmixed, *pconv, *pscales, *prouter, *pinner, *pproducts; static float2* pgates; static u32 *pchoice, *pcounts, *pplaces, *psorted, *pruns; static int p_most;
static void prefill_room(int rows) {
  if (p_most >= rows) return; p_most = rows; const u64 R = rows;
  prompt = (Prompt*)room(sizeof(Prompt) + R * 4); px = room<float>(R * HIDDEN); pproj = room<float>(R * std::max(DELTA_STRIDE, ATTN_STRIDE)); pmixed = room<float>(R * std::max(VALUE_WIDTH, ATTN_WIDTH));
  pconv = room<float>(R * CHANNELS); pscales = room<float>(R * KEY_HEADS); pgates = room<float2>(R * VALUE_HEADS); pk_row = room(R * std::max(rounded_bytes(HIDDEN_PARTS), std::max(rounded_bytes(VALUE_PARTS), rounded_bytes(ATTN_PARTS))));
  prouter = room<float>(R * ROUTER_STRIDE); pinner = room<float>(R * SLOTS * EXPERT_WIDTH); pk_inner = room(R * SLOTS * rounded_bytes(EXPERT_PARTS)); pproducts = room<float>(R * SLOTS * HIDDEN);
  pchoice = room<u32>(R * CHOICE_WORDS); pcounts = room<u32>(EXPERTS); pplaces = room<u32>(R * TOP_K); psorted = room<u32>(R * SLOTS); pruns = room<u32>(RUN_WORDS * (1 + R * SLOTS / 32 + EXPERTS + 2));
}
// Grid.x is the module's where it says one, else `gx`.
// `gy` counts rows, of which the module says how many a block takes.
#define PLANNED(kernel, gx, gy, ...) do { static u32 shape[4]; if (!shape[1]) CK(cudaMemcpyFromSymbol(shape, kernel##_launch, 16)); \
  launch(name_of(#kernel), kernel, dim3(shape[0] ? shape[0] : (gx), ((u32)(gy) + shape[3] - 1) / shape[3], 1), shape[1], shape[2], __VA_ARGS__); } while (0)
static const char* name_of(const char* n) { const char* c = strrchr(n, ':'); return c ? c + 1 : n; }
static void prefill_layer(int i, int R, const std::function<void(const char*)>& after) {
  Layer& l = layers[i]; auto did = [&](const char* n) { if (after) after(n); };
  const u32 o = l.ordinal;
  PLANNED(round_prefill, R, 1, prompt, l.norm, px, pk_row);
  const u32 tiles = l.in.tile_count();
  PLANNED(dense_prefill, ceil_div(tiles, Dense::TILES), R, prompt, l.in.tiles, pk_row, pproj, tiles, (u32)HIDDEN_PARTS, tiles * TILE, 0u);
  if (!is_attention(i)) {
    did("delta_in");
    PLANNED(p_delta::delta_conv_prefill, 0, R, prompt, pproj, l.conv, l.a_log, l.dt_bias, pconv, pscales, pgates, o);
    PLANNED(p_delta::delta_core_prefill, 0, 1, prompt, pconv, pgates, pproj, pmixed, o); did("delta_core");
    PLANNED(p_delta::delta_round_prefill, R, 1, prompt, pmixed, pscales, pproj, l.gnorm, pk_row);
  } else {
    did("attn_in");
    PLANNED(p_attn::attn_kv_prefill, 0, R, prompt, pproj, l.k_norm, inv_freq, o);
    PLANNED(p_attn::attn_core_prefill, 0, R + p_attn::POSITIONS, prompt, pproj, l.q_norm, inv_freq, pmixed, o); did("attn_core");
    PLANNED(p_attn::attn_round_prefill, R, 1, prompt, pmixed, pk_row);
  }
  const u32 out_tiles = HIDDEN / TILE;
  PLANNED(dense_prefill, ceil_div(out_tiles, Dense::TILES), R, prompt, l.out.tiles, pk_row, px, out_tiles, (u32)(is_attention(i) ? ATTN_PARTS : VALUE_PARTS), (u32)HIDDEN, 1u); did(is_attention(i) ? "attn_out" : "delta_out");
  PLANNED(round_prefill, R, 1, prompt, l.post_norm, px, pk_row);
  PLANNED(moe_route_prefill, 0, R, prompt, l.router.tiles, pk_row, prouter, pcounts); did("moe_route");
  PLANNED(moe_select_prefill, ceil_div(R, SELECT_ROWS), 1, prompt, prouter, pchoice, pcounts, pplaces);
  PLANNED(moe_sort_prefill, ceil_div(R, SORT_ROWS), 1, prompt, pchoice, pcounts, pplaces, psorted, pruns);
  const int runs = R * SLOTS + EXPERTS * GEMM_TOKENS;
  PLANNED(moe_up_prefill, 0, runs, prompt, l.up.tiles, pk_row, psorted, pruns, pinner); did("moe_up");
  PLANNED(moe_inner_prefill, R, 1, prompt, pinner, pk_inner);
  PLANNED(moe_down_prefill, 0, runs, prompt, l.down.tiles, pk_inner, psorted, pruns, pproducts);
  PLANNED(moe_sum_prefill, R, 1, prompt, pproducts, pchoice, px); did("moe_down");
}
static void run_prefill(int R, const std::function<void(const char*)>& after = nullptr) {
  PLANNED(embed_prefill, R, 1, prompt, embed_words, embed_pairs, px); if (after) after("embed");
  for (int i = 0; i < LAYERS; ++i) prefill_layer(i, R, after);
}
static u32 token_at(int position, bool skewed) { return skewed ? 7u : mix(5, position, 3) % VOCAB; }
static void set_prompt(int rows, int position, bool skewed = false) {
  prefill_room(rows); std::vector<u32> block(8 + rows); block[0] = rows; block[1] = position; u64 a[2] = {(u64)sequences[0].state, (u64)sequences[0].pages}; memcpy(&block[2], a, 16);
  for (int i = 0; i < rows; ++i) block[8 + i] = token_at(position + i, skewed);
  CK(cudaMemcpyAsync(prompt, block.data(), block.size() * 4, cudaMemcpyHostToDevice, stream)); CK(cudaStreamSynchronize(stream));
}
static std::vector<float> pages_now(int positions) { return down((float*)sequences[0].page[0], (u64)(positions / PAGE_TOKENS + 1) * PAGE_BYTES / 4); }
static void put(float* to, const std::vector<float>& v) { CK(cudaMemcpy(to, v.data(), v.size() * 4, cudaMemcpyHostToDevice)); }
// `rows` tokens from `position` on: through decode's batches, through prefill, and through prefill in pieces.
static void check_prefill(int position, int rows, bool skewed, std::vector<int> cuts) {
  make_sequences(1, position, rows + 8); const int end = position + rows; prefill_room(rows);
  const auto state0 = down(sequences[0].state, STATE_FLOATS), pages0 = pages_now(end);
  const bool trace = rows <= MAX_ROWS; typedef std::map<std::string, std::vector<float>> Trace; Trace decoded, filled;
  const auto note = [&](Trace& to, float* xs, float* ps, float* ms, float* rs, float* is, const std::string& key, int layer) {
    if (!trace || layer > 4) return; const std::string name = key + " of layer " + std::to_string(layer); const int w = is_attention(layer);
    if (key == "delta_in" || key == "attn_in") to[name] = down(ps, (u64)rows * (w ? ATTN_STRIDE : DELTA_STRIDE));
    else if (key == "attn_core") to[name] = down(ms, (u64)rows * ATTN_WIDTH);
    else if (key == "delta_core") to[name + " state"] = down(sequences[0].state + (u64)layers[layer].ordinal * VALUE_HEADS * 16384, VALUE_HEADS * 16384);
    else if (key == "moe_route") to[name] = down(rs, (u64)rows * ROUTER_STRIDE);
    else if (key == "moe_up") to[name] = down(is, (u64)rows * SLOTS * EXPERT_WIDTH);
    else to[name] = down(xs, (u64)rows * HIDDEN); };
  std::vector<float> want_x;
  for (int first = 0; first < rows; first += MAX_ROWS) {
    const int n = std::min(MAX_ROWS, rows - first); set_step(1, position + first); now.rows = n; now.seg_rows[0] = n; now.head_rows = 1; now.head_row[0] = n - 1;
    for (int i = 0; i < n; ++i) now.token[i] = token_at(position + first + i, skewed), now.position[i] = position + first + i, now.segment[i] = 0;
    upload(); int layer = -1;
    run_step(true, n, 0, [&](const char* what) { const std::string k = what; if (k == "delta_in" || k == "attn_in") ++layer; note(decoded, x, proj, mixed, router, inner, k, std::max(layer, 0)); });
    auto v = down(x, (u64)n * HIDDEN); want_x.insert(want_x.end(), v.begin(), v.end()); }
  CK(cudaGetLastError());
  const auto want_state = down(sequences[0].state, STATE_FLOATS), want_pages = pages_now(end);
  char b[160];
  for (int cut : cuts) {
    put(sequences[0].state, state0); put((float*)sequences[0].page[0], pages0); std::vector<float> got_x;
    for (int first = 0; first < rows; first += cut) { const int n = std::min(cut, rows - first); set_prompt(n, position + first, skewed); int layer = -1;
      CK(cudaMemset(pmixed, 0xff, (u64)n * VALUE_WIDTH * 4)); CK(cudaMemset(pinner, 0xff, (u64)n * SLOTS * EXPERT_WIDTH * 4)); CK(cudaMemset(pproducts, 0xff, (u64)n * SLOTS * HIDDEN * 4));
      run_prefill(n, [&](const char* what) { const std::string k = what; if (k == "delta_in" || k == "attn_in") ++layer; if (cut >= rows) note(filled, px, pproj, pmixed, prouter, pinner, k, std::max(layer, 0)); });
      auto v = down(px, (u64)n * HIDDEN); got_x.insert(got_x.end(), v.begin(), v.end()); CK(cudaGetLastError()); }
    if (cut >= rows && trace) for (auto& f : decoded) if (!equal_bits(f.first.c_str(), filled[f.first], f.second)) { int shown = 0; for (size_t i = 0; i < f.second.size() && shown < 4; ++i) if (memcmp(&f.second[i], &filled[f.first][i], 4)) printf("   at %zu: %.9g instead of %.9g\n", i, filled[f.first][i], f.second[i]), ++shown; }
    sprintf(b, "%d tokens from %d on%s, in pieces of %d: residual stream", rows, position, skewed ? " (one token again and again)" : "", cut); equal_bits(b, got_x, want_x);
    sprintf(b, "   states and tails"); equal_bits(b, down(sequences[0].state, STATE_FLOATS), want_state);
    sprintf(b, "   pages"); equal_bits(b, pages_now(end), want_pages); }
}
static void check_prefills() {
  check_prefill(0, 32, false, {32}); check_prefill(70, 32, false, {32, 13}); check_prefill(100, 201, false, {201, 64, 77}); check_prefill(0, 300, true, {300, 128}); check_prefill(4000, 260, false, {260, 100}); check_prefill(9000, 70, false, {70}); check_prefill(3, 1, false, {1}); check_prefill(63, 2, false, {2, 1});
}
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
  make_sequences(1, position, rows + 64); set_prompt(rows, position); options.pdl = false; run_prefill(rows); CK(cudaStreamSynchronize(stream));
  std::map<std::string, double> ms; std::map<std::string, int> count; std::vector<cudaEvent_t> events; std::vector<std::string> order; names.clear();
  launched = [&] { cudaEvent_t e; CK(cudaEventCreate(&e)); CK(cudaEventRecord(e, stream)); events.push_back(e); };
  launched(); run_prefill(rows); launched = nullptr; CK(cudaStreamSynchronize(stream)); options.pdl = true; double all = 0;
  for (size_t i = 0; i < names.size(); ++i) { float t; CK(cudaEventElapsedTime(&t, events[i], events[i + 1])); std::string n = names[i]; if (n == "dense_prefill") { static int turn; n += turn++ % 2 ? " out" : " in"; } if (!count[n]++) order.push_back(n); ms[n] += t; all += t; }
  for (auto& e : events) cudaEventDestroy(e);
  const double R = rows, H = HIDDEN, E = EXPERT_WIDTH; std::map<std::string, double> flop;
  flop["dense_prefill in"] = 2 * R * H * (DELTA_LAYERS * (double)DELTA_ROWS + ATTN_LAYERS * (double)ATTN_ROWS); flop["dense_prefill out"] = 2 * R * H * (DELTA_LAYERS * (double)VALUE_WIDTH + ATTN_LAYERS * (double)ATTN_WIDTH);
  flop["moe_route_prefill"] = 2 * R * H * (EXPERTS + 1) * LAYERS; flop["moe_up_prefill"] = 2 * R * SLOTS * 2 * E * H * LAYERS; flop["moe_down_prefill"] = 2 * R * SLOTS * E * H * LAYERS; flop["attn_core_prefill"] = 4 * R * (position + R / 2) * ATTN_WIDTH * ATTN_LAYERS;
  printf("%d tokens from %d on: %.2f ms in all\n", rows, position, all);
  for (auto& n : order) { printf("  %-22s %4d kernels %8.3f ms %8.1f us each", n.c_str(), count[n], ms[n], ms[n] / count[n] * 1e3); if (flop.count(n)) printf("  %6.1f TFLOP/s", flop[n] / ms[n] / 1e9); printf("\n"); }
}
