// NcclGroups on a library that does the work, and takes notes of what NCCL would not put up with.
#include "hybridps/intranode/nccl/nccl_group.h"

#include <algorithm>

#include "tests/support/checked_nccl.h"

namespace {
std::unique_ptr<hybridps::test::CheckedNccl> checked;
std::unique_ptr<hybridps::intranode::NcclApi> checked_api;

template <bool kRevokes>
struct OnCheckedNccl {
  static std::vector<std::shared_ptr<hybridps::device::Device>> devices(int size) {
    end();
    checked = std::make_unique<hybridps::test::CheckedNccl>();
    checked_api = std::make_unique<hybridps::intranode::NcclApi>(checked->api(kRevokes));
    std::vector<std::shared_ptr<hybridps::device::Device>> made;
    for (int r = 0; r < size; ++r) {
      hybridps::device::FakeOptions options;
      options.seed = static_cast<std::uint64_t>(r) + 11;
      made.push_back(std::make_shared<hybridps::device::FakeDevice>(options));
    }
    return made;
  }
  static std::string why() { return {}; }
  static std::shared_ptr<hybridps::intranode::LocalGroups> library() {
    return std::make_shared<hybridps::intranode::NcclGroups>(*checked_api);
  }
  /// What was not kept since the last time.
  static std::vector<std::string> end() {
    using namespace std::chrono_literals;
    if (!checked) return {};
    if (!hybridps::intranode::NcclGroups::drain(20s)) return {"NcclGroups does not come to its end"};
    auto violations = checked->violations();
    if (checked->alive() != 0) violations.push_back(std::to_string(checked->alive()) + " communicators are left");
    checked.reset();
    return violations;
  }
};
using RevokingNccl = OnCheckedNccl<true>;
using AbortingNccl = OnCheckedNccl<false>;
}  // namespace

#define HYBRIDPS_LOCAL_BACKENDS RevokingNccl, AbortingNccl
#include "tests/unit/intranode/local_group_contract.h"

