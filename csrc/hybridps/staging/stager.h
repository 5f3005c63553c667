// hybridps/staging/stager.h: the two threads that serve all channels of a process.
//
// Model    Two threads, because a driver call may wait for the device, and the device waits for flags.
//          "hybridps-stage" looks at the flags of all channels, gives operations to the engine, and judges deadlines.
//          Streams wait for this thread, so it makes no driver call (device::NoDriverCalls).
//          "hybridps-driver" asks the driver and the nodes' libraries whether they have failed, waits for streams of
//          destroyed channels, and gives memory back to the driver. Only stop() waits for this thread, and begin()
//          during a trim. Memory goes back to the driver only when nothing of the process is under way: after stop().
// Threads  every method from any thread. Blocking: stop(); begin() while memory is given back. This wait is for the
//          program's own work on the device, and for no flag.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"
#include "hybridps/engine/group.h"
#include "hybridps/staging/channel.h"
#include "hybridps/staging/device_pool.h"

namespace hybridps::staging {

/// stop() ends the threads. Only then can the Stager be destroyed.
class Stager : public std::enable_shared_from_this<Stager>, core::Pinned {
 public:
  Stager() = default;
  ~Stager();

  core::Result<std::shared_ptr<Channel>> open(std::shared_ptr<device::Device> device,
                                              std::weak_ptr<engine::Group> group, ChannelOptions options);
  /// Waits for what is under way, at most `patience`. Then gives up the rest (its streams go on) and ends the threads.
  /// A later operation starts new threads.
  void stop(std::chrono::milliseconds patience);
  /// Channels with something under way.
  std::size_t active() const;

 private:
  friend class Channel;
  /// Returns whether the funeral has finished. If not, the driver's thread calls it again.
  using Funeral = std::function<bool()>;

  /// From now on the threads look at the channel, until the channel is idle. Called before any work is put on a stream
  /// that the threads must release.
  core::Status begin(std::shared_ptr<Channel> channel);
  /// As begin(), but without a result and without waiting for a trim.
  void activate(std::shared_ptr<Channel> channel);
  void warn_of_few_queues(DevicePool& pool);
  core::Status start_locked();  // mutex_ held, here and below
  core::Status start_driver_locked();
  void watch_locked(std::shared_ptr<Channel> channel);
  /// Runs `funeral` on the driver's thread.
  void bury(Funeral funeral);
  void run();
  void run_driver();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::condition_variable driver_changed_;
  std::vector<std::shared_ptr<DevicePool>> pools_;  // one per device
  std::vector<std::shared_ptr<Channel>> active_;
  std::vector<Funeral> funerals_;
  std::thread thread_;
  std::thread driver_;
  bool warned_of_few_queues_ = false;
  bool running_ = false;
  bool driver_running_ = false;
  bool trimming_ = false;
  bool stopping_ = false;
  bool abandon_ = false;  // the driver's thread no longer waits for streams
  bool gave_up_ = false;  // work may stay on a stream for ever, so nothing is freed
  core::TimePoint stop_at_{};
};

}  // namespace hybridps::staging
