// tests/unit/transport/endpoint_contract.h: what every Transport must do, run on each backend.
//
// To join, a backend writes a type with
//   static std::unique_ptr<contract::Pair> make_pair();     two transports, memory attached, not connected
//   static constexpr bool kReportsPeerGone;                     the path itself notices that the other side went away
// (and kSendsByItself where messages leave, and `done` comes, without progress() of either side)
// and, in one .cpp, `#define HYBRIDPS_ENDPOINT_BACKENDS MyBackend` before including this file.
// Both ends run on the test's thread. Completion may wait for the receiver to give the payload back (shared
// memory does), so the cases release what they received before they expect `done`.
#pragma once

#include <poll.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/transport.h"
#include "tests/support/catch.h"

namespace hybridps::transport::contract {

inline constexpr std::size_t kLargeBytes = std::size_t{1} << 20;
inline constexpr std::array<BufferPool::SizeClass, 3> kClasses = {
    BufferPool::SizeClass{256, 64}, BufferPool::SizeClass{64 << 10, 16}, BufferPool::SizeClass{kLargeBytes, 4}};
inline constexpr std::size_t kPoolBytes = 256 * 64 + (std::size_t{64} << 10) * 16 + kLargeBytes * 4;

/// A byte that depends on its place and on the message.
inline std::byte pattern(std::size_t index, std::uint64_t seed) {
  return static_cast<std::byte>((index * 31 + (index >> 8) * 7 + seed * 131) & 0xff);
}
inline void fill(std::byte* data, std::size_t bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes; ++i) data[i] = pattern(i, seed);
}
inline bool matches(const std::byte* data, std::size_t bytes, std::uint64_t seed) {
  for (std::size_t i = 0; i < bytes; ++i)
    if (data[i] != pattern(i, seed)) return false;
  return true;
}
inline std::vector<std::byte> make_header(std::size_t bytes, std::uint64_t seed) {
  std::vector<std::byte> header(bytes);
  fill(header.data(), bytes, seed);
  return header;
}
/// A header that carries a number, for messages whose order is open.
inline std::vector<std::byte> numbered(std::uint64_t number) {
  std::vector<std::byte> header(sizeof number);
  std::memcpy(header.data(), &number, sizeof number);
  return header;
}
inline std::uint64_t number_of(std::span<const std::byte> header) {
  std::uint64_t number = ~std::uint64_t{0};
  if (header.size() == sizeof number) std::memcpy(&number, header.data(), sizeof number);
  return number;
}

struct Recorder final : Receiver {
  struct Message {
    core::EngineId from;
    std::vector<std::byte> header;
    RxPayload payload;
  };

  void on_message(core::EngineId from, std::span<const std::byte> header, RxPayload payload) noexcept override {
    called_outside_progress |= !in_progress;
    messages.push_back(Message{from, {header.begin(), header.end()}, std::move(payload)});
    if (hook) hook(messages.back());
  }
  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    called_outside_progress |= !in_progress;
    failures.emplace_back(peer, std::move(cause));
  }

  std::deque<Message> messages;
  std::vector<std::pair<core::EngineId, core::Status>> failures;
  std::function<void(Message&)> hook;
  bool in_progress = false;
  bool called_outside_progress = false;
};

/// One end. Members are in order of life: memory outlives the pool, the pool the transport.
struct Side {
  core::EngineId id = core::make_engine_id();
  std::shared_ptr<void> context;  // whatever the backend needs to keep: memory, a hub
  std::span<std::byte> memory;
  std::unique_ptr<BufferPool> pool;
  std::unique_ptr<Transport> transport;
  Recorder receiver;
  Endpoint* peer = nullptr;
  std::size_t done_outside_progress = 0;
  bool ending = false;  // the case is over, its variables are gone

  /// 64-byte aligned heap memory of `bytes` becomes the pool's, unless the backend brings its own.
  void use_heap(std::size_t bytes = kPoolBytes) {
    std::shared_ptr<std::byte[]> heap(new (std::align_val_t{64}) std::byte[bytes],
                                      [](std::byte* p) { ::operator delete[](p, std::align_val_t{64}); });
    use_memory({heap.get(), bytes});
    context = std::move(heap);
  }
  void use_memory(std::span<std::byte> bytes) {
    memory = bytes;
    pool = std::make_unique<BufferPool>(memory, kClasses);
  }

