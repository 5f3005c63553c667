#include "hybridps/transport/tcp/tcp_transport.h"

#include <fcntl.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/transport/tcp/tcp_transport_impl.h"

namespace hybridps::transport {
namespace {

constexpr std::size_t kGreetingsMax = 1024;
/// Taken before anything else is looked at.
constexpr std::size_t kAcceptsMax = 64;
constexpr int kBacklog = 4096;
/// Of one system call: so many parts, and bytes, which is more than a socket takes at once.
constexpr std::size_t kPartsMax = 64;
constexpr std::size_t kSendBytesMax = std::size_t{1} << 20;
/// What one connection may bring before the others are looked at.
constexpr std::size_t kReadBytesMax = std::size_t{512} << 10;
constexpr std::size_t kBulkBytes = std::size_t{4} << 10;
/// Once one of two connections to a peer has ended, the other may still bring something for so long.
constexpr core::Duration kEndWithin = core::from_seconds(0.25);
/// Where there are no descriptors.
constexpr core::Duration kAgainAfter = core::from_seconds(0.1);
/// After a connection was lost before an answer: at once, then doubled each time.
constexpr core::Duration kRedialPause = core::from_seconds(0.01);
constexpr core::Duration kRedialPauseMax = core::from_seconds(0.5);

/// This machine, or this process, has no more of something: that says nothing of a peer.
bool is_lack(int error) {
  return error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS || error == ENOSPC;
}

core::Status socket_error(const std::string& what, int error) {
  std::string hint;
  if (rlimit limit{}; error == EMFILE && ::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    hint = "; too few file descriptors: all " + std::to_string(limit.rlim_cur) + " are in use; raise `ulimit -n`";
  if (error == ENFILE) hint = "; too few file descriptors: all of this machine are in use; raise fs.file-max";
  return {is_lack(error) ? core::Code::kOutOfResources : core::Code::kInvalidArgument,
          what + ": " + std::strerror(error) + hint};
}

core::Descriptor make_socket(int family) {
  const core::ForkLock lock;
  return {lock, ::socket(family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0)};
}

}  // namespace

core::Result<std::unique_ptr<TcpTransport>> TcpTransport::create(const TcpOptions& options) {
  auto transport = std::make_unique<TcpTransportImpl>(options);
  if (core::Status status = transport->start(); !status.is_ok()) return status;
  return std::unique_ptr<TcpTransport>(std::move(transport));
}

TcpTransportImpl::TcpTransportImpl(const TcpOptions& options) : options_(options), name_("tcp " + options.label) {}

core::Status TcpTransportImpl::start() {
  const std::optional<SocketAddress> here = parse_address(options_.address, 0);
  if (!here)
    return {core::Code::kInvalidArgument, "'" + options_.address + "' is no IP address to listen on (" + name_ + ")"};
  address_.id = make_tcp_id();
  {
    const core::ForkLock lock;
    poller_ = core::Descriptor(lock, ::epoll_create1(EPOLL_CLOEXEC));
  }
  if (!poller_) return socket_error("no epoll for " + name_, errno);
  listener_ = make_socket(here->name.ss_family);
  if (!listener_) return socket_error("no socket for " + name_, errno);
  if (::bind(listener_.get(), here->get(), here->bytes) != 0 || ::listen(listener_.get(), kBacklog) != 0)
    return socket_error("cannot listen on " + options_.address + " (" + name_ + ")", errno);
  address_.socket.bytes = sizeof address_.socket.name;
  if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address_.socket.name), &address_.socket.bytes) != 0)
    return socket_error("cannot ask where " + name_ + " listens", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  if (::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0)
    return socket_error("cannot watch a socket of " + name_, errno);
  rlimit limit{};
  greetings_max_ = kGreetingsMax;
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    greetings_max_ = std::clamp<std::size_t>(limit.rlim_cur / 4, 1, greetings_max_);
  if (options_.greetings_max > 0) greetings_max_ = options_.greetings_max;
  keep_spare();
  rx_pool_ = std::make_unique<RxPool>(~std::size_t{0});
  core::log_info(name_, " listens on ", address_.socket.text());
  return core::Status::ok();
}

