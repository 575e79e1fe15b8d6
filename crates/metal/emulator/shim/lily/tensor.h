// Metal 4's tensors, and the product of two of them (`mpp::tensor_ops::matmul2d`), as far as Lily's kernels use them: two dimensions, operands in memory,
// the result shared out among the threads of several SIMD-groups.
//
// What a product may rely on is what the header of Metal Performance Primitives says: all threads of the SIMD-groups come to it, their number is that of the
// threadgroup, and who has which element is nobody's to know. Here it is scattered, and one element of each thread is not valid. Sums are f32, in ascending order.
#pragma once

#include "threads.h"

static_assert(__cplusplus >= 202002L, "a descriptor is an argument of a template");

namespace metal {

template <class T, size_t N> struct array {
  T of[N];
  constexpr T& operator[](size_t i) { return of[i]; }
  constexpr const T& operator[](size_t i) const { return of[i]; }
};

// Sizes that are known when the kernel runs, the first of them that of neighbours in memory.
template <class I, size_t Rank> struct dextents {
  static_assert(Rank == 2, "tensors have two dimensions here");
  I of[2];
  constexpr dextents(I inner, I outer) : of{inner, outer} {}
  constexpr I extent(size_t dimension) const { return of[dimension]; }
};

// The kind of a tensor that a kernel makes of a pointer.
struct tensor_inline {};
template <class T, class Extents, class Kind> struct tensor {
  static_assert(std::is_same_v<Kind, tensor_inline>, "tensors are made of pointers here");
  using Element = std::remove_cv_t<T>;
  T* at;
  Extents extents;
  array<int, 2> strides;
  tensor(T* from, Extents sizes) : at(from), extents(sizes), strides{1, sizes.extent(0)} {}
  tensor(T* from, Extents sizes, array<int, 2> steps) : at(from), extents(sizes), strides(steps) {}
  T* place(int inner, int outer) const { return at + inner * strides[0] + outer * strides[1]; }
};

// Who works on an operation together.
template <int N> struct execution_simdgroups {
  static constexpr uint threads = N * LILY_SIMD_WIDTH;
};

// Where threads of the threadgroup come together, without any order of memory.
inline void meet_for_tensors(int line) {
#ifdef LILY_TRACKED
  lily_barrier(0, 0, line);
#else
  lily_wait(0, line);
#endif
}

// Where element p of all comes to lie: p times this, a prime that divides no size, so that neighbours are far from each other.
constexpr int SCATTER = 7919;

// The M x N results of an operation of `Threads` threads: each has some of them.
template <class T, int M, int N, uint Threads> struct cooperative_tensor {
  static constexpr int EACH = M * N / int(Threads);
  static_assert(EACH * int(Threads) == M * N && M * N % SCATTER != 0, "every thread has as many, scattered over all");

  cooperative_tensor() {
    // What nobody wrote is no number.
    for (int i = 0; i <= EACH; ++i) own[i] = T(NAN);
  }
  constexpr ushort get_capacity() const { return EACH + 1; }
  bool is_valid_element(ushort i) const { return i != hole(); }
  T& operator[](ushort i) {
    check(i);
    return own[i];
  }
  // {column, row}
  array<int, 2> get_multidimensional_index(ushort i) const {
    check(i);
    const int place = (int(lily_index()) + int(Threads) * (i - (i > hole()))) * SCATTER % (M * N);
    return {place % N, place / N};
  }
  template <class E> void store(tensor<E, dextents<int, 2>, tensor_inline>& to, LILY_LINE) const {
    static_assert(std::is_same_v<std::remove_cv_t<E>, T>, "a result is stored as what it is");
    if (to.extents.extent(0) < N || to.extents.extent(1) < M) lily_misuse("a result is stored where it does not fit");
    meet_for_tensors(line);
    for (ushort i = 0; i < get_capacity(); ++i) {
      if (!is_valid_element(i)) continue;
      const array<int, 2> at = get_multidimensional_index(i);
      *to.place(at[0], at[1]) = own[i];
    }
  }

 private:
  static ushort hole() { return ushort(lily_index() % (EACH + 1)); }
  void check(ushort i) const {
    if (i >= get_capacity() || !is_valid_element(i)) lily_misuse("an element that is not valid is asked for");
  }
  T own[EACH + 1];
};

}  // namespace metal

namespace mpp {
namespace tensor_ops {

struct matmul2d_descriptor {
  enum class mode { multiply, multiply_accumulate };
  int m, n, k;
  bool transpose_left, transpose_right, relaxed_precision;
  mode matmul_mode;
  constexpr matmul2d_descriptor(int rows, int columns, int inputs, bool left = false, bool right = false, bool relaxed = false,
                                mode how = mode::multiply)
      : m(rows), n(columns), k(inputs), transpose_left(left), transpose_right(right), relaxed_precision(relaxed), matmul_mode(how) {}
};

template <matmul2d_descriptor D, class Scope> struct matmul2d {
  static_assert(D.m % 16 == 0 || D.n % 16 == 0, "one of M and N is a multiple of 16");
  static_assert(D.k > 0, "the number of inputs is known here");
  static_assert(!D.transpose_left && D.transpose_right, "rows times rows: others are not needed here");

  template <class Left, class Right, class T> auto get_destination_cooperative_tensor() const {
    check_types<Left, Right, T>();
    return metal::cooperative_tensor<T, D.m, D.n, Scope::threads>();
  }

  template <class Left, class Right, class T>
  void run(Left& left, Right& right, metal::cooperative_tensor<T, D.m, D.n, Scope::threads>& destination, LILY_LINE) const {
    check_types<Left, Right, T>();
    if (lily_threads() != Scope::threads) lily_misuse("matmul2d has another number of threads than its threadgroup");
    if (left.extents.extent(0) < D.k || left.extents.extent(1) < D.m || right.extents.extent(0) < D.k || right.extents.extent(1) < D.n) {
      lily_misuse("an operand of matmul2d is smaller than its descriptor says");
    }
    metal::meet_for_tensors(line);
    for (ushort i = 0; i < destination.get_capacity(); ++i) {
      if (!destination.is_valid_element(i)) continue;
      const metal::array<int, 2> at = destination.get_multidimensional_index(i);
      T sum = D.matmul_mode == matmul2d_descriptor::mode::multiply ? T(0) : destination[i];
      for (int k = 0; k < D.k; ++k) sum += T(*left.place(k, at[1])) * T(*right.place(k, at[0]));
      destination[i] = sum;
    }
  }

 private:
  template <class Left, class Right, class T> static constexpr void check_types() {
    static_assert(std::is_same_v<typename Left::Element, metal::half> && std::is_same_v<typename Right::Element, metal::half> && std::is_same_v<T, float>,
                  "of what matmul2d can multiply, halves into f32 is here");
  }
};

}  // namespace tensor_ops
}  // namespace mpp
