// Who is named when a rank falls silent, and what the message says. Runtimes in one thread; a stopped one is not
// driven.
#include <sys/resource.h>
#include <unistd.h>

#include <climits>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"

namespace {

using namespace hybridps;
using core::Clock;
using core::to_seconds;
using schedule::Kind;
using test::Cluster;
using test::ClusterOptions;
using test_support::Faults;
using test_support::FaultyTransport;

constexpr double kHeartbeat = 0.1;
constexpr double kDead = 0.4;
constexpr double kSlack = 5;  // for a busy machine; the bars are measured elsewhere

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

ClusterOptions options_of(const std::vector<int>& node_of) {
  ClusterOptions options;
  options.node_of = node_of;
  options.heartbeat_seconds = kHeartbeat;
  options.dead_seconds = kDead;
  return options;
}

/// All-reduces of one group, one after another, on the ranks that take part.
struct Job {
  explicit Job(Cluster& c, std::size_t n = 50)
      : cluster(c), elements(n), uid(c.open_group()), data(index(c.size())), outcomes(index(c.size())) {}
  ~Job() {  // what is pending ends while there is somewhere to write it
    for (int rank = 0; rank < cluster.size(); ++rank)
      if (cluster.is_alive(rank)) cluster.at(rank).close_group(uid);
  }

  void submit(int rank, std::uint64_t sequence, std::chrono::milliseconds timeout = std::chrono::milliseconds(0)) {
    auto& tensor = data[index(rank)];
    tensor.assign(elements, 1);
    outcomes[index(rank)].reset();
    worker::Operation o;
    o.kind = Kind::kAllReduce;
    o.dtype = core::DType::kInt32;
    o.op = core::ReduceOp::kSum;
    o.timeout = timeout;
    o.output = {worker::Piece{reinterpret_cast<std::byte*>(tensor.data()), tensor.size() * 4}};
    cluster.submit(uid, rank, o, sequence,
                   [this, rank](const worker::Outcome& outcome) { outcomes[index(rank)] = outcome.status; });
  }
  bool run(const std::function<bool()>& done, double seconds = 20) {
    const auto limit = Clock::now() + core::from_seconds(seconds);
    cluster.run_until([&] { return done() || Clock::now() > limit; }, INT_MAX);
    return done();
  }
  void sleep(double seconds) {
    run([] { return false; }, seconds);
  }
  bool over(const std::vector<int>& ranks) const {
    return std::all_of(ranks.begin(), ranks.end(), [this](int rank) { return outcomes[index(rank)].has_value(); });
  }
  std::string text(int rank) const { return std::string(outcomes[index(rank)]->message()); }
  /// What comes after "failed after 1.2 s: ", up to where this rank's own view begins.
  std::string cause(int rank) const {
    const std::string all = text(rank);
    const auto begin = all.find(" s: ", all.find("failed after"));
    return all.substr(begin + 4, all.find("; ", all.find("failed after")) - begin - 4);
  }

  Cluster& cluster;
  const std::size_t elements;
  core::GroupUid uid;
  std::vector<std::vector<std::int32_t>> data;
  std::vector<std::optional<core::Status>> outcomes;
};

std::vector<int> all_but(int size, const std::vector<int>& some) {
  std::vector<int> ranks;
  for (int rank = 0; rank < size; ++rank)
    if (std::find(some.begin(), some.end(), rank) == some.end()) ranks.push_back(rank);
  return ranks;
}

void warm_up(Job& job) {
  const std::vector<int> all = all_but(job.cluster.size(), {});
  for (const int rank : all) job.submit(rank, 0);
  REQUIRE(job.run([&] { return job.over(all); }));
  for (const int rank : all) REQUIRE(job.outcomes[index(rank)]->is_ok());
}

}  // namespace

TEST_CASE("cluster/verdict: a rank that is given up by mistake does not call itself gone", "[cluster][fast]") {
  Cluster cluster(options_of({0, 1, 2}));
  Job job(cluster);
  warm_up(job);
  for (int rank = 0; rank < 3; ++rank)
    if (rank != 0) job.submit(rank, 1);
  worker::Worker& finder = cluster.at(0).worker();
  finder.fail_group(*finder.find(job.uid),
                    core::Status(core::Code::kPeerDead, "rank 1 (host1) is gone: it sent no heartbeat for 5 s"),
                    /*tell=*/true, /*blamed=*/1);
  REQUIRE(job.run([&] { return job.over({1, 2}); }));
  INFO(job.text(1) << "\n" << job.text(2));
  CHECK(job.cause(1).starts_with("rank 1 (host1) was given up by "));
  CHECK(job.text(1).find("is gone") == std::string::npos);
  CHECK(job.text(1).find(": it sent no heartbeat for 5 s") != std::string::npos);
  CHECK(job.cause(2).starts_with("rank 1 (host1) "));
}

