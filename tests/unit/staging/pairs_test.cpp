// Gather, scatter and all_to_all where the ranks of a node work together: what goes which way.
#include "hybridps/staging/pairs.h"

#include <algorithm>
#include <map>

#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using intranode::FakeLocalGroups;
using schedule::Topology;
using staging::Slice;

/// Bytes that each rank has for each: some nothing, some ranks nothing at all.
std::vector<std::vector<std::uint64_t>> random_splits(std::mt19937_64& random, std::size_t size) {
  std::vector<std::vector<std::uint64_t>> splits(size, std::vector<std::uint64_t>(size, 0));
  const std::size_t idle = random() % (size + 2);
  for (std::size_t from = 0; from < size; ++from)
    for (std::size_t to = 0; to < size; ++to)
      if (from != idle && to != idle && random() % 3 != 0) splits[from][to] = 4 * (random() % 3000);
  return splits;
}

std::uint64_t bytes_of(const std::vector<staging::Copy>& copies) {
  std::uint64_t bytes = 0;
  for (const auto& copy : copies) bytes += copy.bytes;
  return bytes;
}

const std::vector<int> kLayouts[] = {{0, 0},       {0, 0, 0, 0}, {0, 0, 1, 1},
                                     {0, 1, 0, 1}, {0, 0, 0, 1}, {1, 0, 0, 2, 1, 0}};

TEST_CASE("staging/pairs: what stays on a node is not staged and what leaves it is once", "[staging][fast]") {
  std::mt19937_64 random(7);
  std::vector<std::byte> input(1 << 18);
  std::vector<std::byte> output(1 << 18);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int>& layout = kLayouts[static_cast<std::size_t>(round) % std::size(kLayouts)];
    const auto size = layout.size();
    const auto splits = random_splits(random, size);
    std::map<std::pair<int, int>, std::vector<std::uint64_t>> sent;  // between ranks of a node
    std::map<std::pair<int, int>, std::vector<std::uint64_t>> received;
    for (std::size_t r = 0; r < size; ++r) {
      const Topology topology(layout, static_cast<int>(r));
      worker::Operation o;
      o.kind = Kind::kAllToAll;
      std::uint64_t in = 0;
      std::uint64_t out = 0;
      std::uint64_t in_remote = 0;
      std::uint64_t out_remote = 0;
      for (std::size_t p = 0; p < size; ++p) {
        o.input_bytes.push_back(splits[r][p]);
        o.output_bytes.push_back(splits[p][r]);
        in += splits[r][p];
        out += splits[p][r];
        if (layout[p] == layout[r]) continue;
        in_remote += splits[r][p];
        out_remote += splits[p][r];
      }
      o.input = {{input.data(), in}};
      o.output = {{output.data(), out}};
      REQUIRE(staging::check_pairs(o, topology).is_ok());
      const Slice slice = staging::cut_pairs(o, topology);
      REQUIRE(slice.crosses == (topology.nodes() > 1));
      REQUIRE(bytes_of(slice.in) == in_remote);
      REQUIRE(bytes_of(slice.out) == out_remote);
      REQUIRE(slice.operation.input.front().bytes == in_remote);
      REQUIRE(slice.operation.output.front().bytes == out_remote);
      REQUIRE(slice.staging_bytes >= in_remote + out_remote);
      REQUIRE(slice.staging_bytes < in_remote + out_remote + 256);
      std::uint64_t moved = 0;
      for (const auto& move : slice.moves) moved += move.bytes;
      REQUIRE(moved == splits[r][r]);
      // Every byte of the output is written once.
      std::vector<int> seen(out, 0);
      const auto see = [&](const std::byte* at, std::uint64_t bytes) {
        for (std::uint64_t i = 0; i < bytes; ++i) ++seen[static_cast<std::size_t>(at - output.data()) + i];
      };
      for (const auto& copy : slice.out) see(copy.device, copy.bytes);
      for (const auto& move : slice.moves) see(static_cast<const std::byte*>(move.to), move.bytes);
      const auto& mine = topology.ranks_of(topology.my_node());
      const staging::LocalStep& step = slice.crosses ? slice.beside : slice.after;
      REQUIRE((step.kind == staging::LocalStep::StepKind::kExchange) == (mine.size() > 1));
      for (const auto& message : step.messages) {
        const int peer = mine[static_cast<std::size_t>(message.peer)];
        const int me = static_cast<int>(r);
        if (message.to != nullptr) see(message.to, message.bytes);
        (message.to != nullptr ? received[{peer, me}] : sent[{me, peer}]).push_back(message.bytes);
      }
      REQUIRE(std::ranges::all_of(seen, [](int count) { return count == 1; }));
    }
    REQUIRE(sent == received);
  }
}

