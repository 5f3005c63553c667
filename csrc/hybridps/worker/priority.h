// hybridps/worker/priority.h: the text in which a caller says which of a group's operations go first.
//
//   priority := class | NUMBER | NUMBER ",all_gather=" NUMBER         -128 to 127, default 0; higher numbers go first
//   class    := "tensor" (3) | "pipeline" (3) | "sharded" (1,all_gather=2) | "data" (0)
//
// A class belongs to a dimension of a device mesh:
//   - tensor and pipeline parallelism go first: a forward or backward pass waits for the data at once
//   - FSDP's all_gather goes next: the data is fetched ahead
//   - the rest goes last: only the optimizer waits for the data
//
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

/// Empty text: all 0. kInvalidArgument: contains the text and the allowed forms.
core::Result<Priorities> parse_priorities(std::string_view text);
/// A text that parse_priorities() turns into `priorities`; empty if all are 0.
std::string text_of(const Priorities& priorities);

}  // namespace hybridps::worker
