#include <cstring>
#include <map>
#include <numeric>
#include <set>
#include <utility>

#include "tests/support/catch.h"
#include "tests/support/cluster.h"
#include "tests/support/core_dump.h"

namespace {

using namespace hybridps;
using test::Cluster;
using test::ClusterOptions;

const std::vector<std::vector<int>> kLayouts = {
    {0}, {0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3}, {0, 0, 0, 0}, {0, 0, 0, 1}, {0, 0, 1, 2}, {0, 1, 0, 1, 2},
};

std::string name(const std::vector<int>& layout) {
  std::string text;
  for (const int node : layout) text += std::to_string(node);
  return text;
}

template <typename T>
worker::Piece piece(std::vector<T>& values) {
  return worker::Piece{reinterpret_cast<std::byte*>(values.data()), values.size() * sizeof(T)};
}

std::int32_t value(int rank, std::size_t i) {
  return static_cast<std::int32_t>(rank * 1000003 + static_cast<int>(i) * 17 + 1);
}

std::vector<std::int32_t> values(int rank, std::size_t count) {
  std::vector<std::int32_t> v(count);
  for (std::size_t i = 0; i < count; ++i) v[i] = value(rank, i);
  return v;
}

ClusterOptions nodes(std::vector<int> node_of) {
  ClusterOptions options;
  options.node_of = std::move(node_of);
  return options;
}

struct Tally {
  int done = 0;
  int failed = 0;
  std::string first_error;
  worker::Completion completion() {
    return [this](const worker::Outcome& outcome) {
      ++done;
      if (!outcome.status.is_ok()) {
        ++failed;
        if (first_error.empty()) first_error = outcome.status.to_string();
      }
    };
  }
};

worker::Operation reduction(schedule::Kind kind, core::ReduceOp op = core::ReduceOp::kSum) {
  worker::Operation o;
  o.kind = kind;
  o.dtype = core::DType::kInt32;
  o.op = op;
  return o;
}

worker::Operation movement(schedule::Kind kind) {
  worker::Operation o;
  o.kind = kind;
  o.dtype = core::DType::kInt32;
  return o;
}

}  // namespace

TEST_CASE("engine/runtime: allreduce adds all ranks for every layout and size", "[engine][fast]") {
  for (const auto& layout : kLayouts) {
    Cluster cluster(nodes(layout));
    const auto uid = cluster.open_group();
    std::uint64_t sequence = 0;
    for (const std::size_t count : {0, 1, 7, 64, 255, 257, 1000, 4099, 20011}) {
      INFO("layout " << name(layout) << " count " << count);
      std::vector<std::vector<std::int32_t>> data;
      for (int r = 0; r < cluster.size(); ++r) data.push_back(values(r, count));
      Tally tally;
      for (int r = 0; r < cluster.size(); ++r) {
        auto o = reduction(schedule::Kind::kAllReduce);
        o.output = {piece(data[static_cast<std::size_t>(r)])};
        cluster.submit(uid, r, o, sequence, tally.completion());
      }
      ++sequence;
      REQUIRE(cluster.run_until([&] { return tally.done == cluster.size(); }));
      REQUIRE(tally.first_error == "");
      for (std::size_t i = 0; i < count; ++i) {
        std::int32_t expected = 0;
        for (int r = 0; r < cluster.size(); ++r) expected += value(r, i);
        for (int r = 0; r < cluster.size(); ++r) REQUIRE(data[static_cast<std::size_t>(r)][i] == expected);
      }
    }
  }
}

TEST_CASE("engine/runtime: an allreduce over many pieces equals one over contiguous memory", "[engine][fast]") {
  for (const auto& layout : kLayouts) {
    Cluster cluster(nodes(layout));
    const auto uid = cluster.open_group();
    const std::vector<std::size_t> counts = {3, 1000, 0, 17, 513, 2, 300};
    std::vector<std::vector<std::vector<std::int32_t>>> data;
    Tally tally;
    for (int r = 0; r < cluster.size(); ++r) {
      data.emplace_back();
      for (const std::size_t count : counts) data.back().push_back(values(r, count));
      auto o = reduction(schedule::Kind::kAllReduce);
      for (auto& part : data.back()) o.output.push_back(piece(part));
      cluster.submit(uid, r, o, 0, tally.completion());
    }
    INFO("layout " << name(layout));
    REQUIRE(cluster.run_until([&] { return tally.done == cluster.size(); }));
    for (int r = 0; r < cluster.size(); ++r)
      for (const auto& part : data[static_cast<std::size_t>(r)])
        for (std::size_t i = 0; i < part.size(); ++i) {
          std::int32_t expected = 0;
          for (int q = 0; q < cluster.size(); ++q) expected += value(q, i);
          REQUIRE(part[i] == expected);
        }
  }
}

