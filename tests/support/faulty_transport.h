// tests/support/faulty_transport.h: wraps any Transport and breaks it, from a seed.
//
// Model    Faults are applied where messages are sent. Each message draws, in this order: drop, duplicate, delay. A
//          delayed message waits for 1..delay_max calls of progress(); different delays reorder. A dropped message
//          completes as kOk: the transport let go of it, nobody reads it. Of a duplicate only the first copy completes.
// Killing  kill(peer) is a cut cable: the inner endpoint is closed by force, sends are refused, what waits is lost, and
//          on_peer_failed comes with the next progress(). kill_after(n) does it at the nth message to any peer.
// Threads  as the wrapped transport. The same seed and the same calls give the same faults. A real transport neither
//          drops nor duplicates: use those to prove that deadlines fire and signatures are checked.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <random>
#include <span>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/transport.h"

namespace hybridps::test_support {

struct Faults {
  double drop = 0;  // probabilities, 0..1
  double duplicate = 0;
  double delay = 0;
  std::uint32_t delay_max = 8;               // calls of progress()
  std::uint64_t kill_after = 0;              // messages; 0: never
  core::EngineId silent_to{};                // what is sent to this peer is dropped
  bool lacks = false;                        // way(): it waits for descriptors
  core::EngineId opens_to{};                 // way(): the connection to this peer is being made
  std::shared_ptr<std::int64_t> may_send{};  // messages, of all who share it; what is sent after them is dropped
};

class FaultyTransport final : public transport::Transport, private transport::Receiver {
 public:
  struct Counts {
    std::uint64_t sent = 0;  // by the user
    std::uint64_t dropped = 0;
    std::uint64_t duplicated = 0;
    std::uint64_t delayed = 0;
    std::uint64_t killed = 0;
  };

  FaultyTransport(std::unique_ptr<transport::Transport> inner, const Faults& faults, std::uint64_t seed)
      : inner_(std::move(inner)), faults_(faults), random_(seed) {
    inner_->set_receiver(this);
  }
  ~FaultyTransport() override {
    receiver_ = nullptr;
    // What was held back goes first: its buffers and `done`s are as pending as those inside.
    auto held = std::move(held_);
    auto finished = std::move(finished_);
    const core::Status closed(core::Code::kClosed, "the transport was destroyed");
    for (auto& message : held) finish(message, closed);
    for (auto& message : finished) finish(message, closed);
    inner_.reset();
  }

  /// From now on.
  void set_faults(const Faults& faults) { faults_ = faults; }
  void kill(core::EngineId peer) {
    const auto found = endpoints_.find(peer);
    if (found != endpoints_.end()) kill(*found->second);
  }
  const Counts& counts() const noexcept { return counts_; }
  transport::Transport& inner() noexcept { return *inner_; }

  std::string_view name() const noexcept override { return inner_->name(); }
  core::Status attach(std::span<std::byte> pool_memory) override { return inner_->attach(pool_memory); }
  core::Status attach_device(const transport::DeviceMemory& memory) override { return inner_->attach_device(memory); }
  void detach_device(std::span<std::byte> memory) noexcept override { inner_->detach_device(memory); }
  std::vector<std::byte> address() const override { return inner_->address(); }

  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    if (const auto found = endpoints_.find(peer); found != endpoints_.end() && found->second->dead)
      return found->second->cause;
    auto inner = inner_->connect(peer, address);
    if (!inner.is_ok()) return inner.status();
    auto& endpoint = endpoints_[peer];
    if (!endpoint) endpoint = std::make_unique<FaultyEndpoint>(*this, *inner.value());
    return static_cast<transport::Endpoint*>(endpoint.get());
  }
  transport::Endpoint* find(core::EngineId peer) noexcept override {
    const auto found = endpoints_.find(peer);
    return found != endpoints_.end() && !found->second->dead && inner_->find(peer) != nullptr ? found->second.get()
                                                                                              : nullptr;
  }

