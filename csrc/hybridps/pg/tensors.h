// hybridps/pg/tensors.h: from torch's tensors to the engine's pieces of memory: checks, dtypes, packing.
//
// Threads  the calling thread. Exception: Buffers::finish() runs once, on the thread that completes the Work.
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

/// Empty for torch's types that have no DType (quantized, bits). Such tensors may be moved as kBytes, not reduced.
std::optional<core::DType> dtype_of(at::ScalarType type) noexcept;
/// The tensor's DType, or kBytes if it has none. For operations that only move data.
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

/// Throws unless the tensor can be carried: defined, dense, on the CPU or on a device that has an Accelerator.
void check_tensor(const char* call, const at::Tensor& tensor);
/// The same for each tensor; the list must not be empty.
void check_tensors(const char* call, const std::vector<at::Tensor>& tensors);
/// The same for a list of exactly one tensor, which is returned.
const at::Tensor& single_tensor(const char* call, const std::vector<at::Tensor>& tensors);
/// For several tensors of one rank: throws unless they have one layout, type and size and, if several, are on the CPU.
void check_alike(const char* call, const std::vector<at::Tensor>& tensors);
/// Throws unless all tensors have the type of `like`: "invalid tensor type at index 2 ...".
void check_same_type(const char* call, const at::Tensor& like, const std::vector<at::Tensor>& tensors);
void check_same_size(const char* call, const at::Tensor& like, const std::vector<at::Tensor>& tensors);
void check_root(const char* call, std::int64_t root, int size);

inline std::uint64_t bytes_of(const at::Tensor& tensor) { return static_cast<std::uint64_t>(tensor.nbytes()); }
bool overlap(const worker::Piece& a, const worker::Piece& b) noexcept;

/// The memory that one Work reads and writes. Keeps the memory itself alive, because a tensor may get other memory
/// meanwhile (`t.data = other`, set_()). A tensor that is not one contiguous run of plain values (strided, conjugated,
/// negated views) travels through a temporary.
class Buffers {
 public:
  worker::Piece input(const at::Tensor& tensor);
  /// `reads`: the operation also reads the output, so a temporary starts with the tensor's values.
  worker::Piece output(const at::Tensor& tensor, bool reads);
  /// A temporary with the reduction of all `tensors`; each of them gets the operation's result. The tensors must be
  /// alike (check_alike()) and on the CPU.
  worker::Piece output_of_all(const std::vector<at::Tensor>& tensors, const TensorReduction& what);
  /// `tensor` gets the same result as `first`. The last output must be the output of `first`.
  void output_also(const at::Tensor& tensor, const at::Tensor& first);
  /// Replaces `input` by a copy if it overlaps one of `outputs`. No copy if it is exactly outputs[own] (-1: none).
  void separate(worker::Piece& input, const at::Tensor& tensor, const std::vector<worker::Piece>& outputs, int own);
  void hold(const at::Tensor& tensor) { held_.push_back(tensor.storage()); }

  /// Whether finish() has something to do before the outputs may be read.
  bool needs_finish() const noexcept { return !copies_.empty(); }
  void finish();

 private:
  std::vector<c10::Storage> held_;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies_;  // to, from; never a tensor object that the program knows
  bool last_is_temporary_ = false;                         // the last output is a temporary: the last copy's source
};

}  // namespace hybridps::pg
