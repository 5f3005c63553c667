#include "hybridps/worker/point_to_point.h"

#include <algorithm>
#include <limits>
#include <string>
#include <utility>

#include "hybridps/core/check.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {

PointToPoint::PointToPoint(Worker& worker, GroupState& group)
    : worker_(worker),
      group_(group),
      numbers_(static_cast<std::size_t>(group.info.topology.size()), 0),
      over_(static_cast<std::size_t>(group.info.topology.size())) {}

PointToPoint::~PointToPoint() = default;

void PointToPoint::submit(std::unique_ptr<OperationRun> run) {
  OperationRun& r = *run;
  const Operation& o = r.operation;
  r.signature.kind = schedule::Kind::kPointToPoint;
  if (!o.sending) {
    r.issued = ++issued_;
    post(std::move(run));
    return;
  }
  const Key key{o.peer, o.tag, numbers_[static_cast<std::size_t>(o.peer)]++};
  // Follow the last unacknowledged send to this receiver with this tag.
  if (const auto next = sends_.lower_bound(key); next != sends_.begin()) {
    const Key& last = std::prev(next)->first;
    if (last.peer == key.peer && last.tag == key.tag)
      r.follows = static_cast<std::uint32_t>(
          std::min<std::uint64_t>(key.number - last.number, std::numeric_limits<std::uint32_t>::max()));
  }
  r.sequence = key.number;
  r.signature.total_bytes = r.input.bytes();
  sends_[key] = std::move(run);
  if (is_own(key.peer)) {
    unmatched_[key].stamp = ++stamps_;
    match(key.peer, key.tag);
    return;
  }
  schedule::Request request;
  request.kind = schedule::Kind::kPointToPoint;
  request.root = o.peer;
  request.sending = true;
  request.total_bytes = r.input.bytes();
  ++r.pending;  // the receiver's acknowledgement
  worker_.launch(r, schedule::make_plan(request, group_.info.topology, group_.info.limits()));
}

void PointToPoint::post(std::unique_ptr<OperationRun> run) {
  const int peer = run->operation.peer;
  const std::uint32_t tag = run->operation.tag;
  const std::uint64_t issued = run->issued;
  posted_[{tag, peer, issued}] = std::move(run);
  if (peer == kAnySource)
    match_any(tag);
  else
    match(peer, tag);
}

void PointToPoint::on_message(const wire::Message& message, flow::Delivery payload) {
  const wire::From& from = message.from;
  if (from.sender_rank >= over_.size() || is_own(static_cast<int>(from.sender_rank)))
    return;  // such messages never come from a dedicated server or from this rank
  const auto key = [&](std::uint32_t tag) { return Key{static_cast<int>(from.sender_rank), tag, message.sequence()}; };
  if (const auto* ack = message.as<wire::Ack>()) {
    if (OperationRun* run = send_of(key(ack->tag)); run != nullptr && !std::exchange(run->acknowledged, true))
      worker_.part_done(*run);
  } else if (const auto* verdict = message.as<wire::Verdict>()) {
    if (OperationRun* run = send_of(key(verdict->tag))) worker_.finish(*run, verdict_in(from, *verdict, payload));
  } else if (const auto* cancel = message.as<wire::Cancel>()) {
    on_cancelled(key(cancel->tag), message);
  } else if (const auto* grant = message.as<wire::Grant>()) {
    if (OperationRun* run = send_of(key(grant->chunk.tag))) run->spans.front()->on_grant(from.source, *grant);
  } else {
    on_part(key(message.chunk()->tag), message, std::move(payload));
  }
}

OperationRun* PointToPoint::send_of(const Key& key) {
  const auto found = sends_.find(key);
  return found == sends_.end() ? nullptr : found->second.get();
}

void PointToPoint::on_part(const Key& key, const wire::Message& part, flow::Delivery payload) {
  if (const auto found = matched_.find(key); found != matched_.end()) {
    OperationRun& run = *found->second.run;
    note(found->second.message, part, payload.bytes());
    deliver(run, part, std::move(payload));
    return;
  }
  if (over_[static_cast<std::size_t>(key.peer)].contains(key.number)) return;
  if (!worker_.can_keep(group_, kept_, part)) return;
  const auto [found, is_new] = unmatched_.try_emplace(key);
  IncomingMessage& message = found->second;
  if (is_new) message.stamp = ++stamps_;
  note(message, part, payload.bytes());
  ++kept_;
  message.parts.emplace_back(part, std::move(payload));
  if (is_new) match(key.peer, key.tag);
}

