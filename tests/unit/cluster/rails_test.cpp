// Operations between nodes: one rank per node and rail has what the node gives, and takes what it gets.
#include <cstring>
#include <numeric>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using schedule::Scope;
using test::Cluster;
using test::ClusterOptions;

using Values = std::vector<std::int32_t>;

worker::Piece piece(Values& values) {
  return {reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(std::int32_t)};
}

std::int32_t value(int node, int rail, std::size_t i) {
  return node * 1000003 + rail * 5003 + static_cast<std::int32_t>(i) * 7;
}

struct Case {
  std::vector<int> node_of;
  std::vector<double> servers;
  std::vector<int> region_of{};  // by node
};

const Case kCases[] = {{{0, 0, 1, 1}, {}},
                       {{0, 1, 0, 1, 1}, {}},
                       {{0, 0, 0, 1, 2, 2}, {}},
                       {{0, 0, 1, 1, 2, 2}, {1}},
                       {{0, 0, 0, 1, 2}, {2, 1}},
                       {{0, 1, 2}, {1}},
                       {{0, 0, 0, 1, 1}, {1, 1, 1, 1}},
                       {{0, 0, 1, 1, 2, 2, 3, 3}, {}, {0, 0, 1, 1}},
                       {{0, 0, 0, 1, 2, 2, 3}, {}, {1, 0, 0, 1}}};

}  // namespace

TEST_CASE("cluster/rails: allreduce and reduce sum what the nodes bring, broadcast hands on what one brings",
          "[cluster][fast]") {
  for (const Case& c : kCases) {
    ClusterOptions options;
    options.node_of = c.node_of;
    options.servers = c.servers;
    options.region_of = c.region_of;
    Cluster cluster(options);
    const auto uid = cluster.open_group();
    const schedule::Topology any(c.node_of, 0);
    std::uint64_t sequence = 0;
    std::uint64_t served = 0;
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast}) {
      for (const std::size_t count : {std::size_t{0}, std::size_t{3}, std::size_t{900}, std::size_t{20000}}) {
        const int root = kind == Kind::kAllReduce ? -1 : static_cast<int>(sequence) % cluster.size();
        INFO("ranks " << c.node_of.size() << " servers " << c.servers.size() << " " << name_of(kind) << " x" << count);
        std::vector<std::uint64_t> rail_bytes;
        for (int rail = 0; rail < any.rails(); ++rail)
          rail_bytes.push_back((count + 5 * static_cast<std::size_t>(rail) * (count > 0)) * 4);
        std::vector<Values> memory;
        int done = 0;
        std::string error;
        for (int r = 0; r < cluster.size(); ++r) {
          const schedule::Topology topology(c.node_of, r);
          memory.emplace_back();
          const bool gives = kind != Kind::kBroadcast || topology.my_node() == topology.node_of(root);
          for (int rail = 0; rail < any.rails(); ++rail) {
            if (topology.rail_rank(topology.my_node(), rail) != r) continue;
            for (std::size_t i = 0; i < rail_bytes[static_cast<std::size_t>(rail)] / 4; ++i)
              memory.back().push_back(gives ? value(topology.my_node(), rail, i) : -1);
          }
        }
        for (int r = 0; r < cluster.size(); ++r) {
          const schedule::Topology topology(c.node_of, r);
          worker::Operation o;
          o.kind = kind;
          o.dtype = core::DType::kInt32;
          o.op = kind == Kind::kBroadcast ? core::ReduceOp::kNone : core::ReduceOp::kSum;
          o.root = root;
          o.scope = Scope::kNodes;
          o.rail_bytes = rail_bytes;
          o.total_bytes = std::accumulate(rail_bytes.begin(), rail_bytes.end(), std::uint64_t{0});
          Values& mine = memory[static_cast<std::size_t>(r)];
          if (kind == Kind::kReduce) o.input = {piece(mine)};
          if (kind != Kind::kReduce || topology.my_node() == topology.node_of(root)) o.output = {piece(mine)};
          cluster.submit(uid, r, o, sequence, [&](const worker::Outcome& outcome) {
            ++done;
            if (!outcome.status.is_ok()) error = outcome.status.to_string();
          });
        }
        REQUIRE(cluster.run_until([&] { return done == cluster.size(); }));
        REQUIRE(error == "");
        ++sequence;
        for (int r = 0; r < cluster.size(); ++r) {
          const schedule::Topology topology(c.node_of, r);
          if (kind == Kind::kReduce && topology.my_node() != topology.node_of(root)) continue;
          std::size_t at = 0;
          for (int rail = 0; rail < any.rails(); ++rail) {
            if (topology.rail_rank(topology.my_node(), rail) != r) continue;
            for (std::size_t i = 0; i < rail_bytes[static_cast<std::size_t>(rail)] / 4; ++i) {
              std::int32_t expected = 0;
              for (int node = 0; node < any.nodes(); ++node)
                if (kind != Kind::kBroadcast || node == any.node_of(root)) expected += value(node, rail, i);
              REQUIRE(memory[static_cast<std::size_t>(r)][at++] == expected);
            }
          }
        }
      }
    }
    for (std::size_t d = 0; d < c.servers.size(); ++d)
      served += cluster.at(cluster.size() + static_cast<int>(d)).dedicated_stats().bytes;
    CHECK((served > 0) == !c.servers.empty());
  }
}

