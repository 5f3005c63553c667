#include "hybridps/tls/authority.h"

#include <openssl/err.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "hybridps/tls/authority_impl.h"
#include "hybridps/tls/kernel_sender.h"

namespace hybridps::tls {
namespace {

using core::Code;
using core::Status;

constexpr std::string_view kAuthorityLabel = "hybridps tls authority 1";
constexpr std::string_view kSealLabel = "hybridps store seal 1";
constexpr const char* kAuthorityName = "hybridps job";
/// Certificates behind that of a listener: one for each token.
constexpr int kOthersMax = 3;
constexpr const char* kMemberName = "hybridps";
/// A certificate lives as long as its process. So the clocks of two machines need not agree.
constexpr const char* kFirstDay = "19700101000000Z";
constexpr const char* kLastDay = "99991231235959Z";

Status refused(const char* what) {
  return {Code::kInternal, std::string("OpenSSL cannot make ") + what + ": " + openssl_text()};
}

/// A Mac as a secret. The Mac is overwritten.
core::SecretBytes keep(Mac&& mac) {
  core::SecretBytes kept(std::span<const std::uint8_t>{mac});
  OPENSSL_cleanse(mac.data(), mac.size());
  return kept;
}

/// Only what checks signatures.
Key public_part(EVP_PKEY* key) {
  std::array<unsigned char, 32> bytes{};
  std::size_t size = bytes.size();
  if (key == nullptr || EVP_PKEY_get_raw_public_key(key, bytes.data(), &size) != 1) return {};
  return Key(EVP_PKEY_new_raw_public_key(EVP_PKEY_ED25519, nullptr, bytes.data(), size));
}

bool set_name(X509_NAME* name, const char* text) {
  return X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>(text), -1, -1,
                                    0) == 1;
}

bool add_constraint(X509* certificate, const char* text) {
  X509_EXTENSION* const made =
      X509V3_EXT_conf_nid(nullptr, nullptr, NID_basic_constraints, const_cast<char*>(text));  // NOLINT: not written to
  const bool is_added = made != nullptr && X509_add_ext(certificate, made, -1) == 1;
  X509_EXTENSION_free(made);
  return is_added;
}

/// Empty: OpenSSL refuses.
core::SecretBytes random_seed() {
  Mac seed{};
  return RAND_bytes(seed.data(), static_cast<int>(seed.size())) == 1 ? keep(std::move(seed)) : core::SecretBytes();
}

core::SecretBytes authority_seed(const core::SecretBytes& token) {
  return keep(hmac(token.bytes(), {bytes_of(kAuthorityLabel)}));
}

/// In place of OpenSSL's check of a chain: whether the certificate that came is signed by the key of a token, or by a
/// key for which another certificate that came is, if that one may sign: those of listeners may not. All certificates
/// here are valid for ever, and all that hold a token may sign.
int check_signatures(X509_STORE_CTX* context, void* keys) {
  const auto& trusted = *static_cast<const std::vector<Key>*>(keys);
  X509* const leaf = X509_STORE_CTX_get0_cert(context);
  const STACK_OF(X509)* const others = X509_STORE_CTX_get0_untrusted(context);
  const auto is_signed_by_token = [&](X509* one) {
    return std::any_of(trusted.begin(), trusted.end(),
                       [&](const Key& key) { return X509_verify(one, key.get()) == 1; });
  };
  bool is_good = leaf != nullptr && is_signed_by_token(leaf);
  for (int i = 0; !is_good && leaf != nullptr && i < std::min(sk_X509_num(others), kOthersMax); ++i) {
    X509* const one = sk_X509_value(others, i);
    is_good = X509_check_ca(one) == 1 && is_signed_by_token(one) && X509_verify(leaf, X509_get0_pubkey(one)) == 1;
  }
  ERR_clear_error();  // of the signatures that were tried
  X509_STORE_CTX_set_error(context, is_good ? X509_V_OK : X509_V_ERR_CERT_SIGNATURE_FAILURE);
  return is_good ? 1 : 0;
}

}  // namespace

