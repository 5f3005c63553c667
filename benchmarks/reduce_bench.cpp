// reduce_bench: how fast reduce::combine() is, beside memcpy, which reads and writes memory once.
//
//   cmake --build --preset release --target benchmarks
//   build/release/benchmarks/reduce_bench [bytes per tensor ...]      default: 64 KiB, 1 MiB and 64 MiB
//
// GB/s counts every byte once that is read or written: (n + 1) tensors for n inputs, 2 for memcpy. 1 GB = 1e9
// B. Each figure is the best of several runs, one thread.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "hybridps/core/dtype.h"
#include "hybridps/reduce/dispatch.h"
#include "hybridps/reduce/sum.h"

namespace {

using hybridps::core::DType;
using hybridps::core::ReduceOp;
using hybridps::reduce::Finish;
using hybridps::reduce::Input;

/// Seconds of the fastest of 7 runs; a run repeats `work` until it lasts at least 20 ms.
template <class Work>
double best_seconds(Work work) {
  using Clock = std::chrono::steady_clock;
  double best = 1e9;
  for (int run = 0; run < 7; ++run) {
    const auto start = Clock::now();
    long repeats = 0;
    double seconds = 0;
    do {
      work();
      ++repeats;
      seconds = std::chrono::duration<double>(Clock::now() - start).count();
    } while (seconds < 0.02);
    best = std::min(best, seconds / static_cast<double>(repeats));
  }
  return best;
}

struct Case {
  DType dtype;
  ReduceOp op;
  std::size_t inputs;
  bool scaled = false;
};

void bench(std::size_t bytes) {
  constexpr std::size_t kInputsMax = 8;
  std::vector<std::vector<std::byte>> tensors(kInputsMax, std::vector<std::byte>(bytes));
  for (auto& tensor : tensors) {  // 0x38 to 0x3f: normal numbers in every floating type
    for (std::byte& b : tensor) b = static_cast<std::byte>(0x38 | (std::rand() & 7));
  }
  std::vector<std::byte> out(bytes);

  const double copy =
      2e-9 * static_cast<double>(bytes) / best_seconds([&] { std::memcpy(out.data(), tensors[0].data(), bytes); });
  std::printf("\n%zu bytes per tensor (%s)\n%-34s%9.1f GB/s\n", bytes, hybridps::reduce::instruction_set(), "memcpy",
              copy);

  const Case cases[] = {
      {DType::kFloat32, ReduceOp::kSum, 2},       {DType::kFloat32, ReduceOp::kSum, 4},
      {DType::kFloat32, ReduceOp::kSum, 8},       {DType::kFloat32, ReduceOp::kAvg, 2, true},
      {DType::kFloat32, ReduceOp::kPremulSum, 2}, {DType::kFloat32, ReduceOp::kMax, 2},
      {DType::kBfloat16, ReduceOp::kSum, 2},      {DType::kBfloat16, ReduceOp::kSum, 4},
      {DType::kBfloat16, ReduceOp::kSum, 8},      {DType::kFloat16, ReduceOp::kSum, 2},
      {DType::kFloat16, ReduceOp::kSum, 4},       {DType::kFloat64, ReduceOp::kSum, 2},
      {DType::kInt64, ReduceOp::kSum, 2},         {DType::kUint8, ReduceOp::kSum, 2},
      {DType::kFloat8E4M3fn, ReduceOp::kSum, 2},  {DType::kFloat8E5M2, ReduceOp::kSum, 2},
      {DType::kComplex64, ReduceOp::kProduct, 2},
  };
  for (const Case& c : cases) {
    std::vector<Input> inputs(c.inputs);
    for (std::size_t k = 0; k < c.inputs; ++k) inputs[k] = {tensors[k].data(), 0.5};
    Finish finish;
    if (c.scaled) finish = {Finish::Scaling::kMultiply, 0.5, 1};
    const std::size_t count = bytes / hybridps::core::size_of(c.dtype);
    std::printf("%-13s%-11s n=%zu     ", hybridps::core::name_of(c.dtype).data(), hybridps::core::name_of(c.op).data(),
                c.inputs);
    for (const auto* table : hybridps::reduce::available_tables()) {
      const double seconds = best_seconds(
          [&] { hybridps::reduce::combine_with(*table, inputs, out.data(), count, c.dtype, c.op, finish); });
      const double rate = 1e-9 * static_cast<double>((c.inputs + 1) * bytes) / seconds;
      std::printf("  %s%7.1f GB/s (%3.0f %% of memcpy)", table->name, rate, 100 * rate / copy);
    }
    std::printf("\n");
  }
}

}  // namespace

int main(int argc, char* argv[]) {
  std::vector<std::size_t> sizes;
  for (int i = 1; i < argc; ++i) sizes.push_back(std::strtoull(argv[i], nullptr, 10));
  if (sizes.empty()) sizes = {std::size_t{64} << 10, std::size_t{1} << 20, std::size_t{64} << 20};
  for (std::size_t bytes : sizes) bench(bytes);
  return 0;
}
