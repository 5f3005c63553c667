// hybridps/door/messages.h: what a job and a dedicated server say at the door, without sockets.
//
//   job                                   server
//   magic | version | nonce -----------------> (44 bytes)
//   <---------------- magic | version | nonce | mac("server", nonces)
//   mac("job", nonces) | mac(body) | length | body -->
//   <------------------------------- mac(body) | length | body
//
//   magic u32, version u32, nonce 36 bytes, mac 32 bytes (HMAC-SHA256 with the token), length u32; little-endian.
//   A request's body is opaque here, an answer's is status u8 (0: ok) and bytes.
//
// Memory   of a stranger at most 112 bytes are kept; what he says is parsed no further than this picture until his mac
//          is right.
// Threads  none; a Visit belongs to one thread at a time.
// Source   challenge and response with HMAC: RFC 2104 and its use in RFC 2195; the roles in the text keep an answer
//          from being reflected.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::door {

using bootstrap::Bytes;

inline constexpr std::uint32_t kMagic = 0x64535048;  // "HPSd"
inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::size_t kNonceBytes = 36;
inline constexpr std::size_t kHelloBytes = 8 + kNonceBytes;
inline constexpr std::size_t kMacBytes = 32;
inline constexpr std::size_t kBodyBytesMax = std::size_t{64} << 20;

using Mac = std::array<std::uint8_t, kMacBytes>;

Mac mac_of(const std::string& token, std::string_view role, const std::uint8_t* job_nonce,
           const std::uint8_t* server_nonce, const Bytes& body = {});
/// In constant time; `other` has kMacBytes.
bool equal(const Mac& mac, const std::uint8_t* other);
void put_u32(Bytes& out, std::uint32_t value);
std::uint32_t get_u32(const std::uint8_t* at);
/// A first message with a fresh nonce.
core::Result<Bytes> hello();

/// Answers a request of somebody who holds the token.
using Handler = std::function<core::Result<Bytes>(const Bytes& body)>;

/// One conversation as the server has it: bytes in, bytes out.
class Visit : core::Pinned {
 public:
  /// Both must outlive it.
  Visit(const std::string& token, const Handler& handler) : token_(token), handler_(handler) {}

  /// The next bytes of the visitor, at most wanted(). False: the conversation is over, he is to be dropped.
  bool input(std::span<const std::uint8_t> bytes);
  /// How many bytes may come next; 0 once answered.
  std::size_t wanted() const noexcept { return wanted_ - in_.size(); }
  /// Everything to be sent so far; it only grows.
  const Bytes& output() const noexcept { return out_; }
  /// He holds the token.
  bool is_proven() const noexcept { return state_ == VisitState::kBody || state_ == VisitState::kAnswered; }
  bool is_answered() const noexcept { return state_ == VisitState::kAnswered; }
  /// He speaks this protocol, but has not shown that he holds the token: a job with another one, which hangs up when it
  /// sees ours.
  bool has_hung_up_at_token() const noexcept { return state_ == VisitState::kProof; }

 private:
  enum class VisitState { kHello, kProof, kBody, kAnswered };
  bool understand();

  const std::string& token_;
  const Handler& handler_;
  VisitState state_ = VisitState::kHello;
  Bytes in_;
  std::size_t wanted_ = kHelloBytes;
  Bytes out_;
  Bytes job_nonce_;
  Bytes server_nonce_;
  Mac seal_{};
};

}  // namespace hybridps::door
