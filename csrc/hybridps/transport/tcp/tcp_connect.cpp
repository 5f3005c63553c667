// How connections are made: dial and greet, accept and answer, retry when descriptors are lacking.
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
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
constexpr std::size_t kAcceptsMax = 16;
/// Connections that have not greeted do not get the process's last descriptors: these are for members.
constexpr rlim_t kKeptBack = 32;
/// After a loss, the first retry is immediate. Later pauses start at kRedialPause and double.
constexpr core::Duration kRedialPause = core::from_seconds(0.01);
constexpr core::Duration kRedialPauseMax = core::from_seconds(0.5);
/// An attempt to go on after a loss has this long, then the next one is made: the kernel's own retries come later and
/// later.
constexpr core::Duration kConnectWithin = core::from_seconds(1);
constexpr core::Duration kAnswerWithin = core::from_seconds(2);
/// A connection that the peer's own kernel has closed, without farewell, is the end of its process, as a rule. A
/// process that lives can be reached again within this time.
constexpr core::Duration kClosedFor = core::from_seconds(2);
/// A peer that has never been reached, and refuses, may still dial us: a firewall may let connections pass one way
/// only.
constexpr core::Duration kRefusedFor = core::from_seconds(1.5);
/// The same for a peer that has dialled us before: as a rule its process has ended. If not, it dials again at once.
constexpr core::Duration kRefusedAfterFor = core::from_seconds(0.25);
/// The peer dials, too, and its greeting comes first as a rule.
constexpr core::Duration kCrossedAfter = core::from_seconds(0.5);
/// A process that is slow to learn its group has peers that no introduce() and no connect() has named. If there are too
/// many, one goes that has sent nothing for so long: the engine keeps early messages for this time, too.
constexpr core::Duration kUnnamedFor = core::from_seconds(30 * 60);
/// A connection at rest sends a probe so often, of some 60 bytes, and gets an answer. Firewalls and NAT between two
/// machines forget a connection that they have not seen for a while.
constexpr int kKeepAliveSeconds = 4;

std::string cannot_go_on(const TcpLink& link) {
  return "the connection to " + link.to + " broke (" + link.why +
         ") and cannot go on: the sender no longer has bytes that the receiver lacks. Does a proxy stand between the "
         "two hosts?";
}

}  // namespace

void TcpTransportImpl::adopt(TcpLink& link, TcpEndpoint& endpoint) {
  link.endpoint = &endpoint;
  endpoint.links_.push_back(&link);
  const bool could_dial = std::exchange(link.there, endpoint.address_.socket).bytes > 0;
  if (link.state == TcpLink::LinkState::kWaiting && !could_dial) link.dial_at = core::Clock::now();
}

void TcpTransportImpl::set_options(int socket) const {
  const int on = 1;
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_NODELAY, &on, sizeof on);
  if (options_.user_timeout > core::Duration::zero()) {
    const auto ms = static_cast<unsigned>(core::to_seconds(options_.user_timeout) * 1000);
    (void)::setsockopt(socket, IPPROTO_TCP, TCP_USER_TIMEOUT, &ms, sizeof ms);
  }
  if (!options_.congestion.empty())
    (void)::setsockopt(socket, IPPROTO_TCP, TCP_CONGESTION, options_.congestion.data(),
                       static_cast<socklen_t>(options_.congestion.size()));
  if (const auto rate = static_cast<std::uint64_t>(options_.bytes_per_second_max); rate > 0)
    (void)::setsockopt(socket, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof rate);
  if (const int type_of_service = options_.dscp << 2; type_of_service > 0) {  // the two bits below are for ECN
    (void)::setsockopt(socket, IPPROTO_IP, IP_TOS, &type_of_service, sizeof type_of_service);
    (void)::setsockopt(socket, IPPROTO_IPV6, IPV6_TCLASS, &type_of_service, sizeof type_of_service);
  }
  (void)::setsockopt(socket, SOL_SOCKET, SO_KEEPALIVE, &on, sizeof on);
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_KEEPIDLE, &kKeepAliveSeconds, sizeof kKeepAliveSeconds);
  (void)::setsockopt(socket, IPPROTO_TCP, TCP_KEEPINTVL, &kKeepAliveSeconds, sizeof kKeepAliveSeconds);
}

