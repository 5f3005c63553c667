#include "hybridps/engine/engine.h"

#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include "hybridps/bootstrap/departures.h"
#include "hybridps/bootstrap/incarnation.h"
#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/bootstrap/record.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/build_info.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/door/door.h"
#include "hybridps/engine/cores.h"
#include "hybridps/engine/dedicated_client.h"
#include "hybridps/engine/group_core.h"
#include "hybridps/engine/groups.h"
#include "hybridps/engine/data_transport.h"
#include "hybridps/engine/descriptors.h"
#include "hybridps/engine/interface.h"
#include "hybridps/engine/joiner.h"
#include "hybridps/engine/loop.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/runtime.h"
#include "hybridps/engine/settings.h"
#include "hybridps/engine/status_desk.h"
#include "hybridps/engine/summary.h"
#include "hybridps/engine/verdict_board.h"
#include "hybridps/intranode/shm/shm_transport.h"
#include "hybridps/observe/outlet.h"
#include "hybridps/observe/trace.h"
#include "hybridps/transport/ucx/fork_guard.h"
#include "hybridps/transport/ucx/ucx_config.h"

namespace hybridps::engine {
namespace {

using core::Code;
using core::Status;

// How long goodbyes are waited for where the last operation of a group has failed: somebody may not be there to say one.
constexpr auto kLingerAfterFailure = std::chrono::milliseconds(1000);
// How long each network transport waits at the end for what is on its way. A peer that another rank found dead takes all of
// it, twice, and leaving a failed group should take less than 2 s.
constexpr auto kCloseWithin = std::chrono::milliseconds(600);
// Registering a GPU's memory takes milliseconds; a loop that hangs must not take its caller with it.
constexpr auto kAttachWithin = std::chrono::seconds(10);

// How many ranks are taken to share a machine where nobody says and the job has more.
constexpr std::size_t kLocalRanksUsual = 8;

// What reserve() gives when the group has been left.
constexpr std::uint64_t kNotReserved = ~std::uint64_t{0};

/// How long the parts of a start took, for the log.
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

/// As its launcher has it, the same on all ranks; empty: it has said nothing.
std::string job_name() {
  const auto value = [](const char* name) {
    const char* text = std::getenv(name);
    return std::string(text == nullptr ? "" : text);
  };
  if (const std::string run = value("TORCHELASTIC_RUN_ID"); !run.empty() && run != "none") return run;
  if (const std::string slurm = value("SLURM_JOB_ID"); !slurm.empty()) return slurm;
  const std::string address = value("MASTER_ADDR");
  return address.empty() ? address : address + ':' + value("MASTER_PORT");
}

class EngineImpl;

class GroupImpl final : public Group {
 public:
  GroupImpl(std::shared_ptr<EngineImpl> engine, std::shared_ptr<GroupCore> core)
      : engine_(std::move(engine)), core_(std::move(core)) {}
  ~GroupImpl() override;

  int rank() const noexcept override { return core_->options.rank; }
  int size() const noexcept override { return core_->options.size; }
  const std::string& name() const noexcept override { return core_->options.name; }
  std::shared_ptr<Engine> engine() const noexcept override;
  std::uint64_t submit(worker::Operation operation, worker::Completion done, bool will_drive) override;
  std::uint64_t reserve() override;
  void submit_reserved(std::uint64_t sequence, worker::Operation operation, worker::Completion done) override;
  core::Result<std::shared_ptr<void>> attach_device(transport::DeviceMemory memory,
                                                    std::shared_ptr<void> keep) override;
  core::Result<std::vector<Remembered>> remembered(std::vector<compress::TensorKey> keys) override;
  core::Result<RememberedSummary> remembered_summary() override;
  bool may_code() override {
    const std::lock_guard lock(core_->mutex);
    return core_->ready && core_->summary.servers.empty() && core_->coded_or_joined->may_code();
  }
  void drive(const std::function<bool()>& done, core::TimePoint until) override;
  Status wait_ready() override;
  Status status() const override {
    const std::lock_guard lock(core_->mutex);
    return core_->status;
  }
  void abort(const std::string& reason) override;
  void leave() override;
  void supersede(const std::string& reason) override;
  std::uint64_t sequence_submitted() const noexcept override {
    const std::lock_guard lock(core_->mutex);
    return core_->submitted;
  }
  std::uint64_t sequence_completed() const noexcept override { return core_->completed.load(); }
  std::vector<int> node_of() const override {
    const std::lock_guard lock(core_->mutex);
    return core_->node_of;
  }
  GroupSummary summary() const override {
    const std::lock_guard lock(core_->mutex);
    return core_->summary;
  }

