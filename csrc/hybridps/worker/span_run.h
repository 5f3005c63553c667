// hybridps/worker/span_run.h: this rank's part in one span of one operation.
//
// A rank may be several of these at once (schedule/plan.h has the picture):
//   contributor  sends its input to the agent of its node                        stage kLocalPush
//   agent        adds the inputs of its node, sends the node's contribution      stage kPush
//   owner        hands its node's contribution to the Server, sends the sums     stages kResult, kLocalResult
//   source       of a deliver: sends its bytes to the owner or to the sinks
//   forwarder    passes results that came from the network on to its node        stage kLocalResult
//   consumer     writes results into the output
//
// Nothing here waits: chunk events come in, chunk offers go out. Chunk data lives in the caller's tensors (or in
// `scratch_` where a sum has no place in them) until the moment it is sent.
// Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "hybridps/flow/outbox.h"
#include "hybridps/schedule/plan.h"
#include "hybridps/server/server.h"
#include "hybridps/worker/pieces.h"

namespace hybridps::worker {

class Worker;
struct OperationRun;

class SpanRun final : public flow::Source, core::Pinned {
 public:
  SpanRun(Worker& worker, OperationRun& run, const schedule::Span& plan);
  ~SpanRun() override;

  /// Opens streams and offers what can go at once. False: contributions that came before disagree.
  bool start();
  /// Data of any stage but an aggregate's kPush (the Server's).
  void on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload);
  void on_announce(const wire::From& from, const wire::Announce& announce);
  void on_grant(core::EngineId peer, const wire::Grant& grant);
  /// Every other rank of this node has been heard in this operation.
  void on_local_seen();
  /// From the Server: the chunk's sum is in its place.
  void on_sum(std::uint32_t chunk);
  /// A permit for the own node's contribution of this chunk; `budgeted`: it came from the Server's own budget.
  void on_node_permit(std::uint32_t chunk, bool budgeted);
  /// Sends this chunk's Grants to the local ranks that have not delivered it.
  void grant_local(std::uint32_t chunk);
  /// Its contributions are this rank's own, and go to another engine: Worker::pace() says how far they may run ahead.
  bool is_paced() const noexcept { return aggregate_ && agent_ && !owner_ && locals_ == 1; }
  /// The part of the own contributions that has left, 0..1.
  double part_pushed() const noexcept;
  /// Offers what lies within this part of the span.
  void push_up_to(double part);
  /// Drops streams and payloads; nothing is called back afterwards.
  void cancel();

  const schedule::Span& plan() const noexcept { return plan_; }
  bool waits_for_owner() const noexcept;
  /// Results that this rank waits for, and those that have come.
  std::uint32_t chunks_wanted() const noexcept { return consumer_ || (aggregate_ && owner_) ? plan_.chunks : 0; }
  std::uint32_t chunks_done() const noexcept { return chunks_done_; }

  // flow::Source
  transport::Buffer payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) override;
  void on_sent(flow::Stream& stream, std::uint32_t chunk) override;
  void on_permitted(flow::Stream& stream, std::uint32_t chunk) override;

 private:
  enum class Place { kInput, kOutput, kScratch };
  struct LocalChunk {
    std::vector<flow::Delivery> payloads;  // by local index; the own one stays empty
    std::vector<std::uint8_t> present;
    std::vector<double> premul;
    std::uint32_t count = 0;
    bool counted = false;  // holds a unit of the local grant budget
  };
  struct Shared {
    std::uint32_t slot = 0;
    std::uint64_t life = 0;
  };

  /// The rank that acts for the node in this span.
  int agent_of(int node) const noexcept;
  /// Of no certain chunk.
  wire::ChunkId chunk_id(wire::Stage stage) const;
  flow::Stream& open_stream(int to_rank, wire::Stage stage, std::uint32_t contributor);
  void open_result_streams();
  /// The chunk where it lies.
  transport::Buffer lend(std::uint32_t chunk, std::size_t bytes);
  void result_ready(std::uint32_t chunk);
  void local_chunk_complete(std::uint32_t chunk);
  void want_permits();
  void combine_node(std::uint32_t chunk, std::byte* out);
  LocalChunk& local_chunk(std::uint32_t chunk);
  void drop_local_chunk(std::uint32_t chunk);
  std::size_t bytes_of(std::uint32_t chunk) const noexcept;
  std::uint64_t begin_of(std::uint32_t chunk) const noexcept;
  std::byte* bounce(std::uint32_t chunk);
  const Pieces& pieces_at(Place place) const noexcept;
  server::SpanKey key() const noexcept;

  Worker& worker_;
  OperationRun& run_;
  const schedule::Span plan_;
  bool aggregate_ = false;
  bool owner_ = false;
  bool agent_ = false;
  bool consumer_ = false;
  bool device_ = false;       // what it sends lies in a device's memory
  std::uint32_t locals_ = 1;  // ranks on this node
  Place result_place_ = Place::kOutput;
  std::uint64_t result_offset_ = 0;
  flow::Stream* push_ = nullptr;
  std::uint32_t offered_ = 0;  // paced: chunks before it were offered
  std::vector<std::unique_ptr<flow::Stream>> streams_;
  std::vector<flow::Stream*> results_;
  std::unordered_map<std::uint32_t, LocalChunk> local_;
  std::vector<std::uint8_t> got_;        // per chunk: the result has come
  std::vector<std::uint8_t> local_got_;  // per chunk: all local contributions have come
  std::vector<std::uint8_t> permits_;    // per chunk: local grants were asked for
  std::vector<std::uint64_t> local_grant_tickets_;
  bool wants_ = false;          // permits for all chunks were asked for
  std::vector<Shared> shared_;  // per chunk: the buffer that other result streams may share while it lives
  std::unordered_map<std::uint32_t, std::vector<std::byte>> bounces_;  // chunks that have no contiguous place
  std::vector<std::byte> scratch_;
  std::uint32_t chunks_done_ = 0;
  bool announced_ = false;  // a local rank waits for a permit
  bool cancelled_ = false;
};

}  // namespace hybridps::worker
