// Holds every load and store of a kernel against what is known about the bytes.
//
// Kernels are compiled with -fsanitize=thread, which puts a call before every access that may be seen by others; the calls
// arrive here instead of in that sanitizer's own library. -fsanitize=bounds adds the checks of array indices.
//
// Two accesses of the same byte by different threads of a dispatch, one of them a write, are a race unless a barrier that
// orders this memory came between them: one of the threadgroup, or one of the SIMD-group where both are in it. Each granule
// has a stamp of its last write and one of its last read; flags say that others read it too. Dispatches that may overlap are
// held apart by what they declare, before they run.
#include <string.h>

#include "runtime.h"
#include "state.h"

void Shadow::refine(size_t from, size_t count) {
  while (shift && ((from | count) & ((size_t(1) << shift) - 1))) {
    std::vector<Cell> finer(cells.size() * 2);
    for (size_t i = 0; i < cells.size(); ++i) finer[2 * i] = finer[2 * i + 1] = cells[i];
    cells.swap(finer);
    --shift;
  }
}

namespace {

enum Kind { READ, WRITE, ATOMIC_LOAD, ATOMIC_STORE, ATOMIC_UPDATE };

bool reads(Kind k) { return k == READ || k == ATOMIC_LOAD || k == ATOMIC_UPDATE; }
bool writes(Kind k) { return k == WRITE || k == ATOMIC_STORE || k == ATOMIC_UPDATE; }
bool atomic(Kind k) { return k >= ATOMIC_LOAD; }

// Flags of a read's stamp: another lane of its SIMD-group read too, another SIMD-group did, another threadgroup did.
constexpr uint64_t OTHER_LANE = 1, OTHER_SIMDGROUP = 2, OTHER_GROUP = 4;
// Flags of a write's stamp: it was atomic; so was one by another thread, with nothing between.
constexpr uint64_t IS_ATOMIC = 1, OTHERS_ATOMIC = 2;

// What the host writes comes before everything; 0 is what nobody wrote.
constexpr uint64_t HOST_SERIAL = 1;

struct Access {
  uintptr_t at;
  size_t bytes;
  Kind kind;
  const void* pc;
};

[[noreturn]] void report(Worker& w, uint32_t kind, const Access& a, unsigned space, LilyBuffer* buffer, uint64_t offset, uint64_t size) {
  LilyFault& f = *w.fault;
  f.kind = kind;
  f.pc = a.pc;
  f.address = reinterpret_cast<const void*>(a.at);
  f.bytes = static_cast<uint32_t>(a.bytes);
  f.writes = writes(a.kind);
  f.space = space;
  f.buffer = buffer;
  f.offset = offset;
  f.size = size;
  fail(w);
}

// How an earlier stamp of this dispatch stands to the thread that runs.
struct Relation {
  bool before;       // it cannot come at the same time
  bool same_thread;
};

inline Relation relate(const Worker& w, Stamp s, unsigned space) {
  if (s.serial() < w.first_serial) return {true, false};
  if (s.serial() != w.serial) return {false, false};
  if (s.thread() == w.current) return {true, true};
  if (s.time() < w.ordered_all[space]) return {true, false};
  const uint32_t simd = w.current / LILY_SIMD_WIDTH;
  return {s.thread() / LILY_SIMD_WIDTH == simd && s.time() < w.ordered_simd[space][simd], false};
}

[[noreturn]] void race(Worker& w, const Access& a, unsigned space, LilyBuffer* buffer, size_t offset, Stamp other, uint32_t pc, bool wrote,
                       bool other_known) {
  LilyFault& f = *w.fault;
  f.other_thread = other_known ? other.thread() : ~0u;
  f.same_group = other.serial() == w.serial;
  f.other_writes = wrote;
  f.other_pc = w.dispatch->image + pc;
  report(w, LILY_RACE, a, space, buffer, offset, buffer ? buffer->bytes : 0);
}

inline void touch_cell(Worker& w, Cell& cell, const Access& a, unsigned space, LilyBuffer* buffer, size_t offset) {
  const bool written = space == LILY_MEM_THREADGROUP ? cell.write.serial() == w.serial : cell.write.bits != 0;
  if (reads(a.kind) && !written) report(w, LILY_UNWRITTEN, a, space, buffer, offset, buffer ? buffer->bytes : 0);
  const uint32_t pc = static_cast<uint32_t>(static_cast<const unsigned char*>(a.pc) - w.dispatch->image);
  const Relation write = relate(w, cell.write, space);
  const bool atomics = atomic(a.kind) && cell.write.flags() & IS_ATOMIC;
  if (written && !atomics && (!write.before || (cell.write.flags() & OTHERS_ATOMIC && cell.write.serial() == w.serial &&
                                                cell.write.time() >= w.ordered_all[space])))
    race(w, a, space, buffer, offset, cell.write, cell.write_pc, true, !write.before);
  // An atomic load only asks what it may see.
  if (a.kind == ATOMIC_LOAD) return;
  const Relation read = relate(w, cell.read, space);
  // In this dispatch; of threadgroup memory, whose bytes every threadgroup has anew, by this threadgroup.
  const bool seen = cell.read.serial() >= (space == LILY_MEM_THREADGROUP ? w.serial : w.first_serial);
  uint64_t flags = cell.read.flags();
  const bool same_group = cell.read.serial() == w.serial;
  // Readers before the last barrier of the threadgroup no longer count.
  if (!seen) flags = 0;
  else if (same_group && cell.read.time() < w.ordered_all[space]) flags &= OTHER_GROUP;
  const uint32_t simd = w.current / LILY_SIMD_WIDTH;
  const bool same_simd = same_group && cell.read.thread() / LILY_SIMD_WIDTH == simd;
  if (same_simd && cell.read.time() < w.ordered_simd[space][simd]) flags &= ~OTHER_LANE;
  if (a.kind == READ) {
    if (seen && !same_group) {
      flags |= OTHER_GROUP;
    } else if (seen && !read.before) {
      flags |= same_simd ? OTHER_LANE : OTHER_SIMDGROUP;
    }
    if (seen && !same_simd && same_group) flags &= ~OTHER_LANE;
    cell.read = Stamp::of(w.serial, w.time, w.current, flags);
    cell.read_pc = pc;
    return;
  }
  if (seen && (!read.before || flags)) race(w, a, space, buffer, offset, cell.read, cell.read_pc, false, !read.before);
  if (atomic(a.kind)) {
    if (atomics) {
      const bool past = cell.write.serial() != w.serial || cell.write.time() < w.ordered_all[space];
      flags = past ? 0 : cell.write.flags() & OTHERS_ATOMIC;
      if (!write.before) flags = OTHERS_ATOMIC;
    } else {
      flags = 0;
    }
    flags |= IS_ATOMIC;
  } else {
    flags = 0;
  }
  cell.write = Stamp::of(w.serial, w.time, w.current, flags);
  cell.write_pc = pc;
}

void touch_cells(Worker& w, Shadow& shadow, const Access& a, unsigned space, LilyBuffer* buffer, size_t offset) {
  const size_t grain = size_t(1) << shadow.shift;
  if ((offset | a.bytes) & (grain - 1)) shadow.refine(offset, a.bytes);
  const size_t last = (offset + a.bytes - 1) >> shadow.shift;
  for (size_t i = offset >> shadow.shift; i <= last; ++i) touch_cell(w, shadow.cells[i], a, space, buffer, offset);
}

void threadgroup_access(Worker& w, const Access& a) {
  const size_t at = a.at - reinterpret_cast<uintptr_t>(w.arena);
  for (const Variable& v : w.variables) {
    if (at < v.at || at >= v.at + v.bytes) continue;
    if (at + a.bytes > v.at + v.bytes) report(w, LILY_OUT_OF_BOUNDS, a, LILY_MEM_THREADGROUP, nullptr, at - v.at, v.bytes);
    return touch_cells(w, w.arena_shadow, a, LILY_MEM_THREADGROUP, nullptr, at);
  }
  // The allocation that ends nearest before.
  const Variable* near = nullptr;
  for (const Variable& v : w.variables)
    if (v.at <= at && (!near || v.at > near->at)) near = &v;
  report(w, LILY_OUT_OF_BOUNDS, a, LILY_MEM_THREADGROUP, nullptr, near ? at - near->at : at, near ? near->bytes : 0);
}

[[noreturn]] void astray(Worker& w, const Access& a) {
  const LilyDispatch& d = *w.dispatch;
  const auto* at = reinterpret_cast<const unsigned char*>(a.at);
  // Inside a buffer that the dispatch mentions, or past the end of one.
  LilyBuffer* nearest = nullptr;
  for (size_t i = 0; i < d.bound_count; ++i) {
    LilyBuffer* b = d.bound[i];
    if (at >= b->data && at + a.bytes <= b->data + b->bytes) report(w, LILY_UNDECLARED, a, LILY_MEM_DEVICE, b, at - b->data, b->bytes);
    if (at >= b->data && (!nearest || b->data > nearest->data)) nearest = b;
  }
  report(w, LILY_OUT_OF_BOUNDS, a, nearest ? LILY_MEM_DEVICE : 0, nearest, nearest ? at - nearest->data : 0, nearest ? nearest->bytes : 0);
}

void device_access(Worker& w, const Access& a) {
  const LilyDispatch& d = *w.dispatch;
  const auto* at = reinterpret_cast<const unsigned char*>(a.at);
  const LilyTouch* touch = nullptr;
  if (w.last_touch < d.touch_count && at >= d.touches[w.last_touch].begin && at < d.touches[w.last_touch].end) {
    touch = &d.touches[w.last_touch];
  } else {
    // The last range that begins at or before the address.
    size_t low = 0, high = d.touch_count;
    while (low < high) {
      const size_t middle = (low + high) / 2;
      if (d.touches[middle].begin <= at) low = middle + 1;
      else high = middle;
    }
    if (low && at < d.touches[low - 1].end) {
      touch = &d.touches[low - 1];
      w.last_touch = low - 1;
    }
  }
  if (!touch) {
    // Constants of the kernels' own library.
    if (!writes(a.kind) && at >= d.image && at + a.bytes <= d.image + d.image_bytes) return;
    astray(w, a);
  }
  if (at + a.bytes > touch->end) {
    // It may go on in the next range, of which it must be allowed the same.
    const size_t next = static_cast<size_t>(touch - d.touches) + 1;
    const size_t here = static_cast<size_t>(touch->end - at);
    if (next >= d.touch_count || d.touches[next].begin != touch->end || d.touches[next].buffer != touch->buffer) astray(w, a);
    device_access(w, {a.at, here, a.kind, a.pc});
    return device_access(w, {a.at + here, a.bytes - here, a.kind, a.pc});
  }
  LilyBuffer* b = touch->buffer;
  if (!b) {
    if (writes(a.kind)) report(w, LILY_READ_ONLY, a, LILY_MEM_DEVICE, nullptr, at - touch->begin, touch->end - touch->begin);
    return;
  }
  const size_t offset = static_cast<size_t>(at - b->data);
  if (writes(a.kind) && b->read_only) report(w, LILY_READ_ONLY, a, LILY_MEM_DEVICE, b, offset, b->bytes);
  if ((reads(a.kind) && !touch->reads) || (writes(a.kind) && !touch->writes))
    report(w, LILY_UNDECLARED, a, LILY_MEM_DEVICE, b, offset, b->bytes);
  // What nobody writes needs no stamps.
  if (b->read_only) return;
  touch_cells(w, b->shadow, a, LILY_MEM_DEVICE, b, offset);
}

inline void access(void* address, size_t bytes, size_t alignment, Kind kind, const void* pc) {
  Worker* w = lily_worker;
  const auto at = reinterpret_cast<uintptr_t>(address);
  if (!w || !w->stack) return;
  // A thread's own variables.
  if (at - w->stack < STACK_BYTES) return;
  const Access a{at, bytes, kind, pc};
  if (at & (alignment - 1)) report(*w, LILY_MISALIGNED, a, 0, nullptr, 0, alignment);
  if (at - reinterpret_cast<uintptr_t>(w->arena) < ARENA_BYTES) return threadgroup_access(*w, a);
  device_access(*w, a);
}

void mark(LilyBuffer* b, size_t from, size_t bytes) {
  if (!b->tracked || b->read_only || !bytes) return;
  b->shadow.refine(from, bytes);
  const size_t last = (from + bytes - 1) >> b->shadow.shift;
  for (size_t i = from >> b->shadow.shift; i <= last; ++i) b->shadow.cells[i].write = Stamp::of(HOST_SERIAL, 0, 0, 0);
}

}  // namespace

