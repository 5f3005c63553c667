// hybridps/engine/runtime.h: the engine without its threads: transports, flow, server and worker put together.
//
// Model    One thread drives a Runtime: the thread calls progress() in a loop and sleeps when every transport is armed.
//          Tests drive several Runtimes in one thread, over loopback transports. engine.cpp puts a Runtime on a thread.
// Threads  none of its own; one thread at a time. counters() may be read from any thread.
// Errors   a dead peer fails every group that the peer is a member of (worker/worker.h).
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

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/control_sender.h"
#include "hybridps/engine/evidence.h"
#include "hybridps/engine/peers.h"
#include "hybridps/engine/report.h"
#include "hybridps/engine/runtime_options.h"
#include "hybridps/engine/unopened_groups.h"
#include "hybridps/engine/wake_moderation.h"
#include "hybridps/engine/watch_list.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/schedule/group_windows.h"
#include "hybridps/server/dedicated_server.h"
#include "hybridps/server/server.h"
#include "hybridps/transport/buffer_pool.h"
#include "hybridps/transport/transport.h"
#include "hybridps/worker/worker.h"

namespace hybridps::engine {

class Runtime final : public flow::Router, public worker::Host, public server::DedicatedHost, core::Pinned {
 public:
  /// `memory` is for the pool: at least RuntimeOptions::pool_bytes(). `keep` holds `memory` while the Runtime lives.
  static core::Result<std::unique_ptr<Runtime>> create(RuntimeOptions options, std::span<std::byte> memory,
                                                       std::shared_ptr<void> keep, Transports transports);
  ~Runtime() override;

  void add_peer(PeerRecord peer);
  /// All engines in `info` must have been added.
  worker::GroupState& open_group(worker::GroupInfo info);
  /// Opens a connection between each two nodes of the group: this rank's part of them. So two nodes that cannot reach
  /// each other fail the group at its start, not at their first operation.
  void dial_nodes(const worker::GroupState& group);
  /// Fails pending operations. Later messages of the group are dropped.
  void close_group(core::GroupUid uid);
  /// For a group that will not be opened here, or not again: drops its early messages, and its messages from now on.
  void forget_group(core::GroupUid uid);
  worker::Worker& worker() noexcept { return *worker_; }
  /// The group with most ranks, this engine among them. One that works counts twice. Null: none.
  const worker::GroupState* largest_group();
  /// Of an open group, for which this engine may be a dedicated server; null: no such group.
  const schedule::Members* members_of(core::GroupUid uid) const;
  /// Opens a group for which this engine is a dedicated server. The group's engines must have been added. The group
  /// closes itself when its members have left or failed.
  void open_served_group(server::ServedGroup group);
  server::DedicatedServer& dedicated() noexcept { return *dedicated_; }
  const server::DedicatedStats& dedicated_stats() const noexcept { return dedicated_->stats(); }
  const Peers& peers() const noexcept { return peers_; }

  std::size_t progress();
  /// The clock as the last progress() read it.
  core::TimePoint now() const noexcept { return now_; }
  // See Report (engine/report.h).
  const observe::Counters& counters() const noexcept { return report_.counters(); }
  void update_counters() { report_.update(reported(), windows_.groups().size()); }
  std::vector<observe::Sample> samples(const std::function<std::string(core::EngineId)>& name) {
    update_counters();
    return report_.samples(reported(), name);
  }
  void write_status(observe::Json& json, std::size_t peers_max) {
    report_.write_status(reported(), json, peers_max, {});
  }
  /// The same for `asker`. A dedicated server tells nothing of groups that the asker is not in.
  void write_status_for(core::EngineId asker, observe::Json& json, std::size_t peers_max);