  transport::Way way(core::EngineId peer, std::span<const std::byte> address) noexcept override {
    if (faults_.lacks) return transport::Way::kLacks;
    return peer == faults_.opens_to ? transport::Way::kOpens : inner_->way(peer, address);
  }

  std::size_t progress() override {
    ++now_;
    std::size_t did = 0;
    auto finished = std::move(finished_);
    finished_.clear();
    for (auto& message : finished) {
      const core::Status status = message.status;
      finish(message, status);
      ++did;
    }
    auto reports = std::move(reports_);
    reports_.clear();
    for (auto& [peer, cause] : reports) {
      if (receiver_ != nullptr) receiver_->on_peer_failed(peer, cause);
      ++did;
    }
    // Those that are due, in order of their time; equal times keep the order of sending.
    std::vector<Message> due;
    for (auto entry = held_.begin(); entry != held_.end();) {
      if (entry->due > now_) {
        ++entry;
        continue;
      }
      due.push_back(std::move(*entry));
      entry = held_.erase(entry);
    }
    std::stable_sort(due.begin(), due.end(), [](const Message& a, const Message& b) { return a.due < b.due; });
    for (auto& message : due) {
      forward(std::move(message));
      ++did;
    }
    did += inner_->progress();
    return did > 0 ? did : held_.size();  // time must go on while something waits
  }

  int event_fd() const noexcept override { return inner_->event_fd(); }
  bool arm() override { return held_.empty() && finished_.empty() && reports_.empty() && inner_->arm(); }
  void send_now() noexcept override { inner_->send_now(); }
  bool has_unsent() const noexcept override { return !held_.empty() || inner_->has_unsent(); }
  void set_receiver(transport::Receiver* receiver) noexcept override { receiver_ = receiver; }
  transport::TransportStats stats() const noexcept override { return inner_->stats(); }

 private:
  struct FaultyEndpoint;
  struct Message {
    FaultyEndpoint* endpoint = nullptr;
    std::vector<std::byte> header;
    transport::Buffer payload;
    std::size_t payload_bytes = 0;
    transport::SendDone done;
    std::uint64_t due = 0;
    core::Status status;
  };

  struct FaultyEndpoint final : transport::Endpoint {
    FaultyEndpoint(FaultyTransport& owner, transport::Endpoint& inner_endpoint)
        : transport(owner), inner(inner_endpoint), id(inner_endpoint.peer()) {}
    core::Status send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                      transport::SendDone done) override {
      return transport.send(*this, header, payload, payload_bytes, std::move(done));
    }
    core::EngineId peer() const noexcept override { return id; }
    void close(core::Status status) noexcept override { transport.close(*this, std::move(status)); }

