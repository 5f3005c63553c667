#include "hybridps/reduce/sum.h"

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstring>
#include <memory>
#include <span>
#include <vector>

#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/dispatch.h"

namespace hybridps::reduce {
namespace {

using core::DType;
using core::ReduceOp;

struct AvailableTables {
  const SumKernels* tables[3] = {&kBaselineTable};
  std::size_t count = 1;

  AvailableTables() noexcept {
#if defined(__x86_64__)
    __builtin_cpu_init();
    // F16C is checked by hand: not every compiler's __builtin_cpu_supports knows the name.
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
    const bool f16c = __get_cpuid(1, &eax, &ebx, &ecx, &edx) != 0 && (ecx & bit_F16C) != 0;
    if (f16c && __builtin_cpu_supports("avx2")) {
      tables[count++] = &kAvx2Table;
      if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
          __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq")) {
        tables[count++] = &kAvx512Table;
      }
    }
#elif defined(__aarch64__)
    tables[count++] = &kNeonTable;  // part of the architecture's baseline: no check needed
#endif
  }
};

const AvailableTables& available() noexcept {
  static const AvailableTables instance;
  return instance;
}

}  // namespace

std::span<const SumKernels* const> available_tables() noexcept { return {available().tables, available().count}; }

const char* instruction_set() noexcept { return available_tables().back()->name; }

void combine_with(const SumKernels& table, std::span<const Input> inputs, std::byte* out, std::size_t count,
                  DType dtype, ReduceOp op, Finish finish) {
  assert(core::is_reducible(dtype, op));
  assert(!inputs.empty());
  assert(finish.kind != Finish::Scaling::kMultiply || core::is_floating(dtype));
  assert(finish.kind != Finish::Scaling::kDivideTruncate || (!core::is_floating(dtype) && finish.divisor >= 1));
  if (count == 0) return;

  // One input and nothing to do: copy the bytes, so that even a NaN's payload stays. Not for bool, which is normalised.
  if (inputs.size() == 1 && finish.kind == Finish::Scaling::kNone && dtype != DType::kBool &&
      (op != ReduceOp::kPremulSum || inputs[0].premul == 1.0)) {
    if (out != inputs[0].data) std::memcpy(out, inputs[0].data, count * core::size_of(dtype));
    return;
  }

  // Complex sums, and complex numbers times a real number, equal the same operations on twice as many real numbers.
  if (op != ReduceOp::kProduct) {
    if (dtype == DType::kComplex64 || dtype == DType::kComplex128) {
      dtype = dtype == DType::kComplex64 ? DType::kFloat32 : DType::kFloat64;
      count *= 2;
    }
  }
  const Kernel kernel = table.kernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
  assert(kernel != nullptr);
  kernel(inputs.data(), inputs.size(), out, count, finish);
}

void combine(std::span<const Input> inputs, std::byte* out, std::size_t count, DType dtype, ReduceOp op,
             Finish finish) {
  const SumKernels& table = *available_tables().back();
  const auto is_plain = [](const Input& input) { return input.format == nullptr; };
  if (std::all_of(inputs.begin(), inputs.end(), is_plain)) {
    combine_with(table, inputs, out, count, dtype, op, finish);
    return;
  }
  // Part by part, so that expanded data stays in the L1 cache of 32 KiB or more. A part is whole blocks of every
  // format.
  constexpr std::size_t kPartElements = 1024;
  const std::size_t size = core::size_of(dtype);
  std::vector<Input> parts(inputs.begin(), inputs.end());
  const auto expanded =
      std::make_unique_for_overwrite<std::byte[]>(inputs.size() * std::min(kPartElements, count) * size);
  for (std::size_t first = 0; first < count; first += kPartElements) {
    const std::size_t n = std::min(kPartElements, count - first);
    std::byte* next = expanded.get();
    // Plain elements are read only after the others were expanded, part by part: too rarely for the CPU to foresee it.
    for (std::size_t at = first * size; at < (first + n) * size; at += 64) {
      for (const Input& input : inputs)
        if (is_plain(input)) __builtin_prefetch(input.data + at);
      __builtin_prefetch(out + at, 1);
    }
    for (std::size_t i = 0; i < inputs.size(); ++i, next += n * size) {
      parts[i].data = is_plain(inputs[i]) ? inputs[i].data + first * size : next;
      parts[i].format = nullptr;
      if (!is_plain(inputs[i])) inputs[i].format->expand(inputs[i].data, first, n, next);
    }
    combine_with(table, parts, out + first * size, n, dtype, op, finish);
  }
}

}  // namespace hybridps::reduce
