// What TCP adds to the endpoint contract: greetings, company in one system call, forked children.
#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/transport/envelope.h"
#include "hybridps/transport/tcp/tcp_wire.h"
#include "tests/support/clock.h"
#include "tests/support/held_port.h"
#include "tests/unit/transport/tcp/tcp_pair.h"
#include "tests/unit/transport/tcp/tcp_stranger.h"

namespace hybridps::transport {
namespace {

using contract::kLargeBytes;
using contract::matches;
using contract::number_of;
using contract::numbered;

TEST_CASE(
    "transport/tcp: bytes that are no message break the connection and the endpoint, with the address in the text",
    "[transport][fast]") {
  auto pair = make_tcp_pair();
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  contract::Pair::connect_one(pair->b, pair->a);  // over the connection that stands
  const Stranger forger(pair->b);
  forger.greet(address_of(pair->a).id);
  std::array<std::byte, kFrameBytes> frame{};
  SECTION("no frame") {}
  SECTION("a header of no bytes") { encode(Frame{FrameKind::kMessage, 10, 0, 0}, frame.data()); }
  SECTION("a header that is too long") { encode(Frame{FrameKind::kMessage, 10, kHeaderBytesMax + 1, 0}, frame.data()); }
  SECTION("a payload that nobody sends") { encode(Frame{FrameKind::kMessage, 0xffffffff, 10, 0}, frame.data()); }
  forger.say(frame.data(), frame.size());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.failures.size() == 1; }));
  CHECK(pair->b.receiver.failures[0].first == pair->a.id);
  CHECK(pair->b.receiver.failures[0].second.code() == core::Code::kPeerDead);
  CHECK(pair->b.receiver.failures[0].second.message().find("127.0.0.1:") != std::string_view::npos);
  CHECK(tcp(pair->b).counters().malformed == 1);
  // The other side sees its connection go.
  CHECK(pair->run_until([&] { return pair->a.receiver.failures.size() == 1; }));
}

TEST_CASE(
    "transport/tcp: what is sent in one round goes with one system call, and large payloads are received in place",
    "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  const std::uint64_t before = tcp(pair->a).counters().sends;
  for (std::uint64_t i = 0; i < 20; ++i) REQUIRE(pair->a.peer->send(numbered(i), {}, 0, {}).is_ok());
  CHECK(pair->a.transport->has_unsent());
  CHECK_FALSE(pair->a.transport->arm());
  SECTION("with progress()") { pair->a.progress(); }
  SECTION("with send_now()") { pair->a.transport->send_now(); }
  CHECK_FALSE(pair->a.transport->has_unsent());
  CHECK(tcp(pair->a).counters().sends == before + 1);
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 20; }));
  pair->release_all();

  const std::uint64_t copied = tcp(pair->b).counters().bytes_copied;
  REQUIRE(pair->a.peer->send(numbered(7), pair->a.filled(kLargeBytes, 7), kLargeBytes, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(matches(pair->b.receiver.messages.front().payload.data(), kLargeBytes, 7));
  CHECK(tcp(pair->b).counters().bytes_copied - copied < 8192);
}

TEST_CASE("transport/tcp: nothing is delivered or completed by send_now()", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  REQUIRE(pair->b.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->a.receiver.messages.size() == 1; }));
  pair->release_all();
  REQUIRE(pair->b.peer->send(numbered(1), {}, 0, {}).is_ok());
  pair->b.transport->send_now();
  contract::Side::Done done;
  REQUIRE(pair->a.peer->send(numbered(2), {}, 0, pair->a.record(done)).is_ok());
  pair->a.transport->send_now();
  CHECK(done.count == 0);
  CHECK(pair->a.receiver.messages.empty());
  CHECK(pair->run_until([&] { return done.count == 1 && pair->a.receiver.messages.size() == 1; }));
}

TEST_CASE("transport/tcp: the connection that a peer has made serves both ways", "[transport][fast]") {
  auto pair = make_tcp_pair();
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  // No new connection is needed, so b's endpoint works although nobody listens at a any more.
  contract::Pair::connect_one(pair->b, pair->a);
  contract::Side::Done done;
  REQUIRE(pair->b.peer->send(numbered(2), {}, 0, pair->b.record(done)).is_ok());
  pair->b.transport->send_now();
  CHECK(tcp(pair->b).counters().sends == 1);  // at once: there was nothing to wait for
  CHECK(pair->run_until([&] { return pair->a.receiver.messages.size() == 1; }));
}