TcpTransportImpl::~TcpTransportImpl() {
  if (in_child()) {
    leave_to_parent();
    return;
  }
  receiver_ = nullptr;
  run_down();
  while (run_completions() > 0) {
  }
}

/// In a forked child: whatever has a destructor that would run someone's `done`, or give a slot back, is leaked.
void TcpTransportImpl::leave_to_parent() noexcept {
  for (auto& send : sends_) (void)send.release();
  (void)rx_pool_.release();
}

/// Friendly closes for close_timeout, then forced ones.
void TcpTransportImpl::run_down() {
  for (auto& [peer, endpoint] : endpoints_)
    close(*endpoint, core::Status(core::Code::kClosed, "the transport was destroyed"));
  while (!attention_.empty() || !closing_.empty()) {
    if (progress() > 0 || closing_.empty()) continue;
    pollfd event{poller_.get(), POLLIN, 0};
    (void)::poll(&event, 1, 1);
  }
  const core::Status closed(core::Code::kClosed, "the transport was destroyed");
  for (const auto& link : links_) close(*link, closed, /*reset=*/false);
}

core::Status TcpTransportImpl::child_error() const {
  return {core::Code::kClosed, name_ + " belongs to the parent process"};
}

core::Status TcpTransportImpl::attach(std::span<std::byte> pool_memory) {
  if (in_child()) return child_error();
  if (pool_memory.empty()) return {core::Code::kInvalidArgument, "no memory to attach"};
  regions_.push_back(pool_memory);
  return core::Status::ok();
}

// Connections

core::Result<Endpoint*> TcpTransportImpl::connect(core::EngineId peer, std::span<const std::byte> address) {
  if (in_child()) return child_error();
  if (const auto found = endpoints_.find(peer); found != endpoints_.end()) {
    if (!found->second->is_open()) return found->second->cause_;
    return static_cast<Endpoint*>(found->second.get());
  }
  const core::Result<TcpAddress> to = decode_tcp_address(address);
  if (!to.is_ok()) return to.status();
  if (by_id_.count(to.value().id) > 0)
    return core::Status(core::Code::kInvalidArgument, "the address of another engine");
  // One that the peer has made serves both ways.
  const auto is_there = [&](const std::unique_ptr<TcpLink>& link) {
    return link->state == TcpLink::State::kOpen && link->endpoint == nullptr && link->peer == to.value().id;
  };
  const auto found = std::find_if(links_.begin(), links_.end(), is_there);
  TcpLink* out = found != links_.end() ? found->get() : nullptr;
  if (out == nullptr) {
    core::Result<TcpLink*> dialled = dial(to.value());
    if (!dialled.is_ok()) return dialled.status();
    out = dialled.value();
  }
  auto endpoint = std::make_unique<TcpEndpoint>(*this, peer, to.value().id);
  for (const auto& link : links_)
    if (link.get() == out || is_there(link)) adopt(*link, *endpoint);
  endpoint->out_ = out;
  by_id_.emplace(to.value().id, endpoint.get());
  Endpoint* const result = endpoint.get();
  endpoints_.emplace(peer, std::move(endpoint));
  return result;
}

Endpoint* TcpTransportImpl::find(core::EngineId peer) noexcept {
  const auto found = endpoints_.find(peer);
  return found != endpoints_.end() && found->second->is_open() ? found->second.get() : nullptr;
}

