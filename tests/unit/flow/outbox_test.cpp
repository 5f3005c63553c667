#include "hybridps/flow/outbox.h"

#include <array>
#include <chrono>
#include <cstring>
#include <functional>
#include <random>
#include <thread>

#include "tests/support/catch.h"
#include "tests/unit/flow/rig.h"

namespace {

using namespace hybridps;
using namespace hybridps::test;

}  // namespace

TEST_CASE("flow/outbox: chunks go until the allowance is spent and again with every credit", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(7);
  rig.offer_all(s);
  CHECK(rig.to().chunks() == Chunks{0, 1});
  CHECK(rig.owner.asked == 2);  // what waits holds no memory
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(rig.to().chunks() == Chunks{0, 1, 2});
  rig.outbox->on_credit(kPeer, {100 * kSlot});  // only what is outstanding counts
  CHECK(rig.to().chunks() == Chunks{0, 1, 2, 3, 4});
  rig.outbox->on_credit(kPeer, {2 * kSlot});
  CHECK(s.all_sent());
  for (const auto account : {wire::Permit::kAllowance, wire::Permit::kWholeGrant})
    for (int i = 0; i < 3; ++i) rig.outbox->on_credit(kPeer, {~std::uint64_t{0} - 511, account});
  for (const test::Sent& one : rig.to().sent) {
    const auto* data = one.message.as<wire::Data>();
    REQUIRE(data != nullptr);
    CHECK(data->permit == wire::Permit::kAllowance);
    CHECK(data->cost == kSlot);
    CHECK(one.message.from.source == kSelf);
    CHECK(one.message.payload_bytes == kSlot);
    CHECK(data->chunk.sequence == 17);
    CHECK(one.payload == std::vector<std::byte>(kSlot, static_cast<std::byte>(s.index + data->chunk.number)));
  }
}

TEST_CASE("flow/outbox: a short chunk costs the smallest slot at least", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(3);
  s.bytes = 2 * kSlot + 10;
  rig.outbox->offer(s, 2);
  rig.outbox->offer(s, 0);
  rig.outbox->offer(s, 1);
  CHECK(rig.to().chunks() == Chunks{2, 0});
  CHECK(rig.to().sent[0].message.payload_bytes == 10);
  CHECK(rig.to().of<wire::Data>()[0]->cost == kSlot);
}

TEST_CASE("flow/outbox: one message may be under way however small the allowance", "[flow][fast]") {
  Setup setup;
  setup.eager_bytes = 10;
  Rig rig(setup);
  Stream& s = rig.stream(3);
  rig.offer_all(s);
  CHECK(rig.to().chunks() == Chunks{0});
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(rig.to().chunks() == Chunks{0, 1});
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(rig.to().chunks() == Chunks{0, 1, 2});
}

TEST_CASE("flow/outbox: a sender without an allowance says so, in data and where it asks", "[flow][fast]") {
  Setup setup;
  setup.eager_bytes = 0;
  Rig rig(setup);
  rig.offer_all(rig.stream(3));
  REQUIRE(rig.to().chunks() == Chunks{0});
  CHECK(rig.to().last().window == 1);  // 0 is "as before"
  rig.progress(101);
  REQUIRE(rig.to().of<wire::Announce>().size() == 1);
  CHECK(rig.to().of<wire::Announce>()[0]->window == 1);
}

TEST_CASE("flow/outbox: peers have allowances of their own", "[flow][fast]") {
  Rig rig;
  rig.offer_all(rig.stream(5, kPeer));
  rig.offer_all(rig.stream(5, kOther));
  CHECK(rig.to(kPeer).chunks() == Chunks{0, 1});
  CHECK(rig.to(kOther).chunks() == Chunks{0, 1});
  rig.outbox->on_credit(kOther, {kSlot});
  CHECK(rig.to(kPeer).chunks() == Chunks{0, 1});
  CHECK(rig.to(kOther).chunks() == Chunks{0, 1, 2});
}

TEST_CASE("flow/outbox: empty chunks cost nothing and never wait", "[flow][fast]") {
  Rig rig;
  rig.offer_all(rig.stream(5));
  Stream& s = rig.stream(1);
  s.bytes = 0;
  rig.outbox->offer(s, 0);
  CHECK(s.all_sent());
  CHECK(rig.to().sent.back().message.payload_bytes == 0);
}

TEST_CASE("flow/outbox: a waiting stream announces itself once and after the delay", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(6);
  CHECK(rig.outbox->next_due() == core::TimePoint::max());
  rig.offer_all(s);
  CHECK(rig.outbox->next_due() < core::TimePoint::max());
  rig.progress(50);
  CHECK(rig.to().of<wire::Announce>().empty());
  rig.progress(101);
  REQUIRE(rig.to().of<wire::Announce>().size() == 1);
  const wire::ChunkId& id = rig.to().of<wire::Announce>()[0]->chunk;
  CHECK(id.number == 2);
  CHECK(id.span == s.index);
  CHECK(rig.to().sent.back().message.payload_bytes == 0);
  CHECK(rig.to().sent.back().message.from.source == kSelf);
  CHECK(rig.outbox->next_due() == core::TimePoint::max());
  rig.progress(1000);
  rig.outbox->on_credit(kPeer, {kSlot});  // it moves on and waits again
  rig.progress(2000);
  CHECK(rig.to().of<wire::Announce>().size() == 1);
  // Another one that waits says so too.
  rig.offer_all(rig.stream(1));
  rig.progress(3000);
  CHECK(rig.to().of<wire::Announce>().size() == 2);
}

