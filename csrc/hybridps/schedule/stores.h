// hybridps/schedule/stores.h: finds by trials whether non-temporal stores suit the slots that another core reads.
//
// Model    The quicker kind of store depends on how near the cores are. No interface tells this distance (decision 37:
//          docs/decisions/shared-memory.md), and on virtual cores the distance may change. In each class of
//          operations (a kind and a size), operations at certain places are trials: one block with non-temporal stores,
//          two blocks with cached stores, one block with non-temporal stores. The first operation of a block meets
//          slots that were written the other way, and does not count. Of the others, the quickest of either kind are
//          compared, in time per byte, because a disturbance only makes an operation longer. An operation counts only
//          if it was alone in its group and did not wait for other ranks most of the time; the caller knows both. Small
//          operations use non-temporal stores if these are clearly quicker. Large operations use them until they are
//          clearly slower. The places are the same on all ranks, as is the order of operations, so all ranks write
//          alike in a trial. Each rank decides for itself. The ranks mostly agree, because an operation takes the same
//          time on all of them. They need not agree: no result depends on the choice.
// Price    trials begin at operation 8, 64, 512, and then every 2048. A trial has 12 operations, half of them of the
//          slower kind. Below 1 MiB operations are short and noisy: 24 operations, one trial in 8192.
// Threads  a plain value; no clock, no I/O.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>

namespace hybridps::schedule {

class StoreChooser {
 public:
  static constexpr double kUndecided = 0.08;  // between the ratios that switch to one kind and back
  static constexpr std::uint64_t kBlock = 3;  // operations of one kind; a trial has four blocks
  static constexpr std::uint64_t kEvery = 2048;
  static constexpr std::uint64_t kSmall = std::uint64_t{1} << 20;
  static constexpr std::uint64_t kBlockOfSmall = 6;
  static constexpr std::uint64_t kEveryOfSmall = 8192;
  /// Smaller operations always use cached stores.
  static constexpr std::uint64_t kBytesMin = std::uint64_t{8} << 10;
  /// From this size on, non-temporal stores are the initial choice.
  static constexpr std::uint64_t kPastCacheBytes = std::uint64_t{8} << 20;
  static constexpr std::size_t kClassesMax = 64;  // further classes get no trials

  struct Choice {
    std::uint64_t of = 0;  // the operation's class; 0: not timed
    std::uint64_t bytes = 0;
    std::uint64_t trial = 0;  // the place where its trial began
    bool counts = false;
    bool last = false;  // the last operation of its trial
    bool past_cache = false;
  };

  /// Chooses for the next operation. All ranks must call it in the same order, with the same `kind` and `bytes`.
  Choice begin(std::uint32_t kind, std::uint64_t bytes);
  /// The result of a trial: the quickest time of either kind, seconds per byte, and the choice.
  struct TrialOutcome {
    std::uint64_t bytes = 0;  // the smallest size of the class
    double through = 0.0;
    double past = 0.0;
    bool past_cache = false;
  };
  /// The operation of `choice` took `seconds`; 0: it does not count. Returns an outcome with the last operation of a
  /// trial, if at least half of the countable operations of either kind counted.
  std::optional<TrialOutcome> end(const Choice& choice, double seconds);

 private:
  struct Class {
    std::uint64_t block = kBlock;
    std::uint64_t every = kEvery;
    // Limits for time with non-temporal stores / time with cached stores. Non-temporal stores stay in use below the
    // first limit, and come into use below the second.
    double stays_below = 1.0 - kUndecided;
    double begins_below = 1.0 - 2 * kUndecided;
    std::uint64_t begun = 0;
    bool past_cache = false;
    std::uint64_t trial = 0;           // the place where the trial began
    std::array<double, 2> quickest{};  // cached, non-temporal; seconds per byte, 0: unknown
    std::array<int, 2> counts{};
  };
  static std::uint64_t trial_of(const Class& of, std::uint64_t place) noexcept;
  std::map<std::uint64_t, Class> classes_;
};

}  // namespace hybridps::schedule
