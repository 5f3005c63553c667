#include "hybridps/transport/loopback/loopback_transport.h"

#include <array>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/core/sleeper.h"

namespace hybridps::transport {
namespace {

constexpr std::array<char, 8> kAddressMagic = {'H', 'P', 'S', 'L', 'O', 'O', 'P', 1};
constexpr std::size_t kAddressBytes = kAddressMagic.size() + sizeof(std::uint64_t);

/// One message in transit. The Buffer stays with the sender, because its reference count is not atomic. `source` points
/// into the Buffer for as long as the sender waits for `done`.
struct LoopbackMessage {
  core::EngineId from;
  core::EngineId to;
  std::uint64_t id = 0;  // number that the sender gave the message
  std::vector<std::byte> header;
  const std::byte* source = nullptr;  // null once the sender has released the buffer
  std::unique_ptr<std::byte[]> copy;  // made at delivery, or when the sender leaves gracefully
  std::size_t payload_bytes = 0;
};

struct LoopbackEvent {
  enum class EventKind { kMessage, kReleased, kPeerGone };
  EventKind kind = EventKind::kMessage;
  std::shared_ptr<LoopbackMessage> message;  // kMessage
  std::uint64_t id = 0;                      // kReleased
  core::EngineId peer;                       // kPeerGone
  std::string reason;                        // kPeerGone
};

/// Events that other transports queued for one transport.
struct Inbox {
  void push(LoopbackEvent event) {
    events.push_back(std::move(event));
    readable.signal();
  }

  core::EventFd readable;  // opened by the first call of event_fd()
  std::vector<LoopbackEvent> events;
  bool gone = false;  // destroyed or killed
};

}  // namespace

struct LoopbackHub::HubState {
  mutable std::mutex mutex;
  std::unordered_map<core::EngineId, std::shared_ptr<Inbox>> inboxes;
  std::uint64_t payloads_changed_early = 0;
  std::uint64_t payloads_lent = 0;
  bool done_on_delivery = false;
  DeviceView device_view = nullptr;

  // Callers hold the mutex.
  Inbox* live_inbox(core::EngineId id) {
    const auto found = inboxes.find(id);
    return found == inboxes.end() || found->second->gone ? nullptr : found->second.get();
  }
  void announce_gone(core::EngineId gone, core::EngineId to, const std::string& reason) {
    if (Inbox* inbox = live_inbox(to)) {
      LoopbackEvent event;
      event.kind = LoopbackEvent::EventKind::kPeerGone;
      event.peer = gone;
      event.reason = reason;
      inbox->push(std::move(event));
    }
  }
  void announce_gone_to_all(core::EngineId gone, const std::string& reason) {
    for (const auto& [id, inbox] : inboxes)
      if (id != gone) announce_gone(gone, id, reason);
  }
};

namespace {

using HubState = LoopbackHub::HubState;

class LoopbackTransport;

class LoopbackEndpoint final : public Endpoint {
 public:
  LoopbackEndpoint(LoopbackTransport& transport, core::EngineId peer) : transport_(transport), peer_(peer) {}

  core::Status send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                    SendDone done) override;
  core::EngineId peer() const noexcept override { return peer_; }
  void close(core::Status cause) noexcept override;

  LoopbackTransport& transport_;
  const core::EngineId peer_;
  core::Status cause_;  // cause of the first failure or close
  bool open_ = true;
};

class LoopbackTransport final : public Transport {
 public:
  LoopbackTransport(std::shared_ptr<HubState> state, std::shared_ptr<Inbox> inbox, core::EngineId self)
      : state_(std::move(state)), inbox_(std::move(inbox)), self_(self) {}

  ~LoopbackTransport() override {
    receiver_ = nullptr;
    {
      const std::lock_guard lock(state_->mutex);
      if (!inbox_->gone) {
        inbox_->gone = true;
        state_->announce_gone_to_all(self_, "its transport was closed");
      }
      drop_inbox();
      for (auto& [id, pending] : pending_) let_go(*pending.message, /*keep_copy=*/true);
    }
    const core::Status closed(core::Code::kClosed, "the transport was destroyed");
    auto pending = std::move(pending_);
    for (auto& [id, entry] : pending) {
      entry.payload = Buffer();
      entry.done(closed);
    }
    auto finished = std::move(finished_);
    for (auto& entry : finished) {
      entry.payload = Buffer();
      entry.done(entry.status);
    }
  }

  std::string_view name() const noexcept override { return "loopback"; }

