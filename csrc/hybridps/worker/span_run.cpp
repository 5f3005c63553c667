#include "hybridps/worker/span_run.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <cstring>
#include <utility>

#include "hybridps/reduce/sum.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
SpanRun::SpanRun(Worker& worker, OperationRun& run, const schedule::Span& plan)
    : worker_(worker), run_(run), plan_(plan) {
  const schedule::Topology& topology = run.group.info.topology;
  const int me = topology.rank();
  const schedule::Kind kind = run.operation.kind;
  aggregate_ = plan.source == schedule::kAll;
  owner_ = plan.owner == me;
  locals_ =
      plan.rail == schedule::kNoRail ? static_cast<std::uint32_t>(topology.ranks_of(topology.my_node()).size()) : 1;
  agent_ = aggregate_ && agent_of(topology.my_node()) == me;
  consumer_ = (plan.sink == schedule::kAll || plan.sink == me) && plan.source != me && !(aggregate_ && owner_);
  device_ = !aggregate_ && plan.source == me && run.operation.device_memory != nullptr;

  if (aggregate_) {
    result_offset_ = plan.output_offset;
    const bool has_place = kind != schedule::Kind::kReduce || plan.sink == me;
    result_place_ = has_place ? Place::kOutput : Place::kScratch;
    if (!has_place) result_offset_ = 0;
  } else if (plan.source == me && kind != schedule::Kind::kBroadcast) {
    result_place_ = Place::kInput;
    result_offset_ = plan.input_offset;
  } else {
    result_place_ = Place::kOutput;
    result_offset_ = plan.output_offset;
  }
}

SpanRun::~SpanRun() { cancel(); }

int SpanRun::agent_of(int node) const noexcept {
  const schedule::Topology& topology = run_.group.info.topology;
  return plan_.rail == schedule::kNoRail ? topology.agent(node, plan_.owner) : topology.rail_rank(node, plan_.rail);
}

std::size_t SpanRun::bytes_of(std::uint32_t chunk) const noexcept {
  const std::uint64_t begin = begin_of(chunk);
  return begin >= plan_.bytes
             ? 0
             : static_cast<std::size_t>(std::min<std::uint64_t>(plan_.chunk_bytes, plan_.bytes - begin));
}

std::uint64_t SpanRun::begin_of(std::uint32_t chunk) const noexcept { return std::uint64_t{chunk} * plan_.chunk_bytes; }

const Pieces& SpanRun::pieces_at(Place place) const noexcept {
  return place == Place::kInput ? run_.input : run_.output;
}

server::SpanKey SpanRun::key() const noexcept {
  return server::SpanKey{server::OperationKey{run_.group.info.uid, run_.sequence}, plan_.id};
}

std::byte* SpanRun::bounce(std::uint32_t chunk) {
  std::vector<std::byte>& bytes = bounces_[chunk];
  if (bytes.empty()) bytes.resize(bytes_of(chunk));
  return bytes.data();
}

wire::ChunkId SpanRun::chunk_id(wire::Stage stage) const {
  wire::ChunkId id;
  id.stage = stage;
  id.signature = run_.signature;
  id.plan_version = run_.plan_version;
  id.sequence = run_.sequence;
  id.span_bytes = plan_.agreed_bytes;
  id.span = plan_.id;
  if (run_.operation.kind == schedule::Kind::kPointToPoint) {
    id.point_to_point = true;
    id.tag = run_.operation.tag;
    id.follows = run_.follows;
  }
  return id;
}

flow::Stream& SpanRun::open_stream(int to_rank, wire::Stage stage, std::uint32_t contributor) {
  const GroupState& group = run_.group;
  auto stream = std::make_unique<flow::Stream>();
  stream->from = group.from();
  stream->id = chunk_id(stage);
  stream->id.contributor = contributor;
  stream->premul = run_.operation.premul;
  stream->peer = group.info.engines[static_cast<std::size_t>(to_rank)];
  stream->source = this;
  stream->bytes = plan_.bytes;
  stream->chunk_bytes = plan_.chunk_bytes;
  stream->chunks = plan_.chunks;
  stream->urgent = plan_.bytes < group.info.limits.urgent_below;
  ++run_.pending;  // until all is sent
  streams_.push_back(std::move(stream));
  return *streams_.back();
}

