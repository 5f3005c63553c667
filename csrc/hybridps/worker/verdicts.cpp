// The worker's verdicts: which operations and groups fail, which members are told, and the texts about operations that
// fail or wait.
#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

// An operation that is not done after this time sends probes to the other ranks. The answers show mismatches and
// missing ranks. An operation that finishes sooner sends no probe.
constexpr auto kProbeAfter = std::chrono::milliseconds(250);
constexpr auto kProbeAgainAfter = std::chrono::seconds(5);
// The texts of a timeout and of a warning need fresh answers. Another probe goes out this long before a deadline.
constexpr auto kAskBeforeDeadline = std::chrono::milliseconds(300);
// A warning sends another probe if the last probe is older than this.
constexpr auto kAnswersAge = std::chrono::seconds(3);
// A warning waits this long for the answers of all ranks.
constexpr auto kWarningWaits = std::chrono::seconds(1);

constexpr std::string_view kIsGone = " is gone: ";

// The most ranks described in full in one message.
constexpr std::size_t kDescribedMax = 3;
// In a large group a probe goes to this many owners of what is awaited, besides the ranks that are always asked.
constexpr std::size_t kOwnersAskedMax = 4;

std::string seconds_text(core::Duration duration) { return core::format_seconds(core::to_seconds(duration)); }

// The signature's text without the operation's name: "sum of fp32[1024], 4096 bytes".
std::string arguments_text(const wire::Signature& signature) {
  std::string text = wire::describe(signature).substr(schedule::name_of(signature.kind).size());
  for (const std::string_view lead : {",", " ", "of "})
    if (text.starts_with(lead)) text.erase(0, lead.size());
  return text;
}

std::string_view what_to_do(core::Code code) {
  switch (code) {
    case core::Code::kPeerDead:
      return "see that process's own log for why it ended; if the process still runs, see whether it is stopped, or "
             "its network is cut";
    case core::Code::kTimeout:
      return "see whether the missing ranks are alive and issue the same operations, or pass a longer timeout";
    case core::Code::kMismatch:
      return "every rank must issue the same operations of a group in the same order with the same sizes";
    default: return {};
  }
}

// Whether the error text should say how far the operation was, and which ranks are missing.
bool has_culprit(core::Code code) { return code == core::Code::kPeerDead || code == core::Code::kTimeout; }

std::string with_advice(std::string text, core::Code code) {
  if (const std::string_view advice = what_to_do(code); !advice.empty()) text += ". What to do: " + std::string(advice);
  return text;
}

}  // namespace

std::string Worker::describe(const OperationRun& run) const {
  const GroupInfo& info = run.group.info;
  const int me = info.topology.rank();
  std::string text = "hybridps[rank " + std::to_string(me) + "/" + std::to_string(info.topology.size()) + " " +
                     info.members.host(me) + " group \"" + info.name + "\"]: ";
  if (run.operation.kind == schedule::Kind::kPointToPoint) {
    text += run.operation.sending ? "send of " : "recv of ";
    text += std::to_string(run.operation.sending ? run.input.bytes() : run.output.bytes()) + " bytes ";
    text += run.operation.sending ? "to rank " : "from ";
    text += run.operation.peer < 0 ? "any rank"
                                   : (run.operation.sending ? "" : "rank ") + std::to_string(run.operation.peer);
    if (run.operation.peer == me) text += " (itself)";
    text += ", tag " + std::to_string(run.operation.tag);
  } else {
    text += std::string(schedule::name_of(run.operation.kind)) + " seq " + std::to_string(run.sequence);
    if (const std::string arguments = arguments_text(run.signature); !arguments.empty()) text += " (" + arguments + ")";
  }
  return text;
}

core::Status Worker::in_full(const OperationRun& run, const core::Status& status) const {
  return core::Status(
      status.code(),
      with_advice(describe(run) + " failed after " + seconds_text(core::Clock::now() - run.submitted_at) + ": " +
                      std::string(status.message()) + (has_culprit(status.code()) ? standing(run) : std::string()),
                  status.code()));
}

