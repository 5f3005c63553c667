#include "hybridps/admission/admission_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fstream>
#include <string>
#include <vector>

#include "hybridps/tls/channel.h"
#include "tests/support/captured_stderr.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/held_port.h"

namespace {

using namespace hybridps;
using admission::Address;
using admission::AdmissionServer;
using admission::Bytes;
using core::Code;

core::Deadline soon(double seconds = 5) { return core::Deadline::after(core::from_seconds(seconds)); }

Bytes bytes(const std::string& text) { return Bytes(text.begin(), text.end()); }

std::unique_ptr<AdmissionServer> echo(const std::string& token) {
  auto admission = AdmissionServer::open({"127.0.0.1", 0}, token, [](const Bytes& body) -> core::Result<Bytes> {
    if (body == bytes("refuse")) return core::Status(Code::kOutOfResources, "no room for this job");
    Bytes answer = bytes("you said ");
    answer.insert(answer.end(), body.begin(), body.end());
    return answer;
  });
  REQUIRE(admission.is_ok());
  return std::move(admission).value();
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

TEST_CASE("admission: addresses", "[admission][fast]") {
  CHECK(admission::parse_address("host:80").value().host == "host");
  CHECK(admission::parse_address("[::1]:80").value().host == "::1");
  CHECK(admission::parse_address("[::1]:80").value().text() == "[::1]:80");
  for (const std::string wrong : {"", "host", "host:", ":80", "host:x", "host:-1", "host:70000", "::1:80", "[]:80"})
    CHECK_FALSE(admission::parse_address(wrong).is_ok());
  CHECK(admission::parse_addresses("").value().empty());
  const auto two = admission::parse_addresses(" a:1 ,b:2,");
  REQUIRE(two.is_ok());
  CHECK(two.value().size() == 2);
  CHECK(admission::parse_addresses("a:1,a:1").status().message().find("twice") != std::string::npos);
}

TEST_CASE("admission: a question and its answer, of any size", "[admission][fast]") {
  const auto admission = echo("secret");
  for (const std::size_t size : {1, 2, 1000, 16384, 16385, 3'000'000}) {
    const Bytes body(size, 7);
    const auto answer = admission::ask({"127.0.0.1", admission->port()}, "secret", body, soon());
    INFO(answer.status().to_string());
    REQUIRE(answer.is_ok());
    CHECK(answer.value().size() == size + 9);
  }
  const auto refused = admission::ask({"127.0.0.1", admission->port()}, "secret", bytes("refuse"), soon());
  CHECK(refused.status().code() == Code::kOutOfResources);
  CHECK(refused.status().message().find("no room for this job") != std::string::npos);
}

TEST_CASE("admission: another token is refused on both sides, and both say so", "[admission][fast]") {
  const auto admission = echo("secret");
  for (const std::string token : {"", "Secret", "secret "}) {
    const auto answer = admission::ask({"127.0.0.1", admission->port()}, token, bytes("x"), soon());
    CHECK(answer.status().code() == Code::kInvalidArgument);
    CHECK(answer.status().message().find("HYBRIDPS_TOKEN") != std::string::npos);
    CHECK(answer.status().message().find("secret") == std::string::npos);
    CHECK(answer.status().message().find(token.empty() ? "asks for a token, and this job has none"
                                                       : "has another token") != std::string::npos);
  }
  CHECK(admission->stats().answered.load() == 0);
}

TEST_CASE("admission: in TLS a question and its answer, and who has another setting or token is refused",
          "[admission][tls][fast]") {
  const auto secret = [](const std::string& token) {
    return admission::Secret(token, tls::Authority::from_token(token).value());
  };
  const auto open = [](const admission::Secret& of) {
    return AdmissionServer::open({"127.0.0.1", 0}, of, [](const Bytes& body) { return core::Result<Bytes>(body); })
        .value();
  };
  const auto encrypted = open(secret("a token of this test"));
  for (const std::size_t size : {1, 16384, 3'000'000}) {
    const auto answer =
        admission::ask({"127.0.0.1", encrypted->port()}, secret("a token of this test"), Bytes(size, 7), soon());
    INFO(answer.status().to_string());
    REQUIRE(answer.is_ok());
    CHECK(answer.value() == Bytes(size, 7));
  }
  const auto clear = open("a token of this test");
  const auto refused = [&](const AdmissionServer& server, const admission::Secret& by, const char* why) {
    const auto answer = admission::ask({"127.0.0.1", server.port()}, by, bytes("x"), soon());
    INFO(answer.status().to_string());
    REQUIRE_FALSE(answer.is_ok());
    CHECK(answer.status().message().find(why) != std::string_view::npos);
  };
  refused(*encrypted, secret("another token of a test"), "has another token, or only certificates");
  refused(*encrypted, "a token of this test", "HYBRIDPS_SECURITY=tls");
  refused(*clear, secret("a token of this test"), "HYBRIDPS_SECURITY=tls");
  CHECK(encrypted->stats().answered.load() == 3);
}

TEST_CASE("admission: a server with two tokens serves jobs with either, in clear and in TLS",
          "[admission][tls][fast]") {
  const std::string now = "the token of today";
  const std::string before = "the token of before";
  const bool has_tls = GENERATE(false, true);
  const auto secret = [&](const std::string& token, const std::string& second = {}) {
    admission::Secret made(token);
    made.second = second;
    if (has_tls) made.authority = tls::Authority::from_token(token, second).value();
    return made;
  };
  const auto server = AdmissionServer::open({"127.0.0.1", 0}, secret(now, before), [](const Bytes& body) {
                        return core::Result<Bytes>(body);
                      }).value();
  for (const std::string& token : {now, before}) {
    const auto answer = admission::ask({"127.0.0.1", server->port()}, secret(token), Bytes(100'000, 7), soon());
    INFO(answer.status().to_string());
    REQUIRE(answer.is_ok());
    CHECK(answer.value() == Bytes(100'000, 7));
  }
  for (const char* const token : {"another token of a test", ""}) {
    if (has_tls && *token == 0) continue;
    CHECK_FALSE(admission::ask({"127.0.0.1", server->port()}, secret(token), bytes("x"), soon()).is_ok());
  }
  CHECK(server->stats().answered.load() == 2);
}

TEST_CASE("admission: without a token on both sides anyone may ask", "[admission][fast]") {
  const auto admission = echo("");
  CHECK(admission::ask({"127.0.0.1", admission->port()}, "", bytes("x"), soon()).is_ok());
  const auto answer = admission::ask({"127.0.0.1", admission->port()}, "secret", bytes("x"), soon());
  CHECK(answer.status().message().find("has no token, and this job has one") != std::string::npos);
}

TEST_CASE("admission: a machine that does not answer is given up after a second", "[admission][fast]") {
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
  const auto answer = admission::ask({"127.0.0.1", full.port}, "t", bytes("x"), soon(60));
  CHECK(core::Clock::now() - begin < std::chrono::seconds(20));
  CHECK(answer.status().code() == Code::kPeerDead);
  CHECK(answer.status().message().find("no answer within 1 s") != std::string::npos);
  for (const int fd : queued) ::close(fd);
}

TEST_CASE("admission: nobody there, silence, and what is no server", "[admission][fast]") {
  {
    const test::HeldPort nobody;
    const auto answer = admission::ask({"127.0.0.1", nobody.number()}, "t", bytes("x"), soon());
    CHECK(answer.status().code() == Code::kPeerDead);
    CHECK(answer.status().message().find("127.0.0.1:" + std::to_string(nobody.number())) != std::string::npos);
  }
  {
    const Listener silent;
    const auto begin = core::Clock::now();
    const auto answer = admission::ask({"127.0.0.1", silent.port}, "t", bytes("x"), soon(0.2));
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
    const auto answer = admission::ask({"127.0.0.1", web.port}, "t", bytes("x"), soon());
    server.join();
    CHECK_FALSE(answer.is_ok());
    CHECK((answer.status().code() == Code::kMismatch || answer.status().code() == Code::kPeerDead));
  }
  CHECK(admission::ask({"no-such-host.invalid", 1}, "t", bytes("x"), soon()).status().code() == Code::kInvalidArgument);
}

TEST_CASE("admission: strangers cost little and keep nobody out", "[admission][fast]") {
  const auto admission = echo("secret");
  std::vector<int> strangers;
  // More than the admission server keeps: some silent, some with junk, some in the middle of a hello.
  for (int i = 0; i < 150; ++i) {
    strangers.push_back(raw_connection(admission->port()));
    const std::string junk(i % 3 == 1 ? 200 : 20, 'x');
    if (i % 3 != 0) (void)!::send(strangers.back(), junk.data(), junk.size(), MSG_NOSIGNAL);
  }
  for (int i = 0; i < 20; ++i) {
    const auto answer = admission::ask({"127.0.0.1", admission->port()}, "secret", bytes("x"), soon());
    INFO(answer.status().to_string());
    REQUIRE(answer.is_ok());
  }
  for (const int fd : strangers) ::close(fd);
  // Counted on the admission server's thread, after the last byte has gone.
  const core::Deadline deadline = soon();
  while (admission->stats().answered.load() < 20 && !deadline.has_passed()) std::this_thread::yield();
  CHECK(admission->stats().answered.load() == 20);
}

TEST_CASE("admission: in TLS strangers do not push out who has knocked", "[admission][tls][fast]") {
  const std::string token = "a token of this test";
  const auto authority = tls::Authority::from_token(token).value();
  const auto server = AdmissionServer::open({"127.0.0.1", 0}, {token, authority}, [](const Bytes& body) {
                        return core::Result<Bytes>(body);
                      }).value();
  const auto counts = [&](std::uint64_t accepted) {
    const core::Deadline deadline = soon(10);
    while (server->stats().accepted.load() < accepted && !deadline.has_passed()) ::usleep(1000);
    return server->stats().accepted.load() == accepted;
  };
  std::vector<int> sockets{raw_connection(server->port())};
  const bool is_early = GENERATE(true, false);
  if (!is_early) REQUIRE(counts(1));  // it is among the silent ones for a moment
  const auto member =
      tls::TlsChannel::dial(authority->make_identity().value(), sockets[0], tls::knock_key(tls::bytes_of(token)))
          .value();
  char byte = 0;
  const iovec part{&byte, 1};
  CHECK(member->receive(&part, 1) < 0);
  for (int i = 0; i < 200; ++i) sockets.push_back(raw_connection(server->port()));
  REQUIRE(counts(201));
  const auto settle = [&](tls::TlsChannel& channel) {
    const core::Deadline deadline = soon(10);
    while (!channel.is_open() && !channel.has_failed() && !deadline.has_passed()) {
      (void)channel.receive(&part, 1);
      ::usleep(100);
    }
  };
  settle(*member);
  CHECK(member->is_open());
  // Who knocks with another token, or with none, is no member.
  for (const std::string other : {"another token of a test", ""}) {
    sockets.push_back(raw_connection(server->port()));
    const auto stranger =
        tls::TlsChannel::dial(authority->make_identity().value(), sockets.back(), tls::knock_key(tls::bytes_of(other)))
            .value();
    settle(*stranger);
    CHECK(stranger->is_elsewhere());
  }
  for (const int fd : sockets) ::close(fd);
}

TEST_CASE("admission: a port in use and an address that is not ours", "[admission][fast]") {
  const Listener other;
  const auto taken =
      AdmissionServer::open({"127.0.0.1", other.port}, "", [](const Bytes& b) { return core::Result<Bytes>(b); });
  CHECK(taken.status().message().find("127.0.0.1:" + std::to_string(other.port)) != std::string::npos);
  const auto foreign =
      AdmissionServer::open({"192.0.2.1", 0}, "", [](const Bytes& b) { return core::Result<Bytes>(b); });
  CHECK_FALSE(foreign.is_ok());
}

TEST_CASE("admission: what only this machine reaches is told from the rest", "[admission][fast]") {
  for (const char* host : {"127.0.0.1", "127.1.2.3", "::1", "localhost"}) {
    INFO(host);
    CHECK(admission::is_loopback({host, 7000}));
  }
  for (const char* host : {"0.0.0.0", "::", "10.0.0.9", "192.0.2.1", "2001:db8::1", "no host of this name"}) {
    INFO(host);
    CHECK_FALSE(admission::is_loopback({host, 7000}));
  }
}

TEST_CASE("admission: tokens from files", "[admission][fast]") {
  CHECK(admission::read_token("", "").value().empty());
  CHECK(admission::read_token("a token as it is", "/nonexistent").value().text() == "a token as it is");
  CHECK_FALSE(admission::read_token("", "/nonexistent").is_ok());
  char path[] = "/tmp/hybridps-token-XXXXXX";
  const int fd = ::mkstemp(path);
  REQUIRE(fd >= 0);
  ::close(fd);
  CHECK_FALSE(admission::read_token("", path).is_ok());  // empty
  std::ofstream(path) << "  a token of a file \nsecond line\n";
  CHECK(admission::read_token("", path).value().text() == "a token of a file");
  core::SecretBytes second;
  std::ofstream(path) << "a token of a file\nalso short\n";
  CHECK(admission::read_token("", path, &second).status().message().find("its second token has fewer than 16") !=
        std::string::npos);
  for (const char* const rest :
       {"", "\n", "\n\nalso a token of a third line", "\n# a line for those who read it", "\nalso a token of a file"}) {
    second = {};
    std::ofstream(path) << "a token of a file" << rest;
    CHECK(admission::read_token("", path, &second).value().text() == "a token of a file");
    CHECK(second.empty());
  }
  std::ofstream(path) << "a token of a file\n also a token of before \nthird\n";
  CHECK(admission::read_token("", path, &second).value().text() == "a token of a file");
  CHECK(second.text() == "a token of before");
  CHECK(admission::read_token("a token as it is", path, &(second = {})).value().text() == "a token as it is");
  CHECK(second.empty());
  const char* home = std::getenv("HOME");
  const std::string kept = home != nullptr ? home : "";
  REQUIRE(setenv("HOME", "/tmp", 1) == 0);
  CHECK(admission::read_token("", "~" + std::string(path).substr(4)).value().text() == "a token of a file");
  REQUIRE(setenv("HOME", kept.c_str(), 1) == 0);
  ::chmod(path, 0644);
  CHECK(admission::read_token("", path).status().message().find("chmod 600") != std::string::npos);
  REQUIRE(::chmod(path, 0600) == 0);
  std::ofstream(path) << "  only 15 bytes.\nand a long second line\n";
  const auto in_file = admission::read_token("", path).status();
  CHECK(in_file.message().find(path) != std::string::npos);
  for (const core::Status& refused : {in_file, admission::read_token("only 15 bytes..", "").status()}) {
    CHECK(refused.message().find("openssl rand -hex 32") != std::string::npos);
    CHECK(refused.message().find("only 15") == std::string::npos);  // a token is never shown
  }
  ::unlink(path);
}

TEST_CASE("admission: a file of another user is no token, and a group may read root's alone", "[admission][fast]") {
  if (::geteuid() != 0) return;  // needs root, to give files away
  constexpr uid_t kSomebody = 65534;
  char path[] = "/tmp/hybridps-token-XXXXXX";
  const int fd = ::mkstemp(path);
  REQUIRE(fd >= 0);
  ::close(fd);
  std::ofstream(path) << "a token from a file";
  const auto read_as = [&](uid_t user) {
    REQUIRE(setegid(user) == 0);
    REQUIRE(seteuid(user) == 0);
    const auto token = admission::read_token("", path);
    REQUIRE(seteuid(0) == 0);
    REQUIRE(setegid(0) == 0);
    return std::string(token.is_ok() ? token.value().text() : token.status().message());
  };
  REQUIRE(::chown(path, kSomebody, kSomebody) == 0);
  REQUIRE(::chmod(path, 0600) == 0);
  CHECK(read_as(0).find("belongs to user 65534") != std::string::npos);
  CHECK(read_as(kSomebody) == "a token from a file");
  REQUIRE(::chmod(path, 0640) == 0);
  CHECK(read_as(kSomebody).find("chmod 600") != std::string::npos);
  REQUIRE(::chown(path, 0, kSomebody) == 0);
  CHECK(read_as(kSomebody) == "a token from a file");
  for (const mode_t mode : {0660, 0644}) {
    REQUIRE(::chmod(path, mode) == 0);
    CHECK(read_as(kSomebody).find("chmod 600") != std::string::npos);
  }
  ::unlink(path);
  REQUIRE(::mkfifo(path, 0600) == 0);
  CHECK(read_as(0).find("is not a file") != std::string::npos);
  ::unlink(path);
}

TEST_CASE("admission: without a free descriptor it waits and goes on later", "[admission][fast]") {
  const auto admission = echo("token");
  rlimit before{};
  REQUIRE(getrlimit(RLIMIT_NOFILE, &before) == 0);
  const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  REQUIRE(fd >= 0);
  rlimit none = before;
  none.rlim_cur = static_cast<rlim_t>(fd) + 1;  // the next descriptor is refused
  REQUIRE(setrlimit(RLIMIT_NOFILE, &none) == 0);
  sockaddr_in to{};
  to.sin_family = AF_INET;
  to.sin_port = htons(static_cast<std::uint16_t>(admission->port()));
  inet_pton(AF_INET, "127.0.0.1", &to.sin_addr);
  const bool connected = ::connect(fd, reinterpret_cast<sockaddr*>(&to), sizeof to) == 0;
  const auto cpu = std::clock();
  usleep(500'000);
  const double seconds = static_cast<double>(std::clock() - cpu) / CLOCKS_PER_SEC;
  const bool accepted = admission->stats().accepted > 0;
  REQUIRE(setrlimit(RLIMIT_NOFILE, &before) == 0);
  ::close(fd);
  REQUIRE(connected);
  CHECK_FALSE(accepted);
  CHECK(seconds < 0.25);  // it does not spin
  const auto answer = admission::ask({"127.0.0.1", admission->port()}, "token", bytes("x"), soon());
  REQUIRE(answer.is_ok());
}

TEST_CASE("admission: few large requests are read at a time, small ones pass them, and one beyond the limit is refused",
          "[admission][fast]") {
  std::atomic<int> answered{0};
  auto server = AdmissionServer::open(
                    {"127.0.0.1", 0}, "secret",
                    [&](const Bytes& body) -> core::Result<Bytes> {
                      ++answered;
                      return bytes(std::to_string(body.size()));
                    },
                    std::size_t{1} << 20)
                    .value();
  const Address there{"127.0.0.1", server->port()};
  constexpr std::size_t kLarge = std::size_t{900} << 10;
  // Guests that prove the token, announce a large body, and send all but its last byte: a socket takes only some of it
  // where it is not read.
  struct LargeGuest {
    int fd = -1;
    Bytes rest;
    std::size_t sent = 0;
    bool push() {
      while (sent < rest.size()) {
        const ssize_t put = ::send(fd, rest.data() + sent, rest.size() - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (put <= 0) return false;
        sent += static_cast<std::size_t>(put);
      }
      return true;
    }
  };
  const auto arrive = [&](std::size_t bytes_of_body) {
    LargeGuest guest;
    guest.fd = raw_connection(server->port());
    int small = 16384;
    setsockopt(guest.fd, SOL_SOCKET, SO_SNDBUF, &small, sizeof small);
    const Bytes hello = admission::hello().value();
    REQUIRE(::send(guest.fd, hello.data(), hello.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(hello.size()));
    Bytes theirs(admission::kHelloBytes + admission::kMacBytes);
    REQUIRE(::recv(guest.fd, theirs.data(), theirs.size(), MSG_WAITALL) == static_cast<ssize_t>(theirs.size()));
    const Bytes body(bytes_of_body, 7);
    const admission::Mac proof = admission::mac_of("secret", "job", hello.data() + 8, theirs.data() + 8);
    const admission::Mac seal = admission::mac_of("secret", "request", hello.data() + 8, theirs.data() + 8, body);
    guest.rest.assign(proof.begin(), proof.end());
    guest.rest.insert(guest.rest.end(), seal.begin(), seal.end());
    admission::put_u32(guest.rest, static_cast<std::uint32_t>(body.size()));
    guest.rest.insert(guest.rest.end(), body.begin(), body.end() - 1);
    return guest;
  };
  std::vector<LargeGuest> guests;
  for (int i = 0; i < 6; ++i) guests.push_back(arrive(kLarge));
  const auto all_read = [&] {
    return std::count_if(guests.begin(), guests.end(), [](LargeGuest& guest) { return guest.push(); });
  };
  for (int i = 0; i < 400 && all_read() < 4; ++i) usleep(5000);
  for (int i = 0; i < 40; ++i) {
    usleep(5000);
    all_read();
  }
  CHECK(all_read() == 4);
  CHECK(admission::ask(there, "secret", bytes("small"), soon()).value() == bytes("5"));
  for (LargeGuest& guest : guests)
    if (guest.push()) ::send(guest.fd, "\7", 1, MSG_NOSIGNAL);
  for (int i = 0; i < 400 && all_read() < 6; ++i) usleep(5000);
  CHECK(all_read() == 6);
  CHECK(answered == 5);
  for (const LargeGuest& guest : guests) ::close(guest.fd);
  const auto refused = admission::ask(there, "secret", Bytes((std::size_t{1} << 20) + 1, 7), soon());
  CHECK(refused.status().code() == Code::kOutOfResources);
  CHECK(refused.status().message().find("takes requests of 1048576 bytes at most") != std::string::npos);
}

TEST_CASE("admission: in TLS the operator is told of a job with another token", "[admission][fast]") {
  const auto secret = [](const std::string& token) {
    const auto authority = tls::Authority::from_token(token).value();
    return admission::Secret(token, authority, authority->make_identity().value());
  };
  test::MovableClock clock(test::MovableClock::Between::kGoesOn);
  clock.pass(core::from_seconds(11));  // one such line in ten seconds
  test::CapturedStderr said;
  {
    auto server = AdmissionServer::open({"127.0.0.1", 0}, secret("the token of this test"),
                                        [](const Bytes&) -> core::Result<Bytes> { return bytes("yes"); })
                      .value();
    const Address there{"127.0.0.1", server->port()};
    CHECK(admission::ask(there, secret("the token of this test"), bytes("?"), soon()).value() == bytes("yes"));
    CHECK_FALSE(admission::ask(there, secret("another token of this test"), bytes("?"), soon()).is_ok());
    for (int i = 0; i < 400 && server->stats().refused == 0; ++i) usleep(5000);
  }
  const std::string text = said.finish();
  INFO(text);
  CHECK(text.find("a job from 127.0.0.1 was refused: it has another token") != std::string::npos);
}