  std::size_t progress() {
    receiver.in_progress = true;
    const std::size_t did = transport ? transport->progress() : 0;
    receiver.in_progress = false;
    return did;
  }

  /// Counts completions; the status of the last one in `last`.
  struct Done {
    std::size_t count = 0;
    core::Status last;
  };
  SendDone record(Done& done) {
    return [this, &done](core::Status status) {
      if (ending) return;
      if (!receiver.in_progress) ++done_outside_progress;
      ++done.count;
      done.last = std::move(status);
    };
  }

  Buffer filled(std::size_t bytes, std::uint64_t seed) {
    Buffer buffer = pool->allocate(bytes);
    if (buffer) fill(buffer.data(), bytes, seed);
    return buffer;
  }
};

struct Pair {
  Side a;
  Side b;

  ~Pair() {
    a.ending = b.ending = true;
    for (Side* side : {&a, &b}) {
      side->receiver.messages.clear();
      side->receiver.hook = nullptr;
      side->transport.reset();
    }
  }

  /// After the backend has set transport, memory and pool of both sides.
  void finish_setup() {
    for (Side* side : {&a, &b}) {
      REQUIRE(side->transport->attach(side->memory).is_ok());
      side->transport->set_receiver(&side->receiver);
    }
  }
  void connect() {
    connect_one(a, b);
    connect_one(b, a);
  }
  static void connect_one(Side& from, Side& to) {
    auto endpoint = from.transport->connect(to.id, to.transport->address());
    INFO(endpoint.status().to_string());
    REQUIRE(endpoint.is_ok());
    from.peer = endpoint.value();
  }

  /// Progress on both sides until the condition holds. False: it never did.
  bool run_until(const std::function<bool()>& condition, double seconds = 20) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!condition()) {
      const std::size_t did = a.progress() + b.progress();
      if (did == 0 && std::chrono::steady_clock::now() > deadline) return condition();
    }
    return true;
  }
  /// A little more progress, in which nothing further should happen.
  void settle(int rounds = 200) {
    for (int i = 0; i < rounds; ++i) a.progress(), b.progress();
  }
  void release_all() {
    a.receiver.messages.clear();
    b.receiver.messages.clear();
  }
};

/// Waits for a transport's event as an engine does: progress until 0, arm, poll.
inline bool wait_for_event(Side& side, int timeout_ms) {
  while (true) {
    while (side.progress() > 0) return true;
    if (side.transport->arm()) break;
  }
  pollfd event{side.transport->event_fd(), POLLIN, 0};
  return ::poll(&event, 1, timeout_ms) > 0;
}

}  // namespace hybridps::transport::contract

#ifdef HYBRIDPS_ENDPOINT_BACKENDS

