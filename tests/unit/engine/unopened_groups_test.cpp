#include "hybridps/engine/unopened_groups.h"

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using engine::UnopenedGroups;
using std::chrono::seconds;

wire::Message of(std::uint64_t group, std::uint64_t sequence) {
  return {{{}, core::GroupUid{1, group}, 0}, 0, wire::Probe{sequence, {}}};
}

UnopenedGroups::KeepLimits limits(std::size_t messages) {
  UnopenedGroups::KeepLimits l;
  l.messages = messages;
  l.keep_for = seconds(10);
  return l;
}

const core::TimePoint kStart{seconds(1000)};

}  // namespace

TEST_CASE("engine/unopened_groups: a group takes its own messages, in order, once", "[engine][fast]") {
  UnopenedGroups groups(limits(100));
  for (std::uint64_t i = 0; i < 10; ++i) REQUIRE(groups.keep({of(i % 2, i), {}, {}}, kStart).empty());
  const auto taken = groups.take(core::GroupUid{1, 1});
  REQUIRE(taken.why_incomplete.empty());
  REQUIRE(taken.messages.size() == 5);
  for (std::uint64_t i = 0; i < 5; ++i) CHECK(taken.messages[i].message == of(1, 2 * i + 1));
  CHECK(groups.take(core::GroupUid{1, 1}).messages.empty());
  CHECK(groups.take(core::GroupUid{1, 0}).messages.size() == 5);
}

TEST_CASE("engine/unopened_groups: who has most of what is too much loses it and is told so", "[engine][fast]") {
  UnopenedGroups groups(limits(10));
  for (std::uint64_t i = 0; i < 3; ++i) REQUIRE(groups.keep({of(0, i), {}, {}}, kStart).empty());
  for (std::uint64_t i = 0; i < 7; ++i) REQUIRE(groups.keep({of(1, i), {}, {}}, kStart).empty());
  CHECK(groups.keep({of(0, 3), {}, {}}, kStart).size() == 7);  // an eleventh, of the other group
  CHECK(groups.keep({of(1, 7), {}, {}}, kStart).size() == 1);  // nothing more is kept of it
  for (std::uint64_t i = 4; i < 10; ++i) REQUIRE(groups.keep({of(0, i), {}, {}}, kStart).empty());
  const auto lost = groups.take(core::GroupUid{1, 1});
  CHECK(lost.messages.empty());
  CHECK(lost.why_incomplete.find("more than 10 messages") != std::string::npos);
  const auto whole = groups.take(core::GroupUid{1, 0});
  CHECK(whole.why_incomplete.empty());
  CHECK(whole.messages.size() == 10);
  // Told once: another life of that uid starts clean.
  CHECK(groups.take(core::GroupUid{1, 1}).why_incomplete.empty());
  // All that was counted has been given back.
  for (std::uint64_t i = 0; i < 10; ++i) REQUIRE(groups.keep({of(2, i), {}, {}}, kStart).empty());
}

TEST_CASE("engine/unopened_groups: what waited for too long is dropped", "[engine][fast]") {
  UnopenedGroups groups(limits(100));
  CHECK(groups.next_due() == core::TimePoint::max());
  (void)groups.keep({of(0, 0), {}, {}}, kStart);
  (void)groups.keep({of(0, 1), {}, {}}, kStart + seconds(9));
  (void)groups.keep({of(1, 0), {}, {}}, kStart + seconds(5));
  CHECK(groups.next_due() == kStart + seconds(10));
  CHECK(groups.expire(kStart + seconds(10) - core::Duration(1)).empty());
  CHECK(groups.expire(kStart + seconds(10)).size() == 2);  // by its first message
  CHECK(groups.next_due() == kStart + seconds(15));
  const auto taken = groups.take(core::GroupUid{1, 0});
  CHECK(taken.messages.empty());
  CHECK(taken.why_incomplete.find("waited for 10") != std::string::npos);
  CHECK(groups.expire(kStart + seconds(15)).size() == 1);
  CHECK(groups.next_due() == core::TimePoint::max());
}
