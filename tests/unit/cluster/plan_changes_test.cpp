#include "hybridps/worker/plan_changes.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"

// Shares that change while operations are under way, over loopback, driven in random orders.
namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;

constexpr std::size_t kCount = 3000;

struct Job {
  std::vector<std::vector<std::int32_t>> data;  // per rank
  int done = 0;
  std::string error;
};

worker::Operation operation(schedule::Kind kind, std::vector<std::int32_t>& data) {
  worker::Operation o;
  o.kind = kind;
  if (kind == schedule::Kind::kBarrier) return o;
  o.dtype = core::DType::kInt32;
  if (kind == schedule::Kind::kAllReduce) o.op = core::ReduceOp::kSum;
  if (kind == schedule::Kind::kBroadcast) o.root = 0;
  o.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(std::int32_t)}};
  return o;
}

schedule::Kind kind_of(std::uint64_t sequence) {
  if (sequence % 7 == 3) return schedule::Kind::kBarrier;
  return sequence % 5 == 2 ? schedule::Kind::kBroadcast : schedule::Kind::kAllReduce;
}

/// All ranks issue the same operations, each in its own time.
class Program {
 public:
  Program(Cluster& cluster, core::GroupUid uid, std::uint64_t operations)
      : cluster_(cluster), uid_(uid), jobs_(operations), next_(static_cast<std::size_t>(cluster.size()), 0) {
    for (std::uint64_t s = 0; s < operations; ++s)
      for (int r = 0; r < cluster.size(); ++r) jobs_[s].data.emplace_back(kCount, value(s, r));
  }
  /// A random rank's next one, if there is one.
  void submit_some(std::mt19937_64& random) {
    const auto r = static_cast<std::size_t>(random() % next_.size());
    const std::uint64_t s = next_[r];
    if (s == jobs_.size()) return;
    ++next_[r];
    Job& job = jobs_[s];
    cluster_.submit(uid_, static_cast<int>(r), operation(kind_of(s), job.data[r]), s,
                    [&job](const worker::Outcome& outcome) {
                      ++job.done;
                      if (!outcome.status.is_ok()) job.error = outcome.status.to_string();
                    });
  }
  std::uint64_t begun(int rank) const { return next_[static_cast<std::size_t>(rank)]; }
  bool is_done() const {
    return std::all_of(jobs_.begin(), jobs_.end(), [this](const Job& job) { return job.done == cluster_.size(); });
  }
  /// Every result is right.
  void check() const {
    for (std::uint64_t s = 0; s < jobs_.size(); ++s) {
      REQUIRE(jobs_[s].error == "");
      std::int32_t sum = 0;
      for (int r = 0; r < cluster_.size(); ++r) sum += value(s, r);
      for (int r = 0; r < cluster_.size(); ++r) {
        const schedule::Kind kind = kind_of(s);
        const std::int32_t want = kind == schedule::Kind::kAllReduce   ? sum
                                  : kind == schedule::Kind::kBroadcast ? value(s, 0)
                                                                       : value(s, r);
        const auto& got = jobs_[s].data[static_cast<std::size_t>(r)];
        REQUIRE(std::count(got.begin(), got.end(), want) == static_cast<std::ptrdiff_t>(kCount));
      }
    }
  }

 private:
  static std::int32_t value(std::uint64_t s, int rank) { return static_cast<std::int32_t>(s) * 100 + rank + 1; }

  Cluster& cluster_;
  const core::GroupUid uid_;
  std::vector<Job> jobs_;
  std::vector<std::uint64_t> next_;  // per rank
};

}  // namespace

