// hybridps/schedule/tuning.h: what may differ between operations without changing a result, and the ladders on which a
// Tuner moves it.
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

/// The same on all ranks for one operation, as parts of its plan version. The default: all is as the settings say.
struct Tuning {
  static constexpr std::uint16_t kPaceChunks = 8;

  std::uint32_t chunk_bytes = 0;          // the largest chunk of the group; 0: as it was made
  std::uint16_t window_step = 0;          // windows are the usual ones, doubled so often beyond kWindowStepUsual, or halved; 0: as set
  std::uint16_t pace_chunks = kPaceChunks; // that contributions to one owner may be ahead of those to another
  std::uint16_t sockets = 0;              // connections to each peer and card in use; 0: as set
  bool operator==(const Tuning&) const = default;
};
/// For chunks of this size a tuner wants room, and so many connections, whatever the settings begin with.
inline constexpr std::uint64_t kChunkRoomBytes = std::uint64_t{64} << 10;
inline constexpr std::int64_t kSocketsToChoose = 4;
inline constexpr std::uint16_t kWindowStepUsual = 7;
inline constexpr std::uint16_t kWindowStepMax = 2 * kWindowStepUsual - 1;
/// How often the `usual` window is doubled (below 0: halved) to be the one that is `set`, as near as it gets. `granted`: bytes of
/// either that can be used.
int window_doublings(std::uint64_t set, std::uint64_t usual, std::uint64_t granted) noexcept;

/// What a trial takes turns between. Nothing here is trusted that came over the network: see is_sane().
struct Turns {
  Tuning a;                  // also afterwards
  Tuning b;
  std::uint16_t pairs = 0;   // of blocks; 0: `a` for good
  std::uint16_t block = 1;   // operations of a block
  std::uint32_t order = 0;   // as in Tuner::Round
  std::uint64_t operations() const noexcept { return std::uint64_t{2} * pairs * block; }
  bool is_b(std::uint64_t index) const noexcept;
  bool operator==(const Turns&) const = default;
};
inline constexpr std::uint64_t kTurnsMax = 256;  // operations
bool is_sane(const Turns& turns, std::uint64_t chunk_bytes_max) noexcept;

/// What there is to choose from, in one group.
struct TuningRange {
  ChunkSizes chunks;
  int sockets = 1;  // in use to begin with
  // Without any settings; sockets of those that may be in use.
  std::uint32_t chunk_bytes_usual = 0;  // 0: as it was made
  int window_doublings = 0;             // of the usual one, to be that which is set
  int sockets_usual = 1;
  int sockets_max = 1;
};

/// Knobs for a Tuner, and what their rungs mean.
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
