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
  ranks_.clear();
  due_ = core::Clock::now() + kMeetWithin;
  wire::Join join{JoinStep::kMeet, ++attempts_, 0, static_cast<std::uint32_t>(records.size())};
  const auto before = static_cast<std::uint32_t>(group_.servers.newcomers_begin());
  for (const std::string& record : records) {
    join.server = before + static_cast<std::uint32_t>(&record - records.data());
    for (int rank = 1; rank < group_.info.topology.size(); ++rank)
      worker_.host().send_control(group_.info.members.engine(rank), group_.message(join), record);
  }
  for (const std::string& record : records) {
    join.server = before + static_cast<std::uint32_t>(&record - records.data());
    if (done_) meet(join, std::as_bytes(std::span(record)));
  }
}

void Newcomers::on_met(int rank) {
  ranks_.insert(rank);
  if (ranks_.size() < static_cast<std::size_t>(group_.info.topology.size())) return;
  due_ = core::TimePoint::max();
  group_.plans->take_in_newcomers();
}

void Newcomers::on_not_met(int rank, std::uint32_t server, const std::string& why) {
  const auto newcomer = static_cast<int>(server);
  const int first = group_.servers.newcomers_begin();
  if (group_.plans->is_taking_in()) {  // too late to leave the server out: it joins, and is lost at once
    if (newcomer >= first && newcomer < group_.servers.newcomers_end())
      on_gone(newcomer, core::Status(core::Code::kPeerDead, why));
    return;
  }
  give_up(core::Status(core::Code::kPeerDead, group_.info.member_text(rank) + " cannot use it: " + why),
          static_cast<std::size_t>(newcomer - first));
}

void Newcomers::give_up(const core::Status& why, std::optional<std::size_t> server) {
  const wire::Join parting{JoinStep::kPart, attempt_, 0, 0};
  for (int rank = 1; rank < group_.info.topology.size(); ++rank)
    worker_.host().send_control(group_.info.members.engine(rank), group_.message(parting), {});
  part();
  due_ = core::TimePoint::max();
  if (const Done done = std::exchange(done_, nullptr)) done({why, server});
}

void Newcomers::start_without() {
  for (int rank = 1; rank < group_.info.topology.size(); ++rank)
    worker_.host().send_control(group_.info.members.engine(rank), group_.message(wire::Join{JoinStep::kStart, 0, 0, 0}),
                                {});
  group_.info.coded_or_joined->forget();
  start();
}

void Newcomers::refused() {
  if (attempt_ != 0 && is_first())
    give_up(core::Status(core::Code::kMismatch, "a rank did not agree to the plan with it"));
}

std::size_t Newcomers::tick(core::TimePoint now) {
  if (now < due_) return 0;
  due_ = core::TimePoint::max();
  if (ranks_.size() == static_cast<std::size_t>(group_.info.topology.size())) {
    // The last of these may begin the version, and then there are no newcomers any more.
    for (int newcomer = group_.servers.newcomers_begin();
         newcomer >= group_.servers.newcomers_begin() && newcomer < group_.servers.newcomers_end(); ++newcomer)
      if (!group_.plans->has_answered(newcomer))
        on_gone(newcomer,
                core::Status(core::Code::kTimeout,
                             "it did not answer for " + core::format_seconds(core::to_seconds(kAnswerWithin))));
    return 1;
  }
  std::vector<int> missing;
  for (int rank = 0; rank < group_.info.topology.size(); ++rank)
    if (ranks_.count(rank) == 0) missing.push_back(rank);
  give_up(core::Status(core::Code::kTimeout, "not reached within " +
                                                 core::format_seconds(core::to_seconds(kMeetWithin)) + " from ranks " +
                                                 core::format_ranks(missing)));
  return 1;
}

// --- every rank ------------------------------------------------------------------------------------------------------

void Newcomers::meet(const wire::Join& join, std::span<const std::byte> record) {
  if (group_.plans->is_taking_in()) {  // the end of the previous attempt has not reached this rank yet
    const wire::Join answer{JoinStep::kNotMet, join.attempt, join.server, join.servers};
    worker_.host().send_control(group_.info.members.engine(0), group_.message(answer),
                                "another change of plans is under way");
    return;
  }
  if (join.attempt != attempt_) {
    part();
    attempt_ = join.attempt;
    if (join.servers <= kAtATimeMax) group_.servers.expect(join.servers);
  }
  const auto newcomer = static_cast<int>(join.server);
  if (!group_.servers.is_next(newcomer)) {
    say(JoinStep::kNotMet, join.server, "this rank counts other servers");
    return;
  }
  if (!group_.info.coded_or_joined->may_join()) {
    say(JoinStep::kNotMet, join.server, "its sums are coded on the device (HYBRIDPS_DEVICE_CODECS=0 turns that off)");
    return;
  }
  core::Result<schedule::Member> met = worker_.host().meet(group_.info.uid, record);
  if (!met.is_ok()) {
    say(JoinStep::kNotMet, join.server, met.status().message());
    return;
  }
  const core::EngineId engine = met.value().engine;
  const auto index = static_cast<std::uint32_t>(newcomer - group_.servers.newcomers_begin());
  group_.servers.ask(newcomer, std::move(met).value());
  worker_.outbox().send(engine, group_.message(wire::Echo{join.attempt, kByData | index, 0}));
  worker_.host().send_control(engine, group_.message(wire::Echo{join.attempt, kByControl | index, 0}), {});
}

void Newcomers::say(JoinStep step, std::uint32_t server, std::string_view why) {
  if (is_first()) {
    step == JoinStep::kMet ? on_met(0) : on_not_met(0, server, std::string(why));
    return;
  }
  worker_.host().send_control(group_.info.members.engine(0), group_.message(wire::Join{step, attempt_, server, 0}),
                              why);
}

void Newcomers::on_message(const wire::Message& message, const flow::Delivery& payload) {
  const wire::Join& join = *message.as<wire::Join>();
  const auto from = static_cast<int>(message.from.sender_rank);
  const std::string why(reinterpret_cast<const char*>(payload.data()), payload.bytes());
  if (is_first()) {
    if (join.attempt != attempt_ || !done_ || from >= group_.info.topology.size()) return;
    if (join.step == JoinStep::kMet) on_met(from);
    if (join.step == JoinStep::kNotMet) on_not_met(from, join.server, why.empty() ? "no reason came" : why);
  } else if (from == 0 && join.step == JoinStep::kMeet) {
    meet(join, {payload.data(), payload.bytes()});
  } else if (from == 0 && join.step == JoinStep::kPart && join.attempt == attempt_) {
    part();
  } else if (from == 0 && join.step == JoinStep::kStart && !started_) {
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
  } else if (const auto* failover = message.as<wire::Failover>();
             failover != nullptr && failover->what == wire::Failover::What::kLost) {
    on_gone(*newcomer, core::Status(core::Code::kPeerDead,
                                    std::string(reinterpret_cast<const char*>(payload.data()), payload.bytes())));
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
