#include "hybridps/worker/worker.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "hybridps/core/check.h"
#include "hybridps/core/log.h"

namespace hybridps::worker {
namespace {

// Enough if few operations are under way at a time.
constexpr std::size_t kSpareCopiesMax = 16;

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
  s.scope = operation.scope;
  s.coding = operation.coding;
  if (core::is_outer(operation.op)) {
    s.rate = operation.rate;
    s.momentum = operation.momentum;
  }
  switch (operation.kind) {
    case schedule::Kind::kAllReduce:
    case schedule::Kind::kBroadcast: s.total_bytes = output.bytes(); break;
    case schedule::Kind::kReduce: s.total_bytes = input.bytes(); break;
    case schedule::Kind::kAllGather: s.total_bytes = sum(operation.output_bytes); break;
    case schedule::Kind::kReduceScatter: s.total_bytes = sum(operation.input_bytes); break;
    default: break;
  }
  if (operation.scope != schedule::Scope::kRanks || operation.coded) s.total_bytes = operation.total_bytes;
  return s;
}

}  // namespace

Worker::Worker(flow::Outbox& outbox, server::Server& server, Host& host, WorkerOptions options)
    : outbox_(outbox),
      server_(server),
      host_(host),
      options_(options),
      local_grants_(flow::GrantBudget(options.grant_chunks), flow::GrantQueue::Turn::kOne) {}

Worker::~Worker() {
  while (!groups_.empty()) close_group(groups_.begin()->first);
}

GroupState& Worker::open_group(GroupInfo info) {
  const core::GroupUid uid = info.uid;
  auto state = std::make_unique<GroupState>(std::move(info));
  state->p2p = std::make_unique<PointToPoint>(*this, *state);
  state->plans =
      std::make_unique<PlanChanges>(*this, *state,
                                    // The rate finder's model knows no levels.
                                    options_.find_rates && state->info.topology.regions() == 1, options_.tune);
  state->lost_servers = std::make_unique<LostServers>(*this, *state);
  state->newcomers = std::make_unique<Newcomers>(*this, *state);
  state->heard.assign(state->info.members.size(), 0);
  touch(*state);
  return *(groups_[uid] = std::move(state));
}

GroupState* Worker::find(core::GroupUid uid) {
  const auto found = groups_.find(uid);
  return found == groups_.end() ? nullptr : found->second.get();
}

void Worker::close_group(core::GroupUid uid) {
  const Entry entry(*this);
  const auto found = groups_.find(uid);
  if (found == groups_.end()) return;
  GroupState& group = *found->second;
  group.leaving = true;  // so that fail_group() sends nothing to other members
  fail_group(group, core::Status(core::Code::kAborted, "the group was destroyed while the operation was pending"),
             /*tell=*/false);
  group.newcomers->part();
  server_.close_group(uid);
  drop_retained(group);
  std::replace(touched_.begin(), touched_.end(), &group, static_cast<GroupState*>(nullptr));
  dues_.erase({group.due, &group});
  groups_.erase(found);
}

void Worker::touch(GroupState& group) {
  if (!std::exchange(group.is_touched, true)) touched_.push_back(&group);
}

core::TimePoint Worker::due_of(const GroupState& group) noexcept {
  return std::min(
      {group.plans->next_due(), group.lost_servers->next_due(), group.newcomers->next_due(), group.census.next_due()});
}

std::size_t Worker::look_at_groups(core::TimePoint now) {
  for (; !dues_.empty() && dues_.begin()->first <= now; dues_.erase(dues_.begin())) {
    dues_.begin()->second->due = core::TimePoint::max();
    touch(*dues_.begin()->second);
  }
  std::size_t work = 0;
  const std::size_t count = touched_.size();  // what is touched from here on is for the next round
  for (std::size_t i = 0; i < count; ++i) {
    if (touched_[i] == nullptr) continue;
    GroupState& group = *touched_[i];
    group.is_touched = false;
    ++group_looks_;
    if (!group.barriers.empty()) start_barriers(group);
    work += group.plans->tick(now) + group.lost_servers->tick(now) + group.newcomers->tick(now);
    if (group.census.must_tell(now)) tell_news(group, now);
    const core::TimePoint due = due_of(group);
    if (due == group.due) continue;
    dues_.erase({group.due, &group});
    group.due = due;
    if (due != core::TimePoint::max()) dues_.emplace(due, &group);
  }
  touched_.erase(touched_.begin(), touched_.begin() + static_cast<std::ptrdiff_t>(count));
  return work;
}

