#include "hybridps/schedule/tuning.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace hybridps::schedule {
namespace {

constexpr int kChunkLeast = 4 * 1024;
// Larger chunks gained nothing at 15 Gbit/s (decision 8: docs/decisions/flow-control.md), and a local peer holds whole
// slots.
constexpr int kChunkMost = 256 * 1024;

}  // namespace

bool Turns::is_b(std::uint64_t index) const noexcept {
  Tuner::Round round;
  round.pairs = pairs;
  round.block = block;
  round.order = order;
  return index < operations() && round.is_b(static_cast<int>(index));
}

bool is_sane(const Turns& turns, std::uint64_t chunk_bytes_max) noexcept {
  if (turns.operations() > kTurnsMax || turns.block == 0 || turns.pairs > 32) return false;
  for (const Tuning* one : {&turns.a, &turns.b})
    if (one->chunk_bytes > chunk_bytes_max || (one->chunk_bytes != 0 && one->chunk_bytes < 1024) ||
        one->chunk_bytes % 64 != 0 || one->window_step > kWindowStepMax || one->pace_chunks == 0)
      return false;
  return true;
}

int window_doublings(std::uint64_t set, std::uint64_t usual, std::uint64_t granted) noexcept {
  const auto used = [granted](std::uint64_t bytes) {
    return static_cast<double>(std::max<std::uint64_t>(1, std::min(bytes, granted)));
  };
  return static_cast<int>(std::lround(std::log2(used(set) / used(usual))));
}

TuningLadders::TuningLadders(const TuningRange& range) {
  std::vector<int> chunks;
  for (int bytes = kChunkLeast; bytes <= kChunkMost && bytes <= static_cast<int>(range.chunks.most()); bytes *= 2)
    chunks.push_back(bytes);
  const std::uint32_t usual = range.chunk_bytes_usual == 0
                                  ? range.chunks.usual
                                  : std::min(range.chunk_bytes_usual, range.chunks.most() / 64 * 64);
  add(Tunable::kChunk, "chunk_bytes", std::move(chunks), static_cast<int>(range.chunks.usual), static_cast<int>(usual));
  std::vector<int> windows;
  const int most = kWindowStepUsual - 1;
  for (int doublings = -most; doublings <= most; ++doublings) windows.push_back(doublings);
  add(Tunable::kWindow, "window", std::move(windows), std::clamp(range.window_doublings, -most - 1, most + 1), 0);
  std::vector<int> sockets;
  for (int count = 1; count <= range.sockets_max; count *= 2) sockets.push_back(count);
  add(Tunable::kSockets, "sockets", std::move(sockets), range.sockets,
      std::min(range.sockets_usual, range.sockets_max));
  add(Tunable::kPace, "pace_chunks", {2, 4, 8, 16, 32}, Tuning::kPaceChunks, Tuning::kPaceChunks);
}

void TuningLadders::add(Tunable what, std::string_view name, std::vector<int> values, int now, int usual) {
  for (const int value : {now, usual})
    if (std::find(values.begin(), values.end(), value) == values.end()) values.push_back(value);
  std::sort(values.begin(), values.end());
  if (values.size() < 2) return;
  const auto rung = [&](int value) {
    return static_cast<int>(std::find(values.begin(), values.end(), value) - values.begin());
  };
  const int at = rung(now);
  const int at_usual = rung(usual);
  ladders_.push_back({what, name, std::move(values), at, at_usual});
}

std::vector<Tuner::Knob> TuningLadders::knobs() const {
  std::vector<Tuner::Knob> knobs;
  for (const Ladder& ladder : ladders_)
    knobs.push_back({ladder.name, static_cast<int>(ladder.values.size()), ladder.at, ladder.usual});
  return knobs;
}

Tuning TuningLadders::at(const Tuner::Rungs& rungs) const {
  Tuning tuning;
  for (std::size_t i = 0; i < ladders_.size(); ++i) {
    if (rungs[i] == ladders_[i].at) continue;  // as set
    const int value = ladders_[i].values[static_cast<std::size_t>(rungs[i])];
    switch (ladders_[i].what) {
      case Tunable::kChunk: tuning.chunk_bytes = static_cast<std::uint32_t>(value); break;
      case Tunable::kWindow: tuning.window_step = static_cast<std::uint16_t>(kWindowStepUsual + value); break;
      case Tunable::kSockets: tuning.sockets = static_cast<std::uint16_t>(value); break;
      case Tunable::kPace: tuning.pace_chunks = static_cast<std::uint16_t>(value); break;
    }
  }
  return tuning;
}

Turns TuningLadders::turns(const Tuner::Round& round) const {
  return {at(round.a), at(round.b), static_cast<std::uint16_t>(round.pairs), static_cast<std::uint16_t>(round.block),
          round.order};
}

std::string TuningLadders::text(std::size_t ladder, int rung) const {
  const Ladder& of = ladders_[ladder];
  const int value = of.values[static_cast<std::size_t>(rung)];
  if (of.what != Tunable::kWindow) return std::to_string(value);
  if (rung == of.at && of.at != of.usual) return "as set";
  return value < 0 ? "1/" + std::to_string(1 << -value) : std::to_string(1 << value);
}

std::string TuningLadders::describe(const Tuner::Tried& tried) const {
  std::string all;
  for (std::size_t i = 0; i < ladders_.size(); ++i)
    if (tried.a[i] != tried.b[i])
      all += (all.empty() ? "" : ", ") + std::string(ladders_[i].name) + " " + text(i, tried.b[i]) + " instead of " +
             text(i, tried.a[i]);
  return all;
}

}  // namespace hybridps::schedule
