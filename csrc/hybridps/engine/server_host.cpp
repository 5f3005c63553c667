#include "hybridps/engine/server_host.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <set>
#include <thread>
#include <utility>

#include "hybridps/build_info.h"
#include "hybridps/core/log.h"
#include "hybridps/core/mutex.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/engine/interface.h"
#include "hybridps/engine/loop.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/engine/server_request.h"
#include "hybridps/engine/settings.h"
#include "hybridps/engine/status_desk.h"
#include "hybridps/observe/trace.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {
namespace {

using core::Code;
using core::Status;

constexpr auto kCommandPatience = std::chrono::seconds(10);
constexpr auto kPublishEvery = std::chrono::milliseconds(100);
// How long the groups of a stopping server have to let it go. Operations that take longer fail over to ranks.
constexpr auto kLeaveWithin = std::chrono::milliseconds(1500);
// The least memory that a job has on an engine for the state of its groups and operations.
constexpr std::uint64_t kStateBytesMin = std::uint64_t{16} << 20;
// The most engines that some jobs have given up and other jobs still use.
constexpr std::size_t kRetiredMax = 8;
// Of these, the most that one job still uses.
constexpr std::size_t kRetiredOfJobMax = 4;
// The number of given-up groups to remember: a request to open a group may come some seconds after its close request.
constexpr std::size_t kGivenUpKept = 1024;

/// The topology for server number `before` + `index`. The `before` earlier servers own nothing in this topology.
schedule::Topology served_topology(const bootstrap::Roster& roster, int before, int index) {
  schedule::Topology topology = topology_of(roster, roster.size() + before + index);
  std::vector<double> weights = topology.weights();
  weights.insert(weights.begin() + topology.nodes(), static_cast<std::size_t>(before), 0.0);
  std::vector<int> regions(static_cast<std::size_t>(before), schedule::kNoRegion);
  for (const bootstrap::MemberRecord& server : roster.servers) regions.push_back(region_of_server(roster, server));
  return topology.with_weights(std::move(weights)).with_server_regions(std::move(regions));
}

// A request may have a sixteenth of the memory, but at least this: enough for the roster of 1,000 ranks.
constexpr std::uint64_t kBodyBytesMin = std::uint64_t{4} << 20;

/// What a job may use of one engine.
struct JobBudget {
  explicit JobBudget(std::uint64_t share) {
    residuals->bytes_max = outer->bytes_max = share;
    state->bytes_max = std::max(share, kStateBytesMin);
  }
  const std::shared_ptr<compress::MemoryBudget> residuals = std::make_shared<compress::MemoryBudget>();
  const std::shared_ptr<compress::MemoryBudget> outer = std::make_shared<compress::MemoryBudget>();
  const std::shared_ptr<compress::MemoryBudget> state = std::make_shared<compress::MemoryBudget>();
  std::shared_ptr<flow::GrantQueue> grants{};  // null: those of all
};

class Shard final : public LoopClient, core::Pinned {
 public:
  /// Called on the shard's thread when a group that was opened here has closed.
  std::function<void(core::GroupUid)> closed;

