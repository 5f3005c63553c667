#include "hybridps/worker/plan_changes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

using membership::Cause;
using membership::Change;
using membership::ServerLife;
using membership::Version;

constexpr int kNodesToMeasure = 3;

/// The payload as numbers; empty if its size is not a multiple of sizeof(double).
std::vector<double> numbers_in(const flow::Delivery& payload) {
  std::vector<double> numbers(payload.bytes() / sizeof(double));
  if (payload.bytes() != numbers.size() * sizeof(double)) return {};
  if (!numbers.empty()) std::memcpy(numbers.data(), payload.data(), payload.bytes());
  return numbers;
}

std::string_view text_of(const std::vector<double>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(double)};
}

std::string percent_list(const std::vector<double>& weights) {
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  std::string text;
  for (const double weight : weights) {
    char one[16];
    std::snprintf(one, sizeof one, "%s%.1f", text.empty() ? "" : ", ", 100.0 * weight / total);
    text += one;
  }
  return text + " %";
}

}  // namespace

PlanChanges::PlanChanges(Worker& worker, GroupState& group, bool measures, bool tunes)
    : worker_(worker), group_(group), versions_(group.info.topology), agreement_(*this, group.info.topology) {
  const schedule::Topology& topology = group.info.topology;
  if (tunes && topology.nodes() >= 2 && topology.rank() == 0) make_tuner();
  if (measures && topology.nodes() >= kNodesToMeasure)
    rates_ = std::make_unique<membership::RateMeter>(static_cast<membership::RateMeter::RatesHost&>(*this), topology,
                                                     agreement_.tree());
}

void PlanChanges::make_tuner() {
  ladders_ = std::make_unique<schedule::TuningLadders>(group_.info.tuning);
  tuner_ = std::make_unique<schedule::Tuner>(ladders_->knobs(), group_.info.uid.low);
}

// --- operations ------------------------------------------------------------------------------------------------------

void PlanChanges::postpone(OperationRun& run) {
  run.postponed = true;
  postponed_.insert(run.sequence);
}

void PlanChanges::start_postponed() {
  for (const std::set<std::uint64_t> postponed = std::exchange(postponed_, {});
       const std::uint64_t sequence : postponed)
    worker_.start_unfrozen(group_, sequence);
}

void PlanChanges::on_started(const OperationRun& run) {
  if (const schedule::Tuning& tuning = version_of(run.sequence).tuning; tuning != applied_)
    worker_.host().on_tuning(group_.info.uid, applied_ = tuning);
  if (tuner_) depth_ = std::max(depth_, static_cast<int>(std::min<std::size_t>(group_.running.size(), 64)));
  if (rates_) rates_->on_started(run.sequence, run.signature);
  worker_.touch(group_);
}

void PlanChanges::on_finished(const OperationRun& run, bool succeeded) {
  postponed_.erase(run.sequence);
  release();
  if (tuner_ || timed_) time(run, succeeded);
  if (!rates_) return;
  std::optional<membership::RateReport> report = rates_->on_finished(run.sequence, run.output.bytes());
  if (report && group_.status.is_ok()) on_report(group_.info.topology.rank(), run.sequence, std::move(*report));
}

std::size_t PlanChanges::tick(core::TimePoint now) { return agreement_.tick(now) + (rates_ ? rates_->tick(now) : 0); }

core::TimePoint PlanChanges::next_due() const noexcept {
  return rates_ ? std::min(agreement_.next_due(), rates_->next_due()) : agreement_.next_due();
}

// --- shares that follow the network ----------------------------------------------------------------------------------

void PlanChanges::send_echo(int member, const wire::Echo& echo) {
  worker_.outbox().send(group_.info.members.engine(member), group_.message(echo));
}

std::uint64_t PlanChanges::bytes_through_card() const { return worker_.host().bytes_through_card(); }

