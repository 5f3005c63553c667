#include "hybridps/core/spinning.h"

#include <chrono>
#include <optional>

#include "tests/support/catch.h"

// On a clock of its own, with a kernel that counts what the test says.
namespace {

using namespace hybridps::core;
using namespace std::chrono_literals;

std::optional<CoreTime> counted;  // by the kernel

struct Thread {
  /// One wait of this length, and work of 10 us after it. A thread that looks is asked again every 5 us.
  void wait(Duration length) {
    const TimePoint end = now + length;
    while (spinning.look_again(now) && now + 5us < end) {
      now += 5us;
      run(5us);
    }
    looked = now > end - length;
    now = end;
    spinning.found_work(now);
    now += 10us;
    run(10us);
  }
  void wait(Duration length, Duration altogether) {
    for (const TimePoint until = now + altogether; now < until;) wait(length);
  }
  void run(Duration time) {
    spent += time;
    if (!counted) return;
    counted->ran += time;
    if (crowded) counted->stood_in_line += time / 2;
  }
  TimePoint now{1h};
  Spinning spinning = Spinning::where_it_pays([]() noexcept { return counted; });
  bool crowded = false;
  bool looked = false;
  Duration spent{};
};

TEST_CASE("core/spinning: a thread looks once its waits are short and its core is free, and stops when they are long",
          "[core][fast]") {
  counted = CoreTime{1, 1s, 0s};
  Thread thread;
  CHECK_FALSE(thread.spinning.spins());                                           // nothing is known yet
  for (int i = 0; i < 1000 && !thread.spinning.spins(); ++i) thread.wait(150us);  // both sides sleep
  CHECK(thread.spinning.spins());
  thread.wait(20us, 100ms);
  CHECK(thread.spinning.spins());
  CHECK(thread.looked);
  thread.wait(1ms, 50ms);
  CHECK_FALSE(thread.spinning.spins());
  thread.wait(1ms);
  CHECK_FALSE(thread.looked);
}

TEST_CASE("core/spinning: waits that are long once a thread looks are tried again more and more rarely",
          "[core][fast]") {
  counted = CoreTime{1, 1s, 0s};
  Thread thread;
  const auto go_on = [&] {
    int waits = 0;
    for (const TimePoint until = thread.now + 10s; thread.now < until; ++waits)
      thread.wait(thread.spinning.spins() ? 250us : 150us);
    return waits;
  };
  go_on();
  thread.spent = {};
  const int waits = go_on();
  CHECK(thread.spent > waits * 10us);  // it has been tried
  CHECK(thread.spent < waits * 10us + 20 * Spinning::kWaits * Spinning::kUsual);
}

TEST_CASE("core/spinning: nobody looks where others want the core, or where that cannot be seen", "[core][fast]") {
  counted = CoreTime{1, 1s, 0s};
  Thread thread;
  thread.wait(20us, 1s);
  CHECK(thread.spinning.spins());
  thread.crowded = true;
  thread.wait(20us, 1s);
  CHECK_FALSE(thread.spinning.spins());
  thread.crowded = false;
  thread.wait(20us, 3s);
  CHECK(thread.spinning.spins());
  counted.reset();
  thread.wait(20us, 1s);
  CHECK_FALSE(thread.spinning.spins());
}

TEST_CASE("core/spinning: a thread that has slept for long is not judged by how it woke up", "[core][fast]") {
  counted = CoreTime{1, 1s, 0s};
  Thread thread;
  thread.wait(20us, 1s);
  for (int i = 0; i < 100; ++i) {
    thread.spinning.forget();
    thread.now += 50ms;
    counted->stood_in_line += 20us;
    thread.wait(20us, 60us);
    CHECK(thread.spinning.spins());
  }
}

TEST_CASE("core/spinning: what two threads were counted is not compared", "[core][fast]") {
  counted = CoreTime{1, 1s, 0s};
  Thread thread;
  thread.wait(20us, 1s);
  counted = CoreTime{2, 1s, 1000s};  // another one drives
  thread.wait(20us, 1s);
  CHECK(thread.spinning.spins());
}

TEST_CASE("core/spinning: a time that is set is kept whatever the waits are", "[core][fast]") {
  for (const Duration most : {Duration(0us), Duration(200us)}) {
    Thread thread;
    thread.spinning = Spinning::always(most);
    for (const Duration length : {Duration(20us), Duration(5ms), Duration(100us)}) {
      for (int i = 0; i < 100; ++i) thread.wait(length);
      CHECK(thread.looked == (most > 0us));
    }
  }
}

TEST_CASE("core/spinning: a wait that is forgotten is not counted", "[core][fast]") {
  counted = CoreTime{1, 1s, 0s};
  Thread thread;
  thread.wait(20us, 1s);
  for (int i = 0; i < 100; ++i) {
    CHECK(thread.spinning.look_again(thread.now));
    thread.now += 5ms;
    thread.spinning.forget();
    thread.wait(20us);
  }
  CHECK(thread.spinning.spins());
}

TEST_CASE("core/spinning: the kernel counts the time of the calling thread", "[core][fast]") {
  const std::optional<CoreTime> before = core_time_of_this_thread();
  if (!before) return;  // a kernel that does not
  CHECK(before->thread > 0);
  for (const TimePoint until = Clock::now() + 20ms; Clock::now() < until;) {
  }
  const std::optional<CoreTime> after = core_time_of_this_thread();
  REQUIRE(after);
  CHECK(after->thread == before->thread);
  CHECK(after->ran + after->stood_in_line > before->ran + before->stood_in_line);
}

}  // namespace