TEST_CASE("cluster/verdict: ranks that stand still are named by all others and by themselves", "[cluster][slow]") {
  struct Case {
    std::vector<int> node_of;
    std::vector<int> victims;
  };
  const std::vector<Case> cases = {{{0, 0, 1}, {2}}, {{0, 0}, {0}}, {{0, 1, 2, 3}, {1, 2}}, {{0, 0, 1, 1}, {3, 0}}};
  for (const Case& c : cases) {
    Cluster cluster(options_of(c.node_of));
    Job job(cluster);
    warm_up(job);
    const std::vector<int> others = all_but(cluster.size(), c.victims);
    for (const int victim : c.victims) cluster.stop(victim);
    const auto start = Clock::now();
    for (const int rank : others) job.submit(rank, 1);
    REQUIRE(job.run([&] { return job.over(others); }));
    const double seconds = to_seconds(Clock::now() - start);
    CHECK(seconds > kDead * 0.9);
    CHECK(seconds < kDead + kSlack);
    for (const int rank : others) {
      INFO(job.text(rank));
      CHECK(job.outcomes[index(rank)]->code() == core::Code::kPeerDead);
      CHECK(job.cause(rank) == job.cause(others.front()));
      bool named = false;
      for (const int victim : c.victims)
        named = named || job.cause(rank).starts_with("rank " + std::to_string(victim) + " (host" +
                                                     std::to_string(victim) + ") is gone: it sent no heartbeat for 0.");
      CHECK(named);
      CHECK(job.text(rank).find("What to do: see that process's own log") != std::string::npos);
    }
    // A victim that goes on after all hears it, or concludes it from its own clock: it blames nobody else.
    for (const int victim : c.victims) cluster.go_on(victim);
    for (const int victim : c.victims) job.submit(victim, 1);
    REQUIRE(job.run([&] { return job.over(c.victims); }));
    for (const int victim : c.victims) {
      INFO(job.text(victim));
      bool named = false;
      for (const int other : c.victims)
        named = named || job.cause(victim).starts_with("rank " + std::to_string(other) + " (");
      CHECK(named);
    }
  }
}

TEST_CASE("cluster/verdict: a rank that stands still is given up, with what it does not take, whoever waits for it",
          "[cluster][fast]") {
  const bool waits = GENERATE(false, true);
  test::MovableClock clock;
  Cluster cluster(options_of({0, 1}));
  Job job(cluster, 3000);  // every rank owns a part of it
  warm_up(job);
  cluster.stop(1);
  engine::Runtime& other = cluster.at(0);
  if (waits) job.submit(0, 1);
  for (int i = 0; i < 5; ++i) other.progress();
  CHECK((other.pool().slots_in_use() > 0) == waits);
  for (double seconds = 0; seconds < 2 * kDead; seconds += kHeartbeat / 4) {
    clock.pass(core::from_seconds(kHeartbeat / 4));
    other.progress();
  }
  CHECK(other.worker().find(job.uid)->status.code() == core::Code::kPeerDead);
  CHECK(other.pool().slots_in_use() == 0);
  other.update_counters();
  CHECK(other.counters()[observe::Counter::kEndpoints] == 0);
}

TEST_CASE("cluster/verdict: a rank that stands still for less than the limit causes no error", "[cluster][fast]") {
  for (const std::vector<int>& layout : {std::vector<int>{0, 0, 1}, std::vector<int>{0, 1, 2}}) {
    Cluster cluster(options_of(layout));
    Job job(cluster);
    warm_up(job);
    cluster.stop(1);
    for (const int rank : {0, 2}) job.submit(rank, 1);
    job.sleep(kDead * 0.6);
    cluster.go_on(1);
    job.submit(1, 1);
    REQUIRE(job.run([&] { return job.over({0, 1, 2}); }));
    for (const int rank : {0, 1, 2}) {
      INFO(job.outcomes[index(rank)]->message());
      CHECK(job.outcomes[index(rank)]->is_ok());
    }
  }
}

