#include "hybridps/engine/groups.h"

#include <algorithm>
#include <iterator>
#include <mutex>
#include <utility>

#include "hybridps/build_info.h"
#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/engine/records.h"

namespace hybridps::engine {
namespace {

using core::Code;
using core::Status;

constexpr auto kStayAfterFailure = std::chrono::milliseconds(200);
// How often the loop looks at dedicated servers: rarely at late ones, often while a group's start waits for them.
constexpr auto kLateEvery = std::chrono::milliseconds(50);
constexpr auto kStartEvery = std::chrono::milliseconds(2);
constexpr auto kAwaitsServers = "its dedicated servers have neither joined nor failed yet";
// How long an operation past its deadline waits for the bootstrap thread to look up who is missing.
constexpr auto kLookFor = std::chrono::milliseconds(80);

// How long the Store may take for each call of the rendezvous after a group's timeout.
constexpr auto kStoreAnswersWithin = std::chrono::seconds(1);

VerdictBoard::Location location_of(const GroupCore& group) {
  // A named life has its own members. Another set of members that uses the same name later gets its own verdict key.
  const std::string life = group.options.life.empty() ? "" : " of " + group.options.incarnation;
  return {group.options.store, group.prefix + "/verdict" + life, group.uid, !life.empty()};
}

core::TimePoint timeout_of(const GroupOptions& o) {
  return o.timeout.count() > 0 ? core::Deadline::after(o.timeout, o.since).point() : core::TimePoint::max();
}

bool may_have_servers(const bootstrap::Roster& roster) {
  return roster.names_servers && roster.node_count() >= ServerJoins::kNodesMin;
}

}  // namespace

Groups::Groups(const core::Config& config, core::EngineId self, Runtime& runtime, VerdictBoard& board,
               SummaryOptions summary, std::function<void()> closed,
               std::function<void(core::EngineId, const core::Status&)> gone)
    : config_(config),
      self_(self),
      runtime_(runtime),
      board_(board),
      summary_(std::move(summary)),
      closed_(std::move(closed)) {
  Runtime::RuntimeHooks hooks;
  hooks.group_failed = [this](core::GroupUid uid, const Status& status, const Status& cause, bool found_here) {
    const Group group = find(uid);
    if (!group) return;
    if (found_here && group->options.size > 1) board_.post(location_of(*group), cause);
    fail(*group, status);
  };
  hooks.group_waits = [this](core::GroupUid uid) {
    if (const Group group = find(uid); group && group->options.size > 1) board_.look(location_of(*group));
  };
  hooks.group_starts = [this](core::GroupUid uid) {
    if (const Group group = find(uid); group && group->awaits_servers) start(group);
  };
  hooks.may_meet = [this](core::GroupUid uid, const auto& newcomers) { return may_meet(uid, newcomers); };
  hooks.servers_joined = [this](core::GroupUid uid, std::vector<bootstrap::MemberRecord> servers) {
    if (const Group group = find(uid)) on_servers_joined(*group, std::move(servers));
  };
  hooks.peer_gone = std::move(gone);
  runtime_.set_hooks(std::move(hooks));
}

void Groups::add(Group group) {
  const GroupOptions& o = group->options;
  if (o.timeout.count() > 0) {
    group->joining_until = timeout_of(o);
    if (group->joining_until < core::TimePoint::max() - kStoreAnswersWithin)
      group->joining_until += kStoreAnswersWithin;
    joining_due_ = std::min(joining_due_, group->joining_until);
  }
  groups_.push_back(std::move(group));
}

bool Groups::look_for_status() const {
  bool any = false;
  for (const Group& group : groups_) {
    if (!group->is_joining || group->closed) continue;
    group->status_wanted.store(true);
    any = true;
  }
  return any;
}

std::string Groups::name_of(core::EngineId engine) const {
  for (auto newest = groups_.rbegin(); newest != groups_.rend(); ++newest) {
    const Group& group = *newest;
    if (!group->options.is_world || group->state == nullptr) continue;
    const worker::GroupInfo& info = group->state->info;
    if (const std::optional<int> member = info.members.find(engine))
      return info.topology.is_dedicated(*member) ? "server " + info.members.host(*member) : std::to_string(*member);
  }
  return runtime_.peers().where(engine);
}

void Groups::write_status(observe::Json& json, bool members) const {
  const core::TimePoint now = core::Clock::now();
  for (const Group& group : groups_) {
    if (group->closed) continue;
    json.object().field("name", group->options.name).field("world", group->options.is_world);
    json.field("rank", group->options.rank).field("size", group->options.size);
    json.field("compress", group->options.compress);
    json.field("since_seconds", core::to_seconds(now - group->options.since));
    {
      const std::lock_guard lock(group->mutex);
      const bool failed = !group->status.is_ok();
      json.field("state", failed ? "failed" : group->takes_operations() ? "ready" : "joining");
      if (failed) json.field("failure", group->status.message());
      if (group->awaits_servers)
        json.field("waiting_for", kAwaitsServers);
      else if (group->state == nullptr)
        json.field("waiting_for", group->status_waiting_for);
      json.field("called", group->submitted).field("queued", group->queued.size());
      if (members) json.field("summary", group->summary.text);
    }
    if (group->state != nullptr) {
      const worker::GroupInfo& info = group->state->info;
      json.field("uid", core::to_string(group->uid));
      if (members) {
        json.key("members").array();
        for (int member = 0; member < static_cast<int>(info.members.size()); ++member) {
          json.object().field("engine", core::to_string(info.members.engine(member)));
          json.field("where", info.members.host(member)).field("node", info.topology.node_of(member));
          json.field("server", info.topology.is_dedicated(member));
          json.field("region", info.topology.region_of_owner(member)).end();
        }
        json.end();
      }
      runtime_.worker().write_status(json, *group->state, now);
    }
    json.end();
  }
}

void Groups::on_told(core::GroupUid uid, const Status& verdict) {
  if (const Group group = find(uid)) runtime_.worker().fail_group(*group->state, verdict, /*tell=*/false);
}

void Groups::not_joined(GroupCore& group, const Status& status) {
  group.is_joining = false;
  // This rank may have confirmed the roster, and other members may have the roster already: they find the verdict in
  // the Store. A named life has no older verdict under its key.
  if (!group.options.expected.empty() && group.options.size > 1) board_.post(location_of(group), status);
  fail(group, status);
  give_up_goodbye(group);
}

void Groups::abort(GroupCore& group, const std::string& reason) {
  const Status status(Code::kAborted, reason);
  if (group.state != nullptr) runtime_.worker().fail_group(*group.state, status, /*tell=*/true);
  fail(group, status);
}

void Groups::give_up_superseded(core::TimePoint now) {
  give_up_due_ = core::TimePoint::max();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    GroupCore& group = *groups_[i];
    if (group.goodbye_done) continue;
    if (now < group.give_up_at) {
      give_up_due_ = std::min(give_up_due_, group.give_up_at);
      continue;
    }
    group.give_up_at = core::TimePoint::max();
    abort(group, group.superseded);
  }
}

