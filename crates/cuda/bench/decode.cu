// Checks and times the decode kernels alone, at the geometry given by macros, on random weights made on the device.
//
// Every stage is run on inputs that the stages before it produced and compared with a plain form written here from the
// formulas of the model, whose weights are computed from the same hash in the checkpoint's order. Then whole steps: rows of a
// batch and rows of a prompt against the same tokens one by one (equal bits), and times of captured graphs.
//   build.sh, then: decode [check] [time] [batch] ...
#include <cuda_runtime.h>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <algorithm>
#include <functional>
#include <map>
#include <string>
#include <vector>
#include "tiles.cuh"
#include "choice.cuh"
#include "delta.cuh"
#include "attention.cuh"
namespace s_embed {
#include "embed.cu"
}
namespace s_delta_in {
#include "delta_in.cu"
}
namespace s_delta_core {
#include "delta_core.cu"
}
namespace s_delta_out {
#include "delta_out.cu"
}
namespace s_attn_in {
#include "attn_in.cu"
}
namespace s_attn_core {
#include "attn_core.cu"
}
namespace s_attn_out {
#include "attn_out.cu"
}
namespace s_moe_route {
#include "moe_route.cu"
}
namespace s_moe_up {
#include "moe_up.cu"
}
namespace s_moe_down {
#include "moe_down.cu"
}
namespace s_head {
#include "head.cu"
}
namespace s_sample {
#include "sample.cu"
}
using namespace s_embed; using namespace s_delta_in; using namespace s_delta_core; using namespace s_delta_out; using namespace s_attn_in;
using namespace s_attn_core; using namespace s_attn_out; using namespace s_moe_route; using namespace s_moe_up; using namespace s_moe_down;
using namespace s_head; using namespace s_sample;

#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("%s:%d %s\n", __FILE__, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
constexpr int LAYERS = DELTA_LAYERS + ATTN_LAYERS;
static bool is_attention(int layer) { return layer % 4 == 3; }
static cudaStream_t stream;
static int sms;

// ---- weights -------------------------------------------------------------------------------------------------------------

