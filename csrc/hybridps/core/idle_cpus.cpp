#include "hybridps/core/idle_cpus.h"

#include <sched.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>

namespace hybridps::core {

std::optional<IdleCpus::Times> IdleCpus::read() {
  const std::unique_ptr<FILE, int (*)(FILE*)> file(std::fopen("/proc/stat", "re"), &std::fclose);
  cpu_set_t mine;
  if (!file || sched_getaffinity(0, sizeof mine, &mine) != 0) return std::nullopt;
  Times times;
  char line[512];
  while (std::fgets(line, sizeof line, file.get()) != nullptr && std::strncmp(line, "cpu", 3) == 0) {
    char* at = line + 3;
    if (*at == ' ') continue;  // the sum of all
    const unsigned long cpu = std::strtoul(at, &at, 10);
    if (cpu >= CPU_SETSIZE || !CPU_ISSET(cpu, &mine)) continue;
    // user, nice, system, idle, iowait, irq, softirq, steal
    for (int field = 0; field < 8; ++field) {
      const std::uint64_t ticks = std::strtoull(at, &at, 10);
      times.all += ticks;
      if (field == 3 || field == 4) times.idle += ticks;
    }
  }
  if (times.all == 0) return std::nullopt;
  return times;
}

std::optional<double> IdleCpus::part(TimePoint now) {
  if (read_at_ != TimePoint{} && now - read_at_ < kInterval) return part_;
  read_at_ = now;
  const std::optional<Times> times = read();
  if (!times) return part_ = 1.0;
  // The kernel's count of idle ticks may fall (proc(5), iowait).
  if (last_ && times->all > last_->all)
    part_ = static_cast<double>(std::max(times->idle, last_->idle) - last_->idle) /
            static_cast<double>(times->all - last_->all);
  last_ = times;
  return part_;
}

}  // namespace hybridps::core
