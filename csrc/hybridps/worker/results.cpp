#include "hybridps/worker/results.h"

#include <algorithm>
#include <utility>

#include "hybridps/worker/worker.h"

namespace hybridps::worker {

// --- Results ---------------------------------------------------------------------------------------------------------

Results::Results(const SpanView& span, ResultMemory& memory)
    : span_(span),
      memory_(memory),
      streams_(span.worker.outbox(), *this, server::ResultStreams::Keep::kWhileSent, nullptr) {
  const schedule::Topology& topology = span.topology();
  const schedule::Span& plan = span.plan;
  const int me = span.me();
  const int my_node = topology.my_node();
  const auto open = [&](int rank, wire::Stage stage) {
    const bool goes_apart =
        net_ && stage == wire::Stage::kResult && (span.codec() == nullptr || span.codec_to(rank) != nullptr);
    server::ResultStreams& streams = goes_apart ? net_->streams() : streams_;
    auto stream = span.open_stream(&streams, rank, stage, 0);
    if (!goes_apart) stream->may_pack = flow::MayPack::kNever;
    streams.add(std::move(stream));
  };
  // Where nothing goes packed now, one buffer serves other nodes and this node's ranks.
  const bool shares = plan.rail == schedule::kNoRail && topology.ranks_of(my_node).size() > 1;
  if ((plan.owner == me && span.codec() != nullptr) ||
      (span.may_pack() && !memory.is_lent() &&
       (!shares || span.worker.outbox().packs_anywhere(span.run.group.info.may_pack))))
    net_.emplace(span, memory);
  const auto to_locals = [&] {
    if (plan.rail != schedule::kNoRail) return;
    for (const int rank : topology.ranks_of(my_node))
      if (rank != me && rank != plan.source) {
        open(rank, wire::Stage::kLocalResult);
        serves_locals_ = true;
      }
  };
  if (plan.sink != schedule::kAll) {
    if (plan.owner == me && plan.sink != me) open(plan.sink, wire::Stage::kResult);
    serves_locals_ = topology.node_of(plan.sink) == my_node;
    return;
  }
  if (!span.takes(my_node)) return;
  if (plan.owner == me || span.is_gateway()) {
    for (int step = 1; step < topology.nodes(); ++step) {
      // Each owner begins with another node, so that not all owners send to node 0 first.
      const int node = (my_node + step) % topology.nodes();
      if (span.serves(node)) open(span.agent_of(node), wire::Stage::kResult);
    }
    to_locals();
  } else if (plan.source == me) {
    to_locals();
  } else if (span.agent_of(my_node) == me && my_node != topology.node_of(plan.owner) &&
             my_node != span.served_by_source()) {
    to_locals();
  }
}

void Results::offer(std::uint32_t chunk) {
  if (net_) {
    net_->encode(chunk);
    net_->streams().offer(chunk);
  }
  streams_.offer(chunk);
}

void Results::on_grant(core::EngineId peer, const wire::Grant& grant) {
  if (net_) net_->streams().on_grant(peer, grant);
  streams_.on_grant(peer, grant);
}

void Results::leave_nodes() {
  std::size_t unsent = streams_.end(wire::Stage::kResult);
  if (net_) unsent += net_->streams().end(wire::Stage::kResult);
  for (; unsent > 0; --unsent) span_.worker.part_done(span_.run);
}

flow::Payload Results::make(flow::Stream&, std::uint32_t chunk, std::size_t bytes) {
  if (memory_.is_lent()) return {memory_.lend(chunk), bytes};
  transport::Buffer buffer = span_.worker.outbox().pool().allocate(bytes);
  if (!buffer) return {};
  const observe::TraceSpan traced(span_.worker.outbox().trace(), observe::EventType::kCopy, 0, bytes,
                                  span_.run.sequence, span_.plan.id, chunk);
  memory_.read(chunk, buffer.data(), span_.slot_reader(serves_locals_));
  return {std::move(buffer), bytes};
}

void Results::on_stream_sent() { span_.worker.part_done(span_.run); }

// --- NetResults ------------------------------------------------------------------------------------------------------

NetResults::NetResults(const SpanView& span, ResultMemory& memory)
    : span_(span),
      memory_(memory),
      streams_(span.worker.outbox(), *this, server::ResultStreams::Keep::kWhileSent, span.codec()) {}

void NetResults::encode(std::uint32_t chunk) {
  const std::size_t bytes = span_.bytes_of(chunk);
  if (span_.codec() == nullptr || bytes == 0 || streams_.empty() || span_.run.operation.coded) return;
  const compress::Codec& codec = *span_.codec();
  std::byte* const there = memory_.contiguous(chunk);
  std::byte* const sum = there != nullptr ? there : span_.worker.scratch(bytes);
  if (there == nullptr) memory_.read(chunk, sum);
  std::vector<std::byte>& out = encoded_[chunk];
  out.resize(codec.bytes_max(bytes));
  out.resize(span_.encode(chunk, sum, /*speaker=*/0, out.data()));
  span_.expand(out.data(), bytes, sum);
  if (there == nullptr) memory_.write(chunk, sum);
}

flow::Payload NetResults::make(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) {
  flow::Outbox& outbox = span_.worker.outbox();
  transport::Buffer buffer = outbox.pool().allocate(streams_.wire_bytes_max(bytes));
  if (!buffer) return {};
  if (span_.codec() == nullptr) {
    if (outbox.packs(stream, bytes)) return memory_.pack(stream, chunk, std::move(buffer));
    const observe::TraceSpan traced(outbox.trace(), observe::EventType::kCopy, 0, bytes, span_.run.sequence,
                                    span_.plan.id, chunk);
    memory_.read(chunk, buffer.data());
    return {std::move(buffer), bytes};
  }
  if (const std::byte* const coded = span_.coded(chunk)) {
    bytes = span_.coded_bytes_of(chunk);
    std::copy_n(coded, bytes, buffer.data());
    return {std::move(buffer), bytes};
  }
  const std::vector<std::byte>& encoded = encoded_.at(chunk);
  std::copy(encoded.begin(), encoded.end(), buffer.data());
  return {std::move(buffer), encoded.size()};
}

void NetResults::on_stream_sent() { span_.worker.part_done(span_.run); }

// --- Consumer --------------------------------------------------------------------------------------------------------

bool Consumer::on_data(const wire::Data& data, flow::Delivery payload) {
  const std::uint32_t chunk = data.chunk.number;
  landed_.resize(span_.plan.chunks, 0);
  if (std::exchange(landed_[chunk], 1) != 0) return false;
  const std::uint64_t at = span_.plan.output_offset + span_.begin_of(chunk);
  const std::size_t bytes = span_.bytes_of(chunk);
  const observe::TraceSpan traced(span_.worker.outbox().trace(), observe::EventType::kCopy, 1, bytes,
                                  span_.run.sequence, span_.plan.id, chunk);
  const bool is_coded = data.chunk.stage == wire::Stage::kResult && data.chunk.attempt == 0;
  const compress::Codec* const codec = is_coded ? span_.result_codec() : nullptr;
  if (payload.format() == nullptr && (codec == nullptr || bytes == 0)) {
    span_.run.output.write(at, bytes, payload.data());
    return true;
  }
  if (std::byte* const coded = span_.coded(chunk)) {
    std::copy_n(payload.data(), payload.bytes(), coded);
    return true;
  }
  std::byte* const there = span_.run.output.contiguous(at, bytes);
  std::byte* const to = there != nullptr ? there : span_.worker.scratch(bytes);
  if (payload.format() != nullptr)
    span_.worker.outbox().unpack(payload, to);
  else
    span_.expand(payload.data(), bytes, to);
  if (there == nullptr) span_.run.output.write(at, bytes, to);
  return true;
}

bool Consumer::mark(std::uint32_t chunk) {
  landed_.resize(span_.plan.chunks, 0);
  return std::exchange(landed_[chunk], 1) == 0;
}

void Consumer::on_announce(const wire::From& from, const wire::Announce& announce) {
  wire::Grant grant{announce.chunk};
  grant.chunk.number = wire::kAllChunks;
  span_.worker.outbox().send(from.source, span_.run.group.message(grant));
}

}  // namespace hybridps::worker