namespace hybridps::transport::contract {

TEMPLATE_TEST_CASE("transport/endpoint: a message arrives whole whatever its sizes", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  std::uint64_t seed = 0;
  for (const std::size_t header_bytes : {std::size_t{1}, std::size_t{64}, std::size_t{128}, kHeaderBytesMax}) {
    for (const std::size_t payload_bytes :
         {std::size_t{0}, std::size_t{1}, std::size_t{255}, std::size_t{4096}, std::size_t{65535}, std::size_t{65536},
          std::size_t{65537}, std::size_t{300001}, kLargeBytes}) {
      ++seed;
      INFO("header " << header_bytes << " B, payload " << payload_bytes << " B");
      Side::Done done;
      const auto header = make_header(header_bytes, seed);
      Buffer payload = payload_bytes > 0 ? pair->a.filled(payload_bytes, seed) : Buffer();
      REQUIRE(pair->a.peer->send(header, payload, payload_bytes, pair->a.record(done)).is_ok());
      payload = Buffer();
      REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
      auto& message = pair->b.receiver.messages.front();
      CHECK(message.header == header);
      REQUIRE(message.payload.bytes() == payload_bytes);
      CHECK(matches(message.payload.data(), payload_bytes, seed));
      pair->release_all();
      REQUIRE(pair->run_until([&] { return done.count == 1; }));
      CHECK(done.last.is_ok());
      CHECK(pair->a.pool->slots_in_use() == 0);
    }
  }
  CHECK_FALSE(pair->b.receiver.called_outside_progress);
  CHECK(pair->a.done_outside_progress == 0);
}

TEMPLATE_TEST_CASE("transport/endpoint: a message names the engine that its connection belongs to", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  Pair::connect_one(pair->a, pair->b);
  const auto say = [&](std::uint64_t number) {
    REQUIRE(pair->a.peer->send(numbered(number), {}, 0, {}).is_ok());
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == number; }));
    return pair->b.receiver.messages.back().from;
  };
  const core::EngineId stranger = say(1);
  if (stranger == core::EngineId{}) return;  // this transport cannot tell, and says so
  pair->b.transport->introduce(pair->a.id, pair->a.transport->address());
  CHECK(pair->b.transport->name_of(stranger) == pair->a.id);
  CHECK(say(2) == pair->a.id);
  Pair::connect_one(pair->b, pair->a);
  CHECK(say(3) == pair->a.id);
  // What was introduced stays so, whoever claims the address later.
  pair->b.transport->introduce(core::make_engine_id(), pair->a.transport->address());
  CHECK(say(4) == pair->a.id);
  pair->b.transport->cut(pair->a.id, core::Status(core::Code::kPeerDead, "it lies"));
  CHECK(pair->run_until([&] { return pair->a.receiver.failures.size() == 1; }));
}

TEMPLATE_TEST_CASE("transport/endpoint: the header is copied before send returns", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  for (const std::size_t payload_bytes : {std::size_t{0}, std::size_t{4096}, kLargeBytes}) {
    auto header = make_header(100, 7);
    Buffer payload = payload_bytes > 0 ? pair->a.filled(payload_bytes, 7) : Buffer();
    REQUIRE(pair->a.peer->send(header, payload, payload_bytes, {}).is_ok());
    fill(header.data(), header.size(), 8);
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    CHECK(pair->b.receiver.messages.front().header == make_header(100, 7));
    pair->release_all();
    REQUIRE(pair->run_until([&] { return pair->a.pool->slots_in_use() == (payload ? 1u : 0u); }));
  }
}

TEMPLATE_TEST_CASE("transport/endpoint: done runs once and in progress and never inside send", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  std::vector<Side::Done> done(64);
  for (std::size_t i = 0; i < done.size(); ++i) {
    const std::size_t bytes = i % 4 == 0 ? 0 : i % 4 == 1 ? 200 : i % 4 == 2 ? 60000 : 100;
    Buffer payload = bytes > 0 ? pair->a.filled(bytes, i) : Buffer();
    REQUIRE((bytes == 0 || payload));
    REQUIRE(pair->a.peer->send(numbered(i), payload, bytes, pair->a.record(done[i])).is_ok());
    CHECK(done[i].count == 0);
  }
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == done.size(); }));
  pair->release_all();
  REQUIRE(pair->run_until([&] { return pair->a.pool->slots_in_use() == 0; }));
  REQUIRE(pair->run_until([&] {
    for (const auto& each : done)
      if (each.count == 0) return false;
    return true;
  }));
  pair->settle();
  for (const auto& each : done) {
    CHECK(each.count == 1);
    CHECK(each.last.is_ok());
  }
  CHECK(pair->a.done_outside_progress == 0);
}

