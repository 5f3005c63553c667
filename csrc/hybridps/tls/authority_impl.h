// hybridps/tls/authority_impl.h: OpenSSL's objects behind an authority and an identity. Internal to this room.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/secret_bytes.h"
#include "hybridps/tls/authority.h"
#include "hybridps/tls/libssl.h"

namespace hybridps::tls {

template <auto Free>
struct FreeBy {
  template <typename Object>
  void operator()(Object* object) const {
    Free(object);
  }
};
using Key = std::unique_ptr<EVP_PKEY, FreeBy<EVP_PKEY_free>>;
using Certificate = std::unique_ptr<X509, FreeBy<X509_free>>;
using TrustStore = std::unique_ptr<X509_STORE, FreeBy<X509_STORE_free>>;

struct Authority::AuthorityState {
  const LibSsl* ssl = nullptr;
  core::SecretBytes seed;            // of the key that signs the certificates of listeners; empty: the user's does
  Key user_key;                      // null: there are no certificates of the user
  Certificate certificate;           // of `user_key`
  std::vector<Certificate> between;  // from `certificate` to an authority that peers trust
  TrustStore trusted;                // of the user's authorities
  std::vector<Key> token_keys;       // public, one or two
  bool is_of_user = false;
  core::SecretBytes seal_key;  // empty: no token
  std::string text;
  std::string warning;
};

struct Identity::IdentityState {
  ~IdentityState() {
    if (context != nullptr) ssl->ctx_free(context);
  }
  const LibSsl* ssl = nullptr;
  SSL_CTX* context = nullptr;
  bool is_of_user = false;
  std::shared_ptr<const std::vector<Key>> token_keys;  // for the context's callback
  PeerId id{};
};

/// OpenSSL tells the secrets of a channel's keys; it keeps that of its own side, for the kernel.
void keep_secret(const SSL* ssl, const char* line);

/// What a handshake may bring of certificates. Those of a token have some 300 bytes.
inline constexpr long kChainBytesMax = 12 << 10;

/// False: OpenSSL cannot write it out.
bool id_of(X509* certificate, PeerId& id);
core::SecretBytes seal_key_of(const core::SecretBytes& token);
/// The Ed25519 key that follows from `seed`. Null: OpenSSL refuses. OpenSSL overwrites the key's memory when it goes.
Key key_from(const core::SecretBytes& seed);
/// A certificate for `key`, valid for ever. `constraint`: whether it may sign others, in OpenSSL's words. Null: OpenSSL
/// refuses.
Certificate make_certificate(const char* subject, EVP_PKEY* key, EVP_PKEY* signer, const char* constraint);
/// A certificate for `key`, signed by `issuer`, which is no authority (RFC 3820). Null: OpenSSL refuses.
Certificate make_proxy(EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key);
/// kOfAnyDomain: a name without a dot fits the first part of a name. A host often does not know its own domain.
enum class ShortNames { kExact, kOfAnyDomain };
/// Whether the certificate is for this name or address, or for no host at all.
bool is_for_host(X509* certificate, const std::string& host, ShortNames short_names);
/// The oldest error that OpenSSL has noted on this thread, in its words; the others are forgotten.
std::string openssl_text();

}  // namespace hybridps::tls
