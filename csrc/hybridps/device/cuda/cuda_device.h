// hybridps/device/cuda/cuda_device.h: a GPU of this process, through the driver.
//
// Model    Works in the device's primary context, which torch also uses. Each call makes this context current and then
//          restores the previous one. Streams are non-blocking and have the highest priority, because copies and flags
//          are short.
// Life     retains the primary context until destroyed.
#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>

#include "hybridps/device/cuda/driver.h"
#include "hybridps/device/cuda/nvrtc.h"
#include "hybridps/device/device.h"

namespace hybridps::device {

class CudaDevice final : public Device {
 public:
  /// `driver` and `nvrtc` must outlive the device. `nvrtc` null: load_nvrtc() when needed. Error kInvalidArgument: no
  /// such device.
  static core::Result<std::unique_ptr<CudaDevice>> open(const Driver& driver, int index, const Nvrtc* nvrtc = nullptr);
  ~CudaDevice() override;

  int index() const noexcept override { return index_; }
  std::string describe() const override;
  /// The PCI bus id and the UUID, which tells MIG instances of one GPU apart. NCCL compares the same.
  core::Result<std::string> physical_id() override;
  /// CUDA_DEVICE_MAX_CONNECTIONS, as the driver reads it.
  int hardware_queues() const noexcept override;
  core::Status run_here(const std::function<core::Status()>& call) override;

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
  /// One call for all, if the driver has it (CUDA 12.8).
  core::Status copy_all(DeviceStream stream, CopyWay way, std::span<const CopyRun> copies) override;
  /// Compiles the kernels with NVRTC, once.
  core::Status prepare_int8() override;
  core::Status encode_int8(DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements,
                           float factor) override;
  core::Status decode_int8(DeviceStream stream, float* to, const std::byte* from, std::uint64_t elements) override;
  core::Status write_flag(DeviceStream stream, Flag flag, std::uint32_t value) override;
  core::Status wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) override;
  /// CUDA has no attribute to ask, so this writes the word and waits for it.
  core::Status check_flags(DeviceStream stream, Flag flag) override;
  core::Result<bool> is_capturing(DeviceStream stream) override;
  void begin_helper_thread() noexcept override;
  core::Result<HostMemory> allocate_host(std::uint64_t bytes) override;
  void free_host(HostMemory memory) noexcept override;
  core::Result<std::byte*> allocate_device(std::uint64_t bytes) override;
  void free_device(std::byte* memory) noexcept override;
  /// Bytes of host memory from allocate_host() that are not freed yet. Any thread.
  std::uint64_t pinned_bytes() const noexcept { return pinned_bytes_.load(std::memory_order_relaxed); }

 private:
  CudaDevice(const Driver& driver, const Nvrtc* nvrtc, int index, CUdevice device, CUcontext context, std::string name)
      : driver_(driver), nvrtc_(nvrtc), index_(index), device_(device), context_(context), name_(std::move(name)) {}

  /// Runs `call` with our context current.
  template <typename Call>
  core::Status in_context(const char* what, const Call& call) const;

  core::Result<std::string> bus_id() const;
  core::Status make_int8();  // int8_mutex_ held
  core::Status start_int8(DeviceStream stream, CUfunction kernel, const void* to, const void* from,
                          std::uint64_t elements, float factor);
  core::Status launch(DeviceStream stream, CUfunction kernel, std::uint64_t threads, void** arguments);

  const Driver& driver_;
  const Nvrtc* const nvrtc_;
  const int index_;
  const CUdevice device_;
  const CUcontext context_;
  const std::string name_;
  std::atomic<std::uint64_t> pinned_bytes_{0};
  std::atomic<bool> may_batch_{true};  // no list of copies was refused
  std::mutex int8_mutex_;
  std::optional<core::Status> int8_made_;
  // Constant once made, until the device is destroyed.
  CUmodule int8_ = nullptr;
  CUfunction int8_encode_ = nullptr;
  CUfunction int8_decode_ = nullptr;
  DeviceStream int8_stream_;  // of the kernels' first launches
};

/// For `hybridps doctor`: "2 devices: NVIDIA H200, NVIDIA H200", or "no device: libcuda.so.1 cannot be opened ...".
std::string describe_cuda();
/// For `hybridps doctor`: why CUDA tensors cannot be carried on a device of this process; empty: nothing was found.
/// Makes a context on each device and tries a flag there, on a thread that is left behind after `patience`.
std::string find_cuda_trouble(const Driver& driver, std::chrono::milliseconds patience = std::chrono::seconds(10));

}  // namespace hybridps::device