TEST_CASE("cluster/verdict: a cut between two ranks that do not watch each other is found by who waits",
          "[cluster][fast]") {
  std::vector<FaultyTransport*> links;
  ClusterOptions options = options_of({0, 1, 2, 3});
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int) {
    auto wrapped = std::make_unique<FaultyTransport>(std::move(inner), Faults{}, 1);
    links.push_back(wrapped.get());
    return wrapped;
  };
  Cluster cluster(options);
  Job job(cluster, 3000);  // every rank owns a part of it
  warm_up(job);
  for (const int rank : {0, 2}) {
    Faults cut;
    cut.silent_to = cluster.id(2 - rank);
    links[2 * index(rank)]->set_faults(cut);
  }
  for (int rank = 0; rank < 4; ++rank) job.submit(rank, 1);
  REQUIRE(job.run([&] { return job.over({0, 1, 2, 3}); }));
  for (int rank = 0; rank < 4; ++rank) {
    INFO(job.text(rank));
    CHECK(job.outcomes[index(rank)]->code() == core::Code::kPeerDead);
    const bool of_the_two = job.cause(rank).starts_with("rank 0 (") || job.cause(rank).starts_with("rank 2 (");
    CHECK(of_the_two);
  }
}

TEST_CASE("cluster/verdict: a deadline says who waits, who is missing, and what those did last", "[cluster][fast]") {
  ClusterOptions options = options_of({0, 0, 1});
  options.dead_seconds = 1000;
  Cluster cluster(options);
  Job job(cluster);
  warm_up(job);
  for (const int rank : {0, 1}) job.submit(rank, 1, std::chrono::milliseconds(600));
  REQUIRE(job.run([&] { return job.over({0, 1}); }));
  for (const int rank : {0, 1}) {
    INFO(job.text(rank));
    CHECK(job.outcomes[index(rank)]->code() == core::Code::kTimeout);
    const std::string me = std::to_string(rank);
    CHECK(
        job.text(rank).starts_with("hybridps[rank " + me + "/3 host" + me +
                                   " group \"test\"]: allreduce seq 1 (sum of int32[50], 200 bytes) failed after 0."));
    CHECK(job.cause(rank) == job.cause(0));
    CHECK(job.cause(rank).starts_with("timed out after 0.6 s without rank 2 (host2) (found by rank "));
    CHECK(job.text(rank).find("; waiting [0, 1], missing [2]: rank 2 (host2) was last seen finishing seq 0, allreduce "
                              "sum of int32[50], 200 bytes; 0/1 chunks done") != std::string::npos);
    CHECK(job.text(rank).find("pass a longer timeout") != std::string::npos);
  }
  // The verdict was on the operation: the group goes on.
  job.submit(2, 1);
  for (int rank = 0; rank < 3; ++rank) job.submit(rank, 2);
  REQUIRE(job.run([&] { return job.over({0, 1, 2}); }));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(job.outcomes[index(rank)]->is_ok());
    CHECK(job.data[index(rank)] == std::vector<std::int32_t>(50, 3));
  }
}

TEST_CASE("cluster/verdict: a deadline names nobody who has issued the operation and waits as well",
          "[cluster][fast]") {
  std::vector<FaultyTransport*> links;
  ClusterOptions options = options_of({0, 1, 2});
  options.dead_seconds = 1000;
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int) {
    auto wrapped = std::make_unique<FaultyTransport>(std::move(inner), Faults{}, 1);
    links.push_back(wrapped.get());
    return wrapped;
  };
  Cluster cluster(options);
  Job job(cluster);
  warm_up(job);

  // What they send to each other in the next moment is lost, but for probes and answers later on.
  const auto lose = [&] {
    Faults all;
    all.drop = 1;
    for (FaultyTransport* link : links) link->set_faults(all);
    job.sleep(0.05);
    for (FaultyTransport* link : links) link->set_faults(Faults{});
  };
  SECTION("since the beginning") {
    job.submit(0, 1, std::chrono::milliseconds(600));
    for (const int rank : {1, 2}) job.submit(rank, 1);
    lose();
  }
  SECTION("since after it asked what they do") {
    job.submit(0, 1, std::chrono::milliseconds(1200));
    job.sleep(0.5);
    for (const int rank : {1, 2}) job.submit(rank, 1);
    lose();
  }
  REQUIRE(job.run([&] { return job.over({0}); }));
  INFO(job.text(0));
  CHECK(job.outcomes[0]->code() == core::Code::kTimeout);
  CHECK(job.text(0).find("without") == std::string::npos);
  CHECK(job.text(0).find("missing [") == std::string::npos);
  CHECK(job.text(0).find("; waiting [0, 2]; 0/1 chunks") != std::string::npos);  // rank 1, the owner, is done
}

