// Passes each message of a group to its target: a part of the group, an operation, or a role in a span. Sends along the
// group's tree.
#include <algorithm>
#include <string>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

server::RankCall call_of(const wire::From& from, const wire::Signature& signature) {
  return {static_cast<int>(from.sender_rank), signature};
}

}  // namespace

void Worker::send_down(const GroupState& group, const wire::Body& body, std::string_view text) {
  for (const int child : group.plans->tree().children())
    host_.send_control(group.info.members.engine(child), group.message(body), text);
}

void Worker::send_up(const GroupState& group, const wire::Body& body, std::string_view text) {
  host_.send_control(group.info.members.engine(group.plans->tree().parent()), group.message(body), text);
}

void Worker::see_local(OperationRun& run, const wire::ChunkId& chunk) {
  if (chunk.stage != wire::Stage::kLocalPush || chunk.contributor >= run.local_seen.size()) return;
  if (std::exchange(run.local_seen[chunk.contributor], 1) != 0) return;
  if (++run.local_seen_count + 1 < run.local_seen.size()) return;
  for (const auto& span : run.spans) span->on_local_seen();
}

void Worker::on_message(GroupState& group, const wire::Message& message, flow::Delivery payload) {
  const Entry entry(*this);
  handle(group, message, std::move(payload));
}

void Worker::handle(GroupState& group, const wire::Message& message, flow::Delivery payload) {
  if (message.chunk() == nullptr) touch(group);  // data changes nothing but its operation
  const wire::From& from = message.from;
  if (from.sender_rank >= group.info.members.size()) {
    if (group.status.is_ok()) group.newcomers->on_word(message, payload);
    return;
  }
  if (group.info.members.engine(from.sender_rank) != from.source) {
    static core::LogRate rate(core::from_seconds(10));
    if (rate.permit())
      core::log_warn("dropped a message: its sender says that it is rank ", from.sender_rank, " of group \"",
                     group.info.name, "\", but it is another process");
    return;
  }
  const bool works = group.status.is_ok();
  if (group.servers.is_gone(static_cast<int>(from.sender_rank))) {
    return;  // the group goes on without this server, and the server may not know it
  } else if (message.is_point_to_point()) {
    if (works) group.p2p->on_message(message, std::move(payload));
  } else if (const auto* verdict = message.as<wire::Verdict>()) {
    on_verdict(group, from, *verdict, payload);
  } else if (const auto* probe = message.as<wire::Probe>()) {
    on_probe(group, from, *probe, payload);
  } else if (const auto* reply = message.as<wire::ProbeReply>()) {
    on_probe_reply(group, from, *reply, payload);
  } else if (const wire::ChunkId* chunk = message.chunk()) {
    if (works) on_chunk(group, message, *chunk, std::move(payload));
  } else if (message.as<wire::Failover>() != nullptr) {
    if (works) group.lost_servers->on_message(message, std::move(payload));
  } else if (message.as<wire::Join>() != nullptr) {
    if (works) group.newcomers->on_message(message, payload);
  } else if (works) {
    group.plans->on_message(message, payload);
  }
}

