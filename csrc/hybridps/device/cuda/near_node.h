// hybridps/device/cuda/near_node.h: memory near a GPU: of the NUMA node that its PCI slot belongs to.
//
// Threads  a NearNode changes the policy of the thread that makes it, which must destroy it.
// Source   set_mempolicy(2): MPOL_PREFERRED, so that a full node is no error.
#pragma once

#include <array>
#include <filesystem>
#include <string>

#include "hybridps/core/pinned.h"

namespace hybridps::device {

/// The node of the PCI device with this bus id ("0000:3B:00.0", as CUDA writes it). -1: not known, as where there is one.
int numa_node_of(std::string bus_id, const std::filesystem::path& sysfs = "/sys");

/// While it lives, pages that its thread takes come from `node` as long as that has some. -1, or a system that refuses,
/// as containers may: nothing changes.
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
