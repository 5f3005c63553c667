#include "hybridps/device/fake/fake_device.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <shared_mutex>
#include <thread>
#include <utility>

#include "hybridps/device/int8.h"

namespace hybridps::device {
namespace {

using core::Code;
using core::Status;

constexpr std::uint64_t kPage = 4096;
constexpr auto kHostCopyPatience = std::chrono::seconds(3);

// Each recording has its own word. So a later recording on another stream does not release a waiter of an earlier one.
struct EventState {
  std::mutex mutex;
  std::shared_ptr<std::atomic<bool>> reached;  // word of the last recording; null: never recorded
  std::shared_ptr<std::atomic<bool>> last() {
    const std::lock_guard lock(mutex);
    return reached;
  }
};
using EventPtr = std::shared_ptr<EventState>;

struct Queue {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::function<void()>> tasks;
  bool busy = false;
  std::mt19937_64 random;
  std::thread thread;
};

/// Memory of this process's fake devices. No thread can touch this memory at its address. Copies use the second
/// mapping, the view.
class OwnMemory {
 public:
  core::Result<std::byte*> allocate(std::uint64_t bytes) {
    const int fd = memfd_create("fake device", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
      if (fd >= 0) close(fd);
      return Status(Code::kOutOfResources, "no memory");
    }
    void* const address = mmap(nullptr, bytes, PROT_NONE, MAP_SHARED, fd, 0);
    void* const view = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (address == MAP_FAILED || view == MAP_FAILED) {
      if (address != MAP_FAILED) munmap(address, bytes);
      if (view != MAP_FAILED) munmap(view, bytes);
      return Status(Code::kOutOfResources, "no memory");
    }
    const std::lock_guard lock(mutex_);
    runs_[static_cast<std::byte*>(address)] = {bytes, static_cast<std::byte*>(view)};
    return static_cast<std::byte*>(address);
  }
  /// Returns the size that was freed, in bytes.
  std::uint64_t free(std::byte* address) {
    const std::lock_guard lock(mutex_);
    const auto found = runs_.find(address);
    if (found == runs_.end()) return 0;
    const auto [bytes, view] = found->second;
    munmap(view, bytes);
    munmap(address, bytes);
    runs_.erase(found);
    return bytes;
  }
  std::byte* view(std::byte* address) const {
    const std::lock_guard lock(mutex_);
    const auto next = runs_.upper_bound(address);
    if (next == runs_.begin()) return address;
    const auto& [begin, run] = *std::prev(next);
    const auto inside = static_cast<std::uint64_t>(address - begin);
    return inside < run.first ? run.second + inside : address;
  }

 private:
  mutable std::mutex mutex_;
  std::map<std::byte*, std::pair<std::uint64_t, std::byte*>> runs_;  // address -> bytes, view
};

OwnMemory& own_memory() {
  static OwnMemory memory;
  return memory;
}

/// The address where a kernel reads `at`.
template <typename T>
T* seen(T* at) {
  auto* const address = const_cast<std::byte*>(reinterpret_cast<const std::byte*>(at));
  return reinterpret_cast<T*>(own_memory().view(address));
}

void copy(void* to, const void* from, std::uint64_t bytes) {
  std::memcpy(own_memory().view(static_cast<std::byte*>(to)),
              FakeDevice::host_view(static_cast<const std::byte*>(from)), bytes);
}

/// The driver's lock. Nobody overtakes a thread that wants the lock exclusively.
class DriverLock {
 public:
  void lock_shared() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return !alone_ && wanted_alone_ == 0; });
    ++shared_;
  }
  void unlock_shared() {
    const std::lock_guard lock(mutex_);
    if (--shared_ == 0) changed_.notify_all();
  }
  void lock() {
    std::unique_lock lock(mutex_);
    ++wanted_alone_;
    changed_.wait(lock, [&] { return !alone_ && shared_ == 0; });
    --wanted_alone_;
    alone_ = true;
  }
  void unlock() {
    const std::lock_guard lock(mutex_);
    alone_ = false;
    changed_.notify_all();
  }
  bool is_held_alone() const {
    const std::lock_guard lock(mutex_);
    return alone_;
  }

 private:
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  int shared_ = 0;
  int wanted_alone_ = 0;
  bool alone_ = false;
};

