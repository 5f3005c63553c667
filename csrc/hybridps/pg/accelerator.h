// hybridps/pg/accelerator.h: the kinds of accelerator whose tensors pg carries, by torch's device type.
//
// Model    What torch says of every kind alike (current stream, guards, events) is asked of its guard interface. What it
//          does not say (what stands behind a stream, a device's pinned memory and flags, a library for the ranks of a
//          node) an Accelerator says. CUDA's is in cuda_accelerator.cpp, the only file of pg that differs between builds with
//          and without CUDA or NCCL's header; others are added by modules of their own (bindings: _accelerator_seam()).
// Threads  any. A device is opened on first use and kept until the process ends, and so is an Accelerator.
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

/// One kind. Implemented outside of pg too, against this header and the same build of torch.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  /// The same object for the same index. kUnsupported, kInvalidArgument: says what is missing.
  virtual core::Result<std::shared_ptr<device::Device>> open(int index) = 0;
  /// What the Device knows torch's stream by.
  virtual device::DeviceStream native(c10::Stream stream) = 0;
  /// A stream of ours, as torch's guards take it.
  virtual c10::Stream as_torch(device::DeviceStream stream, c10::Device device) = 0;
  /// Of host memory that is pinned by the devices of this process.
  virtual std::uint64_t pinned_bytes() = 0;
  /// What the ranks of a node have for working together on their devices: kUnsupported says what is missing.
  virtual core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library() = 0;
  /// Waits for what the library does after its groups are gone, `patience` at most.
  virtual void drain_local_library(std::chrono::milliseconds patience) = 0;
};

/// Null: tensors on such devices are not carried. CPU has none.
Accelerator* accelerator_of(c10::DeviceType type) noexcept;
/// Before the first group of a process; the one that was there stays, unused.
void add_accelerator(c10::DeviceType type, std::unique_ptr<Accelerator> accelerator);

/// What a module that adds one is given, through a capsule of that name (python/hybridps knows nothing of it).
struct AcceleratorSeam {
  static constexpr const char* kName = "hybridps.accelerator_seam";
  void (*add)(c10::DeviceType type, std::unique_ptr<Accelerator> accelerator);
  /// NoDriverCalls::look() of the extension: a module has thread-local variables of its own.
  void (*look)() noexcept;
};
const AcceleratorSeam& accelerator_seam() noexcept;

/// torch's current stream of this thread. `device` has an Accelerator.
device::DeviceStream current_stream(c10::Device device);
/// A stream of ours, as torch's guards take it. `device` has an Accelerator.
c10::Stream as_torch_stream(device::DeviceStream stream, c10::Device device);
core::Result<std::shared_ptr<device::Device>> open_device(c10::Device device);
/// Of all kinds.
std::uint64_t pinned_bytes();
void drain_local_libraries(std::chrono::milliseconds patience);

// CUDA (cuda_accelerator.cpp) -----------------------------------------------------------------------------------------

/// Null in a build without CUDA. Without a GPU there is one, which opens nothing.
std::unique_ptr<Accelerator> make_cuda_accelerator();
/// For `hybridps doctor`: "1 device: NVIDIA H200; ranks of one node: NCCL 2.30.7", "no device: ..." or "not built".
std::string describe_cuda_support();
/// What a call on CUDA tensors says in a build without CUDA.
extern const char kNoCuda[];

}  // namespace hybridps::pg
