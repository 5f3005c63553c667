// The operations of ProcessGroupHybrid that only move bytes.
#include <cstring>

#include <ATen/ATen.h>
#include <c10/util/Exception.h>
#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "hybridps/pg/process_group_hybrid.h"

namespace hybridps::pg {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

worker::Operation movement(schedule::Kind kind, core::DType dtype, int root = -1) {
  worker::Operation operation;
  operation.kind = kind;
  operation.dtype = dtype;
  operation.root = root;
  return operation;
}

worker::Piece slice(const worker::Piece& whole, int rank, int size) {
  const std::uint64_t bytes = whole.bytes / static_cast<std::uint64_t>(size);
  return {whole.data + static_cast<std::uint64_t>(rank) * bytes, bytes};
}

/// Bytes to or from each rank of an all_to_all over dimension 0. Empty `splits`: equal parts.
std::vector<std::uint64_t> split_bytes(const std::vector<int64_t>& splits, const at::Tensor& tensor, int size) {
  const std::int64_t rows = tensor.size(0);
  const std::uint64_t row_bytes = rows > 0 ? bytes_of(tensor) / static_cast<std::uint64_t>(rows) : 0;
  std::vector<std::uint64_t> bytes;
  for (int r = 0; r < size; ++r) {
    const std::int64_t count = splits.empty() ? rows / size : splits[static_cast<std::size_t>(r)];
    bytes.push_back(static_cast<std::uint64_t>(count) * row_bytes);
  }
  return bytes;
}

void check_all_gather(const char* call, const at::Tensor& output, const at::Tensor& input, int size) {
  check_tensor(call, output);
  check_tensor(call, input);
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "hybridps::", call, ": output tensor of type ",
              output.scalar_type(), " must have the same type as input tensor (", input.scalar_type(), ")");
  TORCH_CHECK(output.numel() == input.numel() * size, "hybridps::", call,
              ": output tensor size must be equal to world_size times input tensor size (", output.numel(),
              " elements, not ", size, " x ", input.numel(), ")");
}

std::vector<at::Tensor> flatten(const std::vector<std::vector<at::Tensor>>& lists) {
  std::vector<at::Tensor> flat;
  for (const auto& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

}  // namespace

WorkPtr ProcessGroupHybrid::broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& opts) {
  check_alike("broadcast", tensors);
  check_tensors("broadcast", tensors);
  check_root("broadcast", opts.rootRank, size_);
  TORCH_CHECK(opts.rootTensor >= 0 && opts.rootTensor < static_cast<std::int64_t>(tensors.size()),
              "hybridps::broadcast: invalid root tensor: ", opts.rootTensor);
  // Several tensors: the root's rootTensor goes to all tensors of all ranks, as in gloo.
  const at::Tensor& tensor = tensors[static_cast<std::size_t>(opts.rootTensor)];
  Call call;
  const int root = static_cast<int>(opts.rootRank);
  call.operations.push_back(movement(schedule::Kind::kBroadcast, movable_dtype(tensor), root));
  call.operations.front().output = {call.buffers.output(tensor, rank_ == root)};
  for (const at::Tensor& other : tensors)
    if (&other != &tensor) call.buffers.output_also(other, tensor);
  return issue(std::move(call).of(c10d::OpType::BROADCAST, "broadcast", "hybridps:broadcast", opts, tensors, tensors));
}

