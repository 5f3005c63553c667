// hybridps/transport/loopback/loopback_transport.h: a Transport between engines of one process, for tests.
//
// Model    A LoopbackHub connects LoopbackTransports by EngineId. send() queues the message at the receiver. The
//          receiver's progress() copies the payload to the heap and delivers the copy. `done` runs in the sender's
//          progress(), after the receiver gave the copy back (or see Done). So ASan detects a late use of the payload.
//          The hub counts payloads that were changed before their `done`. Device memory can be attached if the hub can
//          read it.
// Threads  one thread for each transport; transports of one hub may live on different threads. With one thread the run
//          is deterministic: first in, first out.
// Failure  destroying a transport, Endpoint::close() and LoopbackHub::kill() look like a reset to the other side. The
//          reset arrives after the messages that were queued before. kill() drops these messages.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/transport.h"

namespace hybridps::transport {

/// Thread-safe. The transports share the hub's state and keep the state alive.
class LoopbackHub : core::Pinned {
 public:
  struct HubState;

  /// When a sender's `done` runs. kReleased: when the receiver gave the payload back, as over shared memory.
  /// kDelivered: when the payload has arrived, as over a network.
  enum class Done { kReleased, kDelivered };

  /// Maps an address in a device's memory to an address that this process can read.
  using DeviceView = const std::byte* (*)(const std::byte* address);

  explicit LoopbackHub(Done done = Done::kReleased, DeviceView view = nullptr);
  ~LoopbackHub();

  /// A transport that the others know as `self`. `self` must be new to this hub.
  std::unique_ptr<Transport> make_transport(core::EngineId self);

  /// Acts as if the process of `victim` died. Queued messages from and to `victim` are lost. The victim's transport
  /// does nothing any more. Every endpoint to `victim` fails at the next progress() of the endpoint's owner.
  void kill(core::EngineId victim);

  /// Payloads that their sender changed before `done` ran: a bug of the sender.
  std::uint64_t payloads_changed_early() const;
  /// Received payloads that were not given back yet.
  std::uint64_t payloads_lent() const;

 private:
  std::shared_ptr<HubState> state_;
};

}  // namespace hybridps::transport
