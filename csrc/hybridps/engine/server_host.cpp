#include "hybridps/engine/server_host.h"

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/mutex.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/engine/interface.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/server_request.h"
#include "hybridps/engine/server_shard.h"
#include "hybridps/engine/settings.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {
namespace {

using core::Code;
using core::Status;

// How long the groups of a stopping server have to let it go. Operations that take longer fail over to ranks.
constexpr auto kLeaveWithin = std::chrono::milliseconds(1500);
// The most engines that some jobs have given up and other jobs still use; on a server with more engines, its number.
constexpr std::size_t kRetiredMax = 8;
// Of these, the most that one job still uses, with the same exception.
constexpr std::size_t kRetiredOfJobMax = 4;

// A request may have a sixteenth of the memory, but at least this: enough for the roster of 1,000 ranks.
constexpr std::uint64_t kBodyBytesMin = std::uint64_t{4} << 20;

class ServerHostImpl final : public ServerHost {
 public:
  Status start(ServerHostOptions options, const core::Config& config) {
    say_ = options.say;
    options_ = options;
    config_ = config;
    // By default the server uses the interface of the address that it listens on.
    const bool any = options.listen.host == "0.0.0.0" || options.listen.host == "::";
    hint_ = any ? std::string() : interface_to(options.listen.host);
    DataThreads threads = data_threads();  // shared by all shards
    for (int i = 0; i < options.threads; ++i) {
      auto shard = start_shard(i, threads);
      if (!shard.is_ok()) return shard.status();
      shards_.push_back(std::move(shard).value());
    }
    threads.warn_of_idle();
    auto admission = admission::AdmissionServer::open(
        options.listen, options.secret, [this](const admission::Bytes& body) { return answer(body); },
        std::clamp<std::uint64_t>(options.memory_bytes / 16, kBodyBytesMin, admission::kBodyBytesMax));
    if (!admission.is_ok()) return admission.status();
    admission_ = std::move(admission).value();
    return Status::ok();
  }
  ~ServerHostImpl() override { admission_.reset(); }

  int port() const override { return admission_->port(); }
  void drain() override { draining_.store(true); }
  ServerHostStats stats() const override {
    ServerHostStats s;
    for (const auto& shard : all_shards()) shard->add_to(s);
    {
      const core::MutexLock lock(mutex_);
      std::set<core::EngineId> engines;
      for (const auto& [uid, group] : open_) engines.insert(group.engines.begin(), group.engines.end());
      s.engines = engines.size();
    }
    s.admission_accepted = admission_->stats().accepted.load();
    s.admission_refused = admission_->stats().refused.load();
    return s;
  }
  void dismiss(const std::string& why) override {
    draining_.store(true);
    const auto shards = all_shards();
    const auto leave = [&](auto how, core::Duration within) {
      for (const auto& shard : shards)
        shard->post([s = shard.get(), how, why] { (s->runtime().dedicated().*how)(Status(Code::kAborted, why)); });
      const core::Deadline deadline = core::Deadline::after(within);
      while (!deadline.has_passed() && stats().groups > 0) std::this_thread::sleep_for(std::chrono::milliseconds(10));
    };
    leave(&server::DedicatedServer::ask_to_leave, kLeaveWithin);
    if (stats().groups > 0) leave(&server::DedicatedServer::leave_all, std::chrono::seconds(2));
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // time to send the last messages
  }

 private:
  struct OpenGroup {
    std::string text;  // "'world' of 3 ranks on 3 nodes (rank 0 on host-a (pid 12))"
    std::vector<core::EngineId> engines;
    std::set<core::EngineId> shards;  // the shards that have the group open
    core::TimePoint since;
  };

  DataThreads data_threads() const {
    const auto shards = static_cast<std::size_t>(options_.threads);
    core::Result<Interfaces> interfaces = choose_interfaces(config_, hint_, {0, options_.threads});
    DataThreadsPlan plan;
    if (interfaces.is_ok())
      plan = plan_data_threads(config_, cores_for_each(config_, 1), shards, interfaces.value(), 1);
    return DataThreads(plan, core::Spinning::always({}));
  }

