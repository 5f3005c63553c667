// hybridps/core/idle_cpus.h: the part of the time in which the CPUs of this thread were idle.
//
// Model    /proc/stat, whose times have a resolution of about 10 ms: ask at intervals of 100 ms or more. Work of other
//          processes counts, and so does spinning. A limit of a container (cgroup quota) is not seen.
// Threads  one thread at a time.
#pragma once

#include <cstdint>
#include <optional>

#include "hybridps/core/clock.h"

namespace hybridps::core {

class IdleCpus {
 public:
  static constexpr auto kInterval = std::chrono::milliseconds(500);

  /// The idle part, 0 to 1, between the last two readings; reads again if the last reading is kInterval old. No value:
  /// there are no two readings yet. 1 where the system does not tell.
  std::optional<double> part(TimePoint now);

 private:
  struct Times {
    std::uint64_t idle = 0;
    std::uint64_t all = 0;
  };
  static std::optional<Times> read();

  TimePoint read_at_{};
  std::optional<Times> last_;
  std::optional<double> part_;
};

}  // namespace hybridps::core
