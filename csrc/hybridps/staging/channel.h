// hybridps/staging/channel.h: operations on device memory, carried by the engine while the host goes on.
//
// Model    A Channel has two streams and a ring of pinned memory. For each slice of an operation, enqueue() puts these
//          steps on the streams:
//            in   after the caller's stream: device to staging, write flag "ready"
//            out  wait for flag "done", staging to device
//          Before its first step of an operation, the out stream waits for the in stream, which has all steps of the
//          operation then. So out and the operation's end come after in, even where a failed slice is done early.
//          Each slice of a collective also takes its place in the group (Group::reserve). The Stager's thread sees
//          "ready" and submits the slice to the engine. The engine's completion sets "done". "ready" and "done" count
//          the channel's slices. A third flag, "ended", counts the channel's operations: the out stream writes "ended"
//          after each operation.
//          The Stager's thread and the engine's loop set flags that streams wait for. These threads make no driver
//          call, because a driver call may wait for such a stream.
//          Where each rank of a node has its own GPU and a library for it (staging/local.h, staging/rails.h), slices
//          also have a library step before the copy in and one after the copy out. An operation within one node is a
//          single library step, without staging. The engine then also gets a witness of the operation, to compare what
//          the ranks called.
//          Data for other nodes may go out from device memory instead (staging/direct.h). The host does not wait before
//          staging is used again: the in stream waits for the end of the operation that used it last. An operation
//          that takes more than half of the ring has an event for each slice instead. Where the ring is full, steps out
//          come before later steps in.
//          One channel carries operations in their order. Operations that may overtake each other (messages to and from
//          different peers) have separate channels.
// Owner    the caller holds Channels and Staged; the Stager keeps a channel for as long as something is under way on
//          it.
// Threads  every method from any thread; calls to one channel run one after the other. Only these calls wait for the
//          device or the network: Staged::wait(); Stager::stop(); enqueue() where the pool has too little; the first
//          collective of a channel that may have Local (or connect() before it).
// Failures an operation that fails (deadline, dead peer, abort) still moves its flags, so no stream hangs. The device
//          memory of a failed operation is undefined; most of what the network did not bring is NaN (mark_of()).
//          Staged::status() reports the failure. If nobody asked, the channel's next enqueue() reports the failure
//          once. A failed device aborts the group. So does a caller's stream that does not reach the operation before
//          its deadline.
#pragma once

#include <chrono>
#include <cstdint>
#include <deque>
#include <functional>
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
  std::byte* scratch = nullptr;  // device memory of Channel::scratch_bytes(), valid as long as the pieces
  std::string what;              // for messages: "all_reduce"
  /// Called by enqueue() for each slice that goes between nodes, in order, before the slice takes its place in the
  /// group. May set the slice's coding between nodes. `device`: the address of the slice's first bytes, null if this
  /// rank has none. True: the coding is int8, and the device may encode.
  std::function<bool(worker::Operation& slice, const std::byte* device)> code;
  /// Returns device memory for `bytes` of codes, valid as long as the pieces; null: there is none. Called by enqueue(),
  /// at most once, where the device encodes. Without this function the device does not encode.
  std::function<std::byte*(std::uint64_t bytes)> codes;
  /// Puts more work on the channel's out stream, before the operation's end.
  std::function<void()> finish;
  /// Called when the operation is over or has failed, on the Stager's thread, with no lock held. Not called when
  /// enqueue() fails.
  core::OnceFn<void(const core::Status&)> done;
  /// enqueue() leaves out the way back; Staged::complete_enqueue() adds it. So the ways in of several operations can
  /// come before the way back, on devices with one hardware queue.
  bool leave_open = false;
};

struct ChannelOptions {
  SliceLimits limits;
  std::uint64_t staging_bytes_max = std::uint64_t{256} << 20;  // exceeded only where one slice needs more
  bool one_stream = false;                                     // for channels that only receive: no way in to overtake
  bool direct = false;  // what goes to other nodes leaves from device memory, where the transport can (direct.h)
  std::optional<LocalOptions> local;  // for collectives; set on all ranks or on none
};

