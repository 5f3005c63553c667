// What goes to other nodes straight from device memory. A fake device's own memory ends the process when a thread of
// the host touches it, so each case also says that the engine does not.
#include "hybridps/staging/direct.h"

#include <map>

#include "tests/support/faulty_transport.h"
#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using intranode::FakeLocalGroups;
using schedule::Topology;

ClusterOptions with_view(std::vector<int> layout, std::uint64_t seed) {
  ClusterOptions options = nodes(std::move(layout), seed);
  options.device_view = &FakeDevice::host_view;
  return options;
}

ChannelOptions direct() {
  ChannelOptions options = small();
  options.direct = true;
  return options;
}

std::vector<Rank> ranks_of(ClusterThread& cluster, std::uint64_t seed, int queues = 8,
                           const ChannelOptions& options = direct()) {
  return ranks(cluster, seed, queues, options);
}

constexpr Kind kDelivered[] = {Kind::kBroadcast, Kind::kAllGather, Kind::kGather, Kind::kScatter, Kind::kAllToAll};

worker::Operation message(bool sending, int peer, Values& values) {
  worker::Operation o;
  o.kind = Kind::kPointToPoint;
  o.sending = sending;
  o.peer = peer;
  (sending ? o.input : o.output).assign(1, piece(values));
  return o;
}

/// Operation `turn` of `kind` on all ranks, begun.
struct Begun {
  std::vector<Part> parts;
  std::vector<std::shared_ptr<Staged>> staged;

  Begun(std::vector<Rank>& all, Kind kind, std::size_t count, std::uint32_t turn) {
    for (Rank& rank : all) {
      parts.push_back(make(kind, rank.group->rank(), static_cast<int>(all.size()), count, turn));
      *parts.back().input = parts.back().given_input;
      *parts.back().output = parts.back().given_output;
      staged.push_back(rank.enqueue(parts.back().operation));
      REQUIRE(staged.back());
    }
  }
  void check() const {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      REQUIRE(eventually([&] { return staged[r]->is_over(); }));
      REQUIRE(staged[r]->status().to_string() == "ok");
      REQUIRE((*parts[r].output == parts[r].expected));
    }
  }
};

TEST_CASE("staging/direct: what is delivered goes to other nodes from device memory and is not staged",
          "[staging][fast]") {
  std::uint64_t seed = 300;
  for (const int queues : {1, 8, 32}) {
    for (const std::vector<int>& layout : {std::vector<int>{0, 1}, std::vector<int>{0, 1, 2, 3}}) {
      const int size = static_cast<int>(layout.size());
      for (const Kind kind : kDelivered) {
        INFO(schedule::name_of(kind) << " queues " << queues << " ranks " << size);
        ClusterThread cluster(with_view(layout, ++seed));
        auto all = ranks_of(cluster, seed, queues);
        std::vector<std::uint64_t> expected(layout.size(), 0);
        std::vector<std::uint64_t> staged(layout.size(), 0);
        std::vector<std::unique_ptr<Begun>> begun;
        std::uint32_t turn = 0;
        for (const std::size_t count : {700, 5000, 1, 40000, 5000}) {
          begun.push_back(std::make_unique<Begun>(all, kind, count, turn));
          for (int r = 0; r < size; ++r) {
            const bool root = static_cast<int>(turn) % size == r;
            const std::uint64_t own = 4 * (count + 3 * static_cast<std::size_t>(r));
            std::uint64_t others = 0;
            for (int p = 0; p < size; ++p) others += p == r ? 0 : 4 * (count + 3 * static_cast<std::size_t>(p));
            std::uint64_t& bytes = expected[static_cast<std::size_t>(r)];
            switch (kind) {
              case Kind::kBroadcast:  // once, and on by its receivers, but to each where it is small or there is one
                if (root)
                  bytes += (size == 2 || 4 * count <= 1024 ? static_cast<std::uint64_t>(size - 1) : 1) * 4 * count;
                break;
              case Kind::kAllGather: bytes += static_cast<std::uint64_t>(size - 1) * own; break;
              case Kind::kGather:  // the root sends nothing, and has its own part as ever
                bytes += root ? 0 : own;
                staged[static_cast<std::size_t>(r)] += root ? own : 0;
                break;
              case Kind::kScatter: bytes += root ? others : 0; break;
              default: bytes += others; break;
            }
          }
          ++turn;
        }
        for (const auto& b : begun) b->check();
        for (int r = 0; r < size; ++r) {
          INFO("rank " << r);
          const auto i = static_cast<std::size_t>(r);
          CHECK(sent_from_device(cluster, r) == expected[i]);
          CHECK(all[i].gpu->copied_bytes().to_host == staged[i]);
          CHECK(all[i].channel->is_direct());
        }
      }
    }
  }
}

