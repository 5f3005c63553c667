// Paths of long delay in an in-process cluster: what may be under way on them, and that results stay the same.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "hybridps/schedule/far_window.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/recorder.h"

namespace {

using namespace hybridps;
using schedule::FarWindow;
using test::Cluster;
using test::ClusterOptions;

// Three nodes. Rank 2 is far from the others.
struct FarRank {
  explicit FarRank(std::size_t far_bytes, bool control = false) {
    options.node_of = {0, 1, 2};
    options.window_bytes = 4096;
    options.pool_extra_bytes = std::size_t{64} << 20;
    options.far_bytes = far_bytes;
    options.control = control;
    options.wrap = [this](std::unique_ptr<transport::Transport> inner,
                          int rank) -> std::unique_ptr<transport::Transport> {
      return std::make_unique<test::Recorder>(
          std::move(inner), [](const wire::Message&) {}, [this, rank] { return paths_of(rank); });
    };
    cluster = std::make_unique<Cluster>(options);
  }
  std::vector<transport::PathInfo> paths_of(int rank) const {
    std::vector<transport::PathInfo> paths;
    for (int peer = 0; cluster != nullptr && peer < 3; ++peer) {
      if (peer == rank) continue;
      const bool is_far = peer == 2 || rank == 2;
      const double seconds = is_far ? round_trip_seconds : 0.0003;
      paths.push_back({cluster->id(peer), seconds, seconds, rate, 0});
    }
    return paths;
  }
  void look() {
    clock.pass(std::chrono::milliseconds(60));
    for (int i = 0; i < 20; ++i) cluster->progress();
  }
  std::int64_t window(int from, int to) {
    const auto flow = cluster->at(from).outbox().flow_of(cluster->id(to));
    return flow ? flow->window_bytes : 0;
  }
  /// All ranks sum `bytes` of ones: whether all got the sum.
  bool sums(core::GroupUid uid, std::uint64_t sequence, std::size_t bytes) {
    std::vector<std::vector<float>> tensors(3, std::vector<float>(bytes / sizeof(float), 1.0F));
    int done = 0;
    for (int rank = 0; rank < 3; ++rank) {
      worker::Operation operation;
      operation.kind = schedule::Kind::kAllReduce;
      operation.dtype = core::DType::kFloat32;
      operation.op = core::ReduceOp::kSum;
      auto& tensor = tensors[static_cast<std::size_t>(rank)];
      operation.output = {{reinterpret_cast<std::byte*>(tensor.data()), bytes}};
      cluster->submit(uid, rank, std::move(operation), sequence,
                      [&](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
    }
    const bool all = cluster->run_until([&] { return done == 3; });
    return all && std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
             return std::all_of(tensor.begin(), tensor.end(), [](float x) { return x == 3.0F; });
           });
  }

  test::MovableClock clock;
  double round_trip_seconds = 0.05;
  double rate = 0;
  ClusterOptions options;
  std::unique_ptr<Cluster> cluster;
};

}  // namespace

TEST_CASE("cluster/far_paths: windows to a far peer follow its path, others do not", "[cluster][fast]") {
  FarRank scene(std::size_t{64} << 20);
  const core::GroupUid uid = scene.cluster->open_group();
  REQUIRE(scene.sums(uid, 0, 200'000));
  scene.look();
  CHECK(scene.window(0, 2) == FarWindow::kBytesMin);
  CHECK(scene.window(2, 0) == FarWindow::kBytesMin);
  CHECK(scene.window(0, 1) <= static_cast<std::int64_t>(scene.options.eager_bytes));
  scene.rate = 25e6;
  scene.look();
  const std::int64_t wide = 5'000'000 + static_cast<std::int64_t>(FarWindow::kBytesMin);  // four times 1.25 MB
  CHECK(scene.window(0, 2) == wide);
  CHECK(scene.window(0, 1) <= static_cast<std::int64_t>(scene.options.eager_bytes));
  REQUIRE(scene.sums(uid, 1, 200'000));
  CHECK(scene.window(0, 2) == wide);
  scene.round_trip_seconds = 0.0003;  // another way was found
  scene.look();
  CHECK(scene.window(0, 2) <= static_cast<std::int64_t>(scene.options.eager_bytes));
  REQUIRE(scene.sums(uid, 2, 200'000));
}

TEST_CASE("cluster/far_paths: the peer's own limit holds", "[cluster][fast]") {
  FarRank scene(100'000);
  const core::GroupUid uid = scene.cluster->open_group();
  scene.rate = 25e6;
  REQUIRE(scene.sums(uid, 0, 200'000));
  scene.look();
  CHECK(scene.window(0, 2) == 100'000);
  REQUIRE(scene.sums(uid, 1, 1'000'000));
}