void Worker::submit_failed(GroupState& group, Operation operation, std::uint64_t sequence, const core::Status& cause) {
  if (group.status.is_ok()) {
    tell_first(group, wire::Verdict::on_operation(sequence, cause.code()), cause.message());
    group.verdicts.emplace(sequence, cause);
  }
  submit(group, std::move(operation), sequence, {});
}

void Worker::tell_first(GroupState& group, const wire::Verdict& verdict, std::string_view text) {
  if (verdict.on == wire::Verdict::On::kOperation)
    group.told_before(verdict.sequence);
  else
    group.has_told = true;
  for (const int rank : group.census.neighbours())
    host_.send_control(group.info.members.engine(rank), group.message(verdict), text);
  const auto ranks = static_cast<std::size_t>(group.info.topology.size());
  for (std::size_t server = ranks; server < group.info.members.size(); ++server)
    host_.send_control(group.info.members.engine(server), group.message(verdict), text);
}

void Worker::pass_on(GroupState& group, wire::Verdict verdict, std::string_view text) {
  group.has_told |= verdict.on == wire::Verdict::On::kGroup && group.census.is_partial();
  verdict.passed_on = true;
  // Others may hear of it through this rank alone: so it stays until they have answered.
  verdict.wants_answer = group.census.is_partial();
  const auto members = static_cast<int>(group.info.members.size());
  const auto ranks = static_cast<int>(group.info.topology.size());
  if (group.census.is_partial())
    for (const int rank : group.census.neighbours())
      host_.send_control(group.info.members.engine(rank), group.message(verdict), text);
  for (int member = group.census.is_partial() ? ranks : 0; member < members; ++member)
    host_.send_if_connected(group.info.members.engine(member), group.message(verdict), text);
}

void Worker::fail(OperationRun& run, core::Status cause) {
  GroupState& group = run.group;
  if (run.operation.kind == schedule::Kind::kPointToPoint) {
    group.p2p->give_up(run, cause);
  } else if (run.operation.kind != schedule::Kind::kGoodbye) {
    cause = core::Status(cause.code(), std::string(cause.message()) + " (found by rank " +
                                           std::to_string(group.info.topology.rank()) + ")");
    tell_first(group, wire::Verdict::on_operation(run.sequence, cause.code()), cause.message());
  }
  finish(run, std::move(cause));
}

void Worker::fail_group(GroupState& group, const core::Status& cause, bool tell, int blamed) {
  const Entry entry(*this);  // first: its settle() may fail the group
  if (!group.status.is_ok()) return;
  group.status = cause;
  group.failed_at = core::Clock::now();
  group.blamed = blamed;
  const wire::Verdict verdict = wire::Verdict::on_group(cause.code(), blamed);
  // If this process ends next, the verdict arrives before its connections close. So the members do not take this rank
  // for the cause.
  if (tell)
    tell_first(group, verdict, cause.message());
  else if (cause.code() != core::Code::kClosed && !group.leaving && !group.has_told)
    pass_on(group, verdict, cause.message());
  while (!group.running.empty()) finish(*group.running.begin()->second, cause);
  for (OperationRun* run : group.p2p->active()) finish(*run, cause);
  drop_retained(group);
  group.early.clear();
  group.p2p->drop_unmatched();
  server_.close_group(group.info.uid);
  host_.on_group_failed(
      group.info.uid,
      core::Status(cause.code(), with_advice("the group has failed: " + std::string(cause.message()), cause.code())),
      cause, /*found_here=*/tell);
}

void Worker::repeat_verdict(const GroupState& group, core::EngineId to) {
  host_.send_control(to, group.message(wire::Verdict::on_group(group.status.code(), group.blamed)),
                     group.status.message());
}

void Worker::mismatch(const OperationRun& run, const server::RankCall& theirs) {
  const GroupInfo& info = run.group.info;
  on_mismatch(server::OperationKey{info.uid, run.sequence}, {info.topology.rank(), run.signature}, theirs);
}