#define PC __builtin_return_address(0)

extern "C" {

LilyBuffer* lily_buffer_new(unsigned char* data, size_t bytes, int tracked, int read_only) {
  auto* b = new LilyBuffer{data, bytes, tracked != 0, read_only != 0, {}};
  if (tracked && !read_only) b->shadow.cover(bytes);
  return b;
}

void lily_buffer_free(LilyBuffer* b) { delete b; }

void lily_buffer_written(LilyBuffer* b, size_t from, size_t bytes) { mark(b, from, bytes); }

void lily_buffer_copied(LilyBuffer* to, size_t to_at, const LilyBuffer* from, size_t from_at, size_t bytes) {
  if (!to->tracked || to->read_only || !bytes) return;
  if (!from->tracked || from->read_only) return mark(to, to_at, bytes);
  to->shadow.refine(to_at, bytes);
  // Cells of the two may be of different sizes.
  const size_t grain = size_t(1) << to->shadow.shift;
  for (size_t i = 0; i < bytes; i += grain) {
    bool written = true;
    for (size_t j = i; j < i + grain && j < bytes; ++j) written = written && from->shadow.cells[(from_at + j) >> from->shadow.shift].write.bits;
    to->shadow.cells[(to_at + i) >> to->shadow.shift].write = written ? Stamp::of(HOST_SERIAL, 0, 0, 0) : Stamp{0};
  }
}

// ---- calls that -fsanitize=thread puts into kernels ---------------------------------------------------------------------

#define SIZED(n)                                                                                  \
  void __tsan_read##n(void* p) { access(p, n, n, READ, PC); }                                     \
  void __tsan_write##n(void* p) { access(p, n, n, WRITE, PC); }                                   \
  void __tsan_unaligned_read##n(void* p) { access(p, n, 1, READ, PC); }                           \
  void __tsan_unaligned_write##n(void* p) { access(p, n, 1, WRITE, PC); }                         \
  void __tsan_volatile_read##n(void* p) { access(p, n, n, READ, PC); }                            \
  void __tsan_volatile_write##n(void* p) { access(p, n, n, WRITE, PC); }
SIZED(1)
SIZED(2)
SIZED(4)
SIZED(8)
SIZED(16)
void __tsan_read_range(void* p, size_t n) { access(p, n, 1, READ, PC); }
void __tsan_write_range(void* p, size_t n) { access(p, n, 1, WRITE, PC); }
void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, 1, READ, PC);
  access(to, n, 1, WRITE, PC);
  return memcpy(to, from, n);
}
void* __tsan_memmove(void* to, const void* from, size_t n) {
  access(const_cast<void*>(from), n, 1, READ, PC);
  access(to, n, 1, WRITE, PC);
  return memmove(to, from, n);
}
void* __tsan_memset(void* to, int value, size_t n) {
  access(to, n, 1, WRITE, PC);
  return memset(to, value, n);
}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
void __tsan_vptr_read(void*) {}
void __tsan_vptr_update(void*, void*) {}

