#include "hybridps/core/idle_cpus.h"

#include <atomic>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

using namespace hybridps;
using namespace std::chrono_literals;

TEST_CASE("core/idle_cpus: a part between 0 and 1 from the second reading on", "[core][fast]") {
  core::IdleCpus idle;
  const core::TimePoint begin = core::Clock::now();
  const auto first = idle.part(begin);
  if (first) {  // no /proc/stat here
    CHECK(*first == 1.0);
    return;
  }
  CHECK_FALSE(idle.part(begin + 50ms));  // too early for another
  std::optional<double> part;
  for (int turn = 1; !part && turn < 100; ++turn) {
    std::this_thread::sleep_for(20ms);
    part = idle.part(begin + turn * core::IdleCpus::kInterval);
  }
  REQUIRE(part);
  CHECK(*part >= 0.0);
  CHECK(*part <= 1.0);
}

TEST_CASE("core/idle_cpus: threads that work on all CPUs leave little", "[core][fast]") {
  core::IdleCpus idle;
  if (idle.part(core::TimePoint(1h))) return;  // no /proc/stat here
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (unsigned i = 0; i < std::thread::hardware_concurrency(); ++i)
    threads.emplace_back([&stop] {
      while (!stop.load(std::memory_order_relaxed)) {
      }
    });
  std::this_thread::sleep_for(400ms);
  const auto part = idle.part(core::TimePoint(2h));
  stop.store(true);
  for (std::thread& thread : threads) thread.join();
  REQUIRE(part);
  CHECK(*part < 0.5);
}
