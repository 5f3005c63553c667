#include "hybridps/schedule/plan.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <string>

#include "hybridps/core/config.h"
#include "tests/support/catch.h"

namespace {

using namespace hybridps::schedule;
using hybridps::core::DType;

using Random = std::mt19937_64;
constexpr std::uint64_t kGranule = 64;

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

/// 1..9 ranks on nodes that each have at least one, in any order.
std::vector<int> random_nodes(Random& random, int ranks_min = 1) {
  const int size = ranks_min + static_cast<int>(random() % static_cast<std::uint64_t>(10 - ranks_min));
  const int nodes = 1 + static_cast<int>(random() % static_cast<std::uint64_t>(size));
  std::vector<int> node_of;
  for (int r = 0; r < size; ++r)
    node_of.push_back(r < nodes ? r : static_cast<int>(random() % static_cast<std::uint64_t>(nodes)));
  std::shuffle(node_of.begin(), node_of.end(), random);
  return node_of;
}

int node_count(const std::vector<int>& node_of) { return 1 + *std::max_element(node_of.begin(), node_of.end()); }

std::vector<double> random_weights(Random& random, int nodes) {
  std::vector<double> weights;
  for (int n = 0; n < nodes; ++n) weights.push_back(std::uniform_real_distribution<double>(0.2, 5)(random));
  return weights;
}

std::string text(const std::vector<int>& node_of) {
  std::string result = "nodes ";
  for (const int node : node_of) result += std::to_string(node);
  return result;
}

std::vector<std::uint64_t> random_sizes(Random& random, std::size_t count) {
  std::vector<std::uint64_t> sizes;
  for (std::size_t i = 0; i < count; ++i) sizes.push_back(random() % 5 == 0 ? 0 : 4 * (random() % 50000));
  return sizes;
}

bool same(const Span& a, const Span& b) {
  return a.id == b.id && a.owner == b.owner && a.source == b.source && a.sink == b.sink && a.bytes == b.bytes &&
         a.input_offset == b.input_offset && a.output_offset == b.output_offset && a.chunk_bytes == b.chunk_bytes &&
         a.chunks == b.chunks;
}

bool same(const std::vector<Span>& a, const std::vector<Span>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const Span& x, const Span& y) { return same(x, y); });
}

/// A reduce_scatter's chunks are cut for two in a sender's part of the default window, on whole 4 KiB.
std::uint32_t chunk_bytes_of(Kind kind, const Topology& topology, const Limits& limits) {
  if (kind != Kind::kReduceScatter) return limits.chunk_bytes;
  const std::uint64_t part = hybridps::core::Config{}.window_bytes / topology.fan();
  const std::uint64_t half = std::max<std::uint64_t>(part / 2 / 4096 * 4096, 16 * 1024);
  return static_cast<std::uint32_t>(std::min<std::uint64_t>(half, limits.chunk_bytes));
}

void require_chunks(const Span& span, std::uint32_t chunk_bytes) {
  REQUIRE(span.chunks >= 1);
  REQUIRE(span.chunk_bytes == chunk_bytes);
  REQUIRE(std::uint64_t{span.chunks} * span.chunk_bytes >= span.bytes);
  REQUIRE((span.bytes == 0 ? span.chunks == 1 : std::uint64_t{span.chunks - 1} * span.chunk_bytes < span.bytes));
}

/// One tensor, cut: in order, without gaps, on granules.
void require_tensor_cover(const std::vector<Span>& plan, std::uint64_t bytes, const Limits& limits) {
  std::uint64_t at = 0;
  std::set<std::uint32_t> ids;
  for (const Span& span : plan) {
    REQUIRE(span.input_offset == at);
    REQUIRE(span.output_offset == at);
    at += span.bytes;
    if (at < bytes) REQUIRE(at % kGranule == 0);
    REQUIRE(ids.insert(span.id).second);
    require_chunks(span, limits.chunk_bytes);
  }
  REQUIRE(at == bytes);
  REQUIRE_FALSE(plan.empty());
}

struct NodeLoad {
  std::uint64_t sent = 0;
  std::uint64_t received = 0;
};

/// What each node sends and receives over the network when spans take the way drawn in plan.h.
std::vector<NodeLoad> loads(const std::vector<Span>& plan, const Topology& topology) {
  std::vector<NodeLoad> load(index(topology.nodes()));
  const auto move = [&](int from, int to, std::uint64_t bytes) {
    const int a = topology.node_of(from);
    const int b = topology.node_of(to);
    if (a == b) return;
    load[index(a)].sent += bytes;
    load[index(b)].received += bytes;
  };
  for (const Span& span : plan) {
    if (span.source == kAll) {
      for (int node = 0; node < topology.nodes(); ++node)
        move(topology.agent(node, span.owner), span.owner, span.bytes);
    } else {
      move(span.source, span.owner, span.bytes);
    }
    if (span.sink != kAll) {
      move(span.owner, span.sink, span.bytes);
      continue;
    }
    for (int node = 0; node < topology.nodes(); ++node)
      if (span.source == kAll || span.source == span.owner || node != topology.node_of(span.source))
        move(span.owner, topology.agent(node, span.owner), span.bytes);
  }
  return load;
}

Request tensor(Kind kind, std::uint64_t bytes, int root = -1, std::uint64_t sequence = 0) {
  Request request;
  request.kind = kind;
  request.dtype = DType::kFloat32;
  request.root = root;
  request.total_bytes = bytes;
  request.sequence = sequence;
  return request;
}

}  // namespace

