#include "hybridps/core/log.h"

#include <unistd.h>

#include <atomic>
#include <ostream>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/captured_stderr.h"
#include "tests/support/catch.h"

using namespace hybridps::core;
using std::chrono::seconds;

namespace {

using hybridps::test::CapturedStderr;

/// Counts how often it is formatted.
struct Counted {
  int* count;
};
std::ostream& operator<<(std::ostream& out, const Counted& counted) {
  ++*counted.count;
  return out;
}

}  // namespace

TEST_CASE("core/log: lines carry process and level", "[core][fast]") {
  const std::string prefix = "hybridps[" + std::to_string(getpid()) + "] ";
  CHECK(format_log_line(LogLevel::kWarn, "late") == prefix + "warn: late\n");
  CHECK(format_log_line(LogLevel::kError, "a\nb\n") == prefix + "error: a\n    b\n");
}

TEST_CASE("core/log: a line is UTF-8 whatever it is about", "[core][fast]") {
  CHECK(format_log_line(LogLevel::kWarn, "no file /tmp/\xff").ends_with("warn: no file /tmp/\\xff\n"));
}

TEST_CASE("core/log: lines above the level are neither written nor formatted", "[core][fast]") {
  int formatted = 0;
  const LogLevel before = log_level();
  CapturedStderr captured;
  set_log_level(LogLevel::kWarn);
  log_info("not seen", Counted{&formatted});
  log_warn("seen ", 3, Counted{&formatted});
  set_log_level(LogLevel::kDebug);
  log_debug("seen too");
  set_log_level(before);
  const std::string text = captured.finish();
  CHECK(formatted == 1);
  CHECK(text == format_log_line(LogLevel::kWarn, "seen 3") + format_log_line(LogLevel::kDebug, "seen too"));
}

TEST_CASE("core/log: level names go both ways", "[core][fast]") {
  for (const LogLevel level : {LogLevel::kError, LogLevel::kWarn, LogLevel::kInfo, LogLevel::kDebug}) {
    CHECK(parse_log_level(name_of(level)) == level);
  }
  CHECK(parse_log_level("WARNING") == LogLevel::kWarn);
  CHECK_FALSE(parse_log_level("loud").has_value());
}

TEST_CASE("core/log: the rate limit lets one through per interval and counts the rest", "[core][fast]") {
  LogRate rate{seconds(10)};
  const TimePoint start{seconds(1000)};
  CHECK(rate.permit(start) == 0u);
  CHECK_FALSE(rate.permit(start + seconds(1)).has_value());
  CHECK_FALSE(rate.permit(start + seconds(9)).has_value());
  CHECK(rate.permit(start + seconds(10)) == 2u);
  CHECK(rate.permit(start + seconds(20)) == 0u);
}

TEST_CASE("core/log: of many threads one passes the rate limit", "[core][threads]") {
  LogRate rate{seconds(10)};
  const TimePoint now{seconds(1000)};
  std::atomic<int> passed{0};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 1000; ++j) passed += rate.permit(now).has_value() ? 1 : 0;
    });
  }
  for (auto& thread : threads) thread.join();
  CHECK(passed == 1);
}
