#include "hybridps/schedule/regions.h"

#include <algorithm>
#include <cstddef>

namespace hybridps::schedule {

std::vector<int> find_regions(const std::vector<std::vector<std::uint32_t>>& round_trips) {
  const std::size_t nodes = round_trips.size();
  // 0: not known
  const auto measured = [&](std::size_t a, std::size_t b) {
    return round_trips[a].size() == nodes ? round_trips[a][b] : 0;
  };
  const auto between = [&](std::size_t a, std::size_t b) {
    const std::uint32_t there = measured(a, b);
    const std::uint32_t back = measured(b, a);
    return there == 0 || back == 0 ? std::max(there, back) : std::min(there, back);
  };
  std::vector<std::uint32_t> sorted;
  for (std::size_t a = 0; a < nodes; ++a)
    for (std::size_t b = a + 1; b < nodes; ++b) sorted.push_back(std::max(between(a, b), kNearUs));
  std::sort(sorted.begin(), sorted.end());
  double step = 0.0;
  std::uint32_t border = 0;  // the first round trip that is far
  for (std::size_t i = 1; i < sorted.size(); ++i) {
    const double ratio = static_cast<double>(sorted[i]) / sorted[i - 1];
    if (sorted[i] < kFarUs || ratio <= step) continue;
    step = ratio;
    border = sorted[i];
  }
  if (step < kStep) {
    if (sorted.empty() || sorted.front() < kFarUs) return {};
    border = sorted.front();  // all pairs are far
  }
  std::vector<int> region_of(nodes, -1);
  int regions = 0;
  for (std::size_t first = 0; first < nodes; ++first) {
    if (region_of[first] >= 0) continue;
    for (std::size_t node = first; node < nodes; ++node)
      if (node == first || between(first, node) < border) region_of[node] = regions;
    ++regions;
  }
  for (std::size_t a = 0; a < nodes; ++a)
    for (std::size_t b = a + 1; b < nodes; ++b)
      if (between(a, b) == 0 || (between(a, b) < border) != (region_of[a] == region_of[b])) return {};
  return region_of;
}

}  // namespace hybridps::schedule
