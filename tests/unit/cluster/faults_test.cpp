// Clusters whose transports misbehave, from a seed. A real transport neither drops nor duplicates: here they stand for
// bugs of peers, and prove that nothing waits for ever.
#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <numeric>

#include "tests/support/catch.h"
#include "tests/support/clock.h"
#include "tests/support/cluster.h"
#include "tests/support/faulty_transport.h"

namespace {

using namespace hybridps;
using schedule::Kind;
using test::Cluster;
using test::ClusterOptions;
using test_support::Faults;
using test_support::FaultyTransport;
using Ints = std::vector<std::int32_t>;

const std::vector<std::vector<int>> kLayouts = {{0, 0}, {0, 1}, {0, 0, 1, 1}, {0, 1, 2}, {0, 0, 0, 1}, {0, 1, 2, 2, 3}};

std::string name(const std::vector<int>& layout) {
  std::string text;
  for (const int node : layout) text += std::to_string(node);
  return text;
}

std::size_t index(int rank) { return static_cast<std::size_t>(rank); }

/// A cluster over faulty transports: [rank][0] between nodes, [rank][1] inside them.
struct FaultyCluster {
  FaultyCluster(const std::vector<int>& layout, const Faults& faults, std::uint64_t seed, bool scarce = false,
                std::size_t eager_bytes = ClusterOptions().eager_bytes)
      : links(layout.size()) {
    ClusterOptions options;
    options.eager_bytes = eager_bytes;
    if (scarce) {
      options.eager_bytes = 1024;
      options.grant_chunks = 1;
    }
    options.node_of = layout;
    const int nodes = 1 + *std::max_element(layout.begin(), layout.end());
    for (int node = 0; seed % 2 == 0 && node < nodes; ++node) options.region_of.push_back(2 * node / nodes);
    options.seed = seed;
    options.wrap = [this, &faults, seed](std::unique_ptr<transport::Transport> inner, int rank) {
      auto wrapped = std::make_unique<FaultyTransport>(std::move(inner), faults,
                                                       seed * 100 + index(rank) * 2 + links[index(rank)].size());
      links[index(rank)].push_back(wrapped.get());
      return wrapped;
    };
    cluster = std::make_unique<Cluster>(std::move(options));
  }
  void set_faults(const Faults& faults) {
    for (auto& rank : links)
      for (FaultyTransport* link : rank) link->set_faults(faults);
  }
  FaultyTransport::Counts counts() const {
    FaultyTransport::Counts sum;
    for (const auto& rank : links)
      for (const FaultyTransport* link : rank) {
        sum.dropped += link->counts().dropped;
        sum.duplicated += link->counts().duplicated;
        sum.delayed += link->counts().delayed;
        sum.killed += link->counts().killed;
      }
    return sum;
  }
  /// Until done(), for at most this long on the clock.
  bool run(const std::function<bool()>& done, double seconds = 30) {
    const auto limit = core::Clock::now() + core::from_seconds(seconds);
    cluster->run_until([&] { return done() || core::Clock::now() > limit; }, INT_MAX);
    if (done()) return true;
    std::string stall;
    for (int rank = 0; rank < cluster->size(); ++rank)
      if (!links[index(rank)].empty())  // alive
        stall += "rank " + std::to_string(rank) + "\n" + cluster->at(rank).outbox().describe();
    WARN(stall);
    cluster.reset();  // while the memory of its operations is still there
    return false;
  }

