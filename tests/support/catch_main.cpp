// tests/support/catch_main.cpp: the one main() of the unit tests, compiled once.
#define CATCH_CONFIG_RUNNER
#include "tests/support/catch.h"

#include <cstdio>

#include "hybridps/core/check.h"
#include "tests/support/check.h"

namespace {

#if HYBRIDPS_CATCH_MAJOR >= 3
using Listener = Catch::EventListenerBase;
const std::string& name_of(const Catch::TestCaseStats& stats) { return stats.testInfo->name; }
#else
using Listener = Catch::TestEventListenerBase;
const std::string& name_of(const Catch::TestCaseStats& stats) { return stats.testInfo.name; }
#endif

/// A line for each case that fails or crashes, which scripts/test looks for: reporters break names into several.
class FailedCases : public Listener {
 public:
  using Listener::Listener;
  void testCaseEnded(const Catch::TestCaseStats& stats) override {
    if (stats.totals.testCases.failed == 0) return;
    std::printf("\nfailed case: %s\n", name_of(stats).c_str());
    std::fflush(stdout);
  }
};
CATCH_REGISTER_LISTENER(FailedCases)

}  // namespace

int main(int argc, char* argv[]) {
  const int failed = Catch::Session().run(argc, argv);
  if (hybridps::core::checks_failed() == hybridps::test::checks_expected_to_fail) return failed;
  std::fprintf(stderr, "a core::check() has failed, see above\n");
  return failed != 0 ? failed : 1;
}
