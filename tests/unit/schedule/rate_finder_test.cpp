#include "hybridps/schedule/rate_finder.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <string>

#include "hybridps/schedule/shares.h"
#include "tests/support/catch.h"

namespace {

using hybridps::schedule::CardReport;
using hybridps::schedule::optimal_shares;
using hybridps::schedule::push_pull_time;
using hybridps::schedule::RateFinder;
using hybridps::schedule::Shares;

/// A network of cards: what would be seen of them in one allreduce.
class Network {
 public:
  explicit Network(std::vector<double> rates, double noise = 0.0, std::vector<double> servers = {})
      : rates_(std::move(rates)), servers_(std::move(servers)), noise_(noise) {}
  void set_rate(std::size_t node, double rate) { rates_[node] = rate; }
  void set_server_rate(std::size_t server, double rate) { servers_[server] = rate; }
  void add_server(double rate) { servers_.push_back(rate); }

  double time(const Shares& shares) const { return push_pull_time(shares, rates_, servers_); }
  double best() const { return optimal_shares(rates_, servers_).time; }
  /// Shares of those who take all cards for equal.
  Shares equal() const {
    return optimal_shares(std::vector<double>(rates_.size(), 1.0), std::vector<double>(servers_.size(), 1.0));
  }
  RateFinder finder() const { return RateFinder(rates_.size(), servers_.size()); }

  std::vector<CardReport> run(const Shares& shares) {
    const double seconds = time(shares);
    std::vector<CardReport> reports;
    const auto add = [&](double moved, double rate) {
      const double busy = moved / seconds / rate;
      const double delay = busy > 0.97 ? 4e-3 : 2e-4;
      reports.push_back({delay * random(), moved / seconds * random()});
    };
    const auto n = static_cast<double>(rates_.size());
    for (std::size_t i = 0; i < rates_.size(); ++i) add(1.0 + (n - 2.0) * shares.worker[i], rates_[i]);
    for (std::size_t i = 0; i < servers_.size(); ++i) add(n * shares.dedicated[i], servers_[i]);
    return reports;
  }

 private:
  double random() { return 1.0 + noise_ * (std::uniform_real_distribution<double>(-1.0, 1.0)(engine_)); }
  std::vector<double> rates_;
  std::vector<double> servers_;
  double noise_;
  std::mt19937_64 engine_{7};
};

/// Operations until nothing changes any more for a while; the number of changes.
int settle(Network& network, RateFinder& finder, Shares& shares, int operations) {
  int changes = 0;
  for (int i = 0; i < operations; ++i) {
    if (auto better = finder.learn(network.run(shares), shares)) {
      std::vector<double> all = better->worker;
      all.insert(all.end(), better->dedicated.begin(), better->dedicated.end());
      CHECK(std::accumulate(all.begin(), all.end(), 0.0) == Approx(1.0));
      CHECK(*std::min_element(all.begin(), all.end()) >= 0.0);
      shares = *better;
      ++changes;
    }
  }
  return changes;
}

}  // namespace

TEST_CASE("schedule/rate_finder: equal cards keep their shares, whatever the noise", "[schedule][fast]") {
  for (const std::size_t n : {3, 4, 8, 32}) {
    Network network(std::vector<double>(n, 1e8), 0.03);
    RateFinder finder(n);
    Shares shares = network.equal();
    CHECK(settle(network, finder, shares, 200) == 0);
  }
}

TEST_CASE("schedule/rate_finder: one card at half the rate is found by the third operation", "[schedule][fast]") {
  for (const std::size_t slow : {std::size_t{0}, std::size_t{2}}) {
    std::vector<double> rates(4, 6e7);
    rates[slow] = 3e7;
    Network network(rates, 0.02);
    RateFinder finder(4);
    Shares shares = network.equal();
    const double before = network.time(shares);
    CHECK(settle(network, finder, shares, 3) >= 1);
    CHECK(before / network.time(shares) == Approx(1.5).epsilon(0.02));
    CHECK(settle(network, finder, shares, 30) == 0);
  }
}

TEST_CASE("schedule/rate_finder: any rates come within an eighth of the optimum and stay there", "[schedule][fast]") {
  std::mt19937_64 random(3);
  for (int round = 0; round < 200; ++round) {
    const std::size_t n = 3 + random() % 6;
    std::vector<double> rates;
    for (std::size_t i = 0; i < n; ++i) rates.push_back(std::uniform_real_distribution<double>(0.3, 1.0)(random) * 1e8);
    Network network(rates);
    RateFinder finder(n);
    Shares shares = network.equal();
    settle(network, finder, shares, 16);
    INFO("round " << round);
    CHECK(network.time(shares) <= 1.125 * network.best());
    CHECK(network.time(shares) <= 1.001 * network.time(network.equal()));
  }
}

TEST_CASE("schedule/rate_finder: a card that becomes slow, and fast again, is noticed", "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8));
  RateFinder finder(4);
  Shares shares = network.equal();
  CHECK(settle(network, finder, shares, 10) == 0);
  network.set_rate(1, 4e7);
  CHECK(settle(network, finder, shares, 10) >= 1);
  CHECK(network.time(shares) <= 1.1 * network.best());
  network.set_rate(1, 1e8);
  settle(network, finder, shares, RateFinder::kRemembered + 10);
  CHECK(network.time(shares) <= 1.1 * network.best());
}

