// hybridps/engine/group_handle.h: the caller's handle of a group. It hands each call to the engine's loop.
//
// Threads  any.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/engine/engine_impl.h"
#include "hybridps/engine/group.h"
#include "hybridps/engine/group_core.h"

namespace hybridps::engine {

class GroupHandle final : public Group {
 public:
  GroupHandle(std::shared_ptr<EngineImpl> engine, std::shared_ptr<GroupCore> core)
      : engine_(std::move(engine)), core_(std::move(core)) {}
  ~GroupHandle() override;

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
    return core_->ready && core_->coded_or_joined->may_code();
  }
  void drive(const std::function<bool()>& done, core::TimePoint until) override;
  core::Status wait_ready() override;
  core::Status status() const override {
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

}  // namespace hybridps::engine
