#include "hybridps/pg/accelerator.h"

#include <c10/util/Exception.h>

#if HYBRIDPS_WITH_CUDA
#include <map>
#include <mutex>
#include <utility>

#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

#include "hybridps/device/cuda/cuda_device.h"
#endif
#if HYBRIDPS_WITH_NCCL
#include "hybridps/intranode/nccl/nccl_group.h"
#endif

namespace hybridps::pg {

#if HYBRIDPS_WITH_NCCL

core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library() {
  const core::Result<intranode::NcclApi>& api = intranode::load_nccl();
  if (!api.is_ok()) return api.status();
  return std::shared_ptr<intranode::LocalGroups>(std::make_shared<intranode::NcclGroups>(api.value()));
}

void drain_local_library(std::chrono::milliseconds patience) { intranode::NcclGroups::drain(patience); }

#else

core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library() {
  return core::Status(core::Code::kUnsupported, "this build of hybridps was made without NCCL's header");
}

void drain_local_library(std::chrono::milliseconds /*patience*/) {}

#endif

#if HYBRIDPS_WITH_CUDA

namespace {
// Never destroyed: at exit the driver may be gone before we are.
struct Devices {
  std::mutex mutex;
  std::map<int, std::shared_ptr<device::CudaDevice>> opened;
};
Devices& devices() {
  static auto& kept = *new Devices();
  return kept;
}

std::string describe_local_library() {
  const auto library = open_local_library();
  return library.is_ok() ? library.value()->describe() : std::string(library.status().message());
}
}  // namespace

bool has_cuda_support() noexcept { return true; }

std::string describe_cuda_support() {
  return device::describe_cuda() + "; ranks of one node: " + describe_local_library();
}

core::Result<std::shared_ptr<device::Device>> open_cuda_device(int index) {
  const core::Result<device::Driver>& driver = device::load_driver();
  if (!driver.is_ok()) return driver.status();
  Devices& all = devices();
  const std::lock_guard lock(all.mutex);
  if (const auto known = all.opened.find(index); known != all.opened.end())
    return std::shared_ptr<device::Device>(known->second);
  auto opened = device::CudaDevice::open(driver.value(), index);
  if (!opened.is_ok()) return opened.status();
  std::shared_ptr<device::CudaDevice> device = std::move(opened).value();
  all.opened.emplace(index, device);
  return std::shared_ptr<device::Device>(std::move(device));
}

std::uint64_t pinned_bytes() {
  Devices& all = devices();
  const std::lock_guard lock(all.mutex);
  std::uint64_t bytes = 0;
  for (const auto& [index, device] : all.opened) bytes += device->pinned_bytes();
  return bytes;
}

device::Stream current_cuda_stream(c10::Device device) {
  return {c10::cuda::getCurrentCUDAStream(device.index()).stream()};
}

c10::Stream as_torch_stream(device::Stream stream, c10::Device device) {
  return c10::cuda::getStreamFromExternal(static_cast<cudaStream_t>(stream.native), device.index()).unwrap();
}

c10::Device current_cuda_device() { return {c10::DeviceType::CUDA, c10::cuda::current_device()}; }

#else

namespace {
constexpr char kNotBuilt[] =
    "this build of hybridps carries CPU tensors only: it was built without CUDA's headers or for a torch without CUDA; "
    "build it again with both, or use backend \"cpu:hybridps,cuda:nccl\"";
}  // namespace

bool has_cuda_support() noexcept { return false; }

std::string describe_cuda_support() { return "not built"; }

core::Result<std::shared_ptr<device::Device>> open_cuda_device(int /*index*/) {
  return core::Status(core::Code::kUnsupported, kNotBuilt);
}

std::uint64_t pinned_bytes() { return 0; }

device::Stream current_cuda_stream(c10::Device /*device*/) { TORCH_CHECK(false, "hybridps: ", kNotBuilt); }

c10::Stream as_torch_stream(device::Stream /*stream*/, c10::Device /*device*/) {
  TORCH_CHECK(false, "hybridps: ", kNotBuilt);
}

c10::Device current_cuda_device() { TORCH_CHECK(false, "hybridps: ", kNotBuilt); }

#endif

}  // namespace hybridps::pg