void Worker::reserve(GroupState& group, std::uint64_t sequence) {
  group.submitted = std::max(group.submitted, sequence + 1);
  group.reserved.insert(sequence);
}

bool Worker::is_oldest(const GroupState& group, std::uint64_t sequence) const {
  return group.running.begin()->first == sequence && (group.reserved.empty() || *group.reserved.begin() > sequence);
}

void Worker::submit(GroupState& group, Operation operation, std::uint64_t sequence, Completion done) {
  const Entry entry(*this);
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
  if (o.timed) o.timed->begin(core::Clock::now());
  ++active_;

  if (o.kind == schedule::Kind::kPointToPoint) {
    if (!group.status.is_ok()) {
      refuse(*run, group.status);
      return;
    }
    track(*run);
    group.p2p->submit(std::move(run));
    return;
  }
  run->signature = signature_of(o, run->input, run->output);
  if (o.kind == schedule::Kind::kGoodbye) group.leaving = true;
  if (core::is_outer(o.op)) group.steps = true;
  group.submitted = std::max(group.submitted, sequence + 1);
  group.reserved.erase(sequence);
  OperationRun& r = *run;
  group.running[sequence] = std::move(run);
  track(r);
  if (!group.status.is_ok()) {
    finish(r, group.status);
    return;
  }
  touch(group);
  if (const auto verdict = group.verdicts.find(sequence); verdict != group.verdicts.end()) {
    const core::Status status = verdict->second;
    group.verdicts.erase(verdict);
    finish(r, status);
    return;
  }
  if (const core::Status status = check_coded(r); !status.is_ok()) {
    finish(r, status);
    return;
  }
  // A root may be done as soon as it starts. So compare it now with the early messages: later nobody would.
  std::optional<server::RankCall> theirs = group.early.contradiction(sequence, r.signature);
  if (!theirs) theirs = server_.contradiction({group.info.uid, sequence}, r.signature);
  if (theirs) {
    mismatch(r, *theirs);
    return;
  }
  // A barrier starts when all earlier collectives of its group are over on this rank.
  if (is_barrier(o.kind) && !is_oldest(group, sequence))
    group.barriers.insert(sequence);
  else if (group.plans->is_frozen() && has_shares(o))
    group.plans->postpone(r);
  else
    start(r);
}

core::Status Worker::check_coded(const OperationRun& run) const {
  const Operation& o = run.operation;
  if (!o.coded) return {};
  const GroupInfo& info = run.group.info;
  const schedule::Topology& topology = info.topology;
  const compress::Codec* const codec = info.codecs != nullptr && o.coding == wire::Coding::kFull
                                           ? info.codecs->of(/*warming_up=*/false, o.dtype)
                                           : nullptr;
  const char* why = nullptr;
  if (codec == nullptr || !codec->can_be_cut())
    why = "its codec's bytes cannot be cut";
  else if (info.codecs->spec().feedback || info.codecs->spec().momentum > 0)
    why = "its codec remembers elements";
  else if (o.kind != schedule::Kind::kAllReduce || core::is_outer(o.op))
    why = "it is no allreduce";
  else if (o.scope != schedule::Scope::kNodes && topology.ranks_of(topology.my_node()).size() > 1)
    why = "ranks of a node add elements";
  else if (topology.nodes() < 2)
    why = "its results do not leave the node";
  else if (topology.regions() > 1 && info.codecs->spec().scope == compress::CodecScope::kRegions)
    why = "ranks of a region add elements";
  else if (topology.servers() > 0)
    why = "failover from a dedicated server needs elements";
  if (why != nullptr) return core::Status(core::Code::kInvalidArgument, std::string("the memory is coded, but ") + why);
  const std::uint64_t block = codec->block_elements() * core::size_of(o.dtype);
  std::uint64_t bytes = o.scope == schedule::Scope::kNodes ? 0 : o.total_bytes;
  bool whole = true;  // each rail begins a block
  if (o.scope == schedule::Scope::kNodes)
    for (std::size_t rail = 0; rail < o.rail_bytes.size(); ++rail) {
      if (topology.rail_rank(topology.my_node(), static_cast<int>(rail)) != topology.rank()) continue;
      whole = whole && (o.rail_bytes[rail] == 0 || bytes % block == 0);
      bytes += o.rail_bytes[rail];
    }
  if (whole && run.output.bytes() == codec->bytes_full(bytes)) return {};
  return core::Status(core::Code::kInvalidArgument,
                      "the memory is coded and has " + std::to_string(run.output.bytes()) + " bytes, where " +
                          std::to_string(codec->bytes_full(bytes)) + " are what " + std::to_string(bytes) +
                          " bytes of elements become, in rails of whole blocks");
}

