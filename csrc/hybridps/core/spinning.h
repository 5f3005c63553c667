// hybridps/core/spinning.h: whether a thread that waits for events looks for them for a while before it sleeps.
//
// Model    Looking ("spinning") pays where the event comes within that while: two changes of context less. Elsewhere it takes a
//          core's time for nothing, from those that the thread waits for where they share the core. Both can be seen while the
//          thread runs, whether it spins or not: how long its waits were, and how long it stood in line for a core (run delay in
//          proc(5), schedstat). It spins while three of four waits are short and nobody else wants the core.
// Source   A.R. Karlin, K. Li, M.S. Manasse, S. Owicki, "Empirical studies of competitive spinning for a shared-memory
//          multiprocessor", SOSP 1991: spin at most as long as a sleep costs, and choose by the waits of before.
// Threads  one at a time; it need not be the same each time.
#pragma once

#include <optional>

#include "hybridps/core/clock.h"

namespace hybridps::core {

/// What the kernel counted for one thread since it began.
struct CoreTime {
  int thread = 0;
  Duration ran{};
  Duration stood_in_line{};  // ready to run, with no core free
};
/// Of the calling thread. Nothing: this kernel does not count it, or /proc is not there.
std::optional<CoreTime> core_time_of_this_thread() noexcept;

class Spinning {
 public:
  /// How long a thread looks where nobody has set it: about what a sleep and a wake-up cost.
  static constexpr Duration kUsual = std::chrono::microseconds(50);
  /// So many waits make a judgement.
  static constexpr int kWaits = 16;
  /// A wait is short up to so many times `most`: while one side sleeps the other's waits have its wake-up in them, and they
  /// become shorter only once both spin.
  static constexpr int kShort = 4;
  /// How long it sleeps after spinning has not paid: doubles each time, until it has paid for kPauseMost.
  static constexpr Duration kPauseLeast = std::chrono::milliseconds(10);
  static constexpr Duration kPauseMost = std::chrono::seconds(1);
  static constexpr Duration kLookAtCoresEvery = std::chrono::milliseconds(10);
  /// Above this part of its time in line, others want the core. Of less time than kCountedLeast nothing can be said: each wake-up
  /// stands in line for a moment.
  static constexpr double kInLineMost = 0.2;
  static constexpr Duration kCountedLeast = std::chrono::microseconds(500);
  using ReadCoreTime = std::optional<CoreTime> (*)() noexcept;

  /// As `most` says, always.
  static Spinning always(Duration most) noexcept { return Spinning(most, false, nullptr); }
  /// For kUsual where it pays.
  static Spinning where_it_pays(ReadCoreTime read = core_time_of_this_thread) noexcept {
    return Spinning(kUsual, true, read);
  }

  /// There was nothing to do at `now`. True: look again; false: sleep.
  bool look_again(TimePoint now) noexcept;
  /// There was something to do at `now`: a wait, if there was one, has ended.
  void found_work(TimePoint now) noexcept {
    if (is_waiting()) end_wait(now);
  }
  /// What this wait was for is another thread's business now.
  void forget() noexcept { idle_since_ = TimePoint::max(); }
  bool is_waiting() const noexcept { return idle_since_ != TimePoint::max(); }
  /// Whether the next wait begins with looking.
  bool spins() const noexcept { return spins_; }

 private:
  Spinning(Duration most, bool chooses, ReadCoreTime read) noexcept
      : most_(most), chooses_(chooses), read_(read), spins_(!chooses && most > Duration::zero()) {}

  void end_wait(TimePoint now) noexcept;
  void look_at_cores(TimePoint now) noexcept;
  void stop(TimePoint now) noexcept;

  Duration most_;
  bool chooses_;
  ReadCoreTime read_;
  bool spins_;
  bool core_is_free_ = false;  // as far as was seen last
  TimePoint idle_since_ = TimePoint::max();
  int waits_ = 0;
  int short_ = 0;
  TimePoint spins_since_{};
  TimePoint may_spin_at_{};
  Duration pause_ = kPauseLeast;
  TimePoint looked_at_{};
  CoreTime seen_{};
};

}  // namespace hybridps::core
