// Matrices of which each lane has its own elements: what is tracked.
#pragma once

#include "threads.h"

namespace metal {

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8 && is_real<T>, "Metal has 8x8 matrices of half, bfloat and float");
  vec<T, 2> own;

  simdgroup_matrix() = default;
  // The number on the diagonal, zeros elsewhere.
  LILY_UNTRACKED explicit simdgroup_matrix(T x) {
    const MatrixPlace place(lily_lane());
    own = vec<T, 2>(place.row == place.column ? x : T(0), place.row == place.column + 1 ? x : T(0));
  }
  vec<T, 2>& thread_elements() { return own; }
  const vec<T, 2>& thread_elements() const { return own; }
};
template <class T, int C, int R> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x) {
  simdgroup_matrix<T, C, R> m;
  m.own = vec<T, 2>(x, x);
  return m;
}

// All lanes must take part, and these are where they meet.
template <class M> LILY_UNTRACKED void together(M& m, const char* name, int line) {
  const LilyExchange e = exchange(m, nullptr, name, line);
  if (~e.active) lily_inactive_lane(name, line, static_cast<uint>(__builtin_ctz(~e.active)));
}

template <class T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const LILY_ANY T* from, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                                              bool transpose = false, LILY_LINE) {
  together(d.own, "simdgroup_load", line);
  const MatrixPlace at(lily_lane());
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
  const MatrixPlace at(lily_lane());
  for (uint i = 0; i < 2; ++i) {
    const ulong row = transpose ? at.column + i : at.row, column = transpose ? at.row : at.column + i;
    to[(origin.y + row) * stride + origin.x + column] = own[int(i)];
  }
}

// D = A B + C: a lane's part of it.
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
  float sum[2];
  for (int i = 0; i < 2; ++i) sum[i] = c ? float(c->own[i]) : 0.0f;
  for (uint k = 0; k < 8; ++k)
    for (uint i = 0; i < 2; ++i) sum[i] += left[k] * right[2 * k + i];
  d.own = vec<D, 2>(D(sum[0]), D(sum[1]));
}

}  // namespace metal
