// Products of quantized matrices with rows of activations, and how both lie over a threadgroup of PRODUCT_THREADS.
//
// A matrix lies as the checkpoint has it: rows of packed words, and a scale and a bias (bf16) for each group of 64 inputs. A lane
// takes PIECE = 32 inputs of a row at once, 16 bytes of 4-bit weights: half a group. So
//
//     product = sum over pieces of: scale * (sum of q x) + bias * (sum of x)
//
// where the second sum belongs to the activations alone and is made once, when they are staged in threadgroup memory. They are
// staged with what the weights' nibbles lack: a nibble is masked where it stands, which makes it 16^i too large, and its input is
// 16^-i of what it was. Both are exact.
//
// A row of K inputs has K / 32 pieces, which LANES lanes share, in BLOCKS turns; a SIMD-group has 32 / LANES rows side by side. Each
// lane adds its pieces in ascending order, then lanes are added by halves. That order is the same in every kernel, however many rows of
// a batch it works on, and so are the bits of a result.
#pragma once
#include "common.h"

constant constexpr int PIECE = 32;
constant constexpr int QUADS = PIECE / 4;  // float4 of a piece

// How K inputs lie over a SIMD-group.
template <int K> struct Inputs {
  static constant constexpr int PIECES = K / PIECE;
  static constant constexpr int LANES = PIECES < SIMD ? PIECES : SIMD;
  static constant constexpr int BLOCKS = PIECES / LANES;
  static constant constexpr int SIDE = SIMD / LANES;           // rows side by side
  static constant constexpr int BLOCK_PIECES = LANES;          // pieces that are staged at once in a batch
  static constant constexpr int BLOCK_INPUTS = LANES * PIECE;
  static_assert(K % GROUP == 0 && PIECES % LANES == 0 && SIMD % LANES == 0, "inputs are shared out evenly over lanes");
};

// A quantized matrix in place.
struct Matrix {
  device const uint* words;
  device const ushort* scales;
  device const ushort* biases;
};
inline Matrix matrix(device const uint* words, device const ushort* scales, device const ushort* biases) {
  Matrix m;
  m.words = words, m.scales = scales, m.biases = biases;
  return m;
}
// Matrix `index` of a stack of matrices of ROWS rows and K inputs.
template <int ROWS, int K> inline Matrix at(Matrix stack, uint index) {
  const ulong rows = ulong(index) * ROWS;
  return matrix(stack.words + rows * (K / 8), stack.scales + rows * (K / GROUP), stack.biases + rows * (K / GROUP));
}

// A row of a matrix.
struct Row {
  device const uint* words;
  device const ushort* scales;
  device const ushort* biases;
};
template <int K, int BITS> inline Row row_of(Matrix m, uint row) {
  Row r;
  r.words = m.words + ulong(row) * (K * BITS / 32);
  r.scales = m.scales + ulong(row) * (K / GROUP);
  r.biases = m.biases + ulong(row) * (K / GROUP);
  return r;
}

// ---- activations --------------------------------------------------------------------------------------------------------

// Four inputs from `4 * quad` on, each with the factor that weights of BITS bits ask for.
template <int BITS> inline float4 prepare(float4 x, uint quad) {
  if (BITS == 8) return x;
  const float4 lower = float4(1.0f, 1.0f / 16, 1.0f / 256, 1.0f / 4096);
  return x * (quad % 2 ? lower * (1.0f / 65536) : lower);
}

// Staged activations of COUNT inputs: quad q of piece p at [q][p], so that lanes read side by side; then the sums of the pieces.
template <int COUNT> struct Staged {
  static constant constexpr int PIECES = COUNT / PIECE;
  static constant constexpr int QUAD_COUNT = COUNT / 4;
  // float4 of a row: the inputs, and a sum for each piece.
  static constant constexpr int SIZE = QUAD_COUNT + (PIECES + 3) / 4;
};

