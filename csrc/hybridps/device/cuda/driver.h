// hybridps/device/cuda/driver.h: the CUDA driver functions that we call, found at run time.
//
// Not linked, because a process with a CUDA build of torch may run on a machine without a driver. Such a process must
// still import and work on CPU tensors. The driver and not the runtime, because only the driver has streams that wait
// for flags. A plain table, so that tests can fill it with their own functions.
#pragma once

#include <cudaTypedefs.h>

#include <string>

#include "hybridps/core/status.h"

namespace hybridps::device {

struct Driver {
  PFN_cuInit_v2000 init = nullptr;
  PFN_cuDriverGetVersion_v2020 driver_version = nullptr;
  PFN_cuGetErrorName_v6000 error_name = nullptr;
  PFN_cuGetErrorString_v6000 error_string = nullptr;
  PFN_cuDeviceGetCount_v2000 device_count = nullptr;
  PFN_cuDeviceGet_v2000 device_get = nullptr;
  PFN_cuDeviceGetName_v2000 device_name = nullptr;
  PFN_cuDeviceGetPCIBusId_v4010 device_bus_id = nullptr;
  PFN_cuDeviceGetUuid_v11040 device_uuid = nullptr;
  PFN_cuDevicePrimaryCtxRetain_v7000 primary_context_retain = nullptr;
  PFN_cuDevicePrimaryCtxRelease_v11000 primary_context_release = nullptr;
  PFN_cuCtxPushCurrent_v4000 context_push = nullptr;
  PFN_cuCtxPopCurrent_v4000 context_pop = nullptr;
  PFN_cuCtxGetStreamPriorityRange_v5050 priority_range = nullptr;
  PFN_cuStreamCreateWithPriority_v5050 stream_create = nullptr;
  PFN_cuStreamDestroy_v4000 stream_destroy = nullptr;
  PFN_cuEventCreate_v2000 event_create = nullptr;
  PFN_cuEventDestroy_v4000 event_destroy = nullptr;
  PFN_cuEventRecord_v2000 event_record = nullptr;
  PFN_cuEventQuery_v2000 event_query = nullptr;
  PFN_cuStreamWaitEvent_v3020 stream_wait_event = nullptr;
  PFN_cuStreamWaitValue32_v11070 stream_wait_value = nullptr;
  PFN_cuStreamWriteValue32_v11070 stream_write_value = nullptr;
  PFN_cuStreamIsCapturing_v10000 stream_is_capturing = nullptr;
  PFN_cuThreadExchangeStreamCaptureMode_v10010 exchange_capture_mode = nullptr;
  PFN_cuMemcpyDtoHAsync_v3020 copy_to_host = nullptr;
  PFN_cuMemcpyHtoDAsync_v3020 copy_to_device = nullptr;
  PFN_cuMemcpyDtoDAsync_v3020 copy_within = nullptr;
#if CUDA_VERSION >= 12080
  PFN_cuMemcpyBatchAsync_v12080 copy_batch = nullptr;  // null: the driver is older
#endif
  PFN_cuMemHostAlloc_v2020 host_allocate = nullptr;
  PFN_cuMemHostGetDevicePointer_v3020 host_device_pointer = nullptr;
  PFN_cuMemFreeHost_v2000 host_free = nullptr;
  PFN_cuMemAlloc_v3020 device_allocate = nullptr;
  PFN_cuMemFree_v3020 device_free = nullptr;
  PFN_cuPointerSetAttribute_v6000 pointer_set_attribute = nullptr;
  PFN_cuDeviceGetAttribute_v2000 device_attribute = nullptr;
  PFN_cuModuleLoadData_v2000 module_load = nullptr;
  PFN_cuModuleUnload_v2000 module_unload = nullptr;
  PFN_cuModuleGetFunction_v2000 module_function = nullptr;
  PFN_cuLaunchKernel_v4000 launch = nullptr;

  /// kOk, or "CUDA: cuStreamWaitEvent failed: CUDA_ERROR_ILLEGAL_ADDRESS (an illegal memory access ...)".
  core::Status status(CUresult result, const char* call) const;
};

/// The initialised driver of this machine, loaded once. Error kUnsupported says what is missing: the library, a device,
/// or a newer driver. In a forked child of a process that has used CUDA, no driver call works, as in torch.
const core::Result<Driver>& load_driver();

}  // namespace hybridps::device
