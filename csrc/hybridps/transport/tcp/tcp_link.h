// hybridps/transport/tcp/tcp_link.h: one TCP connection: what waits to be sent, and the message that is coming in.
// Internal to this room.
//
//   dialled:   kConnecting ──> kGreeted ──its answer──> kOpen ──┐
//                ^  │             │ lost before an answer,        │
//                │  v             v no descriptors, "come again"  │
//              kWaiting <─────────┘                               │
//   accepted:  kGreeting ─────────────────────────────> kOpen ────┴──> kClosed
//
// Two sides that dial each other at once have two connections: each sends on its own, both read both.
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
  TcpId peer{};                     // of the other transport; not known while it has not greeted
  TcpEndpoint* endpoint = nullptr;  // whose failure its end is
  core::Deadline greeting_due;
  // Of one that was dialled.
  SocketAddress there;
  core::TimePoint dial_at{};  // kWaiting: again then
  core::Deadline dial_until;  // once it was lost before an answer
  int losses = 0;             // before an answer
  bool lacks = false;         // it was for descriptors, here or there, that it had to wait

  bool is_lacking(core::TimePoint now) const noexcept {
    return lacks && state != LinkState::kOpen && (state == LinkState::kWaiting || now < dial_at + std::chrono::seconds(1));
  }
  std::string to;  // "10.0.0.2:4711", for errors

  std::deque<TcpSend*> queue;
  std::size_t front_sent = 0;  // bytes of the front that have left
  bool watches_write = false;
  bool is_listed = false;  // among those with something to send
  int error = 0;           // of the last attempt to send: nothing more leaves

  // What has been read: a message in parts. Small ones come many at a time, so does the beginning of the next large one;
  // the rest of a payload is received in place.
  static constexpr std::size_t kReadAheadBytes = 4096;
  std::array<std::byte, kReadAheadBytes> read_ahead;
  std::size_t begin = 0;
  std::size_t end = 0;
  RxSlot* slot = nullptr;  // of the payload that is coming in
  std::size_t payload_bytes = 0;
  std::size_t payload_have = 0;
  std::size_t header_bytes = 0;
  std::array<std::byte, kHeaderBytesMax> header;
};

}  // namespace hybridps::transport
