// tests/support/checked_driver.h: a CUDA driver that does its work on FakeDevices and checks what CUDA demands.
//
// Model    The table of device::Driver. Each device is a FakeDevice: hardware queues, a finite launch queue, the
//          driver's lock, copies as CUDA makes them. Above that:
//            contexts  current per thread; a call without one answers CUDA_ERROR_INVALID_CONTEXT, as with ctypes
//            captures  a query or allocation on a thread that is not relaxed spoils a capture that is under way
//            kernels   the first launch of a function waits for the device, since CUDA loads it then
//            errors    sticky: after break_down() every call fails
//            batches   no order among the copies, and the list as CUDA asks for it
//            memory operations that are not supported, a driver that is gone (a process that exits), and one before
//            CUDA 12.8, by option
//          What CUDA would bear but hybridps must not do is in violations(). counted() counts the calls of a thread.
// Threads  any. One CheckedDriver at a time.
// Source   CUDA driver API 13.0: "API synchronization behavior", "Stream management",
// cuThreadExchangeStreamCaptureMode.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hybridps/device/cuda/cuda_device.h"
#include "hybridps/device/fake/fake_device.h"

namespace hybridps::test {

class CheckedDriver {
 public:
  /// `fails_at_once`: a violation fails a core::check(), hence the unit program.
  explicit CheckedDriver(bool fails_at_once = false)
      : fails_at_once_(fails_at_once), driver_(table()), nvrtc_(compiler()) {
    self = this;
  }
  ~CheckedDriver() {
    if (self == this) self = nullptr;
  }

  const device::Driver& driver() const { return driver_; }
  /// A CudaDevice of this driver on `fake`.
  std::shared_ptr<device::CudaDevice> open(std::shared_ptr<device::FakeDevice> fake) {
    int index = 0;
    {
      const std::lock_guard lock(mutex_);
      index = static_cast<int>(fakes_.size());
      fakes_.push_back(fake);
    }
    auto opened = device::CudaDevice::open(driver_, index, &nvrtc_);
    if (!opened.is_ok()) return nullptr;
    struct Both {
      std::shared_ptr<device::FakeDevice> fake;
      std::unique_ptr<device::CudaDevice> cuda;  // ends first
    };
    auto both = std::make_shared<Both>(Both{std::move(fake), std::move(opened).value()});
    return {both, both->cuda.get()};
  }

  std::vector<std::string> violations() {
    const std::lock_guard lock(mutex_);
    return violations_;
  }
  /// The device that open() has put at this index.
  std::shared_ptr<device::FakeDevice> fake(int index) {
    const std::lock_guard lock(mutex_);
    return fakes_[static_cast<std::size_t>(index)].lock();
  }
  int calls() const { return calls_.load(); }
  /// The calls of this thread while `body` runs, by kind.
  static std::map<std::string, int> counted(const std::function<void()>& body) {
    std::map<std::string, int> counts;
    counts_of_thread = &counts;
    body();
    counts_of_thread = nullptr;
    return counts;
  }
  int contexts_retained() const { return contexts_retained_.load(); }
  /// From now on streams cannot write or wait for words.
  void refuse_memory_operations() { memory_operations_ = false; }
#if CUDA_VERSION >= 12080
  /// From now on the driver has, or has no, batches of copies. While no device is in use.
  void set_batches(bool has) { driver_.copy_batch = has ? copy_batch : nullptr; }
#endif
  /// The process exits: the driver answers nothing any more.
  void leave() { gone_ = true; }
  /// A graph is recorded on this thread, in CUDA's default mode.
  void begin_capture() {
    const std::lock_guard lock(mutex_);
    captures_.insert(std::this_thread::get_id());
    spoiled_ = false;
  }
  /// Whether the graph can be used.
  bool end_capture() {
    const std::lock_guard lock(mutex_);
    captures_.erase(std::this_thread::get_id());
    return !spoiled_;
  }

 private:
  using Fake = device::FakeDevice;

