// hybridps/compress/kernels_impl.h: what the kernel tables are made of; included once per instruction set.
//
// Arith.   Every line below means the same on every instruction set: no contraction (the room's flags), rounding by the
//          adder, maxima of bit patterns, and sums in sixteen lanes that are added in one order.
// Layout   of a block, one after the other, little-endian; s: bf16.
//            bf16, fp16   2 bytes an element
//            int8         s | n x int8                     value = q s, q in [-127, 127]
//            int4         s | ceil(n/2) bytes              low half: the first ceil(n/2) elements, q + 8 in [1, 15]
//            one bit      s | ceil(n/8) signs              s < 0: some are zero. Behind all blocks: ceil(n/8) bytes for each
//                                                          such block, in order, a bit for every zero
//            top-k        k x u32 index | k x fp32         in the order of the indices
//            random-k     k x fp32                         indices drawn from (seed, block)
//            linear       s | n bytes: sign, level of 127; or ceil(n/2) bytes: sign, level of 7
//            natural      s | ceil(n/2) bytes              sign, exponent: 0, 2^-6 ... 2^0
// Not finite  a block with such a value has s = NaN (top-k: the index 2^32 - 1; random-k: values of NaN).
// Source   block floating point with a symmetric range: arXiv 2510.25602; one bit: Seide et al. 2014 with an L1 scale
//          (signSGD, arXiv 1808.07576); top-k, random-k: arXiv 1809.07599; linear dithering: QSGD, arXiv 1610.02132;
//          natural: arXiv 1905.10988; error feedback: arXiv 1901.09847.
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
// Added to |x| < 2^22 it leaves no bits behind the point: the adder rounds to nearest even.
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

/// The smallest bf16 that is not below `value`, and never subnormal. Bits of fp32. `value` >= 0.
inline std::uint32_t scale_up(float value) noexcept {
  if (value == 0.0F) return 0;
  const std::uint32_t up = (bits_of_float(value) + 0xffffU) & 0xffff0000U;
  return up < kSmallestNormal ? kSmallestNormal : up;
}
inline void put_scale(std::byte* out, std::uint32_t scale) noexcept {
  put16(out, static_cast<std::uint16_t>(scale >> 16));
}
inline float get_scale(const std::byte* in) noexcept { return reduce::widen_bf16(get16(in)); }

/// For `levels` steps up to `largest`, bits of fp32. So near the end of the range that its last step would be infinite, it is the
/// largest one that is not, and the block's values are brought down to it.
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

/// memcpy() of few elements would be in steps of 16 bytes, which a load of a whole vector behind it has to wait for.
[[gnu::always_inline]] inline void copy(const float* in, std::size_t n, float* out) noexcept {
  std::size_t i = 0;
#if defined(__AVX512F__)
  for (; i + 16 <= n; i += 16) _mm512_storeu_ps(out + i, _mm512_loadu_ps(in + i));
#elif defined(__AVX2__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(out + i, _mm256_loadu_ps(in + i));
#endif
  __builtin_memcpy(out + i, in + i, (n - i) * sizeof(float));
}

