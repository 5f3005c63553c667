// hybridps/worker/operation.h: one collective or point-to-point operation, as submitted by pg/.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/core/dtype.h"
#include "hybridps/core/once_fn.h"
#include "hybridps/core/status.h"
#include "hybridps/compress/payoff.h"
#include "hybridps/compress/residuals.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/wire/message.h"

namespace hybridps::worker {

/// Contiguous memory, owned by the caller; a whole number of elements.
struct Piece {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

inline constexpr int kAnySource = -1;

/// Changes of the codecs' memory. They take effect before the operation.
struct Recollection {
  std::vector<compress::TensorKey> forgotten;  // tensors that will not come again
  // Initial values for the operation's tensor, which is new here; empty: zeros.
  std::vector<float> residual;
  std::vector<float> owed;
  std::vector<float> momentum;

  bool is_empty() const noexcept { return forgotten.empty() && residual.empty() && owed.empty() && momentum.empty(); }
};

struct Operation {
  schedule::Kind kind = schedule::Kind::kBarrier;
  core::DType dtype = core::DType::kBytes;
  /// Of the elements, for packing (flow/packing.h), where ranks need not agree on a type; kBytes: as `dtype`.
  core::DType elements = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  double premul = 1.0;  // this rank's PREMUL_SUM factor
  // For outer steps (core::is_outer): such a step is an allreduce of fp32, with `tensor` as its slot.
  float rate = 0.0F;
  float momentum = 0.0F;
  int root = -1;  // group rank: reduce, broadcast, gather, scatter
  /// The input (output) is the logical concatenation of its pieces. Used by:
  ///   allreduce       output only: it is input and output (in place)
  ///   broadcast       output only: the root's is read
  ///   reduce          input everywhere, output at the root (may be the same memory)
  ///   reduce_scatter  input (all ranks' pieces, rank order), output (own piece)
  ///   all_gather      input (own), output (all ranks', rank order)
  ///   gather          input, output at the root    scatter   input at the root, output
  ///   all_to_all      input (to each rank, in order), output (from each rank, in order); must not overlap
  ///   send            input                        receive   output
  std::vector<Piece> input;
  std::vector<Piece> output;
  /// Bytes per rank as in schedule::Request: all_gather output_bytes; reduce_scatter input_bytes; gather output_bytes
  /// at the root; scatter input_bytes at the root; all_to_all both. size() entries each, else empty.
  std::vector<std::uint64_t> input_bytes;
  std::vector<std::uint64_t> output_bytes;
  /// Point to point: kind kPointToPoint, sending or receiving; peer is a group rank (kAnySource for a receive from
  /// any). Matched by sender, group and tag in order of issue; both sides must give the same number of bytes.
  bool sending = false;
  int peer = kAnySource;
  std::uint32_t tag = 0;
  /// The part of the operation that goes through the engine. Other than kRanks: ranks compare total_bytes; input_bytes
  /// and output_bytes describe the whole operation; schedule::Request describes input, output and rail_bytes (kWitness:
  /// these three are empty).
  schedule::Scope scope = schedule::Scope::kRanks;
  std::uint64_t total_bytes = 0;
  std::vector<std::uint64_t> rail_bytes;
  /// Set: the bytes that this rank sends are one piece of device memory, known to the data transport
  /// (Runtime::attach_device). These bytes are the input, or the output of a broadcast's root. The worker does not read
  /// the memory, so the worker does not copy the rank's own part to the output. The reference is dropped after the
  /// operation has ended and the transports have released the memory. Only for operations without sums, and only if no
  /// rank of this node gets the bytes from this rank.
  std::shared_ptr<const void> device_memory;
  /// How chunks go between nodes, if the group has a codec for the type. For sums and averages in allreduce and
  /// reduce_scatter. The same on all ranks.
  wire::Coding coding = wire::Coding::kPlain;
  /// The output holds codec output instead of elements, with average and premul applied. The output gets the result in
  /// the same form. Only for an allreduce with one rank per node, or with Scope::kNodes; Worker::check_coded() has all
  /// conditions. Each rank's own choice: results and messages have the same bits either way. Ranks then compare
  /// total_bytes, in bytes of elements.
  bool coded = false;
  compress::TensorKey tensor = 0;  // key of the codecs' memory for this tensor; 0: nothing is remembered
  std::shared_ptr<const Recollection> recollection;  // null: no change
  /// If several chunks of this rank wait, chunks with the higher priority go first. Changes neither the order of
  /// matching nor a result. May differ between ranks: a rank's priorities order only the rank's own sends.
  std::int8_t priority = 0;
  std::shared_ptr<compress::TimedSum> timed;  // told when the operation begins and ends; may be null
  std::chrono::milliseconds timeout{0};       // 0: none
  core::TimePoint issued_at{};                // start of the timeout; unset: submit()
};

inline bool is_barrier(schedule::Kind kind) noexcept {
  return kind == schedule::Kind::kBarrier || kind == schedule::Kind::kGoodbye;
}

/// Whether the operation follows the shares of plan versions. Outer steps keep the group's initial shares, because an
/// owner keeps state for its spans.
inline bool has_shares(const Operation& o) noexcept {
  return !is_barrier(o.kind) && o.scope != schedule::Scope::kWitness && !core::is_outer(o.op);
}

struct Outcome {
  core::Status status;
  int source_rank = -1;  // point-to-point receive: the group rank that sent the message
};

using Completion = core::OnceFn<void(const Outcome&)>;

}  // namespace hybridps::worker
