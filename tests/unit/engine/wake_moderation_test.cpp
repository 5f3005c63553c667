#include "hybridps/engine/wake_moderation.h"

#include "tests/support/catch.h"

namespace {

using hybridps::core::Duration;
using hybridps::core::TimePoint;
using hybridps::engine::WakeModeration;
using std::chrono::milliseconds;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

struct Flow {
  WakeModeration moderation;
  TimePoint now{std::chrono::hours(1)};
  std::uint64_t bytes = 0;

  void run(double rate, std::uint64_t left, int ms) {
    for (int i = 0; i < ms; ++i) {
      now += milliseconds(1);
      bytes += static_cast<std::uint64_t>(rate / 1000);
      moderation.look(bytes, left, now);
    }
  }
};

/// The nap that is given with so much left, after bulk at `rate` bytes/s for a second.
Duration nap_at(double rate, std::uint64_t left) {
  Flow flow;
  flow.run(rate, 64 * kMiB, 1000);
  return flow.moderation.nap(left);
}

}  // namespace

TEST_CASE("engine/wake_moderation: a nap is as long as a batch takes, within its bounds", "[engine][fast]") {
  const double batch = static_cast<double>(WakeModeration::kBatchBytes);
  CHECK(hybridps::core::to_seconds(nap_at(62.5e6, 64 * kMiB)) == Approx(batch / 62.5e6).epsilon(0.05));
  CHECK(nap_at(10e6, 64 * kMiB) == WakeModeration::kNapMax);
  CHECK(nap_at(1e6, 64 * kMiB) == Duration::zero());     // so slow that it may be anything
  CHECK(nap_at(1.25e9, 64 * kMiB) == Duration::zero());  // 10 Gbit/s: not worth a timer
}

TEST_CASE("engine/wake_moderation: what is nearly done is not slept through", "[engine][fast]") {
  CHECK(nap_at(62.5e6, 0) == Duration::zero());
  CHECK(nap_at(62.5e6, kMiB) == Duration::zero());
  Duration before = Duration::zero();
  for (const std::uint64_t left : {2 * kMiB, 4 * kMiB, 8 * kMiB, 64 * kMiB}) {
    const Duration nap = nap_at(62.5e6, left);
    CHECK(nap >= before);
    CHECK(hybridps::core::to_seconds(nap) <=
          static_cast<double>(left) / 62.5e6 * WakeModeration::kPartOfRest * 1.02 + 1e-6);
    before = nap;
  }
}

TEST_CASE("engine/wake_moderation: nobody naps where nothing flows, or an operation has only begun", "[engine][fast]") {
  Flow flow;
  flow.run(0, 64 * kMiB, 100);
  CHECK(flow.moderation.nap(64 * kMiB) == Duration::zero());
  flow.run(62.5e6, 64 * kMiB, 100);
  CHECK(flow.moderation.nap(64 * kMiB) > Duration::zero());
  flow.run(0, 0, 100);  // the operation is over
  flow.moderation.look(flow.bytes, 64 * kMiB, flow.now += milliseconds(1));
  CHECK(flow.moderation.nap(64 * kMiB) == Duration::zero());
  flow.run(62.5e6, 64 * kMiB, 12);
  CHECK(flow.moderation.nap(64 * kMiB) > Duration::zero());
}

TEST_CASE("engine/wake_moderation: the rate is that of the time in which something was under way", "[engine][fast]") {
  Flow flow;
  CHECK(flow.moderation.rate() == 0.0);
  for (int i = 0; i < 20; ++i) {
    flow.run(1e9, 64 * kMiB, 50);
    flow.run(0, 0, 50);  // computing
  }
  CHECK(flow.moderation.rate() == Approx(1e9).epsilon(0.2));
  flow.now += std::chrono::seconds(10);  // nobody looked
  flow.run(1e9, 64 * kMiB, 1);
  CHECK(flow.moderation.rate() == Approx(1e9).epsilon(0.2));
}
