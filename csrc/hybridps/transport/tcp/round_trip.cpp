#include "hybridps/transport/tcp/round_trip.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <utility>

#include "hybridps/transport/tcp/tcp_socket.h"

namespace hybridps::transport {

RoundTrip::RoundTrip(SocketAddress to, core::TimePoint now) : to_(to), give_up_at_(now + kGiveUpAfter) { open(); }

void RoundTrip::open() {
  core::Descriptor socket = make_socket(to_.name.ss_family);
  if (!socket) return;
  if (::connect(socket.get(), to_.get(), to_.bytes) == 0 || errno == EINPROGRESS) sockets_.push_back(std::move(socket));
}

std::optional<std::uint32_t> RoundTrip::step(core::TimePoint now) {
  for (std::size_t i = 0; i < sockets_.size();) {
    pollfd ready{sockets_[i].get(), POLLOUT, 0};
    if (::poll(&ready, 1, 0) == 0) {
      ++i;
      continue;
    }
    int error = 0;
    socklen_t length = sizeof error;
    PathInfo path;
    if (::getsockopt(sockets_[i].get(), SOL_SOCKET, SO_ERROR, &error, &length) == 0 && error == 0 &&
        read_path(sockets_[i].get(), path) && path.rtt_seconds > 0) {
      const auto us = static_cast<std::uint32_t>(std::lround(std::max(path.rtt_seconds * 1e6, 1.0)));
      shortest_ = shortest_ == 0 ? us : std::min(shortest_, us);
    }
    sockets_.erase(sockets_.begin() + static_cast<std::ptrdiff_t>(i));
  }
  if (shortest_ > kLongUs && !std::exchange(asked_again_, true))
    for (int i = 0; i < kAgain; ++i) open();
  if (!sockets_.empty() && now < give_up_at_) return std::nullopt;
  sockets_.clear();
  return shortest_;
}

}  // namespace hybridps::transport
