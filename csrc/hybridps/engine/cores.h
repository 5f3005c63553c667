// hybridps/engine/cores.h: how many cores a process may count on, and how it uses them.
//
// Threads  any; reads /sys and the affinity of the calling thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>

#include "hybridps/core/config.h"
#include "hybridps/core/spinning.h"
#include "hybridps/engine/interface.h"

namespace hybridps::engine {

/// The most data threads of a process if the number of cores decides: four keep up with the one summing thread.
inline constexpr std::int64_t kDataThreadsMost = 4;

/// How many ranks of a job the launcher has started on this machine: LOCAL_WORLD_SIZE, else the number from Open MPI,
/// MPICH or Slurm, if their job has `ranks` ranks. `ranks`: the ranks of the job; 0: not known. Returns 0: not known.
std::size_t local_ranks(std::size_t ranks);

/// Cores for each of `processes` on this machine: HYBRIDPS_CORES, else the usable cores of the machine, divided by
/// `processes`. Usable cores are online, in the container's cpuset, and within its quota (cgroup v2 or v1). The result
/// is at most the number of cores in this process's affinity set. If the process shares that set with its parent or its
/// container, the set is divided too. A set of its own is not divided.
std::size_t cores_for_each(const core::Config& config, std::size_t processes,
                           const std::filesystem::path& cgroups = "/sys/fs/cgroup");

/// The threads that move a process's data.
struct DataThreadsPlan {
  std::int64_t most = 0;       // data threads at most; 0: none
  bool when_busy = false;      // they move data only while the summing thread is overloaded; else from the start
  std::size_t on_machine = 0;  // data threads of all processes of the machine
};
/// Takes data_threads of HYBRIDPS_LIMITS if set. Otherwise, for data over our own TCP: the cores that are left after
/// one core for the program and one for each of `summing` threads, kDataThreadsMost at most. Otherwise none: RDMA takes
/// hardly any core time, and data threads are untested with UCX's TCP and with GPU memory (HYBRIDPS_GPUDIRECT).
DataThreadsPlan plan_data_threads(const core::Config& config, std::size_t cores, std::size_t summing,
                                  const Interfaces& interfaces, std::size_t processes);

/// How long threads look for events before they sleep: HYBRIDPS_SPIN_MICROSECONDS; if unset, they spin where it pays.
core::Spinning spinning_of(const core::Config& config);

}  // namespace hybridps::engine
