#include "hybridps/schedule/plan.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <functional>
#include <numeric>
#include <utility>

namespace hybridps::schedule {
namespace {

// Spans end on cache lines, so that no two owners write the same line of a result.
constexpr std::uint64_t kGranuleBytes = 64;
// Where equal spans of an aggregate would be smaller than this, spans are cut at multiples of this size.
constexpr std::uint64_t kSmallestSpanBytes = 1024;
constexpr std::uint64_t kSmallestChunkBytes = 16 * 1024;
constexpr std::uint64_t kLargestChunkBytes = 64 * 1024;
// The chunk size follows from this total for all senders to one card. The total is larger than the initial window:
// fewer, larger chunks cost less, and one or two chunks of each sender are enough on a slow network.
constexpr std::uint64_t kChunkWindowBytes = 384 * 1024;
// The default of window_bytes. The setting may differ from rank to rank, chunk sizes must not.
constexpr std::uint64_t kFirstWindowBytes = 128 * 1024;
constexpr std::uint64_t kChunkStepBytes = 4 * 1024;
// Operations of more than so many times Limits::tiny_bytes have levels.
constexpr std::uint64_t kLevelsAboveTiny = 8;
// Sums of at most so many bytes for each other region are made in each region: see exchanges().
constexpr std::uint64_t kExchangeBytesMax = 64 * 1024;
// A message costs at least as much as so many bytes: with many regions there are many.
constexpr std::uint64_t kExchangeBytesLeast = 8 * 1024;

std::uint32_t chunk_count(std::uint64_t bytes, std::uint32_t chunk_bytes) {
  return bytes == 0 ? 1 : static_cast<std::uint32_t>((bytes + chunk_bytes - 1) / chunk_bytes);
}

// Whether each region makes the whole sum for its own ranks. Contributions then cross the network between regions, and
// results do not: one way instead of two. Between two regions it is as many bytes, between more of them more.
bool exchanges(const Request& request, const Topology& topology) {
  if (!request.may_have_levels || request.is_coded || topology.regions() == 1) return false;
  return std::max(request.total_bytes, kExchangeBytesLeast) * static_cast<std::uint64_t>(topology.regions() - 1) <=
         kExchangeBytesMax;
}

struct Builder {
  std::uint32_t chunk_bytes;
  bool levels = false;
  std::vector<Span> spans{};

