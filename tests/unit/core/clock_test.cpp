#include "hybridps/core/clock.h"

#include "tests/support/catch.h"

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
