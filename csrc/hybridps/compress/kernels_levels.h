// hybridps/compress/kernels_levels.h: casts, and integers of 8 or 4 bits with a scale. Part of kernels_impl.h.
#pragma once

#include "hybridps/compress/kernels_block.h"

namespace hybridps::compress {
namespace {  // NOLINT(google-build-namespaces): as in reduce/convert.h

template <bool kBf16>
inline std::uint16_t narrow16(float value) noexcept {
  if constexpr (kBf16)
    return reduce::narrow_bf16(value);
  else
    return static_cast<std::uint16_t>(reduce::narrow<reduce::kFp16Format>(value));
}
template <bool kBf16>
inline float widen16(std::uint16_t bits) noexcept {
  if constexpr (kBf16)
    return reduce::widen_bf16(bits);
  else
    return reduce::widen<reduce::kFp16Format>(bits);
}

constexpr std::size_t kCastStep = 256;

template <bool kBf16, bool kFeedback>
inline std::uint32_t encode_cast_blocks(const float* in, float* residual, std::size_t n, std::byte* out) noexcept {
  std::uint16_t packed[kCastStep];
  for (std::size_t at = 0; at < n; at += kCastStep) {
    const std::size_t count = n - at < kCastStep ? n - at : kCastStep;
    if constexpr (kFeedback) {
      for (std::size_t i = 0; i < count; ++i) {
        const float p = in[at + i] + residual[at + i];
        packed[i] = narrow16<kBf16>(p);
        const float left = p - widen16<kBf16>(packed[i]);
        // If the value is not finite, or too large for 16 bits, the old residual stays.
        const bool finite = (bits_of_float(left) & kAbs) < kInfinity;
        residual[at + i] = float_of_bits(reduce::select(finite, bits_of_float(left), bits_of_float(residual[at + i])));
      }
    } else {
      for (std::size_t i = 0; i < count; ++i) packed[i] = narrow16<kBf16>(in[at + i]);
    }
    __builtin_memcpy(out + 2 * at, packed, 2 * count);
  }
  return 0;
}
template <bool kBf16>
inline std::uint32_t encode_cast(const float* in, float* residual, std::size_t n, Draw&, std::byte* out) noexcept {
  return residual != nullptr ? encode_cast_blocks<kBf16, true>(in, residual, n, out)
                             : encode_cast_blocks<kBf16, false>(in, residual, n, out);
}
template <bool kBf16>
inline void decode_cast(const std::byte* in, std::size_t n, const Draw&, float* out) noexcept {
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) out[i] = widen16<kBf16>(get16(in + 2 * i));
}

// --- int8 ------------------------------------------------------------------------------------------------------------

// With AVX2 alone, g++ 12 generates slow code for the loop below.
#if defined(__AVX2__) && !defined(__AVX512F__)
[[gnu::always_inline]] inline void pack8(const std::int32_t* q, std::size_t n, std::uint8_t* out) noexcept {
  if (n != kBlockInt) {
    for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::uint8_t>(q[i]);
    return;
  }
  const auto* const at = reinterpret_cast<const __m256i*>(q);
  const __m256i low = _mm256_packs_epi32(_mm256_load_si256(at), _mm256_load_si256(at + 1));
  const __m256i high = _mm256_packs_epi32(_mm256_load_si256(at + 2), _mm256_load_si256(at + 3));
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(out),
                      _mm256_permutevar8x32_epi32(_mm256_packs_epi16(low, high), order));
}
#else
[[gnu::always_inline]] inline void pack8(const std::int32_t* q, std::size_t n, std::uint8_t* out) noexcept {
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<std::uint8_t>(q[i]);
}
#endif

#if defined(__AVX2__)
[[gnu::always_inline]] inline void put_scaled16(__m128i q, float scale, float* out) noexcept {
#if defined(__AVX512F__)
  _mm512_storeu_ps(out, _mm512_mul_ps(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(q)), _mm512_set1_ps(scale)));
#else
  const __m256 factor = _mm256_set1_ps(scale);
  _mm256_storeu_ps(out, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(q)), factor));
  _mm256_storeu_ps(out + 8, _mm256_mul_ps(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128(q, 8))), factor));
#endif
}
inline __m128i load16(const std::byte* in) noexcept { return _mm_loadu_si128(reinterpret_cast<const __m128i*>(in)); }
#endif

