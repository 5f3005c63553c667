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
#include <sys/timerfd.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fstream>
#include <string>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/transport/tcp/tcp_socket.h"
#include "hybridps/transport/tcp/tcp_transport_impl.h"

namespace hybridps::transport {
namespace {

constexpr std::size_t kGreetingsMax = 1024;
/// Connections that may be of anybody: without a greeting, and in TLS without a knock. A member's comes as soon as its
/// process runs.
constexpr std::size_t kStrangersMax = 64;
constexpr int kBacklog = 4096;
/// What the kernel's TLS keeps is in TCP's queue, or in the network, so long after the queue was found empty.
constexpr core::Duration kKernelMoment = core::from_seconds(0.03);
constexpr std::size_t kUnnamedMax = 256;
/// A peer that has cut so many TLS handshakes in a row does so for another reason than its descriptors.
constexpr int kCutsMax = 20;
/// Memory for payloads goes back after so long without use, twice as long at most.
constexpr core::Duration kTrimEvery = core::from_seconds(60);
constexpr core::Duration kLookAtRecordsEvery = core::from_seconds(1);
/// After one of several sessions with a peer has ended, another may still deliver for this long.
constexpr core::Duration kEndWithin = core::from_seconds(0.25);
/// What has come is told so long after it at the latest.
constexpr core::Duration kTellAfter = core::from_seconds(0.04);

core::Status no_congestion_control(const std::string& wanted, int error) {
  const auto listed = [](const char* name) {
    std::ifstream file(std::string("/proc/sys/net/ipv4/tcp_") + name + "_congestion_control");
    std::string text;
    std::getline(file, text);
    return text.empty() ? std::string("not known") : text;
  };
  const std::string why = error == EPERM ? "only root may choose it here; others may choose: " + listed("allowed") +
                                               " (net.ipv4.tcp_allowed_congestion_control)"
                                         : "this kernel has: " + listed("available") +
                                               "; a module may have to be "
                                               "loaded, as by `modprobe tcp_" +
                                               wanted + "`";
  return {core::Code::kInvalidArgument, "HYBRIDPS_TCP_CONGESTION=" + wanted + ": " + why};
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
  if (options_.authority) {
    auto made =
        options_.authority->make_identity(options_.kernel_tls ? tls::Encryptor::kKernel : tls::Encryptor::kOpenSsl);
    if (!made.is_ok()) return made.status();
    identity_ = std::move(made).value();
    address_.id = identity_->id();
    address_.has_tls = true;
    guard_.emplace(std::vector{tls::knock_key(address_.id)});
  }
  address_.has_checksums = options_.checksums && !address_.has_tls;
  {
    const core::ForkLock lock;
    poller_ = core::Descriptor(lock, ::epoll_create1(EPOLL_CLOEXEC));
    timer_ = core::Descriptor(lock, ::timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK));
  }
  if (!poller_ || !timer_) return socket_error("no epoll or timer for " + name_, errno);
  if (core::Status status = listen(); !status.is_ok()) return status;
  address_.socket.bytes = sizeof address_.socket.name;
  if (::getsockname(listener_.get(), reinterpret_cast<sockaddr*>(&address_.socket.name), &address_.socket.bytes) != 0)
    return socket_error("cannot ask where " + name_ + " listens", errno);
  epoll_event event{};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
  epoll_event time{};
  time.events = EPOLLIN;
  time.data.ptr = &timer_;
  if (::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, listener_.get(), &event) != 0 ||
      ::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, timer_.get(), &time) != 0)
    return socket_error("cannot watch a socket of " + name_, errno);
  rlimit limit{};
  greetings_max_ = kGreetingsMax;
  if (::getrlimit(RLIMIT_NOFILE, &limit) == 0)
    greetings_max_ = std::clamp<std::size_t>(limit.rlim_cur / 4, 1, greetings_max_);
  if (options_.greetings_max > 0) greetings_max_ = options_.greetings_max;
  strangers_max_ = std::min(greetings_max_, kStrangersMax);
  send_buffers_ = send_buffer_limits();
  keep_spare();
  rx_pool_ = std::make_unique<RxPool>(~std::size_t{0});
  core::log_info(name_, " listens on ", address_.socket.text());
  return core::Status::ok();
}

