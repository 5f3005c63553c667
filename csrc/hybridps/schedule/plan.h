// hybridps/schedule/plan.h: the pure function that maps one operation to spans, owners and roles.
//
// Both ends of every transfer derive the same plan from the same request and topology: nothing is negotiated per
// operation. No threads, no I/O, no clock; any thread may call it.
//
// Every collective is a list of spans, and every span takes the same way (design: "Two primitives carry every
// collective"):
//
//   contributors --local push--> agent of their node --push--> owner --result--> agents --local result--> consumers
//
//   aggregate   contributors: all ranks       (allreduce, reduce, reduce_scatter, barrier)
//   deliver     contributor: one source rank  (broadcast, all_gather, gather, scatter, all_to_all, send)
//
// The agent of a node for a span is the local rank with the owner's local index modulo the node's ranks, and the owner
// itself on the owner's node ("rail-aligned"). Bytes cross the network once per node. A dedicated server owns spans of
// allreduce and reduce; it is on no node, and its number stands for a local index.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "hybridps/core/dtype.h"

namespace hybridps::schedule {

/// Values travel on the wire: append only.
enum class Kind : std::uint8_t {
  kAllReduce = 0,
  kReduce = 1,
  kReduceScatter = 2,
  kBarrier = 3,
  kBroadcast = 4,
  kAllGather = 5,
  kGather = 6,
  kScatter = 7,
  kAllToAll = 8,
  kPointToPoint = 9,
  kGoodbye = 10,  // a barrier that says that a group is being left
};
inline constexpr std::uint8_t kKindCount = 11;
std::string_view name_of(Kind kind) noexcept;

/// How the ranks of a node share its network cards, where not all go through the same.
struct CardUse {
  /// The part of its node's weight that each rank's server owns; those of a node add up to 1. Empty: equal parts.
  std::vector<double> parts;
  /// Through the busiest card (nic_shares.h); 0: all ranks of a node go through one.
  double ranks_per_card = 0.0;
};

/// Which ranks share which node, and which dedicated servers help. Ranks and nodes are group-relative; dedicated server
/// d is the owner numbered size() + d.
class Topology {
 public:
  /// node_of[rank] in [0, nodes), every node with at least one rank. weights: the share of a tensor that each node's
  /// ranks own together, one per node, >= 0, not all 0; empty: equal. server_weights: likewise per dedicated server.
  /// rank: this process, size() + d on dedicated server d.
  Topology(std::vector<int> node_of, int rank, std::vector<double> weights = {},
           std::vector<double> server_weights = {}, CardUse cards = {});
  /// The same with other weights, of the nodes and of the dedicated servers.
  Topology with_weights(std::vector<double> weights, std::vector<double> server_weights = {}) const;

  int rank() const noexcept { return rank_; }
  int size() const noexcept { return static_cast<int>(node_of_.size()); }
  int nodes() const noexcept { return static_cast<int>(ranks_of_.size()); }
  int servers() const noexcept { return static_cast<int>(server_weights_.size()); }
  bool is_dedicated(int owner) const noexcept { return owner >= size(); }
  /// -1 for a dedicated server: it shares memory with nobody.
  int node_of(int rank) const noexcept { return is_dedicated(rank) ? -1 : node_of_[static_cast<std::size_t>(rank)]; }
  int my_node() const noexcept { return node_of(rank_); }
  int local_index(int rank) const noexcept { return local_index_[static_cast<std::size_t>(rank)]; }
  /// Ranks of a node in ascending order; local_index is a rank's place in it.
  const std::vector<int>& ranks_of(int node) const noexcept { return ranks_of_[static_cast<std::size_t>(node)]; }
  double weight(int node) const noexcept { return weights_[static_cast<std::size_t>(node)]; }
  /// The weight of what a rank's own server owns.
  double owner_weight(int rank) const noexcept {
    const double of_node = weight(node_of(rank));
    return cards_.parts.empty() ? of_node / static_cast<double>(ranks_of(node_of(rank)).size())
                                : of_node * cards_.parts[static_cast<std::size_t>(rank)];
  }
  double server_weight(int server) const noexcept { return server_weights_[static_cast<std::size_t>(server)]; }
  /// Ranks of a node that go through one card, at most; below 1 where a rank has several.
  double ranks_per_card() const noexcept;
  /// How many streams may come to one card at the same time: from each other node and each server to each of its ranks.
  std::uint64_t fan() const noexcept;
  /// The rank that acts for `node` in spans owned by `owner`.
  int agent(int node, int owner) const noexcept;
  /// As many as the largest node has ranks: parts that are reduced inside the nodes before they come here (Scope).
  int rails() const noexcept;
  /// The rank of `node` that holds that part.
  int rail_rank(int node, int rail) const noexcept;

