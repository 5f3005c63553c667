// tests/unit/device/device_contract.h: what every Device promises.
//
// Before including it, define HYBRIDPS_DEVICE_BACKENDS: types with
//   static std::shared_ptr<device::Device> make();   null: not on this machine; `why` then says so
//   static std::string why;
// Device memory comes from allocate_device() and is seen through copies. CUDA makes copies from host memory to host
// memory in the call, even pinned ones, so a copy between two allocate_host() behind a flag would never return.
#include <chrono>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/device/device.h"
#include "hybridps/device/int8.h"
#include "tests/support/catch.h"

namespace device_contract {

using namespace hybridps;

template <typename Backend>
struct Fixture {
  Fixture() : device(Backend::make()) {
    if (!device) WARN("skipped: " << Backend::why());
  }
  ~Fixture() {
    if (!device) return;
    for (const auto event : events) device->destroy(event);
    for (const auto stream : streams) device->destroy(stream);
    for (const auto& memory : memories) device->free_host(memory);
    for (std::byte* const memory : own) device->free_device(memory);
  }
  device::DeviceStream stream() {
    auto made = device->make_stream();
    REQUIRE(made.is_ok());
    streams.push_back(made.value());
    return made.value();
  }
  device::DeviceEvent event() {
    auto made = device->make_event();
    REQUIRE(made.is_ok());
    events.push_back(made.value());
    return made.value();
  }
  device::HostMemory memory(std::uint64_t bytes) {
    auto made = device->allocate_host(bytes);
    REQUIRE(made.is_ok());
    memories.push_back(made.value());
    return made.value();
  }
  /// Device memory, zeroed. Call it before anything is on a stream: it may wait for the device.
  std::byte* there(std::uint64_t bytes) {
    auto made = device->allocate_device(bytes);
    REQUIRE(made.is_ok());
    own.push_back(made.value());
    const auto zeros = memory(bytes);
    const auto zeroes = stream();
    const auto zeroed = event();
    REQUIRE(device->copy_to_device(zeroes, made.value(), zeros.data, bytes).is_ok());
    REQUIRE(device->record(zeroed, zeroes).is_ok());
    REQUIRE(becomes_done(zeroed));
    return made.value();
  }
  bool becomes_done(device::DeviceEvent of) {
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(30);
    while (std::chrono::steady_clock::now() < until) {
      const auto done = device->is_done(of);
      REQUIRE(done.is_ok());
      if (done.value()) return true;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return false;
  }

  std::shared_ptr<device::Device> device;
  std::vector<device::DeviceStream> streams;
  std::vector<device::DeviceEvent> events;
  std::vector<device::HostMemory> memories;
  std::vector<std::byte*> own;
};

inline constexpr auto kAWhile = std::chrono::milliseconds(20);

TEMPLATE_TEST_CASE("device: memory is pinned and mapped and zero", "[device][fast]", HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto memory = f.memory(10000);
  CHECK(memory.pinned);
  CHECK(memory.bytes == 10000);
  CHECK(memory.device_address != 0);
  for (std::size_t i = 0; i < memory.bytes; ++i) REQUIRE(memory.data[i] == std::byte{0});
  CHECK(f.device->describe() != "");
  const auto id = f.device->physical_id();
  REQUIRE(id.is_ok());
  CHECK(id.value() != "");
  CHECK(f.device->physical_id().value() == id.value());
  bool ran = false;
  CHECK(f.device->run_here([&] { return ran = true, core::Status(); }).is_ok());
  CHECK(ran);
}

TEMPLATE_TEST_CASE("device: a stream runs copies and flags in order", "[device][fast]", HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto stream = f.stream();
  const auto from = f.memory(1 << 16);
  const auto here = f.memory(1 << 16);
  std::byte* const there = f.there(here.bytes);
  const auto flags = f.memory(64);
  const auto flag = flags.flag_at(4);
  for (std::uint32_t round = 1; round <= 20; ++round) {
    std::memset(from.data, static_cast<int>(round), from.bytes);
    REQUIRE(f.device->copy_to_device(stream, there, from.data, from.bytes).is_ok());
    REQUIRE(f.device->copy_to_host(stream, here.data, there, here.bytes).is_ok());
    REQUIRE(f.device->write_flag(stream, flag, round).is_ok());
    while (!device::has_reached(flag.word->load(std::memory_order_acquire), round))
      std::this_thread::sleep_for(std::chrono::microseconds(10));
    for (std::size_t i = 0; i < here.bytes; i += 997) REQUIRE(here.data[i] == static_cast<std::byte>(round));
  }
}

TEMPLATE_TEST_CASE("device: elements become codes and are elements again, in the stream's order", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  if (const core::Status status = f.device->prepare_int8(); !status.is_ok()) {
    WARN("skipped: " << status.message());
    return;
  }
  constexpr std::uint64_t kCount = 32 * 1000 + 7;
  const auto stream = f.stream();
  const auto end = f.event();
  const auto flag = f.memory(64).flag_at(0);
  const auto values = f.memory(kCount * sizeof(float));
  const auto codes = f.memory(device::int8::bytes_of(kCount) + 1);
  const auto back = f.memory(kCount * sizeof(float));
  auto* const values_there = reinterpret_cast<float*>(f.there(values.bytes));
  std::byte* const codes_there = f.there(codes.bytes);
  auto* const back_there = reinterpret_cast<float*>(f.there(back.bytes));
  auto* const elements = reinterpret_cast<float*>(values.data);
  REQUIRE(f.device->wait_flag(stream, flag, 1).is_ok());
  REQUIRE(f.device->copy_to_device(stream, values_there, values.data, values.bytes).is_ok());
  REQUIRE(f.device->encode_int8(stream, codes_there, values_there, kCount, 0.25F).is_ok());
  REQUIRE(f.device->decode_int8(stream, back_there, codes_there, kCount).is_ok());
  REQUIRE(f.device->copy_to_host(stream, codes.data, codes_there, codes.bytes).is_ok());
  REQUIRE(f.device->copy_to_host(stream, back.data, back_there, back.bytes).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  for (std::uint64_t i = 0; i < kCount; ++i) elements[i] = static_cast<float>(i * i % 1013) - 500.0F;
  elements[77] = std::numeric_limits<float>::infinity();
  for (std::uint64_t i = 640; i < 700; ++i) elements[i] *= std::numeric_limits<float>::min() / 1000;
  flag.word->store(1, std::memory_order_release);
  REQUIRE(f.becomes_done(end));
  std::vector<std::byte> want(device::int8::bytes_of(kCount));
  device::int8::encode(want.data(), elements, kCount, 0.25F);
  CHECK(std::memcmp(codes.data, want.data(), want.size()) == 0);
  CHECK(codes.data[want.size()] == std::byte{0});
  std::vector<float> decoded(kCount);
  device::int8::decode(decoded.data(), want.data(), kCount);
  CHECK(std::memcmp(back.data, decoded.data(), back.bytes) == 0);
}

TEMPLATE_TEST_CASE("device: a stream waits for a flag and the host goes on", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto stream = f.stream();
  const auto end = f.event();
  const auto from = f.memory(4096);
  const auto to = f.memory(4096);
  std::byte* const there = f.there(4096);
  const auto flag = f.memory(64).flag_at(0);
  REQUIRE(f.device->wait_flag(stream, flag, 3).is_ok());
  REQUIRE(f.device->copy_to_device(stream, there, from.data, from.bytes).is_ok());
  REQUIRE(f.device->copy_to_host(stream, to.data, there, to.bytes).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  std::memset(from.data, 7, from.bytes);  // after the call: the copy is made when the stream gets there
  flag.word->store(2, std::memory_order_release);
  std::this_thread::sleep_for(kAWhile);
  CHECK_FALSE(f.device->is_done(end).value());
  flag.word->store(3, std::memory_order_release);
  REQUIRE(f.becomes_done(end));
  CHECK(to.data[4095] == std::byte{7});
}

TEMPLATE_TEST_CASE("device: a stream copies within the device when it gets there", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto stream = f.stream();
  const auto end = f.event();
  const auto from = f.memory(1 << 16);
  const auto to = f.memory(1 << 16);
  std::byte* const from_there = f.there(from.bytes);
  std::byte* const to_there = f.there(to.bytes);
  const auto flag = f.memory(64).flag_at(0);
  REQUIRE(f.device->wait_flag(stream, flag, 1).is_ok());
  REQUIRE(f.device->copy_to_device(stream, from_there, from.data, from.bytes).is_ok());
  REQUIRE(f.device->copy_within(stream, to_there + 100, from_there, 1000).is_ok());
  REQUIRE(f.device->copy_within(stream, to_there, from_there, 0).is_ok());
  REQUIRE(f.device->copy_to_host(stream, to.data, to_there, to.bytes).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  std::memset(from.data, 5, from.bytes);
  flag.word->store(1, std::memory_order_release);
  REQUIRE(f.becomes_done(end));
  CHECK(to.data[99] == std::byte{0});
  CHECK(to.data[100] == std::byte{5});
  CHECK(to.data[1099] == std::byte{5});
  CHECK(to.data[1100] == std::byte{0});
}

TEMPLATE_TEST_CASE("device: a list of copies is made when the stream gets there", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  constexpr std::size_t kBytes = 1000;
  const auto stream = f.stream();
  const auto end = f.event();
  const auto from = f.memory(10 * kBytes);
  const auto to = f.memory(10 * kBytes);
  std::byte* const there = f.there(20 * kBytes);
  const auto flag = f.memory(64).flag_at(0);
  std::vector<device::CopyRun> in;
  std::vector<device::CopyRun> within;
  std::vector<device::CopyRun> out;
  for (std::size_t i = 0; i < 10;
       ++i) {  // the order of the runs is reversed; each is shorter by one byte than the last
    const std::size_t at = kBytes * i;
    const std::size_t other = kBytes * (9 - i);
    in.push_back({there + at, from.data + at, kBytes - i});
    within.push_back({there + 10 * kBytes + other, there + at, kBytes - i});
    out.push_back({to.data + other, there + 10 * kBytes + other, kBytes - i});
    out.push_back({});  // empty
  }
  REQUIRE(f.device->wait_flag(stream, flag, 1).is_ok());
  REQUIRE(f.device->copy_all(stream, device::CopyWay::kToDevice, in).is_ok());
  REQUIRE(f.device->copy_all(stream, device::CopyWay::kWithin, within).is_ok());
  REQUIRE(f.device->copy_all(stream, device::CopyWay::kToHost, out).is_ok());
  REQUIRE(f.device->copy_all(stream, device::CopyWay::kToHost, {}).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  for (std::size_t i = 0; i < 10; ++i) std::memset(from.data + kBytes * i, static_cast<int>(i + 1), kBytes);
  flag.word->store(1, std::memory_order_release);
  REQUIRE(f.becomes_done(end));
  for (std::size_t i = 0; i < 10; ++i) {
    for (std::size_t j = 0; j < kBytes; ++j)
      REQUIRE(to.data[kBytes * (9 - i) + j] == static_cast<std::byte>(j < kBytes - i ? i + 1 : 0));
  }
}

TEMPLATE_TEST_CASE("device: its own memory takes copies and gives them back", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  constexpr std::uint64_t kBytes = 1 << 16;
  const auto stream = f.stream();
  const auto end = f.event();
  const auto from = f.memory(kBytes);
  const auto to = f.memory(kBytes);
  std::memset(from.data, 6, kBytes);
  std::byte* const own = f.device->allocate_device(2 * kBytes).value();
  REQUIRE(f.device->copy_to_device(stream, own + 100, from.data, kBytes - 100).is_ok());
  REQUIRE(f.device->copy_within(stream, own + kBytes, own + 100, kBytes - 100).is_ok());
  REQUIRE(f.device->copy_to_host(stream, to.data, own + kBytes, kBytes - 100).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  REQUIRE(f.becomes_done(end));
  CHECK(to.data[0] == std::byte{6});
  CHECK(to.data[kBytes - 101] == std::byte{6});
  CHECK(to.data[kBytes - 100] == std::byte{0});
  f.device->free_device(own);
}

TEMPLATE_TEST_CASE("device: flags compare in a circle", "[device][fast]", HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto stream = f.stream();
  const auto end = f.event();
  const auto flag = f.memory(64).flag_at(0);
  flag.word->store(0xffffffffU);
  REQUIRE(f.device->wait_flag(stream, flag, 1).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  std::this_thread::sleep_for(kAWhile);
  CHECK_FALSE(f.device->is_done(end).value());
  flag.word->store(2);
  CHECK(f.becomes_done(end));
}

TEMPLATE_TEST_CASE("device: events order streams", "[device][fast]", HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto first = f.stream();
  const auto second = f.stream();
  const auto between = f.event();
  const auto end = f.event();
  const auto gate = f.memory(64).flag_at(0);
  const auto from = f.memory(1 << 16);
  const auto middle = f.memory(1 << 16);
  const auto to = f.memory(1 << 16);
  std::byte* const from_there = f.there(from.bytes);
  std::byte* const to_there = f.there(to.bytes);
  REQUIRE(f.device->wait_flag(first, gate, 1).is_ok());
  REQUIRE(f.device->copy_to_device(first, from_there, from.data, from.bytes).is_ok());
  REQUIRE(f.device->copy_to_host(first, middle.data, from_there, middle.bytes).is_ok());
  REQUIRE(f.device->record(between, first).is_ok());
  REQUIRE(f.device->wait(second, between).is_ok());
  REQUIRE(f.device->copy_to_device(second, to_there, middle.data, to.bytes).is_ok());
  REQUIRE(f.device->copy_to_host(second, to.data, to_there, to.bytes).is_ok());
  REQUIRE(f.device->record(end, second).is_ok());
  std::memset(from.data, 9, from.bytes);
  std::this_thread::sleep_for(kAWhile);
  CHECK_FALSE(f.device->is_done(end).value());
  gate.word->store(1, std::memory_order_release);
  REQUIRE(f.becomes_done(end));
  CHECK(to.data[to.bytes - 1] == std::byte{9});
}

TEMPLATE_TEST_CASE("device: an event that was never recorded counts as done", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto stream = f.stream();
  const auto never = f.event();
  const auto end = f.event();
  CHECK(f.device->is_done(never).value());
  REQUIRE(f.device->wait(stream, never).is_ok());
  REQUIRE(f.device->record(end, stream).is_ok());
  CHECK(f.becomes_done(end));
}

TEMPLATE_TEST_CASE("device: an event stands for what it was recorded for last", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto busy = f.stream();
  const auto free = f.stream();
  const auto event = f.event();
  const auto end = f.event();
  const auto gate = f.memory(64).flag_at(0);
  REQUIRE(f.device->record(event, busy).is_ok());
  REQUIRE(f.becomes_done(event));
  REQUIRE(f.device->wait_flag(busy, gate, 1).is_ok());
  REQUIRE(f.device->wait(free, event).is_ok());  // the recording that is done
  REQUIRE(f.device->record(event, busy).is_ok());
  REQUIRE(f.device->record(end, free).is_ok());
  CHECK(f.becomes_done(end));
  CHECK_FALSE(f.device->is_done(event).value());
  gate.word->store(1);
  CHECK(f.becomes_done(event));
}

TEMPLATE_TEST_CASE("device: who waits for an event is not let go by its next recording", "[device][fast]",
                   HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  const auto busy = f.stream();
  const auto idle = f.stream();
  const auto waits = f.stream();
  const auto event = f.event();
  const auto end = f.event();
  const auto gate = f.memory(64).flag_at(0);
  REQUIRE(f.device->wait_flag(busy, gate, 1).is_ok());
  REQUIRE(f.device->record(event, busy).is_ok());
  REQUIRE(f.device->wait(waits, event).is_ok());
  REQUIRE(f.device->record(end, waits).is_ok());
  REQUIRE(f.device->record(event, idle).is_ok());
  REQUIRE(f.becomes_done(event));
  std::this_thread::sleep_for(kAWhile);
  CHECK_FALSE(f.device->is_done(end).value());
  gate.word->store(1);
  CHECK(f.becomes_done(end));
}

TEMPLATE_TEST_CASE("device: a stream that runs does not capture", "[device][fast]", HYBRIDPS_DEVICE_BACKENDS) {
  Fixture<TestType> f;
  if (!f.device) return;
  CHECK_FALSE(f.device->is_capturing(f.stream()).value());
}

}  // namespace device_contract