  core::Status attach(std::span<std::byte> pool_memory) override {
    attached_.push_back(pool_memory);
    return core::Status::ok();
  }
  core::Status attach_device(const DeviceMemory& memory) override {
    if (state_->device_view == nullptr) return Transport::attach_device(memory);
    devices_.push_back(memory.bytes);
    return core::Status::ok();
  }
  void detach_device(std::span<std::byte> memory) noexcept override {
    std::erase_if(devices_, [&](const auto& attached) { return attached.data() == memory.data(); });
  }

  std::vector<std::byte> address() const override {
    std::vector<std::byte> bytes(kAddressBytes);
    std::memcpy(bytes.data(), kAddressMagic.data(), kAddressMagic.size());
    std::memcpy(bytes.data() + kAddressMagic.size(), &self_.value, sizeof self_.value);
    return bytes;
  }

  core::Result<Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override {
    if (const auto found = endpoints_.find(peer); found != endpoints_.end()) {
      if (!found->second->open_) return found->second->cause_;
      return static_cast<Endpoint*>(found->second.get());
    }
    if (address.size() != kAddressBytes || std::memcmp(address.data(), kAddressMagic.data(), kAddressMagic.size()) != 0)
      return core::Status(core::Code::kInvalidArgument, "not a loopback address");
    core::EngineId named;
    std::memcpy(&named.value, address.data() + kAddressMagic.size(), sizeof named.value);
    if (named != peer)
      return core::Status(core::Code::kInvalidArgument, "the address is that of engine " + core::to_string(named) +
                                                            ", not of " + core::to_string(peer));
    {
      const std::lock_guard lock(state_->mutex);
      if (inbox_->gone) return core::Status(core::Code::kClosed, "this transport was killed");
      if (state_->live_inbox(peer) == nullptr)
        return core::Status(core::Code::kPeerDead, "engine " + core::to_string(peer) + " is not there");
    }
    auto endpoint = std::make_unique<LoopbackEndpoint>(*this, peer);
    Endpoint* result = endpoint.get();
    endpoints_.emplace(peer, std::move(endpoint));
    return result;
  }

  Endpoint* find(core::EngineId peer) noexcept override {
    const auto found = endpoints_.find(peer);
    return found != endpoints_.end() && found->second->open_ ? found->second.get() : nullptr;
  }

  std::size_t progress() override {
    std::size_t count = 0;
    // Handles only what is queued now. Otherwise handlers that answer each other would keep progress() here for ever.
    auto finished = std::move(finished_);
    finished_.clear();
    for (auto& entry : finished) {
      entry.payload = Buffer();
      entry.done(entry.status);
      ++count;
    }
    std::vector<LoopbackEvent> events;
    {
      const std::lock_guard lock(state_->mutex);
      if (inbox_->gone) return count;
      events.swap(inbox_->events);
    }
    for (LoopbackEvent& event : events) {
      ++count;
      switch (event.kind) {
        case LoopbackEvent::EventKind::kMessage: deliver(std::move(event.message)); break;
        case LoopbackEvent::EventKind::kReleased: finish(event.id, core::Status::ok()); break;
        case LoopbackEvent::EventKind::kPeerGone:
          if (const auto found = endpoints_.find(event.peer); found != endpoints_.end())
            fail(*found->second, core::Status(core::Code::kPeerDead,
                                              "engine " + core::to_string(event.peer) + " is gone: " + event.reason));
          break;
      }
    }
    return count;
  }

  int event_fd() const noexcept override {
    const std::lock_guard lock(state_->mutex);
    if (inbox_->readable.get() < 0 && inbox_->readable.open() && (!inbox_->events.empty() || !finished_.empty()))
      inbox_->readable.signal();
    return inbox_->readable.get();
  }

  bool arm() override {
    const std::lock_guard lock(state_->mutex);
    inbox_->readable.drain();
    if (!finished_.empty()) return false;
    return inbox_->events.empty() || inbox_->gone;
  }

  bool has_unsent() const noexcept override { return false; }
  void set_receiver(Receiver* receiver) noexcept override { receiver_ = receiver; }

  TransportStats stats() const noexcept override {
    TransportStats stats = stats_;
    for (const auto& [id, endpoint] : endpoints_) stats.endpoints_open += endpoint->open_ ? 1 : 0;
    return stats;
  }

