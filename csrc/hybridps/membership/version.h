// hybridps/membership/version.h: with which shares and settings the members of a group do an operation.
//
// Model    A group has versions, numbered from 0 on. An operation is bound to the newest version whose first operation is not after
//          it. Versions differ in shares and in settings: never in who is whose agent, never in the bits of a result.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/tuning.h"

namespace hybridps::membership {

struct Version {
  std::uint32_t number = 0;
  std::uint32_t shares = 0;  // the version that brought these shares
  schedule::Topology topology;
  schedule::Tuning tuning{};
};

class Versions {
 public:
  explicit Versions(schedule::Topology topology) { by_first_.emplace(0, Version{0, 0, std::move(topology)}); }

  const Version& of(std::uint64_t sequence) const { return std::prev(by_first_.upper_bound(sequence))->second; }
  const Version& newest() const noexcept { return by_first_.rbegin()->second; }
  /// From operation `first` on there is `version`, after the turns that `turns` takes between it and the version after it. Operations
  /// below `oldest` are not asked for again.
  void add(std::uint64_t first, Version version, const schedule::Turns& turns, std::uint64_t oldest);
  /// The first operation from which on this server owns nothing; none: it owns a part in the newest version.
  std::optional<std::uint64_t> owns_nothing_from(int server) const;

 private:
  std::map<std::uint64_t, Version> by_first_;  // two in use, more only for what is reserved or takes turns
};

/// Of the nodes and then of the dedicated servers.
std::vector<double> weights_of(const schedule::Topology& topology);

}  // namespace hybridps::membership