bool id_of(X509* certificate, PeerId& id) {
  std::array<unsigned char, EVP_MAX_MD_SIZE> digest{};
  unsigned int bytes = 0;
  if (X509_digest(certificate, EVP_sha256(), digest.data(), &bytes) != 1 || bytes < id.size()) return false;
  std::memcpy(id.data(), digest.data(), id.size());
  return true;
}

Certificate make_certificate(const char* subject, EVP_PKEY* key, EVP_PKEY* signer, const char* constraint) {
  Certificate made(X509_new());
  std::uint64_t serial = 0;
  X509* const one = made.get();
  const bool is_made =
      one != nullptr && RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) == 1 &&
      X509_set_version(one, 2) == 1 && ASN1_INTEGER_set_uint64(X509_get_serialNumber(one), serial) == 1 &&
      ASN1_TIME_set_string_X509(X509_getm_notBefore(one), kFirstDay) == 1 &&
      ASN1_TIME_set_string(X509_getm_notAfter(one), kLastDay) == 1 && set_name(X509_get_subject_name(one), subject) &&
      set_name(X509_get_issuer_name(one), kAuthorityName) && X509_set_pubkey(one, key) == 1 &&
      add_constraint(one, constraint) && X509_sign(one, signer, nullptr) > 0;
  return is_made ? std::move(made) : Certificate();
}

core::SecretBytes seal_key_of(const core::SecretBytes& token) {
  return keep(hmac(token.bytes(), {bytes_of(kSealLabel)}));
}

Key key_from(const core::SecretBytes& seed) {
  return Key(EVP_PKEY_new_raw_private_key(EVP_PKEY_ED25519, nullptr, seed.bytes().data(), seed.bytes().size()));
}

std::string openssl_text() {
  const unsigned long code = ERR_get_error();
  ERR_clear_error();
  if (code == 0) return "no reason given";
  const char* const reason = ERR_reason_error_string(code);
  return reason != nullptr ? reason : "error " + std::to_string(code);
}

Identity::Identity(std::unique_ptr<IdentityState> state) : state_(std::move(state)) {}
Identity::~Identity() = default;

const PeerId& Identity::id() const noexcept { return state_->id; }
bool Identity::may_meet_strangers() const noexcept { return state_->is_of_user || state_->token_keys->size() > 1; }

Authority::Authority(std::shared_ptr<AuthorityState> state) : state_(std::move(state)) {}
Authority::~Authority() = default;

core::Result<std::shared_ptr<const Authority>> Authority::from_token(const core::SecretBytes& token,
                                                                     const core::SecretBytes& second) {
  const core::Result<const LibSsl*> ssl = load_libssl();
  if (!ssl.is_ok()) return ssl.status();
  auto state = std::make_shared<AuthorityState>();
  state->ssl = ssl.value();
  std::vector<Key> keys;
  for (const core::SecretBytes& one : second.empty() ? std::vector{token} : std::vector{token, second}) {
    state->seed = authority_seed(one);
    keys.push_back(key_from(state->seed));
    state->token_keys.push_back(public_part(keys.back().get()));
    if (!state->token_keys.back()) return refused("the key of the job");
  }
  if (!second.empty()) {  // certificates of both tokens vouch for a random key of this process
    state->seed = random_seed();
    const Key own = key_from(state->seed);
    for (const Key& by : keys) {
      Certificate made =
          own ? make_certificate(kAuthorityName, own.get(), by.get(), "critical,CA:TRUE,pathlen:0") : Certificate();
      if (!made) return refused("a certificate of the tokens");
      state->between.push_back(std::move(made));
    }
  }
  state->seal_key = seal_key_of(token);
  state->text = second.empty() ? "TLS by the token" : "TLS by either of two tokens";
  return std::shared_ptr<const Authority>(std::make_shared<Authority>(std::move(state)));
}

