// tests/unit/transport/tcp/tcp_relay.h: what stands between two transports: takes connections, makes one to the real
// place for each, hands bytes on, and breaks as it is told.
//
// Threads  the test's: run() does what can be done without waiting.
#pragma once

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <functional>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/transport/tcp/tcp_wire.h"
#include "tests/support/catch.h"

namespace hybridps::transport {

class TcpRelay {
 public:
  enum class Cut : std::uint8_t { kReset, kEnd };

  explicit TcpRelay(std::span<const std::byte> to) : there_(decode_tcp_address(to).value()), here_(there_) {
    listener_ = make_socket();
    here_.socket = *parse_address("127.0.0.1", 0);
    REQUIRE(::bind(listener_.get(), here_.socket.get(), here_.socket.bytes) == 0);
    REQUIRE(::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&here_.socket.name), &here_.socket.bytes) == 0);
    REQUIRE(::listen(listener_.get(), 64) == 0);
  }
  /// The address of the transport behind it, with this relay's place.
  std::vector<std::byte> address() const { return encode(here_); }

  /// All connections end, on both sides: by a reset, or as if each side's kernel had closed them.
  void cut(Cut how) {
    for (auto& pipe : pipes_)
      if (how == Cut::kReset) reset(*pipe);
    pipes_.clear();
  }
  /// Takes everything, and hands nothing on.
  void swallow(bool does) { swallows_ = does; }
  /// A connection that brings more than a greeting, or more than an answer to it, is reset.
  void pass_greetings_only() { greetings_only_ = true; }
  /// `by` sees, and may change, all bytes that go to the transport behind the relay. It hears how many have come over
  /// the same connection before.
  void tamper(std::function<void(std::vector<char>&, std::size_t)> by) { tamper_[0] = std::move(by); }
  /// The same with what comes back.
  void tamper_back(std::function<void(std::vector<char>&, std::size_t)> by) { tamper_[1] = std::move(by); }
  /// New connections are reset.
  void refuse_new(bool does = true) { refuses_ = does; }
  /// As the end of the host behind it: nobody listens any more.
  void end() {
    listener_.reset();
    cut(Cut::kEnd);
  }

  void run() {
    while (listener_) {
      core::Descriptor guest;
      {
        const core::ForkLock lock;
        guest = core::Descriptor(lock, ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
      }
      if (!guest) break;
      if (refuses_) {
        const linger at_once{1, 0};
        (void)::setsockopt(guest.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
        continue;
      }
      auto pipe = std::make_unique<Pipe>();
      pipe->sockets[0] = std::move(guest);
      pipe->sockets[1] = make_socket();
      (void)::connect(pipe->sockets[1].get(), there_.socket.get(), there_.socket.bytes);
      pipes_.push_back(std::move(pipe));
    }
    if (swallows_) return;
    for (auto& pipe : pipes_)
      for (std::size_t from = 0; from < 2; ++from) hand_on(*pipe, from);
    std::erase_if(pipes_, [](const auto& pipe) { return !pipe->sockets[0] || !pipe->sockets[1]; });
  }

 private:
  struct Pipe {
    std::array<core::Descriptor, 2> sockets;
    std::array<std::vector<char>, 2> held;  // by the side that it came from
    std::array<std::size_t, 2> brought{};   // in all, by the same
  };

  static void reset(Pipe& pipe) {
    const linger at_once{1, 0};
    for (core::Descriptor& socket : pipe.sockets) {
      if (socket) (void)::setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
      socket.reset();
    }
  }
  static core::Descriptor make_socket() {
    const core::ForkLock lock;
    return {lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)};
  }
  void hand_on(Pipe& pipe, std::size_t from) const {
    if (!pipe.sockets[from] || !pipe.sockets[1 - from]) return;
    std::vector<char>& held = pipe.held[from];
    std::array<char, 65536> bytes;
    if (held.size() < 1 << 20) {
      const ssize_t got = ::recv(pipe.sockets[from].get(), bytes.data(), bytes.size(), MSG_DONTWAIT);
      if (got == 0 || (got < 0 && errno != EAGAIN && errno != ENOTCONN)) {
        const bool ended = got == 0;
        if (ended && !held.empty()) {
          // What came before the end goes first.
        } else {
          for (core::Descriptor& socket : pipe.sockets) socket.reset();
          return;
        }
      }
      if (got > 0) {
        std::vector<char> brought(bytes.data(), bytes.data() + got);
        if (tamper_[from]) tamper_[from](brought, pipe.brought[from]);
        held.insert(held.end(), brought.begin(), brought.end());
      }
      if (got > 0) pipe.brought[from] += static_cast<std::size_t>(got);
      if (greetings_only_ && pipe.brought[from] > (from == 0 ? kGreetingBytes : kAnswerBytes)) return reset(pipe);
    }
    if (held.empty()) return;
    const ssize_t sent = ::send(pipe.sockets[1 - from].get(), held.data(), held.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
    if (sent > 0) held.erase(held.begin(), held.begin() + sent);
    if (sent < 0 && errno != EAGAIN && errno != ENOTCONN)
      for (core::Descriptor& socket : pipe.sockets) socket.reset();
  }

  const TcpAddress there_;
  TcpAddress here_;
  core::Descriptor listener_;
  std::vector<std::unique_ptr<Pipe>> pipes_;
  std::array<std::function<void(std::vector<char>&, std::size_t)>, 2> tamper_;  // by the side that bytes come from
  bool greetings_only_ = false;
  bool swallows_ = false;
  bool refuses_ = false;
};

}  // namespace hybridps::transport
