#include "hybridps/worker/sums.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "hybridps/reduce/sum.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {

// --- Contributor -----------------------------------------------------------------------------------------------------

Contributor::Contributor(const SpanView& span, const ResultMemory& memory, bool aggregate)
    : span_(span),
      memory_(memory),
      aggregate_(aggregate),
      stream_(aggregate ? span.open_stream(this, span.agent_of(span.topology().my_node()), wire::Stage::kLocalPush,
                                           static_cast<std::uint32_t>(span.topology().local_index(span.me())))
                        : span.open_stream(this, span.plan.owner, wire::Stage::kPush,
                                           static_cast<std::uint32_t>(span.topology().my_node()))) {}

Contributor::~Contributor() {
  span_.worker.outbox().cancel(*stream_);
  if (again_) span_.worker.outbox().cancel(*again_);
}

void Contributor::start() {
  for (std::uint32_t chunk = 0; chunk < span_.plan.chunks; ++chunk) span_.worker.outbox().offer(*stream_, chunk);
}

flow::Payload Contributor::payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) {
  if (memory_.is_lent()) return {memory_.lend(chunk), bytes};
  transport::Buffer buffer = span_.worker.outbox().pool().allocate(bytes);
  if (!buffer) return {};
  if (span_.worker.outbox().packs(stream, bytes)) return memory_.pack(stream, chunk, std::move(buffer));
  const observe::TraceSpan traced(span_.worker.outbox().trace(), observe::EventType::kCopy, 0, bytes,
                                  span_.run.sequence, span_.plan.id, chunk);
  const core::Reader reader =
      span_.slot_reader(aggregate_ || span_.topology().node_of(span_.plan.owner) == span_.topology().my_node());
  if (aggregate_)
    span_.run.input.read(span_.plan.input_offset + span_.begin_of(chunk), bytes, buffer.data(), reader);
  else
    memory_.read(chunk, buffer.data(), reader);
  return {std::move(buffer), bytes};
}

void Contributor::on_sent(flow::Stream& stream, std::uint32_t) {
  if (&stream == again_.get() ? stream.sent() == expected_again_ : stream.all_sent()) span_.worker.part_done(span_.run);
}

void Contributor::push_again(const wire::ChunkId& id) {
  flow::Outbox& outbox = span_.worker.outbox();
  if (id.number >= span_.plan.chunks) return;
  if (!stream_->is_sent(id.number)) {
    outbox.granted(*stream_, id.number);
    return;
  }
  if (!again_) {
    again_ = span_.open_stream(this, span_.agent_of(span_.topology().my_node()), wire::Stage::kLocalPush,
                               static_cast<std::uint32_t>(span_.topology().local_index(span_.me())));
    again_->id.attempt = id.attempt;
  } else if (again_->is_offered(id.number)) {
    return;
  } else if (again_->sent() == expected_again_) {
    ++span_.run.pending;  // the stream was done, and now has another chunk
  }
  ++expected_again_;
  outbox.granted(*again_, id.number);
  outbox.offer(*again_, id.number);
}

// --- OwnerSum --------------------------------------------------------------------------------------------------------

bool OwnerSum::start(const std::vector<std::uint8_t>* only) {
  const schedule::Topology& topology = span_.topology();
  memory_.allocate();
  const Operation& operation = span_.run.operation;
  server::Opening opening;
  opening.signature = span_.run.signature;
  opening.bytes = span_.plan.bytes;
  opening.chunk_bytes = span_.plan.chunk_bytes;
  opening.chunks = span_.plan.chunks;
  opening.nodes = static_cast<std::uint32_t>(topology.nodes());
  opening.own_node = static_cast<std::uint32_t>(topology.my_node());
  opening.of_region = span_.is_gateway();
  if (opening.of_region) {
    const std::vector<int>& nodes = topology.nodes_in(topology.region_of(topology.my_node()));
    opening.parts.emplace_back(nodes.begin(), nodes.end());
  } else if (topology.regions() > 1) {
    opening.parts = topology.parts_of(span_.plan.owner, span_.plan.levels);
    if (span_.plan.levels && span_.codec() != nullptr) opening.plain_part = topology.region_of(topology.my_node());
  }
  opening.own_rank = span_.me();
  opening.owner = &span_.run;
  opening.codec = span_.is_gateway() ? nullptr : span_.codec();
  opening.priority = operation.priority;
  if (only != nullptr)
    for (const std::uint8_t is_wanted : *only) opening.done.push_back(is_wanted != 0 ? 0 : 1);
  unsummed_ =
      only == nullptr ? span_.plan.chunks : static_cast<std::uint32_t>(std::count(only->begin(), only->end(), 1));
  span_.run.pending += unsummed_;  // each chunk is pending until it is summed
  if (operation.op == core::ReduceOp::kAvg && !core::is_floating(operation.dtype) && !span_.is_gateway())
    opening.finish = {reduce::Finish::Scaling::kDivideTruncate, 1.0, topology.size()};
  return span_.worker.server().open(span_.key(), opening);
}

