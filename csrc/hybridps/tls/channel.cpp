#include "hybridps/tls/channel.h"

#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/x509v3.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <optional>
#include <utility>

#include "hybridps/tls/authority_impl.h"

namespace hybridps::tls {
namespace {

/// The most that one record holds.
constexpr std::size_t kRecordBytes = std::size_t{16} << 10;
/// What one read takes from the socket, once the peer is known.
constexpr std::size_t kReadBufferBytes = std::size_t{64} << 10;
/// A buffer for encrypted bytes that an idle channel may keep.
constexpr std::size_t kKeptBytesMax = 4096;

/// Whether an error is the other side's alert that it does not take our certificate (RFC 8446, 6.2). Other alerts may
/// be of bytes that were changed on the way, or of no memory there: the next attempt may succeed.
bool is_refusal(unsigned long error) {
  if (ERR_GET_LIB(error) != ERR_LIB_SSL) return false;
  switch (ERR_GET_REASON(error) - SSL_AD_REASON_OFFSET) {
    case SSL3_AD_BAD_CERTIFICATE:
    case SSL3_AD_UNSUPPORTED_CERTIFICATE:
    case SSL3_AD_CERTIFICATE_REVOKED:
    case SSL3_AD_CERTIFICATE_EXPIRED:
    case SSL3_AD_CERTIFICATE_UNKNOWN:
    case TLS1_AD_UNKNOWN_CA:
    case TLS1_AD_ACCESS_DENIED:
    case TLS1_AD_DECRYPT_ERROR:  // a signature that does not fit: another token
    case TLS13_AD_CERTIFICATE_REQUIRED: return true;
    default: return false;
  }
}

/// The answer to a knock for another listener, in clear, before the connection is closed.
constexpr unsigned char kNotHere = 'N';

/// Of records of TLS 1.3: alert, handshake, data; and one that older versions had (RFC 8446, 5.1).
bool is_record_type(unsigned char byte) { return byte >= 20 && byte <= 23; }

}  // namespace

/// OpenSSL's side: it reads from the socket, and its records are gathered in the channel.
struct TlsChannel::Ssl {
  Ssl(TlsChannel& c, const LibSsl& functions) : channel(c), library(functions) {}
  ~Ssl() {
    forget_secret();
    if (object != nullptr) library.free(object);
  }

  static int write(BIO* bio, const char* data, int bytes) {
    TlsChannel& channel = static_cast<Ssl*>(BIO_get_data(bio))->channel;
    // An alert after the end, or an answer to a key update, which our peers do not ask for. OpenSSL does not know the
    // number of the next record.
    if (channel.kernel_) return bytes;
    auto& to = channel.sealed_;
    const auto* const from = reinterpret_cast<const std::byte*>(data);
    to.insert(to.end(), from, from + bytes);
    return bytes;
  }

  static int read(BIO* bio, char* data, int bytes) {
    TlsChannel& channel = static_cast<Ssl*>(BIO_get_data(bio))->channel;
    BIO_clear_retry_flags(bio);
    if (channel.dials_ && channel.came_ == 0) {
      unsigned char first = 0;
      const ssize_t seen = ::recv(channel.socket_, &first, 1, MSG_PEEK | MSG_DONTWAIT);
      if (seen == 1 && !is_record_type(first)) {
        channel.is_clear_ = true;
        channel.is_elsewhere_ = first == kNotHere;
        return -1;
      }
      if (seen < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR)) {
        BIO_set_retry_read(bio);  // what comes from now on is looked at by the next call
        return -1;
      }
      if (seen < 0) {  // the socket tells its error once
        channel.error_ = errno;
        return -1;
      }
    }
    ssize_t got = 0;
    do {
      got = ::recv(channel.socket_, data, static_cast<std::size_t>(bytes), MSG_DONTWAIT);
    } while (got < 0 && errno == EINTR);
    if (got == 0) channel.has_ended_ = true;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
      BIO_set_retry_read(bio);
    else if (got < 0)
      channel.error_ = errno;
    channel.is_drained_ = got < bytes;
    if (got > 0) channel.read_ += static_cast<std::uint64_t>(got);
    if (got > 0 && !channel.is_open_) channel.came_ += static_cast<std::size_t>(got);
    return static_cast<int>(got);
  }

