// Atomic operations, all of them relaxed, as Metal has them. The compiler's own are used: in a tracked build they are calls
// of the runtime.
#pragma once

#include "scalar.h"

namespace metal {

enum memory_order : int { memory_order_relaxed = 0 };

template <class T> struct atomic {
  static_assert(sizeof(T) == 4 || sizeof(T) == 8, "Metal's atomics have 32 bits, and 64 in a few functions");
  using Bits = std::conditional_t<sizeof(T) == 4, uint, ulong>;
  Bits bits;
};
template <class T> inline T of_bits(typename atomic<T>::Bits bits) { return as_bits<T>(bits); }
template <class T> inline typename atomic<T>::Bits bits_from(T x) { return as_bits<typename atomic<T>::Bits>(x); }

template <class T> struct same_type { using type = T; };
template <class T> using exactly = typename same_type<T>::type;  // not deduced from this argument

template <class T> inline T atomic_load_explicit(const volatile atomic<T>* p, memory_order) {
  return of_bits<T>(__atomic_load_n(&p->bits, __ATOMIC_RELAXED));
}
template <class T> inline void atomic_store_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  __atomic_store_n(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED);
}
template <class T> inline T atomic_exchange_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  return of_bits<T>(__atomic_exchange_n(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED));
}
template <class T> inline bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, LILY_ANY T* expected, exactly<T> x, memory_order, memory_order) {
  auto bits = bits_from<T>(T(*expected));
  const bool done = __atomic_compare_exchange_n(&p->bits, &bits, bits_from<T>(x), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  *expected = of_bits<T>(bits);
  return done;
}
template <class T, class F> inline T updated(volatile atomic<T>* p, F f) {
  auto bits = __atomic_load_n(&p->bits, __ATOMIC_RELAXED);
  while (!__atomic_compare_exchange_n(&p->bits, &bits, bits_from<T>(f(of_bits<T>(bits))), false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
  return of_bits<T>(bits);
}
template <class T> inline T atomic_fetch_add_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  if constexpr (std::is_integral_v<T>) return of_bits<T>(__atomic_fetch_add(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED));
  else return updated(p, [&](T old) { return old + x; });
}
template <class T> inline T atomic_fetch_sub_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  if constexpr (std::is_integral_v<T>) return of_bits<T>(__atomic_fetch_sub(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED));
  else return updated(p, [&](T old) { return old - x; });
}
template <class T> inline T atomic_fetch_and_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  return of_bits<T>(__atomic_fetch_and(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED));
}
template <class T> inline T atomic_fetch_or_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  return of_bits<T>(__atomic_fetch_or(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED));
}
template <class T> inline T atomic_fetch_xor_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  return of_bits<T>(__atomic_fetch_xor(&p->bits, bits_from<T>(x), __ATOMIC_RELAXED));
}
template <class T> inline T atomic_fetch_min_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  return updated(p, [&](T old) { return x < old ? x : old; });
}
template <class T> inline T atomic_fetch_max_explicit(volatile atomic<T>* p, exactly<T> x, memory_order) {
  return updated(p, [&](T old) { return old < x ? x : old; });
}

using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_ulong = atomic<ulong>;
using atomic_float = atomic<float>;

}  // namespace metal