struct StreamState {
  Queue* queue = nullptr;
  std::atomic<bool> capturing{false};
};

}  // namespace

struct FakeDevice::Impl {
  explicit Impl(FakeOptions o) : options(o), random(o.seed) {
    for (int i = 0; i < std::max(1, options.hardware_queues); ++i) {
      queues.push_back(std::make_unique<Queue>());
      Queue& queue = *queues.back();
      queue.random.seed(random());
      queue.thread = std::thread([this, &queue] { run(queue); });
    }
  }
  ~Impl() {
    stop.store(true);
    for (const auto& queue : queues) {
      const std::lock_guard lock(queue->mutex);
      queue->changed.notify_all();
    }
    for (const auto& queue : queues) queue->thread.join();
    for (auto& [data, bytes] : pinned) std::free(data);
  }

  void run(Queue& queue) {
    std::unique_lock lock(queue.mutex);
    for (;;) {
      queue.changed.wait(lock, [&] { return stop.load() || !queue.tasks.empty(); });
      if (queue.tasks.empty()) return;
      auto task = std::move(queue.tasks.front());
      queue.tasks.pop_front();
      queue.busy = true;
      const auto pause = pause_of(queue);
      lock.unlock();
      if (pause.count() > 0 && !stop.load()) std::this_thread::sleep_for(pause);
      if (!dead.load()) task();
      task = nullptr;
      lock.lock();
      queue.busy = false;
      queue.changed.notify_all();
    }
  }

  std::chrono::microseconds pause_of(Queue& queue) const {
    if (options.pause_us_max <= 0) return std::chrono::microseconds(0);
    const auto drawn = queue.random();
    const auto pause = static_cast<int>((drawn >> 8) % static_cast<std::uint64_t>(options.pause_us_max + 1));
    // Most tasks have no pause. Otherwise all tasks would run in step with the pauses.
    if (drawn % 4 != 0) return std::chrono::microseconds(0);
    return std::chrono::microseconds((drawn >> 4) % 16 == 0 ? 10 * pause : pause);
  }

  Status check() const {
    const std::lock_guard lock(mutex);
    return broken;
  }

  /// Held during a driver call.
  [[nodiscard]] std::shared_lock<DriverLock> call() {
    NoDriverCalls::look();
    return std::shared_lock(driver);
  }
  /// Held during a driver call that waits for the device.
  [[nodiscard]] std::unique_lock<DriverLock> memory_call() {
    NoDriverCalls::look();
    std::unique_lock lock(driver);
    if (options.memory_calls_wait) wait_until([&] { return is_idle(); });
    return lock;
  }
  bool is_idle() const {
    return std::ranges::all_of(queues, [](const auto& queue) {
      const std::lock_guard of_queue(queue->mutex);
      return queue->tasks.empty() && !queue->busy;
    });
  }

  Status put(DeviceStream stream, std::function<void()> task) {
    const auto lock = call();
    return put_in_call(stream, std::move(task));
  }
  Status put_in_call(DeviceStream stream, std::function<void()> task) {
    if (Status status = check(); !status.is_ok()) return status;
    Queue& queue = *static_cast<StreamState*>(stream.native)->queue;
    const auto has_room = [&] {
      const std::lock_guard lock(queue.mutex);
      return queue.tasks.size() < options.launches_max;
    };
    wait_until(has_room);
    const std::lock_guard lock(queue.mutex);
    queue.tasks.push_back(std::move(task));
    queue.changed.notify_all();
    return {};
  }
  /// Waits in the call until the task is done.
  Status put_and_wait(DeviceStream stream, std::function<void()> task) {
    const auto done = std::make_shared<std::atomic<bool>>(false);
    Status status = put_in_call(stream, [done, task = std::move(task)] {
      task();
      done->store(true);
    });
    if (status.is_ok()) wait_until([&] { return done->load(); });
    return status;
  }
  Status put_copy(DeviceStream stream, bool waits, std::function<void()> task) {
    const auto lock = call();
    return waits ? put_and_wait(stream, std::move(task)) : put_in_call(stream, std::move(task));
  }