  core::Result<std::shared_ptr<Shard>> start_shard(int index, DataThreads& threads) {
    core::Result<Interfaces> interfaces = choose_interfaces(config_, hint_, {index, options_.threads});
    if (!interfaces.is_ok()) return interfaces.status();
    if (const std::string text = without_effect(config_, interfaces.value()); index == 0 && !text.empty())
      core::log_warn(text);
    for (const std::string& name : {interfaces.value().control, interfaces.value().data()})
      if (Status status = transport::validate_device(name); !status.is_ok()) return status;
    auto shard = std::make_shared<Shard>();
    shard->closed = [this, of = shard.get()](core::GroupUid uid) { on_closed(uid, of->record().engine); };
    if (Status status = shard->start(options_, config_, interfaces.value(), index, threads); !status.is_ok())
      return status;
    return shard;
  }

  /// Includes the retired shards.
  std::vector<std::shared_ptr<Shard>> all_shards() const {
    const std::lock_guard lock(shards_mutex_);
    std::vector<std::shared_ptr<Shard>> all = shards_;
    all.insert(all.end(), retired_.begin(), retired_.end());
    return all;
  }

  // Starts a new shard in place of each given one. A job never uses an engine again after giving it up: late messages
  // to or from that engine may still arrive.
  Status renew(core::GroupUid uid, const std::vector<core::EngineId>& engines) {
    reap();
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      if (std::find(engines.begin(), engines.end(), shards_[i]->record().engine) == engines.end()) continue;
      if (Status status = may_renew(uid, *shards_[i]); !status.is_ok()) return status;
      if (Status status = replace(i, "a job has given up engine "); !status.is_ok()) return status;
    }
    return Status::ok();
  }

  Status replace(std::size_t index, const std::string& why) {
    const auto kept = static_cast<std::size_t>(
        std::count_if(retired_.begin(), retired_.end(), [](const auto& shard) { return shard->has_groups(); }));
    if (kept >= std::max(kRetiredMax, shards_.size()))
      return Status(Code::kOutOfResources,
                    std::to_string(kept) + " engines that jobs have given up still serve others");
    DataThreads threads = data_threads();
    auto shard = start_shard(static_cast<int>(index), threads);
    if (!shard.is_ok()) return shard.status();
    const core::EngineId engine = shards_[index]->record().engine;
    {
      const core::MutexLock lock(mutex_);
      say(why + core::to_string(engine) + ": another one takes its place");
    }
    replaced_.push_back(engine);
    if (replaced_.size() > Shard::kGivenUpKept) replaced_.pop_front();
    const std::lock_guard lock(shards_mutex_);
    retired_.push_back(std::exchange(shards_[index], std::move(shard).value()));
    return Status::ok();
  }

  /// A job renews engines that have or had its group. It may also renew an engine without groups, at which it has
  /// closed the group before the group was opened.
  Status may_renew(core::GroupUid uid, const Shard& shard) const {
    const core::EngineId engine = shard.record().engine;
    const core::MutexLock lock(mutex_);
    const auto open = open_.find(uid);
    // A close request that came behind the group's end tells nothing new.
    const PastGroup* past = nullptr;
    for (const PastGroup& one : past_)
      if (one.uid == uid && one.shard == engine && (past == nullptr || !one.engines.empty())) past = &one;
    const bool is_open = open != open_.end() && open->second.shards.contains(engine);
    if (!is_open && (past == nullptr || (past->engines.empty() && shard.has_groups())))
      return Status(Code::kInvalidArgument, "the job has no group on engine " + core::to_string(engine) +
                                                ", and can have no other one in its place");
    return may_leave_another(is_open ? open->second.engines : past->engines, {});
  }

  /// For a job with these engines. The group `opening` does not count.
  Status may_leave_another(const std::vector<core::EngineId>& mine, core::GroupUid opening) const
      HYBRIDPS_REQUIRES(mutex_) {
    std::size_t given_up = 0;
    for (const auto& retired : retired_)
      for (const auto& [of, group] : open_)
        if (of != opening && group.shards.contains(retired->record().engine) &&
            std::find_first_of(mine.begin(), mine.end(), group.engines.begin(), group.engines.end()) != mine.end()) {
          ++given_up;
          break;
        }
    if (given_up >= std::max(kRetiredOfJobMax, shards_.size()))
      return Status(Code::kOutOfResources, "the job has given up " + std::to_string(given_up) +
                                               " engines on which it still has groups; no job may have more");
    return Status::ok();
  }

