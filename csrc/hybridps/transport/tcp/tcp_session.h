// hybridps/transport/tcp/tcp_session.h: the counts of both ends, so that a stream of bytes goes on over another
// connection. Internal to this room.
//
// Model    A session is one stream of bytes in each direction. Connections carry the session, one after the other.
//          Each end counts three things: the bytes that it has sent, those that the other end has confirmed, and those
//          that it has received. At the start of a connection, both ends exchange their counts of received bytes. Each
//          end goes on sending behind the other end's count. So each byte is taken once and in order, whatever the last
//          connection lost.
//          Either end may dial. Each end numbers its attempts and tells the number at each connection. Attempts up to
//          this number are void. So a greeting that comes late or twice changes nothing.
// Pure     no sockets, no clock. The owner keeps the bytes (tcp_link.h).
// Source   sequence and acknowledgment numbers as in RFC 9293 (TCP), 3.4, one layer higher.
#pragma once

#include <cstdint>

namespace hybridps::transport {

/// What an end tells when a connection begins.
struct SessionSide {
  std::uint64_t attempt = 0;   // of this end's own attempts, the latest
  std::uint64_t received = 0;  // bytes that this end has of the other's stream
};

class TcpSession {
 public:
  enum class Fit : std::uint8_t {
    kGoesOn,    // the session goes on over this connection
    kStale,     // an attempt that its own side has given up
    kOursGoes,  // both ends dial: our attempt is the one that counts, theirs comes again if ours fails
    kLost       // bytes that the other end lacks are not kept any more: the two do not fit together
  };

  void has_sent(std::uint64_t bytes) noexcept { sent_ += bytes; }
  void has_received(std::uint64_t bytes) noexcept { received_ += bytes; }
  /// The other end has told the low 32 bits of what it has. False: nobody who has our stream says that.
  bool acknowledge(std::uint32_t received_low) noexcept;

  /// This end dials: what its greeting tells.
  SessionSide begin_attempt() noexcept { return {++attempt_, received_}; }
  /// What this end's answer to a greeting tells.
  SessionSide side() const noexcept { return {attempt_, received_}; }
  /// A greeting for this session has come. `is_greeted`: our own greeting waits for its answer. `goes_first`: our
  /// attempts go before theirs; the other end must be told the opposite. After kGoesOn sent() is where to go on.
  Fit on_greeting(const SessionSide& theirs, bool is_greeted, bool goes_first) noexcept;
  /// Our greeting was answered: kGoesOn or kLost.
  Fit on_answer(const SessionSide& theirs) noexcept;

  std::uint64_t sent() const noexcept { return sent_; }
  std::uint64_t acknowledged() const noexcept { return acknowledged_; }
  std::uint64_t received() const noexcept { return received_; }

 private:
  bool fits(const SessionSide& theirs) const noexcept {
    return theirs.received >= acknowledged_ && theirs.received <= sent_;
  }
  void go_on(const SessionSide& theirs) noexcept;

  std::uint64_t sent_ = 0;
  std::uint64_t acknowledged_ = 0;
  std::uint64_t received_ = 0;
  std::uint64_t attempt_ = 0;
  std::uint64_t their_attempt_ = 0;
};

}  // namespace hybridps::transport
