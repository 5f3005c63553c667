// What ends a rendezvous, delays it, or must not: members that do not come, other lives, bad values, stores that break.
#include <algorithm>
#include <chrono>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "rendezvous_world.h"

using namespace hybridps;
using namespace hybridps::bootstrap;
using namespace hybridps::bootstrap::testing;

namespace {

/// Fails from a given call on.
class BrokenStore final : public KeyValueStore {
 public:
  explicit BrokenStore(int good_calls) : left_(good_calls) {}
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    if (left_-- <= 0) return {core::Code::kPeerDead, "connection reset"};
    return store_.set(key, value);
  }
  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    if (left_-- <= 0) return core::Status(core::Code::kPeerDead, "connection reset");
    return store_.try_get(key);
  }

 private:
  int left_;
  MemoryStore store_;
};

/// One value lacks the seal of this job, until it is written anew.
class RefusingStore final : public KeyValueStore {
 public:
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    if (key == refused) refused.clear();
    return store_.set(key, value);
  }
  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    if (key == refused) return core::Status(core::Code::kMismatch, "no seal of this job");
    return store_.try_get(key);
  }
  std::string refused;

 private:
  MemoryStore store_;
};

}  // namespace

TEST_CASE("bootstrap/rendezvous: everyone's timeout names the absent ranks", "[bootstrap][fast]") {
  World world(4);
  world.start(0);
  world.start(1);
  REQUIRE(world.run(Phase::kFailed, seconds(70)));
  for (const int rank : {0, 1}) {
    CHECK(world.member(rank).status().code() == core::Code::kTimeout);
    CHECK(contains(message(world.member(rank)), "waiting for ranks [2, 3] (none of 2 published a record)"));
    CHECK(contains(message(world.member(rank)), " s in the rendezvous of group 'g'"));
  }
  CHECK(message(world.member(0)) == message(world.member(1)));
}

TEST_CASE("bootstrap/rendezvous: without a leader members name it and the other absent ranks", "[bootstrap][fast]") {
  World world(4);
  world.start(1);
  world.start(3);
  REQUIRE(world.run(Phase::kFailed, seconds(70)));
  CHECK(contains(message(world.member(1)), "waiting for ranks [0, 2] (none of 2 published a record)"));
  CHECK(message(world.member(1)) == message(world.member(3)));
}

TEST_CASE("bootstrap/rendezvous: progress is told after 10 s and then every 10 s", "[bootstrap][fast]") {
  World world(3);
  std::vector<std::string> leader;
  std::vector<std::string> member;
  world.options(0).progress = [&](std::string_view line) { leader.emplace_back(line); };
  world.options(1).progress = [&](std::string_view line) { member.emplace_back(line); };
  world.start(1);
  world.run_for(seconds(9));
  CHECK(member.empty());
  world.run_for(seconds(6));
  REQUIRE(member.size() == 1);
  CHECK(contains(member[0], "rank 1 has been in the rendezvous of group 'g' for 10 s: waiting for ranks [0]"));
  world.start(0);
  world.run_for(seconds(35));
  REQUIRE(leader.size() == 3);
  CHECK(contains(leader[2], "for 30 s: waiting for ranks [2] (none of 1 published a record)"));
}

TEST_CASE("bootstrap/rendezvous: a rank that does not confirm is named", "[bootstrap][fast]") {
  World world(3);
  world.options(2).prove = [](const Roster&) { return MemoryProof::pending(); };
  world.start_all();
  REQUIRE(world.run(Phase::kFailed, seconds(70)));
  CHECK(world.member(0).status().code() == core::Code::kTimeout);
  const std::string text = message(world.member(0));
  const bool by_leader = contains(text, "waiting for ranks [2] to confirm the roster");
  const bool by_member = contains(text, "proving shared memory");
  CHECK((by_leader || by_member));
  CHECK(message(world.member(1)) == text);
}

TEST_CASE("bootstrap/rendezvous: a rank that does not confirm is named by whoever's time is up first",
          "[bootstrap][fast]") {
  for (const int first : {1, 3}) {
    World world(4);
    world.options(2).prove = [](const Roster&) { return MemoryProof::pending(); };
    world.options(first).deadline = core::Deadline::at(world.now + seconds(20));
    world.start_all();
    REQUIRE(world.run(Phase::kFailed, seconds(70)));
    for (const int rank : {0, 1, 3}) {
      CHECK(contains(message(world.member(rank)), "rank " + std::to_string(first) + " timed out after"));
      CHECK(contains(message(world.member(rank)), "waiting for ranks [2] to confirm the roster"));
    }
  }
}

