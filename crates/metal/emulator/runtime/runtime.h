// What compiled kernels and the Rust side call: threads of a threadgroup as fibers, collectives between them, tracked memory.
//
// One process-wide runtime (runtime.cpp, tracker.cpp) is loaded once; every compiled kernel file is a shared library of its
// own that finds these symbols in it. Structures here are mirrored field by field in `src/emulator/ffi.rs`.
#pragma once

#include <stddef.h>
#include <stdint.h>

enum { LILY_SIMD_WIDTH = 32, LILY_MAX_THREADS = 1024, LILY_SLOT_BYTES = 64 };

// Which memory a barrier orders, as `mem_flags` of Metal.
enum { LILY_MEM_DEVICE = 1, LILY_MEM_THREADGROUP = 2 };

extern "C" {

// ---- what an entry point is given -------------------------------------------------------------------------------------

// What the threads of a threadgroup have in common.
struct LilyGroup {
  void* const* buffers;      // by index of [[buffer(i)]]
  void* const* threadgroup;  // by index of [[threadgroup(i)]]
  uint32_t threads[3];       // of a threadgroup
  uint32_t groups[3];        // of the grid
  uint32_t group[3];         // this threadgroup
};
// Where a thread stands. An entry point makes a kernel's arguments of it.
struct LilyThread {
  const LilyGroup* of;
  uint32_t index;            // in its threadgroup
};
typedef void (*LilyEntry)(const LilyThread*);

// ---- what kernels call, through the shim -------------------------------------------------------------------------------

// `scope`: 0 the threadgroup, 1 the SIMD-group. `line` is the call's own, for messages and to tell barriers apart.
void lily_barrier(int scope, unsigned memory, int line);

struct LilyExchange {
  const unsigned char* slots;  // LILY_SLOT_BYTES for each lane
  const unsigned char* result; // what `finish` wrote
  uint32_t active;             // lanes that took part
  uint32_t lane;               // the caller's
};
typedef void (*LilyFinish)(const unsigned char* slots, uint32_t active, unsigned char* result);
// All lanes of the SIMD-group that have not returned give `bytes` bytes; the last to come runs `finish`, once.
LilyExchange lily_exchange(const void* value, size_t bytes, LilyFinish finish, const char* name, int line);
// A lane that took no part was asked for its value.
[[noreturn]] void lily_inactive_lane(const char* name, int line, unsigned lane);

// Something is used as it must not be; `what` says it in at most 63 characters.
[[noreturn]] void lily_misuse(const char* what);
// The calling thread, by its index in the threadgroup, and how many threads that has.
unsigned lily_index();
unsigned lily_threads();

// The threadgroup variable of declaration `site`, the same bytes for all threads of a threadgroup.
void* lily_threadgroup_variable(unsigned site, size_t bytes, size_t alignment);

// While a library is loaded: it has a threadgroup variable of so many bytes at declaration `site`.
int lily_declare_variable(unsigned site, size_t bytes);
// The lane of the calling thread.
unsigned lily_lane();

// ---- what the Rust side calls ------------------------------------------------------------------------------------------

struct LilyVariable {
  uint32_t site;
  uint64_t bytes;
};
// Hands out what was declared since the last call, at most `count`; returns how many there were.
size_t lily_take_declared(LilyVariable* to, size_t count);

// The loaded library that has this symbol: where it lies. 0 where there is none.
int lily_image(const void* symbol, const unsigned char** base, size_t* bytes);

// Memory of a device buffer and what is known about its bytes. `data` is of the caller.
struct LilyBuffer;
LilyBuffer* lily_buffer_new(unsigned char* data, size_t bytes, int tracked, int read_only);
void lily_buffer_free(LilyBuffer*);
// The host (or a transfer) wrote here.
void lily_buffer_written(LilyBuffer*, size_t from, size_t bytes);
// What is known about bytes of one place becomes true of another: bytes nobody wrote stay so when they are copied.
void lily_buffer_copied(LilyBuffer* to, size_t to_at, const LilyBuffer* from, size_t from_at, size_t bytes);

// Bytes that a dispatch may touch: [begin, end) of a buffer, sorted, disjoint.
struct LilyTouch {
  LilyBuffer* buffer;  // null for bytes that were passed by value
  const unsigned char* begin;
  const unsigned char* end;
  uint32_t reads, writes;
};

enum LilyFaultKind {
  LILY_NONE = 0,
  LILY_RACE,
  LILY_OUT_OF_BOUNDS,
  LILY_UNWRITTEN,
  LILY_DIVERGENT_BARRIER,
  LILY_DIVERGENT_COLLECTIVE,
  LILY_UNDECLARED,
  LILY_READ_ONLY,
  LILY_MISALIGNED,
  LILY_THREADGROUP_MEMORY,
  LILY_INACTIVE_LANE,
  LILY_ARRAY_INDEX,
  LILY_UNDEFINED,
  LILY_MISUSE,
};
// What went wrong, in numbers; the Rust side makes sentences and lines of it.
struct LilyFault {
  uint32_t kind;
  uint32_t group[3];        // threadgroup of `thread`
  uint32_t thread;
  uint32_t other_thread;    // for races, and barriers that others wait at; ~0 where it is not known
  uint32_t same_group;      // whether `other_thread` is of the same threadgroup
  uint32_t writes, other_writes;
  uint32_t line, other_line;  // where the runtime was told; else 0 and the addresses below count
  const void* pc;
  const void* other_pc;
  const void* address;
  uint32_t bytes;
  uint32_t space;           // LILY_MEM_*, or 0 where the address is of neither
  LilyBuffer* buffer;
  uint64_t offset;          // from the start of `buffer`, or of the threadgroup memory
  uint64_t size;            // of what was reached into or asked for
  char name[64];            // of a collective
  char file[256];           // where the compiler's own checks name one
};

struct LilyDispatch {
  LilyEntry entry;
  void* const* buffers;
  const uint32_t* threadgroup_bytes;
  uint32_t threadgroup_count;
  uint32_t threads[3];
  uint32_t groups[3];
  const LilyTouch* touches;
  size_t touch_count;
  LilyBuffer* const* bound;  // every buffer that is an argument
  size_t bound_count;
  const unsigned char* image;  // the kernels' library in memory: its constants may be read
  size_t image_bytes;
  uint64_t seed;
  uint32_t threadgroup_limit;
  uint32_t tracked;            // whether the kernels were compiled to be
};
// Runs a dispatch on the calling thread. 0, or 1 and `fault`.
int lily_dispatch(const LilyDispatch*, LilyFault* fault);
}
