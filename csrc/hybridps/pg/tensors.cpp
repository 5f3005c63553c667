#include "hybridps/pg/tensors.h"

#include <cstddef>
#include <string>

#include <ATen/ATen.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/core/LegacyTypeDispatch.h>

#include "hybridps/core/float_mode.h"
#include "hybridps/pg/accelerator.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::pg {
namespace {

bool is_plain(const at::Tensor& tensor) { return tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg(); }

at::Tensor contiguous_like(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

at::Tensor contiguous_copy(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return contiguous_like(tensor).copy_(tensor);
}

/// A tensor on the same memory, even if the program gives `tensor` other memory meanwhile.
at::Tensor alias_of(const at::Tensor& tensor) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  return tensor.detach();
}

std::string size_text(at::IntArrayRef sizes) {
  std::string text = "[";
  for (std::size_t i = 0; i < sizes.size(); ++i) text += (i > 0 ? ", " : "") + std::to_string(sizes[i]);
  return text + "]";
}

core::ReduceOp op_of(const char* call, const c10d::ReduceOp& op) {
  switch (static_cast<c10d::ReduceOp::RedOpType>(op)) {
    case c10d::ReduceOp::SUM: return core::ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return core::ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT: return core::ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return core::ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return core::ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return core::ReduceOp::kBand;
    case c10d::ReduceOp::BOR: return core::ReduceOp::kBor;
    case c10d::ReduceOp::BXOR: return core::ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM: return core::ReduceOp::kPremulSum;
    case c10d::ReduceOp::UNUSED: break;
  }
  TORCH_CHECK(false, "hybridps::", call, ": Unhandled ReduceOp");
}

std::string torch_name_of(core::ReduceOp op) {
  switch (op) {
    case core::ReduceOp::kBand: return "BAND";
    case core::ReduceOp::kBor: return "BOR";
    case core::ReduceOp::kBxor: return "BXOR";
    case core::ReduceOp::kMin: return "MIN";
    case core::ReduceOp::kMax: return "MAX";
    case core::ReduceOp::kPremulSum: return "PREMUL_SUM";
    default: return std::string(core::name_of(op));
  }
}

double premul_factor(const char* call, const c10d::ReduceOp& op) {
  // torch has no other kind of supplement. Null: the operation was made without torch's factory.
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  TORCH_CHECK(supplement != nullptr, "hybridps::", call,
              ": ReduceOp.PREMUL_SUM carries no factor; make it with torch.distributed._make_nccl_premul_sum(factor)");
  if (!supplement->tensor_factor.defined()) return supplement->double_factor;
  TORCH_CHECK(!supplement->tensor_factor.is_complex(), "hybridps::", call,
              ": the factor of ReduceOp.PREMUL_SUM must be real");
  return supplement->tensor_factor.to(at::kDouble).item<double>();
}

}  // namespace

std::optional<core::DType> dtype_of(at::ScalarType type) noexcept {
  using core::DType;
  switch (type) {
    case at::ScalarType::Byte: return DType::kUint8;
    case at::ScalarType::Char: return DType::kInt8;
    case at::ScalarType::Short: return DType::kInt16;
    case at::ScalarType::Int: return DType::kInt32;
    case at::ScalarType::Long: return DType::kInt64;
    case at::ScalarType::Half: return DType::kFloat16;
    case at::ScalarType::BFloat16: return DType::kBfloat16;
    case at::ScalarType::Float: return DType::kFloat32;
    case at::ScalarType::Double: return DType::kFloat64;
    case at::ScalarType::ComplexFloat: return DType::kComplex64;
    case at::ScalarType::ComplexDouble: return DType::kComplex128;
    case at::ScalarType::Bool: return DType::kBool;
    case at::ScalarType::UInt16: return DType::kUint16;
    case at::ScalarType::UInt32: return DType::kUint32;
    case at::ScalarType::UInt64: return DType::kUint64;
    case at::ScalarType::Float8_e4m3fn: return DType::kFloat8E4M3fn;
    case at::ScalarType::Float8_e5m2: return DType::kFloat8E5M2;
    case at::ScalarType::Float8_e4m3fnuz: return DType::kFloat8E4M3fnuz;
    case at::ScalarType::Float8_e5m2fnuz: return DType::kFloat8E5M2fnuz;
    case at::ScalarType::Float8_e8m0fnu: return DType::kFloat8E8M0fnu;
    default: return std::nullopt;
  }
}

