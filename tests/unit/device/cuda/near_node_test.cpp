#include "hybridps/device/cuda/near_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <array>
#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/catch.h"

namespace {

namespace fs = std::filesystem;
using hybridps::device::NearNode;
using hybridps::device::numa_node_of;

struct Policy {
  int mode = -1;
  std::array<unsigned long, 16> nodes{};
  bool operator==(const Policy&) const = default;
};

Policy policy() {
  Policy now;
  if (syscall(SYS_get_mempolicy, &now.mode, now.nodes.data(), 1024UL, nullptr, 0) != 0) now.mode = -1;
  return now;
}

TEST_CASE("device/near_node: the node is that of the PCI slot", "[device][fast]") {
  const fs::path sysfs = fs::temp_directory_path() / ("hybridps-near-" + std::to_string(getpid()));
  const auto device = [&](const char* id, const char* node) {
    fs::create_directories(sysfs / "bus/pci/devices" / id);
    std::ofstream(sysfs / "bus/pci/devices" / id / "numa_node") << node << "\n";
  };
  device("0000:3b:00.0", "1");
  device("0000:af:00.0", "-1");
  CHECK(numa_node_of("0000:3B:00.0", sysfs) == 1);  // CUDA writes capital letters
  CHECK(numa_node_of("0000:AF:00.0", sysfs) == -1);
  CHECK(numa_node_of("0000:00:00.0", sysfs) == -1);
  fs::remove_all(sysfs);
}

TEST_CASE("device/near_node: holds until it goes", "[device][fast]") {
  const Policy before = policy();
  {
    const NearNode nowhere(-1);
    CHECK_FALSE(nowhere.is_in_force());
    const NearNode no_such_node(5000);
    CHECK_FALSE(no_such_node.is_in_force());
    CHECK(policy() == before);
  }
  {
    const NearNode near_first(0);
    if (near_first.is_in_force()) {
      CHECK(policy().mode == MPOL_PREFERRED);
      CHECK(policy().nodes[0] == 1);
      {
        const NearNode again(0);
      }  // puts back what it found
      CHECK(policy().mode == MPOL_PREFERRED);
    } else {
      WARN("this system does not let a thread choose the node of its memory");
    }
  }
  CHECK(policy() == before);
}

}  // namespace
