// hybridps/core/protocol.h: the version of everything that processes of one job say to each other.
#pragma once

#include <cstdint>

namespace hybridps::core {

/// Raised by any change of what is in the Store (bootstrap/record.h, with the transports' addresses), or of what
/// engines (wire/message.h) or dedicated servers are told. All members of a group must have the same version.
inline constexpr std::uint8_t kProtocolVersion = 30;

}  // namespace hybridps::core