  /// A copy from host memory to host memory. CUDA makes it in the call, after the stream's earlier work.
  Status copy_on_host(DeviceStream stream, std::function<void()> task) {
    const auto lock = call();
    const auto done = std::make_shared<std::atomic<bool>>(false);
    Status status = put_in_call(stream, [done, task = std::move(task)] {
      task();
      done->store(true);
    });
    const auto until = std::chrono::steady_clock::now() + kHostCopyPatience;
    if (status.is_ok()) wait_until([&] { return done->load() || std::chrono::steady_clock::now() > until; });
    static_cast<void>(core::check(!status.is_ok() || done->load() || stop.load() || dead.load(),
                                  "a copy from host memory to host memory ends: it is made in the call"));
    return status;
  }

  template <typename Ready>
  void wait_until(const Ready& ready) const {
    while (!ready() && !stop.load() && !dead.load()) std::this_thread::sleep_for(std::chrono::microseconds(20));
  }

  bool is_pinned(const void* address) const {
    const std::lock_guard lock(mutex);
    const auto* at = static_cast<const std::byte*>(address);
    const auto next = pinned.upper_bound(const_cast<std::byte*>(at));
    if (next == pinned.begin()) return false;
    const auto& [data, bytes] = *std::prev(next);
    return at < data + bytes;
  }

  const FakeOptions options;
  std::atomic<bool> stop{false};
  std::atomic<bool> dead{false};
  std::atomic<std::int64_t> records_to_failure{-1};
  std::atomic<std::uint64_t> to_host{0};
  std::atomic<std::uint64_t> to_device{0};
  std::atomic<std::uint64_t> within{0};
  mutable std::mutex mutex;
  std::mt19937_64 random;
  Status broken;
  std::map<std::byte*, std::uint64_t> pinned;
  std::uint64_t pinned_bytes = 0;
  std::uint64_t device_bytes = 0;
  std::size_t streams = 0;
  std::size_t events = 0;
  DriverLock driver;
  std::vector<std::unique_ptr<Queue>> queues;
};

FakeDevice::FakeDevice(FakeOptions options) : impl_(std::make_unique<Impl>(options)) {}
FakeDevice::~FakeDevice() = default;

std::string FakeDevice::describe() const {
  return "fake device with " + std::to_string(impl_->queues.size()) + " hardware queues";
}

int FakeDevice::hardware_queues() const noexcept { return impl_->options.hardware_queues; }

namespace {
thread_local FakeDevice* current_device = nullptr;
}

core::Status FakeDevice::run_here(const std::function<core::Status()>& call) {
  FakeDevice* const before = std::exchange(current_device, this);
  Status status = call();
  current_device = before;
  return status;
}

FakeDevice* FakeDevice::current() noexcept { return current_device; }

core::Result<std::string> FakeDevice::physical_id() {
  if (Status status = impl_->check(); !status.is_ok()) return status;
  if (!impl_->options.physical_id.empty()) return impl_->options.physical_id;
  return "fake " + std::to_string(reinterpret_cast<std::uintptr_t>(this));
}

core::Result<DeviceStream> FakeDevice::make_stream() {
  const auto call = impl_->call();
  if (Status status = impl_->check(); !status.is_ok()) return status;
  const std::lock_guard lock(impl_->mutex);
  auto* state = new StreamState();
  state->queue = impl_->queues[impl_->streams++ % impl_->queues.size()].get();
  return DeviceStream{state};
}

void FakeDevice::destroy(DeviceStream stream) noexcept {
  const auto call = impl_->call();
  const std::lock_guard lock(impl_->mutex);
  --impl_->streams;
  delete static_cast<StreamState*>(stream.native);
}

core::Result<DeviceEvent> FakeDevice::make_event() {
  const auto call = impl_->call();
  if (Status status = impl_->check(); !status.is_ok()) return status;
  const std::lock_guard lock(impl_->mutex);
  ++impl_->events;
  return DeviceEvent{new EventPtr(std::make_shared<EventState>())};
}

void FakeDevice::destroy(DeviceEvent event) noexcept {
  const auto call = impl_->call();
  const std::lock_guard lock(impl_->mutex);
  --impl_->events;
  delete static_cast<EventPtr*>(event.native);
}