TEST_CASE("staging/direct: ranks of a node that have a library send what is theirs from device memory",
          "[staging][fast]") {
  std::uint64_t seed = 400;
  const std::vector<int> layouts[] = {{0, 0, 1, 1}, {0, 0, 0, 1}, {1, 0, 0, 2, 1, 0}};
  for (const int queues : {1, 8, 32}) {
    for (const std::vector<int>& layout : layouts) {
      for (const Kind kind : kDelivered) {
        INFO(schedule::name_of(kind) << " queues " << queues << " ranks " << layout.size());
        ClusterThread cluster(with_view(layout, ++seed));
        const Hub hub = FakeLocalGroups::make_hub();
        auto all = ranks(cluster, seed, queues, direct(), hub);
        const auto size = layout.size();
        std::vector<std::uint64_t> pairwise(size, 0);  // to ranks of other nodes
        std::vector<std::unique_ptr<Begun>> begun;
        for (std::uint32_t turn = 0; turn < 4; ++turn) {
          const std::size_t count = turn % 2 == 0 ? 9000 : 700;
          begun.push_back(std::make_unique<Begun>(all, kind, count, turn));
          for (std::size_t from = 0; from < size; ++from)
            for (std::size_t to = 0; to < size; ++to) {
              if (layout[from] == layout[to]) continue;
              const bool sends = kind == Kind::kAllToAll || (kind == Kind::kGather && to == turn % size) ||
                                 (kind == Kind::kScatter && from == turn % size);
              const std::size_t part = kind == Kind::kGather ? from : to;
              if (sends) pairwise[from] += 4 * (count + 3 * part);
            }
        }
        for (const auto& b : begun) b->check();
        std::uint64_t together = 0;
        for (std::size_t r = 0; r < size; ++r) {
          const std::uint64_t sent = sent_from_device(cluster, static_cast<int>(r));
          together += sent;
          CHECK(all[r].gpu->copied_bytes().to_host == 0);
          if (kind != Kind::kBroadcast && kind != Kind::kAllGather) CHECK(sent == pairwise[r]);
        }
        CHECK(together > 0);
        CHECK(FakeLocalGroups::mismatches(*hub) == 0);
        CHECK(FakeLocalGroups::is_one_order(*hub));
      }
    }
  }
}

TEST_CASE("staging/direct: programs of all kinds that never wait, on even and uneven nodes", "[staging][fast]") {
  std::uint64_t seed = 500;
  for (const int queues : {1, 8, 32}) {
    CHECK(run_program({0, 1, 2}, queues, seed++, 25, nullptr, true) > 0);
    CHECK(run_program({0, 0, 1}, queues, seed++, 20, nullptr, true) > 0);
    CHECK(run_program({0, 0, 1}, queues, seed++, 20, FakeLocalGroups::make_hub(), true) > 0);
    CHECK(run_program({0, 0, 1, 1}, queues, seed++, 15, FakeLocalGroups::make_hub(), true) > 0);
    CHECK(run_program({0, 0}, queues, seed++, 10, nullptr, true) == 0);
  }
}

TEST_CASE("staging/direct: a rank with a neighbour that shared memory serves is staged and the others are not",
          "[staging][fast]") {
  for (const Kind kind : kDelivered) {
    INFO(schedule::name_of(kind));
    ClusterThread cluster(with_view({0, 0, 1}, 31));
    auto all = ranks_of(cluster, 31);
    for (std::uint32_t turn = 0; turn < 3; ++turn) Begun(all, kind, 3000, turn).check();
    const auto to_host = [&](std::size_t r) { return all[r].gpu->copied_bytes().to_host; };
    CHECK(to_host(0) > 0);
    if (kind != Kind::kGather) CHECK(to_host(2) == 0);
    CHECK(sent_from_device(cluster, 2) > 0);
    // A gather's part goes to its root alone: where that is on another node, nobody else needs it.
    CHECK((sent_from_device(cluster, 0) > 0) == (kind == Kind::kGather));
  }
}

TEST_CASE("staging/direct: sums stay staged", "[staging][fast]") {
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter}) {
    ClusterThread cluster(with_view({0, 1}, 32));
    auto all = ranks_of(cluster, 32);
    for (std::uint32_t turn = 0; turn < 2; ++turn) Begun(all, kind, 3000, turn).check();
    for (const Rank& rank : all) {
      CHECK_FALSE(rank.channel->is_direct());
      CHECK(rank.gpu->device_bytes() == 0);
      CHECK(sent_from_device(cluster, rank.group->rank()) == 0);
    }
  }
}

