// A dedicated server is killed after every prefix of what it sends: no rank notices but by the time that it takes, and
// every bit is what it would have been.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using test::Cluster;
using test::ClusterOptions;

constexpr std::int64_t kNever = std::numeric_limits<std::int64_t>::max();

struct Case {
  std::vector<int> node_of{0, 1, 2};
  std::vector<double> servers{1};
  std::vector<int> region_of{};         // by node
  std::vector<int> region_of_server{};  // with region_of
  std::uint32_t chunk_bytes = 512;
  std::vector<std::size_t> counts{1500, 700, 90};  // one operation each, all submitted at once
  core::DType dtype = core::DType::kFloat32;
  core::ReduceOp op = core::ReduceOp::kSum;
  int root = -1;         // 0 and more: a reduce
  bool in_place = true;  // of a reduce: the root's input is its output
  std::string codec{};
  std::size_t eager_bytes = 4096;
  std::uint64_t seed = 1;
  double delay = 0;
  double duplicate = 0;
  bool loses_residual = false;  // the codec keeps one at the server: bits are the same on all ranks, but others
  int late_rank = -1;           // submits only when nothing has happened for long
  std::uint64_t retained_bytes =
      worker::WorkerOptions().retained_bytes;  // 0: operations wait until all have the results
};

struct Fault {
  std::int64_t after = kNever;  // messages of the victim
  int victim = 0;               // of the servers
  int lingering = 0;            // rounds in which what it has sent still arrives
  std::int64_t second_after = kNever;
};

struct Run {
  std::vector<std::vector<std::byte>> results;  // by operation, then rank
  std::string error;
  std::int64_t sent = 0;  // by the victim
  bool was_killed = false;
};

std::vector<std::byte> values(const Case& c, int rank, std::size_t operation) {
  const std::size_t count = c.counts[operation];
  std::vector<std::byte> bytes(count * core::size_of(c.dtype));
  std::mt19937_64 random(static_cast<std::uint64_t>(rank) * 1000 + operation);
  for (std::size_t i = 0; i < count; ++i) {
    // Of very different sizes: their sum depends on the order of addition.
    const auto value = std::ldexp(static_cast<float>(random() % 2001) - 1000.0F, static_cast<int>(random() % 24) - 12);
    std::uint32_t raw;
    std::memcpy(&raw, &value, sizeof raw);
    if (c.dtype == core::DType::kBfloat16) {
      const auto half = static_cast<std::uint16_t>(raw >> 16);
      std::memcpy(bytes.data() + 2 * i, &half, sizeof half);
    } else {
      std::memcpy(bytes.data() + 4 * i, &value, sizeof value);
    }
  }
  return bytes;
}