TEST_CASE("cluster/verdict: a deadline counts from the call and not from when the engine hears of it",
          "[cluster][fast]") {
  Cluster cluster(options_of({0, 1}));
  Job job(cluster);
  warm_up(job);
  worker::Operation o;
  o.kind = Kind::kBarrier;
  o.timeout = std::chrono::milliseconds(200);
  o.issued_at = Clock::now() - std::chrono::milliseconds(150);
  const auto start = Clock::now();
  bool done = false;
  cluster.submit(job.uid, 0, o, 1, [&](const worker::Outcome& outcome) { done = !outcome.status.is_ok(); });
  REQUIRE(job.run([&] { return done; }));
  CHECK(Clock::now() - o.issued_at >= o.timeout);
  CHECK(to_seconds(Clock::now() - start) < 0.05 + kSlack);
}

TEST_CASE("cluster/verdict: who gave an operation up before the group was open tells the others", "[cluster][fast]") {
  Cluster cluster(options_of({0, 1, 2}));
  Job job(cluster);
  worker::Operation o;
  o.kind = Kind::kBarrier;
  for (const int rank : {0, 1})
    cluster.submit(job.uid, rank, o, 0,
                   [&job, rank](const worker::Outcome& outcome) { job.outcomes[index(rank)] = outcome.status; });
  worker::Worker& late = cluster.at(2).worker();
  late.submit_failed(*late.find(job.uid), o, 0, core::Status(core::Code::kTimeout, "rank 2 gave it up"));
  REQUIRE(job.run([&] { return job.over({0, 1}); }));
  for (const int rank : {0, 1}) CHECK(job.text(rank).find("rank 2 gave it up") != std::string::npos);
  for (int rank = 0; rank < 3; ++rank) job.submit(rank, 1);
  REQUIRE(job.run([&] { return job.over({0, 1, 2}); }));
  for (int rank = 0; rank < 3; ++rank) CHECK(job.outcomes[index(rank)]->is_ok());
}

TEST_CASE("cluster/verdict: who asks after a group that has failed elsewhere hears why", "[cluster][fast]") {
  test::MovableClock clock;
  Cluster cluster(options_of({0, 1}));
  Job job(cluster);
  worker::Worker& failed = cluster.at(0).worker();
  failed.fail_group(*failed.find(job.uid), core::Status(core::Code::kAborted, "as told"), /*tell=*/false);
  job.submit(1, 0);
  CHECK_FALSE(cluster.run_until([&] { return job.over({1}); }, 100));
  clock.pass(core::from_seconds(0.3));
  REQUIRE(cluster.run_until([&] { return job.over({1}); }, 100));
  CHECK(job.outcomes[1]->code() == core::Code::kAborted);
  CHECK(job.text(1).find("as told") != std::string::npos);
}

TEST_CASE("cluster/verdict: that all others know of a failure is known by who told them", "[cluster][fast]") {
  Cluster cluster(options_of({0, 1, 2, 3}));
  Job job(cluster);
  const auto knows = [&](int rank) {
    return cluster.at(rank).all_know_of_failure(*cluster.at(rank).worker().find(job.uid));
  };
  const auto fail = [&](int rank, bool tell) {
    worker::Worker& worker = cluster.at(rank).worker();
    worker.fail_group(*worker.find(job.uid), core::Status(core::Code::kAborted, "as told"), tell);
  };
  fail(2, /*tell=*/false);  // told by somebody, it tells nobody to whom it has no connection
  CHECK_FALSE(knows(2));
  fail(0, /*tell=*/true);
  fail(1, /*tell=*/true);
  CHECK_FALSE(knows(0));
  REQUIRE(cluster.run_until([&] { return knows(0) && knows(1); }));
  CHECK_FALSE(cluster.at(3).worker().find(job.uid)->status.is_ok());
  CHECK_FALSE(knows(2));  // of rank 3
}