void SpanRun::open_result_streams() {
  const schedule::Topology& topology = run_.group.info.topology;
  const int me = topology.rank();
  const int my_node = topology.my_node();
  const auto to_locals = [&] {
    if (plan_.rail != schedule::kNoRail) return;
    for (const int rank : topology.ranks_of(my_node))
      if (rank != me && rank != plan_.source) results_.push_back(&open_stream(rank, wire::Stage::kLocalResult, 0));
  };
  if (plan_.sink != schedule::kAll) {
    if (owner_ && plan_.sink != me) results_.push_back(&open_stream(plan_.sink, wire::Stage::kResult, 0));
    return;
  }
  // A source that is not the owner serves its own node itself: its bytes need not come back over the network.
  const int served_by_source =
      plan_.source != schedule::kAll && plan_.source != plan_.owner ? topology.node_of(plan_.source) : -1;
  if (owner_) {
    for (int step = 1; step < topology.nodes(); ++step) {
      // Rotated, so that not all owners send to node 0 first.
      const int node = (my_node + step) % topology.nodes();
      if (node != served_by_source) results_.push_back(&open_stream(agent_of(node), wire::Stage::kResult, 0));
    }
    to_locals();
  } else if (plan_.source == me) {
    to_locals();
  } else if (agent_of(my_node) == me && my_node != topology.node_of(plan_.owner) && my_node != served_by_source) {
    to_locals();
  }
}

bool SpanRun::start() {
  const schedule::Topology& topology = run_.group.info.topology;
  const int me = topology.rank();
  const auto my_node = static_cast<std::uint32_t>(topology.my_node());
  open_result_streams();
  if (consumer_) run_.pending += plan_.chunks;

  if (aggregate_) {
    if (!agent_) {
      push_ = &open_stream(agent_of(topology.my_node()), wire::Stage::kLocalPush,
                           static_cast<std::uint32_t>(topology.local_index(me)));
      for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) worker_.outbox().offer(*push_, chunk);
      return true;
    }
    if (owner_) {
      run_.pending += plan_.chunks;  // until each is summed
      if (result_place_ == Place::kScratch) scratch_.resize(plan_.bytes);
      server::Opening opening;
      opening.signature = run_.signature;
      opening.bytes = plan_.bytes;
      opening.chunk_bytes = plan_.chunk_bytes;
      opening.chunks = plan_.chunks;
      opening.nodes = static_cast<std::uint32_t>(topology.nodes());
      opening.own_node = my_node;
      opening.own_rank = me;
      opening.owner = &run_;
      if (run_.operation.op == core::ReduceOp::kAvg && !core::is_floating(run_.operation.dtype))
        opening.finish = {reduce::Finish::Kind::kDivideTruncate, 1.0, topology.size()};
      if (!worker_.server().open(key(), opening)) return false;
      if (locals_ == 1) worker_.server().local_seen(key());
    } else {
      push_ = &open_stream(plan_.owner, wire::Stage::kPush, my_node);
    }
    if (locals_ == 1 && owner_)
      for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) local_chunk_complete(chunk);
    return true;
  }

  if (plan_.source == me) {
    if (plan_.rail == schedule::kNoRail && (plan_.sink == schedule::kAll || plan_.sink == me)) {
      // The own copy: all_gather's own piece, and what a rank scatters, gathers or exchanges with itself.
      if (result_place_ == Place::kInput && plan_.bytes > 0 && !device_) {
        for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) {
          const std::uint64_t from = plan_.input_offset + begin_of(chunk);
          const std::uint64_t to = plan_.output_offset + begin_of(chunk);
          const std::size_t bytes = bytes_of(chunk);
          if (const std::byte* data = run_.input.contiguous(from, bytes)) {
            run_.output.write(to, bytes, data);
          } else {
            std::vector<std::byte> copy(bytes);
            run_.input.read(from, bytes, copy.data());
            run_.output.write(to, bytes, copy.data());
          }
        }
      }
    }
    if (!owner_) {
      push_ = &open_stream(plan_.owner, wire::Stage::kPush, my_node);
      for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) worker_.outbox().offer(*push_, chunk);
    }
    for (std::uint32_t chunk = 0; chunk < plan_.chunks; ++chunk) result_ready(chunk);
  }
  return true;
}

