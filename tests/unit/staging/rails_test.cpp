// Rails, played on bytes: every rank's slices are carried out step by step, with sums of bytes for what a library and
// the engine would do, and all memory is compared with what the collective should leave there.
#include "hybridps/staging/rails.h"

#include <algorithm>
#include <cstdint>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using core::DType;
using core::ReduceOp;
using schedule::Kind;
using schedule::Scope;
using schedule::Topology;
using staging::LocalStep;
using staging::Slice;
using staging::SliceLimits;
using worker::Operation;
using worker::Piece;
using Bytes = std::vector<std::byte>;
using Sizes = std::vector<std::uint64_t>;

constexpr std::byte kUntouched{0xA5};
constexpr std::size_t kGap = 64;  // between pieces, so that what follows in memory is of one piece

std::byte operator+(std::byte a, std::byte b) {
  return static_cast<std::byte>(static_cast<unsigned>(a) + static_cast<unsigned>(b));
}
std::byte value(int rank, std::uint64_t i) {
  return static_cast<std::byte>(static_cast<std::uint64_t>(rank + 1) * 37 + i * 11 + i / 251);
}
std::size_t index(int i) { return static_cast<std::size_t>(i); }
std::uint64_t total(const Sizes& sizes) {
  std::uint64_t all = 0;
  for (const std::uint64_t size : sizes) all += size;
  return all;
}

/// A tensor in pieces, with gaps that must stay as they are.
struct Tensor {
  Tensor() = default;
  explicit Tensor(const Sizes& pieces) {
    std::size_t bytes = kGap;
    for (const std::uint64_t piece : pieces) bytes += piece + kGap;
    memory.assign(bytes, kUntouched);
    std::size_t at = kGap;
    for (const std::uint64_t piece : pieces) {
      places.push_back({memory.data() + at, piece});
      at += piece + kGap;
    }
  }
  Bytes content() const {
    Bytes all;
    for (const Piece& piece : places) all.insert(all.end(), piece.data, piece.data + piece.bytes);
    return all;
  }
  void fill(const Bytes& bytes) {
    std::size_t at = 0;
    for (const Piece& piece : places) {
      std::copy_n(bytes.begin() + static_cast<std::ptrdiff_t>(at), piece.bytes, piece.data);
      at += piece.bytes;
    }
  }
  bool gaps_are_whole() const {
    Bytes copy = memory;
    for (const Piece& piece : places) std::fill_n(copy.begin() + (piece.data - memory.data()), piece.bytes, kUntouched);
    return std::all_of(copy.begin(), copy.end(), [](std::byte b) { return b == kUntouched; });
  }

  Bytes memory;
  std::vector<Piece> places;
};

struct Case {
  std::vector<int> node_of;
  Kind kind = Kind::kAllReduce;
  int root = -1;
  Sizes pieces;  // of the whole tensor, on every rank
  Sizes parts;   // per rank: all_gather, reduce_scatter
  SliceLimits limits;
  std::vector<Sizes> own;  // pieces of each rank's own part, or of a reduce's output; none: one
};

/// One rank: its memory and its slices.
struct Rank {
  Tensor input;
  Tensor output;
  Bytes scratch;
  std::uint64_t scratch_bytes = 0;
  Bytes staging;
  Operation operation;
  std::vector<Slice> slices;
};

class Play {
 public:
  explicit Play(const Case& c) : c_(c) {
    for (int r = 0; r < size(); ++r) topologies_.emplace_back(c.node_of, r);
    ranks_.resize(index(size()));
    for (int r = 0; r < size(); ++r) make(r);
  }

  void run() {
    const std::size_t count = ranks_.front().slices.size();
    for (const Rank& rank : ranks_) REQUIRE(rank.slices.size() == count);
    REQUIRE(count == expected_slices());
    Sizes whole;  // what the slices are of, together
    for (std::size_t i = 0; i < count; ++i) {
      check_slice(i);
      run_slice(i);
      add_up(i, whole);
    }
    if (nodes() > 1) {
      if (c_.parts.empty())
        REQUIRE(total(whole) == total(c_.pieces));
      else
        REQUIRE(whole == c_.parts);
    }
    check_result();
  }
  const Rank& rank(int r) const { return ranks_[index(r)]; }

