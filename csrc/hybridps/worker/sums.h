// hybridps/worker/sums.h: roles from a rank's memory to the sum (see span_view.h): Contributor, OwnerSum, RegionPush,
// NodeSum.
//
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "hybridps/core/pinned.h"
#include "hybridps/flow/outbox.h"
#include "hybridps/wire/message.h"
#include "hybridps/worker/span_view.h"

namespace hybridps::worker {

class Contributor final : public flow::Source, core::Pinned {
 public:
  /// Sends to the agent of its node if `aggregate`, else to the owner.
  Contributor(const SpanView& span, const ResultMemory& memory, bool aggregate);
  ~Contributor() override;
  void start();
  flow::Stream& stream() noexcept { return *stream_; }
  /// The agent asks for the chunk again: the sum that contained the chunk was lost with a dedicated server.
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
  /// False: earlier contributions disagree; the Server has told its Listener. `only`: by chunk, 1 if the chunk must be
  /// summed; the results of the other chunks exist already. Null: all chunks.
  bool start(const std::vector<std::uint8_t>* only = nullptr);
  /// Memory for the node's sum of the chunk, valid until on_complete().
  std::byte* place(std::uint32_t chunk);
  /// From the Server: all contributions are here. Makes the sum.
  void on_complete(std::uint32_t chunk);
  /// Chunks that are not summed yet: so many pending parts of the operation.
  std::uint32_t unsummed() const noexcept { return unsummed_; }
  /// The node's sum in place() has been encoded and decoded already.
  void set_coded(std::uint32_t chunk) { coded_.insert(chunk); }

 private:
  /// Encodes and decodes what the own side brings to an encoded sum, like what others bring: else the sum's bits would
  /// depend on the owner. Not in contribute(): then a large tensor would be encoded as a whole before anything is sent.
  void code_own(std::uint32_t chunk, std::byte* out);
  /// on_complete() for coded memory: reads the own contribution there, and writes the encoded sum there.
  void complete_coded(std::uint32_t chunk);
  /// Turns the chunk's sum into the outer step's result for all ranks (outer/state.h).
  void take_step(std::uint32_t chunk, std::byte* sum, std::size_t bytes);

  const SpanView& span_;
  ResultMemory& memory_;
  std::uint32_t unsummed_ = 0;
  std::unordered_set<std::uint32_t> coded_;                            // chunks of set_coded()
  std::unordered_map<std::uint32_t, std::vector<std::byte>> bounces_;  // for chunks without a contiguous place
};

class RegionPush final : public flow::Source, core::Pinned {
 public:
  RegionPush(const SpanView& span, ResultMemory& memory);
  ~RegionPush() override;
  flow::Stream& stream() noexcept { return *stream_; }
  /// The region's sum of the chunk is in the result's memory. It stays there until the chunk's result comes.
  void offer(std::uint32_t chunk);

  std::size_t wire_bytes_max(std::size_t bytes) const noexcept override;
  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream& stream, std::uint32_t chunk) override;

 private:
  const SpanView& span_;
  ResultMemory& memory_;
  const std::unique_ptr<flow::Stream> stream_;
};

class NodeSum final : public flow::Source, public flow::GrantQueue::Waiter, core::Pinned {
 public:
  /// `locals`: number of this node's ranks in the span. `owner` null: the sums go to SpanView::parent().
  NodeSum(const SpanView& span, std::uint32_t locals, OwnerSum* owner);
  ~NodeSum() override;
  void start();

