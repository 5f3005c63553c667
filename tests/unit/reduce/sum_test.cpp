// Every dtype and operation, on every table that this machine can run, against the reference.
#include "hybridps/reduce/sum.h"

#include <cstddef>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "hybridps/reduce/dispatch.h"
#include "tests/support/catch.h"
#include "tests/unit/reduce/reference.h"

namespace hybridps::reduce {
namespace {

using core::DType;
using core::ReduceOp;
using testing::Data;

constexpr std::size_t kInputCounts[] = {1, 2, 3, 5, 8, 17};

template <class Body>
void for_each_pair(Body body) {
  for (const DType dtype : testing::kAllDTypes) {
    for (const ReduceOp op : testing::kAllOps) {
      if (core::is_reducible(dtype, op)) body(dtype, op);
    }
  }
}

/// Copies of each input, `skew` bytes (plus its index) off any alignment, and Inputs that point at them.
struct Skewed {
  Skewed(const std::vector<std::vector<std::byte>>& tensors, const std::vector<Input>& like, std::size_t skew) {
    for (std::size_t k = 0; k < tensors.size(); ++k) {
      const std::size_t offset = skew + k;
      buffers.emplace_back(offset + tensors[k].size());
      if (!tensors[k].empty()) std::memcpy(buffers[k].data() + offset, tensors[k].data(), tensors[k].size());
      inputs.push_back({buffers[k].data() + offset, like[k].premul});
    }
  }
  std::vector<std::vector<std::byte>> buffers;
  std::vector<Input> inputs;
};

struct Problem {
  Problem(std::mt19937_64& random, DType dtype, std::size_t n, std::size_t count, Data data) {
    for (std::size_t k = 0; k < n; ++k) {
      tensors.push_back(testing::random_elements(random, dtype, count, data));
    }
    for (std::size_t k = 0; k < n; ++k) {
      inputs.push_back({tensors[k].data(), 0.25 + 0.3 * static_cast<double>(k % 4)});
    }
  }
  std::vector<std::vector<std::byte>> tensors;
  std::vector<Input> inputs;
};

std::vector<Finish> finishes_of(DType dtype) {
  if (core::is_floating(dtype)) return {{}, {Finish::Scaling::kMultiply, 1.0 / 3, 1}};
  if (dtype == DType::kBool) return {{}};
  return {{}, {Finish::Scaling::kDivideTruncate, 1.0, 3}};
}

}  // namespace

TEST_CASE("reduce/sum: every dtype and operation matches the reference at every length and alignment",
          "[reduce][fast]") {
  constexpr std::size_t kLengthMax = 130;
  constexpr std::byte kGuard{0xa5};
  std::mt19937_64 random(1);
  for_each_pair([&](DType dtype, ReduceOp op) {
    const std::size_t bytes = core::size_of(dtype);
    for (const std::size_t n : kInputCounts) {
      for (const Finish& finish : finishes_of(dtype)) {
        const Problem problem(random, dtype, n, kLengthMax, n % 2 ? Data::kOrdinary : Data::kAnyBits);
        std::vector<std::byte> want(kLengthMax * bytes);
        testing::reference_combine(problem.inputs, want.data(), kLengthMax, dtype, op, finish);
        for (const SumKernels* table : available_tables()) {
          for (std::size_t length = 0; length <= kLengthMax; ++length) {
            const std::size_t skew = length % 9;
            const Skewed skewed(problem.tensors, problem.inputs, skew);
            std::vector<std::byte> out(skew + (kLengthMax + 1) * bytes, kGuard);
            combine_with(*table, skewed.inputs, out.data() + skew, length, dtype, op, finish);
            const std::string wrong = testing::difference(dtype, out.data() + skew, want.data(), length);
            bool guarded = true;
            for (std::size_t at = 0; at < out.size(); ++at) {
              if (at < skew || at >= skew + length * bytes) guarded = guarded && out[at] == kGuard;
            }
            if (!wrong.empty() || !guarded) {
              INFO(table->name << " " << testing::describe(dtype, op, n) << " length " << length);
              CHECK(guarded);
              REQUIRE(wrong == "");
            }
          }
        }
      }
    }
    SUCCEED();
  });
}

TEST_CASE("reduce/sum: every table gives the same bits on long random data", "[reduce][fast]") {
  // Longer than one block of the block loop for every type, and no multiple of anything.
  constexpr std::size_t kCount = 9001;
  std::mt19937_64 random(2);
  for_each_pair([&](DType dtype, ReduceOp op) {
    for (const Data data : {Data::kOrdinary, Data::kAnyBits}) {
      for (const std::size_t n : {std::size_t{2}, std::size_t{5}}) {
        for (const Finish& finish : finishes_of(dtype)) {
          const Problem problem(random, dtype, n, kCount, data);
          std::vector<std::byte> want(kCount * core::size_of(dtype));
          combine_with(kBaselineTable, problem.inputs, want.data(), kCount, dtype, op, finish);
          for (const SumKernels* table : available_tables()) {
            std::vector<std::byte> out(want.size());
            combine_with(*table, problem.inputs, out.data(), kCount, dtype, op, finish);
            INFO(table->name << " " << testing::describe(dtype, op, n));
            REQUIRE(testing::difference(dtype, out.data(), want.data(), kCount) == "");
          }
        }
      }
    }
  });
}

TEST_CASE("reduce/sum: long data matches the reference", "[reduce][fast]") {
  constexpr std::size_t kCount = 5003;
  std::mt19937_64 random(3);
  for_each_pair([&](DType dtype, ReduceOp op) {
    const Problem problem(random, dtype, 3, kCount, Data::kAnyBits);
    std::vector<std::byte> want(kCount * core::size_of(dtype)), out(want.size());
    testing::reference_combine(problem.inputs, want.data(), kCount, dtype, op);
    combine(problem.inputs, out.data(), kCount, dtype, op);
    INFO(testing::describe(dtype, op, 3));
    REQUIRE(testing::difference(dtype, out.data(), want.data(), kCount) == "");
  });
}

TEST_CASE("reduce/sum: the output may be any one of the inputs", "[reduce][fast]") {
  constexpr std::size_t kCount = 4099;
  std::mt19937_64 random(4);
  for_each_pair([&](DType dtype, ReduceOp op) {
    for (const std::size_t n : {std::size_t{1}, std::size_t{2}, std::size_t{3}, std::size_t{6}}) {
      const Problem problem(random, dtype, n, kCount, Data::kOrdinary);
      std::vector<std::byte> want(kCount * core::size_of(dtype));
      testing::reference_combine(problem.inputs, want.data(), kCount, dtype, op);
      for (const SumKernels* table : available_tables()) {
        for (std::size_t alias = 0; alias < n; ++alias) {
          std::vector<std::byte> out = problem.tensors[alias];
          std::vector<Input> inputs = problem.inputs;
          inputs[alias].data = out.data();
          combine_with(*table, inputs, out.data(), kCount, dtype, op, {});
          INFO(table->name << " " << testing::describe(dtype, op, n) << " alias " << alias);
          REQUIRE(testing::difference(dtype, out.data(), want.data(), kCount) == "");
        }
      }
    }
  });
}

TEST_CASE("reduce/sum: an input may appear twice", "[reduce][fast]") {
  const std::vector<float> x = {1.5f, -2.0f, 3.0f};
  const auto* data = reinterpret_cast<const std::byte*>(x.data());
  std::vector<float> out(3);
  combine(std::vector<Input>{{data, 1.0}, {data, 1.0}}, reinterpret_cast<std::byte*>(out.data()), 3, DType::kFloat32,
          ReduceOp::kSum);
  REQUIRE(out == std::vector<float>{3.0f, -4.0f, 6.0f});
}

TEST_CASE("reduce/sum: a kernel exists for every reducible pair in every table", "[reduce][fast]") {
  for_each_pair([&](DType dtype, ReduceOp op) {
    const bool complex_sum = (dtype == DType::kComplex64 || dtype == DType::kComplex128) && op != ReduceOp::kProduct;
    for (const SumKernels* table : available_tables()) {
      INFO(table->name << " " << testing::describe(dtype, op, 1));
      const Kernel kernel = table->kernels[static_cast<std::size_t>(dtype)][static_cast<std::size_t>(op)];
      CHECK((kernel != nullptr) == !complex_sum);
    }
  });
}

TEST_CASE("reduce/sum: the instruction set is the last available table", "[reduce][fast]") {
  REQUIRE(available_tables().front() == &kBaselineTable);
  REQUIRE(std::string(instruction_set()) == available_tables().back()->name);
}

}  // namespace hybridps::reduce
