// hybridps/worker/span_run.h: this rank's part in one span of one operation: the roles that it has there (span_view.h).
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

  /// Opens streams and offers what can go at once. False: contributions that came before disagree.
  bool start();
  /// Data of any stage but an aggregate's kPush (the Server's).
  void on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload);
  void on_announce(const wire::From& from, const wire::Announce& announce);
  void on_grant(core::EngineId peer, const wire::Grant& grant);
  /// Every other rank of this node has been heard in this operation.
  void on_local_seen();
  /// From the Server: all contributions to the chunk are there.
  void on_complete(std::uint32_t chunk);
  /// From the Server: the chunk may be fetched from this node's ranks.
  void on_granted(std::uint32_t chunk);

  // A dedicated server's span (failover.h).
  /// The server is lost: the span goes on with another owner.
  void lose_owner();
  void on_failover(int from, const wire::Failover& failover);
  /// All results are known to be everywhere, or to be had from the heir.
  void on_known();
  /// The server, or of a reduce the node's agent, has said so.
  void on_known_everywhere() {
    if (!failover_) on_known();
  }
  bool has_landed(std::uint32_t chunk) const noexcept { return consumer_ && consumer_->has_landed(chunk); }
  bool consumes() const noexcept { return consumer_.has_value(); }
  /// This node's contributions to these chunks go to the heir.
  void push_again(const ChunkSet& chunks);
  /// This rank is the heir, and sums these chunks. False: contributions that came before disagree.
  bool become_owner(const ChunkSet& chunks);
  void cannot_fail_over();
  /// Not over before it is known that all have the results.
  bool waits_known() const noexcept { return waits_known_; }
  /// That may be waited for with a copy of them.
  bool is_retainable() const noexcept { return plan_.sink == schedule::kAll && !failover_; }
  void retain(std::vector<std::byte> memory) { memory_.retain(std::move(memory)); }
  std::vector<std::byte> take_back() { return memory_.take_back(); }

  const schedule::Span& plan() const noexcept { return plan_; }
  /// The agent's, if its contributions keep pace with those to other owners (Worker::pace()); else null.
  NodeSum* paced() noexcept { return node_ && node_->is_paced() ? &*node_ : nullptr; }
  bool waits_for_owner() noexcept;
  /// Results that this rank waits for, and those that have come.
  std::uint32_t chunks_wanted() const noexcept { return consumer_ || owner_ ? plan_.chunks : 0; }
  std::uint32_t chunks_done() const noexcept { return chunks_done_; }

 private:
  void copy_own();
  bool fits(const wire::ChunkId& id, const flow::Delivery& payload) const;
  void result_ready(std::uint32_t chunk);
  /// What this rank sends towards the owner; null: nothing.
  flow::Stream* push() noexcept;

  void landed(std::uint32_t chunk);
  void expect_known();

  schedule::Span plan_;
  const SpanView span_;
  ResultMemory memory_;
  std::optional<Results> results_;
  std::optional<Contributor> contributor_;
  std::optional<OwnerSum> owner_;
  std::optional<NodeSum> node_;
  std::optional<Consumer> consumer_;
  std::uint32_t chunks_done_ = 0;
  bool waits_known_ = false;  // a part of the operation that is pending
  bool is_known_ = false;
  std::optional<SpanFailover> failover_;
};

}  // namespace hybridps::worker
