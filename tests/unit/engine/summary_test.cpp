#include "hybridps/engine/summary.h"

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "hybridps/engine/records.h"
#include "tests/support/catch.h"
#include "tests/unit/bootstrap/sample.h"

using namespace hybridps;
using bootstrap::testing::sample_roster;
using engine::SummaryOptions;

namespace {

std::string text_of(const bootstrap::Roster& roster, const SummaryOptions& options) {
  return engine::summarise(roster, engine::topology_of(roster, 0), options).text;
}

bool mentions(const std::string& text, const std::string& part) {
  UNSCOPED_INFO(text);
  return text.find(part) != std::string::npos;
}

bootstrap::Roster with_servers(int ranks, int servers) {
  bootstrap::Roster roster = sample_roster(ranks);
  for (int i = 0; i < servers; ++i)
    roster.servers.push_back(bootstrap::testing::sample_member(i, servers, 900 + static_cast<std::uint64_t>(i),
                                                               "node:spare" + std::to_string(i)));
  return roster;
}

}  // namespace

TEST_CASE("engine/summary: one line tells ranks, nodes, networks with rates, shares", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(4);
  const std::string text = text_of(roster, {"TCP"});
  for (const char* part :
       {"4 ranks on 2 nodes: host-0 [0, 1], host-1 [2, 3] (the ranks of a node share memory)",
        "data by TCP through eth1 (10.1.0.0/24, 12.5 Gbit/s) + eth2 at 25 Gbit/s (HYBRIDPS_NIC_GBPS)",
        "control through eth0 (10.0.0.0/24, 1 Gbit/s)", "each node owns 50 %", "no dedicated servers"})
    CHECK(mentions(text, part));
  CHECK(text.find('\n') == std::string::npos);
  CHECK(mentions(text_of(sample_roster(1), {"TCP"}), "1 rank on 1 node: host-0 [0]"));
  CHECK_FALSE(mentions(text_of(sample_roster(2), {"TCP"}), "data by"));  // one node: nothing crosses a network
}

TEST_CASE("engine/summary: regions, and the servers of each", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(6);
  for (std::size_t rank = 0; rank < 6; ++rank) roster.members[rank].region = rank < 4 ? "east" : "west";
  CHECK(mentions(text_of(roster, {"TCP"}), "gateways of 2 regions: 'east' of 2 nodes, 'west' of 1 node"));
  roster.servers = with_servers(6, 3).servers;
  roster.servers[0].region = roster.servers[2].region = "west";
  CHECK(mentions(text_of(roster, {"TCP"}), "'east' of 2 nodes, 'west' of 1 node and 2 servers, the server on " +
                                               roster.servers[1].host_name + " in none of them"));
  const schedule::Topology topology = engine::topology_of(roster, 0);
  CHECK(topology.region_of_owner(6) == 1);
  CHECK(topology.region_of_owner(7) == schedule::kNoRegion);
  roster.servers.clear();
  for (auto& member : roster.members) member.region = "east";
  CHECK(mentions(text_of(roster, {"TCP"}), "in 1 region"));
}

TEST_CASE("engine/summary: regions are declared on all ranks or on none", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(4);
  CHECK(engine::check_regions(roster).is_ok());
  roster.members[3].region = "west";
  CHECK(mentions(std::string(engine::check_regions(roster).message()), "not set on all ranks"));
  for (auto& member : roster.members) member.region = "west";
  CHECK(engine::check_regions(roster).is_ok());
  roster.members[3].region = "east";
  CHECK(mentions(std::string(engine::check_regions(roster).message()), "ranks of one node"));
}

TEST_CASE("engine/summary: a region may name the rate of its uplink", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(12);
  const auto declare = [&](const std::vector<std::string>& regions) {
    for (std::size_t rank = 0; rank < 12; ++rank) roster.members[rank].region = regions[rank / (12 / regions.size())];
  };
  const auto weights = [&] {
    const schedule::Topology topology = engine::topology_of(roster, 0);
    std::vector<double> found;
    for (int node = 0; node < topology.nodes(); ++node) found.push_back(topology.weight(node));
    return found;
  };
  const auto are = [](const std::vector<double>& found, const std::vector<double>& wanted) {
    return std::equal(found.begin(), found.end(), wanted.begin(), wanted.end(),
                      [](double a, double b) { return std::abs(a - b) < 1e-6; });
  };
  declare({"a@0.5", "b@0.25", "c@0.25"});
  CHECK(engine::check_regions(roster).is_ok());
  CHECK(are(weights(), {0.5, 0.5, 0, 0, 0, 0}));
  CHECK(engine::topology_of(roster, 0).regions() == 3);
  declare({"a@0.5", "b@0.4", "c@0.4"});  // (1 + y) / rate is the same for all
  CHECK(are(weights(), {7.0 / 26, 7.0 / 26, 3.0 / 26, 3.0 / 26, 3.0 / 26, 3.0 / 26}));
  const double equal = 1.0 / 6;
  for (const std::vector<std::string>& flat :
       {std::vector<std::string>{"a@0.5", "b@0.25"}, {"a@0.5", "b", "c@0.25"}, {"a", "b", "c"}}) {
    declare(flat);
    CHECK(are(weights(), std::vector<double>(6, equal)));
  }
  declare({"a@1000", "b@2000", "c@3000"});  // the nodes' cards are slower than that, and all have the same
  CHECK(are(weights(), std::vector<double>(6, equal)));
  for (const char* wrong : {"a@", "@1", "a@x", "a@0", "a@-1", "a@nan", "a@1e300"}) {
    declare({wrong, "b@1", "c@1"});
    CHECK(mentions(std::string(engine::check_regions(roster).message()), "NAME@RATE"));
  }
  declare({"a@1", "b@1", "a@2"});
  CHECK(mentions(std::string(engine::check_regions(roster).message()), "different rates"));
}

