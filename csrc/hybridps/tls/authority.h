// hybridps/tls/authority.h: who belongs to a job: the processes that hold its token, or certificates of its
// authorities.
//
// Model    Each listener makes its own key and certificate, and keeps both for its life. A peer's id is a hash of its
//          certificate. So no process can take the id of another process. Keys are never written to a file.
// Memory   The token and the keys that follow from it stay in SecretBytes, or are overwritten after use. A core dump
//          may show a listener's own key, the keys of its open connections and of knocks, and the user's private key.
//          With a listener's own key, a process can connect as that listener. But no new roster has the listener's
//          certificate, so no group takes the connection in. Keys of connections and of knocks admit nobody.
// Token    The key of a certificate authority follows from the token alone, so it is the same in all processes that
//          hold the token. This authority signs the certificates of listeners. A process without the token gets no
//          connection. The key of seals (sealed_store.h) also follows from the token. 16 bytes at least
//          (admission::read_token). A peer sees enough to test guesses of the token. So the token must be random.
// User     With certificates of the user, the certificate of this host signs those of its listeners, as proxy
//          certificates. OpenSSL checks the whole chain. A process whose host has no certificate of the user's
//          authorities gets no connection.
// Threads  constant after creation; any thread.
// Source   Ed25519: RFC 8032; certificates with it: RFC 8410; HMAC: RFC 2104; proxy certificates: RFC 3820.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "hybridps/core/pinned.h"
#include "hybridps/core/secret_bytes.h"
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
  /// Whether more processes than the holders of one token can connect: with the user's certificates, or a second token.
  bool may_meet_strangers() const noexcept;
  const IdentityState& state() const noexcept { return *state_; }

 private:
  const std::unique_ptr<IdentityState> state_;
};

/// kKernel: where the kernel can (kernel_sender.h), else OpenSSL.
enum class Encryptor : std::uint8_t { kOpenSsl, kKernel };

/// The user's files, all in PEM.
struct CertificateFiles {
  std::string key;           // of this host's certificate, without a password
  std::string certificates;  // this host's, then those between it and an authority
  std::string authorities;   // whom to trust; may be empty
  std::string folder;        // the same, as `openssl rehash` makes it; may be empty
};

class Authority : core::Pinned {
 public:
  struct AuthorityState;

  /// `second`: peers may hold this token instead; may be empty. Listeners then have certificates that a random key of
  /// this object has signed, and certificates of this key by both tokens. kUnsupported: no libssl. kInternal: OpenSSL
  /// refuses, with its words.
  static core::Result<std::shared_ptr<const Authority>> from_token(const core::SecretBytes& token,
                                                                   const core::SecretBytes& second = {});
  /// `token`: for seals; may be empty. Also kInvalidArgument: a file that cannot be read or has something else in it, a
  /// key of another certificate, or a chain that a peer with the same authorities would refuse, for example because a
  /// certificate has expired.
  static core::Result<std::shared_ptr<const Authority>> from_certificates(const CertificateFiles& files,
                                                                          const core::SecretBytes& token);
  explicit Authority(std::shared_ptr<AuthorityState> state);
  ~Authority();

  /// A new key with its certificate. `encryptor`: of what its channels send.
  core::Result<std::shared_ptr<const Identity>> make_identity(Encryptor encryptor = Encryptor::kOpenSsl) const;
  /// For tools: what vouches for this process.
  const std::string& text() const noexcept;
  /// What the user should know of the files; mostly empty.
  const std::string& warning() const noexcept;
  /// Whether the user's certificate of this host is for one of `hosts`, names or addresses. True without such a
  /// certificate, and if it names no host at all.
  bool is_for_one_of(std::span<const std::string> hosts) const;
  /// There is a token.
  bool can_seal() const noexcept;
  /// The seal of `value` under `key`. Only if can_seal().
  Mac seal(std::string_view key, std::span<const std::uint8_t> value) const;

 private:
  const std::shared_ptr<AuthorityState> state_;
};

}  // namespace hybridps::tls
