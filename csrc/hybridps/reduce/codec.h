// hybridps/reduce/codec.h: what a chunk is on the wire between nodes, where that is not what it is in memory.
//
// Threads  the engine's progress thread: one may have state of its own.
#pragma once

#include <cstddef>
#include <cstdint>

#include "hybridps/reduce/sum.h"

namespace hybridps::reduce {

/// What no codec's bytes_max() exceeds: all that is known of a chunk before its operation is.
constexpr std::uint64_t wire_bytes_limit(std::uint64_t bytes) noexcept { return 2 * bytes + 256; }

class Codec : public Format {
 public:
  /// The most that so many bytes of elements become: permits are paid for it.
  virtual std::size_t bytes_max(std::size_t bytes) const noexcept = 0;
  /// Once for each chunk, when it is ready. Writes at most bytes_max(bytes) bytes to `out` and returns how many.
  virtual std::size_t encode(const std::byte* in, std::size_t bytes, std::byte* out) = 0;
  /// Whether these can be the bytes of a chunk that has so many in memory: from a peer, to be asked before expand().
  virtual bool fits(const std::byte* data, std::size_t wire_bytes, std::size_t bytes) const noexcept = 0;
};

}  // namespace hybridps::reduce