Way TcpTransportImpl::way(core::EngineId peer, std::span<const std::byte> address) noexcept {
  if (in_child()) return Way::kNone;
  if (const auto found = endpoints_.find(peer); found != endpoints_.end()) {
    const TcpEndpoint& endpoint = *found->second;
    if (!endpoint.is_open()) return Way::kNone;
    const TcpLink* const out = endpoint.out_;
    return out != nullptr && out->is_lacking(core::Clock::now()) ? Way::kLacks : Way::kStands;
  }
  const core::Result<TcpAddress> to = decode_tcp_address(address);
  const auto is_there = [&](const std::unique_ptr<TcpLink>& link) {
    return link->state == TcpLink::State::kOpen && link->endpoint == nullptr && link->peer == to.value().id;
  };
  return to.is_ok() && std::any_of(links_.begin(), links_.end(), is_there) ? Way::kStands : Way::kNone;
}

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
}

core::Status TcpTransportImpl::watch(TcpLink& link, bool write, bool added) {
  epoll_event event{};
  event.events = EPOLLIN | (write ? EPOLLOUT : 0U);
  event.data.ptr = &link;
  link.watches_write = write;
  if (::epoll_ctl(poller_.get(), added ? EPOLL_CTL_MOD : EPOLL_CTL_ADD, link.socket.get(), &event) != 0)
    return socket_error("cannot watch a socket of " + name_, errno);
  return core::Status::ok();
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
  link.state = TcpLink::State::kConnecting;
  return core::Status::ok();
}

/// Nothing but a greeting has left there: what waits in its queue waits on.
void TcpTransportImpl::dial_later(TcpLink& link, core::Duration pause, bool lacks) {
  ++counters_.redials;
  if (link.socket) (void)::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  link.socket.reset();
  link.begin = link.end = 0;
  link.error = 0;
  link.watches_write = false;
  link.state = TcpLink::State::kWaiting;
  link.lacks = lacks;
  if (lacks) link.losses = 0;  // somebody was there, or it was not even tried
  link.dial_at = core::Clock::now() + pause;
  waiting_.push_back(&link);
}

/// Whoever reset it, or let it end, had heard nothing from us but that we are there. A peer that is gone refuses the next one.
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

/// The connection stands. So few bytes always fit.
void TcpTransportImpl::say_hello(TcpLink& link) {
  const auto greeting = encode_greeting(address_.id, link.peer);
  (void)!::send(link.socket.get(), greeting.data(), greeting.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  link.state = TcpLink::State::kGreeted;
  (void)watch(link, /*write=*/false);
}

/// False: more must come first, or this connection is over.
bool TcpTransportImpl::hear_answer(TcpLink& link) {
  if (link.end - link.begin < kAnswerBytes) return false;
  const std::span<const std::byte, kAnswerBytes> bytes(link.read_ahead.data() + link.begin, kAnswerBytes);
  const std::optional<TcpAnswer> answer = decode_answer(bytes);
  if (answer == TcpAnswer::kWelcome) {
    link.begin += kAnswerBytes;
    link.state = TcpLink::State::kOpen;
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

/// What waited for a connection that nobody has heard of leaves on one that stands.
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

/// Those who wait at the door hear that there is no room now, and come again. False: they wait on, and hear nothing.
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
    std::array<std::byte, kGreetingBytes> unread;  // else its kernel hears of a reset
    (void)!::recv(socket.get(), unread.data(), unread.size(), MSG_DONTWAIT);
    const auto answer = encode_answer(TcpAnswer::kBusy);
    (void)!::send(socket.get(), answer.data(), answer.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
  }
  keep_spare();
  return true;
}

/// Who waits there waits on: a listener that is always readable would keep this thread awake meanwhile.
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
    link->state = TcpLink::State::kGreeting;
    link->to = from.text();
    link->greeting_due = core::Deadline::after(options_.greeting_timeout);
    if (!watch(*link, /*write=*/false, /*added=*/false).is_ok()) continue;
    greeting_.push_back(link.get());
    links_.push_back(std::move(link));
    if (greeting_.size() <= greetings_max_) continue;
    // Its greeting may lie there already. If not, a peer comes again.
    TcpLink& oldest = *greeting_.front();
    (void)read(oldest);
    if (oldest.state == TcpLink::State::kGreeting) refuse(oldest);
  }
  return accepted;
}

