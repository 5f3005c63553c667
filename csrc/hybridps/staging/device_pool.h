// hybridps/staging/device_pool.h: streams, events and memory of one device, used again and again.
//
// Model    Returned objects stay in the pool for the next user. A driver that frees memory may wait for the whole
//          device, and meanwhile hold up every call of the process. If a stream then waits for one of our flags, the
//          ranks that must help to set the flag could be held up too. So only trim() frees anything. The Stager calls
//          trim() when nothing of the process is under way.
// Threads  every method from any thread. give_back() makes no driver call; take_...(), trim() and the destructor may.
// Errors   take_...() returns the device's error.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "hybridps/core/mutex.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"

namespace hybridps::staging {

class DevicePool : core::Pinned {
 public:
  /// A run of the device's own memory.
  struct Run {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
  };

  explicit DevicePool(std::shared_ptr<device::Device> device) : device_(std::move(device)) {}
  ~DevicePool() { trim(); }

  device::Device& device() noexcept { return *device_; }
  /// Live channels of the device. The channels count themselves.
  std::atomic<int>& channels() noexcept { return channels_; }
  /// Streams of the channels that wait for the network, and those of the library below them.
  std::atomic<int>& streams_that_wait() noexcept { return streams_that_wait_; }
  /// Whether streams can write and wait for words of host memory. Asked once. `stream` and `flag` are the caller's.
  core::Status check_flags(device::DeviceStream stream, device::Flag flag);
  core::Result<device::DeviceEvent> take_event();
  using SharedEvent = std::shared_ptr<const device::DeviceEvent>;
  /// An event that goes back to the pool when its last owner lets go.
  static core::Result<SharedEvent> share_event(const std::shared_ptr<DevicePool>& pool);
  core::Result<device::DeviceStream> take_stream();
  /// Pinned memory of `bytes` or more, with its old contents.
  core::Result<device::HostMemory> take_host(std::uint64_t bytes);
  core::Result<Run> take_device(std::uint64_t bytes);

  /// Streams may still wait for the event.
  void give_back(device::DeviceEvent event);
  /// For the stream: no work is on it any more. For the memory below: no stream and nobody else uses it.
  void give_back(device::DeviceStream stream);
  void give_back(const device::HostMemory& memory);
  void give_back(Run run);

  /// Gives everything unused back to the driver. May wait for the whole device.
  void trim() noexcept;

 private:
  const std::shared_ptr<device::Device> device_;
  std::atomic<int> channels_{0};
  std::atomic<int> streams_that_wait_{0};
  std::atomic<bool> has_flags_{false};
  core::Mutex mutex_;
  std::vector<device::DeviceEvent> events_ HYBRIDPS_GUARDED_BY(mutex_);
  std::vector<device::DeviceStream> streams_ HYBRIDPS_GUARDED_BY(mutex_);
  std::vector<device::HostMemory> host_ HYBRIDPS_GUARDED_BY(mutex_);
  std::vector<Run> runs_ HYBRIDPS_GUARDED_BY(mutex_);
};

}  // namespace hybridps::staging