TEST_CASE("flow/outbox: a stream that gets its credits in time never announces itself", "[flow][fast]") {
  Rig rig;
  rig.offer_all(rig.stream(4));
  rig.outbox->on_credit(kPeer, {2 * kSlot});
  rig.progress(1000);
  CHECK(rig.to().of<wire::Announce>().empty());
}

TEST_CASE("flow/outbox: a granted chunk goes at once and costs no allowance", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(6);
  rig.offer_all(s);
  rig.outbox->granted(s, 4);
  CHECK(rig.to().chunks() == Chunks{0, 1, 4});
  CHECK(rig.to().last().permit == wire::Permit::kGrant);
  CHECK(rig.to().last().cost == 0);
  rig.outbox->granted(s, 4);    // twice
  rig.outbox->granted(s, 0);    // sent long ago
  rig.outbox->granted(s, 999);  // not there
  CHECK(rig.to().chunks() == Chunks{0, 1, 4});
  rig.outbox->on_credit(kPeer, {100 * kSlot});
  CHECK(rig.to().chunks() == Chunks{0, 1, 4, 2, 3});
}

TEST_CASE("flow/outbox: what a stream is of is on every chunk, granted or not", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(3);
  s.id = {.point_to_point = true, .sequence = 3, .tag = 5, .follows = 2};
  s.from = {kOther, {1, 2}, 4};
  s.premul = 0.5;
  rig.offer_all(s);
  rig.outbox->granted(s, 2);
  REQUIRE(rig.to().sent.size() == 3);
  for (std::uint32_t i = 0; i < 3; ++i) {
    const wire::Message& message = rig.to().sent[i].message;
    wire::ChunkId id = s.id;
    id.number = i;
    CHECK(*message.chunk() == id);
    CHECK(message.as<wire::Data>()->premul == 0.5);
    CHECK(message.as<wire::Data>()->permit == (i < 2 ? wire::Permit::kAllowance : wire::Permit::kGrant));
    CHECK(message.from == wire::From{kSelf, {1, 2}, 4});
  }
}

TEST_CASE("flow/outbox: to a local peer a grant of all chunks lets them go within the bytes in flight",
          "[flow][fast]") {
  Setup setup;
  setup.granted_bytes_max = 3 * kSlot;
  Rig rig(setup);
  Stream& s = rig.stream(10, kLocal);
  rig.offer_all(s);
  rig.outbox->granted(s, wire::kAllChunks);
  CHECK(rig.to(kLocal).chunks() == Chunks{0, 1, 2, 3, 4});  // two by the allowance
  rig.to(kLocal).complete(0);                               // an eager one: no room for granted ones
  rig.progress();
  CHECK(rig.to(kLocal).chunks().size() == 5);
  rig.to(kLocal).complete(2);
  rig.progress();
  CHECK(rig.to(kLocal).chunks().size() == 6);
  for (std::size_t i = 0; i < rig.to(kLocal).sent.size(); ++i) {
    rig.to(kLocal).complete(i);
    rig.progress();
  }
  CHECK(s.all_sent());
}

// Credit under "all chunks" grants comes in batches of 8 KiB; below that no window holds the sender up.
constexpr std::size_t kBatchSlots = 8 * 1024 / kSlot;

TEST_CASE("flow/outbox: across the network a grant of all chunks lets them go within the window", "[flow][fast]") {
  constexpr std::size_t kWindow = 3 * kBatchSlots;
  Setup setup;
  setup.slots = setup.net_slots = 20 * kBatchSlots;
  setup.eager_bytes = 4 * kWindow * kSlot;
  Rig rig(setup);
  rig.outbox->set_window(kPeer, kWindow * kSlot);
  Stream& s = rig.stream(4 * kWindow);
  rig.offer_all(s);
  CHECK(rig.to().chunks().size() == kWindow);
  rig.outbox->granted(s, wire::kAllChunks);
  REQUIRE(rig.to().chunks().size() == 2 * kWindow);
  for (std::size_t i = 0; i < 2 * kWindow; ++i) {
    const wire::Data& data = *rig.to().of<wire::Data>()[i];
    CHECK(data.permit == (i < kWindow ? wire::Permit::kAllowance : wire::Permit::kWholeGrant));
    CHECK(data.cost == kSlot);
    CHECK(data.window == kWindow * kSlot);
  }
  for (std::size_t i = 0; i < 2 * kWindow; ++i) rig.to().complete(i);  // on the wire, but not used up
  rig.progress();
  CHECK(rig.to().chunks().size() == 2 * kWindow);
  rig.outbox->on_credit(kPeer, {2 * kSlot, wire::Permit::kWholeGrant});
  CHECK(rig.to().chunks().size() == 2 * kWindow + 2);
  rig.outbox->on_credit(kPeer, {kSlot});  // of the allowance
  CHECK(rig.to().chunks().size() == 2 * kWindow + 3);
  rig.outbox->on_credit(
      kPeer, {100 * kWindow * kSlot, wire::Permit::kWholeGrant});  // more than is out: no more than the window
  CHECK(rig.to().chunks().size() == 3 * kWindow + 3);
}