  Status start(const ServerHostOptions& options, const core::Config& config, const Interfaces& interfaces, int index,
               DataThreads& threads) {
    id_ = core::make_engine_id();
    RuntimeOptions o = RuntimeOptions::of(config, id_);
    o.keep_early = false;
    o.far_bytes = o.eager_bytes;  // memory is charged by this
    const std::uint64_t memory = options.memory_bytes / static_cast<std::uint64_t>(options.threads);
    packs_from_ = config.compress_min_bytes;
    jobs_ = static_cast<std::size_t>(options.jobs);
    share_ = memory / 4 / std::max<std::uint64_t>(1, jobs_);
    if (jobs_ == 0) {
      of_all_ = std::make_shared<JobBudget>(share_);
      of_all_->state->bytes_max = ~std::uint64_t{0};  // groups have their own limits: no job ends groups of another
    }
    pushers_max_ = std::max<std::uint64_t>(1, share_ / std::max<std::uint64_t>(1, o.eager_bytes));
    const std::size_t pool_bytes = whole_pages(std::max<std::size_t>(o.pool_bytes(), memory / 4));
    if (interfaces.rdma)
      if (Status status = transport::check_locked_memory(
              transport::locked_memory_needed(pool_bytes) * static_cast<std::uint64_t>(options.threads),
              transport::locked_memory_limit());
          !status.is_ok())
        return status;
    core::Result<PrivatePool> pool = map_pool(pool_bytes);
    if (!pool.is_ok())
      return Status(pool.status().code(), std::string(pool.status().message()) + "; give a smaller --memory");

    Transports transports;
    const DataOptions network = data_options(config, core::from_seconds(1), options.secret.authority);
    auto made = make_data_transport(interfaces, network, config.data_sockets, threads);
    if (!made.is_ok()) return made.status();
    auto second = make_control_transport(interfaces, network);
    if (!second.is_ok()) return second.status();
    record_ = own_record(config, interfaces, o, *made.value(), *second.value());
    record_.incarnation = "server";
    record_.group_rank = index;
    record_.group_size = options.threads;
    record_.node_gbps /= options.threads;
    transports.data = std::move(made).value();
    transports.control = std::move(second).value();
    transports.damaged = network.damaged;
    auto runtime = Runtime::create(o, pool.value().memory, std::move(pool.value().keep), std::move(transports));
    if (!runtime.is_ok()) return runtime.status();
    runtime_ = std::move(runtime).value();
    StatusDesk::About about;
    about.engine = id_;
    about.is_server = true;
    about.transport = text_of_transport(interfaces, config);
    about.limit_bytes_per_second = record_.node_gbps * 1e9 / 8;
    desk_ = std::make_unique<StatusDesk>(*runtime_, std::move(about));
    if (!config.trace.empty()) {
      observe::Json json;
      json.object().field("engine", core::to_string(id_)).field("role", "server").field("rank", index);
      json.field("host", record_.host_name).field("pid", static_cast<std::int64_t>(getpid()));
      json.field("limit_bytes_per_second", record_.node_gbps * 1e9 / 8).field("version", build_info::kVersion).end();
      auto trace = observe::Trace::open(
          core::expand_home(config.trace),
          "server" + std::to_string(index) + '-' + record_.host_name + '-' + std::to_string(getpid()),
          json.text().substr(1, json.text().size() - 2));
      if (!trace.is_ok()) return trace.status();
      trace_ = std::move(trace).value();
      runtime_->set_trace(trace_.get());
    }

    LoopOptions loop;
    loop.thread_name = "hybridps-sum";
    loop_ = std::make_unique<Loop>(*runtime_, *this, loop);
    return loop_->start();
  }

  ~Shard() override {
    loop_.reset();  // first: the loop's thread uses the other members
    if (runtime_) runtime_->set_trace(nullptr);
  }

  const bootstrap::MemberRecord& record() const noexcept { return record_; }

  /// Runs `command` on the shard's thread and waits for the status. kTimeout: it may still run, so it must own its
  /// data.
  Status call(core::OnceFn<void(Status&)> command) {
    Status status = loop_->call(std::move(command), kCommandPatience);
    return status.code() == Code::kTimeout ? Status(Code::kTimeout, "the server is too busy to answer") : status;
  }

  /// As call(), without waiting.
  void post(core::OnceFn<void()> command) { loop_->post(std::move(command)); }

