// hybridps/compress/kernels_dither.h: randomly rounded levels, linear and natural. Part of kernels_impl.h.
#pragma once

#include "hybridps/compress/kernels_levels.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

/// A random level in [0, levels] with the mean x levels; x in [0, 1]. `lots`: the random number.
inline std::uint32_t linear_level(float x, float levels, float lots) noexcept {
  const float y = x * levels + lots;
  const auto level = static_cast<std::int32_t>(y);
  return static_cast<std::uint32_t>(level) < static_cast<std::uint32_t>(levels) ? static_cast<std::uint32_t>(level)
                                                                                : static_cast<std::uint32_t>(levels);
}
/// A random code with the mean x: code 0 is zero, code c is 2^(c - 7).
inline std::uint32_t natural_code(float x, float lots) noexcept {
  if (x >= 1.0F) return 7;
  const std::uint32_t exponent = bits_of_float(x) >> 23;  // x = 2^(exponent - 127) (1 + fraction)
  if (exponent < 127 - 6) return lots < x * 64.0F ? 1 : 0;
  const float low = float_of_bits(exponent << 23);
  return exponent - (127 - 7) + (lots < (x - low) / low ? 1 : 0);
}
inline float natural_value(std::uint32_t code) noexcept { return code == 0 ? 0.0F : float_of_bits((code + 120) << 23); }

template <bool kNatural>
inline std::uint32_t encode_dither(const float* in, float* residual, std::size_t n, Draw& draw,
                                   std::byte* out) noexcept {
  std::uint32_t odd = 0;
  const auto levels = static_cast<float>(draw.levels);
  const bool narrow = kNatural || draw.levels <= 7;
  alignas(64) float p[kBlockSparse];
  std::uint8_t codes[kBlockSparse];
  for (std::size_t at = 0; at < n; at += kBlockSparse) {
    const std::size_t count = n - at < kBlockSparse ? n - at : kBlockSparse;
    const std::size_t bytes = narrow ? (count + 1) / 2 : count;
    const std::uint32_t largest = residual != nullptr ? gather<true>(in + at, residual + at, count, p)
                                                      : gather<false>(in + at, nullptr, count, p);
    if (largest >= kInfinity) {
      put16(out, kNanScale);
      fill(out + 2, bytes, 0);
      ++odd;
    } else {
      const std::uint32_t scale_bits = scale_up(float_of_bits(largest));
      // Rounded up, the scale may be infinite. Then use the largest bf16; larger values count as this scale.
      const float scale = float_of_bits(scale_bits >= kInfinity ? 0x7f7f0000U : scale_bits);
      put_scale(out, bits_of_float(scale));
      for (std::size_t i = 0; i < count; ++i) {
        const float magnitude = float_of_bits(bits_of_float(p[i]) & kAbs);
        const float x = scale_bits == 0 ? 0.0F : magnitude / scale;
        const float lots = lot01(draw.seed, draw.first + at + i);
        const std::uint32_t level = kNatural ? natural_code(x, lots) : linear_level(x, levels, lots);
        const std::uint32_t sign = bits_of_float(p[i]) >> 31;
        codes[i] = static_cast<std::uint8_t>(level | sign << (narrow ? 3 : 7));
        if (residual != nullptr) {
          const float value = (kNatural ? natural_value(level) : static_cast<float>(level) / levels) * scale;
          residual[at + i] = p[i] - float_of_bits(bits_of_float(value) | sign << 31);
        }
      }
      if (narrow)
        pack4(codes, count, out + 2);
      else
        __builtin_memcpy(out + 2, codes, count);
    }
    out += 2 + bytes;
  }
  return odd;
}
template <bool kNatural>
inline void decode_dither(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
  const auto levels = static_cast<float>(draw.levels);
  const bool narrow = kNatural || draw.levels <= 7;
  std::uint8_t codes[kBlockSparse];
  for (std::size_t at = 0; at < n; at += kBlockSparse) {
    const std::size_t count = n - at < kBlockSparse ? n - at : kBlockSparse;
    const std::size_t bytes = narrow ? (count + 1) / 2 : count;
    const float scale = get_scale(in);
    if (narrow)
      unpack4(in + 2, count, codes);
    else
      __builtin_memcpy(codes, in + 2, count);
    for (std::size_t i = 0; i < count; ++i) {
      const std::uint32_t level = codes[i] & (narrow ? 7U : 127U);
      const std::uint32_t sign = codes[i] >> (narrow ? 3 : 7);
      const float value = (kNatural ? natural_value(level) : static_cast<float>(level) / levels) * scale;
      out[at + i] = float_of_bits(bits_of_float(value) | sign << 31);
    }
    in += 2 + bytes;
  }
}

}  // namespace
}  // namespace hybridps::compress
