// Vectors of two, three and four components, with Metal's sizes and alignments, their swizzles, and the packed kinds.
#pragma once

#include "scalar.h"
#include "swizzles.h"

namespace metal {

template <class T, int N> struct vec;

// Some components of a vector, in some order, as one name: `v.zx`.
template <class T, int N, int... I> struct Swizzle {
  T of[N];
#ifdef LILY_SPACES
  Swizzle() = default;
  LILY_COPIES(Swizzle)
#endif
  operator vec<T, sizeof...(I)>() const LILY_ANY { return vec<T, sizeof...(I)>(of[I]...); }
  template <class V> auto& operator=(V other) LILY_ANY {
    const vec<T, sizeof...(I)> from = vec<T, sizeof...(I)>(other);
    int k = 0;
    ((of[I] = from[k++]), ...);
    return *this;
  }
#ifndef LILY_SPACES
  Swizzle& operator=(const Swizzle& other) { return *this = vec<T, sizeof...(I)>(other); }
#endif
  template <class V> auto& operator+=(V b) LILY_ANY { return *this = vec<T, sizeof...(I)>(*this) + b; }
  template <class V> auto& operator-=(V b) LILY_ANY { return *this = vec<T, sizeof...(I)>(*this) - b; }
  template <class V> auto& operator*=(V b) LILY_ANY { return *this = vec<T, sizeof...(I)>(*this) * b; }
  template <class V> auto& operator/=(V b) LILY_ANY { return *this = vec<T, sizeof...(I)>(*this) / b; }
  T operator[](int i) const LILY_ANY {
    constexpr int order[] = {I...};
    return of[order[i]];
  }
};

#ifdef LILY_SPACES
#define LILY_QUALIFIED_INDEX                                     \
  volatile T& operator[](int i) volatile { return of[i]; }       \
  const volatile T& operator[](int i) const volatile { return of[i]; }
#else
#define LILY_QUALIFIED_INDEX
#endif
#define LILY_INDEX                                 \
  T& operator[](int i) { return of[i]; }           \
  const T& operator[](int i) const { return of[i]; } \
  LILY_QUALIFIED_INDEX

// A vector without the alignment.
template <class T, int N> struct Packed {
  T of[N];
  Packed() = default;
  LILY_COPIES(Packed)
  template <class... A, std::enable_if_t<sizeof...(A) == N && (is_scalar<A> && ...), int> = 0> Packed(A... a) : of{T(a)...} {}
  Packed(vec<T, N> v) {
    for (int i = 0; i < N; ++i) of[i] = v[i];
  }
  operator vec<T, N>() const LILY_ANY {
    vec<T, N> v;
    for (int i = 0; i < N; ++i) v[i] = of[i];
    return v;
  }
  LILY_INDEX
};

// What an operand is made of. Scalars count as one component.
template <class V> struct Shape {
  using Element = V;
  static constexpr int count = 1;
  static constexpr bool is_vector = false;
};
template <class T, int N> struct Shape<vec<T, N>> {
  using Element = T;
  static constexpr int count = N;
  static constexpr bool is_vector = true;
};
template <class T, int N, int... I> struct Shape<Swizzle<T, N, I...>> : Shape<vec<T, sizeof...(I)>> {};
template <class T, int N> struct Shape<Packed<T, N>> : Shape<vec<T, N>> {};

template <class V> using element = typename Shape<V>::Element;
template <class V> constexpr bool is_vector = Shape<V>::is_vector;
template <class V> constexpr bool is_value = is_vector<V> || is_scalar<V>;

template <class V> inline auto at(const V& v, int i) {
  if constexpr (is_vector<V>) return v[i];
  else return (void)i, v;
}

// A vector's bytes, which are copied in one piece.
template <int Bytes> struct Raw {
  typedef unsigned char type __attribute__((vector_size(Bytes), may_alias));
};

#ifdef LILY_SPACES
#define LILY_VECTOR_COPIES LILY_COPIES(vec)
#else
#define LILY_VECTOR_COPIES                                         \
  vec(const vec& other) { raw() = const_cast<vec&>(other).raw(); } \
  vec& operator=(const vec& other) {                               \
    raw() = const_cast<vec&>(other).raw();                         \
    return *this;                                                  \
  }
#endif

#define LILY_CONSTRUCTORS(N)                                                                                                 \
  vec() = default;                                                                                                           \
  LILY_VECTOR_COPIES                                                                                                  \
  /* One number for all components. */                                                                                       \
  template <class A, std::enable_if_t<is_scalar<A>, int> = 0> vec(A a) {                                                     \
    for (int i = 0; i < N; ++i) of[i] = T(a);                                                                                \
  }                                                                                                                          \
  /* Numbers and shorter vectors, which together have as many components. */                                                 \
  template <class... A, std::enable_if_t<(sizeof...(A) > 1) && (Shape<A>::count + ... + 0) == N, int> = 0> vec(A... a) { \
    int i = 0;                                                                                                               \
    (put(i, a), ...);                                                                                                        \
  }                                                                                                                          \
  /* Another element type, where it is asked for. */                                                                         \
  template <class U, std::enable_if_t<!std::is_same_v<U, T>, int> = 0> explicit vec(vec<U, N> v) {                         \
    for (int i = 0; i < N; ++i) of[i] = T(v.of[i]);                                                                          \
  }                                                                                                                          \
  template <class U, int M, int... I, std::enable_if_t<!std::is_same_v<U, T> && sizeof...(I) == N, int> = 0>                 \
  explicit vec(Swizzle<U, M, I...> v)        : vec(vec<U, N>(v)) {}                                                          \
  template <class U, std::enable_if_t<!std::is_same_v<U, T>, int> = 0> explicit vec(Packed<U, N> v)        : vec(vec<U, N>(v)) {} \
  LILY_INDEX                                                                                                          \
  template <class V> auto& operator+=(V b) LILY_ANY { return *this = *this + b; }                                               \
  template <class V> auto& operator-=(V b) LILY_ANY { return *this = *this - b; }                                               \
  template <class V> auto& operator*=(V b) LILY_ANY { return *this = *this * b; }                                               \
  template <class V> auto& operator/=(V b) LILY_ANY { return *this = *this / b; }                                               \
  template <class V> auto& operator%=(V b) LILY_ANY { return *this = *this % b; }                                               \
  template <class V> auto& operator&=(V b) LILY_ANY { return *this = *this & b; }                                               \
  template <class V> auto& operator|=(V b) LILY_ANY { return *this = *this | b; }                                               \
  template <class V> auto& operator^=(V b) LILY_ANY { return *this = *this ^ b; }                                               \
  template <class V> auto& operator<<=(V b) LILY_ANY { return *this = *this << b; }                                             \
  template <class V> auto& operator>>=(V b) LILY_ANY { return *this = *this >> b; }                                             \
                                                                                                                             \
 private:                                                                                                                    \
  auto& raw() { return *reinterpret_cast<typename Raw<sizeof(T) * (N == 2 ? 2 : 4)>::type*>(&of); }                          \
  template <class A> void put(int& to, const A& a) {                                                                         \
    for (int k = 0; k < Shape<A>::count; ++k) of[to++] = T(at(a, k));                                                        \
  }

// Components side by side. An anonymous structure must not have members that are copied in ways of their own.
#ifdef LILY_SPACES
#define LILY_TOGETHER(names) names
#else
#define LILY_TOGETHER(names) struct { names };
#endif
template <class T> struct alignas(2 * sizeof(T)) vec<T, 2> {
  union {
    T of[2];
    LILY_TOGETHER(T x; T y;)
    LILY_TOGETHER(T r; T g;)
    LILY_SWIZZLES_2
  };
  LILY_CONSTRUCTORS(2)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 3> {
  union {
    T of[3];
    LILY_TOGETHER(T x; T y; T z;)
    LILY_TOGETHER(T r; T g; T b;)
    LILY_SWIZZLES_3
  };
  LILY_CONSTRUCTORS(3)
};
template <class T> struct alignas(4 * sizeof(T)) vec<T, 4> {
  union {
    T of[4];
    LILY_TOGETHER(T x; T y; T z; T w;)
    LILY_TOGETHER(T r; T g; T b; T a;)
    LILY_SWIZZLES_4
  };
  LILY_CONSTRUCTORS(4)
};
#undef LILY_CONSTRUCTORS

// ---- component by component ---------------------------------------------------------------------------------------------

template <class A, class B> constexpr int count_of = Shape<A>::count > Shape<B>::count ? Shape<A>::count : Shape<B>::count;
// Two vectors of one type, or a vector and a number.
template <class A, class B>
constexpr bool goes_together = (is_vector<A> && is_vector<B> && Shape<A>::count == Shape<B>::count && std::is_same_v<element<A>, element<B>>) ||
                               (is_vector<A> && is_scalar<B>) || (is_scalar<A> && is_vector<B>);
template <class A, class B> using element_of = std::conditional_t<is_vector<A>, element<A>, element<B>>;

template <class R, int N, class F> inline vec<R, N> make(F f) {
  if constexpr (N == 2) return vec<R, 2>(f(0), f(1));
  else if constexpr (N == 3) return vec<R, 3>(f(0), f(1), f(2));
  else return vec<R, 4>(f(0), f(1), f(2), f(3));
}

#define LILY_BINARY(op)                                                                                               \
  template <class A, class B, std::enable_if_t<goes_together<A, B>, int> = 0> inline auto operator op(A a, B b) { \
    using T = element_of<A, B>;                                                                                       \
    return make<T, count_of<A, B>>([&](int i) { return T(T(at(a, i)) op T(at(b, i))); });                             \
  }
LILY_BINARY(+)
LILY_BINARY(-)
LILY_BINARY(*)
LILY_BINARY(/)
LILY_BINARY(%)
LILY_BINARY(&)
LILY_BINARY(|)
LILY_BINARY(^)
LILY_BINARY(<<)
LILY_BINARY(>>)
#undef LILY_BINARY
#define LILY_COMPARE(op)                                                                                              \
  template <class A, class B, std::enable_if_t<goes_together<A, B>, int> = 0> inline auto operator op(A a, B b) { \
    using T = element_of<A, B>;                                                                                       \
    return make<bool, count_of<A, B>>([&](int i) { return T(at(a, i)) op T(at(b, i)); });                             \
  }
LILY_COMPARE(==)
LILY_COMPARE(!=)
LILY_COMPARE(<)
LILY_COMPARE(<=)
LILY_COMPARE(>)
LILY_COMPARE(>=)
LILY_COMPARE(&&)
LILY_COMPARE(||)
#undef LILY_COMPARE
#define LILY_UNARY(op)                                                                               \
  template <class A, std::enable_if_t<is_vector<A>, int> = 0> inline auto operator op(A a) {  \
    using T = element<A>;                                                                            \
    return make<T, Shape<A>::count>([&](int i) { return T(op at(a, i)); });                          \
  }
LILY_UNARY(-)
LILY_UNARY(~)
LILY_UNARY(!)
#undef LILY_UNARY

// ---- names --------------------------------------------------------------------------------------------------------------

}  // namespace metal

#define LILY_NAMES(T)                   \
  using T##2 = metal::vec<T, 2>;        \
  using T##3 = metal::vec<T, 3>;        \
  using T##4 = metal::vec<T, 4>;        \
  using packed_##T##2 = metal::Packed<T, 2>; \
  using packed_##T##3 = metal::Packed<T, 3>; \
  using packed_##T##4 = metal::Packed<T, 4>; \
  namespace metal {                     \
  using ::T##2;                         \
  using ::T##3;                         \
  using ::T##4;                         \
  using ::packed_##T##2;                \
  using ::packed_##T##3;                \
  using ::packed_##T##4;                \
  }
LILY_NAMES(bool)
LILY_NAMES(char)
LILY_NAMES(uchar)
LILY_NAMES(short)
LILY_NAMES(ushort)
LILY_NAMES(int)
LILY_NAMES(uint)
LILY_NAMES(long)
LILY_NAMES(ulong)
LILY_NAMES(half)
LILY_NAMES(bfloat)
LILY_NAMES(float)
#undef LILY_NAMES

static_assert(sizeof(float3) == 16 && alignof(float3) == 16 && sizeof(half4) == 8 && sizeof(packed_float3) == 12 && alignof(uchar4) == 4);