TEST_CASE("schedule/topology: ranks have places on their nodes and agents act for them", "[schedule][fast]") {
  Random random(1);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const int me = static_cast<int>(random() % node_of.size());
    const Topology topology(node_of, me);
    INFO(text(node_of));
    REQUIRE(topology.size() == static_cast<int>(node_of.size()));
    REQUIRE(topology.nodes() == node_count(node_of));
    REQUIRE(topology.rank() == me);
    REQUIRE(topology.my_node() == node_of[index(me)]);
    std::size_t seen = 0;
    for (int node = 0; node < topology.nodes(); ++node) {
      const std::vector<int>& ranks = topology.ranks_of(node);
      REQUIRE(std::is_sorted(ranks.begin(), ranks.end()));
      seen += ranks.size();
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        REQUIRE(topology.node_of(ranks[i]) == node);
        REQUIRE(topology.local_index(ranks[i]) == static_cast<int>(i));
      }
      for (int owner = 0; owner < topology.size(); ++owner) {
        const int agent = topology.agent(node, owner);
        REQUIRE(topology.node_of(agent) == node);
        if (topology.node_of(owner) == node) REQUIRE(agent == owner);
        if (index(topology.local_index(owner)) < ranks.size())
          REQUIRE(topology.local_index(agent) == topology.local_index(owner));
      }
    }
    REQUIRE(seen == node_of.size());
  }
}

TEST_CASE("schedule/plan: a tensor is covered once by the same spans on every rank", "[schedule][fast]") {
  Random random(2);
  for (int round = 0; round < 400; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const std::vector<double> weights =
        random() % 2 == 0 ? std::vector<double>{} : random_weights(random, node_count(node_of));
    const Limits limits{static_cast<std::uint32_t>(64U << random() % 12), 256U << random() % 6};
    const std::uint64_t bytes = random() % 6 == 0 ? random() % 3 : (random() % 300000) << random() % 6;
    const int root = static_cast<int>(random() % node_of.size());
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kBarrier, Kind::kGoodbye}) {
      const bool empty = kind == Kind::kBarrier || kind == Kind::kGoodbye;
      const Request request = tensor(kind, empty ? 0 : bytes, root, random() % 100);
      INFO(text(node_of) << " " << name_of(kind) << " bytes " << bytes << " root " << root);
      const std::vector<Span> plan = make_plan(request, Topology(node_of, 0, weights), limits);
      require_tensor_cover(plan, request.total_bytes, limits);
      for (std::size_t rank = 1; rank < node_of.size(); ++rank)
        REQUIRE(same(plan, make_plan(request, Topology(node_of, static_cast<int>(rank), weights), limits)));
      for (const Span& span : plan) {
        REQUIRE(span.source == (kind == Kind::kBroadcast ? root : kAll));
        REQUIRE(span.sink == (kind == Kind::kReduce ? root : kAll));
        REQUIRE(span.owner >= 0);
        REQUIRE(span.owner < static_cast<int>(node_of.size()));
      }
    }
  }
}

TEST_CASE("schedule/plan: reduce_scatter and all_gather give each rank the piece with its size", "[schedule][fast]") {
  Random random(3);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const std::vector<std::uint64_t> sizes = random_sizes(random, node_of.size());
    const Limits limits{4096, 256};
    for (const Kind kind : {Kind::kReduceScatter, Kind::kAllGather}) {
      INFO(text(node_of) << " " << name_of(kind));
      Request request;
      request.kind = kind;
      (kind == Kind::kAllGather ? request.output_bytes : request.input_bytes) = sizes;
      const std::vector<Span> plan = make_plan(request, Topology(node_of, 0), limits);
      REQUIRE(plan.size() == node_of.size());
      std::uint64_t at = 0;
      for (std::size_t r = 0; r < plan.size(); ++r) {
        const Span& span = plan[r];
        const int rank = static_cast<int>(r);
        require_chunks(span, chunk_bytes_of(kind, Topology(node_of, 0), limits));
        REQUIRE(span.bytes == sizes[r]);
        REQUIRE(span.owner == rank);
        REQUIRE(span.source == (kind == Kind::kAllGather ? rank : kAll));
        REQUIRE(span.sink == (kind == Kind::kAllGather ? kAll : rank));
        REQUIRE(span.input_offset == (kind == Kind::kAllGather ? 0 : at));
        REQUIRE(span.output_offset == (kind == Kind::kAllGather ? at : 0));
        at += sizes[r];
        REQUIRE(same(plan, make_plan(request, Topology(node_of, rank), limits)));
      }
    }
  }
}

