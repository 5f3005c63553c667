// Certificates of the user: whose host has one of the job's authorities talks; whatever is wrong with one is said.
#include <openssl/pem.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/tls/authority_impl.h"
#include "hybridps/tls/channel.h"
#include "hybridps/tls/sealed_store.h"
#include "tests/support/catch.h"

namespace hybridps::tls {
namespace {

using core::Code;

enum class Kind { kRsa, kShortRsa, kCurve, kEdwards };

Key new_key(Kind kind) {
  const bool is_rsa = kind == Kind::kRsa || kind == Kind::kShortRsa;
  const int type = is_rsa ? EVP_PKEY_RSA : kind == Kind::kCurve ? EVP_PKEY_EC : EVP_PKEY_ED25519;
  const std::unique_ptr<EVP_PKEY_CTX, FreeBy<EVP_PKEY_CTX_free>> context(EVP_PKEY_CTX_new_id(type, nullptr));
  EVP_PKEY* made = nullptr;
  REQUIRE(EVP_PKEY_keygen_init(context.get()) == 1);
  if (is_rsa) REQUIRE(EVP_PKEY_CTX_set_rsa_keygen_bits(context.get(), kind == Kind::kRsa ? 2048 : 512) == 1);
  if (kind == Kind::kCurve) REQUIRE(EVP_PKEY_CTX_set_ec_paramgen_curve_nid(context.get(), NID_X9_62_prime256v1) == 1);
  REQUIRE(EVP_PKEY_keygen(context.get(), &made) == 1);
  return Key(made);
}

/// A certificate and its key.
struct Pair {
  Key key;
  Certificate certificate;
};

/// What a certificate is to have. Days count from now.
struct Wanted {
  std::string name = "a host";
  std::string hosts;  // "DNS:a.example,IP:10.0.0.1"
  std::string usage;  // extended key usage
  bool is_authority = false;
  int from_day = -1;
  int to_day = 10;
  Kind kind = Kind::kCurve;
};

Pair issue(const Pair* by, const Wanted& wanted) {
  static long serial = 1;
  Pair made{new_key(wanted.kind), Certificate(X509_new())};
  X509* const one = made.certificate.get();
  REQUIRE(X509_set_version(one, 2) == 1);
  REQUIRE(ASN1_INTEGER_set(X509_get_serialNumber(one), serial++) == 1);
  REQUIRE(X509_time_adj_ex(X509_getm_notBefore(one), wanted.from_day, 0, nullptr) != nullptr);
  REQUIRE(X509_time_adj_ex(X509_getm_notAfter(one), wanted.to_day, 0, nullptr) != nullptr);
  if (!wanted.name.empty())
    REQUIRE(X509_NAME_add_entry_by_txt(X509_get_subject_name(one), "CN", MBSTRING_ASC,
                                       reinterpret_cast<const unsigned char*>(wanted.name.c_str()), -1, -1, 0) == 1);
  REQUIRE(X509_set_issuer_name(one, X509_get_subject_name(by != nullptr ? by->certificate.get() : one)) == 1);
  REQUIRE(X509_set_pubkey(one, made.key.get()) == 1);
  const auto add = [&](int nid, const std::string& text) {
    const std::unique_ptr<X509_EXTENSION, FreeBy<X509_EXTENSION_free>> extension(
        X509V3_EXT_conf_nid(nullptr, nullptr, nid, text.c_str()));
    REQUIRE((extension && X509_add_ext(one, extension.get(), -1) == 1));
  };
  add(NID_basic_constraints, wanted.is_authority ? "critical,CA:TRUE" : "critical,CA:FALSE");
  if (!wanted.hosts.empty()) add(NID_subject_alt_name, wanted.hosts);
  if (!wanted.usage.empty()) add(NID_ext_key_usage, wanted.usage);
  EVP_PKEY* const signer = by != nullptr ? by->key.get() : made.key.get();
  const bool is_edwards = EVP_PKEY_id(signer) == EVP_PKEY_ED25519;
  REQUIRE(X509_sign(one, signer, is_edwards ? nullptr : EVP_sha256()) > 0);
  return made;
}

Pair new_authority(const std::string& name, Kind kind = Kind::kCurve) {
  Wanted wanted;
  wanted.name = name;
  wanted.is_authority = true;
  wanted.kind = kind;
  return issue(nullptr, wanted);
}

struct Folder {
  Folder() {
    char name[] = "/tmp/hybridps-certificates-XXXXXX";  // NOLINT: mkdtemp() writes into it
    REQUIRE(::mkdtemp(name) != nullptr);
    path = name;
  }
  ~Folder() { std::filesystem::remove_all(path); }
  std::string write(const std::string& name, const std::vector<const X509*>& certificates, EVP_PKEY* key = nullptr,
                    const char* password = nullptr) const {
    const std::string file = path + "/" + name;
    const std::unique_ptr<FILE, int (*)(FILE*)> to(std::fopen(file.c_str(), "w"), &std::fclose);
    REQUIRE(to);
    for (const X509* const one : certificates) REQUIRE(PEM_write_X509(to.get(), const_cast<X509*>(one)) == 1);
    if (key != nullptr)
      REQUIRE(PEM_write_PKCS8PrivateKey(to.get(), key, password != nullptr ? EVP_aes_128_cbc() : nullptr, nullptr, 0,
                                        nullptr, const_cast<char*>(password)) == 1);
    return file;
  }
  std::string write_text(const std::string& name, const std::string& text) const {
    std::ofstream(path + "/" + name) << text;
    return path + "/" + name;
  }
  static std::string read(const std::string& file) {
    std::ifstream from(file);
    return {std::istreambuf_iterator<char>(from), {}};
  }
  /// The files of a host.
  CertificateFiles files(const std::string& name, const Pair& host, const std::vector<const X509*>& between,
                         const std::vector<const X509*>& trusted) const {
    std::vector<const X509*> chain{host.certificate.get()};
    chain.insert(chain.end(), between.begin(), between.end());
    return {write(name + ".key", {}, host.key.get()), write(name + ".pem", chain), write(name + ".ca", trusted), ""};
  }
  std::string path;
};

std::shared_ptr<const Authority> accepted(const CertificateFiles& files, const std::string& token = {}) {
  auto made = Authority::from_certificates(files, token);
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  return std::move(made).value();
}
std::shared_ptr<const Identity> listener(const std::shared_ptr<const Authority>& of) {
  auto made = of->make_identity();
  INFO(made.status().to_string());
  REQUIRE(made.is_ok());
  return std::move(made).value();
}
void refused(const CertificateFiles& files, const std::string& path, const std::string& text) {
  const auto made = Authority::from_certificates(files, "");
  REQUIRE_FALSE(made.is_ok());
  INFO(made.status().to_string());
  CHECK(made.status().code() == Code::kInvalidArgument);
  CHECK(made.status().message().find("'" + path + "'") != std::string_view::npos);
  CHECK(made.status().message().find(text) != std::string_view::npos);
}

/// Two channels over a pair of sockets.
struct Line {
  Line(std::shared_ptr<const Identity> a, std::shared_ptr<const Identity> b) {
    std::array<int, 2> pair{};
    const core::ForkLock lock;
    REQUIRE(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair.data()) == 0);
    for (std::size_t i = 0; i < 2; ++i) sockets[i] = core::Descriptor(lock, pair[i]);
    ends[0] = TlsChannel::dial(std::move(a), sockets[0].get(), knock_key({})).value();
    ends[1] = TlsChannel::accept(std::move(b), sockets[1].get(), guard);
  }
  /// What comes at one end, after both have moved as far as they can.
  std::string talk(std::size_t from, std::string text) {
    iovec part{text.data(), text.size()};
    (void)ends[from]->send(&part, 1);
    std::string got;
    for (int round = 0; round < 10; ++round)
      for (std::size_t i = 0; i < 2; ++i) {
        std::string here(100, '\0');
        part = {here.data(), here.size()};
        if (const ssize_t now = ends[i]->receive(&part, 1); now > 0 && i != from)
          got = here.substr(0, static_cast<std::size_t>(now));
      }
    return got;
  }
  std::array<core::Descriptor, 2> sockets;
  KnockGuard guard{{knock_key({})}};
  std::array<std::unique_ptr<TlsChannel>, 2> ends;
};

TEST_CASE("tls: hosts with certificates of one authority talk, and each listener has an id of its own", "[tls][fast]") {
  const Kind kind = GENERATE(Kind::kRsa, Kind::kCurve, Kind::kEdwards);
  const bool has_between = GENERATE(false, true);
  const Folder folder;
  const Pair root = new_authority("the authority", kind);
  Wanted between_wanted;
  between_wanted.name = "one between";
  between_wanted.is_authority = true;
  const Pair between = issue(&root, between_wanted);
  Wanted wanted;
  wanted.kind = kind;
  wanted.hosts = "DNS:a.example,IP:10.0.0.1";
  const Pair& signer = has_between ? between : root;
  const std::vector<const X509*> chain =
      has_between ? std::vector<const X509*>{between.certificate.get()} : std::vector<const X509*>{};
  const Pair a = issue(&signer, wanted);
  wanted.hosts = "DNS:b.example";
  wanted.usage = "serverAuth,clientAuth";
  const Pair b = issue(&signer, wanted);
  const auto at_a = accepted(folder.files("a", a, chain, {root.certificate.get()}));
  const auto at_b = accepted(folder.files("b", b, chain, {root.certificate.get()}));
  const auto first = listener(at_a);
  const auto second = listener(at_a);
  const auto other = listener(at_b);
  CHECK(first->id() != second->id());
  for (const auto& here : {first, second}) {
    Line line(here, other);
    CHECK(line.talk(0, "a greeting") == "a greeting");
    CHECK(line.talk(1, "an answer") == "an answer");
    REQUIRE((line.ends[0]->is_open() && line.ends[1]->is_open()));
    CHECK(line.ends[1]->peer() == here->id());
    CHECK(line.ends[0]->peer() == other->id());
    CHECK(line.ends[0]->is_with("b.example"));
    CHECK_FALSE(line.ends[0]->is_with("a.example"));
    CHECK(line.ends[1]->is_with("10.0.0.1"));
    CHECK_FALSE(line.ends[1]->is_with("10.0.0.2"));
  }
  CHECK(at_a->text().find("TLS by certificates: CN=a host, until ") == 0);
  CHECK(at_a->text().find(", for DNS:a.example IP:10.0.0.1") != std::string::npos);
  const std::vector<std::string> elsewhere{"c", "10.0.0.2"};
  const std::vector<std::string> here{"c", "10.0.0.1"};
  CHECK(at_a->is_for_one_of(here));
  CHECK_FALSE(at_a->is_for_one_of(elsewhere));
}

TEST_CASE("tls: a host that one side does not trust gets no byte, and both sides say why", "[tls][fast]") {
  const Folder folder;
  const Pair ours = new_authority("ours");
  const Pair theirs = new_authority("theirs");
  const auto a =
      listener(accepted(folder.files("a", issue(&ours, {}), {}, {ours.certificate.get(), theirs.certificate.get()})));
  const auto b = listener(accepted(folder.files("b", issue(&theirs, {}), {}, {theirs.certificate.get()})));
  const std::size_t dials = GENERATE(0, 1);
  Line line(dials == 0 ? a : b, dials == 0 ? b : a);
  CHECK(line.talk(0, "a greeting").empty());
  const TlsChannel& trusting = *line.ends[dials];
  const TlsChannel& refusing = *line.ends[1 - dials];
  CHECK_FALSE(refusing.is_open());
  CHECK((refusing.is_of_another_job() && trusting.is_of_another_job()));
  INFO(refusing.why());
  CHECK(refusing.why().find("the certificate of the other side is refused here: ") == 0);
  INFO(trusting.why());
  CHECK(trusting.why().find("the other side refuses the certificate of this host: ") == 0);
}

TEST_CASE("tls: holders of a token and holders of certificates do not talk", "[tls][fast]") {
  const Folder folder;
  const Pair root = new_authority("the authority");
  const std::string token = "a token of some length";
  const auto certified = accepted(folder.files("a", issue(&root, {}), {}, {root.certificate.get()}), token);
  const auto by_token = Authority::from_token(token).value();
  Line line(listener(certified), listener(by_token));
  CHECK(line.talk(0, "a greeting").empty());
  CHECK((!line.ends[0]->is_open() && !line.ends[1]->is_open()));
}

TEST_CASE("tls: what peers would refuse is an error at the start, with the file and what to do", "[tls][fast]") {
  const Folder folder;
  const Pair root = new_authority("the authority");
  const std::vector<const X509*> trusted{root.certificate.get()};
  const auto files_of = [&](const Wanted& wanted) { return folder.files("a", issue(&root, wanted), {}, trusted); };
  CertificateFiles good = files_of({});
  (void)accepted(good);

  Wanted wanted;
  wanted.from_day = -9;
  wanted.to_day = -1;
  refused(files_of(wanted), good.certificates, "expired");
  wanted = {};
  wanted.from_day = 2;
  refused(files_of(wanted), good.certificates, "is the clock right?");
  for (const char* const usage : {"serverAuth", "clientAuth"}) {
    wanted = {};
    wanted.usage = usage;
    refused(files_of(wanted), good.certificates, "both serverAuth and clientAuth");
  }
  wanted = {};
  wanted.is_authority = true;
  refused(files_of(wanted), good.certificates, "CA:FALSE");
  wanted = {};
  wanted.name = "";
  refused(files_of(wanted), good.certificates, "needs one, for example a CN");
  const Pair another = new_authority("another");
  refused(folder.files("a", issue(&another, {}), {}, trusted), good.certificates, "unable to get local issuer");
  wanted = {};
  wanted.name = "one between";
  wanted.is_authority = true;
  wanted.to_day = -1;
  wanted.from_day = -3;
  const Pair between = issue(&root, wanted);
  refused(folder.files("a", issue(&between, {}), {between.certificate.get()}, trusted), good.certificates,
          "CN=one between");
  refused(folder.files("a", issue(&between, {}), {}, trusted), good.certificates, "unable to get local issuer");
  wanted = {};
  wanted.hosts = "DNS:" + std::string(60, 'x') + ".example";
  for (int i = 0; i < 7; ++i) wanted.hosts += "," + wanted.hosts;
  refused(files_of(wanted), good.certificates, "more certificates than a handshake may bring");

  good = files_of({});
  CertificateFiles files = good;
  files.key = folder.write("other.key", {}, new_key(Kind::kCurve).get());
  refused(files, files.key, "is the key of another certificate");
  files.key = folder.write("secret.key", {}, new_key(Kind::kCurve).get(), "a password");
  refused(files, files.key, "without a password");
  files.key = folder.write("empty.key", {});
  refused(files, files.key, "no private key");
  files.key = folder.path + "/none";
  refused(files, files.key, "cannot be read: No such file");
  files = good;
  files.certificates = folder.path + "/none";
  refused(files, files.certificates, "cannot be read: No such file");
  files.certificates = folder.write("empty.pem", {});
  refused(files, files.certificates, "has no certificate in PEM");
  files = good;
  files.authorities = folder.write("empty.ca", {});
  refused(files, files.authorities, "has no certificates of authorities");
  files.authorities = folder.path + "/none";
  refused(files, files.authorities, "cannot be read: No such file");
  files.authorities = folder.path;
  refused(files, files.authorities, "cannot be read: it is no file");
  for (const bool is_whole : {true, false}) {  // a second certificate that is damaged is not left out
    std::string text = folder.read(good.authorities);
    text += is_whole ? text : text.substr(0, text.size() / 2);
    for (std::string CertificateFiles::* const which :
         {&CertificateFiles::certificates, &CertificateFiles::authorities}) {
      files = good;
      files.*which = folder.write_text(
          "twice", which == &CertificateFiles::authorities ? text : folder.read(good.certificates) + text);
      if (is_whole)
        (void)accepted(files);
      else
        refused(files, files.*which, "has a damaged certificate behind number ");
    }
  }

  // A folder of authorities.
  files = good;
  files.authorities.clear();
  files.folder = folder.path + "/none";
  refused(files, files.folder, "cannot be read: No such file");
  files.folder = folder.path + "/authorities";
  std::filesystem::create_directory(files.folder);
  (void)folder.write("authorities/ca.pem", trusted);
  refused(files, files.folder, "openssl rehash");
  (void)folder.write("authorities/0123abcd.0", {another.certificate.get()});
  refused(files, files.certificates, "unable to get local issuer");
  (void)folder.write("authorities/0123abcd.1", trusted);
  (void)accepted(files);

  // A key that TLS itself would not use.
  wanted = {};
  wanted.kind = Kind::kShortRsa;
  refused(files_of(wanted), good.certificates, "key too weak");
}

TEST_CASE("tls: the certificate of a listener signs no other", "[tls][fast]") {
  const Pair root = new_authority("the authority");
  const Pair host = issue(&root, {});
  const Key first_key = new_key(Kind::kEdwards);
  const Certificate first = make_proxy(first_key.get(), host.certificate.get(), host.key.get());
  const Key second_key = new_key(Kind::kEdwards);
  const Certificate second = make_proxy(second_key.get(), first.get(), first_key.get());
  REQUIRE((first && second));
  const TrustStore trusted(X509_STORE_new());
  REQUIRE(X509_STORE_add_cert(trusted.get(), root.certificate.get()) == 1);
  X509_STORE_set_flags(trusted.get(), X509_V_FLAG_ALLOW_PROXY_CERTS);
  const auto verified = [&](X509* leaf, const std::vector<X509*>& chain) {
    STACK_OF(X509)* const behind = sk_X509_new_null();
    for (X509* const one : chain) sk_X509_push(behind, one);
    const std::unique_ptr<X509_STORE_CTX, FreeBy<X509_STORE_CTX_free>> context(X509_STORE_CTX_new());
    REQUIRE(X509_STORE_CTX_init(context.get(), trusted.get(), leaf, behind) == 1);
    const int result = X509_verify_cert(context.get()) == 1 ? X509_V_OK : X509_STORE_CTX_get_error(context.get());
    sk_X509_free(behind);
    return result;
  };
  CHECK(verified(first.get(), {host.certificate.get()}) == X509_V_OK);
  CHECK(verified(second.get(), {first.get(), host.certificate.get()}) == X509_V_ERR_PROXY_PATH_LENGTH_EXCEEDED);
}

TEST_CASE("tls: a certificate is for the hosts that it names, or for any if it names none", "[tls][fast]") {
  Wanted wanted;
  wanted.hosts = "DNS:Node1.rack.example,DNS:*.other.example,IP:10.0.0.1,IP:fe80:0:0:0:0:0:0:1";
  const Pair one = issue(nullptr, wanted);
  X509* const it = one.certificate.get();
  constexpr ShortNames kExact = ShortNames::kExact;
  constexpr ShortNames kAny = ShortNames::kOfAnyDomain;
  for (const char* const host : {"node1.rack.example", "10.0.0.1", "fe80::1", "x.other.example"})
    CHECK((is_for_host(it, host, kExact) && is_for_host(it, host, kAny)));
  for (const char* const host : {"NODE1", "x"})  // "x": some host of other.example
    CHECK((!is_for_host(it, host, kExact) && is_for_host(it, host, kAny)));
  for (const char* const host : {"node2.rack.example", "rack.example", "10.0.0.11", "fe80::2", "", "x.y"}) {
    INFO(host);
    CHECK_FALSE((is_for_host(it, host, kExact) || is_for_host(it, host, kAny)));
  }
  wanted.hosts = "DNS:node1.example";
  const Pair narrow = issue(nullptr, wanted);
  CHECK(is_for_host(narrow.certificate.get(), "node1", kAny));
  for (const char* const host : {"node", "node11", "a host", "node1.example.org", "10.0.0.1"})
    CHECK_FALSE(is_for_host(narrow.certificate.get(), host, kAny));
  wanted.hosts = "URI:spiffe://example/job";
  const Pair nowhere = issue(nullptr, wanted);
  CHECK(is_for_host(nowhere.certificate.get(), "node7", kExact));
}

TEST_CASE("tls: certificates seal no value without a token, and with one as the token alone does", "[tls][fast]") {
  const Folder folder;
  const Pair root = new_authority("the authority");
  const CertificateFiles files = folder.files("a", issue(&root, {}), {}, {root.certificate.get()});
  auto memory = std::make_shared<bootstrap::MemoryStore>();
  const std::string token = "a token of some length";
  const bootstrap::Bytes value{1, 2, 3};
  REQUIRE(seal(memory, accepted(files))->set("plain", value).is_ok());
  CHECK(memory->contents().at("plain") == value);
  REQUIRE(seal(memory, accepted(files, token))->set("sealed", value).is_ok());
  CHECK(seal(memory, Authority::from_token(token).value())->try_get("sealed").value() == value);
  CHECK(seal(memory, accepted(files))->try_get("sealed").status().code() == Code::kMismatch);
  CHECK(seal(memory, accepted(files, token))->try_get("plain").status().code() == Code::kMismatch);
}

}  // namespace
}  // namespace hybridps::tls
