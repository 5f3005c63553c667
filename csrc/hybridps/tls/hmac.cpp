#include "hybridps/tls/hmac.h"

#include <openssl/crypto.h>
#include <openssl/evp.h>

#include <cstdlib>
#include <memory>

namespace hybridps::tls {

Mac hmac(std::span<const std::uint8_t> key, std::initializer_list<std::span<const std::uint8_t>> parts) {
  // HMAC fills a key up with zeros. So an empty key, which OpenSSL may refuse, is one zero.
  constexpr std::uint8_t kZero = 0;
  if (key.empty()) key = {&kZero, 1};
  const std::unique_ptr<EVP_PKEY, decltype(&EVP_PKEY_free)> made(
      EVP_PKEY_new_raw_private_key(EVP_PKEY_HMAC, nullptr, key.data(), key.size()), &EVP_PKEY_free);
  const std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context(EVP_MD_CTX_new(), &EVP_MD_CTX_free);
  bool is_done = made && context && EVP_DigestSignInit(context.get(), nullptr, EVP_sha256(), nullptr, made.get()) == 1;
  for (const std::span<const std::uint8_t> part : parts)
    is_done = is_done && EVP_DigestSignUpdate(context.get(), part.data(), part.size()) == 1;
  Mac mac{};
  std::size_t bytes = mac.size();
  is_done = is_done && EVP_DigestSignFinal(context.get(), mac.data(), &bytes) == 1 && bytes == mac.size();
  if (!is_done) std::abort();  // no memory: a constant instead of a mac would open all doors
  return mac;
}

bool is_equal(const Mac& mac, const std::uint8_t* other) { return CRYPTO_memcmp(mac.data(), other, mac.size()) == 0; }

}  // namespace hybridps::tls
