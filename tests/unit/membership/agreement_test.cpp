#include "hybridps/membership/agreement.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <limits>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "hybridps/membership/server_life.h"
#include "hybridps/membership/version.h"
#include "tests/support/catch.h"

// A group whose shares change, whose servers come, leave and die, on a network that holds messages back, changes their
// order and brings them twice: histories by seed, without threads, sockets or a runtime.
namespace {

using namespace hybridps;
using membership::Agreement;
using membership::Cause;
using membership::Change;
using membership::ServerLife;
using membership::Versions;

struct Letter {
  int from;
  wire::Body body;
  std::vector<double> weights;
};

class Group;

/// One rank of the group: its operations are numbers, which it binds in order.
class Rank final : Agreement::AgreementHost {
 public:
  Rank(Group& group, int rank, const schedule::Topology& topology)
      : group_(group), rank_(rank), topology_(topology), versions_(topology), agreement_(*this, topology) {}

  void submit() {
    const std::uint64_t sequence = submitted_++;
    if (agreement_.is_frozen())
      postponed_.insert(sequence);
    else
      bind(sequence);
  }
  void on_letter(const Letter& letter) {
    if (const auto* ask = std::get_if<wire::PlanAsk>(&letter.body)) agreement_.on_ask(*ask, letter.weights);
    if (const auto* answer = std::get_if<wire::PlanAnswer>(&letter.body)) agreement_.on_answer(letter.from, *answer);
    if (const auto* change = std::get_if<wire::PlanSwitch>(&letter.body)) agreement_.on_switch(*change);
  }

  Agreement& agreement() { return agreement_; }
  const Versions& versions() const { return versions_; }
  std::uint64_t submitted() const { return submitted_; }
  bool has_postponed() const { return !postponed_.empty(); }
  const std::map<std::uint64_t, std::pair<std::uint32_t, std::vector<double>>>& bound() const { return bound_; }
  std::vector<double> wanted_weights;  // rank 0: of Cause::kShares
  schedule::Turns turns;               // rank 0: of Cause::kTrial

 private:
  void bind(std::uint64_t sequence) {
    const membership::Version& version = versions_.of(sequence);
    const bool is_new = bound_.emplace(sequence, std::pair(version.number, version.topology.weights())).second;
    if (agreement_.is_frozen() || !is_new) FAIL("an operation is bound twice, or while a change is under way");
  }
  void start_postponed() {
    for (const std::set<std::uint64_t> postponed = std::exchange(postponed_, {});
         const std::uint64_t sequence : postponed)
      bind(sequence);
  }

  std::optional<Change> draft(Cause cause) override;
  bool is_awaited(int member) const override;
  bool can_do(const Change& change) const override;
  std::uint64_t first_unbound() const override { return submitted_; }
  void send_down(const wire::Body& body, const std::vector<double>& weights) override;
  void send_up(const wire::PlanAnswer& answer) override;
  void ask_server(int server, const wire::PlanAsk& ask) override;
  void on_switch(const Change& change, std::uint64_t first) override;
  void on_refused(const Change& change) override;

  Group& group_;
  const int rank_;
  schedule::Topology topology_;
  Versions versions_;
  Agreement agreement_;
  std::uint64_t submitted_ = 0;
  std::set<std::uint64_t> postponed_;
  std::map<std::uint64_t, std::pair<std::uint32_t, std::vector<double>>> bound_;
};

class Group {
 public:
  Group(std::uint64_t seed, int ranks, int servers)
      : life(ranks, servers),
        random_(seed),
        ranks_(ranks),
        servers_(servers),
        dead_(static_cast<std::size_t>(servers), false) {
    std::vector<int> nodes(static_cast<std::size_t>(ranks));
    std::iota(nodes.begin(), nodes.end(), 0);
    if (ranks > membership::Tree::kArity)  // two ranks a node, and nodes below nodes
      for (int& node : nodes) node /= 2;
    nodes_ = nodes.back() + 1;
    for (int rank = 0; rank < ranks; ++rank) {
      const schedule::Topology topology(nodes, rank, std::vector<double>(static_cast<std::size_t>(nodes_), 1.0),
                                        std::vector<double>(static_cast<std::size_t>(servers), 1.0));
      members_.push_back(std::make_unique<Rank>(*this, rank, topology));
    }
  }

