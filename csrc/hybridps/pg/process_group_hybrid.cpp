#include "hybridps/pg/process_group_hybrid.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <future>
#include <mutex>
#include <string_view>
#include <system_error>
#include <thread>

#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "hybridps/bootstrap/incarnation.h"
#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/bootstrap/rendezvous.h"
#include "hybridps/core/config.h"
#include "hybridps/core/log.h"
#include "hybridps/engine/engine.h"
#include "hybridps/engine/settings.h"
#include "hybridps/pg/accelerator.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/gil.h"
#include "hybridps/pg/store_adapter.h"

namespace hybridps::pg {
namespace {

using namespace std::chrono_literals;

constexpr std::chrono::milliseconds kDrainPatience = 6s;  // a local library gives its peers 5 s
constexpr std::chrono::milliseconds kStorePatience = 2s;

std::string text_of(const std::string& name, int rank, int size) {
  return "group " + name + " (rank " + std::to_string(rank) + " of " + std::to_string(size) + ")";
}

std::shared_ptr<bootstrap::KeyValueStore> adapt(const c10::intrusive_ptr<c10d::Store>& store,
                                                const ProcessGroupHybrid::Options& options, StoreUse use) {
  TORCH_CHECK_VALUE(store, "hybridps: group ", options.group_name, ": no Store was given");
  return adapt_store(store, use);
}

std::shared_ptr<WorkContext> make_context(const std::string& name, int rank, int size, std::shared_ptr<Hooks> hooks) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "hybridps: rank ", rank, " of ", size, " in group ", name,
                    " makes no sense");
  auto context = std::make_shared<WorkContext>();
  context->hooks = std::move(hooks);
  context->group_name = name;
  context->rank = rank;
  context->size = size;
  context->lanes = Process::instance().lanes();
  return context;
}

std::string group_text(const WorkContext& context) { return text_of(context.group_name, context.rank, context.size); }

double ms_between(core::TimePoint from, core::TimePoint to) { return 1000 * core::to_seconds(to - from); }

}  // namespace

void tell_of_failed_start(std::shared_ptr<bootstrap::KeyValueStore> store, const std::string& group_name,
                          const std::string& incarnation, int rank, int size, std::string_view why) {
  if (size <= 1) return;
  const core::Status failure(core::Code::kClosed, "rank " + std::to_string(rank) + " on " + bootstrap::host_name() +
                                                      " (pid " + std::to_string(getpid()) +
                                                      ") could not join it: " + std::string(why));
  // If the Store does not answer, only this thread stays blocked.
  const auto answer = std::make_shared<std::promise<core::Status>>();
  std::future<core::Status> answered = answer->get_future();
  const auto tell = [store = engine::seal_as_set(std::move(store)),
                     prefix = bootstrap::group_key_prefix(group_name, incarnation), rank, failure, answer] {
    answer->set_value(bootstrap::announce_failure(*store, prefix, rank, failure, bootstrap::wall_ms(),
                                                  bootstrap::process_started_ms()));
  };
  try {
    std::thread(tell).detach();
  } catch (const std::system_error&) {  // the lack of threads may be what has failed
    tell();
  }
  const core::Status told = answered.wait_for(kStorePatience) == std::future_status::ready
                                ? answered.get()
                                : core::Status(core::Code::kTimeout, "the Store has not answered");
  if (!told.is_ok())
    core::log_warn("the other ranks could not be told that this one fails: ", told.message());
  else if (rank == 0)
    std::this_thread::sleep_for(300ms);
}