TEST_CASE("transport/tcp: whoever has left before it was introduced is known by its name afterwards",
          "[transport][fast]") {
  auto pair = make_tcp_pair();
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  const core::EngineId stranger = pair->b.receiver.messages.front().from;
  const auto view = pair->a.transport->address();
  const std::vector<std::byte> address(view.begin(), view.end());
  CHECK(stranger != pair->a.id);
  pair->a.transport.reset();
  for (int i = 0; i < 1000; ++i) pair->b.progress();
  pair->b.transport->introduce(pair->a.id, address);
  CHECK(pair->b.transport->name_of(stranger) == pair->a.id);
}

TEST_CASE("transport/tcp: a message that is larger than any here claims no memory, and ends the connection",
          "[transport][fast]") {
  auto pair = make_tcp_pair();
  TcpOptions options = test_options();
  options.payload_bytes_max = 4096;
  pair->b.transport = TcpTransport::create(options).value();
  pair->b.transport->set_receiver(&pair->b.receiver);
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(1), pair->a.filled(4096, 1), 4096, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  const std::uint64_t claimed = tcp(pair->b).counters().receive_bytes;
  REQUIRE(pair->a.peer->send(numbered(2), pair->a.filled(400000, 1), 400000, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.failures.size() == 1; }));
  CHECK(pair->b.receiver.failures.front().second.message().find(
            "brought a message of 400000 bytes, and no group here has more than 4096") != std::string_view::npos);
  CHECK(tcp(pair->b).counters().receive_bytes == claimed);
  CHECK(tcp(pair->b).counters().malformed == 1);
}

TEST_CASE("transport/tcp: memory for payloads goes back when it was not used for a while", "[transport][fast]") {
  test::MovableClock clock;
  auto pair = make_tcp_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(1), pair->a.filled(100000, 1), 100000, {}).is_ok());
  // The timer that tells what has come looks after the memory, too.
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  const auto pass = [&](double seconds) {
    clock.pass(core::from_seconds(seconds));
    const std::uint64_t sends = tcp(pair->b).counters().sends;
    REQUIRE(pair->a.peer->send(numbered(2), {}, 0, {}).is_ok());
    REQUIRE(pair->run_until([&] { return tcp(pair->b).counters().sends > sends; }));
  };
  for (int i = 0; i < 3; ++i) pass(61);
  CHECK(tcp(pair->b).counters().receive_bytes > 0);  // it is in use
  pair->release_all();
  pass(61);
  CHECK(tcp(pair->b).counters().receive_bytes > 0);
  pass(61);
  CHECK(tcp(pair->b).counters().receive_bytes == 0);
}

TEST_CASE("transport/tcp: two who connect to each other at once both send", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();  // neither has made progress between
  for (contract::Side* side : {&pair->a, &pair->b})
    for (std::uint64_t i = 0; i < 10; ++i)
      REQUIRE(side->peer->send(numbered(i), side->filled(60000, i), 60000, {}).is_ok());
  REQUIRE(pair->run_until(
      [&] { return pair->a.receiver.messages.size() == 10 && pair->b.receiver.messages.size() == 10; }));
  // The end of either is the end of both.
  pair->release_all();
  pair->b.transport.reset();
  REQUIRE(pair->run_until([&] { return !pair->a.receiver.failures.empty(); }));
  pair->settle();
  CHECK(pair->a.receiver.failures.size() == 1);
}

