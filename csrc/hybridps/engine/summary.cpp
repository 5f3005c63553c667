#include "hybridps/engine/summary.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <map>
#include <utility>

#include "hybridps/core/text.h"

namespace hybridps::engine {
namespace {

std::string text_of(const bootstrap::Nic& nic) {
  std::string more = nic.network;
  if (nic.gbps > 0) more += (more.empty() ? "" : ", ") + core::format_double(nic.gbps) + " Gbit/s";
  return nic.name + (more.empty() ? "" : " (" + more + ")");
}

std::string data_of(const bootstrap::MemberRecord& member) {
  std::string text;
  for (const bootstrap::Nic& nic : member.nics) text += (text.empty() ? "" : " + ") + text_of(nic);
  if (member.node_gbps > 0) text += " at " + core::format_double(member.node_gbps) + " Gbit/s (HYBRIDPS_NIC_GBPS)";
  return text;
}

std::string percent(double share) {
  char text[24];
  std::snprintf(text, sizeof text, "%.0f %%", 100 * share);
  return text;
}

std::string counted(std::size_t count, const std::string& thing) {
  return std::to_string(count) + " " + thing + (count == 1 ? "" : "s");
}

/// One text if all nodes have the same text. Otherwise the texts of the first kShown nodes.
template <typename Of>
std::string of_nodes(const std::vector<GroupSummary::NodeSummary>& nodes, const Of& of) {
  const std::string first = of(nodes[0]);
  if (std::all_of(nodes.begin(), nodes.end(), [&](const auto& node) { return of(node) == first; })) return first;
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(nodes.size(), kShown); ++i)
    text += (text.empty() ? "" : ", ") + of(nodes[i]) + " on " + nodes[i].host;
  return nodes.size() > kShown ? text + ", ..." : text;
}

std::string nodes_text(const std::vector<GroupSummary::NodeSummary>& nodes) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(nodes.size(), kShown); ++i)
    text += (text.empty() ? "" : ", ") + nodes[i].host + " " + core::format_ranks(nodes[i].ranks, 8);
  return nodes.size() > kShown ? text + ", ..." : text;
}

std::string regions_text(const bootstrap::Roster& roster, const schedule::Topology& topology) {
  const bool are_found = !roster.region_of.empty();
  if (roster.members.front().region.empty() && !are_found) return "";
  if (topology.regions() == 1) return "; in 1 region";
  std::string text = "; large operations go through gateways of " +
                     counted(static_cast<std::size_t>(topology.regions()), "region") +
                     (are_found ? ", found by round trips:" : ":");
  for (int region = 0; region < topology.regions(); ++region) {
    const std::vector<int>& nodes = topology.nodes_in(region);
    const int rank = topology.ranks_of(nodes.front()).front();
    const bootstrap::MemberRecord& first = roster.members[static_cast<std::size_t>(rank)];
    const std::string name = are_found ? "that of " + first.host_name : core::quoted(first.region);
    text += (region == 0 ? " " : ", ") + name + " of " + counted(nodes.size(), "node");
    std::size_t servers = 0;
    for (int server = 0; server < topology.servers(); ++server)
      servers += topology.region_of_owner(topology.size() + server) == region ? 1 : 0;
    if (servers > 0) text += " and " + counted(servers, "server");
  }
  for (std::size_t server = 0; server < roster.servers.size(); ++server)
    if (topology.region_of_owner(topology.size() + static_cast<int>(server)) == schedule::kNoRegion)
      text += ", the server on " + roster.servers[server].host_name + " in none of them" +
              (are_found ? "" : " (set HYBRIDPS_REGION there, as on the ranks)");
  return text;
}

std::string shares_text(const GroupSummary& summary) {
  const auto& nodes = summary.nodes;
  if (nodes.size() == 1 && summary.servers.empty()) return "";
  const bool equal = std::all_of(nodes.begin(), nodes.end(),
                                 [&](const auto& node) { return std::abs(node.share - nodes[0].share) < 0.005; });
  std::string text = "; of what is summed each node owns ";
  if (equal) {
    text += percent(nodes[0].share);
  } else {
    text = "; of what is summed " + of_nodes(nodes, [](const auto& node) { return percent(node.share); });
  }
  return text;
}

}  // namespace