void PlanChanges::on_report(int rank, std::uint64_t sequence, membership::RateReport report) {
  if (!rates_ || group_.leaving) return;
  const std::optional<membership::RateReport> all = rates_->on_report(rank, sequence, std::move(report));
  if (!all) return;
  const membership::Tree& tree = agreement_.tree();
  const std::vector<double> numbers = all->numbers();
  if (tree.is_root())
    learn(sequence, *all);
  else if (numbers.size() * sizeof(double) > group_.info.tuning.chunks.room)
    core::log_debug("group \"", group_.info.name, "\": the rates of ", all->nodes.size(),
                    " nodes are not told: a message has no room for them");
  else
    worker_.send_up(group_, wire::Rates{sequence}, text_of(numbers));
}

void PlanChanges::learn(std::uint64_t sequence, const membership::RateReport& report) {
  const Version& version = version_of(sequence);
  const Version& newest = newest_version();
  // Learn nothing from operations of a trial: a slow tuning looks like a slow card.
  if (!agreement_.is_idle() || round_ || version.shares != newest.shares || version.tuning != newest.tuning) return;
  std::optional<std::vector<double>> weights = rates_->learn(report, version.topology, servers_out());
  if (!weights) return;
  if (rates_->finder().takes_back()) {
    core::log_info("group \"", group_.info.name, "\": operations are no quicker under these shares, by operation ",
                   sequence, "; they change back to ", percent_list(*weights));
  } else {
    std::string rates;
    for (const double rate : rates_->found()) {
      char one[32];
      std::snprintf(one, sizeof one, "%s%.3g", rates.empty() ? "" : ", ", rate * 8e-9);
      rates += one;
    }
    core::log_info("group \"", group_.info.name, "\": the networks of nodes",
                   version.topology.servers() > 0 ? " and servers" : "", " carry ", rates, " Gbit/s, by operation ",
                   sequence, "; shares change to ", percent_list(*weights));
  }
  propose(std::move(*weights));
}

// --- what a change is to be ------------------------------------------------------------------------------------------

void PlanChanges::propose(std::vector<double> weights) {
  proposed_ = std::move(weights);
  want(Cause::kShares);
}

void PlanChanges::try_out(const schedule::Turns& turns) {
  turns_ = turns;
  want(Cause::kTrial);
}

void PlanChanges::leave_out() {
  want(Cause::kLeave);
  release();
}

void PlanChanges::want(Cause cause) {
  worker_.touch(group_);
  agreement_.want(cause);
}

void PlanChanges::look_at_answers() {
  worker_.touch(group_);
  agreement_.look_at_answers();
}

std::optional<Change> PlanChanges::draft(Cause cause) {
  if (!group_.status.is_ok()) return std::nullopt;
  const Version& now = newest_version();
  const std::vector<bool> out = servers_out();
  Change change{0, {now.tuning, now.tuning}, {}};
  switch (cause) {
    case Cause::kLeave: {
      bool any = false;
      for (int server = 0; server < now.topology.servers(); ++server)
        any = any || (out[static_cast<std::size_t>(server)] && now.topology.server_weight(server) > 0.0);
      if (!any) return std::nullopt;
      if (rates_) rates_->finder().on_other_change();
      change.weights = weights_without_those_out(0);
      break;
    }
    case Cause::kJoin: {
      if (!group_.servers.are_all_met()) return std::nullopt;  // the attempt was given up in the meantime
      servers_are_told_ = true;
      group_.newcomers->on_asked();
      change.weights = weights_without_those_out(group_.servers.newcomers());
      break;
    }
    case Cause::kShares: {
      change.weights = std::move(proposed_);
      const auto nodes = static_cast<std::size_t>(now.topology.nodes());
      if (change.weights.size() != nodes + out.size()) return std::nullopt;  // servers have joined since propose()
      for (std::size_t server = 0; server < out.size(); ++server)
        if (out[server]) change.weights[nodes + server] = 0.0;
      if (std::accumulate(change.weights.begin(), change.weights.end(), 0.0) <= 0.0) return std::nullopt;
      break;
    }
    case Cause::kTrial:
      servers_are_told_ = true;
      change.turns = turns_;
      change.weights = now.topology.weights();
      break;
  }
  // Servers need not know shares, only tunings. A server that was told of no tuning uses the initial tuning for all
  // versions.
  const auto servers = static_cast<int>(change.weights.size()) - now.topology.nodes();
  change.servers_asked = servers_are_told_ ? servers : 0;
  return change;
}

