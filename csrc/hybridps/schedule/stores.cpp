#include "hybridps/schedule/stores.h"

#include <algorithm>
#include <bit>

namespace hybridps::schedule {
namespace {

constexpr std::uint64_t kNoTrial = ~std::uint64_t{0};
constexpr std::uint64_t kFirstTrials[] = {8, 64, 256};
constexpr int kCounted = 4;  // of either kind in a whole trial

}  // namespace

// Where the trial began that this place is in.
std::uint64_t StoreChooser::trial_of(std::uint64_t place) noexcept {
  for (const std::uint64_t first : kFirstTrials)
    if (place >= first && place < first + kTrial) return first;
  return place >= kEvery && place % kEvery < kTrial ? place - place % kEvery : kNoTrial;
}

StoreChooser::Choice StoreChooser::begin(std::uint32_t kind, std::uint64_t bytes) {
  if (bytes < kBytesMin) return {};
  const std::uint64_t key = std::uint64_t{kind} << 8 | static_cast<std::uint64_t>(std::bit_width(bytes));
  auto found = classes_.find(key);
  if (found == classes_.end()) {
    if (classes_.size() >= kClassesMax) return {0, 0, bytes >= kPastCacheBytes};
    found = classes_.emplace(key, Class{}).first;
    found->second.past_cache = bytes >= kPastCacheBytes;
  }
  Class& of = found->second;
  const std::uint64_t place = of.begun++;
  const std::uint64_t trial = trial_of(place);
  if (trial == kNoTrial) return {0, 0, of.past_cache};
  return {key, place, (place - trial) / kBlock % 2 == 0};
}

void StoreChooser::end(const Choice& choice, double seconds) {
  const auto found = classes_.find(choice.of);
  if (found == classes_.end() || !(seconds > 0.0)) return;
  Class& of = found->second;
  const std::uint64_t trial = trial_of(choice.place);
  if (trial != of.trial) {
    of.trial = trial;
    of.quickest = {};
    of.counts = {};
  }
  if ((choice.place - trial) % kBlock == 0) return;
  double& quickest = of.quickest[choice.past_cache ? 1 : 0];
  quickest = quickest == 0.0 ? seconds : std::min(quickest, seconds);
  ++of.counts[choice.past_cache ? 1 : 0];
  if (std::min(of.counts[0], of.counts[1]) < kCounted) return;
  const double now = of.quickest[of.past_cache ? 1 : 0];
  const double other = of.quickest[of.past_cache ? 0 : 1];
  if (other < (1.0 - kGainMin) * now) of.past_cache = !of.past_cache;
}

}  // namespace hybridps::schedule