 private:
  const std::shared_ptr<EngineImpl> engine_;
  const std::shared_ptr<GroupCore> core_;
};

class EngineImpl final : public Engine, public LoopClient {
 public:
  static core::Result<std::shared_ptr<EngineImpl>> create(std::size_t ranks);
  ~EngineImpl() override;

  core::EngineId id() const noexcept override { return id_; }
  core::Result<std::shared_ptr<Group>> open_group(GroupOptions options) override;
  void linger() override;
  EngineStats stats() const override;
  std::string describe() const override { return description_; }

  bool in_forked_child() const noexcept { return core::fork_generation() != generation_; }
  bool on_own_thread() const noexcept {
    return (loop_ != nullptr && loop_->in_round()) || (joiner_ != nullptr && joiner_->on_its_thread());
  }
  Loop& loop() noexcept { return *loop_; }
  bool post(core::OnceFn<void()> command) { return loop_->post(std::move(command)); }
  /// A group was left; its goodbye is on the way.
  void count_left() {
    const std::lock_guard lock(linger_mutex_);
    --groups_staying_;
  }
  // In the loop only.
  Groups& groups() { return *groups_; }
  Runtime& runtime() { return *runtime_; }

 private:
  EngineImpl() : id_(core::make_engine_id()) {}
  Status start(core::Config config, std::size_t ranks);
  /// That there is room for.
  std::uint64_t chunk_bytes_max() const;
  // LoopClient
  std::size_t round() override;
  std::chrono::milliseconds sleep_at_most() const override;
  void finish() override;

  /// In the loop: the members of a world that is open here.
  void note_world(const std::shared_ptr<GroupCore>& group, const bootstrap::Roster& roster);
  /// Who they are, where all worlds that this process is in agree; any thread.
  std::vector<bootstrap::ExpectedMember> presumed(const std::vector<int>& global_ranks);
  void write_stats() const;
  /// From the first group on: how others look into this process.
  void open_outlet(const GroupOptions& first);
  /// Empty folder: ends the one that there is. Any thread but the loop's.
  Status trace_into(const std::string& folder, int rank);
  /// Any thread, once started.
  Status check_descriptors(const bootstrap::Roster& roster, int rank) const;

  const std::uint64_t generation_ = core::fork_generation();
  const core::EngineId id_;
  core::Config config_;
  std::string description_;
  CheckedSettings settings_;
  std::vector<bootstrap::Nic> nics_;
  double limit_bytes_per_second_ = 0;  // of these; 0: not known
  std::uint64_t own_descriptors_ = kDescriptorsOfARank;  // before there was a peer
  std::string identity_;
  bootstrap::Bytes data_address_;
  bootstrap::Bytes control_address_;
  bootstrap::Bytes shm_address_;
  std::unique_ptr<Runtime> runtime_;  // in the loop only, once that runs
  std::unique_ptr<Loop> loop_;
  std::unique_ptr<VerdictBoard> board_;  // in the loop only, while that runs
  std::unique_ptr<Groups> groups_;       // in the loop only, once that runs
  std::unique_ptr<Joiner> joiner_;
  std::unique_ptr<StatusDesk> desk_;
  std::once_flag outlet_opened_;
  std::unique_ptr<observe::Outlet> outlet_;
  std::mutex trace_mutex_;
  std::unique_ptr<observe::Trace> trace_;

  const std::shared_ptr<bootstrap::Departures> departures_ = std::make_shared<bootstrap::Departures>();
  struct World {
    std::weak_ptr<GroupCore> group;
    std::vector<bootstrap::ExpectedMember> members;
  };
  std::mutex worlds_mutex_;
  std::vector<World> worlds_;  // that have opened here; those that were left are dropped now and then