  std::vector<std::vector<FaultyTransport*>> links;
  std::unique_ptr<Cluster> cluster;
};

/// One collective on all ranks, with its memory and what must come out.
struct Collective {
  Collective(Kind k, int ranks, std::size_t count, int r) : kind(k), n(ranks), root(r) {
    const std::size_t un = index(n);
    in.resize(un);
    out.resize(un);
    expected.resize(un);
    outcomes.resize(un);
    done.assign(un, false);
    const auto value = [](int rank, std::size_t i) {
      return static_cast<std::int32_t>(rank * 1000003 + static_cast<int>(i) * 17 + 1);
    };
    const auto values = [&](int rank, std::size_t size) {
      Ints v(size);
      for (std::size_t i = 0; i < size; ++i) v[i] = value(rank, i);
      return v;
    };
    const auto sum = [&](std::size_t size) {
      Ints v(size, 0);
      for (int rank = 0; rank < n; ++rank)
        for (std::size_t i = 0; i < size; ++i) v[i] += value(rank, i);
      return v;
    };
    for (int me = 0; me < n; ++me) {
      const std::size_t u = index(me);
      switch (kind) {
        case Kind::kAllReduce:
          out[u] = values(me, count);
          expected[u] = sum(count);
          break;
        case Kind::kBroadcast:
          out[u] = values(me, count);
          expected[u] = values(root, count);
          break;
        case Kind::kReduce:
          in[u] = values(me, count);
          if (me == root) {
            out[u].assign(count, -1);
            expected[u] = sum(count);
          }
          break;
        case Kind::kAllGather:
          in[u] = values(me, count);
          out[u].assign(count * un, -1);
          for (int q = 0; q < n; ++q) {
            const Ints part = values(q, count);
            expected[u].insert(expected[u].end(), part.begin(), part.end());
          }
          break;
        case Kind::kReduceScatter: {
          in[u] = values(me, count * un);
          out[u].assign(count, -1);
          const Ints all = sum(count * un);
          expected[u].assign(all.begin() + static_cast<std::ptrdiff_t>(u * count),
                             all.begin() + static_cast<std::ptrdiff_t>((u + 1) * count));
          break;
        }
        case Kind::kAllToAll:
          in[u] = values(me, count * un);
          out[u].assign(count * un, -1);
          for (int q = 0; q < n; ++q)
            for (std::size_t i = 0; i < count; ++i) expected[u].push_back(value(q, u * count + i));
          break;
        default: break;  // barrier
      }
    }
    bytes = count * 4;
  }
  void submit(Cluster& cluster, core::GroupUid uid, int rank, std::uint64_t sequence, int timeout_ms = 0) {
    const auto piece = [](Ints& v) { return worker::Piece{reinterpret_cast<std::byte*>(v.data()), v.size() * 4}; };
    worker::Operation o;
    o.kind = kind;
    o.dtype = kind == Kind::kBarrier ? core::DType::kBytes : core::DType::kInt32;
    if (kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter) o.op = core::ReduceOp::kSum;
    if (kind == Kind::kReduce || kind == Kind::kBroadcast) o.root = root;
    o.timeout = std::chrono::milliseconds(timeout_ms);
    const std::size_t u = index(rank);
    if (!in[u].empty()) o.input = {piece(in[u])};
    if (!out[u].empty()) o.output = {piece(out[u])};
    if (kind == Kind::kReduceScatter || kind == Kind::kAllToAll) o.input_bytes.assign(index(n), bytes);
    if (kind == Kind::kAllGather || kind == Kind::kAllToAll) o.output_bytes.assign(index(n), bytes);
    cluster.submit(uid, rank, o, sequence, [this, u](const worker::Outcome& outcome) {
      done[u] = true;
      ++done_count;
      outcomes[u] = outcome.status;
    });
  }
  /// Each rank that succeeded has the right bytes; returns how many did not succeed.
  int check() const {
    int failed = 0;
    for (int rank = 0; rank < n; ++rank) {
      const std::size_t u = index(rank);
      if (!done[u]) continue;
      if (!outcomes[u].is_ok()) {
        ++failed;
        continue;
      }
      INFO(schedule::name_of(kind) << " rank " << rank);
      REQUIRE(out[u] == expected[u]);
    }
    return failed;
  }

  Kind kind;
  int n;
  int root;
  std::uint64_t bytes = 0;
  std::vector<Ints> in, out, expected;
  std::vector<core::Status> outcomes;
  std::vector<bool> done;
  int done_count = 0;
};

constexpr Kind kKinds[] = {Kind::kAllReduce,     Kind::kBroadcast, Kind::kReduce, Kind::kAllGather,
                           Kind::kReduceScatter, Kind::kAllToAll,  Kind::kBarrier};

/// Issues `count` random collectives on all ranks, each rank in order but at its own pace.
std::vector<std::unique_ptr<Collective>> issue(FaultyCluster& faulty, core::GroupUid uid, std::size_t count,
                                               std::uint64_t first_sequence = 0, int timeout_ms = 0) {
  Cluster& cluster = *faulty.cluster;
  std::vector<std::unique_ptr<Collective>> list;
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t elements = cluster.random()() % 4 == 0 ? cluster.random()() % 40 : cluster.random()() % 2500;
    list.push_back(std::make_unique<Collective>(kKinds[cluster.random()() % 7], cluster.size(), elements,
                                                static_cast<int>(cluster.random()() % index(cluster.size()))));
  }
  std::vector<std::size_t> next(index(cluster.size()), 0);
  for (std::size_t left = count * next.size(); left > 0;) {
    const int rank = static_cast<int>(cluster.random()() % next.size());
    if (next[index(rank)] == count) continue;
    const std::size_t i = next[index(rank)]++;
    list[i]->submit(cluster, uid, rank, first_sequence + i, timeout_ms);
    --left;
    cluster.run_until([] { return false; }, static_cast<int>(cluster.random()() % 3));
  }
  return list;
}