  static CUresult of(const core::Status& status) {
    text = std::string(status.message());
    if (status.is_ok()) return CUDA_SUCCESS;
    if (status.code() == core::Code::kUnsupported) return CUDA_ERROR_NOT_SUPPORTED;
    return status.code() == core::Code::kOutOfResources ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_ILLEGAL_ADDRESS;
  }
  static CUresult error(CUresult result, const char* why) { return text = why, result; }
  void violated(std::string what) {
    static_cast<void>(core::check(!fails_at_once_, what.c_str()));
    const std::lock_guard lock(mutex_);
    violations_.push_back(std::move(what));
  }
  static CUcontext context_of(int index) { return reinterpret_cast<CUcontext>(static_cast<std::uintptr_t>(index) + 1); }

  static void count(const char* kind) {
    if (counts_of_thread != nullptr) ++(*counts_of_thread)[kind];
  }
  /// A call in the current context.
  template <typename Call>
  static CUresult call(const Call& body) {
    ++self->calls_;
    if (self->gone_) return error(CUDA_ERROR_DEINITIALIZED, "driver shutting down");
    if (contexts.empty()) return error(CUDA_ERROR_INVALID_CONTEXT, "invalid device context");
    const auto fake = self->fake(static_cast<int>(reinterpret_cast<std::uintptr_t>(contexts.back()) - 1));
    if (!fake) return error(CUDA_ERROR_CONTEXT_IS_DESTROYED, "context is destroyed");
    return body(*fake);
  }
  /// A call that a capture does not bear.
  template <typename Call>
  static CUresult unsafe_call(const Call& body) {
    if (mode != CU_STREAM_CAPTURE_MODE_RELAXED) {
      const std::lock_guard lock(self->mutex_);
      const bool any = mode == CU_STREAM_CAPTURE_MODE_GLOBAL ? !self->captures_.empty()
                                                             : self->captures_.count(std::this_thread::get_id()) > 0;
      if (any) {
        self->spoiled_ = true;
        return error(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, "operation not permitted when stream is capturing");
      }
    }
    return call(body);
  }
  static CUresult memory_operation(const char* name, CUdeviceptr address, CUstream stream,
                                   const std::function<core::Status(Fake&, device::DeviceStream, device::Flag)>& put) {
    return call([&](Fake& fake) {
      if (!self->memory_operations_) return error(CUDA_ERROR_NOT_SUPPORTED, "operation not supported");
      if (address % 4 != 0 || !fake.is_pinned(reinterpret_cast<void*>(address))) {
        self->violated(std::string(name) + " of a word that is not in mapped memory");
        return error(CUDA_ERROR_INVALID_VALUE, "invalid argument");
      }
      return of(put(fake, {stream}, {reinterpret_cast<std::atomic<std::uint32_t>*>(address), address}));
    });
  }
#if CUDA_VERSION >= 12080
  static CUresult copy_batch(CUdeviceptr* to, CUdeviceptr* from, std::size_t* sizes, std::size_t many,
                             CUmemcpyAttributes* attributes, std::size_t* first_of, std::size_t attributes_many,
                             std::size_t* failed, CUstream stream);
  static std::string wrong_in_batch(const CUdeviceptr* to, const CUdeviceptr* from, const std::size_t* sizes,
                                    std::size_t many, const CUmemcpyAttributes* attributes, const std::size_t* first_of,
                                    std::size_t attributes_many, CUstream stream);
#endif
  device::Driver table();
  void add_streams(device::Driver& d);
  void add_memory(device::Driver& d);
  void add_kernels(device::Driver& d);
  static device::Nvrtc compiler();

  static inline CheckedDriver* self = nullptr;
  static inline thread_local std::vector<CUcontext> contexts;
  static inline thread_local CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_GLOBAL;
  static inline thread_local std::string text;  // of the last error
  static inline thread_local std::map<std::string, int>* counts_of_thread = nullptr;

