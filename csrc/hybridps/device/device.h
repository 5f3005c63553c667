// hybridps/device/device.h: one accelerator, with the functions that move bytes between it and the engine.
//
// Model    Work is put on streams. Each stream runs its work in order, independent of other streams. Streams meet
//          through events and flags. A flag is a word of host memory that a stream can write or wait for. A stream that
//          waits for a flag holds up only itself, unless the device has fewer hardware queues than streams. Then the
//          stream also holds up later work on other streams of its queue.
// Owner    the caller owns everything that make_...() and allocate_...() return, and frees it before the Device.
// Threads  every method from any thread.
// Blocking any call may wait for the driver's locks. Calls that allocate or free memory hold these locks while they
//          wait for the whole device. So nothing that a stream waits for may depend on a thread that makes such calls:
//          README.md, NoDriverCalls.
// Errors   returned as Status. A failed device (a kernel's bad access) reports this in every later call.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <span>
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

/// A word that host and device both see. Values compare modulo 2^32, so a counter may wrap.
struct Flag {
  std::atomic<std::uint32_t>* word = nullptr;
  std::uint64_t device_address = 0;
};

enum class CopyWay : std::uint8_t { kToHost, kToDevice, kWithin };

/// One of several copies. `to` and `from` do not overlap.
struct CopyRun {
  void* to = nullptr;
  const void* from = nullptr;
  std::uint64_t bytes = 0;
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

/// While a NoDriverCalls lives, its thread makes no call of a Device, except run_here(). Streams wait for flags that
/// this thread sets, and a call may wait for a stream. Devices check this in every call, in every build.
class NoDriverCalls : core::Pinned {
 public:
  NoDriverCalls() noexcept { ++depth_; }
  ~NoDriverCalls() { --depth_; }
  /// For Devices: checks that the current thread may make a call.
  static void look() noexcept {
    static_cast<void>(
        core::check(depth_ == 0, "a thread that sets flags for streams makes no call that may wait for a stream"));
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
  /// The card's place on the bus: the same for all processes of a machine that use this card, and for no other card.
  virtual core::Result<std::string> physical_id() = 0;
  /// The number of streams that run at the same time without holding each other up; 0: not known. No driver call.
  virtual int hardware_queues() const noexcept { return 0; }
  /// Runs `call` with the device current on this thread, for libraries that need this. Does not wait itself.
  virtual core::Status run_here(const std::function<core::Status()>& call) = 0;

  virtual core::Result<DeviceStream> make_stream() = 0;
  /// Work already on the stream continues.
  virtual void destroy(DeviceStream stream) noexcept = 0;
  virtual core::Result<DeviceEvent> make_event() = 0;
  virtual void destroy(DeviceEvent event) noexcept = 0;

  /// The event now stands for the work on the stream so far, and no longer for an earlier recording.
  virtual core::Status record(DeviceEvent event, DeviceStream stream) = 0;
  /// Later work on `stream` waits for what the event stands for now. A never recorded event stands for nothing.
  virtual core::Status wait(DeviceStream stream, DeviceEvent event) = 0;
  virtual core::Result<bool> is_done(DeviceEvent event) = 0;

  virtual core::Status copy_to_host(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) = 0;
  virtual core::Status copy_to_device(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) = 0;
  /// Copies between two places of the device's own memory that do not overlap.
  virtual core::Status copy_within(DeviceStream stream, void* to, const void* from, std::uint64_t bytes) = 0;

  /// All `copies`, in any order among each other: none writes what another reads or writes.
  virtual core::Status copy_all(DeviceStream stream, CopyWay way, std::span<const CopyRun> copies) {
    core::Status status;
    for (const CopyRun& copy : copies) {
      if (copy.bytes == 0) continue;
      switch (way) {
        case CopyWay::kToHost: status = copy_to_host(stream, copy.to, copy.from, copy.bytes); break;
        case CopyWay::kToDevice: status = copy_to_device(stream, copy.to, copy.from, copy.bytes); break;
        case CopyWay::kWithin: status = copy_within(stream, copy.to, copy.from, copy.bytes); break;
      }
      if (!status.is_ok()) break;
    }
    return status;
  }

  /// Prepares encode_int8() and decode_int8(). May wait for the device, and take a second the first time. Error
  /// kUnsupported says why this device cannot; do not call encode_int8() or decode_int8() then.
  virtual core::Status prepare_int8() {
    return core::Status(core::Code::kUnsupported, describe() + " has no kernels for it");
  }
  /// Encodes `elements` fp32, times `factor`, to int8::bytes_of() them with the codec of int8.h; decode_int8() is the
  /// reverse. Both between places of the device's own memory that do not overlap.
  virtual core::Status encode_int8(DeviceStream /*stream*/, std::byte* /*to*/, const float* /*from*/,
                                   std::uint64_t /*elements*/, float /*factor*/) {
    return prepare_int8();
  }
  virtual core::Status decode_int8(DeviceStream /*stream*/, float* /*to*/, const std::byte* /*from*/,
                                   std::uint64_t /*elements*/) {
    return prepare_int8();
  }

  /// The stream sets the word when it gets there. A thread that reads the value (acquire) sees the stream's earlier
  /// work.
  virtual core::Status write_flag(DeviceStream stream, Flag flag, std::uint32_t value) = 0;
  /// The stream waits until has_reached(word, value). The stream then sees all writes made before the word was set
  /// (release).
  virtual core::Status wait_flag(DeviceStream stream, Flag flag, std::uint32_t value) = 0;

  /// Whether write_flag() and wait_flag() work on this device. Error kUnsupported says why not. May use the stream and
  /// the word, which is the caller's.
  virtual core::Status check_flags(DeviceStream /*stream*/, Flag /*flag*/) { return {}; }

  /// Whether the stream records a graph instead of running.
  virtual core::Result<bool> is_capturing(DeviceStream stream) = 0;
  /// Call this on a thread of ours that makes calls while the program may record a graph.
  virtual void begin_helper_thread() noexcept {}

  /// Pinned and mapped memory, zeroed. Error kOutOfResources: the system has no more.
  virtual core::Result<HostMemory> allocate_host(std::uint64_t bytes) = 0;
  /// No work on a stream may still use the memory. May wait for the whole device, and hold up all other calls
  /// meanwhile. So may allocate_host(), allocate_device() and free_device().
  virtual void free_host(HostMemory memory) noexcept = 0;
  /// The device's own memory, of a kind that network cards can use. Only copies on streams, and parts of the system
  /// that can read device memory, may use the address. Error kOutOfResources: the device has no more.
  virtual core::Result<std::byte*> allocate_device(std::uint64_t bytes) = 0;
  /// No work on a stream, and no network card, may still use the memory.
  virtual void free_device(std::byte* memory) noexcept = 0;
};

}  // namespace hybridps::device