WorkPtr ProcessGroupHybrid::allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                      const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "all_gather";
  TORCH_CHECK(!inputs.empty(), "hybridps::", kName, ": requires non-empty input tensor list");
  TORCH_CHECK(inputs.size() == outputs.size(), "hybridps::", kName,
              ": requires input/output tensor lists to have the same length");
  check_alike(kName, inputs);
  check_tensors(kName, inputs);
  // Several inputs: every list of outputs gets all inputs of rank 0, then all of rank 1, ..., as in gloo.
  const std::size_t expected = inputs.size() * static_cast<std::size_t>(size_);
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    TORCH_CHECK(outputs[i].size() == expected, "hybridps::", kName, ": invalid output tensor list at index ", i,
                " (expected length ", expected, ", got ", outputs[i].size(), ")");
    check_tensors(kName, outputs[i]);
    check_same_type(kName, inputs.front(), outputs[i]);
    if (inputs.size() > 1) check_same_size(kName, inputs.front(), outputs[i]);
  }
  const at::Tensor& own = outputs.front()[static_cast<std::size_t>(rank_) * inputs.size()];
  TORCH_CHECK(own.numel() == inputs.front().numel(), "hybridps::", kName, ": invalid tensor size at index ", rank_,
              ": this rank's input has ", inputs.front().numel(), " elements, its output ", own.numel());
  Call call;
  call.operations.push_back(movement(schedule::Kind::kAllGather, movable_dtype(inputs)));
  worker::Operation& operation = call.operations.front();
  for (std::size_t j = 0; j < expected; ++j) {
    operation.output.push_back(call.buffers.output(outputs.front()[j], false));
    if (j % inputs.size() == 0) operation.output_bytes.push_back(0);
    operation.output_bytes.back() += operation.output.back().bytes;
    for (std::size_t i = 1; i < outputs.size(); ++i) call.buffers.output_also(outputs[i][j], outputs.front()[j]);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    worker::Piece piece = call.buffers.input(inputs[i]);
    call.buffers.separate(piece, inputs[i], operation.output,
                          static_cast<int>(static_cast<std::size_t>(rank_) * inputs.size() + i));
    operation.input.push_back(piece);
  }
  return issue(
      std::move(call).of(c10d::OpType::ALLGATHER, kName, "hybridps:all_gather", opts, inputs, flatten(outputs)));
}

WorkPtr ProcessGroupHybrid::_allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) {
  std::vector<at::Tensor> outputs = {output};
  std::vector<at::Tensor> inputs = {input};
  return allgather_into_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr ProcessGroupHybrid::allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                            std::vector<at::Tensor>& inputs,
                                                            const c10d::AllgatherOptions& opts) {
  const char* const name = outputs.size() == 1 ? "all_gather_into_tensor" : "all_gather_into_tensor_coalesced";
  TORCH_CHECK(!inputs.empty(), "hybridps::", name, ": requires non-empty input tensor list");
  TORCH_CHECK(inputs.size() == outputs.size(), "hybridps::", name,
              ": requires input/output tensor lists to have the same length");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_all_gather(name, outputs[i], inputs[i], size_);

  // One operation. Input: this rank's inputs in turn. Output: for each rank in turn, that rank's slice of every output.
  Call call;
  call.operations.push_back(movement(schedule::Kind::kAllGather, movable_dtype(inputs)));
  worker::Operation& operation = call.operations.front();
  std::vector<worker::Piece> whole;
  for (const at::Tensor& output : outputs) whole.push_back(call.buffers.output(output, false));
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    worker::Piece piece = call.buffers.input(inputs[i]);
    const worker::Piece in_place = slice(whole[i], rank_, size_);
    // The input may be this rank's slice of the output, as in FSDP. Any other overlap would be overwritten.
    if (piece.data != in_place.data || piece.bytes != in_place.bytes)
      call.buffers.separate(piece, inputs[i], whole, -1);
    operation.input.push_back(piece);
  }
  for (int r = 0; r < size_; ++r) {
    std::uint64_t bytes = 0;
    for (const worker::Piece& piece : whole) {
      operation.output.push_back(slice(piece, r, size_));
      bytes += operation.output.back().bytes;
    }
    operation.output_bytes.push_back(bytes);
  }
#if HYBRIDPS_TORCH_AT_LEAST(15)
  const auto type = outputs.size() == 1 ? c10d::OpType::_ALLGATHER_BASE : c10d::OpType::ALLGATHER_INTO_TENSOR_COALESCED;
#else
  const auto type = outputs.size() == 1 ? c10d::OpType::_ALLGATHER_BASE : c10d::OpType::COALESCED;
#endif
  return issue(std::move(call).of(type, name, "hybridps:_all_gather_base", opts, inputs, outputs));
}

