// hybridps/engine/round_trips.h: a node's round trips to the other nodes of a group that is being made.
//
// Model    The first rank of each node measures the path to the first rank of each other node, by
//          transport/tcp/round_trip.h. Later groups use the measured values again, so all groups of a process agree. A
//          path that could not be measured is tried again for the next group.
// Threads  one at a time: the joiner's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/transport/tcp/round_trip.h"

namespace hybridps::engine {

/// By engine: microseconds, never 0.
using KnownRoundTrips = std::unordered_map<core::EngineId, std::uint32_t>;

/// The region of each node (schedule/regions.h).
std::vector<int> regions_by(const std::vector<std::vector<std::uint32_t>>& round_trips);

/// The round trip to a port, as a group that is being made measures it; 0: could not be measured. Waits for the answer,
/// transport::RoundTrip::kGiveUpAfter at most. `numeric`: an IP address.
std::uint32_t round_trip_to(const std::string& numeric, std::uint16_t port);

class RoundTrips : core::Pinned {
 public:
  /// Connections that are opened at a time: each takes a descriptor.
  static constexpr std::size_t kAtOnce = 64;

  /// Whether rank `me` measures: regions are neither declared nor excluded.
  static bool are_wanted(const bootstrap::Roster& roster, int me);

  RoundTrips(const bootstrap::Roster& roster, int me, KnownRoundTrips& known);
  /// True: over.
  bool step(core::TimePoint now);
  /// By node (MemoryProof::round_trips); 0: this node, or could not be measured. Call when over.
  std::vector<std::uint32_t> by_node() const;

 private:
  struct Probed {
    core::EngineId engine;
    std::optional<transport::SocketAddress> address;
    std::unique_ptr<transport::RoundTrip> measured;
  };

  KnownRoundTrips& known_;
  std::vector<core::EngineId> nodes_;  // the first engine of each node; engine 0: this node
  std::deque<Probed> paths_;           // still to be measured; the first kAtOnce are under way
};

}  // namespace hybridps::engine
