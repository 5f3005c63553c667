#include "hybridps/device/cuda/cuda_device.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/log.h"
#include "hybridps/core/mailbox.h"
#include "hybridps/device/cuda/near_node.h"

namespace hybridps::device {
namespace {

/// Copies in one call of cuMemcpyBatchAsync.
constexpr std::size_t kBatchMax = 512;

using core::Code;
using core::Status;

CUstream stream_of(DeviceStream stream) { return static_cast<CUstream>(stream.native); }
CUevent event_of(DeviceEvent event) { return static_cast<CUevent>(event.native); }
CUdeviceptr address_of(const void* pointer) { return reinterpret_cast<CUdeviceptr>(pointer); }

std::string device_name(const Driver& driver, CUdevice device) {
  std::array<char, 256> name{};
  if (driver.device_name(name.data(), static_cast<int>(name.size()) - 1, device) != CUDA_SUCCESS) return "unknown";
  return name.data();
}

}  // namespace

core::Result<std::unique_ptr<CudaDevice>> CudaDevice::open(const Driver& driver, int index, const Nvrtc* nvrtc) {
  int count = 0;
  if (Status status = driver.status(driver.device_count(&count), "cuDeviceGetCount"); !status.is_ok()) return status;
  if (index < 0 || index >= count)
    return Status(Code::kInvalidArgument, "there is no CUDA device " + std::to_string(index) + ": this process sees " +
                                              std::to_string(count) + " (CUDA_VISIBLE_DEVICES)");
  CUdevice device = 0;
  if (Status status = driver.status(driver.device_get(&device, index), "cuDeviceGet"); !status.is_ok()) return status;
  CUcontext context = nullptr;
  if (Status status = driver.status(driver.primary_context_retain(&context, device), "cuDevicePrimaryCtxRetain");
      !status.is_ok())
    return status;
  return std::unique_ptr<CudaDevice>(
      new CudaDevice(driver, nvrtc, index, device, context, device_name(driver, device)));
}

template <typename Call>
core::Status CudaDevice::in_context(const char* what, const Call& call) const {
  NoDriverCalls::look();
  if (Status status = driver_.status(driver_.context_push(context_), "cuCtxPushCurrent"); !status.is_ok())
    return status;
  const CUresult result = call();
  CUcontext popped = nullptr;
  driver_.context_pop(&popped);
  return driver_.status(result, what);
}

CudaDevice::~CudaDevice() {
  if (int8_stream_.native != nullptr) destroy(int8_stream_);
  if (int8_ != nullptr) static_cast<void>(in_context("cuModuleUnload", [&] { return driver_.module_unload(int8_); }));
  driver_.primary_context_release(device_);
}

std::string CudaDevice::describe() const { return "CUDA device " + std::to_string(index_) + " (" + name_ + ")"; }

core::Result<std::string> CudaDevice::bus_id() const {
  std::array<char, 64> id{};
  if (Status status = driver_.status(driver_.device_bus_id(id.data(), static_cast<int>(id.size()) - 1, device_),
                                     "cuDeviceGetPCIBusId");
      !status.is_ok())
    return status;
  return std::string(id.data());
}

core::Result<std::string> CudaDevice::physical_id() {
  auto id = bus_id();
  if (!id.is_ok()) return id.status();
  CUuuid uuid{};
  if (Status status = driver_.status(driver_.device_uuid(&uuid, device_), "cuDeviceGetUuid"); !status.is_ok())
    return status;
  std::string text = id.value() + " ";
  constexpr const char* kDigits = "0123456789abcdef";
  for (const char byte : uuid.bytes) {
    const auto value = static_cast<unsigned char>(byte);
    text += {kDigits[value / 16], kDigits[value % 16]};
  }
  return text;
}

int CudaDevice::hardware_queues() const noexcept {
  const char* const text = std::getenv("CUDA_DEVICE_MAX_CONNECTIONS");
  const int given = text != nullptr ? std::atoi(text) : 0;
  return given >= 1 && given <= 32 ? given : 8;
}

core::Status CudaDevice::run_here(const std::function<core::Status()>& call) {
  if (Status status = driver_.status(driver_.context_push(context_), "cuCtxPushCurrent"); !status.is_ok())
    return status;
  Status status = call();
  CUcontext popped = nullptr;
  driver_.context_pop(&popped);
  return status;
}

core::Result<DeviceStream> CudaDevice::make_stream() {
  CUstream stream = nullptr;
  Status status = in_context("cuStreamCreateWithPriority", [&] {
    int least = 0;
    int greatest = 0;
    if (const CUresult result = driver_.priority_range(&least, &greatest); result != CUDA_SUCCESS) return result;
    return driver_.stream_create(&stream, CU_STREAM_NON_BLOCKING, greatest);
  });
  if (!status.is_ok()) return status;
  return DeviceStream{stream};
}

void CudaDevice::destroy(DeviceStream stream) noexcept {
  const Status ignored = in_context("cuStreamDestroy", [&] { return driver_.stream_destroy(stream_of(stream)); });
  static_cast<void>(ignored);
}

core::Result<DeviceEvent> CudaDevice::make_event() {
  CUevent event = nullptr;
  Status status = in_context("cuEventCreate", [&] { return driver_.event_create(&event, CU_EVENT_DISABLE_TIMING); });
  if (!status.is_ok()) return status;
  return DeviceEvent{event};
}

void CudaDevice::destroy(DeviceEvent event) noexcept {
  const Status ignored = in_context("cuEventDestroy", [&] { return driver_.event_destroy(event_of(event)); });
  static_cast<void>(ignored);
}

core::Status CudaDevice::record(DeviceEvent event, DeviceStream stream) {
  return in_context("cuEventRecord", [&] { return driver_.event_record(event_of(event), stream_of(stream)); });
}

core::Status CudaDevice::wait(DeviceStream stream, DeviceEvent event) {
  return in_context("cuStreamWaitEvent",
                    [&] { return driver_.stream_wait_event(stream_of(stream), event_of(event), 0); });
}

core::Result<bool> CudaDevice::is_done(DeviceEvent event) {
  bool done = false;
  Status status = in_context("cuEventQuery", [&] {
    const CUresult result = driver_.event_query(event_of(event));
    done = result == CUDA_SUCCESS;
    return result == CUDA_ERROR_NOT_READY ? CUDA_SUCCESS : result;
  });
  if (!status.is_ok()) return status;
  return done;
}

core::Status CudaDevice::copy_to_host(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  if (bytes == 0) return {};
  return in_context("cuMemcpyDtoHAsync",
                    [&] { return driver_.copy_to_host(to, address_of(from), bytes, stream_of(stream)); });
}

core::Status CudaDevice::copy_to_device(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  if (bytes == 0) return {};
  return in_context("cuMemcpyHtoDAsync",
                    [&] { return driver_.copy_to_device(address_of(to), from, bytes, stream_of(stream)); });
}

core::Status CudaDevice::copy_within(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) {
  if (bytes == 0) return {};
  return in_context("cuMemcpyDtoDAsync",
                    [&] { return driver_.copy_within(address_of(to), address_of(from), bytes, stream_of(stream)); });
}

core::Status CudaDevice::copy_all(DeviceStream stream, CopyWay way, std::span<const CopyRun> copies) {
#if CUDA_VERSION >= 12080
  std::vector<CUdeviceptr> to;
  std::vector<CUdeviceptr> from;
  std::vector<std::size_t> sizes;
  // Not for the default stream.
  if (driver_.copy_batch != nullptr && copies.size() > 1 && stream.native != nullptr && may_batch_.load()) {
    for (const CopyRun& copy : copies) {
      if (copy.bytes == 0) continue;
      to.push_back(address_of(copy.to));
      from.push_back(address_of(copy.from));
      sizes.push_back(copy.bytes);
    }
  }
  bool is_refused = sizes.size() < 2;
  for (std::size_t at = 0; at < sizes.size() && !is_refused; at += kBatchMax) {
    CUmemcpyAttributes in_order{};
    in_order.srcAccessOrder = CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    std::size_t first = 0;
    std::size_t failed = 0;
    const std::size_t many = std::min(kBatchMax, sizes.size() - at);
    const Status status = in_context("cuMemcpyBatchAsync", [&] {
      const CUresult result = driver_.copy_batch(to.data() + at, from.data() + at, sizes.data() + at, many, &in_order,
                                                 &first, 1, &failed, stream_of(stream));
      is_refused = result == CUDA_ERROR_NOT_SUPPORTED || result == CUDA_ERROR_INVALID_VALUE;
      return is_refused ? CUDA_SUCCESS : result;
    });
    if (!status.is_ok()) return status;
  }
  if (!is_refused) return {};
  // Copies that were made already are made again, to the same places.
  if (sizes.size() > 1 && may_batch_.exchange(false))
    core::log_info(describe(), " refuses lists of copies (cuMemcpyBatchAsync); each copy gets a call of its own");
#endif
  return Device::copy_all(stream, way, copies);
}

core::Status CudaDevice::prepare_int8() {
  const std::lock_guard lock(int8_mutex_);
  if (!int8_made_) int8_made_ = make_int8();
  return *int8_made_;
}

core::Status CudaDevice::make_int8() {
  const core::Result<Nvrtc>* const loaded = nvrtc_ == nullptr ? &load_nvrtc() : nullptr;
  if (loaded != nullptr && !loaded->is_ok()) return loaded->status();
  int major = 0;
  int minor = 0;
  CUresult result = driver_.device_attribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, device_);
  if (result == CUDA_SUCCESS)
    result = driver_.device_attribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, device_);
  if (Status status = driver_.status(result, "cuDeviceGetAttribute"); !status.is_ok()) return status;
  const auto binary = compile(loaded != nullptr ? loaded->value() : *nvrtc_, kInt8Source, 10 * major + minor);
  if (!binary.is_ok()) return binary.status();
  Status status = in_context("loading kernels", [&] {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver_.exchange_capture_mode(&mode);
    CUresult made = driver_.module_load(&int8_, binary.value().data());
    if (made == CUDA_SUCCESS) made = driver_.module_function(&int8_encode_, int8_, "hybridps_int8_encode");
    if (made == CUDA_SUCCESS) made = driver_.module_function(&int8_decode_, int8_, "hybridps_int8_decode");
    driver_.exchange_capture_mode(&mode);
    return made;
  });
  if (!status.is_ok()) return status;
  // CUDA loads a kernel to the device at its first launch, and may wait for the device then. Later launches come behind
  // flags that only the network sets.
  const auto stream = make_stream();
  if (!stream.is_ok()) return stream.status();
  int8_stream_ = stream.value();  // not destroyed here: other streams may wait for flags
  status = start_int8(int8_stream_, int8_encode_, nullptr, nullptr, 0, 1.0F);
  if (status.is_ok()) status = start_int8(int8_stream_, int8_decode_, nullptr, nullptr, 0, 1.0F);
  return status;
}

