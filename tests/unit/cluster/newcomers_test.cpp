// Dedicated servers join a group whose operations are under way, and leave it: at random moments, beside other changes
// of plans and deaths. Over loopback, driven in random orders.
#include "hybridps/worker/newcomers.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/captured_stderr.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/recorder.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;

constexpr std::size_t kCount = 3000;

// Of very different sizes: their sum depends on the order of addition.
float value(std::uint64_t sequence, int rank, std::size_t i) {
  return std::ldexp(static_cast<float>((rank + 1) * 37 + static_cast<int>((i + sequence) % 101)),
                    static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 40) - 20);
}

/// All-reduces of all ranks, each rank in its own time.
class Program {
 public:
  Program(Cluster& cluster, core::GroupUid uid, std::uint64_t operations)
      : cluster_(cluster), uid_(uid), data_(operations), next_(static_cast<std::size_t>(cluster.size()), 0) {
    for (auto& of_ranks : data_) of_ranks.resize(next_.size());
  }
  void submit(std::size_t rank) {
    const std::uint64_t s = next_[rank];
    if (s == data_.size()) return;
    ++next_[rank];
    std::vector<float>& data = data_[s][rank];
    for (std::size_t i = 0; i < kCount; ++i) data.push_back(value(s, static_cast<int>(rank), i));
    worker::Operation o;
    o.kind = schedule::Kind::kAllReduce;
    o.dtype = core::DType::kFloat32;
    o.op = core::ReduceOp::kSum;
    o.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)}};
    cluster_.submit(uid_, static_cast<int>(rank), o, s, [this](const worker::Outcome& outcome) {
      ++done_;
      if (!outcome.status.is_ok() && error_.empty()) error_ = outcome.status.to_string();
    });
  }
  void submit_on_all() {
    for (std::size_t rank = 0; rank < next_.size(); ++rank) submit(rank);
  }
  bool is_done() const { return done_ == data_.size() * next_.size() || !error_.empty(); }
  bool is_caught_up() const { return done_ == next_.front() * next_.size() || !error_.empty(); }
  std::uint64_t begun() const { return *std::min_element(next_.begin(), next_.end()); }
  const std::string& error() const { return error_; }
  /// Every result has the bits that ranks alone would have made: one contribution per node, in their order.
  void check(const std::vector<int>& node_of) const {
    REQUIRE(error_ == "");
    for (std::uint64_t s = 0; s < data_.size(); ++s) {
      std::vector<float> want(kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        std::vector<float> nodes(static_cast<std::size_t>(node_of.back()) + 1, 0.0F);
        std::vector<bool> has(nodes.size(), false);
        for (std::size_t r = 0; r < node_of.size(); ++r) {
          const auto node = static_cast<std::size_t>(node_of[r]);
          const float one = value(s, static_cast<int>(r), i);
          nodes[node] = has[node] ? nodes[node] + one : one;
          has[node] = true;
        }
        want[i] = nodes[0];
        for (std::size_t node = 1; node < nodes.size(); ++node) want[i] += nodes[node];
      }
      for (std::size_t r = 0; r < next_.size(); ++r)
        if (data_[s][r].size() == kCount)
          REQUIRE(std::memcmp(data_[s][r].data(), want.data(), kCount * sizeof(float)) == 0);
    }
  }

 private:
  Cluster& cluster_;
  const core::GroupUid uid_;
  std::vector<std::vector<std::vector<float>>> data_;  // by operation, then rank
  std::vector<std::uint64_t> next_;                    // per rank
  std::uint64_t done_ = 0;
  std::string error_;
};

/// What rank 0's engine does, without admission servers.
struct Host {
  Cluster& cluster;
  core::GroupUid uid;
  std::vector<int> runtime_of;  // by member, of the servers
  std::optional<core::Status> outcome{};
  std::vector<int> joining{};