__host__ __device__ inline u32 mix(u32 a, u32 b, u32 c) {
  u32 h = a * 0x9e3779b1u ^ b * 0x85ebca77u ^ c * 0xc2b2ae3du;
  h ^= h >> 15; h *= 0x2c1b3c6du; h ^= h >> 12; h *= 0x297a2d39u; h ^= h >> 15;
  return h;
}
__host__ __device__ inline float unit(u32 h) { return (h >> 8) * (1.0f / 16777216.0f); }
struct Kind { u32 id; int rows, cols, bits; };  // of a matrix: what its elements are made from
__device__ inline u32 word(const Kind& m, int row, int w) { return mix(m.id, row, w); }
__device__ inline u32 bf16_bits(float x) { u32 b = __float_as_uint(x); return (b + 0x7fff + (b >> 16 & 1)) >> 16; }
__device__ inline u32 pair(const Kind& m, int row, int group) {
  const float top = m.bits == 4 ? 15.0f : 255.0f, s = 3.46f / (top * sqrtf((float)m.cols));
  const u32 h = mix(m.id ^ 0x5555, row, group);
  const float scale = s * (0.75f + 0.5f * unit(h)), bias = -0.5f * top * scale * (0.95f + 0.1f * unit(h * 77777u));
  return bf16_bits(scale) | bf16_bits(bias) << 16;
}
__device__ inline float element(const Kind& m, int row, int col) {
  const u32 p = pair(m, row, col / GROUP);
  const u32 q = m.bits == 4 ? word(m, row, col / 8) >> col % 8 * 4 & 15 : word(m, row, col / 4) >> col % 4 * 8 & 255;
  return pair_scale(p) * (float)q + pair_bias(p);
}
__global__ void fill_tiles(u8* out, Kind m) {
  const int chunks = ceil_div(m.cols, CHUNK), bytes = m.bits == 4 ? CHUNK4 : CHUNK8;
  const u64 chunk_count = (u64)ceil_div(m.rows, TILE) * chunks;
  for (u64 c = blockIdx.x; c < chunk_count; c += gridDim.x) {
    u8* at = out + c * bytes;
    const int row0 = c / chunks * TILE, group0 = c % chunks * 4, lane = threadIdx.x % 32, j = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    auto w = [&](int row, int i) { return row < m.rows && i * (m.bits == 4 ? 8 : 4) < m.cols ? word(m, row, i) : 0u; };
    const int group = group0 + j;
    if (m.bits == 4) {
      *(uint4*)(at + j * 512 + lane * 16) = make_uint4(w(row0 + g, group * 8 + 2 * t), w(row0 + g, group * 8 + 2 * t + 1), w(row0 + g + 8, group * 8 + 2 * t), w(row0 + g + 8, group * 8 + 2 * t + 1));
    } else {
      for (int h = 0; h < 2; ++h) {
        u8 b[16], o[16]; u32 raw[4];
        for (int i = 0; i < 4; ++i) raw[i] = w(row0 + g + 8 * h, group * 16 + 4 * t + i);
        for (int i = 0; i < 16; ++i) b[i] = raw[i / 4] >> i % 4 * 8;
        const int order[16] = {0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15};
        for (int i = 0; i < 16; ++i) o[i] = b[order[i]];
        memcpy(at + j * 1024 + h * 512 + lane * 16, o, 16);
      }
    }
    if (j == 0) for (int h = 0; h < 2; ++h) {
      const int row = row0 + g + 8 * h, of = group0 + t;
      ((u32*)(at + bytes - PARAMETERS))[lane * 2 + h] = row < m.rows && of * GROUP < m.cols ? pair(m, row, of) : 0;
    }
  }
}
__global__ void fill_plain(u32* words, u32* pairs, Kind m) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < (u64)m.rows * m.cols / 8; i += (u64)gridDim.x * blockDim.x) words[i] = word(m, i / (m.cols / 8), i % (m.cols / 8));
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < (u64)m.rows * m.cols / GROUP; i += (u64)gridDim.x * blockDim.x) pairs[i] = pair(m, i / (m.cols / GROUP), i % (m.cols / GROUP));
}
__global__ void fill_floats(float* out, u64 count, u32 seed, float low, float high) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < count; i += (u64)gridDim.x * blockDim.x) out[i] = low + (high - low) * unit(mix(seed, (u32)i, (u32)(i >> 32)));
}
__global__ void fill_page(u8* out, u64 bytes, u32 seed) {
  for (u64 i = blockIdx.x * (u64)blockDim.x + threadIdx.x; i < bytes / 4; i += (u64)gridDim.x * blockDim.x) {
    const auto number = [&](int of) { return 3.0f * unit(mix(seed, (u32)(2 * i + of), 1)) - 1.5f; };
    if (!KV8) ((u32*)out)[i] = pack_f16(to_f16(number(0)), to_f16(number(1)));
    else if (i * 4 % STORED_BYTES >= SCALES8) ((float*)out)[i] = 0.008f + 0.002f * number(0);
    else { u32 word = mix(seed, (u32)i, 1); for (int k = 0; k < 4; ++k) if ((word >> 8 * k & 255) == 128) word ^= 1u << 8 * k; ((u32*)out)[i] = word; }
  }
}
template <class T = u8> T* room(u64 count) { T* p; CK(cudaMalloc(&p, count * sizeof(T))); CK(cudaMemset(p, 0, count * sizeof(T))); return p; }
struct Matrix { Kind kind; u8* tiles; int tile_count() const { return ceil_div(kind.rows, TILE); } };
static Matrix matrix(u32 id, int rows, int cols, int bits) {
  Matrix m{{id, rows, cols, bits}, nullptr};
  m.tiles = room((u64)m.tile_count() * ceil_div(cols, CHUNK) * (bits == 4 ? CHUNK4 : CHUNK8));
  fill_tiles<<<4096, 128, 0, stream>>>(m.tiles, m.kind); CK(cudaGetLastError());
  return m;
}
static float* floats(u64 count, u32 seed, float low, float high) { float* p = room<float>(count); fill_floats<<<256, 256, 0, stream>>>(p, count, seed, low, high); return p; }
struct Layer { Matrix in, out, router, up, down; float *norm, *post_norm, *conv, *a_log, *dt_bias, *gnorm, *q_norm, *k_norm; u32* choice; int ordinal; };
static std::vector<Layer> layers;
static Matrix head_matrix; static Kind embed_kind; static u32 *embed_words, *embed_pairs; static float *last_norm, *inv_freq;

