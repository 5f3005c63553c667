// hybridps/schedule/tuning.h: settings that may differ between operations without changing a result, and the ladders on
// which a Tuner moves the settings.
//
// Threads  plain values.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "hybridps/schedule/chunk_sizes.h"
#include "hybridps/schedule/tuner.h"

namespace hybridps::schedule {

/// Part of a plan version, so the same on all ranks for one operation. Default: everything as configured.
struct Tuning {
  static constexpr std::uint16_t kPaceChunks = 8;

  std::uint32_t chunk_bytes = 0;  // the largest chunk, bytes; 0: as set when the group was made
  /// 0: windows as set. Else the usual windows, doubled once per step above kWindowStepUsual, or halved per step below.
  std::uint16_t window_step = 0;
  std::uint16_t pace_chunks = kPaceChunks;  // how far contributions to one owner may be ahead of those to another
  std::uint16_t sockets = 0;                // connections in use to each peer and card; 0: as set
  bool operator==(const Tuning&) const = default;
};
/// A tuner needs room for chunks of this size and this number of connections, whatever the initial settings.
inline constexpr std::uint64_t kChunkRoomBytes = std::uint64_t{64} << 10;
inline constexpr std::int64_t kSocketsToChoose = 4;
inline constexpr std::uint16_t kWindowStepUsual = 7;
inline constexpr std::uint16_t kWindowStepMax = 2 * kWindowStepUsual - 1;
/// How often the `usual` window must be doubled (below 0: halved) to come nearest to the `set` window. `granted`: the
/// most bytes of a window that can be used.
int window_doublings(std::uint64_t set, std::uint64_t usual, std::uint64_t granted) noexcept;

/// The two tunings of a trial and the order of their turns. Comes over the network, so check it with is_sane().
struct Turns {
  Tuning a;  // also used after the turns
  Tuning b;
  std::uint16_t pairs = 0;  // pairs of blocks; 0: `a` for good
  std::uint16_t block = 1;  // operations per block
  std::uint32_t order = 0;  // as in Tuner::Round
  std::uint64_t operations() const noexcept { return std::uint64_t{2} * pairs * block; }
  bool is_b(std::uint64_t index) const noexcept;
  bool operator==(const Turns&) const = default;
};
inline constexpr std::uint64_t kTurnsMax = 256;  // of Turns::operations()
bool is_sane(const Turns& turns, std::uint64_t chunk_bytes_max) noexcept;

/// The range of tunings in one group.
struct TuningRange {
  ChunkSizes chunks;
  int sockets = 1;  // initially in use
  // The usual values are those without any settings.
  std::uint32_t chunk_bytes_usual = 0;  // 0: as set when the group was made
  int window_doublings = 0;             // doublings from the usual window to the window that is set
  int sockets_usual = 1;
  int sockets_max = 1;
};

/// The knobs for a Tuner, and the meaning of their rungs.
class TuningLadders {
 public:
  explicit TuningLadders(const TuningRange& range);
  std::vector<Tuner::Knob> knobs() const;
  Tuning at(const Tuner::Rungs& rungs) const;
  Turns turns(const Tuner::Round& round) const;
  /// "chunk_bytes 16384 instead of 4096".
  std::string describe(const Tuner::Tried& tried) const;

 private:
  enum class Tunable { kChunk, kWindow, kSockets, kPace };
  struct Ladder {
    Tunable what;
    std::string_view name;
    std::vector<int> values;
    int at = 0;
    int usual = 0;
  };
  void add(Tunable what, std::string_view name, std::vector<int> values, int now, int usual);
  std::string text(std::size_t ladder, int rung) const;
  std::vector<Ladder> ladders_;
};

}  // namespace hybridps::schedule
