// hybridps/core/check.h: invariants of our own that are looked at in every build.
//
// Why      assert() is gone from optimised builds, also from the unit tests', and to end the user's process is no answer to a
//          mistake of ours. So who finds one stops short of what it would corrupt, and fails the operation or the group.
//          In unit programs a check that failed fails the program (tests/support/catch_main.cpp).
// Threads  any.
#pragma once

#include <cstdint>

namespace hybridps::core {

/// Counts it and writes a line that names the place, one in 10 s.
void check_failed(const char* what, const char* file, int line) noexcept;

/// Whether it holds, as it must. `what` should.
[[nodiscard]] inline bool check(bool holds, const char* what, const char* file = __builtin_FILE(),
                                int line = __builtin_LINE()) noexcept {  // clang before 15 has no std::source_location
  if (holds) [[likely]]
    return true;
  check_failed(what, file, line);
  return false;
}

/// Of this process so far.
std::uint64_t checks_failed() noexcept;

}  // namespace hybridps::core