    FaultyTransport& transport;
    transport::Endpoint& inner;
    const core::EngineId id;
    bool dead = false;  // killed, closed, or failed inside
    core::Status cause;
  };

  bool chance(double probability) {
    // Drawn even when it cannot happen, so that a changed probability does not shift the others.
    return std::uniform_real_distribution<double>(0, 1)(random_) < probability;
  }

  core::Status send(FaultyEndpoint& endpoint, std::span<const std::byte> header, const transport::Buffer& payload,
                    std::size_t payload_bytes, transport::SendDone done) {
    if (endpoint.dead) return endpoint.cause;
    const bool valid = !header.empty() && header.size() <= transport::kHeaderBytesMax &&
                       (payload_bytes == 0 || (payload && payload_bytes <= payload.capacity_bytes()));
    if (!valid) return endpoint.inner.send(header, payload, payload_bytes, std::move(done));
    ++counts_.sent;
    const core::EngineId to = endpoint.inner.peer();
    const bool is_over = faults_.may_send != nullptr && --*faults_.may_send < 0;
    const bool drop = chance(faults_.drop) || (to == faults_.silent_to && to != core::EngineId{}) || is_over;
    const bool duplicate = chance(faults_.duplicate);
    const bool delay = chance(faults_.delay);
    const std::uint64_t wait = 1 + random_() % std::max<std::uint64_t>(faults_.delay_max, 1);
    if (drop) {
      ++counts_.dropped;
      finished_.push_back(Message{&endpoint, {}, payload, 0, std::move(done), 0, core::Status::ok()});
    } else if (delay) {
      ++counts_.delayed;
      held_.push_back(Message{&endpoint,
                              {header.begin(), header.end()},
                              payload,
                              payload_bytes,
                              std::move(done),
                              now_ + wait,
                              core::Status::ok()});
    } else {
      core::Status status = endpoint.inner.send(header, payload, payload_bytes, std::move(done));
      if (!status.is_ok()) return status;
    }
    if (duplicate && !drop) {
      ++counts_.duplicated;
      held_.push_back(Message{&endpoint,
                              {header.begin(), header.end()},
                              payload,
                              payload_bytes,
                              transport::SendDone(),
                              now_ + wait,
                              core::Status::ok()});
    }
    if (faults_.kill_after > 0 && counts_.sent >= faults_.kill_after) {
      faults_.kill_after = 0;
      kill(endpoint);
    }
    return core::Status::ok();
  }

  void forward(Message message) {
    FaultyEndpoint& endpoint = *message.endpoint;
    // The user was told kOk, so a refusal must reach its `done`.
    auto done = std::make_shared<transport::SendDone>(std::move(message.done));
    const core::Status status = endpoint.inner.send(message.header, message.payload, message.payload_bytes,
                                                    [done](core::Status result) { (*done)(std::move(result)); });
    if (!status.is_ok()) {
      message.payload = transport::Buffer();
      (*done)(status);
    }
  }

  void fail_held(FaultyEndpoint& endpoint) {
    for (auto entry = held_.begin(); entry != held_.end();) {
      if (entry->endpoint != &endpoint) {
        ++entry;
        continue;
      }
      entry->status = endpoint.cause;
      finished_.push_back(std::move(*entry));
      entry = held_.erase(entry);
    }
  }

  void kill(FaultyEndpoint& endpoint) {
    if (endpoint.dead) return;
    ++counts_.killed;
    endpoint.dead = true;
    endpoint.cause = core::Status(core::Code::kPeerDead, "killed by FaultyTransport");
    endpoint.inner.close(endpoint.cause);
    fail_held(endpoint);
    reports_.emplace_back(endpoint.id, endpoint.cause);
  }

  void close(FaultyEndpoint& endpoint, core::Status cause) {
    if (endpoint.dead) return;
    endpoint.dead = true;
    endpoint.cause = cause.is_ok() ? core::Status(core::Code::kClosed, "the endpoint was closed") : cause;
    endpoint.inner.close(std::move(cause));
    fail_held(endpoint);
  }

  static void finish(Message& message, const core::Status& status) {
    message.payload = transport::Buffer();
    message.done(status);
  }

  void on_message(core::EngineId from, std::span<const std::byte> header,
                  transport::RxPayload payload) noexcept override {
    if (receiver_ != nullptr) receiver_->on_message(from, header, std::move(payload));
  }
  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    if (const auto found = endpoints_.find(peer); found != endpoints_.end()) {
      if (found->second->dead) return;  // reported by kill(), or closed by the user
      found->second->dead = true;
      found->second->cause = cause;
      fail_held(*found->second);
    }
    if (receiver_ != nullptr) receiver_->on_peer_failed(peer, std::move(cause));
  }

  std::unique_ptr<transport::Transport> inner_;
  Faults faults_;
  std::mt19937_64 random_;
  transport::Receiver* receiver_ = nullptr;
  std::unordered_map<core::EngineId, std::unique_ptr<FaultyEndpoint>> endpoints_;
  std::deque<Message> held_;
  std::vector<Message> finished_;
  std::vector<std::pair<core::EngineId, core::Status>> reports_;
  std::uint64_t now_ = 0;
  Counts counts_;
};

}  // namespace hybridps::test_support
