#include "hybridps/transport/threaded.h"

#include <time.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/log.h"
#include "hybridps/core/mailbox.h"
#include "hybridps/core/sleeper.h"
#include "hybridps/core/text.h"

namespace hybridps::transport {
namespace {

constexpr core::Duration kLook = std::chrono::milliseconds(20);  // rounds are timed for this long after a bulk round
constexpr std::uint64_t kSmallBytes = 4096;                      // after a round that moved less, answers leave at once

core::Duration own_cpu_time() noexcept {
  timespec time{};
  (void)clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
  return std::chrono::seconds(time.tv_sec) + std::chrono::nanoseconds(time.tv_nsec);
}

class ThreadedTransport final : public Transport, private Receiver, private Driven {
 public:
  ThreadedTransport(std::unique_ptr<Transport> inner, std::shared_ptr<TransportThread> thread,
                    std::shared_ptr<Handover> handover)
      : name_(inner->name()),
        address_(inner->address()),
        thread_(std::move(thread)),
        handover_(std::move(handover)),
        inner_(std::move(inner)) {}

  core::Status start() {
    if (inner_->event_fd() < 0)
      return {core::Code::kInvalidArgument, name_ + " is polled: a thread cannot wait for it"};
    const bool has_set = !handover_ || (outer_.open() && event_.open() && outer_.watch(event_.get()) &&
                                        outer_.watch(inner_->event_fd()));
    if (!has_set || !event_.open())
      return {core::Code::kOutOfResources, "no descriptors for " + name_ + "; raise `ulimit -n`"};
    inner_->set_receiver(this);
    if (handover_) return core::Status::ok();
    core::Status status = thread_->add(*this);
    is_driven_ = status.is_ok();
    return status;
  }

  ~ThreadedTransport() override {
    if (in_child()) {
      for (auto& send : sends_) (void)send.release();           // NOLINT: their `done`s are the parent's
      for (auto& arrival : arrivals_) (void)arrival.release();  // NOLINT: so are these payloads
      (void)loans_.release();                               // NOLINT: the rest is in use by a thread that is not here
      (void)inner_.release();                               // NOLINT
      (void)new std::shared_ptr<TransportThread>(thread_);  // NOLINT
      return;
    }
    const core::Status closed = ended_error();
    for (auto& [peer, endpoint] : endpoints_)
      if (endpoint->cause_.is_ok()) endpoint->cause_ = closed;
    receiver_ = nullptr;
    if (is_driven_) thread_->remove(*this);
    handover_.reset();
    is_driven_ = true;  // no thread drives any more, but the queues below are still used
    is_ended_ = true;
    // This thread owns everything now. Accepted messages still leave. Payloads go back before their transport goes.
    inner_->set_receiver(nullptr);
    flush();
    run_commands();
    publish();
    events_.change([](const std::vector<Notice>& events) {
      for (const Notice& event : events)
        if (event.arrival != nullptr) event.arrival->payload.reset();
    });
    inner_.reset();
    publish();
    (void)progress();
  }

  std::string_view name() const noexcept override { return name_; }
  std::vector<std::byte> address() const override { return address_; }

  core::Status attach(std::span<std::byte> pool_memory) override {
    if (in_child()) return child_error();
    if (is_ended_) return ended_error();
    core::Status status;
    there([&] { status = inner_->attach(pool_memory); });
    if (status.is_ok()) attached_.push_back(pool_memory);
    return status;
  }

  core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    if (in_child()) return child_error();
    if (is_ended_) return ended_error();
    if (const auto found = endpoints_.find(peer); found != endpoints_.end()) {
      if (!found->second->cause_.is_ok()) return found->second->cause_;
      return static_cast<Endpoint*>(found->second.get());
    }
    core::Result<Endpoint*> opened = child_error();
    there([&] { opened = inner_->connect(peer, address); });
    if (!opened.is_ok()) return opened.status();
    auto endpoint = std::make_unique<ThreadedEndpoint>(*this, *opened.value(), peer);
    Endpoint* result = endpoint.get();
    endpoints_.emplace(peer, std::move(endpoint));
    return result;
  }

