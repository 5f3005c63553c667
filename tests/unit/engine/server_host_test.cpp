// A dedicated server as jobs meet it: by requests at its admission server.
#include "hybridps/engine/server_host.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/admission/admission_server.h"
#include "hybridps/engine/server_request.h"
#include "tests/support/catch.h"
#include "tests/unit/bootstrap/sample.h"

namespace {

using namespace hybridps;
using engine::ServerHost;
using engine::ServerRequest;

struct Scene {
  /// The ranks are not there. As usual, the first heartbeat comes after an hour.
  explicit Scene(int jobs = 0, double dead_seconds = 1e6, int threads = 1) {
    core::Config config;
    config.interface = "lo";
    config.dead_seconds = dead_seconds;
    config.given.insert("HYBRIDPS_DEAD_SECONDS");
    engine::ServerHostOptions options;
    options.listen = {"127.0.0.1", 0};
    options.secret = "secret";
    options.memory_bytes = std::uint64_t{64} << 20;
    options.jobs = jobs;
    options.threads = threads;
    options.say = [this](const std::string& line) {
      const std::lock_guard lock(mutex);
      said.push_back(line);
    };
    auto started = ServerHost::start(std::move(options), config);
    REQUIRE(started.is_ok());
    host = std::move(started).value();
  }
  core::Status ask(const ServerRequest& request) const {
    return admission::ask({"127.0.0.1", host->port()}, "secret", engine::encode(request),
                          core::Deadline::after(std::chrono::seconds(20)))
        .status();
  }
  /// Of three ranks that are not there: nothing is sent to them in this test.
  ServerRequest open(std::uint64_t group) const {
    ServerRequest request;
    request.kind = ServerRequest::RequestKind::kOpen;
    request.group_name = "group " + std::to_string(group);
    request.roster = bootstrap::testing::sample_roster(3);
    request.roster->uid = {group, 7};
    request.roster->servers = engine::find_server({"127.0.0.1", host->port()}, "secret").value();
    request.chunks = {16384, 16384, 16384};
    return request;
  }
  static ServerRequest close(const ServerRequest& open) {
    ServerRequest request;
    request.kind = ServerRequest::RequestKind::kClose;
    request.uid = open.roster->uid;
    for (const auto& server : open.roster->servers) request.engines.push_back(server.engine);
    return request;
  }
  template <typename Condition>
  static bool wait_for(Condition condition) {
    for (int i = 0; i < 2000 && !condition(); ++i) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    return condition();
  }
  bool soon(std::uint64_t groups) const {
    return wait_for([&] { return host->stats().groups == groups; });
  }
  std::ptrdiff_t count(const std::string& what) {
    const std::lock_guard lock(mutex);
    return std::count_if(said.begin(), said.end(),
                         [&](const std::string& line) { return line.find(what) != std::string::npos; });
  }

  std::mutex mutex;
  std::vector<std::string> said;
  std::unique_ptr<ServerHost> host;
};

}  // namespace

TEST_CASE("engine/server_host: memory is charged for the ranks that push to it, one of each node", "[engine]") {
  Scene scene;  // 64 MiB: a quarter is 512 KiB each for 32
  ServerRequest wide = scene.open(1);
  const auto spread = [](ServerRequest& request, int size, int ranks_per_node) {
    auto& roster = *request.roster;
    const auto servers = roster.servers;
    const core::GroupUid uid = roster.uid;
    roster = bootstrap::testing::sample_roster(size);
    for (int rank = 0; rank < size; ++rank) roster.node_of[static_cast<std::size_t>(rank)] = rank / ranks_per_node;
    roster.servers = servers;
    roster.uid = uid;
  };
  spread(wide, 8 * 32, 8);
  CHECK(scene.ask(wide).is_ok());
  REQUIRE(scene.soon(1));
  ServerRequest same = scene.open(2);  // the same pushers: charged once
  spread(same, 8 * 32, 8);
  CHECK(scene.ask(same).is_ok());
  REQUIRE(scene.soon(2));
  REQUIRE(scene.ask(Scene::close(wide)).is_ok());
  REQUIRE(scene.ask(Scene::close(same)).is_ok());
  REQUIRE(scene.soon(0));

  ServerRequest many = scene.open(3);
  spread(many, 33, 1);
  const core::Status refused = scene.ask(many);
  CHECK(refused.code() == core::Code::kOutOfResources);
  CHECK(std::string(refused.message()).find("enough for 32 ranks that push to it") != std::string::npos);
}

