// hybridps/worker/priority.h: which of a group's operations go first, as its caller writes it.
//
//   priority := class | NUMBER | NUMBER ",all_gather=" NUMBER         numbers from -128 to 127, default 0: higher goes first
//   class    := "tensor" (3) | "pipeline" (3) | "sharded" (1,all_gather=2) | "data" (0)
//
// Classes are of the dimensions of a device mesh: what a forward or backward waits for at once (tensor and pipeline
// parallelism), before what is fetched ahead (FSDP's all_gather), before what only the optimizer waits for.
// Threads  pure functions.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "hybridps/core/status.h"
#include "hybridps/schedule/plan.h"

namespace hybridps::worker {

struct Priorities {
  std::int8_t any = 0;
  std::int8_t all_gather = 0;

  std::int8_t of(schedule::Kind kind) const noexcept { return kind == schedule::Kind::kAllGather ? all_gather : any; }
  bool operator==(const Priorities&) const = default;
};

/// Empty: all 0. kInvalidArgument says what was written and what may be.
core::Result<Priorities> parse_priorities(std::string_view text);
/// The shortest that gives the same; of all 0 it is empty.
std::string text_of(const Priorities& priorities);

}  // namespace hybridps::worker