  void introduce(core::EngineId peer, std::span<const std::byte> address) override {
    if (!in_child() && !is_ended_) there([&] { inner_->introduce(peer, address); });
  }
  core::EngineId name_of(core::EngineId from) override {
    core::EngineId name = from;
    if (!in_child() && !is_ended_) there([&] { name = inner_->name_of(from); });
    return name;
  }
  void cut(core::EngineId from, const core::Status& cause) override {
    if (!in_child() && !is_ended_) there([&] { inner_->cut(from, cause); });
  }

  Endpoint* find(core::EngineId peer) noexcept override {
    const auto found = endpoints_.find(peer);
    return found != endpoints_.end() && found->second->cause_.is_ok() ? found->second.get() : nullptr;
  }

  Way way(core::EngineId peer, std::span<const std::byte> address) noexcept override {
    if (in_child() || is_ended_) return Way::kNone;
    if (const auto found = endpoints_.find(peer); found != endpoints_.end() && !found->second->cause_.is_ok())
      return Way::kNone;
    Way way = Way::kNone;
    there([&] { way = inner_->way(peer, address); });
    return way;
  }

  std::size_t progress() override {
    if (in_child()) return 0;
    flush();
    if (!is_driven_) return progress_here();
    if (armed_.load(std::memory_order_relaxed)) armed_.store(false);
    const std::size_t did = hand_out();
    flush();
    const std::uint64_t moved = moved_bytes();
    if (handover_ && moved != counted_bytes_ &&
        handover_->moved_there(core::Clock::now(), moved - std::exchange(counted_bytes_, moved)))
      return_to_engine();
    return did;
  }

  int event_fd() const noexcept override { return outer_.get() >= 0 ? outer_.get() : event_.get(); }
  bool arm() override {
    if (in_child()) return true;
    flush();
    if (!is_driven_) return batch_.empty() && !events_.has_some() && !commands_.has_some() && inner_->arm();
    event_.drain();
    armed_.store(true);
    if (!events_.has_some()) return true;
    armed_.store(false);
    return false;
  }
  void send_now() noexcept override {
    if (in_child() || is_ended_) return;
    if (!is_driven_) {
      move_here(is_looking_, [&] { inner_->send_now(); });
    } else if (carried_.load(std::memory_order_acquire) != posted_) {
      const auto answer = thread_->try_call([this] {
        run_commands();
        inner_->send_now();
        carried_.store(taken_, std::memory_order_release);
        publish();
      });
      if (answer == TransportThread::CallResult::kLate)
        core::log_warn("the thread ", thread_->options().name, " (", name_, ") has not run for ",
                       core::format_seconds(core::to_seconds(thread_->options().patience)),
                       ". Is a core free for the thread? The last messages of an operation leave when the thread runs "
                       "again. If this process ends before, the messages are lost, and other ranks wait for them");
    }
  }
  /// A driving thread sends messages by itself. Payloads to give back count too: a peer may wait for their return.
  bool has_unsent() const noexcept override { return !given_back_.empty() || (!is_driven_ && inner_->has_unsent()); }
  std::vector<PathInfo> paths() const override {
    std::vector<PathInfo> paths;
    if (!in_child() && !is_ended_) there([&] { paths = inner_->paths(); });
    return paths;
  }
  void set_receiver(Receiver* receiver) noexcept override { receiver_ = receiver; }
  TransportStats stats() const noexcept override {
    TransportStats stats = stats_;
    for (const auto& [peer, endpoint] : endpoints_) stats.endpoints_open += endpoint->cause_.is_ok() ? 1 : 0;
    return stats;
  }

  // For the endpoints
  class ThreadedEndpoint final : public Endpoint {
   public:
    ThreadedEndpoint(ThreadedTransport& transport, Endpoint& inner, core::EngineId peer)
        : transport_(transport), inner_(inner), peer_(peer) {}