TEST_CASE("engine/runtime: every other collective moves the right bytes for every layout", "[engine][fast]") {
  for (const auto& layout : kLayouts) {
    Cluster cluster(nodes(layout));
    const auto uid = cluster.open_group();
    const int n = cluster.size();
    std::uint64_t sequence = 0;
    for (const std::size_t count : {0, 1, 5, 300, 3001}) {
      const std::uint64_t bytes = count * 4;
      for (int root = 0; root < n; ++root) {
        INFO("layout " << name(layout) << " count " << count << " root " << root);
        const auto un = static_cast<std::size_t>(n);
        std::vector<std::vector<std::int32_t>> in;
        std::vector<std::vector<std::int32_t>> out;
        const auto all = [&](const std::function<void(int, worker::Operation&)>& fill, schedule::Kind kind,
                             core::ReduceOp op = core::ReduceOp::kNone) {
          Tally tally;
          for (int r = 0; r < n; ++r) {
            worker::Operation o = movement(kind);
            o.op = op;
            fill(r, o);
            cluster.submit(uid, r, o, sequence, tally.completion());
          }
          ++sequence;
          REQUIRE(cluster.run_until([&] { return tally.done == n; }));
          REQUIRE(tally.first_error == "");
        };
        const auto ur = [](int r) { return static_cast<std::size_t>(r); };
        const auto sum_at = [&](std::size_t i) {
          std::int32_t s = 0;
          for (int r = 0; r < n; ++r) s += value(r, i);
          return s;
        };

        // broadcast
        in.clear();
        for (int r = 0; r < n; ++r) in.push_back(values(r, count));
        all(
            [&](int r, worker::Operation& o) {
              o.root = root;
              o.output = {piece(in[ur(r)])};
            },
            schedule::Kind::kBroadcast);
        for (int r = 0; r < n; ++r) REQUIRE(in[ur(r)] == values(root, count));

        // reduce: only the root's output changes
        in.clear();
        out.assign(un, std::vector<std::int32_t>(count, -1));
        for (int r = 0; r < n; ++r) in.push_back(values(r, count));
        all(
            [&](int r, worker::Operation& o) {
              o.root = root;
              o.input = {piece(in[ur(r)])};
              if (r == root) o.output = {piece(out[ur(r)])};
            },
            schedule::Kind::kReduce, core::ReduceOp::kSum);
        for (int r = 0; r < n; ++r) REQUIRE(in[ur(r)] == values(r, count));
        for (std::size_t i = 0; i < count; ++i) REQUIRE(out[ur(root)][i] == sum_at(i));

        // all_gather with uneven sizes
        std::vector<std::uint64_t> sizes;
        for (int r = 0; r < n; ++r) sizes.push_back((count + ur(r)) * 4);
        const std::uint64_t total = std::accumulate(sizes.begin(), sizes.end(), std::uint64_t{0}) / 4;
        in.clear();
        out.assign(un, std::vector<std::int32_t>(total, -1));
        for (int r = 0; r < n; ++r) in.push_back(values(r, sizes[ur(r)] / 4));
        all(
            [&](int r, worker::Operation& o) {
              o.input = {piece(in[ur(r)])};
              o.output = {piece(out[ur(r)])};
              o.output_bytes = sizes;
            },
            schedule::Kind::kAllGather);
        for (int r = 0; r < n; ++r) {
          std::size_t at = 0;
          for (int q = 0; q < n; ++q)
            for (const std::int32_t v : values(q, sizes[ur(q)] / 4)) REQUIRE(out[ur(r)][at++] == v);
        }

        // reduce_scatter with uneven sizes
        in.clear();
        out.clear();
        for (int r = 0; r < n; ++r) {
          in.push_back(values(r, total));
          out.emplace_back(sizes[ur(r)] / 4, -1);
        }
        all(
            [&](int r, worker::Operation& o) {
              o.input = {piece(in[ur(r)])};
              o.output = {piece(out[ur(r)])};
              o.input_bytes = sizes;
            },
            schedule::Kind::kReduceScatter, core::ReduceOp::kSum);
        std::size_t at = 0;
        for (int r = 0; r < n; ++r) {
          REQUIRE(in[ur(r)] == values(r, total));
          for (const std::int32_t v : out[ur(r)]) REQUIRE(v == sum_at(at++));
        }

        // gather and scatter
        in.clear();
        out.assign(un, std::vector<std::int32_t>(count * un, -1));
        for (int r = 0; r < n; ++r) in.push_back(values(r, count));
        all(
            [&](int r, worker::Operation& o) {
              o.root = root;
              o.input = {piece(in[ur(r)])};
              if (r == root) {
                o.output = {piece(out[ur(r)])};
                o.output_bytes.assign(un, bytes);
              }
            },
            schedule::Kind::kGather);
        for (int q = 0; q < n; ++q)
          for (std::size_t i = 0; i < count; ++i) REQUIRE(out[ur(root)][ur(q) * count + i] == value(q, i));
        in.assign(un, values(root, count * un));
        out.assign(un, std::vector<std::int32_t>(count, -1));
        all(
            [&](int r, worker::Operation& o) {
              o.root = root;
              o.output = {piece(out[ur(r)])};
              if (r == root) {
                o.input = {piece(in[ur(r)])};
                o.input_bytes.assign(un, bytes);
              }
            },
            schedule::Kind::kScatter);
        for (int q = 0; q < n; ++q)
          for (std::size_t i = 0; i < count; ++i) REQUIRE(out[ur(q)][i] == value(root, ur(q) * count + i));

        // all_to_all: rank r sends count + (r + q) % 3 elements to rank q
        const auto part = [&](int from, int to) { return count + ur((from + 2 * to) % 3); };
        in.clear();
        out.clear();
        for (int r = 0; r < n; ++r) {
          std::size_t sends = 0;
          std::size_t receives = 0;
          for (int q = 0; q < n; ++q) {
            sends += part(r, q);
            receives += part(q, r);
          }
          in.push_back(values(r, sends));
          out.emplace_back(receives, -1);
        }
        all(
            [&](int r, worker::Operation& o) {
              o.input = {piece(in[ur(r)])};
              o.output = {piece(out[ur(r)])};
              for (int q = 0; q < n; ++q) {
                o.input_bytes.push_back(part(r, q) * 4);
                o.output_bytes.push_back(part(q, r) * 4);
              }
            },
            schedule::Kind::kAllToAll);
        for (int r = 0; r < n; ++r) {
          std::size_t place = 0;
          for (int q = 0; q < n; ++q) {
            std::size_t before = 0;
            for (int t = 0; t < r; ++t) before += part(q, t);
            for (std::size_t i = 0; i < part(q, r); ++i) REQUIRE(out[ur(r)][place++] == value(q, before + i));
          }
        }

        all([&](int, worker::Operation& o) { o.dtype = core::DType::kBytes; }, schedule::Kind::kBarrier);
      }
    }
  }
}

