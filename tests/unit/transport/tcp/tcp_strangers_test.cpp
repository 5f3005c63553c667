// Connections of strangers: who is heard, who gets a place, and what they cost.
#include <linux/sockios.h>
#include <sys/ioctl.h>

#include <array>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/tls/channel.h"
#include "tests/support/clock.h"
#include "tests/unit/transport/tcp/tcp_stranger.h"

namespace hybridps::transport {
namespace {

using contract::numbered;

TEST_CASE("transport/tcp: who does not greet with our id is not heard", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  const Stranger loud(pair->b);
  const std::string noise(500, 'x');
  loud.say(noise.data(), noise.size());
  const Stranger wrong(pair->b);
  TcpGreeting unknown;
  unknown.from = make_tcp_id();
  unknown.to = make_tcp_id();
  const auto greeting = encode(unknown);
  wrong.say(greeting.data(), greeting.size());
  CHECK(pair->run_until([&] { return tcp(pair->b).counters().refused == 2; }));
  CHECK(pair->run_until([&] { return loud.was_hung_up_on() && wrong.was_hung_up_on(); }));
  CHECK(pair->b.receiver.messages.empty());
  CHECK(pair->b.receiver.failures.empty());
  // And those who do are.
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
}

TEST_CASE("transport/tcp: who connects and says nothing is hung up on in time", "[transport][fast]") {
  TcpOptions options = test_options();
  options.greeting_timeout = core::from_seconds(0.05);
  auto pair = make_tcp_pair(options);
  const Stranger silent(pair->b);
  const Stranger slow(pair->b);
  slow.say("HPSTCP", 6);
  CHECK(pair->run_until([&] { return pair->b.transport->arm() && tcp(pair->b).counters().refused == 2; }));
  CHECK(pair->run_until([&] { return silent.was_hung_up_on() && slow.was_hung_up_on(); }));
}

TEST_CASE("transport/tcp: of peers that nobody has named few have connections, and a member comes in beside them",
          "[transport][fast]") {
  test::MovableClock clock;
  TcpOptions options = test_options();
  options.greetings_max = 64;
  auto pair = make_tcp_pair(options);
  Strangers strangers(pair->b);
  for (int i = 0; i < 64; ++i) REQUIRE(strangers.come());
  CHECK_FALSE(strangers.come());
  CHECK(tcp(pair->b).counters().turned_away == 1);
  pair->b.transport->introduce(pair->a.id, pair->a.transport->address());
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  CHECK(until(pair->b, [&] {
    pair->a.progress();
    return !pair->b.receiver.messages.empty();
  }));
  CHECK(pair->b.receiver.messages.size() == 1);
  // Who is named later is none of them any more.
  CHECK_FALSE(strangers.come());
  clock.pass(core::from_seconds(31));
  CHECK_FALSE(strangers.come());
  clock.pass(core::from_seconds(30 * 60));
  CHECK(strangers.come());
  CHECK(until(pair->b, [&] { return strangers.all.front()->was_hung_up_on(); }));
  CHECK_FALSE(strangers.all[1]->was_hung_up_on());
}

TEST_CASE("transport/tcp: a peer that nobody has named stays if its messages are here", "[transport][fast]") {
  test::MovableClock clock;
  TcpOptions options = test_options();
  options.greetings_max = 2;
  auto pair = make_tcp_pair(options);
  contract::Pair::connect_one(pair->a, pair->b);
  const auto arrives = [&](std::size_t count) {
    REQUIRE(pair->a.peer->send(numbered(count), {}, 0, {}).is_ok());
    return pair->run_until([&] { return pair->b.receiver.messages.size() == count; });
  };
  REQUIRE(arrives(1));
  clock.pass(core::from_seconds(1));
  Strangers strangers(pair->b);
  REQUIRE(strangers.come());
  CHECK_FALSE(strangers.come());
  clock.pass(core::from_seconds(31 * 60));
  CHECK(strangers.come());  // in the place of the silent one
  CHECK(until(pair->b, [&] { return strangers.all.front()->was_hung_up_on(); }));
  CHECK(arrives(2));
  CHECK(pair->a.receiver.failures.empty());
}

TEST_CASE("transport/tcp: of too many who have connected and said nothing the oldest goes, and a peer comes again",
          "[transport][fast]") {
  TcpOptions options = test_options();
  options.greetings_max = 4;
  auto pair = make_tcp_pair(options);
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  bool is_first = false;
  SECTION("it has not said it yet") {}
  SECTION("it has said it") {
    is_first = true;
    for (int i = 0; i < 200; ++i) pair->a.progress();
  }
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 6; ++i) silent.push_back(std::make_unique<Stranger>(pair->b));
  CHECK(until(pair->b, [&] { return tcp(pair->b).counters().refused >= (is_first ? 2U : 3U); }));
  for (int i = 0; i < 50; ++i) pair->b.progress();  // and no more of them
  CHECK(tcp(pair->b).counters().refused == (is_first ? 2 : 3));
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(tcp(pair->a).counters().redials == (is_first ? 0 : 1));
  CHECK(pair->a.receiver.failures.empty());
  CHECK(pair->b.receiver.failures.empty());
}

TEST_CASE("transport/tcp: strangers leave descriptors for a peer", "[transport][fast]") {
  auto pair = make_tcp_pair();
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 60; ++i) silent.push_back(std::make_unique<Stranger>(pair->b));
  const int first = lowest_free();
  const NoDescriptors few(40);
  CHECK(pair->run_until([&] { return tcp(pair->b).counters().refused >= 50; }));
  CHECK(lowest_free() < first + 10);
  CHECK(tcp(pair->b).counters().turned_away == 0);
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(tcp(pair->a).counters().redials == 0);
  CHECK(pair->a.receiver.failures.empty());
}

