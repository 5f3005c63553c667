// hybridps/engine/server_shard.h: one engine of a dedicated server, with the groups that are open on it.
//
// Model    A shard has its own transports, pool and thread (server_host.h). It refuses a group that would take more
// than
//          its job's part of the memory.
// Threads  start(), call() and post(): the admission server's thread. What call() and post() are given, and all that
//          they call here, runs on the shard's thread. record(), has_groups() and add_to(): any thread.
#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <vector>

#include "hybridps/bootstrap/record.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/config.h"
#include "hybridps/core/ids.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/engine/interface.h"
#include "hybridps/engine/loop.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/engine/server_host.h"
#include "hybridps/engine/server_request.h"
#include "hybridps/engine/status_desk.h"
#include "hybridps/observe/trace.h"

namespace hybridps::engine {

struct JobBudget;

class Shard final : public LoopClient, core::Pinned {
 public:
  /// The number of given-up groups to remember: a request to open a group may come some seconds after its close
  /// request.
  static constexpr std::size_t kGivenUpKept = 1024;

  /// Called on the shard's thread when a group that was opened here has closed.
  std::function<void(core::GroupUid)> closed;

  core::Status start(const ServerHostOptions& options, const core::Config& config, const Interfaces& interfaces,
                     int index, DataThreads& threads);
  ~Shard() override;

  const bootstrap::MemberRecord& record() const noexcept { return record_; }
  /// Runs `command` on the shard's thread and waits for the status. kTimeout: it may still run, so it must own its
  /// data.
  core::Status call(core::OnceFn<void(core::Status&)> command);
  /// As call(), without waiting.
  void post(core::OnceFn<void()> command) { loop_->post(std::move(command)); }
  bool has_groups() const noexcept { return groups_.load() > 0; }
  void add_to(ServerHostStats& s) const;

  /// kPeerDead: this engine has given up a rank of the group before.
  core::Status may_meet(const bootstrap::Roster& roster) const;
  /// Opens the group of `request` with this shard as its server number `index` of those in the request. kPeerDead: as
  /// may_meet(), and nothing else forbids it.
  core::Status open(const ServerRequest& request, int index);
  /// Closes the group and returns true, if an earlier attempt opened it: no rank has met this engine then.
  bool drop_before(core::GroupUid uid, std::uint32_t attempt);
  /// The job will not use this group here. A later request to open the group is refused.
  void give_up(core::GroupUid uid);
  Runtime& runtime() noexcept { return *runtime_; }

 private:
  // LoopClient
  std::size_t round() override;
  /// The budget of the open groups that have a process of this group, else a new one.
  core::Result<std::shared_ptr<JobBudget>> job_of(const bootstrap::Roster& roster);
  void publish();

  core::EngineId id_;
  bootstrap::MemberRecord record_;
  std::size_t jobs_ = 0;               // ServerHostOptions::jobs
  std::uint64_t share_ = 0;            // a job's part of each quarter of the memory
  std::uint64_t pushers_max_ = 1;      // of a job
  std::shared_ptr<JobBudget> of_all_;  // without `jobs`
  std::uint64_t packs_from_ = 0;
  std::unique_ptr<observe::Trace> trace_;
  std::unique_ptr<Runtime> runtime_;
  std::unique_ptr<StatusDesk> desk_;
  std::unique_ptr<Loop> loop_;
  core::TimePoint next_publish_{};
  // In the loop only.
  struct ShardGroup {
    std::uint32_t attempt;  // the attempt that opened the group
    std::vector<core::EngineId> pushers;
    std::set<core::EngineId> members;
    std::shared_ptr<JobBudget> job;
  };
  std::map<core::GroupUid, ShardGroup> open_;
  std::deque<core::GroupUid> given_up_;
  std::atomic<std::uint64_t> groups_{0}, groups_total_{0}, chunks_{0}, bytes_{0}, refused_{0};
};

}  // namespace hybridps::engine
