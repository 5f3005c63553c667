// hybridps/flow/stream.h: the chunks of one span on their way to one peer, and the queues in which such streams wait.
//
// Owner    a role, or a point-to-point message, has Streams and is their Source; the Outbox sends them (outbox.h).
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/core/ids.h"
#include "hybridps/core/pinned.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/wire/message.h"

namespace hybridps::flow {

class Outbox;
struct Stream;

/// A chunk as it goes out.
struct Payload {
  transport::Buffer buffer;
  std::size_t bytes = 0;
};

/// Produces the chunks of streams. Calls come from inside Outbox::offer(), want(), granted(), on_credit() or progress().
class Source {
 public:
  virtual ~Source() = default;
  /// The most that a chunk of so many bytes is on the wire: what its permit costs. The same whenever it is asked.
  virtual std::size_t wire_bytes_max(std::size_t bytes) const noexcept { return bytes; }
  /// The chunk (bytes > 0) as it goes out, in a buffer of at most wire_bytes_max(bytes), which may be shared between streams.
  /// No buffer: no slot is free; asked again later. One that was lent (transport/buffer_pool.h) counts like a slot of its
  /// size.
  virtual Payload payload(Stream& stream, std::uint32_t chunk, std::size_t bytes) = 0;
  /// The chunk was sent; the stream does not need its data any more.
  virtual void on_sent(Stream& stream, std::uint32_t chunk) = 0;
  /// The answer to want(): the chunk may be sent as soon as it is offered.
  virtual void on_permitted(Stream& stream, std::uint32_t chunk) = 0;
};

/// So many chunks (of streams to one peer, or of a receiver's grants) may pass those of less priority; then it is the turn of
/// the one of these that has waited longest. So nobody starves: what waits has one chunk of kPassesMax + 1. Not more of them: what is
/// done early that others wait for late leaves the card idle at the end (docs/decisions/0025-priorities.md).
inline constexpr std::uint32_t kPassesMax = 63;

/// Streams that wait for one thing, in a row: by priority, then in the order in which they came. Each is linked by its own
/// hook, so that it leaves from anywhere at once.
class StreamQueue : core::Pinned {
 public:
  struct Hook {
    StreamQueue* in = nullptr;
    Stream* before = nullptr;
    Stream* after = nullptr;
    std::uint64_t ticket = 0;  // rises with each that comes
  };
  explicit StreamQueue(Hook Stream::*hook) noexcept : hook_(hook) {}
  ~StreamQueue();

  bool empty() const noexcept { return front_ == nullptr; }
  Stream* front() const noexcept { return front_; }
  Stream* next(const Stream& stream) const noexcept;
  /// Behind all of its priority or a higher one, and out of any other queue of this hook; one that is in this queue keeps its
  /// place.
  void add(Stream& stream);
  /// Out of whichever queue of this hook it is in, if any.
  static void remove(Stream& stream, Hook Stream::*hook) noexcept;

  /// Whose turn it is, and how many chunks it may send before that is asked again.
  struct Turn {
    Stream* stream = nullptr;  // null: nobody waits
    std::uint32_t chunks = 0;
    bool passed = false;  // it is not the front: others have passed it long enough
  };
  Turn turn() const noexcept;
  /// The one whose turn it was has sent so many.
  void count(const Turn& turn, std::uint32_t sent) noexcept;

 private:
  struct Level {  // streams of one priority: one behind the other
    std::int8_t priority = 0;
    Stream* last = nullptr;
  };
  void leave(const Stream& stream, const Hook& hook) noexcept;

  Hook Stream::*const hook_;
  Stream* front_ = nullptr;
  Stream* back_ = nullptr;
  std::vector<Level> levels_;  // that are not empty, the highest first
  std::uint64_t tickets_ = 0;
  std::uint32_t passes_ = 0;  // chunks in a row that have gone before others of less priority
};

/// Chunks of one stream in a row. One alone, which is all that a small operation has, needs no memory but this.
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
  std::vector<std::uint32_t> rest_;  // behind the front, from passed_ on
  std::size_t passed_ = 0;
};

struct Stream : core::Pinned {
  // Of every message; source, number, permit and what it costs are filled in.
  wire::From from;
  wire::ChunkId id;
  double premul = 1.0;
  core::EngineId peer;
  Source* source = nullptr;
  std::uint64_t bytes = 0;
  std::uint32_t chunk_bytes = 1;
  std::uint32_t chunks = 1;
  bool urgent = false;
  std::int8_t priority = 0;  // among those to its peer that are not urgent; not to be changed while it waits
  std::uint32_t index = 0;  // free for the owner

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
  ChunkQueue ready_;                 // offered without a permit; those that have got one since are passed over
  ChunkQueue wanted_;                // want()ed; likewise
  std::uint32_t sent_ = 0;
  std::uint32_t permits_ = 0;  // chunks that hold a permit and are not sent
  bool announced_ = false;
  bool granted_all_ = false;
  StreamQueue::Hook turn_;         // waits for a permit, in its peer's order
  StreamQueue::Hook whole_;        // of these, granted as a whole
  StreamQueue::Hook unannounced_;  // of these, the peer has not been told
  StreamQueue::Hook starved_;      // waits for a slot
};

/// What the Outbox knows of a chunk.
namespace mark {
inline constexpr std::uint8_t kOffered = 1;
inline constexpr std::uint8_t kByAllowance = 2;  // holds a permit paid from the allowance
inline constexpr std::uint8_t kByGrant = 4;      // holds a permit given by the peer
inline constexpr std::uint8_t kSent = 8;
inline constexpr std::uint8_t kWanted = 16;  // want() has not been answered
inline constexpr std::uint8_t kPermitted = kByAllowance | kByGrant;
}  // namespace mark

}  // namespace hybridps::flow
