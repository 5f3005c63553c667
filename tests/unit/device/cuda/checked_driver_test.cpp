// CudaDevice on a driver that checks its caller: the contract, and what CUDA demands beside it.
#include "tests/support/checked_driver.h"

namespace {

struct OnCheckedDriver {
  static std::unique_ptr<hybridps::test::CheckedDriver>& checked() {
    static std::unique_ptr<hybridps::test::CheckedDriver> driver;
    return driver;
  }
  static std::shared_ptr<hybridps::device::FakeDevice>& fake() {
    static std::shared_ptr<hybridps::device::FakeDevice> device;
    return device;
  }
  static std::shared_ptr<hybridps::device::Device> make() {
    fake() = std::make_shared<hybridps::device::FakeDevice>(hybridps::device::FakeOptions{});
    checked() = std::make_unique<hybridps::test::CheckedDriver>();
    return checked()->open(fake());
  }
  static std::string why() { return {}; }
};
}  // namespace

#define HYBRIDPS_DEVICE_BACKENDS OnCheckedDriver
#include "tests/unit/device/device_contract.h"

namespace {

using namespace hybridps;

TEST_CASE("device/checked: the contract needs nothing that CUDA forbids", "[device][fast]") {
  device_contract::Fixture<OnCheckedDriver> f;
  const auto stream = f.stream();
  const auto flag = f.memory(64).flag_at(0);
  REQUIRE(f.device->write_flag(stream, flag, 1).is_ok());
  OnCheckedDriver::fake()->synchronize(stream);
  CHECK(OnCheckedDriver::checked()->violations().empty());
}

TEST_CASE("device/checked: a thread without a context gets an error and no answer", "[device][fast]") {
  device_contract::Fixture<OnCheckedDriver> f;
  const auto event = f.event();
  const device::Driver& driver = OnCheckedDriver::checked()->driver();
  CHECK(driver.event_query(static_cast<CUevent>(event.native)) == CUDA_ERROR_INVALID_CONTEXT);
  CUdeviceptr memory = 0;
  CHECK(driver.device_allocate(&memory, 64) == CUDA_ERROR_INVALID_CONTEXT);
  CHECK(f.device->is_done(event).value());
}

TEST_CASE("device/checked: a query spoils another thread's graph but not after begin_helper_thread()",
          "[device][fast]") {
  for (const bool relaxed : {false, true}) {
    device_contract::Fixture<OnCheckedDriver> f;
    const auto event = f.event();
    OnCheckedDriver::checked()->begin_capture();
    std::thread([&] {
      if (relaxed) f.device->begin_helper_thread();
      CHECK(f.device->is_done(event).is_ok() == relaxed);
    }).join();
    const auto memory = f.device->allocate_host(64);  // relaxed by itself
    CHECK(memory.is_ok());
    CHECK(OnCheckedDriver::checked()->end_capture() == relaxed);
    f.device->free_host(memory.value());
  }
}

TEST_CASE("device/checked: what a device lacks is found for the doctor", "[device][fast]") {
  const auto device = OnCheckedDriver::make();
  const device::Driver& driver = OnCheckedDriver::checked()->driver();
  CHECK(device::find_cuda_trouble(driver) == "");
  OnCheckedDriver::checked()->refuse_memory_operations();
  const std::string found = device::find_cuda_trouble(driver);
  CHECK(found.find("CUDA device 0") == 0);
  CHECK(found.find("CUDA_ERROR_NOT_SUPPORTED") != std::string::npos);
}

TEST_CASE("device/checked: a device whose work does not end holds up the doctor no longer than it waits",
          "[device][fast]") {
  for (const bool in_a_call : {true, false}) {
    device::FakeOptions options;
    options.hardware_queues = 1;
    options.memory_calls_wait = in_a_call;  // else only the flag does not come
    const auto fake = std::make_shared<device::FakeDevice>(options);
    OnCheckedDriver::checked() = std::make_unique<test::CheckedDriver>();
    const auto device = OnCheckedDriver::checked()->open(fake);
    const auto stream = fake->make_stream().value();
    std::atomic<bool> go{false};
    fake->launch(stream, [&] {
      while (!go.load()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    });
    const auto patience = std::chrono::milliseconds(in_a_call ? 100 : 10000);
    const std::string found = device::find_cuda_trouble(OnCheckedDriver::checked()->driver(), patience);
    go.store(true);
    CHECK(found.find("CUDA device 0") == 0);
    CHECK(found.find(in_a_call ? "has not returned for 100 ms" : "a word that a stream writes is not seen") !=
          std::string::npos);
    fake->synchronize(stream);
    fake->destroy(stream);
    // The thread that was left behind gives everything back, and then no longer needs the driver.
    const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (in_a_call && OnCheckedDriver::checked()->contexts_retained() > 1 && std::chrono::steady_clock::now() < until)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    CHECK(OnCheckedDriver::checked()->contexts_retained() == (in_a_call ? 1 : 2));
    CHECK(fake->streams() == (in_a_call ? 0 : 1));
  }
}

TEST_CASE("device/checked: errors stay and calls fail when the driver is gone", "[device][fast]") {
  device_contract::Fixture<OnCheckedDriver> f;
  const auto stream = f.stream();
  const auto flag = f.memory(64).flag_at(0);
  OnCheckedDriver::checked()->refuse_memory_operations();
  CHECK(f.device->write_flag(stream, flag, 1).to_string() ==
        "unsupported: CUDA: cuStreamWriteValue32 failed: CUDA_ERROR_NOT_SUPPORTED (operation not supported)");
  OnCheckedDriver::fake()->break_down("an illegal memory access was encountered");
  for (int i = 0; i < 2; ++i)
    CHECK(f.device->make_event().status().to_string() ==
          "internal error: CUDA: cuEventCreate failed: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access was "
          "encountered)");
  OnCheckedDriver::checked()->leave();
  CHECK(f.device->make_stream().status().to_string().find("CUDA_ERROR_DEINITIALIZED") != std::string::npos);
}

}  // namespace
