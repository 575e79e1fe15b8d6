// Entry points: what the runtime calls for each thread, and how a kernel's arguments are made of what it is given.
#pragma once

#include "../../runtime/runtime.h"
#include "threads.h"

namespace lily {

// What a parameter's attribute asks for.
enum class Built {
  buffer,
  threadgroup,
  thread_position_in_grid,
  threads_per_grid,
  threadgroup_position_in_grid,
  threadgroups_per_grid,
  thread_position_in_threadgroup,
  threads_per_threadgroup,
  thread_index_in_threadgroup,
  thread_index_in_simdgroup,
  simdgroup_index_in_threadgroup,
  simdgroups_per_threadgroup,
  threads_per_simdgroup,
  thread_execution_width,
};
template <Built Kind, unsigned Index = 0> struct Attribute {
  static constexpr Built kind = Kind;
  static constexpr unsigned index = Index;
};

template <class P> struct Components {
  static constexpr int count = 1;
  using Number = P;
};
template <class T, int N> struct Components<metal::vec<T, N>> {
  static constexpr int count = N;
  using Number = T;
};

// `P` from up to three numbers.
template <class P> LILY_UNTRACKED P numbers(uint32_t x, uint32_t y, uint32_t z) {
  using T = typename Components<P>::Number;
  if constexpr (Components<P>::count == 3) return P(T(x), T(y), T(z));
  else if constexpr (Components<P>::count == 2) return P(T(x), T(y));
  else return P(T(x));
}
template <class P> LILY_UNTRACKED P numbers(const uint32_t (&v)[3]) { return numbers<P>(v[0], v[1], v[2]); }

template <class P, class A> LILY_UNTRACKED P argument(const LilyThread& t) {
  if constexpr (A::kind == Built::buffer || A::kind == Built::threadgroup) {
    void* at = A::kind == Built::buffer ? t.of->buffers[A::index] : t.of->threadgroup[A::index];
    if constexpr (std::is_reference_v<P>) return *static_cast<std::remove_reference_t<P>*>(at);
    else return static_cast<P>(at);
  } else {
    const LilyGroup& g = *t.of;
    const uint32_t count = g.threads[0] * g.threads[1] * g.threads[2];
    const uint32_t in[3] = {t.index % g.threads[0], t.index / g.threads[0] % g.threads[1], t.index / g.threads[0] / g.threads[1]};
    if constexpr (A::kind == Built::thread_position_in_grid)
      return numbers<P>(g.group[0] * g.threads[0] + in[0], g.group[1] * g.threads[1] + in[1], g.group[2] * g.threads[2] + in[2]);
    else if constexpr (A::kind == Built::threads_per_grid)
      return numbers<P>(g.groups[0] * g.threads[0], g.groups[1] * g.threads[1], g.groups[2] * g.threads[2]);
    else if constexpr (A::kind == Built::threadgroup_position_in_grid) return numbers<P>(g.group);
    else if constexpr (A::kind == Built::threadgroups_per_grid) return numbers<P>(g.groups);
    else if constexpr (A::kind == Built::thread_position_in_threadgroup) return numbers<P>(in);
    else if constexpr (A::kind == Built::threads_per_threadgroup) return numbers<P>(g.threads);
    else if constexpr (A::kind == Built::thread_index_in_threadgroup) return P(t.index);
    else if constexpr (A::kind == Built::thread_index_in_simdgroup) return P(t.index % LILY_SIMD_WIDTH);
    else if constexpr (A::kind == Built::simdgroup_index_in_threadgroup) return P(t.index / LILY_SIMD_WIDTH);
    else if constexpr (A::kind == Built::simdgroups_per_threadgroup) return P((count + LILY_SIMD_WIDTH - 1) / LILY_SIMD_WIDTH);
    else return P(LILY_SIMD_WIDTH);
  }
}

template <auto Kernel, class... A> struct Call;
template <class... P, void (*Kernel)(P...), class... A> struct Call<Kernel, A...> {
  static_assert(sizeof...(P) == sizeof...(A), "every parameter of a kernel has an attribute");
  LILY_UNTRACKED static void run(const LilyThread* t) { Kernel(argument<P, A>(*t)...); }
};

// Tells the runtime of a threadgroup variable when the library is loaded, so that its size is known before anything runs.
template <class T, unsigned Site> struct Declared {
  static const int once;
};
template <class T, unsigned Site> const int Declared<T, Site>::once = lily_declare_variable(Site, sizeof(T));

// A threadgroup variable, which is the same for all threads of a threadgroup.
template <class T, unsigned Site> inline T& threadgroup_variable() {
  (void)&Declared<T, Site>::once;
#ifndef LILY_TRACKED
  if constexpr (Site < LILY_FAST_SITES) {
    void*& at = lily_sites[Site];
    if (!at) at = lily_threadgroup_variable(Site, sizeof(T), alignof(T));
    return *static_cast<T*>(at);
  }
#endif
  return *static_cast<T*>(lily_threadgroup_variable(Site, sizeof(T), alignof(T)));
}

}  // namespace lily

// A kernel is a function of its own, which its entry point calls.
#define LILY_KERNEL __attribute__((noinline))
