// hybridps/intranode/local_group.h: collectives among the ranks of one node that have a GPU each.
//
// Model    A LocalGroup is one rank's end. Its calls put work on a stream and return when it is there; the work waits for
//          the same call of every other rank and then moves device memory. Two legs, each with an order of its own:
//          all ranks make the same calls on a leg in the same order, with the same parts (their pointers differ)
//          or, in exchange(), with parts that meet.
//          Ranks also make the calls of both legs in one common order: two kernels that wait for their counterparts may
//          not fit on a GPU together.
//          What is called differently on different ranks gives wrong results or hangs, as in NCCL: who calls has compared.
// Owner    of the memory: the caller, until the stream has come past the call.
// Threads  abort(), poll() from any thread at any time; the calls one at a time.
// Blocking a call may wait for the other ranks' same call while connections are made (the first of its kind), no longer
//          than its Patience.
// Errors   Status. After one nothing further may be called but abort(), and what is on the streams may never end until
//          abort() is called.
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

/// What is done before the network has it, and what after.
enum class Leg : std::uint8_t { kIn = 0, kOut = 1 };
inline constexpr int kLegs = 2;

/// A run of device memory; whole elements. A part of 0 bytes is nothing.
struct Part {
  int rank = 0;  // local: holds the sum after reduce(), the bytes before spread()
  std::uint64_t bytes = 0;
  const std::byte* from = nullptr;  // all_reduce, reduce: on every rank; spread: on `rank` alone
  std::byte* to = nullptr;          // all_reduce, spread: on every rank; reduce: on `rank` alone
  /// On every rank, the memory that every rank has (reduce: from, spread: to) begins where that of the part before ends.
  bool follows = false;
};

/// One end of what goes from one rank to another; whole elements, never 0 bytes.
struct Transfer {
  int peer = 0;  // local, another rank
  std::uint64_t bytes = 0;
  const std::byte* from = nullptr;  // set: to the peer
  std::byte* to = nullptr;          // set: from the peer; one of both
};

struct Reduction {
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  double factor = 1.0;  // kPremulSum: this rank's
  bool operator==(const Reduction&) const = default;
};

/// How long a call may wait for other ranks, and whether it still makes sense to.
struct Patience {
  core::Deadline until = core::Deadline::never();
  std::function<core::Status()> still_wanted;  // empty: always
  /// Why to stop waiting now.
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
  /// Nothing that it has put on a stream runs any more or is still to begin: what such work uses may be freed now.
  virtual ~LocalGroup() = default;

  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;

  /// Each part's sum to every rank. `from` may be `to`; otherwise memory does not overlap, here and below.
  virtual core::Status all_reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts,
                                  const Reduction& reduction, const Patience& patience) = 0;
  /// Each part's sum to its rank.
  virtual core::Status reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                              const Patience& patience) = 0;
  /// Each part from its rank to every rank.
  virtual core::Status spread(Leg leg, device::DeviceStream stream, std::span<const Part> parts,
                              const Patience& patience) = 0;
  /// What each rank has for each other. The messages from one rank to another are the same, in the same order, to both;
  /// else nothing is alike, and a rank may have none: it calls as well.
  virtual core::Status exchange(Leg leg, device::DeviceStream stream, std::span<const Transfer> messages,
                                const Patience& patience) = 0;

  /// What has gone wrong by itself since. Returns at once.
  virtual core::Status poll() = 0;
  /// Work that runs on the streams ends soon, undone; calls under way and later ones return kAborted. Returns at once.
  /// Idempotent. What is on a stream and has not begun, since it waits there for a flag, may still begin: it ends as
  /// soon once is_stopped(), and until then may do its work with other ranks. Its memory stays until the destructor.
  virtual void abort() noexcept = 0;
  /// After abort(): whether work that begins from now on ends at once, undone. Does not wait, makes no call.
  virtual bool is_stopped() const noexcept = 0;
};

/// Makes LocalGroups: a library.
class LocalGroups : core::Pinned {
 public:
  virtual ~LocalGroups() = default;

  /// For messages and comparison: ranks of a node need the same. "NCCL 2.30.7".
  virtual std::string describe() const = 0;
  /// Whether all_reduce() and reduce() know the pair. Everything else moves bytes.
  virtual bool can_reduce(core::DType dtype, core::ReduceOp op) const noexcept = 0;
  /// A new group's name, made by one of its ranks and given to all; at most kIdBytesMax bytes.
  static constexpr std::size_t kIdBytesMax = 128;
  virtual core::Result<std::string> make_id() = 0;
  /// Waits for the other ranks. One id per leg that will be used (kIn first; a single one: kOut alone).
  virtual core::Result<std::shared_ptr<LocalGroup>> connect(std::shared_ptr<device::Device> device, int rank, int size,
                                                            const std::vector<std::string>& ids,
                                                            const Patience& patience) = 0;
};

}  // namespace hybridps::intranode
