// Rank 0 brings servers into its group, at the start and later, from admission servers that are played here.
#include "hybridps/engine/server_joins.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>

#include "tests/support/captured_stderr.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/held_port.h"
#include "tests/unit/bootstrap/sample.h"

namespace {

using namespace hybridps;
using bootstrap::Bytes;
using engine::ServerRequest;
using test::Cluster;
using test::HeldPort;

/// An admission server behind which runtimes of the cluster serve, made when they are asked for. What touches the
/// cluster is done in the test's thread, by serve().
struct Played {
  Played(Cluster& c, int port = 0, const std::string& token = "secret") : cluster(c) {
    admission =
        admission::AdmissionServer::open({"127.0.0.1", port}, token, [this](const Bytes& body) -> core::Result<Bytes> {
          ServerRequest request = engine::decode_request(body).value();
          std::unique_lock lock(mutex);
          asked = std::move(request);
          changed.wait(lock, [this] { return answer.has_value() || ended; });
          if (!answer) return core::Status(core::Code::kClosed, "the test is over");
          const core::Result<Bytes> said = *answer;
          answer.reset();
          return said;
        }).value();
  }
  /// Whoever still waits for an answer gets an error: the admission server joins its thread.
  ~Played() {
    {
      const std::lock_guard lock(mutex);
      ended = true;
    }
    changed.notify_all();
  }
  void serve() {
    const std::lock_guard lock(mutex);
    if (!asked) return;
    switch (asked->kind) {
      case ServerRequest::RequestKind::kFind:
        ++finds;
        answer = records();
        break;
      case ServerRequest::RequestKind::kRenew:
        for (const core::EngineId engine : asked->engines) renewed.insert(engine);
        runtime = -1;
        answer = records();
        break;
      case ServerRequest::RequestKind::kOpen:
        ++opens;
        CHECK(asked->attempt > attempt);
        attempt = asked->attempt;
        if (!refuses.is_ok()) {
          answer = refuses;
          break;
        }
        for (const bootstrap::MemberRecord& server : asked->roster->servers)
          if (server.engine == cluster.id(runtime))
            member = asked->roster->size() + static_cast<int>(asked->before) + server.group_rank;
        if (attempt > 1) {
          cluster.at(runtime).dedicated().drop(asked->roster->uid);
          cluster.at(runtime).dedicated().tick();
        }
        cluster.open_late(asked->roster->uid, runtime, member);
        answer = Bytes();
        break;
      case ServerRequest::RequestKind::kClose:
        for (const core::EngineId engine : asked->engines) closed.insert(engine);
        answer = Bytes();
        break;
    }
    asked.reset();
    changed.notify_all();
  }
  Bytes records() {
    if (runtime < 0) runtime = cluster.add_server();
    const std::string record = cluster.record_of(runtime);
    return engine::encode_records({bootstrap::decode_record(Bytes(record.begin(), record.end())).value()});
  }

  Cluster& cluster;
  int runtime = -1;
  int member = -1;
  int finds = 0;
  int opens = 0;
  std::uint32_t attempt = 0;
  core::Status refuses;
  std::set<core::EngineId> closed;
  std::set<core::EngineId> renewed;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<ServerRequest> asked;
  std::optional<core::Result<Bytes>> answer;
  bool ended = false;
  std::unique_ptr<admission::AdmissionServer> admission;  // goes first: its thread uses the rest
};

using engine::ServerJoins;

struct Scene {
  explicit Scene(std::vector<admission::Address> addresses,
                 ServerJoins::GroupStart start = ServerJoins::GroupStart::kIsOver, bool required = false,
                 core::TimePoint start_until = core::TimePoint::max()) {
    uid = cluster.open_group();
    roster = bootstrap::testing::sample_roster(3);
    roster.uid = uid;
    roster.node_of = {0, 1, 2};
    roster.servers.clear();
    for (int rank = 0; rank < 3; ++rank) {
      engine::Runtime::RuntimeHooks hooks;
      hooks.servers_joined = [this, rank](core::GroupUid, std::vector<bootstrap::MemberRecord> servers) {
        joined[rank] += servers.size();
        if (rank == 0) std::move(servers.begin(), servers.end(), std::back_inserter(roster.servers));
      };
      hooks.group_starts = [this, rank](core::GroupUid) { ++starts[rank]; };
      cluster.at(rank).set_hooks(std::move(hooks));
    }
    late = std::make_unique<ServerJoins>(
        engine::ServerJoinsOptions{std::move(addresses), "secret", std::chrono::milliseconds(2), required,
                                   [this](const bootstrap::MemberRecord& server) { introduced.insert(server.engine); }},
        roster, group(), start, start_until,
        [this](const core::Status& why) { cluster.at(0).worker().fail_group(group(), why, /*tell=*/true); });
    group().info.weights_with = [this](const std::vector<bool>& are_there) { return late->weights_with(are_there); };
  }
  bool has_started() const { return starts == std::map<int, int>{{0, 1}, {1, 1}, {2, 1}}; }
  worker::GroupState& group(int rank = 0) { return *cluster.at(rank).worker().find(uid); }
  /// Real time: admission servers have threads.
  template <typename Condition>
  bool within_seconds(Condition condition, const std::vector<Played*>& played) {
    const auto limit = core::Clock::now() + std::chrono::seconds(30);
    while (!condition()) {
      if (core::Clock::now() > limit) return false;
      late->tick(core::Clock::now());
      for (Played* one : played) one->serve();
      cluster.progress();
    }
    return true;
  }

