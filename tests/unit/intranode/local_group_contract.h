// tests/unit/intranode/local_group_contract.h: what every LocalGroup promises.
//
// Before including it, define HYBRIDPS_LOCAL_BACKENDS: types with
//   static std::vector<std::shared_ptr<device::Device>> devices(int size);   empty: not on this machine; why() says so
//   static std::string why();
//   static std::shared_ptr<intranode::LocalGroups> library();                of one rank
// Device memory is what allocate_host() gives: a GPU reaches it at the same addresses.
#include <array>
#include <chrono>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/intranode/local_group.h"
#include "tests/support/catch.h"

namespace local_group_contract {

using namespace hybridps;
using namespace std::chrono_literals;
using intranode::Leg;
using intranode::LocalGroup;
using intranode::Part;
using intranode::Patience;
using intranode::Reduction;
using intranode::Transfer;

using Values = std::vector<float>;

inline Patience patience(std::chrono::milliseconds limit = 60s) {
  return {core::Deadline::after(limit, core::Clock::now()), {}};
}

template <typename Backend>
struct Bench {
  struct Rank {
    std::shared_ptr<device::Device> device;
    std::shared_ptr<LocalGroup> group;
    std::array<device::DeviceStream, intranode::kLegs> streams;
    device::DeviceEvent event;
    device::HostMemory memory;
    core::Status status;

    float* at(std::size_t element) { return reinterpret_cast<float*>(memory.data) + element; }
    std::byte* bytes_at(std::size_t element) { return reinterpret_cast<std::byte*>(at(element)); }
  };

  explicit Bench(int size, bool connect = true) {
    const auto devices = Backend::devices(size);
    if (devices.empty()) {
      WARN("skipped: " << Backend::why());
      return;
    }
    ranks.resize(static_cast<std::size_t>(size));
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      ranks[r].device = devices[r];
      for (auto& stream : ranks[r].streams) stream = devices[r]->make_stream().value();
      ranks[r].event = devices[r]->make_event().value();
      ranks[r].memory = devices[r]->allocate_host(1 << 16).value();
    }
    if (!connect) return;
    const auto library = Backend::library();
    const std::vector<std::string> ids = {library->make_id().value(), library->make_id().value()};
    each([&](int r, Rank& rank) -> core::Status {
      auto group = Backend::library()->connect(rank.device, r, size, ids, patience());
      if (group.is_ok()) rank.group = group.value();
      return group.status();
    });
    for (const Rank& rank : ranks) REQUIRE(rank.status.to_string() == "ok");
  }
  ~Bench() {
    for (Rank& rank : ranks) {
      if (rank.group) wait_for(rank);
      rank.group.reset();
      rank.device->destroy(rank.event);
      for (const auto stream : rank.streams) rank.device->destroy(stream);
      rank.device->free_host(rank.memory);
    }
  }
  bool is_here() const { return !ranks.empty(); }

  /// On a thread each, as in processes of their own.
  template <typename Call>
  void each(const Call& call) {
    std::vector<std::thread> threads;
    for (std::size_t r = 0; r < ranks.size(); ++r)
      threads.emplace_back([&, r] { ranks[r].status = call(static_cast<int>(r), ranks[r]); });
    for (std::thread& thread : threads) thread.join();
  }
  bool wait_for(Rank& rank) {
    const auto until = std::chrono::steady_clock::now() + 60s;
    for (const auto stream : rank.streams) {
      if (!rank.device->record(rank.event, stream).is_ok()) return false;
      while (!rank.device->is_done(rank.event).value()) {
        if (std::chrono::steady_clock::now() > until) return false;
        std::this_thread::sleep_for(100us);
      }
    }
    return true;
  }
  void finish() {
    for (Rank& rank : ranks) {
      REQUIRE(rank.status.to_string() == "ok");
      REQUIRE(wait_for(rank));
      REQUIRE(rank.group->poll().to_string() == "ok");
    }
  }
  Values read(std::size_t rank, std::size_t from, std::size_t count) {
    return {ranks[rank].at(from), ranks[rank].at(from) + count};
  }

