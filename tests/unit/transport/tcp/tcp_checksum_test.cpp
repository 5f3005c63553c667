// Checksums of messages: a bit that flips on the way is found, always, and no message with it is delivered.
#include <array>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

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
  REQUIRE(world.run_until([&] { return b.transport->stats().rx_damaged > 0; }));
  CHECK(b.transport->stats().rx_damaged == 1);
  CHECK(tcp(b).counters().malformed == 1);
  bool right = b.receiver.messages.size() < sizes.size();
  for (std::size_t i = 0; i < b.receiver.messages.size(); ++i)
    right = right && is_message(b.receiver.messages[i], i) && b.receiver.messages[i].payload.bytes() == sizes[i];
  CHECK(right);
  // The session is over: nothing is sent again.
  REQUIRE(world.run_until([&] { return a.receiver.failures.size() == 1; }));
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
  CHECK(told.find("CRC32C") != std::string::npos);
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
  CHECK(b.transport->stats().rx_damaged == 0);
  CHECK(tcp(a).counters().redials > 0);
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
  CHECK(back->frame.payload_bytes == 65536);
  CHECK_FALSE(decode_frame(bytes.data()).has_value());  // nor does a process without them take it
  for (std::size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    CHECK_FALSE(decode_summed_frame(bytes.data()).has_value());
    bytes[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
  }
}

}  // namespace
}  // namespace hybridps::transport
