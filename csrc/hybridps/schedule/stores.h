// hybridps/schedule/stores.h: whether the slots that another core reads are written past the cache, found out by operations of
// either kind.
//
// Model    Which is quicker depends on how near the cores are, which nobody says (docs/decisions/0037-past-the-cache.md), and may
//          change where they are virtual. Of the operations of a class (a kind and a size) those at certain places are trials: a block
//          past the cache, two through it, and one past it. The first of a block meets slots that were written the other way
//          and does not count. Of the others the quickest of either kind are compared, per byte: what disturbs an operation only makes it
//          longer. Only those count that were alone in their group, and did not
//          wait for other ranks most of the time, which the caller knows. Small ones go past the cache where that is clearly quicker, large ones until it is clearly slower.
//          The places are the same on all ranks, as the order of operations is, so that all write alike in a trial; what comes of
//          it each rank decides for itself. They mostly agree, as all take the same time, and need not: no result depends on it.
// Price    trials at 8, at 64, at 512 and then in every 2048: 12 operations, half of them of the slower kind. Below 1 MiB, where each is short
//          and its noise large, 24, and one trial in 8192.
// Threads  a plain value; no clock, no I/O.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>

namespace hybridps::schedule {

class StoreChooser {
 public:
  static constexpr double kUndecided = 0.08;  // between what leads to one kind and what leads back
  static constexpr std::uint64_t kBlock = 3;  // operations of one kind; a trial has four blocks
  static constexpr std::uint64_t kEvery = 2048;
  static constexpr std::uint64_t kSmall = std::uint64_t{1} << 20;
  static constexpr std::uint64_t kBlockOfSmall = 6;
  static constexpr std::uint64_t kEveryOfSmall = 8192;
  /// Smaller ones go through the cache.
  static constexpr std::uint64_t kBytesMin = std::uint64_t{8} << 10;
  /// From so many on past the cache, until something else is known.
  static constexpr std::uint64_t kPastCacheBytes = std::uint64_t{8} << 20;
  static constexpr std::size_t kClassesMax = 64;  // of others nothing is tried

  struct Choice {
    std::uint64_t of = 0;     // class; 0: not timed
    std::uint64_t bytes = 0;
    std::uint64_t trial = 0;  // the place where its trial began
    bool counts = false;
    bool last = false;  // of its trial
    bool past_cache = false;
  };

  /// The next operation: `kind` and `bytes` as all ranks have them, in the same order on all of them.
  Choice begin(std::uint32_t kind, std::uint64_t bytes);
  /// What a trial has shown: the quickest of either kind, seconds per byte, and what comes of it.
  struct TrialOutcome {
    std::uint64_t bytes = 0;  // the least of the class
    double through = 0.0;
    double past = 0.0;
    bool past_cache = false;
  };
  /// It is over after so long; 0: it does not count. An outcome with the last of a trial, if at least half of either kind counted.
  std::optional<TrialOutcome> end(const Choice& choice, double seconds);

 private:
  struct Class {
    std::uint64_t block = kBlock;
    std::uint64_t every = kEvery;
    // Of the time through the cache: what goes past it goes on below the first, and begins below the second.
    double stays_below = 1.0 - kUndecided;
    double begins_below = 1.0 - 2 * kUndecided;
    std::uint64_t begun = 0;
    bool past_cache = false;
    std::uint64_t trial = 0;               // where it began
    std::array<double, 2> quickest{};      // through and past the cache, seconds per byte, 0: unknown
    std::array<int, 2> counts{};
  };
  static std::uint64_t trial_of(const Class& of, std::uint64_t place) noexcept;
  std::map<std::uint64_t, Class> classes_;
};

}  // namespace hybridps::schedule
