#include "hybridps/tls/kernel_sender.h"

#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/crypto.h>
#include <sys/socket.h>
#include <sys/utsname.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>
#include <string_view>

namespace hybridps::tls {
namespace {

/// Of this process: the kernel has refused.
std::atomic<bool> has_failed{false};

/// HKDF-Expand-Label without a context, of at most one block (RFC 8446, 7.1; RFC 5869, 2.3).
Mac expand(const Mac& secret, std::string_view label, std::uint8_t bytes) {
  std::string info{'\0', static_cast<char>(bytes), static_cast<char>(label.size() + 6)};
  info.append("tls13 ").append(label);
  info.append({'\0', '\1'});  // no context; the first block
  return hmac(secret, {bytes_of(info)});
}

}  // namespace

bool KernelSender::is_worth_a_try() {
  if (has_failed.load(std::memory_order_relaxed)) return false;
  utsname kernel{};
  int major = 0;
  int minor = 0;
  return ::uname(&kernel) == 0 && std::sscanf(kernel.release, "%d.%d", &major, &minor) == 2 &&
         (major > 6 || (major == 6 && minor >= 14));
}

std::unique_ptr<KernelSender> KernelSender::begin(int socket, const Mac& secret, bool& is_spoiled) {
  if (has_failed.load(std::memory_order_relaxed)) return nullptr;
  constexpr std::string_view kName = "tls";
  std::unique_ptr<KernelSender> made(new KernelSender(socket, secret));
  if (::setsockopt(socket, IPPROTO_TCP, TCP_ULP, kName.data(), kName.size()) == 0 && made->set_key()) {
    if (made->set_key()) return made;  // the same key, from record 0: tells whether a later one can be set
    is_spoiled = true;
  }
  has_failed.store(true, std::memory_order_relaxed);
  return nullptr;
}

KernelSender::~KernelSender() { OPENSSL_cleanse(secret_.data(), secret_.size()); }

bool KernelSender::set_key() const {
  tls12_crypto_info_aes_gcm_128 keys{};  // of TLS 1.3 as well; all begins with record 0
  keys.info.version = TLS_1_3_VERSION;
  keys.info.cipher_type = TLS_CIPHER_AES_GCM_128;
  static_assert(sizeof keys.salt + sizeof keys.iv == 12);
  Mac key = expand(secret_, "key", sizeof keys.key);
  Mac iv = expand(secret_, "iv", sizeof keys.salt + sizeof keys.iv);
  std::copy_n(key.begin(), sizeof keys.key, std::begin(keys.key));
  std::copy_n(iv.begin(), sizeof keys.salt, std::begin(keys.salt));
  std::copy_n(iv.begin() + sizeof keys.salt, sizeof keys.iv, std::begin(keys.iv));
  const bool is_set = ::setsockopt(socket_, SOL_TLS, TLS_TX, &keys, sizeof keys) == 0;
  const int error = errno;
  OPENSSL_cleanse(&keys, sizeof keys);
  OPENSSL_cleanse(key.data(), key.size());
  OPENSSL_cleanse(iv.data(), iv.size());
  errno = error;
  return is_set;
}

bool KernelSender::change_key() {
  // A record of type handshake with the message key_update, which asks for no answer.
  constexpr unsigned char kHandshake = 22;
  std::array<unsigned char, 5> message{24, 0, 0, 1, 0};
  iovec part{message.data(), message.size()};
  alignas(cmsghdr) std::array<unsigned char, CMSG_SPACE(1)> control{};
  msghdr out{};
  out.msg_iov = &part;
  out.msg_iovlen = 1;
  out.msg_control = control.data();
  out.msg_controllen = control.size();
  cmsghdr* const type = CMSG_FIRSTHDR(&out);
  type->cmsg_level = SOL_TLS;
  type->cmsg_type = TLS_SET_RECORD_TYPE;
  type->cmsg_len = CMSG_LEN(1);
  *CMSG_DATA(type) = kHandshake;
  ssize_t sent = 0;
  do {
    sent = ::sendmsg(socket_, &out, MSG_NOSIGNAL | MSG_DONTWAIT);
  } while (sent < 0 && errno == EINTR);
  if (sent != static_cast<ssize_t>(message.size())) return false;
  Mac next = expand(secret_, "traffic upd", static_cast<std::uint8_t>(secret_.size()));
  secret_ = next;
  OPENSSL_cleanse(next.data(), next.size());
  if (set_key()) return true;
  if (errno == EAGAIN) errno = EPROTO;  // the other side has been told
  return false;
}

}  // namespace hybridps::tls
