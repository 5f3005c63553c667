// hybridps/engine/peers.h: the engines that this engine knows, and the connections to them.
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
#include "hybridps/engine/evidence.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/schedule/far_window.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/transport/transport.h"

namespace hybridps::engine {

struct PeerRecord {
  core::EngineId engine;
  bool local = false;  // shared memory with this peer is proven
  std::vector<std::byte> data_address;
  std::vector<std::byte> control_address;
  std::vector<std::byte> shm_address;
  std::string where;              // "host7 pid 4121", for messages
  std::uint64_t eager_bytes = 0;  // the peer's allowance for us
  std::uint64_t far_bytes = 0;    // that allowance over a path of long delay
};

/// The transports of one engine. shm may be absent. If control is absent, control messages go over data.
struct Transports {
  std::unique_ptr<transport::Transport> data;
  std::unique_ptr<transport::Transport> control;
  std::unique_ptr<transport::Transport> shm;
  /// Wrong checksums that came by `data` and `control`. Null: they have none.
  std::shared_ptr<const std::atomic<std::uint64_t>> damaged;
};

struct KnownPeer {
  PeerRecord record;
  bool dead = false;
  std::uint64_t groups = 0;
  bool was_in_group = false;
  core::TimePoint unused_since{};  // when `groups` became 0, or when the peer became known
  core::TimePoint heard_at{};
  bool control_stood = false;  // there was a control connection
  core::TimePoint dials_control_at{};
  double round_trip_seconds = 0;  // of the last ping or status question; 0: not known
  schedule::FarWindow far;
};

/// The ranks of other nodes that this rank dials when a group starts. Between each two nodes two ranks dial each other,
/// for perhaps only one of the two hosts can be dialled; either connection serves both.
std::vector<int> ranks_to_dial(const schedule::Topology& topology);

class Peers {
 public:
  struct Allowance {
    std::uint64_t eager_bytes = 0;   // our allowance for each peer
    bool urgent_by_control = false;  // as in RuntimeOptions
  };
  /// `transports` may change until the first connection.
  Peers(const Transports& transports, Allowance allowance) : transports_(transports), allowance_(allowance) {}

  /// A peer that is known already keeps its record.
  void add(PeerRecord record);
  /// Null: the peer is not known.
  KnownPeer* find(core::EngineId id) noexcept;
  const KnownPeer* find(core::EngineId id) const noexcept;
  bool knows(core::EngineId id) const { return peers_.count(id) > 0; }
  std::size_t size() const noexcept { return peers_.size(); }
  const std::unordered_map<core::EngineId, KnownPeer>& all() const noexcept { return peers_; }

  void enter_group(KnownPeer& peer) noexcept {
    ++peer.groups;
    peer.was_in_group = true;
  }
  /// Peers in open groups that are not known to be dead.
  std::vector<core::EngineId> in_use() const;
  std::string where(core::EngineId id) const;
  /// Seconds since the peer's last message; less than 0: none yet.
  double seconds_since_heard(core::EngineId id) const;
  /// The facts that flow needs. For an unknown peer: default values.
  flow::Peer describe(core::EngineId id) const;

  core::Result<transport::Endpoint*> connect(core::EngineId id);
  /// The connection for small operations: see flow::Router.
  core::Result<transport::Endpoint*> connect_urgent(core::EngineId id);
  /// Closes all connections to the peer, and does not wait for unsent messages.
  void close_connections(core::EngineId id, const core::Status& cause);
  /// Whether data's connection serves for control, too: control's has never stood, and data's stands or is being made.
  bool serves_for_control(core::EngineId id) const;
  Evidence::PeerFacts facts_of(core::EngineId id) const;
  /// Forgets peers without a connection that have had no group for a minute: with `all` every such peer, else only dead
  /// ones and those that never had a group. Returns the forgotten peers. Never closes a connection: the other side
  /// could not tell that from our death. A connection ends with the other process.
  std::vector<core::EngineId> forget_unused(core::TimePoint now, bool all);

 private:
  const Transports& transports_;
  const Allowance allowance_;
  std::unordered_map<core::EngineId, KnownPeer> peers_;
};

}  // namespace hybridps::engine
