// tests/support/fake_router.h: endpoints that keep what they were sent, for the tests of flow and server.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/flow/outbox.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/wire/message.h"

namespace hybridps::test {

/// A message as it left; `buffer` and `done` are held until complete().
struct Sent {
  wire::Message message;
  std::vector<std::byte> payload;
  transport::Buffer buffer;
  transport::SendDone done;
};

class FakeEndpoint final : public transport::Endpoint {
 public:
  explicit FakeEndpoint(core::EngineId id) : id_(id) {}
  core::Status send(std::span<const std::byte> header, const transport::Buffer& payload, std::size_t payload_bytes,
                    transport::SendDone done) override {
    if (!refusal.is_ok()) return refusal;
    Sent one;
    one.message = wire::decode(header).value();
    if (payload_bytes > 0) one.payload.assign(payload.data(), payload.data() + payload_bytes);
    one.buffer = payload;
    one.done = std::move(done);
    sent.push_back(std::move(one));
    return core::Status::ok();
  }
  core::EngineId peer() const noexcept override { return id_; }
  void close(core::Status) noexcept override {}

  /// The transport lets go of message `i`.
  void complete(std::size_t i) {
    sent[i].buffer = transport::Buffer();
    transport::SendDone done = std::move(sent[i].done);
    done(core::Status::ok());
  }
  void complete_all() {
    for (std::size_t i = 0; i < sent.size(); ++i) complete(i);
  }
  /// Chunks of data messages, in order of sending.
  std::vector<std::uint32_t> chunks() const {
    std::vector<std::uint32_t> list;
    for (const auto* data : of<wire::Data>()) list.push_back(data->chunk.number);
    return list;
  }
  /// Messages of this type, in order of sending.
  template <typename T>
  std::vector<const T*> of() const {
    std::vector<const T*> list;
    for (const Sent& one : sent)
      if (const T* message = one.message.as<T>()) list.push_back(message);
    return list;
  }
  /// The last one, which is data.
  const wire::Data& last() const { return *sent.back().message.as<wire::Data>(); }

  core::Status refusal;
  std::vector<Sent> sent;

 private:
  const core::EngineId id_;
};

class FakeRouter final : public flow::Router {
 public:
  core::Result<transport::Endpoint*> connect(core::EngineId peer) override {
    ++connects;
    if (!no_route.is_ok()) return no_route;
    return static_cast<transport::Endpoint*>(&to(peer));
  }
  core::Result<transport::Endpoint*> connect_urgent(core::EngineId peer) override {
    if (!has_urgent) return static_cast<transport::Endpoint*>(nullptr);
    auto& endpoint = urgent_endpoints[peer];
    if (!endpoint) endpoint = std::make_unique<FakeEndpoint>(peer);
    return static_cast<transport::Endpoint*>(endpoint.get());
  }
  flow::Peer describe(core::EngineId peer) override {
    const auto found = peers.find(peer);
    return found == peers.end() ? flow::Peer{false, eager_bytes} : found->second;
  }
  void on_unreachable(core::EngineId peer, core::Status cause) override {
    unreachable.emplace_back(peer, std::move(cause));
  }
  FakeEndpoint& to(core::EngineId peer) {
    auto& endpoint = endpoints[peer];
    if (!endpoint) endpoint = std::make_unique<FakeEndpoint>(peer);
    return *endpoint;
  }

  std::int64_t eager_bytes = 1 << 20;
  std::map<core::EngineId, flow::Peer> peers;  // others: between nodes, with eager_bytes
  std::map<core::EngineId, std::unique_ptr<FakeEndpoint>> endpoints;
  std::vector<std::pair<core::EngineId, core::Status>> unreachable;
  bool has_urgent = false;
  std::map<core::EngineId, std::unique_ptr<FakeEndpoint>> urgent_endpoints;
  core::Status no_route;
  int connects = 0;
};

/// A pool with its memory.
class FakePool {
 public:
  explicit FakePool(std::vector<transport::BufferPool::SizeClass> classes) : classes_(std::move(classes)) {
    std::size_t bytes = 0;
    for (const auto& c : classes_) bytes += c.slot_bytes * c.slot_count;
    memory_.resize(bytes + 64);
    auto* start =
        reinterpret_cast<std::byte*>((reinterpret_cast<std::uintptr_t>(memory_.data()) + 63) & ~std::uintptr_t{63});
    pool_ = std::make_unique<transport::BufferPool>(std::span<std::byte>(start, bytes), classes_);
  }
  transport::BufferPool& operator*() { return *pool_; }
  transport::BufferPool* operator->() { return pool_.get(); }
  const std::vector<transport::BufferPool::SizeClass>& classes() const { return classes_; }

 private:
  std::vector<transport::BufferPool::SizeClass> classes_;
  std::vector<std::byte> memory_;
  std::unique_ptr<transport::BufferPool> pool_;
};

/// Payloads lent as a transport would lend them; lent() counts those not given back.
class Lender {
 public:
  flow::Delivery lend(const void* data, std::size_t bytes, flow::Outbox* outbox = nullptr, core::EngineId source = {},
                      std::int64_t cost = 0) {
    auto* copy =
        new std::vector<std::byte>(static_cast<const std::byte*>(data), static_cast<const std::byte*>(data) + bytes);
    ++lent_;
    return flow::Delivery(transport::RxPayload(copy->data(), bytes, &Lender::release, this, copy), outbox, source,
                          cost);
  }
  int lent() const { return lent_; }

 private:
  static void release(void* context, void* token, std::uint64_t) noexcept {
    delete static_cast<std::vector<std::byte>*>(token);
    --static_cast<Lender*>(context)->lent_;
  }
  int lent_ = 0;
};

}  // namespace hybridps::test
