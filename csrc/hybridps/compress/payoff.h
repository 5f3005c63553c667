// hybridps/compress/payoff.h: whether a codec pays, by the size of sums. Decided once, alike on all ranks.
//
// Model    Steps count from the first step that uses the codec. Two steps settle. Two steps measure the codec's part of
//          a sum's time. If the rest were all wire time, a plain sum would take rest / ratio. Where a plain sum would
//          take much longer than a coded sum, the codec pays and nothing else is tried. Otherwise four steps are a
//          trial: plain, coded, coded, plain; the faster way stays.
//          A sum's time runs from its begin, or from the end of the sum before if that end is later, to the sum's end.
//          So the times of a step add up to the time in which any sum was under way. A rank that waits for others
//          measures their time too, so the smallest value of all ranks counts. Of two steps, the faster counts.
// Agreement the steps are the same on all ranks. The measurements are reduced over all ranks (question(), answer()).
// Threads  one thread at a time; TimedSum::end() any thread.
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
  /// Sets when the sum can begin: for a device, later than the call. Called on the thread that begins the sum.
  void begin(core::TimePoint at) noexcept { began_.store(at.time_since_epoch().count(), std::memory_order_relaxed); }
  /// Called on the thread that ends the sum. `codecs`: this rank's time in codecs for the sum.
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
    double codec_share = 0.0;    // part of a coded sum's time; 0: not measured
    double coded_seconds = 0.0;  // all sums of the class in a step; 0: not measured
    double plain_seconds = 0.0;  // the same for plain sums; for kShare: predicted
  };

  /// `ratio`: encoded bytes / plain bytes. `decides`: false: the codec is always used, whatever it costs.
  Payoff(double ratio, bool decides) noexcept;

  static std::size_t class_of(std::uint64_t bytes) noexcept;
  /// The class in words: "256 KiB to 1 MiB".
  static std::string class_text(std::size_t size_class);
  /// The smallest size in bytes that belongs to the class.
  static std::uint64_t class_begin(std::size_t size_class) noexcept;

  /// Called for the first sum of a step, when the step before is over.
  void begin_step();
  /// Values to reduce by minimum over all ranks before this step's first sum; empty: nothing to reduce. answer() gets
  /// the result before the next step begins. Asked once per such step.
  std::optional<std::vector<double>> question();
  /// `least` empty: the reduction failed, and the codec stays.
  void answer(const std::vector<double>& least);
  /// Whether a sum of this step is coded.
  bool is_coded(std::uint64_t bytes) const noexcept;
  /// Null: the sum is not measured.
  std::shared_ptr<TimedSum> timed(std::uint64_t bytes);

  const std::array<Decision, kClasses>& decisions() const noexcept { return decisions_; }
  bool is_decided() const noexcept { return phase_ == PayoffPhase::kDecided; }

 private:
  enum class PayoffPhase : std::uint8_t { kSettling, kShare, kAskShare, kTrial, kAskTrial, kDecided };
  struct StepTimes {
    double seconds = 0.0;  // of one step; 0: not measured
    double codecs = 0.0;
  };
  using Step = std::array<StepTimes, kClasses>;

  static Step measure(const std::vector<std::shared_ptr<TimedSum>>& sums);

  const double ratio_;
  PayoffPhase phase_;
  std::uint64_t left_ = kStepsToSettle;  // steps of the phase that are left, with the current step
  bool asks_ = false;
  std::vector<std::shared_ptr<TimedSum>> sums_;  // of this step
  std::vector<std::pair<bool, Step>> steps_;     // of this phase; true: the step was coded
  std::array<Decision, kClasses> decisions_;
};

}  // namespace hybridps::compress
