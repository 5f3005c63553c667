#include "hybridps/engine/cores.h"

#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <limits>
#include <string>
#include <thread>

#include "hybridps/core/files.h"

namespace hybridps::engine {
namespace {

constexpr std::chrono::microseconds kSpin{50};

/// 0: no quota.
std::size_t quota_in_cores(const std::filesystem::path& cgroups) {
  double quota = 0;
  double period = 0;
  if (std::sscanf(core::first_line_of(cgroups / "cpu.max").c_str(), "%lf %lf", &quota, &period) != 2) {
    quota = std::atof(core::first_line_of(cgroups / "cpu/cpu.cfs_quota_us").c_str());
    period = std::atof(core::first_line_of(cgroups / "cpu/cpu.cfs_period_us").c_str());
  }
  if (!(quota > 0) || !(period > 0)) return 0;
  return static_cast<std::size_t>(std::clamp(std::floor(quota / period), 1.0, 1e6));
}

std::size_t cpus_of(pid_t process) {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  return sched_getaffinity(process, sizeof cpus, &cpus) == 0 ? static_cast<std::size_t>(CPU_COUNT(&cpus)) : 0;
}

}  // namespace

std::size_t cores_for_each(const core::Config& config, std::size_t processes, const std::filesystem::path& cgroups) {
  if (config.cores > 0) return static_cast<std::size_t>(config.cores);
  processes = std::max<std::size_t>(1, processes);
  std::size_t own = cpus_of(0);
  if (own == 0) own = std::max(1U, std::thread::hardware_concurrency());  // more than a cpu_set_t holds
  std::size_t quota = quota_in_cores(cgroups);
  if (quota == 0) quota = std::numeric_limits<std::size_t>::max();
  // A launcher that binds each rank to cores of its own has more itself; one that was bound shares its cores with all ranks.
  const bool is_bound = own < cpus_of(getppid());
  return is_bound ? std::min(own, std::max<std::size_t>(1, quota / processes)) : std::min(own, quota) / processes;
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
  if (!plan.when_busy) plan.spin = spin_for(config, cores, 1 + summing + most);
  return plan;
}

std::chrono::microseconds spin_for(const core::Config& config, std::size_t cores, std::size_t threads) {
  if (config.spin_microseconds >= 0) return std::chrono::microseconds(config.spin_microseconds);
  return threads <= cores ? kSpin : std::chrono::microseconds(0);
}

}  // namespace hybridps::engine
