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
    options.control = options.urgent_by_control = control;
    options.wrap = [this](std::unique_ptr<transport::Transport> inner,
                          int rank) -> std::unique_ptr<transport::Transport> {
      return std::make_unique<test::Recorder>(
          std::move(inner),
          [this, rank](const wire::Message& message, core::EngineId to) {
            if (rank != 2 && to != cluster->id(2)) return;
            permits_on_data += message.as<wire::Credit>() != nullptr || message.as<wire::Grant>() != nullptr ? 1 : 0;
          },
          [this, rank] { return paths_of(rank); });
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
  /// All ranks sum `bytes` of ones, `count` times at once: whether all got the sums.
  bool sums(core::GroupUid uid, std::uint64_t sequence, std::size_t bytes, int count = 1) {
    std::vector<std::vector<float>> tensors(3 * static_cast<std::size_t>(count),
                                            std::vector<float>(bytes / sizeof(float), 1.0F));
    int done = 0;
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      worker::Operation operation;
      operation.kind = schedule::Kind::kAllReduce;
      operation.dtype = core::DType::kFloat32;
      operation.op = core::ReduceOp::kSum;
      operation.output = {{reinterpret_cast<std::byte*>(tensors[i].data()), bytes}};
      cluster->submit(uid, static_cast<int>(i % 3), std::move(operation), sequence + i / 3,
                      [&](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
    }
    const bool all = cluster->run_until([&] {
      clock.pass(std::chrono::microseconds(10));  // streams announce themselves after a while
      return done == 3 * count;
    });
    return all && std::all_of(tensors.begin(), tensors.end(), [](const auto& tensor) {
             return std::all_of(tensor.begin(), tensor.end(), [](float x) { return x == 3.0F; });
           });
  }

  test::MovableClock clock;
  double round_trip_seconds = 0.05;
  double rate = 0;
  int permits_on_data = 0;  // credits and grants that went to or from rank 2 beside the data
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

TEST_CASE("cluster/far_paths: credit and grants go over the control connection while data is under way",
          "[cluster][fast]") {
  for (const std::size_t far_bytes : {std::size_t{8192}, std::size_t{100'000}, std::size_t{64} << 20}) {
    INFO("far_bytes " << far_bytes);
    FarRank scene(far_bytes, /*control=*/true);
    const core::GroupUid uid = scene.cluster->open_group();
    scene.round_trip_seconds = 0.0003;
    scene.rate = 25e6;
    REQUIRE(scene.sums(uid, 0, 200'000));
    scene.look();
    scene.permits_on_data = 0;
    REQUIRE(scene.sums(uid, 1, 200'000, 5));
    const int near = scene.permits_on_data;
    CHECK(near > 0);
    scene.round_trip_seconds = 0.05;
    scene.look();
    scene.permits_on_data = 0;
    REQUIRE(scene.sums(uid, 6, 200'000, 5));
    CHECK(5 * scene.permits_on_data < near);
    // Operations of many sizes, one after the other and at once, while the path changes.
    std::uint64_t sequence = 11;
    for (const std::size_t bytes : {4, 1000, 30'000, 4, 200'000, 65'536, 12}) {
      scene.round_trip_seconds = sequence % 2 == 0 ? 0.0003 : 0.05;
      scene.look();
      REQUIRE(scene.sums(uid, sequence, bytes, 3));
      sequence += 3;
    }
  }
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
