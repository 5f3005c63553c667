// hybridps/core/ids.h: identities that travel on the wire.
#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

namespace hybridps::core {

/// One engine (one process's runtime), random, never reused; 0 means none.
struct EngineId {
  std::uint64_t value = 0;
  auto operator<=>(const EngineId&) const = default;
};

/// One process group, 128 random bits drawn by its group rank 0.
struct GroupUid {
  std::uint64_t high = 0;
  std::uint64_t low = 0;
  auto operator<=>(const GroupUid&) const = default;
};

/// 64 random bits from the kernel. Thread-safe.
std::uint64_t random_u64();
EngineId make_engine_id();
GroupUid make_group_uid();
/// 16 hexadecimal digits.
std::string to_string(EngineId id);
/// 32 hexadecimal digits.
std::string to_string(GroupUid uid);

}  // namespace hybridps::core

template <>
struct std::hash<hybridps::core::EngineId> {
  std::size_t operator()(const hybridps::core::EngineId& id) const noexcept {
    return static_cast<std::size_t>(id.value);
  }
};
template <>
struct std::hash<hybridps::core::GroupUid> {
  std::size_t operator()(const hybridps::core::GroupUid& uid) const noexcept {
    return static_cast<std::size_t>(uid.high ^ uid.low);
  }
};
