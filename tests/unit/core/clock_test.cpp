#include "hybridps/core/clock.h"

#include "tests/support/catch.h"
#include "tests/support/clock.h"

using namespace hybridps::core;
using std::chrono::milliseconds;
using std::chrono::seconds;

TEST_CASE("core/clock: a deadline passes at its point", "[core][fast]") {
  const TimePoint now{seconds(100)};
  const Deadline deadline = Deadline::after(seconds(2), now);
  CHECK_FALSE(deadline.has_passed(now + milliseconds(1999)));
  CHECK(deadline.has_passed(now + seconds(2)));
  CHECK(deadline.remaining(now) == seconds(2));
  CHECK(deadline.remaining(now + seconds(9)) == Duration::zero());
}

TEST_CASE("core/clock: never is the greatest deadline and does not pass", "[core][fast]") {
  const Deadline never;
  CHECK(never.is_never());
  CHECK(never == Deadline::never());
  CHECK_FALSE(never.has_passed(TimePoint::max()));
  CHECK(never.remaining() == Duration::max());
  CHECK(Deadline::at(TimePoint{seconds(1)}) < never);
}

TEST_CASE("core/clock: long timeouts saturate", "[core][fast]") {
  CHECK(Deadline::after(Duration::max()).is_never());
  CHECK(from_seconds(1e300) > std::chrono::hours(24 * 365));
  CHECK(from_seconds(-1e300) < Duration::zero());
  CHECK(from_seconds(0.25) == milliseconds(250));
  CHECK(to_seconds(milliseconds(1500)) == Approx(1.5));
}

TEST_CASE("core/clock: a test can stop the time and let it pass", "[core][fast]") {
  const TimePoint before = Clock::now();
  {
    hybridps::test::MovableClock clock;
    const TimePoint now = Clock::now();
    CHECK(now >= before);
    const Deadline deadline = Deadline::after(seconds(1800));
    clock.pass(seconds(1800) - milliseconds(1));
    CHECK(deadline.remaining() == milliseconds(1));
    CHECK_FALSE(deadline.has_passed());
    clock.pass(milliseconds(1));
    CHECK(deadline.has_passed());
    CHECK(Clock::now() == now + seconds(1800));
  }
  {
    hybridps::test::MovableClock clock(hybridps::test::MovableClock::Between::kGoesOn);
    clock.pass(seconds(3600));
    const TimePoint now = Clock::now();
    CHECK(now >= before + seconds(3600));
    while (Clock::now() == now) {  // goes on, or this test has no end
    }
  }
  CHECK(Clock::now() >= before);
  CHECK(Clock::now() < before + seconds(1800));
}
