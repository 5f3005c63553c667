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

/// Contiguous memory of the caller; whole elements.
struct Piece {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
};

inline constexpr int kAnySource = -1;

/// Changes of what codecs remember, before an operation.
struct Recollection {
  std::vector<compress::TensorKey> forgotten;  // tensors that will not come again
  // Of the operation's tensor, which is new here; empty: zeros.
  std::vector<float> residual;
  std::vector<float> owed;
  std::vector<float> momentum;

  bool is_empty() const noexcept { return forgotten.empty() && residual.empty() && owed.empty() && momentum.empty(); }
};

struct Operation {
  schedule::Kind kind = schedule::Kind::kBarrier;
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  double premul = 1.0;  // this rank's PREMUL_SUM factor
  float rate = 0.0F;      // of owners' steps (core::is_outer), an allreduce of fp32 with `tensor` as its slot
  float momentum = 0.0F;  // likewise
  int root = -1;        // group rank: reduce, broadcast, gather, scatter
  /// The logical concatenation of the pieces is the input (output). Which are used:
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
  /// What of it is the engine's. Other than kRanks: total_bytes is what ranks compare, and input_bytes and output_bytes
  /// are of the whole operation; input and output, and rail_bytes, are as schedule::Request says (kWitness: none).
  schedule::Scope scope = schedule::Scope::kRanks;
  std::uint64_t total_bytes = 0;
  std::vector<std::uint64_t> rail_bytes;
  /// Set: what this rank sends, its input or (root of a broadcast) its output, is one piece in a device's memory that the
  /// data transport was given (Runtime::attach_device). No byte of it is read here, so the part that the rank has for
  /// itself is not moved to its output. Dropped once the operation is over and transports have let go of the memory. For
  /// what is delivered, not for sums, and only where no rank of this node is to get it from this one.
  std::shared_ptr<const void> device_memory;
  /// Of allreduce and reduce_scatter, sums and averages: how chunks go between nodes, if the group has a codec
  /// for the type. The same on all ranks.
  wire::Coding coding = wire::Coding::kPlain;
  /// Of an allreduce whose ranks are alone on their nodes, or of Scope::kNodes: the output holds no elements but what the codec
  /// makes of them, averages and premul done, and gets the result likewise. Each rank's own choice: bits and messages are
  /// the same. total_bytes is then what ranks compare, bytes of elements; see Worker::check_coded() for what cannot be so.
  bool coded = false;
  compress::TensorKey tensor = 0;          // what is remembered of it; 0: nothing
  std::shared_ptr<const Recollection> recollection;  // null: as it is
  /// Which chunks of this rank go first where several wait: those of the higher one. Never the order in which operations are
  /// matched, nor a result. Ranks may differ: each orders what it sends.
  std::int8_t priority = 0;
  std::shared_ptr<compress::TimedSum> timed;  // told when it begins and ends; null: nobody asks
  std::chrono::milliseconds timeout{0};  // 0: none
  core::TimePoint issued_at{};           // from which the timeout counts; none: from submit()
};

struct Outcome {
  core::Status status;
  int source_rank = -1;  // point-to-point receive: the group rank that sent
};

using Completion = core::OnceFn<void(const Outcome&)>;

}  // namespace hybridps::worker
