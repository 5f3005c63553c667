#include <atomic>
#include <thread>

#include "hybridps/transport/loopback/loopback_transport.h"

namespace hybridps::transport {
namespace contract {
struct Pair;
}
struct LoopbackBackend {
  static std::unique_ptr<contract::Pair> make_pair();
  static constexpr bool kReportsPeerGone = true;
};
}  // namespace hybridps::transport

#define HYBRIDPS_ENDPOINT_BACKENDS ::hybridps::transport::LoopbackBackend
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::transport {

std::unique_ptr<contract::Pair> LoopbackBackend::make_pair() {
  auto pair = std::make_unique<contract::Pair>();
  LoopbackHub hub(LoopbackHub::Done::kReleased, [](const std::byte* address) { return address; });
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    side->transport = hub.make_transport(side->id);
  }
  pair->finish_setup();
  return pair;
}

namespace {

using contract::numbered;

struct Fixture {
  LoopbackHub hub;
  contract::Pair pair;
  Fixture() {
    for (contract::Side* side : {&pair.a, &pair.b}) {
      side->use_heap();
      side->transport = hub.make_transport(side->id);
    }
    pair.finish_setup();
    pair.connect();
  }
};

TEST_CASE("transport/loopback: done waits until the receiver gives the payload back", "[transport][fast]") {
  Fixture f;
  contract::Side::Done done;
  REQUIRE(f.pair.a.peer->send(numbered(1), f.pair.a.filled(100, 1), 100, f.pair.a.record(done)).is_ok());
  REQUIRE(f.pair.run_until([&] { return f.pair.b.receiver.messages.size() == 1; }));
  f.pair.settle();
  CHECK(done.count == 0);
  CHECK(f.hub.payloads_lent() == 1);
  f.pair.release_all();
  CHECK(f.hub.payloads_lent() == 0);
  f.pair.settle(1);
  CHECK(done.count == 1);
}

TEST_CASE("transport/loopback: a payload changed before its done is counted", "[transport][fast]") {
  Fixture f;
  Buffer payload = f.pair.a.filled(100, 1);
  REQUIRE(f.pair.a.peer->send(numbered(1), payload, 100, {}).is_ok());
  f.pair.settle(1);
  payload.data()[7] ^= std::byte{1};
  f.pair.release_all();
  CHECK(f.hub.payloads_changed_early() == 1);
}

TEST_CASE("transport/loopback: messages arrive in the order of sending", "[transport][fast]") {
  Fixture f;
  for (std::uint64_t i = 0; i < 20; ++i) REQUIRE(f.pair.a.peer->send(numbered(i), {}, 0, {}).is_ok());
  CHECK(f.pair.b.progress() == 20);
  for (std::uint64_t i = 0; i < 20; ++i) CHECK(contract::number_of(f.pair.b.receiver.messages[i].header) == i);
}

TEST_CASE("transport/pool: what was lent has a life of its own and is let go once", "[transport][fast]") {
  contract::Side side;
  side.use_heap();
  std::vector<std::byte> memory(300);
  const auto kept = std::make_shared<int>(0);
  Buffer first = side.pool->lend(memory.data(), 100, kept);
  const Buffer slot = side.pool->allocate(10);
  const Buffer second = side.pool->lend(memory.data() + 100, 200, kept);
  CHECK(side.pool->lent() == 2);
  CHECK(side.pool->slots_in_use() == 1);
  CHECK_FALSE(slot.is_lent());
  CHECK(first.data() == memory.data());
  CHECK(second.capacity_bytes() == 200);
  Buffer shared = side.pool->revive(first.slot(), first.life());
  REQUIRE(shared);
  CHECK(shared.data() == memory.data());
  const std::uint32_t place = first.slot();
  const std::uint64_t life = first.life();
  first = Buffer();
  CHECK(kept.use_count() == 3);
  shared = Buffer();
  CHECK(kept.use_count() == 2);
  CHECK_FALSE(side.pool->revive(place, life));
  const Buffer third = side.pool->lend(memory.data(), 50, nullptr);
  CHECK(third.slot() == place);  // the place is used again, in another life
  CHECK_FALSE(side.pool->revive(place, life));
}

TEST_CASE("transport/loopback: a killed engine falls silent and its peers hear of it", "[transport][fast]") {
  Fixture f;
  contract::Side::Done from_a;
  contract::Side::Done from_b;
  REQUIRE(f.pair.a.peer->send(numbered(1), f.pair.a.filled(50, 1), 50, f.pair.a.record(from_a)).is_ok());
  REQUIRE(f.pair.b.peer->send(numbered(2), f.pair.b.filled(50, 2), 50, f.pair.b.record(from_b)).is_ok());
  f.hub.kill(f.pair.b.id);
  f.pair.settle(3);
  CHECK(f.pair.a.receiver.messages.empty());
  CHECK(f.pair.b.receiver.messages.empty());
  REQUIRE(f.pair.a.receiver.failures.size() == 1);
  CHECK(f.pair.a.receiver.failures[0].first == f.pair.b.id);
  CHECK(from_a.count == 1);
  CHECK(from_a.last.code() == core::Code::kPeerDead);
  CHECK(from_b.count == 0);  // a dead process completes nothing
  CHECK(f.pair.b.receiver.failures.empty());
  CHECK_FALSE(f.pair.a.transport->connect(f.pair.b.id, f.pair.b.transport->address()).is_ok());
}

TEST_CASE("transport/loopback: an address names its engine", "[transport][fast]") {
  Fixture f;
  const auto wrong = f.pair.a.transport->connect(core::make_engine_id(), f.pair.b.transport->address());
  CHECK(wrong.status().code() == core::Code::kInvalidArgument);
  LoopbackHub other;
  const core::EngineId stranger = core::make_engine_id();
  const auto elsewhere = other.make_transport(stranger);
  CHECK(f.pair.a.transport->connect(stranger, elsewhere->address()).status().code() == core::Code::kPeerDead);
}

TEST_CASE("transport/loopback: transports of one hub may run on different threads", "[transport][fast]") {
  Fixture f;
  constexpr std::uint64_t kCount = 3000;
  std::atomic<int> finished{0};
  const auto work = [&](contract::Side& side) {
    std::uint64_t sent = 0;
    std::uint64_t completed = 0;
    std::uint64_t received = 0;
    std::size_t wrong = 0;
    bool counted = false;
    while (finished.load() < 2) {
      while (sent < kCount) {
        Buffer payload = side.filled(200, sent);
        if (!payload) break;
        if (!side.peer->send(numbered(sent), payload, 200, [&](core::Status) { ++completed; }).is_ok()) ++wrong;
        ++sent;
      }
      if (side.progress() == 0 && side.transport->arm()) {
        pollfd event{side.transport->event_fd(), POLLIN, 0};
        ::poll(&event, 1, 20);
      }
      for (const auto& message : side.receiver.messages) {
        if (!contract::matches(message.payload.data(), 200, contract::number_of(message.header))) ++wrong;
        ++received;
      }
      side.receiver.messages.clear();
      if (!counted && completed == kCount && received == kCount) {
        counted = true;
        ++finished;
      }
    }
    return wrong;
  };
  std::size_t wrong_a = 1;
  std::thread thread([&] { wrong_a = work(f.pair.a); });
  const std::size_t wrong_b = work(f.pair.b);
  thread.join();
  CHECK(wrong_a == 0);
  CHECK(wrong_b == 0);
  CHECK(f.hub.payloads_changed_early() == 0);
}

}  // namespace
}  // namespace hybridps::transport
