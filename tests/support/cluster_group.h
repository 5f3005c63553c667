// tests/support/cluster_group.h: a Cluster on a thread of its own, and its ranks as engine::Groups.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hybridps/engine/group.h"
#include "tests/support/cluster.h"

namespace hybridps::test {

class ClusterThread {
 public:
  explicit ClusterThread(ClusterOptions options)
      : node_of_(options.node_of), cluster_(std::move(options)), thread_([this] { run(); }) {}
  ~ClusterThread() {
    stop_.store(true);
    thread_.join();
  }
  int size() const { return cluster_.size(); }
  const std::vector<int>& node_of() const { return node_of_; }
  void post(std::function<void(Cluster&)> command) {
    const std::lock_guard lock(mutex_);
    commands_.push_back(std::move(command));
  }
  /// Waits for it.
  void run(const std::function<void(Cluster&)>& command) {
    std::atomic<bool> done{false};
    post([&](Cluster& cluster) {
      command(cluster);
      done.store(true);
    });
    while (!done.load()) std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  void run() {
    while (!stop_.load()) {
      std::deque<std::function<void(Cluster&)>> commands;
      {
        const std::lock_guard lock(mutex_);
        commands.swap(commands_);
      }
      bool did = !commands.empty();
      for (const auto& command : commands) command(cluster_);
      did |= cluster_.progress() > 0;
      if (!did) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  const std::vector<int> node_of_;
  std::mutex mutex_;
  std::deque<std::function<void(Cluster&)>> commands_;
  std::atomic<bool> stop_{false};
  Cluster cluster_;  // what ends with it may still post
  std::thread thread_;
};

/// One rank's view of one group of a ClusterThread, which outlives it.
class ClusterGroup final : public engine::Group {
 public:
  /// All ranks' views of a new group.
  static std::vector<std::shared_ptr<ClusterGroup>> open(ClusterThread& cluster) {
    core::GroupUid uid;
    cluster.run([&](Cluster& c) { uid = c.open_group(); });
    std::vector<std::shared_ptr<ClusterGroup>> groups;
    for (int r = 0; r < cluster.size(); ++r) {
      groups.push_back(std::make_shared<ClusterGroup>(cluster, uid, r));
      cluster.run([&](Cluster& c) {
        engine::Runtime::RuntimeHooks hooks;
        hooks.group_failed = [failed = groups.back()->failed_](core::GroupUid, const core::Status& status,
                                                               const core::Status&, bool) {
          const std::lock_guard lock(failed->mutex);
          if (failed->status.is_ok()) failed->status = status;
        };
        c.at(r).set_hooks(std::move(hooks));
      });
    }
    return groups;
  }
  ClusterGroup(ClusterThread& cluster, core::GroupUid uid, int rank) : cluster_(cluster), uid_(uid), rank_(rank) {}

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return cluster_.size(); }
  const std::string& name() const noexcept override { return name_; }
  std::shared_ptr<engine::Engine> engine() const noexcept override { return nullptr; }
  std::uint64_t submit(worker::Operation operation, worker::Completion done, bool) override {
    const std::lock_guard lock(mutex_);
    const bool counted = operation.kind != schedule::Kind::kPointToPoint;
    const std::uint64_t sequence = counted ? submitted_++ : 0;
    post(std::move(operation), sequence, std::move(done));
    return sequence;
  }
  std::uint64_t reserve() override {
    const std::lock_guard lock(mutex_);
    const std::uint64_t sequence = submitted_++;
    cluster_.post([uid = uid_, rank = rank_, sequence](Cluster& c) {
      if (c.is_alive(rank)) c.at(rank).worker().reserve(*c.at(rank).worker().find(uid), sequence);
    });
    return sequence;
  }
  void submit_reserved(std::uint64_t sequence, worker::Operation operation, worker::Completion done) override {
    post(std::move(operation), sequence, std::move(done));
  }
  core::Result<std::shared_ptr<void>> attach_device(transport::DeviceMemory memory,
                                                    std::shared_ptr<void> keep) override {
    const std::span<std::byte> bytes = memory.bytes;
    core::Status status(core::Code::kClosed, "this rank was killed");
    cluster_.run([&](Cluster& c) {
      if (c.is_alive(rank_)) status = c.at(rank_).attach_device(memory, std::move(keep));
    });
    if (!status.is_ok()) return status;
    return std::shared_ptr<void>(bytes.data(), [cluster = &cluster_, rank = rank_, bytes](void*) {
      cluster->post([rank, bytes](Cluster& c) {
        if (c.is_alive(rank)) c.at(rank).detach_device(bytes);
      });
    });
  }
  void drive(const std::function<bool()>&, core::TimePoint) override {}
  core::Result<std::vector<Remembered>> remembered(std::vector<compress::TensorKey>) override {
    return core::Status(core::Code::kUnsupported, "not here");
  }
  core::Result<RememberedSummary> remembered_summary() override { return RememberedSummary{}; }
  bool may_code() override { return true; }
  core::Status wait_ready() override { return {}; }
  core::Status status() const override {
    const std::lock_guard lock(failed_->mutex);
    return failed_->status;
  }
  void abort(const std::string& reason) override {
    cluster_.post([uid = uid_, rank = rank_, reason](Cluster& c) {
      if (!c.is_alive(rank)) return;
      c.at(rank).worker().fail_group(*c.at(rank).worker().find(uid), core::Status(core::Code::kAborted, reason), true);
    });
  }
  void leave() override {}
  void supersede(const std::string& /*reason*/) override {}
  std::uint64_t sequence_submitted() const noexcept override { return submitted_; }
  std::uint64_t sequence_completed() const noexcept override { return 0; }
  std::vector<int> node_of() const override { return cluster_.node_of(); }
  engine::GroupSummary summary() const override { return {}; }

 private:
  struct Failed {
    std::mutex mutex;
    core::Status status;
  };
  void post(worker::Operation operation, std::uint64_t sequence, worker::Completion done) {
    // std::function wants to be copied.
    auto carried =
        std::make_shared<std::pair<worker::Operation, worker::Completion>>(std::move(operation), std::move(done));
    cluster_.post([uid = uid_, rank = rank_, sequence, carried](Cluster& c) {
      if (c.is_alive(rank))
        c.submit(uid, rank, std::move(carried->first), sequence, std::move(carried->second));
      else
        carried->second(worker::Outcome{core::Status(core::Code::kClosed, "this rank was killed"), -1});
    });
  }

  ClusterThread& cluster_;
  const core::GroupUid uid_;
  const int rank_;
  const std::string name_ = "test";
  const std::shared_ptr<Failed> failed_ = std::make_shared<Failed>();
  std::mutex mutex_;
  std::uint64_t submitted_ = 0;
};

}  // namespace hybridps::test
