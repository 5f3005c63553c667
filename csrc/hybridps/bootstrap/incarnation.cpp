#include "hybridps/bootstrap/incarnation.h"

#include <cstdlib>

#include "hybridps/core/text.h"

namespace hybridps::bootstrap {

std::string IncarnationCounter::next(std::string_view group_name) {
  const char* run_id = std::getenv("TORCHELASTIC_RUN_ID");  // NOLINT(concurrency-mt-unsafe): read only
  return next(group_name, run_id == nullptr || *run_id == '\0' ? "none" : core::printable(run_id));
}

std::string IncarnationCounter::next(std::string_view group_name, std::string_view run_id) {
  std::uint64_t count = 0;
  {
    const core::MutexLock lock(mutex_);
    count = counts_[std::string(group_name)]++;
  }
  return std::string(run_id) + "." + std::to_string(count);
}

std::string lives_key_prefix(std::string_view group_name) { return "hybridps/" + std::string(group_name); }

std::string group_key_prefix(std::string_view group_name, std::string_view incarnation) {
  return lives_key_prefix(group_name) + "/" + std::string(incarnation);
}

}  // namespace hybridps::bootstrap
