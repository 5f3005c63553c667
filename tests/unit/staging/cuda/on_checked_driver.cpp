// The tests of ../*.cpp on CudaDevice, whose driver checks its caller and does the work on the tests' FakeDevices.
#include "tests/support/checked_driver.h"
#include "tests/unit/staging/program.h"

namespace {

using namespace hybridps::test::program;
using hybridps::test::CheckedDriver;

/// Never destroyed: devices of all tests are on it.
CheckedDriver& checked() {
  static auto& driver = *new CheckedDriver(/*fails_at_once=*/true);
  return driver;
}

const bool set = [] {
  device_on = [](const std::shared_ptr<FakeDevice>& fake) -> std::shared_ptr<device::Device> {
    return checked().open(fake);
  };
  fake_of = [](const std::shared_ptr<device::Device>& device) { return checked().fake(device->index()); };
  return true;
}();

TEST_CASE("staging/cuda: a channel that goes while a graph is recorded does not spoil the graph", "[staging][fast]") {
  ClusterThread cluster(nodes({0, 1}, 70));
  auto all = ranks(cluster, 70, 8);
  all[0].open(small());  // and never used: the driver's thread has made no call yet
  checked().begin_capture();
  all[0].others.clear();
  std::this_thread::sleep_for(50ms);
  CHECK(checked().end_capture());
}

}  // namespace