    core::Status send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                      SendDone done) override {
      return transport_.send(*this, header, payload, payload_bytes, std::move(done));
    }
    core::EngineId peer() const noexcept override { return peer_; }
    void close(core::Status cause) noexcept override { transport_.close(*this, std::move(cause)); }

    ThreadedTransport& transport_;
    Endpoint& inner_;  // used only by the side that drives the inner transport
    const core::EngineId peer_;
    core::Status cause_;  // cause of the first failure or close
  };

  core::Status send(const ThreadedEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                    std::size_t payload_bytes, SendDone done) {
    if (in_child()) return child_error();
    if (!endpoint.cause_.is_ok()) return endpoint.cause_;
    if (header.empty() || header.size() > kHeaderBytesMax)
      return {core::Code::kInvalidArgument, "a header of " + std::to_string(header.size()) + " bytes"};
    if (payload_bytes > 0) {
      if (!payload || payload_bytes > payload.capacity_bytes())
        return {core::Code::kInvalidArgument, "more payload than its buffer holds"};
      if (!is_attached({payload.data(), payload_bytes}))
        return {core::Code::kInvalidArgument, "the payload's memory was not attached to this transport"};
    }
    Send& send = acquire_send();
    send.endpoint = &endpoint;
    send.header_bytes = header.size();
    std::memcpy(send.header.data(), header.data(), header.size());
    send.data = payload_bytes > 0 ? std::span(payload.data(), payload_bytes) : std::span<std::byte>();
    send.is_awaited = payload_bytes > 0 || done;
    if (payload_bytes > 0) send.payload = payload;
    send.done = std::move(done);
    ++stats_.tx_messages;
    stats_.tx_header_bytes += header.size();
    stats_.tx_payload_bytes += payload_bytes;
    if (is_driven_)
      post({.send = &send});
    else
      transmit(send);
    return core::Status::ok();
  }

  void close(ThreadedEndpoint& endpoint, core::Status cause) {
    if (in_child() || !endpoint.cause_.is_ok()) return;
    endpoint.cause_ = cause.is_ok() ? core::Status(core::Code::kClosed, "the endpoint was closed") : std::move(cause);
    if (is_driven_)
      post({.close = &endpoint.inner_, .cause = endpoint.cause_});
    else
      endpoint.inner_.close(endpoint.cause_);
  }

 private:
  /// One outgoing message. The engine's side makes and frees it.
  struct Send {
    Buffer payload;  // used on the engine's side only, like `done`
    SendDone done;
    const ThreadedEndpoint* endpoint = nullptr;
    std::span<std::byte> data;
    std::size_t header_bytes = 0;
    bool is_awaited = false;  // there is a payload or a `done`, so the end must be reported
    core::Status status;      // result of the send
    std::array<std::byte, kHeaderBytesMax> header;
  };
  /// One received message. The thread makes and frees it.
  struct Incoming {
    core::EngineId from;
    RxPayload payload;
    std::size_t header_bytes = 0;
    std::array<std::byte, kHeaderBytesMax> header;
  };
  /// Exactly one of the three pointers is set.
  struct Command {
    Send* send = nullptr;
    Incoming* given_back = nullptr;
    Endpoint* close = nullptr;
    core::Status cause{};  // cause of the close
  };
  /// A finished send, an arrived message or, if both pointers are null, the failure of a peer.
  struct Notice {
    Send* send = nullptr;
    Incoming* arrival = nullptr;
    core::EngineId failed;
    core::Status cause;
  };

  bool in_child() const noexcept { return core::fork_generation() != generation_; }
  static core::Status ended_error() { return {core::Code::kClosed, "the transport was destroyed"}; }
  core::Status child_error() const { return {core::Code::kClosed, name_ + " belongs to the parent process"}; }
  bool is_attached(std::span<const std::byte> bytes) const noexcept {
    return std::any_of(attached_.begin(), attached_.end(), [&](const auto& memory) {
      return bytes.data() >= memory.data() && bytes.data() + bytes.size() <= memory.data() + memory.size();
    });
  }

  // The engine's side

  /// Runs `function` while no other thread drives the inner transport.
  void there(const std::function<void()>& function) const {
    if (is_driven_)
      thread_->call(function);
    else
      function();
  }

