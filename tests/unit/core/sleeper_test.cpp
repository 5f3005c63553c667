#include "hybridps/core/sleeper.h"

#include <atomic>
#include <thread>

#include "tests/support/catch.h"

namespace core = hybridps::core;

TEST_CASE("core/sleeper: an event descriptor is readable from signal to drain", "[core][fast]") {
  core::EventFd event;
  event.signal();  // not open: nothing happens
  REQUIRE(event.open());
  const int fd = event.get();
  REQUIRE(event.open());
  CHECK(event.get() == fd);
  core::Sleeper sleeper;
  REQUIRE(sleeper.open());
  REQUIRE(sleeper.watch(fd));
  CHECK_FALSE(sleeper.watch(fd));
  event.signal();
  sleeper.sleep(-1);
  sleeper.sleep(-1);  // still readable
  event.drain();
  sleeper.sleep(0);
  sleeper.unwatch(fd);
  event.signal();
  sleeper.sleep(0);
}

TEST_CASE("core/sleeper: only one wake-up of a sleeping thread counts", "[core][fast]") {
  core::Sleeper sleeper;
  REQUIRE(sleeper.open());
  CHECK_FALSE(sleeper.wake());
  sleeper.lie_down();
  CHECK(sleeper.is_down());
  CHECK(sleeper.wake());
  CHECK_FALSE(sleeper.is_down());
  CHECK_FALSE(sleeper.wake());
  sleeper.sleep(-1);
  sleeper.get_up();
}

TEST_CASE("core/sleeper: no work is left to a thread that sleeps", "[core][fast]") {
  constexpr int kCount = 20'000;
  core::Sleeper sleeper;
  REQUIRE(sleeper.open());
  std::atomic<int> put{0};
  std::thread thread([&] {
    for (int taken = 0; taken < kCount;) {
      if (put.load() > taken) {
        ++taken;
        continue;
      }
      sleeper.lie_down();
      if (put.load() == taken) sleeper.sleep(-1);
      sleeper.get_up();
    }
  });
  for (int i = 0; i < kCount; ++i) {
    put.fetch_add(1);
    sleeper.wake();
    if (i % 64 == 0) std::this_thread::yield();
  }
  thread.join();
  CHECK(put.load() == kCount);
}