TEST_CASE("schedule/plan: both ends of a transfer between two ranks derive the same span", "[schedule][fast]") {
  Random random(4);
  for (int round = 0; round < 150; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const std::size_t n = node_of.size();
    const int root = static_cast<int>(random() % n);
    const Limits limits{1024, 256};
    std::vector<std::vector<std::uint64_t>> sizes;  // [from][to]
    for (std::size_t r = 0; r < n; ++r) sizes.push_back(random_sizes(random, n));
    for (const Kind kind : {Kind::kGather, Kind::kScatter, Kind::kAllToAll}) {
      INFO(text(node_of) << " " << name_of(kind) << " root " << root);
      std::map<std::pair<int, int>, Span> sending;
      std::map<std::pair<int, int>, Span> receiving;
      for (std::size_t r = 0; r < n; ++r) {
        const int me = static_cast<int>(r);
        Request request;
        request.kind = kind;
        request.root = root;
        request.input_bytes.assign(n, 0);
        request.output_bytes.assign(n, 0);
        for (std::size_t q = 0; q < n; ++q) {
          if (kind == Kind::kAllToAll || (kind == Kind::kScatter && me == root)) request.input_bytes[q] = sizes[r][q];
          if (kind == Kind::kAllToAll) request.output_bytes[q] = sizes[q][r];
          if (kind == Kind::kGather && me == root) request.output_bytes[q] = sizes[q][r];
        }
        if (kind == Kind::kGather) request.input_bytes[r] = sizes[r][index(root)];
        if (kind == Kind::kScatter) request.output_bytes[r] = sizes[index(root)][r];
        std::set<std::uint32_t> ids;
        std::uint64_t sent = 0;
        std::uint64_t received = 0;
        for (const Span& span : make_plan(request, Topology(node_of, me), limits)) {
          require_chunks(span, limits.chunk_bytes);
          REQUIRE(ids.insert(span.id).second);
          REQUIRE(span.owner == span.source);  // one hop
          REQUIRE((span.source == me || span.sink == me));
          REQUIRE(span.bytes == sizes[index(span.source)][index(span.sink)]);
          if (span.source == me) {
            sending[{span.source, span.sink}] = span;
            sent += span.bytes;
            std::uint64_t before = 0;
            if (kind != Kind::kGather)
              for (int q = 0; q < span.sink; ++q) before += sizes[r][index(q)];
            REQUIRE(span.input_offset == before);
          }
          if (span.sink == me) {
            receiving[{span.source, span.sink}] = span;
            received += span.bytes;
            std::uint64_t before = 0;
            if (kind != Kind::kScatter)
              for (int q = 0; q < span.source; ++q) before += sizes[index(q)][r];
            REQUIRE(span.output_offset == before);
          }
        }
        REQUIRE(sent == std::accumulate(request.input_bytes.begin(), request.input_bytes.end(), std::uint64_t{0}));
        REQUIRE(received ==
                std::accumulate(request.output_bytes.begin(), request.output_bytes.end(), std::uint64_t{0}));
      }
      REQUIRE(sending.size() == (kind == Kind::kAllToAll ? n * n : n));
      REQUIRE(receiving.size() == sending.size());
      for (const auto& [pair, span] : sending) {
        const auto other = receiving.find(pair);
        REQUIRE(other != receiving.end());
        REQUIRE(other->second.id == span.id);
        REQUIRE(other->second.bytes == span.bytes);
        REQUIRE(other->second.chunks == span.chunks);
        REQUIRE(other->second.owner == span.owner);
      }
    }
  }
}

TEST_CASE("schedule/plan: a send and its receive have the same span", "[schedule][fast]") {
  Request request = tensor(Kind::kPointToPoint, 10000, /*root=*/2);
  request.sending = true;
  const auto send = make_plan(request, Topology({0, 0, 1}, 0), Limits{1024, 256});
  request.sending = false;
  request.root = 0;
  const auto receive = make_plan(request, Topology({0, 0, 1}, 2), Limits{1024, 256});
  REQUIRE(same(send, receive));
  REQUIRE(send.size() == 1);
  CHECK(send[0].source == 0);
  CHECK(send[0].sink == 2);
  CHECK(send[0].chunks == 10);
}

TEST_CASE("schedule/plan: an allreduce loads every node with 2(n-1)/n of the tensor each way", "[schedule][fast]") {
  Random random(5);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const Topology topology(node_of, 0);
    const std::uint64_t bytes = 100000 + random() % 50000000;
    INFO(text(node_of) << " bytes " << bytes);
    const auto plan = make_plan(tensor(Kind::kAllReduce, bytes, -1, random() % 50), topology, Limits{65536, 4096});
    const double n = topology.nodes();
    const double expected = 2 * (n - 1) / n * static_cast<double>(bytes);
    for (int node = 0; node < topology.nodes(); ++node) {
      const NodeLoad load = loads(plan, topology)[index(node)];
      const double rounding = (n - 1) * static_cast<double>(kGranule * topology.ranks_of(node).size());
      REQUIRE(std::abs(static_cast<double>(load.sent) - expected) <= rounding);
      REQUIRE(std::abs(static_cast<double>(load.received) - expected) <= rounding);
    }
  }
}

TEST_CASE("schedule/plan: weighted nodes own shares in proportion divided among their ranks", "[schedule][fast]") {
  Random random(6);
  for (int round = 0; round < 200; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const std::vector<double> weights = random_weights(random, node_count(node_of));
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const Topology topology(node_of, 0, weights);
    const std::uint64_t bytes = 1000000 + random() % 50000000;
    INFO(text(node_of) << " bytes " << bytes);
    std::vector<double> owned(node_of.size(), 0);
    for (const Span& span : make_plan(tensor(Kind::kAllReduce, bytes), topology, Limits{65536, 4096}))
      owned[index(span.owner)] += static_cast<double>(span.bytes);
    for (int rank = 0; rank < topology.size(); ++rank) {
      const int node = topology.node_of(rank);
      const double exact = static_cast<double>(bytes) * weights[index(node)] / total /
                           static_cast<double>(topology.ranks_of(node).size());
      REQUIRE(std::abs(owned[index(rank)] - exact) <= static_cast<double>(kGranule));
    }
  }
}

TEST_CASE("schedule/plan: a reduce_scatter or all_gather carries (n-1)/n per node when pieces are equal",
          "[schedule][fast]") {
  // Nodes with the same number of ranks: 2 x 3, 3 x 2, 4 x 1.
  for (const std::vector<int>& node_of :
       std::vector<std::vector<int>>{{0, 0, 0, 1, 1, 1}, {0, 1, 2, 0, 1, 2}, {3, 1, 0, 2}}) {
    const Topology topology(node_of, 0);
    const std::uint64_t piece = 40000;
    const auto n = static_cast<std::uint64_t>(topology.nodes());
    for (const Kind kind : {Kind::kReduceScatter, Kind::kAllGather}) {
      Request request;
      request.kind = kind;
      request.input_bytes.assign(node_of.size(), piece);
      request.output_bytes.assign(node_of.size(), piece);
      for (const NodeLoad& load : loads(make_plan(request, topology, Limits{}), topology)) {
        REQUIRE(load.sent == (n - 1) * piece * node_of.size() / n);
        REQUIRE(load.received == (n - 1) * piece * node_of.size() / n);
      }
    }
  }
}

