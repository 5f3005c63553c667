// tests/simulated/library.h: what NCCL is to GPUs, for simulated devices of processes of one machine. Free of torch.
//
// Model    Each rank has an area of shared memory in each leg of a group. A call is a kernel: it puts there what its
//          rank gives, waits for the kernels of the others, and takes what it needs. It holds up its hardware queue
//          meanwhile, as NCCL's kernels do. What a call reads and writes of the device goes into the device's book
//          (Order); calls that differ between ranks are reported there.
// Sums     in rank order, as hybridps makes them of CPU tensors: the same bits, but for averages.
// Threads  as LocalGroup.
#pragma once

#include <cstdint>
#include <memory>

#include "hybridps/intranode/local_group.h"

namespace hybridps::simulated {

std::shared_ptr<intranode::LocalGroups> make_library();
/// Of this process so far.
std::uint64_t library_calls();

}  // namespace hybridps::simulated
