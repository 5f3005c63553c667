// hybridps/flow/outbox.h: which message an engine may send to which peer, and when: eager allowance, announce, grant.
//
// Model    A Stream is one span's chunks on their way to one peer. The stream's owner (worker or server) offers a chunk
//          when the chunk's data is available. The Outbox sends the chunk as soon as the chunk has a permit:
//            eager    each peer lets us send a number of bytes unasked (the allowance). The peer returns the allowance
//                     with Credit messages when it has consumed the bytes. We may use only a part of the allowance
//                     (set_window()), so that many peers together do not flood one receiver. Messages state the
//                     size of this part, since the peer returns credit in fractions of this size;
//            granted  a stream without allowance announces itself (one header). The peer grants chunks when it knows
//                     that it can consume them in bounded time. A peer that consumes chunks as they arrive grants "all
//                     chunks". Across the network the window also limits these chunks, with a separate credit account.
//          A stream that waits for a permit holds no staging memory: Source::payload produces a chunk's bytes only when
//          the chunk may go. Receivers grant only work that can finish. For these two reasons, ranks may issue
//          operations of different groups in different orders (docs/architecture.md, Flow control).
// Order    Per peer, urgent streams (tiny operations) go first, then streams by priority. Streams of one priority go in
//          order of their first offer. The Outbox decides again for every chunk, so a late stream of high priority
//          passes the remaining chunks of others. No stream waits for ever: one of kPassesMax + 1 chunks belongs to a
//          passed stream. Peers do not wait for each other: a bulk operation sends to each owner as the owner's
//          allowance comes back. Urgent messages use a separate connection while bulk is under way on the other
//          connection (or always: OutboxOptions::urgent_always). Credit and grants for far peers do so too.
// Cost     An event (an offer, a credit, a grant, a free slot) looks at the streams that it releases, and at most one
//          more in each queue. The number of waiting streams makes no difference.
// Threads  the engine's progress thread.
// Errors   the Router is told about a peer that cannot be reached, once, from progress().
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hybridps/compress/exact.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/idle_cpus.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/credit.h"
#include "hybridps/flow/packing.h"
#include "hybridps/flow/stream.h"
#include "hybridps/observe/trace.h"
#include "hybridps/schedule/window_tuner.h"
#include "hybridps/transport/endpoint.h"
#include "hybridps/transport/transport.h"
#include "hybridps/wire/message.h"

namespace hybridps::flow {

class Outbox;

struct Peer {
  bool local = false;            // reached through shared memory
  std::int64_t eager_bytes = 0;  // the allowance that the peer gives us
};

class Router {
 public:
  virtual ~Router() = default;
  virtual core::Result<transport::Endpoint*> connect(core::EngineId peer) = 0;
  /// A connection that carries no bulk; nullptr: there is none, ever. kOutOfResources: it is not there yet, and
  /// connect() serves meanwhile.
  virtual core::Result<transport::Endpoint*> connect_urgent(core::EngineId) {
    return static_cast<transport::Endpoint*>(nullptr);
  }
  virtual Peer describe(core::EngineId peer) = 0;
  virtual void on_unreachable(core::EngineId peer, core::Status cause) = 0;
};

struct OutboxOptions {
  core::EngineId self;
  /// The most that we return in one Credit message: a fraction of the allowance that we give to others.
  std::int64_t credit_batch_bytes = 128 * 1024;
  /// Slots of each size class of the pool that all messages between nodes may hold together. The rest is kept for local
  /// peers, because a local peer may hold a slot until other ranks deliver.
  std::vector<std::size_t> net_slots;
  std::vector<std::size_t> class_bytes;  // size classes of the pool, rising
  /// Bytes in flight to one local peer under "all chunks" grants.
  std::int64_t granted_bytes_max = 256 * 1024;
  /// Urgent messages always use the connection without bulk, because this connection is the quicker one.
  bool urgent_always = false;
  /// The most bytes that a peer of another node may have here unconsumed: what we have allowed and granted it, and some
  /// more.
  std::int64_t held_bytes_max = std::int64_t{1} << 62;
  /// A stream without a permit announces itself after this long.
  core::Duration announce_after = std::chrono::microseconds(500);
};

/// A received payload. Its end of life (reset() or destruction) returns the sender's allowance. Move-only.
class Delivery {
 public:
  Delivery() = default;
  /// `cost`: bytes that go back to the account of `permit` (wire::Data).
  Delivery(transport::RxPayload payload, Outbox* outbox, core::EngineId source, std::int64_t cost,
           wire::Permit permit = wire::Permit::kAllowance) noexcept
      : payload_(std::move(payload)), outbox_(outbox), source_(source), cost_(cost), permit_(permit) {}
  Delivery(Delivery&& other) noexcept { *this = std::move(other); }
  Delivery& operator=(Delivery&& other) noexcept;
  ~Delivery() { reset(); }

