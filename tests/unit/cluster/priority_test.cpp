// Operations of different priority in an in-process cluster: what goes before what, and that nothing else changes.
#include <algorithm>
#include <chrono>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/recorder.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;

constexpr std::size_t kChunk = 1024;

struct Layout {
  std::vector<int> node_of;
  std::vector<double> servers;
};
const std::vector<Layout> kLayouts = {{{0, 1}, {}}, {{0, 1, 2}, {}}, {{0, 0, 1, 1}, {}}, {{0, 1, 2}, {1, 1}}};

worker::Operation all_reduce(std::vector<float>& tensor, std::int8_t priority) {
  worker::Operation operation;
  operation.kind = schedule::Kind::kAllReduce;
  operation.dtype = core::DType::kFloat32;
  operation.op = core::ReduceOp::kSum;
  operation.output = {{reinterpret_cast<std::byte*>(tensor.data()), tensor.size() * sizeof(float)}};
  operation.priority = priority;
  return operation;
}

/// Chunks of bulk that are sent, between nodes and inside, while an allreduce of `chunks` chunks is under way beside
/// it.
std::size_t bulk_beside(const Layout& layout, std::size_t chunks, std::int8_t priority, std::uint64_t seed) {
  test::MovableClock clock;  // announcements then come after so many rounds
  ClusterOptions options;
  options.node_of = layout.node_of;
  options.servers = layout.servers;
  options.seed = seed;
  options.window_bytes = 4 * kChunk;
  core::GroupUid bulk_group;
  bool counting = false;
  std::size_t count = 0;
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int) -> std::unique_ptr<transport::Transport> {
    return std::make_unique<test::Recorder>(std::move(inner), [&](const wire::Message& message) {
      if (counting && message.as<wire::Data>() != nullptr && message.from.uid == bulk_group) ++count;
    });
  };
  Cluster cluster(options);
  const int size = cluster.size();
  bulk_group = cluster.open_group();
  const core::GroupUid group = cluster.open_group();
  const auto ranks = static_cast<std::size_t>(size);
  std::vector<std::vector<float>> bulk(ranks, std::vector<float>(2000 * kChunk / sizeof(float), 1.0F));
  std::vector<std::vector<float>> mine(ranks, std::vector<float>(chunks * kChunk / sizeof(float), 1.0F));
  int bulk_done = 0;
  int done = 0;
  for (int rank = 0; rank < size; ++rank)
    cluster.submit(bulk_group, rank, all_reduce(bulk[static_cast<std::size_t>(rank)], 0), 0,
                   [&](const worker::Outcome& outcome) { bulk_done += outcome.status.is_ok() ? 1 : 0; });
  for (int i = 0; i < 200; ++i) cluster.progress();
  counting = true;
  for (int rank = 0; rank < size; ++rank)
    cluster.submit(group, rank, all_reduce(mine[static_cast<std::size_t>(rank)], priority), 0,
                   [&](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
  const auto at = [&](const int& count_of) {
    return [&] {
      clock.pass(std::chrono::microseconds(20));
      return count_of == size;
    };
  };
  REQUIRE(cluster.run_until(at(done)));
  counting = false;
  if (priority > 0) CHECK(bulk_done == 0);
  REQUIRE(cluster.run_until(at(bulk_done)));
  for (const auto& all : {bulk, mine})
    for (const auto& tensor : all)
      CHECK(std::all_of(tensor.begin(), tensor.end(), [&](float x) { return x == static_cast<float>(size); }));
  return count;
}

}  // namespace

TEST_CASE("cluster/priority: beside what is urgent only as much bulk is sent as is under way", "[cluster][fast]") {
  constexpr std::size_t kUrgent = 60;
  for (const Layout& layout : kLayouts)
    for (std::uint64_t seed = 1; seed <= 3; ++seed) {
      const std::size_t equal = bulk_beside(layout, kUrgent, 0, seed);
      const std::size_t passed = bulk_beside(layout, kUrgent, 5, seed);
      INFO("nodes " << layout.node_of.size() << " servers " << layout.servers.size() << " seed " << seed << ": "
                    << equal << " chunks of bulk beside it, with priority " << passed);
      CHECK(passed * 3 < equal);
    }
}

TEST_CASE("cluster/priority: whatever the priorities, and if ranks differ, all get the sums", "[cluster][fast]") {
  for (const Layout& layout : kLayouts)
    for (std::uint64_t seed = 1; seed <= 8; ++seed) {
      ClusterOptions options;
      options.node_of = layout.node_of;
      options.servers = layout.servers;
      options.seed = seed;
      options.window_bytes = 4 * kChunk;
      Cluster cluster(options);
      const int size = cluster.size();
      const std::vector<core::GroupUid> groups = {cluster.open_group(), cluster.open_group()};
      std::mt19937_64 random(seed);
      constexpr std::size_t kOperations = 24;
      std::vector<std::size_t> elements;
      for (std::size_t i = 0; i < kOperations; ++i) elements.push_back(1 + random() % (i % 3 == 0 ? 40000 : 400));
      std::vector<std::vector<std::vector<float>>> tensors(kOperations);
      int done = 0;
      int failed = 0;
      std::vector<std::uint64_t> next(groups.size(), 0);
      for (std::size_t i = 0; i < kOperations; ++i) {
        const std::size_t g = random() % groups.size();
        const std::uint64_t sequence = next[g]++;
        for (int rank = 0; rank < size; ++rank) {
          tensors[i].emplace_back(elements[i], static_cast<float>(rank + 1));
        }
        for (int rank = 0; rank < size; ++rank) {
          cluster.submit(
              groups[g], rank,
              all_reduce(tensors[i][static_cast<std::size_t>(rank)], static_cast<std::int8_t>(random() % 256)),
              sequence, [&](const worker::Outcome& outcome) {
                ++done;
                failed += outcome.status.is_ok() ? 0 : 1;
              });
          cluster.progress();
        }
      }
      REQUIRE(cluster.run_until([&] { return done == size * static_cast<int>(kOperations); }));
      CHECK(failed == 0);
      const float sum = static_cast<float>(size * (size + 1)) / 2;
      for (const auto& of_ranks : tensors)
        for (const auto& tensor : of_ranks)
          REQUIRE(std::all_of(tensor.begin(), tensor.end(), [&](float x) { return x == sum; }));
    }
}
