// hybridps/membership/version.h: the shares and settings with which the members of a group do an operation.
//
// Model    A group has versions, numbered from 0 on. Each version has a first operation. An operation is bound to the
//          newest version that begins at or before the operation. Versions differ in shares and settings. All versions
//          have the same agents, and give results with the same bits.
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
  /// Adds `version`, which begins at operation `first`. If `turns` has pairs, `version` and the next number (with
  /// tuning turns.b) take turns first, and then `version` stays. The caller must not ask for operations below `oldest`
  /// again.
  void add(std::uint64_t first, Version version, const schedule::Turns& turns, std::uint64_t oldest);
  /// From this operation on, the server owns nothing; no value: the server owns a part in the newest version.
  std::optional<std::uint64_t> owns_nothing_from(int server) const;

 private:
  std::map<std::uint64_t, Version> by_first_;  // mostly two; more for reserved operations or turns
};

}  // namespace hybridps::membership