 private:
  int size() const { return static_cast<int>(c_.node_of.size()); }
  int nodes() const { return topologies_.front().nodes(); }
  const Topology& any() const { return topologies_.front(); }
  const std::vector<int>& ranks_of(int node) const { return any().ranks_of(node); }
  int locals(int node) const { return static_cast<int>(ranks_of(node).size()); }
  /// Who acts on `node` for a rank of any node.
  int actor(int node, int rank) const { return ranks_of(node)[index(any().local_index(rank) % locals(node))]; }

  void make(int r) {
    Rank& rank = ranks_[index(r)];
    Operation& o = rank.operation;
    o.kind = c_.kind;
    o.root = c_.root;
    if (c_.kind == Kind::kAllReduce || c_.kind == Kind::kReduce || c_.kind == Kind::kReduceScatter)
      o.op = ReduceOp::kSum;
    const Sizes own = !c_.own.empty()    ? c_.own[index(r)]
                      : c_.parts.empty() ? Sizes{total(c_.pieces)}
                                         : Sizes{c_.parts[index(r)]};
    switch (c_.kind) {
      case Kind::kAllGather:
        rank.input = Tensor(own);
        rank.output = Tensor(c_.pieces);
        o.output_bytes = c_.parts;
        break;
      case Kind::kReduceScatter:
        rank.input = Tensor(c_.pieces);
        rank.output = Tensor(own);
        o.input_bytes = c_.parts;
        break;
      case Kind::kReduce:
        rank.input = Tensor(c_.pieces);
        if (r == c_.root) rank.output = Tensor(own);
        break;
      default: rank.output = Tensor(c_.pieces);
    }
    const bool in_place = c_.kind == Kind::kAllReduce || c_.kind == Kind::kBroadcast;
    Tensor& given = in_place ? rank.output : rank.input;
    Bytes bytes(given.content().size());
    for (std::size_t i = 0; i < bytes.size(); ++i) bytes[i] = value(r, i);
    given.fill(bytes);
    o.input = rank.input.places;
    o.output = rank.output.places;
    const Topology& topology = topologies_[index(r)];
    rank.scratch_bytes = staging::scratch_bytes(o, topology, c_.limits);
    rank.scratch.assign(rank.scratch_bytes + kGap, kUntouched);
    rank.slices =
        staging::cut_for_rails(o, topology, c_.limits, rank.scratch_bytes > 0 ? rank.scratch.data() : nullptr);
    std::uint64_t staging = 0;
    for (const Slice& slice : rank.slices) staging = std::max(staging, slice.staging_bytes);
    rank.staging.assign(staging, kUntouched);
  }

  std::uint64_t expected_slices() const {
    if (nodes() == 1) return 1;
    const std::uint64_t bytes = total(c_.parts.empty() ? c_.pieces : c_.parts);
    const std::uint64_t most = std::max<std::uint64_t>(c_.limits.slices_max, 1);
    std::uint64_t count = 1;
    while (count < most && std::max<std::uint64_t>(2 * count - 2, 1) *
                                   std::max<std::uint64_t>(c_.limits.slice_bytes, 256U * index(size())) <
                               bytes)
      ++count;
    return count;
  }

  const Slice& slice(int r, std::size_t i) const { return ranks_[index(r)].slices[i]; }

  /// Bytes of each rank's part in a slice, or of each rail.
  const Sizes& sizes(const Operation& o) const {
    return c_.kind == Kind::kAllGather       ? o.output_bytes
           : c_.kind == Kind::kReduceScatter ? o.input_bytes
                                             : o.rail_bytes;
  }

  void add_up(std::size_t i, Sizes& whole) const {
    if (nodes() == 1) return;
    const Sizes& of = sizes(slice(0, i).operation);
    whole.resize(of.size());
    for (std::size_t p = 0; p < of.size(); ++p) whole[p] += of[p];
  }

