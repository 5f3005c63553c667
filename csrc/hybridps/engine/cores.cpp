#include "hybridps/engine/cores.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
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

}  // namespace

std::size_t cores_for_each(const core::Config& config, std::size_t processes, const std::filesystem::path& cgroups) {
  if (config.cores > 0) return static_cast<std::size_t>(config.cores);
  std::size_t cores = std::max(1U, std::thread::hardware_concurrency());
  if (const std::size_t quota = quota_in_cores(cgroups); quota > 0) cores = std::min(cores, quota);
  return cores / std::max<std::size_t>(1, processes);
}

DataThreadsPlan plan_data_threads(const core::Config& config, std::size_t cores, std::size_t summing,
                                  const Interfaces& interfaces) {
  DataThreadsPlan plan;
  if (config.data_threads >= 0) {
    plan.most = config.data_threads;
  } else if (!interfaces.ucx && !config.gpudirect) {
    const auto free = static_cast<std::int64_t>(cores) - 1 - static_cast<std::int64_t>(summing);
    plan.most = std::clamp<std::int64_t>(free, 0, kDataThreadsMost);
    plan.when_busy = plan.most > 0;
  }
  plan.spin = spin_for(config, cores, 1 + summing + static_cast<std::size_t>(plan.most));
  return plan;
}

std::chrono::microseconds spin_for(const core::Config& config, std::size_t cores, std::size_t threads) {
  if (config.spin_microseconds >= 0) return std::chrono::microseconds(config.spin_microseconds);
  return threads <= cores ? kSpin : std::chrono::microseconds(0);
}

}  // namespace hybridps::engine
