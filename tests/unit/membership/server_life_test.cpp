#include "hybridps/membership/server_life.h"

#include <string>
#include <vector>

#include "tests/support/catch.h"

using hybridps::membership::ServerLife;
using Phase = ServerLife::LifePhase;

TEST_CASE("membership/server_life: a server goes on, never back", "[membership][fast]") {
  ServerLife life(3, 3);
  CHECK(life.of(3) == Phase::kMember);
  CHECK_FALSE(life.any(Phase::kGone));
  CHECK(life.advance(4, Phase::kLeaving));
  CHECK_FALSE(life.advance(4, Phase::kLeaving));
  CHECK(life.is_leaving(4));
  CHECK(life.is_out(4));
  CHECK_FALSE(life.is_gone(4));
  CHECK(life.of(3) == Phase::kMember);
  CHECK(life.advance(4, Phase::kReleased));
  CHECK_FALSE(life.any(Phase::kLeaving));
  CHECK(life.is_leaving(4));
  CHECK(life.advance(4, Phase::kGone));
  CHECK(life.is_gone(4));
  CHECK_FALSE(life.is_leaving(4));
  CHECK_FALSE(life.advance(4, Phase::kLeaving));
  CHECK(life.advance(5, Phase::kReported));
  CHECK_FALSE(life.is_out(5));
  CHECK(life.advance(5, Phase::kGone));
}

TEST_CASE("membership/server_life: newcomers become members together, or are forgotten", "[membership][fast]") {
  const auto engine = [](std::uint64_t number) { return hybridps::core::EngineId{number}; };
  const auto member = [&](std::uint64_t number) {
    return hybridps::schedule::Member{engine(number), "host" + std::to_string(number)};
  };
  const hybridps::core::Status gone(hybridps::core::Code::kPeerDead, "it ended");
  ServerLife life(3, 1);
  CHECK(life.of(4) == Phase::kAbsent);
  CHECK_FALSE(life.advance(4, Phase::kGone));
  life.expect(2);
  CHECK(life.newcomers() == 2);
  CHECK_FALSE(life.is_next(3));
  CHECK(life.is_next(4));
  CHECK_FALSE(life.is_next(5));
  life.ask(4, member(4));
  CHECK(life.of(4) == Phase::kAsked);
  CHECK(life.is_next(5));
  CHECK(life.find_newcomer(engine(4)) == 4);
  CHECK_FALSE(life.find_newcomer(engine(5)));
  CHECK_FALSE(life.on_echo(4, ServerLife::kData));
  CHECK_FALSE(life.on_echo(4, ServerLife::kData));
  CHECK_FALSE(life.on_echo(4, ServerLife::kControl));
  CHECK(life.of(4) == Phase::kMet);
  CHECK_FALSE(life.advance(4, Phase::kGone));  // no member yet

  CHECK(life.part() == std::vector{engine(4)});
  CHECK(life.newcomers() == 0);
  life.expect(2);
  for (const int newcomer : {4, 5}) {
    life.ask(newcomer, member(static_cast<std::uint64_t>(newcomer)));
    life.on_echo(newcomer, ServerLife::kControl);
    CHECK(life.on_echo(newcomer, ServerLife::kData) == (newcomer == 5));
  }
  CHECK(life.are_all_met());
  CHECK(life.lose(5, gone));
  CHECK_FALSE(life.lose(5, gone));
  CHECK(life.is_missing(5));
  CHECK(life.admit().size() == 2);
  CHECK(life.of(4) == Phase::kMember);
  CHECK(life.newcomers_begin() == 6);
  CHECK_FALSE(life.are_all_met());
  const auto lost = life.take_lost();
  REQUIRE(lost.size() == 1);
  CHECK(lost.begin()->first == 5);
  CHECK_FALSE(life.is_missing(5));
  CHECK(life.advance(5, Phase::kGone));
  CHECK(life.is_missing(5));
}

TEST_CASE("membership/server_life: ranks have no place in the table", "[membership][fast]") {
  ServerLife life(3, 1);
  CHECK_FALSE(life.advance(2, Phase::kGone));
  CHECK_FALSE(life.is_gone(2));
}
