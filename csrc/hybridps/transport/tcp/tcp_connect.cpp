// How connections are made: dial and greet, accept and answer, retry when descriptors are lacking.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/transport/tcp/tcp_socket.h"
#include "hybridps/transport/tcp/tcp_transport_impl.h"

namespace hybridps::transport {
namespace {

/// Connections accepted in one go, before any other work.
constexpr std::size_t kAcceptsMax = 64;
/// After a loss before an answer, the first retry is immediate. Later pauses start at kRedialPause and double.
constexpr core::Duration kRedialPause = core::from_seconds(0.01);
constexpr core::Duration kRedialPauseMax = core::from_seconds(0.5);
/// A connection at rest sends a probe so often, of some 60 bytes, and gets an answer. Firewalls and NAT between two
/// machines forget a connection that they have not seen for a while.
constexpr int kKeepAliveSeconds = 4;

}  // namespace

void TcpTransportImpl::adopt(TcpLink& link, TcpEndpoint& endpoint) {
  link.endpoint = &endpoint;
  endpoint.links_.push_back(&link);
}

void TcpTransportImpl::set_options(int socket) const {
  const int on = 1;
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (options_.user_timeout > core::Duration::zero()) {
    const auto ms = static_cast<unsigned>(core::to_seconds(options_.user_timeout) * 1000);
    (void)::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
  }
  (void)::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepAliveSeconds, sizeof kKeepAliveSeconds);
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepAliveSeconds, sizeof kKeepAliveSeconds);
}

core::Result<TcpLink*> TcpTransportImpl::dial(const TcpAddress& to) {
  auto made = std::make_unique<TcpLink>();
  TcpLink& link = *made;
  link.peer = to.id;
  link.there = to.socket;
  link.to = to.socket.text();
  const core::Status status = try_dial(link);
  if (!status.is_ok() && status.code() != core::Code::kOutOfResources) return status;
  if (!status.is_ok()) dial_later(link, kAgainAfter, /*lacks=*/true);
  links_.push_back(std::move(made));
  return &link;
}

core::Status TcpTransportImpl::try_dial(TcpLink& link) {
  const SocketAddress& there = link.there;
  core::Descriptor made = make_socket(there.name.ss_family);
  const std::string what = "cannot connect to " + link.to + " (" + name_ + ")";
  core::Status status;
  const auto lack = [&](core::Status why) {
    static core::LogRate rate(core::from_seconds(60));
    if (rate.permit()) core::log_warn(why.message(), "; it is tried again until there are some");
    return why;
  };
  if (!made) {
    status = socket_error(what, errno);
    return status.code() == core::Code::kOutOfResources ? lack(std::move(status)) : status;
  }
  const int socket = made.get();
  set_options(socket);
  const int on = 1;
  (void)::setsockopt(socket, IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &on, sizeof on);
  const SocketAddress from = *parse_address(options_.address, 0);
  const auto unreachable = [&](const std::string& why) {
    return core::Status(
        core::Code::kPeerDead,
        what + ": " + why +
            "; see whether both machines use the same network (HYBRIDPS_INTERFACE, HYBRIDPS_DATA_INTERFACES)");
  };
  if (from.name.ss_family != there.name.ss_family) return unreachable("one is IPv4, the other IPv6");
  if (!leads_through(from, there)) return unreachable("the way there does not lead through " + options_.address);
  if (::bind(socket, from.get(), from.bytes) != 0 ||
      (::connect(socket, there.get(), there.bytes) != 0 && errno != EINPROGRESS && errno != EINTR)) {
    const int error = errno;
    return is_lack(error) ? lack(socket_error(what, error)) : unreachable(std::strerror(error));
  }
  link.socket = std::move(made);
  if (status = watch(link, /*write=*/true, /*added=*/false); !status.is_ok()) {
    link.socket.reset();
    return status.code() == core::Code::kOutOfResources ? lack(std::move(status)) : status;
  }
  link.state = TcpLink::LinkState::kConnecting;
  return core::Status::ok();
}

/// At most a greeting was sent on this connection, so its queue is kept unchanged.
void TcpTransportImpl::dial_later(TcpLink& link, core::Duration pause, bool lacks) {
  ++counters_.redials;
  if (link.socket) (void)::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  link.socket.reset();
  link.begin = link.end = 0;
  link.error = 0;
  link.watches_write = false;
  link.state = TcpLink::LinkState::kWaiting;
  link.lacks = lacks;
  if (lacks) link.losses = 0;  // the peer answered, or no attempt was made
  link.dial_at = core::Clock::now() + pause;
  waiting_.push_back(&link);
}

