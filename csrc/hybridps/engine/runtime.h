// hybridps/engine/runtime.h: the engine without its threads: transports, flow, server and worker put together.
//
// Model    One object, driven by one thread that calls progress() in a loop and sleeps when every transport is armed.
//          Tests drive several of them in one thread over loopback transports; engine.cpp puts one on a thread.
// Threads  none of its own; one thread at a time. counters() may be read from any thread.
// Errors   a dead peer fails the groups that it belongs to (worker/worker.h).
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/liveness.h"
#include "hybridps/engine/unopened_groups.h"
#include "hybridps/engine/wake_moderation.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/observe/counters.h"
#include "hybridps/observe/json.h"
#include "hybridps/observe/metrics.h"
#include "hybridps/server/dedicated_server.h"
#include "hybridps/server/server.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/transport/transport.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

struct RuntimeOptions {
  core::EngineId self;
  std::size_t eager_bytes = 512 * 1024;  // what we allow each peer
  std::size_t chunk_bytes = 64 * 1024;   // largest chunk of any group
  std::uint32_t grant_chunks = 4;
  std::uint64_t retained_bytes = worker::WorkerOptions().retained_bytes;
  std::size_t local_peers = 7;            // for which the pool has room to be generous
  bool keep_early = true;                 // messages of groups that are not open yet; a dedicated server needs none
  std::size_t window_bytes = 128 * 1024;  // see Runtime::choose_windows()
  std::size_t cards = 1;                  // that data comes through
  double warn_seconds = 10;
  std::size_t early_messages_max = std::size_t{1} << 20;  // worker::WorkerOptions
  UnopenedGroups::Limits unopened;
  bool urgent_by_control = false;  // small operations take the control transport, where they wait behind no bulk
  bool urgent_always = false;      // with it: also where no bulk is under way
  bool may_nap = false;            // data waits in the kernel's buffers, and nothing urgent comes with it
  bool find_rates = true;          // shares follow what the network is found to carry
  bool tune = false;               // of groups that this engine is rank 0 of (schedule/tuner.h)
  double heartbeat_seconds = 1;
  double dead_seconds = 5;
};

struct PeerRecord {
  core::EngineId engine;
  bool local = false;  // memory proven to be shared
  std::vector<std::byte> data_address;
  std::vector<std::byte> control_address;
  std::vector<std::byte> shm_address;
  std::string where;              // "host7 pid 4121", for messages
  std::uint64_t eager_bytes = 0;  // what it allows us
};

/// The transports of one engine. shm may be absent; control may be absent (data is used then).
struct Transports {
  std::unique_ptr<transport::Transport> data;
  std::unique_ptr<transport::Transport> control;
  std::unique_ptr<transport::Transport> shm;
};

class Runtime final : public flow::Router, public worker::Host, public server::DedicatedHost, core::Pinned {
 public:
  /// Classes of the send pool for these options, and the bytes they need.
  static std::vector<transport::BufferPool::SizeClass> pool_classes(const RuntimeOptions& options,
                                                                    std::size_t bytes_max);
  static std::size_t pool_bytes(const std::vector<transport::BufferPool::SizeClass>& classes);

  /// `memory`: for the pool, at least pool_bytes(); `keep` holds it for as long as this lives.
  static core::Result<std::unique_ptr<Runtime>> create(RuntimeOptions options, std::span<std::byte> memory,
                                                       std::shared_ptr<void> keep, Transports transports);
  ~Runtime() override;

  void add_peer(PeerRecord peer);
  /// All engines in `info` must have been added.
  worker::GroupState& open_group(worker::GroupInfo info);
  /// Fails what is pending; later messages of the group are dropped.
  void close_group(core::GroupUid uid);
  /// The messages of a group that will not be opened here (any more) are dropped, those that came early and later ones.
  void forget_group(core::GroupUid uid);
  worker::Worker& worker() noexcept { return *worker_; }
  /// A group for which this engine is a dedicated server. Its engines must have been added. It closes itself when its
  /// members have left or failed.
  void open_served_group(server::ServedGroup group);
  server::DedicatedServer& dedicated() noexcept { return *dedicated_; }
  const server::DedicatedStats& dedicated_stats() const noexcept { return dedicated_->stats(); }
  bool knows(core::EngineId peer) const { return peers_.count(peer) > 0; }
  std::size_t peers_known() const noexcept { return peers_.size(); }

  std::size_t progress();
  /// The clock as the last progress() read it.
  core::TimePoint now() const noexcept { return now_; }
  /// Brings counters() up to date. It walks over all connections: not for every round.
  void update_counters();