 private:
  std::vector<int> node_of_;
  int rank_;
  std::vector<std::vector<int>> ranks_of_;
  std::vector<int> local_index_;
  std::vector<double> weights_;
  std::vector<double> server_weights_;
  CardUse cards_;
};

inline constexpr int kAll = -1;
inline constexpr int kNoRail = -1;

/// How much of an operation goes through the engine. Values travel on the wire: append only.
enum class Scope : std::uint8_t {
  /// All of it.
  kRanks = 0,
  /// What goes between nodes: on each node one rank per rail holds what the node has to give, and takes what it gets.
  /// The rest is done inside the nodes by other means (GPUs, with NCCL). Gather, scatter and all_to_all have no rails:
  /// each rank sends and takes its own parts, but for those of its node. Not for barriers and point to point.
  kNodes = 1,
  /// Nothing: ranks only find out that all of them have called the same operation, and two ranks of a node that they have
  /// the same size in mind for what they exchange in a gather, a scatter or an all_to_all.
  kWitness = 2,
};
inline constexpr std::uint8_t kScopeCount = 3;

struct Span {
  std::uint32_t id = 0;
  int owner = 0;      // group rank whose engine sums or forwards it, or a dedicated server
  int source = kAll;  // contributing rank, or kAll
  int sink = kAll;    // consuming rank, or kAll
  std::uint64_t bytes = 0;
  std::uint64_t agreed_bytes = 0;   // on which source and sink must agree: bytes, but in a witness, which carries none
  std::uint64_t input_offset = 0;   // in a contributor's input, bytes
  std::uint64_t output_offset = 0;  // in a consumer's output, bytes
  std::uint64_t agreed_offset = 0;  // of an aggregate: in what the ranks have together, the same on all of them
  std::uint32_t chunk_bytes = 1;    // all chunks but the last have this many bytes
  std::uint32_t chunks = 1;         // at least 1: a span of 0 bytes is one empty chunk
  std::uint16_t attempt = 0;        // how often it was given to another owner before
  int first_owner = -1;             // then: the one before, whose agents act for their nodes as they did
  int rail = kNoRail;               // Scope::kNodes: the ranks of this rail alone have a part in it
};

struct Request {
  Kind kind = Kind::kBarrier;
  core::DType dtype = core::DType::kBytes;
  int root = -1;                  // reduce, broadcast, gather, scatter; the peer of point to point
  std::uint64_t sequence = 0;     // rotates the owner of tiny operations
  std::uint64_t total_bytes = 0;  // allreduce, reduce, broadcast; bytes of point to point
  /// Bytes per rank, size() entries each where used, this rank's own view:
  ///   reduce_scatter  input_bytes: bytes of the piece for each rank (all ranks know them)
  ///   all_gather      output_bytes: bytes from each rank (all ranks know them)
  ///   gather          output_bytes at the root; input_bytes[rank()] elsewhere
  ///   scatter         input_bytes at the root; output_bytes[rank()] elsewhere
  ///   all_to_all      input_bytes: to each rank; output_bytes: from each rank
  std::vector<std::uint64_t> input_bytes;
  std::vector<std::uint64_t> output_bytes;
  bool sending = false;  // point to point: this rank sends to root, else receives from it
  Scope scope = Scope::kRanks;
  /// kNodes: allreduce, reduce and broadcast: bytes of each rail's part, rails() entries; their sum is total_bytes. A
  /// rank's input and output are the parts of its own rails, one after the other. In a reduce_scatter its input, and in an
  /// all_gather its output, are likewise the pieces of the ranks for which it acts (all_gather: on other nodes), in
  /// rank order. In a gather, scatter or all_to_all they are the parts of the ranks of other nodes, in rank order.
  std::vector<std::uint64_t> rail_bytes;
  /// Spans of an aggregate begin, and its chunks are, at multiples of it: blocks of a codec. A multiple of 64.
  std::uint64_t granule_bytes = 64;
};

/// What each of `fan` senders may have under way unasked, of what one card takes: never below two of the smallest chunks.
std::uint64_t window_bytes(std::uint64_t card_bytes, std::uint64_t fan) noexcept;
/// The same for each member of the group (its ranks, then its servers) as seen from topology.rank(): in proportion to
/// what an allreduce sends there, since the flow with the least room for its bytes sets the pace of all; never below an
/// equal part. 0 for members on the own node.
std::vector<std::uint64_t> windows_bytes(std::uint64_t card_bytes, const Topology& topology);
/// Chunk size for a group, the same on all ranks; a reduce_scatter uses smaller ones where two would not fit into a
/// sender's part of the default window.
std::uint32_t chunk_bytes_for(const Topology& topology, std::uint64_t chunk_bytes_max) noexcept;

struct Limits {
  std::uint32_t chunk_bytes = 64 * 1024;  // largest chunk; the same on all ranks of a group
  std::uint64_t tiny_bytes = 4 * 1024;    // up to here an aggregate has one owner
  bool operator==(const Limits&) const = default;
};

/// The spans in which topology.rank() has a part, ids being the same on all ranks.
std::vector<Span> make_plan(const Request& request, const Topology& topology, const Limits& limits);

/// Cuts `bytes` into weights.size() contiguous parts in proportion to the weights, each but the last a multiple of
/// `granule` bytes (rounded so that the running total is always nearest to the exact one). Sum of result == bytes.
std::vector<std::uint64_t> cut_by_weight(std::uint64_t bytes, const std::vector<double>& weights,
                                         std::uint64_t granule);

}  // namespace hybridps::schedule
