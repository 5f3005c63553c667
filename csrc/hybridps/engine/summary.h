// hybridps/engine/summary.h: what a group is, for people: one line at the start of a job, and the same in parts.
//
// Threads  pure functions.
#pragma once

#include <string>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::engine {

/// Of a group that is open, as its roster has it.
struct GroupSummary {
  struct NodeSummary {
    std::string host;
    std::vector<int> ranks;  // they share memory
    double share = 0;  // of each tensor that is summed, owned by its ranks when the group was opened; all of them: 1
    std::string data;  // "eth0 (10.0.0.0/24, 25 Gbit/s)", of its first rank
    std::string control;
  };
  std::vector<NodeSummary> nodes;
  std::string transport;             // "TCP", "RDMA", "TCP through UCX"
  std::vector<std::string> servers;  // hosts of dedicated servers, one for each of their engines
  double servers_share = 0;
  std::string servers_why;  // why none is used; empty where one is
  std::string text;         // all of it, one line
};

struct SummaryOptions {
  std::string transport;
  std::size_t servers_named = 0;  // by HYBRIDPS_SERVERS of rank 0
  bool servers_wanted = true;     // by the group's options
  int servers_nodes_min = 3;
};

GroupSummary summarise(const bootstrap::Roster& roster, const schedule::Topology& topology,
                       const SummaryOptions& options);

/// What ranks complain about in their settings (MemberRecord::notes), each once with who does:
/// "unknown setting X is ignored (ranks [0, 2])".
std::vector<std::string> complaints_of(const bootstrap::Roster& roster);

}  // namespace hybridps::engine
