// Plain forms of the stages, from the formulas of the model, and the comparisons with the kernels. Part of decode.cu.
// Every product is summed in double; weights come from the hash, in the checkpoint's order of rows.
#pragma once

static int failures = 0;
__global__ void ref_product(Kind m, u64 first_row, const float* v, float* out) {
  __shared__ double part[128]; double s = 0; const u64 row = first_row + blockIdx.x;
  for (int c = threadIdx.x; c < m.cols; c += 128) s += (double)element(m, row, c) * v[c];
  part[threadIdx.x] = s; __syncthreads();
  for (int w = 64; w; w /= 2) { if (threadIdx.x < w) part[threadIdx.x] += part[threadIdx.x + w]; __syncthreads(); }
  if (threadIdx.x == 0) out[blockIdx.x] = part[0];
}
static std::vector<float> down(const float* p, u64 n) { std::vector<float> v(n); CK(cudaStreamSynchronize(stream)); CK(cudaMemcpy(v.data(), p, n * 4, cudaMemcpyDeviceToHost)); return v; }
static std::vector<float> product(const Kind& m, u64 first, int rows, const std::vector<float>& v) {
  static float *a = room<float>(1 << 16), *b = room<float>(1 << 19); CK(cudaMemcpy(a, v.data(), v.size() * 4, cudaMemcpyHostToDevice));
  ref_product<<<rows, 128, 0, stream>>>(m, first, a, b); CK(cudaGetLastError()); return down(b, rows);
}
static std::vector<float> rms(const std::vector<float>& v, const float* weight) {
  auto w = down(weight, v.size()); double s = 0; for (float f : v) s += (double)f * f; const double inv = 1 / sqrt(s / v.size() + RMS_EPS);
  for (size_t i = 0; i < v.size(); ++i) w[i] = v[i] * inv * w[i]; return w;
}
static double sig(double v) { return 1 / (1 + exp(-v)); }
static std::map<std::string, double> worst;
// What a product may differ by, of its length: each input is rounded to a step of at most 2^-10 of the largest of 64.
constexpr double ROUNDED = 1.0 / 1024;
static void compare(const std::string& what, const std::vector<float>& got, const std::vector<float>& want, double limit) {
  double d = 0, n = 0; for (size_t i = 0; i < want.size(); ++i) { d += pow((double)got[i] - want[i], 2); n += pow((double)want[i], 2); }
  const double e = sqrt(d / n); worst[what] = std::max(worst[what], e == e ? e : 1e9);
  if (!(e < limit)) { ++failures; printf("FAILED %s: relative error %.3g, limit %.3g (%g %g, %g %g)\n", what.c_str(), e, limit, got[0], want[0], got.back(), want.back()); }
}
// The f16 next to a number.
static double halved(double v) { int e; frexp(v, &e); e = std::max(e, -13); return ldexp(nearbyint(ldexp(v, 11 - e)), e - 11); }
// What is multiplied of `position` dim `dim` of a key, or of a value, of a page of a KV head, as README.md says where it lies; `step`: of 8 bits, what they count.
static double page_number(const u8* page, int position, int dim, bool value, double* step = nullptr) {
  const int slot = position % 64, row = value ? dim : slot, column = value ? slot : dim % 64;
  if (KV8) {
    const int block = value ? 0 : (dim / 64) ^ (slot % 2), place = (value ? 16384 + dim * 64 : slot * 256 + block * 64) + column / 8 % 4 * 16 + column / 32 * 8 + column % 8;
    float scale; memcpy(&scale, page + 32768 + (value ? 256 : 0) + slot * 4, 4); if (step) { *step = scale; return (signed char)page[place] * (double)scale; }
    return halved((signed char)page[place] * scale);
  }
  u16 h; memcpy(&h, page + (value ? 32768 : dim / 64 * 8192) + row * 128 + ((column / 8) ^ (row % 8)) * 16 + column % 8 * 2, 2);
  const int e = h >> 10 & 31, m = h & 1023; const double v = e ? ldexp(1024 + m, e - 25) : ldexp(m, -24); return h >> 15 ? -v : v;
}
// How far a stored number is from what it stands for, in half steps: at most one.
static double half_steps(const u8* page, int position, int dim, bool value, double want) { double step; const double got = page_number(page, position, dim, value, &step); return fabs(got - want) / (step / 2); }
// Runs a step kernel by kernel; `before` holds what each stage started from.
static void check_stages(int position) {
  worst.clear(); make_sequences(1, position, 8); set_step(1, position); std::vector<float> x0, proj0, core, inner0; int layer = -1; std::vector<float> state0 = down(sequences[0].state, STATE_FLOATS);
  std::vector<u8> pages((position / 64 + 1) * PAGE_BYTES); CK(cudaMemcpy(pages.data(), (void*)sequences[0].page[0], pages.size(), cudaMemcpyDeviceToHost));
  run_step(false, 1, 0, [&](const char* name) {
    const std::string n = name; CK(cudaStreamSynchronize(stream)); CK(cudaGetLastError());
    if (n == "embed") { std::vector<float> want, got = down(x, HIDDEN);
      std::vector<u32> w(HIDDEN / 8), p(HIDDEN / GROUP); CK(cudaMemcpy(w.data(), embed_words + (u64)now.token[0] * (HIDDEN / 8), HIDDEN / 2, cudaMemcpyDeviceToHost)); CK(cudaMemcpy(p.data(), embed_pairs + (u64)now.token[0] * (HIDDEN / GROUP), HIDDEN / 16, cudaMemcpyDeviceToHost));
      for (int i = 0; i < HIDDEN; ++i) { float s, b; u32 sb = p[i / 64] << 16, bb = p[i / 64] & 0xffff0000u; memcpy(&s, &sb, 4); memcpy(&b, &bb, 4); want.push_back(s * (w[i / 8] >> i % 8 * 4 & 15) + b); }
      compare(n, got, want, 1e-6);
      // The embedding of random weights is small beside what follows; give the residual stream a size.
      fill_floats<<<8, 256, 0, stream>>>(x, HIDDEN, 4242 + position, -2, 2); x0 = down(x, HIDDEN); return; }
    if (n == "head" || n == "sample") {
      if (n == "head") compare(n, down(logits, VOCAB), product(head_matrix.kind, 0, VOCAB, rms(x0, last_norm)), ROUNDED);
      else { auto l = down(logits, VOCAB); u32 t; CK(cudaMemcpy(&t, out_tokens, 4, cudaMemcpyDeviceToHost)); if (t != std::max_element(l.begin(), l.end()) - l.begin()) { ++failures; printf("FAILED sample: %u\n", t); } }
      return; }
    if (n == "delta_in" || n == "attn_in") ++layer;
    Layer& l = layers[layer]; const bool last_round = layer >= 4 && layer < LAYERS - 4;  // the middle of the model is more of the same
    const bool look = !last_round;
    if (n == "delta_in" || n == "attn_in") { const int rows = l.in.kind.rows; proj0 = down(proj, rows); if (look) compare(n, proj0, product(l.in.kind, 0, rows, rms(x0, l.norm)), ROUNDED); }
    if (n == "delta_core" && look) {
      auto conv = down(l.conv, CHANNELS * 4), a_log = down(l.a_log, VALUE_HEADS), dt = down(l.dt_bias, VALUE_HEADS), gn = down(l.gnorm, VALUE_DIM); const float* tails = state0.data() + (u64)DELTA_LAYERS * VALUE_HEADS * 16384 + (u64)l.ordinal * 3 * CHANNELS;
      std::vector<double> c(CHANNELS); for (int i = 0; i < CHANNELS; ++i) { double s = conv[i * 4 + 3] * proj0[i]; for (int k = 0; k < 3; ++k) s += conv[i * 4 + k] * tails[k * CHANNELS + i]; c[i] = s * sig(s); }
      auto got_state = down(sequences[0].state + (u64)l.ordinal * VALUE_HEADS * 16384, VALUE_HEADS * 16384); std::vector<float> want_state(got_state.size()), raw(VALUE_WIDTH), got = down(mixed, VALUE_WIDTH), sq = down(squares, VALUE_HEADS * 4); core.assign(VALUE_WIDTH, 0);
      for (int h = 0; h < VALUE_HEADS; ++h) { const int kh = h * KEY_HEADS / VALUE_HEADS; double ql = 1e-6, kl = 1e-6; const double *q = &c[kh * 128], *k = &c[KEY_WIDTH + kh * 128], *v = &c[2 * KEY_WIDTH + h * 128]; for (int i = 0; i < 128; ++i) ql += q[i] * q[i], kl += k[i] * k[i];
        ql = 1 / sqrt(ql) / sqrt(128.0); kl = 1 / sqrt(kl); const double a = proj0[CHANNELS + VALUE_WIDTH + VALUE_HEADS + h] + dt[h], g = exp(-exp((double)a_log[h]) * log1p(exp(a))), beta = sig(proj0[CHANNELS + VALUE_WIDTH + h]); double ss = 0; std::vector<double> o(128);
        for (int r = 0; r < 128; ++r) { const float* s = &state0[((u64)l.ordinal * VALUE_HEADS + h) * 16384 + r * 128]; double kv = 0; for (int i = 0; i < 128; ++i) kv += g * s[i] * k[i] * kl; const double d = (v[r] - kv) * beta; for (int i = 0; i < 128; ++i) { const double ns = g * s[i] + d * k[i] * kl; want_state[h * 16384 + r * 128 + i] = ns; o[r] += ns * q[i] * ql; } ss += o[r] * o[r]; }
        const double inv = 1 / sqrt(ss / 128 + RMS_EPS); const double got_inv = 1 / sqrt(((double)sq[h * 4] + sq[h * 4 + 1] + sq[h * 4 + 2] + sq[h * 4 + 3]) / 128 + RMS_EPS);
        for (int r = 0; r < 128; ++r) { const double z = proj0[CHANNELS + h * 128 + r]; core[h * 128 + r] = o[r] * inv * gn[r] * z * sig(z); got[h * 128 + r] *= got_inv; } }
      compare("delta_core", got, core, 2e-5); compare("delta_core state", got_state, want_state, 1e-5); core = got; }
    if (n == "attn_core" && look) {
      auto qn = down(l.q_norm, 256), kn = down(l.k_norm, 256); std::vector<float> want(ATTN_WIDTH); auto got = down(mixed, ATTN_WIDTH);
      auto turned = [&](const float* p, const std::vector<float>& w) { double s = 0; for (int i = 0; i < 256; ++i) s += (double)p[i] * p[i]; s = 1 / sqrt(s / 256 + RMS_EPS); std::vector<double> v(256); for (int i = 0; i < 256; ++i) v[i] = p[i] * s * w[i];
        for (int i = 0; i < 32; ++i) { const float f = 1.0f / powf(1e7f, 2.0f * i / 64), angle = position * f; const double cs = cos((double)angle), sn = sin((double)angle), a = v[i], b = v[i + 32]; v[i] = a * cs - b * sn; v[i + 32] = b * cs + a * sn; } return v; };
      for (int h = 0; h < HEADS; ++h) { const int kv = h / 8; auto q = turned(&proj0[h * 512], qn), k1 = turned(&proj0[2 * ATTN_WIDTH + kv * 256], kn); std::vector<double> s(position + 1); double most = -1e300, total = 0;
        auto base = [&](int p) { return &pages[(p / 64) * PAGE_BYTES + ((u64)l.ordinal * KV_HEADS + kv) * STORED_BYTES]; };
        std::vector<double> v1(256); for (int i = 0; i < 256; ++i) v1[i] = proj0[2 * ATTN_WIDTH + KV_HEADS * 256 + kv * 256 + i];
        if (KV8) {  // what was stored is next to those, and is what counts
          std::vector<u8> stored(STORED_BYTES); CK(cudaMemcpy(stored.data(), (u8*)sequences[0].page[0] + (base(position) - pages.data()), STORED_BYTES, cudaMemcpyDeviceToHost)); double off = 0;
          for (int i = 0; i < 256; ++i) { off = std::max(off, std::max(half_steps(stored.data(), position, i, false, k1[i]), half_steps(stored.data(), position, i, true, v1[i]))); k1[i] = page_number(stored.data(), position, i, false), v1[i] = page_number(stored.data(), position, i, true); }
          worst["stored"] = std::max(worst["stored"], off); if (!(off < 1.01)) { ++failures; printf("FAILED: stored %.3f half steps off\n", off); } }
        for (int p = 0; p <= position; ++p) { double d = 0; for (int i = 0; i < 256; ++i) d += q[i] * (p == position ? k1[i] : page_number(base(p), p, i, false)); s[p] = d / 16; most = std::max(most, s[p]); }
        for (auto& w : s) total += w = exp(w - most);
        for (int i = 0; i < 256; ++i) { double o = 0; for (int p = 0; p <= position; ++p) o += s[p] * (p == position ? v1[i] : page_number(base(p), p, i, true)); want[h * 256 + i] = o / total * sig(proj0[h * 512 + 256 + i]); } }
      compare("attn_core", got, want, 5e-4); core = got; }
    if (n == "delta_out" || n == "attn_out") { auto got = down(x, HIDDEN);
      if (look) { auto want = product(l.out.kind, 0, HIDDEN, core); for (int i = 0; i < HIDDEN; ++i) want[i] += x0[i]; compare(n, got, want, ROUNDED);
        if (n == "delta_out") { auto tail = down(sequences[0].state + (u64)DELTA_LAYERS * VALUE_HEADS * 16384 + (u64)l.ordinal * 3 * CHANNELS, 3 * CHANNELS); const float* old = state0.data() + (u64)DELTA_LAYERS * VALUE_HEADS * 16384 + (u64)l.ordinal * 3 * CHANNELS; std::vector<float> want_tail(old + CHANNELS, old + 3 * CHANNELS); want_tail.insert(want_tail.end(), proj0.begin(), proj0.begin() + CHANNELS); compare("delta_out tails", tail, want_tail, 1e-7); } }
      x0 = got; }
    if (n == "moe_route" && look) { auto normed = rms(x0, l.post_norm); compare(n, down(router, EXPERTS + 1), product(l.router.kind, 0, EXPERTS + 1, normed), ROUNDED); }
    if ((n == "moe_up" || n == "moe_down") && look) {
      auto lg = down(router, EXPERTS + 1); std::vector<int> id(EXPERTS); for (int i = 0; i < EXPERTS; ++i) id[i] = i; std::stable_sort(id.begin(), id.end(), [&](int a, int b) { return lg[a] > lg[b]; });
      std::vector<u32> rec(CHOICE_WORDS); CK(cudaMemcpy(rec.data(), l.choice, CHOICE_WORDS * 4, cudaMemcpyDeviceToHost)); std::vector<float> share(9), want_share(9); double total = 0; for (int i = 0; i < 8; ++i) total += exp((double)lg[id[i]] - lg[id[0]]);
      for (int i = 0; i < 8; ++i) { want_share[i] = exp((double)lg[id[i]] - lg[id[0]]) / total; if ((int)rec[i] != id[i]) { ++failures; printf("FAILED choice %d: %u instead of %d\n", i, rec[i], id[i]); } }
      want_share[8] = sig(lg[EXPERTS]); id[8] = EXPERTS; memcpy(share.data(), &rec[8], 36); compare("choice", share, want_share, 1e-5);
      if (n == "moe_up") { auto normed = rms(x0, l.post_norm); std::vector<float> want; for (int e = 0; e < 9; ++e) { auto gu = product(l.up.kind, (u64)id[e] * 2 * EXPERT_WIDTH, 2 * EXPERT_WIDTH, normed); for (int i = 0; i < EXPERT_WIDTH; ++i) { const double g = gu[i / 8 * 16 + i % 8]; want.push_back(g * sig(g) * gu[i / 8 * 16 + 8 + i % 8]); } } inner0 = down(inner, 9 * EXPERT_WIDTH); compare(n, inner0, want, 2 * ROUNDED); }
      else { auto want = x0; for (int e = 0; e < 9; ++e) { auto y = product(l.down.kind, (u64)id[e] * HIDDEN, HIDDEN, std::vector<float>(inner0.begin() + e * EXPERT_WIDTH, inner0.begin() + (e + 1) * EXPERT_WIDTH)); for (int i = 0; i < HIDDEN; ++i) want[i] += want_share[e] * y[i]; } auto got = down(x, HIDDEN); compare(n, got, want, ROUNDED); } }
    if (n == "moe_down") x0 = down(x, HIDDEN);
  });
  printf("position %d, worst relative errors:", position); for (auto& w : worst) printf(" %s %.1e", w.first.c_str(), w.second); printf("\n");
}
static bool equal_bits(const char* what, const std::vector<float>& a, const std::vector<float>& b) {
  u64 differ = 0; for (size_t i = 0; i < a.size(); ++i) differ += memcmp(&a[i], &b[i], 4) != 0;
  if (differ) { ++failures; printf("FAILED %s: %llu of %zu differ (%g %g)\n", what, differ, a.size(), a[0], b[0]); } else printf("%s: equal bits\n", what);
  return !differ;
}
static void check_batches() {
  for (int R : {3, 11, 32}) {  // a step of R sequences against each alone
    make_sequences(R, 70, 8); std::vector<std::vector<float>> before, alone; for (auto& s : sequences) before.push_back(down(s.state, STATE_FLOATS));
    std::vector<float> alone_state; for (int i = 0; i < R; ++i) { set_step(1, 70, i); run_step(false, 1, 0); alone.push_back(down(logits, VOCAB)); } alone_state = down(sequences[R - 1].state, STATE_FLOATS);
    for (int i = 0; i < R; ++i) CK(cudaMemcpy(sequences[i].state, before[i].data(), STATE_FLOATS * 4, cudaMemcpyHostToDevice));
    set_step(R, 70); run_step(true, R, 0); CK(cudaStreamSynchronize(stream)); CK(cudaGetLastError());
    char b[64]; for (int i : {0, R / 2, R - 1}) { sprintf(b, "row %d of %d", i, R); equal_bits(b, down(logits + (u64)i * VOCAB, VOCAB), alone[i]); } equal_bits("state", down(sequences[R - 1].state, STATE_FLOATS), alone_state);
  }
  // Ten tokens of one sequence one by one, and as rows of one pass.
  make_sequences(1, 60, 80); auto before = down(sequences[0].state, STATE_FLOATS); std::vector<u32> tokens; for (int i = 0; i < 10; ++i) { set_step(1, 60 + i); tokens.push_back(now.token[0]); run_step(false, 1, 0); }
  auto one = down(logits, VOCAB), one_state = down(sequences[0].state, STATE_FLOATS); CK(cudaMemcpy(sequences[0].state, before.data(), STATE_FLOATS * 4, cudaMemcpyHostToDevice));
  set_step(1, 60); now.rows = 10; now.seg_rows[0] = 10; now.head_rows = 1; now.head_row[0] = 9; for (int i = 0; i < 10; ++i) now.token[i] = tokens[i], now.position[i] = 60 + i, now.segment[i] = 0; upload();
  run_step(true, 10, 0); CK(cudaStreamSynchronize(stream)); CK(cudaGetLastError()); equal_bits("ten rows of a prompt", down(logits, VOCAB), one); equal_bits("state after them", down(sequences[0].state, STATE_FLOATS), one_state);
}