core::Result<TcpLink*> TcpTransportImpl::dial(const TcpAddress& to) {
  auto made = std::make_unique<TcpLink>();
  TcpLink& link = *made;
  link.peer = to.id;
  link.number = next_number_++;
  link.is_mine = true;
  link.dialled_first = core::Clock::now();
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
  const std::string what = "cannot connect to " + there.text() + " (" + name_ + ")";
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
  if (link.needs_small_packets)
    (void)::setsockopt(socket, IPPROTO_TCP, TCP_MAXSEG, &kSmallSegmentBytes, sizeof kSmallSegmentBytes);
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
  link.hello_have = 0;
  // How long an attempt to reach a peer for the first time takes is the kernel's matter, up to the end of the patience.
  link.attempt_due = link.was_open ? core::Deadline::after(kConnectWithin)
                                   : core::Deadline::after(first_patience(), link.dialled_first);
  waiting_.push_back(&link);
  return core::Status::ok();
}

void TcpTransportImpl::drop_socket(TcpLink& link) {
  if (link.socket) (void)::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  link.channel.reset();
  link.socket.reset();
  link.error = 0;
  link.watches_write = false;
  if (std::exchange(link.is_listed, false)) std::erase(listed_, &link);
  if (std::exchange(link.is_unread, false)) std::erase(unread_, &link);
  std::erase(waiting_, &link);
}

void TcpTransportImpl::dial_later(TcpLink& link, core::Duration pause, bool lacks) {
  ++counters_.redials;
  drop_socket(link);
  link.state = TcpLink::LinkState::kWaiting;
  link.lacks = lacks;
  if (lacks) {  // the peer answered, or no attempt was made
    link.losses = 0;
    link.dialled_first = core::Clock::now();
  }
  // Only the peer knows where to dial, as long as we have no endpoint to it.
  link.dial_at = link.there.bytes > 0 ? core::Clock::now() + pause : core::TimePoint::max();
  waiting_.push_back(&link);
}

void TcpTransportImpl::on_lost(TcpLink& link, std::string why, Loss how) {
  const core::TimePoint now = core::Clock::now();
  if (link.state == TcpLink::LinkState::kOpen) {
    link.lost_at = now;
    link.why = why;
    link.was_closed = how == Loss::kClosed;
    // Without progress the time goes on: a way may let greetings pass and nothing else.
    const bool is_idle = link.queue.empty() && link.kept.empty();
    if (is_idle || link.session.acknowledged() != link.acknowledged_before ||
        link.session.received() != link.received_before)
      link.losses = 0;
  }
  if (link.losses++ == 0) {
    core::Duration patience = options_.redial_for;
    if (!link.was_open) patience = std::max(first_patience() - (now - link.dialled_first), core::Duration::zero());
    if (link.was_closed && link.there.bytes > 0) patience = std::min(patience, kClosedFor);
    link.dial_until = core::Deadline::after(patience);
    link.lost_first = link.was_open ? now : link.dialled_first;
    if (!link.was_open) link.why = why;
  }
  if (how != Loss::kRefused) {
    link.refused_first = {};
  } else if (link.refused_first == core::TimePoint{}) {
    link.refused_first = now;
    // A peer that lives dials at once after a loss, and later and later while it is in vain.
    const bool is_fresh = link.was_open && now - link.lost_at < kRefusedAfterFor;
    link.dial_until = std::min(link.dial_until, core::Deadline::after(is_fresh ? kRefusedAfterFor : kRefusedFor));
  }
  if (link.dial_until.has_passed(now)) {
    std::string text = "it cannot be reached from " + options_.address + ": " + std::move(why);
    if (link.losses > 1)
      text += ", after " + std::to_string(link.losses) + " attempts in " +
              core::format_seconds(core::to_seconds(now - link.lost_first));
    on_broken(link, text + "; its host, the network, a firewall or NAT between the two does this");
    return;
  }
  core::Duration pause = core::Duration::zero();
  if (link.losses > 1)
    pause = std::min<core::Duration>(kRedialPause * (1 << std::min(link.losses - 2, 10)), kRedialPauseMax);
  dial_later(link, pause, /*lacks=*/false);
}