/// On a free port of the range. The processes of a machine begin at different places of it.
core::Status TcpTransportImpl::listen() {
  const std::size_t ports = std::size_t{options_.port_last} - options_.port_first + 1;
  const auto start = static_cast<std::size_t>(core::random_u64() % ports);
  for (std::size_t i = 0; i < ports; ++i) {
    const auto port = static_cast<std::uint16_t>(options_.port_first + (start + i) % ports);
    const SocketAddress here = *parse_address(options_.address, port);
    listener_ = make_socket(here.name.ss_family);
    if (!listener_) return socket_error("no socket for " + name_, errno);
    // What the kernel refuses here it would refuse on each connection, where nobody looks.
    if (const std::string& wanted = options_.congestion;
        !wanted.empty() && ::setsockopt(listener_.get(), IPPROTO_TCP, TCP_CONGESTION, wanted.data(),
                                        static_cast<socklen_t>(wanted.size())) != 0)
      return no_congestion_control(wanted, errno);
    set_options(listener_.get());  // the kernel answers a SYN with them
    const int on = 1;              // a port that a process left a moment ago is free
    if (port != 0) (void)::setsockopt(listener_.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
    if (::bind(listener_.get(), here.get(), here.bytes) == 0 && ::listen(listener_.get(), kBacklog) == 0)
      return core::Status::ok();
    if (errno != EADDRINUSE || port == 0)
      return socket_error("cannot listen on " + here.text() + " (" + name_ + ")", errno);
  }
  return {core::Code::kOutOfResources, "no port from " + std::to_string(options_.port_first) + " to " +
                                           std::to_string(options_.port_last) + " is free on " + options_.address +
                                           " (" + name_ + "); give HYBRIDPS_PORTS a larger range"};
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
  for (auto& link : links_) (void)link->channel.release();  // another thread may have used it at the fork
  for (auto* completions : {&completions_, &running_completions_})
    (void)new std::vector<TcpCompletion>(std::move(*completions));  // NOLINT
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
  if (to.value().has_tls != address_.has_tls)
    return core::Status(core::Code::kMismatch, to.value().has_tls
                                                   ? "it has HYBRIDPS_SECURITY=tls, and this process has not"
                                                   : "it has not HYBRIDPS_SECURITY=tls, and this process has");
  if (to.value().has_checksums != address_.has_checksums)
    return core::Status(core::Code::kMismatch, to.value().has_checksums
                                                   ? "it has HYBRIDPS_CHECKSUM=1, and this process has not"
                                                   : "it has not HYBRIDPS_CHECKSUM=1, and this process has");
  if (const core::Status* const damage = find_damage(to.value().id); damage != nullptr) return *damage;
  if (by_id_.count(to.value().id) > 0)
    return core::Status(core::Code::kInvalidArgument, "the address of another engine");
  // A session that the peer has begun serves both ways.
  const auto is_there = [&](const std::unique_ptr<TcpLink>& link) {
    return link->was_open && link->state != TcpLink::LinkState::kClosed && link->endpoint == nullptr &&
           link->peer == to.value().id;
  };
  const auto found = std::find_if(links_.begin(), links_.end(), is_there);
  TcpLink* out = found != links_.end() ? found->get() : nullptr;
  if (out == nullptr) {
    core::Result<TcpLink*> dialled = dial(to.value());
    if (!dialled.is_ok()) return dialled.status();
    out = dialled.value();
  }
  auto endpoint = std::make_unique<TcpEndpoint>(*this, peer, to.value());
  for (const auto& link : links_)
    if (link.get() == out || is_there(link)) adopt(*link, *endpoint);
  endpoint->out_ = out;
  by_id_.emplace(to.value().id, endpoint.get());
  Endpoint* const result = endpoint.get();
  endpoints_.emplace(peer, std::move(endpoint));
  return result;
}

void TcpTransportImpl::introduce(core::EngineId peer, std::span<const std::byte> address) {
  const core::Result<TcpAddress> of = decode_tcp_address(address);
  if (!of.is_ok()) return;  // connect() tells
  const TcpId theirs = of.value().id;
  if (!names_.emplace(theirs, peer).second) return;
  for (const auto& link : links_)
    if (link->peer == theirs && link->name.value != 0) renamed_.emplace(std::exchange(link->name, peer), peer);
  for (const auto& [id, name] : unnamed_)
    if (id == theirs) renamed_.emplace(name, peer);
  std::erase_if(unnamed_, [&](const auto& one) { return one.first == theirs; });
}

core::EngineId TcpTransportImpl::name_of(core::EngineId from) {
  const auto found = renamed_.find(from);
  return found == renamed_.end() ? from : found->second;
}

void TcpTransportImpl::cut(core::EngineId from, const core::Status& cause) {
  const core::EngineId name = name_of(from);
  for (const auto& link : links_)
    if (link->name == name) on_broken(*link, std::string(cause.message()));
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
    if (out != nullptr && out->state == TcpLink::LinkState::kOpen) return Way::kStands;
    return out != nullptr && out->is_lacking(core::Clock::now()) ? Way::kLacks : Way::kOpens;
  }
  const core::Result<TcpAddress> to = decode_tcp_address(address);
  if (!to.is_ok()) return Way::kNone;
  Way way = Way::kNone;
  for (const auto& link : links_)
    if (link->was_open && link->endpoint == nullptr && link->peer == to.value().id && way != Way::kStands)
      way = link->state == TcpLink::LinkState::kOpen     ? Way::kStands
            : link->state != TcpLink::LinkState::kClosed ? Way::kOpens
                                                         : way;
  return way;
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
  if (!unread_.empty()) did += read_unread();
  std::array<epoll_event, 64> events;
  const int count = ::epoll_wait(poller_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<std::size_t>(i)];
    if (event.data.ptr == &timer_)
      did += on_timer();
    else if (event.data.ptr == nullptr)
      did += accept_all();
    else
      did += on_event(*static_cast<TcpLink*>(event.data.ptr), event.events);
  }
  if (!accepts_ || !waiting_.empty() || !greeting_.empty()) {
    const core::TimePoint now = core::Clock::now();
    if (!accepts_ && now >= accepts_again_) accept_again();
    did += look_at_waiting(now);
    expire_greetings(now);
  }
  // Answers to small messages go at once. Answers to large messages wait for the next progress(), because the engine
  // may add more. Credit and the next chunk to the same peer are then one packet instead of two.
  if (!std::exchange(had_bulk_, false)) did += flush_all();
  did += run_completions();
  did += attend();
  if (std::exchange(has_closed_, false))
    std::erase_if(links_, [this](const auto& link) {
      if (link->state != TcpLink::LinkState::kClosed) return false;
      if (link->name.value != 0 && names_.count(link->peer) == 0) unnamed_.emplace_back(link->peer, link->name);
      if (unnamed_.size() > kUnnamedMax) unnamed_.pop_front();
      return true;
    });
  return did;
}

