#include "hybridps/pg/gil.h"

#include <chrono>
#include <condition_variable>
#include <mutex>
#include <thread>

#include "tests/support/catch.h"

using namespace hybridps;
using namespace std::chrono_literals;

namespace {

int looks = 0;
bool pressed = false;
struct Interrupted {};

/// In place of the interpreter.
class Interpreter {
 public:
  Interpreter() {
    looks = 0;
    pressed = false;
    pg::install_interpreter_lock({.check_signals = [] {
      ++looks;
      if (pressed) throw Interrupted();
    }});
  }
  ~Interpreter() { pg::install_interpreter_lock({}); }
};

/// As every wait of pg sleeps: on a condition variable, until it is signalled.
struct Event {
  bool wait(core::TimePoint until) {
    std::unique_lock lock(mutex);
    return changed.wait_until(lock, until, [this] { return set; });
  }
  std::mutex mutex;
  std::condition_variable changed;
  bool set = false;
};

}  // namespace

TEST_CASE("pg/gil: a wait without end hears of Ctrl-C", "[pg][fast]") {
  const Interpreter interpreter;
  Event never;
  pressed = true;
  CHECK_THROWS_AS(
      pg::wait_with_signals(core::TimePoint::max(), [&](core::TimePoint until) { return never.wait(until); }),
      Interrupted);
  CHECK(looks == 1);
}

TEST_CASE("pg/gil: so does a wait with a deadline", "[pg][fast]") {
  const Interpreter interpreter;
  Event never;
  pressed = true;
  CHECK_THROWS_AS(pg::wait_with_signals(core::Clock::now() + std::chrono::hours(1),
                                        [&](core::TimePoint until) { return never.wait(until); }),
                  Interrupted);
}

TEST_CASE("pg/gil: a wait ends with what it waits for, or at its deadline, which it does not overrun", "[pg][fast]") {
  const Interpreter interpreter;
  Event there;
  there.set = true;
  CHECK(pg::wait_with_signals(core::TimePoint::max(), [&](core::TimePoint until) { return there.wait(until); }));
  CHECK(looks == 0);
  Event never;
  const auto deadline = core::Clock::now() + 130ms;
  CHECK_FALSE(pg::wait_with_signals(deadline, [&](core::TimePoint until) {
    CHECK(until <= deadline);
    return never.wait(until);
  }));
  CHECK(core::Clock::now() >= deadline);
}

TEST_CASE("pg/gil: only the main thread looks for signals", "[pg][fast]") {
  const Interpreter interpreter;
  Event never;
  pressed = true;
  bool complete = true;
  std::thread([&] {
    complete =
        pg::wait_with_signals(core::Clock::now() + 120ms, [&](core::TimePoint until) { return never.wait(until); });
  }).join();
  CHECK_FALSE(complete);
  CHECK(looks == 0);
}