  void add(std::uint32_t id, int owner, int source, int sink, std::uint64_t bytes, std::uint64_t input_offset,
           std::uint64_t output_offset, int rail = kNoRail) {
    Span span;
    span.rail = rail;
    span.levels = levels;
    span.id = id;
    span.owner = owner;
    span.source = source;
    span.sink = sink;
    span.bytes = span.agreed_bytes = bytes;
    span.input_offset = span.agreed_offset = input_offset;
    span.output_offset = output_offset;
    span.chunk_bytes = chunk_bytes;
    span.chunks = chunk_count(bytes, chunk_bytes);
    spans.push_back(span);
  }
};

// In a reduce_scatter only contributions are under way, and the credit for each waits for the contributions of all
// other nodes. With one chunk from each sender, the cards can fall into a pattern in which one card is always idle (4
// hosts: 3/4 of the rate, in a third of the operations). With two chunks they do not.
std::uint32_t chunk_bytes_of(Kind kind, const Topology& topology, const Limits& limits) {
  if (kind != Kind::kReduceScatter) return limits.chunk_bytes;
  const std::uint64_t half = window_bytes(kFirstWindowBytes, topology.fan()) / 2;
  const std::uint64_t bytes = std::max(half / kChunkStepBytes * kChunkStepBytes, kSmallestChunkBytes);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(bytes, limits.chunk_bytes));
}

enum class Dedicated { kTakePart, kStayOut };

// The owners that share a tensor of `bytes`, with the bytes of each: every rank's server and the dedicated servers.
// Nodes for which `may_own` is false own nothing. A tiny tensor has one owner, among the ranks.
template <typename MayOwn>
std::vector<std::pair<int, std::uint64_t>> owner_cut(std::uint64_t bytes, const Topology& topology,
                                                     std::uint64_t sequence, MayOwn may_own, const Limits& limits,
                                                     Dedicated dedicated, std::uint64_t granule_bytes = kGranuleBytes) {
  std::vector<int> owners;
  std::vector<double> weights;
  owners.reserve(static_cast<std::size_t>(topology.size() + topology.servers()));
  weights.reserve(owners.capacity());
  for (int rank = 0; rank < topology.size(); ++rank) {
    if (!may_own(topology.node_of(rank))) continue;
    owners.push_back(rank);
    weights.push_back(topology.owner_weight(rank));
  }
  const std::size_t ranks = owners.size();
  if (dedicated == Dedicated::kTakePart) {
    for (int server = 0; server < topology.servers(); ++server) {
      if (topology.server_weight(server) <= 0.0) continue;
      owners.push_back(topology.size() + server);
      weights.push_back(topology.server_weight(server));
    }
  }
  if (bytes <= limits.tiny_bytes || owners.size() == 1)
    return {{owners[static_cast<std::size_t>(sequence % ranks)], bytes}};
  const std::uint64_t granule =
      std::max(bytes / owners.size() >= kSmallestSpanBytes ? kGranuleBytes : kSmallestSpanBytes, granule_bytes);
  const std::vector<std::uint64_t> cut = cut_by_weight(bytes, weights, granule);
  std::vector<std::pair<int, std::uint64_t>> result;
  for (std::size_t i = 0; i < owners.size(); ++i) result.emplace_back(owners[i], cut[i]);
  return result;
}

std::uint64_t at(const std::vector<std::uint64_t>& bytes, int rank) {
  return static_cast<std::size_t>(rank) < bytes.size() ? bytes[static_cast<std::size_t>(rank)] : 0;
}

void add_exchange(const Request& request, const Topology& topology, const Limits& limits, Builder& plan) {
  for (int region = 0; region < topology.regions(); ++region) {
    std::uint64_t offset = 0;
    const auto is_there = [&](int node) { return topology.region_of(node) == region; };
    for (const auto& [owner, bytes] : owner_cut(request.total_bytes, topology, request.sequence, is_there, limits,
                                                Dedicated::kStayOut, request.granule_bytes)) {
      if (bytes > 0 || request.total_bytes == 0) {
        plan.add(static_cast<std::uint32_t>(owner), owner, kAll, kAll, bytes, offset, offset);
        plan.spans.back().taker_region = region;
      }
      offset += bytes;
    }
  }
}

/// The rail whose ranks act for their nodes towards this dedicated server, the owner of at most one span per operation.
int rail_of_server(int server, const Topology& topology) {
  const int rails = topology.rails();
  if (server < rails) return server;
  const bool even = topology.size() == rails * topology.nodes();
  return even ? server % rails : kNoRail;
}

// The owners that share one rail's part of an allreduce: the rail's rank of each node, by the node's weight, and the
// dedicated servers of this rail. A server takes its share of the whole tensor, at most the rail's part.
std::vector<std::pair<int, std::uint64_t>> rail_cut(std::uint64_t bytes, int rail, const Topology& topology,
                                                    std::uint64_t sequence, const Limits& limits, Dedicated dedicated,
                                                    std::uint64_t granule_bytes) {
  const int nodes = topology.nodes();
  if (bytes <= limits.tiny_bytes)
    return {{topology.rail_rank(static_cast<int>(sequence % static_cast<std::uint64_t>(nodes)), rail), bytes}};
  double of_nodes = 0.0;
  double of_servers = 0.0;
  double here = 0.0;
  // The node's weight, corrected for how the node's ranks share its cards.
  const auto node_weight = [&](int node) {
    return topology.owner_weight(topology.rail_rank(node, rail)) * static_cast<double>(topology.ranks_of(node).size());
  };
  for (int node = 0; node < nodes; ++node) of_nodes += node_weight(node);
  if (dedicated == Dedicated::kTakePart) {
    for (int server = 0; server < topology.servers(); ++server) {
      of_servers += topology.server_weight(server);
      if (rail_of_server(server, topology) == rail) here += topology.server_weight(server);
    }
  }
  const double total = of_nodes + of_servers;
  const double part = total > 0.0 ? std::min(1.0, here * topology.rails() / total) : 0.0;  // servers' part
  std::vector<int> owners;
  std::vector<double> weights;
  for (int node = 0; node < nodes; ++node) {
    owners.push_back(topology.rail_rank(node, rail));
    weights.push_back(of_nodes > 0.0 ? (1.0 - part) * node_weight(node) / of_nodes : 0.0);
  }
  for (int server = 0; here > 0.0 && server < topology.servers(); ++server) {
    if (rail_of_server(server, topology) != rail || topology.server_weight(server) <= 0.0) continue;
    owners.push_back(topology.size() + server);
    weights.push_back(part * topology.server_weight(server) / here);
  }
  const std::uint64_t granule =
      std::max(bytes / owners.size() >= kSmallestSpanBytes ? kGranuleBytes : kSmallestSpanBytes, granule_bytes);
  const std::vector<std::uint64_t> cut = cut_by_weight(bytes, weights, granule);
  std::vector<std::pair<int, std::uint64_t>> result;
  for (std::size_t i = 0; i < owners.size(); ++i) result.emplace_back(owners[i], cut[i]);
  return result;
}

/// Gather, scatter and all_to_all: one span for each pair of ranks that includes this rank. Scope::kNodes: only pairs
/// on two nodes. Scope::kWitness: only pairs on one node, with the expected size but without bytes.
void add_pairs(const Request& request, const Topology& topology, Builder& plan) {
  const int me = topology.rank();
  const int size = topology.size();
  const auto takes_part = [&](int other) {
    const bool here = topology.node_of(other) == topology.my_node();
    switch (request.scope) {
      case Scope::kRanks: return true;
      case Scope::kNodes: return !here;
      case Scope::kWitness: return here && other != me;
    }
    return false;
  };
  // The offset of each rank's part in this rank's input or output, which hold only the parts of ranks that take part.
  const auto offsets = [&](const std::vector<std::uint64_t>& bytes) {
    std::vector<std::uint64_t> result;
    std::uint64_t sum = 0;
    for (int rank = 0; rank < size; ++rank) {
      result.push_back(sum);
      if (takes_part(rank)) sum += at(bytes, rank);
    }
    return result;
  };
  const bool witness = request.scope == Scope::kWitness;
  const auto add = [&](std::uint32_t id, int source, int sink, std::uint64_t bytes, std::uint64_t input_offset,
                       std::uint64_t output_offset) {
    // The first ids belong to the span of all ranks.
    if (witness)
      plan.add(static_cast<std::uint32_t>(size) + id, source, source, sink, 0, 0, 0);
    else
      plan.add(id, source, source, sink, bytes, input_offset, output_offset);
    plan.spans.back().agreed_bytes = bytes;
  };
  const auto& input = request.input_bytes;
  const auto& output = request.output_bytes;
  const std::vector<std::uint64_t> input_at = offsets(input);
  const std::vector<std::uint64_t> output_at = offsets(output);
  const auto own = static_cast<std::uint32_t>(me);
  switch (request.kind) {
    case Kind::kGather:
      if (me != request.root) {
        if (takes_part(request.root)) add(own, me, request.root, at(input, me), 0, 0);
        break;
      }
      for (int from = 0; from < size; ++from)
        if (takes_part(from)) add(static_cast<std::uint32_t>(from), from, me, at(output, from), 0, at(output_at, from));
      break;
    case Kind::kScatter:
      if (me != request.root) {
        if (takes_part(request.root)) add(own, request.root, me, at(output, me), 0, 0);
        break;
      }
      for (int to = 0; to < size; ++to)
        if (takes_part(to)) add(static_cast<std::uint32_t>(to), me, to, at(input, to), at(input_at, to), 0);
      break;
    case Kind::kAllToAll: {
      const auto id = [size](int from, int to) { return static_cast<std::uint32_t>(from * size + to); };
      // The loop over destinations starts at the own rank, so that not all ranks send to rank 0 first.
      for (int step = 0; step < size; ++step) {
        const int to = (me + step) % size;
        if (takes_part(to)) add(id(me, to), me, to, at(input, to), at(input_at, to), to == me ? at(output_at, me) : 0);
      }
      for (int step = 1; step < size; ++step) {
        const int from = (me + size - step) % size;
        if (takes_part(from)) add(id(from, me), from, me, at(output, from), 0, at(output_at, from));
      }
      break;
    }
    default: break;
  }
}

// Sends the bytes of one rail from the root's node to all other nodes. Up to one chunk, the source rank sends them
// itself. Above, each other node owns and forwards a part.
template <typename Id>
void add_rail_broadcast(const Request& request, const Topology& topology, const Limits& limits, int rail,
                        std::uint64_t bytes, std::uint64_t offset, const Id& id, Builder& plan) {
  const int root_node = topology.node_of(request.root);
  const int source = topology.rail_rank(root_node, rail);
  if (topology.nodes() <= 2 || bytes <= limits.chunk_bytes)
    return plan.add(id(source, rail), source, source, kAll, bytes, offset, offset, rail);
  std::vector<double> weights;
  for (int node = 0; node < topology.nodes(); ++node)
    if (node != root_node) weights.push_back(topology.weight(node));
  const std::vector<std::uint64_t> cut = cut_by_weight(bytes, weights, kGranuleBytes);
  for (int node = 0, i = 0; node < topology.nodes(); ++node) {
    if (node == root_node) continue;
    const std::uint64_t part = cut[static_cast<std::size_t>(i++)];
    const int owner = topology.rail_rank(node, rail);
    if (part > 0) plan.add(id(owner, rail), owner, source, kAll, part, offset, offset, rail);
    offset += part;
  }
}

std::vector<Span> plan_between_nodes(const Request& request, const Topology& topology, const Limits& limits) {
  Builder plan{chunk_bytes_of(request.kind, topology, limits), has_levels(request, topology, limits)};
  const int me = topology.rank();
  const int my_node = topology.my_node();
  const auto members = static_cast<std::uint32_t>(topology.size() + topology.servers());
  // A rank of a small node owns spans in several rails. The id of a dedicated server's span is the server's number.
  const auto id = [&](int owner, int rail) {
    return static_cast<std::uint32_t>(owner) +
           (topology.is_dedicated(owner) ? 0 : members * static_cast<std::uint32_t>(rail + 1));
  };
  std::uint64_t offset = 0;  // in this rank's input or output
  std::uint64_t agreed = 0;  // in the tensor of all ranks
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kBroadcast:
      for (int rail = 0; rail < topology.rails(); ++rail) {
        const std::uint64_t bytes = at(request.rail_bytes, rail);
        const std::uint64_t rail_begin = agreed;
        agreed += bytes;
        if (topology.rail_rank(my_node, rail) != me || bytes == 0) continue;
        const std::uint64_t offset_of_rail = offset;
        if (request.kind == Kind::kBroadcast) {
          add_rail_broadcast(request, topology, limits, rail, bytes, offset, id, plan);
          offset += bytes;
          continue;
        }
        const bool reduce = request.kind == Kind::kReduce;
        const int sink = reduce ? topology.rail_rank(topology.node_of(request.root), rail) : kAll;
        // A dedicated server would send the result of a reduce to the root, not to the rail's rank of the root's node.
        for (const auto& [owner, part] :
             rail_cut(bytes, rail, topology, request.sequence, limits,
                      reduce ? Dedicated::kStayOut : Dedicated::kTakePart, request.granule_bytes)) {
          if (part > 0) {
            plan.add(id(owner, rail), owner, kAll, sink, part, offset, offset, rail);
            plan.spans.back().agreed_offset = rail_begin + (offset - offset_of_rail);
          }
          offset += part;
        }
      }
      break;
    case Kind::kReduceScatter:
      for (int rank = 0; rank < topology.size(); ++rank) {
        const int rail = topology.local_index(rank);
        const std::uint64_t bytes = at(request.input_bytes, rank);
        const std::uint64_t begin = agreed;
        agreed += bytes;
        if (topology.rail_rank(my_node, rail) != me) continue;
        plan.add(static_cast<std::uint32_t>(rank), rank, kAll, rank, bytes, offset, 0, rail);
        plan.spans.back().agreed_offset = begin;
        offset += bytes;
      }
      break;
    case Kind::kAllGather:
      for (int rank = 0; rank < topology.size(); ++rank) {
        const int rail = topology.local_index(rank);
        const bool mine = rank == me;
        if (!mine && (topology.node_of(rank) == my_node || topology.rail_rank(my_node, rail) != me)) continue;
        const std::uint64_t bytes = at(request.output_bytes, rank);
        plan.add(static_cast<std::uint32_t>(rank), rank, rank, kAll, bytes, 0, mine ? 0 : offset, rail);
        if (!mine) offset += bytes;
      }
      break;
    case Kind::kGather:
    case Kind::kScatter:
    case Kind::kAllToAll: add_pairs(request, topology, plan); break;
    default: assert(false && "this kind has no scope between nodes"); break;
  }
  return std::move(plan.spans);
}

