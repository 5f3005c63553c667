// hybridps/pg/call.h: one call of c10d: the operations that it becomes, and what its Work needs.
//
// Owner    the call's own function, until issue() has it. The Work takes the memory and what is left to do.
#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "hybridps/pg/tensors.h"
#include "hybridps/worker/operation.h"

namespace hybridps::pg {

struct Call {
  c10d::OpType type = c10d::OpType::UNKNOWN;
  const char* name = "";                        // in messages and in torch's record_param_comms: "all_reduce"
  const char* title = nullptr;                  // in torch's profiler: "hybridps:all_reduce"; null: it is off
  std::chrono::milliseconds timeout{-1};        // negative: the group's
  bool asynchronous = true;                     // false: the caller waits at once, and wait() drives the engine
  std::vector<worker::Operation> operations{};  // the Work completes when all operations have
  std::vector<at::Tensor> inputs{};             // for the profiler
  std::vector<at::Tensor> outputs{};            // Work::result(), the future's value
  Buffers buffers{};
  std::function<void()> finish{};       // runs before the Work counts as complete; not on the engine's thread
  std::vector<int64_t> input_splits{};  // for the profiler
  std::vector<int64_t> output_splits{};

  /// Fills in the fields that every call of c10d has.
  template <typename C10dOptions>
  Call&& of(c10d::OpType what, const char* called, const char* profiled, const C10dOptions& options,
            std::vector<at::Tensor> in, std::vector<at::Tensor> out) && {
    type = what;
    name = called;
    title = profiled;
    timeout = options.timeout;
    asynchronous = options.asyncOp;
    inputs = std::move(in);
    outputs = std::move(out);
    return std::move(*this);
  }
  /// Of the Work that stands for several.
  static Call of_coalesced() {
    return {.type = c10d::OpType::COALESCED, .name = "coalesced", .timeout = std::chrono::milliseconds(0)};
  }
  /// The inputs as the profiler gets them.
  std::optional<std::vector<at::Tensor>> profiled_inputs() const {
    return title == nullptr ? std::nullopt : std::optional(inputs);
  }
};

}  // namespace hybridps::pg