// An atomic operation is a moment at which other threads may have run.
#define ATOMIC_ACCESS(p, n, kind)             \
  do {                                        \
    if (lily_worker && lily_worker->stack) {  \
      pause_lane(*lily_worker);               \
      access((void*)(p), n, n, kind, PC);     \
    }                                         \
  } while (0)
#define ATOMICS(bits, T)                                                                                                    \
  T __tsan_atomic##bits##_load(const volatile T* p, int) {                                                                  \
    ATOMIC_ACCESS(p, sizeof(T), ATOMIC_LOAD);                                                                               \
    return *p;                                                                                                              \
  }                                                                                                                         \
  void __tsan_atomic##bits##_store(volatile T* p, T v, int) {                                                               \
    ATOMIC_ACCESS(p, sizeof(T), ATOMIC_STORE);                                                                              \
    *p = v;                                                                                                                 \
  }                                                                                                                         \
  T __tsan_atomic##bits##_exchange(volatile T* p, T v, int) { UPDATE(T, v) }                                                \
  T __tsan_atomic##bits##_fetch_add(volatile T* p, T v, int) { UPDATE(T, old + v) }                                         \
  T __tsan_atomic##bits##_fetch_sub(volatile T* p, T v, int) { UPDATE(T, old - v) }                                         \
  T __tsan_atomic##bits##_fetch_and(volatile T* p, T v, int) { UPDATE(T, old & v) }                                         \
  T __tsan_atomic##bits##_fetch_or(volatile T* p, T v, int) { UPDATE(T, old | v) }                                          \
  T __tsan_atomic##bits##_fetch_xor(volatile T* p, T v, int) { UPDATE(T, old ^ v) }                                         \
  int __tsan_atomic##bits##_compare_exchange_strong(volatile T* p, T* expected, T v, int, int) {                            \
    ATOMIC_ACCESS(p, sizeof(T), ATOMIC_UPDATE);                                                                             \
    const T old = *p;                                                                                                       \
    if (old == *expected) return *p = v, 1;                                                                                 \
    *expected = old;                                                                                                        \
    return 0;                                                                                                               \
  }                                                                                                                         \
  int __tsan_atomic##bits##_compare_exchange_weak(volatile T* p, T* expected, T v, int a, int b) {                          \
    return __tsan_atomic##bits##_compare_exchange_strong(p, expected, v, a, b);                                             \
  }                                                                                                                         \
  T __tsan_atomic##bits##_compare_exchange_val(volatile T* p, T expected, T v, int, int) {                                  \
    UPDATE(T, old == expected ? v : old)                                                                                    \
  }