  core::Status send(LoopbackEndpoint& endpoint, std::span<const std::byte> header, const Buffer& payload,
                    std::size_t payload_bytes, SendDone done) {
    if (!endpoint.open_) return endpoint.cause_;
    if (header.empty() || header.size() > kHeaderBytesMax)
      return core::Status(core::Code::kInvalidArgument, "a header of " + std::to_string(header.size()) + " bytes");
    bool from_device = false;
    if (payload_bytes > 0) {
      if (!payload || payload_bytes > payload.capacity_bytes())
        return core::Status(core::Code::kInvalidArgument, "more payload than its buffer holds");
      from_device = is_in(devices_, payload.data(), payload_bytes);
      if (!from_device && !is_in(attached_, payload.data(), payload_bytes))
        return core::Status(core::Code::kInvalidArgument, "the payload's memory was not attached to this transport");
    }
    auto message = std::make_shared<LoopbackMessage>();
    message->from = self_;
    message->to = endpoint.peer_;
    message->id = ++last_id_;
    message->header.assign(header.begin(), header.end());
    if (payload_bytes > 0) message->source = from_device ? state_->device_view(payload.data()) : payload.data();
    message->payload_bytes = payload_bytes;
    pending_.emplace(message->id, Pending{&endpoint, payload_bytes > 0 ? payload : Buffer(), std::move(done), message});
    ++stats_.tx_messages;
    stats_.tx_header_bytes += header.size();
    stats_.tx_payload_bytes += payload_bytes;
    if (from_device) stats_.tx_device_bytes += payload_bytes;
    const std::lock_guard lock(state_->mutex);
    // A peer that is gone takes no message. Its kPeerGone event is on the way here and fails this message.
    if (Inbox* inbox = inbox_->gone ? nullptr : state_->live_inbox(endpoint.peer_)) {
      LoopbackEvent event;
      event.message = std::move(message);
      inbox->push(std::move(event));
    }
    return core::Status::ok();
  }

  /// The other side sees a reset. After a graceful close, queued messages still arrive. After a verdict, queued
  /// messages with a payload do not.
  void close(LoopbackEndpoint& endpoint, const core::Status& cause) {
    if (!endpoint.open_) return;
    const bool graceful = cause.is_ok() || cause.code() == core::Code::kClosed;
    endpoint.open_ = false;
    endpoint.cause_ = cause.is_ok() ? core::Status(core::Code::kClosed, "the endpoint was closed") : cause;
    {
      const std::lock_guard lock(state_->mutex);
      state_->announce_gone(self_, endpoint.peer_, "it closed the connection");
    }
    let_go_of_all(endpoint, graceful);
  }

 private:
  struct Pending {
    LoopbackEndpoint* endpoint = nullptr;
    Buffer payload;
    SendDone done;
    std::shared_ptr<LoopbackMessage> message;
  };
  struct Finished {
    Buffer payload;
    SendDone done;
    core::Status status;
  };
  struct Loan {
    std::shared_ptr<HubState> state;
    std::shared_ptr<LoopbackMessage> message;
  };

  static bool is_in(const std::vector<std::span<std::byte>>& memories, const std::byte* data, std::size_t bytes) {
    for (const auto& memory : memories)
      if (data >= memory.data() && data + bytes <= memory.data() + memory.size()) return true;
    return false;
  }

  void deliver(std::shared_ptr<LoopbackMessage> message) {
    RxPayload payload;
    {
      const std::lock_guard lock(state_->mutex);
      if (message->payload_bytes > 0 && !message->copy) {
        if (message->source == nullptr) return;  // recalled by a close
        message->copy = std::make_unique<std::byte[]>(message->payload_bytes);
        std::memcpy(message->copy.get(), message->source, message->payload_bytes);
      }
      if (message->payload_bytes > 0) ++state_->payloads_lent;
      if (state_->done_on_delivery) message->source = nullptr;
    }
    if (state_->done_on_delivery) give_back(*state_, *message);
    ++stats_.rx_messages;
    stats_.rx_header_bytes += message->header.size();
    stats_.rx_payload_bytes += message->payload_bytes;
    const std::vector<std::byte> header = message->header;
    const core::EngineId from = message->from;
    if (message->payload_bytes == 0) {
      give_back(*state_, *message);
    } else {
      const std::byte* data = message->copy.get();
      const std::size_t bytes = message->payload_bytes;
      payload = RxPayload(data, bytes, &LoopbackTransport::release, new Loan{state_, std::move(message)}, nullptr);
    }
    if (receiver_ != nullptr) receiver_->on_message(from, header, std::move(payload));
  }

  static void release(void* context, void* /*token*/, std::uint64_t /*extra*/) noexcept {
    const std::unique_ptr<Loan> loan(static_cast<Loan*>(context));
    LoopbackMessage& message = *loan->message;
    {
      const std::lock_guard lock(loan->state->mutex);
      --loan->state->payloads_lent;
      if (message.source != nullptr && std::memcmp(message.source, message.copy.get(), message.payload_bytes) != 0)
        ++loan->state->payloads_changed_early;
      message.copy.reset();  // freed now, so that ASan catches a late reader
    }
    give_back(*loan->state, message);
  }