void Worker::start_unfrozen(GroupState& group, std::uint64_t sequence) {
  if (const auto found = group.running.find(sequence); found != group.running.end()) start(*found->second);
}

void Worker::track(OperationRun& run) {
  tracked_.insert(&run);
  trace(run, observe::EventType::kCalled, false);
  if (!run.deadline.is_never()) run.expiry = deadlines_.emplace(std::pair(run.deadline.point(), run.sequence), &run);
}

void Worker::refuse(OperationRun& run, const core::Status& status) {
  ++counts_.errors[status.code()];
  ++finished_count_;
  --active_;
  if (run.done) run.done(Outcome{in_full(run, status), -1});
}

void Worker::part_done(OperationRun& run) {
  assert(run.pending > 0);
  if (--run.pending > run.awaits_known || run.is_done) return;
  if (run.pending > 0 && !may_leave(run)) {
    if (!run.is_retained) run.group.lost_servers->say_landed();  // the operation waits for the answer
    return;
  }
  run.is_done = true;
  events_.push_back({&run, {}, {}});
}

std::size_t Worker::settle_events() {
  std::size_t work = 0;
  for (; !events_.empty(); ++work) {
    const Settlement event = std::move(events_.front());
    events_.pop_front();
    if (OperationRun* run = event.done) {
      run->is_done = false;
      if (run->is_retained) {
        if (run->pending == 0) drop_retained(*run);
        continue;
      }
      if (run->pending > 0 && !may_leave(*run)) {  // since the event, the server was lost or the room was used up
        run->group.lost_servers->say_landed();
        continue;
      }
      const bool received = run->operation.kind == schedule::Kind::kPointToPoint && !run->operation.sending;
      finish(*run, core::Status::ok(), received ? run->operation.peer : -1);
    } else if (GroupState* group = find(event.uid)) {
      fail_group(*group, event.verdict, /*tell=*/true);
    }
  }
  return work;
}

bool Worker::may_leave(const OperationRun& run) const noexcept {
  return !run.is_retained && run.pending == run.awaits_known && may_retain(run);
}

bool Worker::may_retain(const OperationRun& run) const noexcept {
  std::uint64_t bytes = 0;
  for (const auto& span : run.spans) {
    if (!span->waits_known()) continue;
    if (!span->is_retainable()) return false;
    bytes += span->plan().bytes;
  }
  return bytes <= options_.retained_bytes && run.group.retained_bytes + bytes <= options_.retained_bytes_max;
}

void Worker::drop_retained(OperationRun& run) {
  GroupState& group = run.group;
  if (run.is_done) std::erase_if(events_, [&](const Settlement& event) { return event.done == &run; });
  if (run.pace_due) std::erase(pacing_, &run);
  group.retained_bytes -= run.retained_bytes;
  for (const auto& span : run.spans)
    if (group.spare_copies.size() < kSpareCopiesMax) group.spare_copies.push_back(span->take_back());
  group.retained.erase(run.sequence);
}

void Worker::drop_retained(GroupState& group) {
  while (!group.retained.empty()) drop_retained(*group.retained.begin()->second);
}

