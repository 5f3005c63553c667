#include "tests/simulated/device.h"

#include <dlfcn.h>

#include <algorithm>
#include <atomic>
#include <bit>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "hybridps/device/int8.h"

namespace hybridps::simulated {
namespace {

using core::Status;
using device::DeviceEvent;
using device::DeviceStream;
using device::FakeDevice;

constexpr std::uint64_t kSmallestBlock = 512;
constexpr std::uint64_t kChunk = std::uint64_t{2} << 20;
constexpr int kPoison = 0xF5;  // a NaN in every floating type
constexpr std::size_t kReportsMax = 20;

long number_from(const char* name, long otherwise) {
  const char* const text = std::getenv(name);
  return text != nullptr && *text != 0 ? std::strtol(text, nullptr, 0) : otherwise;
}

}  // namespace

// --- Order

int Order::add_stream() {
  const std::lock_guard lock(mutex_);
  before_.emplace_back();
  return static_cast<int>(before_.size()) - 1;
}

void Order::join(Before& into, const Before& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (std::size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

Order::Cells::iterator Order::split(std::uintptr_t at) {
  auto next = cells_.lower_bound(at);
  if (next != cells_.end() && next->first == at) return next;
  if (next == cells_.begin()) return next;
  auto& [begin, cell] = *std::prev(next);
  if (cell.end <= at) return next;
  Cell rest = cell;
  cell.end = at;
  return cells_.emplace_hint(next, at, std::move(rest));
}

void Order::check(int stream, const char* what, const Access& access, const Use& earlier, const char* earlier_does) {
  if (earlier.stream < 0 || earlier.stream == stream) return;
  const Before& before = before_[static_cast<std::size_t>(stream)];
  const auto from = static_cast<std::size_t>(earlier.stream);
  if (from < before.size() && before[from] >= earlier.number) return;
  if (reports_.size() >= kReportsMax) return;
  char text[256];
  std::snprintf(text, sizeof text,
                "%s on stream %d %s %llu bytes at %p that %s on stream %d (its task %u) %s: no order between them",
                what, stream, access.writes ? "writes" : "reads", static_cast<unsigned long long>(access.bytes),
                access.at, earlier.what, earlier.stream, earlier.number, earlier_does);
  reports_.emplace_back(text);
}

void Order::note(int stream, const char* what, const Access& access) {
  const auto begin = reinterpret_cast<std::uintptr_t>(access.at);
  const std::uintptr_t end = begin + access.bytes;
  const Use use{stream, before_[static_cast<std::size_t>(stream)][static_cast<std::size_t>(stream)], what};
  split(begin);
  split(end);
  std::uintptr_t at = begin;
  auto next = cells_.lower_bound(begin);
  const auto reports = reports_.size();
  while (at < end) {
    if (next == cells_.end() || next->first > at) {
      const std::uintptr_t until = next == cells_.end() ? end : std::min(end, next->first);
      next = std::next(cells_.emplace_hint(next, at, Cell{until, access.writes ? use : Use{}, {}}));
      if (!access.writes) std::prev(next)->second.reads.push_back(use);
      at = until;
      continue;
    }
    Cell& cell = next->second;
    if (reports_.size() == reports) check(stream, what, access, cell.write, "writes");
    if (access.writes) {
      for (const Use& read : cell.reads)
        if (reports_.size() == reports) check(stream, what, access, read, "reads");
      cell.write = use;
      cell.reads.clear();
    } else {
      std::erase_if(cell.reads, [&](const Use& read) { return read.stream == stream; });
      cell.reads.push_back(use);
    }
    at = cell.end;
    ++next;
  }
  if (!access.writes) return;
  // Written at once: one cell again.
  auto first = cells_.find(begin);
  cells_.erase(std::next(first), cells_.lower_bound(end));
  first->second.end = end;
}

void Order::put(int stream, const char* what, const std::vector<Access>& accesses) {
  const std::lock_guard lock(mutex_);
  Before& before = before_[static_cast<std::size_t>(stream)];
  join(before, host_);
  if (before.size() <= static_cast<std::size_t>(stream)) before.resize(static_cast<std::size_t>(stream) + 1);
  ++before[static_cast<std::size_t>(stream)];
  for (const Access& access : accesses)
    if (access.bytes > 0) note(stream, what, access);
}

Before Order::of(int stream) const {
  const std::lock_guard lock(mutex_);
  return before_[static_cast<std::size_t>(stream)];
}

void Order::join(int stream, const Before& before) {
  const std::lock_guard lock(mutex_);
  join(before_[static_cast<std::size_t>(stream)], before);
}

void Order::host_has(const Before& before) {
  const std::lock_guard lock(mutex_);
  join(host_, before);
}

void Order::host_has_all_of(int stream) { host_has(of(stream)); }

std::vector<std::string> Order::reports() const {
  const std::lock_guard lock(mutex_);
  return reports_;
}

void Order::report(std::string text) {
  const std::lock_guard lock(mutex_);
  if (reports_.size() < kReportsMax) reports_.push_back(std::move(text));
}

// --- SimulatedDevice

Settings Settings::from_environment() {
  Settings settings;
  settings.devices = static_cast<int>(number_from("SIMULATED_DEVICES", 2));
  settings.fake.seed = static_cast<std::uint64_t>(number_from("SIMULATED_SEED", 1));
  if (const char* const rank = std::getenv("RANK"))
    settings.fake.seed = settings.fake.seed * 1000 + std::strtoul(rank, nullptr, 10);
  settings.fake.hardware_queues = static_cast<int>(number_from("SIMULATED_QUEUES", 8));
  settings.fake.pause_us_max = static_cast<int>(number_from("SIMULATED_PAUSE_US", 50));
  settings.fake.launch_blocking = number_from("SIMULATED_LAUNCH_BLOCKING", 0) != 0;
  settings.poison_freed = number_from("SIMULATED_POISON_FREED", 1) != 0;
  settings.library = number_from("SIMULATED_LIBRARY", 0) != 0;
  settings.fake.memory_calls_wait = number_from("SIMULATED_MEMORY_CALLS_WAIT", 1) != 0;
  settings.fake.launches_max = static_cast<std::size_t>(number_from("SIMULATED_LAUNCHES_MAX", 1000));
  settings.fake.pinned_bytes_max = static_cast<std::uint64_t>(number_from("SIMULATED_PINNED_BYTES", long{1} << 40));
  if (const char* const id = std::getenv("SIMULATED_CARD")) settings.fake.physical_id = id;
  if (const char* const drop = std::getenv("SIMULATED_DROP")) settings.drop = drop;
  return settings;
}

void (*SimulatedDevice::look)() noexcept = nullptr;

SimulatedDevice::SimulatedDevice(int index, const Settings& settings)
    : index_(index),
      physical_id_(settings.fake.physical_id.empty()
                       ? "simulated card of process " + std::to_string(getpid()) + ", " + std::to_string(index)
                       : settings.fake.physical_id),
      drop_(settings.drop),
      poison_freed_(settings.poison_freed),
      fake_([&] {
        device::FakeOptions options = settings.fake;
        options.seed += static_cast<std::uint64_t>(index) * 7919;
        return options;
      }()) {
  new_stream();
}

bool SimulatedDevice::dropped(const char* kind, const void* caller) {
  Dl_info info{};
  std::uintptr_t offset = reinterpret_cast<std::uintptr_t>(caller);
  if (dladdr(caller, &info) != 0) offset -= reinterpret_cast<std::uintptr_t>(info.dli_fbase);
  char text[64];
  std::snprintf(text, sizeof text, "%s 0x%llx", kind, static_cast<unsigned long long>(offset));
  const std::lock_guard lock(mutex_);
  ++sites_[text];
  return drop_ == text;
}

std::map<std::string, std::uint64_t> SimulatedDevice::sites() const {
  const std::lock_guard lock(mutex_);
  return sites_;
}

int SimulatedDevice::new_stream() {
  auto made = fake_.make_stream();
  const std::lock_guard lock(mutex_);  // two threads at once: a number is the stream's place
  const int number = order_.add_stream();
  streams_.push_back(made.value());
  numbers_[made.value().native] = number;
  return number;
}

int SimulatedDevice::number_of(DeviceStream stream) const {
  const std::lock_guard lock(mutex_);
  const auto known = numbers_.find(stream.native);
  return known == numbers_.end() ? 0 : known->second;
}

DeviceStream SimulatedDevice::stream(int number) const {
  const std::lock_guard lock(mutex_);
  return streams_.at(static_cast<std::size_t>(number));
}

core::Result<DeviceStream> SimulatedDevice::make_stream() {
  look();
  return stream(new_stream());
}

void SimulatedDevice::destroy(DeviceStream) noexcept { look(); }  // numbers are not used again

core::Result<DeviceEvent> SimulatedDevice::make_event() {
  look();
  return fake_.make_event();
}

void SimulatedDevice::destroy(DeviceEvent event) noexcept {
  look();
  {
    const std::lock_guard lock(mutex_);
    recorded_.erase(event.native);
  }
  fake_.destroy(event);
}

core::Status SimulatedDevice::record(DeviceEvent event, DeviceStream stream) {
  look();
  if (dropped("record", __builtin_return_address(0))) return {};
  torch_record(event, number_of(stream));
  return {};
}

core::Status SimulatedDevice::wait(DeviceStream stream, DeviceEvent event) {
  look();
  if (dropped("wait", __builtin_return_address(0))) return {};
  torch_wait(number_of(stream), event);
  return {};
}

core::Result<bool> SimulatedDevice::is_done(DeviceEvent event) {
  look();
  return torch_is_done(event);
}

core::Status SimulatedDevice::copy_to_host(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  look();
  order_.put(number_of(stream), "copy to staging", {{from, bytes, false}, {to, bytes, true}});
  return fake_.copy_to_host(stream, to, from, bytes);
}

core::Status SimulatedDevice::copy_to_device(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  look();
  order_.put(number_of(stream), "copy from staging", {{from, bytes, false}, {to, bytes, true}});
  return fake_.copy_to_device(stream, to, from, bytes);
}

core::Status SimulatedDevice::copy_within(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  look();
  order_.put(number_of(stream), "copy within the device", {{from, bytes, false}, {to, bytes, true}});
  return fake_.copy_within(stream, to, from, bytes);
}

core::Status SimulatedDevice::prepare_int8() {
  look();
  return fake_.prepare_int8();
}

core::Status SimulatedDevice::encode_int8(DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements,
                                          float factor) {
  look();
  order_.put(number_of(stream), "encoding",
             {{from, elements * sizeof(float), false}, {to, device::int8::bytes_of(elements), true}});
  return fake_.encode_int8(stream, to, from, elements, factor);
}

core::Status SimulatedDevice::decode_int8(DeviceStream stream, float* to, const std::byte* from,
                                          std::uint64_t elements) {
  look();
  order_.put(number_of(stream), "decoding",
             {{from, device::int8::bytes_of(elements), false}, {to, elements * sizeof(float), true}});
  return fake_.decode_int8(stream, to, from, elements);
}

core::Status SimulatedDevice::write_flag(DeviceStream stream, device::Flag flag, std::uint32_t value) {
  look();
  if (dropped("write_flag", __builtin_return_address(0))) return {};
  const int number = number_of(stream);
  order_.put(number, "flag", {});
  // Who reads the value has what came before; just before it is there, which is as good.
  Status status = fake_.call_host(stream, [this, before = order_.of(number)] { order_.host_has(before); });
  return status.is_ok() ? fake_.write_flag(stream, flag, value) : status;
}

core::Status SimulatedDevice::wait_flag(DeviceStream stream, device::Flag flag, std::uint32_t value) {
  look();
  if (dropped("wait_flag", __builtin_return_address(0))) return {};
  return fake_.wait_flag(stream, flag, value);
}

core::Result<bool> SimulatedDevice::is_capturing(DeviceStream stream) {
  look();
  return fake_.is_capturing(stream);
}

core::Result<device::HostMemory> SimulatedDevice::allocate_host(std::uint64_t bytes) {
  look();
  auto memory = fake_.allocate_host(bytes);
  if (memory.is_ok()) {
    const std::lock_guard lock(mutex_);
    pinned_[memory.value().data] = bytes;
  }
  return memory;
}

void SimulatedDevice::free_host(device::HostMemory memory) noexcept {
  look();
  {
    const std::lock_guard lock(mutex_);
    pinned_.erase(memory.data);
  }
  fake_.free_host(memory);
}

core::Result<std::byte*> SimulatedDevice::allocate_device(std::uint64_t bytes) {
  look();
  return fake_.allocate_device(bytes);
}

void SimulatedDevice::free_device(std::byte* memory) noexcept {
  look();
  fake_.free_device(memory);
}

// --- torch's side

void SimulatedDevice::launch(int stream, const char* what, const std::vector<Access>& accesses,
                             std::function<void()> kernel) {
  order_.put(stream, what, accesses);
  fake_.launch(this->stream(stream), std::move(kernel));
}

void SimulatedDevice::synchronize(int stream) {
  const Before before = order_.of(stream);
  fake_.synchronize(this->stream(stream));
  order_.host_has(before);
}

void SimulatedDevice::synchronize() {
  std::size_t count = 0;
  {
    const std::lock_guard lock(mutex_);
    count = streams_.size();
  }
  for (std::size_t i = 0; i < count; ++i) synchronize(static_cast<int>(i));
}

bool SimulatedDevice::is_idle(int stream) {
  const DeviceEvent event = torch_event();
  torch_record(event, stream);
  std::this_thread::sleep_for(std::chrono::microseconds(50));
  const bool done = torch_is_done(event);
  fake_.destroy(event);
  return done;
}

DeviceEvent SimulatedDevice::torch_event() { return fake_.make_event().value(); }

void SimulatedDevice::torch_record(DeviceEvent event, int stream) {
  order_.put(stream, "event", {});
  {
    const Before before = order_.of(stream);
    const std::lock_guard lock(mutex_);
    recorded_[event.native] = before;
  }
  const Status ignored = fake_.record(event, this->stream(stream));
  static_cast<void>(ignored);
}

void SimulatedDevice::torch_wait(int stream, DeviceEvent event) {
  Before before;
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = recorded_.find(event.native); known != recorded_.end()) before = known->second;
  }
  order_.join(stream, before);
  const Status ignored = fake_.wait(this->stream(stream), event);
  static_cast<void>(ignored);
}

bool SimulatedDevice::torch_is_done(DeviceEvent event) {
  Before before;
  {
    const std::lock_guard lock(mutex_);
    if (const auto known = recorded_.find(event.native); known != recorded_.end()) before = known->second;
  }
  const auto done = fake_.is_done(event);
  if (!done.is_ok() || !done.value()) return false;
  order_.host_has(before);
  return true;
}

void SimulatedDevice::torch_synchronize(DeviceEvent event) {
  while (!torch_is_done(event)) std::this_thread::sleep_for(std::chrono::microseconds(20));
}

Block* SimulatedDevice::allocate(std::uint64_t bytes, int stream) {
  collect_pending();
  auto block = std::make_unique<Block>();
  block->bytes = std::max(std::bit_ceil(bytes), kSmallestBlock);
  block->stream = stream;
  {
    const std::lock_guard lock(memory_mutex_);
    in_use_ += block->bytes;
    auto& known = free_[{stream, block->bytes}];
    if (!known.empty()) {
      block->data = known.back();
      known.pop_back();
      return block.release();
    }
    if (block->bytes <= chunk_left_) {
      block->data = chunk_;
      chunk_ += block->bytes;
      chunk_left_ -= block->bytes;
    }
  }
  if (block->data == nullptr) {
    const std::uint64_t segment = std::max(block->bytes, kChunk);
    auto memory = fake_.allocate_device(segment);
    if (!memory.is_ok()) return nullptr;
    const std::lock_guard lock(memory_mutex_);
    segments_[memory.value()] = segment;
    block->data = memory.value();
    if (segment - block->bytes > chunk_left_) {
      chunk_ = block->data + block->bytes;
      chunk_left_ = segment - block->bytes;
    }
  }
  launch(stream, "fresh memory", {}, [view = FakeDevice::host_view(block->data), n = block->bytes] {
    std::memset(const_cast<std::byte*>(view), kPoison, n);
  });
  return block.release();
}

void SimulatedDevice::give_back(Block* block) {
  if (poison_freed_)
    launch(block->stream, "freeing a tensor", {{block->data, block->bytes, true}},
           [view = FakeDevice::host_view(block->data), n = block->bytes] {
             std::memset(const_cast<std::byte*>(view), kPoison, n);
           });
  const std::lock_guard lock(memory_mutex_);
  in_use_ -= block->bytes;
  free_[{block->stream, block->bytes}].push_back(block->data);
  delete block;
}

void SimulatedDevice::free(Block* block) {
  if (block->also_used_on.empty()) return give_back(block);
  Pending pending{block, {}};
  for (const int stream : block->also_used_on) {
    pending.events.push_back(torch_event());
    torch_record(pending.events.back(), stream);
  }
  const std::lock_guard lock(memory_mutex_);
  pending_.push_back(std::move(pending));
}

void SimulatedDevice::use_on(Block* block, int stream) {
  const std::lock_guard lock(memory_mutex_);
  if (stream != block->stream) block->also_used_on.insert(stream);
}

void SimulatedDevice::collect_pending() {
  std::vector<Pending> over;
  {
    const std::lock_guard lock(memory_mutex_);
    std::erase_if(pending_, [&](Pending& pending) {
      for (const DeviceEvent event : pending.events)
        if (!torch_is_done(event)) return false;
      over.push_back(std::move(pending));
      return true;
    });
  }
  for (const Pending& pending : over) {
    for (const DeviceEvent event : pending.events) fake_.destroy(event);
    give_back(pending.block);
  }
}

bool SimulatedDevice::owns(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  const std::lock_guard lock(memory_mutex_);
  const auto next = segments_.upper_bound(at);
  if (next == segments_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(next);
  return at < begin + bytes;
}

bool SimulatedDevice::is_pinned(const void* address) const {
  const auto* at = static_cast<const std::byte*>(address);
  const std::lock_guard lock(mutex_);
  const auto next = pinned_.upper_bound(at);
  if (next == pinned_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(next);
  return at < begin + bytes;
}

std::uint64_t SimulatedDevice::bytes_in_use() const {
  const std::lock_guard lock(memory_mutex_);
  return in_use_;
}

// --- All of a process

namespace {
std::atomic<bool> made{false};
}

bool any_made() noexcept { return made.load(); }

const Settings& settings() {
  static const Settings kSettings = Settings::from_environment();
  return kSettings;
}

SimulatedDevice& device(int index) {
  static auto& all = *new std::vector<std::unique_ptr<SimulatedDevice>>([] {
    std::vector<std::unique_ptr<SimulatedDevice>> devices;
    for (int i = 0; i < settings().devices; ++i) devices.push_back(std::make_unique<SimulatedDevice>(i, settings()));
    made.store(true);
    return devices;
  }());
  return *all.at(static_cast<std::size_t>(index));
}

}  // namespace hybridps::simulated
