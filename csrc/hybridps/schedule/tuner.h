// hybridps/schedule/tuner.h: a hill-climber over settings that change no result, by operations timed in turn.
//
// Model    Settings are knobs, each a ladder of rungs. A trial compares what is (A) with one knob some rungs away (B): blocks
//          of operations of either kind in turn, A B B A or B A A B, so that neither noise nor what repeats every step is
//          taken for a gain. Of an operation counts its time per byte against the median of its class (kind and
//          size), so that different ones compare; of each kind the median of its operations, weighted by the time that they
//          take.
//            kept        B gains kGainMin at least, and more than noise explains; at once where B is much better
//            taken back  otherwise: at once where B is much worse
//          First what is usual is tried, where the settings differ from it: it is right on most networks, so it stays unless it is
//          much worse: a setting that fills queues is good at first, and does harm later, and now and then. From there on it counts as the
//          beginning.
//          A pass tries every knob, both ways, two rungs at a time and then one, where it mattered first; where something is gained it goes on the same
//          way, farther at first. At its end what was found is held against where it began, and taken back unless it
//          is seen to be better. Then the tuner rests, and looks at one knob now and then, the more rarely the longer nothing was gained.
//          It begins a new pass where operations take noticeably longer, or shorter, than when it came to rest.
// Price    Trials of what is worse take time. A new one waits until all that they have taken is below kPriceMax of the time of all
//          operations, and half of what was gained since the beginning: so a program does not become slower than that for
//          being tuned, and where much is gained nothing waits.
//          The first trial of a knob in a direction begins with one pair, since it may be much worse.
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
  static constexpr double kFarWorse = 0.5;  // what is usual: a few operations then tell
  static constexpr int kPairsMax = 8;
  static constexpr std::uint64_t kWarmUp = 6;  // operations before the first trial
  static constexpr std::uint64_t kRestMin = 128;
  static constexpr std::uint64_t kRestMax = 8192;
  static constexpr double kChanged = 1.3;
  static constexpr double kPriceMax = 0.025;
  static constexpr std::size_t kTriedKept = 32;
  static constexpr int kRefusalsMax = 3;  // then a trial is given up

  struct Knob {
    std::string_view name;
    int rungs = 1;
    int at = 0;       // to begin with, of [0, rungs)
    int usual = -1;   // where it is without settings; -1: where it begins
  };
  using Rungs = std::vector<int>;  // per knob

  /// Operations that follow each other: 2 * pairs blocks of `block`, then A for good.
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
  /// An operation that was timed.
  struct TimedOperation {
    int index = 0;            // in its round
    std::uint32_t kind = 0;   // those of one kind and size compare
    std::uint64_t bytes = 0;  // > 0
    double seconds = 0.0;
  };
  static constexpr int kBack = -1;   // all, against where the pass began
  static constexpr int kUsual = -2;  // all that is usual
  /// A trial that is over.
  struct Tried {
    int knob = 0;  // or kBack, kUsual
    Rungs a;
    Rungs b;
    double ratio = 1.0;  // of B's time to A's
    int pairs = 0;
    bool kept = false;
  };

  Tuner(std::vector<Knob> knobs, std::uint64_t seed);

  const std::vector<Knob>& knobs() const noexcept { return knobs_; }
  /// What is in use but for the blocks of a trial.
  const Rungs& current() const noexcept { return current_; }
  bool is_resting() const noexcept { return phase_ == Phase::kRest; }
  std::uint64_t trials() const noexcept { return trials_; }
  std::uint64_t kept() const noexcept { return kept_; }
  /// The last kTriedKept, oldest first.
  const std::deque<Tried>& tried() const noexcept { return tried_; }

  /// An operation outside of rounds is over.
  void on_operation(const TimedOperation& sample);
  /// What to do now: none of its rounds is under way. `depth`: operations under way at a time. Nothing: go on as it is.
  std::optional<Round> next(int depth);
  /// The round is over; operations of which nothing is known are left out.
  void on_round(const Round& round, const std::vector<TimedOperation>& samples);
  /// It was not carried out.
  void on_refused() noexcept { refused_ = true; }

 private:
  enum class Phase { kUsual, kPass, kGuard, kLook, kRest };
  enum class Judgement { kOpen, kKeep, kTakeBack };
  using Class = std::uint64_t;
  struct Trial {
    int knob = 0;
    Rungs b;
    int pairs = 0;
    bool probes = false;  // the first pair for itself
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
    double log_ratio = 0.0;  // of B's time to A's
    double error = 0.0;
    double worse = 0.0;      // how much more the quickest of B takes than the slowest of A, of the logarithm
    double better = 0.0;     // the slowest of B less than the quickest of A
    double quickest = 0.0;   // of B to that of A
    std::size_t count = 0;   // operations of the kind that has fewer
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
  Rungs announced_;  // what the ranks have as A
  Phase phase_ = Phase::kPass;
  std::optional<Trial> trial_;
  bool refused_ = false;
  int refusals_ = 0;  // one after the other
  std::uint64_t trials_ = 0;
  std::uint64_t kept_ = 0;
  std::deque<Tried> tried_;

  // Since the beginning, or the last change of the network; seconds.
  double spent_ = 0.0;           // by all operations
  double price_ = 0.0;           // more than what was in use would have taken, by those of trials
  double gained_seconds_ = 0.0;  // against the settings of then
  double log_now_ = 0.0;         // of the time with what is in use to that with the settings of then

  std::vector<bool> probed_;     // of knobs, each down and up

  // A pass.
  Rungs pass_began_;
  double log_began_ = 0.0;  // log_now_ then
  int step_ = 2;
  int stride_ = 1;        // times the step, where it has gained in this direction
  int passes_ = 0;  // of one step, since the first of two
  std::vector<std::size_t> order_;    // of the knobs: those first that mattered in the last pass
  std::vector<double> sensitivity_;   // the most that a trial of the knob has changed in this pass, of the logarithm
  std::size_t place_ = 0;             // in the order
  int direction_ = 1;     // 0: the knob is done
  bool moved_ = false;    // the knob, in this direction
  bool gained_ = false;   // anything in this pass

  // At rest.
  std::uint64_t operations_ = 0;  // since
  std::uint64_t rest_ = kRestMin;
  std::map<Class, std::vector<double>> typical_;  // when it came to rest
  std::deque<double> lately_;                     // against that
};

}  // namespace hybridps::schedule
