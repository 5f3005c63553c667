// tests/simulated/device.h: an accelerator that torch and hybridps use together. Free of torch.
//
// Model    A FakeDevice (hardware queues are threads, seeded pauses, the driver's lock, memory that the host cannot
//          touch) with a book beside it, Order. Order says of every access whether its needs come before it. The book
//          is kept when work is put on a stream. So a missing wait is found with any timing of the threads, and not by
//          luck, from a wrong value.
// Order    The rules:
//            - Work of one stream is in order.
//            - A stream that waits for an event has what came before the event's recording.
//            - The host has what it waited for, and what came before a flag once the flag was written.
//            - Work that is put on a stream has what the host had then.
//            - A stream that waits for a flag gets nothing by this wait. CUDA gives no order of a device's memory there
//              that an event would not give, and hybridps uses both.
// Freed    Freed memory is overwritten (poison) on the stream that it belongs to, so a late user is found. This is
//          stricter than CUDA, where the next owner's first write counts. Example: FSDP2 frees gradients of its
//          reduce-scatter stream while the optimizer reads them, and lets that stream wait before it uses them again.
// Threads  any.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "hybridps/device/device.h"
#include "hybridps/device/fake/fake_device.h"

namespace hybridps::simulated {

struct Access {
  const void* at = nullptr;
  std::uint64_t bytes = 0;
  bool writes = false;
};

/// By stream: how many of its tasks come before.
using Before = std::vector<std::uint32_t>;

class Order {
 public:
  int add_stream();
  /// A task. `what` is for reports.
  void put(int stream, const char* what, const std::vector<Access>& accesses);
  /// What comes before work that is put now, that included which is there.
  Before of(int stream) const;
  void join(int stream, const Before& before);
  void host_has(const Before& before);
  void host_has_all_of(int stream);

  std::vector<std::string> reports() const;
  void report(std::string text);

 private:
  struct Use {
    int stream = -1;
    std::uint32_t number = 0;
    const char* what = "";
  };
  struct Cell {
    std::uintptr_t end = 0;
    Use write;
    std::vector<Use> reads;
  };
  using Cells = std::map<std::uintptr_t, Cell>;
  static void join(Before& into, const Before& from);
  Cells::iterator split(std::uintptr_t at);
  void check(int stream, const char* what, const Access& access, const Use& earlier, const char* earlier_does);
  void note(int stream, const char* what, const Access& access);

  mutable std::mutex mutex_;
  std::vector<Before> before_;
  Before host_;
  Cells cells_;
  std::vector<std::string> reports_;
};

struct Settings {
  int devices = 2;
  device::FakeOptions fake;
  bool poison_freed = true;
  bool library = false;  // the ranks of a node have one for their devices (library.h)
  std::string drop;      // a call site of events or flags that does nothing: "wait 0x1a2b"
  static Settings from_environment();
};

/// Bytes of a device that a tensor has.
struct Block {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  int stream = 0;
  std::set<int> also_used_on;
};

class SimulatedDevice final : public device::Device {
 public:
  SimulatedDevice(int index, const Settings& settings);

  /// Of the extension: checks that the thread may call.
  static void (*look)() noexcept;

