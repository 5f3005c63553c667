// Thousands of streams that wait: whatever happens looks at those that it lets go, not at the others.
#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/catch.h"
#include "tests/unit/flow/rig.h"

namespace {

using namespace hybridps;
using namespace hybridps::test;

constexpr std::uint32_t kMany = 3000;
// Looks at streams for each that goes: its offer, its own turn, and the one in front that may not go yet.
constexpr std::uint64_t kLooksEach = 6;

std::vector<Stream*> make_streams(Rig& rig, std::uint32_t count, core::EngineId peer, bool urgent) {
  std::vector<Stream*> streams;
  for (std::uint32_t i = 0; i < count; ++i) {
    streams.push_back(&rig.stream(1, peer, urgent));
    streams.back()->index = i;
    rig.outbox->offer(*streams.back(), 0);
  }
  return streams;
}

bool in_order(const Rig& rig) { return std::is_sorted(rig.owner.sent.begin(), rig.owner.sent.end()); }

/// Every message that has left: its slot is given back.
void release(Rig& rig, core::EngineId peer, std::size_t& released) {
  for (auto& sent = rig.to(peer).sent; released < sent.size(); ++released) {
    sent[released].buffer = {};
    if (sent[released].done) std::exchange(sent[released].done, {})(core::Status::ok());
  }
}

}  // namespace

TEST_CASE("flow/many: a credit looks at those that it lets go, however many wait", "[flow][fast]") {
  for (const core::EngineId peer : {kPeer, kLocal}) {
    for (const bool urgent : {false, true}) {
      CAPTURE(peer.value, urgent);
      Rig rig;
      make_streams(rig, kMany, peer, urgent);
      REQUIRE(rig.owner.sent.size() == 2);
      std::size_t released = 0;
      for (std::uint32_t i = 2; i < kMany; ++i) {
        release(rig, peer, released);
        rig.progress();
        rig.outbox->on_credit(peer, {kSlot});
      }
      CHECK(rig.owner.sent.size() == kMany);
      CHECK(in_order(rig));
      CHECK(rig.outbox->looks() <= kLooksEach * kMany);
    }
  }
}

TEST_CASE("flow/many: streams that are granted as a whole go one by one past those that are not", "[flow][fast]") {
  for (const core::EngineId peer : {kPeer, kLocal}) {
    CAPTURE(peer.value);
    Setup setup;
    setup.granted_bytes_max = 2 * kSlot;
    Rig rig(setup);
    const auto streams = make_streams(rig, kMany, peer, /*urgent=*/false);
    for (std::uint32_t i = 3; i < kMany; i += 2) rig.outbox->granted(*streams[i], wire::kAllChunks);
    std::size_t released = 0;
    for (std::uint32_t round = 0; round < kMany; ++round) {
      release(rig, peer, released);
      rig.outbox->on_credit(peer, {kSlot, wire::Permit::kWholeGrant});
      rig.progress();
    }
    CHECK(rig.owner.sent.size() == 2 + (kMany - 2) / 2);
    CHECK(in_order(rig));
    CHECK(rig.outbox->looks() <= kLooksEach * kMany);
  }
}

TEST_CASE("flow/many: a stream may leave from anywhere in the row", "[flow][fast]") {
  Rig rig;
  const auto streams = make_streams(rig, kMany, kPeer, /*urgent=*/true);
  for (std::uint32_t i = 2; i < kMany; ++i)
    if (i % 3 != 0) rig.outbox->cancel(*streams[i]);
  for (std::uint32_t i = 0; i < kMany; ++i) rig.outbox->on_credit(kPeer, {kSlot}), rig.progress();
  std::size_t released = 0;
  while (released < rig.to().sent.size()) {
    release(rig, kPeer, released);
    rig.progress();
    for (int i = 0; i < 2; ++i) rig.outbox->on_credit(kPeer, {kSlot});
  }
  CHECK(rig.owner.sent.size() == 2 + (kMany - 1) / 3);
  CHECK(in_order(rig));
  CHECK(rig.outbox->looks() <= 2 * kLooksEach * kMany);
}

TEST_CASE("flow/many: each announces itself once, however often it is looked for", "[flow][fast]") {
  Rig rig;
  for (std::uint32_t i = 0; i < kMany; ++i) {
    rig.outbox->offer(rig.stream(1), 0);
    rig.progress(101);
  }
  CHECK(rig.to().of<wire::Announce>().size() == kMany - 2);
  CHECK(rig.outbox->looks() <= kLooksEach * kMany);
}