void Worker::finish(OperationRun& run, core::Status status, int source_rank) {
  GroupState& group = run.group;
  touch(group);
  const bool p2p = run.operation.kind == schedule::Kind::kPointToPoint;
  count(run, status);
  trace(run, observe::EventType::kOperation, !status.is_ok());
  if (!status.is_ok()) status = in_full(run, status);
  if (run.is_done) std::erase_if(events_, [&](const Settlement& event) { return event.done == &run; });
  if (status.is_ok() && run.awaits_known > 0) {
    run.is_retained = true;
    std::erase_if(run.spans, [](const auto& span) { return !span->waits_known(); });
    run.index_spans();
    for (const auto& span : run.spans) {
      std::vector<std::byte> memory;
      if (!group.spare_copies.empty()) {
        memory = std::move(group.spare_copies.back());
        group.spare_copies.pop_back();
      }
      span->retain(std::move(memory));
      run.retained_bytes += span->plan().bytes;
    }
    group.retained_bytes += run.retained_bytes;
  } else {
    run.spans_by_id.clear();
    run.spans.clear();
  }
  run.operation.device_memory.reset();
  (void)core::check(tracked_.erase(&run) == 1, "an operation that ends was tracked");
  if (std::exchange(run.pace_due, false)) std::erase(pacing_, &run);
  if (run.expiry) deadlines_.erase(*std::exchange(run.expiry, {}));
  if (!p2p) {
    server_.close(server::OperationKey{group.info.uid, run.sequence});
    group.over.add(run.sequence);
    group.plans->on_finished(run, status.is_ok());
    if (run.stores.of != 0) {
      const core::Duration took = core::Clock::now() - run.stores_began_at;
      const bool waited = run.last_heard >= 0 && 2 * (run.last_heard_at - run.stores_began_at) > took;
      const bool counts = status.is_ok() && group.newest_start == run.sequence && !waited;
      if (const auto outcome = group.stores.end(run.stores, counts ? core::to_seconds(took) : 0.0))
        core::log_debug("group \"", group.info.name, "\": slots of ", schedule::name_of(run.operation.kind), ", ",
                        outcome->bytes >> 10, " KiB and more: ", 1e-9 / outcome->past,
                        " GB/s with non-temporal stores, ", 1e-9 / outcome->through,
                        " GB/s through the cache: from now on ", outcome->past_cache ? "past" : "through");
    }
    group.last_finished_at = now_;
    if (group.signatures_over.empty())
      group.signatures_over.resize(GroupState::kSignaturesKept, {~std::uint64_t{0}, {}});
    group.signatures_over[run.sequence % GroupState::kSignaturesKept] = {run.sequence, run.signature};
    group.early.drop(run.sequence);
    group.barriers.erase(run.sequence);
  }
  ++finished_count_;
  --active_;
  Outcome outcome{std::move(status), source_rank};
  if (run.operation.timed && outcome.status.is_ok()) run.operation.timed->end(core::Clock::now(), run.codec_time);
  host_.send_now();
  if (run.done) run.done(outcome);
  if (p2p) {
    group.p2p->remove(run);
  } else if (const auto ended = group.running.find(run.sequence); core::check(
                 ended != group.running.end() && ended->second.get() == &run, "a collective that ends was running")) {
    if (run.is_retained) {
      run.done = {};
      run.operation.timed.reset();
      group.retained.insert(group.running.extract(ended));
    } else {
      group.running.erase(ended);
    }
  }
}

void Worker::start_barriers(GroupState& group) {
  while (!group.barriers.empty() && group.status.is_ok() && is_oldest(group, *group.barriers.begin())) {
    OperationRun& run = *group.running.begin()->second;
    group.barriers.erase(group.barriers.begin());
    start(run);
    settle();  // the barrier may be done already, and the next barrier may start then
  }
}

std::size_t Worker::tick(core::TimePoint now) {
  const Entry entry(*this);
  now_ = now;
  std::size_t work = 0;
  while (!pacing_.empty()) {
    OperationRun& run = *pacing_.back();
    pacing_.pop_back();
    run.pace_due = false;
    pace(run);
    ++work;
  }
  work += look_at_groups(now);
  work += settle();  // before deadlines: an operation that is done does not time out
  while (!deadlines_.empty() && deadlines_.begin()->first.first <= now) {
    ++work;
    expire(*deadlines_.begin()->second);
  }
  if (now >= next_watch_ && !tracked_.empty()) watch(now);
  return work + settle();
}

std::uint64_t Worker::bytes_awaited() const noexcept {
  constexpr int kLookedAt = 16;
  std::uint64_t bytes = 0;
  int looked = 0;
  for (const OperationRun* run : tracked_) {
    if (++looked > kLookedAt) break;
    if (run->operation.kind == schedule::Kind::kPointToPoint) return 0;
    if (run->spans.empty()) continue;
    const std::uint32_t chunk_bytes = run->spans.front()->plan().chunk_bytes;
    bytes += run->pending * (run->codec == nullptr ? chunk_bytes : run->codec->bytes_max(chunk_bytes));
  }
  return bytes;
}

core::TimePoint Worker::next_due(core::TimePoint now) const noexcept {
  if (!events_.empty()) return now;
  core::TimePoint due = core::TimePoint::max();
  if (!deadlines_.empty()) due = deadlines_.begin()->first.first;
  if (!tracked_.empty()) due = std::min(due, std::max(next_watch_, now + kWatchEvery));
  if (!dues_.empty()) due = std::min(due, dues_.begin()->first);
  for (const GroupState* const group : touched_)
    if (group != nullptr) due = std::min(due, due_of(*group));
  return due;
}

}  // namespace hybridps::worker
