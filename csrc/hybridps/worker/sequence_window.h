// hybridps/worker/sequence_window.h: which numbers of a rising sequence are over.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

namespace hybridps::worker {

/// A set of numbers that fills up from below. Its memory is that of its gaps, however many numbers are in it: one that
/// stays out for long (a message that nobody receives) holds up none of the others.
class SequenceWindow {
 public:
  bool contains(std::uint64_t sequence) const;
  /// Adding a number twice is adding it once.
  void add(std::uint64_t sequence);
  /// All below it are in the set; it is not.
  std::uint64_t floor() const noexcept { return floor_; }
  /// Ranges beyond the first gap.
  std::size_t ranges() const noexcept { return above_.size(); }

 private:
  std::uint64_t floor_ = 0;
  std::map<std::uint64_t, std::uint64_t> above_;  // begin -> end of ranges above the floor, none touching another
};

}  // namespace hybridps::worker
