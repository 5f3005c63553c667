#include "hybridps/transport/handover.h"

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using transport::Handover;
using transport::HandoverOptions;

constexpr std::uint64_t kChunk = 64 * 1024;

/// A transport whose byte takes `ns` of a thread, and that moves `bytes_per_second`, a chunk at a time.
struct Traffic {
  core::TimePoint now = core::TimePoint{} + core::from_seconds(100);
  double ns = 0.5;

  /// False: nothing was said within so many seconds.
  template <typename Tell>
  bool run(double bytes_per_second, double seconds, const Tell& tell) {
    const core::TimePoint until = now + core::from_seconds(seconds);
    while (now < until) {
      now += core::from_seconds(kChunk / bytes_per_second);
      if (tell()) return true;
    }
    return false;
  }
  bool here(Handover& handover, double bytes_per_second, double seconds) {
    return run(bytes_per_second, seconds,
               [&] { return handover.moved_here(now, core::from_seconds(kChunk * ns / 1e9), kChunk); });
  }
  bool there(Handover& handover, double bytes_per_second, double seconds) {
    return run(bytes_per_second, seconds, [&] { return handover.moved_there(now, kChunk); });
  }
};

}  // namespace

TEST_CASE("transport/handover: bytes that take much of a thread go to another, within two stretches",
          "[transport][fast]") {
  for (const double ns : {0.2, 0.5, 4.0}) {
    Handover handover;
    Traffic traffic;
    traffic.ns = ns;
    CHECK_FALSE(traffic.here(handover, 0.15e9 / ns, 10));  // 15 % of a thread
    CHECK(handover.seconds_per_byte() == 0);
    const core::TimePoint begin = traffic.now;
    REQUIRE(traffic.here(handover, 0.5e9 / ns, 10));
    CHECK(traffic.now - begin <= 2 * HandoverOptions().stretch + core::from_seconds(0.001));
    CHECK(handover.seconds_per_byte() * 1e9 > 0.99 * ns);
    CHECK(handover.seconds_per_byte() * 1e9 < 1.01 * ns);
  }
}

TEST_CASE("transport/handover: bytes come back when they have been few for long, pauses or not", "[transport][fast]") {
  Handover handover;
  Traffic traffic;
  REQUIRE(traffic.here(handover, 1e9, 10));
  CHECK_FALSE(traffic.there(handover, 1e9, 10));
  CHECK_FALSE(traffic.there(handover, 0.4e9, 10));  // 20 % of a thread
  // Short bursts, each with a second's pause behind it: the bursts decide.
  for (int i = 0; i < 200; ++i) {
    REQUIRE_FALSE(traffic.there(handover, 1e9, 0.05));
    traffic.now += core::from_seconds(1);
  }
  CHECK_FALSE(traffic.there(handover, 0.1e9, 0.9));
  CHECK(traffic.there(handover, 0.1e9, 0.3));
  // And begins anew.
  CHECK_FALSE(traffic.here(handover, 0.1e9, 1));
  CHECK(traffic.here(handover, 1e9, 0.05));
}

TEST_CASE("transport/handover: one burst is too short to say anything", "[transport][fast]") {
  Handover handover;
  Traffic traffic;
  for (int i = 0; i < 100; ++i) {
    REQUIRE_FALSE(traffic.here(handover, 2e9, 0.004));
    traffic.now += core::from_seconds(0.05);
  }
}

TEST_CASE("transport/handover: of several that share the load as many go as it takes, and come back",
          "[transport][fast]") {
  for (const int transports : {2, 4, 8}) {
    Handover handover;
    Traffic traffic;
    // A saturated thread: two thirds of it move bytes, whosever turn it is, and what was handed over takes nothing of
    // it.
    int over = 0;
    const auto run = [&](double share, double seconds) {
      const core::TimePoint until = traffic.now + core::from_seconds(seconds);
      int turn = 0;
      while (traffic.now < until) {
        traffic.now += core::from_seconds(kChunk * traffic.ns / 1e9 / share);
        const bool there = turn++ % transports < over;
        if (there && handover.moved_there(traffic.now, kChunk)) --over;
        if (!there && handover.moved_here(traffic.now, core::from_seconds(kChunk * traffic.ns / 1e9), kChunk)) ++over;
      }
    };
    run(0.67, 5);
    CHECK(over >= 1);
    CHECK((1 - static_cast<double>(over) / transports) * 0.67 < 0.3);
    const int most = over;
    run(0.67, 5);
    CHECK(over == most);
    run(0.05, 5.0 * transports);
    CHECK(over == 0);
    // What one may just not keep, and would get back if that were looked at alone, does not go to and fro.
    run(0.25, 5);
    const int some = over;
    CHECK(some >= 1);
    run(0.25, 20);
    CHECK(over == some);
  }
}