TEST_CASE("bootstrap/rendezvous: stale records of an earlier life are replaced", "[bootstrap][fast]") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    auto store = std::make_shared<MemoryStore>();
    World first(4, store, seed);
    first.start_all();
    REQUIRE(first.run(Phase::kReady));

    World second(4, store, seed);  // same keys, other engines
    std::mt19937 random(seed);
    std::vector<int> order = {0, 1, 2, 3};
    std::shuffle(order.begin(), order.end(), random);
    for (const int rank : order) {  // one after another, so that the leader may read stale records
      second.start(rank);
      second.run_for(milliseconds(random() % 100));
    }
    REQUIRE(second.run(Phase::kReady));
    second.check_agreement();
    CHECK(second.member(0).roster().uid != first.member(0).roster().uid);
  }
}

TEST_CASE("bootstrap/rendezvous: nobody is ready while a stale record is in the roster", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World first(3, store);
  first.start_all();
  REQUIRE(first.run(Phase::kReady));
  World second(3, store);
  second.start(0);
  second.start(1);
  second.run_for(seconds(20));  // rank 2's record of the first life is there
  CHECK(second.member(0).phase() == Phase::kPending);
  CHECK(second.member(1).phase() == Phase::kPending);
  CHECK(contains(second.member(0).waiting_for(), "waiting for ranks [2] to confirm the roster"));
  second.start(2);
  REQUIRE(second.run(Phase::kReady));
  second.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: a record of another incarnation under our keys is waited out", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World world(2, store);
  MemberRecord old = world.options(1).self;
  old.incarnation = "run.9.9";
  old.engine.value = World::next_engine();
  REQUIRE(store->set("hybridps/g/run.0.0/rec/1", encode(old).value()).is_ok());
  world.start(0);
  world.run_for(seconds(1));
  CHECK(world.member(0).phase() == Phase::kPending);
  CHECK(contains(world.member(0).waiting_for(), "incarnation 'run.9.9'"));
  world.start(1);
  REQUIRE(world.run(Phase::kReady));
  world.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: an earlier life of another size does not matter", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World first(4, store);
  first.start_all();
  REQUIRE(first.run(Phase::kReady));
  for (const int size : {2, 6}) {
    World second(size, store);
    for (int rank = size - 1; rank >= 0; --rank) {
      second.start(rank);
      second.run_for(milliseconds(50));
    }
    REQUIRE(second.run(Phase::kReady));
    second.check_agreement();
  }
}

TEST_CASE("bootstrap/rendezvous: a failure of an earlier life is not believed", "[bootstrap][fast]") {
  for (const bool leader_first : {true, false}) {
    auto store = std::make_shared<MemoryStore>();
    World first(3, store);
    first.options(2).prove = [](const Roster&) { return MemoryProof::pending(); };
    first.start_all();
    first.run_for(seconds(1));
    first.member(1).fail(core::Status(core::Code::kAborted, "rank 1 was aborted"));
    REQUIRE(first.run(Phase::kFailed));

    World second(3, store);
    second.start(leader_first ? 0 : 1);
    second.run_for(seconds(20));
    CHECK(second.member(leader_first ? 0 : 1).phase() == Phase::kPending);
    second.start(leader_first ? 1 : 0);
    second.start(2);
    REQUIRE(second.run(Phase::kReady));
    second.check_agreement();
  }
}

TEST_CASE("bootstrap/rendezvous: a failure from before rank 0 came ends it for all after the grace, not the timeout",
          "[bootstrap][fast]") {
  World world(3);
  for (int rank = 0; rank < 3; ++rank) world.options(rank).deadline = core::Deadline::at(world.now + seconds(1000));
  world.start(1);
  world.member(1).step(world.now);
  world.member(1).fail(core::Status(core::Code::kAborted, "rank 1 was aborted"));
  const auto begin = world.now;
  world.start(0);
  world.start(2);
  world.run_for(seconds(50));  // it might be a leftover, and rank 1 late
  CHECK(world.member(0).phase() == Phase::kPending);
  REQUIRE(world.run(Phase::kFailed));
  CHECK(world.now - begin < Rendezvous::kForeignGrace + seconds(5));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(world.member(rank).status().code() == core::Code::kAborted);
    CHECK(message(world.member(rank)) == "rank 1 was aborted");
  }
}

TEST_CASE("bootstrap/rendezvous: a timeout shorter than the grace tells what failed before rank 0 came",
          "[bootstrap][fast]") {
  World world(2);
  for (int rank = 0; rank < 2; ++rank) world.options(rank).deadline = core::Deadline::at(world.now + seconds(20));
  world.start(1);
  world.member(1).step(world.now);
  world.member(1).fail(core::Status(core::Code::kAborted, "rank 1 was aborted"));
  world.start(0);
  REQUIRE(world.run(Phase::kFailed));
  CHECK(world.member(0).status().code() == core::Code::kTimeout);
  CHECK(contains(message(world.member(0)), "a failure, perhaps of an earlier attempt: rank 1 was aborted"));
}

