#include <thread>
#include <unordered_map>

#include "check.hpp"
#include "joestar/compact.hpp"

using namespace joestar;

namespace {

template <IdType Id>
struct Compacted {
  std::vector<Id> srcs, local;
  std::int64_t count;
  bool operator==(const Compacted&) const = default;
};

template <IdType Id>
Compacted<Id> run(const std::vector<Id>& dsts, const std::vector<Id>& indices, std::int64_t nodes, std::int64_t room) {
  Compacted<Id> out{std::vector<Id>(static_cast<std::size_t>(room), Id{-1}), std::vector<Id>(indices.size()), 0};
  out.count = compact(CompactTask<Id>{dsts, indices, out.srcs, out.local}, nodes);
  return out;
}

template <IdType Id>
Compacted<Id> expected(const std::vector<Id>& dsts, const std::vector<Id>& indices, std::int64_t room) {
  Compacted<Id> out{dsts, {}, 0};
  std::unordered_map<Id, Id> number;
  for (std::size_t i = 0; i < dsts.size(); ++i) number.emplace(dsts[i], static_cast<Id>(i));
  for (const Id node : indices) {
    const auto [found, fresh] = number.emplace(node, static_cast<Id>(out.srcs.size()));
    if (fresh) out.srcs.push_back(node);
    out.local.push_back(found->second < room ? found->second : Id{0});
  }
  out.count = static_cast<std::int64_t>(out.srcs.size());
  out.srcs.resize(static_cast<std::size_t>(room), out.count > 0 ? out.srcs[0] : Id{0});
  return out;
}

// With four threads and more, many edges take the parallel path.
template <IdType Id>
void matches_a_map() {
  std::mt19937 random(2);
  for (std::int64_t edges : {0, 1, 999, 300000}) {
    for (std::int64_t nodes : {1, 50, 100000}) {
      std::vector<Id> dsts(edges == 0 ? 0 : 17), indices(static_cast<std::size_t>(edges));
      for (Id& node : dsts) node = static_cast<Id>(random() % nodes);
      for (Id& node : indices) node = static_cast<Id>(random() % nodes);
      for (std::int64_t room : {std::int64_t{0}, std::int64_t{5}, std::int64_t{1000}, edges + 20}) {
        const auto got = test::for_thread_counts([&] { return run(dsts, indices, nodes, room); });
        CHECK(got == expected(dsts, indices, room));
      }
    }
  }
}

void stamps_wrap_around() {
  ClaimTable table(3);
  const auto first = table.next_stamp();
  CHECK(first == std::uint64_t{1} << 32);
  table.slots()[1] = first | 5;
  CHECK(table.next_stamp() == std::uint64_t{2} << 32);
}

void callers_do_not_share_a_table() {
  std::vector<std::thread> callers;
  std::atomic<int> wrong{0};
  for (int caller = 0; caller < 6; ++caller) {
    callers.emplace_back([&, caller] {
      std::mt19937 random(static_cast<unsigned>(caller));
      for (int repeat = 0; repeat < 30; ++repeat) {
        std::vector<std::int32_t> dsts(9), indices(500);
        for (auto& node : dsts) node = static_cast<std::int32_t>(random() % 200);
        for (auto& node : indices) node = static_cast<std::int32_t>(random() % 200);
        wrong += !(run(dsts, indices, 200, 600) == expected(dsts, indices, 600));
      }
    });
  }
  for (auto& caller : callers) caller.join();
  CHECK(wrong == 0);
}

}  // namespace

int main() {
  matches_a_map<std::int32_t>();
  matches_a_map<std::int64_t>();
  stamps_wrap_around();
  callers_do_not_share_a_table();
  return report("compact");
}
