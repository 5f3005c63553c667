#include "hybridps/intranode/fake/fake_local_group.h"

#include <array>

#include "hybridps/device/fake/fake_device.h"

namespace {
struct Fake {
  static std::vector<std::shared_ptr<hybridps::device::Device>> devices(int size) {
    std::vector<std::shared_ptr<hybridps::device::Device>> made;
    for (int r = 0; r < size; ++r) {
      hybridps::device::FakeOptions options;
      options.seed = static_cast<std::uint64_t>(r + 1);
      made.push_back(std::make_shared<hybridps::device::FakeDevice>(options));
    }
    return made;
  }
  static std::string why() { return {}; }
  static std::shared_ptr<hybridps::intranode::LocalGroups> library() {
    static const auto hub = hybridps::intranode::FakeLocalGroups::make_hub();
    return std::make_shared<hybridps::intranode::FakeLocalGroups>(hub);
  }
};
}  // namespace

#define HYBRIDPS_LOCAL_BACKENDS Fake
#include "tests/unit/intranode/local_group_contract.h"

TEST_CASE("intranode/fake: calls that differ between ranks are found and end by abort alone", "[intranode][fast]") {
  using namespace local_group_contract;
  const auto hub = intranode::FakeLocalGroups::make_hub();
  const auto devices = Fake::devices(2);
  intranode::FakeLocalGroups library(hub);
  const std::vector<std::string> ids = {library.make_id().value()};
  std::vector<std::shared_ptr<LocalGroup>> groups(2);
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      intranode::FakeLocalGroups mine(hub);
      groups[static_cast<std::size_t>(r)] =
          mine.connect(devices[static_cast<std::size_t>(r)], r, 2, ids, patience()).value();
    });
  for (std::thread& thread : threads) thread.join();
  std::vector<std::byte> memory(800);
  const std::array<device::DeviceStream, 2> streams = {devices[0]->make_stream().value(),
                                                       devices[1]->make_stream().value()};
  for (std::size_t r = 0; r < 2; ++r) {
    const auto stream = streams[r];
    const Part part[] = {{0, r == 0 ? 400U : 396U, memory.data() + 400 * r, memory.data() + 400 * r, false}};
    REQUIRE(groups[r]->spread(Leg::kOut, stream, part, patience()).is_ok());
    if (r == 0) continue;
    const auto until = std::chrono::steady_clock::now() + 30s;
    while (intranode::FakeLocalGroups::mismatches(*hub) == 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(1ms);
    CHECK(intranode::FakeLocalGroups::mismatches(*hub) == 1);
    CHECK(groups[r]->poll().is_ok());
    for (const auto& group : groups) group->abort();
    std::static_pointer_cast<device::FakeDevice>(devices[r])->synchronize(stream);
  }
  for (std::size_t r = 0; r < 2; ++r) devices[r]->destroy(streams[r]);
}

TEST_CASE("intranode/fake: messages that do not meet are found", "[intranode][fast]") {
  using namespace local_group_contract;
  std::vector<std::byte> memory(800);
  std::byte* const mine = memory.data();
  std::byte* const other = memory.data() + 400;
  const std::vector<Transfer> sent = {{1, 100, mine, nullptr}, {1, 50, mine + 100, nullptr}};
  const std::vector<Transfer> wrong[] = {
      {{0, 50, nullptr, other}, {0, 100, nullptr, other + 100}},  // another order
      {{0, 100, nullptr, other}},                                 // one only
      {},
      {{0, 100, nullptr, other}, {0, 50, nullptr, other + 100}, {0, 4, other, nullptr}}};
  for (const auto& messages : wrong) {
    const auto hub = intranode::FakeLocalGroups::make_hub();
    const auto devices = Fake::devices(2);
    intranode::FakeLocalGroups library(hub);
    const std::vector<std::string> ids = {library.make_id().value()};
    std::vector<std::shared_ptr<LocalGroup>> groups(2);
    std::vector<std::thread> threads;
    for (int r = 0; r < 2; ++r)
      threads.emplace_back([&, r] {
        intranode::FakeLocalGroups one(hub);
        groups[static_cast<std::size_t>(r)] =
            one.connect(devices[static_cast<std::size_t>(r)], r, 2, ids, patience()).value();
      });
    for (std::thread& thread : threads) thread.join();
    std::vector<device::DeviceStream> streams;
    for (std::size_t r = 0; r < 2; ++r) {
      streams.push_back(devices[r]->make_stream().value());
      REQUIRE(groups[r]->exchange(Leg::kOut, streams[r], r == 0 ? sent : messages, patience()).is_ok());
    }
    const auto until = std::chrono::steady_clock::now() + 30s;
    while (intranode::FakeLocalGroups::mismatches(*hub) == 0 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(1ms);
    CHECK(intranode::FakeLocalGroups::mismatches(*hub) == 1);
    for (const auto& group : groups) group->abort();
    for (std::size_t r = 0; r < 2; ++r) {
      std::static_pointer_cast<device::FakeDevice>(devices[r])->synchronize(streams[r]);
      devices[r]->destroy(streams[r]);
    }
  }
}
