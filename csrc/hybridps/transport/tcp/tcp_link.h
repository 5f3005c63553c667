// hybridps/transport/tcp/tcp_link.h: a session with a peer, and the connection that carries it now. Internal to this
// room.
//
//   dialled:   kConnecting ──> kGreeted ──its answer──> kOpen ──────────────────────┐
//                ^  │             │ lost, no descriptors,  │ its connection broke    │ farewell, end of the process,
//                │  v             v "come again"           v                         v too late
//              kWaiting <─────────┴────────────────────────┘                      kClosed
//   accepted:  kGreeting ─────────────────────────────> kOpen, or its connection goes to the session that it is for
//
// If two sides dial each other at once, the session of the lower id stays. The other side moves its messages there.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/tls/channel.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/rx_pool.h"
#include "hybridps/transport/tcp/tcp_session.h"
#include "hybridps/transport/tcp/tcp_wire.h"

namespace hybridps::transport {

class TcpEndpoint;

/// One frame with its message, from send() until the peer has told that it has it; recycled.
struct TcpSend {
  Buffer payload;
  std::vector<std::byte> copy;  // of a small payload that has left: its buffer is free already
  std::size_t payload_bytes = 0;
  SendDone done;
  bool is_stamped = false;     // the frame tells what has come; its bytes stay as they are
  std::size_t head_bytes = 0;  // frame, with its sums if there are any, and header
  std::array<std::byte, kFrameBytes + kSumsBytes + kHeaderBytesMax> head;

  std::size_t bytes() const noexcept { return head_bytes + payload_bytes; }
  std::byte* data() noexcept { return payload ? payload.data() : copy.data(); }
};

struct TcpLink : core::Pinned {
  enum class LinkState : std::uint8_t { kWaiting, kConnecting, kGreeted, kGreeting, kOpen, kClosed };

  LinkState state = LinkState::kConnecting;
  core::Descriptor socket;
  std::unique_ptr<tls::TlsChannel> channel;  // over the socket; null: bytes go as they are
  TcpId peer{};                              // id of the other transport; unknown until it has greeted
  core::EngineId name;                       // of the engine that `peer` belongs to; else a number that stands for it
  TcpEndpoint* endpoint = nullptr;           // the endpoint that fails if this session ends
  core::Deadline greeting_due;
  std::string to;  // "10.0.0.2:4711", for errors

  // The session
  TcpSession session;
  std::uint32_t number = 0;
  bool is_mine = false;      // this side has begun it
  bool was_reached = false;  // the peer's host has taken a connection for it
  bool was_open = false;     // it had a connection that was answered
  std::uint64_t resumptions = 0;
  bool said_farewell = false;  // the peer has closed its endpoint: the end of this connection is the end

  // How it gets a connection
  SocketAddress there;              // empty: only the peer can dial
  core::TimePoint dial_at{};        // kWaiting: time of the next attempt
  core::Deadline attempt_due;       // kConnecting, kGreeted: when this attempt is given up
  core::Deadline dial_until;        // when the session is given up, since the first loss
  core::TimePoint dialled_first{};  // of a session that this side has begun
  core::TimePoint lost_first{};     // of this row of losses
  core::TimePoint refused_first{};
  core::TimePoint lost_at{};  // when the last connection that stood broke
  std::string why;            // it broke
  int losses = 0;             // in a row, without progress between them
  bool was_closed = false;    // the peer's own kernel had closed it
  int cuts = 0;               // in a row, in the middle of a TLS handshake
  core::TimePoint met_at{};   // of a session that the peer has begun
  bool lacks = false;         // the wait is for descriptors, of this process or of the peer
  // The session's counts when this connection began.
  std::uint64_t acknowledged_before = 0;
  std::uint64_t received_before = 0;
  bool needs_small_packets = false;  // what fills packets does not arrive, and what does not, does

  bool is_lacking(core::TimePoint now) const noexcept {
    return lacks && state != LinkState::kOpen &&
           (state == LinkState::kWaiting || now < dial_at + std::chrono::seconds(1));
  }

  std::deque<TcpSend*> kept;     // have left, and the peer has not told that it has them
  std::uint64_t kept_from = 0;   // where in our stream the front of `kept` begins; if there is none, that of `queue`
  std::deque<TcpSend*> queue;    // not yet, or not all of it
  std::size_t front_sent = 0;    // bytes of the front of `queue` that have left
  std::size_t untold_bytes = 0;  // of messages that have come since a frame told so
  bool watches_write = false;
  core::TimePoint makes_room_at{};
  bool is_listed = false;  // in the transport's listed_
  bool is_unread = false;  // in the transport's unread_
  int error = 0;           // errno of the last attempt to send: nothing more leaves

  // A greeting or an answer, as far as it has come.
  std::array<std::byte, kGreetingBytes> hello;
  std::size_t hello_have = 0;

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
  std::uint32_t body_sum = 0;  // that the frame tells of header and payload
  std::array<std::byte, kHeaderBytesMax> header;
};

}  // namespace hybridps::transport
