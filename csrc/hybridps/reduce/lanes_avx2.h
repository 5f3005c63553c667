// hybridps/reduce/lanes_avx2.h: the hot element types in 256-bit registers (AVX2 and F16C).
//
// Empty unless the including file is compiled with -mavx2 -mf16c. Operations match elements.h bit for bit; the tests
// compare every table with the baseline table.
#pragma once

#include "hybridps/reduce/kernels.h"

#if defined(__AVX2__) && defined(__F16C__)
#include <immintrin.h>

namespace hybridps::reduce {
namespace {  // NOLINT(google-build-namespaces): compiled once per instruction set, see convert.h

struct Avx2Real32 {
  using Reg = __m256;
  using Factor = float;
  static constexpr std::size_t kWidth = 8;
  template <Fold kFold>
  static constexpr bool kFolds = kIsRealFold<kFold>;

  static Reg splat(float x) { return _mm256_set1_ps(x); }
  static Reg scale(Reg acc, Reg factor) { return _mm256_mul_ps(acc, factor); }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm256_add_ps(acc, x);
    if constexpr (kFold == Fold::kMul) return _mm256_mul_ps(acc, x);
    // Not minps: minps would drop a NaN in acc, and would order equal zeros by operand position.
    if constexpr (kFold == Fold::kMin) return take(acc, x, _mm256_cmp_ps(x, acc, _CMP_LT_OQ));
    if constexpr (kFold == Fold::kMax) return take(acc, x, _mm256_cmp_ps(x, acc, _CMP_GT_OQ));
  }

  static Reg canonical(Reg acc) {
    return _mm256_blendv_ps(acc, _mm256_set1_ps(__builtin_nanf("")), _mm256_cmp_ps(acc, acc, _CMP_UNORD_Q));
  }

 private:
  static Reg take(Reg acc, Reg x, Reg better) {
    return _mm256_blendv_ps(acc, x, _mm256_or_ps(better, _mm256_cmp_ps(x, x, _CMP_UNORD_Q)));
  }
};

struct Avx2Fp32 : Avx2Real32 {
  static constexpr std::size_t kBytes = 4;
  static Reg load(const std::byte* from) { return _mm256_loadu_ps(reinterpret_cast<const float*>(from)); }
  static void store(std::byte* to, Reg acc) { _mm256_storeu_ps(reinterpret_cast<float*>(to), canonical(acc)); }
};

struct Avx2Fp16 : Avx2Real32 {
  static constexpr std::size_t kBytes = 2;
  static Reg load(const std::byte* from) {
    return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
  }
  static void store(std::byte* to, Reg acc) {
    const __m128i halves = _mm256_cvtps_ph(canonical(acc), _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to), halves);
  }
};

/// 16 elements, even elements separate from odd ones. Widening and narrowing are then shifts, and no element moves.
struct Avx2Bf16 {
  using Half = Avx2Real32;
  struct Reg {
    __m256 even, odd;
  };
  using Factor = float;
  static constexpr std::size_t kBytes = 2;
  static constexpr std::size_t kWidth = 16;
  template <Fold kFold>
  static constexpr bool kFolds = Half::kFolds<kFold>;

