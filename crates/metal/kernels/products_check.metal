// One block of 64 rows times one tile of 64 columns (gemm.h), for the host to compare both matrix units by (`lily_metal::tensors`). Grid (1), 128 threads.
#include "gemm.h"

constant constexpr int CHECK_ROWS = 64;
constant constexpr int CHECK_INPUTS = 256;

template <int BITS>
kernel void products_check(device const uint* words [[buffer(0)]],
                           device const ushort* scales [[buffer(1)]],
                           device const ushort* biases [[buffer(2)]],
                           device const float* x [[buffer(3)]],
                           device float* out [[buffer(4)]],
                           uint thread_index [[thread_index_in_threadgroup]],
                           uint simd [[simdgroup_index_in_threadgroup]],
                           uint lane [[thread_index_in_simdgroup]]) {
  threadgroup float4 room[Block<CHECK_ROWS>::ROOM / 4];
  threadgroup float inverses[CHECK_ROWS];
  threadgroup float* results = (threadgroup float*)room;
  ConsecutiveRows rows;
  rows.first = x, rows.stride = CHECK_INPUTS, rows.count = CHECK_ROWS;
  MatrixColumns<COLUMNS, CHECK_INPUTS, BITS> columns;
  columns.all = matrix(words, scales, biases), columns.first = 0;
  gemm<CHECK_ROWS, CHECK_INPUTS, BITS, false>(rows, columns, x, results, inverses, thread_index, simd, lane);
  for (uint i = thread_index; i < uint(CHECK_ROWS * COLUMNS); i += GEMM_THREADS) out[i] = results[i];
}
template [[host_name("products_check_4")]] [[kernel]] decltype(products_check<4>) products_check<4>;
template [[host_name("products_check_8")]] [[kernel]] decltype(products_check<8>) products_check<8>;
