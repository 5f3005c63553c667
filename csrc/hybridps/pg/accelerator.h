// hybridps/pg/accelerator.h: what pg needs of torch about CUDA: its streams, and the device/ objects and NCCL of this
// process. The only file of pg that differs between builds with and without CUDA or NCCL's header.
//
// Threads  any. A device is opened on first use and kept until the process ends.
#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include "hybridps/core/status.h"
#include "hybridps/device/device.h"
#include "hybridps/intranode/local_group.h"

namespace hybridps::pg {

/// Whether this build can carry CUDA tensors; without a GPU it still can, and never gets to.
bool has_cuda_support() noexcept;
/// For `hybridps doctor`: "1 device: NVIDIA H200; ranks of one node: NCCL 2.30.7", "no device: ..." or "not built".
std::string describe_cuda_support();

/// kUnsupported, kInvalidArgument: says what is missing.
core::Result<std::shared_ptr<device::Device>> open_cuda_device(int index);
/// Of host memory that is pinned for all devices of this process.
std::uint64_t pinned_bytes();
/// What the ranks of a node have for working together on their GPUs: kUnsupported says what is missing.
core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library();
/// Waits for what the library does after its groups are gone, `patience` at most.
void drain_local_library(std::chrono::milliseconds patience);
/// torch's current stream of this thread.
device::Stream current_cuda_stream(c10::Device device);
/// Ours, as torch's guards take it.
c10::Stream as_torch_stream(device::Stream stream, c10::Device device);
c10::Device current_cuda_device();

}  // namespace hybridps::pg