void Worker::on_mismatch(const server::OperationKey& key, const server::RankCall& ours,
                         const server::RankCall& theirs) {
  const GroupState* group = find(key.uid);
  if (group == nullptr) return;
  const GroupInfo& info = group->info;
  std::string what;
  const bool they_left = theirs.signature.kind == schedule::Kind::kGoodbye;
  if (they_left || ours.signature.kind == schedule::Kind::kGoodbye) {
    const server::RankCall& gone = they_left ? theirs : ours;
    const server::RankCall& waiting = they_left ? ours : theirs;
    what = info.member_text(gone.rank) + " has destroyed the group after " + std::to_string(key.sequence) +
           " operations while " + info.member_text(waiting.rank) + " is in operation " + std::to_string(key.sequence) +
           ", " + wire::describe(waiting.signature);
  } else {
    const std::string our_text = wire::describe(ours.signature);
    const std::string their_text = wire::describe(theirs.signature);
    what = "ranks disagree about operation " + std::to_string(key.sequence) + ": " + info.member_text(ours.rank) +
           " called " + our_text + ", " + info.member_text(theirs.rank) + " called " + their_text;
    if (our_text == their_text) what += " with other sizes per rank";
  }
  // An event, because the loops of the server and of the runs call this function.
  events_.push_back({nullptr, key.uid, core::Status(core::Code::kMismatch, std::move(what))});
}

void Worker::on_failover_impossible(const OperationRun& run, int server) {
  const GroupInfo& info = run.group.info;
  events_.push_back({nullptr, info.uid,
                     core::Status(core::Code::kPeerDead, info.member_text(server) + " is gone, and operation " +
                                                             std::to_string(run.sequence) +
                                                             " cannot end without it: another rank, which had a part "
                                                             "of the results, has failed the operation")});
}

void Worker::on_bad_message(const server::OperationKey& key, std::string what) {
  what = "operation " + std::to_string(key.sequence) + " received " + what;
  events_.push_back({nullptr, key.uid, core::Status(core::Code::kMismatch, std::move(what))});
}

bool Worker::can_keep(GroupState& group, std::size_t kept, const wire::Message& message) {
  const GroupInfo& info = group.info;
  if (outbox_.holds_too_much(message.from.source)) {
    events_.push_back(
        {nullptr, info.uid,
         core::Status(core::Code::kOutOfResources, info.member_text(static_cast<int>(message.from.sender_rank)) +
                                                       " has sent " + info.member_text(info.topology.rank()) + " " +
                                                       std::to_string(outbox_.held(message.from.source)) +
                                                       " bytes that nobody has asked for, and may send " +
                                                       std::to_string(outbox_.held_bytes_max()) +
                                                       ": the sender's hybridps is broken, or another version")});
    return false;
  }
  if (kept < options_.early_messages_max) return true;
  std::string what = info.member_text(info.topology.rank()) + " keeps " + std::to_string(kept) + " messages of " +
                     (message.is_point_to_point() ? "sends without a receive" : "operations that it has not issued") +
                     ", and no more fit: it has issued " + std::to_string(group.submitted) + " collectives, and " +
                     info.member_text(static_cast<int>(message.from.sender_rank)) + " sends number " +
                     std::to_string(message.sequence()) + ". What to do: let ranks that run ahead wait for the others";
  events_.push_back({nullptr, info.uid, core::Status(core::Code::kOutOfResources, std::move(what))});
  return false;
}

core::Status verdict_in(const wire::From& from, const wire::Verdict& verdict, const flow::Delivery& payload) {
  std::string text(reinterpret_cast<const char*>(payload.data()), payload.bytes());
  if (text.empty()) text = "rank " + std::to_string(from.sender_rank) + " reported a failure";
  const bool known = verdict.code > 0 && verdict.code <= static_cast<std::uint32_t>(core::Code::kInternal);
  return core::Status(known ? static_cast<core::Code>(verdict.code) : core::Code::kInternal, std::move(text));
}

/// A rank does not call itself gone: what another says of it is told as that one's word.
core::Status Worker::of_this_rank(const GroupState& group, const wire::From& from, const wire::Verdict& verdict,
                                  const core::Status& status) {
  const GroupInfo& info = group.info;
  if (verdict.blamed() != info.topology.rank()) return status;
  const auto ranks = static_cast<std::uint32_t>(info.topology.size());
  const bool is_author = !verdict.passed_on && from.sender_rank < ranks;
  const std::string_view text = status.message();
  const std::size_t why = text.find(kIsGone);
  return {status.code(), info.member_text(info.topology.rank()) + " was given up by " +
                             (is_author ? info.member_text(static_cast<int>(from.sender_rank)) : "others") + ": " +
                             std::string(why == std::string_view::npos ? text : text.substr(why + kIsGone.size()))};
}

