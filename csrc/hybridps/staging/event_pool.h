// hybridps/staging/event_pool.h: events of one device that are used again and again.
//
// Threads  every method from any thread.
#pragma once

#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"

namespace hybridps::staging {

class EventPool : core::Pinned {
 public:
  explicit EventPool(std::shared_ptr<device::Device> device) : device_(std::move(device)) {}
  ~EventPool();
  core::Result<device::Event> take();
  void give_back(device::Event event);

 private:
  const std::shared_ptr<device::Device> device_;
  std::mutex mutex_;
  std::vector<device::Event> free_;
};

}  // namespace hybridps::staging
