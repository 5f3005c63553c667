#include "hybridps/engine/evidence.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/transport/endpoint.h"
#include "tests/support/catch.h"

using namespace hybridps;
using core::EngineId;
using core::TimePoint;
using engine::Evidence;
using std::chrono::milliseconds;
using std::chrono::seconds;
using Connection = Evidence::Connection;

namespace {

constexpr EngineId kA{1};
constexpr EngineId kB{2};
const TimePoint kStart = TimePoint{} + seconds(1000);

/// Looks whenever it is due, until `end`; answers go through `answers`.
struct Watch {
  Evidence::PeerFacts facts;
  Evidence evidence{{seconds(1), seconds(5), seconds(2)}, [this](EngineId) { return facts; }};
  TimePoint now = kStart;
  std::vector<std::pair<EngineId, TimePoint>> silent;
  std::vector<std::pair<EngineId, TimePoint>> lost;
  std::string text;  // of the last verdict
  std::vector<EngineId> answers;
  std::size_t pings = 0;

  void until(TimePoint end) {
    for (;;) {
      const auto found = evidence.look(now);
      for (const EngineId peer : found.to_ping) {
        ++pings;
        evidence.on_asked(peer, now);
        if (std::find(answers.begin(), answers.end(), peer) != answers.end()) evidence.on_heard(peer);
      }
      for (const auto& verdict : found.verdicts) {
        (verdict.silent ? silent : lost).emplace_back(verdict.peer, now);
        text = verdict.cause.message();
        evidence.on_heard(verdict.peer);
      }
      if (evidence.next_due() > end) break;
      now = std::max(now, evidence.next_due());
    }
    now = end;
  }
  void lose(EngineId peer, Connection connection, std::string_view why = "reset") {
    evidence.on_lost(peer, connection, core::Status(core::Code::kPeerDead, std::string(why)));
  }
};

}  // namespace

TEST_CASE("engine/evidence: who answers is not silent, and is asked twice an interval", "[engine][fast]") {
  Watch watch;
  watch.evidence.watch({kA}, {});
  watch.answers = {kA};
  watch.until(kStart + seconds(60));
  CHECK(watch.silent.empty());
  CHECK(watch.pings == 120);
  CHECK(watch.evidence.own_fault(watch.now).empty());
}

TEST_CASE("engine/evidence: silence is counted from the first question on", "[engine][fast]") {
  Watch watch;
  watch.evidence.watch({kA}, {});
  watch.answers = {kA};
  watch.until(kStart + seconds(3));
  watch.answers.clear();
  watch.evidence.on_asked(kB, watch.now + milliseconds(100));  // a probe: nobody watches it
  watch.evidence.on_asked(kB, watch.now + milliseconds(400));
  watch.until(kStart + seconds(12));
  REQUIRE(watch.silent.size() == 2);
  CHECK(watch.silent[0] == std::pair(kB, kStart + milliseconds(8100)));
  CHECK(watch.silent[1] == std::pair(kA, kStart + milliseconds(8500)));
  CHECK(watch.text == "it sent no heartbeat for 5.0 s (stopped, or cut off from the network)");
}

TEST_CASE("engine/evidence: a peer without which its groups go on is given up sooner", "[engine][fast]") {
  Watch watch;
  watch.evidence.watch({kA, kB}, {kB});
  watch.until(kStart + seconds(6));
  REQUIRE(watch.silent.size() == 3);
  CHECK(watch.silent[0] == std::pair(kB, kStart + milliseconds(2500)));
  CHECK(watch.silent[1].first == kB);  // given up, and asked again: this test watches it still
  CHECK(watch.silent[2] == std::pair(kA, kStart + milliseconds(5500)));
}

TEST_CASE("engine/evidence: a peer that descriptors keep from answering is not silent", "[engine][fast]") {
  Watch watch;
  watch.evidence.watch({kA}, {});
  watch.facts.lacks_descriptors = true;
  watch.until(kStart + seconds(30));
  CHECK(watch.silent.empty());
  watch.facts.lacks_descriptors = false;
  watch.until(kStart + seconds(33));
  CHECK(watch.silent.size() == 1);
}

TEST_CASE("engine/evidence: a process that stood still blames nobody for it, and knows it", "[engine][fast]") {
  Watch watch;
  watch.evidence.watch({kA}, {});
  watch.answers = {kA};
  watch.until(kStart + seconds(3));
  watch.evidence.on_asked(kB, watch.now);
  watch.now += seconds(20);
  watch.until(watch.now + milliseconds(100));
  CHECK(watch.silent.empty());
  CHECK(watch.evidence.own_fault(watch.now).find("stood still for 20") != std::string::npos);
  watch.until(watch.now + seconds(6));
  CHECK(watch.silent.size() == 1);  // who has not answered since
  CHECK(watch.evidence.own_fault(watch.now).empty());
}

TEST_CASE("engine/evidence: a lost connection waits a moment before it is a verdict", "[engine][fast]") {
  Watch watch;
  watch.until(kStart);
  watch.lose(kA, Connection::kData);
  CHECK(watch.evidence.has_reports());
  watch.until(kStart + milliseconds(20));
  CHECK_FALSE(watch.evidence.has_reports());
  watch.lose(kB, Connection::kData);
  watch.until(kStart + milliseconds(49));
  CHECK(watch.lost.empty());
  watch.until(kStart + seconds(9));
  // The first look after the loss begins the 50 ms.
  CHECK(watch.lost == std::vector{std::pair(kA, kStart + milliseconds(50)), std::pair(kB, kStart + milliseconds(70))});
  CHECK(watch.text == "reset");
}

// docs/failures.md, "A connection is not a process".
TEST_CASE("engine/evidence: the table of evidence", "[engine][fast]") {
  const std::string_view ended = transport::kEndedWithoutClosing;
  struct Row {
    const char* what;
    Connection connection;
    std::string_view why;
    Evidence::PeerFacts facts;
    bool gives_up;
  };
  const Row rows[] = {
      {"data is lost", Connection::kData, "reset", {}, true},
      {"data is lost, and its process has ended", Connection::kData, ended, {}, true},
      {"control is lost, and data does not serve", Connection::kControl, "cannot be reached", {}, true},
      {"control is lost, and data serves",
       Connection::kControl,
       "cannot be reached",
       {.data_serves_control = true},
       false},
      {"control's process has ended", Connection::kControl, ended, {.data_serves_control = true}, true},
      {"memory of this node", Connection::kMemory, ended, {.is_local = true}, true},
      {"memory that was not proven", Connection::kMemory, ended, {}, false},
  };
  for (const Row& row : rows) {
    INFO(row.what);
    Watch watch;
    watch.facts = row.facts;
    watch.until(kStart);
    watch.lose(kA, row.connection, row.why);
    watch.until(kStart + seconds(60));
    CHECK(watch.lost.size() == (row.gives_up ? 1U : 0U));
    CHECK(watch.silent.empty());
  }
}
