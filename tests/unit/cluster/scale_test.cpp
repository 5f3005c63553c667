// The model of benchmarks/scale counts what engines do, to the message and to the byte.
#include <cstdint>
#include <vector>

#include "benchmarks/scale/flows.h"
#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/counting_transport.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterCounts;
using test::ClusterOptions;

struct World {
  std::vector<int> node_of;
  std::vector<int> region_of;  // by node
  std::vector<double> servers;
  std::vector<int> region_of_server;
};

std::vector<int> node_of(int nodes, int each) {
  std::vector<int> nodes_of_ranks;
  for (int rank = 0; rank < nodes * each; ++rank) nodes_of_ranks.push_back(rank / each);
  return nodes_of_ranks;
}

/// Nodes 0 to `each - 1` are in region 0, and so on.
std::vector<int> rows(int nodes, int each) {
  std::vector<int> region_of;
  for (int node = 0; node < nodes; ++node) region_of.push_back(node / each);
  return region_of;
}

}  // namespace

TEST_CASE("cluster/scale: bytes on cards and racks and messages of ranks are what the model counts",
          "[cluster][slow]") {
  const std::vector<World> worlds = {
      {node_of(16, 2), {}, {}, {}},
      {node_of(16, 2), rows(16, 4), {}, {}},
      {node_of(16, 2), rows(16, 5), {}, {}},  // the last region is one node
      {{0, 0, 0, 1, 2, 2, 3, 4, 4, 4}, {0, 0, 1, 1, 1}, {}, {}},
      {node_of(8, 2), {}, {1.0, 0.5}, {}},
      {node_of(8, 2), rows(8, 4), {1.0, 1.0}, {0, schedule::kNoRegion}},
  };
  struct Call {
    schedule::Kind kind;
    std::size_t bytes;
  };
  const std::vector<Call> calls = {{schedule::Kind::kAllReduce, 1 << 20},
                                   {schedule::Kind::kAllReduce, 64},
                                   {schedule::Kind::kAllReduce, 10'000},
                                   {schedule::Kind::kBarrier, 0}};
  for (const World& world : worlds) {
    test::MovableClock clock;
    ClusterCounts counts;
    ClusterOptions options;
    options.node_of = world.node_of;
    options.region_of = world.region_of;
    options.servers = world.servers;
    options.region_of_server = world.region_of_server;
    options.chunk_bytes = 16 * 1024;
    options.eager_bytes = 128 * 1024;
    options.tiny_bytes = 4096;
    options.local_peers = 3;
    options.pool_extra_bytes = std::size_t{8} << 20;
    options.control = true;
    options.heartbeat_seconds = options.dead_seconds = 1e6;
    counts.count(options);
    Cluster cluster(options);
    const auto uid = cluster.open_group();
    schedule::Topology topology(world.node_of, 0, {}, world.servers);
    if (!world.region_of.empty()) topology = topology.with_regions(world.region_of);
    if (!world.region_of_server.empty()) topology = topology.with_server_regions(world.region_of_server);
    std::vector<int> rack_of = world.region_of.empty() ? rows(topology.nodes(), 4) : world.region_of;
    const int racks = 1 + rack_of.back();
    for (int server = 0; server < topology.servers(); ++server) rack_of.push_back(racks + server);
    const auto card_of = [&](int member) {
      return topology.is_dedicated(member) ? topology.nodes() + member - topology.size() : topology.node_of(member);
    };
    struct Seen {
      std::vector<std::uint64_t> card_sent, card_received, rack_sent, rack_received;
      std::vector<scale::MemberLoad> members;
    };
    const auto look = [&] {
      Seen seen;
      seen.card_sent.resize(rack_of.size());
      seen.card_received.resize(rack_of.size());
      seen.rack_sent.resize(static_cast<std::size_t>(racks + topology.servers()));
      seen.rack_received = seen.rack_sent;
      for (int member = 0; member < cluster.runtimes(); ++member) {
        const auto card = static_cast<std::size_t>(card_of(member));
        scale::MemberLoad& load = seen.members.emplace_back();
        load.sent = counts.network(member).data;
        load.sent_here = counts.memory(member).data;
        for (int other = 0; other < cluster.runtimes(); ++other) {
          const auto found = counts.network(member).bytes_to.find(cluster.id(other));
          if (found == counts.network(member).bytes_to.end()) continue;
          const auto there = static_cast<std::size_t>(card_of(other));
          seen.card_sent[card] += found->second;
          seen.card_received[there] += found->second;
          if (rack_of[card] == rack_of[there]) continue;
          seen.rack_sent[static_cast<std::size_t>(rack_of[card])] += found->second;
          seen.rack_received[static_cast<std::size_t>(rack_of[there])] += found->second;
        }
      }
      return seen;
    };
    for (std::uint64_t sequence = 0; sequence < calls.size(); ++sequence) {
      const Call& call = calls[sequence];
      const Seen before = look();
      std::vector<std::vector<std::int32_t>> data;
      int done = 0;
      for (int rank = 0; rank < cluster.size(); ++rank) {
        data.emplace_back(call.bytes / 4, 1);
        worker::Operation o;
        o.kind = call.kind;
        if (call.kind == schedule::Kind::kAllReduce) {
          o.dtype = core::DType::kInt32;
          o.op = core::ReduceOp::kSum;
          o.output = {worker::Piece{reinterpret_cast<std::byte*>(data.back().data()), call.bytes}};
        }
        cluster.submit(uid, rank, o, sequence,
                       [&done](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
      }
      REQUIRE(cluster.run_until([&] {
        clock.pass(std::chrono::microseconds(10));
        return done == cluster.size();
      }));
      cluster.run_until([] { return false; }, /*idle_rounds_max=*/20);
      for (const auto& tensor : data)
        if (!tensor.empty()) CHECK(tensor.back() == cluster.size());
      const Seen after = look();

      schedule::Request request;
      request.kind = call.kind;
      request.dtype = core::DType::kInt32;
      request.sequence = sequence;
      request.total_bytes = call.bytes;
      request.may_have_levels = topology.regions() > 1;
      const schedule::Limits limits{static_cast<std::uint32_t>(options.chunk_bytes), options.tiny_bytes};
      const scale::Loads loads = scale::count_loads(request, topology, limits, rack_of);
      CAPTURE(topology.size(), topology.regions(), topology.servers(), static_cast<int>(call.kind), call.bytes);
      std::uint64_t sent = 0;
      std::uint64_t received = 0;
      for (std::size_t i = 0; i < rack_of.size(); ++i) {
        CAPTURE(i);
        CHECK(after.card_sent[i] - before.card_sent[i] == loads.card_sent[i]);
        CHECK(after.card_received[i] - before.card_received[i] == loads.card_received[i]);
      }
      for (std::size_t i = 0; i < loads.rack_sent.size(); ++i) {
        CHECK(after.rack_sent[i] - before.rack_sent[i] == loads.rack_sent[i]);
        CHECK(after.rack_received[i] - before.rack_received[i] == loads.rack_received[i]);
      }
      for (std::size_t i = 0; i < loads.members.size(); ++i) {
        CAPTURE(i);
        CHECK(after.members[i].sent - before.members[i].sent == loads.members[i].sent);
        CHECK(after.members[i].sent_here - before.members[i].sent_here == loads.members[i].sent_here);
        sent += loads.members[i].sent + loads.members[i].sent_here;
        received += loads.members[i].received + loads.members[i].received_here;
      }
      CHECK(sent == received);
      if (sequence == 0)  // later operations have other peers, too
        for (int member = 0; member < cluster.runtimes(); ++member) {
          CAPTURE(member);
          CHECK(counts.network(member).bytes_to.size() == scale::count_peers(request, topology, limits, member));
        }
    }
    for (int rank = 0; rank < cluster.size(); ++rank) cluster.at(rank).close_group(uid);
  }
}
