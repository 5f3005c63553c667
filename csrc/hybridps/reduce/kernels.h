// hybridps/reduce/kernels.h: the loops, and the kernel table made of them. Included by one file per instruction set.
//
// Two loops do everything:
//   block   any element type. Each block of inputs is folded into an accumulator array that stays in L1; the
//           compiler vectorises the inner loops with whatever the file's flags allow.
//   lanes   the hot types. Accumulators stay in registers; lanes_*.h supplies the vector operations.
// Both loops read each input once and write the output once. An output element is written after every input of that
// position has been read. So `out` may be one of the inputs.
#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/elements.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::reduce {
namespace {  // NOLINT(google-build-namespaces): compiled once per instruction set, see convert.h

/// LanesOf<Element>::Type is the vector counterpart of an element, or void if there is none. The Type has Reg, kWidth
/// (elements per register), load, store (finished and rounded), fold<Fold>, kFolds<Fold> (whether fold<Fold> exists),
/// and for floating types Factor, splat, scale.
template <class Element>
struct NoLanes {
  using Type = void;
};

/// The folds that lanes support. Other folds are rare and left to the block loop.
template <Fold kFold>
inline constexpr bool kIsRealFold = kFold == Fold::kAdd || kFold == Fold::kPremulAdd || kFold == Fold::kMul ||
                                    kFold == Fold::kMin || kFold == Fold::kMax;
template <Fold kFold>
inline constexpr bool kIsIntFold = kFold == Fold::kAdd || kFold == Fold::kMin || kFold == Fold::kMax;

template <class Element>
inline constexpr std::size_t kBlockElements = 4096 / sizeof(typename Element::Acc);

/// Combines the elements [begin, count).
template <class E, Fold kFold>
void block_loop(const Input* inputs, std::size_t n, std::byte* out, std::size_t begin, std::size_t count,
                const Finish& finish) {
  typename E::Acc acc[kBlockElements<E>];
  for (std::size_t start = begin; start < count; start += kBlockElements<E>) {
    const std::size_t left = count - start;
    const std::size_t m = left < kBlockElements<E> ? left : kBlockElements<E>;
    const std::byte* x0 = inputs[0].data + start * E::kBytes;
    std::size_t k = 1;
    if constexpr (kFold == Fold::kPremulAdd) {
      const auto factor = static_cast<typename E::Factor>(inputs[0].premul);
      for (std::size_t j = 0; j < m; ++j) acc[j] = E::scale(E::load(x0 + j * E::kBytes), factor);
    } else if (n > 1) {
      const std::byte* x1 = inputs[1].data + start * E::kBytes;
      for (std::size_t j = 0; j < m; ++j) {
        acc[j] = E::template fold<kFold>(E::load(x0 + j * E::kBytes), E::load(x1 + j * E::kBytes));
      }
      k = 2;
    } else {
      for (std::size_t j = 0; j < m; ++j) acc[j] = E::load(x0 + j * E::kBytes);
    }
    for (; k < n; ++k) {
      const std::byte* x = inputs[k].data + start * E::kBytes;
      if constexpr (kFold == Fold::kPremulAdd) {
        const auto factor = static_cast<typename E::Factor>(inputs[k].premul);
        for (std::size_t j = 0; j < m; ++j) {
          acc[j] = E::template fold<Fold::kAdd>(acc[j], E::scale(E::load(x + j * E::kBytes), factor));
        }
      } else {
        for (std::size_t j = 0; j < m; ++j) acc[j] = E::template fold<kFold>(acc[j], E::load(x + j * E::kBytes));
      }
    }
    if constexpr (E::kFloating) {
      if (finish.kind == Finish::Scaling::kMultiply) {
        const auto factor = static_cast<typename E::Factor>(finish.factor);
        for (std::size_t j = 0; j < m; ++j) acc[j] = E::scale(acc[j], factor);
      }
    } else if constexpr (E::kDivides) {
      if (finish.kind == Finish::Scaling::kDivideTruncate) {
        for (std::size_t j = 0; j < m; ++j) acc[j] = E::divide(acc[j], finish.divisor);
      }
    }
    std::byte* y = out + start * E::kBytes;
    for (std::size_t j = 0; j < m; ++j) E::store(y + j * E::kBytes, acc[j]);
  }
}

/// Combines steps of kRegisters registers, from element `begin` on, as many as fit below `count`. Returns the end of
/// the last step.
template <class L, Fold kFold, bool kScaled, std::size_t kRegisters>
std::size_t lanes_steps(const Input* inputs, std::size_t n, std::byte* out, std::size_t begin, std::size_t count,
                        const Finish& finish) {
  constexpr std::size_t kStep = kRegisters * L::kWidth;
  using Reg = typename L::Reg;
  std::size_t i = begin;
  for (; count - i >= kStep; i += kStep) {
    Reg acc[kRegisters];
    const std::byte* x = inputs[0].data + i * L::kBytes;
    for (std::size_t r = 0; r < kRegisters; ++r) acc[r] = L::load(x + r * L::kWidth * L::kBytes);
    if constexpr (kFold == Fold::kPremulAdd) {
      const Reg factor = L::splat(static_cast<typename L::Factor>(inputs[0].premul));
      for (std::size_t r = 0; r < kRegisters; ++r) acc[r] = L::scale(acc[r], factor);
    }
    for (std::size_t k = 1; k < n; ++k) {
      x = inputs[k].data + i * L::kBytes;
      if constexpr (kFold == Fold::kPremulAdd) {
        const Reg factor = L::splat(static_cast<typename L::Factor>(inputs[k].premul));
        for (std::size_t r = 0; r < kRegisters; ++r) {
          acc[r] = L::template fold<Fold::kAdd>(acc[r], L::scale(L::load(x + r * L::kWidth * L::kBytes), factor));
        }
      } else {
        for (std::size_t r = 0; r < kRegisters; ++r) {
          acc[r] = L::template fold<kFold>(acc[r], L::load(x + r * L::kWidth * L::kBytes));
        }
      }
    }
    if constexpr (kScaled) {
      const Reg factor = L::splat(static_cast<typename L::Factor>(finish.factor));
      for (std::size_t r = 0; r < kRegisters; ++r) acc[r] = L::scale(acc[r], factor);
    }
    for (std::size_t r = 0; r < kRegisters; ++r) L::store(out + (i + r * L::kWidth) * L::kBytes, acc[r]);
  }
  return i;
}

template <class E, Fold kFold>
void block_kernel(const Input* inputs, std::size_t n, std::byte* out, std::size_t count, const Finish& finish) {
  block_loop<E, kFold>(inputs, n, out, 0, count, finish);
}

template <class E, class L, Fold kFold>
void lanes_kernel(const Input* inputs, std::size_t n, std::byte* out, std::size_t count, const Finish& finish) {
  constexpr std::size_t kRegisters = 4;  // enough independent additions to hide their latency
  std::size_t done = 0;
  if constexpr (E::kFloating) {
    if (finish.kind == Finish::Scaling::kMultiply) {
      done = lanes_steps<L, kFold, true, kRegisters>(inputs, n, out, done, count, finish);
      done = lanes_steps<L, kFold, true, 1>(inputs, n, out, done, count, finish);
    } else {
      done = lanes_steps<L, kFold, false, kRegisters>(inputs, n, out, done, count, finish);
      done = lanes_steps<L, kFold, false, 1>(inputs, n, out, done, count, finish);
    }
  } else if (finish.kind == Finish::Scaling::kNone) {  // no vector instruction divides integers
    done = lanes_steps<L, kFold, false, kRegisters>(inputs, n, out, done, count, finish);
    done = lanes_steps<L, kFold, false, 1>(inputs, n, out, done, count, finish);
  }
  block_loop<E, kFold>(inputs, n, out, done, count, finish);
}

template <class E, class L, Fold kFold>
constexpr Kernel kernel_of() {
  if constexpr (std::is_void_v<L>) {
    return &block_kernel<E, kFold>;
  } else if constexpr (L::template kFolds<kFold>) {
    return &lanes_kernel<E, L, kFold>;
  } else {
    return &block_kernel<E, kFold>;
  }
}

constexpr Kernel& slot(SumKernels& table, core::DType dtype, core::ReduceOp op) {
  return table.kernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
}

/// Makes every kernel with this file's compile flags, in registers where LanesOf has a Type. Evaluated at compile time,
/// so that no code of a newer instruction set runs before the choice.
template <template <class Element> class LanesOf>
struct TableMaker {
  SumKernels table;

