#include "hybridps/engine/wake_moderation.h"

#include "tests/support/catch.h"

namespace {

using hybridps::core::Duration;
using hybridps::core::TimePoint;
using hybridps::engine::WakeModeration;
using std::chrono::milliseconds;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// Bulk at `rate` bytes/s for a second; the nap that is given then, with so much left.
Duration nap_at(double rate, std::uint64_t left) {
  WakeModeration moderation;
  TimePoint now{std::chrono::hours(1)};
  Duration nap{};
  for (int ms = 0; ms < 1000; ++ms, now += milliseconds(1))
    nap = moderation.nap(static_cast<std::uint64_t>(rate * ms / 1000), left, now);
  return nap;
}

}  // namespace

TEST_CASE("engine/wake_moderation: a nap is as long as a batch takes, within its bounds", "[engine][fast]") {
  const double batch = static_cast<double>(WakeModeration::kBatchBytes);
  const Duration at_500mbit = nap_at(62.5e6, 64 * kMiB);
  CHECK(hybridps::core::to_seconds(at_500mbit) == Approx(batch / 62.5e6).epsilon(0.05));
  CHECK(nap_at(1e6, 64 * kMiB) == WakeModeration::kNapMax);
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
          static_cast<double>(left) / 62.5e6 * WakeModeration::kPartOfRest * 1.001 + 1e-6);
    before = nap;
  }
}

TEST_CASE("engine/wake_moderation: nothing flows, nobody naps; after a pause the rate is found anew", "[engine][fast]") {
  WakeModeration moderation;
  TimePoint now{std::chrono::hours(1)};
  std::uint64_t bytes = 0;
  for (int ms = 0; ms < 100; ++ms, now += milliseconds(1)) {
    CHECK(moderation.nap(bytes, 64 * kMiB, now) == Duration::zero());
  }
  for (int ms = 0; ms < 100; ++ms, now += milliseconds(1), bytes += 62500) (void)moderation.nap(bytes, 64 * kMiB, now);
  CHECK(moderation.nap(bytes, 64 * kMiB, now) > Duration::zero());
  now += std::chrono::seconds(10);
  CHECK(moderation.nap(bytes, 64 * kMiB, now) == Duration::zero());
}
