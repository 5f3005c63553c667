// hybridps/device/fake/fake_device.h: a device made of threads, for tests.
//
// Model    Hardware queues are threads, each with a list of tasks that it runs in order. Streams are spread over them;
//          two streams of one queue hold each other up, as on a GPU with CUDA_DEVICE_MAX_CONNECTIONS=1. Each task is
//          preceded by a pause drawn from the seed, so that streams overtake each other in ever new ways.
//          Calls share the driver's lock. What allocates or frees memory takes it alone, and holds it until the device
//          has come to the end of all that was put on it, as CUDA's driver is known to do. A queue holds so many tasks;
//          a call that finds it full waits, and holds the lock too. So does a launch with launch_blocking. A call on a
//          thread that has NoDriverCalls fails a core::check(). A program's device memory is ordinary memory: copies
//          are made by the queue's thread, and TSan sees every race. What allocate_device() gives no thread can read or
//          write: who tries to ends the process, as on a GPU. Copies, and tests, reach it by another mapping
//          (host_view()).
// Threads  as Device; one thread per hardware queue.
// Life     the destructor gives up waits that are still under way and joins.
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
  int pause_us_max = 50;                               // before a task; one in sixteen is ten times as long
  std::uint64_t pinned_bytes_max = ~std::uint64_t{0};  // then allocate_host() fails
  std::uint64_t device_bytes_max = ~std::uint64_t{0};  // then allocate_device() fails
  std::string physical_id;                             // empty: its own
  bool memory_calls_wait = true;                       // false: no call waits for the device by itself
  std::size_t launches_max = 1000;                     // tasks on a queue; the next waits in its call
  bool has_int8 = true;                                // false: prepare_int8() fails
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
  /// Which one run_here() has made current on this thread; null outside of it.
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
  core::Status encode_int8(DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements, float factor) override;
  core::Status decode_int8(DeviceStream stream, float* to, const std::byte* from, std::uint64_t elements) override;
  core::Status write_flag(DeviceStream stream, Flag flag, std::uint32_t value) override;
  core::Status wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) override;
  core::Result<bool> is_capturing(DeviceStream stream) override;
  core::Result<HostMemory> allocate_host(std::uint64_t bytes) override;
  void free_host(HostMemory memory) noexcept override;
  core::Result<std::byte*> allocate_device(std::uint64_t bytes) override;
  void free_device(std::byte* memory) noexcept override;

  /// Where this process reads what lies at `address`, if that is memory of any FakeDevice; else `address`.
  static const std::byte* host_view(const std::byte* address);
  /// A kernel.
  void launch(DeviceStream stream, std::function<void()> kernel);
  /// A host function: a task that no option makes wait.
  core::Status call_host(DeviceStream stream, std::function<void()> function);
  void set_capturing(DeviceStream stream, bool capturing);
  /// The record() after so many more fails; those that follow do not.
  void fail_records_after(int count);
  /// Every call from now on fails, as after a kernel's bad access, and nothing that is on the streams is done any more.
  void break_down(const std::string& why);
  /// Blocks until all that was put on the stream is done.
  void synchronize(DeviceStream stream);

  std::uint64_t pinned_bytes() const;
  std::uint64_t device_bytes() const;
  /// Asked for so far, by the direction.
  struct Copied {
    std::uint64_t to_host = 0;
    std::uint64_t to_device = 0;
    std::uint64_t within = 0;
  };
  Copied copied_bytes() const;
  std::size_t streams() const;  // that exist
  std::size_t events() const;

 private:
  core::Status launch_in_call(DeviceStream stream, std::function<void()> kernel);

  struct Impl;
  const std::unique_ptr<Impl> impl_;
};

}  // namespace hybridps::device
