#include "hybridps/server/server.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "hybridps/observe/trace.h"

namespace hybridps::server {
namespace {

constexpr std::uint32_t kNodesMax = 4096;

}  // namespace

std::uint32_t chunk_bytes_of(const schedule::ChunkSizes& sizes, const schedule::Tuning& tuning,
                             const compress::Codec* codec, core::DType dtype) noexcept {
  const std::uint32_t bytes = tuning.chunk_bytes != 0 ? tuning.chunk_bytes : sizes.usual;
  if (codec == nullptr) return bytes;
  return compress::chunk_bytes(*codec, core::size_of(dtype), bytes, std::max<std::uint64_t>(sizes.coded, bytes));
}

bool may_have_levels(const wire::Signature& signature, const compress::Codecs* codecs,
                     const schedule::Topology& topology) noexcept {
  if (core::is_outer(signature.op)) return false;
  return signature.coding == wire::Coding::kPlain ||
         (codecs != nullptr && codecs->spec().scope == compress::CodecScope::kRegions && topology.servers() == 0);
}

Server::Server(flow::Outbox& outbox, Listener& listener, std::uint32_t grant_chunks, std::uint64_t grant_bytes)
    : outbox_(outbox),
      listener_(listener),
      grants_(flow::GrantBudget(grant_chunks, grant_bytes)),
      region_grants_(flow::GrantBudget(grant_chunks, grant_bytes)) {}

Server::~Server() = default;

Server::SpanState& Server::state_of(const SpanKey& key) {
  std::unique_ptr<SpanState>& slot = spans_[key];
  if (!slot) slot = std::make_unique<SpanState>(*this, key);
  return *slot;
}

void Server::see(SpanState& span, std::uint32_t node, core::EngineId engine, int rank) {
  if (node >= span.nodes.size()) span.nodes.resize(node + 1);
  Node& n = span.nodes[node];
  if (n.seen) return;
  n = Node{engine, true, rank};
  ++span.seen;
  if (span.wanted) want_grants(span);
}

bool Server::check(SpanState& span, int rank, const wire::ChunkId& chunk) {
  if (span.opened) {
    if (chunk.signature != span.opening.signature || chunk.span_bytes != span.opening.bytes) {
      listener_.on_mismatch(span.key.operation, {span.opening.own_rank, span.opening.signature},
                            {rank, chunk.signature});
      return false;
    }
    if (!takes(span, chunk.contributor) || chunk.number >= span.opening.chunks ||
        chunk.contributor == span.opening.own_node) {
      listener_.on_bad_message(span.key.operation, "a contribution for chunk " + std::to_string(chunk.number) +
                                                       " from node " + std::to_string(chunk.contributor) +
                                                       " that the plan does not have");
      return false;
    }
    return true;
  }
  if (!span.first) {
    span.first = First{rank, chunk};
    return true;
  }
  const wire::ChunkId& first = span.first->chunk;
  if (chunk.signature != first.signature || chunk.span_bytes != first.span_bytes) {
    listener_.on_mismatch(span.key.operation, {span.first->rank, first.signature}, {rank, chunk.signature});
    return false;
  }
  return true;
}

bool Server::open(const SpanKey& key, const Opening& opening) {
  const core::OneThread::Inside inside(one_thread_);
  SpanState& span = state_of(key);
  assert(!span.opened);
  span.opening = opening;
  span.opened = true;
  span.done = opening.done;
  span.done.resize(opening.chunks, 0);
  span.nodes.resize(std::max<std::size_t>(span.nodes.size(), opening.nodes));
  span.needed = opening.nodes;
  if (!opening.parts.empty()) {
    span.takes.assign(opening.nodes, 0);
    for (const std::vector<std::uint32_t>& part : opening.parts)
      for (const std::uint32_t node : part) span.takes[node] = 1;
    span.needed = static_cast<std::uint32_t>(std::count(span.takes.begin(), span.takes.end(), 1));
  }
  if (opening.plain_part >= 0) {
    span.plain.assign(opening.nodes, 0);
    for (const std::uint32_t node : opening.parts[static_cast<std::size_t>(opening.plain_part)]) span.plain[node] = 1;
  }
  if (!fits(span)) {
    span.opened = false;  // contributions may still come before the operation fails: they must not complete a chunk
    return false;
  }
  if (span.wanted) want_grants(span);
  return true;
}

// Checks the messages that came before the span was opened.
bool Server::fits(SpanState& span) {
  if (!span.first) return true;
  const Opening& o = span.opening;
  if (!check(span, span.first->rank, span.first->chunk)) return false;
  if (span.nodes.size() > o.nodes || (o.own_node != kNoNode && span.nodes[o.own_node].seen)) {
    listener_.on_bad_message(span.key.operation, "a contribution from a node that the plan does not have");
    return false;
  }
  for (std::uint32_t node = 0; !span.takes.empty() && node < o.nodes; ++node) {
    if (span.nodes[node].seen && !takes(span, node)) {
      listener_.on_bad_message(span.key.operation,
                               "a contribution from node " + std::to_string(node) + " that the plan does not have");
      return false;
    }
  }
  for (const auto& [index, chunk] : span.chunks) {
    if (index >= o.chunks || chunk.present.size() > o.nodes) {
      listener_.on_bad_message(span.key.operation, "a contribution that the plan does not have");
      return false;
    }
  }
  return true;
}

void Server::local_seen(const SpanKey& key) {
  const core::OneThread::Inside inside(one_thread_);
  SpanState& span = state_of(key);
  see(span, span.opening.own_node, {}, span.opening.own_rank);
}

void Server::local_announce(const SpanKey& key) {
  const core::OneThread::Inside inside(one_thread_);
  want_grants(state_of(key));
}

void Server::contribute(const SpanKey& key, std::uint32_t index, const std::byte* data) {
  const core::OneThread::Inside inside(one_thread_);
  SpanState& span = state_of(key);
  Chunk& chunk = span.chunks[index];
  chunk.local = data;
  const std::uint32_t own = span.opening.own_node;
  if (chunk.present.size() <= own) chunk.present.resize(own + 1, 0);
  assert(!chunk.present[own]);
  chunk.present[own] = 1;
  ++chunk.count;
  see(span, own, {}, span.opening.own_rank);
  finish_if_complete(span, index);
}

void Server::on_push(const wire::From& from, const wire::ChunkId& id, flow::Delivery payload) {
  const core::OneThread::Inside inside(one_thread_);
  const SpanKey key{{from.uid, id.sequence}, id.span, id.attempt};
  const auto rank = static_cast<int>(from.sender_rank);
  SpanState& span = state_of(key);
  if (!check(span, rank, id)) return;
  if (span.opened && span.done[id.number]) return;
  if (id.contributor >= kNodesMax ||
      (!span.opened && id.span_bytes > 0 && payload.bytes() > compress::wire_bytes_limit(id.span_bytes))) {
    listener_.on_bad_message(key.operation, "a contribution from an impossible node or of an impossible size");
    return;
  }
  see(span, id.contributor, from.source, rank);
  Chunk& chunk = span.chunks[id.number];
  const std::size_t node = id.contributor;
  if (chunk.present.size() <= node) chunk.present.resize(node + 1, 0);
  if (chunk.present[node]) return;  // the message was duplicated on the way
  if (chunk.payloads.size() <= node) chunk.payloads.resize(node + 1);
  chunk.payloads[node] = std::move(payload);
  chunk.present[node] = 1;
  ++chunk.count;
  finish_if_complete(span, id.number);
}

void Server::on_announce(const wire::From& from, const wire::ChunkId& id) {
  const core::OneThread::Inside inside(one_thread_);
  SpanState& span = state_of({{from.uid, id.sequence}, id.span, id.attempt});
  const auto rank = static_cast<int>(from.sender_rank);
  if (!check(span, rank, id) || id.contributor >= kNodesMax) return;
  see(span, id.contributor, from.source, rank);
  want_grants(span);
}

std::size_t Server::bytes_of(const SpanState& span, std::uint32_t index) const noexcept {
  const Opening& o = span.opening;
  const std::uint64_t begin = std::uint64_t{index} * o.chunk_bytes;
  return begin >= o.bytes ? 0 : static_cast<std::size_t>(std::min<std::uint64_t>(o.chunk_bytes, o.bytes - begin));
}

namespace {

/// The nodes have premultiplied already: the owner makes a plain sum.
core::ReduceOp sums_by(core::ReduceOp op) noexcept {
  return op == core::ReduceOp::kPremulSum ? core::ReduceOp::kSum : core::combined_by(op);
}

}  // namespace

reduce::Input Server::input_of(const SpanState& span, const Chunk& chunk, std::uint32_t node) {
  if (node == span.opening.own_node) return reduce::Input{chunk.local};
  const flow::Delivery& payload = chunk.payloads[node];
  const reduce::Format* const packed = payload.format();
  return reduce::Input{payload.data(), 1.0, packed != nullptr ? packed : codec_of(span, node)};
}

void Server::sum_plain_part(const SpanKey& key, std::uint32_t index, std::byte* out) const {
  const SpanState& span = *spans_.at(key);
  const Opening& o = span.opening;
  std::vector<reduce::Input> inputs;
  for (const std::uint32_t node : o.parts[static_cast<std::size_t>(o.plain_part)])
    inputs.push_back(input_of(span, span.chunks.at(index), node));
  reduce::combine(inputs, out, bytes_of(span, index) / core::size_of(o.signature.dtype), o.signature.dtype,
                  sums_by(o.signature.op), {});
}

void Server::replace_plain_part(const SpanKey& key, std::uint32_t index, const std::byte* data) {
  spans_.at(key)->chunks.at(index).plain_part = data;
}

void Server::combine(const SpanState& span, const Chunk& chunk, std::size_t bytes, std::byte* out) {
  const Opening& o = span.opening;
  const core::ReduceOp op = sums_by(o.signature.op);
  const std::size_t elements = bytes / core::size_of(o.signature.dtype);
  std::vector<reduce::Input> inputs;
  inputs.reserve(o.nodes);
  if (o.parts.empty()) {
    for (std::uint32_t node = 0; node < o.nodes; ++node) inputs.push_back(input_of(span, chunk, node));
  } else if (o.parts.size() == 1) {
    for (const std::uint32_t node : o.parts.front()) inputs.push_back(input_of(span, chunk, node));
  }
  // The sum of each part has the bits that a gateway would have sent.
  std::vector<std::unique_ptr<std::byte[]>> sums;
  for (std::size_t i = 0; o.parts.size() > 1 && i < o.parts.size(); ++i) {
    if (chunk.plain_part != nullptr && static_cast<int>(i) == o.plain_part) {
      inputs.push_back(reduce::Input{chunk.plain_part});
      continue;
    }
    std::vector<reduce::Input> of_part;
    for (const std::uint32_t node : o.parts[i]) of_part.push_back(input_of(span, chunk, node));
    if (of_part.size() > 1) {
      sums.push_back(std::make_unique_for_overwrite<std::byte[]>(bytes));
      reduce::combine(of_part, sums.back().get(), elements, o.signature.dtype, op, {});
      of_part = {reduce::Input{sums.back().get()}};
    }
    inputs.push_back(of_part.front());
  }
  reduce::combine(inputs, out, elements, o.signature.dtype, op, o.finish);
}

// Every other node may send a granted chunk at the same time.
std::uint64_t Server::SpanState::grant_bytes() const noexcept {
  return std::min<std::uint64_t>(opening.chunk_bytes, opening.bytes) *
         (opening.own_node == kNoNode ? needed : needed - 1);
}

void Server::sum_into(const SpanKey& key, std::uint32_t index, std::byte* out) {
  const core::OneThread::Inside inside(one_thread_);
  SpanState& span = *spans_.at(key);
  const auto found = span.chunks.find(index);
  const Chunk& chunk = found->second;
  const std::size_t bytes = bytes_of(span, index);
  const Opening& o = span.opening;
  const bool is_made = span.needed == 1 && o.finish.kind == reduce::Finish::Scaling::kNone && chunk.local == out;
  if (bytes > 0 && !is_made) {
    const observe::TraceSpan traced(outbox_.trace(), observe::EventType::kSum, 1, bytes, key.operation.sequence,
                                    key.span, index);
    const auto packed = static_cast<std::size_t>(std::count_if(chunk.payloads.begin(), chunk.payloads.end(),
                                                               [](const auto& p) { return p.format() != nullptr; }));
    const core::TimePoint began = packed > 0 ? core::Clock::now() : core::TimePoint{};
    combine(span, chunk, bytes, out);
    if (packed > 0) outbox_.packing().note_unpacked(packed * bytes, core::Clock::now() - began);
  }
  const bool granted = chunk.granted;
  span.chunks.erase(found);  // releases the payloads
  if (granted) grants_of(span).give_back(span.grant_bytes());
}

const std::byte* Server::own_contribution(const SpanKey& key, std::uint32_t index) const {
  return spans_.at(key)->chunks.at(index).local;
}

void Server::replace_own(const SpanKey& key, std::uint32_t index, const std::byte* data) {
  spans_.at(key)->chunks.at(index).local = data;
}

compress::ChunkOrigin Server::place_of(const SpanKey& key, std::uint32_t index) const {
  const SpanState& span = *spans_.at(key);
  const Chunk& chunk = span.chunks.at(index);
  for (const flow::Delivery& payload : chunk.payloads)
    if (payload.bytes() > 0 && span.opening.codec != nullptr) return span.opening.codec->place_of(payload.data());
  return {};
}

void Server::finish_if_complete(SpanState& span, std::uint32_t index) {
  if (!span.opened) return;
  const Chunk& chunk = span.chunks.at(index);
  const Opening& o = span.opening;
  if (chunk.count < span.needed) return;

  const std::size_t bytes = bytes_of(span, index);
  for (std::uint32_t node = 0; node < o.nodes; ++node) {
    if (node == o.own_node || !takes(span, node)) continue;
    const flow::Delivery& payload = chunk.payloads[node];
    const std::size_t came = payload.bytes();
    const bool is_packed = payload.format() != nullptr;
    const compress::Codec* const codec = codec_of(span, node);
    const bool fits = codec == nullptr || bytes == 0
                          ? came == bytes && (!is_packed || payload.dtype() == o.signature.dtype)
                          : !is_packed && codec->fits(payload.data(), came, bytes);
    if (!fits) {
      listener_.on_bad_message(span.key.operation, "a contribution of " + std::to_string(came) +
                                                       " bytes where the plan has " + std::to_string(bytes));
      return;
    }
  }
  span.done[index] = 1;
  ++span.finished;
  o.owner->on_complete(span.key.span, index);
}

void Server::want_grants(SpanState& span) {
  span.wanted = true;
  if (span.opened && span.seen >= span.needed) grants_of(span).add(span, span.opening.priority);
}

std::optional<std::uint32_t> Server::SpanState::next_wanted() {
  while (next_grant < opening.chunks && done[next_grant]) ++next_grant;
  return next_grant < opening.chunks ? std::optional(next_grant) : std::nullopt;
}

void Server::grant(SpanState& span, std::uint32_t index) {
  ++span.next_grant;
  Chunk& chunk = span.chunks[index];
  chunk.granted = true;
  wire::Grant grant;
  grant.chunk.stage = wire::Stage::kPush;
  grant.chunk.signature = span.opening.signature;
  grant.chunk.sequence = span.key.operation.sequence;
  grant.chunk.span = span.key.span;
  grant.chunk.attempt = span.key.attempt;
  grant.chunk.number = index;
  const wire::From from{{}, span.key.operation.uid, static_cast<std::uint32_t>(span.opening.own_rank)};
  const std::uint32_t own = span.opening.own_node;
  for (std::uint32_t node = 0; node < span.opening.nodes; ++node)
    if (node != own && takes(span, node) && (chunk.present.size() <= node || !chunk.present[node]))
      outbox_.send(span.nodes[node].engine, {from, 0, grant});
  // on_granted() comes last, since it may finish the chunk.
  if (chunk.present.size() <= own || !chunk.present[own]) span.opening.owner->on_granted(span.key.span, index);
}

std::optional<RankCall> Server::contradiction(const OperationKey& key, const wire::Signature& ours) const noexcept {
  for (auto at = spans_.lower_bound(SpanKey{key}); at != spans_.end() && at->first.operation == key; ++at)
    if (const auto& first = at->second->first; first && first->chunk.signature != ours)
      return RankCall{first->rank, first->chunk.signature};
  return {};
}

void Server::close(const SpanKey& key) {
  const core::OneThread::Inside inside(one_thread_);
  const auto at = spans_.find(key);
  if (at == spans_.end()) return;
  flow::GrantQueue& grants = grants_of(*at->second);
  grants.remove(*at->second);
  const std::uint64_t grant_bytes = at->second->grant_bytes();
  std::uint32_t units = 0;
  for (const auto& [index, chunk] : at->second->chunks) units += chunk.granted ? 1 : 0;
  spans_.erase(at);
  if (units > 0) grants.give_back(grant_bytes, units);
}

void Server::close(const OperationKey& key) {
  const core::OneThread::Inside inside(one_thread_);
  std::vector<SpanKey> keys;
  for (auto at = spans_.lower_bound(SpanKey{key}); at != spans_.end() && at->first.operation == key; ++at) {
    // Units that one span gives back must not go to the operation's other spans.
    grants_of(*at->second).remove(*at->second);
    keys.push_back(at->first);
  }
  for (const SpanKey& span : keys) close(span);
}

void Server::close_group(core::GroupUid uid) {
  std::vector<OperationKey> keys;
  for (auto at = spans_.lower_bound(SpanKey{{uid, 0}}); at != spans_.end() && at->first.operation.uid == uid; ++at)
    if (keys.empty() || keys.back() != at->first.operation) keys.push_back(at->first.operation);
  for (const OperationKey& key : keys) close(key);
}

std::string Server::progress_of(const OperationKey& key) const {
  for (auto at = spans_.lower_bound(SpanKey{key}); at != spans_.end() && at->first.operation == key; ++at) {
    const SpanState& span = *at->second;
    if (!span.opened || span.finished == span.opening.chunks) continue;
    std::string text = "owner of span " + std::to_string(at->first.span) + " has summed " +
                       std::to_string(span.finished) + "/" + std::to_string(span.opening.chunks) +
                       " chunks, heard from nodes [";
    bool first = true;
    for (std::size_t node = 0; node < span.nodes.size(); ++node) {
      if (!span.nodes[node].seen) continue;
      text += (first ? "" : ", ") + std::to_string(node);
      first = false;
    }
    return text + "] of " + std::to_string(span.needed);
  }
  return {};
}

}  // namespace hybridps::server