GroupSummary summarise(const bootstrap::Roster& roster, const schedule::Topology& topology,
                       const SummaryOptions& options) {
  GroupSummary summary;
  summary.transport = options.transport;
  double all = 0;
  for (int node = 0; node < topology.nodes(); ++node) all += topology.weight(node);
  for (int server = 0; server < topology.servers(); ++server) {
    all += topology.server_weight(server);
    summary.servers_share += topology.server_weight(server);
  }
  for (int node = 0; node < topology.nodes(); ++node) {
    GroupSummary::NodeSummary& entry = summary.nodes.emplace_back();
    entry.ranks = topology.ranks_of(node);
    const bootstrap::MemberRecord& first = roster.members[static_cast<std::size_t>(entry.ranks[0])];
    entry.host = first.host_name;
    entry.share = topology.weight(node) / all;
    entry.data = data_of(first);
    entry.control = text_of(first.control);
  }
  summary.servers_share /= all;
  for (const bootstrap::MemberRecord& server : roster.servers) summary.servers.push_back(server.host_name);
  if (summary.servers.empty()) {
    if (options.servers_named == 0)
      summary.servers_why = "HYBRIDPS_SERVERS is not set";
    else if (!options.servers_wanted)
      summary.servers_why = "the options of the group leave them out";
    else if (topology.nodes() < options.servers_nodes_min)
      summary.servers_why = "servers help from " + std::to_string(options.servers_nodes_min) + " nodes on";
    else
      summary.servers_why = "none of the " + std::to_string(options.servers_named) + " named could be used";
  }

  std::string& text = summary.text;
  const auto ranks = static_cast<std::size_t>(topology.size());
  text = counted(ranks, "rank") + " on " + counted(summary.nodes.size(), "node") + ": " + nodes_text(summary.nodes);
  if (ranks > summary.nodes.size()) text += " (the ranks of a node share memory)";
  if (summary.nodes.size() > 1 || !summary.servers.empty()) {
    text += "; data by " + summary.transport + " through " +
            of_nodes(summary.nodes, [](const auto& node) { return node.data; });
    text += "; control through " + of_nodes(summary.nodes, [](const auto& node) { return node.control; });
  }
  text += regions_text(roster, topology);
  text += shares_text(summary);
  if (!summary.servers.empty()) {
    text += ", " + counted(summary.servers.size(), "dedicated server") + " the other " + percent(summary.servers_share);
  } else if (options.servers_named > 0) {
    text += "; dedicated servers are not used: " + summary.servers_why;
  } else {
    text += "; no dedicated servers";
  }
  if (const std::string& compress = roster.members.front().compress;
      !compress.empty() && !compress.starts_with("exact"))
    text += "; gradients compressed with " + compress;
  if (const std::string& priority = roster.members.front().priority; !priority.empty())
    text += "; priority " + priority;
  return summary;
}

std::vector<std::string> complaints_of(const bootstrap::Roster& roster) {
  std::vector<std::pair<std::string, std::vector<int>>> found;  // in the order of each note's first rank
  for (const bootstrap::MemberRecord& member : roster.members) {
    std::string_view rest = member.notes;
    while (!rest.empty()) {
      const std::size_t end = std::min(rest.find('\n'), rest.size());
      const std::string note(rest.substr(0, end));
      rest.remove_prefix(std::min(end + 1, rest.size()));
      auto at = std::find_if(found.begin(), found.end(), [&](const auto& entry) { return entry.first == note; });
      if (at == found.end()) at = found.insert(found.end(), {note, {}});
      at->second.push_back(member.group_rank);
    }
  }
  std::vector<std::string> complaints;
  for (const auto& [note, ranks] : found)
    complaints.push_back(
        note + (ranks.size() == roster.members.size() ? " (all ranks)" : " (ranks " + core::format_ranks(ranks) + ")"));
  return complaints;
}

}  // namespace hybridps::engine