TEST_CASE("transport/tcp: two who dial each other at any moments come to one connection, and lose nothing",
          "[transport][tls][fast]") {
  std::mt19937_64 random(5);
  int crossed = 0;
  for (int round = 0; round < 200; ++round) {
    auto pair = make_tcp_pair(round % 4 == 0 ? tls_options() : test_options());
    std::array<contract::Side*, 2> sides{&pair->a, &pair->b};
    std::array<std::uint64_t, 2> sent{};
    for (int step = 0; step < 40; ++step) {
      const std::size_t at = random() % 2;
      contract::Side& side = *sides[at];
      if (side.peer == nullptr && random() % 4 == 0) contract::Pair::connect_one(side, *sides[1 - at]);
      if (side.peer != nullptr && random() % 2 == 0) {
        REQUIRE(side.peer->send(numbered(sent[at]), side.filled(3000, sent[at]), 3000, {}).is_ok());
        ++sent[at];
      }
      for (std::uint64_t i = random() % 4; i > 0; --i) side.progress();
    }
    for (std::size_t at = 0; at < 2; ++at)
      if (sides[at]->peer == nullptr) contract::Pair::connect_one(*sides[at], *sides[1 - at]);
    for (std::size_t at = 0; at < 2; ++at) {
      REQUIRE(sides[at]->peer->send(numbered(sent[at]), {}, 0, {}).is_ok());
      ++sent[at];
    }
    INFO("round " << round);
    REQUIRE(pair->run_until(
        [&] { return pair->a.receiver.messages.size() == sent[1] && pair->b.receiver.messages.size() == sent[0]; }));
    for (std::size_t at = 0; at < 2; ++at)
      for (std::uint64_t i = 0; i < sent[1 - at]; ++i) {
        const auto& message = sides[at]->receiver.messages[i];
        CHECK(number_of(message.header) == i);
        if (i + 1 < sent[1 - at]) CHECK(matches(message.payload.data(), 3000, i));
      }
    REQUIRE(pair->run_until(
        [&] { return pair->a.transport->paths().size() == 1 && pair->b.transport->paths().size() == 1; }));
    CHECK((pair->a.receiver.failures.empty() && pair->b.receiver.failures.empty()));
    crossed += tcp(pair->a).counters().redials + tcp(pair->b).counters().redials > 0 ? 1 : 0;
    pair->release_all();
  }
  CHECK(crossed > 0);  // one was told that the other's dial counts
}

TEST_CASE("transport/tcp: who dials, speaks and closes while the other dials is heard", "[transport][tls][fast]") {
  // Of each pair, once the side whose dial counts, once the other: ids are random.
  std::array<int, 2> heard{};
  for (int round = 0; round < 40; ++round) {
    auto pair = make_tcp_pair(round % 4 == 0 ? tls_options() : test_options());
    pair->connect();
    pair->a.progress();  // both have greeted, and neither has read a greeting
    pair->b.progress();
    contract::Side::Done done;
    REQUIRE(pair->a.peer->send(numbered(7), pair->a.filled(3000, 7), 3000, pair->a.record(done)).is_ok());
    pair->a.peer->close(core::Status(core::Code::kClosed, "goodbye"));
    INFO("round " << round);
    REQUIRE(pair->run_until([&] { return done.count == 1; }));
    INFO(done.last.to_string());
    CHECK(done.last.is_ok());
    REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
    ++heard[address_of(pair->a).id < address_of(pair->b).id ? 0 : 1];
    pair->release_all();
  }
  CHECK((heard[0] > 0 && heard[1] > 0));
}

TEST_CASE("transport/tcp: nobody at the address", "[transport][fast]") {
  auto pair = make_tcp_pair();
  const test::HeldPort nobody;
  TcpAddress there;
  there.id = make_tcp_id();
  there.socket = *parse_address("127.0.0.1", static_cast<std::uint16_t>(nobody.number()));
  const std::string text = there.socket.text();
  const auto endpoint = pair->a.transport->connect(pair->b.id, encode(there));
  REQUIRE(endpoint.is_ok());
  contract::Side::Done done;
  REQUIRE(endpoint.value()->send(numbered(1), {}, 0, pair->a.record(done)).is_ok());
  REQUIRE(pair->run_until([&] { return pair->a.receiver.failures.size() == 1 && done.count == 1; }));
  const core::Status& cause = pair->a.receiver.failures[0].second;
  CHECK(cause.code() == core::Code::kPeerDead);
  CHECK(cause.message().find(text) != std::string_view::npos);
  CHECK(cause.message().find("refused") != std::string_view::npos);
  CHECK_FALSE(done.last.is_ok());
}

TEST_CASE("transport/tcp: what was said before the end is heard before the end is told", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  for (std::uint64_t i = 0; i < 5; ++i)
    REQUIRE(pair->b.peer->send(numbered(i), pair->b.filled(5000, i), 5000, {}).is_ok());
  while (pair->b.transport->has_unsent()) pair->b.progress();
  pair->b.transport.reset();
  // a has more to send, which fails; its failure must not hide what came.
  for (std::uint64_t i = 0; i < 5; ++i) {
    if (!pair->a.peer->send(numbered(i), pair->a.filled(5000, i), 5000, {}).is_ok()) break;
    pair->a.transport->send_now();
  }
  REQUIRE(pair->run_until([&] { return !pair->a.receiver.failures.empty(); }));
  CHECK(pair->a.receiver.messages.size() == 5);
}