template <bool kFeedback>
[[gnu::always_inline]] inline bool int8_block(const float* in, float* residual, std::size_t n,
                                              std::byte* out) noexcept {
  alignas(64) float p[kBlockInt];
  const std::uint32_t largest = gather<kFeedback>(in, residual, n, p);
  std::byte* const q = out + 2;
  if (largest >= kInfinity) {
    put16(out, kNanScale);
    fill(q, n, 0);
    return true;
  }
  const std::uint32_t scale_bits = scale_for(largest, 127.0F, p, n);
  put_scale(out, scale_bits);
  const float scale = float_of_bits(scale_bits);
  const float inverse = scale_bits == 0 ? 0.0F : 1.0F / scale;
  alignas(64) std::int32_t values[kBlockInt];
  alignas(64) std::uint8_t packed[kBlockInt];
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) values[i] = round_to_int(p[i] * inverse);
  pack8(values, n, packed);
  __builtin_memcpy(q, packed, n);
  if constexpr (kFeedback)
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i) residual[i] = p[i] - static_cast<float>(values[i]) * scale;
  return false;
}
template <bool kFeedback>
inline std::uint32_t int8_blocks(const float* in, float* residual, std::size_t n, std::byte* out) noexcept {
  std::uint32_t odd = 0;
  std::size_t at = 0;
  for (; at + kBlockInt <= n; at += kBlockInt, out += 2 + kBlockInt)
    odd += int8_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, kBlockInt, out);
  if (at < n) odd += int8_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, n - at, out);
  return odd;
}
inline std::uint32_t encode_int8(const float* in, float* residual, std::size_t n, Draw&, std::byte* out) noexcept {
  return residual != nullptr ? int8_blocks<true>(in, residual, n, out) : int8_blocks<false>(in, residual, n, out);
}
[[gnu::always_inline]] inline void int8_values(const std::byte* in, std::size_t n, float* out) noexcept {
  const float scale = get_scale(in);
#if defined(__AVX2__)
  if (n == kBlockInt) {
    put_scaled16(load16(in + 2), scale, out);
    put_scaled16(load16(in + 18), scale, out + 16);
    return;
  }
#endif
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<std::int8_t>(in[2 + i])) * scale;
}
inline void decode_int8(const std::byte* in, std::size_t n, const Draw&, float* out) noexcept {
  std::size_t at = 0;
  for (; at + kBlockInt <= n; at += kBlockInt, in += 2 + kBlockInt) int8_values(in, kBlockInt, out + at);
  if (at < n) int8_values(in, n - at, out + at);
}

// --- int4 ------------------------------------------------------------------------------------------------------------

/// The first half of the elements goes to the low halves of the bytes, the second half to the high halves. Pairs of
/// neighbours would have to be separated when unpacked.
[[gnu::always_inline]] inline void pack4(const std::uint8_t* codes, std::size_t n, std::byte* out) noexcept {
  const std::size_t half = (n + 1) / 2;
  std::uint8_t packed[kBlockSparse / 2];
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n - half; ++i) packed[i] = static_cast<std::uint8_t>(codes[i] | codes[half + i] << 4);
  if (half > n - half) packed[half - 1] = codes[half - 1];
  __builtin_memcpy(out, packed, half);
}
[[gnu::always_inline]] inline void unpack4(const std::byte* in, std::size_t n, std::uint8_t* codes) noexcept {
  const std::size_t half = (n + 1) / 2;
  std::uint8_t packed[kBlockSparse / 2];
  __builtin_memcpy(packed, in, half);
#pragma GCC unroll 1
  for (std::size_t i = 0; i < half; ++i) codes[i] = packed[i] & 15U;
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n - half; ++i) codes[half + i] = packed[i] >> 4;
}

template <bool kFeedback>
[[gnu::always_inline]] inline bool int4_block(const float* in, float* residual, std::size_t n,
                                              std::byte* out) noexcept {
  alignas(64) float p[kBlockInt];
  alignas(64) std::int32_t values[kBlockInt];
  alignas(64) std::uint8_t codes[kBlockInt];
  const std::uint32_t largest = gather<kFeedback>(in, residual, n, p);
  if (largest >= kInfinity) {
    put16(out, kNanScale);
    fill(out + 2, (n + 1) / 2, 0);
    return true;
  }
  const std::uint32_t scale_bits = scale_for(largest, 7.0F, p, n);
  put_scale(out, scale_bits);
  const float scale = float_of_bits(scale_bits);
  const float inverse = scale_bits == 0 ? 0.0F : 1.0F / scale;
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) values[i] = round_to_int(p[i] * inverse) + 8;
  pack8(values, n, codes);
  pack4(codes, n, out + 2);
  if constexpr (kFeedback)
#pragma GCC unroll 1
    for (std::size_t i = 0; i < n; ++i) residual[i] = p[i] - static_cast<float>(values[i] - 8) * scale;
  return false;
}
template <bool kFeedback>
inline std::uint32_t int4_blocks(const float* in, float* residual, std::size_t n, std::byte* out) noexcept {
  std::uint32_t odd = 0;
  std::size_t at = 0;
  for (; at + kBlockInt <= n; at += kBlockInt, out += 2 + kBlockInt / 2)
    odd += int4_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, kBlockInt, out);
  if (at < n) odd += int4_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, n - at, out);
  return odd;
}
inline std::uint32_t encode_int4(const float* in, float* residual, std::size_t n, Draw&, std::byte* out) noexcept {
  return residual != nullptr ? int4_blocks<true>(in, residual, n, out) : int4_blocks<false>(in, residual, n, out);
}
[[gnu::always_inline]] inline void int4_values(const std::byte* in, std::size_t n, float* out) noexcept {
  const float scale = get_scale(in);
#if defined(__AVX2__)
  if (n == kBlockInt) {
    const __m128i pairs = load16(in + 2);
    const __m128i half = _mm_set1_epi8(15);
    const __m128i bias = _mm_set1_epi8(8);
    put_scaled16(_mm_sub_epi8(_mm_and_si128(pairs, half), bias), scale, out);
    put_scaled16(_mm_sub_epi8(_mm_and_si128(_mm_srli_epi16(pairs, 4), half), bias), scale, out + 16);
    return;
  }
#endif
  std::uint8_t codes[kBlockInt];
  unpack4(in + 2, n, codes);
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) out[i] = static_cast<float>(static_cast<int>(codes[i]) - 8) * scale;
}
inline void decode_int4(const std::byte* in, std::size_t n, const Draw&, float* out) noexcept {
  std::size_t at = 0;
  for (; at + kBlockInt <= n; at += kBlockInt, in += 2 + kBlockInt / 2) int4_values(in, kBlockInt, out + at);
  if (at < n) int4_values(in, n - at, out + at);
}

}  // namespace
}  // namespace hybridps::compress
