#include "hybridps/schedule/stores.h"

#include <cmath>
#include <random>
#include <vector>

#include "tests/support/catch.h"

namespace {

using hybridps::schedule::StoreChooser;

constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;

/// Operations of one class, where either kind takes so long, but for noise that makes some longer, and one that follows
/// the other kind takes 1.5 times as long. What the last one had.
struct Ranks {
  Ranks(int count, std::uint64_t seed) : choosers(static_cast<std::size_t>(count)), random(seed) {}
  bool run(int operations, std::uint64_t bytes, double through, double past) {
    for (int i = 0; i < operations; ++i) {
      std::vector<StoreChooser::Choice> choices;
      for (StoreChooser& chooser : choosers) choices.push_back(chooser.begin(3, bytes));
      const bool kind = choices.front().past_cache;
      double seconds = (kind ? past : through) * (kind == last ? 1.0 : 1.5);
      seconds *= 1.0 + std::fabs(std::normal_distribution<double>(0.0, 0.05)(random));
      if (std::uniform_real_distribution<double>()(random) < 0.1) seconds *= 3.0;
      for (std::size_t rank = 0; rank < choosers.size(); ++rank) {
        disagreed += choices[rank].past_cache != kind ? 1 : 0;
        slower += kind == (past > through) ? 1 : 0;
        choosers[rank].end(choices[rank], seconds * (1.0 + 0.001 * static_cast<double>(rank)));
      }
      last = kind;
    }
    return last;
  }
  std::vector<StoreChooser> choosers;
  std::mt19937_64 random;
  bool last = false;
  int disagreed = 0;
  int slower = 0;
};

}  // namespace

TEST_CASE("schedule/stores: the quicker kind is found, and found again when it changes", "[schedule][fast]") {
  for (const std::uint64_t bytes : {kMiB / 4, kMiB, 4 * kMiB, 32 * kMiB})
    for (std::uint64_t seed = 1; seed <= 20; ++seed) {
      const int trial = bytes < kMiB ? 24 : 12;
      const int until_next = bytes < kMiB ? 8300 : 2200;
      INFO(bytes << " bytes, seed " << seed);
      Ranks ranks(2, seed);
      CHECK(ranks.run(8 + trial + 1, bytes, 1.0, 1.3) == false);
      CHECK(ranks.slower <= 2 * (8 + trial / 2));
      CHECK(ranks.run(until_next, bytes, 2.0, 1.0) == true);
      CHECK(ranks.run(until_next, bytes, 1.0, 1.3) == false);
      CHECK(ranks.disagreed == 0);
    }
}

TEST_CASE("schedule/stores: sizes of one class, in whatever turn, are compared per byte", "[schedule][fast]") {
  // Of six operations one has little more than half of the bytes of the others.
  for (int small = 0; small < 6; ++small) {
    StoreChooser chooser;
    int past = 0;
    for (int i = 0; i < 600; ++i) {
      const std::uint64_t bytes = i % 6 == small ? 2 * kMiB + 64 : 4 * kMiB - 64;
      const StoreChooser::Choice choice = chooser.begin(3, bytes);
      if (choice.of == 0) past += choice.past_cache ? 1 : 0;
      chooser.end(choice, static_cast<double>(bytes) * (choice.past_cache ? 1.2 : 1.0));
    }
    INFO(small);
    CHECK(past == 0);
  }
}

TEST_CASE("schedule/stores: without a difference, or a trial, it stays as it began", "[schedule][fast]") {
  int changed = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    Ranks ranks(2, seed);
    changed += ranks.run(600, 32 * kMiB, 1.0, 1.0) ? 0 : 1;
  }
  CHECK(changed <= 6);  // three trials each, of a few operations
  StoreChooser chooser;
  CHECK_FALSE(chooser.begin(3, StoreChooser::kBytesMin - 1).past_cache);
  for (int i = 0; i < 100; ++i) CHECK(chooser.begin(3, StoreChooser::kBytesMin - 1).of == 0);
  CHECK(chooser.begin(3, StoreChooser::kPastCacheBytes).past_cache);
  CHECK_FALSE(chooser.begin(3, StoreChooser::kPastCacheBytes - 1).past_cache);
  // Of one kind nothing is known: no choice comes of it.
  for (int i = 0; i < 2000; ++i) {
    const StoreChooser::Choice choice = chooser.begin(4, 2 * StoreChooser::kPastCacheBytes);
    if (choice.of == 0) CHECK(choice.past_cache);
    CHECK_FALSE(chooser.end(choice, choice.past_cache ? 1.0 : 0.0));
  }
}

TEST_CASE("schedule/stores: few operations are trials, and classes are bounded", "[schedule][fast]") {
  StoreChooser chooser;
  int timed = 0;
  for (int i = 0; i < 20480; ++i) timed += chooser.begin(1, 4 * kMiB).of != 0 ? 1 : 0;
  CHECK(timed == 12 * (3 + 9));
  int small = 0;
  for (int i = 0; i < 81920; ++i) small += chooser.begin(1, kMiB / 4).of != 0 ? 1 : 0;
  CHECK(small == 24 * (3 + 9));
  for (std::uint32_t kind = 2; kind < 200; ++kind)
    for (int i = 0; i < 20; ++i) timed += chooser.begin(kind, 4 * kMiB).of != 0 ? 1 : 0;
  CHECK(timed == 12 * (3 + 9) + 12 * static_cast<int>(StoreChooser::kClassesMax - 2));
}