  /// A history of so many steps, and then what is left to be said until all is quiet.
  void live(int steps) {
    for (int step = 0; step < steps; ++step) {
      const std::uint64_t what = random_() % 100;
      if (what < 55) {
        deliver_one();
      } else if (what < 85) {
        submit_some();
      } else if (what < 89) {
        first().wanted_weights = first().versions().newest().topology.weights();
        first().wanted_weights[random_() % first().wanted_weights.size()] += 1.0;
        first().agreement().want(Cause::kShares);
      } else if (what < 93) {
        first().turns.a.pace_chunks = static_cast<std::uint16_t>(1 + random_() % 9);
        first().turns.pairs = static_cast<std::uint16_t>(random_() % 3);
        first().agreement().want(Cause::kTrial);
      } else if (what < 95) {
        if (joining_ == 0) {
          ++joining_;
          first().agreement().want(Cause::kJoin);
        }
      } else if (what < 98 && servers_ > 0) {
        leave_or_die(ranks_ + static_cast<int>(random_() % static_cast<std::uint64_t>(servers_)));
      } else {
        first().agreement().tick(core::TimePoint::max());  // a delay has passed
      }
      look();
    }
    refuses_ = false;
    while (deliver_one() || tick()) look();
    submit_some();
    for (auto& member : members_) CHECK_FALSE(member->agreement().is_frozen());
  }

  /// What must hold once nothing is under way.
  void check_quiet() const {
    const std::uint32_t number = members_.front()->versions().newest().number;
    const schedule::Topology& newest = members_.front()->versions().newest().topology;
    for (const auto& member : members_) {
      REQUIRE_FALSE(member->agreement().is_frozen());
      REQUIRE_FALSE(member->has_postponed());
      REQUIRE(member->versions().newest().number == number);
      REQUIRE(member->bound().size() == member->submitted());
    }
    REQUIRE(members_.front()->agreement().is_idle());
    for (int server = 0; server < newest.servers(); ++server)
      if (life.is_out(ranks_ + server)) REQUIRE(newest.server_weight(server) == 0.0);
  }
  std::uint32_t newest() const { return members_.front()->agreement().newest(); }
  std::uint64_t refused = 0;
  std::uint64_t left_out = 0;
  std::uint64_t joined = 0;

  // --- for its ranks
  int size() const { return ranks_; }
  int servers() const { return servers_; }
  int joining() const { return joining_; }
  bool is_dead(int member) const {
    const int server = member - ranks_;
    return server >= 0 && server < servers_ && dead_[static_cast<std::size_t>(server)];
  }
  bool refuses(std::uint32_t version, int rank) const {
    return refuses_ && (version * 7 + static_cast<std::uint32_t>(rank)) % 13 == 0;
  }
  void on_joined() {
    if (joining_ == 0) return;
    joining_ = 0;
    ++joined;
    ++servers_;
    dead_.push_back(false);
    life.expect(1);
    life.admit();
  }
  void on_join_refused() { joining_ = 0; }
  void post(int from, int to, wire::Body body, std::vector<double> weights) {
    std::deque<Letter>& letters = letters_[{from, to}];
    letters.push_back({from, std::move(body), std::move(weights)});
    if (random_() % 16 == 0) letters.push_back(letters.back());  // twice
    if (letters.size() > 1 && random_() % 16 == 0) std::swap(letters.back(), letters[letters.size() - 2]);
  }
  ServerLife life;  // as rank 0 knows it

