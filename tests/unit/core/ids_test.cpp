#include "hybridps/core/ids.h"

#include <unordered_set>

#include "tests/support/catch.h"

using namespace hybridps::core;

TEST_CASE("core/ids: made ids are distinct and never zero", "[core][fast]") {
  std::unordered_set<EngineId> engines;
  std::unordered_set<GroupUid> groups;
  for (int i = 0; i < 1000; ++i) {
    engines.insert(make_engine_id());
    groups.insert(make_group_uid());
  }
  CHECK(engines.size() == 1000);
  CHECK(groups.size() == 1000);
  CHECK_FALSE(engines.contains(EngineId{}));
}

TEST_CASE("core/ids: text has a fixed width", "[core][fast]") {
  CHECK(to_string(EngineId{0xab}) == "00000000000000ab");
  CHECK(to_string(GroupUid{1, 0xf}) == "0000000000000001000000000000000f");
}

TEST_CASE("core/ids: group uids are ordered by their high half first", "[core][fast]") {
  CHECK(GroupUid{1, 9} < GroupUid{2, 0});
  CHECK(GroupUid{1, 9} == GroupUid{1, 9});
}