TEST_CASE("engine/summary: nodes that differ are told apart", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(6);
  roster.members[2].control.name = roster.members[3].control.name = "bond0";
  for (int rank : {4, 5}) roster.members[static_cast<std::size_t>(rank)].node_gbps = 5;
  const std::string text = text_of(roster, {"RDMA"});
  CHECK(mentions(text, "bond0 (10.0.0.0/24, 1 Gbit/s) on host-1"));
  CHECK(mentions(text, "of what is summed 50 % on host-0, 50 % on host-1, 0 % on host-2"));
  CHECK(mentions(text, "data by RDMA"));
}

TEST_CASE("engine/summary: dedicated servers, or why none is used", "[engine][fast]") {
  const auto why = [](int ranks, SummaryOptions options) {
    const bootstrap::Roster roster = sample_roster(ranks);
    return engine::summarise(roster, engine::topology_of(roster, 0), options).servers_why;
  };
  CHECK(why(4, {"TCP"}) == "HYBRIDPS_SERVERS is not set");
  CHECK(why(4, {"TCP", 2}) == "servers help from 3 nodes on");
  CHECK(why(6, {"TCP", 2}) == "none of the 2 named could be used");
  CHECK(why(6, {"TCP", 2, false}) == "the options of the group leave them out");
  CHECK(
      mentions(text_of(sample_roster(4), {"TCP", 1}), "dedicated servers are not used: servers help from 3 nodes on"));

  const bootstrap::Roster roster = with_servers(6, 2);
  const auto summary = engine::summarise(roster, engine::topology_of(roster, 0), {"TCP", 2});
  CHECK(summary.servers == std::vector<std::string>{"host-spare0", "host-spare1"});
  CHECK(summary.servers_why.empty());
  double all = summary.servers_share;
  for (const auto& node : summary.nodes) all += node.share;
  CHECK(all > 0.999);
  CHECK(all < 1.001);
  CHECK(mentions(summary.text, "2 dedicated servers the other"));
  CHECK_FALSE(mentions(summary.text, "compressed"));
}

TEST_CASE("engine/summary: what gradients are compressed with", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(4);
  for (bootstrap::MemberRecord& member : roster.members) member.compress = "int8:ef=0";
  CHECK(mentions(text_of(roster, {"TCP"}), "; gradients compressed with int8:ef=0"));
}

TEST_CASE("engine/records: members that ask for different compression are named with what they ask for",
          "[engine][fast]") {
  const auto complaint = [](const bootstrap::Roster& of) {
    return std::string(engine::codecs_of(of).status().message());
  };
  bootstrap::Roster roster = sample_roster(4);
  CHECK(engine::codecs_of(roster).value() == nullptr);
  for (bootstrap::MemberRecord& member : roster.members) {
    member.compress = "topk:k=0.05";
    member.chunk_bytes = 65536;
  }
  CHECK(engine::codecs_of(roster).value()->spec().k == 0.05);
  roster.members[2].chunk_bytes = 1024;
  CHECK(mentions(complaint(roster), "HYBRIDPS_LIMITS=chunk_bytes of rank 2"));
  CHECK(mentions(complaint(roster), "blocks of 4096 bytes"));
  roster.members[2].compress = "";
  const std::string text = complaint(roster);
  CHECK(mentions(text, "rank 0"));
  CHECK(mentions(text, "'topk:k=0.05'"));
  CHECK(mentions(text, "rank 2"));
  CHECK(mentions(text, "'none'"));
  for (bootstrap::MemberRecord& member : roster.members) member.compress = "of another version";
  CHECK(mentions(complaint(roster), "there is no codec"));
}

TEST_CASE("engine/summary: what ranks complain about is said once with all who do", "[engine][fast]") {
  bootstrap::Roster roster = sample_roster(3);
  CHECK(engine::complaints_of(roster).empty());
  roster.members[0].notes = "one\ntwo";
  roster.members[2].notes = "two";
  CHECK(engine::complaints_of(roster) == std::vector<std::string>{"one (ranks [0])", "two (ranks [0, 2])"});
  for (auto& member : roster.members) member.notes = "one";
  CHECK(engine::complaints_of(roster) == std::vector<std::string>{"one (all ranks)"});
}
