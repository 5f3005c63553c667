// hybridps/tls/knock.h: the first bytes of a connection in TLS, which only a process that may begin a handshake can
// make.
//
// Why      A handshake costs the answering side 0.2 ms and 30 KiB before it knows the other side. A refused knock
//          costs it about 10 us, and the connection under it 30. So a process without a secret cannot keep ours busy
//          with handshakes.
// Model    knock := "HPSk" | nonce, 8 bytes | the first 16 bytes of HMAC(key, both) | CRC32C of all before. It goes in
//          clear, just before the handshake. It admits nobody: the handshake does.
// Key      from the id of the listener (authority.h), or from a token. The Store shows the id, connections do not. So a
//          reader of the Store can knock, and a peer that has begun a handshake: it has seen the certificate. A knock
//          by a token lets a reader of the network test guesses of the token.
// Replay   A guard takes each nonce once, so a knock that has been heard opens nothing again here. A knock by a token
//          opens a handshake at each listener with this token, once.
// Threads  make_knock(): any. A guard belongs to one thread at a time.
// Source   mac1 of WireGuard (Donenfeld, NDSS 2017, 5.4.4) has the same purpose.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "hybridps/tls/hmac.h"

namespace hybridps::tls {

inline constexpr std::size_t kKnockBytes = 32;
using KnockBytes = std::array<std::uint8_t, kKnockBytes>;

/// Any secret, also an empty one: then everybody can knock.
Mac knock_key(std::span<const std::uint8_t> secret);
/// Of a listener's id.
inline Mac knock_key(std::span<const std::byte, 16> id) {
  return knock_key(std::span(reinterpret_cast<const std::uint8_t*>(id.data()), id.size()));
}
KnockBytes make_knock(const Mac& key);
/// Whether `bytes`, at most kKnockBytes, may be the beginning of a knock for some listener.
bool may_be_knock(std::span<const std::uint8_t> bytes);

/// What a listener takes.
class KnockGuard {
 public:
  explicit KnockGuard(std::vector<Mac> keys) : keys_(std::move(keys)) {}

  enum class Heard {
    kTaken,
    kNone,     // no knock, or it was changed on the way
    kOther,    // a knock for another listener, or by another secret
    kReplayed  // it has been taken before
  };
  Heard hear(const KnockBytes& knock);

 private:
  /// Members dial a few times each. So many nonces take 4 MiB at most; then all are forgotten.
  static constexpr std::size_t kNoncesMax = std::size_t{1} << 16;

  const std::vector<Mac> keys_;
  std::set<std::uint64_t> taken_;  // nonces
};

}  // namespace hybridps::tls
