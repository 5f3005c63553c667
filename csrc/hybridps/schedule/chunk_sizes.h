// hybridps/schedule/chunk_sizes.h: how large the chunks of a group are.
//
// Threads  plain values.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hybridps::schedule {

/// In bytes of elements. The same on all members of a group, and constant for the group's life.
struct ChunkSizes {
  std::uint32_t usual = 64 * 1024;  // the largest chunk, unless a plan version says otherwise (Tuning::chunk_bytes)
  std::uint64_t coded = 0;          // the most bytes that make one compressed chunk; 0: usual
  std::uint32_t room = 0;           // the most that a plan version may choose; 0: usual

  std::uint32_t most() const noexcept { return std::max(usual, room); }
  bool operator==(const ChunkSizes&) const = default;
};

}  // namespace hybridps::schedule
