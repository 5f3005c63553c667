// hybridps/transport/tcp/tcp_link.h: one TCP connection: its send queue and the message that it receives.
// Internal to this room.
//
//   dialled:   kConnecting ──> kGreeted ──its answer──> kOpen ──┐
//                ^  │             │ lost before an answer,        │
//                │  v             v no descriptors, "come again"  │
//              kWaiting <─────────┘                               │
//   accepted:  kGreeting ─────────────────────────────> kOpen ────┴──> kClosed
//
// If two sides dial each other at once, there are two connections. Each side sends on the connection that it dialled.
// Both sides read both connections.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>

#include "hybridps/core/clock.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/pinned.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/rx_pool.h"
#include "hybridps/transport/tcp/tcp_wire.h"

namespace hybridps::transport {

class TcpEndpoint;

/// One accepted send, from send() until its `done` has run; recycled.
struct TcpSend {
  TcpEndpoint* endpoint = nullptr;
  Buffer payload;
  std::size_t payload_bytes = 0;
  SendDone done;
  std::size_t head_bytes = 0;  // frame and header
  std::array<std::byte, kFrameBytes + kHeaderBytesMax> head;
};

struct TcpLink : core::Pinned {
  enum class LinkState : std::uint8_t { kWaiting, kConnecting, kGreeted, kGreeting, kOpen, kClosed };

  LinkState state = LinkState::kConnecting;
  core::Descriptor socket;
  TcpId peer{};                     // id of the other transport; unknown until it has greeted
  TcpEndpoint* endpoint = nullptr;  // the endpoint that fails if this connection ends
  core::Deadline greeting_due;
  // Only for a dialled connection.
  SocketAddress there;
  core::TimePoint dial_at{};  // kWaiting: time of the next attempt
  core::Deadline dial_until;  // limit for retries after the first loss before an answer
  int losses = 0;             // losses before an answer
  bool lacks = false;         // the wait is for descriptors, of this process or of the peer

  bool is_lacking(core::TimePoint now) const noexcept {
    return lacks && state != LinkState::kOpen &&
           (state == LinkState::kWaiting || now < dial_at + std::chrono::seconds(1));
  }
  std::string to;  // "10.0.0.2:4711", for errors

  std::deque<TcpSend*> queue;
  std::size_t front_sent = 0;  // bytes of the front message that have left
  bool watches_write = false;
  bool is_listed = false;  // in the transport's listed_
  int error = 0;           // errno of the last attempt to send: nothing more leaves

  // Bytes that were read but not parsed. One read may bring many small messages and the beginning of a large one. The
  // rest of a large payload is received directly into its slot.
  static constexpr std::size_t kReadAheadBytes = 4096;
  std::array<std::byte, kReadAheadBytes> read_ahead;
  std::size_t begin = 0;
  std::size_t end = 0;
  RxSlot* slot = nullptr;  // slot of the incoming payload
  std::size_t payload_bytes = 0;
  std::size_t payload_have = 0;
  std::size_t header_bytes = 0;
  std::array<std::byte, kHeaderBytesMax> header;
};

}  // namespace hybridps::transport
