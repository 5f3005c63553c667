// Nodes in regions: an allreduce with levels gives the right sums, with the same bits whatever the shares and chunks,
// and crosses the network between regions once per region.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/sum.h"
#include "hybridps/wire/message.h"
#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"
#include "tests/support/recorder.h"

namespace {

using namespace hybridps;
using core::DType;
using core::ReduceOp;
using test::Cluster;
using test::ClusterOptions;
using Bytes = std::vector<std::byte>;

struct Layout {
  std::vector<int> node_of;                // by rank
  std::vector<int> region_of;              // by node
  std::vector<int> region_of_server = {};  // of dedicated servers
};
const std::vector<Layout> kLayouts = {
    {{0, 1}, {0, 1}},
    {{0, 1, 2, 3}, {0, 0, 1, 1}},
    {{0, 1, 2, 3}, {0, 1, 0, 1}},
    {{0, 1, 2, 3}, {0, 1, 1, 1}},
    {{0, 0, 1, 1, 2, 2, 3, 3}, {0, 0, 1, 1}},
    {{0, 0, 0, 1, 2, 2, 3}, {1, 0, 0, 1}},
    {{0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 2, 2}},
    {{0, 1, 1, 2, 3, 4}, {2, 0, 1, 1, 0}},
    {{0, 1, 2, 3}, {0, 0, 1, 1}, {0}},
    {{0, 1, 2, 2}, {0, 1, 1}, {0, 1, 1}},
    {{0, 0, 0, 1, 2, 2, 3}, {1, 0, 0, 1}, {1, 0}},
    {{0, 1, 2, 3, 4, 5}, {0, 0, 1, 1, 2, 2}, {2, 0}},
};

std::size_t index(int i) { return static_cast<std::size_t>(i); }

std::string name(const Layout& layout) {
  std::string text = "ranks on nodes ";
  for (const int node : layout.node_of) text += std::to_string(node);
  text += ", nodes in regions ";
  for (const int region : layout.region_of) text += std::to_string(region);
  if (!layout.region_of_server.empty()) text += ", servers in regions ";
  for (const int region : layout.region_of_server) text += std::to_string(region);
  return text;
}

/// Finite values of many mantissas. `unit`: the bytes of a real number or integer of the type.
Bytes values(DType dtype, std::size_t elements, std::mt19937_64& random) {
  Bytes bytes(elements * core::size_of(dtype));
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
  const auto mask = [&](std::size_t unit, std::uint64_t keep, std::uint64_t set) {
    for (std::size_t at = 0; at + unit <= bytes.size(); at += unit) {
      std::uint64_t value = 0;
      std::memcpy(&value, bytes.data() + at, unit);
      value = (value & keep) | set;
      std::memcpy(bytes.data() + at, &value, unit);
    }
  };
  switch (dtype) {
    case DType::kFloat16: mask(2, 0x83ff, 0x3800); break;
    case DType::kBfloat16: mask(2, 0x807f, 0x3f00); break;
    case DType::kFloat32:
    case DType::kComplex64: mask(4, 0x807fffff, 0x3f000000); break;
    case DType::kFloat64:
    case DType::kComplex128: mask(8, 0x800fffffffffffff, 0x3fe0000000000000); break;
    case DType::kBool: mask(1, 1, 0); break;
    default: break;
  }
  return bytes;
}

/// The sum along the tree: ranks of a node, nodes of a region, regions.
Bytes tree_sum(const Layout& layout, const std::vector<Bytes>& inputs, DType dtype, ReduceOp op) {
  const std::size_t elements = inputs.front().size() / core::size_of(dtype);
  const auto combine = [&](const std::vector<const std::byte*>& parts, reduce::Finish finish) {
    std::vector<reduce::Input> list;
    for (const std::byte* part : parts) list.push_back(reduce::Input{part});
    Bytes out(inputs.front().size());
    reduce::combine(list, out.data(), elements, dtype, op, finish);
    return out;
  };
  reduce::Finish scale;
  reduce::Finish divide;
  const auto ranks = static_cast<int>(inputs.size());
  if (op == ReduceOp::kAvg && core::is_floating(dtype))
    scale = {reduce::Finish::Scaling::kMultiply, 1.0 / ranks, 1};
  else if (op == ReduceOp::kAvg)
    divide = {reduce::Finish::Scaling::kDivideTruncate, 1.0, ranks};
  std::map<int, Bytes> nodes;
  for (int node = 0; node < static_cast<int>(layout.region_of.size()); ++node) {
    std::vector<const std::byte*> parts;
    for (std::size_t rank = 0; rank < inputs.size(); ++rank)
      if (layout.node_of[rank] == node) parts.push_back(inputs[rank].data());
    nodes[node] = combine(parts, scale);
  }
  std::map<int, Bytes> regions;
  for (const int region : layout.region_of) {
    std::vector<const std::byte*> parts;
    for (const auto& [node, sum] : nodes)
      if (layout.region_of[index(node)] == region) parts.push_back(sum.data());
    regions[region] = combine(parts, {});
  }
  std::vector<const std::byte*> parts;
  for (const auto& [region, sum] : regions) parts.push_back(sum.data());
  return combine(parts, divide);
}

/// One allreduce of all ranks on its way: its tensors, and whether they came out right.
struct Sum {
  Sum(const Layout& layout, DType type, ReduceOp o, std::size_t elements, std::mt19937_64& random)
      : dtype(type), op(o) {
    for (std::size_t rank = 0; rank < layout.node_of.size(); ++rank) inputs.push_back(values(type, elements, random));
    expected = tree_sum(layout, inputs, type, o);
    outputs = inputs;
  }
  void submit(Cluster& cluster, core::GroupUid uid, int rank, std::uint64_t sequence) {
    worker::Operation operation;
    operation.kind = schedule::Kind::kAllReduce;
    operation.dtype = dtype;
    operation.op = op;
    Bytes& output = outputs[index(rank)];
    operation.output = {{output.data(), output.size()}};
    cluster.submit(uid, rank, std::move(operation), sequence, [this](const worker::Outcome& outcome) {
      ++done;
      if (!outcome.status.is_ok()) error = outcome.status.message();
    });
  }
  bool is_right() const {
    return error.empty() && std::all_of(outputs.begin(), outputs.end(), [&](const Bytes& o) { return o == expected; });
  }
  DType dtype;
  ReduceOp op;
  std::vector<Bytes> inputs;
  std::vector<Bytes> outputs;
  Bytes expected;
  int done = 0;
  std::string error;
};

/// Calls `seen(from, to, message, data)` for each message of data that goes from one region to another.
template <typename Seen>
void watch_uplinks(ClusterOptions& options, const Layout& layout, Seen seen) {
  options.wrap = [&layout, seen](std::unique_ptr<transport::Transport> inner,
                                 int rank) -> std::unique_ptr<transport::Transport> {
    const auto region_of = [&layout](int member) {
      const int ranks = static_cast<int>(layout.node_of.size());
      return member < ranks ? layout.region_of[index(layout.node_of[index(member)])]
                            : layout.region_of_server[index(member - ranks)];
    };
    const int from = region_of(rank);
    return std::make_unique<test::Recorder>(std::move(inner),
                                            [region_of, seen, from](const wire::Message& message, core::EngineId peer) {
                                              const auto* data = message.as<wire::Data>();
                                              const int to = region_of(static_cast<int>(peer.value - 1000));
                                              if (data != nullptr && to != from) seen(from, to, message, *data);
                                            });
  };
}

ClusterOptions options_of(const Layout& layout, std::uint64_t seed) {
  ClusterOptions options;
  options.node_of = layout.node_of;
  options.region_of = layout.region_of;
  options.servers.assign(layout.region_of_server.size(), 1.0);
  options.region_of_server = layout.region_of_server;
  options.seed = seed;
  return options;
}

}  // namespace