  static long control(BIO*, int command, long, void*) { return command == BIO_CTRL_FLUSH ? 1 : 0; }

  static const BIO_METHOD* method() {
    static const BIO_METHOD* const made = [] {
      BIO_METHOD* const one = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "hybridps");
      if (one == nullptr) return one;
      BIO_meth_set_write(one, &write);
      BIO_meth_set_read(one, &read);
      BIO_meth_set_ctrl(one, &control);
      return one;
    }();
    return made;
  }

  void forget_secret() {
    if (secret) OPENSSL_cleanse(secret->data(), secret->size());
    secret.reset();
  }

  TlsChannel& channel;
  const LibSsl& library;
  SSL* object = nullptr;
  std::optional<Mac> secret;  // of what this side sends, until the kernel has it
};

/// A line is "SERVER_TRAFFIC_SECRET_0 RANDOM SECRET", in hexadecimal (the format of NSS's key log).
void keep_secret(const SSL* object, const char* line) {
  // The callback has no other way to its channel.
  const LibSsl& library = *load_libssl().value();
  auto& ssl = *static_cast<TlsChannel::Ssl*>(BIO_get_data(library.get_wbio(object)));
  const std::string_view text(line);
  if (!text.starts_with(ssl.channel.dials_ ? "CLIENT_TRAFFIC_SECRET_0 " : "SERVER_TRAFFIC_SECRET_0 ")) return;
  const std::string_view digits = text.substr(text.rfind(' ') + 1);
  ssl.forget_secret();
  Mac& secret = ssl.secret.emplace();
  bool is_whole = digits.size() == 2 * secret.size();
  for (std::size_t i = 0; is_whole && i < secret.size(); ++i)
    is_whole = std::from_chars(&digits[2 * i], &digits[2 * i] + 2, secret[i], 16).ec == std::errc();
  if (!is_whole) ssl.forget_secret();
}

TlsChannel::TlsChannel(std::shared_ptr<const Identity> identity, int socket, KnockGuard* guard)
    : identity_(std::move(identity)), socket_(socket), dials_(guard == nullptr), guard_(guard) {}

TlsChannel::~TlsChannel() = default;

core::Result<std::unique_ptr<TlsChannel>> TlsChannel::dial(std::shared_ptr<const Identity> identity, int socket,
                                                           const Mac& key) {
  std::unique_ptr<TlsChannel> channel(new TlsChannel(std::move(identity), socket, nullptr));
  if (core::Status status = channel->open_ssl(); !status.is_ok()) return status;
  const KnockBytes knock = make_knock(key);
  for (const std::uint8_t byte : knock) channel->sealed_.push_back(static_cast<std::byte>(byte));
  return channel;
}

std::unique_ptr<TlsChannel> TlsChannel::accept(std::shared_ptr<const Identity> identity, int socket,
                                               KnockGuard& guard) {
  return std::unique_ptr<TlsChannel>(new TlsChannel(std::move(identity), socket, &guard));
}

core::Status TlsChannel::open_ssl() {
  const Identity::IdentityState& state = identity_->state();
  ssl_ = std::make_unique<Ssl>(*this, *state.ssl);
  Ssl& ssl = *ssl_;
  ssl.object = state.ssl->make(state.context);
  BIO* const bio = Ssl::method() != nullptr && ssl.object != nullptr ? BIO_new(Ssl::method()) : nullptr;
  if (bio == nullptr) return core::Status(core::Code::kInternal, "OpenSSL cannot make a connection: " + openssl_text());
  BIO_set_data(bio, &ssl);
  BIO_set_init(bio, 1);
  state.ssl->set_bio(ssl.object, bio, bio);
  if (dials_)
    state.ssl->set_connect_state(ssl.object);
  else
    state.ssl->set_accept_state(ssl.object);
  return core::Status::ok();
}

