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
#include "hybridps/transport/tcp/tcp_socket.h"
#include "hybridps/transport/tcp/tcp_transport_impl.h"

namespace hybridps::transport {
namespace {

constexpr std::size_t kGreetingsMax = 1024;
constexpr int kBacklog = 4096;
/// After one of two connections to a peer has ended, the other may still deliver for this long.
constexpr core::Duration kEndWithin = core::from_seconds(0.25);

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

/// In a forked child: leaks all objects with a destructor that would run a `done` or give a slot back.
void TcpTransportImpl::leave_to_parent() noexcept {
  for (auto& send : sends_) (void)send.release();
  (void)rx_pool_.release();
}

/// Closes the endpoints in the friendly way for close_timeout, then by force.
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
  // A connection that the peer has made serves both ways.
  const auto is_there = [&](const std::unique_ptr<TcpLink>& link) {
    return link->state == TcpLink::LinkState::kOpen && link->endpoint == nullptr && link->peer == to.value().id;
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
    return link->state == TcpLink::LinkState::kOpen && link->endpoint == nullptr && link->peer == to.value().id;
  };
  return to.is_ok() && std::any_of(links_.begin(), links_.end(), is_there) ? Way::kStands : Way::kNone;
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
  // Answers to small messages go at once. Answers to large messages wait for the next progress(), because the engine
  // may add more. Credit and the next chunk to the same peer are then one packet instead of two.
  if (!std::exchange(had_bulk_, false)) did += flush_all();
  did += run_completions();
  did += attend();
  if (std::exchange(has_closed_, false))
    std::erase_if(links_, [](const auto& link) { return link->state == TcpLink::LinkState::kClosed; });
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
  if (link.state == TcpLink::LinkState::kConnecting) {
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
  if ((events & EPOLLOUT) != 0 && link.state == TcpLink::LinkState::kOpen) did += flush(link);
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
      PathInfo path{peer};
      if (link->state == TcpLink::LinkState::kOpen && read_path(link->socket.get(), path)) paths.push_back(path);
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

core::Status TcpEndpoint::send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                               SendDone done) {
  return transport_.send(*this, header, payload, payload_bytes, std::move(done));
}

void TcpEndpoint::close(core::Status cause) noexcept { transport_.close(*this, std::move(cause)); }

void TcpTransportImpl::send_now() noexcept {
  if (!in_child()) (void)flush_all();
}

// Closing

void TcpTransportImpl::break_off(TcpLink& link, const char* doing, int error) {
  const bool ended = error == 0 || error == ECONNRESET || error == EPIPE;
  std::string what = "the connection (" + name_ + ") to " + link.to + " " + doing + ": " + std::strerror(error);
  const bool was_lost = link.losses > 0;
  // A peer that listened before and does not listen now has ended.
  if (ended || (error == ECONNREFUSED && was_lost)) what = kEndedWithoutClosing;
  const bool is_new = link.state == TcpLink::LinkState::kConnecting || link.state == TcpLink::LinkState::kGreeted;
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
      // A peer sends on one connection only. The other connection's end may overtake the peer's last messages.
      const bool more_may_come = ended && endpoint->links_.size() > 1;
      endpoint->state_ = more_may_come ? TcpEndpoint::EndpointState::kEnding : TcpEndpoint::EndpointState::kDoomed;
      endpoint->close_deadline_ = core::Deadline::after(kEndWithin);
      attention_.push_back(endpoint);
    }
    cause = endpoint->cause_;  // if the endpoint was closing already, the first cause counts
  }
  close(link, cause, /*reset=*/true);
}

void TcpTransportImpl::close(TcpLink& link, const core::Status& cause, bool reset) {
  if (link.state == TcpLink::LinkState::kClosed) return;
  if (link.state == TcpLink::LinkState::kGreeting) std::erase(greeting_, &link);
  if (link.state == TcpLink::LinkState::kWaiting) std::erase(waiting_, &link);
  link.state = TcpLink::LinkState::kClosed;
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
  // Not left to close(): a child on its way to exec may hold a copy of the socket. The epoll set would then keep a
  // pointer to the freed link.
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
  endpoint.state_ = friendly ? TcpEndpoint::EndpointState::kDraining : TcpEndpoint::EndpointState::kDoomed;
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
  using EndpointState = TcpEndpoint::EndpointState;
  TcpLink* const out = endpoint.out_;
  const bool late = endpoint.close_deadline_.has_passed(now);
  if (endpoint.state_ == EndpointState::kDraining && out != nullptr && !late) {
    if (!out->queue.empty()) return true;
    if (out->state == TcpLink::LinkState::kOpen) {
      (void)::shutdown(out->socket.get(), SHUT_WR);
      endpoint.state_ = EndpointState::kFlushing;
    }
  }
  if (endpoint.state_ == EndpointState::kFlushing && out != nullptr && !late) {
    int unacknowledged = 0;
    if (::ioctl(out->socket.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0) return true;
  }
  if (endpoint.state_ == EndpointState::kEnding && !endpoint.links_.empty() && !late) return true;
  if (endpoint.state_ == EndpointState::kGone) return false;
  const bool forced = endpoint.state_ == EndpointState::kDoomed || endpoint.state_ == EndpointState::kEnding;
  endpoint.state_ = EndpointState::kGone;
  while (!endpoint.links_.empty()) close(*endpoint.links_.back(), endpoint.cause_, forced);
  return false;
}

}  // namespace hybridps::transport