TEST_CASE("cluster/regions: every type, operation, size and layout gives the tree's bits", "[cluster][fast]") {
  const std::vector<std::pair<DType, ReduceOp>> kinds = {
      {DType::kFloat32, ReduceOp::kSum},   {DType::kFloat32, ReduceOp::kAvg},    {DType::kFloat64, ReduceOp::kSum},
      {DType::kBfloat16, ReduceOp::kSum},  {DType::kBfloat16, ReduceOp::kAvg},   {DType::kFloat16, ReduceOp::kSum},
      {DType::kInt32, ReduceOp::kAvg},     {DType::kInt64, ReduceOp::kProduct},  {DType::kUint8, ReduceOp::kSum},
      {DType::kInt8, ReduceOp::kMin},      {DType::kInt16, ReduceOp::kMax},      {DType::kUint16, ReduceOp::kBxor},
      {DType::kUint32, ReduceOp::kBand},   {DType::kUint64, ReduceOp::kBor},     {DType::kBool, ReduceOp::kMax},
      {DType::kComplex64, ReduceOp::kSum}, {DType::kComplex128, ReduceOp::kSum},
  };
  for (const Layout& layout : kLayouts) {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      INFO(name(layout) << ", seed " << seed);
      std::mt19937_64 random(seed);
      ClusterOptions options = options_of(layout, seed);
      if (seed > 1) options.eager_bytes = options.grant_chunks = 1;  // nearly all chunks are granted one by one
      if (seed > 2) options.may_pack = flow::MayPack::kAlways;
      if (seed == 2)
        for (const int region : layout.region_of) options.weights.push_back(region == 0 ? 0.0 : 1.0 + region);
      Cluster cluster(options);
      const core::GroupUid uid = cluster.open_group();
      std::vector<std::unique_ptr<Sum>> sums;
      for (const auto& [dtype, op] : kinds) {
        const std::size_t sizes[] = {0, 1, 67, 331, 1031, 4096, 9001};
        const std::size_t elements = sizes[random() % std::size(sizes)];
        sums.push_back(std::make_unique<Sum>(layout, dtype, op, elements, random));
      }
      for (std::size_t i = 0; i < sums.size(); ++i)
        for (int rank = 0; rank < cluster.size(); ++rank) sums[i]->submit(cluster, uid, rank, i);
      CHECK(cluster.run_until([&] {
        return std::all_of(sums.begin(), sums.end(), [&](const auto& sum) { return sum->done == cluster.size(); });
      }));
      for (const auto& sum : sums) {
        INFO(core::name_of(sum->dtype) << " " << core::name_of(sum->op) << ", " << sum->expected.size() << " bytes");
        CHECK(sum->error.empty());
        CHECK(sum->is_right());
      }
    }
  }
}