bool TlsChannel::hear_knock() {
  if (guard_ == nullptr) return true;
  const auto fail = [&](std::string why) {
    why_ = std::move(why);
    errno = EPROTO;
    return false;
  };
  if (!why_.empty()) return fail(std::move(why_));
  while (knock_have_ < knock_.size()) {
    const ssize_t got = ::recv(socket_, knock_.data() + knock_have_, knock_.size() - knock_have_, MSG_DONTWAIT);
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return false;
    if (got == 0) {
      has_ended_ = true;
      errno = ECONNRESET;
      return false;
    }
    knock_have_ += static_cast<std::size_t>(got);
    if (!may_be_knock(std::span(knock_).first(knock_have_)))
      return fail("the other side does not use TLS as hybridps does; set HYBRIDPS_SECURITY=tls there, too");
  }
  const KnockGuard::Heard heard = guard_->hear(knock_);
  is_of_another_job_ = heard == KnockGuard::Heard::kOther;
  if (is_of_another_job_) {
    std::array<std::byte, 2048> unread;  // unread bytes would make the close send a reset, and the answer may be lost
    (void)!::recv(socket_, unread.data(), unread.size(), MSG_DONTWAIT);
    (void)!::send(socket_, &kNotHere, 1, MSG_NOSIGNAL | MSG_DONTWAIT);
    return fail("the other side has another token, or looks for another process");
  }
  if (heard == KnockGuard::Heard::kNone) return fail("bytes were changed on the way");
  if (heard == KnockGuard::Heard::kReplayed) return fail("somebody repeats what a member has said");
  if (const core::Status status = open_ssl(); !status.is_ok()) return fail(std::string(status.message()));
  guard_ = nullptr;
  return true;
}

int TlsChannel::failed(int result) {
  const int why = ssl_->library.get_error(ssl_->object, result);
  if (is_elsewhere_) {
    why_ = "another process is there, or it has another token; is its HYBRIDPS_TOKEN the same?";
    return EPROTO;
  }
  if (is_clear_) {
    why_ = "the other side does not use TLS; set HYBRIDPS_SECURITY=tls there, too";
    return EPROTO;
  }
  if (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE) {
    if (is_open_ || came_ <= kStrangerBytesMax) return EAGAIN;
    why_ = "TLS: too long a handshake";
    return EPROTO;
  }
  if (error_ != 0) return error_;
  if (has_ended_ || why == SSL_ERROR_ZERO_RETURN) return 0;
  if (why_.empty()) {
    const long verified = ssl_->library.get_verify_result(ssl_->object);
    // OpenSSL's errors above this are alerts of the other side.
    const bool is_refused = verified == X509_V_OK && is_refusal(ERR_peek_error());
    is_of_another_job_ = !has_given_ && (verified != X509_V_OK || is_refused);
    const bool is_of_user = identity_->state().is_of_user;
    if (verified == X509_V_OK)
      why_ = (is_of_user && is_refused ? "the other side refuses the certificate of this host: " : "TLS: ") +
             openssl_text();
    else if (is_of_user)
      why_ =
          std::string("the certificate of the other side is refused here: ") + X509_verify_cert_error_string(verified);
    else
      why_ =
          "the other side has no certificate of this job: is its HYBRIDPS_TOKEN the same, and has it no certificates "
          "of its own?";
  }
  return EPROTO;
}