  void check_slice(std::size_t i) const {
    const Operation& first = slice(0, i).operation;
    for (int r = 0; r < size(); ++r) {
      const Slice& s = slice(r, i);
      INFO("rank " << r << " slice " << i);
      REQUIRE(s.crosses == (nodes() > 1));
      if (!s.crosses) {
        REQUIRE((s.in.empty() && s.out.empty() && s.staging_bytes == 0 && s.before.kind == LocalStep::StepKind::kNone));
        continue;
      }
      const Operation& o = s.operation;
      REQUIRE(o.scope == Scope::kNodes);
      REQUIRE(o.kind == c_.kind);
      REQUIRE(o.total_bytes == first.total_bytes);
      REQUIRE(sizes(o) == sizes(first));
      REQUIRE(o.total_bytes == total(sizes(o)));
      REQUIRE(s.staging_bytes == expected_staging(any().node_of(r), o));
      if (c_.parts.empty()) check_rails(o);
      const bool has_root = c_.kind == Kind::kReduce && any().node_of(r) == any().node_of(c_.root);
      const bool last = i + 1 == ranks_[index(r)].slices.size();
      REQUIRE((s.after.kind == LocalStep::StepKind::kExchange) == (last && has_root && locals(any().node_of(r)) > 1));
      // One step before all slices, one after them.
      if (i > 0) REQUIRE(s.before.kind == LocalStep::StepKind::kNone);
      if (!last) REQUIRE(s.after.kind == LocalStep::StepKind::kNone);
      if (locals(any().node_of(r)) == 1)
        REQUIRE((s.before.kind == LocalStep::StepKind::kNone && s.after.kind == LocalStep::StepKind::kNone));
    }
  }

  /// Not finer than 4096 bytes, all alike and whole elements, but the last has the rest.
  void check_rails(const Operation& o) const {
    const Sizes& rails = o.rail_bytes;
    REQUIRE(rails.size() == index(any().rails()));
    const std::uint64_t bytes = total(rails);
    const auto used = std::min<std::uint64_t>(std::max<std::uint64_t>(bytes / 4096, 1), rails.size());
    for (std::size_t rail = 0; rail < rails.size(); ++rail) {
      if (rail >= used) REQUIRE(rails[rail] == 0);
      if (rail + 1 < used) {
        REQUIRE(rails[rail] == rails.front());
        REQUIRE(rails[rail] % 256 == 0);
        REQUIRE(rails[rail] >= 4096 - 255);
      }
    }
    if (used > 1) {
      REQUIRE(rails[used - 1] >= rails.front());
      REQUIRE(rails[used - 1] < rails.front() + used * 256);
    }
  }

  std::uint64_t expected_staging(int node, const Operation& o) const {
    std::map<int, std::uint64_t> held;
    std::uint64_t own = 0;
    if (c_.parts.empty()) {
      for (int rail = 0; rail < any().rails(); ++rail) held[any().rail_rank(node, rail)] += o.rail_bytes[index(rail)];
    } else {
      for (int r = 0; r < size(); ++r) {
        const std::uint64_t part = sizes(o)[index(r)];
        if (c_.kind == Kind::kAllGather && any().node_of(r) == node)
          own = std::max(own, part);
        else
          held[actor(node, r)] += part;
      }
    }
    std::uint64_t most = 0;
    for (const auto& [rank, bytes] : held) most = std::max(most, bytes);
    return c_.kind == Kind::kAllGather ? (most + 255) / 256 * 256 + own : most;
  }

  // Carrying out

  void run_slice(std::size_t i) {
    for (int node = 0; node < nodes(); ++node) run_step(node, i, &Slice::before);
    for (int r = 0; r < size(); ++r)
      for (const staging::Copy& copy : slice(r, i).in) {
        REQUIRE(copy.offset + copy.bytes <= slice(r, i).staging_bytes);
        REQUIRE(copy.bytes > 0);
        std::copy_n(copy.device, copy.bytes, ranks_[index(r)].staging.data() + copy.offset);
      }
    if (nodes() > 1) run_engine(i);
    for (int r = 0; r < size(); ++r)
      for (const staging::Copy& copy : slice(r, i).out) {
        REQUIRE(copy.offset + copy.bytes <= slice(r, i).staging_bytes);
        REQUIRE(copy.bytes > 0);
        std::copy_n(ranks_[index(r)].staging.data() + copy.offset, copy.bytes, copy.device);
      }
    for (int node = 0; node < nodes(); ++node) run_step(node, i, &Slice::after);
  }

