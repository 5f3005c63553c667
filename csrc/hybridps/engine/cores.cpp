#include "hybridps/engine/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/core/files.h"

namespace hybridps::engine {
namespace {

constexpr std::size_t kUnlimited = std::numeric_limits<std::size_t>::max();

std::size_t quota_in_cores(const std::filesystem::path& cgroups) {
  double quota = 0;
  double period = 0;
  if (std::sscanf(core::first_line_of(cgroups / "cpu.max").c_str(), "%lf %lf", &quota, &period) != 2) {
    quota = std::atof(core::first_line_of(cgroups / "cpu/cpu.cfs_quota_us").c_str());
    period = std::atof(core::first_line_of(cgroups / "cpu/cpu.cfs_period_us").c_str());
  }
  if (!(quota > 0) || !(period > 0)) return kUnlimited;
  return static_cast<std::size_t>(std::clamp(std::floor(quota / period), 1.0, 1e6));
}

/// CPUs in the cpuset of this process's cgroup, if the cgroup's path exists here. Otherwise of the root cgroup, which
/// in a container is the container's own.
std::size_t cpuset_in_cores(const std::filesystem::path& cgroups) {
  std::ifstream file("/proc/self/cgroup");
  std::vector<std::filesystem::path> candidates;
  for (std::string line; std::getline(file, line);) {  // "0::/a/b", "4:cpuset:/a/b"
    const std::size_t second = line.rfind(":/");
    if (second == std::string::npos) continue;
    const std::string path = line.substr(second + 2);
    if (line.compare(0, 3, "0::") == 0) candidates.push_back(cgroups / path / "cpuset.cpus.effective");
    if (line.substr(0, second).find("cpuset") != std::string::npos)
      candidates.push_back(cgroups / "cpuset" / path / "cpuset.effective_cpus");
  }
  candidates.push_back(cgroups / "cpuset.cpus.effective");
  candidates.push_back(cgroups / "cpuset/cpuset.effective_cpus");
  for (const auto& candidate : candidates)
    if (const std::size_t count = core::cpus_in(core::first_line_of(candidate)).size(); count > 0) return count;
  return kUnlimited;
}

std::size_t cpus_of(pid_t process) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return sched_getaffinity(process, sizeof cpus, &cpus) == 0 ? static_cast<std::size_t>(CPU_COUNT(&cpus)) : 0;
}

/// A positive number at the start of a variable; 0: none.
std::size_t number_in(const char* variable) {
  const char* text = std::getenv(variable);
  const long number = text != nullptr ? std::strtol(text, nullptr, 10) : 0;
  return number > 0 && number < 1'000'000 ? static_cast<std::size_t>(number) : 0;
}

}  // namespace

std::size_t local_ranks(std::size_t ranks) {
  if (const std::size_t local = number_in("LOCAL_WORLD_SIZE"); local > 0) return local;
  // A launcher's processes and their children have these variables. They count if the job has as many ranks.
  constexpr std::array<std::array<const char*, 2>, 3> kLaunchers{
      {{"OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE"},
       {"PMI_SIZE", "MPI_LOCALNRANKS"},
       {"SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"}}};
  for (const auto& [world, local] : kLaunchers)
    if (const std::size_t here = number_in(local); here > 0 && here <= ranks && number_in(world) == ranks) return here;
  return 0;
}

std::size_t cores_for_each(const core::Config& config, std::size_t processes, const std::filesystem::path& cgroups) {
  if (config.cores > 0) return static_cast<std::size_t>(config.cores);
  processes = std::max<std::size_t>(1, processes);
  std::size_t online = core::cpus_in(core::first_line_of("/sys/devices/system/cpu/online")).size();
  if (online == 0) online = std::max(1U, std::thread::hardware_concurrency());
  const std::size_t machine = std::min({online, cpuset_in_cores(cgroups), quota_in_cores(cgroups)});
  std::size_t own = cpus_of(0);
  if (own == 0) own = online;  // more CPUs than a cpu_set_t holds
  const bool is_shared = own == cpus_of(getppid()) || own >= machine;
  return is_shared ? std::min(own, machine) / processes : std::min(own, machine / processes);
}

DataThreadsPlan plan_data_threads(const core::Config& config, std::size_t cores, std::size_t summing,
                                  const Interfaces& interfaces, std::size_t processes) {
  DataThreadsPlan plan;
  if (config.data_threads >= 0) {
    plan.most = config.data_threads;
  } else if (!interfaces.ucx && !config.gpudirect) {
    const auto free = static_cast<std::int64_t>(cores) - 1 - static_cast<std::int64_t>(summing);
    plan.most = std::clamp<std::int64_t>(free, 0, kDataThreadsMost);
    plan.when_busy = plan.most > 0;
  }
  const auto most = static_cast<std::size_t>(plan.most);
  plan.on_machine = most * std::max<std::size_t>(1, processes);
  return plan;
}

core::Spinning spinning_of(const core::Config& config) {
  if (config.spin_microseconds >= 0) return core::Spinning::always(std::chrono::microseconds(config.spin_microseconds));
  return core::Spinning::where_it_pays();
}

}  // namespace hybridps::engine