bool TlsChannel::shake() {
  if (is_open_) return true;
  if (!why_.empty()) {
    errno = EPROTO;
    return false;
  }
  if (!hear_knock()) return false;
  ERR_clear_error();
  const int result = ssl_->library.do_handshake(ssl_->object);
  if (result != 1) {
    const int why = failed(result);
    (void)flush();  // also the alert that tells the other side
    errno = why == 0 ? ECONNRESET : why;
    return false;
  }
  const Certificate theirs(ssl_->library.get_peer_certificate(ssl_->object));
  if (!theirs || !id_of(theirs.get(), peer_)) {
    why_ = "TLS: the other side has no certificate";
    errno = EPROTO;
    return false;
  }
  is_open_ = true;
  ssl_->library.set_read_buffer(ssl_->object, kReadBufferBytes);
  ssl_->library.set_read_ahead(ssl_->object, 1);
  // Not if a part of the handshake waits: the kernel would encrypt it once more.
  if (ssl_->secret && ssl_->library.cipher_id(ssl_->library.get_cipher(ssl_->object)) == TLS1_3_CK_AES_128_GCM_SHA256 &&
      flush()) {
    bool is_spoiled = false;
    kernel_ = KernelSender::begin(socket_, *ssl_->secret, is_spoiled);
    if (is_spoiled) {
      error_ = ECONNRESET;
      errno = error_;
      return false;
    }
  }
  ssl_->forget_secret();
  const std::vector<std::byte> early = std::exchange(early_, {});
  if (early.empty()) return flush() || errno == EAGAIN;
  const iovec part{const_cast<std::byte*>(early.data()), early.size()};  // NOLINT: it is not written to
  if (!kernel_) {
    (void)seal(early.data(), early.size());
  } else if (send_by_kernel(&part, 1) != static_cast<ssize_t>(early.size())) {  // it counts as sent
    error_ = ECONNRESET;
    errno = error_;
    return false;
  }
  return flush() || errno == EAGAIN;
}

bool TlsChannel::is_with(const std::string& host) const {
  if (!identity_->state().is_of_user) return true;
  // The chain begins with the listener's own certificate. Behind a proxy certificate comes that of its host.
  const STACK_OF(X509)* const chain = ssl_->library.get0_verified_chain(ssl_->object);
  for (int i = 0; i < sk_X509_num(chain); ++i)
    if (X509* const one = sk_X509_value(chain, i); (X509_get_extension_flags(one) & EXFLAG_PROXY) == 0)
      return is_for_host(one, host, ShortNames::kExact);
  return false;
}

bool TlsChannel::seal(const std::byte* data, std::size_t bytes) {
  ERR_clear_error();
  if (records_++ >= records_max_) {
    (void)ssl_->library.key_update(ssl_->object, SSL_KEY_UPDATE_NOT_REQUESTED);
    records_ = 0;
  }
  const int result = ssl_->library.write(ssl_->object, data, static_cast<int>(bytes));
  if (result == static_cast<int>(bytes)) return true;  // never a part: the BIO takes all
  errno = failed(result);
  return false;
}

bool TlsChannel::flush() {
  while (begin_ < sealed_.size()) {
    const ssize_t sent = ::send(socket_, sealed_.data() + begin_, sealed_.size() - begin_, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0) return false;
    begin_ += static_cast<std::size_t>(sent);
  }
  begin_ = 0;
  sealed_.clear();
  if (sealed_.capacity() > kKeptBytesMax) sealed_ = {};
  return true;
}

ssize_t TlsChannel::send_by_kernel(const iovec* parts, std::size_t count) {
  if (count == 0) return 0;
  const auto fail = [&] {
    if (errno == EBADMSG || errno == EPROTO) {
      why_ = "TLS: the kernel cannot encrypt";
      errno = EPROTO;
    }
    if (errno != EAGAIN && errno != EWOULDBLOCK) error_ = errno;
    return ssize_t{-1};
  };
  if (records_ >= records_max_) {
    if (!kernel_->change_key()) return fail();
    records_ = 0;
  }
  msghdr message{};
  message.msg_iov = const_cast<iovec*>(parts);  // NOLINT: sendmsg() does not write to it
  message.msg_iovlen = count;
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent < 0) return fail();
  records_ += static_cast<std::size_t>(sent) / kRecordBytes + 1;
  return sent;
}