TEST_CASE("flow/outbox: what a peer may hold back of its credit stops nobody, however small the window",
          "[flow][fast]") {
  for (const std::int64_t window : {std::int64_t{0}, std::int64_t{1}, std::int64_t{kSlot}}) {
    Setup setup;
    setup.slots = setup.net_slots = 20 * kBatchSlots;
    setup.eager_bytes = 8 * kBatchSlots * kSlot;
    Rig rig(setup);
    Stream& first = rig.stream(16 * kBatchSlots);
    rig.offer_all(first);
    rig.outbox->granted(first, wire::kAllChunks);
    const std::size_t sent = rig.to().chunks().size();
    CHECK(sent == 16 * kBatchSlots);
    rig.outbox->set_window(kPeer, window);  // as when a larger group is opened
    Stream& second = rig.stream(4);
    rig.offer_all(second);
    rig.outbox->granted(second, wire::kAllChunks);
    CHECK(rig.to().chunks().size() == sent);
    rig.outbox->on_credit(
        kPeer, {7 * kBatchSlots * kSlot, wire::Permit::kWholeGrant});  // the peer keeps a batch, all but a byte
    CHECK(rig.to().chunks().size() == sent);
    rig.outbox->on_credit(kPeer, {1, wire::Permit::kWholeGrant});
    CHECK(rig.to().chunks().size() == sent + 1);
  }
}

TEST_CASE("flow/outbox: what was granted as a whole gives credit of its own back", "[flow][fast]") {
  Rig rig;
  rig.outbox->note_window(kPeer, 8 * kSlot);  // the allowance is returned by two slots
  for (std::size_t i = 0; i < kBatchSlots + 1; ++i)
    flow::Delivery granted({}, rig.outbox.get(), kPeer, kSlot, wire::Permit::kWholeGrant);
  for (int i = 0; i < 3; ++i) flow::Delivery eager({}, rig.outbox.get(), kPeer, kSlot);
  const auto credits = rig.to().of<wire::Credit>();
  REQUIRE(credits.size() == 2);
  CHECK(*credits[0] == wire::Credit{kBatchSlots * kSlot, wire::Permit::kWholeGrant});
  CHECK(*credits[1] == wire::Credit{2 * kSlot, wire::Permit::kAllowance});
}

TEST_CASE("flow/outbox: a stream granted as a whole is not held up by one without a permit", "[flow][fast]") {
  // The first may wait until the second one's operation is over: its credits come when its peer has started it.
  Setup setup;
  for (const bool urgent : {false, true}) {
    Rig rig(setup);
    Stream& first = rig.stream(5, kPeer, urgent);
    rig.offer_all(first);
    Stream& second = rig.stream(9);
    rig.offer_all(second);
    rig.outbox->granted(second, wire::kAllChunks);
    for (std::size_t i = 2; i < 11; ++i) {
      INFO("urgent " << urgent << " message " << i);
      REQUIRE(rig.to().sent.size() > i);
      rig.to().complete(i);
      rig.outbox->on_credit(kPeer, {kSlot, wire::Permit::kWholeGrant});
    }
    CHECK(second.all_sent());
    CHECK_FALSE(first.all_sent());
    rig.outbox->on_credit(kPeer, {2 * kSlot});
    CHECK(rig.to().chunks().size() == 13);
  }
}

TEST_CASE("flow/outbox: want takes a permit from the allowance and the offer then goes for free", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(4);
  rig.outbox->want(s, 2);
  CHECK(rig.owner.permitted == Chunks{2});
  CHECK(s.is_permitted(2));
  CHECK_FALSE(s.is_permitted(1));
  CHECK(rig.probe() == 1);
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(rig.probe() == 1);
  rig.outbox->offer(s, 2);
  CHECK(s.is_sent(2));
  CHECK(rig.to().last().cost == kSlot);
}

TEST_CASE("flow/outbox: want without allowance is answered by a credit or a grant", "[flow][fast]") {
  for (const int answer : {0, 1, 2}) {
    Rig rig;
    rig.offer_all(rig.stream(2));  // spends it
    Stream& s = rig.stream(4);
    rig.outbox->want(s, 1);
    CHECK(rig.owner.permitted.empty());
    rig.progress(1000);
    REQUIRE(rig.to().of<wire::Announce>().size() == 1);
    CHECK(rig.to().of<wire::Announce>()[0]->chunk.span == s.index);
    switch (answer) {
      case 0: rig.outbox->on_credit(kPeer, {kSlot}); break;
      case 1: rig.outbox->granted(s, 1); break;
      default: rig.outbox->granted(s, wire::kAllChunks);
    }
    INFO("answer " << answer);
    CHECK(rig.owner.permitted == Chunks{1});
    rig.outbox->offer(s, 1);
    CHECK(s.is_sent(1));
    constexpr wire::Permit kPermits[] = {wire::Permit::kAllowance, wire::Permit::kGrant, wire::Permit::kWholeGrant};
    CHECK(rig.to().last().permit == kPermits[answer]);
  }
}

TEST_CASE("flow/outbox: a grant for a chunk that is not there asks its owner to fetch it", "[flow][fast]") {
  Rig rig;
  rig.offer_all(rig.stream(2));
  Stream& s = rig.stream(3);
  rig.outbox->granted(s, 1);
  CHECK(rig.owner.permitted == Chunks{1});
  rig.outbox->offer(s, 1);
  CHECK(s.is_sent(1));
}

TEST_CASE("flow/outbox: an answer to want may offer the chunk at once", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(2);
  rig.owner.when_permitted = [&](Stream& stream, std::uint32_t chunk) { rig.outbox->offer(stream, chunk); };
  rig.outbox->want(s, 0);
  rig.outbox->want(s, 1);
  CHECK(s.all_sent());
}

