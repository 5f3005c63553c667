// hybridps/compress/residuals.h: what encodings left out of a group's tensors, to be added to the next encodings.
//
// Model    A residual has one value per element of a tensor, whatever part of the tensor this engine encodes. A group
//          has one Residuals for its node's contributions, and one for the sums that this engine owns. Where sums have
//          levels, the first is for the sums of the region. Both are in units of the sum.
//          When shares move, the residual of a sum is added to this node's contribution. So nothing is lost, and
//          nothing is sent to the new owner.
// Memory   claimed as it is touched; in total no more than the budget. A tensor without memory has no residual.
// Owner    a group, or a group of a dedicated server.
// Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "hybridps/core/pinned.h"

namespace hybridps::compress {

/// Numbers a group's tensors, the same on all ranks; 0: a tensor of which nothing is remembered.
using TensorKey = std::uint16_t;

/// A memory limit that several Residuals may share.
struct MemoryBudget {
  std::uint64_t bytes_max = 0;
  std::uint64_t used = 0;
};

class Residuals : core::Pinned {
 public:
  explicit Residuals(std::shared_ptr<MemoryBudget> budget) noexcept : budget_(std::move(budget)) {}
  ~Residuals() { budget_->used -= bytes_; }

  /// The values of elements [first, end) of a tensor of `elements`. Null: no memory, or no key. Values kept under this
  /// key for a tensor of another size are dropped.
  float* at(TensorKey key, std::uint64_t elements, std::uint64_t first);
  void drop(TensorKey key);
  struct Range {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
  };
  /// Adds all values of the tensor to those in `to`, and sets them to zero here, except the ranges `stays` (ascending).
  void move_to(Residuals& to, TensorKey key, const std::vector<Range>& stays);

  struct Stats {
    std::uint64_t tensors = 0;
    std::uint64_t bytes = 0;
    std::uint64_t dropped = 0;  // number of tensors, since the start
    std::uint64_t refused = 0;  // number of tensors, since the start
  };
  Stats stats() const noexcept { return {kept_.size(), bytes_, dropped_, refused_count_}; }
  /// The square root of the sum of squares of all kept values.
  double norm() const noexcept;

  struct Kept {
    std::uint64_t elements = 0;
    std::vector<float> values;
  };
  Kept copy_of(TensorKey key) const;
  /// False: there is no memory for the values.
  bool restore(TensorKey key, const std::vector<float>& values);

 private:
  struct Deleter {
    void operator()(float* memory) const noexcept { std::free(memory); }
  };
  struct Residual {
    std::uint64_t elements = 0;
    std::unique_ptr<float, Deleter> values;  // null: the memory was refused
  };
  Residual& open(TensorKey key, std::uint64_t elements);

  const std::shared_ptr<MemoryBudget> budget_;
  std::uint64_t bytes_ = 0;
  std::uint64_t dropped_ = 0;
  std::uint64_t refused_count_ = 0;
  std::map<TensorKey, Residual> kept_;
};

}  // namespace hybridps::compress
