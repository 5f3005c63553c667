// hybridps/engine/peers.h: the engines that this one knows, and the connections to them.
//
// Threads  one at a time.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/transport/transport.h"

namespace hybridps::engine {

struct PeerRecord {
  core::EngineId engine;
  bool local = false;  // memory proven to be shared
  std::vector<std::byte> data_address;
  std::vector<std::byte> control_address;
  std::vector<std::byte> shm_address;
  std::string where;              // "host7 pid 4121", for messages
  std::uint64_t eager_bytes = 0;  // what it allows us
};

/// The transports of one engine. shm may be absent; control may be absent (data is used then).
struct Transports {
  std::unique_ptr<transport::Transport> data;
  std::unique_ptr<transport::Transport> control;
  std::unique_ptr<transport::Transport> shm;
};

struct KnownPeer {
  PeerRecord record;
  bool dead = false;
  std::uint64_t groups = 0;
  core::TimePoint unused_since{};  // groups became 0
  core::TimePoint heard_at{};
  double round_trip_seconds = 0;  // of the last ping or question of status; 0: not known
};

class Peers {
 public:
  struct Allowance {
    std::uint64_t eager_bytes = 0;   // that we allow each of them
    bool urgent_by_control = false;  // as in RuntimeOptions
  };
  /// The transports may change until the first connection.
  Peers(const Transports& transports, Allowance allowance) : transports_(transports), allowance_(allowance) {}

  /// Nothing, where it is known already.
  void add(PeerRecord record);
  /// Null: not known.
  KnownPeer* find(core::EngineId id) noexcept;
  const KnownPeer* find(core::EngineId id) const noexcept;
  bool knows(core::EngineId id) const { return peers_.count(id) > 0; }
  std::size_t size() const noexcept { return peers_.size(); }
  const std::unordered_map<core::EngineId, KnownPeer>& all() const noexcept { return peers_; }

  /// In open groups, and not known to be dead.
  std::vector<core::EngineId> in_use() const;
  std::string where(core::EngineId id) const;
  /// Since something came from it; less than 0: nothing yet.
  double seconds_since_heard(core::EngineId id) const;
  /// What flow has to know; by default: not known.
  flow::Peer describe(core::EngineId id) const;

  core::Result<transport::Endpoint*> connect(core::EngineId id);
  /// For small operations. Null: by the usual way.
  core::Result<transport::Endpoint*> connect_urgent(core::EngineId id);
  /// Nothing waits for what it does not take.
  void close_connections(core::EngineId id, const core::Status& cause);
  /// A connection to it waits for a file descriptor.
  bool lacks_descriptors(core::EngineId id) const;
  /// Those without a group and without a connection for a minute: `all`, or only those that are dead. A connection is never closed
  /// from here, since the other side could not tell that from our death; it ends with the other process.
  std::vector<core::EngineId> forget_unused(core::TimePoint now, bool all);

 private:
  const Transports& transports_;
  const Allowance allowance_;
  std::unordered_map<core::EngineId, KnownPeer> peers_;
};

}  // namespace hybridps::engine
