// hybridps/staging/direct.h: what goes to other nodes straight from device memory (HYBRIDPS_GPUDIRECT).
//
// Model    What an operation delivers is copied into a ring of device memory, and the transport between nodes takes it from
//          there: not through pinned memory, and no byte is read by the engine. What comes in is staged as ever. It is the
//          sender's choice alone: other ranks see no difference.
//          Not for sums, which CPUs make, and not where a rank of the same node is to have the bytes from this one by way of
//          the engine, since shared memory cannot take them from a device.
// Memory   a place in the ring is used again when the operation is over *and* the transports have let go of it: both are
//          known by the end of what take() has given, and told to the stream by a flag. So an operation that fails moves on
//          at once, and what a transport still reads stays as it is. The ring is freed when all of that has ended, and the
//          engine has taken it from the transport: it goes back to the pool.
// Threads  DirectRing: take() one at a time; what it gave may end on any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <set>

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

/// Whether slices of the operation may go out so on this rank. `rails`: they were cut for the nodes' own library.
bool can_go_direct(const worker::Operation& operation, const schedule::Topology& topology, bool rails);

/// Bytes that the slice brings to its staging.
std::uint64_t bytes_in(const Slice& slice);

/// Makes a slice of such an operation, not bound yet, go out from device memory, if it brings anything. The rank's own part
/// then goes from its place in the input to that in the output on the device.
void go_direct(Slice& slice, int rank);

class DirectRing : public std::enable_shared_from_this<DirectRing>, core::Pinned {
 public:
  /// Runs a function where waiting for a driver does no harm, until it says that it is done.
  using Bury = std::function<void(std::function<bool()>)>;

  /// Takes the memory and gives it to the transport of `group`'s engine. Waits for the engine's loop. Errors say why
  /// that is not possible.
  static core::Result<std::shared_ptr<DirectRing>> make(const std::shared_ptr<DevicePool>& pool, engine::Group& group,
                                                        std::uint64_t bytes, Bury bury);

  std::uint64_t bytes() const noexcept { return ring_.bytes(); }

  struct Place {
    std::byte* data = nullptr;
    std::uint64_t displaced = 0;       // the last slice that had some of it: streams wait for it first; 0: none
    std::shared_ptr<const void> held;  // the place is in use until this ends; keeps the ring
  };
  /// For slice `number`, which rises from call to call; at most bytes().
  Place take(std::uint64_t bytes, std::uint64_t number);
  /// Reaches a slice's number when it and all before it have ended.
  device::Flag released() const { return memory_->flags.flag_at(0); }
  /// Nobody will come back to it: streams that wait for released() go on.
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
  void publish(std::uint64_t number);  // mutex_ held

  const std::shared_ptr<Memory> memory_;
  const std::shared_ptr<void> lease_;  // Group::attach_device()
  Ring ring_;
  std::mutex mutex_;
  std::set<std::uint64_t> held_;
  std::uint64_t last_ = 0;
};

}  // namespace hybridps::staging
