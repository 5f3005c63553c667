// hybridps/transport/ucx/locality.h: how far a network card is from what a rank works on, as sysfs tells it.
//
// Threads  any; reads sysfs and the environment.
// Errors   what cannot be read counts as not known.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

namespace hybridps::transport {

/// Where a rank works: at its GPU where the machine has one for each of its ranks, else on the CPUs it may use.
struct Locality {
  std::vector<int> nodes;  // NUMA nodes
  std::string pci_root;    // "pci0000:3a", of the GPU; empty: no GPU
  std::string text;        // "GPU 0000:3b:00.0", "CPUs of NUMA node 0"
};
/// A rank's GPU is the visible one (CUDA_VISIBLE_DEVICES) with its local rank's number, in the order of PCI addresses.
Locality own_locality(int local_rank, int local_size, const std::filesystem::path& sysfs = "/sys");

/// Of the device behind sysfs's link `device`: 0 under the same PCI root as the GPU, else the NUMA distance, 10 being the
/// same node; -1: not known.
int distance_to(const Locality& from, const std::filesystem::path& device, const std::filesystem::path& sysfs = "/sys");

/// CPUs of the NUMA node that the device behind sysfs's link `device` is at; none where that is not known, or there is one
/// node only.
std::vector<int> cpus_near(const std::filesystem::path& device, const std::filesystem::path& sysfs = "/sys");

/// Which of the cards a rank takes, as indices in rising order, from their distances (-1: farthest): of the nearest ones in
/// turn where ranks are as many or more, a part each where they are fewer. A rank that is alone takes all of the
/// nearest, or, if `all_for_one`, all.
std::vector<std::size_t> nearest_of(const std::vector<int>& distances, int local_rank, int local_size,
                                    bool all_for_one = false);

}  // namespace hybridps::transport
