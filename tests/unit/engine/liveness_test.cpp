#include "hybridps/engine/liveness.h"

#include <algorithm>

#include "tests/support/catch.h"

using namespace hybridps;
using core::EngineId;
using core::TimePoint;
using engine::Heartbeats;
using engine::Suspects;
using std::chrono::milliseconds;
using std::chrono::seconds;

namespace {

constexpr EngineId kA{1};
constexpr EngineId kB{2};
const TimePoint kStart = TimePoint{} + seconds(1000);

/// Looks whenever it is due, until `end`; answers go through `answers`.
struct Watch {
  Heartbeats heartbeats{seconds(1), seconds(5), seconds(2)};
  TimePoint now = kStart;
  std::vector<std::pair<EngineId, core::Duration>> silent;
  std::vector<EngineId> answers;
  std::size_t pings = 0;

  void until(TimePoint end) {
    for (;;) {
      const auto found = heartbeats.look(now);
      for (const EngineId peer : found.to_ping) {
        ++pings;
        heartbeats.on_asked(peer, now);
        if (std::find(answers.begin(), answers.end(), peer) != answers.end()) heartbeats.on_heard(peer);
      }
      for (const auto& one : found.silent) {
        silent.push_back(one);
        heartbeats.on_heard(one.first);
      }
      if (heartbeats.next_due() > end) break;
      now = std::max(now, heartbeats.next_due());
    }
    now = end;
  }
};

}  // namespace

TEST_CASE("engine/liveness: who answers is not silent, and is asked twice an interval", "[engine][fast]") {
  Watch watch;
  watch.heartbeats.watch({kA}, {});
  watch.answers = {kA};
  watch.until(kStart + seconds(60));
  CHECK(watch.silent.empty());
  CHECK(watch.pings == 120);
  CHECK(watch.heartbeats.own_fault(watch.now).empty());
}

TEST_CASE("engine/liveness: silence is counted from the first question on", "[engine][fast]") {
  Watch watch;
  watch.heartbeats.watch({kA}, {});
  watch.answers = {kA};
  watch.until(kStart + seconds(3));
  watch.answers.clear();
  watch.heartbeats.on_asked(kB, watch.now + milliseconds(100));  // a probe: nobody watches it
  watch.heartbeats.on_asked(kB, watch.now + milliseconds(900));
  watch.until(kStart + seconds(30));
  REQUIRE(watch.silent.size() >= 2);
  CHECK(watch.silent[0] == std::pair<EngineId, core::Duration>(kB, seconds(5)));
  CHECK(watch.silent[1] == std::pair<EngineId, core::Duration>(kA, seconds(5)));
}

TEST_CASE("engine/liveness: a peer without which its groups go on is given up sooner", "[engine][fast]") {
  Watch watch;
  watch.heartbeats.watch({kA, kB}, {kB});
  watch.until(kStart + seconds(6));
  REQUIRE(watch.silent.size() >= 2);
  CHECK(watch.silent[0] == std::pair<EngineId, core::Duration>(kB, seconds(2)));
  const auto of_a =
      std::find_if(watch.silent.begin(), watch.silent.end(), [](const auto& one) { return one.first == kA; });
  REQUIRE(of_a != watch.silent.end());
  CHECK(of_a->second == seconds(5));
}

TEST_CASE("engine/liveness: a process that stood still blames nobody for it, and knows it", "[engine][fast]") {
  Watch watch;
  watch.heartbeats.watch({kA}, {});
  watch.answers = {kA};
  watch.until(kStart + seconds(3));
  watch.heartbeats.on_asked(kB, watch.now);
  watch.now += seconds(20);
  watch.until(watch.now + milliseconds(100));
  CHECK(watch.silent.empty());
  CHECK(watch.heartbeats.own_fault(watch.now).find("stood still for 20") != std::string::npos);
  watch.until(watch.now + seconds(6));
  CHECK(watch.silent.size() == 1);  // who has not answered since
  CHECK(watch.heartbeats.own_fault(watch.now).empty());
}

TEST_CASE("engine/liveness: a broken connection waits a moment before it is judged", "[engine][fast]") {
  Suspects suspects;
  CHECK(suspects.next_due() == TimePoint::max());
  suspects.report(kA, core::Status(core::Code::kPeerDead, "reset"));
  CHECK(suspects.has_reports());
  CHECK(suspects.judge(kStart).empty());
  CHECK_FALSE(suspects.has_reports());
  suspects.report(kB, core::Status(core::Code::kPeerDead, "reset"), /*memory=*/true);
  CHECK(suspects.judge(kStart + milliseconds(20)).empty());
  CHECK(suspects.next_due() == kStart + milliseconds(50));
  CHECK(suspects.judge(kStart + milliseconds(49)).empty());
  const auto first = suspects.judge(kStart + milliseconds(50));
  REQUIRE(first.size() == 1);
  CHECK(first[0].peer == kA);
  CHECK_FALSE(first[0].memory);
  const auto second = suspects.judge(kStart + seconds(9));
  REQUIRE(second.size() == 1);
  CHECK(second[0].memory);
  CHECK(suspects.next_due() == TimePoint::max());
}
