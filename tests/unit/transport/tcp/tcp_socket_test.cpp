// tests/unit/transport/tcp/tcp_socket_test.cpp: send buffers over paths that hold much.
#include "hybridps/transport/tcp/tcp_socket.h"

#include <sys/socket.h>

#include <algorithm>

#include "tests/support/catch.h"

using namespace hybridps;
using namespace hybridps::transport;

namespace {

constexpr std::uint64_t kKib = 1024;

std::uint64_t send_buffer(int socket) {
  int size = 0;
  socklen_t length = sizeof size;
  REQUIRE(::getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &size, &length) == 0);
  return static_cast<std::uint64_t>(size);
}

PathInfo path(double bytes_per_second, double min_rtt_seconds) {
  PathInfo made{core::EngineId{1}};
  made.bytes_per_second = bytes_per_second;
  made.min_rtt_seconds = min_rtt_seconds;
  return made;
}

}  // namespace

TEST_CASE("transport/tcp: a path that holds much gets a larger send buffer, and never a smaller one", "[tcp][fast]") {
  const SendBufferLimits limits{64 * kKib, std::min(256 * kKib, send_buffer_limits().asked)};
  REQUIRE(limits.asked > limits.own);
  const core::Descriptor socket = make_socket(AF_INET);
  REQUIRE(socket);
  const int small = 16 * 1024;
  REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &small, sizeof small) == 0);
  const std::uint64_t before = send_buffer(socket.get());
  make_send_room(socket.get(), path(25e6, 0), limits);  // round trip not known
  make_send_room(socket.get(), path(0, 0.05), limits);
  make_send_room(socket.get(), path(160e3, 0.05), limits);  // 8 KB: the kernel's own choice is enough
  CHECK(send_buffer(socket.get()) == before);
  make_send_room(socket.get(), path(25e6, 0.05), limits);  // 1.25 MB
  CHECK(send_buffer(socket.get()) == limits.asked);
  make_send_room(socket.get(), path(320e3, 0.05), limits);
  CHECK(send_buffer(socket.get()) == limits.asked);
}

TEST_CASE("transport/tcp: no send buffer changes where the kernel's own choice is larger", "[tcp][fast]") {
  const core::Descriptor socket = make_socket(AF_INET);
  REQUIRE(socket);
  const std::uint64_t before = send_buffer(socket.get());
  make_send_room(socket.get(), path(25e6, 0.05), {4096 * kKib, 256 * kKib});
  make_send_room(socket.get(), path(25e6, 0.05), {});  // limits that are not known
  CHECK(send_buffer(socket.get()) == before);
}

TEST_CASE("transport/tcp: the limits of send buffers are those of this host", "[tcp][fast]") {
  const SendBufferLimits& limits = send_buffer_limits();
  CHECK(limits.own > 0);
  const core::Descriptor socket = make_socket(AF_INET);
  const int most = static_cast<int>(limits.asked / 2);
  REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &most, sizeof most) == 0);
  CHECK(send_buffer(socket.get()) == limits.asked);
  const int more = most + 64 * 1024;
  REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &more, sizeof more) == 0);
  CHECK(send_buffer(socket.get()) == limits.asked);
}