  Cluster cluster{[] {
    test::ClusterOptions options;
    options.node_of = {0, 1, 2};
    return options;
  }()};
  core::GroupUid uid;
  bootstrap::Roster roster;
  std::map<int, std::size_t> joined;  // servers, by rank
  std::map<int, int> starts;          // by rank
  std::set<core::EngineId> introduced;
  std::unique_ptr<ServerJoins> late;
};

}  // namespace

TEST_CASE("engine/server_joins: one that comes late joins; lost and alive, its server is asked for another engine",
          "[engine][fast]") {
  const HeldPort port;
  Scene scene({{"127.0.0.1", port.number()}});
  for (int i = 0; i < 100; ++i) {
    scene.late->tick(core::Clock::now());
    scene.cluster.progress();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  CHECK(scene.group().info.members.size() == 3);
  Played played(scene.cluster, port.number());
  const auto has_share = [&](int server) {
    for (int rank = 0; rank < 3; ++rank) {
      const schedule::Topology& topology = scene.group(rank).plans->newest_version().topology;
      if (topology.servers() <= server || !(topology.server_weight(server) > 0.0)) return false;
    }
    return true;
  };
  REQUIRE(scene.within_seconds([&] { return has_share(0); }, {&played}));
  CHECK(played.member == 3);
  // All that there is is there: it is not asked again.
  const int finds = played.finds;
  const auto until = core::Clock::now() + std::chrono::milliseconds(100);
  REQUIRE(scene.within_seconds([&] { return core::Clock::now() > until; }, {&played}));
  CHECK(played.finds == finds);
  // Rank 1 gives it up.
  const core::EngineId first = scene.cluster.id(played.runtime);
  scene.group(1).lost_servers->report(3, core::Status(core::Code::kPeerDead, "for the test"));
  REQUIRE(scene.within_seconds([&] { return has_share(1); }, {&played}));
  CHECK(played.renewed == std::set<core::EngineId>{first});
  CHECK(played.member == 4);
  CHECK(scene.group().plans->newest_version().topology.server_weight(0) == 0.0);
}

TEST_CASE("engine/server_joins: another token is complained of once, however often it is asked", "[engine][fast]") {
  test::CapturedStderr log;
  {
    const HeldPort port;
    Scene scene({{"127.0.0.1", port.number()}});
    Played played(scene.cluster, port.number(), "another token");
    const auto& refused = played.admission->stats().refused;
    REQUIRE(scene.within_seconds([&] { return refused.load() >= 3; }, {&played}));
    CHECK(scene.group().info.members.size() == 3);
  }
  const std::string text = log.finish();
  const auto first = text.find("goes on without a dedicated server");
  REQUIRE(first != std::string::npos);
  CHECK(text.find("goes on without a dedicated server", first + 1) == std::string::npos);
}

TEST_CASE(
    "engine/server_joins: one that refuses is asked again; where it is not known whether it has opened, it takes "
    "another engine",
    "[engine][fast]") {
  const HeldPort port;
  Scene scene({{"127.0.0.1", port.number()}});
  Played played(scene.cluster, port.number());
  played.refuses = core::Status(core::Code::kOutOfResources, "its memory is enough for 2 ranks");
  REQUIRE(scene.within_seconds([&] { return played.opens == 2; }, {&played}));
  CHECK(played.closed.empty());
  CHECK(played.renewed.empty());
  const core::EngineId first = scene.cluster.id(played.runtime);
  played.refuses = core::Status(core::Code::kTimeout, "the server is too busy to answer");
  REQUIRE(scene.within_seconds([&] { return played.opens == 3; }, {&played}));
  played.refuses = core::Status::ok();
  REQUIRE(scene.within_seconds([&] { return scene.group(2).info.members.size() == 4; }, {&played}));
  CHECK(scene.within_seconds([&] { return !played.closed.empty(); }, {&played}));
  CHECK(played.closed == std::set<core::EngineId>{first});
  CHECK(played.renewed == std::set<core::EngineId>{first});
}

TEST_CASE("engine/server_joins: a group starts when all servers that are there have joined, in one change",
          "[engine][fast]") {
  test::CapturedStderr log;
  const HeldPort nobody;
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", nobody.number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers);
  Played one(scene.cluster, ports[0].number());
  Played other(scene.cluster, ports[1].number());
  REQUIRE(scene.within_seconds([&] { return scene.has_started(); }, {&one, &other}));
  for (int rank = 0; rank < 3; ++rank) {
    const schedule::Topology& topology = scene.group(rank).plans->newest_version().topology;
    CHECK(scene.joined[rank] == 2);
    REQUIRE(topology.servers() == 2);
    CHECK(topology.server_weight(0) > 0.0);
    CHECK(topology.server_weight(1) > 0.0);
    CHECK(scene.group(rank).plans->newest() == 1);
    CHECK(scene.group(rank).plans->version_of(0).number == 1);
  }
  CHECK(one.member == 3);
  CHECK(other.member == 4);
  CHECK(one.opens == 1);
  CHECK(one.closed.empty());
  CHECK(log.finish().find("goes on without a dedicated server") != std::string::npos);
}

TEST_CASE("engine/server_joins: a group whose servers are not there starts without, and takes them in later",
          "[engine][fast]") {
  const HeldPort port;
  Scene scene({{"127.0.0.1", port.number()}}, ServerJoins::GroupStart::kAwaitsServers);
  REQUIRE(scene.within_seconds([&] { return scene.has_started(); }, {}));
  CHECK(scene.joined.empty());
  for (int rank = 0; rank < 3; ++rank) CHECK(scene.group(rank).plans->newest() == 0);
  Played played(scene.cluster, port.number());
  REQUIRE(scene.within_seconds([&] { return scene.joined[2] == 1; }, {&played}));
  CHECK(scene.has_started());
}

TEST_CASE("engine/server_joins: where one does not open the group, the start is made again without it",
          "[engine][fast]") {
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers);
  Played refuses(scene.cluster, ports[0].number());
  Played opens(scene.cluster, ports[1].number());
  // It may have it open, in part or a little later.
  refuses.refuses = core::Status(core::Code::kTimeout, "the server is too busy to answer");
  REQUIRE(scene.within_seconds([&] { return scene.has_started() && !refuses.closed.empty(); }, {&refuses, &opens}));
  CHECK(scene.joined[1] == 1);
  CHECK(opens.member == 3);
  CHECK(opens.opens == 2);
  CHECK(opens.closed.empty());  // it keeps its engine
  CHECK(opens.renewed.empty());
  CHECK(scene.group(1).plans->newest_version().topology.server_weight(0) > 0.0);
}