std::size_t Groups::tick() {
  if (give_up_due_ != core::TimePoint::max())
    if (const core::TimePoint now = core::Clock::now(); now >= give_up_due_) give_up_superseded(now);
  std::size_t work = has_ending_ ? close_finished() : 0;
  if (const core::TimePoint now = runtime_.now(); now >= joins_due_) {
    joins_due_ = now + kLateEvery;
    for (std::size_t i = 0; i < groups_.size(); ++i) {
      if (!groups_[i]->joins) continue;
      work += groups_[i]->joins->tick(now);
      if (groups_[i]->awaits_servers) joins_due_ = now;
    }
  }
  if (queued_due_ != core::TimePoint::max()) work += expire_queued(core::Clock::now());
  if (joining_due_ != core::TimePoint::max()) work += expire_joining(core::Clock::now());
  return work;
}

std::chrono::milliseconds Groups::sleep_at_most() const {
  for (const Group& group : groups_)
    if (group->joins && group->awaits_servers) return kStartEvery;
  if (has_ending_) return std::chrono::milliseconds(20);
  constexpr std::chrono::milliseconds kUsual(100);
  if (queued_due_ == core::TimePoint::max()) return kUsual;
  const auto left = std::chrono::ceil<std::chrono::milliseconds>(queued_due_ - core::Clock::now());
  return std::clamp(left, std::chrono::milliseconds(0), kUsual);
}

