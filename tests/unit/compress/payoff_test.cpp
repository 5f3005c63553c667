#include "hybridps/compress/payoff.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <vector>

#include "tests/support/catch.h"

using hybridps::compress::Payoff;
using hybridps::compress::TimedSum;

namespace {

constexpr double kInt8 = 34.0 / 128.0;
constexpr std::uint64_t kMiB = 1 << 20;

/// Ranks that issue the same sums. A sum takes `wire` seconds a byte on the wire, the codec `codec` a byte, and each
/// starts when the one before has ended or its rank is there, whichever is later.
struct Ranks {
  Ranks(int count, double ratio) : ratio_of_bytes(ratio) {
    for (int i = 0; i < count; ++i) all.push_back(std::make_unique<Payoff>(ratio, true));
  }
  void step(const std::vector<std::uint64_t>& sizes, double wire, double codec, double late = 0.0) {
    for (auto& rank : all) rank->begin_step();
    std::vector<double> least;
    bool asked = false;
    for (auto& rank : all) {
      const auto values = rank->question();
      if (rank == all.front()) asked = values.has_value();
      REQUIRE(values.has_value() == asked);
      if (!values) continue;
      if (least.empty()) least = *values;
      for (std::size_t i = 0; i < least.size(); ++i) least[i] = std::min(least[i], (*values)[i]);
    }
    plain = 0;
    double now = clock;
    for (const std::uint64_t bytes : sizes) {
      const bool coded = all.front()->is_coded(bytes);
      plain += coded ? 0 : 1;
      const double encoding = coded ? codec * static_cast<double>(bytes) : 0.0;
      const double takes = encoding + wire * static_cast<double>(bytes) * (coded ? ratio_of_bytes : 1.0);
      for (std::size_t r = 0; r < all.size(); ++r) {
        CHECK(all[r]->is_coded(bytes) == coded);
        if (const auto timed = all[r]->timed(bytes)) {
          // The last rank comes late: the others wait for it.
          timed->begin(at(now - (r + 1 == all.size() ? 0.0 : late)));
          timed->end(at(now + takes),
                     std::chrono::duration_cast<hybridps::core::Duration>(std::chrono::duration<double>(encoding)));
        }
      }
      now += takes + late;
    }
    clock = now + 1.0;
    if (!least.empty())
      for (auto& rank : all) rank->answer(least);
  }
  static hybridps::core::TimePoint at(double seconds) {
    return hybridps::core::TimePoint(
        std::chrono::duration_cast<hybridps::core::Duration>(std::chrono::duration<double>(seconds)));
  }
  double ratio_of_bytes;
  double clock = 1000.0;
  int plain = 0;  // sums of the last step that went as they are
  std::vector<std::unique_ptr<Payoff>> all;
};

}  // namespace

TEST_CASE("compress/payoff: where the wire is slow the codec stays, and nothing goes without it meanwhile",
          "[compress][fast]") {
  Ranks ranks(3, kInt8);
  int plain = 0;
  for (int step = 0; step < 12; ++step) {
    ranks.step({kMiB, 8 * kMiB, 100 << 10}, 8.0 / 500e6, 1 / 10e9, /*late=*/0.01);
    plain += ranks.plain;
  }
  CHECK(plain == 0);
  for (const auto& rank : ranks.all) {
    CHECK(rank->is_decided());
    CHECK(rank->decisions()[Payoff::class_of(8 * kMiB)].why == Payoff::Why::kShare);
    CHECK(rank->decisions()[Payoff::class_of(8 * kMiB)].codec_share < 0.1);
    for (const auto& decision : rank->decisions()) CHECK(decision.coded);
  }
}

TEST_CASE("compress/payoff: where the codec is the limit both ways are tried, and the quicker stays, by size",
          "[compress][fast]") {
  // 40 Gbit/s: as it is 0.2 ns a byte; coded 0.053 + 0.5.
  Ranks ranks(4, kInt8);
  std::vector<int> plain;
  for (int step = 0; step < 16; ++step) {
    ranks.step({2 * kMiB, 2 * kMiB, 32 * kMiB}, 8.0 / 40e9, 0.5e-9, /*late=*/1e-4);
    plain.push_back(ranks.plain);
  }
  // Two settle, two are measured, one asks, four try, one asks, and then.
  CHECK(plain == std::vector<int>{0, 0, 0, 0, 0, 3, 0, 0, 3, 0, 3, 3, 3, 3, 3, 3});
  for (const auto& rank : ranks.all) {
    const auto& decision = rank->decisions()[Payoff::class_of(2 * kMiB)];
    CHECK(decision.why == Payoff::Why::kTrial);
    CHECK_FALSE(decision.coded);
    CHECK(decision.plain_seconds < decision.coded_seconds);
    CHECK(decision.plain_seconds > 0.9 * 4 * kMiB * 0.2e-9);
    CHECK(decision.plain_seconds < 1.1 * 4 * kMiB * 0.2e-9);  // without the ranks that waited
    CHECK_FALSE(rank->is_coded(kMiB));                        // sizes that have not come up
    CHECK_FALSE(rank->is_coded(1000));
  }
}

TEST_CASE("compress/payoff: a codec that takes half the time and is quicker all the same stays", "[compress][fast]") {
  Ranks ranks(2, kInt8);
  int plain = 0;
  for (int step = 0; step < 14; ++step) {
    ranks.step({4 * kMiB}, 1e-9, 0.3e-9);
    plain += ranks.plain;
  }
  CHECK(plain == 2);
  CHECK(ranks.all[0]->decisions()[Payoff::class_of(4 * kMiB)].why == Payoff::Why::kTrial);
  CHECK(ranks.all[1]->is_coded(4 * kMiB));
}

TEST_CASE("compress/payoff: forced, unanswered, and sums that never end", "[compress][fast]") {
  Payoff forced(kInt8, false);
  for (int step = 0; step < 10; ++step) {
    forced.begin_step();
    CHECK_FALSE(forced.question());
    CHECK(forced.timed(kMiB) == nullptr);
    CHECK(forced.is_coded(kMiB));
  }
  Payoff unanswered(kInt8, true);
  std::shared_ptr<TimedSum> kept;
  for (int step = 0; step < 20; ++step) {
    unanswered.begin_step();
    if (unanswered.question()) unanswered.answer({});
    if (auto timed = unanswered.timed(kMiB)) kept = timed;  // begins, and does not end
    CHECK(unanswered.is_coded(kMiB));
  }
  REQUIRE(kept);
  CHECK(unanswered.is_decided());
  CHECK(unanswered.decisions()[Payoff::class_of(kMiB)].why == Payoff::Why::kUndecided);
}

TEST_CASE("compress/payoff: classes", "[compress][fast]") {
  CHECK(Payoff::class_of(0) == 0);
  CHECK(Payoff::class_of((256 << 10) - 1) == 0);
  CHECK(Payoff::class_of(256 << 10) == 1);
  CHECK(Payoff::class_of(std::uint64_t{1} << 40) == Payoff::kClasses - 1);
  CHECK(Payoff::class_text(0) == "below 256 KiB");
  CHECK(Payoff::class_text(1) == "256 KiB to 1 MiB");
  CHECK(Payoff::class_text(Payoff::kClasses - 1) == "from 16 MiB on");
}