  std::mutex linger_mutex_;
  std::condition_variable linger_changed_;
  std::size_t groups_open_ = 0;     // not closed
  std::size_t groups_staying_ = 0;  // not left
  bool hurry_ = false;              // a group that waits for goodbyes has failed before
};

// --- GroupImpl -------------------------------------------------------------------------------------------------------

GroupImpl::~GroupImpl() {
  if (!engine_->in_forked_child()) leave();
}

std::shared_ptr<Engine> GroupImpl::engine() const noexcept { return engine_; }

std::uint64_t GroupImpl::submit(worker::Operation operation, worker::Completion done, bool will_drive) {
  if (engine_->in_forked_child()) {
    done(worker::Outcome{Status(Code::kUnsupported,
                                "hybridps cannot be used in a forked child process; start it with the \"spawn\" or "
                                "\"forkserver\" method, or communicate in the parent only"),
                         -1});
    return 0;
  }
  Status refused;
  std::uint64_t sequence = 0;
  operation.issued_at = core::Clock::now();
  {
    const std::lock_guard lock(core_->mutex);
    if (core_->left)
      refused =
          Status(Code::kClosed, "process group \"" + name() + "\" was destroyed; no further operation is possible");
    else if (!core_->status.is_ok())
      refused = core_->status;
    // Counted even when refused, as the caller did call.
    if (operation.kind != schedule::Kind::kPointToPoint) sequence = core_->submitted++;
    if (refused.is_ok()) {
      // Under the lock: commands of one group are in the order of their sequence numbers.
      engine_->loop().post(
          [engine = engine_.get(), core = core_, o = std::move(operation), sequence, d = std::move(done)]() mutable {
            engine->groups().submit(core, std::move(o), sequence, std::move(d));
          },
          will_drive);
      return sequence;
    }
  }
  done(worker::Outcome{std::move(refused), -1});
  return sequence;
}

std::uint64_t GroupImpl::reserve() {
  const std::lock_guard lock(core_->mutex);
  if (core_->left || engine_->in_forked_child()) return kNotReserved;
  const std::uint64_t sequence = core_->submitted++;
  engine_->post([engine = engine_.get(), core = core_, sequence] { engine->groups().reserve(*core, sequence); });
  return sequence;
}

void GroupImpl::submit_reserved(std::uint64_t sequence, worker::Operation operation, worker::Completion done) {
  if (engine_->in_forked_child() || sequence == kNotReserved) {
    done(worker::Outcome{
        Status(Code::kClosed, "process group \"" + name() + "\" was destroyed; no further operation is possible"), -1});
    return;
  }
  engine_->post(
      [engine = engine_.get(), core = core_, o = std::move(operation), sequence, d = std::move(done)]() mutable {
        engine->groups().submit(core, std::move(o), sequence, std::move(d));
      });
}

core::Result<std::shared_ptr<void>> GroupImpl::attach_device(transport::DeviceMemory memory,
                                                             std::shared_ptr<void> keep) {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  const std::span<std::byte> bytes = memory.bytes;
  const Status status = engine_->loop().call(
      [engine = engine_.get(), memory = std::move(memory), keep = std::move(keep)](Status& attached) mutable {
        attached = engine->runtime().attach_device(memory, std::move(keep));
      },
      kAttachWithin);
  if (status.code() == Code::kTimeout)  // the loop may still come to it
    engine_->post([engine = engine_.get(), bytes] { engine->runtime().detach_device(bytes); });
  if (!status.is_ok()) return status;
  // An engine that is gone has let go of it: its Runtime dropped `keep`.
  return std::shared_ptr<void>(bytes.data(), [bytes, weak = std::weak_ptr<EngineImpl>(engine_)](void*) {
    if (const auto engine = weak.lock(); engine && !engine->in_forked_child())
      engine->post([raw = engine.get(), bytes] { raw->runtime().detach_device(bytes); });
  });
}

core::Result<std::vector<Group::Remembered>> GroupImpl::remembered(std::vector<compress::TensorKey> keys) {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  auto found = std::make_shared<std::vector<Remembered>>();  // the loop may come to it after the time is up
  const Status status = engine_->loop().call(
      [core = core_, keys = std::move(keys), found](Status&) {
        if (core->state == nullptr) return;
        for (const compress::TensorKey key : keys)
          found->push_back({core->state->residuals.copy_of(key).values, core->state->owed.copy_of(key).values,
                            core->state->momenta.copy_of(key).values});
      },
      kAttachWithin);
  if (!status.is_ok()) return status;
  return std::move(*found);
}

core::Result<Group::RememberedSummary> GroupImpl::remembered_summary() {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  auto summary = std::make_shared<RememberedSummary>();
  const Status status = engine_->loop().call(
      [core = core_, summary](Status&) {
        if (core->state == nullptr) return;
        const worker::GroupState& group = *core->state;
        summary->norm = std::hypot(group.residuals.norm(), group.owed.norm());
        for (const auto* part : {&group.residuals, &group.owed, &group.momenta}) {
          const compress::Residuals::Stats stats = part->stats();
          summary->tensors += stats.tensors;
          summary->bytes += stats.bytes;
          summary->dropped += stats.dropped;
          summary->refused += stats.refused;
        }
        if (group.lost_servers) summary->refused_by_servers = group.lost_servers->tensors_forgotten();
      },
      kAttachWithin);
  if (!status.is_ok()) return status;
  return *summary;
}

void GroupImpl::drive(const std::function<bool()>& done, core::TimePoint until) {
  if (!engine_->in_forked_child()) engine_->loop().drive(done, until);
}

Status GroupImpl::wait_ready() {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  std::unique_lock lock(core_->mutex);
  if (!core_->ready && engine_->on_own_thread())
    return Status(Code::kUnsupported, "a completion cannot wait for process group \"" + name() + "\"");
  core_->changed.wait(lock, [&] { return core_->ready || (!core_->opening && !core_->status.is_ok()); });
  // Ranks that were quicker may have found that their calls differ: that is for this rank's operations to tell.
  return core_->ready && core_->status.code() == Code::kMismatch ? core_->disagreement : core_->status;
}

void GroupImpl::abort(const std::string& reason) {
  if (engine_->in_forked_child()) return;
  engine_->post([engine = engine_.get(), core = core_, reason] { engine->groups().abort(*core, reason); });
}

void GroupImpl::leave() {
  if (engine_->in_forked_child()) return;
  {
    const std::lock_guard lock(core_->mutex);
    if (std::exchange(core_->left, true)) return;
  }
  engine_->count_left();
  engine_->post([engine = engine_.get(), core = core_] { engine->groups().want_goodbye(core); });
}

void GroupImpl::supersede(const std::string& reason) {
  if (engine_->in_forked_child()) return;
  {
    const std::lock_guard lock(core_->mutex);
    if (std::exchange(core_->left, true)) return;
  }
  engine_->count_left();
  engine_->post([engine = engine_.get(), core = core_, reason] { engine->groups().supersede(core, reason); });
}

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
      core::log_error("the engine stays until the process ends: cannot start a thread that ends it (", error.what(),
                      ")");
    }
  });
  if (Status status = engine->start(std::move(config).value(), ranks); !status.is_ok()) {
    for (const std::string& warning : engine->config_.warnings) core::log_warn(warning);  // rank 0 will not: there will be no job
    return status;
  }
  return engine;
}

