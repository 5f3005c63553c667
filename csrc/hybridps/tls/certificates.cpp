// The user's certificates: read, checked as a peer will check them, and signing for the listeners of this host.
#include <arpa/inet.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>

#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

#include "hybridps/core/text.h"
#include "hybridps/tls/authority_impl.h"

namespace hybridps::tls {
namespace {

using core::Code;
using core::Status;

using Bio = std::unique_ptr<BIO, FreeBy<BIO_free>>;
using Names = std::unique_ptr<GENERAL_NAMES, FreeBy<GENERAL_NAMES_free>>;
using Context = std::unique_ptr<X509_STORE_CTX, FreeBy<X509_STORE_CTX_free>>;
using ProxyInfo = std::unique_ptr<PROXY_CERT_INFO_EXTENSION, FreeBy<PROXY_CERT_INFO_EXTENSION_free>>;
struct FreeStack {
  void operator()(STACK_OF(X509) * stack) const { sk_X509_free(stack); }
};
using Stack = std::unique_ptr<STACK_OF(X509), FreeStack>;

Status bad(const std::string& path, const std::string& what) {
  return {Code::kInvalidArgument, "certificates for HYBRIDPS_SECURITY=tls: " + core::quoted(path, 200) + " " + what};
}

/// A file with a password: nobody is there to type it.
int no_password(char*, int, int, void*) { return -1; }

std::string text_of(BIO* bio) {
  char* data = nullptr;
  const long bytes = BIO_get_mem_data(bio, &data);
  return bytes > 0 ? std::string(data, static_cast<std::size_t>(bytes)) : std::string();
}

std::string name_of(X509_NAME* name) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (!bio || X509_NAME_print_ex(bio.get(), name, 0, XN_FLAG_RFC2253) < 0) return "?";
  return text_of(bio.get());
}

std::string text_of(const ASN1_TIME* time) {
  const Bio bio(BIO_new(BIO_s_mem()));
  if (!bio || ASN1_TIME_print(bio.get(), time) != 1) return "?";
  return text_of(bio.get());
}

/// The hosts that a certificate is for: "DNS:a.example", "IP:10.0.0.1".
std::vector<std::string> hosts_of(X509* certificate) {
  std::vector<std::string> hosts;
  const Names names(static_cast<GENERAL_NAMES*>(X509_get_ext_d2i(certificate, NID_subject_alt_name, nullptr, nullptr)));
  for (int i = 0; names && i < sk_GENERAL_NAME_num(names.get()); ++i) {
    const GENERAL_NAME* const one = sk_GENERAL_NAME_value(names.get(), i);
    if (one->type == GEN_DNS) {
      const auto* const text = reinterpret_cast<const char*>(ASN1_STRING_get0_data(one->d.dNSName));
      hosts.push_back("DNS:" + std::string(text, static_cast<std::size_t>(ASN1_STRING_length(one->d.dNSName))));
    } else if (one->type == GEN_IPADD) {
      const int bytes = ASN1_STRING_length(one->d.iPAddress);
      std::array<char, INET6_ADDRSTRLEN> text{};
      if (bytes == 4 || bytes == 16)
        ::inet_ntop(bytes == 4 ? AF_INET : AF_INET6, ASN1_STRING_get0_data(one->d.iPAddress), text.data(), text.size());
      hosts.push_back("IP:" + std::string(text.data()));
    }
  }
  return hosts;
}

core::Result<Key> read_key(const std::string& path) {
  const Bio file(BIO_new_file(path.c_str(), "r"));
  if (!file) return bad(path, std::string("cannot be read: ") + std::strerror(errno));
  Key key(PEM_read_bio_PrivateKey(file.get(), nullptr, &no_password, nullptr));
  if (!key) return bad(path, "has no private key in PEM without a password: " + openssl_text());
  return key;
}

core::Result<std::vector<Certificate>> read_certificates(const std::string& path) {
  const Bio file(BIO_new_file(path.c_str(), "r"));
  if (!file) return bad(path, std::string("cannot be read: ") + std::strerror(errno));
  std::vector<Certificate> found;
  long bytes = 0;
  while (Certificate one{PEM_read_bio_X509(file.get(), nullptr, &no_password, nullptr)}) {
    bytes += i2d_X509(one.get(), nullptr);
    found.push_back(std::move(one));
    // Room for the listener's own certificate and its signature.
    if (bytes > kChainBytesMax / 2)
      return bad(path, "has more certificates than a handshake may bring (6 KiB): leave out the authorities' own");
  }
  ERR_clear_error();  // the end of the file
  if (found.empty()) return bad(path, "has no certificate in PEM");
  return found;
}

/// What a peer with the same authorities will say of `leaf`.
Status verify(X509_STORE* trusted, X509* leaf, STACK_OF(X509) * chain, const char* purpose, const std::string& path) {
  const Context context(X509_STORE_CTX_new());
  if (!context || X509_STORE_CTX_init(context.get(), trusted, leaf, chain) != 1 ||
      X509_STORE_CTX_set_default(context.get(), purpose) != 1)
    return {Code::kInternal, "OpenSSL cannot check certificates: " + openssl_text()};
  if (X509_verify_cert(context.get()) == 1) return Status::ok();
  const int error = X509_STORE_CTX_get_error(context.get());
  std::string what = std::string("would be refused by peers: ") + X509_verify_cert_error_string(error);
  X509* const one = X509_STORE_CTX_get_current_cert(context.get());
  ERR_clear_error();
  if (one != nullptr && one != leaf) what += " (" + name_of(X509_get_subject_name(one)) + ")";
  if (one != nullptr && error == X509_V_ERR_CERT_HAS_EXPIRED) what += ", on " + text_of(X509_get0_notAfter(one));
  if (one != nullptr && error == X509_V_ERR_CERT_NOT_YET_VALID)
    what += ", until " + text_of(X509_get0_notBefore(one)) + ": is the clock right?";
  if (error == X509_V_ERR_INVALID_PURPOSE)
    what += "; if it has an extended key usage, that must have both serverAuth and clientAuth";
  if (error == X509_V_ERR_PROXY_SUBJECT_NAME_VIOLATION) what = "has no subject name: it needs one, for example a CN";
  if (error == X509_V_ERR_INVALID_NON_CA) what += "; a host's certificate must have basicConstraints CA:FALSE";
  return bad(path, what);
}

std::string lower(std::string text) {
  for (char& c : text)
    if (c >= 'A' && c <= 'Z') c = static_cast<char>(c - 'A' + 'a');
  return text;
}

}  // namespace

