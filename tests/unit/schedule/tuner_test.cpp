#include "hybridps/schedule/tuner.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "hybridps/schedule/tuning.h"
#include "tests/support/catch.h"

// The tuner over links that are formulas, with noise from a seed: no real time passes.
namespace {

using hybridps::schedule::Tuner;

constexpr double kKiB = 1024.0;
enum Knob { kChunk, kWindow, kSockets, kPace, kKnobs };

struct Setting {
  double chunk, window, sockets, pace;
};
Setting setting_of(const Tuner::Rungs& rungs) {
  return {4 * kKiB * std::exp2(rungs[kChunk]), 8 * kKiB * std::exp2(rungs[kWindow]), std::exp2(rungs[kSockets]),
          2 * std::exp2(rungs[kPace])};
}
std::vector<Tuner::Knob> knobs(int chunk, int window, int sockets, int pace = 2) {
  return {{"chunk", 11, chunk}, {"window", 14, window}, {"sockets", 3, sockets}, {"pace", 5, pace}};
}

/// What one operation takes. Small chunks cost messages, large ones the time to fill the pipe; small windows wait for
/// round trips, large ones overflow the switch; one connection may not fill the card.
struct Link {
  double rate = 60e6;        // bytes/s
  double connection = 1e12;  // bytes/s, of one
  double round_trip = 1.5e-3;
  double message = 25e-6;     // seconds of a core, each
  double queue = 300 * kKiB;  // of the switch
  double nodes = 4;
  double noise = 0.05;     // of a normal distribution, of the logarithm
  double outliers = 0.02;  // of operations, up to four times as long
  double timeouts = 0.0;   // of operations whose window is beyond the queue, three times as long

  double seconds(double bytes, const Setting& s) const {
    const double carried = std::min({rate, s.sockets * connection, s.window / round_trip, s.chunk / message});
    const double drops = timeouts > 0.0 ? 1.0 : s.window > queue ? 1.0 + 0.15 * std::log2(s.window / queue) : 1.0;
    const double uneven = 1.0 + 0.02 * std::fabs(std::log2(s.pace / 8));
    const double several = 1.0 + 0.01 * (s.sockets - 1);
    return bytes / carried * drops * uneven * several + nodes * s.chunk / carried + 2 * round_trip;
  }
  double best(double bytes) const {
    double least = 1e9;
    for (int c = 0; c < 11; ++c)
      for (int w = 0; w < 14; ++w)
        for (int k = 0; k < 3; ++k)
          for (int p = 0; p < 5; ++p) least = std::min(least, seconds(bytes, setting_of({c, w, k, p})));
    return least;
  }
};

/// A program: what its operations are, one after the other.
using Sizes = std::function<double(int)>;

struct Run {
  Run(std::vector<Tuner::Knob> from, std::uint64_t seed) : tuner(from, seed), random(seed) {
    for (const Tuner::Knob& knob : from) started.push_back(knob.at);
  }

  double noise(const Link& link, const Setting& setting) {
    const bool late = link.timeouts > 0.0 && setting.window > link.queue &&
                      std::uniform_real_distribution<double>()(random) < link.timeouts;
    return (late ? 3.0 : 1.0) * noise(link);
  }
  double noise(const Link& link) {
    double factor = std::exp(std::normal_distribution<double>(0.0, link.noise)(random));
    if (std::uniform_real_distribution<double>()(random) < link.outliers)
      factor *= 1.0 + 3.0 * std::uniform_real_distribution<double>()(random);
    return factor;
  }
  /// So many operations; from a question to what comes of it `gap` others pass.
  void operations(const Link& link, const Sizes& sizes, int count, int gap = 2) {
    for (int i = 0; i < count; ++i, ++number) {
      const double bytes = sizes(number);
      if (!round && wait-- <= 0) {
        round = tuner.next(1);
        index = 0;
        if (round && round->pairs == 0) round.reset();
      }
      const bool in_round = round && index < round->operations();
      const Tuner::Rungs rungs = in_round && round->is_b(index) ? round->b : tuner.current();
      const double seconds = link.seconds(bytes, setting_of(rungs)) * noise(link, setting_of(rungs));
      spent += seconds;
      quiet += link.seconds(bytes, setting_of(rungs));
      untuned += link.seconds(bytes, setting_of(started));
      const Tuner::TimedOperation sample{index, 0, static_cast<std::uint64_t>(bytes), seconds};
      if (!in_round) {
        tuner.on_operation(sample);
        continue;
      }
      trial_operations += 1;
      samples.push_back(sample);
      if (++index == round->operations()) {
        tuner.on_round(*round, samples);
        samples.clear();
        round.reset();
        wait = gap;
      }
    }
  }
  double now(const Link& link, double bytes) const { return link.seconds(bytes, setting_of(tuner.current())); }
  double at_start(const Link& link, double bytes) const { return link.seconds(bytes, setting_of(started)); }