void Worker::on_verdict(GroupState& group, const wire::From& from, const wire::Verdict& verdict,
                        const flow::Delivery& payload) {
  const core::Status status = verdict_in(from, verdict, payload);
  if (verdict.on == wire::Verdict::On::kGroup) {
    group.know_of_failure.insert(from.source);
    // A rank that leaves, or has failed without telling anybody, passes it on, too.
    if (group.census.is_partial() && !group.has_told) pass_on(group, verdict, status.message());
    fail_group(group, of_this_rank(group, from, verdict, status), /*tell=*/false, verdict.blamed());
    return;
  }
  if (group.census.is_partial() && !group.told_before(verdict.sequence)) pass_on(group, verdict, status.message());
  // The operation fails on all ranks, so nobody needs the results that it retained.
  if (const auto retained = group.retained.find(verdict.sequence); retained != group.retained.end())
    drop_retained(*retained->second);
  if (group.over.contains(verdict.sequence)) return;
  if (const auto found = group.running.find(verdict.sequence); found != group.running.end())
    finish(*found->second, status);
  else if (group.verdicts.size() < GroupState::kVerdictsKept)
    group.verdicts.emplace(verdict.sequence, status);
  else
    fail_group(group, status, /*tell=*/false);
}

void Worker::probe(OperationRun& run, core::TimePoint now) {
  GroupState& group = run.group;
  run.probed_at = group.asked_at = now;
  group.census.begin(run.sequence, now);
  const std::string told = told_of_all(group);
  std::vector<int> asked = group.census.asked();
  if (group.census.is_partial()) add_owners(run, asked);
  for (const int rank : asked)
    host_.send_control(group.info.members.engine(rank), group.message(wire::Probe{run.sequence, run.signature}), told);
  // Dedicated servers issue no operations, so they get no probe. A server that owes a result gets a ping.
  for (const auto& span : run.spans)
    if (group.info.topology.is_dedicated(span->plan().owner) && span->waits_for_owner())
      host_.send_control(group.info.members.engine(span->plan().owner), {{}, 0, wire::Ping{}}, {});
}

// Owners that this rank has a connection to, as the agent of its node. Each time others, if there are many.
void Worker::add_owners(const OperationRun& run, std::vector<int>& asked) {
  GroupState& group = run.group;
  const schedule::Topology& topology = group.info.topology;
  const std::size_t most = asked.size() + kOwnersAskedMax;
  for (std::size_t i = 0; i < run.spans.size() && asked.size() < most; ++i) {
    SpanRun& span = *run.spans[group.owners_asked++ % run.spans.size()];
    const int owner = span.plan().owner;
    if (!topology.is_dedicated(owner) && topology.agent(topology.my_node(), owner) == topology.rank() &&
        owner != topology.rank() && span.waits_for_owner() &&
        std::find(asked.begin(), asked.end(), owner) == asked.end())
      asked.push_back(owner);
  }
}

std::string Worker::told_of_all(GroupState& group) {
  if (!group.census.is_partial()) return {};
  RankWord& mine = group.known[static_cast<std::size_t>(group.info.topology.rank())];
  mine.is_known = true;
  mine.submitted = group.submitted;
  mine.finished = group.over.floor();
  return group.census.told(group.known, group.info.tuning.chunks.room);
}

void Worker::learn(GroupState& group, const flow::Delivery& told) {
  if (!group.census.is_partial() || told.bytes() == 0) return;
  const std::string_view text(reinterpret_cast<const char*>(told.data()), told.bytes());
  if (!group.census.learn(text, group.known, core::Clock::now()) || group.running.empty()) return;
  OperationRun& oldest = *group.running.begin()->second;
  std::vector<int> missing;
  for (int rank = 0; rank < group.info.topology.size() && missing.size() < 2; ++rank)
    if (!has_issued(group, rank, oldest.sequence)) missing.push_back(rank);
  // Of several, most may have issued the operation without a word of it here yet.
  if (missing.size() == 1) oldest.blamed = missing.front();
}