  /// Hooks for the engine. The hooks for groups have the meaning of the worker::Host calls with similar names.
  struct RuntimeHooks {
    std::function<void(core::GroupUid, const core::Status& status, const core::Status& cause, bool found_here)>
        group_failed;
    std::function<void(core::GroupUid)> group_waits;
    std::function<void(core::GroupUid)> group_starts;
    /// The records are the dedicated servers that the group is to take in. Returns the region of the last (records.h,
    /// region_of_server()), or an error if this process cannot have the connections that these servers add.
    std::function<core::Result<int>(core::GroupUid, const std::vector<bootstrap::MemberRecord>&)> may_meet;
    std::function<void(core::GroupUid, std::vector<bootstrap::MemberRecord>)> servers_joined;
    // For the status of a job (status_desk.h).
    std::function<void(const wire::Message& ask)> status_asked;
    std::function<void(const wire::Message& answer, std::span<const std::byte>)> status_answered;
    std::function<void(core::EngineId, const core::Status& cause)> peer_gone;
  };
  /// A hook that is set in `hooks` replaces the earlier one. The other hooks stay.
  void set_hooks(RuntimeHooks hooks);
  /// True: every transport is armed, and there is nothing to do before next_due() or an event.
  bool arm();
  /// The caller of progress() does something else now, for an unknown time.
  void pause() noexcept { armed_ = true; }
  core::TimePoint next_due() const;
  /// Until this time data may stay in the kernel's buffers, if nothing urgent comes. The epoch: no nap is allowed.
  core::TimePoint nap_until();

  /// No operation of this rank is under way, and no message waits to leave. So nobody waits for this engine's progress.
  bool is_quiet() const;
  /// A verdict that this engine sent has not been answered yet (bounded in time). If the engine left now, it could look
  /// like the cause of the failure that it reported.
  bool has_unanswered_verdicts() const noexcept { return control_.awaits_answers(); }
  /// Every member that this rank told of the group's failure is gone, or has sent a verdict on the group, or has
  /// answered our verdict.
  bool all_know_of_failure(const worker::GroupState& group) const;
  /// The file descriptors to sleep on. They never change. `data`: include the data transport's descriptor.
  std::vector<int> event_fds(bool data = true) const;

  /// Afterwards operations may name parts of `memory` as their device_memory (worker/operation.h). `keep` is held until
  /// detach_device(), or until the Runtime ends. Errors: the data transport's.
  core::Status attach_device(const transport::DeviceMemory& memory, std::shared_ptr<void> keep);
  /// Call this only when no operation and no transport uses `memory`. Not from inside progress().
  void detach_device(std::span<std::byte> memory);

  /// Events are written to `trace` from now on; null: to nowhere. The caller keeps `trace` alive until another
  /// set_trace(). Not from inside progress().
  void set_trace(observe::Trace* trace);

  transport::Transport* shm() noexcept { return transports_.shm.get(); }
  transport::BufferPool& pool() noexcept { return *pool_; }
  const flow::Outbox& outbox() const noexcept { return *outbox_; }

  // flow::Router
  core::Result<transport::Endpoint*> connect(core::EngineId peer) override { return peers_.connect(peer); }
  core::Result<transport::Endpoint*> connect_urgent(core::EngineId peer) override {
    return peers_.connect_urgent(peer);
  }
  flow::Peer describe(core::EngineId peer) override { return peers_.describe(peer); }
  void on_unreachable(core::EngineId peer, core::Status cause) override;
  // worker::Host
  void send_control(core::EngineId to, wire::Message message, std::string_view text) override;
  void send_if_connected(core::EngineId to, wire::Message message, std::string_view text) override;
  void on_group_failed(core::GroupUid uid, const core::Status& status, const core::Status& cause,
                       bool found_here) override;
  void on_group_waits(core::GroupUid uid) override;
  std::string lack_of_descriptors(const std::vector<core::EngineId>& peers) const override;
  std::uint64_t bytes_through_card() const override;
  void send_now() override {
    transports_.data->send_now();
    if (transports_.control) transports_.control->send_now();
  }
  core::Result<schedule::Member> meet(core::GroupUid uid, std::span<const std::byte> record) override;
  void part(core::GroupUid uid, const std::vector<core::EngineId>& servers) override;
  void on_joined(core::GroupUid uid, const schedule::Members& members) override;
  void on_start(core::GroupUid uid) override;
  void on_shares(core::GroupUid uid, const schedule::Topology& topology) override;
  void on_server_lost(core::EngineId server, const std::string& why) override;
  // worker::Host, server::DedicatedHost
  void on_tuning(core::GroupUid uid, const schedule::Tuning& tuning) override;
  // server::DedicatedHost
  void on_served_group_closed(core::GroupUid uid, const core::Status& why) override;