std::byte* OwnerSum::place(std::uint32_t chunk) {
  if (std::byte* const there = memory_.contiguous(chunk)) return there;
  std::vector<std::byte>& bytes = bounces_[chunk];
  bytes.resize(span_.bytes_of(chunk));
  return bytes.data();
}

void OwnerSum::on_complete(std::uint32_t chunk) {
  --unsummed_;
  server::Server& server = span_.worker.server();
  const std::size_t bytes = span_.bytes_of(chunk);
  if (span_.run.operation.coded) {
    complete_coded(chunk);
    return;
  }
  std::byte* const out = bytes > 0 ? place(chunk) : nullptr;
  if (span_.codec() == nullptr || span_.is_gateway() || bytes == 0) {
    server.sum_into(span_.key(), chunk, out);
  } else {
    if (coded_.erase(chunk) == 0) code_own(chunk, out);
    const core::TimePoint began = core::Clock::now();
    server.sum_into(span_.key(), chunk, out);
    span_.decoded_since(began);
    // If a dedicated server owned the span first, the other ranks get this chunk as elements (failover.h). The elements
    // must have the bits that the codec would have given.
    if (span_.plan.attempt > 0) {
      std::byte* const wire = span_.worker.scratch(span_.codec()->bytes_max(bytes));
      span_.encode(chunk, out, /*speaker=*/0, wire);
      span_.expand(wire, bytes, out);
    }
  }
  if (core::is_outer(span_.run.operation.op) && bytes > 0) take_step(chunk, out, bytes);
  if (const auto found = bounces_.find(chunk); found != bounces_.end()) {
    memory_.write(chunk, found->second.data());
    bounces_.erase(found);
  }
}

void OwnerSum::complete_coded(std::uint32_t chunk) {
  server::Server& server = span_.worker.server();
  const std::size_t bytes = span_.bytes_of(chunk);
  std::byte* const coded = span_.coded(chunk);
  std::byte* const sum = span_.worker.scratch(bytes);
  span_.count_coded(chunk, coded);
  span_.expand(coded, bytes, sum);
  server.replace_own(span_.key(), chunk, sum);
  const core::TimePoint began = core::Clock::now();
  server.sum_into(span_.key(), chunk, sum);
  span_.decoded_since(began);
  span_.encode(chunk, sum, /*speaker=*/0, coded);
}

void OwnerSum::code_own(std::uint32_t chunk, std::byte* out) {
  server::Server& server = span_.worker.server();
  const std::size_t bytes = span_.bytes_of(chunk);
  std::byte* const wire = span_.worker.scratch(span_.codec()->bytes_max(bytes));
  if (!span_.plan.levels) {
    span_.encode(chunk, server.own_contribution(span_.key(), chunk), span_.own_speaker(), wire);
    span_.expand(wire, bytes, out);
    server.replace_own(span_.key(), chunk, out);
  } else {
    server.sum_plain_part(span_.key(), chunk, out);
    span_.encode(chunk, out, span_.own_speaker(), wire);
    span_.expand(wire, bytes, out);
    server.replace_plain_part(span_.key(), chunk, out);
  }
}

