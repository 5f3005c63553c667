// Who is missing in a group of many nodes, and how many messages and connections it takes to find out.
#include <algorithm>
#include <bit>
#include <chrono>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;
using test::MovableClock;

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

/// Of all of operation 1. It has connections for data to all nodes.
constexpr int kOwner = 1;

/// An all-reduce on all ranks but the missing ones. Time passes only while nothing is under way.
struct Waiting {
  Waiting(int nodes, int each, std::vector<int> who) : cluster(options_of(nodes, each)), missing(std::move(who)) {
    uid = cluster.open_group();
    outcomes.resize(index(cluster.size()));
  }
  ~Waiting() {
    for (int rank = 0; rank < cluster.size(); ++rank)
      if (cluster.is_alive(rank)) cluster.at(rank).close_group(uid);
  }
  static ClusterOptions options_of(int nodes, int each) {
    ClusterOptions options;
    for (int rank = 0; rank < nodes * each; ++rank) options.node_of.push_back(rank / each);
    options.control = true;
    options.heartbeat_seconds = options.dead_seconds = 1e6;
    options.warn_seconds = 0;
    return options;
  }
  bool is_missing(int rank) const { return std::find(missing.begin(), missing.end(), rank) != missing.end(); }
  void submit(int rank, std::uint64_t sequence, std::chrono::milliseconds timeout, std::size_t elements) {
    worker::Operation o;
    o.kind = schedule::Kind::kAllReduce;
    o.dtype = core::DType::kInt32;
    o.op = core::ReduceOp::kSum;
    o.timeout = timeout;
    data[index(rank)].assign(elements, 1);
    o.output = {worker::Piece{reinterpret_cast<std::byte*>(data[index(rank)].data()), 4 * elements}};
    outcomes[index(rank)].reset();
    cluster.submit(uid, rank, o, sequence,
                   [this, rank](const worker::Outcome& outcome) { outcomes[index(rank)] = outcome.status; });
  }
  void pass(std::chrono::milliseconds time) {
    constexpr auto kStep = std::chrono::milliseconds(10);
    for (auto passed = std::chrono::milliseconds(0); passed < time; passed += kStep) {
      clock.pass(kStep);
      cluster.run_until([] { return false; }, /*idle_rounds_max=*/8);
    }
  }

  MovableClock clock;
  Cluster cluster;
  std::vector<int> missing;
  core::GroupUid uid;
  std::vector<std::vector<std::int32_t>> data = std::vector<std::vector<std::int32_t>>(index(cluster.size()));
  std::vector<std::optional<core::Status>> outcomes;
};

}  // namespace

TEST_CASE("cluster/census: every rank of many nodes names who is missing, and asks few", "[cluster][slow]") {
  struct Case {
    int nodes;
    int each;
    std::vector<int> missing;
    bool stopped;
    int full = -1;  // a rank without a free buffer: it can tell nothing but its own word
  };
  const std::vector<Case> cases = {{32, 4, {77}, false},
                                   {32, 4, {5, 6, 77}, true},
                                   {48, 1, {47}, false},
                                   {48, 1, {47}, false, 20},
                                   {33, 2, {0, 1, 2, 3}, true}};
  for (const Case& c : cases) {
    Waiting job(c.nodes, c.each, c.missing);
    const int size = c.nodes * c.each;
    CAPTURE(c.nodes, c.each, c.stopped, c.full);
    for (int rank = 0; rank < size; ++rank) job.submit(rank, 0, {}, 1);
    REQUIRE(job.cluster.run_until([&] {
      return std::all_of(job.outcomes.begin(), job.outcomes.end(), [](const auto& one) { return one.has_value(); });
    }));
    job.pass(std::chrono::milliseconds(300));  // to open what heartbeats need
    std::vector<transport::Buffer> taken;
    while (c.full >= 0)
      if (taken.push_back(job.cluster.at(c.full).pool().allocate(1)); !taken.back()) break;
    for (int rank = 0; rank < size; ++rank)
      if (!job.is_missing(rank))
        job.submit(rank, 1, std::chrono::milliseconds(2000), 1);
      else if (c.stopped)
        job.cluster.stop(rank);
    job.pass(std::chrono::milliseconds(200));
    std::vector<std::uint64_t> sent;
    std::vector<std::uint64_t> connections;
    for (int rank = 0; rank < size; ++rank) {
      sent.push_back(job.cluster.messages_sent(rank));
      connections.push_back(job.cluster.control_connections(rank));
    }
    job.pass(std::chrono::milliseconds(800));
    const int steps = std::bit_width(static_cast<unsigned>(c.nodes - 1));
    for (int rank = 0; rank < size; ++rank) {
      CAPTURE(rank);
      CHECK(job.cluster.messages_sent(rank) - sent[index(rank)] <= (rank == kOwner ? 80U : 56U));
      if (rank != kOwner)
        CHECK(job.cluster.control_connections(rank) - connections[index(rank)] <= 2 * static_cast<unsigned>(steps));
    }
    job.pass(std::chrono::milliseconds(1200));
    for (int rank = 0; rank < size; ++rank) {
      if (job.is_missing(rank)) continue;
      REQUIRE(job.outcomes[index(rank)].has_value());
      const std::string text(job.outcomes[index(rank)]->message());
      INFO(text);
      const std::string first =
          "rank " + std::to_string(c.missing.front()) + " (host" + std::to_string(c.missing.front()) + ") was last ";
      CHECK(text.find("missing " + core::format_ranks(c.missing) + ": ") != std::string::npos);
      if (!c.stopped)
        CHECK(text.find(first + "seen finishing seq 0, allreduce sum of int32[1], 4 bytes") != std::string::npos);
    }
  }
}

