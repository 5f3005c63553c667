// hybridps/transport/loopback/loopback_transport.h: a Transport between engines of one process, for tests.
//
// Model    A LoopbackHub connects LoopbackTransports by EngineId. send() queues at the receiver; its
// progress()
//          copies the payload to the heap and delivers; `done` runs in the sender's progress() after the
//          receiver gave the copy back. So late use shows under ASan, and a payload that was changed before
//          its `done` is counted by the hub.
//          Device memory can be attached where the hub knows how to read it.
// Threads  each transport from one thread; transports of one hub may live on different threads. With one
// thread the
//          run is deterministic: first in, first out.
// Failure  destroying a transport, Endpoint::close() and LoopbackHub::kill() look like a reset to the other
// side,
//          behind the messages that were queued before.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/transport.h"

namespace hybridps::transport {

/// Shared by its transports, which keep it alive. Thread-safe.
class LoopbackHub : core::Pinned {
 public:
  struct HubState;

  /// When a sender's `done` runs: like shared memory's, when the receiver gave the payload back, or like a
  /// network's, when it has arrived.
  enum class Done { kReleased, kDelivered };

  /// Where this process reads what lies in a device's memory.
  using DeviceView = const std::byte* (*)(const std::byte* address);

  explicit LoopbackHub(Done done = Done::kReleased, DeviceView view = nullptr);
  ~LoopbackHub();

  /// A transport known to the others as `self`, which must be new to this hub.
  std::unique_ptr<Transport> make_transport(core::EngineId self);

  /// As if the process of `victim` died: what it queued and what was queued for it is lost, its transport
  /// does nothing any more, and every endpoint to it fails at the owner's next progress().
  void kill(core::EngineId victim);

  /// Payloads that their sender changed before `done` ran: a bug of the sender.
  std::uint64_t payloads_changed_early() const;
  /// Received payloads that were not given back yet.
  std::uint64_t payloads_lent() const;

 private:
  std::shared_ptr<HubState> state_;
};

}  // namespace hybridps::transport