void OwnerSum::take_step(std::uint32_t chunk, std::byte* sum, std::size_t bytes) {
  const Operation& operation = span_.run.operation;
  const outer::Step step{operation.op, operation.rate, operation.momentum};
  const core::Status status =
      span_.run.group.outer.apply(operation.tensor, span_.plan.bytes / sizeof(float),
                                  span_.begin_of(chunk) / sizeof(float), step, sum, bytes / sizeof(float));
  if (!status.is_ok())
    span_.worker.on_group_fault(span_.run.group,
                                core::Status(status.code(), span_.run.group.info.member_text(span_.me()) + " has " +
                                                                std::string(status.message())));
}

// --- RegionPush ------------------------------------------------------------------------------------------------------

RegionPush::RegionPush(const SpanView& span, ResultMemory& memory)
    : span_(span),
      memory_(memory),
      stream_(span.open_stream(this, span.plan.owner, wire::Stage::kPush,
                               static_cast<std::uint32_t>(span.topology().my_node()))) {}

RegionPush::~RegionPush() { span_.worker.outbox().cancel(*stream_); }

void RegionPush::offer(std::uint32_t chunk) { span_.worker.outbox().offer(*stream_, chunk); }

std::size_t RegionPush::wire_bytes_max(std::size_t bytes) const noexcept {
  const compress::Codec* const codec = span_.codec();
  return codec == nullptr ? bytes : codec->bytes_max(bytes);
}

flow::Payload RegionPush::payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) {
  transport::Buffer buffer = span_.worker.outbox().pool().allocate(wire_bytes_max(bytes));
  if (!buffer) return {};
  if (span_.codec() != nullptr && bytes > 0) {
    const std::byte* sum = memory_.contiguous(chunk);
    if (sum == nullptr) {
      std::byte* const copy = span_.worker.scratch(bytes);
      memory_.read(chunk, copy);
      sum = copy;
    }
    bytes = span_.encode(chunk, sum, span_.own_speaker(), buffer.data());
    return {std::move(buffer), bytes};
  }
  if (span_.worker.outbox().packs(stream, bytes)) return memory_.pack(stream, chunk, std::move(buffer));
  const observe::TraceSpan traced(span_.worker.outbox().trace(), observe::EventType::kCopy, 0, bytes,
                                  span_.run.sequence, span_.plan.id, chunk);
  memory_.read(chunk, buffer.data());
  return {std::move(buffer), bytes};
}

void RegionPush::on_sent(flow::Stream& stream, std::uint32_t) {
  if (stream.all_sent()) span_.worker.part_done(span_.run);
}

// The owner waits for a chunk that the region has not summed yet. Nodes of the region may hold it back (Worker::pace),
// so the gateway asks them for their chunks.
void RegionPush::on_permitted(flow::Stream&, std::uint32_t) { span_.worker.server().local_announce(span_.key()); }

// --- NodeSum ---------------------------------------------------------------------------------------------------------

NodeSum::NodeSum(const SpanView& span, std::uint32_t locals, OwnerSum* owner)
    : span_(span),
      locals_(locals),
      owner_(owner),
      stream_(owner != nullptr ? nullptr
                               : span.open_stream(this, span.parent(), wire::Stage::kPush,
                                                  static_cast<std::uint32_t>(span.topology().my_node()))),
      expected_(span.plan.chunks) {}

NodeSum::~NodeSum() {
  flow::GrantQueue& grants = span_.worker.local_grants();
  grants.remove(*this);
  for (const auto& [chunk, local] : chunks_)
    if (local.granted) grants.give_back(grant_bytes());
  if (stream_) span_.worker.outbox().cancel(*stream_);
}

void NodeSum::start() {
  if (locals_ > 1 || owner_ == nullptr) return;  // one local, another owner: Worker::pace() offers the chunks
  span_.worker.server().local_seen(span_.key());
  for (std::uint32_t chunk = 0; chunk < span_.plan.chunks; ++chunk) on_collected(chunk);
}

double NodeSum::part_pushed() const noexcept { return static_cast<double>(stream_->sent()) / span_.plan.chunks; }

void NodeSum::push_up_to(double part) {
  const std::uint32_t chunks = span_.plan.chunks;
  const auto end = static_cast<std::uint32_t>(std::min<double>(chunks, std::ceil(part * chunks)));
  while (offered_ < end) {
    const std::uint32_t chunk = offered_++;
    if (!stream_->is_offered(chunk)) span_.worker.outbox().offer(*stream_, chunk);
  }
}