bool Groups::has_failed_leaver() const {
  return std::any_of(groups_.begin(), groups_.end(),
                     [](const Group& group) { return group->goodbye_wanted && group->last_failed; });
}

void Groups::close_left() {
  for (const Group& group : groups_)
    if (group->goodbye_wanted) close(*group);
}

void Groups::close_all() {
  for (const Group& group : groups_) close(*group);
  groups_.clear();
}

Groups::Group Groups::find(core::GroupUid uid) const {
  for (const auto& group : groups_)
    if (group->state != nullptr && group->uid == uid) return group;
  return nullptr;
}

void Groups::submit(const Group& group, worker::Operation operation, std::uint64_t sequence, worker::Completion done) {
  if (!group->takes_operations()) {
    Status status;
    {
      const std::lock_guard lock(group->mutex);
      status = group->status;
    }
    if (status.is_ok() && !group->closed) {
      if (operation.timeout.count() > 0)
        queued_due_ = std::min(queued_due_, core::Deadline::after(operation.timeout, operation.issued_at).point());
      group->queued.push_back({std::move(operation), sequence, std::move(done)});
    } else {
      done(worker::Outcome{status.is_ok() ? Status(Code::kClosed, "the group was destroyed") : status, -1});
    }
    return;
  }
  const bool counted = operation.kind != schedule::Kind::kPointToPoint;
  runtime_.worker().submit(*group->state, std::move(operation), sequence,
                           [group, counted, d = std::move(done)](const worker::Outcome& outcome) mutable {
                             if (counted) group->completed.fetch_add(1);
                             group->last_failed = !outcome.status.is_ok();
                             d(outcome);
                           });
}

void Groups::reserve(GroupCore& group, std::uint64_t sequence) {
  if (group.takes_operations())
    runtime_.worker().reserve(*group.state, sequence);
  else
    group.reserved_early.push_back(sequence);
}

void Groups::fail(GroupCore& group, const Status& status) {
  {
    const std::lock_guard lock(group.mutex);
    if (!group.status.is_ok()) return;
    group.status = status;
  }
  group.changed.notify_all();
  for (auto queued = std::exchange(group.queued, {}); auto& item : queued)
    if (item.done) item.done(worker::Outcome{status, -1});
  if (group.awaits_servers) start(find(group.uid));
  if (group.state != nullptr) return;
  group.last_failed = true;
  // Without a roster this rank can send the abort to nobody. If this engine ends before it has a roster, the Store has
  // the abort: the Joiner writes it for members without a roster, and the board for the other members.
  if (status.code() == Code::kAborted && group.options.size > 1) {
    group.given_up.store(true);
    board_.post(location_of(group), status);
  }
  give_up_goodbye(group);
}

worker::GroupInfo Groups::info_of(GroupCore& group) {
  const bootstrap::Roster& roster = group.roster;
  const int me = group.options.rank;
  const int my_node = roster.node_of[static_cast<std::size_t>(me)];
  worker::GroupInfo info{roster.uid, group.options.name, {}, topology_of(roster, me)};
  info.coded_or_joined = group.coded_or_joined;
  std::vector<schedule::Member> members;
  const auto add = [&](const bootstrap::MemberRecord& member, bool local) {
    members.push_back({member.engine, process_text(member)});
    if (member.engine != self_) runtime_.add_peer(peer_record(member, members.back().host, local));
  };
  for (int rank = 0; rank < roster.size(); ++rank)
    add(roster.members[static_cast<std::size_t>(rank)], roster.node_of[static_cast<std::size_t>(rank)] == my_node);
  info.members = schedule::Members(std::move(members));
  // Only the world may tune settings of the whole process.
  if (group.options.is_world) info.tuning = tuning_;
  set_sizes(info, roster);
  info.residual_bytes_max = config_.compress_memory;
  info.may_pack = packing_of(roster);
  info.packs_from = config_.compress_min_bytes;
  info.is_reconfigurable = !group.options.life.empty();
  if (me == 0 && may_have_servers(roster))
    info.weights_with = [core = &group](const std::vector<bool>& are_there) {
      return core->joins->weights_with(are_there);
    };
  return info;
}