TEST_CASE("engine/runtime: sends match receives by sender and tag in order of issue", "[engine][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1}}) {
    Cluster cluster(nodes(layout));
    const auto uid = cluster.open_group();
    Tally tally;
    int expected = 0;
    std::vector<std::vector<std::int32_t>> in(12);
    std::vector<std::vector<std::int32_t>> out(12);
    const auto p2p = [&](int rank, int peer, bool sending, std::uint32_t tag, std::vector<std::int32_t>& data) {
      worker::Operation o;
      o.kind = schedule::Kind::kPointToPoint;
      o.sending = sending;
      o.peer = peer;
      o.tag = tag;
      (sending ? o.input : o.output).push_back(piece(data));
      cluster.submit(uid, rank, o, 0, tally.completion());
      ++expected;
    };
    for (std::size_t i = 0; i < 12; ++i) {
      in[i] = values(static_cast<int>(i), 1 + i * 500);
      out[i].assign(in[i].size(), -1);
    }
    for (std::size_t i = 0; i < 6; ++i) p2p(0, 1, true, 5, in[i]);
    for (std::size_t i = 6; i < 12; ++i) p2p(0, 1, true, 9, in[i]);
    for (std::size_t i = 6; i < 12; ++i) p2p(1, 0, false, 9, out[i]);
    for (std::size_t i = 0; i < 6; ++i) p2p(1, i % 2 == 0 ? worker::kAnySource : 0, false, 5, out[i]);
    REQUIRE(cluster.run_until([&] { return tally.done == expected; }));
    REQUIRE(tally.first_error == "");
    for (std::size_t i = 0; i < 12; ++i) REQUIRE(out[i] == in[i]);
  }
}

TEST_CASE("engine/runtime: a receive of another size than the send fails on both sides", "[engine][fast]") {
  Cluster cluster(nodes({0, 1}));
  const auto uid = cluster.open_group();
  std::vector<std::int32_t> in(10);
  std::vector<std::int32_t> out(11);
  Tally tally;
  worker::Operation o;
  o.kind = schedule::Kind::kPointToPoint;
  o.sending = true;
  o.peer = 1;
  o.input = {piece(in)};
  cluster.submit(uid, 0, o, 0, tally.completion());
  o.sending = false;
  o.peer = 0;
  o.input = {};
  o.output = {piece(out)};
  cluster.submit(uid, 1, o, 0, tally.completion());
  // The send may have been acknowledged before the receive was posted; here both are pending.
  REQUIRE(cluster.run_until([&] { return tally.failed >= 1; }));
  REQUIRE(tally.first_error.find("40 bytes") != std::string::npos);
  REQUIRE(tally.first_error.find("44") != std::string::npos);
}