TEST_CASE("flow/outbox: without a free slot a stream waits with its permit and goes on after a release",
          "[flow][fast]") {
  Setup setup;
  setup.slots = 1;
  setup.eager_bytes = 8 * kSlot;
  Rig rig(setup);
  Stream& a = rig.stream(2);
  Stream& b = rig.stream(2, kOther);
  rig.offer_all(a);
  rig.offer_all(b);
  CHECK(rig.owner.sent == std::vector<std::pair<std::uint32_t, std::uint32_t>>{{100, 0}});
  rig.progress(1000);
  CHECK(rig.to().of<wire::Announce>().empty());  // it has a permit
  rig.to().complete(0);
  rig.progress();
  rig.to().complete(1);
  rig.progress();
  rig.to(kOther).complete(0);
  rig.progress();
  CHECK(rig.owner.sent == std::vector<std::pair<std::uint32_t, std::uint32_t>>{{100, 0}, {100, 1}, {200, 0}, {200, 1}});
  CHECK(a.all_sent());
  CHECK(b.all_sent());
}

TEST_CASE("flow/outbox: messages between nodes leave the slots set aside for local peers", "[flow][fast]") {
  Setup setup;
  setup.slots = 4;
  setup.net_slots = 1;
  setup.eager_bytes = 8 * kSlot;
  Rig rig(setup);
  rig.offer_all(rig.stream(3));
  CHECK(rig.to().chunks() == Chunks{0});
  rig.offer_all(rig.stream(3, kLocal));
  CHECK(rig.to(kLocal).chunks() == Chunks{0, 1, 2});
  rig.to().complete(0);
  rig.progress();
  CHECK(rig.to().chunks() == Chunks{0, 1});
  rig.to().complete(1);
  rig.progress();
  CHECK(rig.to().chunks() == Chunks{0, 1, 2});
}

TEST_CASE("flow/outbox: urgent streams overtake bulk ones and each class keeps its order", "[flow][fast]") {
  Rig rig;
  rig.offer_all(rig.stream(2));  // spends the allowance
  rig.owner.sent.clear();
  Stream& bulk = rig.stream(2);
  Stream& later = rig.stream(1);
  Stream& urgent = rig.stream(1, kPeer, true);
  Stream& urgent_later = rig.stream(1, kPeer, true);
  rig.offer_all(bulk);
  rig.offer_all(later);
  rig.offer_all(urgent);
  rig.offer_all(urgent_later);
  CHECK(rig.owner.sent.empty());
  for (int i = 0; i < 5; ++i) rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(rig.owner.sent ==
        std::vector<std::pair<std::uint32_t, std::uint32_t>>{
            {urgent.index, 0}, {urgent_later.index, 0}, {bulk.index, 0}, {bulk.index, 1}, {later.index, 0}});
}

TEST_CASE("flow/outbox: a new bulk stream takes its place behind those that wait", "[flow][fast]") {
  Rig rig;
  Stream& first = rig.stream(3);
  rig.offer_all(first);
  Stream& second = rig.stream(1);
  rig.offer_all(second);
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(first.all_sent());
  CHECK_FALSE(second.all_sent());
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(second.all_sent());
}

TEST_CASE("flow/outbox: cancel in every state gives permits back and nothing is called afterwards", "[flow][fast]") {
  for (const char* state :
       {"fresh", "waiting", "wanted", "permitted", "starved", "granted", "granted all", "announced"}) {
    INFO(state);
    Setup setup;
    setup.slots = 2;
    Rig rig(setup);
    const std::string is(state);
    const bool spent = is != "permitted" && is != "starved";
    if (spent) rig.offer_all(rig.stream(2, kPeer));
    std::vector<transport::Buffer> hogs;
    Stream& s = rig.stream(4);
    if (is == "waiting" || is == "announced") rig.offer_all(s);
    if (is == "announced") rig.progress(1000);
    if (is == "wanted" || is == "permitted") {
      rig.outbox->want(s, 0);
      rig.outbox->want(s, 1);
    }
    if (is == "starved") {
      hogs.push_back((*rig.pool).allocate(kSlot));
      hogs.push_back((*rig.pool).allocate(kSlot));
      rig.offer_all(s);
    }
    if (is == "granted") rig.outbox->granted(s, 3);
    if (is == "granted all") {
      rig.offer_all(s);  // both slots are in use: it starves with the grant
      rig.outbox->granted(s, wire::kAllChunks);
    }
    const std::size_t sent = rig.owner.sent.size();
    const std::size_t permitted = rig.owner.permitted.size();
    rig.outbox->cancel(s);
    rig.outbox->cancel(s);  // idempotent
    rig.destroy(s);
    hogs.clear();
    // Everything that could wake a stream.
    rig.to().complete_all();
    rig.progress(2000);
    rig.outbox->on_credit(kPeer, {100 * kSlot});
    rig.progress(3000);
    CHECK(rig.owner.sent.size() == sent);
    CHECK(rig.owner.permitted.size() == permitted);
    // The whole allowance is there again.
    rig.to().sent.clear();
    CHECK(rig.probe() == 2);
  }
}

TEST_CASE("flow/outbox: cancelling a stream that holds permits lets the next one go", "[flow][fast]") {
  Rig rig;
  Stream& hoarder = rig.stream(2);
  rig.outbox->want(hoarder, 0);
  rig.outbox->want(hoarder, 1);
  Stream& next = rig.stream(2);
  rig.offer_all(next);
  CHECK_FALSE(next.all_sent());
  rig.outbox->cancel(hoarder);
  rig.progress();
  CHECK(next.all_sent());
}

