// hybridps/worker/pieces.h: the caller's memory, seen as one range of bytes.
//
// Threads  immutable after construction.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/core/copy.h"
#include "hybridps/worker/operation.h"

namespace hybridps::worker {

class Pieces {
 public:
  Pieces() = default;
  explicit Pieces(std::vector<Piece> pieces);

  std::uint64_t bytes() const noexcept { return ends_.empty() ? 0 : ends_.back(); }
  /// The address of the range [offset, offset + bytes); null if the range is spread over several pieces, or is empty.
  std::byte* contiguous(std::uint64_t offset, std::size_t bytes) const noexcept;
  void read(std::uint64_t offset, std::size_t bytes, std::byte* to,
            core::Reader reader = core::Reader::kThisCore) const noexcept;
  void write(std::uint64_t offset, std::size_t bytes, const std::byte* from) const noexcept;

 private:
  std::size_t index_of(std::uint64_t offset) const noexcept;
  template <typename Visit>
  void for_range(std::uint64_t offset, std::size_t bytes, Visit visit) const noexcept;

  std::vector<Piece> pieces_;
  std::vector<std::uint64_t> ends_;  // running totals
};

}  // namespace hybridps::worker