TEST_CASE("engine/runtime: many groups in different orders finish with the smallest pools", "[engine][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2, 3}, {0, 0, 0, 1}}) {
    for (const std::uint64_t seed : {1, 2, 3}) {
      ClusterOptions options = nodes(layout);
      options.seed = seed;
      options.eager_bytes = seed % 2 == 0 ? 0 : 1024;
      options.grant_chunks = 1;
      Cluster cluster(options);
      const int n = cluster.size();
      constexpr int kGroups = 24;
      constexpr int kOperations = 8;
      std::vector<core::GroupUid> groups;
      for (int g = 0; g < kGroups; ++g) groups.push_back(cluster.open_group());
      struct Item {
        int group;
        int sequence;
      };
      std::vector<std::vector<std::int32_t>> memory;
      memory.reserve(static_cast<std::size_t>(n * kGroups * kOperations * 2));
      Tally tally;
      int expected = 0;
      for (int r = 0; r < n; ++r) {
        // Each rank walks the groups in its own order; inside a group the order is kept.
        std::vector<int> next(kGroups, 0);
        std::vector<int> order;
        for (int g = 0; g < kGroups; ++g)
          for (int k = 0; k < kOperations; ++k) order.push_back(g);
        std::shuffle(order.begin(), order.end(), cluster.random());
        for (const int g : order) {
          const int k = next[static_cast<std::size_t>(g)]++;
          const std::size_t count = 100 + static_cast<std::size_t>((g * 7 + k * 131) % 1200);
          worker::Operation o;
          switch ((g + k) % 5) {
            case 0:
              o = reduction(schedule::Kind::kAllReduce);
              memory.push_back(values(r, count));
              o.output = {piece(memory.back())};
              break;
            case 1:
              o = movement(schedule::Kind::kBroadcast);
              o.root = (g + k) % n;
              memory.push_back(values(r, count));
              o.output = {piece(memory.back())};
              break;
            case 3:
              o = movement(schedule::Kind::kBarrier);
              o.dtype = core::DType::kBytes;
              break;
            case 4:
              o = movement(schedule::Kind::kAllToAll);
              memory.push_back(values(r, count * static_cast<std::size_t>(n)));
              o.input = {piece(memory.back())};
              memory.emplace_back(count * static_cast<std::size_t>(n), -1);
              o.output = {piece(memory.back())};
              o.input_bytes.assign(static_cast<std::size_t>(n), count * 4);
              o.output_bytes = o.input_bytes;
              break;
            default:
              o = movement(schedule::Kind::kAllGather);
              memory.push_back(values(r, count));
              o.input = {piece(memory.back())};
              memory.emplace_back(count * static_cast<std::size_t>(n), -1);
              o.output = {piece(memory.back())};
              o.output_bytes.assign(static_cast<std::size_t>(n), count * 4);
          }
          cluster.submit(groups[static_cast<std::size_t>(g)], r, o, static_cast<std::uint64_t>(k), tally.completion());
          ++expected;
        }
        // The others have not started yet: let what can move, move.
        cluster.run_until([] { return false; }, 50);
      }
      INFO("layout " << name(layout) << " seed " << seed << " done " << tally.done << " of " << expected);
      REQUIRE(cluster.run_until([&] { return tally.done == expected; }));
      REQUIRE(tally.first_error == "");
    }
  }
}

TEST_CASE("engine/runtime: ranks that disagree all fail with both signatures", "[engine][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) {
    Cluster cluster(nodes(layout));
    const auto uid = cluster.open_group();
    Tally tally;
    std::vector<std::vector<std::int32_t>> data;
    for (int r = 0; r < cluster.size(); ++r) data.push_back(values(r, r == 1 ? 1001 : 1000));
    for (int r = 0; r < cluster.size(); ++r) {
      auto o = reduction(schedule::Kind::kAllReduce);
      o.output = {piece(data[static_cast<std::size_t>(r)])};
      cluster.submit(uid, r, o, 0, tally.completion());
    }
    INFO("layout " << name(layout));
    REQUIRE(cluster.run_until([&] { return tally.done == cluster.size(); }));
    REQUIRE(tally.failed == cluster.size());
    REQUIRE(tally.first_error.find("fp") == std::string::npos);
    REQUIRE(tally.first_error.find("int32[1000]") != std::string::npos);
    REQUIRE(tally.first_error.find("int32[1001]") != std::string::npos);
  }
}

// What the others sent lies here already when this rank calls: its first span is refused before its others have begun.
TEST_CASE("engine/runtime: a rank that comes last to ranks that disagree fails as they do", "[engine][fast]") {
  Cluster cluster(nodes({0, 0, 1}));
  const auto uid = cluster.open_group();
  Tally tally;
  std::vector<std::vector<std::int32_t>> data = {values(0, 1000), values(1, 1000), values(2, 1001)};
  const auto submit = [&](int rank) {
    auto o = reduction(schedule::Kind::kAllReduce);
    o.output = {piece(data[static_cast<std::size_t>(rank)])};
    cluster.submit(uid, rank, o, 0, tally.completion());
  };
  submit(1);
  cluster.stop(1);  // or it would find out, and tell
  submit(2);
  CHECK_FALSE(cluster.run_until([] { return false; }, 50));
  submit(0);
  cluster.go_on(1);
  REQUIRE(cluster.run_until([&] { return tally.done == cluster.size(); }));
  REQUIRE(tally.failed == cluster.size());
  REQUIRE(tally.first_error.find("int32[1000]") != std::string::npos);
  REQUIRE(tally.first_error.find("int32[1001]") != std::string::npos);
}

// The second root has the first one's data before it calls; it need not hear from anybody to be done.
TEST_CASE("engine/runtime: a root that finds the data of another root fails", "[engine][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}}) {
    for (const bool reduces : {false, true}) {
      Tally first;  // ends with the cluster
      Tally second;
      std::vector<std::int32_t> theirs = values(1, 100000);
      std::vector<std::int32_t> ours = values(0, 100000);
      Cluster cluster(nodes(layout));
      const auto uid = cluster.open_group();
      auto o = reduces ? reduction(schedule::Kind::kReduce) : movement(schedule::Kind::kBroadcast);
      o.root = reduces ? 0 : 1;
      (reduces ? o.input : o.output).assign(1, piece(theirs));
      cluster.submit(uid, 1, o, 0, first.completion());
      CHECK_FALSE(cluster.run_until([] { return false; }, 50));
      cluster.stop(1);  // or it would find out, and tell
      auto root = movement(schedule::Kind::kBroadcast);
      root.root = 0;
      root.output = {piece(ours)};
      cluster.submit(uid, 0, root, 0, second.completion());
      INFO("layout " << name(layout) << " reduces " << reduces);
      REQUIRE(cluster.run_until([&] { return second.done == 1; }));
      CHECK(second.failed == 1);
      CHECK(second.first_error.find("ranks disagree") != std::string::npos);
      cluster.go_on(1);
    }
  }
}