TEST_CASE("cluster/regions: the bits do not depend on shares or chunks", "[cluster][fast]") {
  const Layout& layout = kLayouts[5];
  std::vector<Bytes> results;
  for (const std::size_t chunk : {std::size_t{256}, std::size_t{1024}, std::size_t{4096}})
    for (const std::vector<double>& weights : {std::vector<double>{}, {1, 0, 0, 0}, {0, 0, 3, 1}}) {
      std::mt19937_64 random(7);
      ClusterOptions options = options_of(layout, chunk);
      options.chunk_bytes = chunk;
      options.weights = weights;
      Cluster cluster(options);
      const core::GroupUid uid = cluster.open_group();
      Sum sum(layout, DType::kBfloat16, ReduceOp::kSum, 20011, random);
      for (int rank = 0; rank < cluster.size(); ++rank) sum.submit(cluster, uid, rank, 0);
      REQUIRE(cluster.run_until([&] { return sum.done == cluster.size(); }));
      CHECK(sum.is_right());
      results.push_back(sum.outputs.front());
    }
  for (const Bytes& result : results) CHECK(result == results.front());
}

TEST_CASE("cluster/regions: a tensor crosses an uplink once", "[cluster][fast]") {
  for (const Layout& layout : kLayouts) {
    INFO(name(layout));
    std::map<std::pair<int, int>, std::uint64_t> crossed;  // payload, by regions
    std::uint64_t pushed = 0;
    ClusterOptions options = options_of(layout, 3);
    watch_uplinks(options, layout, [&](int from, int to, const wire::Message& message, const wire::Data& data) {
      crossed[{from, to}] += message.payload_bytes;
      if (data.chunk.stage == wire::Stage::kPush) pushed += message.payload_bytes;
    });
    Cluster cluster(options);
    const core::GroupUid uid = cluster.open_group();
    std::mt19937_64 random(3);
    Sum sum(layout, DType::kFloat32, ReduceOp::kSum, 30030, random);
    for (int rank = 0; rank < cluster.size(); ++rank) sum.submit(cluster, uid, rank, 0);
    REQUIRE(cluster.run_until([&] { return sum.done == cluster.size(); }));
    CHECK(sum.is_right());
    // Each byte has one owner: the other regions send it there once, and get it back once.
    const std::uint64_t size = sum.expected.size();
    const auto regions =
        static_cast<std::uint64_t>(*std::max_element(layout.region_of.begin(), layout.region_of.end()) + 1);
    std::uint64_t all = 0;
    for (const auto& [way, bytes] : crossed) all += bytes;
    CHECK(pushed == size * (regions - 1));
    CHECK(all == 2 * size * (regions - 1));
    if (regions == 2) {
      CHECK(crossed[{0, 1}] == size);
      CHECK(crossed[{1, 0}] == size);
    }
  }
}