TEST_CASE("engine/server_host: a group is opened once, and not any more where the job has closed it", "[engine]") {
  Scene scene;
  const ServerRequest first = scene.open(1);
  const ServerRequest second = scene.open(2);
  REQUIRE(scene.ask(first).is_ok());
  REQUIRE(scene.soon(1));
  const core::Status again = scene.ask(first);
  CHECK(again.code() == core::Code::kMismatch);
  CHECK(std::string(again.message()).find("is open there") != std::string::npos);
  CHECK(scene.host->stats().engines == 3);
  REQUIRE(scene.ask(second).is_ok());
  REQUIRE(scene.soon(2));

  REQUIRE(scene.ask(Scene::close(first)).is_ok());
  REQUIRE(scene.soon(1));
  // What was on its way when the job gave up comes too late, whenever it comes; the other group is none of its
  // business.
  CHECK(scene.ask(first).code() == core::Code::kClosed);
  CHECK(scene.ask(second).code() == core::Code::kMismatch);
  CHECK(scene.host->stats().groups == 1);
  CHECK(scene.host->stats().groups_total == 2);

  // A close before the open, which has taken longer.
  const ServerRequest third = scene.open(3);
  REQUIRE(scene.ask(Scene::close(third)).is_ok());
  CHECK(scene.ask(third).code() == core::Code::kClosed);
  CHECK(scene.host->stats().groups == 1);

  // Another engine in place of the one that a job has given up knows nothing of that; the old one serves the second
  // group.
  ServerRequest renew;
  renew.kind = ServerRequest::RequestKind::kRenew;
  renew.engines = Scene::close(first).engines;
  renew.uid = {99, 7};  // of a job without a group there
  const core::Status stranger = scene.ask(renew);
  CHECK(stranger.code() == core::Code::kInvalidArgument);
  CHECK(std::string(stranger.message()).find("the job has no group on engine") != std::string::npos);
  renew.uid = third.roster->uid;  // closed there before it was opened, beside groups of others
  CHECK(scene.ask(renew).code() == core::Code::kInvalidArgument);
  renew.uid = first.roster->uid;
  REQUIRE(scene.ask(renew).is_ok());
  const ServerRequest with_another = scene.open(1);
  CHECK(with_another.roster->servers[0].engine != first.roster->servers[0].engine);
  CHECK(scene.ask(with_another).is_ok());
  CHECK(scene.soon(2));
  REQUIRE(scene.ask(Scene::close(second)).is_ok());
  CHECK(scene.soon(1));
  // One line for each that was open and is not, though it was asked for once more.
  for (const char* closed : {"closed group 'group 1'", "closed group 'group 2'"}) {
    CHECK(Scene::wait_for([&] { return scene.count(closed) > 0; }));
    CHECK(scene.count(closed) == 1);
  }
}

TEST_CASE("engine/server_host: a later attempt to open a group takes the place of an earlier one", "[engine]") {
  Scene scene;
  ServerRequest request = scene.open(1);
  request.attempt = 2;
  request.roster->servers[0].group_rank = 1;  // of two, the other somewhere else
  request.roster->servers[0].group_size = 2;
  request.roster->servers.insert(request.roster->servers.begin(), bootstrap::testing::sample_member(0, 2, 999));
  request.roster->servers[0].group_rank = 0;
  REQUIRE(scene.ask(request).is_ok());
  ServerRequest late = request;
  late.attempt = 1;
  CHECK(scene.ask(late).code() == core::Code::kMismatch);
  ServerRequest alone = scene.open(1);
  alone.attempt = 3;
  REQUIRE(scene.ask(alone).is_ok());
  CHECK(scene.ask(request).code() == core::Code::kMismatch);
  CHECK(Scene::wait_for([&] { return scene.host->stats().groups_total == 2; }));
  CHECK(scene.soon(1));
  CHECK(scene.count("closed group") == 0);
  // One that fails leaves nothing of the earlier ones.
  ServerRequest wide = scene.open(1);
  wide.attempt = 4;
  const auto servers = wide.roster->servers;
  wide.roster = bootstrap::testing::sample_roster(33);
  for (int rank = 0; rank < 33; ++rank) wide.roster->node_of[static_cast<std::size_t>(rank)] = rank;
  wide.roster->uid = alone.roster->uid;
  wide.roster->servers = servers;
  CHECK(scene.ask(wide).code() == core::Code::kOutOfResources);
  CHECK(scene.soon(0));
  CHECK(Scene::wait_for([&] { return scene.count("closed group 'group 1'") == 1; }));
}