TEST_CASE("cluster/verdict: that an operation goes on waiting is told, for the engine to ask elsewhere",
          "[cluster][fast]") {
  test::MovableClock clock;
  ClusterOptions options = options_of({0, 1});
  options.dead_seconds = 1000;
  options.warn_seconds = GENERATE(0.0, 3.5, 10.0);  // each warning asks the ranks, too
  Cluster cluster(options);
  Job job(cluster);
  std::vector<core::GroupUid> waiting;
  engine::Runtime::RuntimeHooks hooks;
  hooks.group_waits = [&](core::GroupUid uid) { waiting.push_back(uid); };
  cluster.at(0).set_hooks(std::move(hooks));
  job.submit(0, 0);
  const auto pass = [&](int tenths) {
    for (int i = 0; i < tenths; ++i) {
      clock.pass(std::chrono::milliseconds(100));
      cluster.at(0).progress();
    }
  };
  pass(10);
  CHECK(waiting.empty());
  pass(90);
  CHECK((!waiting.empty() && waiting.front() == job.uid));
  job.submit(1, 0);
  REQUIRE(cluster.run_until([&] { return job.over({0, 1}); }, 100));
}

TEST_CASE("cluster/verdict: a group whose messages were dropped before it was open fails when it opens",
          "[cluster][fast]") {
  const bool by_age = GENERATE(false, true);
  test::MovableClock clock;
  ClusterOptions options = options_of({0, 1, 2});
  options.heartbeat_seconds = 1e6;
  options.dead_seconds = 1e7;
  if (!by_age) options.unopened.messages = 20;
  Cluster cluster(options);
  Job other(cluster);
  const core::GroupUid uid = cluster.new_uid();
  for (const int rank : {0, 1}) cluster.open_group_on(uid, rank);
  std::vector<std::byte> byte(1);
  std::vector<std::optional<core::Status>> outcomes(3);
  const auto settle = [&] {
    for (int i = 0; i < 300; ++i) {
      cluster.progress();
      clock.pass(std::chrono::milliseconds(1));
    }
  };
  for (std::uint64_t i = 0; i < 30; ++i) {
    worker::Operation o;
    o.kind = Kind::kPointToPoint;
    o.sending = true;
    o.peer = 2;
    o.input = {worker::Piece{byte.data(), 1}};
    cluster.submit(uid, 0, o, i, {});
  }
  worker::Operation barrier;
  barrier.kind = Kind::kBarrier;
  const auto join_in = [&](int rank) {
    cluster.submit(uid, rank, barrier, 0,
                   [&outcomes, rank](const worker::Outcome& outcome) { outcomes[index(rank)] = outcome.status; });
  };
  join_in(0);
  join_in(1);
  settle();
  if (by_age) clock.pass(std::chrono::minutes(31));
  settle();
  CHECK(cluster.at(2).counters()[observe::Counter::kBadMessages] >= 20);
  // What the senders paid has come back: the other group, over the same connections, goes on.
  for (int rank = 0; rank < 3; ++rank) other.submit(rank, 0);
  settle();
  REQUIRE(other.over({0, 1, 2}));
  for (int rank = 0; rank < 3; ++rank) CHECK(other.outcomes[index(rank)]->is_ok());
  cluster.open_group_on(uid, 2);
  join_in(2);
  settle();
  for (const auto& outcome : outcomes) {
    REQUIRE(outcome);
    INFO(outcome->to_string());
    CHECK(outcome->code() == core::Code::kOutOfResources);
    CHECK(outcome->message().find("rank 2 (host2) had to drop messages of the group") != std::string_view::npos);
  }
  CHECK(cluster.at(2).worker().find(other.uid)->status.is_ok());
}

TEST_CASE("cluster/verdict: messages that nothing waits for yet are kept up to a limit", "[cluster][fast]") {
  ClusterOptions options = options_of({0, 1, 2});
  options.early_messages_max = 50;
  Cluster cluster(options);
  Job job(cluster);
  std::vector<std::byte> byte(1);
  const bool p2p = GENERATE(false, true);
  for (std::uint64_t i = 0; i < 60; ++i) {
    worker::Operation o;
    o.kind = p2p ? Kind::kPointToPoint : Kind::kBroadcast;
    o.root = 0;
    o.peer = 1;
    o.sending = true;
    (p2p ? o.input : o.output).assign(1, worker::Piece{byte.data(), 1});
    cluster.submit(job.uid, 0, o, i, {});
    if (i == 40) {
      cluster.run_until([] { return false; }, 2000);
      CHECK(cluster.at(0).worker().find(job.uid)->status.is_ok());
    }
  }
  job.run([&] { return !cluster.at(0).worker().find(job.uid)->status.is_ok(); });
  for (int rank = 0; rank < 3; ++rank) {
    job.submit(rank, 60);
    REQUIRE(job.run([&] { return job.over({rank}); }));
    CHECK(job.outcomes[index(rank)]->code() == core::Code::kOutOfResources);
    const std::string text = job.text(rank);
    INFO(text);
    CHECK((text.find("rank 1 (host1) keeps 50 messages") != std::string::npos ||
           (!p2p && text.find("rank 2 (host2) keeps 50 messages") != std::string::npos)));
    CHECK(text.find("rank 0 (host0) sends number ") != std::string::npos);
  }
}

