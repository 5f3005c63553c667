// The worker's counts of operations, and its part of a job's status report.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "hybridps/core/text.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

// The most pending operations of a group that are written in full.
constexpr std::size_t kPendingTold = 4;
// The most trials of a tuner that are written.
constexpr std::size_t kTriedTold = 8;

/// Bytes through a card per byte of the operation's tensor, at least: the bus factor of nccl-tests (doc/PERFORMANCE.md
/// there).
double bus_factor(schedule::Kind kind, int size) {
  const double n = size;
  switch (kind) {
    case schedule::Kind::kAllReduce: return 2 * (n - 1) / n;
    case schedule::Kind::kReduceScatter:
    case schedule::Kind::kAllGather:
    case schedule::Kind::kAllToAll: return (n - 1) / n;
    case schedule::Kind::kBarrier:
    case schedule::Kind::kGoodbye: return 0;
    default: return 1;
  }
}

std::uint64_t tensor_bytes(const OperationRun& run) {
  return run.signature.total_bytes > 0 ? run.signature.total_bytes : std::max(run.input.bytes(), run.output.bytes());
}

void write_tuner(observe::Json& json, const GroupState& group, const schedule::Tuner& tuner) {
  json.key("tuner").object();
  json.field("resting", tuner.is_resting()).field("trials", tuner.trials()).field("kept", tuner.kept());
  json.key("tried").array();
  const std::size_t count = tuner.tried().size();
  for (std::size_t i = count > kTriedTold ? count - kTriedTold : 0; i < count; ++i) {
    const schedule::Tuner::Tried& tried = tuner.tried()[i];
    json.object().field("what", group.plans->describe(tried)).field("ratio", tried.ratio);
    json.field("pairs", tried.pairs).field("kept", tried.kept).end();
  }
  json.end().end();
}

void write_remembered(observe::Json& json, const GroupState& group) {
  json.key("remembered").object();
  std::uint64_t bytes = 0;
  std::uint64_t tensors = 0;
  std::uint64_t dropped = 0;
  for (const auto* part : {&group.residuals, &group.owed, &group.momenta}) {
    const compress::Residuals::Stats stats = part->stats();
    bytes += stats.bytes;
    tensors += stats.tensors;
    dropped += stats.dropped + stats.refused;
  }
  json.field("tensors", tensors).field("bytes", bytes).field("dropped", dropped).end();
}

}  // namespace

void Worker::count(const OperationRun& run, const core::Status& status) {
  const GroupState& group = run.group;
  const Operation& o = run.operation;
  if (!status.is_ok()) {
    ++counts_.errors[status.code()];
    return;
  }
  OperationCounts::OfKind& of_kind = counts_.of_kind[static_cast<std::size_t>(o.kind)];
  const auto bytes = static_cast<double>(tensor_bytes(run));
  ++of_kind.operations;
  of_kind.bytes += bytes;
  of_kind.bus_bytes += bytes * bus_factor(o.kind, group.info.topology.size());
  of_kind.time += core::Clock::now() - run.submitted_at;
  if (o.kind == schedule::Kind::kPointToPoint || o.kind == schedule::Kind::kGoodbye || run.last_heard < 0) return;
  const core::Duration waited = run.last_heard_at - run.submitted_at;
  if (waited <= core::Duration::zero()) return;
  // A rank that is no owner only hears from owners. Only a probe can tell it which rank an owner has waited for.
  const bool is_owner = std::any_of(run.spans.begin(), run.spans.end(),
                                    [&](const auto& span) { return span->plan().owner == group.info.topology.rank(); });
  const int culprit = is_owner ? run.last_heard : run.blamed;
  counts_.waited_for[culprit < 0 ? core::EngineId{} : group.info.members.engine(culprit)] += waited;
}

void Worker::trace(const OperationRun& run, observe::EventType type, bool failed) {
  observe::Trace* const trace = outbox_.trace();
  if (trace == nullptr) return;
  const std::uint64_t start = observe::trace_ns(run.submitted_at);
  const bool to_one = run.operation.kind == schedule::Kind::kPointToPoint && run.operation.peer >= 0;
  const std::vector<core::EngineId>& engines = run.group.info.members.engines();
  trace->add({start, type == observe::EventType::kCalled ? start : observe::trace_ns(), tensor_bytes(run), run.sequence,
              to_one && run.operation.sending ? 1U : 0U, failed ? 1U : 0U, trace->group(run.group.info.uid),
              to_one ? trace->peer(engines[static_cast<std::size_t>(run.operation.peer)]) : std::uint16_t{0xffff}, type,
              static_cast<std::uint8_t>(run.operation.kind)});
}

