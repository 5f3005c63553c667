// Paths to a port of this machine that at first refuses and later listens.
#include "hybridps/engine/round_trips.h"

#include <sys/socket.h>

#include <chrono>
#include <thread>

#include "hybridps/engine/records.h"
#include "hybridps/transport/tcp/tcp_socket.h"
#include "hybridps/transport/tcp/tcp_wire.h"
#include "tests/support/catch.h"
#include "tests/unit/bootstrap/sample.h"

using namespace hybridps;
using namespace std::chrono_literals;

namespace {

std::vector<std::uint32_t> measured(const bootstrap::Roster& roster, engine::KnownRoundTrips& known) {
  engine::RoundTrips trips(roster, 0, known);
  for (int i = 0; i < 1000 && !trips.step(core::Clock::now()); ++i) std::this_thread::sleep_for(1ms);
  return trips.by_node();
}

}  // namespace

TEST_CASE("engine/round trips: a path that could not be measured is tried again for the next group", "[engine][fast]") {
  const core::Descriptor port = transport::make_socket(AF_INET);
  transport::TcpAddress address{transport::make_tcp_id(), *transport::parse_address("127.0.0.1", 0)};
  REQUIRE(::bind(port.get(), address.socket.get(), address.socket.bytes) == 0);
  address.socket.bytes = sizeof address.socket.name;
  REQUIRE(::getsockname(port.get(), reinterpret_cast<sockaddr*>(&address.socket.name), &address.socket.bytes) == 0);
  bootstrap::Roster roster = bootstrap::testing::sample_roster(4);
  roster.members[2].control_address = engine::to_record(transport::encode(address));
  engine::KnownRoundTrips known;
  CHECK(measured(roster, known) == std::vector<std::uint32_t>{0, 0});
  REQUIRE(::listen(port.get(), 16) == 0);
  const std::vector<std::uint32_t> found = measured(roster, known);
  REQUIRE(found.size() == 2);
  CHECK(found[1] > 0);

  REQUIRE(::shutdown(port.get(), SHUT_RDWR) == 0);  // refuses again
  CHECK(measured(roster, known) == found);          // what was measured is kept
}
