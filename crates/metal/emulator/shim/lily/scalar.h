// Numbers: Metal's names for integers, and half and bfloat, which round to nearest even after every operation.
#pragma once
// Metal's suffixes of numbers are reserved in C++, which says so.
#pragma GCC system_header

typedef unsigned char uchar;
typedef unsigned short ushort;
typedef unsigned int uint;
typedef unsigned long ulong;
static_assert(sizeof(ulong) == 8, "Metal's long has 64 bits");

// In the compile that checks address spaces (src/emulator/spaces.rs) one of them stands as `volatile`, so every
// function of the shim must take what is qualified so. Nothing runs then, and members may be declared only.
#ifdef LILY_SPACES
#define LILY_ANY volatile
#define LILY_COPIES(T)                                \
  T(const T&);                                        \
  T(const volatile T&);                               \
  T(const volatile T&&);                              \
  T& operator=(const T&);                             \
  T& operator=(const volatile T&);                    \
  T& operator=(const volatile T&&);                   \
  volatile T& operator=(const T&) volatile;           \
  volatile T& operator=(const volatile T&) volatile;  \
  volatile T& operator=(const volatile T&&) volatile;
#else
#define LILY_ANY
#define LILY_COPIES(T)
#endif

namespace metal {

using ::uchar;
using ::uint;
using ::ulong;
using ::ushort;

template <class To, class From> inline To as_bits(From from) {
  static_assert(sizeof(To) == sizeof(From), "as_type keeps the size");
  To to;
  __builtin_memcpy(static_cast<void*>(&to), static_cast<const void*>(&from), sizeof to);
  return to;
}

struct HalfFormat {
  static uint16_t encode(float x) {
#if defined(__F16C__)
    typedef float Floats __attribute__((vector_size(16)));
    return static_cast<uint16_t>(__builtin_ia32_vcvtps2ph(Floats{x, 0, 0, 0}, 0)[0]);
#elif defined(__aarch64__)
    return as_bits<uint16_t>(static_cast<__fp16>(x));
#else
    const uint32_t bits = as_bits<uint32_t>(x), sign = bits >> 16 & 0x8000u;
    const uint32_t size = bits & 0x7fffffffu;
    if (size > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u | (size >> 13 & 0x3ffu));
    if (size >= 0x477ff000u) return static_cast<uint16_t>(sign | 0x7c00u);  // what rounds past 65504
    if (size < 0x38800000u) {
      // Below the normal numbers: adding 0.5 leaves the rounded count of 2^-24 in the lowest bits.
      const float shifted = as_bits<float>(size) + 0.5f;
      return static_cast<uint16_t>(sign | (as_bits<uint32_t>(shifted) - 0x3f000000u));
    }
    const uint32_t rounded = size - 0x38000000u + 0xfffu + (size >> 13 & 1u);
    return static_cast<uint16_t>(sign | rounded >> 13);
#endif
  }
  static float decode(uint16_t h) {
#if defined(__F16C__)
    typedef short Shorts __attribute__((vector_size(16)));
    return __builtin_ia32_vcvtph2ps(Shorts{static_cast<short>(h), 0, 0, 0, 0, 0, 0, 0})[0];
#elif defined(__aarch64__)
    return static_cast<float>(as_bits<__fp16>(h));
#else
    const uint32_t sign = (h & 0x8000u) << 16, size = h & 0x7fffu;
    if (size >= 0x7c00u) return as_bits<float>(sign | 0x7f800000u | (size & 0x3ffu) << 13);
    if (size < 0x400u) return as_bits<float>(sign | as_bits<uint32_t>(static_cast<float>(size) * 0x1p-24f));
    return as_bits<float>(sign | ((size << 13) + 0x38000000u));
#endif
  }
};

struct BfloatFormat {
  static uint16_t encode(float x) {
    const uint32_t bits = as_bits<uint32_t>(x);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40u);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
  }
  static float decode(uint16_t b) { return as_bits<float>(static_cast<uint32_t>(b) << 16); }
};

template <class T> constexpr bool is_number = std::is_arithmetic_v<T>;

// A 16-bit float. Whatever is computed is computed in f32 and rounded once, which for + - * / and sqrt is what one rounding
// of the exact result gives.
template <class Format> struct Small {
  uint16_t bits;

  Small() = default;
  LILY_COPIES(Small)
  // Metal turns numbers into half by itself, and into bfloat only where it is told to.
  template <class A, std::enable_if_t<is_number<A> && std::is_same_v<Format, HalfFormat>, int> = 0>
  Small(A x) : bits(Format::encode(static_cast<float>(x))) {}
  template <class A, std::enable_if_t<is_number<A> && !std::is_same_v<Format, HalfFormat>, char> = 0>
  explicit Small(A x) : bits(Format::encode(static_cast<float>(x))) {}
  template <class Other, std::enable_if_t<!std::is_same_v<Other, Format>, int> = 0>
  explicit Small(Small<Other> x) : bits(Format::encode(static_cast<float>(x))) {}

  operator float() const LILY_ANY { return Format::decode(bits); }

  template <class A> auto& operator+=(A b) LILY_ANY { return *this = Small(float(*this) + float(b)); }
  template <class A> auto& operator-=(A b) LILY_ANY { return *this = Small(float(*this) - float(b)); }
  template <class A> auto& operator*=(A b) LILY_ANY { return *this = Small(float(*this) * float(b)); }
  template <class A> auto& operator/=(A b) LILY_ANY { return *this = Small(float(*this) / float(b)); }
  Small operator-() const LILY_ANY {
    Small negative;
    negative.bits = bits ^ 0x8000u;
    return negative;
  }
  Small operator+() const LILY_ANY { return *this; }
};

