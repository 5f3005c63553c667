// Steps of CrossBarrier on cards with a rate, in simulated time: what is left of the gain that its order promises.
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/shaped_transport.h"

namespace {

using namespace hybridps;
using core::Clock;
using Seconds = std::chrono::duration<double>;

constexpr int kNodes = 4;
constexpr int kLayers = 32;
constexpr std::size_t kLayerBytes = 1024 * 1024;
constexpr double kRate = 62.5e6;  // bytes/s of a card: a layer takes 25 ms
constexpr int kSteps = 3;

core::Duration of(Seconds seconds) { return std::chrono::duration_cast<core::Duration>(seconds); }

/// A rank whose forward waits for each layer's sum, and whose backward makes them from the last to the first.
struct Rank {
  bool forward = true;
  int layer = 0;
  int steps = 0;
  std::uint64_t next = 0;  // operation
  bool computes = false;
  core::TimePoint until{};
  std::vector<bool> has_sum = std::vector<bool>(kLayers, true);
  std::vector<std::vector<float>> gradients =
      std::vector<std::vector<float>>(kLayers, std::vector<float>(kLayerBytes / sizeof(float), 1.0F));
  core::TimePoint first_step_over{};
  core::TimePoint over{};
};

class Training {
 public:
  /// `compute`: of a layer, forward as backward.
  Training(Seconds compute, bool by_priority) : compute_(compute), by_priority_(by_priority), cluster_(options()) {
    group_ = cluster_.open_group();
  }

  /// Seconds of a step, on the slowest rank.
  double step_seconds() {
    bool is_over = false;
    while (!is_over) {
      is_over = true;
      for (int rank = 0; rank < kNodes; ++rank) is_over = advance(rank) && is_over;
      for (int round = 0; round < 50 && progress() > 0; ++round) {
      }
      clock_.pass(std::chrono::microseconds(25));
    }
    Seconds longest{};
    for (const Rank& rank : ranks_) longest = std::max(longest, Seconds(rank.over - rank.first_step_over) / kSteps);
    return longest.count();
  }
  /// All sums that are under way come.
  bool drain() {
    return cluster_.run_until([&] {
      clock_.pass(std::chrono::microseconds(100));
      for (const Rank& rank : ranks_)
        for (const bool has : rank.has_sum)
          if (!has) return false;
      return true;
    });
  }

 private:
  test::ClusterOptions options() {
    test::ClusterOptions o;
    for (int node = 0; node < kNodes; ++node) o.node_of.push_back(node);
    o.chunk_bytes = 32 * 1024;
    o.eager_bytes = 512 * 1024;
    o.grant_chunks = 4;
    o.wrap = [this](std::unique_ptr<transport::Transport> inner, int rank) -> std::unique_ptr<transport::Transport> {
      return std::make_unique<test::ShapedTransport>(std::move(inner),
                                                     core::EngineId{1000 + static_cast<std::uint64_t>(rank)}, cards_);
    };
    return o;
  }
  std::size_t progress() {
    std::size_t did = 0;
    for (int rank = 0; rank < kNodes; ++rank) did += cluster_.at(rank).progress();
    return did;
  }
  // True: it has made all its steps.
  bool advance(int number) {
    Rank& rank = ranks_[static_cast<std::size_t>(number)];
    while (rank.steps <= kSteps) {
      if (rank.computes) {
        if (Clock::now() < rank.until) return false;
        rank.computes = false;
        after_layer(number, rank);
      } else if (rank.forward && !rank.has_sum[static_cast<std::size_t>(rank.layer)]) {
        return false;
      } else {
        rank.computes = true;
        rank.until = Clock::now() + of(compute_);
      }
    }
    return true;
  }
  void after_layer(int number, Rank& rank) {
    if (rank.forward) {
      if (++rank.layer < kLayers) return;
      rank.forward = false;
      rank.layer = kLayers - 1;
      return;
    }
    all_reduce(number, rank);
    if (--rank.layer >= 0) return;
    rank.forward = true;
    rank.layer = 0;
    if (rank.steps++ == 0) rank.first_step_over = Clock::now();
    rank.over = Clock::now();
  }
  void all_reduce(int number, Rank& rank) {
    const auto layer = static_cast<std::size_t>(rank.layer);
    rank.has_sum[layer] = false;
    worker::Operation operation;
    operation.kind = schedule::Kind::kAllReduce;
    operation.dtype = core::DType::kFloat32;
    operation.op = core::ReduceOp::kAvg;
    operation.output = {{reinterpret_cast<std::byte*>(rank.gradients[layer].data()), kLayerBytes}};
    if (by_priority_) operation.priority = static_cast<std::int8_t>(100 - 99 * rank.layer / (kLayers - 1));
    cluster_.submit(group_, number, std::move(operation), rank.next++, [&rank, layer](const worker::Outcome& outcome) {
      if (!outcome.status.is_ok()) FAIL(outcome.status.message());
      if (rank.gradients[layer].front() != 1.0F || rank.gradients[layer].back() != 1.0F) FAIL("a wrong sum");
      rank.has_sum[layer] = true;
    });
  }

  test::MovableClock clock_;
  const Seconds compute_;
  const bool by_priority_;
  const std::shared_ptr<test::Cards> cards_ = std::make_shared<test::Cards>(kRate);
  test::Cluster cluster_;
  core::GroupUid group_;
  std::vector<Rank> ranks_ = std::vector<Rank>(kNodes);
};

double step_seconds(Seconds compute, bool by_priority) {
  Training training(compute, by_priority);
  const double seconds = training.step_seconds();
  CHECK(training.drain());
  return seconds;
}

}  // namespace

TEST_CASE("cluster/overlap: forward hides what backward does not, on a card that is as busy as the ranks",
          "[cluster]") {
  // Each card sends, and takes, 2 (n - 1) / n of what there is.
  const double communication = 1.5 * kLayers * kLayerBytes / kRate;
  const Seconds compute(communication / 2 / kLayers);
  const double limit = communication * (1.0 + 1.0 / kLayers);  // of either kind, and the first layer's gradient alone
  const double in_order = step_seconds(compute, false);
  const double by_priority = step_seconds(compute, true);
  INFO("limit " << limit << ", in order of backward " << in_order << ", by priority " << by_priority);
  CHECK(by_priority < 1.16 * limit);  // messages go whole through these cards: more than that is not reached here
  CHECK(in_order > 1.5 * limit);
}
