// hybridps/intranode/fake/fake_local_group.h: LocalGroups among fake devices of one process, for tests.
//
// Model    A call is a kernel on a fake device: it holds up its hardware queue until the kernels of all ranks have come,
//          as NCCL's do, and then works on the ranks' memory directly. Calls that differ between ranks are counted
//          and never end before abort(), as the real library may do. abort() is one rank's own affair: others do not see it.
//          It may take its time (hold_stops()), as that of a library that does it on another thread. A group that is
//          destroyed takes away the memory of its kernels: one that still runs, or begins later, is counted.
// Threads  as LocalGroup.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hybridps/intranode/local_group.h"

namespace hybridps::intranode {

struct FakeLocalOptions {
  std::string name = "fake library 1";
  bool connect_fails = false;  // on this rank
};

/// What the ends of groups of one process share.
class FakeLocalHub;

class FakeLocalGroups final : public LocalGroups {
 public:
  explicit FakeLocalGroups(std::shared_ptr<FakeLocalHub> hub, FakeLocalOptions options = {});
  static std::shared_ptr<FakeLocalHub> make_hub();
  /// Calls of one place that were not alike, over all groups of the hub.
  static int mismatches(const FakeLocalHub& hub);
  /// Calls that were put on streams, over all groups of the hub and all ranks.
  static int calls(const FakeLocalHub& hub);
  /// What was sent by exchange(), over all groups of the hub.
  static std::uint64_t exchanged_bytes(const FakeLocalHub& hub);
  /// That had lost their memory, over all groups of the hub.
  static int late_kernels(const FakeLocalHub& hub);
  /// While it holds, groups that are aborted do not come to is_stopped().
  static void hold_stops(FakeLocalHub& hub, bool hold);
  /// Whether the ranks of each group made their calls, of both lanes, in one order.
  static bool is_one_order(FakeLocalHub& hub);

  std::string describe() const override { return options_.name; }
  bool can_reduce(core::DType dtype, core::ReduceOp op) const noexcept override;
  core::Result<std::string> make_id() override;
  core::Result<std::shared_ptr<LocalGroup>> connect(std::shared_ptr<device::Device> device, int rank, int size,
                                                    const std::vector<std::string>& ids,
                                                    const Patience& patience) override;

 private:
  const std::shared_ptr<FakeLocalHub> hub_;
  const FakeLocalOptions options_;
};

}  // namespace hybridps::intranode