void Groups::set_sizes(worker::GroupInfo& info, const bootstrap::Roster& roster) const {
  const core::Config usual;
  info.tuning.chunks = chunk_sizes(roster, info.topology);
  info.tuning.chunk_bytes_usual = schedule::chunk_bytes_for(info.topology, usual.chunk_bytes);
  info.tuning.sockets_usual = static_cast<int>(usual.data_sockets);
  info.tuning.window_doublings = schedule::window_doublings(config_.window_bytes, core::Config::kWindowBytesUsual,
                                                            config_.eager_bytes * info.topology.fan());
}

void Groups::introduce(const bootstrap::MemberRecord& server) {
  runtime_.add_peer(peer_record(server, process_text(server), /*local=*/false));
}

core::Result<int> Groups::may_meet(core::GroupUid uid, const std::vector<bootstrap::MemberRecord>& newcomers) const {
  const auto found =
      std::find_if(groups_.begin(), groups_.end(), [uid](const Group& group) { return group->uid == uid; });
  if (found == groups_.end()) return schedule::kNoRegion;
  bootstrap::Roster roster = (*found)->roster;
  if (!may_have_servers(roster)) return Status(Code::kMismatch, "its rank 0 named no dedicated servers");
  roster.servers.insert(roster.servers.end(), newcomers.begin(), newcomers.end());
  if (Status status = check_ ? check_(roster, (*found)->options.rank) : Status::ok(); !status.is_ok()) return status;
  return region_of_server(roster, newcomers.back());
}

// In a group that has not started, the servers count as there from the beginning. So the topology and the sizes, which
// have no plan versions, are set anew.
void Groups::on_servers_joined(GroupCore& group, std::vector<bootstrap::MemberRecord> servers) {
  bootstrap::Roster& roster = group.roster;
  std::move(servers.begin(), servers.end(), std::back_inserter(roster.servers));
  if (!group.awaits_servers) return;
  worker::GroupInfo& info = group.state->info;
  info.topology = topology_of(roster, group.options.rank);
  set_sizes(info, roster);
}

void Groups::open(const Group& group, const bootstrap::Roster& roster) {
  group->is_joining = false;
  if (group->closed) {
    runtime_.forget_group(roster.uid);
    return;
  }
  group->uid = roster.uid;
  group->roster = roster;
  worker::GroupInfo info = info_of(*group);
  auto codecs = codecs_of(roster);
  if (codecs.is_ok()) info.codecs = codecs.value();
  if (info.codecs != nullptr && info.codecs->spec().scope == compress::CodecScope::kRegions &&
      info.topology.regions() > 1)
    info.coded_or_joined->need_elements();
  Status status;
  {
    const std::lock_guard lock(group->mutex);
    group->opening = true;
    status = group->status;
  }
  group->state = &runtime_.open_group(std::move(info));
  if (group->options.is_world || !group->options.life.empty()) runtime_.dial_nodes(*group->state);
  // All members find the same disagreement in the roster. So this rank tells nobody.
  Status disagreement;
  for (const Status& found : {codecs.status(), check_priorities(roster), check_regions(roster)}) {
    if (found.is_ok()) continue;
    runtime_.worker().fail_group(*group->state, found, /*tell=*/false);
    if (disagreement.is_ok()) disagreement = found;
  }
  {
    const std::lock_guard lock(group->mutex);
    group->node_of = roster.node_of;
    group->disagreement = std::move(disagreement);
  }
  group->awaits_servers = may_have_servers(roster) && status.is_ok() && group->state->status.is_ok() &&
                          !group->state->newcomers->has_started();
  if (group->options.rank == 0 && may_have_servers(roster))
    group->joins = std::make_unique<ServerJoins>(
        servers_, group->roster, *group->state,
        group->awaits_servers ? ServerJoins::GroupStart::kAwaitsServers : ServerJoins::GroupStart::kIsOver,
        timeout_of(group->options), [this, core = group.get()](const Status& why) {
          runtime_.worker().fail_group(*core->state, why, /*tell=*/true);
        });
  joins_due_ = {};
  if (!group->awaits_servers) start(group);
}

