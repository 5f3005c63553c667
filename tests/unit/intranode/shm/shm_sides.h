// tests/unit/intranode/shm/shm_sides.h: shared memory transports for the tests of this folder.
#pragma once

#include <dirent.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "hybridps/intranode/shm/shm_transport.h"
#include "tests/unit/transport/endpoint_contract.h"

namespace hybridps::intranode::shm {

using transport::contract::Side;

/// Makes side.transport, its pool, and attaches them.
inline ShmTransport& open_side(Side& side, ShmOptions options = {}) {
  options.self = side.id;
  if (options.pool_bytes == ShmOptions{}.pool_bytes) options.pool_bytes = transport::contract::kPoolBytes;
  auto made = ShmTransport::create(options);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  ShmTransport& shm = *made.value();
  side.context = shm.keep_pool_memory();
  if (!shm.pool_memory().empty()) {
    side.use_memory(shm.pool_memory());
    REQUIRE(shm.attach(side.memory).is_ok());
  }
  side.transport = std::move(made).value();
  side.transport->set_receiver(&side.receiver);
  return shm;
}

inline ShmTransport& shm_of(Side& side) { return static_cast<ShmTransport&>(*side.transport); }

inline transport::Endpoint* link(Side& from, core::EngineId to, std::span<const std::byte> address) {
  auto endpoint = from.transport->connect(to, address);
  INFO(endpoint.status().to_string());
  REQUIRE(endpoint.is_ok());
  return endpoint.value();
}

inline double seconds_since(std::chrono::steady_clock::time_point start) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Progress of all sides until the condition holds.
inline bool run_until(std::initializer_list<Side*> sides, const std::function<bool()>& condition, double seconds = 20) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    for (Side* side : sides) side->progress();
    if (seconds_since(start) > seconds) return condition();
  }
  return true;
}

/// Sleeps as an engine does: progress, arm, poll. False: nothing came in time.
inline bool sleep_until(Side& side, const std::function<bool()>& condition, double seconds) {
  const auto start = std::chrono::steady_clock::now();
  while (!condition()) {
    if (seconds_since(start) > seconds) return false;
    if (side.progress() > 0 || !side.transport->arm()) continue;
    pollfd event{side.transport->event_fd(), POLLIN, 0};
    ::poll(&event, 1, 100);
  }
  return true;
}

/// Names in the folder that begin so.
inline std::size_t entries_of(const char* folder, std::string_view prefix = {}) {
  std::size_t count = 0;
  if (DIR* dir = ::opendir(folder)) {
    while (const dirent* entry = ::readdir(dir)) count += std::string_view(entry->d_name).starts_with(prefix);
    ::closedir(dir);
  }
  return count;
}
inline std::size_t open_descriptors() { return entries_of("/proc/self/fd"); }
/// Of segments, and not of other programs.
inline std::size_t segment_names() { return entries_of("/dev/shm", "hybridps-"); }

/// A forked process that runs `body` and ends with its result; `channel` reaches it. Fork before making
/// transports.
class Process {
 public:
  explicit Process(const std::function<int(int channel)>& body) {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    pid_ = ::fork();
    REQUIRE(pid_ >= 0);
    if (pid_ == 0) {
      ::close(ends[0]);
      int code = 99;
      try {
        code = body(ends[1]);
      } catch (...) {
      }
      ::_exit(code);
    }
    ::close(ends[1]);
    channel_ = ends[0];
  }
  ~Process() {
    if (pid_ > 0) {
      kill(SIGKILL);
      wait();
    }
    ::close(channel_);
  }
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  int channel() const { return channel_; }
  pid_t pid() const { return pid_; }
  void kill(int signal) { ::kill(pid_, signal); }
  /// Exit code, or minus the signal.
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }

 private:
  pid_t pid_ = -1;
  int channel_ = -1;
};

/// An engine's id and address over a channel.
inline bool tell(int channel, core::EngineId id, const std::vector<std::byte>& address) {
  std::vector<std::byte> bytes(sizeof id.value);
  std::memcpy(bytes.data(), &id.value, sizeof id.value);
  bytes.insert(bytes.end(), address.begin(), address.end());
  return ::send(channel, bytes.data(), bytes.size(), MSG_NOSIGNAL) == static_cast<ssize_t>(bytes.size());
}
inline std::pair<core::EngineId, std::vector<std::byte>> hear(int channel) {
  std::vector<std::byte> bytes(1024);
  const ssize_t got = ::recv(channel, bytes.data(), bytes.size(), 0);
  core::EngineId id;
  if (got < static_cast<ssize_t>(sizeof id.value)) return {};
  std::memcpy(&id.value, bytes.data(), sizeof id.value);
  bytes.resize(static_cast<std::size_t>(got));
  bytes.erase(bytes.begin(), bytes.begin() + sizeof id.value);
  return {id, bytes};
}
/// One byte each way, to order steps of two processes.
inline void signal_step(int channel) { static_cast<void>(!::send(channel, "s", 1, MSG_NOSIGNAL)); }
inline bool await_step(int channel) {
  char byte;
  return ::recv(channel, &byte, 1, 0) == 1;
}

}  // namespace hybridps::intranode::shm
