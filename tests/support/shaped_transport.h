// tests/support/shaped_transport.h: wraps Transports of a Cluster so that each has a card with a rate, in a
// MovableClock's time.
//
// Model    A message leaves behind all that its sender's card has still to send, and arrives behind all that its
//          receiver's card has still to take: both full duplex, first come first served, without loss. Then it goes on
//          through the wrapped transport, in the sender's next progress().
// Threads  one, as the Cluster has it.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/transport.h"

namespace hybridps::test {

/// The cards of a cluster, by engine.
struct Cards {
  double bytes_per_second = 62.5e6;
  core::Duration latency = std::chrono::microseconds(50);
  struct Card {
    core::TimePoint out{};  // when it is through with what it has
    core::TimePoint in{};
    std::uint64_t sent_bytes = 0;
  };
  std::map<core::EngineId, Card> of;

  core::Duration takes(std::size_t bytes) const {
    return std::chrono::duration_cast<core::Duration>(
        std::chrono::duration<double>(static_cast<double>(bytes) / bytes_per_second));
  }
  /// When the last byte of what is sent now has left.
  core::TimePoint leave(core::EngineId from, std::size_t bytes) {
    Card& card = of[from];
    card.sent_bytes += bytes;
    return card.out = std::max(card.out, core::Clock::now()) + takes(bytes);
  }
  /// When the last byte of what has left at `left` is there; to be asked in the order in which things leave.
  core::TimePoint arrive(core::EngineId to, std::size_t bytes, core::TimePoint left) {
    Card& card = of[to];
    return card.in = std::max(left + latency, card.in + takes(bytes));
  }
};

class ShapedTransport final : public transport::Transport {
 public:
  ShapedTransport(std::unique_ptr<transport::Transport> inner, core::EngineId self, std::shared_ptr<Cards> cards)
      : inner_(std::move(inner)), self_(self), cards_(std::move(cards)) {}
  ~ShapedTransport() override {
    const core::Status closed(core::Code::kClosed, "the transport was destroyed");
    for (auto* row : {&leaving_, &held_})
      for (auto& [at, message] : std::exchange(*row, {})) {
        message.payload = transport::Buffer();
        message.done(closed);
      }
    inner_.reset();
  }

  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> memory) override { return inner_->attach(memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    auto inner = inner_->connect(peer, address);
    if (!inner.is_ok()) return inner.status();
    auto& endpoint = endpoints_[peer];
    if (!endpoint) endpoint = std::make_unique<ShapedEndpoint>(*this, *inner.value());
    return static_cast<transport::Endpoint*>(endpoint.get());
  }
  transport::Endpoint* find(core::EngineId peer) noexcept override {
    const auto found = endpoints_.find(peer);
    return found != endpoints_.end() && inner_->find(peer) != nullptr ? found->second.get() : nullptr;
  }
  std::size_t progress() override {
    std::size_t did = 0;
    while (!leaving_.empty() && leaving_.begin()->first <= core::Clock::now()) {
      const core::TimePoint left = leaving_.begin()->first;
      Message message = std::move(leaving_.extract(leaving_.begin()).mapped());
      const core::TimePoint due =
          cards_->arrive(message.endpoint->peer(), message.header.size() + message.payload_bytes, left);
      held_.emplace(due, std::move(message));
    }
    while (!held_.empty() && held_.begin()->first <= core::Clock::now()) {
      Message message = std::move(held_.extract(held_.begin()).mapped());
      auto done = std::make_shared<transport::SendDone>(std::move(message.done));
      const core::Status status =
          message.endpoint->inner.send(message.header, message.payload, message.payload_bytes,
                                       [done](core::Status result) { (*done)(std::move(result)); });
      message.payload = transport::Buffer();
      if (!status.is_ok()) (*done)(status);
      ++did;
    }
    return did + inner_->progress();
  }
  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return leaving_.empty() && held_.empty() && inner_->arm(); }
  bool has_unsent() const noexcept override { return !leaving_.empty() || !held_.empty() || inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { inner_->set_receiver(receiver); }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }

 private:
  struct ShapedEndpoint final : transport::Endpoint {
    ShapedEndpoint(ShapedTransport& owner, transport::Endpoint& of) : transport(owner), inner(of) {}
    core::Status send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                      transport::SendDone done) override {
      const core::TimePoint left = transport.cards_->leave(transport.self_, header.size() + payload_bytes);
      transport.leaving_.emplace(
          left, Message{this, {header.begin(), header.end()}, payload, payload_bytes, std::move(done)});
      return core::Status::ok();
    }
    core::EngineId peer() const noexcept override { return inner.peer(); }
    void close(core::Status cause) noexcept override { inner.close(std::move(cause)); }

    ShapedTransport& transport;
    transport::Endpoint& inner;
  };
  struct Message {
    ShapedEndpoint* endpoint = nullptr;
    std::vector<std::byte> header;
    transport::Buffer payload;
    std::size_t payload_bytes = 0;
    transport::SendDone done;
  };

  std::unique_ptr<transport::Transport> inner_;
  const core::EngineId self_;
  const std::shared_ptr<Cards> cards_;
  std::unordered_map<core::EngineId, std::unique_ptr<ShapedEndpoint>> endpoints_;
  std::multimap<core::TimePoint, Message> leaving_;
  std::multimap<core::TimePoint, Message> held_;  // by arrival
};

}  // namespace hybridps::test
