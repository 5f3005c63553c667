#include "hybridps/schedule/tuner.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <random>
#include <string>
#include <vector>

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

/// What one operation takes. Small chunks cost messages, large ones the time to fill the pipe; small windows wait for round
/// trips, large ones overflow the switch; one connection may not fill the card.
struct Link {
  double rate = 60e6;         // bytes/s
  double connection = 1e12;   // bytes/s, of one
  double round_trip = 1.5e-3;
  double message = 25e-6;     // seconds of a core, each
  double queue = 300 * kKiB;  // of the switch
  double nodes = 4;
  double noise = 0.05;   // of a normal distribution, of the logarithm
  double outliers = 0.02;  // of operations, up to four times as long

  double seconds(double bytes, const Setting& s) const {
    const double carried = std::min({rate, s.sockets * connection, s.window / round_trip, s.chunk / message});
    const double drops = s.window > queue ? 1.0 + 0.15 * std::log2(s.window / queue) : 1.0;
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
      const double seconds = link.seconds(bytes, setting_of(rungs)) * noise(link);
      spent += seconds;
      untuned += link.seconds(bytes, setting_of(started));
      const Tuner::Sample sample{index, 0, static_cast<std::uint64_t>(bytes), seconds};
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
  std::vector<Tuner::Sample> samples;
  int index = 0;
  int wait = 0;
  int number = 0;
  int trial_operations = 0;
  double spent = 0.0;
  double untuned = 0.0;
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
  return {{"chunk 4 KiB", knobs(0, 4, 0), {}},          {"chunk 4 MiB", knobs(10, 4, 0), {}},
          {"window 8 KiB", knobs(4, 0, 0), {}},         {"window 64 MiB", knobs(4, 13, 0), {}},
          {"one socket of four", knobs(4, 5, 0), capped}, {"all of them", knobs(0, 0, 0), capped},
          {"fast, chunk 4 KiB", knobs(0, 6, 0), fast},  {"fast, window 8 KiB", knobs(4, 0, 0), fast}};
}

}  // namespace

TEST_CASE("schedule/tuner: from bad settings within 5 % of the best after 200 operations", "[schedule][fast]") {
  for (const Case& one : bad_settings()) {
    int within = 0;
    double worst = 1.0;
    for (std::uint64_t seed = 1; seed <= 40; ++seed) {
      Run run(one.from, seed * 7919);
      run.operations(one.link, same, 200);
      const double ratio = run.now(one.link, same(0)) / one.link.best(same(0));
      within += ratio <= 1.05 ? 1 : 0;
      worst = std::max(worst, ratio);
      CHECK(run.now(one.link, same(0)) <= run.at_start(one.link, same(0)) / 0.97);
    }
    INFO(one.name << ": " << within << " of 40, the worst " << worst);
    WARN(one.name << ": " << within << " of 40, the worst " << worst); CHECK(within >= 38);
  }
}