  worker::GroupState& group(int rank = 0) const { return *cluster.at(rank).worker().find(uid); }
  void take_in(int count) {
    std::vector<std::string> records;
    joining.clear();
    outcome.reset();
    for (int i = 0; i < count; ++i) {
      const int runtime = cluster.add_server();
      cluster.open_late(uid, runtime, static_cast<int>(group().info.members.size()) + i);
      records.push_back(cluster.record_of(runtime));
      joining.push_back(runtime);
    }
    group().newcomers->take_in(records, [this](const worker::JoinOutcome& what) {
      outcome = what.status;
      if (what.status.is_ok()) runtime_of.insert(runtime_of.end(), joining.begin(), joining.end());
      joining.clear();
    });
  }
  bool is_lost(std::size_t server) const { return group().servers.is_gone(cluster.size() + static_cast<int>(server)); }
  double weight(std::size_t server, int rank = 0) const {
    return group(rank).plans->newest_version().topology.server_weight(static_cast<int>(server));
  }
  bool all_agree() const {
    const worker::PlanChanges& first = *group().plans;
    for (int rank = 0; rank < cluster.size(); ++rank) {
      const worker::PlanChanges& plans = *group(rank).plans;
      const schedule::Topology& topology = plans.newest_version().topology;
      if (plans.is_frozen() || plans.newest() != first.newest()) return false;
      if (topology.servers() != static_cast<int>(runtime_of.size())) return false;
      if (group(rank).info.members.engines() != group().info.members.engines()) return false;
      for (int server = 0; server < topology.servers(); ++server)
        if (topology.server_weight(server) != first.newest_version().topology.server_weight(server)) return false;
    }
    return true;
  }
};

std::uint64_t summed(Cluster& cluster, int runtime) { return cluster.at(runtime).dedicated_stats().bytes; }

}  // namespace

TEST_CASE("cluster/newcomers: of two servers the one that does not answer is named", "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  options.dead_seconds = 1000;
  Cluster cluster(options);
  Host host{cluster, cluster.open_group(), {}};
  std::vector<std::string> records;
  for (int i = 0; i < 2; ++i) {
    const int runtime = cluster.add_server();
    cluster.open_late(host.uid, runtime, 3 + i);
    records.push_back(cluster.record_of(runtime));
    if (i == 1) cluster.stop(runtime);
  }
  std::optional<worker::JoinOutcome> outcome;
  host.group().newcomers->take_in(records, [&](const worker::JoinOutcome& what) { outcome = what; });
  REQUIRE(cluster.run_until([&] {
    clock.pass(std::chrono::milliseconds(20));
    return outcome.has_value();
  }));
  CHECK(outcome->status.code() == core::Code::kTimeout);
  REQUIRE(outcome->server);
  CHECK(*outcome->server == 1);
  CHECK_FALSE(outcome->given_up);
}

TEST_CASE("cluster/newcomers: one that is told to stop before it is a member does not join", "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  Cluster cluster(options);
  Host host{cluster, cluster.open_group(), {}};
  host.take_in(1);
  const int runtime = host.joining.front();
  cluster.at(runtime).dedicated().ask_to_leave(core::Status(core::Code::kAborted, "for the test"));
  REQUIRE(cluster.run_until([&] {
    clock.pass(std::chrono::milliseconds(1));
    return host.outcome.has_value();
  }));
  CHECK(host.outcome->to_string().find("told to stop") != std::string::npos);
  CHECK(host.group().info.members.size() == 3);
}

TEST_CASE("cluster/newcomers: a server that a rank cannot dial is asked by the others to dial the rank",
          "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  options.dead_seconds = 1000;
  options.control = options.wrap_control = true;
  std::vector<int> wrapped(8);
  std::vector<test_support::FaultyTransport*> of_rank_2;
  std::vector<core::EngineId> passed_on;  // Dial::to
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int r) -> std::unique_ptr<transport::Transport> {
    const int number = ++wrapped[static_cast<std::size_t>(r)];  // data, shared memory, control
    if (number == 2) return inner;
    if (r == 2) {
      auto made = std::make_unique<test_support::FaultyTransport>(std::move(inner), test_support::Faults(), 1);
      of_rank_2.push_back(made.get());
      return made;
    }
    return std::make_unique<test::Recorder>(std::move(inner), [&](const wire::Message& message) {
      if (const auto* dial = message.as<wire::Dial>()) passed_on.push_back(dial->to);
    });
  };
  Cluster cluster(options);
  Host host{cluster, cluster.open_group(), {}};
  const auto pass = [&](int tenths) {
    for (int i = 0; i < tenths; ++i) {
      clock.pass(std::chrono::milliseconds(100));
      for (int round = 0; round < 20; ++round) cluster.progress();
    }
  };
  for (int r = 0; r < 3; ++r) cluster.at(r).dial_nodes(host.group(r));
  pass(20);
  host.take_in(1);
  test_support::Faults faults;
  faults.opens_to = faults.silent_to = cluster.id(host.joining.at(0));
  for (test_support::FaultyTransport* transport : of_rank_2) transport->set_faults(faults);
  pass(20);
  CHECK_FALSE(host.outcome);
  REQUIRE(!passed_on.empty());
  CHECK(passed_on.front() == faults.opens_to);
}

