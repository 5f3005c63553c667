#include "hybridps/membership/rates.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hybridps::membership {
namespace {

// The measurement begins this long after the start. Shorter operations are not worth a measurement. The first part of
// an operation says little, because a rank may come late.
constexpr auto kMeasureAfter = std::chrono::milliseconds(10);
constexpr auto kEchoEvery = std::chrono::milliseconds(5);
constexpr std::size_t kPartnersMax = 6;
constexpr std::size_t kEchoesMin = 3;
constexpr std::size_t kReportsKept = 4;

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

std::vector<schedule::CardReport> cards_of(const RateReport& report, const schedule::Topology& topology,
                                           const schedule::Shares& shares) {
  const auto nodes = static_cast<std::size_t>(topology.nodes());
  std::vector<schedule::CardReport> cards(nodes + static_cast<std::size_t>(topology.servers()));
  for (const auto& [node, seen] : report.nodes) {
    cards[static_cast<std::size_t>(node)].bytes_per_second = seen.bytes_per_second;
    cards[static_cast<std::size_t>(node)].delay_seconds = seen.delay_seconds;
  }
  for (std::size_t server = 0; server < report.server_delays.size() && nodes + server < cards.size(); ++server)
    cards[nodes + server].delay_seconds = report.server_delays[server];
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

}  // namespace

void RateReport::add(const RateReport& other) {
  for (const auto& [node, rate] : other.nodes) {
    NodeRate& all = nodes[node];
    all.bytes_per_second += rate.bytes_per_second;
    all.delay_seconds = std::max(all.delay_seconds, rate.delay_seconds);
  }
  server_delays.resize(std::max(server_delays.size(), other.server_delays.size()), 0.0);
  for (std::size_t server = 0; server < other.server_delays.size(); ++server) {
    double& least = server_delays[server];
    const double delay = other.server_delays[server];
    if (delay > 0.0) least = least == 0.0 ? delay : std::min(least, delay);
  }
  bytes = std::max(bytes, other.bytes);
}

std::vector<double> RateReport::numbers() const {
  std::vector<double> all = server_delays;
  for (const auto& [node, rate] : nodes)
    all.insert(all.end(), {static_cast<double>(node), rate.delay_seconds, rate.bytes_per_second});
  return all;
}

std::optional<RateReport> RateReport::from_numbers(const std::vector<double>& numbers, std::size_t servers, int nodes) {
  if (numbers.size() < servers || (numbers.size() - servers) % 3 != 0) return std::nullopt;
  if (!std::all_of(numbers.begin(), numbers.end(), [](double n) { return std::isfinite(n) && n >= 0.0; }))
    return std::nullopt;
  const auto end = numbers.begin() + static_cast<std::ptrdiff_t>(servers);
  RateReport report{{}, {numbers.begin(), end}, 0};
  for (auto at = end; at != numbers.end(); at += 3) {
    if (at[0] >= nodes) return std::nullopt;
    report.nodes[static_cast<int>(at[0])] = {at[1], at[2]};
  }
  return report;
}

RateMeter::RateMeter(RatesHost& host, const schedule::Topology& topology, const Tree& tree)
    : host_(host),
      topology_(topology),
      tree_(tree),
      finder_(static_cast<std::size_t>(topology.nodes()), static_cast<std::size_t>(topology.servers())) {
  choose_partners();
}

void RateMeter::choose_partners() {
  partners_.clear();
  const int me = topology_.my_node();
  for (int step = 1; step < topology_.nodes() && partners_.size() < kPartnersMax; step *= 2)
    partners_.push_back(topology_.ranks_of((me + step) % topology_.nodes()).front());
  // Each node begins with another server.
  const int servers = topology_.servers();
  for (int i = 0; i < std::min(servers, static_cast<int>(kPartnersMax)); ++i)
    partners_.push_back(topology_.size() + (me + i) % servers);
}

void RateMeter::on_servers(const schedule::Topology& topology) {
  topology_ = topology;
  measured_.reset();
  choose_partners();
  finder_.set_servers(static_cast<std::size_t>(topology.servers()));
}

void RateMeter::on_started(std::uint64_t sequence, const wire::Signature& signature) {
  if (measured_ || sequence % kMeasureEvery != kMeasureEvery - 1) return;
  if (signature.kind != schedule::Kind::kAllReduce || signature.total_bytes < kMeasureBytesMin) return;
  measured_ = Measured{};
  measured_->sequence = sequence;
  measured_->round_trips.resize(partners_.size());
  next_echo_ = core::Clock::now() + kMeasureAfter;
}

std::size_t RateMeter::tick(core::TimePoint now) {
  if (!measured_ || now < next_echo_) return 0;
  next_echo_ = now + kEchoEvery;
  if (measured_->since == core::TimePoint{}) {
    measured_->since = now;
    measured_->bytes_before = host_.bytes_through_card();
  }
  if (!leads_its_node()) return 1;
  for (std::size_t partner = 0; partner < partners_.size(); ++partner)
    host_.send_echo(partners_[partner], wire::Echo{measured_->sequence, static_cast<std::uint32_t>(partner),
                                                   nanoseconds(core::Clock::now())});
  return 1;
}

void RateMeter::on_echo_back(const wire::Echo& sent) {
  const std::uint64_t now = nanoseconds(core::Clock::now());
  if (measured_ && sent.sequence == measured_->sequence && sent.partner < partners_.size() && sent.sent_ns < now)
    measured_->round_trips[sent.partner].push_back(static_cast<double>(now - sent.sent_ns) * 1e-9);
}

std::optional<RateReport> RateMeter::on_finished(std::uint64_t sequence, std::uint64_t bytes) {
  if (!measured_ || measured_->sequence != sequence) return std::nullopt;
  const Measured measured = *std::exchange(measured_, std::nullopt);
  const core::TimePoint now = core::Clock::now();
  if (measured.since == core::TimePoint{} || now <= measured.since) return std::nullopt;
  RateReport report;
  if (tree_.is_root()) report.bytes = bytes;
  report.server_delays.assign(static_cast<std::size_t>(topology_.servers()), 0.0);
  RateReport::NodeRate& mine = report.nodes[topology_.my_node()];
  mine.bytes_per_second =
      static_cast<double>(host_.bytes_through_card() - measured.bytes_before) / core::to_seconds(now - measured.since);
  if (!leads_its_node()) return report;
  for (std::size_t partner = 0; partner < partners_.size(); ++partner) {
    const std::vector<double>& times = measured.round_trips[partner];
    if (times.size() < kEchoesMin) continue;
    const double typical = median(times);
    if (topology_.is_dedicated(partners_[partner]))
      report.server_delays[static_cast<std::size_t>(partners_[partner] - topology_.size())] = typical;
    mine.delay_seconds = mine.delay_seconds == 0.0 ? typical : std::min(mine.delay_seconds, typical);
  }
  if (mine.delay_seconds == 0.0) return std::nullopt;
  return report;
}

std::optional<RateReport> RateMeter::on_report(int rank, std::uint64_t sequence, RateReport report) {
  reports_[sequence][rank] = std::move(report);
  while (reports_.size() > kReportsKept) reports_.erase(reports_.begin());
  const auto found = reports_.find(sequence);
  if (found == reports_.end() || found->second.size() <= tree_.children().size()) return std::nullopt;
  RateReport all;
  for (const auto& [from, one] : found->second) all.add(one);
  reports_.erase(found);
  return all;
}

std::optional<std::vector<double>> RateMeter::learn(const RateReport& report, const schedule::Topology& topology,
                                                    const std::vector<bool>& is_out) {
  const schedule::Shares shares = shares_of(topology);
  const std::vector<schedule::CardReport> cards = cards_of(report, topology, shares);
  const auto nodes = static_cast<std::size_t>(topology.nodes());
  for (std::size_t card = 0; card < cards.size(); ++card)
    if ((card < nodes || !is_out[card - nodes]) && !(cards[card].delay_seconds > 0.0))
      return std::nullopt;  // no rank has measured this card's delay
  const auto better = finder_.learn(cards, shares, report.bytes);
  if (!better) return std::nullopt;
  std::vector<double> weights = better->worker;
  weights.insert(weights.end(), better->dedicated.begin(), better->dedicated.end());
  return weights;
}

}  // namespace hybridps::membership
