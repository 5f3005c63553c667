// hybridps/schedule/tuner.h: a hill-climber over settings that change no result. It times operations in turn.
//
// Model    A setting is a knob: a ladder of rungs. A trial compares the current settings (A) with one knob some rungs
//          away (B). Blocks of operations run with A and B in turn, A B B A or B A A B. So the tuner takes neither
//          noise nor a pattern that repeats every training step for a gain. An operation counts with its time per byte,
//          relative to the median of its class (kind and size), so that different operations compare. A and B each
//          count with the median of their operations, weighted by the operations' time.
//            kept        B gains at least kGainMin, and more than noise explains. At once if B is much better
//            taken back  otherwise. At once if B is much worse
//          If the settings differ from the usual settings, the first trial is of the usual settings. The usual settings
//          are right on most networks, so they stay unless they are much worse: a setting that fills queues is good at
//          first, but does harm later and from time to time. The settings that stay count as the beginning.
//          A pass tries every knob in both directions, first by two rungs, then by one. Knobs that mattered most come
//          first. After a gain the tuner goes on in the same direction, at first with longer strides. At the end of a
//          pass the result is compared with the settings at the pass's beginning, and is taken back unless it is seen
//          to be better. Then the tuner rests, and tries one knob now and then: more rarely, the longer there is no
//          gain. A new pass begins when operations take noticeably more or less time than when the rest began.
// Price    Trials of worse settings cost time. A new trial waits until the cost of all trials is below kPriceMax of the
//          time of all operations plus half of the time gained since the beginning. So tuning slows a program down by
//          at most kPriceMax, and nothing waits where much is gained.
//          The first trial of a knob in a direction begins with one pair, since the new setting may be much worse.
// Bounds   kPairsMax pairs a trial; kRestMax operations between looks.
// Source   coordinate search (Hooke and Jeeves 1961) by comparisons in turn.
// Threads  a plain value; no clock, no I/O.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <string_view>
#include <vector>

namespace hybridps::schedule {

class Tuner {
 public:
  static constexpr double kGainMin = 0.03;
  static constexpr double kMuchWorse = 0.15;
  static constexpr double kMuchBetter = 0.3;
  static constexpr double kFarWorse = 0.5;  // for a trial of the usual settings: a few operations then decide
  static constexpr int kPairsMax = 8;
  static constexpr std::uint64_t kWarmUp = 6;  // operations before the first trial
  static constexpr std::uint64_t kRestMin = 128;
  static constexpr std::uint64_t kRestMax = 8192;
  static constexpr double kChanged = 1.3;
  static constexpr double kPriceMax = 0.025;
  static constexpr std::size_t kTriedKept = 32;
  static constexpr int kRefusalsMax = 3;  // refused rounds in a row after which a trial is given up

  struct Knob {
    std::string_view name;
    int rungs = 1;
    int at = 0;      // the initial rung, in [0, rungs)
    int usual = -1;  // the rung without any settings; -1: same as `at`
  };
  using Rungs = std::vector<int>;  // per knob

  /// Consecutive operations: 2 * pairs blocks of `block` operations each, then A from there on.
  struct Round {
    Rungs a;
    Rungs b;
    int pairs = 0;  // 0: A alone
    int block = 1;
    std::uint32_t order = 0;  // bit p: pair p begins with B
    bool is_b(int index) const noexcept {
      const int number = index / block;
      return (number % 2 == 1) != (((order >> (number / 2)) & 1U) != 0);
    }
    int operations() const noexcept { return 2 * pairs * block; }
  };
  /// A timed operation.
  struct TimedOperation {
    int index = 0;            // in its round
    std::uint32_t kind = 0;   // operations of the same kind and size compare
    std::uint64_t bytes = 0;  // > 0
    double seconds = 0.0;
  };
  static constexpr int kBack = -1;   // all knobs, back to where the pass began
  static constexpr int kUsual = -2;  // all knobs, to the usual settings
  /// A finished trial.
  struct Tried {
    int knob = 0;  // or kBack, kUsual
    Rungs a;
    Rungs b;
    double ratio = 1.0;  // B's time / A's time
    int pairs = 0;
    bool kept = false;
  };

  Tuner(std::vector<Knob> knobs, std::uint64_t seed);

