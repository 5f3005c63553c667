// hybridps/worker/span_view.h: one span of one operation as the roles in it see it, and the memory of its bytes.
//
// Model    schedule/plan.h has a drawing of a span. A rank has these roles in a span:
//            Contributor  sends its own bytes to the agent of its node; the source of a deliver sends to the owner
//            NodeSum      the agent: collects and adds its node's contributions of a chunk; the sum goes to the owner
//            OwnerSum     on the owner: has the Server make the sum of all nodes, and writes it to the result's memory;
//                         on a gateway: the same for the nodes of its region
//            RegionPush   on a gateway: sends the sum of its region to the owner
//            Results      sends results on: the owner to agents or the sink, an agent to the ranks of its node
//            Consumer     writes received results into the output
//          sums.h has the first four roles, results.h the other two. A chunk has these states, each known to one role:
//            held (in the caller's memory) -> collected (NodeSum) -> under way (a Stream) -> summed (Server, OwnerSum)
//            -> under way (a Stream) -> landed (Consumer)
//          A role gets chunk events and makes chunk offers; no role waits. Chunk data stays in the caller's tensors
//          until it is sent. A sum without a place there stays in the memory of ResultMemory.
// Life     no role ends inside a call into it. Worker::settle() ends operations that are done or have failed.
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
  /// Spans with levels: whether this rank acts for its region towards an owner in another region.
  bool is_gateway() const noexcept;
  /// A source that is not the owner serves its own node, so the bytes need not come back over the network. -1: no node.
  int served_by_source() const noexcept;
  /// The rank that this node's agent sends contributions to: the owner, or its region's gateway.
  int parent() const noexcept {
    const int node = plan.levels ? topology().parent_node(topology().my_node(), plan.owner) : -1;
    return node < 0 ? plan.owner : agent_of(node);
  }
  /// Whether ranks of the node take results.
  bool takes(int node) const noexcept {
    return plan.taker_region == schedule::kAll || topology().region_of(node) == plan.taker_region;
  }
  /// On an owner or a gateway: whether the node's agent gets results from this rank.
  bool serves(int node) const noexcept;
  std::size_t bytes_of(std::uint32_t chunk) const noexcept;
  server::SpanKey key() const noexcept;
  /// How core::copy_for() fills a slot: kAnother only if `is_local` (a rank of this node reads it) and the operation
  /// uses non-temporal stores.
  core::Reader slot_reader(bool is_local) const noexcept;
  /// The codec for data between nodes; null: none.
  const compress::Codec* codec() const noexcept;
  /// The codec for data between this rank and `rank`, an owner or an agent; null: none. Where sums have levels nothing
  /// is encoded inside a region.
  const compress::Codec* codec_to(int rank) const noexcept;
  /// The codec of results that come to this rank from another node; null: none.
  const compress::Codec* result_codec() const noexcept {
    return codec_to(plan.sink == schedule::kAll ? parent() : plan.owner);
  }
  /// compress::ChunkOrigin::speaker of this node's contributions, or of its region's sums where the span has levels.
  std::uint32_t own_speaker() const noexcept;
  /// Encodes `values`, the elements of the chunk, and updates the CodecCounts. Returns the encoded size. `speaker`: as
  /// in compress::ChunkOrigin. `out`: room for the codec's bytes_max().
  std::size_t encode(std::uint32_t chunk, const std::byte* values, std::uint32_t speaker, std::byte* out) const;
  /// The chunk's encoded contribution or result in coded memory (Operation::coded); null: the memory has elements.
  std::byte* coded(std::uint32_t chunk) const;
  std::size_t coded_bytes_of(std::uint32_t chunk) const noexcept { return codec()->bytes_full(bytes_of(chunk)); }
  /// Like encode(), for a contribution that is coded already: copies it to `out` and updates the CodecCounts.
  std::size_t copy_coded(std::uint32_t chunk, std::byte* out) const;
  /// Updates the CodecCounts for a chunk that is coded already.
  void count_coded(std::uint32_t chunk, const std::byte* data) const;
  /// Decodes `data` into `bytes` of elements.
  void expand(const std::byte* data, std::size_t bytes, std::byte* out) const;
  void decoded_since(core::TimePoint began) const;
  /// Whether the span's data may go packed between nodes.
  bool may_pack() const noexcept;
  /// Outbox::pack() for `elements` of the chunk.
  flow::Payload pack(flow::Stream& stream, const std::byte* elements, std::uint32_t chunk,
                     transport::Buffer buffer) const;
  /// Applies the momentum to the node's contribution `values`, if the codec has momentum.
  void accelerate(std::uint32_t chunk, std::byte* values) const;
  bool has_momentum() const noexcept;
  /// A ChunkId of this span without a chunk number.
  wire::ChunkId chunk_id(wire::Stage stage) const;
  /// Opens a stream to `to_rank`. The stream is one pending part of the operation until all of it is sent.
  std::unique_ptr<flow::Stream> open_stream(flow::Source* source, int to_rank, wire::Stage stage,
                                            std::uint32_t contributor) const;
  /// Reports a message that the plan does not have. The next settle() fails the group.
  void refuse(std::string what, const wire::From& from) const;
};

/// The memory of a span's bytes on this rank: the caller's memory, or own memory for a sum without a place there.
class ResultMemory : core::Pinned {
 public:
  enum class SumPlace { kCallers, kOwn };
  /// kOwn: always own memory, so that the caller's contribution stays where it is.
  explicit ResultMemory(const SpanView& span, SumPlace place = SumPlace::kCallers);
  /// Allocates own memory for a sum, if the sum has no place in the caller's memory.
  void allocate();
  /// Null if the chunk is spread over several pieces.
  std::byte* contiguous(std::uint32_t chunk) noexcept;
  void read(std::uint32_t chunk, std::byte* to, core::Reader reader = core::Reader::kThisCore) const noexcept;
  void write(std::uint32_t chunk, const std::byte* from) noexcept;
  /// SpanView::pack() for the chunk.
  flow::Payload pack(flow::Stream& stream, std::uint32_t chunk, transport::Buffer buffer) const;
  /// A buffer that refers to the chunk in device memory, without a copy. Only if is_lent().
  transport::Buffer lend(std::uint32_t chunk) const;
  bool is_lent() const noexcept { return lent_; }
  /// Copies the span to `memory`, and uses the copy from now on. The caller's memory is not touched any more.
  void retain(std::vector<std::byte> memory);
  /// Frees own memory.
  void free() noexcept { scratch_ = {}; }
  /// Returns the memory given to retain().
  std::vector<std::byte> take_back() { return std::move(scratch_); }

 private:
  const SpanView& span_;
  const Pieces* pieces_ = nullptr;  // null: scratch_
  std::uint64_t offset_ = 0;
  bool lent_ = false;
  std::vector<std::byte> scratch_;
};

}  // namespace hybridps::worker
