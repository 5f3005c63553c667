#include "hybridps/server/server.h"

#include <algorithm>
#include <cassert>
#include <utility>

namespace hybridps::server {
namespace {

constexpr std::uint32_t kNodesMax = 4096;

}  // namespace

Server::Server(flow::Outbox& outbox, Listener& listener, std::uint32_t grant_chunks, std::uint64_t grant_bytes)
    : outbox_(outbox), listener_(listener), budget_(grant_chunks, grant_bytes) {}

Server::~Server() = default;

Server::SpanState& Server::state_of(const SpanKey& key) {
  std::unique_ptr<SpanState>& slot = spans_[key];
  if (!slot) {
    slot = std::make_unique<SpanState>();
    slot->key = key;
  }
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
    if (chunk.contributor >= span.opening.nodes || chunk.number >= span.opening.chunks ||
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
  SpanState& span = state_of(key);
  assert(!span.opened);
  span.opening = opening;
  span.opened = true;
  span.done.assign(opening.chunks, 0);
  span.nodes.resize(std::max<std::size_t>(span.nodes.size(), opening.nodes));
  if (!fits(span)) {
    span.opened = false;  // more may come before the operation fails: none of it may complete a chunk
    return false;
  }
  if (span.wanted) want_grants(span);
  return true;
}

// What came before the span was opened.
bool Server::fits(SpanState& span) {
  if (!span.first) return true;
  const Opening& o = span.opening;
  if (!check(span, span.first->rank, span.first->chunk)) return false;
  if (span.nodes.size() > o.nodes || (o.own_node != kNoNode && span.nodes[o.own_node].seen)) {
    listener_.on_bad_message(span.key.operation, "a contribution from a node that the plan does not have");
    return false;
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
  SpanState& span = state_of(key);
  see(span, span.opening.own_node, {}, span.opening.own_rank);
}

void Server::local_announce(const SpanKey& key) { want_grants(state_of(key)); }

void Server::contribute(const SpanKey& key, std::uint32_t index, const std::byte* data, std::byte* out) {
  SpanState& span = state_of(key);
  Chunk& chunk = span.chunks[index];
  chunk.local = data;
  chunk.out = out;
  const std::uint32_t own = span.opening.own_node;
  if (chunk.present.size() <= own) chunk.present.resize(own + 1, 0);
  assert(!chunk.present[own]);
  chunk.present[own] = 1;
  ++chunk.count;
  see(span, own, {}, span.opening.own_rank);
  finish_if_complete(span, index);
}

void Server::on_push(const wire::From& from, const wire::ChunkId& id, flow::Delivery payload) {
  const SpanKey key{OperationKey{from.uid, id.sequence}, id.span};
  const auto rank = static_cast<int>(from.sender_rank);
  SpanState& span = state_of(key);
  if (!check(span, rank, id)) return;
  if (span.opened && span.done[id.number]) return;
  if (id.contributor >= kNodesMax || (!span.opened && id.span_bytes > 0 && payload.bytes() > id.span_bytes)) {
    listener_.on_bad_message(key.operation, "a contribution from an impossible node or of an impossible size");
    return;
  }
  see(span, id.contributor, from.source, rank);
  Chunk& chunk = span.chunks[id.number];
  const std::size_t node = id.contributor;
  if (chunk.present.size() <= node) chunk.present.resize(node + 1, 0);
  if (chunk.present[node]) return;  // doubled on the way
  if (chunk.payloads.size() <= node) chunk.payloads.resize(node + 1);
  chunk.payloads[node] = std::move(payload);
  chunk.present[node] = 1;
  ++chunk.count;
  finish_if_complete(span, id.number);
}

void Server::on_announce(const wire::From& from, const wire::ChunkId& id) {
  SpanState& span = state_of(SpanKey{OperationKey{from.uid, id.sequence}, id.span});
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

void Server::combine(const SpanState& span, const Chunk& chunk, std::size_t bytes, std::byte* out) {
  const Opening& o = span.opening;
  std::vector<reduce::Input> inputs(o.nodes);
  for (std::uint32_t node = 0; node < o.nodes; ++node)
    inputs[node].data = node == o.own_node ? chunk.local : chunk.payloads[node].data();
  // Premultiplication happened at the nodes: here it is a plain sum.
  const core::ReduceOp op = o.signature.op == core::ReduceOp::kPremulSum ? core::ReduceOp::kSum : o.signature.op;
  reduce::combine(inputs, out, bytes / core::size_of(o.signature.dtype), o.signature.dtype, op, o.finish);
}

// Of a granted chunk: every other node may send it at the same time.
std::uint64_t Server::cost_of(const SpanState& span) const noexcept {
  const Opening& o = span.opening;
  return std::min<std::uint64_t>(o.chunk_bytes, o.bytes) * (o.own_node == kNoNode ? o.nodes : o.nodes - 1);
}

void Server::forget(SpanState& span, std::uint32_t index) {
  const auto found = span.chunks.find(index);
  if (found->second.granted) budget_.give_back(cost_of(span));
  span.chunks.erase(found);  // gives the payloads back
}

void Server::sum_into(const SpanKey& key, std::uint32_t index, std::byte* out) {
  SpanState& span = *spans_.at(key);
  const Chunk& chunk = span.chunks.at(index);
  const bool granted = chunk.granted;
  combine(span, chunk, bytes_of(span, index), out);
  forget(span, index);
  if (granted) give_grants();
}

void Server::finish_if_complete(SpanState& span, std::uint32_t index) {
  if (!span.opened) return;
  const Chunk& chunk = span.chunks.at(index);
  const Opening& o = span.opening;
  if (chunk.count < o.nodes) return;

  const std::size_t bytes = bytes_of(span, index);
  for (std::uint32_t node = 0; node < o.nodes; ++node) {
    if (node == o.own_node) continue;
    if (const std::size_t came = chunk.payloads[node].bytes(); came != bytes) {
      listener_.on_bad_message(span.key.operation, "a contribution of " + std::to_string(came) +
                                                       " bytes where the plan has " + std::to_string(bytes));
      return;
    }
  }
  span.done[index] = 1;
  ++span.finished;
  LocalOwner* owner = o.owner;
  const std::uint32_t id = span.key.span;
  if (o.own_node == kNoNode) {
    owner->on_sum(id, index);
    return;
  }
  const bool nothing_to_do =
      bytes == 0 || (o.nodes == 1 && o.finish.kind == reduce::Finish::Kind::kNone && chunk.local == chunk.out);
  if (!nothing_to_do) combine(span, chunk, bytes, chunk.out);
  const bool granted = chunk.granted;
  forget(span, index);
  if (owner != nullptr) owner->on_sum(id, index);
  if (granted) give_grants();
}

void Server::want_grants(SpanState& span) {
  span.wanted = true;
  if (span.queued || !span.opened || span.seen < span.opening.nodes) return;
  span.queued = true;
  grant_queue_.push_back(span.key);
  give_grants();
}

void Server::give_grants() {
  if (giving_) return;  // a grant may complete a chunk, which gives grants
  giving_ = true;
  while (budget_.has_unit() && !grant_queue_.empty()) {
    const SpanKey key = grant_queue_.front();
    const auto found = spans_.find(key);
    if (found == spans_.end()) {
      grant_queue_.pop_front();
      continue;
    }
    SpanState& span = *found->second;
    while (span.next_grant < span.opening.chunks && span.done[span.next_grant]) ++span.next_grant;
    if (span.next_grant == span.opening.chunks) {
      grant_queue_.pop_front();
      continue;
    }
    if (!budget_.fits(cost_of(span))) break;
    const std::uint32_t index = span.next_grant++;
    Chunk& chunk = span.chunks[index];
    chunk.granted = true;
    budget_.take(cost_of(span));
    wire::Grant grant;
    grant.chunk.stage = wire::Stage::kPush;
    grant.chunk.signature = span.opening.signature;
    grant.chunk.sequence = key.operation.sequence;
    grant.chunk.span = key.span;
    grant.chunk.number = index;
    const wire::From from{{}, key.operation.uid, static_cast<std::uint32_t>(span.opening.own_rank)};
    const std::uint32_t own = span.opening.own_node;
    for (std::uint32_t node = 0; node < span.opening.nodes; ++node)
      if (node != own && (chunk.present.size() <= node || !chunk.present[node]))
        outbox_.send(span.nodes[node].engine, {from, 0, grant});
    // Last, since it may finish the chunk.
    if (chunk.present.size() <= own || !chunk.present[own]) span.opening.owner->on_granted(key.span, index);
  }
  giving_ = false;
}

std::optional<Call> Server::contradiction(const OperationKey& key, const wire::Signature& ours) const noexcept {
  for (auto at = spans_.lower_bound(SpanKey{key, 0}); at != spans_.end() && at->first.operation == key; ++at)
    if (const auto& first = at->second->first; first && first->chunk.signature != ours)
      return Call{first->rank, first->chunk.signature};
  return {};
}

void Server::close(const OperationKey& key) {
  auto at = spans_.lower_bound(SpanKey{key, 0});
  bool freed = false;
  while (at != spans_.end() && at->first.operation == key) {
    for (const auto& [index, chunk] : at->second->chunks) {
      if (!chunk.granted) continue;
      budget_.give_back(cost_of(*at->second));
      freed = true;
    }
    at = spans_.erase(at);
  }
  if (freed) give_grants();
}

void Server::close_group(core::GroupUid uid) {
  std::vector<OperationKey> keys;
  for (auto at = spans_.lower_bound(SpanKey{OperationKey{uid, 0}, 0});
       at != spans_.end() && at->first.operation.uid == uid; ++at)
    if (keys.empty() || keys.back() != at->first.operation) keys.push_back(at->first.operation);
  for (const OperationKey& key : keys) close(key);
}

std::string Server::progress_of(const OperationKey& key) const {
  for (auto at = spans_.lower_bound(SpanKey{key, 0}); at != spans_.end() && at->first.operation == key; ++at) {
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
    return text + "] of " + std::to_string(span.opening.nodes);
  }
  return {};
}

}  // namespace hybridps::server
