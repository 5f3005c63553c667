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
  results_.emplace(span_, memory_);
  if ((plan_.sink == schedule::kAll || plan_.sink == me) && plan_.source != me && !(aggregate && owns)) {
    consumer_.emplace(span_);
    span_.run.pending += plan_.chunks;
  }
  if (aggregate && span_.agent_of(topology.my_node()) == me) {
    if (owns) owner_.emplace(span_, memory_);
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

// all_gather's own piece, and what a rank scatters, gathers or exchanges with itself.
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
  const compress::Codec* const codec = id.stage == wire::Stage::kResult ? span_.codec() : nullptr;
  return codec == nullptr || bytes == 0 ? payload.bytes() == bytes
                                        : codec->fits(payload.data(), payload.bytes(), bytes);
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
    result_ready(id.number);
    span_.worker.part_done(span_.run);
  }
}

void SpanRun::on_complete(std::uint32_t chunk) {
  owner_->on_complete(chunk);
  result_ready(chunk);
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
  if (stream != nullptr && stream->peer == peer && stream->id.stage == grant.chunk.stage)
    span_.worker.outbox().granted(*stream, grant.chunk.number);
  else if (results_)
    results_->on_grant(peer, grant);
}

flow::Stream* SpanRun::push() noexcept {
  if (contributor_) return &contributor_->stream();
  return node_ ? node_->stream() : nullptr;
}

bool SpanRun::waits_for_owner() noexcept {
  const flow::Stream* const stream = push();
  return (consumer_ && chunks_done_ != plan_.chunks) || (stream != nullptr && !stream->all_sent());
}

}  // namespace hybridps::worker
