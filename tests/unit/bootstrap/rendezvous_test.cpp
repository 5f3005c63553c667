// How members of a group agree on a roster.
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "rendezvous_world.h"

using namespace hybridps;
using namespace hybridps::bootstrap;
using namespace hybridps::bootstrap::testing;

namespace {

/// Ranks of one node that cannot see each other, as (rank, those it reports).
auto prover(int rank, std::map<int, std::vector<int>> blind, int* calls = nullptr) {
  return [=](const Roster& roster) {
    if (calls != nullptr) ++*calls;
    std::vector<int> unproven;
    const auto at = blind.find(rank);
    if (at != blind.end()) {
      for (const int other : at->second) {
        if (roster.node_of[static_cast<std::size_t>(other)] == roster.node_of[static_cast<std::size_t>(rank)]) {
          unproven.push_back(other);
        }
      }
    }
    return unproven.empty() ? MemoryProof::ok() : MemoryProof::unproven_with(unproven);
  };
}

/// The shelf of one node, which may refuse, lose or spoil what it gets.
class TestShelf final : public NodeShelf {
 public:
  ShelfClaim claim(std::uint64_t name) override {
    if (has_none) return ShelfClaim::kNone;
    return claimed_.insert(name).second ? ShelfClaim::kOurs : ShelfClaim::kOthers;
  }
  void put(std::uint64_t name, std::span<const std::uint8_t> value) override {
    ++puts;
    if (loses) return;
    values_[name] = Bytes(value.begin(), value.end());
    if (spoils) values_[name].resize(value.size() / 2);
    if (forges) {
      Roster roster = decode_roster(value).value();
      roster.members[0].data_address = {6, 6, 6};
      values_[name] = encode(roster).value();
    }
  }
  std::optional<Bytes> look(std::uint64_t name) override {
    ++looks;
    const auto found = values_.find(name);
    return hides || found == values_.end() ? std::nullopt : std::optional<Bytes>(found->second);
  }
  void clear(std::uint64_t name) override {
    values_.erase(name);
    ++clears;
  }
  Bytes digest_of(std::span<const std::uint8_t> value) const override {
    std::uint32_t hash = 0;
    for (const std::uint8_t byte : value) hash = hash * 31 + byte;
    return {static_cast<std::uint8_t>(hash), static_cast<std::uint8_t>(hash >> 8),
            static_cast<std::uint8_t>(hash >> 16)};
  }
  bool has_none = false;
  bool loses = false;
  bool spoils = false;
  bool forges = false;
  bool hides = false;
  int looks = 0;
  int puts = 0;
  int clears = 0;

 private:
  std::set<std::uint64_t> claimed_;
  std::map<std::uint64_t, Bytes> values_;
};

/// Counts who reads rosters.
class RosterReads final : public KeyValueStore {
 public:
  core::Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    return store_.set(key, value);
  }
  core::Result<std::optional<Bytes>> try_get(std::string_view key) override {
    if (key.find("/roster/") != std::string_view::npos) ++count;
    return store_.try_get(key);
  }
  int count = 0;

 private:
  MemoryStore store_;
};

}  // namespace

TEST_CASE("bootstrap/rendezvous: members stepped in any order agree on one roster", "[bootstrap][fast]") {
  for (int size = 1; size <= 16; ++size) {
    for (unsigned seed = 0; seed < 8; ++seed) {
      World world(size, std::make_shared<MemoryStore>(), seed);
      world.start_all();
      REQUIRE(world.run(Phase::kReady));
      world.check_agreement();
      const Roster& roster = world.member(0).roster();
      CHECK(roster.node_count() == (size + 3) / 4);
      CHECK(roster.uid != core::GroupUid{});
    }
  }
}

TEST_CASE("bootstrap/rendezvous: a group of one is ready at once without the store", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World world(1, store);
  int calls = 0;
  world.options(0).prove = prover(0, {}, &calls);
  world.start(0);
  CHECK(world.member(0).step(world.now) == Phase::kReady);
  CHECK(store->operation_count() == 0);
  CHECK(calls == 1);
  CHECK(world.member(0).roster().node_of == std::vector<int>{0});
}

TEST_CASE("bootstrap/rendezvous: a roster of more than 1 MiB is in several values", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World world(40, store);
  for (int rank = 0; rank < 40; ++rank) {
    Bytes& address = world.options(rank).self.data_address;
    std::mt19937 random(static_cast<unsigned>(rank));
    for (std::size_t i = 0; i < kAddressBytesMax; ++i) address.push_back(static_cast<std::uint8_t>(random()));
    address.resize(kAddressBytesMax);
  }
  world.start_all();
  REQUIRE(world.run(Phase::kReady));
  world.check_agreement();
  std::size_t parts = 0;
  for (const auto& [key, value] : store->contents()) {
    CHECK(value.size() <= (std::size_t{1} << 20));
    parts += key.find("/roster/") != std::string::npos ? 1 : 0;
  }
  CHECK(parts == 2);
}

