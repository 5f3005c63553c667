// hybridps/reduce/convert.h: converts the narrow floating types to fp32 and back, one element at a time.
//
// Threads  any; pure functions of bits.
// Arith.   Widening is exact. Narrowing rounds to nearest even and honours subnormals. Every function consists of
//          selects between integer expressions, so that a loop over it vectorises.
// Source   bit layouts: IEEE 754 binary16; bfloat16; OCP 8-bit floating point (arXiv 2209.05433) for e4m3fn and e5m2;
//          arXiv 2206.02915 for the fnuz kinds. Overflow follows c10's Float8_*.h of torch 2.15: e4m3fn saturates to
//          448, e5m2 goes to infinity, the fnuz kinds go to their only NaN.
#pragma once

#include <cstdint>

// This namespace is unnamed on purpose. The header is compiled once per instruction set. The linker would merge inline
// functions with external linkage across these files, possibly into a copy that the CPU cannot run.
namespace hybridps::reduce {
namespace {  // NOLINT(google-build-namespaces): see above

inline float float_of_bits(std::uint32_t bits) noexcept { return __builtin_bit_cast(float, bits); }
inline std::uint32_t bits_of_float(float value) noexcept { return __builtin_bit_cast(std::uint32_t, value); }

/// Computes both values and keeps one by a mask. A conditional expression would become a branch, because one side is
/// much cheaper, and a loop with a branch is not vectorised.
inline std::uint32_t select(bool condition, std::uint32_t yes, std::uint32_t no) noexcept {
  return no ^ ((yes ^ no) & (0u - static_cast<std::uint32_t>(condition)));
}

inline constexpr std::uint32_t kFp32SignBit = 0x80000000u;
inline constexpr std::uint32_t kFp32Infinity = 0x7f800000u;
inline constexpr std::uint32_t kFp32QuietNan = 0x7fc00000u;

inline float widen_bf16(std::uint16_t bits) noexcept { return float_of_bits(static_cast<std::uint32_t>(bits) << 16); }

inline std::uint16_t narrow_bf16(float value) noexcept {
  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  // The rounding's carry would turn some NaNs into infinity or zero.
  const std::uint32_t nan = (bits >> 16) | 0x0040u;
  return static_cast<std::uint16_t>(select((bits & ~kFp32SignBit) > kFp32Infinity, nan, rounded));
}

/// Describes an IEEE-like format of 8 or 16 bits.
struct NarrowFormat {
  int exponent_bits;
  int mantissa_bits;
  int bias;
  enum class Specials {
    kIeee,      // the top exponent holds infinities and NaNs
    kNanOnly,   // "fn": no infinity, NaN is all ones, overflow saturates
    kUnsigned,  // "fnuz": no infinity and no -0; the code of -0 is the only NaN, also after overflow
  } specials;