core::DType movable_dtype(const at::Tensor& tensor) noexcept {
  return dtype_of(tensor.scalar_type()).value_or(core::DType::kBytes);
}

core::DType movable_dtype(const std::vector<at::Tensor>& tensors) noexcept {
  if (tensors.empty()) return core::DType::kBytes;
  for (const at::Tensor& tensor : tensors)
    if (tensor.scalar_type() != tensors.front().scalar_type()) return core::DType::kBytes;
  return movable_dtype(tensors.front());
}

TensorReduction reduction_of(const char* call, const at::Tensor& tensor, const c10d::ReduceOp& op) {
  const auto dtype = dtype_of(tensor.scalar_type());
  TORCH_CHECK(dtype.has_value(), "hybridps::", call, ": cannot reduce tensors of type ", tensor.scalar_type());
  TensorReduction result;
  result.dtype = *dtype;
  result.op = op_of(call, op);
  if (!core::is_reducible(result.dtype, result.op)) {
    switch (result.op) {
      case core::ReduceOp::kBand:
      case core::ReduceOp::kBor:
      case core::ReduceOp::kBxor:
        TORCH_CHECK(false, "Cannot use ReduceOp.", torch_name_of(result.op),
                    " with non-integral dtype (hybridps::", call, " of ", tensor.scalar_type(), ")");
      case core::ReduceOp::kMin:
      case core::ReduceOp::kMax:
        TORCH_CHECK(false, call, " does not support ReduceOp.", torch_name_of(result.op),
                    " on complex tensors (hybridps, ", tensor.scalar_type(), ")");
      default:
        TORCH_CHECK(false, "hybridps::", call, ": ReduceOp.", torch_name_of(result.op),
                    " is not defined for tensors of type ", tensor.scalar_type());
    }
  }
  if (result.op == core::ReduceOp::kPremulSum) result.premul = premul_factor(call, op);
  return result;
}

void check_tensor(const char* call, const at::Tensor& tensor) {
  TORCH_CHECK(tensor.defined(), "hybridps::", call, ": undefined tensor");
  const bool carried = tensor.device().is_cpu() || accelerator_of(tensor.device().type()) != nullptr;
  TORCH_CHECK(carried || !tensor.is_cuda(), "hybridps::", call,
              ": CUDA tensors are not supported by this build; use backend \"cpu:hybridps,cuda:nccl\"");
  TORCH_CHECK(carried, "hybridps::", call, ": only supports CPU and CUDA tensors, got one on ", tensor.device());
  TORCH_CHECK(tensor.layout() == at::kStrided, "hybridps::", call, ": only supports dense tensors, got layout ",
              tensor.layout());
}

void check_tensors(const char* call, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(!tensors.empty(), "hybridps::", call, ": requires non-empty tensor list");
  for (const at::Tensor& tensor : tensors) check_tensor(call, tensor);
}

const at::Tensor& single_tensor(const char* call, const std::vector<at::Tensor>& tensors) {
  check_tensors(call, tensors);
  TORCH_CHECK(tensors.size() == 1, "hybridps::", call, ": requires a single-element tensor list, got ", tensors.size(),
              " tensors");
  return tensors.front();
}

void check_alike(const char* call, const std::vector<at::Tensor>& tensors) {
  TORCH_CHECK(!tensors.empty(), "hybridps::", call, ": requires non-empty tensor list");
  if (tensors.size() == 1) return;
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(tensors[i].defined(), "hybridps::", call, ": undefined tensor");
    TORCH_CHECK(tensors[i].device().is_cpu(), "hybridps::", call,
                ": several tensors in one call must be on the CPU, got one on ", tensors[i].device(),
                "; call it once for each");
    TORCH_CHECK(tensors[i].layout() == tensors.front().layout(), "hybridps::", call,
                ": invalid tensor layout at index ", i, " (expected ", tensors.front().layout(), ", got ",
                tensors[i].layout(), ")");
  }
  check_same_type(call, tensors.front(), tensors);
  check_same_size(call, tensors.front(), tensors);
}

