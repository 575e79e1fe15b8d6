// Runs the threads of a threadgroup as fibers, in a random order between the points where they wait for each other.
#include "runtime.h"

#include <link.h>
#include <string.h>
#include <sys/mman.h>

#include "lockstep.h"
#include "state.h"

__thread Worker* lily_worker = nullptr;

namespace {

uint32_t lane_of(uint32_t thread) { return thread % LILY_SIMD_WIDTH; }

void run(Worker& w, Fiber& from, uint32_t next) {
  w.current = next;
  w.stack = reinterpret_cast<uintptr_t>(stack_of(w, next));
  w.lanes[next].state = State::Ready;
  fiber_switch(from, w.lanes[next].fiber);
}

uint32_t take_ready(Worker& w) {
  const size_t at = (next_random(w.random) >> 32) * w.ready.size() >> 32;
  const uint32_t thread = w.ready[at];
  w.ready[at] = w.ready.back();
  w.ready.pop_back();
  return thread;
}

// The current lane waits, or is done: another one runs. Where none can, the scheduler finds out why.
void leave(Worker& w) {
  Lane& lane = w.lanes[w.current];
  if (w.ready.empty()) {
    w.stack = 0;
    fiber_switch(lane.fiber, w.scheduler);
  } else {
    const uint32_t next = take_ready(w);
    if (next != w.current) run(w, lane.fiber, next);
  }
}

void tick(Worker& w) {
  if (w.time < MAX_TIME) ++w.time;
}

void release_threadgroup(Worker& w) {
  tick(w);
  for (unsigned memory : {LILY_MEM_DEVICE, LILY_MEM_THREADGROUP})
    if (w.barrier_memory & memory) w.ordered_all[memory] = w.time;
  for (uint32_t t = 0; t < w.threads; ++t) {
    w.lanes[t].state = State::Ready;
    w.ready.push_back(t);
  }
  w.waiting = 0;
}

void release_simdgroup(Worker& w, uint32_t index) {
  Simdgroup& simd = w.simdgroups[index];
  if (simd.scope == 1) {
    tick(w);
    for (unsigned memory : {LILY_MEM_DEVICE, LILY_MEM_THREADGROUP})
      if (simd.memory & memory) w.ordered_simd[memory][index] = w.time;
  } else {
    if (simd.finish) simd.finish(simd.slots[simd.turn], simd.active[simd.turn], simd.result[simd.turn]);
    simd.turn ^= 1;
    simd.active[simd.turn] = 0;
  }
  simd.waiting = 0;
  const uint32_t first = index * LILY_SIMD_WIDTH;
  for (uint32_t t = first; t < first + LILY_SIMD_WIDTH && t < w.threads; ++t) {
    if (w.lanes[t].state != State::Simd) continue;
    w.lanes[t].state = State::Ready;
    w.ready.push_back(t);
  }
}

void copy_name(LilyFault& fault, const char* name) {
  strncpy(fault.name, name, sizeof fault.name - 1);
}

void body() {
  Worker& w = *lily_worker;
  w.dispatch->entry(&w.lanes[w.current].thread);
  const uint32_t index = w.current / LILY_SIMD_WIDTH;
  w.lanes[w.current].state = State::Done;
  ++w.done;
  Simdgroup& simd = w.simdgroups[index];
  --simd.lanes;
  // A collective is of the lanes that there still are; a barrier is of all.
  if (simd.lanes && simd.waiting == simd.lanes && simd.scope == 2) release_simdgroup(w, index);
  leave(w);
}

// Nobody can go on: either all are done, or some wait for what will not come.
bool finished(Worker& w) {
  if (w.done == w.threads) return true;
  LilyFault& fault = *w.fault;
  // The first of those that wait, and one that does not wait at the same place.
  uint32_t waiting = w.threads;
  for (uint32_t t = 0; t < w.threads && waiting == w.threads; ++t)
    if (w.lanes[t].state != State::Done) waiting = t;
  const Lane& one = w.lanes[waiting];
  const bool simd = one.state == State::Simd;
  const uint32_t first = simd ? waiting / LILY_SIMD_WIDTH * LILY_SIMD_WIDTH : 0;
  const uint32_t last = simd && first + LILY_SIMD_WIDTH < w.threads ? first + LILY_SIMD_WIDTH : w.threads;
  fault.other_thread = ~0u;
  for (uint32_t t = first; t < last; ++t) {
    const Lane& other = w.lanes[t];
    if (other.state == one.state && other.line == one.line) continue;
    fault.other_thread = t;
    fault.other_line = other.state == State::Done ? 0 : other.line;
    if (other.state != State::Done) break;
  }
  w.current = waiting;
  fault.kind = simd && w.simdgroups[waiting / LILY_SIMD_WIDTH].scope == 2 ? LILY_DIVERGENT_COLLECTIVE : LILY_DIVERGENT_BARRIER;
  if (simd) copy_name(fault, w.simdgroups[waiting / LILY_SIMD_WIDTH].name);
  fault.line = one.line;
  return false;
}

void report_place(Worker& w) {
  LilyFault& fault = *w.fault;
  fault.thread = w.current;
  memcpy(fault.group, w.group.group, sizeof fault.group);
}

// Whether a thread that arrives finds the others of its kind at the same place.
void meet(Worker& w, bool same, uint32_t first, uint32_t last, State state, uint32_t kind, const char* name, int line) {
  if (same) return;
  LilyFault& fault = *w.fault;
  fault.kind = kind;
  fault.line = line;
  copy_name(fault, name);
  for (uint32_t t = first; t < last; ++t) {
    if (w.lanes[t].state != state) continue;
    fault.other_thread = t;
    fault.other_line = w.lanes[t].line;
    break;
  }
  fail(w);
}

// Threadgroup memory for one more variable or argument.
unsigned char* reserve(Worker& w, unsigned site, size_t bytes, size_t alignment) {
  if (alignment < 16) alignment = 16;
  size_t at = (w.arena_used + alignment - 1) & ~(alignment - 1);
  size_t asked = bytes;
  for (const Variable& v : w.variables) asked += v.bytes;
  if (asked > w.dispatch->threadgroup_limit || at + bytes + ARENA_GAP > ARENA_BYTES) {
    w.fault->kind = LILY_THREADGROUP_MEMORY;
    w.fault->size = asked;
    w.fault->bytes = w.dispatch->threadgroup_limit;
    return nullptr;
  }
  w.variables.push_back({site, at, bytes});
  w.arena_used = at + bytes + ARENA_GAP;
  return w.arena + at;
}

constexpr unsigned ARGUMENT_SITE = ~0u;

bool run_group(Worker& w, const uint32_t (&group)[3]) {
  const LilyDispatch& d = *w.dispatch;
  ++w.serial;
  w.time = 0;
  memset(w.ordered_all, 0, sizeof w.ordered_all);
  memset(w.ordered_simd, 0, sizeof w.ordered_simd);
  w.done = w.waiting = 0;
  w.variables.clear();
  w.arena_used = ARENA_GAP;
  // Whoever reads before anyone wrote sees numbers that no kernel can live with.
  memset(w.arena, 0xff, w.arena_used);
  w.threadgroup_arguments.clear();
  memcpy(w.group.group, group, sizeof group);
  w.current = 0;
  for (uint32_t i = 0; i < d.threadgroup_count; ++i) {
    unsigned char* at = reserve(w, ARGUMENT_SITE, d.threadgroup_bytes[i], 16);
    if (!at) return false;
    memset(at, 0xff, d.threadgroup_bytes[i]);
    w.threadgroup_arguments.push_back(at);
  }
  w.group.threadgroup = w.threadgroup_arguments.data();
  if (!d.tracked) return run_lockstep(w);
  const uint32_t simdgroups = (w.threads + LILY_SIMD_WIDTH - 1) / LILY_SIMD_WIDTH;
  for (uint32_t s = 0; s < simdgroups; ++s) {
    Simdgroup& simd = w.simdgroups[s];
    const uint32_t left = w.threads - s * LILY_SIMD_WIDTH;
    simd.lanes = left < uint32_t(LILY_SIMD_WIDTH) ? left : uint32_t(LILY_SIMD_WIDTH);
    simd.all = simd.lanes;
    simd.waiting = simd.turn = 0;
    simd.active[0] = simd.active[1] = 0;
  }
  w.ready.clear();
  for (uint32_t t = 0; t < w.threads; ++t) {
    Lane& lane = w.lanes[t];
    lane.state = State::Ready;
    lane.thread = {&w.group, t};
    fiber_prepare(lane.fiber, stack_of(w, t), STACK_BYTES - t % LILY_SIMD_WIDTH * STACK_SHIFT, body);
    w.ready.push_back(t);
  }
  run(w, w.scheduler, take_ready(w));
  if (w.fault->kind) return false;
  return finished(w);
}

constexpr size_t ALL_STACKS = LILY_MAX_THREADS * (STACK_BYTES + GUARD_BYTES);

// A host thread's worker, which goes with the thread: its guards are 2,048 mappings of the 65,530 that a process may have.
struct Owner {
  Worker* worker = nullptr;
  ~Owner() {
    if (!worker) return;
    lily_worker = nullptr;
    munmap(worker->stacks, ALL_STACKS);
    munmap(worker->arena, ARENA_BYTES);
    forget_lockstep(*worker);
    delete worker;
  }
};
thread_local Owner owner;

Worker* worker() {
  if (lily_worker) return lily_worker;
  auto* w = new Worker;
  // Stacks are committed as they are touched.
  void* stacks = mmap(nullptr, ALL_STACKS, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  void* arena = mmap(nullptr, ARENA_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (stacks == MAP_FAILED || arena == MAP_FAILED) {
    delete w;
    return nullptr;
  }
  w->stacks = static_cast<unsigned char*>(stacks);
  w->arena = static_cast<unsigned char*>(arena);
  for (int t = 0; t < LILY_MAX_THREADS; ++t) mprotect(stack_of(*w, t) - GUARD_BYTES, GUARD_BYTES, PROT_NONE);
  w->lanes.resize(LILY_MAX_THREADS);
  w->ready.reserve(LILY_MAX_THREADS);
  w->simdgroups.resize(MAX_SIMDGROUPS);
  w->arena_shadow.cover(ARENA_BYTES);
  owner.worker = lily_worker = w;
  return w;
}

}  // namespace

// splitmix64
uint64_t next_random(uint64_t& state) {
  uint64_t z = state += 0x9e3779b97f4a7c15u;
  z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
  z = (z ^ z >> 27) * 0x94d049bb133111ebu;
  return z ^ z >> 31;
}

void fail(Worker& w) {
  report_place(w);
  w.stack = 0;
  // The fibers are left as they are: kernels hold nothing that must be given back.
  if (w.dispatch->tracked) fiber_switch(w.lanes[w.current].fiber, w.scheduler);
  else leave_lockstep(w);
  __builtin_unreachable();
}

void pause_lane(Worker& w) {
  w.ready.push_back(w.current);
  leave(w);
}

extern "C" {

void lily_barrier(int scope, unsigned memory, int line) {
  Worker& w = *lily_worker;
  Lane& lane = w.lanes[w.current];
  lane.line = line;
  if (scope == 0) {
    const bool same = w.waiting == 0 || (w.barrier_line == line && w.barrier_memory == memory);
    meet(w, same, 0, w.threads, State::Barrier, LILY_DIVERGENT_BARRIER, "threadgroup_barrier", line);
    w.barrier_line = line;
    w.barrier_memory = memory;
    lane.state = State::Barrier;
    if (++w.waiting == w.threads) release_threadgroup(w);
  } else {
    const uint32_t index = w.current / LILY_SIMD_WIDTH, first = index * LILY_SIMD_WIDTH;
    const uint32_t last = first + LILY_SIMD_WIDTH < w.threads ? first + LILY_SIMD_WIDTH : w.threads;
    Simdgroup& simd = w.simdgroups[index];
    const bool same = simd.waiting == 0 || (simd.scope == 1 && simd.line == line && simd.memory == memory);
    meet(w, same, first, last, State::Simd, LILY_DIVERGENT_BARRIER, "simdgroup_barrier", line);
    simd.scope = 1;
    simd.name = "simdgroup_barrier";
    simd.line = line;
    simd.memory = memory;
    lane.state = State::Simd;
    if (++simd.waiting == simd.all) release_simdgroup(w, index);
  }
  leave(w);
}

LilyExchange lily_exchange(const void* value, size_t bytes, LilyFinish finish, const char* name, int line) {
  Worker& w = *lily_worker;
  Lane& lane = w.lanes[w.current];
  lane.line = line;
  const uint32_t index = w.current / LILY_SIMD_WIDTH, first = index * LILY_SIMD_WIDTH, at = lane_of(w.current);
  const uint32_t last = first + LILY_SIMD_WIDTH < w.threads ? first + LILY_SIMD_WIDTH : w.threads;
  Simdgroup& simd = w.simdgroups[index];
  const bool same = simd.waiting == 0 || (simd.scope == 2 && simd.line == line && simd.finish == finish && simd.bytes == bytes);
  meet(w, same, first, last, State::Simd, LILY_DIVERGENT_COLLECTIVE, name, line);
  const uint32_t turn = simd.turn;
  simd.scope = 2;
  simd.line = line;
  simd.name = name;
  simd.finish = finish;
  simd.bytes = bytes;
  memcpy(simd.slots[turn] + at * LILY_SLOT_BYTES, value, bytes);
  simd.active[turn] |= 1u << at;
  lane.state = State::Simd;
  if (++simd.waiting == simd.lanes) release_simdgroup(w, index);
  leave(w);
  return {simd.slots[turn], simd.result[turn], simd.active[turn], at};
}

void lily_inactive_lane(const char* name, int line, unsigned from) {
  Worker& w = *lily_worker;
  if (!w.dispatch->tracked) w.current = lily_self->thread.index;
  w.fault->kind = LILY_INACTIVE_LANE;
  w.fault->line = line;
  w.fault->other_thread = w.current / LILY_SIMD_WIDTH * LILY_SIMD_WIDTH + from;
  copy_name(*w.fault, name);
  fail(w);
}

void lily_misuse(const char* what) {
  Worker& w = *lily_worker;
  if (!w.dispatch->tracked) w.current = lily_self->thread.index;
  w.fault->kind = LILY_MISUSE;
  w.fault->pc = __builtin_return_address(0);
  copy_name(*w.fault, what);
  fail(w);
}

unsigned lily_index() {
  const Worker& w = *lily_worker;
  return w.dispatch->tracked ? w.current : lily_self->thread.index;
}

unsigned lily_threads() { return lily_worker->threads; }

void* lily_threadgroup_variable(unsigned site, size_t bytes, size_t alignment) {
  Worker& w = *lily_worker;
  if (!w.dispatch->tracked) w.current = lily_self->thread.index;
  for (const Variable& v : w.variables)
    if (v.site == site) return w.arena + v.at;
  unsigned char* at = reserve(w, site, bytes, alignment);
  if (!at) fail(w);
  memset(at, 0xff, bytes);
  return at;
}

static std::vector<LilyVariable> declared;

int lily_declare_variable(unsigned site, size_t bytes) {
  declared.push_back({site, bytes});
  return 0;
}

size_t lily_take_declared(LilyVariable* to, size_t count) {
  const size_t had = declared.size();
  for (size_t i = 0; i < had && i < count; ++i) to[i] = declared[i];
  if (had <= count) declared.clear();
  return had;
}

int lily_image(const void* symbol, const unsigned char** base, size_t* bytes) {
  struct Search {
    uintptr_t symbol, base, bytes;
  } search{reinterpret_cast<uintptr_t>(symbol), 0, 0};
  const auto visit = [](dl_phdr_info* info, size_t, void* data) {
    auto& search = *static_cast<Search*>(data);
    uintptr_t end = 0;
    bool inside = false;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
      const auto& part = info->dlpi_phdr[i];
      if (part.p_type != PT_LOAD) continue;
      const uintptr_t from = info->dlpi_addr + part.p_vaddr, to = from + part.p_memsz;
      inside = inside || (search.symbol >= from && search.symbol < to);
      if (to > end) end = to;
    }
    if (!inside) return 0;
    search.base = info->dlpi_addr;
    search.bytes = end - info->dlpi_addr;
    return 1;
  };
  if (!dl_iterate_phdr(visit, &search)) return 0;
  *base = reinterpret_cast<const unsigned char*>(search.base);
  *bytes = search.bytes;
  return 1;
}

unsigned lily_lane() { return lane_of(lily_worker->current); }

int lily_dispatch(const LilyDispatch* dispatch, LilyFault* fault) {
  memset(fault, 0, sizeof *fault);
  fault->other_thread = ~0u;
  Worker* w = worker();
  if (!w) {
    fault->kind = LILY_THREADGROUP_MEMORY;
    return 1;
  }
  w->dispatch = dispatch;
  w->fault = fault;
  w->random = dispatch->seed;
  w->threads = dispatch->threads[0] * dispatch->threads[1] * dispatch->threads[2];
  w->last_touch = 0;
  w->first_serial = w->serial + 1;
  w->group.buffers = dispatch->buffers;
  memcpy(w->group.threads, dispatch->threads, sizeof dispatch->threads);
  memcpy(w->group.groups, dispatch->groups, sizeof dispatch->groups);
  const uint32_t count = dispatch->groups[0] * dispatch->groups[1] * dispatch->groups[2];
  // Threadgroups in a random order too.
  std::vector<uint32_t> order(count);
  for (uint32_t i = 0; i < count; ++i) order[i] = i;
  for (uint32_t i = count; i > 1; --i) {
    const uint32_t other = next_random(w->random) % i;
    const uint32_t swapped = order[i - 1];
    order[i - 1] = order[other];
    order[other] = swapped;
  }
  for (uint32_t linear : order) {
    const uint32_t x = dispatch->groups[0], y = dispatch->groups[1];
    const uint32_t group[3] = {linear % x, linear / x % y, linear / x / y};
    if (run_group(*w, group)) continue;
    report_place(*w);
    return 1;
  }
  return 0;
}
}
