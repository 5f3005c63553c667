// hybridps/core/spinning.h: whether a thread that waits for events polls for a while before it sleeps.
//
// Model    Polling ("spinning") pays if the event comes within that while: it saves two context switches. Otherwise
//          spinning wastes a core's time. If the thread shares the core with the threads that it waits for, these
//          threads lose that time. Both cases can be seen while the thread runs, whether it spins or not: from the
//          length of its waits, and from the time it stood in line for a core (run delay in proc(5), schedstat). The
//          thread spins while three of four waits are short and nobody else wants the core.
// Source   A.R. Karlin, K. Li, M.S. Manasse, S. Owicki, "Empirical studies of competitive spinning for a shared-memory
//          multiprocessor", SOSP 1991: spin at most as long as a sleep costs, and choose by earlier waits.
// Threads  one thread at a time, not always the same thread.
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
/// The core time of the calling thread. Empty: this kernel does not count it, or /proc is not there.
std::optional<CoreTime> core_time_of_this_thread() noexcept;

class Spinning {
 public:
  /// How long a thread spins if nobody has set a time: about what a sleep and a wake-up cost.
  static constexpr Duration kUsual = std::chrono::microseconds(50);
  /// The number of waits in one judgement.
  static constexpr int kWaits = 16;
  /// A wait is short if it takes at most kShort times `most`. While one side sleeps, the other side's waits include
  /// this side's wake-up. The waits become shorter only when both sides spin.
  static constexpr int kShort = 4;
  /// How long the thread does not spin after spinning has not paid. The pause doubles each time, and starts again at
  /// kPauseLeast after spinning has lasted for kPauseMost.
  static constexpr Duration kPauseLeast = std::chrono::milliseconds(10);
  static constexpr Duration kPauseMost = std::chrono::seconds(1);
  static constexpr Duration kLookAtCoresEvery = std::chrono::milliseconds(10);
  /// Others want the core if the thread stands in line for more than this part of its time. Less counted time than
  /// kCountedLeast says nothing: each wake-up stands in line for a moment.
  static constexpr double kInLineMost = 0.2;
  static constexpr Duration kCountedLeast = std::chrono::microseconds(500);
  using ReadCoreTime = std::optional<CoreTime> (*)() noexcept;

  /// Always spins for `most`; zero: never.
  static Spinning always(Duration most) noexcept { return Spinning(most, false, nullptr); }
  /// Spins for kUsual where spinning pays.
  static Spinning where_it_pays(ReadCoreTime read = core_time_of_this_thread) noexcept {
    return Spinning(kUsual, true, read);
  }

  /// There was nothing to do at `now`. True: look again; false: sleep.
  bool look_again(TimePoint now) noexcept;
  /// There was something to do at `now`: a wait, if any, has ended.
  void found_work(TimePoint now) noexcept {
    if (is_waiting()) end_wait(now);
  }
  /// Forgets the wait: another thread has taken over what this thread waited for.
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
  bool core_is_free_ = false;  // at the last look
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
