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
// An answer: the question made no sense here, as when its text was lost for want of a slot. As the switch point: no change.

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

PlanChanges::PlanChanges(Worker& worker, GroupState& group, bool measures) : worker_(worker), group_(group) {
  const schedule::Topology& topology = group.info.topology;
  bindings_.emplace(0, Binding{0, topology});
  measures_ = measures && topology.nodes() >= 3;
  if (!measures_) return;
  choose_partners();
  if (topology.rank() == 0)
    finder_ = std::make_unique<schedule::RateFinder>(static_cast<std::size_t>(topology.nodes()),
                                                     static_cast<std::size_t>(topology.servers()));
}

void PlanChanges::choose_partners() {
  const schedule::Topology& topology = group_.info.topology;
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

void PlanChanges::on_started(const OperationRun& run) {
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

void PlanChanges::on_finished(const OperationRun& run) {
  postponed_.erase(run.sequence);
  if (!measured_ || measured_->sequence != run.sequence) return;
  const std::unique_ptr<Measured> measured = std::move(measured_);
  const core::TimePoint now = core::Clock::now();
  if (measured->since == core::TimePoint{} || now <= measured->since || !group_.status.is_ok()) return;
  const schedule::Topology& topology = group_.info.topology;
  Report report;
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
  if (is_frozen() || binding.version != newest()) return;
  const schedule::Shares shares = shares_of(binding.topology);
  const std::vector<schedule::CardReport> cards = cards_of(reports, shares);
  for (const schedule::CardReport& card : cards)
    if (!(card.delay_seconds > 0.0)) return;  // nobody had an answer of this server
  const auto better = finder_->learn(cards, shares);
  if (!better) return;
  std::vector<double> weights = better->worker;
  weights.insert(weights.end(), better->dedicated.begin(), better->dedicated.end());
  for (int server = 0; server < topology.servers(); ++server)
    if (group_.lost_servers->contains(topology.size() + server))
      weights[static_cast<std::size_t>(topology.nodes() + server)] = 0.0;
  if (std::accumulate(weights.begin(), weights.end(), 0.0) <= 0.0) return;
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
  const wire::PlanAsk ask{newest() + 1};
  const std::string_view text(reinterpret_cast<const char*>(weights.data()), weights.size() * sizeof(double));
  for (int rank = 1; rank < group_.info.topology.size(); ++rank)
    worker_.host().send_control(group_.info.engines[static_cast<std::size_t>(rank)], group_.message(ask), text);
  on_ask(ask.version, weights);
}

void PlanChanges::on_ask(std::uint32_t version, std::vector<double> weights) {
  asked_ = version;
  asked_weights_ = std::move(weights);
  unbound_ = group_.submitted;
  if (group_.info.topology.rank() == 0) {
    answers_.clear();
    on_answer(0, unbound_);
    return;
  }
  answer(version, unbound_);
}

void PlanChanges::answer(std::uint32_t version, std::uint64_t first_unbound) {
  worker_.host().send_control(group_.info.engines.front(), group_.message(wire::PlanAnswer{version, first_unbound}),
                              {});
}

void PlanChanges::on_answer(int rank, std::uint64_t first_unbound) {
  answers_[rank] = first_unbound;
  const int size = group_.info.topology.size();
  if (answers_.size() < static_cast<std::size_t>(size)) return;
  std::uint64_t first = 0;
  for (const auto& [from, unbound] : answers_) first = std::max(first, unbound);
  const wire::PlanSwitch change{asked_, first};
  for (int other = 1; other < size; ++other)
    worker_.host().send_control(group_.info.engines[static_cast<std::size_t>(other)], group_.message(change), {});
  on_switch(first);
}

void PlanChanges::on_switch(std::uint64_t first) {
  if (first == wire::kRefused) {
    asked_ = 0;
    after_change();
    return;
  }
  const auto servers = asked_weights_.begin() + group_.info.topology.nodes();
  schedule::Topology topology =
      group_.info.topology.with_weights({asked_weights_.begin(), servers}, {servers, asked_weights_.end()});
  core::log_info("group \"", group_.info.name, "\": plan version ", asked_, " from operation ", first, " on");
  // Whatever was submitted here is bound; but for what is reserved and will come late, and what waits for this.
  std::uint64_t oldest = group_.reserved.empty() ? first : *group_.reserved.begin();
  oldest = std::min(oldest, group_.submitted);
  for (const std::uint64_t sequence : postponed_) oldest = std::min(oldest, sequence);
  while (bindings_.size() > 1 && std::next(bindings_.begin())->first <= oldest) bindings_.erase(bindings_.begin());
  if (bindings_.begin()->first != 0) {
    auto last = bindings_.extract(bindings_.begin());
    last.key() = 0;
    bindings_.insert(std::move(last));
  }
  worker_.host().on_shares(group_.info.uid, topology);
  bool has_lost = false;
  for (int server = 0; server < topology.servers(); ++server)
    has_lost = has_lost || (topology.server_weight(server) > 0.0 && group_.lost_servers->contains(topology.size() + server));
  leaves_out_ = leaves_out_ && has_lost;
  bindings_.insert_or_assign(first, Binding{std::exchange(asked_, 0), std::move(topology)});
  after_change();
}

void PlanChanges::take_ask(std::uint32_t version, std::vector<double> weights) {
  const schedule::Topology& topology = group_.info.topology;
  const double total = std::accumulate(weights.begin(), weights.end(), 0.0);
  const bool sane =
      weights.size() == static_cast<std::size_t>(topology.nodes() + topology.servers()) &&
      std::all_of(weights.begin(), weights.end(), [](double w) { return std::isfinite(w) && w >= 0.0; }) &&
      std::isfinite(total) && total > 0.0;
  if (sane)
    on_ask(version, std::move(weights));
  else
    answer(version, wire::kRefused);
}

// A change is over: what has waited for that.
void PlanChanges::after_change() {
  start_postponed();
  if (leaves_out_) leave_out_at_ = core::Clock::now() + kAgainAfter;
  if (const auto next = std::exchange(next_ask_, {}); next && !is_frozen() && next->first == newest() + 1)
    take_ask(next->first, next->second);
}

void PlanChanges::leave_out_lost() {
  if (is_frozen()) {
    leaves_out_ = true;
    return;
  }
  leaves_out_ = true;  // until a version does
  leave_out_at_ = core::TimePoint::max();
  const schedule::Topology& now = bindings_.rbegin()->second.topology;
  std::vector<bool> are_there;
  for (int server = 0; server < now.servers(); ++server)
    are_there.push_back(!group_.lost_servers->contains(now.size() + server));
  std::vector<double> weights;
  if (group_.info.weights_with) {
    weights = group_.info.weights_with(are_there);
  } else {
    for (int node = 0; node < now.nodes(); ++node) weights.push_back(now.weight(node));
    for (int server = 0; server < now.servers(); ++server)
      weights.push_back(are_there[static_cast<std::size_t>(server)] ? now.server_weight(server) : 0.0);
  }
  if (std::accumulate(weights.begin(), weights.end(), 0.0) <= 0.0)  // all was theirs
    std::fill_n(weights.begin(), now.nodes(), 1.0);
  propose(weights);
}

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
                       numbers_in(payload)});
  } else if (const auto* ask = message.as<wire::PlanAsk>()) {
    if (!from_leader) return;
    std::vector<double> weights = numbers_in(payload);
    if (is_frozen() && ask->version == asked_ + 1) {  // it has overtaken the end of the last change
      next_ask_ = std::pair(ask->version, std::move(weights));
      return;
    }
    if (is_frozen() || ask->version != newest() + 1) return;
    take_ask(ask->version, std::move(weights));
  } else if (const auto* bound = message.as<wire::PlanAnswer>()) {
    if (from_member && is_frozen() && bound->version == asked_) on_answer(rank, bound->first);
  } else if (const auto* change = message.as<wire::PlanSwitch>()) {
    if (from_leader && is_frozen() && change->version == asked_ && change->first >= unbound_) on_switch(change->first);
  }
}

}  // namespace hybridps::worker