std::uint64_t EngineImpl::chunk_bytes_max() const {
  return config_.tune ? std::max(config_.chunk_bytes, schedule::kChunkRoomBytes) : config_.chunk_bytes;
}

Status EngineImpl::start(core::Config config, std::size_t ranks) {
  config_ = std::move(config);
  Stopwatch watch;
  settings_ = check_settings(config_);
  if (!settings_.problems.empty()) return settings_.problems.front();
  const Interfaces& interfaces = settings_.interfaces;
  watch.lap("settings and interfaces");

  RuntimeOptions options;
  options.self = id_;
  options.eager_bytes = config_.eager_bytes;
  options.chunk_bytes = chunk_bytes_max();
  options.tune = config_.tune;
  options.window_bytes = config_.window_bytes;
  options.grant_chunks = static_cast<std::uint32_t>(config_.grant_chunks);
  const std::size_t ranks_said = local_ranks(ranks);
  const std::size_t ranks_here =
      ranks_said > 0 ? ranks_said : std::min(ranks > 0 ? ranks : kLocalRanksUsual, kLocalRanksUsual);
  options.local_peers = ranks_here;
  options.warn_seconds = config_.warn_seconds;
  options.find_rates = config_.find_rates;
  options.heartbeat_seconds = config_.heartbeat_seconds;
  options.dead_seconds = config_.dead_seconds;
  const std::size_t pool_bytes =
      whole_pages(std::max<std::size_t>(Runtime::pool_bytes(Runtime::pool_classes(options, 0)), config_.pool_bytes));

  if (interfaces.rdma)
    if (Status status = transport::check_locked_memory(transport::locked_memory_needed(pool_bytes),
                                                       transport::locked_memory_limit());
        !status.is_ok())
      return status;

  Transports transports;
  std::span<std::byte> memory;
  std::shared_ptr<void> keep;
  intranode::shm::ShmTransport* proving = nullptr;
  if (config_.shm) {
    intranode::shm::ShmOptions shm_options;
    shm_options.self = id_;
    shm_options.pool_bytes = pool_bytes;
    // Twice as many as there are: those of a life before may not have gone yet. What nobody uses takes no memory.
    const std::size_t least = ranks_said > 0 ? 64 : shm_options.peers_max;
    shm_options.peers_max =
        static_cast<std::uint32_t>(std::clamp<std::size_t>(2 * (ranks_said > 0 ? ranks_said : ranks), least, 4096));
    core::Result<std::unique_ptr<intranode::shm::ShmTransport>> shm = intranode::shm::ShmTransport::create(shm_options);
    if (shm.is_ok()) {
      memory = shm.value()->pool_memory();
      keep = shm.value()->keep_pool_memory();
      shm_address_ = to_record(shm.value()->address());
      proving = shm.value().get();
      transports.shm = std::move(shm).value();
    } else if (shm.status().code() == Code::kUnsupported) {
      config_.shm = false;  // the node identity tells the others
      config_.warnings.push_back("no shared memory with other ranks of the node: " + std::string(shm.status().message()) +
                                 "; their data goes over TCP, as with HYBRIDPS_SHM=0, which silences this. To have it, "
                                 "allow AF_UNIX in the sandbox (seccomp, RestrictAddressFamilies=)");
    } else {
      return shm.status();
    }
  }
  if (!config_.shm) {
    core::Result<PrivatePool> pool = map_pool(pool_bytes);
    if (!pool.is_ok())
      return Status(pool.status().code(), std::string(pool.status().message()) + "; lower HYBRIDPS_POOL_BYTES");
    memory = pool.value().memory;
    keep = std::move(pool.value().keep);
  }
  watch.lap("shared memory");
  const std::size_t cores = cores_for_each(config_, ranks_here);
  const DataThreadsPlan data_threads = plan_data_threads(config_, cores, 1, interfaces, ranks_here);
  DataThreads threads(data_threads, spinning_of(config_));
  DataOptions data_options{kCloseWithin, user_timeout(config_), config_.gpudirect};
  if (config_.tune) data_options.sockets_to_choose = schedule::kSocketsToChoose;
  core::Result<std::unique_ptr<transport::Transport>> data_transport =
      make_data_transport(interfaces, data_options, config_.data_sockets, threads);
  if (!data_transport.is_ok()) return data_transport.status();
  threads.warn_of_idle();
  watch.lap("data transport");
  core::Result<std::unique_ptr<transport::Transport>> control_transport =
      make_control_transport(interfaces, data_options);
  if (!control_transport.is_ok()) return control_transport.status();
  watch.lap("control transport");
  data_address_ = to_record(data_transport.value()->address());
  control_address_ = to_record(control_transport.value()->address());
  transports.data = std::move(data_transport).value();
  transports.control = std::move(control_transport).value();

  options.cards = std::max<std::size_t>(interfaces.nics.size(), 1);
  options.urgent_by_control = interfaces.with_control;  // not where data has a better network
  const bool apart = data_threads.most > 0 && !data_threads.when_busy;
  options.urgent_always = apart;                        // two hand-overs less
  options.may_nap = options.urgent_by_control && !interfaces.ucx && !apart;
  core::Result<std::unique_ptr<Runtime>> runtime =
      Runtime::create(options, memory, std::move(keep), std::move(transports));
  if (!runtime.is_ok()) return runtime.status();
  runtime_ = std::move(runtime).value();
  board_ = std::make_unique<VerdictBoard>([this](core::GroupUid uid, const Status& verdict) {
    post([this, uid, verdict] { groups_->on_told(uid, verdict); });
  });
  SummaryOptions summary;
  summary.transport = interfaces.rdma ? "RDMA" : interfaces.ucx ? "TCP through UCX" : "TCP";
  summary.servers_named = settings_.servers.size();
  summary.servers_nodes_min = DedicatedClient::kNodesMin;
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
  StatusDesk::About about;
  about.engine = id_;
  about.job = job_name();
  about.transport = interfaces.rdma ? "RDMA" : interfaces.ucx ? "TCP through UCX" : "TCP";
  for (const transport::Nic& nic : interfaces.nics) about.limit_bytes_per_second += nic.gbps * 1e9 / 8;
  limit_bytes_per_second_ = about.limit_bytes_per_second;
  about.codec = config_.compress;
  about.write_groups = [this](observe::Json& json, bool members) { groups_->write_status(json, members); };
  about.look = [this] { return groups_->look_for_status(); };
  about.name = [this](core::EngineId engine) { return groups_->name_of(engine); };
  desk_ = std::make_unique<StatusDesk>(*runtime_, std::move(about));
  Joiner::Hooks joined;
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
  identity_ = bootstrap::node_identity(config_, id_);
  nics_ = to_record(interfaces.nics);
  description_ = text_of(interfaces) + (config_.shm ? " shm" : "");
  core::log_debug("engine ", core::to_string(id_), " ", description_, (interfaces.control_ucx ? " ucx " + transport::ucx_version() : ""),
                  "; control by ", interfaces.control, ": ", interfaces.control_why);

  LoopOptions loop;
  loop.thread_name = "hybridps";
  loop.spinning = spinning_of(config_);
  loop_ = std::make_unique<Loop>(*runtime_, *this, loop);
  desk_->set_loop(loop_.get());
  schedule::TuningRange range;
  range.sockets = static_cast<int>(config_.data_sockets);
  range.sockets_max = static_cast<int>(sockets_of(interfaces, data_options, config_.data_sockets));
  groups_->set_tuning(range);
  groups_->set_servers({settings_.servers, settings_.token, core::from_seconds(config_.servers_retry_seconds)});
  Status status = loop_->start();
  if (const std::size_t open = transport::open_descriptors().size(); open > 0)
    own_descriptors_ = open + kDescriptorsToSpare;
  watch.lap("send pool and threads");
  core::log_debug("engine started in ", watch.text());
  return status;
}