TEST_CASE("schedule/plan: a large broadcast among three nodes and more leaves out the root's node",
          "[schedule][fast]") {
  Random random(7);
  for (int round = 0; round < 300; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const Topology topology(node_of, 0);
    const Limits limits{4096, 1024};
    const std::uint64_t bytes = 1 + random() % 200000;
    const int root = static_cast<int>(random() % node_of.size());
    INFO(text(node_of) << " bytes " << bytes << " root " << root);
    const auto plan = make_plan(tensor(Kind::kBroadcast, bytes, root), topology, limits);
    const auto load = loads(plan, topology);
    const int root_node = topology.node_of(root);
    if (topology.nodes() <= 2 || bytes <= limits.chunk_bytes) {
      REQUIRE(plan.size() == 1);
      REQUIRE(plan[0].owner == root);
      REQUIRE(load[index(root_node)].sent == static_cast<std::uint64_t>(topology.nodes() - 1) * bytes);
      continue;
    }
    for (const Span& span : plan) REQUIRE(topology.node_of(span.owner) != root_node);
    for (int node = 0; node < topology.nodes(); ++node) {
      // Every card carries the tensor once, in or out; the others pass on what they own.
      if (node == root_node) {
        REQUIRE(load[index(node)].sent == bytes);
        REQUIRE(load[index(node)].received == 0);
      } else {
        REQUIRE(load[index(node)].received == bytes);
        const auto others = static_cast<std::uint64_t>(topology.nodes() - 1);
        REQUIRE(load[index(node)].sent <=
                (others - 1) * (bytes / others + 1024 * static_cast<std::uint64_t>(topology.ranks_of(node).size())));
      }
    }
  }
}

TEST_CASE("schedule/plan: tiny aggregates have one owner that rotates with the sequence number", "[schedule][fast]") {
  Random random(8);
  for (int round = 0; round < 50; ++round) {
    const std::vector<int> node_of = random_nodes(random);
    const Topology topology(node_of, 0);
    const Limits limits{65536, 4096};
    for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kBarrier, Kind::kGoodbye}) {
      std::vector<int> turns(node_of.size(), 0);
      for (std::uint64_t sequence = 0; sequence < 3 * node_of.size(); ++sequence) {
        const std::uint64_t bytes = kind == Kind::kAllReduce || kind == Kind::kReduce ? random() % 4097 : 0;
        const auto plan = make_plan(tensor(kind, bytes, 0, sequence), topology, limits);
        REQUIRE(plan.size() == 1);
        REQUIRE(plan[0].bytes == bytes);
        ++turns[index(plan[0].owner)];
      }
      REQUIRE(std::all_of(turns.begin(), turns.end(), [](int count) { return count == 3; }));
    }
    // One byte more and all owners have a part, as far as the smallest span allows.
    const auto plan = make_plan(tensor(Kind::kAllReduce, 4096 + 64, 0, 1), topology, limits);
    REQUIRE((plan.size() > 1 || node_of.size() == 1));
  }
}

TEST_CASE("schedule/plan: middle sizes are cut on whole KiB rather than finer", "[schedule][fast]") {
  for (int size = 2; size <= 9; ++size) {
    std::vector<int> node_of;
    for (int r = 0; r < size; ++r) node_of.push_back(r);
    for (std::uint64_t bytes = 4097; bytes < 9 * 1024; bytes += 61) {
      const auto plan = make_plan(tensor(Kind::kAllReduce, bytes), Topology(node_of, 0), Limits{65536, 4096});
      std::uint64_t at = 0;
      for (const Span& span : plan) {
        REQUIRE(span.bytes > 0);
        at += span.bytes;
        if (at < bytes && bytes < 1024 * static_cast<std::uint64_t>(size)) REQUIRE(at % 1024 == 0);
      }
      REQUIRE(at == bytes);
    }
  }
}

TEST_CASE("schedule/plan: a barrier and an empty tensor are one empty chunk", "[schedule][fast]") {
  for (const Kind kind : {Kind::kBarrier, Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast}) {
    const auto plan = make_plan(tensor(kind, 0, 0, 5), Topology({0, 1, 2}, 1), Limits{});
    REQUIRE(plan.size() == 1);
    CHECK(plan[0].bytes == 0);
    CHECK(plan[0].chunks == 1);
  }
}

TEST_CASE("schedule/plan: all_to_all starts behind the own rank so that ranks do not all send to the first",
          "[schedule][fast]") {
  std::set<int> second;
  for (int me = 0; me < 4; ++me) {
    Request request;
    request.kind = Kind::kAllToAll;
    request.input_bytes.assign(4, 100);
    request.output_bytes.assign(4, 100);
    const auto plan = make_plan(request, Topology({0, 1, 2, 3}, me), Limits{});
    REQUIRE(plan[0].sink == me);
    second.insert(plan[1].sink);
  }
  CHECK(second.size() == 4);
}