Run run(const Case& c, const Fault& fault) {
  test::MovableClock clock;
  const auto first = std::make_shared<std::int64_t>(fault.after);
  const auto second = std::make_shared<std::int64_t>(fault.second_after);
  ClusterOptions options;
  options.node_of = c.node_of;
  options.servers = c.servers;
  options.region_of = c.region_of;
  options.region_of_server = c.region_of_server;
  options.seed = c.seed;
  options.chunk_bytes = c.chunk_bytes;
  options.eager_bytes = c.eager_bytes;
  options.retained_bytes = c.retained_bytes;
  const auto n = static_cast<int>(c.node_of.size());
  const int victim = n + fault.victim;
  const int next_victim = n + (fault.victim + 1) % static_cast<int>(c.servers.size());
  options.wrap = [&](std::unique_ptr<transport::Transport> inner, int rank) {
    test_support::Faults faults;
    faults.delay = c.delay;
    faults.duplicate = c.duplicate;
    if (rank == victim) faults.may_send = first;
    if (rank == next_victim && next_victim != victim) faults.may_send = second;
    return std::make_unique<test_support::FaultyTransport>(std::move(inner), faults,
                                                           c.seed * 100 + static_cast<std::uint64_t>(rank));
  };
  if (!c.codec.empty()) {
    const auto spec = compress::parse_spec(c.codec);
    REQUIRE(spec.is_ok());
    for (std::size_t member = 0; member < c.node_of.size() + c.servers.size(); ++member)
      options.codecs.push_back(std::make_shared<compress::Codecs>(spec.value()));
  }
  Run result;
  const std::size_t operations = c.counts.size();
  result.results.resize(operations * static_cast<std::size_t>(n));
  std::vector<std::vector<std::byte>> in(result.results.size());
  std::vector<std::vector<std::byte>> out(result.results.size());
  int done = 0;
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  const auto submit = [&](int rank) {
    for (std::size_t operation = 0; operation < operations; ++operation) {
      const std::size_t at = operation * static_cast<std::size_t>(n) + static_cast<std::size_t>(rank);
      in[at] = values(c, rank, operation);
      worker::Operation o;
      o.kind = c.root < 0 ? Kind::kAllReduce : Kind::kReduce;
      o.dtype = c.dtype;
      o.op = c.op;
      if (c.op == core::ReduceOp::kPremulSum) o.premul = 0.5 + rank;
      o.root = c.root;
      if (!c.codec.empty() && c.root < 0) o.coding = wire::Coding::kFull;
      if (!c.codec.empty()) o.tensor = static_cast<compress::TensorKey>(operation + 1);
      const worker::Piece piece{in[at].data(), in[at].size()};
      worker::Piece to = piece;
      if (c.root < 0) {
        o.output = {piece};
      } else {
        o.input = {piece};
        if (rank == c.root && !c.in_place) {
          out[at].resize(in[at].size());
          to = {out[at].data(), out[at].size()};
        }
        if (rank == c.root) o.output = {to};
      }
      const bool has_result = c.root < 0 || rank == c.root;
      cluster.submit(uid, rank, o, operation, [&, at, to, has_result](const worker::Outcome& outcome) {
        ++done;
        if (!outcome.status.is_ok() && result.error.empty()) result.error = outcome.status.to_string();
        if (has_result) result.results[at].assign(to.data, to.data + to.bytes);
        // At once, as an optimizer may.
        std::fill(in[at].begin(), in[at].end(), std::byte{0xFF});
        std::fill(out[at].begin(), out[at].end(), std::byte{0xFF});
      });
    }
  };
  for (int rank = 0; rank < n; ++rank)
    if (rank != c.late_rank) submit(rank);
  int lingering = fault.lingering;
  bool late = c.late_rank >= 0;
  const int expected = n * static_cast<int>(operations);
  const auto strike = [&] {
    if (*first <= 0 && cluster.is_alive(victim)) {
      result.was_killed = true;
      cluster.stop(victim);
      if (lingering-- <= 0) cluster.kill(victim);
    }
    if (*second <= 0 && cluster.is_alive(next_victim)) cluster.kill(next_victim);
  };
  for (int round = 0; round < 100000 && done < expected; ++round) {
    cluster.progress();
    clock.pass(std::chrono::microseconds(100));
    if (late && round == 600) {
      late = false;
      submit(c.late_rank);
    }
    strike();
  }
  if (done < expected && result.error.empty())
    result.error = "stuck, " + std::to_string(done) + " of " + std::to_string(expected);
  result.sent = fault.after - *first;
  // All memory comes back.
  for (int round = 0; round < 2000 && result.error.empty(); ++round) {
    std::size_t slots = 0;
    std::size_t spans = 0;
    for (int member = 0; member < cluster.runtimes(); ++member) {
      if (!cluster.is_alive(member)) continue;
      slots += cluster.at(member).pool().slots_in_use();
      if (member >= n)
        spans += cluster.at(member).dedicated().spans_open();
      else
        spans += cluster.at(member).worker().find(uid)->retained.size();
    }
    if (slots + spans == 0) return result;
    strike();
    cluster.progress();
    clock.pass(std::chrono::microseconds(100));
  }
  if (result.error.empty()) result.error = "memory that does not come back";
  return result;
}

