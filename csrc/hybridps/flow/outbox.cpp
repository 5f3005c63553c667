#include "hybridps/flow/outbox.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>
#include <utility>

namespace hybridps::flow {

using namespace mark;

Outbox::Outbox(OutboxOptions options, transport::BufferPool& pool, Router& router)
    : options_(std::move(options)), pool_(pool), router_(router), net_in_use_(options_.class_bytes.size(), 0) {
  for (std::size_t kind = 0; kind < 2 * options_.class_bytes.size(); ++kind) starved_.emplace_back(&Stream::starved_);
  pool_.set_release_hook([this] { slot_released_ = true; });
}

Outbox::~Outbox() {
  *alive_ = false;
  pool_.set_release_hook({});
}

Outbox::PeerState& Outbox::state_of(core::EngineId peer) {
  std::unique_ptr<PeerState>& slot = peers_[peer];
  if (!slot) {
    slot = std::make_unique<PeerState>();
    slot->id = peer;
    const Peer info = router_.describe(peer);
    slot->local = info.local;
    slot->book = SendBook(info.eager_bytes, info.local, options_.granted_bytes_max);
    slot->due = ReturnBook(options_.credit_batch_bytes);
  }
  return *slot;
}

std::size_t Outbox::class_of(std::size_t bytes) const noexcept {
  for (std::size_t c = 0; c < options_.class_bytes.size(); ++c)
    if (bytes <= options_.class_bytes[c]) return c;
  return options_.class_bytes.size() - 1;
}

// A local peer holds a whole slot of ours. A peer across the network holds the bytes, or a small buffer of its own.
std::int64_t Outbox::cost_of(const PeerState& peer, const Stream& stream, std::uint32_t chunk) const noexcept {
  const std::size_t bytes = stream.source->wire_bytes_max(stream.bytes_of(chunk));
  return static_cast<std::int64_t>(peer.local ? options_.class_bytes[class_of(bytes)]
                                              : std::max(bytes, options_.class_bytes.front()));
}

void Outbox::set_window(core::EngineId peer, std::int64_t bytes, const schedule::WindowTuner::Rounds& rounds) {
  PeerState& to = state_of(peer);
  if (to.book.set_window(bytes, rounds)) resume(to);
  trace_window(to);
}

void Outbox::resume(PeerState& peer) {
  if (!std::exchange(peer.resumes, true)) resume_.push_back(peer.id);
}

void Outbox::note_window(core::EngineId peer, std::int64_t bytes) { state_of(peer).due.note_window(bytes); }

void Outbox::return_credit(core::EngineId peer) {
  PeerState& to = state_of(peer);
  if (to.due.due() > 0) send_credit(to, to.due, wire::Permit::kAllowance);
}

void Outbox::send_credit(PeerState& peer, ReturnBook& due, wire::Permit of) {
  if (!peer.broken) send(peer.id, {{}, 0, wire::Credit{static_cast<std::uint64_t>(due.take_due()), of}});
}

std::uint32_t Outbox::window_of(const PeerState& peer) noexcept {
  constexpr std::int64_t kMost = 0xffffffff;
  // Never 0, which means "unchanged": the peer would return credit in batches of a quarter of its whole allowance.
  return static_cast<std::uint32_t>(std::clamp<std::int64_t>(peer.book.window(), 1, kMost));
}

bool Outbox::pay(PeerState& peer, std::int64_t cost, bool urgent) noexcept {
  if (peer.book.pay(cost, urgent)) return true;
  if (!urgent && peer.book.wants_round()) peer.book.begin_round(core::Clock::now().time_since_epoch());
  return false;
}

void Outbox::prepare(Stream& stream) {
  if (stream.marks_.empty()) stream.marks_.resize(stream.chunks, 0);
}

core::Result<transport::Endpoint*> Outbox::open(PeerState& peer, bool urgent) {
  if (urgent && peer.urgent_endpoint == nullptr) {
    core::Result<transport::Endpoint*> endpoint = router_.connect_urgent(peer.id);
    if (endpoint.is_ok())
      peer.urgent_endpoint = endpoint.value();
    else if (endpoint.status().code() == core::Code::kOutOfResources)
      urgent = false;
    else
      return endpoint.status();
  }
  if (peer.endpoint == nullptr && (!urgent || peer.urgent_endpoint == nullptr)) {
    core::Result<transport::Endpoint*> endpoint = router_.connect(peer.id);
    if (!endpoint.is_ok()) return endpoint.status();
    peer.endpoint = endpoint.value();
  }
  if (urgent && peer.urgent_endpoint == nullptr) peer.urgent_endpoint = peer.endpoint;
  return urgent ? peer.urgent_endpoint : peer.endpoint;
}

core::Status Outbox::transmit(PeerState& peer, wire::Message message, const transport::Buffer& buffer,
                              transport::SendDone done, bool urgent) {
  const core::OneThread::Inside inside(one_thread_);
  if (peer.broken) return core::Status(core::Code::kPeerDead, "peer is gone");
  // Over a path of long delay much data waits in front of a message, and both sides run dry if permits wait too.
  const bool is_permit = message.as<wire::Credit>() != nullptr || message.as<wire::Grant>() != nullptr;
  const bool passes = (is_permit && peer.book.delays_permits()) ||
                      (urgent && (options_.urgent_always || naps_ || peer.book.has_backlog()));
  // The urgent connection may be unable to read a device's memory.
  const bool lent = buffer && buffer.is_lent();
  core::Result<transport::Endpoint*> endpoint = open(peer, passes && !lent);
  core::Status status = endpoint.status();
  message.from.source = options_.self;
  if (status.is_ok())
    status = endpoint.value()->send(wire::encode(message), buffer, message.payload_bytes, std::move(done));
  if (!status.is_ok()) {
    peer.broken = true;
    broken_.emplace_back(peer.id, status);
  }
  return status;
}

void Outbox::trace_window(PeerState& peer) {
  if (trace_ == nullptr || std::exchange(peer.traced_window, peer.book.window()) == peer.book.window()) return;
  const std::uint64_t now = trace_->recent();
  trace_->add({now, now, static_cast<std::uint64_t>(peer.book.window()), 0, 0, 0, 0, trace_->peer(peer.id),
               observe::EventType::kWindow, 0});
}

/// The callback that runs when the transport no longer needs a message.
struct Outbox::Sent {
  Outbox* outbox;
  std::shared_ptr<bool> alive;
  core::EngineId peer;
  std::size_t size_class;
  std::int64_t cost;
  bool holds_slot;   // a slot of the share between nodes
  bool holds_whole;  // bytes paid under an "all chunks" grant