/// False: more must come first, or it was refused.
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
  link.state = TcpLink::State::kOpen;
  std::erase(greeting_, &link);
  if (endpoint == nullptr) return true;
  adopt(link, *endpoint);
  // Ours has not even greeted yet: one is enough.
  TcpLink* const out = endpoint->out_;
  if (out != nullptr && (out->state == TcpLink::State::kWaiting || out->state == TcpLink::State::kConnecting))
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

// Progress

std::size_t TcpTransportImpl::progress() {
  if (in_child()) return 0;
  std::size_t did = flush_all();
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(poller_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    auto* const link = static_cast<TcpLink*>(events[static_cast<std::size_t>(i)].data.ptr);
    did += link == nullptr ? accept_all() : on_event(*link, events[static_cast<std::size_t>(i)].events);
  }
  if (!accepts_ || !waiting_.empty()) {
    const core::TimePoint now = core::Clock::now();
    if (!accepts_ && now >= accepts_again_) accept_again();
    did += dial_waiting(now);
  }
  // Answers to small messages go at once. Those to large ones wait for what the engine has to say besides, before the next
  // progress(): credit and the next chunk to the same peer are one packet then instead of two.
  if (!std::exchange(had_bulk_, false)) did += flush_all();
  did += run_completions();
  did += attend();
  if (std::exchange(has_closed_, false))
    std::erase_if(links_, [](const auto& link) { return link->state == TcpLink::State::kClosed; });
  return did;
}

bool TcpTransportImpl::arm() {
  if (in_child()) return true;
  if (!listed_.empty() || !completions_.empty() || !attention_.empty()) return false;
  if (!greeting_.empty()) expire_greetings();
  return true;
}

std::size_t TcpTransportImpl::on_event(TcpLink& link, std::uint32_t events) {
  std::size_t did = 0;
  if (link.state == TcpLink::State::kConnecting) {
    int error = 0;
    socklen_t bytes = sizeof error;
    if (::getsockopt(link.socket.get(), SOL_SOCKET, SO_ERROR, &error, &bytes) != 0) error = errno;
    if (error != 0) {
      break_off(link, "cannot be made", error);
      return 1;
    }
    if ((events & EPOLLOUT) == 0) return 0;
    say_hello(link);
    return 1;
  }
  if (!link.socket) return 0;
  if ((events & EPOLLOUT) != 0 && link.state == TcpLink::State::kOpen) did += flush(link);
  if (link.socket && (events & ~std::uint32_t{EPOLLOUT}) != 0) did += read(link);
  return did;
}

TransportStats TcpTransportImpl::stats() const noexcept {
  TransportStats stats = stats_;
  for (const auto& [peer, endpoint] : endpoints_) stats.endpoints_open += endpoint->is_open() ? 1 : 0;
  return stats;
}

std::vector<PathInfo> TcpTransportImpl::paths() const {
  std::vector<PathInfo> paths;
  for (const auto& [peer, endpoint] : endpoints_) {
    if (!endpoint->is_open()) continue;
    for (const TcpLink* link : endpoint->links_) {
      tcp_info info{};
      socklen_t length = sizeof info;
      if (link->state != TcpLink::State::kOpen ||
          ::getsockopt(link->socket.get(), IPPROTO_TCP, TCP_INFO, &info, &length) != 0)
        continue;
      paths.push_back({peer, info.tcpi_rtt * 1e-6, info.tcpi_total_retrans});
    }
  }
  return paths;
}

TcpCounters TcpTransportImpl::counters() const noexcept {
  TcpCounters counters = counters_;
  counters.receive_bytes = rx_pool_->bytes_mapped();
  counters.receive_slots_in_use = rx_pool_->slots_in_use();
  return counters;
}

// Sending

core::Status TcpEndpoint::send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                               SendDone done) {
  return transport_.send(*this, header, payload, payload_bytes, std::move(done));
}

void TcpEndpoint::close(core::Status cause) noexcept { transport_.close(*this, std::move(cause)); }