  /// A shard has refused a group because it has given up a rank that lives. Replaces all shards that would. Returns the
  /// status for rank 0, which then asks for the server's engines again.
  Status replace_for(const std::shared_ptr<const ServerRequest>& request, const Status& cause) {
    reap();
    const bootstrap::Roster& roster = *request->roster;
    std::vector<core::EngineId> engines;
    for (const auto& member : roster.members) engines.push_back(member.engine);
    for (std::size_t i = 0; i < shards_.size(); ++i) {
      const std::shared_ptr<Shard> shard = shards_[i];
      if (std::none_of(roster.servers.begin(), roster.servers.end(),
                       [&](const auto& server) { return server.engine == shard->record().engine; }))
        continue;
      const Status meets =
          shard->call([s = shard.get(), request](Status& out) { out = s->may_meet(*request->roster); });
      if (meets.code() != Code::kPeerDead) continue;
      Status may;
      {
        const core::MutexLock lock(mutex_);
        may = may_leave_another(engines, roster.uid);
      }
      if (may.is_ok()) may = replace(i, "a job needs another engine than engine ");
      if (!may.is_ok()) return may;
    }
    return Status(Code::kAborted, std::string(cause.message()));
  }

  void remember(core::GroupUid uid, core::EngineId shard, std::vector<core::EngineId> engines)
      HYBRIDPS_REQUIRES(mutex_) {
    past_.push_back({uid, shard, std::move(engines)});
    if (past_.size() > Shard::kGivenUpKept) past_.pop_front();
  }

  void reap() {
    std::vector<std::shared_ptr<Shard>> over;  // declared first: the shards end after the lock is released
    const std::lock_guard lock(shards_mutex_);
    for (auto& shard : retired_)
      if (!shard->has_groups()) over.push_back(std::move(shard));
    std::erase(retired_, nullptr);
  }

  core::Result<admission::Bytes> records() const {
    if (draining_.load()) return Status(Code::kClosed, "it is about to stop and takes no new job");
    std::vector<bootstrap::MemberRecord> all;
    for (const auto& shard : shards_) all.push_back(shard->record());
    return encode_records(all);
  }

  void say(const std::string& line) {
    if (say_) say_(line);
  }

  void on_closed(core::GroupUid uid, core::EngineId shard) {
    const core::MutexLock lock(mutex_);
    const auto found = open_.find(uid);
    if (found == open_.end() || found->second.shards.erase(shard) == 0) return;
    remember(uid, shard, found->second.engines);
    if (!found->second.shards.empty()) return;
    say("closed group " + found->second.text + " after " +
        core::format_seconds(core::to_seconds(core::Clock::now() - found->second.since)));
    open_.erase(found);
  }

