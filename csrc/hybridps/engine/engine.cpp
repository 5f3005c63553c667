#include "hybridps/engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <optional>
#include <system_error>
#include <thread>

#include "hybridps/bootstrap/incarnation.h"
#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/build_info.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/cores.h"
#include "hybridps/engine/server_joins.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/engine/engine_impl.h"
#include "hybridps/engine/group_handle.h"
#include "hybridps/engine/interface.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/roster_shelf.h"
#include "hybridps/engine/round_trips.h"
#include "hybridps/engine/summary.h"
#include "hybridps/intranode/shm/shm_transport.h"
#include "hybridps/tls/sealed_store.h"
#include "hybridps/transport/ucx/fork_guard.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {

using core::Code;
using core::Status;

namespace {

// How long linger() waits for goodbyes if the last operation of a group has failed: a member may no longer exist.
constexpr auto kLingerAfterFailure = std::chrono::milliseconds(1000);
// How long each network transport waits at its end for data under way. A peer that another rank found dead uses up this
// time twice, and leaving a failed group should take less than 2 s.
constexpr auto kCloseWithin = std::chrono::milliseconds(600);

// The assumed number of ranks on a machine, if the launcher gives none and the job has more ranks than this.
constexpr std::size_t kLocalRanksUsual = 8;

/// Measures the parts of a start, for the log.
class Stopwatch {
 public:
  void lap(const char* what) {
    const core::TimePoint now = core::Clock::now();
    const double ms = 1000 * core::to_seconds(now - last_);
    char part[64];
    std::snprintf(part, sizeof part, "%s%s %.1f ms", parts_.empty() ? "" : ", ", what, ms);
    parts_ += part;
    last_ = now;
  }
  std::string text() const {
    char total[32];
    std::snprintf(total, sizeof total, "%.1f ms: ", 1000 * core::to_seconds(last_ - start_));
    return total + parts_;
  }

 private:
  const core::TimePoint start_ = core::Clock::now();
  core::TimePoint last_ = start_;
  std::string parts_;
};

}  // namespace

// --- EngineImpl: life ------------------------------------------------------------------------------------------------

core::Result<std::shared_ptr<EngineImpl>> EngineImpl::create(std::size_t ranks) {
  core::Result<core::Config> config = core::Config::from_environment();
  if (!config.is_ok()) return config.status();
  core::set_log_level(config.value().log_level);
  // The last reference may be dropped inside a completion, on a thread that the destructor must join.
  std::shared_ptr<EngineImpl> engine(new EngineImpl(), [](EngineImpl* e) {
    if (!e->on_own_thread()) {
      delete e;
      return;
    }
    try {
      std::thread([e] { delete e; }).detach();
    } catch (const std::system_error& error) {
      core::log_error("cannot start the thread that ends the engine (", error.what(),
                      "); the engine stays until the process ends");
    }
  });
  if (Status status = engine->start(std::move(config).value(), ranks); !status.is_ok()) {
    // Rank 0 will not log these warnings: there will be no job.
    for (const std::string& warning : engine->config_.warnings) core::log_warn(warning);
    return status;
  }
  return engine;
}