TEST_CASE("transport/tcp: without a descriptor the oldest stranger makes room for who comes", "[transport][fast]") {
  auto pair = make_tcp_pair();
  const Stranger silent(pair->b);
  pair->settle();
  contract::Pair::connect_one(pair->a, pair->b);
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  const NoDescriptors none;
  CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(tcp(pair->b).counters().turned_away == 0);
  CHECK(tcp(pair->b).counters().refused == 1);
  CHECK(pair->run_until([&] { return silent.was_hung_up_on(); }));
}

TEST_CASE("transport/tcp: few connections are taken in one go", "[transport][fast]") {
  auto pair = make_tcp_pair();
  std::vector<std::unique_ptr<Stranger>> silent;
  int most = 0;
  for (int round = 0; round < 20 && most < 16; ++round) {  // the kernel may be late with some
    silent.clear();
    pair->settle();
    for (int i = 0; i < 40; ++i) silent.push_back(std::make_unique<Stranger>(pair->b));
    for (int before = descriptors_open(), i = 0; i < 100; ++i) {
      pair->b.progress();
      const int now = descriptors_open();
      most = std::max(most, now - before);
      before = now;
    }
  }
  CHECK(most == 16);
}

TEST_CASE("transport/tcp: who was given up hears that when it comes again", "[transport][fast]") {
  auto pair = make_tcp_pair();
  pair->connect();
  pair->b.peer->close(core::Status(core::Code::kPeerDead, "it is silent"));
  pair->settle();
  const Stranger again(pair->b);
  again.greet(address_of(pair->a).id);
  std::array<std::byte, kAnswerBytes> bytes{};
  CHECK(pair->run_until([&] {
    return ::recv(again.socket.get(), bytes.data(), bytes.size(), MSG_DONTWAIT) == static_cast<ssize_t>(bytes.size());
  }));
  CHECK(decode_reply(bytes)->answer == TcpAnswer::kClosed);
  CHECK(pair->run_until([&] { return again.was_hung_up_on(); }));
}

/// A connection of somebody who knows the address and, in TLS, dials as a member does.
struct Member {
  Member(const contract::Side& to, const std::string& token, const TcpId& knocks_for)
      : wire(to),
        channel(tls::TlsChannel::dial(test_authority(token)->make_identity().value(), wire.socket.get(),
                                      tls::knock_key(knocks_for))
                    .value()) {}
  /// Sends what it can, and takes what has come. False: it is over.
  bool go_on() const {
    std::array<std::byte, 100> bytes;
    const iovec part{bytes.data(), bytes.size()};
    const ssize_t got = channel->receive(&part, 1);
    return got > 0 || (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK));
  }
  Stranger wire;
  std::unique_ptr<tls::TlsChannel> channel;
};

