// Threadgroups of kernels that are not tracked: who comes next where a ring ends.
#include "lockstep.h"

#include <string.h>

#include "state.h"

__thread LilyLane* lily_self;
__thread void* lily_sites[LILY_FAST_SITES];

// All of a threadgroup that runs.
struct Lockstep {
  InlineFiber scheduler;
  LilyLane lanes[LILY_MAX_THREADS];
  LilySimd simds[MAX_SIMDGROUPS];
  // SIMD-groups of which lanes are left, in the order of this phase, and which of them runs.
  LilySimd* order[MAX_SIMDGROUPS];
  uint32_t count, at;
  uint32_t returned;  // lanes
  const LilyLane* last_returned;
};

namespace {

// Puts `count` things into a random order.
template <class T> void shuffle(uint64_t& random, T* things, uint32_t count) {
  uint64_t bits = 0;
  for (uint32_t i = count; i > 1; --i) {
    // Eight bits choose one of at most 32 nearly evenly.
    bits = bits >> 8 ? bits >> 8 : next_random(random) | uint64_t(1) << 63;
    const uint32_t other = (bits & 255) * i >> 8;
    const T kept = things[i - 1];
    things[i - 1] = things[other];
    things[other] = kept;
  }
}

// Draws the order of the lanes that are left.
void draw_ring(Worker& w, LilySimd& simd) {
  LilyLane* lanes[LILY_SIMD_WIDTH];
  uint32_t count = 0;
  LilyLane* lane = simd.head;
  do {
    lanes[count++] = lane;
    lane = lane->next;
  } while (lane != simd.head);
  shuffle(w.random, lanes, count);
  for (uint32_t i = 0; i < count; ++i) {
    LilyLane* next = lanes[i + 1 < count ? i + 1 : 0];
    lanes[i]->next = next;
    next->previous = lanes[i];
  }
  simd.head = lanes[0];
}

void draw_all(Worker& w) {
  Lockstep& l = *w.lockstep;
  shuffle(w.random, l.order, l.count);
  for (uint32_t s = 0; s < l.count; ++s) draw_ring(w, *l.order[s]);
  l.at = 0;
}

[[noreturn]] void apart(Worker& w, const LilyLane* lane, uint32_t kind, const char* name, int line, const LilyLane* other, int other_line) {
  LilyFault& fault = *w.fault;
  w.current = lane->thread.index;
  fault.kind = kind;
  fault.line = line;
  fault.other_thread = other->thread.index;
  fault.other_line = other_line;
  strncpy(fault.name, name, sizeof fault.name - 1);
  fail(w);
}

[[noreturn]] void divergent(Worker& w, const LilyLane* waits, uint32_t kind, const char* name, const LilyLane* other, int other_line) {
  apart(w, waits, kind, name, waits->simd->line, other, other_line);
}

// Who runs when the SIMD-group that ran has come to a barrier of the threadgroup, or has no lanes left. Null where nobody is
// left at all.
LilyLane* next_simdgroup(Worker& w) {
  Lockstep& l = *w.lockstep;
  if (l.at < l.count) return l.order[l.at]->head;
  if (!l.count) return nullptr;
  // All have come; so have all of their lanes, or none ever will.
  for (uint32_t s = 0; s < l.count; ++s) {
    LilySimd& simd = *l.order[s];
    const LilySimd& first = *l.order[0];
    if (l.returned) divergent(w, simd.head, LILY_DIVERGENT_BARRIER, "threadgroup_barrier", l.last_returned, 0);
    if (simd.line != first.line) divergent(w, simd.head, LILY_DIVERGENT_BARRIER, "threadgroup_barrier", first.head, first.line);
    simd.barrier = -1;
  }
  draw_all(w);
  return l.order[0]->head;
}

void body() {
  Worker& w = *lily_worker;
  w.dispatch->entry(&lily_self->thread);
  Lockstep& l = *w.lockstep;
  LilyLane* self = lily_self;
  LilySimd& simd = *self->simd;
  const LilyStep* at = self->looked ? self->looked : self->at;
  if (at->line) lily_left_out(self, at, 0);
  if (self->next == simd.head && at != simd.steps) lily_forget_steps(self);
  ++l.returned;
  simd.present &= ~(1u << self->thread.index % LILY_SIMD_WIDTH);
  ++simd.returned;
  l.last_returned = self;
  LilyLane* next = self->next;
  const bool last = next == simd.head;
  if (next == self) {
    // The others of this phase keep their order.
    memmove(l.order + l.at, l.order + l.at + 1, (--l.count - l.at) * sizeof *l.order);
    next = next_simdgroup(w);
  } else {
    self->previous->next = next;
    next->previous = self->previous;
    if (simd.head == self) simd.head = next;
    if (last && simd.barrier == 1) divergent(w, next, LILY_DIVERGENT_BARRIER, "simdgroup_barrier", self, 0);
    if (last && simd.barrier == 0) {
      ++l.at;
      next = next_simdgroup(w);
    }
  }
  if (!next) fiber_jump(self->fiber, l.scheduler);
  lily_turn_to(self, next);
  __builtin_unreachable();
}

}  // namespace