// ---- buffers -------------------------------------------------------------------------------------------------------------

static Step* step; static float *x, *proj, *mixed, *squares, *acc, *sums, *router, *inner, *products, *logits; static u8* packed; static u32 *items, *out_tokens; static uint2* best;
constexpr u64 STATE_FLOATS = (u64)DELTA_LAYERS * (VALUE_HEADS * VALUE_DIM * KEY_DIM + 3 * CHANNELS);
constexpr u64 PAGE_BYTES = (u64)ATTN_LAYERS * KV_HEADS * STORED_BYTES;
struct Sequence { float* state; u64* pages; u32* sampled; std::vector<u64> page; };
static std::vector<Sequence> sequences;
static Step now;  // what was uploaded last
static void upload() { CK(cudaMemcpyAsync(step, &now, sizeof now, cudaMemcpyHostToDevice, stream)); CK(cudaStreamSynchronize(stream)); }
// Sequences with `tokens` positions of random past.
static void make_sequences(int count, int tokens, int more) {
  for (auto& s : sequences) { cudaFree(s.state); cudaFree(s.pages); cudaFree(s.sampled); for (u64 p : s.page) cudaFree((void*)p); }
  sequences.clear();
  const int pages = (tokens + more) / PAGE_TOKENS + 1;
  for (int i = 0; i < count; ++i) {
    Sequence s; s.state = floats(STATE_FLOATS, 900 + i, -0.05f, 0.05f); s.sampled = room<u32>(1); s.pages = room<u64>(pages);
    u8* all = room(pages * PAGE_BYTES); fill_page<<<1024, 256, 0, stream>>>(all, pages * PAGE_BYTES, 700 + i);
    s.page.push_back((u64)all); std::vector<u64> table; for (int p = 0; p < pages; ++p) table.push_back((u64)all + p * PAGE_BYTES);
    CK(cudaMemcpy(s.pages, table.data(), pages * 8, cudaMemcpyHostToDevice)); sequences.push_back(s);
  }
  CK(cudaStreamSynchronize(stream));
}
// One row of each of `count` sequences at `position`, or with `prompt` that many rows of one.
static void set_step(int count, int position, int first_sequence = 0) {
  memset(&now, 0, sizeof now); now.rows = now.segments = now.head_rows = count;
  for (int i = 0; i < count; ++i) {
    now.token[i] = mix(5, position, first_sequence + i) % VOCAB; now.position[i] = position; now.segment[i] = i; now.seg_first[i] = i; now.seg_rows[i] = 1; now.head_row[i] = i;
    const Sequence& s = sequences[first_sequence + i]; now.state[i] = (u64)s.state; now.pages[i] = (u64)s.pages; now.sampled[i] = (u64)s.sampled;
  }
  upload();
}

// ---- launches ------------------------------------------------------------------------------------------------------------

