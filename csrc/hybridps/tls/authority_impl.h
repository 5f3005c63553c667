// hybridps/tls/authority_impl.h: OpenSSL's objects behind an identity. Internal to this room.
#pragma once

#include <openssl/evp.h>
#include <openssl/x509.h>

#include <memory>
#include <string>

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

struct Identity::IdentityState {
  ~IdentityState() {
    if (context != nullptr) ssl->ctx_free(context);
  }
  const LibSsl* ssl = nullptr;
  SSL_CTX* context = nullptr;
  PeerId id{};
};

/// Nothing: OpenSSL cannot write it out.
bool id_of(X509* certificate, PeerId& id);
/// The oldest error that OpenSSL has noted on this thread, in its words; the others are forgotten.
std::string openssl_text();

}  // namespace hybridps::tls