  constexpr int width() const { return 1 + exponent_bits + mantissa_bits; }
  constexpr std::uint32_t sign_bit() const { return 1u << (width() - 1); }
  /// fp32 bits of 2^exponent.
  static constexpr std::uint32_t power(int exponent) { return static_cast<std::uint32_t>(exponent + 127) << 23; }
};

inline constexpr NarrowFormat kFp16Format{5, 10, 15, NarrowFormat::Specials::kIeee};
inline constexpr NarrowFormat kE5M2Format{5, 2, 15, NarrowFormat::Specials::kIeee};
inline constexpr NarrowFormat kE4M3fnFormat{4, 3, 7, NarrowFormat::Specials::kNanOnly};
inline constexpr NarrowFormat kE4M3fnuzFormat{4, 3, 8, NarrowFormat::Specials::kUnsigned};
inline constexpr NarrowFormat kE5M2fnuzFormat{5, 2, 16, NarrowFormat::Specials::kUnsigned};

/// Any NaN becomes quiet; its payload is not promised.
template <NarrowFormat kFormat>
inline float widen(std::uint32_t code) noexcept {
  using Specials = NarrowFormat::Specials;
  constexpr int kMantissaBits = kFormat.mantissa_bits;
  constexpr std::uint32_t kSign = kFormat.sign_bit();
  constexpr std::uint32_t kAllOnes = kSign - 1;
  constexpr std::uint32_t kFirstNormal = 1u << kMantissaBits;
  constexpr std::uint32_t kInfinity = kAllOnes & ~(kFirstNormal - 1);

  const std::uint32_t magnitude = code & kAllOnes;
  const std::uint32_t normal = (magnitude << (23 - kMantissaBits)) + NarrowFormat::power(-kFormat.bias);
  // Converted from int, because every instruction set can convert int. The value has at most kMantissaBits bits here.
  const float subnormal_value = static_cast<float>(static_cast<std::int32_t>(magnitude)) *
                                float_of_bits(NarrowFormat::power(1 - kFormat.bias - kMantissaBits));
  std::uint32_t bits = select(magnitude < kFirstNormal, bits_of_float(subnormal_value), normal);
  if constexpr (kFormat.specials == Specials::kIeee) {
    bits = select(magnitude >= kInfinity, kFp32Infinity, bits);
    bits = select(magnitude > kInfinity, kFp32QuietNan, bits);
  } else if constexpr (kFormat.specials == Specials::kNanOnly) {
    bits = select(magnitude == kAllOnes, kFp32QuietNan, bits);
  } else {
    bits = select(code == kSign, kFp32QuietNan, bits);
  }
  return float_of_bits(bits | ((code & kSign) << (32 - kFormat.width())));
}

template <NarrowFormat kFormat>
inline std::uint32_t narrow(float value) noexcept {
  using Specials = NarrowFormat::Specials;
  constexpr int kMantissaBits = kFormat.mantissa_bits;
  constexpr int kDropped = 23 - kMantissaBits;
  constexpr std::uint32_t kSign = kFormat.sign_bit();
  constexpr std::uint32_t kAllOnes = kSign - 1;
  // A value below the smallest normal plus this number has an ulp as large as the smallest subnormal, so the adder
  // rounds.
  constexpr std::uint32_t kMagic = NarrowFormat::power(1 - kFormat.bias - kMantissaBits + 23);

  const std::uint32_t bits = bits_of_float(value);
  const std::uint32_t sign = (bits & kFp32SignBit) >> (32 - kFormat.width());
  const std::uint32_t magnitude = bits & ~kFp32SignBit;
  const bool is_nan = magnitude > kFp32Infinity;

  const std::uint32_t subnormal = bits_of_float(float_of_bits(magnitude) + float_of_bits(kMagic)) - kMagic;
  const std::uint32_t rebias = NarrowFormat::power(kFormat.bias - 254);  // (bias - 127) << 23, wrapping
  const std::uint32_t odd = (magnitude >> kDropped) & 1u;
  const std::uint32_t normal = (magnitude + rebias + ((1u << (kDropped - 1)) - 1) + odd) >> kDropped;
  std::uint32_t code = select(magnitude < NarrowFormat::power(1 - kFormat.bias), subnormal, normal);

  if constexpr (kFormat.specials == Specials::kIeee) {
    constexpr std::uint32_t kInfinity = kAllOnes & ~((1u << kMantissaBits) - 1);
    constexpr std::uint32_t kTooLarge = NarrowFormat::power(kFormat.bias + 1);
    // As torch writes them: fp16's NaN is the canonical NaN, e5m2's NaN is all ones.
    constexpr std::uint32_t kNan = kFormat.width() == 16 ? kInfinity | (1u << (kMantissaBits - 1)) : kAllOnes;
    code = select(magnitude >= kTooLarge, kInfinity, code);
    code = select(is_nan, kNan, code);
    return code | sign;
  } else if constexpr (kFormat.specials == Specials::kNanOnly) {
    // Values above the largest code, 448, saturate to 448.
    code = select(magnitude > NarrowFormat::power(8) + 0x00600000u, kAllOnes - 1, code);
    code = select(is_nan, kAllOnes, code);
    return code | sign;
  } else {
    // Just below the limit, rounding carries into the sign bit. The result is then already the NaN.
    constexpr std::uint32_t kTooLarge = NarrowFormat::power((1 << kFormat.exponent_bits) - kFormat.bias);
    code = select(magnitude >= kTooLarge, kSign, code);
    return select(code == 0, 0, code | sign);
  }
}

}  // namespace
}  // namespace hybridps::reduce
