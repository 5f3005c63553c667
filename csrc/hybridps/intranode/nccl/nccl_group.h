// hybridps/intranode/nccl/nccl_group.h: LocalGroups made of NCCL communicators.
//
// Model    One communicator per lane, each made by ncclCommInitRankConfig with blocking = 0 (never split off another, so
//          nothing is shared). Parts of one call are one NCCL group, hence one launch. After each call the communicator is
//          asked until it is no longer in progress: only then is the work on the stream, and an event may follow it.
//          Those of a group that also uses the network have few blocks each, so that kernels of a dozen groups, which reach
//          the GPUs of a node in different orders, have room beside each other. Groups share no communicator: decision 33.
// Rules    (NCCL user guide)
//          Group calls, "Nonblocking Group Operation": after ncclGroupEnd() has returned ncclInProgress no other call
//          and no CUDA call on the stream, until ncclCommGetAsyncError() says ncclSuccess.
//          Communicators, "Using multiple NCCL communicators concurrently": all ranks launch the work of all communicators
//          in one order.
//          Communicators, "Finalizing", "Destroying", "abort": a healthy communicator is finalized, asked until it is done,
//          and destroyed; any other is aborted, which may be done while another thread waits for it, and after which
//          nothing may touch it. Before that, if no call is in progress and NCCL has it (2.29), it is revoked: kernels
//          end, and their memory stays until they have. "After revoke completes, the communicator is quiesced".
//          Collectives: in-place means that `from` of a rank's part is its place in `to`, which it is wherever the two
//          overlap here.
// Threads  as LocalGroup. Finalizing and aborting may wait for the device, so they are done on threads of their own,
//          which no other thread waits for but drain().
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
  /// `api` outlives it.
  explicit NcclGroups(const NcclApi& api) : api_(api) {}

  std::string describe() const override { return "NCCL " + api_.version_text(); }
  /// Not: bit operations, 16-bit integers, bool and float8, which NCCL has not or not on every GPU; averages of
  /// integers, which it does not round as we do.
  bool can_reduce(core::DType dtype, core::ReduceOp op) const noexcept override;
  core::Result<std::string> make_id() override;
  core::Result<std::shared_ptr<LocalGroup>> connect(std::shared_ptr<device::Device> device, int rank, int size,
                                                    const std::vector<std::string>& ids,
                                                    const Patience& patience) override;

  /// Waits until the communicators of groups that are gone are destroyed, or `patience` has passed: whether they are.
  static bool drain(std::chrono::milliseconds patience);

 private:
  const NcclApi& api_;
};

}  // namespace hybridps::intranode
