// Dedicated servers in an in-process cluster: what they sum is what ranks would have summed, bit for bit.
#include <cmath>
#include <cstring>
#include <set>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;

struct Layout {
  std::vector<int> node_of;
  std::vector<double> servers;
};

const std::vector<Layout> kLayouts = {
    {{0, 1, 2}, {1}},          {{0, 1, 2, 3}, {1, 1}},      {{0, 1}, {3}},
    {{0, 0, 1, 1, 2}, {2, 1}}, {{0, 1, 2}, {1, 0, 0.5, 4}}, {{0, 0, 0, 1, 2}, {1, 1, 1}},
};

std::string name(const Layout& layout) {
  std::string text;
  for (const int node : layout.node_of) text += std::to_string(node);
  return text + " + " + std::to_string(layout.servers.size());
}

ClusterOptions options_of(const Layout& layout) {
  ClusterOptions options;
  options.node_of = layout.node_of;
  options.servers = layout.servers;
  return options;
}

template <typename T>
worker::Piece piece(std::vector<T>& values) {
  return worker::Piece{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

struct Tally {
  int done = 0;
  int failed = 0;
  std::string first_error;
  std::vector<std::string> errors;
  worker::Completion completion() {
    return [this](const worker::Outcome& outcome) {
      ++done;
      if (outcome.status.is_ok()) return;
      ++failed;
      errors.push_back(outcome.status.to_string());
      if (first_error.empty()) first_error = errors.back();
    };
  }
};

worker::Operation reduction(schedule::Kind kind, core::DType dtype, core::ReduceOp op = core::ReduceOp::kSum) {
  worker::Operation o;
  o.kind = kind;
  o.dtype = dtype;
  o.op = op;
  return o;
}

// Floats of very different sizes: their sum depends on the order of addition.
std::vector<float> floats(int rank, std::size_t count) {
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i)
    v[i] = std::ldexp(static_cast<float>((rank + 1) * 37 + static_cast<int>(i % 101)),
                      static_cast<int>((i * 7 + static_cast<std::size_t>(rank) * 13) % 40) - 20);
  return v;
}

/// One allreduce (root < 0) or reduce; the results of all ranks (of the root alone).
std::vector<std::vector<float>> reduce_once(Cluster& cluster, core::GroupUid uid, std::uint64_t sequence,
                                            std::size_t count, core::ReduceOp op, int root, Tally& tally) {
  const int n = cluster.size();
  std::vector<std::vector<float>> in;
  for (int r = 0; r < n; ++r) in.push_back(floats(r, count));
  std::vector<float> out(count, -1);
  const int before = tally.done;
  for (int r = 0; r < n; ++r) {
    auto o = reduction(root < 0 ? schedule::Kind::kAllReduce : schedule::Kind::kReduce, core::DType::kFloat32, op);
    o.premul = op == core::ReduceOp::kPremulSum ? 0.5 + r : 1.0;
    o.root = root;
    if (root < 0) {
      o.output = {piece(in[static_cast<std::size_t>(r)])};
    } else {
      o.input = {piece(in[static_cast<std::size_t>(r)])};
      if (r == root) o.output = {piece(out)};
    }
    cluster.submit(uid, r, o, sequence, tally.completion());
  }
  REQUIRE(cluster.run_until([&] { return tally.done == before + n; }));
  if (root >= 0) return {out};
  return in;
}

std::uint64_t summed(Cluster& cluster) {
  std::uint64_t bytes = 0;
  for (std::size_t d = 0;; ++d) {
    const int at = cluster.size() + static_cast<int>(d);
    if (at >= cluster.runtimes()) return bytes;
    bytes += cluster.at(at).dedicated_stats().bytes;
  }
}

}  // namespace

