// Attention of a prompt alone: beside a plain form in double, and cut into pieces. Part of decode.cu.
#pragma once

// What is multiplied of a page, as README.md says where it lies: of `position` dim `dim` of a key, or of a value; `step`: of 8 bits, what they count.
__device__ inline double page_number(const u64* pages, u32 ordinal, int kv_head, int position, int dim, bool value, float* step = nullptr) {
  const u8* part = (const u8*)pages[position / 64] + ((u64)ordinal * KV_HEADS + kv_head) * STORED_BYTES;
  const int row = value ? dim : position % 64, column = value ? position % 64 : dim % 64;
  if (KV8) {
    const int place = (value ? 16384 + row * 64 : row * 256 + ((dim / 64) ^ (row % 2)) * 64) + column / 8 % 4 * 16 + column / 32 * 8 + column % 8;
    const float scale = *(const float*)(part + 32768 + (value ? 256 : 0) + position % 64 * 4); if (step) { *step = scale; return (double)(signed char)part[place] * scale; }
    return from_f16(to_f16((signed char)part[place] * scale));
  }
  part += (value ? 32768 : dim / 64 * 8192) + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2;
  return from_f16(*(const u16*)part);
}
// Heads of a row normed and turned; grid (heads, rows), a thread a dim.
__global__ void ref_turned(const float* proj, int first, int stride, const float* norm, const float* freq, int start, double* out) {
  __shared__ double v[256], square[256];
  const int head = blockIdx.x, row = blockIdx.y, dim = threadIdx.x;
  const double own = proj[(u64)row * ATTN_STRIDE + first + head * stride + dim];
  square[dim] = own * own; __syncthreads();
  double sum = 0; for (int i = 0; i < 256; ++i) sum += square[i];
  v[dim] = own / sqrt(sum / 256 + RMS_EPS) * norm[dim]; __syncthreads();
  double result = v[dim];
  if (dim < 64) { const float angle = __fmul_rn((float)(start + row), freq[dim % 32]); const double c = cos((double)angle), s = sin((double)angle); result = dim < 32 ? v[dim] * c - v[dim + 32] * s : v[dim] * c + v[dim - 32] * s; }
  out[((u64)row * gridDim.x + head) * 256 + dim] = result;
}
// The most half steps by which new keys and values of 8 bits are off; grid (KV heads, rows), a thread a dim.
__global__ void ref_stored(const float* proj, const double* keys, const u64* pages, u32 ordinal, int start, u32* most) {
  const int kv = blockIdx.x, row = blockIdx.y, dim = threadIdx.x; float step;
  const double key = page_number(pages, ordinal, kv, start + row, dim, false, &step), k = fabs(key - keys[((u64)row * KV_HEADS + kv) * 256 + dim]) / (step / 2);
  const double value = page_number(pages, ordinal, kv, start + row, dim, true, &step), v = fabs(value - proj[(u64)row * ATTN_STRIDE + 2 * ATTN_WIDTH + (KV_HEADS + kv) * 256 + dim]) / (step / 2);
  atomicMax(most, __float_as_uint((float)max(k, v)));
}
// Attention of a head of a row; keys and values of positions below `stored` from pages, new ones as they are. Grid (heads, rows), a thread a dim.
__global__ void ref_attention(const float* proj, const double* queries, const double* keys, const u64* pages, u32 ordinal, int start, int stored, double* all_scores, int most_positions, float* out) {
  __shared__ double part[256];
  const int head = blockIdx.x, row = blockIdx.y, thread = threadIdx.x, kv = head / 8, positions = start + row + 1;
  double* scores = all_scores + ((u64)row * HEADS + head) * most_positions;
  const double* q = queries + ((u64)row * HEADS + head) * 256;
  double best = -1e300;
  for (int p = thread; p < positions; p += 256) { double d = 0; for (int i = 0; i < 256; ++i) d += q[i] * (p < stored ? page_number(pages, ordinal, kv, p, i, false) : keys[((u64)(p - start) * KV_HEADS + kv) * 256 + i]); scores[p] = d / 16; best = max(best, d / 16); }
  part[thread] = best; __syncthreads();
  for (int i = 0; i < 256; ++i) best = max(best, part[i]);
  __syncthreads();
  double total = 0, sum = 0; for (int p = thread; p < positions; p += 256) total += scores[p] = exp(scores[p] - best);
  part[thread] = total; __syncthreads();
  total = 0; for (int i = 0; i < 256; ++i) total += part[i];
  for (int p = 0; p < positions; ++p) sum += scores[p] * (p < stored ? page_number(pages, ordinal, kv, p, thread, true) : (double)proj[(u64)(p - start) * ATTN_STRIDE + 2 * ATTN_WIDTH + (KV_HEADS + kv) * 256 + thread]);
  const double gate = proj[(u64)row * ATTN_STRIDE + (head * 2 + 1) * 256 + thread];
  out[(u64)row * ATTN_WIDTH + head * 256 + thread] = sum / total / (1 + exp(-gate));
}
// Rows `first` to `first + rows` of the projections, which begin at position `start`.
static void attend_prompt(int start, int first, int rows, const float* q_norm, const float* k_norm, u32 ordinal) {
  set_prompt(rows, start + first);
  as_results<<<rows, 256, 0, stream>>>(pfloats + (u64)first * ATTN_STRIDE, ATTN_STRIDE, rows, pproj);
  PLANNED(p_attn::attn_kv_prefill, 0, rows + 16, prompt, pproj, q_norm, k_norm, inv_freq, pqueries, ordinal);
  expand_pages(ordinal);
  PLANNED(p_attn::attn_core_prefill, 0, rows + 16, prompt, pproj, pqueries, pk_row, ppartials, parrived, pexpanded, ordinal);
  operands_as_floats<<<rows, 256, 0, stream>>>(pk_row, ATTN_WIDTH, rows, pmixed + (u64)first * ATTN_WIDTH);
}
// Queries are `sharp` times as long as usual.
static double check_attention(int start, int rows, float sharp, const std::vector<int>& cuts) {
  const u32 ordinal = ATTN_LAYERS - 1; const int end = start + rows;
  make_sequences(1, start, rows + 8); prefill_room(rows);
  const auto pages0 = pages_now(end);
  static float *q_norm = room<float>(256), *k_norm = room<float>(256);
  fill_floats<<<1, 256, 0, stream>>>(q_norm, 256, 31, .5f * sharp, 1.5f * sharp); fill_floats<<<1, 256, 0, stream>>>(k_norm, 256, 32, .5f, 1.5f);
  fill_projections(pfloats, rows, ATTN_STRIDE, 33 + start);
  double *queries = room<double>((u64)rows * HEADS * 256), *keys = room<double>((u64)rows * KV_HEADS * 256), *scores = room<double>((u64)rows * HEADS * end); float* out = room<float>((u64)rows * ATTN_WIDTH);
  ref_turned<<<dim3(HEADS, rows), 256, 0, stream>>>(pfloats, 0, 512, q_norm, inv_freq, start, queries);
  ref_turned<<<dim3(KV_HEADS, rows), 256, 0, stream>>>(pfloats, 2 * ATTN_WIDTH, 256, k_norm, inv_freq, start, keys);
  if (KV8) {  // new keys and values are next to what they stand for, and are what counts
    static u32* most = room<u32>(1); CK(cudaMemset(most, 0, 4)); attend_prompt(start, 0, rows, q_norm, k_norm, ordinal); ref_stored<<<dim3(KV_HEADS, rows), 256, 0, stream>>>(pfloats, keys, sequences[0].pages, ordinal, start, most); CK(cudaGetLastError());
    float off; CK(cudaStreamSynchronize(stream)); CK(cudaMemcpy(&off, most, 4, cudaMemcpyDeviceToHost)); if (!(off < 1.01f && off > 0.5f)) { ++failures; printf("FAILED: stored %.3f half steps off\n", off); } }
  ref_attention<<<dim3(HEADS, rows), 256, 0, stream>>>(pfloats, queries, keys, sequences[0].pages, ordinal, start, KV8 ? end : start, scores, end, out); CK(cudaGetLastError());
  const auto want = down(out, (u64)rows * ATTN_WIDTH); cudaFree(queries); cudaFree(keys); cudaFree(scores); cudaFree(out);
  std::vector<float> whole, whole_pages; double error = 0;
  for (int cut : cuts) {
    put((float*)sequences[0].page[0], pages0); CK(cudaMemset(pmixed, 0xff, (u64)rows * ATTN_WIDTH * 4));
    for (int first = 0; first < rows; first += cut) attend_prompt(start, first, std::min(cut, rows - first), q_norm, k_norm, ordinal);
    const auto got = down(pmixed, (u64)rows * ATTN_WIDTH), pages = pages_now(end); CK(cudaGetLastError());
    if (whole.empty()) {
      whole = got; whole_pages = pages; double d = 0, n = 0; for (size_t i = 0; i < want.size(); ++i) d += pow((double)got[i] - want[i], 2), n += pow((double)want[i], 2);
      error = sqrt(d / n); if (!(error < 2e-3)) { ++failures; printf("FAILED attention of %d tokens from %d on: relative error %.3g (%g %g, %g %g)\n", rows, start, error, got[0], want[0], got.back(), want.back()); }
    } else if (got.size() != whole.size() || memcmp(got.data(), whole.data(), got.size() * 4) || memcmp(pages.data(), whole_pages.data(), pages.size() * 4)) {
      u64 differ = 0; for (size_t i = 0; i < got.size(); ++i) differ += memcmp(&got[i], &whole[i], 4) != 0;
      ++failures; printf("FAILED attention of %d tokens from %d on in pieces of %d: %llu of %zu numbers differ, or pages do\n", rows, start, cut, differ, got.size()); }
  }
  printf("attention of %d tokens from %d on%s: relative error %.2e; in pieces of", rows, start, sharp != 1 ? ", sharp" : "", error); for (int c : cuts) printf(" %d", c); printf("\n");
  return error;
}
static void check_attentions() {
  check_attention(0, 1, 1, {1}); check_attention(0, 16, 1, {16, 1, 5}); check_attention(0, 300, 1, {300, 13, 64, 77, 128}); check_attention(3, 1, 1, {1}); check_attention(63, 2, 1, {2, 1}); check_attention(70, 32, 1, {32, 13, 1});
  check_attention(100, 201, 1, {201, 13, 64, 77}); check_attention(1000, 128, 5, {128, 16, 50}); check_attention(4000, 260, 1, {260, 100, 7}); check_attention(9000, 70, 1, {70, 64, 13}); check_attention(9000, 33, 5, {33, 1}); check_attention(8150, 80, 1, {80, 42, 7});
  check_attention(7000, 2100, 1, {2100, 300, 64});  // many positions, whose spans are added one after the other, and few, whose spans are apart
}
static double median_us(const std::function<void()>& body) {
  std::vector<float> us; cudaEvent_t a, b; cudaEventCreate(&a); cudaEventCreate(&b);
  for (int i = 0; i < 13; ++i) { cudaEventRecord(a, stream); body(); cudaEventRecord(b, stream); CK(cudaEventSynchronize(b)); float t; cudaEventElapsedTime(&t, a, b); us.push_back(t * 1e3); }
  std::sort(us.begin(), us.end()); return us[6];
}
static void time_attention(int rows, int position) {
  make_sequences(1, position, rows + 64); set_prompt(rows, position);
  fill_projections(pfloats, rows, ATTN_STRIDE, 33); as_results<<<rows, 256, 0, stream>>>(pfloats, ATTN_STRIDE, rows, pproj);
  const Layer& l = layers[3];
  const double kv = median_us([&] { PLANNED(p_attn::attn_kv_prefill, 0, rows + 16, prompt, pproj, l.q_norm, l.k_norm, inv_freq, pqueries, 0u); });
  const double expand = KV8 ? median_us([&] { expand_pages(0); }) : 0;
  const double core = median_us([&] { PLANNED(p_attn::attn_core_prefill, 0, rows + 16, prompt, pproj, pqueries, pk_row, ppartials, parrived, pexpanded, 0u); });
  CK(cudaGetLastError());
  printf("attention of %d tokens from %d on: attn_kv %.1f us a layer, attn_expand %.1f, attn_core %.1f = %.0f TFLOP/s\n", rows, position, kv, expand, core, 4.0 * rows * (position + rows / 2.0) * ATTN_WIDTH / core / 1e6);
}
