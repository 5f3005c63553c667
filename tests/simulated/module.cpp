// tests/simulated/module.cpp: the simulated device as torch's PrivateUse1, and as an Accelerator of hybridps. The only
// file of it that includes torch.
//
// Every operator that has no kernel here is carried out by its CPU kernel, later, on the stream's thread: shapes come
// from its meta kernel, in the call. What has none (nonzero), and what draws random numbers, waits for the stream.
#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <ATen/EmptyTensor.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/enum_tag.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/ops/_copy_from.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/utils/pybind.h>
#include <torch/library.h>

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include "hybridps/pg/accelerator.h"
#include "tests/simulated/device.h"
#include "tests/simulated/library.h"

namespace py = pybind11;

namespace hybridps::simulated {
namespace {

using device::FakeDevice;
constexpr auto kType = c10::DeviceType::PrivateUse1;

// --- Streams and devices of a thread

thread_local c10::DeviceIndex current_device = 0;
thread_local std::vector<c10::StreamId> current_streams;

c10::StreamId current_stream_of(c10::DeviceIndex index) {
  const auto at = static_cast<std::size_t>(index < 0 ? current_device : index);
  return at < current_streams.size() ? current_streams[at] : 0;
}

SimulatedDevice& simulated_of(const at::Tensor& tensor) { return simulated::device(tensor.device().index()); }
int stream_of(const at::Tensor& tensor) { return static_cast<int>(current_stream_of(tensor.device().index())); }

struct TorchEvent {
  device::DeviceEvent event;
  c10::DeviceIndex index = 0;
};

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device device) const override {
    const c10::Device before = getDevice();
    setDevice(device);
    return before;
  }
  c10::Device getDevice() const override { return {kType, current_device}; }
  void setDevice(c10::Device device) const override {
    TORCH_CHECK(device.index() < deviceCount(), "there is no simulated device ", device.index());
    if (device.index() >= 0) current_device = device.index();
  }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() >= 0) current_device = device.index();
  }
  c10::Stream getStream(c10::Device device) const override {
    const c10::DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {kType, index}, current_stream_of(index));
  }
  c10::Stream getDefaultStream(c10::Device device) const override {
    return c10::Stream(c10::Stream::UNSAFE, {kType, device.index() < 0 ? current_device : device.index()}, 0);
  }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool) const override { return getNewStream(device, 0); }
  c10::Stream getNewStream(c10::Device device, int) const override {
    const c10::DeviceIndex index = device.index() < 0 ? current_device : device.index();
    return c10::Stream(c10::Stream::UNSAFE, {kType, index}, simulated::device(index).new_stream());
  }
  c10::Stream exchangeStream(c10::Stream stream) const override {
    const auto at = static_cast<std::size_t>(stream.device_index());
    if (current_streams.size() <= at) current_streams.resize(at + 1);
    const c10::Stream before = getStream(stream.device());
    current_streams[at] = stream.id();
    return before;
  }
  void destroyEvent(void* event, c10::DeviceIndex) const noexcept override {
    // The native event is kept: streams may wait for it still.
    delete static_cast<TorchEvent*>(event);
  }
  void record(void** event, const c10::Stream& stream, c10::DeviceIndex, c10::EventFlag) const override {
    auto*& own = *reinterpret_cast<TorchEvent**>(event);
    SimulatedDevice& device = simulated::device(stream.device_index());
    if (own == nullptr) own = new TorchEvent{device.torch_event(), stream.device_index()};
    device.torch_record(own->event, static_cast<int>(stream.id()));
  }
  void block(void* event, const c10::Stream& stream) const override {
    if (event == nullptr) return;
    const auto* own = static_cast<TorchEvent*>(event);
    TORCH_CHECK(own->index == stream.device_index(), "simulated streams wait for events of their own device");
    simulated::device(own->index).torch_wait(static_cast<int>(stream.id()), own->event);
  }
  bool queryEvent(void* event) const override {
    if (event == nullptr) return true;
    const auto* own = static_cast<TorchEvent*>(event);
    return simulated::device(own->index).torch_is_done(own->event);
  }
  void synchronizeEvent(void* event) const override {
    if (event == nullptr) return;
    const auto* own = static_cast<TorchEvent*>(event);
    simulated::device(own->index).torch_synchronize(own->event);
  }
  double elapsedTime(void*, void*, c10::DeviceIndex) const override { return 0; }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(settings().devices); }
  bool queryStream(const c10::Stream& stream) const override {
    return simulated::device(stream.device_index()).is_idle(static_cast<int>(stream.id()));
  }
  void synchronizeStream(const c10::Stream& stream) const override {
    simulated::device(stream.device_index()).synchronize(static_cast<int>(stream.id()));
  }
  void synchronizeDevice(c10::DeviceIndex index) const override {
    simulated::device(index < 0 ? current_device : index).synchronize();
  }
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (auto* const block = static_cast<Block*>(data.get_context()); block != nullptr)
      simulated::device(data.device().index()).use_on(block, static_cast<int>(stream.id()));
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// Memory --------------------------------------------------------------------------------------------------------------