struct Options { bool pdl = true; int stages = 1, prefetch = 10, warm = 300, carveout = 100; std::string skip, only; } options;
static std::vector<std::string> names;  // of the kernels launched since it was cleared
static std::function<void()> launched;  // called after each, where there is something to call
static std::string stage_of(const std::string& name) { size_t i = name.find("_batch"); return i == std::string::npos ? name : name.substr(0, i); }
template <class... A, class... B> void launch(const char* name, void (*f)(A...), dim3 grid, int threads, int shared, B... b) {
  if (stage_of(name) == options.skip || (!options.only.empty() && stage_of(name) != options.only)) return;
  static std::map<void*, int> allowed;
  int& most = allowed[(void*)f];
  if (shared > 48 << 10 && shared > most) { CK(cudaFuncSetAttribute((void*)f, cudaFuncAttributeMaxDynamicSharedMemorySize, shared)); most = shared; }
  if (!allowed.count((void*)f) || most == 0) { CK(cudaFuncSetAttribute((void*)f, cudaFuncAttributePreferredSharedMemoryCarveout, options.carveout)); most = std::max(most, 1); }
  cudaLaunchConfig_t c{}; c.gridDim = grid; c.blockDim = threads; c.dynamicSmemBytes = shared; c.stream = stream;
  cudaLaunchAttribute at; at.id = cudaLaunchAttributeProgrammaticStreamSerialization; at.val.programmaticStreamSerializationAllowed = 1; c.attrs = &at; c.numAttrs = options.pdl && !strstr(name, "_prefill");  // as the program does
  CK(cudaLaunchKernelEx(&c, f, A(b)...)); names.push_back(name); if (launched) launched();
}
// A kernel with the shape that its module exports; `rows` and `depth` are the grid's other sides.
#define SHAPED(kernel, rows, depth, more, ...) do { static u32 shape[4]; if (!shape[0]) CK(cudaMemcpyFromSymbol(shape, kernel##_launch, 16)); \
  launch(#kernel, kernel, dim3(shape[0], shape[3] ? 1 : rows, depth), shape[1], shape[2] + (more), __VA_ARGS__); } while (0)
static void run_layer(int i, bool batch, int R, const std::function<void(const char*)>& after) {
  Layer& l = layers[i]; const int groups = ceil_div(R, ROW_GROUP); auto did = [&](const char* n) { if (after) after(n); };
  const Matrix& following = i + 1 < LAYERS ? layers[i + 1].in : head_matrix; const u8* next = following.tiles;
  const u32 next_bytes = std::min((u64)options.prefetch << 20, (u64)following.tile_count() * ceil_div(HIDDEN, CHUNK) * CHUNK4);
  if (!is_attention(i)) {
    if (batch) SHAPED(delta_in_batch, groups, 1, 0, step, l.in.tiles, l.norm, x, proj); else SHAPED(delta_in, 1, 1, 0, step, l.in.tiles, l.norm, x, proj); did("delta_in");
    SHAPED(delta_core, R, 1, 0, step, proj, l.conv, l.a_log, l.dt_bias, l.gnorm, mixed, squares, l.ordinal); did("delta_core");
    if (batch) SHAPED(delta_out_batch, groups, 1, 0, step, l.out.tiles, mixed, squares, proj, x, next, l.ordinal, next_bytes); else SHAPED(delta_out, 1, 1, 0, step, l.out.tiles, mixed, squares, proj, x, next, l.ordinal, next_bytes); did("delta_out");
  } else {
    if (batch) SHAPED(attn_in_batch, groups, 1, 0, step, l.in.tiles, l.norm, x, proj); else SHAPED(attn_in, 1, 1, 0, step, l.in.tiles, l.norm, x, proj); did("attn_in");
    if (batch) SHAPED(attn_kv_batch, R, 1, 0, step, proj, l.k_norm, inv_freq, l.ordinal);
    if (batch) SHAPED(attn_core_batch, KV_HEADS, R, options.stages * STORED_BYTES, step, proj, l.q_norm, l.k_norm, inv_freq, acc, sums, l.ordinal, options.stages); else SHAPED(attn_core, KV_HEADS, 1, options.stages * STORED_BYTES, step, proj, l.q_norm, l.k_norm, inv_freq, acc, sums, l.ordinal, options.stages);
    SHAPED(attn_merge, R, 1, 0, step, acc, sums, proj, mixed); did("attn_core");
    if (batch) SHAPED(attn_out_batch, groups, 1, 0, step, l.out.tiles, mixed, x, next, next_bytes); else SHAPED(attn_out, 1, 1, 0, step, l.out.tiles, mixed, x, next, next_bytes); did("attn_out");
  }
  u32* reset = layers[(i + LAYERS / 2) % LAYERS].choice;
  if (batch) {
    SHAPED(moe_route_batch, groups, 1, 0, step, l.router.tiles, l.up.tiles, l.post_norm, x, router, packed, inner, reset); did("moe_route");
    SHAPED(moe_select_batch, 1, 1, 0, step, router, l.choice, items);
    SHAPED(moe_up_batch, 1, 1, 0, step, l.up.tiles, packed, items, inner); did("moe_up");
    SHAPED(moe_down_batch, 1, 1, 0, step, l.down.tiles, inner, items, products);
    SHAPED(moe_sum_batch, R, 1, 0, step, products, l.choice, x); did("moe_down");
  } else {
    SHAPED(moe_route, 1, 1, 0, step, l.router.tiles, l.up.tiles, l.post_norm, x, router, packed, inner, reset); did("moe_route");
    SHAPED(moe_up, 1, 1, 0, step, l.up.tiles, packed, router, inner, l.choice); did("moe_up");
    SHAPED(moe_down, 1, 1, 0, step, l.down.tiles, inner, l.choice, x); did("moe_down");
  }
}
static void run_step(bool batch, int R, u32 advance, const std::function<void(const char*)>& after = nullptr) {
  launch("embed", embed, R, 256, 0, step, embed_words, embed_pairs, x); if (after) after("embed");
  for (int i = 0; i < LAYERS; ++i) run_layer(i, batch, R, after);
  if (batch) SHAPED(head_batch, ceil_div(R, ROW_GROUP), 1, 0, step, head_matrix.tiles, last_norm, x, logits, best); else SHAPED(head, 1, 1, 0, step, head_matrix.tiles, last_norm, x, logits, best); if (after) after("head");
  launch("sample", sample, R, 256, 0, step, best, out_tokens, advance); if (after) after("sample");
}

#include "reference.h"
#include "prefill.h"
#include "attention.h"

// ---- times ---------------------------------------------------------------------------------------------------------------

// The multiprocessors' clock right now, in MHz.
__global__ void count_clock(u64* out) { u64 t0, t1; long long c0 = clock64(); asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t0)); do asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t1)); while (t1 - t0 < 200000); out[0] = (clock64() - c0) * 1000 / (t1 - t0); }
static int clock_now() { static u64* at = room<u64>(1); u64 mhz; count_clock<<<1, 1, 0, stream>>>(at); CK(cudaMemcpyAsync(&mhz, at, 8, cudaMemcpyDeviceToHost, stream)); CK(cudaStreamSynchronize(stream)); return mhz; }
static std::vector<int> stages_to_time() { if (KV8) return {1, 3, 4}; return {1, 3}; }
static double time_graph(const std::function<void()>& body, int repeats) {
  cudaGraph_t g; cudaGraphExec_t e; CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); body(); CK(cudaStreamEndCapture(stream, &g)); CK(cudaGraphInstantiate(&e, g, 0));
  cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b); std::vector<float> ms;
  for (int i = 0; i < options.warm / repeats; ++i) CK(cudaGraphLaunch(e, stream));  // a clock that was asleep wakes up
  for (int r = 0; r < 9; ++r) { cudaEventRecord(a, stream); for (int i = 0; i < repeats; ++i) CK(cudaGraphLaunch(e, stream)); cudaEventRecord(b, stream); CK(cudaEventSynchronize(b)); float t; cudaEventElapsedTime(&t, a, b); ms.push_back(t / repeats); }
  cudaGraphExecDestroy(e); cudaGraphDestroy(g); std::sort(ms.begin(), ms.end()); return ms[ms.size() / 2] * 1e3;
}
static double time_step(bool batch, int R, int repeats = 10) { return time_graph([&] { run_step(batch, R, 0); }, repeats); }
static const char* STAGE_NAMES[] = {"embed", "delta_in", "delta_core", "delta_out", "attn_in", "attn_core", "attn_merge", "attn_out", "moe_route", "moe_up", "moe_down", "head", "sample"};
static void time_stages() {
  const double all = time_step(false, 1);
  const double mb[] = {0, 14.23, 4.19, 4.72, 10.62, 0.5, 0, 4.72, 1.77, 9.44, 5.31, 286, 0};
  printf("%-12s %9s %12s %14s\n", "stage", "alone us", "left out us", "alone TB/s");
  int k = 0;
  for (const char* s : STAGE_NAMES) {
    names.clear(); options.only = s; const double alone = time_step(false, 1); const int n = names.size(); options.only = "";
    double without = all; if (strcmp(s, "moe_up")) { options.skip = s; without = time_step(false, 1); options.skip = ""; }
    printf("%-12s %9.2f %12.2f %14.2f\n", s, alone / n, (all - without) / n, mb[k++] / (alone / n)); }
  printf("all: %.1f us\n", all);
}
static void time_contexts() {
  for (int context : {256, 4096, 32768, 131072}) { make_sequences(1, context, 8); set_step(1, context);
    for (int stages : stages_to_time()) { options.stages = stages; const double us = time_step(false, 1); printf("context %6d stages %d: %.1f us = %.0f tokens/s\n", context, stages, us, 1e6 / us); } options.stages = 1; }
}
static void time_batches() {
  for (int R : {1, 2, 4, 8, 16, 32}) { make_sequences(R, 1024, 8); set_step(R, 1024); const double us = time_step(true, R, 5); printf("batch %2d at 1024: %.1f us = %.0f tokens/s in total\n", R, us, R * 1e6 / us); }
}
static void sweep() {
  make_sequences(1, 256, 8); set_step(1, 256); const Options usual = options;
  auto report = [&](const char* what) { const double us = time_step(false, 1); printf("%-44s %.1f us = %.0f tokens/s\n", what, us, 1e6 / us); options = usual; };
  printf("clock %d MHz before, ", clock_now()); report("usual"); printf("clock %d MHz after\n", clock_now()); options.pdl = false; report("no programmatic launch");
  options.warm = 0; report("without warming up");
  for (int m : {0, 6, 10, 14}) { options.prefetch = m; char b[60]; sprintf(b, "L2 asked for %d MB of the next layer", m); report(b); }
}

