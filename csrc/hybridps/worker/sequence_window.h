// hybridps/worker/sequence_window.h: the set of finished numbers of a rising sequence.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace hybridps::worker {

/// A set of numbers that fills up from below. It needs memory only per gap, not per number. So a number that is missing
/// for a long time (a message that nobody receives) does not hold up later numbers.
class SequenceWindow {
 public:
  bool contains(std::uint64_t sequence) const;
  /// No effect for a number that is in the set already.
  void add(std::uint64_t sequence);
  /// The lowest number that is not in the set.
  std::uint64_t floor() const noexcept { return floor_; }
  /// Ranges beyond the first gap.
  std::size_t ranges() const noexcept { return above_.size(); }

 private:
  std::uint64_t floor_ = 0;
  std::map<std::uint64_t, std::uint64_t> above_;  // begin -> end of ranges above the floor; no two ranges touch
};

}  // namespace hybridps::worker
