// hybridps/intranode/local_group.h: collectives among the ranks of one node, where each rank has its own GPU.
//
// Model    A LocalGroup is one rank's end. A call puts work on a stream and then returns. The work waits for the same
//          call of every other rank, and then moves device memory.
//          There are two legs, each with its own order. All ranks make the same calls on a leg in the same order, with
//          the same parts (pointers differ). In exchange(), instead, the parts of both ends match.
//          Ranks also make the calls of both legs in one common order, because two kernels that wait for their
//          counterparts may not fit on a GPU together. Calls that differ between ranks give wrong results or hang, as
//          in NCCL. So the caller compares the calls first.
// Owner    the caller owns the memory, which stays until the stream has passed the call.
// Threads  abort(), poll() from any thread at any time; the other calls one at a time.
// Blocking the first call of a kind makes connections, and may wait for the other ranks' same call, no longer than its
//          Patience.
// Errors   Status. After an error, only abort() may be called. The work on the streams may never end until abort() is
//          called.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/dtype.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"

namespace hybridps::intranode {

/// kIn: work before the network; kOut: work after the network.
enum class Leg : std::uint8_t { kIn = 0, kOut = 1 };
inline constexpr int kLegs = 2;

/// A run of device memory, in whole elements. A part of 0 bytes does nothing.
struct Part {
  int rank = 0;  // local rank: holds the sum after reduce(), or the bytes before spread()
  std::uint64_t bytes = 0;
  const std::byte* from = nullptr;  // all_reduce, reduce: set on every rank; spread: only on `rank`
  std::byte* to = nullptr;          // all_reduce, spread: set on every rank; reduce: only on `rank`
  /// The memory that every rank has (reduce: from, spread: to) begins where the part before ends. On every rank.
  bool follows = false;
};

/// One end of a message between two ranks, in whole elements, never 0 bytes.
struct Transfer {
  int peer = 0;  // local rank, not this rank
  std::uint64_t bytes = 0;
  const std::byte* from = nullptr;  // set: bytes to send to the peer
  std::byte* to = nullptr;          // set: place for bytes from the peer. Exactly one of `from` and `to` is set
};

struct Reduction {
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  double factor = 1.0;  // kPremulSum: this rank's factor
  bool operator==(const Reduction&) const = default;
};

/// How long a call may wait for other ranks, and whether the call is still wanted.
struct Patience {
  core::Deadline until = core::Deadline::never();
  std::function<core::Status()> still_wanted;  // empty: always wanted
  /// An error if the wait should stop now.
  core::Status check(const char* what) const {
    if (still_wanted)
      if (core::Status status = still_wanted(); !status.is_ok()) return status;
    if (until.has_passed(core::Clock::now()))
      return core::Status(core::Code::kTimeout,
                          std::string(what) + ": the other ranks of the node did not come in time");
    return {};
  }
};

class LocalGroup : core::Pinned {
 public:
  /// Precondition: no work of the group runs on a stream or is still to begin. What such work uses may be freed now.
  virtual ~LocalGroup() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// Gives each part's sum to every rank. `from` may equal `to`; otherwise memory does not overlap, here and below.
  virtual core::Status all_reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts,
                                  const Reduction& reduction, const Patience& patience) = 0;
  /// Gives each part's sum to the part's rank.
  virtual core::Status reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts,
                              const Reduction& reduction, const Patience& patience) = 0;
  /// Gives each part from its rank to every rank.
  virtual core::Status spread(Leg leg, device::DeviceStream stream, std::span<const Part> parts,
                              const Patience& patience) = 0;
  /// Sends messages between pairs of ranks. Both ranks of a pair list the same messages in the same order. Otherwise
  /// ranks may differ. A rank without messages calls too.
  virtual core::Status exchange(Leg leg, device::DeviceStream stream, std::span<const Transfer> messages,
                                const Patience& patience) = 0;

  /// Puts work of every kind on the stream, so that no later call is the first of its kind: a first call may wait for
  /// the device, and could stand behind a flag that only the network sets. All ranks call, once for each leg, before
  /// other calls. `memory`: first_use_bytes() of device memory; its contents are lost.
  virtual core::Status first_use(Leg /*leg*/, device::DeviceStream /*stream*/, std::byte* /*memory*/,
                                 const Patience& /*patience*/) {
    return {};
  }
  /// 0: first_use() does nothing.
  virtual std::uint64_t first_use_bytes() const noexcept { return 0; }

  /// An error that has happened outside of calls. Returns at once.
  virtual core::Status poll() = 0;
  /// Running work ends soon, undone. Calls under way and later calls return kAborted. Returns at once. Idempotent. Work
  /// that waits on a stream for a flag may still begin. Once is_stopped(), such work ends soon too. Until is_stopped(),
  /// such work may be done with other ranks. Memory of the work stays until the destructor.
  virtual void abort() noexcept = 0;
  /// After abort(): whether work that begins from now on ends at once, undone. Does not wait, makes no driver call.
  virtual bool is_stopped() const noexcept = 0;
};

/// A library that makes LocalGroups.
class LocalGroups : core::Pinned {
 public:
  virtual ~LocalGroups() = default;

  /// For messages and comparison, as "NCCL 2.30.7". All ranks of a node need the same text.
  virtual std::string describe() const = 0;
  /// Whether all_reduce() and reduce() support the pair. Other calls move bytes of any type.
  virtual bool can_reduce(core::DType dtype, core::ReduceOp op) const noexcept = 0;
  /// Makes a new group's name, at most kIdBytesMax bytes. One rank of the group makes the name and gives it to all.
  static constexpr std::size_t kIdBytesMax = 128;
  virtual core::Result<std::string> make_id() = 0;
  /// Waits for the other ranks. The caller then sees to first_use(). `ids`: one per leg that will be used (kIn first; a
  /// single id is for kOut alone).
  virtual core::Result<std::shared_ptr<LocalGroup>> connect(std::shared_ptr<device::Device> device, int rank, int size,
                                                            const std::vector<std::string>& ids,
                                                            const Patience& patience) = 0;
};

}  // namespace hybridps::intranode
