// Matrices of 8x8 numbers that lie across a SIMD-group, two to a lane.
//
// A lane has two neighbours of one row. Which, Apple does not say in its specification; kernels in the field rely on the
// places below (MLX's `BaseMMAFrag`), and so do kernels here that use `thread_elements`.
//
// Where loads and stores are tracked each lane has its own elements and touches its own part of memory (matrix_apart.h). Where they are not
// the lane that comes first does it for all (matrix_whole.h). Both give the same bits: f32 products that are added to the
// third operand in ascending order, one rounding each.
#pragma once

#include "threads.h"

namespace metal {

template <class T, int Columns = 8, int Rows = 8> struct simdgroup_matrix;
using simdgroup_half8x8 = simdgroup_matrix<half, 8, 8>;
using simdgroup_bfloat8x8 = simdgroup_matrix<bfloat, 8, 8>;
using simdgroup_float8x8 = simdgroup_matrix<float, 8, 8>;

// Place of the first of a lane's two elements.
struct MatrixPlace {
  uint row, column;
  explicit MatrixPlace(uint lane) : row((lane / 4 & 4) + lane / 2 % 4), column((lane / 4 & 2) * 2 + lane % 2 * 2) {}
  static uint lane_of(uint row, uint column) { return (row & 4) * 4 + (column & 4) * 2 + row % 4 * 2 + column % 4 / 2; }
};

}  // namespace metal

#ifdef LILY_TRACKED
#include "matrix_apart.h"
#else
#include "matrix_whole.h"
#endif

namespace metal {

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