core::Status TcpTransportImpl::send(TcpEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                                    std::size_t payload_bytes, SendDone done) {
  if (in_child()) return child_error();
  if (!endpoint.is_open()) return endpoint.cause_;
  if (header.empty() || header.size() > kHeaderBytesMax)
    return {core::Code::kInvalidArgument, "a header of " + std::to_string(header.size()) + " bytes"};
  if (payload_bytes > 0) {
    if (!payload || payload_bytes > payload.capacity_bytes() || payload_bytes > options_.payload_bytes_max)
      return {core::Code::kInvalidArgument, "more payload than its buffer holds, or than a message may have"};
    const std::byte* const data = payload.data();
    const auto holds = [&](std::span<std::byte> region) {
      return data >= region.data() && data + payload_bytes <= region.data() + region.size();
    };
    if (std::none_of(regions_.begin(), regions_.end(), holds))
      return {core::Code::kInvalidArgument, "the payload's memory was not attached to this transport"};
  }
  TcpSend* const send = acquire();
  send->endpoint = &endpoint;
  if (payload_bytes > 0) send->payload = payload;
  send->payload_bytes = payload_bytes;
  send->done = std::move(done);
  encode(Frame{static_cast<std::uint32_t>(payload_bytes), static_cast<std::uint16_t>(header.size())},
         send->head.data());
  std::memcpy(send->head.data() + kFrameBytes, header.data(), header.size());
  send->head_bytes = kFrameBytes + header.size();
  endpoint.out_->queue.push_back(send);
  ++unsent_;
  list(*endpoint.out_);
  ++stats_.tx_messages;
  stats_.tx_header_bytes += header.size();
  stats_.tx_payload_bytes += payload_bytes;
  return core::Status::ok();
}

TcpSend* TcpTransportImpl::acquire() {
  if (free_sends_.empty()) {
    sends_.push_back(std::make_unique<TcpSend>());
    free_sends_.reserve(sends_.size());
    return sends_.back().get();
  }
  TcpSend* const send = free_sends_.back();
  free_sends_.pop_back();
  return send;
}

/// Nothing leaves inside send(): what is sent to one peer in a round goes with one system call, and in full packets.
void TcpTransportImpl::list(TcpLink& link) {
  if (link.state != TcpLink::State::kOpen || link.watches_write || link.error != 0) return;
  if (std::exchange(link.is_listed, true)) return;
  listed_.push_back(&link);
}

void TcpTransportImpl::send_now() noexcept {
  if (!in_child()) (void)flush_all();
}

std::size_t TcpTransportImpl::flush_all() {
  std::size_t did = 0;
  while (!listed_.empty()) {
    TcpLink* const link = listed_.back();
    listed_.pop_back();
    link->is_listed = false;
    const bool given_up = link->endpoint != nullptr && link->endpoint->state_ == TcpEndpoint::State::kDoomed;
    if (link->state == TcpLink::State::kOpen && !given_up) did += flush(*link);
  }
  return did;
}