  std::vector<Rank> ranks;
};

inline float value(int rank, std::size_t i) { return static_cast<float>(static_cast<int>(i) % 97 + 100 * rank); }

inline float sum_of(int size, std::size_t i) {
  float sum = 0;
  for (int r = 0; r < size; ++r) sum += value(r, i);
  return sum;
}

constexpr std::size_t kOut = 4096;  // where results are put, in elements

/// Parts of these lengths, one after the other; their ranks in turn.
struct Layout {
  std::vector<std::size_t> lengths;
  std::size_t total() const {
    std::size_t all = 0;
    for (const std::size_t length : lengths) all += length;
    return all;
  }
};

inline std::vector<Layout> layouts(int size) {
  const auto n = static_cast<std::size_t>(size);
  Layout even{std::vector<std::size_t>(n, 60)};
  Layout twice{std::vector<std::size_t>(2 * n, 12)};
  Layout surplus = even;
  surplus.lengths.push_back(7);
  Layout ragged;
  for (std::size_t i = 0; i < n + 2; ++i) ragged.lengths.push_back(5 * i);  // the first is empty
  return {even, twice, surplus, ragged};
}

}  // namespace local_group_contract

TEMPLATE_TEST_CASE("intranode/local_group: each part's sum comes to its rank and back to all", "[intranode][fast]",
                   HYBRIDPS_LOCAL_BACKENDS) {
  using namespace local_group_contract;
  for (const int size : {2, 3}) {
    for (const Layout& layout : layouts(size)) {
      for (const bool in_place : {true, false}) {
        Bench<TestType> bench(size);
        if (!bench.is_here()) return;
        const std::size_t all = layout.total();
        bench.each([&](int r, auto& rank) -> core::Status {
          std::vector<Part> sums;
          std::vector<Part> spreads;
          std::size_t at = 0;
          for (std::size_t i = 0; i < layout.lengths.size(); ++i) {
            const int holder = static_cast<int>(i) % size;
            const std::size_t length = layout.lengths[i];
            for (std::size_t k = 0; k < length; ++k) *rank.at(at + k) = value(r, at + k);
            std::byte* const here = rank.bytes_at(at);
            std::byte* const there = in_place ? here : rank.bytes_at(kOut + at);
            sums.push_back({holder, length * sizeof(float), here, holder == r ? there : nullptr, i > 0});
            spreads.push_back({holder, length * sizeof(float), holder == r ? there : nullptr, there, i > 0});
            at += length;
          }
          const Reduction sum{core::DType::kFloat32, core::ReduceOp::kSum, 1.0};
          // The second on another stream, after the first.
          if (core::Status s = rank.group->reduce(Leg::kIn, rank.streams[0], sums, sum, patience()); !s.is_ok())
            return s;
          if (core::Status s = rank.device->record(rank.event, rank.streams[0]); !s.is_ok()) return s;
          if (core::Status s = rank.device->wait(rank.streams[1], rank.event); !s.is_ok()) return s;
          return rank.group->spread(Leg::kOut, rank.streams[1], spreads, patience());
        });
        bench.finish();
        for (std::size_t r = 0; r < bench.ranks.size(); ++r) {
          const Values got = bench.read(r, in_place ? 0 : kOut, all);
          for (std::size_t i = 0; i < all; ++i) REQUIRE(got[i] == sum_of(size, i));
        }
      }
    }
  }
}

