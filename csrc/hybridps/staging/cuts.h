// hybridps/staging/cuts.h: where slices and rails of an operation begin, and where they lie.
//
// Threads  pure functions.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "hybridps/worker/operation.h"

namespace hybridps::staging {

inline constexpr std::uint64_t kCutAlignment = 256;  // bytes: a multiple of every element size

inline std::uint64_t bytes_of(const std::vector<worker::Piece>& pieces) {
  std::uint64_t bytes = 0;
  for (const worker::Piece& piece : pieces) bytes += piece.bytes;
  return bytes;
}

inline std::uint64_t sum(const std::vector<std::uint64_t>& values) {
  std::uint64_t total = 0;
  for (const std::uint64_t value : values) total += value;
  return total;
}

/// A run of device memory.
struct Run {
  std::byte* data = nullptr;
  std::uint64_t bytes = 0;
  int piece = -1;            // index among the tensors' pieces; -1: scratch
  std::uint64_t inside = 0;  // offset in the piece
};
using Runs = std::vector<Run>;

/// Where the bytes [from, to) of the concatenation of `pieces` lie, in order.
inline Runs runs(const std::vector<worker::Piece>& pieces, std::uint64_t from, std::uint64_t to) {
  Runs result;
  std::uint64_t begin = 0;
  for (std::size_t i = 0; i < pieces.size(); ++i) {
    const std::uint64_t end = begin + pieces[i].bytes;
    const std::uint64_t first = from > begin ? from : begin;
    const std::uint64_t last = to < end ? to : end;
    if (first < last)
      result.push_back({pieces[i].data + (first - begin), last - first, static_cast<int>(i), first - begin});
    begin = end;
  }
  return result;
}

/// Where slice `i` of `count` begins in `bytes`. The first and the last slice are half as large as the others
/// (slice_count()).
inline std::uint64_t cut_at(std::uint64_t bytes, std::uint64_t i, std::uint64_t count) {
  if (i == 0 || i == count) return i == 0 ? 0 : bytes;
  return bytes / (2 * count - 2) * (2 * i - 1) / kCutAlignment * kCutAlignment;
}

}  // namespace hybridps::staging