template <int kDevice>
void free_block(void* block) {
  if (block != nullptr) simulated::device(kDevice).free(static_cast<Block*>(block));
}
constexpr c10::DeleterFnPtr kDeleters[] = {&free_block<0>, &free_block<1>, &free_block<2>, &free_block<3>};

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override { return allocate_on(bytes, current_device); }
  static c10::DataPtr allocate_on(std::size_t bytes, c10::DeviceIndex index) {
    const c10::Device where{kType, index};
    if (bytes == 0) return {nullptr, nullptr, kDeleters[index], where};
    Block* const block = simulated::device(index).allocate(bytes, static_cast<int>(current_stream_of(index)));
    TORCH_CHECK_WITH(OutOfMemoryError, block != nullptr, "the simulated device has no memory");
    return {block->data, block, kDeleters[index], where};
  }
  void copy_data(void*, const void*, std::size_t) const override { TORCH_CHECK(false, "not of a simulated device"); }
};
DeviceAllocator device_allocator;
REGISTER_ALLOCATOR(kType, &device_allocator);

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(std::size_t bytes) override {
    // Never freed: a copy from it may be on a stream.
    auto memory = simulated::device(current_device).allocate_host(std::max<std::size_t>(bytes, 1));
    TORCH_CHECK(memory.is_ok(), std::string(memory.status().message()));
    return {memory.value().data, memory.value().data, [](void*) {}, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, std::size_t bytes) const override { default_copy_data(to, from, bytes); }
};
PinnedAllocator pinned_allocator;

bool is_pinned(const void* data) {
  if (!any_made()) return false;
  for (int i = 0; i < settings().devices; ++i)
    if (simulated::device(i).is_pinned(data)) return true;
  return false;
}

/// The bytes that a tensor's elements span.
Access access(const at::Tensor& tensor, bool writes) {
  if (tensor.numel() == 0) return {};
  return {tensor.const_data_ptr(),
          at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.element_size()), writes};
}

/// The same memory for kernels: they run on the host, which cannot touch it at its address. Does not own it.
at::Tensor seen_by_kernels(const at::Tensor& tensor) {
  const auto options = at::TensorOptions().dtype(tensor.scalar_type()).device(at::kCPU);
  if (tensor.numel() == 0) return at::empty_strided(tensor.sizes(), tensor.strides(), options);
  const auto* const view = FakeDevice::host_view(static_cast<const std::byte*>(tensor.const_data_ptr()));
  at::Tensor seen =
      at::from_blob(const_cast<std::byte*>(view), tensor.sizes(), tensor.strides(), [](void*) {}, options, at::kCPU);
  if (tensor.is_conj()) seen._set_conj(true);
  if (tensor.is_neg()) seen._set_neg(true);
  return seen;
}

