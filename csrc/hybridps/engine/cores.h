// hybridps/engine/cores.h: how many cores a process may count on, and what it does with them.
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

/// Threads that move a process's data, at most, where the cores decide: beside them one sums, and four keep up with what one
/// can sum.
inline constexpr std::int64_t kDataThreadsMost = 4;

/// How many ranks of a job of `ranks` (0: not known) the launcher has started on this machine: LOCAL_WORLD_SIZE, or what Open MPI,
/// MPICH or Slurm say of a job of that size. 0: nobody says.
std::size_t local_ranks(std::size_t ranks);

/// Cores for each of `processes` on this machine: HYBRIDPS_CORES, else those of the machine that may be used (online, in the
/// container's cpuset, its quota: cgroup v2 or v1), divided, and no more than this process may run on. A set that it has from
/// its parent or its container it shares with the others, so that is divided too; a set of its own is not.
std::size_t cores_for_each(const core::Config& config, std::size_t processes,
                           const std::filesystem::path& cgroups = "/sys/fs/cgroup");

/// How a process's data is moved.
struct DataThreadsPlan {
  std::int64_t most = 0;       // threads
  bool when_busy = false;      // only while the thread that sums has too much of it; else from the start
  std::size_t on_machine = 0;  // threads of all processes
};
/// HYBRIDPS_DATA_THREADS as it is set, else those cores that are left when the program and each of `summing` threads have one,
/// where data goes over TCP: RDMA takes hardly any core's time, UCX's TCP was not tried, nor GPU memory (HYBRIDPS_GPUDIRECT).
DataThreadsPlan plan_data_threads(const core::Config& config, std::size_t cores, std::size_t summing,
                                  const Interfaces& interfaces, std::size_t processes);

/// Whether threads look for events before they sleep: HYBRIDPS_SPIN_MICROSECONDS, else where it pays.
core::Spinning spinning_of(const core::Config& config);

}  // namespace hybridps::engine