TEST_CASE("flow/outbox: a stream cancelled from inside its own callbacks is forgotten", "[flow][fast]") {
  for (const bool when_sent : {true, false}) {
    Rig rig;
    rig.offer_all(rig.stream(2));
    Stream& s = rig.stream(3);
    const auto cancel = [&](Stream& stream, std::uint32_t) {
      if (&stream == &s) rig.outbox->cancel(stream);
    };
    if (when_sent) {
      rig.owner.when_sent = cancel;
      rig.offer_all(s);
      rig.outbox->granted(s, 2);  // goes past chunks 0 and 1, which wait
      CHECK(s.is_sent(2));
    } else {
      rig.owner.when_permitted = cancel;
      rig.outbox->want(s, 0);
      rig.outbox->want(s, 1);
      rig.outbox->on_credit(kPeer, {2 * kSlot});
      CHECK(rig.owner.permitted == Chunks{0});
    }
    rig.destroy(s);
    const std::size_t sent = rig.to().sent.size();
    rig.progress(1000);
    rig.outbox->on_credit(kPeer, {2 * kSlot});
    rig.progress(2000);
    CHECK(rig.to().sent.size() == sent);
    CHECK(rig.probe() == 2);
  }
}

TEST_CASE("flow/outbox: chunks in flight may outlive their stream", "[flow][fast]") {
  Rig rig;
  Stream& s = rig.stream(4);
  rig.offer_all(s);
  rig.outbox->granted(s, wire::kAllChunks);
  CHECK(s.all_sent());
  rig.destroy(s);
  rig.to().complete_all();
  rig.progress(1000);
  rig.to().sent.clear();
  CHECK(rig.pool->slots_in_use() == 0);
}

TEST_CASE("flow/delivery: the allowance goes back in batches when data is consumed", "[flow][fast]") {
  Setup setup;
  setup.credit_batch_bytes = 3 * kSlot;
  Rig rig(setup);
  test::Lender lender;
  std::vector<flow::Delivery> held;
  for (int i = 0; i < 5; ++i) held.push_back(lender.lend("x", 1, rig.outbox.get(), kPeer, kSlot));
  held.push_back(lender.lend("x", 1, rig.outbox.get(), kPeer, 0));  // granted
  CHECK(lender.lent() == 6);
  flow::Delivery moved = std::move(held[0]);
  held[0].reset();  // holds nothing any more
  moved.reset();
  held[1].reset();
  held[1].reset();
  held[5].reset();
  CHECK(rig.to().of<wire::Credit>().empty());
  held[2] = flow::Delivery();
  REQUIRE(rig.to().of<wire::Credit>().size() == 1);
  CHECK(rig.to().of<wire::Credit>()[0]->bytes == 3 * kSlot);
  CHECK(rig.to().sent.back().message.from.source == kSelf);
  held.clear();
  CHECK(lender.lent() == 0);
  CHECK(rig.to().of<wire::Credit>().size() == 1);
}

TEST_CASE("flow/outbox: a peer without a route is reported once", "[flow][fast]") {
  Rig rig;
  rig.router.no_route = core::Status(core::Code::kPeerDead, "no such host");
  Stream& s = rig.stream(3);
  rig.offer_all(s);
  rig.outbox->send(kPeer, {});
  CHECK(rig.router.unreachable.empty());  // from progress() only
  rig.progress();
  rig.outbox->granted(s, wire::kAllChunks);
  rig.outbox->on_credit(kPeer, {kSlot});
  rig.progress(1000);
  REQUIRE(rig.router.unreachable.size() == 1);
  CHECK(rig.router.unreachable[0].first == kPeer);
  CHECK(rig.router.unreachable[0].second.message() == "no such host");
}

TEST_CASE("flow/outbox: a peer that refuses keeps no slots from the others", "[flow][fast]") {
  for (const bool granted : {false, true}) {
    Setup setup;
    setup.net_slots = 1;
    setup.slots = 4;
    Rig rig(setup);
    Stream& s = rig.stream(4);
    if (granted) {
      rig.offer_all(s);
      rig.to().complete_all();
    }
    rig.to().refusal = core::Status(core::Code::kPeerDead, "gone");
    if (granted)
      rig.outbox->granted(s, wire::kAllChunks);
    else
      rig.offer_all(s);
    rig.progress();
    CHECK(rig.router.unreachable.size() == 1);
    CHECK_FALSE(s.all_sent());
    Stream& other = rig.stream(1, kOther);
    rig.offer_all(other);
    CHECK(other.all_sent());
  }
}

TEST_CASE("flow/outbox: a forgotten peer starts afresh", "[flow][fast]") {
  Rig rig;
  rig.to().refusal = core::Status(core::Code::kPeerDead, "gone");
  Stream& s = rig.stream(1);
  rig.offer_all(s);
  rig.outbox->cancel(s);
  rig.progress();
  rig.outbox->forget(kPeer);
  rig.to().refusal = {};
  CHECK(rig.probe() == 2);
}

TEST_CASE("flow/outbox: a text without a free slot goes as a bare header", "[flow][fast]") {
  Setup setup;
  setup.slots = 1;
  Rig rig(setup);
  const wire::Message verdict{{}, 0, wire::Verdict::on_group(core::Code::kAborted)};
  rig.outbox->send_text(kPeer, verdict, "why");
  rig.outbox->send_text(kPeer, verdict, "no slot");
  rig.outbox->send_text(kPeer, verdict, "");
  REQUIRE(rig.to().sent.size() == 3);
  CHECK(rig.to().sent[0].payload.size() == 3);
  CHECK(rig.to().sent[0].message.payload_bytes == 3);
  CHECK(rig.to().sent[1].message.payload_bytes == 0);
  CHECK(rig.to().sent[2].message.payload_bytes == 0);
}

TEST_CASE("flow/outbox: a stall can be described", "[flow][fast]") {
  Rig rig;
  rig.offer_all(rig.stream(5));
  const std::string text = rig.outbox->describe();
  CHECK(text.find("sent 2/5") != std::string::npos);
  CHECK(text.find("outstanding 2048") != std::string::npos);
}