at::Tensor empty_on(const at::Tensor& like, c10::DeviceIndex index) {
  const c10::Device device{kType, index};
  const c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(like.sizes(), like.strides(), &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), like.scalar_type());
}

void resize_storage(const c10::Storage& storage, std::size_t bytes) {
  const c10::DeviceIndex index = storage.device().index();
  c10::DataPtr data = DeviceAllocator::allocate_on(bytes, index);
  const std::size_t kept = std::min(bytes, storage.nbytes());
  if (kept > 0) {
    const auto* const from = static_cast<const std::byte*>(storage.data());
    auto* const to = static_cast<std::byte*>(data.get());
    simulated::device(index).launch(static_cast<int>(current_stream_of(index)), "resizing a storage",
                                    {{from, kept, false}, {to, kept, true}},
                                    [from = FakeDevice::host_view(from), to = FakeDevice::host_view(to), kept] {
                                      std::memcpy(const_cast<std::byte*>(to), from, kept);
                                    });
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(settings().devices); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current_device = index; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    return std::exchange(current_device, index);
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator; }
  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Device getDeviceFromPtr(void* data) const override {
    for (int i = 0; i < settings().devices; ++i)
      if (simulated::device(i).owns(data)) return {kType, static_cast<c10::DeviceIndex>(i)};
    TORCH_CHECK(false, "not memory of a simulated device");
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, std::size_t bytes) const override {
    resize_storage(storage, bytes);
  }
};

// Operators -----------------------------------------------------------------------------------------------------------

at::Tensor empty_memory_format(c10::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                               std::optional<at::Device> device, std::optional<bool>,
                               std::optional<at::MemoryFormat> format) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                   c10::dtype_or_default(dtype), format);
}

at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                         std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  const c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
                                           c10::dtype_or_default(dtype));
}

const at::Tensor& resize_(const at::Tensor& self, c10::IntArrayRef size, std::optional<at::MemoryFormat>) {
  self.unsafeGetTensorImpl()->set_sizes_contiguous(size);
  const std::size_t bytes = at::detail::computeStorageNbytesContiguous(size, self.element_size(),
                                                                       static_cast<std::size_t>(self.storage_offset()));
  if (self.storage().nbytes() < bytes) resize_storage(self.storage(), bytes);
  return self;
}

/// Waits until the task is done.
void run_and_wait(SimulatedDevice& device, int stream, const char* what, const std::vector<Access>& accesses,
                  std::function<void()> task) {
  std::exception_ptr error;
  device.launch(stream, what, accesses, [&error, &task] {
    try {
      task();
    } catch (...) {
      error = std::current_exception();
    }
  });
  device.synchronize(stream);
  if (error) std::rethrow_exception(error);
}

at::Tensor copy_from(const at::Tensor& self, const at::Tensor& to, bool non_blocking) {
  const at::Tensor& there = to.device().type() == kType ? to : self;
  SimulatedDevice& device = simulated_of(there);
  const int stream = stream_of(there);
  const c10::DeviceGuard guard(there.device());
  if (self.device().type() == kType && to.device().type() == kType) {
    if (self.device() != to.device()) {  // as it comes
      simulated_of(self).synchronize(stream_of(self));
    }
    const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
    device.launch(stream, "copy_", {access(from, false), access(to, true)},
                  [from = seen_by_kernels(from), to = seen_by_kernels(to)] { to.copy_(from); });
    return to;
  }
  const bool in = to.device().type() == kType;
  const at::Tensor host = (in ? self : to);
  const bool waits = !non_blocking || !is_pinned(host.const_data_ptr());
  if (in) {
    const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
    const auto task = [from, to = seen_by_kernels(to)] { to.copy_(from); };
    if (waits)
      run_and_wait(device, stream, "copy_ from the host", {access(to, true)}, task);
    else
      device.launch(stream, "copy_ from the host", {access(to, true)}, task);
  } else {
    const at::Tensor from = self.sizes() == to.sizes() ? self : self.expand(to.sizes());
    const auto task = [from = seen_by_kernels(from), to] { to.copy_(from); };
    if (waits)
      run_and_wait(device, stream, "copy_ to the host", {access(from, false)}, task);
    else
      device.launch(stream, "copy_ to the host", {access(from, false)}, task);
  }
  return to;
}