TEST_CASE("bootstrap/rendezvous: who cannot even begin tells the others, whenever they come", "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  for (const int absent : {0, 1, 2}) {
    for (const bool others_wait : {true, false}) {
      auto store = std::make_shared<MemoryStore>();
      World world(3, store);
      for (int rank = 0; rank < 3; ++rank) world.options(rank).process_started_ms = kStarted;
      const auto announce = [&] {
        const core::Status failure(core::Code::kClosed, "rank " + std::to_string(absent) + " could not join it: why");
        REQUIRE(announce_failure(*store, world.options(0).key_prefix, absent, failure, kStarted + 5, kStarted).is_ok());
      };
      if (!others_wait) announce();
      for (int rank = 0; rank < 3; ++rank)
        if (rank != absent) world.start(rank);
      if (others_wait) {
        world.run_for(seconds(20));
        announce();
      }
      REQUIRE(world.run(Phase::kFailed, seconds(1)));
      for (int rank = 0; rank < 3; ++rank) {
        if (rank == absent) continue;
        CHECK(world.member(rank).status().code() == core::Code::kClosed);
        CHECK(message(world.member(rank)) == "rank " + std::to_string(absent) + " could not join it: why");
      }
    }
  }
}

TEST_CASE("bootstrap/rendezvous: a failure from before this process was started is not believed for its time",
          "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  auto store = std::make_shared<MemoryStore>();
  World world(2, store);
  for (int rank = 0; rank < 2; ++rank) world.options(rank).process_started_ms = kStarted;
  const core::Status failure(core::Code::kClosed, "of an earlier life");
  REQUIRE(announce_failure(*store, world.options(0).key_prefix, 1, failure, kStarted - 5, kStarted - 1000).is_ok());
  world.start(0);
  world.run_for(seconds(20));
  CHECK(world.member(0).phase() == Phase::kPending);
  world.start(1);
  REQUIRE(world.run(Phase::kReady));
}

TEST_CASE(
    "bootstrap/rendezvous: a failure from before this process was started is believed when its writer does not come "
    "again",
    "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  for (const int late : {0, 2}) {
    auto store = std::make_shared<MemoryStore>();
    World world(3, store);
    world.options(late).process_started_ms = kStarted;
    world.options(late).deadline = core::Deadline::at(world.now + seconds(1000));
    const core::Status failure(core::Code::kClosed, "rank 1 could not join it: why");
    REQUIRE(announce_failure(*store, world.options(0).key_prefix, 1, failure, kStarted - 5, kStarted - 1000).is_ok());
    world.start(late);
    world.run_for(seconds(50));
    CHECK(world.member(late).phase() == Phase::kPending);
    REQUIRE(world.run(Phase::kFailed, seconds(20)));
    CHECK(message(world.member(late)) == "rank 1 could not join it: why");
  }
}

TEST_CASE("bootstrap/rendezvous: of several that cannot begin all tell what the first one does", "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  auto store = std::make_shared<MemoryStore>();
  World world(3, store);
  world.options(0).process_started_ms = kStarted;
  const auto announce = [&](const std::string& text, std::uint64_t at) {
    REQUIRE(
        announce_failure(*store, world.options(0).key_prefix, 1, core::Status(core::Code::kClosed, text), at, kStarted)
            .is_ok());
  };
  announce("left over", kStarted - 5);
  announce("first", kStarted + 1);
  announce("second", kStarted + 2);
  world.start(0);
  REQUIRE(world.run(Phase::kFailed, seconds(1)));
  CHECK(message(world.member(0)) == "first");
}

TEST_CASE("bootstrap/rendezvous: a member on loopback beside other machines ends it for all at once",
          "[bootstrap][fast]") {
  World world(3);
  for (int rank = 0; rank < 3; ++rank) world.options(rank).self.machine = static_cast<std::uint64_t>(rank);
  world.options(1).self.loopback = "its control uses lo: HYBRIDPS_INTERFACE";
  world.start_all();
  REQUIRE(world.run(Phase::kFailed, seconds(1)));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(world.member(rank).status().code() == core::Code::kInvalidArgument);
    CHECK(contains(message(world.member(rank)), "rank 1 on host-0 (pid 1001) can be reached on its own machine only"));
  }
}

