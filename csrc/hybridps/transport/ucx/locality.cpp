#include "hybridps/transport/ucx/locality.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <sstream>
#include <system_error>

#include "hybridps/core/files.h"

namespace hybridps::transport {
namespace {

namespace fs = std::filesystem;

constexpr const char* kNvidia = "0x10de";

/// NUMA nodes whose CPUs this process may use.
std::vector<int> own_nodes(const fs::path& sysfs) {
  cpu_set_t set;
  CPU_ZERO(&set);
  if (sched_getaffinity(0, sizeof set, &set) != 0) return {};
  std::vector<int> nodes;
  for (const fs::path& entry : core::entries_of(sysfs / "devices/system/node")) {
    int node = 0;
    if (std::sscanf(entry.filename().c_str(), "node%d", &node) != 1) continue;
    const std::vector<int> cpus = core::cpus_in(core::first_line_of(entry / "cpulist"));
    if (std::any_of(cpus.begin(), cpus.end(), [&](int cpu) { return cpu < CPU_SETSIZE && CPU_ISSET(cpu, &set); }))
      nodes.push_back(node);
  }
  std::sort(nodes.begin(), nodes.end());
  return nodes;
}

std::string pci_root(const fs::path& device) {
  std::error_code error;
  const fs::path real = fs::canonical(device, error);
  if (error) return {};
  for (const fs::path& part : real)
    if (part.string().compare(0, 3, "pci") == 0) return part.string();
  return {};
}

/// Numbers of the GPUs that CUDA shows. All `count` GPUs if CUDA_VISIBLE_DEVICES is unset or has other names.
std::vector<std::size_t> visible_gpus(std::size_t count) {
  std::vector<std::size_t> all(count);
  for (std::size_t i = 0; i < count; ++i) all[i] = i;
  const char* given = std::getenv("CUDA_VISIBLE_DEVICES");
  if (given == nullptr) return all;
  std::vector<std::size_t> chosen;
  std::istringstream parts(given);
  for (std::string part; std::getline(parts, part, ',');) {
    char* end = nullptr;
    const long number = std::strtol(part.c_str(), &end, 10);
    if (end == part.c_str() || *end != '\0') return all;                 // named by UUID
    if (number < 0 || static_cast<std::size_t>(number) >= count) break;  // CUDA stops there, too
    chosen.push_back(static_cast<std::size_t>(number));
  }
  return chosen;
}

std::vector<fs::path> nvidia_gpus(const fs::path& sysfs) {
  std::vector<fs::path> found;
  for (const fs::path& device : core::entries_of(sysfs / "bus/pci/devices"))
    if (core::first_line_of(device / "vendor") == kNvidia &&
        core::first_line_of(device / "class").compare(0, 4, "0x03") == 0)
      found.push_back(device);
  return found;
}

}  // namespace

Locality own_locality(int local_rank, int local_size, const fs::path& sysfs) {
  Locality here;
  const std::vector<fs::path> gpus = nvidia_gpus(sysfs);
  const std::vector<std::size_t> visible = visible_gpus(gpus.size());
  // A launcher may show each rank only its own GPU.
  const bool one_each = visible.size() == 1 && gpus.size() > 1;
  const auto rank = static_cast<std::size_t>(one_each ? 0 : std::max(0, local_rank));
  if (one_each) local_size = 1;
  if (visible.size() >= static_cast<std::size_t>(std::max(1, local_size)) && rank < visible.size()) {
    const fs::path& gpu = gpus[visible[rank]];
    if (const int node = core::numa_node_of(gpu); node >= 0) here.nodes = {node};
    here.pci_root = pci_root(gpu);
    here.text = "GPU " + gpu.filename().string();
    if (!here.nodes.empty() || !here.pci_root.empty()) return here;
  }
  here.nodes = own_nodes(sysfs);
  here.text = "CPUs of NUMA node";
  for (const int node : here.nodes) here.text += " " + std::to_string(node);
  if (here.nodes.empty()) here.text = "CPUs of a machine without NUMA nodes";
  return here;
}

int distance_to(const Locality& from, const fs::path& device, const fs::path& sysfs) {
  if (!from.pci_root.empty() && pci_root(device) == from.pci_root) return 0;
  const int node = core::numa_node_of(device);
  if (node < 0) return -1;
  int best = -1;
  std::istringstream row(
      core::first_line_of(sysfs / "devices/system/node" / ("node" + std::to_string(node)) / "distance"));
  int distance = 0;
  for (int other = 0; row >> distance; ++other)
    if (std::find(from.nodes.begin(), from.nodes.end(), other) != from.nodes.end() && (best < 0 || distance < best))
      best = distance;
  return best;
}

std::vector<int> cpus_near(const fs::path& device, const fs::path& sysfs) {
  const int node = core::numa_node_of(device);
  const fs::path nodes = sysfs / "devices/system/node";
  if (node < 0 || core::first_line_of(nodes / "online").find_first_of("-,") == std::string::npos) return {};
  return core::cpus_in(core::first_line_of(nodes / ("node" + std::to_string(node)) / "cpulist"));
}

std::vector<std::size_t> nearest_of(const std::vector<int>& distances, int local_rank, int local_size,
                                    bool all_for_one) {
  const auto ranks = static_cast<std::size_t>(std::max(1, local_size));
  const auto rank = static_cast<std::size_t>(std::max(0, local_rank));
  std::vector<std::size_t> nearest;
  for (std::size_t i = 0; i < distances.size(); ++i) {
    const auto key = [&](std::size_t at) { return static_cast<unsigned>(distances[at]); };  // -1 becomes the farthest
    if (ranks == 1 && all_for_one) {
      nearest.push_back(i);
      continue;
    }
    if (!nearest.empty() && key(i) > key(nearest.front())) continue;
    if (!nearest.empty() && key(i) < key(nearest.front())) nearest.clear();
    nearest.push_back(i);
  }
  if (ranks == 1 || nearest.size() < 2) return nearest;
  // How many ranks share the nearest cards: in proportion to the nearest cards' part of all cards.
  const std::size_t sharing =
      std::clamp<std::size_t>((nearest.size() * ranks + distances.size() / 2) / distances.size(), 1, ranks);
  if (sharing >= nearest.size()) return {nearest[rank % nearest.size()]};
  std::vector<std::size_t> part;
  for (std::size_t i = 0; i < nearest.size(); ++i)
    if (i * sharing / nearest.size() == rank % sharing) part.push_back(nearest[i]);
  return part;
}

}  // namespace hybridps::transport
