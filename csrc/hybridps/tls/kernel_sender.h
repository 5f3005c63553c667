// hybridps/tls/kernel_sender.h: the kernel encrypts what a channel sends (kernel TLS), where it can. Internal to this
// room.
//
// Why      The kernel encrypts from the caller's memory into the socket. With OpenSSL the bytes are copied twice more.
//          Some cards encrypt for the kernel.
// Model    After the handshake the kernel gets the key of our side. From then on all bytes that are written to the
// socket
//          leave in records of TLS. What comes is still read through OpenSSL: the kernel does not tell that only a part
//          of a record has come, nor what was wrong with a record.
// Needs    Linux 6.14, where a key can be changed, with its module tls; a TCP socket; TLS_AES_128_GCM_SHA256.
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
  /// Whether this kernel may have it. Only begin() finds out.
  static bool is_worth_a_try();
  /// `secret`: of our side's records (RFC 8446, 7.1: client or server application traffic secret), none sent yet. Null:
  /// this kernel or socket cannot, and the socket goes on as before.
  static std::unique_ptr<KernelSender> begin(int socket, const Mac& secret);
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