class Channel : public std::enable_shared_from_this<Channel>, core::Pinned {
 public:
  /// Use Stager::open().
  Channel(std::shared_ptr<Stager> stager, std::shared_ptr<device::Device> device, std::shared_ptr<DevicePool> pool,
          std::weak_ptr<engine::Group> group, ChannelOptions options);
  ~Channel();

  /// On return everything is on the streams. Errors: the group or the device has failed, the stream is being captured,
  /// or memory is short. After an error, nothing of this operation will be done.
  core::Result<std::shared_ptr<Staged>> enqueue(StagingRequest request);
  /// Does the extra work of the first collective: the ranks agree about Local and make it. A collective of the group.
  /// Does nothing the second time.
  core::Status connect(std::chrono::milliseconds timeout);
  /// Whether connect() would do nothing.
  bool is_connected() const;
  /// Bytes of device memory that enqueue() needs for `operation` beside the tensors. May call connect().
  core::Result<std::uint64_t> scratch_bytes(const worker::Operation& operation);
  /// Whether collectives use Local. False before the first collective or connect().
  bool has_local() const;

  /// Fails operations under way and stops Local's work, at the latest when a stream comes to it; no later work runs.
  /// No effect without Local. Needed when the program aborts the group and drops it: nothing else then reports work
  /// that hangs on the device, within the node.
  void abort(const core::Status& why);

  device::DeviceStream out_stream() const noexcept { return out_; }
  device::Device& device() noexcept { return *device_; }
  /// Bytes of staging.
  std::uint64_t staging_bytes() const;
  /// Whether the channel has a ring of device memory to send from (staging/direct.h).
  bool is_direct() const;

 private:
  friend class Stager;
  friend class Staged;
  struct WayBack {  // the way of one slice back to the device
    std::uint64_t number = 0;
    bool has_place = false;  // the slice has a place in the ring
    bool frees = false;      // its place is free before the operation's end
    std::vector<Copy> copies;
    std::byte* base = nullptr;
    std::vector<Slice::Coded> coded;
    LocalStep after;
    core::Deadline deadline;
  };
  struct SliceResults {
    std::vector<worker::Piece> pieces;  // in staging
    unsigned char mark = 0xff;          // mark_of() their type
  };
  struct WaitingSlice {  // a slice that waits for the in stream
    std::uint64_t number = 0;
    std::uint64_t sequence = 0;
    worker::Operation operation;
    std::shared_ptr<Staged> staged;
    SliceResults results;
  };
  struct Freed {  // the places of the slices up to `until` are free after the event
    std::uint64_t until = 0;
    DevicePool::SharedEvent after;
  };
  struct Retired {
    device::HostMemory memory;
    std::uint64_t end = 0;  // number of the operation's end after which nothing uses `memory`
  };
  struct Remains;
  /// While a Putting lives, a call is putting work on the streams.
  class Putting;

  core::Status open();
  void count_streams(int more);
  core::Status agree(engine::Group& group, std::chrono::milliseconds timeout);  // mutex_ held
  intranode::Patience patience_until(core::Deadline deadline) const;
  core::Status witness(const std::shared_ptr<Staged>& staged, const worker::Operation& operation, engine::Group& group);
  core::Status put(const std::shared_ptr<Staged>& staged, StagingRequest& request, engine::Group& group);
  core::Status put_within(const std::shared_ptr<Staged>& staged, const Slice& slice);
  core::Status put_in(const std::shared_ptr<Staged>& staged, Slice slice, engine::Group& group);
  /// Puts out the first of open_ways_ and removes it from there, even on an error.
  core::Status put_next_out();
  /// The in stream waits until the places of the slices up to `number` are free.
  core::Status wait_for_place(std::uint64_t number);
  core::Status record_freed();
  core::Status end(Staged& staged);  // mutex_ held
  core::Status complete_enqueue(Staged& staged);
  std::uint64_t ring_bytes(std::uint64_t slice_bytes, std::uint64_t operation_bytes, std::uint64_t have) const;
  core::Status make_room(std::uint64_t slice_bytes, std::uint64_t operation_bytes);
  const schedule::Topology* topology_of(engine::Group& group);
  void choose_codes(std::vector<Slice>& slices, const StagingRequest& request, engine::Group& group, bool rails);
  bool can_encode();
  void make_direct(std::vector<Slice>& slices, const worker::Operation& operation, engine::Group& group, bool rails);
  core::Result<device::HostMemory> pin(std::uint64_t& bytes, std::uint64_t slice_bytes);
  void break_down(const core::Status& status, engine::Group* group);

