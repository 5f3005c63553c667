// hybridps/staging/device_pool.h: streams, events and memory of one device, used again and again.
//
// Model    What is given back stays here for who asks next. To free memory a driver may wait for the whole device, and
//          hold up every call of the process meanwhile: where a stream waits for a flag of ours, ranks that were to
//          help with that could be held up likewise. So nothing is freed but by trim(), which the Stager calls when
//          nothing of the process is under way.
// Threads  every method from any thread. give_back() makes no call to the driver; take_...(), trim() and the destructor
//          may.
// Errors   of take_...(): the device's.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"

namespace hybridps::staging {

class DevicePool : core::Pinned {
 public:
  /// Of the device's own memory.
  struct Run {
    std::byte* data = nullptr;
    std::uint64_t bytes = 0;
  };

  explicit DevicePool(std::shared_ptr<device::Device> device) : device_(std::move(device)) {}
  ~DevicePool() { trim(); }

  device::Device& device() noexcept { return *device_; }
  /// Channels of the device that live: they count themselves.
  std::atomic<int>& channels() noexcept { return channels_; }
  core::Result<device::DeviceEvent> take_event();
  core::Result<device::DeviceStream> take_stream();
  /// Pinned; `bytes` or more, as they were left.
  core::Result<device::HostMemory> take_host(std::uint64_t bytes);
  core::Result<Run> take_device(std::uint64_t bytes);

  /// Streams may still wait for it.
  void give_back(device::DeviceEvent event);
  /// Nothing is on it any more, and below: nothing on a stream uses it, nor does anybody else.
  void give_back(device::DeviceStream stream);
  void give_back(const device::HostMemory& memory);
  void give_back(Run run);

  /// Gives the driver what nobody has. May wait for the whole device.
  void trim() noexcept;

 private:
  const std::shared_ptr<device::Device> device_;
  std::atomic<int> channels_{0};
  std::mutex mutex_;
  std::vector<device::DeviceEvent> events_;
  std::vector<device::DeviceStream> streams_;
  std::vector<device::HostMemory> host_;
  std::vector<Run> runs_;
};

}  // namespace hybridps::staging