TEST_CASE("bootstrap/rendezvous: a failure of an earlier life is not believed either while another rank is very late",
          "[bootstrap][fast]") {
  for (const int writer : {0, 1}) {
    auto store = std::make_shared<MemoryStore>();
    World first(3, store);
    first.options(2).prove = [](const Roster&) { return MemoryProof::pending(); };
    first.start_all();
    first.run_for(seconds(1));
    first.member(writer).fail(core::Status(core::Code::kAborted, "aborted"));
    REQUIRE(first.run(Phase::kFailed));

    World second(3, store);
    for (int rank = 0; rank < 3; ++rank) second.options(rank).deadline = core::Deadline::at(second.now + seconds(1000));
    second.start(0);
    second.run_for(seconds(20));
    second.start(1);
    second.run_for(seconds(200));
    CHECK(second.member(0).phase() == Phase::kPending);
    CHECK(second.member(1).phase() == Phase::kPending);
    second.start(2);
    REQUIRE(second.run(Phase::kReady));
    second.check_agreement();
  }
}

TEST_CASE("bootstrap/rendezvous: two groups of one name after another do not meet", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  std::vector<core::GroupUid> uids;
  std::vector<std::unique_ptr<IncarnationCounter>> counters;  // one per process
  for (int rank = 0; rank < 3; ++rank) counters.push_back(std::make_unique<IncarnationCounter>());
  for (int life = 0; life < 3; ++life) {
    World world(3, store);
    for (int rank = 0; rank < 3; ++rank) {
      const std::string incarnation = counters[static_cast<std::size_t>(rank)]->next("g", "job");
      world.options(rank).self.incarnation = incarnation;
      world.options(rank).key_prefix = group_key_prefix("g", incarnation);
    }
    world.start(1);
    world.run_for(milliseconds(200));
    CHECK(store->try_get(world.options(0).key_prefix + "/head").value() == std::nullopt);
    world.start(0);
    world.start(2);
    REQUIRE(world.run(Phase::kReady));
    uids.push_back(world.member(2).roster().uid);
  }
  CHECK(uids[0] != uids[1]);
  CHECK(uids[1] != uids[2]);
}

TEST_CASE("bootstrap/rendezvous: another protocol or build is refused at once with both named", "[bootstrap][fast]") {
  for (const bool protocol : {true, false}) {
    World world(4);
    if (protocol) world.options(2).self.protocol_version = kProtocolVersion + 1;
    world.options(2).self.build = "0.2.0";
    world.start(0);
    world.start(1);
    world.start(2);  // rank 3 has not even come
    const auto begin = world.now;
    REQUIRE(world.run(Phase::kFailed));
    CHECK(world.now - begin < seconds(1));
    const std::string text = message(world.member(0));
    CHECK(world.member(1).status().code() == core::Code::kMismatch);
    CHECK(contains(text, "rank 0 runs protocol " + std::to_string(kProtocolVersion) + " build '0.1.0'"));
    CHECK(contains(text,
                   "rank 2 runs protocol " + std::to_string(kProtocolVersion + (protocol ? 1 : 0)) + " build '0.2.0'"));
    CHECK(message(world.member(1)) == text);
    CHECK(message(world.member(2)) == text);
    world.start(3);  // later than the refusal: cannot tell it from an earlier life's, but reports it
    REQUIRE(world.run(Phase::kFailed, seconds(100)));
    CHECK(contains(message(world.member(3)), protocol ? "protocol" : "build"));
  }
}

TEST_CASE("bootstrap/rendezvous: a proof that fails ends it for all with one text", "[bootstrap][fast]") {
  for (const int culprit : {0, 2}) {
    World world(3);
    world.options(culprit).prove = [](const Roster&) {
      return MemoryProof::failed(core::Status(core::Code::kOutOfResources, "no memory for the arena"));
    };
    world.start_all();
    const auto begin = world.now;
    REQUIRE(world.run(Phase::kFailed));
    CHECK(world.now - begin < seconds(1));
    for (int rank = 0; rank < 3; ++rank) {
      CHECK(world.member(rank).status().code() == core::Code::kOutOfResources);
      CHECK(contains(message(world.member(rank)), "rank " + std::to_string(culprit) + " on host-0"));
      CHECK(message(world.member(rank)) == message(world.member(0)));
    }
  }
}

TEST_CASE("bootstrap/rendezvous: an abort of one member ends it for all", "[bootstrap][fast]") {
  World world(4);
  world.start(0);
  world.start(1);
  world.start(2);
  world.run_for(seconds(1));
  world.member(2).fail(core::Status(core::Code::kAborted, "rank 2 was aborted"));
  const auto begin = world.now;
  REQUIRE(world.run(Phase::kFailed));
  CHECK(world.now - begin < seconds(1));
  CHECK(message(world.member(0)) == "rank 2 was aborted");
  CHECK(message(world.member(1)) == "rank 2 was aborted");
}