TEST_CASE("schedule/cut: parts add up and end at the granule nearest to the exact share", "[schedule][fast]") {
  Random random(9);
  for (int round = 0; round < 3000; ++round) {
    const std::vector<double> weights = random_weights(random, 1 + static_cast<int>(random() % 12));
    const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
    const std::uint64_t granule = std::uint64_t{1} << random() % 11;
    const std::uint64_t bytes = random() % 7 == 0 ? random() % 5 : random() % (1ULL << (1 + random() % 38));
    const auto parts = cut_by_weight(bytes, weights, granule);
    INFO("bytes " << bytes << " granule " << granule << " parts " << parts.size());
    REQUIRE(parts.size() == weights.size());
    std::uint64_t end = 0;
    double running = 0;
    for (std::size_t i = 0; i < parts.size(); ++i) {
      end += parts[i];
      running += weights[i];
      REQUIRE(end <= bytes);
      if (end < bytes) REQUIRE(end % granule == 0);
      if (i + 1 < parts.size())
        REQUIRE(std::abs(static_cast<double>(end) - static_cast<double>(bytes) * running / total) <=
                static_cast<double>(granule) / 2 + 1e-3);
    }
    REQUIRE(end == bytes);
  }
}

TEST_CASE("schedule/cut: equal weights differ by at most a granule and one weight takes all", "[schedule][fast]") {
  CHECK(cut_by_weight(1000, {3}, 64) == std::vector<std::uint64_t>{1000});
  CHECK(cut_by_weight(0, {1, 2}, 64) == std::vector<std::uint64_t>{0, 0});
  CHECK(cut_by_weight(300, {1, 1, 1}, 1) == std::vector<std::uint64_t>{100, 100, 100});
  CHECK(cut_by_weight(400, {3, 1}, 4) == std::vector<std::uint64_t>{300, 100});
  CHECK(cut_by_weight(400, {0, 0}, 4) == std::vector<std::uint64_t>{200, 200});  // all shares are elsewhere
  for (std::size_t n = 1; n < 9; ++n) {
    const auto parts = cut_by_weight(1'000'003, std::vector<double>(n, 2.5), 64);
    const auto [least, most] = std::minmax_element(parts.begin(), parts.end() - 1);
    if (n > 1) CHECK(*most - *least <= 64);
  }
}

TEST_CASE("schedule/plan: every kind has its own name", "[schedule][fast]") {
  std::set<std::string> names;
  for (std::uint8_t kind = 0; kind < kKindCount; ++kind) names.insert(std::string(name_of(static_cast<Kind>(kind))));
  CHECK(names.size() == kKindCount);
  CHECK(names.count("unknown") == 0);
}

TEST_CASE("schedule/plan: dedicated servers own parts of reductions, and of nothing else", "[schedule][fast]") {
  const std::vector<int> nodes = {0, 0, 1, 2, 2, 2};
  const Topology topology(nodes, 0, {1, 1, 1}, {2, 0, 1});
  CHECK(topology.servers() == 3);
  CHECK(topology.node_of(6) == -1);
  // The agents of a server are spread over the node's ranks by the server's number.
  CHECK(topology.agent(0, 6) == 0);
  CHECK(topology.agent(0, 7) == 1);
  CHECK(topology.agent(2, 8) == 5);
  Request request;
  request.dtype = hybridps::core::DType::kFloat32;
  request.total_bytes = 6 << 20;
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce}) {
    request.kind = kind;
    request.root = kind == Kind::kReduce ? 2 : -1;
    std::map<int, std::uint64_t> owned;
    std::uint64_t sum = 0;
    for (const Span& span : make_plan(request, topology, Limits{})) {
      owned[span.owner] += span.bytes;
      sum += span.bytes;
    }
    CHECK(sum == request.total_bytes);
    CHECK(owned.count(7) == 0);  // a weight of 0
    CHECK(std::abs(static_cast<double>(owned[6]) - 2 * (1 << 20)) < 128);
    CHECK(std::abs(static_cast<double>(owned[8]) - (1 << 20)) < 128);
  }
  request.kind = Kind::kBroadcast;
  request.root = 0;
  for (const Span& span : make_plan(request, topology, Limits{})) CHECK(span.owner < 6);
  request.kind = Kind::kAllReduce;
  request.total_bytes = 64;
  for (std::uint64_t sequence = 0; sequence < 12; ++sequence) {
    request.sequence = sequence;
    for (const Span& span : make_plan(request, topology, Limits{})) CHECK(span.owner < 6);
  }
}