  /// As worker::Host's calls of these names.
  struct Hooks {
    std::function<void(core::GroupUid, const core::Status& status, const core::Status& cause, bool found_here)>
        group_failed;
    std::function<void(core::GroupUid)> group_waits;
    // Of the status of a job (status_desk.h).
    std::function<void(core::EngineId from, const wire::StatusAsk&)> status_asked;
    std::function<void(core::EngineId from, const wire::StatusAnswer&, std::span<const std::byte>)> status_answered;
    std::function<void(core::EngineId, const core::Status& cause)> peer_gone;
  };
  /// Those that are set replace earlier ones.
  void set_hooks(Hooks hooks);
  /// Peers of open groups that are not known to be dead.
  std::vector<core::EngineId> peers_in_use() const;
  std::string where(core::EngineId peer) const;
  /// Since something came from it; less than 0: nothing yet.
  double seconds_since_heard(core::EngineId peer) const;
  /// Fields of the object that `json` is in: the network, memory, and peers of open groups, `peers_max` at most.
  void write_status(observe::Json& json, std::size_t peers_max) const;
  /// Of the table of metrics (observe/metrics.h) all that an engine has. `name` gives ranks their labels.
  std::vector<observe::Sample> samples(const std::function<std::string(core::EngineId)>& name);
  /// True: every transport is armed, nothing to do before next_due() or an event.
  bool arm();
  /// Whoever called progress() does something else now, for how long nobody knows.
  void pause() noexcept { armed_ = true; }
  core::TimePoint next_due() const;
  /// Until then data may be left to the kernel's buffers, if nothing urgent comes; the epoch: it may not.
  core::TimePoint nap_until();

  /// No operation of this rank is under way and no message waits to leave: nobody waits for this engine's progress.
  bool is_quiet() const;
  /// A verdict that was sent has not been answered yet (bounded in time): leaving now could make this engine look like
  /// the cause of what it reported.
  bool has_unanswered_verdicts() const noexcept { return !unanswered_verdicts_.empty(); }
  /// All other members of a group that has failed are gone, or have sent a verdict on it, or have answered ours.
  bool all_know_of_failure(const worker::GroupState& group) const;
  /// File descriptors to sleep on, constant.
  /// `data`: that of the data transport, too.
  std::vector<int> event_fds(bool data = true) const;

  /// Operations may then name memory that lies in it as their device_memory (worker/operation.h). `keep` is held until
  /// detach_device(), or the end of this. Errors: the data transport's.
  core::Status attach_device(const transport::DeviceMemory& memory, std::shared_ptr<void> keep);
  /// No operation and no transport has any of it left. Not from inside progress().
  void detach_device(std::span<std::byte> memory);

  /// From now on what happens is written there; null: no more. It must outlive its use. Not from inside progress().
  void set_trace(observe::Trace* trace);

  transport::Transport* shm() noexcept { return transports_.shm.get(); }
  const observe::EngineCounters& counters() const noexcept { return counters_; }
  transport::BufferPool& pool() noexcept { return *pool_; }
  const flow::Outbox& outbox() const noexcept { return *outbox_; }

  // flow::Router
  core::Result<transport::Endpoint*> connect(core::EngineId peer) override;
  core::Result<transport::Endpoint*> connect_urgent(core::EngineId peer) override;
  flow::Peer describe(core::EngineId peer) override;
  void on_unreachable(core::EngineId peer, core::Status cause) override;
  // worker::Host
  void send_control(core::EngineId to, wire::Message message, std::string_view text) override;
  void on_group_failed(core::GroupUid uid, const core::Status& status, const core::Status& cause,
                       bool found_here) override;
  void on_group_waits(core::GroupUid uid) override;
  std::uint64_t bytes_through_card() const override;
  void send_now() override {
    transports_.data->send_now();
    if (transports_.control) transports_.control->send_now();
  }
  core::Result<worker::Newcomer> meet(core::GroupUid uid, std::span<const std::byte> record) override;
  void part(core::GroupUid uid, core::EngineId server) override;
  void on_joined(core::GroupUid uid, const std::vector<core::EngineId>& servers) override;
  void on_shares(core::GroupUid uid, const schedule::Topology& topology) override;
  void on_server_lost(core::EngineId server, const std::string& why) override;
  // worker::Host, server::DedicatedHost
  void on_tuning(core::GroupUid uid, const schedule::Tuning& tuning) override;
  // server::DedicatedHost
  void on_served_group_closed(core::GroupUid uid, const core::Status& why) override;

 private:
  class Inlet final : public transport::Receiver {
   public:
    Inlet(Runtime& runtime, bool memory) : runtime_(runtime), memory_(memory) {}
    void on_message(std::span<const std::byte> header, transport::RxPayload payload) noexcept override {
      runtime_.on_message(header, std::move(payload));
    }
    void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
      runtime_.suspects_.report(peer, std::move(cause), memory_);
    }