  core::Result<admission::Bytes> answer(const admission::Bytes& body) {
    core::Result<ServerRequest> request = decode_request(body);
    if (!request.is_ok()) {
      const core::MutexLock lock(mutex_);
      say("refused a job: " + std::string(request.status().message()));
      return request.status();
    }
    switch (request.value().kind) {
      case ServerRequest::RequestKind::kFind: reap(); return records();
      case ServerRequest::RequestKind::kRenew:
        if (draining_.load()) return records();
        if (Status status = renew(request.value().uid, request.value().engines); !status.is_ok()) {
          const core::MutexLock lock(mutex_);
          say("cannot start another engine: " + std::string(status.message()));
          return status;
        }
        return records();
      case ServerRequest::RequestKind::kOpen: {
        if (draining_.load()) return Status(Code::kClosed, "it is about to stop and takes no new job");
        const auto kept = std::make_shared<const ServerRequest>(std::move(request).value());
        const bootstrap::Roster& roster = *kept->roster;
        OpenGroup group;
        group.text = core::quoted(kept->group_name) + " of " + std::to_string(roster.size()) + " ranks on " +
                     std::to_string(roster.node_count()) + " nodes (" + bootstrap::describe(roster.members[0]) + ")";
        for (const auto& member : roster.members) group.engines.push_back(member.engine);
        group.since = core::Clock::now();
        const std::string text = group.text;
        for (const auto& server : roster.servers)
          for (const auto& shard : shards_)
            if (shard->record().engine == server.engine) group.shards.insert(server.engine);
        std::vector<core::EngineId> added;
        {
          const core::MutexLock lock(mutex_);
          OpenGroup& known = open_[roster.uid];  // other shards, or an earlier attempt, may have the group open already
          for (const core::EngineId shard : group.shards)
            if (!known.shards.contains(shard)) added.push_back(shard);
          if (!known.shards.empty()) group.since = known.since;
          group.shards.insert(known.shards.begin(), known.shards.end());
          known = std::move(group);
        }
        const auto refused = [&](Status status) {
          const core::MutexLock lock(mutex_);
          if (const auto found = open_.find(roster.uid); found != open_.end()) {
            for (const core::EngineId shard : added)
              if (found->second.shards.erase(shard) > 0 && status.code() == Code::kTimeout)  // it may have the group
                remember(roster.uid, shard, found->second.engines);
            if (found->second.shards.empty()) open_.erase(found);
          }
          say("refused group " + text + ": " + std::string(status.message()));
          return status;
        };
        for (const auto& server : roster.servers)
          if (std::find(replaced_.begin(), replaced_.end(), server.engine) != replaced_.end()) {
            for (const auto& one : all_shards())  // an earlier attempt may have opened the group
              one->post([s = one.get(), uid = roster.uid, attempt = kept->attempt] { s->drop_before(uid, attempt); });
            return refused(Status(Code::kAborted, "another job had one of its engines replaced meanwhile"));
          }
        std::vector<Shard*> opened;
        for (const auto& server : roster.servers) {
          for (const auto& shard : shards_) {
            if (shard->record().engine != server.engine) continue;
            if (Status status = shard->call(
                    [s = shard.get(), kept, i = server.group_rank](Status& out) { out = s->open(*kept, i); });
                !status.is_ok()) {
              // Either all shards open the group or none: also closes the group where an earlier attempt opened it.
              for (Shard* s : opened)
                s->post([s, uid = roster.uid, next = kept->attempt + 1] { s->drop_before(uid, next); });
              for (const auto& one : shards_)
                one->post([s = one.get(), uid = roster.uid, attempt = kept->attempt] { s->drop_before(uid, attempt); });
              if (status.code() == Code::kPeerDead) status = replace_for(kept, status);
              return refused(status);
            }
            opened.push_back(shard.get());
          }
        }
        if (opened.empty()) return refused(Status(Code::kAborted, "it was restarted meanwhile"));
        {
          const core::MutexLock lock(mutex_);
          say("opened group " + text);
        }
        return admission::Bytes();
      }
      case ServerRequest::RequestKind::kClose:
        for (const auto& shard : all_shards()) {
          const std::vector<core::EngineId>& of = request.value().engines;
          if (std::find(of.begin(), of.end(), shard->record().engine) == of.end()) continue;
          {
            const core::MutexLock lock(mutex_);
            const auto open = open_.find(request.value().uid);
            if (open == open_.end() || !open->second.shards.contains(shard->record().engine))
              remember(request.value().uid, shard->record().engine, {});
          }
          shard->post([s = shard.get(), uid = request.value().uid] { s->give_up(uid); });
        }
        return admission::Bytes();
    }
    return Status(Code::kMismatch, "unknown request");
  }

  std::function<void(const std::string&)> say_;
  mutable core::Mutex mutex_;  // also guards the order of the lines to say_
  std::map<core::GroupUid, OpenGroup> open_ HYBRIDPS_GUARDED_BY(mutex_);
  struct PastGroup {
    core::GroupUid uid;
    core::EngineId shard;
    std::vector<core::EngineId> engines;  // empty: the group was closed before it was opened
  };
  std::deque<PastGroup> past_ HYBRIDPS_GUARDED_BY(mutex_);
  ServerHostOptions options_;
  core::Config config_;
  std::string hint_;  // the interface of the address that the server listens on; empty: any address
  // After start() only the admission server's thread changes shards_ and retired_, under shards_mutex_.
  mutable std::mutex shards_mutex_;
  std::vector<std::shared_ptr<Shard>> shards_;
  std::vector<std::shared_ptr<Shard>> retired_;  // given up by one job, and perhaps still used by others
  std::deque<core::EngineId> replaced_;          // the engines that were retired last; the admission server's thread
  std::unique_ptr<admission::AdmissionServer>
      admission_;  // declared after the shards: the admission server's thread uses the shards
  std::atomic<bool> draining_{false};
};

}  // namespace

core::Result<std::unique_ptr<ServerHost>> ServerHost::start(ServerHostOptions options, const core::Config& config) {
  auto host = std::make_unique<ServerHostImpl>();
  if (Status status = host->start(std::move(options), config); !status.is_ok()) return status;
  return std::unique_ptr<ServerHost>(std::move(host));
}

}  // namespace hybridps::engine