TEST_CASE("flow/outbox: random traffic never exceeds an allowance and never stalls", "[flow][fast]") {
  for (std::uint64_t seed = 1; seed <= 60; ++seed) {
    std::mt19937_64 random(seed);
    Setup setup;
    setup.eager_bytes = static_cast<std::int64_t>(kSlot * (1 + random() % 4));
    setup.slots = 3 + random() % 6;
    setup.net_slots = 1 + random() % setup.slots;
    setup.granted_bytes_max = static_cast<std::int64_t>(kSlot * (1 + random() % 3));
    Rig rig(setup);
    const core::EngineId peers[] = {kPeer, kOther, kLocal};
    // What each peer has received eagerly and not returned, and what it has seen.
    std::map<core::EngineId, std::int64_t> held;
    std::map<core::EngineId, std::size_t> looked;
    std::map<std::uint32_t, std::vector<int>> received;
    const auto look = [&] {
      for (const core::EngineId peer : peers) {
        auto& sent = rig.to(peer).sent;
        for (std::size_t& i = looked[peer]; i < sent.size(); ++i) {
          const auto* data = sent[i].message.as<wire::Data>();
          if (data == nullptr) continue;
          ++received[data->chunk.span][data->chunk.number];
          if (data->permit == wire::Permit::kAllowance) held[peer] += data->cost;
        }
        REQUIRE(held[peer] <= setup.eager_bytes);
      }
    };
    std::vector<std::pair<Stream*, std::uint32_t>> to_offer;
    std::vector<Stream*> live;
    for (int i = 0; i < 6; ++i) {
      Stream& s = rig.stream(1 + static_cast<std::uint32_t>(random() % 9), peers[random() % 3], random() % 3 == 0);
      s.priority = static_cast<std::int8_t>(seed % 2 == 0 ? random() % 3 : 0);
      received[s.index].assign(s.chunks, 0);
      live.push_back(&s);
      for (std::uint32_t c = 0; c < s.chunks; ++c) to_offer.emplace_back(&s, c);
    }
    std::shuffle(to_offer.begin(), to_offer.end(), random);
    Stream* cancelled = nullptr;
    double time = 0;
    const auto return_some = [&](core::EngineId peer, bool all) {
      const std::int64_t back =
          all ? held[peer] : held[peer] / static_cast<std::int64_t>(kSlot) / 2 * static_cast<std::int64_t>(kSlot);
      if (back == 0) return;
      held[peer] -= back;
      rig.outbox->on_credit(peer, {static_cast<std::uint64_t>(back)});
    };
    for (int step = 0; step < 300; ++step) {
      Stream& s = *live[random() % live.size()];
      switch (random() % 7) {
        case 0:
        case 1:
          if (!to_offer.empty()) {
            const auto [stream, chunk] = to_offer.back();
            to_offer.pop_back();
            if (stream != cancelled) rig.outbox->offer(*stream, chunk);
          }
          break;
        case 2: return_some(peers[random() % 3], random() % 2 == 0); break;
        case 3: {
          auto& sent = rig.to(peers[random() % 3]).sent;
          if (!sent.empty()) sent[random() % sent.size()].buffer = transport::Buffer();
          break;
        }
        case 4:
          if (&s != cancelled)
            rig.outbox->granted(s, random() % 4 == 0 ? wire::kAllChunks : static_cast<std::uint32_t>(random() % 10));
          break;
        case 5:
          if (cancelled == nullptr && random() % 20 == 0) rig.outbox->cancel(*(cancelled = &s));
          break;
        default: rig.progress(time += 60);
      }
      look();
    }
    // Everybody becomes generous: all that was offered must go.
    for (const auto& [stream, chunk] : to_offer)
      if (stream != cancelled) rig.outbox->offer(*stream, chunk);
    for (int round = 0; round < 200; ++round) {
      look();
      for (const core::EngineId peer : peers) {
        for (std::size_t i = 0; i < rig.to(peer).sent.size(); ++i) rig.to(peer).complete(i);
        return_some(peer, true);
      }
      rig.progress();
    }
    INFO("seed " << seed << "\n" << rig.outbox->describe());
    for (Stream* s : live) {
      if (s == cancelled) continue;
      REQUIRE(s->all_sent());
      for (const int times : received[s->index]) REQUIRE(times == 1);
    }
  }
}

TEST_CASE("flow/outbox: a window below the allowance holds, and may be widened again", "[flow][fast]") {
  Setup setup;
  setup.eager_bytes = 8 * static_cast<std::int64_t>(kSlot);
  Rig rig(setup);
  rig.outbox->set_window(kPeer, 3 * static_cast<std::int64_t>(kSlot));
  Stream& s = rig.stream(12);
  rig.offer_all(s);
  CHECK(rig.to().chunks().size() == 3);
  CHECK(rig.to().of<wire::Data>()[0]->window == 3 * kSlot);
  // Narrower than what is under way: nothing goes until enough has come back.
  rig.outbox->set_window(kPeer, static_cast<std::int64_t>(kSlot));
  rig.outbox->on_credit(kPeer, {2 * kSlot});
  CHECK(rig.to().chunks().size() == 3);
  rig.outbox->on_credit(kPeer, {kSlot});
  CHECK(rig.to().chunks().size() == 4);
  rig.outbox->set_window(kPeer, 4 * static_cast<std::int64_t>(kSlot));
  rig.progress();
  CHECK(rig.to().chunks().size() == 7);
  CHECK(rig.to().last().window == 4 * kSlot);
}