  void run_step(int node, std::size_t i, LocalStep Slice::* which) {
    std::vector<const LocalStep*> steps;
    for (const int r : ranks_of(node)) steps.push_back(&(slice(r, i).*which));
    const LocalStep& first = *steps.front();
    for (const LocalStep* step : steps) {
      REQUIRE(step->kind == first.kind);
      REQUIRE(step->parts.size() == first.parts.size());
      REQUIRE(step->reduction == first.reduction);
    }
    if (first.kind == LocalStep::StepKind::kExchange) return exchange(steps);
    if (first.kind == LocalStep::StepKind::kNone) return;
    REQUIRE_FALSE(first.parts.empty());
    const bool spreads = first.kind == LocalStep::StepKind::kSpread;
    std::vector<const std::byte*> end(steps.size(), nullptr);
    for (std::size_t p = 0; p < first.parts.size(); ++p) {
      const intranode::Part& part = first.parts[p];
      REQUIRE(part.bytes > 0);
      REQUIRE((part.rank >= 0 && part.rank < locals(node)));
      Bytes bytes(part.bytes, std::byte{0});
      for (std::size_t local = 0; local < steps.size(); ++local) {
        const intranode::Part& mine = steps[local]->parts[p];
        REQUIRE(mine.rank == part.rank);
        REQUIRE(mine.bytes == part.bytes);
        const std::byte* common = spreads ? mine.to : mine.from;
        REQUIRE(common != nullptr);
        REQUIRE(mine.follows == (common == end[local]));
        end[local] = common + mine.bytes;
        const bool holds = part.rank == static_cast<int>(local);
        if (holds || first.kind == LocalStep::StepKind::kAllReduce)
          REQUIRE((mine.from != nullptr && mine.to != nullptr));
        if (!spreads)
          for (std::uint64_t b = 0; b < part.bytes; ++b) bytes[b] = bytes[b] + mine.from[b];
        else if (holds)
          std::copy_n(mine.from, part.bytes, bytes.data());
      }
      for (std::size_t local = 0; local < steps.size(); ++local) {
        std::byte* const to = steps[local]->parts[p].to;
        const bool takes = first.kind != LocalStep::StepKind::kReduce || part.rank == static_cast<int>(local);
        if (takes) std::copy_n(bytes.data(), part.bytes, to);
      }
    }
  }

  static void exchange(const std::vector<const LocalStep*>& steps) {
    std::map<std::pair<int, int>, std::deque<Bytes>> under_way;
    for (std::size_t local = 0; local < steps.size(); ++local)
      for (const intranode::Transfer& message : steps[local]->messages) {
        REQUIRE(message.bytes > 0);
        REQUIRE(message.peer != static_cast<int>(local));
        REQUIRE((message.from == nullptr) != (message.to == nullptr));
        if (message.from != nullptr)
          under_way[{static_cast<int>(local), message.peer}].emplace_back(message.from, message.from + message.bytes);
      }
    for (std::size_t local = 0; local < steps.size(); ++local)
      for (const intranode::Transfer& message : steps[local]->messages) {
        if (message.to == nullptr) continue;
        auto& sent = under_way[{message.peer, static_cast<int>(local)}];
        REQUIRE_FALSE(sent.empty());
        REQUIRE(sent.front().size() == message.bytes);
        std::copy(sent.front().begin(), sent.front().end(), message.to);
        sent.pop_front();
      }
    for (const auto& [ends, sent] : under_way) REQUIRE(sent.empty());
  }

  /// Where a piece of the engine's operation lies in the rank's staging.
  std::byte* at(int r, const std::vector<Piece>& pieces, std::uint64_t bytes) {
    REQUIRE(pieces.size() == 1);
    REQUIRE(pieces.front().bytes == bytes);
    const auto offset = reinterpret_cast<std::uintptr_t>(pieces.front().data);
    REQUIRE(offset + bytes <= ranks_[index(r)].staging.size());
    return ranks_[index(r)].staging.data() + offset;
  }

  /// Scope::kNodes, as schedule::Request has it.
  void run_engine(std::size_t i) {
    if (c_.kind == Kind::kAllGather) return gather(i);
    if (c_.kind == Kind::kReduceScatter) return scatter(i);
    const Sizes& rails = slice(0, i).operation.rail_bytes;
    const int root_node = c_.root >= 0 ? any().node_of(c_.root) : -1;
    std::vector<std::byte*> from(index(size()), nullptr);
    std::vector<std::byte*> to(index(size()), nullptr);
    for (int r = 0; r < size(); ++r) {
      const int node = any().node_of(r);
      std::uint64_t mine = 0;
      for (int rail = 0; rail < any().rails(); ++rail)
        if (any().rail_rank(node, rail) == r) mine += rails[index(rail)];
      const Operation& o = slice(r, i).operation;
      const bool takes = c_.kind != Kind::kReduce || node == root_node;
      from[index(r)] = at(r, c_.kind == Kind::kReduce ? o.input : o.output, mine);
      if (takes)
        to[index(r)] = at(r, o.output, mine);
      else
        REQUIRE(o.output.empty());
    }
    std::vector<std::uint64_t> done(index(size()), 0);
    for (int rail = 0; rail < any().rails(); ++rail) {
      Bytes sum(rails[index(rail)], std::byte{0});
      for (int node = 0; node < nodes(); ++node) {
        if (c_.kind == Kind::kBroadcast && node != root_node) continue;
        const std::size_t holder = index(any().rail_rank(node, rail));
        for (std::size_t b = 0; b < sum.size(); ++b) sum[b] = sum[b] + from[holder][done[holder] + b];
      }
      for (int node = 0; node < nodes(); ++node) {
        const std::size_t holder = index(any().rail_rank(node, rail));
        if (to[holder] != nullptr) std::copy(sum.begin(), sum.end(), to[holder] + done[holder]);
        done[holder] += sum.size();
      }
    }
  }

