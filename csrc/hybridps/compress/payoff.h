// hybridps/compress/payoff.h: whether a codec pays, by the size of sums: decided once, by all ranks alike.
//
// Model    Steps are counted from the first that the codec is used in. Two settle; two measure what part of a sum's time the codec
//          takes. Were the rest a wire's, a sum as it is would take rest / ratio: where that is much more, the codec pays and
//          nothing else is tried. Else four steps are a trial, as they are, coded, coded, as they are; the quicker way
//          stays. A sum's time is from when it began, or the one before it ended if that was later, to its end: those of a
//          step add up to the time in which any was under way. Ranks that wait for others measure the others' time, too: so
//          the least of all ranks counts, and of two steps the quicker.
// Agreement the steps are the same on all ranks; what was measured is reduced over them (question(), answer()).
// Threads  one at a time; TimedSum::end() any.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"

namespace hybridps::compress {

/// One sum that is measured.
struct TimedSum {
  std::size_t size_class = 0;
  /// When it can begin, on the thread that begins it; a device comes to it later than the call.
  void begin(core::TimePoint at) noexcept { began_.store(at.time_since_epoch().count(), std::memory_order_relaxed); }
  /// On the thread that ends it. `codecs`: this rank's time in codecs for it.
  void end(core::TimePoint at, core::Duration codecs) noexcept {
    codecs_.store(codecs.count(), std::memory_order_relaxed);
    ended_.store(at.time_since_epoch().count(), std::memory_order_release);
  }
  bool is_over() const noexcept { return ended_.load(std::memory_order_acquire) != 0; }
  core::TimePoint began() const noexcept {
    return core::TimePoint(core::Duration(began_.load(std::memory_order_relaxed)));
  }
  core::TimePoint ended() const noexcept {
    return core::TimePoint(core::Duration(ended_.load(std::memory_order_acquire)));
  }
  core::Duration codecs() const noexcept { return core::Duration(codecs_.load(std::memory_order_relaxed)); }

 private:
  std::atomic<core::Duration::rep> began_{0};
  std::atomic<core::Duration::rep> ended_{0};
  std::atomic<core::Duration::rep> codecs_{0};
};

class Payoff : core::Pinned {
 public:
  static constexpr std::size_t kClasses = 5;
  static constexpr std::uint64_t kStepsToSettle = 2;

  enum class Why : std::uint8_t { kUndecided, kForced, kShare, kTrial };
  struct Decision {
    Why why = Why::kUndecided;
    bool coded = true;
    double codec_share = 0.0;    // of a coded sum's time; 0: not measured
    double coded_seconds = 0.0;  // a step's sums of the class; 0: not measured
    double plain_seconds = 0.0;  // likewise; of kShare: foretold
  };

  /// `ratio`: what the codec makes of bytes. `decides`: false: it is used, whatever it costs.
  Payoff(double ratio, bool decides) noexcept;

  static std::size_t class_of(std::uint64_t bytes) noexcept;
  /// "256 KiB to 1 MiB".
  static std::string class_text(std::size_t size_class);
  /// The least that belongs to it.
  static std::uint64_t class_begin(std::size_t size_class) noexcept;

  /// Of the sum that a step has begun with; the step before it is over.
  void begin_step();
  /// Set where all ranks are to take the least of each, over all of them, before this step's first sum; answer() has it
  /// before the next step begins. Asked once per such step.
  std::optional<std::vector<double>> question();
  /// Empty: it could not be had, and the codec stays.
  void answer(const std::vector<double>& least);
  /// How a sum of this step goes.
  bool is_coded(std::uint64_t bytes) const noexcept;
  /// Null: it is not measured.
  std::shared_ptr<TimedSum> timed(std::uint64_t bytes);

  const std::array<Decision, kClasses>& decisions() const noexcept { return decisions_; }
  bool is_decided() const noexcept { return phase_ == PayoffPhase::kDecided; }

 private:
  enum class PayoffPhase : std::uint8_t { kSettling, kShare, kAskShare, kTrial, kAskTrial, kDecided };
  struct StepTimes {
    double seconds = 0.0;  // of one step; 0: none
    double codecs = 0.0;
  };
  using Step = std::array<StepTimes, kClasses>;

  static Step measure(const std::vector<std::shared_ptr<TimedSum>>& sums);

  const double ratio_;
  PayoffPhase phase_;
  std::uint64_t left_ = kStepsToSettle;  // steps of the phase, with the one that runs
  bool asks_ = false;
  std::vector<std::shared_ptr<TimedSum>> sums_;  // of this step
  std::vector<std::pair<bool, Step>> steps_;     // of this phase: coded?
  std::array<Decision, kClasses> decisions_;
};

}  // namespace hybridps::compress