ProcessGroupHybrid::ProcessGroupHybrid(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                       c10::intrusive_ptr<Options> options, core::TimePoint called_at,
                                       StoreUse store_use)
    : c10d::Backend(rank, size),
      options_(options ? std::move(options) : c10::make_intrusive<Options>()),
      entered_at_(core::Clock::now()),
      torch_store_(store),
      store_(adapt(store, *options_, store_use)),
      made_as_rank_(rank),
      timeout_ms_(options_->timeout.count()) {
  // torch's setGroupUid() comes later, or not at all under TORCH_DISTRIBUTED_DEBUG=DETAIL.
  pg_uid_ = options_->group_name;
  if (!options_->global_ranks_in_group.empty())
    c10d::getGlobalRankStartAndStride(options_->global_ranks_in_group, global_rank_start_, global_rank_stride_);
  init();

  Process& process = Process::instance();
  if (is_reconfigurable()) {
    life_ = closed("the group was made with enable_reconfigure and has no members before reconfigure()");
    static_cast<void>(stay());
    return;
  }
  engine::GroupOptions group_options;
  group_options.since = called_at;
  const std::string& given = options_->incarnation;
  // The incarnation count goes up even if the code below fails.
  group_options.incarnation = given.empty()
                                  ? process.incarnations().next(options_->group_name)
                                  : process.incarnations().next(options_->group_name + " " + given, given + ".named");
  if (const std::string first = given + ".named.0"; !given.empty() && group_options.incarnation != first) {
    const std::string why =
        "this process has used the incarnation " + given + " before; every life of a group needs a name of its own";
    {
      const InterpreterReleased released;
      tell_of_failed_start(store_, options_->group_name, first, rank, size, why);
    }
    TORCH_CHECK_VALUE(false, "hybridps: ", text_of(options_->group_name, rank, size), ": ", why);
  }
  life_ = open(std::move(group_options));
  opened_at_ = core::Clock::now();
  if (!core::log_enabled(core::LogLevel::kDebug)) return;
  char text[160];
  std::snprintf(text, sizeof text, "%.1f ms: loading %.1f ms, Store %.1f ms, engine %.1f ms, opening %.1f ms",
                ms_between(called_at, opened_at_), ms_between(called_at, entered_at_),
                ms_between(entered_at_, life_->connected_at), ms_between(life_->connected_at, life_->started_at),
                ms_between(life_->started_at, opened_at_));
  core::log_debug(group_text(*life_->context), " made in ", text);
}

bool ProcessGroupHybrid::is_reconfigurable() const noexcept {
#if HYBRIDPS_TORCH_AT_LEAST(15)
  return options_->enable_reconfigure;
#else
  return false;
#endif
}

std::shared_ptr<ProcessGroupHybrid::Life> ProcessGroupHybrid::life() const {
  const std::lock_guard lock(life_mutex_);
  return life_;
}

std::shared_ptr<ProcessGroupHybrid::Life> ProcessGroupHybrid::closed(std::string why) {
  auto life = std::make_shared<Life>();
  life->context = make_context(options_->group_name, rank_, size_, hooks_);
  life->why_none = std::move(why);
  life->compression = std::make_unique<Compression>(nullptr, 0, options_->group_name, rank_ == 0);
  return life;
}

