// hybridps/outer/step.h: the outer optimizer's arithmetic, on some elements of a sum.
//
// Arith.   fp32, each operation rounded by itself (no fused multiply-add): the same bits on every machine, and those of
//          torch where its operations are written one by one.
//            m = momentum m + g       (not touched without momentum)
//            momentum step: u = rate m      Nesterov's: u = rate (g + momentum m)
//          which is torch.optim.SGD's with dampening 0; what it subtracts from the weights is u.
// Threads  any; pure.
// Source   Nesterov's form as torch has it: Sutskever et al. 2013; as an outer optimizer: DiLoCo, arXiv 2311.08105.
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