  std::uint64_t moved_bytes() const noexcept { return stats_.tx_payload_bytes + stats_.rx_payload_bytes; }

  /// Runs `work` in the engine's thread. If `looks`, adds the CPU time to spent_.
  template <typename Work>
  void move_here(bool looks, const Work& work) {
    const core::Duration before = looks ? own_cpu_time() : core::Duration::zero();
    work();
    if (looks) spent_ += own_cpu_time() - before;
  }

  /// Runs a round of the inner transport in the engine's thread and hands out its events. CPU time is measured only for
  /// a while after a bulk round. Rounds in which nothing moves are not worth the two system calls.
  std::size_t progress_here() {
    const std::uint64_t before = moved_bytes();
    std::size_t did = 0;
    move_here(is_looking_, [&] { did = round(); });
    did += hand_out();
    flush();
    if (did > 0 && moved_bytes() - before < kSmallBytes) send_now();
    if (handover_) look();
    return did;
  }

  void look() {
    const std::uint64_t moved = moved_bytes();
    const bool is_bulk = moved - std::exchange(seen_bytes_, moved) >= handover_->options().bulk_bytes;
    if (!is_bulk && !is_looking_) return;
    const core::TimePoint now = core::Clock::now();
    if (is_bulk) look_until_ = now + kLook;
    if (!std::exchange(is_looking_, now < look_until_)) {
      counted_bytes_ = moved;
      spent_ = {};
      return;
    }
    if (handover_->moved_here(now, std::exchange(spent_, {}), moved - std::exchange(counted_bytes_, moved)))
      hand_over();
  }

  void hand_over() {
    publish();
    inner_->send_now();  // no queued command would send the messages that inner_ still holds back
    is_looking_ = false;
    const core::Status status = thread_->add(*this);
    if (!status.is_ok()) {
      core::log_warn(name_, " has no thread of its own: ", status.message(),
                     ". The thread that sums also moves the data, and is busy");
      handover_.reset();
      return;
    }
    is_driven_ = true;
    outer_.unwatch(inner_->event_fd());
    core::log_debug(name_, " is driven by a thread of its own from now on: a byte takes ",
                    core::format_double(handover_->seconds_per_byte() * 1e9), " ns");
  }

  void return_to_engine() {
    if (!outer_.watch(inner_->event_fd())) return;  // no memory now; tried again when the Handover asks again
    thread_->remove(*this);
    is_driven_ = false;
    run_commands();  // commands posted during the thread's last round
    carried_.store(posted_ = taken_, std::memory_order_relaxed);
    event_.drain();  // the next round sees all that event_ signals
    seen_bytes_ = counted_bytes_;
    core::log_debug(name_, " is driven by the thread that sums again");
  }

  std::size_t hand_out() {
    if (!events_.has_some()) return 0;
    std::vector<Notice>& taken = events_.take();
    for (Notice& event : taken) {
      if (event.send != nullptr)
        finish(*event.send);
      else if (event.arrival != nullptr)
        deliver(*event.arrival);
      else
        fail(event.failed, std::move(event.cause));
    }
    const std::size_t did = taken.size();
    taken.clear();
    return did;
  }

  Send& acquire_send() {
    if (free_sends_.empty()) events_.change([&](auto&) { free_sends_.swap(ended_); });
    if (free_sends_.empty()) {
      sends_.push_back(std::make_unique<Send>());
      return *sends_.back();
    }
    Send& send = *free_sends_.back();
    free_sends_.pop_back();
    return send;
  }

  void post(Command command) {
    commands_.put(std::move(command));
    ++posted_;
    thread_->wake();
  }

  /// Returns all released payloads in one batch, so that the thread need not hear of each.
  void flush() {
    if (given_back_.empty()) return;
    if (!is_driven_) {
      for (Incoming* arrival : given_back_) take_back(*arrival);
      given_back_.clear();
      return;
    }
    bool is_awaited = false;
    commands_.change([&](std::vector<Command>& commands) {
      for (Incoming* arrival : given_back_) {
        is_awaited = is_awaited || arrival->payload.bytes() > 0;
        commands.emplace_back().given_back = arrival;
      }
    });
    given_back_.clear();
    if (is_awaited) thread_->wake();
  }