TEST_CASE("engine/server_joins: the start is over when the group's timeout is, and what has not joined joins late",
          "[engine][fast]") {
  test::CapturedStderr log;
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers,
              /*required=*/false, core::Clock::now() + std::chrono::milliseconds(200));
  Played slow(scene.cluster, ports[0].number());
  Played opens(scene.cluster, ports[1].number());
  // The first one is asked and does not answer.
  REQUIRE(scene.within_seconds([&] { return scene.has_started(); }, {&opens}));
  CHECK(scene.joined.empty());
  REQUIRE(scene.within_seconds([&] { return scene.joined[1] == 2; }, {&slow, &opens}));
  const std::string text = log.finish();
  for (const HeldPort& port : ports)
    CHECK(text.find("127.0.0.1:" + std::to_string(port.number()) + " has not joined within the group's timeout") !=
          std::string::npos);
}

TEST_CASE("engine/server_joins: a server that a rank cannot use is named, and the others join", "[engine][fast]") {
  test::CapturedStderr log;
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers);
  Played useless(scene.cluster, ports[0].number());
  Played useful(scene.cluster, ports[1].number());
  engine::Runtime::RuntimeHooks hooks;
  hooks.may_meet = [&](core::GroupUid, const std::vector<bootstrap::MemberRecord>& newcomers) -> core::Result<int> {
    if (newcomers.back().engine != scene.cluster.id(useless.runtime)) return schedule::kNoRegion;
    return core::Status(core::Code::kOutOfResources, "too few file descriptors");
  };
  scene.cluster.at(2).set_hooks(std::move(hooks));
  REQUIRE(scene.within_seconds([&] { return scene.has_started(); }, {&useless, &useful}));
  CHECK(scene.joined[2] == 1);
  CHECK(useful.member == 3);
  const std::string text = log.finish();
  CHECK(text.find("127.0.0.1:" + std::to_string(ports[0].number()) + " does not join: rank 2") != std::string::npos);
  CHECK(text.find("too few file descriptors") != std::string::npos);
  CHECK(text.find("127.0.0.1:" + std::to_string(ports[1].number()) + " does not join") == std::string::npos);
}

