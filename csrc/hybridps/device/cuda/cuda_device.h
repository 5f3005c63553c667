// hybridps/device/cuda/cuda_device.h: a GPU of this process, through the driver.
//
// Model    Works in the device's primary context, which is the one that torch uses. Each call makes that context current
//          and puts back what was. Streams are non-blocking ones of the highest priority: copies and flags are short.
// Life     retains the primary context until destroyed.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "hybridps/device/cuda/driver.h"
#include "hybridps/device/device.h"

namespace hybridps::device {

class CudaDevice final : public Device {
 public:
  /// `driver` outlives it. kInvalidArgument: no such device.
  static core::Result<std::unique_ptr<CudaDevice>> open(const Driver& driver, int index);
  ~CudaDevice() override;

  int index() const noexcept override { return index_; }
  std::string describe() const override;
  /// PCI bus id: what NCCL compares. Two MIG instances of one GPU have the same.
  core::Result<std::string> physical_id() override;
  /// CUDA_DEVICE_MAX_CONNECTIONS, as the driver reads it.
  int hardware_queues() const noexcept override;
  core::Status run_here(const std::function<core::Status()>& call) override;

  core::Result<Stream> make_stream() override;
  void destroy(Stream stream) noexcept override;
  core::Result<Event> make_event() override;
  void destroy(Event event) noexcept override;
  core::Status record(Event event, Stream stream) override;
  core::Status wait(Stream stream, Event event) override;
  core::Result<bool> is_done(Event event) override;
  core::Status copy_to_host(Stream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status copy_to_device(Stream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status copy_within(Stream stream, void* to, const void* from, std::uint64_t bytes) override;
  core::Status write_flag(Stream stream, Flag flag, std::uint32_t value) override;
  core::Status wait_flag(Stream stream, Flag flag, std::uint32_t value) override;
  core::Result<bool> is_capturing(Stream stream) override;
  void begin_helper_thread() noexcept override;
  core::Result<HostMemory> allocate_host(std::uint64_t bytes) override;
  void free_host(HostMemory memory) noexcept override;
  core::Result<std::byte*> allocate_device(std::uint64_t bytes) override;
  void free_device(std::byte* memory) noexcept override;
  /// Of host memory that allocate_host() has given and that is not free yet. Any thread.
  std::uint64_t pinned_bytes() const noexcept { return pinned_bytes_.load(std::memory_order_relaxed); }

 private:
  CudaDevice(const Driver& driver, int index, CUdevice device, CUcontext context, std::string name)
      : driver_(driver), index_(index), device_(device), context_(context), name_(std::move(name)) {}

  /// Runs `call` with our context current.
  template <typename Call>
  core::Status in_context(const char* what, const Call& call) const;

  const Driver& driver_;
  const int index_;
  const CUdevice device_;
  const CUcontext context_;
  const std::string name_;
  std::atomic<std::uint64_t> pinned_bytes_{0};
};

/// For `hybridps doctor`: "2 devices: NVIDIA H200, NVIDIA H200", or "no device: libcuda.so.1 cannot be opened ...".
std::string describe_cuda();

}  // namespace hybridps::device