TEST_CASE("bootstrap/rendezvous: more members than a batch agree", "[bootstrap][fast]") {
  World world(3 * Rendezvous::kBatch);
  world.start_all();
  REQUIRE(world.run(Phase::kReady));
  world.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: nodes are numbered by their first rank", "[bootstrap][fast]") {
  World world(5);
  const char* nodes[] = {"node:z", "node:a", "node:z", "node:m", "node:a"};
  for (int rank = 0; rank < 5; ++rank) world.options(rank).self.node_identity = nodes[rank];
  world.start_all();
  REQUIRE(world.run(Phase::kReady));
  CHECK(world.member(3).roster().node_of == std::vector<int>{0, 1, 0, 2, 1});
}

TEST_CASE("bootstrap/rendezvous: store calls of a member do not grow with the group", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World world(16, store);
  world.start_all();
  for (int rank = 0; rank < 16; ++rank) world.member(rank).step(world.now);  // all publish
  std::size_t before = store->operation_count();
  world.now += milliseconds(10);
  world.member(0).step(world.now);  // collects, proposes
  CHECK(store->operation_count() - before <= 15 + 2 + 15);
  before = store->operation_count();
  world.now += milliseconds(10);
  world.member(5).step(world.now);
  CHECK(store->operation_count() - before <= 4);  // head, roster, ack, failed
}

TEST_CASE("bootstrap/rendezvous: polls grow from 1 ms to 20 ms and to 50 ms after 5 s", "[bootstrap][fast]") {
  World world(2);
  world.start(1);
  auto gap = [&] {
    world.member(1).step(world.now);
    const auto pause = world.member(1).next_step() - world.now;
    world.now = world.member(1).next_step();
    return pause;
  };
  CHECK(gap() <= milliseconds(2));
  const auto begin = world.now;
  while (world.now < begin + seconds(1)) CHECK(gap() <= milliseconds(20));
  CHECK(gap() == milliseconds(20));
  while (world.now < begin + seconds(7)) CHECK(gap() <= milliseconds(50));
  CHECK(gap() == milliseconds(50));
}

TEST_CASE("bootstrap/rendezvous: calls before next_step do not touch the store", "[bootstrap][fast]") {
  auto store = std::make_shared<MemoryStore>();
  World world(2, store);
  world.start(1);
  world.member(1).step(world.now);
  const std::size_t before = store->operation_count();
  for (int i = 0; i < 100; ++i) world.member(1).step(world.now);
  CHECK(store->operation_count() == before);
}

TEST_CASE("bootstrap/rendezvous: a leader that comes late finds everyone", "[bootstrap][fast]") {
  World world(6);
  for (int rank = 1; rank < 6; ++rank) world.start(rank);
  world.run_for(seconds(20));
  world.start(0);
  REQUIRE(world.run(Phase::kReady));
  world.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: all members know whether rank 0 names dedicated servers", "[bootstrap][fast]") {
  for (const bool names : {false, true}) {
    World world(3);
    world.options(0).names_servers = names;
    world.options(1).names_servers = !names;
    for (int r = 0; r < 3; ++r) world.start(r);
    REQUIRE(world.run(Phase::kReady));
    for (int r = 0; r < 3; ++r) CHECK(world.member(r).roster().names_servers == names);
  }
}

TEST_CASE("bootstrap/rendezvous: ranks without proven shared memory get nodes of their own", "[bootstrap][fast]") {
  struct Example {
    std::map<int, std::vector<int>> blind;
    std::vector<int> node_of;
  };
  const Example examples[] = {
      {{{2, {0, 1, 3}}, {0, {2}}, {1, {2}}, {3, {2}}}, {0, 0, 1, 0}},  // rank 2 sees nobody
      {{{2, {0, 1, 3}}}, {0, 0, 1, 0}},                                // and only it says so
      {{{0, {2, 3}}, {1, {2, 3}}}, {0, 0, 1, 1}},                      // two halves
      {{{0, {1, 2, 3}}, {1, {0, 2, 3}}, {2, {3}}}, {0, 1, 2, 3}},      // nobody sees anybody
      {{{1, {0}}}, {0, 1, 0, 0}},                                      // one pair
  };
  for (const Example& example : examples) {
    for (unsigned seed = 0; seed < 5; ++seed) {
      World world(4, std::make_shared<MemoryStore>(), seed);
      std::vector<int> calls(4);
      for (int rank = 0; rank < 4; ++rank) {
        world.options(rank).self.node_identity = "node:same";
        world.options(rank).prove = prover(rank, example.blind, &calls[static_cast<std::size_t>(rank)]);
      }
      world.start_all();
      REQUIRE(world.run(Phase::kReady));
      world.check_agreement();
      CHECK(world.member(0).roster().node_of == example.node_of);
      for (const int count : calls) CHECK(count == 2);  // once per roster
    }
  }
}

