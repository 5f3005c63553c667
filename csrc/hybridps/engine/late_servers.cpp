#include "hybridps/engine/late_servers.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"
#include "hybridps/engine/records.h"

namespace hybridps::engine {
namespace {

using bootstrap::MemberRecord;
using core::Code;
using core::Status;

constexpr auto kPatience = std::chrono::seconds(10);

// For a thread that was started and gives no answer.
constexpr auto kNoAnswerAfter = std::chrono::seconds(60);

}  // namespace

struct LateServers::Asking {
  std::mutex mutex;
  std::optional<core::Result<std::vector<MemberRecord>>> found;
  std::optional<Status> opened;
};

LateServers::LateServers(LateServersOptions options, bootstrap::Roster roster, worker::GroupState& group)
    : options_(std::move(options)), roster_(std::move(roster)), group_(group) {
  for (const door::Address& address : options_.addresses)
    places_.push_back({address, {}, false, core::Clock::now() + options_.retry, 1, {}});
}

LateServers::~LateServers() {
  if (phase_ == JoinPhase::kOpening || phase_ == JoinPhase::kJoining) give_up();
}

std::vector<double> LateServers::weights_with(const std::vector<bool>& are_there) const {
  bootstrap::Roster all = roster_;
  all.servers.insert(all.servers.end(), newcomers_.begin(), newcomers_.end());
  return engine::weights_with(std::move(all), are_there);
}

bool LateServers::has(core::EngineId engine) const {
  const auto& engines = group_.info.engines;
  const auto found = std::find(engines.begin() + group_.info.topology.size(), engines.end(), engine);
  return found != engines.end() && !group_.servers.is_gone(static_cast<int>(found - engines.begin()));
}

bool LateServers::has_given_up(core::EngineId engine) const {
  const auto& engines = group_.info.engines;
  return given_up_.count(engine) > 0 || (std::find(engines.begin(), engines.end(), engine) != engines.end() && !has(engine));
}

std::size_t LateServers::tick(core::TimePoint now) {
  if (!group_.status.is_ok() || group_.leaving) return 0;
  PolledAddress& place = places_[busy_];
  switch (phase_) {
    case JoinPhase::kIdle:
      break;
    case JoinPhase::kFinding:
    case JoinPhase::kRenewing:
      return on_found(place);
    case JoinPhase::kOpening:
      on_opened(place);
      return 0;
    case JoinPhase::kJoining:
      if (*joined_) on_joined(place);
      return 0;
  }
  for (std::size_t i = 0; i < places_.size(); ++i) {
    PolledAddress& one = places_[i];
    if (one.has_all) {
      if (std::all_of(one.engines.begin(), one.engines.end(), [&](core::EngineId engine) { return has(engine); })) continue;
      one.has_all = false;
      one.pause = 1;
      one.next = now + options_.retry;
    }
    if (now < one.next) continue;
    busy_ = i;
    phase_ = JoinPhase::kFinding;
    ask(one, {});
    return 1;
  }
  return 0;
}

// The loop waits for nobody: where no thread can be had, it is tried later.
template <typename Task>
void LateServers::start(PolledAddress& place, Task task) {
  asking_ = std::make_shared<Asking>();
  no_answer_at_ = core::Clock::now() + kNoAnswerAfter;
  if (!core::run_detached("hybridps-ask", [asking = asking_, task = std::move(task)] { task(*asking); }))
    try_later(place, Answers::kNo, Status(Code::kOutOfResources, "no thread"));
}

void LateServers::ask(PolledAddress& place, ServerRequest request) {
  start(place, [address = place.address, token = options_.token, r = std::move(request)](Asking& asking) {
    core::Result<std::vector<MemberRecord>> found = find_server(address, token, r);
    const std::lock_guard lock(asking.mutex);
    asking.found = std::move(found);
  });
}

std::size_t LateServers::on_found(PolledAddress& place) {
  std::optional<core::Result<std::vector<MemberRecord>>> found;
  {
    const std::lock_guard lock(asking_->mutex);
    found = std::move(asking_->found);
  }
  if (!found) {
    if (core::Clock::now() >= no_answer_at_) try_later(place, Answers::kNo, Status(Code::kTimeout, "no answer"));
    return 0;
  }
  if (!found->is_ok()) {
    const Code code = found->status().code();
    const bool answers = code == Code::kMismatch || code == Code::kInvalidArgument;
    try_later(place, answers ? Answers::kYes : Answers::kNo, found->status());
    return 1;
  }
  place.engines.clear();
  std::vector<MemberRecord> newcomers;
  ServerRequest renew;
  renew.kind = ServerRequest::RequestKind::kRenew;
  for (MemberRecord& record : found->value()) {
    place.engines.push_back(record.engine);
    if (has(record.engine)) continue;
    if (has_given_up(record.engine)) renew.engines.push_back(record.engine);
    newcomers.push_back(std::move(record));
  }
  if (!renew.engines.empty()) {
    if (phase_ == JoinPhase::kRenewing) {
      try_later(place, Answers::kNo, Status(Code::kPeerDead, "it has no other engine"));
    } else {
      phase_ = JoinPhase::kRenewing;
      ask(place, std::move(renew));
    }
    return 1;
  }
  if (newcomers.empty()) {
    place.has_all = true;
    phase_ = JoinPhase::kIdle;
    return 1;
  }
  if (Status useless = check(place, newcomers); !useless.is_ok())
    try_later(place, Answers::kYes, useless);
  else
    open(place, std::move(newcomers));
  return 1;
}

// All members go by what the group was opened with: who has less room cannot join.
Status LateServers::check(const PolledAddress& place, const std::vector<MemberRecord>& newcomers) const {
  if (Status useless = check_server(roster_, newcomers, place.address.text()); !useless.is_ok()) return useless;
  const std::string name = "the dedicated server " + place.address.text();
  if (roster_.servers.size() + newcomers.size() > bootstrap::kServersMax)
    return Status(Code::kOutOfResources, name + " would be more than the " + std::to_string(bootstrap::kServersMax) +
                                             " that a group may have had: make a new group");
  const worker::GroupInfo& info = group_.info;
  const schedule::ChunkSizes& chunks = info.tuning.chunks;
  std::uint64_t needs = chunks.usual;
  if (info.codecs != nullptr) needs = std::max(needs, chunks.coded);
  if (group_.plans->tuner() != nullptr) needs = std::max<std::uint64_t>(needs, chunks.room);
  for (const MemberRecord& server : newcomers)
    if (std::max(server.chunk_bytes, server.chunk_bytes_max) < needs)
      return Status(Code::kInvalidArgument, name + " has room for chunks of " +
                                                std::to_string(std::max(server.chunk_bytes, server.chunk_bytes_max)) +
                                                " bytes, and those of the group may have " + std::to_string(needs) +
                                                "; start it with the same HYBRIDPS_CHUNK_BYTES and HYBRIDPS_TUNE as the ranks");
  return Status::ok();
}

void LateServers::open(PolledAddress& place, std::vector<MemberRecord> newcomers) {
  const worker::GroupInfo& info = group_.info;
  newcomers_ = std::move(newcomers);
  ServerRequest request;
  request.kind = ServerRequest::RequestKind::kOpen;
  request.group_name = info.name;
  request.roster = roster_;
  request.roster->servers = newcomers_;
  for (std::size_t i = 0; i < newcomers_.size(); ++i) {
    request.roster->servers[i].group_rank = static_cast<int>(i);
    request.roster->servers[i].group_size = static_cast<int>(newcomers_.size());
  }
  request.late = ServerRequest::Late{static_cast<std::uint32_t>(roster_.servers.size()), info.tuning.chunks};
  phase_ = JoinPhase::kOpening;
  start(place, [address = place.address, token = options_.token, body = encode(request)](Asking& asking) {
    const core::Result<bootstrap::Bytes> answer = door::ask(address, token, body, core::Deadline::after(kPatience));
    const std::lock_guard lock(asking.mutex);
    asking.opened = answer.is_ok() ? Status::ok() : answer.status();
  });
}

void LateServers::on_opened(PolledAddress& place) {
  std::optional<Status> opened;
  {
    const std::lock_guard lock(asking_->mutex);
    opened = asking_->opened;
  }
  if (!opened && core::Clock::now() >= no_answer_at_) opened = Status(Code::kTimeout, "no answer");
  if (!opened) return;
  if (!opened->is_ok()) {
    // Where it has refused, none of its threads has the group open.
    if (opened->code() == Code::kTimeout || opened->code() == Code::kPeerDead) give_up();
    try_later(place, Answers::kYes, *opened);
    return;
  }
  std::vector<std::string> records;
  for (const MemberRecord& record : newcomers_) {
    const core::Result<bootstrap::Bytes> bytes = bootstrap::encode(record);
    records.emplace_back(bytes.is_ok() ? std::string(bytes.value().begin(), bytes.value().end()) : std::string());
  }
  phase_ = JoinPhase::kJoining;
  joined_ = std::make_shared<std::optional<Status>>();
  group_.newcomers->take_in(records, [joined = joined_](const Status& status) { *joined = status; });
}

void LateServers::on_joined(PolledAddress& place) {
  const Status status = **joined_;
  if (status.is_ok()) {
    roster_.servers.insert(roster_.servers.end(), newcomers_.begin(), newcomers_.end());
    newcomers_.clear();
    place.has_all = true;
    place.complaint.clear();
    phase_ = JoinPhase::kIdle;
    return;
  }
  give_up();
  try_later(place, Answers::kYes, Status(status.code(), "the dedicated server " + place.address.text() + " does not join: " +
                                             std::string(status.message())));
}

// What has the group open there, or may have it soon, and will not be used.
void LateServers::give_up() {
  ServerRequest request;
  request.kind = ServerRequest::RequestKind::kClose;
  request.uid = group_.info.uid;
  for (const MemberRecord& record : newcomers_) {
    given_up_.insert(record.engine);
    request.engines.push_back(record.engine);
  }
  // Without a thread the server has it open until the group ends.
  (void)core::run_detached("hybridps-ask", [address = places_[busy_].address, token = options_.token, body = encode(request)] {
    (void)door::ask(address, token, body, core::Deadline::after(kPatience));
  });
}

void LateServers::try_later(PolledAddress& place, Answers answers, const Status& why) {
  phase_ = JoinPhase::kIdle;
  newcomers_.clear();
  const std::string text(why.message());
  const bool is_news = std::exchange(place.complaint, text) != text;
  if (answers == Answers::kYes && is_news)
    core::log_warn("group \"", group_.info.name, "\" goes on without a dedicated server: ", text);
  else
    core::log_debug("group \"", group_.info.name, "\": ", text);
  place.pause = answers == Answers::kYes ? kPauseMax : std::min(2 * place.pause, kPauseMax);
  place.next = core::Clock::now() + place.pause * options_.retry;
}

}  // namespace hybridps::engine
