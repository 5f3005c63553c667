#include "hybridps/worker/point_to_point.h"

#include <algorithm>
#include <string>
#include <utility>

#include "hybridps/worker/worker.h"

namespace hybridps::worker {

PointToPoint::PointToPoint(Worker& worker, GroupState& group) : worker_(worker), group_(group) {}

PointToPoint::~PointToPoint() = default;

void PointToPoint::submit(std::unique_ptr<OperationRun> run) {
  OperationRun& r = *run;
  Operation& o = r.operation;
  r.signature.kind = schedule::Kind::kPointToPoint;
  if (!o.sending) {
    posted_[o.tag].push_back(std::move(run));
    match(o.tag);
    return;
  }
  const Key key{o.peer, o.tag, send_counts_[{o.peer, o.tag}]++};
  r.sequence = key.count;
  r.signature.total_bytes = r.input.bytes();
  sends_[key] = std::move(run);
  schedule::Request request;
  request.kind = schedule::Kind::kPointToPoint;
  request.root = o.peer;
  request.sending = true;
  request.total_bytes = r.input.bytes();
  ++r.pending;  // the receiver's acknowledgement
  worker_.launch(r, schedule::make_plan(request, group_.info.topology, group_.info.limits));
}

void PointToPoint::on_message(const wire::Header& header, flow::Delivery payload) {
  const Key key{static_cast<int>(header.sender_rank), header.tag, header.sequence};
  switch (header.type) {
    case wire::Type::kAck:
    case wire::Type::kGrant:
    case wire::Type::kVerdict: {
      const auto found = sends_.find(key);
      if (found == sends_.end()) return;
      OperationRun& run = *found->second;
      if (header.type == wire::Type::kGrant)
        run.spans.front()->on_grant(header);
      else if (header.type == wire::Type::kAck)
        worker_.part_done(run);
      else
        worker_.finish(run, core::Status(core::Code::kMismatch,
                                         std::string(reinterpret_cast<const char*>(payload.data()), payload.bytes())));
      return;
    }
    case wire::Type::kData:
    case wire::Type::kAnnounce: break;
    default: return;
  }
  auto found = arrivals_.find(key);
  if (found == arrivals_.end()) {
    const auto next = next_match_.find({key.peer, key.tag});
    if (next != next_match_.end() && key.count < next->second) return;  // that message is over
    found = arrivals_.emplace(key, Arrival{}).first;
    found->second.stamp = ++stamps_;
  }
  Arrival& arrival = found->second;
  if (header.type == wire::Type::kData) {
    if (arrival.chunks.insert(header.chunk).second) arrival.bytes += payload.bytes();
    if (arrival.bytes >= header.span_bytes && !std::exchange(arrival.acknowledged, true)) acknowledge(header);
  }
  if (arrival.run != nullptr) {
    SpanRun& span = *arrival.run->spans.front();
    if (header.type == wire::Type::kData)
      span.on_data(header, std::move(payload));
    else
      span.on_announce(header);
    return;
  }
  if (!worker_.can_keep(group_, kept_, header)) return;
  ++kept_;
  arrival.messages.emplace_back(header, std::move(payload));
  match(header.tag);
}

void PointToPoint::acknowledge(const wire::Header& header) {
  wire::Header ack = header;
  ack.type = wire::Type::kAck;
  ack.flags = wire::kFlagP2p;
  ack.sender_rank = static_cast<std::uint32_t>(group_.info.topology.rank());
  ack.payload_bytes = 0;
  ack.aux = 0;
  worker_.outbox().send(header.source, ack);
}

void PointToPoint::match(std::uint32_t tag) {
  const auto posted = posted_.find(tag);
  if (posted == posted_.end()) return;
  // Receives in order of issue; each takes the next message, in order of its sender, that it accepts.
  for (std::size_t i = 0; i < posted->second.size();) {
    OperationRun& run = *posted->second[i];
    auto best = arrivals_.end();
    const auto consider = [&](int peer) {
      const auto at = arrivals_.find(Key{peer, tag, next_match_[{peer, tag}]});
      if (at == arrivals_.end() || at->second.run != nullptr) return;
      if (best == arrivals_.end() || at->second.stamp < best->second.stamp) best = at;
    };
    if (run.operation.peer != kAnySource) {
      consider(run.operation.peer);
    } else {
      for (int peer = 0; peer < group_.info.topology.size(); ++peer)
        if (peer != group_.info.topology.rank()) consider(peer);
    }
    if (best == arrivals_.end()) {
      ++i;
      continue;
    }
    ++next_match_[{best->first.peer, tag}];
    std::unique_ptr<OperationRun> owned = std::move(posted->second[i]);
    posted->second.erase(posted->second.begin() + static_cast<std::ptrdiff_t>(i));
    OperationRun& r = *owned;
    bound_[&r] = std::move(owned);
    bind(r, best->first, best->second);
  }
  if (posted->second.empty()) posted_.erase(posted);
}

void PointToPoint::bind(OperationRun& run, const Key& key, Arrival& arrival) {
  run.operation.peer = key.peer;
  run.sequence = key.count;
  arrival.run = &run;
  const wire::Header& first = arrival.messages.front().first;
  if (first.span_bytes != run.output.bytes()) {
    const std::string why = "rank " + std::to_string(key.peer) + " sent " + std::to_string(first.span_bytes) +
                            " bytes with tag " + std::to_string(key.tag) + ", rank " +
                            std::to_string(group_.info.topology.rank()) + " expects " +
                            std::to_string(run.output.bytes()) + "; both sides must give the same size";
    wire::Header verdict = first;
    verdict.type = wire::Type::kVerdict;
    verdict.flags = wire::kFlagP2p;
    verdict.sender_rank = static_cast<std::uint32_t>(group_.info.topology.rank());
    worker_.host().send_control(first.source, verdict, why);
    worker_.finish(run, core::Status(core::Code::kMismatch, why));
    return;
  }
  schedule::Request request;
  request.kind = schedule::Kind::kPointToPoint;
  request.root = key.peer;
  request.sending = false;
  request.total_bytes = run.output.bytes();
  run.signature.total_bytes = run.output.bytes();
  auto messages = std::exchange(arrival.messages, {});
  kept_ -= messages.size();
  worker_.launch(run, schedule::make_plan(request, group_.info.topology, group_.info.limits));
  for (auto& [header, payload] : messages) {
    if (run.over) return;
    SpanRun& span = *run.spans.front();
    if (header.type == wire::Type::kData)
      span.on_data(header, std::move(payload));
    else
      span.on_announce(header);
  }
}

std::unique_ptr<OperationRun> PointToPoint::remove(OperationRun& run) {
  const Operation& o = run.operation;
  if (o.sending) {
    const auto found = sends_.find(Key{o.peer, o.tag, run.sequence});
    if (found == sends_.end() || found->second.get() != &run) return nullptr;
    auto owned = std::move(found->second);
    sends_.erase(found);
    return owned;
  }
  if (const auto found = bound_.find(&run); found != bound_.end()) {
    auto owned = std::move(found->second);
    bound_.erase(found);
    if (const auto arrival = arrivals_.find(Key{o.peer, o.tag, run.sequence}); arrival != arrivals_.end()) {
      kept_ -= arrival->second.messages.size();
      arrivals_.erase(arrival);
    }
    return owned;
  }
  if (const auto posted = posted_.find(o.tag); posted != posted_.end()) {
    for (auto at = posted->second.begin(); at != posted->second.end(); ++at) {
      if (at->get() != &run) continue;
      auto owned = std::move(*at);
      posted->second.erase(at);
      if (posted->second.empty()) posted_.erase(posted);
      return owned;
    }
  }
  return nullptr;
}

std::vector<OperationRun*> PointToPoint::active() const {
  std::vector<OperationRun*> runs;
  for (const auto& [key, run] : sends_) runs.push_back(run.get());
  for (const auto& [tag, posted] : posted_)
    for (const auto& run : posted) runs.push_back(run.get());
  for (const auto& [pointer, run] : bound_) runs.push_back(pointer);
  return runs;
}

}  // namespace hybridps::worker