  const bool fails_at_once_;
  std::mutex mutex_;
  std::vector<std::weak_ptr<Fake>> fakes_;
  std::map<void*, device::HostMemory> host_;
  std::vector<std::string> violations_;
  std::set<std::thread::id> captures_;
  std::set<std::pair<Fake*, CUfunction>> loaded_;
  bool spoiled_ = false;
  std::atomic<bool> memory_operations_{true};
  std::atomic<bool> gone_{false};
  std::atomic<int> calls_{0};
  std::atomic<int> contexts_retained_{0};
  device::Driver driver_;
  const device::Nvrtc nvrtc_;
};

inline device::Driver CheckedDriver::table() {
  device::Driver d;
  d.error_name = [](CUresult result, const char** name) {
    switch (result) {
      case CUDA_ERROR_OUT_OF_MEMORY: *name = "CUDA_ERROR_OUT_OF_MEMORY"; break;
      case CUDA_ERROR_INVALID_CONTEXT: *name = "CUDA_ERROR_INVALID_CONTEXT"; break;
      case CUDA_ERROR_NOT_SUPPORTED: *name = "CUDA_ERROR_NOT_SUPPORTED"; break;
      case CUDA_ERROR_DEINITIALIZED: *name = "CUDA_ERROR_DEINITIALIZED"; break;
      case CUDA_ERROR_ILLEGAL_ADDRESS: *name = "CUDA_ERROR_ILLEGAL_ADDRESS"; break;
      default: *name = "CUDA_ERROR"; break;
    }
    return CUDA_SUCCESS;
  };
  d.error_string = [](CUresult, const char** string) { return *string = text.c_str(), CUDA_SUCCESS; };
  d.device_count = [](int* count) {
    const std::lock_guard lock(self->mutex_);
    return *count = static_cast<int>(self->fakes_.size()), CUDA_SUCCESS;
  };
  d.device_get = [](CUdevice* device, int index) { return *device = index, CUDA_SUCCESS; };
  d.device_name = [](char* name, int bytes, CUdevice device) {
    std::snprintf(name, static_cast<std::size_t>(bytes), "%s", self->fake(device)->describe().c_str());
    return CUDA_SUCCESS;
  };
  d.device_bus_id = [](char* id, int bytes, CUdevice device) {
    const auto found = self->fake(device)->physical_id();
    if (found.is_ok()) std::snprintf(id, static_cast<std::size_t>(bytes), "%s", found.value().c_str());
    return of(found.status());
  };
  d.device_uuid = [](CUuuid* uuid, CUdevice device) {
    const auto id = self->fake(device)->physical_id();
    const std::size_t hash = std::hash<std::string>()(id.is_ok() ? id.value() : "");
    std::memset(uuid->bytes, 0, sizeof uuid->bytes);
    std::memcpy(uuid->bytes, &hash, sizeof hash);
    return of(id.status());
  };
  d.device_attribute = [](int* value, CUdevice_attribute, CUdevice) { return *value = 9, CUDA_SUCCESS; };
  d.primary_context_retain = [](CUcontext* context, CUdevice device) {
    ++self->contexts_retained_;
    return *context = context_of(device), CUDA_SUCCESS;
  };
  d.primary_context_release = [](CUdevice) {
    if (self != nullptr) --self->contexts_retained_;
    return CUDA_SUCCESS;
  };
  d.context_push = [](CUcontext context) {
    count("context");
    if (self->gone_) return error(CUDA_ERROR_DEINITIALIZED, "driver shutting down");
    return contexts.push_back(context), CUDA_SUCCESS;
  };
  d.context_pop = [](CUcontext* context) {
    if (contexts.empty()) return error(CUDA_ERROR_INVALID_CONTEXT, "invalid device context");
    *context = contexts.back();
    return contexts.pop_back(), CUDA_SUCCESS;
  };
  d.exchange_capture_mode = [](CUstreamCaptureMode* other) { return std::swap(*other, mode), CUDA_SUCCESS; };
  add_streams(d);
  add_memory(d);
  add_kernels(d);
  return d;
}

inline void CheckedDriver::add_streams(device::Driver& d) {
  d.priority_range = [](int* least, int* greatest) { return *least = 0, *greatest = -5, CUDA_SUCCESS; };
  d.stream_create = [](CUstream* stream, unsigned flags, int priority) {
    count("create");
    return call([&](Fake& fake) {
      if (flags != CU_STREAM_NON_BLOCKING) self->violated("a stream that waits for the legacy default stream");
      if (priority != -5) self->violated("a stream without the highest priority");
      const auto made = fake.make_stream();
      if (made.is_ok()) *stream = static_cast<CUstream>(made.value().native);
      return of(made.status());
    });
  };
  d.stream_destroy = [](CUstream stream) {
    return call([&](Fake& fake) { return fake.destroy(device::DeviceStream{stream}), CUDA_SUCCESS; });
  };
  d.event_create = [](CUevent* event, unsigned) {
    count("create");
    return call([&](Fake& fake) {
      const auto made = fake.make_event();
      if (made.is_ok()) *event = static_cast<CUevent>(made.value().native);
      return of(made.status());
    });
  };
  d.event_destroy = [](CUevent event) {
    return call([&](Fake& fake) { return fake.destroy(device::DeviceEvent{event}), CUDA_SUCCESS; });
  };
  d.event_record = [](CUevent event, CUstream stream) {
    count("record");
    return call([&](Fake& fake) { return of(fake.record({event}, {stream})); });
  };
  d.event_query = [](CUevent event) {
    count("query");
    return unsafe_call([&](Fake& fake) {
      const auto done = fake.is_done({event});
      return done.is_ok() && !done.value() ? CUDA_ERROR_NOT_READY : of(done.status());
    });
  };
  d.stream_wait_event = [](CUstream stream, CUevent event, unsigned) {
    count("wait for an event");
    return call([&](Fake& fake) { return of(fake.wait({stream}, {event})); });
  };
  d.stream_wait_value = [](CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    count("wait for a flag");
    if (flags != CU_STREAM_WAIT_VALUE_GEQ) self->violated("a stream waits otherwise than in a circle");
    return memory_operation("cuStreamWaitValue32", address, stream,
                            [value](Fake& f, auto s, auto flag) { return f.wait_flag(s, flag, value); });
  };
  d.stream_write_value = [](CUstream stream, CUdeviceptr address, cuuint32_t value, unsigned flags) {
    count("write a flag");
    if (flags != CU_STREAM_WRITE_VALUE_DEFAULT) self->violated("a stream writes a word without a barrier before it");
    return memory_operation("cuStreamWriteValue32", address, stream,
                            [value](Fake& f, auto s, auto flag) { return f.write_flag(s, flag, value); });
  };
  d.stream_is_capturing = [](CUstream stream, CUstreamCaptureStatus* status) {
    count("ask for a capture");
    return call([&](Fake& fake) {
      const auto found = fake.is_capturing({stream});
      const bool captures = found.is_ok() && found.value();
      *status = captures ? CU_STREAM_CAPTURE_STATUS_ACTIVE : CU_STREAM_CAPTURE_STATUS_NONE;
      return of(found.status());
    });
  };
}

inline void CheckedDriver::add_memory(device::Driver& d) {
  d.copy_to_host = [](void* to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
    count("copy");
    return call([&](Fake& f) { return of(f.copy_to_host({stream}, to, reinterpret_cast<void*>(from), bytes)); });
  };
  d.copy_to_device = [](CUdeviceptr to, const void* from, std::size_t bytes, CUstream stream) {
    count("copy");
    return call([&](Fake& fake) {
      if (!fake.is_pinned(from)) self->violated("a copy from memory that is not pinned takes its bytes in the call");
      return of(fake.copy_to_device({stream}, reinterpret_cast<void*>(to), from, bytes));
    });
  };
  d.copy_within = [](CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
    count("copy");
    return call([&](Fake& f) {
      return of(f.copy_within({stream}, reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes));
    });
  };
#if CUDA_VERSION >= 12080
  d.copy_batch = copy_batch;
#endif
  d.host_allocate = [](void** data, std::size_t bytes, unsigned flags) {
    count("allocate");
    if (flags != (CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP)) self->violated("memory that is not mapped");
    return unsafe_call([&](Fake& fake) {
      const auto made = fake.allocate_host(bytes);
      if (!made.is_ok()) return of(made.status());
      const std::lock_guard lock(self->mutex_);
      self->host_[*data = made.value().data] = made.value();
      return CUDA_SUCCESS;
    });
  };
  d.host_device_pointer = [](CUdeviceptr* address, void* data, unsigned) {
    return *address = reinterpret_cast<CUdeviceptr>(data), CUDA_SUCCESS;
  };
  d.host_free = [](void* data) {
    return unsafe_call([&](Fake& fake) {
      device::HostMemory memory;
      {
        const std::lock_guard lock(self->mutex_);
        const auto found = self->host_.find(data);
        if (found == self->host_.end()) return error(CUDA_ERROR_INVALID_VALUE, "invalid argument");
        memory = found->second;
        self->host_.erase(found);
      }
      return fake.free_host(memory), CUDA_SUCCESS;
    });
  };
  d.device_allocate = [](CUdeviceptr* address, std::size_t bytes) {
    count("allocate");
    return unsafe_call([&](Fake& fake) {
      const auto made = fake.allocate_device(bytes);
      if (made.is_ok()) *address = reinterpret_cast<CUdeviceptr>(made.value());
      return of(made.status());
    });
  };
  d.device_free = [](CUdeviceptr address) {
    return unsafe_call(
        [&](Fake& fake) { return fake.free_device(reinterpret_cast<std::byte*>(address)), CUDA_SUCCESS; });
  };
  d.pointer_set_attribute = [](const void*, CUpointer_attribute, CUdeviceptr) { return CUDA_SUCCESS; };
}

#if CUDA_VERSION >= 12080
/// Empty: nothing.
inline std::string CheckedDriver::wrong_in_batch(const CUdeviceptr* to, const CUdeviceptr* from,
                                                 const std::size_t* sizes, std::size_t many,
                                                 const CUmemcpyAttributes* attributes, const std::size_t* first_of,
                                                 std::size_t attributes_many, CUstream stream) {
  if (stream == nullptr || stream == CU_STREAM_LEGACY) return "a batch of copies on the legacy default stream";
  if (many == 0) return "a batch without copies";
  if (attributes_many == 0 || attributes_many > many || first_of[0] != 0)
    return "a batch whose copies have no attributes";
  for (std::size_t i = 0; i < attributes_many; ++i) {
    if (first_of[i] >= many || (i > 0 && first_of[i] <= first_of[i - 1])) return "attributes of a batch without order";
    if (attributes[i].srcAccessOrder != CU_MEMCPY_SRC_ACCESS_ORDER_STREAM)
      return "a batch that reads before its stream gets there";
    if (attributes[i].flags != 0) return "flags of a batch";
  }
  std::vector<std::pair<CUdeviceptr, CUdeviceptr>> written;
  for (std::size_t i = 0; i < many; ++i) {
    if (sizes[i] == 0) return "an empty copy in a batch";
    written.emplace_back(to[i], to[i] + sizes[i]);
  }
  std::sort(written.begin(), written.end());
  for (std::size_t i = 1; i < many; ++i)
    if (written[i].first < written[i - 1].second) return "a batch that writes a byte twice";
  for (std::size_t i = 0; i < many; ++i) {
    const auto after = std::lower_bound(written.begin(), written.end(), std::pair{from[i] + sizes[i], CUdeviceptr{0}});
    if (after != written.begin() && std::prev(after)->second > from[i]) return "a batch that reads what it writes";
  }
  return {};
}

inline CUresult CheckedDriver::copy_batch(CUdeviceptr* to, CUdeviceptr* from, std::size_t* sizes, std::size_t many,
                                          CUmemcpyAttributes* attributes, std::size_t* first_of,
                                          std::size_t attributes_many, std::size_t* failed, CUstream stream) {
  count("batch of copies");
  return call([&](Fake& fake) {
    *failed = ~std::size_t{0};
    if (const std::string wrong = wrong_in_batch(to, from, sizes, many, attributes, first_of, attributes_many, stream);
        !wrong.empty()) {
      self->violated(wrong);
      return error(CUDA_ERROR_INVALID_VALUE, "invalid argument");
    }
    core::Status status;
    for (std::size_t i = many; i-- > 0 && status.is_ok();) {  // CUDA promises no order
      auto* const there = reinterpret_cast<void*>(to[i]);
      const auto* const here = reinterpret_cast<const void*>(from[i]);
      status = fake.is_pinned(there)  ? fake.copy_to_host({stream}, there, here, sizes[i])
               : fake.is_pinned(here) ? fake.copy_to_device({stream}, there, here, sizes[i])
                                      : fake.copy_within({stream}, there, here, sizes[i]);
    }
    return of(status);
  });
}
#endif

inline void CheckedDriver::add_kernels(device::Driver& d) {
  d.module_load = [](CUmodule* module, const void*) {
    return unsafe_call([&](Fake& fake) {
      const core::Status status = fake.prepare_int8();
      *module = reinterpret_cast<CUmodule>(0x60);
      return status.is_ok() ? CUDA_SUCCESS : error(CUDA_ERROR_NO_BINARY_FOR_GPU, "no kernel image for the device");
    });
  };
  d.module_unload = [](CUmodule) { return CUDA_SUCCESS; };
  d.module_function = [](CUfunction* function, CUmodule, const char* name) {
    *function = reinterpret_cast<CUfunction>(std::string(name) == "hybridps_int8_encode" ? 0x71 : 0x72);
    return CUDA_SUCCESS;
  };
  d.launch = [](CUfunction kernel, unsigned blocks, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                CUstream stream, void** arguments, void**) {
    count("launch");
    return call([&](Fake& fake) {
      if (blocks == 0) return error(CUDA_ERROR_INVALID_VALUE, "invalid argument");
      bool first = false;
      {
        const std::lock_guard lock(self->mutex_);
        first = self->loaded_.insert({&fake, kernel}).second;
      }
      if (first) {  // CUDA loads it then, and may wait for the device
        const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
        while (!fake.is_idle() && std::chrono::steady_clock::now() < until)
          std::this_thread::sleep_for(std::chrono::microseconds(50));
        if (!fake.is_idle()) self->violated("the first launch of a kernel behind work that waits for this thread");
      }
      auto* const to = *static_cast<std::byte**>(arguments[0]);
      auto* const from = *static_cast<std::byte**>(arguments[1]);
      const auto elements = *static_cast<std::uint64_t*>(arguments[2]);
      if (reinterpret_cast<std::uintptr_t>(kernel) == 0x71)
        return of(fake.encode_int8({stream}, to, reinterpret_cast<float*>(from), elements,
                                   *static_cast<float*>(arguments[3])));
      return of(fake.decode_int8({stream}, reinterpret_cast<float*>(to), from, elements));
    });
  };
}

/// It compiles nothing.
inline device::Nvrtc CheckedDriver::compiler() {
  device::Nvrtc n;
  n.create = [](void** program, const char*, const char*, int, const char* const*, const char* const*) {
    return *program = &self, 0;
  };
  n.destroy = [](void**) { return 0; };
  n.compile = [](void*, int, const char* const*) { return 0; };
  n.log_size = [](void*, std::size_t* bytes) { return *bytes = 1, 0; };
  n.log = [](void*, char* to) { return *to = '\0', 0; };
  n.binary_size = [](void*, std::size_t* bytes) { return *bytes = 4, 0; };
  n.binary = [](void*, char* to) { return std::memcpy(to, "cub", 4), 0; };
  n.error_string = [](int) { return "no error"; };
  return n;
}

}  // namespace hybridps::test
