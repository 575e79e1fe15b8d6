// Functions of numbers and of vectors of them. A half's function is the float's, rounded. `fast` and `precise` are the same
// here; how far Apple's `fast` functions are off is not imitated.
#pragma once

#include "vector.h"

namespace metal {

template <class A, class F> inline auto map(const A& a, F f) {
  if constexpr (is_vector<A>) return make<decltype(f(at(a, 0))), Shape<A>::count>([&](int i) { return f(at(a, i)); });
  else return f(a);
}
template <class A> constexpr bool is_real_value = is_value<A> && is_real<element<A>>;
template <class A> constexpr bool is_integer_value = is_value<A> && std::is_integral_v<element<A>>;
// All of one type, but that numbers may stand for vectors of them.
template <class A, class... B> constexpr bool is_same_or_number = ((std::is_same_v<A, B> || std::is_same_v<element<A>, B> ||
                                                                  (Shape<A>::count == Shape<B>::count && std::is_same_v<element<A>, element<B>>)) && ...);

#define LILY_REAL(name, call)                                                                                \
  template <class A, std::enable_if_t<is_real_value<A>, int> = 0> inline auto name(A a) {             \
    return map(a, [](auto e) { return decltype(e)(call(float(e))); });                                       \
  }
#define LILY_REALS(call)                           \
  call(exp, __builtin_expf) call(exp2, __builtin_exp2f) call(exp10, __builtin_exp10f) \
  call(log, __builtin_logf) call(log2, __builtin_log2f) call(log10, __builtin_log10f) \
  call(sin, __builtin_sinf) call(cos, __builtin_cosf) call(tan, __builtin_tanf) call(tanh, __builtin_tanhf) \
  call(sinh, __builtin_sinhf) call(cosh, __builtin_coshf) call(asin, __builtin_asinf) call(acos, __builtin_acosf) \
  call(atan, __builtin_atanf) call(sqrt, __builtin_sqrtf) call(rsqrt, reciprocal_root)

inline float reciprocal_root(float x) { return 1.0f / __builtin_sqrtf(x); }
inline float fraction(float x) {
  const float f = x - __builtin_floorf(x);
  return f < 1.0f ? f : 0x1.fffffep-1f;
}
inline float clamped(float x) { return x < 0.0f || x != x ? 0.0f : x > 1.0f ? 1.0f : x; }
inline float signed_one(float x) { return x > 0.0f ? 1.0f : x < 0.0f ? -1.0f : x == 0.0f ? x : 0.0f; }

LILY_REALS(LILY_REAL)
LILY_REAL(floor, __builtin_floorf)
LILY_REAL(ceil, __builtin_ceilf)
LILY_REAL(trunc, __builtin_truncf)
LILY_REAL(round, __builtin_roundf)
LILY_REAL(rint, __builtin_rintf)
LILY_REAL(fabs, __builtin_fabsf)
LILY_REAL(fract, fraction)
LILY_REAL(saturate, clamped)
LILY_REAL(sign, signed_one)

template <class A, std::enable_if_t<is_value<A>, int> = 0> inline auto abs(A a) {
  return map(a, [](auto e) {
    using T = decltype(e);
    if constexpr (is_real<T>) return T(__builtin_fabsf(float(e)));
    else if constexpr (std::is_unsigned_v<T>) return e;
    else return std::make_unsigned_t<T>(e < 0 ? -e : e);
  });
}
#define LILY_TEST(name, call)                                                                        \
  template <class A, std::enable_if_t<is_real_value<A>, int> = 0> inline auto name(A a) {     \
    return map(a, [](auto e) { return bool(call(float(e))); });                                      \
  }
LILY_TEST(isnan, __builtin_isnan)
LILY_TEST(isinf, __builtin_isinf)
LILY_TEST(isfinite, __builtin_isfinite)
#undef LILY_TEST

// Two and three arguments of one type. A vector's partner may be a number of its element type.
template <class A, class B, class F> inline auto zip(const A& a, const B& b, F f) {
  if constexpr (is_vector<A> || is_vector<B>) return make<decltype(f(at(a, 0), at(b, 0))), count_of<A, B>>([&](int i) { return f(at(a, i), at(b, i)); });
  else return f(a, b);
}
#define LILY_TWO(name, condition, body)                                                                                              \
  template <class A, class B, std::enable_if_t<is_value<A> && is_same_or_number<A, B> && condition<A>, int> = 0>                    \
  inline auto name(A p, B q) {                                                                                        \
    return zip(p, q, [](auto a, auto b) {                                                                                           \
      using T = decltype(a);                                                                                                        \
      return T(body);                                                                                                               \
    });                                                                                                                             \
  }
// As IEEE 754 says: of a number and a NaN, the number.
LILY_TWO(min, is_integer_value, b < a ? b : a)
LILY_TWO(max, is_integer_value, a < b ? b : a)
LILY_TWO(min, is_real_value, __builtin_fminf(float(a), float(b)))
LILY_TWO(max, is_real_value, __builtin_fmaxf(float(a), float(b)))
LILY_TWO(fmin, is_real_value, __builtin_fminf(float(a), float(b)))
LILY_TWO(fmax, is_real_value, __builtin_fmaxf(float(a), float(b)))
LILY_TWO(pow, is_real_value, __builtin_powf(float(a), float(b)))
LILY_TWO(powr, is_real_value, __builtin_powf(float(a), float(b)))
LILY_TWO(fmod, is_real_value, __builtin_fmodf(float(a), float(b)))
LILY_TWO(atan2, is_real_value, __builtin_atan2f(float(a), float(b)))
LILY_TWO(copysign, is_real_value, __builtin_copysignf(float(a), float(b)))
LILY_TWO(step, is_real_value, float(b) < float(a) ? 0.0f : 1.0f)
LILY_TWO(absdiff, is_integer_value, a < b ? b - a : a - b)
LILY_TWO(rotate, is_integer_value, rotated(a, b))
LILY_TWO(mulhi, is_integer_value, high_product(a, b))

template <class T> inline T rotated(T a, T b) {
  using U = std::make_unsigned_t<T>;
  const unsigned bits = sizeof(T) * 8, by = static_cast<U>(b) % bits;
  return by ? T(U(a) << by | U(a) >> (bits - by)) : a;
}
template <class T> inline T high_product(T a, T b) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return T(Wide(a) * Wide(b) >> sizeof(T) * 8);
}