TEST_CASE("transport/tcp: strangers have few places, and none if they say something wrong", "[transport][fast]") {
  constexpr int kPlaces = 64;
  const bool has_tls = GENERATE(false, true);
  auto pair = make_tcp_pair(has_tls ? tls_options() : test_options());
  const auto open_after = [&](const std::function<void(const Stranger&)>& speak) {
    pair->settle();
    std::vector<std::unique_ptr<Stranger>> all;
    for (int i = 0; i < 200; ++i) {
      all.push_back(std::make_unique<Stranger>(pair->b));
      speak(*all.back());
    }
    for (const auto& one : all) {  // what each has said has arrived
      int unsent = 1;
      for (int i = 0; i < 1000 && unsent > 0; ++i) {
        REQUIRE(::ioctl(one->socket.get(), SIOCOUTQ, &unsent) == 0);
        if (unsent > 0) ::usleep(1000);
      }
    }
    const int before = descriptors_open();
    const std::uint64_t refused = tcp(pair->b).counters().refused;
    int most = 0;
    for (int i = 0; i < 2000 && tcp(pair->b).counters().refused < refused + 200 - kPlaces; ++i) {
      pair->b.progress();
      most = std::max(most, descriptors_open() - before);
      if (i > 50) ::usleep(1000);
    }
    CHECK(tcp(pair->b).counters().refused >= refused + 200 - kPlaces);
    for (int i = 0; i < 50; ++i) pair->b.progress();
    most = std::max(most, descriptors_open() - before);
    // A member comes in beside them.
    contract::Side& a = pair->a;
    if (a.peer == nullptr) contract::Pair::connect_one(pair->a, pair->b);
    const std::size_t had = pair->b.receiver.messages.size();
    REQUIRE(a.peer->send(numbered(1), {}, 0, {}).is_ok());
    CHECK(pair->run_until([&] { return pair->b.receiver.messages.size() == had + 1; }));
    return most;
  };
  CHECK(open_after([](const Stranger&) {}) <= kPlaces);
  CHECK(open_after([](const Stranger& one) { one.say("HPS", 3); }) <= kPlaces);
  const std::string noise(300, 'x');
  CHECK(open_after([&](const Stranger& one) { one.say(noise.data(), noise.size()); }) == 0);
  // The beginning of a handshake of TLS, as any program makes it.
  CHECK(open_after([&](const Stranger& one) { one.say("\x16\x03\x01\x02\x00\x01", 6); }) == 0);
  CHECK(pair->a.receiver.failures.empty());
  CHECK(pair->b.receiver.failures.empty());
}

TEST_CASE("transport/tcp tls: strangers do not push out who is in the middle of a handshake",
          "[transport][tls][fast]") {
  auto pair = make_tcp_pair(tls_options());
  const Member member(pair->b, "the token of the tests", address_of(pair->b).id);
  CHECK(member.go_on());
  for (int i = 0; i < 50; ++i) pair->b.progress();
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 200; ++i) silent.push_back(std::make_unique<Stranger>(pair->b));
  REQUIRE(until(pair->b, [&] { return tcp(pair->b).counters().refused >= 136; }));
  for (int i = 0; i < 50; ++i) pair->b.progress();
  CHECK(until(pair->b, [&] { return !member.go_on() || member.channel->is_open(); }));
  CHECK(member.channel->is_open());
}

TEST_CASE("transport/tcp tls: a knock that nobody has read yet keeps its place", "[transport][tls][fast]") {
  auto pair = make_tcp_pair(tls_options());
  const Member member(pair->b, "the token of the tests", address_of(pair->b).id);
  std::vector<std::unique_ptr<Stranger>> silent;
  for (int i = 0; i < 63; ++i) silent.push_back(std::make_unique<Stranger>(pair->b));
  const int before = descriptors_open();
  REQUIRE(until(pair->b, [&] { return descriptors_open() == before + 64; }));
  silent.push_back(std::make_unique<Stranger>(pair->b));  // is taken before the knock is read
  CHECK(member.go_on());
  CHECK(until(pair->b, [&] { return !member.go_on() || member.channel->is_open(); }));
  CHECK(member.channel->is_open());
  CHECK(tcp(pair->b).counters().refused == 0);
}

TEST_CASE("transport/tcp tls: who knocks for another process learns so, and gets no handshake",
          "[transport][tls][fast]") {
  auto pair = make_tcp_pair(tls_options());
  const Member lost(pair->b, "the token of the tests", address_of(pair->a).id);
  const bool is_taken_before = GENERATE(false, true);
  if (is_taken_before) pair->settle();
  CHECK(until(pair->b, [&] { return !lost.go_on(); }));
  CHECK(lost.channel->is_elsewhere());
  CHECK(tcp(pair->b).counters().refused == 1);
}

TEST_CASE("transport/tcp tls: what a member has said opens nothing when another says it again",
          "[transport][tls][fast]") {
  auto pair = make_tcp_pair(tls_options());
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) == 0);
  const TcpId id = address_of(pair->b).id;
  std::vector<char> said(4096);
  {
    const auto channel =
        tls::TlsChannel::dial(test_authority()->make_identity().value(), ends[0], tls::knock_key(id)).value();
    const iovec none{};
    (void)channel->receive(&none, 1);
    const ssize_t got = ::recv(ends[1], said.data(), said.size(), 0);
    REQUIRE(got > 100);
    said.resize(static_cast<std::size_t>(got));
  }
  for (const int end : ends) ::close(end);
  const auto is_answered = [&] {
    const Stranger one(pair->b);
    one.say(said.data(), said.size());
    char byte = 0;
    ssize_t got = -1;
    REQUIRE(until(pair->b, [&] {
      got = ::recv(one.socket.get(), &byte, 1, MSG_DONTWAIT);
      return got >= 0 || errno != EAGAIN;
    }));
    return got == 1;
  };
  CHECK(is_answered());
  CHECK_FALSE(is_answered());
}

}  // namespace
}  // namespace hybridps::transport
