#include "hybridps/staging/slices.h"

#include <algorithm>
#include <numeric>
#include <vector>

#include "hybridps/staging/cuts.h"
#include "hybridps/staging/ring.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using staging::cut;
using staging::cut_at;
using staging::kCutAlignment;
using staging::kLargeSliceBytes;
using staging::Ring;
using staging::Slice;
using staging::slice_count;
using staging::SliceLimits;

constexpr SliceLimits kSmall{4096, 5};

std::uint64_t bytes_of(const std::vector<staging::Copy>& copies) {
  std::uint64_t bytes = 0;
  for (const auto& copy : copies) bytes += copy.bytes;
  return bytes;
}

worker::Operation operation(Kind kind, std::vector<worker::Piece> input, std::vector<worker::Piece> output,
                            int root = -1) {
  worker::Operation o;
  o.kind = kind;
  o.input = std::move(input);
  o.output = std::move(output);
  o.root = root;
  return o;
}

TEST_CASE("staging/slices: an allreduce of several pieces is cut once and whole", "[staging][fast]") {
  std::vector<std::byte> memory(100000);
  std::vector<worker::Piece> pieces = {{memory.data(), 1000}, {memory.data() + 2000, 0}, {memory.data() + 3000, 90000}};
  const auto slices = cut(operation(Kind::kAllReduce, {}, pieces), 0, 2, kSmall);
  CHECK(slices.size() == 5);
  std::vector<int> seen(memory.size(), 0);
  for (const Slice& slice : slices) {
    CHECK(bytes_of(slice.in) == slice.staging_bytes);
    CHECK(slice.operation.output.front().bytes == slice.staging_bytes);
    for (const auto& copy : slice.out)
      for (std::uint64_t i = 0; i < copy.bytes; ++i) ++seen[static_cast<std::size_t>(copy.device - memory.data()) + i];
  }
  for (std::size_t i = 0; i < seen.size(); ++i) {
    const bool inside = i < 1000 || (i >= 3000 && i < 93000);
    REQUIRE(seen[i] == (inside ? 1 : 0));
  }
}

TEST_CASE("staging/slices: small and empty operations are one slice", "[staging][fast]") {
  std::byte one{};
  for (const Kind kind : {Kind::kAllReduce, Kind::kBroadcast}) {
    CHECK(cut(operation(kind, {}, {{&one, 0}}, 0), 0, 2, kSmall).size() == 1);
    CHECK(cut(operation(kind, {}, {{&one, 1}}, 0), 0, 2, kSmall).size() == 1);
  }
  const auto barrier = cut(operation(Kind::kBarrier, {}, {}), 0, 2, kSmall);
  REQUIRE(barrier.size() == 1);
  CHECK(barrier.front().staging_bytes == 0);
}

TEST_CASE("staging/slices: the first and the last slice are half as large as the others", "[staging][fast]") {
  std::byte* const nowhere = nullptr;
  const auto mebibytes_of = [&](std::uint64_t mebibytes) {
    std::vector<std::uint64_t> sizes;
    for (const Slice& slice :
         cut(operation(Kind::kAllReduce, {}, {{nowhere, mebibytes << 20}}), 0, 2, staging::SliceLimits{})) {
      CHECK(slice.staging_bytes % (1 << 20) == 0);
      sizes.push_back(slice.staging_bytes >> 20);
    }
    return sizes;
  };
  using Sizes = std::vector<std::uint64_t>;
  CHECK(mebibytes_of(4) == Sizes{4});
  CHECK(mebibytes_of(8) == Sizes{4, 4});
  CHECK(mebibytes_of(12) == Sizes{3, 6, 3});
  CHECK(mebibytes_of(24) == Sizes{4, 8, 8, 4});
  CHECK(mebibytes_of(64) == Sizes{8, 16, 16, 16, 8});
  CHECK(mebibytes_of(256) == Sizes{32, 64, 64, 64, 32});
  CHECK(mebibytes_of(320) == Sizes{32, 64, 64, 64, 64, 32});
}