TEST_CASE("cluster/newcomers: a server joins between operations, has a share then, and leaves again",
          "[cluster][fast]") {
  for (const std::vector<int>& layout : {std::vector<int>{0, 1, 2}, {0, 0, 1, 1, 2}, {0, 1, 2, 3}}) {
    for (const std::size_t before : {0, 1, 2}) {
      INFO(layout.size() << " ranks, " << before << " servers before");
      test::MovableClock clock;
      ClusterOptions options;
      options.node_of = layout;
      options.servers.assign(before, 1.0);
      Cluster cluster(options);
      Host host{cluster, cluster.open_group(), {}};
      for (std::size_t server = 0; server < before; ++server)
        host.runtime_of.push_back(static_cast<int>(layout.size() + server));
      Program program(cluster, host.uid, 9);
      const auto run = [&] {
        program.submit_on_all();
        REQUIRE(cluster.run_until([&] { return program.is_caught_up(); }));
      };
      const auto settle = [&](const std::function<bool()>& done) {
        REQUIRE(cluster.run_until([&] {
          clock.pass(std::chrono::milliseconds(1));
          return done();
        }));
      };
      for (int i = 0; i < 3; ++i) run();
      host.take_in(1);
      settle([&] { return host.outcome.has_value() && host.all_agree(); });
      REQUIRE(host.outcome->to_string() == core::Status::ok().to_string());
      const int late = host.runtime_of.back();
      CHECK(host.weight(before) > 0.0);
      CHECK(summed(cluster, late) == 0);
      run();
      const schedule::Topology& topology = host.group().plans->newest_version().topology;
      double total = 0.0;
      for (int node = 0; node < topology.nodes(); ++node) total += topology.weight(node);
      for (int server = 0; server < topology.servers(); ++server) total += topology.server_weight(server);
      // Spans end at 64 bytes.
      const double share = kCount * sizeof(float) * topology.server_weight(static_cast<int>(before)) / total;
      CHECK(std::abs(static_cast<double>(summed(cluster, late)) - share) <= 64.0);
      const std::uint64_t once = summed(cluster, late);
      run();
      run();
      CHECK(summed(cluster, late) == 3 * once);

      cluster.at(late).dedicated().ask_to_leave(core::Status(core::Code::kAborted, "it was told to stop"));
      settle([&] { return !cluster.at(late).dedicated().has(host.uid) && host.is_lost(before) && host.all_agree(); });
      CHECK(host.weight(before) == 0.0);
      for (int i = 0; i < 3; ++i) run();
      CHECK(summed(cluster, late) == 3 * once);
      program.check(layout);
    }
  }
}

TEST_CASE("cluster/newcomers: more than 256 servers join at once", "[cluster]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  options.chunk_bytes = 16384;  // room for all shares
  Cluster cluster(options);
  Host host{cluster, cluster.open_group(), {}};
  Program program(cluster, host.uid, 1);
  host.take_in(300);
  REQUIRE(cluster.run_until([&] { return host.outcome.has_value() && host.all_agree(); }));
  CHECK(host.outcome->to_string() == core::Status::ok().to_string());
  for (const std::size_t server : {0, 299}) CHECK(host.weight(server) > 0.0);
  program.submit_on_all();
  REQUIRE(cluster.run_until([&] { return program.is_done(); }));
  program.check(options.node_of);
}