ssize_t TlsChannel::send(const iovec* parts, std::size_t count) {
  if (error_ != 0) {
    errno = error_;
    return -1;
  }
  if (!is_open_) {
    std::size_t bytes = 0;
    for (std::size_t i = 0; i < count; ++i) bytes += parts[i].iov_len;
    if (early_.size() + bytes > kEarlyBytesMax) {
      errno = EAGAIN;
      return -1;
    }
    for (std::size_t i = 0; i < count; ++i) {
      const auto* const data = static_cast<const std::byte*>(parts[i].iov_base);
      early_.insert(early_.end(), data, data + parts[i].iov_len);
    }
    if (!shake() && errno != EAGAIN) return -1;
    return static_cast<ssize_t>(bytes);
  }
  if (kernel_) return send_by_kernel(parts, count);
  if (!flush()) return -1;
  std::size_t bytes_in_all = 0;
  for (std::size_t i = 0; i < count && bytes_in_all < kSealedBytesMax; ++i) bytes_in_all += parts[i].iov_len;
  if (bytes_in_all > kKeptBytesMax)
    sealed_.reserve(std::min(bytes_in_all, kSealedBytesMax) + kRecordBytes + (std::size_t{1} << 10));
  std::size_t taken = 0;
  std::array<std::byte, kRecordBytes> record;
  for (std::size_t i = 0, at = 0; i < count && sealed_.size() < kSealedBytesMax;) {
    const auto* const data = static_cast<const std::byte*>(parts[i].iov_base);
    std::size_t bytes = std::min(parts[i].iov_len - at, kRecordBytes);
    const std::byte* from = data + at;
    if (bytes < kRecordBytes) {  // what is small shares a record with what follows
      bytes = 0;
      while (i < count && bytes < kRecordBytes) {
        const std::size_t some = std::min(parts[i].iov_len - at, kRecordBytes - bytes);
        if (some > 0) std::memcpy(record.data() + bytes, static_cast<const std::byte*>(parts[i].iov_base) + at, some);
        bytes += some;
        at += some;
        if (at == parts[i].iov_len) {
          ++i;
          at = 0;
        }
      }
      from = record.data();
    } else {
      at += bytes;
      if (at == parts[i].iov_len) {
        ++i;
        at = 0;
      }
    }
    if (bytes > 0 && !seal(from, bytes)) {
      error_ = errno == 0 || errno == EAGAIN ? EPROTO : errno;
      if (why_.empty()) why_ = "TLS: OpenSSL cannot encrypt";
      break;
    }
    taken += bytes;
  }
  // What was taken counts as sent even if the connection breaks now: some of it may have arrived.
  if (!flush() && errno != EAGAIN) error_ = errno;
  if (taken == 0 && error_ != 0) {
    errno = error_;
    return -1;
  }
  return static_cast<ssize_t>(taken);
}

void TlsChannel::note_partial(bool is_partial) {
  if (!is_partial)
    partial_since_ = {};
  else if (partial_since_ == core::TimePoint{} || read_ != read_at_partial_)
    partial_since_ = core::Clock::now();
  read_at_partial_ = read_;
}

ssize_t TlsChannel::receive(const iovec* parts, std::size_t count) {
  if (!shake()) return has_ended_ && errno == ECONNRESET ? 0 : -1;
  std::size_t given = 0;
  for (std::size_t i = 0, at = 0; i < count;) {
    if (at == parts[i].iov_len) {
      ++i;
      at = 0;
      continue;
    }
    ERR_clear_error();
    const int got = ssl_->library.read(ssl_->object, static_cast<std::byte*>(parts[i].iov_base) + at,
                                       static_cast<int>(parts[i].iov_len - at));
    if (got <= 0) {
      const int why = failed(got);
      note_partial(why == EAGAIN && ssl_->library.has_pending(ssl_->object) != 0);
      if (given > 0) break;  // the next call tells
      if (why == 0) return 0;
      errno = why;
      return -1;
    }
    partial_since_ = {};
    has_given_ = true;
    given += static_cast<std::size_t>(got);
    at += static_cast<std::size_t>(got);
    if (is_drained_ && ssl_->library.has_pending(ssl_->object) == 0) break;  // the socket was empty
  }
  return static_cast<ssize_t>(given);
}

}  // namespace hybridps::tls
