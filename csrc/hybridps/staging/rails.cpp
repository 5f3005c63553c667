#include "hybridps/staging/rails.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "hybridps/staging/cuts.h"
#include "hybridps/staging/pairs.h"

namespace hybridps::staging {
namespace {

using intranode::Part;
using schedule::Kind;
using schedule::Topology;
using worker::Operation;
using worker::Piece;

// Rails are not smaller than this: a small slice takes one rail.
constexpr std::uint64_t kSmallestRailBytes = 4096;

Piece at(std::uint64_t offset, std::uint64_t bytes) { return {reinterpret_cast<std::byte*>(offset), bytes}; }

Runs one(std::byte* data, std::uint64_t bytes) { return bytes > 0 ? Runs{{data, bytes}} : Runs{}; }

/// Adds parts to a step of a given kind.
class StepBuilder {
 public:
  explicit StepBuilder(LocalStep::StepKind kind) { step_.kind = kind; }

  /// Cuts at the ends of the runs that every rank has. The other side, where this rank has it, has no other ends.
  void add(int rank, const Runs& from, const Runs& to) {
    Cursor f{from};
    Cursor t{to};
    while (!f.is_over() || !t.is_over()) {
      const std::uint64_t run = std::min(f.left(), t.left());
      // The side that every rank has.
      const Cursor& common = step_.kind == LocalStep::StepKind::kSpread ? t : f;
      const LocalStep::Point here{common.piece(), common.inside()};
      if (step_.parts.empty()) step_.begin = here;
      Part part{rank, run, f.data(), t.data(), here.piece >= 0 && here == step_.end};
      step_.end = {here.piece, here.inside + run};
      step_.parts.push_back(part);
      f.advance(run);
      t.advance(run);
      assert(common.is_over() || common.done == 0);
    }
  }
  LocalStep take() { return step_.parts.empty() ? LocalStep{} : std::move(step_); }
  LocalStep& step() { return step_; }

 private:
  struct Cursor {  // a position in the runs
    const Runs& of;
    std::size_t i = 0;
    std::uint64_t done = 0;
    bool is_over() const { return i == of.size(); }
    std::uint64_t left() const { return is_over() ? ~std::uint64_t{0} : of[i].bytes - done; }
    std::byte* data() const { return is_over() ? nullptr : of[i].data + done; }
    int piece() const { return is_over() ? -1 : of[i].piece; }
    std::uint64_t inside() const { return is_over() ? 0 : of[i].inside + done; }
    void advance(std::uint64_t bytes) {
      if (is_over() || (done += bytes) < of[i].bytes) return;
      ++i;
      done = 0;
    }
  };