TEST_CASE("cluster/dedicated: the same bits as without servers, for every layout, operation and size",
          "[cluster][fast]") {
  for (const Layout& layout : kLayouts) {
    Cluster with(options_of(layout));
    Layout bare = layout;
    bare.servers.clear();
    Cluster without(options_of(bare));
    const auto uid = with.open_group();
    const auto other = without.open_group();
    std::uint64_t sequence = 0;
    for (const std::size_t count : {0, 1, 64, 65, 1000, 4099, 20011}) {
      for (const core::ReduceOp op :
           {core::ReduceOp::kSum, core::ReduceOp::kAvg, core::ReduceOp::kMax, core::ReduceOp::kPremulSum}) {
        for (const int root : {-1, 0, with.size() - 1}) {
          INFO("layout " << name(layout) << " count " << count << " op " << static_cast<int>(op) << " root " << root);
          Tally a;
          Tally b;
          const auto mine = reduce_once(with, uid, sequence, count, op, root, a);
          const auto reference = reduce_once(without, other, sequence, count, op, root, b);
          ++sequence;
          REQUIRE(a.first_error == "");
          REQUIRE(b.first_error == "");
          REQUIRE(mine.size() == reference.size());
          for (std::size_t r = 0; r < mine.size(); ++r)
            REQUIRE((count == 0 || std::memcmp(mine[r].data(), reference[r].data(), count * sizeof(float)) == 0));
        }
      }
    }
    CHECK(summed(with) > 0);
    for (int at = with.size(); at < with.runtimes(); ++at) {
      INFO("server " << at - with.size());
      // One that is given nothing to own hears nothing.
      const bool used = layout.servers[static_cast<std::size_t>(at - with.size())] > 0;
      CHECK((with.at(at).dedicated_stats().chunks > 0) == used);
      CHECK(with.run_until([&] { return with.at(at).pool().slots_in_use() == 0; }));
    }
  }
}

TEST_CASE("cluster/dedicated: an average of integers divides once and truncates", "[cluster][fast]") {
  Cluster cluster(options_of({{0, 1, 2}, {5}}));
  const auto uid = cluster.open_group();
  std::vector<std::vector<std::int32_t>> data;
  for (int r = 0; r < 3; ++r) {
    data.emplace_back(3000);
    for (std::size_t i = 0; i < 3000; ++i) data.back()[i] = static_cast<std::int32_t>(i) * (r == 1 ? -3 : 1) + r;
  }
  Tally tally;
  for (int r = 0; r < 3; ++r) {
    auto o = reduction(schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kAvg);
    o.output = {piece(data[static_cast<std::size_t>(r)])};
    cluster.submit(uid, r, o, 0, tally.completion());
  }
  REQUIRE(cluster.run_until([&] { return tally.done == 3; }));
  REQUIRE(tally.first_error == "");
  for (int r = 0; r < 3; ++r)
    for (std::size_t i = 0; i < 3000; ++i)
      REQUIRE(data[static_cast<std::size_t>(r)][i] == (-static_cast<std::int32_t>(i) + 3) / 3);
}

TEST_CASE("cluster/dedicated: many groups in different orders finish with the smallest pools", "[cluster][fast]") {
  for (const Layout& layout : {Layout{{0, 1, 2}, {2}}, Layout{{0, 0, 1, 2}, {1, 1}}, Layout{{0, 1, 2, 3}, {4, 4}}}) {
    for (const std::uint64_t seed : {1, 2, 3, 4}) {
      ClusterOptions options = options_of(layout);
      options.seed = seed;
      options.eager_bytes = seed % 2 == 0 ? 0 : 1024;
      options.grant_chunks = 1;
      Cluster cluster(options);
      const int n = cluster.size();
      constexpr int kGroups = 16;
      constexpr int kOperations = 8;
      std::vector<core::GroupUid> groups;
      for (int g = 0; g < kGroups; ++g) groups.push_back(cluster.open_group());
      std::vector<std::vector<std::int32_t>> memory;
      memory.reserve(static_cast<std::size_t>(n * kGroups * kOperations));
      Tally tally;
      int expected = 0;
      for (int r = 0; r < n; ++r) {
        std::vector<int> next(kGroups, 0);
        std::vector<int> order;
        for (int g = 0; g < kGroups; ++g)
          for (int k = 0; k < kOperations; ++k) order.push_back(g);
        std::shuffle(order.begin(), order.end(), cluster.random());
        for (const int g : order) {
          const int k = next[static_cast<std::size_t>(g)]++;
          const std::size_t count = 200 + static_cast<std::size_t>((g * 7 + k * 531) % 5000);
          memory.emplace_back(count, r + g + k);
          auto o =
              reduction((g + k) % 3 == 0 ? schedule::Kind::kReduce : schedule::Kind::kAllReduce, core::DType::kInt32);
          o.root = (g + k) % 3 == 0 ? (g + k) % n : -1;
          o.output = {piece(memory.back())};
          o.input = o.output;
          cluster.submit(groups[static_cast<std::size_t>(g)], r, o, static_cast<std::uint64_t>(k), tally.completion());
          ++expected;
        }
        cluster.run_until([] { return false; }, 50);
      }
      INFO("layout " << name(layout) << " seed " << seed << " done " << tally.done << " of " << expected);
      REQUIRE(cluster.run_until([&] { return tally.done == expected; }));
      REQUIRE(tally.first_error == "");
      for (int at = n; at < cluster.runtimes(); ++at)
        CHECK(cluster.run_until([&] { return cluster.at(at).pool().slots_in_use() == 0; }));
    }
  }
}