TEST_CASE("engine/runtime: a dead peer fails pending and later operations and is named", "[engine][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0}, {0, 1}, {0, 0, 1, 1}}) {
    Cluster cluster(nodes(layout));
    const auto uid = cluster.open_group();
    const int n = cluster.size();
    Tally tally;
    std::vector<std::vector<std::int32_t>> data;
    for (int r = 0; r < n; ++r) data.push_back(values(r, 3000));
    for (int round = 0; round < 2; ++round) {
      for (int r = 0; r < n; ++r) {
        if (round == 1 && r == n - 1) continue;  // the victim takes part in the first round only
        auto o = reduction(schedule::Kind::kAllReduce);
        o.output = {piece(data[static_cast<std::size_t>(r)])};
        cluster.submit(uid, r, o, static_cast<std::uint64_t>(round), tally.completion());
      }
      if (round == 0) {
        REQUIRE(cluster.run_until([&] { return tally.done == n; }));
        REQUIRE(tally.failed == 0);
        tally = {};
      }
    }
    cluster.run_until([] { return false; }, 20);
    cluster.kill(n - 1);
    INFO("layout " << name(layout));
    REQUIRE(cluster.run_until([&] { return tally.done == n - 1; }, 100000000));
    REQUIRE(tally.failed == n - 1);
    REQUIRE(tally.first_error.find("rank " + std::to_string(n - 1) + " ") != std::string::npos);
    Tally later;
    auto o = reduction(schedule::Kind::kAllReduce);
    o.output = {piece(data[0])};
    cluster.submit(uid, 0, o, 2, later.completion());
    REQUIRE(later.failed == 1);
  }
}

TEST_CASE("engine/runtime: messages for a group that opens later are kept", "[engine][fast]") {
  Cluster cluster(nodes({0, 1}));
  const auto uid = cluster.new_uid();
  cluster.open_group_on(uid, 0);
  auto a = values(0, 5000);
  auto b = values(1, 5000);
  Tally tally;
  auto o = reduction(schedule::Kind::kAllReduce);
  o.output = {piece(a)};
  cluster.submit(uid, 0, o, 0, tally.completion());
  cluster.run_until([] { return false; }, 100);
  cluster.open_group_on(uid, 1);
  o.output = {piece(b)};
  cluster.submit(uid, 1, o, 0, tally.completion());
  REQUIRE(cluster.run_until([&] { return tally.done == 2; }));
  REQUIRE(tally.first_error == "");
  REQUIRE(a == b);
}

TEST_CASE("engine/runtime: an operation past its deadline names the ranks that are missing", "[engine][fast]") {
  Cluster cluster(nodes({0, 1, 1}));
  const auto uid = cluster.open_group();
  Tally tally;
  auto a = values(0, 100);
  auto b = values(1, 100);
  auto o = reduction(schedule::Kind::kAllReduce);
  o.timeout = std::chrono::milliseconds(50);
  o.output = {piece(a)};
  cluster.submit(uid, 0, o, 0, tally.completion());
  o.timeout = std::chrono::seconds(60);
  o.output = {piece(b)};
  cluster.submit(uid, 1, o, 0, tally.completion());
  REQUIRE(cluster.run_until([&] { return tally.done == 2; }, 100000000));
  REQUIRE(tally.failed == 2);
  REQUIRE(tally.first_error.find("timed out after") != std::string::npos);
}

TEST_CASE("engine/runtime: an average is exact in fp32 and truncates for integers", "[engine][fast]") {
  Cluster cluster(nodes({0, 0, 1}));
  const auto uid = cluster.open_group();
  Tally tally;
  std::vector<std::vector<std::int32_t>> ints = {{7, -7}, {1, -1}, {0, 0}};
  std::vector<std::vector<float>> floats = {{1.0F, 2.0F}, {2.0F, 3.0F}, {4.5F, 10.0F}};
  for (int r = 0; r < 3; ++r) {
    auto o = reduction(schedule::Kind::kAllReduce, core::ReduceOp::kAvg);
    o.output = {piece(ints[static_cast<std::size_t>(r)])};
    cluster.submit(uid, r, o, 0, tally.completion());
    o.dtype = core::DType::kFloat32;
    o.output = {piece(floats[static_cast<std::size_t>(r)])};
    cluster.submit(uid, r, o, 1, tally.completion());
  }
  REQUIRE(cluster.run_until([&] { return tally.done == 6; }));
  const float third = static_cast<float>(1.0 / 3.0);
  for (int r = 0; r < 3; ++r) {
    REQUIRE(ints[static_cast<std::size_t>(r)] == std::vector<std::int32_t>{2, -2});
    REQUIRE(floats[static_cast<std::size_t>(r)][0] == (1.0F + 2.0F) * third + 4.5F * third);
    REQUIRE(floats[static_cast<std::size_t>(r)][1] == (2.0F + 3.0F) * third + 10.0F * third);
  }
}