TEST_CASE("cluster/plan_changes: results are right while shares change under running operations", "[cluster][fast]") {
  const std::vector<double> servers = GENERATE(std::vector<double>{}, std::vector<double>{1.0, 0.5});
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    for (const std::vector<int>& layout : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1, 2}, {0, 1, 2, 3}}) {
      ClusterOptions options;
      options.node_of = layout;
      options.servers = servers;
      options.seed = seed;
      Cluster cluster(options);
      const auto uid = cluster.open_group();
      const int ranks = cluster.size();
      const int nodes = layout.back() + 1;
      constexpr std::uint64_t kOperations = 60;
      Program program(cluster, uid, kOperations);
      std::mt19937_64 random(seed);
      std::uint32_t proposed = 0;
      const auto plans = [&](int rank) -> worker::PlanChanges& { return *cluster.at(rank).worker().find(uid)->plans; };
      const auto all_bound_newest = [&] {
        for (int r = 0; r < ranks; ++r) {
          if (plans(r).newest() != proposed || plans(r).is_frozen()) return false;
          const std::uint64_t begun = program.begun(r);
          if (proposed > 0 && (begun == 0 || plans(r).version_of(begun - 1).number != proposed)) return false;
        }
        return true;
      };
      const bool finished = cluster.run_until([&] {
        if (random() % 3 == 0) program.submit_some(random);
        if (proposed < 8 && random() % 50 == 0 && all_bound_newest()) {
          std::vector<double> weights;
          for (std::size_t n = 0; n < static_cast<std::size_t>(nodes) + servers.size(); ++n)
            weights.push_back(static_cast<double>(random() % 4));
          weights[random() % weights.size()] += 1.0;
          ++proposed;
          plans(0).propose(weights);
        }
        return program.is_done();
      });
      INFO("seed " << seed << ", " << ranks << " ranks, " << servers.size() << " servers, " << proposed << " changes");
      REQUIRE(finished);
      CHECK(proposed >= 2);
      program.check();
      // The same version on all ranks for each operation that was bound late enough to be remembered.
      for (int r = 0; r < ranks; ++r)
        CHECK(plans(r).version_of(kOperations - 1).number == plans(0).version_of(kOperations - 1).number);
    }
  }
}

TEST_CASE("cluster/plan_changes: results are right while settings take turns under running operations",
          "[cluster][fast]") {
  const std::vector<double> servers = GENERATE(std::vector<double>{}, std::vector<double>{1.0, 0.5});
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    for (const std::vector<int>& layout : {std::vector<int>{0, 1}, {0, 0, 1, 1, 2}, {0, 1, 2, 3}}) {
      ClusterOptions options;
      options.node_of = layout;
      options.servers = servers;
      options.seed = seed;
      options.chunk_bytes = 4096;
      Cluster cluster(options);
      const auto uid = cluster.open_group();
      const int ranks = cluster.size();
      const auto nodes = static_cast<std::size_t>(layout.back() + 1);
      constexpr std::uint64_t kOperations = 150;
      Program program(cluster, uid, kOperations);
      std::mt19937_64 random(seed);
      const auto plans = [&](int rank) -> worker::PlanChanges& { return *cluster.at(rank).worker().find(uid)->plans; };
      const auto any_tuning = [&random] {
        schedule::Tuning tuning;
        tuning.chunk_bytes = std::vector<std::uint32_t>{0, 1024, 1088, 2048, 4096}[random() % 5];
        tuning.window_step = static_cast<std::uint16_t>(random() % (schedule::kWindowStepMax + 1));
        tuning.pace_chunks = static_cast<std::uint16_t>(1 + random() % 9);
        tuning.sockets = static_cast<std::uint16_t>(random() % 3);
        return tuning;
      };
      int proposed = 0;
      // Of an even seed a server dies, which has then perhaps not answered what is asked.
      const int victim = ranks + static_cast<int>(seed / 2 % 2);
      bool kills = !servers.empty() && seed % 2 == 0;
      // Also while what was proposed before is not over, and before all have heard of it.
      const bool finished = cluster.run_until([&] {
        if (random() % 3 == 0) program.submit_some(random);
        if (kills && proposed >= 4 && (plans(0).is_frozen() || proposed >= 8)) {
          kills = false;
          cluster.kill(victim);
          // A broken connection tells so; whoever has something to send finds it for itself.
          cluster.at(1).worker().find(uid)->lost_servers->report(victim,
                                                                 core::Status(core::Code::kPeerDead, "it was killed"));
        }
        if (proposed < 12 && random() % 20 == 0 && !plans(0).is_frozen()) {
          ++proposed;
          if (random() % 4 == 0) {
            std::vector<double> weights(nodes + servers.size(), 1.0);
            weights[random() % weights.size()] += 2.0;
            for (std::size_t server = 0; server < servers.size(); ++server)
              if (!cluster.is_alive(ranks + static_cast<int>(server))) weights[nodes + server] = 0.0;
            plans(0).propose(weights);
          } else {
            schedule::Turns turns{any_tuning(), any_tuning()};
            turns.pairs = static_cast<std::uint16_t>(random() % 4);
            turns.block = static_cast<std::uint16_t>(1 + random() % 4);
            turns.order = static_cast<std::uint32_t>(random());
            plans(0).try_out(turns);
          }
        }
        return program.is_done();
      });
      INFO("seed " << seed << ", " << ranks << " ranks, " << servers.size() << " servers, " << proposed << " changes");
      REQUIRE(finished);
      CHECK(proposed >= 4);
      program.check();
      for (int r = 0; r < ranks; ++r)
        CHECK(plans(r).version_of(kOperations - 1).number == plans(0).version_of(kOperations - 1).number);
    }
  }
}

