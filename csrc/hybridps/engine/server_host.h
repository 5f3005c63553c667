// hybridps/engine/server_host.h: a dedicated server: a door, and engines that sum for whoever comes through it.
//
// Model    Each of `threads` shards is an engine of its own (its own UCX workers, pool and thread); a job sees them as
//          so many servers behind one card. Jobs share nothing but memory and the card.
// Memory   a quarter of memory_bytes is what engines may send unasked, divided by what each is allowed, of those that push
//          here, one of each node: a job that would go beyond is refused. A quarter is the send pool. What is granted on
//          top is bounded by the window (HYBRIDPS_WINDOW_BYTES).
// Threads  any thread may call; one thread per shard, one for the door.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/door/door.h"

namespace hybridps::engine {

struct ServerHostOptions {
  door::Address listen;
  std::string token;
  int threads = 1;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  /// A line for whoever looks after the server: a job's group was opened, closed or refused. From threads of its own,
  /// one at a time. Unset: nobody.
  std::function<void(const std::string&)> say;
};

struct ServerHostStats {
  std::uint64_t groups = 0;
  std::uint64_t groups_total = 0;
  std::uint64_t engines = 0;  // processes in the groups that are open
  std::uint64_t chunks = 0;
  std::uint64_t bytes_summed = 0;
  std::uint64_t rx_payload_bytes = 0;
  std::uint64_t tx_payload_bytes = 0;
  std::uint64_t refused_messages = 0;
  std::uint64_t door_accepted = 0;
  std::uint64_t door_refused = 0;
};

class ServerHost : core::Pinned {
 public:
  /// Listens when it returns. The environment's HYBRIDPS_* settings hold where they mean something for a server.
  static core::Result<std::unique_ptr<ServerHost>> start(ServerHostOptions options, const core::Config& config);
  virtual ~ServerHost() = default;

  virtual int port() const = 0;
  /// Refuses new groups from now on.
  virtual void drain() = 0;
  virtual ServerHostStats stats() const = 0;
  /// Tells the members of all groups that this server goes, and waits a moment for it to reach them. They go on without it.
  virtual void dismiss(const std::string& why) = 0;
};

}  // namespace hybridps::engine