WorkPtr ProcessGroupHybrid::allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& opts) {
  constexpr const char* kName = "all_gather_coalesced";
  TORCH_CHECK(!inputs.empty(), "hybridps::", kName, ": requires non-empty input tensor list");
  check_tensors(kName, inputs);
  TORCH_CHECK(outputs.size() == static_cast<std::size_t>(size_), "hybridps::", kName,
              ": output lists should be equal to world size");
  for (const auto& list : outputs) {
    TORCH_CHECK(list.size() == inputs.size(), "hybridps::", kName, ": invalid output size: (expected length ",
                inputs.size(), ", got ", list.size(), ")");
    check_tensors(kName, list);
    for (std::size_t i = 0; i < inputs.size(); ++i) {
      check_same_type(kName, inputs[i], {list[i]});
      check_same_size(kName, inputs[i], {list[i]});
    }
  }
  Call call;
  call.operations.push_back(movement(schedule::Kind::kAllGather, movable_dtype(inputs)));
  worker::Operation& operation = call.operations.front();
  for (const auto& list : outputs) {
    std::uint64_t bytes = 0;
    for (const at::Tensor& output : list) {
      operation.output.push_back(call.buffers.output(output, false));
      bytes += operation.output.back().bytes;
    }
    operation.output_bytes.push_back(bytes);
  }
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    worker::Piece piece = call.buffers.input(inputs[i]);
    call.buffers.separate(piece, inputs[i], operation.output,
                          static_cast<int>(static_cast<std::size_t>(rank_) * inputs.size() + i));
    operation.input.push_back(piece);
  }
  return issue(std::move(call).of(c10d::OpType::ALLGATHER_COALESCED, kName, "hybridps:all_gather", opts, inputs,
                                  flatten(outputs)));
}