Status EngineImpl::start(core::Config config, std::size_t ranks) {
  config_ = std::move(config);
  Stopwatch watch;
  settings_ = check_settings(config_);
  if (!settings_.problems.empty()) return settings_.problems.front();
  config_.warnings.insert(config_.warnings.end(), settings_.warnings.begin(), settings_.warnings.end());
  watch.lap("settings and interfaces");

  const std::size_t ranks_said = local_ranks(ranks);
  const std::size_t ranks_here =
      ranks_said > 0 ? ranks_said : std::min(ranks > 0 ? ranks : kLocalRanksUsual, kLocalRanksUsual);
  RuntimeOptions options = RuntimeOptions::of(config_, id_);
  options.local_peers = ranks_here;
  options.tune = config_.tune;
  options.warn_seconds = config_.warn_seconds;
  options.find_rates = config_.find_rates;
  const std::size_t pool_bytes = whole_pages(std::max<std::size_t>(options.pool_bytes(), config_.pool_bytes));
  if (settings_.interfaces.rdma)
    if (Status status = transport::check_locked_memory(transport::locked_memory_needed(pool_bytes),
                                                       transport::locked_memory_limit());
        !status.is_ok())
      return status;

  Transports transports;
  core::Result<PrivatePool> pool =
      make_pool(pool_bytes, ranks_said > 0 ? std::optional(ranks_said) : std::nullopt, ranks, transports);
  if (!pool.is_ok()) return pool.status();
  auto* const proving = static_cast<intranode::shm::ShmTransport*>(transports.shm.get());
  watch.lap("shared memory");
  DataOptions network = data_options(config_, kCloseWithin, settings_.secret.authority);
  network.device_memory = config_.gpudirect;
  if (config_.tune) network.sockets_to_choose = schedule::kSocketsToChoose;
  if (Status status = make_network(ranks_here, network, options, transports); !status.is_ok()) return status;
  watch.lap("network");

  core::Result<std::unique_ptr<Runtime>> runtime =
      Runtime::create(options, pool.value().memory, std::move(pool.value().keep), std::move(transports));
  if (!runtime.is_ok()) return runtime.status();
  runtime_ = std::move(runtime).value();
  make_groups();
  make_desk();
  make_joiner(proving);
  self_.notes = bootstrap::joined_notes(config_.warnings);
  description_ = text_of(settings_.interfaces) + (config_.shm ? " shm" : "");
  core::log_debug("engine ", core::to_string(id_), " ", description_,
                  (settings_.interfaces.control_ucx ? " ucx " + transport::ucx_version() : ""), "; control by ",
                  settings_.interfaces.control, ": ", settings_.interfaces.control_why);

  LoopOptions loop;
  loop.thread_name = "hybridps";
  loop.spinning = spinning_of(config_);
  loop_ = std::make_unique<Loop>(*runtime_, *this, loop);
  desk_->set_loop(loop_.get());
  schedule::TuningRange range;
  range.sockets = static_cast<int>(config_.data_sockets);
  range.sockets_max = static_cast<int>(sockets_of(settings_.interfaces, network, config_.data_sockets));
  groups_->set_tuning(range);
  groups_->set_servers({settings_.servers, settings_.secret, core::from_seconds(config_.servers_retry_seconds),
                        config_.servers_required},
                       [this](const bootstrap::Roster& roster, int rank) { return check_descriptors(roster, rank); });
  Status status = loop_->start();
  if (const std::size_t open = transport::open_descriptors().size(); open > 0)
    own_descriptors_ = open + kDescriptorsToSpare;
  watch.lap("send pool and threads");
  core::log_debug("engine started in ", watch.text());
  return status;
}

core::Result<PrivatePool> EngineImpl::make_pool(std::size_t bytes, std::optional<std::size_t> ranks_here,
                                                std::size_t ranks, Transports& transports) {
  if (config_.shm) {
    intranode::shm::ShmOptions options;
    options.self = id_;
    options.pool_bytes = bytes;
    // Twice the number of ranks: ranks of an earlier life may not have ended yet. An unused place takes no memory.
    const std::size_t least = ranks_here ? 64 : options.peers_max;
    options.peers_max =
        static_cast<std::uint32_t>(std::clamp<std::size_t>(2 * ranks_here.value_or(ranks), least, 4096));
    core::Result<std::unique_ptr<intranode::shm::ShmTransport>> shm = intranode::shm::ShmTransport::create(options);
    if (shm.is_ok()) {
      PrivatePool pool{shm.value()->pool_memory(), shm.value()->keep_pool_memory()};
      self_.shm_address = to_record(shm.value()->address());
      transports.shm = std::move(shm).value();
      return pool;
    }
    if (shm.status().code() != Code::kUnsupported) return shm.status();
    config_.shm = false;  // the node identity tells the others
    config_.warnings.push_back("no shared memory with other ranks of the node: " + std::string(shm.status().message()) +
                               ". The data of these ranks goes over TCP. What to do: allow AF_UNIX in the sandbox "
                               "(seccomp, RestrictAddressFamilies=), or set HYBRIDPS_SHM=0 to silence this warning");
  }
  core::Result<PrivatePool> pool = map_pool(bytes);
  if (pool.is_ok()) return pool;
  return Status(pool.status().code(), std::string(pool.status().message()) + "; lower HYBRIDPS_POOL_BYTES");
}

