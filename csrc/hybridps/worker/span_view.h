// hybridps/worker/span_view.h: one span of one operation as the roles in it see it, and where its bytes are.
//
// Model    schedule/plan.h has the picture of a span. What a rank can be in it (a role):
//            Contributor  sends its own bytes to the agent of its node, or as the source of a deliver to the owner   sums.h
//            NodeSum      the agent: collects its node's contributions of a chunk and adds them; the sum goes to the owner
//            OwnerSum     the owner's own side: hands its node's contributions to the Server, which adds the nodes' to it
//            Results      sends results on: from the owner to agents or the sink, from there to the ranks of a node  results.h
//            Consumer     writes results that come into the output
//          A chunk goes through these states, each known to one role:
//            held (in the caller's memory) -> collected (NodeSum) -> under way (a Stream) -> summed (the Server, OwnerSum)
//            -> under way (a Stream) -> landed (Consumer)
//          Chunk events come in, chunk offers go out; no role waits. Chunk data lives in the caller's tensors, or where
//          ResultMemory has a place of its own for a sum, until the moment it is sent.
// Life     no role ends inside a call into it: an operation that is done or has failed ends with Worker::settle().
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/server/server.h"
#include "hybridps/worker/pieces.h"

namespace hybridps::worker {

class Worker;
struct OperationRun;

/// A span as one of its roles sees it.
struct SpanView {
  Worker& worker;
  OperationRun& run;
  const schedule::Span& plan;

  const schedule::Topology& topology() const noexcept;
  int me() const noexcept { return topology().rank(); }
  /// The rank that acts for the node in this span.
  int agent_of(int node) const noexcept;
  std::uint64_t begin_of(std::uint32_t chunk) const noexcept { return std::uint64_t{chunk} * plan.chunk_bytes; }
  std::size_t bytes_of(std::uint32_t chunk) const noexcept;
  server::SpanKey key() const noexcept;
  /// Who reads a slot that is filled for a rank of this node, or not.
  core::Reader slot_reader(bool is_local) const noexcept;
  /// Of what goes between nodes; null: none.
  const compress::Codec* codec() const noexcept;
  /// Of this node's contributions: compress::ChunkOrigin::speaker.
  std::uint32_t own_speaker() const noexcept { return static_cast<std::uint32_t>(topology().my_node()) + 1; }
  /// Encodes the chunk, `values`, and counts it. `speaker` as in compress::ChunkOrigin.
  std::size_t encode(std::uint32_t chunk, const std::byte* values, std::uint32_t speaker, std::byte* out) const;
  /// Where the operation has what the codec makes of the chunk, contribution or result; null: it has elements (Operation::coded).
  std::byte* coded(std::uint32_t chunk) const;
  std::size_t coded_bytes_of(std::uint32_t chunk) const noexcept { return codec()->bytes_full(bytes_of(chunk)); }
  /// As encode(), of the node's contribution where it is coded already; and what it counts.
  std::size_t copy_coded(std::uint32_t chunk, std::byte* out) const;
  void count_coded(std::uint32_t chunk, const std::byte* data) const;
  /// What the codec has sent, `bytes` of elements.
  void expand(const std::byte* data, std::size_t bytes, std::byte* out) const;
  void decoded_since(core::TimePoint began) const;
  /// The node's contribution to the chunk gets its momentum, where the codec has one.
  void accelerate(std::uint32_t chunk, std::byte* values) const;
  bool has_momentum() const noexcept;
  /// Of no certain chunk.
  wire::ChunkId chunk_id(wire::Stage stage) const;
  /// The operation is not over before all of it is sent.
  std::unique_ptr<flow::Stream> open_stream(flow::Source* source, int to_rank, wire::Stage stage,
                                            std::uint32_t contributor) const;
  /// A message that the plan does not have.
  void refuse(std::string what, const wire::From& from) const;
};

/// Where this rank has a span's bytes: the caller's, or for a sum that has no place there, its own.
class ResultMemory : core::Pinned {
 public:
  explicit ResultMemory(const SpanView& span);
  /// For a sum, if it has no place in the caller's memory.
  void allocate();
  /// Null where the chunk lies in several pieces.
  std::byte* contiguous(std::uint32_t chunk) noexcept;
  void read(std::uint32_t chunk, std::byte* to, core::Reader reader = core::Reader::kThisCore) const noexcept;
  void write(std::uint32_t chunk, const std::byte* from) noexcept;
  /// The chunk where it lies, which is a device's memory.
  transport::Buffer lend(std::uint32_t chunk) const;
  bool is_lent() const noexcept { return lent_; }
  /// Copies it to `memory`: the caller's is not to be touched any more.
  void retain(std::vector<std::byte> memory);
  /// What was given to retain().
  std::vector<std::byte> take_back() { return std::move(scratch_); }

 private:
  const SpanView& span_;
  const Pieces* pieces_ = nullptr;  // null: scratch_
  std::uint64_t offset_ = 0;
  bool lent_ = false;
  std::vector<std::byte> scratch_;
};

}  // namespace hybridps::worker
