// The user's certificates: read, checked as a peer will check them, and signing for the listeners of this host.
#include <arpa/inet.h>
#include <fcntl.h>
#include <openssl/bio.h>
#include <openssl/crypto.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/rand.h>
#include <openssl/x509v3.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <utility>

#include "hybridps/core/descriptor.h"
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

constexpr std::size_t kFileBytesMax = std::size_t{4} << 20;

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

/// A file to read PEM from, in memory: OpenSSL's own words for a file that cannot be read are numbers.
/// `mode`: receives the file's; may be null.
core::Result<Bio> open_file(const std::string& path, mode_t* mode = nullptr) {
  const auto cannot = [&] { return bad(path, std::string("cannot be read: ") + std::strerror(errno)); };
  core::Descriptor file;
  {
    const core::ForkLock lock;  // a pipe does not hold up the open
    file = core::Descriptor(lock, ::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  }
  struct stat info{};
  if (!file || ::fstat(file.get(), &info) != 0) return cannot();
  if (!S_ISREG(info.st_mode)) return bad(path, "cannot be read: it is no file");
  if (mode != nullptr) *mode = info.st_mode;
  Bio memory(BIO_new(BIO_s_mem()));
  std::array<unsigned char, 4096> part{};
  std::size_t bytes = 0;
  for (;;) {
    const ssize_t got = ::read(file.get(), part.data(), part.size());
    if (got < 0) return cannot();
    if (got == 0) break;
    bytes += static_cast<std::size_t>(got);
    const bool is_kept = memory && BIO_write(memory.get(), part.data(), static_cast<int>(got)) == got;
    OPENSSL_cleanse(part.data(), static_cast<std::size_t>(got));  // perhaps a key
    if (bytes > kFileBytesMax) return bad(path, "is no file of certificates: it has more than 4 MiB");
    if (!is_kept) return bad(path, "cannot be kept in memory");
  }
  return memory;
}

/// Whether the last certificate was followed by the end of the file, and by nothing damaged.
bool is_at_end() {
  const unsigned long error = ERR_peek_last_error();
  ERR_clear_error();
  return ERR_GET_LIB(error) == ERR_LIB_PEM && ERR_GET_REASON(error) == PEM_R_NO_START_LINE;
}

core::Result<Key> read_key(const std::string& path, mode_t& mode) {
  core::Result<Bio> file = open_file(path, &mode);
  if (!file.is_ok()) return file.status();
  Key key(PEM_read_bio_PrivateKey(file.value().get(), nullptr, &no_password, nullptr));
  if (!key) return bad(path, "has no private key in PEM without a password: " + openssl_text());
  return key;
}

core::Result<std::vector<Certificate>> read_certificates(const std::string& path) {
  core::Result<Bio> file = open_file(path);
  if (!file.is_ok()) return file.status();
  std::vector<Certificate> found;
  long bytes = 0;
  while (Certificate one{PEM_read_bio_X509(file.value().get(), nullptr, &no_password, nullptr)}) {
    bytes += i2d_X509(one.get(), nullptr);
    found.push_back(std::move(one));
    // Room for the listener's own certificate and its signature.
    if (bytes > kChainBytesMax / 2)
      return bad(path, "has more certificates than a handshake may bring (6 KiB): leave out the authorities' own");
  }
  const bool is_whole = is_at_end();
  if (found.empty()) return bad(path, "has no certificate in PEM");
  if (!is_whole) return bad(path, "has a damaged certificate behind number " + std::to_string(found.size()));
  return found;
}

Status trust_file(X509_STORE* trusted, const std::string& path) {
  core::Result<Bio> file = open_file(path);
  if (!file.is_ok()) return file.status();
  int count = 0;
  while (const Certificate one{PEM_read_bio_X509(file.value().get(), nullptr, &no_password, nullptr)}) {
    if (X509_STORE_add_cert(trusted, one.get()) != 1) return bad(path, "cannot be used: " + openssl_text());
    ++count;
  }
  const bool is_whole = is_at_end();
  if (count == 0) return bad(path, "has no certificates of authorities in PEM");
  return is_whole ? Status::ok() : bad(path, "has a damaged certificate behind number " + std::to_string(count));
}

/// All of them now: a folder that cannot be read later would make a good peer a stranger.
Status trust_folder(X509_STORE* trusted, const std::string& path) {
  std::error_code error;
  int count = 0;
  for (std::filesystem::directory_iterator at(path, error), end; !error && at != end; at.increment(error)) {
    const std::string name = at->path().filename();
    const std::size_t dot = name.find('.');  // as `openssl rehash` names them: 8 hexadecimal digits, a dot, a number
    if (dot != 8 || name.find_first_not_of("0123456789abcdef") != dot || name.size() == dot + 1 ||
        name.find_first_not_of("0123456789", dot + 1) != std::string::npos)
      continue;
    if (std::error_code unknown; !std::filesystem::exists(at->path(), unknown)) continue;  // a link to nothing is usual
    if (Status status = trust_file(trusted, at->path()); !status.is_ok()) return status;
    ++count;
  }
  if (error) return bad(path, "cannot be read: " + error.message());
  return count > 0 ? Status::ok() : bad(path, "has no certificates of authorities (run `openssl rehash` there)");
}

/// What a peer with the same authorities will say of `leaf`.
Status verify(X509_STORE* trusted, X509* leaf, STACK_OF(X509) * chain, const char* purpose, int level,
              const std::string& path) {
  const Context context(X509_STORE_CTX_new());
  if (!context || X509_STORE_CTX_init(context.get(), trusted, leaf, chain) != 1 ||
      X509_STORE_CTX_set_default(context.get(), purpose) != 1)
    return {Code::kInternal, "OpenSSL cannot check certificates: " + openssl_text()};
  X509_VERIFY_PARAM_set_auth_level(X509_STORE_CTX_get0_param(context.get()), level);
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

bool is_for_host(X509* certificate, const std::string& host, ShortNames short_names) {
  const std::vector<std::string> hosts = hosts_of(certificate);
  if (hosts.empty()) return true;
  if (host.empty()) return false;
  // Subjects are not asked: where a certificate has these names, they are all its names (RFC 6125, 6.4.4).
  if (X509_check_host(certificate, host.data(), host.size(), X509_CHECK_FLAG_NEVER_CHECK_SUBJECT, nullptr) == 1 ||
      X509_check_ip_asc(certificate, host.c_str(), 0) == 1)
    return true;
  if (short_names == ShortNames::kOfAnyDomain && host.find_first_of(".:") == std::string::npos)
    return std::any_of(hosts.begin(), hosts.end(), [&](const std::string& one) {
      const std::string label = one.starts_with("DNS:") ? one.substr(4, one.find('.') - 4) : std::string();
      return label == "*" || lower(label) == lower(host);
    });
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
                                                                            const core::SecretBytes& token) {
  const core::Result<const LibSsl*> ssl = load_libssl();
  if (!ssl.is_ok()) return ssl.status();
  ERR_clear_error();  // this thread's older errors are none of ours
  mode_t mode = 0;
  core::Result<Key> read = read_key(files.key, mode);
  if (!read.is_ok()) return read.status();
  core::Result<std::vector<Certificate>> chain = read_certificates(files.certificates);
  if (!chain.is_ok()) return chain.status();
  auto state = std::make_unique<AuthorityState>();
  state->ssl = ssl.value();
  state->is_of_user = true;
  state->user_key = std::move(read).value();
  state->between = std::move(chain).value();
  state->certificate = std::move(state->between.front());
  state->between.erase(state->between.begin());
  if (X509_check_private_key(state->certificate.get(), state->user_key.get()) != 1) {
    ERR_clear_error();
    return bad(files.key, "is the key of another certificate than the first of " + files.certificates);
  }
  state->trusted.reset(X509_STORE_new());
  X509_STORE* const trusted = state->trusted.get();
  if (trusted == nullptr) return Status(Code::kInternal, "OpenSSL cannot keep certificates: " + openssl_text());
  if (!files.authorities.empty())
    if (Status status = trust_file(trusted, files.authorities); !status.is_ok()) return status;
  if (!files.folder.empty())
    if (Status status = trust_folder(trusted, files.folder); !status.is_ok()) return status;
  X509_STORE_set_flags(trusted, X509_V_FLAG_ALLOW_PROXY_CERTS);
  if (!token.empty()) state->seal_key = seal_key_of(token);

  // A listener's certificate, as trial; at the level of security that connections have.
  SSL_CTX* const context = state->ssl->ctx_new(state->ssl->method());
  if (context == nullptr) return Status(Code::kInternal, "OpenSSL cannot make a context: " + openssl_text());
  const int level = state->ssl->ctx_get_security_level(context);
  state->ssl->ctx_free(context);
  const Stack behind(sk_X509_new_null());
  bool is_pushed = behind && sk_X509_push(behind.get(), state->certificate.get()) > 0;
  for (const Certificate& one : state->between) is_pushed = is_pushed && sk_X509_push(behind.get(), one.get()) > 0;
  const Certificate trial = make_proxy(state->user_key.get(), state->certificate.get(), state->user_key.get());
  if (!is_pushed || !trial) return bad(files.key, "cannot sign: " + openssl_text());
  for (const char* const purpose : {"ssl_client", "ssl_server"})
    if (Status status = verify(trusted, trial.get(), behind.get(), purpose, level, files.certificates); !status.is_ok())
      return status;

  if ((mode & S_IRWXO) != 0)
    state->warning = "GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY: all users of this host may read " + core::quoted(files.key) +
                     "; use chmod 600";
  state->text = "TLS by certificates: " + name_of(X509_get_subject_name(state->certificate.get())) + ", until " +
                text_of(X509_get0_notAfter(state->certificate.get()));
  std::string hosts;
  for (const std::string& host : hosts_of(state->certificate.get())) hosts += (hosts.empty() ? ", for " : " ") + host;
  state->text += hosts.empty() ? ", for any host" : hosts;
  return std::shared_ptr<const Authority>(std::make_shared<Authority>(std::move(state)));
}

}  // namespace hybridps::tls