bool all_done(const std::vector<std::unique_ptr<Collective>>& list) {
  for (const auto& c : list)
    if (c->done_count < c->n) return false;
  return true;
}

int failures(const std::vector<std::unique_ptr<Collective>>& list) {
  int failed = 0;
  for (const auto& c : list) failed += c->check();
  return failed;
}

}  // namespace

TEST_CASE("cluster/faults: delayed and reordered messages change no result", "[cluster][fast]") {
  for (const auto& layout : kLayouts) {
    for (std::uint64_t seed = 1; seed <= 6; ++seed) {
      Faults faults;
      faults.delay = seed % 2 == 0 ? 0.9 : 0.3;
      faults.delay_max = seed % 2 == 0 ? 40 : 200;
      FaultyCluster faulty(layout, faults, seed, /*scarce=*/seed > 2);
      const auto uid = faulty.cluster->open_group();
      const auto list = issue(faulty, uid, 25);
      INFO("layout " << name(layout) << " seed " << seed);
      REQUIRE(faulty.run([&] { return all_done(list); }));
      REQUIRE(failures(list) == 0);
      REQUIRE(faulty.counts().delayed > 0);
    }
  }
}

TEST_CASE("cluster/faults: duplicated messages do no harm", "[cluster][fast]") {
  for (const auto& layout : kLayouts) {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      Faults faults;
      faults.duplicate = seed % 2 == 0 ? 1.0 : 0.3;
      faults.delay = seed > 2 ? 0.4 : 0;
      faults.delay_max = 30;
      FaultyCluster faulty(layout, faults, seed);
      const auto uid = faulty.cluster->open_group();
      const auto list = issue(faulty, uid, 25);
      INFO("layout " << name(layout) << " seed " << seed);
      REQUIRE(faulty.run([&] { return all_done(list); }));
      REQUIRE(failures(list) == 0);
      REQUIRE(faulty.counts().duplicated > 0);
    }
  }
}

TEST_CASE("cluster/faults: point to point survives reordering and duplicates", "[cluster][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0}, {0, 1}}) {
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
      Faults faults;
      faults.delay = 0.5;
      faults.delay_max = 60;
      faults.duplicate = 0.7;
      FaultyCluster faulty(layout, faults, seed);
      Cluster& cluster = *faulty.cluster;
      const auto uid = cluster.open_group();
      constexpr std::size_t kMessages = 20;
      std::vector<Ints> in(kMessages);
      std::vector<Ints> out(kMessages);
      std::vector<bool> send_done(kMessages, false);
      int done = 0;
      std::string error;
      const auto transfer = [&](int rank, bool sending, std::size_t i) {
        worker::Operation o;
        o.kind = Kind::kPointToPoint;
        o.sending = sending;
        o.peer = 1 - rank;
        o.tag = static_cast<std::uint32_t>(i % 2);
        Ints& data = sending ? in[i] : out[i];
        (sending ? o.input : o.output).push_back({reinterpret_cast<std::byte*>(data.data()), data.size() * 4});
        cluster.submit(uid, rank, o, 0, [&](const worker::Outcome& outcome) {
          ++done;
          if (!outcome.status.is_ok()) error = outcome.status.to_string();
        });
      };
      for (std::size_t i = 0; i < kMessages; ++i) {
        in[i].resize(cluster.random()() % 3000);
        for (auto& v : in[i]) v = static_cast<std::int32_t>(cluster.random()());
        out[i].assign(in[i].size(), -1);
      }
      for (std::size_t i = 0; i < kMessages; ++i) {
        transfer(0, true, i);
        if (seed % 2 == 0) transfer(1, false, i);
        cluster.run_until([] { return false; }, 3);
      }
      if (seed % 2 != 0)
        for (std::size_t i = 0; i < kMessages; ++i) transfer(1, false, i);
      INFO("layout " << name(layout) << " seed " << seed);
      REQUIRE(faulty.run([&] { return done == 2 * static_cast<int>(kMessages); }));
      REQUIRE(error == "");
      REQUIRE(in == out);
    }
  }
}

