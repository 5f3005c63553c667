#include "tests/support/faulty_transport.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "hybridps/transport/loopback/loopback_transport.h"
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::transport {
namespace {

using test_support::Faults;
using test_support::FaultyTransport;

std::unique_ptr<contract::Pair> make_faulty_pair(const Faults& faults, std::uint64_t seed) {
  auto pair = std::make_unique<contract::Pair>();
  LoopbackHub hub;
  for (contract::Side* side : {&pair->a, &pair->b}) {
    side->use_heap();
    side->transport = std::make_unique<FaultyTransport>(hub.make_transport(side->id), faults, seed++);
  }
  pair->finish_setup();
  pair->connect();
  return pair;
}

FaultyTransport& faulty(contract::Side& side) { return static_cast<FaultyTransport&>(*side.transport); }

struct Outcome {
  std::vector<std::uint64_t> arrived;
  std::size_t done = 0;
  FaultyTransport::Counts counts;
};

Outcome send_hundred(const Faults& faults, std::uint64_t seed) {
  auto pair = make_faulty_pair(faults, seed);
  contract::Side::Done done;
  for (std::uint64_t i = 0; i < 100; ++i)
    REQUIRE(pair->a.peer
                ->send(contract::numbered(i), i % 2 ? pair->a.filled(100, i) : Buffer(), i % 2 ? 100 : 0,
                       pair->a.record(done))
                .is_ok());
  Outcome outcome;
  pair->run_until(
      [&] {
        for (const auto& message : pair->b.receiver.messages) {
          const std::uint64_t number = contract::number_of(message.header);
          CHECK(contract::matches(message.payload.data(), message.payload.bytes(), number));
          outcome.arrived.push_back(number);
        }
        pair->release_all();
        return false;
      },
      0);
  pair->settle();
  CHECK(pair->a.pool->slots_in_use() == 0);
  outcome.done = done.count;
  outcome.counts = faulty(pair->a).counts();
  return outcome;
}

TEST_CASE("transport/faulty: no faults change nothing", "[transport][fast]") {
  const Outcome outcome = send_hundred({}, 1);
  REQUIRE(outcome.arrived.size() == 100);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(outcome.arrived[i] == i);
  CHECK(outcome.done == 100);
}

TEST_CASE("transport/faulty: delays reorder and lose nothing", "[transport][fast]") {
  Faults faults;
  faults.delay = 0.5;
  Outcome outcome = send_hundred(faults, 2);
  CHECK(outcome.done == 100);
  CHECK(outcome.counts.delayed > 20);
  CHECK_FALSE(std::is_sorted(outcome.arrived.begin(), outcome.arrived.end()));
  std::sort(outcome.arrived.begin(), outcome.arrived.end());
  REQUIRE(outcome.arrived.size() == 100);
  for (std::uint64_t i = 0; i < 100; ++i) CHECK(outcome.arrived[i] == i);
}

TEST_CASE("transport/faulty: drops and duplicates are counted and each done runs once", "[transport][fast]") {
  Faults faults;
  faults.drop = 0.2;
  faults.duplicate = 0.3;
  const Outcome outcome = send_hundred(faults, 3);
  CHECK(outcome.done == 100);
  CHECK(outcome.counts.dropped > 5);
  CHECK(outcome.counts.duplicated > 5);
  CHECK(outcome.arrived.size() == 100 - outcome.counts.dropped + outcome.counts.duplicated);
}

TEST_CASE("transport/faulty: one seed gives one history", "[transport][fast]") {
  Faults faults;
  faults.drop = 0.1;
  faults.duplicate = 0.1;
  faults.delay = 0.4;
  CHECK(send_hundred(faults, 7).arrived == send_hundred(faults, 7).arrived);
  CHECK(send_hundred(faults, 7).arrived != send_hundred(faults, 8).arrived);
}

TEST_CASE("transport/faulty: kill_after cuts the path once and tells both sides", "[transport][fast]") {
  Faults faults;
  faults.delay = 0.5;
  faults.kill_after = 10;
  auto pair = make_faulty_pair(faults, 4);
  contract::Side::Done done;
  std::size_t accepted = 0;
  for (std::uint64_t i = 0; i < 20; ++i)
    if (pair->a.peer->send(contract::numbered(i), pair->a.filled(50, i), 50, pair->a.record(done)).is_ok()) ++accepted;
  CHECK(accepted == 10);
  pair->settle();
  CHECK(done.count == 10);
  REQUIRE(pair->a.receiver.failures.size() == 1);
  CHECK(pair->a.receiver.failures[0].second.code() == core::Code::kPeerDead);
  CHECK(pair->b.receiver.failures.size() == 1);
  CHECK(pair->a.transport->find(pair->b.id) == nullptr);
  CHECK_FALSE(pair->a.transport->connect(pair->b.id, pair->b.transport->address()).is_ok());
  CHECK(pair->a.pool->slots_in_use() == 0);
}

TEST_CASE("transport/faulty: destruction ends what is held back", "[transport][fast]") {
  Faults faults;
  faults.delay = 1;
  auto pair = make_faulty_pair(faults, 5);
  contract::Side::Done done;
  for (std::uint64_t i = 0; i < 5; ++i)
    REQUIRE(pair->a.peer->send(contract::numbered(i), pair->a.filled(50, i), 50, pair->a.record(done)).is_ok());
  pair->a.transport.reset();
  CHECK(done.count == 5);
  CHECK(pair->a.pool->slots_in_use() == 0);
}

}  // namespace
}  // namespace hybridps::transport