std::size_t TcpTransportImpl::look_at_waiting(core::TimePoint now) {
  std::size_t did = 0;
  for (TcpLink* const link : std::vector<TcpLink*>(waiting_)) {
    if (link->state != TcpLink::LinkState::kWaiting) {
      if (!link->attempt_due.has_passed(now)) continue;
      on_lost(*link, "no answer from " + link->there.text() + " (" + name_ + ")", Loss::kOther);
    } else if (link->dial_until.has_passed(now) && link->losses > 0) {
      on_lost(*link, std::string(link->why), Loss::kOther);
    } else if (link->dial_at <= now) {
      std::erase(waiting_, link);
      const core::Status status = try_dial(*link);
      if (status.is_ok()) {
        ++did;
        continue;
      }
      if (status.code() == core::Code::kOutOfResources)
        dial_later(*link, kAgainAfter, /*lacks=*/true);
      else if (link->was_open)
        on_lost(*link, std::string(status.message()), Loss::kOther);
      else
        on_broken(*link, std::string(status.message()));
    } else {
      continue;
    }
    ++did;
  }
  return did;
}

/// The connection is established.
void TcpTransportImpl::say_hello(TcpLink& link) {
  TcpGreeting is{address_.id, link.peer, link.number, link.is_mine, !link.was_open, link.needs_small_packets, {}};
  is.side = link.session.begin_attempt();
  if (const core::Status status = begin_channel(link); !status.is_ok())
    return on_broken(link, std::string(status.message()));
  say(link, encode(is));
  link.state = TcpLink::LinkState::kGreeted;
  link.was_reached = true;
  // Somebody listens there: not the end that a closed connection looked like.
  if (link.was_closed) link.dial_until = core::Deadline::after(options_.redial_for, link.lost_first);
  if (link.was_open) {
    link.attempt_due = core::Deadline::after(kAnswerWithin);
  } else {  // a process that was reached and never answers is the heartbeats' matter
    link.attempt_due = core::Deadline::never();
    std::erase(waiting_, &link);
  }
  (void)watch(link, /*write=*/false);
}

void TcpTransportImpl::hear_answer(TcpLink& link) {
  const std::span<const std::byte, kAnswerBytes> bytes(link.hello.data(), kAnswerBytes);
  if (is_damaged_reply(bytes))
    return on_lost(link, "the answer of " + link.to + " was changed on the way", Loss::kOther);
  const std::optional<TcpReply> reply = decode_reply(bytes);
  TcpAnswer answer = reply ? reply->answer : TcpAnswer::kNotHere;
  if (answer != TcpAnswer::kBusy && !proves(link, link.peer)) answer = TcpAnswer::kNotHere;
  if (answer == TcpAnswer::kWelcome) {
    if (link.session.on_answer(reply->side) == TcpSession::Fit::kGoesOn) {
      std::erase(waiting_, &link);
      go_on(link);
    } else {
      on_broken(link, cannot_go_on(link));
    }
  } else if (answer == TcpAnswer::kBusy || answer == TcpAnswer::kUnnamed) {
    static core::LogRate rate(core::from_seconds(60));
    if (rate.permit())
      core::log_warn(name_, ": the process at ", link.to,
                     answer == TcpAnswer::kBusy
                         ? " has no file descriptors for another connection (raise `ulimit -n` there), or too many "
                           "connections that say nothing"
                         : " has too many connections from processes that it does not know yet",
                     "; it is tried again until it has room");
    dial_later(link, kAgainAfter, /*lacks=*/true);
  } else if (answer == TcpAnswer::kSmaller) {
    link.needs_small_packets = true;
    dial_later(link, core::Duration::zero(), /*lacks=*/false);
  } else if (answer == TcpAnswer::kCrossed) {
    // The peer is alive, and its own attempt is on the way. If not, this side dials again, with its patience anew.
    const bool lacked = link.lacks;
    if (!link.was_open) {
      link.losses = 0;
      link.dialled_first = core::Clock::now();
    }
    dial_later(link, link.was_open ? kAgainAfter : kCrossedAfter, /*lacks=*/false);
    link.lacks = lacked;
  } else if (answer == TcpAnswer::kDamaged) {
    on_broken(link, "to " + link.to + " (" + name_ + ") bytes were " + std::string(kChangedOnTheWay) +
                        " there; the log of that host says more");
  } else if (answer == TcpAnswer::kClosed) {
    on_broken(link, "it has given up this process, or closed its connections to it", /*ended=*/true);
  } else if (reply || link.was_open) {
    on_broken(link, std::string(kEndedWithoutClosing), /*ended=*/true);  // another process has its address
  } else {
    ++counters_.malformed;
    on_broken(link, "the connection (" + name_ + ") to " + link.to + " brought bytes that hybridps does not send");
  }
}