/// Only our greeting was sent before the loss, so a retry is safe. A peer that is gone refuses the next connection.
void TcpTransportImpl::on_lost(TcpLink& link) {
  if (link.losses++ == 0) link.dial_until = core::Deadline::after(options_.redial_for);
  const core::TimePoint now = core::Clock::now();
  if (link.dial_until.has_passed(now)) {
    on_broken(link, "all connections (" + name_ + ") to " + link.to + " that were tried in " +
                        core::format_seconds(core::to_seconds(options_.redial_for)) +
                        " were reset before an answer came");
    return;
  }
  core::Duration pause = core::Duration::zero();
  if (link.losses > 1)
    pause = std::min<core::Duration>(kRedialPause * (1 << std::min(link.losses - 2, 10)), kRedialPauseMax);
  dial_later(link, pause, /*lacks=*/false);
}

std::size_t TcpTransportImpl::dial_waiting(core::TimePoint now) {
  std::size_t did = 0;
  for (TcpLink* const link : std::exchange(waiting_, {})) {
    if (link->dial_at > now) {
      waiting_.push_back(link);
      continue;
    }
    ++did;
    const core::Status status = try_dial(*link);
    if (status.is_ok()) continue;
    if (status.code() == core::Code::kOutOfResources)
      dial_later(*link, kAgainAfter, /*lacks=*/true);
    else
      on_broken(*link, std::string(status.message()));
  }
  return did;
}

