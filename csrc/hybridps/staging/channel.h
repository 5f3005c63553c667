// hybridps/staging/channel.h: operations on device memory, carried by the engine while the host goes on.
//
// Model    A Channel has two streams and a ring of pinned memory. For each slice of an operation enqueue() puts on them:
//            in   after the caller's stream: device to staging, write flag "ready"
//            out  wait for flag "done", staging to device
//          and takes the operation's place in the group (Group::reserve). The Stager's thread sees "ready" and submits
//          the slice to the engine, whose completion sets "done". Both flags are counters of the channel's slices; a
//          third, "ended", counts its operations, written by the out stream after each. Who sets a flag that a stream
//          waits for (the Stager's thread, the engine's loop) makes no call to the driver, which might wait for that
//          stream. Where the ranks of a node have a GPU each and a library for it (staging/local.h, staging/rails.h),
//          slices have a step of that library before the one and after the other copy, and operations within one node
//          are such a step and nothing else. The engine then has a witness of the operation besides, which compares
//          what ranks called. What is delivered to other nodes may go out from device memory instead
//          (staging/direct.h). Staging is used again without waiting on the host: the in stream waits for the event
//          that ended the last use. One channel carries operations in their order; what may overtake each other
//          (messages to and from different peers) has channels of its own.
// Owner    the caller holds Channels and Staged; the Stager keeps a channel for as long as something is under way on it.
// Threads  every method from any thread; calls to one channel go one after the other. Blocking: none waits for the
//          device or the network but Staged::wait() and stop(), enqueue() where memory could not be pinned or more is
//          needed than the pool has, and the first collective of a channel that may have Local (or connect() before
//          it).
// Failures an operation that fails (deadline, dead peer, abort) still moves its flags, so no stream hangs; what it
//          leaves in the device's memory is undefined. It is reported by Staged::status(), and once by the channel's
//          next enqueue() if nobody has asked. A device that has failed, or a caller's stream that does not get to
//          the operation before its deadline, aborts the group.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"
#include "hybridps/engine/group.h"
#include "hybridps/staging/direct.h"
#include "hybridps/staging/device_pool.h"
#include "hybridps/staging/local.h"
#include "hybridps/staging/ring.h"
#include "hybridps/staging/slices.h"
#include "hybridps/staging/staged.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

class Stager;

struct StagingRequest {
  worker::Operation operation;   // its pieces are in the device's memory and stay valid until `done`
  device::DeviceStream caller;   // the operation comes after what is on this stream
  std::byte* scratch = nullptr;  // device memory of Channel::scratch_bytes(), valid as the pieces are
  std::string what;              // for messages: "all_reduce"
  /// For each slice that goes between nodes, in order, before it takes its place in the group: may say how it is coded there.
  /// `device`: where its first bytes are, null if this rank has none of it. True: that is by int8, and the device may do it. Called
  /// by enqueue().
  std::function<bool(worker::Operation& slice, const std::byte* device)> code;
  /// Device memory for so many bytes of codes, valid as the pieces are; null: there is none. Called by enqueue(), at most once,
  /// where the device encodes; without it, it does not.
  std::function<std::byte*(std::uint64_t bytes)> codes;
  /// Puts more on the channel's out stream, before the operation ends there.
  std::function<void()> finish;
  /// Once it is over, or has failed: on the Stager's thread, not under a lock. Not called when enqueue() fails.
  core::OnceFn<void(const core::Status&)> done;
  /// The way back is enqueued by Staged::complete_enqueue(): so that the ways in of several operations come before it on
  /// devices with one hardware queue.
  bool leave_open = false;
};

struct ChannelOptions {
  SliceLimits limits;
  std::uint64_t staging_bytes_max = std::uint64_t{256} << 20;  // more only where one slice needs it
  bool one_stream = false;                                     // for what only comes in: no way in to overtake
  bool direct = false;  // what is delivered to other nodes goes from device memory, where the transport can (direct.h)
  std::optional<LocalOptions> local;  // the same ranks have it or none: for collectives
};

class Channel : public std::enable_shared_from_this<Channel>, core::Pinned {
 public:
  /// Use Stager::open().
  Channel(std::shared_ptr<Stager> stager, std::shared_ptr<device::Device> device, std::shared_ptr<DevicePool> pool,
          std::weak_ptr<engine::Group> group, ChannelOptions options);
  ~Channel();

  /// Everything is on the streams when it returns. Errors: the group or the device has failed, the stream is being
  /// captured, memory is short; then nothing of this operation will be done.
  core::Result<std::shared_ptr<Staged>> enqueue(StagingRequest request);
  /// What the first collective would do besides: the ranks agree about Local and make it. A collective of the group.
  /// Does nothing when it has been done.
  core::Status connect(std::chrono::milliseconds timeout);
  /// Whether connect() would do nothing.
  bool is_connected() const;
  /// Device memory that enqueue() needs for it beside the tensors. Connects.
  core::Result<std::uint64_t> scratch_bytes(const worker::Operation& operation);
  /// Whether collectives go by way of a LocalGroup; false before the first.
  bool has_local() const;

  /// Ends what is under way, at the latest when it comes to it, and fails it; nothing comes after it. For a program that
  /// aborts the group and lets go of it: what hangs within the node, on the device, then has nobody else who says so.
  void abort(const core::Status& why);

  device::DeviceStream out_stream() const noexcept { return out_; }
  device::Device& device() noexcept { return *device_; }
  /// Bytes of staging, pinned or not.
  std::uint64_t staging_bytes() const;
  /// Whether something has gone out from device memory, or will.
  bool is_direct() const;

