#include "hybridps/device/cuda/near_node.h"

#include <linux/mempolicy.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cctype>
#include <cstddef>

#include "hybridps/core/files.h"

namespace hybridps::device {

int numa_node_of(std::string bus_id, const std::filesystem::path& sysfs) {
  std::transform(bus_id.begin(), bus_id.end(), bus_id.begin(), [](unsigned char c) { return std::tolower(c); });
  return core::numa_node_of(sysfs / "bus/pci/devices" / bus_id);
}

NearNode::NearNode(int node) noexcept {
  constexpr unsigned long kBits = 8 * sizeof(unsigned long);
  if (node < 0 || static_cast<unsigned long>(node) >= kNodesMax) return;
  if (syscall(SYS_get_mempolicy, &mode_before_, nodes_before_.data(), kNodesMax, nullptr, 0) != 0) return;
  Mask nodes{};
  nodes[static_cast<std::size_t>(node) / kBits] = 1UL << (static_cast<unsigned long>(node) % kBits);
  // The kernel uses one bit less than the given number.
  in_force_ = syscall(SYS_set_mempolicy, MPOL_PREFERRED, nodes.data(), kNodesMax + 1) == 0;
}

NearNode::~NearNode() {
  if (in_force_) (void)syscall(SYS_set_mempolicy, mode_before_, nodes_before_.data(), kNodesMax + 1);
}

}  // namespace hybridps::device
