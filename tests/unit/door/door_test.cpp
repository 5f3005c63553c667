#include "hybridps/door/door.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using core::Code;
using door::Address;
using door::Bytes;
using door::Door;

core::Deadline soon(double seconds = 5) { return core::Deadline::after(core::from_seconds(seconds)); }

Bytes bytes(const std::string& text) { return Bytes(text.begin(), text.end()); }

std::unique_ptr<Door> echo(const std::string& token) {
  auto door = Door::open({"127.0.0.1", 0}, token, [](const Bytes& body) -> core::Result<Bytes> {
    if (body == bytes("refuse")) return core::Status(Code::kOutOfResources, "no room for this job");
    Bytes answer = bytes("you said ");
    answer.insert(answer.end(), body.begin(), body.end());
    return answer;
  });
  REQUIRE(door.is_ok());
  return std::move(door).value();
}

int raw_connection(int port) {
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(port));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  REQUIRE(::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0);
  return fd;
}

struct Listener {
  explicit Listener(int backlog = 8) {
    fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    inet_pton(AF_INET, "127.0.0.1", &at.sin_addr);
    REQUIRE(::bind(fd, reinterpret_cast<sockaddr*>(&at), sizeof at) == 0);
    REQUIRE(::listen(fd, backlog) == 0);
    socklen_t length = sizeof at;
    getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length);
    port = ntohs(at.sin_port);
  }
  ~Listener() { ::close(fd); }
  int fd = -1;
  int port = 0;
};

}  // namespace

TEST_CASE("door: addresses", "[door][fast]") {
  CHECK(door::parse_address("host:80").value().host == "host");
  CHECK(door::parse_address("[::1]:80").value().host == "::1");
  CHECK(door::parse_address("[::1]:80").value().text() == "[::1]:80");
  for (const std::string wrong : {"", "host", "host:", ":80", "host:x", "host:-1", "host:70000", "::1:80", "[]:80"})
    CHECK_FALSE(door::parse_address(wrong).is_ok());
  CHECK(door::parse_addresses("").value().empty());
  const auto two = door::parse_addresses(" a:1 ,b:2,");
  REQUIRE(two.is_ok());
  CHECK(two.value().size() == 2);
  CHECK(door::parse_addresses("a:1,a:1").status().message().find("twice") != std::string::npos);
}

TEST_CASE("door: a question and its answer, of any size", "[door][fast]") {
  const auto door = echo("secret");
  for (const std::size_t size : {1, 2, 1000, 16384, 16385, 3'000'000}) {
    const Bytes body(size, 7);
    const auto answer = door::ask({"127.0.0.1", door->port()}, "secret", body, soon());
    INFO(answer.status().to_string());
    REQUIRE(answer.is_ok());
    CHECK(answer.value().size() == size + 9);
  }
  const auto refused = door::ask({"127.0.0.1", door->port()}, "secret", bytes("refuse"), soon());
  CHECK(refused.status().code() == Code::kOutOfResources);
  CHECK(refused.status().message().find("no room for this job") != std::string::npos);
}

TEST_CASE("door: another token is refused on both sides, and both say so", "[door][fast]") {
  const auto door = echo("secret");
  for (const std::string token : {"", "Secret", "secret "}) {
    const auto answer = door::ask({"127.0.0.1", door->port()}, token, bytes("x"), soon());
    CHECK(answer.status().code() == Code::kInvalidArgument);
    CHECK(answer.status().message().find("HYBRIDPS_TOKEN") != std::string::npos);
    CHECK(answer.status().message().find("secret") == std::string::npos);
    CHECK(answer.status().message().find(token.empty() ? "asks for a token, and this job has none"
                                                       : "has another token") != std::string::npos);
  }
  CHECK(door->stats().answered.load() == 0);
}

TEST_CASE("door: without a token on both sides anyone may ask", "[door][fast]") {
  const auto door = echo("");
  CHECK(door::ask({"127.0.0.1", door->port()}, "", bytes("x"), soon()).is_ok());
  const auto answer = door::ask({"127.0.0.1", door->port()}, "secret", bytes("x"), soon());
  CHECK(answer.status().message().find("has no token, and this job has one") != std::string::npos);
}

TEST_CASE("door: a machine that does not answer is given up after a second", "[door][fast]") {
  // A full queue of connections: the kernel drops what comes, as a machine does that is not there.
  const Listener full(/*backlog=*/0);
  std::vector<int> queued;
  for (int i = 0; i < 8; ++i) {
    const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    address.sin_port = htons(static_cast<std::uint16_t>(full.port));
    (void)!::connect(fd, reinterpret_cast<sockaddr*>(&address), sizeof address);
    queued.push_back(fd);
  }
  const auto begin = core::Clock::now();
  const auto answer = door::ask({"127.0.0.1", full.port}, "t", bytes("x"), soon(60));
  CHECK(core::Clock::now() - begin < std::chrono::seconds(20));
  CHECK(answer.status().code() == Code::kPeerDead);
  CHECK(answer.status().message().find("no answer within 1 s") != std::string::npos);
  for (const int fd : queued) ::close(fd);
}

