// TCP in TLS: who gets a connection, and what happens to a stream that is changed on its way.
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cstring>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/unit/transport/tcp/tcp_pair.h"
#include "tests/unit/transport/tcp/tcp_relay.h"
#include "tests/unit/transport/tcp/watched_pair.h"

namespace hybridps::transport {
namespace {

using contract::numbered;

/// Listens without TLS, under the name of a transport.
struct Impostor {
  explicit Impostor(const contract::Side& side) {
    TcpAddress here = decode_tcp_address(side.transport->address()).value();
    {
      const core::ForkLock lock;
      listener = core::Descriptor(lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
    }
    here.socket = *parse_address("127.0.0.1", 0);
    REQUIRE(::bind(listener.get(), here.socket.get(), here.socket.bytes) == 0);
    REQUIRE(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&here.socket.name), &here.socket.bytes) == 0);
    REQUIRE(::listen(listener.get(), 64) == 0);
    address = encode(here);
  }
  /// -1: nobody has come.
  int accept() const { return ::accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC); }
  core::Descriptor listener;
  std::vector<std::byte> address;
};

TEST_CASE("transport/tcp tls: nothing that is sent is seen on the way", "[transport][tls][fast]") {
  const bool tls = GENERATE(true, false);
  WatchedPair world(tls ? tls_options() : test_options());
  std::vector<char> seen;
  world.relays[1]->tamper(
      [&](std::vector<char>& bytes, std::size_t) { seen.insert(seen.end(), bytes.begin(), bytes.end()); });
  world.connect();
  auto& pair = *world.pair;
  for (std::uint64_t i = 0; i < 12; ++i)
    REQUIRE(pair.a.peer->send(numbered(i), pair.a.filled(50000, i), 50000, {}).is_ok());
  REQUIRE(world.run_until([&] { return pair.b.receiver.messages.size() == 12; }));
  for (std::uint64_t i = 0; i < 12; ++i) {
    CHECK(is_message(pair.b.receiver.messages[i], i));
  }
  const auto is_seen = [&](const void* what, std::size_t size) {
    return ::memmem(seen.data(), seen.size(), what, size) != nullptr;
  };
  CHECK(seen.size() > 12 * 50000);
  const auto id = decode_tcp_address(pair.a.transport->address()).value().id;
  const Buffer payload = pair.a.filled(50000, 3);
  CHECK(is_seen(id.data(), id.size()) == !tls);
  CHECK(is_seen("HPSTCP", 6) == !tls);
  CHECK(is_seen(payload.data(), 64) == !tls);
}

TEST_CASE("transport/tcp tls: bytes that were changed, left out or repeated break the connection, and nothing else",
          "[transport][tls][fast]") {
  const std::uint64_t seed = GENERATE(range(1, 13));
  WatchedPair world(tls_options());
  std::mt19937_64 random(seed);
  constexpr std::uint64_t kCount = 200;
  std::uint64_t sent = 0;
  int spoilt = 0;
  world.relays[1]->tamper([&](std::vector<char>& bytes, std::size_t before) {
    // Not the handshake: what is missing there is waited for, up to greeting_timeout. Not the last messages: the rest
    // of a record whose length was changed is waited for, too.
    if (before < 4096 || sent > kCount - 30 || random() % 4 != 0) return;
    ++spoilt;
    const std::size_t at = random() % bytes.size();
    switch (random() % 3) {
      case 0: bytes[at] = static_cast<char>(bytes[at] ^ (1 << (random() % 8))); break;
      case 1: bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at)); break;
      case 2: bytes.insert(bytes.end(), bytes.begin(), bytes.end()); break;
    }
  });
  world.connect();
  auto& pair = *world.pair;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    Buffer payload;
    REQUIRE(world.run_until([&] {
      payload = pair.a.pool->allocate(20000);
      return static_cast<bool>(payload);
    }));
    contract::fill(payload.data(), 20000, i);
    REQUIRE(pair.a.peer->send(numbered(i), payload, 20000, {}).is_ok());
    sent = i;
  }
  REQUIRE(world.run_until([&] { return pair.b.receiver.messages.size() >= kCount; }, 30));
  CHECK(pair.b.receiver.messages.size() == kCount);
  bool all = true;
  for (std::uint64_t i = 0; i < kCount; ++i) all = all && is_message(pair.b.receiver.messages[i], i);
  CHECK(all);
  CHECK(spoilt > 5);
  CHECK(pair.a.receiver.failures.empty());
}

TEST_CASE("transport/tcp tls: a process with another token is refused, and told so at once", "[transport][tls][fast]") {
  TcpOptions options = tls_options();
  options.redial_for = core::from_seconds(3600);
  auto pair = make_tcp_pair(options);
  options.authority = test_authority("another token than the tests'");
  pair->a.transport = TcpTransport::create(options).value();
  pair->a.transport->set_receiver(&pair->a.receiver);
  auto to_b = pair->a.transport->connect(pair->b.id, pair->b.transport->address());
  REQUIRE(to_b.is_ok());
  REQUIRE(to_b.value()->send(numbered(1), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] { return pair->a.receiver.failures.size() == 1; }));
  CHECK(pair->a.receiver.failures[0].second.message().find("HYBRIDPS_TOKEN") != std::string_view::npos);
  CHECK(pair->b.receiver.messages.empty());
  CHECK(pair->b.receiver.failures.empty());
}

