#include "hybridps/engine/server_joins.h"

#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/mutex.h"
#include "hybridps/core/thread.h"
#include "hybridps/engine/records.h"

namespace hybridps::engine {
namespace {

using bootstrap::MemberRecord;
using core::Code;
using core::Status;

// How long to wait for a helper thread that gives no answer.
constexpr auto kNoAnswerAfter = std::chrono::seconds(60);
// Groups that start together may give up each other's new engines.
constexpr int kGivenUpMax = 4;

std::string name_of(const admission::Address& address) { return "the dedicated server " + address.text(); }

}  // namespace

struct ServerJoins::Asking {
  core::Mutex mutex;
  std::optional<core::Result<std::vector<MemberRecord>>> found HYBRIDPS_GUARDED_BY(mutex);
  std::optional<Status> opened HYBRIDPS_GUARDED_BY(mutex);
};

ServerJoins::ServerJoins(ServerJoinsOptions options, const bootstrap::Roster& roster, worker::GroupState& group,
                         GroupStart start, core::TimePoint start_until, std::function<void(const Status&)> fail)
    : options_(std::move(options)),
      roster_(roster),
      group_(group),
      fail_(std::move(fail)),
      is_starting_(start == GroupStart::kAwaitsServers),
      start_until_(start_until) {
  for (const admission::Address& address : options_.addresses) {
    PolledAddress& place = places_.emplace_back();
    place.address = address;
    place.next = core::Clock::now() + options_.retry;
  }
}

ServerJoins::~ServerJoins() {
  for (PolledAddress& place : places_) give_up(place);
}

std::vector<MemberRecord> ServerJoins::newcomers() const {
  std::vector<MemberRecord> all;
  for (const PolledAddress& place : places_)
    if (place.step == AddressStep::kOpening || place.step == AddressStep::kOpened)
      all.insert(all.end(), place.newcomers.begin(), place.newcomers.end());
  return all;
}

bootstrap::Roster ServerJoins::with_newcomers() const {
  bootstrap::Roster all = roster_;
  const std::vector<MemberRecord> added = newcomers();
  all.servers.insert(all.servers.end(), added.begin(), added.end());
  return all;
}

std::vector<double> ServerJoins::weights_with(const std::vector<bool>& are_there) const {
  return engine::weights_with(with_newcomers(), are_there);
}

bool ServerJoins::has(core::EngineId engine) const {
  const std::optional<int> member = group_.info.members.find(engine);
  return member && group_.info.topology.is_dedicated(*member) && !group_.servers.is_gone(*member);
}

bool ServerJoins::has_given_up(core::EngineId engine) const {
  return given_up_.count(engine) > 0 || (group_.info.members.find(engine) && !has(engine));
}

bool ServerJoins::any_in(AddressStep step) const {
  return std::any_of(places_.begin(), places_.end(), [step](const PolledAddress& place) { return place.step == step; });
}

std::size_t ServerJoins::tick(core::TimePoint now) {
  if (!group_.status.is_ok())
    for (PolledAddress& place : places_) give_up(place);
  if (!group_.status.is_ok() || group_.leaving) return 0;
  if (is_starting_ && now >= start_until_ && !joined_) return end_start();
  if (joined_) {
    if (*joined_) on_joined();
    return 0;
  }
  const auto is_asking = [this] { return any_in(AddressStep::kFinding) || any_in(AddressStep::kRenewing); };
  std::size_t work = 0;
  if (is_asking()) {
    for (PolledAddress& place : places_)
      if (place.step == AddressStep::kFinding || place.step == AddressStep::kRenewing) work += on_found(place);
    if (!is_asking()) open_found();
    return work;
  }
  if (any_in(AddressStep::kOpening)) {
    for (PolledAddress& place : places_)
      if (place.step == AddressStep::kOpening) work += on_opened(place);
    if (!any_in(AddressStep::kOpening)) take_in_opened();
    return work;
  }
  return is_starting_ ? begin_start() : begin_round(now);
}

// --- a round ---------------------------------------------------------------------------------------------------------

std::size_t ServerJoins::begin_start() {
  for (PolledAddress& place : places_)
    if (!place.left_out) ask(place, AddressStep::kFinding, {});
  return any_in(AddressStep::kFinding) ? 1 : end_start();
}

std::size_t ServerJoins::end_start() {
  for (PolledAddress& place : places_)
    if (!place.left_out)
      try_later(place, Answers::kNo,
                Status(Code::kTimeout, name_of(place.address) + " has not joined within the group's timeout"));
  end_round();
  is_starting_ = false;
  if (group_.status.is_ok()) group_.newcomers->start_without();
  return 1;
}

std::size_t ServerJoins::begin_round(core::TimePoint now) {
  if (options_.retry == core::Duration::zero()) return 0;
  for (PolledAddress& place : places_) {
    if (place.has_all) {
      if (std::all_of(place.engines.begin(), place.engines.end(), [&](core::EngineId engine) { return has(engine); }))
        continue;
      place.has_all = false;
      place.pause = 1;
      place.next = now + options_.retry;
    }
    if (now < place.next) continue;
    ask(place, AddressStep::kFinding, {});
    return 1;
  }
  return 0;
}

void ServerJoins::end_round() {
  for (PolledAddress& place : places_) {
    place.step = AddressStep::kIdle;
    place.newcomers.clear();
  }
  joined_.reset();
}

// The loop never waits. If no helper thread can start, the address is tried again later.
template <typename Task>
void ServerJoins::ask_by_thread(PolledAddress& place, AddressStep step, Task task) {
  place.step = step;
  place.asking = std::make_shared<Asking>();
  place.no_answer_at = core::Clock::now() + kNoAnswerAfter;
  if (!core::run_detached("hybridps-ask", [asking = place.asking, task = std::move(task)] { task(*asking); }))
    try_later(place, Answers::kNo, Status(Code::kOutOfResources, "no thread"));
}

void ServerJoins::ask(PolledAddress& place, AddressStep step, ServerRequest request) {
  ask_by_thread(place, step,
                [address = place.address, secret = options_.secret, r = std::move(request)](Asking& asking) {
                  core::Result<std::vector<MemberRecord>> found = find_server(address, secret, r);
                  const core::MutexLock lock(asking.mutex);
                  asking.found = std::move(found);
                });
}

std::size_t ServerJoins::on_found(PolledAddress& place) {
  std::optional<core::Result<std::vector<MemberRecord>>> found;
  {
    const core::MutexLock lock(place.asking->mutex);
    found = std::move(place.asking->found);
  }
  if (!found) {
    if (core::Clock::now() >= place.no_answer_at) try_later(place, Answers::kNo, Status(Code::kTimeout, "no answer"));
    return 0;
  }
  if (!found->is_ok()) {
    const Code code = found->status().code();
    const bool answers = code == Code::kMismatch || code == Code::kInvalidArgument;
    try_later(place, answers ? Answers::kYes : Answers::kNo, found->status());
    return 1;
  }
  place.engines.clear();
  place.newcomers.clear();
  ServerRequest renew;
  renew.kind = ServerRequest::RequestKind::kRenew;
  renew.uid = group_.info.uid;
  for (MemberRecord& record : found->value()) {
    place.engines.push_back(record.engine);
    if (has(record.engine)) continue;
    if (has_given_up(record.engine)) renew.engines.push_back(record.engine);
    place.newcomers.push_back(std::move(record));
  }
  if (!renew.engines.empty()) {
    if (place.step == AddressStep::kRenewing)
      try_later(place, Answers::kNo, Status(Code::kPeerDead, "it has no other engine"));
    else
      ask(place, AddressStep::kRenewing, std::move(renew));
    return 1;
  }
  place.has_all = place.newcomers.empty();
  place.step = place.has_all ? AddressStep::kIdle : AddressStep::kFound;
  return 1;
}

Status ServerJoins::check(const PolledAddress& place) const {
  const auto is_other = [&](const PolledAddress& other) {
    return &other < &place && other.step == AddressStep::kOpening &&
           other.newcomers.front().engine == place.newcomers.front().engine;
  };
  if (std::any_of(places_.begin(), places_.end(), is_other))
    return Status(Code::kInvalidArgument, name_of(place.address) + " is named twice under different addresses");
  if (Status useless = check_server(roster_, place.newcomers, place.address.text()); !useless.is_ok()) return useless;
  if (roster_.servers.size() + newcomers().size() + place.newcomers.size() > bootstrap::kServersMax)
    return Status(Code::kOutOfResources, name_of(place.address) + " would be more than the " +
                                             std::to_string(bootstrap::kServersMax) +
                                             " that a group may have had: make a new group");
  return check_room(place);
}

// At the start the servers take part in choosing the chunk sizes; each must have room for one block of the codec.
// A server that joins later must have room for the group's existing chunk sizes.
Status ServerJoins::check_room(const PolledAddress& place) const {
  const worker::GroupInfo& info = group_.info;
  const schedule::ChunkSizes& chunks = info.tuning.chunks;
  if (is_starting_) {
    const std::uint64_t block = info.codecs != nullptr ? block_bytes(*info.codecs) : 0;
    for (const MemberRecord& server : place.newcomers)
      if (server.chunk_bytes < block)
        return Status(Code::kInvalidArgument,
                      name_of(place.address) + " has room for coded chunks of " + std::to_string(server.chunk_bytes) +
                          " bytes, and compression '" + roster_.members.front().compress + "' has blocks of " +
                          std::to_string(block) + "; start it with a larger HYBRIDPS_LIMITS=chunk_bytes");
    return Status::ok();
  }
  std::uint64_t needs = chunks.usual;
  if (info.codecs != nullptr) needs = std::max(needs, chunks.coded);
  if (group_.plans->tuner() != nullptr) needs = std::max<std::uint64_t>(needs, chunks.room);
  for (const MemberRecord& server : place.newcomers)
    if (std::max(server.chunk_bytes, server.chunk_bytes_max) < needs)
      return Status(Code::kInvalidArgument,
                    name_of(place.address) + " has room for chunks of " +
                        std::to_string(std::max(server.chunk_bytes, server.chunk_bytes_max)) +
                        " bytes, and those of the group may have " + std::to_string(needs) +
                        "; start it with the same HYBRIDPS_LIMITS=chunk_bytes and HYBRIDPS_TUNE as the ranks");
  return Status::ok();
}

void ServerJoins::open_found() {
  asked_ = 0;
  for (PolledAddress& place : places_) {
    if (place.step != AddressStep::kFound) continue;
    if (const Status useless = check(place); !useless.is_ok()) {
      try_later(place, Answers::kYes, useless);
      continue;
    }
    place.step = AddressStep::kOpening;
    for (MemberRecord& record : place.newcomers) record.group_rank = static_cast<int>(asked_++);
  }
  if (!group_.status.is_ok()) return;  // a required server is missing
  if (asked_ == 0) {
    end_round();
    return;
  }
  for (PolledAddress& place : places_)
    for (MemberRecord& record : place.newcomers) record.group_size = static_cast<int>(asked_);
  ServerRequest request;
  request.kind = ServerRequest::RequestKind::kOpen;
  request.group_name = group_.info.name;
  request.roster = roster_;
  request.roster->servers = newcomers();
  request.attempt = ++attempt_;
  request.before = static_cast<std::uint32_t>(roster_.servers.size());
  request.chunks = group_.info.tuning.chunks;
  if (is_starting_) {
    const bootstrap::Roster all = with_newcomers();
    request.chunks = chunk_sizes(all, topology_of(all, 0));
  }
  if (options_.introduce)
    for (const MemberRecord& server : request.roster->servers) options_.introduce(server);
  const auto body = std::make_shared<const bootstrap::Bytes>(encode(request));
  for (PolledAddress& place : places_) {
    if (place.step != AddressStep::kOpening) continue;
    place.has_open = true;  // true until the server says otherwise
    ask_by_thread(place, AddressStep::kOpening,
                  [address = place.address, secret = options_.secret, body](Asking& asking) {
                    const core::Result<bootstrap::Bytes> answer =
                        admission::ask(address, secret, *body, core::Deadline::after(kServerAnswersWithin));
                    const core::MutexLock lock(asking.mutex);
                    asking.opened = answer.is_ok() ? Status::ok() : answer.status();
                  });
  }
}

std::size_t ServerJoins::on_opened(PolledAddress& place) {
  std::optional<Status> opened;
  {
    const core::MutexLock lock(place.asking->mutex);
    opened = place.asking->opened;
  }
  if (!opened && core::Clock::now() >= place.no_answer_at) opened = Status(Code::kTimeout, "no answer");
  if (!opened) return 0;
  place.opened = *std::move(opened);
  place.step = AddressStep::kOpened;
  return 1;
}

void ServerJoins::take_in_opened() {
  bool asks_again = false;
  for (PolledAddress& place : places_) {
    if (place.step != AddressStep::kOpened || place.opened.is_ok()) continue;
    // If the server has refused, none of its engines has the group open, unless an earlier attempt opened it.
    const Code code = place.opened.code();
    if (code != Code::kTimeout && code != Code::kPeerDead && !place.was_open) place.has_open = false;
    if (code == Code::kAborted && ++place.given_up_engines <= kGivenUpMax) {  // another job had an engine replaced
      place.has_open = place.was_open = false;  // it has closed the group on all its engines
      ask(place, AddressStep::kFinding, {});
      asks_again = true;
      continue;
    }
    try_later(place, Answers::kYes, place.opened);
  }
  if (!group_.status.is_ok()) return;  // a required server is missing
  const std::vector<MemberRecord> opened = newcomers();
  if (opened.size() < asked_) {  // some failed, so the others need new numbers; no rank knows these servers yet
    for (PolledAddress& place : places_) {
      if (place.step != AddressStep::kOpened) continue;
      place.step = AddressStep::kFound;
      place.was_open = true;
    }
    if (!asks_again) open_found();
    return;
  }
  std::vector<std::string> records;
  for (const MemberRecord& record : opened) {
    const core::Result<bootstrap::Bytes> bytes = bootstrap::encode(record);
    records.emplace_back(bytes.is_ok() ? std::string(bytes.value().begin(), bytes.value().end()) : std::string());
  }
  joined_ = std::make_shared<std::optional<worker::JoinOutcome>>();
  group_.newcomers->take_in(records, [joined = joined_](const worker::JoinOutcome& outcome) { *joined = outcome; });
}

void ServerJoins::on_joined() {
  const worker::JoinOutcome outcome = **joined_;
  std::size_t before = 0;
  for (PolledAddress& place : places_) {
    if (place.step != AddressStep::kOpened) continue;
    const std::size_t first = std::exchange(before, before + place.newcomers.size());
    if (outcome.status.is_ok()) {
      place.has_all = true;
      place.has_open = place.was_open = false;
      place.given_up_engines = 0;
      place.complaint.clear();
      continue;
    }
    give_up(place);
    const bool is_cause = outcome.server && *outcome.server >= first && *outcome.server < before;
    if (is_cause && outcome.given_up && ++place.given_up_engines <= kGivenUpMax) {
      core::log_debug("group \"", group_.info.name, "\" asks ", name_of(place.address),
                      " for another engine: ", outcome.status.message());
      place.next = core::Clock::now() + options_.retry;
    } else if (!outcome.server || is_cause) {
      try_later(place, Answers::kYes,
                Status(outcome.status.code(),
                       name_of(place.address) + " does not join: " + std::string(outcome.status.message())));
    }
  }
  if (outcome.status.is_ok()) is_starting_ = false;
  end_round();
}

// Closes the group at newcomers that have it open, or may open it soon, and will not be used.
void ServerJoins::give_up(PolledAddress& place) {
  place.was_open = false;
  if (!std::exchange(place.has_open, false)) return;
  ServerRequest request;
  request.kind = ServerRequest::RequestKind::kClose;
  request.uid = group_.info.uid;
  for (const MemberRecord& record : place.newcomers) {
    given_up_.insert(record.engine);
    request.engines.push_back(record.engine);
  }
  // If no thread can start, the server keeps the group open until the group ends.
  (void)core::run_detached("hybridps-ask", [address = place.address, secret = options_.secret, body = encode(request)] {
    (void)admission::ask(address, secret, body, core::Deadline::after(kServerAnswersWithin));
  });
}

void ServerJoins::try_later(PolledAddress& place, Answers answers, const Status& why) {
  give_up(place);
  place.step = AddressStep::kIdle;
  const std::string text(why.message());
  const bool is_news = std::exchange(place.complaint, text) != text;
  if (is_starting_ && options_.required)
    fail_(Status(why.code(), text + " (HYBRIDPS_SERVERS_REQUIRED is on)"));
  else if ((is_starting_ || answers == Answers::kYes) && is_news)
    core::log_warn("group \"", group_.info.name, "\" goes on without a dedicated server: ", text);
  else
    core::log_debug("group \"", group_.info.name, "\": ", text);
  place.left_out = true;
  place.given_up_engines = 0;
  place.pause = answers == Answers::kYes ? kPauseMax : std::min(2 * place.pause, kPauseMax);
  place.next = core::Clock::now() + place.pause * options_.retry;
}

}  // namespace hybridps::engine
