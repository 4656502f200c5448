#pragma once
// A small benchmark harness: named cases, the least time of several calls, a table and JSON.

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <ctime>
#include <functional>
#include <string>
#include <vector>

#include "joestar/parallel.hpp"

namespace bench {

// What one call works on: `edges` and the bytes that it must move at least.
struct Case {
  std::string name;
  std::int64_t edges;
  double bytes;
  std::function<void()> call;
};

struct Options {
  std::string only;       // part of the names to run; empty: all
  std::string json;       // file to write; empty: none
  double seconds = 0.5;   // per case
  std::int64_t calls = 0;  // exactly this many calls and no timing, for instruction counts; 0: by time
};

struct Result {
  const Case* of;
  double least, median;  // milliseconds
  double cpu;            // the same, of all threads together, in the call with the least
  std::int64_t calls;
};

inline Result measure(const Case& of, const Options& options) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  double cpu = 0;
  if (options.calls == 0) of.call();  // allocates what is kept between calls
  const auto end = Clock::now() + std::chrono::duration<double>(options.seconds);
  const auto more = [&] {
    const auto done = static_cast<std::int64_t>(times.size());
    return options.calls > 0 ? done < options.calls : done < 3 || Clock::now() < end;
  };
  while (more()) {
    const auto start = Clock::now();
    const std::clock_t cpu_start = std::clock();
    of.call();
    const double used = 1e3 * static_cast<double>(std::clock() - cpu_start) / CLOCKS_PER_SEC;
    cpu = times.empty() ? used : std::min(cpu, used);
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  return {&of, times.front(), times[times.size() / 2], cpu, static_cast<std::int64_t>(times.size())};
}

inline void write_json(const std::vector<Result>& results, const std::string& path) {
  std::FILE* file = std::fopen(path.c_str(), "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s\n", path.c_str());
    return;
  }
  std::fprintf(file, "{\"threads\": %d, \"backend\": \"%s\", \"rows\": [", joestar::num_threads(),
               joestar::parallel_backend());
  for (std::size_t i = 0; i < results.size(); ++i) {
    const Result& r = results[i];
    std::fprintf(file, "%s\n  {\"name\": \"%s\", \"edges\": %lld, \"ms\": %.6f, \"median_ms\": %.6f, \"calls\": %lld}",
                 i == 0 ? "" : ",", r.of->name.c_str(), static_cast<long long>(r.of->edges), r.least, r.median,
                 static_cast<long long>(r.calls));
  }
  std::fprintf(file, "\n]}\n");
  std::fclose(file);
}

inline int run(const std::vector<Case>& cases, const Options& options) {
  std::vector<Result> results;
  std::printf("%-44s %10s %9s %9s %9s %9s %8s %7s\n", "case", "edges", "least ms", "median", "cpu ms", "ns/edge",
              "GB/s", "calls");
  for (const Case& of : cases) {
    if (of.name.find(options.only) == std::string::npos) continue;
    results.push_back(measure(of, options));
    const Result& r = results.back();
    std::printf("%-44s %10lld %9.3f %9.3f %9.3f %9.2f %8.1f %7lld\n", of.name.c_str(), static_cast<long long>(of.edges),
                r.least, r.median, r.cpu, r.least * 1e6 / static_cast<double>(std::max<std::int64_t>(1, of.edges)),
                of.bytes / r.least / 1e6, static_cast<long long>(r.calls));
    std::fflush(stdout);
  }
  if (!options.json.empty()) write_json(results, options.json);
  return results.empty() ? 1 : 0;
}

}  // namespace bench
