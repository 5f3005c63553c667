#include "hybridps/worker/census.h"

#include <set>
#include <string>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using worker::Census;
using worker::RankWord;

schedule::Topology topology_of(int nodes, int each, int rank) {
  std::vector<int> node_of;
  for (int i = 0; i < nodes * each; ++i) node_of.push_back(i / each);
  return {node_of, rank};
}

RankWord word(std::uint64_t submitted, std::uint64_t finished) {
  RankWord made;
  made.is_known = true;
  made.submitted = submitted;
  made.finished = finished;
  return made;
}

const core::TimePoint kNow = core::TimePoint(std::chrono::seconds(100));

}  // namespace

TEST_CASE("worker/census: in a small group every rank asks every other", "[worker][fast]") {
  for (const int each : {1, 8}) {
    const Census census(topology_of(16 / each + 1, each, 3));
    CHECK_FALSE(census.is_partial());
    CHECK(census.asked().size() == static_cast<std::size_t>(16 + each - 1));
    CHECK(census.askers().empty());
  }
}

TEST_CASE("worker/census: questions connect all ranks, with few for each", "[worker][fast]") {
  struct Case {
    int nodes;
    int each;
    std::size_t asked_max;
  };
  for (const Case& c : {Case{18, 1, 5}, Case{64, 8, 6 + 7}, Case{1000, 2, 10 + 1}, Case{3, 100, 2 + 99}}) {
    CAPTURE(c.nodes, c.each);
    std::set<int> reached = {0};
    std::vector<int> open = {0};
    while (!open.empty()) {
      const int rank = open.back();
      open.pop_back();
      const Census census(topology_of(c.nodes, c.each, rank));
      REQUIRE(census.is_partial());
      CHECK(census.asked().size() <= c.asked_max);
      for (const int next : census.asked())
        if (reached.insert(next).second) open.push_back(next);
      if (reached.size() > 300) break;  // of 2,000
    }
    CHECK(reached.size() >= std::min<std::size_t>(300, static_cast<std::size_t>(c.nodes * c.each)));
  }
}

TEST_CASE("worker/census: what a rank tells is what another learns", "[worker][fast]") {
  Census teller(topology_of(32, 1, 0));
  teller.begin(7, kNow);
  std::vector<RankWord> words(32);
  for (int rank = 0; rank < 32; ++rank)
    if (rank != 9) words[static_cast<std::size_t>(rank)] = word(rank == 20 ? 7 : 8, 7);
  const std::string told = teller.told(words, 4096);
  CHECK(told.size() < 200);  // ranks that have done the same are told together

  Census learner(topology_of(32, 1, 3));
  std::vector<RankWord> learned(32);
  REQUIRE(learner.learn(told, learned, kNow));
  CHECK(learner.must_tell(kNow));
  for (int rank = 0; rank < 32; ++rank) {
    const RankWord& one = learned[static_cast<std::size_t>(rank)];
    CHECK(one.is_known == (rank != 9 && rank != 3));  // of itself it knows better
    if (one.is_known) CHECK(one.submitted == (rank == 20 ? 7U : 8U));
  }
  learner.on_told(kNow);
  REQUIRE(learner.learn(told, learned, kNow));
  CHECK_FALSE(learner.must_tell(kNow + std::chrono::seconds(1)));  // nothing new

  // Neither is what goes beyond the question: a job that works would have news without end.
  for (RankWord& one : words) one = word(100, 90);
  REQUIRE(learner.learn(teller.told(words, 4096), learned, kNow));
  CHECK(learner.must_tell(kNow + std::chrono::seconds(1)));  // of ranks 9 and 20
  learner.on_told(kNow);
  for (RankWord& one : words) one = word(200, 190);
  REQUIRE(learner.learn(teller.told(words, 4096), learned, kNow));
  CHECK_FALSE(learner.must_tell(kNow + std::chrono::seconds(1)));
  CHECK(learned[9].submitted == 200);
  // An old word takes nothing back.
  REQUIRE(learner.learn(told, learned, kNow));
  CHECK(learned[9].submitted == 200);
}

TEST_CASE("worker/census: with little room all is told in turns", "[worker][fast]") {
  Census teller(topology_of(40, 1, 0));
  teller.begin(1, kNow);
  std::vector<RankWord> words(40);
  for (std::size_t rank = 0; rank < 40; ++rank) words[rank] = word(rank + 1, rank);
  Census learner(topology_of(40, 1, 39));
  std::vector<RankWord> learned(40);
  for (int turn = 0; turn < 5; ++turn) {
    const std::string told = teller.told(words, 16 + 24 * 10);
    CHECK(told.size() <= 16 + 24 * 10);
    REQUIRE(learner.learn(told, learned, kNow));
  }
  for (std::size_t rank = 0; rank < 39; ++rank) CHECK(learned[rank].submitted == rank + 1);
}

TEST_CASE("worker/census: what is not of its form changes nothing", "[worker][fast]") {
  Census teller(topology_of(20, 1, 0));
  const std::string whole = teller.told({20, word(5, 5)}, 4096);
  Census learner(topology_of(20, 1, 1));
  std::vector<RankWord> learned(20);
  for (std::size_t bytes = 0; bytes < whole.size(); ++bytes)
    if (bytes != 16) CHECK_FALSE(learner.learn(whole.substr(0, bytes), learned, kNow));
  CHECK_FALSE(learner.learn(teller.told({21, word(5, 5)}, 4096), learned, kNow));  // of a larger group
  std::string wrong = whole;
  for (std::size_t i = 16; i < 24; ++i) wrong[i] = '\xff';  // first and count of a row
  CHECK_FALSE(learner.learn(wrong, learned, kNow));
  for (const RankWord& one : learned) CHECK_FALSE(one.is_known);
  CHECK_FALSE(learner.must_tell(kNow));
}
