// tests/support/check.h: core::check() that fails on purpose.
#pragma once

#include <cstdint>

namespace hybridps::test {

/// How many have failed because a test wanted them to: the program passes if there are no others.
inline std::uint64_t checks_expected_to_fail = 0;

}  // namespace hybridps::test