std::vector<bool> PlanChanges::servers_out() const {
  const schedule::Topology& now = newest_version().topology;
  std::vector<bool> out;
  for (int server = 0; server < now.servers(); ++server) out.push_back(group_.servers.is_out(now.size() + server));
  return out;
}

std::vector<double> PlanChanges::weights_without_those_out(std::size_t newcomers) const {
  const schedule::Topology& now = newest_version().topology;
  std::vector<bool> are_there = servers_out();
  are_there.flip();
  are_there.resize(are_there.size() + newcomers, true);
  std::vector<double> weights;
  if (group_.info.weights_with) {
    weights = group_.info.weights_with(are_there);
  } else {
    weights = now.weights();
    const auto servers = weights.begin() + now.nodes();
    const double usual = std::accumulate(weights.begin(), servers, 0.0) / now.nodes();
    std::transform(servers, weights.end(), are_there.begin(), servers,
                   [](double weight, bool is_there) { return is_there ? weight : 0.0; });
    weights.resize(weights.size() + newcomers, usual > 0.0 ? usual : 1.0);
  }
  if (std::accumulate(weights.begin(), weights.end(), 0.0) <= 0.0)  // only servers that are out had shares
    std::fill_n(weights.begin(), now.nodes(), 1.0);
  return weights;
}

std::size_t PlanChanges::newcomers_in(const Change& change) const noexcept {
  const auto members = static_cast<std::size_t>(group_.info.topology.nodes() + group_.info.topology.servers());
  return change.weights.size() > members ? change.weights.size() - members : 0;
}

bool PlanChanges::can_do(const Change& change) const {
  const schedule::Topology& topology = group_.info.topology;
  const auto members = static_cast<std::size_t>(topology.nodes() + topology.servers());
  return schedule::is_sane(change.turns, group_.info.tuning.chunks.most()) &&
         (change.weights.size() == members ||
          (group_.servers.are_all_met() && change.weights.size() == members + group_.servers.newcomers()));
}

bool PlanChanges::is_awaited(int member) const { return !group_.servers.is_missing(member); }

std::uint64_t PlanChanges::first_unbound() const { return group_.submitted; }

// --- a version begins ------------------------------------------------------------------------------------------------

void PlanChanges::on_refused(const Change& change) {
  if (tuner_ && round_) {
    tuner_->on_refused();
    round_.reset();
  }
  if (newcomers_in(change) > 0) group_.newcomers->refused();
  start_postponed();
  release();
}

void PlanChanges::on_switch(const Change& change, std::uint64_t first) {
  const std::vector<double> weights_before = newest_version().topology.weights();
  const std::uint32_t shares_before = newest_version().shares;
  const bool has_newcomers = newcomers_in(change) > 0;
  if (has_newcomers) {
    group_.newcomers->admit();
    servers_are_told_ = true;
    if (tuner_ && first == 0) make_tuner();  // servers may have reduced the range of tunings
    if (rates_) rates_->on_servers(group_.info.topology);
  }
  schedule::Topology topology = group_.info.topology.with_weights(change.weights);
  const bool is_shares = change.weights != weights_before;
  const schedule::Turns& turns = change.turns;
  if (is_shares && first > 0)
    core::log_info("group \"", group_.info.name, "\": plan version ", change.version, " from operation ", first, " on");
  else
    core::log_debug("group \"", group_.info.name, "\": plan version ", change.version, " from operation ", first,
                    " on, ", turns.operations(), " of them in turn with another");
  if (is_shares) worker_.host().on_shares(group_.info.uid, topology);
  // Operations below `oldest` are bound already. Reserved and postponed operations are bound later.
  std::uint64_t oldest = group_.submitted;
  if (!group_.reserved.empty()) oldest = std::min(oldest, *group_.reserved.begin());
  if (!postponed_.empty()) oldest = std::min(oldest, *postponed_.begin());
  versions_.add(first, {change.version, is_shares ? change.version : shares_before, std::move(topology), turns.a},
                turns, oldest);
  times_.clear();
  trial_ = turns.pairs > 0 ? change.version : 0;
  trial_operations_ = turns.operations();
  if (turns.pairs > 0) {
    timed_ = std::make_unique<Timed>();
    timed_->version = change.version;
    timed_->first = first;
    timed_->seconds.assign(turns.operations(), 0.0);
    if (tuner_) timed_->own.resize(turns.operations());
  } else {  // a trial, if there was one, is over
    round_.reset();
    timed_.reset();
  }
  start_postponed();
  release();
  if (has_newcomers) group_.newcomers->on_admitted();
}

