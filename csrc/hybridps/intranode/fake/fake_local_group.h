// hybridps/intranode/fake/fake_local_group.h: LocalGroups among fake devices of one process, for tests.
//
// Model    A call is a kernel on a fake device. Like NCCL's kernels, the kernel holds up its hardware queue until the
//          kernels of all ranks have come. Then the kernel works on the ranks' memory directly. Calls that differ
//          between ranks are counted, and do not end before abort(), as with a real library. abort() affects one rank
//          only, and other ranks do not see it. abort() may take time (hold_stops()), as in a library that aborts on
//          another thread. The destructor frees the memory of the group's kernels: a kernel that still runs, or begins
//          later, is counted.
// Threads  as LocalGroup.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "hybridps/intranode/local_group.h"

namespace hybridps::device {
class FakeDevice;
}

namespace hybridps::intranode {

struct FakeLocalOptions {
  std::string name = "fake library 1";
  bool connect_fails = false;  // simulates a failure on this rank
  bool has_first_use = false;  // first_use() is an all_reduce, else nothing
  /// The FakeDevice below another Device. Null: devices are FakeDevices.
  std::shared_ptr<device::FakeDevice> (*fake_of)(const std::shared_ptr<device::Device>&) = nullptr;
};

/// The state that the groups of one process share.
class FakeLocalHub;

class FakeLocalGroups final : public LocalGroups {
 public:
  explicit FakeLocalGroups(std::shared_ptr<FakeLocalHub> hub, FakeLocalOptions options = {});
  static std::shared_ptr<FakeLocalHub> make_hub();
  /// Calls that differed between ranks, over all groups of the hub.
  static int mismatches(const FakeLocalHub& hub);
  /// Calls put on streams, over all groups and ranks of the hub.
  static int calls(const FakeLocalHub& hub);
  /// Bytes sent by exchange(), over all groups of the hub.
  static std::uint64_t exchanged_bytes(const FakeLocalHub& hub);
  /// Kernels that ran after their memory was freed, over all groups of the hub.
  static int late_kernels(const FakeLocalHub& hub);
  /// While `hold` is true, aborted groups do not reach is_stopped().
  static void hold_stops(FakeLocalHub& hub, bool hold);
  /// Whether the ranks of each group made their calls, of both legs, in one order.
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
