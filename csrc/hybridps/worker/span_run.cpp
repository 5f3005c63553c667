#include "hybridps/worker/span_run.h"

#include <utility>

#include "hybridps/worker/worker.h"

namespace hybridps::worker {

SpanRun::SpanRun(Worker& worker, OperationRun& run, const schedule::Span& plan)
    : plan_(plan), span_{worker, run, plan_}, memory_(span_) {}

bool SpanRun::start() {
  const schedule::Topology& topology = span_.topology();
  const int me = span_.me();
  const bool aggregate = plan_.source == schedule::kAll;
  const bool owns = plan_.owner == me;
  expect_known();
  results_.emplace(span_, memory_);
  if ((plan_.sink == schedule::kAll || plan_.sink == me) && span_.takes(topology.my_node()) && plan_.source != me &&
      !(aggregate && owns)) {
    consumer_.emplace(span_);
    span_.run.pending += plan_.chunks;
  }
  if (aggregate && span_.agent_of(topology.my_node()) == me) {
    ResultMemory* sums = &memory_;
    if (span_.is_gateway() && topology.is_dedicated(plan_.owner))
      sums = &region_memory_.emplace(span_, ResultMemory::SumPlace::kOwn);
    if (owns || span_.is_gateway()) owner_.emplace(span_, *sums);
    if (owner_ && !owns) region_.emplace(span_, *sums);
    const std::size_t locals = plan_.rail == schedule::kNoRail ? topology.ranks_of(topology.my_node()).size() : 1;
    node_.emplace(span_, static_cast<std::uint32_t>(locals), owner_ ? &*owner_ : nullptr);
    if (owner_ && !owner_->start()) return false;
    node_->start();
  } else if (aggregate) {
    contributor_.emplace(span_, memory_, aggregate);
    contributor_->start();
  } else if (plan_.source == me) {
    copy_own();
    if (!owns) {
      contributor_.emplace(span_, memory_, aggregate);
      contributor_->start();
    }
    for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) result_ready(chunk);
  }
  return true;
}

// Copies the bytes that this rank sends to itself: all_gather, gather, scatter, all_to_all.
void SpanRun::copy_own() {
  const bool keeps = plan_.rail == schedule::kNoRail && (plan_.sink == schedule::kAll || plan_.sink == span_.me());
  if (!keeps || plan_.bytes == 0 || span_.run.operation.kind == schedule::Kind::kBroadcast || memory_.is_lent()) return;
  std::vector<std::byte> copy;
  for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) {
    const std::byte* data = memory_.contiguous(chunk);
    if (data == nullptr) {
      copy.resize(span_.bytes_of(chunk));
      memory_.read(chunk, copy.data());
      data = copy.data();
    }
    span_.run.output.write(plan_.output_offset + span_.begin_of(chunk), span_.bytes_of(chunk), data);
  }
}

bool SpanRun::fits(const wire::ChunkId& id, const flow::Delivery& payload) const {
  const std::size_t bytes = span_.bytes_of(id.number);
  const bool may_be_coded = id.stage == wire::Stage::kResult && id.attempt == 0;
  const compress::Codec* const codec = may_be_coded ? span_.result_codec() : nullptr;
  // Coded memory takes the codec's bytes alone.
  if (span_.run.operation.coded && bytes > 0 && (codec == nullptr || payload.format() != nullptr)) return false;
  return codec == nullptr || bytes == 0
             ? payload.bytes() == bytes
             : payload.format() == nullptr && codec->fits(payload.data(), payload.bytes(), bytes);
}

bool SpanRun::may_come_from(int member, const wire::ChunkId& chunk) const {
  const schedule::Topology& topology = span_.topology();
  const int my_node = topology.my_node();
  const int node = topology.node_of(member);
  switch (chunk.stage) {
    case wire::Stage::kPush: return member == plan_.source;
    case wire::Stage::kLocalPush:
      return node == my_node && chunk.contributor == static_cast<std::uint32_t>(topology.local_index(member));
    case wire::Stage::kLocalResult:
      return node == my_node && (member == plan_.source || member == plan_.owner || member == span_.agent_of(node));
    case wire::Stage::kResult: break;
  }
  if (member == plan_.owner) return true;
  if (failover_)  // the heir is served by those who have results
    return plan_.owner == span_.me() && node >= 0 && (member == plan_.sink || member == span_.agent_of(node));
  return plan_.levels && node >= 0 && member == span_.agent_of(node) &&
         node == topology.parent_node(my_node, plan_.owner, span_.served_by_source());
}