TEST_CASE("cluster/dedicated: messages delayed, reordered and doubled change nothing", "[cluster][fast]") {
  for (const std::uint64_t seed : {1, 2, 3, 4, 5, 6}) {
    ClusterOptions options = options_of({{0, 0, 1, 2}, {2, 1}});
    options.seed = seed;
    options.eager_bytes = 2048;
    options.wrap = [seed](std::unique_ptr<transport::Transport> inner, int rank) {
      test_support::Faults faults;
      faults.duplicate = 0.05;
      faults.delay = 0.3;
      return std::make_unique<test_support::FaultyTransport>(std::move(inner), faults,
                                                             seed * 100 + static_cast<std::uint64_t>(rank));
    };
    Cluster cluster(options);
    const auto uid = cluster.open_group();
    for (std::uint64_t sequence = 0; sequence < 12; ++sequence) {
      const std::size_t count = 100 + sequence * 731;
      std::vector<std::vector<std::int32_t>> data;
      Tally tally;
      for (int r = 0; r < cluster.size(); ++r) data.emplace_back(count, r + 1);
      for (int r = 0; r < cluster.size(); ++r) {
        auto o = reduction(schedule::Kind::kAllReduce, core::DType::kInt32);
        o.output = {piece(data[static_cast<std::size_t>(r)])};
        cluster.submit(uid, r, o, sequence, tally.completion());
      }
      INFO("seed " << seed << " sequence " << sequence);
      REQUIRE(cluster.run_until([&] { return tally.done == cluster.size(); }));
      REQUIRE(tally.first_error == "");
      for (const auto& values : data)
        for (const std::int32_t value : values) REQUIRE(value == 10);
    }
  }
}

TEST_CASE("cluster/dedicated: ranks that disagree all fail with both signatures", "[cluster][fast]") {
  // Nearly all is the server's, so that it is the one to find out.
  Cluster cluster(options_of({{0, 1, 2}, {1000}}));
  const auto uid = cluster.open_group();
  Tally tally;
  std::vector<std::vector<std::int32_t>> data;
  for (int r = 0; r < 3; ++r) data.emplace_back(r == 1 ? 10001 : 10000, r);
  for (int r = 0; r < 3; ++r) {
    auto o = reduction(schedule::Kind::kAllReduce, core::DType::kInt32);
    o.output = {piece(data[static_cast<std::size_t>(r)])};
    cluster.submit(uid, r, o, 0, tally.completion());
  }
  REQUIRE(cluster.run_until([&] { return tally.done == 3; }));
  REQUIRE(tally.failed == 3);
  for (const std::string& error : tally.errors) {
    CHECK(error.find("int32[10000]") != std::string::npos);
    CHECK(error.find("int32[10001]") != std::string::npos);
  }
  REQUIRE(cluster.run_until([&] { return cluster.at(3).dedicated_stats().groups == 0; }));
}