void PointToPoint::on_cancelled(const Key& key, const wire::Message& cancel) {
  SequenceWindow& over = over_[static_cast<std::size_t>(key.peer)];
  if (over.contains(key.number)) return;
  // A number beyond the first gap needs memory, as an early message does.
  if (!worker_.can_keep(group_, kept_ + over.ranges(), cancel)) return;
  over.add(key.number);
  if (const auto found = matched_.find(key); found != matched_.end()) {
    // The receive waits for the next message, in its old place in the order, as if it had never taken this message.
    Matched matched = std::move(found->second);
    matched_.erase(found);
    OperationRun& run = *matched.run;
    run.spans.clear();
    run.started = false;
    run.pending = 0;
    run.sequence = 0;
    if (matched.from_any) run.operation.peer = kAnySource;
    post(std::move(matched.run));
    return;
  }
  if (const auto found = unmatched_.find(key); found != unmatched_.end()) {
    kept_ -= found->second.parts.size();
    unmatched_.erase(found);
  }
  match(key.peer, key.tag);
}

void PointToPoint::give_up(const OperationRun& run, const core::Status& cause) {
  const Operation& o = run.operation;
  if (o.peer == kAnySource || is_own(o.peer)) return;
  const Key key{o.peer, o.tag, run.sequence};
  const core::EngineId other = group_.info.members.engine(o.peer);
  if (o.sending) {
    worker_.outbox().send(other, group_.message(wire::Cancel{key.number, key.tag}));
  } else if (const auto found = matched_.find(key); found != matched_.end() && found->second.run.get() == &run) {
    worker_.host().send_control(
        other, group_.message(wire::Verdict::on_message(key.number, key.tag, cause.code())),
        group_.info.member_text(group_.info.topology.rank()) + " gave up its receive: " + std::string(cause.message()));
  }
}

void PointToPoint::note(IncomingMessage& message, const wire::Message& part, std::size_t bytes) {
  const auto* data = part.as<wire::Data>();
  if (data == nullptr) return;
  if (message.chunks.insert(data->chunk.number).second) message.bytes += bytes;
  if (message.bytes >= data->chunk.span_bytes && !std::exchange(message.acknowledged, true))
    worker_.outbox().send(part.from.source, group_.message(wire::Ack{data->chunk.sequence, data->chunk.tag}));
}

void PointToPoint::deliver(OperationRun& run, const wire::Message& part, flow::Delivery payload) {
  SpanRun& span = *run.spans.front();
  if (const auto* data = part.as<wire::Data>())
    span.on_data(part.from, *data, std::move(payload));
  else if (const auto* announce = part.as<wire::Announce>())
    span.on_announce(part.from, *announce);
}

PointToPoint::Unmatched::iterator PointToPoint::next_message(int peer, std::uint32_t tag) {
  const auto first = unmatched_.lower_bound(Key{peer, tag, 0});
  if (first == unmatched_.end() || first->first.peer != peer || first->first.tag != tag) return unmatched_.end();
  if (is_own(peer)) return first;  // messages to oneself come in order
  const std::uint32_t follows = first->second.parts.front().first.chunk()->follows;
  const std::uint64_t number = first->first.number;
  if (follows == 0 || follows > number) return first;
  const std::uint64_t before = number - follows;
  return over_[static_cast<std::size_t>(peer)].contains(before) || matched_.count(Key{peer, tag, before}) > 0
             ? first
             : unmatched_.end();
}

PointToPoint::Posted::iterator PointToPoint::next_receive(int peer, std::uint32_t tag) {
  auto best = posted_.end();
  for (const int from : {peer, kAnySource}) {
    const auto first = posted_.lower_bound({tag, from, 0});
    if (first == posted_.end() || std::get<0>(first->first) != tag || std::get<1>(first->first) != from) continue;
    if (best == posted_.end() || std::get<2>(first->first) < std::get<2>(best->first)) best = first;
  }
  return best;
}

void PointToPoint::match(int peer, std::uint32_t tag) {
  for (;;) {
    const auto message = next_message(peer, tag);
    if (message == unmatched_.end()) return;
    const auto receive = next_receive(peer, tag);
    if (receive == posted_.end()) return;
    bind(receive, message);
  }
}

void PointToPoint::match_any(std::uint32_t tag) {
  for (;;) {
    auto best = unmatched_.end();
    for (int peer = 0; peer < group_.info.topology.size(); ++peer) {
      const auto message = next_message(peer, tag);
      if (message == unmatched_.end() || next_receive(peer, tag) == posted_.end()) continue;
      if (best == unmatched_.end() || message->second.stamp < best->second.stamp) best = message;
    }
    if (best == unmatched_.end()) return;
    bind(next_receive(best->first.peer, tag), best);
  }
}

