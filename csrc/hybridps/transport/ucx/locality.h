// hybridps/transport/ucx/locality.h: the distance of a network card from a rank's GPU or CPUs, as sysfs tells it.
//
// Threads  any; reads sysfs and the environment.
// Errors   what cannot be read counts as not known.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hybridps::transport {

/// Where a rank works: at its GPU if the machine has a GPU for each of its ranks, else on the CPUs it may use.
struct Locality {
  std::vector<int> nodes;  // NUMA nodes
  std::string pci_root;    // "pci0000:3a", PCI root of the GPU; empty: no GPU
  std::string text;        // "GPU 0000:3b:00.0", "CPUs of NUMA node 0"
};
/// A rank's GPU is the visible GPU (CUDA_VISIBLE_DEVICES) with the number `local_rank`, in the order of PCI addresses.
Locality own_locality(int local_rank, int local_size, const std::filesystem::path& sysfs = "/sys");

/// Distance of the device behind sysfs's link `device`. 0: under the same PCI root as the GPU. Else the NUMA distance,
/// where 10 is the same node. -1: not known.
int distance_to(const Locality& from, const std::filesystem::path& device, const std::filesystem::path& sysfs = "/sys");

/// CPUs of the NUMA node of the device behind sysfs's link `device`. Empty: node not known, or only one node.
std::vector<int> cpus_near(const std::filesystem::path& device, const std::filesystem::path& sysfs = "/sys");

/// The cards that a rank takes, as indices in rising order. `distances`: one per card; -1 counts as farthest. Ranks
/// share the nearest cards. If at least as many ranks as cards share, each takes one card, in turn. Otherwise each
/// takes several. A rank that is alone takes all nearest cards or, if `all_for_one`, all cards.
std::vector<std::size_t> nearest_of(const std::vector<int>& distances, int local_rank, int local_size,
                                    bool all_for_one = false);

}  // namespace hybridps::transport