template <class A, class B, class C, std::enable_if_t<is_value<A> && is_same_or_number<A, B, C>, int> = 0>
inline auto clamp(A x, B low, C high) {
  return min(max(x, low), high);
}
template <class A, std::enable_if_t<is_real_value<A>, int> = 0> inline A fma(A a, A b, A c) {
  if constexpr (is_vector<A>) return make<element<A>, Shape<A>::count>([&](int i) { return element<A>(__builtin_fmaf(float(a[i]), float(b[i]), float(c[i]))); });
  else return A(__builtin_fmaf(float(a), float(b), float(c)));
}
template <class A, class B, std::enable_if_t<is_real_value<A>, int> = 0> inline A mix(A a, A b, B t) { return a + (b - a) * t; }
// b where c, else a.
template <class A, std::enable_if_t<is_scalar<A>, int> = 0> inline A select(A a, A b, bool c) { return c ? b : a; }
template <class T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, vec<bool, N> c) {
  return make<T, N>([&](int i) { return c[i] ? b[i] : a[i]; });
}
template <class T, int N> inline vec<T, N> select(vec<T, N> a, vec<T, N> b, bool c) { return c ? b : a; }
template <int N> inline bool any(vec<bool, N> a) {
  bool is = false;
  for (int i = 0; i < N; ++i) is = is || a[i];
  return is;
}
template <int N> inline bool all(vec<bool, N> a) {
  bool are = true;
  for (int i = 0; i < N; ++i) are = are && a[i];
  return are;
}
inline float ldexp(float x, int e) { return __builtin_ldexpf(x, e); }
inline float frexp(float x, LILY_ANY int& e) {
  int exponent;
  const float part = __builtin_frexpf(x, &exponent);
  e = exponent;
  return part;
}
inline float modf(float x, LILY_ANY float& whole) {
  whole = __builtin_truncf(x);
  return x - whole;
}
inline float sincos(float x, LILY_ANY float& cosine) {
  cosine = __builtin_cosf(x);
  return __builtin_sinf(x);
}

// ---- geometry -----------------------------------------------------------------------------------------------------------

