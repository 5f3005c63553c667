#include "hybridps/staging/event_pool.h"

namespace hybridps::staging {

EventPool::~EventPool() {
  for (const device::Event event : free_) device_->destroy(event);
}

core::Result<device::Event> EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const device::Event event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  return device_->make_event();
}

void EventPool::give_back(device::Event event) {
  if (event.native == nullptr) return;
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

}  // namespace hybridps::staging