TEST_CASE("cluster/rails: a witness finds what ranks call differently, of every kind", "[cluster][fast]") {
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kReduceScatter, Kind::kAllGather}) {
    for (const bool differ : {false, true}) {
      INFO(name_of(kind) << (differ ? ", different" : ""));
      ClusterOptions options;
      options.node_of = {0, 0, 1, 1};
      Cluster cluster(options);
      const auto uid = cluster.open_group();
      int done = 0;
      int failed = 0;
      for (int r = 0; r < 4; ++r) {
        worker::Operation o;
        o.kind = kind;
        o.dtype = core::DType::kInt32;
        o.scope = Scope::kWitness;
        o.total_bytes = differ && r == 3 ? 400 : 404;
        cluster.submit(uid, r, o, 0, [&](const worker::Outcome& outcome) {
          ++done;
          failed += !outcome.status.is_ok();
          if (!outcome.status.is_ok())
            CHECK(std::string(outcome.status.message()).find("ranks disagree about operation 0") != std::string::npos);
        });
      }
      REQUIRE(cluster.run_until([&] { return done == 4; }));
      CHECK(failed == (differ ? 4 : 0));
    }
  }
}

namespace {

/// What `from` has for `to` in gathers, scatters and exchanges: bytes.
std::uint64_t part_bytes(int from, int to) { return static_cast<std::uint64_t>(4 * ((from * 7 + to * 3) % 5) * 700); }

/// This rank's own view of the sizes, as in schedule::Request.
void set_sizes(worker::Operation& o, int me, int size) {
  o.input_bytes.assign(static_cast<std::size_t>(size), 0);
  o.output_bytes = o.input_bytes;
  for (int r = 0; r < size; ++r) {
    const auto index = static_cast<std::size_t>(r);
    if (o.kind == Kind::kAllToAll || (o.kind == Kind::kScatter && me == o.root))
      o.input_bytes[index] = part_bytes(me, r);
    if (o.kind == Kind::kAllToAll || (o.kind == Kind::kGather && me == o.root))
      o.output_bytes[index] = part_bytes(r, me);
  }
  const auto own = static_cast<std::size_t>(me);
  if (o.kind == Kind::kGather) o.input_bytes[own] = part_bytes(me, o.root);
  if (o.kind == Kind::kScatter) o.output_bytes[own] = part_bytes(o.root, me);
}

constexpr Kind kPairwise[] = {Kind::kGather, Kind::kScatter, Kind::kAllToAll};

}  // namespace