  void gather(std::size_t i) {
    const Sizes& parts = slice(0, i).operation.output_bytes;
    std::vector<Bytes> own;
    for (int r = 0; r < size(); ++r) {
      const std::byte* start = at(r, slice(r, i).operation.input, parts[index(r)]);
      own.emplace_back(start, start + parts[index(r)]);
    }
    for (int r = 0; r < size(); ++r) {
      const int node = any().node_of(r);
      Bytes comes;
      for (int other = 0; other < size(); ++other)
        if (any().node_of(other) != node && actor(node, other) == r)
          comes.insert(comes.end(), own[index(other)].begin(), own[index(other)].end());
      std::copy(comes.begin(), comes.end(), at(r, slice(r, i).operation.output, comes.size()));
    }
  }

  void scatter(std::size_t i) {
    const Sizes& parts = slice(0, i).operation.input_bytes;
    std::vector<Bytes> sums;
    for (const std::uint64_t part : parts) sums.emplace_back(part, std::byte{0});
    for (int r = 0; r < size(); ++r) {
      const int node = any().node_of(r);
      std::uint64_t held = 0;
      for (int other = 0; other < size(); ++other)
        if (actor(node, other) == r) held += parts[index(other)];
      const std::byte* from = at(r, slice(r, i).operation.input, held);
      for (int other = 0; other < size(); ++other) {
        if (actor(node, other) != r) continue;
        for (std::byte& byte : sums[index(other)]) byte = byte + *from++;
      }
    }
    for (int r = 0; r < size(); ++r)
      std::copy(sums[index(r)].begin(), sums[index(r)].end(), at(r, slice(r, i).operation.output, parts[index(r)]));
  }

  Bytes given(int r, std::uint64_t bytes) const {
    Bytes all(bytes);
    for (std::uint64_t i = 0; i < bytes; ++i) all[i] = value(r, i);
    return all;
  }

  void check_result() const {
    const std::uint64_t whole = total(c_.pieces);
    Bytes sums(whole, std::byte{0});
    for (int r = 0; r < size(); ++r)
      for (std::uint64_t i = 0; i < whole; ++i) sums[i] = sums[i] + value(r, i);
    Bytes gathered;
    for (int r = 0; c_.kind == Kind::kAllGather && r < size(); ++r) {
      const Bytes part = given(r, c_.parts[index(r)]);
      gathered.insert(gathered.end(), part.begin(), part.end());
    }
    std::uint64_t before = 0;
    for (int r = 0; r < size(); ++r) {
      INFO("rank " << r);
      const Rank& rank = ranks_[index(r)];
      const Bytes out = rank.output.content();
      switch (c_.kind) {
        case Kind::kAllReduce: REQUIRE(out == sums); break;
        case Kind::kReduce: REQUIRE(out == (r == c_.root ? sums : Bytes())); break;
        case Kind::kBroadcast: REQUIRE(out == given(c_.root, whole)); break;
        case Kind::kAllGather: REQUIRE(out == gathered); break;
        case Kind::kReduceScatter:
          REQUIRE(out == Bytes(sums.begin() + static_cast<std::ptrdiff_t>(before),
                               sums.begin() + static_cast<std::ptrdiff_t>(before + c_.parts[index(r)])));
          before += c_.parts[index(r)];
          break;
        default: FAIL("no such case");
      }
      const bool reads = c_.kind != Kind::kAllReduce && c_.kind != Kind::kBroadcast;
      if (reads) REQUIRE(rank.input.content() == given(r, rank.input.content().size()));
      REQUIRE(rank.input.gaps_are_whole());
      REQUIRE(rank.output.gaps_are_whole());
      REQUIRE(std::all_of(rank.scratch.end() - kGap, rank.scratch.end(), [](std::byte b) { return b == kUntouched; }));
      // Whole cut alignments, and not more than one for each slice beyond what is held in it.
      REQUIRE(rank.scratch_bytes % 256 == 0);
      std::uint64_t held = 0;
      for (const Slice& slice : rank.slices) {
        if (rank.slices.front().before.kind == LocalStep::StepKind::kReduce && c_.kind != Kind::kAllReduce)
          held += (slice.operation.input.front().bytes + 255) / 256 * 256;
      }
      REQUIRE(rank.scratch_bytes == held);
    }
  }