TEST_CASE("staging/pairs: what a rank has for itself is as much as it expects and others' parts are in one place",
          "[staging][fast]") {
  std::vector<std::byte> memory(1000);
  const Topology topology({0, 0, 1}, 0);
  worker::Operation o;
  o.kind = Kind::kAllToAll;
  o.input = {{memory.data(), 300}};
  o.output = {{memory.data() + 400, 250}, {memory.data() + 700, 50}};
  o.input_bytes = {100, 100, 100};
  o.output_bytes = {100, 100, 100};
  CHECK(staging::check_pairs(o, topology).is_ok());  // the part of another node's rank may lie in two
  o.output_bytes = {100, 160, 40};
  CHECK(std::string(staging::check_pairs(o, topology).message()).find("in several places") != std::string::npos);
  o.output_bytes = {60, 100, 140};
  CHECK(std::string(staging::check_pairs(o, topology).message()).find("100 bytes for itself and expects 60") !=
        std::string::npos);

  // In place: nothing is moved.
  worker::Operation gather;
  gather.kind = Kind::kGather;
  gather.root = 0;
  gather.input = {{memory.data(), 100}};
  gather.output = {{memory.data(), 300}};
  gather.output_bytes = {100, 100, 100};
  CHECK(staging::cut_pairs(gather, topology).moves.empty());
}

TEST_CASE("staging/pairs: all_to_all with any splits and the bytes go where they should", "[staging][fast]") {
  std::uint64_t seed = 90;
  for (const auto& layout : kLayouts) {
    for (const int queues : {1, 8, 32}) {
      INFO("ranks " << layout.size() << " queues " << queues);
      ClusterThread cluster(nodes(layout, ++seed));
      const Hub hub = FakeLocalGroups::make_hub();
      auto all = ranks(cluster, seed, queues, small(), hub);
      std::mt19937_64 random(seed);
      const std::size_t size = layout.size();
      const bool one_node = Topology(layout, 0).nodes() == 1;
      std::vector<std::uint64_t> to_host(size, 0);
      std::vector<std::uint64_t> to_device(size, 0);
      std::vector<std::uint64_t> within(size, 0);
      std::uint64_t exchanged = 0;
      struct Seen {
        Values input;
        Values output;
        Values expected;
        std::shared_ptr<Staged> staged;
      };
      std::vector<std::unique_ptr<Seen>> seen;
      for (std::uint32_t turn = 0; turn < 6; ++turn) {
        const auto splits = random_splits(random, size);
        for (std::size_t r = 0; r < size; ++r) {
          auto s = std::make_unique<Seen>();
          worker::Operation o;
          o.kind = Kind::kAllToAll;
          for (std::size_t p = 0; p < size; ++p) {
            o.input_bytes.push_back(splits[r][p]);
            o.output_bytes.push_back(splits[p][r]);
            const auto pair = [&](std::size_t a, std::size_t b) { return static_cast<int>(a * size + b); };
            for (std::size_t i = 0; i < splits[r][p] / 4; ++i) s->input.push_back(value(pair(r, p), i, turn));
            for (std::size_t i = 0; i < splits[p][r] / 4; ++i) s->expected.push_back(value(pair(p, r), i, turn));
            if (p == r)
              within[r] += splits[r][r];
            else if (layout[p] == layout[r])
              exchanged += splits[r][p];
            else
              to_host[r] += splits[r][p], to_device[r] += splits[p][r];
          }
          s->output.assign(s->expected.size(), -1);
          o.input = {piece(s->input)};
          o.output = {piece(s->output)};
          s->staged = all[r].enqueue(o);
          REQUIRE(s->staged);
          seen.push_back(std::move(s));
        }
      }
      for (const auto& s : seen) {
        REQUIRE(eventually([&] { return s->staged->is_over(); }));
        REQUIRE(s->staged->status().to_string() == "ok");
        REQUIRE((s->output == s->expected));
      }
      for (std::size_t r = 0; r < size; ++r) {
        const FakeDevice::Copied copied = all[r].gpu->copied_bytes();
        CHECK(copied.to_host == to_host[r]);
        CHECK(copied.to_device == to_device[r]);
        CHECK(copied.within == within[r]);
        if (one_node) CHECK(all[r].channel->staging_bytes() == 0);
      }
      CHECK(FakeLocalGroups::exchanged_bytes(*hub) == exchanged);
      CHECK(FakeLocalGroups::mismatches(*hub) == 0);
      CHECK(FakeLocalGroups::is_one_order(*hub));
    }
  }
}

}  // namespace
