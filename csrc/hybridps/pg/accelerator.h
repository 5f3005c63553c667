// hybridps/pg/accelerator.h: the kinds of accelerator that pg supports, by torch's device type.
//
// Model    What torch offers for every kind alike (current stream, guards, events) comes from torch's guard interface.
//          An Accelerator supplies the rest: the native stream, a device's pinned memory and flags, a library for the
//          ranks of a node. CUDA's Accelerator is in cuda_accelerator.cpp, the only file of pg that differs between
//          builds with and without CUDA or NCCL's header. Modules of their own add other kinds (bindings:
//          _accelerator_seam()).
// Threads  any. A device is opened on first use. Devices and Accelerators are kept until the process ends.
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

/// One kind. Code outside of pg may implement one too, with this header and the same build of torch.
class Accelerator {
 public:
  virtual ~Accelerator() = default;

  /// Returns the same object for the same index. kUnsupported, kInvalidArgument: the text says what is missing.
  virtual core::Result<std::shared_ptr<device::Device>> open(int index) = 0;
  /// torch's stream, in the form that the Device uses.
  virtual device::DeviceStream native(c10::Stream stream) = 0;
  /// A stream of ours, in the form that torch's guards take.
  virtual c10::Stream as_torch(device::DeviceStream stream, c10::Device device) = 0;
  /// Bytes of host memory that the devices of this process have pinned.
  virtual std::uint64_t pinned_bytes() = 0;
  /// The library with which the ranks of a node work together on their devices. kUnsupported: says what is missing.
  virtual core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library() = 0;
  /// Waits, at most `patience`, for what the library still does after its groups are gone.
  virtual void drain_local_library(std::chrono::milliseconds patience) = 0;
};

/// Null: tensors on such devices are not carried. The CPU has no Accelerator.
Accelerator* accelerator_of(c10::DeviceType type) noexcept;
/// Call before the process makes its first group. An earlier Accelerator of this type stays in memory, unused.
void add_accelerator(c10::DeviceType type, std::unique_ptr<Accelerator> accelerator);

/// Given to a module that adds an Accelerator, in a capsule of this name (python/hybridps does not know the capsule).
struct AcceleratorSeam {
  static constexpr const char* kName = "hybridps.accelerator_seam";
  void (*add)(c10::DeviceType type, std::unique_ptr<Accelerator> accelerator);
  /// NoDriverCalls::look() of the extension. A module's own look() would read thread-local variables of the module.
  void (*look)() noexcept;
};
const AcceleratorSeam& accelerator_seam() noexcept;

/// torch's current stream of this thread. `device` has an Accelerator.
device::DeviceStream current_stream(c10::Device device);
/// A stream of ours, in the form that torch's guards take. `device` has an Accelerator.
c10::Stream as_torch_stream(device::DeviceStream stream, c10::Device device);
core::Result<std::shared_ptr<device::Device>> open_device(c10::Device device);
/// The sum over all kinds.
std::uint64_t pinned_bytes();
void drain_local_libraries(std::chrono::milliseconds patience);

// CUDA (cuda_accelerator.cpp) -----------------------------------------------------------------------------------------

/// Null in a build without CUDA. A build with CUDA but without a GPU has an Accelerator that opens nothing.
std::unique_ptr<Accelerator> make_cuda_accelerator();
/// For `hybridps doctor`: "1 device: NVIDIA H200; ranks of one node: NCCL 2.30.7", "no device: ..." or "not built".
std::string describe_cuda_support();
/// For `hybridps doctor`: why a GPU of this process cannot carry tensors. Empty: nothing was found, or there is no GPU.
std::string find_cuda_trouble();
/// The error text for a call on CUDA tensors in a build without CUDA.
extern const char kNoCuda[];

}  // namespace hybridps::pg
