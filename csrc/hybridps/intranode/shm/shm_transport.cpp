#include "hybridps/intranode/shm/shm_transport.h"

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <ctime>
#include <optional>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/intranode/shm/shm_endpoint.h"

namespace hybridps::intranode::shm {
namespace {

using core::Code;
using core::Status;
using std::chrono::steady_clock;

constexpr auto kAcceptAgainAfter = std::chrono::milliseconds(100);

// epoll tags: EpollSource (32 bits) | index or serial (32 bits).
enum class EpollSource : std::uint32_t { kListener = 1, kWakeUp = 2, kTimer = 3, kStranger = 4, kEndpoint = 5 };
constexpr std::uint64_t tag_of(EpollSource source, std::uint32_t which = 0) noexcept {
  return (static_cast<std::uint64_t>(source) << 32) | which;
}

/// Errors of a sandbox: seccomp, systemd's RestrictAddressFamilies=, AppArmor.
bool is_forbidden(int error) noexcept { return error == EPERM || error == EACCES || error == EAFNOSUPPORT; }

Status system_error(const char* what, int error) {
  return {Code::kOutOfResources, std::string("shared memory transport: cannot make ") + what + ": " +
                                     std::strerror(error) + (error == EMFILE ? "; raise ulimit -n" : "")};
}

}  // namespace

core::Result<std::unique_ptr<ShmTransport>> ShmTransport::create(const ShmOptions& options) {
  if (options.self.value == 0 || options.peers_max == 0 || options.peers_max > 4096 ||
      !SlotLayout{options.ring_entries, options.release_entries}.is_valid()) {
    return Status(Code::kInvalidArgument,
                  "ShmOptions: self is an engine id, peers_max 1 to 4096, ring_entries and release_entries powers of "
                  "two from 2 to 65536");
  }
  std::unique_ptr<ShmTransport> made(new ShmTransport(options));
  if (Status started = made->start(); !started.is_ok()) return started;
  return made;
}

ShmTransport::ShmTransport(const ShmOptions& options)
    : options_(options), layout_{options.ring_entries, options.release_entries}, born_(core::fork_generation()) {}

Status ShmTransport::start() {
  socket_name_ = "hybridps-" + core::to_string(options_.self) + "-" + core::to_string(core::make_engine_id());
  const Nonce bits = draw_nonce();
  std::memcpy(secret_.data(), bits.data(), secret_.size());
  int error = 0;
  constexpr int kBacklog = 512;  // the kernel limits it to net.core.somaxconn
  listener_ = listen_on(socket_name_, kBacklog, error);
  if (!listener_ && is_forbidden(error))
    return {Code::kUnsupported, std::string("Unix sockets are forbidden here (AF_UNIX: ") + std::strerror(error) + ")"};
  if (!listener_) return system_error("a listening socket", error);
  auto control = Segment::create("sleep flag", sizeof(EngineControl));
  if (!control.is_ok()) return control.status();
  control_ = std::move(control).value();
  sleep_ = reinterpret_cast<EngineControl*>(control_->memory().data());
  if (options_.pool_bytes > 0) {
    auto pool = Segment::create("message pool", options_.pool_bytes);
    if (!pool.is_ok()) return pool.status();
    pool_ = std::move(pool).value();
    pool_->seal_against_writers();
  }

  const core::ForkLock lock;
  event_ = core::Descriptor(lock, ::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC));
  if (!event_) return system_error("an eventfd", errno);
  timer_ = core::Descriptor(lock, ::timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (!timer_) return system_error("a timer", errno);
  poller_ = core::Descriptor(lock, ::epoll_create1(EPOLL_CLOEXEC));
  if (!poller_) return system_error("an epoll descriptor", errno);
  watch(listener_.get(), EPOLLIN, tag_of(EpollSource::kListener));
  watch(event_.get(), EPOLLIN | EPOLLET, tag_of(EpollSource::kWakeUp));
  watch(timer_.get(), EPOLLIN, tag_of(EpollSource::kTimer));
  return Status::ok();
}

ShmTransport::~ShmTransport() {
  if (in_forked_child()) return;
  receiver_ = nullptr;
  for (auto& endpoint : endpoints_) {
    endpoint->end({Code::kClosed, "this engine closed its transport"}, true, false);
  }
  while (!completions_.empty()) run_completions();
}

std::span<std::byte> ShmTransport::pool_memory() const noexcept {
  return pool_ ? pool_->memory() : std::span<std::byte>();
}

Proof ShmTransport::proof(core::EngineId peer) const {
  const ShmEndpoint* const endpoint = look_up(peer);
  if (endpoint == nullptr) return {};
  switch (endpoint->state_) {
    case ShmEndpoint::ConnectionState::kOpen: return {ProofState::kProven, {}};
    case ShmEndpoint::ConnectionState::kEnded: return {ProofState::kFailed, endpoint->cause_};
    default: return {};
  }
}

Status ShmTransport::attach(std::span<std::byte> memory) {
  const std::span<std::byte> mine = pool_memory();
  if (memory.data() != mine.data() || memory.size() != mine.size() || mine.empty()) {
    return {Code::kInvalidArgument, "shared memory transport: only its own pool_memory() can be attached"};
  }
  attached_ = true;
  return Status::ok();
}

std::vector<std::byte> ShmTransport::address() const { return encode({options_.self, socket_name_, secret_}); }

core::Result<transport::Endpoint*> ShmTransport::connect(core::EngineId peer, std::span<const std::byte> address) {
  if (in_forked_child()) return Status(Code::kClosed, "a forked child cannot connect");
  const std::optional<ShmAddress> decoded = decode(address);
  if (!decoded || decoded->engine != peer || peer == options_.self) {
    return Status(Code::kInvalidArgument,
                  "not a shared memory address of engine " + core::to_string(peer) + " (other than this one)");
  }
  ShmEndpoint* endpoint = look_up(peer);
  if (endpoint != nullptr) {
    if (!endpoint->is_usable()) return endpoint->cause_;
    if (!std::exchange(endpoint->requested_, true)) ++stats_.endpoints_open;
    return static_cast<transport::Endpoint*>(endpoint);
  }
  auto slot = make_slot();
  if (!slot.is_ok()) return slot.status();
  endpoint = &add_endpoint(peer);
  endpoint->open_slot(std::move(slot).value());
  endpoint->requested_ = true;
  ++stats_.endpoints_open;
  endpoint->address_ = *decoded;
  endpoint->dial();
  return static_cast<transport::Endpoint*>(endpoint);
}

transport::Endpoint* ShmTransport::find(core::EngineId peer) noexcept {
  ShmEndpoint* const endpoint = look_up(peer);
  return endpoint != nullptr && endpoint->requested_ && endpoint->is_usable() ? endpoint : nullptr;
}

transport::TransportStats ShmTransport::stats() const noexcept { return stats_; }

// ---- Progress

std::size_t ShmTransport::progress() {
  if (in_forked_child()) return 0;
  std::size_t count = poll_is_due() ? poll() : 0;
  bool any_finished = false;
  for (std::size_t i = 0; i < live_.size(); ++i) {  // by index: callbacks may connect
    count += live_[i]->step();
    any_finished |= live_[i]->finished_;
  }
  if (any_finished) std::erase_if(live_, [](const ShmEndpoint* endpoint) { return endpoint->finished_; });
  count += run_completions();
  count += report_failures();
  return count;
}

bool ShmTransport::arm() {
  if (in_forked_child()) return false;
  if (!completions_.empty() || (receiver_ != nullptr && !failures_.empty())) return false;
  sleep_->sleeping.store(1, std::memory_order_seq_cst);
  for (ShmEndpoint* endpoint : live_) {
    if (!endpoint->has_work()) continue;
    sleep_->sleeping.store(0, std::memory_order_relaxed);
    return false;
  }
  armed_ = true;
  return true;
}

bool ShmTransport::has_unsent() const noexcept {
  return std::any_of(live_.begin(), live_.end(),
                     [](const ShmEndpoint* endpoint) { return !endpoint->nothing_queued(); });
}

bool ShmTransport::poll_is_due() noexcept {
  if (armed_) {
    armed_ = false;
    sleep_->sleeping.store(0, std::memory_order_relaxed);
    return true;
  }
  // A busy loop looks at the sockets once per tick of the coarse clock (1 to 10 ms). This clock costs no system call.
  constexpr std::uint32_t kCallsPerClock = 8;
  if (++calls_since_clock_ < kCallsPerClock) return false;
  calls_since_clock_ = 0;
  if (handshakes_ > 0) return true;
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * 1'000'000'000 + now.tv_nsec != tick_ns_;
}

std::size_t ShmTransport::poll() {
  constexpr int kEventsMax = 32;
  std::size_t count = 0;
  std::array<epoll_event, kEventsMax> events;
  int ready = 0;
  do {
    ++counters_.polls;
    ready = ::epoll_wait(poller_.get(), events.data(), kEventsMax, 0);
    for (int i = 0; i < ready; ++i) {
      const auto which = static_cast<std::uint32_t>(events[i].data.u64);
      switch (static_cast<EpollSource>(events[i].data.u64 >> 32)) {
        case EpollSource::kListener: accept_strangers(); break;
        case EpollSource::kWakeUp: continue;
        case EpollSource::kTimer: run_timers(); break;
        case EpollSource::kStranger: serve_stranger(which); break;
        case EpollSource::kEndpoint: endpoints_[which]->on_socket(); break;
      }
      ++count;
    }
  } while (ready == kEventsMax);
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  tick_ns_ = now.tv_sec * 1'000'000'000 + now.tv_nsec;
  return count;
}

std::size_t ShmTransport::run_completions() {
  if (completions_.empty()) return 0;
  completions_running_.swap(completions_);  // completions added by callbacks run next time
  const std::size_t count = completions_running_.size();
  for (ShmCompletion& completion : completions_running_) {
    completion.payload = {};
    completion.done(completion.status);
  }
  completions_running_.clear();
  return count;
}

std::size_t ShmTransport::report_failures() {
  if (receiver_ == nullptr || failures_.empty()) return 0;
  const std::vector<ShmEndpoint*> failures = std::exchange(failures_, {});
  for (ShmEndpoint* endpoint : failures) {
    if (receiver_ != nullptr) receiver_->on_peer_failed(endpoint->peer(), endpoint->cause_);
  }
  return failures.size();
}

transport::RxPayload ShmTransport::copy_inline(std::span<const std::byte> payload) {
  std::unique_ptr<InlinePayload> copy;
  if (inline_free_.empty()) {
    copy = std::make_unique_for_overwrite<InlinePayload>();
  } else {
    copy = std::move(inline_free_.back());
    inline_free_.pop_back();
  }
  std::memcpy(copy->bytes.data(), payload.data(), payload.size());
  InlinePayload* const lent = copy.release();
  return {lent->bytes.data(), payload.size(), &release_inline, this, lent};
}

void ShmTransport::release_inline(void* context, void* token, std::uint64_t /*extra*/) noexcept {
  static_cast<ShmTransport*>(context)->inline_free_.emplace_back(static_cast<InlinePayload*>(token));
}

// ---- Connections

std::uint64_t ShmTransport::endpoint_tag(std::uint32_t index) noexcept { return tag_of(EpollSource::kEndpoint, index); }

void ShmTransport::watch(int fd, std::uint32_t events, std::uint64_t tag) noexcept {
  epoll_event event{};
  event.events = events;
  event.data.u64 = tag;
  ::epoll_ctl(poller_.get(), EPOLL_CTL_ADD, fd, &event);
}

void ShmTransport::unwatch(int fd) noexcept { ::epoll_ctl(poller_.get(), EPOLL_CTL_DEL, fd, nullptr); }

ShmEndpoint& ShmTransport::add_endpoint(core::EngineId peer) {
  const auto index = static_cast<std::uint32_t>(endpoints_.size());
  ShmEndpoint& endpoint = *endpoints_.emplace_back(std::make_unique<ShmEndpoint>(*this, peer, index));
  live_.push_back(&endpoint);
  by_peer_.emplace(peer, &endpoint);
  ++handshakes_;
  return endpoint;
}

ShmEndpoint* ShmTransport::look_up(core::EngineId peer) const noexcept {
  const auto found = by_peer_.find(peer);
  return found == by_peer_.end() ? nullptr : found->second;
}

core::Result<std::unique_ptr<Segment>> ShmTransport::make_slot() const {
  if (slots_in_use_ >= options_.peers_max)
    return Status(Code::kOutOfResources, "this host has more than " + std::to_string(options_.peers_max) +
                                             " engines; raise LOCAL_WORLD_SIZE, which sets the limit");
  return Segment::create("message rings of a peer", layout_.slot_bytes());
}

void ShmTransport::accept_strangers() {
  constexpr int kAcceptsPerVisit = 64;
  for (int i = 0; i < kAcceptsPerVisit; ++i) {
    int error = 0;
    core::Descriptor socket = accept_from(listener_.get(), error);
    if (!socket) {
      if (error == EMFILE || error == ENFILE || error == ENOMEM || error == ENOBUFS) {
        unwatch(listener_.get());  // else the listener would wake us all the time
        accepting_ = false;
        set_timer();
      }
      return;
    }
    int pid = 0;
    if (!is_same_user(socket.get(), pid) || strangers_.size() >= std::max<std::size_t>(128, options_.peers_max)) {
      ++counters_.strangers_dropped;
      continue;
    }
    const std::uint32_t serial = strangers_seen_++;
    watch(socket.get(), EPOLLIN | EPOLLRDHUP, tag_of(EpollSource::kStranger, serial));
    strangers_.emplace(serial, Stranger{std::move(socket), steady_clock::now() + options_.hello_deadline});
    set_timer();
    serve_stranger(serial);  // the hello is usually there already
  }
}

void ShmTransport::serve_stranger(std::uint32_t serial) {
  const auto found = strangers_.find(serial);
  if (found == strangers_.end()) return;
  Packet hello;
  std::array<core::Descriptor, kDescriptorsMax> descriptors;
  const Received received = receive_packet(found->second.socket.get(), hello, descriptors);
  if (received == Received::kNothing) return;
  Stranger& stranger = found->second;
  const auto mac_by = [&](MeetingRole role) {
    return mac_of(secret_, role, stranger.nonces, {stranger.from.value, options_.self.value});
  };
  if (received == Received::kPacket && hello.kind == PacketKind::kMeet && hello.to == options_.self.value &&
      stranger.nonces[1] == Nonce{}) {
    stranger.nonces = {hello.nonce, draw_nonce()};
    stranger.from = core::EngineId{hello.from};
    Packet answer = make_packet(PacketKind::kMeet, options_.self, stranger.from);
    answer.nonce = stranger.nonces[1];
    answer.echo = hello.nonce;
    answer.mac = mac_by(MeetingRole::kListener);
    send_packet(stranger.socket.get(), answer);
    stranger.deadline = steady_clock::now() + options_.hello_deadline;  // once: a second meeting is no hello
    set_timer();
    return;
  }
  const bool is_known = stranger.nonces[1] != Nonce{} && hello.from == stranger.from.value &&
                        tls::is_equal(mac_by(MeetingRole::kDialler), hello.mac.data());
  core::Descriptor socket = std::move(found->second.socket);
  strangers_.erase(found);
  unwatch(socket.get());
  const core::EngineId from{hello.from};
  if (received != Received::kPacket || hello.kind != PacketKind::kHello || hello.to != options_.self.value ||
      from.value == 0 || from == options_.self || !is_known) {
    ++counters_.strangers_dropped;
    return;
  }
  using ConnectionState = ShmEndpoint::ConnectionState;
  ShmEndpoint* endpoint = look_up(from);
  if (endpoint == nullptr) {
    auto slot = make_slot();
    if (!slot.is_ok()) {
      static core::LogRate rate(core::from_seconds(60));
      if (rate.permit()) core::log_warn("a process of this host is refused: ", slot.status().message());
      send_packet(socket.get(), make_packet(PacketKind::kRefuse, options_.self, from));
      return;
    }
    endpoint = &add_endpoint(from);
    endpoint->open_slot(std::move(slot).value());
  } else if (endpoint->state_ == ConnectionState::kConnecting || endpoint->state_ == ConnectionState::kMeeting ||
             endpoint->state_ == ConnectionState::kHelloSent) {
    if (options_.self < from) {  // both connected: the smaller id's socket is used
      send_packet(socket.get(), make_packet(PacketKind::kYield, options_.self, from));
      return;
    }
  } else if (endpoint->state_ != ConnectionState::kYielded) {
    ++counters_.strangers_dropped;
    return;
  }
  endpoint->accept(std::move(socket), hello, descriptors);
}

void ShmTransport::run_timers() {
  std::uint64_t expirations = 0;
  static_cast<void>(!::read(timer_.get(), &expirations, sizeof expirations));
  const auto now = steady_clock::now();
  std::vector<std::uint32_t> late;
  for (const auto& [serial, stranger] : strangers_)
    if (now >= stranger.deadline) late.push_back(serial);
  for (const std::uint32_t serial : late) {
    serve_stranger(serial);  // this process may be what was late
    const auto stranger = strangers_.find(serial);
    if (stranger == strangers_.end()) continue;
    if (now < stranger->second.deadline) continue;  // it has just met us
    unwatch(stranger->second.socket.get());
    strangers_.erase(stranger);
    ++counters_.strangers_dropped;
  }
  for (std::size_t i = 0; i < live_.size(); ++i) live_[i]->retry(now);
  if (!accepting_) {
    accepting_ = true;
    watch(listener_.get(), EPOLLIN, tag_of(EpollSource::kListener));
  }
  set_timer();
}

void ShmTransport::set_timer() noexcept {
  auto next = steady_clock::time_point::max();
  for (const auto& [serial, stranger] : strangers_) next = std::min(next, stranger.deadline);
  for (const ShmEndpoint* endpoint : live_) {
    using ConnectionState = ShmEndpoint::ConnectionState;
    const bool waits =
        endpoint->state_ == ConnectionState::kConnecting || endpoint->state_ == ConnectionState::kYielded;
    if (waits) next = std::min(next, endpoint->deadline_);
  }
  const auto now = steady_clock::now();
  if (!accepting_) next = std::min(next, now + kAcceptAgainAfter);
  itimerspec when{};  // zero: off
  if (next != steady_clock::time_point::max()) {
    const auto wait_ns = std::max<std::int64_t>(1, std::chrono::nanoseconds(next - now).count());
    when.it_value.tv_sec = wait_ns / 1'000'000'000;
    when.it_value.tv_nsec = wait_ns % 1'000'000'000;
  }
  ::timerfd_settime(timer_.get(), 0, &when, nullptr);
}

}  // namespace hybridps::intranode::shm