Status EngineImpl::make_network(std::size_t ranks_here, const DataOptions& data_options, RuntimeOptions& options,
                                Transports& transports) {
  const Interfaces& interfaces = settings_.interfaces;
  const std::size_t cores = cores_for_each(config_, ranks_here);
  const DataThreadsPlan plan = plan_data_threads(config_, cores, 1, interfaces, ranks_here);
  DataThreads threads(plan, spinning_of(config_));
  if (Status status =
          check_ports(config_.ports, ranks_here, listeners_of(interfaces, data_options, config_.data_sockets));
      !status.is_ok())
    return status;
  core::Result<std::unique_ptr<transport::Transport>> data =
      make_data_transport(interfaces, data_options, config_.data_sockets, threads);
  if (!data.is_ok()) return data.status();
  threads.warn_of_idle();
  core::Result<std::unique_ptr<transport::Transport>> control = make_control_transport(interfaces, data_options);
  if (!control.is_ok()) return control.status();
  const auto shm_address = std::move(self_.shm_address);
  self_ = own_record(config_, interfaces, options, *data.value(), *control.value());
  self_.shm_address = shm_address;
  // A rank sets slots aside for grants from the other ranks of its node, and assumes that all ranks grant equally many.
  // So the setting is a part of the build text.
  if (config_.grant_chunks != core::Config().grant_chunks)
    self_.build += " HYBRIDPS_LIMITS=grant_chunks=" + std::to_string(config_.grant_chunks);
  transports.data = std::move(data).value();
  transports.control = std::move(control).value();
  transports.damaged = data_options.damaged;

  options.cards = std::max<std::size_t>(interfaces.nics.size(), 1);
  options.urgent_by_control = interfaces.with_control;  // not if data has a better network
  const bool apart = plan.most > 0 && !plan.when_busy;
  options.urgent_always = apart;  // saves two hand-overs between threads
  options.may_nap = options.urgent_by_control && !interfaces.ucx && !apart;
  return Status::ok();
}

std::string EngineImpl::transport_text() const { return text_of_transport(settings_.interfaces, config_); }

void EngineImpl::make_groups() {
  board_ = std::make_unique<VerdictBoard>([this](core::GroupUid uid, const Status& verdict) {
    post([this, uid, verdict] { groups_->on_told(uid, verdict); });
  });
  SummaryOptions summary;
  summary.transport = transport_text();
  summary.servers_named = settings_.servers.size();
  summary.servers_nodes_min = ServerJoins::kNodesMin;
  groups_ = std::make_unique<Groups>(
      config_, id_, *runtime_, *board_, std::move(summary),
      [this] {
        {
          const std::lock_guard lock(linger_mutex_);
          --groups_open_;
        }
        linger_changed_.notify_all();
      },
      [this](core::EngineId peer, const Status& cause) {
        departures_->add(peer, Status(Code::kPeerDead, std::string(cause.message())));
      });
}

void EngineImpl::make_desk() {
  StatusDesk::About about;
  about.engine = id_;
  about.job = job_name();
  about.transport = transport_text();
  for (const transport::LocalNic& nic : settings_.interfaces.nics) about.limit_bytes_per_second += nic.gbps * 1e9 / 8;
  limit_bytes_per_second_ = about.limit_bytes_per_second;
  about.codec = config_.compress;
  about.write_groups = [this](observe::Json& json, bool members) { groups_->write_status(json, members); };
  about.look = [this] { return groups_->look_for_status(); };
  about.name = [this](core::EngineId engine) { return groups_->name_of(engine); };
  desk_ = std::make_unique<StatusDesk>(*runtime_, std::move(about));
}

void EngineImpl::make_joiner(intranode::shm::ShmTransport* proving) {
  Joiner::JoinerHooks joined;
  joined.post = [this](core::OnceFn<void()> command) { post(std::move(command)); };
  joined.open = [this](const auto& group, const bootstrap::Roster& roster) {
    if (group->options.is_world) note_world(group, roster);
    groups_->open(group, roster);
  };
  joined.ask = [this](const std::vector<core::EngineId>& peers) {
    for (const core::EngineId peer : peers) runtime_->send_control(peer, {{}, 0, wire::Ping{}}, {});
  };
  joined.fail = [this](GroupCore& group, const Status& status) { groups_->not_joined(group, status); };
  joined.looked = [this] { groups_->on_looked(); };
  joined.check = [this](const bootstrap::Roster& roster, int rank) { return check_descriptors(roster, rank); };
  joiner_ = std::make_unique<Joiner>(std::move(joined), proving);
}

