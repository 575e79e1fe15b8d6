// What threads do together: barriers, and the collectives of a SIMD-group. The runtime makes threads meet; what is computed
// of their values is computed here.
//
// The functions that read other lanes' values are not tracked: those lie in the runtime, not in the kernel's memory.
#pragma once

#include "../../runtime/lockstep.h"
#include "math.h"

// In a build that is tracked, what is left out of it.
#ifdef LILY_TRACKED
#define LILY_UNTRACKED __attribute__((noinline, no_sanitize("thread")))
#define LILY_EXCHANGING LILY_UNTRACKED
#else
#define LILY_UNTRACKED
// Lanes that take turns where they stand save less than a call does.
#define LILY_EXCHANGING __attribute__((always_inline)) inline
#endif
// The line of the call that has it as a default argument.
#define LILY_LINE int line = __builtin_LINE()

namespace metal {

enum class mem_flags : unsigned { mem_none = 0, mem_device = LILY_MEM_DEVICE, mem_threadgroup = LILY_MEM_THREADGROUP };
constexpr mem_flags operator|(mem_flags a, mem_flags b) { return mem_flags(unsigned(a) | unsigned(b)); }

#ifdef LILY_TRACKED
inline void threadgroup_barrier(mem_flags flags, LILY_LINE) { lily_barrier(0, unsigned(flags), line); }
inline void simdgroup_barrier(mem_flags flags, LILY_LINE) { lily_barrier(1, unsigned(flags), line); }
template <class T> constexpr size_t slot_bytes = LILY_SLOT_BYTES;
template <class T> inline LilyExchange exchange(const T& x, LilyFinish finish, const char* name, int line) {
  static_assert(sizeof(T) <= LILY_SLOT_BYTES);
  return lily_exchange(&x, sizeof x, finish, name, line);
}
#else
inline void threadgroup_barrier(mem_flags, LILY_LINE) { lily_wait(0, line); }
inline void simdgroup_barrier(mem_flags, LILY_LINE) { lily_wait(1, line); }
template <class T> constexpr size_t slot_bytes = sizeof(T);
template <class T> __attribute__((always_inline)) inline LilyExchange exchange(const T& x, LilyFinish finish, const char* name, int line) {
  static_assert(sizeof(T) <= LILY_SLOT_BYTES);
  const uint lane = lily_self->thread.index % LILY_SIMD_WIDTH;
  return lily_meet([&](unsigned char* slots) { __builtin_memcpy(slots + lane * sizeof x, &x, sizeof x); }, finish, name, line);
}
#endif

// A lane's value among those that were exchanged.
template <class T> LILY_UNTRACKED T value_of(const unsigned char* slots, uint lane) {
  T value;
  __builtin_memcpy(&value, slots + lane * slot_bytes<T>, sizeof value);
  return value;
}

// ---- reductions ---------------------------------------------------------------------------------------------------------

// Adds as lanes that exchange with the lane 1, 2, 4, 8, 16 away do.
template <class T, class Op> LILY_UNTRACKED void reduce(const unsigned char* slots, uint active, unsigned char* result) {
  T values[LILY_SIMD_WIDTH];
  bool has[LILY_SIMD_WIDTH];
  for (uint i = 0; i < LILY_SIMD_WIDTH; ++i) {
    has[i] = active >> i & 1;
    if (has[i]) values[i] = value_of<T>(slots, i);
  }
  for (uint width = LILY_SIMD_WIDTH / 2; width; width /= 2)
    for (uint i = 0; i < width; ++i) {
      const uint a = 2 * i, b = 2 * i + 1;
      const bool either = has[a] || has[b];
      const T sum = has[a] && has[b] ? Op::of(values[a], values[b]) : has[a] ? values[a] : values[b];
      values[i] = sum;
      has[i] = either;
    }
  __builtin_memcpy(result, &values[0], sizeof(T));
}

template <class T, class Op> LILY_UNTRACKED T reduced(T x, const char* name, int line) {
  const LilyExchange e = exchange(x, reduce<T, Op>, name, line);
  T result;
  __builtin_memcpy(&result, e.result, sizeof result);
  return result;
}

struct Add { template <class T> static T of(T a, T b) { return T(a + b); } };
struct Multiply { template <class T> static T of(T a, T b) { return T(a * b); } };
struct And { template <class T> static T of(T a, T b) { return T(a & b); } };
struct Or { template <class T> static T of(T a, T b) { return T(a | b); } };
struct Xor { template <class T> static T of(T a, T b) { return T(a ^ b); } };
struct Least { template <class T> static T of(T a, T b) { return min(a, b); } };
struct Greatest { template <class T> static T of(T a, T b) { return max(a, b); } };

#define LILY_REDUCTION(name, Op) \
  template <class T> inline T name(T x, LILY_LINE) { return reduced<T, Op>(x, #name, line); }
LILY_REDUCTION(simd_sum, Add)
LILY_REDUCTION(simd_product, Multiply)
LILY_REDUCTION(simd_and, And)
LILY_REDUCTION(simd_or, Or)
LILY_REDUCTION(simd_xor, Xor)
LILY_REDUCTION(simd_min, Least)
LILY_REDUCTION(simd_max, Greatest)
#undef LILY_REDUCTION

// ---- prefix sums --------------------------------------------------------------------------------------------------------

template <class T, class Op> LILY_UNTRACKED T prefix(T x, T first, bool inclusive, const char* name, int line) {
  const LilyExchange e = exchange(x, nullptr, name, line);
  T sum = first;
  for (uint i = 0; i < e.lane + inclusive; ++i)
    if (e.active >> i & 1) sum = Op::of(sum, value_of<T>(e.slots, i));
  return sum;
}
template <class T> inline T simd_prefix_inclusive_sum(T x, LILY_LINE) { return prefix<T, Add>(x, T(0), true, "simd_prefix_inclusive_sum", line); }
template <class T> inline T simd_prefix_exclusive_sum(T x, LILY_LINE) { return prefix<T, Add>(x, T(0), false, "simd_prefix_exclusive_sum", line); }
template <class T> inline T simd_prefix_inclusive_product(T x, LILY_LINE) { return prefix<T, Multiply>(x, T(1), true, "simd_prefix_inclusive_product", line); }
template <class T> inline T simd_prefix_exclusive_product(T x, LILY_LINE) { return prefix<T, Multiply>(x, T(1), false, "simd_prefix_exclusive_product", line); }

// ---- other lanes' values ------------------------------------------------------------------------------------------------

// `from`: the lane that is asked, or the caller's own where it asks beyond the SIMD-group's ends.
template <class T> LILY_EXCHANGING T taken(const LilyExchange& e, uint from, const char* name, int line) {
  if (from >= LILY_SIMD_WIDTH || !(e.active >> from & 1)) lily_inactive_lane(name, line, from % LILY_SIMD_WIDTH);
  return value_of<T>(e.slots, from);
}
template <class T> LILY_EXCHANGING T simd_shuffle(T x, ushort lane, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_shuffle", line);
  return taken<T>(e, lane, "simd_shuffle", line);
}
template <class T> LILY_EXCHANGING T simd_broadcast(T x, ushort lane, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_broadcast", line);
  return taken<T>(e, lane, "simd_broadcast", line);
}
template <class T> LILY_EXCHANGING T simd_broadcast_first(T x, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_broadcast_first", line);
  return taken<T>(e, static_cast<uint>(__builtin_ctz(e.active)), "simd_broadcast_first", line);
}
template <class T> LILY_EXCHANGING T simd_shuffle_xor(T x, ushort mask, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_shuffle_xor", line);
  return taken<T>(e, e.lane ^ mask, "simd_shuffle_xor", line);
}
// Where there is no lane to take from, a lane keeps what it has.
template <class T> LILY_EXCHANGING T simd_shuffle_up(T x, ushort delta, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_shuffle_up", line);
  return e.lane >= delta ? taken<T>(e, e.lane - delta, "simd_shuffle_up", line) : x;
}
template <class T> LILY_EXCHANGING T simd_shuffle_down(T x, ushort delta, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_shuffle_down", line);
  return e.lane + delta < LILY_SIMD_WIDTH ? taken<T>(e, e.lane + delta, "simd_shuffle_down", line) : x;
}
template <class T> LILY_EXCHANGING T simd_shuffle_rotate_up(T x, ushort delta, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_shuffle_rotate_up", line);
  return taken<T>(e, (e.lane - delta) % LILY_SIMD_WIDTH, "simd_shuffle_rotate_up", line);
}
template <class T> LILY_EXCHANGING T simd_shuffle_rotate_down(T x, ushort delta, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "simd_shuffle_rotate_down", line);
  return taken<T>(e, (e.lane + delta) % LILY_SIMD_WIDTH, "simd_shuffle_rotate_down", line);
}

// ---- votes --------------------------------------------------------------------------------------------------------------

class simd_vote {
 public:
  using vote_t = ulong;
  explicit simd_vote(vote_t votes = 0) : votes(votes) {}
  explicit operator vote_t() const { return votes; }
  bool all() const { return votes == 0xffffffffu; }
  bool any() const { return votes != 0; }

 private:
  vote_t votes;
};
LILY_UNTRACKED inline uint votes_of(bool mine, uint& active, const char* name, int line) {
  const uint x = mine;
  const LilyExchange e = exchange(x, nullptr, name, line);
  uint votes = 0;
  for (uint i = 0; i < LILY_SIMD_WIDTH; ++i)
    if (e.active >> i & 1) votes |= value_of<uint>(e.slots, i) << i;
  active = e.active;
  return votes;
}
inline simd_vote simd_ballot(bool mine, LILY_LINE) {
  uint active;
  return simd_vote(votes_of(mine, active, "simd_ballot", line));
}
inline bool simd_any(bool mine, LILY_LINE) {
  uint active;
  return votes_of(mine, active, "simd_any", line) != 0;
}
inline bool simd_all(bool mine, LILY_LINE) {
  uint active;
  const uint votes = votes_of(mine, active, "simd_all", line);
  return votes == active;
}
inline simd_vote simd_active_threads_mask(LILY_LINE) {
  uint active;
  votes_of(true, active, "simd_active_threads_mask", line);
  return simd_vote(active);
}
LILY_UNTRACKED inline bool simd_is_first(LILY_LINE) {
  const uint x = 0;
  const LilyExchange e = exchange(x, nullptr, "simd_is_first", line);
  return static_cast<uint>(__builtin_ctz(e.active)) == e.lane;
}

// ---- four neighbouring lanes --------------------------------------------------------------------------------------------

template <class T> inline T quad_shuffle_xor(T x, ushort mask, LILY_LINE) { return simd_shuffle_xor(x, static_cast<ushort>(mask & 3), line); }
template <class T> LILY_EXCHANGING T quad_broadcast(T x, ushort lane, LILY_LINE) {
  const LilyExchange e = exchange(x, nullptr, "quad_broadcast", line);
  return taken<T>(e, (e.lane & ~3u) + lane % 4, "quad_broadcast", line);
}
template <class T> inline T quad_sum(T x, LILY_LINE) {
  x = T(x + quad_shuffle_xor(x, 1, line));
  return T(x + quad_shuffle_xor(x, 2, line));
}
template <class T> inline T quad_max(T x, LILY_LINE) {
  x = Greatest::of(x, quad_shuffle_xor(x, 1, line));
  return Greatest::of(x, quad_shuffle_xor(x, 2, line));
}

}  // namespace metal