TEST_CASE("bootstrap/rendezvous: a store that breaks is an error of this rank", "[bootstrap][fast]") {
  for (int calls = 0; calls < 40; ++calls) {
    World world(3, std::make_shared<BrokenStore>(calls));
    world.start_all();
    world.run_for(seconds(1));
    CHECK((calls < 10) <= (world.member(0).phase() == Phase::kFailed));
    for (int rank = 0; rank < 3; ++rank) {
      if (calls >= 10 && world.member(rank).phase() != Phase::kFailed) continue;  // ready before it broke
      CHECK(world.member(rank).status().code() == core::Code::kPeerDead);
      CHECK(contains(message(world.member(rank)), "connection reset"));
    }
  }
}

TEST_CASE("bootstrap/rendezvous: garbage under every key does not crash and is waited out", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  const std::string prefix = "hybridps/g/run.0.0/";
  std::mt19937 random(3);
  for (const char* name : {"rec/1", "rec/2", "head", "failed"}) {
    Bytes bytes(random() % 64);
    for (auto& byte : bytes) byte = static_cast<std::uint8_t>(random());
    REQUIRE(store->set(prefix + name, bytes).is_ok());
  }
  World world(3, store);
  world.start(0);
  world.start(1);
  world.run_for(seconds(1));
  CHECK(world.member(0).phase() == Phase::kPending);
  CHECK(contains(world.member(0).waiting_for(), "rank 2 published a record that cannot be read"));
  world.start(2);
  REQUIRE(world.run(Phase::kReady));
  world.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: damaged values never crash nor make anyone ready alone", "[bootstrap][fast]") {
  // A store that flips bytes now and then, and then stops doing so.
  class FlippingStore final : public KeyValueStore {
   public:
    explicit FlippingStore(unsigned seed) : random_(seed) {}
    core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
      return store_.set(key, value);
    }
    core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
      auto value = store_.try_get(key);
      if (auto& bytes = value.value(); bytes && !bytes->empty() && random_() % 8 == 0) {
        (*bytes)[random_() % bytes->size()] ^= static_cast<std::uint8_t>(1 + random_() % 255);
      }
      return value;
    }

   private:
    std::mt19937 random_;
    MemoryStore store_;
  };
  for (unsigned seed = 0; seed < 200; ++seed) {
    World world(4, std::make_shared<FlippingStore>(seed), seed);
    world.start_all();
    world.run_for(seconds(5));
    SUCCEED();
  }
}

TEST_CASE("bootstrap/rendezvous: two processes with one rank are told apart in the error", "[bootstrap][fast]") {
  World world(2);
  World twin(2);
  auto store = std::make_shared<MemoryStore>();
  RendezvousOptions leader = world.options(0);
  RendezvousOptions one = world.options(1);
  RendezvousOptions two = twin.options(1);
  one.self.pid = 77;
  leader.deadline = one.deadline = two.deadline = core::Deadline::at(world.now + seconds(5));
  Rendezvous second(store, two);
  Rendezvous first(store, one);
  Rendezvous zero(store, leader);
  for (auto now = world.now; now < world.now + seconds(6); now += milliseconds(1)) {
    second.step(now);
    first.step(now);
    zero.step(now);
  }
  CHECK(first.phase() == Phase::kReady);
  REQUIRE(second.phase() == Phase::kFailed);
  CHECK(contains(message(second), "two processes with the same rank"));
  CHECK(contains(message(second), "(pid 77)"));
}

TEST_CASE("bootstrap/rendezvous: who comes second with a used name is told on every rank and the first hear nothing",
          "[bootstrap][fast]") {
  const auto store = std::make_shared<MemoryStore>();
  World first(3, store);
  name_life(first, 3, "uuid 7");
  first.start_all();
  REQUIRE(first.run(Phase::kReady));
  World second(3, store, 2);
  name_life(second, 3, "uuid 7", "b");
  second.start_all();
  REQUIRE(second.run(Phase::kFailed, seconds(2)));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(second.member(rank).status().code() == core::Code::kMismatch);
    CHECK(contains(message(second.member(rank)), "uuid 7 is already used"));
    CHECK(first.member(rank).phase() == Phase::kReady);
  }
}

TEST_CASE("bootstrap/rendezvous: two groups that begin with one name at a time all end soon or one of them is made",
          "[bootstrap][fast]") {
  for (unsigned seed = 1; seed < 200; ++seed) {
    const auto store = std::make_shared<MemoryStore>();
    World one(3, store, seed);
    World other(3, store, 1000 + seed);
    name_life(one, 3, "uuid 7");
    name_life(other, 3, "uuid 7", "b");
    one.start_all();
    other.start_all();
    for (int turn = 0; turn < 2000; ++turn) {
      one.step_all();
      other.step_all();
    }
    int ready = 0;
    for (World* world : {&one, &other})
      for (int rank = 0; rank < 3; ++rank) {
        CHECK(world->member(rank).phase() != Phase::kPending);
        ready += world->member(rank).phase() == Phase::kReady ? 1 : 0;
        if (world->member(rank).phase() == Phase::kReady)
          CHECK(world->member(rank).roster().members[0].engine == world->options(0).self.engine);
      }
    CHECK(ready <= 3);
  }
}