TEST_CASE("cluster/faults: operations with a deadline end although messages are lost", "[cluster][fast]") {
  int failed = 0;
  for (const auto& layout : kLayouts) {
    for (std::uint64_t seed = 1; seed <= 2; ++seed) {
      test::MovableClock clock;  // with the real one it is chance how much is lost before the deadline
      Faults faults;
      faults.drop = seed == 1 ? 0.01 : 0.1;
      // An allowance of which something is left: what is lost of it never comes back.
      FaultyCluster faulty(layout, faults, seed, /*scarce=*/false, /*eager_bytes=*/16 * 1024);
      const auto run = [&](const auto& operations, int ms) {
        for (;; --ms) {
          if (faulty.cluster->run_until([&] { return all_done(operations); }, 50)) return true;
          if (ms == 0) {
            faulty.cluster.reset();  // while the memory of its operations is still there
            return false;
          }
          clock.pass(std::chrono::milliseconds(1));
        }
      };
      const auto uid = faulty.cluster->open_group();
      const auto list = issue(faulty, uid, 10, 0, /*timeout_ms=*/250);
      INFO("layout " << name(layout) << " seed " << seed);
      REQUIRE(run(list, 250));
      failed += failures(list);
      for (const auto& c : list)
        for (const core::Status& status : c->outcomes)
          if (!status.is_ok()) REQUIRE(status.code() == core::Code::kTimeout);
      // Once the messages arrive again the same group works, with what is left of its allowances.
      faulty.set_faults({});
      const auto later = issue(faulty, uid, 10, 10);
      REQUIRE(run(later, 100));
      REQUIRE(failures(later) == 0);
    }
  }
  CHECK(failed > 0);
}

TEST_CASE("cluster/faults: when nothing arrives every operation fails at its deadline", "[cluster][fast]") {
  Faults faults;
  faults.drop = 1;
  for (const auto& layout : kLayouts) {
    test::MovableClock clock;
    FaultyCluster faulty(layout, faults, 1);
    const auto uid = faulty.cluster->open_group();
    const auto list = issue(faulty, uid, 5, 0, /*timeout_ms=*/9000);
    clock.pass(std::chrono::milliseconds(8999));
    faulty.cluster->run_until([] { return false; }, 100);
    for (const auto& c : list)
      for (const core::Status& status : c->outcomes) REQUIRE(status.is_ok());
    clock.pass(std::chrono::milliseconds(1));
    REQUIRE(faulty.cluster->run_until([&] { return all_done(list); }));
    for (const auto& c : list) {
      // A source that only sends is done when its messages are on their way.
      const bool sends_only = c->kind == Kind::kBroadcast || c->kind == Kind::kReduce;
      const int failed = c->check();
      INFO("layout " << name(layout) << " " << schedule::name_of(c->kind));
      REQUIRE((failed == c->n || (sends_only && failed >= 1)));
    }
  }
}

TEST_CASE("cluster/faults: a cut cable fails everything that is under way and nothing hangs", "[cluster][fast]") {
  for (const auto& layout : kLayouts) {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      FaultyCluster faulty(layout, {}, seed);
      Cluster& cluster = *faulty.cluster;
      const auto uid = cluster.open_group();
      // The nth message of one rank's links is its last to that peer.
      const int victim = static_cast<int>(seed % index(cluster.size()));
      Faults cut;
      cut.kill_after = 1 + cluster.random()() % 60;
      for (FaultyTransport* link : faulty.links[index(victim)]) link->set_faults(cut);
      const auto list = issue(faulty, uid, 20);
      INFO("layout " << name(layout) << " seed " << seed << " victim " << victim << " after " << cut.kill_after);
      REQUIRE(faulty.run([&] { return all_done(list); }));
      REQUIRE(faulty.counts().killed > 0);
      for (const auto& c : list) {
        c->check();
        for (const core::Status& status : c->outcomes)
          if (!status.is_ok()) REQUIRE(status.code() == core::Code::kPeerDead);
      }
      // Not of the last operation: a broadcast that needs neither end of the cable may be done before the cut.
      REQUIRE(
          std::any_of(list.begin(), list.end(), [&](const auto& c) { return !c->outcomes[index(victim)].is_ok(); }));
      const auto later = issue(faulty, uid, 2, 20);
      REQUIRE(all_done(later));
      REQUIRE(failures(later) == 2 * cluster.size());
    }
  }
}

