// hybridps/device/fake/fake_device.h: a device made of threads, for tests.
//
// Model    Each hardware queue is a thread with a list of tasks, which it runs in order. Streams are spread over the
//          queues. Two streams of one queue hold each other up, as on a GPU with CUDA_DEVICE_MAX_CONNECTIONS=1. Some
//          tasks wait for a random pause first, drawn from the seed, so that streams overtake each other in varying
//          ways.
//          Calls share the driver's lock. A call that allocates or frees memory takes the lock exclusively, and holds
//          it until the device has finished all work put on it, as CUDA's driver does. A queue has a limit of tasks. A
//          call that finds its queue full waits and holds the lock. So does a launch with launch_blocking. A call on a
//          thread that has NoDriverCalls fails a core::check().
//          Copies do what CUDA's do. A copy to memory that is not pinned returns when it is done. A copy from such
//          memory takes the bytes in the call. A copy between two runs of pinned memory is made in the call, after the
//          stream's earlier work. If that work does not end, a core::check() fails.
//          A program's device memory is ordinary memory: the queue's thread makes the copies, and TSan sees every race.
//          No thread can read or write memory from allocate_device(): an attempt ends the process, as on a GPU. Copies
//          and tests reach this memory by another mapping (host_view()).
// Threads  as Device; one thread per hardware queue.
// Life     the destructor ends waits that are still under way, and joins the threads.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/device/device.h"

namespace hybridps::device {

struct FakeOptions {
  std::uint64_t seed = 1;
  int hardware_queues = 8;
  int pause_us_max = 50;                               // longest pause; 1 task in 4 pauses, 1 pause in 16 is 10-fold
  std::uint64_t pinned_bytes_max = ~std::uint64_t{0};  // beyond this, allocate_host() fails
  std::uint64_t device_bytes_max = ~std::uint64_t{0};  // beyond this, allocate_device() fails
  std::string physical_id;                             // empty: an id of its own
  bool memory_calls_wait = true;                       // false: no call waits for the device
  std::size_t launches_max = 1000;                     // most tasks on a queue; the next call waits
  bool has_int8 = true;                                // false: prepare_int8() fails
  bool has_flags = true;                               // false: write_flag() and wait_flag() are kUnsupported
  bool launch_blocking = false;                        // launches wait for their end (CUDA_LAUNCH_BLOCKING=1)
};

class FakeDevice final : public Device {
 public:
  explicit FakeDevice(FakeOptions options);
  ~FakeDevice() override;

  int index() const noexcept override { return 0; }
  std::string describe() const override;
  core::Result<std::string> physical_id() override;
  int hardware_queues() const noexcept override;
  core::Status run_here(const std::function<core::Status()>& call) override;
  /// The device that run_here() has made current on this thread; null outside of run_here().
  static FakeDevice* current() noexcept;

  core::Result<DeviceStream> make_stream() override;
  void destroy(DeviceStream stream) noexcept override;
  core::Result<DeviceEvent> make_event() override;
  void destroy(DeviceEvent event) noexcept override;
  core::Status record(DeviceEvent event, DeviceStream stream) override;
  core::Status wait(DeviceStream stream, DeviceEvent event) override;
  core::Result<bool> is_done(DeviceEvent event) override;
  core::Status copy_to_host(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status copy_to_device(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status copy_within(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status prepare_int8() override;
  core::Status encode_int8(DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements,
                           float factor) override;
  core::Status decode_int8(DeviceStream stream, float* to, const std::byte* from, std::uint64_t elements) override;
  core::Status write_flag(DeviceStream stream, Flag flag, std::uint32_t value) override;
  core::Status wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) override;
  core::Status check_flags(DeviceStream stream, Flag flag) override;
  core::Result<bool> is_capturing(DeviceStream stream) override;
  core::Result<HostMemory> allocate_host(std::uint64_t bytes) override;
  void free_host(HostMemory memory) noexcept override;
  core::Result<std::byte*> allocate_device(std::uint64_t bytes) override;
  void free_device(std::byte* memory) noexcept override;

  /// The address where this process can read `address`, if it is memory of any FakeDevice; else `address` itself.
  static const std::byte* host_view(const std::byte* address);
  /// Whether the address is in memory of allocate_host().
  bool is_pinned(const void* address) const;
  /// Whether no work is on any stream.
  bool is_idle() const;
  /// Whether a call that allocates or frees keeps every other call out.
  bool is_held_alone() const;
  /// Puts a kernel on the stream.
  void launch(DeviceStream stream, std::function<void()> kernel);
  /// Puts a host function on the stream. launch_blocking does not apply to host functions.
  core::Status call_host(DeviceStream stream, std::function<void()> function);
  void set_capturing(DeviceStream stream, bool capturing);
  /// The record() after `count` more calls fails. Later calls do not fail.
  void fail_records_after(int count);
  /// From now on every call fails, as after a kernel's bad access, and no work on the streams runs any more.
  void break_down(const std::string& why);
  /// Blocks until all work on the stream is done.
  void synchronize(DeviceStream stream);

  std::uint64_t pinned_bytes() const;
  std::uint64_t device_bytes() const;
  /// Bytes of all copies requested so far, by direction.
  struct Copied {
    std::uint64_t to_host = 0;
    std::uint64_t to_device = 0;
    std::uint64_t within = 0;
  };
  Copied copied_bytes() const;
  std::size_t streams() const;  // existing streams
  std::size_t events() const;

 private:
  core::Status launch_in_call(DeviceStream stream, std::function<void()> kernel);

  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace hybridps::device