/// Moves the queue of `from`, which the peer has not answered, to the open connection `to`. Closes `from`.
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
    std::array<std::byte, 2048> unread;  // unread bytes would make the close send a reset
    (void)!::recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    const auto answer = encode(TcpReply{TcpAnswer::kBusy, {}});
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

/// The greeting may have arrived already. If not, a peer comes again. In TLS it hears so in clear, before its handshake
/// has begun here; then the answer of a handshake cannot come before it. In the middle of a handshake it hears nothing.
void TcpTransportImpl::drop_greeting(TcpLink& link) {
  if (link.channel && !link.channel->is_open()) {
    if (link.channel->has_begun()) return refuse(link);
    // The knock of a member may lie in the socket.
    if (!link.channel->has_knocked() && link.channel->hear_knock()) return;
    if (link.channel->has_failed()) return refuse(link, /*reset=*/false);
    link.channel.reset();
    std::array<std::byte, 2048> unread;  // unread bytes would make the close send a reset
    (void)!::recv(link.socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
  } else {
    (void)read(link);
    if (link.state != TcpLink::LinkState::kGreeting) return;
  }
  say(link, {TcpAnswer::kBusy, {}});
  refuse(link, /*reset=*/false);
}

/// Who is in the middle of a handshake goes last: nobody could tell it to come again.
TcpLink& TcpTransportImpl::first_to_go() const {
  const auto find = [&](auto&& is_meant) { return std::find_if(greeting_.begin(), greeting_.end(), is_meant); };
  auto first = find([](const TcpLink* one) { return !one->channel || !one->channel->has_knocked(); });
  if (first == greeting_.end())
    first = find([](const TcpLink* one) { return one->channel->is_open() || !one->channel->has_begun(); });
  return first == greeting_.end() ? *greeting_.front() : **first;
}

/// What most strangers say is told apart here, before they cost more. False: neither a greeting nor a knock.
bool TcpTransportImpl::may_be_member(TcpLink& link) {
  ssize_t got = -1;
  std::array<std::byte, kGreetingBytes> bytes;
  if (link.channel && link.channel->hear_knock()) return true;
  if (!link.channel) got = ::recv(link.socket.get(), bytes.data(), bytes.size(), MSG_PEEK | MSG_DONTWAIT);
  if (got < 0) return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR;
  return got > 0 && may_be_greeting(std::span(bytes).first(static_cast<std::size_t>(got)));
}

std::size_t TcpTransportImpl::accept_all() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) limit.rlim_cur = RLIM_INFINITY;
  // The kernel gives the lowest number that is free.
  const auto is_kept_back = [&](const TcpLink& link) {
    return static_cast<rlim_t>(link.socket.get()) + kKeptBack >= limit.rlim_cur;
  };
  std::size_t accepted = 0;
  std::unique_ptr<TcpLink> link;
  while (accepted < kAcceptsMax) {
    if (!link) link = std::make_unique<TcpLink>();
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
      ++accepted;
      if (is_lack(error) && !greeting_.empty()) {
        drop_greeting(first_to_go());
        continue;
      }
      static core::LogRate rate(core::from_seconds(60));
      if (rate.permit()) core::log_warn(socket_error(name_ + ": cannot take a connection", error).message());
      if (!is_lack(error) || !turn_away()) stop_accepting();
      return accepted;
    }
    ++accepted;
    link->state = TcpLink::LinkState::kGreeting;
    link->to = from.text();
    link->greeting_due = core::Deadline::after(options_.greeting_timeout);
    if (identity_) link->channel = tls::TlsChannel::accept(identity_, link->socket.get(), *guard_);
    if (!may_be_member(*link) || !watch(*link, /*write=*/false, /*added=*/false).is_ok()) {
      ++counters_.refused;
      link->channel.reset();
      link->socket.reset();
      continue;
    }
    greeting_.push_back(link.get());
    links_.push_back(std::move(link));
    const auto strangers =
        static_cast<std::size_t>(std::count_if(greeting_.begin(), greeting_.end(), [](const TcpLink* one) {
          return !one->channel || !one->channel->has_knocked();
        }));
    if (strangers > strangers_max_ || greeting_.size() > greetings_max_) {
      drop_greeting(first_to_go());
    } else if (greeting_.size() > 1 && is_kept_back(*greeting_.back())) {
      // One at most stays there: the place of one that goes elsewhere is filled next.
      const auto other =
          std::find_if(greeting_.begin(), greeting_.end() - 1, [&](const TcpLink* one) { return is_kept_back(*one); });
      drop_greeting(other != greeting_.end() - 1 ? **other : first_to_go());
    }
  }
  return accepted;
}