TEST_CASE("flow/outbox: a window falls for slow rounds only where more waits to be sent", "[flow][fast]") {
  using Tuner = schedule::WindowTuner;
  constexpr Tuner::Rounds kRounds = {std::chrono::milliseconds(20), std::chrono::milliseconds(30)};
  constexpr auto kSlow = std::chrono::milliseconds(40);
  Setup setup;
  setup.slots = setup.net_slots = 64;
  setup.eager_bytes = 16 * static_cast<std::int64_t>(kSlot);
  Rig rig(setup);
  rig.outbox->set_window(kPeer, 4 * static_cast<std::int64_t>(kSlot), kRounds);
  const auto window = [&] { return rig.to().last().window; };
  // Sends so many chunks, of which the window holds `fit`; the rest follows the credit.
  const auto round = [&](std::size_t chunks, std::size_t fit, std::chrono::milliseconds after) {
    rig.offer_all(rig.stream(chunks));
    std::this_thread::sleep_for(after);
    rig.outbox->on_credit(kPeer, {fit * kSlot});
    if (chunks > fit) rig.outbox->on_credit(kPeer, {(chunks - fit) * kSlot});
    rig.to().complete_all();
  };
  const auto used = [&] {
    rig.offer_all(rig.stream(1));
    rig.outbox->on_credit(kPeer, {kSlot});
    rig.to().complete_all();
    return window();
  };
  for (int i = 0; i < 1000 && used() < 8 * kSlot; ++i) round(used() / kSlot + 1, used() / kSlot, {});
  const std::size_t grown = used();
  REQUIRE(grown >= 8 * kSlot);
  round(grown / kSlot, grown / kSlot, kSlow);  // an operation's last chunks: their credit may come with the next one
  CHECK(used() == grown);
  round(grown / kSlot + 1, grown / kSlot, kSlow);
  CHECK(used() < grown);
}

TEST_CASE("flow/outbox: what is urgent passes a spent window, and bulk that is under way", "[flow][fast]") {
  constexpr std::size_t kWindow = 4 * kBatchSlots;
  for (const bool has_urgent : {false, true}) {
    Setup setup;
    setup.slots = setup.net_slots = 4 * kWindow;
    setup.eager_bytes = static_cast<std::int64_t>(2 * kWindow * kSlot);
    Rig rig(setup);
    rig.router.has_urgent = has_urgent;
    rig.outbox->set_window(kPeer, static_cast<std::int64_t>(kWindow * kSlot));
    Stream& idle = rig.stream(1, kPeer, /*urgent=*/true);
    rig.offer_all(idle);
    CHECK(rig.to().chunks().size() == 1);  // nothing is under way: the connection that there is
    Stream& bulk = rig.stream(2 * kWindow);
    rig.offer_all(bulk);
    CHECK(rig.to().chunks().size() == kWindow);
    Stream& urgent = rig.stream(kWindow + 1, kPeer, /*urgent=*/true);
    rig.offer_all(urgent);
    CHECK(urgent.sent() == kWindow);  // all that the peer allows, and no more
    CHECK(rig.to().chunks().size() == (has_urgent ? kWindow : 2 * kWindow));
    if (has_urgent) CHECK(rig.router.urgent_endpoints[kPeer]->chunks().size() == kWindow);
    rig.outbox->on_credit(kPeer, {kSlot});
    CHECK(urgent.all_sent());
    CHECK(bulk.sent() == kWindow - 1);
  }
}

TEST_CASE("flow/outbox: what is urgent and lies in a device's memory takes the connection for data", "[flow][fast]") {
  struct Lending final : flow::Source {
    flow::Payload payload(Stream&, std::uint32_t, std::size_t bytes) override {
      return {(*pool).lend(memory.data(), bytes, nullptr), bytes};
    }
    void on_sent(Stream&, std::uint32_t) override {}
    void on_permitted(Stream&, std::uint32_t) override {}
    transport::BufferPool* pool = nullptr;
    std::vector<std::byte> memory = std::vector<std::byte>(kSlot);
  };
  constexpr std::size_t kWindow = 4 * kBatchSlots;
  Setup setup;
  setup.slots = setup.net_slots = 4 * kWindow;
  setup.eager_bytes = static_cast<std::int64_t>(2 * kWindow * kSlot);
  Rig rig(setup);
  rig.router.has_urgent = true;
  rig.outbox->set_window(kPeer, static_cast<std::int64_t>(kWindow * kSlot));
  Stream& bulk = rig.stream(2 * kWindow);
  rig.offer_all(bulk);
  Lending lending;
  lending.pool = &rig.outbox->pool();
  Stream& urgent = rig.stream(3, kPeer, /*urgent=*/true);
  urgent.source = &lending;
  rig.offer_all(urgent);
  CHECK(urgent.all_sent());
  CHECK(rig.to().chunks().size() == kWindow + 3);
  CHECK(rig.router.urgent_endpoints[kPeer] == nullptr);
  CHECK((*rig.pool).lent() == 3);
  rig.to().complete_all();
  CHECK((*rig.pool).lent() == 0);
}

TEST_CASE("flow/outbox: what is urgent keeps off the bulk's connection where it is told to", "[flow][fast]") {
  for (const bool has_urgent : {false, true}) {
    Setup setup;
    setup.urgent_always = true;
    Rig rig(setup);
    rig.router.has_urgent = has_urgent;
    Stream& urgent = rig.stream(1, kPeer, /*urgent=*/true);
    rig.offer_all(urgent);
    Stream& bulk = rig.stream(1);
    rig.offer_all(bulk);
    CHECK(urgent.all_sent());
    CHECK(bulk.all_sent());
    CHECK(rig.to().chunks().size() == (has_urgent ? 1 : 2));
    if (has_urgent) CHECK(rig.router.urgent_endpoints[kPeer]->chunks().size() == 1);
  }
}