bool TcpTransportImpl::arm() {
  if (in_child()) return true;
  if (!listed_.empty() || !unread_.empty() || !completions_.empty() || !attention_.empty()) return false;
  if (greeting_.empty() && !identity_) return true;
  const core::TimePoint now = core::Clock::now();
  bool has_lost = false;
  if (identity_ && now >= looks_at_records_) {
    looks_at_records_ = now + kLookAtRecordsEvery;
    for (const auto& link : links_)
      if (link->state == TcpLink::LinkState::kOpen && link->channel && link->channel->waits_too_long(now)) {
        has_lost = true;
        on_lost(*link,
                "the connection (" + name_ + ") to " + link->to + " brought a part of a TLS record, and no rest of it",
                Loss::kOther);
      }
  }
  if (!greeting_.empty()) expire_greetings(now);
  return attention_.empty() && !has_lost;  // progress() must look at a lost connection's next attempt
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
  if ((events & EPOLLOUT) != 0) send_the_rest(link);
  if (link.socket && (events & ~std::uint32_t{EPOLLOUT}) != 0) did += read(link);
  return did;
}

/// Where much has come and nothing leaves, a frame of its own tells it, so that the peer lets go of what it keeps.
void TcpTransportImpl::tell_later() { tells_later_ = set_timer(kTellAfter); }

