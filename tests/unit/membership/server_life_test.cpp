#include "hybridps/membership/server_life.h"

#include "tests/support/catch.h"

using hybridps::membership::ServerLife;
using Phase = ServerLife::LifePhase;

TEST_CASE("membership/server_life: a server goes on, never back", "[membership][fast]") {
  ServerLife life(3);
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

TEST_CASE("membership/server_life: ranks have no place in the table", "[membership][fast]") {
  ServerLife life(3);
  CHECK_FALSE(life.advance(2, Phase::kGone));
  CHECK_FALSE(life.is_gone(2));
}
