#include <algorithm>
#include <cmath>
#include <limits>

#include "check.hpp"
#include "joestar/dropout.hpp"

using namespace joestar;

namespace {

const SampleKey kKey{-7, 3, (std::int64_t{1} << 34) + 5, 9};

// Bit by bit: a random word of 24 digits, most significant first, is below q.
bool kept(HashState row, std::uint32_t q, std::int64_t column) {
  for (int i = kKeepDigits - 1; i >= 0; --i) {
    const auto j = static_cast<std::uint32_t>(column / 32 * 32 + i);
    const bool random = (draw(row.a, row.b, j) >> (column % 32) & 1U) != 0;
    const bool digit = (q >> i & 1U) != 0;
    if (digit && random) return true;    // m = r | m
    if (!digit && !random) return false;  // m = r & m
  }
  return false;
}

template <IdType Id>
void rows_follow_the_definition(std::uint32_t q, std::int64_t columns) {
  std::vector<Id> ids(203);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<Id>(i * 7919 % 1009);
  const std::int64_t words = (columns + 31) / 32;
  const auto bits = test::for_thread_counts([&] {
    std::vector<std::uint32_t> out(ids.size() * static_cast<std::size_t>(words), 0xDEADBEEFU);
    dropout_bits(std::span<const Id>(ids), kKey, KeepMask{q, words}, out.data());
    return out;
  });
  for (std::size_t i = 0; i < ids.size(); i += 11) {
    const HashState row = row_state(key_state(kKey), ids[i]);
    for (std::int64_t c = 0; c < columns; ++c) {
      const bool bit = (bits[i * static_cast<std::size_t>(words) + static_cast<std::size_t>(c / 32)] >> (c % 32) & 1U);
      CHECK(bit == kept(row, q, c));
    }
  }
}

void edges_follow_the_definition() {
  const auto graph = test::random_graph<std::int32_t>(97, 50, 6, 3);
  const std::int64_t edges = graph.csc().edges(), tail = 5, columns = 40, words = 2;
  std::vector<std::int32_t> dsts(97);
  for (std::size_t i = 0; i < dsts.size(); ++i) dsts[i] = static_cast<std::int32_t>(1000 - i);
  const std::uint32_t q = 0x4CCCCD;
  const auto bits = test::for_thread_counts([&] {
    std::vector<std::uint32_t> out(static_cast<std::size_t>((edges + tail) * words));
    edge_dropout_bits(std::span<const std::int64_t>(graph.indptr), edges + tail, std::span<const std::int32_t>(dsts),
                      kKey, KeepMask{q, words}, out.data());
    return out;
  });
  for (std::int64_t row = 0; row < graph.rows(); ++row) {
    for (std::int64_t e = graph.indptr[row]; e < graph.indptr[row + 1]; ++e) {
      HashState state = row_state(key_state(kKey), dsts[static_cast<std::size_t>(row)]);
      state.absorb(low_word(e - graph.indptr[row]));
      for (std::int64_t c = 0; c < columns; c += 3) {
        CHECK((bits[static_cast<std::size_t>(e * words + c / 32)] >> (c % 32) & 1U) == kept(state, q, c));
      }
    }
  }
}

void as_many_are_kept_as_asked() {
  std::vector<std::int64_t> ids(4000);
  for (std::size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<std::int64_t>(i);
  for (double keep : {0.5, 0.9, 0.3}) {
    std::vector<std::uint32_t> out(ids.size() * 4);
    const auto q = static_cast<std::uint32_t>(keep * (1 << kKeepDigits));
    dropout_bits(std::span<const std::int64_t>(ids), kKey, KeepMask{q, 4}, out.data());
    double ones = 0;
    for (const std::uint32_t word : out) ones += std::popcount(word);
    const double bits = static_cast<double>(out.size()) * 32;
    CHECK(std::abs(ones / bits - keep) < 5 * std::sqrt(keep * (1 - keep) / bits));
  }
}

void nothing_to_do() {
  const std::vector<std::int64_t> indptr{0};
  std::vector<std::uint32_t> out(3, 7);
  dropout_bits(std::span<const std::int32_t>(), kKey, KeepMask{1, 1}, out.data());
  CHECK(out[0] == 7);
  edge_dropout_bits(std::span<const std::int64_t>(indptr), 3, std::span<const std::int32_t>(), kKey, KeepMask{1, 1},
                    out.data());
  CHECK(out == std::vector<std::uint32_t>(3, 0));
}

// Column c is bit c / W of word c % W, whatever the width: lanes taken together, the rest, and rows of one word.
void masks_apply(std::int64_t columns) {
  const std::int64_t rows = 37, words = (columns + 31) / 32;
  std::vector<std::uint32_t> bits(static_cast<std::size_t>(rows * words));
  for (std::size_t i = 0; i < bits.size(); ++i) bits[i] = mix32(static_cast<std::uint32_t>(i) + 1U);
  std::vector<float> x(static_cast<std::size_t>(rows * columns)), gate(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] = static_cast<float>(i % 23) - 11.0F;
    gate[i] = static_cast<float>(i % 5) - 2.0F;
  }
  const std::vector<const float*> gates{nullptr, gate.data(), x.data()};
  for (const float* by : gates) {
    const auto y = test::for_thread_counts([&] {
      std::vector<float> out(x.size(), -77.0F);
      dropout_apply(x.data(), bits.data(), by, rows, columns, 2.5, out.data());
      return out;
    });
    for (std::int64_t i = 0; i < rows * columns; ++i) {
      const std::int64_t row = i / columns, c = i % columns;
      const std::uint32_t word = bits[static_cast<std::size_t>(row * words + c % words)];
      const bool keep = (word >> (c / words) & 1U) != 0 && (by == nullptr || by[i] > 0.0F);
      CHECK(y[static_cast<std::size_t>(i)] == (keep ? x[static_cast<std::size_t>(i)] * 2.5F : 0.0F));
    }
  }
}

void gradients_pass_where_the_result_is_positive() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const std::vector<float> grad{1.0F, -2.0F, 3.0F, 4.0F, 5.0F}, y{0.5F, 0.0F, -1.0F, 2.0F, nan};
  std::vector<float> out(5);
  relu_dropout_grad(grad.data(), y.data(), 5, 2.0, out.data());
  CHECK((out == std::vector<float>{2.0F, 0.0F, 0.0F, 8.0F, 10.0F}));
}

