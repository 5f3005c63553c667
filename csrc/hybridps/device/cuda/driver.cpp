#include "hybridps/device/cuda/driver.h"

#include "hybridps/core/shared_library.h"

namespace hybridps::device {
namespace {

using core::Code;
using core::Status;

constexpr int kDriverVersionMin = 12000;

core::Result<Driver> open_driver() {
  core::SharedLibrary library("libcuda.so.1");
  if (!library.is_open())
    return Status(Code::kUnsupported, "libcuda.so.1 cannot be opened: no NVIDIA driver is installed");
  Driver driver;
  library.find(driver.init, "cuInit");
  library.find(driver.driver_version, "cuDriverGetVersion");
  library.find(driver.error_name, "cuGetErrorName");
  library.find(driver.error_string, "cuGetErrorString");
  library.find(driver.device_count, "cuDeviceGetCount");
  library.find(driver.device_get, "cuDeviceGet");
  library.find(driver.device_name, "cuDeviceGetName");
  library.find(driver.device_bus_id, "cuDeviceGetPCIBusId");
  library.find(driver.device_uuid, "cuDeviceGetUuid_v2");
  library.find(driver.primary_context_retain, "cuDevicePrimaryCtxRetain");
  library.find(driver.primary_context_release, "cuDevicePrimaryCtxRelease_v2");
  library.find(driver.context_push, "cuCtxPushCurrent_v2");
  library.find(driver.context_pop, "cuCtxPopCurrent_v2");
  library.find(driver.priority_range, "cuCtxGetStreamPriorityRange");
  library.find(driver.stream_create, "cuStreamCreateWithPriority");
  library.find(driver.stream_destroy, "cuStreamDestroy_v2");
  library.find(driver.event_create, "cuEventCreate");
  library.find(driver.event_destroy, "cuEventDestroy_v2");
  library.find(driver.event_record, "cuEventRecord");
  library.find(driver.event_query, "cuEventQuery");
  library.find(driver.stream_wait_event, "cuStreamWaitEvent");
  // _v2: since CUDA 11.7 these work without a module parameter of the driver.
  library.find(driver.stream_wait_value, "cuStreamWaitValue32_v2");
  library.find(driver.stream_write_value, "cuStreamWriteValue32_v2");
  library.find(driver.stream_is_capturing, "cuStreamIsCapturing");
  library.find(driver.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
  library.find(driver.copy_to_host, "cuMemcpyDtoHAsync_v2");
  library.find(driver.copy_to_device, "cuMemcpyHtoDAsync_v2");
  library.find(driver.copy_within, "cuMemcpyDtoDAsync_v2");
#if CUDA_VERSION >= 12080
  library.find_optional(driver.copy_batch, "cuMemcpyBatchAsync");  // drivers for CUDA 13 have it as it was in 12.8, too
#endif
  library.find(driver.host_allocate, "cuMemHostAlloc");
  library.find(driver.host_device_pointer, "cuMemHostGetDevicePointer_v2");
  library.find(driver.host_free, "cuMemFreeHost");
  library.find(driver.device_allocate, "cuMemAlloc_v2");
  library.find(driver.device_free, "cuMemFree_v2");
  library.find(driver.pointer_set_attribute, "cuPointerSetAttribute");
  library.find(driver.device_attribute, "cuDeviceGetAttribute");
  library.find(driver.module_load, "cuModuleLoadData");
  library.find(driver.module_unload, "cuModuleUnload");
  library.find(driver.module_function, "cuModuleGetFunction");
  library.find(driver.launch, "cuLaunchKernel");
  if (!library.missing().empty())
    return Status(Code::kUnsupported,
                  "the NVIDIA driver is too old: it lacks " + library.missing() + "; CUDA 12.0 is needed");
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
  Code code = Code::kInternal;
  if (result == CUDA_ERROR_OUT_OF_MEMORY) code = Code::kOutOfResources;
  if (result == CUDA_ERROR_NOT_SUPPORTED) code = Code::kUnsupported;
  return Status(code, std::move(message));
}

const core::Result<Driver>& load_driver() {
  static const core::Result<Driver> driver = open_driver();
  return driver;
}

}  // namespace hybridps::device
