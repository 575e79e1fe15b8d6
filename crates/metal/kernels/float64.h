// f64 by integers, rounded to nearest even as IEEE 754 says: Metal has no f64, and a seeded choice is defined in it to the bit
// (crates/engine/src/sampler).
//
// What occurs is neither NaN nor infinite nor near the ends of f64's exponents: none of those has a form here. Zero has no sign.
#pragma once
#include <metal_stdlib>
using namespace metal;

// The number mantissa * 2^exponent: the mantissa has 53 bits, or is 0.
struct Double {
  ulong mantissa;
  int exponent;
  bool negative;
};

// A product of 128 bits.
struct Wide {
  ulong high, low;
};
inline Wide wide_product(ulong a, ulong b) {
  const ulong a0 = uint(a), a1 = a >> 32, b0 = uint(b), b1 = b >> 32;
  const ulong low = a0 * b0, left = a1 * b0 + (low >> 32), right = a0 * b1 + uint(left);
  Wide result;
  result.high = a1 * b1 + (left >> 32) + (right >> 32);
  result.low = right << 32 | uint(low);
  return result;
}

inline int leading_zeros(ulong x) {
  const uint high = uint(x >> 32);
  return int(high != 0 ? clz(high) : 32 + clz(uint(x)));
}

// The number nearest to wide * 2^exponent. The top bit of `wide` is set; its lowest stands for all that is below it, too.
inline Double rounded(bool negative, ulong wide, int exponent) {
  ulong mantissa = wide >> 11;
  const ulong rest = wide & 0x7ff;
  if (rest > 0x400 || (rest == 0x400 && (mantissa & 1) != 0)) mantissa += 1;
  const int carry = int(mantissa >> 53);
  Double result;
  result.mantissa = mantissa >> carry;
  result.exponent = exponent + 11 + carry;
  result.negative = negative;
  return result;
}

// The f64 of these bits; not a subnormal one.
inline Double of_bits(ulong bits) {
  const int exponent = int(bits >> 52 & 0x7ff);
  Double result;
  result.mantissa = exponent == 0 ? 0 : (bits & 0xfffffffffffff) | 0x10000000000000;
  result.exponent = exponent - 1075;
  result.negative = bits >> 63 != 0;
  return result;
}
// The f64 of a finite f32, subnormal or not, whatever the GPU makes of those.
inline Double of_float(float x) {
  const uint bits = as_type<uint>(x), exponent = bits >> 23 & 0xff;
  const ulong fraction = bits & 0x7fffff;
  Double result;
  result.mantissa = 0;
  result.exponent = 0;
  result.negative = bits >> 31 != 0;
  if (exponent != 0) {
    result.mantissa = (fraction | 0x800000) << 29;
    result.exponent = int(exponent) - 179;
  } else if (fraction != 0) {
    const int shift = leading_zeros(fraction) - 11;
    result.mantissa = fraction << shift;
    result.exponent = -149 - shift;
  }
  return result;
}
inline Double of_integer(ulong x) {
  if (x == 0) return of_bits(0);
  const int zeros = leading_zeros(x);
  return rounded(false, x << zeros, -zeros);
}

// The integer nearest to a size below 2^53, the even one of two.
inline ulong nearest(Double x) {
  if (x.exponent >= 0) return x.mantissa << x.exponent;
  if (x.exponent < -53) return 0;
  const ulong whole = x.mantissa >> -x.exponent, rest = x.mantissa - (whole << -x.exponent), half_of_it = 1ul << (-x.exponent - 1);
  return whole + (rest > half_of_it || (rest == half_of_it && (whole & 1) != 0) ? 1 : 0);
}
// A size below 2^64, rounded down.
inline ulong whole(Double x) {
  if (x.exponent >= 0) return x.mantissa << x.exponent;
  return x.exponent < -52 ? 0 : x.mantissa >> -x.exponent;
}

inline Double negated(Double x) {
  x.negative = !x.negative;
  return x;
}
inline bool is_smaller(Double a, Double b) {  // in size; neither is 0
  return a.exponent < b.exponent || (a.exponent == b.exponent && a.mantissa < b.mantissa);
}

inline Double multiply(Double a, Double b) {
  if (a.mantissa == 0 || b.mantissa == 0) return of_bits(0);
  Wide wide = wide_product(a.mantissa << 11, b.mantissa << 11);
  int exponent = a.exponent + b.exponent + 42;
  if (wide.high >> 63 == 0) {
    wide.high = wide.high << 1 | wide.low >> 63;
    wide.low <<= 1;
    exponent -= 1;
  }
  return rounded(a.negative != b.negative, wide.high | (wide.low != 0 ? 1 : 0), exponent);
}

inline Double add(Double a, Double b) {
  if (a.mantissa == 0) return b;
  if (b.mantissa == 0) return a;
  const bool swaps = is_smaller(a, b);
  const Double large = swaps ? b : a, small = swaps ? a : b;
  // Ten bits below both, of which the lowest says whether the smaller goes on; one above, for the carry.
  const ulong of_large = large.mantissa << 10, aligned = small.mantissa << 10;
  const int shift = large.exponent - small.exponent;
  ulong of_small = 1;
  if (shift < 63) {
    of_small = aligned >> shift;
    if (of_small << shift != aligned) of_small |= 1;
  }
  const ulong sum = large.negative == small.negative ? of_large + of_small : of_large - of_small;
  if (sum == 0) return of_bits(0);
  const int zeros = leading_zeros(sum);
  return rounded(large.negative, sum << zeros, large.exponent - 10 - zeros);
}
