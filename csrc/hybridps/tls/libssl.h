// hybridps/tls/libssl.h: the functions of OpenSSL's libssl, loaded when they are needed. Internal to this room.
//
// Owner    the process: the library stays loaded.
// Threads  any.
#pragma once

#include <openssl/ssl.h>

#include "hybridps/core/status.h"

namespace hybridps::tls {

// The functions that are called, by their names without "SSL_". X(member, name of the function)
#define HYBRIDPS_LIBSSL(X)                                          \
  X(method, TLS_method)                                             \
  X(ctx_new, SSL_CTX_new)                                           \
  X(ctx_free, SSL_CTX_free)                                         \
  X(ctx_ctrl, SSL_CTX_ctrl)                                         \
  X(ctx_set_ciphersuites, SSL_CTX_set_ciphersuites)                 \
  X(ctx_use_certificate, SSL_CTX_use_certificate)                   \
  X(ctx_use_private_key, SSL_CTX_use_PrivateKey)                    \
  X(ctx_set1_cert_store, SSL_CTX_set1_cert_store)                   \
  X(ctx_get_security_level, SSL_CTX_get_security_level)             \
  X(ctx_set_verify, SSL_CTX_set_verify)                             \
  X(ctx_set_cert_verify_callback, SSL_CTX_set_cert_verify_callback) \
  X(ctx_set_num_tickets, SSL_CTX_set_num_tickets)                   \
  X(ctx_set_keylog_callback, SSL_CTX_set_keylog_callback)           \
  X(set_read_buffer, SSL_set_default_read_buffer_len)               \
  X(set_read_ahead, SSL_set_read_ahead)                             \
  X(make, SSL_new)                                                  \
  X(free, SSL_free)                                                 \
  X(set_bio, SSL_set_bio)                                           \
  X(set_connect_state, SSL_set_connect_state)                       \
  X(set_accept_state, SSL_set_accept_state)                         \
  X(do_handshake, SSL_do_handshake)                                 \
  X(read, SSL_read)                                                 \
  X(write, SSL_write)                                               \
  X(get_error, SSL_get_error)                                       \
  X(get_wbio, SSL_get_wbio)                                         \
  X(get_cipher, SSL_get_current_cipher)                             \
  X(cipher_id, SSL_CIPHER_get_id)                                   \
  X(has_pending, SSL_has_pending)                                   \
  X(get_verify_result, SSL_get_verify_result)                       \
  X(get0_verified_chain, SSL_get0_verified_chain)                   \
  X(key_update, SSL_key_update)

struct LibSsl {
#define HYBRIDPS_MEMBER(member, name) decltype(&name) member = nullptr;
  HYBRIDPS_LIBSSL(HYBRIDPS_MEMBER)
#undef HYBRIDPS_MEMBER
  X509* (*get_peer_certificate)(const SSL*) = nullptr;  // the caller owns the certificate
};

/// kUnsupported: there is no libssl of the version that this was built for.
core::Result<const LibSsl*> load_libssl();

}  // namespace hybridps::tls