void Groups::start(const Group& group) {
  group->awaits_servers = false;
  const int me = group->options.rank;
  SummaryOptions summary_options = summary_;
  summary_options.servers_wanted = group->options.dedicated_servers;
  GroupSummary summary = summarise(group->roster, group->state->info.topology, summary_options);
  Status status;
  {
    const std::lock_guard lock(group->mutex);
    status = group->status;
    // The Runtime may have failed the group at its opening: a member is dead, for example. Whoever waits for the group
    // must see the failure together with `ready`.
    if (status.is_ok()) group->status = group->state->status;
    group->ready = true;
    group->summary = std::move(summary);
  }
  if (me == 0) tell_of(*group);
  group->changed.notify_all();
  // The group failed here while it was being made. The other members waited for this rank, and now hear of the failure.
  if (!status.is_ok()) runtime_.worker().fail_group(*group->state, status, /*tell=*/true);
  if (!may_have_servers(group->roster)) group->roster = {};  // nobody reads the roster from now on
  for (const std::uint64_t sequence : std::exchange(group->reserved_early, {}))
    runtime_.worker().reserve(*group->state, sequence);
  for (auto queued = std::exchange(group->queued, {}); auto& item : queued) {
    if (item.done) {
      submit(group, std::move(item.operation), item.sequence, std::move(item.done));
    } else if (item.operation.kind != schedule::Kind::kPointToPoint) {
      runtime_.worker().submit_failed(
          *group->state, std::move(item.operation), item.sequence,
          Status(Code::kTimeout, "rank " + std::to_string(me) + " gave it up before the group was complete"));
      group->completed.fetch_add(1);
    }
  }
  if (group->goodbye_wanted) send_goodbye(group);
}

// Logs the summary of a group. Only rank 0 calls this: the summary is the same on all ranks.
void Groups::tell_of(const GroupCore& group) const {
  const bootstrap::Roster& roster = group.roster;
  const std::string& text = group.summary.text;
  if (!group.options.is_world) {
    core::log_debug("group ", core::quoted(group.options.name), ": ", text);
    return;
  }
  for (const std::string& complaint : complaints_of(roster)) core::log_warn(complaint);
  core::log_info("hybridps ", build_info::kVersion, ": ", text);
  // The user asked for dedicated servers and gets none: worth a warning. ServerJoins has warned of servers that failed.
  if (summary_.servers_named > 0 && roster.servers.empty() && roster.node_count() < summary_.servers_nodes_min &&
      group.options.size > 1)
    core::log_warn("HYBRIDPS_SERVERS is not used by this job of ", roster.node_count(),
                   " nodes: ", group.summary.servers_why, " (docs/dedicated-servers.md)");
}

void Groups::want_goodbye(const Group& group) {
  group->goodbye_wanted = true;
  if (group->takes_operations())
    send_goodbye(group);
  else
    give_up_goodbye(*group);
}

void Groups::supersede(const Group& group, const std::string& reason) {
  if (group->closed) return;
  const worker::GroupState* const state = group->state;
  std::uint64_t submitted = 0;
  {
    const std::lock_guard lock(group->mutex);
    submitted = group->submitted;
  }
  // `submitted` includes reserved operations: for those, a device's stream has not reached the operation yet.
  const bool idle = state != nullptr && group->completed.load() == submitted && state->p2p->active().empty();
  if (!idle) abort(*group, reason);
  if (state == nullptr) group->abandoned.store(true);
  group->superseded = reason;
  group->give_up_at = core::Clock::now() + kLinger;
  give_up_due_ = std::min(give_up_due_, group->give_up_at);
  want_goodbye(group);
}

void Groups::give_up_goodbye(GroupCore& group) {
  if (!group.goodbye_wanted || group.is_joining || group.state != nullptr) return;
  const std::lock_guard lock(group.mutex);
  if (!group.status.is_ok()) group.goodbye_done = has_ending_ = true;
}

void Groups::send_goodbye(const Group& group) {
  if (std::exchange(group->goodbye_sent, true)) return;
  has_ending_ = true;
  worker::Operation goodbye;
  goodbye.kind = schedule::Kind::kGoodbye;
  std::uint64_t sequence = 0;
  {
    const std::lock_guard lock(group->mutex);
    sequence = group->submitted++;
  }
  runtime_.worker().submit(*group->state, std::move(goodbye), sequence,
                           [group](const worker::Outcome&) { group->goodbye_done = true; });
}

