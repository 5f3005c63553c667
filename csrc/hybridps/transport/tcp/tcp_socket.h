// hybridps/transport/tcp/tcp_socket.h: sockets, and what their errors mean.
//
// Threads  any.
#pragma once

#include <cstdint>
#include <string>

#include "hybridps/core/clock.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/transport.h"

namespace hybridps::transport {

/// Pause before the next attempt when descriptors are lacking.
inline constexpr core::Duration kAgainAfter = core::from_seconds(0.1);

/// True: this machine or this process has run out of a resource. Such an error says nothing about a peer.
bool is_lack(int error);
/// kOutOfResources if is_lack(error), else kInvalidArgument. If descriptors are lacking, the text says what to do.
core::Status socket_error(const std::string& what, int error);
/// A TCP socket that does not block and is closed in forked children. Empty: errno says why.
core::Descriptor make_socket(int family);
/// Fills in all but the peer. False: the kernel does not say.
bool read_path(int socket, PathInfo& path);

/// How large a socket's send buffer can become, in bytes as the kernel counts them: about twice those of the program.
struct SendBufferLimits {
  std::uint64_t own = 0;    // where the kernel's own choice ends (net.ipv4.tcp_wmem)
  std::uint64_t asked = 0;  // what a program gets that asks (net.core.wmem_max)
};
/// Of this thread's network namespace. Both 0: not known, as without a descriptor.
SendBufferLimits send_buffer_limits();
/// Gives `socket` a larger send buffer if `path` holds more than the kernel's own choice allows for. The buffer keeps
/// all bytes behind a lost packet until that packet has come. A full buffer lets the path run dry.
void make_send_room(int socket, const PathInfo& path, const SendBufferLimits& limits);

}  // namespace hybridps::transport
