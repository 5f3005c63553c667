// hybridps/outer/step.h: the outer optimizer's arithmetic, on some elements of a sum.
//
// Arith.   fp32. Each operation is rounded separately (no fused multiply-add). So the bits are the same on every
//          machine, and the same as in torch, if the torch code does these operations one by one.
//            m = momentum m + g       (not touched without momentum)
//            momentum step: u = rate m      Nesterov's: u = rate (g + momentum m)
//          This is torch.optim.SGD with dampening 0: SGD subtracts u from the weights.
// Threads  any thread; pure functions.
// Source   Nesterov's form as in torch: Sutskever et al. 2013; use as an outer optimizer: DiLoCo, arXiv 2311.08105.
#pragma once

#include <cstddef>

#include "hybridps/core/dtype.h"

namespace hybridps::outer {

struct Step {
  core::ReduceOp op = core::ReduceOp::kNesterovStep;
  float rate = 1.0F;
  float momentum = 0.0F;
};

/// `values`: g in, u out, of any alignment. `kept`: m; may be null where there is no momentum.
void take_step(const Step& step, std::byte* values, float* kept, std::size_t count) noexcept;

}  // namespace hybridps::outer
