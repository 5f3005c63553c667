#include "hybridps/device/fake/fake_device.h"

namespace {
struct Fake {
  static std::unique_ptr<hybridps::device::Device> make() {
    return std::make_unique<hybridps::device::FakeDevice>(hybridps::device::FakeOptions{});
  }
  static std::string why() { return {}; }
};
}  // namespace

#define HYBRIDPS_DEVICE_BACKENDS Fake
#include "tests/support/check.h"
#include "tests/unit/device/device_contract.h"

namespace {

using namespace hybridps;
using device::FakeDevice;
using device::FakeOptions;

TEST_CASE("device/fake: streams of one hardware queue hold each other up and others do not", "[device][fast]") {
  for (const int queues : {1, 2}) {
    FakeOptions options;
    options.hardware_queues = queues;
    FakeDevice fake(options);
    const auto first = fake.make_stream().value();
    const auto second = fake.make_stream().value();
    const auto memory = fake.allocate_host(64).value();
    const auto end = fake.make_event().value();
    REQUIRE(fake.wait_flag(first, memory.flag_at(0), 1).is_ok());
    REQUIRE(fake.record(end, second).is_ok());
    if (queues == 2) fake.synchronize(second);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(fake.is_done(end).value() == (queues == 2));
    memory.flag_at(0).word->store(1);
    fake.synchronize(first);
    fake.synchronize(second);
    CHECK(fake.is_done(end).value());
    fake.destroy(end);
    fake.destroy(first);
    fake.destroy(second);
    fake.free_host(memory);
    CHECK(fake.streams() == 0);
    CHECK(fake.events() == 0);
    CHECK(fake.pinned_bytes() == 0);
  }
}

TEST_CASE("device/fake: it is destroyed although a stream waits for ever", "[device][fast]") {
  FakeDevice fake({});
  const auto memory = fake.allocate_host(64).value();
  const auto stream = fake.make_stream().value();
  REQUIRE(fake.wait_flag(stream, memory.flag_at(0), 1).is_ok());
  fake.destroy(stream);
}

TEST_CASE("device/fake: memory runs out and devices break where a test says so", "[device][fast]") {
  FakeOptions options;
  options.pinned_bytes_max = 1000;
  FakeDevice fake(options);
  const auto memory = fake.allocate_host(900);
  REQUIRE(memory.is_ok());
  CHECK(fake.allocate_host(900).status().code() == core::Code::kOutOfResources);
  const auto stream = fake.make_stream().value();
  // Copies with memory that is not pinned block, as CUDA's do.
  int from = 5;
  int to = 0;
  REQUIRE(fake.copy_to_host(stream, &to, &from, sizeof to).is_ok());
  CHECK(to == 5);
  fake.break_down("an illegal memory access was encountered");
  CHECK(fake.make_stream().status().message() == "an illegal memory access was encountered");
  CHECK_FALSE(fake.write_flag(stream, memory.value().flag_at(0), 1).is_ok());
  fake.destroy(stream);
  fake.free_host(memory.value());
}

TEST_CASE("device/fake: its own memory is not the host's and is counted", "[device][fast]") {
  FakeOptions options;
  options.device_bytes_max = 10000;
  FakeDevice fake(options);
  const auto stream = fake.make_stream().value();
  const auto host = fake.allocate_host(4096).value();
  std::memset(host.data, 3, 4096);
  std::byte* const own = fake.allocate_device(8192).value();
  REQUIRE(fake.copy_to_device(stream, own + 4096, host.data, 4096).is_ok());
  fake.synchronize(stream);
  const std::byte* const view = FakeDevice::host_view(own + 4096);
  CHECK(view != own + 4096);
  CHECK(view[4095] == std::byte{3});
  CHECK(FakeDevice::host_view(host.data) == host.data);
  CHECK(fake.device_bytes() == 8192);
  CHECK(fake.allocate_device(8192).status().code() == core::Code::kOutOfResources);
  fake.free_device(own);
  CHECK(fake.device_bytes() == 0);
  CHECK(FakeDevice::host_view(own) == own);
  fake.free_host(host);
  fake.destroy(stream);
}

TEST_CASE("device/fake: what allocates waits for the device and keeps every other call out", "[device][fast]") {
  FakeDevice fake({});
  const auto stream = fake.make_stream().value();
  const auto flags = fake.allocate_host(64).value();
  REQUIRE(fake.wait_flag(stream, flags.flag_at(0), 1).is_ok());
  std::atomic<int> done{0};
  std::thread allocates([&] {
    fake.free_host(fake.allocate_host(64).value());
    done += 1;
  });
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!fake.is_held_alone() && std::chrono::steady_clock::now() < limit) std::this_thread::yield();
  CHECK(fake.is_held_alone());
  std::thread asks([&] {
    static_cast<void>(fake.is_capturing(stream));
    done += 10;
  });
  std::this_thread::sleep_for(device_contract::kAWhile);
  CHECK(done.load() == 0);
  flags.flag_at(0).word->store(1);
  allocates.join();
  asks.join();
  fake.destroy(stream);
  fake.free_host(flags);
}

TEST_CASE("device/fake: a queue takes so many tasks and a launch that blocks returns after its kernel",
          "[device][fast]") {
  FakeOptions options;
  options.launches_max = 2;
  options.launch_blocking = true;
  FakeDevice fake(options);
  const auto stream = fake.make_stream().value();
  const auto flags = fake.allocate_host(64).value();
  std::atomic<int> put{0};
  std::thread puts([&] {
    for (int i = 0; i < 8; ++i)
      if (fake.wait_flag(stream, flags.flag_at(0), 1).is_ok()) ++put;
  });
  std::this_thread::sleep_for(device_contract::kAWhile);
  CHECK(put.load() <= 3);  // one of them runs
  flags.flag_at(0).word->store(1);
  puts.join();
  CHECK(put.load() == 8);
  bool ran = false;
  fake.launch(stream, [&] { ran = true; });
  CHECK(ran);
  fake.destroy(stream);
  fake.free_host(flags);
}

TEST_CASE("device/fake: a thread that sets flags for streams is not to call", "[device][fast]") {
  FakeDevice fake({});
  const auto event = fake.make_event().value();
  const std::uint64_t before = core::checks_failed();
  {
    const device::NoDriverCalls streams_wait_for_this_thread;
    CHECK(fake.run_here([] { return core::Status(); }).is_ok());
    CHECK(core::checks_failed() == before);
    CHECK(fake.is_done(event).value());
    fake.free_host({});
  }
  CHECK(core::checks_failed() == before + 2);
  test::checks_expected_to_fail += 2;
  fake.destroy(event);
}

}  // namespace
