// hybridps/outer/state.h: the state that an owner keeps for its spans from one outer step to the next.
//
// Model    One slot per tensor of a group: only the momentum of this owner's part of the tensor. The caller numbers the
//          slots, the same on all ranks. A slot's part never changes, because outer steps have fixed shares (worker:
//          has_shares()). A slot without state counts as zeros.
// Memory   claimed from a budget, by the first step with momentum or the first load. Missing memory is an error, never
//          a step without momentum.
// Owner    a group on a rank, or on a dedicated server.   Threads  the engine's progress thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>

#include "hybridps/compress/residuals.h"
#include "hybridps/core/pinned.h"
#include "hybridps/core/status.h"
#include "hybridps/outer/step.h"

namespace hybridps::outer {

using Slot = compress::TensorKey;

class State : core::Pinned {
 public:
  explicit State(std::shared_ptr<compress::MemoryBudget> budget) noexcept : budget_(std::move(budget)) {}
  ~State() { budget_->used -= bytes_; }

  /// `values`: in, the combined contributions to elements [first, first + count) of this owner's part, which has
  /// `elements` elements; out, the result for every rank, NaN after an error. `values` has `count` fp32 numbers.
  ///   kOutOfResources  no memory
  ///   kMismatch        the slot belongs to a part of another size; no slot (0); elements outside of the part
  core::Status apply(Slot slot, std::uint64_t elements, std::uint64_t first, const Step& step, std::byte* values,
                     std::size_t count);
  std::uint64_t bytes() const noexcept { return bytes_; }

 private:
  core::Status try_apply(Slot slot, std::uint64_t elements, std::uint64_t first, const Step& step, std::byte* values,
                         std::size_t count);

  struct Free {
    void operator()(float* memory) const noexcept { std::free(memory); }
  };
  struct OwnedPart {
    std::uint64_t elements = 0;
    std::unique_ptr<float, Free> values;
  };

  const std::shared_ptr<compress::MemoryBudget> budget_;
  std::uint64_t bytes_ = 0;
  std::map<Slot, OwnedPart> parts_;
};

}  // namespace hybridps::outer
