#include "hybridps/engine/round_trips.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

#include "hybridps/engine/records.h"
#include "hybridps/schedule/regions.h"
#include "hybridps/transport/tcp/tcp_wire.h"

namespace hybridps::engine {

std::vector<int> regions_by(const std::vector<std::vector<std::uint32_t>>& round_trips) {
  return schedule::find_regions(round_trips);
}

std::uint32_t round_trip_to(const std::string& numeric, std::uint16_t port) {
  const std::optional<transport::SocketAddress> address = transport::parse_address(numeric, port);
  if (!address) return 0;
  transport::RoundTrip trip(*address, core::Clock::now());
  for (;;) {
    if (const std::optional<std::uint32_t> us = trip.step(core::Clock::now())) return *us;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

bool RoundTrips::are_wanted(const bootstrap::Roster& roster, int me) {
  const int my_node = roster.node_of[static_cast<std::size_t>(me)];
  return roster.node_count() > 1 && roster.ranks_of_node(my_node).front() == me &&
         std::all_of(roster.members.begin(), roster.members.end(),
                     [](const bootstrap::MemberRecord& member) { return member.region.empty(); });
}

RoundTrips::RoundTrips(const bootstrap::Roster& roster, int me, KnownRoundTrips& known) : known_(known) {
  for (int node = 0; node < roster.node_count(); ++node) {
    const auto first = static_cast<std::size_t>(roster.ranks_of_node(node).front());
    const bootstrap::MemberRecord& member = roster.members[first];
    const bool is_here = static_cast<int>(first) == me;
    nodes_.push_back(is_here ? core::EngineId{} : member.engine);
    if (is_here || known_.count(member.engine) > 0) continue;
    const auto address = transport::decode_tcp_address(to_transport(member.control_address));
    paths_.push_back({member.engine, {}, nullptr});
    if (address.is_ok()) paths_.back().address = address.value().socket;
  }
}

bool RoundTrips::step(core::TimePoint now) {
  for (std::size_t i = 0; i < std::min(paths_.size(), kAtOnce);) {
    Probed& path = paths_[i];
    if (path.address && !path.measured) path.measured = std::make_unique<transport::RoundTrip>(*path.address, now);
    const std::optional<std::uint32_t> us = path.measured ? path.measured->step(now) : 0;
    if (!us) {
      ++i;
      continue;
    }
    // A failure is not kept: the cause may pass, as a lack of descriptors does.
    if (*us > 0) known_[path.engine] = *us;
    paths_.erase(paths_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  return paths_.empty();
}

std::vector<std::uint32_t> RoundTrips::by_node() const {
  std::vector<std::uint32_t> found;
  for (const core::EngineId engine : nodes_) {
    const auto known = known_.find(engine);
    found.push_back(known == known_.end() ? 0 : known->second);
  }
  return found;
}

}  // namespace hybridps::engine