  /// The payload of `packed` data (wire::Data::packed), if the payload is sound. Otherwise the payload stays as it is:
  /// the receiver then finds a size that is not the plan's, or takes the bytes as elements.
  void set_packed(std::uint8_t packed) noexcept;

  const std::byte* data() const noexcept {
    return payload_.data() + (format_ == nullptr ? 0 : wire::kPackedFrontBytes);
  }
  /// Of the elements; of the payload, unless it is packed.
  std::size_t bytes() const noexcept { return format_ == nullptr ? payload_.bytes() : element_bytes_; }
  /// Null: the elements lie in data(). Else the payload is packed, and this expands data() to elements of dtype().
  const compress::Exact* format() const noexcept { return format_; }
  core::DType dtype() const noexcept { return dtype_; }
  /// Copies the payload out of memory that its sender can still write: what was checked is then what is used.
  void own();
  /// From now on the payload counts as held for its source, until its end of life.
  void hold() noexcept;
  void reset() noexcept;

 private:
  transport::RxPayload payload_;
  Outbox* outbox_ = nullptr;
  core::EngineId source_;
  std::int64_t cost_ = 0;
  std::int64_t held_ = 0;
  wire::Permit permit_ = wire::Permit::kAllowance;
  core::DType dtype_ = core::DType::kBytes;
  const compress::Exact* format_ = nullptr;
  std::size_t element_bytes_ = 0;
};

class Outbox : core::Pinned {
 public:
  Outbox(OutboxOptions options, transport::BufferPool& pool, Router& router);
  ~Outbox();

  /// The chunk's data is available: sends it now, or when it has a permit. At most one call per chunk.
  void offer(Stream& stream, std::uint32_t chunk);
  /// Asks for a permit for a chunk whose data is not available yet; Source::on_permitted answers (perhaps at once).
  void want(Stream& stream, std::uint32_t chunk);
  /// Forgets a stream that will send no more. Required before the destruction of a stream that is not all_sent().
  void cancel(Stream& stream);
  /// A Grant for the stream arrived.
  void granted(Stream& stream, std::uint32_t chunk);
  /// A Credit message arrived.
  void on_credit(core::EngineId peer, const wire::Credit& credit);

  /// Sends a message without payload at once.
  void send(core::EngineId peer, wire::Message message);
  /// Sends a message with a short text as payload, cut to the largest size class. Without a free slot the text is
  /// dropped, and the message goes without payload.
  void send_text(core::EngineId peer, wire::Message message, std::string_view text);

  /// Whether a chunk of the stream shall go packed now. Then its Source calls pack().
  bool packs(Stream& stream, std::size_t bytes);
  /// Whether bulk goes packed to some peer.
  bool packs_anywhere(MayPack may) const noexcept {
    return may == MayPack::kAlways || (may == MayPack::kWhereItPays && paths_packing_ > 0);
  }
  /// `elements`, a chunk of the stream, packed in `buffer`, which has room for `bytes`; as they are, if they would not
  /// shrink. `elements` must not lie in the buffer.
  Payload pack(Stream& stream, const std::byte* elements, std::size_t bytes, transport::Buffer buffer);
  /// Writes the elements of a packed payload to `out`: payload.bytes() bytes.
  void unpack(const Delivery& payload, std::byte* out);
  Packing& packing() noexcept { return packing_; }
  const Packing& packing() const noexcept { return packing_; }
  /// A round of this thread begins, and ends; `worked`: there was work. So rounds are known in which streams wait.
  void begin_round() noexcept {
    if (paths_waiting_ > 0) measure_round(core::Clock::now());
  }
  void end_round(bool worked) noexcept {
    if (round_began_ == core::TimePoint{}) return;
    if (worked) busy_ = busy(core::Clock::now());
    round_began_ = {};
  }