  LocalStep step_;
};

void add_copies(std::vector<Copy>& copies, const Runs& device, std::uint64_t offset) {
  for (const Run& piece : device) {
    copies.push_back({piece.data, offset, piece.bytes});
    offset += piece.bytes;
  }
}

Operation shell(const Operation& operation) {
  Operation copy = operation;
  copy.input.clear();
  copy.output.clear();
  copy.scope = schedule::Scope::kNodes;
  return copy;
}

std::uint64_t total_of(const Operation& o) {
  switch (o.kind) {
    case Kind::kAllReduce:
    case Kind::kBroadcast: return bytes_of(o.output);
    case Kind::kReduce: return bytes_of(o.input);
    case Kind::kAllGather: return sum(o.output_bytes);
    case Kind::kReduceScatter: return sum(o.input_bytes);
    default: return 0;
  }
}

/// This rank's place in its node.
struct NodeRank {
  explicit NodeRank(const Topology& t)
      : topology(t),
        me(t.rank()),
        node(t.my_node()),
        locals(static_cast<int>(t.ranks_of(t.my_node()).size())),
        index(t.local_index(t.rank())) {}
  const Topology& topology;
  int me;
  int node;
  int locals;
  int index;
  int local_of_rail(int rail) const { return rail % locals; }
  /// The local rank that acts on this node for `rank`, a rank of any node.
  int local_of(int rank) const { return topology.local_index(rank) % locals; }
  bool is_mine(int rail) const { return local_of_rail(rail) == index; }
};

/// Cuts `bytes` into rails. All used rails are equal, except the last.
std::vector<std::uint64_t> rails_of(std::uint64_t bytes, int rails) {
  const auto used = std::clamp(bytes / kSmallestRailBytes, std::uint64_t{1}, static_cast<std::uint64_t>(rails));
  std::vector<std::uint64_t> result(static_cast<std::size_t>(rails), 0);
  const std::uint64_t each = bytes / used / kCutAlignment * kCutAlignment;
  for (std::uint64_t rail = 0; rail + 1 < used; ++rail) result[rail] = each;
  result[used - 1] = bytes - each * (used - 1);
  return result;
}

/// Calls visit(rail, begin, end) for each rail in turn. The last rail's surplus over the others is visited alone: the
/// other parts are then equal, and libraries handle equal parts best.
template <typename Visit>
void for_rails(const std::vector<std::uint64_t>& rails, const Visit& visit) {
  std::uint64_t begin = 0;
  for (std::size_t rail = 0; rail < rails.size(); ++rail) {
    const std::uint64_t bytes = rails[rail];
    const std::uint64_t even = std::min(bytes, rails.front());
    if (even > 0) visit(static_cast<int>(rail), begin, begin + even);
    if (bytes > even) visit(static_cast<int>(rail), begin + even, begin + bytes);
    begin += bytes;
  }
}

std::uint64_t largest_of_node(const std::vector<std::uint64_t>& rails, const NodeRank& place) {
  std::vector<std::uint64_t> bytes(static_cast<std::size_t>(place.locals), 0);
  for (std::size_t rail = 0; rail < rails.size(); ++rail)
    bytes[static_cast<std::size_t>(place.local_of_rail(static_cast<int>(rail)))] += rails[rail];
  return *std::max_element(bytes.begin(), bytes.end());
}

bool is_float_average(const Operation& o) { return o.op == core::ReduceOp::kAvg && core::is_floating(o.dtype); }

/// The reduction inside the node. between() sets what the engine then does with the node sums.
intranode::Reduction inside(const Operation& o, const Topology& topology) {
  intranode::Reduction reduction{o.dtype, o.op, 1.0};
  if (o.op == core::ReduceOp::kPremulSum) reduction.factor = o.premul;
  if (topology.nodes() == 1) return reduction;
  if (is_float_average(o))
    reduction = {o.dtype, core::ReduceOp::kPremulSum, 1.0 / topology.size()};
  else if (o.op == core::ReduceOp::kAvg)
    reduction.op = core::ReduceOp::kSum;  // the owner divides
  return reduction;
}

void between(Operation& o, const NodeRank& place) {
  const bool done = place.locals > 1;
  if (is_float_average(o)) {
    o.op = core::ReduceOp::kPremulSum;
    o.premul = done ? 1.0 : 1.0 / place.topology.size();
  } else if (o.op == core::ReduceOp::kPremulSum && done) {
    o.premul = 1.0;
  }
}

/// A slice for `bytes` of the operation, without its steps.
Slice in_rails(const Operation& o, const NodeRank& place, std::uint64_t bytes) {
  Slice slice;
  slice.operation = shell(o);
  slice.operation.total_bytes = bytes;
  slice.operation.rail_bytes = rails_of(bytes, place.topology.rails());
  slice.staging_bytes = largest_of_node(slice.operation.rail_bytes, place);
  return slice;
}

Slice all_reduce(const Operation& o, const NodeRank& place, std::uint64_t from, std::uint64_t to) {
  Slice slice = in_rails(o, place, to - from);
  between(slice.operation, place);
  std::uint64_t mine = 0;
  StepBuilder parts(LocalStep::StepKind::kReduce);
  for_rails(slice.operation.rail_bytes, [&](int rail, std::uint64_t begin, std::uint64_t end) {
    const Runs here = runs(o.output, from + begin, from + end);
    parts.add(place.local_of_rail(rail), here, here);
    if (!place.is_mine(rail)) return;
    add_copies(slice.in, here, mine);
    mine += end - begin;
  });
  slice.out = slice.in;
  slice.operation.output = {at(0, mine)};
  if (place.locals == 1) return slice;
  if (parts.step().parts.empty()) return slice;
  slice.after = parts.step();
  slice.after.kind = LocalStep::StepKind::kSpread;
  parts.step().reduction = inside(o, place.topology);
  slice.before = parts.take();
  return slice;
}

/// `scratch`: room for this rank's rails of the slice.
Slice reduce(const Operation& o, const NodeRank& place, std::uint64_t from, std::uint64_t to, std::byte* scratch) {
  Slice slice = in_rails(o, place, to - from);
  between(slice.operation, place);
  const bool root = place.me == o.root;
  const bool root_node = place.topology.node_of(o.root) == place.node;
  std::uint64_t mine = 0;
  StepBuilder before(LocalStep::StepKind::kReduce);
  LocalStep after;
  if (root_node) after.kind = LocalStep::StepKind::kExchange;
  for_rails(slice.operation.rail_bytes, [&](int rail, std::uint64_t begin, std::uint64_t end) {
    const std::uint64_t bytes = end - begin;
    const int local = place.local_of_rail(rail);
    const Runs input = runs(o.input, from + begin, from + end);
    const Runs output = root ? runs(o.output, from + begin, from + end) : Runs{};
    const Runs sum_at = place.is_mine(rail) && place.locals > 1 ? one(scratch + mine, bytes) : Runs{};
    before.add(local, input, sum_at);
    if (place.is_mine(rail)) {
      add_copies(slice.in, place.locals > 1 ? sum_at : input, mine);
      if (root_node) add_copies(slice.out, root ? output : sum_at, mine);
      mine += bytes;
    }
    const int root_index = place.topology.local_index(o.root);
    if (root_node && local != root_index && (root || local == place.index)) {
      std::uint64_t done = 0;
      for (const Run& run : input) {  // cut as on every rank
        for (const Run& here : runs(o.output, from + begin + done, from + begin + done + run.bytes))
          if (root) after.messages.push_back({local, here.bytes, nullptr, here.data});
        if (!root) after.messages.push_back({root_index, run.bytes, sum_at.front().data + done, nullptr});
        done += run.bytes;
      }
    }
  });
  slice.operation.input = {at(0, mine)};
  if (root_node) slice.operation.output = slice.operation.input;
  if (place.locals == 1) return slice;
  before.step().reduction = inside(o, place.topology);
  slice.before = before.take();
  slice.after = std::move(after);
  return slice;
}

Slice broadcast(const Operation& o, const NodeRank& place, std::uint64_t from, std::uint64_t to) {
  Slice slice = in_rails(o, place, to - from);
  const bool root_node = place.topology.node_of(o.root) == place.node;
  std::uint64_t mine = 0;
  StepBuilder spread(LocalStep::StepKind::kSpread);
  for_rails(slice.operation.rail_bytes, [&](int rail, std::uint64_t begin, std::uint64_t end) {
    const Runs here = runs(o.output, from + begin, from + end);
    if (!root_node) spread.add(place.local_of_rail(rail), here, here);
    if (!place.is_mine(rail)) return;
    add_copies(root_node ? slice.in : slice.out, here, mine);
    mine += end - begin;
  });
  slice.operation.output = {at(0, mine)};
  if (place.locals == 1) return slice;
  if (root_node) {
    // Every rank of the node gets all bytes anyway, so each rank then has its rails.
    const Runs here = runs(o.output, from, to);
    spread.add(place.topology.local_index(o.root), here, here);
    slice.before = spread.take();
  } else {
    slice.after = spread.take();
  }
  return slice;
}

/// Slice `i` of `count`, taken from each rank's part.
struct RankParts {
  RankParts(const std::vector<std::uint64_t>& parts, std::uint64_t i, std::uint64_t count) {
    std::uint64_t begin = 0;
    for (const std::uint64_t part : parts) {
      inside.push_back(cut_at(part, i, count));
      bytes.push_back(cut_at(part, i + 1, count) - inside.back());
      from.push_back(begin + inside.back());
      begin += part;
    }
  }
  std::vector<std::uint64_t> inside;  // in the rank's part
  std::vector<std::uint64_t> bytes;
  std::vector<std::uint64_t> from;  // in the concatenation of all parts
};

/// Visits ranks node by node, so that ranks of a node are neighbours.
template <typename Visit>
void for_ranks(const Topology& topology, const Visit& visit) {
  for (int node = 0; node < topology.nodes(); ++node)
    for (const int rank : topology.ranks_of(node)) visit(rank, static_cast<std::size_t>(rank));
}

Slice all_gather(const Operation& o, const NodeRank& place, std::uint64_t i, std::uint64_t count) {
  const RankParts parts(o.output_bytes, i, count);
  const auto self = static_cast<std::size_t>(place.me);
  Slice slice;
  slice.operation = shell(o);
  slice.operation.total_bytes = sum(parts.bytes);
  slice.operation.output_bytes = parts.bytes;
  const Runs own = runs(o.input, parts.inside[self], parts.inside[self] + parts.bytes[self]);
  const auto place_of = [&](std::size_t r) { return runs(o.output, parts.from[r], parts.from[r] + parts.bytes[r]); };

  // Staging layout: received parts in rank order, then the own part.
  std::vector<std::uint64_t> received(static_cast<std::size_t>(place.locals), 0);
  std::uint64_t own_max = 0;
  for (int rank = 0; rank < place.topology.size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    if (place.topology.node_of(rank) == place.node) {
      own_max = std::max(own_max, parts.bytes[r]);
      continue;
    }
    const auto local = static_cast<std::size_t>(place.local_of(rank));
    if (place.local_of(rank) == place.index) add_copies(slice.out, place_of(r), received[local]);
    received[local] += parts.bytes[r];
  }
  const std::uint64_t mine = received[static_cast<std::size_t>(place.index)];
  const std::uint64_t own_at =
      (*std::max_element(received.begin(), received.end()) + kCutAlignment - 1) / kCutAlignment * kCutAlignment;
  slice.staging_bytes = own_at + own_max;
  add_copies(slice.in, own, own_at);
  slice.operation.output = {at(0, mine)};
  slice.operation.input = {at(own_at, parts.bytes[self])};
  if (place.locals == 1) {
    add_copies(slice.out, place_of(self), own_at);
    return slice;
  }
  StepBuilder spread(LocalStep::StepKind::kSpread);
  for_ranks(place.topology, [&](int rank, std::size_t r) {
    const Runs to = place_of(r);
    const bool here = place.topology.node_of(rank) == place.node;
    const int local = here ? place.topology.local_index(rank) : place.local_of(rank);
    const Runs none;
    spread.add(local, rank == place.me ? own : local == place.index ? to : none, to);
  });
  slice.after = spread.take();
  return slice;
}

/// `scratch`: room for the sums of the parts that this rank handles for other ranks and itself.
Slice reduce_scatter(const Operation& o, const NodeRank& place, std::uint64_t i, std::uint64_t count,
                     std::byte* scratch) {
  const RankParts parts(o.input_bytes, i, count);
  const auto self = static_cast<std::size_t>(place.me);
  Slice slice;
  slice.operation = shell(o);
  slice.operation.total_bytes = sum(parts.bytes);
  slice.operation.input_bytes = parts.bytes;
  between(slice.operation, place);
  std::vector<std::uint64_t> offset;
  std::vector<std::uint64_t> held(static_cast<std::size_t>(place.locals), 0);
  for (int rank = 0; rank < place.topology.size(); ++rank) {
    const auto local = static_cast<std::size_t>(place.local_of(rank));
    offset.push_back(held[local]);
    held[local] += parts.bytes[static_cast<std::size_t>(rank)];
  }
  slice.staging_bytes = *std::max_element(held.begin(), held.end());
  const auto piece_of = [&](std::size_t r) { return runs(o.input, parts.from[r], parts.from[r] + parts.bytes[r]); };
  for (int rank = 0; rank < place.topology.size(); ++rank) {
    const auto r = static_cast<std::size_t>(rank);
    if (place.local_of(rank) != place.index) continue;
    add_copies(slice.in, place.locals > 1 ? one(scratch + offset[r], parts.bytes[r]) : piece_of(r), offset[r]);
  }
  add_copies(slice.out, runs(o.output, parts.inside[self], parts.inside[self] + parts.bytes[self]), offset[self]);
  slice.operation.input = {at(0, held[static_cast<std::size_t>(place.index)])};
  slice.operation.output = {at(offset[self], parts.bytes[self])};
  if (place.locals == 1) return slice;
  StepBuilder before(LocalStep::StepKind::kReduce);
  for_ranks(place.topology, [&](int rank, std::size_t r) {
    const int local = place.local_of(rank);
    const Runs none;
    before.add(local, piece_of(r), local == place.index ? one(scratch + offset[r], parts.bytes[r]) : none);
  });
  before.step().reduction = inside(o, place.topology);
  slice.before = before.take();
  return slice;
}

/// The slice of an operation whose ranks are all on one node.
Slice within(const Operation& o, const NodeRank& place) {
  const std::uint64_t total = total_of(o);
  const auto local = [&](int rank) { return place.topology.local_index(rank); };
  const bool moves = o.kind == Kind::kBroadcast || o.kind == Kind::kAllGather;
  const LocalStep::StepKind sums =
      o.kind == Kind::kAllReduce ? LocalStep::StepKind::kAllReduce : LocalStep::StepKind::kReduce;
  StepBuilder step(moves ? LocalStep::StepKind::kSpread : sums);
  step.step().reduction = inside(o, place.topology);
  const RankParts parts(o.kind == Kind::kAllGather ? o.output_bytes : o.input_bytes, 0, 1);
  switch (o.kind) {
    case Kind::kAllReduce:
    case Kind::kBroadcast: {
      const Runs here = runs(o.output, 0, total);
      step.add(o.kind == Kind::kBroadcast ? local(o.root) : 0, here, here);
      break;
    }
    case Kind::kReduce:
      step.add(local(o.root), runs(o.input, 0, total), place.me == o.root ? runs(o.output, 0, total) : Runs{});
      break;
    case Kind::kReduceScatter:
      for_ranks(place.topology, [&](int rank, std::size_t r) {
        step.add(local(rank), runs(o.input, parts.from[r], parts.from[r] + parts.bytes[r]),
                 rank == place.me ? runs(o.output, 0, parts.bytes[r]) : Runs{});
      });
      break;
    case Kind::kAllGather:
      for_ranks(place.topology, [&](int rank, std::size_t r) {
        step.add(local(rank), rank == place.me ? runs(o.input, 0, parts.bytes[r]) : Runs{},
                 runs(o.output, parts.from[r], parts.from[r] + parts.bytes[r]));
      });
      break;
    default: assert(false && "has_rails() is false for this kind"); break;
  }
  Slice slice;
  slice.crosses = false;
  slice.after = step.take();
  return slice;
}

/// Scratch of one slice.
std::uint64_t scratch_of(const Operation& o, const NodeRank& place, std::uint64_t i, std::uint64_t count) {
  std::uint64_t bytes = 0;
  if (o.kind == Kind::kReduce) {
    const std::uint64_t total = total_of(o);
    const auto rails = rails_of(cut_at(total, i + 1, count) - cut_at(total, i, count), place.topology.rails());
    for (std::size_t rail = 0; rail < rails.size(); ++rail)
      if (place.is_mine(static_cast<int>(rail))) bytes += rails[rail];
  } else if (o.kind == Kind::kReduceScatter) {
    const RankParts parts(o.input_bytes, i, count);
    for (int rank = 0; rank < place.topology.size(); ++rank)
      if (place.local_of(rank) == place.index) bytes += parts.bytes[static_cast<std::size_t>(rank)];
  }
  return (bytes + kCutAlignment - 1) / kCutAlignment * kCutAlignment;
}

void append(LocalStep& to, LocalStep from) {
  if (to.kind == LocalStep::StepKind::kNone) {
    to = std::move(from);
    return;
  }
  if (from.kind == LocalStep::StepKind::kNone) return;
  if (!from.parts.empty()) from.parts.front().follows = from.begin.piece >= 0 && from.begin == to.end;
  to.parts.insert(to.parts.end(), from.parts.begin(), from.parts.end());
  to.end = from.end;
  to.messages.insert(to.messages.end(), from.messages.begin(), from.messages.end());
}

/// Makes one step before all slices and one after them, with the parts of all slices. Each step is a launch: NCCL makes
/// a thread for a launch, and the caller waits. The node is fast compared with the network, and the copies then follow
/// each other.
void join_steps(std::vector<Slice>& slices) {
  LocalStep before;
  LocalStep after;
  for (Slice& slice : slices) {
    append(before, std::exchange(slice.before, {}));
    append(after, std::exchange(slice.after, {}));
  }
  slices.front().before = std::move(before);
  slices.back().after = std::move(after);
}

bool needs_scratch(const Operation& o, const NodeRank& place) {
  return place.topology.nodes() > 1 && place.locals > 1 && (o.kind == Kind::kReduce || o.kind == Kind::kReduceScatter);
}

}  // namespace

bool has_rails(schedule::Kind kind) noexcept {
  switch (kind) {
    case Kind::kAllReduce:
    case Kind::kReduce:
    case Kind::kReduceScatter:
    case Kind::kBroadcast:
    case Kind::kAllGather: return true;
    default: return is_pairwise(kind);
  }
}

std::uint64_t scratch_bytes(const Operation& o, const Topology& topology, const SliceLimits& limits) {
  const NodeRank place(topology);
  if (!needs_scratch(o, place)) return 0;
  const std::uint64_t count = slice_count(total_of(o), topology.size(), limits);
  std::uint64_t bytes = 0;
  for (std::uint64_t i = 0; i < count; ++i) bytes += scratch_of(o, place, i, count);
  return bytes;
}

std::vector<Slice> cut_for_rails(const Operation& o, const Topology& topology, const SliceLimits& limits,
                                 std::byte* scratch) {
  const NodeRank place(topology);
  std::vector<Slice> slices;
  if (is_pairwise(o.kind)) {
    slices.push_back(cut_pairs(o, topology));
    return slices;
  }
  if (topology.nodes() == 1) {
    slices.push_back(within(o, place));
    return slices;
  }
  const std::uint64_t total = total_of(o);
  const std::uint64_t count = slice_count(total, topology.size(), limits);
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t from = cut_at(total, i, count);
    const std::uint64_t to = cut_at(total, i + 1, count);
    switch (o.kind) {
      case Kind::kAllReduce: slices.push_back(all_reduce(o, place, from, to)); break;
      case Kind::kReduce: slices.push_back(reduce(o, place, from, to, scratch)); break;
      case Kind::kBroadcast: slices.push_back(broadcast(o, place, from, to)); break;
      case Kind::kAllGather: slices.push_back(all_gather(o, place, i, count)); break;
      case Kind::kReduceScatter: slices.push_back(reduce_scatter(o, place, i, count, scratch)); break;
      default: assert(false && "has_rails() is false for this kind"); break;
    }
    if (needs_scratch(o, place)) scratch += scratch_of(o, place, i, count);
  }
  join_steps(slices);
  return slices;
}

