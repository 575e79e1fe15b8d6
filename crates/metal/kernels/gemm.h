// Products of quantized matrices with many rows of activations: the core of all projections of a prompt.
//
// A threadgroup of 128 threads has a block of ROWS rows (8, 16, 32 or 64; the plan chooses) and COLUMNS = 64 rows of the matrix, which are columns
// of the result. It goes through the inputs a group of 64 at a time: rows and weights are put into threadgroup memory as whole numbers, four
// SIMD-groups multiply 8 x 8 matrices of them, and what comes out is added to the totals, all of it in registers.
//
// **Arithmetic.** A row's 64 inputs (times the norm's weight where there is one) are rounded to whole numbers of at most LARGEST_INPUT, `x = power * q`,
// with a power of two for each row and group that brings the largest of them to 1024 .. 2048: eleven bits and a sign. A weight is a whole number w from the start. So
//
//     total = fma(power, fma(scale, sum of w q, bias * (sum of q)), total)     for each group, in ascending order
//
// where both sums are those of whole numbers that f32 holds, partial sums too (below), so that they have no order: whatever multiplies, in whatever order,
// a row has the same bits, and so in any block and any chunk. A weight of 8 bits is multiplied as w - 128, and 128 (sum of q) is added in one fma: its
// sum of w q is the exact one rounded to f32. Multiplying with a power of two rounds nothing.
// What is lost is the rounding of the inputs, at most power / 2 of each.
//
// **Threadgroup memory.** Rows of 64 halves with 8 more between them, so that the eight rows of a matrix lie in different banks; for each row {power, sum of q}, for
// each column {scale, bias}; results, which are f32, take the same place afterwards:
//
//     ROWS   SIMD-groups (rows x columns)   8 x 8 sums of each   registers of a lane for sums and totals   bytes of room
//        8              1 x 4                     1 x 2                      4 +  4                          10,944
//       16              2 x 2                     1 x 4                      8 +  8                          12,160
//       32              2 x 2                     2 x 4                     16 + 16                          14,592
//       64              2 x 2                     4 x 4                     32 + 32                          19,456
//
// With half a group at a time it would be 16,384 for 64 rows, which is what their results are, and 6 to 8 KB for fewer, with four barriers a group instead of two. A core has about 60 KB
// and 208 KB of registers (P. Turner, metal-benchmarks): with 64 rows, 64 registers for sums and totals and about 35 beside them, both are full with three threadgroups.
//
// **Operations of a lane for a group**, counted in the source; a multiplication with addition is one, as is everything else but loads and stores:
//
//     ROWS   products   scaling   zeros   rounding rows (without NORM)   unpacking weights
//        8      256        12        4           70  (54)                      76
//       16      512        24        8           70  (54)                      76
//       32    1,024        48       16          140 (108)                      76
//       64    2,048        96       32          280 (216)                      76
//
// Scaling is 3 operations for a result where its products are 64: 4.7 %. Every tile of columns rounds the same rows again: 14 % of the products with 64 rows. A kernel
// that rounds them once would save that for a dispatch, a buffer and the way through memory, without changing a bit.
//
// **Two matrix units.** Where the macro TENSOR_PRODUCTS is set, blocks of 64 rows go through `matmul2d` of Metal 4 (below) instead of `simdgroup_matrix`; all else is the same, so
// are the bits. Whether and when: `lily_metal::tensors`.
//
// **Relied on**: `simdgroup_matrix` multiplies halves exactly and adds in f32 (sums of whole numbers below 2^24), and a lane has the elements that `Place` says, which
// Apple does not specify: MLX relies on the same (`BaseMMAFrag`), and the emulator has it so.
#pragma once
#include "product.h"
#include <metal_simdgroup_matrix>

constant constexpr int GEMM_THREADS = 128;
constant constexpr int GEMM_SIMDS = GEMM_THREADS / SIMD;
constant constexpr int COLUMNS = 64;
constant constexpr int EDGE = 8;                                   // rows and columns of a SIMD-group's matrix
constant constexpr int STRIDE = GROUP + EDGE;                      // halves from one staged row to the next
constant constexpr int OWN_INPUTS = 8;                             // inputs of a row that a thread rounds
constant constexpr int ROW_LANES = GROUP / OWN_INPUTS;             // threads of a row
constant constexpr int ROWS_AT_ONCE = GEMM_THREADS / ROW_LANES;    // rows that all threads round in one turn
constant constexpr int WEIGHT_LANES = GEMM_THREADS / COLUMNS;      // threads that unpack a column
static_assert(COLUMNS % EDGE == 0 && WEIGHT_LANES * PIECE == GROUP, "a thread unpacks a piece of a column");