EngineImpl::~EngineImpl() {
  if (in_forked_child()) {
    (void)loop_.release();     // NOLINT: its thread does not exist here
    (void)runtime_.release();  // NOLINT: its transports belong to the parent
    (void)board_.release();    // NOLINT: its thread does not exist here
    (void)joiner_.release();   // NOLINT: its thread does not exist here
    (void)outlet_.release();   // NOLINT: its thread does not exist here
    (void)desk_.release();     // NOLINT: it refers to loop_ and runtime_
    (void)trace_.release();    // NOLINT: its thread does not exist here
    return;
  }
  outlet_.reset();  // the outlet asks the loop
  if (joiner_) joiner_->stop();
  if (loop_) {
    loop_->stop();
    board_.reset();  // the board posts verdicts to the loop
    loop_.reset();
  }
  if (runtime_) runtime_->set_trace(nullptr);
  trace_.reset();
  runtime_.reset();
}

Status EngineImpl::check_descriptors(const bootstrap::Roster& roster, int rank) const {
  DescriptorUse use;
  use.own = own_descriptors_;
  const int node = roster.node_of[static_cast<std::size_t>(rank)];
  use.local = roster.ranks_of_node(node).size() - 1;
  use.remote = static_cast<std::uint64_t>(roster.size()) - 1 - use.local + roster.servers.size();
  std::size_t cards = 1;
  for (const auto* side : {&roster.members, &roster.servers})
    for (const bootstrap::MemberRecord& member : *side) cards = std::max(cards, member.nics.size());
  use.ways = data_ways(config_, settings_.interfaces, cards);
  return allow_descriptors(use);
}

// --- EngineImpl: in the loop -----------------------------------------------------------------------------------------

std::size_t EngineImpl::round() { return groups_->tick() + joiner_->answer_proofs(); }

std::chrono::milliseconds EngineImpl::sleep_at_most() const {
  return joiner_->has_proofs() ? std::chrono::milliseconds(5) : groups_->sleep_at_most();
}

void EngineImpl::finish() { groups_->close_all(); }

void EngineImpl::linger() {
  if (in_forked_child() || on_own_thread()) return;
  std::unique_lock lock(linger_mutex_);
  if (groups_staying_ > 0) return;
  hurry_ = false;
  lock.unlock();
  post([this] {
    const bool failed = groups_->has_failed_leaver();
    const std::lock_guard inner(linger_mutex_);
    hurry_ = failed;
    linger_changed_.notify_all();
  });
  lock.lock();
  const auto start = core::Clock::now();
  const auto deadline = start + kLinger;
  const auto closed = [&] { return groups_open_ == 0 || groups_staying_ > 0; };  // or a new group has been opened
  linger_changed_.wait_until(lock, std::min(deadline, start + kLingerAfterFailure), closed);
  linger_changed_.wait_until(lock, deadline, [&] { return closed() || hurry_; });
  if (closed()) return;
  core::log_info("leaving after ", core::to_seconds(core::Clock::now() - start),
                 " s although not all members have said goodbye");
  lock.unlock();
  post([this] { groups_->close_left(); });
  lock.lock();
  linger_changed_.wait_for(lock, std::chrono::seconds(2), closed);
}

// --- EngineImpl: bootstrap -------------------------------------------------------------------------------------------

void EngineImpl::note_world(const std::shared_ptr<GroupCore>& group, const bootstrap::Roster& roster) {
  World world{group, {}};
  for (const bootstrap::MemberRecord& member : roster.members)
    world.members.push_back({member.engine, member.host_name + " pid " + std::to_string(member.pid)});
  const core::MutexLock lock(worlds_mutex_);
  std::erase_if(worlds_, [](const World& other) { return other.group.expired(); });
  worlds_.push_back(std::move(world));
}

std::vector<bootstrap::ExpectedMember> EngineImpl::presumed(const std::vector<int>& global_ranks) {
  std::vector<bootstrap::ExpectedMember> members(global_ranks.size());
  std::vector<bool> doubtful(global_ranks.size(), false);  // two worlds have different processes at this rank
  const core::MutexLock lock(worlds_mutex_);
  for (const World& world : worlds_) {
    const std::shared_ptr<GroupCore> group = world.group.lock();
    if (!group) continue;
    {
      const std::lock_guard of_group(group->mutex);
      if (group->left) continue;
    }
    for (std::size_t rank = 0; rank < members.size(); ++rank) {
      if (global_ranks[rank] < 0 || static_cast<std::size_t>(global_ranks[rank]) >= world.members.size()) continue;
      const bootstrap::ExpectedMember& member = world.members[static_cast<std::size_t>(global_ranks[rank])];
      if (members[rank].engine.value == 0) members[rank] = member;
      if (members[rank].engine != member.engine) doubtful[rank] = true;
    }
  }
  for (std::size_t rank = 0; rank < members.size(); ++rank)
    if (doubtful[rank]) members[rank] = {};
  return members;
}