void Groups::close(GroupCore& group) {
  if (std::exchange(group.closed, true)) return;
  has_ending_ = true;
  if (group.state != nullptr) {
    group.joins.reset();
    group.state = nullptr;
    runtime_.close_group(group.uid);
  }
  if (std::exchange(group.awaits_servers, false)) {
    const std::lock_guard lock(group.mutex);
    group.opening = false;
  }
  fail(group, Status(Code::kClosed, "the group was destroyed"));
  closed_();
}

std::size_t Groups::expire_queued(core::TimePoint now) {
  if (now < queued_due_) return 0;
  std::size_t work = 0;
  queued_due_ = core::TimePoint::max();
  for (const auto& group : groups_) {
    bool expired = false;
    for (auto& item : group->queued) {
      if (!item.done || item.operation.timeout.count() <= 0) continue;
      const core::Deadline deadline = core::Deadline::after(item.operation.timeout, item.operation.issued_at);
      if (!deadline.has_passed(now)) {
        queued_due_ = std::min(queued_due_, deadline.point());
        continue;
      }
      std::string missing;
      {
        const std::lock_guard lock(group->mutex);
        missing = group->waiting_for;
      }
      if (group->awaits_servers) missing = kAwaitsServers;
      if (missing.empty() && now < deadline.point() + kLookFor) {
        group->look_wanted.store(true);
        queued_due_ = std::min(queued_due_, deadline.point() + kLookFor);
        continue;
      }
      std::string text = "timed out after " + core::format_seconds(core::to_seconds(item.operation.timeout)) +
                         ", before the group was complete";
      if (!missing.empty()) text += ": " + missing;
      expired = true;
      text += group->awaits_servers
                  ? ". What to do: see whether the servers of HYBRIDPS_SERVERS answer, or pass a longer timeout"
                  : ". What to do: see whether these ranks are alive and make the same group, or pass a longer timeout";
      ++work;
      group->last_failed = true;
      std::exchange(item.done, {})(worker::Outcome{Status(Code::kTimeout, std::move(text)), -1});
    }
    if (expired) {  // the next expired operation asks anew
      const std::lock_guard lock(group->mutex);
      group->waiting_for.clear();
    }
  }
  return work;
}

std::size_t Groups::expire_joining(core::TimePoint now) {
  if (now < joining_due_) return 0;
  std::size_t work = 0;
  joining_due_ = core::TimePoint::max();
  for (std::size_t i = 0; i < groups_.size(); ++i) {
    const Group group = groups_[i];
    if (!group->is_joining) continue;
    if (group->joining_until <= now)
      group->joining_until = std::max(group->joining_until, group->store_answered.load() + kStoreAnswersWithin);
    if (now < group->joining_until) {
      joining_due_ = std::min(joining_due_, group->joining_until);
      continue;
    }
    ++work;
    not_joined(*group,
               Status(Code::kTimeout,
                      "rank " + std::to_string(group->options.rank) + " timed out after " +
                          core::format_seconds(core::to_seconds(now - group->options.since)) +
                          " in the rendezvous of group " + core::quoted(group->options.name) +
                          ": the Store has not answered. What to do: see whether the process that hosts it (often "
                          "rank 0, or torchrun's agent) is stopped, or its host out of reach"));
    group->abandoned.store(true);  // the Store may still answer later
  }
  return work;
}

std::size_t Groups::close_finished() {
  std::size_t work = 0;
  has_ending_ = false;
  for (std::size_t i = 0; i < groups_.size();) {
    GroupCore& group = *groups_[i];
    bool waits = false;
    if (group.state != nullptr && group.goodbye_done && !group.closed) {
      // After a failure another member may be opening a connection to tell us. So this rank stays for members that do
      // not know yet that this rank knows of the failure.
      waits = group.state->status.is_ok() ? group.state->p2p->has_unacknowledged()
                                          : runtime_.has_unanswered_verdicts() ||
                                                (core::Clock::now() - group.state->failed_at < kStayAfterFailure &&
                                                 !runtime_.all_know_of_failure(*group.state));
    }
    if (!group.closed && !(group.goodbye_done && !waits)) {
      has_ending_ |= group.goodbye_sent || group.goodbye_done;
      ++i;
      continue;
    }
    close(group);
    groups_.erase(groups_.begin() + static_cast<std::ptrdiff_t>(i));
    ++work;
  }
  return work;
}

}  // namespace hybridps::engine
