#include "hybridps/staging/slices.h"

#include <algorithm>
#include <utility>

#include "hybridps/staging/cuts.h"

namespace hybridps::staging {
namespace {

using schedule::Kind;
using worker::Operation;
using worker::Piece;

/// Adds copies between the bytes [from, to) of the concatenation of `pieces` and the staging, from `offset` on.
void add_copies(std::vector<Copy>& copies, const std::vector<Piece>& pieces, std::uint64_t from, std::uint64_t to,
                std::uint64_t offset) {
  std::uint64_t begin = 0;
  for (const Piece& piece : pieces) {
    const std::uint64_t end = begin + piece.bytes;
    const std::uint64_t first = std::max(from, begin);
    const std::uint64_t last = std::min(to, end);
    if (first < last) copies.push_back({piece.data + (first - begin), offset + (first - from), last - first});
    begin = end;
  }
}

/// An offset instead of an address, until the slice is bound.
Piece at(std::uint64_t offset, std::uint64_t bytes) { return {reinterpret_cast<std::byte*>(offset), bytes}; }

/// The operation without its pieces.
Operation shell(const Operation& operation) {
  Operation copy = operation;
  copy.input.clear();
  copy.output.clear();
  return copy;
}

/// One part per rank. Slice `i` of `count` takes its share of each part.
struct Parts {
  Parts(const std::vector<std::uint64_t>& parts, std::uint64_t i, std::uint64_t count) {
    std::uint64_t begin = 0;
    for (const std::uint64_t part : parts) {
      const std::uint64_t first = cut_at(part, i, count);
      const std::uint64_t last = cut_at(part, i + 1, count);
      from.push_back(begin + first);
      bytes.push_back(last - first);
      offset.push_back(total);
      inside.push_back(first);
      total += last - first;
      begin += part;
    }
  }
  std::vector<std::uint64_t> from;    // in the concatenation of all parts
  std::vector<std::uint64_t> inside;  // in the rank's part
  std::vector<std::uint64_t> bytes;
  std::vector<std::uint64_t> offset;  // in the staging
  std::uint64_t total = 0;
};

Slice all_reduce(const Operation& o, std::uint64_t from, std::uint64_t to) {
  Slice slice{shell(o), to - from, {}, {}};
  add_copies(slice.in, o.output, from, to, 0);
  slice.out = slice.in;
  slice.operation.output = {at(0, to - from)};
  return slice;
}

Slice reduce(const Operation& o, std::uint64_t from, std::uint64_t to, bool root) {
  Slice slice{shell(o), to - from, {}, {}};
  add_copies(slice.in, o.input, from, to, 0);
  slice.operation.input = {at(0, to - from)};
  if (root) {
    add_copies(slice.out, o.output, from, to, 0);
    slice.operation.output = slice.operation.input;
  }
  return slice;
}

Slice broadcast(const Operation& o, std::uint64_t from, std::uint64_t to, bool root) {
  Slice slice{shell(o), to - from, {}, {}};
  add_copies(root ? slice.in : slice.out, o.output, from, to, 0);
  slice.operation.output = {at(0, to - from)};
  return slice;
}

// A rank's own part needs no second place: the engine takes the part where it lies.
Slice all_gather(const Operation& o, std::size_t me, std::uint64_t i, std::uint64_t count) {
  const Parts parts(o.output_bytes, i, count);
  Slice slice{shell(o), parts.total, {}, {}};
  for (std::size_t r = 0; r < parts.from.size(); ++r)
    add_copies(slice.out, o.output, parts.from[r], parts.from[r] + parts.bytes[r], parts.offset[r]);
  add_copies(slice.in, o.input, parts.inside[me], parts.inside[me] + parts.bytes[me], parts.offset[me]);
  slice.operation.output = {at(0, parts.total)};
  slice.operation.output_bytes = parts.bytes;
  slice.operation.input = {at(parts.offset[me], parts.bytes[me])};
  return slice;
}

Slice reduce_scatter(const Operation& o, std::size_t me, std::uint64_t i, std::uint64_t count) {
  const Parts parts(o.input_bytes, i, count);
  Slice slice{shell(o), parts.total, {}, {}};
  for (std::size_t r = 0; r < parts.from.size(); ++r)
    add_copies(slice.in, o.input, parts.from[r], parts.from[r] + parts.bytes[r], parts.offset[r]);
  add_copies(slice.out, o.output, parts.inside[me], parts.inside[me] + parts.bytes[me], parts.offset[me]);
  slice.operation.input = {at(0, parts.total)};
  slice.operation.input_bytes = parts.bytes;
  slice.operation.output = {at(parts.offset[me], parts.bytes[me])};
  return slice;
}

/// The root of a gather: its input lies inside its output. The root of a scatter: its output lies inside its input.
Slice rooted(const Operation& o, std::size_t me) {
  const bool gather = o.kind == Kind::kGather;
  const Parts parts(gather ? o.output_bytes : o.input_bytes, 0, 1);
  const Piece whole = at(0, parts.total);
  const Piece own = at(parts.offset[me], parts.bytes[me]);
  Slice slice{shell(o), parts.total, {}, {}};
  add_copies(slice.in, o.input, 0, gather ? own.bytes : parts.total, gather ? parts.offset[me] : 0);
  add_copies(slice.out, o.output, 0, gather ? parts.total : own.bytes, gather ? 0 : parts.offset[me]);
  slice.operation.input = {gather ? own : whole};
  slice.operation.output = {gather ? whole : own};
  return slice;
}

/// Input and output lie one after the other.
Slice separate(const Operation& o) {
  const std::uint64_t input = bytes_of(o.input);
  const std::uint64_t output = bytes_of(o.output);
  const std::uint64_t second = (input + kCutAlignment - 1) / kCutAlignment * kCutAlignment;
  Slice slice{shell(o), output > 0 ? second + output : input, {}, {}};
  add_copies(slice.in, o.input, 0, input, 0);
  add_copies(slice.out, o.output, 0, output, second);
  if (!o.input.empty()) slice.operation.input = {at(0, input)};
  if (!o.output.empty()) slice.operation.output = {at(second, output)};
  return slice;
}

}  // namespace

void Slice::bind(std::byte* base, std::byte* device) {
  for (std::vector<Piece>* pieces : {&operation.input, &operation.output}) {
    std::byte* const at = is_direct() && pieces == &sent_pieces() ? device : base;
    for (Piece& piece : *pieces) piece.data = at + reinterpret_cast<std::uintptr_t>(piece.data);
  }
}

std::uint64_t slice_count(std::uint64_t total, int ranks, const SliceLimits& limits) {
  const std::uint64_t slice_bytes = std::max(limits.slice_bytes, kCutAlignment * static_cast<std::uint64_t>(ranks));
  if (total <= slice_bytes) return 1;
  const std::uint64_t shares = (total + slice_bytes - 1) / slice_bytes;  // 2 n - 2 of them are n slices
  const std::uint64_t most = std::max(limits.slices_max, std::uint64_t{1});
  if (most == 1) return 1;
  return std::max(std::min((shares + 1) / 2 + 1, most), (total + kLargeSliceBytes - 1) / kLargeSliceBytes + 1);
}

std::vector<Slice> cut(const worker::Operation& o, int rank, int size, const SliceLimits& limits) {
  const auto me = static_cast<std::size_t>(rank);
  const bool root = rank == o.root;
  std::uint64_t total = 0;
  switch (o.kind) {
    case Kind::kAllReduce:
    case Kind::kBroadcast: total = bytes_of(o.output); break;
    case Kind::kReduce: total = bytes_of(o.input); break;
    case Kind::kAllGather: total = sum(o.output_bytes); break;
    case Kind::kReduceScatter: total = sum(o.input_bytes); break;
    default: break;
  }
  const std::uint64_t count = slice_count(total, size, limits);
  std::vector<Slice> slices;
  for (std::uint64_t i = 0; i < count; ++i) {
    const std::uint64_t from = cut_at(total, i, count);
    const std::uint64_t to = cut_at(total, i + 1, count);
    switch (o.kind) {
      case Kind::kAllReduce: slices.push_back(all_reduce(o, from, to)); break;
      case Kind::kReduce: slices.push_back(reduce(o, from, to, root)); break;
      case Kind::kBroadcast: slices.push_back(broadcast(o, from, to, root)); break;
      case Kind::kAllGather: slices.push_back(all_gather(o, me, i, count)); break;
      case Kind::kReduceScatter: slices.push_back(reduce_scatter(o, me, i, count)); break;
      case Kind::kGather:
      case Kind::kScatter: slices.push_back(root ? rooted(o, me) : separate(o)); break;
      default: slices.push_back(separate(o)); break;
    }
  }
  return slices;
}

}  // namespace hybridps::staging