EngineImpl::~EngineImpl() {
  if (in_forked_child()) {
    (void)loop_.release();     // NOLINT: its thread does not exist here
    (void)runtime_.release();  // NOLINT: its transports belong to the parent
    (void)board_.release();    // NOLINT: its thread does not exist here
    (void)joiner_.release();   // NOLINT: the same
    (void)outlet_.release();   // NOLINT: the same
    (void)desk_.release();     // NOLINT: it refers to these
    (void)trace_.release();    // NOLINT: its thread does not exist here
    return;
  }
  outlet_.reset();  // it asks the loop
  if (joiner_) joiner_->stop();
  if (loop_) {
    loop_->stop();
    board_.reset();  // it posts to the loop what it finds
    write_stats();
    loop_.reset();
  }
  if (runtime_) runtime_->set_trace(nullptr);
  trace_.reset();
  runtime_.reset();
}

void EngineImpl::write_stats() const {
  const std::string path = config_.stats_path();
  if (path.empty()) return;
  std::FILE* file = std::fopen(path.c_str(), "we");
  if (file == nullptr) {
    core::log_warn("cannot write HYBRIDPS_STATS_FILE ", path);
    return;
  }
  const EngineStats s = stats();
  const auto number = [](std::uint64_t value) { return static_cast<unsigned long long>(value); };
  std::fprintf(file,
               "{\"net_tx_payload_bytes\": %llu, \"net_rx_payload_bytes\": %llu, \"net_tx_header_bytes\": %llu, "
               "\"net_rx_header_bytes\": %llu, \"shm_tx_payload_bytes\": %llu, \"shm_rx_payload_bytes\": %llu, "
               "\"ops\": %llu, \"node\": \"%s\"}\n",
               number(s.net_tx_payload_bytes), number(s.net_rx_payload_bytes), number(s.net_tx_header_bytes),
               number(s.net_rx_header_bytes), number(s.shm_tx_payload_bytes), number(s.shm_rx_payload_bytes),
               number(s.operations), identity_.c_str());
  std::fclose(file);
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

Status EngineImpl::trace_into(const std::string& folder, int rank) {
  const std::lock_guard lock(trace_mutex_);
  std::unique_ptr<observe::Trace> next;
  if (!folder.empty()) {
    if (trace_ != nullptr) return Status(Code::kInvalidArgument, "a trace is being written already: " + trace_->path());
    observe::Json about;
    about.object().field("engine", core::to_string(id_)).field("role", "rank").field("rank", rank);
    about.field("host", bootstrap::host_name()).field("pid", static_cast<std::int64_t>(getpid()));
    about.field("job", job_name()).field("limit_bytes_per_second", limit_bytes_per_second_).field("version", build_info::kVersion);
    about.end();
    char name[300];
    std::snprintf(name, sizeof name, "rank%d-%.200s-%d", rank, bootstrap::host_name().c_str(), static_cast<int>(getpid()));
    auto opened = observe::Trace::open(core::expand_home(folder), name, about.text().substr(1, about.text().size() - 2));
    if (!opened.is_ok()) return opened.status();
    next = std::move(opened).value();
  }
  const Status status = loop_->call(
      [this, raw = next.get()](Status&) { runtime_->set_trace(raw); }, std::chrono::seconds(2));
  if (status.code() == Code::kTimeout) {  // the loop may still come to it: neither may go before
    if (next) trace_ = std::move(next);
    return status;
  }
  trace_ = std::move(next);
  return status;
}

void EngineImpl::open_outlet(const GroupOptions& first) {
  if (!config_.trace.empty())
    if (Status status = trace_into(config_.trace, first.rank); !status.is_ok()) core::log_warn(status.message());
  observe::OutletOptions o;
  if (config_.status != "off" && config_.status != "0")
    o.folder = config_.status.empty() ? observe::default_folder() : core::expand_home(config_.status);
  o.tag = std::to_string(first.rank) + '-' + std::to_string(first.size);
  o.file = config_.metrics_path();
  if (!config_.metrics_listen.empty()) {
    core::Result<door::Address> address = door::parse_address(config_.metrics_listen);
    if (address.is_ok()) {
      o.listen_host = address.value().host;
      o.listen_port = address.value().port + (address.value().port > 0 ? local_rank().rank : 0);
    } else {
      core::log_warn("no metrics at HYBRIDPS_METRICS_LISTEN=", config_.metrics_listen, ": ",
                     address.status().message());
    }
  }
  if (o.folder.empty() && o.file.empty() && o.listen_host.empty()) return;
  std::vector<std::pair<std::string, std::string>> labels = {{"rank", std::to_string(first.rank)},
                                                             {"host", bootstrap::host_name()}};
  if (const std::string job = job_name(); !job.empty()) labels.emplace_back("job", job);
  o.answer = [this, rank = first.rank](const std::string& line) {
    if (line == "job") return desk_->job();
    if (line == "alone") return desk_->alone();
    if (line == "trace stop" || line.starts_with("trace start ")) {
      const Status status = trace_into(line == "trace stop" ? "" : line.substr(12), rank);
      return observe::Json().object().field("error", status.message()).end().text();
    }
    return std::string(R"({"error": "unknown question"})");
  };
  o.metrics = [this, labels] { return desk_->metrics(labels); };
  for (;;) {
    core::Result<std::unique_ptr<observe::Outlet>> outlet = observe::Outlet::open(o);
    if (outlet.is_ok()) {
      outlet_ = std::move(outlet).value();
      if (outlet_->port() > 0) core::log_info("metrics at http://", o.listen_host, ":", outlet_->port(), "/metrics");
      return;
    }
    // What nobody has asked for is no reason to warn.
    if (!o.listen_host.empty() || !config_.status.empty())
      core::log_warn(outlet.status().message());
    else
      core::log_info("hybridps status cannot ask this process: ", outlet.status().message());
    if (o.listen_host.empty() && o.folder.empty()) return;  // nothing is left to do without
    if (!o.listen_host.empty() && !outlet.status().message().starts_with(observe::kNoSocket))
      o.listen_host.clear();
    else
      o.folder.clear();
    if (o.folder.empty() && o.file.empty() && o.listen_host.empty()) return;
  }
}

EngineStats EngineImpl::stats() const {
  EngineStats s;
  if (!runtime_) return s;
  // Asks the loop, so that an operation that is over is counted in full.
  if (!in_forked_child()) s.samples = desk_->samples();
  const observe::EngineCounters& c = runtime_->counters();
  s.net_tx_payload_bytes = c.net_tx_payload_bytes.load();
  s.net_rx_payload_bytes = c.net_rx_payload_bytes.load();
  s.net_tx_device_bytes = c.net_tx_device_bytes.load();
  s.tuner_trials = c.tuner_trials.load();
  s.tuner_kept = c.tuner_kept.load();
  s.compress_operations = c.compress_operations.load();
  s.compress_bytes = c.compress_bytes.load();
  s.compress_wire_bytes = c.compress_wire_bytes.load();
  s.compress_not_finite = c.compress_not_finite.load();
  s.compress_encode_ns = c.compress_encode_ns.load();
  s.compress_decode_ns = c.compress_decode_ns.load();
  s.net_tx_header_bytes = c.net_tx_header_bytes.load();
  s.net_rx_header_bytes = c.net_rx_header_bytes.load();
  s.shm_tx_payload_bytes = c.shm_tx_payload_bytes.load();
  s.shm_rx_payload_bytes = c.shm_rx_payload_bytes.load();
  s.operations = c.operations.load();
  s.groups = c.groups.load();
  s.endpoints = c.endpoints.load();
  return s;
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
  const auto deadline = start + core::from_seconds(config_.linger_seconds);
  const auto closed = [&] { return groups_open_ == 0 || groups_staying_ > 0; };  // or somebody came meanwhile
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
  const std::lock_guard lock(worlds_mutex_);
  std::erase_if(worlds_, [](const World& other) { return other.group.expired(); });
  worlds_.push_back(std::move(world));
}

std::vector<bootstrap::ExpectedMember> EngineImpl::presumed(const std::vector<int>& global_ranks) {
  std::vector<bootstrap::ExpectedMember> members(global_ranks.size());
  std::vector<bool> doubtful(global_ranks.size(), false);  // another world has another process there
  const std::lock_guard lock(worlds_mutex_);
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
  const GroupOptions& o = group->options;

  std::unique_ptr<DedicatedClient> dedicated;
  bootstrap::RendezvousOptions r;
  r.group_name = o.name;
  group->prefix = bootstrap::group_key_prefix(o.name, o.life.empty() ? o.incarnation : o.life);
  r.expected = o.expected;
  r.life = o.life;
  if (o.life.empty()) r.lives_prefix = bootstrap::lives_key_prefix(o.name);
  r.departures = departures_;
  if (o.expected.empty()) r.presumed = presumed(o.global_ranks);
  r.key_prefix = group->prefix;
  r.self.build = std::string("hybridps ") + build_info::kVersion;
  // A rank sets slots aside for what its node's others may grant it, and takes them to grant as many as itself.
  if (config_.grant_chunks != core::Config().grant_chunks)
    r.self.build += " HYBRIDPS_GRANT_CHUNKS=" + std::to_string(config_.grant_chunks);
  r.self.incarnation = o.incarnation;
  r.self.engine = id_;
  r.self.node_identity = identity_;
  r.self.host_name = bootstrap::host_name();
  r.self.pid = static_cast<std::uint32_t>(getpid());
  r.self.group_rank = o.rank;
  r.self.group_size = o.size;
  if (o.expected.empty() && !o.global_ranks.empty()) r.self.members = bootstrap::members_text(o.global_ranks);
  r.self.made_ms = bootstrap::wall_ms();
  r.self.shm_address = shm_address_;
  r.self.data_address = data_address_;
  r.self.control_address = control_address_;
  r.self.eager_bytes = config_.eager_bytes;
  r.self.chunk_bytes = config_.chunk_bytes;
  r.self.chunk_bytes_max = chunk_bytes_max();
  r.self.compress = o.compress;
  r.self.priority = o.priority;
  r.self.nics = nics_;
  r.self.node_gbps = settings_.interfaces.node_gbps;
  r.self.control = to_record(std::vector{settings_.interfaces.control_nic})[0];
  r.self.machine = bootstrap::machine_id();
  r.self.loopback = settings_.interfaces.loopback.substr(0, bootstrap::kTextBytesMax);
  r.self.notes = bootstrap::joined_notes(config_.warnings);
  r.process_started_ms = bootstrap::process_started_ms();
  r.wall_ms = &bootstrap::wall_ms;
  r.deadline = o.timeout.count() > 0 ? core::Deadline::after(o.timeout, o.since) : core::Deadline::never();
  r.progress = [](std::string_view text) { core::log_warn(text); };
  if (o.rank == 0 && o.size > 1 && !settings_.servers.empty() && o.dedicated_servers) {
    DedicatedClientOptions d;
    d.addresses = settings_.servers;
    d.token = settings_.token;
    d.required = config_.servers_required;
    d.group_name = o.name;
    dedicated = std::make_unique<DedicatedClient>(std::move(d));
    r.servers = [client = dedicated.get()](const bootstrap::Roster& roster) { return client->servers(roster); };
    r.commit = [client = dedicated.get()](const bootstrap::Roster& roster) { return client->commit(roster); };
  }
  {
    const std::lock_guard lock(linger_mutex_);
    ++groups_open_;
    ++groups_staying_;
  }
  linger_changed_.notify_all();
  std::call_once(outlet_opened_, [&] { open_outlet(o); });
  post([this, group] { groups_->add(group); });
  joiner_->join(group, std::move(r), std::move(dedicated));
  return std::shared_ptr<Group>(
      std::make_shared<GroupImpl>(std::static_pointer_cast<EngineImpl>(shared_from_this()), group));
}

// --- The engine of this process --------------------------------------------------------------------------------------

struct Current {
  std::mutex mutex;
  std::weak_ptr<EngineImpl> engine;
  std::optional<std::uint64_t> generation;  // of forks, when it was made
};

/// This thread has the mutex. UCX is brought by a caller's function, of Python, where signal handlers and finalizers run.
thread_local bool makes_engine = false;

Current& process_engine() {
  static Current* current = new Current();  // never destroyed: groups may outlive static destructors
  return *current;
}

}  // namespace

core::Result<std::shared_ptr<Engine>> Engine::acquire(std::size_t ranks) {
  Current& current = process_engine();
  if (makes_engine) return Status(Code::kUnsupported, "hybridps was called again, in a signal handler or finalizer, while it starts");
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