std::uint32_t NodeSum::own() const noexcept {
  return static_cast<std::uint32_t>(span_.topology().local_index(span_.me()));
}

NodeSum::LocalChunk& NodeSum::open(std::uint32_t chunk) {
  LocalChunk& local = chunks_[chunk];
  if (local.present.empty()) {
    local.payloads.resize(locals_);
    local.present.resize(locals_, 0);
    local.premul.resize(locals_, 1.0);
  }
  return local;
}

void NodeSum::on_data(const wire::From& from, const wire::Data& data, flow::Delivery payload) {
  const wire::ChunkId& id = data.chunk;
  if (is_collected(id.number)) return;  // a duplicate
  if (locals_ == 1 || id.contributor >= locals_ || id.contributor == own() || payload.format() != nullptr) {
    span_.refuse("a contribution", from);
    return;
  }
  LocalChunk& local = open(id.number);
  if (std::exchange(local.present[id.contributor], 1) != 0) return;
  local.payloads[id.contributor] = std::move(payload);
  local.premul[id.contributor] = data.premul;
  if (++local.count < locals_ - 1) return;
  collected_.resize(span_.plan.chunks, 0);
  collected_[id.number] = 1;
  on_collected(id.number);
}

void NodeSum::on_collected(std::uint32_t chunk) {
  if (owner_ == nullptr && stream_ == nullptr) return;  // after stand_still()
  if (!is_needed(chunk)) {
    drop(chunk);
    return;
  }
  if (owner_ == nullptr) {
    offer(chunk);
    return;
  }
  server::Server& server = span_.worker.server();
  const std::size_t bytes = span_.bytes_of(chunk);
  if (bytes == 0) {
    drop(chunk);
    server.contribute(span_.key(), chunk, nullptr);
    return;
  }
  if (const auto coded = sent_.find(chunk); coded != sent_.end()) {
    std::byte* const out = owner_->place(chunk);
    span_.expand(coded->second.data(), bytes, out);
    owner_->set_coded(chunk);
    sent_.erase(coded);
    drop(chunk);
    server.contribute(span_.key(), chunk, out);
    return;
  }
  const std::byte* data = span_.run.operation.coded ? span_.coded(chunk) : as_it_stands(chunk);
  if (data == nullptr) {
    std::byte* const out = owner_->place(chunk);
    combine(chunk, out);
    span_.accelerate(chunk, out);
    data = out;
  }
  drop(chunk);
  server.contribute(span_.key(), chunk, data);
}

const std::byte* NodeSum::as_it_stands(std::uint32_t chunk) const {
  const Operation& operation = span_.run.operation;
  const bool averages = core::combined_by(operation.op) == core::ReduceOp::kAvg && core::is_floating(operation.dtype);
  if (locals_ > 1 || (operation.op == core::ReduceOp::kPremulSum && operation.premul != 1.0) || averages ||
      span_.has_momentum())
    return nullptr;
  return span_.run.input.contiguous(span_.plan.input_offset + span_.begin_of(chunk), span_.bytes_of(chunk));
}

void NodeSum::combine(std::uint32_t chunk, std::byte* out) {
  const Operation& operation = span_.run.operation;
  const Pieces& input = span_.run.input;
  const std::size_t bytes = span_.bytes_of(chunk);
  const observe::TraceSpan traced(span_.worker.outbox().trace(),
                                  locals_ > 1 ? observe::EventType::kSum : observe::EventType::kCopy, 0, bytes,
                                  span_.run.sequence, span_.plan.id, chunk);
  const std::uint64_t at = span_.plan.input_offset + span_.begin_of(chunk);
  std::vector<std::byte> gathered;
  const std::byte* mine = input.contiguous(at, bytes);
  if (mine == nullptr) {
    gathered.resize(bytes);
    input.read(at, bytes, gathered.data());
    mine = gathered.data();
  }
  std::vector<reduce::Input> inputs(locals_, reduce::Input{mine, operation.premul});
  LocalChunk* const local = locals_ > 1 ? &open(chunk) : nullptr;
  for (std::uint32_t l = 0; l < locals_; ++l)
    if (local != nullptr && l != own()) inputs[l] = reduce::Input{local->payloads[l].data(), local->premul[l]};
  reduce::Finish finish;
  const core::ReduceOp op = core::combined_by(operation.op);
  if (op == core::ReduceOp::kAvg && core::is_floating(operation.dtype))
    finish = {reduce::Finish::Scaling::kMultiply, 1.0 / span_.topology().size(), 1};
  reduce::combine(inputs, out, bytes / core::size_of(operation.dtype), operation.dtype, op, finish);
  // The node's inputs have been added: free their memory. The entry stays, because it may hold a unit of the budget.
  if (local == nullptr) return;
  for (flow::Delivery& payload : local->payloads) payload.reset();
  local->used = true;
}

