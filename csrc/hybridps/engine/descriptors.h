// hybridps/engine/descriptors.h: how many file descriptors a rank needs, and that it may have as many. A job reckons with
// what its process has open, `hybridps doctor --cluster` with kDescriptorsOfARank.
//
// Threads  any.
// Errors   kOutOfResources: the limit is lower, with all figures and what to do.
#pragma once

#include <cstdint>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/interface.h"

namespace hybridps::engine {

/// Of a process with torch and our transports, without a peer; with kDescriptorsToSpare.
inline constexpr std::uint64_t kDescriptorsOfARank = 48;
/// For what its program opens meanwhile.
inline constexpr std::uint64_t kDescriptorsToSpare = 16;

struct DescriptorUse {
  std::uint64_t own = kDescriptorsOfARank;  // without a peer
  std::uint64_t remote = 0;                 // ranks on other nodes, and dedicated servers
  std::uint64_t local = 0;                  // the other ranks of the node
  std::uint64_t ways = 1;                   // connections for data between two ranks
};

/// Both sides of a pair may dial at the same time, and then keep both connections: for control as for data.
std::uint64_t descriptors_needed(const DescriptorUse& use) noexcept;

/// `cards`: the most that a member's data goes through. 0 over RDMA.
std::uint64_t data_ways(const core::Config& config, const Interfaces& interfaces, std::size_t cards);

/// Raises the soft limit of this process to its hard one where it is lower than what is needed.
core::Status allow_descriptors(const DescriptorUse& use);

}  // namespace hybridps::engine