  void finish(Send& send) {
    send.payload = Buffer();  // first, so that `done` may use the slot
    SendDone done = std::move(send.done);
    core::Status status = std::move(send.status);
    // A failed send ends with the endpoint's first cause. After a close() here, the thread may have seen the peer's
    // reaction before the close command.
    if (!status.is_ok() && !send.endpoint->cause_.is_ok()) status = send.endpoint->cause_;
    free_sends_.push_back(&send);
    done(std::move(status));
  }

  void deliver(Incoming& arrival) {
    const std::size_t bytes = arrival.payload.bytes();
    if (receiver_ != nullptr) {
      ++stats_.rx_messages;
      stats_.rx_header_bytes += arrival.header_bytes;
      stats_.rx_payload_bytes += bytes;
      receiver_->on_message(
          arrival.from, {arrival.header.data(), arrival.header_bytes},
          bytes > 0 ? RxPayload(arrival.payload.data(), bytes, &give_back, this, &arrival) : RxPayload());
      if (bytes > 0) return;
    }
    given_back_.push_back(&arrival);
  }

  static void give_back(void* transport, void* arrival, std::uint64_t) noexcept {
    auto& self = *static_cast<ThreadedTransport*>(transport);
    if (self.in_child()) return;
    if (self.is_driven_)
      self.given_back_.push_back(static_cast<Incoming*>(arrival));
    else
      self.take_back(*static_cast<Incoming*>(arrival));
  }

  void fail(core::EngineId peer, core::Status cause) {
    const auto found = endpoints_.find(peer);
    if (found == endpoints_.end() || !found->second->cause_.is_ok()) return;  // already closed on this side
    found->second->cause_ = cause;
    if (receiver_ != nullptr) receiver_->on_peer_failed(peer, std::move(cause));
  }

  // The thread's side. A caller may run it between two rounds.

  std::size_t round() override {
    std::size_t did = run_commands();
    did += inner_->progress();
    if (carried_.load(std::memory_order_relaxed) != taken_) carried_.store(taken_, std::memory_order_release);
    publish();
    return did;
  }
  bool arm_inner() override { return !commands_.has_some() && inner_->arm(); }
  int inner_fd() const noexcept override { return inner_->event_fd(); }

  std::size_t run_commands() {
    if (!commands_.has_some()) return 0;
    std::vector<Command>& taken = commands_.take();
    for (Command& command : taken) {
      taken_ += command.given_back == nullptr ? 1 : 0;
      if (command.send != nullptr) {
        transmit(*command.send);
      } else if (command.given_back != nullptr) {
        take_back(*command.given_back);
      } else {
        command.close->close(std::move(command.cause));
      }
    }
    const std::size_t did = taken.size();
    taken.clear();
    return did;
  }

  void take_back(Incoming& arrival) {
    arrival.payload.reset();
    free_arrivals_.push_back(&arrival);
  }

  void transmit(Send& send) {
    SendDone done;
    if (send.is_awaited) done = [this, &send](core::Status status) { end(send, std::move(status)); };
    core::Status status = send.endpoint->inner_.send(
        {send.header.data(), send.header_bytes},
        send.data.empty() ? Buffer() : loans_->lend(send.data.data(), send.data.size(), nullptr), send.data.size(),
        std::move(done));
    // send() has returned kOk to the engine, so `done` reports the refusal.
    if (!send.is_awaited || !status.is_ok()) end(send, std::move(status));
  }

  void end(Send& send, core::Status status) {
    if (!send.is_awaited) {
      ended_here_.push_back(&send);
      return;
    }
    send.status = std::move(status);
    batch_.emplace_back().send = &send;
  }

