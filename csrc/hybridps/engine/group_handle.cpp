#include "hybridps/engine/group_handle.h"

#include <cmath>

namespace hybridps::engine {

using core::Code;
using core::Status;

namespace {

// How long a call may wait for the loop, which may hang. Registering GPU memory takes milliseconds.
constexpr auto kAttachWithin = std::chrono::seconds(10);

// The result of reserve() for a group that has been left.
constexpr std::uint64_t kNotReserved = ~std::uint64_t{0};

}  // namespace

GroupHandle::~GroupHandle() {
  if (!engine_->in_forked_child()) leave();
}

std::shared_ptr<Engine> GroupHandle::engine() const noexcept { return engine_; }

std::uint64_t GroupHandle::submit(worker::Operation operation, worker::Completion done, bool will_drive) {
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
    // A refused collective counts as well: the caller did call.
    if (operation.kind != schedule::Kind::kPointToPoint) sequence = core_->submitted++;
    if (refused.is_ok()) {
      // Posted under the lock: the commands of a group keep the order of their sequence numbers.
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

std::uint64_t GroupHandle::reserve() {
  const std::lock_guard lock(core_->mutex);
  if (core_->left || engine_->in_forked_child()) return kNotReserved;
  const std::uint64_t sequence = core_->submitted++;
  engine_->post([engine = engine_.get(), core = core_, sequence] { engine->groups().reserve(*core, sequence); });
  return sequence;
}

void GroupHandle::submit_reserved(std::uint64_t sequence, worker::Operation operation, worker::Completion done) {
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

core::Result<std::shared_ptr<void>> GroupHandle::attach_device(transport::DeviceMemory memory,
                                                               std::shared_ptr<void> keep) {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  const std::span<std::byte> bytes = memory.bytes;
  const Status status = engine_->loop().call(
      [engine = engine_.get(), memory = std::move(memory), keep = std::move(keep)](Status& attached) mutable {
        attached = engine->runtime().attach_device(memory, std::move(keep));
      },
      kAttachWithin);
  if (status.code() == Code::kTimeout)  // the loop may still attach the memory later
    engine_->post([engine = engine_.get(), bytes] { engine->runtime().detach_device(bytes); });
  if (!status.is_ok()) return status;
  // If the engine is gone, the memory is detached already: the Runtime dropped `keep` at its end.
  return std::shared_ptr<void>(bytes.data(), [bytes, weak = std::weak_ptr<EngineImpl>(engine_)](void*) {
    if (const auto engine = weak.lock(); engine && !engine->in_forked_child())
      engine->post([raw = engine.get(), bytes] { raw->runtime().detach_device(bytes); });
  });
}

core::Result<std::vector<Group::Remembered>> GroupHandle::remembered(std::vector<compress::TensorKey> keys) {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  auto found = std::make_shared<std::vector<Remembered>>();  // shared: the loop may write it after the timeout
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

core::Result<Group::RememberedSummary> GroupHandle::remembered_summary() {
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

void GroupHandle::drive(const std::function<bool()>& done, core::TimePoint until) {
  if (!engine_->in_forked_child()) engine_->loop().drive(done, until);
}

Status GroupHandle::wait_ready() {
  if (engine_->in_forked_child())
    return Status(Code::kUnsupported, "hybridps cannot be used in a forked child process of one that uses it");
  std::unique_lock lock(core_->mutex);
  if (!core_->ready && engine_->on_own_thread())
    return Status(Code::kUnsupported, "a completion cannot wait for process group \"" + name() + "\"");
  core_->changed.wait(lock, [&] { return core_->ready || (!core_->opening && !core_->status.is_ok()); });
  // Quicker ranks may have found already that their calls differ. Only this rank's operations report that mismatch.
  return core_->ready && core_->status.code() == Code::kMismatch ? core_->disagreement : core_->status;
}

void GroupHandle::abort(const std::string& reason) {
  if (engine_->in_forked_child()) return;
  engine_->post([engine = engine_.get(), core = core_, reason] { engine->groups().abort(*core, reason); });
}

void GroupHandle::leave() {
  if (engine_->in_forked_child()) return;
  {
    const std::lock_guard lock(core_->mutex);
    if (std::exchange(core_->left, true)) return;
  }
  engine_->count_left();
  engine_->post([engine = engine_.get(), core = core_] { engine->groups().want_goodbye(core); });
}

void GroupHandle::supersede(const std::string& reason) {
  if (engine_->in_forked_child()) return;
  {
    const std::lock_guard lock(core_->mutex);
    if (std::exchange(core_->left, true)) return;
  }
  engine_->count_left();
  engine_->post([engine = engine_.get(), core = core_, reason] { engine->groups().supersede(core, reason); });
}

}  // namespace hybridps::engine
