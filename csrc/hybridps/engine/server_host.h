// hybridps/engine/server_host.h: a dedicated server: an admission server, and engines that sum for its jobs.
//
// Model    Each of `threads` shards is an engine of its own with its own transports, pool and thread. A job sees the
//          shards as separate servers behind one card. Jobs share only memory and the card.
// Memory   memory_bytes is divided equally among the shards. A quarter holds the bytes that ranks may send unasked: one
//          rank of each node pushes, and each may send its allowance (eager_bytes). A job that needs more is refused.
//          At least a quarter is the send pool. A quarter may hold codec residuals, and a quarter the momentum of
//          outer steps. On top come granted chunks, bounded by window_bytes, and the state of groups and
//          operations, bounded by a quarter of memory_bytes, or 16 MiB for each engine and job if that is more.
// Jobs     With `jobs` set, each job has an equal part of all these, and only its own. Groups that share a process
//          belong to one job. Without `jobs`, all jobs share all parts.
// Threads  any thread may call; one thread per shard, one for the admission server.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/config.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/admission/admission_server.h"

namespace hybridps::engine {

struct ServerHostOptions {
  admission::Address listen;
  admission::Secret secret;
  int threads = 1;
  std::uint64_t memory_bytes = std::uint64_t{1} << 30;
  int jobs = 0;  // the most jobs at a time, each with an equal part of the memory; 0: any number, without parts
  /// Gets a line of text for the server's operator: a job's group was opened, closed or refused. Called from the
  /// server's own threads, one line at a time. Unset: no lines.
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
  std::uint64_t admission_accepted = 0;
  std::uint64_t admission_refused = 0;
};

class ServerHost : core::Pinned {
 public:
  /// The server listens when start() returns. `config`: the HYBRIDPS_* settings, as far as they apply to a server.
  static core::Result<std::unique_ptr<ServerHost>> start(ServerHostOptions options, const core::Config& config);
  virtual ~ServerHost() = default;

  virtual int port() const = 0;
  /// Refuses new groups from now on.
  virtual void drain() = 0;
  virtual ServerHostStats stats() const = 0;
  /// Tells the members of all groups that this server stops. Waits for the groups to let the server go, about 4 s at
  /// most. The groups go on without the server.
  virtual void dismiss(const std::string& why) = 0;
};

}  // namespace hybridps::engine