  template <class E, Fold kFold>
  constexpr void add(core::DType dtype, core::ReduceOp op) {
    slot(table, dtype, op) = kernel_of<E, typename LanesOf<E>::Type, kFold>();
  }

  template <class E>
  constexpr void add_ordered(core::DType dtype) {
    add<E, Fold::kAdd>(dtype, core::ReduceOp::kSum);
    add<E, Fold::kAdd>(dtype, core::ReduceOp::kAvg);
    add<E, Fold::kMul>(dtype, core::ReduceOp::kProduct);
    add<E, Fold::kMin>(dtype, core::ReduceOp::kMin);
    add<E, Fold::kMax>(dtype, core::ReduceOp::kMax);
  }

  template <class E>
  constexpr void add_integer(core::DType dtype) {
    add_ordered<E>(dtype);
    add<E, Fold::kAnd>(dtype, core::ReduceOp::kBand);
    add<E, Fold::kOr>(dtype, core::ReduceOp::kBor);
    add<E, Fold::kXor>(dtype, core::ReduceOp::kBxor);
  }

  template <class E>
  constexpr void add_floating(core::DType dtype) {
    add_ordered<E>(dtype);
    add<E, Fold::kPremulAdd>(dtype, core::ReduceOp::kPremulSum);
  }

  constexpr explicit TableMaker(const char* name) {
    using core::DType;
    table.name = name;
    add_integer<IntElement<std::uint8_t>>(DType::kUint8);
    add_integer<IntElement<std::int8_t>>(DType::kInt8);
    add_integer<IntElement<std::uint16_t>>(DType::kUint16);
    add_integer<IntElement<std::int16_t>>(DType::kInt16);
    add_integer<IntElement<std::uint32_t>>(DType::kUint32);
    add_integer<IntElement<std::int32_t>>(DType::kInt32);
    add_integer<IntElement<std::uint64_t>>(DType::kUint64);
    add_integer<IntElement<std::int64_t>>(DType::kInt64);
    add_integer<BoolElement>(DType::kBool);
    add_floating<Fp16Element>(DType::kFloat16);
    add_floating<Bf16Element>(DType::kBfloat16);
    add_floating<Fp32Element>(DType::kFloat32);
    add_floating<Fp64Element>(DType::kFloat64);
    add_floating<Fp8Element<kE4M3fnFormat>>(DType::kFloat8E4M3fn);
    add_floating<Fp8Element<kE5M2Format>>(DType::kFloat8E5M2);
    add_floating<Fp8Element<kE4M3fnuzFormat>>(DType::kFloat8E4M3fnuz);
    add_floating<Fp8Element<kE5M2fnuzFormat>>(DType::kFloat8E5M2fnuz);
    add<ComplexElement<float>, Fold::kMul>(DType::kComplex64, core::ReduceOp::kProduct);
    add<ComplexElement<double>, Fold::kMul>(DType::kComplex128, core::ReduceOp::kProduct);
  }
};

template <template <class Element> class LanesOf>
constexpr SumKernels make_table(const char* name) {
  return TableMaker<LanesOf>(name).table;
}

}  // namespace
}  // namespace hybridps::reduce