  Tuner tuner;
  std::mt19937_64 random;
  Tuner::Rungs started;
  std::optional<Tuner::Round> round;
  std::vector<Tuner::TimedOperation> samples;
  int index = 0;
  int wait = 0;
  int number = 0;
  int trial_operations = 0;
  double spent = 0.0;
  double quiet = 0.0;    // the same without noise
  double untuned = 0.0;  // without noise, as it began
};

double same(int) { return 16 * 1024 * kKiB; }
/// A step of DDP: buckets of 25 MiB, a last one that is smaller, and something small.
double step_of_ddp(int number) {
  const int bucket = number % 8;
  return bucket == 7 ? 64 * kKiB : bucket == 6 ? 3 * 1024 * kKiB : 25 * 1024 * kKiB;
}

struct Case {
  const char* name;
  std::vector<Tuner::Knob> from;
  Link link;
};
std::vector<Case> bad_settings() {
  Link capped;
  capped.connection = 16e6;
  Link fast;
  fast.rate = 1.2e9;
  fast.round_trip = 2e-4;
  fast.message = 4e-6;
  return {{"chunk 4 KiB", knobs(0, 4, 0), {}},
          {"chunk 4 MiB", knobs(10, 4, 0), {}},
          {"window 8 KiB", knobs(4, 0, 0), {}},
          {"window 64 MiB", knobs(4, 13, 0), {}},
          {"one socket of four", knobs(4, 5, 0), capped},
          {"all of them", knobs(0, 0, 0), capped},
          {"fast, chunk 4 KiB", knobs(0, 6, 0), fast},
          {"fast, window 8 KiB", knobs(4, 0, 0), fast}};
}

}  // namespace

TEST_CASE("schedule/tuner: from bad settings within 5 % of the best after 200 operations", "[schedule][fast]") {
  int within = 0;
  int runs = 0;
  for (const Case& one : bad_settings())
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      INFO(one.name << ", seed " << seed);
      Run run(one.from, seed * 7919);
      run.operations(one.link, same, 200);
      within += run.now(one.link, same(0)) <= 1.05 * one.link.best(same(0)) ? 1 : 0;
      ++runs;
      CHECK(run.now(one.link, same(0)) <= run.at_start(one.link, same(0)) / 0.97);
    }
  CHECK(within >= runs * 95 / 100);
}

TEST_CASE("schedule/tuner: with all that its trials take, 200 operations are never below 97 % of where it began",
          "[schedule][fast]") {
  std::vector<Case> cases = bad_settings();
  cases.push_back({"near the best", knobs(4, 4, 0), {}});
  cases.push_back({"nearer", knobs(3, 5, 0), {}});
  cases.push_back({"one socket more than it takes", knobs(3, 5, 1), {}});
  for (const double noise : {0.02, 0.05, 0.1}) {
    int slower = 0;
    for (const Case& one : cases)
      for (std::uint64_t seed = 1; seed <= 40; ++seed) {
        Link link = one.link;
        link.noise = noise;
        Run run(one.from, seed * 7919);
        run.operations(link, same, 200);
        INFO(one.name << ", seed " << seed << ": " << run.quiet / run.untuned);
        CHECK(run.quiet < 1.05 * run.untuned);
        slower += run.quiet > run.untuned / 0.97 ? 1 : 0;
      }
    INFO("noise " << noise);
    CHECK(slower <= (noise > 0.05 ? 4 : 0));  // of 440: at 10 % a first pair may not tell that a setting is much worse
  }
}

TEST_CASE("schedule/tuner: it never ends below 97 % of where it began, whatever the noise", "[schedule][fast]") {
  for (const double noise : {0.02, 0.1, 0.2})
    for (const Tuner::Rungs& from : {Tuner::Rungs{4, 5, 0, 2}, {3, 4, 1, 1}, {6, 6, 2, 3}, {2, 8, 0, 4}}) {
      Link link;
      link.noise = noise;
      link.outliers = 0.05;
      int worse = 0;
      for (std::uint64_t seed = 1; seed <= 30; ++seed) {
        Run run(knobs(from[0], from[1], from[2], from[3]), seed);
        run.operations(link, same, 1000);
        worse += run.now(link, same(0)) > run.at_start(link, same(0)) / 0.97 ? 1 : 0;
      }
      INFO("noise " << noise << ", from " << from[0] << " " << from[1] << " " << from[2] << " " << from[3]);
      CHECK(worse <= (noise > 0.1 ? 3 : 0));  // of 30, where one operation is 20 % off another
    }
}

