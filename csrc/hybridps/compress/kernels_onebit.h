// hybridps/compress/kernels_onebit.h: one bit an element, with a scale. Part of kernels_impl.h.
#pragma once

#include "hybridps/compress/kernels_block.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

inline std::uint16_t signs16(const float* p) noexcept {
#if defined(__AVX512DQ__)
  return static_cast<std::uint16_t>(_mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(p))));
#elif defined(__AVX2__)
  return static_cast<std::uint16_t>(_mm256_movemask_ps(_mm256_loadu_ps(p)) | _mm256_movemask_ps(_mm256_loadu_ps(p + 8))
                                                                                 << 8);
#else
  std::uint32_t mask = 0;
  for (unsigned i = 0; i < 16; ++i) mask |= (bits_of_float(p[i]) >> 31) << i;
  return static_cast<std::uint16_t>(mask);
#endif
}

inline std::uint16_t zeros16(const float* p) noexcept {
#if defined(__AVX512DQ__)
  return _mm512_testn_epi32_mask(_mm512_loadu_si512(p), _mm512_set1_epi32(kAbs));
#elif defined(__AVX2__)
  const auto eight = [](const float* at) {
    const __m256i magnitude =
        _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), _mm256_set1_epi32(kAbs));
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256())));
  };
  return static_cast<std::uint16_t>(eight(p) | eight(p + 8) << 8);
#else
  std::uint32_t mask = 0;
  for (unsigned i = 0; i < 16; ++i) mask |= std::uint32_t{(bits_of_float(p[i]) & kAbs) == 0} << i;
  return static_cast<std::uint16_t>(mask);
#endif
}

/// Stores sixteen values with this magnitude (bits of fp32) and these signs. A value is +0 where `zeros` has a bit.
template <bool kZeros>
[[gnu::always_inline]] inline void put_signed16(std::uint32_t magnitude, std::uint16_t signs, std::uint16_t zeros,
                                                float* out) noexcept {
#if defined(__AVX512DQ__)
  const __m512i sizes = _mm512_set1_epi32(static_cast<int>(magnitude));
  __m512i values = _mm512_mask_xor_epi32(sizes, signs, sizes, _mm512_set1_epi32(static_cast<int>(~kAbs)));
  if constexpr (kZeros) values = _mm512_mask_mov_epi32(values, zeros, _mm512_setzero_si512());
  _mm512_storeu_si512(out, values);
#elif defined(__AVX2__)
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto all_of = [places](unsigned bits) {  // all ones in the lane of every set bit
    return _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int>(bits)), places), places);
  };
  for (unsigned half = 0; half < 2; ++half) {
    const __m256i negative = _mm256_and_si256(all_of(signs >> (8 * half)), _mm256_set1_epi32(static_cast<int>(~kAbs)));
    __m256i values = _mm256_or_si256(_mm256_set1_epi32(static_cast<int>(magnitude)), negative);
    if constexpr (kZeros) values = _mm256_andnot_si256(all_of(zeros >> (8 * half)), values);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 8 * half), values);
  }
#else
  for (unsigned i = 0; i < 16; ++i) {
    const std::uint32_t value = magnitude | ((std::uint32_t{signs} >> i) & 1U) << 31;
    out[i] = float_of_bits(kZeros ? value & (((std::uint32_t{zeros} >> i) & 1U) - 1U) : value);
  }
#endif
}

/// The bits of n elements, n <= 16.
inline std::uint16_t get_bits(const std::byte* bits, std::size_t n) noexcept {
  return n > 8 ? get16(bits) : static_cast<std::uint16_t>(bits[0]);
}

template <bool kZeros>
[[gnu::always_inline]] inline void onebit_values(const std::byte* in, const std::byte* zeros, std::size_t n,
                                                 float* out) noexcept {
  const std::uint32_t magnitude = bits_of_float(get_scale(in)) & kAbs;
  const std::byte* const signs = in + 2;
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16)
    put_signed16<kZeros>(magnitude, get16(signs + i / 8), kZeros ? get16(zeros + i / 8) : std::uint16_t{0}, out + i);
  if (i == n) return;
  float last[16];
  put_signed16<kZeros>(magnitude, get_bits(signs + i / 8, n - i),
                       kZeros ? get_bits(zeros + i / 8, n - i) : std::uint16_t{0}, last);
  __builtin_memcpy(out + i, last, (n - i) * sizeof(float));
}

