// hybridps/schedule/stores.h: whether the slots that another core reads are written past the cache, found out by operations of
// either kind.
//
// Model    Which is quicker depends on how near the cores are, which nobody says (docs/decisions/0037-past-the-cache.md), and may
//          change where they are virtual. Of the operations of a class (a kind and a size) those at certain places are trials: three
//          past the cache, three through it, and both again. The first of three meets slots that were written the other way
//          and does not count. Of the others the quickest of either kind are compared: what disturbs an operation only makes it
//          longer. Less than kGainMin changes nothing.
//          The places are the same on all ranks, as the order of operations is, so that all write alike in a trial; what comes of
//          it each rank decides for itself. They mostly agree, as all take the same time, and need not: no result depends on it.
// Price    12 operations at 8, at 64, at 256 and then in every 1024, half of them of the slower kind.
// Threads  a plain value; no clock, no I/O.
#pragma once

#include <array>
#include <cstdint>
#include <map>

namespace hybridps::schedule {

class StoreChooser {
 public:
  static constexpr double kGainMin = 0.05;
  static constexpr std::uint64_t kTrial = 12;     // operations
  static constexpr std::uint64_t kBlock = 3;      // of one kind
  static constexpr std::uint64_t kEvery = 1024;
  /// Smaller ones fit the caches of one core, and go through them.
  static constexpr std::uint64_t kBytesMin = std::uint64_t{1} << 20;
  /// From so many on past the cache, until something else is known.
  static constexpr std::uint64_t kPastCacheBytes = std::uint64_t{8} << 20;
  static constexpr std::size_t kClassesMax = 64;  // of others nothing is tried

  struct Choice {
    std::uint64_t of = 0;     // class; 0: not timed
    std::uint64_t place = 0;  // among its operations
    bool past_cache = false;
  };

  /// The next operation: `kind` and `bytes` as all ranks have them.
  Choice begin(std::uint32_t kind, std::uint64_t bytes);
  /// It is over after so long, > 0.
  void end(const Choice& choice, double seconds);

 private:
  struct Class {
    std::uint64_t begun = 0;
    bool past_cache = false;
    std::uint64_t trial = 0;               // where it began
    std::array<double, 2> quickest{};      // through and past the cache, 0: unknown
    std::array<int, 2> counts{};
  };
  static std::uint64_t trial_of(std::uint64_t place) noexcept;
  std::map<std::uint64_t, Class> classes_;
};

}  // namespace hybridps::schedule
