// Round trips to ports of this machine: one that listens, one that does not, and one that never answers.
#include "hybridps/transport/tcp/round_trip.h"

#include <sys/socket.h>

#include <thread>

#include "hybridps/transport/tcp/tcp_socket.h"
#include "tests/support/catch.h"

namespace hybridps::transport {
namespace {

using namespace std::chrono_literals;

/// A port of the loopback interface.
struct Port {
  explicit Port(int backlog) : socket(make_socket(AF_INET)), address(*parse_address("127.0.0.1", 0)) {
    REQUIRE(::bind(socket.get(), address.get(), address.bytes) == 0);
    address.bytes = sizeof address.name;
    REQUIRE(::getsockname(socket.get(), reinterpret_cast<sockaddr*>(&address.name), &address.bytes) == 0);
    if (backlog >= 0) REQUIRE(::listen(socket.get(), backlog) == 0);
  }
  core::Descriptor socket;
  SocketAddress address;
};

std::optional<std::uint32_t> measured(RoundTrip& trip) {
  for (int i = 0; i < 1000; ++i) {
    if (const auto us = trip.step(core::Clock::now())) return us;
    std::this_thread::sleep_for(1ms);
  }
  return {};
}

}  // namespace

TEST_CASE("transport/tcp: the round trip of a host is known, though nobody there accepts", "[transport][fast]") {
  const Port port(16);
  RoundTrip trip(port.address, core::Clock::now());
  const auto us = measured(trip);
  REQUIRE(us);
  CHECK(*us >= 1);
  CHECK(*us < 1'000'000);
}

TEST_CASE("transport/tcp: the round trip of a host that refuses is not known", "[transport][fast]") {
  const Port port(-1);
  RoundTrip trip(port.address, core::Clock::now());
  CHECK(measured(trip) == 0);
}

TEST_CASE("transport/tcp: the round trip of a host that does not answer is given up", "[transport][fast]") {
  const Port port(0);
  std::vector<core::Descriptor> fill;  // a full queue of connections drops what comes
  for (int i = 0; i < 8; ++i) {
    fill.push_back(make_socket(AF_INET));
    (void)::connect(fill.back().get(), port.address.get(), port.address.bytes);
  }
  const core::TimePoint began = core::Clock::now();
  RoundTrip trip(port.address, began);
  CHECK_FALSE(trip.step(began + RoundTrip::kGiveUpAfter - 1ms));
  CHECK(trip.step(began + RoundTrip::kGiveUpAfter) == 0);
}

}  // namespace hybridps::transport