WorkPtr ProcessGroupHybrid::gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
                                   const c10d::GatherOptions& opts) {
  constexpr const char* kName = "gather";
  const at::Tensor& input = single_tensor(kName, inputs);
  check_root(kName, opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  Call call;
  call.operations.push_back(movement(schedule::Kind::kGather, movable_dtype(input), root));
  worker::Operation& operation = call.operations.front();
  if (rank_ == root) {
    TORCH_CHECK(outputs.size() == 1, "hybridps::", kName,
                ": requires a single-element output list containing a list with ", size_, " tensors.");
    TORCH_CHECK(outputs.front().size() == static_cast<std::size_t>(size_), "hybridps::", kName,
                ": Incorrect output list size ", outputs.front().size(), ". Output list size should be ", size_,
                ", same as size of the process group.");
    check_tensors(kName, outputs.front());
    check_same_type(kName, input, outputs.front());
    check_same_size(kName, input, outputs.front());
    for (const at::Tensor& output : outputs.front()) {
      operation.output.push_back(call.buffers.output(output, false));
      operation.output_bytes.push_back(operation.output.back().bytes);
    }
    call.outputs = outputs.front();
  } else {
    TORCH_CHECK(outputs.empty(), "hybridps::", kName, ": requires empty output on non-root");
  }
  operation.input = {call.buffers.input(input)};
  call.buffers.separate(operation.input.front(), input, operation.output, rank_);
  return issue(
      std::move(call).of(c10d::OpType::GATHER, kName, "hybridps:gather", opts, inputs, std::move(call.outputs)));
}

#if HYBRIDPS_TORCH_AT_LEAST(14)
WorkPtr ProcessGroupHybrid::gather_into_tensor(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  constexpr const char* kName = "gather_into_tensor";
  check_tensor(kName, input);
  check_root(kName, opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  Call call;
  call.operations.push_back(movement(schedule::Kind::kGather, movable_dtype(input), root));
  worker::Operation& operation = call.operations.front();
  operation.input = {call.buffers.input(input)};
  if (rank_ == root) {
    check_all_gather(kName, output, input, size_);
    const worker::Piece whole = call.buffers.output(output, false);
    for (int r = 0; r < size_; ++r) {
      operation.output.push_back(slice(whole, r, size_));
      operation.output_bytes.push_back(operation.output.back().bytes);
    }
    call.buffers.separate(operation.input.front(), input, operation.output, rank_);
    call.outputs = {output};
  }
  return issue(
      std::move(call).of(c10d::OpType::GATHER, kName, "hybridps:gather", opts, {input}, std::move(call.outputs)));
}
#endif

WorkPtr ProcessGroupHybrid::scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
                                    const c10d::ScatterOptions& opts) {
  constexpr const char* kName = "scatter";
  const at::Tensor& output = single_tensor(kName, outputs);
  check_root(kName, opts.rootRank, size_);
  const int root = static_cast<int>(opts.rootRank);
  Call call;
  call.operations.push_back(movement(schedule::Kind::kScatter, movable_dtype(output), root));
  worker::Operation& operation = call.operations.front();
  operation.output = {call.buffers.output(output, false)};
  if (rank_ == root) {
    TORCH_CHECK(inputs.size() == 1, "hybridps::", kName,
                ": requires a single-element input list containing a list with ", size_, " tensors.");
    TORCH_CHECK(inputs.front().size() == static_cast<std::size_t>(size_), "hybridps::", kName,
                ": Incorrect input list size ", inputs.front().size(), ". Input list size should be ", size_,
                ", same as size of the process group.");
    check_tensors(kName, inputs.front());
    check_same_type(kName, output, inputs.front());
    check_same_size(kName, output, inputs.front());
    for (int r = 0; r < size_; ++r) {
      const at::Tensor& input = inputs.front()[static_cast<std::size_t>(r)];
      worker::Piece piece = call.buffers.input(input);
      call.buffers.separate(piece, input, operation.output, r == rank_ ? 0 : -1);
      operation.input.push_back(piece);
      operation.input_bytes.push_back(piece.bytes);
    }
    call.inputs = inputs.front();
  } else {
    TORCH_CHECK(inputs.empty(), "hybridps::", kName, ": requires empty input on non-root");
  }
  return issue(
      std::move(call).of(c10d::OpType::SCATTER, kName, "hybridps:scatter", opts, std::move(call.inputs), outputs));
}

WorkPtr ProcessGroupHybrid::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                          std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  constexpr const char* kName = "all_to_all_single";
  check_tensor(kName, output);
  check_tensor(kName, input);
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "hybridps::", kName,
              ": Tensors are not equal in size or data type: ", output.scalar_type(), " and ", input.scalar_type());
  TORCH_CHECK(output.dim() > 0 && input.dim() > 0, "hybridps::", kName, ": needs tensors of at least one dimension");
  if (output_splits.empty() && input_splits.empty())
    TORCH_CHECK(output.numel() == input.numel(), "hybridps::", kName,
                ": Tensors are not equal in size or data type: ", output.numel(), " and ", input.numel(), " elements");
  c10d::checkSplitSizes(input_splits, input, size_);
  c10d::checkSplitSizes(output_splits, output, size_);
  Call call;
  call.operations.push_back(movement(schedule::Kind::kAllToAll, movable_dtype(input)));
  worker::Operation& operation = call.operations.front();
  operation.output = {call.buffers.output(output, false)};
  operation.input = {call.buffers.input(input)};
  call.buffers.separate(operation.input.front(), input, operation.output, -1);
  operation.input_bytes = split_bytes(input_splits, input, size_);
  operation.output_bytes = split_bytes(output_splits, output, size_);
  const auto own = static_cast<std::size_t>(rank_);
  TORCH_CHECK(operation.input_bytes[own] == operation.output_bytes[own], "hybridps::", kName,
              ": invalid split size at index ", own, ": this rank sends itself ", operation.input_bytes[own],
              " bytes and expects ", operation.output_bytes[own]);
  call.input_splits = input_splits;
  call.output_splits = output_splits;
  return issue(std::move(call).of(c10d::OpType::ALLTOALL_BASE, kName, "hybridps:all_to_all", opts, {input}, {output}));
}