  /// Whether a connection to the peer was opened and has not failed.
  bool is_open(core::EngineId peer) const;

  /// Serves streams that waited for slots, sends due announcements, reports broken peers. Returns the amount of work.
  std::size_t progress(core::TimePoint now);
  /// The latest time for the next call of progress() (announcements).
  core::TimePoint next_due() const noexcept;
  /// Drops all state about a peer; its streams must have been cancelled.
  void forget(core::EngineId peer);

  /// Limits our use of the peer's allowance to `bytes` from now on, but never below one message. The limit grows where
  /// credit comes back quickly (schedule/window_tuner.h).
  void set_window(core::EngineId peer, std::int64_t bytes,
                  const schedule::WindowTuner::Rounds& rounds = schedule::WindowTuner::kUsual);
  /// True: peers leave data in their kernels for moments, as we do. Then urgent messages always use their connection.
  void set_naps(bool naps) noexcept { naps_ = naps; }
  /// A message of the peer states how many bytes of our allowance the peer uses.
  void note_window(core::EngineId peer, std::int64_t bytes);
  /// A peer that announces a stream is short of allowance: sends it all credit that is due.
  void return_credit(core::EngineId peer);

  /// State of the traffic to a peer, for status reports; no value where nothing was sent to the peer.
  struct Flow {
    std::int64_t window_bytes = 0;
    std::int64_t in_flight_bytes = 0;  // paid from the allowance or under "all chunks" grants, and not returned
    std::size_t streams_waiting = 0;   // streams that wait for a permit
    double path_rate = 0.0;            // bytes a second that the path carried (packing.h); 0: not known
    PathState packing = PathState::kUnknown;
  };
  std::optional<Flow> flow_of(core::EngineId peer) const;
  /// The bytes that the peer has here unconsumed (Delivery::hold()).
  std::int64_t held(core::EngineId peer) const;
  /// The peer has sent more than it may. Ask where a payload would be kept: what was granted is soon consumed.
  bool holds_too_much(core::EngineId peer) const { return held(peer) > options_.held_bytes_max; }
  std::int64_t held_bytes_max() const noexcept { return options_.held_bytes_max; }
  /// Called by Delivery.
  void hold(core::EngineId source, std::int64_t bytes) noexcept { state_of(source).held += bytes; }
  void consumed(core::EngineId source, std::int64_t cost, wire::Permit permit) noexcept;

  transport::BufferPool& pool() noexcept { return pool_; }
  /// The trace that records what this and the rooms above send and receive; null: no trace. Must outlive its use.
  void set_trace(observe::Trace* trace) noexcept { trace_ = trace; }
  observe::Trace* trace() const noexcept { return trace_; }
  /// How often a stream was looked at since the beginning: the measure of the queues' work.
  std::uint64_t looks() const noexcept { return looks_; }
  /// One line per peer and waiting stream, for debugging a stall.
  std::string describe() const;

 private:
  struct PeerState {
    core::EngineId id;
    transport::Endpoint* endpoint = nullptr;
    transport::Endpoint* urgent_endpoint = nullptr;  // equals endpoint where no urgent connection exists
    bool local = false;
    bool broken = false;
    SendBook book;   // what we may send to the peer
    ReturnBook due;  // credit that we owe the peer for its allowance
    std::int64_t held = 0;
    ReturnBook whole_due;  // credit that we owe the peer for chunks under "all chunks" grants
    struct Waiting {
      StreamQueue turn{&Stream::turn_};                // all waiting streams, by priority and first offer
      StreamQueue whole{&Stream::whole_};              // streams with an "all chunks" grant, by priority and grant
      StreamQueue unannounced{&Stream::unannounced_};  // streams that the peer has not been told about
      core::TimePoint since;                           // when the first stream came, or the urgent front moved on
    };
    Waiting urgent;  // urgent streams that wait for a permit
    Waiting bulk;
    bool resumes = false;    // listed in resume_
    bool announces = false;  // listed in announcing_
    std::int64_t traced_window = 0;
    PackingPath path;
    Waiting& of(const Stream& stream) noexcept { return stream.urgent ? urgent : bulk; }
  };
  enum class SendResult { kSent, kNoPermit, kNoSlot, kBroken };
  struct Pumped {
    std::uint32_t chunks = 0;  // chunks that the stream has sent, or got a permit for
    bool goes_on = false;      // the stream could send more than chunks_max
  };