at::Tensor copy_from_and_resize(const at::Tensor& self, const at::Tensor& to) {
  if (self.sizes() != to.sizes()) to.resize_(self.sizes());
  return copy_from(self, to, false);
}

at::Scalar local_scalar_dense(const at::Tensor& self) {
  at::Tensor value = at::empty_strided(self.sizes(), self.strides(), at::TensorOptions().dtype(self.scalar_type()));
  run_and_wait(simulated_of(self), stream_of(self), "item", {access(self, false)},
               [&value, from = seen_by_kernels(self)] { value.copy_(from); });
  return value.item();
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  if (auto* const block = static_cast<Block*>(self.storage().data_ptr().get_context()); block != nullptr)
    simulated_of(self).use_on(block, static_cast<int>(stream.id()));
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, int64_t offset, c10::IntArrayRef size,
                        c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(self, std::move(source), offset, size, stride);
}

/// Calls f on every tensor in a value, and puts there what it returns.
template <typename F>
c10::IValue mapped(const c10::IValue& value, const F& f) {
  if (value.isTensor()) return value.toTensor().defined() ? c10::IValue(f(value.toTensor())) : value;
  if (value.isTensorList()) {
    c10::List<at::Tensor> list;
    for (const at::Tensor& tensor : value.toTensorVector()) list.push_back(tensor.defined() ? f(tensor) : tensor);
    return list;
  }
  if (value.isOptionalTensorList()) {
    c10::List<std::optional<at::Tensor>> list;
    for (const std::optional<at::Tensor>& tensor : value.toOptionalTensorVector())
      list.push_back(tensor && tensor->defined() ? std::optional<at::Tensor>(f(*tensor)) : tensor);
    return list;
  }
  return value;
}

at::Tensor meta_of(const at::Tensor& tensor) {
  if (!tensor.defined() || (tensor.is_cpu() && tensor.dim() == 0)) return tensor;
  return at::empty_strided(tensor.sizes(), tensor.strides(), tensor.options().device(at::kMeta).requires_grad(false));
}