void NodeSum::drop(std::uint32_t chunk) {
  const auto found = chunks_.find(chunk);
  if (found == chunks_.end()) return;
  const bool granted = found->second.granted;
  chunks_.erase(found);  // before give_back(), which may grant another chunk of this span
  if (granted) span_.worker.local_grants().give_back(grant_bytes());
}

std::size_t NodeSum::wire_bytes_max(std::size_t bytes) const noexcept {
  const compress::Codec* const codec = span_.codec_to(span_.parent());
  return codec == nullptr ? bytes : codec->bytes_max(bytes);
}

const std::byte* NodeSum::contribution(std::uint32_t chunk) {
  if (const std::byte* const there = as_it_stands(chunk)) return there;
  std::byte* const sum = span_.worker.scratch(span_.bytes_of(chunk));
  combine(chunk, sum);
  span_.accelerate(chunk, sum);
  return sum;
}

flow::Payload NodeSum::payload(flow::Stream& stream, std::uint32_t chunk, std::size_t bytes) {
  transport::Buffer buffer = span_.worker.outbox().pool().allocate(wire_bytes_max(bytes));
  if (!buffer) return {};
  if (const auto coded = sent_.find(chunk); coded != sent_.end()) {
    bytes = coded->second.size();
    std::copy(coded->second.begin(), coded->second.end(), buffer.data());
  } else if (span_.run.operation.coded) {
    bytes = span_.copy_coded(chunk, buffer.data());
  } else if (span_.codec_to(span_.parent()) != nullptr) {
    bytes = span_.encode(chunk, contribution(chunk), span_.own_speaker(), buffer.data());
    const compress::Spec& spec = span_.run.group.info.codecs->spec();
    if (span_.topology().is_dedicated(stream.id.span) && (spec.feedback || spec.momentum > 0))
      sent_[chunk].assign(buffer.data(), buffer.data() + bytes);
  } else if (span_.worker.outbox().packs(stream, bytes)) {
    return span_.pack(stream, contribution(chunk), chunk, std::move(buffer));
  } else {
    combine(chunk, buffer.data());
    span_.accelerate(chunk, buffer.data());
  }
  return {std::move(buffer), bytes};
}

void NodeSum::on_sent(flow::Stream& stream, std::uint32_t chunk) {
  drop(chunk);
  if (is_paced()) span_.worker.pace_soon(span_.run);
  if (stream.sent() == expected_) span_.worker.part_done(span_.run);
}

void NodeSum::offer(std::uint32_t chunk) {
  if (!stream_->is_offered(chunk)) span_.worker.outbox().offer(*stream_, chunk);
}

// Keeps all collected contributions: the new owner may need them.
void NodeSum::stand_still() {
  flow::GrantQueue& grants = span_.worker.local_grants();
  grants.remove(*this);
  permitted_.clear();
  std::uint32_t units = 0;
  for (auto& [chunk, local] : chunks_) units += std::exchange(local.granted, false) ? 1 : 0;
  if (stream_) {
    span_.worker.outbox().cancel(*stream_);
    if (stream_->sent() != expected_) span_.worker.part_done(span_.run);
    stream_.reset();
  }
  owner_ = nullptr;
  needed_.assign(span_.plan.chunks, 0);
  expected_ = 0;
  wants_ = false;
  for (; units > 0; --units) grants.give_back(grant_bytes());
}