TEST_CASE("cluster/dedicated: a server that dies in an operation fails nobody", "[cluster][fast]") {
  Cluster cluster(options_of({{0, 1, 2}, {1, 1}}));
  const auto uid = cluster.open_group();
  Tally first;
  reduce_once(cluster, uid, 0, 5000, core::ReduceOp::kSum, -1, first);
  REQUIRE(first.failed == 0);
  Tally tally;
  std::vector<std::vector<float>> data;
  for (int r = 0; r < 3; ++r) data.push_back(floats(r, 50000));
  for (int r = 0; r < 3; ++r) {
    auto o = reduction(schedule::Kind::kAllReduce, core::DType::kFloat32);
    o.output = {piece(data[static_cast<std::size_t>(r)])};
    cluster.submit(uid, r, o, 1, tally.completion());
  }
  const std::uint64_t before = cluster.at(4).dedicated_stats().bytes;
  REQUIRE(cluster.run_until([&] { return cluster.at(4).dedicated_stats().bytes > before; }));
  REQUIRE(tally.done == 0);
  cluster.kill(4);
  REQUIRE(cluster.run_until([&] { return tally.done == 3; }, 100000000));
  REQUIRE(tally.first_error == "");
  // The other one still helps, and the one that is gone owns nothing.
  const std::uint64_t then = cluster.at(3).dedicated_stats().bytes;
  reduce_once(cluster, uid, 2, 50000, core::ReduceOp::kSum, -1, tally);
  REQUIRE(tally.first_error == "");
  CHECK(cluster.at(3).dedicated_stats().bytes > then);
}

TEST_CASE("cluster/dedicated: a group that its members leave is forgotten", "[cluster][fast]") {
  Cluster cluster(options_of({{0, 1, 2}, {1}}));
  const auto a = cluster.open_group();
  const auto b = cluster.open_group();
  Tally tally;
  reduce_once(cluster, a, 0, 5000, core::ReduceOp::kSum, -1, tally);
  REQUIRE(cluster.at(3).dedicated_stats().groups == 2);
  for (int r = 0; r < 3; ++r) cluster.at(r).close_group(a);
  REQUIRE(cluster.run_until([&] { return cluster.at(3).dedicated_stats().groups == 1; }));
  // The other one goes on.
  reduce_once(cluster, b, 0, 5000, core::ReduceOp::kSum, -1, tally);
  REQUIRE(tally.first_error == "");
}

TEST_CASE("cluster/dedicated: engines that have left and gone are forgotten after a while", "[cluster][fast]") {
  test::MovableClock clock;
  Cluster cluster(options_of({{0, 1, 2}, {1}}));
  const auto uid = cluster.open_group();
  Tally tally;
  reduce_once(cluster, uid, 0, 5000, core::ReduceOp::kSum, -1, tally);
  const auto pass_minutes = [&] {
    clock.pass(std::chrono::minutes(2));
    cluster.run_until([] { return false; }, 20);
  };
  pass_minutes();
  CHECK(cluster.at(3).peers().size() == 3);
  for (int r = 0; r < 3; ++r) cluster.at(r).close_group(uid);
  REQUIRE(cluster.run_until([&] { return cluster.at(3).dedicated_stats().groups == 0; }, 100));
  cluster.kill(0);
  pass_minutes();
  CHECK_FALSE(cluster.at(3).peers().knows(cluster.id(0)));
  CHECK(cluster.at(3).peers().size() == 2);  // those with a connection
}

TEST_CASE("cluster/dedicated: what does not fit the roster fails that group alone", "[cluster][fast]") {
  Cluster cluster(options_of({{0, 1, 2}, {1}}));
  const auto a = cluster.open_group();
  const auto b = cluster.open_group();
  // Rank 0's engine, in the name of node 1.
  const wire::ChunkId chunk{
      .stage = wire::Stage::kPush,
      .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, 4000},
      .span_bytes = 1000,
      .span = 3,
      .contributor = 1};
  cluster.at(0).send_control(cluster.id(3), {{{}, a, 0}, 0, wire::Data{chunk}}, "xxxx");
  REQUIRE(cluster.run_until([&] { return cluster.at(3).dedicated_stats().refused == 1; }));
  REQUIRE(cluster.run_until([&] { return cluster.at(3).dedicated_stats().groups == 1; }));
  Tally tally;
  std::vector<std::int32_t> data(100);
  auto o = reduction(schedule::Kind::kAllReduce, core::DType::kInt32);
  o.output = {piece(data)};
  REQUIRE(cluster.run_until([&] { return !cluster.at(1).worker().find(a)->status.is_ok(); }));
  cluster.submit(a, 1, o, 0, tally.completion());
  REQUIRE(tally.failed == 1);
  Tally other;
  reduce_once(cluster, b, 0, 5000, core::ReduceOp::kSum, -1, other);
  REQUIRE(other.first_error == "");
}