template <class A, class B, std::enable_if_t<is_vector<A> && is_vector<B> && is_real_value<A> && is_same_or_number<A, B>, int> = 0>
inline auto dot(A a, B b) {
  element<A> sum = at(a, 0) * at(b, 0);
  for (int i = 1; i < Shape<A>::count; ++i) sum = sum + at(a, i) * at(b, i);
  return sum;
}
template <class A, std::enable_if_t<is_vector<A>, int> = 0> inline auto length_squared(A a) { return dot(a, a); }
template <class A, std::enable_if_t<is_vector<A>, int> = 0> inline auto length(A a) { return sqrt(dot(a, a)); }
template <class A, std::enable_if_t<is_vector<A>, int> = 0> inline auto normalize(A a) { return a * rsqrt(dot(a, a)); }

// ---- bits ---------------------------------------------------------------------------------------------------------------

template <class A, class F> inline A bits_of(const A& a, F f) {
  return map(a, [&](auto e) { return decltype(e)(f(std::make_unsigned_t<decltype(e)>(e))); });
}
template <class A, std::enable_if_t<is_integer_value<A>, int> = 0> inline A popcount(A a) {
  return bits_of(a, [](auto e) { return __builtin_popcountll(e); });
}
template <class A, std::enable_if_t<is_integer_value<A>, int> = 0> inline A clz(A a) {
  return bits_of(a, [](auto e) { return e ? __builtin_clzll(e) - 64 + int(sizeof e) * 8 : int(sizeof e) * 8; });
}
template <class A, std::enable_if_t<is_integer_value<A>, int> = 0> inline A ctz(A a) {
  return bits_of(a, [](auto e) { return e ? __builtin_ctzll(e) : int(sizeof e) * 8; });
}
template <class A, std::enable_if_t<is_integer_value<A>, int> = 0> inline A reverse_bits(A a) {
  return bits_of(a, [](auto e) {
    decltype(e) reversed = 0;
    for (unsigned i = 0; i < sizeof e * 8; ++i) reversed = decltype(e)(reversed << 1 | (e >> i & 1));
    return reversed;
  });
}
template <class A, std::enable_if_t<is_integer_value<A>, int> = 0> inline A extract_bits(A a, uint offset, uint bits) {
  return map(a, [&](auto e) {
    using T = decltype(e);
    const unsigned unused = sizeof e * 8 - bits;
    return bits ? T(T(std::make_unsigned_t<T>(e) << (unused - offset)) >> unused) : T(0);
  });
}
template <class A, std::enable_if_t<is_integer_value<A>, int> = 0> inline A insert_bits(A base, A insert, uint offset, uint bits) {
  return zip(base, insert, [&](auto a, auto b) {
    using U = std::make_unsigned_t<decltype(a)>;
    const U mask = bits ? U(U(~U(0)) >> (sizeof a * 8 - bits)) : U(0);
    return decltype(a)((U(a) & ~U(mask << offset)) | U((U(b) & mask) << offset));
  });
}
inline uint mad24(uint a, uint b, uint c) { return a * b + c; }
inline int mad24(int a, int b, int c) { return a * b + c; }

// ---- unpacking ----------------------------------------------------------------------------------------------------------

inline float4 unpack_unorm4x8_to_float(uint x) {
  return make<float, 4>([&](int i) { return static_cast<float>(x >> 8 * i & 255u) / 255.0f; });
}
inline float2 unpack_half2x16(uint x) {
  return float2(float(as_bits<half>(static_cast<ushort>(x))), float(as_bits<half>(static_cast<ushort>(x >> 16))));
}

#define LILY_ALSO(name, call) using metal::name;
namespace fast {
LILY_REALS(LILY_ALSO)
using metal::clamp; using metal::fabs; using metal::fma; using metal::fmax; using metal::fmin; using metal::fmod; using metal::length;
using metal::max; using metal::min; using metal::normalize; using metal::pow; using metal::powr; using metal::saturate; using metal::sincos;
}  // namespace fast
namespace precise {
LILY_REALS(LILY_ALSO)
using metal::clamp; using metal::fabs; using metal::fma; using metal::fmax; using metal::fmin; using metal::fmod; using metal::length;
using metal::max; using metal::min; using metal::normalize; using metal::pow; using metal::powr; using metal::saturate; using metal::sincos;
}  // namespace precise
#undef LILY_ALSO
#undef LILY_REALS
#undef LILY_REAL
#undef LILY_TWO

}  // namespace metal
