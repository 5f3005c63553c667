#include "hybridps/core/files.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <sstream>
#include <system_error>

namespace hybridps::core {

std::string first_line_of(const std::filesystem::path& file) {
  std::ifstream in(file);
  std::string line;
  std::getline(in, line);
  return line;
}

std::vector<std::filesystem::path> entries_of(const std::filesystem::path& folder) {
  std::vector<std::filesystem::path> entries;
  std::error_code error;  // a range-for would throw if reading fails
  for (std::filesystem::directory_iterator at(folder, error), end; !error && at != end; at.increment(error))
    entries.push_back(at->path());
  std::sort(entries.begin(), entries.end());
  return entries;
}

std::vector<int> cpus_in(const std::string& list) {
  constexpr int kCpuMax = 65535;
  std::vector<int> cpus;
  std::istringstream parts(list);
  for (std::string part; std::getline(parts, part, ',');) {
    int first = 0;
    int last = 0;
    const int read = std::sscanf(part.c_str(), "%d-%d", &first, &last);
    if (read < 1 || first < 0) continue;
    if (read == 1) last = first;
    for (int cpu = first; cpu <= std::min(last, kCpuMax); ++cpu) cpus.push_back(cpu);
  }
  return cpus;
}

int numa_node_of(const std::filesystem::path& device) {
  const std::string text = first_line_of(device / "numa_node");
  return text.empty() || text[0] == '-' ? -1 : std::atoi(text.c_str());
}

}  // namespace hybridps::core