// What an allreduce with levels sends from topology.rank() to `member`, in tensors: contributions, and results.
double flow_with_levels(const Topology& topology, int member, const std::function<double(int)>& share) {
  const int me = topology.rank();
  if (topology.is_dedicated(me) || topology.is_dedicated(member)) {
    const int server = topology.is_dedicated(me) ? me : member;
    const int rank = topology.is_dedicated(me) ? member : me;
    if (topology.is_dedicated(rank)) return 0.0;
    const int node = topology.node_of(rank);
    const bool meets = topology.agent(node, server) == rank && topology.parent_node(node, server) < 0;
    return meets ? share(server) : 0.0;
  }
  const int node = topology.node_of(member);
  double flow = 0.0;
  for (int owner = 0; owner < topology.size() + topology.servers(); ++owner) {
    if (topology.agent(topology.my_node(), owner) != me || topology.agent(node, owner) != member) continue;
    const bool pushes = me != owner && topology.parent_node(topology.my_node(), owner) == node;
    const bool results = member != owner && topology.parent_node(node, owner) == topology.my_node();
    if (pushes || results) flow += share(owner);
  }
  return flow;
}

}  // namespace

std::string_view name_of(Kind kind) noexcept {
  switch (kind) {
    case Kind::kAllReduce: return "allreduce";
    case Kind::kReduce: return "reduce";
    case Kind::kReduceScatter: return "reduce_scatter";
    case Kind::kBarrier: return "barrier";
    case Kind::kBroadcast: return "broadcast";
    case Kind::kAllGather: return "all_gather";
    case Kind::kGather: return "gather";
    case Kind::kScatter: return "scatter";
    case Kind::kAllToAll: return "all_to_all";
    case Kind::kPointToPoint: return "send/recv";
    case Kind::kGoodbye: return "goodbye";
  }
  return "unknown";
}