std::size_t TcpTransportImpl::flush(TcpLink& link) {
  std::size_t did = 0;
  while (!link.queue.empty() && link.error == 0) {
    std::array<iovec, kPartsMax> parts;
    std::size_t count = 0;
    std::size_t bytes = 0;
    std::size_t skip = link.front_sent;
    const auto add = [&](const std::byte* data, std::size_t length) {
      if (skip >= length) {
        skip -= length;
        return;
      }
      parts[count++] = {const_cast<std::byte*>(data) + skip, length - skip};
      bytes += length - skip;
      skip = 0;
    };
    for (auto at = link.queue.begin(); at != link.queue.end() && count + 2 <= kPartsMax && bytes < kSendBytesMax;
         ++at) {
      add((*at)->head.data(), (*at)->head_bytes);
      if ((*at)->payload_bytes > 0) add((*at)->payload.data(), (*at)->payload_bytes);
    }
    msghdr message{};
    message.msg_iov = parts.data();
    message.msg_iovlen = count;
    const ssize_t sent = ::sendmsg(link.socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (sent < 0 && errno == EINTR) continue;
    if (sent < 0 && errno != EAGAIN && errno != EWOULDBLOCK) {
      // What the peer said before it broke off is still to be read; then read() finds the end.
      link.error = errno;
      (void)::shutdown(link.socket.get(), SHUT_RDWR);
      if (link.watches_write) (void)watch(link, /*write=*/false);
      return did;
    }
    if (sent > 0) {
      ++did;
      ++counters_.sends;
      has_sent(link, static_cast<std::size_t>(sent));
    }
    if (sent < 0 || static_cast<std::size_t>(sent) < bytes) {
      if (!link.watches_write) (void)watch(link, /*write=*/true);
      return did;
    }
  }
  if (link.watches_write) (void)watch(link, /*write=*/false);
  return did;
}

void TcpTransportImpl::has_sent(TcpLink& link, std::size_t bytes) {
  link.front_sent += bytes;
  while (!link.queue.empty()) {
    TcpSend* const send = link.queue.front();
    const std::size_t of_front = send->head_bytes + send->payload_bytes;
    if (link.front_sent < of_front) return;
    link.front_sent -= of_front;
    link.queue.pop_front();
    --unsent_;
    completions_.push_back({send, core::Status::ok()});
  }
}

std::size_t TcpTransportImpl::run_completions() {
  if (completions_.empty()) return 0;
  std::swap(running_completions_, completions_);
  for (Completion& completion : running_completions_) {
    TcpSend* const send = completion.send;
    send->payload = Buffer();  // first, so that `done` may use the slot
    SendDone done = std::move(send->done);
    send->endpoint = nullptr;
    send->payload_bytes = 0;
    free_sends_.push_back(send);
    done(std::move(completion.status));
  }
  const std::size_t count = running_completions_.size();
  running_completions_.clear();
  return count;
}

// Receiving

std::size_t TcpTransportImpl::read(TcpLink& link) {
  std::size_t did = 0;
  std::size_t had = 0;
  while (link.socket && had < kReadBytesMax) {
    if (link.begin > 0) {
      std::memmove(link.read_ahead.data(), link.read_ahead.data() + link.begin, link.end - link.begin);
      link.end -= std::exchange(link.begin, 0);
    }
    std::array<iovec, 2> parts;
    std::size_t count = 0;
    const std::size_t rest = link.slot != nullptr ? link.payload_bytes - link.payload_have : 0;
    if (rest > 0) parts[count++] = {link.slot->data + link.payload_have, rest};
    const std::size_t room = link.read_ahead.size() - link.end;
    parts[count++] = {link.read_ahead.data() + link.end, room};
    const ssize_t got = ::readv(link.socket.get(), parts.data(), static_cast<int>(count));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK)) return did;
    if (got <= 0) {
      break_off(link, "broke", got < 0 ? errno : link.error);
      return did + 1;
    }
    ++did;
    ++counters_.receives;
    const auto bytes = static_cast<std::size_t>(got);
    had += bytes;
    const std::size_t in_place = std::min(bytes, rest);
    link.payload_have += in_place;
    link.end += bytes - in_place;
    parse(link);
    if (bytes < rest + room) return did;  // that was all
  }
  return did;
}

void TcpTransportImpl::parse(TcpLink& link) {
  for (;;) {
    if (link.state == TcpLink::State::kGreeting) {
      if (!greet(link)) return;
    } else if (link.state == TcpLink::State::kGreeted) {
      if (!hear_answer(link)) return;
    } else if (link.state == TcpLink::State::kWaiting) {
      return;
    } else if (link.state == TcpLink::State::kClosed) {
      return;
    } else if (link.slot != nullptr) {
      if (link.payload_have < link.payload_bytes) return;
      deliver(link);
    } else if (!begin_message(link)) {
      return;
    }
  }
}

