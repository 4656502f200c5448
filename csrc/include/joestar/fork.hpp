#pragma once
// Process-wide objects that survive fork(): the child starts with a new one instead of a lock held by a lost thread.

#include <atomic>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

namespace joestar {

// The one T of this process. Never destroyed: threads may still use it while the process exits.
template <class T>
T& process_instance() {
  static std::atomic<T*> instance{nullptr};
#if defined(__unix__) || defined(__APPLE__)
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { instance.store(nullptr, std::memory_order_release); });
  (void)registered;
#endif
  T* current = instance.load(std::memory_order_acquire);
  if (current != nullptr) return *current;
  T* created = new T();
  if (instance.compare_exchange_strong(current, created, std::memory_order_acq_rel)) return *created;
  delete created;
  return *current;
}

}  // namespace joestar
