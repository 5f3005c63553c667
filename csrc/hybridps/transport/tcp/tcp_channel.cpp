// Bytes over a connection: through its socket as they are, or through its channel, in TLS.
#include <sys/socket.h>

#include <cerrno>

#include "hybridps/transport/tcp/tcp_transport_impl.h"

namespace hybridps::transport {

core::Status TcpTransportImpl::begin_channel(TcpLink& link) {
  link.channel.reset();
  if (!identity_) return core::Status::ok();
  auto made = tls::TlsChannel::dial(identity_, link.socket.get(), tls::knock_key(link.peer));
  if (!made.is_ok()) return made.status();
  link.channel = std::move(made).value();
  return core::Status::ok();
}

ssize_t TcpTransportImpl::put(TcpLink& link, const iovec* parts, std::size_t count) {
  if (link.channel) return link.channel->send(parts, count);
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);  // NOLINT: sendmsg() does not write to it
  message.msg_iovlen = count;
  return ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

/// A side without descriptors answers "come again" in clear: it takes no connection, so it has no channel.
ssize_t TcpTransportImpl::take(TcpLink& link, const iovec* parts, std::size_t count) {
  if (!link.channel) return ::readv(link.socket.get(), parts, static_cast<int>(count));
  const ssize_t got = link.channel->receive(parts, count);
  if (got < 0 && link.channel->is_clear() && !link.channel->is_elsewhere() &&
      link.state == TcpLink::LinkState::kGreeted)
    return ::recv(link.socket.get(), parts[0].iov_base, parts[0].iov_len, MSG_DONTWAIT);
  return got;
}

/// A greeting or an answer: its few bytes always fit into the socket's send buffer.
void TcpTransportImpl::say(TcpLink& link, std::span<const std::byte> bytes) {
  const iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};  // NOLINT: put() does not write to it
  (void)!put(link, &part, 1);
  send_the_rest(link);
}

/// What of a handshake did not fit into the socket leaves when there is room.
void TcpTransportImpl::send_the_rest(TcpLink& link) {
  if (!link.channel || !link.socket || link.state == TcpLink::LinkState::kOpen) return;
  if (link.channel->has_unsent()) (void)link.channel->send(nullptr, 0);
  if (link.channel->has_unsent() != link.watches_write) (void)watch(link, link.channel->has_unsent());
}

void TcpTransportImpl::say(TcpLink& link, const TcpReply& reply) { say(link, encode(reply)); }

bool TcpTransportImpl::proves(const TcpLink& link, const TcpId& id) const noexcept {
  return !link.channel || (link.channel->is_open() && link.channel->peer() == id);
}

}  // namespace hybridps::transport
