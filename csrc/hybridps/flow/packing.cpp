#include "hybridps/flow/packing.h"

#include <algorithm>

namespace hybridps::flow {
namespace {

// Seconds for a byte before the first chunk: slower than any machine that this runs on.
constexpr double kFirstGuess = 1e-9;
constexpr double kRatioStep = 1.0 / 16;

}  // namespace

void PathRate::begin_wait(core::TimePoint now, core::Duration busy) noexcept {
  if (waiting_) return;
  waiting_ = true;
  since_ = now;
  busy_since_ = busy;
}

void PathRate::take(core::TimePoint now, core::Duration busy) noexcept {
  time_ += now - since_;
  busy_ += busy - busy_since_;
  since_ = now;
  busy_since_ = busy;
}

void PathRate::end_wait(core::TimePoint now, core::Duration busy) noexcept {
  if (!waiting_) return;
  take(now, busy);
  waiting_ = false;
}

bool PathRate::add(std::size_t wire_bytes, core::TimePoint now, core::Duration busy) noexcept {
  if (!waiting_) return false;
  bytes_ += wire_bytes;
  if (bytes_ < kSampleBytes) return false;
  take(now, busy);
  const double seconds = std::max(core::to_seconds(time_), 1e-9);
  rates_[samples_++ % kSamples] = static_cast<double>(bytes_) / seconds;
  busy_part_ = core::to_seconds(busy_) / seconds;
  bytes_ = 0;
  time_ = busy_ = {};
  return true;
}

double PathRate::rate() const noexcept { return *std::max_element(rates_.begin(), rates_.end()); }

void Packing::Least::add(std::size_t bytes, core::Duration took) noexcept {
  if (bytes > 0) seconds[count++ % kChunks] = std::max(core::to_seconds(took), 1e-9) / static_cast<double>(bytes);
}

double Packing::Least::value(double unset) const noexcept {
  double least = 0.0;
  for (const double each : seconds)
    if (each > 0.0 && (least == 0.0 || each < least)) least = each;
  return least > 0.0 ? least : unset;
}

void Packing::note_packed(std::size_t bytes, std::size_t wire_bytes, core::Duration took) noexcept {
  packing_.add(bytes, took);
  counts_.bytes += bytes;
  counts_.wire_bytes += wire_bytes;
  counts_.packing += took;
  ratio_ += (static_cast<double>(wire_bytes) / static_cast<double>(bytes) - ratio_) * kRatioStep;
}

void Packing::note_refused(core::Duration took) noexcept {
  ++counts_.refused;
  counts_.packing += took;
}

void Packing::note_unpacked(std::size_t bytes, core::Duration took) noexcept {
  unpacking_.add(bytes, took);
  counts_.unpacking += took;
}

double Packing::rate_limit() const noexcept {
  const double cost = packing_.value(kFirstGuess);
  return kCostPart * ratio_ / (cost + unpacking_.value(cost));
}

void Packing::decide(PathRate& path, double together) const noexcept {
  const double limit = rate_limit();
  if (path.rate() > limit || together > limit)
    path.set(PathState::kFast);
  else if (path.busy() > (path.packs() ? kBusyToEnd : kBusyToBegin))
    path.set(PathState::kBusy);
  else
    path.set(PathState::kPacks);
}

const char* text_of(PathState state) noexcept {
  switch (state) {
    case PathState::kUnknown: return "not measured yet";
    case PathState::kPacks: return "on";
    case PathState::kFast: return "off: the path is faster";
    case PathState::kBusy: return "off: the cores are busy";
  }
  return "";
}

}  // namespace hybridps::flow
