#include "hybridps/tls/knock.h"

#include <openssl/crypto.h>

#include <algorithm>
#include <cstring>

#include "hybridps/core/crc32c.h"
#include "hybridps/core/ids.h"

namespace hybridps::tls {
namespace {

constexpr std::array<std::uint8_t, 4> kMark = {'H', 'P', 'S', 'k'};
constexpr std::size_t kNonceEnd = kMark.size() + sizeof(std::uint64_t);
constexpr std::size_t kMacBytes = 16;
constexpr std::size_t kMacEnd = kNonceEnd + kMacBytes;
static_assert(kMacEnd + sizeof(std::uint32_t) == kKnockBytes);

std::uint32_t sum_of(const KnockBytes& knock) { return core::crc32c(std::as_bytes(std::span(knock).first(kMacEnd))); }

}  // namespace

Mac knock_key(std::span<const std::uint8_t> secret) { return hmac(secret, {bytes_of("hybridps knock")}); }

KnockBytes make_knock(const Mac& key) {
  KnockBytes knock{};
  std::copy(kMark.begin(), kMark.end(), knock.begin());
  const std::uint64_t nonce = core::random_u64();
  std::memcpy(knock.data() + kMark.size(), &nonce, sizeof nonce);
  const Mac mac = hmac(key, {std::span(knock).first(kNonceEnd)});
  std::copy_n(mac.begin(), kMacBytes, knock.begin() + kNonceEnd);
  const std::uint32_t sum = sum_of(knock);
  std::memcpy(knock.data() + kMacEnd, &sum, sizeof sum);
  return knock;
}

bool may_be_knock(std::span<const std::uint8_t> bytes) {
  const std::size_t count = std::min(bytes.size(), kMark.size());
  return bytes.size() <= kKnockBytes && std::equal(kMark.begin(), kMark.begin() + count, bytes.begin());
}

KnockGuard::Heard KnockGuard::hear(const KnockBytes& knock) {
  const auto fits = [&](const Mac& key) {
    const Mac mac = hmac(key, {std::span(knock).first(kNonceEnd)});
    return CRYPTO_memcmp(mac.data(), knock.data() + kNonceEnd, kMacBytes) == 0;
  };
  const std::uint32_t sum = sum_of(knock);
  if (!may_be_knock(knock) || std::memcmp(&sum, knock.data() + kMacEnd, sizeof sum) != 0) return Heard::kNone;
  if (std::none_of(keys_.begin(), keys_.end(), fits)) return Heard::kOther;
  std::uint64_t nonce = 0;
  std::memcpy(&nonce, knock.data() + kMark.size(), sizeof nonce);
  if (taken_.size() >= kNoncesMax) taken_.clear();
  return taken_.insert(nonce).second ? Heard::kTaken : Heard::kReplayed;
}

}  // namespace hybridps::tls
