#include "hybridps/worker/plan_changes.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <string>
#include <utility>

#include "hybridps/core/log.h"
#include "hybridps/worker/worker.h"

namespace hybridps::worker {
namespace {

// Shorter operations are not worth it, and their beginning says little: a rank may come late.
constexpr auto kMeasureAfter = std::chrono::milliseconds(10);
constexpr auto kEchoEvery = std::chrono::milliseconds(5);
// A node asks its neighbours at distances 1, 2, 4, ...: with the least of the answers one quick partner is enough. So with
// the dedicated servers, from another one on at each node.
constexpr std::size_t kPartnersMax = 6;
constexpr std::size_t kEchoesMin = 3;
constexpr std::size_t kReportsKept = 4;
constexpr auto kAgainAfter = std::chrono::milliseconds(5);

std::uint64_t nanoseconds(core::TimePoint at) {
  return static_cast<std::uint64_t>(std::chrono::nanoseconds(at.time_since_epoch()).count());
}

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

schedule::Shares shares_of(const schedule::Topology& topology) {
  schedule::Shares shares;
  double total = 0.0;
  for (int node = 0; node < topology.nodes(); ++node) total += shares.worker.emplace_back(topology.weight(node));
  for (int server = 0; server < topology.servers(); ++server)
    total += shares.dedicated.emplace_back(topology.server_weight(server));
  for (double& share : shares.worker) share /= total;
  for (double& share : shares.dedicated) share /= total;
  return shares;
}

std::vector<double> weights_of(const schedule::Topology& topology) {
  std::vector<double> weights;
  for (int node = 0; node < topology.nodes(); ++node) weights.push_back(topology.weight(node));
  for (int server = 0; server < topology.servers(); ++server) weights.push_back(topology.server_weight(server));
  return weights;
}

/// Empty if they are no numbers.
std::vector<double> numbers_in(const flow::Delivery& payload) {
  std::vector<double> numbers(payload.bytes() / sizeof(double));
  if (payload.bytes() != numbers.size() * sizeof(double)) return {};
  if (!numbers.empty()) std::memcpy(numbers.data(), payload.data(), payload.bytes());
  return numbers;
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

PlanChanges::PlanChanges(Worker& worker, GroupState& group, bool measures, bool tunes) : worker_(worker), group_(group) {
  const schedule::Topology& topology = group.info.topology;
  bindings_.emplace(0, Binding{0, 0, topology});
  if (tunes && topology.nodes() >= 2 && topology.rank() == 0) {
    ladders_ = std::make_unique<schedule::TuningLadders>(group.info.tuning);
    tuner_ = std::make_unique<schedule::Tuner>(ladders_->knobs(), group.info.uid.low);
  }
  measures_ = measures && topology.nodes() >= 3;
  if (!measures_) return;
  choose_partners();
  if (topology.rank() == 0)
    finder_ = std::make_unique<schedule::RateFinder>(static_cast<std::size_t>(topology.nodes()),
                                                     static_cast<std::size_t>(topology.servers()));
}

void PlanChanges::choose_partners() {
  const schedule::Topology& topology = group_.info.topology;
  partners_.clear();
  const int me = topology.my_node();
  for (int step = 1; step < topology.nodes() && partners_.size() < kPartnersMax; step *= 2)
    partners_.push_back(topology.ranks_of((me + step) % topology.nodes()).front());
  const int servers = topology.servers();
  for (int i = 0; i < std::min(servers, static_cast<int>(kPartnersMax)); ++i)
    partners_.push_back(topology.size() + (me + i) % servers);
}

const Binding& PlanChanges::binding_of(std::uint64_t sequence) const {
  return std::prev(bindings_.upper_bound(sequence))->second;
}

// --- finding ---------------------------------------------------------------------------------------------------------

void PlanChanges::postpone(OperationRun& run) {
  run.postponed = true;
  postponed_.insert(run.sequence);
}

void PlanChanges::on_started(const OperationRun& run) {
  if (const schedule::Tuning& tuning = binding_of(run.sequence).tuning; tuning != applied_)
    worker_.host().on_tuning(group_.info.uid, applied_ = tuning);
  if (tuner_) depth_ = std::max(depth_, static_cast<int>(std::min<std::size_t>(group_.running.size(), 64)));
  if (!measures_ || measured_ || run.sequence % kMeasureEvery != kMeasureEvery - 1) return;
  if (run.signature.kind != schedule::Kind::kAllReduce || run.signature.total_bytes < kMeasureBytesMin) return;
  measured_ = std::make_unique<Measured>();
  measured_->sequence = run.sequence;
  measured_->round_trips.resize(partners_.size());
  next_echo_ = core::Clock::now() + kMeasureAfter;
}

std::size_t PlanChanges::tick(core::TimePoint now) {
  if (now >= leave_out_at_ && group_.status.is_ok()) leave_out_lost();
  if (!measured_ || now < next_echo_) return 0;
  next_echo_ = now + kEchoEvery;
  if (measured_->since == core::TimePoint{}) {
    measured_->since = now;
    measured_->bytes_before = worker_.host().bytes_through_card();
  }
  const schedule::Topology& topology = group_.info.topology;
  if (topology.local_index(topology.rank()) != 0) return 1;
  for (std::size_t partner = 0; partner < partners_.size(); ++partner) {
    const wire::Echo echo{measured_->sequence, static_cast<std::uint32_t>(partner), nanoseconds(core::Clock::now())};
    worker_.outbox().send(group_.info.engines[static_cast<std::size_t>(partners_[partner])], group_.message(echo));
  }
  return 1;
}

void PlanChanges::on_finished(const OperationRun& run, bool succeeded) {
  postponed_.erase(run.sequence);
  if (leaving_.size() > released_.size()) release();
  if (tuner_ || timed_) time(run, succeeded);
  if (!measured_ || measured_->sequence != run.sequence) return;
  const std::unique_ptr<Measured> measured = std::move(measured_);
  const core::TimePoint now = core::Clock::now();
  if (measured->since == core::TimePoint{} || now <= measured->since || !group_.status.is_ok()) return;
  const schedule::Topology& topology = group_.info.topology;
  Report report;
  report.bytes = run.output.bytes();
  report.bytes_per_second = static_cast<double>(worker_.host().bytes_through_card() - measured->bytes_before) /
                            core::to_seconds(now - measured->since);
  if (topology.local_index(topology.rank()) == 0) {
    report.server_delays.assign(static_cast<std::size_t>(topology.servers()), 0.0);
    for (std::size_t partner = 0; partner < partners_.size(); ++partner) {
      const std::vector<double>& times = measured->round_trips[partner];
      if (times.size() < kEchoesMin) continue;
      const double typical = median(times);
      if (topology.is_dedicated(partners_[partner]))
        report.server_delays[static_cast<std::size_t>(partners_[partner] - topology.size())] = typical;
      report.delay_seconds = report.delay_seconds == 0.0 ? typical : std::min(report.delay_seconds, typical);
    }
    if (report.delay_seconds == 0.0) return;
  }
  if (topology.rank() == 0) {
    on_report(0, run.sequence, std::move(report));
    return;
  }
  const wire::Rates rates{run.sequence, static_cast<std::uint64_t>(report.delay_seconds * 1e9),
                          static_cast<std::uint64_t>(report.bytes_per_second)};
  worker_.host().send_control(
      group_.info.engines.front(), group_.message(rates),
      {reinterpret_cast<const char*>(report.server_delays.data()), report.server_delays.size() * sizeof(double)});
}

void PlanChanges::on_report(int rank, std::uint64_t sequence, Report report) {
  if (!finder_ || group_.leaving) return;
  reports_[sequence][rank] = std::move(report);
  while (reports_.size() > kReportsKept) reports_.erase(reports_.begin());
  const auto found = reports_.find(sequence);
  const schedule::Topology& topology = group_.info.topology;
  if (found == reports_.end() || found->second.size() < static_cast<std::size_t>(topology.size())) return;
  const std::map<int, Report> reports = std::move(found->second);
  reports_.erase(found);
  const Binding& binding = binding_of(sequence);
  // Nothing is learned from operations that take turns: what is tried out looks like a slow card.
  if (is_frozen() || round_ || leaves_out_ || binding.shares != newest_binding().shares || binding.tuning != newest_binding().tuning) return;
  const schedule::Shares shares = shares_of(binding.topology);
  const std::vector<schedule::CardReport> cards = cards_of(reports, shares);
  for (std::size_t card = 0; card < cards.size(); ++card) {
    const int server = static_cast<int>(card) - topology.nodes();
    if (server >= 0 && is_out(topology.size() + server)) continue;
    if (!(cards[card].delay_seconds > 0.0)) return;  // nobody had an answer of this server
  }
  const auto better = finder_->learn(cards, shares, reports.at(0).bytes);
  if (!better) return;
  std::vector<double> weights = better->worker;
  weights.insert(weights.end(), better->dedicated.begin(), better->dedicated.end());
  for (int server = 0; server < topology.servers(); ++server)
    if (is_out(topology.size() + server)) weights[static_cast<std::size_t>(topology.nodes() + server)] = 0.0;
  if (std::accumulate(weights.begin(), weights.end(), 0.0) <= 0.0) return;
  if (finder_->takes_back()) {
    core::log_info("group \"", group_.info.name, "\": operations are no quicker under these shares, by operation ", sequence,
                   "; they change back to ", percent_list(weights));
    propose(weights);
    return;
  }
  std::string rates;
  for (const double rate : finder_->rates()) {
    char one[32];
    std::snprintf(one, sizeof one, "%s%.3g", rates.empty() ? "" : ", ", rate * 8e-9);
    rates += one;
  }
  core::log_info("group \"", group_.info.name, "\": the networks of nodes",
                 topology.servers() > 0 ? " and servers" : "", " carry ", rates, " Gbit/s, by operation ", sequence,
                 "; shares change to ", percent_list(weights));
  propose(weights);
}

std::vector<schedule::CardReport> PlanChanges::cards_of(const std::map<int, Report>& reports,
                                                        const schedule::Shares& shares) const {
  const schedule::Topology& topology = group_.info.topology;
  const auto nodes = static_cast<std::size_t>(topology.nodes());
  std::vector<schedule::CardReport> cards(nodes + static_cast<std::size_t>(topology.servers()));
  for (const auto& [from, seen] : reports) {
    schedule::CardReport& node = cards[static_cast<std::size_t>(topology.node_of(from))];
    node.bytes_per_second += seen.bytes_per_second;
    node.delay_seconds = std::max(node.delay_seconds, seen.delay_seconds);
    for (std::size_t server = 0; server < seen.server_delays.size() && nodes + server < cards.size(); ++server) {
      double& least = cards[nodes + server].delay_seconds;
      const double delay = seen.server_delays[server];
      if (delay > 0.0) least = least == 0.0 ? delay : std::min(least, delay);
    }
  }
  // A node that owns share y carries 1 + (n - 2) y tensors, a server n times its share (schedule/shares.h).
  std::vector<double> tensors_per_second;
  const auto n = static_cast<double>(nodes);
  for (std::size_t node = 0; node < nodes; ++node)
    tensors_per_second.push_back(cards[node].bytes_per_second / (1.0 + (n - 2.0) * shares.worker[node]));
  const double pace = median(std::move(tensors_per_second));
  for (std::size_t server = 0; server < shares.dedicated.size(); ++server)
    cards[nodes + server].bytes_per_second = n * shares.dedicated[server] * pace;
  return cards;
}

// --- changing --------------------------------------------------------------------------------------------------------

void PlanChanges::propose(const std::vector<double>& weights) {
  const schedule::Tuning& now = newest_binding().tuning;
  ask_all({newest_ + 1, {now, now}}, weights);
}

void PlanChanges::try_out(const schedule::Turns& turns) {
  servers_are_told_ = true;
  ask_all({newest_ + 1, turns}, weights_of(newest_binding().topology));
}

void PlanChanges::ask_all(const wire::PlanAsk& ask, const std::vector<double>& weights) {
  const std::string_view text(reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(double));
  const int size = group_.info.topology.size();
  const auto servers = static_cast<int>(weights.size()) - group_.info.topology.nodes();  // newcomers, too
  // Servers need not know of shares: who was told of no tuning has that of the beginning for all versions.
  for (int member = 1; member < size + (servers_are_told_ ? servers : 0); ++member)
    worker_.host().send_control(engine_of(member), group_.message(ask), member < size ? text : std::string_view());
  answers_.clear();
  on_ask(ask, weights);
}

void PlanChanges::on_ask(const wire::PlanAsk& ask, std::vector<double> weights) {
  asked_ = ask.version;
  asked_turns_ = ask.turns;
  asked_weights_ = std::move(weights);
  unbound_ = group_.submitted;
  if (group_.info.topology.rank() == 0)
    on_answer(0, unbound_);
  else
    answer(ask.version, unbound_);
}

void PlanChanges::answer(std::uint32_t version, std::uint64_t first_unbound) {
  worker_.host().send_control(group_.info.engines.front(), group_.message(wire::PlanAnswer{version, first_unbound}),
                              {});
}

void PlanChanges::on_answer(int member, std::uint64_t first_unbound) {
  answers_[member] = first_unbound;
  look_at_answers();
}

// Nobody waits for servers that are lost.
void PlanChanges::look_at_answers() {
  if (!is_frozen()) return;
  const schedule::Topology& topology = group_.info.topology;
  const int size = topology.size();
  const int servers = static_cast<int>(asked_weights_.size()) - topology.nodes();
  std::uint64_t first = 0;
  for (int member = 0; member < size + (servers_are_told_ ? servers : 0); ++member) {
    if (member >= size && group_.lost_servers->contains(member)) continue;
    if (member >= size + topology.servers() &&
        group_.newcomers->is_gone(static_cast<std::size_t>(member - size - topology.servers())))
      continue;
    const auto answer = answers_.find(member);
    if (answer == answers_.end()) return;
    first = std::max(first, answer->second);
  }
  const wire::PlanSwitch change{asked_, first};
  for (int other = 1; other < size; ++other)
    worker_.host().send_control(group_.info.engines[static_cast<std::size_t>(other)], group_.message(change), {});
  on_switch(first);
}

void PlanChanges::on_switch(std::uint64_t first) {
  if (first == wire::kRefused) {
    asked_ = 0;
    if (tuner_ && round_) {
      tuner_->on_refused();
      round_.reset();
    }
    if (newcomers_asked() > 0) group_.newcomers->refused();
    after_change();
    return;
  }
  const Binding before = newest_binding();
  const std::vector<double> weights_before = weights_of(before.topology);
  const bool has_newcomers = newcomers_asked() > 0;
  if (has_newcomers) {
    group_.newcomers->admit();
    servers_are_told_ = true;
    measured_.reset();
    if (measures_) choose_partners();
    if (finder_) finder_->set_servers(static_cast<std::size_t>(group_.info.topology.servers()));
  }
  const auto servers = asked_weights_.begin() + group_.info.topology.nodes();
  schedule::Topology topology =
      group_.info.topology.with_weights({asked_weights_.begin(), servers}, {servers, asked_weights_.end()});
  const bool is_shares = asked_weights_ != weights_before;
  const std::uint32_t version = std::exchange(asked_, 0);
  const schedule::Turns& turns = asked_turns_;
  newest_ = version + (turns.pairs > 0 ? 1 : 0);
  if (is_shares)
    core::log_info("group \"", group_.info.name, "\": plan version ", version, " from operation ", first, " on");
  else
    core::log_debug("group \"", group_.info.name, "\": plan version ", version, " from operation ", first, " on, ",
                    turns.operations(), " of them in turn with another");
  // Bound is what was submitted before the question, but for what is reserved and will come late.
  std::uint64_t oldest = group_.reserved.empty() ? unbound_ : std::min(unbound_, *group_.reserved.begin());
  for (const std::uint64_t sequence : postponed_) oldest = std::min(oldest, sequence);
  while (bindings_.size() > 1 && std::next(bindings_.begin())->first <= oldest) bindings_.erase(bindings_.begin());
  if (bindings_.begin()->first != 0) {
    auto last = bindings_.extract(bindings_.begin());
    last.key() = 0;
    bindings_.insert(std::move(last));
  }
  bindings_.erase(bindings_.lower_bound(first), bindings_.end());
  if (is_shares) worker_.host().on_shares(group_.info.uid, topology);
  Binding a{version, is_shares ? version : before.shares, std::move(topology), turns.a};
  if (turns.pairs > 0) {
    Binding b = a;
    b.version = version + 1;
    b.tuning = turns.b;
    for (std::uint64_t index = 0; index < turns.operations(); index += turns.block)
      if (index == 0 || turns.is_b(index) != turns.is_b(index - 1))
        bindings_.insert_or_assign(first + index, turns.is_b(index) ? b : a);
    timed_ = std::make_unique<Timed>();
    timed_->version = version;
    timed_->first = first;
    timed_->seconds.assign(turns.operations(), 0.0);
    if (tuner_) timed_->own.resize(turns.operations());
  }
  bindings_.insert_or_assign(first + turns.operations(), std::move(a));
  leaves_out_ = leaves_out_ && has_share_of_one_that_is_out();
  if (turns.pairs == 0) {  // what was being tried is over
    round_.reset();
    timed_.reset();
  }
  after_change();
  if (has_newcomers) group_.newcomers->report_gone();
}

// A change is over: what has waited for that.
void PlanChanges::after_change() {
  start_postponed();
  if (leaves_out_) leave_out_at_ = core::Clock::now() + kAgainAfter;
  if (leaving_.size() > released_.size()) release();
  if (takes_in_) take_in_newcomers();
  // One that has come while operations were started is newer.
  if (is_frozen()) return;
  if (auto next = std::exchange(next_ask_, {}); next && !take_ask(next->first, next->second))
    answer(next->first.version, wire::kRefused);
}

void PlanChanges::leave_out_lost() {
  leaves_out_ = true;  // until a version does
  if (is_frozen()) {
    if (group_.info.topology.rank() == 0) look_at_answers();
    return;
  }
  leave_out_at_ = core::TimePoint::max();
  if (!has_share_of_one_that_is_out()) {
    leaves_out_ = false;
    release();
    return;
  }
  if (finder_) finder_->on_other_change();
  propose(weights_without_those_out(0));
}

std::vector<double> PlanChanges::weights_without_those_out(std::size_t newcomers) const {
  const schedule::Topology& now = newest_binding().topology;
  std::vector<bool> are_there;
  for (int server = 0; server < now.servers(); ++server) are_there.push_back(!is_out(now.size() + server));
  are_there.resize(are_there.size() + newcomers, true);
  std::vector<double> weights;
  if (group_.info.weights_with) {
    weights = group_.info.weights_with(are_there);
  } else {
    for (int node = 0; node < now.nodes(); ++node) weights.push_back(now.weight(node));
    const double usual = std::accumulate(weights.begin(), weights.end(), 0.0) / now.nodes();
    for (int server = 0; server < now.servers(); ++server)
      weights.push_back(are_there[static_cast<std::size_t>(server)] ? now.server_weight(server) : 0.0);
    weights.resize(weights.size() + newcomers, usual > 0.0 ? usual : 1.0);
  }
  if (std::accumulate(weights.begin(), weights.end(), 0.0) <= 0.0)  // all was theirs
    std::fill_n(weights.begin(), now.nodes(), 1.0);
  return weights;
}

// --- servers that come and go ----------------------------------------------------------------------------------------

std::size_t PlanChanges::newcomers_asked() const noexcept {
  const auto members = static_cast<std::size_t>(group_.info.topology.nodes() + group_.info.topology.servers());
  return asked_weights_.size() > members ? asked_weights_.size() - members : 0;
}

core::EngineId PlanChanges::engine_of(int member) const {
  const auto at = static_cast<std::size_t>(member);
  const std::size_t members = group_.info.engines.size();
  return at < members ? group_.info.engines[at] : group_.newcomers->engine(at - members);
}

bool PlanChanges::is_out(int member) const { return group_.lost_servers->contains(member) || has_let_go(member); }

bool PlanChanges::has_share_of_one_that_is_out() const {
  const schedule::Topology& now = newest_binding().topology;
  for (int server = 0; server < now.servers(); ++server)
    if (now.server_weight(server) > 0.0 && is_out(now.size() + server)) return true;
  return false;
}

void PlanChanges::let_go(int server) {
  if (!leaving_.insert(server).second) return;
  leave_out_lost();
}

// What is over here has been summed by the server: it knows itself who has not all results of it yet.
void PlanChanges::release() {
  if (is_frozen()) return;
  for (const int member : leaving_) {
    const int server = member - group_.info.topology.size();
    const auto owns = [server](const schedule::Topology& t) { return server < t.servers() && t.server_weight(server) > 0.0; };
    const auto last = std::find_if(bindings_.rbegin(), bindings_.rend(), [&](const auto& b) { return owns(b.second.topology); });
    if (last == bindings_.rbegin()) continue;
    if (last != bindings_.rend() && group_.over.floor() < last.base()->first) continue;
    if (!released_.insert(member).second) continue;
    const wire::Mend released{wire::Mend::What::kReleased, static_cast<std::uint32_t>(member)};
    worker_.host().send_control(group_.info.engines[static_cast<std::size_t>(member)], group_.message(released), {});
  }
}

void PlanChanges::take_in_newcomers() {
  takes_in_ = true;
  if (is_frozen()) return;
  takes_in_ = false;
  if (group_.newcomers->met() == 0) return;  // one has gone meanwhile
  servers_are_told_ = true;
  group_.newcomers->on_asked();
  propose(weights_without_those_out(group_.newcomers->met()));
}


// --- trying out ------------------------------------------------------------------------------------------------------

void PlanChanges::time(const OperationRun& run, bool succeeded) {
  const core::TimePoint now = core::Clock::now();
  const core::TimePoint since = std::max(run.submitted_at, std::exchange(last_end_, now));
  const schedule::Kind kind = run.signature.kind;
  // Those in which all ranks are through at the same time.
  const bool counts = succeeded && !run.postponed && run.signature.total_bytes >= kTimedBytesMin && now > since &&
                      run.operation.scope != schedule::Scope::kWitness && !core::is_outer(run.operation.op) &&
                      (kind == schedule::Kind::kAllReduce || kind == schedule::Kind::kReduceScatter ||
                       kind == schedule::Kind::kAllGather);
  const schedule::Tuner::Sample sample{
      0, (static_cast<std::uint32_t>(kind) << 4) | static_cast<std::uint32_t>(run.operation.coding),
      run.signature.total_bytes, core::to_seconds(now - since)};
  if (timed_ && run.sequence >= timed_->first) {
    const std::uint64_t index = run.sequence - timed_->first;
    // What a change has held up is not the first operation's doing.
    if (counts && index > 0 && index < timed_->seconds.size()) {
      timed_->seconds[index] = sample.seconds;
      if (!timed_->own.empty()) timed_->own[index] = sample;
    }
    if (group_.over.floor() >= timed_->first + timed_->seconds.size()) {
      const std::unique_ptr<Timed> timed = std::move(timed_);
      if (group_.info.topology.rank() != 0) {
        worker_.host().send_control(group_.info.engines.front(), group_.message(wire::TrialTimes{timed->version}),
                                    {reinterpret_cast<const char*>(timed->seconds.data()),
                                     timed->seconds.size() * sizeof(double)});
      } else if (tuner_) {
        own_ = std::move(timed->own);
        on_times(0, timed->seconds);
      }
    }
  } else if (tuner_ && counts) {
    tuner_->on_operation(sample);
  }
  tune();
}

void PlanChanges::on_times(int rank, const std::vector<double>& seconds) {
  if (!round_ || seconds.size() != static_cast<std::size_t>(round_->operations())) return;
  times_[rank] = seconds;
  if (times_.size() < static_cast<std::size_t>(group_.info.topology.size())) return;
  std::vector<schedule::Tuner::Sample> samples;
  for (std::size_t index = 0; index < own_.size(); ++index) {
    schedule::Tuner::Sample sample = own_[index];
    sample.index = static_cast<int>(index);
    for (const auto& [from, times] : times_)
      sample.seconds = times[index] > 0.0 ? std::min(sample.seconds, times[index]) : 0.0;
    if (sample.seconds > 0.0 && std::isfinite(sample.seconds)) samples.push_back(sample);
  }
  const schedule::Tuner::Round round = *std::exchange(round_, std::nullopt);
  const std::uint64_t trials = tuner_->trials();
  tuner_->on_round(round, samples);
  if (tuner_->trials() == trials) return;
  const schedule::Tuner::Tried& tried = tuner_->tried().back();
  worker_.on_tried(tried.kept);
  const std::string what = ladders_->describe(tried) + (tried.knob == schedule::Tuner::kUsual  ? ", as is usual"
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
  if (!tuner_ || round_ || is_frozen() || leaves_out_ || group_.leaving || !group_.status.is_ok()) return;
  round_ = tuner_->next(depth_);
  if (!round_) return;
  depth_ = 1;
  times_.clear();
  own_.clear();
  try_out(ladders_->turns(*round_));
}

// --- messages --------------------------------------------------------------------------------------------------------

void PlanChanges::start_postponed() {
  for (const std::set<std::uint64_t> postponed = std::exchange(postponed_, {});
       const std::uint64_t sequence : postponed)
    worker_.start_unfrozen(group_, sequence);
}

void PlanChanges::on_message(const wire::Message& message, const flow::Delivery& payload) {
  const schedule::Topology& topology = group_.info.topology;
  const auto rank = static_cast<int>(message.from.sender_rank);
  const bool from_leader = rank == 0 && topology.rank() != 0;
  const bool from_member = rank != 0 && rank < topology.size() && topology.rank() == 0;
  const bool from_server = topology.is_dedicated(rank) && topology.rank() == 0;
  if (const auto* echo = message.as<wire::Echo>()) {
    worker_.outbox().send(message.from.source, group_.message(wire::EchoBack{*echo}));
  } else if (const auto* back = message.as<wire::EchoBack>()) {
    const wire::Echo& sent = back->echo;
    const std::uint64_t now = nanoseconds(core::Clock::now());
    if (measured_ && sent.sequence == measured_->sequence && sent.partner < partners_.size() && sent.sent_ns < now)
      measured_->round_trips[sent.partner].push_back(static_cast<double>(now - sent.sent_ns) * 1e-9);
  } else if (const auto* rates = message.as<wire::Rates>()) {
    if (from_member)
      on_report(rank, rates->sequence,
                Report{static_cast<double>(rates->round_trip_ns) * 1e-9, static_cast<double>(rates->bytes_per_second),
                       0, numbers_in(payload)});
  } else if (const auto* times = message.as<wire::TrialTimes>()) {
    if (from_member && round_ && times->version == newest_ - 1) on_times(rank, numbers_in(payload));
  } else if (const auto* ask = message.as<wire::PlanAsk>()) {
    if (!from_leader) return;
    std::vector<double> weights = numbers_in(payload);
    if (is_frozen())
      next_ask_.emplace(*ask, std::move(weights));
    else if (!take_ask(*ask, weights))
      answer(ask->version, wire::kRefused);
  } else if (const auto* bound = message.as<wire::PlanAnswer>()) {
    if ((from_member || from_server) && is_frozen() && bound->version == asked_) on_answer(rank, bound->first);
  } else if (const auto* change = message.as<wire::PlanSwitch>()) {
    if (from_leader && is_frozen() && change->version == asked_ && change->first >= unbound_) on_switch(change->first);
  }
}

/// False: it makes no sense here.
bool PlanChanges::take_ask(const wire::PlanAsk& ask, const std::vector<double>& weights) {
  const schedule::Topology& topology = group_.info.topology;
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const auto members = static_cast<std::size_t>(topology.nodes() + topology.servers());
  const bool sane = ask.version == newest_ + 1 &&
                    schedule::is_sane(ask.turns, std::max(group_.info.tuning.chunk_bytes_max, group_.info.limits.chunk_bytes)) &&
                    (weights.size() == members ||
                     (group_.newcomers->met() > 0 && weights.size() == members + group_.newcomers->met())) &&
                    std::all_of(weights.begin(), weights.end(), [](double w) { return std::isfinite(w) && w >= 0.0; }) &&
                    std::isfinite(total) && total > 0.0;
  if (sane) on_ask(ask, weights);
  return sane;
}

}  // namespace hybridps::worker
