// hybridps/tls/channel.h: one connection in TLS 1.3, over a socket that does not block.
//
// Model    send() and receive() are like sendmsg() and readv() of a socket: they move as many bytes as they can. EAGAIN
//          means "not now". The handshake runs inside these calls. The channel gives no byte before the peer has proven
//          that it belongs to the job (authority.h). A record that was changed, left out, repeated or moved ends the
//          channel with EPROTO.
// Knock    The dialling side's first bytes show that it may begin a handshake (knock.h). For others the answering side
//          makes an HMAC at most, and has no object of OpenSSL.
// Bytes    send() takes plain bytes, and they may wait here, encrypted, for the socket: at most kSealedBytesMax and one
//          record. Many records leave with one system call, and come with one. Where the kernel encrypts
//          (kernel_sender.h), nothing waits here, and one record at most waits there.
// Memory   The channel reads at most kStrangerBytesMax bytes of a peer that has proven nothing but its knock. OpenSSL
//          keeps some 30 KiB for such a peer, and up to 128 KiB if the peer announces a long message.
// End      No record of TLS (close_notify) marks the end of a connection. A stream of hybridps has its own farewell
//          (transport/tcp). Any other end counts as a broken connection.
// Owner    the caller owns the socket, and keeps it open as long as the channel lives.
// Threads  one thread at a time.
// Source   RFC 8446 (TLS 1.3).
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/tls/authority.h"
#include "hybridps/tls/kernel_sender.h"
#include "hybridps/tls/knock.h"

struct ssl_st;  // OpenSSL's SSL

namespace hybridps::tls {

class TlsChannel : core::Pinned {
 public:
  static constexpr std::size_t kSealedBytesMax = std::size_t{128} << 10;
  /// What may be sent before the handshake has ended. It leaves with the handshake's end.
  static constexpr std::size_t kEarlyBytesMax = 256;
  static constexpr std::size_t kStrangerBytesMax = std::size_t{16} << 10;

  /// The side that dials. `key`: of the listener's knocks. kInternal: OpenSSL refuses.
  static core::Result<std::unique_ptr<TlsChannel>> dial(std::shared_ptr<const Identity> identity, int socket,
                                                        const Mac& key);
  /// The side that answers. `guard` is the listener's, and outlives the channel.
  static std::unique_ptr<TlsChannel> accept(std::shared_ptr<const Identity> identity, int socket, KnockGuard& guard);
  ~TlsChannel();

  /// How many bytes it has taken. -1: errno says why; EAGAIN: the socket is full. Without parts: sends what waits here.
  ssize_t send(const iovec* parts, std::size_t count);
  /// How many bytes it has given. 0: the connection has ended. -1: errno says why; EAGAIN: nothing has come.
  ssize_t receive(const iovec* parts, std::size_t count);

  /// Encrypted bytes wait for the socket.
  bool has_unsent() const noexcept { return begin_ < sealed_.size(); }
  /// Of the side that dials: the first byte that came is of no TLS. It stays in the socket, with what follows it;
  /// receive() gives EPROTO.
  bool is_clear() const noexcept { return is_clear_; }
  /// Of the side that dials: the process there is not the one that it knocked for.
  bool is_elsewhere() const noexcept { return is_elsewhere_; }
  /// The other side may begin a handshake. receive() finds out; hear_knock() does nothing else.
  bool has_knocked() const noexcept { return guard_ == nullptr; }
  /// False: errno says why not yet.
  bool hear_knock();
  /// Bytes of the peer's handshake have come.
  bool has_begun() const noexcept { return came_ > 0; }
  /// The handshake has ended, and the peer belongs to the job.
  bool is_open() const noexcept { return is_open_; }
  /// The kernel encrypts what is sent. It keeps bytes that find no room in TCP's queue, and sends them soon.
  bool is_sent_by_kernel() const noexcept { return kernel_ != nullptr; }
  /// How many records one key encrypts; 2^22 unless a test wants fewer. RFC 8446, 5.5, allows 2^24.5.
  void change_key_after(std::uint64_t records) noexcept { records_max_ = records; }
  /// Only of an open channel.
  const PeerId& peer() const noexcept { return peer_; }
  /// Only of an open channel: whether the peer's certificate is for this host (authority.h). True with a token's.
  bool is_with(const std::string& host) const;
  /// The other side has shown no certificate of this job, has refused ours, or has knocked for another listener: it has
  /// another token or authority, or dials a process that had this address before.
  bool is_of_another_job() const noexcept { return is_of_another_job_; }
  /// A part of a record has come, and nothing more for kRecordWithin. Its length was changed on the way, or the path
  /// has stopped.
  bool waits_too_long(core::TimePoint now) const noexcept {
    return partial_since_ != core::TimePoint{} && now - partial_since_ > kRecordWithin;
  }
  static constexpr core::Duration kRecordWithin = std::chrono::seconds(10);
  /// The channel is over; receive() and send() tell why.
  bool has_failed() const noexcept { return error_ != 0 || !why_.empty(); }
  /// After EPROTO: what was wrong.
  const std::string& why() const noexcept { return why_; }

 private:
  struct Ssl;
  friend struct Ssl;
  friend void keep_secret(const ssl_st* ssl, const char* line);
  TlsChannel(std::shared_ptr<const Identity> identity, int socket, KnockGuard* guard);

  /// OpenSSL's object, which the handshake needs.
  core::Status open_ssl();
  /// True: the channel is open. Else errno says why not yet.
  bool shake();
  /// What OpenSSL's last answer means, as errno.
  int failed(int result);
  /// False: errno says why not all has left.
  bool flush();
  bool seal(const std::byte* data, std::size_t bytes);
  ssize_t send_by_kernel(const iovec* parts, std::size_t count);
  void note_partial(bool is_partial);

  const std::shared_ptr<const Identity> identity_;
  const int socket_;
  const bool dials_;
  std::unique_ptr<Ssl> ssl_;
  std::unique_ptr<KernelSender> kernel_;  // null: OpenSSL encrypts
  KnockGuard* guard_ = nullptr;           // null: the other side has knocked, or this side dials
  KnockBytes knock_{};
  std::size_t knock_have_ = 0;
  bool is_open_ = false;
  bool has_ended_ = false;  // the other side has closed the connection
  bool is_clear_ = false;
  bool is_elsewhere_ = false;
  bool is_drained_ = false;  // the last read found the socket empty
  bool is_of_another_job_ = false;
  bool has_given_ = false;  // a byte of the other side; the side that dials is open before it hears that it is refused
  core::TimePoint partial_since_{};  // a part of a record waits for the rest, of which nothing has come since
  std::uint64_t read_ = 0;           // bytes from the socket
  std::uint64_t read_at_partial_ = 0;
  std::size_t came_ = 0;       // bytes before the channel was open
  int error_ = 0;              // errno of the socket
  std::uint64_t records_ = 0;  // with the present key
  std::uint64_t records_max_ = std::uint64_t{1} << 22;
  PeerId peer_{};
  std::string why_;
  std::vector<std::byte> early_;
  std::vector<std::byte> sealed_;
  std::size_t begin_ = 0;  // of sealed_ that has not left
};

}  // namespace hybridps::tls