TEST_CASE("bootstrap/rendezvous: members that were given other members are told so", "[bootstrap][fast]") {
  World world(3);
  name_life(world, 3, "uuid 2");
  world.options(2).self.incarnation = "uuid 2 of b";
  world.start_all();
  REQUIRE(world.run(Phase::kFailed, seconds(2)));
  for (int rank = 0; rank < 3; ++rank)
    CHECK(contains(message(world.member(rank)), "was given other members, or the same members in another order"));
}

TEST_CASE("bootstrap/rendezvous: who names other members is told both lists on all ranks at once",
          "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  struct List {
    std::vector<int> ranks;
    std::vector<int> of;  // those of the job that have it, by their numbers in it
  };
  const std::vector<std::pair<List, List>> cases = {
      {{{0, 1}, {0}}, {{0, 2}, {2}}},           // as many; rank 1 is in neither
      {{{0, 1}, {0, 1}}, {{0, 2}, {2}}},        // two at one place
      {{{0, 1, 2}, {0, 1}}, {{1, 2}, {2}}},     // not as many
      {{{0, 1, 2}, {0}}, {{0, 1, 2, 3}, {3}}},  // nobody at one place, and one has no rank 0
      {{{0, 1}, {0, 1}}, {{2, 3}, {2, 3}}},     // nobody in both
      {{{3, 1}, {3}}, {{1, 3}, {1}}},           // another order
  };
  for (const auto& [one, two] : cases) {
    for (unsigned seed = 0; seed < 30; ++seed) {
      auto store = std::make_shared<MemoryStore>();
      std::vector<std::unique_ptr<Rendezvous>> all;
      core::TimePoint now{std::chrono::hours(1)};
      for (const List* list : {&one, &two}) {
        for (const int global : list->of) {
          RendezvousOptions options;
          options.group_name = "g";
          options.key_prefix = "hybridps/g/run.0.0";
          const auto at = std::find(list->ranks.begin(), list->ranks.end(), global) - list->ranks.begin();
          options.self =
              sample_member(static_cast<int>(at), static_cast<int>(list->ranks.size()), World::next_engine());
          options.self.members = members_text(list->ranks);
          options.process_started_ms = kStarted;
          options.self.made_ms = kStarted + 3;
          options.wall_ms = [] { return kStarted + 5; };
          options.deadline = core::Deadline::at(now + seconds(60));
          all.push_back(std::make_unique<Rendezvous>(store, options));
        }
      }
      std::mt19937 random(seed);
      const auto end = now + seconds(10);
      // Some come together, others one after another.
      const auto is_over = [](const auto& member) { return member->phase() != Phase::kPending; };
      while (now < end && !std::all_of(all.begin(), all.end(), is_over)) {
        std::shuffle(all.begin(), all.end(), random);
        for (std::size_t i = 0; i < all.size(); ++i)
          if (seed % 3 == 0 || random() % 4 == 0) all[i]->step(now);
        now += milliseconds(1);
      }
      INFO(members_text(one.ranks) << " and " << members_text(two.ranks) << ", seed " << seed);
      CHECK(std::all_of(all.begin(), all.end(), is_over));
      std::size_t ready = 0;
      for (const auto& member : all) {
        if (member->phase() == Phase::kReady) {
          ++ready;
          continue;
        }
        CHECK(member->status().code() == core::Code::kMismatch);
        CHECK(contains(message(*member), members_text(one.ranks)));
        CHECK(contains(message(*member), members_text(two.ranks)));
      }
      CHECK(ready < all.size());
    }
  }
}

TEST_CASE("bootstrap/rendezvous: other members of an earlier life do not matter", "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  for (unsigned seed = 0; seed < 20; ++seed) {
    auto store = std::make_shared<MemoryStore>();
    World first(3, store, seed);
    World second(3, store, seed);
    for (int rank = 0; rank < 3; ++rank) {
      first.options(rank).self.members = "[0, 1, 2]";
      second.options(rank).self.members = "[1, 2, 4]";
      first.options(rank).self.made_ms = kStarted - 1;
      second.options(rank).self.made_ms = kStarted + 1;
      second.options(rank).process_started_ms = kStarted;
    }
    first.start_all();
    REQUIRE(first.run(Phase::kReady));
    for (const int rank : {2, 0, 1}) {
      second.start(rank);
      second.run_for(seconds(1));
    }
    REQUIRE(second.run(Phase::kReady));
    second.check_agreement();
  }
}