  Status open(const ServerRequest& request, int index) {
    const bootstrap::Roster& roster = *request.roster;
    const auto before = static_cast<int>(request.before);
    const int size = roster.size();
    if (std::find(given_up_.begin(), given_up_.end(), roster.uid) != given_up_.end())
      return Status(Code::kClosed, "the job has given up that the group is opened there");
    core::Result<std::shared_ptr<JobBudget>> job = job_of(roster);
    if (!job.is_ok()) return job.status();
    if (runtime_->dedicated().has(roster.uid) && !drop_before(roster.uid, request.attempt))
      return Status(Code::kMismatch, "the group is open there, by this request or a later one");
    const compress::MemoryBudget& state = *job.value()->state;
    if (state.used + server::ServedGroup::state_bytes(roster.members.size() + before + roster.servers.size()) >
        state.bytes_max)
      return Status(Code::kOutOfResources, "a job's groups and operations may take " + std::to_string(state.bytes_max) +
                                               " bytes of its memory, and " + std::to_string(state.used) +
                                               " are taken; start it with more --memory");
    server::ServedGroup group{roster.uid, request.group_name, {}, served_topology(roster, before, index)};
    // One rank of each node pushes to this server, at first unasked. The other ranks take no memory here.
    std::vector<core::EngineId> pushers;
    for (int node = 0; node < group.topology.nodes(); ++node)
      pushers.push_back(
          roster.members[static_cast<std::size_t>(group.topology.agent(node, group.topology.rank()))].engine);
    std::set<core::EngineId> all;
    for (const auto& [uid, open] : open_)
      if (open.job == job.value()) all.insert(open.pushers.begin(), open.pushers.end());
    const std::size_t served = all.size();
    all.insert(pushers.begin(), pushers.end());
    if (all.size() > pushers_max_)
      return Status(Code::kOutOfResources, (jobs_ == 0 ? "its memory" : "a job's part of its memory") +
                                               std::string(" is enough for ") + std::to_string(pushers_max_) +
                                               " ranks that push to it, one of each node, and " +
                                               std::to_string(served) + " of " + std::to_string(all.size()) +
                                               " are served already; start it with more --memory");
    auto codecs = codecs_of(roster);
    if (!codecs.is_ok()) return codecs.status();
    // Larger chunks than a slot holds never arrive, and the group would wait for them for ever.
    const std::uint64_t room = std::max(record_.chunk_bytes, record_.chunk_bytes_max);
    const std::uint64_t needs =
        std::max<std::uint64_t>(request.chunks.usual, codecs.value() != nullptr ? request.chunks.coded : 0);
    if (needs > room)
      return Status(Code::kInvalidArgument, "it has room for chunks of " + std::to_string(room) +
                                                " bytes, and those of the group may have " + std::to_string(needs) +
                                                "; start it with the same HYBRIDPS_CHUNK_BYTES as the ranks");
    std::vector<schedule::Member> members;
    const auto add = [&](const bootstrap::MemberRecord& member, const std::string& where) {
      members.push_back({member.engine, where});
      if (member.engine == id_) return;
      runtime_->add_peer(peer_record(member, where, /*local=*/false));
    };
    for (const auto& member : roster.members) add(member, bootstrap::describe(member));
    members.resize(static_cast<std::size_t>(size + before));  // no engine ids are needed for earlier servers
    for (const auto& server : roster.servers) add(server, "a dedicated server on " + server.host_name);
    group.members = schedule::Members(std::move(members));
    group.chunks = request.chunks;
    group.chunks.room = static_cast<std::uint32_t>(std::min<std::uint64_t>(room, request.chunks.room));  // of plans
    group.codecs = codecs.value();
    group.may_pack = packing_of(roster);
    group.packs_from = packs_from_;
    group.residual_budget = job.value()->residuals;
    group.outer_budget = job.value()->outer;
    group.state_budget = job.value()->state;
    group.grants = job.value()->grants;
    runtime_->open_served_group(std::move(group));
    ShardGroup opened{request.attempt, std::move(pushers), {}, std::move(job).value()};
    for (const auto& member : roster.members) opened.members.insert(member.engine);
    open_.insert_or_assign(roster.uid, std::move(opened));
    return Status::ok();
  }
  /// Closes the group and returns true, if an earlier attempt opened it: no rank has met this engine then.
  bool drop_before(core::GroupUid uid, std::uint32_t attempt) {
    const auto found = open_.find(uid);
    if (found == open_.end() || found->second.attempt >= attempt) return false;
    runtime_->dedicated().drop(uid);
    runtime_->dedicated().tick();  // closes the group at once
    return true;
  }
  /// The job will not use this group here. A later request to open the group is refused.
  void give_up(core::GroupUid uid) {
    runtime_->dedicated().drop(uid);
    given_up_.push_back(uid);
    if (given_up_.size() > kGivenUpKept) given_up_.pop_front();
  }
  Runtime& runtime() noexcept { return *runtime_; }
  bool has_groups() const noexcept { return groups_.load() > 0; }

