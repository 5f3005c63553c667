// hybridps/device/cuda/near_node.h: memory near a GPU, on the NUMA node of its PCI slot.
//
// Threads  a NearNode changes the memory policy of the thread that makes it. The same thread must destroy it.
// Source   set_mempolicy(2): MPOL_PREFERRED, so that a full node is no error.
#pragma once

#include <array>
#include <filesystem>
#include <string>

#include "hybridps/core/pinned.h"

namespace hybridps::device {

/// The NUMA node of the PCI device with this bus id (as CUDA writes it: "0000:3B:00.0"). -1: not known, or a single
/// node.
int numa_node_of(std::string bus_id, const std::filesystem::path& sysfs = "/sys");

/// While a NearNode lives, its thread's new pages come from `node` as long as the node has memory. No effect if `node`
/// is -1, or if the system refuses, as in some containers.
class NearNode : core::Pinned {
 public:
  explicit NearNode(int node) noexcept;
  ~NearNode();
  bool is_in_force() const noexcept { return in_force_; }

 private:
  static constexpr unsigned long kNodesMax = 1024;
  using Mask = std::array<unsigned long, kNodesMax / (8 * sizeof(unsigned long))>;

  int mode_before_ = 0;
  Mask nodes_before_{};
  bool in_force_ = false;
};

}  // namespace hybridps::device