TEST_CASE("engine/runtime: the pool's classes fill the memory that there is and no more", "[engine][fast]") {
  const engine::RuntimeOptions options;
  const auto bytes_of = [&](std::size_t bytes_max) {
    std::size_t bytes = 0;
    for (const auto& one : options.pool_classes(bytes_max)) bytes += one.slot_bytes * one.slot_count;
    return bytes;
  };
  const std::size_t least = bytes_of(0);
  for (const std::size_t more : {0, 1, 100'000, 1'000'000, 100'000'000}) {
    CHECK(bytes_of(least + more) <= least + more);
    CHECK(bytes_of(least + more) + 3 * options.chunk_bytes > least + more);  // a slot of each class does not fit
  }
}

TEST_CASE("engine/runtime: when a group starts two ranks of each two nodes dial each other", "[engine][fast]") {
  std::vector<std::vector<int>> layouts = kLayouts;
  layouts.emplace_back();
  for (int rank = 0; rank < 9 * 4; ++rank) layouts.back().push_back(rank / 4);
  for (const auto& layout : layouts) {
    INFO("layout " << name(layout));
    std::set<std::pair<int, int>> dialled;     // ranks
    std::map<std::pair<int, int>, int> times;  // by nodes
    for (int rank = 0; rank < static_cast<int>(layout.size()); ++rank) {
      const schedule::Topology topology(layout, rank);
      const std::vector<int> ranks = engine::ranks_to_dial(topology);
      const auto ranks_here = topology.ranks_of(topology.my_node()).size();
      CHECK(ranks.size() <= (static_cast<std::size_t>(topology.nodes()) + ranks_here - 1) / ranks_here);
      for (const int other : ranks) {
        dialled.emplace(rank, other);
        ++times[{topology.my_node(), topology.node_of(other)}];
      }
    }
    const int nodes = schedule::Topology(layout, 0).nodes();
    CHECK(times.size() == static_cast<std::size_t>(nodes * (nodes - 1)));
    for (const auto& [pair, count] : times) CHECK((pair.first != pair.second && count == 1));
    for (const auto& [from, to] : dialled) CHECK(dialled.count({to, from}) == 1);
  }
}

TEST_CASE("engine/runtime: an engine whose address was not given cannot be reached", "[engine][fast]") {
  Cluster cluster(nodes({0, 1}));
  const core::EngineId stranger{77};
  const auto refused = cluster.at(0).connect(stranger);
  REQUIRE_FALSE(refused.is_ok());
  CHECK(refused.status().message().find(core::to_string(stranger)) != std::string_view::npos);
}

TEST_CASE("engine/runtime: a contribution within a node to what is reduced there by other means is refused",
          "[engine][fast]") {
  for (const bool owns : {true, false}) {
    Tally tally;
    std::vector<std::vector<std::int32_t>> data(4, std::vector<std::int32_t>(2, 1));
    Cluster cluster(nodes({0, 0, 1, 1}));
    const auto uid = cluster.open_group();
    // Rail 1: rank 1 and rank 3, one of which owns it.
    const auto sequence = static_cast<std::uint64_t>(owns ? 0 : 1);
    auto o = reduction(schedule::Kind::kAllReduce);
    o.scope = schedule::Scope::kNodes;
    o.total_bytes = 16;
    o.rail_bytes = {8, 8};
    o.output = {piece(data[1])};
    if (!owns) cluster.at(1).worker().find(uid)->submitted = 1;
    cluster.submit(uid, 1, o, sequence, tally.completion());
    CHECK_FALSE(cluster.run_until([&] { return tally.done > 0; }, 50));
    const auto owner = static_cast<std::uint32_t>(owns ? 1 : 3);
    const wire::ChunkId chunk{.stage = wire::Stage::kLocalPush,
                              .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1,
                                            16, schedule::Scope::kNodes},
                              .sequence = sequence,
                              .span_bytes = 8,
                              .span = owner + 4 * 2,
                              .contributor = 0};
    cluster.at(0).send_control(cluster.id(1), {{{}, uid, 0}, 0, wire::Data{chunk}}, "12345678");
    INFO("owns " << owns);
    REQUIRE(cluster.run_until([&] { return tally.done == 1; }));
    CHECK(tally.first_error.find("a contribution that the plan does not have") != std::string::npos);
  }
}

TEST_CASE("engine/runtime: a rank that speaks for another node is refused", "[engine][fast]") {
  for (const bool early : {true, false}) {
    Tally tally;
    std::vector<std::int32_t> data(6, 1);
    Cluster cluster(nodes({0, 1, 2}));
    const auto uid = cluster.open_group();
    auto o = reduction(schedule::Kind::kAllReduce);
    o.total_bytes = 24;
    o.output = {piece(data)};
    const auto speak = [&] {
      const wire::ChunkId chunk{
          .stage = wire::Stage::kPush,
          .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, 24},
          .sequence = 0,
          .span_bytes = 8,
          .span = 0,
          .contributor = 2};
      cluster.at(1).send_control(cluster.id(0), {{{}, uid, 1}, 0, wire::Data{chunk}}, "12345678");
    };
    if (early) speak();
    cluster.run_until([] { return false; }, 50);
    cluster.submit(uid, 0, o, 0, tally.completion());
    if (!early) speak();
    INFO("early " << early);
    REQUIRE(cluster.run_until([&] { return tally.done == 1; }));
    INFO(tally.first_error);
    CHECK(tally.first_error.find("a contribution of rank 1 (host1) for node 2") != std::string::npos);
  }
}