TEMPLATE_TEST_CASE("transport/endpoint: traffic both ways arrives once each and intact", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  constexpr std::uint64_t kCount = 600;
  std::mt19937_64 random(1);
  struct Way {
    Side* from;
    Side* to;
    std::uint64_t sent = 0;
    std::uint64_t finished = 0;
    std::uint64_t received = 0;  // done does not say that the peer has it
    std::vector<int> seen = std::vector<int>(kCount, 0);
    std::size_t wrong = 0;
  };
  std::array<Way, 2> ways = {Way{&pair->a, &pair->b}, Way{&pair->b, &pair->a}};
  for (Way& way : ways)
    way.to->receiver.hook = [&way](Recorder::Message& message) {
      const std::uint64_t number = number_of(message.header);
      ++way.received;
      if (number >= kCount || !matches(message.payload.data(), message.payload.bytes(), number)) {
        ++way.wrong;
        return;
      }
      ++way.seen[number];
    };
  const auto pump = [&] {
    bool all = true;
    for (Way& way : ways) {
      while (way.sent < kCount) {
        const std::size_t sizes[] = {0, 17, 256, 5000, 65536, 500000};
        const std::size_t bytes = sizes[random() % 6];
        Buffer payload;
        if (bytes > 0) {
          payload = way.from->filled(bytes, way.sent);
          if (!payload) break;  // the pool is the only limit here
        }
        REQUIRE(way.from->peer
                    ->send(numbered(way.sent), payload, bytes,
                           [&way](core::Status status) { way.finished += status.is_ok() ? 1 : 0; })
                    .is_ok());
        ++way.sent;
      }
      // Kept for a while, then given back out of order.
      auto& messages = way.to->receiver.messages;
      while (messages.size() > 3) messages.erase(messages.begin() + static_cast<std::ptrdiff_t>(random() % 3));
      if (way.sent == kCount) messages.clear();
      all = all && way.finished == kCount && way.received >= kCount;
    }
    return all;
  };
  CHECK(pair->run_until(pump, 60));
  for (const Way& way : ways) {
    CHECK(way.wrong == 0);
    CHECK(std::count(way.seen.begin(), way.seen.end(), 1) == static_cast<std::ptrdiff_t>(kCount));
  }
  CHECK(pair->a.pool->slots_in_use() == 0);
  CHECK(pair->b.pool->slots_in_use() == 0);
}

TEMPLATE_TEST_CASE("transport/endpoint: a payload stays as it is until its holder lets go", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  const std::size_t sizes[] = {100, 50000, 65536, 1000000};
  for (std::size_t i = 0; i < 4; ++i)
    REQUIRE(pair->a.peer->send(numbered(i), pair->a.filled(sizes[i], i), sizes[i], {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 4; }));
  auto kept = std::move(pair->b.receiver.messages);
  pair->b.receiver.messages.clear();
  for (std::uint64_t round = 0; round < 60; ++round) {
    const std::size_t bytes = sizes[round % 3];
    Buffer payload = pair->a.filled(bytes, 1000 + round);
    REQUIRE(payload);
    REQUIRE(pair->a.peer->send(numbered(1000 + round), payload, bytes, {}).is_ok());
    payload = Buffer();
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    pair->release_all();
    pair->settle(2);
  }
  for (const auto& message : kept) {
    const std::uint64_t number = number_of(message.header);
    REQUIRE(message.payload.bytes() == sizes[number]);
    CHECK(matches(message.payload.data(), sizes[number], number));
  }
}

TEMPLATE_TEST_CASE("transport/endpoint: one buffer may be in flight several times", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  Buffer payload = pair->a.filled(60000, 5);
  Side::Done done;
  for (int i = 0; i < 5; ++i) REQUIRE(pair->a.peer->send(numbered(5), payload, 60000, pair->a.record(done)).is_ok());
  payload = Buffer();
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 5; }));
  for (const auto& message : pair->b.receiver.messages) CHECK(matches(message.payload.data(), 60000, 5));
  pair->release_all();
  REQUIRE(pair->run_until([&] { return done.count == 5; }));
  CHECK(pair->a.pool->slots_in_use() == 0);
}