   private:
    Runtime& runtime_;
    const bool memory_;
  };
  struct Peer {
    PeerRecord record;
    bool dead = false;
    std::uint64_t groups = 0;
    core::TimePoint unused_since{};  // groups became 0
    core::TimePoint heard_at{};
    double round_trip_seconds = 0;  // of the last ping or question of status; 0: not known
  };
  /// Of a group.
  struct Windows {
    schedule::Topology topology;
    std::vector<std::uint64_t> bytes;  // per engine
    std::uint16_t step = 0;            // schedule::Tuning::window_step
  };

  Runtime(RuntimeOptions options, std::span<std::byte> memory, std::shared_ptr<void> keep, Transports transports);
  core::Status attach();
  void on_message(std::span<const std::byte> header, transport::RxPayload payload) noexcept;
  /// Heartbeats, credit, answers: what is of no group, or of one whatever its state. Whether that was all.
  bool on_engine_message(const wire::Message& message, std::span<const std::byte> payload);
  void note_round_trip(Peer& peer, std::uint64_t sent_ns, std::uint64_t theirs_ns);
  void sample_rates(core::TimePoint now);
  void trace_group(const worker::GroupInfo& info);
  void trace_work(std::uint64_t began, std::uint64_t now, bool worked);
  void ask_for_time(core::TimePoint now);
  flow::Delivery with_cost(const wire::Message& message, transport::RxPayload payload);
  void deliver(worker::GroupState& group, const wire::Message& message, transport::RxPayload payload);
  std::size_t judge_suspects(core::TimePoint now);
  void peer_failed(core::EngineId peer, core::Status cause, bool silent);
  void close_connections(core::EngineId peer, const core::Status& cause);
  void leave_parted();
  bool lacks_descriptors(core::EngineId peer) const;
  void heartbeat(core::TimePoint now);
  /// Messages that nobody here waits for: what their senders paid for them goes back.
  void let_go(UnopenedGroups::Messages messages);
  void choose_watched();
  void join(core::GroupUid uid, std::vector<core::EngineId> engines, const schedule::Topology& topology);
  void forget_unused(core::TimePoint now);
  Windows windows_of(const schedule::Topology& topology, std::uint16_t step) const;
  void look_at_flow(core::TimePoint now);
  void choose_windows();

  core::OneThread one_thread_;
  const RuntimeOptions options_;
  std::shared_ptr<void> keep_;
  std::vector<std::pair<std::span<std::byte>, std::shared_ptr<void>>> device_memory_;  // outlives the transports
  std::unique_ptr<transport::BufferPool> pool_;
  Transports transports_;
  std::vector<std::unique_ptr<Inlet>> inlets_;
  std::unique_ptr<flow::Outbox> outbox_;
  std::unique_ptr<server::Server> server_;
  std::unique_ptr<worker::Worker> worker_;
  std::unique_ptr<server::DedicatedServer> dedicated_;
  std::unordered_map<core::EngineId, Peer> peers_;
  std::map<core::GroupUid, std::vector<core::EngineId>> group_engines_;
  std::map<core::GroupUid, Windows> group_windows_;
  std::map<core::GroupUid, std::vector<core::EngineId>> newcomers_;  // that were met, and have not joined yet
  std::vector<core::EngineId> parted_;  // of these, not at once: parting is called from inside transports
  std::unordered_set<core::GroupUid> closed_;
  std::deque<core::GroupUid> closed_order_;
  UnopenedGroups unopened_;
  Heartbeats heartbeats_;
  WakeModeration moderation_;
  core::TimePoint next_look_{};
  struct RateSample {
    core::TimePoint at;
    std::uint64_t tx = 0;
    std::uint64_t rx = 0;
  };
  std::deque<RateSample> rate_samples_;  // of the last second
  core::TimePoint next_sample_{};
  // While there is a trace.
  std::uint64_t works_since_ns_ = 0;  // rounds in a row that had something to do
  core::TimePoint next_time_{};
  core::TimePoint napped_at_{};
  struct Flow {                       // what windows follow
    std::uint64_t windows = 1;        // times window_bytes
    std::uint64_t usual_windows = 1;  // times what is usual, for windows that are tuned
    bool naps = false;
    bool operator==(const Flow&) const = default;
  };
  Flow flow_;
  Suspects suspects_;
  std::unordered_map<core::EngineId, core::TimePoint> unanswered_verdicts_;  // peer -> waited for until
  core::TimePoint next_forgetting_{};
  std::uint64_t progress_calls_ = 0;
  bool look_everywhere_ = false;  // arm() found something: the next round looks at every transport
  bool armed_ = true;             // time may have passed since the last round
  bool all_are_local_ = false;    // the members of all groups (there are some) are on this node
  core::TimePoint now_{};
  observe::EngineCounters counters_;
  Hooks hooks_;
};

}  // namespace hybridps::engine