  int index() const noexcept override { return index_; }
  std::string describe() const override { return "simulated device " + std::to_string(index_); }
  core::Result<std::string> physical_id() override { return physical_id_; }
  int hardware_queues() const noexcept override { return fake_.hardware_queues(); }
  core::Status run_here(const std::function<core::Status()>& call) override { return call(); }
  core::Result<device::DeviceStream> make_stream() override;
  void destroy(device::DeviceStream stream) noexcept override;
  core::Result<device::DeviceEvent> make_event() override;
  void destroy(device::DeviceEvent event) noexcept override;
  core::Status record(device::DeviceEvent event, device::DeviceStream stream) override;
  core::Status wait(device::DeviceStream stream, device::DeviceEvent event) override;
  core::Result<bool> is_done(device::DeviceEvent event) override;
  core::Status copy_to_host(device::DeviceStream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status copy_to_device(device::DeviceStream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status copy_within(device::DeviceStream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status prepare_int8() override;
  core::Status encode_int8(device::DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements,
                           float factor) override;
  core::Status decode_int8(device::DeviceStream stream, float* to, const std::byte* from,
                           std::uint64_t elements) override;
  core::Status write_flag(device::DeviceStream stream, device::Flag flag, std::uint32_t value) override;
  core::Status wait_flag(device::DeviceStream stream, device::Flag flag, std::uint32_t value) override;
  core::Result<bool> is_capturing(device::DeviceStream stream) override;
  core::Result<device::HostMemory> allocate_host(std::uint64_t bytes) override;
  void free_host(device::HostMemory memory) noexcept override;
  core::Result<std::byte*> allocate_device(std::uint64_t bytes) override;
  void free_device(std::byte* memory) noexcept override;

  // What torch's side needs ---------------------------------------------------------------------------------------
  // Streams by number; 0 is the default stream.
  int new_stream();
  int number_of(device::DeviceStream stream) const;
  device::DeviceStream stream(int number) const;
  /// A kernel. It runs later, on the stream's thread, and sees memory through FakeDevice::host_view().
  void launch(int stream, const char* what, const std::vector<Access>& accesses, std::function<void()> kernel);
  /// Blocks until all that was put on it is done.
  void synchronize(int stream);
  void synchronize();
  bool is_idle(int stream);
  /// As if a graph were recorded on the stream.
  void set_capturing(int number, bool on) { fake_.set_capturing(stream(number), on); }
  device::DeviceEvent torch_event();
  void torch_record(device::DeviceEvent event, int stream);
  void torch_wait(int stream, device::DeviceEvent event);
  bool torch_is_done(device::DeviceEvent event);
  void torch_synchronize(device::DeviceEvent event);

  Block* allocate(std::uint64_t bytes, int stream);
  void free(Block* block);
  void use_on(Block* block, int stream);
  bool owns(const void* address) const;
  bool is_pinned(const void* address) const;

  Order& order() noexcept { return order_; }
  /// How often each call site outside of torch's side was called: "wait 0x1a2b".
  std::map<std::string, std::uint64_t> sites() const;
  std::uint64_t pinned_bytes() const { return fake_.pinned_bytes(); }
  std::uint64_t bytes_in_use() const;
  device::FakeDevice::Copied copied_bytes() const { return fake_.copied_bytes(); }

 private:
  bool dropped(const char* kind, const void* caller);
  void give_back(Block* block);  // memory_mutex_ not held
  void collect_pending();

  const int index_;
  const std::string physical_id_;
  const std::string drop_;
  const bool poison_freed_;
  Order order_;
  mutable std::mutex mutex_;
  std::vector<device::DeviceStream> streams_;
  std::unordered_map<void*, int> numbers_;
  std::unordered_map<void*, Before> recorded_;
  std::map<std::string, std::uint64_t> sites_;
  std::map<const std::byte*, std::uint64_t> pinned_;

  mutable std::mutex memory_mutex_;
  struct Pending {
    Block* block = nullptr;
    std::vector<device::DeviceEvent> events;
  };
  std::map<std::pair<int, std::uint64_t>, std::vector<std::byte*>> free_;
  std::map<const std::byte*, std::uint64_t> segments_;
  std::vector<Pending> pending_;
  std::byte* chunk_ = nullptr;
  std::uint64_t chunk_left_ = 0;
  std::uint64_t in_use_ = 0;
  device::FakeDevice fake_;  // last: its threads end first
};

/// Of this process; made at the first call, never destroyed.
SimulatedDevice& device(int index);
const Settings& settings();
bool any_made() noexcept;

}  // namespace hybridps::simulated