  static Reg splat(float x) { return {Half::splat(x), Half::splat(x)}; }
  static Reg scale(Reg acc, Reg factor) {
    return {Half::scale(acc.even, factor.even), Half::scale(acc.odd, factor.odd)};
  }
  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    return {Half::fold<kFold>(acc.even, x.even), Half::fold<kFold>(acc.odd, x.odd)};
  }

  static Reg load(const std::byte* from) {
    const __m256i pairs = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
    return {_mm256_castsi256_ps(_mm256_slli_epi32(pairs, 16)),
            _mm256_castsi256_ps(_mm256_and_si256(pairs, _mm256_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static void store(std::byte* to, Reg acc) {
    const __m256i even = _mm256_srli_epi32(rounded(acc.even), 16);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm256_blend_epi16(even, rounded(acc.odd), 0xaa));
  }

 private:
  /// The result is in the upper half of each element; the lower half is ignored. The canonical NaN survives the
  /// rounding's carry, so narrow_bf16's select is not needed.
  static __m256i rounded(__m256 acc) {
    const __m256i bits = _mm256_castps_si256(Half::canonical(acc));
    const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  }
};

struct Avx2Fp64 {
  using Reg = __m256d;
  using Factor = double;
  static constexpr std::size_t kBytes = 8;
  static constexpr std::size_t kWidth = 4;
  template <Fold kFold>
  static constexpr bool kFolds = kIsRealFold<kFold>;

  static Reg splat(double x) { return _mm256_set1_pd(x); }
  static Reg scale(Reg acc, Reg factor) { return _mm256_mul_pd(acc, factor); }
  static Reg load(const std::byte* from) { return _mm256_loadu_pd(reinterpret_cast<const double*>(from)); }
  static void store(std::byte* to, Reg acc) {
    const Reg nan = _mm256_cmp_pd(acc, acc, _CMP_UNORD_Q);
    _mm256_storeu_pd(reinterpret_cast<double*>(to), _mm256_blendv_pd(acc, _mm256_set1_pd(__builtin_nan("")), nan));
  }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm256_add_pd(acc, x);
    if constexpr (kFold == Fold::kMul) return _mm256_mul_pd(acc, x);
    if constexpr (kFold == Fold::kMin) return take(acc, x, _mm256_cmp_pd(x, acc, _CMP_LT_OQ));
    if constexpr (kFold == Fold::kMax) return take(acc, x, _mm256_cmp_pd(x, acc, _CMP_GT_OQ));
  }

 private:
  static Reg take(Reg acc, Reg x, Reg better) {
    return _mm256_blendv_pd(acc, x, _mm256_or_pd(better, _mm256_cmp_pd(x, x, _CMP_UNORD_Q)));
  }
};

struct Avx2Int {
  using Reg = __m256i;
  template <Fold kFold>
  static constexpr bool kFolds = kIsIntFold<kFold>;
  static Reg load(const std::byte* from) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)); }
  static void store(std::byte* to, Reg acc) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), acc); }
};

struct Avx2Int32 : Avx2Int {
  static constexpr std::size_t kBytes = 4;
  static constexpr std::size_t kWidth = 8;
  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm256_add_epi32(acc, x);
    if constexpr (kFold == Fold::kMin) return _mm256_min_epi32(acc, x);
    if constexpr (kFold == Fold::kMax) return _mm256_max_epi32(acc, x);
  }
};

struct Avx2Int64 : Avx2Int {
  static constexpr std::size_t kBytes = 8;
  static constexpr std::size_t kWidth = 4;
  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm256_add_epi64(acc, x);
    if constexpr (kFold == Fold::kMin) return _mm256_blendv_epi8(acc, x, _mm256_cmpgt_epi64(acc, x));
    if constexpr (kFold == Fold::kMax) return _mm256_blendv_epi8(acc, x, _mm256_cmpgt_epi64(x, acc));
  }
};

template <class Element>
struct Avx2Lanes {
  using Type = void;
};
// clang-format off
template <> struct Avx2Lanes<Fp32Element> { using Type = Avx2Fp32; };
template <> struct Avx2Lanes<Fp64Element> { using Type = Avx2Fp64; };
template <> struct Avx2Lanes<Fp16Element> { using Type = Avx2Fp16; };
template <> struct Avx2Lanes<Bf16Element> { using Type = Avx2Bf16; };
template <> struct Avx2Lanes<IntElement<std::int32_t>> { using Type = Avx2Int32; };
template <> struct Avx2Lanes<IntElement<std::int64_t>> { using Type = Avx2Int64; };
// clang-format on

}  // namespace
}  // namespace hybridps::reduce
#endif
