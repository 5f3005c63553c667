// hybridps/intranode/nccl/nccl_group.h: LocalGroups made of NCCL communicators.
//
// Model    One communicator per leg, made by ncclCommInitRankConfig with blocking = 0 (never split off another
//          communicator, so nothing is shared). The parts of one call are one NCCL group, so one launch. After each
//          call, the communicator is polled until it is no longer in progress. Only then is the work on the stream, and
//          an event may follow the work.
//          Communicators of a group that also uses the network have few blocks each. A dozen groups may reach the GPUs
//          of a node in different orders, and their kernels then still fit on a GPU together. Groups share no
//          communicator (decision 33: docs/decisions/devices.md).
// Rules    (NCCL user guide)
//          Group calls, "Nonblocking Group Operation": after ncclGroupEnd() has returned ncclInProgress, make no other
//          call and no CUDA call on the stream, until ncclCommGetAsyncError() says ncclSuccess.
//          Communicators, "Using multiple NCCL communicators concurrently": all ranks launch the work of all
//          communicators in one order.
//          Communicators, "Finalizing", "Destroying", "abort": a healthy communicator is finalized, polled until done,
//          and destroyed. Any other communicator is aborted. During the abort, another thread may still wait for the
//          communicator; afterwards nothing may touch the communicator. If no call is in progress and NCCL has revoke
//          (2.29), the communicator is first revoked: its kernels end, and their memory stays until then. "After revoke
//          completes, the communicator is quiesced".
//          Collectives: in-place means that `from` of a rank's part is its place in `to`. Here every `from` and `to`
//          that overlap are in-place.
// Threads  as LocalGroup. Finalizing and aborting may wait for the device, so they run on threads of their own. Only
//          drain() waits for these threads.
#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/intranode/local_group.h"
#include "hybridps/intranode/nccl/nccl_api.h"

namespace hybridps::intranode {

class NcclGroups final : public LocalGroups {
 public:
  /// `api` must outlive this object.
  explicit NcclGroups(const NcclApi& api) : api_(api) {}

  std::string describe() const override { return "NCCL " + api_.version_text(); }
  /// False for bit operations, 16-bit integers, bool and float8: NCCL lacks them, or lacks them on some GPUs. False for
  /// averages of integers, because NCCL does not round as we do.
  bool can_reduce(core::DType dtype, core::ReduceOp op) const noexcept override;
  core::Result<std::string> make_id() override;
  core::Result<std::shared_ptr<LocalGroup>> connect(std::shared_ptr<device::Device> device, int rank, int size,
                                                    const std::vector<std::string>& ids,
                                                    const Patience& patience) override;

  /// Waits at most `patience` until the communicators of destroyed groups are destroyed. True: all are destroyed.
  static bool drain(std::chrono::milliseconds patience);

 private:
  const NcclApi& api_;
};

}  // namespace hybridps::intranode
