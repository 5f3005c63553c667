// Rank 0 asks for servers that its group lacks, at doors that are played here.
#include "hybridps/engine/late_servers.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "tests/support/captured_stderr.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/unit/bootstrap/sample.h"

namespace {

using namespace hybridps;
using bootstrap::Bytes;
using engine::ServerRequest;
using test::Cluster;

/// A door behind which runtimes of the cluster serve, made when they are asked for. What touches the cluster is done in the
/// test's thread, by serve().
struct Played {
  Played(Cluster& c, int port = 0, const std::string& token = "secret") : cluster(c) {
    door = door::Door::open({"127.0.0.1", port}, token, [this](const Bytes& body) -> core::Result<Bytes> {
             ServerRequest request = engine::decode_request(body).value();
             std::unique_lock lock(mutex);
             asked = std::move(request);
             changed.wait(lock, [this] { return answer.has_value(); });
             const core::Result<Bytes> said = *answer;
             answer.reset();
             return said;
           }).value();
  }
  void serve() {
    const std::lock_guard lock(mutex);
    if (!asked) return;
    switch (asked->kind) {
      case ServerRequest::RequestKind::kFind: ++finds; answer = records(); break;
      case ServerRequest::RequestKind::kRenew:
        for (const core::EngineId engine : asked->engines) renewed.insert(engine);
        runtime = -1;
        answer = records();
        break;
      case ServerRequest::RequestKind::kOpen:
        CHECK(asked->roster->servers.size() == 1);
        ++opens;
        if (!refuses.is_ok()) {
          answer = refuses;
          break;
        }
        member = asked->roster->size() + static_cast<int>(asked->late->before);
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
  core::Status refuses;
  std::set<core::EngineId> closed;
  std::set<core::EngineId> renewed;
  std::mutex mutex;
  std::condition_variable changed;
  std::optional<ServerRequest> asked;
  std::optional<core::Result<Bytes>> answer;
  std::unique_ptr<door::Door> door;
};

struct Scene {
  explicit Scene(std::vector<door::Address> addresses) {
    uid = cluster.open_group();
    roster = bootstrap::testing::sample_roster(3);
    roster.uid = uid;
    roster.node_of = {0, 1, 2};
    roster.servers.clear();
    late = std::make_unique<engine::LateServers>(
        engine::LateServersOptions{std::move(addresses), "secret", std::chrono::milliseconds(2)}, roster, group());
    group().info.weights_with = [this](const std::vector<bool>& are_there) { return late->weights_with(are_there); };
  }
  worker::GroupState& group(int rank = 0) { return *cluster.at(rank).worker().find(uid); }
  /// Real time: doors have threads.
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
  std::unique_ptr<engine::LateServers> late;
};

int free_port() {
  const auto door = door::Door::open({"127.0.0.1", 0}, "", [](const Bytes&) { return Bytes(); });
  return door.value()->port();
}

}  // namespace

TEST_CASE("engine/late_servers: one that comes late joins; lost and alive, its server is asked for another engine",
          "[engine][fast]") {
  const int port = free_port();
  Scene scene({{"127.0.0.1", port}});
  for (int i = 0; i < 100; ++i) {
    scene.late->tick(core::Clock::now());
    scene.cluster.progress();
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
  CHECK(scene.group().info.engines.size() == 3);
  Played played(scene.cluster, port);
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

TEST_CASE("engine/late_servers: another token is complained of once, however often it is asked", "[engine][fast]") {
  test::CapturedStderr log;
  {
    const int port = free_port();
    Scene scene({{"127.0.0.1", port}});
    Played played(scene.cluster, port, "another token");
    const auto& refused = played.door->stats().refused;
    REQUIRE(scene.within_seconds([&] { return refused.load() >= 3; }, {&played}));
    CHECK(scene.group().info.engines.size() == 3);
  }
  const std::string text = log.finish();
  const auto first = text.find("goes on without a dedicated server");
  REQUIRE(first != std::string::npos);
  CHECK(text.find("goes on without a dedicated server", first + 1) == std::string::npos);
}

TEST_CASE("engine/late_servers: one that refuses is asked again; where it is not known whether it has opened, it takes another engine",
          "[engine][fast]") {
  const int port = free_port();
  Scene scene({{"127.0.0.1", port}});
  Played played(scene.cluster, port);
  played.refuses = core::Status(core::Code::kOutOfResources, "its memory is enough for 2 ranks");
  REQUIRE(scene.within_seconds([&] { return played.opens == 2; }, {&played}));
  CHECK(played.closed.empty());
  CHECK(played.renewed.empty());
  const core::EngineId first = scene.cluster.id(played.runtime);
  played.refuses = core::Status(core::Code::kTimeout, "the server is too busy to answer");
  REQUIRE(scene.within_seconds([&] { return played.opens == 3; }, {&played}));
  played.refuses = core::Status::ok();
  REQUIRE(scene.within_seconds([&] { return scene.group(2).info.engines.size() == 4; }, {&played}));
  CHECK(played.closed == std::set<core::EngineId>{first});
  CHECK(played.renewed == std::set<core::EngineId>{first});
}
