// What runtime.cpp and tracker.cpp share: the threadgroup that is running.
#pragma once

#include <stdint.h>

#include <vector>

#include "fiber.h"
#include "runtime.h"

// Bytes of a fiber's stack. The page before it is not mapped, so that an overflow ends the process at once.
constexpr size_t STACK_BYTES = 128 * 1024;
constexpr size_t GUARD_BYTES = 4096;
constexpr int MAX_SIMDGROUPS = LILY_MAX_THREADS / LILY_SIMD_WIDTH;
// Stacks end so far from each other's place in a page that the ends of a SIMD-group's fit into the first cache together.
constexpr size_t STACK_SHIFT = 17 * 64;
// Room for threadgroup memory: far more than any device has, so that asking for too much is told from reaching too far.
constexpr size_t ARENA_BYTES = 512 * 1024;
// Nothing lies in the bytes between two threadgroup allocations.
constexpr size_t ARENA_GAP = 64;

// Who touched a byte last, and how: enough to say whether a later access may come at the same time.
struct Stamp {
  // serial of the threadgroup : 31, time in it : 20, thread : 10, flags : 3
  uint64_t bits;
  static Stamp of(uint64_t serial, uint64_t time, uint64_t thread, uint64_t flags) {
    return {serial << 33 | time << 13 | thread << 3 | flags};
  }
  uint64_t serial() const { return bits >> 33; }
  uint64_t time() const { return bits >> 13 & 0xfffff; }
  uint32_t thread() const { return bits >> 3 & 0x3ff; }
  uint64_t flags() const { return bits & 7; }
};
constexpr uint64_t MAX_TIME = 0xfffff;

// The last write of a granule, and of its reads since as much as races need.
struct Cell {
  Stamp write, read;
  uint32_t write_pc, read_pc;  // from the start of the kernels' image
};

// Cells for a piece of memory, one for each granule of 4 bytes at first, of fewer as soon as fewer are touched at once.
struct Shadow {
  std::vector<Cell> cells;
  unsigned shift = 2;
  size_t bytes = 0;
  void cover(size_t size) {
    bytes = size;
    cells.assign((size + 3) >> 2, Cell{});
  }
  void refine(size_t from, size_t count);
};

struct LilyBuffer {
  unsigned char* data;
  size_t bytes;
  bool tracked, read_only;
  Shadow shadow;
};

// A piece of threadgroup memory.
struct Variable {
  unsigned site;
  size_t at, bytes;
};

struct Lockstep;

enum class State : uint8_t { Ready, Barrier, Simd, Done };

struct Lane {
  Fiber fiber;
  State state;
  int line;              // of what it waits at
  LilyThread thread;
};

struct Simdgroup {
  uint32_t all;          // lanes that it has
  uint32_t lanes;        // that have not returned
  uint32_t waiting;
  int scope;             // of what they wait at: 1 a barrier, 2 an exchange
  int line;
  unsigned memory;
  const char* name;
  size_t bytes;
  LilyFinish finish;
  uint32_t active[2];
  uint32_t turn;         // parity of exchanges, so that a fast lane does not overwrite what a slow one has yet to read
  alignas(64) unsigned char slots[2][LILY_SIMD_WIDTH * LILY_SLOT_BYTES];
  alignas(64) unsigned char result[2][LILY_SLOT_BYTES];
};

struct Worker {
  // The fiber that runs, and its stack. First, since every access looks here.
  uintptr_t stack = 0;
  uint32_t current = 0;

  const LilyDispatch* dispatch = nullptr;
  LilyFault* fault = nullptr;
  uint64_t random = 0;
  Fiber scheduler;
  unsigned char* stacks = nullptr;
  LilyGroup group{};
  std::vector<Lane> lanes;
  std::vector<uint16_t> ready;
  std::vector<Simdgroup> simdgroups;
  uint32_t threads = 0, done = 0, waiting = 0;
  int barrier_line = 0;
  unsigned barrier_memory = 0;

  unsigned char* arena = nullptr;
  size_t arena_used = 0;
  std::vector<Variable> variables;
  std::vector<void*> threadgroup_arguments;
  Shadow arena_shadow;

  // Time in this threadgroup: one more at each barrier. Which barrier last ordered which memory, by LILY_MEM_*.
  uint64_t serial = 1, first_serial = 1, time = 0;
  uint64_t ordered_all[3] = {}, ordered_simd[3][MAX_SIMDGROUPS] = {};
  // Touched range that the last access was in.
  size_t last_touch = 0;

  // Of kernels that are not tracked.
  Lockstep* lockstep = nullptr;
};

// Found without a call: every access looks here.
extern __thread Worker* lily_worker __attribute__((tls_model("initial-exec")));

// Where a thread's stack begins, at its lower end.
inline unsigned char* stack_of(const Worker& w, uint32_t thread) {
  return w.stacks + thread * (STACK_BYTES + GUARD_BYTES) + GUARD_BYTES;
}

uint64_t next_random(uint64_t& state);
// Ends the dispatch. `fault` is filled but for the thread.
[[noreturn]] void fail(Worker& w);
// Lets other threads of the threadgroup run; the caller stays ready.
void pause_lane(Worker& w);
// Runs the threadgroup that `w` is prepared for, of a kernel that is not tracked. False where that fails.
bool run_lockstep(Worker& w);
// Ends it at once, from one of its threads.
void leave_lockstep(Worker& w);
// Gives back what the worker needed for them.
void forget_lockstep(Worker& w);