/// After every message, or `count` times after a random one.
void kill_everywhere(Case c, int count = 0) {
  c.retained_bytes = GENERATE(worker::WorkerOptions().retained_bytes, 1000, 0);
  const Run undisturbed = run(c, {});
  REQUIRE(undisturbed.error == "");
  REQUIRE(undisturbed.sent > 0);
  std::mt19937_64 random(c.seed);
  const int runs = count > 0 ? count : static_cast<int>(undisturbed.sent) + 1;
  for (int i = 0; i < runs; ++i) {
    Case these = c;
    Fault fault;
    if (c.servers.size() > 1 && i % 2 == 1)
      fault.second_after = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(undisturbed.sent));
    fault.after = count > 0 ? static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(undisturbed.sent)) : i;
    fault.victim = 0;
    fault.lingering = static_cast<int>(random() % 3) * 10;
    if (count > 0) these.seed = random() % 100000;
    INFO("nodes " << c.node_of.size() << " op " << static_cast<int>(c.op) << " root " << c.root << " codec " << c.codec
                  << " retained " << c.retained_bytes << " seed " << these.seed << " killed after " << fault.after
                  << " of " << undisturbed.sent << ", lingering " << fault.lingering);
    const Run after_loss = run(these, fault);
    REQUIRE(after_loss.error == "");
    REQUIRE((after_loss.was_killed || fault.after >= undisturbed.sent));
    if (!c.loses_residual) REQUIRE(after_loss.results == undisturbed.results);
    // What each rank has is what all have, whatever it is.
    const std::size_t n = c.node_of.size();
    for (std::size_t at = 0; c.root < 0 && at < after_loss.results.size(); ++at)
      REQUIRE(after_loss.results[at] == after_loss.results[at / n * n]);
  }
}

}  // namespace

TEST_CASE("cluster/failover: a server killed after any message changes no bit", "[cluster][failover]") {
  SECTION("one rank a node") { kill_everywhere({}); }
  SECTION("average") { kill_everywhere({.op = core::ReduceOp::kAvg}); }
  SECTION("factors") { kill_everywhere({.op = core::ReduceOp::kPremulSum}); }
  SECTION("bf16") { kill_everywhere({.dtype = core::DType::kBfloat16}); }
  SECTION("two ranks a node") { kill_everywhere({.node_of = {0, 0, 1, 1, 2, 2}}); }
  SECTION("unlike nodes, average") { kill_everywhere({.node_of = {0, 0, 1, 2}, .op = core::ReduceOp::kAvg}); }
  SECTION("all is the server's, nothing unasked") {
    kill_everywhere({.node_of = {0, 0, 1, 2}, .servers = {1000}, .eager_bytes = 0});
  }
  SECTION("a reduce") { kill_everywhere({.root = 1}); }
  SECTION("a reduce into other memory, two ranks a node") {
    kill_everywhere({.node_of = {0, 0, 1, 1, 2, 2}, .root = 3, .in_place = false});
  }
  SECTION("compressed") { kill_everywhere({.codec = "bf16"}); }
  SECTION("compressed, two ranks a node, average") {
    kill_everywhere({.node_of = {0, 0, 1, 1, 2}, .op = core::ReduceOp::kAvg, .codec = "int8"});
  }
  SECTION("compressed with what is left out remembered") {
    // A chunk has room for a block of topk, 1024 elements.
    kill_everywhere({.node_of = {0, 0, 1, 2},
                     .chunk_bytes = 4096,
                     .counts = {6500, 700, 90},
                     .codec = "topk:k=0.1",
                     .loses_residual = true});
  }
  SECTION("two servers, of which the second may die too") { kill_everywhere({.servers = {1, 1}}); }
  SECTION("a rank that comes late") { kill_everywhere({.node_of = {0, 0, 1, 2}, .late_rank = 3}); }
  // A sum of 64 KiB or less is made in each region, without servers.
  SECTION("regions, the server in one of them") {
    kill_everywhere({.node_of = {0, 1, 2, 3},
                     .servers = {8},
                     .region_of = {0, 0, 1, 1},
                     .region_of_server = {0},
                     .chunk_bytes = 8192,
                     .counts = {17000, 90}});
  }
  SECTION("regions, the server in none of them, two ranks a node, average") {
    kill_everywhere({.node_of = {0, 0, 1, 1, 2, 2, 3, 3},
                     .servers = {8},
                     .region_of = {1, 0, 0, 1},
                     .region_of_server = {schedule::kNoRegion},
                     .chunk_bytes = 8192,
                     .counts = {17000},
                     .op = core::ReduceOp::kAvg});
  }
  SECTION("regions of one and of three nodes, bf16, nothing unasked") {
    kill_everywhere({.node_of = {0, 1, 2, 2, 3},
                     .servers = {8},
                     .region_of = {0, 1, 1, 1},
                     .region_of_server = {1},
                     .chunk_bytes = 8192,
                     .counts = {34000},
                     .dtype = core::DType::kBfloat16,
                     .eager_bytes = 0});
  }
  SECTION("regions, a reduce into other memory") {
    kill_everywhere(
        {.node_of = {0, 0, 1, 2, 3}, .region_of = {0, 0, 1, 1}, .region_of_server = {1}, .root = 3, .in_place = false});
  }
  SECTION("three regions, two servers, of which the second may die too") {
    kill_everywhere({.node_of = {0, 1, 2, 3, 4},
                     .servers = {4, 4},
                     .region_of = {0, 0, 1, 1, 2},
                     .region_of_server = {0, 2},
                     .chunk_bytes = 8192,
                     .counts = {9000, 10000}});
  }
  SECTION("delayed and doubled") { kill_everywhere({.node_of = {0, 0, 1, 2}, .delay = 0.3, .duplicate = 0.05}); }
}

