// hybridps/device/device.h: one accelerator, as far as moving bytes between it and the engine needs it.
//
// Model    Work is put on streams, which run it in order, each on its own. Streams meet through events and through
//          flags: words of host memory that a stream can write, and for which it can wait. A stream that waits for a
//          flag holds up nothing but itself, unless the device has fewer hardware queues than streams: then also what was
//          put on other streams of its queue later.
// Owner    the caller of everything that make_...() and allocate_...() return; free it before the Device.
// Threads  every method from any thread.
// Blocking any call may wait for the driver's locks, which what allocates and frees memory holds while it waits for the
//          whole device. So nothing that a stream waits for may depend on a thread that makes one: README.md,
//          NoDriverCalls.
// Errors   returned as Status; a device that has failed (a kernel's bad access) says so in every later call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "hybridps/core/check.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"

namespace hybridps::device {

/// CUDA's stream; null is its default stream.
struct DeviceStream {
  void* native = nullptr;
};

struct DeviceEvent {
  void* native = nullptr;
};

/// A word that host and device both see. Values compare in a circle, so a counter may wrap.
struct Flag {
  std::atomic<std::uint32_t>* word = nullptr;
  std::uint64_t device_address = 0;
};

/// A run of host memory.
struct HostMemory {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  std::uint64_t device_address = 0;  // 0: not mapped
  bool pinned = false;

  /// The word at `offset` (a multiple of 4) of mapped memory.
  Flag flag_at(std::uint64_t offset) const {
    return {reinterpret_cast<std::atomic<std::uint32_t>*>(data + offset), device_address + offset};
  }
};
static_assert(sizeof(std::atomic<std::uint32_t>) == 4 && std::atomic<std::uint32_t>::is_always_lock_free);

/// Whether a counter has reached `target`.
inline bool has_reached(std::uint32_t counter, std::uint32_t target) noexcept {
  return static_cast<std::int32_t>(counter - target) >= 0;
}

/// While one lives, its thread makes no call of a Device, but for run_here(): streams wait for flags that the thread
/// sets, and a call may wait for a stream. Devices look at it in every call, in every build.
class NoDriverCalls : core::Pinned {
 public:
  NoDriverCalls() noexcept { ++depth_; }
  ~NoDriverCalls() { --depth_; }
  /// For Devices: this thread makes a call.
  static void look() noexcept {
    static_cast<void>(core::check(depth_ == 0, "who sets flags for streams makes no call that may wait for a stream"));
  }

 private:
  static inline thread_local int depth_ = 0;
};

class Device : core::Pinned {
 public:
  virtual ~Device() = default;

  virtual int index() const noexcept = 0;
  /// "CUDA device 0 (NVIDIA H200)".
  virtual std::string describe() const = 0;
  /// The same for all processes of a machine that use this card, and for no other: its place on the bus.
  virtual core::Result<std::string> physical_id() = 0;
  /// How many streams run beside each other without holding each other up; 0: not known. No call to the driver.
  virtual int hardware_queues() const noexcept { return 0; }
  /// Runs `call` with the device current on this thread, for libraries that look there. Does not wait itself.
  virtual core::Status run_here(const std::function<core::Status()>& call) = 0;

  virtual core::Result<DeviceStream> make_stream() = 0;
  /// What was put on it goes on.
  virtual void destroy(DeviceStream stream) noexcept = 0;
  virtual core::Result<DeviceEvent> make_event() = 0;
  virtual void destroy(DeviceEvent event) noexcept = 0;

  /// The event then stands for what is on the stream now, and no longer for what it stood for.
  virtual core::Status record(DeviceEvent event, DeviceStream stream) = 0;
  /// What comes later on `stream` waits for what the event stands for now: nothing, when it was never recorded.
  virtual core::Status wait(DeviceStream stream, DeviceEvent event) = 0;
  virtual core::Result<bool> is_done(DeviceEvent event) = 0;

  virtual core::Status copy_to_host(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) = 0;
  virtual core::Status copy_to_device(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) = 0;
  /// Between two places of its own memory that do not overlap.
  virtual core::Status copy_within(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) = 0;

  /// Makes encode_int8() and decode_int8() ready: may wait for the device, and take a second the first time. kUnsupported says why
  /// this one cannot; then they are not to be called.
  virtual core::Status prepare_int8() {
    return core::Status(core::Code::kUnsupported, describe() + " has no kernels for it");
  }
  /// `elements` fp32, times `factor`, become int8::bytes_of() them, by the codec of int8.h; and back. Between places of its own memory
  /// that do not overlap.
  virtual core::Status encode_int8(DeviceStream /*stream*/, std::byte* /*to*/, const float* /*from*/, std::uint64_t /*elements*/,
                                   float /*factor*/) {
    return prepare_int8();
  }
  virtual core::Status decode_int8(DeviceStream /*stream*/, float* /*to*/, const std::byte* /*from*/, std::uint64_t /*elements*/) {
    return prepare_int8();
  }

  /// The stream sets the word when it gets there; what it did before is visible to who has read the value (acquire).
  virtual core::Status write_flag(DeviceStream stream, Flag flag, std::uint32_t value) = 0;
  /// The stream waits until has_reached(word, value); what was written before the word was set (release) is visible.
  virtual core::Status wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) = 0;

  /// Whether the stream records a graph instead of running.
  virtual core::Result<bool> is_capturing(DeviceStream stream) = 0;
  /// For a thread of ours that makes calls while the program may be recording a graph.
  virtual void begin_helper_thread() noexcept {}

  /// Pinned and mapped memory, zeroed. kOutOfResources when the system has no more of it.
  virtual core::Result<HostMemory> allocate_host(std::uint64_t bytes) = 0;
  /// Nothing on a stream may use it any more. May wait for the whole device, and hold up all other calls meanwhile; so
  /// may the three around it.
  virtual void free_host(HostMemory memory) noexcept = 0;
  /// Its own memory, of the kind that network cards can be given. Only copies on streams, and who can read a device's
  /// memory, may use the address. kOutOfResources when it has no more.
  virtual core::Result<std::byte*> allocate_device(std::uint64_t bytes) = 0;
  /// Nothing on a stream, and no network card, may use it any more.
  virtual void free_device(std::byte* memory) noexcept = 0;
};

}  // namespace hybridps::device