  void add_to(ServerHostStats& s) const {
    s.groups += groups_.load();
    s.groups_total += groups_total_.load();
    s.chunks += chunks_.load();
    s.bytes_summed += bytes_.load();
    s.refused_messages += refused_.load() + runtime_->counters()[observe::Counter::kBadMessages];
    s.rx_payload_bytes += runtime_->counters()[observe::Counter::kNetRxPayloadBytes];
    s.tx_payload_bytes += runtime_->counters()[observe::Counter::kNetTxPayloadBytes];
  }

 private:
  // LoopClient
  std::size_t round() override {
    const core::TimePoint now = core::Clock::now();
    if (now >= next_publish_ || runtime_->dedicated_stats().groups != groups_.load(std::memory_order_relaxed)) {
      next_publish_ = now + kPublishEvery;
      publish();
    }
    return 0;
  }

  /// The budget of the open groups that have a process of this group, else a new one.
  core::Result<std::shared_ptr<JobBudget>> job_of(const bootstrap::Roster& roster) {
    if (jobs_ == 0) return of_all_;
    publish();  // forgets groups that have closed
    std::set<std::shared_ptr<JobBudget>> jobs;
    for (const auto& [uid, open] : open_) {
      jobs.insert(open.job);
      for (const auto& member : roster.members)
        if (open.members.contains(member.engine)) return open.job;
    }
    if (jobs.size() >= jobs_)
      return Status(Code::kOutOfResources,
                    "it serves " + std::to_string(jobs.size()) + " jobs, as many as it may (--jobs)");
    auto made = std::make_shared<JobBudget>(share_);
    made->grants = runtime_->dedicated().make_grants();
    return made;
  }

  void publish() {
    const server::DedicatedStats& s = runtime_->dedicated_stats();
    groups_.store(s.groups);
    groups_total_.store(s.groups_total);
    chunks_.store(s.chunks);
    bytes_.store(s.bytes);
    refused_.store(s.refused);
    std::erase_if(open_, [&](const auto& group) {
      if (runtime_->dedicated().has(group.first)) return false;
      closed(group.first);
      return true;
    });
  }

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
      if (retired_.size() >= kRetiredMax)
        return Status(Code::kOutOfResources,
                      std::to_string(kRetiredMax) + " engines that jobs have given up still serve others");
      DataThreads threads = data_threads();
      auto shard = start_shard(static_cast<int>(i), threads);
      if (!shard.is_ok()) return shard.status();
      {
        const core::MutexLock lock(mutex_);
        say("a job has given up engine " + core::to_string(shards_[i]->record().engine) +
            ": another one takes its place");
      }
      const std::lock_guard lock(shards_mutex_);
      retired_.push_back(std::exchange(shards_[i], std::move(shard).value()));
    }
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
    const std::vector<core::EngineId>& mine = is_open ? open->second.engines : past->engines;
    std::size_t given_up = 0;
    for (const auto& retired : retired_)
      for (const auto& [of, group] : open_)
        if (group.shards.contains(retired->record().engine) &&
            std::find_first_of(mine.begin(), mine.end(), group.engines.begin(), group.engines.end()) != mine.end()) {
          ++given_up;
          break;
        }
    if (given_up >= kRetiredOfJobMax)
      return Status(Code::kOutOfResources, "the job has given up " + std::to_string(kRetiredOfJobMax) +
                                               " engines on which it still has groups; no job may have more");
    return Status::ok();
  }

  void remember(core::GroupUid uid, core::EngineId shard, std::vector<core::EngineId> engines)
      HYBRIDPS_REQUIRES(mutex_) {
    past_.push_back({uid, shard, std::move(engines)});
    if (past_.size() > kGivenUpKept) past_.pop_front();
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
              return refused(status);
            }
            opened.push_back(shard.get());
          }
        }
        if (opened.empty()) return refused(Status(Code::kMismatch, "it has been restarted since it was asked"));
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