std::shared_ptr<ProcessGroupHybrid::Life> ProcessGroupHybrid::open(engine::GroupOptions group_options) {
  auto life = std::make_shared<Life>();
  life->context = make_context(options_->group_name, group_options.rank = rank_, group_options.size = size_, hooks_);
  life->incarnation = group_options.incarnation;
  const std::string whose = group_text(*life->context);
  Process& process = Process::instance();
  const Process::Arrival arrival(process);
  group_options.name = options_->group_name;
  group_options.store = store_;
  if (group_options.life.empty()) group_options.timeout = options_->timeout;
  group_options.is_world = options_->global_ranks_in_group.empty();
  group_options.global_ranks.assign(options_->global_ranks_in_group.begin(), options_->global_ranks_in_group.end());
  group_options.dedicated_servers = options_->dedicated_servers;
  const std::string keys = group_options.life.empty() ? group_options.incarnation : group_options.life;
  const auto require = [&](const core::Status& status, const std::string& what) {
    if (status.is_ok()) return;
    const InterpreterReleased released;
    tell_of_failed_start(store_, options_->group_name, keys, rank_, size_, status.message());
    throw_status(status, what);
  };
  const auto config = core::Config::from_environment();
  require(config.status(), "reading the settings for " + whose);
  const auto spec = compress::parse_spec(options_->compress.empty() ? config.value().compress : options_->compress);
  require(spec.status(), whose);
  if (spec.value()) group_options.compress = compress::text_of(spec.value());
  life->compression = std::make_unique<Compression>(
      spec.value().is_lossy() ? std::make_shared<const compress::Codecs>(spec.value()) : nullptr,
      config.value().compress_min_bytes, options_->group_name, rank_ == 0);
  const auto priorities = worker::parse_priorities(options_->priority);
  require(priorities.status(), whose);
  life->priorities = priorities.value();
  group_options.priority = worker::text_of(life->priorities);
  life->connected_at = core::Clock::now();
  auto engine = engine::Engine::acquire(static_cast<std::size_t>(size_));
  require(engine.status(), "starting the engine for " + whose);
  life->started_at = core::Clock::now();
  auto group = engine.value()->open_group(std::move(group_options));
  require(group.status(), "opening " + whose);
  life->context->group = group.value();
  life->membership = process.join(std::move(group).value());
  return life;
}

ProcessGroupHybrid::~ProcessGroupHybrid() {
  if (generation_ != core::fork_generation()) {
    if (life_) new std::shared_ptr<Life>(std::move(life_));  // leaked: its devices and their threads are the parent's
    return;
  }
  // The engine's threads and the lanes may be about to drop tensors, and need the interpreter's lock for that.
  const InterpreterReleased released;
  try {
    if (life_ && life_->membership) Process::instance().leave(*life_->membership);
    if (stay_) Process::instance().end(*stay_);
  } catch (const std::exception& error) {
    core::log_error("leaving group ", options_->group_name, ": ", error.what());
  }
}

core::Status ProcessGroupHybrid::wait_for(const std::shared_ptr<engine::Group>& group,
                                          const std::function<core::Status()>& call) const {
  std::promise<core::Status> promise;
  std::future<core::Status> answer = promise.get_future();
  std::thread waiter([&] { promise.set_value(call()); });
  try {
    wait_with_signals(core::TimePoint::max(),
                      [&](core::TimePoint until) { return answer.wait_until(until) == std::future_status::ready; });
  } catch (...) {
    group->abort("interrupted while waiting for the other ranks");
    waiter.join();
    throw;
  }
  waiter.join();
  return answer.get();
}

void ProcessGroupHybrid::wait_ready() {
  const auto group = group_or_throw("init_process_group");
  const core::Status status = wait_for(group, [&] { return group->wait_ready(); });
  const std::string whose = group_text(*life()->context);
  core::log_debug(whose, " waited ", static_cast<int>(ms_between(opened_at_, core::Clock::now())), " ms for all ranks");
  check_status(status, "waiting for the ranks of " + whose);
}

void ProcessGroupHybrid::eagerConnectSingleDevice(at::Device device) {
  if (device.is_cpu()) return;
  const InterpreterReleased released;
  const auto life = this->life();
  const auto group = group_or_throw(*life, "eager_connect_single_device");
  const std::string what = "connecting " + group_text(*life->context) + " on " + device.str();
  ChannelKey key;
  key.type = device.type();
  key.device = device.index();
  const auto channel = channel_for(*life, key, device, group);
  check_status(channel.status(), what);
  const std::chrono::milliseconds timeout = timeout_of(c10d::kUnsetTimeout);
  const core::Status status = wait_for(group, [&] {
    const std::lock_guard lock(issue_mutex_);  // connect() takes its place among the program's collectives
    return channel.value()->connect(timeout);
  });
  check_status(status, what);
  const std::lock_guard lock(channels_mutex_);
  eager_device_ = device;
}

std::string ProcessGroupHybrid::incarnation() const { return life()->incarnation; }

