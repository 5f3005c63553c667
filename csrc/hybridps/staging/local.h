// hybridps/staging/local.h: what the ranks of a group have agreed on about the GPUs of their nodes.
//
// Model    agree() is a collective of the group: in two all_gathers, through the engine as any other operation, each rank
//          says which card it uses, which library (intranode::LocalGroups) it has and what that can reduce, and then
//          whether it has joined the group of its node. All come to the same answer: all use Local, or none does and what
//          is in the way is logged. A rank that is missing is named as in any operation.
// Threads  agree() blocks the caller, as a group's first call does with NCCL. run(): one at a time. poll() and abort() any.
// Errors   of agree(): the group's own, or the device's. A library that cannot be used is not one.
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
#include "hybridps/staging/slices.h"

namespace hybridps::staging {

struct LocalOptions {
  /// Null: this rank has none, and `why_not` says why.
  std::shared_ptr<intranode::LocalGroups> library;
  std::string why_not;
  bool wanted = false;  // log at warning level where it cannot be used; else only where every rank has a card of its own
  bool off = false;     // by a setting: then at info
};

class Local : core::Pinned {
 public:
  /// Types and operations that the library of a node can reduce.
  using Pairs = std::bitset<std::size_t{core::kDTypeCount} * core::kReduceOpCount>;

  /// Null: not used. `limits` are this rank's; the least of all ranks' hold.
  static core::Result<std::shared_ptr<Local>> agree(engine::Group& group, const std::shared_ptr<device::Device>& device,
                                                    const LocalOptions& options, const SliceLimits& limits,
                                                    std::chrono::milliseconds timeout);

  const schedule::Topology& topology() const noexcept { return topology_; }
  const SliceLimits& limits() const noexcept { return limits_; }
  /// Whether this operation goes this way: the same answer on all ranks.
  bool takes(const worker::Operation& operation) const noexcept;

  core::Status run(const LocalStep& step, intranode::Leg leg, device::DeviceStream stream, const intranode::Patience& patience);
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