TEST_CASE("cluster/faults: a process that dies at any moment fails its groups and no others", "[cluster][fast]") {
  for (const auto& layout : std::vector<std::vector<int>>{{0, 0, 0}, {0, 1, 2}, {0, 0, 1, 1}, {0, 1, 1, 0, 2}}) {
    for (std::uint64_t seed = 1; seed <= 4; ++seed) {
      Faults faults;
      faults.delay = 0.3;
      faults.delay_max = 10;
      FaultyCluster faulty(layout, faults, seed);
      Cluster& cluster = *faulty.cluster;
      const int n = cluster.size();
      const int victim = static_cast<int>(seed % index(n));
      const auto uid = cluster.open_group();
      // A second group of all but the victim.
      const auto survivors_uid = cluster.new_uid();
      std::vector<int> ranks;
      for (int r = 0; r < n; ++r)
        if (r != victim) ranks.push_back(r);
      std::vector<schedule::Member> members;
      std::vector<int> node_of;
      std::vector<int> renumbered(index(n), -1);
      int nodes = 0;
      for (const int r : ranks) {
        members.push_back({cluster.id(r), "host" + std::to_string(r)});
        int& node = renumbered[index(layout[index(r)])];
        if (node < 0) node = nodes++;
        node_of.push_back(node);
      }
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        worker::GroupInfo info{survivors_uid, "survivors", schedule::Members(members),
                               schedule::Topology(node_of, static_cast<int>(i)), 256};
        info.tuning.chunks.usual = 1024;
        cluster.at(ranks[i]).open_group(std::move(info));
      }

      std::vector<std::unique_ptr<Collective>> list = issue(faulty, uid, 8);
      std::vector<Ints> data(ranks.size(), Ints(3000, 2));
      int done = 0;
      std::string error;
      for (std::size_t i = 0; i < ranks.size(); ++i) {
        worker::Operation o;
        o.kind = Kind::kAllReduce;
        o.dtype = core::DType::kInt32;
        o.op = core::ReduceOp::kSum;
        o.output = {worker::Piece{reinterpret_cast<std::byte*>(data[i].data()), data[i].size() * 4}};
        cluster.submit(survivors_uid, ranks[i], o, 0, [&](const worker::Outcome& outcome) {
          ++done;
          if (!outcome.status.is_ok()) error = outcome.status.to_string();
        });
      }
      cluster.run_until([] { return false; }, static_cast<int>(cluster.random()() % 40));
      cluster.kill(victim);
      faulty.links[index(victim)].clear();
      Collective last(Kind::kAllReduce, n, 3000, 0);  // the victim takes no part
      for (const int r : ranks) last.submit(cluster, uid, r, 8);
      // Dead runtimes make no progress: the cluster skips them.
      INFO("layout " << name(layout) << " seed " << seed << " victim " << victim);
      REQUIRE(faulty.run([&] {
        if (last.done_count < n - 1 || done < n - 1) return false;
        for (const auto& c : list)
          for (const int r : ranks)
            if (!c->done[index(r)]) return false;
        return true;
      }));
      for (const int r : ranks) {
        const core::Status& status = last.outcomes[index(r)];
        REQUIRE(status.code() == core::Code::kPeerDead);
        REQUIRE(std::string(status.message()).find("rank " + std::to_string(victim) + " ") != std::string::npos);
      }
      for (const auto& c : list) c->check();
      REQUIRE(error == "");
      for (const Ints& v : data) REQUIRE(v == Ints(3000, 2 * (n - 1)));
    }
  }
}