TEST_CASE("transport/tcp tls: with it and without it do not meet", "[transport][tls][fast]") {
  auto pair = make_tcp_pair(tls_options());
  auto clear = TcpTransport::create(test_options()).value();
  const auto refused = clear->connect(pair->a.id, pair->a.transport->address());
  REQUIRE_FALSE(refused.is_ok());
  CHECK(refused.status().code() == core::Code::kMismatch);
  CHECK_FALSE(pair->a.transport->connect(core::make_engine_id(), clear->address()).is_ok());
}

TEST_CASE("transport/tcp tls: a holder of the token cannot take another's id", "[transport][tls][fast]") {
  TcpOptions options = tls_options();
  options.redial_for = core::from_seconds(0.3);
  auto pair = make_tcp_pair(options);
  // The address of b with the id of a: whoever answers there is not a.
  TcpAddress forged = decode_tcp_address(pair->b.transport->address()).value();
  forged.id = decode_tcp_address(pair->a.transport->address()).value().id;
  auto third = TcpTransport::create(options).value();
  contract::Recorder receiver;
  third->set_receiver(&receiver);
  auto to_a = third->connect(pair->a.id, encode(forged));
  REQUIRE(to_a.is_ok());
  REQUIRE(to_a.value()->send(numbered(1), {}, 0, {}).is_ok());
  REQUIRE(pair->run_until([&] {
    (void)third->progress();
    return !receiver.failures.empty();
  }));
  CHECK(pair->b.receiver.messages.empty());
  third.reset();
  CHECK(tcp(pair->b).counters().refused >= 1);
}

TEST_CASE("transport/tcp tls: a side without descriptors says \"come again\" before a handshake",
          "[transport][tls][fast]") {
  TcpOptions options = tls_options();
  options.greetings_max = 1;
  auto pair = make_tcp_pair(options);
  // Those who connect and say nothing take the only place, one after the other.
  const TcpAddress there = decode_tcp_address(pair->b.transport->address()).value();
  std::vector<core::Descriptor> silent;
  const auto come = [&] {
    const core::ForkLock lock;
    silent.emplace_back(lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    REQUIRE(::connect(silent.back().get(), there.socket.get(), there.socket.bytes) == 0);
  };
  auto to_b = pair->a.transport->connect(pair->b.id, pair->b.transport->address());
  REQUIRE(to_b.is_ok());
  pair->a.peer = to_b.value();
  REQUIRE(pair->a.peer->send(numbered(1), {}, 0, {}).is_ok());
  for (int i = 0; i < 10; ++i) come();
  REQUIRE(pair->run_until([&] { return pair->b.receiver.messages.size() == 1; }));
  CHECK(pair->a.receiver.failures.empty());
}

TEST_CASE("transport/tcp tls: who is cut off in the middle of a handshake comes again, and has lost nothing",
          "[transport][tls][fast]") {
  TcpOptions options = tls_options();
  options.redial_for = core::from_seconds(0.2);  // as a loss it would end: it is cut off for longer
  auto pair = make_tcp_pair(options);
  const Impostor impostor(pair->b);
  auto to_b = pair->a.transport->connect(pair->b.id, impostor.address);
  REQUIRE(to_b.is_ok());
  REQUIRE(to_b.value()->send(numbered(1), {}, 0, {}).is_ok());
  int cuts = 0;
  const auto began = std::chrono::steady_clock::now();
  REQUIRE(pair->run_until([&] {
    const int guest = impostor.accept();
    if (guest >= 0) {
      for (int i = 0; i < 100; ++i) pair->a.progress();
      std::array<std::byte, 4096> hello;
      REQUIRE(::recv(guest, hello.data(), hello.size(), 0) > 100);  // its handshake has begun
      const linger at_once{1, 0};
      if (cuts % 2 == 0) (void)::setsockopt(guest, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      ::close(guest);
      ++cuts;
    }
    return std::chrono::steady_clock::now() - began > std::chrono::seconds(1) && cuts >= 6;
  }));
  CHECK(pair->a.receiver.failures.empty());
  CHECK(pair->a.transport->way(pair->b.id, impostor.address) == Way::kLacks);
  CHECK(tcp(pair->a).counters().redials >= 6);
}

TEST_CASE("transport/tcp tls: \"come again\" in clear is heard, however early it comes", "[transport][tls][fast]") {
  TcpOptions options = tls_options();
  options.redial_for = core::from_seconds(0.2);
  auto pair = make_tcp_pair(options);
  const Impostor impostor(pair->b);
  const bool is_early = GENERATE(true, false);
  int answered = 0;
  std::vector<int> guests;
  const auto answer = [&](int guest) {
    std::array<std::byte, 4096> unread;
    (void)!::recv(guest, unread.data(), unread.size(), MSG_DONTWAIT);
    const auto busy = encode(TcpReply{TcpAnswer::kBusy, {}});
    (void)!::send(guest, busy.data(), busy.size(), MSG_NOSIGNAL);
    ::close(guest);
    ++answered;
  };
  REQUIRE(pair->a.transport->connect(pair->b.id, impostor.address).is_ok());
  const bool is_done = pair->run_until([&] {
    for (const int guest : std::exchange(guests, {})) answer(guest);
    const int guest = impostor.accept();
    if (guest >= 0 && is_early) answer(guest);  // before the dialler has looked at its connection
    if (guest >= 0 && !is_early) guests.push_back(guest);
    return answered >= 6;  // each after 0.1 s, longer than redial_for
  });
  for (const int guest : guests) ::close(guest);
  REQUIRE(is_done);
  (void)pair->run_until([&] { return pair->a.transport->way(pair->b.id, impostor.address) == Way::kLacks; }, 5);
  CHECK(pair->a.transport->way(pair->b.id, impostor.address) == Way::kLacks);
  CHECK(pair->a.receiver.failures.empty());
}

}  // namespace
}  // namespace hybridps::transport
