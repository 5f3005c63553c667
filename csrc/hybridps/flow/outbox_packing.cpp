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

void Delivery::reset() noexcept {
  payload_.reset();
  if (Outbox* outbox = std::exchange(outbox_, nullptr); outbox != nullptr && cost_ > 0)
    outbox->consumed(source_, cost_, permit_);
}

// Urgent streams say nothing of the path, and local peers have none.
void Outbox::begin_wait(PeerState& peer, const Stream& stream) {
  if (stream.urgent || peer.local || peer.path.is_waiting()) return;
  peer.path.begin_wait(core::Clock::now(), busy_);
  ++paths_waiting_;
}

void Outbox::end_wait(PeerState& peer) {
  if (!peer.path.is_waiting() || !peer.bulk.turn.empty()) return;
  peer.path.end_wait(core::Clock::now(), busy_);
  --paths_waiting_;
}

void Outbox::measure_path(PeerState& peer, const Stream& stream, std::size_t wire_bytes) {
  if (stream.urgent || !peer.path.is_waiting() || !peer.path.add(wire_bytes, core::Clock::now(), busy_)) return;
  const double limit = packing_.rate_limit();
  double together = 0.0;
  for (const auto& [id, other] : peers_)
    if (const double rate = other->path.rate(); rate <= limit) together += rate;
  packing_.decide(peer.path, together);
  paths_packing_ = 0;
  for (const auto& [id, other] : peers_) paths_packing_ += other->path.packs() ? 1 : 0;
}

bool Outbox::packs(const Stream& stream, std::size_t bytes) {
  if (stream.may_pack == MayPack::kNever || compress::Exact::of(stream.dtype) == nullptr ||
      bytes % core::size_of(stream.dtype) != 0)
    return false;
  const PeerState& peer = state_of(stream.peer);
  return !peer.local && (stream.may_pack == MayPack::kAlways || peer.path.packs());
}

Payload Outbox::pack(const Stream& stream, const std::byte* elements, std::size_t bytes, transport::Buffer buffer) {
  Payload payload{std::move(buffer), bytes};
  const compress::Exact& exact = *compress::Exact::of(stream.dtype);
  const core::TimePoint began = core::Clock::now();
  if (exact.estimate(elements, bytes) <= Packing::kWorth) {
    const std::size_t room = wire::kPackedFrontBytes + exact.bytes_max(bytes);
    if (packed_.size() < room) packed_.resize(room);
    const std::size_t wire_bytes =
        wire::kPackedFrontBytes + exact.encode(elements, bytes, packed_.data() + wire::kPackedFrontBytes);
    if (static_cast<double>(wire_bytes) <= Packing::kWorth * static_cast<double>(bytes)) {
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
  std::memcpy(payload.buffer.data(), elements, bytes);
  return payload;
}

void Outbox::unpack(const Delivery& payload, std::byte* out) {
  const core::TimePoint began = core::Clock::now();
  payload.format()->expand(payload.data(), 0, payload.bytes() / core::size_of(payload.dtype()), out);
  packing_.note_unpacked(payload.bytes(), core::Clock::now() - began);
}

}  // namespace hybridps::flow
