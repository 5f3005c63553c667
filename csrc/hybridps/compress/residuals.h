// hybridps/compress/residuals.h: what encodings left out of a group's tensors, to be added to the next.
//
// Model    One value per element of a tensor, whatever part of it this engine encodes. A group has one of these for its node's
//          contributions and one for the sums that it owns. Both are in units of the sum, so when shares move, what was left out of
//          a sum is added to what this node contributes: nothing is lost, and nothing is handed over.
// Memory   claimed as it is touched; no more than the budget in all. A tensor for which there is none goes without.
// Owner    a group, or a dedicated server's.   Threads  the engine's progress thread.
#pragma once

#include <cstdint>
#include <cstdlib>
#include <map>
#include <memory>
#include <utility>
#include <vector>

#include "hybridps/core/pinned.h"

namespace hybridps::compress {

/// Numbers a group's tensors, the same on all ranks; 0: a tensor that nothing is remembered of.
using TensorKey = std::uint16_t;

/// Memory that several may share.
struct MemoryBudget {
  std::uint64_t bytes_max = 0;
  std::uint64_t used = 0;
};

class Residuals : core::Pinned {
 public:
  explicit Residuals(std::shared_ptr<MemoryBudget> budget) noexcept : budget_(std::move(budget)) {}
  ~Residuals() { budget_->used -= bytes_; }

  /// Of elements [first, first + count) of a tensor of `elements`; null: there is no memory, or no key. What was kept under
  /// this key for a tensor of another size is dropped.
  float* at(TensorKey key, std::uint64_t elements, std::uint64_t first);
  void drop(TensorKey key);
  struct Range {
    std::uint64_t first = 0;
    std::uint64_t end = 0;
  };
  /// All of the tensor but `stays`, in ascending order, is added to what `to` has of it, and is zero here.
  void move_to(Residuals& to, TensorKey key, const std::vector<Range>& stays);

  struct Stats {
    std::uint64_t tensors = 0;
    std::uint64_t bytes = 0;
    std::uint64_t dropped = 0;  // tensors, since the beginning
    std::uint64_t refused = 0;  // likewise
  };
  Stats stats() const noexcept { return {kept_.size(), bytes_, dropped_, refused_count_}; }
  /// sqrt of the sum of squares of all that is kept.
  double norm() const noexcept;

  struct Kept {
    std::uint64_t elements = 0;
    std::vector<float> values;
  };
  Kept copy_of(TensorKey key) const;
  /// False: there is no memory.
  bool restore(TensorKey key, const std::vector<float>& values);

 private:
  struct Deleter {
    void operator()(float* memory) const noexcept { std::free(memory); }
  };
  struct Residual {
    std::uint64_t elements = 0;
    std::unique_ptr<float, Deleter> values;  // null: refused
  };
  Residual& open(TensorKey key, std::uint64_t elements);

  const std::shared_ptr<MemoryBudget> budget_;
  std::uint64_t bytes_ = 0;
  std::uint64_t dropped_ = 0;
  std::uint64_t refused_count_ = 0;
  std::map<TensorKey, Residual> kept_;
};

}  // namespace hybridps::compress
