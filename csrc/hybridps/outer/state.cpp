#include "hybridps/outer/state.h"

#include <cstring>
#include <string>

namespace hybridps::outer {

using core::Code;
using core::ReduceOp;
using core::Status;

Status State::apply(Slot slot, std::uint64_t elements, std::uint64_t first, const Step& step, std::byte* values,
                    std::size_t count) {
  Status status = try_apply(slot, elements, first, step, values, count);
  // The result may leave before the verdict about the error does: no rank may take the result for a step.
  if (!status.is_ok()) std::memset(values, 0xff, count * sizeof(float));
  return status;
}

Status State::try_apply(Slot slot, std::uint64_t elements, std::uint64_t first, const Step& step, std::byte* values,
                        std::size_t count) {
  if (slot == 0 || first > elements || count > elements - first)
    return Status(Code::kMismatch, "a " + std::string(core::name_of(step.op)) + " of elements that no slot has");
  const auto found = parts_.find(slot);
  if (found != parts_.end() && found->second.elements != elements)
    return Status(Code::kMismatch, "a " + std::string(core::name_of(step.op)) + " of slot " + std::to_string(slot) +
                                       ", of which this owner has " + std::to_string(found->second.elements) +
                                       " elements, and is now to have " + std::to_string(elements));
  const bool steps = step.op == ReduceOp::kMomentumStep || step.op == ReduceOp::kNesterovStep;
  const bool reads = step.op == ReduceOp::kStateRead;
  float* kept = found != parts_.end() ? found->second.values.get() : nullptr;
  if (kept == nullptr && !reads && (!steps || step.momentum != 0.0F)) {
    const std::uint64_t bytes = elements * sizeof(float);
    OwnedPart part{elements, {}};
    if (bytes <= budget_->bytes_max - budget_->used)
      part.values.reset(static_cast<float*>(std::calloc(elements, sizeof(float))));
    if (!part.values)
      return Status(Code::kOutOfResources,
                    "no memory for the outer optimizer's momentum: slot " + std::to_string(slot) + " needs " +
                        std::to_string(bytes) + " bytes, and " + std::to_string(budget_->used) + " of " +
                        std::to_string(budget_->bytes_max) +
                        " bytes are used. What to do: start the dedicated servers with more --memory (a quarter of it "
                        "counts), or start more servers, or use none");
    kept = part.values.get();
    bytes_ += bytes;
    budget_->used += bytes;
    parts_.emplace(slot, std::move(part));
  }
  const std::size_t bytes = count * sizeof(float);
  if (steps)
    take_step(step, values, kept == nullptr ? nullptr : kept + first, count);
  else if (!reads)
    std::memcpy(kept + first, values, bytes);
  else if (kept != nullptr)
    std::memcpy(values, kept + first, bytes);
  else
    std::memset(values, 0, bytes);
  return Status::ok();
}

}  // namespace hybridps::outer