TEST_CASE("cluster/verdict: questions and answers travel over connections that stand", "[cluster][slow]") {
  ClusterOptions options = options_of({0, 1, 2, 3, 4});
  options.control = true;
  options.heartbeat_seconds = options.dead_seconds = 1e6;
  Cluster cluster(options);
  Job job(cluster, 5000);  // chunks for every server: all are connected
  warm_up(job);
  std::vector<std::uint64_t> before;  // the first question to a successor may come before there is anything else
  for (const int rank : all_but(5, {})) before.push_back(cluster.control_connections(rank));
  const std::vector<int> early = {0, 1, 2, 3};
  for (const int rank : early) job.submit(rank, 1, std::chrono::milliseconds(700));  // they ask after 250 ms
  REQUIRE(job.run([&] { return job.over(early); }));
  for (const int rank : early) {
    INFO(job.text(rank));
    CHECK(job.text(rank).find("missing [4]: rank 4 (host4) was last seen finishing seq 0") != std::string::npos);
  }
  for (const int rank : all_but(5, {})) CHECK(cluster.control_connections(rank) == before[index(rank)]);
}

TEST_CASE("cluster/verdict: where nothing stands a connection for control is made for a question", "[cluster][fast]") {
  ClusterOptions options = options_of({0, 1, 2});
  options.control = true;
  Cluster cluster(options);
  Job job(cluster);
  CHECK(job.run([&] { return cluster.control_connections(0) > 0; }));  // to its successor
  job.sleep(2 * kDead);
  warm_up(job);
}

TEST_CASE("cluster/verdict: a peer that cannot be asked for want of descriptors is not silent", "[cluster][slow]") {
  std::vector<FaultyTransport*> data;
  ClusterOptions options = options_of({0, 1});
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int rank) -> std::unique_ptr<transport::Transport> {
    auto faulty = std::make_unique<FaultyTransport>(std::move(inner), Faults(), rank + 1);
    data.push_back(faulty.get());  // of each rank that between nodes, and then that inside one
    return faulty;
  };
  Cluster cluster(options);
  Job job(cluster);
  Faults lack;
  lack.lacks = true;
  lack.silent_to = cluster.id(1);
  data[0]->set_faults(lack);
  lack.silent_to = cluster.id(0);
  data[2]->set_faults(lack);
  job.sleep(3 * kDead);
  lack.silent_to = {};  // what was asked before is lost: a connection lacks until another question could be answered
  data[0]->set_faults(lack);
  data[2]->set_faults(lack);
  job.sleep(kDead);
  std::string whose;
  SECTION("a timeout tells of it, where they lack there") {
    whose = "of the processes there (raise `ulimit -n` of these)";
  }
  SECTION("a timeout tells of it, where they lack here") { whose = "of this process: Too many open files; "; }
  if (!whose.empty()) {
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    if (whose.starts_with("of this")) {
      const int lowest = ::dup(0);
      ::close(lowest);
      const rlimit none{static_cast<rlim_t>(lowest), before.rlim_max};
      REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
    }
    job.submit(0, 0, std::chrono::milliseconds(700));
    const bool is_over = job.run([&] { return job.over({0}); });
    (void)::setrlimit(RLIMIT_NOFILE, &before);
    REQUIRE(is_over);
    INFO(job.text(0));
    CHECK(job.text(0).find("timed out after 0.7 s without rank 1 (host1), because connections to rank 1 wait for file "
                           "descriptors " +
                           whose) != std::string::npos);
    return;
  }
  data[0]->set_faults({});
  data[2]->set_faults({});
  warm_up(job);
  // And one that is, is.
  cluster.stop(1);
  job.submit(0, 1);
  REQUIRE(job.run([&] { return job.over({0}); }));
  CHECK(job.text(0).find("it sent no heartbeat for 0.") != std::string::npos);
}
