// Matrices that a SIMD-group has as a whole, row by row in the runtime's memory: what is not tracked.
//
// What is done with them are steps (`lily_step`): the lane that comes first takes one for all. A load reads when that lane comes. Elements that a
// lane looks at are in their places there.
#pragma once

#include "threads.h"

namespace metal {

typedef float MatrixRow __attribute__((vector_size(8 * sizeof(float))));

inline MatrixRow widened(const float* from) {
  MatrixRow row;
  __builtin_memcpy(&row, from, sizeof row);
  return row;
}
template <class T> inline MatrixRow widened(const T* from) {
#if defined(__F16C__)
  if constexpr (std::is_same_v<T, half>) {
    typedef short Halves __attribute__((vector_size(8 * sizeof(half))));
    Halves row;
    __builtin_memcpy(&row, from, sizeof row);
    return __builtin_ia32_vcvtph2ps256(row);
  }
#endif
  MatrixRow row;
  for (int i = 0; i < 8; ++i) row[i] = float(from[i]);
  return row;
}
inline void put_rounded(float* to, const MatrixRow& row) { __builtin_memcpy(to, &row, sizeof row); }
template <class T> inline void put_rounded(T* to, const MatrixRow& row) {
  for (int i = 0; i < 8; ++i) to[i] = T(row[i]);
}

// What a lane's `thread_elements` are. They are asked for anew each time, so that a step between two times finds and leaves what it must.
template <class M, class T> struct Elements {
  using Pair = vec<std::remove_const_t<T>, 2>;
  M& of;
  T& operator[](int i) const { return of.elements()[i]; }
  operator Pair() const {
    T* at = of.elements();
    return Pair(at[0], at[1]);
  }
  const Elements& operator=(Pair from) const {
    T* at = of.elements();
    at[0] = from[0], at[1] = from[1];
    return *this;
  }
  const Elements& operator=(const Elements& other) const { return *this = Pair(other); }
};

template <class T, int Columns, int Rows> struct simdgroup_matrix {
  static_assert(Columns == 8 && Rows == 8 && is_real<T>, "Metal has 8x8 matrices of half, bfloat and float");
  uint number;  // among the SIMD-group's

  simdgroup_matrix() {
    LilyLane* self = lily_self;
    const uint64_t free = self->free;
    if (__builtin_expect(!free, 0)) lily_misuse("a thread has more than 64 matrices at once");
    number = static_cast<uint>(__builtin_ctzll(free));
    self->free = free & (free - 1);
  }
  // The number on the diagonal, zeros elsewhere.
  explicit simdgroup_matrix(T x, LILY_LINE) : simdgroup_matrix() {
    lily_step([&] { for (int i = 0; i < 64; ++i) all()[i] = i % 9 ? T(0) : x; }, "simdgroup_matrix", line);
  }
  simdgroup_matrix(const simdgroup_matrix& other) : simdgroup_matrix() { *this = other; }
  simdgroup_matrix& operator=(const simdgroup_matrix& other) {
    lily_step([&] { __builtin_memmove(all(), other.all(), 64 * sizeof(T)); }, "simdgroup_matrix", LILY_NO_LINE);
    return *this;
  }
  ~simdgroup_matrix() { lily_self->free |= uint64_t(1) << number; }

  T* all() const { return reinterpret_cast<T*>(lily_self->simd->matrices[number]); }
  Elements<simdgroup_matrix, T> thread_elements() { return {*this}; }
  Elements<const simdgroup_matrix, const T> thread_elements() const { return {*this}; }
  T* elements() const {
    LilyLane* self = lily_self;
    if (!self->looked) {
      self->looked = self->at;
      self->at = self->simd->steps + LILY_STEPS + 1;
    }
    const MatrixPlace at(self->thread.index % LILY_SIMD_WIDTH);
    return all() + at.row * 8 + at.column;
  }
};
template <class T, int C, int R> inline simdgroup_matrix<T, C, R> make_filled_simdgroup_matrix(T x, LILY_LINE) {
  simdgroup_matrix<T, C, R> m;
  lily_step([&] { for (int i = 0; i < 64; ++i) m.all()[i] = x; }, "make_filled_simdgroup_matrix", line);
  return m;
}

template <class T> __attribute__((noinline)) void load_whole(T* to, const T* from, ulong stride, bool transpose) {
  for (ulong row = 0; row < 8; ++row)
    for (ulong column = 0; column < 8; ++column) to[row * 8 + column] = transpose ? from[column * stride + row] : from[row * stride + column];
}
template <class T> inline void simdgroup_load(simdgroup_matrix<T, 8, 8>& d, const T* from, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                                              bool transpose = false, LILY_LINE) {
  lily_step([&] { load_whole(d.all(), from + origin.y * stride + origin.x, stride, transpose); }, "simdgroup_load", line);
}
// Each lane stores its own when it comes, so that nothing must have been settled.
template <class T> inline void simdgroup_store(const simdgroup_matrix<T, 8, 8>& a, T* to, ulong stride = 8, ulong2 origin = ulong2(0, 0),
                                               bool transpose = false, LILY_LINE) {
  lily_step([] {}, "simdgroup_store", line, false);
  const MatrixPlace at(lily_self->thread.index % LILY_SIMD_WIDTH);
  const T* own = a.elements();
  for (uint i = 0; i < 2; ++i) {
    const ulong row = transpose ? at.column + i : at.row, column = transpose ? at.row : at.column + i;
    to[(origin.y + row) * stride + origin.x + column] = own[i];
  }
}

// D = A B + C, all of it.
template <class D, class A, class B, class C> __attribute__((noinline)) void multiply_whole(D* d, const A* a, const B* b, const C* c) {
  MatrixRow sums[8], right[8];
  float left[64];
  for (int row = 0; row < 8; ++row) {
    sums[row] = c ? widened(c + row * 8) : MatrixRow{};
    right[row] = widened(b + row * 8);
    put_rounded(left + row * 8, widened(a + row * 8));
  }
  for (int k = 0; k < 8; ++k)
    for (int row = 0; row < 8; ++row) sums[row] += left[row * 8 + k] * right[k];
  for (int row = 0; row < 8; ++row) put_rounded(d + row * 8, sums[row]);
}
template <class D, class A, class B, class C>
inline void multiply(simdgroup_matrix<D, 8, 8>& d, const simdgroup_matrix<A, 8, 8>& a, const simdgroup_matrix<B, 8, 8>& b,
                     const simdgroup_matrix<C, 8, 8>* c, const char* name, int line) {
  lily_step([&] { multiply_whole(d.all(), a.all(), b.all(), c ? c->all() : static_cast<C*>(nullptr)); }, name, line);
}

}  // namespace metal
