// hybridps/transport/endpoint.h: one reliable, unordered message path to one peer.
//
// Owner    the Transport that opened it; no Endpoint outlives its Transport.
// Threads  progress thread only, for calls and completions; no locks inside.
// Units    lengths in bytes. Deadlines belong to the engine: only the engine gives a verdict on a late peer.
// Errors   returned as Status, never thrown.
// Source   completion rules, and no promise of order: ucp_am_send_nbx in UCX's ucp.h.
#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "hybridps/core/ids.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/transport/buffer_pool.h"

namespace hybridps::transport {

/// Largest header of a message, bytes.
inline constexpr std::size_t kHeaderBytesMax = 192;

/// Part of the cause with which an endpoint fails if a checksum was wrong.
inline constexpr std::string_view kChangedOnTheWay = "changed on the way, as their CRC32C shows";
/// Cause text of a kPeerDead if the kernel reports the end of the other process. Every transport uses the same text,
/// because different ranks may see the end on different transports.
inline constexpr std::string_view kEndedWithoutClosing = "it ended without goodbye (killed or crashed)";

/// Runs exactly once per accepted send: on the progress thread, never inside send(). kOk means that the transport no
/// longer uses the payload, not that the peer has read it (over shared memory the two are the same).
using SendDone = core::OnceFn<void(core::Status)>;

class Endpoint : core::Pinned {
 public:
  virtual ~Endpoint() = default;

  /// Queues one message. The caller's credits bound how many messages may be queued.
  ///   header         shape [1..kHeaderBytesMax], bytes; copied before return.
  ///   payload        its first payload_bytes bytes are sent; empty when payload_bytes is 0. Kept alive and read in
  ///                  place until `done` runs. The memory of its pool, or the lent memory, must have been attached
  ///                  to this Transport.
  ///   done           may be empty.
  /// kOk: accepted. kClosed or kPeerDead: not accepted; the Status has the first cause, and `done` never runs.
  virtual core::Status send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                            SendDone done) = 0;

  virtual core::EngineId peer() const noexcept = 0;

  /// Idempotent; returns at once. Each pending `done` gets `cause` once the transport no longer uses its payload.
  virtual void close(core::Status cause) noexcept = 0;
};

}  // namespace hybridps::transport