void SpanRun::on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload) {
  const wire::ChunkId& id = data.chunk;
  if (id.number >= plan_.chunks || !fits(id, payload) || id.span_bytes != plan_.agreed_bytes) {
    span_.worker.mismatch(span_.run, {static_cast<int>(from.sender_rank), id.signature});
  } else if (id.stage == wire::Stage::kLocalPush) {
    if (node_)
      node_->on_data(from, data, std::move(payload));
    else
      span_.refuse("a contribution", from);
  } else if (!consumer_) {
    span_.refuse("a result", from);
  } else if (consumer_->on_data(data, std::move(payload))) {
    landed(id.number);
  }
}

void SpanRun::landed(std::uint32_t chunk) {
  if (node_) node_->forget_sent(chunk);
  result_ready(chunk);
  if (failover_) {
    failover_->on_obtained(chunk);
  } else if (chunks_done_ == plan_.chunks && span_.topology().is_dedicated(plan_.owner)) {
    if (span_.agent_of(span_.topology().my_node()) == span_.me() || plan_.sink == span_.me())
      span_.run.group.lost_servers->landed(
          plan_.owner, span_.run.sequence,
          /*waits=*/plan_.sink != schedule::kAll || !span_.worker.may_retain(span_.run));
    if (plan_.sink == span_.me()) on_known();  // the root is the only taker
  }
  span_.worker.part_done(span_.run);
}

void SpanRun::on_complete(std::uint32_t chunk) {
  owner_->on_complete(chunk);
  if (region_) {
    region_->offer(chunk);
  } else if (failover_) {
    if (consumer_ && consumer_->mark(chunk))
      landed(chunk);
    else
      failover_->on_obtained(chunk);
  } else {
    result_ready(chunk);
  }
  span_.worker.part_done(span_.run);
}

void SpanRun::on_granted(std::uint32_t chunk) { node_->on_granted(chunk); }

void SpanRun::result_ready(std::uint32_t chunk) {
  ++chunks_done_;
  results_->offer(chunk);
}

void SpanRun::on_local_seen() {
  if (node_) node_->on_local_seen();
}

void SpanRun::on_announce(const wire::From& from, const wire::Announce& announce) {
  if (announce.chunk.stage == wire::Stage::kLocalPush) {
    if (node_) node_->on_announce();
  } else if (consumer_) {
    consumer_->on_announce(from, announce);
  }
}

void SpanRun::on_grant(core::EngineId peer, const wire::Grant& grant) {
  flow::Stream* const stream = push();
  if (contributor_ && stream->id.stage == grant.chunk.stage && grant.chunk.attempt > stream->id.attempt)
    contributor_->push_again(grant.chunk);
  else if (stream != nullptr && stream->peer == peer && stream->id.stage == grant.chunk.stage)
    span_.worker.outbox().granted(*stream, grant.chunk.number);
  else if (failover_ && failover_->on_grant(peer, grant))
    return;
  else if (results_)
    results_->on_grant(peer, grant);
}

flow::Stream* SpanRun::push() noexcept {
  if (contributor_) return &contributor_->stream();
  if (region_) return &region_->stream();
  return node_ ? node_->stream() : nullptr;
}

// --- a dedicated server's span ---------------------------------------------------------------------------------------

// Ranks with inputs or results of the span keep them until all takers have the results. In a reduce the root need not
// wait: it is the only taker.
void SpanRun::expect_known() {
  const schedule::Topology& topology = span_.topology();
  if (!topology.is_dedicated(plan_.owner)) return;
  const bool acts = span_.agent_of(topology.my_node()) == span_.me();
  waits_known_ = plan_.sink == schedule::kAll ? acts : plan_.sink != span_.me();
  if (!waits_known_) return;
  ++span_.run.pending;
  ++span_.run.awaits_known;
}

