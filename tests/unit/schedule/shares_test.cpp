#include "hybridps/schedule/shares.h"

#include <numeric>
#include <random>

#include "tests/support/catch.h"

namespace {
using hybridps::schedule::optimal_shares;
using hybridps::schedule::push_pull_time;
using hybridps::schedule::Shares;

double sum(const Shares& s) {
  return std::accumulate(s.worker.begin(), s.worker.end(), 0.0) +
         std::accumulate(s.dedicated.begin(), s.dedicated.end(), 0.0);
}
bool near(double a, double b) { return std::abs(a - b) < 1e-9; }
}  // namespace

TEST_CASE("schedule/shares: equal cards follow the closed form", "[schedule][fast]") {
  for (const int n : {2, 3, 4, 8, 16, 64}) {
    for (const int k : {0, 1, 2, n / 2, n}) {
      INFO("n " << n << " k " << k);
      const std::vector<double> workers(static_cast<std::size_t>(n), 1.0);
      const std::vector<double> dedicated(static_cast<std::size_t>(k), 1.0);
      const Shares s = optimal_shares(workers, dedicated);
      const double denominator = n * n + k * n - 2 * k;
      REQUIRE(near(s.time, 2.0 * n * (n - 1) / denominator));
      REQUIRE(near(sum(s), 1.0));
      REQUIRE(near(push_pull_time(s, workers, dedicated), s.time));
      if (n > 2 && k < n) REQUIRE(near(s.worker[0], (n - k) / denominator));
    }
  }
}

TEST_CASE("schedule/shares: a fast host serves and a slow host owns nothing", "[schedule][fast]") {
  REQUIRE(near(optimal_shares({1, 1, 1, 2.5}).time, 12.0 / 11.0));
  const Shares slow = optimal_shares({1, 1, 1, 0.5});
  REQUIRE(near(slow.time, 2.0));
  REQUIRE(slow.worker[3] < 1e-9);
}

TEST_CASE("schedule/shares: no nearby shares are faster for random rates", "[schedule][fast]") {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> rate(0.2, 5.0);
  for (int round = 0; round < 300; ++round) {
    std::vector<double> workers(2 + random() % 6);
    std::vector<double> dedicated(random() % 4);
    for (double& r : workers) r = rate(random);
    for (double& r : dedicated) r = rate(random);
    const Shares best = optimal_shares(workers, dedicated);
    REQUIRE(near(sum(best), 1.0));
    const std::size_t all = workers.size() + dedicated.size();
    for (std::size_t i = 0; i < all; ++i) {
      for (std::size_t j = 0; j < all; ++j) {
        Shares moved = best;
        const auto at = [&](std::size_t x) -> double& {
          return x < workers.size() ? moved.worker[x] : moved.dedicated[x - workers.size()];
        };
        if (i == j || at(j) < 1e-3) continue;
        at(i) += 1e-3;
        at(j) -= 1e-3;
        REQUIRE(push_pull_time(moved, workers, dedicated) >= best.time - 1e-9);
      }
    }
  }
}

TEST_CASE("schedule/shares: one node owns everything", "[schedule][fast]") {
  REQUIRE(optimal_shares({3.0}).worker == std::vector<double>{1.0});
}