TEST_CASE("cluster/plan_changes: rank 0 tries settings out by itself, and what it does not keep is as before",
          "[cluster][fast]") {
  const std::vector<double> servers = GENERATE(std::vector<double>{}, std::vector<double>{1.0});
  test::MovableClock clock;  // a round takes the same time on every machine
  ClusterOptions options;
  options.node_of = {0, 0, 1, 2};
  options.servers = servers;
  options.tune = true;
  options.chunk_bytes = 16 * 1024;
  options.eager_bytes = 64 * 1024;
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  constexpr std::size_t kFloats = 12000;  // more than PlanChanges::kTimedBytesMin
  std::vector<std::vector<std::int32_t>> data(4, std::vector<std::int32_t>(kFloats));
  const auto plans = [&](int rank) -> worker::PlanChanges& { return *cluster.at(rank).worker().find(uid)->plans; };
  REQUIRE(plans(0).tuner() != nullptr);
  CHECK(plans(1).tuner() == nullptr);
  std::uint64_t sequence = 0;
  for (; sequence < 3000 && plans(0).tuner()->trials() < 12; ++sequence) {
    int done = 0;
    std::string error;
    for (int r = 0; r < 4; ++r) {
      std::fill(data[static_cast<std::size_t>(r)].begin(), data[static_cast<std::size_t>(r)].end(),
                r + static_cast<std::int32_t>(sequence));
      cluster.submit(uid, r, operation(schedule::Kind::kAllReduce, data[static_cast<std::size_t>(r)]), sequence,
                     [&](const worker::Outcome& outcome) {
                       ++done;
                       if (!outcome.status.is_ok()) error = outcome.status.to_string();
                     });
    }
    REQUIRE(cluster.run_until([&] {
      clock.pass(std::chrono::microseconds(10));
      return done == 4;
    }));
    REQUIRE(error == "");
    const std::int32_t sum = 6 + 4 * static_cast<std::int32_t>(sequence);
    for (const auto& of_rank : data)
      REQUIRE(std::count(of_rank.begin(), of_rank.end(), sum) == static_cast<std::ptrdiff_t>(kFloats));
  }
  const schedule::Tuner& tuner = *plans(0).tuner();
  CHECK(tuner.trials() >= 12);
  CHECK(cluster.at(0).worker().tuner_trials() == tuner.trials());
  for (const schedule::Tuner::Tried& tried : tuner.tried()) CHECK(plans(0).describe(tried) != "");
}