bool run_lockstep(Worker& w) {
  // Zeros: no steps are taken.
  if (!w.lockstep) w.lockstep = new Lockstep();
  Lockstep& l = *w.lockstep;
  memset(lily_sites, 0, sizeof lily_sites);
  l.returned = l.at = 0;
  l.count = (w.threads + LILY_SIMD_WIDTH - 1) / LILY_SIMD_WIDTH;
  for (uint32_t t = 0; t < w.threads; ++t) {
    LilyLane& lane = l.lanes[t];
    const bool last = t % LILY_SIMD_WIDTH == LILY_SIMD_WIDTH - 1 || t + 1 == w.threads;
    lane.next = last ? &l.lanes[t / LILY_SIMD_WIDTH * LILY_SIMD_WIDTH] : &lane + 1;
    lane.simd = &l.simds[t / LILY_SIMD_WIDTH];
    lane.thread = {&w.group, t};
    lane.at = lane.simd->steps;
    lane.looked = nullptr;
    lane.free = ~uint64_t(0);
    fiber_prepare(lane.fiber, stack_of(w, t), STACK_BYTES - t % LILY_SIMD_WIDTH * STACK_SHIFT, body);
  }
  for (uint32_t s = 0; s < l.count; ++s) {
    l.order[s] = &l.simds[s];
    l.simds[s].head = &l.lanes[s * LILY_SIMD_WIDTH];
    l.simds[s].turn = l.simds[s].returned = 0;
    const uint32_t lanes = w.threads - s * LILY_SIMD_WIDTH;
    l.simds[s].present = lanes < uint32_t(LILY_SIMD_WIDTH) ? (1u << lanes) - 1 : ~0u;
    l.simds[s].barrier = -1;
  }
  draw_all(w);
  lily_self = l.order[0]->head;
  fiber_jump(l.scheduler, lily_self->fiber);
  if (!w.fault->kind) return true;
  for (LilySimd& simd : l.simds) memset(simd.steps, 0, sizeof simd.steps);
  return false;
}

void leave_lockstep(Worker& w) { fiber_jump(lily_self->fiber, w.lockstep->scheduler); }

extern "C" {

void lily_last_at_barrier(LilyLane* self, int scope) {
  Worker& w = *lily_worker;
  LilySimd& simd = *self->simd;
  LilyLane* next;
  if (scope == 0) {
    ++w.lockstep->at;
    next = next_simdgroup(w);
  } else {
    if (simd.returned) divergent(w, self, LILY_DIVERGENT_BARRIER, "simdgroup_barrier", w.lockstep->last_returned, 0);
    simd.barrier = -1;
    draw_ring(w, simd);
    next = simd.head;
  }
  if (next != self) lily_turn_to(self, next);
}

void lily_divergent(LilyLane* self, int is_barrier, const char* name, int line) {
  divergent(*lily_worker, self->simd->head, is_barrier ? LILY_DIVERGENT_BARRIER : LILY_DIVERGENT_COLLECTIVE, name, self, line);
}

bool lily_take_step(LilyLane* self, bool settles, const char* name, int line) {
  LilySimd& simd = *self->simd;
  const bool is_full = (self->looked ? self->looked : self->at) == simd.steps + LILY_STEPS;
  if ((self->looked && settles) || is_full) lily_meet([](unsigned char*) {}, nullptr, name, line);
  LilyStep*& at = self->looked ? self->looked : self->at;
  if (at->line == line) {
    ++at;
    return false;
  }
  if (at->line) lily_left_out(self, at, line);
  if (~simd.present) lily_inactive_lane(name, line, static_cast<unsigned>(__builtin_ctz(~simd.present)));
  // The first of the ring would have come before: it waits elsewhere.
  if (self != simd.head) apart(*lily_worker, self, LILY_DIVERGENT_COLLECTIVE, name, line, simd.head, simd.line);
  at->line = line;
  simd.names[at - simd.steps] = name;
  ++at;
  return true;
}

void lily_forget_steps(LilyLane* last) {
  LilySimd& simd = *last->simd;
  const LilyStep* end = last->looked ? last->looked : last->at;
  memset(simd.steps, 0, (end - simd.steps) * sizeof *end);
}

void lily_left_out(LilyLane* self, const LilyStep* at, int line) {
  Worker& w = *lily_worker;
  const LilySimd& simd = *self->simd;
  // Somebody else: the first of the ring, or the last where it is that one who was left out.
  const LilyLane* other = simd.head != self ? simd.head : self->previous != self ? self->previous : w.lockstep->last_returned;
  const int taken = at->line == LILY_NO_LINE ? line : at->line;
  apart(w, other, line ? LILY_DIVERGENT_COLLECTIVE : LILY_INACTIVE_LANE, simd.names[at - simd.steps], taken, self, line);
}
}

void forget_lockstep(Worker& w) { delete w.lockstep; }