TEST_CASE("bootstrap/rendezvous: an absent member of a named life is called by its name", "[bootstrap][fast]") {
  World world(3);
  name_life(world, 3, "uuid 3");
  world.start(0);
  world.start(1);
  REQUIRE(world.run(Phase::kFailed, seconds(120)));
  for (const int rank : {0, 1}) {
    CHECK(world.member(rank).status().code() == core::Code::kTimeout);
    CHECK(contains(message(world.member(rank)), "rank 2 (host pid 2)"));
  }
}

TEST_CASE("bootstrap/rendezvous: a member that one of the others has given up before ends it for all",
          "[bootstrap][fast]") {
  World world(4);
  const auto departures = std::make_shared<Departures>();
  departures->add(world.options(3).self.engine, core::Status(core::Code::kPeerDead, "it sent no heartbeat"));
  world.options(2).departures = departures;
  world.start_all();
  REQUIRE(world.run(Phase::kFailed, seconds(2)));
  for (int rank = 0; rank < 4; ++rank) {
    CHECK(world.member(rank).status().code() == core::Code::kPeerDead);
    CHECK(contains(message(world.member(rank)), "rank 3 on host-0 (pid 1003) of group 'g' is gone"));
    CHECK(contains(message(world.member(rank)), "given up before by rank 2"));
    CHECK(contains(message(world.member(rank)), "it sent no heartbeat"));
  }
}

TEST_CASE("bootstrap/rendezvous: a member whose death one of the others hears of is waited for by nobody",
          "[bootstrap][fast]") {
  // What the member had done before: nothing, so that only who knows it from another group can tell; published its
  // record; and confirmed a roster that a third one has not.
  for (const int steps : {0, 1, 40}) {
    for (const int hears : {0, 1, 2}) {
      World world(4, std::make_shared<MemoryStore>(), static_cast<unsigned>(steps));
      const auto departures = std::make_shared<Departures>();
      world.options(hears).departures = departures;
      if (steps == 0) world.options(hears).presumed = {{}, {}, {}, {world.options(3).self.engine, "host-0 pid 1003"}};
      world.options(2).prove = [](const Roster&) { return MemoryProof::pending(); };
      for (const int rank : {0, 1, 2}) world.start(rank);
      if (steps > 0) world.start(3);
      for (int step = 0; step < steps; ++step) world.step_all();
      if (steps == 1) {
        world.member(3).step(world.now);
        world.run_for(milliseconds(200));  // the others learn who it is
      }
      world.stop(3);
      departures->add(core::EngineId{12345678}, core::Status(core::Code::kPeerDead, "of no concern"));
      world.run_for(milliseconds(100));
      REQUIRE(world.member(hears).phase() == Phase::kPending);
      departures->add(world.options(3).self.engine, core::Status(core::Code::kPeerDead, "connection reset"));
      INFO("steps " << steps << ", heard by " << hears);
      REQUIRE(world.run(Phase::kFailed, seconds(1)));
      for (const int rank : {0, 1, 2}) {
        CHECK(world.member(rank).status().code() == core::Code::kPeerDead);
        CHECK(contains(message(world.member(rank)), "rank 3"));
        CHECK(contains(message(world.member(rank)), "pid 1003"));
        CHECK(contains(message(world.member(rank)), "connection reset"));
      }
    }
  }
}

TEST_CASE("bootstrap/rendezvous: a member that cannot begin is told of beside a record of its earlier life",
          "[bootstrap][fast]") {
  constexpr std::uint64_t kStarted = 1'000'000;
  auto store = std::make_shared<MemoryStore>();
  World first(3, store);
  World second(3, store, 7);
  for (int rank = 0; rank < 3; ++rank) {
    first.options(rank).self.made_ms = kStarted - 5000;
    second.options(rank).self.made_ms = kStarted + 1;
    second.options(rank).process_started_ms = kStarted;
    second.options(rank).deadline = core::Deadline::at(second.now + seconds(1000));
  }
  first.start_all();
  REQUIRE(first.run(Phase::kReady));
  const core::Status failure(core::Code::kClosed, "rank 2 could not join it: why");
  REQUIRE(announce_failure(*store, second.options(0).key_prefix, 2, failure, kStarted - 5, kStarted - 1000).is_ok());
  second.start(0);
  second.start(1);
  second.run_for(seconds(50));
  for (const int rank : {0, 1}) CHECK(second.member(rank).phase() == Phase::kPending);
  CHECK(contains(second.member(0).waiting_for(),
                 "the first: rank 2 on host-0 (pid 1002); its record is from before this process began: perhaps it has "
                 "not started again"));
  REQUIRE(second.run(Phase::kFailed, seconds(20)));
  for (const int rank : {0, 1}) CHECK(message(second.member(rank)) == "rank 2 could not join it: why");
}

