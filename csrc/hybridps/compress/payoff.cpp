#include "hybridps/compress/payoff.h"

#include <algorithm>
#include <limits>
#include <utility>

namespace hybridps::compress {
namespace {

constexpr std::uint64_t kStepsOfShare = 2;
constexpr std::uint64_t kStepsOfTrial = 4;
// A predicted gain of this factor needs no trial. The margin is for costs that do not shrink with bytes, which the
// model leaves out.
constexpr double kCertainGain = 2.5;
// Part of a codec's greatest possible gain. Enough for codecs that cannot reach kCertainGain.
constexpr double kCertainPart = 0.75;
constexpr std::uint64_t kClassBegin[Payoff::kClasses] = {0, 256 << 10, 1 << 20, 4 << 20, 16 << 20};
constexpr double kNone = std::numeric_limits<double>::infinity();

double seconds_or_none(double seconds) { return seconds > 0.0 ? seconds : kNone; }

}  // namespace

Payoff::Payoff(double ratio, bool decides) noexcept
    : ratio_(ratio), phase_(decides ? PayoffPhase::kSettling : PayoffPhase::kDecided) {
  for (Decision& decision : decisions_) decision.why = decides ? Why::kUndecided : Why::kForced;
}

std::size_t Payoff::class_of(std::uint64_t bytes) noexcept {
  std::size_t found = 0;
  for (std::size_t i = 0; i < kClasses; ++i)
    if (bytes >= kClassBegin[i]) found = i;
  return found;
}

std::uint64_t Payoff::class_begin(std::size_t size_class) noexcept { return kClassBegin[size_class]; }

std::string Payoff::class_text(std::size_t size_class) {
  const auto text = [](std::uint64_t bytes) {
    return bytes >= 1 << 20 ? std::to_string(bytes >> 20) + " MiB" : std::to_string(bytes >> 10) + " KiB";
  };
  if (size_class == 0) return "below " + text(kClassBegin[1]);
  if (size_class + 1 == kClasses) return "from " + text(kClassBegin[size_class]) + " on";
  return text(kClassBegin[size_class]) + " to " + text(kClassBegin[size_class + 1]);
}

// Sums in order of issue. A sum may not have ended, if a program does not wait for it. Then the class of that sum is
// not measured.
Payoff::Step Payoff::measure(const std::vector<std::shared_ptr<TimedSum>>& sums) {
  Step step;
  std::array<bool, kClasses> missing{};
  core::TimePoint before{};
  for (const auto& sum : sums) {
    if (!sum->is_over()) {
      missing[sum->size_class] = true;
      continue;
    }
    const core::TimePoint from = std::max(sum->began(), before);
    const core::TimePoint ended = sum->ended();
    if (ended > from) step[sum->size_class].seconds += core::to_seconds(ended - from);
    step[sum->size_class].codecs += core::to_seconds(sum->codecs());
    before = std::max(before, ended);
  }
  for (std::size_t i = 0; i < kClasses; ++i)
    if (missing[i]) step[i] = {};
  return step;
}

void Payoff::begin_step() {
  if (phase_ == PayoffPhase::kDecided) return;
  if (phase_ == PayoffPhase::kShare || phase_ == PayoffPhase::kTrial) {
    const bool coded = phase_ == PayoffPhase::kShare || left_ == kStepsOfTrial - 1 || left_ == kStepsOfTrial - 2;
    if (!sums_.empty()) steps_.emplace_back(coded, measure(sums_));
  }
  sums_.clear();
  const auto enter = [&](PayoffPhase phase, std::uint64_t steps) {
    phase_ = phase;
    left_ = steps;
  };
  switch (phase_) {
    case PayoffPhase::kSettling:
      if (left_-- == 0) enter(PayoffPhase::kShare, kStepsOfShare);
      break;
    case PayoffPhase::kShare:
      if (--left_ == 0) {
        enter(PayoffPhase::kAskShare, 1);
        asks_ = true;
      }
      break;
    case PayoffPhase::kTrial:
      if (--left_ == 0) {
        enter(PayoffPhase::kAskTrial, 1);
        asks_ = true;
      }
      break;
    default: break;  // answer() continues
  }
}

std::optional<std::vector<double>> Payoff::question() {
  if (!std::exchange(asks_, false)) return {};
  std::vector<double> values(3 * kClasses, kNone);
  for (const auto& [coded, step] : steps_) {
    for (std::size_t i = 0; i < kClasses; ++i) {
      const StepTimes& measured = step[i];
      double& least = values[(coded ? 0 : kClasses) + i];
      least = std::min(least, seconds_or_none(measured.seconds));
      // The part of the time outside the codec: the smallest value of all steps and ranks.
      if (coded && measured.seconds > 0.0)
        values[2 * kClasses + i] =
            std::min(values[2 * kClasses + i], std::max(0.0, 1.0 - measured.codecs / measured.seconds));
    }
  }
  steps_.clear();
  return values;
}

void Payoff::answer(const std::vector<double>& least) {
  const bool asked_share = phase_ == PayoffPhase::kAskShare;
  if (!asked_share && phase_ != PayoffPhase::kAskTrial) return;
  const bool known = least.size() == 3 * kClasses;
  bool doubt = false;
  for (std::size_t i = 0; known && i < kClasses; ++i) {
    Decision& decision = decisions_[i];
    const double coded = least[i];
    const double plain = least[kClasses + i];
    const double rest = least[2 * kClasses + i];
    if (coded == kNone) continue;
    if (asked_share) {
      decision.codec_share = 1.0 - rest;
      decision.coded_seconds = coded;
      decision.plain_seconds = coded * rest / ratio_;
      if (rest / ratio_ >= std::min(kCertainGain, kCertainPart / ratio_))
        decision.why = Why::kShare;
      else
        doubt = true;
    } else if (decision.why == Why::kUndecided && plain != kNone) {
      decision.why = Why::kTrial;
      decision.coded_seconds = coded;
      decision.plain_seconds = plain;
      decision.coded = coded < plain;
    }
  }
  if (doubt) {
    phase_ = PayoffPhase::kTrial;
    left_ = kStepsOfTrial + 1;  // begin_step() counts it down, so the next step is the first
    return;
  }
  phase_ = PayoffPhase::kDecided;
  // Size classes that did not occur go as the nearest known class below, or else above.
  const auto is_known = [&](std::size_t i) { return decisions_[i].why != Why::kUndecided; };
  std::optional<bool> nearest;
  for (std::size_t i = 0; i < kClasses; ++i)
    if (is_known(i))
      nearest = decisions_[i].coded;
    else if (nearest)
      decisions_[i].coded = *nearest;
  nearest.reset();
  for (std::size_t i = kClasses; i-- > 0;)
    if (is_known(i))
      nearest = decisions_[i].coded;
    else if (nearest && std::none_of(decisions_.begin(), decisions_.begin() + static_cast<std::ptrdiff_t>(i),
                                     [](const Decision& d) { return d.why != Why::kUndecided; }))
      decisions_[i].coded = *nearest;
}

bool Payoff::is_coded(std::uint64_t bytes) const noexcept {
  const Decision& decision = decisions_[class_of(bytes)];
  if (phase_ == PayoffPhase::kTrial && (left_ == kStepsOfTrial || left_ == 1)) return decision.why != Why::kUndecided;
  return phase_ != PayoffPhase::kDecided || decision.coded;
}

std::shared_ptr<TimedSum> Payoff::timed(std::uint64_t bytes) {
  if (phase_ != PayoffPhase::kShare && phase_ != PayoffPhase::kTrial) return nullptr;
  auto sum = std::make_shared<TimedSum>();
  sum->size_class = class_of(bytes);
  sums_.push_back(sum);
  return sum;
}

}  // namespace hybridps::compress
