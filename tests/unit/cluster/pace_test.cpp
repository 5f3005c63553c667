#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hybridps/wire/message.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/recorder.h"

// One rank's contributions to owners of unequal shares leave at one pace (Worker::pace).
namespace {

using namespace hybridps;

TEST_CASE("cluster/pace: contributions to large and small owners leave together", "[cluster][fast]") {
  // Ranks own 13 chunks each, the server 39; all fit into the windows, so nothing but the pace holds them up.
  constexpr std::size_t kChunk = 1024;
  constexpr std::size_t kChunks = 78;
  std::vector<std::uint32_t> pushes;
  test::ClusterOptions options;
  options.node_of = {0, 1, 2};
  options.servers = {3.0};
  options.chunk_bytes = kChunk;
  options.eager_bytes = 1 << 20;
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int rank) -> std::unique_ptr<transport::Transport> {
    if (rank != 0) return inner;
    return std::make_unique<test::Recorder>(std::move(inner), [&](const wire::Message& message) {
      const auto* data = message.as<wire::Data>();
      if (data != nullptr && data->chunk.stage == wire::Stage::kPush) pushes.push_back(data->chunk.span);
    });
  };
  test::Cluster cluster(options);
  const core::GroupUid uid = cluster.open_group();
  std::vector<std::vector<float>> tensors(3, std::vector<float>(kChunks * kChunk / sizeof(float), 1.0F));
  int done = 0;
  for (int rank = 0; rank < 3; ++rank) {
    worker::Operation operation;
    operation.kind = schedule::Kind::kAllReduce;
    operation.dtype = core::DType::kFloat32;
    operation.op = core::ReduceOp::kSum;
    auto& tensor = tensors[static_cast<std::size_t>(rank)];
    operation.output = {{reinterpret_cast<std::byte*>(tensor.data()), tensor.size() * sizeof(float)}};
    cluster.submit(uid, rank, std::move(operation), 0, [&](const worker::Outcome& outcome) {
      CHECK(outcome.status.is_ok());
      ++done;
    });
  }
  REQUIRE(cluster.run_until([&] { return done == 3; }));
  for (const auto& tensor : tensors)
    CHECK(std::all_of(tensor.begin(), tensor.end(), [](float x) { return x == 3.0F; }));

  const std::map<std::uint32_t, double> chunks = {{1, 13}, {2, 13}, {3, 39}};
  REQUIRE(pushes.size() == 65);
  std::map<std::uint32_t, double> parts;
  for (const auto& [span, count] : chunks) parts[span] = 0;
  for (const std::uint32_t span : pushes) {
    parts.at(span) += 1 / chunks.at(span);
    const auto by_part = [](const auto& a, const auto& b) { return a.second < b.second; };
    const auto [least, most] = std::minmax_element(parts.begin(), parts.end(), by_part);
    CHECK(most->second - least->second <= 8.0 / 39 + 1.0 / 13 + 1e-9);
  }
  for (const auto& [span, part] : parts) CHECK(part > 0.999);
}

}  // namespace