double SpanRun::part_pushed() const noexcept { return static_cast<double>(push_->sent()) / plan_.chunks; }

void SpanRun::push_up_to(double part) {
  const auto end = static_cast<std::uint32_t>(std::min<double>(plan_.chunks, std::ceil(part * plan_.chunks)));
  while (offered_ < end && !cancelled_) {
    const std::uint32_t chunk = offered_++;
    if (!push_->is_offered(chunk)) worker_.outbox().offer(*push_, chunk);
  }
}

SpanRun::LocalChunk& SpanRun::local_chunk(std::uint32_t chunk) {
  LocalChunk& local = local_[chunk];
  if (local.present.empty()) {
    local.payloads.resize(locals_);
    local.present.resize(locals_, 0);
    local.premul.resize(locals_, 1.0);
  }
  return local;
}

void SpanRun::on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload) {
  if (cancelled_) return;
  const wire::ChunkId& id = data.chunk;
  if (id.number >= plan_.chunks || payload.bytes() != bytes_of(id.number) || id.span_bytes != plan_.agreed_bytes) {
    worker_.mismatch(run_, {static_cast<int>(from.sender_rank), id.signature});
    return;
  }
  if (got_.empty()) {
    got_.resize(plan_.chunks, 0);
    local_got_.resize(plan_.chunks, 0);
  }
  if (id.stage == wire::Stage::kLocalPush) {
    if (local_got_[id.number]) return;  // doubled on the way
    const auto own = static_cast<std::uint32_t>(run_.group.info.topology.local_index(run_.group.info.topology.rank()));
    if (!agent_ || id.contributor >= locals_ || id.contributor == own) {
      worker_.on_bad_message(
          key().operation, "a contribution that the plan does not have, from rank " + std::to_string(from.sender_rank));
      return;
    }
    LocalChunk& local = local_chunk(id.number);
    if (local.present[id.contributor]) return;
    local.present[id.contributor] = 1;
    local.payloads[id.contributor] = std::move(payload);
    local.premul[id.contributor] = data.premul;
    if (++local.count == locals_ - 1) {
      local_got_[id.number] = 1;
      local_chunk_complete(id.number);
    }
    return;
  }

  if (!consumer_) {
    worker_.on_bad_message(key().operation,
                           "a result that the plan does not have, from rank " + std::to_string(from.sender_rank));
    return;
  }
  if (got_[id.number]) return;  // doubled on the way
  got_[id.number] = 1;
  run_.output.write(plan_.output_offset + begin_of(id.number), payload.bytes(), payload.data());
  payload.reset();
  result_ready(id.number);
  worker_.part_done(run_);
}

void SpanRun::combine_node(std::uint32_t chunk, std::byte* out) {
  const Operation& operation = run_.operation;
  const std::size_t bytes = bytes_of(chunk);
  const std::uint64_t at = plan_.input_offset + begin_of(chunk);
  const auto own = static_cast<std::uint32_t>(run_.group.info.topology.local_index(run_.group.info.topology.rank()));
  std::vector<std::byte> gathered;
  const std::byte* mine = run_.input.contiguous(at, bytes);
  if (mine == nullptr) {
    gathered.resize(bytes);
    run_.input.read(at, bytes, gathered.data());
    mine = gathered.data();
  }
  std::vector<reduce::Input> inputs(locals_);
  if (locals_ > 1) {
    LocalChunk& local = local_chunk(chunk);
    for (std::uint32_t l = 0; l < locals_; ++l)
      inputs[l] =
          l == own ? reduce::Input{mine, operation.premul} : reduce::Input{local.payloads[l].data(), local.premul[l]};
  } else {
    inputs[0] = reduce::Input{mine, operation.premul};
  }
  reduce::Finish finish;
  if (operation.op == core::ReduceOp::kAvg && core::is_floating(operation.dtype))
    finish = {reduce::Finish::Kind::kMultiply, 1.0 / run_.group.info.topology.size(), 1};
  reduce::combine(inputs, out, bytes / core::size_of(operation.dtype), operation.dtype, operation.op, finish);
  if (locals_ > 1) {
    // The node's inputs are used up: give the memory back, keep the entry for its budget.
    for (flow::Delivery& payload : local_[chunk].payloads) payload.reset();
  }
}

