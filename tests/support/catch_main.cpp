// tests/support/catch_main.cpp: the one main() of the unit tests, compiled once.
#define CATCH_CONFIG_RUNNER
#include "tests/support/catch.h"

#include <cstdio>

#include "hybridps/core/check.h"
#include "tests/support/check.h"

int main(int argc, char* argv[]) {
  const int failed = Catch::Session().run(argc, argv);
  if (hybridps::core::checks_failed() == hybridps::test::checks_expected_to_fail) return failed;
  std::fprintf(stderr, "a core::check() has failed, see above\n");
  return failed != 0 ? failed : 1;
}