  const Case& c_;
  std::vector<Topology> topologies_;
  std::vector<Rank> ranks_;
};

const std::vector<int> kLayouts[] = {
    {0},          {0, 0, 0},       {0, 1},          {0, 0, 1, 1},       {0, 1, 0, 1},
    {0, 0, 0, 1}, {1, 0, 0, 1, 1}, {0, 0, 0, 1, 1}, {0, 0, 0, 1, 2, 2}, {1, 0, 0, 2, 1, 0}};
const std::uint64_t kTotals[] = {0,    1,    255,  256,   257,   4095,  4096,  4097, 7919,
                                 8191, 8192, 8193, 12287, 12288, 12289, 16500, 40961};
const SliceLimits kLimits[] = {{std::uint64_t{1} << 20, 8}, {8192, 3}, {1, 64}, {4096, 0}, {12288, 2}};

std::string text(const Case& c) {
  std::string out = std::string(name_of(c.kind)) + " root " + std::to_string(c.root) + " nodes";
  for (const int node : c.node_of) out += " " + std::to_string(node);
  out += " pieces";
  for (const std::uint64_t piece : c.pieces) out += " " + std::to_string(piece);
  out += " parts";
  for (const std::uint64_t part : c.parts) out += " " + std::to_string(part);
  out += " own";
  for (const Sizes& pieces : c.own) out += " " + std::to_string(pieces.size());
  return out + " slices of " + std::to_string(c.limits.slice_bytes) + " at most " + std::to_string(c.limits.slices_max);
}

/// Pieces of any sizes, some empty, that are `bytes` together.
Sizes pieces_of(std::mt19937_64& random, std::uint64_t bytes) {
  Sizes pieces;
  while (random() % 3 != 0) {
    pieces.push_back(random() % 4 == 0 ? 0 : random() % (bytes + 1));
    bytes -= pieces.back();
  }
  pieces.push_back(bytes);
  return pieces;
}

Sizes parts_of(std::mt19937_64& random, std::size_t size, std::uint64_t bytes) {
  const Sizes some = {0, 1, 251, 256, 257, bytes / size, bytes / size + 1, bytes / 2};
  Sizes parts;
  for (std::size_t r = 0; r < size; ++r)
    parts.push_back(random() % 2 == 0 ? bytes / size : some[random() % some.size()]);
  return parts;
}

}  // namespace

TEST_CASE("staging/rails: every byte goes where the collective wants it whatever the sizes and nodes",
          "[staging][fast]") {
  std::mt19937_64 random(11);
  for (const std::vector<int>& layout : kLayouts)
    for (const SliceLimits& limits : kLimits)
      for (const std::uint64_t bytes : kTotals)
        for (const Kind kind :
             {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kAllGather, Kind::kReduceScatter}) {
          Case c{layout, kind, -1, {}, {}, limits, {}};
          if (kind == Kind::kReduce || kind == Kind::kBroadcast) c.root = static_cast<int>(random() % layout.size());
          const bool in_parts = kind == Kind::kAllGather || kind == Kind::kReduceScatter;
          if (in_parts) c.parts = parts_of(random, layout.size(), bytes);
          c.pieces = pieces_of(random, in_parts ? total(c.parts) : bytes);
          // Several tensors at once: the own ones end where the common ones do.
          if (random() % 2 == 0 && in_parts) {
            c.pieces.clear();
            for (const std::uint64_t part : c.parts) {
              c.own.push_back(pieces_of(random, part));
              c.pieces.insert(c.pieces.end(), c.own.back().begin(), c.own.back().end());
            }
          } else if (random() % 2 == 0 && kind == Kind::kReduce) {
            c.own.assign(layout.size(), c.pieces);
          }
          INFO(text(c));
          Play(c).run();
        }
}