worker::Operation witness_of(const Operation& o, const Topology& topology) {
  Operation witness = o;
  witness.input.clear();
  witness.output.clear();
  witness.input_bytes.clear();
  witness.output_bytes.clear();
  if (is_pairwise(o.kind)) {
    // Ranks have different sizes. Ranks of a node compare the sizes that they have for each other.
    witness.scope = schedule::Scope::kWitness;
    witness.input_bytes = sizes_for_engine(o, topology, o.input, o.input_bytes);
    witness.output_bytes = sizes_for_engine(o, topology, o.output, o.output_bytes);
    return witness;
  }
  witness.scope = schedule::Scope::kWitness;
  witness.total_bytes = total_of(o);
  // An operation with sizes per rank has no root, so a hash of the sizes takes the root's place.
  const std::vector<std::uint64_t>& sizes = o.kind == Kind::kAllGather ? o.output_bytes : o.input_bytes;
  if (o.root < 0 && !sizes.empty()) {
    std::uint64_t hash = 0xcbf29ce484222325U;  // FNV-1a
    for (const std::uint64_t size : sizes) hash = (hash ^ size) * 0x100000001b3U;
    witness.root = -2 - static_cast<int>((hash ^ (hash >> 31)) & 0x3fffffffU);
  }
  return witness;
}

}  // namespace hybridps::staging
