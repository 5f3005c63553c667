// hybridps/engine/engine_impl.h: the implementation of the engine of a process, and its parts.
//
// Threads  as each member says; groups_ and runtime_ belong to the loop once the loop runs.
#pragma once

#include <condition_variable>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/departures.h"
#include "hybridps/bootstrap/record.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/config.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/mutex.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/engine/descriptors.h"
#include "hybridps/engine/engine.h"
#include "hybridps/engine/group_core.h"
#include "hybridps/engine/groups.h"
#include "hybridps/engine/joiner.h"
#include "hybridps/engine/loop.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/engine/settings.h"
#include "hybridps/engine/status_desk.h"
#include "hybridps/engine/verdict_board.h"
#include "hybridps/intranode/shm/shm_transport.h"
#include "hybridps/observe/outlet.h"
#include "hybridps/observe/trace.h"

namespace hybridps::engine {

/// The job's name as the launcher gives it, the same on all ranks. Empty: the launcher gives none.
std::string job_name();

class EngineImpl final : public Engine, public LoopClient {
 public:
  static core::Result<std::shared_ptr<EngineImpl>> create(std::size_t ranks);
  ~EngineImpl() override;

  core::EngineId id() const noexcept override { return id_; }
  core::Result<std::shared_ptr<Group>> open_group(GroupOptions options) override;
  void linger() override;
  std::vector<observe::Sample> stats() const override;
  std::string describe() const override { return description_; }

  bool in_forked_child() const noexcept { return core::fork_generation() != generation_; }
  bool on_own_thread() const noexcept {
    return (loop_ != nullptr && loop_->in_round()) || (joiner_ != nullptr && joiner_->on_its_thread());
  }
  Loop& loop() noexcept { return *loop_; }
  bool post(core::OnceFn<void()> command) { return loop_->post(std::move(command)); }
  /// A group was left, and its goodbye follows.
  void count_left() {
    const std::lock_guard lock(linger_mutex_);
    --groups_staying_;
  }
  // In the loop only.
  Groups& groups() { return *groups_; }
  Runtime& runtime() { return *runtime_; }

 private:
  EngineImpl() : id_(core::make_engine_id()) {}
  core::Status start(core::Config config, std::size_t ranks);
  // Parts of start().
  /// Memory for messages, shared with the node's ranks if possible. `ranks_here`: the number of ranks on this node;
  /// empty: the launcher does not say. `ranks`: as in Engine::acquire().
  core::Result<PrivatePool> make_pool(std::size_t bytes, std::optional<std::size_t> ranks_here, std::size_t ranks,
                                      Transports& transports);
  core::Status make_network(std::size_t ranks_here, const DataOptions& data_options, RuntimeOptions& options,
                            Transports& transports);
  std::string transport_text() const;
  void make_groups();
  void make_desk();
  void make_joiner(intranode::shm::ShmTransport* proving);
  // LoopClient
  std::size_t round() override;
  std::chrono::milliseconds sleep_at_most() const override;
  void finish() override;

  /// In the loop: keeps the members of a world that is open here.
  void note_world(const std::shared_ptr<GroupCore>& group, const bootstrap::Roster& roster);
  /// The engines at these ranks, if all worlds that this process is in agree on them. Any thread.
  std::vector<bootstrap::ExpectedMember> presumed(const std::vector<int>& global_ranks);
  /// Called with the first group: opens the outlet for status, metrics and traces of this process.
  void open_outlet(const GroupOptions& first);
  /// Starts a trace in `folder`. An empty `folder` ends the current trace. Any thread but the loop's.
  core::Status trace_into(const std::string& folder, int rank);
  /// Any thread, once started.
  core::Status check_descriptors(const bootstrap::Roster& roster, int rank) const;

  const std::uint64_t generation_ = core::fork_generation();
  const core::EngineId id_;
  core::Config config_;
  std::string description_;
  CheckedSettings settings_;
  double limit_bytes_per_second_ = 0;                    // of the data cards in settings_; 0: not known
  std::uint64_t own_descriptors_ = kDescriptorsOfARank;  // descriptors of this process without any peer
  bootstrap::MemberRecord self_;                         // the part that is the same in all groups
  std::unique_ptr<Runtime> runtime_;                     // in the loop only, once the loop runs
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<VerdictBoard> board_;  // in the loop only, while the loop runs
  std::unique_ptr<Groups> groups_;       // in the loop only, once the loop runs
  std::unique_ptr<Joiner> joiner_;
  std::unique_ptr<StatusDesk> desk_;
  std::once_flag outlet_opened_;
  std::unique_ptr<observe::Outlet> outlet_;
  core::Mutex trace_mutex_;
  std::unique_ptr<observe::Trace> trace_ HYBRIDPS_GUARDED_BY(trace_mutex_);

  const std::shared_ptr<bootstrap::Departures> departures_ = std::make_shared<bootstrap::Departures>();
  struct World {
    std::weak_ptr<GroupCore> group;
    std::vector<bootstrap::ExpectedMember> members;
  };
  core::Mutex worlds_mutex_;
  std::vector<World> worlds_ HYBRIDPS_GUARDED_BY(
      worlds_mutex_);  // worlds that have opened here; note_world() drops the worlds whose group is gone

  std::mutex linger_mutex_;
  std::condition_variable linger_changed_;
  std::size_t groups_open_ = 0;     // groups that are not closed
  std::size_t groups_staying_ = 0;  // groups that are not left
  bool hurry_ = false;              // the last operation failed in a group that waits for goodbyes
};

}  // namespace hybridps::engine
