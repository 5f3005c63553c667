// hybridps/engine/summary.h: a group's description for people: one line at the start of a job, and the same in parts.
//
// Threads  pure functions.
#pragma once

#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::engine {

/// The summary of an open group, from its roster.
struct GroupSummary {
  struct NodeSummary {
    std::string host;
    std::vector<int> ranks;  // the node's ranks, which share memory
    double share = 0;  // the part of each summed tensor that the ranks own at the group's start; 1: the whole tensor
    std::string data;  // the data cards of the node's first rank: "eth0 (10.0.0.0/24, 25 Gbit/s)"
    std::string control;
  };
  std::vector<NodeSummary> nodes;
  std::string transport;             // "TCP", "RDMA", "TCP through UCX"
  std::vector<std::string> servers;  // hosts of dedicated servers, one entry for each server engine
  double servers_share = 0;
  std::string servers_why;  // why no server is used; empty if servers are used
  std::string text;         // the whole summary in one line
};

struct SummaryOptions {
  std::string transport;
  std::size_t servers_named = 0;  // number of servers in this rank's HYBRIDPS_SERVERS
  bool servers_wanted = true;     // the group's options allow dedicated servers
  int servers_nodes_min = 3;
};

GroupSummary summarise(const bootstrap::Roster& roster, const schedule::Topology& topology,
                       const SummaryOptions& options);

/// The ranks' complaints about their settings (MemberRecord::notes). Each complaint comes once, with its ranks:
/// "unknown setting X is ignored (ranks [0, 2])".
std::vector<std::string> complaints_of(const bootstrap::Roster& roster);

}  // namespace hybridps::engine