void check_same_type(const char* call, const at::Tensor& like, const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(tensors[i].scalar_type() == like.scalar_type(), "hybridps::", call, ": invalid tensor type at index ",
                i, " (expected ", like.scalar_type(), ", got ", tensors[i].scalar_type(), ")");
  }
}

void check_same_size(const char* call, const at::Tensor& like, const std::vector<at::Tensor>& tensors) {
  for (std::size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK(tensors[i].sizes() == like.sizes(), "hybridps::", call, ": invalid tensor size at index ", i,
                " (expected ", size_text(like.sizes()), ", got ", size_text(tensors[i].sizes()), ")");
  }
}

void check_root(const char* call, std::int64_t root, int size) {
  TORCH_CHECK(root >= 0 && root < size, "hybridps::", call, ": invalid root rank: ", root, " in a group of ", size);
}

bool overlap(const worker::Piece& a, const worker::Piece& b) noexcept {
  return a.bytes > 0 && b.bytes > 0 && a.data < b.data + b.bytes && b.data < a.data + a.bytes;
}

worker::Piece Buffers::input(const at::Tensor& tensor) {
  const bool plain = is_plain(tensor);
  const at::Tensor copy = plain ? at::Tensor() : contiguous_copy(tensor);
  const at::Tensor& read = plain ? tensor : copy;
  hold(read);
  // Inputs and outputs have the same Piece type; the engine does not write to inputs.
  auto* data = const_cast<std::byte*>(static_cast<const std::byte*>(read.const_data_ptr()));
  return {data, bytes_of(read)};
}

worker::Piece Buffers::output(const at::Tensor& tensor, bool reads) {
  last_is_temporary_ = !is_plain(tensor);
  if (last_is_temporary_) {
    at::assert_no_internal_overlap(tensor);
    const at::AutoDispatchBelowADInplaceOrView guard;
    copies_.emplace_back(alias_of(tensor), reads ? contiguous_copy(tensor) : contiguous_like(tensor));
  }
  const at::Tensor& written = last_is_temporary_ ? copies_.back().second : tensor;
  hold(written);
  return {static_cast<std::byte*>(written.mutable_data_ptr()), bytes_of(written)};
}

worker::Piece Buffers::output_of_all(const std::vector<at::Tensor>& tensors, const TensorReduction& what) {
  const at::AutoDispatchBelowADInplaceOrView guard;
  const at::Tensor total = contiguous_like(tensors.front());
  std::vector<at::Tensor> plain;
  std::vector<reduce::Input> inputs;
  for (const at::Tensor& tensor : tensors) {
    at::assert_no_internal_overlap(tensor);
    plain.push_back(is_plain(tensor) ? tensor : contiguous_copy(tensor));
    inputs.push_back({static_cast<const std::byte*>(plain.back().const_data_ptr())});
    copies_.emplace_back(alias_of(tensor), total);
  }
  auto* const data = static_cast<std::byte*>(total.mutable_data_ptr());
  const core::UsualFloatMode usual;  // this is the caller's thread
  reduce::combine(inputs, data, static_cast<std::size_t>(total.numel()), what.dtype, what.op);
  hold(total);
  last_is_temporary_ = true;
  return {data, bytes_of(total)};
}

void Buffers::output_also(const at::Tensor& tensor, const at::Tensor& first) {
  at::assert_no_internal_overlap(tensor);
  copies_.emplace_back(alias_of(tensor), last_is_temporary_ ? at::Tensor(copies_.back().second) : alias_of(first));
}

void Buffers::separate(worker::Piece& input, const at::Tensor& tensor, const std::vector<worker::Piece>& outputs,
                       int own) {
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    if (!overlap(input, outputs[i])) continue;
    if (static_cast<int>(i) == own && input.data == outputs[i].data && input.bytes == outputs[i].bytes) continue;
    const at::Tensor copy = contiguous_copy(tensor);
    hold(copy);
    input.data = static_cast<std::byte*>(copy.mutable_data_ptr());
    return;
  }
}

void Buffers::finish() {
  const at::AutoDispatchBelowADInplaceOrView guard;
  for (auto& [to, from] : copies_) {
    to.copy_(from);
    hold(to);  // on a device the copy has only been put on a stream
  }
  copies_.clear();
}

}  // namespace hybridps::pg