  void operator()(const core::Status&) const {
    if (!*alive) return;
    if (holds_slot) {
      --outbox->net_in_use_[size_class];
      outbox->slot_released_ = true;
    } else if (holds_whole) {
      if (auto found = outbox->peers_.find(peer); found != outbox->peers_.end()) {
        found->second->book.unpay_whole(cost);
        outbox->resume(*found->second);
      }
    }
  }
};

/// `Sent` together with its trace event: one allocation for both.
struct Outbox::TracedSent {
  Sent sent;
  observe::Trace* trace;
  observe::Event event;

  void operator()(const core::Status& status) {
    // A trace that began later does not know the event's group and peer.
    if (*sent.alive && sent.outbox->trace_ == trace) {
      // Sends that complete together get the same time.
      event.end_ns = trace->recent() > event.start_ns ? trace->recent() : trace->read_clock();
      trace->add(event);
    }
    sent(status);
  }
};

transport::SendDone Outbox::when_sent(const PeerState& peer, const Stream& stream, std::uint32_t chunk,
                                      std::size_t bytes, Sent sent) {
  if (trace_ == nullptr) {
    if (!sent.holds_slot && !sent.holds_whole) return {};
    return sent;
  }
  return TracedSent{
      std::move(sent),
      trace_,
      {trace_->recent(), 0, bytes, stream.id.sequence, stream.id.span, chunk, trace_->group(stream.from.uid),
       trace_->peer(peer.id), observe::EventType::kSent, static_cast<std::uint8_t>(stream.id.stage)}};
}

Outbox::SendResult Outbox::send_chunk(PeerState& peer, Stream& stream, std::uint32_t chunk) {
  const std::size_t bytes = stream.bytes_of(chunk);
  std::uint8_t& marks = stream.marks_[chunk];
  wire::Data data{stream.id, stream.premul, wire::Permit::kGrant, 0, 0, wire::kNotPacked};
  data.chunk.number = chunk;
  const auto send = [&](const Payload& payload, transport::SendDone done) {
    return transmit(peer, {stream.from, static_cast<std::uint32_t>(payload.bytes), data, stream.priority},
                    payload.buffer, std::move(done), stream.urgent);
  };
  if (bytes == 0) {
    if (!send({}, when_sent(peer, stream, chunk, 0, {this, alive_, peer.id, 0, 0, false, false})).is_ok())
      return SendResult::kBroken;
    marks |= kSent;
    ++stream.sent_;
    return SendResult::kSent;
  }
  const std::size_t size_class = class_of(stream.source->wire_bytes_max(bytes));
  const std::int64_t cost = cost_of(peer, stream, chunk);
  bool by_all = false;
  if ((marks & kPermitted) == 0) {
    if (pay(peer, cost, stream.urgent)) {
      marks |= kByAllowance;
      ++stream.permits_;
    } else if (stream.granted_all_ && peer.book.pay_whole(cost)) {
      by_all = true;
    } else {
      return SendResult::kNoPermit;
    }
  }
  Payload payload;
  if (peer.local || net_in_use_[size_class] < options_.net_slots[size_class])
    payload = stream.source->payload(stream, chunk, bytes);
  if (!payload.buffer) {
    if (by_all) peer.book.unpay_whole(cost);
    return SendResult::kNoSlot;
  }
  data.packed = payload.packed;
  // What packing saves goes back to the account: permits count bytes on the wire.
  const std::int64_t saved =
      payload.packed == wire::kNotPacked
          ? 0
          : std::max<std::int64_t>(
                0, cost - static_cast<std::int64_t>(std::max(payload.bytes, options_.class_bytes.front())));
  if ((marks & kByAllowance) != 0)
    data.permit = wire::Permit::kAllowance;
  else if (by_all)
    data.permit = wire::Permit::kWholeGrant;
  // A local peer returns no credit for whole grants: `Sent` frees these bytes when the send is done.
  if ((marks & kByAllowance) != 0 || (by_all && !peer.local)) {
    data.cost = static_cast<std::uint32_t>(cost - saved);
    data.window = window_of(peer);
  }
  if (!peer.local) ++net_in_use_[size_class];
  const core::Status status = send(payload, when_sent(peer, stream, chunk, payload.bytes,
                                                      {this, alive_, peer.id, size_class, cost, !peer.local, by_all}));
  if (trace_ != nullptr) trace_->make_stale();  // shared memory and UCX may call the kernel
  if (!status.is_ok()) {
    // `done` was dropped without a run.
    if (!peer.local) {
      --net_in_use_[size_class];
      slot_released_ = true;
    }
    if (by_all) peer.book.unpay_whole(cost);
    return SendResult::kBroken;
  }
  measure_path(peer, stream, bytes, payload.bytes);
  if (saved > 0 && by_all) peer.book.unpay_whole(saved);
  if (saved > 0 && (marks & kByAllowance) != 0) peer.book.lower(saved);
  if (saved > 0 && !peer.bulk.turn.empty()) resume(peer);
  if ((marks & kPermitted) != 0) --stream.permits_;
  marks |= kSent;
  ++stream.sent_;
  return SendResult::kSent;
}

std::uint32_t Outbox::serve_wanted(PeerState& peer, Stream& stream, std::uint32_t chunks_max) {
  std::uint32_t paid = 0;
  while (!stream.wanted_.empty() && paid < chunks_max) {
    const std::uint32_t chunk = stream.wanted_.front();
    std::uint8_t& marks = stream.marks_[chunk];
    if ((marks & kWanted) == 0) {  // answered by a grant
      stream.wanted_.pop_front();
      continue;
    }
    if ((marks & (kSent | kPermitted)) == 0 && !stream.granted_all_) {
      if (stream.bytes_of(chunk) > 0 && !pay(peer, cost_of(peer, stream, chunk), stream.urgent)) break;
      ++paid;
      marks |= kByAllowance;
      ++stream.permits_;
      if ((marks & kOffered) != 0) stream.free_.push_back(chunk);
    }
    marks &= static_cast<std::uint8_t>(~kWanted);
    stream.wanted_.pop_front();
    if ((marks & kSent) == 0) stream.source->on_permitted(stream, chunk);
  }
  return paid;
}

void Outbox::wait(PeerState& peer, Stream& stream) {
  begin_wait(peer, stream);
  PeerState::Waiting& waiting = peer.of(stream);
  if (waiting.turn.empty()) waiting.since = core::Clock::now();
  waiting.turn.add(stream);
  if (stream.granted_all_) waiting.whole.add(stream);
  if (stream.announced_) return;
  waiting.unannounced.add(stream);
  if (!std::exchange(peer.announces, true)) announcing_.push_back(&peer);
}

void Outbox::stop_waiting(Stream& stream) noexcept {
  for (const auto hook : {&Stream::turn_, &Stream::whole_, &Stream::unannounced_, &Stream::starved_})
    StreamQueue::remove(stream, hook);
}

// The stream has a permit for the chunk that lacks a slot, or an "all chunks" grant. So it leaves the queues for
// permits, and holds up no stream there.
void Outbox::starve(const PeerState& peer, Stream& stream, std::uint32_t chunk) {
  const std::size_t bytes = stream.source->wire_bytes_max(stream.bytes_of(chunk));
  for (const auto hook : {&Stream::turn_, &Stream::whole_, &Stream::unannounced_}) StreamQueue::remove(stream, hook);
  starved_[class_of(bytes) + (peer.local ? options_.class_bytes.size() : 0)].add(stream);
}

// Callbacks from here may offer, want and cancel this stream and others, so no state is kept across a callback.
Outbox::Pumped Outbox::pump(Stream& stream, std::uint32_t chunks_max) {
  ++looks_;
  PeerState& peer = state_of(stream.peer);
  Pumped pumped;
  if (peer.broken) {
    stop_waiting(stream);
    return pumped;
  }
  pumped.chunks = serve_wanted(peer, stream, chunks_max);
  bool blocked = !stream.wanted_.empty();
  if (blocked && pumped.chunks >= chunks_max) {
    pumped.goes_on = true;
    return pumped;
  }
  for (;;) {
    // Chunks that hold a permit go first: the peer waits for them.
    const bool permitted = !stream.free_.empty();
    if (!permitted) {
      while (!stream.ready_.empty() && (stream.marks_[stream.ready_.front()] & (kPermitted | kSent)) != 0)
        stream.ready_.pop_front();
      if (blocked || stream.ready_.empty()) break;
    }
    if (pumped.chunks >= chunks_max) {  // another stream's turn; this stream keeps its place
      pumped.goes_on = true;
      return pumped;
    }
    const std::uint32_t chunk = permitted ? stream.free_.front() : stream.ready_.front();
    const SendResult step = send_chunk(peer, stream, chunk);
    if (step == SendResult::kSent) {
      (permitted ? stream.free_ : stream.ready_).pop_front();
      ++pumped.chunks;
      stream.source->on_sent(stream, chunk);
    } else if (step == SendResult::kNoPermit) {
      blocked = true;
    } else if (step == SendResult::kNoSlot) {
      if (!permitted && (stream.marks_[chunk] & kPermitted) != 0) {
        stream.ready_.pop_front();
        stream.free_.push_back(chunk);
      }
      starve(peer, stream, chunk);
      end_wait(peer);
      return pumped;
    } else {
      stop_waiting(stream);
      return pumped;
    }
  }
  StreamQueue::remove(stream, &Stream::starved_);
  // A callback may have cancelled the stream: a cancelled stream must not wait.
  if (blocked && !(stream.ready_.empty() && stream.wanted_.empty())) {
    wait(peer, stream);
  } else {
    stop_waiting(stream);
    end_wait(peer);
  }
  return pumped;
}

/// Lets streams send in their turn. True: a stream is left that cannot send.
bool Outbox::pump_queue(StreamQueue& queue) {
  for (;;) {
    const StreamQueue::Turn turn = queue.turn();
    if (turn.stream == nullptr) return false;
    const Pumped pumped = pump(*turn.stream, turn.chunks);
    queue.count(turn, pumped.chunks);
    if (!pumped.goes_on && queue.turn().stream == turn.stream) return true;
  }
}

void Outbox::pump_peer(PeerState& peer) {
  // A stream that waits for allowance holds up all streams behind it, except those with an "all chunks" grant. Streams
  // with such a grant do not wait for allowance, and the blocked stream may get allowance only after they are done.
  // (Single granted chunks have gone already, or wait for slots.)
  const Stream* const first = peer.urgent.turn.front();
  const bool blocked = pump_queue(peer.urgent.turn);
  // While the queue moves, many tiny operations in a row wait only for credit, and need not announce themselves.
  if (blocked && peer.urgent.turn.front() != first) peer.urgent.since = core::Clock::now();
  if ((blocked || pump_queue(peer.bulk.turn)) && !pump_queue(peer.urgent.whole)) pump_queue(peer.bulk.whole);
}

void Outbox::offer(Stream& stream, std::uint32_t chunk) {
  const core::OneThread::Inside inside(one_thread_);
  prepare(stream);
  std::uint8_t& marks = stream.marks_[chunk];
  assert((marks & kOffered) == 0);
  marks |= kOffered;
  ((marks & kPermitted) != 0 ? stream.free_ : stream.ready_).push_back(chunk);
  if (stream.starved_.in != nullptr) return;
  if (stream.is_permitted(chunk) || stream.bytes == 0) {
    pump(stream);
    return;
  }
  if (stream.turn_.in != nullptr) return;
  // Other streams of the same class (urgent or bulk) wait for this peer's allowance: take a place behind them.
  PeerState& peer = state_of(stream.peer);
  if (peer.broken) return;
  if (peer.of(stream).turn.empty())
    pump(stream);
  else
    wait(peer, stream);
}

void Outbox::want(Stream& stream, std::uint32_t chunk) {
  const core::OneThread::Inside inside(one_thread_);
  prepare(stream);
  if ((stream.marks_[chunk] & (kSent | kWanted)) != 0) return;
  stream.marks_[chunk] |= kWanted;
  stream.wanted_.push_back(chunk);
  pump(stream);
}

void Outbox::granted(Stream& stream, std::uint32_t chunk) {
  const core::OneThread::Inside inside(one_thread_);
  prepare(stream);
  if (chunk == wire::kAllChunks) {
    stream.granted_all_ = true;
  } else {
    if (chunk >= stream.chunks || (stream.marks_[chunk] & kSent) != 0) return;
    std::uint8_t& marks = stream.marks_[chunk];
    if ((marks & kPermitted) == 0) {
      marks |= kByGrant;
      ++stream.permits_;
      if ((marks & kOffered) != 0) stream.free_.push_back(chunk);
    }
    // The peer waits for this chunk: the source must fetch the data now, even if want() was not called.
    if ((marks & kOffered) == 0) {
      marks &= static_cast<std::uint8_t>(~kWanted);
      stream.source->on_permitted(stream, chunk);
    }
  }
  if (stream.starved_.in == nullptr) pump(stream);
}

void Outbox::cancel(Stream& stream) {
  const core::OneThread::Inside inside(one_thread_);
  stop_waiting(stream);
  // Give back permits that were paid for and not used.
  if (std::exchange(stream.permits_, 0) > 0) {
    for (std::uint32_t chunk = 0; chunk < stream.chunks; ++chunk) {
      if ((stream.marks_[chunk] & (kByAllowance | kSent)) != kByAllowance) continue;
      if (stream.bytes_of(chunk) == 0) continue;
      PeerState& peer = state_of(stream.peer);
      peer.book.unpay(cost_of(peer, stream, chunk));
      stream.marks_[chunk] |= kSent;
      resume(peer);
    }
  }
  stream.free_.clear();
  stream.ready_.clear();
  stream.wanted_.clear();
  if (const auto found = peers_.find(stream.peer); found != peers_.end()) end_wait(*found->second);
}

void Outbox::on_credit(core::EngineId peer, const wire::Credit& credit) {
  const core::OneThread::Inside inside(one_thread_);
  PeerState& to = state_of(peer);
  if (credit.of == wire::Permit::kWholeGrant)
    to.book.on_whole_credit(credit.bytes);
  else
    to.book.on_credit(credit.bytes, core::Clock::now().time_since_epoch());
  trace_window(to);
  pump_peer(to);
}

void Outbox::send(core::EngineId peer, wire::Message message) { (void)transmit(state_of(peer), std::move(message)); }

void Outbox::send_text(core::EngineId peer, wire::Message message, std::string_view text) {
  const std::size_t bytes = std::min(text.size(), options_.class_bytes.empty() ? 0 : options_.class_bytes.back());
  transport::Buffer buffer = bytes > 0 ? pool_.allocate(bytes) : transport::Buffer();
  message.payload_bytes = buffer ? static_cast<std::uint32_t>(bytes) : 0;
  if (buffer) std::memcpy(buffer.data(), text.data(), bytes);
  (void)transmit(state_of(peer), std::move(message), buffer);
}

bool Outbox::is_open(core::EngineId peer) const {
  const auto found = peers_.find(peer);
  return found != peers_.end() && found->second->endpoint != nullptr && !found->second->broken;
}

void Outbox::announce(PeerState& peer, Stream& stream) {
  ++looks_;
  stream.announced_ = true;
  wire::Announce announce{stream.id, window_of(peer)};
  announce.chunk.number = stream.ready_.empty() ? 0 : stream.ready_.front();
  (void)transmit(peer, {stream.from, 0, announce, stream.priority}, {}, {}, stream.urgent);
}

std::size_t Outbox::progress(core::TimePoint now) {
  const core::OneThread::Inside inside(one_thread_);
  std::size_t work = 0;
  if (slot_released_) {
    slot_released_ = false;
    // One queue per kind of slot: a stream that waits for one kind does not hold up streams that wait for another.
    for (StreamQueue& kind : starved_) {
      const std::uint64_t before = looks_;
      pump_queue(kind);
      work += looks_ - before;
    }
  }
  for (std::vector<core::EngineId> resume = std::exchange(resume_, {}); const core::EngineId id : resume) {
    ++work;
    const auto found = peers_.find(id);
    if (found == peers_.end()) continue;
    found->second->resumes = false;
    pump_peer(*found->second);
  }
  for (std::size_t i = 0; i < announcing_.size();) {
    PeerState& peer = *announcing_[i];
    for (PeerState::Waiting* waiting : {&peer.urgent, &peer.bulk}) {
      if (waiting->unannounced.empty() || now - waiting->since < options_.announce_after) continue;
      while (Stream* stream = waiting->unannounced.front()) {
        StreamQueue::remove(*stream, &Stream::unannounced_);
        announce(peer, *stream);
        ++work;
      }
    }
    if (peer.urgent.unannounced.empty() && peer.bulk.unannounced.empty()) {
      peer.announces = false;
      announcing_[i] = announcing_.back();
      announcing_.pop_back();
    } else {
      ++i;
    }
  }
  for (auto broken = std::exchange(broken_, {}); auto& [id, status] : broken) {
    router_.on_unreachable(id, std::move(status));
    ++work;
  }
  return work;
}

core::TimePoint Outbox::next_due() const noexcept {
  if (!resume_.empty()) return core::TimePoint{};
  core::TimePoint due = core::TimePoint::max();
  for (const PeerState* const peer : announcing_)
    for (const PeerState::Waiting* waiting : {&peer->urgent, &peer->bulk})
      if (!waiting->unannounced.empty()) due = std::min(due, waiting->since + options_.announce_after);
  return due;
}

std::optional<Outbox::Flow> Outbox::flow_of(core::EngineId id) const {
  const auto found = peers_.find(id);
  if (found == peers_.end()) return std::nullopt;
  const PeerState& peer = *found->second;
  Flow flow{peer.book.window(), peer.book.outstanding() + peer.book.whole_outstanding(), 0, peer.path.rate().value(),
            peer.path.state()};
  for (const StreamQueue* queue : {&peer.urgent.turn, &peer.bulk.turn})
    for (const Stream* s = queue->front(); s != nullptr; s = queue->next(*s)) ++flow.streams_waiting;
  return flow;
}

std::string Outbox::describe() const {
  std::string text;
  const auto stream_text = [](const Stream& s) {
    return "  stage " + std::to_string(static_cast<int>(s.id.stage)) + " seq " + std::to_string(s.id.sequence) +
           " span " + std::to_string(s.id.span) + " sent " + std::to_string(s.sent_) + "/" + std::to_string(s.chunks) +
           " ready " + std::to_string(s.free_.size() + s.ready_.size()) + " wanted " +
           std::to_string(s.wanted_.size()) + " permits " + std::to_string(s.permits_) +
           (s.announced_ ? " announced" : "") + (s.granted_all_ ? " granted" : "") + "\n";
  };
  for (const auto& [id, peer] : peers_) {
    text += "to " + core::to_string(id) + (peer->local ? " local" : " net") + " window " +
            std::to_string(peer->book.window()) + " outstanding " + std::to_string(peer->book.outstanding()) +
            " under whole grants " + std::to_string(peer->book.whole_outstanding()) + " to return " +
            std::to_string(peer->due.due()) + (peer->broken ? " broken" : "") + "\n";
    for (const StreamQueue* queue : {&peer->urgent.turn, &peer->bulk.turn})
      for (const Stream* s = queue->front(); s != nullptr; s = queue->next(*s)) text += stream_text(*s);
  }
  for (const StreamQueue& kind : starved_)
    for (const Stream* s = kind.front(); s != nullptr; s = kind.next(*s)) text += "starved" + stream_text(*s);
  for (std::size_t c = 0; c < net_in_use_.size(); ++c)
    text += "class " + std::to_string(options_.class_bytes[c]) + ": " + std::to_string(net_in_use_[c]) + " of " +
            std::to_string(options_.net_slots[c]) + " between nodes\n";
  return text;
}

void Outbox::forget(core::EngineId peer) {
  if (const auto found = peers_.find(peer); found != peers_.end()) {
    if (found->second->path.rate().is_waiting()) stop_measuring(found->second->path.rate());
    paths_packing_ -= found->second->path.packs() ? 1 : 0;
    std::erase(announcing_, found->second.get());
    peers_.erase(found);
  }
  std::erase(resume_, peer);
}

std::int64_t Outbox::held(core::EngineId peer) const {
  const auto found = peers_.find(peer);
  return found == peers_.end() ? 0 : found->second->held;
}

void Outbox::consumed(core::EngineId source, std::int64_t cost, wire::Permit permit) noexcept {
  const core::OneThread::Inside inside(one_thread_);
  PeerState& from = state_of(source);
  ReturnBook& due = permit == wire::Permit::kWholeGrant ? from.whole_due : from.due;
  if (due.consumed(cost)) send_credit(from, due, permit);
}

}  // namespace hybridps::flow
