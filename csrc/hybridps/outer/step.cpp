#include "hybridps/outer/step.h"

#include <algorithm>
#include <cstring>

namespace hybridps::outer {
namespace {

constexpr std::size_t kPart = 1024;

template <bool kNesterov>
void accumulate(float* g, float* m, std::size_t n, float rate, float momentum) noexcept {
  for (std::size_t i = 0; i < n; ++i) {
    m[i] = momentum * m[i] + g[i];
    g[i] = rate * (kNesterov ? g[i] + momentum * m[i] : m[i]);
  }
}

}  // namespace

void take_step(const Step& step, std::byte* values, float* kept, std::size_t count) noexcept {
  // Values may have any alignment. So each part is copied through an aligned buffer that stays in the cache.
  alignas(64) float part[kPart];
  for (std::size_t first = 0; first < count; first += kPart) {
    const std::size_t n = std::min(kPart, count - first);
    std::byte* const there = values + first * sizeof(float);
    std::memcpy(part, there, n * sizeof(float));
    if (step.momentum == 0.0F)
      for (std::size_t i = 0; i < n; ++i) part[i] = step.rate * part[i];
    else if (step.op == core::ReduceOp::kNesterovStep)
      accumulate<true>(part, kept + first, n, step.rate, step.momentum);
    else
      accumulate<false>(part, kept + first, n, step.rate, step.momentum);
    std::memcpy(there, part, n * sizeof(float));
  }
}

}  // namespace hybridps::outer
