// hybridps/staging/coded.h: slices whose elements the device encodes, so that only codes are staged.
//
// Model    Pure. The device encodes the rank's contribution before the copies in, and decodes the result after the
//          copies out, in memory beside the tensors. The engine gets an operation whose memory is coded
//          (worker::Operation::coded). Each rank may do so or not: messages and bits are the same as when the engine
//          encodes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridps/schedule/plan.h"
#include "hybridps/staging/slices.h"

namespace hybridps::staging {

/// Whether the device can encode the slice. The slice must be int8 between nodes, and nothing of it is remembered.
/// `rails`: the slice comes from cut_for_rails(). False where ranks of the node add up elements in host memory, and
/// where a tensor ends inside a block.
bool can_be_coded(const Slice& slice, const schedule::Topology& topology, bool rails);

/// Bytes of device memory for a slice that can_be_coded().
std::uint64_t room_for_codes(const Slice& slice);

/// Makes such a slice coded. `memory` has room_for_codes() bytes, is aligned to 4 bytes, and stays until the operation
/// is over. `ranks`: size of the group.
void code_on_device(Slice& slice, std::byte* memory, int ranks);

}  // namespace hybridps::staging
