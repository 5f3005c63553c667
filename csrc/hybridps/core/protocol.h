// hybridps/core/protocol.h: the version of everything that processes of one job say to each other.
#pragma once

#include <cstdint>

namespace hybridps::core {

/// Raised by any change of what is in the Store (bootstrap/record.h), a transport's address included, between engines
/// (wire/message.h), or said to dedicated servers. Members of a group must have the same.
inline constexpr std::uint8_t kProtocolVersion = 17;

}  // namespace hybridps::core
