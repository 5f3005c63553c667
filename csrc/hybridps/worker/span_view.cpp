#include "hybridps/worker/span_view.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "hybridps/worker/worker.h"

namespace hybridps::worker {

// --- SpanView --------------------------------------------------------------------------------------------------------

const schedule::Topology& SpanView::topology() const noexcept { return run.group.info.topology; }

int SpanView::agent_of(int node) const noexcept {
  if (plan.rail != schedule::kNoRail) return topology().rail_rank(node, plan.rail);
  return topology().agent(node, plan.first_owner < 0 ? plan.owner : plan.first_owner);
}

int SpanView::served_by_source() const noexcept {
  return plan.source == schedule::kAll || plan.source == plan.owner ? -1 : topology().node_of(plan.source);
}

bool SpanView::is_gateway() const noexcept {
  if (!plan.levels || plan.owner == me()) return false;
  const int my_node = topology().my_node();
  // A region of one node has nothing to sum: its agent sends to the owner.
  if (plan.source == schedule::kAll && topology().nodes_in(topology().region_of(my_node)).size() == 1) return false;
  const int node = topology().gateway_node(topology().region_of(my_node), plan.owner, served_by_source());
  return node == my_node && agent_of(my_node) == me();
}

bool SpanView::serves(int node) const noexcept {
  const int excluded = served_by_source();
  return node != excluded && takes(node) &&
         (!plan.levels || topology().parent_node(node, plan.owner, excluded) == topology().my_node());
}

std::size_t SpanView::bytes_of(std::uint32_t chunk) const noexcept {
  const std::uint64_t begin = begin_of(chunk);
  return begin >= plan.bytes ? 0
                             : static_cast<std::size_t>(std::min<std::uint64_t>(plan.chunk_bytes, plan.bytes - begin));
}

core::Reader SpanView::slot_reader(bool is_local) const noexcept {
  return is_local && run.stores.past_cache ? core::Reader::kAnother : core::Reader::kThisCore;
}

server::SpanKey SpanView::key() const noexcept { return {{run.group.info.uid, run.sequence}, plan.id, plan.attempt}; }

wire::ChunkId SpanView::chunk_id(wire::Stage stage) const {
  wire::ChunkId id;
  id.stage = stage;
  id.signature = run.signature;
  id.plan_version = run.plan_version;
  id.attempt = plan.attempt;
  id.tensor = run.operation.tensor;
  id.sequence = run.sequence;
  id.span_bytes = plan.agreed_bytes;
  id.span = plan.id;
  if (run.operation.kind == schedule::Kind::kPointToPoint) {
    id.point_to_point = true;
    id.tag = run.operation.tag;
    id.follows = run.follows;
  }
  return id;
}

const compress::Codec* SpanView::codec() const noexcept {
  const bool leaves_node = topology().nodes() > 1 || topology().servers() > 0;
  return plan.source == schedule::kAll && leaves_node ? run.codec : nullptr;
}

const compress::Codec* SpanView::codec_to(int rank) const noexcept {
  const bool is_inside = plan.levels && topology().region_of_owner(rank) == topology().region_of(topology().my_node());
  return is_inside ? nullptr : codec();
}

std::uint32_t SpanView::own_speaker() const noexcept {
  const int node = topology().my_node();
  return static_cast<std::uint32_t>(plan.levels ? topology().nodes() + topology().region_of(node) : node) + 1;
}

std::size_t SpanView::encode(std::uint32_t chunk, const std::byte* values, std::uint32_t speaker,
                             std::byte* out) const {
  const core::TimePoint began = core::Clock::now();
  const std::uint64_t element_bytes = core::size_of(run.operation.dtype);
  compress::ChunkOrigin place;
  place.seed = run.seed;
  place.speaker = speaker;
  place.first = (plan.agreed_offset + begin_of(chunk)) / element_bytes;
  const compress::Spec& spec = run.group.info.codecs->spec();
  if (spec.feedback && run.signature.coding == wire::Coding::kFull)
    place.residual = (speaker == 0 ? run.group.owed : run.group.residuals)
                         .at(run.operation.tensor, run.input.bytes() / element_bytes,
                             (plan.input_offset + begin_of(chunk)) / element_bytes);
  const std::size_t bytes = bytes_of(chunk);
  const std::size_t wire_bytes = codec()->encode(values, bytes, place, out);
  CodecCounts& counts = worker.codec_counts();
  counts.bytes += bytes;
  counts.wire_bytes += wire_bytes;
  counts.blocks_not_finite += place.not_finite;
  const core::Duration took = core::Clock::now() - began;
  counts.encoding += took;
  run.codec_time += took;
  return wire_bytes;
}

std::byte* SpanView::coded(std::uint32_t chunk) const {
  if (!run.operation.coded) return nullptr;
  return run.output.contiguous(codec()->bytes_full(plan.output_offset + begin_of(chunk)), coded_bytes_of(chunk));
}

std::size_t SpanView::copy_coded(std::uint32_t chunk, std::byte* out) const {
  const std::byte* const data = coded(chunk);
  const std::size_t bytes = coded_bytes_of(chunk);
  std::copy_n(data, bytes, out);
  count_coded(chunk, data);
  return bytes;
}

void SpanView::count_coded(std::uint32_t chunk, const std::byte* data) const {
  CodecCounts& counts = worker.codec_counts();
  counts.bytes += bytes_of(chunk);
  counts.wire_bytes += coded_bytes_of(chunk);
  counts.blocks_not_finite += codec()->blocks_not_finite(data, bytes_of(chunk));
}

void SpanView::expand(const std::byte* data, std::size_t bytes, std::byte* out) const {
  const core::TimePoint began = core::Clock::now();
  codec()->expand(data, 0, bytes / core::size_of(run.operation.dtype), out);
  decoded_since(began);
}

void SpanView::decoded_since(core::TimePoint began) const {
  const core::Duration took = core::Clock::now() - began;
  worker.codec_counts().decoding += took;
  run.codec_time += took;
}

bool SpanView::has_momentum() const noexcept {
  return codec() != nullptr && run.signature.coding == wire::Coding::kFull &&
         run.group.info.codecs->spec().momentum > 0;
}

void SpanView::accelerate(std::uint32_t chunk, std::byte* values) const {
  if (!has_momentum()) return;
  const std::uint64_t element_bytes = core::size_of(run.operation.dtype);
  const std::uint64_t first = (plan.input_offset + begin_of(chunk)) / element_bytes;
  float* const momentum = run.group.momenta.at(run.operation.tensor, run.input.bytes() / element_bytes, first);
  if (momentum != nullptr) codec()->accelerate(values, bytes_of(chunk), momentum);
}

std::unique_ptr<flow::Stream> SpanView::open_stream(flow::Source* source, int to_rank, wire::Stage stage,
                                                    std::uint32_t contributor) const {
  auto stream = std::make_unique<flow::Stream>();
  stream->from = run.group.from();
  stream->id = chunk_id(stage);
  stream->id.contributor = contributor;
  stream->premul = run.operation.premul;
  stream->peer = run.group.info.members.engine(to_rank);
  stream->source = source;
  stream->bytes = plan.bytes;
  stream->chunk_bytes = plan.chunk_bytes;
  stream->chunks = plan.chunks;
  stream->priority = run.operation.priority;
  stream->urgent = plan.bytes < run.group.info.urgent_below;
  if ((stage == wire::Stage::kPush || stage == wire::Stage::kResult) && may_pack()) {
    const Operation& operation = run.operation;
    stream->may_pack = run.group.info.may_pack;
    stream->dtype = operation.elements != core::DType::kBytes ? operation.elements : operation.dtype;
  }
  ++run.pending;
  return stream;
}

bool SpanView::may_pack() const noexcept {
  return run.group.info.may_pack != flow::MayPack::kNever && codec() == nullptr &&
         std::max(run.input.bytes(), run.output.bytes()) >= run.group.info.packs_from;
}

flow::Payload SpanView::pack(flow::Stream& stream, const std::byte* elements, std::uint32_t chunk,
                             transport::Buffer buffer) const {
  const observe::TraceSpan traced(worker.outbox().trace(), observe::EventType::kCopy, 0, bytes_of(chunk), run.sequence,
                                  plan.id, chunk);
  return worker.outbox().pack(stream, elements, bytes_of(chunk), std::move(buffer));
}

void SpanView::refuse(std::string what, const wire::From& from) const {
  worker.on_bad_message(
      key().operation, std::move(what) + " that the plan does not have, from rank " + std::to_string(from.sender_rank));
}

// --- ResultMemory ----------------------------------------------------------------------------------------------------

ResultMemory::ResultMemory(const SpanView& span, SumPlace place) : span_(span) {
  if (place == SumPlace::kOwn) return;
  const schedule::Span& plan = span.plan;
  const schedule::Kind kind = span.run.operation.kind;
  const bool aggregate = plan.source == schedule::kAll;
  if (aggregate && ((plan.sink != schedule::kAll && plan.sink != span.me()) || !span.takes(span.topology().my_node())))
    return;
  const bool input = !aggregate && plan.source == span.me() && kind != schedule::Kind::kBroadcast;
  pieces_ = input ? &span.run.input : &span.run.output;
  offset_ = input ? plan.input_offset : plan.output_offset;
  lent_ = !aggregate && plan.source == span.me() && span.run.operation.device_memory != nullptr;
}

void ResultMemory::allocate() {
  if (pieces_ == nullptr) scratch_.resize(span_.plan.bytes);
}

std::byte* ResultMemory::contiguous(std::uint32_t chunk) noexcept {
  if (pieces_ == nullptr) return scratch_.data() + span_.begin_of(chunk);
  return pieces_->contiguous(offset_ + span_.begin_of(chunk), span_.bytes_of(chunk));
}

void ResultMemory::read(std::uint32_t chunk, std::byte* to, core::Reader reader) const noexcept {
  if (pieces_ == nullptr)
    core::copy_for(reader, to, scratch_.data() + span_.begin_of(chunk), span_.bytes_of(chunk));
  else
    pieces_->read(offset_ + span_.begin_of(chunk), span_.bytes_of(chunk), to, reader);
}

flow::Payload ResultMemory::pack(flow::Stream& stream, std::uint32_t chunk, transport::Buffer buffer) const {
  const std::byte* elements = pieces_ == nullptr
                                  ? scratch_.data() + span_.begin_of(chunk)
                                  : pieces_->contiguous(offset_ + span_.begin_of(chunk), span_.bytes_of(chunk));
  if (elements == nullptr) {
    std::byte* const copy = span_.worker.scratch(span_.bytes_of(chunk));
    read(chunk, copy);
    elements = copy;
  }
  return span_.pack(stream, elements, chunk, std::move(buffer));
}

void ResultMemory::write(std::uint32_t chunk, const std::byte* from) noexcept {
  if (pieces_ == nullptr)
    std::copy_n(from, span_.bytes_of(chunk), scratch_.data() + span_.begin_of(chunk));
  else
    pieces_->write(offset_ + span_.begin_of(chunk), span_.bytes_of(chunk), from);
}

transport::Buffer ResultMemory::lend(std::uint32_t chunk) const {
  const std::size_t bytes = span_.bytes_of(chunk);
  std::byte* const data = pieces_->contiguous(offset_ + span_.begin_of(chunk), bytes);
  assert(data != nullptr);
  return span_.worker.outbox().pool().lend(data, bytes, span_.run.operation.device_memory);
}

void ResultMemory::retain(std::vector<std::byte> memory) {
  if (pieces_ == nullptr) return;
  scratch_ = std::move(memory);
  const std::size_t bytes = span_.plan.bytes;
  if (const std::byte* const there = pieces_->contiguous(offset_, bytes)) {
    scratch_.assign(there, there + bytes);
  } else {
    scratch_.resize(bytes);
    pieces_->read(offset_, bytes, scratch_.data());
  }
  pieces_ = nullptr;
}

}  // namespace hybridps::worker