void Worker::tell_news(GroupState& group, core::TimePoint now) {
  group.census.on_told(now);
  if (!group.status.is_ok()) return;
  const std::string told = told_of_all(group);
  const wire::ProbeReply word = own_word(group);
  for (const int rank : group.census.asked())
    host_.send_control(group.info.members.engine(rank), group.message(word), told);
  for (const int rank : group.census.askers())
    host_.send_if_connected(group.info.members.engine(rank), group.message(word), told);
}

bool Worker::contradicts_finished(const GroupState& group, std::uint64_t sequence, const server::RankCall& theirs) {
  if (group.signatures_over.empty()) return false;
  const auto& [finished, signature] = group.signatures_over[sequence % GroupState::kSignaturesKept];
  if (finished != sequence || signature == theirs.signature) return false;
  on_mismatch(server::OperationKey{group.info.uid, sequence}, {group.info.topology.rank(), signature}, theirs);
  return true;
}

void Worker::on_probe(GroupState& group, const wire::From& from, const wire::Probe& probe, const flow::Delivery& told) {
  learn(group, told);
  if (group.census.is_partial() && from.sender_rank < group.known.size()) {
    // The question itself says so much. Without room in the pool nothing else was told.
    RankWord& known = group.known[from.sender_rank];
    group.census.learn(static_cast<int>(from.sender_rank), probe.sequence + 1, probe.sequence, known);
  }
  const server::RankCall theirs{static_cast<int>(from.sender_rank), probe.signature};
  if (contradicts_finished(group, probe.sequence, theirs)) return;
  if (const auto found = group.running.find(probe.sequence);
      found != group.running.end() && found->second->signature != probe.signature) {
    mismatch(*found->second, theirs);
    return;
  }
  host_.send_control(from.source, group.message(own_word(group)), told_of_all(group));
}

wire::ProbeReply Worker::own_word(const GroupState& group) {
  wire::ProbeReply word{group.submitted, group.over.floor(), {}};
  if (!group.running.empty())
    word.last = group.running.begin()->second->signature;
  else if (!group.signatures_over.empty() && word.finished > 0)
    word.last = group.signatures_over[(word.finished - 1) % GroupState::kSignaturesKept].second;
  return word;
}

void Worker::on_probe_reply(GroupState& group, const wire::From& from, const wire::ProbeReply& reply,
                            const flow::Delivery& told) {
  if (from.sender_rank >= group.known.size()) return;
  learn(group, told);
  RankWord& known = group.known[from.sender_rank];
  known.at = core::Clock::now();
  if (reply.issued < known.submitted || reply.finished < known.finished) return;  // a later answer came first
  group.census.learn(static_cast<int>(from.sender_rank), reply.issued, reply.finished, known);
  known.last = reply.last;
  if (group.running.empty()) return;
  OperationRun& oldest = *group.running.begin()->second;
  if (reply.issued <= oldest.sequence) oldest.blamed = static_cast<int>(from.sender_rank);
}

// A rank issues operations in order. So a message for a later operation proves it, too.
bool Worker::has_issued(const GroupState& group, int rank, std::uint64_t sequence) {
  const auto at = static_cast<std::size_t>(rank);
  return rank == group.info.topology.rank() || group.known[at].submitted > sequence || group.heard[at] > sequence;
}

