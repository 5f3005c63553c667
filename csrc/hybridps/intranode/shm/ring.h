// hybridps/intranode/shm/ring.h: an engine's control page, and the slot with two rings for each local peer.
//
// Model    An engine has one page of EngineControl for all peers, and a slot for each local peer, which that peer alone
//          gets. The peer writes the slot and the owner reads it. A slot has two rings: messages to the owner, and
//          releases of payloads that the owner sent. The grammar of the bytes is in README.md.
// Threads  single producer, single consumer per ring. Publishing stores, and loads before sleep, are sequentially
//          consistent: either the sender sees `sleeping`, or the sleeper sees the entry (Dekker).
// Trust    a reader trusts nothing. Each word is loaded once and checked; header and inline payload are copied out
//          before use. Errors are kCorrupt, never undefined behaviour.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <span>

#include "hybridps/transport/endpoint.h"

namespace hybridps::intranode::shm {

inline constexpr std::size_t kEntryBytes = 512;
inline constexpr std::size_t kEntryDataBytes = kEntryBytes - 4 * sizeof(std::uint64_t);
/// Payloads up to this size travel inside the entry, larger payloads by reference.
inline constexpr std::size_t kInlineBytesMax = 256;
inline constexpr std::size_t kCacheLineBytes = 64;

/// The control page.
struct alignas(kCacheLineBytes) EngineControl {
  std::atomic<std::uint32_t> sleeping{0};
};

struct alignas(kCacheLineBytes) MessageEntry {
  std::atomic<std::uint64_t> turn;  // index + 1 once written; the index counts from 0 through all laps
  std::atomic<std::uint64_t> offset_bytes;
  std::atomic<std::uint64_t> payload_bytes;
  std::atomic<std::uint64_t> shape;             // token (32) | header bytes (16) | 1: inline
  std::array<std::byte, kEntryDataBytes> data;  // header, then the inline payload
};
static_assert(sizeof(MessageEntry) == kEntryBytes);
static_assert(transport::kHeaderBytesMax + kInlineBytesMax <= kEntryDataBytes);
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && std::atomic<std::uint32_t>::is_always_lock_free);

/// Start of a slot; the rings follow it.
struct PeerSlot {
  alignas(kCacheLineBytes) std::array<std::atomic<std::uint64_t>, 2> nonce;  // written by the owner
  std::array<std::atomic<std::uint64_t>, 2> echo;                            // written by the peer
  alignas(kCacheLineBytes) std::atomic<std::uint64_t> consumed;              // written by the owner: entries read
  alignas(kCacheLineBytes) std::atomic<std::uint32_t> producer_waits;        // written by the peer: wake me after reads
};

/// Sizes of a slot. Exchanged in the handshake, because each engine chooses its own sizes.
struct SlotLayout {
  std::uint32_t ring_entries = 0;     // power of two
  std::uint32_t release_entries = 0;  // power of two

  bool is_valid() const noexcept {
    const auto power_of_two = [](std::uint32_t v) { return v >= 2 && v <= 65536 && (v & (v - 1)) == 0; };
    return power_of_two(ring_entries) && power_of_two(release_entries);
  }
  std::size_t release_offset_bytes() const noexcept { return sizeof(PeerSlot); }
  std::size_t ring_offset_bytes() const noexcept {
    const std::size_t end = release_offset_bytes() + release_entries * sizeof(std::uint64_t);
    return (end + kCacheLineBytes - 1) / kCacheLineBytes * kCacheLineBytes;
  }
  std::size_t slot_bytes() const noexcept {
    return ring_offset_bytes() + static_cast<std::size_t>(ring_entries) * kEntryBytes;
  }
};

/// Typed views of a slot's memory.
inline PeerSlot& slot_of(std::byte* slot) noexcept { return *reinterpret_cast<PeerSlot*>(slot); }
inline MessageEntry* ring_of(std::byte* slot, const SlotLayout& layout) noexcept {
  return reinterpret_cast<MessageEntry*>(slot + layout.ring_offset_bytes());
}
inline std::atomic<std::uint64_t>* releases_of(std::byte* slot, const SlotLayout& layout) noexcept {
  return reinterpret_cast<std::atomic<std::uint64_t>*>(slot + layout.release_offset_bytes());
}