core::Result<std::shared_ptr<Group>> EngineImpl::open_group(GroupOptions options) {
  if (in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  if (Status status = joiner_->start(); !status.is_ok()) return status;
  auto group = std::make_shared<GroupCore>();
  group->options = std::move(options);
  group->options.store = tls::seal(std::move(group->options.store), settings_.secret.authority);
  const GroupOptions& o = group->options;

  bootstrap::RendezvousOptions r;
  r.group_name = o.name;
  group->prefix = bootstrap::group_key_prefix(o.name, o.life.empty() ? o.incarnation : o.life);
  r.expected = o.expected;
  r.life = o.life;
  if (o.life.empty()) r.lives_prefix = bootstrap::lives_key_prefix(o.name);
  r.departures = departures_;
  if (o.expected.empty()) r.presumed = presumed(o.global_ranks);
  r.key_prefix = group->prefix;
  r.self = self_;
  r.self.incarnation = o.incarnation;
  r.self.group_rank = o.rank;
  r.self.group_size = o.size;
  if (o.expected.empty() && !o.global_ranks.empty()) r.self.members = bootstrap::members_text(o.global_ranks);
  r.self.made_ms = bootstrap::wall_ms();
  r.self.compress = o.compress;
  r.self.priority = o.priority;
  if (config_.shm) r.shelf = roster_shelf();
  r.process_started_ms = bootstrap::process_started_ms();
  r.wall_ms = &bootstrap::wall_ms;
  r.deadline = o.timeout.count() > 0 ? core::Deadline::after(o.timeout, o.since) : core::Deadline::never();
  r.progress = [](std::string_view text) { core::log_warn(text); };
  if (o.rank == 0) r.find_regions = &regions_by;
  r.names_servers = o.rank == 0 && !settings_.servers.empty() && o.dedicated_servers;
  {
    const std::lock_guard lock(linger_mutex_);
    ++groups_open_;
    ++groups_staying_;
  }
  linger_changed_.notify_all();
  std::call_once(outlet_opened_, [&] { open_outlet(o); });
  post([this, group] { groups_->add(group); });
  joiner_->join(group, std::move(r));
  return std::shared_ptr<Group>(
      std::make_shared<GroupHandle>(std::static_pointer_cast<EngineImpl>(shared_from_this()), group));
}

// --- The engine of this process --------------------------------------------------------------------------------------

namespace {

struct Current {
  std::mutex mutex;
  std::weak_ptr<EngineImpl> engine;
  std::optional<std::uint64_t> generation;  // fork generation at the time the engine was made
};

/// This thread holds the mutex and makes the engine. The UCX loader is a Python function of the caller, and signal
/// handlers and finalizers may run in it. They may call acquire() again on this thread.
thread_local bool makes_engine = false;

Current& process_engine() {
  static Current* current = new Current();  // never destroyed: groups may outlive static destructors
  return *current;
}

}  // namespace

core::Result<std::shared_ptr<Engine>> Engine::acquire(std::size_t ranks) {
  Current& current = process_engine();
  if (makes_engine)
    return Status(Code::kUnsupported, "hybridps was called again, in a signal handler or finalizer, while it starts");
  if (current.generation && current.generation != core::fork_generation())
    return Status(Code::kUnsupported,
                  "hybridps cannot be used in a forked child of a process that uses it; start the child with the "
                  "\"spawn\" or \"forkserver\" method");
  const std::lock_guard lock(current.mutex);
  if (std::shared_ptr<EngineImpl> engine = current.engine.lock()) return std::shared_ptr<Engine>(engine);
  makes_engine = true;
  core::Result<std::shared_ptr<EngineImpl>> engine = EngineImpl::create(ranks);
  makes_engine = false;
  if (!engine.is_ok()) return engine.status();
  current.engine = engine.value();
  current.generation = core::fork_generation();
  return std::shared_ptr<Engine>(std::move(engine).value());
}

void Engine::load_ucx_by(std::function<core::Result<std::string>()> loader) {
  transport::set_ucx_loader(std::move(loader));
}

std::shared_ptr<Engine> Engine::current() {
  Current& current = process_engine();
  if (makes_engine || current.generation != core::fork_generation()) return nullptr;
  const std::lock_guard lock(current.mutex);
  return current.engine.lock();
}

}  // namespace hybridps::engine
