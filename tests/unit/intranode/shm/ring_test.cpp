#include "hybridps/intranode/shm/ring.h"

#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

namespace hybridps::intranode::shm {
namespace {

struct Slot {
  explicit Slot(std::uint32_t ring_entries, std::uint32_t release_entries = 4)
      : layout{ring_entries, release_entries},
        memory(static_cast<std::byte*>(::operator new[](layout.slot_bytes(), std::align_val_t{64}))) {
    std::memset(memory, 0, layout.slot_bytes());
    messages_out = MessageWriter(memory, layout);
    messages_in = MessageReader(memory, layout);
    releases_out = ReleaseWriter(memory, layout);
    releases_in = ReleaseReader(memory, layout);
  }
  ~Slot() { ::operator delete[](memory, std::align_val_t{64}); }
  Slot(const Slot&) = delete;

  void put(std::uint64_t number) { messages_out.put_inline(std::as_bytes(std::span(&number, 1)), {}); }
  std::uint64_t take() {
    RingMessage message;
    REQUIRE(messages_in.peek(message) == Taken::kEntry);
    REQUIRE(message.header_bytes == 8);
    std::uint64_t number = 0;
    std::memcpy(&number, message.header.data(), 8);
    messages_in.advance();
    return number;
  }
  MessageEntry& entry(std::size_t index) { return ring_of(memory, layout)[index]; }

