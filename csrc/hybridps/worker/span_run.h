// hybridps/worker/span_run.h: this rank's part in one span of one operation: the rank's roles there (span_view.h).
//
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "hybridps/worker/failover.h"
#include "hybridps/worker/results.h"
#include "hybridps/worker/sums.h"

namespace hybridps::worker {

class SpanRun : core::Pinned {
 public:
  SpanRun(Worker& worker, OperationRun& run, const schedule::Span& plan);

  /// Opens streams and offers the chunks that can go at once. False: earlier contributions disagree.
  bool start();
  /// Whether this member may send this rank data, or announcements, of the chunk: what a node's rank gives to its
  /// agent, a source to an owner, an owner or who stands in for it to a consumer.
  bool may_come_from(int member, const wire::ChunkId& chunk) const;
  /// Data of any stage, except kPush of an aggregate, which goes to the Server.
  void on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload);
  void on_announce(const wire::From& from, const wire::Announce& announce);
  void on_grant(core::EngineId peer, const wire::Grant& grant);
  /// Every other rank of this node has sent a message for this operation.
  void on_local_seen();
  /// From the Server: all contributions to the chunk are here, on a gateway those of its region.
  void on_complete(std::uint32_t chunk);
  /// From the Server: the chunk may be fetched from this node's ranks.
  void on_granted(std::uint32_t chunk);

  // A dedicated server's span (failover.h).
  /// The server is lost: the span goes on with another owner.
  void lose_owner();
  void on_failover(int from, const wire::Failover& failover);
  /// All takers are known to have all results, or the heir has all results that are still lacking.
  void on_known();
  /// From the server, or in a reduce from the node's agent: all takers have all results.
  void on_known_everywhere() {
    if (!failover_) on_known();
  }
  bool has_landed(std::uint32_t chunk) const noexcept { return consumer_ && consumer_->has_landed(chunk); }
  bool consumes() const noexcept { return consumer_.has_value(); }
  /// This node's contributions to these chunks go to the heir.
  void push_again(const ChunkSet& chunks);
  /// This rank is the heir, and sums these chunks. False: earlier contributions disagree.
  bool become_owner(const ChunkSet& chunks);
  void cannot_fail_over();
  /// The span waits to know that all takers have the results.
  bool waits_known() const noexcept { return waits_known_; }
  /// A copy of the results may wait instead of the operation.
  bool is_retainable() const noexcept { return plan_.sink == schedule::kAll && !failover_; }
  void retain(std::vector<std::byte> memory) {
    memory_.retain(std::move(memory));
    if (region_memory_) region_memory_->free();
  }
  std::vector<std::byte> take_back() { return memory_.take_back(); }

  const schedule::Span& plan() const noexcept { return plan_; }
  /// The agent's NodeSum, if Worker::pace() keeps its contributions level with those to other owners; else null.
  NodeSum* paced() noexcept { return node_ && node_->is_paced() ? &*node_ : nullptr; }
  bool waits_for_owner() noexcept;
  /// Number of results that this rank waits for in total, and number of these that have come.
  std::uint32_t chunks_wanted() const noexcept { return consumer_ || (owner_ && !region_) ? plan_.chunks : 0; }
  std::uint32_t chunks_done() const noexcept { return chunks_done_; }

 private:
  void copy_own();
  bool fits(const wire::ChunkId& id, const flow::Delivery& payload) const;
  void result_ready(std::uint32_t chunk);
  /// The stream from this rank towards the owner; null: none.
  flow::Stream* push() noexcept;

  void landed(std::uint32_t chunk);
  void expect_known();
  void stop_as_gateway();

  schedule::Span plan_;
  const SpanView span_;
  ResultMemory memory_;
  /// On a gateway whose owner, a dedicated server, may be lost: then the rank's own contribution is needed again.
  std::optional<ResultMemory> region_memory_;
  std::optional<Results> results_;
  std::optional<Contributor> contributor_;
  std::optional<OwnerSum> owner_;  // also on a gateway
  std::optional<RegionPush> region_;
  std::optional<NodeSum> node_;
  std::optional<Consumer> consumer_;
  std::uint32_t chunks_done_ = 0;
  bool waits_known_ = false;  // counts as a pending part of the operation
  bool is_known_ = false;
  std::optional<SpanFailover> failover_;
};

}  // namespace hybridps::worker