#define UPDATE(T, value)                 \
  ATOMIC_ACCESS(p, sizeof(T), ATOMIC_UPDATE); \
  const T old = *p;                      \
  *p = (value);                          \
  return old;
ATOMICS(32, uint32_t)
ATOMICS(64, uint64_t)
void __tsan_atomic_thread_fence(int) {}
void __tsan_atomic_signal_fence(int) {}

// ---- calls of -fsanitize=bounds,shift,integer-divide-by-zero ---------------------------------------------------------------

struct Source {
  const char* file;
  uint32_t line, column;
};

static void undefined(const Source& at, uint32_t kind, uint64_t value) {
  Worker* w = lily_worker;
  if (!w || !w->stack) return;
  w->fault->kind = kind;
  w->fault->line = at.line;
  w->fault->offset = value;
  strncpy(w->fault->file, at.file ? at.file : "", sizeof w->fault->file - 1);
  fail(*w);
}

void __ubsan_handle_out_of_bounds(Source* at, uint64_t index) { undefined(*at, LILY_ARRAY_INDEX, index); }
void __ubsan_handle_shift_out_of_bounds(Source* at, uint64_t, uint64_t right) {
  strcpy(lily_worker->fault->name, "a shift by more bits than there are");
  undefined(*at, LILY_UNDEFINED, right);
}
void __ubsan_handle_divrem_overflow(Source* at, uint64_t, uint64_t right) {
  strcpy(lily_worker->fault->name, "an integer division by zero");
  undefined(*at, LILY_UNDEFINED, right);
}
}
