// Somebody on the path between two ends of a TLS connection passes bytes on, changes them, leaves some out, repeats
// them, holds them back and makes some up, during the handshake and after it.
//
// What must hold: what an end gives is the beginning of what the other end has sent, byte for byte; nothing comes from
// an end that has shown no certificate of the job; an end that has failed stays failed, and says why; an end that
// nobody disturbs does not fail.
#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <utility>
#include <vector>

#include "hybridps/core/descriptor.h"
#include "hybridps/tls/authority.h"
#include "hybridps/tls/channel.h"
#include "tests/fuzz/feed.h"

using namespace hybridps;
using tls::TlsChannel;

namespace {

constexpr std::size_t kStepsMax = 64;
constexpr std::size_t kHeldBytesMax = std::size_t{1} << 20;

void require(bool holds) {
  if (!holds) std::abort();
}

std::shared_ptr<const tls::Identity> member_of(const char* token) {
  auto authority = tls::Authority::from_token(token);
  require(authority.is_ok());
  auto made = authority.value()->make_identity();
  require(made.is_ok());
  return std::move(made).value();
}

struct SocketPair {
  SocketPair() {
    std::array<int, 2> made{};
    const core::ForkLock lock;
    require(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, made.data()) == 0);
    of_end = core::Descriptor(lock, made[0]);
    of_path = core::Descriptor(lock, made[1]);
  }
  core::Descriptor of_end, of_path;
};

/// The byte at this place of what an end sends. Its period is no record's length, so that a record in another's place
/// is seen.
std::byte byte_at(std::size_t place, bool dials) { return static_cast<std::byte>(place % 251 + (dials ? 3 : 1)); }

struct End {
  End(std::shared_ptr<const tls::Identity> identity, bool is_dialler) : dials(is_dialler) {
    if (!dials) {
      channel = TlsChannel::accept(std::move(identity), sockets.of_end.get(), guard);
      return;
    }
    auto made = TlsChannel::dial(std::move(identity), sockets.of_end.get(), tls::knock_key({}));
    require(made.is_ok());
    channel = std::move(made).value();
  }

  void send(std::size_t bytes) {
    std::vector<std::byte> data(bytes);
    for (std::size_t i = 0; i < bytes; ++i) data[i] = byte_at(sent + i, dials);
    const std::size_t first = bytes / 3;
    const std::array<iovec, 2> parts{iovec{data.data(), first}, iovec{data.data() + first, bytes - first}};
    const bool had_failed = channel->has_failed();
    const ssize_t took = channel->send(parts.data(), parts.size());
    require(took <= static_cast<ssize_t>(bytes));
    if (took > 0) {
      require(!had_failed);
      sent += static_cast<std::size_t>(took);
    }
  }
  void receive(std::size_t bytes, const End& other) {
    std::vector<std::byte> data(bytes);
    const iovec part{data.data(), bytes};
    const bool had_failed = channel->has_failed();
    const ssize_t got = channel->receive(&part, 1);
    require(got <= static_cast<ssize_t>(bytes));
    if (got < 0) {
      require(errno != 0);
      if (errno == EPROTO) require(channel->has_failed() && !channel->why().empty());
    }
    if (got <= 0) return;
    require(!had_failed && channel->is_open());
    for (std::size_t i = 0; i < static_cast<std::size_t>(got); ++i)
      require(data[i] == byte_at(received + i, other.dials));
    received += static_cast<std::size_t>(got);
    require(received <= other.sent);
  }

  SocketPair sockets;
  tls::KnockGuard guard{{tls::knock_key({})}};
  std::unique_ptr<TlsChannel> channel;
  bool dials;
  std::size_t sent = 0;
  std::size_t received = 0;
};

/// Bytes of one direction, in the hands of somebody on the path.
struct Way {
  Way(End& sender, End& receiver) : from(sender), to(receiver) {}
  void fill() {
    std::array<std::byte, 65536> bytes;
    ssize_t got = 0;
    while ((got = ::recv(from.sockets.of_path.get(), bytes.data(), bytes.size(), MSG_DONTWAIT)) > 0)
      held.insert(held.end(), bytes.begin(), bytes.begin() + got);
  }
  void pass(std::size_t bytes) {
    bytes = std::min(bytes, held.size());
    const ssize_t went = ::send(to.sockets.of_path.get(), held.data(), bytes, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (went > 0) held.erase(held.begin(), held.begin() + went);
  }
  End& from;
  End& to;
  std::vector<std::byte> held;
};

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const auto ours = member_of("the token of the job");
  static const auto others = member_of("the token of others");
  fuzz::Feed feed(data, size);
  const bool is_stranger = feed.below(8) == 0;
  End a(ours, true);
  End b(is_stranger ? others : ours, false);
  Way there(a, b);
  Way back(b, a);
  bool is_disturbed = is_stranger;
  const auto calm = [&](int rounds) {
    for (; rounds > 0; --rounds)
      for (Way* const way : {&there, &back}) {
        if (way->from.channel->has_unsent()) way->from.send(0);
        way->fill();
        way->pass(way->held.size());
        way->to.receive(5000, way->from);
      }
  };
  if (feed.below(4) != 0) {  // most plays begin with an open connection
    a.send(10);
    calm(8);
    require(is_stranger || (a.channel->is_open() && b.channel->is_open() && b.received == 10));
  }
  for (std::size_t step = 0; step < kStepsMax && !feed.empty(); ++step) {
    Way& way = feed.below(2) == 0 ? there : back;
    way.fill();
    switch (feed.below(11)) {
      case 0:
      case 1: way.from.send(1 + feed.take<std::uint16_t>() % 40000); break;
      case 2: way.to.receive(1 + feed.take<std::uint16_t>() % 40000, way.from); break;
      case 3: way.pass(1 + feed.byte()); break;
      case 4:
      case 5: calm(2); break;
      case 6:  // changed; near the head of a record more often than elsewhere
        if (way.held.empty()) break;
        way.held[(feed.below(2) == 0 ? feed.byte() : feed.take<std::uint16_t>()) % way.held.size()] ^=
            static_cast<std::byte>(1 + feed.below(255));
        is_disturbed = true;
        break;
      case 7: {  // left out
        const std::size_t first = way.held.empty() ? 0 : feed.take<std::uint16_t>() % way.held.size();
        const std::size_t bytes = std::min<std::size_t>(1 + feed.byte(), way.held.size() - first);
        is_disturbed |= bytes > 0;
        way.held.erase(way.held.begin() + static_cast<std::ptrdiff_t>(first),
                       way.held.begin() + static_cast<std::ptrdiff_t>(first + bytes));
        break;
      }
      case 8: {  // repeated, or from the other direction
        const std::vector<std::byte> again = feed.below(4) == 0 ? back.held : way.held;
        if (way.held.size() + again.size() > kHeldBytesMax) break;
        is_disturbed |= !again.empty();
        way.held.insert(way.held.end(), again.begin(), again.end());
        break;
      }
      case 9: {  // made up
        for (std::size_t bytes = 1 + feed.below(24); bytes > 0; --bytes)
          way.held.push_back(static_cast<std::byte>(feed.byte()));
        is_disturbed = true;
        break;
      }
      default:  // the way ends
        is_disturbed = true;
        (void)::shutdown(way.to.sockets.of_path.get(), SHUT_WR);
    }
  }
  if (is_stranger) {
    calm(8);
    require(a.received == 0 && b.received == 0);
  } else if (!is_disturbed) {
    calm(8);
    require(!a.channel->has_failed() && !b.channel->has_failed());
  }
  return 0;
}
