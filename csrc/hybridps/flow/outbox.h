// hybridps/flow/outbox.h: who may send what to whom, and when: eager allowance, announce, grant.
//
// Model    A Stream is one span's chunks on their way to one peer. Its owner (worker or server) offers chunks as their
//          data becomes available; the Outbox sends each as soon as it has a permit:
//            eager    each peer allows a number of bytes that nobody has asked for ("allowance"); it comes back with the
//                     peer's Credit messages once it has consumed them. We may use less of it than we are allowed
//                     (set_window()), so that many peers together do not flood one receiver; every message says how
//                     much, since the peer returns credit in parts of that;
//            granted  when the allowance is spent the stream announces itself (one header); the peer grants chunks once
//                     it knows that they can be used up in bounded time. "All chunks" is granted by who uses them up as
//                     they come; across the network their sender keeps to the window here too, by credit of its own.
//          No staging memory is held while waiting for a permit: a chunk's bytes are produced (Source::payload) only
//          when it may go. That, and grants that are given only to work that can finish, is why operations of different
//          groups may be issued in different orders on different ranks (docs/architecture.md, Memory).
// Order    Per peer urgent streams (tiny operations) go first, then streams by priority, those of one priority in order of
//          their first offer. It is looked at for every chunk, so that what comes late passes the rest of what is under way;
//          of kPassesMax + 1 chunks one is of a stream that is passed, so that none waits for ever. Peers do
//          not wait for each other: a bulk operation walks its owners as their allowances come back. Urgent messages take
//          a connection of their own while bulk is under way on the other (or always: OutboxOptions::urgent_always).
// Cost     Whatever comes (an offer, a credit, a grant, a free slot) looks at the streams that it lets go, and at most one
//          more in each queue: how many wait makes no difference.
// Threads  the engine's progress thread.
// Errors   a peer that cannot be sent to is reported to the Router, once, from progress().
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

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/credit.h"
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
  std::int64_t eager_bytes = 0;  // its allowance for us
};

class Router {
 public:
  virtual ~Router() = default;
  virtual core::Result<transport::Endpoint*> connect(core::EngineId peer) = 0;
  /// A connection that carries no bulk; nullptr: there is none.
  virtual core::Result<transport::Endpoint*> connect_urgent(core::EngineId) {
    return static_cast<transport::Endpoint*>(nullptr);
  }
  virtual Peer describe(core::EngineId peer) = 0;
  virtual void on_unreachable(core::EngineId peer, core::Status cause) = 0;
};

struct OutboxOptions {
  core::EngineId self;
  /// Allowance that we return in one Credit message: a fraction of what we allow others.
  std::int64_t credit_batch_bytes = 128 * 1024;
  /// Slots per size class of the pool that messages between nodes may hold together; the rest is kept for local peers,
  /// who may hold what they were sent until others deliver.
  std::vector<std::size_t> net_slots;
  std::vector<std::size_t> class_bytes;  // of the pool, rising
  /// Bytes in flight to one local peer under "all chunks" grants.
  std::int64_t granted_bytes_max = 256 * 1024;
  /// Urgent messages take the connection that carries no bulk even where none is under way: it is the quicker one.
  bool urgent_always = false;
  /// A stream without a permit announces itself after this long.
  core::Duration announce_after = std::chrono::microseconds(500);
};

/// A received payload that gives the sender's allowance back when it is consumed. Move-only.
class Delivery {
 public:
  Delivery() = default;
  /// `cost` of which account (wire::Data).
  Delivery(transport::RxPayload payload, Outbox* outbox, core::EngineId source, std::int64_t cost,
           wire::Permit permit = wire::Permit::kAllowance) noexcept
      : payload_(std::move(payload)), outbox_(outbox), source_(source), cost_(cost), permit_(permit) {}
  Delivery(Delivery&& other) noexcept { *this = std::move(other); }
  Delivery& operator=(Delivery&& other) noexcept;
  ~Delivery() { reset(); }

  const std::byte* data() const noexcept { return payload_.data(); }
  std::size_t bytes() const noexcept { return payload_.bytes(); }
  void reset() noexcept;

 private:
  transport::RxPayload payload_;
  Outbox* outbox_ = nullptr;
  core::EngineId source_;
  std::int64_t cost_ = 0;
  wire::Permit permit_ = wire::Permit::kAllowance;
};

class Outbox : core::Pinned {
 public:
  Outbox(OutboxOptions options, transport::BufferPool& pool, Router& router);
  ~Outbox();