  PeerState& state_of(core::EngineId peer);
  static std::uint32_t window_of(const PeerState& peer) noexcept;
  static bool pay(PeerState& peer, std::int64_t cost, bool urgent) noexcept;
  std::int64_t cost_of(const PeerState& peer, const Stream& stream, std::uint32_t chunk) const noexcept;
  void prepare(Stream& stream);
  Pumped pump(Stream& stream, std::uint32_t chunks_max = ~std::uint32_t{0});
  bool pump_queue(StreamQueue& queue);
  void pump_peer(PeerState& peer);
  void resume(PeerState& peer);
  void trace_window(PeerState& peer);
  struct Sent;
  struct TracedSent;
  transport::SendDone when_sent(const PeerState& peer, const Stream& stream, std::uint32_t chunk, std::size_t bytes,
                                Sent sent);
  SendResult send_chunk(PeerState& peer, Stream& stream, std::uint32_t chunk);
  std::uint32_t serve_wanted(PeerState& peer, Stream& stream, std::uint32_t chunks_max);
  void wait(PeerState& peer, Stream& stream);
  void begin_wait(PeerState& peer, const Stream& stream);
  void end_wait(PeerState& peer);
  void stop_measuring(PathRate& rate);
  void measure_path(PeerState& peer, const Stream& stream, std::size_t bytes, std::size_t wire_bytes);
  void measure_round(core::TimePoint now) noexcept {
    if (round_began_ == core::TimePoint{}) round_began_ = now;
  }
  core::Duration busy(core::TimePoint now) const noexcept {
    return busy_ + (round_began_ == core::TimePoint{} ? core::Duration{} : now - round_began_);
  }
  void starve(const PeerState& peer, Stream& stream, std::uint32_t chunk);
  static void stop_waiting(Stream& stream) noexcept;
  void announce(PeerState& peer, Stream& stream);
  core::Status transmit(PeerState& peer, wire::Message message, const transport::Buffer& buffer = {},
                        transport::SendDone done = {}, bool urgent = false);
  void send_credit(PeerState& peer, ReturnBook& due, wire::Permit of);
  core::Result<transport::Endpoint*> open(PeerState& peer, bool urgent);
  std::size_t class_of(std::size_t bytes) const noexcept;

  core::OneThread one_thread_;
  OutboxOptions options_;
  bool naps_ = false;
  observe::Trace* trace_ = nullptr;
  transport::BufferPool& pool_;
  Router& router_;
  std::unordered_map<core::EngineId, std::unique_ptr<PeerState>> peers_;
  /// Streams that wait for a slot. One queue per size class between nodes, then one per size class to local peers.
  std::deque<StreamQueue> starved_;
  std::vector<std::size_t> net_in_use_;
  std::vector<std::pair<core::EngineId, core::Status>> broken_;
  bool slot_released_ = false;
  std::vector<core::EngineId> resume_;  // peers that may send more
  std::vector<PeerState*> announcing_;  // peers that have not been told of all streams, and maybe others
  std::uint64_t looks_ = 0;
  Packing packing_;
  std::vector<std::byte> packed_;  // for pack()
  std::size_t paths_waiting_ = 0;
  std::size_t paths_packing_ = 0;
  core::IdleCpus idle_cpus_;
  PathRate slow_paths_;            // together
  core::Duration busy_{};          // this thread's work in rounds in which streams waited
  core::TimePoint round_began_{};  // of such a round
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace hybridps::flow