std::uint64_t window_bytes(std::uint64_t card_bytes, std::uint64_t fan) noexcept {
  return std::max<std::uint64_t>(card_bytes / std::max<std::uint64_t>(1, fan), 2 * kSmallestChunkBytes);
}

namespace {

/// What an uplink with few streams may have under way, in windows of a card. With one window the uplink idles while a
/// stream waits for a lost packet.
constexpr double kUplinkWindows = 4.0;
/// An uplink with more streams has no windows of its own: each stream has its part of the card.
constexpr int kUplinkStreamsMax = 4;

/// Streams over the uplink of `region` in an allreduce with levels.
int uplink_streams(const Topology& topology, int region) {
  std::size_t streams = 0;
  for (int other = 0; other < topology.regions(); ++other)
    if (other != region) streams += std::max(topology.nodes_in(region).size(), topology.nodes_in(other).size());
  return static_cast<int>(streams) * topology.rails();
}

/// What the busier uplink between this rank and `member` carries in an allreduce with levels, in tensors. 0: there is
/// none between them, or it carries many streams. Streams to dedicated servers keep their part of the card.
double uplink_load(const Topology& topology, int member) {
  if (topology.regions() < 2 || topology.is_dedicated(member) || topology.is_dedicated(topology.rank())) return 0.0;
  const int here = topology.region_of(topology.my_node());
  const int there = topology.region_of(topology.node_of(member));
  if (here == there) return 0.0;
  if (std::max(uplink_streams(topology, here), uplink_streams(topology, there)) > kUplinkStreamsMax) return 0.0;
  double total = 0.0;
  for (int node = 0; node < topology.nodes(); ++node) total += topology.weight(node);
  const auto load = [&](int region) {
    double owned = 0.0;
    for (const int node : topology.nodes_in(region)) owned += topology.weight(node);
    return 1.0 + (topology.regions() - 2) * (total > 0.0 ? owned / total : 1.0);
  };
  return std::max(load(here), load(there));
}

}  // namespace

