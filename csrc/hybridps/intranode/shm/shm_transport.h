// hybridps/intranode/shm/shm_transport.h: the transport between engines of one host, without copies.
//
// Model    The engine fills Buffers of a pool in this transport's shared segment. A message carries the place of its
//          payload. The receiver reads the payload in place and gives it back. Small payloads travel inside the ring
//          entry. Connecting proves that both processes share a host: see proof().
// Owner    the engine. The pool's memory outlives the transport as long as keep_pool_memory() is held.
// Threads  as Transport: one at a time; event_fd() is constant. In a forked child every call does nothing.
// Failures a peer whose process ends in any way is reported at once, with kPeerDead. A peer that closed its transport
//          or its endpoint is reported with kClosed, and a peer with nonsense in its rings with kPeerDead. Payloads
//          received from a failed peer stay readable until given back. Payloads that a peer still reads are released
//          when the peer is gone.
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
  /// Engines of this host that may be connected at the same time. Each takes memory when it connects.
  std::uint32_t peers_max = 512;
  /// Messages to this engine that one peer's ring holds; more wait in the sender's heap. Power of two.
  std::uint32_t ring_entries = 256;
  /// Payloads that one peer may hold by reference. More wait in the sender's heap, and small messages overtake them.
  /// Power of two.
  std::uint32_t release_entries = 4096;
  /// How long a stranger may stay connected without a valid hello.
  std::chrono::milliseconds hello_deadline{15000};
};

enum class ProofState {
  kPending,  // not connected yet, or the handshake is under way
  kProven,   // each side read and wrote the other's memory
  kFailed,   // not on this host, refused, or gone
};
struct Proof {
  ProofState state = ProofState::kPending;
  core::Status reason;  // kFailed: why
};

/// Exact counts since creation.
struct ShmCounters {
  std::uint64_t wakeups_sent = 0;     // eventfd writes: the peer was asleep
  std::uint64_t polls = 0;            // epoll_wait calls; a progress() without failures makes no other system call
  std::uint64_t messages_queued = 0;  // queued in the heap: not connected yet, ring full, or too many payloads out
  std::uint64_t strangers_dropped = 0;
};

class ShmTransport final : public transport::Transport {
 public:
  static core::Result<std::unique_ptr<ShmTransport>> create(const ShmOptions& options);
  /// Says goodbye to all peers. Each pending `done` gets kClosed, inside the destructor.
  ~ShmTransport() override;

  /// The memory for the engine's BufferPool. attach() accepts only this memory.
  std::span<std::byte> pool_memory() const noexcept;
  /// Keeps pool_memory() mapped longer than the transport, for a BufferPool that is destroyed later.
  std::shared_ptr<void> keep_pool_memory() const noexcept { return pool_; }
  /// Whether `peer` has proven that it shares this host's memory. Either side may have connected.
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
  /// Work for run_completions(), which progress() and the destructor call. `done` runs only there. Buffers are dropped
  /// there too, because their pool has a hook.
  struct ShmCompletion {
    transport::SendDone done;
    core::Status status;
    transport::Buffer payload;
  };
  /// A small payload, copied out of its ring entry.
  struct alignas(kCacheLineBytes) InlinePayload {
    std::array<std::byte, kInlineBytesMax> bytes;
  };
  /// A connection to our socket without a hello so far.
  struct Stranger {
    core::Descriptor socket;
    std::chrono::steady_clock::time_point deadline;
    std::array<Nonce, 2> nonces{};  // its own and ours; zeros: it has not met us
    core::EngineId from{};          // as it said then
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
  core::Result<std::unique_ptr<Segment>> make_slot() const;

  const ShmOptions options_;
  const SlotLayout layout_;
  const std::uint64_t born_;
  std::string socket_name_;
  Secret128 secret_{};
  std::unique_ptr<Segment> control_;
  std::shared_ptr<Segment> pool_;
  bool attached_ = false;
  EngineControl* sleep_ = nullptr;
  core::Descriptor listener_;
  core::Descriptor event_;  // peers write it when we sleep; edge-triggered, never read
  core::Descriptor timer_;
  core::Descriptor poller_;  // epoll over the descriptors above and each peer's socket

  std::vector<std::unique_ptr<ShmEndpoint>> endpoints_;  // never shrinks: endpoints live as long as the transport
  std::vector<ShmEndpoint*> live_;                       // endpoints that have a connection or hold memory
  std::unordered_map<core::EngineId, ShmEndpoint*> by_peer_;
  std::uint32_t slots_in_use_ = 0;
  std::unordered_map<std::uint32_t, Stranger> strangers_;
  std::uint32_t strangers_seen_ = 0;
  bool accepting_ = true;
  std::uint32_t handshakes_ = 0;  // endpoints that are not proven yet

  std::vector<ShmCompletion> completions_;
  std::vector<ShmCompletion> completions_running_;
  std::vector<ShmEndpoint*> failures_;  // endpoints whose failure must be reported
  std::vector<std::unique_ptr<InlinePayload>> inline_free_;
  transport::Receiver* receiver_ = nullptr;
  bool armed_ = false;
  std::uint32_t calls_since_clock_ = 0;
  std::int64_t tick_ns_ = 0;  // the coarse clock at the last poll
  transport::TransportStats stats_;
  ShmCounters counters_;
};

}  // namespace hybridps::intranode::shm