TEST_CASE("schedule/plan: between nodes a span is the business of one rank per node", "[schedule][fast]") {
  Random random(20);
  for (int round = 0; round < 400; ++round) {
    const std::vector<int> nodes = random_nodes(random);
    const int size = static_cast<int>(nodes.size());
    const std::vector<double> weights = random_weights(random, node_count(nodes));
    const std::vector<double> servers(random() % 4, 0.7);
    const Topology any(nodes, 0, weights, servers);
    Request request;
    constexpr Kind kKinds[] = {Kind::kAllReduce, Kind::kReduce, Kind::kBroadcast, Kind::kReduceScatter,
                               Kind::kAllGather};
    request.kind = kKinds[random() % std::size(kKinds)];
    request.scope = Scope::kNodes;
    request.sequence = random() % 100;
    const bool rooted = request.kind == Kind::kReduce || request.kind == Kind::kBroadcast;
    const bool pieces = request.kind == Kind::kReduceScatter || request.kind == Kind::kAllGather;
    if (rooted) request.root = static_cast<int>(random() % static_cast<std::uint64_t>(size));
    request.rail_bytes = random_sizes(random, index(any.rails()));
    if (pieces) request.input_bytes = request.output_bytes = random_sizes(random, index(size));
    INFO(text(nodes) << " " << name_of(request.kind) << " root " << request.root << " servers " << servers.size());

    struct Seen {
      Span span;
      std::set<int> ranks;
    };
    std::map<std::uint32_t, Seen> seen;
    for (int rank = 0; rank < size; ++rank) {
      const Topology topology(nodes, rank, weights, servers);
      std::uint64_t at = 0;
      for (const Span& span : make_plan(request, topology, Limits{})) {
        require_chunks(span, chunk_bytes_of(request.kind, topology, Limits{}));
        REQUIRE(span.rail >= 0);
        REQUIRE(topology.rail_rank(topology.my_node(), span.rail) == rank);
        auto [entry, is_new] = seen.try_emplace(span.id, Seen{span, {}});
        const Span& other = entry->second.span;
        REQUIRE(span.owner == other.owner);
        REQUIRE(span.source == other.source);
        REQUIRE(span.sink == other.sink);
        REQUIRE(span.bytes == other.bytes);
        REQUIRE(span.rail == other.rail);
        REQUIRE(entry->second.ranks.insert(topology.my_node()).second);
        if (!topology.is_dedicated(span.owner)) {
          REQUIRE(topology.rail_rank(topology.node_of(span.owner), span.rail) == span.owner);
        } else {
          REQUIRE(span.id == static_cast<std::uint32_t>(span.owner));
          REQUIRE(topology.agent(topology.my_node(), span.owner) == rank);  // as the server sees it
        }
        // What the rank has lies in a row.
        if (request.kind == Kind::kAllGather) {
          if (span.source == rank) continue;
          REQUIRE(span.output_offset == at);
        } else {
          REQUIRE(span.input_offset == at);
        }
        at += span.bytes;
      }
      std::uint64_t mine = 0;
      for (int rail = 0; !pieces && rail < topology.rails(); ++rail)
        if (topology.rail_rank(topology.my_node(), rail) == rank) mine += request.rail_bytes[index(rail)];
      for (int other = 0; pieces && other < size; ++other) {
        const bool here = topology.node_of(other) == topology.my_node();
        if (request.kind == Kind::kAllGather && here) continue;
        if (topology.rail_rank(topology.my_node(), topology.local_index(other)) == rank)
          mine += request.input_bytes[index(other)];
      }
      REQUIRE(at == mine);
    }
    for (const auto& [id, entry] : seen) REQUIRE(entry.ranks.size() == index(any.nodes()));
  }
}

TEST_CASE("schedule/plan: what pairs of ranks exchange is between nodes or compared inside one", "[schedule][fast]") {
  Random random(21);
  for (int round = 0; round < 300; ++round) {
    const std::vector<int> nodes = random_nodes(random);
    const int size = static_cast<int>(nodes.size());
    constexpr Kind kKinds[] = {Kind::kGather, Kind::kScatter, Kind::kAllToAll};
    const Kind kind = kKinds[random() % std::size(kKinds)];
    const int root = kind == Kind::kAllToAll ? -1 : static_cast<int>(random() % static_cast<std::uint64_t>(size));
    std::map<std::pair<int, int>, std::uint64_t> bytes;  // from, to
    for (int from = 0; from < size; ++from)
      for (int to = 0; to < size; ++to) bytes[{from, to}] = random() % 3 == 0 ? 0 : random() % 200000;
    INFO(text(nodes) << " " << name_of(kind) << " root " << root);
    for (const Scope scope : {Scope::kNodes, Scope::kWitness}) {
      std::map<std::uint32_t, std::vector<std::pair<int, Span>>> seen;
      for (int rank = 0; rank < size; ++rank) {
        const Topology topology(nodes, rank);
        Request request;
        request.kind = kind;
        request.root = root;
        request.scope = scope;
        request.sequence = 3;
        for (int other = 0; other < size; ++other) {
          request.input_bytes.push_back(kind == Kind::kGather && other != rank ? 0 : bytes[{rank, other}]);
          request.output_bytes.push_back(kind == Kind::kScatter && other != rank ? 0 : bytes[{other, rank}]);
        }
        if (kind == Kind::kGather) request.input_bytes[index(rank)] = bytes[{rank, root}];
        if (kind == Kind::kScatter) request.output_bytes[index(rank)] = bytes[{root, rank}];
        if (kind == Kind::kScatter && rank == root)
          for (int other = 0; other < size; ++other) request.input_bytes[index(other)] = bytes[{rank, other}];
        std::map<int, const Span*> in;
        const std::vector<Span> plan = make_plan(request, topology, Limits{});
        for (const Span& span : plan) {
          require_chunks(span, Limits{}.chunk_bytes);
          seen[span.id].emplace_back(rank, span);
          if (span.source == kAll) continue;
          REQUIRE(span.owner == span.source);
          REQUIRE(span.source != span.sink);
          REQUIRE((span.source == rank || span.sink == rank));
          REQUIRE((topology.node_of(span.source) == topology.node_of(span.sink)) == (scope == Scope::kWitness));
          REQUIRE(span.agreed_bytes == bytes[{span.source, span.sink}]);
          REQUIRE(span.bytes == (scope == Scope::kWitness ? 0 : span.agreed_bytes));
          if (span.sink == rank) in[span.source] = &span;
        }
        std::uint64_t at = 0;  // parts lie in rank order
        for (const auto& [from, span] : in) {
          REQUIRE(span->output_offset == at);
          at += span->bytes;
        }
      }
      std::size_t pairs = 0;
      for (const auto& [id, ends] : seen) {
        if (ends.front().second.source == kAll) {
          REQUIRE(ends.size() == index(size));
          continue;
        }
        ++pairs;
        REQUIRE(ends.size() == 2);  // both ends, and nobody else has the number
        REQUIRE(ends[0].second.source == ends[1].second.source);
        REQUIRE(ends[0].second.sink == ends[1].second.sink);
      }
      std::size_t expected = 0;
      for (int from = 0; from < size; ++from)
        for (int to = 0; to < size; ++to)
          expected += from != to && (nodes[index(from)] == nodes[index(to)]) == (scope == Scope::kWitness) &&
                      (kind == Kind::kAllToAll || (kind == Kind::kGather ? to : from) == root);
      REQUIRE(pairs == expected);
    }
  }
}

