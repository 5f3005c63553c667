// hybridps/staging/ring.h: places in one run of staging memory, handed out in turn and reused in the same order.
//
// Model    take() never fails and never waits. take() says which turn is the last whose place the new place covers.
//          The caller makes its stream wait until this turn and all before it are over. Nothing is given back.
// Threads  one caller at a time.
#pragma once

#include <algorithm>
#include <cassert>
#include <cstdint>
#include <deque>

namespace hybridps::staging {

class Ring {
 public:
  static constexpr std::uint64_t kAlignment = 256;

  struct Place {
    std::uint64_t offset = 0;
    std::uint64_t displaced = 0;  // the last turn whose place this place covers; 0: none
  };

  explicit Ring(std::uint64_t bytes = 0) : bytes_(bytes) {}
  std::uint64_t bytes() const noexcept { return bytes_; }

  /// A place of `bytes` (at most bytes()) for `turn`, which is above 0 and rises from call to call.
  Place take(std::uint64_t bytes, std::uint64_t turn) {
    assert(bytes <= bytes_);
    Place place;
    if (bytes == 0) return place;
    if (next_ + bytes > bytes_) next_ = 0;
    place.offset = next_;
    const std::uint64_t end = next_ + bytes;
    for (const Use& use : uses_)
      if (use.begin < end && place.offset < use.end) place.displaced = std::max(place.displaced, use.turn);
    std::erase_if(uses_, [&](const Use& use) { return use.begin < end && place.offset < use.end; });
    uses_.push_back({place.offset, end, turn});
    next_ = (end + kAlignment - 1) / kAlignment * kAlignment;
    return place;
  }
  /// Number of turns whose place is not covered by a later place.
  std::size_t uses() const noexcept { return uses_.size(); }

 private:
  struct Use {
    std::uint64_t begin;
    std::uint64_t end;
    std::uint64_t turn;
  };
  std::uint64_t bytes_;
  std::uint64_t next_ = 0;
  std::deque<Use> uses_;
};

}  // namespace hybridps::staging