TEST_CASE("schedule/tuner: what is usual stays unless it is seen to be slower", "[schedule][fast]") {
  const auto with_usual = [](std::vector<Tuner::Knob> knobs, const Tuner::Rungs& usual) {
    for (std::size_t i = 0; i < knobs.size(); ++i) knobs[i].usual = usual[i];
    return knobs;
  };
  // A window that makes one operation in fifteen wait for a timer: medians say nothing.
  Link rarely;
  rarely.timeouts = 1.0 / 15;
  int left = 0;
  for (std::uint64_t seed = 1; seed <= 40; ++seed) {
    Run run(with_usual(knobs(4, 13, 0), {4, 4, 0, 2}), seed);
    run.operations(rarely, same, 200);
    left += setting_of(run.tuner.current()).window <= rarely.queue ? 1 : 0;
    REQUIRE_FALSE(run.tuner.tried().empty());
    if (run.tuner.trials() < Tuner::kTriedKept) CHECK(run.tuner.tried().front().knob == Tuner::kUsual);
  }
  CHECK(left >= 36);  // chance may speak for either
  // What is usual may be wrong here: from what is right nothing is lost, and the trial ends soon.
  int worse = 0;
  for (const int usual : {0, 1, 2, 9})
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      const Link link;
      Run run(with_usual(knobs(4, 4, 0), {usual, 4, 0, 2}), seed);
      run.operations(link, same, 200);
      INFO("usual " << usual << ", seed " << seed);
      worse += run.now(link, same(0)) > run.at_start(link, same(0)) / 0.97 ? 1 : 0;
      CHECK(run.quiet < 1.05 * run.untuned);
    }
  CHECK(worse <= 3);
  // Slower than the settings, but not by much: it stays, what is better is found from there, and the tuner comes to
  // rest.
  int found = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Link link;
    link.noise = 0.02;
    link.message = 1.5e-4;
    Run run(with_usual(knobs(4, 4, 0), {1, 4, 0, 2}), seed);
    const double usual = link.seconds(same(0), setting_of({1, 4, 0, 2})) / run.at_start(link, same(0));
    REQUIRE(usual > 1.05);
    REQUIRE(usual < 1.15);
    run.operations(link, same, 3000);
    CHECK(run.tuner.trials() > 20);
    CHECK(run.tuner.kept() >= 1);
    found += run.now(link, same(0)) < 1.03 * run.at_start(link, same(0)) ? 1 : 0;
    // Where the network changes, what was found is not given up for what is usual.
    link.rate /= 2;
    run.operations(link, same, 1000);
    int usuals = 0;
    for (const Tuner::Tried& tried : run.tuner.tried()) usuals += tried.knob == Tuner::kUsual ? 1 : 0;
    CHECK(usuals == 0);
    CHECK(run.now(link, same(0)) < 1.05 * link.seconds(same(0), setting_of({4, 4, 0, 2})));
  }
  CHECK(found >= 18);
  // Refused, it is given up, and others are tried.
  Tuner refused(with_usual(knobs(2, 5, 0), {4, 4, 0, 2}), 3);
  for (std::uint64_t i = 0; i < Tuner::kWarmUp; ++i) refused.on_operation({0, 0, 1 << 20, 0.1});
  for (int i = 0; i < Tuner::kRefusalsMax; ++i) {
    const auto round = refused.next(1);
    REQUIRE(round);
    CHECK(round->b == Tuner::Rungs{4, 4, 0, 2});
    refused.on_refused();
  }
  const auto round = refused.next(1);
  REQUIRE(round);
  CHECK(round->b != Tuner::Rungs{4, 4, 0, 2});
  CHECK(refused.tried().back().knob == Tuner::kUsual);
  // Where it begins there, it is not tried.
  Run run(with_usual(knobs(4, 4, 0), {4, 4, 0, 2}), 1);
  run.operations(Link{}, same, 200);
  for (const Tuner::Tried& tried : run.tuner.tried()) CHECK(tried.knob != Tuner::kUsual);
}