TEST_CASE("engine/runtime: a result from who has none to give is refused", "[engine][fast]") {
  struct Case {
    int to;
    int from;
    wire::Stage stage;
    std::uint32_t span;
    std::uint32_t contributor;
    const char* text;
  };
  // Ranks 0 and 1 share a node; each rank owns a span. Rank 4 is a dedicated server.
  using enum wire::Stage;
  const std::vector<Case> cases = {
      {0, 2, kResult, 3, 0, "a result of span 3 from rank 2 (host2), which has none to give"},
      {0, 4, kResult, 3, 0, "a result of span 3 from "},
      {0, 1, kResult, 3, 0, "a result of span 3 from rank 1 (host1), which has none to give"},
      {0, 2, kLocalResult, 3, 0, "a result of span 3 from rank 2 (host2), which has none to give"},
      {0, 2, kLocalPush, 0, 1, "a contribution for local rank 1 of span 0 from rank 2 (host2), which has none"},
      {0, 1, kLocalPush, 0, 0, "a contribution for local rank 0 of span 0 from rank 1 (host1), which has none"},
      {0, 1, kLocalPush, 0, 0xffffffffU, "a contribution for local rank 4294967295 of span 0 from rank 1 (host1)"},
      {0, 4, kPush, 0, 0xffffffffU, "for node 4294967295, which is not its own"},
      {0, 2, kPush, 0, 4096, "a contribution of rank 2 (host2) for node 4096, which is not its own"},
  };
  for (const Case& one : cases)
    for (const bool announces : {false, true}) {
      Tally tally;
      std::vector<std::int32_t> data(4096, 1);
      ClusterOptions options = nodes({0, 0, 1, 2});
      options.servers = {0.5};
      Cluster cluster(options);
      const auto uid = cluster.open_group();
      auto o = reduction(schedule::Kind::kAllReduce);
      o.total_bytes = data.size() * 4;
      o.output = {piece(data)};
      cluster.submit(uid, one.to, o, 0, tally.completion());
      cluster.run_until([] { return false; }, 50);
      const wire::ChunkId chunk{
          .stage = one.stage,
          .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, data.size() * 4},
          .sequence = 0,
          .span_bytes = 8,
          .span = one.span,
          .contributor = one.contributor};
      const wire::From from{{}, uid, static_cast<std::uint32_t>(one.from)};
      if (announces)
        cluster.at(one.from).send_control(cluster.id(one.to), {from, 0, wire::Announce{chunk}}, {});
      else
        cluster.at(one.from).send_control(cluster.id(one.to), {from, 0, wire::Data{chunk}}, "12345678");
      INFO("from " << one.from << ", stage " << static_cast<int>(one.stage) << ", announces " << announces);
      REQUIRE(cluster.run_until([&] { return tally.done == 1; }));
      INFO(tally.first_error);
      CHECK(tally.first_error.find(one.text) != std::string::npos);
    }
}

TEST_CASE("engine/runtime: who speaks in another's name is refused, and named", "[engine][fast]") {
  for (const int claimed : {2, 0, 7})
    for (const bool is_local : {false, true}) {
      Tally tally;
      std::vector<std::int32_t> data(6, 1);
      Cluster cluster(nodes(is_local ? std::vector<int>{0, 0, 1} : std::vector<int>{0, 1, 2}));
      const auto uid = cluster.open_group();
      auto o = reduction(schedule::Kind::kAllReduce);
      o.total_bytes = 24;
      o.output = {piece(data)};
      cluster.submit(uid, 0, o, 0, tally.completion());
      const core::EngineId name = claimed == 7 ? core::EngineId{7777} : cluster.id(claimed);
      const wire::Message goodbye{{name, uid, static_cast<std::uint32_t>(claimed)},
                                  0,
                                  wire::Verdict::on_group(core::Code::kAborted, /*blamed=*/claimed)};
      REQUIRE(cluster.at(1).connect(cluster.id(0)).value()->send(wire::encode(goodbye), {}, 0, {}).is_ok());
      INFO("claims to be " << claimed << ", local " << is_local);
      REQUIRE(cluster.run_until([&] { return tally.done == 1; }, 10000000));
      INFO(tally.first_error);
      CHECK(tally.first_error.find("rank 1 (host1) is gone: it sent a message in the name of another process") !=
            std::string::npos);
      CHECK(cluster.at(0).counters()[observe::Counter::kBadMessages] == 1);
    }
}

