// hybridps/intranode/shm/shm_transport.h: the transport between engines of one host, without copies.
//
// Model    The engine fills Buffers of a pool in this transport's shared segment; a message carries the place
// of its
//          payload, the receiver reads it where it lies and gives it back. Small payloads travel inside the
//          ring entry. Connecting proves that both processes share a host: see proof().
// Owner    the engine. The pool's memory outlives the transport for as long as keep_pool_memory() is held.
// Threads  as Transport: one at a time; event_fd() is constant. In a forked child every call does nothing.
// Failures a peer whose process ends is reported at once, however it ends, with kPeerDead; one that closed
// its
//          transport or its endpoint with kClosed; one whose rings hold nonsense with kPeerDead. Payloads
//          received from it stay readable until given back; payloads it still reads are let go when it is
//          gone.
#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "hybridps/core/fork.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/status.h"
#include "hybridps/core/descriptor.h"
#include "hybridps/intranode/shm/handshake.h"
#include "hybridps/intranode/shm/ring.h"
#include "hybridps/intranode/shm/segment.h"
#include "hybridps/transport/transport.h"

namespace hybridps::intranode::shm {

class ShmEndpoint;

struct ShmOptions {
  core::EngineId self;
  /// Memory for the engine's BufferPool; pages are taken when first used. 0: messages without payload only.
  std::size_t pool_bytes = std::size_t{256} << 20;
  /// Engines of this host that may be connected at the same time; each takes memory when it comes.
  std::uint32_t peers_max = 512;
  /// Messages to this engine that wait in one peer's ring; more wait in the sender's heap. Power of two.
  std::uint32_t ring_entries = 256;
  /// Payloads that one peer may hold by reference; more wait in the sender's heap, and small messages
  /// overtake them. Power of two.
  std::uint32_t release_entries = 4096;
  /// How long a stranger may stay connected to the socket without a valid hello.
  std::chrono::milliseconds hello_deadline{5000};
};

enum class ProofState {
  kPending,  // not connected yet, or the exchange is under way
  kProven,   // each side read and wrote the other's memory
  kFailed,   // not on this host, refused, or gone
};
struct Proof {
  ProofState state = ProofState::kPending;
  core::Status reason;  // kFailed: why
};

/// Exact, since creation.
struct ShmCounters {
  std::uint64_t wakeups_sent = 0;     // eventfd writes: the peer slept
  std::uint64_t polls = 0;            // epoll_wait calls: the only system call of a progress() that finds no failure
  std::uint64_t messages_queued = 0;  // went through the heap: not connected yet, ring full, too many payloads out
  std::uint64_t strangers_dropped = 0;
};

class ShmTransport final : public transport::Transport {
 public:
  static core::Result<std::unique_ptr<ShmTransport>> create(const ShmOptions& options);
  /// Says goodbye to all peers; each pending done gets kClosed, in here.
  ~ShmTransport() override;

  /// Where the engine makes its BufferPool; the only memory that attach() accepts.
  std::span<std::byte> pool_memory() const noexcept;
  /// Keeps pool_memory() mapped beyond the transport, for a BufferPool that is destroyed after it.
  std::shared_ptr<void> keep_pool_memory() const noexcept { return pool_; }
  /// Whether `peer` was shown to share this host's memory. Either side may have connected.
  Proof proof(core::EngineId peer) const;
  ShmCounters counters() const noexcept { return counters_; }

  std::string_view name() const noexcept override { return "shm"; }
  core::Status attach(std::span<std::byte> pool_memory) override;
  std::vector<std::byte> address() const override;
  core::Result<transport::Endpoint*> connect(core::EngineId peer, std::span<const std::byte> address) override;
  transport::Endpoint* find(core::EngineId peer) noexcept override;
  std::size_t progress() override;
  int event_fd() const noexcept override { return poller_.get(); }
  bool arm() override;
  bool has_unsent() const noexcept override;
  void set_receiver(transport::Receiver* receiver) noexcept override { receiver_ = receiver; }
  transport::TransportStats stats() const noexcept override;

 private:
  friend class ShmEndpoint;
  /// User code runs from progress() only, at one place: buffers are dropped there too, as their pool has a
  /// hook.
  struct ShmCompletion {
    transport::SendDone done;
    core::Status status;
    transport::Buffer payload;
  };
  /// A small payload, copied out of its ring entry.
  struct alignas(kCacheLineBytes) InlinePayload {
    std::array<std::byte, kInlineBytesMax> bytes;
  };
  /// A connection to our socket that has not said hello yet.
  struct Stranger {
    core::Descriptor socket;
    std::chrono::steady_clock::time_point deadline;
  };

  explicit ShmTransport(const ShmOptions& options);
  core::Status start();
  bool in_forked_child() const noexcept { return born_ != core::fork_generation(); }

  static std::uint64_t endpoint_tag(std::uint32_t index) noexcept;
  bool poll_is_due() noexcept;
  std::size_t poll();
  void watch(int fd, std::uint32_t events, std::uint64_t tag) noexcept;
  void unwatch(int fd) noexcept;
  void accept_strangers();
  void serve_stranger(std::uint32_t serial);
  void run_timers();
  void set_timer() noexcept;
  std::size_t run_completions();
  std::size_t report_failures();
  transport::RxPayload copy_inline(std::span<const std::byte> payload);
  static void release_inline(void* context, void* token, std::uint64_t extra) noexcept;

  ShmEndpoint& add_endpoint(core::EngineId peer);
  ShmEndpoint* look_up(core::EngineId peer) const noexcept;
  bool take_slot(std::uint32_t& slot);
  std::byte* slot_memory(std::uint32_t slot) const noexcept;
  std::size_t slot_offset_bytes(std::uint32_t slot) const noexcept;

  const ShmOptions options_;
  const SlotLayout layout_;
  const std::uint64_t born_;
  std::string socket_name_;
  std::unique_ptr<Segment> control_;
  std::shared_ptr<Segment> pool_;
  bool attached_ = false;
  EngineControl* sleep_ = nullptr;
  core::Descriptor listener_;
  core::Descriptor event_;  // peers write it when we sleep; edge-triggered, never read
  core::Descriptor timer_;
  core::Descriptor poller_;  // epoll over all of them and each peer's socket

  std::vector<std::unique_ptr<ShmEndpoint>> endpoints_;  // never shrinks: endpoints live as long as we do
  std::vector<ShmEndpoint*> live_;                       // still have a connection or hold memory
  std::unordered_map<core::EngineId, ShmEndpoint*> by_peer_;
  std::vector<std::uint32_t> slots_free_;
  std::vector<bool> slots_used_before_;
  std::unordered_map<std::uint32_t, Stranger> strangers_;
  std::uint32_t strangers_seen_ = 0;
  bool accepting_ = true;
  std::uint32_t handshakes_ = 0;  // endpoints on their way to being proven

  std::vector<ShmCompletion> completions_;
  std::vector<ShmCompletion> completions_running_;
  std::vector<ShmEndpoint*> failures_;  // to report
  std::vector<std::unique_ptr<InlinePayload>> inline_free_;
  transport::Receiver* receiver_ = nullptr;
  bool armed_ = false;
  std::uint32_t calls_since_clock_ = 0;
  std::int64_t tick_ns_ = 0;  // of the coarse clock, at the last poll
  transport::TransportStats stats_;
  ShmCounters counters_;
};

}  // namespace hybridps::intranode::shm
