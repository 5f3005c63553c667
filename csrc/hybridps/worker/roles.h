// hybridps/worker/roles.h: what a rank can be in one span of one operation (schedule/plan.h has the picture).
//
//   Contributor  sends its own bytes to the agent of its node, or as the source of a deliver to the owner
//   NodeSum      the agent: collects its node's contributions of a chunk and adds them; the sum goes to the owner
//   OwnerSum     the owner's own side: hands its node's contributions to the Server, which adds the nodes' to it
//   Results      sends results on: from the owner to agents or the sink, from whoever has them to the ranks of its node
//   Consumer     writes results that come into the output
//
// Model    A chunk goes through these states, each known to one role:
//            held (in the caller's memory) -> collected (NodeSum) -> under way (a Stream) -> summed (the Server, OwnerSum)
//            -> under way (a Stream) -> landed (Consumer)
//          Chunk events come in, chunk offers go out; nothing here waits. Chunk data lives in the caller's tensors, or where
//          ResultMemory has a place of its own for a sum, until the moment it is sent.
// Life     no role ends inside a call into it: an operation that is done or has failed ends with Worker::settle().
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/server/result_streams.h"
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
  /// Of this node's contributions: compress::Place::speaker.
  std::uint32_t own_speaker() const noexcept { return static_cast<std::uint32_t>(topology().my_node()) + 1; }
  /// Encodes the chunk, `values`, and counts it. `speaker` as in compress::Place.
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

class Contributor final : public flow::Source, core::Pinned {
 public:
  /// To the agent of its node (of an aggregate), or to the owner.
  Contributor(const SpanView& span, const ResultMemory& memory, bool aggregate);
  ~Contributor() override;
  void start();
  flow::Stream& stream() noexcept { return *stream_; }
  /// The agent asks for the chunk once more: what it made of it is lost with a dedicated server.
  void push_again(const wire::ChunkId& chunk);

  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream&, std::uint32_t) override {}

 private:
  const SpanView& span_;
  const ResultMemory& memory_;
  const bool aggregate_;
  const std::unique_ptr<flow::Stream> stream_;
  std::unique_ptr<flow::Stream> again_;
  std::uint32_t expected_again_ = 0;
};

class OwnerSum : core::Pinned {
 public:
  OwnerSum(const SpanView& span, ResultMemory& memory) : span_(span), memory_(memory) {}
  /// False: contributions that came before disagree; the Server has said so. `only`: by chunk, those that it is to sum, where
  /// the results of others are had already.
  bool start(const std::vector<std::uint8_t>* only = nullptr);
  /// Where the node's sum of the chunk is to be, until on_complete().
  std::byte* place(std::uint32_t chunk);
  /// From the Server: all contributions are there. Makes the sum.
  void on_complete(std::uint32_t chunk);
  /// The node's sum in place() has been through the codec.
  void set_coded(std::uint32_t chunk) { coded_.insert(chunk); }

 private:
  /// The same where the operation's memory is coded: its contribution is there, and the sum goes there as all get it.
  void complete_coded(std::uint32_t chunk);
  /// Makes of the chunk's sum what everybody gets (outer/state.h).
  void take_step(std::uint32_t chunk, std::byte* sum, std::size_t bytes);

  const SpanView& span_;
  ResultMemory& memory_;
  std::unordered_set<std::uint32_t> coded_;
  std::unordered_map<std::uint32_t, std::vector<std::byte>> bounces_;  // chunks that have no contiguous place
};

class NodeSum final : public flow::Source, public flow::GrantQueue::Waiter, core::Pinned {
 public:
  /// `locals`: ranks of this node in the span. Without `owner` the sums go to the owner's engine.
  NodeSum(const SpanView& span, std::uint32_t locals, OwnerSum* owner);
  ~NodeSum() override;
  void start();

