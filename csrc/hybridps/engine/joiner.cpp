#include "hybridps/engine/joiner.h"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "hybridps/bootstrap/node_identity.h"
#include "hybridps/core/clock.h"
#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"
#include "hybridps/engine/records.h"
#include "hybridps/engine/round_trips.h"

namespace hybridps::engine {
namespace {

using core::Code;
using core::Status;

constexpr auto kProofTimeout = std::chrono::seconds(10);
// When to open this process's own connection to the Store, after the group is valid. The connection keeps the Store's
// host busy, at worst for seconds of name look-ups. By this time the other members should have read that the group is
// valid. Nobody waits for the connection.
constexpr auto kSettleAfter = std::chrono::seconds(2);
// When to ping the members that a rendezvous waits for, if this process knows them from another group.
constexpr auto kAskAfter = std::chrono::milliseconds(250);
constexpr auto kAskEvery = std::chrono::seconds(1);
// How long stop() waits for the thread: a Store that works answers at once.
constexpr auto kStopWithin = std::chrono::seconds(2);

/// Notes the time of each answer of the group's Store: a slow Store must not count as one that hangs.
class WatchedStore final : public bootstrap::KeyValueStore {
 public:
  explicit WatchedStore(std::shared_ptr<GroupCore> group) : group_(std::move(group)) {}

  Status set(std::string_view key, std::span<const std::uint8_t> value) override {
    Status status = group_->options.store->set(key, value);
    group_->store_answered.store(core::Clock::now());
    return status;
  }
  core::Result<std::optional<bootstrap::Bytes>> try_get(std::string_view key) override {
    auto found = group_->options.store->try_get(key);
    group_->store_answered.store(core::Clock::now());
    return found;
  }
  Status set_each(std::span<const bootstrap::KeyAndValue> values) override {
    Status status = group_->options.store->set_each(values);
    group_->store_answered.store(core::Clock::now());
    return status;
  }
  core::Result<std::vector<std::optional<bootstrap::Bytes>>> try_get_each(std::span<const std::string> keys) override {
    auto found = group_->options.store->try_get_each(keys);
    group_->store_answered.store(core::Clock::now());
    return found;
  }

 private:
  const std::shared_ptr<GroupCore> group_;
};

}  // namespace

// A request of a rendezvous for proofs of shared memory. The loop answers it.
struct Joiner::ProofRequest {
  std::uint64_t nonce = 0;
  core::TimePoint since;
  std::vector<bootstrap::MemberRecord> members;  // the other members of this rank's candidate node
  std::mutex mutex;
  std::map<int, bool> answers;  // group rank -> proven
  bool abandoned = false;
};

struct Joiner::Joining {
  std::shared_ptr<GroupCore> group;
  std::unique_ptr<bootstrap::Rendezvous> rendezvous;
  std::shared_ptr<ProofRequest> proof;
  std::unique_ptr<RoundTrips> round_trips;  // of the roster that is being proven; null: not wanted
  core::TimePoint ask_at = core::Clock::now() + kAskAfter;
};

// Everything that the joiner's thread uses. The thread holds it.
struct Joiner::JoinerState : core::Pinned {
  std::mutex mutex;
  std::condition_variable changed;
  std::vector<std::unique_ptr<Joining>> arrived;
  bool running = false;
  bool stop = false;
  KnownRoundTrips known_round_trips;  // on the joiner's thread only
  Joiner* joiner = nullptr;           // null: the joiner and the engine are gone
  std::atomic<std::thread::id> thread;