void Worker::trace_under_way() {
  for (const OperationRun* run : tracked_) trace(*run, observe::EventType::kCalled, false);
}

core::TimePoint Worker::oldest_since(core::TimePoint now) const noexcept {
  core::TimePoint since = now;
  for (const OperationRun* run : tracked_) since = std::min(since, run->submitted_at);
  return since;
}

void Worker::write_under_way(observe::Json& json, const GroupState& group, core::TimePoint now) const {
  const auto seconds_since = [now](core::TimePoint at) { return std::max(0.0, core::to_seconds(now - at)); };
  json.field("pending_count", group.running.size());
  json.key("pending").array();
  std::size_t told = 0;
  for (const auto& [sequence, run] : group.running) {
    if (++told > kPendingTold) break;
    std::uint64_t wanted = 0;
    std::uint64_t done = 0;
    for (const auto& span : run->spans) {
      if (span->chunks_wanted() == 0) continue;
      wanted += span->chunks_wanted();
      done += span->chunks_done();
    }
    json.object().field("sequence", sequence).field("what", wire::describe(run->signature));
    json.field("seconds", seconds_since(run->submitted_at)).field("started", run->started);
    json.field("plan_version", run->plan_version).field("chunks_done", done).field("chunks", wanted);
    if (std::string sums = server_.progress_of(server::OperationKey{group.info.uid, sequence}); !sums.empty())
      json.field("sums", sums);
    // Dedicated servers that owe a result. They issue no operations, so a missing result is the only sign of a delay.
    json.key("servers_owing").array();
    std::vector<int> owing;
    for (const auto& span : run->spans)
      if (group.info.topology.is_dedicated(span->plan().owner) && span->waits_for_owner())
        owing.push_back(span->plan().owner);
    std::sort(owing.begin(), owing.end());
    owing.erase(std::unique(owing.begin(), owing.end()), owing.end());
    for (const int server : owing) json.value(server);
    json.end().end();
  }
  json.end();

  json.key("messages").array();
  told = 0;
  for (const OperationRun* run : group.p2p->active()) {
    if (++told > kPendingTold) break;
    json.object().field("sending", run->operation.sending).field("peer", run->operation.peer);
    json.field("tag", run->operation.tag).field("bytes", std::max(run->input.bytes(), run->output.bytes()));
    json.field("seconds", seconds_since(run->submitted_at)).end();
  }
  json.end();
}

void Worker::write_status(observe::Json& json, const GroupState& group, core::TimePoint now) const {
  const auto seconds_since = [now](core::TimePoint at) { return std::max(0.0, core::to_seconds(now - at)); };
  const schedule::Topology& topology = group.plans->newest_version().topology;
  json.field("submitted", group.submitted).field("finished", group.over.floor());
  if (group.over.floor() > 0 && !group.signatures_over.empty())
    json.field("last",
               wire::describe(group.signatures_over[(group.over.floor() - 1) % GroupState::kSignaturesKept].second));
  if (group.last_finished_at != core::TimePoint{})
    json.field("since_last_seconds", seconds_since(group.last_finished_at));
  json.field("leaving", group.leaving);
  if (!group.status.is_ok()) json.field("error", group.status.message());

  write_under_way(json, group, now);
  json.field("plan_version", group.plans->newest()).field("changing_plan", group.plans->is_frozen());
  double total = 0;
  std::vector<double> weights;
  for (int node = 0; node < topology.nodes(); ++node) total += weights.emplace_back(topology.weight(node));
  for (int server = 0; server < topology.servers(); ++server)
    total += weights.emplace_back(topology.server_weight(server));
  json.key("shares").array();
  for (const double weight : weights) json.value(total > 0 ? weight / total : 0.0);
  json.end();
  json.key("rates_found").array();
  for (const double rate : group.plans->rates()) json.value(rate);
  json.end();
  if (const schedule::Tuner* const tuner = group.plans->tuner()) write_tuner(json, group, *tuner);
  json.field("early_messages", group.early.size());
  write_remembered(json, group);
}

}  // namespace hybridps::worker