void SpanRun::on_known() {
  if (std::exchange(is_known_, true)) return;
  const schedule::Topology& topology = span_.topology();
  if (plan_.sink != schedule::kAll && span_.agent_of(topology.my_node()) == span_.me()) {
    const worker::GroupState& group = span_.run.group;
    const int server = plan_.first_owner < 0 ? plan_.owner : plan_.first_owner;
    const wire::Failover known =
        wire::failovers_of(wire::Failover::What::kKnown, static_cast<std::uint32_t>(server), {span_.run.sequence})
            .front();
    for (const int rank : topology.ranks_of(topology.my_node()))
      if (rank != span_.me() && rank != plan_.sink)
        span_.worker.outbox().send(group.info.members.engine(rank), group.message(known));
  }
  if (!std::exchange(waits_known_, false)) return;
  --span_.run.awaits_known;
  span_.worker.part_done(span_.run);
}

void SpanRun::lose_owner() {
  if (failover_ || is_known_) return;
  const schedule::Topology& topology = span_.topology();
  const bool acts = span_.agent_of(topology.my_node()) == span_.me();
  if (!acts && plan_.sink != span_.me()) return;  // the node's agent handles the loss
  // The heir is the agent of a node, since agents hold the most chunks. The node changes with each operation, except in
  // a reduce, where it is the root's node.
  const auto turn = static_cast<int>((span_.run.sequence + static_cast<std::uint64_t>(plan_.owner)) %
                                     static_cast<std::uint64_t>(topology.nodes()));
  const int heir = span_.agent_of(plan_.sink == schedule::kAll ? turn : topology.node_of(plan_.sink));
  plan_.first_owner = plan_.owner;
  if (region_) span_.worker.server().close(span_.key());
  plan_.owner = heir;
  plan_.levels = false;
  ++plan_.attempt;
  if (node_) node_->stand_still();
  stop_as_gateway();
  span_.worker.pace_soon(span_.run);  // other spans may have waited for this span's contributions
  failover_.emplace(*this, span_, memory_);
  failover_->start();
}

// The span goes on without levels: each node's agent sends to the heir, and the heir to each agent.
void SpanRun::stop_as_gateway() {
  if (region_) {
    std::uint32_t parts = owner_->unsummed() + (region_->stream().all_sent() ? 0 : 1);
    region_.reset();
    owner_.reset();
    region_memory_.reset();
    for (; parts > 0; --parts) span_.worker.part_done(span_.run);
  }
  results_->leave_nodes();
}

void SpanRun::on_failover(int from, const wire::Failover& failover) {
  using What = wire::Failover::What;
  if (failover_) {
    failover_->on_message(from, failover);
  } else if (is_known_ && (failover.what == What::kHeld || failover.what == What::kAsk)) {
    const worker::GroupState& group = span_.run.group;
    const wire::Failover answer{failover.what == What::kHeld ? What::kTakenOver : What::kOver, failover.server,
                                failover.sequence};
    span_.worker.outbox().send(group.info.members.engine(from), group.message(answer));
  }
}

void SpanRun::push_again(const ChunkSet& chunks) {
  // A retained run has the results of all chunks, so no chunk must be summed again. Its inputs are gone.
  if (node_ && !owner_ && !span_.run.is_retained) node_->go_on(chunks, nullptr);
}

bool SpanRun::become_owner(const ChunkSet& chunks) {
  owner_.emplace(span_, memory_);
  if (!owner_->start(&chunks)) return false;
  node_->go_on(chunks, &*owner_);
  return true;
}

void SpanRun::cannot_fail_over() { span_.worker.on_failover_impossible(span_.run, plan_.first_owner); }

bool SpanRun::waits_for_owner() noexcept {
  const flow::Stream* const stream = push();
  return (consumer_ && chunks_done_ != plan_.chunks) || (stream != nullptr && !stream->all_sent()) || waits_known_;
}

}  // namespace hybridps::worker
