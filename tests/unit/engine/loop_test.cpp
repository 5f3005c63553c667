#include "hybridps/engine/loop.h"

#include <fenv.h>
#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/core/float_mode.h"
#include "hybridps/reduce/sum.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"

// A Loop over one runtime on loopback transports. Nothing here asserts a time, but that things happen within seconds.
namespace {

using namespace hybridps;
using namespace std::chrono_literals;
using core::Clock;
using core::TimePoint;

struct Client final : engine::LoopClient {
  std::size_t round() override {
    ++rounds;
    return 0;
  }
  void finish() override { finished_on = std::this_thread::get_id(); }
  std::atomic<std::size_t> rounds{0};
  std::thread::id finished_on;
};

test::ClusterOptions two_nodes() {
  test::ClusterOptions options;
  options.node_of = {0, 1};
  return options;
}

struct Rig {
  Rig() : cluster(two_nodes()), loop(cluster.at(0), client, {"test-loop"}) { REQUIRE(loop.start().is_ok()); }
  test::Cluster cluster;
  Client client;
  engine::Loop loop;
};

template <typename Condition>
bool within_seconds(Condition condition) {
  const TimePoint limit = Clock::now() + 20s;
  while (!condition()) {
    if (Clock::now() > limit) return false;
    std::this_thread::sleep_for(100us);
  }
  return true;
}

TEST_CASE("engine/loop: what is posted runs on the loop's thread, in order", "[engine][fast]") {
  Rig rig;
  std::vector<int> order;
  std::atomic<int> done{0};
  std::thread::id where;
  bool inside = false;
  for (int i = 0; i < 100; ++i) {
    rig.loop.post([&, i] {
      order.push_back(i);
      where = std::this_thread::get_id();
      inside = rig.loop.in_round();
      ++done;
    });
  }
  REQUIRE(within_seconds([&] { return done == 100; }));
  for (int i = 0; i < 100; ++i) CHECK(order[static_cast<std::size_t>(i)] == i);
  CHECK(where != std::this_thread::get_id());
  CHECK(inside);
  CHECK_FALSE(rig.loop.in_round());
  rig.loop.stop();
  CHECK(rig.client.finished_on == where);
}

TEST_CASE("engine/loop: a caller that drives runs its command itself", "[engine][fast]") {
  Rig rig;
  int here = 0;
  for (int i = 0; i < 200; ++i) {
    std::atomic<bool> done{false};
    std::thread::id where;
    rig.loop.post(
        [&] {
          where = std::this_thread::get_id();
          done = true;
        },
        /*will_drive=*/true);
    rig.loop.drive([&] { return done.load(); }, TimePoint::max());
    REQUIRE(done);
    here += where == std::this_thread::get_id();
  }
  CHECK(here > 0);  // the thread may be quicker, on a busy machine
}

TEST_CASE("engine/loop: its thread stays parked between the operations of a caller that drives", "[engine][fast]") {
  test::MovableClock clock;  // stands still: no claim passes
  clock.pass(1h);            // nor by the kernel's clock, where the thread waits for its end
  Rig rig;
  const auto runs_here = [&rig] {
    std::atomic<bool> done{false};
    std::thread::id where;
    rig.loop.post(
        [&] {
          where = std::this_thread::get_id();
          done = true;
        },
        /*will_drive=*/true);
    for (int i = 0; i < 1000; ++i) std::this_thread::yield();  // a thread that is not parked takes it
    rig.loop.drive([&] { return done.load(); }, TimePoint::max());
    return where == std::this_thread::get_id();
  };
  runs_here();  // or there: the thread may be awake
  for (int i = 0; i < 20; ++i) CHECK(runs_here());
}

TEST_CASE("engine/loop: its thread has a name and takes no signals", "[engine][fast]") {
  Rig rig;
  char name[16] = {};
  sigset_t blocked;
  const auto look = [&](core::Status&) {
    pthread_getname_np(pthread_self(), name, sizeof name);
    pthread_sigmask(SIG_BLOCK, nullptr, &blocked);
  };
  REQUIRE(rig.loop.call(look, 20s).is_ok());
  CHECK(std::string(name) == "test-loop");
  for (const int signal : {SIGINT, SIGTERM, SIGCHLD}) CHECK(sigismember(&blocked, signal) == 1);
}

TEST_CASE("engine/loop: a promise that is not kept costs no more than a moment", "[engine][fast]") {
  Rig rig;
  for (int i = 0; i < 20; ++i) {
    std::atomic<bool> done{false};
    rig.loop.post([&] { done = true; }, /*will_drive=*/true);
    REQUIRE(within_seconds([&] { return done.load(); }));
  }
}

TEST_CASE("engine/loop: one caller drives at a time, until its deadline, and sees what others post", "[engine][fast]") {
  Rig rig;
  std::atomic<bool> stop{false};
  std::atomic<bool> driving{false};
  std::thread driver([&] {
    rig.loop.drive(
        [&] {
          driving = true;
          return stop.load();
        },
        TimePoint::max());
  });
  REQUIRE(within_seconds([&] { return driving.load(); }));
  rig.loop.drive([] { return false; }, TimePoint::max());  // returns, since another one drives
  std::atomic<int> done{0};
  std::thread::id where;
  for (int i = 0; i < 50; ++i) {
    std::this_thread::sleep_for(i % 10 == 0 ? 2ms : 0ms);
    rig.loop.post([&] {
      where = std::this_thread::get_id();
      ++done;
    });
  }
  REQUIRE(within_seconds([&] { return done == 50; }));
  CHECK(where == driver.get_id());
  rig.loop.post([&] { stop = true; });
  driver.join();
  // It left after a long time: the thread has taken over.
  rig.loop.post([&] { ++done; });
  REQUIRE(within_seconds([&] { return done == 51; }));
  rig.loop.drive([] { return false; }, Clock::now() + 5ms);
  rig.loop.drive([] { return false; }, Clock::now() - 1ms);
  SUCCEED("deadlines end it");
}

#if defined(__x86_64__)
constexpr core::FloatMode kFlushing = 0x8040;  // flush to zero, denormals are zero: torch.set_flush_denormal(True)
#elif defined(__aarch64__)
constexpr core::FloatMode kFlushing = 1U << 24;
#endif

#if defined(__x86_64__) || defined(__aarch64__)
/// Two sums that another mode changes: of denormals, and of what is no float.
std::vector<float> sums() {
  const std::vector<float> a = {std::numeric_limits<float>::denorm_min(), 1.0F};
  const std::vector<float> b = {std::numeric_limits<float>::denorm_min(), 1e-12F};
  std::vector<float> sum(2);
  const std::vector<reduce::Input> inputs = {{reinterpret_cast<const std::byte*>(a.data())},
                                             {reinterpret_cast<const std::byte*>(b.data())}};
  reduce::combine(inputs, reinterpret_cast<std::byte*>(sum.data()), 2, core::DType::kFloat32, core::ReduceOp::kSum);
  return sum;
}

TEST_CASE("engine/loop: sums are the same whatever floating-point mode the program's threads have", "[engine][fast]") {
  const std::vector<float> expected = {2 * std::numeric_limits<float>::denorm_min(), 1.0F};
  std::vector<float> own;
  std::vector<float> driven;
  bool kept = false;
  std::thread([&] {
    core::set_float_mode(core::float_mode() | kFlushing);
    REQUIRE(fesetround(FE_UPWARD) == 0);
    const core::FloatMode mode = core::float_mode() & ~core::kFloatFlags;
    Rig rig;  // its thread inherits the mode
    std::atomic<bool> done{false};
    rig.loop.post([&] {
      own = sums();
      done = true;
    });
    const bool ran = within_seconds([&] { return done.load(); });
    bool sees = false;
    rig.loop.post(
        [&] {
          driven = sums();
          sees = true;
        },
        /*will_drive=*/true);
    rig.loop.drive([&] { return sees; }, Clock::now() + 20s);
    kept = ran && sees && (core::float_mode() & ~core::kFloatFlags) == mode;
    core::set_float_mode(core::kUsualFloatMode);
    fesetround(FE_TONEAREST);
  }).join();
  CHECK(own == expected);
  CHECK(driven == expected);
  CHECK(kept);
}
#endif

TEST_CASE("engine/loop: commands of many threads run once each, whoever drives", "[engine][slow]") {
  Rig rig;
  constexpr int kThreads = 4;
  constexpr int kCommands = 2000;
  std::vector<std::atomic<int>> runs(kThreads * kCommands);
  std::atomic<int> inside{0};
  std::atomic<bool> overlapped{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kCommands; ++i) {
        auto done = std::make_shared<std::atomic<bool>>(false);
        const bool drives = (i + t) % 3 != 0;
        rig.loop.post(
            [&, done, at = static_cast<std::size_t>(t * kCommands + i)] {
              if (inside.fetch_add(1) != 0) overlapped = true;
              ++runs[at];
              inside.fetch_sub(1);
              done->store(true);
            },
            drives);
        if (drives) rig.loop.drive([&] { return done->load(); }, TimePoint::max());
        if (i % 100 == 0) std::this_thread::sleep_for(std::chrono::microseconds(i));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  rig.loop.stop();
  CHECK_FALSE(overlapped);
  for (const auto& count : runs) REQUIRE(count == 1);
}

TEST_CASE("engine/loop: stop runs what was posted, parked or not", "[engine][fast]") {
  for (const bool will_drive : {false, true}) {
    Rig rig;
    int done = 0;
    for (int i = 0; i < 10; ++i) rig.loop.post([&] { ++done; }, will_drive);
    rig.loop.stop();
    CHECK(done == 10);
    rig.loop.stop();
  }
}

TEST_CASE("engine/loop: a command for a loop that has ended is refused at once and dropped", "[engine][fast]") {
  Rig rig;
  rig.loop.stop();
  const auto held = std::make_shared<int>(0);
  for (const bool will_drive : {false, true}) CHECK_FALSE(rig.loop.post([held] { ++*held; }, will_drive));
  CHECK(rig.loop.call([held](core::Status&) { ++*held; }, core::Duration::max()).code() == core::Code::kClosed);
  CHECK(held.use_count() == 1);
  CHECK(*held == 0);
}

TEST_CASE("engine/loop: a call waits for its answer but not for its own thread nor beyond its patience",
          "[engine][fast]") {
  Rig rig;
  const auto fails = [](core::Status& status) { status = core::Status(core::Code::kMismatch, "as told"); };
  CHECK(rig.loop.call(fails, 20s).message() == "as told");
  CHECK(rig.loop.call([](core::Status&) {}, 20s).is_ok());
  // The thread is in `outer`, and stays there until `inner` has come back and a third one was given up.
  core::Status inner;
  std::atomic<int> stage{0};
  REQUIRE(rig.loop.post([&] {
    inner = rig.loop.call([](core::Status&) {}, core::Duration::max());
    stage = 1;
    while (stage != 2) std::this_thread::sleep_for(100us);
  }));
  REQUIRE(within_seconds([&] { return stage == 1; }));
  CHECK(inner.code() == core::Code::kUnsupported);
  const auto ran = std::make_shared<std::atomic<bool>>(false);
  CHECK(rig.loop.call([ran](core::Status&) { *ran = true; }, 1ms).code() == core::Code::kTimeout);
  CHECK_FALSE(ran->load());
  stage = 2;
  REQUIRE(within_seconds([&] { return ran->load(); }));
}

}  // namespace
