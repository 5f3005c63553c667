// hybridps/pg/compression.h: which of a group's operations are compressed, and which tensor is which from step to step.
//
// Model    Gradients are told by where they are reduced: inside autograd's engine, where DDP and FSDP start their sums. A step
//          is a backward pass that reduces something. What is remembered of a tensor goes by its place in the step, size, type
//          and address; of a tensor that moves with every step, by the others alone. Outside of steps nothing is remembered.
// Ranks    take the same decisions, as they issue the same operations in the same order.
// Threads  under the group's issue mutex.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "hybridps/compress/codec.h"
#include "hybridps/core/pinned.h"
#include "hybridps/worker/operation.h"

namespace hybridps::pg {

class Compression : core::Pinned {
 public:
  /// `codecs`: null: nothing is compressed. `bytes_min`: of an operation.
  Compression(std::shared_ptr<const compress::Codecs> codecs, std::uint64_t bytes_min)
      : codecs_(std::move(codecs)), bytes_min_(bytes_min) {}

  /// Fills in coding, tensor and forgotten. `graph_task`: autograd's on this thread; negative: none.
  void choose(worker::Operation& operation, int graph_task);

  /// A tensor by what stays the same in another process.
  struct Place {
    std::uint32_t ordinal = 0;  // in its step
    std::uint64_t bytes = 0;
    core::DType dtype = core::DType::kBytes;
    bool operator==(const Place&) const = default;
  };
  struct Saved {
    Place place;
    std::vector<float> residual;  // per element; empty: none
    std::vector<float> owed;
    std::vector<float> momentum;
  };
  /// Tensors of which something may be remembered, and their keys.
  std::vector<std::pair<Place, compress::TensorKey>> tensors() const;
  /// What each has when it is first reduced, instead of zeros. What is loaded and never asked for stays in `unclaimed()`.
  void load(std::vector<Saved> saved) { loaded_ = std::move(saved); }
  std::size_t unclaimed() const noexcept { return loaded_.size(); }
  const compress::Codecs* codecs() const noexcept { return codecs_.get(); }
  /// Steps that have reduced something, for the first steps' codec.
  std::uint64_t steps() const noexcept { return step_; }
  void set_steps(std::uint64_t steps) noexcept { step_ = steps; }

 private:
  struct Tensor {
    Place place;
    const void* address = nullptr;
    bool stays = false;  // it was here before
    std::uint64_t step = 0;
    compress::TensorKey key = 0;
  };
  compress::TensorKey key_of(const Tensor& tensor, worker::Operation& operation);
  void forget_unused();

  const std::shared_ptr<const compress::Codecs> codecs_;
  const std::uint64_t bytes_min_;
  int task_ = -1;
  std::uint64_t step_ = 0;
  std::uint32_t ordinal_ = 0;
  std::vector<Tensor> tensors_;
  std::vector<compress::TensorKey> free_keys_;
  std::vector<compress::TensorKey> forgotten_;  // to be said with the next operation
  compress::TensorKey keys_ = 0;
  std::vector<Saved> loaded_;
};

}  // namespace hybridps::pg
