// hybridps/compress/kernels_block.h: what kernels of all codecs share: scales, a block with its residual, random
// numbers. Part of kernels_impl.h.
#pragma once

#include "hybridps/compress/kernels.h"
#include "hybridps/reduce/convert.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

using reduce::bits_of_float;
using reduce::float_of_bits;

constexpr std::uint32_t kAbs = 0x7fffffffU;
constexpr std::uint32_t kInfinity = 0x7f800000U;
constexpr std::uint32_t kSmallestNormal = 0x00800000U;
constexpr std::uint16_t kNanScale = 0x7fc0;
// The sum of |x| < 2^22 and this number has no bits behind the point: the adder rounds to nearest even.
constexpr float kMagic = 12582912.0F;
constexpr std::int32_t kMagicBits = 0x4B400000;

inline void put16(std::byte* at, std::uint16_t value) noexcept { __builtin_memcpy(at, &value, 2); }
inline std::uint16_t get16(const std::byte* at) noexcept {
  std::uint16_t value;
  __builtin_memcpy(&value, at, 2);
  return value;
}
inline std::uint32_t get32(const std::byte* at) noexcept {
  std::uint32_t value;
  __builtin_memcpy(&value, at, 4);
  return value;
}

/// The smallest bf16 that is not below `value` and not subnormal, as bits of fp32. 0 for 0. `value` >= 0.
inline std::uint32_t scale_up(float value) noexcept {
  if (value == 0.0F) return 0;
  const std::uint32_t up = (bits_of_float(value) + 0xffffU) & 0xffff0000U;
  return up < kSmallestNormal ? kSmallestNormal : up;
}
inline void put_scale(std::byte* out, std::uint32_t scale) noexcept {
  put16(out, static_cast<std::uint16_t>(scale >> 16));
}
inline float get_scale(const std::byte* in) noexcept { return reduce::widen_bf16(get16(in)); }

/// The step size for `levels` steps up to `largest` (bits of fp32). If the last step would be infinite, returns the
/// largest step size for which it is finite, and reduces the block's values to this last step.
inline std::uint32_t scale_for(std::uint32_t largest, float levels, float* p, std::size_t n) noexcept {
  const std::uint32_t up = scale_up(float_of_bits(largest) / levels);
  if ((bits_of_float(float_of_bits(up) * levels) & kAbs) < kInfinity) return up;
  const std::uint32_t down = up - 0x10000U;
  const std::uint32_t limit = bits_of_float(float_of_bits(down) * levels);
  for (std::size_t i = 0; i < n; ++i)
    if ((bits_of_float(p[i]) & kAbs) > limit) p[i] = float_of_bits((bits_of_float(p[i]) & ~kAbs) | limit);
  return down;
}

inline void fill(std::byte* out, std::size_t n, unsigned value) noexcept { __builtin_memset(out, int(value), n); }

/// For few elements, memcpy() would store in steps of 16 bytes. A later load of a whole vector would have to wait for
/// these stores.
[[gnu::always_inline]] inline void copy(const float* in, std::size_t n, float* out) noexcept {
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, _mm512_loadu_ps(in + i));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_loadu_ps(in + i));
#endif
  __builtin_memcpy(out + i, in + i, (n - i) * sizeof(float));
}

/// p = in + residual; returns the largest magnitude, as bits.
template <bool kFeedback>
[[gnu::always_inline]] inline std::uint32_t gather(const float* in, const float* residual, std::size_t n,
                                                   float* p) noexcept {
  std::uint32_t largest = 0;
  if constexpr (kFeedback) {
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i) p[i] = in[i] + residual[i];
  } else {
    copy(in, n, p);
  }
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = bits_of_float(p[i]) & kAbs;
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

inline std::int32_t round_to_int(float x) noexcept {
  return static_cast<std::int32_t>(bits_of_float(x + kMagic)) - kMagicBits;
}

/// A random number for a counter: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014).
inline std::uint64_t lot(std::uint64_t seed, std::uint64_t counter) noexcept {
  std::uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
/// A random number in [0, 1), of 24 bits.
inline float lot01(std::uint64_t seed, std::uint64_t counter) noexcept {
  return static_cast<float>(static_cast<std::int32_t>(lot(seed, counter) >> 40)) * 0x1p-24F;
}

}  // namespace
}  // namespace hybridps::compress
