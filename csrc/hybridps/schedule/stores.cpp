#include "hybridps/schedule/stores.h"

#include <algorithm>
#include <bit>

namespace hybridps::schedule {
namespace {

constexpr std::uint64_t kNoTrial = ~std::uint64_t{0};
constexpr std::uint64_t kFirstTrials[] = {8, 64, 512};

}  // namespace

// The first place of the trial that contains `place`, or kNoTrial.
std::uint64_t StoreChooser::trial_of(const Class& of, std::uint64_t place) noexcept {
  for (const std::uint64_t first : kFirstTrials)
    if (place >= first && place < first + 4 * of.block) return first;
  return place >= of.every && place % of.every < 4 * of.block ? place - place % of.every : kNoTrial;
}

StoreChooser::Choice StoreChooser::begin(std::uint32_t kind, std::uint64_t bytes) {
  if (bytes < kBytesMin) return {};
  const std::uint64_t key = std::uint64_t{kind} << 8 | static_cast<std::uint64_t>(std::bit_width(bytes));
  auto found = classes_.find(key);
  if (found == classes_.end()) {
    if (classes_.size() >= kClassesMax) return {0, bytes, 0, false, false, bytes >= kPastCacheBytes};
    found = classes_.emplace(key, Class{}).first;
    if (bytes >= kPastCacheBytes) {
      found->second.past_cache = true;
      found->second.stays_below = 1.0 + kUndecided;
      found->second.begins_below = 1.0;
    }
    if (bytes < kSmall) {
      found->second.block = kBlockOfSmall;
      found->second.every = kEveryOfSmall;
    }
  }
  Class& of = found->second;
  const std::uint64_t place = of.begun++;
  const std::uint64_t trial = trial_of(of, place);
  if (trial == kNoTrial) return {0, bytes, 0, false, false, of.past_cache};
  const std::uint64_t index = place - trial;
  return {
      key, bytes, trial, index % of.block != 0, index + 1 == 4 * of.block, index < of.block || index >= 3 * of.block};
}

std::optional<StoreChooser::TrialOutcome> StoreChooser::end(const Choice& choice, double seconds) {
  const auto found = classes_.find(choice.of);
  if (found == classes_.end()) return std::nullopt;
  Class& of = found->second;
  if (choice.trial != of.trial) {
    of.trial = choice.trial;
    of.quickest = {};
    of.counts = {};
  }
  if (choice.counts && seconds > 0.0) {
    double& quickest = of.quickest[choice.past_cache ? 1 : 0];
    const double per_byte = seconds / static_cast<double>(choice.bytes);
    quickest = quickest == 0.0 ? per_byte : std::min(quickest, per_byte);
    ++of.counts[choice.past_cache ? 1 : 0];
  }
  if (!choice.last || static_cast<std::uint64_t>(std::min(of.counts[0], of.counts[1])) < of.block - 1)
    return std::nullopt;
  const double most = of.past_cache ? of.stays_below : of.begins_below;
  of.past_cache = of.quickest[1] < most * of.quickest[0];
  return TrialOutcome{std::uint64_t{1} << ((choice.of & 0xff) - 1), of.quickest[0], of.quickest[1], of.past_cache};
}

}  // namespace hybridps::schedule
