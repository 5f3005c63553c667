// Which of several streams to one peer goes first: flow/stream.h, StreamQueue.
#include <algorithm>

#include "tests/support/catch.h"
#include "tests/unit/flow/rig.h"

using namespace hybridps;
using namespace hybridps::test;

namespace {

Stream& waiting(Rig& rig, std::uint32_t chunks, std::int8_t priority, core::EngineId peer = kPeer) {
  Stream& s = rig.stream(chunks, peer);
  s.priority = priority;
  rig.offer_all(s);
  return s;
}

/// Indices of the streams whose chunks went, one a chunk.
Chunks went(const Rig& rig, std::size_t from = 0) {
  Chunks list;
  for (std::size_t i = from; i < rig.owner.sent.size(); ++i) list.push_back(rig.owner.sent[i].first);
  return list;
}

}  // namespace

TEST_CASE("flow/priority: what comes late and is more urgent passes the rest of what waits", "[flow][fast]") {
  Rig rig;
  Stream& bulk = waiting(rig, 6, 0);  // two of its chunks spend the allowance
  Stream& low = waiting(rig, 1, -1);
  Stream& later = waiting(rig, 1, 0);
  Stream& high = waiting(rig, 2, 5);
  Stream& middle = waiting(rig, 1, 2);
  rig.owner.sent.clear();
  for (int i = 0; i < 9; ++i) rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(went(rig) == Chunks{high.index, high.index, middle.index, bulk.index, bulk.index, bulk.index, bulk.index,
                            later.index, low.index});
}

TEST_CASE("flow/priority: every chunk says what it is", "[flow][fast]") {
  Rig rig;
  waiting(rig, 3, -7);
  rig.progress(200);  // the last one is announced
  const auto& sent = rig.to().sent;
  REQUIRE(sent.size() == 3);
  CHECK(sent[2].message.as<wire::Announce>() != nullptr);
  for (const auto& one : sent) CHECK(one.message.priority == -7);
}

TEST_CASE("flow/priority: of so many chunks one is of who has waited longest among those that are passed",
          "[flow][fast]") {
  // However much credit comes at a time.
  for (const std::uint64_t at_a_time : {1, 3, 40}) {
    Setup setup;
    setup.slots = setup.net_slots = 1000;
    setup.eager_bytes = 40 * kSlot;
    Rig rig(setup);
    constexpr std::size_t kTurn = flow::kPassesMax + 1;
    waiting(rig, 40, 0);
    Stream& low = waiting(rig, 50, -9);
    Stream& middle = waiting(rig, 50, 0);
    Stream& high = waiting(rig, 10 * kTurn, 9);
    rig.owner.sent.clear();
    while (rig.owner.sent.size() < 7 * kTurn + 8) rig.outbox->on_credit(kPeer, {at_a_time * kSlot});
    const Chunks order = went(rig);
    for (std::size_t i = 0; i < 7 * kTurn + 8; ++i) {
      INFO("chunk " << i << " with " << at_a_time << " at a time");
      REQUIRE(order[i] == (i % kTurn == kTurn - 1 ? low.index : high.index));
    }
    CHECK(middle.sent() == 0);
    rig.outbox->cancel(low);  // the next one among those that are passed
    while (!high.all_sent()) rig.outbox->on_credit(kPeer, {kSlot});
    CHECK(middle.sent() > 0);
    while (!middle.all_sent()) rig.outbox->on_credit(kPeer, {kSlot});
  }
}

TEST_CASE("flow/priority: of streams granted as a whole, too", "[flow][fast]") {
  for (const core::EngineId peer : {kPeer, kLocal}) {
    Setup setup;
    setup.slots = setup.net_slots = 100;
    setup.granted_bytes_max = kSlot;
    Rig rig(setup);
    rig.outbox->set_window(kPeer, kSlot);
    waiting(rig, 2, 0, peer);  // spends the allowance
    Stream& low = waiting(rig, 20, 0, peer);
    Stream& high = waiting(rig, 20, 1, peer);
    rig.owner.sent.clear();
    rig.outbox->granted(low, wire::kAllChunks);
    rig.outbox->granted(high, wire::kAllChunks);
    std::size_t completed = 2;
    const std::size_t first = rig.owner.sent.size();  // of the low one, before the other was granted
    for (int i = 0; i < 60 && !(low.all_sent() && high.all_sent()); ++i) {
      while (completed < rig.to(peer).sent.size()) rig.to(peer).complete(completed++);
      if (peer == kPeer) rig.outbox->on_credit(kPeer, {kSlot, wire::Permit::kWholeGrant});
      rig.progress();
    }
    REQUIRE(low.all_sent());
    REQUIRE(high.all_sent());
    const Chunks order = went(rig, first);
    // All of the urgent one's have gone when at most one of so many was the other's.
    const auto last = std::find(order.rbegin(), order.rend(), high.index);
    const auto upto = static_cast<std::size_t>(order.rend() - last);
    const auto passed = std::count(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(upto), low.index);
    INFO("peer " << core::to_string(peer) << ", first " << first << ", up to " << upto);
    CHECK(passed <= 2);
  }
}

TEST_CASE("flow/priority: slots that come free go to the more urgent, whatever its peer", "[flow][fast]") {
  Setup setup;
  setup.slots = setup.net_slots = 1;
  setup.eager_bytes = 100 * kSlot;
  Rig rig(setup);
  Stream& first = waiting(rig, 2, 0);
  Stream& high = waiting(rig, 1, 3, kOther);
  REQUIRE(first.sent() == 1);
  REQUIRE(high.sent() == 0);
  rig.to().complete(0);
  rig.progress();
  CHECK(high.all_sent());
  CHECK(first.sent() == 1);
  rig.to(kOther).complete(0);
  rig.progress();
  CHECK(first.all_sent());
}

TEST_CASE("flow/priority: streams of one priority keep their order, and leave from anywhere", "[flow][fast]") {
  Rig rig;
  waiting(rig, 2, 0);
  std::vector<Stream*> all;
  for (int i = 0; i < 30; ++i) all.push_back(&waiting(rig, 1, static_cast<std::int8_t>(i % 3)));
  for (int i = 0; i < 30; i += 5) rig.outbox->cancel(*all[static_cast<std::size_t>(i)]);
  Chunks expected;
  for (const int priority : {2, 1, 0})
    for (int i = 0; i < 30; ++i)
      if (i % 3 == priority && i % 5 != 0) expected.push_back(all[static_cast<std::size_t>(i)]->index);
  rig.owner.sent.clear();
  rig.outbox->on_credit(kPeer, {2 * kSlot});
  while (rig.owner.sent.size() < expected.size()) rig.outbox->on_credit(kPeer, {kSlot});
  Chunks order = went(rig);
  // A few may be others': here the order within a priority is what counts.
  const auto of = [&](std::uint32_t index) {
    return std::find_if(all.begin(), all.end(), [&](Stream* s) { return s->index == index; })[0]->priority;
  };
  std::stable_sort(order.begin(), order.end(), [&](auto a, auto b) { return of(a) > of(b); });
  CHECK(order == expected);
}
