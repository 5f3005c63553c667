// hybridps/reduce/lanes_neon.h: the hot element types in 128-bit registers (Advanced SIMD of AArch64).
//
// Empty elsewhere. Every AArch64 CPU that runs Linux has these instructions, so the file needs no flags. Instructions
// of later extensions (bf16 and fp16 arithmetic, SVE) are not used. Operations match elements.h bit for bit; the tests
// compare every table with the baseline table.
#pragma once

#include "hybridps/reduce/kernels.h"

#if defined(__aarch64__)
#include <arm_neon.h>

namespace hybridps::reduce {
namespace {  // NOLINT(google-build-namespaces): compiled once per instruction set, see convert.h

struct NeonReal32 {
  using Reg = float32x4_t;
  using Factor = float;
  static constexpr std::size_t kWidth = 4;
  template <Fold kFold>
  static constexpr bool kFolds = kIsRealFold<kFold>;

  static Reg splat(float x) { return vdupq_n_f32(x); }
  static Reg scale(Reg acc, Reg factor) { return vmulq_f32(acc, factor); }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return vaddq_f32(acc, x);
    if constexpr (kFold == Fold::kMul) return vmulq_f32(acc, x);
    // Not fmin: fmin orders -0 below +0, but of equal values the left one must stay.
    if constexpr (kFold == Fold::kMin) return take(acc, x, vcltq_f32(x, acc));
    if constexpr (kFold == Fold::kMax) return take(acc, x, vcgtq_f32(x, acc));
  }

  static Reg canonical(Reg acc) { return vbslq_f32(vceqq_f32(acc, acc), acc, vdupq_n_f32(__builtin_nanf(""))); }

 private:
  static Reg take(Reg acc, Reg x, uint32x4_t better) { return vbslq_f32(vornq_u32(better, vceqq_f32(x, x)), x, acc); }
};

struct NeonFp32 : NeonReal32 {
  static constexpr std::size_t kBytes = 4;
  static Reg load(const std::byte* from) { return load_as<float32x4_t>(from); }
  static void store(std::byte* to, Reg acc) { store_as<float32x4_t>(to, canonical(acc)); }
};

/// Eight narrow elements in two registers, with one load or store. The derived type chooses which element is in which
/// register.
struct NeonReal32Pair {
  using Half = NeonReal32;
  struct Reg {
    float32x4_t a, b;
  };
  using Factor = float;
  static constexpr std::size_t kBytes = 2;
  static constexpr std::size_t kWidth = 8;
  template <Fold kFold>
  static constexpr bool kFolds = Half::kFolds<kFold>;

  static Reg splat(float x) { return {Half::splat(x), Half::splat(x)}; }
  static Reg scale(Reg acc, Reg factor) { return {Half::scale(acc.a, factor.a), Half::scale(acc.b, factor.b)}; }
  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    return {Half::fold<kFold>(acc.a, x.a), Half::fold<kFold>(acc.b, x.b)};
  }
};

/// a: the lower four elements; b: the upper four.
struct NeonFp16 : NeonReal32Pair {
  static Reg load(const std::byte* from) {
    const auto halves = load_as<float16x8_t>(from);
    return {vcvt_f32_f16(vget_low_f16(halves)), vcvt_high_f32_f16(halves)};
  }
  static void store(std::byte* to, Reg acc) {
    store_as<float16x8_t>(to, vcvt_high_f16_f32(vcvt_f16_f32(Half::canonical(acc.a)), Half::canonical(acc.b)));
  }
};

/// a: the even elements; b: the odd ones. Widening and narrowing are then shifts, and no element moves.
struct NeonBf16 : NeonReal32Pair {
  static Reg load(const std::byte* from) {
    const auto pairs = load_as<uint32x4_t>(from);
    return {vreinterpretq_f32_u32(vshlq_n_u32(pairs, 16)),
            vreinterpretq_f32_u32(vandq_u32(pairs, vdupq_n_u32(0xffff0000u)))};
  }
  static void store(std::byte* to, Reg acc) {
    store_as<uint32x4_t>(to, vsriq_n_u32(rounded(acc.b), rounded(acc.a), 16));
  }