std::vector<int> Worker::missing_ranks(const OperationRun& run) const {
  const GroupState& group = run.group;
  std::vector<int> ranks;
  if (run.operation.kind == schedule::Kind::kPointToPoint) {
    if (run.operation.peer >= 0 && run.operation.peer != group.info.topology.rank())
      ranks.push_back(run.operation.peer);
    return ranks;
  }
  if (group.asked_at <= run.submitted_at) return ranks;
  // Only ranks that have not submitted the operation are the cause. Slow or waiting ranks are not.
  const bool time_is_up = core::Clock::now() - group.asked_at >= group.census.answers_within();
  for (int rank = 0; rank < group.info.topology.size(); ++rank) {
    const bool has_answered = group.known[static_cast<std::size_t>(rank)].at >= group.asked_at;
    if (!has_issued(group, rank, run.sequence) && (has_answered || time_is_up)) ranks.push_back(rank);
  }
  if (!ranks.empty()) return ranks;
  // A dedicated server issues no operations. A missing result is the only sign of its delay.
  for (const auto& span : run.spans)
    if (group.info.topology.is_dedicated(span->plan().owner) && span->waits_for_owner())
      ranks.push_back(span->plan().owner);
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

// Example: "rank 2 (host5 pid 880) was last seen finishing seq 16, barrier".
std::string Worker::last_known(const GroupState& group, int rank) const {
  std::string text = group.info.member_text(rank);
  if (group.info.topology.is_dedicated(rank)) return text;
  const RankWord& known = group.known[static_cast<std::size_t>(rank)];
  if (!known.is_known) {
    const std::uint64_t heard = group.heard[static_cast<std::size_t>(rank)];
    return text + (heard > 0 ? " was last heard in seq " + std::to_string(heard - 1) : " was not heard yet");
  }
  if (known.submitted == 0) return text + " has not issued an operation of this group";
  const bool is_between = known.finished >= known.submitted;
  const std::uint64_t sequence = is_between ? known.submitted - 1 : known.finished;
  text += (is_between ? " was last seen finishing seq " : " is in seq ") + std::to_string(sequence);
  // Of a rank that others have told of: all ranks issue the same operations.
  std::optional<wire::Signature> last = known.last;
  if (const auto found = group.running.find(sequence); !last && found != group.running.end())
    last = found->second->signature;
  if (!last && !group.signatures_over.empty())
    if (const auto& [over, signature] = group.signatures_over[sequence % GroupState::kSignaturesKept];
        over == sequence && group.over.contains(sequence))
      last = signature;
  return last ? text + ", " + wire::describe(*last) : text;
}

// The operation's progress, as far as this rank knows.
std::string Worker::standing(const OperationRun& run) const {
  if (!run.started || run.operation.kind == schedule::Kind::kPointToPoint) return {};
  const GroupState& group = run.group;
  std::string text;
  const auto describe_ranks = [&](const std::vector<int>& ranks) {
    for (std::size_t i = 0; i < std::min(ranks.size(), kDescribedMax); ++i)
      text += (i == 0 ? ": " : ", ") + last_known(group, ranks[i]);
  };
  if (group.asked_at > run.submitted_at) {
    std::vector<int> waiting;
    std::vector<int> behind;  // ranks in an earlier operation
    for (int rank = 0; rank < group.info.topology.size(); ++rank) {
      const RankWord& known = group.known[static_cast<std::size_t>(rank)];
      if (!has_issued(group, rank, run.sequence) || known.finished > run.sequence) continue;
      waiting.push_back(rank);
      if (known.at >= group.asked_at && known.finished < run.sequence) behind.push_back(rank);
    }
    text += "; waiting " + core::format_ranks(waiting);
    if (const std::vector<int> missing = missing_ranks(run); !missing.empty()) {
      text += ", missing " + core::format_ranks(missing);
      describe_ranks(missing);
    } else {
      describe_ranks(behind);
    }
  }
  std::uint64_t wanted = 0;
  std::uint64_t done = 0;
  for (const auto& span : run.spans) {
    if (span->chunks_wanted() == 0) continue;
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
  std::vector<core::EngineId> engines;
  for (const int rank : missing) engines.push_back(run.group.info.members.engine(rank));
  if (const std::string lack = host_.lack_of_descriptors(engines); !lack.empty()) why += ", because " + lack;
  core::Status status(core::Code::kTimeout, std::move(why));
  if (run.operation.kind == schedule::Kind::kGoodbye)
    finish(run, std::move(status));
  else
    fail(run, std::move(status));
}

void Worker::watch(core::TimePoint now) {
  next_watch_ = now + kWatchEvery;
  std::set<core::GroupUid> waiting;
  for (const auto& [uid, group] : groups_)
    if (!group->running.empty() && group->running.begin()->second->started) watch(*group, now, waiting);
  if (now >= next_peers_watch_) watch_peers(now, waiting);
  for (const core::GroupUid uid : waiting) host_.on_group_waits(uid);
}

// Watches only the group's oldest operation: later operations wait behind it.
void Worker::watch(GroupState& group, core::TimePoint now, std::set<core::GroupUid>& waiting) {
  OperationRun& run = *group.running.begin()->second;
  const bool first = run.probed_at == run.submitted_at;
  // With many operations in flight, a new operation becomes the oldest again and again. The group's last probe counts,
  // because the answers would be the same.
  const bool due =
      first ? now - std::max(run.submitted_at, group.asked_at) >= kProbeAfter : now - run.probed_at >= kProbeAgainAfter;
  const bool ends_soon = !run.deadline.is_never() && run.deadline.point() - now < kAskBeforeDeadline &&
                         now - group.asked_at > kAskBeforeDeadline;
  if (due && !first) waiting.insert(group.info.uid);
  if (due || (!first && ends_soon)) probe(run, now);
  if (options_.warn_seconds <= 0 || run.operation.kind == schedule::Kind::kGoodbye ||
      now - std::max(run.warned_at, group.warned_at) < core::from_seconds(options_.warn_seconds))
    return;
  if (now - group.asked_at > kAnswersAge) {
    waiting.insert(group.info.uid);  // this probe puts off the next one, which would do it
    probe(run, now);
  }
  for (const int rank : group.census.asked())
    if (group.known[static_cast<std::size_t>(rank)].at < group.asked_at && now - group.asked_at < kWarningWaits) return;
  if (now - group.asked_at < (group.census.is_partial() ? group.census.answers_within() : core::Duration::zero()))
    return;
  run.warned_at = group.warned_at = now;
  core::log_warn(describe(run), " is not done after ", seconds_text(now - run.submitted_at), standing(run));
}

// Pings the peers of sends and receives. A peer need not have issued its part, so a probe would tell nothing.
void Worker::watch_peers(core::TimePoint now, std::set<core::GroupUid>& waiting) {
  next_peers_watch_ = now + kProbeAfter;  // for operations submitted from now on
  std::set<core::EngineId> asked;
  for (const auto& [uid, group] : groups_) {
    for (OperationRun* run : group->p2p->active()) {
      if (run->operation.peer < 0 || run->operation.peer == group->info.topology.rank()) continue;
      const bool first = run->probed_at == run->submitted_at;
      const core::TimePoint due =
          run->probed_at + (first ? core::Duration(kProbeAfter) : core::Duration(kProbeAgainAfter));
      if (now < due) {
        next_peers_watch_ = std::min(next_peers_watch_, due);
        continue;
      }
      if (!first) waiting.insert(uid);
      run->probed_at = now;
      const core::EngineId peer = group->info.members.engine(run->operation.peer);
      if (!asked.insert(peer).second) continue;
      host_.send_control(peer, {{}, 0, wire::Ping{}}, {});
    }
  }
}

void Worker::on_peer_dead(core::EngineId peer, const core::Status& cause, const std::string& own_fault) {
  const Entry entry(*this);
  std::vector<core::GroupUid> affected;
  for (const auto& [uid, group] : groups_)
    if (group->info.members.find(peer))
      affected.push_back(uid);
    else if (group->status.is_ok())
      group->newcomers->on_peer_dead(peer, cause);
  for (const core::GroupUid uid : affected) {
    GroupState& group = *groups_[uid];
    const int rank = *group.info.members.find(peer);
    if (group.info.topology.is_dedicated(rank)) {
      group.lost_servers->report(rank, cause);
      continue;
    }
    // A peer may leave when its goodbye is complete, even if ours is not complete yet. The members need not be told.
    const bool only_goodbye =
        group.leaving &&
        (group.running.empty() || group.running.begin()->second->operation.kind == schedule::Kind::kGoodbye);
    const std::string text = own_fault.empty()
                                 ? group.info.member_text(rank) + std::string(kIsGone) + std::string(cause.message())
                                 : group.info.member_text(group.info.topology.rank()) + " " + own_fault;
    fail_group(group, core::Status(core::Code::kPeerDead, text), /*tell=*/!only_goodbye, own_fault.empty() ? rank : -1);
  }
}

}  // namespace hybridps::worker