void SpanRun::local_chunk_complete(std::uint32_t chunk) {
  if (!owner_) {
    worker_.outbox().offer(*push_, chunk);
    return;
  }
  const std::size_t bytes = bytes_of(chunk);
  if (bytes == 0) {
    local_.erase(chunk);
    worker_.server().contribute(key(), chunk, nullptr, nullptr);
    return;
  }
  std::byte* out = nullptr;
  if (result_place_ == Place::kScratch)
    out = scratch_.data() + begin_of(chunk);
  else
    out = run_.output.contiguous(plan_.output_offset + begin_of(chunk), bytes);
  if (out == nullptr) out = bounce(chunk);

  const Operation& operation = run_.operation;
  const bool as_it_stands = locals_ == 1 && (operation.op != core::ReduceOp::kPremulSum || operation.premul == 1.0) &&
                            !(operation.op == core::ReduceOp::kAvg && core::is_floating(operation.dtype));
  const std::byte* data = as_it_stands ? run_.input.contiguous(plan_.input_offset + begin_of(chunk), bytes) : nullptr;
  if (data == nullptr) {
    combine_node(chunk, out);
    data = out;
  }
  drop_local_chunk(chunk);
  worker_.server().contribute(key(), chunk, data, out);
}

void SpanRun::drop_local_chunk(std::uint32_t chunk) {
  const auto found = local_.find(chunk);
  if (found == local_.end()) return;
  const bool counted = found->second.counted;
  local_.erase(found);  // first: the next grant may be for another chunk of this span
  if (counted) worker_.local_grant_done();
}

void SpanRun::on_sum(std::uint32_t chunk) {
  if (cancelled_) return;
  if (auto found = bounces_.find(chunk); found != bounces_.end() && result_place_ == Place::kOutput) {
    run_.output.write(result_offset_ + begin_of(chunk), found->second.size(), found->second.data());
    bounces_.erase(found);
  }
  result_ready(chunk);
  worker_.part_done(run_);
}

void SpanRun::result_ready(std::uint32_t chunk) {
  ++chunks_done_;
  for (flow::Stream* stream : results_) worker_.outbox().offer(*stream, chunk);
}

transport::Buffer SpanRun::payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) {
  transport::BufferPool& pool = worker_.outbox().pool();
  if (&stream == push_) {
    if (device_) return lend(chunk, bytes);
    transport::Buffer buffer = pool.allocate(bytes);
    if (!buffer) return buffer;
    if (aggregate_ && agent_)
      combine_node(chunk, buffer.data());
    else if (aggregate_)
      run_.input.read(plan_.input_offset + begin_of(chunk), bytes, buffer.data());
    else
      pieces_at(result_place_).read(result_offset_ + begin_of(chunk), bytes, buffer.data());
    return buffer;
  }
  // Results go to several peers: they share one buffer as long as one of the sends is under way.
  if (results_.size() > 1) {
    if (shared_.empty()) shared_.resize(plan_.chunks);
    if (transport::Buffer buffer = pool.revive(shared_[chunk].slot, shared_[chunk].life)) return buffer;
  }
  transport::Buffer buffer = device_ ? lend(chunk, bytes) : pool.allocate(bytes);
  if (!buffer) return buffer;
  if (result_place_ == Place::kScratch)
    std::memcpy(buffer.data(), scratch_.data() + begin_of(chunk), bytes);
  else if (!device_)
    pieces_at(result_place_).read(result_offset_ + begin_of(chunk), bytes, buffer.data());
  if (results_.size() > 1) shared_[chunk] = Shared{buffer.slot(), buffer.life()};
  return buffer;
}

transport::Buffer SpanRun::lend(std::uint32_t chunk, std::size_t bytes) {
  std::byte* const data = pieces_at(result_place_).contiguous(result_offset_ + begin_of(chunk), bytes);
  assert(data != nullptr);
  return worker_.outbox().pool().lend(data, bytes, run_.operation.device_memory);
}