/// Also with 0 elements.
core::Status CudaDevice::start_int8(DeviceStream stream, CUfunction kernel, const void* to, const void* from,
                                    std::uint64_t elements, float factor) {
  void* arguments[] = {&to, &from, &elements, &factor};  // decoding takes the first three
  return launch(stream, kernel, std::max<std::uint64_t>(elements, 1), arguments);
}

core::Status CudaDevice::launch(DeviceStream stream, CUfunction kernel, std::uint64_t threads, void** arguments) {
  constexpr unsigned kThreads = 256;  // threads of a block: whole warps
  const std::uint64_t blocks = (threads + kThreads - 1) / kThreads;
  if (blocks > 0x7fffffffU)
    return Status(Code::kInvalidArgument, "CUDA: " + std::to_string(threads) + " threads are too many for a launch");
  return in_context("cuLaunchKernel", [&] {
    return driver_.launch(kernel, static_cast<unsigned>(blocks), 1, 1, kThreads, 1, 1, 0, stream_of(stream), arguments,
                          nullptr);
  });
}

core::Status CudaDevice::encode_int8(DeviceStream stream, std::byte* to, const float* from, std::uint64_t elements,
                                     float factor) {
  return elements == 0 ? Status() : start_int8(stream, int8_encode_, to, from, elements, factor);
}