TEMPLATE_TEST_CASE("intranode/local_group: sums to all", "[intranode][fast]", HYBRIDPS_LOCAL_BACKENDS) {
  using namespace local_group_contract;
  constexpr std::size_t kCount = 500;
  for (const int size : {2, 3}) {
    Bench<TestType> bench(size);
    if (!bench.is_here()) return;
    bench.each([&](int r, auto& rank) -> core::Status {
      for (std::size_t i = 0; i < kCount; ++i) *rank.at(i) = value(r, i);
      // Rank r multiplies by r + 1; two parts, then an average in place.
      const Part halves[] = {{0, 200 * sizeof(float), rank.bytes_at(0), rank.bytes_at(kOut), false},
                             {0, 300 * sizeof(float), rank.bytes_at(200), rank.bytes_at(kOut + 200), true}};
      const Reduction scaled{core::DType::kFloat32, core::ReduceOp::kPremulSum, static_cast<double>(r + 1)};
      if (core::Status s = rank.group->all_reduce(Leg::kOut, rank.streams[1], halves, scaled, patience()); !s.is_ok())
        return s;
      const Part whole[] = {{0, kCount * sizeof(float), rank.bytes_at(kOut), rank.bytes_at(kOut), false}};
      const Reduction average{core::DType::kFloat32, core::ReduceOp::kAvg, 1.0};
      if (core::Status s = rank.group->all_reduce(Leg::kOut, rank.streams[1], whole, average, patience()); !s.is_ok())
        return s;
      return {};
    });
    bench.finish();
    for (std::size_t r = 0; r < bench.ranks.size(); ++r) {
      const Values got = bench.read(r, kOut, kCount);
      for (std::size_t i = 0; i < kCount; ++i) {
        float expected = 0;
        for (int p = 0; p < size; ++p) expected += static_cast<float>(p + 1) * value(p, i);
        REQUIRE(got[i] == Approx(expected));
      }
    }
  }
}

TEMPLATE_TEST_CASE("intranode/local_group: each rank has something for some others, or nothing", "[intranode][fast]",
                   HYBRIDPS_LOCAL_BACKENDS) {
  using namespace local_group_contract;
  // From rank a to rank b: elements; rank 2 has nothing for anybody, rank 0 two messages for rank 1.
  const auto length = [](int a, int b) { return a == 2 ? std::size_t{0} : std::size_t{50} * (1 + a + 2 * b); };
  for (const int size : {2, 3}) {
    Bench<TestType> bench(size);
    if (!bench.is_here()) return;
    bench.each([&](int r, auto& rank) -> core::Status {
      for (std::size_t i = 0; i < kOut; ++i) *rank.at(i) = value(r, i);
      for (int round = 0; round < 2; ++round) {
        std::vector<Transfer> messages;
        const auto add = [&](int peer, std::size_t count, std::size_t at, bool sends) {
          if (count == 0) return;
          std::byte* const data = rank.bytes_at(at);
          messages.push_back({peer, count * sizeof(float), sends ? data : nullptr, sends ? nullptr : data});
        };
        for (int peer = 0; peer < size; ++peer) {
          if (peer == r) continue;
          const auto out = static_cast<std::size_t>(1000 * peer);
          const auto in = kOut + static_cast<std::size_t>(1000 * peer);
          add(peer, length(r, peer), out, true);
          if (r == 0 && peer == 1) add(peer, 7, out + 600, true);
          add(peer, length(peer, r), in, false);
          if (r == 1 && peer == 0) add(peer, 7, in + 600, false);
        }
        if (core::Status s = rank.group->exchange(Leg::kOut, rank.streams[1], messages, patience()); !s.is_ok())
          return s;
      }
      return {};
    });
    bench.finish();
    for (int r = 0; r < size; ++r) {
      for (int peer = 0; peer < size; ++peer) {
        if (peer == r) continue;
        const auto from = static_cast<std::size_t>(1000 * r);
        const auto to = kOut + static_cast<std::size_t>(1000 * peer);
        const Values got = bench.read(static_cast<std::size_t>(r), to, length(peer, r));
        for (std::size_t i = 0; i < got.size(); ++i) REQUIRE(got[i] == value(peer, from + i));
        if (r != 1 || peer != 0) continue;
        const Values second = bench.read(1, to + 600, 7);
        for (std::size_t i = 0; i < second.size(); ++i) REQUIRE(second[i] == value(0, from + 600 + i));
      }
    }
  }
}

