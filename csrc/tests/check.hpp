#pragma once
// A small test harness: CHECK counts failures, main returns their number; random graphs to test with.

#include <cmath>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <random>
#include <vector>

#include "joestar/core.hpp"
#include "joestar/parallel.hpp"

inline int failures = 0;

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      ++failures;                                                                 \
      std::fprintf(stderr, "%s:%d: CHECK(%s)\n", __FILE__, __LINE__, #condition); \
    }                                                                             \
  } while (false)

inline int report(const char* name) {
  std::printf("%s: %s\n", name, failures == 0 ? "ok" : "FAILED");
  return failures == 0 ? 0 : 1;
}

namespace test {

template <joestar::IdType Id>
struct Graph {
  std::vector<std::int64_t> indptr;
  std::vector<Id> indices;

  joestar::Csc<Id> csc() const { return {indptr, indices}; }
  std::int64_t rows() const { return static_cast<std::int64_t>(indptr.size()) - 1; }
};

// Random in-degrees around `mean`, every fifth node isolated, node 1 a hub; sources in [0, num_src).
template <joestar::IdType Id>
Graph<Id> random_graph(std::int64_t rows, std::int64_t num_src, std::int64_t mean, unsigned seed) {
  std::mt19937 random(seed);
  Graph<Id> graph{{0}, {}};
  for (std::int64_t i = 0; i < rows; ++i) {
    std::int64_t degree = i % 5 == 4 ? 0 : static_cast<std::int64_t>(random() % static_cast<unsigned>(2 * mean + 1));
    if (i == 1) degree = 50 * mean;
    for (std::int64_t e = 0; e < degree; ++e) graph.indices.push_back(static_cast<Id>(random() % num_src));
    graph.indptr.push_back(static_cast<std::int64_t>(graph.indices.size()));
  }
  return graph;
}

template <class T>
std::vector<T> random_values(std::int64_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::uniform_real_distribution<double> uniform(-1.0, 1.0);
  std::vector<T> values(static_cast<std::size_t>(count));
  for (T& value : values) value = static_cast<T>(uniform(random));
  return values;
}

template <class A, class B>
bool close(const A& got, const B& expected, double tolerance) {
  if (got.size() != expected.size()) return false;
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double error = std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
    if (!(error <= tolerance * (1.0 + std::abs(static_cast<double>(expected[i]))))) return false;
  }
  return true;
}

// Whether f() ends in an error of this kind.
template <class Error = std::exception, class F>
bool throws(F&& f) {
  try {
    f();
  } catch (const Error&) {
    return true;
  }
  return false;
}

// f() gives the same for 1, 2 and 7 threads; returns it.
template <class F>
auto for_thread_counts(F&& f) {
  joestar::set_num_threads(1);
  const auto expected = f();
  for (int threads : {2, 7}) {
    joestar::set_num_threads(threads);
    CHECK(f() == expected);
  }
  joestar::set_num_threads(4);
  return expected;
}

}  // namespace test