TEST_CASE("engine/server_host: a group whose chunks fit no slot is refused", "[engine]") {
  Scene scene;
  ServerRequest request = scene.open(1);
  const auto& server = request.roster->servers.front();
  const auto room = static_cast<std::uint32_t>(std::max(server.chunk_bytes, server.chunk_bytes_max));
  request.chunks.usual = room + 1;
  const core::Status refused = scene.ask(request);
  CHECK(refused.code() == core::Code::kInvalidArgument);
  INFO(refused.message());
  CHECK(std::string(refused.message()).find("those of the group may have " + std::to_string(room + 1)) !=
        std::string::npos);
  // What plans may choose, and the coded chunks of a group without a codec, are of no account until they are used.
  request.chunks = {room, std::uint64_t{room} + 1, room + 1};
  CHECK(scene.ask(request).is_ok());
  CHECK(scene.soon(1));
  ServerRequest coded = scene.open(2);
  for (auto& member : coded.roster->members) member.compress = "fp16";
  coded.chunks.coded = std::uint64_t{room} + 1;
  CHECK(scene.ask(coded).code() == core::Code::kInvalidArgument);
  coded.chunks.coded = room;
  CHECK(scene.ask(coded).is_ok());
}

TEST_CASE("engine/server_host: what it refuses it says, and a draining one takes nothing new", "[engine]") {
  Scene scene;
  const ServerRequest first = scene.open(1);
  REQUIRE(scene.ask(first).is_ok());
  REQUIRE(scene.soon(1));
  const ServerRequest second = scene.open(2);
  scene.host->drain();
  CHECK(scene.ask(second).code() == core::Code::kClosed);
  const auto found = engine::find_server({"127.0.0.1", scene.host->port()}, "secret");
  CHECK(found.status().code() == core::Code::kClosed);
  CHECK(admission::ask({"127.0.0.1", scene.host->port()}, "another", engine::encode(second),
                       core::Deadline::after(std::chrono::seconds(20)))
            .status()
            .code() != core::Code::kOk);
  CHECK(Scene::wait_for([&] { return scene.host->stats().admission_refused == 1; }));
  CHECK(scene.host->stats().groups == 1);
  CHECK(scene.count("opened group 'group 1' of 3 ranks") == 1);
}

TEST_CASE("engine/server_host: a job has its part of the memory, and what it does leaves the parts of others",
          "[engine]") {
  Scene scene(2);  // 64 MiB: half a quarter is 512 KiB each for 16
  const auto of_job = [&](std::uint64_t group, std::uint64_t job, int nodes) {
    ServerRequest request = scene.open(group);
    auto& roster = *request.roster;
    const auto servers = roster.servers;
    const core::GroupUid uid = roster.uid;
    roster = bootstrap::testing::sample_roster(nodes);
    for (int rank = 0; rank < nodes; ++rank) {
      roster.node_of[static_cast<std::size_t>(rank)] = rank;
      roster.members[static_cast<std::size_t>(rank)].engine.value += 100000 * job;
    }
    roster.servers = servers;
    roster.uid = uid;
    return request;
  };
  const auto text_of = [](const core::Status& status) { return std::string(status.message()); };
  const ServerRequest too_wide = of_job(1, 1, 17);
  CHECK(text_of(scene.ask(too_wide)).find("a job's part of its memory is enough for 16 ranks") != std::string::npos);
  const ServerRequest first = of_job(1, 1, 16);
  REQUIRE(scene.ask(first).is_ok());
  CHECK(scene.ask(of_job(2, 1, 17)).code() == core::Code::kOutOfResources);  // one more node, of the same job
  REQUIRE(scene.ask(of_job(3, 2, 16)).is_ok());
  CHECK(text_of(scene.ask(of_job(4, 3, 3))).find("it serves 2 jobs, as many as it may (--jobs)") != std::string::npos);
  REQUIRE(scene.ask(Scene::close(first)).is_ok());
  REQUIRE(scene.soon(1));
  REQUIRE(scene.ask(of_job(5, 3, 3)).is_ok());

  // Groups have memory, too, in each job's own part.
  core::Status refused;
  std::uint64_t opened = 1;
  for (; opened < 2000 && refused.is_ok(); ++opened) refused = scene.ask(of_job(10000 + opened, 3, 3));
  CHECK(refused.code() == core::Code::kOutOfResources);
  INFO(refused.message());
  CHECK(text_of(refused).find("a job's groups and operations may take 16777216 bytes of its memory") !=
        std::string::npos);
  CHECK(opened > 100);
  CHECK(scene.ask(of_job(300, 2, 3)).is_ok());
}