  void run();
  /// Handles requests about a rendezvous that is still running.
  void attend(Joining& joining);
  void fail_left(Joining& joining);
  bootstrap::MemoryProof prove(Joining& joining, const bootstrap::Roster& roster);
  /// Runs `command` in the loop, with the joiner as its argument. The loop ends before the joiner is destroyed.
  template <typename Command>
  void post(Command command) {
    const std::lock_guard lock(mutex);
    if (joiner != nullptr) joiner->hooks_.post([j = joiner, command = std::move(command)]() mutable { command(*j); });
  }
};

Joiner::Joiner(JoinerHooks hooks, intranode::shm::ShmTransport* shm)
    : hooks_(std::move(hooks)), shm_(shm), state_(std::make_shared<JoinerState>()) {
  state_->joiner = this;
}

Joiner::~Joiner() { stop(); }

void Joiner::join(std::shared_ptr<GroupCore> group, bootstrap::RendezvousOptions options) {
  auto joining = std::make_unique<Joining>();
  // The raw pointers are safe: the state or its thread owns the rendezvous.
  options.prove = [state = state_.get(), j = joining.get()](const bootstrap::Roster& roster) {
    return state->prove(*j, roster);
  };
  joining->rendezvous =
      std::make_unique<bootstrap::Rendezvous>(std::make_shared<WatchedStore>(group), std::move(options));
  joining->group = std::move(group);
  {
    const std::lock_guard lock(state_->mutex);
    state_->arrived.push_back(std::move(joining));
  }
  state_->changed.notify_all();
}

core::Status Joiner::start() {
  const std::lock_guard lock(state_->mutex);
  if (thread_.joinable()) return core::Status::ok();
  try {
    thread_ = std::thread([state = state_] { state->run(); });
    state_->running = true;
  } catch (const std::system_error& error) {
    return {core::Code::kOutOfResources, std::string("cannot start the thread hybridps-boot (") + error.what() +
                                             "); see `ulimit -u` and the limit of the container"};
  }
  return core::Status::ok();
}

void Joiner::stop() {
  if (!thread_.joinable()) return;
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->changed.notify_all();
  if (state_->changed.wait_for(lock, kStopWithin, [&] { return !state_->running; })) {
    lock.unlock();
    thread_.join();
    return;
  }
  state_->joiner = nullptr;
  lock.unlock();
  thread_.detach();
  core::log_info("the Store has not answered; the thread hybridps-boot that asked it is left behind");
}

bool Joiner::on_its_thread() const noexcept { return state_->thread.load() == std::this_thread::get_id(); }

namespace {

// Uses a thread of its own: connecting to a host that is gone takes minutes, and stop() waits for the calling thread.
void settle(std::shared_ptr<bootstrap::KeyValueStore> store) {
  try {
    std::thread([store = std::move(store)] {
      core::begin_thread("hybridps-store");
      store->settle();
    }).detach();
  } catch (const std::system_error&) {  // no thread: the VerdictBoard settles the Store when it needs the Store
  }
}

}  // namespace

void Joiner::JoinerState::attend(Joining& joining) {
  if (const core::TimePoint now = core::Clock::now(); now >= joining.ask_at) {
    joining.ask_at = now + kAskEvery;
    if (auto awaited = joining.rendezvous->awaited(); !awaited.empty())
      post([peers = std::move(awaited)](Joiner& j) { j.hooks_.ask(peers); });
  }
  if (joining.group->status_wanted.exchange(false)) {
    std::string waiting_for = joining.rendezvous->find_missing();
    const std::lock_guard lock(joining.group->mutex);
    joining.group->status_waiting_for = std::move(waiting_for);
  }
  if (joining.group->look_wanted.exchange(false)) {
    std::string waiting_for = joining.rendezvous->find_missing();
    {
      const std::lock_guard lock(joining.group->mutex);
      joining.group->waiting_for = std::move(waiting_for);
    }
    post([](Joiner& j) { j.hooks_.looked(); });
  }
}

// This rank will confirm no roster any more, so the group gets none, and the waiting members read the reason. The group
// was either aborted or left here: a group that is still in use would hold the engine.
void Joiner::JoinerState::fail_left(Joining& joining) {
  GroupCore& group = *joining.group;
  Status status(Code::kClosed, "rank " + std::to_string(group.options.rank) + " (" + bootstrap::host_name() + " pid " +
                                   std::to_string(getpid()) +
                                   ") left the group (destroy_process_group, or the end of its program) before all "
                                   "ranks had made it");
  if (group.given_up.load()) {
    const std::lock_guard lock(group.mutex);
    status = group.status;
  }
  joining.rendezvous->fail(std::move(status));
}

void Joiner::JoinerState::run() {
  core::begin_thread("hybridps-boot");
  thread.store(std::this_thread::get_id());
  std::vector<std::unique_ptr<Joining>> active;
  struct Unsettled {
    core::TimePoint due;
    std::weak_ptr<bootstrap::KeyValueStore> store;
  };
  std::deque<Unsettled> unsettled;
  for (;;) {
    {
      std::unique_lock lock(mutex);
      core::TimePoint next = core::TimePoint::max();
      if (!active.empty()) next = core::Clock::now() + std::chrono::milliseconds(50);
      for (const auto& joining : active) next = std::min(next, joining->rendezvous->next_step());
      if (active.empty() && !unsettled.empty()) next = unsettled.front().due;
      const auto awake = [&] { return stop || !arrived.empty(); };
      if (next == core::TimePoint::max())
        changed.wait(lock, awake);
      else
        changed.wait_until(lock, next, awake);
      for (auto& joining : arrived) active.push_back(std::move(joining));
      arrived.clear();
      if (stop) break;
    }
    for (std::size_t i = 0; i < active.size();) {
      Joining& joining = *active[i];
      if (joining.group->abandoned.exchange(false)) {
        core::Status status;
        {
          const std::lock_guard lock(joining.group->mutex);
          status = joining.group->status;
        }
        joining.rendezvous->fail(std::move(status));
      }
      const bootstrap::Rendezvous::RendezvousPhase phase = joining.rendezvous->step(core::Clock::now());
      if (phase == bootstrap::Rendezvous::RendezvousPhase::kPending) {
        attend(joining);
        ++i;
        continue;
      }
      if (phase == bootstrap::Rendezvous::RendezvousPhase::kReady) {
        post([group = joining.group, roster = joining.rendezvous->roster()](Joiner& j) {
          j.hooks_.open(group, roster);
        });
        if (joining.group->options.size > 1)
          unsettled.push_back({core::Clock::now() + kSettleAfter, joining.group->options.store});
      } else {
        post([group = joining.group, status = joining.rendezvous->status()](Joiner& j) {
          j.hooks_.fail(*group, status);
        });
      }
      if (joining.proof) {
        const std::lock_guard lock(joining.proof->mutex);
        joining.proof->abandoned = true;
      }
      active.erase(active.begin() + static_cast<std::ptrdiff_t>(i));
    }
    while (active.empty() && !unsettled.empty() && unsettled.front().due <= core::Clock::now()) {
      if (auto store = unsettled.front().store.lock()) settle(std::move(store));
      unsettled.pop_front();
    }
  }
  for (const auto& joining : active) fail_left(*joining);
  active.clear();
  const std::lock_guard lock(mutex);
  running = false;
  changed.notify_all();
}

bootstrap::MemoryProof Joiner::JoinerState::prove(Joining& joining, const bootstrap::Roster& roster) {
  const int me = joining.group->options.rank;
  if (!joining.proof || joining.proof->nonce != roster.nonce) {
    if (joining.proof) {
      const std::lock_guard lock(joining.proof->mutex);
      joining.proof->abandoned = true;
    }
    {
      const std::lock_guard lock(mutex);  // the engine stays while this lock is held
      if (joiner == nullptr) return bootstrap::MemoryProof::pending();
      if (const auto& check = joiner->hooks_.check)
        if (Status status = check(roster, me); !status.is_ok())
          return bootstrap::MemoryProof::failed(std::move(status));
    }
    auto request = std::make_shared<ProofRequest>();
    request->nonce = roster.nonce;
    request->since = core::Clock::now();
    for (const int rank : roster.ranks_of_node(roster.node_of[static_cast<std::size_t>(me)]))
      if (rank != me) request->members.push_back(roster.members[static_cast<std::size_t>(rank)]);
    joining.proof = request;
    joining.round_trips.reset();
    if (RoundTrips::are_wanted(roster, me))
      joining.round_trips = std::make_unique<RoundTrips>(roster, me, known_round_trips);
    if (!request->members.empty()) post([request](Joiner& j) { j.proofs_.push_back(request); });
  }
  const bool is_measured = !joining.round_trips || joining.round_trips->step(core::Clock::now());
  ProofRequest& request = *joining.proof;
  const std::lock_guard lock(request.mutex);
  if (request.answers.size() < request.members.size()) {
    if (core::Clock::now() - request.since < kProofTimeout) return bootstrap::MemoryProof::pending();
    for (const auto& member : request.members) request.answers.emplace(member.group_rank, false);
  }
  std::vector<int> unproven;
  for (const auto& [rank, proven] : request.answers)
    if (!proven) unproven.push_back(rank);
  if (!unproven.empty()) return bootstrap::MemoryProof::unproven_with(std::move(unproven));
  if (!is_measured) return bootstrap::MemoryProof::pending();
  return bootstrap::MemoryProof::ok(joining.round_trips ? joining.round_trips->by_node()
                                                        : std::vector<std::uint32_t>());
}

std::size_t Joiner::answer_proofs() {
  std::size_t work = 0;
  for (std::size_t i = 0; i < proofs_.size();) {
    const std::shared_ptr<ProofRequest> kept = proofs_[i];  // keeps the request alive until the lock is released
    ProofRequest& request = *kept;
    const std::lock_guard lock(request.mutex);
    for (const bootstrap::MemberRecord& member : request.members) {
      if (request.abandoned || request.answers.count(member.group_rank) > 0) continue;
      const auto address = to_transport(member.shm_address);
      const core::Result<transport::Endpoint*> endpoint =
          shm_ != nullptr ? shm_->connect(member.engine, address)
                          : core::Result<transport::Endpoint*>(Status(Code::kUnsupported, "shared memory is off"));
      const intranode::shm::Proof proof =
          endpoint.is_ok() ? shm_->proof(member.engine)
                           : intranode::shm::Proof{intranode::shm::ProofState::kFailed, endpoint.status()};
      if (proof.state == intranode::shm::ProofState::kPending) continue;
      const bool proven = proof.state == intranode::shm::ProofState::kProven;
      // A record from before this process may be of a dead process, whose place another takes.
      if (!proven)
        core::log(member.made_ms < bootstrap::process_started_ms() ? core::LogLevel::kInfo : core::LogLevel::kWarn,
                  "rank ", member.group_rank, " (", member.host_name, " pid ", member.pid,
                  ") gives the same node identity but does not share memory with this process: ",
                  proof.reason.message(), "; they are treated as different nodes");
      request.answers[member.group_rank] = proven;
      ++work;
    }
    if (request.abandoned || request.answers.size() >= request.members.size()) {
      proofs_.erase(proofs_.begin() + static_cast<std::ptrdiff_t>(i));
      state_->changed.notify_all();
      return work + 1;
    }
    ++i;
  }
  return work;
}

}  // namespace hybridps::engine
