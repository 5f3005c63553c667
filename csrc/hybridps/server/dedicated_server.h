// hybridps/server/dedicated_server.h: the spans that a dedicated server sums for groups of other processes.
//
// Model    A group is opened with its roster before its first message. The first contribution opens a span: the header
//          and the roster give all facts of the plan. When all nodes have contributed to a chunk, the chunk is offered
//          to the agents (allreduce) or to the root (reduce). The sum is made in the buffer that is sent, at the moment
//          when the chunk may go. So memory is held only for chunks that can leave.
// Memory   contributions: what each engine may send unasked, and grant_chunks more; sums: slots of the send pool.
//          Groups and spans take the budgets of their jobs.
// Isolation  messages count only from engines of the group's roster. A contradiction to it fails only this group.
// Owner    the engine's runtime.   Threads  its progress thread.
#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/compress/residuals.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/one_thread.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/outer/state.h"
#include "hybridps/schedule/members.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/schedule/tuning.h"
#include "hybridps/server/result_streams.h"
#include "hybridps/server/server.h"
#include "hybridps/wire/message.h"

namespace hybridps::server {

struct ServedGroup {
  core::GroupUid uid;
  std::string name;  // for the log
  schedule::Members members;
  schedule::Topology topology;  // rank() is this server's owner number
  schedule::ChunkSizes chunks{};
  // As in worker::GroupInfo.
  std::shared_ptr<const compress::Codecs> codecs{};
  flow::MayPack may_pack = flow::MayPack::kNever;
  std::uint64_t packs_from = 0;
  std::uint64_t tiny_bytes = schedule::Limits().tiny_bytes;
  std::shared_ptr<compress::MemoryBudget> residual_budget = std::make_shared<compress::MemoryBudget>();
  std::shared_ptr<compress::MemoryBudget> outer_budget = std::make_shared<compress::MemoryBudget>();
  /// For the group itself, its spans and its plan versions, by the server's estimate. The groups of a job share it.
  std::shared_ptr<compress::MemoryBudget> state_budget =
      std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{~std::uint64_t{0}, 0});

  /// The budget of chunks that the server has granted, which the groups of a job share; null: all groups' own.
  std::shared_ptr<flow::GrantQueue> grants{};

  /// What a group of so many members takes of state_budget before its first operation.
  static std::uint64_t state_bytes(std::size_t members) noexcept;
};

/// What a DedicatedServer needs from the engine.
class DedicatedHost {
 public:
  virtual ~DedicatedHost() = default;
  virtual void send_control(core::EngineId to, wire::Message message, std::string_view text) = 0;
  /// The group is closed here (its members left it, or it failed): forget its peers. Called only from tick().
  virtual void on_served_group_closed(core::GroupUid uid, const core::Status& why) = 0;
  /// Operations that begin from now on use this tuning (schedule/tuning.h).
  virtual void on_tuning(core::GroupUid uid, const schedule::Tuning& tuning) = 0;
};

struct DedicatedStats {
  std::uint64_t groups = 0;
  std::uint64_t groups_total = 0;
  std::uint64_t chunks = 0;   // summed chunks
  std::uint64_t bytes = 0;    // bytes of the summed results
  std::uint64_t refused = 0;  // messages that contradicted their group's roster
};

class DedicatedServer final : public Listener, core::Pinned {
 public:
  DedicatedServer(flow::Outbox& outbox, DedicatedHost& host, std::uint32_t grant_chunks, std::uint64_t grant_bytes);
  ~DedicatedServer() override;

  void open_group(ServedGroup group);
  /// For a job whose grants shall not wait for those of others.
  std::shared_ptr<flow::GrantQueue> make_grants() const { return std::make_shared<flow::GrantQueue>(grant_budget_); }
  bool has(core::GroupUid uid) const { return groups_.count(uid) > 0; }
  /// Handles any message of a group that is open here.
  void on_message(const wire::Message& message, flow::Delivery payload);
  /// A peer died. Drops the groups in which the peer is a rank, and tells their members that they have lost this
  /// server: the members may still see that rank alive.
  void on_peer_dead(core::EngineId peer, const core::Status& cause);
  /// Forgets a group that will not be used. The group's peers are not told.
  void drop(core::GroupUid uid) { close_later(uid, core::Status::ok(), Tell::kNothing); }
  /// Asks every group to give this server no more spans. The server leaves a group when all its spans in the group are
  /// over. A group for which the server keeps state (outer steps) does not answer.
  void ask_to_leave(const core::Status& cause);
  /// Leaves every group now and tells the members why (for a shutdown). The members go on without this server.
  void leave_all(const core::Status& cause);
  /// Frees finished spans and closes groups. Returns the amount of work.
  std::size_t tick();
  bool has_work() const noexcept { return !finished_.empty() || !closing_.empty() || !forgetful_.empty(); }
  std::size_t spans_open() const noexcept { return server_.spans_open(); }
  const DedicatedStats& stats() const noexcept { return stats_; }

  // Listener
  void on_mismatch(const OperationKey& key, const RankCall& ours, const RankCall& theirs) override;
  void on_bad_message(const OperationKey& key, std::string what) override;

 private:
  struct Served;
  class ServedSpan;

  /// What the members are told when a group closes.
  enum class Tell { kNothing, kClosed, kFailed };

  Served* find(core::GroupUid uid);
  void on_landed(Served& group, int rank, const wire::Failover& landed);
  /// `first`: the first message of the span; `priority`: the priority of this message, which becomes the span's.
  ServedSpan* open_span(Served& group, const wire::ChunkId& first, std::int8_t priority);
  void close_later(core::GroupUid uid, core::Status why, Tell tell);
  void close(core::GroupUid uid, const core::Status& why, Tell tell);
  static SpanKey key_of(const Served& group, const wire::ChunkId& chunk);
  void end_span(Served& group, const SpanKey& key);
  /// Frees the slots of results that wait for slow receivers. Returns whether there were any.
  bool set_results_aside();
  std::string refuse(const Served& group, int sender, const wire::ChunkId& chunk) const;
  /// Leaves the group, and returns false, if its job has not so much memory left. The ranks go on without this server.
  bool has_room(Served& group, std::uint64_t sequence, std::uint64_t bytes);
  void on_ask(Served& group, const wire::PlanAsk& ask);
  /// Tells the members about tensors whose sums go without error feedback from now on.
  void tell_forgotten(Served& group);
  void leave_if_released(Served& group);
  /// Memory for one chunk, valid until the next call.
  std::byte* scratch(std::size_t bytes) {
    if (scratch_.size() < bytes) scratch_.resize(bytes);
    return scratch_.data();
  }

  core::OneThread one_thread_;
  flow::Outbox& outbox_;
  DedicatedHost& host_;
  const flow::GrantBudget grant_budget_;
  Server server_;
  std::unordered_map<core::GroupUid, std::unique_ptr<Served>> groups_;
  std::vector<SpanKey> finished_;  // spans whose results have landed everywhere
  struct Closing {
    core::GroupUid uid;
    core::Status why;
    Tell tell = Tell::kNothing;
  };
  std::vector<Closing> closing_;
  std::vector<core::GroupUid> forgetful_;  // groups with more tensors without feedback memory than their members know
  DedicatedStats stats_;
  std::vector<std::byte> scratch_;
};

}  // namespace hybridps::server