TEST_CASE("bootstrap/rendezvous: stale records and unproven pairs together settle", "[bootstrap][fast]") {
  for (unsigned seed = 0; seed < 20; ++seed) {
    auto store = std::make_shared<MemoryStore>();
    World first(6, store, seed);
    first.start_all();
    REQUIRE(first.run(Phase::kReady));
    World second(6, store, seed);
    for (int rank = 0; rank < 6; ++rank) {
      second.options(rank).self.node_identity = "node:same";
      second.options(rank).prove = prover(rank, {{1, {0}}, {4, {2, 3}}});
    }
    for (int rank = 0; rank < 6; ++rank) {
      second.start(rank);
      second.run_for(milliseconds(30));
    }
    REQUIRE(second.run(Phase::kReady));
    second.check_agreement();
    CHECK(second.member(0).roster().node_of == std::vector<int>{0, 1, 0, 0, 1, 0});
  }
}

TEST_CASE("bootstrap/rendezvous: a pending proof is asked again until it is decided", "[bootstrap][fast]") {
  World world(3);
  int asked = 0;
  world.options(1).prove = [&](const Roster&) { return ++asked < 50 ? MemoryProof::pending() : MemoryProof::ok(); };
  world.start_all();
  world.run_for(milliseconds(20));
  CHECK(world.member(1).next_step() <= world.now + milliseconds(1));
  REQUIRE(world.run(Phase::kReady));
  CHECK(asked == 50);
  world.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: a proof that reports nonsense is taken for what it proves", "[bootstrap][fast]") {
  World world(5);
  world.options(1).prove = [](const Roster&) {
    return MemoryProof::unproven_with({1, 4, -3, 99});
  };  // itself, other node
  world.start_all();
  REQUIRE(world.run(Phase::kReady));
  CHECK(world.member(0).roster().node_of == std::vector<int>{0, 0, 0, 0, 1});
}

TEST_CASE("bootstrap/rendezvous: members in threads of their own agree", "[bootstrap][threads]") {
  constexpr int kSize = 8;
  auto store = std::make_shared<MemoryStore>();
  World world(kSize, store);
  std::vector<std::unique_ptr<Rendezvous>> members;
  for (int rank = 0; rank < kSize; ++rank) {
    world.options(rank).deadline = core::Deadline::after(seconds(60));
    members.push_back(std::make_unique<Rendezvous>(store, world.options(rank)));
  }
  std::vector<std::thread> threads;
  for (auto& member : members) {
    threads.emplace_back([&member] {
      while (member->step(core::Clock::now()) == Phase::kPending) std::this_thread::sleep_until(member->next_step());
    });
  }
  for (auto& thread : threads) thread.join();
  for (auto& member : members) {
    REQUIRE(member->phase() == Phase::kReady);
    CHECK(member->roster() == members[0]->roster());
  }
}

TEST_CASE("bootstrap/rendezvous: a named life is ready like any other", "[bootstrap][fast]") {
  World world(5);
  name_life(world, 5, "uuid 1");
  world.start_all();
  REQUIRE(world.run(Phase::kReady));
  world.check_agreement();
}

TEST_CASE("bootstrap/rendezvous: rank 0 asks after those who are late, and few after rank 0", "[bootstrap][fast]") {
  World world(6);
  std::vector<ExpectedMember> all;
  for (int rank = 0; rank < 6; ++rank) all.push_back({world.options(rank).self.engine, "host"});
  for (int rank = 0; rank < 6; ++rank) world.options(rank).presumed = all;
  for (const int rank : {0, 1, 2, 3, 5}) world.start(rank);
  world.run_for(milliseconds(100));
  CHECK(world.member(0).awaited() == std::vector{all[4].engine});
  for (const int rank : {1, 2}) CHECK(world.member(rank).awaited() == std::vector{all[0].engine});
  for (const int rank : {3, 5}) CHECK(world.member(rank).awaited().empty());
  world.start(4);
  REQUIRE(world.run(Phase::kReady));
  for (int rank = 0; rank < 6; ++rank) CHECK(world.member(rank).awaited().empty());
}

