// hybridps/worker/sums.h: the roles from a rank's memory to the sum: Contributor, OwnerSum, NodeSum (span_view.h says what they are).
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
  struct LocalChunk {
    std::vector<flow::Delivery> payloads;  // by local index; the own one stays empty
    std::vector<std::uint8_t> present;
    std::vector<double> premul;
    std::uint32_t count = 0;
    bool granted = false;  // holds a unit of Worker::local_grants()
    bool used = false;     // the inputs have been added, and are gone
  };

  std::uint32_t own() const noexcept;
  LocalChunk& open(std::uint32_t chunk);
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
  std::uint32_t expected_ = 0;        // chunks that the stream is to send
  std::vector<std::uint8_t> needed_;  // per chunk, once the first owner is lost; empty: all are
  /// What was sent to a dedicated server and cannot be made again with the same bits, until the result is here: contributions
  /// from which something was left out, which is remembered.
  std::unordered_map<std::uint32_t, std::vector<std::byte>> sent_;
  std::uint32_t offered_ = 0;  // paced: chunks before it were offered
  std::unordered_map<std::uint32_t, LocalChunk> chunks_;
  std::vector<std::uint8_t> collected_;  // per chunk: all local contributions have come
  flow::ChunkQueue permitted_;           // to be fetched from the node when there is a unit
  bool announced_ = false;               // a local rank waits for a permit
  bool wants_ = false;                   // permits for all chunks were asked for
};

}  // namespace hybridps::worker
