// tests/unit/transport/tcp/tcp_socket_test.cpp: send buffers over paths that hold much.
#include "hybridps/transport/tcp/tcp_socket.h"

#include <fcntl.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>

#include <algorithm>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/catch.h"
#include "tests/unit/transport/tcp/tcp_pair.h"

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

/// A network namespace for this thread, with send buffers of 4 KiB, until the end.
class NetworkOfSmallBuffers {
 public:
  NetworkOfSmallBuffers() : before_(core::ForkLock(), ::open("/proc/thread-self/ns/net", O_RDONLY | O_CLOEXEC)) {
    if (!before_ || ::unshare(CLONE_NEWNET) != 0) return;
    is_in_ = true;
    const core::Descriptor socket = make_socket(AF_INET);
    ifreq loopback{};
    std::strcpy(loopback.ifr_name, "lo");
    loopback.ifr_flags = IFF_UP;
    std::ofstream sizes("/proc/sys/net/ipv4/tcp_wmem");
    stands_ = ::ioctl(socket.get(), SIOCSIFFLAGS, &loopback) == 0 && sizes << "4096 4096 4096" << std::flush;
  }
  ~NetworkOfSmallBuffers() {
    if (is_in_) CHECK(::setns(before_.get(), CLONE_NEWNET) == 0);
  }
  bool stands() const { return stands_; }

 private:
  core::Descriptor before_;
  bool is_in_ = false;
  bool stands_ = false;
};

/// The largest of the connected sockets of this process.
std::uint64_t largest_send_buffer() {
  std::uint64_t largest = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int socket = std::stoi(entry.path().filename());
    sockaddr_storage peer{};
    socklen_t length = sizeof peer;
    int size = 0;
    socklen_t size_length = sizeof size;
    if (::getpeername(socket, reinterpret_cast<sockaddr*>(&peer), &length) == 0 && peer.ss_family == AF_INET &&
        ::getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &size, &size_length) == 0)
      largest = std::max(largest, static_cast<std::uint64_t>(size));
  }
  return largest;
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

TEST_CASE("transport/tcp: a full send buffer is widened while the connection sends", "[tcp][fast]") {
  const bool has_tls = GENERATE(false, true);
  const NetworkOfSmallBuffers network;
  if (!network.stands()) {
    WARN("skipped: no network namespace whose tcp_wmem could be set can be had here");
    return;
  }
  const std::uint64_t before = send_buffer_limits().own;
  CHECK(before == 4096);
  auto pair = make_tcp_pair(has_tls ? tls_options() : test_options());
  pair->connect();
  bool is_wider = false;
  const auto until = core::Clock::now() + std::chrono::seconds(20);
  for (std::uint64_t i = 0; !is_wider && core::Clock::now() < until; ++i) {
    const Buffer payload = pair->a.filled(contract::kLargeBytes, i);
    REQUIRE(pair->a.peer->send(contract::numbered(i), payload, contract::kLargeBytes, {}).is_ok());
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    CHECK(contract::matches(pair->b.receiver.messages.front().payload.data(), contract::kLargeBytes, i));
    pair->release_all();
    if (const auto paths = pair->a.transport->paths(); i == 9 && paths.at(0).bytes_per_second <= 0) {
      WARN("skipped: the kernel does not tell the rate of a connection");
      return;
    }
    is_wider = largest_send_buffer() > 4 * before;
  }
  CHECK(is_wider);
}

TEST_CASE("transport/tcp: the limits of send buffers are those of this host", "[tcp][fast]") {
  const SendBufferLimits limits = send_buffer_limits();
  CHECK(limits.own > 0);
  const core::Descriptor socket = make_socket(AF_INET);
  const int most = static_cast<int>(limits.asked / 2);
  REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &most, sizeof most) == 0);
  CHECK(send_buffer(socket.get()) == limits.asked);
  const int more = most + 64 * 1024;
  REQUIRE(::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &more, sizeof more) == 0);
  CHECK(send_buffer(socket.get()) == limits.asked);
}