void SpanRun::on_sent(flow::Stream& stream, std::uint32_t chunk) {
  if (&stream == push_ && agent_) drop_local_chunk(chunk);
  if (&stream == push_ && is_paced()) worker_.pace_soon(run_);
  if (stream.all_sent()) worker_.part_done(run_);
}

void SpanRun::on_permitted(flow::Stream& stream, std::uint32_t chunk) {
  if (&stream != push_ || !agent_) return;
  if (locals_ > 1)
    on_node_permit(chunk, /*budgeted=*/false);
  else if (!stream.is_offered(chunk))
    worker_.outbox().offer(stream, chunk);  // its owner waits for it: that goes before an even pace
}

void SpanRun::on_node_permit(std::uint32_t chunk, bool budgeted) {
  if (cancelled_ || (!local_got_.empty() && local_got_[chunk])) return;
  if (budgeted) {
    grant_local(chunk);
    return;
  }
  if (permits_.empty()) permits_.resize(plan_.chunks, 0);
  if (std::exchange(permits_[chunk], 1) != 0) return;
  local_grant_tickets_.push_back(worker_.grant_local_when_possible(*this, chunk));
}

void SpanRun::grant_local(std::uint32_t chunk) {
  if (cancelled_ || (!local_got_.empty() && local_got_[chunk])) {
    if (!owner_) worker_.local_grant_done();
    return;
  }
  const schedule::Topology& topology = run_.group.info.topology;
  LocalChunk& local = local_chunk(chunk);
  if (!owner_) local.counted = true;
  if (locals_ == 1) return;  // nobody else contributes here
  wire::Grant grant{chunk_id(wire::Stage::kLocalPush)};
  grant.chunk.number = chunk;
  const std::vector<int>& ranks = topology.ranks_of(topology.my_node());
  for (std::uint32_t l = 0; l < locals_; ++l) {
    const int rank = ranks[l];
    if (rank != topology.rank() && !local.present[l])
      worker_.outbox().send(run_.group.info.engines[static_cast<std::size_t>(rank)], run_.group.message(grant));
  }
}

void SpanRun::on_local_seen() {
  if (!agent_ || cancelled_) return;
  if (owner_) worker_.server().local_seen(key());
  if (announced_) want_permits();
}

void SpanRun::want_permits() {
  if (owner_) {
    worker_.server().local_announce(key());
    return;
  }
  if (std::exchange(wants_, true)) return;
  for (std::uint32_t chunk = 0; chunk < plan_.chunks && !cancelled_; ++chunk)
    if (local_got_.empty() || !local_got_[chunk]) worker_.outbox().want(*push_, chunk);
}

void SpanRun::on_announce(const wire::From& from, const wire::Announce& announce) {
  if (cancelled_) return;
  if (announce.chunk.stage == wire::Stage::kLocalPush) {
    if (!agent_) return;
    announced_ = true;
    if (run_.local_seen_count == locals_ - 1) want_permits();
    return;
  }
  if (!consumer_) return;
  // This rank has started the operation: what comes goes straight into its output.
  wire::Grant grant{announce.chunk};
  grant.chunk.number = wire::kAllChunks;
  worker_.outbox().send(from.source, run_.group.message(grant));
}

void SpanRun::on_grant(core::EngineId peer, const wire::Grant& grant) {
  if (cancelled_) return;
  for (const auto& stream : streams_) {
    if (stream->peer == peer && stream->id.stage == grant.chunk.stage) {
      worker_.outbox().granted(*stream, grant.chunk.number);
      return;
    }
  }
}

bool SpanRun::waits_for_owner() const noexcept {
  return (consumer_ && chunks_done_ != plan_.chunks) || (push_ != nullptr && !push_->all_sent());
}

void SpanRun::cancel() {
  if (cancelled_) return;
  cancelled_ = true;
  for (const std::uint64_t ticket : local_grant_tickets_) worker_.forget_local_grant(ticket);
  for (const auto& [chunk, local] : local_)
    if (local.counted) worker_.local_grant_done();
  for (const auto& stream : streams_) worker_.outbox().cancel(*stream);
  local_.clear();
  bounces_.clear();
}

}  // namespace hybridps::worker