  void on_message(core::EngineId from, std::span<const std::byte> header, RxPayload payload) noexcept override {
    if (free_arrivals_.empty()) {
      arrivals_.push_back(std::make_unique<Incoming>());
      free_arrivals_.push_back(arrivals_.back().get());
    }
    Incoming& arrival = *free_arrivals_.back();
    free_arrivals_.pop_back();
    arrival.from = from;
    arrival.header_bytes = header.size();
    std::memcpy(arrival.header.data(), header.data(), header.size());
    arrival.payload = std::move(payload);
    batch_.emplace_back().arrival = &arrival;
  }

  void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
    Notice& event = batch_.emplace_back();
    event.failed = peer;
    event.cause = std::move(cause);
  }

  /// Called once per round: passes the events of the round to the engine's side.
  void publish() {
    if (batch_.empty() && ended_here_.empty()) return;
    const bool is_news = !batch_.empty();
    events_.change([&](std::vector<Notice>& events) {
      if (events.empty())
        events.swap(batch_);
      else
        std::move(batch_.begin(), batch_.end(), std::back_inserter(events));
      ended_.insert(ended_.end(), ended_here_.begin(), ended_here_.end());
    });
    batch_.clear();
    ended_here_.clear();
    if (is_news && armed_.load() && armed_.exchange(false)) event_.signal();
  }

  const std::string name_;
  const std::vector<std::byte> address_;
  const std::uint64_t generation_ = core::fork_generation();
  const std::shared_ptr<TransportThread> thread_;
  core::EventFd event_;
  // Only with a Handover: the engine sleeps on one descriptor, whichever thread drives. The set has event_ and, while
  // the engine's side drives, the inner transport's descriptor.
  core::FdSet outer_;
  bool is_driven_ = false;  // the thread drives; if false, the engine's side does the thread's part too
  bool is_ended_ = false;   // the destructor runs

  // The engine's side
  std::shared_ptr<Handover> handover_;
  bool is_looking_ = false;  // CPU time of rounds here is measured
  core::TimePoint look_until_{};
  core::Duration spent_{};           // CPU time since the last report to handover_
  std::uint64_t seen_bytes_ = 0;     // moved_bytes() at the last look()
  std::uint64_t counted_bytes_ = 0;  // moved_bytes() at the last report to handover_
  std::uint64_t posted_ = 0;         // sends and closes that were queued for the thread
  Receiver* receiver_ = nullptr;
  std::vector<std::span<std::byte>> attached_;
  std::unordered_map<core::EngineId, std::unique_ptr<ThreadedEndpoint>> endpoints_;
  std::vector<std::unique_ptr<Send>> sends_;
  std::vector<Send*> free_sends_;
  std::vector<Incoming*> given_back_;  // released payloads that the thread has not been told of
  TransportStats stats_;

  // Shared by the two sides
  core::Mailbox<Command> commands_;
  core::Mailbox<Notice> events_;
  std::vector<Send*> ended_;               // finished sends that nobody waits for; events_ guards them
  std::atomic<bool> armed_{false};         // the engine may sleep
  std::atomic<std::uint64_t> carried_{0};  // how many of posted_ are sent, as far as the network takes them

  // The thread's side
  std::unique_ptr<BufferPool> loans_ =
      std::make_unique<BufferPool>(std::span<std::byte>(), std::span<BufferPool::SizeClass>());
  std::vector<std::unique_ptr<Incoming>> arrivals_;
  std::vector<Incoming*> free_arrivals_;
  std::uint64_t taken_ = 0;  // how many of posted_ the thread has run
  std::vector<Notice> batch_;
  std::vector<Send*> ended_here_;
  std::unique_ptr<Transport> inner_;  // destroyed before loans_
};

}  // namespace

core::Result<std::unique_ptr<Transport>> make_threaded(std::unique_ptr<Transport> inner,
                                                       std::shared_ptr<TransportThread> thread,
                                                       std::shared_ptr<Handover> handover) {
  auto transport = std::make_unique<ThreadedTransport>(std::move(inner), std::move(thread), std::move(handover));
  if (core::Status status = transport->start(); !status.is_ok()) return status;
  return std::unique_ptr<Transport>(std::move(transport));
}

}  // namespace hybridps::transport