void Worker::on_chunk(GroupState& group, const wire::Message& message, const wire::ChunkId& chunk,
                      flow::Delivery payload) {
  const wire::From& from = message.from;
  std::uint64_t& heard = group.heard[from.sender_rank];
  const bool is_news = heard <= chunk.sequence;
  if (is_news) heard = chunk.sequence + 1;
  if (group.over.contains(chunk.sequence)) {
    if (const auto retained = group.retained.find(chunk.sequence);
        retained != group.retained.end() && message.as<wire::Grant>() != nullptr &&
        retained->second->find(chunk.span) != nullptr) {  // a grant for results that the operation serves to others
      dispatch(*retained->second, message, {});
      return;
    }
    contradicts_finished(group, chunk.sequence, call_of(from, chunk.signature));
    return;
  }
  const auto found = group.running.find(chunk.sequence);
  const bool known = found != group.running.end();
  if (known && is_news) {
    found->second->last_heard = static_cast<int>(from.sender_rank);
    found->second->last_heard_at = now_;
  }
  if (known && chunk.signature != found->second->signature) {
    mismatch(*found->second, call_of(from, chunk.signature));
    return;
  }
  const bool is_grant = message.as<wire::Grant>() != nullptr;
  const bool to_server =
      chunk.stage == wire::Stage::kPush && !is_grant &&
      (chunk.signature.kind != schedule::Kind::kBroadcast || chunk.signature.scope == schedule::Scope::kWitness);
  const schedule::Topology& topology = group.info.topology;
  const auto sender = static_cast<int>(from.sender_rank);
  if (to_server &&
      (topology.is_dedicated(sender) || chunk.contributor != static_cast<std::uint32_t>(topology.node_of(sender)))) {
    // It would take the place of the other node's, which would then pass for a duplicate: a wrong sum without a word.
    on_bad_message(server::OperationKey{group.info.uid, chunk.sequence},
                   "a contribution of " + group.info.member_text(sender) + " for node " +
                       std::to_string(chunk.contributor) + ", which is not its own");
    return;
  }
  if (to_server) {
    // Sent to a gateway before the sender knew that the span's owner is lost: nobody waits for it.
    if (SpanRun* const span = known && found->second->started ? found->second->find(chunk.span) : nullptr;
        span != nullptr && chunk.attempt < span->plan().attempt)
      return;
    const std::size_t kept = std::max(group.early.size(), server_.spans_open());
    if (!(known && found->second->started) && !can_keep(group, kept, message)) return;
    if (message.as<wire::Data>() != nullptr)
      server_.on_push(from, chunk, std::move(payload));
    else
      server_.on_announce(from, chunk);
  } else if (known && found->second->started) {
    dispatch(*found->second, message, std::move(payload));
  } else if (!is_grant && can_keep(group, group.early.size(), message)) {  // an early grant has nothing to permit
    group.early.add(message, std::move(payload));
  }
}

void Worker::dispatch(OperationRun& run, const wire::Message& message, flow::Delivery payload) {
  if (const auto* failover = message.as<wire::Failover>()) {
    run.group.lost_servers->on_kept(run, static_cast<int>(message.from.sender_rank), *failover);
    return;
  }
  const wire::ChunkId& chunk = *message.chunk();
  const wire::From& from = message.from;
  if (chunk.signature != run.signature) {
    mismatch(run, call_of(from, chunk.signature));
    return;
  }
  SpanRun* span = run.find(chunk.span);
  const auto* grant = message.as<wire::Grant>();
  if (chunk.plan_version != run.plan_version && grant == nullptr) {
    on_bad_message(server::OperationKey{run.group.info.uid, run.sequence},
                   "a message of rank " + std::to_string(from.sender_rank) + " under plan version " +
                       std::to_string(chunk.plan_version) + " instead of " + std::to_string(run.plan_version));
    return;
  }
  if (span == nullptr) {
    on_bad_message(server::OperationKey{run.group.info.uid, run.sequence},
                   "a message of rank " + std::to_string(from.sender_rank) + " for span " + std::to_string(chunk.span) +
                       " that this rank has no part in");
    return;
  }
  // Messages inside a node do not depend on the owner.
  const bool is_local = chunk.stage == wire::Stage::kLocalPush || chunk.stage == wire::Stage::kLocalResult;
  if (!is_local && chunk.attempt < span->plan().attempt) return;  // sent before the span got its new owner
  if (!is_local && chunk.attempt > span->plan().attempt) {
    on_bad_message(server::OperationKey{run.group.info.uid, run.sequence},
                   "a message of rank " + std::to_string(from.sender_rank) + " of attempt " +
                       std::to_string(chunk.attempt) + " at span " + std::to_string(chunk.span) + ", which is at " +
                       std::to_string(span->plan().attempt));
    return;
  }
  if (grant != nullptr) {  // a grant goes to the sender of data, so its contributor field is not used
    span->on_grant(from.source, *grant);
    return;
  }
  if (!span->may_come_from(static_cast<int>(from.sender_rank), chunk)) {
    const std::string what = chunk.stage == wire::Stage::kLocalPush
                                 ? "a contribution for local rank " + std::to_string(chunk.contributor) + " of "
                                 : "a result of ";
    on_bad_message(server::OperationKey{run.group.info.uid, run.sequence},
                   what + "span " + std::to_string(chunk.span) + " from " +
                       run.group.info.member_text(static_cast<int>(from.sender_rank)) + ", which has none to give");
    return;
  }
  see_local(run, chunk);
  if (const auto* data = message.as<wire::Data>())
    span->on_data(from, *data, std::move(payload));
  else if (const auto* announce = message.as<wire::Announce>())
    span->on_announce(from, *announce);
}

}  // namespace hybridps::worker
