// Memory for the frames of Python's functions, which CPython gives back too soon.
//
// Frames lie in chunks of 16 KiB, mapped by the allocator of arenas. Calls that reach the end of a chunk map the next
// one, and unmap it when they return: a loop that happens to run at such a depth of the stack maps, clears and unmaps
// 16 KiB for every call that it makes. Tracing has a deep stack: how much it loses is chance, in the tests of passes a
// seventh of their time. A few chunks stay here.
#include <atomic>
#include <cstddef>

#include "bindings.hpp"

namespace joestar::bindings {
namespace {

#if !defined(PYPY_VERSION) && !defined(Py_GIL_DISABLED)

constexpr std::size_t kChunk = 16 * 1024;  // DATA_STACK_CHUNK_SIZE in CPython's pystate.c
constexpr int kMost = 16;

PyObjectArenaAllocator before;
void* kept[kMost];
int count = 0;
long long reused = 0;
// Interpreters with a lock of their own share the allocator. Nobody waits: who finds it taken asks the one before.
std::atomic_flag taken = ATOMIC_FLAG_INIT;

void* allocate(void*, std::size_t size) {
  if (size == kChunk && !taken.test_and_set(std::memory_order_acquire)) {
    void* const chunk = count > 0 ? kept[--count] : nullptr;
    reused += chunk != nullptr;
    taken.clear(std::memory_order_release);
    if (chunk != nullptr) return chunk;
  }
  return before.alloc(before.ctx, size);
}

void release(void*, void* chunk, std::size_t size) {
  if (size == kChunk && !taken.test_and_set(std::memory_order_acquire)) {
    const bool room = count < kMost;
    if (room) kept[count++] = chunk;
    taken.clear(std::memory_order_release);
    if (room) return;
  }
  before.free(before.ctx, chunk, size);
}

bool keep_stack_chunks() {
  static const bool kept_from_now_on = [] {
    PyObject_GetArenaAllocator(&before);
    PyObjectArenaAllocator ours{nullptr, &allocate, &release};
    PyObject_SetArenaAllocator(&ours);
    return true;
  }();
  return kept_from_now_on;
}

long long stack_chunks_reused() { return reused; }

#else

bool keep_stack_chunks() { return false; }
long long stack_chunks_reused() { return 0; }

#endif

}  // namespace

void bind_stack_chunks(py::module_& m) {
  m.def("keep_stack_chunks", &keep_stack_chunks,
        "Lets this whole process keep up to 256 KiB for the frames of Python's functions; False where it cannot.");
  m.def("stack_chunks_reused", &stack_chunks_reused, "How many pieces of 16 KiB were not mapped anew since then.");
}

}  // namespace joestar::bindings
