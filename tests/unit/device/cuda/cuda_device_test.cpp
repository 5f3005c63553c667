#include "hybridps/device/cuda/cuda_device.h"

namespace {
struct Cuda {
  static std::unique_ptr<hybridps::device::Device> make() {
    const auto& driver = hybridps::device::load_driver();
    if (!driver.is_ok()) return nullptr;
    auto device = hybridps::device::CudaDevice::open(driver.value(), 0);
    if (!device.is_ok()) return nullptr;
    return std::move(device).value();
  }
  static std::string why() { return hybridps::device::describe_cuda(); }
};
}  // namespace

#define HYBRIDPS_DEVICE_BACKENDS Cuda
#include "tests/unit/device/device_contract.h"

// --- Without a GPU: the calls, on a driver that only takes notes

namespace {

using namespace hybridps;
using device::CudaDevice;
using device::Driver;

struct Notes {
  std::vector<std::string> calls;
  int contexts = 0;  // pushed and not popped
  int outside = 0;   // calls without our context
  bool retained = false;
  CUresult next = CUDA_SUCCESS;  // of the next call that takes notes
  std::uint32_t wait_flags = 99;
  std::uint32_t write_flags = 99;
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::vector<std::array<std::uint64_t, 3>> batch;  // to, from, bytes
  std::vector<std::byte> host = std::vector<std::byte>(4096, std::byte{1});
};
Notes* notes = nullptr;

CUresult note(const char* call) {
  notes->calls.emplace_back(call);
  if (notes->contexts == 0) ++notes->outside;
  return std::exchange(notes->next, CUDA_SUCCESS);
}

Driver scripted() {
  Driver d;
  d.error_name = [](CUresult, const char** text) { return *text = "CUDA_ERROR_X", CUDA_SUCCESS; };
  d.error_string = [](CUresult, const char** text) { return *text = "of the test", CUDA_SUCCESS; };
  d.device_count = [](int* count) { return *count = 2, CUDA_SUCCESS; };
  d.device_get = [](CUdevice* device, int index) { return *device = index, CUDA_SUCCESS; };
  d.device_name = [](char* text, int, CUdevice) { return std::strcpy(text, "Scripted"), CUDA_SUCCESS; };
  d.device_bus_id = [](char* text, int, CUdevice device) {
    return std::strcpy(text, device == 1 ? "0000:41:00.0" : "0000:40:00.0"), CUDA_SUCCESS;
  };
  d.device_uuid = [](CUuuid* uuid, CUdevice device) {
    std::memset(uuid->bytes, 0xa0 + device, sizeof uuid->bytes);
    return CUDA_SUCCESS;
  };
  d.primary_context_retain = [](CUcontext* context, CUdevice) {
    notes->retained = true;
    *context = reinterpret_cast<CUcontext>(0x10);
    return CUDA_SUCCESS;
  };
  d.primary_context_release = [](CUdevice) { return notes->retained = false, CUDA_SUCCESS; };
  d.context_push = [](CUcontext) { return ++notes->contexts, CUDA_SUCCESS; };
  d.context_pop = [](CUcontext*) { return --notes->contexts, CUDA_SUCCESS; };
  d.priority_range = [](int* least, int* greatest) { return *least = 0, *greatest = -5, CUDA_SUCCESS; };
  d.stream_create = [](CUstream* stream, unsigned flags, int priority) {
    *stream = reinterpret_cast<CUstream>(0x20);
    return flags == CU_STREAM_NON_BLOCKING && priority == -5 ? note("stream_create") : CUDA_ERROR_INVALID_VALUE;
  };
  d.stream_destroy = [](CUstream) { return note("stream_destroy"); };
  d.event_create = [](CUevent* event, unsigned flags) {
    *event = reinterpret_cast<CUevent>(0x30);
    return flags == CU_EVENT_DISABLE_TIMING ? note("event_create") : CUDA_ERROR_INVALID_VALUE;
  };
  d.event_destroy = [](CUevent) { return note("event_destroy"); };
  d.event_record = [](CUevent, CUstream) { return note("event_record"); };
  d.event_query = [](CUevent) { return note("event_query"); };
  d.stream_wait_event = [](CUstream, CUevent, unsigned) { return note("stream_wait_event"); };
  d.stream_wait_value = [](CUstream, CUdeviceptr, cuuint32_t, unsigned flags) {
    notes->wait_flags = flags;
    return note("stream_wait_value");
  };
  d.stream_write_value = [](CUstream, CUdeviceptr, cuuint32_t, unsigned flags) {
    notes->write_flags = flags;
    return note("stream_write_value");
  };
  d.stream_is_capturing = [](CUstream, CUstreamCaptureStatus* status) {
    *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    return note("stream_is_capturing");
  };
  d.exchange_capture_mode = [](CUstreamCaptureMode* mode) { return std::swap(*mode, notes->mode), CUDA_SUCCESS; };
  d.copy_to_host = [](void*, CUdeviceptr, std::size_t, CUstream) { return note("copy_to_host"); };
  d.copy_to_device = [](CUdeviceptr, const void*, std::size_t, CUstream) { return note("copy_to_device"); };
  d.copy_within = [](CUdeviceptr, CUdeviceptr, std::size_t, CUstream) { return note("copy_within"); };
#if CUDA_VERSION >= 12080
  d.copy_batch = [](CUdeviceptr* to, CUdeviceptr* from, std::size_t* sizes, std::size_t many, CUmemcpyAttributes* how,
                    std::size_t* first, std::size_t hows, std::size_t*, CUstream stream) {
    const bool right = hows == 1 && first[0] == 0 && how->srcAccessOrder == CU_MEMCPY_SRC_ACCESS_ORDER_STREAM;
    if (!right || stream == nullptr) return CUDA_ERROR_INVALID_VALUE;
    for (std::size_t i = 0; i < many; ++i) notes->batch.push_back({to[i], from[i], sizes[i]});
    return note("copy_batch");
  };
#endif
  d.host_allocate = [](void** data, std::size_t, unsigned flags) {
    *data = notes->host.data();
    const bool relaxed = notes->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    return relaxed && flags == (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP) ? note("host_allocate")
                                                                                      : CUDA_ERROR_INVALID_VALUE;
  };
  d.host_device_pointer = [](CUdeviceptr* address, void*, unsigned) {
    *address = 0x4000;
    return note("host_device_pointer");
  };
  d.host_free = [](void*) { return note("host_free"); };
  d.device_allocate = [](CUdeviceptr* address, std::size_t) {
    *address = 0x5000;
    return notes->mode == CU_STREAM_CAPTURE_MODE_RELAXED ? note("device_allocate") : CUDA_ERROR_INVALID_VALUE;
  };
  d.device_free = [](CUdeviceptr address) {
    return address == 0x5000 ? note("device_free") : CUDA_ERROR_INVALID_VALUE;
  };
  d.pointer_set_attribute = [](const void* value, CUpointer_attribute attribute, CUdeviceptr address) {
    const bool right = attribute == CU_POINTER_ATTRIBUTE_SYNC_MEMOPS && address == 0x5000;
    return right && *static_cast<const unsigned*>(value) == 1 ? note("sync_memops") : CUDA_ERROR_INVALID_VALUE;
  };
  return d;
}

TEST_CASE("device/cuda: every call is made in the device's context and puts back what was", "[device][fast]") {
  Notes book;
  notes = &book;
  const Driver driver = scripted();
  {
    const auto opened = CudaDevice::open(driver, 1);
    REQUIRE(opened.is_ok());
    CudaDevice& cuda = *opened.value();
    CHECK(cuda.describe() == "CUDA device 1 (Scripted)");
    const auto stream = cuda.make_stream().value();
    const auto event = cuda.make_event().value();
    const auto memory = cuda.allocate_host(4096).value();
    CHECK(memory.device_address == 0x4000);
    CHECK(memory.data[4095] == std::byte{0});
    CHECK(cuda.pinned_bytes() == 4096);
    CHECK(book.mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    CHECK(cuda.record(event, stream).is_ok());
    CHECK(cuda.wait(stream, event).is_ok());
    CHECK(cuda.copy_to_host(stream, memory.data, memory.data, 8).is_ok());
    CHECK(cuda.copy_to_device(stream, memory.data, memory.data, 8).is_ok());
    CHECK(cuda.copy_within(stream, memory.data, memory.data, 8).is_ok());
    CHECK(cuda.write_flag(stream, memory.flag_at(8), 1).is_ok());
    CHECK(cuda.wait_flag(stream, memory.flag_at(8), 1).is_ok());
    CHECK(book.wait_flags == CU_STREAM_WAIT_VALUE_GEQ);
    CHECK(book.write_flags == CU_STREAM_WRITE_VALUE_DEFAULT);
    CHECK(cuda.is_capturing(stream).value());
    book.next = CUDA_ERROR_NOT_READY;
    CHECK_FALSE(cuda.is_done(event).value());
    CHECK(cuda.is_done(event).value());
    CHECK(cuda.physical_id().value() == "0000:41:00.0 a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1a1");
    const auto inside = [&] {
      CHECK(book.contexts == 1);
      return core::Status(core::Code::kBusy, "as it came");
    };
    CHECK(cuda.run_here(inside).message() == "as it came");
    std::byte* const own = cuda.allocate_device(1 << 20).value();
    CHECK(reinterpret_cast<std::uintptr_t>(own) == 0x5000);
    CHECK(book.calls.back() == "sync_memops");
    CHECK(book.mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    cuda.free_device(own);
    CHECK(book.calls.back() == "device_free");
    const auto before = book.calls.size();
    CHECK(cuda.copy_to_host(stream, nullptr, nullptr, 0).is_ok());
    CHECK(book.calls.size() == before);
    cuda.destroy(event);
    cuda.destroy(stream);
    cuda.free_host(memory);
    CHECK(cuda.pinned_bytes() == 0);
  }
  CHECK(book.contexts == 0);
  CHECK(book.outside == 0);
  CHECK_FALSE(book.retained);
  CHECK(book.calls.size() == 20);
}

TEST_CASE("device/cuda: what the driver refuses comes back with the call and CUDA's words", "[device][fast]") {
  Notes book;
  notes = &book;
  const Driver driver = scripted();
  CHECK(CudaDevice::open(driver, 2).status().code() == core::Code::kInvalidArgument);
  const auto opened = CudaDevice::open(driver, 0);
  REQUIRE(opened.is_ok());
  CudaDevice& cuda = *opened.value();
  book.next = CUDA_ERROR_ILLEGAL_ADDRESS;
  CHECK(cuda.record({}, {}).to_string() == "internal error: CUDA: cuEventRecord failed: CUDA_ERROR_X (of the test)");
  book.next = CUDA_ERROR_OUT_OF_MEMORY;
  CHECK(cuda.allocate_host(1 << 20).status().code() == core::Code::kOutOfResources);
  CHECK(cuda.pinned_bytes() == 0);
  CHECK(book.calls.back() == "host_free");
  book.next = CUDA_ERROR_OUT_OF_MEMORY;
  const auto none = cuda.allocate_device(1 << 20);
  CHECK(none.status().code() == core::Code::kOutOfResources);
  CHECK(std::string(none.status().message()).find("1048576 bytes of CUDA device 0") != std::string::npos);
  CHECK(book.calls.back() == "device_allocate");
  CHECK(book.contexts == 0);
}

#if CUDA_VERSION >= 12080
TEST_CASE("device/cuda: a list of copies is one call, where there are several and the driver has it",
          "[device][fast]") {
  using Batch = std::vector<std::array<std::uint64_t, 3>>;
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<void*>(address); };
  const device::CopyRun copies[] = {{at(0x100), at(0x200), 8}, {at(0x110), at(0x210), 0}, {at(0x120), at(0x220), 4}};
  const std::span all(copies);
  const device::DeviceStream stream{at(0x20)};
  const device::DeviceStream default_stream;
  using device::CopyWay;
  for (const bool has : {true, false}) {
    Notes book;
    notes = &book;
    Driver driver = scripted();
    if (!has) driver.copy_batch = nullptr;
    const auto opened = CudaDevice::open(driver, 0);
    REQUIRE(opened.is_ok());
    CudaDevice& cuda = *opened.value();
    using Calls = std::vector<std::string>;
    CHECK(cuda.copy_all(stream, CopyWay::kToHost, all).is_ok());
    CHECK(book.calls == (has ? Calls{"copy_batch"} : Calls{"copy_to_host", "copy_to_host"}));
    CHECK(book.batch == (has ? Batch{{0x100, 0x200, 8}, {0x120, 0x220, 4}} : Batch{}));
    book.calls.clear();
    CHECK(cuda.copy_all(stream, CopyWay::kWithin, all.first(2)).is_ok());  // one of them is empty
    CHECK(cuda.copy_all(stream, CopyWay::kToDevice, all.first(1)).is_ok());
    CHECK(cuda.copy_all(default_stream, CopyWay::kToDevice, all).is_ok());
    CHECK(cuda.copy_all(stream, CopyWay::kToHost, {}).is_ok());
    CHECK(book.calls == Calls{"copy_within", "copy_to_device", "copy_to_device", "copy_to_device"});
    book.next = CUDA_ERROR_ILLEGAL_ADDRESS;
    const core::Status failed = cuda.copy_all(stream, CopyWay::kToHost, all);
    CHECK(failed.to_string() == std::string("internal error: CUDA: ") +
                                    (has ? "cuMemcpyBatchAsync" : "cuMemcpyDtoHAsync") +
                                    " failed: CUDA_ERROR_X (of the test)");
    CHECK(book.contexts == 0);
    CHECK(book.outside == 0);
  }
}

TEST_CASE("device/cuda: a driver that refuses a list of copies gets them one by one from then on", "[device][fast]") {
  const auto at = [](std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); };
  std::vector<device::CopyRun> copies;
  for (std::uintptr_t i = 1; i <= 1000; ++i) copies.push_back({at(0x1000 * i), at(0x800000 * i), 8});
  Notes book;
  notes = &book;
  const auto opened = CudaDevice::open(scripted(), 0);
  REQUIRE(opened.is_ok());
  CudaDevice& cuda = *opened.value();
  const device::DeviceStream stream{at(0x20)};
  CHECK(cuda.copy_all(stream, device::CopyWay::kToHost, copies).is_ok());
  CHECK(book.calls == std::vector<std::string>{"copy_batch", "copy_batch"});  // 512 at most in each
  CHECK(book.batch.size() == 1000);
  book.calls.clear();
  book.next = GENERATE(CUDA_ERROR_NOT_SUPPORTED, CUDA_ERROR_INVALID_VALUE);
  const std::span two = std::span<const device::CopyRun>(copies).first(2);
  CHECK(cuda.copy_all(stream, device::CopyWay::kToHost, two).is_ok());
  CHECK(book.calls == std::vector<std::string>{"copy_batch", "copy_to_host", "copy_to_host"});
  book.calls.clear();
  CHECK(cuda.copy_all(stream, device::CopyWay::kToDevice, two).is_ok());
  CHECK(book.calls == std::vector<std::string>{"copy_to_device", "copy_to_device"});
}
#endif

// --- Kernels

struct Compiler {
  std::vector<std::string> options;
  std::string source;
  int programs = 0;  // made and not destroyed
  int compiled = 0;
  int result = 0;
};
Compiler* compiler = nullptr;

device::Nvrtc scripted_nvrtc() {
  device::Nvrtc n;
  n.create = [](void** program, const char* source, const char*, int, const char* const*, const char* const*) {
    compiler->source = source;
    *program = compiler;
    return ++compiler->programs, 0;
  };
  n.destroy = [](void**) { return --compiler->programs, 0; };
  n.compile = [](void*, int count, const char* const* texts) {
    compiler->options.assign(texts, texts + count);
    return ++compiler->compiled, compiler->result;
  };
  n.log_size = [](void*, std::size_t* bytes) { return *bytes = 6, 0; };
  n.log = [](void*, char* text) { return std::strcpy(text, "line\n"), 0; };
  n.binary_size = [](void*, std::size_t* bytes) { return *bytes = 4, 0; };
  n.binary = [](void*, char* out) { return std::memcpy(out, "cub", 4), 0; };
  n.error_string = [](int) { return "NVRTC_ERROR_X"; };
  return n;
}

struct Launched {
  unsigned blocks = 0;
  unsigned threads = 0;
  CUfunction kernel = nullptr;
  std::uint64_t elements = 0;
  float factor = 0.0F;
} launched;

Driver scripted_with_kernels() {
  Driver d = scripted();
  d.device_attribute = [](int* value, CUdevice_attribute attribute, CUdevice) {
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR ? 12 : 1;
    return CUDA_SUCCESS;
  };
  d.module_load = [](CUmodule* module, const void* image) {
    *module = reinterpret_cast<CUmodule>(0x60);
    const bool right = std::memcmp(image, "cub", 4) == 0 && notes->mode == CU_STREAM_CAPTURE_MODE_RELAXED;
    return right ? note("module_load") : CUDA_ERROR_INVALID_VALUE;
  };
  d.module_unload = [](CUmodule) { return note("module_unload"); };
  d.module_function = [](CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(std::string(name) == "hybridps_int8_encode" ? 0x71 : 0x72);
    return CUDA_SUCCESS;
  };
  d.launch = [](CUfunction kernel, unsigned x, unsigned, unsigned, unsigned threads, unsigned, unsigned, unsigned,
                CUstream, void** arguments, void**) {
    const bool encodes = reinterpret_cast<std::uintptr_t>(kernel) == 0x71;
    launched = {x, threads, kernel, *static_cast<std::uint64_t*>(arguments[2]),
                encodes ? *static_cast<float*>(arguments[3]) : 0.0F};
    return note("launch");
  };
  return d;
}

TEST_CASE("device/cuda: kernels are made once, for the GPU that is there, and launched in its context",
          "[device][fast]") {
  Notes book;
  notes = &book;
  Compiler made;
  compiler = &made;
  const Driver driver = scripted_with_kernels();
  const device::Nvrtc nvrtc = scripted_nvrtc();
  {
    const auto opened = CudaDevice::open(driver, 0, &nvrtc);
    REQUIRE(opened.is_ok());
    CudaDevice& cuda = *opened.value();
    REQUIRE(cuda.prepare_int8().is_ok());
    REQUIRE(cuda.prepare_int8().is_ok());
    CHECK(made.compiled == 1);
    CHECK(made.programs == 0);
    CHECK(made.options.front() == "--gpu-architecture=sm_121");
    CHECK(made.source.find("hybridps_int8_encode") != std::string::npos);
    CHECK(book.mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
    std::byte codes;
    float elements = 0;
    REQUIRE(cuda.encode_int8({}, &codes, &elements, 513, 0.5F).is_ok());
    CHECK(launched.blocks == 3);
    CHECK(launched.threads == 256);
    CHECK(launched.elements == 513);
    CHECK(launched.factor == 0.5F);
    CHECK(reinterpret_cast<std::uintptr_t>(launched.kernel) == 0x71);
    REQUIRE(cuda.decode_int8({}, &elements, &codes, 512).is_ok());
    CHECK(launched.blocks == 2);
    CHECK(reinterpret_cast<std::uintptr_t>(launched.kernel) == 0x72);
    const auto calls = book.calls.size();
    CHECK(cuda.encode_int8({}, &codes, &elements, 0, 1.0F).is_ok());
    CHECK(book.calls.size() == calls);
    book.next = CUDA_ERROR_ILLEGAL_ADDRESS;
    CHECK(cuda.decode_int8({}, &elements, &codes, 1).to_string() ==
          "internal error: CUDA: cuLaunchKernel failed: CUDA_ERROR_X (of the test)");
  }
  CHECK(book.calls.back() == "module_unload");
  CHECK(book.contexts == 0);
  CHECK(book.outside == 0);
}

TEST_CASE("device/cuda: kernels that cannot be compiled or loaded are no error but a reason", "[device][fast]") {
  Notes book;
  notes = &book;
  Compiler made;
  compiler = &made;
  const Driver driver = scripted_with_kernels();
  const device::Nvrtc nvrtc = scripted_nvrtc();
  {
    made.result = 5;
    const auto opened = CudaDevice::open(driver, 0, &nvrtc);
    const core::Status status = opened.value()->prepare_int8();
    CHECK(status.code() == core::Code::kUnsupported);
    CHECK(status.message() == "NVRTC cannot compile for compute capability 12.1: NVRTC_ERROR_X: line");
    CHECK(made.programs == 0);
    made.result = 0;
    CHECK(opened.value()->prepare_int8().message() == status.message());  // asked once
  }
  const auto opened = CudaDevice::open(driver, 0, &nvrtc);
  book.next = CUDA_ERROR_NO_BINARY_FOR_GPU;
  CHECK_FALSE(opened.value()->prepare_int8().is_ok());
  CHECK(book.contexts == 0);
  CHECK(book.mode == CU_STREAM_CAPTURE_MODE_GLOBAL);
}

std::size_t count_of(const std::string& text, const std::string& what) {
  std::size_t found = 0;
  for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) ++found;
  return found;
}

// Needs no GPU. What rounds must be there, and nothing that rounds otherwise.
TEST_CASE("device/cuda: NVRTC compiles the kernels, with the arithmetic as it is written", "[device][fast]") {
  const auto& nvrtc = device::load_nvrtc();
  if (!nvrtc.is_ok()) {
    WARN("skipped: " << nvrtc.status().message());
    return;
  }
  int compiled = 0;
  for (const int capability : {70, 75, 80, 86, 89, 90, 100, 120}) {
    INFO(capability);
    const auto ptx = device::compile(nvrtc.value(), device::kInt8Source, capability, /*binary=*/false);
    if (!ptx.is_ok()) {  // an architecture that this NVRTC does not know any more, or not yet
      INFO(ptx.status().message());
      CHECK(std::string(ptx.status().message()).find("invalid value for --gpu-architecture") != std::string::npos);
      continue;
    }
    ++compiled;
    const std::string& text = ptx.value();
    CHECK(count_of(text, ".entry hybridps_int8_encode(") == 1);
    CHECK(count_of(text, ".entry hybridps_int8_decode(") == 1);
    CHECK(count_of(text, "fma") == 0);
    CHECK(count_of(text, ".ftz") == 0);
    CHECK(count_of(text, "div.") == count_of(text, "div.rn.f32"));
    CHECK(count_of(text, "div.rn.f32") >= 2);
    CHECK(count_of(text, ".approx") == 0);
    const auto binary = device::compile(nvrtc.value(), device::kInt8Source, capability);
    REQUIRE(binary.is_ok());
    CHECK(binary.value().substr(1, 3) == "ELF");
  }
  CHECK(compiled >= 4);
  const auto wrong = device::compile(nvrtc.value(), "__global__ void kernel() { nothing; }", 80);
  CHECK(std::string(wrong.status().message()).find("\"nothing\" is undefined") != std::string::npos);
}

TEST_CASE("device/cuda: a machine without a driver or a device is told so", "[device][fast]") {
  const std::string text = device::describe_cuda();
  const auto& driver = device::load_driver();
  if (driver.is_ok()) {
    CHECK(text.find("device") != std::string::npos);
  } else {
    CHECK(driver.status().code() == core::Code::kUnsupported);
    CHECK(text == "no device: " + std::string(driver.status().message()));
  }
}

}  // namespace