std::vector<std::uint64_t> windows_bytes(std::uint64_t card_bytes, const Topology& topology) {
  const int me = topology.rank();
  const int ranks = topology.size();
  const int members = ranks + topology.servers();
  double total = 0.0;
  for (int node = 0; node < topology.nodes(); ++node) total += topology.weight(node);
  for (int server = 0; server < topology.servers(); ++server) total += topology.server_weight(server);
  if (total <= 0.0) total = 1.0;
  const auto share = [&](int owner) {
    if (topology.is_dedicated(owner)) return topology.server_weight(owner - ranks) / total;
    return topology.owner_weight(owner) / total;
  };
  // Bytes of the busiest card, in tensors (schedule/shares.h). Where a node has several cards, each card has a part.
  double busiest = 0.0;
  std::size_t ranks_max = 1;
  for (int node = 0; node < topology.nodes(); ++node) {
    busiest = std::max(busiest, 1.0 + (topology.nodes() - 2) * topology.weight(node) / total);
    ranks_max = std::max(ranks_max, topology.ranks_of(node).size());
  }
  busiest *= std::min(1.0, topology.ranks_per_card() / static_cast<double>(ranks_max));
  for (int server = 0; server < topology.servers(); ++server)
    busiest = std::max(busiest, topology.nodes() * topology.server_weight(server) / total);

  const std::uint64_t equal = window_bytes(card_bytes, topology.fan());
  std::vector<std::uint64_t> windows(static_cast<std::size_t>(members), 0);
  for (int member = 0; member < members; ++member) {
    if (member == me || (topology.node_of(member) >= 0 && topology.node_of(member) == topology.my_node())) continue;
    double flow = 0.0;
    if (topology.regions() > 1) {
      flow = flow_with_levels(topology, member, share);
    } else {
      if (!topology.is_dedicated(me) && topology.agent(topology.my_node(), member) == me) flow += share(member);
      if (!topology.is_dedicated(member) && topology.agent(topology.node_of(member), me) == member) flow += share(me);
    }
    auto part = static_cast<std::uint64_t>(static_cast<double>(card_bytes) * flow / busiest);
    if (const double uplink = uplink_load(topology, member); uplink > 0.0)
      part =
          std::max(part, static_cast<std::uint64_t>(kUplinkWindows * static_cast<double>(card_bytes) * flow / uplink));
    windows[static_cast<std::size_t>(member)] = flow > 0.0 ? std::max(part, 2 * kSmallestChunkBytes) : equal;
  }
  return windows;
}