// Stages COUNT inputs, times `weight` where NORM, by all threads; no barrier. Returns the sum of squares of this thread's inputs on top
// of `squares`. The caller goes on after a barrier.
template <int COUNT, int BITS, bool NORM>
inline float stage(device const float4* from, device const float4* weight, threadgroup float4* to, uint thread_index, float squares) {
  const int pieces = Staged<COUNT>::PIECES;
  threadgroup float* sums = (threadgroup float*)(to + Staged<COUNT>::QUAD_COUNT);
  for (int first = 0; first < Staged<COUNT>::QUAD_COUNT; first += PRODUCT_THREADS) {
    const int quad = first + int(thread_index);
    const bool exists = quad < Staged<COUNT>::QUAD_COUNT;
    float4 x = float4(0.0f);
    if (exists) {
      x = from[quad];
      if (NORM) {
        squares = fma(x.x, x.x, squares), squares = fma(x.y, x.y, squares);
        squares = fma(x.z, x.z, squares), squares = fma(x.w, x.w, squares);
        x *= weight[quad];
      }
    }
    const float sum = lanes_sum<QUADS>((x.x + x.y) + (x.z + x.w));
    if (exists) {
      to[quad % QUADS * pieces + quad / QUADS] = prepare<BITS>(x, uint(quad));
      if (quad % QUADS == 0) sums[quad / QUADS] = sum;
    }
  }
  return squares;
}

// 1 / rms from the threads' sums of squares, which were left in `partial` (one for each SIMD-group) before a barrier.
inline void leave_squares(float squares, threadgroup float* partial, uint simd, uint lane) {
  const float sum = lanes_sum<SIMD>(squares);
  if (lane == 0) partial[simd] = sum;
}
template <int K> inline float inverse_rms(threadgroup const float* partial) {
  float total = partial[0];
  for (int i = 1; i < PRODUCT_SIMDS; ++i) total += partial[i];
  return rsqrt(fma(total, 1.0f / K, RMS_EPS));
}

// ---- products -----------------------------------------------------------------------------------------------------------

// The sum of q x over a piece. `x` has STRIDE pieces side by side.
inline float dot_word(uint word, float4 low, float4 high, float sum) {
  sum = fma(float(word & 0x0000000fu), low.x, sum);
  sum = fma(float(word & 0x000000f0u), low.y, sum);
  sum = fma(float(word & 0x00000f00u), low.z, sum);
  sum = fma(float(word & 0x0000f000u), low.w, sum);
  sum = fma(float(word & 0x000f0000u), high.x, sum);
  sum = fma(float(word & 0x00f00000u), high.y, sum);
  sum = fma(float(word & 0x0f000000u), high.z, sum);
  return fma(float(word & 0xf0000000u), high.w, sum);
}
inline float dot_bytes(uint word, float4 x, float sum) {
  sum = fma(float(word & 0xffu), x.x, sum);
  sum = fma(float(word >> 8 & 0xffu), x.y, sum);
  sum = fma(float(word >> 16 & 0xffu), x.z, sum);
  return fma(float(word >> 24), x.w, sum);
}

// A piece of M rows of a matrix, in registers.
template <int M, int BITS> struct Pieces {
  uint4 words[M][BITS / 4];
  float scales[M], biases[M];

  // `piece` of each of the rows.
  inline void load(thread const Row (&rows)[M], uint piece) {
    for (int m = 0; m < M; ++m) {
      device const packed_uint4* from = (device const packed_uint4*)rows[m].words + piece * (BITS / 4);
      for (int part = 0; part < BITS / 4; ++part) words[m][part] = uint4(from[part]);
      scales[m] = bf16(rows[m].scales[piece / (GROUP / PIECE)]);
      biases[m] = bf16(rows[m].biases[piece / (GROUP / PIECE)]);
    }
  }

  // Adds the products with one row's piece: `x` is its first quad, and `pieces` the distance from one to the next.
  inline void multiply(threadgroup const float4* x, int pieces, float sum, thread float (&products)[M]) const {
    float dots[M];
    for (int m = 0; m < M; ++m) dots[m] = 0.0f;
    if (BITS == 4) {
      for (int w = 0; w < 4; ++w) {
        const float4 low = x[2 * w * pieces], high = x[(2 * w + 1) * pieces];
        for (int m = 0; m < M; ++m) dots[m] = dot_word(words[m][0][w], low, high, dots[m]);
      }
    } else {
      for (int w = 0; w < 8; ++w) {
        const float4 quad = x[w * pieces];
        for (int m = 0; m < M; ++m) dots[m] = dot_bytes(words[m][w / 4][w % 4], quad, dots[m]);
      }
    }
    for (int m = 0; m < M; ++m) products[m] = fma(scales[m], dots[m], fma(biases[m], sum, products[m]));
  }
};