core::Status FakeDevice::record(DeviceEvent event, DeviceStream stream) {
  if (impl_->records_to_failure.fetch_sub(1) == 0) return Status(Code::kInternal, "an event cannot be recorded");
  EventState& state = **static_cast<EventPtr*>(event.native);
  auto reached = std::make_shared<std::atomic<bool>>(false);
  {
    const std::lock_guard lock(state.mutex);
    state.reached = reached;
  }
  return impl_->put(stream, [reached] { reached->store(true); });
}

core::Status FakeDevice::wait(DeviceStream stream, DeviceEvent event) {
  const auto reached = (*static_cast<EventPtr*>(event.native))->last();
  if (!reached) {
    const auto call = impl_->call();
    return impl_->check();
  }
  return impl_->put(stream, [this, reached] { impl_->wait_until([&] { return reached->load(); }); });
}

core::Result<bool> FakeDevice::is_done(DeviceEvent event) {
  const auto call = impl_->call();
  if (Status status = impl_->check(); !status.is_ok()) return status;
  const auto reached = (*static_cast<EventPtr*>(event.native))->last();
  return !reached || reached->load();
}

core::Status FakeDevice::copy_to_host(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  impl_->to_host.fetch_add(bytes);
  auto task = [to, from, bytes] { copy(to, from, bytes); };
  if (is_pinned(from)) return impl_->copy_on_host(stream, std::move(task));
  return impl_->put_copy(stream, !is_pinned(to), std::move(task));
}

core::Status FakeDevice::copy_to_device(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  impl_->to_device.fetch_add(bytes);
  if (is_pinned(to)) return impl_->copy_on_host(stream, [to, from, bytes] { copy(to, from, bytes); });
  if (is_pinned(from)) return impl_->put(stream, [to, from, bytes] { copy(to, from, bytes); });
  const auto* const begin = static_cast<const std::byte*>(from);
  return impl_->put(
      stream, [to, taken = std::vector<std::byte>(begin, begin + bytes)] { copy(to, taken.data(), taken.size()); });
}

core::Status FakeDevice::copy_within(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  impl_->within.fetch_add(bytes);
  auto task = [to, from, bytes] { copy(to, from, bytes); };
  if (is_pinned(to) && is_pinned(from)) return impl_->copy_on_host(stream, std::move(task));
  return impl_->put(stream, std::move(task));
}

bool FakeDevice::is_pinned(const void* address) const { return impl_->is_pinned(address); }

bool FakeDevice::is_idle() const { return impl_->is_idle(); }

bool FakeDevice::is_held_alone() const { return impl_->driver.is_held_alone(); }

core::Status FakeDevice::prepare_int8() {
  const auto call = impl_->call();
  if (!impl_->options.has_int8) return Status(Code::kUnsupported, "the fake device has no kernels for it");
  return impl_->check();
}

core::Status FakeDevice::encode_int8(DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements,
                                     float factor) {
  return launch_in_call(stream, [to, from, elements, factor] { int8::encode(seen(to), seen(from), elements, factor); });
}

core::Status FakeDevice::decode_int8(DeviceStream stream, float* to, const std::byte* from, std::uint64_t elements) {
  return launch_in_call(stream, [to, from, elements] { int8::decode(seen(to), seen(from), elements); });
}

core::Status FakeDevice::write_flag(DeviceStream stream, Flag flag, std::uint32_t value) {
  if (!impl_->options.has_flags) return Status(Code::kUnsupported, "operation not supported");
  return impl_->put(stream, [flag, value] { flag.word->store(value, std::memory_order_release); });
}

core::Status FakeDevice::wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) {
  if (!impl_->options.has_flags) return Status(Code::kUnsupported, "operation not supported");
  return impl_->put(stream, [this, flag, value] {
    impl_->wait_until([&] { return has_reached(flag.word->load(std::memory_order_acquire), value); });
  });
}

core::Status FakeDevice::check_flags(DeviceStream /*stream*/, Flag /*flag*/) {
  return impl_->options.has_flags ? Status() : Status(Code::kUnsupported, "operation not supported");
}

core::Result<bool> FakeDevice::is_capturing(DeviceStream stream) {
  const auto call = impl_->call();
  if (Status status = impl_->check(); !status.is_ok()) return status;
  return static_cast<StreamState*>(stream.native)->capturing.load();
}

