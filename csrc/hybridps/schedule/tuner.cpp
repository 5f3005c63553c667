#include "hybridps/schedule/tuner.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <numeric>
#include <utility>

namespace hybridps::schedule {
namespace {

constexpr double kNoiseMin = 0.02;    // noise of an operation's time is never taken for less
constexpr double kErrors = 2.5;       // a gain counts if it is this many times its error
constexpr double kErrorsOfFew = 3.5;  // the same for fewer than kFew operations
constexpr std::size_t kFew = 6;
constexpr double kOutlier = 0.3;  // a larger logarithm of a deviation counts as this
constexpr int kBlockMin = 2;
constexpr int kBlockMax = 16;
constexpr int kPairsOfRound = 2;
static_assert(Tuner::kPairsMax % kPairsOfRound == 0);
constexpr int kPassesMax = 3;
constexpr int kStrideMax = 4;
constexpr std::size_t kTypicalCount = 32;
constexpr std::size_t kClassesMax = 64;

double median(std::vector<double> values) {
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

/// `values`: pairs of value and weight, not empty.
double weighted_median(std::vector<std::pair<double, double>> values) {
  std::sort(values.begin(), values.end());
  double total = 0.0;
  for (const auto& [value, weight] : values) total += weight;
  double below = 0.0;
  for (std::size_t i = 0; i < values.size(); ++i) {
    below += values[i].second;
    if (below == total / 2 && i + 1 < values.size()) return (values[i].first + values[i + 1].first) / 2;
    if (below > total / 2) return values[i].first;
  }
  return values.back().first;
}

}  // namespace

Tuner::Tuner(std::vector<Knob> knobs, std::uint64_t seed) : knobs_(std::move(knobs)), random_(seed | 1) {
  for (const Knob& knob : knobs_) {
    current_.push_back(knob.at);
    usual_.push_back(knob.usual < 0 ? knob.at : knob.usual);
  }
  announced_ = current_;
  begin_pass();
  if (current_ != usual_) phase_ = Phase::kUsual;
}

void Tuner::order_knobs() {
  std::stable_sort(order_.begin(), order_.end(),
                   [this](std::size_t a, std::size_t b) { return sensitivity_[a] > sensitivity_[b]; });
  sensitivity_.assign(knobs_.size(), 0.0);
}

Tuner::Class Tuner::class_of(const TimedOperation& sample) noexcept {
  return std::uint64_t{sample.kind} << 8 | static_cast<std::uint64_t>(std::bit_width(sample.bytes));
}

void Tuner::begin_pass() {
  phase_ = Phase::kPass;
  pass_began_ = current_;
  forget_price();
  probed_.assign(2 * knobs_.size(), false);
  step_ = 2;
  stride_ = 1;
  passes_ = 0;
  place_ = 0;
  order_.resize(knobs_.size());
  std::iota(order_.begin(), order_.end(), std::size_t{0});
  sensitivity_.assign(knobs_.size(), 0.0);
  direction_ = 1;
  moved_ = gained_ = false;
  operations_ = 0;
  typical_.clear();
  lately_.clear();
}

void Tuner::rest() {
  phase_ = Phase::kRest;
  operations_ = 0;
}

void Tuner::on_operation(const TimedOperation& sample) {
  ++operations_;
  if (sample.seconds > 0.0) {
    spent_ += sample.seconds;
    gained_seconds_ += sample.seconds * std::expm1(-log_now_);
  }
  if (phase_ != Phase::kRest || sample.bytes == 0 || !(sample.seconds > 0.0)) return;
  const Class of = class_of(sample);
  if (typical_.size() >= kClassesMax && typical_.count(of) == 0) return;
  std::vector<double>& typical = typical_[of];
  const double per_byte = sample.seconds / static_cast<double>(sample.bytes);
  if (typical.size() < kTypicalCount) {
    typical.push_back(per_byte);
    if (typical.size() == kTypicalCount) typical.front() = median(typical);  // only the median is kept
    return;
  }
  lately_.push_back(per_byte / typical.front());
  if (lately_.size() < kTypicalCount) return;
  const double ratio = median({lately_.begin(), lately_.end()});
  lately_.clear();
  if (ratio < kChanged && ratio > 1.0 / kChanged) return;
  rest_ = kRestMin;
  begin_pass();
}

bool Tuner::begin_move(std::size_t k, int rungs) {
  const int to = std::clamp(current_[k] + rungs, 0, knobs_[k].rungs - 1);
  if (to == current_[k]) return false;
  if (std::abs(to - current_[k]) <= step_) stride_ = 1;  // end of the ladder: the next pass tries a shorter step
  trial_ = Trial{};
  trial_->knob = static_cast<int>(k);
  trial_->b = current_;
  trial_->b[k] = to;
  const std::size_t way = 2 * k + (rungs > 0 ? 1 : 0);
  trial_->probes = !probed_[way];
  probed_[way] = true;
  return true;
}

// Goes to the next direction of this knob, the next knob, or the next pass. False: nothing is left to try.
bool Tuner::advance() {
  if (std::exchange(stride_, 1) > 1) return true;  // try a shorter stride
  if (direction_ > 0 && !moved_) {
    direction_ = -1;
  } else {
    direction_ = 1;
    moved_ = false;
    if (phase_ == Phase::kLook) {
      place_ = (place_ + 1) % knobs_.size();
      return false;
    }
    if (++place_ == knobs_.size()) {
      place_ = 0;
      order_knobs();
      if (step_ == 1 && (!gained_ || ++passes_ == kPassesMax)) return false;
      step_ = 1;
      gained_ = false;
    }
  }
  return true;
}

bool Tuner::begin_trial() {
  if (phase_ == Phase::kUsual) {
    trial_ = Trial{};
    trial_->knob = kUsual;
    trial_->b = usual_;
    trial_->probes = true;
    return true;
  }
  if (phase_ == Phase::kRest) {
    if (operations_ < rest_) return false;
    phase_ = Phase::kLook;
    pass_began_ = current_;
    log_began_ = log_now_;
    step_ = stride_ = 1;
    direction_ = 1;
    moved_ = gained_ = false;
  }
  while (phase_ == Phase::kPass || phase_ == Phase::kLook) {
    if (begin_move(order_[place_], direction_ * step_ * stride_)) return true;
    if (!advance()) end_pass();
  }
  if (phase_ == Phase::kRest) return false;
  trial_ = Trial{};
  trial_->knob = kBack;
  trial_->b = pass_began_;
  return true;
}

// Called when nothing is left to try.
void Tuner::end_pass() {
  const bool found = current_ != pass_began_;
  if (phase_ == Phase::kLook) rest_ = found ? kRestMin : std::min(2 * rest_, kRestMax);
  if (found) {
    typical_.clear();
    lately_.clear();
    phase_ = Phase::kGuard;
  } else {
    rest();
  }
}

Tuner::Round Tuner::round_of(int pairs, int depth) {
  Round round;
  round.a = current_;
  round.b = trial_ ? trial_->b : current_;
  round.pairs = pairs;
  round.block = std::clamp(2 * depth, kBlockMin, kBlockMax);
  random_ ^= random_ << 13;
  random_ ^= random_ >> 7;
  random_ ^= random_ << 17;
  // A B B A or B A A B: a pattern of the program with this period then meets both A and B.
  const auto drawn = static_cast<std::uint32_t>(random_ >> 20) & 0x55555555U;
  round.order = pairs == 1 ? (trial_->pairs == 0 ? 0U : 1U) : drawn | ((~drawn & 0x55555555U) << 1);
  announced_ = current_;
  refused_ = false;
  return round;
}

std::optional<Tuner::Round> Tuner::next(int depth) {
  if (knobs_.empty()) return std::nullopt;
  if (refused_) {
    announced_.clear();  // unknown
    refused_ = false;
    if (trial_ && ++refusals_ >= kRefusalsMax) {
      refusals_ = 0;
      conclude({}, /*keep=*/false);
    }
  }
  if (!trial_) {
    if (phase_ != Phase::kRest && trials_ == 0 && operations_ < kWarmUp) return std::nullopt;
    if (!can_pay() || !begin_trial()) {
      if (announced_ == current_) return std::nullopt;
      return round_of(0, depth);
    }
  }
  return round_of(trial_->probes && trial_->pairs < kPairsOfRound ? 1 : kPairsOfRound, depth);
}

void Tuner::on_round(const Round& round, const std::vector<TimedOperation>& samples) {
  refusals_ = 0;
  if (!trial_ || round.pairs == 0) return;
  trial_->pairs += round.pairs;
  for (const TimedOperation& sample : samples) {
    if (sample.bytes == 0 || !(sample.seconds > 0.0) || sample.index < 0 || sample.index >= round.operations())
      continue;
    const auto bytes = static_cast<double>(sample.bytes);
    trial_->seen.push_back({class_of(sample), round.is_b(sample.index), bytes, sample.seconds / bytes});
  }
  pay(round, samples);
  const Finding finding = find();
  if (const Judgement verdict = judge(finding); verdict != Judgement::kOpen)
    conclude(finding, verdict == Judgement::kKeep);
}

// Adds the time of these operations, and their extra time over the settings in use: by medians, to ignore outliers.
void Tuner::pay(const Round& round, const std::vector<TimedOperation>& samples) {
  std::map<Class, std::pair<std::vector<double>, std::vector<double>>> by_class;
  for (const Trial::Seen& one : trial_->seen) {
    auto& [a, b] = by_class[one.of];
    (one.b ? b : a).push_back(one.per_byte);
  }
  double price = 0.0;
  for (const TimedOperation& sample : samples) {
    if (sample.bytes == 0 || !(sample.seconds > 0.0) || sample.index < 0) continue;
    spent_ += sample.seconds;
    const auto found = by_class.find(class_of(sample));
    if (found == by_class.end() || found->second.first.empty()) continue;
    const double typical = median(found->second.first);
    const auto bytes = static_cast<double>(sample.bytes);
    gained_seconds_ += bytes * typical * std::expm1(-log_now_);
    if (round.is_b(sample.index)) price += bytes * (median(found->second.second) - typical);
  }
  price_ += std::max(0.0, price);
}

Tuner::Finding Tuner::find() const {
  // A class that only A or only B has met says nothing.
  std::map<Class, std::pair<std::vector<double>, std::vector<double>>> by_class;
  for (const Trial::Seen& one : trial_->seen) {
    auto& [a, b] = by_class[one.of];
    (one.b ? b : a).push_back(one.per_byte);
  }
  std::vector<std::pair<double, double>> logs[2];
  double least[2] = {1e300, 1e300};
  double most[2] = {0.0, 0.0};
  for (const Trial::Seen& one : trial_->seen) {
    const auto& [a, b] = by_class[one.of];
    if (a.empty() || b.empty()) continue;
    const double typical = std::sqrt(median(a) * median(b));
    logs[one.b ? 1 : 0].emplace_back(std::log(one.per_byte / typical), typical * one.bytes);
    least[one.b] = std::min(least[one.b], one.per_byte / typical);
    most[one.b] = std::max(most[one.b], one.per_byte / typical);
  }
  Finding finding;
  finding.count = std::min(logs[0].size(), logs[1].size());
  if (finding.count == 0) return finding;
  const double middle[2] = {weighted_median(logs[0]), weighted_median(logs[1])};
  finding.log_ratio = middle[1] - middle[0];
  finding.worse = std::log(least[1] / most[0]);
  finding.better = std::log(least[0] / most[1]);
  finding.quickest = std::log(least[1] / least[0]);
  // Not the median deviation: where one class mixes two kinds of operations, it could be zero.
  double squares = 0.0;
  double weights = 0.0;
  for (int kind = 0; kind < 2; ++kind)
    for (const auto& [value, weight] : logs[kind]) {
      squares += weight * std::pow(std::min(kOutlier, std::fabs(value - middle[kind])), 2);
      weights += weight;
    }
  const double noise = std::max(kNoiseMin, std::sqrt(squares / weights));
  // 1.25: error of a median / error of a mean.
  finding.error = 1.25 * noise * std::sqrt(2.0 / static_cast<double>(finding.count));
  return finding;
}

Tuner::Judgement Tuner::judge(const Finding& finding) const {
  const double gain = -std::log1p(-kGainMin);
  const bool last = trial_->pairs >= kPairsMax;
  const Judgement open = last ? Judgement::kTakeBack : Judgement::kOpen;
  if (finding.count == 0) return open;
  const bool few = finding.count < kFew;
  const double errors = (few ? kErrorsOfFew : kErrors) * finding.error;
  if (trial_->knob == kUsual) {
    const double much = std::log1p(kMuchWorse);
    if (finding.quickest > std::log1p(kFarWorse)) return Judgement::kTakeBack;
    if (trial_->pairs == 1) return Judgement::kOpen;
    if (finding.log_ratio + errors < much) return Judgement::kKeep;
    if (finding.log_ratio - errors > much) return Judgement::kTakeBack;
    return !last ? Judgement::kOpen : finding.log_ratio > much ? Judgement::kTakeBack : Judgement::kKeep;
  }
  if (finding.worse > std::log1p(kMuchWorse) && trial_->knob != kBack) return Judgement::kTakeBack;
  // In one pair, a slow part of the program may meet only A or only B: a gain is believed only after both orders.
  if (trial_->pairs == 1) return finding.quickest > std::log1p(kMuchWorse) ? Judgement::kTakeBack : Judgement::kOpen;
  if (finding.better > std::log1p(kMuchBetter) && trial_->knob != kBack) return Judgement::kKeep;
  if (trial_->knob < 0) {  // kBack: go back to where the pass began, unless this is known to be slower
    if (finding.log_ratio - errors > 0.0) return Judgement::kTakeBack;
    if (!last) return Judgement::kOpen;
    return finding.log_ratio > gain ? Judgement::kTakeBack : Judgement::kKeep;
  }
  if (finding.log_ratio < -gain && finding.log_ratio + errors < 0.0) return Judgement::kKeep;
  if (finding.log_ratio > (few ? -gain / 2 : -gain)) return Judgement::kTakeBack;
  return open;
}

void Tuner::conclude(const Finding& finding, bool keep) {
  const Trial trial = *std::exchange(trial_, std::nullopt);
  ++trials_;
  tried_.push_back({trial.knob, current_, trial.b, std::exp(finding.log_ratio), trial.pairs, keep});
  if (tried_.size() > kTriedKept) tried_.pop_front();
  if (trial.knob >= 0) {
    double& most = sensitivity_[static_cast<std::size_t>(trial.knob)];
    most = std::max(most, std::fabs(finding.log_ratio));
  }
  if (keep) {
    ++kept_;
    current_ = trial.b;
    log_now_ = trial.knob == kBack ? log_began_ : log_now_ + finding.log_ratio;
  }
  if (trial.knob == kUsual) {
    phase_ = Phase::kPass;
    pass_began_ = current_;
    if (keep) forget_price();
    return;
  }
  if (trial.knob < 0) {  // the end of a pass
    rest();
    return;
  }
  if (keep) {
    moved_ = gained_ = true;
    if (step_ > 1) stride_ = std::min(2 * stride_, kStrideMax);
  } else if (!advance()) {
    end_pass();
  }
}

}  // namespace hybridps::schedule