void TcpTransportImpl::greet(TcpLink& link) {
  const std::span<const std::byte, kGreetingBytes> bytes(link.hello);
  std::optional<TcpGreeting> greeting = decode_greeting(bytes, address_.id);
  if (greeting && !proves(link, greeting->from)) greeting.reset();
  const auto hang_up = [&](TcpAnswer answer) {
    say(link, {answer, {}});
    refuse(link, /*reset=*/false);
  };
  if (!greeting) return hang_up(TcpAnswer::kNotHere);
  set_options(link.socket.get());  // not at the accept: a stranger must not cost so many system calls
  if (find_damage(greeting->from) != nullptr) return hang_up(TcpAnswer::kDamaged);
  if (TcpLink* const known = find_session(*greeting)) return resume(*known, link, *greeting);
  TcpEndpoint* endpoint = nullptr;
  if (const auto found = by_id_.find(greeting->from); found != by_id_.end()) endpoint = found->second;
  // An endpoint that was closed before it had a connection may still have messages to deliver.
  TcpLink* const own = endpoint != nullptr ? endpoint->out_ : nullptr;
  const bool both_dial = own != nullptr && own->is_mine;
  const bool has_last_words =
      both_dial && !own->was_open && !own->queue.empty() && endpoint->state_ == TcpEndpoint::EndpointState::kDraining;
  if (!greeting->is_new || !greeting->is_mine || (endpoint != nullptr && !endpoint->is_open() && !has_last_words) ||
      link.session.on_greeting(greeting->side, false, false) != TcpSession::Fit::kGoesOn)
    return hang_up(TcpAnswer::kClosed);
  // Both dial: the session of the lower id stays. The other side comes to know so by this answer, or by our greeting.
  if (both_dial && own->session.side().attempt > 0 && address_.id < greeting->from) {
    say(link, {TcpAnswer::kCrossed, {}});
    return close(link, core::Status(core::Code::kClosed, "both sides have dialled"), /*reset=*/false);
  }
  const core::TimePoint now = core::Clock::now();
  // Holders of the token are no strangers.
  const bool may_be_stranger = !identity_ || identity_->may_meet_strangers();
  if (endpoint == nullptr && names_.count(greeting->from) == 0 && may_be_stranger && !has_room_for_stranger(now)) {
    ++counters_.turned_away;
    return hang_up(TcpAnswer::kUnnamed);
  }
  link.met_at = now;
  say(link, {TcpAnswer::kWelcome, link.session.side()});
  link.peer = greeting->from;
  link.number = greeting->number;
  std::erase(greeting_, &link);
  go_on(link);
  if (endpoint == nullptr) return;
  adopt(link, *endpoint);
  // The peer has not taken our own session, and does not: no greeting has left, or the peer's id is the lower one.
  if (both_dial && !own->was_open) take_over(link, *own);
}