TEST_CASE("cluster/census: a verdict reaches all ranks of many nodes, and each rank tells few", "[cluster][slow]") {
  enum class Why { kTimeout, kMismatch, kDeath };
  struct Case {
    int nodes;
    int each;
    Why why;
    std::vector<int> stopped;  // ranks that pass nothing on
  };
  const std::vector<Case> cases = {{32, 4, Why::kTimeout, {}},  {32, 4, Why::kMismatch, {}},
                                   {32, 4, Why::kDeath, {}},    {48, 1, Why::kTimeout, {1, 2, 4, 8}},
                                   {48, 1, Why::kMismatch, {}}, {33, 2, Why::kDeath, {1, 3, 4, 12, 20}}};
  constexpr int kFinder = 9;
  for (const Case& c : cases) {
    Waiting job(c.nodes, c.each, c.stopped);
    const int size = c.nodes * c.each;
    CAPTURE(c.nodes, c.each, static_cast<int>(c.why));
    for (int rank = 0; rank < size; ++rank) job.submit(rank, 0, {}, 1);
    REQUIRE(job.cluster.run_until([&] {
      return std::all_of(job.outcomes.begin(), job.outcomes.end(), [](const auto& one) { return one.has_value(); });
    }));
    const int dead = size - 2;
    for (const int rank : c.stopped) job.cluster.stop(rank);
    for (int rank = 0; rank < size; ++rank)
      if (!job.is_missing(rank) && rank != dead) job.submit(rank, 1, {}, 1);
    job.pass(std::chrono::milliseconds(100));
    std::vector<std::uint64_t> sent;
    std::vector<std::uint64_t> connections;
    for (int rank = 0; rank < size; ++rank) {
      sent.push_back(job.cluster.messages_sent(rank));
      connections.push_back(job.cluster.control_connections(rank));
    }
    worker::Worker& finder = job.cluster.at(kFinder).worker();
    worker::GroupState& group = *finder.find(job.uid);
    if (c.why == Why::kTimeout)
      finder.submit_failed(group, {}, 2, core::Status(core::Code::kTimeout, "timed out"));
    else if (c.why == Why::kMismatch)
      finder.fail_group(group, core::Status(core::Code::kMismatch, "ranks disagree"), /*tell=*/true);
    else
      job.cluster.kill(dead);
    if (c.why == Why::kDeath)
      finder.on_peer_dead(job.cluster.id(dead), core::Status(core::Code::kPeerDead, "it closed its connection"));
    job.pass(std::chrono::milliseconds(30));
    const auto steps = static_cast<std::uint64_t>(std::bit_width(static_cast<unsigned>(c.nodes - 1)));
    for (int rank = 0; rank < size; ++rank) {
      if (job.is_missing(rank) || (rank == dead && c.why == Why::kDeath)) continue;
      CAPTURE(rank);
      const worker::GroupState* at = job.cluster.at(rank).worker().find(job.uid);
      if (c.why == Why::kTimeout) {
        CHECK(at->status.is_ok());
        CHECK((rank == kFinder || at->verdicts.count(2) == 1));
      } else {
        CHECK(at->status.code() == (c.why == Why::kMismatch ? core::Code::kMismatch : core::Code::kPeerDead));
      }
      // Its own verdict or the one passed on, and the answers to those that were first to tell. The owner also gives
      // credit back for what the nodes have contributed.
      const auto credit = rank == kOwner ? static_cast<std::uint64_t>(c.nodes) : 0;
      CHECK(job.cluster.messages_sent(rank) - sent[index(rank)] <=
            2 * (2 * steps + static_cast<unsigned>(c.each)) + credit);
      CHECK(job.cluster.control_connections(rank) - connections[index(rank)] <= 2 * steps);
    }
  }
}

