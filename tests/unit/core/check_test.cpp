#include "hybridps/core/check.h"

#include "tests/support/catch.h"
#include "tests/support/check.h"

using hybridps::core::check;
using hybridps::core::checks_failed;

TEST_CASE("core/check: what does not hold is counted and the process goes on", "[core][fast]") {
  const auto before = checks_failed();
  CHECK(check(true, "one is one"));
  CHECK(checks_failed() == before);
  for (int i = 0; i < 3; ++i) {
    CHECK_FALSE(check(false, "tests fail on purpose"));
    ++hybridps::test::checks_expected_to_fail;
  }
  CHECK(checks_failed() == before + 3);
}