bool TcpTransportImpl::begin_message(TcpLink& link) {
  const std::byte* const bytes = link.read_ahead.data() + link.begin;
  const std::size_t have = link.end - link.begin;
  if (have < kFrameBytes) return false;
  const std::optional<Frame> frame = decode_frame(bytes);
  if (!frame || frame->payload_bytes > options_.payload_bytes_max) {
    ++counters_.malformed;
    on_broken(link, "the connection (" + name_ + ") to " + link.to + " brought bytes that hybridps does not send");
    return false;
  }
  const std::size_t head = kFrameBytes + frame->header_bytes;
  if (have < head) return false;
  if (frame->payload_bytes > 0) {
    link.slot = rx_pool_->allocate(frame->payload_bytes);
    if (link.slot == nullptr) {
      on_broken(link, "no memory for a message of " + std::to_string(frame->payload_bytes) + " bytes from it");
      return false;
    }
  }
  link.header_bytes = frame->header_bytes;
  std::memcpy(link.header.data(), bytes + kFrameBytes, link.header_bytes);
  link.payload_bytes = frame->payload_bytes;
  link.payload_have = std::min(have - head, link.payload_bytes);
  link.begin += head + link.payload_have;
  if (link.payload_have > 0) std::memcpy(link.slot->data, bytes + head, link.payload_have);
  counters_.bytes_copied += link.payload_have;
  if (link.begin == link.end) link.begin = link.end = 0;
  if (link.payload_have == link.payload_bytes) deliver(link);
  return true;
}

void TcpTransportImpl::deliver(TcpLink& link) {
  RxSlot* const slot = std::exchange(link.slot, nullptr);
  RxPayload payload;
  if (slot != nullptr) payload = RxPayload(slot->data, link.payload_bytes, &release_slot, this, slot);
  if (receiver_ == nullptr) return;
  had_bulk_ |= link.payload_bytes >= kBulkBytes;
  ++stats_.rx_messages;
  stats_.rx_header_bytes += link.header_bytes;
  stats_.rx_payload_bytes += link.payload_bytes;
  receiver_->on_message({link.header.data(), link.header_bytes}, std::move(payload));
}

void TcpTransportImpl::release_slot(void* transport, void* slot, std::uint64_t) noexcept {
  auto& self = *static_cast<TcpTransportImpl*>(transport);
  if (!self.in_child()) self.rx_pool_->release(static_cast<RxSlot*>(slot));
}

// Closing

void TcpTransportImpl::break_off(TcpLink& link, const char* doing, int error) {
  const bool ended = error == 0 || error == ECONNRESET || error == EPIPE;
  std::string what = "the connection (" + name_ + ") to " + link.to + " " + doing + ": " + std::strerror(error);
  const bool was_lost = link.losses > 0;
  // One that has listened and does so no more has ended.
  if (ended || (error == ECONNREFUSED && was_lost)) what = kEndedWithoutClosing;
  const bool is_new = link.state == TcpLink::State::kConnecting || link.state == TcpLink::State::kGreeted;
  if (is_new && ended)
    on_lost(link);
  else if (is_new && is_lack(error))
    dial_later(link, kAgainAfter, /*lacks=*/true);
  else
    on_broken(link, std::move(what), ended);
}

void TcpTransportImpl::on_broken(TcpLink& link, std::string what, bool ended) {
  core::Status cause(core::Code::kPeerDead, std::move(what));
  if (TcpEndpoint* const endpoint = link.endpoint; endpoint != nullptr) {
    if (endpoint->is_open()) {
      endpoint->cause_ = cause;
      endpoint->report_ = true;
      // The end of the connection that it did not send on may overtake what it has sent on the other.
      const bool more_may_come = ended && endpoint->links_.size() > 1;
      endpoint->state_ = more_may_come ? TcpEndpoint::State::kEnding : TcpEndpoint::State::kDoomed;
      endpoint->close_deadline_ = core::Deadline::after(kEndWithin);
      attention_.push_back(endpoint);
    }
    cause = endpoint->cause_;  // of those that were leaving, why
  }
  close(link, cause, /*reset=*/true);
}

