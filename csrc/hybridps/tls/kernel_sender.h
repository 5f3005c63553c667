// hybridps/tls/kernel_sender.h: the kernel encrypts what a channel sends (kernel TLS), where it can. Internal to this
// room.
//
// Why      The kernel encrypts from the caller's memory into the socket. OpenSSL encrypts into a buffer of its own.
//          The bytes are then copied into the channel, and from the channel into the socket.
// Model    After the handshake the kernel gets the key of our side. Bytes that are written to the socket then leave in
//          records of TLS. What comes is still read through OpenSSL: the kernel does not tell that only a part of a
//          record has come, nor what was wrong with a record.
// Needs    Linux 6.14, where a key can be changed, with its module tls; a TCP socket; TLS_AES_128_GCM_SHA256. A process
//          that meets a kernel without stops trying.
// Owner    the caller owns the socket.
// Threads  one thread at a time.
// Source   RFC 8446, 4.6.3 and 7 (keys and their change); Linux, Documentation/networking/tls.rst.
#pragma once

#include <memory>

#include "hybridps/core/pinned.h"
#include "hybridps/tls/hmac.h"

namespace hybridps::tls {

class KernelSender : core::Pinned {
 public:
  /// Whether this kernel may have it. Only begin() finds out. Any thread.
  static bool is_worth_a_try();
  /// `secret`: of our side's records (RFC 8446, 7.1: client or server application traffic secret), none sent yet. Null:
  /// this kernel or socket cannot. The socket then goes on as before, or `is_spoiled` becomes true: a new connection is
  /// needed.
  static std::unique_ptr<KernelSender> begin(int socket, const Mac& secret, bool& is_spoiled);
  ~KernelSender();

  /// Tells the other side, and encrypts with a new key from now on. False: errno says why; EAGAIN: the socket is full,
  /// and the old key goes on. After another error nothing more can be sent.
  bool change_key();

 private:
  KernelSender(int socket, const Mac& secret) : socket_(socket), secret_(secret) {}
  bool set_key() const;

  const int socket_;
  Mac secret_;
};

}  // namespace hybridps::tls
