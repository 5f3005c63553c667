// hybridps/reduce/lanes_avx512.h: the hot element types in 512-bit registers (AVX-512 F, BW, VL and DQ).
//
// Empty unless the including file is compiled with those flags. Operations match elements.h bit for bit; the tests
// compare every table with the baseline table.
#pragma once

#include "hybridps/reduce/kernels.h"

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__) && defined(__AVX512DQ__)
#include <immintrin.h>

namespace hybridps::reduce {
namespace {  // NOLINT(google-build-namespaces): compiled once per instruction set, see convert.h

struct Avx512Real32 {
  using Reg = __m512;
  using Factor = float;
  static constexpr std::size_t kWidth = 16;
  template <Fold kFold>
  static constexpr bool kFolds = kIsRealFold<kFold>;

  static Reg splat(float x) { return _mm512_set1_ps(x); }
  static Reg scale(Reg acc, Reg factor) { return _mm512_mul_ps(acc, factor); }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm512_add_ps(acc, x);
    if constexpr (kFold == Fold::kMul) return _mm512_mul_ps(acc, x);
    // Not minps: minps would drop a NaN in acc, and would order equal zeros by operand position.
    if constexpr (kFold == Fold::kMin) return take(acc, x, _mm512_cmp_ps_mask(x, acc, _CMP_LT_OQ));
    if constexpr (kFold == Fold::kMax) return take(acc, x, _mm512_cmp_ps_mask(x, acc, _CMP_GT_OQ));
  }

  static Reg canonical(Reg acc) {
    return _mm512_mask_mov_ps(acc, _mm512_cmp_ps_mask(acc, acc, _CMP_UNORD_Q), _mm512_set1_ps(__builtin_nanf("")));
  }

 private:
  static Reg take(Reg acc, Reg x, __mmask16 better) {
    return _mm512_mask_mov_ps(acc, static_cast<__mmask16>(better | _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q)), x);
  }
};

struct Avx512Fp32 : Avx512Real32 {
  static constexpr std::size_t kBytes = 4;
  static Reg load(const std::byte* from) { return _mm512_loadu_ps(from); }
  static void store(std::byte* to, Reg acc) { _mm512_storeu_ps(to, canonical(acc)); }
};

struct Avx512Fp16 : Avx512Real32 {
  static constexpr std::size_t kBytes = 2;
  static Reg load(const std::byte* from) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
  }
  static void store(std::byte* to, Reg acc) {
    const __m256i halves = _mm512_cvtps_ph(canonical(acc), _MM_FROUND_TO_NEAREST_INT);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
  }
};

/// 32 elements, even elements separate from odd ones. Widening and narrowing are then shifts, and no element moves.
struct Avx512Bf16 {
  using Half = Avx512Real32;
  struct Reg {
    __m512 even, odd;
  };
  using Factor = float;
  static constexpr std::size_t kBytes = 2;
  static constexpr std::size_t kWidth = 32;
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
    const __m512i pairs = _mm512_loadu_si512(from);
    return {_mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)),
            _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xffff0000u))))};
  }
  static void store(std::byte* to, Reg acc) {
    const __m512i even = _mm512_srli_epi32(rounded(acc.even), 16);
    _mm512_storeu_si512(to, _mm512_mask_blend_epi16(0xaaaaaaaau, even, rounded(acc.odd)));
  }

 private:
  /// The result is in the upper half of each element; the lower half is ignored. Not vcvtneps2bf16 of AVX512_BF16,
  /// because that flushes subnormals. The canonical NaN survives the rounding's carry.
  static __m512i rounded(__m512 acc) {
    const __m512i bits = _mm512_castps_si512(Half::canonical(acc));
    const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    return _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  }
};

struct Avx512Fp64 {
  using Reg = __m512d;
  using Factor = double;
  static constexpr std::size_t kBytes = 8;
  static constexpr std::size_t kWidth = 8;
  template <Fold kFold>
  static constexpr bool kFolds = kIsRealFold<kFold>;

  static Reg splat(double x) { return _mm512_set1_pd(x); }
  static Reg scale(Reg acc, Reg factor) { return _mm512_mul_pd(acc, factor); }
  static Reg load(const std::byte* from) { return _mm512_loadu_pd(from); }
  static void store(std::byte* to, Reg acc) {
    const __mmask8 nan = _mm512_cmp_pd_mask(acc, acc, _CMP_UNORD_Q);
    _mm512_storeu_pd(to, _mm512_mask_mov_pd(acc, nan, _mm512_set1_pd(__builtin_nan(""))));
  }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm512_add_pd(acc, x);
    if constexpr (kFold == Fold::kMul) return _mm512_mul_pd(acc, x);
    if constexpr (kFold == Fold::kMin) return take(acc, x, _mm512_cmp_pd_mask(x, acc, _CMP_LT_OQ));
    if constexpr (kFold == Fold::kMax) return take(acc, x, _mm512_cmp_pd_mask(x, acc, _CMP_GT_OQ));
  }

 private:
  static Reg take(Reg acc, Reg x, __mmask8 better) {
    return _mm512_mask_mov_pd(acc, static_cast<__mmask8>(better | _mm512_cmp_pd_mask(x, x, _CMP_UNORD_Q)), x);
  }
};

struct Avx512Int {
  using Reg = __m512i;
  template <Fold kFold>
  static constexpr bool kFolds = kIsIntFold<kFold>;
  static Reg load(const std::byte* from) { return _mm512_loadu_si512(from); }
  static void store(std::byte* to, Reg acc) { _mm512_storeu_si512(to, acc); }
};

struct Avx512Int32 : Avx512Int {
  static constexpr std::size_t kBytes = 4;
  static constexpr std::size_t kWidth = 16;
  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm512_add_epi32(acc, x);
    if constexpr (kFold == Fold::kMin) return _mm512_min_epi32(acc, x);
    if constexpr (kFold == Fold::kMax) return _mm512_max_epi32(acc, x);
  }
};

struct Avx512Int64 : Avx512Int {
  static constexpr std::size_t kBytes = 8;
  static constexpr std::size_t kWidth = 8;
  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return _mm512_add_epi64(acc, x);
    if constexpr (kFold == Fold::kMin) return _mm512_min_epi64(acc, x);
    if constexpr (kFold == Fold::kMax) return _mm512_max_epi64(acc, x);
  }
};

template <class Element>
struct Avx512Lanes {
  using Type = void;
};
// clang-format off
template <> struct Avx512Lanes<Fp32Element> { using Type = Avx512Fp32; };
template <> struct Avx512Lanes<Fp64Element> { using Type = Avx512Fp64; };
template <> struct Avx512Lanes<Fp16Element> { using Type = Avx512Fp16; };
template <> struct Avx512Lanes<Bf16Element> { using Type = Avx512Bf16; };
template <> struct Avx512Lanes<IntElement<std::int32_t>> { using Type = Avx512Int32; };
template <> struct Avx512Lanes<IntElement<std::int64_t>> { using Type = Avx512Int64; };
// clang-format on

}  // namespace
}  // namespace hybridps::reduce
#endif
