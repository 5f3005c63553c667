// hybridps/staging/cuts.h: where slices and rails of an operation begin.
//
// Threads  pure functions.
#pragma once

#include <cstdint>
#include <vector>

#include "hybridps/worker/operation.h"

namespace hybridps::staging {

inline constexpr std::uint64_t kCutAlignment = 256;  // bytes: a multiple of every element

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

/// Where slice `i` of `count` begins in `bytes`.
inline std::uint64_t cut_at(std::uint64_t bytes, std::uint64_t i, std::uint64_t count) {
  return i == count ? bytes : bytes / count * i / kCutAlignment * kCutAlignment;
}

}  // namespace hybridps::staging
