// hybridps/admission/messages.h: what a job and a dedicated server say at the admission server, without sockets.
//
//   job                                   server
//   magic | version | nonce -----------------> (44 bytes)
//   <---------------- magic | version | nonce | mac("server", nonces) twice: with each token that it takes
//   mac("job", nonces) | mac(body) | length | body -->
//   <------------------------------- mac(body) | length | body
//
//   With HYBRIDPS_SECURITY=tls the job knocks first (tls/knock.h), and all that follows goes in TLS.
//
//   magic u32, version u32, nonce 36 bytes, mac 32 bytes (HMAC-SHA256 with the token), length u32; little-endian.
//   A request's body is opaque here. An answer's body is status u8 (0: ok) and bytes.
//
// Memory   at most 112 bytes of a stranger are kept. Until the stranger's mac is right, only this picture's fields are
//          parsed.
// Threads  none; a Visit belongs to one thread at a time.
// Source   challenge and response with HMAC: RFC 2104 and its use in RFC 2195. The role names in the macs keep an
//          answer from being reflected.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "hybridps/bootstrap/key_value.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/secret_bytes.h"
#include "hybridps/core/status.h"
#include "hybridps/tls/hmac.h"

namespace hybridps::admission {

using bootstrap::Bytes;

inline constexpr std::uint32_t kMagic = 0x64535048;  // "HPSd"
inline constexpr std::uint32_t kVersion = 2;
/// A server takes so many at a time, so that jobs can change to another one by one.
inline constexpr std::size_t kTokensMax = 2;
inline constexpr std::size_t kNonceBytes = 36;
inline constexpr std::size_t kHelloBytes = 8 + kNonceBytes;
inline constexpr std::size_t kMacBytes = 32;
inline constexpr std::size_t kBodyBytesMax = std::size_t{64} << 20;
inline constexpr std::size_t kLargeBytes = std::size_t{64} << 10;

using tls::Mac;
static_assert(sizeof(Mac) == kMacBytes);

Mac mac_of(std::string_view token, std::string_view role, const std::uint8_t* job_nonce,
           const std::uint8_t* server_nonce, const Bytes& body = {});
void put_u32(Bytes& out, std::uint32_t value);
std::uint32_t get_u32(const std::uint8_t* at);
/// A first message with a fresh nonce.
core::Result<Bytes> hello();

/// Answers a request. The requester has proven that it holds the token.
using Handler = std::function<core::Result<Bytes>(const Bytes& body)>;

/// The server's side of one conversation: bytes in, bytes out.
class Visit : core::Pinned {
 public:
  /// `tokens`, one to kTokensMax, and `handler` must outlive the Visit.
  Visit(std::span<const core::SecretBytes> tokens, const Handler& handler, std::size_t body_bytes_max = kBodyBytesMax)
      : tokens_(tokens), handler_(handler), body_bytes_max_(body_bytes_max) {}

  /// Takes the visitor's next bytes, at most wanted(). False: the conversation is over; drop the visitor.
  bool input(std::span<const std::uint8_t> bytes);
  /// How many bytes may come next; 0 once the request is answered.
  std::size_t wanted() const noexcept { return wanted_ - in_.size(); }
  /// All bytes to send since the start; the output only grows.
  const Bytes& output() const noexcept { return out_; }
  /// The visitor has proven that it holds a token.
  bool is_proven() const noexcept {
    return state_ == VisitState::kBody || state_ == VisitState::kTooLarge || state_ == VisitState::kAnswered;
  }
  /// The body of the request is on its way, and has more than kLargeBytes. One that is too large is not kept.
  bool has_large_body() const noexcept { return state_ == VisitState::kBody && wanted_ > kLargeBytes; }
  bool is_answered() const noexcept { return state_ == VisitState::kAnswered; }
  /// The visitor speaks this protocol, but has not proven that it holds the token. Such a visitor is a job with another
  /// token, which hangs up when it sees our mac.
  bool has_hung_up_at_token() const noexcept { return state_ == VisitState::kProof; }

 private:
  enum class VisitState { kHello, kProof, kBody, kTooLarge, kAnswered };
  bool understand();
  void answer(const core::Result<Bytes>& result);

  const std::span<const core::SecretBytes> tokens_;
  const core::SecretBytes* token_ = nullptr;  // the visitor's
  const Handler& handler_;
  const std::size_t body_bytes_max_;
  VisitState state_ = VisitState::kHello;
  Bytes in_;
  std::size_t wanted_ = kHelloBytes;
  Bytes out_;
  Bytes job_nonce_;
  Bytes server_nonce_;
  Mac seal_{};
};

}  // namespace hybridps::admission