TEST_CASE("staging/slices: large operations have more slices, so that the ring holds several", "[staging][fast]") {
  const SliceLimits limits;
  constexpr std::uint64_t kMiB = std::uint64_t{1} << 20;
  CHECK(slice_count(64 * kMiB, 16, limits) == 5);
  CHECK(slice_count(256 * kMiB, 16, limits) == 5);
  for (const std::uint64_t total : {257 * kMiB, 1024 * kMiB, 4096 * kMiB + 8}) {
    const std::uint64_t count = slice_count(total, 16, limits);
    for (std::uint64_t i = 0; i < count; ++i)
      CHECK(cut_at(total, i + 1, count) - cut_at(total, i, count) <= kLargeSliceBytes + kCutAlignment);
    CHECK(count <= total / kLargeSliceBytes + 2);
  }
  CHECK(slice_count(4096 * kMiB, 16, {4 * kMiB, 1}) == 1);
}

TEST_CASE("staging/slices: ranks with different parts cut an all_gather alike", "[staging][fast]") {
  std::vector<std::byte> in(50000);
  std::vector<std::byte> out(90000);
  const std::vector<std::uint64_t> parts = {40000, 0, 50000};
  std::vector<std::vector<Slice>> by_rank;
  for (int r = 0; r < 3; ++r) {
    auto o = operation(Kind::kAllGather, {{in.data(), parts[static_cast<std::size_t>(r)]}}, {{out.data(), out.size()}});
    o.output_bytes = parts;
    by_rank.push_back(cut(o, r, 3, kSmall));
  }
  CHECK(by_rank[0].size() == 5);
  std::vector<std::uint64_t> whole(3, 0);
  for (std::size_t i = 0; i < by_rank[0].size(); ++i) {
    for (std::size_t r = 0; r < 3; ++r) {
      CHECK(by_rank[r][i].operation.output_bytes == by_rank[0][i].operation.output_bytes);
      CHECK(bytes_of(by_rank[r][i].in) == by_rank[0][i].operation.output_bytes[r]);
      whole[r] += bytes_of(by_rank[r][i].in);
    }
    CHECK(bytes_of(by_rank[0][i].out) == by_rank[0][i].staging_bytes);
  }
  CHECK(whole == parts);
}

TEST_CASE("staging/slices: roots and others copy what they need", "[staging][fast]") {
  std::vector<std::byte> memory(300);
  auto gather = operation(Kind::kGather, {{memory.data(), 100}}, {}, 1);
  const auto other = cut(gather, 0, 3, kSmall).front();
  CHECK(bytes_of(other.in) == 100);
  CHECK(other.out.empty());
  gather.output = {{memory.data(), 300}};
  gather.output_bytes = {100, 100, 100};
  const auto root = cut(gather, 1, 3, kSmall).front();
  CHECK(root.in.front().offset == 100);
  CHECK(bytes_of(root.out) == 300);

  const auto sends = operation(Kind::kBroadcast, {}, {{memory.data(), 300}}, 0);
  CHECK(cut(sends, 0, 2, kSmall).front().out.empty());
  CHECK(cut(sends, 1, 2, kSmall).front().in.empty());

  const auto exchange =
      cut(operation(Kind::kAllToAll, {{memory.data(), 100}}, {{memory.data() + 100, 200}}), 0, 2, kSmall);
  const auto& o = exchange.front().operation;
  CHECK(o.input.front().data + 100 <= o.output.front().data);
}

TEST_CASE("staging/ring: places are used again in turn and whoever is covered is named", "[staging][fast]") {
  Ring ring(1024);
  CHECK(ring.take(300, 1).offset == 0);
  CHECK(ring.take(0, 2).displaced == 0);
  CHECK(ring.take(300, 3).offset == 512);
  const auto third = ring.take(400, 4);  // does not fit behind
  CHECK(third.offset == 0);
  CHECK(third.displaced == 1);
  const auto fourth = ring.take(512, 5);
  CHECK(fourth.offset == 512);
  CHECK(fourth.displaced == 3);
  const auto whole = ring.take(1024, 6);
  CHECK(whole.displaced == 5);
  CHECK(ring.uses() == 1);
}

}  // namespace