void nan_passes_relu() {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  for (std::int64_t columns : {1, 2, 8, 33, 70}) {
    const std::int64_t words = (columns + 31) / 32;
    const std::vector<float> x(static_cast<std::size_t>(columns), nan);
    const std::vector<std::uint32_t> bits(static_cast<std::size_t>(words), 0xFFFFFFFFU), none(bits.size(), 0U);
    std::vector<float> out(x.size());
    dropout_apply(x.data(), bits.data(), x.data(), 1, columns, 2.0, out.data());
    CHECK(std::all_of(out.begin(), out.end(), [](float value) { return std::isnan(value); }));
    dropout_apply(x.data(), none.data(), x.data(), 1, columns, 2.0, out.data());
    CHECK(std::all_of(out.begin(), out.end(), [](float value) { return value == 0.0F; }));
  }
}

}  // namespace

int main() {
  set_num_threads(4);
  for (std::uint32_t q : {1U, 1U << 23, 0x199999U, 0xE66666U, 0xFFFFFFU}) {
    rows_follow_the_definition<std::int32_t>(q, 1);
    rows_follow_the_definition<std::int64_t>(q, 70);
  }
  edges_follow_the_definition();
  as_many_are_kept_as_asked();
  for (std::int64_t columns : {1, 4, 31, 32, 33, 64, 65, 100, 128, 130, 256, 300}) masks_apply(columns);
  gradients_pass_where_the_result_is_positive();
  nan_passes_relu();
  nothing_to_do();
  return report("dropout");
}
