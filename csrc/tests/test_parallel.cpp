#include <atomic>
#include <numeric>
#include <stdexcept>
#include <thread>

#include "check.hpp"

#if defined(__unix__)
#include <sys/wait.h>
#include <unistd.h>
#endif

using namespace joestar;

namespace {

void every_item_once() {
  for (std::int64_t n : {0, 1, 7, 1000, 4097}) {
    std::vector<std::atomic<int>> visits(static_cast<std::size_t>(n));
    parallel_for(n, 16, [&](std::int64_t i) { ++visits[static_cast<std::size_t>(i)]; });
    for (const auto& count : visits) CHECK(count == 1);
  }
}

void sums_do_not_depend_on_threads() {
  const auto values = test::random_values<float>(100001, 3);
  test::for_thread_counts([&] {
    return parallel_reduce(100001, 1000, 0.0f, [&](std::int64_t i) { return values[static_cast<std::size_t>(i)]; });
  });
  const auto largest = parallel_reduce(
      1000, 10, std::int64_t{0}, [](std::int64_t i) { return (i * 37) % 1000; },
      [](std::int64_t a, std::int64_t b) { return std::max(a, b); });
  CHECK(largest == 999);
}

void scan_matches_partial_sums() {
  for (std::int64_t n : {0, 1, 5, 1000, 1001, 12345}) {
    const auto offsets = test::for_thread_counts([&] {
      std::vector<std::int64_t> out(static_cast<std::size_t>(n) + 1, -1);
      const auto total = exclusive_scan(n, 100, [](std::int64_t i) { return i % 7; }, out);
      CHECK(total == out.back());
      return out;
    });
    std::int64_t sum = 0;
    for (std::int64_t i = 0; i < n; sum += i++ % 7) CHECK(offsets[static_cast<std::size_t>(i)] == sum);
    CHECK(offsets.back() == sum);
  }
}

void rows_and_edges_are_covered_once() {
  const auto graph = test::random_graph<std::int32_t>(997, 997, 6, 1);
  for (std::int64_t grain : {1, 50, 100000}) {
    std::vector<std::atomic<int>> rows(997), edges(graph.indices.size());
    parallel_rows(graph.indptr, grain, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t i = first; i < last; ++i) ++rows[static_cast<std::size_t>(i)];
    });
    parallel_edges(graph.indptr, grain, [&](std::int64_t row, std::int64_t first, std::int64_t last) {
      CHECK(graph.indptr[static_cast<std::size_t>(row)] <= first);
      CHECK(last <= graph.indptr[static_cast<std::size_t>(row) + 1]);
      for (std::int64_t e = first; e < last; ++e) ++edges[static_cast<std::size_t>(e)];
    });
    for (const auto& count : rows) CHECK(count == 1);
    for (const auto& count : edges) CHECK(count == 1);
  }
}

void nested_loops_run() {
  std::atomic<int> total{0};
  parallel_for(20, 1, [&](std::int64_t) { parallel_for(30, 1, [&](std::int64_t) { ++total; }); });
  CHECK(total == 600);
}

void exceptions_reach_the_caller() {
  for (int repeat = 0; repeat < 20; ++repeat) {
    bool caught = false;
    try {
      parallel_for(1000, 1, [](std::int64_t i) {
        if (i == 137) throw std::runtime_error("137");
      });
    } catch (const std::runtime_error& error) {
      caught = std::string(error.what()) == "137";
    }
    CHECK(caught);
  }
  every_item_once();
}

void several_callers_at_once() {
  std::vector<std::thread> callers;
  std::atomic<std::int64_t> total{0};
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&] {
      for (int repeat = 0; repeat < 50; ++repeat) {
        total += parallel_reduce(5000, 100, std::int64_t{0}, [](std::int64_t i) { return i; });
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(total == std::int64_t{6} * 50 * 5000 * 4999 / 2);
}

void a_forked_child_has_threads_of_its_own() {
#if defined(__unix__) && !defined(__SANITIZE_THREAD__)
  every_item_once();
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    every_item_once();
    _exit(failures == 0 ? 0 : 1);
  }
  int status = -1;
  waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
#endif
}

}  // namespace

int main() {
  set_num_threads(4);
  CHECK(num_threads() == 4);
  set_num_threads(0);
  CHECK(num_threads() == 1);
  set_num_threads(4);
  every_item_once();
  sums_do_not_depend_on_threads();
  scan_matches_partial_sums();
  rows_and_edges_are_covered_once();
  nested_loops_run();
  exceptions_reach_the_caller();
  several_callers_at_once();
  a_forked_child_has_threads_of_its_own();
  return report("parallel");
}