core::Result<HostMemory> FakeDevice::allocate_host(std::uint64_t bytes) {
  const auto call = impl_->memory_call();
  if (Status status = impl_->check(); !status.is_ok()) return status;
  const std::lock_guard lock(impl_->mutex);
  if (impl_->pinned_bytes + bytes > impl_->options.pinned_bytes_max)
    return Status(Code::kOutOfResources, "the fake device has no more pinned memory");
  const std::uint64_t whole = (bytes + kPage - 1) / kPage * kPage;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kPage, std::max(whole, kPage)));
  if (data == nullptr) return Status(Code::kOutOfResources, "no memory");
  std::memset(data, 0, bytes);
  impl_->pinned[data] = bytes;
  impl_->pinned_bytes += bytes;
  return HostMemory{data, bytes, reinterpret_cast<std::uint64_t>(data), true};
}

void FakeDevice::free_host(HostMemory memory) noexcept {
  const auto call = impl_->memory_call();
  const std::lock_guard lock(impl_->mutex);
  if (impl_->pinned.erase(memory.data) == 0) return;
  impl_->pinned_bytes -= memory.bytes;
  std::free(memory.data);
}

core::Result<std::byte*> FakeDevice::allocate_device(std::uint64_t bytes) {
  const auto call = impl_->memory_call();
  if (Status status = impl_->check(); !status.is_ok()) return status;
  const std::lock_guard lock(impl_->mutex);
  if (impl_->device_bytes + bytes > impl_->options.device_bytes_max)
    return Status(Code::kOutOfResources, "the fake device has no more memory");
  auto memory = own_memory().allocate(bytes);
  if (memory.is_ok()) impl_->device_bytes += bytes;
  return memory;
}

void FakeDevice::free_device(std::byte* memory) noexcept {
  const auto call = impl_->memory_call();
  const std::lock_guard lock(impl_->mutex);
  impl_->device_bytes -= own_memory().free(memory);
}

const std::byte* FakeDevice::host_view(const std::byte* address) {
  return own_memory().view(const_cast<std::byte*>(address));
}

void FakeDevice::launch(DeviceStream stream, std::function<void()> kernel) {
  static_cast<void>(launch_in_call(stream, std::move(kernel)));
}

core::Status FakeDevice::launch_in_call(DeviceStream stream, std::function<void()> kernel) {
  const auto call = impl_->call();
  return impl_->options.launch_blocking ? impl_->put_and_wait(stream, std::move(kernel))
                                        : impl_->put_in_call(stream, std::move(kernel));
}

core::Status FakeDevice::call_host(DeviceStream stream, std::function<void()> function) {
  return impl_->put(stream, std::move(function));
}

void FakeDevice::set_capturing(DeviceStream stream, bool capturing) {
  static_cast<StreamState*>(stream.native)->capturing.store(capturing);
}

void FakeDevice::fail_records_after(int count) { impl_->records_to_failure.store(count); }

void FakeDevice::break_down(const std::string& why) {
  {
    const std::lock_guard lock(impl_->mutex);
    impl_->broken = Status(Code::kInternal, why);
  }
  impl_->dead.store(true);
  for (const auto& queue : impl_->queues) {
    std::unique_lock lock(queue->mutex);
    queue->changed.wait(lock, [&] { return !queue->busy; });
  }
}

void FakeDevice::synchronize(DeviceStream stream) {
  // This wait is outside of a call, because CUDA does not hold the lock here either.
  const auto done = std::make_shared<std::atomic<bool>>(false);
  if (!impl_->put(stream, [done] { done->store(true); }).is_ok()) return;
  impl_->wait_until([&] { return done->load(); });
}

FakeDevice::Copied FakeDevice::copied_bytes() const {
  return {impl_->to_host.load(), impl_->to_device.load(), impl_->within.load()};
}

std::uint64_t FakeDevice::pinned_bytes() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->pinned_bytes;
}

std::uint64_t FakeDevice::device_bytes() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->device_bytes;
}

std::size_t FakeDevice::streams() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->streams;
}

std::size_t FakeDevice::events() const {
  const std::lock_guard lock(impl_->mutex);
  return impl_->events;
}

}  // namespace hybridps::device