TEST_CASE("cluster/regions: a small sum and a barrier cross an uplink one way", "[cluster][fast]") {
  for (const Layout& layout : kLayouts) {
    INFO(name(layout));
    const int regions = *std::max_element(layout.region_of.begin(), layout.region_of.end()) + 1;
    std::map<std::pair<int, int>, std::uint64_t> crossed;  // payload, by regions
    std::map<std::pair<int, int>, std::uint64_t> messages;
    std::uint64_t results = 0;
    ClusterOptions options = options_of(layout, 3);
    watch_uplinks(options, layout, [&](int from, int to, const wire::Message& message, const wire::Data& data) {
      crossed[{from, to}] += message.payload_bytes;
      ++messages[{from, to}];
      results += data.chunk.stage == wire::Stage::kResult ? 1 : 0;
    });
    Cluster cluster(options);
    const core::GroupUid uid = cluster.open_group();
    std::uint64_t sequence = 0;
    std::mt19937_64 random(3);
    for (const std::size_t elements : {1, 60, 700, 8000}) {
      INFO(elements << " elements");
      crossed.clear();
      Sum sum(layout, DType::kFloat32, ReduceOp::kSum, elements, random);
      for (int rank = 0; rank < cluster.size(); ++rank) sum.submit(cluster, uid, rank, sequence);
      ++sequence;
      REQUIRE(cluster.run_until([&] { return sum.done == cluster.size(); }));
      CHECK(sum.is_right());
      const bool has_levels = sum.expected.size() > 8 * options.tiny_bytes;
      for (int from = 0; from < regions; ++from)
        for (int to = 0; to < regions; ++to) {
          const auto nodes = std::count(layout.region_of.begin(), layout.region_of.end(), from);
          const std::uint64_t times = from == to ? 0 : has_levels ? 1 : static_cast<std::uint64_t>(nodes);
          CHECK(crossed[{from, to}] == times * sum.expected.size());
        }
    }
    messages.clear();
    int done = 0;
    for (int rank = 0; rank < cluster.size(); ++rank) {
      worker::Operation barrier;
      barrier.kind = schedule::Kind::kBarrier;
      cluster.submit(uid, rank, std::move(barrier), sequence,
                     [&](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
    }
    REQUIRE(cluster.run_until([&] { return done == cluster.size(); }));
    for (const auto& [way, count] : messages)
      CHECK(count ==
            static_cast<std::uint64_t>(std::count(layout.region_of.begin(), layout.region_of.end(), way.first)));
    CHECK(messages.size() == static_cast<std::size_t>(regions * (regions - 1)));
    CHECK(results == 0);
  }
}

TEST_CASE("cluster/regions: other collectives cross an uplink once, too", "[cluster][fast]") {
  using schedule::Kind;
  constexpr std::size_t kCount = 3001;
  for (const Layout& layout : kLayouts)
    for (const Kind kind : {Kind::kAllGather, Kind::kReduceScatter, Kind::kBroadcast, Kind::kReduce}) {
      const int root = static_cast<int>(layout.node_of.size()) - 1;
      INFO(name(layout) << ", " << schedule::name_of(kind));
      const auto region_of = [&](std::size_t rank) { return layout.region_of[index(layout.node_of[rank])]; };
      std::map<std::pair<int, int>, std::uint64_t> crossed;
      ClusterOptions options = options_of(layout, 5);
      watch_uplinks(options, layout, [&](int from, int to, const wire::Message& message, const wire::Data&) {
        crossed[{from, to}] += message.payload_bytes;
      });
      Cluster cluster(options);
      const core::GroupUid uid = cluster.open_group();
      const std::size_t n = layout.node_of.size();
      const auto value = [](std::size_t rank, std::size_t i) { return static_cast<std::int32_t>(rank * 100003 + i); };
      const auto sum = [&](std::size_t i) {
        std::int32_t all = 0;
        for (std::size_t rank = 0; rank < n; ++rank) all += value(rank, i);
        return all;
      };
      const bool gathers = kind == Kind::kAllGather;
      const bool scatters = kind == Kind::kReduceScatter;
      std::vector<std::vector<std::int32_t>> in(n);
      std::vector<std::vector<std::int32_t>> out(n, std::vector<std::int32_t>(kCount * (gathers ? n : 1)));
      int done = 0;
      for (std::size_t rank = 0; rank < n; ++rank) {
        in[rank].resize(kCount * (scatters ? n : 1));
        for (std::size_t i = 0; i < in[rank].size(); ++i) in[rank][i] = value(rank, i);
        worker::Operation o;
        o.kind = kind;
        o.dtype = core::DType::kInt32;
        if (kind == Kind::kReduce || scatters) o.op = ReduceOp::kSum;
        if (kind == Kind::kBroadcast || kind == Kind::kReduce) o.root = root;
        if (kind == Kind::kBroadcast) out[rank] = in[rank];
        const auto piece = [](auto& v) { return worker::Piece{reinterpret_cast<std::byte*>(v.data()), v.size() * 4}; };
        if (kind != Kind::kBroadcast) o.input = {piece(in[rank])};
        if (kind != Kind::kReduce || static_cast<int>(rank) == root) o.output = {piece(out[rank])};
        if (scatters) o.input_bytes.assign(n, kCount * 4);
        if (gathers) o.output_bytes.assign(n, kCount * 4);
        cluster.submit(uid, static_cast<int>(rank), std::move(o), 0,
                       [&](const worker::Outcome& outcome) { done += outcome.status.is_ok() ? 1 : 0; });
      }
      REQUIRE(cluster.run_until([&] { return done == static_cast<int>(n); }));
      bool right = true;
      for (std::size_t rank = 0; rank < n; ++rank)
        for (std::size_t i = 0; i < out[rank].size(); ++i) {
          if (kind == Kind::kReduce && static_cast<int>(rank) != root) continue;
          const std::int32_t wanted = gathers                    ? value(i / kCount, i % kCount)
                                      : kind == Kind::kBroadcast ? value(index(root), i)
                                      : scatters                 ? sum(rank * kCount + i)
                                                                 : sum(i);
          right = right && out[rank][i] == wanted;
        }
      CHECK(right);
      if (*std::max_element(layout.region_of.begin(), layout.region_of.end()) != 1) continue;
      std::uint64_t ranks_in[2] = {0, 0};
      for (std::size_t rank = 0; rank < n; ++rank) ++ranks_in[region_of(rank)];
      const int home = region_of(index(root));
      if (gathers) CHECK(crossed[{0, 1}] == ranks_in[0] * kCount * 4);
      if (gathers) CHECK(crossed[{1, 0}] == ranks_in[1] * kCount * 4);
      if (scatters) CHECK(crossed[{0, 1}] == ranks_in[1] * kCount * 4);
      if (scatters) CHECK(crossed[{1, 0}] == ranks_in[0] * kCount * 4);
      if (kind == Kind::kBroadcast) CHECK(crossed[{home, 1 - home}] == kCount * 4);
      if (kind == Kind::kReduce) CHECK(crossed[{1 - home, home}] == kCount * 4);
    }
}

TEST_CASE("cluster/regions: large sums with little memory do not wait for each other", "[cluster][fast]") {
  for (const Layout& layout : kLayouts)
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      INFO(name(layout) << ", seed " << seed);
      std::mt19937_64 random(seed);
      ClusterOptions options = options_of(layout, seed);
      options.eager_bytes = seed % 3 == 0 ? 1 : 4096;
      options.grant_chunks = static_cast<std::uint32_t>(1 + seed % 2);
      options.window_bytes = 4096;
      test_support::Faults slow;  // some nodes, of each region others
      slow.delay = 1;
      slow.delay_max = 60;
      options.wrap = [&](std::unique_ptr<transport::Transport> inner,
                         int rank) -> std::unique_ptr<transport::Transport> {
        const bool is_slow = (static_cast<std::uint64_t>(rank) * 7 + seed) % 3 == 0;
        return std::make_unique<test_support::FaultyTransport>(
            std::move(inner), is_slow ? slow : test_support::Faults(), seed * 100 + index(rank));
      };
      Cluster cluster(options);
      const core::GroupUid uid = cluster.open_group();
      std::vector<std::unique_ptr<Sum>> sums;
      for (std::uint64_t i = 0; i < 3; ++i) {
        sums.push_back(std::make_unique<Sum>(layout, DType::kInt32, ReduceOp::kSum, 60'000, random));
        for (int rank = 0; rank < cluster.size(); ++rank) sums.back()->submit(cluster, uid, rank, i);
      }
      REQUIRE(cluster.run_until([&] {
        return std::all_of(sums.begin(), sums.end(), [&](const auto& sum) { return sum->done == cluster.size(); });
      }));
      for (const auto& sum : sums) CHECK(sum->is_right());
    }
}

TEST_CASE("cluster/regions: groups whose ranks begin in other orders do not wait for each other", "[cluster][fast]") {
  // One rank a node: contributions are paced, and what is held back must come when another region's owner asks for it.
  const Layout layout{{0, 1, 2, 3, 4, 5}, {0, 0, 0, 1, 1, 1}};
  for (std::uint64_t seed = 1; seed <= 6; ++seed) {
    std::mt19937_64 random(seed);
    ClusterOptions options = options_of(layout, seed);
    options.eager_bytes = 8 * 1024;
    options.window_bytes = 16 * 1024;
    options.grant_chunks = 1;
    Cluster cluster(options);
    const core::GroupUid uids[] = {cluster.open_group(), cluster.open_group()};
    std::vector<std::unique_ptr<Sum>> sums;
    for (int i = 0; i < 2; ++i)
      sums.push_back(std::make_unique<Sum>(layout, DType::kInt32, ReduceOp::kSum, 120'000, random));
    for (int turn = 0; turn < 2; ++turn)
      for (int rank = 0; rank < cluster.size(); ++rank) {
        const auto which = static_cast<std::size_t>((rank + turn + static_cast<int>(seed)) % 2);
        sums[which]->submit(cluster, uids[which], rank, 0);
        for (std::uint64_t i = 0; i < random() % 400; ++i) cluster.progress();
      }
    REQUIRE(cluster.run_until([&] {
      return std::all_of(sums.begin(), sums.end(), [&](const auto& sum) { return sum->done == cluster.size(); });
    }));
    for (const auto& sum : sums) CHECK(sum->is_right());
  }
}