TEST_CASE("engine/runtime: what is paid for a larger slot than any here comes back whole", "[engine][fast]") {
  auto options = nodes({0, 0});
  options.chunk_bytes_of = {16 * 1024, 4096};  // the first one's slots of 8 KiB carry the group's chunks
  options.chunk_bytes = 4096;
  options.eager_bytes = 64 * 1024;
  Tally tally;
  std::vector<std::vector<std::int32_t>> data(2, std::vector<std::int32_t>(2000, 1));
  Cluster cluster(options);
  const auto uid = cluster.open_group();
  for (std::uint64_t round = 0; round < 40; ++round) {
    for (int r = 0; r < 2; ++r) {
      auto o = movement(schedule::Kind::kBroadcast);
      o.root = 0;
      o.output = {piece(data[static_cast<std::size_t>(r)])};
      cluster.submit(uid, r, o, round, tally.completion());
    }
    REQUIRE(cluster.run_until([&] { return tally.done == static_cast<int>(2 * round + 2); }));
  }
  REQUIRE(tally.failed == 0);
  const std::string text = cluster.at(0).outbox().describe();
  const std::string word = "outstanding ";
  INFO(text);
  CHECK(std::stoll(text.substr(text.find(word) + word.size())) < 32 * 1024);
}

TEST_CASE("engine/runtime: a dedicated server's status tells an engine only of the groups that it is in", "[engine]") {
  ClusterOptions options;
  options.node_of = {0, 1, 2, 3};
  options.servers = {1.0};
  Cluster cluster(options);
  const int server = cluster.size();
  const auto serve = [&](core::GroupUid uid, int first, int second) {
    const schedule::Members members({{cluster.id(first), "a"}, {cluster.id(second), "b"}, {cluster.id(server), "s"}});
    cluster.at(server).open_served_group({uid, "test", members, schedule::Topology({0, 1}, 2, {}, {1.0}), 1024});
  };
  const auto told = [&](int asker) {
    observe::Json json;
    json.object();
    cluster.at(server).write_status_for(cluster.id(asker), json, 100);
    json.end();
    return json.text();
  };
  const auto names = [&](const std::string& text, int rank) {
    return text.find(core::to_string(cluster.id(rank))) != std::string::npos;
  };
  serve({1, 1}, 0, 1);
  CHECK(told(0).find("rx_payload_bytes") != std::string::npos);  // one job: all is its own
  serve({2, 2}, 2, 3);
  const std::string text = told(0);
  CHECK(names(text, 0));
  CHECK(names(text, 1));
  CHECK_FALSE(names(text, 2));
  CHECK_FALSE(names(text, 3));
  CHECK(text.find("rx_payload_bytes") == std::string::npos);
  CHECK(text.find("pool_slots_in_use") == std::string::npos);
  CHECK(names(told(3), 2));
  CHECK_FALSE(names(told(3), 0));
}

TEST_CASE("engine/runtime: what a peer sends beyond its allowance is not kept, and the peer is named",
          "[engine][fast]") {
  using enum wire::Stage;
  for (const wire::Stage stage : {kPush, kResult})
    for (const bool to_server : {false, true}) {
      if (to_server && stage != kPush) continue;
      Tally tally;
      std::vector<std::int32_t> data(4096, 1);
      ClusterOptions options = nodes({0, 1, 2});
      options.servers = {1.0};
      options.eager_bytes = options.far_bytes = options.window_bytes = 4096;  // 18 KiB with the grants
      options.pool_extra_bytes = std::size_t{1} << 20;
      Cluster cluster(options);
      const auto uid = cluster.open_group();
      auto o = reduction(schedule::Kind::kAllReduce);
      o.total_bytes = data.size() * 4;
      o.output = {piece(data)};
      const int to = to_server ? 3 : 0;
      const auto send = [&](std::uint64_t sequence) {
        const wire::ChunkId chunk{
            .stage = stage,
            .signature = {schedule::Kind::kAllReduce, core::DType::kInt32, core::ReduceOp::kSum, -1, data.size() * 4},
            .sequence = sequence,
            .span_bytes = 1024,
            .span = static_cast<std::uint32_t>(stage == kPush ? to : 1),
            .contributor = stage == kPush ? 1U : 0U};
        cluster.at(1).send_control(cluster.id(to), {{{}, uid, 1}, 0, wire::Data{chunk}}, std::string(1024, 'x'));
        cluster.run_until([] { return false; }, 20);
      };
      INFO("stage " << static_cast<int>(stage) << ", to " << to);
      std::uint64_t sequence = 10;
      for (; sequence < 10 + 8; ++sequence) send(sequence);
      CHECK(cluster.at(0).worker().find(uid)->status.is_ok());
      CHECK(cluster.at(3).dedicated().has(uid));
      for (; sequence < 10 + 40; ++sequence) send(sequence);
      if (to_server)
        CHECK_FALSE(cluster.at(3).dedicated().has(uid));
      else
        CHECK_FALSE(cluster.at(0).worker().find(uid)->status.is_ok());
      cluster.submit(uid, 0, o, 0, tally.completion());
      REQUIRE(cluster.run_until([&] { return tally.done == 1; }));
      INFO(tally.first_error);
      CHECK(tally.first_error.find("rank 1") != std::string::npos);
      CHECK(tally.first_error.find("bytes that nobody has asked for, and may send 18432") != std::string::npos);
    }
}

TEST_CASE("engine/runtime: no core dump holds the memory of messages", "[engine][fast]") {
  const auto pool = engine::map_pool(1 << 20);
  REQUIRE(pool.is_ok());
  CHECK_FALSE(test::is_dumped(pool.value().memory.data()));
  CHECK_FALSE(test::is_dumped(pool.value().memory.data() + (1 << 19)));
}
