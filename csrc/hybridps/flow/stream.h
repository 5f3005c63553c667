// hybridps/flow/stream.h: the chunks of one span on their way to one peer, and the queues in which such streams wait.
//
// Owner    a role or a point-to-point message owns Streams and is their Source. The Outbox sends them (outbox.h).
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/wire/message.h"

namespace hybridps::flow {

class Outbox;
struct Stream;

/// The bytes of a chunk as they go on the wire.
struct Payload {
  transport::Buffer buffer;
  std::size_t bytes = 0;
  std::uint8_t packed = wire::kNotPacked;  // wire::Data::packed
};

/// Whether a stream's chunks may go packed (packing.h) to a peer on another node.
enum class MayPack : std::uint8_t { kNever, kWhereItPays, kAlways };

/// Produces the chunks of streams. Called from inside Outbox::offer(), want(), granted(), on_credit() and progress().
class Source {
 public:
  virtual ~Source() = default;
  /// The largest size of a chunk of `bytes` on the wire: what its permit costs. Always the same answer.
  virtual std::size_t wire_bytes_max(std::size_t bytes) const noexcept { return bytes; }
  /// The chunk (bytes > 0) as it goes on the wire, in a buffer of at most wire_bytes_max(bytes). Streams may share the
  /// buffer. No buffer: no slot is free, and the Outbox asks again later. A lent buffer (transport/buffer_pool.h)
  /// counts like a slot of its size.
  virtual Payload payload(Stream& stream, std::uint32_t chunk, std::size_t bytes) = 0;
  /// The chunk was sent; the stream does not need its data any more.
  virtual void on_sent(Stream& stream, std::uint32_t chunk) = 0;
  /// The answer to want(): the chunk may be sent as soon as it is offered.
  virtual void on_permitted(Stream& stream, std::uint32_t chunk) = 0;
};

/// How many chunks in a row (to one peer, or of a receiver's grants) may pass waiters of lower priority. Then comes the
/// passed waiter that has waited longest. So no waiter starves: one of kPassesMax + 1 chunks goes to a passed waiter. A
/// larger share would hurt: chunks that are done early, but needed late, leave the card idle at the end
/// (decision 25: docs/decisions/flow-control.md).
inline constexpr std::uint32_t kPassesMax = 63;

/// A queue of streams that wait for the same thing, by priority, then by arrival. Each stream is linked by its own
/// hook, so it can leave from any place without a search.
class StreamQueue : core::Pinned {
 public:
  struct Hook {
    StreamQueue* in = nullptr;
    Stream* before = nullptr;
    Stream* after = nullptr;
    std::uint64_t ticket = 0;  // rises with each arrival
  };
  explicit StreamQueue(Hook Stream::* hook) noexcept : hook_(hook) {}
  ~StreamQueue();

  bool empty() const noexcept { return front_ == nullptr; }
  Stream* front() const noexcept { return front_; }
  Stream* next(const Stream& stream) const noexcept;
  /// Adds the stream behind all streams of its priority or higher, and takes it out of any other queue of this hook. A
  /// stream that is in this queue already keeps its place.
  void add(Stream& stream);
  /// Takes the stream out of the queue of this hook that it is in, if any.
  static void remove(Stream& stream, Hook Stream::* hook) noexcept;

  /// The stream whose turn it is, and how many chunks the stream may send before turn() is asked again.
  struct Turn {
    Stream* stream = nullptr;  // null: no stream waits
    std::uint32_t chunks = 0;
    bool passed = false;  // the stream is not the front: others have passed it often enough
  };
  Turn turn() const noexcept;
  /// The stream of `turn` has sent `sent` chunks.
  void count(const Turn& turn, std::uint32_t sent) noexcept;

 private:
  struct Level {  // the consecutive streams of one priority
    std::int8_t priority = 0;
    Stream* last = nullptr;
  };
  void leave(const Stream& stream, const Hook& hook) noexcept;

  Hook Stream::* const hook_;
  Stream* front_ = nullptr;
  Stream* back_ = nullptr;
  std::vector<Level> levels_;  // levels that are not empty, highest priority first
  std::uint64_t tickets_ = 0;
  std::uint32_t passes_ = 0;  // chunks sent in a row that passed streams of lower priority
};

/// A queue of chunks of one stream. A single chunk, as in a small operation, needs no allocation.
class ChunkQueue {
 public:
  bool empty() const noexcept { return size_ == 0; }
  std::size_t size() const noexcept { return size_; }
  std::uint32_t front() const noexcept { return front_; }
  void push_back(std::uint32_t chunk) {
    if (size_ == 0)
      front_ = chunk;
    else
      rest_.push_back(chunk);
    ++size_;
  }
  void pop_front() noexcept {
    if (--size_ > 0)
      front_ = rest_[passed_++];
    else
      clear();
  }
  void clear() noexcept {
    rest_.clear();
    size_ = passed_ = 0;
  }

 private:
  std::uint32_t front_ = 0;
  std::size_t size_ = 0;
  std::vector<std::uint32_t> rest_;  // the chunks behind the front begin at index passed_
  std::size_t passed_ = 0;
};

struct Stream : core::Pinned {
  // These fields go into every message. The Outbox fills in source, number, permit and cost.
  wire::From from;
  wire::ChunkId id;
  double premul = 1.0;
  core::EngineId peer;
  Source* source = nullptr;
  std::uint64_t bytes = 0;
  std::uint32_t chunk_bytes = 1;
  std::uint32_t chunks = 1;
  bool urgent = false;
  std::int8_t priority = 0;  // among streams to its peer of the same urgency; must not change while the stream waits
  std::uint32_t index = 0;   // free for the owner's use
  MayPack may_pack = MayPack::kNever;
  core::DType dtype = core::DType::kBytes;  // of the elements, for packing

  std::size_t bytes_of(std::uint32_t chunk) const noexcept;
  bool is_offered(std::uint32_t chunk) const noexcept;
  bool is_sent(std::uint32_t chunk) const noexcept;
  std::uint32_t sent() const noexcept { return sent_; }
  bool is_permitted(std::uint32_t chunk) const noexcept;
  bool all_sent() const noexcept { return sent_ == chunks; }

 private:
  friend class Outbox;
  std::vector<std::uint8_t> marks_;  // per chunk, made on first use
  ChunkQueue free_;                  // offered, with a permit, and not sent
  ChunkQueue ready_;                 // offered without a permit; entries that got a permit since are skipped
  ChunkQueue wanted_;                // want()ed; entries that are answered since are skipped
  std::uint32_t sent_ = 0;
  std::uint32_t permits_ = 0;  // chunks that hold a permit and are not sent
  bool announced_ = false;
  bool granted_all_ = false;
  std::uint8_t plain_left_ = 0;    // chunks that go as they are, while the cores are busy
  StreamQueue::Hook turn_;         // waits for a permit, in its peer's order
  StreamQueue::Hook whole_;        // among these, has an "all chunks" grant
  StreamQueue::Hook unannounced_;  // among these, the peer has not been told
  StreamQueue::Hook starved_;      // waits for a slot
};

/// The Outbox's marks for a chunk.
namespace mark {
inline constexpr std::uint8_t kOffered = 1;
inline constexpr std::uint8_t kByAllowance = 2;  // holds a permit paid from the allowance
inline constexpr std::uint8_t kByGrant = 4;      // holds a permit given by the peer
inline constexpr std::uint8_t kSent = 8;
inline constexpr std::uint8_t kWanted = 16;  // want() has not been answered
inline constexpr std::uint8_t kPermitted = kByAllowance | kByGrant;
}  // namespace mark

}  // namespace hybridps::flow
