// hybridps/transport/tcp/tcp_socket.h: sockets, and what their errors mean.
//
// Threads  any.
#pragma once

#include <string>

#include "hybridps/core/clock.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/status.h"

namespace hybridps::transport {

/// Where there are no descriptors.
inline constexpr core::Duration kAgainAfter = core::from_seconds(0.1);

/// This machine, or this process, has no more of something: that says nothing of a peer.
bool is_lack(int error);
/// With what to do, where descriptors lack.
core::Status socket_error(const std::string& what, int error);
/// Does not block, and is closed in children. Empty: errno says why.
core::Descriptor make_socket(int family);

}  // namespace hybridps::transport
