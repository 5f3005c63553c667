// hybridps/schedule/regions.h: which nodes are near each other, from round trips.
//
// Model    Round trips within a rack or site are short, and round trips between sites are long. The round trips of all
//          pairs of nodes are sorted. The largest step between two of them, as a ratio, is the border: pairs below it
//          are near. Regions are found only if the border is clear: the first round trip above it is kFarUs or more,
//          and kStep times the last one below it. And nearness must divide the nodes: two nodes that are near a third
//          one are near each other. Without a clear border, nodes that are all far from each other are a region each.
//          Otherwise nothing is found: a wrong region would cost more than none.
// Threads  pure functions.
#pragma once

#include <cstdint>
#include <vector>

namespace hybridps::schedule {

/// Microseconds. A path with a shorter round trip is never between regions.
inline constexpr std::uint32_t kFarUs = 1000;
/// Microseconds. Shorter round trips count as so long: below, the hosts' own work is most of it.
inline constexpr std::uint32_t kNearUs = 250;
inline constexpr double kStep = 4.0;

/// `round_trips[a][b]`: microseconds, as node a has measured it to node b; 0, or no row of that length: not known. The
/// shorter of both directions counts. Returns the region of each node, numbered in the order of nodes; empty: no
/// regions, or a pair of nodes is not known. Source: single-linkage clustering cut at the largest ratio of distances.
std::vector<int> find_regions(const std::vector<std::vector<std::uint32_t>>& round_trips);

}  // namespace hybridps::schedule