TEST_CASE("engine/server_host: a job renews what it has given up, but not while it keeps too many engines",
          "[engine]") {
  Scene scene;
  core::Status refused;
  std::uint64_t renewed = 0;
  for (; renewed < 8 && refused.is_ok(); ++renewed) {
    REQUIRE(scene.ask(scene.open(100 + renewed)).is_ok());  // the group for whose sake the engine stays
    const ServerRequest given_up = scene.open(200 + renewed);
    REQUIRE(scene.ask(given_up).is_ok());
    ServerRequest renew = Scene::close(given_up);
    REQUIRE(scene.ask(renew).is_ok());
    renew.kind = ServerRequest::RequestKind::kRenew;
    refused = scene.ask(renew);
  }
  CHECK(renewed == 5);
  CHECK(refused.code() == core::Code::kOutOfResources);
  CHECK(std::string(refused.message()).find("the job has given up 4 engines") != std::string::npos);
  // Another job gets another engine all the same.
  ServerRequest other = scene.open(300);
  for (auto& member : other.roster->members) member.engine.value += 100000;
  REQUIRE(scene.ask(other).is_ok());
  ServerRequest renew = Scene::close(other);
  renew.kind = ServerRequest::RequestKind::kRenew;
  CHECK(scene.ask(renew).is_ok());
}

TEST_CASE("engine/server_host: engines that have given up a rank make place for others if a group has that rank",
          "[engine]") {
  constexpr std::size_t kThreads = 10;
  Scene scene(0, /*dead_seconds=*/1.0, kThreads);
  const ServerRequest first = scene.open(1);
  REQUIRE(scene.ask(first).is_ok());
  REQUIRE(
      Scene::wait_for([&] { return scene.host->stats().groups_total == kThreads && scene.host->stats().groups == 0; }));
  const ServerRequest second = scene.open(2);
  CHECK(Scene::close(second).engines == Scene::close(first).engines);
  const core::Status refused = scene.ask(second);
  CHECK(refused.code() == core::Code::kAborted);
  CHECK(std::string(refused.message()).find("has given up") != std::string::npos);
  const ServerRequest again = scene.open(2);
  for (std::size_t shard = 0; shard < kThreads; ++shard)
    CHECK(again.roster->servers[shard].engine != first.roster->servers[shard].engine);
  CHECK(scene.ask(again).is_ok());
  CHECK(scene.count("a job needs another engine than engine") == kThreads);
}

TEST_CASE("engine/server_host: a group that names an engine which was replaced is opened on none", "[engine]") {
  Scene scene(0, 1e6, /*threads=*/2);
  const ServerRequest late = scene.open(1);
  ServerRequest other = scene.open(2);
  REQUIRE(scene.ask(other).is_ok());
  ServerRequest renew = Scene::close(other);
  REQUIRE(scene.ask(renew).is_ok());
  renew.kind = ServerRequest::RequestKind::kRenew;
  renew.engines.pop_back();
  REQUIRE(scene.ask(renew).is_ok());
  REQUIRE(scene.soon(0));
  CHECK(scene.ask(late).code() == core::Code::kAborted);
  CHECK(scene.host->stats().groups == 0);
  const ServerRequest again = scene.open(1);
  CHECK(again.roster->servers[0].engine != late.roster->servers[0].engine);
  CHECK(again.roster->servers[1].engine == late.roster->servers[1].engine);
  CHECK(scene.ask(again).is_ok());
  CHECK(scene.soon(2));
}