engine::GroupSummary ProcessGroupHybrid::summary() const {
  const auto life = this->life();
  const auto group = life->membership ? life->membership->group() : nullptr;
  return group ? group->summary() : engine::GroupSummary();
}

std::vector<int> ProcessGroupHybrid::node_of() const {
  const auto life = this->life();
  const auto group = life->membership ? life->membership->group() : nullptr;
  return group ? group->node_of() : std::vector<int>();
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupHybrid::getBackendOptions() {
  return c10::static_intrusive_pointer_cast<c10d::Backend::Options>(options_);
}

std::shared_ptr<engine::Group> ProcessGroupHybrid::group_or_throw(const Life& life, const char* name) const {
  if (life.membership)
    if (auto group = life.membership->group()) return group;
  TORCH_CHECK(generation_ == core::fork_generation(), "hybridps: ", name, " of ", group_text(*life.context),
              ": this process was forked after init_process_group; a forked child (a DataLoader worker) has no part in "
              "its parent's groups");
  std::string why = life.why_none;
  if (life.membership) {
    why = aborted_.load() ? "it was aborted by the program (abort_process_group)" : "it was shut down or destroyed";
    if (is_reconfigurable()) why += "; reconfigure() begins its next life";
  }
  C10_THROW_ERROR(DistBackendError, "hybridps: " + std::string(name) + " of " + group_text(*life.context) +
                                        ": the group is closed : " + why);
}

// Compression ---------------------------------------------------------------------------------------------------------

std::string ProcessGroupHybrid::compression() const {
  const auto life = this->life();
  const compress::Codecs* const codecs = life->compression->codecs();
  return compress::text_of(codecs != nullptr ? codecs->spec() : compress::Spec{});
}

std::vector<Compression::Saved> ProcessGroupHybrid::compression_state() {
  const auto life = this->life();
  const auto group = group_or_throw(*life, "compress.state_dict");
  std::vector<std::pair<Compression::TensorIdentity, compress::TensorKey>> tensors;
  {
    const std::lock_guard lock(issue_mutex_);
    tensors = life->compression->tensors();
  }
  std::vector<compress::TensorKey> keys;
  for (const auto& [place, key] : tensors) keys.push_back(key);
  auto remembered = group->remembered(std::move(keys));
  check_status(remembered.status(), "reading what compression remembers of " + group_text(*life->context));
  std::vector<Compression::Saved> saved;
  for (std::size_t i = 0; i < remembered.value().size(); ++i)
    saved.push_back({tensors[i].first, std::move(remembered.value()[i].residual), std::move(remembered.value()[i].owed),
                     std::move(remembered.value()[i].momentum)});
  return saved;
}

void ProcessGroupHybrid::load_compression_state(std::vector<Compression::Saved> saved, std::uint64_t steps) {
  const auto life = this->life();
  const std::lock_guard lock(issue_mutex_);
  life->compression->load(std::move(saved));
  life->compression->set_steps(steps);
}

std::uint64_t ProcessGroupHybrid::compression_steps() {
  const auto life = this->life();
  const std::lock_guard lock(issue_mutex_);
  return life->compression->steps();
}

std::vector<Compression::SizeDecision> ProcessGroupHybrid::compression_classes() {
  const auto life = this->life();
  const std::lock_guard lock(issue_mutex_);
  return life->compression->classes();
}

std::size_t ProcessGroupHybrid::compression_unclaimed() {
  const auto life = this->life();
  const std::lock_guard lock(issue_mutex_);
  return life->compression->unclaimed();
}

engine::Group::RememberedSummary ProcessGroupHybrid::remembered_summary() {
  const auto life = this->life();
  const auto summary = group_or_throw(*life, "compress.stats")->remembered_summary();
  check_status(summary.status(), "reading what compression remembers of " + group_text(*life->context));
  return summary.value();
}

void ProcessGroupHybrid::Options::set_priority(const std::string& text) {
  const auto parsed = worker::parse_priorities(text);
  TORCH_CHECK_VALUE(parsed.is_ok(), "hybridps.Options: ", parsed.status().message());
  priority = worker::text_of(parsed.value());
}

// Splitting -----------------------------------------------------------------------------------------------------------

c10::intrusive_ptr<c10d::Backend> ProcessGroupHybrid::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                            const std::vector<int>& ranks,
                                                            const c10::intrusive_ptr<c10d::Backend::Options>& opts) {
  group_or_throw("split_group");
  for (const int rank : ranks)
    TORCH_CHECK_VALUE(rank >= 0 && rank < size_, "hybridps: split_group: rank ", rank, " is not in ",
                      group_text(*life()->context));
  auto child_options = c10::make_intrusive<Options>(opts ? opts->timeout : options_->timeout);
  const auto* own = dynamic_cast<const Options*>(opts.get());
  child_options->dedicated_servers = (own != nullptr ? *own : *options_).dedicated_servers;
  child_options->compress = own != nullptr && !own->compress.empty() ? own->compress : options_->compress;
  child_options->priority = (own != nullptr ? *own : *options_).priority;
  if (opts) {
    child_options->group_name = opts->group_name;
    child_options->group_desc = opts->group_desc;
  }
  const auto child = make_child(store, ranks, std::move(child_options));
  std::optional<c10::Device> device;
  {
    const std::lock_guard lock(channels_mutex_);
    device = eager_device_;
  }
  if (child && device) child->eagerConnectSingleDevice(*device);
  return child;
}

