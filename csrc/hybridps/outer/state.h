// hybridps/outer/state.h: what an owner keeps of the spans that it owns from one outer step to the next.
//
// Model    One slot per tensor of a group: the momentum of this owner's part of it, and of nothing else. Slots are numbered
//          by the caller, the same on all ranks; a slot's part never changes, as owners' operations have fixed shares
//          (worker: has_shares()). A slot without state counts as zeros.
// Memory   claimed with the first step that has momentum or the first load, from a budget; what there is no memory for is an
//          error, never a step without momentum.
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

  /// All contributions to elements [first, first + count) of this owner's part, which has `elements`, are added up in
  /// `values`; what every rank gets is left there: NaN where there is an error.
  ///   kOutOfResources  no memory     kMismatch  the slot is of a part of another size; no slot
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