core::Status CudaDevice::decode_int8(DeviceStream stream, float* to, const std::byte* from, std::uint64_t elements) {
  return elements == 0 ? Status() : start_int8(stream, int8_decode_, to, from, elements, 1.0F);
}

core::Status CudaDevice::write_flag(DeviceStream stream, Flag flag, std::uint32_t value) {
  // By default a memory barrier precedes the write, so the copies are in host memory by then.
  return in_context("cuStreamWriteValue32", [&] {
    return driver_.stream_write_value(stream_of(stream), flag.device_address, value, CU_STREAM_WRITE_VALUE_DEFAULT);
  });
}

core::Status CudaDevice::wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) {
  return in_context("cuStreamWaitValue32", [&] {
    return driver_.stream_wait_value(stream_of(stream), flag.device_address, value, CU_STREAM_WAIT_VALUE_GEQ);
  });
}

core::Status CudaDevice::check_flags(DeviceStream stream, Flag flag) {
  Status status = write_flag(stream, flag, 1);
  return status.is_ok() ? wait_flag(stream, flag, 1) : status;
}

core::Result<bool> CudaDevice::is_capturing(DeviceStream stream) {
  CUstreamCaptureStatus capture = CU_STREAM_CAPTURE_STATUS_NONE;
  Status status =
      in_context("cuStreamIsCapturing", [&] { return driver_.stream_is_capturing(stream_of(stream), &capture); });
  if (!status.is_ok()) return status;
  return capture != CU_STREAM_CAPTURE_STATUS_NONE;
}