TEST_CASE("schedule/plan: between nodes shares are by node and server as they are between ranks", "[schedule][fast]") {
  // A server's part comes from the rail that asks it, as far as that goes.
  const std::vector<int> nodes = {0, 0, 1, 1, 2, 2};
  Request request;
  request.kind = Kind::kAllReduce;
  request.scope = Scope::kNodes;
  request.rail_bytes = {4 << 20, 4 << 20};
  std::map<int, std::uint64_t> owned;  // by node, servers from 10 on
  for (int rank = 0; rank < 2; ++rank) {
    const Topology topology(nodes, rank, {1, 1, 2}, {1});
    for (const Span& span : make_plan(request, topology, Limits{}))
      owned[topology.is_dedicated(span.owner) ? 10 + span.owner - 6 : topology.node_of(span.owner)] += span.bytes;
  }
  const double whole = 8 << 20;
  CHECK(std::abs(static_cast<double>(owned[0]) / whole - 0.2) < 0.001);
  CHECK(std::abs(static_cast<double>(owned[1]) / whole - 0.2) < 0.001);
  CHECK(std::abs(static_cast<double>(owned[2]) / whole - 0.4) < 0.001);
  CHECK(std::abs(static_cast<double>(owned[10]) / whole - 0.2) < 0.001);
}

TEST_CASE("schedule/plan: the more senders one card has, the less each may send unasked, in smaller chunks",
          "[schedule][fast]") {
  constexpr std::uint64_t kKiB = 1024;
  const auto nodes = [](int count, std::size_t servers = 0) {
    std::vector<int> node_of;
    for (int node = 0; node < count; ++node) node_of.push_back(node);
    return Topology(node_of, 0, {}, std::vector<double>(servers, 1.0));
  };
  CHECK(nodes(1).fan() == 1);
  CHECK(nodes(2).fan() == 1);
  CHECK(nodes(8, 4).fan() == 11);
  CHECK(Topology({0, 0, 1, 1}, 0).fan() == 2);
  CHECK(window_bytes(384 * kKiB, 1) == 384 * kKiB);
  CHECK(window_bytes(384 * kKiB, 3) == 128 * kKiB);
  CHECK(window_bytes(384 * kKiB, 1000) == 32 * kKiB);
  CHECK(chunk_bytes_for(nodes(2), 64 * kKiB) == 64 * kKiB);
  CHECK(chunk_bytes_for(nodes(4), 64 * kKiB) == 32 * kKiB);
  CHECK(chunk_bytes_for(nodes(8, 4), 64 * kKiB) == 16 * kKiB);
  CHECK(chunk_bytes_for(nodes(64), 64 * kKiB) == 16 * kKiB);
  CHECK(chunk_bytes_for(nodes(2), 1 * kKiB) == 1 * kKiB);
  const auto two_cards = [](int count) {  // for the one rank of each node
    std::vector<int> node_of;
    for (int node = 0; node < count; ++node) node_of.push_back(node);
    hybridps::schedule::CardUse use;
    use.ranks_per_card = 0.5;
    return Topology(node_of, 0, {}, {}, use);
  };
  CHECK(chunk_bytes_for(two_cards(3), 64 * kKiB) == 32 * kKiB);
  CHECK(chunk_bytes_for(two_cards(4), 64 * kKiB) == 16 * kKiB);
  for (int count = 1; count < 40; ++count) {  // at least two chunks fit
    CHECK(2 * chunk_bytes_for(nodes(count), 64 * kKiB) <= window_bytes(384 * kKiB, nodes(count).fan()));
    Limits limits;
    limits.chunk_bytes = chunk_bytes_for(nodes(count), 64 * kKiB);
    hybridps::schedule::Request request;
    request.kind = Kind::kReduceScatter;
    request.input_bytes.assign(static_cast<std::size_t>(count), 1000 * kKiB);
    for (const Span& span : make_plan(request, nodes(count), limits)) {
      CHECK(2 * span.chunk_bytes <= window_bytes(hybridps::core::Config{}.window_bytes, nodes(count).fan()));
      CHECK(span.chunk_bytes >= 16 * kKiB);
      CHECK(span.chunk_bytes % (4 * kKiB) == 0);
      CHECK(std::uint64_t{span.chunks} * span.chunk_bytes >= span.bytes);
    }
    limits.chunk_bytes = 1000;  // what a user sets is never exceeded
    for (const Span& span : make_plan(request, nodes(count), limits)) CHECK(span.chunk_bytes == 1000);
  }
}