c10::intrusive_ptr<ProcessGroupHybrid> ProcessGroupHybrid::make_child(const c10::intrusive_ptr<c10d::Store>& store,
                                                                      const std::vector<int>& ranks,
                                                                      c10::intrusive_ptr<Options> child_options) {
  const std::lock_guard lock(children_mutex_);
  const bool named = !child_options->group_name.empty();
  if (!named) child_options->group_name = options_->group_name + ":split:" + std::to_string(unnamed_children_++);
  const auto at = std::find(ranks.begin(), ranks.end(), rank_);
  if (at == ranks.end()) return nullptr;

  const auto key = std::make_pair(child_options->group_name, ranks);
  if (const auto known = children_.find(key); named && known != children_.end()) {
    auto child = known->second.lock();
    const auto life = child ? child->life() : nullptr;
    if (life && life->membership && life->membership->group()) return child;
  }
  for (const int rank : ranks) {
    const auto index = static_cast<std::size_t>(rank);
    child_options->global_ranks_in_group.push_back(
        index < options_->global_ranks_in_group.size() ? options_->global_ranks_in_group[index] : index);
  }
  auto child = c10::make_intrusive<ProcessGroupHybrid>(store, static_cast<int>(at - ranks.begin()),
                                                       static_cast<int>(ranks.size()), std::move(child_options));
  std::erase_if(children_, [](const auto& entry) { return entry.second.expired(); });
  children_.insert_or_assign(key, c10::weak_intrusive_ptr<ProcessGroupHybrid>(child));
  return child;
}

// Coalescing ----------------------------------------------------------------------------------------------------------