bool is_for_host(X509* certificate, const std::string& host) {
  const std::vector<std::string> hosts = hosts_of(certificate);
  if (hosts.empty()) return true;
  if (host.empty()) return false;
  // Subjects are not asked: where a certificate has these names, they are all its names (RFC 6125, 6.4.4).
  if (X509_check_host(certificate, host.data(), host.size(), X509_CHECK_FLAG_NEVER_CHECK_SUBJECT, nullptr) == 1 ||
      X509_check_ip_asc(certificate, host.c_str(), 0) == 1)
    return true;
  if (host.find_first_of(".:") != std::string::npos) return false;
  for (const std::string& one : hosts) {
    const std::string label = one.starts_with("DNS:") ? one.substr(4, one.find('.') - 4) : std::string();
    if (label == "*" || lower(label) == lower(host)) return true;
  }
  return false;
}

Certificate make_proxy(EVP_PKEY* key, X509* issuer, EVP_PKEY* issuer_key) {
  Certificate made(X509_new());
  const ProxyInfo info(PROXY_CERT_INFO_EXTENSION_new());
  const std::unique_ptr<X509_NAME, FreeBy<X509_NAME_free>> subject(X509_NAME_dup(X509_get_subject_name(issuer)));
  std::uint64_t serial = 0;
  if (!made || !info || !subject || RAND_bytes(reinterpret_cast<unsigned char*>(&serial), sizeof serial) != 1)
    return {};
  const std::string number = std::to_string(serial);
  info->pcPathLengthConstraint = ASN1_INTEGER_new();
  info->proxyPolicy->policyLanguage = OBJ_nid2obj(NID_id_ppl_inheritAll);
  X509* const one = made.get();
  int digest = NID_undef;  // of the kind of key; Ed25519 has none
  const bool has_digest = EVP_PKEY_get_default_digest_nid(issuer_key, &digest) > 0 && digest != NID_undef;
  const bool is_made =
      info->pcPathLengthConstraint != nullptr && ASN1_INTEGER_set(info->pcPathLengthConstraint, 0) == 1 &&
      X509_set_version(one, 2) == 1 && ASN1_INTEGER_set_uint64(X509_get_serialNumber(one), serial) == 1 &&
      X509_set1_notBefore(one, X509_get0_notBefore(issuer)) == 1 &&
      X509_set1_notAfter(one, X509_get0_notAfter(issuer)) == 1 &&
      X509_set_issuer_name(one, X509_get_subject_name(issuer)) == 1 &&
      X509_NAME_add_entry_by_txt(subject.get(), "CN", MBSTRING_ASC,
                                 reinterpret_cast<const unsigned char*>(number.c_str()), -1, -1, 0) == 1 &&
      X509_set_subject_name(one, subject.get()) == 1 && X509_set_pubkey(one, key) == 1 &&
      X509_add1_ext_i2d(one, NID_proxyCertInfo, info.get(), /*crit=*/1, X509V3_ADD_DEFAULT) == 1 &&
      X509_sign(one, issuer_key, has_digest ? EVP_sha256() : nullptr) > 0;
  return is_made ? std::move(made) : Certificate();
}

