// hybridps/transport/ucx/fork_guard.h: keeps UCX's sockets out of child processes.
//
// Why      UCX's sockets are inherited. While a forked child lives (a DataLoader worker), the kernel keeps
// its killed
//          parent's connections open and no peer sees a reset; a connect to the dead parent even succeeds.
// How      The worker's event descriptor is an epoll set of epoll sets of exactly the connected sockets, and
//          /proc/self/fdinfo lists what a set holds. So nothing is guessed: before a fork the sockets are
//          written down with their inodes, the child closes those that still match. exec without fork
//          handlers (posix_spawn, vfork) is covered by close-on-exec, set by refresh(). Without /proc both do
//          nothing.
// Threads  any; fork handlers take one process-wide lock.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "hybridps/core/pinned.h"

namespace hybridps::transport {

/// Whether this is a forked child of a process that had used UCX: UCX's own threads are missing here.
bool ucx_inherited_by_fork() noexcept;

/// Open file descriptors of this process, ascending; empty without /proc.
std::vector<int> open_descriptors();
/// Sockets that were not among `before`, listen, and whose port occurs in `address`, network byte order: UCX
/// packs it.
std::vector<int> listening_sockets_since(std::span<const int> before, std::span<const std::byte> address);

/// One per UCX worker, for as long as it lives.
class ForkGuard : core::Pinned {
 public:
  struct GuardedSocket {
    int fd = -1;
    ino_t inode = 0;
  };

  /// `event_fd` of the worker; -1: nothing to guard.
  ForkGuard(int event_fd, std::span<const int> listening);
  ~ForkGuard();

  /// Sets close-on-exec on the sockets of this worker; some 20 us. Call now and then: UCX makes them when it
  /// likes.
  void refresh() noexcept;
  /// The sockets of this worker as they are now.
  std::vector<GuardedSocket> sockets() const;

 private:
  friend struct ForkHandlers;
  const int event_fd_;
  std::vector<GuardedSocket> listening_;
  std::vector<GuardedSocket> at_fork_;
};

}  // namespace hybridps::transport