constant constexpr int INPUT_BITS = 11;
constant constexpr int LARGEST_INPUT = 1 << INPUT_BITS;            // 2047.5 and more are rounded up to it
constant constexpr int BYTE_CENTRE = 128;                          // of weights of 8 bits
// The largest size of what is multiplied for a weight, and the sum that it leads to.
template <int BITS> struct Weight {
  static constant constexpr int LARGEST = BITS == 4 ? 15 : BYTE_CENTRE;
  static_assert(LARGEST * LARGEST_INPUT * GROUP <= 1 << 24, "f32 holds every whole number as large as the sum of a group");
};

// How a block of ROWS rows lies over the SIMD-groups.
template <int ROWS> struct Block {
  static constant constexpr int ROW_SIMDS = ROWS == EDGE ? 1 : 2;
  static constant constexpr int COLUMN_SIMDS = GEMM_SIMDS / ROW_SIMDS;
  static constant constexpr int ROW_TILES = ROWS / EDGE / ROW_SIMDS;
  static constant constexpr int COLUMN_TILES = COLUMNS / EDGE / COLUMN_SIMDS;
  static constant constexpr int TURNS = (ROWS + ROWS_AT_ONCE - 1) / ROWS_AT_ONCE;
  // Floats of threadgroup memory: rows, weights, and two factors for each of both; afterwards the results, [ROWS][COLUMNS].
  static constant constexpr int ROOM = (ROWS + COLUMNS) * (STRIDE / 2 + 2);
  static_assert(ROWS % EDGE == 0 && ROOM >= ROWS * COLUMNS, "results take the place of what was multiplied");
};

// `count` rows one after the other.
struct ConsecutiveRows {
  device const float* first;
  uint stride, count;
  inline device const float* row(uint r) const { return first + ulong(min(r, count - 1)) * stride; }
};
// Rows of the slots of one expert: every DIVIDE-th slot of a token is the same row.
template <int DIVIDE> struct SlotRows {
  device const float* all;
  device const uint* slots;
  uint stride, count;
  inline device const float* row(uint r) const { return all + ulong(slots[min(r, count - 1)] / DIVIDE) * stride; }
};

// Rows of a matrix of COUNT rows and K inputs, from `first` on; beyond its last row that one, and nobody looks at the result.
template <int COUNT, int K, int BITS> struct MatrixColumns {
  Matrix all;
  uint first;
  inline Row row(uint n) const { return row_of<K, BITS>(all, min(first + n, uint(COUNT - 1))); }
};

// ---- operands -----------------------------------------------------------------------------------------------------------

// The largest over lanes that differ in the bits of WIDTH - 1.
template <int WIDTH> inline float lanes_max(float x) {
  for (int bit = WIDTH / 2; bit > 0; bit /= 2) x = max(x, simd_shuffle_xor(x, ushort(bit)));
  return x;
}

// The bits of the power of two that inputs are divided by where the largest of them is `largest`, and of its inverse. Both are normal numbers whatever it is.
constant constexpr uint EXPONENT = 0x7f800000u, EXPONENT_ONE = 0x00800000u;
inline uint power_of(float largest) {
  const uint shift = (INPUT_BITS - 1) * EXPONENT_ONE;
  return max(as_type<uint>(largest) & EXPONENT, shift + EXPONENT_ONE) - shift;
}
inline float inverse_of(uint power) { return as_type<float>(254 * EXPONENT_ONE - power); }

// Rounds a thread's eight inputs of a row and group, with the others of the row; all lanes come here. Inputs stand in the order in which `unpack` has their weights.
// Returns the sum of the inputs' squares on top of `squares`.
template <int BITS, bool NORM>
inline float stage_row(device const float4* from, device const float4* norm, threadgroup half4* to, threadgroup float2* factors, uint part,
                       bool exists, float squares) {
  float4 low = from[0], high = from[1];
  if (NORM) {
    squares = fma(low.x, low.x, squares), squares = fma(low.y, low.y, squares);
    squares = fma(low.z, low.z, squares), squares = fma(low.w, low.w, squares);
    squares = fma(high.x, high.x, squares), squares = fma(high.y, high.y, squares);
    squares = fma(high.z, high.z, squares), squares = fma(high.w, high.w, squares);
    low *= norm[0], high *= norm[1];
  }
  const float4 sizes = max(abs(low), abs(high));
  const uint power = power_of(lanes_max<ROW_LANES>(max(max(sizes.x, sizes.y), max(sizes.z, sizes.w))));
  const float inverse = inverse_of(power);
  low = rint(low * inverse), high = rint(high * inverse);
  const float4 pairs = low + high;
  const float sum = lanes_sum<ROW_LANES>((pairs.x + pairs.y) + (pairs.z + pairs.w));
  if (exists) {
    if (BITS == 4) {
      to[0] = half4(float4(low.x, high.x, low.y, high.y)), to[1] = half4(float4(low.z, high.z, low.w, high.w));
    } else {
      to[0] = half4(float4(low.x, low.z, low.y, low.w)), to[1] = half4(float4(high.x, high.z, high.y, high.w));
    }
    if (part == 0) *factors = float2(as_type<float>(power), sum);
  }
  return squares;
}

