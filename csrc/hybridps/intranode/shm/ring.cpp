#include "hybridps/intranode/shm/ring.h"

#include <algorithm>
#include <cstring>

namespace hybridps::intranode::shm {
namespace {

constexpr std::uint64_t kInlineBit = 1;

constexpr std::uint64_t pack_shape(std::uint32_t token, std::size_t header_bytes, bool is_inline) noexcept {
  return (static_cast<std::uint64_t>(token) << 32) | (static_cast<std::uint64_t>(header_bytes) << 16) |
         (is_inline ? kInlineBit : 0);
}

// A release entry: turn (32) | token (32), where turn = index + 1 modulo 2^32.
constexpr std::uint64_t pack_release(std::uint64_t index, std::uint32_t token) noexcept {
  return ((index + 1) << 32) | token;
}

}  // namespace

Taken MessageWriter::room() noexcept {
  if (written_ - consumed_seen_ < entries_) return Taken::kEntry;
  const std::uint64_t consumed = slot_->consumed.load(std::memory_order_seq_cst);
  if (consumed < consumed_seen_ || consumed > written_) return Taken::kCorrupt;
  consumed_seen_ = consumed;
  return written_ - consumed_seen_ < entries_ ? Taken::kEntry : Taken::kNothing;
}

void MessageWriter::put_inline(std::span<const std::byte> header, std::span<const std::byte> inline_payload) noexcept {
  MessageEntry& entry = next();
  entry.offset_bytes.store(0, std::memory_order_relaxed);
  entry.payload_bytes.store(inline_payload.size(), std::memory_order_relaxed);
  entry.shape.store(pack_shape(0, header.size(), true), std::memory_order_relaxed);
  std::memcpy(entry.data.data(), header.data(), header.size());
  if (!inline_payload.empty()) {
    std::memcpy(entry.data.data() + header.size(), inline_payload.data(), inline_payload.size());
  }
  entry.turn.store(++written_, std::memory_order_seq_cst);
}

void MessageWriter::put_reference(std::span<const std::byte> header, std::uint64_t offset_bytes,
                                  std::uint64_t payload_bytes, std::uint32_t token) noexcept {
  MessageEntry& entry = next();
  entry.offset_bytes.store(offset_bytes, std::memory_order_relaxed);
  entry.payload_bytes.store(payload_bytes, std::memory_order_relaxed);
  entry.shape.store(pack_shape(token, header.size(), false), std::memory_order_relaxed);
  std::memcpy(entry.data.data(), header.data(), header.size());
  entry.turn.store(++written_, std::memory_order_seq_cst);
}

void MessageWriter::set_waiting(bool waiting) noexcept {
  if (waiting == waiting_) return;
  waiting_ = waiting;
  slot_->producer_waits.store(waiting ? 1 : 0, std::memory_order_seq_cst);
}

bool MessageReader::has_more() const noexcept {
  // Any unexpected turn counts as more, because a corrupt turn must be looked at too.
  const std::uint64_t turn = next().turn.load(std::memory_order_seq_cst);
  const std::uint64_t lap_before = read_ + 1 > entries_ ? read_ + 1 - entries_ : 0;
  return turn != lap_before;
}

Taken MessageReader::peek(RingMessage& message) noexcept {
  const MessageEntry& entry = next();
  const std::uint64_t turn = entry.turn.load(std::memory_order_acquire);
  if (turn != read_ + 1) {
    const std::uint64_t lap_before = read_ + 1 > entries_ ? read_ + 1 - entries_ : 0;
    return turn == lap_before ? Taken::kNothing : Taken::kCorrupt;
  }
  const std::uint64_t shape = entry.shape.load(std::memory_order_relaxed);
  message.offset_bytes = entry.offset_bytes.load(std::memory_order_relaxed);
  message.payload_bytes = entry.payload_bytes.load(std::memory_order_relaxed);
  message.token = static_cast<std::uint32_t>(shape >> 32);
  message.header_bytes = static_cast<std::uint16_t>(shape >> 16);
  message.is_inline = (shape & kInlineBit) != 0;
  if ((shape & 0xffff & ~kInlineBit) != 0) return Taken::kCorrupt;
  if (message.header_bytes == 0 || message.header_bytes > transport::kHeaderBytesMax) return Taken::kCorrupt;
  if (message.is_inline ? message.payload_bytes > kInlineBytesMax : message.payload_bytes == 0) return Taken::kCorrupt;
  std::memcpy(message.header.data(), entry.data.data(), message.header_bytes);
  message.inline_payload = entry.data.data() + message.header_bytes;
  return Taken::kEntry;
}

bool MessageReader::publish() noexcept {
  if (read_ == published_) return false;
  published_ = read_;
  slot_->consumed.store(read_, std::memory_order_seq_cst);
  return slot_->producer_waits.load(std::memory_order_seq_cst) != 0;
}

void ReleaseWriter::put(std::uint32_t token) noexcept {
  ring_[written_ & (entries_ - 1)].store(pack_release(written_, token), std::memory_order_seq_cst);
  ++written_;
}

bool ReleaseReader::has_more() const noexcept {
  const std::uint64_t turn = ring_[read_ & (entries_ - 1)].load(std::memory_order_seq_cst) >> 32;
  const std::uint64_t lap_before = read_ + 1 > entries_ ? (read_ + 1 - entries_) & 0xffffffff : 0;
  return turn != lap_before;
}

Taken ReleaseReader::take(std::uint32_t& token) noexcept {
  const std::uint64_t word = ring_[read_ & (entries_ - 1)].load(std::memory_order_acquire);
  const std::uint64_t turn = word >> 32;
  if (turn != ((read_ + 1) & 0xffffffff)) {
    const std::uint64_t lap_before = read_ + 1 > entries_ ? (read_ + 1 - entries_) & 0xffffffff : 0;
    return turn == lap_before ? Taken::kNothing : Taken::kCorrupt;
  }
  token = static_cast<std::uint32_t>(word);
  ++read_;
  return Taken::kEntry;
}

}  // namespace hybridps::intranode::shm
