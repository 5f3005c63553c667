// Checksums of messages: a bit that flips on the way is found, always, and no message with it is delivered.
#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "hybridps/transport/threaded.h"
#include "tests/unit/transport/tcp/watched_pair.h"

namespace hybridps::transport {
namespace {

using contract::numbered;

/// Messages of many sizes go to b, and one bit of their stream flips.
void flip_one_bit(std::uint64_t seed) {
  std::mt19937_64 random(seed);
  WatchedPair world(checksum_options());
  std::vector<std::size_t> sizes;
  std::size_t stream = 0;
  for (int i = 0; i < 6; ++i) {
    sizes.push_back(random() % 3 == 0 ? 0 : random() % (random() % 2 == 0 ? 300 : 12000));
    stream += kFrameBytes + kSumsBytes + numbered(0).size() + sizes.back();
  }
  const std::size_t flipped = kGreetingBytes + random() % stream;
  const auto bit = static_cast<char>(1 << (random() % 8));
  world.relays[1]->tamper([&](std::vector<char>& bytes, std::size_t before) {
    if (before <= flipped && flipped < before + bytes.size()) bytes[flipped - before] ^= bit;
  });
  world.connect();
  auto& [a, b] = *world.pair;
  for (std::size_t i = 0; i < sizes.size(); ++i) {
    const Buffer payload = sizes[i] > 0 ? a.filled(sizes[i], i) : Buffer();
    REQUIRE(a.peer->send(numbered(i), payload, sizes[i], {}).is_ok());
  }
  INFO("seed " << seed << ", byte " << flipped << " of " << kGreetingBytes + stream);
  REQUIRE(world.run_until([&] { return tcp(b).counters().damaged > 0; }));
  CHECK(tcp(b).counters().damaged == 1);
  bool right = b.receiver.messages.size() < sizes.size();
  for (std::size_t i = 0; i < b.receiver.messages.size(); ++i)
    right = right && is_message(b.receiver.messages[i], i) && b.receiver.messages[i].payload.bytes() == sizes[i];
  CHECK(right);
  // The session is over, and the other side is told why: nothing is sent again.
  REQUIRE(world.run_until([&] { return a.receiver.failures.size() == 1; }));
  CHECK(a.receiver.failures[0].second.message().find(kChangedOnTheWay) != std::string_view::npos);
  CHECK(b.transport->connect(a.id, a.transport->address()).status().code() == core::Code::kPeerDead);
}

TEST_CASE("transport/tcp checksum: a bit that flips is found, and its message is not delivered", "[transport][fast]") {
  for (std::uint64_t seed = 0; seed < 150; ++seed) flip_one_bit(seed);
}

TEST_CASE("transport/tcp checksum: 10,000 flipped bits, 10,000 found", "[transport][.long]") {
  for (std::uint64_t seed = 1000; seed < 11000; ++seed) flip_one_bit(seed);
}

TEST_CASE("transport/tcp checksum: the group's error names both ends, and what to look at", "[transport][fast]") {
  WatchedPair world(checksum_options());
  world.connect();
  auto& [a, b] = *world.pair;
  REQUIRE(a.peer->send(numbered(0), {}, 0, {}).is_ok());
  REQUIRE(world.run_until([&] { return b.receiver.messages.size() == 1; }));
  REQUIRE(b.transport->connect(a.id, world.relays[0]->address()).is_ok());
  world.relays[1]->tamper([](std::vector<char>& bytes, std::size_t) { bytes.back() ^= 1; });
  REQUIRE(a.peer->send(numbered(1), a.filled(5000, 1), 5000, {}).is_ok());
  REQUIRE(world.run_until([&] { return b.receiver.failures.size() == 1; }));
  const std::string told(b.receiver.failures[0].second.message());
  INFO(told);
  CHECK(told.find("127.0.0.1 here and 127.0.0.1:") != std::string::npos);
  CHECK(told.find(kChangedOnTheWay) != std::string::npos);
}

TEST_CASE("transport/tcp checksum: a connection that breaks goes on, with right sums", "[transport][fast]") {
  WatchedPair world(checksum_options());
  world.connect();
  auto& [a, b] = *world.pair;
  constexpr std::uint64_t kCount = 60;
  for (std::uint64_t i = 0; i < kCount; ++i) {
    REQUIRE(a.peer->send(numbered(i), a.filled(3000, i), 3000, {}).is_ok());
    if (i % 10 == 5) REQUIRE(world.run_until([&] { return b.receiver.messages.size() + 4 > i; }));
    if (i % 20 == 7) world.relays[1]->cut(TcpRelay::Cut::kReset);
  }
  REQUIRE(world.run_until([&] { return b.receiver.messages.size() == kCount; }));
  bool all = true;
  for (std::uint64_t i = 0; i < kCount; ++i) all = all && is_message(b.receiver.messages[i], i);
  CHECK(all);
  CHECK(tcp(b).counters().damaged == 0);
  CHECK(tcp(a).counters().redials > 0);
}

TEST_CASE("transport/tcp checksum: a changed greeting or answer is asked again, and nothing is lost",
          "[transport][fast]") {
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    std::mt19937_64 random(seed);
    WatchedPair world(random() % 2 == 0 ? checksum_options() : test_options());
    world.connect();
    auto& [a, b] = *world.pair;
    constexpr std::uint64_t kCount = 8;
    const bool is_first = random() % 4 == 0;  // else of the connection that goes on after a loss
    const bool is_answer = !is_first && random() % 2 == 0;
    const std::size_t flipped = random() % (is_answer ? kAnswerBytes : kGreetingBytes);
    const auto bit = static_cast<char>(1 << (random() % 8));
    bool may = is_first;
    int flips = 0;
    const auto flip = [&](std::vector<char>& bytes, std::size_t before) {
      if (!may || before > flipped || flipped >= before + bytes.size()) return;
      bytes[flipped - before] ^= bit;
      may = false;
      ++flips;
    };
    if (is_answer)
      world.relays[1]->tamper_back(flip);
    else
      world.relays[1]->tamper(flip);
    for (std::uint64_t i = 0; i < kCount; ++i) {
      REQUIRE(a.peer->send(numbered(i), a.filled(3000, i), 3000, {}).is_ok());
      if (i != 3 || is_first) continue;
      REQUIRE(world.run_until([&] { return !b.receiver.messages.empty(); }));
      may = true;
      world.relays[1]->cut(TcpRelay::Cut::kReset);
    }
    INFO("seed " << seed << ", byte " << flipped << (is_answer ? " of an answer" : " of a greeting"));
    REQUIRE(world.run_until([&] { return b.receiver.messages.size() >= kCount; }));
    CHECK(flips == 1);
    CHECK(b.receiver.messages.size() == kCount);
    bool all = true;
    for (std::uint64_t i = 0; i < kCount; ++i) all = all && is_message(b.receiver.messages[i], i);
    CHECK(all);
    CHECK(a.receiver.failures.empty());
  }
}

TEST_CASE("transport/tcp checksum: a damaged message that comes by a thread is counted", "[transport][fast]") {
  TcpOptions options = checksum_options();
  options.damaged = std::make_shared<std::atomic<std::uint64_t>>(0);
  WatchedPair world(options);
  world.connect();
  auto& [a, b] = *world.pair;
  world.relays[1]->tamper([](std::vector<char>& bytes, std::size_t before) {
    if (before >= kGreetingBytes) bytes.back() ^= 1;
  });
  b.transport = make_threaded(std::move(b.transport), start_transport_thread({.name = "test-data"}).value()).value();
  b.transport->set_receiver(&b.receiver);
  REQUIRE(a.peer->send(numbered(1), a.filled(5000, 1), 5000, {}).is_ok());
  REQUIRE(world.run_until([&] { return options.damaged->load() == 1; }));
  REQUIRE(world.run_until([&] { return a.receiver.failures.size() == 1; }));
  CHECK(b.receiver.messages.empty());
}

TEST_CASE("transport/tcp checksum: both sides have the same setting, or are told", "[transport][fast]") {
  auto pair = make_tcp_pair(checksum_options());
  pair->b.transport = TcpTransport::create(test_options()).value();
  const auto to_b = pair->a.transport->connect(pair->b.id, pair->b.transport->address());
  CHECK(to_b.status().code() == core::Code::kMismatch);
  CHECK(to_b.status().message() == "it has not HYBRIDPS_CHECKSUM=1, and this process has");
  const auto to_a = pair->b.transport->connect(pair->a.id, pair->a.transport->address());
  CHECK(to_a.status().message() == "it has HYBRIDPS_CHECKSUM=1, and this process has not");
  CHECK(decode_tcp_address(pair->a.transport->address()).value().has_checksums);
}

TEST_CASE("transport/tcp checksum: frames with sums come back, and no changed bit passes", "[transport][fast]") {
  std::array<std::byte, kFrameBytes + kSumsBytes> bytes{};
  encode(Frame{FrameKind::kMessage, 65536, 112, 0xfffffff0}, bytes.data());
  CHECK_FALSE(decode_summed_frame(bytes.data()).has_value());  // a frame of a process without sums
  add_sums(bytes.data(), 0x12345678);
  const auto back = decode_summed_frame(bytes.data());
  REQUIRE(back.has_value());
  CHECK(back->body == 0x12345678);
  REQUIRE(back->frame.has_value());
  CHECK(back->frame->payload_bytes == 65536);
  CHECK_FALSE(decode_frame(bytes.data()).has_value());  // nor does a process without them take it
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    CHECK_FALSE(decode_summed_frame(bytes.data()).has_value());
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

}  // namespace
}  // namespace hybridps::transport