TEST_CASE("staging/rails: the root of a reduce in place gets from its node what it does not have", "[staging][fast]") {
  for (const std::vector<int>& layout : {std::vector<int>{0, 0, 1}, std::vector<int>{0, 0, 0, 1, 1}}) {
    for (int root = 0; root < static_cast<int>(layout.size()); ++root) {
      std::vector<Topology> topologies;
      std::vector<std::vector<std::byte>> memory(layout.size(), std::vector<std::byte>(30000));
      for (int r = 0; r < static_cast<int>(layout.size()); ++r) {
        const Topology topology(layout, r);
        Operation o;
        o.kind = Kind::kReduce;
        o.op = ReduceOp::kSum;
        o.root = root;
        std::byte* const start = memory[index(r)].data();
        o.input = {{start, 5000}, {start + 6000, 11000}};
        if (r == root) o.output = o.input;
        Bytes scratch(staging::scratch_bytes(o, topology, SliceLimits{}));
        const auto slices = staging::cut_for_rails(o, topology, SliceLimits{}, scratch.data());
        REQUIRE(slices.size() == 1);
        const Slice& slice = slices.front();
        std::uint64_t written = 0;
        for (const staging::Copy& copy : slice.out) written += copy.bytes;
        std::uint64_t received = 0;
        std::uint64_t sent = 0;
        for (const intranode::Transfer& message : slice.after.messages)
          (message.to != nullptr ? received : sent) += message.bytes;
        if (r == root) {
          CHECK(written + received == 16000);
          CHECK(sent == 0);
        } else {
          CHECK(received == 0);
          CHECK(sent == (topology.node_of(root) == topology.my_node() ? written : 0));
        }
      }
    }
  }
}

TEST_CASE("staging/rails: what the last rail has beyond the others is a part alone", "[staging][fast]") {
  Case c{{0, 0, 1, 1}, Kind::kAllReduce, -1, {8192 + 100}, {}, {}, {}};
  Play play(c);
  play.run();
  const Slice& slice = play.rank(0).slices.front();
  CHECK(slice.operation.rail_bytes == Sizes{4096, 4196});
  Sizes parts;
  for (const intranode::Part& part : slice.before.parts) parts.push_back(part.bytes);
  CHECK(parts == Sizes{4096, 4096, 100});
  CHECK(play.rank(1).slices.front().operation.output.front().bytes == 4196);
}

TEST_CASE("staging/rails: averages and factors are taken once", "[staging][fast]") {
  struct Expected {
    ReduceOp op;
    DType dtype;
    intranode::Reduction inside;  // a node of several ranks
    ReduceOp between;
    double factor_of_many;  // the engine's, from such a node
    double factor_of_one;   // and from one of one rank
    intranode::Reduction on_one_node;
  };
  const Expected cases[] = {{ReduceOp::kSum,
                             DType::kFloat32,
                             {DType::kFloat32, ReduceOp::kSum, 1},
                             ReduceOp::kSum,
                             3,
                             3,
                             {DType::kFloat32, ReduceOp::kSum, 1}},
                            {ReduceOp::kAvg,
                             DType::kFloat32,
                             {DType::kFloat32, ReduceOp::kPremulSum, 0.25},
                             ReduceOp::kPremulSum,
                             1,
                             0.25,
                             {DType::kFloat32, ReduceOp::kAvg, 1}},
                            {ReduceOp::kAvg,
                             DType::kInt32,
                             {DType::kInt32, ReduceOp::kSum, 1},
                             ReduceOp::kAvg,
                             3,
                             3,
                             {DType::kInt32, ReduceOp::kAvg, 1}},
                            {ReduceOp::kPremulSum,
                             DType::kFloat32,
                             {DType::kFloat32, ReduceOp::kPremulSum, 3},
                             ReduceOp::kPremulSum,
                             1,
                             3,
                             {DType::kFloat32, ReduceOp::kPremulSum, 3}}};
  std::vector<std::byte> memory(1 << 16);
  std::vector<std::byte> scratch(1 << 16);
  for (const Expected& e : cases) {
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
      Operation o;
      o.kind = kind;
      o.op = e.op;
      o.dtype = e.dtype;
      o.premul = 3;
      o.root = kind == Kind::kReduce ? 0 : -1;
      o.input = {{memory.data(), 4000}};
      o.output = {{memory.data() + 8000, kind == Kind::kReduceScatter ? 1000U : 4000U}};
      if (kind == Kind::kReduceScatter) o.input_bytes = Sizes(4, 1000);
      INFO(name_of(kind) << " " << core::name_of(e.op) << " of " << core::name_of(e.dtype));
      for (const std::vector<int>& layout : {std::vector<int>{0, 0, 0, 1}, std::vector<int>{0, 0, 1, 2}}) {
        const auto many = staging::cut_for_rails(o, Topology(layout, 0), {}, scratch.data());
        CHECK(many.front().before.reduction == e.inside);
        CHECK(many.front().operation.op == e.between);
        CHECK(many.front().operation.premul == e.factor_of_many);
      }
      const auto one = staging::cut_for_rails(o, Topology({0, 0, 0, 1}, 3), {}, nullptr);
      CHECK(one.front().before.kind == LocalStep::StepKind::kNone);
      CHECK(one.front().operation.op == e.between);
      CHECK(one.front().operation.premul == e.factor_of_one);
      const auto within = staging::cut_for_rails(o, Topology({0, 0, 0, 0}, 0), {}, nullptr);
      CHECK_FALSE(within.front().crosses);
      CHECK(within.front().after.reduction == e.on_one_node);
    }
  }
}