  SlotLayout layout;
  std::byte* memory;
  MessageWriter messages_out;
  MessageReader messages_in;
  ReleaseWriter releases_out;
  ReleaseReader releases_in;
};

TEST_CASE("intranode/shm: a ring keeps order through many laps", "[intranode][fast]") {
  Slot slot(4);
  std::mt19937 random(1);
  std::uint64_t put = 0;
  std::uint64_t taken = 0;
  RingMessage message;
  while (taken < 5000) {
    while (random() % 4 != 0 && slot.messages_out.room() == Taken::kEntry) slot.put(put++);
    while (random() % 4 != 0 && taken < put) REQUIRE(slot.take() == taken++);
    if (taken == put) CHECK(slot.messages_in.peek(message) == Taken::kNothing);
    CHECK(slot.messages_in.has_more() == (taken < put));
    slot.messages_in.publish();
  }
}

TEST_CASE("intranode/shm: a full ring has room again only after the reader publishes", "[intranode][fast]") {
  Slot slot(2);
  slot.put(0);
  slot.put(1);
  CHECK(slot.messages_out.room() == Taken::kNothing);
  CHECK(slot.take() == 0);
  CHECK(slot.messages_out.room() == Taken::kNothing);
  CHECK_FALSE(slot.messages_in.publish());
  CHECK(slot.messages_out.room() == Taken::kEntry);
  slot.messages_out.set_waiting(true);
  CHECK(slot.take() == 1);
  CHECK(slot.messages_in.publish());        // the producer asked to be woken
  CHECK_FALSE(slot.messages_in.publish());  // nothing new
}

TEST_CASE("intranode/shm: releases come back through many laps", "[intranode][fast]") {
  Slot slot(4, 8);
  std::uint32_t token = 0;
  CHECK(slot.releases_in.take(token) == Taken::kNothing);
  for (std::uint32_t i = 0; i < 1000; i += 8) {
    for (std::uint32_t k = 0; k < 8; ++k) slot.releases_out.put((i + k) * 977);
    for (std::uint32_t k = 0; k < 8; ++k) {
      REQUIRE(slot.releases_in.has_more());
      REQUIRE(slot.releases_in.take(token) == Taken::kEntry);
      CHECK(token == (i + k) * 977);
    }
    CHECK_FALSE(slot.releases_in.has_more());
  }
}

TEST_CASE("intranode/shm: header and inline payload of every size survive", "[intranode][fast]") {
  Slot slot(2);
  std::vector<std::byte> header(transport::kHeaderBytesMax, std::byte{3});
  std::vector<std::byte> payload(kInlineBytesMax, std::byte{4});
  for (std::size_t h = 1; h <= header.size(); h += 7) {
    for (std::size_t p = 0; p <= payload.size(); p += 32) {
      REQUIRE(slot.messages_out.room() == Taken::kEntry);
      slot.messages_out.put_inline(std::span(header).first(h), std::span(payload).first(p));
      RingMessage message;
      REQUIRE(slot.messages_in.peek(message) == Taken::kEntry);
      CHECK(message.is_inline);
      REQUIRE(message.header_bytes == h);
      REQUIRE(message.payload_bytes == p);
      CHECK(std::memcmp(message.header.data(), header.data(), h) == 0);
      CHECK(std::memcmp(message.inline_payload, payload.data(), p) == 0);
      slot.messages_in.advance();
      slot.messages_in.publish();
    }
  }
}

TEST_CASE("intranode/shm: nonsense in a ring is seen and not believed", "[intranode][fast]") {
  const std::byte header[4] = {};
  RingMessage message;
  const auto corrupt = [&](auto spoil) {
    Slot slot(4);
    slot.messages_out.put_reference(header, 0, 1000, 5);
    REQUIRE(slot.messages_in.peek(message) == Taken::kEntry);
    spoil(slot.entry(0));
    const bool found = slot.messages_in.peek(message) == Taken::kCorrupt;
    return found && slot.messages_in.has_more();
  };
  CHECK(corrupt([](MessageEntry& entry) { entry.turn = 2; }));
  CHECK(corrupt([](MessageEntry& entry) { entry.turn = ~std::uint64_t{0}; }));
  CHECK(corrupt([](MessageEntry& entry) { entry.shape = 0; }));                         // no header
  CHECK(corrupt([](MessageEntry& entry) { entry.shape = std::uint64_t{193} << 16; }));  // long header
  CHECK(corrupt([](MessageEntry& entry) { entry.shape = std::uint64_t{0xffff} << 16; }));
  CHECK(corrupt([](MessageEntry& entry) { entry.shape = (std::uint64_t{4} << 16) | 2; }));  // unknown flag
  CHECK(corrupt([](MessageEntry& entry) { entry.payload_bytes = 0; }));                     // reference to nothing
  CHECK(corrupt([](MessageEntry& entry) { entry.shape = (std::uint64_t{4} << 16) | 1; }));  // 1000 bytes inline
  std::mt19937_64 random(7);
  for (int i = 0; i < 20000; ++i) {  // whatever it is, the header stays inside the message
    Slot slot(2);
    slot.entry(0).turn = random() % 4;
    slot.entry(0).shape = random() >> (random() % 64);
    slot.entry(0).payload_bytes = random() >> (random() % 64);
    slot.entry(0).offset_bytes = random();
    if (slot.messages_in.peek(message) != Taken::kEntry) continue;
    CHECK(message.header_bytes >= 1);
    CHECK(message.header_bytes <= transport::kHeaderBytesMax);
    if (message.is_inline) CHECK(message.payload_bytes <= kInlineBytesMax);
  }

  Slot slot(2);
  slot.put(1);
  slot.put(2);
  slot_of(slot.memory).consumed = 3;
  CHECK(slot.messages_out.room() == Taken::kCorrupt);
  std::uint32_t token = 0;
  releases_of(slot.memory, slot.layout)[0] = std::uint64_t{9} << 32;
  CHECK(slot.releases_in.take(token) == Taken::kCorrupt);
}

TEST_CASE("intranode/shm: layouts from peers are powers of two within limits", "[intranode][fast]") {
  CHECK(SlotLayout{256, 4096}.is_valid());
  CHECK(SlotLayout{2, 65536}.is_valid());
  for (const std::uint32_t bad : {0u, 1u, 3u, 100u, 131072u, ~0u}) {
    CHECK_FALSE(SlotLayout{bad, 256}.is_valid());
    CHECK_FALSE(SlotLayout{256, bad}.is_valid());
  }
}

TEST_CASE("intranode/shm: a ring passes messages between threads", "[intranode][fast]") {
  Slot slot(8);
  constexpr std::uint64_t kCount = 20000;
  std::thread producer([&] {
    for (std::uint64_t i = 0; i < kCount;) {
      if (slot.messages_out.room() == Taken::kEntry) {
        slot.put(i++);
      } else {
        std::this_thread::yield();
      }
    }
  });
  std::uint64_t wrong = 0;
  RingMessage message;
  for (std::uint64_t i = 0; i < kCount;) {
    if (slot.messages_in.peek(message) != Taken::kEntry) {
      slot.messages_in.publish();
      std::this_thread::yield();
      continue;
    }
    std::uint64_t number = 0;
    std::memcpy(&number, message.header.data(), 8);
    wrong += number != i++;
    slot.messages_in.advance();
    if (slot.messages_in.publish_is_due()) slot.messages_in.publish();
  }
  producer.join();
  CHECK(wrong == 0);
}

}  // namespace
}  // namespace hybridps::intranode::shm
