// Matrices of 8x8 numbers that lie across a SIMD-group, two to a lane.
//
// A lane has two neighbours of one row. Which, Apple does not say in its specification; kernels in the field rely on the
// places below (MLX's `BaseMMAFrag`), and so do kernels here that use `thread_elements`.
#pragma once

#include "threads.h"

namespace metal {

template <class T, int Columns = 8, int Rows = 8> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8 && is_real<T>, "Metal has 8x8 matrices of half, bfloat and float");
  vec<T, 2> own;

  simdgroup_matrix() = default;
  // The number on the diagonal, zeros elsewhere.
  LILY_UNTRACKED explicit simdgroup_matrix(T x);
  vec<T, 2>& thread_elements() { return own; }
  const vec<T, 2>& thread_elements() const { return own; }
};
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

// Place of the first of a lane's two elements.
struct MatrixPlace {
  uint row, column;
  explicit MatrixPlace(uint lane) : row((lane / 4 & 4) + lane / 2 % 4), column((lane / 4 & 2) * 2 + lane % 2 * 2) {}
  static uint lane_of(uint row, uint column) { return (row & 4) * 4 + (column & 4) * 2 + row % 4 * 2 + column % 4 / 2; }
};

#ifdef LILY_TRACKED
inline uint own_lane() { return lily_lane(); }
#else
inline uint own_lane() { return lily_self->thread.index % LILY_SIMD_WIDTH; }
#endif

template <class T, int C, int R> LILY_UNTRACKED simdgroup_matrix<T, C, R>::simdgroup_matrix(T x) {
  const MatrixPlace place(own_lane());
  own = vec<T, 2>(place.row == place.column ? x : T(0), place.row == place.column + 1 ? x : T(0));
}
template <class T, int C, int R> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, C, R> m;
  m.own = vec<T, 2>(x, x);
  return m;
}

// All lanes must take part, and these are where they meet.
#ifdef LILY_TRACKED
template <class M> LILY_UNTRACKED void together(M& m, const char* name, int line) { exchange(m, nullptr, name, line); }
#else
// Nobody needs another's value, so that nothing is lost where they do not.
template <class M> inline void together(M&, const char*, int) {}
#endif

template <class T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const LILY_ANY T* from, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                                              bool transpose = false, LILY_LINE) {
  together(d.own, "simdgroup_load", line);
  const MatrixPlace at(own_lane());
  T pair[2];
  for (uint i = 0; i < 2; ++i) {
    const ulong row = transpose ? at.column + i : at.row, column = transpose ? at.row : at.column + i;
    pair[i] = from[(origin.y + row) * stride + origin.x + column];
  }
  d.own = vec<T, 2>(pair[0], pair[1]);
}
template <class T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& a, LILY_ANY T* to, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                                               bool transpose = false, LILY_LINE) {
  vec<T, 2> own = a.own;
  together(own, "simdgroup_store", line);
  const MatrixPlace at(own_lane());
  for (uint i = 0; i < 2; ++i) {
    const ulong row = transpose ? at.column + i : at.row, column = transpose ? at.row : at.column + i;
    to[(origin.y + row) * stride + origin.x + column] = own[int(i)];
  }
}

// A lane's part of D = A B + C in f32, rounded to D's type: `left` is its row of A, `right` begins at its two columns of B, whose rows are
// `stride` numbers long.
template <class D, class C>
LILY_UNTRACKED void add_products(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<C, 8, 8>* c, const float* left, const float* right, uint stride) {
  float sum[2];
  for (int i = 0; i < 2; ++i) sum[i] = c ? float(c->own[i]) : 0.0f;
  for (uint k = 0; k < 8; ++k)
    for (uint i = 0; i < 2; ++i) sum[i] += left[k] * right[k * stride + i];
  d.own = vec<D, 2>(D(sum[0]), D(sum[1]));
}

#ifdef LILY_TRACKED
template <class A, class B> struct Operands {
  A a[2];
  B b[2];
};
template <class D, class A, class B, class C>
LILY_UNTRACKED void multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                             const simdgroup_matrix<C, 8, 8>* c, const char* name, int line) {
  using Pair = Operands<A, B>;
  const Pair mine{{a.own[0], a.own[1]}, {b.own[0], b.own[1]}};
  const LilyExchange e = lily_exchange(&mine, sizeof mine, nullptr, name, line);
  const MatrixPlace at(e.lane);
  float left[8], right[16];
  for (uint k = 0; k < 8; ++k) {
    const uint from[2] = {MatrixPlace::lane_of(at.row, k), MatrixPlace::lane_of(k, at.column)};
    for (uint lane : from)
      if (!(e.active >> lane & 1)) lily_inactive_lane(name, line, lane);
    left[k] = float(value_of<Pair>(e.slots, from[0]).a[k % 2]);
    const Pair other = value_of<Pair>(e.slots, from[1]);
    for (uint i = 0; i < 2; ++i) right[2 * k + i] = float(other.b[i]);
  }
  add_products(d, c, left, right, 2);
}
#else
// The operands as f32, row by row: what a lane reads lies together.
struct Operands {
  float a[64], b[64];
};
template <class D, class A, class B, class C>
inline void multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                     const simdgroup_matrix<C, 8, 8>* c, const char* name, int line) {
  const MatrixPlace at(own_lane());
  const LilyExchange e = lily_meet(
      [&](unsigned char* slots) {
        auto* all = reinterpret_cast<Operands*>(slots);
        for (uint i = 0; i < 2; ++i) {
          all->a[at.row * 8 + at.column + i] = float(a.own[int(i)]);
          all->b[at.row * 8 + at.column + i] = float(b.own[int(i)]);
        }
      },
      nullptr, name, line);
  if (e.active != 0xffffffffu) lily_inactive_lane(name, line, static_cast<uint>(__builtin_ctz(~e.active)));
  const auto* all = reinterpret_cast<const Operands*>(e.slots);
  add_products(d, c, all->a + at.row * 8, all->b + at.column, 8);
}
#endif
template <class D, class A, class B, class C>
inline void simdgroup_multiply_accumulate(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                                          const simdgroup_matrix<C, 8, 8>& c, LILY_LINE) {
  multiply(d, a, b, &c, "simdgroup_multiply_accumulate", line);
}
template <class D, class A, class B>
inline void simdgroup_multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b, LILY_LINE) {
  multiply<D, A, B, D>(d, a, b, nullptr, "simdgroup_multiply", line);
}

}  // namespace metal
