// hybridps/staging/stager.h: the threads that channels of a process need.
//
// Model    Two threads, since a call of the driver may wait for the device, and the device waits for flags:
//          "hybridps-stage" looks at the flags of all channels, gives operations to the engine and judges deadlines.
//          Streams wait for what it does. It makes no call to the driver (device::NoDriverCalls). "hybridps-driver"
//          asks the driver and the nodes' libraries whether they have failed, waits for streams of channels that are
//          gone, and gives memory back to the driver. Nothing waits for it but stop(), and begin() for a trim. Memory
//          goes back to the driver only when nothing of the process is under way: after stop().
// Threads  every method from any thread. Blocking: stop(); begin() while memory is given back, which waits for what the
//          program itself has put on the device, and for no flag.
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

/// The threads end with stop(), and only then can the Stager be destroyed.
class Stager : public std::enable_shared_from_this<Stager>, core::Pinned {
 public:
  Stager() = default;
  ~Stager();

  core::Result<std::shared_ptr<Channel>> open(std::shared_ptr<device::Device> device,
                                              std::weak_ptr<engine::Group> group, ChannelOptions options);
  /// Waits for what is under way, `patience` at most; then gives it up (its streams go on) and ends the threads. A
  /// later operation makes new ones.
  void stop(std::chrono::milliseconds patience);
  /// Channels with something under way.
  std::size_t active() const;

 private:
  friend class Channel;
  /// Whether it is done with; else it is asked again.
  using Funeral = std::function<bool()>;

  /// Its threads look at the channel from now on, until it is idle: before anything is put on a stream that they must
  /// release.
  core::Status begin(std::shared_ptr<Channel> channel);
  /// The same, without an answer, for what need not wait for a trim.
  void activate(std::shared_ptr<Channel> channel);
  core::Status start_locked();  // mutex_ held, here and below
  core::Status start_driver_locked();
  void watch_locked(std::shared_ptr<Channel> channel);
  void warn_of_few_queues_locked(DevicePool& pool);
  /// Runs it on the driver's thread.
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
  bool abandon_ = false;  // the driver's thread does not wait for streams any more
  bool gave_up_ = false;  // something may be on a stream for ever: nothing is freed
  core::TimePoint stop_at_{};
};

}  // namespace hybridps::staging