  void on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload);
  /// A rank of this node waits for a permit.
  void on_announce();
  /// Every other rank of this node has sent a message for this operation.
  void on_local_seen();
  /// From the own Server: the chunk has a unit of the Server's budget, and may be fetched from this node.
  void on_granted(std::uint32_t chunk);

  /// The contributions are this rank's own and go to another engine. Worker::pace() limits how far they run ahead.
  bool is_paced() const noexcept { return owner_ == nullptr && locals_ == 1 && needed_.empty(); }
  /// The part of the own contributions that has left, 0..1.
  double part_pushed() const noexcept;
  /// Offers the chunks within the first `part` of the span; 1 or more: all chunks.
  void push_up_to(double part);
  /// Null on the owner, and between stand_still() and go_on().
  flow::Stream* stream() noexcept { return stream_.get(); }

  /// The owner, a dedicated server, is lost: nothing leaves until go_on(), and nothing goes to an OwnerSum of this
  /// rank, which was its region's gateway.
  void stand_still();
  /// The span's new owner sums these chunks: `owner`, or another engine if null. May be called again with more chunks.
  void go_on(const std::vector<std::uint8_t>& chunks, OwnerSum* owner);
  /// The chunk's result is here, so nobody will ask for the chunk's contribution again.
  void forget_sent(std::uint32_t chunk) {
    if (!sent_.empty()) sent_.erase(chunk);
  }

  std::size_t wire_bytes_max(std::size_t bytes) const noexcept override;
  flow::Payload payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream& stream, std::uint32_t chunk) override;
  // GrantQueue::Waiter: for chunks with a permit at another engine.
  std::optional<std::uint32_t> next_wanted() override;
  std::uint64_t grant_bytes() const noexcept override { return 0; }  // only the number of chunks is limited
  void grant(std::uint32_t chunk) override;

 private:
  struct LocalChunk {
    std::vector<flow::Delivery> payloads;  // by local index; empty for the own rank
    std::vector<std::uint8_t> present;
    std::vector<double> premul;
    std::uint32_t count = 0;
    bool granted = false;  // holds a unit of Worker::local_grants()
    bool used = false;     // the inputs have been added and freed
  };

  std::uint32_t own() const noexcept;
  LocalChunk& open(std::uint32_t chunk);
  bool is_collected(std::uint32_t chunk) const noexcept { return !collected_.empty() && collected_[chunk] != 0; }
  void on_collected(std::uint32_t chunk);
  /// Adds the node's inputs of the chunk in rank order, and frees the inputs of other ranks.
  void combine(std::uint32_t chunk, std::byte* out);
  /// The node's contribution, if it is in the caller's memory as it is; null: combine() must make it.
  const std::byte* as_it_stands(std::uint32_t chunk) const;
  /// The node's contribution, in the caller's memory or in Worker::scratch().
  const std::byte* contribution(std::uint32_t chunk);
  void drop(std::uint32_t chunk);
  void want_permits();
  /// Grants the chunk to the local ranks that have not delivered it.
  void fetch(std::uint32_t chunk);
  /// Whether the owner still needs this chunk.
  bool is_needed(std::uint32_t chunk) const noexcept { return needed_.empty() || needed_[chunk] != 0; }
  void offer(std::uint32_t chunk);

  const SpanView& span_;
  const std::uint32_t locals_;
  OwnerSum* owner_;
  std::unique_ptr<flow::Stream> stream_;
  std::uint32_t expected_ = 0;        // number of chunks that the stream will send
  std::vector<std::uint8_t> needed_;  // per chunk, set when the first owner is lost; empty: all chunks are needed
  /// Encoded contributions that were sent to a dedicated server, kept until the result is here. Only if the codec
  /// remembers (feedback, momentum): then a second encoding would have other bits.
  std::unordered_map<std::uint32_t, std::vector<std::byte>> sent_;
  std::uint32_t offered_ = 0;  // paced: all chunks below this number were offered
  std::unordered_map<std::uint32_t, LocalChunk> chunks_;
  std::vector<std::uint8_t> collected_;  // per chunk: all local contributions have come
  flow::ChunkQueue permitted_;           // chunks to fetch from the node when a unit is free
  bool announced_ = false;               // a local rank waits for a permit
  bool wants_ = false;                   // permits for all chunks were asked for
};

}  // namespace hybridps::worker