void by_the_cpu_kernel(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const c10::FunctionSchema& schema = op.schema();
  const std::size_t arguments = schema.arguments().size();
  const std::size_t first = stack->size() - arguments;
  const at::AutoDispatchBelowADInplaceOrView below;
  std::optional<c10::DeviceIndex> index;
  std::vector<Access> accesses;
  torch::jit::Stack on_cpu;
  torch::jit::Stack on_meta;
  for (std::size_t i = 0; i < arguments; ++i) {
    const c10::IValue& value = (*stack)[first + i];
    const c10::AliasInfo* const alias = schema.arguments()[i].alias_info();
    const bool writes = alias != nullptr && alias->isWrite();
    if (value.isDevice()) {
      if (value.toDevice().type() == kType)
        index = value.toDevice().has_index() ? value.toDevice().index() : current_device;
      on_cpu.emplace_back(c10::Device(at::kCPU));
      on_meta.emplace_back(c10::Device(at::kMeta));
      continue;
    }
    on_cpu.push_back(mapped(value, [&](const at::Tensor& tensor) {
      if (tensor.device().type() != kType) return tensor;
      index = tensor.device().index();
      accesses.push_back(access(tensor, writes));
      return seen_by_kernels(tensor);
    }));
    on_meta.push_back(mapped(value, meta_of));
  }
  const c10::DeviceIndex where = index.value_or(current_device);
  SimulatedDevice& device = simulated::device(where);
  const int stream = static_cast<int>(current_stream_of(where));
  const char* const name = op.operator_name().name.c_str();  // lives as long as the operator

  // Shapes of what is returned, where a meta kernel says them.
  bool has_meta = !op.hasTag(at::Tag::nondeterministic_seeded);
  for (const c10::Argument& returned : schema.returns())
    has_meta &= returned.type()->isSubtypeOf(*c10::TensorType::get()) ||
                returned.type()->isSubtypeOf(*c10::ListType::ofTensors());
  if (has_meta) {
    try {
      op.callBoxed(&on_meta);
    } catch (const std::exception&) {
      has_meta = false;
    }
  }
  if (!has_meta) {
    torch::jit::Stack results = on_cpu;
    run_and_wait(device, stream, name, accesses, [&] {
      const at::AutoDispatchBelowADInplaceOrView in_kernel;
      op.callBoxed(&results);
    });
    on_meta = std::move(results);
  }
  std::vector<c10::IValue> returned;
  std::vector<std::pair<std::size_t, at::Tensor>> to_fill;  // the return's number, and where it goes, seen by kernels
  std::vector<at::Tensor> list_slots;
  for (std::size_t r = 0; r < schema.returns().size(); ++r) {
    const c10::AliasInfo* const alias = schema.returns()[r].alias_info();
    const c10::IValue& like = on_meta[r];
    if (alias != nullptr) {
      std::size_t source = arguments;
      for (std::size_t i = 0; i < arguments; ++i) {
        const c10::AliasInfo* const other = schema.arguments()[i].alias_info();
        if (other != nullptr && other->beforeSets() == alias->beforeSets()) source = i;
      }
      TORCH_CHECK(source < arguments, "the simulated device cannot return ", op.operator_name());
      if (alias->isWrite()) {
        const c10::IValue& same = (*stack)[first + source];
        // out= may have been given a size by the meta kernel.
        if (same.isTensor() && like.isTensor() && like.toTensor().sizes() != same.toTensor().sizes()) {
          TORCH_CHECK(has_meta, op.operator_name(), " on a simulated device: out= has another size");
          same.toTensor().resize_(like.toTensor().sizes());
          for (std::size_t i = 0; i < arguments; ++i)
            if (i == source) on_cpu[i] = seen_by_kernels(same.toTensor());
          accesses.push_back(access(same.toTensor(), true));
        }
        returned.push_back(same);
        continue;
      }
      TORCH_CHECK(has_meta && like.isTensor(), "the simulated device cannot return ", op.operator_name());
      const at::Tensor& base = (*stack)[first + source].toTensor();
      const at::Tensor& view = like.toTensor();
      at::Tensor made =
          at::detail::make_tensor<c10::TensorImpl>(c10::Storage(base.storage()), base.key_set(), view.dtype());
      made.unsafeGetTensorImpl()->set_storage_offset(base.storage_offset() + view.storage_offset());
      made.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides());
      returned.push_back(made);
      on_cpu.clear();  // nothing to run
      continue;
    }
    returned.push_back(mapped(like, [&](const at::Tensor& tensor) {
      const at::Tensor own = empty_on(tensor, where);
      accesses.push_back(access(own, true));
      to_fill.emplace_back(r, seen_by_kernels(own));
      return own;
    }));
  }
  torch::jit::drop(*stack, arguments);
  for (c10::IValue& value : returned) stack->push_back(std::move(value));
  if (on_cpu.empty() && arguments > 0) return;

  const auto fill = [to_fill = std::move(to_fill)](const torch::jit::Stack& results) {
    std::size_t next = 0;
    for (std::size_t r = 0; r < results.size(); ++r)
      mapped(results[r], [&](const at::Tensor& tensor) {
        if (next < to_fill.size() && to_fill[next].first == r) to_fill[next++].second.copy_(tensor);
        return tensor;
      });
  };
  if (!has_meta) {
    std::vector<Access> filled;
    for (const Access& one : accesses)
      if (one.writes) filled.push_back(one);
    if (to_fill.empty() && filled.empty()) return;
    run_and_wait(device, stream, name, filled, [&] { fill(on_meta); });
    return;
  }
  device.launch(stream, name, accesses, [op, name, &device, results = std::move(on_cpu), fill]() mutable {
    const at::AutoDispatchBelowADInplaceOrView in_kernel;
    try {
      op.callBoxed(&results);
      fill(results);
    } catch (const std::exception& error) {
      device.order().report(std::string(name) + " failed on the device: " + error.what());
    }
  });
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&by_the_cpu_kernel>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty_memory_format);
  m.impl("empty_strided", &empty_strided);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &resize_);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_from_and_resize);
  m.impl("_local_scalar_dense", &local_scalar_dense);
  m.impl("record_stream", &record_stream);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", &at::native::set_);
  m.impl("set_.source_Storage_storage_offset", &set_storage);
}