TEST_CASE("flow/outbox: credit comes in quarters of what the sender says that it uses", "[flow][fast]") {
  Setup setup;
  setup.credit_batch_bytes = 8 * static_cast<std::int64_t>(kSlot);
  Rig rig(setup);
  test::Lender lender;
  const auto consume = [&] { lender.lend("x", 1, rig.outbox.get(), kPeer, kSlot).reset(); };
  consume();
  consume();
  CHECK(rig.to().of<wire::Credit>().empty());
  rig.outbox->return_credit(kPeer);  // it announced a stream
  REQUIRE(rig.to().of<wire::Credit>().size() == 1);
  CHECK(rig.to().of<wire::Credit>()[0]->bytes == 2 * kSlot);
  rig.outbox->return_credit(kPeer);  // nothing is due
  CHECK(rig.to().of<wire::Credit>().size() == 1);
  rig.outbox->note_window(kPeer, 12 * static_cast<std::int64_t>(kSlot));
  consume();
  consume();
  CHECK(rig.to().of<wire::Credit>().size() == 1);
  consume();
  CHECK(rig.to().of<wire::Credit>().size() == 2);
  rig.outbox->note_window(kPeer, 1000 * static_cast<std::int64_t>(kSlot));  // never more than a part of what we allow
  for (int i = 0; i < 8; ++i) consume();
  CHECK(rig.to().of<wire::Credit>().size() == 3);
}

TEST_CASE("flow/outbox: credit and grants for a far peer do not wait behind data", "[flow][fast]") {
  for (const bool is_far : {false, true}) {
    INFO("far " << is_far);
    Setup setup;
    setup.eager_bytes = 32 * static_cast<std::int64_t>(kSlot);
    Rig rig(setup);
    rig.router.has_urgent = true;
    rig.outbox->set_window(kPeer, setup.eager_bytes,
                           is_far ? schedule::WindowTuner::kFixed : schedule::WindowTuner::kUsual);
    test::FakeEndpoint& beside = *static_cast<test::FakeEndpoint*>(rig.router.connect_urgent(kPeer).value());
    const auto send_both = [&] {
      rig.outbox->send(kPeer, {{}, 0, wire::Credit{1}});
      rig.outbox->send(kPeer, {{}, 0, wire::Grant{}});
      rig.outbox->send(kPeer, {{}, 0, wire::Ack{}});
    };
    send_both();  // no data waits
    CHECK(beside.sent.empty());
    CHECK(rig.to().sent.size() == 3);
    rig.offer_all(rig.stream(32));
    const std::size_t before = rig.to().sent.size();
    send_both();
    CHECK(beside.of<wire::Credit>().size() == (is_far ? 1 : 0));
    CHECK(beside.of<wire::Grant>().size() == (is_far ? 1 : 0));
    CHECK(rig.to().sent.size() == before + (is_far ? 1 : 3));
  }
}

TEST_CASE("flow/outbox: a permit is paid for the most that a chunk can be on the wire, and comes back whole",
          "[flow][fast]") {
  Setup setup;
  setup.large_slots = 8;
  setup.eager_bytes = 3 * static_cast<std::int64_t>(kSlot);
  Rig rig(setup);
  rig.owner.more_at_most = kSlot / 2;
  rig.owner.more = 5;
  Stream& s = rig.stream(3);
  rig.offer_all(s);
  REQUIRE(rig.owner.sent.size() == 2);  // of one and a half slots each
  for (const Sent& sent : rig.to().sent) {
    const auto* data = sent.message.as<wire::Data>();
    REQUIRE(data != nullptr);
    CHECK(sent.message.payload_bytes == kSlot + 5);
    CHECK(sent.payload.size() == kSlot + 5);
    CHECK(data->cost == kSlot + kSlot / 2);
  }
  rig.outbox->on_credit(kPeer, {kSlot + kSlot / 2, wire::Permit::kAllowance});
  CHECK(rig.owner.sent.size() == 3);
  // A permit that is not used comes back with what was paid.
  rig.outbox->on_credit(kPeer, {3 * kSlot, wire::Permit::kAllowance});
  Stream& unused = rig.stream(2);
  rig.outbox->want(unused, 0);
  rig.outbox->want(unused, 1);
  CHECK(rig.owner.permitted == Chunks{0, 1});
  rig.outbox->cancel(unused);
  CHECK(rig.probe() == 2);
}

TEST_CASE("flow/outbox: a payload that its sender could still change is copied, and its credit comes once",
          "[flow][fast]") {
  Rig rig;
  std::array<std::byte, 4> theirs{std::byte{1}, std::byte{2}, std::byte{3}, std::byte{4}};
  int released = 0;
  const core::EngineId source{77};
  {
    flow::Delivery delivery(
        transport::RxPayload(
            theirs.data(), theirs.size(),
            [](void* count, void*, std::uint64_t) noexcept { ++*static_cast<int*>(count); }, &released, nullptr),
        rig.outbox.get(), source, 0);
    delivery.own();
    delivery.hold();
    CHECK(released == 1);
    theirs[2] = std::byte{99};
    CHECK(delivery.data() != theirs.data());
    CHECK(delivery.data()[2] == std::byte{3});
    CHECK(delivery.bytes() == 4);
    CHECK(rig.outbox->held(source) == 4);
    flow::Delivery moved = std::move(delivery);
    CHECK(moved.data()[3] == std::byte{4});
    CHECK(rig.outbox->held(source) == 4);
  }
  CHECK(released == 1);
  CHECK(rig.outbox->held(source) == 0);
}
