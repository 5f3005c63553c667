// hybridps/tls/authority.h: who belongs to a job: the processes that hold its token.
//
// Model    The key of a certificate authority follows from the token alone, so it is the same in all processes that
//          hold the token. Each listener makes its own key, and a certificate that this authority has signed. The
//          listener keeps both for its life. A peer's id is a hash of its certificate. So a process without the token
//          gets no connection. A process with the token cannot take the id of another process. Keys and certificates
//          are never written to a file. The key of seals (sealed_store.h) also follows from the token.
// Token    16 bytes at least (admission::read_token). A peer sees enough to test guesses of the token. So the token
//          must be random.
// Threads  constant after creation; any thread.
// Source   Ed25519: RFC 8032; certificates with it: RFC 8410; HMAC: RFC 2104.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/tls/hmac.h"

namespace hybridps::tls {

/// The first 16 bytes of the SHA-256 of a certificate (DER).
using PeerId = std::array<std::byte, 16>;

/// What a listener proves itself with, and what it asks of its peers.
class Identity : core::Pinned {
 public:
  struct IdentityState;  // OpenSSL's objects

  explicit Identity(std::unique_ptr<IdentityState> state);
  ~Identity();

  const PeerId& id() const noexcept;
  const IdentityState& state() const noexcept { return *state_; }

 private:
  const std::unique_ptr<IdentityState> state_;
};

class Authority : core::Pinned {
 public:
  struct AuthorityState;

  /// kUnsupported: no libssl. kInternal: OpenSSL refuses, with its words.
  static core::Result<std::shared_ptr<const Authority>> from_token(const std::string& token);
  explicit Authority(std::unique_ptr<AuthorityState> state);
  ~Authority();

  /// A new key with its certificate.
  core::Result<std::shared_ptr<const Identity>> make_identity() const;
  /// The seal of `value` under `key`.
  Mac seal(std::string_view key, std::span<const std::uint8_t> value) const;

 private:
  const std::unique_ptr<AuthorityState> state_;
};

}  // namespace hybridps::tls
