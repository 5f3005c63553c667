#include <functional>
#include <map>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"

// Who learns that an operation is over may end the process: nothing of it may still wait for company in a transport.
namespace {

using namespace hybridps;

/// Keeps what is sent until the next progress(), or send_now(), as transport/tcp does.
class Keeper final : public transport::Transport {
 public:
  explicit Keeper(std::unique_ptr<transport::Transport> inner) : inner_(std::move(inner)) {}
  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> memory) override { return inner_->attach(memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    core::Result<transport::Endpoint*> endpoint = inner_->connect(peer, address);
    if (!endpoint.is_ok()) return endpoint;
    auto& keeping = endpoints_[peer];
    if (!keeping) keeping = std::make_unique<Keeping>(*endpoint.value(), kept_);
    return static_cast<transport::Endpoint*>(keeping.get());
  }
  transport::Endpoint* find(core::EngineId peer) noexcept override { return inner_->find(peer); }
  std::size_t progress() override {
    const std::size_t did = kept_.size();
    send_now();
    return did + inner_->progress();
  }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return kept_.empty() && inner_->arm(); }
  void send_now() noexcept override {
    for (auto& send : std::exchange(kept_, {})) send();
  }
  bool has_unsent() const noexcept override { return !kept_.empty() || inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { inner_->set_receiver(receiver); }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }

 private:
  using Kept = std::vector<std::function<void()>>;
  struct Keeping final : transport::Endpoint {
    Keeping(transport::Endpoint& to, Kept& list) : inner(to), kept(list) {}
    core::Status send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                      transport::SendDone done) override {
      auto shared = std::make_shared<transport::SendDone>(std::move(done));
      kept.push_back([this, bytes = std::vector<std::byte>(header.begin(), header.end()), payload, payload_bytes,
                      shared] { (void)inner.send(bytes, payload, payload_bytes, std::move(*shared)); });
      return core::Status::ok();
    }
    core::EngineId peer() const noexcept override { return inner.peer(); }
    void close(core::Status cause) noexcept override { inner.close(std::move(cause)); }
    transport::Endpoint& inner;
    Kept& kept;
  };
  std::unique_ptr<transport::Transport> inner_;
  std::map<core::EngineId, std::unique_ptr<Keeping>> endpoints_;
  Kept kept_;
};

}  // namespace

TEST_CASE("engine/send_now: ranks that end with an operation leave nobody waiting for it", "[engine][fast]") {
  for (const auto kind : {schedule::Kind::kAllReduce, schedule::Kind::kBarrier, schedule::Kind::kBroadcast}) {
    for (std::uint64_t seed = 0; seed < 50; ++seed) {
      INFO("kind " << static_cast<int>(kind) << ", seed " << seed);
      test::ClusterOptions options;
      options.node_of = {0, 1, 2};
      options.seed = seed;
      options.wrap = [](std::unique_ptr<transport::Transport> inner, int) -> std::unique_ptr<transport::Transport> {
        return std::make_unique<Keeper>(std::move(inner));
      };
      test::Cluster cluster(options);
      const core::GroupUid uid = cluster.open_group();
      std::vector<std::vector<float>> tensors(3, std::vector<float>(16, 1.0F));
      int done = 0;
      for (int rank = 0; rank < 3; ++rank) {
        worker::Operation operation;
        operation.kind = kind;
        if (kind != schedule::Kind::kBarrier) {
          operation.dtype = core::DType::kFloat32;
          operation.op = core::ReduceOp::kSum;
          operation.root = 0;
          auto& tensor = tensors[static_cast<std::size_t>(rank)];
          operation.output = {{reinterpret_cast<std::byte*>(tensor.data()), tensor.size() * sizeof(float)}};
        }
        cluster.submit(uid, rank, std::move(operation), 0, [&, rank](const worker::Outcome& outcome) {
          CHECK(outcome.status.is_ok());
          ++done;
          cluster.stop(rank);  // its process ends here
        });
      }
      CHECK(cluster.run_until([&] { return done == 3; }, 200));
    }
  }
}
