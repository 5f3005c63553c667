#include "hybridps/worker/worker.h"

#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"

namespace hybridps::worker {
namespace {

// An operation that has not finished by then asks the others what they are doing: the answer names mismatches and
// absent ranks. Nothing is sent for operations that finish sooner.
constexpr auto kProbeAfter = std::chrono::milliseconds(250);
constexpr auto kAnswerWithin = std::chrono::milliseconds(100);
constexpr auto kProbeAgainAfter = std::chrono::seconds(5);
constexpr std::size_t kSignaturesKept = 256;
// Chunks of the largest span that may be on the way beyond the pace of the slowest.
constexpr std::uint32_t kPaceChunks = 8;
constexpr auto kWatchEvery = std::chrono::milliseconds(100);

// Ranks that are described in full in one message.
constexpr std::size_t kDescribedMax = 3;

std::string seconds_text(core::Duration duration) { return core::format_seconds(core::to_seconds(duration)); }

// Without the name of the operation: "sum of fp32[1024], 4096 bytes".
std::string arguments_text(const wire::Signature& signature) {
  std::string text = wire::describe(signature).substr(schedule::name_of(signature.kind).size());
  for (const std::string_view lead : {",", " ", "of "})
    if (text.starts_with(lead)) text.erase(0, lead.size());
  return text;
}

std::string_view what_to_do(core::Code code) {
  switch (code) {
    case core::Code::kPeerDead:
      return "see that process's own log for why it ended; if it still runs, whether it is stopped or its network cut";
    case core::Code::kTimeout:
      return "see whether the missing ranks are alive and issue the same operations, or pass a longer timeout";
    case core::Code::kMismatch:
      return "every rank must issue the same operations of a group in the same order with the same sizes";
    default: return {};
  }
}

// Where it matters how far the operation had come, and who is missing.
bool has_culprit(core::Code code) { return code == core::Code::kPeerDead || code == core::Code::kTimeout; }

std::string with_advice(std::string text, core::Code code) {
  if (const std::string_view advice = what_to_do(code); !advice.empty()) text += ". What to do: " + std::string(advice);
  return text;
}

bool is_barrier(schedule::Kind kind) { return kind == schedule::Kind::kBarrier || kind == schedule::Kind::kGoodbye; }

std::uint64_t sum(const std::vector<std::uint64_t>& values) {
  std::uint64_t total = 0;
  for (const std::uint64_t value : values) total += value;
  return total;
}

wire::Signature signature_of(const Operation& operation, const Pieces& input, const Pieces& output) {
  wire::Signature s;
  s.kind = operation.kind;
  s.dtype = operation.dtype;
  s.op = operation.op;
  s.root = operation.root;
  switch (operation.kind) {
    case schedule::Kind::kAllReduce:
    case schedule::Kind::kBroadcast: s.total_bytes = output.bytes(); break;
    case schedule::Kind::kReduce: s.total_bytes = input.bytes(); break;
    case schedule::Kind::kAllGather: s.total_bytes = sum(operation.output_bytes); break;
    case schedule::Kind::kReduceScatter: s.total_bytes = sum(operation.input_bytes); break;
    default: break;
  }
  return s;
}

}  // namespace

std::string GroupInfo::member_text(int member) const {
  const std::string& host = hosts[static_cast<std::size_t>(member)];
  return topology.is_dedicated(member) ? "the dedicated server " + host
                                       : "rank " + std::to_string(member) + " (" + host + ")";
}

void SequenceWindow::add(std::uint64_t sequence) {
  if (sequence < floor_) return;
  above_.insert(sequence);
  while (above_.erase(floor_) > 0) ++floor_;
}

SpanRun* OperationRun::find(std::uint32_t span) {
  for (const auto& run : spans)
    if (run->plan().id == span) return run.get();
  return nullptr;
}

void OperationRun::on_sum(std::uint32_t span, std::uint32_t chunk) {
  if (SpanRun* run = over ? nullptr : find(span)) run->on_sum(chunk);
}

void OperationRun::on_granted(std::uint32_t span, std::uint32_t chunk) {
  if (SpanRun* run = over ? nullptr : find(span)) run->on_node_permit(chunk, /*budgeted=*/true);
}

Worker::Worker(flow::Outbox& outbox, server::Server& server, Host& host, WorkerOptions options)
    : outbox_(outbox), server_(server), host_(host), options_(options) {}

Worker::~Worker() {
  while (!groups_.empty()) close_group(groups_.begin()->first);
  graveyard_.clear();
}

GroupState& Worker::open_group(GroupInfo info) {
  const core::GroupUid uid = info.uid;
  auto state = std::make_unique<GroupState>(std::move(info));
  state->p2p = std::make_unique<PointToPoint>(*this, *state);
  state->plans = std::make_unique<PlanChanges>(*this, *state, options_.find_rates);
  state->heard.assign(state->info.engines.size(), 0);
  return *(groups_[uid] = std::move(state));
}

GroupState* Worker::find(core::GroupUid uid) {
  const auto found = groups_.find(uid);
  return found == groups_.end() ? nullptr : found->second.get();
}

void Worker::close_group(core::GroupUid uid) {
  const auto found = groups_.find(uid);
  if (found == groups_.end()) return;
  GroupState& group = *found->second;
  group.leaving = true;  // nobody else's business
  fail_group(group, core::Status(core::Code::kAborted, "the group was destroyed while the operation was pending"),
             /*tell=*/false);
  server_.close_group(uid);
  graveyard_.clear();  // runs refer to their group
  groups_.erase(found);
}

std::string Worker::describe(const OperationRun& run) const {
  const GroupInfo& info = run.group.info;
  const int me = info.topology.rank();
  std::string text = "hybridps[rank " + std::to_string(me) + "/" + std::to_string(info.topology.size()) + " " +
                     info.hosts[static_cast<std::size_t>(me)] + " group \"" + info.name + "\"]: ";
  if (run.operation.kind == schedule::Kind::kPointToPoint) {
    text += run.operation.sending ? "send of " : "recv of ";
    text += std::to_string(run.operation.sending ? run.input.bytes() : run.output.bytes()) + " bytes ";
    text += run.operation.sending ? "to rank " : "from ";
    text += run.operation.peer < 0 ? "any rank"
                                   : (run.operation.sending ? "" : "rank ") + std::to_string(run.operation.peer);
    text += ", tag " + std::to_string(run.operation.tag);
  } else {
    text += std::string(schedule::name_of(run.operation.kind)) + " seq " + std::to_string(run.sequence);
    if (const std::string arguments = arguments_text(run.signature); !arguments.empty()) text += " (" + arguments + ")";
  }
  return text;
}

void Worker::reserve(GroupState& group, std::uint64_t sequence) {
  group.submitted = std::max(group.submitted, sequence + 1);
  group.reserved.insert(sequence);
}

bool Worker::is_oldest(const GroupState& group, std::uint64_t sequence) const {
  return group.running.begin()->first == sequence && (group.reserved.empty() || *group.reserved.begin() > sequence);
}

void Worker::submit(GroupState& group, Operation operation, std::uint64_t sequence, Completion done) {
  auto run = std::make_unique<OperationRun>(group, std::move(operation), sequence, std::move(done));
  Operation& o = run->operation;
  run->output = Pieces(std::move(o.output));
  if (o.kind == schedule::Kind::kAllReduce)
    run->input = run->output;
  else
    run->input = Pieces(std::move(o.input));
  run->submitted_at = o.issued_at != core::TimePoint{} ? o.issued_at : core::Clock::now();
  run->probed_at = run->warned_at = run->submitted_at;
  run->deadline = o.timeout.count() > 0 ? core::Deadline::after(o.timeout, run->submitted_at) : core::Deadline::never();
  ++active_;

  if (o.kind == schedule::Kind::kPointToPoint) {
    if (!group.status.is_ok()) {
      OperationRun& failed = *run;
      graveyard_.push_back(std::move(run));
      finish(failed, group.status);
      return;
    }
    track(*run);
    group.p2p->submit(std::move(run));
    return;
  }
  run->signature = signature_of(o, run->input, run->output);
  if (o.kind == schedule::Kind::kGoodbye) group.leaving = true;
  group.submitted = std::max(group.submitted, sequence + 1);
  group.reserved.erase(sequence);
  OperationRun& r = *run;
  group.running[sequence] = std::move(run);
  track(r);
  if (!group.status.is_ok()) {
    finish(r, group.status);
    return;
  }
  if (const auto verdict = group.verdicts.find(sequence); verdict != group.verdicts.end()) {
    const core::Status status = verdict->second;
    group.verdicts.erase(verdict);
    finish(r, status);
    return;
  }
  // A barrier speaks for all that its rank did before it.
  if (is_barrier(o.kind) && !is_oldest(group, sequence))
    group.held.insert(sequence);
  else if (group.plans->is_frozen() && !is_barrier(o.kind))
    group.plans->hold(sequence);
  else
    start(r);
}

void Worker::start_unfrozen(GroupState& group, std::uint64_t sequence) {
  if (const auto found = group.running.find(sequence); found != group.running.end()) start(*found->second);
}

void Worker::submit_failed(GroupState& group, Operation operation, std::uint64_t sequence, const core::Status& cause) {
  if (group.status.is_ok()) {
    wire::Header header;
    header.type = wire::Type::kVerdict;
    header.sequence = sequence;
    header.aux = static_cast<std::uint64_t>(cause.code());
    tell_members(group, header, cause.message());
    group.verdicts.emplace(sequence, cause);
  }
  submit(group, std::move(operation), sequence, {});
}

void Worker::track(OperationRun& run) {
  tracked_.insert(&run);
  if (!run.deadline.is_never()) deadlines_.emplace(run.deadline.point(), &run);
}

void Worker::start(OperationRun& run) {
  GroupState& group = run.group;
  const Operation& o = run.operation;
  schedule::Request request;
  request.kind = o.kind;
  request.dtype = o.dtype;
  request.root = o.root;
  request.sequence = run.sequence;
  request.total_bytes = run.signature.total_bytes;
  request.input_bytes = o.input_bytes;
  request.output_bytes = o.output_bytes;
  const auto me = static_cast<std::size_t>(group.info.topology.rank());
  if (request.input_bytes.empty()) {
    request.input_bytes.resize(static_cast<std::size_t>(group.info.topology.size()), 0);
    request.input_bytes[me] = run.input.bytes();
  }
  if (request.output_bytes.empty()) {
    request.output_bytes.resize(static_cast<std::size_t>(group.info.topology.size()), 0);
    request.output_bytes[me] = run.output.bytes();
  }
  // A barrier has no shares, and may start much later than it was submitted: it belongs to no version.
  const Binding* binding = is_barrier(o.kind) ? nullptr : &group.plans->binding_of(run.sequence);
  if (binding != nullptr) {
    run.plan_version = binding->version;
    group.plans->on_started(run);
  }
  launch(run,
         schedule::make_plan(request, binding != nullptr ? binding->topology : group.info.topology, group.info.limits));
  if (run.over || !run.started) return;
  if (auto early = group.early.find(run.sequence); early != group.early.end()) {
    auto messages = std::move(early->second);
    group.early.erase(early);
    for (auto& [header, payload] : messages) {
      if (run.over) break;
      dispatch(run, header, std::move(payload));
    }
  }
}

void Worker::launch(OperationRun& run, const std::vector<schedule::Span>& plan) {
  const schedule::Topology& topology = run.group.info.topology;
  run.started = true;
  run.local_seen.assign(topology.ranks_of(topology.my_node()).size(), 0);
  for (const schedule::Span& span : plan) run.spans.push_back(std::make_unique<SpanRun>(*this, run, span));
  ++run.pending;  // so that the first span cannot finish the operation
  std::size_t paced = 0;
  std::uint32_t chunks = 1;
  for (const auto& span : run.spans) {
    if (!span->is_paced()) continue;
    ++paced;
    chunks = std::max(chunks, span->plan().chunks);
  }
  if (paced > 1) run.pace_ahead = std::min(1.0, static_cast<double>(kPaceChunks) / chunks);
  bool started = true;
  for (std::size_t i = 0; i < run.spans.size() && started; ++i) started = run.spans[i]->start();
  if (started) {
    pace(run);
  } else {
    // It is about to fail, with the next judge(). Not all spans have streams: no message may reach them.
    run.started = false;
    run.pace_ahead = 1.0;
  }
  part_done(run);
}

// Owners of large and of small shares should all get their last chunk at the same time: then every card is busy to the
// end. Left alone, connections share a card by the connection, and small shares are through early.
void Worker::pace(OperationRun& run) {
  double slowest = 1.0;
  for (const auto& span : run.spans)
    if (span->is_paced()) slowest = std::min(slowest, span->part_pushed());
  for (std::size_t i = 0; i < run.spans.size() && !run.over; ++i)
    if (run.spans[i]->is_paced()) run.spans[i]->push_up_to(slowest + run.pace_ahead);
}

void Worker::pace_soon(OperationRun& run) {
  if (run.pace_ahead >= 1.0 || std::exchange(run.pace_due, true)) return;
  pacing_.push_back(&run);
}

void Worker::part_done(OperationRun& run) {
  assert(run.pending > 0 || run.over);
  if (run.over || --run.pending > 0) return;
  finish(run, core::Status::ok(),
         run.operation.kind == schedule::Kind::kPointToPoint && !run.operation.sending ? run.operation.peer : -1);
}

void Worker::finish(OperationRun& run, core::Status status, int source_rank) {
  if (run.over) return;
  run.over = true;
  GroupState& group = run.group;
  const bool p2p = run.operation.kind == schedule::Kind::kPointToPoint;
  if (!status.is_ok())
    status = core::Status(
        status.code(),
        with_advice(describe(run) + " failed after " + seconds_text(core::Clock::now() - run.submitted_at) + ": " +
                        std::string(status.message()) + (has_culprit(status.code()) ? standing(run) : std::string()),
                    status.code()));
  for (const auto& span : run.spans) span->cancel();
  tracked_.erase(&run);
  if (run.pace_due) std::erase(pacing_, &run);
  if (!run.deadline.is_never()) deadlines_.erase({run.deadline.point(), &run});
  if (!p2p) {
    group.plans->on_finished(run);
    server_.close(server::OperationKey{group.info.uid, run.sequence});
    group.over.add(run.sequence);
    if (group.signatures_over.empty()) group.signatures_over.resize(kSignaturesKept, {~std::uint64_t{0}, {}});
    group.signatures_over[run.sequence % kSignaturesKept] = {run.sequence, run.signature};
    group.early.erase(run.sequence);
    group.held.erase(run.sequence);
  }
  ++finished_count_;
  --active_;
  Outcome outcome{std::move(status), source_rank};
  if (run.done) run.done(outcome);
  if (p2p) {
    if (auto owned = group.p2p->remove(run)) graveyard_.push_back(std::move(owned));
  } else if (auto found = group.running.find(run.sequence); found != group.running.end()) {
    graveyard_.push_back(std::move(found->second));
    group.running.erase(found);
  }
}

void Worker::start_held(GroupState& group) {
  while (!group.held.empty() && group.status.is_ok() && is_oldest(group, *group.held.begin())) {
    OperationRun& run = *group.running.begin()->second;
    group.held.erase(group.held.begin());
    start(run);
  }
}

void Worker::on_early(GroupState& group, const wire::Header& header, flow::Delivery payload) {
  if (header.type == wire::Type::kGrant) return;  // for an operation that never started here: nothing to send
  group.early[header.sequence].emplace_back(header, std::move(payload));
}

void Worker::see_local(OperationRun& run, const wire::Header& header) {
  // A grant is of this stage too, but goes the other way: its contributor names nobody.
  if (header.type == wire::Type::kGrant || header.stage != wire::Stage::kLocalPush ||
      header.contributor >= run.local_seen.size())
    return;
  if (std::exchange(run.local_seen[header.contributor], 1) != 0) return;
  if (++run.local_seen_count + 1 < run.local_seen.size()) return;
  for (const auto& span : run.spans) {
    span->on_local_seen();
    if (run.over) return;
  }
}

void Worker::on_message(GroupState& group, const wire::Header& header, flow::Delivery payload) {
  handle(group, header, std::move(payload));
  judge();  // at once: the next message may complete what must not
}

std::size_t Worker::judge() {
  std::size_t work = 0;
  for (auto failing = std::exchange(failing_, {}); auto& [uid, status] : failing) {
    ++work;
    if (GroupState* group = find(uid)) fail_group(*group, status, /*tell=*/true);
  }
  return work;
}

void Worker::handle(GroupState& group, const wire::Header& header, flow::Delivery payload) {
  if (header.sender_rank >= group.info.engines.size() || group.info.engines[header.sender_rank] != header.source) {
    core::log_warn("dropped a message that claims to be from rank ", header.sender_rank, " of group \"",
                   group.info.name, "\" but is not");
    return;
  }
  std::uint64_t& heard = group.heard[header.sender_rank];
  if ((header.flags & wire::kFlagP2p) != 0) {
    if (group.status.is_ok()) group.p2p->on_message(header, std::move(payload));
  } else {
    switch (header.type) {
      case wire::Type::kVerdict: on_verdict(group, header, payload); break;
      case wire::Type::kProbe: on_probe(group, header); break;
      case wire::Type::kProbeReply: {
        const auto found = group.running.find(header.sequence);
        if (found != group.running.end())
          found->second->replies[static_cast<int>(header.sender_rank)] = {header.aux, header.span_bytes,
                                                                          header.signature};
        break;
      }
      case wire::Type::kData:
      case wire::Type::kAnnounce:
      case wire::Type::kGrant: {
        if (!group.status.is_ok()) break;
        if (header.sequence >= heard) heard = header.sequence + 1;
        if (group.over.contains(header.sequence)) {
          contradicts_finished(group, header);
          break;
        }
        const auto found = group.running.find(header.sequence);
        const bool known = found != group.running.end();
        if (known && header.signature != found->second->signature) {
          mismatch(group, *found->second, header);
          break;
        }
        const schedule::Kind kind = header.signature.kind;
        const bool to_server = header.stage == wire::Stage::kPush && header.type != wire::Type::kGrant &&
                               kind != schedule::Kind::kBroadcast;
        if (to_server) {
          if (header.type == wire::Type::kData)
            server_.on_push(header, std::move(payload));
          else
            server_.on_announce(header);
        } else if (known && found->second->started) {
          dispatch(*found->second, header, std::move(payload));
        } else {
          on_early(group, header, std::move(payload));
        }
        break;
      }
      case wire::Type::kEcho:
      case wire::Type::kEchoBack:
      case wire::Type::kRates:
      case wire::Type::kPlanAsk:
      case wire::Type::kPlanAnswer:
      case wire::Type::kPlanSwitch:
        if (group.status.is_ok()) group.plans->on_message(header, payload);
        break;
      default: break;
    }
  }
}

void Worker::dispatch(OperationRun& run, const wire::Header& header, flow::Delivery payload) {
  if (header.signature != run.signature) {
    mismatch(run.group, run, header);
    return;
  }
  SpanRun* span = run.find(header.span);
  if (header.plan_version != run.plan_version && header.type != wire::Type::kGrant) {
    on_bad_message(server::OperationKey{run.group.info.uid, run.sequence},
                   "a message of rank " + std::to_string(header.sender_rank) + " under plan version " +
                       std::to_string(header.plan_version) + " instead of " + std::to_string(run.plan_version));
    return;
  }
  if (span == nullptr) {
    on_bad_message(server::OperationKey{run.group.info.uid, run.sequence},
                   "a message of rank " + std::to_string(header.sender_rank) + " for span " +
                       std::to_string(header.span) + " that this rank has no part in");
    return;
  }
  see_local(run, header);
  if (run.over) return;
  switch (header.type) {
    case wire::Type::kData: span->on_data(header, std::move(payload)); break;
    case wire::Type::kAnnounce: span->on_announce(header); break;
    case wire::Type::kGrant: span->on_grant(header); break;
    default: break;
  }
}

void Worker::tell_members(GroupState& group, wire::Header header, std::string_view text) {
  header.uid = group.info.uid;
  header.incarnation = group.info.incarnation;
  header.sender_rank = static_cast<std::uint32_t>(group.info.topology.rank());
  // Dedicated servers hear of failures only: they have no calls of their own to compare.
  const auto members = header.type == wire::Type::kVerdict ? group.info.engines.size()
                                                           : static_cast<std::size_t>(group.info.topology.size());
  for (std::size_t member = 0; member < members; ++member)
    if (member != static_cast<std::size_t>(group.info.topology.rank()))
      host_.send_control(group.info.engines[member], header, text);
}

void Worker::fail(OperationRun& run, core::Status cause) {
  if (run.over) return;
  GroupState& group = run.group;
  if (run.operation.kind != schedule::Kind::kPointToPoint && run.operation.kind != schedule::Kind::kGoodbye) {
    cause = core::Status(cause.code(), std::string(cause.message()) + " (found by rank " +
                                           std::to_string(group.info.topology.rank()) + ")");
    wire::Header header;
    header.type = wire::Type::kVerdict;
    header.sequence = run.sequence;
    header.signature = run.signature;
    header.aux = static_cast<std::uint64_t>(cause.code());
    tell_members(group, header, cause.message());
  }
  finish(run, std::move(cause));
}

void Worker::fail_group(GroupState& group, const core::Status& cause, bool tell) {
  if (!group.status.is_ok()) return;
  group.status = cause;
  group.failed_at = core::Clock::now();
  wire::Header header;
  header.type = wire::Type::kVerdict;
  header.flags = wire::kFlagGroup;
  header.aux = static_cast<std::uint64_t>(cause.code());
  if (tell) tell_members(group, header, cause.message());
  // Once more on the connections that carry data: there it comes before the end of this process, if that is next, so
  // that nobody takes us for the cause.
  header.uid = group.info.uid;
  header.flags |= wire::kFlagForwarded;
  header.sender_rank = static_cast<std::uint32_t>(group.info.topology.rank());
  if (!tell && cause.code() != core::Code::kClosed && !group.leaving)
    for (const core::EngineId engine : group.info.engines)
      if (outbox_.is_open(engine)) outbox_.send_text(engine, header, cause.message());
  while (!group.running.empty()) finish(*group.running.begin()->second, cause);
  for (OperationRun* run : group.p2p->active()) finish(*run, cause);
  group.early.clear();
  server_.close_group(group.info.uid);
  host_.on_group_failed(
      group.info.uid,
      core::Status(cause.code(), with_advice("the group has failed: " + std::string(cause.message()), cause.code())),
      cause, /*found_here=*/tell);
}

void Worker::repeat_verdict(const GroupState& group, core::EngineId to) {
  wire::Header header;
  header.type = wire::Type::kVerdict;
  header.flags = wire::kFlagGroup;
  header.aux = static_cast<std::uint64_t>(group.status.code());
  header.uid = group.info.uid;
  header.incarnation = group.info.incarnation;
  header.sender_rank = static_cast<std::uint32_t>(group.info.topology.rank());
  host_.send_control(to, header, group.status.message());
}

void Worker::mismatch(GroupState& group, OperationRun& run, const wire::Header& theirs) {
  on_mismatch(server::OperationKey{group.info.uid, run.sequence}, run.signature, group.info.topology.rank(),
              theirs.signature, static_cast<int>(theirs.sender_rank));
}

void Worker::on_mismatch(const server::OperationKey& key, const wire::Signature& ours, int our_rank,
                         const wire::Signature& theirs, int sender_rank) {
  const GroupState* group = find(key.uid);
  if (group == nullptr) return;
  const GroupInfo& info = group->info;
  std::string what;
  if (theirs.kind == schedule::Kind::kGoodbye || ours.kind == schedule::Kind::kGoodbye) {
    const bool they = theirs.kind == schedule::Kind::kGoodbye;
    const int gone = they ? sender_rank : our_rank;
    const int waiting = they ? our_rank : sender_rank;
    what = info.member_text(gone) + " has destroyed the group after " + std::to_string(key.sequence) +
           " operations while " + info.member_text(waiting) + " is in operation " + std::to_string(key.sequence) +
           ", " + wire::describe(they ? ours : theirs);
  } else {
    what = "ranks disagree about operation " + std::to_string(key.sequence) + ": " + info.member_text(our_rank) +
           " called " + wire::describe(ours) + ", " + info.member_text(sender_rank) + " called " +
           wire::describe(theirs);
    if (ours == theirs) what += " with other sizes per rank";
  }
  // Not at once: this is called from inside the server's and the runs' own loops.
  failing_.emplace_back(key.uid, core::Status(core::Code::kMismatch, std::move(what)));
}

void Worker::on_bad_message(const server::OperationKey& key, std::string what) {
  failing_.emplace_back(
      key.uid, core::Status(core::Code::kMismatch, "operation " + std::to_string(key.sequence) + " received " + what));
}

void Worker::on_verdict(GroupState& group, const wire::Header& header, const flow::Delivery& payload) {
  std::string text(reinterpret_cast<const char*>(payload.data()), payload.bytes());
  if (text.empty()) text = "rank " + std::to_string(header.sender_rank) + " reported a failure";
  const auto code = header.aux > 0 && header.aux <= static_cast<std::uint64_t>(core::Code::kInternal)
                        ? static_cast<core::Code>(header.aux)
                        : core::Code::kInternal;
  const core::Status status(code, std::move(text));
  if ((header.flags & wire::kFlagGroup) != 0) {
    fail_group(group, status, /*tell=*/false);
    return;
  }
  if (group.over.contains(header.sequence)) return;
  if (const auto found = group.running.find(header.sequence); found != group.running.end())
    finish(*found->second, status);
  else
    group.verdicts.emplace(header.sequence, status);
}

void Worker::probe(OperationRun& run, core::TimePoint now) {
  run.probed_at = now;
  wire::Header header;
  header.type = wire::Type::kProbe;
  header.sequence = run.sequence;
  header.signature = run.signature;
  header.aux = run.group.submitted;
  tell_members(run.group, header, {});
}

bool Worker::contradicts_finished(GroupState& group, const wire::Header& header) {
  if (group.signatures_over.empty()) return false;
  const auto& [sequence, signature] = group.signatures_over[header.sequence % kSignaturesKept];
  if (sequence != header.sequence || signature == header.signature) return false;
  on_mismatch(server::OperationKey{group.info.uid, header.sequence}, signature, group.info.topology.rank(),
              header.signature, static_cast<int>(header.sender_rank));
  return true;
}

void Worker::on_probe(GroupState& group, const wire::Header& header) {
  if (contradicts_finished(group, header)) return;
  if (const auto found = group.running.find(header.sequence);
      found != group.running.end() && found->second->signature != header.signature) {
    mismatch(group, *found->second, header);
    return;
  }
  wire::Header reply;
  reply.type = wire::Type::kProbeReply;
  reply.uid = group.info.uid;
  reply.incarnation = group.info.incarnation;
  reply.sequence = header.sequence;
  reply.sender_rank = static_cast<std::uint32_t>(group.info.topology.rank());
  reply.aux = group.submitted;
  reply.span_bytes = group.over.floor();
  if (!group.running.empty())
    reply.signature = group.running.begin()->second->signature;
  else if (!group.signatures_over.empty() && group.over.floor() > 0)
    reply.signature = group.signatures_over[(group.over.floor() - 1) % kSignaturesKept].second;
  host_.send_control(header.source, reply, {});
}

std::vector<int> Worker::missing_ranks(const OperationRun& run) const {
  std::vector<int> ranks;
  if (run.operation.kind == schedule::Kind::kPointToPoint) {
    if (run.operation.peer >= 0) ranks.push_back(run.operation.peer);
    return ranks;
  }
  const bool asked = run.probed_at != run.submitted_at;
  if (!asked || (run.replies.empty() && core::Clock::now() - run.probed_at < kAnswerWithin)) return ranks;
  // Ranks that have not submitted the operation are the cause; who merely waits for them is not.
  for (int rank = 0; rank < run.group.info.topology.size(); ++rank) {
    if (rank == run.group.info.topology.rank()) continue;
    const auto reply = run.replies.find(rank);
    if (reply == run.replies.end() || reply->second.submitted <= run.sequence) ranks.push_back(rank);
  }
  if (!ranks.empty()) return ranks;
  for (const auto& span : run.spans) span->missing(ranks);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// "rank 2 (host5 pid 880) was last seen finishing seq 16, barrier".
std::string Worker::last_known(const OperationRun& run, int rank) const {
  const GroupState& group = run.group;
  std::string text = group.info.member_text(rank);
  if (group.info.topology.is_dedicated(rank)) return text;
  const auto found = run.replies.find(rank);
  if (found == run.replies.end()) {
    const std::uint64_t heard = group.heard[static_cast<std::size_t>(rank)];
    return text + (heard > 0 ? " was last heard in seq " + std::to_string(heard - 1) : " was not heard yet");
  }
  const OperationRun::Reply& reply = found->second;
  if (reply.submitted == 0) return text + " has not issued an operation of this group";
  if (reply.finished >= reply.submitted)
    return text + " was last seen finishing seq " + std::to_string(reply.submitted - 1) + ", " +
           wire::describe(reply.last);
  return text + " is in seq " + std::to_string(reply.finished) + ", " + wire::describe(reply.last);
}

// Where a failed operation stood, as far as this rank knows.
std::string Worker::standing(const OperationRun& run) const {
  if (!run.started || run.operation.kind == schedule::Kind::kPointToPoint) return {};
  std::vector<int> waiting{run.group.info.topology.rank()};
  for (const auto& [rank, reply] : run.replies)
    if (reply.submitted > run.sequence && reply.finished <= run.sequence) waiting.push_back(rank);
  std::sort(waiting.begin(), waiting.end());
  std::string text;
  if (const std::vector<int> missing = missing_ranks(run); !missing.empty()) {
    text += "; waiting " + core::format_ranks(waiting) + ", missing " + core::format_ranks(missing);
    for (std::size_t i = 0; i < std::min(missing.size(), kDescribedMax); ++i)
      text += (i == 0 ? ": " : ", ") + last_known(run, missing[i]);
  }
  std::uint64_t wanted = 0;
  std::uint64_t done = 0;
  for (const auto& span : run.spans) {
    wanted += span->chunks_wanted();
    done += span->chunks_done();
  }
  if (wanted > 0) text += "; " + std::to_string(done) + "/" + std::to_string(wanted) + " chunks done";
  if (const std::string progress = server_.progress_of(server::OperationKey{run.group.info.uid, run.sequence});
      !progress.empty())
    text += ", the " + progress;
  return text;
}

void Worker::expire(OperationRun& run) {
  std::string why = "timed out after " + seconds_text(run.operation.timeout);
  const std::vector<int> missing = missing_ranks(run);
  for (std::size_t i = 0; i < std::min(missing.size(), kDescribedMax); ++i)
    why += (i == 0 ? " without " : ", ") + run.group.info.member_text(missing[i]);
  if (missing.size() > kDescribedMax) why += " and " + std::to_string(missing.size() - kDescribedMax) + " more";
  core::Status status(core::Code::kTimeout, std::move(why));
  if (run.operation.kind == schedule::Kind::kGoodbye)
    finish(run, std::move(status));
  else
    fail(run, std::move(status));
}

void Worker::watch(core::TimePoint now) {
  next_watch_ = now + kWatchEvery;
  const auto is_due = [now](const OperationRun& run) {
    const bool first = run.probed_at == run.submitted_at;
    return now - run.probed_at >= (first ? core::Duration(kProbeAfter) : core::Duration(kProbeAgainAfter));
  };
  std::vector<core::GroupUid> waiting;
  for (const auto& [uid, group] : groups_) {
    if (group->running.empty() || !group->running.begin()->second->started) continue;
    // The oldest operation alone: what the others wait for is behind it.
    OperationRun& run = *group->running.begin()->second;
    if (is_due(run)) {
      if (run.probed_at != run.submitted_at) waiting.push_back(uid);
      probe(run, now);
    }
    if (options_.warn_seconds > 0 && run.operation.kind != schedule::Kind::kGoodbye &&
        now - run.warned_at >= core::from_seconds(options_.warn_seconds)) {
      run.warned_at = now;
      core::log_warn(describe(run), " is not done after ", seconds_text(now - run.submitted_at), standing(run));
    }
  }
  // Does the peer of a send or receive live? It need not have issued its part, so there is nothing else to ask.
  for (OperationRun* run : tracked_) {
    if (run->operation.kind != schedule::Kind::kPointToPoint || run->operation.peer < 0 || !is_due(*run)) continue;
    if (run->probed_at != run->submitted_at) waiting.push_back(run->group.info.uid);
    run->probed_at = now;
    wire::Header ping;
    ping.type = wire::Type::kPing;
    host_.send_control(run->group.info.engines[static_cast<std::size_t>(run->operation.peer)], ping, {});
  }
  for (const core::GroupUid uid : waiting) host_.on_group_waits(uid);
}

std::size_t Worker::tick(core::TimePoint now) {
  std::size_t work = judge();
  while (!pacing_.empty()) {
    OperationRun& run = *pacing_.back();
    pacing_.pop_back();
    run.pace_due = false;
    pace(run);
    ++work;
  }
  for (const auto& [uid, group] : groups_) {
    if (!group->held.empty()) start_held(*group);
    work += group->plans->tick(now);
  }
  while (!deadlines_.empty() && deadlines_.begin()->first <= now) {
    ++work;
    expire(*deadlines_.begin()->second);
  }
  if (now >= next_watch_ && !tracked_.empty()) watch(now);
  if (!graveyard_.empty()) {
    graveyard_.clear();
    ++work;
  }
  return work;
}

core::TimePoint Worker::next_due(core::TimePoint now) const noexcept {
  if (!failing_.empty() || !graveyard_.empty()) return now;
  core::TimePoint due = core::TimePoint::max();
  if (!deadlines_.empty()) due = deadlines_.begin()->first;
  if (!tracked_.empty()) {
    due = std::min(due, std::max(next_watch_, now + kWatchEvery));
    for (const auto& [uid, group] : groups_) due = std::min(due, group->plans->next_due());
  }
  return due;
}

void Worker::on_peer_dead(core::EngineId peer, const core::Status& cause, const std::string& own_fault) {
  std::vector<core::GroupUid> affected;
  for (const auto& [uid, group] : groups_)
    if (std::find(group->info.engines.begin(), group->info.engines.end(), peer) != group->info.engines.end())
      affected.push_back(uid);
  for (const core::GroupUid uid : affected) {
    GroupState& group = *groups_[uid];
    const auto at = std::find(group.info.engines.begin(), group.info.engines.end(), peer);
    const auto rank = static_cast<int>(at - group.info.engines.begin());
    // Who has the answer to its goodbye may go before we have ours: that is no failure to tell anyone about.
    const bool only_goodbye =
        group.leaving &&
        (group.running.empty() || group.running.begin()->second->operation.kind == schedule::Kind::kGoodbye);
    const std::string text = own_fault.empty()
                                 ? group.info.member_text(rank) + " is gone: " + std::string(cause.message())
                                 : group.info.member_text(group.info.topology.rank()) + " " + own_fault;
    fail_group(group, core::Status(core::Code::kPeerDead, text), /*tell=*/!only_goodbye);
  }
}

void Worker::grant_local_when_possible(SpanRun& span, std::uint32_t chunk) {
  if (local_grants_ >= std::max(1U, options_.grant_chunks)) {
    local_grants_waiting_.emplace_back(&span, chunk);
    return;
  }
  ++local_grants_;
  span.grant_local(chunk);
}

void Worker::local_grant_done() {
  assert(local_grants_ > 0);
  --local_grants_;
  if (local_grants_waiting_.empty()) return;
  const auto [span, chunk] = local_grants_waiting_.front();
  local_grants_waiting_.pop_front();
  ++local_grants_;
  span->grant_local(chunk);
}

void Worker::forget_local_grants(SpanRun& span) {
  std::erase_if(local_grants_waiting_, [&](const auto& waiting) { return waiting.first == &span; });
}

}  // namespace hybridps::worker