void CudaDevice::begin_helper_thread() noexcept {
  // Otherwise a query of ours would invalidate a graph that another thread records.
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  driver_.exchange_capture_mode(&mode);
}

core::Result<HostMemory> CudaDevice::allocate_host(std::uint64_t bytes) {
  HostMemory memory;
  memory.bytes = bytes;
  void* data = nullptr;
  CUdeviceptr address = 0;
  const core::Result<std::string> bus = bus_id();
  const NearNode near_gpu(bus.is_ok() ? numa_node_of(bus.value()) : -1);
  Status status = in_context("cuMemHostAlloc", [&] {
    // Allocation must be allowed while this thread records a graph.
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver_.exchange_capture_mode(&mode);
    CUresult result = driver_.host_allocate(&data, bytes, CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP);
    if (result == CUDA_SUCCESS) result = driver_.host_device_pointer(&address, data, 0);
    driver_.exchange_capture_mode(&mode);
    return result;
  });
  if (!status.is_ok()) {
    memory.data = static_cast<std::byte*>(data);
    if (data != nullptr) free_host(memory);
    return Status(Code::kOutOfResources,
                  "cannot pin " + std::to_string(bytes) + " bytes of host memory: " + std::string(status.message()));
  }
  std::memset(data, 0, bytes);
  memory.data = static_cast<std::byte*>(data);
  memory.device_address = address;
  memory.pinned = true;
  pinned_bytes_.fetch_add(bytes, std::memory_order_relaxed);
  return memory;
}

void CudaDevice::free_host(HostMemory memory) noexcept {
  const Status ignored = in_context("cuMemFreeHost", [&] { return driver_.host_free(memory.data); });
  static_cast<void>(ignored);
  if (memory.pinned) pinned_bytes_.fetch_sub(memory.bytes, std::memory_order_relaxed);
}

core::Result<std::byte*> CudaDevice::allocate_device(std::uint64_t bytes) {
  CUdeviceptr address = 0;
  Status status = in_context("cuMemAlloc", [&] {
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    driver_.exchange_capture_mode(&mode);
    const CUresult result = driver_.device_allocate(&address, bytes);
    // "GPUDirect RDMA" asks for this. Otherwise a copy that the driver calls synchronous may still be under way when a
    // network card reads the memory. We make no such copies, but another library might.
    const unsigned synchronize = 1;
    if (result == CUDA_SUCCESS) driver_.pointer_set_attribute(&synchronize, CU_POINTER_ATTRIBUTE_SYNC_MEMOPS, address);
    driver_.exchange_capture_mode(&mode);
    return result;
  });
  if (!status.is_ok())
    return Status(Code::kOutOfResources, "cannot have " + std::to_string(bytes) + " bytes of " + describe() + ": " +
                                             std::string(status.message()));
  return reinterpret_cast<std::byte*>(address);
}

