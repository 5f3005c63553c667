// hybridps/schedule/plan.h: the pure function that maps one operation to spans, owners and roles.
//
// Both ends of every transfer derive the same plan from the same request and topology, without negotiation per
// operation. No threads, no I/O, no clock; any thread may call these functions.
//
// Every collective is a list of spans. Every span takes the same path:
//
//   contributors --local push--> agent of their node --push--> owner --result--> agents --local result--> consumers
//
//   aggregate   contributors: all ranks       (allreduce, reduce, reduce_scatter, barrier)
//   deliver     contributor: one source rank  (broadcast, all_gather, gather, scatter, all_to_all, send)
//
// A node's agent for a span is the node's rank with local index (the owner's local index modulo the number of the
// node's ranks). So the agent on the owner's node is the owner itself ("rail-aligned"). Bytes cross the network once
// per node. A dedicated server owns spans of allreduce and reduce. It is on no node: its number is its local index.
//
// Where nodes are in several regions (racks, sites), the spans of large operations have levels. In each region one rank
// is the span's gateway, and in the owner's region that is the owner. A dedicated server owns spans like a rank of its
// region, and is no gateway. A gateway has the part of an owner towards its region: it sums the region's nodes. It has
// the part of an agent towards the owner. So bytes cross the uplink of a region once per region, not once per node: an
// allreduce of S bytes puts S on an uplink in each direction between two regions, and 2 (R - 1) / R S between R equal
// regions.
//
//   agents --push--> gateway of their region --push--> owner --result--> gateways --result--> agents
//
// A small allreduce or a barrier is an exchange: each region has owners and spans of its own, and makes the whole sum
// for its own ranks (Span::taker_region). Contributions cross between regions, results do not.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/schedule/topology.h"

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
  kGoodbye = 10,  // a barrier before ranks leave a group
};
inline constexpr std::uint8_t kKindCount = 11;
std::string_view name_of(Kind kind) noexcept;

inline constexpr int kAll = -1;
inline constexpr int kNoRail = -1;

/// How much of an operation goes through the engine. Values travel on the wire: append only.
enum class Scope : std::uint8_t {
  /// The whole operation.
  kRanks = 0,
  /// Only the traffic between nodes. On each node one rank per rail holds the node's contribution and takes the node's
  /// result. The part inside the nodes uses other means (GPUs, with NCCL). Gather, scatter and all_to_all have no
  /// rails: each rank exchanges its own parts with the ranks of other nodes. Not for barriers and point to point.
  kNodes = 1,
  /// No data: the ranks only check that all of them have called the same operation. In a gather, a scatter or an
  /// all_to_all, each pair of ranks of a node also checks that both expect the same size of their exchange.
  kWitness = 2,
};
inline constexpr std::uint8_t kScopeCount = 3;

struct Span {
  std::uint32_t id = 0;
  int owner = 0;      // group rank whose engine sums or forwards it, or a dedicated server
  int source = kAll;  // contributing rank, or kAll
  int sink = kAll;    // consuming rank, or kAll
  std::uint64_t bytes = 0;
  std::uint64_t agreed_bytes = 0;   // source and sink must agree on this; equals `bytes`, except in a witness
  std::uint64_t input_offset = 0;   // in a contributor's input, bytes
  std::uint64_t output_offset = 0;  // in a consumer's output, bytes
  std::uint64_t agreed_offset = 0;  // aggregates: offset in the tensor of all ranks, the same on all ranks
  std::uint32_t chunk_bytes = 1;    // all chunks but the last have this many bytes
  std::uint32_t chunks = 1;         // at least 1: a span of 0 bytes has one empty chunk
  std::uint16_t attempt = 0;        // how often the span was given to another owner
  int first_owner = -1;             // attempt > 0: the earlier owner; this owner's agents still act for their nodes
  bool levels = false;              // contributions and results go through the gateways of regions
  int taker_region = kAll;          // only ranks of this region, which is the owner's, take results; kAll: all regions
  int rail = kNoRail;               // Scope::kNodes: only the ranks of this rail take part in the span
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
  /// Whether spans may have levels: not where a contribution may be something else than elements to be summed.
  bool may_have_levels = false;
  bool is_coded = false;  // contributions between nodes, or sums between regions, are encoded
  /// Only Scope::kNodes. allreduce, reduce and broadcast: bytes of each rail's part, rails() entries with sum
  /// total_bytes. A rank's input and output are the parts of its own rails, one after the other. In a reduce_scatter
  /// the input, and in an all_gather the output, holds the pieces of the ranks for which the rank acts (all_gather:
  /// those on other nodes), in rank order. In a gather, scatter or all_to_all, input and output hold the parts of the
  /// ranks of other nodes, in rank order.
  std::vector<std::uint64_t> rail_bytes;
  /// Block size of a codec, a multiple of 64. Spans and chunks of an aggregate begin at multiples of this size.
  std::uint64_t granule_bytes = 64;
};

/// Bytes that each of `fan` senders to a card of `card_bytes` may have under way unasked; at least two smallest chunks.
std::uint64_t window_bytes(std::uint64_t card_bytes, std::uint64_t fan) noexcept;
/// The window from topology.rank() to each member of the group (the ranks, then the servers), in bytes. A window is in
/// proportion to what an allreduce sends to the member, since the flow with the smallest window per byte sets the pace
/// of all. At least two of the smallest chunks. An uplink between regions that carries at most four streams has four
/// such windows. An equal part for a member to which an allreduce sends nothing. 0 for members on the own node.
std::vector<std::uint64_t> windows_bytes(std::uint64_t card_bytes, const Topology& topology);
/// Chunk size for a group in bytes, the same on all ranks. A reduce_scatter uses smaller chunks where two chunks would
/// not fit into a sender's part of the default window.
std::uint32_t chunk_bytes_for(const Topology& topology, std::uint64_t chunk_bytes_max) noexcept;

struct Limits {
  std::uint32_t chunk_bytes = 64 * 1024;  // largest chunk; the same on all ranks of a group
  std::uint64_t tiny_bytes = 4 * 1024;    // up to this size an aggregate has one owner
  bool operator==(const Limits&) const = default;
};

/// Whether the operation's spans have levels. Small operations have none: a further hop would take longer than their
/// bytes.
bool has_levels(const Request& request, const Topology& topology, const Limits& limits);

/// The spans in which topology.rank() takes part. Span ids are the same on all ranks.
std::vector<Span> make_plan(const Request& request, const Topology& topology, const Limits& limits);

/// Cuts `bytes` into weights.size() contiguous parts in proportion to the weights. Each part but the last is a multiple
/// of `granule` bytes, rounded so that the running total stays nearest to the exact total. Sum of result == bytes.
std::vector<std::uint64_t> cut_by_weight(std::uint64_t bytes, const std::vector<double>& weights,
                                         std::uint64_t granule);

}  // namespace hybridps::schedule
