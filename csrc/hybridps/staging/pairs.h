// hybridps/staging/pairs.h: gather, scatter and all_to_all on device memory, where the ranks of a node work together.
//
// Model    Pure. A LocalGroup carries what a rank has for ranks of its own node. The device moves what the rank has for
//          itself. Neither is staged. What the rank has for ranks of other nodes goes through staging, from rank to
//          rank, as one operation of the engine (Scope::kNodes), at the same time.
// Agreement each rank has its own sizes. All ranks of a node make the step (gather and scatter: on the root's node),
//          even ranks that have nothing for the others.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridps/core/status.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/staging/slices.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

bool is_pairwise(schedule::Kind kind) noexcept;

/// Checks the conditions of cut_pairs(). Each other rank's part lies in one run (both ends of a message are cut alike),
/// checked for ranks of this node. What a rank has for itself has the size that the rank expects. Else
/// kInvalidArgument.
core::Status check_pairs(const worker::Operation& operation, const schedule::Topology& topology);

Slice cut_pairs(const worker::Operation& operation, const schedule::Topology& topology);

/// The sizes of the input or output in `pieces`, as the engine wants them where it gets no pieces (schedule::Request).
/// `bytes`: the operation's sizes per rank.
std::vector<std::uint64_t> sizes_for_engine(const worker::Operation& operation, const schedule::Topology& topology,
                                            const std::vector<worker::Piece>& pieces,
                                            const std::vector<std::uint64_t>& bytes);

}  // namespace hybridps::staging