TEST_CASE("bootstrap/rendezvous: rank 0 finds regions from what the nodes have measured, and all members hear of them",
          "[bootstrap][fast]") {
  using Table = std::vector<std::vector<std::uint32_t>>;
  for (const bool are_found : {true, false}) {
    World world(12);  // three nodes
    Table seen;
    for (int rank = 0; rank < 12; ++rank) {
      world.options(rank).prove = [rank, turns = 3](const Roster&) mutable {
        if (--turns > 0) return MemoryProof::pending();
        const auto node = static_cast<std::uint32_t>(rank / 4);
        return MemoryProof::ok(rank % 4 == 0 ? std::vector{node + 1, node + 2, node + 3}
                                             : std::vector<std::uint32_t>());
      };
      world.options(rank).find_regions = [&seen, are_found, rank](const Table& round_trips) {
        CHECK(rank == 0);
        seen = round_trips;
        return are_found ? std::vector{0, 1, 0} : std::vector<int>();
      };
    }
    world.start_all();
    REQUIRE(world.run(Phase::kReady));
    world.check_agreement();
    CHECK(seen == Table{{1, 2, 3}, {2, 3, 4}, {3, 4, 5}});
    CHECK(world.member(11).roster().region_of == (are_found ? std::vector{0, 1, 0} : std::vector<int>()));
  }
}

// ---- a node's shelf

TEST_CASE("bootstrap/rendezvous: one member of a node reads the roster for all, or each where that fails",
          "[bootstrap][fast]") {
  struct Example {
    bool has_none, loses, spoils, forges;
    int reads;  // of 8 members on two nodes; rank 0 has made the roster
  };
  for (const Example& example : {Example{false, false, false, false, 1}, Example{true, false, false, false, 7},
                                 Example{false, true, false, false, 7}, Example{false, false, true, false, 7},
                                 Example{false, false, false, true, 7}}) {
    for (unsigned seed = 0; seed < 5; ++seed) {
      const auto store = std::make_shared<RosterReads>();
      World world(8, store, seed);
      std::vector<std::shared_ptr<TestShelf>> shelves{std::make_shared<TestShelf>(), std::make_shared<TestShelf>()};
      for (const auto& shelf : shelves) {
        shelf->has_none = example.has_none;
        shelf->loses = example.loses;
        shelf->spoils = example.spoils;
        shelf->forges = example.forges;
      }
      for (int rank = 0; rank < 8; ++rank) world.options(rank).shelf = shelves[static_cast<std::size_t>(rank / 4)];
      world.start_all();
      const auto begin = world.now;
      REQUIRE(world.run(Phase::kReady));
      world.check_agreement();
      CHECK(store->count == example.reads);
      CHECK(world.now - begin < (example.loses ? Rendezvous::kShelfPatience + seconds(1) : seconds(1)));
      for (const auto& shelf : shelves) CHECK(shelf->puts == (example.has_none ? 0 : 1));
      for (int rank = 0; rank < 8; ++rank) world.stop(rank);
      for (const auto& shelf : shelves) CHECK(shelf->clears == shelf->puts);
    }
  }
}

TEST_CASE("bootstrap/rendezvous: who waits at the node's shelf looks there often, and rarely in the store",
          "[bootstrap][fast]") {
  const auto store = std::make_shared<MemoryStore>();
  World world(6, store);  // ranks 4 and 5 on the second node
  const auto shelf = std::make_shared<TestShelf>();
  for (const int rank : {4, 5}) world.options(rank).shelf = shelf;
  world.options(0).shelf = std::make_shared<TestShelf>();
  world.start_all();
  world.member(5).step(world.now);
  while (shelf->puts == 0) {
    for (int rank = 0; rank < 4; ++rank) world.member(rank).step(world.now);
    world.member(4).step(world.now);
    world.now += milliseconds(1);
  }
  shelf->hides = true;
  world.run_for(milliseconds(20));
  const std::size_t before = store->operation_count();
  const int looks = shelf->looks;
  const auto end = world.now + seconds(1);
  for (; world.now < end; world.now += milliseconds(1)) world.member(5).step(world.now);
  CHECK(store->operation_count() - before < 100);
  CHECK(shelf->looks - looks > 900);
  shelf->hides = false;
  REQUIRE(world.run(Phase::kReady));
}

TEST_CASE("bootstrap/rendezvous: a member that dies before it hands its node the roster is the one that is named",
          "[bootstrap][fast]") {
  World world(6);  // ranks 4 and 5 on the second node
  const auto shelf = std::make_shared<TestShelf>();
  shelf->loses = true;
  for (const int rank : {4, 5}) world.options(rank).shelf = shelf;
  world.options(0).shelf = std::make_shared<TestShelf>();
  world.options(4).prove = [](const Roster&) { return MemoryProof::pending(); };
  world.start_all();
  world.member(5).step(world.now);  // it publishes its record, and comes later than rank 4 to the roster
  while (shelf->puts == 0) {
    for (int rank = 0; rank < 5; ++rank) world.member(rank).step(world.now);
    world.now += milliseconds(1);
  }
  world.stop(4);
  REQUIRE(world.run(Phase::kFailed, seconds(70)));
  for (const int rank : {0, 1, 2, 3, 5})
    CHECK(contains(message(world.member(rank)), "waiting for ranks [4] to confirm the roster"));
}