  /// On the driver's thread: checks whether device and library still work. The Stager's thread acts on the findings.
  void look();

  // On the Stager's thread, which makes no driver call.
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
  void slice_done(std::uint64_t number, Staged& staged, const worker::Outcome& outcome, const SliceResults& results);

  const std::shared_ptr<Stager> stager_;
  const std::shared_ptr<device::Device> device_;
  const std::weak_ptr<engine::Group> group_;
  const ChannelOptions options_;
  const std::shared_ptr<DevicePool> pool_;
  core::Status opened_;
  int streams_that_wait_ = 0;  // of this channel, in pool_->streams_that_wait(); mutex_ held
  device::DeviceStream in_;
  device::DeviceStream out_;
  device::HostMemory flags_;
  device::Flag ready_;
  device::Flag done_;
  device::Flag ended_;

  mutable std::mutex mutex_;  // guards what is put on the streams
  core::Status broken_;
  device::HostMemory memory_;
  Ring ring_;
  std::uint64_t numbers_ = 0;                   // slices so far; the first is 1
  std::uint64_t ends_ = 0;                      // operations whose end is on the out stream
  std::uint64_t arrived_ = 0;                   // the out stream comes after the ways in of the slices up to this one
  std::uint64_t placed_out_ = 0;                // the last slice with a place whose way back is on the out stream
  std::uint64_t free_until_ = 0;                // the in stream comes after the places of the slices up to this one
  std::deque<Freed> freed_;                     // of later slices
  std::optional<schedule::Topology> topology_;  // of the group, set once the group is open
  std::optional<bool> can_encode_;              // set once the device was asked
  bool no_direct_ = false;                      // an attempt to make direct_ failed
  std::vector<std::shared_ptr<DirectRing>> smaller_direct_;  // kept, because streams may use these rings
  std::deque<WayBack> open_ways_;                            // ways back that are not on the out stream yet
  bool warned_ = false;
  std::uint64_t pinned_bytes_max_ = ~std::uint64_t{0};  // more could not be pinned
  bool agreed_ = false;                                 // the ranks have agreed, or tried to agree, about Local
  std::uint64_t ways_open_ = 0;  // how many ways in of the current operation may be ahead of the ways out
  bool frees_each_ = false;      // each slice of the current operation frees its place

  // Held only briefly, because the engine's loop takes this mutex. Lock order: mutex_ first.
  mutable std::mutex progress_mutex_;
  std::deque<WaitingSlice> waiting_;
  std::deque<bool> slices_done_;  // of the slices after done_until_
  std::uint64_t done_until_ = 0;
  std::deque<std::shared_ptr<Staged>> staged_;  // in order of their ends
  std::deque<Retired> retired_;
  int putting_ = 0;
  std::shared_ptr<Staged> failed_;      // an operation that failed since the last enqueue()
  std::shared_ptr<Local> local_;        // set once
  std::shared_ptr<DirectRing> direct_;  // written with mutex_ held as well
  core::Status device_failed_;          // what look() has found
  core::Status local_found_;
  core::Status local_failed_;
  bool withheld_ = false;  // "done" stays as it is until local_ is stopped
  bool released_ = false;  // "done" is never withheld again
  core::TimePoint release_by_ = core::TimePoint::max();
  core::TimePoint next_trouble_{};
};

/// A slice's number, as a flag holds it.
inline std::uint32_t word_of(std::uint64_t number) { return static_cast<std::uint32_t>(number); }
/// The byte that each byte of a result gets which the network did not bring: NaN in every type that has one, true in
/// bool, all bits set in the others.
unsigned char mark_of(core::DType dtype) noexcept;
/// Error kUnsupported: a graph is recorded on the stream.
core::Status check_not_captured(device::Device& device, device::DeviceStream stream);
/// The error of `what` when the group is gone.
core::Status group_is_gone(const std::string& what);

}  // namespace hybridps::staging