 private:
  Rank& first() { return *members_.front(); }
  void submit_some() { members_[random_() % members_.size()]->submit(); }
  /// A delay passes, where a change waits for that.
  bool tick() {
    if (first().agreement().is_frozen() || first().agreement().is_idle()) return false;
    first().agreement().tick(core::TimePoint::max());
    return true;
  }
  void leave_or_die(int member) {
    const bool dies = random_() % 2 == 0;
    if (dies) dead_[static_cast<std::size_t>(member - ranks_)] = true;
    if (!life.advance(member, dies ? ServerLife::LifePhase::kGone : ServerLife::LifePhase::kLeaving)) return;
    ++left_out;
    first().agreement().want(Cause::kLeave);
  }
  bool deliver_one() {
    if (letters_.empty()) return false;
    auto at = letters_.begin();
    std::advance(at, static_cast<std::ptrdiff_t>(random_() % letters_.size()));
    const auto [from, to] = at->first;
    const Letter letter = std::move(at->second.front());
    at->second.pop_front();
    if (at->second.empty()) letters_.erase(at);
    if (to < ranks_) {
      members_[static_cast<std::size_t>(to)]->on_letter(letter);
    } else if (const auto* ask = std::get_if<wire::PlanAsk>(&letter.body); ask != nullptr && !is_dead(to)) {
      post(to, 0, wire::PlanAnswer{ask->version, 0}, {});  // as a dedicated server does
    }
    return true;
  }
  /// All ranks bind an operation to the same version, with the same shares.
  void look() {
    for (const auto& member : members_)
      for (auto at = member->bound().rbegin(); at != member->bound().rend() && at->first >= seen_; ++at) {
        const auto [found, is_new] = bound_.try_emplace(at->first, at->second);
        if (!is_new && found->second != at->second) FAIL("operation " << at->first << " is bound to two versions");
      }
    seen_ = std::numeric_limits<std::uint64_t>::max();
    for (const auto& member : members_) seen_ = std::min<std::uint64_t>(seen_, member->bound().size());
  }

  std::mt19937_64 random_;
  const int ranks_;
  int nodes_ = 0;
  int servers_;
  std::vector<bool> dead_;
  int joining_ = 0;
  bool refuses_ = true;
  std::vector<std::unique_ptr<Rank>> members_;
  std::map<std::pair<int, int>, std::deque<Letter>> letters_;
  std::map<std::uint64_t, std::pair<std::uint32_t, std::vector<double>>> bound_;
  std::uint64_t seen_ = 0;  // operations below are bound on all ranks, and compared
};

std::optional<Change> Rank::draft(Cause cause) {
  const membership::Version& now = versions_.newest();
  Change change{0, {now.tuning, now.tuning}, now.topology.weights()};
  const int nodes = now.topology.nodes();
  const auto leave_out = [&] {
    for (int server = 0; server < now.topology.servers(); ++server)
      if (group_.life.is_out(group_.size() + server)) change.weights[static_cast<std::size_t>(nodes + server)] = 0.0;
  };
  if (cause == Cause::kShares) {
    if (wanted_weights.size() != change.weights.size()) return std::nullopt;
    change.weights = wanted_weights;
  }
  if (cause == Cause::kTrial) change.turns = turns;
  const std::vector<double> before = change.weights;
  if (cause != Cause::kTrial) leave_out();
  if (cause == Cause::kLeave && before == change.weights) return std::nullopt;
  if (cause == Cause::kJoin) {
    if (group_.joining() == 0) return std::nullopt;
    change.weights.push_back(1.0);
  }
  change.servers_asked = static_cast<int>(change.weights.size()) - nodes;
  return change;
}

bool Rank::is_awaited(int member) const { return !group_.life.is_gone(member); }

bool Rank::can_do(const Change& change) const {
  const auto members = static_cast<std::size_t>(topology_.nodes() + topology_.servers());
  return !group_.refuses(change.version, rank_) && change.weights.size() >= members &&
         change.weights.size() <= members + 1;
}

void Rank::send_down(const wire::Body& body, const std::vector<double>& weights) {
  for (const int child : agreement_.tree().children()) group_.post(rank_, child, body, weights);
}

void Rank::send_up(const wire::PlanAnswer& answer) { group_.post(rank_, agreement_.tree().parent(), answer, {}); }

void Rank::ask_server(int server, const wire::PlanAsk& ask) { group_.post(rank_, server, ask, {}); }

void Rank::on_switch(const Change& change, std::uint64_t first) {
  const bool joins = change.weights.size() > topology_.weights().size();
  topology_ = topology_.with_weights(change.weights);
  if (joins && rank_ == 0) group_.on_joined();
  const std::uint64_t oldest = postponed_.empty() ? submitted_ : *postponed_.begin();
  const std::uint32_t shares = versions_.newest().shares;
  versions_.add(first, {change.version, shares, topology_, change.turns.a}, change.turns, oldest);
  start_postponed();
}

void Rank::on_refused(const Change& change) {
  ++group_.refused;
  if (rank_ == 0 && static_cast<int>(change.weights.size()) > topology_.nodes() + topology_.servers())
    group_.on_join_refused();
  start_postponed();
}

void live(std::uint64_t histories) {
  std::uint64_t versions = 0;
  std::uint64_t refused = 0;
  std::uint64_t left_out = 0;
  std::uint64_t joined = 0;
  for (std::uint64_t seed = 1; seed <= histories; ++seed) {
    INFO("seed " << seed);
    const bool is_large = seed % 64 == 0;
    Group group(seed, (is_large ? 40 : 1) + static_cast<int>(seed / 64 % 4), static_cast<int>(seed / 4 % 4));
    group.live((60 + static_cast<int>(seed % 100)) * (is_large ? 20 : 1));
    group.check_quiet();
    versions += group.newest();
    refused += group.refused;
    left_out += group.left_out;
    joined += group.joined;
  }
  CHECK(versions > histories);
  CHECK(refused > histories / 100);
  CHECK(left_out > histories / 10);
  CHECK(joined > histories / 10);
}

}  // namespace