TEST_CASE("cluster/newcomers: one that a rank cannot reach joins nowhere, and the next one does", "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2, 3};
  Cluster cluster(options);
  Host host{cluster, cluster.open_group(), {}};
  Program program(cluster, host.uid, 6);
  const auto settle = [&](core::Duration step, const std::function<bool()>& done) {
    REQUIRE(cluster.run_until([&] {
      clock.pass(step);
      return done();
    }));
  };
  const std::string how = GENERATE("dead", "silent", "unreadable", "of another version");
  INFO(how);
  program.submit_on_all();
  if (how == "unreadable" || how == "of another version") {
    const int runtime = cluster.add_server();
    std::string record = cluster.record_of(runtime, core::kProtocolVersion + (how == "unreadable" ? 0 : 1));
    if (how == "unreadable") record.resize(record.size() / 2);
    host.group().newcomers->take_in({record}, [&](const worker::JoinOutcome& joined) { host.outcome = joined.status; });
  } else {
    host.take_in(1);
    const int runtime = host.joining.front();
    how == "dead" ? cluster.kill(runtime) : cluster.stop(runtime);
  }
  settle(std::chrono::milliseconds(20), [&] { return host.outcome.has_value() && program.is_caught_up(); });
  CHECK_FALSE(host.outcome->is_ok());
  INFO(host.outcome->to_string());
  if (how == "silent") CHECK(host.outcome->code() == core::Code::kTimeout);
  if (how == "of another version") {
    CHECK(host.outcome->to_string().find(std::to_string(core::kProtocolVersion + 1)) != std::string::npos);
    CHECK(host.outcome->to_string().find(std::to_string(core::kProtocolVersion)) != std::string::npos);
  }
  settle(std::chrono::microseconds(100), [&] {
    for (int rank = 0; rank < cluster.size(); ++rank)
      if (host.group(rank).newcomers->is_under_way()) return false;
    return true;
  });
  for (int rank = 0; rank < cluster.size(); ++rank) {
    CHECK(host.group(rank).info.members.size() == 4);
    CHECK(host.group(rank).plans->newest() == 0);
  }
  for (int i = 0; i < 2; ++i) {
    program.submit_on_all();
    settle(std::chrono::microseconds(100), [&] { return program.is_caught_up(); });
  }
  host.take_in(2);
  settle(std::chrono::microseconds(100), [&] { return host.outcome.has_value() && host.all_agree(); });
  CHECK(host.outcome->is_ok());
  for (int i = 0; i < 3; ++i) {
    program.submit_on_all();
    settle(std::chrono::microseconds(100), [&] { return program.is_caught_up(); });
  }
  for (const int runtime : host.runtime_of) CHECK(summed(cluster, runtime) > 0);
  program.check(options.node_of);
}

TEST_CASE("cluster/newcomers: none joins a group whose sums may be coded already, and where one joined none are",
          "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  for (const bool is_coded : {true, false}) {
    Cluster cluster(options);
    Host host{cluster, cluster.open_group(), {}};
    if (is_coded) CHECK(host.group(1).info.coded_or_joined->may_code());
    host.take_in(1);
    REQUIRE(cluster.run_until([&] {
      clock.pass(std::chrono::milliseconds(1));
      return host.outcome.has_value() && (is_coded || host.all_agree());
    }));
    INFO(host.outcome->to_string());
    CHECK(host.outcome->is_ok() == !is_coded);
    if (is_coded)
      CHECK(host.outcome->to_string().find("rank 1 (host1) cannot use it: the device encodes sums of this group") !=
            std::string::npos);
    CHECK(host.group(0).info.members.size() == (is_coded ? 3 : 4));
    CHECK(host.group(1).info.coded_or_joined->may_code() == is_coded);
  }
}