TEST_CASE("schedule: windows follow what an allreduce sends", "[schedule][fast]") {
  constexpr std::uint64_t kKiB = 1024;
  constexpr std::uint64_t kCard = 1200 * kKiB;
  const auto near = [](std::uint64_t a, double b) { return std::abs(static_cast<double>(a) - b) <= 1.0; };
  // Four nodes alike: a third each, and no window to oneself.
  const auto alike = hybridps::schedule::windows_bytes(kCard, Topology({0, 1, 2, 3}, 1));
  REQUIRE(alike.size() == 4);
  CHECK(alike[1] == 0);
  for (const std::size_t member : {0, 2, 3}) CHECK(near(alike[member], kCard / 3.0));
  // Two servers with 0.3 each, nodes with 0.1: a card carries 1.2 tensors, of which 0.3 go to a server and 0.2 to a
  // node.
  const std::vector<double> nodes(4, 0.1);
  const std::vector<double> servers(2, 0.3);
  for (int rank = 0; rank < 4; ++rank) {
    const auto mixed = hybridps::schedule::windows_bytes(kCard, Topology({0, 1, 2, 3}, rank, nodes, servers));
    REQUIRE(mixed.size() == 6);
    std::uint64_t sum = 0;
    for (int member = 0; member < 6; ++member) {
      const std::uint64_t window = mixed[static_cast<std::size_t>(member)];
      sum += window;
      if (member == rank)
        CHECK(window == 0);
      else
        CHECK(near(window, static_cast<double>(kCard) * (member < 4 ? 0.2 : 0.3) / 1.2));
    }
    CHECK(sum <= kCard);
  }
  // The server's own view: results to each node.
  const auto of_server = hybridps::schedule::windows_bytes(kCard, Topology({0, 1, 2, 3}, 4, nodes, servers));
  for (std::size_t member = 0; member < 4; ++member) CHECK(near(of_server[member], kCard * 0.3 / 1.2));
  // Two ranks on each of two nodes: only aligned ranks exchange an allreduce; others keep an equal part. Never below 32
  // KiB.
  const auto local = hybridps::schedule::windows_bytes(kCard, Topology({0, 0, 1, 1}, 0));
  CHECK(local[1] == 0);
  CHECK(near(local[2], kCard * 0.5));
  CHECK(local[3] == hybridps::schedule::window_bytes(kCard, 2));
  for (const std::uint64_t window : hybridps::schedule::windows_bytes(1, Topology({0, 1, 2, 3}, 0)))
    CHECK((window == 0 || window == 32 * kKiB));
}

TEST_CASE("schedule/plan: windows over an uplink follow what the uplink carries", "[schedule][fast]") {
  using namespace hybridps::schedule;
  constexpr std::uint64_t kCard = 1024 * 1024;
  // `regions` of `nodes` one-rank nodes each; the windows of rank 0.
  const auto windows_of = [](const std::vector<int>& region_of, std::vector<double> weights = {}) {
    std::vector<int> ranks(region_of.size());
    std::iota(ranks.begin(), ranks.end(), 0);
    return windows_bytes(kCard, Topology(ranks, 0, std::move(weights)).with_regions(region_of));
  };
  const auto windows = [&](int regions, int nodes, std::vector<double> weights = {}) {
    std::vector<int> region_of;
    for (int rank = 0; rank < regions * nodes; ++rank) region_of.push_back(rank / nodes);
    return windows_of(region_of, std::move(weights));
  };
  // Two regions put one tensor on the uplink, half of it between rank 0 and its partner.
  const auto two = windows(2, 2);
  CHECK(two[2] == 2 * kCard);
  CHECK(two[1] <= kCard);  // on the own switch: a part of the card
  CHECK(windows(2, 1)[1] == 4 * kCard);
  CHECK(windows(2, 4)[4] == kCard);
  // A little less of the tensor is a little less of the windows.
  const auto slower = windows(2, 4, {0.99, 1, 1, 1, 1, 1, 1, 1});
  CHECK(slower[4] > kCard * 98 / 100);
  CHECK(slower[4] < kCard);
  // Two against three: 0.4 of the tensor to one of them, 0.2 to another, nothing to the third, which has an equal part.
  const auto unequal = windows_of({0, 0, 1, 1, 1});
  CHECK(std::vector<std::uint64_t>(unequal.begin() + 2, unequal.end()) ==
        std::vector<std::uint64_t>{kCard * 8 / 5, kCard / 4, kCard * 4 / 5});
  // Eight streams share the uplink's queue: each has its part of the card.
  CHECK(windows(2, 8)[8] < kCard / 4);
  // Three regions: 4/3 of a tensor crosses each uplink, 1/3 to each of two partners.
  CHECK(windows(3, 2)[2] == kCard);
  // The region that owns more has the busier uplink: 1 + 3/4.
  const auto uneven = windows(3, 1, {6, 1, 1});
  CHECK(uneven[1] == static_cast<std::uint64_t>(4.0 * kCard * (0.75 + 0.125) / 1.75));
}

TEST_CASE("schedule/plan: ranks of a node own by their cards", "[schedule][fast]") {
  using namespace hybridps::schedule;
  const Topology equal({0, 0, 1, 1}, 0);
  CHECK(equal.ranks_per_card() == 2.0);
  const Topology topology({0, 0, 1, 1}, 0, {1, 1}, {}, {{0.75, 0.25, 0.5, 0.5}, 1.0});
  CHECK(topology.ranks_per_card() == 1.0);
  CHECK(topology.fan() == 1);
  CHECK(equal.fan() == 2);
  Request request;
  request.kind = Kind::kAllReduce;
  request.total_bytes = 1 << 20;
  std::vector<std::uint64_t> bytes;
  for (const Span& span : make_plan(request, topology, {})) bytes.push_back(span.bytes);
  CHECK(bytes == std::vector<std::uint64_t>{393216, 131072, 262144, 262144});
  // Who has a card for itself may have more under way on it.
  CHECK(windows_bytes(1 << 20, topology)[2] ==
        2 * windows_bytes(1 << 20, Topology({0, 0, 1, 1}, 0, {1, 1}, {}, {{0.75, 0.25, 0.5, 0.5}, 2.0}))[2]);
  CHECK(topology.with_weights({3, 1}).owner_weight(0) == 2.25);
}
