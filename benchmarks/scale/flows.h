// benchmarks/scale/flows.h: what an allreduce or a barrier puts on cards, racks and ranks, counted from the real plan.
//
// Model    Flows instead of packets. schedule::make_plan() makes the spans, which are the same on all ranks. Each span
//          is followed through the roles of worker/span_view.h: inside a node to its agent, to the owner or by the
//          gateway of a region, and back. All ranks are counted, so nothing rests on symmetry.
// Not here announcements, grants, credit and control messages; packing and codecs; queues; the cost of a byte.
// Checked  tests/unit/cluster/scale_test.cpp: the same counts as engines that do it.
// Threads  pure functions.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <set>
#include <string_view>
#include <vector>

#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/topology.h"

namespace hybridps::scale {

/// Messages with a chunk.
struct MemberLoad {
  std::uint64_t sent = 0;  // over the network
  std::uint64_t received = 0;
  std::uint64_t sent_here = 0;  // to ranks of the own node
  std::uint64_t received_here = 0;
  std::uint64_t network() const noexcept { return sent + received; }
};

struct Loads {
  std::vector<std::uint64_t> card_sent;  // bytes, by node, then by dedicated server
  std::vector<std::uint64_t> card_received;
  std::vector<std::uint64_t> rack_sent;  // bytes that leave a rack, by rack
  std::vector<std::uint64_t> rack_received;
  std::vector<MemberLoad> members;  // by rank, then by dedicated server
  std::size_t spans = 0;
  bool levels = false;
  int steps = 0;  // messages over the network, one after the other
};

namespace detail {

/// Who speaks for each node in the spans of owners with one local index.
class Agents {
 public:
  explicit Agents(const schedule::Topology& topology) : topology_(topology) {}
  const std::vector<int>& of(int owner) {
    const int index = topology_.is_dedicated(owner) ? owner - topology_.size() : topology_.local_index(owner);
    if (static_cast<std::size_t>(index) >= by_index_.size()) by_index_.resize(static_cast<std::size_t>(index) + 1);
    std::vector<int>& agents = by_index_[static_cast<std::size_t>(index)];
    if (agents.empty())
      for (int node = 0; node < topology_.nodes(); ++node) agents.push_back(topology_.agent(node, owner));
    return agents;
  }