TEST_CASE("cluster/newcomers: in a large group no rank tells many others, and a rank below others is named",
          "[cluster][slow]") {
  test::MovableClock clock;
  ClusterOptions options;
  for (int rank = 0; rank < 80; ++rank) options.node_of.push_back(rank / 2);
  options.control = true;
  enum class Case { kJoins, kRefuses, kStops };
  for (const Case c : {Case::kJoins, Case::kRefuses, Case::kStops}) {
    CAPTURE(static_cast<int>(c));
    Cluster cluster(options);
    Host host{cluster, cluster.open_group(), {}};
    constexpr int kLow = 77;  // below another node's first rank, and below its own node's
    if (c == Case::kRefuses) CHECK(host.group(kLow).info.coded_or_joined->may_code());
    if (c == Case::kStops) cluster.stop(kLow);
    std::vector<std::uint64_t> sent;
    for (int rank = 0; rank < cluster.size(); ++rank) sent.push_back(cluster.messages_sent(rank));
    host.take_in(1);
    REQUIRE(cluster.run_until([&] {
      clock.pass(std::chrono::milliseconds(c == Case::kStops ? 20 : 1));
      return host.outcome.has_value() && (c != Case::kJoins || host.all_agree());
    }));
    INFO(host.outcome->to_string());
    CHECK(host.outcome->is_ok() == (c == Case::kJoins));
    if (c == Case::kRefuses)
      CHECK(host.outcome->to_string().find("rank 77 (host77) cannot use it: the device encodes sums") !=
            std::string::npos);
    if (c == Case::kStops)
      CHECK(host.outcome->to_string().find("rank 77 (host77) cannot use it: it, or a rank that it tells of") !=
            std::string::npos);
    // To each child: to meet the server, a question, the end of the change. Up: met, an answer. To the server: echoes.
    if (c == Case::kJoins)
      for (int rank = 0; rank < cluster.size(); ++rank)
        CHECK(cluster.messages_sent(rank) - sent[static_cast<std::size_t>(rank)] <= 3 * (16 + 1) + 6);
    for (int rank = 0; rank < cluster.size(); ++rank) cluster.at(rank).close_group(host.uid);
  }
}

TEST_CASE("cluster/newcomers: a server that rank 0 knows to be gone is left out of a group that others open later",
          "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options;
  options.node_of = {0, 1, 2};
  options.servers = {1.0};
  Cluster cluster(options);
  const auto settle = [&](const std::function<bool()>& done) {
    return cluster.run_until([&] {
      clock.pass(std::chrono::milliseconds(1));
      return done();
    });
  };
  Host before{cluster, cluster.open_group(), {3}};
  Program first(cluster, before.uid, 1);
  cluster.kill(3);
  first.submit_on_all();
  REQUIRE(settle([&] { return first.is_done() && before.is_lost(0); }));

  Host host{cluster, cluster.new_uid(), {3}};
  cluster.open_group_on(host.uid, 0);
  for (int round = 0; round < 1000; ++round) cluster.progress();
  for (int rank = 1; rank < 3; ++rank) cluster.open_group_on(host.uid, rank);
  Program program(cluster, host.uid, 3);
  for (int i = 0; i < 3; ++i) program.submit_on_all();
  REQUIRE(settle([&] { return program.is_done() && host.all_agree(); }));
  program.check(options.node_of);
  CHECK(host.weight(0) == 0.0);
}

