// tests/support/held_port.h: a port of 127.0.0.1 at which nobody listens, and which no other process gets.
#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include "tests/support/catch.h"

namespace hybridps::test {

/// Bound, so that the kernel gives the port to nobody. Whoever connects is refused. Whoever sets SO_REUSEADDR can
/// listen there, once or more often.
class HeldPort {
 public:
  HeldPort() : fd_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    const int on = 1;
    REQUIRE(::setsockopt(fd_, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on) == 0);
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof at;
    REQUIRE(::bind(fd_, reinterpret_cast<sockaddr*>(&at), bytes) == 0);
    REQUIRE(::getsockname(fd_, reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
    number_ = ntohs(at.sin_port);
  }
  ~HeldPort() { ::close(fd_); }
  HeldPort(const HeldPort&) = delete;
  HeldPort& operator=(const HeldPort&) = delete;

  int number() const { return number_; }

 private:
  const int fd_;
  int number_ = 0;
};

}  // namespace hybridps::test