core::Result<std::shared_ptr<const Authority>> Authority::from_certificates(const CertificateFiles& files,
                                                                            const std::string& token) {
  const core::Result<const LibSsl*> ssl = load_libssl();
  if (!ssl.is_ok()) return ssl.status();
  core::Result<Key> key = read_key(files.key);
  if (!key.is_ok()) return key.status();
  core::Result<std::vector<Certificate>> chain = read_certificates(files.certificates);
  if (!chain.is_ok()) return chain.status();
  auto state = std::make_unique<AuthorityState>();
  state->ssl = ssl.value();
  state->is_of_user = true;
  state->key = std::move(key).value();
  state->between = std::move(chain).value();
  state->certificate = std::move(state->between.front());
  state->between.erase(state->between.begin());
  if (X509_check_private_key(state->certificate.get(), state->key.get()) != 1) {
    ERR_clear_error();
    return bad(files.key, "is the key of another certificate than the first of " + files.certificates);
  }
  state->trusted.reset(X509_STORE_new());
  X509_STORE* const trusted = state->trusted.get();
  const auto in = [](const std::string& path) { return path.empty() ? nullptr : path.c_str(); };
  const std::string& from = files.authorities.empty() ? files.folder : files.authorities;
  if (trusted == nullptr || X509_STORE_load_locations(trusted, in(files.authorities), in(files.folder)) != 1)
    return bad(from, "has no certificates of authorities: " + openssl_text());
  X509_STORE_set_flags(trusted, X509_V_FLAG_ALLOW_PROXY_CERTS);
  if (!token.empty()) state->seal_key = seal_key_of(token);

  // A listener's certificate, as trial.
  const Stack behind(sk_X509_new_null());
  bool is_pushed = behind && sk_X509_push(behind.get(), state->certificate.get()) > 0;
  for (const Certificate& one : state->between) is_pushed = is_pushed && sk_X509_push(behind.get(), one.get()) > 0;
  const Certificate trial = make_proxy(state->key.get(), state->certificate.get(), state->key.get());
  if (!is_pushed || !trial) return bad(files.key, "cannot sign: " + openssl_text());
  for (const char* const purpose : {"ssl_client", "ssl_server"})
    if (Status status = verify(trusted, trial.get(), behind.get(), purpose, files.certificates); !status.is_ok())
      return status;

  state->text = "TLS by certificates: " + name_of(X509_get_subject_name(state->certificate.get())) + ", until " +
                text_of(X509_get0_notAfter(state->certificate.get()));
  std::string hosts;
  for (const std::string& host : hosts_of(state->certificate.get())) hosts += (hosts.empty() ? ", for " : " ") + host;
  state->text += hosts.empty() ? ", for any host" : hosts;
  return std::shared_ptr<const Authority>(std::make_shared<Authority>(std::move(state)));
}

}  // namespace hybridps::tls
