// hybridps/staging/stager.h: the thread that watches the flags and events of all channels of a process.
//
// Threads  every method from any thread. Blocking: stop().
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

namespace hybridps::staging {

/// The thread ends with stop(), and only then can the Stager be destroyed.
class Stager : public std::enable_shared_from_this<Stager>, core::Pinned {
 public:
  Stager() = default;
  ~Stager();

  core::Result<std::shared_ptr<Channel>> open(std::shared_ptr<device::Device> device,
                                              std::weak_ptr<engine::Group> group, ChannelOptions options);
  /// Waits for what is under way, `patience` at most; then gives it up (its streams go on) and ends the thread. A later
  /// operation makes a new one.
  void stop(std::chrono::milliseconds patience);
  /// Channels with something under way.
  std::size_t active() const;

 private:
  friend class Channel;
  void activate(std::shared_ptr<Channel> channel);
  /// Its thread, if it does not run: before anything is put on a stream that it must release.
  core::Status start();
  core::Status start_locked();  // mutex_ held
  /// Runs it on the thread: destructors that may have to wait for a driver.
  void bury(std::function<void()> funeral);
  void run();

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::shared_ptr<Channel>> active_;
  std::vector<std::function<void()>> funerals_;
  std::thread thread_;
  bool running_ = false;
  bool stopping_ = false;
  core::TimePoint stop_at_{};
};

}  // namespace hybridps::staging