#ifdef STAMPS
// Built by `build.sh` with STAMPS=1 from kernels whose first block notes when it starts and when its wait ends.
static void stamps(bool batch, int R) {
  std::map<std::string, std::map<int, double>> marks, marked;
  const int runs = 20; names.clear(); run_step(batch, R, 0);
#ifdef STAMP_BLOCK
  if (STAMP_BLOCK) names.erase(names.begin());  // embed has one block
#endif
  const int n = names.size() - 1; std::map<std::string, std::vector<double>> total, early; std::vector<std::string> order;
  cudaGraph_t g; cudaGraphExec_t e; CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal)); run_step(batch, R, 0); CK(cudaStreamEndCapture(stream, &g)); CK(cudaGraphInstantiate(&e, g, 0));
  for (int r = 0; r < runs; ++r) { u32 zero = 0; CK(cudaMemcpyToSymbol(stamp_count, &zero, 4)); CK(cudaGraphLaunch(e, stream)); CK(cudaStreamSynchronize(stream)); std::vector<u64> t(4096); CK(cudaMemcpyFromSymbol(t.data(), stamp_times, 4096 * 8));
#ifdef STAMP_BLOCK
    std::vector<long long> mk(8192 * 4); CK(cudaMemcpyFromSymbol(mk.data(), stamp_marks, mk.size() * 8)); if (r > 4) for (int i = 0; i + 1 < n; ++i) for (int k = 1; k < 16; ++k) if (mk[16 * i + k]) { marks[names[i]][k] += (double)(mk[16 * i + k] - (long long)t[2 * i + 1]); ++marked[names[i]][k]; }
#endif
    if (r > 4) for (int i = 0; i + 1 < n; ++i) { total[names[i]].push_back((double)(t[2 * i + 3] - t[2 * i + 1])); early[names[i]].push_back((double)(t[2 * i + 1] - t[2 * i])); } }
  double sum = 0; std::vector<std::string> kinds; for (auto& k : names) if (std::find(kinds.begin(), kinds.end(), k) == kinds.end()) kinds.push_back(k);
  for (auto& s : kinds) { auto& v = total[s]; if (v.empty()) continue; double a = 0, b = 0; for (double d : v) a += d; for (double d : early[s]) b += d; const double each = a / v.size() / 1e3; sum += a / (runs - 5) / 1e3;
    std::sort(v.begin(), v.end()); printf("%-16s %3zu kernels, %6.2f us from its wait to the next one's (median %6.2f), %7.1f us a token; started %6.2f us before its wait ended\n", s.c_str(), v.size() / (runs - 5), each, v[v.size() / 2] / 1e3, a / (runs - 5) / 1e3, b / v.size() / 1e3);
    for (auto& m : marks[s]) printf(" %d:%.0f", m.first, m.second / marked[s][m.first]); if (!marks[s].empty()) printf("\n"); }
  printf("sum %.1f us\n", sum);
}
#endif