std::uint32_t chunk_bytes_for(const Topology& topology, std::uint64_t chunk_bytes_max) noexcept {
  // A rank with several cards needs several chunks under way on each card, for each peer.
  const double streams =
      std::max(1.0, topology.ranks_per_card()) * std::max(1, topology.nodes() - 1 + topology.servers());
  const double cards_of_rank = std::max(1.0, 1.0 / topology.ranks_per_card());
  const auto fan = static_cast<std::uint64_t>(std::ceil(streams * cards_of_rank));
  std::uint64_t bytes = kSmallestChunkBytes;
  while (bytes * 2 * 3 <= window_bytes(kChunkWindowBytes, fan) && bytes * 2 <= kLargestChunkBytes) bytes *= 2;
  return static_cast<std::uint32_t>(std::min(bytes, chunk_bytes_max));
}

std::vector<std::uint64_t> cut_by_weight(std::uint64_t bytes, const std::vector<double>& weights,
                                         std::uint64_t granule) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  // For example, only the source's node has a share, and the other nodes must forward.
  if (total <= 0.0) return cut_by_weight(bytes, std::vector<double>(weights.size(), 1.0), granule);
  std::vector<std::uint64_t> parts;
  double running = 0.0;
  std::uint64_t done = 0;
  for (std::size_t i = 0; i < weights.size(); ++i) {
    running += weights[i];
    std::uint64_t end = bytes;
    if (i + 1 < weights.size()) {
      const double exact = static_cast<double>(bytes) * (running / total);
      end = static_cast<std::uint64_t>(exact / static_cast<double>(granule) + 0.5) * granule;
      end = std::clamp(end, done, bytes);
    }
    parts.push_back(end - done);
    done = end;
  }
  return parts;
}

