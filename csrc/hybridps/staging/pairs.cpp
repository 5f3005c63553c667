#include "hybridps/staging/pairs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "hybridps/staging/cuts.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;
using schedule::Kind;
using schedule::Topology;
using worker::Operation;
using worker::Piece;

/// The parts of a rank's input by receiving rank, or of its output by sending rank.
class Parts {
 public:
  Parts(const std::vector<Piece>& pieces, std::vector<std::uint64_t> bytes)
      : pieces_(pieces), bytes_(std::move(bytes)) {
    for (const std::uint64_t part : bytes_) {
      from_.push_back(total_);
      total_ += part;
    }
  }
  std::uint64_t bytes(int rank) const { return bytes_[static_cast<std::size_t>(rank)]; }
  Runs of(int rank) const {
    const std::uint64_t from = from_[static_cast<std::size_t>(rank)];
    return runs(pieces_, from, from + bytes(rank));
  }

 private:
  const std::vector<Piece>& pieces_;
  std::vector<std::uint64_t> bytes_;
  std::vector<std::uint64_t> from_;
  std::uint64_t total_ = 0;
};

/// Both are in rank order. In a gather or scatter, a rank other than the root has a part only for the root, or only
/// from the root.
Parts parts_of(const Operation& o, const Topology& topology, const std::vector<Piece>& pieces,
               const std::vector<std::uint64_t>& bytes, Kind at_root) {
  std::vector<std::uint64_t> parts(static_cast<std::size_t>(topology.size()), 0);
  if (o.kind == Kind::kAllToAll || (o.kind == at_root && topology.rank() == o.root))
    parts = bytes;
  else if (o.kind != at_root)
    parts[static_cast<std::size_t>(o.root)] = bytes_of(pieces);
  return Parts(pieces, std::move(parts));
}

Parts given(const Operation& o, const Topology& topology) {
  return parts_of(o, topology, o.input, o.input_bytes, Kind::kScatter);
}

Parts taken(const Operation& o, const Topology& topology) {
  return parts_of(o, topology, o.output, o.output_bytes, Kind::kGather);
}

Piece at(std::uint64_t offset, std::uint64_t bytes) { return {reinterpret_cast<std::byte*>(offset), bytes}; }

}  // namespace

bool is_pairwise(Kind kind) noexcept {
  return kind == Kind::kGather || kind == Kind::kScatter || kind == Kind::kAllToAll;
}

core::Status check_pairs(const Operation& o, const Topology& topology) {
  const Parts give = given(o, topology);
  const Parts take = taken(o, topology);
  const int me = topology.rank();
  if (give.bytes(me) != take.bytes(me))
    return Status(Code::kInvalidArgument, "rank " + std::to_string(me) + " has " + std::to_string(give.bytes(me)) +
                                              " bytes for itself and expects " + std::to_string(take.bytes(me)));
  for (const int rank : topology.ranks_of(topology.my_node()))
    if (rank != me && std::max(give.of(rank).size(), take.of(rank).size()) > 1)
      return Status(Code::kInvalidArgument,
                    "what rank " + std::to_string(me) + " exchanges with rank " + std::to_string(rank) +
                        " lies in several places, and GPUs of a node exchange one range of memory at a time");
  return {};
}

Slice cut_pairs(const Operation& o, const Topology& topology) {
  const Parts give = given(o, topology);
  const Parts take = taken(o, topology);
  const int me = topology.rank();
  const int node = topology.my_node();
  Slice slice;
  slice.operation = o;
  slice.operation.input.clear();
  slice.operation.output.clear();
  slice.operation.scope = schedule::Scope::kNodes;
  slice.crosses = topology.nodes() > 1;

  std::uint64_t sent = 0;  // staging: sent parts one after the other, received parts behind them
  std::uint64_t received = 0;
  const auto stage = [](std::vector<Copy>& copies, const Runs& device, std::uint64_t& offset) {
    for (const Run& run : device) {
      copies.push_back({run.data, offset, run.bytes});
      offset += run.bytes;
    }
  };
  for (int rank = 0; rank < topology.size(); ++rank) {
    if (topology.node_of(rank) == node) continue;
    stage(slice.in, give.of(rank), sent);
    stage(slice.out, take.of(rank), received);
  }
  const std::uint64_t behind = received > 0 ? (sent + kCutAlignment - 1) / kCutAlignment * kCutAlignment : sent;
  for (Copy& copy : slice.out) copy.offset += behind;
  slice.operation.input = {at(0, sent)};
  slice.operation.output = {at(behind, received)};
  slice.staging_bytes = behind + received;

  const Runs from = give.of(me);
  const Runs to = take.of(me);
  std::uint64_t done_from = 0;
  std::uint64_t done_to = 0;
  for (std::size_t f = 0, t = 0; f < from.size() && t < to.size();) {
    const std::uint64_t bytes = std::min(from[f].bytes - done_from, to[t].bytes - done_to);
    const device::CopyRun move{to[t].data + done_to, from[f].data + done_from, bytes};
    if (move.to != move.from) slice.moves.push_back(move);  // else the part is in place
    if ((done_from += bytes) == from[f].bytes) ++f, done_from = 0;
    if ((done_to += bytes) == to[t].bytes) ++t, done_to = 0;
  }

  const std::vector<int>& mine = topology.ranks_of(node);
  if (mine.size() == 1 || (o.kind != Kind::kAllToAll && topology.node_of(o.root) != node)) return slice;
  LocalStep& step = slice.crosses ? slice.beside : slice.after;
  step.kind = LocalStep::StepKind::kExchange;
  for (const int rank : mine) {
    if (rank == me) continue;
    const int local = topology.local_index(rank);
    for (const Run& run : give.of(rank)) step.messages.push_back({local, run.bytes, run.data, nullptr});
    for (const Run& run : take.of(rank)) step.messages.push_back({local, run.bytes, nullptr, run.data});
  }
  return slice;
}

std::vector<std::uint64_t> sizes_for_engine(const Operation& o, const Topology& topology,
                                            const std::vector<Piece>& pieces, const std::vector<std::uint64_t>& bytes) {
  if (!bytes.empty()) return bytes;
  std::vector<std::uint64_t> sizes(static_cast<std::size_t>(topology.size()), 0);
  if (o.kind != Kind::kAllToAll) sizes[static_cast<std::size_t>(topology.rank())] = bytes_of(pieces);
  return sizes;
}

}  // namespace hybridps::staging
