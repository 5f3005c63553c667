// Questions for the job's status, and their answers, in groups too large for one engine to ask all.
#include "hybridps/engine/status_relay.h"

#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"

namespace {

using namespace hybridps;
using engine::StatusRelay;

/// Each engine answers with its number in the cluster.
struct Scene {
  static test::ClusterOptions options(int nodes) {
    test::ClusterOptions o;
    for (int rank = 0; rank < 3 * nodes; ++rank) o.node_of.push_back(rank / 3);
    o.servers = {1.0, 1.0};
    o.control = true;
    return o;
  }
  explicit Scene(int nodes) : cluster(options(nodes)) {
    uid = cluster.open_group();
    for (int of = 0; of < cluster.runtimes(); ++of) {
      relays.push_back(std::make_unique<StatusRelay>(cluster.at(of), cluster.id(of)));
      engine::Runtime::RuntimeHooks hooks;
      hooks.status_asked = [this, of, relay = relays.back().get()](const wire::Message& message) {
        ++asked[of];
        if (!relay->on_asked(message)) return;
        const auto& ask = *message.as<wire::StatusAsk>();
        relay->send_answer(message, {ask.number, ask.sent_ns, 0, 0, 1, ask.asker, cluster.id(of)}, std::to_string(of));
      };
      hooks.status_answered = [this, of, relay = relays.back().get()](const wire::Message& message,
                                                                      std::span<const std::byte> part) {
        const std::string text(reinterpret_cast<const char*>(part.data()), part.size());
        if (relay->on_answered(message, text))
          answers[of][message.as<wire::StatusAnswer>()->author] = text;
        else
          ++passed_on[of];
      };
      cluster.at(of).set_hooks(std::move(hooks));
    }
  }
  StatusRelay& relay(int of) { return *relays[static_cast<std::size_t>(of)]; }
  std::vector<core::EngineId> silent(int asker) {
    std::vector<core::EngineId> engines;
    for (int of = 0; of < cluster.runtimes(); ++of)
      if (of != asker && answers[asker].count(cluster.id(of)) == 0) engines.push_back(cluster.id(of));
    return engines;
  }
  void settle() {
    for (int i = 0; i < 200; ++i) cluster.progress();
  }

  test::Cluster cluster;
  core::GroupUid uid;
  std::vector<std::unique_ptr<StatusRelay>> relays;
  std::map<int, int> asked;
  std::map<int, int> passed_on;
  std::map<int, std::map<core::EngineId, std::string>> answers;  // by the asker
};

}  // namespace

TEST_CASE("engine/status_relay: in a large group each engine is asked once, along the tree, whoever asks",
          "[engine][fast]") {
  Scene scene(40);
  const int asker = GENERATE(0, 4, 3 * 39, 3 * 20 + 1);
  scene.relay(asker).ask(1, 0, scene.silent(asker));
  scene.settle();
  CHECK(scene.silent(asker).empty());
  for (int of = 0; of < scene.cluster.runtimes(); ++of) {
    if (of == asker) continue;
    CHECK(scene.answers[asker][scene.cluster.id(of)] == std::to_string(of));
    CHECK(scene.asked[of] == 1);
  }
  CHECK(scene.asked[asker] == 0);
  CHECK(scene.cluster.control_connections(asker) <= 16 + 3);
  // The next question has a number of its own.
  scene.relay(asker).ask(2, 0, scene.silent(-1));
  scene.settle();
  CHECK(scene.asked[asker == 0 ? 1 : 0] == 2);
}

TEST_CASE("engine/status_relay: engines behind a stopped one are found in further waves", "[engine][fast]") {
  Scene scene(40);
  const int asker = 5;
  const int stopped = GENERATE(0, 3, 6);  // the root, the asker's own leader, another leader
  scene.cluster.stop(stopped);
  scene.relay(asker).ask(1, 0, scene.silent(asker));
  scene.settle();
  CHECK(scene.silent(asker).size() > 1);
  std::set<core::EngineId> picked;
  for (std::uint64_t wave = 1; wave < 4; ++wave) {
    scene.relay(asker).ask_again(1, wave, StatusRelay::pick(scene.silent(asker), picked));
    scene.settle();
  }
  CHECK(scene.silent(asker) == std::vector<core::EngineId>{scene.cluster.id(stopped)});
  // No answer goes round in a circle.
  const auto passed_on = scene.passed_on;
  scene.settle();
  CHECK(scene.passed_on == passed_on);
}

TEST_CASE("engine/status_relay: a small job is asked directly", "[engine][fast]") {
  Scene scene(8);
  scene.relay(7).ask(1, 0, scene.silent(7));
  scene.settle();
  CHECK(scene.silent(7).empty());
  CHECK(scene.passed_on.empty());
}

TEST_CASE("engine/status_relay: nobody gets an answer in another one's name", "[engine][fast]") {
  Scene scene(2);
  engine::Runtime& liar = scene.cluster.at(0);
  const auto ask = [&](core::GroupUid uid, core::EngineId asker) {
    wire::Message message{{}, 0, wire::StatusAsk{1, 0, asker}};
    message.from.uid = uid;
    liar.send_control(scene.cluster.id(1), message, {});
    scene.settle();
  };
  ask({}, scene.cluster.id(2));         // asks for another engine, and for itself
  ask(scene.uid, core::EngineId{999});  // for one that is not in the group
  ask({99, 99}, scene.cluster.id(2));   // in a group that is not there
  ask(scene.uid, scene.cluster.id(1));  // in the name of the one that is asked
  ask(scene.uid, core::EngineId{});     // in the name of engines that a server does not know
  CHECK(scene.asked[1] == 5);
  CHECK(scene.answers[0].empty());
  CHECK(scene.answers[1].empty());
  CHECK(scene.answers[2].empty());
  ask({99, 99}, scene.cluster.id(0));
  CHECK(scene.answers[0].size() == 1);
  // Nor does anybody take an answer in another one's name, without a group that has both.
  wire::Message answer{{}, 0, wire::StatusAnswer{1, 0, 0, 0, 1, scene.cluster.id(1), scene.cluster.id(2)}};
  liar.send_control(scene.cluster.id(1), answer, {});
  scene.settle();
  CHECK(scene.answers[1].empty());
}

TEST_CASE("engine/status_relay: a question that comes twice goes on once, and leaves no circle", "[engine][fast]") {
  Scene scene(40);
  const int asker = 0;
  // A rank and its leader, both at once, before the question comes along the tree.
  scene.relay(asker).ask_again(1, 1, {scene.cluster.id(3), scene.cluster.id(4), scene.cluster.id(60)});
  scene.relay(asker).ask(1, 2, scene.silent(asker));
  scene.settle();
  CHECK(scene.silent(asker).empty());
  const auto passed_on = scene.passed_on;
  scene.settle();
  CHECK(scene.passed_on == passed_on);
}