void CudaDevice::free_device(std::byte* memory) noexcept {
  const Status ignored = in_context("cuMemFree", [&] { return driver_.device_free(address_of(memory)); });
  static_cast<void>(ignored);
}

namespace {

/// Error kTimeout: the stream still has work, and the flag and the stream are left to it.
Status try_flag(Device& device) {
  const auto stream = device.make_stream();
  if (!stream.is_ok()) return stream.status();
  const auto memory = device.allocate_host(4096);
  if (!memory.is_ok()) {
    device.destroy(stream.value());
    return memory.status();
  }
  const Flag flag = memory.value().flag_at(0);
  Status status = device.check_flags(stream.value(), flag);
  const auto until = core::Clock::now() + std::chrono::seconds(1);
  while (status.is_ok() && flag.word->load(std::memory_order_acquire) != 1) {
    if (core::Clock::now() > until) status = Status(Code::kTimeout, "a word that a stream writes is not seen");
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
  if (status.code() == Code::kTimeout) return status;
  device.free_host(memory.value());
  device.destroy(stream.value());
  return status;
}

/// What is wrong with a device; empty: nothing.
std::string trouble_of(const Driver& driver, int index) {
  auto device = CudaDevice::open(driver, index);
  if (!device.is_ok()) return "CUDA device " + std::to_string(index) + ": " + std::string(device.status().message());
  const Status status = try_flag(*device.value());
  if (status.is_ok()) return {};
  std::string text = device.value()->describe() + ": " + std::string(status.message());
  if (status.code() == Code::kTimeout) {  // to let it go may wait for the stream
    static auto& kept = *new core::Mailbox<std::unique_ptr<CudaDevice>>();
    kept.put(std::move(device).value());
  }
  return text;
}

}  // namespace

std::string find_cuda_trouble(const Driver& driver, std::chrono::milliseconds patience) {
  struct FlagTrial {
    std::mutex mutex;
    std::condition_variable given;
    std::optional<std::string> text;
  };
  int count = 0;
  if (driver.device_count(&count) != CUDA_SUCCESS) return {};
  std::string text;
  for (int i = 0; i < count; ++i) {
    const auto trial = std::make_shared<FlagTrial>();
    // Any call may wait for ever on a device whose work does not end.
    std::thread([trial, &driver, i] {
      std::string found = trouble_of(driver, i);
      const std::lock_guard lock(trial->mutex);
      trial->text = std::move(found);
      trial->given.notify_all();
    }).detach();
    std::unique_lock lock(trial->mutex);
    if (!trial->given.wait_for(lock, patience, [&] { return trial->text.has_value(); }))
      trial->text = "CUDA device " + std::to_string(i) + ": a call of its driver has not returned for " +
                    std::to_string(patience.count()) + " ms; see what else uses it (nvidia-smi)";
    if (!trial->text->empty()) text += (text.empty() ? "" : "; ") + *trial->text;
  }
  return text;
}

std::string describe_cuda() {
  const core::Result<Driver>& driver = load_driver();
  if (!driver.is_ok()) return "no device: " + std::string(driver.status().message());
  int count = 0;
  if (const CUresult result = driver.value().device_count(&count); result != CUDA_SUCCESS || count == 0)
    return "no device: the driver shows none to this process (CUDA_VISIBLE_DEVICES)";
  std::string text = std::to_string(count) + (count == 1 ? " device: " : " devices: ");
  for (int i = 0; i < count; ++i) {
    CUdevice device = 0;
    if (driver.value().device_get(&device, i) != CUDA_SUCCESS) continue;
    text += (i > 0 ? ", " : "") + device_name(driver.value(), device);
  }
  return text;
}

}  // namespace hybridps::device
