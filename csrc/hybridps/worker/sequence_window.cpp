#include "hybridps/worker/sequence_window.h"

#include <iterator>

namespace hybridps::worker {

bool SequenceWindow::contains(std::uint64_t sequence) const {
  if (sequence < floor_) return true;
  const auto after = above_.upper_bound(sequence);
  return after != above_.begin() && sequence < std::prev(after)->second;
}

void SequenceWindow::add(std::uint64_t sequence) {
  if (sequence == floor_) {
    ++floor_;
    if (!above_.empty() && above_.begin()->first == floor_) {
      floor_ = above_.begin()->second;
      above_.erase(above_.begin());
    }
    return;
  }
  if (contains(sequence)) return;
  auto after = above_.upper_bound(sequence);
  auto range = above_.end();
  if (after != above_.begin() && std::prev(after)->second == sequence) {
    range = std::prev(after);
    ++range->second;
  } else {
    range = above_.emplace_hint(after, sequence, sequence + 1);
  }
  if (after != above_.end() && after->first == range->second) {
    range->second = after->second;
    above_.erase(after);
  }
}

}  // namespace hybridps::worker
