#include "hybridps/schedule/group_windows.h"

#include <algorithm>
#include <map>
#include <random>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using schedule::GroupWindows;

}  // namespace

TEST_CASE("schedule/group_windows: what is kept of each member is what all its groups say", "[schedule][fast]") {
  std::mt19937 random(3);
  GroupWindows windows({});
  std::map<core::GroupUid, int> open;
  for (int step = 0; step < 600; ++step) {
    const core::GroupUid uid{1, random() % 12};
    switch (random() % 5) {
      case 0:
      case 1: {
        const int ranks = 2 + static_cast<int>(random() % 6);
        const int servers = random() % 3 == 0 ? 1 : 0;
        std::vector<schedule::Member> members;
        std::vector<int> node_of;
        for (int rank = 0; rank < ranks + servers; ++rank)
          members.push_back({core::EngineId{100 + (random() % 5) * 8 + static_cast<std::uint64_t>(rank)}, "host"});
        for (int rank = 0; rank < ranks; ++rank) node_of.push_back(rank);
        windows.open(uid, schedule::Members(members),
                     schedule::Topology(node_of, 0, {}, std::vector<double>(static_cast<std::size_t>(servers), 1.0)));
        break;
      }
      case 2: windows.close(uid); break;
      case 3: windows.set_step(uid, static_cast<std::uint16_t>(random() % 4)); break;
      default: windows.follow(static_cast<double>(random() % 5) * 1e9, random() % 2 == 0);
    }
    std::map<core::EngineId, GroupWindows::Window> wanted;
    for (const auto& [of, group] : windows.groups())
      for (std::size_t member = 0; member < group.bytes.size(); ++member) {
        if (group.bytes[member] == 0) continue;
        auto& window =
            wanted.emplace(group.members.engine(member), GroupWindows::Window{group.bytes[member]}).first->second;
        window.bytes = std::min(window.bytes, group.bytes[member]);
        window.beside_servers |= group.topology.servers() > 0;
      }
    const auto found = windows.by_member();
    REQUIRE(found.size() == wanted.size());
    for (const auto& [engine, window] : wanted) {
      REQUIRE(found.at(engine).bytes == window.bytes);
      REQUIRE(found.at(engine).beside_servers == window.beside_servers);
    }
  }
}
