// hybridps/reduce/elements.h: how one element of each dtype is loaded, combined, finished and stored.
//
// Threads  any; pure functions.
// Arith.   sum.h states the rules. A NaN result is always the positive quiet NaN of its type. Otherwise an adder's NaN
//          would depend on the instruction and on the compiler's operand order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hybridps/reduce/convert.h"

namespace hybridps::reduce {
namespace {  // NOLINT(google-build-namespaces): compiled once per instruction set, see convert.h

/// How one more input is combined. AVG adds; kPremulAdd first multiplies each input by its own factor.
enum class Fold { kAdd, kPremulAdd, kMul, kMin, kMax, kAnd, kOr, kXor };

template <class T>
inline T load_as(const std::byte* from) noexcept {
  T value;
  __builtin_memcpy(&value, from, sizeof(T));
  return value;
}

template <class T>
inline void store_as(std::byte* to, T value) noexcept {
  __builtin_memcpy(to, &value, sizeof(T));
}

/// Integers wrap. T is a fixed-width integer type.
template <class T>
struct IntElement {
  using Acc = T;
  static constexpr std::size_t kBytes = sizeof(T);
  static constexpr bool kFloating = false;
  static constexpr bool kDivides = true;

  static Acc load(const std::byte* from) noexcept { return load_as<T>(from); }
  static void store(std::byte* to, Acc acc) noexcept { store_as<T>(to, acc); }

  template <Fold kFold>
  static Acc fold(Acc acc, Acc x) noexcept {
    // Unsigned and at least 32 bits wide. int16 times int16 would promote to int, and int overflow is undefined.
    if constexpr (kFold == Fold::kAdd) return static_cast<T>(wide(acc) + wide(x));
    if constexpr (kFold == Fold::kMul) return static_cast<T>(wide(acc) * wide(x));
    if constexpr (kFold == Fold::kMin) return x < acc ? x : acc;
    if constexpr (kFold == Fold::kMax) return x > acc ? x : acc;
    if constexpr (kFold == Fold::kAnd) return static_cast<T>(acc & x);
    if constexpr (kFold == Fold::kOr) return static_cast<T>(acc | x);
    if constexpr (kFold == Fold::kXor) return static_cast<T>(acc ^ x);
  }

  /// In 64 bits, so that a uint8 may be divided by a world size of 300. divisor >= 1.
  static Acc divide(Acc acc, long long divisor) noexcept {
    if constexpr (static_cast<T>(-1) > 0) {
      return static_cast<T>(static_cast<unsigned long long>(acc) / static_cast<unsigned long long>(divisor));
    } else {
      return static_cast<T>(static_cast<long long>(acc) / divisor);
    }
  }

 private:
  using Wide = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;
  static Wide wide(T x) noexcept { return static_cast<Wide>(x); }
};

/// Any nonzero input byte is true; the output is 0 or 1.
struct BoolElement {
  using Acc = std::uint8_t;
  static constexpr std::size_t kBytes = 1;
  static constexpr bool kFloating = false;
  static constexpr bool kDivides = false;

  static Acc load(const std::byte* from) noexcept { return load_as<std::uint8_t>(from) != 0 ? 1 : 0; }
  static void store(std::byte* to, Acc acc) noexcept { store_as<std::uint8_t>(to, acc); }

  template <Fold kFold>
  static Acc fold(Acc acc, Acc x) noexcept {
    if constexpr (kFold == Fold::kAdd || kFold == Fold::kMax || kFold == Fold::kOr) return acc | x;
    if constexpr (kFold == Fold::kMul || kFold == Fold::kMin || kFold == Fold::kAnd) return acc & x;
    if constexpr (kFold == Fold::kXor) return acc ^ x;
  }
};

/// Real floating types; T is float or double. fold()'s NaN rules are torch's: the first NaN wins, and a tie keeps the
/// left value.
template <class T>
struct RealAcc {
  using Acc = T;
  using Factor = T;
  static constexpr bool kFloating = true;
  static constexpr bool kDivides = false;