  /// The chunk's data is available: send it now or when permitted. Each chunk at most once.
  void offer(Stream& stream, std::uint32_t chunk);
  /// Asks for a permit for a chunk whose data is not available yet; Source::on_permitted answers (perhaps at once).
  void want(Stream& stream, std::uint32_t chunk);
  /// Forgets a stream that will send no more. Required before destroying one that is not all_sent().
  void cancel(Stream& stream);
  /// A Grant for the stream arrived.
  void granted(Stream& stream, std::uint32_t chunk);
  /// A Credit message arrived.
  void on_credit(core::EngineId peer, const wire::Credit& credit);

  /// A message without payload, at once.
  void send(core::EngineId peer, wire::Message message);
  /// A message with a short text as payload (cut to the largest size class); dropped when no slot is free.
  void send_text(core::EngineId peer, wire::Message message, std::string_view text);

  /// Whether a connection to the peer was opened and has not failed.
  bool is_open(core::EngineId peer) const;

  /// Streams that waited for slots, announcements that are due, peers that broke. Returns what it did.
  std::size_t progress(core::TimePoint now);
  /// When progress() wants to be called next at the latest (announcements).
  core::TimePoint next_due() const noexcept;
  /// Drops all state about a peer; its streams must have been cancelled.
  void forget(core::EngineId peer);

  /// Use so many bytes of the peer's allowance from now on (at least one message in any case), and more where credit
  /// comes back quickly (schedule/window_tuner.h).
  void set_window(core::EngineId peer, std::int64_t bytes,
                  const schedule::WindowTuner::Rounds& rounds = schedule::WindowTuner::kUsual);
  /// Peers leave data to their kernels for moments, as we do: what is urgent takes its own connection, also where no bulk of
  /// ours is under way.
  void set_naps(bool naps) noexcept { naps_ = naps; }
  /// A peer's message says how much of our allowance it uses.
  void note_window(core::EngineId peer, std::int64_t bytes);
  /// A peer announces a stream: it is short of allowance, so it gets back what is due.
  void return_credit(core::EngineId peer);

  /// How what goes to a peer stands, for people; nothing where nothing has gone to it.
  struct Flow {
    std::int64_t window_bytes = 0;
    std::int64_t in_flight_bytes = 0;  // of its allowance, not given back
    std::size_t streams_waiting = 0;   // for a permit
  };
  std::optional<Flow> flow_of(core::EngineId peer) const;
  /// Called by Delivery.
  void consumed(core::EngineId source, std::int64_t cost, wire::Permit permit) noexcept;

  transport::BufferPool& pool() noexcept { return pool_; }
  /// What is sent and received, here and by those above; null: nothing is. It must outlive its use.
  void set_trace(observe::Trace* trace) noexcept { trace_ = trace; }
  observe::Trace* trace() const noexcept { return trace_; }
  /// How often a stream was looked at, since the beginning: what the work of the queues is measured by.
  std::uint64_t looks() const noexcept { return looks_; }
  /// One line per peer and waiting stream, for debugging a stall.
  std::string describe() const;

 private:
  struct PeerState {  // one peer
    core::EngineId id;
    transport::Endpoint* endpoint = nullptr;
    transport::Endpoint* urgent_endpoint = nullptr;  // the same where there is no other
    bool local = false;
    bool broken = false;
    SendBook book;         // what we may send it
    ReturnBook due;        // what we owe it: of the allowance, and
    ReturnBook whole_due;  // of what it sent under "all chunks" grants
    struct Waiting {
      StreamQueue turn{&Stream::turn_};                // all, by priority and first offer
      StreamQueue whole{&Stream::whole_};              // those granted as a whole, by priority and grant
      StreamQueue unannounced{&Stream::unannounced_};  // those that the peer has not been told of
      core::TimePoint since;                           // when the first came; of urgent ones, when the last went
    };
    Waiting urgent;  // for a permit
    Waiting bulk;
    bool resumes = false;  // in resume_
    std::int64_t traced_window = 0;
    Waiting& of(const Stream& stream) noexcept { return stream.urgent ? urgent : bulk; }
  };
  enum class SendResult { kSent, kNoPermit, kNoSlot, kBroken };
  struct Pumped {
    std::uint32_t chunks = 0;  // that it has sent, or got a permit for
    bool goes_on = false;      // it could send more than it was let
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
  /// Streams that found no slot, by what would do: a size class, between nodes or to a local peer.
  std::deque<StreamQueue> starved_;
  std::vector<std::size_t> net_in_use_;
  std::vector<std::pair<core::EngineId, core::Status>> broken_;
  bool slot_released_ = false;
  std::vector<core::EngineId> resume_;  // peers that may send more
  std::uint64_t looks_ = 0;
  std::shared_ptr<bool> alive_ = std::make_shared<bool>(true);
};

}  // namespace hybridps::flow
