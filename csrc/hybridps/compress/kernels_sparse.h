// hybridps/compress/kernels_sparse.h: top-k and random-k. Part of kernels_impl.h.
#pragma once

#include "hybridps/compress/kernels_block.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

constexpr std::uint32_t kNoIndex = 0xffffffffU;

/// Marks the k elements of largest magnitude; among equal elements, the first. Halves the range of bit patterns.
inline void mark_largest(const std::uint32_t* magnitude, std::size_t n, std::size_t k, bool* marked) noexcept {
  std::uint32_t low = 0;  // at least k elements are >= low
  std::uint32_t high = kInfinity;
  while (high - low > 1) {
    const std::uint32_t middle = low + (high - low) / 2;
    std::size_t above = 0;
    for (std::size_t i = 0; i < n; ++i) above += magnitude[i] >= middle;
    if (above >= k)
      low = middle;
    else
      high = middle;
  }
  std::size_t left = k;
  for (std::size_t i = 0; i < n; ++i) left -= (marked[i] = magnitude[i] > low);
  for (std::size_t i = 0; i < n && left > 0; ++i)
    if (magnitude[i] == low) {
      marked[i] = true;
      --left;
    }
}

template <bool kFeedback>
inline bool topk_block(const float* in, float* residual, std::size_t n, std::size_t k, std::byte* out) noexcept {
  alignas(64) float p[kBlockSparse];
  alignas(64) std::uint32_t magnitude[kBlockSparse];
  bool marked[kBlockSparse];
  const bool odd = gather<kFeedback>(in, residual, n, p) >= kInfinity;
  if (odd) {
    fill(out, 4 * k, 0xff);
    fill(out + 4 * k, 4 * k, 0);
    return true;
  }
  for (std::size_t i = 0; i < n; ++i) magnitude[i] = bits_of_float(p[i]) & kAbs;
  mark_largest(magnitude, n, k, marked);
  std::size_t next = 0;
  for (std::size_t i = 0; i < n; ++i) {
    if (marked[i]) {
      const auto index = static_cast<std::uint32_t>(i);
      __builtin_memcpy(out + 4 * next, &index, 4);
      __builtin_memcpy(out + 4 * (k + next), &p[i], 4);
      ++next;
    }
    if constexpr (kFeedback) residual[i] = marked[i] ? 0.0F : p[i];
  }
  return false;
}
inline std::uint32_t encode_topk(const float* in, float* residual, std::size_t n, Draw& draw, std::byte* out) noexcept {
  std::uint32_t odd = 0;
  for (std::size_t at = 0; at < n; at += kBlockSparse) {
    const std::size_t count = n - at < kBlockSparse ? n - at : kBlockSparse;
    const std::size_t k = kept_of(count, draw.keep);
    odd += residual != nullptr ? topk_block<true>(in + at, residual + at, count, k, out)
                               : topk_block<false>(in + at, nullptr, count, k, out);
    out += 8 * k;
  }
  return odd;
}
inline void decode_topk(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
  for (std::size_t at = 0; at < n; at += kBlockSparse) {
    const std::size_t count = n - at < kBlockSparse ? n - at : kBlockSparse;
    const std::size_t k = kept_of(count, draw.keep);
    const bool odd = get32(in) == kNoIndex;
    for (std::size_t i = 0; i < count; ++i) out[at + i] = odd ? float_of_bits(reduce::kFp32QuietNan) : 0.0F;
    for (std::size_t j = 0; j < k && !odd; ++j) {
      const std::uint32_t index = get32(in + 4 * j);
      out[at + index] = float_of_bits(get32(in + 4 * (k + j)));
    }
    in += 8 * k;
  }
}

/// Draws k different indices below n, as bits of `chosen`: Floyd's algorithm (Bentley, CACM 30(9), 1987), with the
/// block's random numbers.
inline void draw_indices(std::uint64_t seed, std::uint64_t block, std::size_t n, std::size_t k,
                         std::uint64_t* chosen) noexcept {
  for (std::size_t i = 0; i < kBlockSparse / 64; ++i) chosen[i] = 0;
  for (std::size_t j = n - k; j < n; ++j) {
    // A 32-bit random number times j + 1: the bias is below 2^-22.
    const std::uint64_t t = ((lot(seed, block * kBlockSparse + j) >> 32) * (j + 1)) >> 32;
    const std::uint64_t pick = (chosen[t / 64] >> (t % 64) & 1U) == 0 ? t : j;
    chosen[pick / 64] |= std::uint64_t{1} << (pick % 64);
  }
}
template <typename Visit>
inline void visit_indices(const std::uint64_t* chosen, Visit visit) noexcept {
  for (std::size_t word = 0; word < kBlockSparse / 64; ++word)
    for (std::uint64_t left = chosen[word]; left != 0; left &= left - 1)
      visit(word * 64 + static_cast<std::size_t>(__builtin_ctzll(left)));
}

inline std::uint32_t encode_randomk(const float* in, float* residual, std::size_t n, Draw& draw,
                                    std::byte* out) noexcept {
  std::uint32_t odd = 0;
  alignas(64) float p[kBlockSparse];
  std::uint64_t chosen[kBlockSparse / 64];
  for (std::size_t at = 0; at < n; at += kBlockSparse) {
    const std::size_t count = n - at < kBlockSparse ? n - at : kBlockSparse;
    const std::size_t k = kept_of(count, draw.keep);
    const std::uint32_t largest = residual != nullptr ? gather<true>(in + at, residual + at, count, p)
                                                      : gather<false>(in + at, nullptr, count, p);
    if (largest >= kInfinity) {
      for (std::size_t j = 0; j < k; ++j) __builtin_memcpy(out + 4 * j, &reduce::kFp32QuietNan, 4);
      ++odd;
    } else {
      draw_indices(draw.seed, (draw.first + at) / kBlockSparse, count, k, chosen);
      if (residual != nullptr)
        for (std::size_t i = 0; i < count; ++i) residual[at + i] = p[i];
      std::size_t next = 0;
      visit_indices(chosen, [&](std::size_t index) {
        __builtin_memcpy(out + 4 * next++, &p[index], 4);
        if (residual != nullptr) residual[at + index] = 0.0F;
      });
    }
    out += 4 * k;
  }
  return odd;
}
inline void decode_randomk(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
  std::uint64_t chosen[kBlockSparse / 64];
  for (std::size_t at = 0; at < n; at += kBlockSparse) {
    const std::size_t count = n - at < kBlockSparse ? n - at : kBlockSparse;
    const std::size_t k = kept_of(count, draw.keep);
    const bool odd = (get32(in) & kAbs) > kInfinity;
    for (std::size_t i = 0; i < count; ++i) out[at + i] = odd ? float_of_bits(reduce::kFp32QuietNan) : 0.0F;
    if (!odd) {
      draw_indices(draw.seed, (draw.first + at) / kBlockSparse, count, k, chosen);
      std::size_t next = 0;
      visit_indices(chosen, [&](std::size_t index) { out[at + index] = float_of_bits(get32(in + 4 * next++)); });
    }
    in += 4 * k;
  }
}

}  // namespace
}  // namespace hybridps::compress