TEST_CASE("staging/direct: messages to another node go from device memory and within one they do not",
          "[staging][fast]") {
  for (const int queues : {1, 8}) {
    ClusterThread cluster(with_view({0, 0, 1}, 33));
    auto all = ranks_of(cluster, 33, queues);
    ChannelOptions coming = direct();
    coming.one_stream = true;
    const auto in = all[0].open(coming);
    for (const std::size_t from : {1, 2}) {
      Values sent;
      for (std::size_t i = 0; i < 30000; ++i) sent.push_back(value(static_cast<int>(from), i, 5));
      for (const std::size_t count : {0, 3, 30000}) {
        Values out(sent.begin(), sent.begin() + static_cast<std::ptrdiff_t>(count));
        Values got(count, -1);
        const auto receive = all[0].enqueue(message(false, static_cast<int>(from), got), in.get());
        const auto send = all[from].enqueue(message(true, 0, out));
        REQUIRE(eventually([&] { return receive->is_over() && send->is_over(); }));
        CHECK((got == out));
      }
    }
    CHECK(sent_from_device(cluster, 1) == 0);
    CHECK(sent_from_device(cluster, 2) == 4 * 30003);
    CHECK(all[1].gpu->copied_bytes().to_host == 4 * 30003);
    CHECK(all[2].gpu->copied_bytes().to_host == 0);
  }
}

TEST_CASE("staging/direct: where the transport or the device cannot, everything is staged", "[staging][fast]") {
  for (const bool transport : {true, false}) {
    INFO("transport " << transport);
    ClusterThread cluster(transport ? nodes({0, 1}, 34) : with_view({0, 1}, 34));
    std::vector<Rank> all;
    for (auto& group : ClusterGroup::open(cluster)) {
      FakeOptions options = fake(34);
      options.device_bytes_max = transport ? ~std::uint64_t{0} : 4096;
      all.emplace_back(group, options, direct());
    }
    for (std::uint32_t turn = 0; turn < 5; ++turn) Begun(all, kDelivered[turn], 3000, turn).check();
    for (const Rank& rank : all) {
      CHECK_FALSE(rank.channel->is_direct());
      REQUIRE(eventually([&] { return rank.stager->active() == 0; }));
      rank.stager->stop(10s);
      CHECK(rank.gpu->device_bytes() == 0);
      CHECK(rank.gpu->copied_bytes().to_host > 0);
      CHECK(sent_from_device(cluster, rank.group->rank()) == 0);
    }
  }
}

TEST_CASE("staging/direct: device memory that cannot grow serves no more and what is under way ends well",
          "[staging][fast]") {
  ClusterThread cluster(with_view({0, 1}, 35));
  std::vector<Rank> all;
  for (auto& group : ClusterGroup::open(cluster)) {
    FakeOptions options = fake(35);
    options.device_bytes_max = std::uint64_t{1} << 20;
    all.emplace_back(group, options, direct());
  }
  std::vector<std::unique_ptr<Begun>> begun;
  begun.push_back(std::make_unique<Begun>(all, Kind::kAllGather, 1000, 0));
  begun.push_back(std::make_unique<Begun>(all, Kind::kAllGather, 300000, 1));  // wants twice as much
  begun.push_back(std::make_unique<Begun>(all, Kind::kAllGather, 1000, 2));
  for (const auto& b : begun) b->check();
  CHECK(sent_from_device(cluster, 0) == 4 * 1000);
  CHECK(sent_from_device(cluster, 1) == 4 * 1003);
}

TEST_CASE("staging/direct: a larger operation gets a larger ring", "[staging][fast]") {
  ClusterThread cluster(with_view({0, 1}, 36));
  auto all = ranks_of(cluster, 36);
  std::vector<std::unique_ptr<Begun>> begun;
  for (const std::size_t count : {1000, 200000, 1000, 600000, 600000})
    begun.push_back(std::make_unique<Begun>(all, Kind::kAllGather, count, static_cast<std::uint32_t>(begun.size())));
  for (const auto& b : begun) b->check();
  CHECK(sent_from_device(cluster, 0) == std::uint64_t{4} * 1402000);
  CHECK(all[0].gpu->copied_bytes().to_host == 0);
}

// What transports hold
// ---------------------------------------------------------------------------------------------------