bool TcpTransportImpl::set_timer(core::Duration after) noexcept {
  itimerspec time{};
  time.it_value.tv_sec = after / core::from_seconds(1);
  time.it_value.tv_nsec = (after % core::from_seconds(1)).count();
  return ::timerfd_settime(timer_.get(), 0, &time, nullptr) == 0;
}

std::size_t TcpTransportImpl::on_timer() {
  std::uint64_t times = 0;
  (void)!::read(timer_.get(), &times, sizeof times);
  tells_later_ = false;
  const std::size_t told = tell_all();
  if (const core::TimePoint now = core::Clock::now(); now >= trims_at_) {
    if (trims_at_ != core::TimePoint{}) rx_pool_->trim();
    trims_at_ = now + kTrimEvery;
  }
  if (!tells_later_ && rx_pool_->bytes_mapped() > 0) (void)set_timer(kTrimEvery);
  return told;
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
      path.resumptions = link->resumptions;
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

/// Whether the two ends still want this session to go on.
bool TcpTransportImpl::may_resume(const TcpLink& link) const noexcept {
  if (link.said_farewell || link.state == TcpLink::LinkState::kGreeting) return false;
  if (link.endpoint == nullptr || link.endpoint->is_open()) return true;
  const bool is_leaving = link.endpoint->state_ == TcpEndpoint::EndpointState::kDraining ||
                          link.endpoint->state_ == TcpEndpoint::EndpointState::kFlushing;
  return is_leaving && (!link.queue.empty() || !link.kept.empty());
}

void TcpTransportImpl::break_off(TcpLink& link, const char* doing, int error) {
  const bool by_peer = error == 0 || error == EPIPE;
  const std::string_view reason = by_peer ? "its other end was closed"
                                  : error == EPROTO && link.channel && !link.channel->why().empty()
                                      ? std::string_view(link.channel->why())
                                      : std::strerror(error);
  std::string what = "the connection (" + name_ + ") to " + link.to + " " + doing + ": " + std::string(reason);
  const bool is_new = link.state == TcpLink::LinkState::kConnecting || link.state == TcpLink::LinkState::kGreeted;
  if (!link.was_open) link.was_reached |= by_peer || error == ECONNRESET;
  // Greetings and answers have passed, and of all that followed nothing.
  const bool is_stuck = error == ETIMEDOUT && link.state == TcpLink::LinkState::kOpen && link.resumptions > 0 &&
                        link.session.acknowledged() == link.acknowledged_before &&
                        link.session.sent() - link.session.acknowledged() > kSmallSegmentBytes;
  if (is_stuck) link.needs_small_packets = !link.needs_small_packets;
  if (is_stuck && link.needs_small_packets)
    core::log_warn("to ", link.to, " (", name_,
                   ") small packets arrive, and full ones do not: the MTU of a network on "
                   "the way is smaller than that of this host's card. Smaller packets are used from now on; lower the "
                   "card's MTU, or let ICMP \"fragmentation needed\" through");
  // A side that needs the descriptor cuts a handshake, and cannot say so: its words would be taken for TLS.
  const bool is_cut = link.state == TcpLink::LinkState::kGreeted && link.channel && !link.channel->is_open() &&
                      (by_peer || error == ECONNRESET) && link.cuts < kCutsMax;
  if (is_cut) ++link.cuts;
  // No later attempt helps: the process there has another token or authority, or this one has for it.
  const bool is_refused =
      is_new && !link.was_open && error == EPROTO && link.channel && link.channel->is_of_another_job();
  if (link.channel && link.channel->is_elsewhere())
    on_broken(link, std::string(kEndedWithoutClosing), /*ended=*/true);
  else if (is_refused)
    on_broken(link, std::move(what));
  else if (is_cut || (is_new && is_lack(error)))
    dial_later(link, kAgainAfter, /*lacks=*/true);
  else if (error == ECONNREFUSED && (link.was_reached || link.was_closed))
    on_broken(link, std::string(kEndedWithoutClosing), /*ended=*/true);  // it has listened, and its host still answers
  else if (may_resume(link))
    on_lost(link, std::move(what), by_peer ? Loss::kClosed : error == ECONNREFUSED ? Loss::kRefused : Loss::kOther);
  else
    on_broken(link, std::string(kEndedWithoutClosing), /*ended=*/true);
}

void TcpTransportImpl::on_farewell(TcpLink& link) {
  link.said_farewell = true;
  if (link.endpoint != nullptr)
    for (TcpLink* const one : link.endpoint->links_) one->said_farewell = true;
  // The peer lets go of what it keeps only once it is told.
  tell(link);
  (void)flush(link);
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
  if (!waiting_.empty()) std::erase(waiting_, &link);
  link.state = TcpLink::LinkState::kClosed;
  has_closed_ = true;
  if (std::exchange(link.is_listed, false)) std::erase(listed_, &link);
  if (std::exchange(link.is_unread, false)) std::erase(unread_, &link);
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
  link.channel.reset();
  link.socket.reset();
  if (RxSlot* const slot = std::exchange(link.slot, nullptr); slot != nullptr) rx_pool_->release(slot);
  unsent_ -= link.queue.size();
  for (std::deque<TcpSend*>* sends : {&link.kept, &link.queue}) {
    for (TcpSend* const send : *sends) recycle(*send, cause);
    sends->clear();
  }
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
  const bool leaves = endpoint.state_ == EndpointState::kDraining || endpoint.state_ == EndpointState::kFlushing;
  if (leaves && out != nullptr && !late) {
    if (out->state != TcpLink::LinkState::kOpen && (!out->queue.empty() || !out->kept.empty())) return true;
    if (out->state == TcpLink::LinkState::kOpen && !std::exchange(endpoint.has_said_farewell_, true))
      (void)queue_frame(*out, {FrameKind::kFarewell, 0, 0, 0});
    if (!out->queue.empty() || (out->channel && out->channel->has_unsent())) return true;
    int unacknowledged = 0;
    if (out->state == TcpLink::LinkState::kOpen) {
      // A kernel that encrypts keeps what finds no room in TCP's queue, and puts it there a moment after there is room.
      // A shutdown would drop these bytes.
      if (endpoint.state_ == EndpointState::kDraining && out->channel && out->channel->is_sent_by_kernel()) {
        if (::ioctl(out->socket.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0)
          endpoint.queue_empty_since_ = {};
        else if (endpoint.queue_empty_since_ == core::TimePoint{})
          endpoint.queue_empty_since_ = now;
        if (endpoint.queue_empty_since_ == core::TimePoint{} || now - endpoint.queue_empty_since_ < kKernelMoment)
          return true;
      }
      if (std::exchange(endpoint.state_, EndpointState::kFlushing) == EndpointState::kDraining)
        (void)::shutdown(out->socket.get(), SHUT_WR);
      if (::ioctl(out->socket.get(), SIOCOUTQ, &unacknowledged) == 0 && unacknowledged > 0) return true;
    }
  }
  if (endpoint.state_ == EndpointState::kEnding && !endpoint.links_.empty() && !late) return true;
  if (endpoint.state_ == EndpointState::kGone) return false;
  const bool forced = endpoint.state_ == EndpointState::kDoomed || endpoint.state_ == EndpointState::kEnding;
  endpoint.state_ = EndpointState::kGone;
  while (!endpoint.links_.empty()) close(*endpoint.links_.back(), endpoint.cause_, forced);
  return false;
}

}  // namespace hybridps::transport
