#include "hybridps/staging/device_pool.h"

#include <algorithm>

namespace hybridps::staging {
namespace {

constexpr std::uint64_t kPage = 4096;

/// Takes out the smallest memory that is large enough. A request for a page (flags) needs an exact fit, so that it
/// never takes a ring.
template <typename Memory>
bool take_from(std::vector<Memory>& all, std::uint64_t bytes, Memory& taken) {
  auto best = all.end();
  for (auto at = all.begin(); at != all.end(); ++at) {
    const bool fits = bytes <= kPage ? at->bytes == bytes : at->bytes >= bytes;
    if (fits && (best == all.end() || at->bytes < best->bytes)) best = at;
  }
  if (best == all.end()) return false;
  taken = *best;
  all.erase(best);
  return true;
}

template <typename Thing>
bool take_last(std::vector<Thing>& all, Thing& taken) {
  if (all.empty()) return false;
  taken = all.back();
  all.pop_back();
  return true;
}

}  // namespace

core::Result<device::DeviceEvent> DevicePool::take_event() {
  device::DeviceEvent event;
  {
    const core::MutexLock lock(mutex_);
    if (take_last(events_, event)) return event;
  }
  return device_->make_event();
}

core::Result<DevicePool::SharedEvent> DevicePool::share_event(const std::shared_ptr<DevicePool>& pool) {
  const auto taken = pool->take_event();
  if (!taken.is_ok()) return taken.status();
  return SharedEvent(new device::DeviceEvent(taken.value()), [pool](const device::DeviceEvent* event) {
    pool->give_back(*event);
    delete event;
  });
}

core::Status DevicePool::check_flags(device::DeviceStream stream, device::Flag flag) {
  if (has_flags_.load()) return {};
  const core::Status status = device_->check_flags(stream, flag);
  has_flags_.store(status.is_ok());
  return status;
}

core::Result<device::DeviceStream> DevicePool::take_stream() {
  device::DeviceStream stream;
  {
    const core::MutexLock lock(mutex_);
    if (take_last(streams_, stream)) return stream;
  }
  return device_->make_stream();
}

core::Result<device::HostMemory> DevicePool::take_host(std::uint64_t bytes) {
  device::HostMemory memory;
  {
    const core::MutexLock lock(mutex_);
    if (take_from(host_, bytes, memory)) return memory;
  }
  return device_->allocate_host(bytes);
}

core::Result<DevicePool::Run> DevicePool::take_device(std::uint64_t bytes) {
  Run run;
  {
    const core::MutexLock lock(mutex_);
    if (take_from(runs_, bytes, run)) return run;
  }
  const auto made = device_->allocate_device(bytes);
  if (!made.is_ok()) return made.status();
  return Run{made.value(), bytes};
}

void DevicePool::give_back(device::DeviceEvent event) {
  if (event.native == nullptr) return;
  const core::MutexLock lock(mutex_);
  events_.push_back(event);
}

void DevicePool::give_back(device::DeviceStream stream) {
  if (stream.native == nullptr) return;
  const core::MutexLock lock(mutex_);
  streams_.push_back(stream);
}

void DevicePool::give_back(const device::HostMemory& memory) {
  if (memory.data == nullptr) return;
  const core::MutexLock lock(mutex_);
  host_.push_back(memory);
}

void DevicePool::give_back(Run run) {
  if (run.data == nullptr) return;
  const core::MutexLock lock(mutex_);
  runs_.push_back(run);
}

void DevicePool::trim() noexcept {
  std::vector<device::DeviceEvent> events;
  std::vector<device::DeviceStream> streams;
  std::vector<device::HostMemory> host;
  std::vector<Run> runs;
  {
    const core::MutexLock lock(mutex_);
    events.swap(events_);
    streams.swap(streams_);
    host.swap(host_);
    runs.swap(runs_);
  }
  for (const device::DeviceEvent event : events) device_->destroy(event);
  for (const device::DeviceStream stream : streams) device_->destroy(stream);
  for (const device::HostMemory& memory : host) device_->free_host(memory);
  for (const Run& run : runs) device_->free_device(run.data);
}

}  // namespace hybridps::staging
