#include "hybridps/engine/server_shard.h"

#include <unistd.h>

#include <algorithm>
#include <utility>

#include "hybridps/build_info.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/settings.h"
#include "hybridps/transport/ucx/rdma.h"

namespace hybridps::engine {
namespace {

using core::Code;
using core::Status;

constexpr auto kCommandPatience = std::chrono::seconds(10);
constexpr auto kPublishEvery = std::chrono::milliseconds(100);
// The least memory that a job has on an engine for the state of its groups and operations.
constexpr std::uint64_t kStateBytesMin = std::uint64_t{16} << 20;

/// The topology for server number `before` + `index`. The `before` earlier servers own nothing in this topology.
schedule::Topology served_topology(const bootstrap::Roster& roster, int before, int index) {
  schedule::Topology topology = topology_of(roster, roster.size() + before + index);
  std::vector<double> weights = topology.weights();
  weights.insert(weights.begin() + topology.nodes(), static_cast<std::size_t>(before), 0.0);
  std::vector<int> regions(static_cast<std::size_t>(before), schedule::kNoRegion);
  for (const bootstrap::MemberRecord& server : roster.servers) regions.push_back(region_of_server(roster, server));
  return topology.with_weights(std::move(weights)).with_server_regions(std::move(regions));
}

}  // namespace

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

Status Shard::start(const ServerHostOptions& options, const core::Config& config, const Interfaces& interfaces,
                    int index, DataThreads& threads) {
  id_ = core::make_engine_id();
  RuntimeOptions o = RuntimeOptions::of(config, id_);
  o.keep_early = false;
  o.far_bytes = o.eager_bytes;  // memory is charged by this
  o.urgent_by_control = interfaces.with_control;
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

Shard::~Shard() {
  loop_.reset();  // first: the loop's thread uses the other members
  if (runtime_) runtime_->set_trace(nullptr);
}

Status Shard::call(core::OnceFn<void(Status&)> command) {
  Status status = loop_->call(std::move(command), kCommandPatience);
  return status.code() == Code::kTimeout ? Status(Code::kTimeout, "the server is too busy to answer") : status;
}

Status Shard::open(const ServerRequest& request, int index) {
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
                                             " ranks that push to it, one of each node, and " + std::to_string(served) +
                                             " of " + std::to_string(all.size()) +
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
                                              "; start it with the same HYBRIDPS_LIMITS=chunk_bytes as the ranks");
  if (Status given_up = may_meet(roster); !given_up.is_ok()) return given_up;
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

Status Shard::may_meet(const bootstrap::Roster& roster) const {
  for (const auto& member : roster.members)
    if (const KnownPeer* peer = runtime_->peers().find(member.engine); peer != nullptr && peer->dead)
      return Status(Code::kPeerDead, "its engine has given up " + bootstrap::describe(member) + " before");
  return Status::ok();
}

bool Shard::drop_before(core::GroupUid uid, std::uint32_t attempt) {
  const auto found = open_.find(uid);
  if (found == open_.end() || found->second.attempt >= attempt) return false;
  runtime_->dedicated().drop(uid);
  runtime_->dedicated().tick();  // closes the group at once
  return true;
}

void Shard::give_up(core::GroupUid uid) {
  runtime_->dedicated().drop(uid);
  given_up_.push_back(uid);
  if (given_up_.size() > kGivenUpKept) given_up_.pop_front();
}

void Shard::add_to(ServerHostStats& s) const {
  s.groups += groups_.load();
  s.groups_total += groups_total_.load();
  s.chunks += chunks_.load();
  s.bytes_summed += bytes_.load();
  s.refused_messages += refused_.load() + runtime_->counters()[observe::Counter::kBadMessages];
  s.rx_payload_bytes += runtime_->counters()[observe::Counter::kNetRxPayloadBytes];
  s.tx_payload_bytes += runtime_->counters()[observe::Counter::kNetTxPayloadBytes];
}

std::size_t Shard::round() {
  const core::TimePoint now = core::Clock::now();
  if (now >= next_publish_ || runtime_->dedicated_stats().groups != groups_.load(std::memory_order_relaxed)) {
    next_publish_ = now + kPublishEvery;
    publish();
  }
  return 0;
}

core::Result<std::shared_ptr<JobBudget>> Shard::job_of(const bootstrap::Roster& roster) {
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

void Shard::publish() {
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

}  // namespace hybridps::engine