// Products of M rows of a matrix of K inputs with one row of activations that is staged whole. Every lane of a row gets its result.
template <int M, int K, int BITS>
inline void product(thread const Row (&rows)[M], threadgroup const float4* x, uint lane, thread float (&results)[M]) {
  typedef Inputs<K> In;
  threadgroup const float* sums = (threadgroup const float*)(x + Staged<K>::QUAD_COUNT);
  for (int m = 0; m < M; ++m) results[m] = 0.0f;
  for (int block = 0; block < In::BLOCKS; ++block) {
    const uint piece = block * In::LANES + lane % In::LANES;
    Pieces<M, BITS> pieces;
    pieces.load(rows, piece);
    pieces.multiply(x + piece, In::PIECES, sums[piece], results);
  }
  for (int m = 0; m < M; ++m) results[m] = lanes_sum<In::LANES>(results[m]);
}

// The row of a tile that lane `lane` of SIMD-group `simd` has as its `m`-th: SIMD-groups have M * SIDE rows each, one after the other.
template <int M, int SIDE> inline uint row_in_tile(uint simd, int m, uint lane) {
  return (simd * M + uint(m)) * SIDE + lane / (SIMD / SIDE);
}

// Rows of activations that a threadgroup of a batch multiplies at once.
struct RowGroup {
  device const float* from[ROW_GROUP];
};

// The same with the first `count` rows of `group`, staged a block at a time in `x`, by the whole threadgroup. With
// NORM they are multiplied by `weight` and `inverses` gets their 1 / rms.
template <int M, int K, int BITS, bool NORM>
inline void product_batch(thread const Row (&rows)[M], thread const RowGroup& group, int count, device const float* weight,
                          threadgroup float4* x, threadgroup float (*partial)[PRODUCT_SIMDS], uint thread_index, uint simd, uint lane,
                          thread float (&results)[ROW_GROUP][M], thread float (&inverses)[ROW_GROUP]) {
  typedef Inputs<K> In;
  typedef Staged<In::BLOCK_INPUTS> Block;
  float squares[ROW_GROUP];
  for (int r = 0; r < ROW_GROUP; ++r) {
    squares[r] = 0.0f;
    for (int m = 0; m < M; ++m) results[r][m] = 0.0f;
  }
  for (int block = 0; block < In::BLOCKS; ++block) {
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const int first = block * In::BLOCK_INPUTS;
    for (int r = 0; r < ROW_GROUP; ++r) {
      if (r < count) {
        squares[r] = stage<In::BLOCK_INPUTS, BITS, NORM>((device const float4*)(group.from[r] + first),
                                                         (device const float4*)(weight + first), x + r * Block::SIZE, thread_index, squares[r]);
      }
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    const uint piece = lane % In::LANES;
    Pieces<M, BITS> pieces;
    pieces.load(rows, block * In::LANES + piece);
    for (int r = 0; r < ROW_GROUP; ++r) {
      if (r < count) {
        threadgroup const float4* staged = x + r * Block::SIZE;
        pieces.multiply(staged + piece, Block::PIECES, ((threadgroup const float*)(staged + Block::QUAD_COUNT))[piece], results[r]);
      }
    }
  }
  for (int r = 0; r < ROW_GROUP; ++r) {
    for (int m = 0; m < M; ++m) results[r][m] = lanes_sum<In::LANES>(results[r][m]);
  }
  if (NORM) {
    for (int r = 0; r < ROW_GROUP; ++r) {
      if (r < count) leave_squares(squares[r], partial[r], simd, lane);
    }
    threadgroup_barrier(mem_flags::mem_threadgroup);
    for (int r = 0; r < ROW_GROUP; ++r) {
      if (r < count) inverses[r] = inverse_rms<K>(partial[r]);
    }
  }
}