/// in + residual; returns the largest magnitude, as bits.
template <bool kFeedback>
[[gnu::always_inline]] inline std::uint32_t gather(const float* in, const float* residual, std::size_t n, float* p) noexcept {
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

// --- casts -----------------------------------------------------------------------------------------------------------

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
        // Of a value that is not finite, or too large for 16 bits, what was left out before stays.
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
std::uint32_t encode_cast(const float* in, float* residual, std::size_t n, Draw&, std::byte* out) noexcept {
  return residual != nullptr ? encode_cast_blocks<kBf16, true>(in, residual, n, out)
                             : encode_cast_blocks<kBf16, false>(in, residual, n, out);
}
template <bool kBf16>
void decode_cast(const std::byte* in, std::size_t n, const Draw&, float* out) noexcept {
#pragma GCC unroll 1
  for (std::size_t i = 0; i < n; ++i) out[i] = widen16<kBf16>(get16(in + 2 * i));
}

// --- int8 ------------------------------------------------------------------------------------------------------------

// g++ 12 finds no good way for it with AVX2 alone.
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
[[gnu::always_inline]] inline bool int8_block(const float* in, float* residual, std::size_t n, std::byte* out) noexcept {
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
std::uint32_t encode_int8(const float* in, float* residual, std::size_t n, Draw&, std::byte* out) noexcept {
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
void decode_int8(const std::byte* in, std::size_t n, const Draw&, float* out) noexcept {
  std::size_t at = 0;
  for (; at + kBlockInt <= n; at += kBlockInt, in += 2 + kBlockInt) int8_values(in, kBlockInt, out + at);
  if (at < n) int8_values(in, n - at, out + at);
}

// --- int4 ------------------------------------------------------------------------------------------------------------

/// The first half of the elements in the low halves of the bytes, the others in the high ones: pairs of neighbours would
/// have to be taken apart.
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
[[gnu::always_inline]] inline bool int4_block(const float* in, float* residual, std::size_t n, std::byte* out) noexcept {
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
    for (std::size_t i = 0; i < n; ++i)
      residual[i] = p[i] - static_cast<float>(values[i] - 8) * scale;
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
std::uint32_t encode_int4(const float* in, float* residual, std::size_t n, Draw&, std::byte* out) noexcept {
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
void decode_int4(const std::byte* in, std::size_t n, const Draw&, float* out) noexcept {
  std::size_t at = 0;
  for (; at + kBlockInt <= n; at += kBlockInt, in += 2 + kBlockInt / 2) int4_values(in, kBlockInt, out + at);
  if (at < n) int4_values(in, n - at, out + at);
}

// --- one bit ---------------------------------------------------------------------------------------------------------

inline std::uint16_t signs16(const float* p) noexcept {
#if defined(__AVX512DQ__)
  return static_cast<std::uint16_t>(_mm512_movepi32_mask(_mm512_castps_si512(_mm512_loadu_ps(p))));
#elif defined(__AVX2__)
  return static_cast<std::uint16_t>(_mm256_movemask_ps(_mm256_loadu_ps(p)) |
                                    _mm256_movemask_ps(_mm256_loadu_ps(p + 8)) << 8);
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
    const __m256i magnitude = _mm256_and_si256(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(at)), _mm256_set1_epi32(kAbs));
    return _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(magnitude, _mm256_setzero_si256())));
  };
  return static_cast<std::uint16_t>(eight(p) | eight(p + 8) << 8);
#else
  std::uint32_t mask = 0;
  for (unsigned i = 0; i < 16; ++i) mask |= std::uint32_t{(bits_of_float(p[i]) & kAbs) == 0} << i;
  return static_cast<std::uint16_t>(mask);
#endif
}

/// Sixteen values of this magnitude, bits of fp32, with these signs, but +0 where `zeros` has a bit.
template <bool kZeros>
[[gnu::always_inline]] inline void put_signed16(std::uint32_t magnitude, std::uint16_t signs, std::uint16_t zeros, float* out) noexcept {
#if defined(__AVX512DQ__)
  const __m512i sizes = _mm512_set1_epi32(static_cast<int>(magnitude));
  __m512i values = _mm512_mask_xor_epi32(sizes, signs, sizes, _mm512_set1_epi32(static_cast<int>(~kAbs)));
  if constexpr (kZeros) values = _mm512_mask_mov_epi32(values, zeros, _mm512_setzero_si512());
  _mm512_storeu_si512(out, values);
#elif defined(__AVX2__)
  const __m256i places = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
  const auto all_of = [places](unsigned bits) {  // a lane of ones for every bit
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

/// Of n elements, 16 or fewer.
inline std::uint16_t get_bits(const std::byte* bits, std::size_t n) noexcept {
  return n > 8 ? get16(bits) : static_cast<std::uint16_t>(bits[0]);
}

template <bool kZeros>
[[gnu::always_inline]] inline void onebit_values(const std::byte* in, const std::byte* zeros, std::size_t n, float* out) noexcept {
  const std::uint32_t magnitude = bits_of_float(get_scale(in)) & kAbs;
  const std::byte* const signs = in + 2;
  std::size_t i = 0;
  for (; i + 16 <= n; i += 16)
    put_signed16<kZeros>(magnitude, get16(signs + i / 8), kZeros ? get16(zeros + i / 8) : std::uint16_t{0}, out + i);
  if (i == n) return;
  float last[16];
  put_signed16<kZeros>(magnitude, get_bits(signs + i / 8, n - i), kZeros ? get_bits(zeros + i / 8, n - i) : std::uint16_t{0}, last);
  __builtin_memcpy(out + i, last, (n - i) * sizeof(float));
}

/// A bit of each of n elements, by sixteen_of(sixteen elements).
template <class SixteenOf>
[[gnu::always_inline]] inline void put_bits(const float* p, std::size_t n, std::byte* out, SixteenOf sixteen_of) noexcept {
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

/// `zeros`: where this block's would be; moved behind them if it has some.
template <bool kFeedback>
[[gnu::always_inline]] inline bool onebit_block(const float* in, float* residual, std::size_t n, std::byte* out, std::byte*& zeros) noexcept {
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
  // To nearest; the sum may have been too large for a float though no value was.
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
inline std::uint32_t onebit_blocks(const float* in, float* residual, std::size_t n, std::byte* out, std::byte*& zeros) noexcept {
  std::uint32_t odd = 0;
  std::size_t at = 0;
  for (; at + kBlockOneBit <= n; at += kBlockOneBit, out += kOneBitBytes)
    odd += onebit_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, kBlockOneBit, out, zeros);
  if (at < n) odd += onebit_block<kFeedback>(in + at, kFeedback ? residual + at : nullptr, n - at, out, zeros);
  return odd;
}
std::uint32_t encode_onebit(const float* in, float* residual, std::size_t n, Draw& draw, std::byte* out) noexcept {
  return residual != nullptr ? onebit_blocks<true>(in, residual, n, out, draw.zeros_out)
                             : onebit_blocks<false>(in, residual, n, out, draw.zeros_out);
}
void decode_onebit(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
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

// --- lots ------------------------------------------------------------------------------------------------------------

/// Of a counter: the finaliser of SplitMix64 (Steele et al., OOPSLA 2014).
inline std::uint64_t lot(std::uint64_t seed, std::uint64_t counter) noexcept {
  std::uint64_t z = seed + (counter + 1) * 0x9e3779b97f4a7c15ULL;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}
/// In [0, 1), of 24 bits.
inline float lot01(std::uint64_t seed, std::uint64_t counter) noexcept {
  return static_cast<float>(static_cast<std::int32_t>(lot(seed, counter) >> 40)) * 0x1p-24F;
}

// --- sparse ----------------------------------------------------------------------------------------------------------

constexpr std::uint32_t kNoIndex = 0xffffffffU;

/// Marks the k elements of largest magnitude; of equal ones the first. By halving the range of bit patterns.
inline void mark_largest(const std::uint32_t* magnitude, std::size_t n, std::size_t k, bool* marked) noexcept {
  std::uint32_t low = 0;  // at least k are >= low
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
std::uint32_t encode_topk(const float* in, float* residual, std::size_t n, Draw& draw, std::byte* out) noexcept {
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
void decode_topk(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
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

/// k different indices of n, in order: Floyd's algorithm (Bentley, CACM 30(9), 1987), by lots of the block.
inline void draw_indices(std::uint64_t seed, std::uint64_t block, std::size_t n, std::size_t k,
                         std::uint64_t* chosen) noexcept {
  for (std::size_t i = 0; i < kBlockSparse / 64; ++i) chosen[i] = 0;
  for (std::size_t j = n - k; j < n; ++j) {
    // Of 32 bits, times j + 1: the bias is below 2^-22.
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

std::uint32_t encode_randomk(const float* in, float* residual, std::size_t n, Draw& draw,
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
void decode_randomk(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
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

// --- dithering -------------------------------------------------------------------------------------------------------

/// A level in [0, levels] whose mean over all lots is x levels; x in [0, 1].
inline std::uint32_t linear_level(float x, float levels, float lots) noexcept {
  const float y = x * levels + lots;
  const auto level = static_cast<std::int32_t>(y);
  return static_cast<std::uint32_t>(level) < static_cast<std::uint32_t>(levels) ? static_cast<std::uint32_t>(level)
                                                                                : static_cast<std::uint32_t>(levels);
}
/// 0: zero, c: 2^(c - 7); the mean over all lots is x.
inline std::uint32_t natural_code(float x, float lots) noexcept {
  if (x >= 1.0F) return 7;
  const std::uint32_t exponent = bits_of_float(x) >> 23;  // x = 2^(exponent - 127) (1 + fraction)
  if (exponent < 127 - 6) return lots < x * 64.0F ? 1 : 0;
  const float low = float_of_bits(exponent << 23);
  return exponent - (127 - 7) + (lots < (x - low) / low ? 1 : 0);
}
inline float natural_value(std::uint32_t code) noexcept {
  return code == 0 ? 0.0F : float_of_bits((code + 120) << 23);
}

template <bool kNatural>
std::uint32_t encode_dither(const float* in, float* residual, std::size_t n, Draw& draw,
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
      // Rounded up it may be infinite: the largest bf16 then, and what is above it counts as it.
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
void decode_dither(const std::byte* in, std::size_t n, const Draw& draw, float* out) noexcept {
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

// --- the rest --------------------------------------------------------------------------------------------------------

void widen_all(const std::byte* in, std::size_t n, bool bf16, float* out) noexcept {
  if (bf16)
    decode_cast<true>(in, n, {}, out);
  else
    decode_cast<false>(in, n, {}, out);
}
void narrow_all(const float* in, std::size_t n, bool bf16, std::byte* out) noexcept {
  if (bf16)
    encode_cast_blocks<true, false>(in, nullptr, n, out);
  else
    encode_cast_blocks<false, false>(in, nullptr, n, out);
}
void nesterov(const float* in, float* momentum, std::size_t n, float mu, float* out) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    const float m = mu * momentum[i] + in[i];
    out[i] = in[i] + mu * m;
    // What is not finite passes, and is not remembered.
    const bool finite = (bits_of_float(m) & kAbs) < kInfinity;
    momentum[i] = float_of_bits(reduce::select(finite, bits_of_float(m), bits_of_float(momentum[i])));
  }
}

consteval KernelTable make_table(const char* name) {
  KernelTable table;
  table.name = name;
  const auto set = [&table](Kernel kernel, Encode encode, Decode decode) {
    table.kernels[static_cast<std::size_t>(kernel)] = {encode, decode};
  };
  set(Kernel::kBf16, encode_cast<true>, decode_cast<true>);
  set(Kernel::kFp16, encode_cast<false>, decode_cast<false>);
  set(Kernel::kInt8, encode_int8, decode_int8);
  set(Kernel::kInt4, encode_int4, decode_int4);
  set(Kernel::kOneBit, encode_onebit, decode_onebit);
  set(Kernel::kTopK, encode_topk, decode_topk);
  set(Kernel::kRandomK, encode_randomk, decode_randomk);
  set(Kernel::kLinear, encode_dither<false>, decode_dither<false>);
  set(Kernel::kNatural, encode_dither<true>, decode_dither<true>);
  table.widen = widen_all;
  table.narrow = narrow_all;
  table.nesterov = nesterov;
  return table;
}

}  // namespace
}  // namespace hybridps::compress