// One warp writes and arrives, another waits and reads: nothing can go wrong, and what compute-sanitizer's racecheck says of it is what it says of hand-overs.
__global__ void hand_over(float* out) {
  __shared__ float there[32]; __shared__ u64 barrier; const u32 at = shared_address(&barrier); const int lane = threadIdx.x % 32;
  if (threadIdx.x == 0) { barrier_init(at); barriers_ready(); } __syncthreads();
  if (threadIdx.x < 32) { there[lane] = lane; __syncwarp(); if (lane == 0) asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(at) : "memory"); }
  else { barrier_wait(at, 0); out[lane] = there[31 - lane]; }
}

int main(int argc, char** argv) {
  setvbuf(stdout, nullptr, _IOLBF, 0);
  CK(cudaStreamCreate(&stream)); CK(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
  int delta = 0, attention = 0;
  for (int i = 0; i < LAYERS; ++i) {
    Layer l{}; const u32 id = 100 * (i + 1); const bool a = is_attention(i); l.ordinal = a ? attention++ : delta++;
    l.in = matrix(id, a ? ATTN_ROWS : DELTA_ROWS, HIDDEN, 4); l.out = matrix(id + 1, HIDDEN, a ? ATTN_WIDTH : VALUE_WIDTH, 4); l.router = matrix(id + 2, EXPERTS + 1, HIDDEN, 8);
    l.up = matrix(id + 3, (EXPERTS + 1) * 2 * EXPERT_WIDTH, HIDDEN, 4); l.down = matrix(id + 4, (EXPERTS + 1) * HIDDEN, EXPERT_WIDTH, 4);
    l.norm = floats(HIDDEN, id + 10, .5f, 1.5f); l.post_norm = floats(HIDDEN, id + 11, .5f, 1.5f); l.conv = floats(CHANNELS * 4, id + 12, -.5f, .8f); l.a_log = floats(VALUE_HEADS, id + 13, -2, 1);
    l.dt_bias = floats(VALUE_HEADS, id + 14, -2, 1); l.gnorm = floats(VALUE_DIM, id + 15, .5f, 1.5f); l.q_norm = floats(HEAD_DIM, id + 16, .5f, 1.5f); l.k_norm = floats(HEAD_DIM, id + 17, .5f, 1.5f);
    l.choice = room<u32>(MAX_ROWS * CHOICE_WORDS); layers.push_back(l);
  }
  head_matrix = matrix(7, VOCAB, HIDDEN, 4); embed_kind = {8, VOCAB, HIDDEN, 4}; embed_words = room<u32>((u64)VOCAB * HIDDEN / 8); embed_pairs = room<u32>((u64)VOCAB * HIDDEN / GROUP); fill_plain<<<1024, 256, 0, stream>>>(embed_words, embed_pairs, embed_kind);
  last_norm = floats(HIDDEN, 9, .5f, 1.5f); { std::vector<float> f; for (int i = 0; i < ROTARY_DIM / 2; ++i) f.push_back(1.0f / powf(1e7f, 2.0f * i / ROTARY_DIM)); inv_freq = room<float>(f.size()); CK(cudaMemcpy(inv_freq, f.data(), f.size() * 4, cudaMemcpyHostToDevice)); }
  step = (Step*)room(sizeof(Step)); x = room<float>(MAX_ROWS * HIDDEN); proj = room<float>(MAX_ROWS * (u64)std::max(DELTA_STRIDE, ATTN_STRIDE)); mixed = room<float>(MAX_ROWS * (u64)std::max(VALUE_WIDTH, ATTN_WIDTH)); squares = room<float>(MAX_ROWS * VALUE_HEADS * 4);
  acc = room<float>((u64)MAX_ROWS * HEADS * SPANS * HEAD_DIM); sums = room<float>((u64)MAX_ROWS * HEADS * SPANS * 2); router = room<float>(MAX_ROWS * ROUTER_STRIDE); inner = room<float>(MAX_ROWS * SLOTS * EXPERT_WIDTH); products = room<float>((u64)MAX_ROWS * SLOTS * HIDDEN);
  logits = room<float>((u64)MAX_ROWS * VOCAB); packed = room(MAX_ROWS * PACKED_BYTES); items = room<u32>(ITEM_WORDS * (1 + MAX_ROWS * SLOTS)); out_tokens = room<u32>(MAX_ROWS); best = room<uint2>(MAX_ROWS * 1024);
  CK(cudaStreamSynchronize(stream));
  make_sequences(2, 100, 8); set_step(1, 100); run_step(false, 1, 0); set_step(2, 100); run_step(true, 2, 0); CK(cudaStreamSynchronize(stream));  // shapes are read once, outside a capture
  for (int i = 1; i < argc; ++i) {
    if (!strncmp(argv[i], "carveout=", 9)) options.carveout = atoi(argv[i] + 9);
    const std::string a = argv[i];
    if (a == "check") { check_stages(300); check_stages(5000); check_batches(); }
    else if (a == "stages") { make_sequences(1, 256, 8); set_step(1, 256); time_stages(); }
    else if (a == "time") time_contexts();
    else if (a == "batch") time_batches();
    else if (a == "sweep") sweep();
    else if (a == "hand-over") { float* out = room<float>(32); hand_over<<<1, 64, 0, stream>>>(out); printf("%g\n", down(out, 32)[0]); }
    else if (a == "once") {  // every kernel, for compute-sanitizer
      make_sequences(9, 100, 8); set_step(1, 100); run_step(false, 1, 0); set_step(9, 100); run_step(true, 9, 0);
      make_sequences(1, 40, 300); set_prompt(200, 40); run_prefill(200); CK(cudaStreamSynchronize(stream)); printf("every kernel has run\n");
    }
    else if (a == "prefill-check") check_prefills();
    else if (a == "attention-check") check_attentions();
    else if (a == "attention-time") { time_attention(512, 0); time_attention(4096, 0); time_attention(4096, 28672); time_attention(64, 100000); }
    else if (a == "delta-check") check_deltas();
    else if (a == "delta-time") { for (int rows : {64, 512, 4096, 4096}) time_delta(rows); }
    else if (a == "prefill-time") time_prefill({512, 4096, 32768}, 4096);
    else if (a == "prefill-prof") { make_sequences(1, 3072, 1100); set_prompt(1024, 3072); for (int i : {0, 3}) prefill_layer(i, 1024, nullptr); CK(cudaStreamSynchronize(stream)); }
    else if (a == "prefill-long") for (int most : {8192, 8448, 16896}) time_prefill({131072}, most);
    else if (a == "prefill-chunks") for (int most : {2048, 4096, 8192}) time_prefill({32768}, most);
    else if (a == "prefill-stages") { time_prefill_stages(512, 0); time_prefill_stages(4096, 0); time_prefill_stages(4096, 28672); }
#ifdef STAMPS
    else if (a == "stamps") { make_sequences(1, 256, 8); set_step(1, 256); stamps(false, 1); }
    else if (!strncmp(argv[i], "stamps", 6)) { const int R = atoi(argv[i] + 6); make_sequences(R, 1024, 8); set_step(R, 1024); stamps(true, R); }
#endif
  }
  return failures != 0;
}
