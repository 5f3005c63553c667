#include "hybridps/core/check.h"

#include <atomic>

#include "hybridps/core/clock.h"
#include "hybridps/core/log.h"

namespace hybridps::core {
namespace {

std::atomic<std::uint64_t> failed{0};

}  // namespace

void check_failed(const char* what, const char* file, int line) noexcept {
  failed.fetch_add(1, std::memory_order_relaxed);
  static LogRate rate(from_seconds(10));
  if (rate.permit())
    log_error("hybridps has a bug; please report it: \"", what, "\" is not true (", file, ":", line, ")");
}

std::uint64_t checks_failed() noexcept { return failed.load(std::memory_order_relaxed); }

}  // namespace hybridps::core