bool has_levels(const Request& request, const Topology& topology, const Limits& limits) {
  if (!request.may_have_levels || topology.regions() == 1) return false;
  const auto sum = [](const std::vector<std::uint64_t>& bytes) {
    return std::accumulate(bytes.begin(), bytes.end(), std::uint64_t{0});
  };
  std::uint64_t bytes = 0;
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kBroadcast: bytes = request.total_bytes; break;
    case Kind::kReduceScatter: bytes = sum(request.input_bytes); break;
    case Kind::kAllGather: bytes = sum(request.output_bytes); break;
    default: return false;
  }
  return bytes > kLevelsAboveTiny * limits.tiny_bytes;
}

std::vector<Span> make_plan(const Request& request, const Topology& topology, const Limits& limits) {
  if (request.scope == Scope::kNodes) return plan_between_nodes(request, topology, limits);
  Builder plan{chunk_bytes_of(request.kind, topology, limits), has_levels(request, topology, limits)};
  if (request.scope == Scope::kWitness) {
    const int owner = static_cast<int>(request.sequence % static_cast<std::uint64_t>(topology.size()));
    plan.add(static_cast<std::uint32_t>(owner), owner, kAll, kAll, 0, 0, 0);
    add_pairs(request, topology, plan);
    return std::move(plan.spans);
  }
  const int me = topology.rank();
  const int size = topology.size();
  switch (request.kind) {
    case Kind::kAllReduce:
    case Kind::kReduce: {
      const int sink = request.kind == Kind::kReduce ? request.root : kAll;
      if (sink == kAll && exchanges(request, topology)) {
        add_exchange(request, topology, limits, plan);
        break;
      }
      std::uint64_t offset = 0;
      for (const auto& [owner, bytes] : owner_cut(
               request.total_bytes, topology, request.sequence, [](int) { return true; }, limits, Dedicated::kTakePart,
               request.granule_bytes)) {
        if (bytes > 0 || request.total_bytes == 0)
          plan.add(static_cast<std::uint32_t>(owner), owner, kAll, sink, bytes, offset, offset);
        offset += bytes;
      }
      break;
    }
    case Kind::kBarrier:
    case Kind::kGoodbye: {
      if (request.kind == Kind::kBarrier && exchanges(request, topology)) {
        add_exchange(request, topology, limits, plan);
        break;
      }
      const int owner = static_cast<int>(request.sequence % static_cast<std::uint64_t>(size));
      plan.add(static_cast<std::uint32_t>(owner), owner, kAll, kAll, 0, 0, 0);
      break;
    }
    case Kind::kReduceScatter: {
      std::uint64_t offset = 0;
      for (int rank = 0; rank < size; ++rank) {
        plan.add(static_cast<std::uint32_t>(rank), rank, kAll, rank, at(request.input_bytes, rank), offset, 0);
        offset += at(request.input_bytes, rank);
      }
      break;
    }
    case Kind::kBroadcast: {
      const int root_node = topology.node_of(request.root);
      // One hop for small tensors. Two hops for large tensors: then each card carries the tensor once.
      if (topology.nodes() <= 2 || request.total_bytes <= limits.chunk_bytes) {
        plan.add(static_cast<std::uint32_t>(request.root), request.root, request.root, kAll, request.total_bytes, 0, 0);
        break;
      }
      std::uint64_t offset = 0;
      for (const auto& [owner, bytes] : owner_cut(
               request.total_bytes, topology, request.sequence, [=](int node) { return node != root_node; }, limits,
               Dedicated::kStayOut)) {
        if (bytes > 0) plan.add(static_cast<std::uint32_t>(owner), owner, request.root, kAll, bytes, offset, offset);
        offset += bytes;
      }
      break;
    }
    case Kind::kAllGather: {
      std::uint64_t offset = 0;
      for (int rank = 0; rank < size; ++rank) {
        plan.add(static_cast<std::uint32_t>(rank), rank, rank, kAll, at(request.output_bytes, rank), 0, offset);
        offset += at(request.output_bytes, rank);
      }
      break;
    }
    case Kind::kGather:
    case Kind::kScatter:
    case Kind::kAllToAll: add_pairs(request, topology, plan); break;
    case Kind::kPointToPoint: {
      const int source = request.sending ? me : request.root;
      const int sink = request.sending ? request.root : me;
      plan.add(0, source, source, sink, request.total_bytes, 0, 0);
      break;
    }
  }
  return std::move(plan.spans);
}

}  // namespace hybridps::schedule
