// hybridps/staging/rails.h: how an operation on device memory becomes steps inside the nodes, by a LocalGroup, and
// operations between the nodes, by the engine.
//
// Model    Pure. A slice is cut into rails, as many as the largest node has ranks; rail r belongs to local rank
//          r modulo the node's ranks, on every node:
//            before   inside the node: each rail's sum comes to its rank (broadcast: the root's bytes to all)
//            in       that rank's rails to staging
//            engine   between the rail's ranks of all nodes, Scope::kNodes
//            out      back to the device
//            after    inside the node: from each rail's rank to all
//          The steps before and after are one each for all slices: with the first's way in, and the last's way out.
//          On one node: one step, nothing else. A node of one rank has nothing to do before and after.
//          What pairs of ranks exchange has no rails: pairs.h.
// Agreement the ranks of a node make the same steps with the same parts: they depend on the operation's sizes, the topology
//          and SliceLimits, and on how the tensors are cut into pieces, which all ranks must do alike (torch: one per tensor).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/schedule/plan.h"
#include "hybridps/staging/slices.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

/// Kinds that have such steps.
bool has_rails(schedule::Kind kind) noexcept;

/// Device memory beside the tensors that the operation needs on this rank.
std::uint64_t scratch_bytes(const worker::Operation& operation, const schedule::Topology& topology,
                            const SliceLimits& limits);

/// `scratch` has scratch_bytes(). All slices have the same staging_bytes on all ranks of a node.
std::vector<Slice> cut_for_rails(const worker::Operation& operation, const schedule::Topology& topology,
                                 const SliceLimits& limits, std::byte* scratch);

/// The operation as ranks compare it when the call is made.
worker::Operation witness_of(const worker::Operation& operation, const schedule::Topology& topology);

}  // namespace hybridps::staging