TEST_CASE("cluster/dedicated: what a member opens is bounded, and too much fails its group alone", "[cluster][fast]") {
  Cluster cluster(options_of({{0, 1, 2}, {1}}));
  const auto a = cluster.open_group();
  const auto b = cluster.open_group();
  // Half of all chunks that a group may have under way, by a header alone; then more than the other half.
  const std::uint64_t bytes = (std::uint64_t{1} << 23) * cluster.at(0).worker().find(a)->info.tuning.chunks.usual;
  wire::Announce announce;
  announce.chunk = {.stage = wire::Stage::kPush,
                    .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, bytes},
                    .span_bytes = bytes,
                    .span = 3};
  cluster.at(0).send_control(cluster.id(3), {{{}, a, 0}, 0, announce}, "");
  cluster.run_until([] { return false; }, 1000);
  REQUIRE(cluster.at(3).dedicated_stats().refused == 0);
  ++announce.chunk.sequence;
  cluster.at(0).send_control(cluster.id(3), {{{}, a, 0}, 0, announce}, "");
  REQUIRE(cluster.run_until([&] { return cluster.at(3).dedicated_stats().refused == 1; }));
  REQUIRE(cluster.run_until([&] { return !cluster.at(1).worker().find(a)->status.is_ok(); }));
  REQUIRE(std::string(cluster.at(1).worker().find(a)->status.message()).find("wait for some") != std::string::npos);
  Tally tally;
  reduce_once(cluster, b, 0, 5000, core::ReduceOp::kSum, -1, tally);
  REQUIRE(tally.first_error == "");
}

TEST_CASE("cluster/dedicated: a server that closes one group goes on serving another", "[cluster][fast]") {
  const bool is_told_to_stop = GENERATE(false, true);
  INFO(is_told_to_stop);
  test::MovableClock clock;
  Cluster cluster(options_of({{0, 1, 2, 3}, {1}}));
  const core::GroupUid idle = cluster.open_group();
  const core::GroupUid busy = cluster.new_uid();  // without rank 3
  std::vector<schedule::Member> members = cluster.members_of(5);
  members.erase(members.begin() + 3);
  const auto room = static_cast<std::uint32_t>(ClusterOptions().chunk_bytes);
  const schedule::ChunkSizes chunks{room, room, room};
  for (int rank = 0; rank < 3; ++rank) {
    worker::GroupInfo info{busy, "busy", schedule::Members(members), schedule::Topology({0, 1, 2}, rank, {}, {1})};
    info.tuning.chunks = chunks;
    cluster.at(rank).open_group(std::move(info));
  }
  cluster.at(4).open_served_group(
      {busy, "busy", schedule::Members(members), schedule::Topology({0, 1, 2}, 3, {}, {1}), chunks});
  std::vector<std::vector<float>> tensors;
  for (int rank = 0; rank < 3; ++rank) tensors.push_back(floats(rank, 3000));
  Tally tally;
  const auto submit = [&](int rank, std::uint64_t sequence) {
    worker::Operation o = reduction(schedule::Kind::kAllReduce, core::DType::kFloat32);
    o.output = {piece(tensors[static_cast<std::size_t>(rank)])};
    cluster.submit(busy, rank, std::move(o), sequence, tally.completion());
  };
  const auto pass = [&](int tens) {
    for (int i = 0; i < tens; ++i) {
      clock.pass(std::chrono::milliseconds(10));
      for (int round = 0; round < 10; ++round) cluster.progress();
    }
  };
  submit(0, 0);
  submit(1, 0);
  pass(5);
  server::DedicatedServer& server = cluster.at(4).dedicated();
  const core::Status why(core::Code::kAborted, "for the test");
  if (is_told_to_stop)
    server.ask_to_leave(why);
  else
    server.on_peer_dead(cluster.id(3), why);
  pass(50);
  CHECK_FALSE(server.has(idle));
  REQUIRE(server.has(busy));
  for (int rank = 0; rank < 3; ++rank) {
    CHECK(cluster.at(rank).worker().find(idle)->servers.is_gone(4));
    CHECK_FALSE(cluster.at(rank).worker().find(busy)->servers.is_gone(3));
  }
  const std::uint64_t before = cluster.at(4).dedicated_stats().bytes;
  submit(2, 0);
  pass(100);
  CHECK(tally.done == 3);
  CHECK(tally.first_error == "");
  CHECK(cluster.at(4).dedicated_stats().bytes > before);
}
