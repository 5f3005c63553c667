#include "hybridps/outer/state.h"

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using core::ReduceOp;
using outer::State;
using outer::Step;

std::shared_ptr<compress::MemoryBudget> budget(std::uint64_t bytes) {
  return std::make_shared<compress::MemoryBudget>(compress::MemoryBudget{bytes, 0});
}

std::vector<float> random_values(std::size_t count, unsigned seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

core::Status apply(State& state, outer::Slot slot, std::uint64_t elements, std::uint64_t first, const Step& step,
                   std::vector<float>& values) {
  return state.apply(slot, elements, first, step, reinterpret_cast<std::byte*>(values.data()), values.size());
}

}  // namespace

TEST_CASE("outer/state: steps are those of SGD with momentum and of Nesterov, whatever parts they are made in",
          "[outer][fast]") {
  constexpr std::size_t kCount = 5000;
  for (const ReduceOp op : {ReduceOp::kMomentumStep, ReduceOp::kNesterovStep}) {
    for (const float momentum : {0.0F, 0.9F}) {
      const Step step{op, 0.7F, momentum};
      State whole(budget(1 << 20));
      State parts(budget(1 << 20));
      std::vector<float> m(kCount, 0.0F);
      for (unsigned round = 0; round < 4; ++round) {
        const std::vector<float> g = random_values(kCount, round);
        std::vector<float> a = g;
        REQUIRE(apply(whole, 3, kCount, 0, step, a).is_ok());
        std::vector<float> b;
        std::size_t first = 0;
        for (const std::size_t size : {1, 1024, 999, 2976}) {
          std::vector<float> part(g.begin() + static_cast<long>(first), g.begin() + static_cast<long>(first + size));
          REQUIRE(apply(parts, 3, kCount, first, step, part).is_ok());
          b.insert(b.end(), part.begin(), part.end());
          first += size;
        }
        REQUIRE(first == kCount);
        for (std::size_t i = 0; i < kCount; ++i) {
          volatile float scaled = momentum * m[i];  // no fused multiply-add here either
          m[i] = scaled + g[i];
          volatile float ahead = momentum * m[i];
          volatile float direction = op == ReduceOp::kNesterovStep && momentum > 0 ? g[i] + ahead : m[i];
          const float want = 0.7F * direction;
          REQUIRE(a[i] == want);
          REQUIRE(b[i] == want);
        }
      }
      CHECK(whole.bytes() == (momentum == 0.0F ? 0 : kCount * sizeof(float)));
      std::vector<float> read(kCount, 5.0F);
      REQUIRE(apply(whole, 3, kCount, 0, {ReduceOp::kStateRead}, read).is_ok());
      for (std::size_t i = 0; i < kCount; ++i) REQUIRE(read[i] == (momentum == 0.0F ? 0.0F : m[i]));
    }
  }
}

TEST_CASE("outer/state: what is loaded is what is read, and what the next step begins with", "[outer][fast]") {
  State state(budget(1 << 20));
  std::vector<float> values = random_values(300, 1);
  const std::vector<float> loaded = values;
  REQUIRE(apply(state, 1, 300, 0, {ReduceOp::kStateLoad}, values).is_ok());
  REQUIRE(values == loaded);
  std::vector<float> read(100);
  REQUIRE(apply(state, 1, 300, 200, {ReduceOp::kStateRead}, read).is_ok());
  REQUIRE(read == std::vector<float>(loaded.begin() + 200, loaded.end()));
  std::vector<float> zeros(300, 0.0F);
  REQUIRE(apply(state, 1, 300, 0, {ReduceOp::kMomentumStep, 1.0F, 0.5F}, zeros).is_ok());
  for (std::size_t i = 0; i < 300; ++i) REQUIRE(zeros[i] == 0.5F * loaded[i]);
}

TEST_CASE("outer/state: without memory, a slot or the same size there is an error and NaN instead of a step",
          "[outer][fast]") {
  const auto shared = budget(1000);
  const Step step{ReduceOp::kNesterovStep, 1.0F, 0.9F};
  {
    State state(shared);
    std::vector<float> values(200, 1.0F);
    REQUIRE(apply(state, 1, 200, 0, step, values).is_ok());
    CHECK(shared->used == 800);
    std::vector<float> other(100, 1.0F);
    const core::Status refused = apply(state, 2, 100, 0, step, other);
    CHECK(refused.code() == core::Code::kOutOfResources);
    CHECK(std::string(refused.message()).find("slot 2 needs 400 bytes, and 800 of 1000 bytes are used") !=
          std::string::npos);
    for (const float v : other) CHECK(std::isnan(v));
    // What needs no memory goes on.
    other.assign(100, 1.0F);
    CHECK(apply(state, 2, 100, 0, {ReduceOp::kMomentumStep, 0.5F, 0.0F}, other).is_ok());
    CHECK(other[99] == 0.5F);
    CHECK(apply(state, 1, 100, 0, step, other).code() == core::Code::kMismatch);
    CHECK(std::isnan(other[0]));
    CHECK(apply(state, 0, 100, 0, step, other).code() == core::Code::kMismatch);
    CHECK(apply(state, 3, 50, 0, {ReduceOp::kStateRead}, other).code() == core::Code::kMismatch);
    CHECK(apply(state, 3, 120, 21, {ReduceOp::kStateRead}, other).code() == core::Code::kMismatch);
  }
  CHECK(shared->used == 0);
}
