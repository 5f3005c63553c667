// hybridps/staging/coded.h: slices whose elements become codes on the device, so that no more than those is staged.
//
// Model    Pure. The device encodes what the rank contributes before the copies in, and decodes the result after the copies
//          out, in memory beside the tensors; the engine is given an operation whose memory is coded (worker::Operation::
//          coded). Each rank may do so or not: messages and bits are the same as where the engine encodes.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridps/schedule/plan.h"
#include "hybridps/staging/slices.h"

namespace hybridps::staging {

/// Whether the device can code the slice, which is int8 between nodes and of which nothing is remembered. `rails`: as cut_for_rails()
/// made it. Not: where ranks of the node add up elements in host memory, and where a tensor ends inside a block.
bool can_be_coded(const Slice& slice, const schedule::Topology& topology, bool rails);

/// Device memory for one that can.
std::uint64_t room_for_codes(const Slice& slice);

/// Of such a slice. `memory` has room_for_codes(), aligned to 4 bytes, and stays until the operation is over. `ranks`: of the group.
void code_on_device(Slice& slice, std::byte* memory, int ranks);

}  // namespace hybridps::staging
