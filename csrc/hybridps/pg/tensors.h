// hybridps/pg/tensors.h: between torch's tensors and the engine's pieces of memory: checks, dtypes, packing.
//
// Threads  the calling thread, except Buffers::finish(), which runs once, on whichever thread completes the Work.
// Errors   bad arguments throw c10::Error (RuntimeError) here, in the call, before anything was submitted.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <c10/core/Storage.h>
#include <torch/csrc/distributed/c10d/Types.hpp>

#include "hybridps/core/dtype.h"
#include "hybridps/worker/operation.h"

namespace hybridps::pg {

/// Nothing for torch's types without one here (quantized, bits): they may be moved as kBytes, not reduced.
std::optional<core::DType> dtype_of(at::ScalarType type) noexcept;
/// The tensor's type, or kBytes: for operations that only move.
core::DType movable_dtype(const at::Tensor& tensor) noexcept;
/// movable_dtype() if all tensors share it, else kBytes.
core::DType movable_dtype(const std::vector<at::Tensor>& tensors) noexcept;

struct TensorReduction {
  core::DType dtype = core::DType::kBytes;
  core::ReduceOp op = core::ReduceOp::kNone;
  double premul = 1.0;
};
/// Throws, as gloo does, for pairs that are not defined. `call` is for messages: "all_reduce".
TensorReduction reduction_of(const char* call, const at::Tensor& tensor, const c10d::ReduceOp& op);

/// Throws unless the tensor is one that we carry: defined, dense, on the CPU or, in a build with CUDA, on a GPU.
void check_tensor(const char* call, const at::Tensor& tensor);
/// The same for each; the list must not be empty.
void check_tensors(const char* call, const std::vector<at::Tensor>& tensors);
/// The same, and there is one.
const at::Tensor& single_tensor(const char* call, const std::vector<at::Tensor>& tensors);
/// For calls that take several tensors of one rank: throws unless they are of one layout, type and size, and, if more than
/// one, on the CPU.
void check_alike(const char* call, const std::vector<at::Tensor>& tensors);
/// Throws unless all have the type of `like`: "invalid tensor type at index 2 ...".
void check_same_type(const char* call, const at::Tensor& like, const std::vector<at::Tensor>& tensors);
void check_same_size(const char* call, const at::Tensor& like, const std::vector<at::Tensor>& tensors);
void check_root(const char* call, std::int64_t root, int size);

inline std::uint64_t bytes_of(const at::Tensor& tensor) { return static_cast<std::uint64_t>(tensor.nbytes()); }
bool overlap(const worker::Piece& a, const worker::Piece& b) noexcept;

/// What one Work reads and writes, and what keeps it alive: the memory itself, since a tensor may get other memory meanwhile
/// (`t.data = other`, set_()). A tensor that is not one contiguous run of plain values (strided, conjugated, negated views)
/// travels through a temporary.
class Buffers {
 public:
  worker::Piece input(const at::Tensor& tensor);
  /// `reads`: the operation reads it too, so that a temporary starts with the tensor's values.
  worker::Piece output(const at::Tensor& tensor, bool reads);
  /// A temporary with the reduction of all of them; the operation's result goes to each. Tensors that are alike, on the CPU.
  worker::Piece output_of_all(const std::vector<at::Tensor>& tensors, const TensorReduction& what);
  /// `tensor` gets what `first` gets, of which the last output was made.
  void output_also(const at::Tensor& tensor, const at::Tensor& first);
  /// A copy of the input, if it overlaps one of `outputs` and is not the same memory as the one at `own` (-1: none).
  void separate(worker::Piece& input, const at::Tensor& tensor, const std::vector<worker::Piece>& outputs, int own);
  void hold(const at::Tensor& tensor) { held_.push_back(tensor.storage()); }

  /// Whether finish() has something to do before the outputs may be read.
  bool needs_finish() const noexcept { return !copies_.empty(); }
  void finish();

 private:
  std::vector<c10::Storage> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from; none is a tensor that the program knows
  bool last_is_temporary_ = false;                         // the last output: what the last copy is from
};

}  // namespace hybridps::pg