TEMPLATE_TEST_CASE("transport/endpoint: a handler may send", "[transport][fast]", HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  constexpr std::uint64_t kHops = 200;
  std::uint64_t last = 0;
  const auto bounce = [&](Side& side) {
    side.receiver.hook = [&](Recorder::Message& message) {
      last = number_of(message.header);
      if (last == kHops) return;
      const std::size_t bytes = last % 3 == 0 ? 0 : last % 3 == 1 ? 200 : 60000;
      Buffer payload = bytes > 0 ? side.filled(bytes, last + 1) : Buffer();
      CHECK(side.peer->send(numbered(last + 1), payload, bytes, {}).is_ok());
    };
  };
  bounce(pair->a);
  bounce(pair->b);
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] {
    pair->release_all();
    return last == kHops;
  }));
}

TEMPLATE_TEST_CASE("transport/endpoint: done may send again", "[transport][fast]", HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  std::uint64_t sent = 0;
  std::function<void()> send_next = [&] {
    if (sent == 50) return;
    const std::uint64_t number = sent++;
    CHECK(pair->a.peer->send(numbered(number), pair->a.filled(200, number), 200, [&](core::Status) { send_next(); })
              .is_ok());
  };
  send_next();
  std::uint64_t received = 0;
  REQUIRE(pair->run_until([&] {
    received += pair->b.receiver.messages.size();
    pair->release_all();
    return received == 50 && pair->a.pool->slots_in_use() == 0;
  }));
}

TEMPLATE_TEST_CASE("transport/endpoint: a bad request is refused and changes nothing", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  Side::Done done;
  Buffer payload = pair->a.filled(100, 1);
  CHECK(pair->a.peer->send({}, payload, 100, pair->a.record(done)).code() == core::Code::kInvalidArgument);
  CHECK(pair->a.peer->send(make_header(kHeaderBytesMax + 1, 0), payload, 100, pair->a.record(done)).code() ==
        core::Code::kInvalidArgument);
  CHECK(pair->a.peer->send(numbered(0), payload, payload.capacity_bytes() + 1, pair->a.record(done)).code() ==
        core::Code::kInvalidArgument);
  CHECK(pair->a.peer->send(numbered(0), {}, 1, pair->a.record(done)).code() == core::Code::kInvalidArgument);
  alignas(64) std::array<std::byte, 256> foreign{};
  {
    const BufferPool::SizeClass classes[] = {{256, 1}};
    BufferPool foreign_pool(foreign, classes);
    CHECK(pair->a.peer->send(numbered(0), foreign_pool.allocate(10), 10, pair->a.record(done)).code() ==
          core::Code::kInvalidArgument);
    CHECK(foreign_pool.slots_in_use() == 0);
  }
  pair->settle();
  CHECK(done.count == 0);
  CHECK(pair->b.receiver.messages.empty());
  CHECK(pair->a.transport->stats().tx_messages == 0);
  REQUIRE(pair->a.peer->send(numbered(3), payload, 100, pair->a.record(done)).is_ok());
  payload = Buffer();
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
}

TEMPLATE_TEST_CASE("transport/endpoint: statistics count accepted and delivered bytes exactly", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  CHECK(pair->a.transport->stats().endpoints_open == 1);
  std::uint64_t payload_sum = 0;
  std::uint64_t header_sum = 0;
  const std::size_t sizes[] = {0, 1, 256, 70000, 4096};
  for (std::size_t i = 0; i < 5; ++i) {
    Buffer payload = sizes[i] > 0 ? pair->a.filled(sizes[i], i) : Buffer();
    REQUIRE(pair->a.peer->send(make_header(10 + i, i), payload, sizes[i], {}).is_ok());
    payload_sum += sizes[i];
    header_sum += 10 + i;
  }
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 5; }));
  const TransportStats tx = pair->a.transport->stats();
  CHECK(tx.tx_messages == 5);
  CHECK(tx.tx_payload_bytes == payload_sum);
  CHECK(tx.tx_header_bytes == header_sum);
  CHECK(tx.rx_messages == 0);
  const TransportStats rx = pair->b.transport->stats();
  CHECK(rx.rx_messages == 5);
  CHECK(rx.rx_payload_bytes == payload_sum);
  CHECK(rx.rx_header_bytes == header_sum);
  CHECK(rx.tx_messages == 0);
}