enum class Taken { kNothing, kEntry, kCorrupt };

class MessageWriter {
 public:
  MessageWriter() = default;
  MessageWriter(std::byte* slot, const SlotLayout& layout) noexcept
      : slot_(&slot_of(slot)), ring_(ring_of(slot, layout)), entries_(layout.ring_entries) {}

  /// kNothing: full. kEntry: room for one entry. kCorrupt: the consumer claims to have read entries that were not
  /// written.
  Taken room() noexcept;
  /// Call only after room() said kEntry. `inline_payload` may be empty.
  void put_inline(std::span<const std::byte> header, std::span<const std::byte> inline_payload) noexcept;
  void put_reference(std::span<const std::byte> header, std::uint64_t offset_bytes, std::uint64_t payload_bytes,
                     std::uint32_t token) noexcept;
  /// Whether the consumer shall wake this producer after each read.
  void set_waiting(bool waiting) noexcept;

 private:
  MessageEntry& next() noexcept { return ring_[written_ & (entries_ - 1)]; }
  PeerSlot* slot_ = nullptr;
  MessageEntry* ring_ = nullptr;
  std::uint64_t entries_ = 0;
  std::uint64_t written_ = 0;
  std::uint64_t consumed_seen_ = 0;
  bool waiting_ = false;
};

/// One entry, copied out and checked. Not checked: the place of a referenced payload.
struct RingMessage {
  std::uint64_t offset_bytes = 0;
  std::uint64_t payload_bytes = 0;
  std::uint32_t token = 0;
  std::uint16_t header_bytes = 0;
  bool is_inline = false;
  std::array<std::byte, transport::kHeaderBytesMax> header;
  const std::byte* inline_payload = nullptr;  // in shared memory: copy it before advance()
};

class MessageReader {
 public:
  MessageReader() = default;
  MessageReader(std::byte* slot, const SlotLayout& layout) noexcept
      : slot_(&slot_of(slot)), ring_(ring_of(slot, layout)), entries_(layout.ring_entries) {}

  bool has_more() const noexcept;
  Taken peek(RingMessage& message) noexcept;
  void advance() noexcept { ++read_; }
  /// Tells the producer how far the reader is. True: the producer waits, so wake it. Cheap when nothing changed.
  bool publish() noexcept;
  bool publish_is_due() const noexcept { return read_ - published_ >= entries_ / 4; }

 private:
  const MessageEntry& next() const noexcept { return ring_[read_ & (entries_ - 1)]; }
  PeerSlot* slot_ = nullptr;
  MessageEntry* ring_ = nullptr;
  std::uint64_t entries_ = 0;
  std::uint64_t read_ = 0;
  std::uint64_t published_ = 0;
};

/// No check for room: a sender never has more unreleased payloads than the ring has entries.
class ReleaseWriter {
 public:
  ReleaseWriter() = default;
  ReleaseWriter(std::byte* slot, const SlotLayout& layout) noexcept
      : ring_(releases_of(slot, layout)), entries_(layout.release_entries) {}
  void put(std::uint32_t token) noexcept;

 private:
  std::atomic<std::uint64_t>* ring_ = nullptr;
  std::uint64_t entries_ = 0;
  std::uint64_t written_ = 0;
};

class ReleaseReader {
 public:
  ReleaseReader() = default;
  ReleaseReader(std::byte* slot, const SlotLayout& layout) noexcept
      : ring_(releases_of(slot, layout)), entries_(layout.release_entries) {}
  bool has_more() const noexcept;
  Taken take(std::uint32_t& token) noexcept;

 private:
  std::atomic<std::uint64_t>* ring_ = nullptr;
  std::uint64_t entries_ = 0;
  std::uint64_t read_ = 0;
};

}  // namespace hybridps::intranode::shm