  template <Fold kFold>
  static Acc fold(Acc acc, Acc x) noexcept {
    if constexpr (kFold == Fold::kAdd) return acc + x;
    if constexpr (kFold == Fold::kMul) return acc * x;
    if constexpr (kFold == Fold::kMin) return ((x < acc) | (x != x)) ? x : acc;
    if constexpr (kFold == Fold::kMax) return ((x > acc) | (x != x)) ? x : acc;
  }
  static Acc scale(Acc acc, Factor factor) noexcept { return acc * factor; }

 protected:
  static Acc canonical(Acc acc) noexcept { return acc != acc ? static_cast<T>(__builtin_nan("")) : acc; }
};

struct Fp32Element : RealAcc<float> {
  static constexpr std::size_t kBytes = 4;
  static Acc load(const std::byte* from) noexcept { return load_as<float>(from); }
  static void store(std::byte* to, Acc acc) noexcept { store_as<float>(to, canonical(acc)); }
};

struct Fp64Element : RealAcc<double> {
  static constexpr std::size_t kBytes = 8;
  static Acc load(const std::byte* from) noexcept { return load_as<double>(from); }
  static void store(std::byte* to, Acc acc) noexcept { store_as<double>(to, canonical(acc)); }
};

struct Bf16Element : RealAcc<float> {
  static constexpr std::size_t kBytes = 2;
  static Acc load(const std::byte* from) noexcept { return widen_bf16(load_as<std::uint16_t>(from)); }
  static void store(std::byte* to, Acc acc) noexcept { store_as<std::uint16_t>(to, narrow_bf16(canonical(acc))); }
};

struct Fp16Element : RealAcc<float> {
  static constexpr std::size_t kBytes = 2;
  static Acc load(const std::byte* from) noexcept { return widen<kFp16Format>(load_as<std::uint16_t>(from)); }
  static void store(std::byte* to, Acc acc) noexcept {
    store_as<std::uint16_t>(to, static_cast<std::uint16_t>(narrow<kFp16Format>(canonical(acc))));
  }
};

template <NarrowFormat kFormat>
struct Fp8Element : RealAcc<float> {
  static constexpr std::size_t kBytes = 1;
  static float load(const std::byte* from) noexcept { return widen<kFormat>(load_as<std::uint8_t>(from)); }
  static void store(std::byte* to, float acc) noexcept {
    store_as<std::uint8_t>(to, static_cast<std::uint8_t>(narrow<kFormat>(canonical(acc))));
  }
};

/// Only for PRODUCT. The textbook formula, as in c10::complex: infinities are not rescued, unlike in C's Annex G.
template <class T>
struct ComplexElement {
  struct Acc {
    T real, imag;
  };
  using Factor = T;
  static constexpr std::size_t kBytes = 2 * sizeof(T);
  static constexpr bool kFloating = true;
  static constexpr bool kDivides = false;

  static Acc load(const std::byte* from) noexcept { return {load_as<T>(from), load_as<T>(from + sizeof(T))}; }
  static void store(std::byte* to, Acc acc) noexcept {
    store_as<T>(to, canonical(acc.real));
    store_as<T>(to + sizeof(T), canonical(acc.imag));
  }

  template <Fold kFold>
  static Acc fold(Acc acc, Acc x) noexcept {
    static_assert(kFold == Fold::kMul);
    return {product(acc.real, x.real) - product(acc.imag, x.imag),
            product(acc.real, x.imag) + product(acc.imag, x.real)};
  }
  static Acc scale(Acc acc, Factor factor) noexcept { return {acc.real * factor, acc.imag * factor}; }

 private:
  static T canonical(T x) noexcept { return x != x ? static_cast<T>(__builtin_nan("")) : x; }

  /// A product that the compiler does not fuse. g++ 12 turns the textbook formula into vfmaddsub in spite of
  /// -ffp-contract=off, if the flags allow this instruction (seen with 12.2 and -mavx512f; sum_test.cpp catches it).
  static T product(T a, T b) noexcept {
#if defined(__has_builtin)
#if __has_builtin(__builtin_assoc_barrier)
    return __builtin_assoc_barrier(a * b);
#endif
#endif
    return a * b;
  }
};

}  // namespace
}  // namespace hybridps::reduce