TEMPLATE_TEST_CASE("transport/transport: connect gives one endpoint per peer and find knows it", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  CHECK(pair->a.transport->find(pair->b.id) == nullptr);
  pair->connect();
  CHECK(pair->a.peer->peer() == pair->b.id);
  CHECK(pair->a.transport->find(pair->b.id) == pair->a.peer);
  auto again = pair->a.transport->connect(pair->b.id, pair->b.transport->address());
  REQUIRE(again.is_ok());
  CHECK(again.value() == pair->a.peer);
  CHECK(pair->a.transport->find(core::EngineId{12345}) == nullptr);
}

TEMPLATE_TEST_CASE("transport/transport: malformed addresses are refused", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  const std::vector<std::byte> good = pair->b.transport->address();
  REQUIRE(good.size() > 8);
  CHECK(good.size() < 1024);
  const auto refused = [&](std::vector<std::byte> address) {
    auto result = pair->a.transport->connect(pair->b.id, address);
    return !result.is_ok() && result.status().code() == core::Code::kInvalidArgument;
  };
  CHECK(refused({}));
  for (std::size_t bytes = 1; bytes < good.size(); ++bytes) {
    INFO("cut to " << bytes);
    CHECK(refused({good.begin(), good.begin() + static_cast<std::ptrdiff_t>(bytes)}));
  }
  auto longer = good;
  longer.push_back(std::byte{0});
  CHECK(refused(longer));
  for (std::size_t i = 0; i < good.size(); ++i) {
    INFO("byte " << i << " changed");
    auto changed = good;
    changed[i] ^= std::byte{0x20};
    CHECK(refused(changed));
  }
  std::mt19937 random(3);
  for (int i = 0; i < 200; ++i) {
    std::vector<std::byte> noise(random() % 300);
    for (auto& byte : noise) byte = static_cast<std::byte>(random());
    CHECK(refused(noise));
  }
  CHECK(refused(std::vector<std::byte>(100000)));
  CHECK(pair->a.transport->stats().endpoints_open == 0);
  pair->connect();  // and the good one still works
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
}

TEMPLATE_TEST_CASE("transport/endpoint: a closed endpoint refuses with the first cause", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  pair->a.peer->close(core::Status(core::Code::kPeerDead, "no heartbeat for 5 s"));
  pair->a.peer->close(core::Status(core::Code::kClosed, "a later cause"));
  Side::Done done;
  const core::Status refused = pair->a.peer->send(numbered(1), {}, 0, pair->a.record(done));
  CHECK(refused.code() == core::Code::kPeerDead);
  CHECK(refused.message() == "no heartbeat for 5 s");
  CHECK(pair->a.transport->find(pair->b.id) == nullptr);
  const auto again = pair->a.transport->connect(pair->b.id, pair->b.transport->address());
  CHECK(again.status().code() == core::Code::kPeerDead);
  pair->settle();
  CHECK(done.count == 0);
  CHECK(pair->a.receiver.failures.empty());  // the engine knows its own verdict
  CHECK(pair->a.transport->stats().endpoints_open == 0);
}

TEMPLATE_TEST_CASE("transport/endpoint: close gives every pending done its cause once", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  // Both sides are warm, so that the messages below are really on their way.
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  const core::Code code = GENERATE(core::Code::kPeerDead, core::Code::kClosed);
  std::vector<Side::Done> done(8);
  for (std::size_t i = 0; i < done.size(); ++i) {
    const std::size_t bytes = i < 4 ? kLargeBytes : 60000;
    Buffer payload = pair->a.filled(bytes, i);
    REQUIRE(payload);
    REQUIRE(pair->a.peer->send(numbered(i), payload, bytes, pair->a.record(done[i])).is_ok());
  }
  pair->a.peer->close(core::Status(code, "told to"));
  for (const auto& each : done) CHECK(each.count == 0);
  CHECK(pair->run_until([&] {
    pair->release_all();
    for (const auto& each : done)
      if (each.count == 0) return false;
    return true;
  }));
  pair->settle();
  for (const auto& each : done) {
    CHECK(each.count == 1);
    // A send that had completed before close() may say so.
    if (!each.last.is_ok()) CHECK(each.last.message() == "told to");
  }
  if constexpr (!requires { TestType::kSendsByItself; }) CHECK_FALSE(done[3].last.is_ok());
  CHECK(pair->a.pool->slots_in_use() == 0);
  CHECK(pair->a.done_outside_progress == 0);
}