TEST_CASE("transport/tcp: the end of one of two connections does not cut off what comes on the other",
          "[transport][fast]") {
  auto pair = make_tcp_pair();
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  contract::Pair::connect_one(pair->b, pair->a);  // over the connection that stands
  pair->release_all();
  contract::Side::Done done;
  {
    const Stranger second(pair->b);  // as if a had dialled twice
    second.greet(address_of(pair->a).id);
    const std::uint64_t receives = tcp(pair->b).counters().receives;
    REQUIRE(pair->run_until([&] { return tcp(pair->b).counters().receives > receives; }));
  }
  REQUIRE(pair->run_until([&] { return pair->b.transport->find(pair->a.id) == nullptr; }));
  CHECK(pair->b.receiver.failures.empty());
  CHECK(pair->b.peer->send(numbered(1), {}, 0, pair->b.record(done)).code() == core::Code::kPeerDead);
  REQUIRE(pair->a.peer->send(numbered(7), {}, 0, {}).is_ok());
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  REQUIRE(pair->run_until([&] { return pair->b.receiver.failures.size() == 1; }));
  CHECK(pair->b.receiver.failures[0].second.message().find("has given up this process") != std::string_view::npos);
  CHECK(pair->run_until([&] { return pair->a.receiver.failures.size() == 1; }));  // b has hung up
  pair->settle();
  CHECK(pair->b.receiver.failures.size() == 1);
  CHECK(done.count == 0);
}

