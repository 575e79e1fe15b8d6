// How the threads of kernels that are not tracked take turns: the lanes of a SIMD-group in a ring.
//
// Where a SIMD-group meets, a lane leaves its value and goes to the next lane of the ring by itself, and when the first one's
// turn comes again all have been there: a turn costs a dozen instructions and no look-up. The order of a ring, and that of
// SIMD-groups between barriers of the threadgroup, is drawn anew at every barrier. The kernels and lockstep.cpp share this file.
//
// What a SIMD-group does with a matrix is a step: the lane that comes first takes it for all, on the whole matrix, and the others find that it was
// taken. Nobody waits for that. Where a lane has looked at elements of its own since the lanes last met, they meet before the next step, so that a
// step finds what all have written, and nobody finds what comes of a later one.
#pragma once

#include "fiber.h"
#include "runtime.h"

struct LilySimd;

// What a SIMD-group does with a matrix. The line is that of the call, NO_LINE where none is known, and 0 where nobody has come yet.
struct LilyStep {
  int line;
};
enum { LILY_NO_LINE = -1 };

// A thread of the threadgroup that runs.
struct alignas(64) LilyLane {
  InlineFiber fiber;
  LilyLane* next;      // of the ring
  LilyLane* previous;
  LilySimd* simd;
  LilyThread thread;
  LilyStep* at;        // the step that it comes to next; where it has looked at elements since the lanes last met, one that nobody takes
  LilyStep* looked;    // then the step that it comes to next, else null
  uint64_t free;       // bit i: the SIMD-group's matrix i is none of its variables; lanes in the same place have the same ones
};

// Matrices that a lane's variables are at the most, and bytes of each.
enum { LILY_MATRICES = 64, LILY_MATRIX_BYTES = 8 * 8 * 4 };
// Steps from one meeting to the next at the most.
enum { LILY_STEPS = 1024 };

// A SIMD-group, while not all of its lanes have returned.
struct LilySimd {
  LilyLane* head;      // who comes to each meeting first
  uint32_t turn;       // parity of meetings, so that a fast lane does not overwrite what a slow one has yet to read
  int line;            // where the meeting is
  uint32_t returned;   // lanes
  int barrier;         // where lanes wait at a barrier, its scope as lily_barrier's; else -1
  uint32_t active[2];  // lanes that took part
  uint32_t present;    // lanes that have not returned
  LilyStep steps[LILY_STEPS + 2];  // since the lanes last met; of the two beyond, one where they meet at the latest, and one that nobody takes
  const char* names[LILY_STEPS];
  alignas(64) unsigned char slots[2][LILY_SIMD_WIDTH * LILY_SLOT_BYTES];
  alignas(64) unsigned char result[2][LILY_SLOT_BYTES];
  alignas(64) unsigned char matrices[LILY_MATRICES][LILY_MATRIX_BYTES];
};

extern "C" {
// The lane that runs. In the part of thread-local memory that is found without a call.
extern __thread LilyLane* lily_self __attribute__((tls_model("initial-exec")));

// Threadgroup variables of small numbers that this threadgroup has asked for.
enum { LILY_FAST_SITES = 64 };
extern __thread void* lily_sites[LILY_FAST_SITES] __attribute__((tls_model("initial-exec")));

// The last lane of a ring came to a barrier. `scope` as lily_barrier's. Returns once the others have come.
void lily_last_at_barrier(LilyLane* self, int scope);
// Lanes of a SIMD-group came to different lines.
[[noreturn]] void lily_divergent(LilyLane* self, int is_barrier, const char* name, int line);
// A lane comes to a step that it cannot pass by, for one of three reasons: it has looked at elements and must not go on before the others have come
// (`settles`), nobody has taken the step yet, or others have taken another one. Whether it takes the step.
bool lily_take_step(LilyLane* self, bool settles, const char* name, int line);
// All lanes of the SIMD-group have come to a meeting, or returned, and it has taken steps.
void lily_forget_steps(LilyLane* last);
// A lane came to `line` and has not taken the step `at`, which others have. 0 where it returned.
[[noreturn]] void lily_left_out(LilyLane* self, const LilyStep* at, int line);
}

// Goes on as `next`, until somebody comes back.
__attribute__((always_inline)) inline void lily_turn_to(LilyLane* self, LilyLane* next) {
  lily_self = next;
  fiber_jump(self->fiber, next->fiber);
}

// Comes to a meeting. `first` says whether nobody was there before.
__attribute__((always_inline)) inline uint32_t lily_arrive(LilyLane* self, bool first, bool is_barrier, const char* name, int line) {
  LilySimd* simd = self->simd;
  if (first) {
    simd->turn ^= 1;
    simd->line = line;
    simd->active[simd->turn] = 0;
  } else if (__builtin_expect(simd->line != line, 0)) {
    lily_divergent(self, is_barrier, name, line);
  }
  if (self->at != simd->steps) {
    const LilyStep* at = self->looked ? self->looked : self->at;
    if (__builtin_expect(at->line != 0, 0)) lily_left_out(self, at, line);
    if (self->next == simd->head) lily_forget_steps(self);
    self->at = simd->steps;
    self->looked = nullptr;
  } else if (__builtin_expect(simd->steps->line != 0, 0)) {
    lily_left_out(self, simd->steps, line);
  }
  simd->active[simd->turn] |= 1u << self->thread.index % LILY_SIMD_WIDTH;
  return simd->turn;
}

// As lily_exchange. `leave` puts the lane's value among the others'.
template <class Leave>
__attribute__((always_inline)) inline LilyExchange lily_meet(Leave leave, LilyFinish finish, const char* name, int line) {
  LilyLane* self = lily_self;
  LilySimd* simd = self->simd;
  const bool first = simd->head == self;
  const uint32_t turn = lily_arrive(self, first, false, name, line);
  leave(simd->slots[turn]);
  lily_turn_to(self, self->next);
  if (finish && first) finish(simd->slots[turn], simd->active[turn], simd->result[turn]);
  return {simd->slots[turn], simd->result[turn], simd->active[turn], self->thread.index % LILY_SIMD_WIDTH};
}

// As lily_barrier.
inline void lily_wait(int scope, int line) {
  LilyLane* self = lily_self;
  LilySimd* simd = self->simd;
  lily_arrive(self, simd->head == self, true, scope ? "simdgroup_barrier" : "threadgroup_barrier", line);
  simd->barrier = scope;
  if (self->next != simd->head) lily_turn_to(self, self->next);
  else lily_last_at_barrier(self, scope);
}

// Comes to a step, which `take` takes: once, for all lanes, all of which must come to it. `settles` where it touches elements of other lanes.
template <class Take> __attribute__((always_inline)) inline void lily_step(Take take, const char* name, int line, bool settles = true) {
  LilyLane* self = lily_self;
  if (__builtin_expect(self->at->line == line, 1)) ++self->at;
  else if (lily_take_step(self, settles, name, line)) take();
}
