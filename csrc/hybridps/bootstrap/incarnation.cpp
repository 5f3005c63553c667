#include "hybridps/bootstrap/incarnation.h"

#include <cstdlib>

#include "hybridps/core/text.h"

namespace hybridps::bootstrap {
namespace {

std::string variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): read only
  return value == nullptr || *value == '\0' ? otherwise : core::printable(value);
}

}  // namespace

std::string IncarnationCounter::next(std::string_view group_name) {
  return next(group_name, variable("TORCHELASTIC_RUN_ID", "none"), variable("TORCHELASTIC_RESTART_COUNT", "0"));
}

std::string IncarnationCounter::next(std::string_view group_name, std::string_view run_id,
                                     std::string_view restart_count) {
  std::uint64_t count = 0;
  {
    const core::MutexLock lock(mutex_);
    count = counts_[std::string(group_name)]++;
  }
  return std::string(run_id) + "." + std::string(restart_count) + "." + std::to_string(count);
}

std::string lives_key_prefix(std::string_view group_name) { return "hybridps/" + std::string(group_name); }

std::string group_key_prefix(std::string_view group_name, std::string_view incarnation) {
  return lives_key_prefix(group_name) + "/" + std::string(incarnation);
}

}  // namespace hybridps::bootstrap
