#include "hybridps/worker/newcomers.h"

#include <algorithm>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/core/text.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

using JoinStep = wire::Join::JoinStep;
using membership::ServerLife;

// Flags in Echo::partner: the path of the echo, data or control. In other echoes, Echo::partner is a small number.
constexpr std::uint32_t kByData = 0x40000000;
constexpr std::uint32_t kByControl = 0x80000000;
constexpr std::uint32_t kAtATimeMax = 1024;

}  // namespace

bool Newcomers::is_first() const noexcept { return group_.info.topology.rank() == 0; }

// --- rank 0 ----------------------------------------------------------------------------------------------------------

void Newcomers::take_in(const std::vector<std::string>& records, Done done) {
  done_ = std::move(done);
  worker_.touch(group_);
  due_ = core::Clock::now() + kMeetWithin;
  wire::Join join{JoinStep::kMeet, ++attempts_, 0, static_cast<std::uint32_t>(records.size())};
  const auto before = static_cast<std::uint32_t>(group_.servers.newcomers_begin());
  for (const std::string& record : records) {
    join.server = before + static_cast<std::uint32_t>(&record - records.data());
    worker_.send_down(group_, join, record);
  }
  for (const std::string& record : records) {
    join.server = before + static_cast<std::uint32_t>(&record - records.data());
    if (done_) meet(join, std::as_bytes(std::span(record)));
  }
}

void Newcomers::on_met(int rank) {
  if (!met_.insert(rank).second || met_.size() <= group_.plans->tree().children().size()) return;
  due_ = core::TimePoint::max();
  if (is_first())
    group_.plans->take_in_newcomers();
  else
    worker_.send_up(group_, wire::Join{JoinStep::kMet, attempt_, 0, 0});
}

void Newcomers::on_not_met(int rank, const wire::Join& join, const std::string& why) {
  const auto newcomer = static_cast<int>(join.server);
  const int first = group_.servers.newcomers_begin();
  if (group_.plans->is_taking_in()) {  // too late to leave the server out: it joins, and is lost at once
    if (newcomer >= first && newcomer < group_.servers.newcomers_end())
      on_gone(newcomer, core::Status(core::Code::kPeerDead, why));
    return;
  }
  const bool is_known = newcomer >= first && newcomer < group_.servers.newcomers_end();
  const bool is_late = !is_known || join.step == JoinStep::kNotReached;
  JoinOutcome outcome{core::Status(is_late ? core::Code::kTimeout : core::Code::kPeerDead,
                                   group_.info.member_text(rank) + " cannot use it: " + why)};
  if (is_known) outcome.server = static_cast<std::size_t>(newcomer - first);
  outcome.given_up = join.step == JoinStep::kGivenUp;
  give_up(outcome);
}

void Newcomers::give_up(const JoinOutcome& outcome) {
  worker_.send_down(group_, wire::Join{JoinStep::kPart, attempt_, 0, 0});
  part();
  due_ = core::TimePoint::max();
  if (const Done done = std::exchange(done_, nullptr)) done(outcome);
}

void Newcomers::start_without() {
  worker_.send_down(group_, wire::Join{JoinStep::kStart, 0, 0, 0});
  group_.info.coded_or_joined->forget();
  start();
}

void Newcomers::refused() {
  if (attempt_ != 0 && is_first())
    give_up({core::Status(core::Code::kMismatch, "a rank did not agree to the plan with it")});
}

std::size_t Newcomers::tick(core::TimePoint now) {
  if (now < due_) return 0;
  due_ = core::TimePoint::max();
  if (!is_first()) return expire_on_rank(now);
  if (met_.size() > group_.plans->tree().children().size()) {
    // The last of these may begin the version, and then there are no newcomers any more.
    for (int newcomer = group_.servers.newcomers_begin();
         newcomer >= group_.servers.newcomers_begin() && newcomer < group_.servers.newcomers_end(); ++newcomer)
      if (!group_.plans->has_answered(newcomer))
        on_gone(newcomer,
                core::Status(core::Code::kTimeout,
                             "it did not answer for " + core::format_seconds(core::to_seconds(kAnswerWithin))));
    return 1;
  }
  if (met_.count(0) == 0) {
    on_not_met(0, {JoinStep::kNotReached, attempt_, static_cast<std::uint32_t>(group_.servers.first_not_met()), 0},
               "not reached within " + core::format_seconds(core::to_seconds(kMeetWithin)));
    return 1;
  }
  std::vector<int> missing;
  for (const int child : group_.plans->tree().children())
    if (met_.count(child) == 0) missing.push_back(child);
  give_up(
      {core::Status(core::Code::kTimeout, "not reached within " + core::format_seconds(core::to_seconds(kMeetWithin)) +
                                              " from ranks " + core::format_ranks(missing))});
  return 1;
}