TEST_CASE("cluster/newcomers: servers come, go and die at any time, beside other changes of plans", "[cluster][fast]") {
  const int tries = 20;
  int joined = 0, refused = 0, left = 0, killed = 0;
  for (std::uint64_t seed = 1; seed <= tries; ++seed) {
    std::mt19937_64 random(seed);
    const std::vector<std::vector<int>> layouts{{0, 1, 2}, {0, 0, 1, 1, 2}, {0, 1, 2, 3}};
    const std::vector<int>& layout = layouts[random() % layouts.size()];
    const std::size_t before = random() % 3;
    INFO("seed " << seed);
    test::MovableClock clock;
    ClusterOptions options;
    options.node_of = layout;
    options.servers.assign(before, 1.0);
    options.seed = seed;
    options.retained_bytes = seed % 3 == 0 ? 0 : options.retained_bytes;
    options.heartbeat_seconds = 0.05;
    options.dead_seconds = 0.5;
    Cluster cluster(options);
    const int ranks = cluster.size();
    Host host{cluster, cluster.open_group(), {}};
    for (std::size_t server = 0; server < before; ++server) host.runtime_of.push_back(ranks + static_cast<int>(server));
    constexpr std::uint64_t kOperations = 120;
    Program program(cluster, host.uid, kOperations);
    worker::PlanChanges& plans = *host.group().plans;
    const auto servers_alive = [&] {
      std::vector<int> alive;
      for (const int runtime : host.runtime_of)
        if (cluster.is_alive(runtime)) alive.push_back(runtime);
      return alive;
    };
    const bool finished = cluster.run_until(
        [&] {
          clock.pass(std::chrono::microseconds(100));
          if (random() % 3 == 0) program.submit(random() % static_cast<std::uint64_t>(ranks));
          if (program.begun() == kOperations)
            return program.is_done() && !host.group().newcomers->is_under_way() && host.all_agree();
          if (!host.group().newcomers->is_under_way() && host.runtime_of.size() < 10 && random() % 30 == 0)
            host.take_in(1 + static_cast<int>(random() % 2));
          if (host.outcome) {
            host.outcome->is_ok() ? ++joined : ++refused;
            host.outcome.reset();
          }
          if (random() % 40 == 0 && !host.joining.empty()) {
            const int victim = host.joining[random() % host.joining.size()];
            if (cluster.is_alive(victim)) ++killed, cluster.kill(victim);
          }
          if (const std::vector<int> alive = servers_alive(); !alive.empty() && random() % 300 == 0) {
            const int one = alive[random() % alive.size()];
            if (random() % 2 == 0) {
              ++killed, cluster.kill(one);
            } else {
              ++left,
                  cluster.at(one).dedicated().ask_to_leave(core::Status(core::Code::kAborted, "it was told to stop"));
            }
          }
          if (random() % 50 == 0 && !plans.is_frozen()) {
            if (random() % 2 == 0) {
              schedule::Turns turns;
              turns.a.chunk_bytes = 512;
              turns.b.chunk_bytes = 1024;
              turns.pairs = static_cast<std::uint16_t>(random() % 3);
              turns.block = 2;
              turns.order = static_cast<std::uint32_t>(random());
              plans.try_out(turns);
            } else {
              std::vector<double> weights;
              for (int node = 0; node <= layout.back(); ++node)
                weights.push_back(1.0 + static_cast<double>(random() % 3));
              for (std::size_t server = 0; server < host.runtime_of.size(); ++server)
                weights.push_back(host.is_lost(server) ||
                                          host.group().servers.is_leaving(ranks + static_cast<int>(server))
                                      ? 0.0
                                      : host.weight(server));
              if (weights.size() ==
                  static_cast<std::size_t>(layout.back() + 1 + plans.newest_version().topology.servers()))
                plans.propose(weights);
            }
          }
          return false;
        },
        200000);
    REQUIRE(program.error() == "");
    INFO("begun " << program.begun() << " under way " << host.group().newcomers->is_under_way() << " agree "
                  << host.all_agree());
    REQUIRE(finished);
    program.check(layout);
    // What was lost or has left owns nothing; all memory comes back.
    const auto is_clean = [&] {
      clock.pass(std::chrono::milliseconds(1));
      std::size_t left_over = 0;
      for (std::size_t server = 0; server < host.runtime_of.size(); ++server) {
        if (!cluster.is_alive(host.runtime_of[server]) ||
            !cluster.at(host.runtime_of[server]).dedicated().has(host.uid))
          left_over += host.weight(server) > 0.0 ? 1 : 0;
        else
          left_over += cluster.at(host.runtime_of[server]).dedicated().spans_open();
      }
      for (int member = 0; member < cluster.runtimes(); ++member)
        if (cluster.is_alive(member)) left_over += cluster.at(member).pool().slots_in_use();
      for (int rank = 0; rank < ranks; ++rank) left_over += host.group(rank).retained.size();
      return left_over == 0 && host.all_agree();
    };
    REQUIRE(cluster.run_until(is_clean));
  }
  CHECK(joined > tries);
  CHECK(killed > tries / 2);
  CHECK(left > tries / 2);
  WARN(joined << " joined, " << refused << " did not, " << left << " left, " << killed << " were killed");
}