TEST_CASE("schedule/tuner: operations of many sizes, in steps that repeat", "[schedule][fast]") {
  int within = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    const Case one = bad_settings()[2];
    Run run(one.from, seed);
    run.operations(one.link, step_of_ddp, 500);
    within += run.now(one.link, step_of_ddp(0)) <= 1.05 * one.link.best(step_of_ddp(0)) ? 1 : 0;
  }
  CHECK(within >= 18);
  // Blocks do not fall in step with the program: the first of four operations is slow for reasons of its own.
  int kept = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Run run({{"nothing", 5, 2}}, seed);
    for (int i = 0; i < 600; ++i) {
      if (!run.round) run.round = run.tuner.next(1);
      const double seconds =
          (i % 4 < 2 ? 1.5 : 1.0) * std::exp(std::normal_distribution<double>(0.0, 0.03)(run.random));
      const Tuner::TimedOperation sample{run.index, 0, 1 << 20, seconds};
      if (!run.round || run.round->pairs == 0) {
        run.round.reset();
        run.tuner.on_operation(sample);
        continue;
      }
      run.samples.push_back(sample);
      if (++run.index < run.round->operations()) continue;
      run.tuner.on_round(*run.round, run.samples);
      run.samples.clear();
      run.round.reset();
      run.index = 0;
    }
    kept += static_cast<int>(run.tuner.kept());
  }
  CHECK(kept <= 4);  // in 20 runs of some 20 trials each
}

TEST_CASE("schedule/tuner: at rest it costs next to nothing, and less the longer nothing is gained",
          "[schedule][fast]") {
  const Link link;
  Run run(knobs(2, 5, 0), 5);
  run.operations(link, same, 3000);
  const int trials = run.trial_operations;
  const double spent = run.spent;
  const double before = run.now(link, same(0));
  run.operations(link, same, 8000);
  CHECK(run.trial_operations - trials < 8000 / 50);
  // Of noise's mean, 1.3 % and outliers' 3 %, there is no less without a tuner.
  Link quiet = link;
  quiet.noise = quiet.outliers = 0.0;
  double untuned = 0.0;
  Run same_noise(knobs(2, 5, 0), 5);
  for (int i = 0; i < 8000; ++i) untuned += before * same_noise.noise(link);
  CHECK(run.spent - spent < 1.01 * untuned);
}

TEST_CASE("schedule/tuner: it begins anew where the network has changed", "[schedule][fast]") {
  int within = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Link link;
    Run run(knobs(3, 5, 0), seed);
    run.operations(link, same, 1000);
    link.round_trip = 12e-3;  // another way, with a longer queue: the window is too small for it
    link.queue = 4096 * kKiB;
    run.operations(link, same, 600);
    within += run.now(link, same(0)) <= 1.08 * link.best(same(0)) ? 1 : 0;
  }
  CHECK(within >= 17);
}

TEST_CASE("schedule/tuner: a rate that wanders is not taken for a gain", "[schedule][fast]") {
  int worse = 0;
  for (std::uint64_t seed = 1; seed <= 20; ++seed) {
    Link link;
    Run run(knobs(3, 5, 0), seed);
    const double start = run.at_start(link, same(0));
    for (int step = 0; step < 200; ++step) {
      link.rate = 60e6 * (1.0 + 0.35 * std::sin(step / 5.0));
      run.operations(link, same, 5);
    }
    link.rate = 60e6;
    worse += run.now(link, same(0)) > start / 0.97 ? 1 : 0;
  }
  CHECK(worse == 0);
}

TEST_CASE("schedule/tuner: rounds without a sample, and such that nobody carries out, lead nowhere",
          "[schedule][fast]") {
  Tuner tuner(knobs(2, 5, 0), 3);
  CHECK_FALSE(tuner.next(1));  // nothing is known yet
  for (std::uint64_t i = 0; i < Tuner::kWarmUp; ++i) tuner.on_operation({0, 0, 1 << 20, 0.1});
  int rounds = 0;
  for (; rounds < 2000 && !tuner.is_resting(); ++rounds) {
    const auto round = tuner.next(1);
    if (!round) break;
    CHECK(round->operations() <= 2 * Tuner::kPairsMax * 16);
    if (rounds % 3 == 2)
      tuner.on_refused();
    else
      tuner.on_round(*round, {{-1, 0, 5, 1.0}, {round->operations(), 0, 5, 1.0}, {0, 0, 0, 1.0}, {0, 0, 5, 0.0}});
  }
  CHECK(tuner.is_resting());
  CHECK(tuner.kept() == 0);
  CHECK(tuner.current() == Tuner::Rungs{2, 5, 0, 2});
}

