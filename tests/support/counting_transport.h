// tests/support/counting_transport.h: wraps any Transport and counts what is sent, by the kind of message.
//
// Model    A loopback endpoint serves one way, a TCP connection both. So a peer that has sent something counts as
//          connected here, and an answer to it opens nothing.
// Threads  as the wrapped transport. The counts outlive it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/transport.h"
#include "hybridps/wire/message.h"
#include "tests/support/cluster.h"

namespace hybridps::test {

struct SentCounts {
  std::uint64_t data = 0;     // messages that carry a chunk, or say that an empty one is there
  std::uint64_t permits = 0;  // Announce, Grant
  std::uint64_t credits = 0;
  std::uint64_t control = 0;  // all others
  std::uint64_t opened = 0;   // connections to peers that had not sent anything yet
  /// Payload of data messages, by the peer; an entry for each peer that anything was sent to.
  std::unordered_map<core::EngineId, std::uint64_t> bytes_to;

  std::uint64_t bytes() const {
    std::uint64_t sum = 0;
    for (const auto& [peer, bytes] : bytes_to) sum += bytes;
    return sum;
  }
};

class CountingTransport final : public transport::Transport, private transport::Receiver {
 public:
  CountingTransport(std::unique_ptr<transport::Transport> inner, std::shared_ptr<SentCounts> counts)
      : inner_(std::move(inner)), counts_(std::move(counts)) {
    inner_->set_receiver(this);
  }
  ~CountingTransport() override { receiver_ = nullptr; }

  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> pool_memory) override { return inner_->attach(pool_memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    auto inner = inner_->connect(peer, address);
    if (!inner.is_ok()) return inner.status();
    const bool is_new = counts_->bytes_to.try_emplace(peer, 0).second;
    if (is_new && heard_.count(peer) == 0) ++counts_->opened;
    auto& endpoint = endpoints_[peer];
    if (!endpoint) endpoint = std::make_unique<CountingEndpoint>(*counts_, *inner.value());
    return static_cast<transport::Endpoint*>(endpoint.get());
  }
  void introduce(core::EngineId peer, std::span<const std::byte> address) override { inner_->introduce(peer, address); }
  core::EngineId name_of(core::EngineId from) override { return inner_->name_of(from); }
  transport::Endpoint* find(core::EngineId peer) noexcept override {
    const auto found = endpoints_.find(peer);
    return found != endpoints_.end() && inner_->find(peer) != nullptr ? found->second.get() : nullptr;
  }
  transport::Way way(core::EngineId peer, std::span<const std::byte> address) noexcept override {
    return heard_.count(peer) > 0 ? transport::Way::kStands : inner_->way(peer, address);
  }
  std::size_t progress() override { return inner_->progress(); }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return inner_->arm(); }
  void send_now() noexcept override { inner_->send_now(); }
  bool has_unsent() const noexcept override { return inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { receiver_ = receiver; }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }

 private:
  struct CountingEndpoint final : transport::Endpoint {
    CountingEndpoint(SentCounts& to, transport::Endpoint& of) : counts(to), inner(of) {}
    core::Status send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                      transport::SendDone done) override {
      const auto message = wire::decode(header);
      const bool is_data = message.is_ok() && message.value().as<wire::Data>() != nullptr;
      const bool is_permit = message.is_ok() && (message.value().as<wire::Announce>() != nullptr ||
                                                 message.value().as<wire::Grant>() != nullptr);
      const bool is_credit = message.is_ok() && message.value().as<wire::Credit>() != nullptr;
      core::Status status = inner.send(header, payload, payload_bytes, std::move(done));
      if (!status.is_ok()) return status;
      ++(is_data ? counts.data : is_permit ? counts.permits : is_credit ? counts.credits : counts.control);
      if (is_data) counts.bytes_to[inner.peer()] += payload_bytes;
      return status;
    }
    core::EngineId peer() const noexcept override { return inner.peer(); }
    void close(core::Status cause) noexcept override { inner.close(std::move(cause)); }

    SentCounts& counts;
    transport::Endpoint& inner;
  };

  void on_message(core::EngineId from, std::span<const std::byte> header,
                  transport::RxPayload payload) noexcept override {
    heard_.insert(from);
    if (receiver_ != nullptr) receiver_->on_message(from, header, std::move(payload));
  }
  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    heard_.erase(peer);
    if (receiver_ != nullptr) receiver_->on_peer_failed(peer, std::move(cause));
  }

  std::unique_ptr<transport::Transport> inner_;
  std::shared_ptr<SentCounts> counts_;
  transport::Receiver* receiver_ = nullptr;
  std::unordered_set<core::EngineId> heard_;
  std::unordered_map<core::EngineId, std::unique_ptr<CountingEndpoint>> endpoints_;
};

/// What each runtime of a Cluster has sent. Give it the options before the Cluster.
class ClusterCounts : core::Pinned {
 public:
  void count(ClusterOptions& options) {
    options.wrap_control = true;
    options.wrap = [this](std::unique_ptr<transport::Transport> inner, int runtime) {
      auto counts = std::make_shared<SentCounts>();
      of_[runtime].push_back(counts);
      return std::make_unique<CountingTransport>(std::move(inner), std::move(counts));
    };
  }
  const SentCounts& network(int runtime) const { return *of_.at(runtime)[0]; }
  const SentCounts& memory(int runtime) const { return *of_.at(runtime)[1]; }
  /// Only with ClusterOptions::control.
  const SentCounts& control(int runtime) const { return *of_.at(runtime)[2]; }
  const std::vector<std::shared_ptr<SentCounts>>& all(int runtime) const { return of_.at(runtime); }

 private:
  std::unordered_map<int, std::vector<std::shared_ptr<SentCounts>>> of_;
};

}  // namespace hybridps::test
