#include "hybridps/pg/process.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <utility>

#include "hybridps/core/fork.h"
#include "hybridps/engine/engine.h"
#include "hybridps/pg/accelerator.h"

namespace hybridps::pg {
namespace {

using namespace std::chrono_literals;

std::atomic<Process*> the_process{nullptr};  // NOLINT: see process.h
constexpr std::chrono::milliseconds kLanePatience = 2s;
constexpr std::chrono::milliseconds kStagerPatience = 2s;
constexpr std::chrono::milliseconds kDrainPatience = 2s;
constexpr std::chrono::milliseconds kAbortHookPatience =
    20s;  // the flight recorder resolves symbols: 3 s, more under load

}  // namespace

Membership::Membership(std::shared_ptr<engine::Group> group)
    : group_(std::move(group)), generation_(core::fork_generation()) {}

Membership::~Membership() {
  // Leaked in a forked child: the engine's threads do not exist there, and may hold the engine's locks for ever.
  if (is_forked() && group_) new std::shared_ptr<engine::Group>(std::move(group_));
}

bool Membership::is_forked() const noexcept { return generation_ != core::fork_generation(); }

std::shared_ptr<engine::Group> Membership::group() const {
  if (is_forked()) return nullptr;
  const std::lock_guard lock(mutex_);
  return group_;
}

std::shared_ptr<engine::Group> Membership::take() {
  if (is_forked()) return nullptr;
  const std::lock_guard lock(mutex_);
  return std::move(group_);
}

Stay::Stay(std::shared_ptr<engine::Engine> engine) : engine_(std::move(engine)), generation_(core::fork_generation()) {}

Stay::~Stay() {
  if (generation_ != core::fork_generation() && engine_) new std::shared_ptr<engine::Engine>(std::move(engine_));
}

std::shared_ptr<engine::Engine> Stay::engine() const {
  if (generation_ != core::fork_generation()) return nullptr;
  const std::lock_guard lock(mutex_);
  return engine_;
}

std::shared_ptr<engine::Engine> Stay::take() {
  if (generation_ != core::fork_generation()) return nullptr;
  const std::lock_guard lock(mutex_);
  return std::move(engine_);
}

Process& Process::instance() {
  static std::mutex making;
  if (Process* process = the_process.load(std::memory_order_acquire)) return *process;
  const std::lock_guard lock(making);
  if (Process* process = the_process.load(std::memory_order_acquire)) return *process;
  static const int registered = pthread_atfork(nullptr, nullptr, &Process::after_fork_in_child);
  static_cast<void>(registered);
  auto* process = new Process();  // never destroyed, on purpose
  the_process.store(process, std::memory_order_release);
  return *process;
}

void Process::after_fork_in_child() { the_process.store(new Process(), std::memory_order_release); }

Process::Arrival::Arrival(Process& process) : process_(process) {
  const std::lock_guard lock(process_.mutex_);
  ++process_.arriving_;
}

Process::Arrival::~Arrival() {
  const std::lock_guard lock(process_.mutex_);
  if (--process_.arriving_ > 0 || !process_.members_.empty() || !process_.stays_.empty()) return;
  // Nobody has joined, and the last member may have left meanwhile.
  process_.lanes_->end_when_idle();
  process_.abort_hooks_->end_when_idle();
}

std::shared_ptr<Membership> Process::join(std::shared_ptr<engine::Group> group) {
  auto membership = std::make_shared<Membership>(std::move(group));
  const std::lock_guard lock(mutex_);
  lanes_->begin();
  abort_hooks_->begin();
  lanes_->start(1);
  std::erase_if(members_, [](const auto& member) { return member.expired(); });
  members_.push_back(membership);
  return membership;
}

void Process::leave(Membership& membership) {
  std::shared_ptr<engine::Group> group = membership.take();
  if (!group) return;
  group->leave();
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(members_, [&](const auto& member) {
      const auto alive = member.lock();
      return !alive || alive.get() == &membership;
    });
    if (!members_.empty() || !stays_.empty()) return;
  }
  std::shared_ptr<engine::Engine> engine = group->engine();
  if (!engine) return;
  engine->linger();
  group.reset();
  end_if_last(std::move(engine));
}

std::shared_ptr<Stay> Process::stay(std::shared_ptr<engine::Engine> engine) {
  auto stay = std::make_shared<Stay>(std::move(engine));
  const std::lock_guard lock(mutex_);
  stays_.push_back(stay);
  return stay;
}

void Process::end(Stay& stay) {
  std::shared_ptr<engine::Engine> engine = stay.take();
  if (!engine) return;
  {
    const std::lock_guard lock(mutex_);
    std::erase_if(stays_, [&](const auto& other) {
      const auto alive = other.lock();
      return !alive || alive.get() == &stay;
    });
    if (!members_.empty() || !stays_.empty()) return;
  }
  engine->linger();
  end_if_last(std::move(engine));
}

void Process::end_if_last(std::shared_ptr<engine::Engine> engine) {
  const auto joined_meanwhile = [&] {
    const std::lock_guard lock(mutex_);
    return !members_.empty() || !stays_.empty() || arriving_ > 0;
  };
  if (joined_meanwhile()) return;
  stager_->stop(kStagerPatience);
  // The engine's end joins its threads, so no further task reaches the lanes. Exception: what an operation holds while
  // another thread is just asking about that operation.
  engine.reset();
  lanes_->stop(kLanePatience);
  abort_hooks_->end_when_idle();  // the flight recorder may still be writing
  if (!joined_meanwhile()) return;
  lanes_->begin();
  abort_hooks_->begin();
}

void Process::at_exit() {
  std::vector<std::shared_ptr<engine::Group>> groups;
  std::shared_ptr<engine::Engine> kept;  // the only engine of this process, except an engine that is just ending
  {
    const std::lock_guard lock(mutex_);
    for (const auto& stay : stays_)
      if (const auto alive = stay.lock())
        if (auto engine = alive->take()) kept = std::move(engine);
    stays_.clear();
    for (const auto& member : members_) {
      const auto alive = member.lock();
      auto group = alive ? alive->take() : nullptr;
      if (group) groups.push_back(std::move(group));
    }
    members_.clear();
  }
  for (const auto& group : groups) group->leave();
  if (!groups.empty()) {
    if (const auto engine = groups.front()->engine()) engine->linger();
    for (const auto& group : groups) group->abort("the process is exiting");
    groups.clear();
  } else if (kept) {
    kept->linger();
  }
  kept.reset();
  stager_->stop(kStagerPatience);  // no stream waits for a flag after this
  drain_local_libraries(kDrainPatience);
  lanes_->stop(kLanePatience);
  abort_hooks_->stop(kAbortHookPatience);
}

}  // namespace hybridps::pg
