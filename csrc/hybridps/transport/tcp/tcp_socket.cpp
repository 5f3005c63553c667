#include "hybridps/transport/tcp/tcp_socket.h"

#include <linux/tcp.h>  // glibc's tcp_info ends earlier
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstddef>
#include <cstring>
#include <fstream>

namespace hybridps::transport {

bool is_lack(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS || error == ENOSPC;
}

core::Status socket_error(const std::string& what, int error) {
  std::string hint;
  if (rlimit limit{}; error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    hint = "; too few file descriptors: all " + std::to_string(limit.rlim_cur) + " are in use; raise `ulimit -n`";
  if (error == ENFILE) hint = "; too few file descriptors: all of this machine are in use; raise fs.file-max";
  return {is_lack(error) ? core::Code::kOutOfResources : core::Code::kInvalidArgument,
          what + ": " + std::strerror(error) + hint};
}

core::Descriptor make_socket(int family) {
  const core::ForkLock lock;
  return {lock, ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
}

bool read_path(int socket, PathInfo& path) {
  tcp_info info{};
  socklen_t length = sizeof info;
  if (::getsockopt(socket, IPPROTO_TCP, TCP_INFO, &info, &length) != 0) return false;
  path.rtt_seconds = info.tcpi_rtt * 1e-6;
  path.retransmits = info.tcpi_total_retrans;
  if (length < offsetof(tcp_info, tcpi_delivery_rate) + sizeof info.tcpi_delivery_rate) return true;  // an older kernel
  constexpr std::uint32_t kNone = ~std::uint32_t{0};
  path.min_rtt_seconds = info.tcpi_min_rtt == kNone ? 0 : info.tcpi_min_rtt * 1e-6;
  path.bytes_per_second = static_cast<double>(info.tcpi_delivery_rate);
  path.busy_seconds = static_cast<double>(info.tcpi_busy_time) * 1e-6;  // 0 from a kernel that does not count it
  return true;
}

SendBufferLimits send_buffer_limits() {
  SendBufferLimits found;
  std::ifstream file("/proc/sys/net/ipv4/tcp_wmem");
  std::uint64_t least = 0;
  std::uint64_t usual = 0;
  const core::Descriptor socket = make_socket(AF_INET);
  int size = INT_MAX / 2;
  socklen_t length = sizeof size;
  if (!(file >> least >> usual >> found.own) || !socket ||
      ::setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &size, sizeof size) != 0 ||
      ::getsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &size, &length) != 0)
    return {};
  found.asked = static_cast<std::uint64_t>(size);
  return found;
}

void make_send_room(int socket, const PathInfo& path, const SendBufferLimits& limits) {
  // Congestion control may have twice what the path holds under way, and as much again may leave while a lost packet is
  // sent a second time. The kernel counts about twice the bytes.
  constexpr double kOfHeld = 8;
  const auto wanted = static_cast<std::uint64_t>(
      std::min(kOfHeld * path.bytes_per_second * path.min_rtt_seconds, static_cast<double>(limits.asked)));
  if (wanted <= limits.own) return;  // SO_SNDBUF would end the kernel's own choice
  int size = 0;
  socklen_t length = sizeof size;
  if (::getsockopt(socket, SOL_SOCKET, SO_SNDBUF, &size, &length) != 0) return;
  if (4 * wanted <= 5 * static_cast<std::uint64_t>(size)) return;  // rates are never still
  size = static_cast<int>(wanted / 2);                             // the kernel doubles it
  (void)::setsockopt(socket, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
}

}  // namespace hybridps::transport
