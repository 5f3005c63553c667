#include "hybridps/device/cuda/driver.h"

#include <dlfcn.h>

namespace hybridps::device {
namespace {

using core::Code;
using core::Status;

constexpr int kDriverVersionMin = 12000;

core::Result<Driver> open_driver() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr)
    return Status(Code::kUnsupported, "libcuda.so.1 cannot be opened: no NVIDIA driver is installed");
  Driver driver;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    void* address = dlsym(library, name);
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(address);
    if (address == nullptr) missing += std::string(missing.empty() ? "" : ", ") + name;
  };
  find(driver.init, "cuInit");
  find(driver.driver_version, "cuDriverGetVersion");
  find(driver.error_name, "cuGetErrorName");
  find(driver.error_string, "cuGetErrorString");
  find(driver.device_count, "cuDeviceGetCount");
  find(driver.device_get, "cuDeviceGet");
  find(driver.device_name, "cuDeviceGetName");
  find(driver.device_bus_id, "cuDeviceGetPCIBusId");
  find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  find(driver.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  find(driver.context_push, "cuCtxPushCurrent_v2");
  find(driver.context_pop, "cuCtxPopCurrent_v2");
  find(driver.priority_range, "cuCtxGetStreamPriorityRange");
  find(driver.stream_create, "cuStreamCreateWithPriority");
  find(driver.stream_destroy, "cuStreamDestroy_v2");
  find(driver.event_create, "cuEventCreate");
  find(driver.event_destroy, "cuEventDestroy_v2");
  find(driver.event_record, "cuEventRecord");
  find(driver.event_query, "cuEventQuery");
  find(driver.stream_wait_event, "cuStreamWaitEvent");
  // _v2: since CUDA 11.7 no longer behind a module parameter of the driver.
  find(driver.stream_wait_value, "cuStreamWaitValue32_v2");
  find(driver.stream_write_value, "cuStreamWriteValue32_v2");
  find(driver.stream_is_capturing, "cuStreamIsCapturing");
  find(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  find(driver.copy_to_host, "cuMemcpyDtoHAsync_v2");
  find(driver.copy_to_device, "cuMemcpyHtoDAsync_v2");
  find(driver.copy_within, "cuMemcpyDtoDAsync_v2");
  find(driver.host_allocate, "cuMemHostAlloc");
  find(driver.host_device_pointer, "cuMemHostGetDevicePointer_v2");
  find(driver.host_free, "cuMemFreeHost");
  find(driver.device_allocate, "cuMemAlloc_v2");
  find(driver.device_free, "cuMemFree_v2");
  find(driver.pointer_set_attribute, "cuPointerSetAttribute");
  find(driver.device_attribute, "cuDeviceGetAttribute");
  find(driver.module_load, "cuModuleLoadData");
  find(driver.module_unload, "cuModuleUnload");
  find(driver.module_function, "cuModuleGetFunction");
  find(driver.launch, "cuLaunchKernel");
  if (!missing.empty())
    return Status(Code::kUnsupported, "the NVIDIA driver is too old: it lacks " + missing + "; CUDA 12.0 is needed");
  if (Status status = driver.status(driver.init(0), "cuInit"); !status.is_ok())
    return Status(Code::kUnsupported, std::string(status.message()));
  int version = 0;
  if (Status status = driver.status(driver.driver_version(&version), "cuDriverGetVersion"); !status.is_ok())
    return status;
  if (version < kDriverVersionMin)
    return Status(Code::kUnsupported, "the NVIDIA driver is for CUDA " + std::to_string(version / 1000) + "." +
                                          std::to_string(version % 1000 / 10) + "; 12.0 is needed");
  return driver;
}

}  // namespace

core::Status Driver::status(CUresult result, const char* call) const {
  if (result == CUDA_SUCCESS) return {};
  const char* name = nullptr;
  const char* text = nullptr;
  if (error_name == nullptr || error_name(result, &name) != CUDA_SUCCESS) name = nullptr;
  if (error_string == nullptr || error_string(result, &text) != CUDA_SUCCESS) text = nullptr;
  std::string message = std::string("CUDA: ") + call + " failed: ";
  message += name != nullptr ? name : "error " + std::to_string(static_cast<int>(result));
  if (text != nullptr) message += std::string(" (") + text + ")";
  const bool memory = result == CUDA_ERROR_OUT_OF_MEMORY;
  return Status(memory ? Code::kOutOfResources : Code::kInternal, std::move(message));
}

const core::Result<Driver>& load_driver() {
  static const core::Result<Driver> driver = open_driver();
  return driver;
}

}  // namespace hybridps::device