  void on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload);
  /// A rank of this node waits for a permit.
  void on_announce();
  /// Every other rank of this node has been heard in this operation.
  void on_local_seen();
  /// From the own Server: the chunk has a unit of its budget, and may be fetched from this node.
  void on_granted(std::uint32_t chunk);

  /// Its contributions are this rank's own, and go to another engine: Worker::pace() says how far they may run ahead.
  bool is_paced() const noexcept { return owner_ == nullptr && locals_ == 1 && needed_.empty(); }
  /// The part of the own contributions that has left, 0..1.
  double part_pushed() const noexcept;
  /// Offers what lies within this part of the span.
  void push_up_to(double part);
  /// Null on the owner, and while it stands still.
  flow::Stream* stream() noexcept { return stream_.get(); }

  /// The owner, a dedicated server, is lost: nothing leaves until go_on().
  void stand_still();
  /// These chunks are to be summed, by the span's new owner: `owner`, or another engine. May come more than once there.
  void go_on(const std::vector<std::uint8_t>& chunks, OwnerSum* owner);
  /// The chunk's result is here: its contribution will not be asked for again.
  void forget_sent(std::uint32_t chunk) {
    if (!sent_.empty()) sent_.erase(chunk);
  }

  std::size_t wire_bytes_max(std::size_t bytes) const noexcept override;
  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream& stream, std::uint32_t chunk) override;
  // GrantQueue::Waiter: of chunks that have a permit at another engine.
  std::optional<std::uint32_t> next_wanted() override;
  std::uint64_t grant_bytes() const noexcept override { return 0; }  // what may come is bounded by chunks alone
  void grant(std::uint32_t chunk) override;

 private:
  struct Chunk {
    std::vector<flow::Delivery> payloads;  // by local index; the own one stays empty
    std::vector<std::uint8_t> present;
    std::vector<double> premul;
    std::uint32_t count = 0;
    bool granted = false;  // holds a unit of Worker::local_grants()
    bool used = false;     // the inputs have been added, and are gone
  };

  std::uint32_t own() const noexcept;
  Chunk& open(std::uint32_t chunk);
  bool is_collected(std::uint32_t chunk) const noexcept { return !collected_.empty() && collected_[chunk] != 0; }
  void on_collected(std::uint32_t chunk);
  /// Adds the node's inputs of the chunk in rank order, and lets go of them.
  void combine(std::uint32_t chunk, std::byte* out);
  /// The node's contribution where it lies in the caller's memory; null: it must be made.
  const std::byte* as_it_stands(std::uint32_t chunk) const;
  void drop(std::uint32_t chunk);
  void want_permits();
  /// Grants the chunk to the local ranks that have not delivered it.
  void fetch(std::uint32_t chunk);
  /// To one that is needed again or still.
  bool is_needed(std::uint32_t chunk) const noexcept { return needed_.empty() || needed_[chunk] != 0; }
  void offer(std::uint32_t chunk);

  const SpanView& span_;
  const std::uint32_t locals_;
  OwnerSum* owner_;
  std::unique_ptr<flow::Stream> stream_;
  std::uint32_t expected_ = 0;          // chunks that the stream is to send
  std::vector<std::uint8_t> needed_;    // per chunk, once the first owner is lost; empty: all are
  /// What was sent to a dedicated server and cannot be made again with the same bits, until the result is here: contributions
  /// from which something was left out, which is remembered.
  std::unordered_map<std::uint32_t, std::vector<std::byte>> sent_;
  std::uint32_t offered_ = 0;  // paced: chunks before it were offered
  std::unordered_map<std::uint32_t, Chunk> chunks_;
  std::vector<std::uint8_t> collected_;  // per chunk: all local contributions have come
  flow::ChunkQueue permitted_;           // to be fetched from the node when there is a unit
  bool announced_ = false;               // a local rank waits for a permit
  bool wants_ = false;                   // permits for all chunks were asked for
};

/// An owner's results for other nodes, with a codec: each chunk is encoded once, when it is ready, and its own rank and node
/// take what the others get instead of the sum.
class EncodedResults final : public server::ResultStreams::Maker, core::Pinned {
 public:
  EncodedResults(const SpanView& span, ResultMemory& memory);
  server::ResultStreams& streams() noexcept { return streams_; }
  void encode(std::uint32_t chunk);

  flow::Payload make(std::uint32_t chunk, std::size_t bytes) override;
  void on_stream_sent() override;

 private:
  const SpanView& span_;
  ResultMemory& memory_;
  std::unordered_map<std::uint32_t, std::vector<std::byte>> encoded_;  // until the span is over: whoever comes later has it copied
  server::ResultStreams streams_;
};

class Results final : public server::ResultStreams::Maker, core::Pinned {
 public:
  Results(const SpanView& span, ResultMemory& memory);
  /// The chunk's result is in memory.
  void offer(std::uint32_t chunk);
  void on_grant(core::EngineId peer, const wire::Grant& grant);

  flow::Payload make(std::uint32_t chunk, std::size_t bytes) override;
  void on_stream_sent() override;

 private:
  const SpanView& span_;
  ResultMemory& memory_;
  bool serves_locals_ = false;
  std::optional<EncodedResults> encoded_;  // those for other nodes, if they go so
  server::ResultStreams streams_;
};

class Consumer : core::Pinned {
 public:
  explicit Consumer(const SpanView& span) : span_(span) {}
  /// False: it came before.
  bool on_data(const wire::Data& data, flow::Delivery payload);
  /// Grants it: this rank has started the operation, what comes goes straight into its output.
  void on_announce(const wire::From& from, const wire::Announce& announce);
  bool has_landed(std::uint32_t chunk) const noexcept { return !landed_.empty() && landed_[chunk] != 0; }
  /// It has come some other way. False: it was here.
  bool mark(std::uint32_t chunk);

 private:
  const SpanView& span_;
  std::vector<std::uint8_t> landed_;  // per chunk
};

}  // namespace hybridps::worker
