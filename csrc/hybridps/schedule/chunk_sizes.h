// hybridps/schedule/chunk_sizes.h: how large the chunks of a group are.
//
// Threads  plain values.
#pragma once

#include <algorithm>
#include <cstdint>

namespace hybridps::schedule {

/// Bytes of elements, the same on all members of a group and for its whole life.
struct ChunkSizes {
  std::uint32_t usual = 64 * 1024;  // the largest chunk, unless a plan version says otherwise (Tuning::chunk_bytes)
  std::uint64_t coded = 0;          // a compressed chunk is made of so many at most; 0: usual
  std::uint32_t room = 0;           // a plan version may choose so many at most; 0: usual

  std::uint32_t most() const noexcept { return std::max(usual, room); }
  bool operator==(const ChunkSizes&) const = default;
};

}  // namespace hybridps::schedule