// A whole number in the lowest bits of a half that says 1024 is added to 1024: no conversion. Weights i and i + 4 of a word of eight come out as a pair, of a word of
// four i and i + 2.
constant constexpr uint HALVES_1024 = 0x64006400u;
template <int BITS> inline void unpack(uint word, threadgroup half4* to) {
  if (BITS == 4) {
    const half4 none = half4(half(1024.0f));
    for (int i = 0; i < 2; ++i) {
      const uint first = word >> (8 * i);
      to[i] = as_type<half4>(uint2(first & 0x000f000fu, first >> 4 & 0x000f000fu) | HALVES_1024) - none;
    }
  } else {
    const half4 none = half4(half(1024.0f + BYTE_CENTRE));
    to[0] = as_type<half4>(uint2(word & 0x00ff00ffu, word >> 8 & 0x00ff00ffu) | HALVES_1024) - none;
  }
}

// Unpacks a thread's piece of a column's group.
template <int BITS> inline void stage_weights(Row row, int group, uint part, threadgroup half4* to, threadgroup float2* factors) {
  const int half4s = 8 / BITS;  // of a word
  device const packed_uint4* from = (device const packed_uint4*)row.words + (uint(group * WEIGHT_LANES) + part) * (BITS / 4);
  for (int quad = 0; quad < BITS / 4; ++quad) {
    const uint4 words = uint4(from[quad]);
    for (int i = 0; i < 4; ++i) unpack<BITS>(words[i], to + (4 * quad + i) * half4s);
  }
  if (part == 0) *factors = float2(bf16(row.scales[group]), bf16(row.biases[group]));
}

// ---- products -----------------------------------------------------------------------------------------------------------

// Where the first of a lane's two numbers of an 8 x 8 matrix is; the other is on its right.
struct Place {
  uint row, column;
};
inline Place place_of(uint lane) {
  Place place;
  place.row = (lane / 4 & 4) + lane / 2 % 4;
  place.column = (lane / 4 & 2) * 2 + lane % 2 * 2;
  return place;
}

// Adds a group's sum of products to a total. Factors: {power, sum of q} of the row, {scale, bias} of the column.
template <int BITS> inline float add_group(float total, float sum, float2 of_row, float2 of_column) {
  if (BITS == 8) sum = fma(float(BYTE_CENTRE), of_row.y, sum);
  return fma(of_row.x, fma(of_column.x, sum, of_column.y * of_row.y), total);
}

// A group in threadgroup memory: rows [ROWS][STRIDE], columns [COLUMNS][STRIDE], and the factors of both.
struct StagedGroup {
  threadgroup half* rows;
  threadgroup half* columns;
  threadgroup float2* row_factors;
  threadgroup float2* column_factors;
};

// What a thread stages of every group.
template <int ROWS, int K, int BITS, bool NORM> struct Staging {
  StagedGroup to;
  device const float4* from[Block<ROWS>::TURNS];
  float squares[Block<ROWS>::TURNS];
  device const float4* norm;
  Row weight_row;
  uint part, own;       // of rows: its eight inputs, and its first row
  uint column, piece;   // of columns

  // Stages group `g`, behind a barrier for what was there before; ends with a barrier.
  inline void stage(int g) {
    const uint quad = uint(g) * (GROUP / 4);
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int turn = 0; turn < Block<ROWS>::TURNS; ++turn) {
      const uint r = turn * ROWS_AT_ONCE + own;
      squares[turn] = stage_row<BITS, NORM>(from[turn] + quad, norm + quad + part * (OWN_INPUTS / 4),
                                            (threadgroup half4*)(to.rows + r * STRIDE + part * OWN_INPUTS), to.row_factors + r, part,
                                            r < uint(ROWS), squares[turn]);
    }
    stage_weights<BITS>(weight_row, g, piece, (threadgroup half4*)(to.columns + column * STRIDE + piece * PIECE), to.column_factors + column);
    threadgroup_barrier(mem_flags::mem_threadgroup);
  }

  // 1 / rms of the rows, once all groups are staged; all lanes come here.
  inline void leave_inverses(threadgroup float* inverses) const {
    for (int turn = 0; turn < Block<ROWS>::TURNS; ++turn) {
      const float total = lanes_sum<ROW_LANES>(squares[turn]);
      const uint r = turn * ROWS_AT_ONCE + own;
      if (part == 0 && r < uint(ROWS)) inverses[r] = rsqrt(fma(total, 1.0f / K, RMS_EPS));
    }
  }
};