// --- every rank ------------------------------------------------------------------------------------------------------

std::size_t Newcomers::expire_on_rank(core::TimePoint now) {
  const membership::Tree& tree = group_.plans->tree();
  const auto no_server = static_cast<std::uint32_t>(group_.servers.newcomers_end());
  if (met_.count(group_.info.topology.rank()) == 0) {
    say(JoinStep::kNotReached, static_cast<std::uint32_t>(group_.servers.first_not_met()),
        "not reached within " + core::format_seconds(core::to_seconds(kReachWithin)));
    return 1;
  }
  const core::TimePoint due = met_since_ + kChildrenWithin - tree.depth() * kSoonerBelow;
  if (now < due) {
    due_ = due;
    return 0;
  }
  for (const int child : tree.children())
    if (met_.count(child) == 0)
      worker_.send_up(group_, wire::Join{JoinStep::kNotMet, attempt_, no_server, static_cast<std::uint32_t>(child)},
                      "it, or a rank that it tells of, has not said that it can reach the servers");
  return 1;
}

void Newcomers::meet(const wire::Join& join, std::span<const std::byte> record) {
  if (!is_first() && group_.plans->is_taking_in()) {  // the end of the previous attempt has not reached this rank yet
    worker_.send_up(group_,
                    wire::Join{JoinStep::kNotMet, join.attempt, join.server,
                               static_cast<std::uint32_t>(group_.info.topology.rank())},
                    "another change of plans is under way");
    return;
  }
  if (join.attempt != attempt_) {
    part();
    attempt_ = join.attempt;
    met_.clear();
    met_since_ = core::Clock::now();
    if (!is_first()) due_ = met_since_ + kReachWithin;
    if (join.servers <= kAtATimeMax) group_.servers.expect(join.servers);
  }
  const auto newcomer = static_cast<int>(join.server);
  if (!group_.servers.is_next(newcomer)) {
    say(JoinStep::kNotMet, join.server, "this rank counts other servers");
    return;
  }
  if (!group_.info.coded_or_joined->may_join()) {
    say(JoinStep::kNotMet, join.server,
        "the device encodes sums of this group (HYBRIDPS_LIMITS=device_codecs=0 turns that off)");
    return;
  }
  core::Result<schedule::Member> met = worker_.host().meet(group_.info.uid, record);
  if (!met.is_ok()) {
    const bool given_up = met.status().code() == core::Code::kPeerDead;
    say(given_up ? JoinStep::kGivenUp : JoinStep::kNotMet, join.server, met.status().message());
    return;
  }
  const core::EngineId engine = met.value().engine;
  const auto index = static_cast<std::uint32_t>(newcomer - group_.servers.newcomers_begin());
  group_.servers.ask(newcomer, std::move(met).value());
  worker_.outbox().send(engine, group_.message(wire::Echo{join.attempt, kByData | index, 0}));
  worker_.host().send_control(engine, group_.message(wire::Echo{join.attempt, kByControl | index, 0}), {});
}

void Newcomers::say(JoinStep step, std::uint32_t server, std::string_view why) {
  const int me = group_.info.topology.rank();
  if (step == JoinStep::kMet)
    on_met(me);
  else if (is_first())
    on_not_met(0, {step, attempt_, server, 0}, std::string(why));
  else
    worker_.send_up(group_, wire::Join{step, attempt_, server, static_cast<std::uint32_t>(me)}, why);
}