/// A peer that is stopped takes nothing, so the sender's transport keeps what it was given; it may be given much.
ClusterOptions generous(std::uint64_t seed) {
  ClusterOptions options = with_view({0, 1}, seed);
  options.eager_bytes = options.window_bytes = 8 << 20;
  options.chunk_bytes = 64 << 10;
  options.pool_extra_bytes = 64 << 20;  // slots bound what is under way, too
  return options;
}

/// Each operation is one slice.
ChannelOptions whole() {
  ChannelOptions options = direct();
  options.limits.slice_bytes = 1 << 20;
  return options;
}

TEST_CASE("staging/direct: a place is used again when the transport has let go of it, and the operation is over before",
          "[staging][fast]") {
  for (const int queues : {1, 8}) {
    INFO("queues " << queues);
    ClusterThread cluster(generous(37));
    auto all = ranks_of(cluster, 37, queues, whole());
    cluster.run([](Cluster& c) { c.stop(1); });
    constexpr std::size_t kCount = 80000;  // of a ring of 1 MiB: three at a time
    std::vector<Part> sent;
    std::vector<Part> received;
    for (std::uint32_t turn = 0; turn < 12; turn += 2) {  // even ones: rank 0 is the root
      sent.push_back(make(Kind::kBroadcast, 0, 2, kCount, turn));
      *sent.back().output = sent.back().given_output;
      REQUIRE(all[0].enqueue(sent.back().operation));
    }
    REQUIRE(eventually([&] { return all[0].over->load() == 3; }));
    std::this_thread::sleep_for(30ms);
    CHECK(all[0].over->load() == 3);
    cluster.run([](Cluster& c) { c.go_on(1); });
    for (std::uint32_t turn = 0; turn < 12; turn += 2) {
      received.push_back(make(Kind::kBroadcast, 1, 2, kCount, turn));
      REQUIRE(all[1].enqueue(received.back().operation));
    }
    REQUIRE(eventually([&] { return all[0].over->load() == 6 && all[1].over->load() == 6; }));
    for (const Part& part : received) CHECK((*part.output == part.expected));
    CHECK(sent_from_device(cluster, 0) == 6 * 4 * kCount);
  }
}

TEST_CASE("staging/direct: messages that are held back keep their bytes", "[staging][fast]") {
  for (const std::uint64_t seed : {38, 39, 40}) {
    ClusterOptions options = generous(seed);
    options.wrap = [seed](std::unique_ptr<transport::Transport> inner, int rank) {
      test_support::Faults faults;
      faults.delay = 0.5;
      faults.delay_max = 300;
      return std::make_unique<test_support::FaultyTransport>(std::move(inner), faults,
                                                             seed * 10 + static_cast<std::uint64_t>(rank));
    };
    ClusterThread cluster(options);
    auto all = ranks_of(cluster, seed, 8, whole());
    std::vector<std::unique_ptr<Begun>> begun;
    for (std::uint32_t turn = 0; turn < 15; ++turn)
      begun.push_back(std::make_unique<Begun>(all, kDelivered[turn % 5], 60000, turn));
    for (const auto& b : begun) b->check();
    CHECK(sent_from_device(cluster, 0) > 0);
  }
}

TEST_CASE("staging/direct: memory is freed when the transport has let go of it", "[staging][fast]") {
  ClusterThread cluster(generous(41));
  auto all = ranks_of(cluster, 41);
  cluster.run([](Cluster& c) { c.stop(1); });
  Part part = make(Kind::kBroadcast, 0, 2, 50000, 0);
  *part.output = part.given_output;
  REQUIRE(all[0].enqueue(part.operation));
  REQUIRE(eventually([&] { return all[0].over->load() == 1; }));
  all[0].channel.reset();
  all[0].stager->stop(10s);
  CHECK(all[0].gpu->device_bytes() > 0);
  cluster.run([](Cluster& c) { c.go_on(1); });
  Part other = make(Kind::kBroadcast, 1, 2, 50000, 0);
  REQUIRE(all[1].enqueue(other.operation));
  REQUIRE(eventually([&] { return all[1].over->load() == 1; }));
  CHECK((*other.output == other.expected));
  CHECK(eventually([&] { return all[0].gpu->device_bytes() == 0 && all[0].gpu->pinned_bytes() == 0; }));
}