  static void give_back(HubState& state, const LoopbackMessage& message) {
    const std::lock_guard lock(state.mutex);
    if (Inbox* inbox = state.live_inbox(message.from)) {
      LoopbackEvent event;
      event.kind = LoopbackEvent::EventKind::kReleased;
      event.id = message.id;
      inbox->push(std::move(event));
    }
  }

  void finish(std::uint64_t id, const core::Status& status) {
    const auto found = pending_.find(id);
    if (found == pending_.end()) return;
    SendDone done = std::move(found->second.done);
    pending_.erase(found);  // gives the slot back first, so that done may use it
    done(status);
  }

  void fail(LoopbackEndpoint& endpoint, core::Status cause) {
    if (!endpoint.open_) return;
    endpoint.open_ = false;
    endpoint.cause_ = std::move(cause);
    let_go_of_all(endpoint, /*keep_copy=*/false);
    if (receiver_ != nullptr) receiver_->on_peer_failed(endpoint.peer_, endpoint.cause_);
  }

  void let_go_of_all(LoopbackEndpoint& endpoint, bool keep_copy) {
    const std::lock_guard lock(state_->mutex);
    for (auto entry = pending_.begin(); entry != pending_.end();) {
      if (entry->second.endpoint != &endpoint) {
        ++entry;
        continue;
      }
      let_go(*entry->second.message, keep_copy);
      finished_.push_back(Finished{std::move(entry->second.payload), std::move(entry->second.done), endpoint.cause_});
      entry = pending_.erase(entry);
    }
    if (!finished_.empty()) inbox_->readable.signal();
  }

  /// The caller holds the hub's mutex. Afterwards the message does not read the sender's buffer any more.
  static void let_go(LoopbackMessage& message, bool keep_copy) {
    if (message.source != nullptr && !message.copy && keep_copy) {
      message.copy = std::make_unique<std::byte[]>(message.payload_bytes);
      std::memcpy(message.copy.get(), message.source, message.payload_bytes);
    }
    message.source = nullptr;
  }

  void drop_inbox() { inbox_->events.clear(); }

  const std::shared_ptr<HubState> state_;
  const std::shared_ptr<Inbox> inbox_;
  const core::EngineId self_;
  Receiver* receiver_ = nullptr;
  std::vector<std::span<std::byte>> attached_;
  std::vector<std::span<std::byte>> devices_;
  std::unordered_map<core::EngineId, std::unique_ptr<LoopbackEndpoint>> endpoints_;
  std::map<std::uint64_t, Pending> pending_;  // in order of sending
  std::vector<Finished> finished_;
  std::uint64_t last_id_ = 0;
  TransportStats stats_;
};

core::Status LoopbackEndpoint::send(std::span<const std::byte> header, const Buffer& payload, std::size_t payload_bytes,
                                    SendDone done) {
  return transport_.send(*this, header, payload, payload_bytes, std::move(done));
}

void LoopbackEndpoint::close(core::Status cause) noexcept { transport_.close(*this, cause); }

}  // namespace

LoopbackHub::LoopbackHub(Done done, DeviceView view) : state_(std::make_shared<HubState>()) {
  state_->done_on_delivery = done == Done::kDelivered;
  state_->device_view = view;
}
LoopbackHub::~LoopbackHub() = default;

std::unique_ptr<Transport> LoopbackHub::make_transport(core::EngineId self) {
  auto inbox = std::make_shared<Inbox>();
  {
    const std::lock_guard lock(state_->mutex);
    state_->inboxes[self] = inbox;
  }
  return std::make_unique<LoopbackTransport>(state_, std::move(inbox), self);
}

void LoopbackHub::kill(core::EngineId victim) {
  const std::lock_guard lock(state_->mutex);
  Inbox* inbox = state_->live_inbox(victim);
  if (inbox == nullptr) return;
  inbox->gone = true;
  inbox->events.clear();
  for (auto& [id, other] : state_->inboxes)
    std::erase_if(other->events, [victim](const LoopbackEvent& event) {
      return event.kind == LoopbackEvent::EventKind::kMessage && event.message->from == victim;
    });
  state_->announce_gone_to_all(victim, "it was killed");
}

std::uint64_t LoopbackHub::payloads_changed_early() const {
  const std::lock_guard lock(state_->mutex);
  return state_->payloads_changed_early;
}

std::uint64_t LoopbackHub::payloads_lent() const {
  const std::lock_guard lock(state_->mutex);
  return state_->payloads_lent;
}

}  // namespace hybridps::transport