TEST_CASE("cluster/rails: of gather, scatter and all_to_all go the parts for ranks of other nodes", "[cluster][fast]") {
  for (const Case& c : kCases) {
    ClusterOptions options;
    options.node_of = c.node_of;
    options.servers = c.servers;
    options.region_of = c.region_of;
    Cluster cluster(options);
    const auto uid = cluster.open_group();
    const int size = cluster.size();
    const schedule::Topology any(c.node_of, 0);
    std::uint64_t sequence = 0;
    for (const Kind kind : kPairwise) {
      for (int root = kind == Kind::kAllToAll ? -1 : 0; root < (kind == Kind::kAllToAll ? 0 : size); ++root) {
        INFO("ranks " << size << " " << name_of(kind) << " root " << root);
        std::vector<Values> in(static_cast<std::size_t>(size));
        std::vector<Values> out(static_cast<std::size_t>(size));
        std::vector<Values> expected(static_cast<std::size_t>(size));
        int done = 0;
        std::string error;
        for (int r = 0; r < size; ++r) {
          const auto index = static_cast<std::size_t>(r);
          worker::Operation o;
          o.kind = kind;
          o.dtype = core::DType::kInt32;
          o.root = root;
          o.scope = Scope::kNodes;
          set_sizes(o, r, size);
          for (int other = 0; other < size; ++other) {
            if (any.node_of(other) == any.node_of(r)) continue;
            const bool gives = kind == Kind::kAllToAll || (kind == Kind::kGather ? other : r) == root;
            const bool gets = kind == Kind::kAllToAll || (kind == Kind::kGather ? r : other) == root;
            for (std::size_t i = 0; gives && i < part_bytes(r, other) / 4; ++i) in[index].push_back(value(r, other, i));
            for (std::size_t i = 0; gets && i < part_bytes(other, r) / 4; ++i)
              expected[index].push_back(value(other, r, i));
          }
          out[index].assign(expected[index].size(), -1);
          o.input = {piece(in[index])};
          o.output = {piece(out[index])};
          cluster.submit(uid, r, o, sequence, [&](const worker::Outcome& outcome) {
            ++done;
            if (!outcome.status.is_ok()) error = outcome.status.to_string();
          });
        }
        REQUIRE(cluster.run_until([&] { return done == size; }));
        REQUIRE(error == "");
        REQUIRE((out == expected));
        ++sequence;
      }
    }
  }
}

TEST_CASE("cluster/rails: a witness compares what two ranks of a node mean to exchange", "[cluster][fast]") {
  for (const Kind kind : kPairwise) {
    for (const bool differ : {false, true}) {
      INFO(name_of(kind) << (differ ? ", different" : ""));
      ClusterOptions options;
      options.node_of = {0, 0, 1, 1};
      Cluster cluster(options);
      const auto uid = cluster.open_group();
      int done = 0;
      int failed = 0;
      for (int r = 0; r < 4; ++r) {
        worker::Operation o;
        o.kind = kind;
        o.dtype = core::DType::kInt32;
        o.root = kind == Kind::kAllToAll ? -1 : 2;
        o.scope = Scope::kWitness;
        set_sizes(o, r, 4);
        // With what it exchanges with rank 2.
        if (differ && r == 3)
          (kind == Kind::kScatter ? o.output_bytes[3] : o.input_bytes[kind == Kind::kGather ? 3 : 2]) += 4;
        cluster.submit(uid, r, o, 0, [&](const worker::Outcome& outcome) {
          ++done;
          failed += !outcome.status.is_ok();
          if (!outcome.status.is_ok()) {
            const std::string text(outcome.status.message());
            INFO(text);
            CHECK(text.find("ranks disagree about operation 0") != std::string::npos);
            CHECK(text.find("with other sizes per rank") != std::string::npos);
          }
        });
      }
      REQUIRE(cluster.run_until([&] { return done == 4; }));
      if (differ)
        CHECK(failed > 0);  // a rank may have been through with its part
      else
        CHECK(failed == 0);
    }
  }
}

TEST_CASE("cluster/rails: a witness and an operation with data are not the same call", "[cluster][fast]") {
  ClusterOptions options;
  options.node_of = {0, 0, 1, 1};
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  int failed = 0;
  std::vector<Values> memory(4, Values(4000, 1));
  for (int r = 0; r < 4; ++r) {
    worker::Operation o;
    o.kind = Kind::kAllReduce;
    o.dtype = core::DType::kInt32;
    o.op = core::ReduceOp::kSum;
    if (r == 2) {
      o.scope = Scope::kWitness;
      o.total_bytes = 16000;
    } else {
      o.output = {piece(memory[static_cast<std::size_t>(r)])};
    }
    cluster.submit(uid, r, o, 0, [&](const worker::Outcome& outcome) { failed += !outcome.status.is_ok(); });
  }
  REQUIRE(cluster.run_until([&] { return failed == 4; }));
}
