// hybridps/staging/pairs.h: gather, scatter and all_to_all on device memory, where the ranks of a node work together.
//
// Model    Pure. What a rank has for one of its node goes there by a LocalGroup, what it has for itself is moved on the
//          device, and neither is staged. What it has for ranks of other nodes goes through staging, from rank to rank, as
//          one operation of the engine (Scope::kNodes), while the other two are done.
// Agreement each rank has its own sizes. All ranks of a node make the step (gather and scatter: on the root's node), also
//          those that have nothing for the others.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/staging/slices.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

bool is_pairwise(schedule::Kind kind) noexcept;

/// What must hold for cut_pairs(): each other rank's part lies in one run (both ends of a message are cut alike), and a rank
/// has for itself what it expects. Else kInvalidArgument.
core::Status check_pairs(const worker::Operation& operation, const schedule::Topology& topology);

Slice cut_pairs(const worker::Operation& operation, const schedule::Topology& topology);

/// `bytes` of the input or output, in `pieces`, as the engine wants them where no pieces tell (schedule::Request).
std::vector<std::uint64_t> sizes_for_engine(const worker::Operation& operation, const schedule::Topology& topology,
                                            const std::vector<worker::Piece>& pieces,
                                            const std::vector<std::uint64_t>& bytes);

}  // namespace hybridps::staging
