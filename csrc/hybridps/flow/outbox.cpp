#include "hybridps/flow/outbox.h"

#include <algorithm>
#include <cassert>
#include <cstring>
#include <string>
#include <utility>

namespace hybridps::flow {
namespace {

constexpr std::uint8_t kOffered = 1;
constexpr std::uint8_t kByAllowance = 2;  // holds a permit paid from the allowance
constexpr std::uint8_t kByGrant = 4;      // holds a permit given by the peer
constexpr std::uint8_t kSent = 8;

// Credit for what was sent under "all chunks" grants is returned by so much: a constant, since both sides must know it.
constexpr std::int64_t kGrantedBatchBytes = 8 * 1024;

}  // namespace

std::size_t Stream::bytes_of(std::uint32_t chunk) const noexcept {
  const std::uint64_t begin = std::uint64_t{chunk} * chunk_bytes;
  return begin >= bytes ? 0 : static_cast<std::size_t>(std::min<std::uint64_t>(chunk_bytes, bytes - begin));
}

bool Stream::is_offered(std::uint32_t chunk) const noexcept {
  return !marks_.empty() && (marks_[chunk] & kOffered) != 0;
}

bool Stream::is_sent(std::uint32_t chunk) const noexcept { return !marks_.empty() && (marks_[chunk] & kSent) != 0; }

bool Stream::is_permitted(std::uint32_t chunk) const noexcept {
  return granted_all_ || (!marks_.empty() && (marks_[chunk] & (kByAllowance | kByGrant)) != 0);
}

Delivery& Delivery::operator=(Delivery&& other) noexcept {
  if (this != &other) {
    reset();
    payload_ = std::move(other.payload_);
    outbox_ = std::exchange(other.outbox_, nullptr);
    source_ = other.source_;
    cost_ = std::exchange(other.cost_, 0);
    granted_ = other.granted_;
  }
  return *this;
}

void Delivery::reset() noexcept {
  payload_.reset();
  if (Outbox* outbox = std::exchange(outbox_, nullptr); outbox != nullptr && cost_ > 0)
    outbox->consumed(source_, cost_, granted_);
}

Outbox::Outbox(OutboxOptions options, transport::BufferPool& pool, Router& router)
    : options_(std::move(options)), pool_(pool), router_(router), net_in_use_(options_.class_bytes.size(), 0) {
  pool_.set_release_hook([this] { slot_released_ = true; });
}

Outbox::~Outbox() {
  *alive_ = false;
  pool_.set_release_hook({});
}

Outbox::Lane& Outbox::lane(core::EngineId peer) {
  std::unique_ptr<Lane>& slot = lanes_[peer];
  if (!slot) {
    slot = std::make_unique<Lane>();
    slot->id = peer;
    const Peer info = router_.describe(peer);
    slot->local = info.local;
    slot->limit = slot->base = slot->window = slot->allowance = info.eager_bytes;
    slot->tuner.reset(slot->base, slot->limit);
    slot->credit_batch = options_.credit_batch_bytes;
  }
  return *slot;
}

std::size_t Outbox::class_of(std::size_t bytes) const noexcept {
  for (std::size_t c = 0; c < options_.class_bytes.size(); ++c)
    if (bytes <= options_.class_bytes[c]) return c;
  return options_.class_bytes.size() - 1;
}

// A local peer holds a whole slot of ours; one across the network holds the bytes, or a small buffer of its own.
std::int64_t Outbox::cost_of(const Lane& lane, std::size_t bytes) const noexcept {
  return static_cast<std::int64_t>(lane.local ? options_.class_bytes[class_of(bytes)]
                                              : std::max(bytes, options_.class_bytes.front()));
}

void Outbox::set_window(core::EngineId peer, std::int64_t bytes, const schedule::WindowTuner::Rounds& rounds) {
  Lane& to = lane(peer);
  if (bytes == to.base && rounds == to.tuner.rounds()) return;
  const bool wider = bytes > to.window;
  to.base = bytes;
  to.tuner.reset(bytes, to.limit, rounds);
  use_window(to, bytes);
  if (wider) resume_.push_back(peer);
}

void Outbox::use_window(Lane& lane, std::int64_t bytes) noexcept {
  lane.allowance += bytes - lane.window;
  lane.window = bytes;
}

void Outbox::note_window(core::EngineId peer, std::int64_t bytes) {
  // A quarter at a time: the sender still has most of it while the credit is on its way.
  lane(peer).credit_batch = std::clamp<std::int64_t>(bytes / 4, 1, options_.credit_batch_bytes);
}

void Outbox::return_credit(core::EngineId peer) {
  Lane& to = lane(peer);
  if (to.to_return <= 0 || to.broken) return;
  wire::Header header;
  header.type = wire::Type::kCredit;
  header.aux = static_cast<std::uint64_t>(std::exchange(to.to_return, 0));
  send(peer, header);
}

bool Outbox::take_allowance(Lane& lane, std::int64_t cost, bool urgent) {
  // The window is for bulk: what is urgent may use all that the peer allows. One message may always be under way, so
  // that an allowance below one chunk is still an allowance.
  const std::int64_t room = urgent ? lane.limit - lane.outstanding : lane.allowance;
  if (cost > room && lane.outstanding > 0) {
    // Only where more waits to be sent: credit for the end of an operation may come back with the next one.
    if (!lane.local && !urgent && !lane.tuner.is_measuring())
      lane.tuner.on_spent(lane.sent_bytes, core::Clock::now().time_since_epoch());
    return false;
  }
  lane.allowance -= cost;
  lane.outstanding += cost;
  lane.sent_bytes += static_cast<std::uint64_t>(cost);
  return true;
}

bool Outbox::may_send_granted(const Lane& lane, std::int64_t cost) const noexcept {
  if (lane.local) return lane.granted_bytes == 0 || lane.granted_bytes + cost <= options_.granted_bytes_max;
  // What a peer has used up and not yet returned is less than a batch. Below that nothing may hold us up, however small
  // the window is or has become: no credit would come.
  return lane.granted_bytes + cost <= lane.window || lane.granted_bytes < kGrantedBatchBytes;
}

void Outbox::prepare(Stream& stream) {
  if (stream.marks_.empty()) stream.marks_.resize(stream.chunks, 0);
}

// What has left and not come back as credit may still wait in front of the card. A quarter of the window, and a batch, may
// be missing for good: credit comes in such parts.
bool Outbox::has_backlog(const Lane& lane) noexcept {
  return !lane.local && lane.outstanding + lane.granted_bytes > lane.window / 2 + kGrantedBatchBytes;
}

core::Result<transport::Endpoint*> Outbox::open(Lane& lane, bool urgent) {
  if (urgent && lane.urgent_endpoint == nullptr) {
    core::Result<transport::Endpoint*> endpoint = router_.connect_urgent(lane.id);
    if (!endpoint.is_ok()) return endpoint.status();
    lane.urgent_endpoint = endpoint.value();
  }
  if (lane.endpoint == nullptr && (!urgent || lane.urgent_endpoint == nullptr)) {
    core::Result<transport::Endpoint*> endpoint = router_.connect(lane.id);
    if (!endpoint.is_ok()) return endpoint.status();
    lane.endpoint = endpoint.value();
  }
  if (urgent && lane.urgent_endpoint == nullptr) lane.urgent_endpoint = lane.endpoint;
  return urgent ? lane.urgent_endpoint : lane.endpoint;
}

core::Status Outbox::transmit(Lane& lane, const wire::Header& header, const transport::Buffer& buffer,
                              std::size_t bytes, transport::SendDone done, bool urgent) {
  if (lane.broken) return core::Status(core::Code::kPeerDead, "peer is gone");
  // The other connection may be one that cannot read a device's memory.
  const bool lent = buffer && buffer.is_lent();
  core::Result<transport::Endpoint*> endpoint =
      open(lane, urgent && !lent && (options_.urgent_always || has_backlog(lane)));
  core::Status status = endpoint.status();
  if (status.is_ok()) status = endpoint.value()->send(wire::encode(header), buffer, bytes, std::move(done));
  if (!status.is_ok()) {
    lane.broken = true;
    broken_.emplace_back(lane.id, status);
  }
  return status;
}

Outbox::Step Outbox::send_chunk(Lane& lane, Stream& stream, std::uint32_t chunk) {
  const std::size_t bytes = stream.bytes_of(chunk);
  std::uint8_t& marks = stream.marks_[chunk];
  wire::Header header = stream.header;
  header.type = wire::Type::kData;
  header.source = options_.self;
  header.chunk = chunk;
  header.payload_bytes = static_cast<std::uint32_t>(bytes);
  if (bytes == 0) {
    if (!transmit(lane, header, {}, 0, {}, stream.urgent).is_ok()) return Step::kBroken;
    marks |= kSent;
    ++stream.sent_;
    return Step::kSent;
  }
  const std::size_t size_class = class_of(bytes);
  const std::int64_t cost = cost_of(lane, bytes);
  bool by_all = false;
  if ((marks & (kByAllowance | kByGrant)) == 0) {
    if (take_allowance(lane, cost, stream.urgent)) {
      marks |= kByAllowance;
      ++stream.permits_;
    } else if (stream.granted_all_ && may_send_granted(lane, cost)) {
      by_all = true;
    } else {
      return Step::kNoPermit;
    }
  }
  if (!lane.local && net_in_use_[size_class] >= options_.net_slots[size_class]) return Step::kNoSlot;
  transport::Buffer buffer = stream.source->payload(stream, chunk, bytes);
  if (!buffer) return Step::kNoSlot;

  if ((marks & kByAllowance) != 0) {
    header.aux = wire::pack_cost(static_cast<std::uint64_t>(cost), static_cast<std::uint64_t>(lane.window));
  } else {
    header.flags |= wire::kFlagGranted;
    if (by_all && !lane.local)
      header.aux = wire::pack_cost(static_cast<std::uint64_t>(cost), static_cast<std::uint64_t>(lane.window));
  }
  transport::SendDone done;
  if (!lane.local || by_all) {
    if (!lane.local) ++net_in_use_[size_class];
    if (by_all) lane.granted_bytes += cost;
    done = [this, alive = alive_, id = lane.id, size_class, net = !lane.local, cost](core::Status) {
      if (!*alive) return;
      if (net) {
        --net_in_use_[size_class];
        slot_released_ = true;
      } else {
        if (auto found = lanes_.find(id); found != lanes_.end()) {
          found->second->granted_bytes -= cost;
          resume_.push_back(id);
        }
      }
    };
  }
  if (!transmit(lane, header, buffer, bytes, std::move(done), stream.urgent).is_ok()) {
    // `done` was dropped unrun.
    if (!lane.local) {
      --net_in_use_[size_class];
      slot_released_ = true;
    }
    if (by_all) lane.granted_bytes -= cost;
    return Step::kBroken;
  }
  if ((marks & (kByAllowance | kByGrant)) != 0) --stream.permits_;
  marks |= kSent;
  ++stream.sent_;
  return Step::kSent;
}

void Outbox::serve_wanted(Lane& lane, Stream& stream) {
  while (!stream.wanted_.empty()) {
    const std::uint32_t chunk = stream.wanted_.front();
    std::uint8_t& marks = stream.marks_[chunk];
    if ((marks & (kSent | kByAllowance | kByGrant)) == 0 && !stream.granted_all_) {
      const std::size_t bytes = stream.bytes_of(chunk);
      if (bytes > 0 && !take_allowance(lane, cost_of(lane, bytes), stream.urgent)) return;
      marks |= kByAllowance;
      ++stream.permits_;
    }
    stream.wanted_.erase(stream.wanted_.begin());
    if ((marks & kSent) == 0) stream.source->on_permitted(stream, chunk);
  }
}

void Outbox::wait(Lane& lane, Stream& stream) {
  if (lane.blocked_since == core::TimePoint::max()) lane.blocked_since = core::Clock::now();
  if (!stream.announced_) lane.unannounced = true;
  if (stream.waiting_) return;
  stream.waiting_ = true;
  (stream.urgent ? lane.urgent : lane.bulk).push_back(&stream);
}

void Outbox::starve(Stream& stream) {
  if (stream.starved_) return;
  stream.starved_ = true;
  starved_.push_back(&stream);
}

void Outbox::pump(Stream& stream) {
  Lane& peer = lane(stream.peer);
  if (peer.broken) return;
  serve_wanted(peer, stream);
  bool blocked = !stream.wanted_.empty();
  // Chunks that hold a permit first: they are what the peer waits for.
  for (std::size_t i = 0; i < stream.ready_.size();) {
    const std::uint32_t chunk = stream.ready_[i];
    const bool permitted = (stream.marks_[chunk] & (kByAllowance | kByGrant)) != 0;
    if (blocked && stream.permits_ == 0) break;
    if (blocked && !permitted) {
      ++i;
      continue;
    }
    switch (send_chunk(peer, stream, chunk)) {
      case Step::kSent:
        stream.ready_.erase(stream.ready_.begin() + static_cast<std::ptrdiff_t>(i));
        stream.source->on_sent(stream, chunk);
        break;
      case Step::kNoPermit:
        blocked = true;
        ++i;
        break;
      case Step::kNoSlot: starve(stream); return;
      case Step::kBroken: return;
    }
  }
  // A callback may have cancelled the stream: then it has nothing to wait for.
  if (blocked && !(stream.ready_.empty() && stream.wanted_.empty())) wait(peer, stream);
  if (stream.all_sent()) leave_queues(stream);
}

void Outbox::pump_lane(Lane& peer) {
  // Who waits for the allowance holds up all behind it, except those that the peer has granted: what they wait for has
  // nothing to do with it, and its own turn may come only after they are done.
  bool blocked = false;
  for (std::deque<Stream*>* queue : {&peer.urgent, &peer.bulk}) {
    for (std::size_t i = 0; i < queue->size();) {
      Stream& stream = *(*queue)[i];
      if (blocked && !stream.granted_all_ && stream.permits_ == 0) {
        ++i;
        continue;
      }
      queue->erase(queue->begin() + static_cast<std::ptrdiff_t>(i));
      stream.waiting_ = false;
      pump(stream);
      if (stream.waiting_) {
        // Still without a permit: it keeps its place.
        queue->erase(std::find(queue->begin(), queue->end(), &stream));
        i = std::min(i, queue->size());
        queue->insert(queue->begin() + static_cast<std::ptrdiff_t>(i), &stream);
        ++i;
        blocked = true;
      }
    }
  }
  if (!blocked) peer.blocked_since = core::TimePoint::max();
}

void Outbox::offer(Stream& stream, std::uint32_t chunk) {
  prepare(stream);
  assert((stream.marks_[chunk] & kOffered) == 0);
  stream.marks_[chunk] |= kOffered;
  stream.ready_.push_back(chunk);
  if (stream.starved_) return;
  if (stream.waiting_ && !stream.is_permitted(chunk)) return;
  Lane& peer = lane(stream.peer);
  // Others of the same class wait for this peer's allowance: take a place behind them.
  const bool behind = !stream.urgent && !peer.bulk.empty() && stream.bytes > 0 && !stream.is_permitted(chunk);
  if (behind)
    wait(peer, stream);
  else
    pump(stream);
}

void Outbox::want(Stream& stream, std::uint32_t chunk) {
  prepare(stream);
  if ((stream.marks_[chunk] & kSent) != 0) return;
  stream.wanted_.push_back(chunk);
  pump(stream);
}

void Outbox::granted(Stream& stream, std::uint32_t chunk) {
  prepare(stream);
  if (chunk == wire::kAllChunks) {
    stream.granted_all_ = true;
  } else {
    if (chunk >= stream.chunks || (stream.marks_[chunk] & kSent) != 0) return;
    if ((stream.marks_[chunk] & (kByAllowance | kByGrant)) == 0) {
      stream.marks_[chunk] |= kByGrant;
      ++stream.permits_;
    }
    // The peer waits for this chunk: even where nobody here asked for it, its data must now be fetched.
    if ((stream.marks_[chunk] & kOffered) == 0) {
      std::erase(stream.wanted_, chunk);
      stream.source->on_permitted(stream, chunk);
    }
  }
  if (!stream.starved_) pump(stream);
}

void Outbox::leave_queues(Stream& stream) {
  if (stream.waiting_) {
    Lane& peer = lane(stream.peer);
    std::erase(peer.urgent, &stream);
    std::erase(peer.bulk, &stream);
    stream.waiting_ = false;
  }
  if (stream.starved_) {
    std::erase(starved_, &stream);
    stream.starved_ = false;
  }
}

void Outbox::cancel(Stream& stream) {
  leave_queues(stream);
  // Permits that were paid for and not used go back.
  if (!stream.marks_.empty()) {
    for (std::uint32_t chunk = 0; chunk < stream.chunks; ++chunk) {
      if ((stream.marks_[chunk] & (kByAllowance | kSent)) != kByAllowance) continue;
      const std::size_t bytes = stream.bytes_of(chunk);
      if (bytes == 0) continue;
      Lane& peer = lane(stream.peer);
      const std::int64_t cost = cost_of(peer, bytes);
      peer.allowance += cost;
      peer.outstanding -= cost;
      peer.returned_bytes += static_cast<std::uint64_t>(cost);
      stream.marks_[chunk] |= kSent;
      resume_.push_back(stream.peer);
    }
  }
  stream.ready_.clear();
  stream.wanted_.clear();
}

void Outbox::on_credit(core::EngineId peer, std::uint64_t bytes, bool granted) {
  Lane& to = lane(peer);
  // A peer that returns too much, or what is then taken back here, must not turn the sign of a count.
  const auto at_most = [bytes](std::int64_t limit) {
    return static_cast<std::int64_t>(std::min(bytes, static_cast<std::uint64_t>(std::max<std::int64_t>(limit, 0))));
  };
  if (granted) {
    to.granted_bytes -= at_most(to.granted_bytes);
    pump_lane(to);
    return;
  }
  const std::int64_t back = at_most(to.outstanding);
  to.allowance += back;
  to.outstanding -= back;
  to.returned_bytes += static_cast<std::uint64_t>(back);
  if (!to.local && to.tuner.on_returned(to.returned_bytes, core::Clock::now().time_since_epoch()))
    use_window(to, to.tuner.window());
  pump_lane(to);
}

void Outbox::send(core::EngineId peer, wire::Header header) {
  header.source = options_.self;
  (void)transmit(lane(peer), header, {}, 0, {});
}

void Outbox::send_text(core::EngineId peer, wire::Header header, std::string_view text) {
  const std::size_t bytes = std::min(text.size(), options_.class_bytes.empty() ? 0 : options_.class_bytes.back());
  transport::Buffer buffer = bytes > 0 ? pool_.allocate(bytes) : transport::Buffer();
  header.source = options_.self;
  header.flags |= wire::kFlagGranted;
  header.payload_bytes = buffer ? static_cast<std::uint32_t>(bytes) : 0;
  if (buffer) std::memcpy(buffer.data(), text.data(), bytes);
  (void)transmit(lane(peer), header, buffer, header.payload_bytes, {});
}

bool Outbox::is_open(core::EngineId peer) const {
  const auto found = lanes_.find(peer);
  return found != lanes_.end() && found->second->endpoint != nullptr && !found->second->broken;
}

void Outbox::announce(Lane& peer, Stream& stream) {
  stream.announced_ = true;
  wire::Header header = stream.header;
  header.type = wire::Type::kAnnounce;
  header.source = options_.self;
  header.chunk = stream.ready_.empty() ? 0 : stream.ready_.front();
  header.payload_bytes = 0;
  header.aux = wire::pack_cost(0, static_cast<std::uint64_t>(peer.window));
  (void)transmit(peer, header, {}, 0, {}, stream.urgent);
}

std::size_t Outbox::progress(core::TimePoint now) {
  std::size_t work = 0;
  if (slot_released_) {
    slot_released_ = false;
    // One by one: pumping a stream may finish operations and cancel streams further back in this list.
    for (std::size_t left = starved_.size(); left > 0 && !starved_.empty(); --left) {
      Stream* stream = starved_.front();
      starved_.pop_front();
      stream->starved_ = false;
      pump(*stream);
      ++work;
      if (stream->starved_) {
        // No slot again: it keeps its place at the head.
        std::erase(starved_, stream);
        starved_.push_front(stream);
        break;
      }
    }
  }
  for (std::vector<core::EngineId> resume = std::exchange(resume_, {}); const core::EngineId id : resume) {
    if (auto found = lanes_.find(id); found != lanes_.end()) pump_lane(*found->second);
    ++work;
  }
  for (auto& [id, peer] : lanes_) {
    if (!peer->unannounced || peer->blocked_since == core::TimePoint::max() ||
        now - peer->blocked_since < options_.announce_after)
      continue;
    peer->unannounced = false;
    for (std::deque<Stream*>* queue : {&peer->urgent, &peer->bulk}) {
      // Indexed: announcing never changes the queues, but the vector of streams may be long.
      for (std::size_t i = 0; i < queue->size(); ++i) {
        Stream& stream = *(*queue)[i];
        if (stream.announced_) continue;
        announce(*peer, stream);
        ++work;
      }
    }
  }
  for (auto broken = std::exchange(broken_, {}); auto& [id, status] : broken) {
    router_.on_unreachable(id, std::move(status));
    ++work;
  }
  return work;
}

core::TimePoint Outbox::next_due() const noexcept {
  core::TimePoint due = core::TimePoint::max();
  for (const auto& [id, peer] : lanes_)
    if (peer->unannounced && peer->blocked_since != core::TimePoint::max())
      due = std::min(due, peer->blocked_since + options_.announce_after);
  return due;
}

std::string Outbox::describe() const {
  std::string text;
  const auto stream_text = [](const Stream& s) {
    return "  stage " + std::to_string(static_cast<int>(s.header.stage)) + " seq " + std::to_string(s.header.sequence) +
           " span " + std::to_string(s.header.span) + " sent " + std::to_string(s.sent_) + "/" +
           std::to_string(s.chunks) + " ready " + std::to_string(s.ready_.size()) + " wanted " +
           std::to_string(s.wanted_.size()) + " permits " + std::to_string(s.permits_) +
           (s.announced_ ? " announced" : "") + (s.granted_all_ ? " granted" : "") + "\n";
  };
  for (const auto& [id, peer] : lanes_) {
    text += "to " + core::to_string(id) + (peer->local ? " local" : " net") + " window " +
            std::to_string(peer->window) + " allowance " + std::to_string(peer->allowance) + " outstanding " +
            std::to_string(peer->outstanding) + " granted bytes " + std::to_string(peer->granted_bytes) +
            " to return " + std::to_string(peer->to_return) + (peer->broken ? " broken" : "") + "\n";
    for (const auto* queue : {&peer->urgent, &peer->bulk})
      for (const Stream* s : *queue) text += stream_text(*s);
  }
  for (const Stream* s : starved_) text += "starved" + stream_text(*s);
  for (std::size_t c = 0; c < net_in_use_.size(); ++c)
    text += "class " + std::to_string(options_.class_bytes[c]) + ": " + std::to_string(net_in_use_[c]) + " of " +
            std::to_string(options_.net_slots[c]) + " between nodes\n";
  return text;
}

void Outbox::forget(core::EngineId peer) {
  lanes_.erase(peer);
  std::erase(resume_, peer);
}

void Outbox::consumed(core::EngineId source, std::int64_t cost, bool granted) noexcept {
  Lane& from = lane(source);
  if (granted) {
    from.granted_to_return += cost;
    if (from.granted_to_return < kGrantedBatchBytes || from.broken) return;
    wire::Header header;
    header.type = wire::Type::kCredit;
    header.flags = wire::kFlagGranted;
    header.aux = static_cast<std::uint64_t>(std::exchange(from.granted_to_return, 0));
    send(source, header);
    return;
  }
  from.to_return += cost;
  if (from.to_return >= from.credit_batch) return_credit(source);
}

}  // namespace hybridps::flow