TEST_CASE("schedule/rate_finder: one short delay in an equal network changes nothing", "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8));
  RateFinder finder(4);
  const Shares shares = network.equal();
  for (int i = 0; i < 20; ++i) {
    std::vector<CardReport> reports = network.run(shares);
    if (i % 3 == 2) reports[static_cast<std::size_t>(i) % 4].delay_seconds = 1e-4;
    CHECK_FALSE(finder.learn(reports, shares));
  }
}

TEST_CASE("schedule/rate_finder: where most cards set the pace, a few short queues change nothing for some operations",
          "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8), 0.01, {1e8, 1e7});  // a slow server, whose queue is always the longest
  const Shares shares = optimal_shares(std::vector<double>(4, 1e8), {1e8, 1e7});
  for (int turn = 0; turn < 8; ++turn) {
    RateFinder finder = network.finder();
    const auto operation = [&] {
      std::vector<CardReport> reports = network.run(shares);
      reports[5].delay_seconds = 6e-3;
      reports[2].delay_seconds = reports[3].delay_seconds = 2e-4;
      return finder.learn(reports, shares).has_value();
    };
    // The first operation of all is only kept.
    for (int i = 0; i < RateFinder::kBelieved; ++i) CHECK_FALSE(operation());
    // For long, they are believed.
    CHECK((operation() || operation()));
  }
}

TEST_CASE("schedule/rate_finder: nodes that wait for others to begin are not taken for slow ones", "[schedule][fast]") {
  std::mt19937_64 random(9);
  for (const std::size_t n : {3, 4, 8}) {
    Network network(std::vector<double>(n, 1e8), 0.02);
    RateFinder finder(n);
    const Shares shares = network.equal();
    for (int i = 0; i < 300; ++i) {
      std::vector<CardReport> reports = network.run(shares);
      reports[random() % n].bytes_per_second *= 0.7;  // its own operation took longer
      CHECK_FALSE(finder.learn(reports, shares).has_value());
    }
  }
}

TEST_CASE("schedule/rate_finder: a change that does not show is taken back, and comes ever less often",
          "[schedule][fast]") {
  // Its queue is short, for whatever reason, and yet it has nothing to spare.
  for (const std::size_t n : {3, 4, 8}) {
    Network network(std::vector<double>(n, 1e8), 0.01);
    RateFinder finder(n);
    Shares shares = network.equal();
    const double equal = network.time(shares);
    double spent = 0.0;
    int changes = 0;
    for (int i = 0; i < 1000; ++i) {
      std::vector<CardReport> reports = network.run(shares);
      reports[0].delay_seconds = 1e-4;
      spent += network.time(shares);
      if (auto better = finder.learn(reports, shares)) {
        shares = *better;
        ++changes;
      }
    }
    INFO(n << " nodes");
    CHECK(changes >= 2);
    CHECK(changes <= 14);
    CHECK(spent < 1.03 * 1000 * equal);
  }
}

TEST_CASE("schedule/rate_finder: after a change that was taken back, a card that becomes slow is still found",
          "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8), 0.01);
  RateFinder finder(4);
  Shares shares = network.equal();
  for (int i = 0; i < RateFinder::kBelieved + 12; ++i) {
    std::vector<CardReport> reports = network.run(shares);
    reports[0].delay_seconds = 1e-4;
    if (auto better = finder.learn(reports, shares)) shares = *better;
  }
  CHECK(network.time(shares) == Approx(network.best()));
  network.set_rate(2, 3e7);
  settle(network, finder, shares, 10);
  CHECK(network.time(shares) < 1.13 * network.best());
}

TEST_CASE("schedule/rate_finder: what is slower for another reason is not taken back", "[schedule][fast]") {
  for (const bool is_told : {false, true}) {
    Network network(std::vector<double>(4, 1e8), 0.01);
    RateFinder finder = network.finder();
    Shares shares = network.equal();
    settle(network, finder, shares, 5);
    network.set_rate(1, 5e7);
    std::optional<Shares> better;
    while (!better) better = finder.learn(network.run(shares), shares);
    shares = *better;
    // With the change: servers that are lost would be such a reason.
    for (std::size_t node = 0; node < 4; ++node) network.set_rate(node, node == 1 ? 2e7 : 4e7);
    if (is_told) finder.on_other_change();
    bool takes_back = false;
    for (int i = 0; i < 6; ++i)
      takes_back = (finder.learn(network.run(shares), shares).has_value() && finder.takes_back()) || takes_back;
    CHECK(takes_back == !is_told);
  }
}

