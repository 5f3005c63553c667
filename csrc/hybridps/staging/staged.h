// hybridps/staging/staged.h: one operation on device memory under way, as its caller sees it (channel.h).
//
// Owner    the caller holds the Staged; the Channel holds it too, until the operation is over.
// Threads  every method from any thread. Blocking: only wait().
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>

#include "hybridps/core/clock.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"
#include "hybridps/staging/device_pool.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

class Channel;

class Staged : public std::enable_shared_from_this<Staged>, core::Pinned {
 public:
  Staged(std::shared_ptr<Channel> channel, std::shared_ptr<DevicePool> pool) noexcept;
  ~Staged();

  /// Later work on `stream` runs after the operation.
  core::Status wait_on(device::DeviceStream stream);
  /// Puts the way back on the out stream, if enqueue() left it open. Idempotent.
  core::Status complete_enqueue();
  /// Whether the stream has reached the operation's end, or never will. Then nothing of the operation touches the
  /// caller's memory any more.
  bool is_over() const;
  /// kOk until a failure is known. A failure returned here counts as told.
  core::Status status();
  bool has_failed() const;
  bool is_told() const;
  /// Blocks until the operation is over or has failed, or until `until`. False: the time ran out.
  bool wait(core::TimePoint until);
  /// The sending rank of a receive that is over; else -1.
  int source_rank() const;

 private:
  friend class Channel;
  /// Whether a thread is in wait().
  bool is_waited_for() const noexcept { return waits_.load(std::memory_order_relaxed) > 0; }
  void set_failed(const core::Status& status);
  void slice_done(const worker::Outcome& outcome);
  void set_over();
  /// Drops the caller's functions and what they hold (maybe tensors) on the calling thread, not on a thread that
  /// streams wait for.
  void forget();

  const std::weak_ptr<Channel> channel_;
  const std::shared_ptr<DevicePool> pool_;
  device::DeviceEvent start_;
  DevicePool::SharedEvent end_;
  core::Deadline deadline_;
  core::Duration timeout_{};
  std::string what_;

  // Guarded by the channel's mutex_.
  std::function<void()> finish_;
  std::uint64_t last_number_ = 0;
  bool ended_ = false;
  std::uint64_t end_number_ = 0;  // what the out stream writes at the operation's end; valid once ended_

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  core::Status status_;
  bool told_ = false;
  bool over_ = false;
  std::atomic<int> waits_{0};
  int source_rank_ = -1;
  core::OnceFn<void(const core::Status&)> done_;
};

}  // namespace hybridps::staging