TEST_CASE("cluster/plan_changes: a question that arrives without its weights changes nothing", "[cluster][fast]") {
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  std::vector<std::vector<std::int32_t>> data(3, std::vector<std::int32_t>(kCount, 1));
  int done = 0;
  cluster.at(0).worker().find(uid)->plans->propose({1.0});  // for three nodes: what is left of a text that was cut
  for (int r = 0; r < 3; ++r)
    cluster.submit(uid, r, operation(schedule::Kind::kAllReduce, data[static_cast<std::size_t>(r)]), 0,
                   [&done](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
  REQUIRE(cluster.run_until([&] { return done == 3; }));
  for (int r = 0; r < 3; ++r) {
    const worker::PlanChanges& plans = *cluster.at(r).worker().find(uid)->plans;
    CHECK(plans.newest() == 0);
    CHECK_FALSE(plans.is_frozen());
    CHECK(data[static_cast<std::size_t>(r)].back() == 3);
  }
}

TEST_CASE("cluster/plan_changes: a change in a group that fails ends with it", "[cluster][fast]") {
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  std::vector<std::vector<std::int32_t>> data(3, std::vector<std::int32_t>(kCount, 1));
  int failed = 0;
  cluster.at(0).worker().find(uid)->plans->propose({1.0, 0.0, 1.0});
  for (int r = 0; r < 2; ++r)
    cluster.submit(uid, r, operation(schedule::Kind::kAllReduce, data[static_cast<std::size_t>(r)]), 0,
                   [&failed](const worker::Outcome& outcome) { failed += outcome.status.is_ok() ? 0 : 1; });
  for (int r = 0; r < 2; ++r)
    cluster.at(r).worker().fail_group(*cluster.at(r).worker().find(uid),
                                      core::Status(core::Code::kAborted, "for the test"), /*tell=*/false);
  CHECK(failed == 2);
  for (int r = 0; r < 3; ++r) cluster.at(r).close_group(uid);
}

TEST_CASE("cluster/plan_changes: nonsense from members is not believed", "[cluster][fast]") {
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  worker::GroupState& group = *cluster.at(1).worker().find(uid);
  const auto deliver = [&](std::uint32_t sender, wire::Body body) {
    cluster.at(1).worker().on_message(group, {{cluster.id(static_cast<int>(sender)), uid, sender}, 0, std::move(body)},
                                      {});
  };
  deliver(0, wire::PlanAsk{1});              // no weights
  deliver(0, wire::PlanSwitch{1, 0});        // nobody has asked
  deliver(2, wire::PlanAnswer{1, 0});        // not to us
  deliver(2, wire::Rates{0});                // not to us
  deliver(2, wire::TrialTimes{1});           // not to us
  deliver(2, wire::EchoBack{{0, 1000, 5}});  // of no measurement
  CHECK_FALSE(group.plans->is_frozen());
  CHECK(group.plans->newest() == 0);
  CHECK(group.status.is_ok());
}

TEST_CASE("cluster/plan_changes: in a large group no rank talks to many others", "[cluster][slow]") {
  constexpr int kNodes = 40;
  constexpr int kEach = 2;
  ClusterOptions options;
  for (int rank = 0; rank < kNodes * kEach; ++rank) options.node_of.push_back(rank / kEach);
  options.control = true;
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  std::vector<std::uint64_t> sent;
  for (int rank = 0; rank < cluster.size(); ++rank) sent.push_back(cluster.messages_sent(rank));
  std::vector<double> weights(kNodes, 1.0);
  weights[7] = 3.0;
  cluster.at(0).worker().find(uid)->plans->propose(weights);
  REQUIRE(cluster.run_until([&] {
    for (int rank = 0; rank < cluster.size(); ++rank)
      if (cluster.at(rank).worker().find(uid)->plans->newest() != 1) return false;
    return true;
  }));
  for (int rank = 0; rank < cluster.size(); ++rank) {
    const membership::Version& newest = cluster.at(rank).worker().find(uid)->plans->newest_version();
    CHECK(newest.topology.weights() == weights);
    // A question and the end of the change to each child, and an answer to the parent.
    CAPTURE(rank);
    CHECK(cluster.messages_sent(rank) - sent[static_cast<std::size_t>(rank)] <=
          2 * (membership::Tree::kArity + kEach - 1) + 1);
  }
  for (int rank = 0; rank < cluster.size(); ++rank) cluster.at(rank).close_group(uid);
}