// With an integer the result is as small, with a float it is a float.
template <class F, class A> using with_number = std::conditional_t<std::is_floating_point_v<A>, float, Small<F>>;
#define LILY_ARITHMETIC(op)                                                                                        \
  template <class F> Small<F> operator op(Small<F> a, Small<F> b) { return Small<F>(float(a) op float(b)); }       \
  template <class F, class A, std::enable_if_t<is_number<A>, int> = 0> with_number<F, A> operator op(Small<F> a, A b) { \
    return with_number<F, A>(float(a) op float(b));                                                                \
  }                                                                                                                \
  template <class F, class A, std::enable_if_t<is_number<A>, int> = 0> with_number<F, A> operator op(A a, Small<F> b) { \
    return with_number<F, A>(float(a) op float(b));                                                                \
  }
LILY_ARITHMETIC(+)
LILY_ARITHMETIC(-)
LILY_ARITHMETIC(*)
LILY_ARITHMETIC(/)
#undef LILY_ARITHMETIC
#define LILY_COMPARISON(op)                                                                                            \
  template <class F> bool operator op(Small<F> a, Small<F> b) { return float(a) op float(b); }                         \
  template <class F, class A, std::enable_if_t<is_number<A>, int> = 0> bool operator op(Small<F> a, A b) { return float(a) op float(b); } \
  template <class F, class A, std::enable_if_t<is_number<A>, int> = 0> bool operator op(A a, Small<F> b) { return float(a) op float(b); }
LILY_COMPARISON(==)
LILY_COMPARISON(!=)
LILY_COMPARISON(<)
LILY_COMPARISON(<=)
LILY_COMPARISON(>)
LILY_COMPARISON(>=)
#undef LILY_COMPARISON

using half = Small<HalfFormat>;
using bfloat = Small<BfloatFormat>;

template <class T> constexpr bool is_small = std::is_same_v<T, half> || std::is_same_v<T, bfloat>;
template <class T> constexpr bool is_real = std::is_same_v<T, float> || is_small<T>;
template <class T> constexpr bool is_scalar = is_number<T> || is_small<T>;

template <class T> struct numeric_limits;
template <> struct numeric_limits<float> {
  static constexpr float infinity() { return __builtin_inff(); }
  static constexpr float quiet_NaN() { return __builtin_nanf(""); }
  static constexpr float max() { return __FLT_MAX__; }
  static constexpr float lowest() { return -__FLT_MAX__; }
  static constexpr float min() { return __FLT_MIN__; }
  static constexpr float epsilon() { return __FLT_EPSILON__; }
};
template <> struct numeric_limits<half> {
  static half infinity() { return half(__builtin_inff()); }
  static half max() { return half(65504.0f); }
  static half lowest() { return half(-65504.0f); }
};
#define LILY_LIMITS(T, low, high)                         \
  template <> struct numeric_limits<T> {                  \
    static constexpr T max() { return high; }             \
    static constexpr T min() { return low; }              \
    static constexpr T lowest() { return low; }           \
  };
LILY_LIMITS(char, -128, 127)
LILY_LIMITS(signed char, -128, 127)
LILY_LIMITS(uchar, 0, 255)
LILY_LIMITS(short, -32768, 32767)
LILY_LIMITS(ushort, 0, 65535)
LILY_LIMITS(int, -2147483647 - 1, 2147483647)
LILY_LIMITS(uint, 0, 4294967295u)
LILY_LIMITS(long, -9223372036854775807l - 1, 9223372036854775807l)
LILY_LIMITS(ulong, 0, 18446744073709551615ul)
#undef LILY_LIMITS

}  // namespace metal

using metal::bfloat;
using metal::half;

inline half operator""h(long double x) { return half(static_cast<float>(x)); }
inline half operator""H(long double x) { return half(static_cast<float>(x)); }
inline bfloat operator""bf(long double x) { return bfloat(static_cast<float>(x)); }
inline bfloat operator""BF(long double x) { return bfloat(static_cast<float>(x)); }

#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")
#define MAXFLOAT __FLT_MAX__
#define FLT_MAX __FLT_MAX__
#define FLT_MIN __FLT_MIN__
#define FLT_EPSILON __FLT_EPSILON__
#define HALF_MAX half(65504.0f)
#define INT_MAX 2147483647
#define INT_MIN (-INT_MAX - 1)
#define UINT_MAX 4294967295u
#define M_PI_F 3.14159265358979323846f
#define M_PI_2_F 1.57079632679489661923f
#define M_1_PI_F 0.318309886183790671538f
#define M_E_F 2.71828182845904523536f
#define M_LOG2E_F 1.44269504088896340736f
#define M_LN2_F 0.693147180559945309417f
#define M_SQRT2_F 1.41421356237309504880f

template <class To, class From> inline To as_type(From from) { return metal::as_bits<To>(from); }
namespace metal {
using ::as_type;
}
