// tests/support/core_dump.h: whether a core dump of this process would hold what lies at an address.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>

namespace hybridps::test {

inline bool is_dumped(const void* address) {
  std::ifstream maps("/proc/self/smaps");
  bool is_there = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0;
    unsigned long long end = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      const auto at = reinterpret_cast<std::uintptr_t>(address);
      is_there = at >= begin && at < end;
    } else if (is_there && line.rfind("VmFlags:", 0) == 0) {
      return line.find(" dd") == std::string::npos;
    }
  }
  return true;
}

}  // namespace hybridps::test
