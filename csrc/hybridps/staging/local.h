// hybridps/staging/local.h: what the ranks of a group have agreed on about the GPUs of their nodes.
//
// Model    agree() is a collective of the group: two all_gathers, which the engine runs as any other operation. In the
//          first, each rank says which card it uses, which library (intranode::LocalGroups) it has, and what this
//          library can reduce. In the second, each rank says whether it has joined the group of its node. All ranks
//          reach the same answer: all use Local, or none does and the obstacle is logged. A missing rank is named as in
//          any operation.
// Threads  agree() blocks the caller, as a group's first call does with NCCL. run(): one at a time. poll() and abort():
//          any thread.
// Errors   agree() returns errors of the group or the device. A library that cannot be used is no error.
#pragma once

#include <bitset>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>

#include "hybridps/core/dtype.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/device/device.h"
#include "hybridps/engine/group.h"
#include "hybridps/intranode/local_group.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/staging/device_pool.h"
#include "hybridps/staging/slices.h"

namespace hybridps::staging {

struct LocalOptions {
  /// Null: this rank has no library, and `why_not` says why.
  std::shared_ptr<intranode::LocalGroups> library;
  std::string why_not;
  bool wanted = false;  // an unusable library is logged as a warning; else only where every rank has its own card
  bool off = false;     // switched off by a setting: logged at level info
};

class Local : core::Pinned {
 public:
  /// The types and operations that a node's library can reduce.
  using Pairs = std::bitset<std::size_t{core::kDTypeCount} * core::kReduceOpCount>;

  /// Null: Local is not used. `pool`: of `device`. `limits`: this rank's limits; the smallest limits of all ranks hold.
  static core::Result<std::shared_ptr<Local>> agree(engine::Group& group, DevicePool& pool,
                                                    const std::shared_ptr<device::Device>& device,
                                                    const LocalOptions& options, const SliceLimits& limits,
                                                    std::chrono::milliseconds timeout);

  const schedule::Topology& topology() const noexcept { return topology_; }
  const SliceLimits& limits() const noexcept { return limits_; }
  /// Whether the operation uses Local. All ranks get the same answer.
  bool takes(const worker::Operation& operation) const noexcept;

  core::Status run(const LocalStep& step, intranode::Leg leg, device::DeviceStream stream,
                   const intranode::Patience& patience);
  core::Status poll() { return group_ ? group_->poll() : core::Status(); }
  void abort() noexcept {
    if (group_) group_->abort();
  }
  bool is_stopped() const noexcept { return !group_ || group_->is_stopped(); }

 private:
  Local(schedule::Topology topology, SliceLimits limits, Pairs pairs, std::shared_ptr<intranode::LocalGroup> group)
      : topology_(std::move(topology)), limits_(limits), pairs_(pairs), group_(std::move(group)) {}

  const schedule::Topology topology_;
  const SliceLimits limits_;
  const Pairs pairs_;
  const std::shared_ptr<intranode::LocalGroup> group_;  // null on a node of one rank
};

}  // namespace hybridps::staging