// --- For hybridps

class SimulatedAccelerator final : public pg::Accelerator {
 public:
  core::Result<std::shared_ptr<device::Device>> open(int index) override {
    return std::shared_ptr<device::Device>(std::shared_ptr<void>(), &simulated::device(index));  // never destroyed
  }
  device::DeviceStream native(c10::Stream stream) override {
    return simulated::device(stream.device_index()).stream(static_cast<int>(stream.id()));
  }
  c10::Stream as_torch(device::DeviceStream stream, c10::Device device) override {
    return c10::Stream(c10::Stream::UNSAFE, device, simulated::device(device.index()).number_of(stream));
  }
  std::uint64_t pinned_bytes() override {
    std::uint64_t bytes = 0;
    for (int i = 0; any_made() && i < settings().devices; ++i) bytes += simulated::device(i).pinned_bytes();
    return bytes;
  }
  core::Result<std::shared_ptr<intranode::LocalGroups>> open_local_library() override {
    if (settings().library) return make_library();
    return core::Status(core::Code::kUnsupported, "there is no library for simulated devices");
  }
  void drain_local_library(std::chrono::milliseconds) override {}
};

void join_hybridps(const py::capsule& capsule) {
  const auto& seam = *static_cast<const pg::AcceleratorSeam*>(capsule.get_pointer());
  SimulatedDevice::look = seam.look;
  seam.add(kType, std::make_unique<SimulatedAccelerator>());
}

std::vector<std::string> reports() {
  std::vector<std::string> all;
  for (int i = 0; any_made() && i < settings().devices; ++i)
    for (std::string& text : simulated::device(i).order().reports())
      all.push_back("device " + std::to_string(i) + ": " + text);
  return all;
}

std::map<std::string, std::uint64_t> sites() {
  std::map<std::string, std::uint64_t> all;
  for (int i = 0; any_made() && i < settings().devices; ++i)
    for (const auto& [site, count] : simulated::device(i).sites()) all[site] += count;
  return all;
}

}  // namespace
}  // namespace hybridps::simulated

PYBIND11_MODULE(_simulated, module) {
  using namespace hybridps::simulated;
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  module.def("join_hybridps", &join_hybridps);
  module.def("device_count", [] { return settings().devices; });
  module.def("current_device", [] { return static_cast<int>(current_device); });
  module.def("set_device", [](int index) { current_device = static_cast<c10::DeviceIndex>(index); });
  module.def("reports", &reports, "What was found to be without order, over all devices of this process.");
  module.def("sites", &sites, "Call sites of events and flags in hybridps, and how often each was called.");
  module.def("library_calls", &library_calls);
  module.def("set_capturing", [](int index, bool on) { device(index).set_capturing(0, on); });
  module.def("bytes_in_use", [](int index) { return device(index).bytes_in_use(); });
  module.def(
      "copied_bytes",
      [](int index) {
        const auto copied = device(index).copied_bytes();
        return std::pair(copied.to_host, copied.to_device);
      },
      "To the host and to the device, so far.");
  module.def(
      "sleep",
      [](int microseconds) {
        device(current_device).launch(static_cast<int>(current_stream_of(current_device)), "sleep", {}, [microseconds] {
          std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        });
      },
      "A kernel of that length on the current stream.", py::call_guard<py::gil_scoped_release>());
}