TEST_CASE("engine/server_joins: a server whose engine a rank has given up before joins with another engine",
          "[engine][fast]") {
  test::CapturedStderr log;
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers, /*required=*/GENERATE(false, true));
  Played served(scene.cluster, ports[0].number());
  Played other(scene.cluster, ports[1].number());
  (void)served.records();  // its first engine
  const core::EngineId before = scene.cluster.id(served.runtime);
  {
    engine::Runtime& rank = scene.cluster.at(GENERATE(0, 1));
    const core::GroupUid earlier = scene.cluster.new_uid();
    const std::string record = scene.cluster.record_of(served.runtime);
    REQUIRE(rank.meet(earlier, std::as_bytes(std::span(record))).is_ok());
    rank.part(earlier, {before});
    for (int i = 0; i < 10; ++i) scene.cluster.progress();
  }
  REQUIRE(
      scene.within_seconds([&] { return scene.has_started() || !scene.group().status.is_ok(); }, {&served, &other}));
  CHECK(served.renewed == std::set<core::EngineId>{before});
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(scene.group(rank).status.is_ok());
    const schedule::Topology& topology = scene.group(rank).plans->newest_version().topology;
    REQUIRE(topology.servers() == 2);
    CHECK(topology.server_weight(0) > 0.0);
    CHECK(topology.server_weight(1) > 0.0);
  }
  CHECK(log.finish().find("goes on without a dedicated server") == std::string::npos);
}

TEST_CASE("engine/server_joins: a server is introduced to rank 0 before it opens the group, so before its first ping",
          "[engine][fast]") {
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers);
  Played opens(scene.cluster, ports[0].number());
  Played slow(scene.cluster, ports[1].number());
  REQUIRE(scene.within_seconds([&] { return slow.finds > 0; }, {&slow}));
  REQUIRE(scene.within_seconds([&] { return opens.opens > 0; }, {&opens}));
  CHECK(scene.introduced.contains(scene.cluster.id(opens.runtime)));
  CHECK(slow.opens == 0);
}

TEST_CASE("engine/server_joins: where another job has had the engine replaced meanwhile, the server is asked again",
          "[engine][fast]") {
  test::CapturedStderr log;
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers, /*required=*/true);
  Played replaced(scene.cluster, ports[0].number());
  Played other(scene.cluster, ports[1].number());
  replaced.refuses = core::Status(core::Code::kAborted, "another job had its engine replaced");
  REQUIRE(scene.within_seconds([&] { return replaced.opens == 1; }, {&replaced, &other}));
  replaced.refuses = core::Status::ok();
  replaced.runtime = -1;
  REQUIRE(
      scene.within_seconds([&] { return scene.has_started() || !scene.group().status.is_ok(); }, {&replaced, &other}));
  CHECK(scene.joined[1] == 2);
  CHECK(other.renewed.empty());
  CHECK(log.finish().find("goes on without a dedicated server") == std::string::npos);
}

TEST_CASE("engine/server_joins: a group that ends for want of a required server is closed where it was opened",
          "[engine][fast]") {
  const HeldPort ports[2];
  Scene scene({{"127.0.0.1", ports[0].number()}, {"127.0.0.1", ports[1].number()}},
              ServerJoins::GroupStart::kAwaitsServers, /*required=*/true);
  Played refuses(scene.cluster, ports[0].number());
  Played opens(scene.cluster, ports[1].number());
  refuses.refuses = core::Status(core::Code::kOutOfResources, "its memory is enough for 2 ranks");
  REQUIRE(scene.within_seconds([&] { return !opens.closed.empty(); }, {&refuses, &opens}));
  CHECK_FALSE(scene.group().status.is_ok());
  CHECK(opens.opens == 1);
}

TEST_CASE("engine/server_joins: a required server that is missing at the start ends the group for all",
          "[engine][fast]") {
  const HeldPort nobody;
  Scene scene({{"127.0.0.1", nobody.number()}}, ServerJoins::GroupStart::kAwaitsServers, /*required=*/true);
  REQUIRE(scene.within_seconds(
      [&] {
        return !scene.group(0).status.is_ok() && !scene.group(1).status.is_ok() && !scene.group(2).status.is_ok();
      },
      {}));
  CHECK(std::string(scene.group(1).status.message()).find("HYBRIDPS_SERVERS_REQUIRED is on") != std::string::npos);
  CHECK(scene.starts.empty());
}