// Releases leaving servers whose operations are over here: the server has made all sums for these. The server itself
// knows which ranks still lack results.
void PlanChanges::release() {
  if (is_frozen() || !group_.servers.any(ServerLife::LifePhase::kLeaving)) return;
  const schedule::Topology& topology = newest_version().topology;
  for (int server = 0; server < topology.servers(); ++server) {
    const int member = topology.size() + server;
    if (group_.servers.of(member) != ServerLife::LifePhase::kLeaving) continue;
    const std::optional<std::uint64_t> first = versions_.owns_nothing_from(server);
    if (!first || group_.over.floor() < *first) continue;
    group_.servers.advance(member, ServerLife::LifePhase::kReleased);
    const wire::Failover released{wire::Failover::What::kReleased, static_cast<std::uint32_t>(member)};
    worker_.host().send_control(group_.info.members.engine(member), group_.message(released), {});
  }
}

// --- trying out ------------------------------------------------------------------------------------------------------

void PlanChanges::time(const OperationRun& run, bool succeeded) {
  const core::TimePoint now = core::Clock::now();
  const core::TimePoint since = std::max(run.submitted_at, std::exchange(last_end_, now));
  const schedule::Kind kind = run.signature.kind;
  // Only kinds that end on all ranks at the same time count.
  const bool counts = succeeded && !run.postponed && run.signature.total_bytes >= kTimedBytesMin && now > since &&
                      run.operation.scope != schedule::Scope::kWitness && !core::is_outer(run.operation.op) &&
                      (kind == schedule::Kind::kAllReduce || kind == schedule::Kind::kReduceScatter ||
                       kind == schedule::Kind::kAllGather);
  const schedule::Tuner::TimedOperation sample{
      0, (static_cast<std::uint32_t>(kind) << 4) | static_cast<std::uint32_t>(run.operation.coding),
      run.signature.total_bytes, core::to_seconds(now - since)};
  if (timed_ && run.sequence >= timed_->first) {
    const std::uint64_t index = run.sequence - timed_->first;
    // The first operation does not count: the change may have delayed it.
    if (counts && index > 0 && index < timed_->seconds.size()) {
      timed_->seconds[index] = sample.seconds;
      if (!timed_->own.empty()) timed_->own[index] = sample;
    }
    if (group_.over.floor() >= timed_->first + timed_->seconds.size()) {
      const std::unique_ptr<Timed> timed = std::move(timed_);
      if (tuner_) own_ = std::move(timed->own);
      on_times(group_.info.topology.rank(), std::move(timed->seconds));
    }
  } else if (tuner_ && counts) {
    tuner_->on_operation(sample);
  }
  tune();
}

void PlanChanges::on_times(int rank, std::vector<double> seconds) {
  if (seconds.size() != trial_operations_) return;
  times_[rank] = std::move(seconds);
  const membership::Tree& tree = agreement_.tree();
  if (times_.size() <= tree.children().size()) return;
  std::vector<double> least = times_.begin()->second;
  for (const auto& [from, times] : times_)
    std::transform(least.begin(), least.end(), times.begin(), least.begin(), [](double a, double b) {
      return a > 0.0 && b > 0.0 ? std::min(a, b) : 0.0;  // an operation that does not count on one of them
    });
  if (tree.is_root())
    learn(least);
  else
    worker_.send_up(group_, wire::TrialTimes{trial_}, text_of(least));
}

