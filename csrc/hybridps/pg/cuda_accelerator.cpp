// CUDA's own calls and the opening of NCCL: the only code of pg that differs between builds with and without them.
#include "hybridps/pg/accelerator.h"

#if HYBRIDPS_WITH_CUDA
#include <map>
#include <mutex>
#include <utility>

#include <c10/cuda/CUDAStream.h>

#include "hybridps/device/cuda/cuda_device.h"
#if HYBRIDPS_WITH_NCCL
#include "hybridps/intranode/nccl/nccl_group.h"
#endif
#endif

namespace hybridps::pg {

const char kNoCuda[] =
    "this build of hybridps carries CPU tensors only: it was built without CUDA's headers or for a torch without CUDA; "
    "build it again with both, or use backend \"cpu:hybridps,cuda:nccl\"";

#if HYBRIDPS_WITH_CUDA
namespace {

#if HYBRIDPS_WITH_NCCL
core::Result<std::shared_ptr<intranode::LocalGroups>> open_nccl() {
  const core::Result<intranode::NcclApi>& api = intranode::load_nccl();
  if (!api.is_ok()) return api.status();
  return std::shared_ptr<intranode::LocalGroups>(std::make_shared<intranode::NcclGroups>(api.value()));
}
#else
core::Result<std::shared_ptr<intranode::LocalGroups>> open_nccl() {
  return core::Status(core::Code::kUnsupported, "this build of hybridps was made without NCCL's header");
}
#endif

class CudaAccelerator final : public Accelerator {
 public:
  core::Result<std::shared_ptr<device::Device>> open(int index) override {
    const core::Result<device::Driver>& driver = device::load_driver();
    if (!driver.is_ok()) return driver.status();
    const std::lock_guard lock(mutex_);
    if (const auto known = opened_.find(index); known != opened_.end())
      return std::shared_ptr<device::Device>(known->second);
    auto opened = device::CudaDevice::open(driver.value(), index);
    if (!opened.is_ok()) return opened.status();
    std::shared_ptr<device::CudaDevice> device = std::move(opened).value();
    opened_.emplace(index, device);
    return std::shared_ptr<device::Device>(std::move(device));
  }
  device::DeviceStream native(c10::Stream stream) override { return {c10::cuda::CUDAStream(stream).stream()}; }
  c10::Stream as_torch(device::DeviceStream stream, c10::Device device) override {
    return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream.native), device.index()).unwrap();
  }
  std::uint64_t pinned_bytes() override {
    const std::lock_guard lock(mutex_);
    std::uint64_t bytes = 0;
    for (const auto& [index, device] : opened_) bytes += device->pinned_bytes();
    return bytes;
  }
  core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library() override { return open_nccl(); }
  void drain_local_library([[maybe_unused]] std::chrono::milliseconds patience) override {
#if HYBRIDPS_WITH_NCCL
    intranode::NcclGroups::drain(patience);
#endif
  }

 private:
  std::mutex mutex_;
  std::map<int, std::shared_ptr<device::CudaDevice>> opened_;
};

}  // namespace

std::unique_ptr<Accelerator> make_cuda_accelerator() { return std::make_unique<CudaAccelerator>(); }

std::string describe_cuda_support() {
  const auto library = open_nccl();
  return device::describe_cuda() + "; ranks of one node: " +
         (library.is_ok() ? library.value()->describe() : std::string(library.status().message()));
}

std::string find_cuda_trouble() {
  const auto& driver = device::load_driver();
  return driver.is_ok() ? device::find_cuda_trouble(driver.value()) : std::string();
}

#else

std::unique_ptr<Accelerator> make_cuda_accelerator() { return nullptr; }

std::string find_cuda_trouble() { return {}; }

std::string describe_cuda_support() { return "not built"; }

#endif

}  // namespace hybridps::pg