namespace {

void kill_at_random(int cases, std::uint64_t seed) {
  std::mt19937_64 random(seed);
  const auto one_of = [&random](auto list) {
    return *(list.begin() + static_cast<std::ptrdiff_t>(random() % list.size()));
  };
  using Nodes = std::vector<int>;
  for (int i = 0; i < cases; ++i) {
    Case c;
    c.node_of = one_of(
        std::initializer_list<Nodes>{{0, 1, 2}, {0, 1, 2, 3}, {0, 0, 1, 1, 2, 2}, {0, 0, 0, 1, 2}, {0, 1, 1, 2}});
    c.servers.assign(1 + random() % 3, one_of(std::initializer_list<double>{0.5, 1, 100}));
    const int nodes = *std::max_element(c.node_of.begin(), c.node_of.end()) + 1;
    if (random() % 2 == 0) {
      for (int node = 0; node < nodes; ++node) c.region_of.push_back(node < 2 ? node : static_cast<int>(random() % 2));
      for (std::size_t server = 0; server < c.servers.size(); ++server)
        c.region_of_server.push_back(static_cast<int>(random() % 3) - 1);
    }
    c.counts.clear();
    for (std::size_t operation = 1 + random() % 4; operation > 0; --operation) c.counts.push_back(1 + random() % 6000);
    if (!c.region_of.empty()) {  // small sums are made in each region, without servers
      c.counts = {16500 + random() % 6000};
      c.chunk_bytes = 4096;
    }
    c.dtype = one_of(std::initializer_list<core::DType>{core::DType::kFloat32, core::DType::kBfloat16});
    c.op = one_of(
        std::initializer_list<core::ReduceOp>{core::ReduceOp::kSum, core::ReduceOp::kAvg, core::ReduceOp::kPremulSum});
    if (random() % 4 == 0) c.root = static_cast<int>(random() % c.node_of.size());
    c.in_place = random() % 2 == 0;
    if (c.root < 0 && c.op != core::ReduceOp::kPremulSum && random() % 4 == 0) c.codec = "bf16";
    c.eager_bytes = one_of(std::initializer_list<std::size_t>{0, 1024, 4096});
    c.seed = random() % 100000;
    c.retained_bytes = one_of(std::initializer_list<std::uint64_t>{0, 2000, std::uint64_t{256} << 10});
    c.delay = one_of(std::initializer_list<double>{0, 0.2});
    c.duplicate = one_of(std::initializer_list<double>{0, 0.03});
    if (random() % 5 == 0) c.late_rank = static_cast<int>(random() % c.node_of.size());
    INFO("case " << i << " of seed " << seed);
    const Run undisturbed = run(c, {});
    REQUIRE(undisturbed.error == "");
    if (undisturbed.sent == 0) continue;
    for (int turn = 0; turn < 4; ++turn) {
      Fault fault;
      fault.after = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(undisturbed.sent));
      fault.lingering = static_cast<int>(random() % 3) * 10;
      if (c.servers.size() > 1 && random() % 2 == 0)
        fault.second_after = static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(undisturbed.sent));
      INFO("killed after " << fault.after << " of " << undisturbed.sent << ", the second after " << fault.second_after);
      const Run after_loss = run(c, fault);
      REQUIRE(after_loss.error == "");
      REQUIRE(after_loss.results == undisturbed.results);
    }
  }
}

}  // namespace

TEST_CASE("cluster/failover: random jobs, killed at random", "[cluster][failover]") { kill_at_random(60, 1); }

// scripts/test --long: 100,000 kills.
TEST_CASE("cluster/failover: very many random jobs, killed at random", "[.long]") { kill_at_random(25000, 2); }