 private:
  /// The result is in the upper half of each element; the lower half is ignored. The canonical NaN survives the
  /// rounding's carry, so narrow_bf16's select is not needed.
  static uint32x4_t rounded(float32x4_t acc) {
    const uint32x4_t bits = vreinterpretq_u32_f32(Half::canonical(acc));
    const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    return vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
  }
};

struct NeonFp64 {
  using Reg = float64x2_t;
  using Factor = double;
  static constexpr std::size_t kBytes = 8;
  static constexpr std::size_t kWidth = 2;
  template <Fold kFold>
  static constexpr bool kFolds = kIsRealFold<kFold>;

  static Reg splat(double x) { return vdupq_n_f64(x); }
  static Reg scale(Reg acc, Reg factor) { return vmulq_f64(acc, factor); }
  static Reg load(const std::byte* from) { return load_as<float64x2_t>(from); }
  static void store(std::byte* to, Reg acc) {
    store_as<float64x2_t>(to, vbslq_f64(vceqq_f64(acc, acc), acc, vdupq_n_f64(__builtin_nan(""))));
  }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    if constexpr (kFold == Fold::kAdd) return vaddq_f64(acc, x);
    if constexpr (kFold == Fold::kMul) return vmulq_f64(acc, x);
    if constexpr (kFold == Fold::kMin) return take(acc, x, vcltq_f64(x, acc));
    if constexpr (kFold == Fold::kMax) return take(acc, x, vcgtq_f64(x, acc));
  }

 private:
  static Reg take(Reg acc, Reg x, uint64x2_t better) { return vbslq_f64(vornq_u64(better, vceqq_f64(x, x)), x, acc); }
};

/// Unsigned registers: the compilers' headers add with operator +, which must not overflow a signed type.
struct NeonInt32 {
  using Reg = uint32x4_t;
  static constexpr std::size_t kBytes = 4;
  static constexpr std::size_t kWidth = 4;
  template <Fold kFold>
  static constexpr bool kFolds = kIsIntFold<kFold>;

  static Reg load(const std::byte* from) { return load_as<uint32x4_t>(from); }
  static void store(std::byte* to, Reg acc) { store_as<uint32x4_t>(to, acc); }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    const int32x4_t left = vreinterpretq_s32_u32(acc), right = vreinterpretq_s32_u32(x);
    if constexpr (kFold == Fold::kAdd) return vaddq_u32(acc, x);
    if constexpr (kFold == Fold::kMin) return vreinterpretq_u32_s32(vminq_s32(left, right));
    if constexpr (kFold == Fold::kMax) return vreinterpretq_u32_s32(vmaxq_s32(left, right));
  }
};

struct NeonInt64 {
  using Reg = uint64x2_t;
  static constexpr std::size_t kBytes = 8;
  static constexpr std::size_t kWidth = 2;
  template <Fold kFold>
  static constexpr bool kFolds = kIsIntFold<kFold>;

  static Reg load(const std::byte* from) { return load_as<uint64x2_t>(from); }
  static void store(std::byte* to, Reg acc) { store_as<uint64x2_t>(to, acc); }

  template <Fold kFold>
  static Reg fold(Reg acc, Reg x) {
    const int64x2_t left = vreinterpretq_s64_u64(acc), right = vreinterpretq_s64_u64(x);
    if constexpr (kFold == Fold::kAdd) return vaddq_u64(acc, x);
    if constexpr (kFold == Fold::kMin) return vbslq_u64(vcgtq_s64(left, right), x, acc);
    if constexpr (kFold == Fold::kMax) return vbslq_u64(vcgtq_s64(right, left), x, acc);
  }
};

template <class Element>
struct NeonLanes {
  using Type = void;
};
// clang-format off
template <> struct NeonLanes<Fp32Element> { using Type = NeonFp32; };
template <> struct NeonLanes<Fp64Element> { using Type = NeonFp64; };
template <> struct NeonLanes<Fp16Element> { using Type = NeonFp16; };
template <> struct NeonLanes<Bf16Element> { using Type = NeonBf16; };
template <> struct NeonLanes<IntElement<std::int32_t>> { using Type = NeonInt32; };
template <> struct NeonLanes<IntElement<std::int64_t>> { using Type = NeonInt64; };
// clang-format on

}  // namespace
}  // namespace hybridps::reduce
#endif