TEST_CASE("staging/rails: the witness is of the whole operation and tells sizes apart", "[staging][fast]") {
  std::vector<std::byte> memory(1000);
  const Topology topology({0, 0, 1}, 1);
  const auto witness = [&](Kind kind, std::uint64_t in, std::uint64_t out, Sizes in_sizes, Sizes out_sizes,
                           int root = -1) {
    Operation o;
    o.kind = kind;
    o.root = root;
    o.input = {{memory.data(), in}};
    o.output = {{memory.data(), out}};
    o.input_bytes = std::move(in_sizes);
    o.output_bytes = std::move(out_sizes);
    const Operation w = staging::witness_of(o, topology);
    CHECK(w.scope == Scope::kWitness);
    CHECK((w.input.empty() && w.output.empty()));
    CHECK(w.kind == kind);
    return w;
  };
  CHECK(witness(Kind::kAllReduce, 7, 500, {}, {}).total_bytes == 500);
  CHECK(witness(Kind::kBroadcast, 7, 500, {}, {}, 2).total_bytes == 500);
  CHECK(witness(Kind::kBroadcast, 7, 500, {}, {}, 2).root == 2);
  CHECK(witness(Kind::kReduce, 400, 7, {}, {}, 1).total_bytes == 400);
  CHECK(witness(Kind::kReduce, 400, 7, {}, {}, 1).root == 1);
  CHECK(witness(Kind::kAllReduce, 7, 500, {}, {}).root == -1);
  for (const bool gathers : {true, false}) {
    const Kind kind = gathers ? Kind::kAllGather : Kind::kReduceScatter;
    std::set<int> roots;
    for (const Sizes& sizes : {Sizes{100, 200, 300}, Sizes{200, 100, 300}, Sizes{100, 201, 299}, Sizes{300, 200, 100},
                               Sizes{600, 0, 0}, Sizes{0, 600, 0}}) {
      const Operation w = gathers ? witness(kind, 200, 600, {}, sizes) : witness(kind, 600, 200, sizes, {});
      CHECK(w.total_bytes == 600);
      CHECK((w.input_bytes.empty() && w.output_bytes.empty()));
      CHECK(w.root <= -2);
      CHECK(roots.insert(w.root).second);
    }
  }
  // Of pairs it has what each rank has in mind.
  const Operation pairs = witness(Kind::kAllToAll, 600, 600, {100, 200, 300}, {300, 200, 100});
  CHECK(pairs.root == -1);
  CHECK(pairs.input_bytes == Sizes{100, 200, 300});
  CHECK(pairs.output_bytes == Sizes{300, 200, 100});
  CHECK(witness(Kind::kGather, 250, 0, {}, {}, 0).input_bytes == Sizes{0, 250, 0});
}

TEST_CASE("staging/rails: which kinds have steps inside the nodes", "[staging][fast]") {
  const std::set<Kind> with = {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter, Kind::kBroadcast,
                               Kind::kAllGather, Kind::kGather, Kind::kScatter,       Kind::kAllToAll};
  for (std::size_t kind = 0; kind < schedule::kKindCount; ++kind)
    CHECK(staging::has_rails(static_cast<Kind>(kind)) == (with.count(static_cast<Kind>(kind)) > 0));
}