void PlanChanges::learn(const std::vector<double>& seconds) {
  if (!tuner_ || !round_ || seconds.size() != static_cast<std::size_t>(round_->operations())) return;
  std::vector<schedule::Tuner::TimedOperation> samples;
  for (std::size_t index = 0; index < own_.size(); ++index) {
    schedule::Tuner::TimedOperation sample = own_[index];
    sample.index = static_cast<int>(index);
    sample.seconds = seconds[index];
    if (sample.seconds > 0.0 && std::isfinite(sample.seconds)) samples.push_back(sample);
  }
  const schedule::Tuner::Round round = *std::exchange(round_, std::nullopt);
  const std::uint64_t trials = tuner_->trials();
  tuner_->on_round(round, samples);
  if (tuner_->trials() == trials) return;
  const schedule::Tuner::Tried& tried = tuner_->tried().back();
  worker_.on_tried(tried.kept);
  const std::string what =
      ladders_->describe(tried) + (tried.knob == schedule::Tuner::kUsual  ? ", as is usual"
                                   : tried.knob == schedule::Tuner::kBack ? ", back to where it began"
                                                                          : "");
  char times[64];
  std::snprintf(times, sizeof times, ": %.3f times the time, %d pairs; ", tried.ratio, tried.pairs);
  if (tried.kept)
    core::log_info("group \"", group_.info.name, "\": tuner: ", what, times, "kept");
  else
    core::log_debug("group \"", group_.info.name, "\": tuner: ", what, times, "taken back");
}

void PlanChanges::tune() {
  if (!tuner_ || round_ || !agreement_.is_idle() || group_.leaving || !group_.status.is_ok()) return;
  round_ = tuner_->next(depth_);
  if (!round_) return;
  depth_ = 1;
  own_.clear();
  try_out(ladders_->turns(*round_));
}

// --- messages --------------------------------------------------------------------------------------------------------

void PlanChanges::send_down(const wire::Body& body, const std::vector<double>& weights) {
  worker_.send_down(group_, body, text_of(weights));
}

void PlanChanges::send_up(const wire::PlanAnswer& answer) { worker_.send_up(group_, answer); }

void PlanChanges::ask_server(int server, const wire::PlanAsk& ask) {
  const core::EngineId engine =
      server < group_.servers.newcomers_begin() ? group_.info.members.engine(server) : group_.servers.engine_of(server);
  worker_.host().send_control(engine, group_.message(ask), {});
}

void PlanChanges::on_message(const wire::Message& message, const flow::Delivery& payload) {
  const schedule::Topology& topology = group_.info.topology;
  const auto rank = static_cast<int>(message.from.sender_rank);
  const bool from_parent = rank == agreement_.tree().parent();
  const bool from_child = agreement_.tree().is_child(rank);
  const bool from_server = topology.is_dedicated(rank) && topology.rank() == 0;
  if (const auto* echo = message.as<wire::Echo>()) {
    worker_.outbox().send(message.from.source, group_.message(wire::EchoBack{*echo}));
  } else if (const auto* back = message.as<wire::EchoBack>()) {
    if (rates_) rates_->on_echo_back(back->echo);
  } else if (const auto* rates = message.as<wire::Rates>()) {
    const auto servers = static_cast<std::size_t>(topology.servers());
    if (std::optional<membership::RateReport> report =
            membership::RateReport::from_numbers(numbers_in(payload), servers, topology.nodes());
        report && from_child)
      on_report(rank, rates->sequence, std::move(*report));
  } else if (const auto* times = message.as<wire::TrialTimes>()) {
    if (from_child && trial_ != 0 && times->version == trial_) on_times(rank, numbers_in(payload));
  } else if (const auto* ask = message.as<wire::PlanAsk>()) {
    if (from_parent) agreement_.on_ask(*ask, numbers_in(payload));
  } else if (const auto* answer = message.as<wire::PlanAnswer>()) {
    if (from_child || from_server) agreement_.on_answer(rank, *answer);
  } else if (const auto* change = message.as<wire::PlanSwitch>()) {
    if (from_parent) agreement_.on_switch(*change);
  }
}

}  // namespace hybridps::worker