 private:
  const schedule::Topology& topology_;
  std::vector<std::vector<int>> by_index_;
};

/// By region: the node that acts for it in spans of `owner`; empty: the span has no levels.
inline std::vector<int> gateways(const schedule::Topology& topology, const schedule::Span& span) {
  std::vector<int> nodes;
  if (!span.levels) return nodes;
  for (int region = 0; region < topology.regions(); ++region)
    nodes.push_back(topology.gateway_node(region, span.owner));
  return nodes;
}

/// The node that `node` sends to; -1: the owner itself, a dedicated server.
inline int parent(const schedule::Topology& topology, const std::vector<int>& gateways, int node, int owner_node) {
  if (gateways.empty()) return owner_node;
  const int gateway = gateways[static_cast<std::size_t>(topology.region_of(node))];
  return gateway == node ? owner_node : gateway;
}

}  // namespace detail

/// `rack_of`: by card, that is by node and then by dedicated server.
inline Loads count_loads(const schedule::Request& request, const schedule::Topology& topology,
                         const schedule::Limits& limits, const std::vector<int>& rack_of) {
  const auto nodes = static_cast<std::size_t>(topology.nodes());
  const auto ranks = static_cast<std::size_t>(topology.size());
  const auto servers = static_cast<std::size_t>(topology.servers());
  const auto racks = static_cast<std::size_t>(1 + *std::max_element(rack_of.begin(), rack_of.end()));
  Loads loads;
  loads.card_sent.assign(nodes + servers, 0);
  loads.card_received.assign(nodes + servers, 0);
  loads.rack_sent.assign(racks, 0);
  loads.rack_received.assign(racks, 0);
  loads.members.assign(ranks + servers, {});
  const std::vector<schedule::Span> plan = schedule::make_plan(request, topology, limits);
  loads.spans = plan.size();
  detail::Agents agents(topology);
  std::vector<std::uint64_t> pushed(nodes, 0);    // chunks that each rank of a node brings to its agents
  std::vector<std::uint64_t> resulted(nodes, 0);  // and gets from them
  std::vector<std::uint64_t> pushed_to(ranks, 0);
  std::vector<std::uint64_t> resulted_by(ranks, 0);
  for (const schedule::Span& span : plan) {
    const int owner_node = topology.node_of(span.owner);
    const std::size_t owner_card =
        owner_node >= 0 ? static_cast<std::size_t>(owner_node) : nodes + static_cast<std::size_t>(span.owner) - ranks;
    const std::vector<int>& agent_of = agents.of(span.owner);
    const std::vector<int> gateways = detail::gateways(topology, span);
    loads.levels |= span.levels;
    for (std::size_t node = 0; node < nodes; ++node) {
      const int agent = agent_of[node];
      const bool takes =
          span.taker_region == schedule::kAll || topology.region_of(static_cast<int>(node)) == span.taker_region;
      pushed[node] += span.chunks;
      pushed_to[static_cast<std::size_t>(agent)] += span.chunks;
      if (takes) {
        resulted[node] += span.chunks;
        resulted_by[static_cast<std::size_t>(agent)] += span.chunks;
      }
      if (agent == span.owner) continue;
      const int above = detail::parent(topology, gateways, static_cast<int>(node), owner_node);
      const bool to_owner = above < 0 || above == owner_node;
      const std::size_t card = to_owner ? owner_card : static_cast<std::size_t>(above);
      const int to = to_owner ? span.owner : agent_of[static_cast<std::size_t>(above)];
      MemberLoad& low = loads.members[static_cast<std::size_t>(agent)];
      MemberLoad& high = loads.members[static_cast<std::size_t>(to)];
      low.sent += span.chunks;
      high.received += span.chunks;
      loads.card_sent[node] += span.bytes;
      loads.card_received[card] += span.bytes;
      const auto rack = static_cast<std::size_t>(rack_of[node]);
      const auto rack_above = static_cast<std::size_t>(rack_of[card]);
      if (rack != rack_above) {
        loads.rack_sent[rack] += span.bytes;
        loads.rack_received[rack_above] += span.bytes;
      }
      if (!takes) continue;
      high.sent += span.chunks;
      low.received += span.chunks;
      loads.card_sent[card] += span.bytes;
      loads.card_received[node] += span.bytes;
      if (rack != rack_above) {
        loads.rack_sent[rack_above] += span.bytes;
        loads.rack_received[rack] += span.bytes;
      }
    }
  }
  for (std::size_t rank = 0; rank < ranks; ++rank) {
    const auto node = static_cast<std::size_t>(topology.node_of(static_cast<int>(rank)));
    const std::uint64_t others = topology.ranks_of(static_cast<int>(node)).size() - 1;
    if (others == 0) continue;
    MemberLoad& load = loads.members[rank];
    load.sent_here = pushed[node] - pushed_to[rank] + others * resulted_by[rank];
    load.received_here = resulted[node] - resulted_by[rank] + others * pushed_to[rank];
  }
  loads.steps = topology.nodes() + topology.servers() > 1 ? (loads.levels ? 4 : 2) : 0;
  return loads;
}

/// Members of other nodes that `rank` exchanges chunks with.
inline std::size_t count_peers(const schedule::Request& request, const schedule::Topology& topology,
                               const schedule::Limits& limits, int rank) {
  std::set<int> peers;
  detail::Agents agents(topology);
  const int node = topology.node_of(rank);
  for (const schedule::Span& span : schedule::make_plan(request, topology, limits)) {
    const std::vector<int>& agent_of = agents.of(span.owner);
    if (span.owner != rank && (node < 0 || agent_of[static_cast<std::size_t>(node)] != rank)) continue;
    const int owner_node = topology.node_of(span.owner);
    const std::vector<int> gateways = detail::gateways(topology, span);
    const auto member_at = [&](int above) {
      return above < 0 || above == owner_node ? span.owner : agent_of[static_cast<std::size_t>(above)];
    };
    if (span.owner != rank) peers.insert(member_at(detail::parent(topology, gateways, node, owner_node)));
    if (span.owner != rank && gateways.empty()) continue;
    for (int other = 0; other < topology.nodes(); ++other) {
      const int agent = agent_of[static_cast<std::size_t>(other)];
      if (agent != rank && agent != span.owner &&
          member_at(detail::parent(topology, gateways, other, owner_node)) == rank)
        peers.insert(agent);
    }
  }
  return peers.size();
}

struct Links {
  double card_bytes_per_second = 0;
  double latency_seconds = 0;
  double oversubscribed = 1;  // a rack's uplink carries what its cards carry, by this
  double message_seconds = 0;
};

struct Estimate {
  double seconds = 0;
  std::string_view bound;  // what the time is made of: "card", "uplink", "messages", "latency"
};

/// The busiest card, uplink or rank, and the latency of the steps. What is busy works at the same time.
inline Estimate estimate(const Loads& loads, const std::vector<int>& rack_of, const Links& links) {
  std::vector<double> cards_in(loads.rack_sent.size(), 0.0);
  for (const int rack : rack_of) cards_in[static_cast<std::size_t>(rack)] += 1.0;
  double card = 0;
  for (std::size_t i = 0; i < loads.card_sent.size(); ++i)
    card = std::max(card, static_cast<double>(std::max(loads.card_sent[i], loads.card_received[i])));
  card /= links.card_bytes_per_second;
  double uplink = 0;
  for (std::size_t i = 0; i < cards_in.size(); ++i)
    uplink = std::max(uplink, static_cast<double>(std::max(loads.rack_sent[i], loads.rack_received[i])) *
                                  links.oversubscribed / (links.card_bytes_per_second * cards_in[i]));
  std::uint64_t most = 0;
  for (const MemberLoad& member : loads.members) most = std::max(most, member.network());
  const double messages = static_cast<double>(most) * links.message_seconds;
  const double latency = loads.steps * links.latency_seconds;
  const double busiest = std::max({card, uplink, messages});
  const std::string_view bound = latency >= busiest  ? "latency"
                                 : busiest == card   ? "card"
                                 : busiest == uplink ? "uplink"
                                                     : "messages";
  return {busiest + latency, bound};
}

}  // namespace hybridps::scale
