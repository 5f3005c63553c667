#include <algorithm>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hybridps/wire/message.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"

// One rank's contributions to owners of unequal shares leave at one pace (Worker::pace).
namespace {

using namespace hybridps;

/// Notes the spans of the contributions that go through it, in order.
class Recorder final : public transport::Transport {
 public:
  Recorder(std::unique_ptr<transport::Transport> inner, std::vector<std::uint32_t>& pushes)
      : inner_(std::move(inner)), pushes_(pushes) {}
  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> memory) override { return inner_->attach(memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    core::Result<transport::Endpoint*> endpoint = inner_->connect(peer, address);
    if (!endpoint.is_ok()) return endpoint;
    auto& noted = endpoints_[peer];
    if (!noted) noted = std::make_unique<Noted>(*endpoint.value(), pushes_);
    return static_cast<transport::Endpoint*>(noted.get());
  }
  transport::Endpoint* find(core::EngineId peer) noexcept override { return inner_->find(peer); }
  std::size_t progress() override { return inner_->progress(); }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return inner_->arm(); }
  bool has_unsent() const noexcept override { return inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { inner_->set_receiver(receiver); }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }

 private:
  struct Noted final : transport::Endpoint {
    Noted(transport::Endpoint& to, std::vector<std::uint32_t>& list) : inner(to), pushes(list) {}
    core::Status send(std::span<const std::byte> bytes, const transport::Buffer& payload, std::size_t payload_bytes,
                      transport::SendDone done) override {
      const core::Result<wire::Message> message = wire::decode(bytes);
      const auto* data = message.is_ok() ? message.value().as<wire::Data>() : nullptr;
      if (data != nullptr && data->chunk.stage == wire::Stage::kPush) pushes.push_back(data->chunk.span);
      return inner.send(bytes, payload, payload_bytes, std::move(done));
    }
    core::EngineId peer() const noexcept override { return inner.peer(); }
    void close(core::Status cause) noexcept override { inner.close(std::move(cause)); }
    transport::Endpoint& inner;
    std::vector<std::uint32_t>& pushes;
  };
  std::unique_ptr<transport::Transport> inner_;
  std::vector<std::uint32_t>& pushes_;
  std::map<core::EngineId, std::unique_ptr<Noted>> endpoints_;
};

TEST_CASE("engine/pace: contributions to large and small owners leave together", "[engine][fast]") {
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
    return std::make_unique<Recorder>(std::move(inner), pushes);
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
