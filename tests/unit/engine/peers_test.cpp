#include "hybridps/engine/peers.h"

#include <chrono>
#include <utility>

#include "hybridps/transport/loopback/loopback_transport.h"
#include "tests/support/catch.h"

using namespace hybridps;

TEST_CASE("engine/peers: a peer that had no group for a minute is forgotten, but not each one that lives",
          "[engine][fast]") {
  transport::LoopbackHub hub;
  engine::Transports transports;
  transports.data = hub.make_transport({1});
  engine::Peers peers(transports, {});
  for (std::uint64_t id : {2, 3, 4}) {
    engine::PeerRecord record;
    record.engine = {id};
    peers.add(std::move(record));
  }
  peers.enter_group(*peers.find({3}));
  peers.enter_group(*peers.find({4}));
  const core::TimePoint now = core::Clock::now();
  for (std::uint64_t id : {3, 4}) {
    peers.find({id})->groups = 0;
    peers.find({id})->unused_since = now;
  }
  CHECK(peers.forget_unused(now + std::chrono::seconds(50), false).empty());
  // Nothing has come from it, and nothing will.
  CHECK(peers.forget_unused(now + std::chrono::seconds(61), false) == std::vector<core::EngineId>{{2}});
  peers.find({4})->dead = true;
  CHECK(peers.forget_unused(now + std::chrono::seconds(61), false) == std::vector<core::EngineId>{{4}});
  CHECK(peers.forget_unused(now + std::chrono::seconds(61), true) == std::vector<core::EngineId>{{3}});
  CHECK(peers.size() == 0);
}