core::Result<std::shared_ptr<const Identity>> Authority::make_identity(Encryptor encryptor) const {
  const LibSsl& ssl = *state_->ssl;
  const Key key = key_from(random_seed());
  const Key signer = state_->is_of_user ? Key() : key_from(state_->seed);
  const Certificate certificate = !key || (!signer && !state_->is_of_user) ? Certificate()
                                  : state_->is_of_user
                                      ? make_proxy(key.get(), state_->certificate.get(), state_->user_key.get())
                                      : make_certificate(kMemberName, key.get(), signer.get(), "critical,CA:FALSE");
  if (!certificate) return refused("a certificate");
  auto made = std::make_unique<Identity::IdentityState>();
  made->ssl = state_->ssl;
  made->is_of_user = state_->is_of_user;
  made->token_keys = std::shared_ptr<const std::vector<Key>>(state_, &state_->token_keys);
  made->context = ssl.ctx_new(ssl.method());
  if (made->context == nullptr) return refused("a context");
  SSL_CTX* const context = made->context;
  const bool is_set = ssl.ctx_ctrl(context, SSL_CTRL_SET_MIN_PROTO_VERSION, TLS1_3_VERSION, nullptr) == 1 &&
                      ssl.ctx_set_ciphersuites(
                          context, "TLS_AES_128_GCM_SHA256:TLS_AES_256_GCM_SHA384:TLS_CHACHA20_POLY1305_SHA256") == 1 &&
                      ssl.ctx_use_certificate(context, certificate.get()) == 1 &&
                      ssl.ctx_use_private_key(context, key.get()) == 1 && ssl.ctx_set_num_tickets(context, 0) == 1 &&
                      id_of(certificate.get(), made->id);
  if (!is_set) return refused("a context");
  const auto add = [&](X509* one) {  // the context takes one reference
    return X509_up_ref(one) == 1 &&
           (ssl.ctx_ctrl(context, SSL_CTRL_EXTRA_CHAIN_CERT, 0, one) == 1 || (X509_free(one), false));
  };
  bool is_whole = !state_->is_of_user || add(state_->certificate.get());
  for (const Certificate& one : state_->between) is_whole = is_whole && add(one.get());
  if (!is_whole) return refused("a chain of certificates");
  if (state_->is_of_user)
    ssl.ctx_set1_cert_store(context, state_->trusted.get());
  else
    ssl.ctx_set_cert_verify_callback(context, &check_signatures, const_cast<std::vector<Key>*>(made->token_keys.get()));
  ssl.ctx_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, nullptr);
  ssl.ctx_ctrl(context, SSL_CTRL_SET_MAX_CERT_LIST, kChainBytesMax, nullptr);
  // Of a chain, the part that peers need is added above.
  ssl.ctx_ctrl(context, SSL_CTRL_MODE, SSL_MODE_RELEASE_BUFFERS | SSL_MODE_NO_AUTO_CHAIN, nullptr);
  ssl.ctx_ctrl(context, SSL_CTRL_SET_SESS_CACHE_MODE, SSL_SESS_CACHE_OFF, nullptr);
  if (encryptor == Encryptor::kKernel && KernelSender::is_worth_a_try())
    ssl.ctx_set_keylog_callback(context, &keep_secret);
  return std::shared_ptr<const Identity>(std::make_shared<Identity>(std::move(made)));
}

const std::string& Authority::text() const noexcept { return state_->text; }

const std::string& Authority::warning() const noexcept { return state_->warning; }

bool Authority::can_seal() const noexcept { return !state_->seal_key.empty(); }

bool Authority::is_for_one_of(std::span<const std::string> hosts) const {
  if (!state_->is_of_user) return true;
  return std::any_of(hosts.begin(), hosts.end(), [&](const std::string& host) {
    return is_for_host(state_->certificate.get(), host, ShortNames::kOfAnyDomain);
  });
}

Mac Authority::seal(std::string_view key, std::span<const std::uint8_t> value) const {
  constexpr std::uint8_t kEnd = 0;  // no key has this byte
  return hmac(state_->seal_key.bytes(), {bytes_of(key), {&kEnd, 1}, value});
}

}  // namespace hybridps::tls
