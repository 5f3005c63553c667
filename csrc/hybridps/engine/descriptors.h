// hybridps/engine/descriptors.h: how many file descriptors a rank needs, and whether the process may have so many.
//
// Model    A job counts the descriptors that its process has open. `hybridps doctor --cluster` assumes
//          kDescriptorsOfARank.
// Threads  any.
// Errors   kOutOfResources: the limit is too low; the text has all figures and says what to do.
#pragma once

#include <cstdint>

#include "hybridps/core/config.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/interface.h"

namespace hybridps::engine {

/// Descriptors of a process with torch and our transports, without any peer. Includes kDescriptorsToSpare.
inline constexpr std::uint64_t kDescriptorsOfARank = 48;
/// Descriptors for files that the program opens later.
inline constexpr std::uint64_t kDescriptorsToSpare = 16;

struct DescriptorUse {
  std::uint64_t own = kDescriptorsOfARank;  // descriptors of the process without any peer
  std::uint64_t remote = 0;                 // ranks on other nodes, and dedicated servers
  std::uint64_t local = 0;                  // the other ranks of the node
  std::uint64_t ways = 1;                   // data connections between two ranks
};

/// Counts two connections for each pair and use: both sides may connect at the same time, and keep both for a moment.
/// This holds for control and for data.
std::uint64_t descriptors_needed(const DescriptorUse& use) noexcept;

/// The number of data connections between two ranks; 0 over RDMA. `cards`: the most data cards that a member has.
std::uint64_t data_ways(const core::Config& config, const Interfaces& interfaces, std::size_t cards);

/// If the soft limit of this process is too low, raises it to the hard limit.
core::Status allow_descriptors(const DescriptorUse& use);

}  // namespace hybridps::engine
