#include "hybridps/pg/accelerator.h"

#include <array>
#include <atomic>
#include <mutex>
#include <utility>

#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace hybridps::pg {
namespace {

constexpr auto kTypes = static_cast<std::size_t>(c10::COMPILE_TIME_MAX_DEVICE_TYPES);

// Never destroyed: at exit a driver may be gone before this object. Read without a lock in every call.
struct Kinds {
  std::array<std::atomic<Accelerator*>, kTypes> of{};
  Kinds() { of[static_cast<std::size_t>(c10::DeviceType::CUDA)].store(make_cuda_accelerator().release()); }
};

Kinds& kinds() {
  static auto& kept = *new Kinds();
  return kept;
}

Accelerator& known(c10::Device device) {
  Accelerator* const accelerator = accelerator_of(device.type());
  TORCH_CHECK(accelerator != nullptr, "hybridps: nothing carries tensors on ", device);
  return *accelerator;
}

void look() noexcept { device::NoDriverCalls::look(); }

}  // namespace

Accelerator* accelerator_of(c10::DeviceType type) noexcept {
  const auto at = static_cast<std::size_t>(type);
  return at < kTypes ? kinds().of[at].load(std::memory_order_acquire) : nullptr;
}

void add_accelerator(c10::DeviceType type, std::unique_ptr<Accelerator> accelerator) {
  const auto at = static_cast<std::size_t>(type);
  TORCH_CHECK(at < kTypes && type != c10::DeviceType::CPU, "hybridps: no kind of accelerator: ", type);
  kinds().of[at].store(accelerator.release(), std::memory_order_release);
}

const AcceleratorSeam& accelerator_seam() noexcept {
  static constexpr AcceleratorSeam kSeam{&add_accelerator, &look};
  return kSeam;
}

device::DeviceStream current_stream(c10::Device device) {
  return known(device).native(c10::impl::getDeviceGuardImpl(device.type())->getStream(device));
}

c10::Stream as_torch_stream(device::DeviceStream stream, c10::Device device) {
  return known(device).as_torch(stream, device);
}

core::Result<std::shared_ptr<device::Device>> open_device(c10::Device device) {
  if (Accelerator* const accelerator = accelerator_of(device.type())) return accelerator->open(device.index());
  return core::Status(core::Code::kUnsupported,
                      device.is_cuda() ? kNoCuda : "nothing carries tensors on devices of the kind of " + device.str());
}

std::uint64_t pinned_bytes() {
  std::uint64_t bytes = 0;
  for (auto& kind : kinds().of)
    if (Accelerator* const accelerator = kind.load(std::memory_order_acquire)) bytes += accelerator->pinned_bytes();
  return bytes;
}

void drain_local_libraries(std::chrono::milliseconds patience) {
  for (auto& kind : kinds().of)
    if (Accelerator* const accelerator = kind.load(std::memory_order_acquire))
      accelerator->drain_local_library(patience);
}

}  // namespace hybridps::pg