WorkPtr ProcessGroupHybrid::alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                     const c10d::AllToAllOptions& opts) {
  constexpr const char* kName = "all_to_all";
  TORCH_CHECK(inputs.size() == static_cast<std::size_t>(size_), "hybridps::", kName, ": input tensor list size ",
              inputs.size(), " does not match world size ", size_);
  TORCH_CHECK(outputs.size() == static_cast<std::size_t>(size_), "hybridps::", kName, ": output tensor list size ",
              outputs.size(), " does not match world size ", size_);
  check_tensors(kName, inputs);
  check_tensors(kName, outputs);
  check_same_type(kName, inputs.front(), inputs);
  check_same_type(kName, inputs.front(), outputs);
  const auto own = static_cast<std::size_t>(rank_);
  TORCH_CHECK(inputs[own].numel() == outputs[own].numel(), "hybridps::", kName, ": invalid tensor size at index ", own,
              ": this rank sends itself ", inputs[own].numel(), " elements and expects ", outputs[own].numel());
  Call call;
  call.operations.push_back(movement(schedule::Kind::kAllToAll, movable_dtype(inputs)));
  worker::Operation& operation = call.operations.front();
  for (const at::Tensor& output : outputs) {
    operation.output.push_back(call.buffers.output(output, false));
    operation.output_bytes.push_back(operation.output.back().bytes);
  }
  for (const at::Tensor& input : inputs) {
    worker::Piece piece = call.buffers.input(input);
    call.buffers.separate(piece, input, operation.output, -1);
    operation.input.push_back(piece);
    operation.input_bytes.push_back(piece.bytes);
  }
  return issue(std::move(call).of(c10d::OpType::ALLTOALL, kName, "hybridps:all_to_all", opts, inputs, outputs));
}

// Point to point ------------------------------------------------------------------------------------------------------

WorkPtr ProcessGroupHybrid::send(std::vector<at::Tensor>& tensors, int destination, int tag) {
  return point_to_point(c10d::OpType::SEND, "send", "hybridps:send", tensors, destination, tag);
}

WorkPtr ProcessGroupHybrid::recv(std::vector<at::Tensor>& tensors, int source, int tag) {
  return point_to_point(c10d::OpType::RECV, "recv", "hybridps:recv", tensors, source, tag);
}

WorkPtr ProcessGroupHybrid::recvAnysource(std::vector<at::Tensor>& tensors, int tag) {
  return point_to_point(c10d::OpType::RECVANYSOURCE, "recv from any source", "hybridps:recvAnySource", tensors,
                        worker::kAnySource, tag);
}

WorkPtr ProcessGroupHybrid::point_to_point(c10d::OpType type, const char* name, const char* title,
                                           std::vector<at::Tensor>& tensors, int peer, int tag) {
  const at::Tensor& tensor = single_tensor(name, tensors);
  TORCH_CHECK(tag >= 0, "hybridps::", name, ": Tag must be nonnegative, got ", tag);
  // A rank may send to itself: torch allows this in isend() and irecv(), and refuses such a send() itself.
  TORCH_CHECK(type == c10d::OpType::RECVANYSOURCE || (peer >= 0 && peer < size_), "hybridps::", name,
              ": invalid rank: ", peer, " in a group of ", size_);
  return point_to_point(type, name, title, tensor, peer, static_cast<std::uint32_t>(tag),
                        timeout_of(c10d::kUnsetTimeout));
}

WorkPtr ProcessGroupHybrid::point_to_point(c10d::OpType type, const char* name, const char* title,
                                           const at::Tensor& tensor, int peer, std::uint32_t tag,
                                           std::chrono::milliseconds timeout) {
  Call call;
  worker::Operation operation;
  operation.kind = schedule::Kind::kPointToPoint;
  operation.dtype = core::DType::kBytes;  // as in gloo, only the number of bytes must agree
  operation.elements = movable_dtype(tensor);
  operation.sending = type == c10d::OpType::SEND;
  operation.peer = peer;
  operation.tag = tag;
  if (operation.sending) {
    operation.input = {call.buffers.input(tensor)};
    call.inputs = {tensor};
  } else {
    operation.output = {call.buffers.output(tensor, false)};
    call.inputs = {tensor};
    call.outputs = {tensor};
  }
  call.operations.push_back(std::move(operation));
  call.type = type;
  call.name = name;
  call.title = title;
  call.timeout = timeout;
  return issue(std::move(call));
}

}  // namespace hybridps::pg