  const std::vector<Knob>& knobs() const noexcept { return knobs_; }
  /// The settings in use, except in the B blocks of a trial.
  const Rungs& current() const noexcept { return current_; }
  bool is_resting() const noexcept { return phase_ == Phase::kRest; }
  std::uint64_t trials() const noexcept { return trials_; }
  std::uint64_t kept() const noexcept { return kept_; }
  /// The last kTriedKept trials, oldest first.
  const std::deque<Tried>& tried() const noexcept { return tried_; }

  /// An operation outside of rounds has finished.
  void on_operation(const TimedOperation& sample);
  /// The next round, while none is under way; no value: go on as now. `depth`: operations under way at a time.
  std::optional<Round> next(int depth);
  /// The round has finished. `samples` leaves out operations without a known time.
  void on_round(const Round& round, const std::vector<TimedOperation>& samples);
  /// The round was not carried out.
  void on_refused() noexcept { refused_ = true; }

 private:
  enum class Phase { kUsual, kPass, kGuard, kLook, kRest };
  enum class Judgement { kOpen, kKeep, kTakeBack };
  using Class = std::uint64_t;
  struct Trial {
    int knob = 0;
    Rungs b;
    int pairs = 0;
    bool probes = false;  // the first pair is judged alone
    struct Seen {
      Class of = 0;
      bool b = false;
      double bytes = 0.0;
      double per_byte = 0.0;  // seconds
    };
    std::vector<Seen> seen;
  };

  static Class class_of(const TimedOperation& sample) noexcept;
  bool begin_trial();
  bool begin_move(std::size_t knob, int rungs);
  bool advance();
  void end_pass();
  struct Finding {
    // Logarithms of ratios of time per byte, B to A.
    double log_ratio = 0.0;  // of the medians
    double error = 0.0;      // of log_ratio
    double worse = 0.0;      // quickest B / slowest A
    double better = 0.0;     // quickest A / slowest B
    double quickest = 0.0;   // quickest B / quickest A
    std::size_t count = 0;   // operations of A or B, the smaller number
  };
  Finding find() const;
  Judgement judge(const Finding& finding) const;
  void conclude(const Finding& finding, bool keep);
  void rest();
  void begin_pass();
  void forget_price() noexcept { spent_ = price_ = gained_seconds_ = log_now_ = log_began_ = 0.0; }
  void pay(const Round& round, const std::vector<TimedOperation>& samples);
  bool can_pay() const noexcept { return price_ <= kPriceMax * spent_ + gained_seconds_ / 2; }
  void order_knobs();
  Round round_of(int pairs, int depth);

  std::vector<Knob> knobs_;
  std::uint64_t random_;
  Rungs current_;
  Rungs usual_;
  Rungs announced_;  // the settings A that the ranks have
  Phase phase_ = Phase::kPass;
  std::optional<Trial> trial_;
  bool refused_ = false;
  int refusals_ = 0;  // in a row
  std::uint64_t trials_ = 0;
  std::uint64_t kept_ = 0;
  std::deque<Tried> tried_;

  // Counted since the beginning, or since the last change of the network; seconds.
  double spent_ = 0.0;           // time of all operations
  double price_ = 0.0;           // extra time of trial operations, compared with the settings in use
  double gained_seconds_ = 0.0;  // compared with the settings at the beginning of the count
  double log_now_ = 0.0;         // log(time with the settings in use / time with the settings at the beginning)

  std::vector<bool> probed_;  // per knob: down, then up

  // State of a pass.
  Rungs pass_began_;
  double log_began_ = 0.0;  // log_now_ at that time
  int step_ = 2;
  int stride_ = 1;                   // factor of the step after gains in this direction
  int passes_ = 0;                   // passes with step 1, after the first pass with step 2
  std::vector<std::size_t> order_;   // of the knobs: first those that mattered most in the last pass
  std::vector<double> sensitivity_;  // per knob: the largest |log_ratio| of its trials in this pass
  std::size_t place_ = 0;            // index into order_
  int direction_ = 1;                // 1: up, -1: down
  bool moved_ = false;               // the knob has moved in this direction
  bool gained_ = false;              // any trial of this pass was kept

  // State at rest.
  std::uint64_t operations_ = 0;  // since the rest began
  std::uint64_t rest_ = kRestMin;
  std::map<Class, std::vector<double>> typical_;  // seconds per byte when the rest began
  std::deque<double> lately_;                     // recent times per byte / typical
};

}  // namespace hybridps::schedule