void PointToPoint::bind(Posted::iterator receive, Unmatched::iterator message) {
  const Key key = message->first;
  Matched& matched = matched_[key];
  matched.run = std::move(receive->second);
  matched.message = std::move(message->second);
  posted_.erase(receive);
  unmatched_.erase(message);
  OperationRun& run = *matched.run;
  matched.from_any = run.operation.peer == kAnySource;
  run.operation.peer = key.peer;
  run.sequence = key.number;
  if (is_own(key.peer)) {
    move_own(*sends_.find(key)->second, run);
    return;
  }
  auto parts = std::exchange(matched.message.parts, {});
  kept_ -= parts.size();
  const wire::Message& first = parts.front().first;
  const std::uint64_t bytes = first.chunk()->span_bytes;
  if (bytes != run.output.bytes()) {
    const std::string why = other_size(run, bytes);
    worker_.host().send_control(
        first.from.source, group_.message(wire::Verdict::on_message(key.number, key.tag, core::Code::kMismatch)), why);
    worker_.finish(run, core::Status(core::Code::kMismatch, why));
    return;
  }
  schedule::Request request;
  request.kind = schedule::Kind::kPointToPoint;
  request.root = key.peer;
  request.sending = false;
  request.total_bytes = run.output.bytes();
  run.signature.total_bytes = run.output.bytes();
  worker_.launch(run, schedule::make_plan(request, group_.info.topology, group_.info.limits()));
  for (auto& [part, payload] : parts) {
    if (run.is_done) return;
    deliver(run, part, std::move(payload));
  }
}

void PointToPoint::move_own(OperationRun& send, OperationRun& receive) {
  const std::uint64_t bytes = send.input.bytes();
  if (bytes != receive.output.bytes()) {
    const core::Status mismatch(core::Code::kMismatch, other_size(receive, bytes));
    worker_.finish(receive, mismatch);
    worker_.finish(send, mismatch);
    return;
  }
  receive.signature.total_bytes = bytes;
  std::byte* const to = receive.output.contiguous(0, bytes);
  // In point to point, input and output are one piece each. Both may be the same memory.
  if (bytes > 0 && to != send.input.contiguous(0, bytes)) send.input.read(0, bytes, to);
  for (OperationRun* run : {&receive, &send}) {
    ++run->pending;
    worker_.part_done(*run);
  }
}

std::string PointToPoint::other_size(const OperationRun& receive, std::uint64_t sent) const {
  return "rank " + std::to_string(receive.operation.peer) + " sent " + std::to_string(sent) + " bytes with tag " +
         std::to_string(receive.operation.tag) + ", rank " + std::to_string(group_.info.topology.rank()) + " expects " +
         std::to_string(receive.output.bytes()) + "; both sides must give the same size";
}

bool PointToPoint::is_own(int rank) const noexcept { return rank == group_.info.topology.rank(); }

bool PointToPoint::has_unacknowledged() const noexcept {
  return std::any_of(sends_.begin(), sends_.end(), [&](const auto& send) { return !is_own(send.first.peer); });
}

std::unique_ptr<OperationRun> PointToPoint::remove(OperationRun& run) {
  const Operation& o = run.operation;
  const Key key{o.peer, o.tag, run.sequence};
  if (o.sending) {
    const auto sent = sends_.find(key);
    if (!core::check(sent != sends_.end() && sent->second.get() == &run, "a send that ends was under way"))
      return nullptr;
    if (is_own(o.peer)) unmatched_.erase(key);
    return std::move(sends_.extract(sent).mapped());
  }
  if (auto posted = posted_.extract({o.tag, o.peer, run.issued}); !posted.empty()) return std::move(posted.mapped());
  const auto matched = matched_.find(key);
  if (!core::check(matched != matched_.end() && matched->second.run.get() == &run, "a receive that ends was posted"))
    return nullptr;
  over_[static_cast<std::size_t>(key.peer)].add(key.number);
  return std::move(matched_.extract(matched).mapped().run);
}

void PointToPoint::drop_unmatched() {
  unmatched_.clear();
  kept_ = 0;
}

std::vector<OperationRun*> PointToPoint::active() const {
  std::vector<OperationRun*> runs;
  for (const auto& [key, run] : sends_) runs.push_back(run.get());
  for (const auto& [key, run] : posted_) runs.push_back(run.get());
  for (const auto& [key, matched] : matched_) runs.push_back(matched.run.get());
  return runs;
}

}  // namespace hybridps::worker