void TcpTransportImpl::close(TcpLink& link, const core::Status& cause, bool reset) {
  if (link.state == TcpLink::State::kClosed) return;
  if (link.state == TcpLink::State::kGreeting) std::erase(greeting_, &link);
  if (link.state == TcpLink::State::kWaiting) std::erase(waiting_, &link);
  link.state = TcpLink::State::kClosed;
  has_closed_ = true;
  if (std::exchange(link.is_listed, false)) std::erase(listed_, &link);
  if (TcpEndpoint* const endpoint = std::exchange(link.endpoint, nullptr); endpoint != nullptr) {
    std::erase(endpoint->links_, &link);
    if (endpoint->out_ == &link) endpoint->out_ = nullptr;
  }
  if (reset && link.socket) {
    const linger at_once{1, 0};
    (void)::setsockopt(link.socket.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  }
  // Not left to close(): a child on its way to exec may hold a copy, and the set would go on naming what is freed.
  if (link.socket) (void)::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, link.socket.get(), nullptr);
  link.socket.reset();
  if (RxSlot* const slot = std::exchange(link.slot, nullptr); slot != nullptr) rx_pool_->release(slot);
  for (TcpSend* const send : link.queue) {
    --unsent_;
    completions_.push_back({send, cause});
  }
  link.queue.clear();
}

void TcpTransportImpl::close(TcpEndpoint& endpoint, core::Status cause) {
  if (in_child() || !endpoint.is_open()) return;
  const bool friendly = cause.is_ok() || cause.code() == core::Code::kClosed;
  endpoint.cause_ = cause.is_ok() ? core::Status(core::Code::kClosed, "the endpoint was closed") : std::move(cause);
  endpoint.state_ = friendly ? TcpEndpoint::State::kDraining : TcpEndpoint::State::kDoomed;
  endpoint.close_deadline_ = core::Deadline::after(options_.close_timeout);
  attention_.push_back(&endpoint);
}

std::size_t TcpTransportImpl::attend() {
  if (attention_.empty() && closing_.empty()) return 0;
  const core::TimePoint now = core::Clock::now();
  std::vector<TcpEndpoint*> looked_at = std::exchange(attention_, {});
  std::size_t did = looked_at.size();
  looked_at.insert(looked_at.end(), closing_.begin(), closing_.end());
  closing_.clear();
  std::vector<TcpEndpoint*> over;
  for (TcpEndpoint* endpoint : looked_at) (step(*endpoint, now) ? closing_ : over).push_back(endpoint);
  did += over.size();
  for (TcpEndpoint* endpoint : over)
    if (std::exchange(endpoint->report_, false) && receiver_ != nullptr)
      receiver_->on_peer_failed(endpoint->peer_, endpoint->cause_);
  return did;
}

bool TcpTransportImpl::step(TcpEndpoint& endpoint, core::TimePoint now) {
  using State = TcpEndpoint::State;
  TcpLink* const out = endpoint.out_;
  const bool late = endpoint.close_deadline_.has_passed(now);
  if (endpoint.state_ == State::kDraining && out != nullptr && !late) {
    if (!out->queue.empty()) return true;
    if (out->state == TcpLink::State::kOpen) {
      (void)::shutdown(out->socket.get(), SHUT_WR);
      endpoint.state_ = State::kFlushing;
    }
  }
  if (endpoint.state_ == State::kFlushing && out != nullptr && !late) {
    int unacknowledged = 0;
    if (::ioctl(out->socket.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0) return true;
  }
  if (endpoint.state_ == State::kEnding && !endpoint.links_.empty() && !late) return true;
  if (endpoint.state_ == State::kGone) return false;
  const bool forced = endpoint.state_ == State::kDoomed || endpoint.state_ == State::kEnding;
  endpoint.state_ = State::kGone;
  while (!endpoint.links_.empty()) close(*endpoint.links_.back(), endpoint.cause_, forced);
  return false;
}

}  // namespace hybridps::transport
