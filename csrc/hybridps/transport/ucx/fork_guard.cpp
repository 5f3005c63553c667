#include "hybridps/transport/ucx/fork_guard.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <string>

namespace hybridps::transport {

/// Process-wide, because the handlers of pthread_atfork() take no arguments.
struct ForkHandlers {
  std::mutex mutex;
  std::vector<ForkGuard*> guards;
  bool ever_used = false;
  std::atomic<bool> inherited{false};

  static ForkHandlers& get() {
    static auto* handlers = new ForkHandlers;  // never destroyed: a fork may come late
    return *handlers;
  }

  ForkHandlers() { pthread_atfork(&prepare, &in_parent, &in_child); }

  static void prepare() {
    ForkHandlers& self = get();
    self.mutex.lock();
    for (ForkGuard* guard : self.guards) guard->at_fork_ = guard->sockets();
  }
  static void in_parent() { get().mutex.unlock(); }
  /// May only make calls that are safe after a fork of a threaded process.
  static void in_child() {
    ForkHandlers& self = get();
    for (const ForkGuard* guard : self.guards) {
      for (const ForkGuard::GuardedSocket& socket : guard->at_fork_) {
        struct stat status{};
        if (fstat(socket.fd, &status) == 0 && S_ISSOCK(status.st_mode) && status.st_ino == socket.inode)
          ::close(socket.fd);
      }
    }
    // The epoll sets still hold the parent's descriptors, which mean nothing here. So the guards are dropped.
    self.guards.clear();
    if (self.ever_used) self.inherited.store(true, std::memory_order_relaxed);
    self.mutex.unlock();
  }
};

namespace {

bool socket_inode(int fd, ino_t* inode) {
  struct stat status{};
  if (fstat(fd, &status) != 0 || !S_ISSOCK(status.st_mode)) return false;
  *inode = status.st_ino;
  return true;
}

/// The descriptors in an epoll set, from lines such as "tfd:       17 events: ...".
std::vector<int> members_of(int epoll_fd) {
  std::vector<int> members;
  char path[48];
  std::snprintf(path, sizeof path, "/proc/self/fdinfo/%d", epoll_fd);
  const int file = ::open(path, O_RDONLY | O_CLOEXEC);
  if (file < 0) return members;
  std::string text;
  std::array<char, 4096> block;
  for (ssize_t got = 0; (got = ::read(file, block.data(), block.size())) > 0;)
    text.append(block.data(), static_cast<std::size_t>(got));
  ::close(file);
  for (std::size_t at = 0; at < text.size();) {
    if (text.compare(at, 4, "tfd:") == 0) members.push_back(std::atoi(text.c_str() + at + 4));
    const std::size_t end = text.find('\n', at);
    if (end == std::string::npos) break;
    at = end + 1;
  }
  return members;
}

void collect(int epoll_fd, int depth, std::vector<ForkGuard::GuardedSocket>& sockets) {
  for (const int fd : members_of(epoll_fd)) {
    ino_t inode = 0;
    if (socket_inode(fd, &inode))
      sockets.push_back({fd, inode});
    else if (depth > 0)
      collect(fd, depth - 1, sockets);
  }
}

std::uint16_t port_of_listener(int fd) {
  int listening = 0;
  socklen_t bytes = sizeof listening;
  if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listening, &bytes) != 0 || listening == 0) return 0;
  sockaddr_storage name{};
  bytes = sizeof name;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&name), &bytes) != 0) return 0;
  if (name.ss_family == AF_INET) return reinterpret_cast<const sockaddr_in*>(&name)->sin_port;
  if (name.ss_family == AF_INET6) return reinterpret_cast<const sockaddr_in6*>(&name)->sin6_port;
  return 0;
}

}  // namespace

bool ucx_inherited_by_fork() noexcept { return ForkHandlers::get().inherited.load(std::memory_order_relaxed); }

std::vector<int> open_descriptors() {
  std::vector<int> descriptors;
  DIR* directory = ::opendir("/proc/self/fd");
  if (directory == nullptr) return descriptors;
  const int own = ::dirfd(directory);
  while (const dirent* entry = ::readdir(directory)) {
    if (entry->d_name[0] == '.') continue;
    const int fd = std::atoi(entry->d_name);
    if (fd != own) descriptors.push_back(fd);
  }
  ::closedir(directory);
  std::sort(descriptors.begin(), descriptors.end());
  return descriptors;
}

std::vector<int> listening_sockets_since(std::span<const int> before, std::span<const std::byte> address) {
  std::vector<int> found;
  for (const int fd : open_descriptors()) {
    if (std::binary_search(before.begin(), before.end(), fd)) continue;
    ino_t inode = 0;
    if (!socket_inode(fd, &inode)) continue;
    const std::uint16_t port = port_of_listener(fd);
    if (port == 0) continue;
    std::array<std::byte, sizeof port> packed;
    std::memcpy(packed.data(), &port, sizeof port);
    if (std::search(address.begin(), address.end(), packed.begin(), packed.end()) != address.end()) found.push_back(fd);
  }
  return found;
}

ForkGuard::ForkGuard(int event_fd, std::span<const int> listening) : event_fd_(event_fd) {
  for (const int fd : listening) {
    ino_t inode = 0;
    if (socket_inode(fd, &inode)) listening_.push_back({fd, inode});
  }
  ForkHandlers& handlers = ForkHandlers::get();
  const std::lock_guard lock(handlers.mutex);
  handlers.guards.push_back(this);
  handlers.ever_used = true;
}

ForkGuard::~ForkGuard() {
  ForkHandlers& handlers = ForkHandlers::get();
  const std::lock_guard lock(handlers.mutex);
  std::erase(handlers.guards, this);
}

std::vector<ForkGuard::GuardedSocket> ForkGuard::sockets() const {
  std::vector<GuardedSocket> sockets = listening_;
  if (event_fd_ >= 0) collect(event_fd_, 2, sockets);
  return sockets;
}

void ForkGuard::refresh() noexcept {
  for (const GuardedSocket& socket : sockets()) {
    const int flags = ::fcntl(socket.fd, F_GETFD);
    if (flags >= 0 && (flags & FD_CLOEXEC) == 0) ::fcntl(socket.fd, F_SETFD, flags | FD_CLOEXEC);
  }
}

}  // namespace hybridps::transport