// Multiplies all groups and leaves the totals in `results`, [ROWS][COLUMNS], which is where the staged group was; no barrier at the end.
template <int ROWS> struct SimdgroupMatrices {};
template <int K, int BITS, int ROWS, class Stage>
inline void multiply(SimdgroupMatrices<ROWS>, thread Stage& staging, threadgroup float* results, uint simd, uint lane) {
  typedef Block<ROWS> B;
  const StagedGroup staged = staging.to;
  const uint first_row = simd % B::ROW_SIMDS * (B::ROW_TILES * EDGE), first_column = simd / B::ROW_SIMDS * (B::COLUMN_TILES * EDGE);
  const Place place = place_of(lane);
  simdgroup_float8x8 totals[B::ROW_TILES][B::COLUMN_TILES], sums[B::ROW_TILES][B::COLUMN_TILES];
  for (int i = 0; i < B::ROW_TILES; ++i) {
    for (int j = 0; j < B::COLUMN_TILES; ++j) totals[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
  }
  for (int g = 0; g < K / GROUP; ++g) {
    staging.stage(g);
    for (int i = 0; i < B::ROW_TILES; ++i) {
      for (int j = 0; j < B::COLUMN_TILES; ++j) sums[i][j] = make_filled_simdgroup_matrix<float, 8, 8>(0.0f);
    }
    for (int k = 0; k < GROUP; k += EDGE) {
      simdgroup_half8x8 a[B::ROW_TILES];
      for (int i = 0; i < B::ROW_TILES; ++i) simdgroup_load(a[i], staged.rows + (first_row + i * EDGE) * STRIDE + k, STRIDE);
      for (int j = 0; j < B::COLUMN_TILES; ++j) {
        simdgroup_half8x8 b;
        simdgroup_load(b, staged.columns + (first_column + j * EDGE) * STRIDE + k, STRIDE, ulong2(0, 0), true);
        for (int i = 0; i < B::ROW_TILES; ++i) simdgroup_multiply_accumulate(sums[i][j], a[i], b, sums[i][j]);
      }
    }
    float2 of_rows[B::ROW_TILES];
    for (int i = 0; i < B::ROW_TILES; ++i) of_rows[i] = staged.row_factors[first_row + i * EDGE + place.row];
    for (int j = 0; j < B::COLUMN_TILES; ++j) {
      const float4 of_columns = *(threadgroup const float4*)(staged.column_factors + first_column + j * EDGE + place.column);
      for (int i = 0; i < B::ROW_TILES; ++i) {
        totals[i][j].thread_elements()[0] =
            add_group<BITS>(totals[i][j].thread_elements()[0], sums[i][j].thread_elements()[0], of_rows[i], of_columns.xy);
        totals[i][j].thread_elements()[1] =
            add_group<BITS>(totals[i][j].thread_elements()[1], sums[i][j].thread_elements()[1], of_rows[i], of_columns.zw);
      }
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  threadgroup float* own = results + first_row * COLUMNS + first_column;
  for (int i = 0; i < B::ROW_TILES; ++i) {
    for (int j = 0; j < B::COLUMN_TILES; ++j) simdgroup_store(totals[i][j], own + i * EDGE * COLUMNS + j * EDGE, COLUMNS);
  }
}
template <int ROWS> struct MatrixUnit {
  typedef SimdgroupMatrices<ROWS> type;
};

#ifdef TENSOR_PRODUCTS
#include <metal_tensor>
#include <MetalPerformancePrimitives/MetalPerformancePrimitives.h>

// The same with `matmul2d`, by the four SIMD-groups together: on Apple GPUs of family 10 (M5) and later it goes to their neural accelerators. It is asked for a
// group at a time, as a product that begins at zero, without relaxed precision; where a thread's elements are is asked for element by element, since
// it is nowhere specified and differs between generations. Operands stay in threadgroup memory as they are.
constant constexpr int TENSOR_ROWS = 64;
struct TensorMatrices {};
template <int K, int BITS, class Stage>
inline void multiply(TensorMatrices, thread Stage& staging, threadgroup float* results, uint, uint) {
  typedef tensor<threadgroup half, dextents<int, 2>, tensor_inline> Operand;
  typedef tensor<threadgroup float, dextents<int, 2>, tensor_inline> Results;
  constexpr auto descriptor = mpp::tensor_ops::matmul2d_descriptor(TENSOR_ROWS, COLUMNS, GROUP, false, true, false,
                                                                   mpp::tensor_ops::matmul2d_descriptor::mode::multiply);
  mpp::tensor_ops::matmul2d<descriptor, execution_simdgroups<GEMM_SIMDS>> operation;
  const StagedGroup staged = staging.to;
  // The first dimension is the one whose elements are neighbours.
  Operand rows(staged.rows, dextents<int, 2>(GROUP, TENSOR_ROWS), array<int, 2>{1, STRIDE});
  Operand columns(staged.columns, dextents<int, 2>(GROUP, COLUMNS), array<int, 2>{1, STRIDE});
  auto totals = operation.template get_destination_cooperative_tensor<Operand, Operand, float>();
  auto sums = operation.template get_destination_cooperative_tensor<Operand, Operand, float>();
#pragma unroll
  for (ushort i = 0; i < totals.get_capacity(); ++i) {
    if (totals.is_valid_element(i)) totals[i] = 0.0f;
  }
  for (int g = 0; g < K / GROUP; ++g) {
    staging.stage(g);
    operation.run(rows, columns, sums);
#pragma unroll
    for (ushort i = 0; i < sums.get_capacity(); ++i) {
      if (!sums.is_valid_element(i)) continue;
      const auto at = sums.get_multidimensional_index(i);
      totals[i] = add_group<BITS>(totals[i], sums[i], staged.row_factors[at[1]], staged.column_factors[at[0]]);
    }
  }
  threadgroup_barrier(mem_flags::mem_threadgroup);
  Results to(results, dextents<int, 2>(COLUMNS, TENSOR_ROWS));
  totals.store(to);
}
template <> struct MatrixUnit<TENSOR_ROWS> {
  typedef TensorMatrices type;
};
#endif

// The products of `rows` (`row(r)`: where it begins, a multiple of 16 bytes) with the matrix rows of `columns` (`row(n)`), K inputs each, by the whole threadgroup. Leaves them in
// `room` (aligned to 16 bytes) as [ROWS][COLUMNS] behind a barrier; with NORM those of x * norm, and 1 / rms of each row in `inverses`.
template <int ROWS, int K, int BITS, bool NORM, class Rows, class Columns>
inline void gemm(Rows rows, Columns columns, device const float* norm, threadgroup float* room, threadgroup float* inverses, uint thread_index,
                 uint simd, uint lane) {
  static_assert(K % GROUP == 0 && Weight<BITS>::LARGEST > 0, "groups are whole");
  Staging<ROWS, K, BITS, NORM> staging;
  staging.to.rows = (threadgroup half*)room;
  staging.to.columns = staging.to.rows + ROWS * STRIDE;
  staging.to.row_factors = (threadgroup float2*)(staging.to.columns + COLUMNS * STRIDE);
  staging.to.column_factors = staging.to.row_factors + ROWS;
  staging.norm = (device const float4*)norm;
  staging.part = thread_index % ROW_LANES, staging.own = thread_index / ROW_LANES;
  for (int turn = 0; turn < Block<ROWS>::TURNS; ++turn) {
    staging.from[turn] = (device const float4*)rows.row(turn * ROWS_AT_ONCE + staging.own) + staging.part * (OWN_INPUTS / 4);
    staging.squares[turn] = 0.0f;
  }
  staging.column = thread_index / WEIGHT_LANES, staging.piece = thread_index % WEIGHT_LANES;
  staging.weight_row = columns.row(staging.column);
  multiply<K, BITS>(typename MatrixUnit<ROWS>::type(), staging, room, simd, lane);
  if (NORM) staging.leave_inverses(inverses);
  threadgroup_barrier(mem_flags::mem_threadgroup);
}

// Four neighbouring results of the first `count` rows at a time, by all threads: `at(r, n)`, n a multiple of 4.
inline float4 result(threadgroup const float* room, uint r, uint n) { return *(threadgroup const float4*)(room + r * COLUMNS + n); }
constant constexpr int RESULT_QUADS = COLUMNS / 4;