TEMPLATE_TEST_CASE("transport/endpoint: messages accepted before a friendly close arrive", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  for (std::uint64_t i = 0; i < 6; ++i)
    REQUIRE(pair->a.peer->send(numbered(i), pair->a.filled(60000, i), 60000, {}).is_ok());
  pair->a.peer->close(core::Status(core::Code::kClosed, "goodbye"));
  const bool all_came = pair->run_until([&] { return pair->b.receiver.messages.size() == 6; });
  std::string came;
  for (const auto& message : pair->b.receiver.messages) came += std::to_string(number_of(message.header)) + " ";
  for (const auto& [peer, cause] : pair->b.receiver.failures) came += cause.to_string();
  INFO("came: " << came << "; slots in use " << pair->a.pool->slots_in_use());
  REQUIRE(all_came);
  for (const auto& message : pair->b.receiver.messages)
    CHECK(matches(message.payload.data(), message.payload.bytes(), number_of(message.header)));
  pair->release_all();
  CHECK(pair->run_until([&] { return pair->a.pool->slots_in_use() == 0; }));
}

TEMPLATE_TEST_CASE("transport/transport: a peer that goes away is reported once and its sends end", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  if (!TestType::kReportsPeerGone) return;
  auto pair = TestType::make_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->b.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(
      pair->run_until([&] { return pair->a.receiver.messages.size() == 1 && pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  std::vector<Side::Done> done(4);
  for (std::size_t i = 0; i < done.size(); ++i)
    REQUIRE(
        pair->a.peer->send(numbered(i), pair->a.filled(kLargeBytes, i), kLargeBytes, pair->a.record(done[i])).is_ok());
  pair->b.transport.reset();
  REQUIRE(pair->run_until([&] {
    for (const auto& each : done)
      if (each.count == 0) return false;
    return pair->a.receiver.failures.size() == 1;
  }));
  pair->settle();
  REQUIRE(pair->a.receiver.failures.size() == 1);
  CHECK(pair->a.receiver.failures[0].first == pair->b.id);
  CHECK(pair->a.receiver.failures[0].second.code() == core::Code::kPeerDead);
  CHECK_FALSE(pair->a.receiver.failures[0].second.message().empty());
  for (const auto& each : done) CHECK(each.count == 1);
  CHECK(pair->a.pool->slots_in_use() == 0);
  CHECK(pair->a.transport->find(pair->b.id) == nullptr);
  Side::Done refused;
  CHECK(pair->a.peer->send(numbered(1), {}, 0, pair->a.record(refused)).code() == core::Code::kPeerDead);
  CHECK(refused.count == 0);
  CHECK_FALSE(pair->a.receiver.called_outside_progress);
}

TEMPLATE_TEST_CASE("transport/transport: memory of a device is sent from where it was attached and refused elsewhere",
                   "[transport][fast]", HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  std::vector<std::byte> memory(kLargeBytes);
  fill(memory.data(), memory.size(), 3);
  const auto kept = std::make_shared<int>(0);
  const auto send = [&](std::size_t from, std::size_t bytes, Side::Done& done) {
    const Buffer payload = pair->a.pool->lend(memory.data() + from, bytes, kept);
    CHECK(payload.is_lent());
    CHECK(payload.capacity_bytes() == bytes);
    return pair->a.peer->send(numbered(1), payload, bytes, pair->a.record(done));
  };
  Side::Done refused;
  CHECK(send(0, 1000, refused).code() == core::Code::kInvalidArgument);
  CHECK(kept.use_count() == 1);
  const core::Status attached = pair->a.transport->attach_device({{memory.data(), memory.size()}, {}});
  if (attached.is_ok()) {
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{4096}, std::size_t{300001}}) {
      Side::Done done;
      const TransportStats before = pair->a.transport->stats();
      REQUIRE(send(5, bytes, done).is_ok());
      CHECK(kept.use_count() == 2);
      REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
      const auto& payload = pair->b.receiver.messages.front().payload;
      REQUIRE(payload.bytes() == bytes);
      CHECK(std::memcmp(payload.data(), memory.data() + 5, bytes) == 0);
      pair->release_all();
      REQUIRE(pair->run_until([&] { return done.count == 1; }));
      CHECK(kept.use_count() == 1);
      CHECK(pair->a.transport->stats().tx_device_bytes == before.tx_device_bytes + bytes);
      CHECK(pair->a.transport->stats().tx_payload_bytes == before.tx_payload_bytes + bytes);
    }
    pair->a.transport->detach_device({memory.data(), memory.size()});
  } else {
    const bool cannot = attached.code() == core::Code::kUnsupported || attached.code() == core::Code::kOutOfResources;
    CHECK(cannot);
    CHECK(attached.message() != "");
  }
  CHECK(send(0, 1000, refused).code() == core::Code::kInvalidArgument);
  CHECK(kept.use_count() == 1);
  CHECK(refused.count == 0);
  CHECK(pair->a.pool->lent() == 0);
  CHECK(pair->a.pool->slots_in_use() == 0);
}

TEMPLATE_TEST_CASE("transport/transport: destruction ends pending sends once and calls no receiver",
                   "[transport][fast]", HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  std::vector<Side::Done> done(3);
  for (std::size_t i = 0; i < done.size(); ++i)
    REQUIRE(
        pair->a.peer->send(numbered(i), pair->a.filled(kLargeBytes, i), kLargeBytes, pair->a.record(done[i])).is_ok());
  REQUIRE(pair->b.peer->send(numbered(9), {}, 0, {}).is_ok());
  pair->a.transport.reset();
  for (const auto& each : done) CHECK(each.count == 1);
  CHECK(pair->a.pool->slots_in_use() == 0);
  CHECK(pair->a.receiver.messages.empty());
  CHECK(pair->a.receiver.failures.empty());
  pair->settle();
}

TEMPLATE_TEST_CASE("transport/transport: the event tells of a message and of a completion", "[transport][fast]",
                   HYBRIDPS_ENDPOINT_BACKENDS) {
  auto pair = TestType::make_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  pair->settle();
  if (pair->b.transport->event_fd() < 0) return;  // a transport that is polled
  for (int round = 0; round < 20; ++round) {
    Side::Done done;
    const std::size_t bytes = round % 3 == 0 ? 0 : round % 3 == 1 ? 60000 : kLargeBytes;
    Buffer payload = bytes > 0 ? pair->a.filled(bytes, 1) : Buffer();
    // Idle first: nothing may wake us, or at most spuriously.
    for (int i = 0; i < 50 && wait_for_event(pair->b, 0); ++i) {
    }
    REQUIRE(pair->a.peer->send(numbered(1), payload, bytes, pair->a.record(done)).is_ok());
    payload = Buffer();
    // Each side sleeps on its descriptor; a limit of 5 s in place of a wake-up fails the case.
    const auto started = std::chrono::steady_clock::now();
    while (pair->b.receiver.messages.empty() || done.count == 0) {
      while (pair->a.progress() + pair->b.progress() > 0) {
      }
      if (!pair->b.receiver.messages.empty()) pair->release_all(), pair->b.receiver.messages.emplace_back();
      if (!pair->a.transport->arm() || !pair->b.transport->arm()) continue;
      if (!pair->b.receiver.messages.empty() && done.count > 0) break;
      pollfd events[2] = {{pair->a.transport->event_fd(), POLLIN, 0}, {pair->b.transport->event_fd(), POLLIN, 0}};
      REQUIRE(::poll(events, 2, 5000) > 0);
    }
    pair->release_all();
    CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(5));
  }
}

}  // namespace hybridps::transport::contract

#endif  // HYBRIDPS_ENDPOINT_BACKENDS