TEST_CASE("door: nobody there, silence, and what is no server", "[door][fast]") {
  {
    int port = 0;
    {
      const Listener gone;
      port = gone.port;
    }
    const auto answer = door::ask({"127.0.0.1", port}, "t", bytes("x"), soon());
    CHECK(answer.status().code() == Code::kPeerDead);
    CHECK(answer.status().message().find("127.0.0.1:" + std::to_string(port)) != std::string::npos);
  }
  {
    const Listener silent;
    const auto begin = core::Clock::now();
    const auto answer = door::ask({"127.0.0.1", silent.port}, "t", bytes("x"), soon(0.2));
    CHECK(answer.status().code() == Code::kTimeout);
    CHECK(core::Clock::now() - begin < std::chrono::seconds(10));
  }
  {
    const Listener web;
    std::thread server([&] {
      const int fd = ::accept(web.fd, nullptr, nullptr);
      const std::string page(200, 'h');
      (void)!::write(fd, page.data(), page.size());
      ::close(fd);
    });
    const auto answer = door::ask({"127.0.0.1", web.port}, "t", bytes("x"), soon());
    server.join();
    CHECK_FALSE(answer.is_ok());
    CHECK((answer.status().code() == Code::kMismatch || answer.status().code() == Code::kPeerDead));
  }
  CHECK(door::ask({"no-such-host.invalid", 1}, "t", bytes("x"), soon()).status().code() == Code::kInvalidArgument);
}

TEST_CASE("door: strangers cost little and keep nobody out", "[door][fast]") {
  const auto door = echo("secret");
  std::vector<int> strangers;
  // More than the door keeps: some silent, some with junk, some in the middle of a hello.
  for (int i = 0; i < 150; ++i) {
    strangers.push_back(raw_connection(door->port()));
    const std::string junk(i % 3 == 1 ? 200 : 20, 'x');
    if (i % 3 != 0) (void)!::send(strangers.back(), junk.data(), junk.size(), MSG_NOSIGNAL);
  }
  for (int i = 0; i < 20; ++i) {
    const auto answer = door::ask({"127.0.0.1", door->port()}, "secret", bytes("x"), soon());
    INFO(answer.status().to_string());
    REQUIRE(answer.is_ok());
  }
  for (const int fd : strangers) ::close(fd);
  // Counted on the door's thread, after the last byte has gone.
  const core::Deadline deadline = soon();
  while (door->stats().answered.load() < 20 && !deadline.has_passed()) std::this_thread::yield();
  CHECK(door->stats().answered.load() == 20);
}

TEST_CASE("door: a port in use and an address that is not ours", "[door][fast]") {
  const Listener other;
  const auto taken = Door::open({"127.0.0.1", other.port}, "", [](const Bytes& b) { return core::Result<Bytes>(b); });
  CHECK(taken.status().message().find("127.0.0.1:" + std::to_string(other.port)) != std::string::npos);
  const auto foreign = Door::open({"192.0.2.1", 0}, "", [](const Bytes& b) { return core::Result<Bytes>(b); });
  CHECK_FALSE(foreign.is_ok());
}

TEST_CASE("door: tokens from files", "[door][fast]") {
  CHECK(door::read_token("", "").value().empty());
  CHECK(door::read_token("direct", "/nonexistent").value() == "direct");
  CHECK_FALSE(door::read_token("", "/nonexistent").is_ok());
  char path[] = "/tmp/hybridps-token-XXXXXX";
  const int fd = ::mkstemp(path);
  REQUIRE(fd >= 0);
  ::close(fd);
  CHECK_FALSE(door::read_token("", path).is_ok());  // empty
  std::ofstream(path) << "  from a file \nsecond line\n";
  CHECK(door::read_token("", path).value() == "from a file");
  const char* home = std::getenv("HOME");
  const std::string kept = home != nullptr ? home : "";
  REQUIRE(setenv("HOME", "/tmp", 1) == 0);
  CHECK(door::read_token("", "~" + std::string(path).substr(4)).value() == "from a file");
  REQUIRE(setenv("HOME", kept.c_str(), 1) == 0);
  ::chmod(path, 0644);
  CHECK(door::read_token("", path).status().message().find("chmod 600") != std::string::npos);
  ::unlink(path);
}

TEST_CASE("door: without a free descriptor it waits and goes on later", "[door][fast]") {
  const auto door = echo("token");
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(fd >= 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(fd) + 1;  // the next descriptor is refused
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(door->port()));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  const bool connected = ::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  const auto cpu = std::clock();
  usleep(500'000);
  const double seconds = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  const bool accepted = door->stats().accepted > 0;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  ::close(fd);
  REQUIRE(connected);
  CHECK_FALSE(accepted);
  CHECK(seconds < 0.25);  // it does not spin
  const auto answer = door::ask({"127.0.0.1", door->port()}, "token", bytes("x"), soon());
  REQUIRE(answer.is_ok());
}