TEST_CASE("staging/direct: an operation that fails moves on at once and its memory waits for the transport",
          "[staging][fast]") {
  ClusterThread cluster(with_view({0, 1}, 42));  // most waits for a grant
  auto all = ranks_of(cluster, 42);
  cluster.run([](Cluster& c) { c.stop(1); });
  Values values(30000, 7);
  worker::Operation send = message(true, 1, values);
  send.timeout = 200ms;
  const auto staged = all[0].enqueue(send);
  REQUIRE(staged->wait_on(all[0].caller).is_ok());
  all[0].gpu->synchronize(all[0].caller);
  CHECK(staged->status().code() == core::Code::kTimeout);
  REQUIRE(eventually([&] { return all[0].over->load() == 1; }));
  all[0].channel.reset();
  all[0].stager->stop(10s);
  CHECK(all[0].gpu->device_bytes() > 0);
  cluster.run([](Cluster& c) { c.go_on(1); });
  CHECK(eventually([&] { return all[0].gpu->device_bytes() == 0; }));
}

TEST_CASE("staging/direct: a dead peer releases every stream and the memory", "[staging][fast]") {
  for (const std::uint64_t seed : {43, 44, 45}) {
    ClusterThread cluster(with_view({0, 1, 2}, seed));
    std::vector<std::shared_ptr<FakeDevice>> gpus;
    {
      auto all = ranks_of(cluster, seed, seed % 2 == 0 ? 1 : 8);
      outlive_rank_2(cluster, all, kDelivered);
      CHECK(all[0].channel->is_direct());
      for (const Rank& rank : all) gpus.push_back(rank.gpu);
    }
    for (const auto& gpu : gpus)
      CHECK(eventually([&] { return gpu->device_bytes() == 0 && gpu->pinned_bytes() == 0; }));
  }
}

TEST_CASE("staging/direct: stop lets streams go that wait for a transport", "[staging][fast]") {
  ClusterThread cluster(generous(46));
  auto all = ranks_of(cluster, 46, 8, whole());
  cluster.run([](Cluster& c) { c.stop(1); });
  std::vector<Part> parts;
  std::shared_ptr<Staged> last;
  for (std::uint32_t turn = 0; turn < 12; turn += 2) {
    parts.push_back(make(Kind::kBroadcast, 0, 2, 80000, turn));
    last = all[0].enqueue(parts.back().operation);
    REQUIRE(last);
  }
  REQUIRE(eventually([&] { return all[0].over->load() == 3; }));
  all[0].stager->stop(50ms);
  REQUIRE(last->wait(core::Clock::now() + kLong));
  CHECK(last->status().code() == core::Code::kAborted);
  REQUIRE(last->wait_on(all[0].caller).is_ok());
  all[0].gpu->synchronize(all[0].caller);
  cluster.run([](Cluster& c) { c.go_on(1); });
}

// Which, on paper
// --------------------------------------------------------------------------------------------------------

TEST_CASE("staging/direct: who may send from device memory follows from the topology", "[staging][fast]") {
  const auto can = [](Kind kind, int rank, int other, bool rails, const std::vector<int>& layout = {0, 0, 1}) {
    worker::Operation o;
    o.kind = kind;
    o.root = o.peer = other;
    o.sending = true;
    o.input_bytes = o.output_bytes = std::vector<std::uint64_t>(layout.size(), 8);
    return staging::can_go_direct(o, Topology(layout, rank), rails);
  };
  CHECK(can(Kind::kBroadcast, 2, 2, false));
  CHECK_FALSE(can(Kind::kBroadcast, 1, 2, false));
  CHECK_FALSE(can(Kind::kBroadcast, 0, 0, false));
  CHECK(can(Kind::kBroadcast, 0, 0, true));
  CHECK(can(Kind::kBroadcast, 1, 0, true));  // has a part of the root's, by then
  CHECK_FALSE(can(Kind::kBroadcast, 2, 0, true));
  CHECK(can(Kind::kGather, 0, 2, false));
  CHECK_FALSE(can(Kind::kGather, 0, 1, false));
  CHECK_FALSE(can(Kind::kGather, 2, 2, false));
  CHECK(can(Kind::kScatter, 2, 2, false));
  CHECK_FALSE(can(Kind::kScatter, 0, 0, false));
  CHECK(can(Kind::kScatter, 0, 0, true));
  CHECK_FALSE(can(Kind::kScatter, 0, 2, true));
  CHECK(can(Kind::kAllToAll, 2, 0, false));
  CHECK_FALSE(can(Kind::kAllToAll, 0, 0, false));
  CHECK(can(Kind::kPointToPoint, 0, 2, false));
  CHECK_FALSE(can(Kind::kPointToPoint, 0, 1, false));
  for (const Kind kind : kKinds) CHECK_FALSE(can(kind, 0, 0, true, {0, 0}));
  for (const Kind kind : {Kind::kAllReduce, Kind::kReduce, Kind::kReduceScatter, Kind::kBarrier})
    CHECK_FALSE(can(kind, 2, 2, false));
}

}  // namespace
