#include "hybridps/flow/packing.h"

#include <algorithm>
#include <cstring>
#include <vector>

#include "hybridps/compress/exact.h"

namespace hybridps::flow {
namespace {

/// Seconds for a byte, each way, of values like gradients in this process.
struct CodecSpeed {
  double packing = 0.0;
  double unpacking = 0.0;
};

CodecSpeed measure() {
  constexpr std::size_t kElements = 16384;
  constexpr int kTurns = 4;  // the least counts
  const compress::Exact& exact = *compress::Exact::of(core::DType::kFloat32);
  std::vector<std::uint32_t> values(kElements);
  std::uint64_t random = 0x9e3779b97f4a7c15ULL;
  for (std::uint32_t& bits : values) {
    random = random * 6364136223846793005ULL + 1442695040888963407ULL;
    const auto high = static_cast<std::uint32_t>(random >> 32);
    bits = (high & 0x807fffffU) | (118U + (high >> 23) % 8U) << 23;
  }
  constexpr std::size_t kBytes = kElements * sizeof(std::uint32_t);
  std::vector<std::byte> packed(exact.bytes_max(kBytes));
  CodecSpeed least{1.0, 1.0};
  for (int turn = 0; turn < kTurns; ++turn) {
    const core::TimePoint began = core::Clock::now();
    exact.encode(reinterpret_cast<const std::byte*>(values.data()), kBytes, packed.data());
    const core::TimePoint middle = core::Clock::now();
    exact.expand(packed.data(), 0, kElements, reinterpret_cast<std::byte*>(values.data()));
    const core::TimePoint end = core::Clock::now();
    least.packing = std::min(least.packing, core::to_seconds(middle - began) / kBytes);
    least.unpacking = std::min(least.unpacking, core::to_seconds(end - middle) / kBytes);
  }
  return least;
}

}  // namespace

void PathRate::begin_wait() noexcept {
  waiting_ = true;
  moves_ = false;
}

void PathRate::take(core::TimePoint now, core::Duration busy) noexcept {
  time_ += now - since_;
  busy_ += busy - busy_since_;
  since_ = now;
  busy_since_ = busy;
}

void PathRate::end_wait(core::TimePoint now, core::Duration busy) noexcept {
  if (waiting_ && moves_) take(now, busy);
  waiting_ = false;
}

std::optional<PathRate::PathSample> PathRate::add(std::size_t bytes, std::size_t wire_bytes, core::TimePoint now,
                                                  core::Duration busy) noexcept {
  if (!moves_) {
    moves_ = true;
    since_ = now;
    busy_since_ = busy;
    return {};
  }
  bytes_ += bytes;
  wire_bytes_ += wire_bytes;
  if (wire_bytes_ < kSampleBytes) return {};
  take(now, busy);
  const PathSample sample{bytes_, wire_bytes_, std::max(core::to_seconds(time_), 1e-9)};
  rates_[samples_++ % kSamples] = static_cast<double>(wire_bytes_) / sample.seconds;
  busy_part_ = core::to_seconds(busy_) / sample.seconds;
  bytes_ = wire_bytes_ = 0;
  time_ = busy_ = {};
  return sample;
}

double PathRate::value() const noexcept { return *std::max_element(rates_.begin(), rates_.end()); }

double PathRate::mean() const noexcept {
  const std::size_t count = std::min(samples_, kSamples);
  double seconds = 0.0;  // for a byte of each sample: all samples have about as many bytes
  for (std::size_t i = 0; i < count; ++i) seconds += 1.0 / rates_[i];
  return count > 0 ? static_cast<double>(count) / seconds : 0.0;
}

bool PackingPath::add(std::size_t bytes, std::size_t wire_bytes, core::TimePoint now, core::Duration busy) noexcept {
  if (!rate_.is_waiting()) {
    if ((unwaited_ += wire_bytes) > kForgetBytes) set(PathState::kUnknown);
    return false;
  }
  unwaited_ = 0;
  const std::optional<PathRate::PathSample> sample = rate_.add(bytes, wire_bytes, now, busy);
  if (!sample) return false;
  if (packs() && static_cast<double>(sample->wire_bytes) <= kPacked * static_cast<double>(sample->bytes)) {
    if (samples_packed_ < PathRate::kSamples) {
      packed_bytes_ += sample->bytes;
      packed_seconds_ += sample->seconds;
      ++samples_packed_;
    }
  } else if (rest_ > 0) {
    --rest_;
  }
  return true;
}

void PackingPath::set(PathState state) noexcept {
  if (state == PathState::kPacks && !packs()) {
    rate_before_ = rate_.mean();
    packed_bytes_ = 0;
    packed_seconds_ = 0.0;
    samples_packed_ = 0;
  }
  state_ = state;
}

bool PackingPath::rests() noexcept {
  if (packs() && samples_packed_ == PathRate::kSamples) {
    if (static_cast<double>(packed_bytes_) < kGain * rate_before_ * packed_seconds_) {
      rest_ = next_rest_;
      next_rest_ = std::min(2 * next_rest_, kRestMax);
    } else {
      next_rest_ = kRest;
    }
  }
  return rest_ > 0;
}

void Packing::Least::add(std::size_t bytes, core::Duration took) noexcept {
  if (bytes > 0) seconds[count++ % kChunks] = std::max(core::to_seconds(took), 1e-9) / static_cast<double>(bytes);
}

double Packing::Least::value(double first) const noexcept {
  double least = count < kChunks ? first : seconds.front();
  for (const double each : seconds)
    if (each > 0.0) least = std::min(least, each);
  return least;
}

void Packing::note_packed(std::size_t bytes, std::size_t wire_bytes, core::Duration took) noexcept {
  packing_.add(bytes, took);
  counts_.bytes += bytes;
  counts_.wire_bytes += wire_bytes;
  counts_.packing += took;
}

void Packing::note_refused(core::Duration took) noexcept {
  ++counts_.refused;
  counts_.packing += took;
}

void Packing::note_unpacked(std::size_t bytes, core::Duration took) noexcept {
  unpacking_.add(bytes, took);
  counts_.unpacking += took;
}

double Packing::cost() const noexcept {
  static const CodecSpeed first = measure();
  return packing_.value(first.packing) + unpacking_.value(first.unpacking);
}

double Packing::rate_limit() const noexcept { return kCostPart / cost(); }

double Packing::worth_while_busy() const noexcept { return std::min(kWorthBusy, 1.0 - cost() / kSocketSecondsPerByte); }

void Packing::decide(PackingPath& path, double together, std::optional<double> idle) const noexcept {
  const double limit = rate_limit();
  if (path.rate().value() > limit || together > limit)
    path.set(PathState::kFast);
  else if (path.rate().busy() > (path.packs() ? kBusyToEnd : kBusyToBegin) ||
           idle.value_or(0.0) < (path.packs() ? kIdleToEnd : kIdleToBegin))
    path.set(PathState::kBusy);
  else
    path.set(path.rests() ? PathState::kNoGain : PathState::kPacks);
}

const char* text_of(PathState state) noexcept {
  switch (state) {
    case PathState::kUnknown: return "not measured yet";
    case PathState::kPacks: return "on";
    case PathState::kFast: return "off: the path is faster";
    case PathState::kBusy: return "only what halves: the cores are busy";
    case PathState::kNoGain: return "off: it did not make the path faster";
  }
  return "";
}

}  // namespace hybridps::flow
