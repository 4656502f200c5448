#pragma once
// A small persistent pool of threads: the backend of parallel.hpp where ParlayLib is absent.

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <thread>
#include <vector>

#include "joestar/core.hpp"

namespace joestar {

// A non-owning reference to something callable without arguments.
class TaskRef {
 public:
  template <class F>
  explicit TaskRef(F& f) : object_(&f), call_([](void* object) { (*static_cast<F*>(object))(); }) {}
  void operator()() const { call_(object_); }

 private:
  void* object_;
  void (*call_)(void*);
};

JOESTAR_INLINE void spin_pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

class ThreadPool {
 public:
  // Runs `task` on the calling thread and on up to `helpers` others; returns when all of them have left it.
  // The task must not throw. Any number of threads may call run() at once.
  void run(int helpers, TaskRef task) {
    Job job{task, helpers, {}};
    {
      std::lock_guard lock(mutex_);
      grow(helpers);
      jobs_.push_back(&job);
      pending_.fetch_add(1, std::memory_order_release);
    }
    for (int i = 0; i < helpers; ++i) wake_.notify_one();
    task();
    {
      std::lock_guard lock(mutex_);
      if (job.wanted > 0) retire(&job);
    }
    for (int i = 0; i < kSpins && job.active.load(std::memory_order_relaxed) > 0; ++i) spin_pause();
    std::unique_lock lock(mutex_);
    done_.wait(lock, [&] { return job.active == 0; });
  }

 private:
  struct Job {
    TaskRef task;
    int wanted;                  // helpers that may still join
    std::atomic<int> active{0};  // helpers inside the task
  };

  static constexpr int kSpins = 1000;  // a few tens of microseconds: the gap between two parallel loops of one step

  void grow(int helpers) {
    while (static_cast<int>(workers_.size()) < helpers) workers_.emplace_back([this] { work(); });
  }

  void retire(Job* job) {
    jobs_.erase(std::find(jobs_.begin(), jobs_.end(), job));
    pending_.fetch_sub(1, std::memory_order_relaxed);
  }

  [[noreturn]] void work() {
    for (;;) {
      for (int i = 0; i < kSpins && pending_.load(std::memory_order_acquire) == 0; ++i) spin_pause();
      std::unique_lock lock(mutex_);
      wake_.wait(lock, [this] { return !jobs_.empty(); });
      Job* job = jobs_.front();
      if (--job->wanted == 0) retire(job);
      ++job->active;
      lock.unlock();
      job->task();
      lock.lock();
      if (--job->active == 0) done_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable wake_, done_;
  std::deque<Job*> jobs_;
  std::atomic<int> pending_{0};
  std::vector<std::jthread> workers_;
};

}  // namespace joestar
