// hybridps/core/check.h: invariants of our own that every build checks.
//
// Why      assert() is gone from optimized builds, also from those of the unit tests. To end the user's process is no
//          answer to a mistake of ours. So code that finds a broken invariant stops before it corrupts anything, and
//          fails the operation or the group. In unit programs a failed check fails the program
//          (tests/support/catch_main.cpp).
// Threads  any.
#pragma once

#include <cstdint>

namespace hybridps::core {

/// Counts the failed check and logs a line that names the place, at most one line in 10 s.
[[gnu::cold]] void check_failed(const char* what, const char* file, int line) noexcept;

/// Returns `holds`, which must be true. `what`: the invariant in words, for the log line.
[[nodiscard]] inline bool check(bool holds, const char* what, const char* file = __builtin_FILE(),
                                int line = __builtin_LINE()) noexcept {  // clang before 15 has no std::source_location
  if (holds) [[likely]]
    return true;
  check_failed(what, file, line);
  return false;
}

/// The number of failed checks in this process so far.
std::uint64_t checks_failed() noexcept;

}  // namespace hybridps::core