bool TcpTransportImpl::has_room_for_stranger(core::TimePoint now) {
  std::size_t strangers = 0;
  TcpLink* oldest = nullptr;
  for (const auto& link : links_) {
    if (link->met_at == core::TimePoint{} || link->state == TcpLink::LinkState::kClosed || link->endpoint != nullptr ||
        names_.count(link->peer) > 0)
      continue;
    ++strangers;
    if (link->session.received() > 0) continue;  // a peer whose messages are here stays: its group may open yet
    if (oldest == nullptr || link->met_at < oldest->met_at) oldest = link.get();
  }
  if (strangers < greetings_max_) return true;
  if (oldest == nullptr || now - oldest->met_at < kUnnamedFor) return false;
  refuse(*oldest);
  return true;
}

TcpLink* TcpTransportImpl::find_session(const TcpGreeting& greeting) noexcept {
  for (const auto& link : links_)
    if (link->number == greeting.number && link->is_mine != greeting.is_mine && link->peer == greeting.from &&
        link->state != TcpLink::LinkState::kClosed && link->state != TcpLink::LinkState::kGreeting)
      return link.get();
  return nullptr;
}

void TcpTransportImpl::resume(TcpLink& link, TcpLink& over, const TcpGreeting& greeting) {
  // The peer has given the old connection up. What still came over it is taken first.
  while (link.state == TcpLink::LinkState::kOpen && read(link) > 0) {
  }
  const auto hang_up = [&](TcpAnswer answer) {
    say(over, {answer, {}});
    refuse(over, /*reset=*/false);
  };
  if (link.state == TcpLink::LinkState::kClosed)
    return hang_up(find_damage(link.peer) != nullptr ? TcpAnswer::kDamaged : TcpAnswer::kClosed);
  if (link.needs_small_packets && !greeting.has_small_packets) return hang_up(TcpAnswer::kSmaller);
  switch (
      link.session.on_greeting(greeting.side, link.state == TcpLink::LinkState::kGreeted, address_.id < link.peer)) {
    case TcpSession::Fit::kStale: return refuse(over);
    case TcpSession::Fit::kOursGoes: return hang_up(TcpAnswer::kCrossed);
    case TcpSession::Fit::kLost: hang_up(TcpAnswer::kClosed); return on_broken(link, cannot_go_on(link));
    case TcpSession::Fit::kGoesOn: break;
  }
  if (link.state == TcpLink::LinkState::kOpen) {
    link.lost_at = core::Clock::now();
    link.why = "the connection (" + name_ + ") to " + link.to + " was given up by its other side";
  }
  drop_socket(link);
  say(over, {TcpAnswer::kWelcome, link.session.side()});
  link.socket = std::move(over.socket);
  link.channel = std::move(over.channel);
  std::erase(greeting_, &over);
  over.state = TcpLink::LinkState::kClosed;
  has_closed_ = true;
  if (const core::Status status = watch(link, /*write=*/false); !status.is_ok())
    return on_broken(link, std::string(status.message()));
  go_on(link);
}

void TcpTransportImpl::refuse(TcpLink& link, bool reset) {
  ++counters_.refused;
  close(link, core::Status(core::Code::kClosed, "it did not greet as a peer does"), reset);
}

void TcpTransportImpl::expire_greetings(core::TimePoint now) {
  while (!greeting_.empty() && greeting_.front()->greeting_due.has_passed(now)) refuse(*greeting_.front());
}

}  // namespace hybridps::transport