/// A place that listens, without a transport behind it.
struct Listening {
  Listening() {
    const core::ForkLock lock;
    listener = core::Descriptor(lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    there.id = make_tcp_id();
    there.socket = *parse_address("127.0.0.1", static_cast<std::uint16_t>(port.number()));
    const int on = 1;
    REQUIRE(::setsockopt(listener.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    REQUIRE(::bind(listener.get(), there.socket.get(), there.socket.bytes) == 0);
    REQUIRE(::listen(listener.get(), 16) == 0);
  }
  bool take() {
    guest.reset();
    heard = 0;
    const core::ForkLock lock;
    guest = core::Descriptor(lock, ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    return static_cast<bool>(guest);
  }
  void reset_guest() {
    const linger at_once{1, 0};
    REQUIRE(::setsockopt(guest.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once) == 0);
    guest.reset();
  }
  void answer(TcpAnswer with, std::uint64_t received = 0) const {
    const auto bytes = encode(TcpReply{with, {0, received}});
    REQUIRE(::send(guest.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size()));
  }
  /// How much has come by now.
  std::size_t hear() {
    std::array<char, 4096> bytes{};
    if (const ssize_t got = ::recv(guest.get(), bytes.data(), bytes.size(), MSG_DONTWAIT); got > 0)
      heard += static_cast<std::size_t>(got);
    return heard;
  }

  const test::HeldPort port;  // nobody else's, also when the listener is gone
  TcpAddress there;
  core::Descriptor listener;
  core::Descriptor guest;
  std::size_t heard = 0;
};

TEST_CASE(
    "transport/tcp: a connection that is lost before an answer is made again, and nothing was sent on it but a "
    "greeting",
    "[transport][fast]") {
  auto pair = make_tcp_pair();
  Listening peer;
  const auto endpoint = pair->a.transport->connect(pair->b.id, encode(peer.there));
  REQUIRE(endpoint.is_ok());
  contract::Side::Done done;
  REQUIRE(endpoint.value()->send(numbered(1), {}, 0, pair->a.record(done)).is_ok());
  for (int i = 0; i < 4; ++i) {
    REQUIRE(pair->run_until([&] { return peer.take(); }));
    if (i % 2 == 1) {
      REQUIRE(pair->run_until([&] { return peer.hear() == kGreetingBytes; }));
    }
    if (i == 2) {
      peer.guest.reset();  // an end, and no reset
    } else {
      peer.reset_guest();
    }
  }
  REQUIRE(pair->run_until([&] { return peer.take(); }));
  REQUIRE(pair->run_until([&] { return peer.hear() == kGreetingBytes; }));
  pair->settle();
  CHECK(done.count == 0);
  peer.answer(TcpAnswer::kWelcome);
  CHECK(pair->run_until([&] { return peer.hear() == kGreetingBytes + kFrameBytes + sizeof(std::uint64_t); }));
  CHECK(pair->run_until([&] { return done.count == 1; }));
  CHECK(done.last.is_ok());
  CHECK(pair->a.receiver.failures.empty());
  // After an answer it is made again, too, and goes on behind what the peer says to have.
  peer.reset_guest();
  REQUIRE(pair->run_until([&] { return peer.take(); }));
  REQUIRE(pair->run_until([&] { return peer.hear() == kGreetingBytes; }));
  constexpr std::size_t kHas = 5;
  peer.answer(TcpAnswer::kWelcome, kHas);
  CHECK(pair->run_until([&] { return peer.hear() == kGreetingBytes + kFrameBytes + sizeof(std::uint64_t) - kHas; }));
  CHECK(pair->a.transport->paths()[0].resumptions == 1);
  CHECK(pair->a.receiver.failures.empty());
  // It is the end where the two do not fit together, or nobody listens any more.
  std::string_view what;
  peer.reset_guest();
  SECTION("the peer has more than was sent") {
    REQUIRE(pair->run_until([&] { return peer.take(); }));
    peer.answer(TcpAnswer::kWelcome, 1000);
    what = "cannot go on";
  }
  SECTION("the peer has less than it has told before") {
    REQUIRE(pair->run_until([&] { return peer.take(); }));
    peer.answer(TcpAnswer::kWelcome, kHas - 1);
    what = "cannot go on";
  }
  SECTION("nobody listens") {
    peer.listener.reset();
    what = kEndedWithoutClosing;
  }
  SECTION("another process answers") {
    REQUIRE(pair->run_until([&] { return peer.take(); }));
    const std::string junk(kAnswerBytes, 'x');
    REQUIRE(::send(peer.guest.get(), junk.data(), junk.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(junk.size()));
    what = kEndedWithoutClosing;
  }
  REQUIRE(pair->run_until([&] { return pair->a.receiver.failures.size() == 1; }));
  CHECK(pair->a.receiver.failures[0].second.message().find(what) != std::string_view::npos);
}

TEST_CASE("transport/tcp: a peer whose connections are lost before an answer each time fails in time",
          "[transport][fast]") {
  TcpOptions options = test_options();
  std::string what = "it cannot be reached from 127.0.0.1";
  bool answers = false;
  TcpAnswer answer = TcpAnswer::kWelcome;
  SECTION("for too long") { options.redial_for = core::from_seconds(0.05); }
  SECTION("at once where nobody listens any more") { what = kEndedWithoutClosing; }
  SECTION("at once where another process answers") {
    answers = true;
    answer = TcpAnswer::kNotHere;
    what = kEndedWithoutClosing;
  }
  SECTION("at once where it has given us up") {
    answers = true;
    answer = TcpAnswer::kClosed;
    what = "has given up this process";
  }
  auto pair = make_tcp_pair(options);
  Listening peer;
  REQUIRE(pair->a.transport->connect(pair->b.id, encode(peer.there)).is_ok());
  CHECK(pair->run_until([&] {
    if (peer.listener && peer.take()) {
      if (answers) {
        peer.answer(answer);
      } else {
        if (what == kEndedWithoutClosing) peer.listener.reset();
        peer.reset_guest();
      }
    }
    return pair->a.receiver.failures.size() == 1;
  }));
  const core::Status& cause = pair->a.receiver.failures[0].second;
  CHECK(cause.code() == core::Code::kPeerDead);
  CHECK(cause.message().find(what) != std::string_view::npos);
}

TEST_CASE("transport/tcp: who is told to come again does so, and has not failed meanwhile", "[transport][fast]") {
  auto pair = make_tcp_pair();
  Listening peer;
  const auto endpoint = pair->a.transport->connect(pair->b.id, encode(peer.there));
  REQUIRE(endpoint.is_ok());
  CHECK(pair->a.transport->way(pair->b.id, encode(peer.there)) == Way::kOpens);
  REQUIRE(endpoint.value()->send(numbered(1), {}, 0, {}).is_ok());
  for (int i = 0; i < 2; ++i) {
    REQUIRE(pair->run_until([&] { return peer.take(); }));
    peer.answer(TcpAnswer::kBusy);
    CHECK(pair->run_until([&] { return tcp(pair->a).counters().redials == static_cast<std::uint64_t>(i) + 1; }));
    CHECK(pair->a.transport->way(pair->b.id, encode(peer.there)) == Way::kLacks);
  }
  REQUIRE(pair->run_until([&] { return peer.take(); }));
  peer.answer(TcpAnswer::kWelcome);
  CHECK(pair->run_until([&] { return peer.hear() > kGreetingBytes; }));
  CHECK(pair->a.transport->way(pair->b.id, encode(peer.there)) == Way::kStands);
  CHECK(pair->a.receiver.failures.empty());
}

TEST_CASE("transport/tcp: where there are no descriptors for a moment nobody has failed", "[transport][fast]") {
  auto pair = make_tcp_pair();
  const std::vector<std::byte> to_b = pair->b.transport->address();
  SECTION("for a connection that is made") {
    const NoDescriptors none;
    contract::Pair::connect_one(pair->a, pair->b);
    REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
    pair->settle();
    CHECK(pair->a.transport->way(pair->b.id, to_b) == Way::kLacks);
  }
  SECTION("for one that comes") {
    contract::Pair::connect_one(pair->a, pair->b);
    REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
    const NoDescriptors none;
    CHECK(pair->run_until([&] { return tcp(pair->b).counters().turned_away > 0; }));
    CHECK(pair->run_until([&] { return pair->a.transport->way(pair->b.id, to_b) == Way::kLacks; }));
  }
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(pair->a.receiver.failures.empty());
  CHECK(pair->b.receiver.failures.empty());
}

TEST_CASE("transport/tcp: a connection to a peer that has connected meanwhile is not waited for", "[transport][fast]") {
  auto pair = make_tcp_pair();
  {
    const NoDescriptors none;
    contract::Pair::connect_one(pair->a, pair->b);
    REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  }
  contract::Pair::connect_one(pair->b, pair->a);
  REQUIRE(pair->b.peer->send(numbered(2), {}, 0, {}).is_ok());
  CHECK(
      pair->run_until([&] { return pair->a.receiver.messages.size() == 1 && pair->b.receiver.messages.size() == 1; }));
  CHECK(pair->a.transport->paths().size() == 1);
  CHECK(pair->b.transport->paths().size() == 1);
  CHECK(tcp(pair->a).counters().redials <= 1);
}

TEST_CASE("transport/tcp: only what leaves through the card is dialled", "[transport][fast]") {
  const auto at = [](const char* numeric) { return *parse_address(numeric, 4711); };
  CHECK(leads_through(at("127.0.0.1"), at("127.0.0.1")));
  CHECK(leads_through(at("127.0.0.1"), at("127.3.2.1")));
  CHECK_FALSE(leads_through(at("127.0.0.1"), at("203.0.113.1")));    // whatever card leads there, it is not this one
  CHECK_FALSE(leads_through(at("203.0.113.1"), at("203.0.113.2")));  // no card of ours
  auto pair = make_tcp_pair();
  TcpAddress elsewhere;
  elsewhere.id = make_tcp_id();
  elsewhere.socket = at("203.0.113.1");
  const auto refused = pair->a.transport->connect(pair->b.id, encode(elsewhere));
  CHECK(refused.status().code() == core::Code::kPeerDead);
  CHECK(refused.status().message().find("203.0.113.1:4711") != std::string_view::npos);
}

TEST_CASE("transport/tcp: a forked child keeps no connection alive and cannot use it", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(pair->b.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(
      pair->run_until([&] { return pair->a.receiver.messages.size() == 1 && pair->b.receiver.messages.size() == 1; }));
  pair->release_all();
  std::array<int, 2> pipe{};
  REQUIRE(::pipe(pipe.data()) == 0);
  const pid_t child = ::fork();
  if (child == 0) {
    ::close(pipe[1]);
    bool right = pair->a.peer->send(numbered(1), {}, 0, {}).code() == core::Code::kClosed;
    right = right && pair->a.transport->progress() == 0 && pair->a.transport->arm();
    pair->a.transport->send_now();
    pair->a.transport.reset();
    char byte = 0;
    (void)!::read(pipe[0], &byte, 1);  // until the parent is done
    ::_exit(right ? 0 : 1);
  }
  ::close(pipe[0]);
  // The parent goes on as before, and its end is seen though the child lives.
  REQUIRE(pair->a.peer->send(numbered(2), {}, 0, {}).is_ok());
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  pair->a.transport.reset();
  CHECK(pair->run_until([&] { return pair->b.receiver.failures.size() == 1; }));
  ::close(pipe[1]);
  int status = 0;
  REQUIRE(::waitpid(child, &status, 0) == child);
  CHECK((WIFEXITED(status) && WEXITSTATUS(status) == 0));
}

TEST_CASE("transport/tcp: an address that is not of this machine, or none at all, is an error that names it",
          "[transport][fast]") {
  for (const char* address : {"", "localhost", "203.0.113.1"}) {
    const auto made = TcpTransport::create(test_options(address));
    INFO(address << ": " << made.status().to_string());
    CHECK(made.status().code() == core::Code::kInvalidArgument);
    CHECK(made.status().message().find(address) != std::string_view::npos);
  }
}

TEST_CASE("transport/tcp: it listens on a free port of the range, and says so where none is free",
          "[transport][fast]") {
  const auto free_one = Listening();  // whose port is taken
  const std::string text = free_one.there.socket.text();
  const auto taken = static_cast<std::uint16_t>(std::stoi(text.substr(text.rfind(':') + 1)));
  TcpOptions options = test_options();
  options.port_first = options.port_last = taken;
  const auto refused = TcpTransport::create(options);
  REQUIRE(refused.status().code() == core::Code::kOutOfResources);
  CHECK(refused.status().message().find("HYBRIDPS_PORTS") != std::string_view::npos);
  options.port_first = static_cast<std::uint16_t>(taken - 20);
  options.port_last = static_cast<std::uint16_t>(taken + 20);
  for (int i = 0; i < 10; ++i) {
    const auto made = TcpTransport::create(options);
    REQUIRE(made.is_ok());
    const std::string at = decode_tcp_address(made.value()->address()).value().socket.text();
    const int port = std::stoi(at.substr(at.rfind(':') + 1));
    CHECK(port != taken);
    CHECK(port >= options.port_first);
    CHECK(port <= options.port_last);
  }
}

TEST_CASE("transport/tcp: over IPv6", "[transport][fast]") {
  const auto made = TcpTransport::create(test_options("::1"));
  if (!made.is_ok()) return;  // a machine without it
  auto pair = make_tcp_pair(test_options("::1"));
  pair->connect();
  REQUIRE(pair->a.peer->send(numbered(1), pair->a.filled(5000, 1), 5000, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(matches(pair->b.receiver.messages.front().payload.data(), 5000, 1));
}

TEST_CASE("transport/tcp: addresses and frames come back as they were", "[transport][fast]") {
  for (const char* numeric : {"10.1.2.3", "fe80::1", "2001:db8::7"}) {
    TcpAddress address;
    address.id = make_tcp_id();
    address.socket = *parse_address(numeric, 4711);
    const auto back = decode_tcp_address(encode(address));
    REQUIRE(back.is_ok());
    CHECK(back.value().id == address.id);
    CHECK(back.value().socket.text() == address.socket.text());
    CHECK(address.socket.text().find("4711") != std::string::npos);
  }
  CHECK_FALSE(parse_address("example.org", 1).has_value());
  std::array<std::byte, kFrameBytes> bytes{};
  for (const Frame frame :
       {Frame{FrameKind::kMessage, 0, 1, 7}, Frame{FrameKind::kMessage, 0xfffffffe, kHeaderBytesMax, 0},
        Frame{FrameKind::kMessage, 65536, 112, 0xfffffff0}, Frame{FrameKind::kCount, 0, 0, 9},
        Frame{FrameKind::kFarewell, 0, 0, 0}}) {
    encode(frame, bytes.data());
    const auto back = decode_frame(bytes.data());
    REQUIRE(back.has_value());
    CHECK(back->payload_bytes == frame.payload_bytes);
    CHECK(back->header_bytes == frame.header_bytes);
    CHECK(back->received == frame.received);
    CHECK(back->kind == frame.kind);
  }
}

TEST_CASE("transport/tcp: UCX's address is refused with what to do", "[transport][fast]") {
  auto pair = make_tcp_pair();
  const std::vector<std::byte> inside(40, std::byte{1});
  const auto refused = pair->a.transport->connect(pair->b.id, wrap(kUcxEnvelope, inside));
  CHECK(refused.status().code() == core::Code::kInvalidArgument);
  CHECK(refused.status().message().find("HYBRIDPS_DATA_TRANSPORT") != std::string_view::npos);
}

}  // namespace
}  // namespace hybridps::transport
