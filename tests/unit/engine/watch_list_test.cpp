#include "hybridps/engine/watch_list.h"

#include <algorithm>
#include <map>
#include <random>
#include <set>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using engine::WatchList;

core::EngineId id(int number) { return core::EngineId{100 + static_cast<std::uint64_t>(number)}; }

schedule::Members members_of(const std::vector<int>& numbers) {
  std::vector<schedule::Member> members;
  for (const int number : numbers) members.push_back({id(number), "host"});
  return schedule::Members(members);
}

std::set<core::EngineId> watched(const WatchList& list) {
  const auto found = list.watched();
  return {found.begin(), found.end()};
}

}  // namespace

TEST_CASE("engine/watch_list: an engine watches its successor, and the servers that are its own", "[engine][fast]") {
  WatchList list(id(1));
  list.set({1, 1}, {members_of({0, 1, 2, 8, 9, 10}), 3, false, true});
  CHECK(watched(list) == std::set<core::EngineId>{id(2), id(8)});  // server 0 is watched by rank 1 of 3
  CHECK(list.quick() == std::unordered_set<core::EngineId>{id(8), id(9), id(10)});
  CHECK(list.any_remote());
  list.set({1, 1}, {members_of({0, 1, 2}), 3, true, false});  // its members have changed
  CHECK(watched(list) == std::set<core::EngineId>{id(2)});
  CHECK(list.quick().size() == 3);
  CHECK_FALSE(list.any_remote());
  for (const int server : {8, 9, 10}) {
    WatchList of_server(id(server));
    of_server.set({1, 1}, {members_of({0, 1, 2, 8, 9, 10}), 3, false, true});
    CHECK(watched(of_server).count(id(0)) == 1);
  }
  list.close({1, 1});
  list.close({1, 1});
  CHECK(list.watched().empty());
  CHECK(list.quick().empty());
}

TEST_CASE("engine/watch_list: groups that close leave what the others watch", "[engine][fast]") {
  WatchList list(id(0));
  for (int other = 2; other < 40; ++other)
    list.set({1, static_cast<std::uint64_t>(other)}, {members_of({0, other % 4 + 1, 50}), 3, false, true});
  CHECK(watched(list) == std::set<core::EngineId>{id(1), id(2), id(3), id(4)});
  for (int other = 2; other < 40; ++other)
    if (other % 4 != 1) list.close({1, static_cast<std::uint64_t>(other)});
  CHECK(watched(list) == std::set<core::EngineId>{id(2)});
  CHECK(list.any_remote());
  for (int other = 2; other < 40; ++other) list.close({1, static_cast<std::uint64_t>(other)});
  CHECK(list.watched().empty());
  CHECK_FALSE(list.any_remote());
}

TEST_CASE("engine/watch_list: of silent members in a group, somebody watches one", "[engine][fast]") {
  std::mt19937 random(5);
  for (int round = 0; round < 200; ++round) {
    const int size = 2 + static_cast<int>(random() % 12);
    std::map<int, WatchList> lists;
    std::vector<std::vector<int>> groups;
    for (int engine = 0; engine < size; ++engine) lists.emplace(engine, WatchList(id(engine)));
    for (std::uint64_t group = 0; group < 1 + random() % 6; ++group) {
      std::vector<int> numbers;
      for (int engine = 0; engine < size; ++engine)
        if (group == 0 || random() % 2 == 0) numbers.push_back(engine);
      std::shuffle(numbers.begin(), numbers.end(), random);
      if (numbers.size() < 2) continue;
      for (const int engine : numbers)
        lists.at(engine).set({9, group}, {members_of(numbers), numbers.size(), false, true});
      groups.push_back(numbers);
    }
    if (random() % 2 == 0) {
      for (auto& [engine, list] : lists) list.close({9, 0});
      groups.erase(groups.begin());
    }
    // Any member of a group may fall silent, and any others with it: one that is not silent watches one that is.
    for (const std::vector<int>& group : groups) {
      std::set<int> silent{group[random() % group.size()]};
      for (const int engine : group)
        if (random() % 3 == 0 && silent.size() + 1 < group.size()) silent.insert(engine);
      bool found = false;
      for (const int engine : group)
        for (const int other : silent)
          found |= silent.count(engine) == 0 && lists.at(engine).watched().count(id(other)) > 0;
      CHECK(found);
    }
  }
}