/// Stores one bit for each of n elements. sixteen_of(p) gives the bits of sixteen elements.
template <class SixteenOf>
[[gnu::always_inline]] inline void put_bits(const float* p, std::size_t n, std::byte* out,
                                            SixteenOf sixteen_of) noexcept {
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16) put16(out + i / 8, sixteen_of(p + i));
  if (i == n) return;
  float last[16] = {};
  __builtin_memcpy(last, p + i, (n - i) * sizeof(float));
  const auto bits = static_cast<std::uint16_t>(sixteen_of(last) & ((1U << (n - i)) - 1U));
  out[i / 8] = static_cast<std::byte>(bits & 0xffU);
  if (n - i > 8) out[i / 8 + 1] = static_cast<std::byte>(bits >> 8);
}

[[gnu::always_inline]] inline std::size_t count_zeros(const float* p, std::size_t n) noexcept {
  std::uint32_t count = 0;
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) count += std::uint32_t{(bits_of_float(p[i]) & kAbs) == 0};
  return count;
}

/// `zeros`: where this block's zero bits go. Moved behind these bits if the block has zeros. Returns whether a value is
/// not finite.
template <bool kFeedback>
[[gnu::always_inline]] inline bool onebit_block(const float* in, float* residual, std::size_t n, std::byte* out,
                                                std::byte*& zeros) noexcept {
  alignas(64) float p[kBlockOneBit];
  const std::uint32_t largest = gather<kFeedback>(in, residual, n, p);
  const std::size_t bytes = (n + 7) / 8;
  std::byte* const signs = out + 2;
  if (largest >= kInfinity) {
    put16(out, kNanScale);
    fill(signs, bytes, 0);
    return true;
  }
  if (largest == 0) {
    fill(out, 2 + bytes, 0);
    if constexpr (kFeedback) __builtin_memset(residual, 0, n * sizeof(float));
    return false;
  }
  float lanes[16] = {};
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16)
    for (std::size_t j = 0; j < 16; ++j) lanes[j] += float_of_bits(bits_of_float(p[i + j]) & kAbs);
  for (std::size_t j = 0; i + j < n; ++j) lanes[j] += float_of_bits(bits_of_float(p[i + j]) & kAbs);
  for (std::size_t width = 8; width > 0; width /= 2)
    for (std::size_t j = 0; j < width; ++j) lanes[j] += lanes[j + width];
  const std::size_t none = count_zeros(p, n);
  const float mean = lanes[0] / static_cast<float>(n - none);
  // Rounded to nearest. The sum may exceed a float's range even if no value does.
  std::uint32_t scale = std::uint32_t{reduce::narrow_bf16(mean)} << 16;
  if (scale >= kInfinity) scale = 0x7f7f0000U;
  if (scale < kSmallestNormal) scale = kSmallestNormal;
  put_scale(out, none == 0 ? scale : scale | ~kAbs);
  put_bits(p, n, signs, signs16);
  if (none != 0) {
    put_bits(p, n, zeros, zeros16);
    zeros += bytes;
  }
  if constexpr (kFeedback) {
    if (none == 0)
      for (std::size_t k = 0; k < n; ++k) residual[k] = p[k] - float_of_bits(scale | (bits_of_float(p[k]) & ~kAbs));
    else
      for (std::size_t k = 0; k < n; ++k)
        residual[k] = p[k] == 0.0F ? 0.0F : p[k] - float_of_bits(scale | (bits_of_float(p[k]) & ~kAbs));
  }
  return false;
}
constexpr std::size_t kOneBitBytes = 2 + kBlockOneBit / 8;

template <bool kFeedback>
inline std::uint32_t onebit_blocks(const float* in, float* residual, std::size_t n, std::byte* out,
                                   std::byte*& zeros) noexcept {
  std::uint32_t odd = 0;
  std::size_t at = 0;
  for (; at + kBlockOneBit <= n; at += kBlockOneBit, out += kOneBitBytes)
    odd += onebit_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, kBlockOneBit, out, zeros);
  if (at < n) odd += onebit_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, n - at, out, zeros);
  return odd;
}
inline std::uint32_t encode_onebit(const float* in, float* residual, std::size_t n, Draw& draw,
                                   std::byte* out) noexcept {
  return residual != nullptr ? onebit_blocks<true>(in, residual, n, out, draw.zeros_out)
                             : onebit_blocks<false>(in, residual, n, out, draw.zeros_out);
}
inline void decode_onebit(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
  const std::byte* zeros = draw.zeros;
  std::size_t at = 0;
  for (; at + kBlockOneBit <= n; at += kBlockOneBit, in += kOneBitBytes) {
    if (has_zeros(in)) {
      onebit_values<true>(in, zeros, kBlockOneBit, out + at);
      zeros += kBlockOneBit / 8;
    } else {
      onebit_values<false>(in, zeros, kBlockOneBit, out + at);
    }
  }
  if (at == n) return;
  if (has_zeros(in))
    onebit_values<true>(in, zeros, n - at, out + at);
  else
    onebit_values<false>(in, zeros, n - at, out + at);
}

}  // namespace
}  // namespace hybridps::compress
