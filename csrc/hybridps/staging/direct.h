// hybridps/staging/direct.h: what goes to other nodes straight from device memory (HYBRIDPS_GPUDIRECT).
//
// Model    Outgoing data is copied into a ring of device memory, and the transport between nodes takes the data from
//          the ring. The data does not go through pinned memory, and the engine reads no byte of it. Incoming data is
//          staged as usual. Each sender decides alone: other ranks see no difference.
//          Not for sums, which CPUs compute. Not where a rank of the same node gets the bytes from this rank through
//          the engine: shared memory cannot take bytes from a device.
// Memory   a place in the ring is used again when the operation is over *and* the transports have let go of the place.
//          The end of Place::held marks both, and a flag tells the stream. So a failed operation moves on at once, and
//          bytes that a transport still reads stay unchanged. The ring returns to the pool when all places have ended
//          and the engine has taken the memory back from the transport.
// Threads  DirectRing: take() one at a time; Place::held may end on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <set>

#include "hybridps/core/mutex.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"
#include "hybridps/engine/group.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/staging/device_pool.h"
#include "hybridps/staging/ring.h"
#include "hybridps/staging/slices.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

/// Whether this rank may send slices of the operation from device memory. `rails`: the slices were cut for the node's
/// own library.
bool can_go_direct(const worker::Operation& operation, const schedule::Topology& topology, bool rails);

/// Bytes that the slice copies to its staging.
std::uint64_t bytes_in(const Slice& slice);

/// Makes a slice of such an operation go out from device memory, if the slice sends anything. The slice is not bound
/// yet. The rank's own part is then moved on the device, from the input to the output.
void go_direct(Slice& slice, int rank);

class DirectRing : public std::enable_shared_from_this<DirectRing>, core::Pinned {
 public:
  /// Runs a function repeatedly, until it returns true, where waiting for a driver does no harm.
  using Bury = std::function<void(std::function<bool()>)>;

  /// Takes the memory from the pool and gives it to the transport of `group`'s engine. Waits for the engine's loop.
  /// Errors say why the transport or the pool cannot.
  static core::Result<std::shared_ptr<DirectRing>> make(const std::shared_ptr<DevicePool>& pool, engine::Group& group,
                                                        std::uint64_t bytes, Bury bury);

  std::uint64_t bytes() const noexcept { return ring_.bytes(); }

  struct Place {
    std::byte* data = nullptr;
    std::uint64_t displaced = 0;       // the last slice that used part of the place: streams wait for it first; 0: none
    std::shared_ptr<const void> held;  // the place is in use until `held` ends; `held` keeps the ring alive
  };
  /// A place of `bytes` (at most bytes()) for slice `number`. `number` rises from call to call.
  Place take(std::uint64_t bytes, std::uint64_t number);
  /// The flag reaches a slice's number when this slice and all before it have ended.
  device::Flag released() const { return memory_->flags.flag_at(0); }
  /// The owner gives up: streams that wait for released() go on, and nobody uses the ring later.
  void give_up();

 private:
  struct Memory : core::Pinned {
    Memory(std::shared_ptr<DevicePool> p, Bury b) : pool(std::move(p)), bury(std::move(b)) {}
    ~Memory();
    const std::shared_ptr<DevicePool> pool;
    const Bury bury;
    device::HostMemory flags;
    DevicePool::Run run;
  };

  DirectRing(std::shared_ptr<Memory> memory, std::shared_ptr<void> lease, std::uint64_t bytes)
      : memory_(std::move(memory)), lease_(std::move(lease)), ring_(bytes) {}
  void end(std::uint64_t number);
  void publish(std::uint64_t number) HYBRIDPS_REQUIRES(mutex_);

  const std::shared_ptr<Memory> memory_;
  const std::shared_ptr<void> lease_;  // from Group::attach_device()
  Ring ring_;
  core::Mutex mutex_;
  std::set<std::uint64_t> held_ HYBRIDPS_GUARDED_BY(mutex_);
  std::uint64_t last_ HYBRIDPS_GUARDED_BY(mutex_) = 0;
};

}  // namespace hybridps::staging
