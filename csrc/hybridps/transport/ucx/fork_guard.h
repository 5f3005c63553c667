// hybridps/transport/ucx/fork_guard.h: keeps UCX's sockets out of child processes.
//
// Why      UCX's sockets are inherited. While a forked child lives (a DataLoader worker), the kernel keeps its killed
//          parent's connections open, and no peer sees a reset. A connect to the dead parent even succeeds.
// How      The worker's event descriptor is an epoll set of epoll sets of exactly the connected sockets.
//          /proc/self/fdinfo lists what a set holds, so nothing is guessed. Before a fork the sockets are recorded with
//          their inodes. The child closes the sockets that still match. exec without fork handlers (posix_spawn, vfork)
//          is covered by close-on-exec, set by refresh(). Without /proc, the fork handlers and refresh() do nothing.
// Threads  any; fork handlers take one process-wide lock.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <span>
#include <vector>

#include "hybridps/core/pinned.h"

namespace hybridps::transport {

/// Whether this process was forked from one that had used UCX. UCX's own threads are missing here then.
bool ucx_inherited_by_fork() noexcept;

/// Open file descriptors of this process, ascending; empty without /proc.
std::vector<int> open_descriptors();
/// Listening sockets that are not in `before` and have a port that occurs in `address`, in network byte order. UCX
/// packs the port into its address.
std::vector<int> listening_sockets_since(std::span<const int> before, std::span<const std::byte> address);

/// One per UCX worker, for the worker's lifetime.
class ForkGuard : core::Pinned {
 public:
  struct GuardedSocket {
    int fd = -1;
    ino_t inode = 0;
  };

  /// `event_fd` of the worker; -1: no connected sockets to guard. `listening`: the worker's listening sockets.
  ForkGuard(int event_fd, std::span<const int> listening);
  ~ForkGuard();

  /// Sets close-on-exec on the sockets of this worker; some 20 us. Call it now and then: UCX adds sockets at any time.
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