TEST_CASE("flow/many: permits that many streams give back are one reason to look, not many", "[flow][fast]") {
  Setup setup;
  setup.eager_bytes = kMany * kSlot;
  Rig rig(setup);
  std::vector<Stream*> wanting;
  for (std::uint32_t i = 0; i < kMany; ++i) {
    wanting.push_back(&rig.stream(1));
    rig.outbox->want(*wanting.back(), 0);
  }
  REQUIRE(rig.owner.permitted.size() == kMany);
  make_streams(rig, 2 * kMany, kPeer, /*urgent=*/false);
  REQUIRE(rig.owner.sent.empty());
  for (Stream* stream : wanting) rig.outbox->cancel(*stream);
  std::size_t released = 0;
  do {
    rig.progress();
    release(rig, kPeer, released);
    rig.progress();
  } while (released < rig.to().sent.size());
  CHECK(rig.owner.sent.size() == kMany);
  CHECK(in_order(rig));
  CHECK(rig.outbox->looks() <= 2 * kLooksEach * kMany);
}

TEST_CASE("flow/many: tiny operations do not announce themselves while credit lets them go", "[flow][fast]") {
  Rig rig;
  make_streams(rig, 100, kPeer, /*urgent=*/true);
  const core::TimePoint before = core::Clock::now();
  std::this_thread::sleep_for(std::chrono::milliseconds(2));
  rig.outbox->on_credit(kPeer, {kSlot});  // one goes
  // The delay, 100 s here, counts from then on, not from when the first one waited.
  rig.outbox->progress(before + std::chrono::seconds(100) + std::chrono::milliseconds(1));
  CHECK(rig.to().of<wire::Announce>().empty());
  rig.progress(101);
  CHECK(rig.to().of<wire::Announce>().size() == 97);
}

TEST_CASE("flow/outbox: who waits for a slot holds up only those that wait for the same", "[flow][fast]") {
  Setup setup;
  setup.eager_bytes = 1 << 20;
  setup.slots = 4;
  setup.net_slots = 2;
  setup.large_slots = 1;
  Rig rig(setup);
  const auto large = [&](core::EngineId peer) -> Stream& {
    Stream& s = rig.stream(1, peer);
    s.bytes = s.chunk_bytes = kLargeSlot;
    return s;
  };
  rig.outbox->offer(large(kPeer), 0);  // the only large slot
  Stream& starved_large = large(kPeer);
  rig.outbox->offer(starved_large, 0);
  Stream& first = rig.stream(3);
  rig.offer_all(first);  // two small ones, and then it starves as well
  Stream& local = rig.stream(4, kLocal);
  rig.offer_all(local);  // the last two, and then it starves
  Stream& last = rig.stream(1);
  rig.outbox->offer(last, 0);
  REQUIRE(first.sent() == 2);
  REQUIRE(local.sent() == 2);

  // A small slot between nodes: the large one in front needs another, and so does the local one.
  std::vector<std::size_t> small;
  auto& sent = rig.to(kPeer).sent;
  for (std::size_t i = 0; i < sent.size(); ++i)
    if (sent[i].message.payload_bytes == kSlot) small.push_back(i);
  rig.to(kPeer).complete(small[0]);
  rig.progress();
  CHECK(first.all_sent());
  CHECK(local.sent() == 2);
  CHECK(last.sent() == 0);
  // One that comes back from the local peer may go to it again: between nodes no more may be used.
  rig.to(kLocal).complete(0);
  rig.progress();
  CHECK(local.sent() == 3);
  CHECK(last.sent() == 0);
  CHECK(starved_large.sent() == 0);
  rig.to(kPeer).complete(small[1]);
  rig.progress();
  CHECK(last.all_sent());
  CHECK(starved_large.sent() == 0);
  rig.to(kPeer).complete(0);
  rig.progress();
  CHECK(starved_large.all_sent());
}

TEST_CASE("flow/outbox: chunks granted in any order each go once", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(400);
  rig.offer_all(s);
  std::size_t released = 0;
  const auto settle = [&] {
    for (int i = 0; i < 50; ++i) {
      release(rig, kPeer, released);
      rig.progress();
    }
  };
  for (std::uint32_t chunk = 399; chunk >= 200; chunk -= 2) rig.outbox->granted(s, chunk), settle();
  for (int i = 0; i < 50; ++i) rig.outbox->on_credit(kPeer, {kSlot}), settle();
  for (std::uint32_t chunk = 0; chunk < 400; ++chunk) rig.outbox->granted(s, chunk), settle();
  CHECK(s.all_sent());
  Chunks chunks = rig.to().chunks();
  std::sort(chunks.begin(), chunks.end());
  REQUIRE(chunks.size() == 400);
  for (std::uint32_t chunk = 0; chunk < 400; ++chunk) CHECK(chunks[chunk] == chunk);
}