/// The connection is established. The few bytes of a greeting always fit into its send buffer.
void TcpTransportImpl::say_hello(TcpLink& link) {
  const auto greeting = encode_greeting(address_.id, link.peer);
  (void)!::send(link.socket.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  link.state = TcpLink::LinkState::kGreeted;
  (void)watch(link, /*write=*/false);
}

/// False: more bytes must arrive first, or this connection is over.
bool TcpTransportImpl::hear_answer(TcpLink& link) {
  if (link.end - link.begin < kAnswerBytes) return false;
  const std::span<const std::byte, kAnswerBytes> bytes(link.read_ahead.data() + link.begin, kAnswerBytes);
  const std::optional<TcpAnswer> answer = decode_answer(bytes);
  if (answer == TcpAnswer::kWelcome) {
    link.begin += kAnswerBytes;
    link.state = TcpLink::LinkState::kOpen;
    link.lacks = false;
    if (!link.queue.empty()) list(link);
    return true;
  }
  if (answer == TcpAnswer::kBusy) {
    static core::LogRate rate(core::from_seconds(60));
    if (rate.permit())
      core::log_warn(
          name_, ": the process at ", link.to,
          " has no file descriptors for another connection (raise `ulimit -n` there); it is tried again until it has");
    dial_later(link, kAgainAfter, /*lacks=*/true);
  } else if (answer == TcpAnswer::kClosed) {
    on_broken(link, "it has given up this process, or closed its connections to it");
  } else if (answer == TcpAnswer::kNotHere) {
    on_broken(link, std::string(kEndedWithoutClosing));
  } else {
    ++counters_.malformed;
    on_broken(link, "the connection (" + name_ + ") to " + link.to + " brought bytes that hybridps does not send");
  }
  return false;
}

/// Moves the queue of `from`, which has not greeted, to the open connection `to`. Closes `from`.
void TcpTransportImpl::take_over(TcpLink& to, TcpLink& from) {
  to.queue.insert(to.queue.end(), from.queue.begin(), from.queue.end());
  from.queue.clear();
  TcpEndpoint& endpoint = *from.endpoint;
  endpoint.out_ = &to;
  close(from, core::Status::ok(), /*reset=*/true);
  if (!to.queue.empty()) list(to);
}

void TcpTransportImpl::keep_spare() {
  if (spare_) return;
  const core::ForkLock lock;
  spare_ = core::Descriptor(lock, ::eventfd(0, EFD_CLOEXEC));
}

/// Tells waiting connections that there is no room now, so that they come again. False: they wait on without an answer.
bool TcpTransportImpl::turn_away() {
  keep_spare();
  if (!spare_) return false;
  spare_.reset();
  for (std::size_t i = 0; i < kAcceptsMax; ++i) {
    core::Descriptor socket;
    {
      const core::ForkLock lock;
      socket = core::Descriptor(lock, ::accept4(listener_.get(), nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
    }
    if (!socket) break;
    ++counters_.turned_away;
    std::array<std::byte, kGreetingBytes> unread;  // unread bytes would make the close send a reset
    (void)!::recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    const auto answer = encode_answer(TcpAnswer::kBusy);
    (void)!::send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  keep_spare();
  return true;
}

/// Waiting connections stay in the kernel's queue. A listener that is always readable would keep this thread awake.
void TcpTransportImpl::stop_accepting() {
  (void)::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, listener_.get(), nullptr);
  accepts_ = false;
  accepts_again_ = core::Clock::now() + kAgainAfter;
}

void TcpTransportImpl::accept_again() {
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  accepts_ = ::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, listener_.get(), &event) == 0;
}

std::size_t TcpTransportImpl::accept_all() {
  std::size_t accepted = 0;
  while (accepted < kAcceptsMax) {
    auto link = std::make_unique<TcpLink>();
    SocketAddress from;
    from.bytes = sizeof from.name;
    int error = 0;
    {
      const core::ForkLock lock;
      link->socket = core::Descriptor(lock, ::accept4(listener_.get(), reinterpret_cast<sockaddr*>(&from.name),
                                                      &from.bytes, SOCK_NONBLOCK | SOCK_CLOEXEC));
      error = errno;
    }
    if (!link->socket) {
      if (error == EINTR || error == ECONNABORTED) continue;
      if (error == EAGAIN || error == EWOULDBLOCK) return accepted;
      static core::LogRate rate(core::from_seconds(60));
      if (rate.permit()) core::log_warn(socket_error(name_ + ": cannot take a connection", error).message());
      if (!is_lack(error) || !turn_away()) stop_accepting();
      return accepted + 1;
    }
    ++accepted;
    set_options(link->socket.get());
    link->state = TcpLink::LinkState::kGreeting;
    link->to = from.text();
    link->greeting_due = core::Deadline::after(options_.greeting_timeout);
    if (!watch(*link, /*write=*/false, /*added=*/false).is_ok()) continue;
    greeting_.push_back(link.get());
    links_.push_back(std::move(link));
    if (greeting_.size() <= greetings_max_) continue;
    // The greeting of the oldest may have arrived already. If not, a peer comes again.
    TcpLink& oldest = *greeting_.front();
    (void)read(oldest);
    if (oldest.state == TcpLink::LinkState::kGreeting) refuse(oldest);
  }
  return accepted;
}

/// False: more bytes must arrive first, or the connection was refused.
bool TcpTransportImpl::greet(TcpLink& link) {
  if (link.end - link.begin < kGreetingBytes) return false;
  const std::span<const std::byte, kGreetingBytes> bytes(link.read_ahead.data() + link.begin, kGreetingBytes);
  const std::optional<TcpId> peer = decode_greeting(bytes, address_.id);
  TcpEndpoint* endpoint = nullptr;
  if (peer)
    if (const auto found = by_id_.find(*peer); found != by_id_.end()) endpoint = found->second;
  const auto say = [&link](TcpAnswer answer) {
    const auto said = encode_answer(answer);
    (void)!::send(link.socket.get(), said.data(), said.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  };
  link.begin += kGreetingBytes;
  if (!peer || (endpoint != nullptr && !endpoint->is_open())) {
    const bool is_ours = is_greeting(bytes);
    if (is_ours) say(peer ? TcpAnswer::kClosed : TcpAnswer::kNotHere);
    refuse(link, /*reset=*/!is_ours);
    return false;
  }
  say(TcpAnswer::kWelcome);
  link.peer = *peer;
  link.state = TcpLink::LinkState::kOpen;
  std::erase(greeting_, &link);
  if (endpoint == nullptr) return true;
  adopt(link, *endpoint);
  // Our own connection has not greeted yet. One connection is enough.
  TcpLink* const out = endpoint->out_;
  if (out != nullptr && (out->state == TcpLink::LinkState::kWaiting || out->state == TcpLink::LinkState::kConnecting))
    take_over(link, *out);
  return true;
}

void TcpTransportImpl::refuse(TcpLink& link, bool reset) {
  ++counters_.refused;
  close(link, core::Status(core::Code::kClosed, "it did not greet as a peer does"), reset);
}

void TcpTransportImpl::expire_greetings() {
  const core::TimePoint now = core::Clock::now();
  while (!greeting_.empty() && greeting_.front()->greeting_due.has_passed(now)) refuse(*greeting_.front());
}

}  // namespace hybridps::transport