TEST_CASE("membership/agreement: all members bind each operation to the same version, in 2,000 histories",
          "[membership][fast]") {
  live(2'000);
}

TEST_CASE("membership/agreement: the same in 100,000 histories", "[.long]") { live(100'000); }

TEST_CASE("membership/agreement: nonsense is refused, and what nobody has asked is not answered",
          "[membership][fast]") {
  struct Host final : Agreement::AgreementHost {
    std::optional<Change> draft(Cause) override { return std::nullopt; }
    bool is_awaited(int) const override { return true; }
    bool can_do(const Change&) const override { return true; }
    std::uint64_t first_unbound() const override { return 7; }
    void send_down(const wire::Body&, const std::vector<double>&) override {}
    void send_up(const wire::PlanAnswer& answer) override { sent.push_back(answer); }
    void ask_server(int, const wire::PlanAsk&) override {}
    void on_switch(const Change&, std::uint64_t) override { ++switched; }
    void on_refused(const Change&) override { ++refused; }
    std::vector<wire::PlanAnswer> sent;
    int switched = 0;
    int refused = 0;
  } host;
  Agreement agreement(host, schedule::Topology({0, 1, 2}, 1));
  agreement.on_ask({1, {}}, {});  // without weights
  agreement.on_ask({1, {}}, {1.0, -1.0, 1.0});
  agreement.on_ask({1, {}}, {1.0, std::numeric_limits<double>::quiet_NaN(), 1.0});
  agreement.on_ask({1, {}}, {0.0, 0.0, 0.0});
  agreement.on_ask({1, {}}, {1.0, 1.0, 1.0});  // that number is taken
  REQUIRE(host.sent.size() == 5);
  for (const wire::PlanAnswer& answer : host.sent) CHECK(answer.first == wire::kRefused);
  agreement.on_switch({1, 9});
  CHECK(host.switched == 0);
  CHECK_FALSE(agreement.is_frozen());

  agreement.on_ask({2, {}}, {1.0, 2.0, 1.0});
  REQUIRE(agreement.is_frozen());
  CHECK(host.sent.back() == wire::PlanAnswer{2, 7});
  agreement.on_switch({1, 9});
  agreement.on_switch({2, 6});  // below what this rank has bound
  CHECK(agreement.is_frozen());
  agreement.on_switch({2, 9});
  CHECK_FALSE(agreement.is_frozen());
  CHECK(host.switched == 1);
  CHECK(agreement.newest() == 2);
}