 private:
  friend class Stager;
  friend class Staged;
  struct WayBack {  // of one slice, back to the device
    std::uint64_t number = 0;
    bool has_place = false;  // in the ring
    std::vector<Copy> copies;
    std::byte* base = nullptr;
    std::vector<Slice::Coded> coded;
    device::DeviceEvent arrived;  // the way in is done
    LocalStep after;
    core::Deadline deadline;
  };
  struct WaitingSlice {  // for the in stream
    std::uint64_t number = 0;
    std::uint64_t sequence = 0;
    worker::Operation operation;
    std::shared_ptr<Staged> staged;
  };
  struct Retired {
    device::HostMemory memory;
    std::uint64_t end = 0;  // of the operation after which nothing uses it
  };
  struct Remains;
  /// While one lives, a call is putting something on the streams.
  class Putting;

  core::Status open();
  core::Status agree(engine::Group& group, std::chrono::milliseconds timeout);  // mutex_ held
  intranode::Patience patience_until(core::Deadline deadline) const;
  core::Status witness(const std::shared_ptr<Staged>& staged, const worker::Operation& operation, engine::Group& group);
  core::Status put(const std::shared_ptr<Staged>& staged, StagingRequest& request, engine::Group& group);
  core::Status put_within(const std::shared_ptr<Staged>& staged, const Slice& slice);
  core::Status put_in(const std::shared_ptr<Staged>& staged, Slice slice, engine::Group& group);
  /// The first of open_ways_, which is not among them any more even if it fails.
  core::Status put_next_out();
  core::Status move(const Slice& slice, device::DeviceStream stream);
  core::Status end(Staged& staged);  // mutex_ held
  core::Status complete_enqueue(Staged& staged);
  std::uint64_t ring_bytes(std::uint64_t slice_bytes, std::uint64_t operation_bytes, std::uint64_t have) const;
  core::Status make_room(std::uint64_t slice_bytes, std::uint64_t operation_bytes);
  const schedule::Topology* topology_of(engine::Group& group);
  void choose_codes(std::vector<Slice>& slices, const StagingRequest& request, engine::Group& group, bool rails);
  bool can_encode();
  void make_direct(std::vector<Slice>& slices, const worker::Operation& operation, engine::Group& group, bool rails);
  device::HostMemory allocate(std::uint64_t bytes);
  void break_down(const core::Status& status, engine::Group* group);

  /// The driver's thread: whether device and library still work, for the other one to act on.
  void look();

  // The Stager's thread, which makes no call to the driver.
  struct Progress {
    bool did = false;
    bool waits_for_stream = false;
  };
  Progress progress(core::TimePoint now);
  core::Status trouble(core::TimePoint now);
  void release_if_stopped(core::TimePoint now);  // progress_mutex_ held
  void fail_local(const core::Status& status);
  bool is_idle() const;
  void submit(WaitingSlice waiting);
  void expire(const core::Status& status, engine::Group* group);
  void slice_done(std::uint64_t number, Staged& staged, const worker::Outcome& outcome);

  const std::shared_ptr<Stager> stager_;
  const std::shared_ptr<device::Device> device_;
  const std::weak_ptr<engine::Group> group_;
  const ChannelOptions options_;
  const std::shared_ptr<DevicePool> pool_;
  core::Status opened_;
  device::DeviceStream in_;
  device::DeviceStream out_;
  device::HostMemory flags_;
  device::Flag ready_;
  device::Flag done_;
  device::Flag ended_;

  mutable std::mutex mutex_;  // what is put on the streams
  core::Status broken_;
  device::HostMemory memory_;
  Ring ring_;
  std::uint64_t numbers_ = 0;                                // slices so far; the first is 1
  std::uint64_t ends_ = 0;                                   // operations whose end is on the out stream
  std::map<std::uint64_t, device::DeviceEvent> over_;        // slice -> its place in the ring is free
  std::optional<schedule::Topology> topology_;               // of the group, once it is open
  std::optional<bool> can_encode_;                           // once the device was asked
  bool no_direct_ = false;                                   // it was tried
  std::vector<std::shared_ptr<DirectRing>> smaller_direct_;  // kept: streams may use them
  std::deque<WayBack> open_ways_;                            // not on the out stream yet
  bool warned_ = false;
  bool agreed_ = false;          // asked whether there is Local
  std::uint64_t ways_open_ = 0;  // of the operation being put: ways in that may be ahead of the ways out

  // Held for moments only: the engine's loop takes it. After mutex_.
  mutable std::mutex progress_mutex_;
  std::deque<WaitingSlice> waiting_;
  std::deque<bool> slices_done_;  // of those after done_until_
  std::uint64_t done_until_ = 0;
  std::deque<std::shared_ptr<Staged>> staged_;  // in order of their ends
  std::deque<Retired> retired_;
  int putting_ = 0;
  std::shared_ptr<Staged> failed_;      // since the last enqueue()
  std::shared_ptr<Local> local_;        // set once
  std::shared_ptr<DirectRing> direct_;  // set with mutex_ held, too
  core::Status device_failed_;          // what look() has found
  core::Status local_found_;
  core::Status local_failed_;
  bool withheld_ = false;  // "done" does not move, since local_ is to be stopped first
  bool released_ = false;  // and will not be withheld again
  core::TimePoint release_by_ = core::TimePoint::max();
  core::TimePoint next_trouble_{};
};

/// A slice's number as it stands in a flag.
inline std::uint32_t word_of(std::uint64_t number) { return static_cast<std::uint32_t>(number); }
/// Back to the pool, or freed if it is ordinary since it could not be pinned. Nothing on a stream uses it any more.
void give_back(DevicePool& pool, const device::HostMemory& memory) noexcept;
/// What `what` fails with where the group is gone.
core::Status group_is_gone(const std::string& what);

}  // namespace hybridps::staging