void ProcessGroupHybrid::startCoalescing() {
  const std::lock_guard lock(coalescing_mutex_);
  coalescing_.insert_or_assign(std::this_thread::get_id(), std::vector<WorkPtr>());
  coalescing_threads_.store(static_cast<int>(coalescing_.size()), std::memory_order_release);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHybrid::endCoalescing() {
  std::vector<WorkPtr> works;
  {
    const std::lock_guard lock(coalescing_mutex_);
    const auto at = coalescing_.find(std::this_thread::get_id());
    TORCH_CHECK(at != coalescing_.end(), "hybridps: endCoalescing without startCoalescing on this thread");
    works = std::move(at->second);
    coalescing_.erase(at);
    coalescing_threads_.store(static_cast<int>(coalescing_.size()), std::memory_order_release);
  }
  return combine_all(std::move(works));
}

// State ---------------------------------------------------------------------------------------------------------------

void ProcessGroupHybrid::setTimeout(std::chrono::milliseconds timeout) {
  options_->timeout = timeout;
  timeout_ms_.store(timeout.count(), std::memory_order_relaxed);
}

c10d::ErrorType ProcessGroupHybrid::getError() {
  const auto life = this->life();
  const auto group = life->membership ? life->membership->group() : nullptr;
  // In a group that can have another life, an abort is no error (torch's rule).
  if (!group) return aborted_.load() && !is_reconfigurable() ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS;
  switch (group->status().code()) {
    case core::Code::kOk: return c10d::ErrorType::SUCCESS;
    case core::Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case core::Code::kPeerDead: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

uint64_t ProcessGroupHybrid::getSequenceNumberForGroup() {
  const auto life = this->life();
  const auto group = life->membership ? life->membership->group() : nullptr;
  return group ? group->sequence_submitted() : 0;
}

void ProcessGroupHybrid::abort() {
  const auto life = this->life();
  auto group = life->membership ? life->membership->group() : nullptr;
  if (!group) return;
  const InterpreterReleased released;
  aborted_.store(true);
  const std::string why = "aborted by the program (abort_process_group) on rank " + std::to_string(rank_);
  group->abort(why);
  {
    const std::lock_guard lock(channels_mutex_);
    for (const auto& [key, channel] : life->channels) channel->abort(core::Status(core::Code::kAborted, why));
  }
  if (is_reconfigurable()) group->supersede(why);  // nobody waits for members that have not come
  life->context->post_abort_hooks();               // the other ranks know by now
  group.reset();                                   // before leave(): the last group to leave ends the engine
  leave();                                         // torch forgets an aborted group without shutting it down
}

void ProcessGroupHybrid::shutdown() {
  if (generation_ != core::fork_generation()) return;
  const InterpreterReleased released;
  leave();
  std::shared_ptr<Stay> stay;
  {
    const std::lock_guard lock(life_mutex_);
    if (!stay_) stay_ = std::make_shared<Stay>(nullptr);  // an empty Stay: no other life begins
    stay = stay_;
  }
  if (stay) Process::instance().end(*stay);
  drain_local_libraries(kDrainPatience);  // the program may end after this
}

void ProcessGroupHybrid::leave() {
  const auto life = this->life();
  std::map<ChannelKey, std::shared_ptr<staging::Channel>> channels;  // operations under way hold their own references
  {
    const std::lock_guard lock(channels_mutex_);
    channels.swap(life->channels);
  }
  if (life->membership) Process::instance().leave(*life->membership);
}

#if HYBRIDPS_TORCH_AT_LEAST(14)
void ProcessGroupHybrid::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  const std::lock_guard lock(extensions_mutex_);
  extensions_.push_back(std::make_shared<TimeExtension>(timeout));
}

void ProcessGroupHybrid::registerAbortHook(int64_t hook_id, c10d::AbortHook hook) {
  hooks_->abort.add(hook_id, std::move(hook));
}

void ProcessGroupHybrid::unregisterAbortHook(int64_t hook_id) { hooks_->abort.remove(hook_id); }
#endif

#if HYBRIDPS_TORCH_AT_LEAST(15)
void ProcessGroupHybrid::registerCompletionHook(int64_t hook_id, c10d::CompletionHook hook) {
  hooks_->completion.add(hook_id, [hook = std::move(hook)](std::uint64_t key, std::optional<float> duration_ms) {
    c10d::CompletionHookArgs args;
    args.completionKey = key;
    args.duration_ms = duration_ms;
    hook(args);
  });
}

void ProcessGroupHybrid::unregisterCompletionHook(int64_t hook_id) { hooks_->completion.remove(hook_id); }
#endif

}  // namespace hybridps::pg