void NodeSum::go_on(const std::vector<std::uint8_t>& chunks, OwnerSum* owner) {
  std::vector<std::uint32_t> fresh;
  for (std::uint32_t chunk = 0; chunk < span_.plan.chunks; ++chunk)
    if (chunks[chunk] != 0 && std::exchange(needed_[chunk], 1) == 0) fresh.push_back(chunk);
  if (fresh.empty()) return;
  const auto count = static_cast<std::uint32_t>(fresh.size());
  if (owner != nullptr) {
    owner_ = owner;
  } else if (!stream_) {
    expected_ = count;
    stream_ = span_.open_stream(this, span_.plan.owner, wire::Stage::kPush,
                                static_cast<std::uint32_t>(span_.topology().my_node()));
  } else {
    if (stream_->sent() == expected_) ++span_.run.pending;  // the stream was done, and now has more chunks
    expected_ += count;
  }
  const bool all_are_seen = span_.run.local_seen_count == locals_ - 1;
  if (owner_ != nullptr && all_are_seen) span_.worker.server().local_seen(span_.key());
  bool fetches = false;
  std::vector<std::uint32_t> ready;
  for (const std::uint32_t chunk : fresh) {
    if (locals_ == 1) {
      ready.push_back(chunk);
      continue;
    }
    if (is_collected(chunk)) {
      const auto found = chunks_.find(chunk);
      if (sent_.count(chunk) > 0 || (found != chunks_.end() && !found->second.used)) {
        ready.push_back(chunk);
        continue;
      }
      if (found != chunks_.end()) chunks_.erase(found);  // holds no unit after stand_still()
      collected_[chunk] = 0;
    }
    fetches = true;
  }
  for (const std::uint32_t chunk : ready) on_collected(chunk);
  if (fetches) {
    announced_ = true;
    wants_ = false;
    if (all_are_seen) want_permits();
  }
}

void NodeSum::on_permitted(flow::Stream& stream, std::uint32_t chunk) {
  if (locals_ == 1) {
    if (!stream.is_offered(chunk))
      span_.worker.outbox().offer(stream, chunk);  // the owner waits for this chunk: do not wait for pace()
  } else if (!is_collected(chunk)) {
    permitted_.push_back(chunk);
    span_.worker.local_grants().add(*this, span_.run.operation.priority);
  }
}

std::optional<std::uint32_t> NodeSum::next_wanted() {
  const auto is_fetched = [this](std::uint32_t chunk) {
    const auto found = chunks_.find(chunk);
    return is_collected(chunk) || (found != chunks_.end() && found->second.granted);
  };
  while (!permitted_.empty() && is_fetched(permitted_.front())) permitted_.pop_front();
  return permitted_.empty() ? std::nullopt : std::optional(permitted_.front());
}

void NodeSum::grant(std::uint32_t chunk) {
  permitted_.pop_front();
  open(chunk).granted = true;
  fetch(chunk);
}

void NodeSum::on_granted(std::uint32_t chunk) {
  if (!is_collected(chunk) && locals_ > 1) fetch(chunk);
}

void NodeSum::fetch(std::uint32_t chunk) {
  const LocalChunk& local = open(chunk);
  const worker::GroupState& group = span_.run.group;
  wire::Grant grant{span_.chunk_id(wire::Stage::kLocalPush)};
  grant.chunk.number = chunk;
  const std::vector<int>& ranks = span_.topology().ranks_of(span_.topology().my_node());
  for (std::uint32_t l = 0; l < locals_; ++l)
    if (l != own() && !local.present[l])
      span_.worker.outbox().send(group.info.members.engine(ranks[l]), group.message(grant));
}

void NodeSum::on_announce() {
  announced_ = true;
  if (span_.run.local_seen_count == locals_ - 1) want_permits();
}

void NodeSum::on_local_seen() {
  if (owner_ != nullptr) span_.worker.server().local_seen(span_.key());
  if (announced_) want_permits();
}

void NodeSum::want_permits() {
  if (owner_ != nullptr) {
    span_.worker.server().local_announce(span_.key());
    return;
  }
  if (stream_ == nullptr || std::exchange(wants_, true)) return;
  for (std::uint32_t chunk = 0; chunk < span_.plan.chunks; ++chunk)
    if (!is_collected(chunk) && is_needed(chunk)) span_.worker.outbox().want(*stream_, chunk);
}

}  // namespace hybridps::worker