TEST_CASE("schedule/rate_finder: small operations, which take longer for a byte, do not speak against a change",
          "[schedule][fast]") {
  std::vector<double> rates(4, 6e7);
  rates[1] = 3e7;
  Network network(rates, 0.02);
  RateFinder finder(4);
  Shares shares = network.equal();
  for (int i = 0; i < 100; ++i) {
    std::vector<CardReport> reports = network.run(shares);
    const bool is_small = i > 2 && i % 4 != 0;
    if (is_small)
      for (CardReport& report : reports) report.bytes_per_second *= 0.5;
    if (auto better = finder.learn(reports, shares, is_small ? 1 << 20 : 64 << 20)) {
      CHECK_FALSE(finder.takes_back());
      shares = *better;
    }
  }
  CHECK(network.time(shares) < 1.13 * network.best());
}

TEST_CASE("schedule/rate_finder: where no card has a queue nothing is learned", "[schedule][fast]") {
  RateFinder finder(4);
  for (int i = 0; i < 10; ++i)
    CHECK_FALSE(finder.learn({{1e-4, 1e9}, {9e-4, 1e9}, {1e-4, 1e9}, {1e-4, 1e9}},
                             optimal_shares(std::vector<double>(4, 1.0))));
  CHECK_FALSE(
      finder.learn({{4e-3, 1e9}, {4e-3, 0.0}, {4e-3, 1e9}, {4e-3, 1e9}}, optimal_shares(std::vector<double>(4, 1.0))));
  CHECK_FALSE(finder.learn({{4e-3, 1e9}}, optimal_shares(std::vector<double>(4, 1.0))));
}

TEST_CASE("schedule/rate_finder: with servers, equal cards keep their shares", "[schedule][fast]") {
  for (const std::size_t n : {3, 4, 8})
    for (const std::size_t k : {std::size_t{1}, n / 2, n, n + 2}) {
      INFO(n << " nodes, " << k << " servers");
      Network network(std::vector<double>(n, 1e8), 0.02, std::vector<double>(k, 1e8));
      RateFinder finder = network.finder();
      Shares shares = network.equal();
      CHECK(settle(network, finder, shares, 100) == 0);
    }
}

TEST_CASE("schedule/rate_finder: a slow server and a slow node beside servers are found", "[schedule][fast]") {
  for (const bool server : {false, true}) {
    std::vector<double> rates(4, 6e7);
    std::vector<double> servers(2, 6e7);
    (server ? servers[1] : rates[1]) = 3e7;
    Network network(rates, 0.02, servers);
    RateFinder finder = network.finder();
    Shares shares = network.equal();
    const double before = network.time(shares);
    CHECK(before > 1.15 * network.best());
    CHECK(settle(network, finder, shares, 20) >= 1);
    CHECK(network.time(shares) <= 1.1 * network.best());
    // Tried again, and taken back: ever more seldom.
    CHECK(settle(network, finder, shares, 30) <= 2);
    CHECK(settle(network, finder, shares, 1000) <= 12);
    CHECK(network.time(shares) <= 1.1 * network.best());
  }
}

TEST_CASE(
    "schedule/rate_finder: a server that becomes ten times slower holds nobody up, and has its share again when it is "
    "well",
    "[schedule][fast]") {
  for (const double factor : {10.0, 100.0}) {
    INFO(factor << " times slower");
    Network network(std::vector<double>(4, 1e8), 0.02, std::vector<double>(2, 1e8));
    RateFinder finder = network.finder();
    Shares shares = network.equal();
    const double well = network.time(shares);
    network.set_server_rate(1, 1e8 / factor);
    CHECK(network.time(shares) > 3.0 * well);
    CHECK(settle(network, finder, shares, 20) >= 1);
    CHECK(network.time(shares) <= 1.1 * network.best());
    CHECK(network.time(shares) <= 1.3 * well);
    network.set_server_rate(1, 1e8);
    settle(network, finder, shares, RateFinder::kRemembered + 20);
    CHECK(network.time(shares) <= 1.1 * network.best());
    CHECK(shares.dedicated[1] > 0.5 * shares.dedicated[0]);
  }
}

TEST_CASE("schedule/rate_finder: a server that has joined is found to be slow like any other", "[schedule][fast]") {
  Network network(std::vector<double>(4, 1e8), 0.02, std::vector<double>(1, 1e8));
  RateFinder finder = network.finder();
  Shares shares = network.equal();
  CHECK(settle(network, finder, shares, 20) == 0);
  network.add_server(2e7);
  finder.set_servers(2);
  shares = network.equal();
  CHECK(settle(network, finder, shares, 20) >= 1);
  CHECK(network.time(shares) <= 1.1 * network.best());
}

TEST_CASE("schedule/rate_finder: any rates of nodes and servers come near the optimum", "[schedule][fast]") {
  std::mt19937_64 random(5);
  for (int round = 0; round < 200; ++round) {
    const auto some = [&](std::size_t count) {
      std::vector<double> rates;
      for (std::size_t i = 0; i < count; ++i)
        rates.push_back(std::uniform_real_distribution<double>(0.3, 1.0)(random) * 1e8);
      return rates;
    };
    const std::vector<double> rates = some(3 + random() % 6);
    Network network(rates, 0.0, some(1 + random() % 8));
    RateFinder finder = network.finder();
    Shares shares = network.equal();
    settle(network, finder, shares, 24);
    INFO("round " << round);
    CHECK(network.time(shares) <= 1.125 * network.best());
  }
}