 private:
  class Inlet final : public transport::Receiver {
   public:
    Inlet(Runtime& runtime, transport::Transport& from) : runtime_(runtime), from_(from) {}
    void on_message(core::EngineId from, std::span<const std::byte> header,
                    transport::RxPayload payload) noexcept override {
      runtime_.on_message({&from_, from}, header, std::move(payload));
    }
    void on_peer_failed(core::EngineId peer, core::Status cause) noexcept override {
      using enum Evidence::Connection;
      const Transports& all = runtime_.transports_;
      runtime_.evidence_.on_lost(peer,
                                 &from_ == all.shm.get()       ? kMemory
                                 : &from_ == all.control.get() ? kControl
                                                               : kData,
                                 std::move(cause));
    }

   private:
    Runtime& runtime_;
    transport::Transport& from_;
  };
  Runtime(RuntimeOptions options, std::span<std::byte> memory, std::shared_ptr<void> keep, Transports transports);
  core::Status attach();
  void on_message(Origin origin, std::span<const std::byte> header, transport::RxPayload payload) noexcept;
  /// Whether a message of this origin may name `source` as its sender. An origin that nobody has introduced may name a
  /// peer that is not known yet, either: the group's opening asks again.
  bool may_be_of(const Origin& origin, core::EngineId source);
  /// The message that came was in another's name: its connection is cut, and the peer behind it given up.
  void on_forged(const Origin& origin, const wire::From& claimed);
  /// Handles what needs no working group: heartbeats, credit, answers. True: the message needs nothing more.
  bool on_engine_message(const wire::Message& message, std::span<const std::byte> payload);
  void note_round_trip(KnownPeer& peer, std::uint64_t sent_ns, std::uint64_t theirs_ns);
  void trace_group(const worker::GroupInfo& info);
  void trace_work(std::uint64_t began, std::uint64_t now, bool worked);
  void ask_for_time(core::TimePoint now);
  flow::Delivery with_cost(const wire::Message& message, transport::RxPayload payload);
  void deliver(worker::GroupState& group, const wire::Message& message, transport::RxPayload payload);
  std::size_t weigh_evidence(core::TimePoint now);
  void peer_failed(core::EngineId peer, core::Status cause, bool silent);
  void leave_parted();
  /// Drops messages that nobody here waits for. Their credit goes back to the senders.
  void let_go(UnopenedGroups::Messages messages);
  void watch(core::GroupUid uid);
  void on_watch_changed();
  void join(core::GroupUid uid, schedule::Members members, const schedule::Topology& topology);
  void forget_unused(core::TimePoint now);
  void look_at_flow(core::TimePoint now);
  /// The members of all groups that `peer` is in, or is joining.
  std::unordered_set<core::EngineId> company_of(core::EngineId peer) const;
  bool look_at_paths();
  void apply_windows();
  Reported reported() const { return {transports_, peers_, *pool_, *outbox_, *worker_}; }

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
  Peers peers_;
  schedule::GroupWindows windows_;
  std::map<core::GroupUid, std::vector<bootstrap::MemberRecord>> newcomers_;  // met, but not joined yet
  std::vector<core::EngineId> parted_;  // newcomers to let go in the next round: part() is called inside transports
  std::unordered_set<core::GroupUid> closed_;
  std::deque<core::GroupUid> closed_order_;
  UnopenedGroups unopened_;
  Evidence evidence_;
  WatchList watch_list_;
  ControlSender control_;
  WakeModeration moderation_;
  core::TimePoint next_look_{};
  core::TimePoint next_dial_look_{};
  core::TimePoint next_path_look_{};
  std::vector<transport::PathInfo> paths_;  // of the last look
  // Used while there is a trace:
  std::uint64_t works_since_ns_ = 0;  // start of the current row of rounds with work; 0: the last round had none
  core::TimePoint next_time_{};
  core::TimePoint napped_at_{};
  core::TimePoint next_forgetting_{};
  std::uint64_t progress_calls_ = 0;
  bool look_everywhere_ = false;  // arm() found something: the next round looks at every transport
  bool armed_ = true;             // time may have passed since the last round
  bool all_are_local_ = false;    // there are groups, and all their members are on this node
  core::TimePoint now_{};
  Report report_;
  RuntimeHooks hooks_;
};

}  // namespace hybridps::engine