TEST_CASE("schedule/tuning: ladders, what the rungs mean, and what is refused", "[schedule][fast]") {
  using hybridps::schedule::TuningLadders;
  hybridps::schedule::TuningRange range;
  range.chunks.usual = 20 * 1024;  // between two rungs
  range.chunks.room = 64 * 1024;
  range.sockets_max = 4;
  const TuningLadders ladders(range);
  const auto knobs = ladders.knobs();
  REQUIRE(knobs.size() == 4);
  Tuner::Rungs at;
  for (const Tuner::Knob& knob : knobs) at.push_back(knob.at);
  CHECK(ladders.at(at) == hybridps::schedule::Tuning{});
  Tuner::Rungs other = at;
  other[0] += 1;
  other[1] -= 1;
  CHECK(ladders.at(other).chunk_bytes == 32 * 1024);
  CHECK(ladders.at(other).window_step == hybridps::schedule::kWindowStepUsual - 1);
  for (const Tuner::Knob& knob : knobs) CHECK(knob.usual == knob.at);
  range.chunk_bytes_usual = 16 * 1024;
  range.window_doublings = 9;  // set: more than is tried
  range.sockets = 4;
  const TuningLadders unusual(range);
  Tuner::Rungs usual;
  for (const Tuner::Knob& knob : unusual.knobs()) usual.push_back(knob.usual);
  CHECK(unusual.at(usual).chunk_bytes == 16 * 1024);
  CHECK(unusual.at(usual).window_step == hybridps::schedule::kWindowStepUsual);
  CHECK(unusual.at(usual).sockets == 1);
  Tuner::Rungs began;
  for (const Tuner::Knob& knob : unusual.knobs()) {
    began.push_back(knob.at);
    CHECK(std::max(knob.at, knob.usual) < knob.rungs);
  }
  CHECK(unusual.at(began) == hybridps::schedule::Tuning{});
  CHECK(unusual.describe({0, began, usual}) ==
        "chunk_bytes 16384 instead of 20480, window 1 instead of as set, sockets 1 instead of 4");
  CHECK(is_sane(unusual.turns({began, usual, 2, 3, 2}), 64 * 1024));
  range.chunks.room = 6000;  // of others, who have no room for what is usual
  range.chunks.usual = 5000;
  const TuningLadders narrow(range);
  CHECK(narrow.at({narrow.knobs()[0].usual, 0, 0, 0}).chunk_bytes == 5952);
  using hybridps::schedule::window_doublings;
  CHECK(window_doublings(128 << 10, 128 << 10, 1 << 20) == 0);
  CHECK(window_doublings(8 << 10, 128 << 10, 1 << 20) == -4);
  CHECK(window_doublings(64 << 20, 128 << 10, 12 << 20) == 7);
  CHECK(window_doublings(64 << 20, 128 << 10, 64 << 10) == 0);  // no more can be used of either
  CHECK(window_doublings(64 << 20, 128 << 10, 0) == 0);
  CHECK(ladders.describe({0, at, other}) == "chunk_bytes 32768 instead of 20480, window 1/2 instead of 1");
  Tuner::Round round{at, other, 2, 3, 2};
  const auto turns = ladders.turns(round);
  for (int i = 0; i < round.operations(); ++i) CHECK(turns.is_b(static_cast<std::uint64_t>(i)) == round.is_b(i));
  CHECK_FALSE(turns.is_b(12));
  CHECK(is_sane(turns, 64 * 1024));
  CHECK_FALSE(is_sane(turns, 16 * 1024));
  for (const auto spoil :
       {+[](hybridps::schedule::Turns& t) { t.block = 0; }, +[](hybridps::schedule::Turns& t) { t.block = 60000; },
        +[](hybridps::schedule::Turns& t) { t.a.chunk_bytes = 63; },
        +[](hybridps::schedule::Turns& t) { t.b.chunk_bytes = 4097; },
        +[](hybridps::schedule::Turns& t) { t.a.window_step = 14; },
        +[](hybridps::schedule::Turns& t) { t.b.pace_chunks = 0; }}) {
    auto bad = turns;
    spoil(bad);
    CHECK_FALSE(is_sane(bad, 64 * 1024));
  }
}