TEST_CASE("bootstrap/rendezvous: a failure that the store refuses to read costs one life, not all",
          "[bootstrap][fast]") {
  auto store = std::make_shared<RefusingStore>();
  {
    World world(2, store);
    store->refused = world.options(0).key_prefix + "/failed";
    for (int rank = 0; rank < 2; ++rank) {
      world.options(rank).process_started_ms = 1000;
      world.options(rank).wall_ms = [] { return 2000; };
    }
    world.start_all();
    REQUIRE(world.run(Phase::kFailed, seconds(2)));
    CHECK(message(world.member(0)) == "no seal of this job");
    CHECK(store->refused.empty());
  }
  World late(2, store, 3);  // rank 0 begins after rank 1 has ended, and its clock is ahead
  store->refused = late.options(0).key_prefix + "/failed";
  for (int rank = 0; rank < 2; ++rank) {
    late.options(rank).process_started_ms = rank == 0 ? 5000 : 1000;
    late.options(rank).wall_ms = [] { return 3000; };
    late.options(rank).deadline = core::Deadline::at(late.now + seconds(1000));
  }
  late.start(1);
  REQUIRE(late.member(1).step(late.now) == Phase::kFailed);
  late.start(0);
  late.run_for(seconds(50));
  CHECK(late.member(0).phase() == Phase::kPending);
  late.run_for(seconds(20));
  CHECK(message(late.member(0)) == "no seal of this job");
  World next(2, store, 7);
  for (int rank = 0; rank < 2; ++rank) next.options(rank).process_started_ms = 10'000'000;
  next.start_all();
  REQUIRE(next.run(Phase::kReady));
  store->refused = next.options(0).key_prefix + "/failed";
  CHECK(
      announce_failure(*store, next.options(0).key_prefix, 1, core::Status(core::Code::kClosed, "why"), 1, 1).is_ok());
  CHECK(store->refused.empty());
}

TEST_CASE("bootstrap/rendezvous: a member that was gone before the group was made is named at once",
          "[bootstrap][fast]") {
  World world(3);
  const auto departures = std::make_shared<Departures>();
  departures->add(core::EngineId{7777}, core::Status(core::Code::kPeerDead, "connection reset"));
  world.options(1).departures = departures;
  world.options(1).presumed = {{}, {}, {core::EngineId{7777}, "host-b pid 9"}};
  world.start(0);
  world.run_for(milliseconds(100));
  world.start(1);
  REQUIRE(world.run(Phase::kFailed, seconds(1)));
  for (const int rank : {0, 1})
    CHECK(contains(message(world.member(rank)), "rank 2 (host-b pid 9) of group 'g' is gone"));
}

TEST_CASE("bootstrap/rendezvous: who leaves when the group is valid takes it from nobody who has not looked yet",
          "[bootstrap][fast]") {
  World world(3);
  const auto departures = std::make_shared<Departures>();
  world.options(1).departures = departures;
  world.start_all();
  const auto has_confirmed = [&] {
    return world.member(1).waiting_for() == "waiting for all ranks to confirm the roster";
  };
  while (world.member(1).phase() == Phase::kPending && !(has_confirmed() && world.member(2).phase() == Phase::kReady)) {
    world.member(0).step(world.now);
    world.member(2).step(world.now);
    if (!has_confirmed()) world.member(1).step(world.now);
    world.now += milliseconds(1);
  }
  REQUIRE(world.member(1).phase() == Phase::kPending);
  departures->add(world.options(2).self.engine, core::Status(core::Code::kPeerDead, "connection reset"));
  world.stop(2);
  CHECK(world.member(1).step(world.now) == Phase::kReady);
}

TEST_CASE("bootstrap/rendezvous: who waits in vain hears in which life the absent were last seen",
          "[bootstrap][fast]") {
  const auto store = std::make_shared<MemoryStore>();
  World ours(3, store);
  World theirs(3, store, 2);
  for (World* world : {&ours, &theirs})
    for (int rank = 0; rank < 3; ++rank) world->options(rank).lives_prefix = lives_key_prefix("g");
  theirs.options(2).key_prefix = "hybridps/g/other.0.4";
  theirs.options(2).self.incarnation = "other.0.4";
  theirs.start(2);
  theirs.run_for(seconds(1));
  ours.start(0);
  ours.start(1);
  REQUIRE(ours.run(Phase::kFailed, seconds(120)));
  CHECK(contains(message(ours.member(0)),
                 "rank 2 was last seen in life 'other.0.4' of this group, this rank is in 'run.0.0'"));
}
