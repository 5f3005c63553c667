// tests/unit/transport/tcp/tcp_stranger.h: connections to a transport from somebody who is no member, and descriptors.
#pragma once

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <filesystem>
#include <functional>
#include <iterator>
#include <memory>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/transport/tcp/tcp_wire.h"
#include "tests/unit/transport/tcp/tcp_pair.h"

namespace hybridps::transport {

inline TcpAddress address_of(const contract::Side& side) {
  const auto address = decode_tcp_address(side.transport->address());
  REQUIRE(address.is_ok());
  return address.value();
}

/// Progress of one side alone, also while a MovableClock stands still.
inline bool until(contract::Side& side, const std::function<bool()>& condition) {
  for (int i = 0; i < 20000 && !condition(); ++i) {
    side.progress();
    if (i > 50) ::usleep(1000);  // the kernel has not delivered all at once
  }
  return condition();
}

/// A connection to a transport from somebody who is none.
struct Stranger {
  explicit Stranger(const contract::Side& to) : there(address_of(to)) {
    {
      const core::ForkLock lock;
      socket = core::Descriptor(lock, ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
    }
    REQUIRE(::connect(socket.get(), there.socket.get(), there.socket.bytes) == 0);
  }
  void say(const void* bytes, std::size_t count) const {
    REQUIRE(::send(socket.get(), bytes, count, MSG_NOSIGNAL) == static_cast<ssize_t>(count));
  }
  void greet(const TcpId& from) const {
    TcpGreeting is;
    is.from = from;
    is.to = there.id;
    is.number = 77;
    is.side.attempt = 1;
    const auto greeting = encode(is);
    say(greeting.data(), greeting.size());
  }
  bool was_answered() const {
    std::array<std::byte, kAnswerBytes> bytes{};
    const ssize_t got = ::recv(socket.get(), bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
    return got == static_cast<ssize_t>(bytes.size()) || got == 0 ||
           (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  }
  bool is_welcome() const {
    std::array<std::byte, kAnswerBytes> bytes{};
    if (::recv(socket.get(), bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT) != static_cast<ssize_t>(bytes.size()))
      return false;
    const auto reply = decode_reply(bytes);
    return reply && reply->answer == TcpAnswer::kWelcome;
  }
  /// Perhaps with an answer before.
  bool was_hung_up_on() const {
    char byte = 0;
    ssize_t got = 0;
    do got = ::recv(socket.get(), &byte, 1, MSG_DONTWAIT);
    while (got > 0);
    return got == 0 || (got < 0 && errno != EAGAIN && errno != EWOULDBLOCK);
  }

  TcpAddress there;
  core::Descriptor socket;
};

/// They greet, and nobody has named them.
struct Strangers {
  explicit Strangers(contract::Side& side) : to(side) {}
  /// False: the new one was hung up on at once.
  bool come() {
    all.push_back(std::make_unique<Stranger>(to));
    const Stranger& newest = *all.back();
    newest.greet(make_tcp_id());
    REQUIRE(until(to, [&] { return newest.was_answered(); }));
    if (!newest.is_welcome()) return !until(to, [&] { return newest.was_hung_up_on(); });
    for (int i = 0; i < 50; ++i) to.progress();
    return !newest.was_hung_up_on();
  }
  contract::Side& to;
  std::vector<std::unique_ptr<Stranger>> all;
};

inline int descriptors_open() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<int>(std::distance(begin(all), end(all)));
}

/// The number of the next descriptor.
inline int lowest_free() {
  const int lowest = ::dup(0);
  ::close(lowest);
  return lowest;
}

/// While it lives this process gets no further descriptor.
struct NoDescriptors {
  explicit NoDescriptors(rlim_t left = 0) {
    REQUIRE(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    const rlimit none{static_cast<rlim_t>(lowest_free()) + left, before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_NOFILE, &none) == 0);
  }
  ~NoDescriptors() { (void)::setrlimit(RLIMIT_NOFILE, &before); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;
  rlimit before{};
};

}  // namespace hybridps::transport
