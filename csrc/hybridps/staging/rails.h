// hybridps/staging/rails.h: how an operation on device memory becomes steps inside the nodes, by a LocalGroup, and
// operations between the nodes, by the engine.
//
// Model    Pure. A slice is cut into rails: as many rails as the largest node has ranks. On every node, rail r belongs
//          to local rank r modulo the number of the node's ranks:
//            before   inside the node: each rail's sum comes to its rank (broadcast: the root's bytes to all)
//            in       that rank's rails to staging
//            engine   between the rail's ranks of all nodes, Scope::kNodes
//            out      back to the device
//            after    inside the node: from each rail's rank to all
//          All slices share one step before, with the way in of the first slice, and one step after, with the way out
//          of the last slice. On a single node there is one step and nothing else. A node of one rank has no step
//          before or after. Exchanges between pairs of ranks have no rails: pairs.h.
// Agreement the ranks of a node make the same steps with the same parts. The parts depend on the operation's sizes, the
//          topology, SliceLimits, and how the tensors are cut into pieces. All ranks must cut tensors alike (torch: one
//          piece per tensor).
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/schedule/plan.h"
#include "hybridps/staging/slices.h"
#include "hybridps/worker/operation.h"

namespace hybridps::staging {

/// Whether the kind has rails or pairwise steps.
bool has_rails(schedule::Kind kind) noexcept;

/// Bytes of device memory that the operation needs on this rank, beside the tensors.
std::uint64_t scratch_bytes(const worker::Operation& operation, const schedule::Topology& topology,
                            const SliceLimits& limits);

/// `scratch` has scratch_bytes() bytes. All ranks of a node have slices with the same staging_bytes.
std::vector<Slice> cut_for_rails(const worker::Operation& operation, const schedule::Topology& topology,
                                 const SliceLimits& limits, std::byte* scratch);

/// The operation in the form that ranks compare when the call is made.
worker::Operation witness_of(const worker::Operation& operation, const schedule::Topology& topology);

}  // namespace hybridps::staging