TEST_CASE("cluster/census: a verdict reaches all ranks of nodes of different sizes, also past ranks that have failed",
          "[cluster][slow]") {
  for (const std::vector<int>& sizes :
       std::vector<std::vector<int>>{{6, 6, 6, 1}, {5, 5, 5, 5, 1}, {1, 6, 6, 5}, {17, 1, 3}}) {
    ClusterOptions options = Waiting::options_of(0, 0);
    for (std::size_t node = 0; node < sizes.size(); ++node)
      options.node_of.insert(options.node_of.end(), static_cast<std::size_t>(sizes[node]), static_cast<int>(node));
    MovableClock clock;
    Cluster cluster(options);
    const int size = cluster.size();
    const auto uid = cluster.open_group();
    const auto group = [&](int rank) -> worker::GroupState& { return *cluster.at(rank).worker().find(uid); };
    for (int finder = 0; finder < size; ++finder) {
      const auto sequence = static_cast<std::uint64_t>(finder) + 5;
      cluster.at(finder).worker().submit_failed(group(finder), {}, sequence,
                                                core::Status(core::Code::kTimeout, "timed out"));
      const bool is_everywhere = cluster.run_until([&] {
        for (int rank = 0; rank < size; ++rank)
          if (rank != finder && group(rank).verdicts.count(sequence) == 0) return false;
        return true;
      });
      CAPTURE(sizes.size(), finder);
      CHECK(is_everywhere);
    }
    // Ranks that have failed without a word, as in their goodbye, pass the verdict of another rank on.
    const int first = size - 1;
    for (int rank = 1; rank < first; ++rank) {
      group(rank).leaving = true;
      cluster.at(rank).worker().fail_group(group(rank), core::Status(core::Code::kPeerDead, "rank 0 is gone"),
                                           /*tell=*/false);
    }
    cluster.at(first).worker().fail_group(group(first), core::Status(core::Code::kPeerDead, "rank 0 is gone"),
                                          /*tell=*/true);
    CHECK(cluster.run_until([&] { return !group(0).status.is_ok(); }));
    for (int rank = 0; rank < size; ++rank) cluster.at(rank).close_group(uid);
  }
}

TEST_CASE("cluster/census: groups without operations cost the others nothing", "[cluster][slow]") {
  Waiting job(4, 1, {});
  std::vector<core::GroupUid> idle;
  for (int i = 0; i < 300; ++i) idle.push_back(job.cluster.open_group());
  const auto run = [&](std::uint64_t sequence) {
    for (int rank = 0; rank < job.cluster.size(); ++rank) job.submit(rank, sequence, {}, 16);
    REQUIRE(job.cluster.run_until([&] {
      return std::all_of(job.outcomes.begin(), job.outcomes.end(), [](const auto& one) { return one.has_value(); });
    }));
  };
  run(0);
  job.pass(std::chrono::milliseconds(500));
  const std::uint64_t before = job.cluster.at(0).worker().group_looks();
  constexpr std::uint64_t kOperations = 20;
  for (std::uint64_t i = 1; i <= kOperations; ++i) run(i);
  // When it is submitted, when it starts, when it ends; never because of the other groups.
  CHECK(job.cluster.at(0).worker().group_looks() - before <= 4 * kOperations);
  for (const core::GroupUid uid : idle)
    for (int rank = 0; rank < job.cluster.size(); ++rank) job.cluster.at(rank).close_group(uid);
}
