#include "hybridps/transport/tcp/tcp_socket.h"

#include <sys/resource.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>

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

}  // namespace hybridps::transport