TEMPLATE_TEST_CASE("intranode/local_group: abort ends what waits for a rank that does not come", "[intranode][fast]",
                   HYBRIDPS_LOCAL_BACKENDS) {
  using namespace local_group_contract;
  Bench<TestType> bench(2);
  if (!bench.is_here()) return;
  const Reduction sum{core::DType::kFloat32, core::ReduceOp::kSum, 1.0};
  const auto call = [&](auto& rank) -> core::Status {
    const Part part[] = {{0, 400, rank.bytes_at(0), rank.bytes_at(0), false}};
    return rank.group->all_reduce(Leg::kOut, rank.streams[1], part, sum, patience());
  };
  bench.each([&](int, auto& rank) { return call(rank); });  // connections are there
  bench.finish();
  CHECK(call(bench.ranks[0]).to_string() == "ok");
  std::this_thread::sleep_for(20ms);
  REQUIRE(bench.ranks[0].device->record(bench.ranks[0].event, bench.ranks[0].streams[1]).is_ok());
  CHECK_FALSE(bench.ranks[0].device->is_done(bench.ranks[0].event).value());
  for (auto& rank : bench.ranks) {
    rank.group->abort();
    rank.group->abort();
  }
  for (auto& rank : bench.ranks) {
    CHECK(bench.wait_for(rank));
    CHECK(rank.group->poll().code() == core::Code::kAborted);
    CHECK(call(rank).code() == core::Code::kAborted);
  }
}

TEMPLATE_TEST_CASE("intranode/local_group: work that begins after an abort ends, and its memory is there until then",
                   "[intranode][fast]", HYBRIDPS_LOCAL_BACKENDS) {
  using namespace local_group_contract;
  Bench<TestType> bench(2);
  if (!bench.is_here()) return;
  const Reduction sum{core::DType::kFloat32, core::ReduceOp::kSum, 1.0};
  const auto call = [&](auto& rank, Leg leg) -> core::Status {
    std::byte* const at = rank.bytes_at(leg == Leg::kIn ? 0 : 1000);
    const Part part[] = {{0, 400, at, at, false}};
    return rank.group->all_reduce(leg, rank.streams[static_cast<std::size_t>(leg)], part, sum, patience());
  };
  for (const Leg leg : {Leg::kIn, Leg::kOut}) bench.each([&](int, auto& rank) { return call(rank, leg); });
  bench.finish();
  auto& rank = bench.ranks[0];
  const device::Flag flag = rank.memory.flag_at(4 * kOut);
  REQUIRE(rank.device->wait_flag(rank.streams[0], flag, 1).is_ok());
  REQUIRE(call(rank, Leg::kIn).is_ok());
  REQUIRE(call(rank, Leg::kIn).is_ok());
  REQUIRE(rank.device->record(rank.event, rank.streams[0]).is_ok());
  REQUIRE(rank.device->wait(rank.streams[1], rank.event).is_ok());
  REQUIRE(call(rank, Leg::kOut).is_ok());
  CHECK_FALSE(rank.group->is_stopped());
  rank.group->abort();
  const auto until = std::chrono::steady_clock::now() + 60s;
  while (!rank.group->is_stopped() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(100us);
  CHECK(rank.group->is_stopped());
  CHECK_FALSE(rank.device->is_done(rank.event).value());
  flag.word->store(1, std::memory_order_release);
  CHECK(bench.wait_for(rank));
  for (auto& other : bench.ranks) other.group->abort();
}

TEMPLATE_TEST_CASE("intranode/local_group: a rank that is alone gives up in time, or when it is no longer wanted",
                   "[intranode][fast]", HYBRIDPS_LOCAL_BACKENDS) {
  using namespace local_group_contract;
  Bench<TestType> bench(2, /*connect=*/false);
  if (!bench.is_here()) return;
  const auto library = TestType::library();
  const std::vector<std::string> ids = {library->make_id().value()};
  CHECK(library->connect(bench.ranks[0].device, 0, 2, ids, patience(50ms)).status().code() == core::Code::kTimeout);
  Patience unwanted;
  unwanted.still_wanted = [] { return core::Status(core::Code::kPeerDead, "rank 1 is gone"); };
  const std::vector<std::string> others = {library->make_id().value()};
  CHECK(library->connect(bench.ranks[0].device, 0, 2, others, unwanted).status().message() == "rank 1 is gone");
}
