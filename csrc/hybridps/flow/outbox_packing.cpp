// The part of the Outbox that packs chunks, measures paths, and takes packed payloads.
#include <algorithm>
#include <cstring>
#include <utility>

#include "hybridps/flow/outbox.h"

namespace hybridps::flow {

Delivery& Delivery::operator=(Delivery&& other) noexcept {
  if (this != &other) {
    reset();
    payload_ = std::move(other.payload_);
    outbox_ = std::exchange(other.outbox_, nullptr);
    source_ = other.source_;
    cost_ = std::exchange(other.cost_, 0);
    held_ = std::exchange(other.held_, 0);
    permit_ = other.permit_;
    dtype_ = other.dtype_;
    format_ = other.format_;
    element_bytes_ = other.element_bytes_;
  }
  return *this;
}

void Delivery::set_packed(std::uint8_t packed) noexcept {
  if (packed == wire::kNotPacked || payload_.bytes() < wire::kPackedFrontBytes) return;
  const auto dtype = static_cast<core::DType>(packed - 1);
  const compress::Exact* const exact = compress::Exact::of(dtype);
  std::uint32_t bytes = 0;
  std::memcpy(&bytes, payload_.data(), sizeof bytes);
  if (exact == nullptr || bytes % core::size_of(dtype) != 0 ||
      !exact->fits(payload_.data() + wire::kPackedFrontBytes, payload_.bytes() - wire::kPackedFrontBytes, bytes))
    return;
  dtype_ = dtype;
  format_ = exact;
  element_bytes_ = bytes;
}

void Delivery::own() {
  if (payload_.bytes() == 0) return;
  auto* const copy = new std::byte[payload_.bytes()];  // deleted by the RxPayload
  std::memcpy(copy, payload_.data(), payload_.bytes());
  payload_ = transport::RxPayload(
      copy, payload_.bytes(),
      [](void* bytes, void*, std::uint64_t) noexcept { delete[] static_cast<std::byte*>(bytes); }, copy, nullptr);
}

void Delivery::hold() noexcept {
  held_ = static_cast<std::int64_t>(payload_.bytes());
  outbox_->hold(source_, held_);
}

void Delivery::reset() noexcept {
  payload_.reset();
  Outbox* const outbox = std::exchange(outbox_, nullptr);
  if (outbox == nullptr) return;
  if (held_ > 0) outbox->hold(source_, -std::exchange(held_, 0));
  if (cost_ > 0) outbox->consumed(source_, cost_, permit_);
}

// Urgent streams say nothing of the path, and local peers have none. A stream without a slot does not count as waiting:
// other peers may hold the slots.
void Outbox::begin_wait(PeerState& peer, const Stream& stream) {
  if (stream.urgent || peer.local || peer.path.rate().is_waiting()) return;
  measure_round(core::Clock::now());
  peer.path.rate().begin_wait();
  if (paths_waiting_++ == 0) slow_paths_.begin_wait();
}

void Outbox::end_wait(PeerState& peer) {
  if (!peer.path.rate().is_waiting() || !peer.bulk.turn.empty()) return;
  stop_measuring(peer.path.rate());
}

void Outbox::stop_measuring(PathRate& rate) {
  const core::TimePoint now = core::Clock::now();
  rate.end_wait(now, busy(now));
  if (--paths_waiting_ == 0) slow_paths_.end_wait(now, busy(now));
}

void Outbox::measure_path(PeerState& peer, const Stream& stream, std::size_t bytes, std::size_t wire_bytes) {
  if (stream.urgent || peer.local || bytes == 0) return;
  PackingPath& path = peer.path;
  const bool packed_before = path.packs();
  const bool waits = path.rate().is_waiting();
  const core::TimePoint now = waits ? core::Clock::now() : core::TimePoint{};
  if (waits && path.rate().value() <= packing_.rate_limit()) slow_paths_.add(bytes, wire_bytes, now, busy(now));
  if (path.add(bytes, wire_bytes, now, busy(now))) packing_.decide(path, slow_paths_.value(), idle_cpus_.part(now));
  if (path.packs() != packed_before) paths_packing_ += path.packs() ? 1 : ~std::size_t{0};
}

bool Outbox::packs(Stream& stream, std::size_t bytes) {
  if (stream.may_pack == MayPack::kNever || compress::Exact::of(stream.dtype) == nullptr ||
      bytes % core::size_of(stream.dtype) != 0)
    return false;
  const PeerState& peer = state_of(stream.peer);
  if (peer.local) return false;
  constexpr std::size_t kWorthTheTime = 4096;
  if (stream.may_pack == MayPack::kAlways) return true;
  if (stream.urgent || bytes < kWorthTheTime) return false;
  if (peer.path.packs()) return true;
  if (peer.path.state() != PathState::kBusy) return false;
  if (stream.plain_left_ == 0) return packing_.worth_while_busy() > 0.0;
  --stream.plain_left_;
  return false;
}

Payload Outbox::pack(Stream& stream, const std::byte* elements, std::size_t bytes, transport::Buffer buffer) {
  Payload payload{std::move(buffer), bytes};
  const compress::Exact& exact = *compress::Exact::of(stream.dtype);
  const core::TimePoint began = core::Clock::now();
  const bool is_busy = stream.may_pack != MayPack::kAlways && !state_of(stream.peer).path.packs();
  const double worth = is_busy ? packing_.worth_while_busy() : Packing::kWorth;
  if (exact.estimate(elements, bytes) <= worth) {
    const std::size_t room = wire::kPackedFrontBytes + exact.bytes_max(bytes);
    if (packed_.size() < room) packed_.resize(room);
    const std::size_t wire_bytes =
        wire::kPackedFrontBytes + exact.encode(elements, bytes, packed_.data() + wire::kPackedFrontBytes);
    if (static_cast<double>(wire_bytes) <= worth * static_cast<double>(bytes)) {
      const auto front = static_cast<std::uint32_t>(bytes);
      std::memcpy(packed_.data(), &front, sizeof front);
      std::memcpy(payload.buffer.data(), packed_.data(), wire_bytes);
      payload.bytes = wire_bytes;
      payload.packed = wire::packed_as(stream.dtype);
      packing_.note_packed(bytes, wire_bytes, core::Clock::now() - began);
      return payload;
    }
  }
  packing_.note_refused(core::Clock::now() - began);
  if (is_busy) stream.plain_left_ = Packing::kPlainWhileBusy;  // the stream's next chunks are probably like this one
  std::memcpy(payload.buffer.data(), elements, bytes);
  return payload;
}

void Outbox::unpack(const Delivery& payload, std::byte* out) {
  const core::TimePoint began = core::Clock::now();
  payload.format()->expand(payload.data(), 0, payload.bytes() / core::size_of(payload.dtype()), out);
  packing_.note_unpacked(payload.bytes(), core::Clock::now() - began);
}

}  // namespace hybridps::flow