void Newcomers::on_message(const wire::Message& message, const flow::Delivery& payload) {
  const wire::Join& join = *message.as<wire::Join>();
  const auto from = static_cast<int>(message.from.sender_rank);
  const std::string why(reinterpret_cast<const char*>(payload.data()), payload.bytes());
  if (group_.plans->tree().is_child(from)) {
    if (is_first() && !done_) return;
    const auto rank = static_cast<int>(join.servers);
    if (join.step == JoinStep::kMet && join.attempt == attempt_) on_met(from);
    const bool is_refusal =
        join.step == JoinStep::kNotMet || join.step == JoinStep::kGivenUp || join.step == JoinStep::kNotReached;
    if (!is_refusal || rank < 0 || rank >= group_.info.topology.size()) return;
    if (!is_first())
      worker_.send_up(group_, join, why);  // of an attempt that this rank may have refused
    else if (join.attempt == attempt_)
      on_not_met(rank, join, why.empty() ? "no reason came" : why);
    return;
  }
  if (from != group_.plans->tree().parent()) return;
  if (join.step == JoinStep::kMeet || join.step == JoinStep::kPart || join.step == JoinStep::kStart)
    worker_.send_down(group_, join, why);
  if (join.step == JoinStep::kMeet) {
    meet(join, {payload.data(), payload.bytes()});
  } else if (join.step == JoinStep::kPart && join.attempt == attempt_) {
    part();
  } else if (join.step == JoinStep::kStart && !started_) {
    part();
    group_.info.coded_or_joined->forget();
    start();
  }
}

void Newcomers::on_word(const wire::Message& message, const flow::Delivery& payload) {
  const std::optional<int> newcomer = group_.servers.find_newcomer(message.from.source);
  if (newcomer != static_cast<int>(message.from.sender_rank)) return;
  if (const auto* back = message.as<wire::EchoBack>()) {
    const std::uint32_t way = back->echo.partner & (kByData | kByControl);
    const auto index = static_cast<std::uint32_t>(*newcomer - group_.servers.newcomers_begin());
    if (back->echo.sequence != attempt_ || (back->echo.partner ^ way) != index) return;
    if (group_.servers.on_echo(*newcomer, way == kByData ? ServerLife::kData : ServerLife::kControl))
      say(JoinStep::kMet, message.from.sender_rank);
  } else if (message.as<wire::PlanAnswer>() != nullptr) {
    group_.plans->on_message(message, payload);
  } else if (const auto* failover = message.as<wire::Failover>()) {
    using What = wire::Failover::What;
    const std::string why(reinterpret_cast<const char*>(payload.data()), payload.bytes());
    if (failover->what == What::kClosed)
      on_gone(*newcomer, core::Status(core::Code::kClosed, why));
    else if (failover->what == What::kLeaving)  // it asks once
      on_gone(*newcomer, core::Status(core::Code::kClosed, "it was told to stop"));
  }
}

void Newcomers::on_peer_dead(core::EngineId engine, const core::Status& cause) {
  if (const std::optional<int> newcomer = group_.servers.find_newcomer(engine)) on_gone(*newcomer, cause);
}

void Newcomers::on_gone(int newcomer, const core::Status& cause) {
  if (!group_.servers.lose(newcomer, cause)) return;
  if (is_first() && group_.plans->is_taking_in())
    group_.plans->look_at_answers();  // nobody waits for this newcomer any longer
  else
    say(JoinStep::kNotMet, static_cast<std::uint32_t>(newcomer), cause.message());
}

void Newcomers::part() {
  attempt_ = 0;
  if (!is_first()) due_ = core::TimePoint::max();
  worker_.host().part(group_.info.uid, group_.servers.part());
}

void Newcomers::admit() {
  const std::vector<schedule::Member> joined = group_.servers.admit();
  std::string who;
  for (const schedule::Member& one : joined) who += (who.empty() ? "" : ", ") + one.host;
  group_.info.members = group_.info.members.with(joined);
  group_.heard.resize(group_.info.members.size());
  // In the group's own topology the newcomers own nothing. Outer steps use this topology instead of a version's: they
  // keep the shares with which the group started.
  const schedule::Topology& before = group_.info.topology;
  std::vector<double> weights = before.weights();
  weights.resize(weights.size() + joined.size(), 0.0);
  std::vector<int> regions;
  for (int server = 0; server < before.servers(); ++server)
    regions.push_back(before.region_of_owner(before.size() + server));
  for (const schedule::Member& one : joined) regions.push_back(one.region);
  group_.info.topology = before.with_weights(std::move(weights)).with_server_regions(std::move(regions));
  attempt_ = 0;
  due_ = core::TimePoint::max();
  worker_.host().on_joined(group_.info.uid, group_.info.members);
  if (is_first() && started_)
    core::log_info("group \"", group_.info.name, "\": the dedicated server ", who, " has joined");
}

void Newcomers::start() {
  if (!std::exchange(started_, true)) worker_.host().on_start(group_.info.uid);
}

void Newcomers::on_admitted() {
  start();
  for (const auto& [member, cause] : group_.servers.take_lost()) group_.lost_servers->report(member, cause);
  if (const Done done = std::exchange(done_, nullptr)) done({});
}

}  // namespace hybridps::worker
