// tests/unit/flow/rig.h: an Outbox between a fake pool and a fake router, and streams whose chunks have known bytes.
#pragma once

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "hybridps/flow/outbox.h"
#include "tests/support/fake_router.h"

namespace hybridps::test {

using flow::Stream;
using Chunks = std::vector<std::uint32_t>;

inline constexpr std::size_t kSlot = 1024;
inline constexpr std::size_t kLargeSlot = 4 * kSlot;
inline constexpr core::EngineId kSelf{1};
inline constexpr core::EngineId kPeer{2};
inline constexpr core::EngineId kOther{3};
inline constexpr core::EngineId kLocal{4};

/// A stream's owner: chunk c of stream s is filled with the byte s + c.
struct Owner final : flow::Source {
  explicit Owner(transport::BufferPool& p) : pool(p) {}
  std::size_t wire_bytes_max(std::size_t bytes) const noexcept override { return bytes + more_at_most; }
  flow::Payload payload(Stream& stream, std::uint32_t chunk, std::size_t bytes) override {
    ++asked;
    transport::Buffer buffer = pool.allocate(bytes + more_at_most);
    if (buffer) std::memset(buffer.data(), static_cast<int>(stream.index + chunk), bytes + more);
    return {std::move(buffer), bytes + more};
  }
  void on_sent(Stream& stream, std::uint32_t chunk) override {
    sent.emplace_back(stream.index, chunk);
    if (when_sent) when_sent(stream, chunk);
  }
  void on_permitted(Stream& stream, std::uint32_t chunk) override {
    permitted.push_back(chunk);
    if (when_permitted) when_permitted(stream, chunk);
  }
  transport::BufferPool& pool;
  std::size_t more_at_most = 0;  // on the wire
  std::size_t more = 0;
  int asked = 0;
  std::vector<std::pair<std::uint32_t, std::uint32_t>> sent;
  Chunks permitted;
  std::function<void(Stream&, std::uint32_t)> when_sent;
  std::function<void(Stream&, std::uint32_t)> when_permitted;
};

struct Setup {
  std::int64_t eager_bytes = 2 * kSlot;
  std::size_t slots = 32;
  std::size_t net_slots = 32;
  std::size_t large_slots = 0;  // of kLargeSlot; not 0: there are two size classes
  std::int64_t granted_bytes_max = 1 << 20;
  std::int64_t credit_batch_bytes = 2 * kSlot;
  bool urgent_always = false;
};

struct Rig {
  explicit Rig(const Setup& setup = {}) : pool(classes(setup)), owner(*pool) {
    router.eager_bytes = setup.eager_bytes;
    router.peers[kLocal] = flow::Peer{true, setup.eager_bytes};
    flow::OutboxOptions options;
    options.self = kSelf;
    for (const auto& c : pool.classes()) options.class_bytes.push_back(c.slot_bytes);
    options.net_slots = {setup.net_slots, setup.large_slots};
    options.granted_bytes_max = setup.granted_bytes_max;
    options.credit_batch_bytes = setup.credit_batch_bytes;
    options.urgent_always = setup.urgent_always;
    options.announce_after = std::chrono::seconds(100);  // of the time that progress() is told
    outbox = std::make_unique<flow::Outbox>(options, *pool, router);
  }
  static std::vector<transport::BufferPool::SizeClass> classes(const Setup& setup) {
    if (setup.large_slots == 0) return {{kSlot, setup.slots}};
    return {{kSlot, setup.slots}, {kLargeSlot, setup.large_slots}};
  }
  ~Rig() {
    for (auto& stream : streams) outbox->cancel(*stream);
    streams.clear();
    router.endpoints.clear();
    router.urgent_endpoints.clear();
    outbox.reset();
  }
  Stream& stream(std::uint32_t chunks, core::EngineId peer = kPeer, bool urgent = false) {
    streams.push_back(std::make_unique<Stream>());
    Stream& s = *streams.back();
    s.peer = peer;
    s.source = &owner;
    s.chunks = chunks;
    s.chunk_bytes = kSlot;
    s.bytes = std::uint64_t{chunks} * kSlot;
    s.urgent = urgent;
    s.index = 100 * static_cast<std::uint32_t>(streams.size());
    s.id.span = s.index;
    s.id.sequence = 17;
    return s;
  }
  void destroy(Stream& stream) {
    std::erase_if(streams, [&](const auto& s) { return s.get() == &stream; });
  }
  void offer_all(Stream& s) {
    for (std::uint32_t c = 0; c < s.chunks; ++c) outbox->offer(s, c);
  }
  void progress(double seconds = 0) { outbox->progress(core::Clock::now() + core::from_seconds(seconds)); }
  FakeEndpoint& to(core::EngineId peer = kPeer) { return router.to(peer); }
  /// How many chunks a fresh stream may send now: what is left of the allowance.
  std::size_t probe(std::uint32_t chunks = 20) {
    Stream& s = stream(chunks);
    const std::size_t before = owner.sent.size();
    offer_all(s);
    const std::size_t count = owner.sent.size() - before;
    outbox->cancel(s);
    destroy(s);
    return count;
  }

  FakePool pool;
  FakeRouter router;
  Owner owner;
  std::unique_ptr<flow::Outbox> outbox;
  std::vector<std::unique_ptr<Stream>> streams;
};

}  // namespace hybridps::test