// After each of the contract's cases: what NCCL demands was kept.
namespace {

using namespace hybridps;
using namespace local_group_contract;
using intranode::NcclGroups;

const Reduction kSum{core::DType::kFloat32, core::ReduceOp::kSum, 1.0};

template <typename Backend>
core::Status one_sum(Bench<Backend>& bench, std::chrono::milliseconds within = 2s) {
  bench.each([within](int, auto& rank) -> core::Status {
    const Part parts[] = {{0, 400, rank.bytes_at(0), rank.bytes_at(kOut), false}};
    return rank.group->all_reduce(Leg::kOut, rank.streams[1], parts, kSum, patience(within));
  });
  for (const auto& rank : bench.ranks)
    if (!rank.status.is_ok()) return rank.status;
  return {};
}

/// As staging does it after connect().
core::Status use_first(LocalGroup& group, device::Device& device, std::vector<Leg> legs) {
  const auto stream = device.make_stream().value();
  const auto event = device.make_event().value();
  std::byte* const memory = device.allocate_device(group.first_use_bytes()).value();
  core::Status status;
  for (const Leg leg : legs)
    if (status.is_ok()) status = group.first_use(leg, stream, memory, patience());
  if (!status.is_ok() || !device.record(event, stream).is_ok()) return status;
  while (!device.is_done(event).value()) std::this_thread::sleep_for(100us);
  device.free_device(memory);
  device.destroy(event);
  device.destroy(stream);
  return status;
}

template <typename Backend>
void abort_all(Bench<Backend>& bench) {
  for (auto& rank : bench.ranks) rank.group->abort();
  for (auto& rank : bench.ranks) {
    const auto until = std::chrono::steady_clock::now() + 20s;
    while (!rank.group->is_stopped() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(1ms);
    CHECK(rank.group->is_stopped());
    CHECK(bench.wait_for(rank));
  }
}

}  // namespace

TEST_CASE("intranode/nccl: the contract's cases ask of NCCL what it allows", "[intranode][fast]") {
  CHECK(RevokingNccl::end() == std::vector<std::string>{});  // of the last of them
}

TEMPLATE_TEST_CASE("intranode/nccl: many calls of every kind keep to what NCCL demands", "[intranode][fast]",
                   RevokingNccl, AbortingNccl) {
  {
    Bench<TestType> bench(3);
    for (int turn = 0; turn < 12; ++turn) {
      bench.each([turn](int r, auto& rank) -> core::Status {
        for (std::size_t i = 0; i < 300; ++i) *rank.at(i) = value(r, i);
        const Part sums[] = {{0, 400, rank.bytes_at(0), rank.bytes_at(kOut), false},
                             {1, 400, rank.bytes_at(100), rank.bytes_at(kOut), true},
                             {2, 400, rank.bytes_at(200), rank.bytes_at(kOut), true}};
        const Reduction premul{core::DType::kFloat32, core::ReduceOp::kPremulSum, 0.5};
        if (auto status =
                rank.group->reduce(Leg::kIn, rank.streams[0], sums, turn % 2 == 0 ? kSum : premul, patience());
            !status.is_ok())
          return status;
        const std::vector<Transfer> messages = {{(r + 1) % 3, 40, rank.bytes_at(0), nullptr},
                                                {(r + 2) % 3, 40, nullptr, rank.bytes_at(2 * kOut)}};
        return rank.group->exchange(Leg::kOut, rank.streams[1], messages, patience());
      });
      bench.finish();
      for (std::size_t r = 0; r < 3; ++r)
        CHECK(*bench.ranks[r].at(kOut) == sum_of(3, 100 * r) * (turn % 2 == 0 ? 1.0F : 0.5F));
    }
  }
  CHECK(TestType::end() == std::vector<std::string>{});
}

TEMPLATE_TEST_CASE("intranode/nccl: whichever call fails or hangs, nothing is asked of NCCL that it forbids",
                   "[intranode][fast]", RevokingNccl, AbortingNccl) {
  // Connecting two ranks is four calls, an all-reduce of both four more.
  for (int at = 5; at <= 12; ++at)
    for (const bool hangs : {false, true}) {
      INFO("call " << at << (hangs ? " hangs" : " fails"));
      {
        Bench<TestType> bench(2);
        hangs ? checked->hang_at(at) : checked->fail_at(at);
        core::Status status;
        for (int turn = 0; turn < 2 && status.is_ok(); ++turn) status = one_sum(bench, 200ms);
        abort_all(bench);
      }
      CHECK(TestType::end() == std::vector<std::string>{});
    }
}

TEST_CASE("intranode/nccl: a lost rank and an error of its own are told, and the rest is freed", "[intranode][fast]") {
  {
    Bench<RevokingNccl> bench(3);
    REQUIRE(one_sum(bench).is_ok());
    bench.finish();
    checked->lose(2);
    REQUIRE(one_sum(bench).is_ok());  // it is on the streams, and does not end
    checked->fail_later(ncclRemoteError);
    CHECK_FALSE(bench.ranks[0].group->poll().is_ok());
    abort_all(bench);
  }
  CHECK(RevokingNccl::end() == std::vector<std::string>{});
}

TEST_CASE("intranode/nccl: kernels of a dozen groups that reach the GPUs in other orders have room beside each other",
          "[intranode][fast]") {
  constexpr std::size_t kGroups = 12;  // Megatron's
  constexpr std::size_t kFlagsAt = 40 << 10;
  {
    // Bench makes the devices and has one group; streams of one queue would hold each other up.
    device::FakeOptions options;
    options.hardware_queues = 32;
    Bench<RevokingNccl> bench(2, false);
    for (auto& rank : bench.ranks) {
      for (const auto stream : rank.streams) rank.device->destroy(stream);
      rank.device->destroy(rank.event);
      rank.device->free_host(rank.memory);
      rank.device = std::make_shared<device::FakeDevice>(options);
      for (auto& stream : rank.streams) stream = rank.device->make_stream().value();
      rank.event = rank.device->make_event().value();
      rank.memory = rank.device->allocate_host(1 << 16).value();
    }
    struct Lane {
      std::shared_ptr<LocalGroup> group;
      device::DeviceStream stream;
      device::DeviceEvent end;
      std::vector<std::string> ids;
    };
    std::array<std::array<Lane, kGroups>, 2> lanes;
    const auto library = RevokingNccl::library();
    for (std::size_t g = 0; g < kGroups; ++g)
      lanes[0][g].ids = lanes[1][g].ids = {library->make_id().value(), library->make_id().value()};
    const auto flag = [&](std::size_t r, std::size_t g) { return bench.ranks[r].memory.flag_at(kFlagsAt + 128 * g); };
    bench.each([&](int r, auto& rank) -> core::Status {
      const auto me = static_cast<std::size_t>(r);
      for (std::size_t g = 0; g < kGroups; ++g) {
        Lane& lane = lanes[me][g];
        auto connected = RevokingNccl::library()->connect(rank.device, r, 2, lane.ids, patience());
        if (!connected.is_ok()) return connected.status();
        lane.group = connected.value();
        if (auto status = use_first(*lane.group, *rank.device, {Leg::kIn, Leg::kOut}); !status.is_ok()) return status;
        lane.stream = rank.device->make_stream().value();
        lane.end = rank.device->make_event().value();
      }
      for (std::size_t g = 0; g < kGroups; ++g) {
        Lane& lane = lanes[me][g];
        *rank.at(10 * g) = value(r, g);
        // All are connected, since connecting may wait for the device. As on the way back from the network: the kernel
        // begins when a flag says so.
        if (auto status = rank.device->wait_flag(lane.stream, flag(me, g), 1); !status.is_ok()) return status;
        const Part parts[] = {{0, 4, rank.bytes_at(10 * g), rank.bytes_at(kOut + 10 * g), false}};
        if (auto status = lane.group->all_reduce(Leg::kOut, lane.stream, parts, kSum, patience()); !status.is_ok())
          return status;
        if (auto status = rank.device->record(lane.end, lane.stream); !status.is_ok()) return status;
      }
      return {};
    });
    for (const auto& rank : bench.ranks) REQUIRE(rank.status.to_string() == "ok");
    for (std::size_t g = 0; g < kGroups; ++g) {
      if (g == kGroups / 2) std::this_thread::sleep_for(30ms);  // the first halves of both have begun
      flag(0, g).word->store(1);
      flag(1, kGroups - 1 - g).word->store(1);
    }
    std::size_t ended = 0;
    const auto until = std::chrono::steady_clock::now() + 10s;
    for (std::size_t r = 0; r < 2; ++r)
      for (std::size_t g = 0; g < kGroups; ++g) {
        while (!bench.ranks[r].device->is_done(lanes[r][g].end).value() && std::chrono::steady_clock::now() < until)
          std::this_thread::sleep_for(100us);
        ended += bench.ranks[r].device->is_done(lanes[r][g].end).value() ? 1 : 0;
      }
    CHECK(ended == 2 * kGroups);
    if (ended == 2 * kGroups)
      for (std::size_t g = 0; g < kGroups; ++g) CHECK(*bench.ranks[1].at(kOut + 10 * g) == sum_of(2, g));
    for (std::size_t r = 0; r < 2; ++r)
      for (Lane& lane : lanes[r]) {
        if (ended != 2 * kGroups) lane.group->abort();
        auto& device = static_cast<device::FakeDevice&>(*bench.ranks[r].device);
        device.synchronize(lane.stream);
        lane.group.reset();
        device.destroy(lane.end);
        device.destroy(lane.stream);
      }
  }
  CHECK(RevokingNccl::end() == std::vector<std::string>{});
}

TEST_CASE("intranode/nccl: after first_use() no call of any kind and size is a first one", "[intranode][fast]") {
  for (const bool used : {true, false}) {
    bool waited = false;
    {
      Bench<RevokingNccl> bench(2);
      if (used) {
        bench.each([](int, auto& rank) { return use_first(*rank.group, *rank.device, {Leg::kIn, Leg::kOut}); });
        bench.finish();
      }
      for (const std::uint64_t bytes : {std::uint64_t{400}, std::uint64_t{1} << 20, std::uint64_t{8} << 20}) {
        std::array<std::byte*, 2> memory{};
        for (std::size_t r = 0; r < 2; ++r) memory[r] = bench.ranks[r].device->allocate_device(2 * bytes).value();
        bench.each([&](int r, auto& rank) -> core::Status {
          // Behind a flag, as on the way back from the network.
          rank.memory.flag_at(0).word->store(0);
          if (auto status = rank.device->wait_flag(rank.streams[1], rank.memory.flag_at(0), 1); !status.is_ok())
            return status;
          std::byte* const at = memory[static_cast<std::size_t>(r)];
          const Part even[] = {{0, bytes, at, at, false}, {1, bytes, at + bytes, at + bytes, true}};
          const Transfer messages[] = {{1 - r, bytes, at, nullptr}, {1 - r, bytes, nullptr, at + bytes}};
          auto& group = *rank.group;
          const auto stream = rank.streams[1];
          if (auto status = group.all_reduce(Leg::kOut, stream, {even, 1}, kSum, patience()); !status.is_ok())
            return status;
          for (const std::size_t parts : {2, 1}) {  // one is uneven
            if (auto status = group.reduce(Leg::kOut, stream, {even, parts}, kSum, patience()); !status.is_ok())
              return status;
            if (auto status = group.spread(Leg::kOut, stream, {even, parts}, patience()); !status.is_ok())
              return status;
          }
          return group.exchange(Leg::kOut, stream, messages, patience());
        });
        for (auto& rank : bench.ranks) rank.memory.flag_at(0).word->store(1);
        bench.finish();
        for (std::size_t r = 0; r < 2; ++r) bench.ranks[r].device->free_device(memory[r]);
        if (!used) break;  // each first call waits for 2 s
      }
    }
    for (const std::string& text : RevokingNccl::end()) waited |= text == "a first use of NCCL behind work that waits";
    CHECK(waited != used);
  }
}

TEST_CASE("intranode/nccl: the checking library sees what is not kept", "[intranode][fast]") {
  Bench<RevokingNccl> bench(1);
  intranode::NcclApi& api = *checked_api;
  ncclComm_t comm = nullptr;
  ncclUniqueId id{};
  ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
  config.blocking = 0;
  REQUIRE(api.unique_id(&id) == ncclSuccess);
  auto& gpu = static_cast<device::FakeDevice&>(*bench.ranks[0].device);
  const auto settled = [&] {
    for (ncclResult_t state = ncclInProgress; state == ncclInProgress;) api.async_error(comm, &state);
  };
  const auto sum = [&](ncclComm_t by, device::DeviceStream stream) {
    api.group_start();
    api.all_reduce(bench.ranks[0].at(0), bench.ranks[0].at(kOut), 10, ncclFloat32, ncclSum, by,
                   static_cast<cudaStream_t>(stream.native));
    api.group_end();
  };
  REQUIRE(gpu.run_here([&] {
               ncclComm_t stuck = nullptr;
               checked->hang_at(checked->calls() + 1);
               api.comm_init(&stuck, 1, id, 0, &config);
               checked->hang_at(checked->calls() + 2);  // the end of the group
               sum(stuck, bench.ranks[0].streams[0]);   // the first call is in progress
               api.comm_abort(stuck);
               checked->hang_at(-1);
               return core::Status();
             })
              .is_ok());
  REQUIRE(api.unique_id(&id) == ncclSuccess);
  REQUIRE(gpu.run_here([&] {
               api.comm_init(&comm, 1, id, 0, &config);
               settled();
               sum(comm, bench.ranks[0].streams[0]);  // the first use, which a waiting stream would hold up
               settled();
               gpu.synchronize(bench.ranks[0].streams[0]);
               bench.ranks[0].memory.flag_at(0).word->store(0);
               const core::Status waits = gpu.wait_flag(bench.ranks[0].streams[0], bench.ranks[0].memory.flag_at(0), 1);
               if (!waits.is_ok()) return waits;
               sum(comm, bench.ranks[0].streams[0]);
               settled();
               sum(comm, bench.ranks[0].streams[1]);  // another stream, while the first one has work
               settled();
               bench.ranks[0].memory.flag_at(0).word->store(1);
               return core::Status();
             })
              .is_ok());
  sum(comm, bench.ranks[0].streams[1]);  // no device current
  settled();
  REQUIRE(bench.wait_for(bench.ranks[0]));
  REQUIRE(gpu.run_here([&] {
               api.comm_abort(comm);
               api.comm_finalize(comm);
               return core::Status();
             })
              .is_ok());
  const auto seen = [](const std::string& what) {
    const auto all = checked->violations();
    return std::any_of(all.begin(), all.end(), [&](const auto& text) { return text.find(what) != std::string::npos; });
  };
  CHECK(seen("ncclAllReduce while a call is in progress"));
  CHECK(seen("ncclAllReduce on a second stream"));
  CHECK(seen("ncclAllReduce without its device current"));
  CHECK(seen("ncclCommFinalize of a communicator that was aborted"));
}
