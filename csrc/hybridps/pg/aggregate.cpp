// The reductions of ProcessGroupHybrid, and its barriers.
#include <algorithm>
#include <cmath>
#include <exception>
#include <optional>
#include <utility>

#include <ATen/ATen.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include "hybridps/core/log.h"
#include "hybridps/pg/accelerator.h"
#include "hybridps/pg/process_group_hybrid.h"

namespace hybridps::pg {
namespace {

using WorkPtr = c10::intrusive_ptr<c10d::Work>;

/// The device that the program named. torch's ProcessGroup passes on the indices (device_ids) and not the device, and
/// the device has no index if the program named none.
std::optional<c10::Device> device_of(const c10d::BarrierOptions& opts) {
  if (opts.device && opts.device->has_index()) return opts.device;
  const auto type = opts.device_ids.empty() ? std::nullopt : at::getAccelerator();
  if (!type) return std::nullopt;
  return c10::Device(*type, static_cast<c10::DeviceIndex>(opts.device_ids.front()));
}

worker::Operation reduction(schedule::Kind kind, const TensorReduction& what) {
  worker::Operation operation;
  operation.kind = kind;
  operation.dtype = what.dtype;
  operation.op = what.op;
  operation.premul = what.premul;
  return operation;
}

/// The part of a contiguous piece that belongs to `rank`, when all ranks' parts are equal.
worker::Piece slice(const worker::Piece& whole, int rank, int size) {
  const std::uint64_t bytes = whole.bytes / static_cast<std::uint64_t>(size);
  return {whole.data + static_cast<std::uint64_t>(rank) * bytes, bytes};
}

void check_reduce_scatter(const char* call, const at::Tensor& output, const at::Tensor& input, int size) {
  check_tensor(call, output);
  check_tensor(call, input);
  TORCH_CHECK(output.scalar_type() == input.scalar_type(), "hybridps::", call, ": output tensor of type ",
              output.scalar_type(), " and input tensor of type ", input.scalar_type(), " must have the same type");
  TORCH_CHECK(input.numel() == output.numel() * size, "hybridps::", call,
              ": input tensor must be the same size as output size times world size (", input.numel(),
              " elements, not ", output.numel(), " x ", size, ")");
}

// The record of a sparse tensor that ranks exchange: sparse_dim, dense_dim, nnz, type, then the sizes.
constexpr std::int64_t kSparseDimsMax = 28;
constexpr std::int64_t kSparseRecord = 4 + kSparseDimsMax;

at::Tensor sparse_record(const at::Tensor& coalesced) {
  TORCH_CHECK(coalesced.dim() <= kSparseDimsMax, "hybridps::all_reduce: sparse tensors of at most ", kSparseDimsMax,
              " dimensions are supported");
  at::Tensor record = at::zeros({kSparseRecord}, at::kLong);
  auto* values = record.mutable_data_ptr<std::int64_t>();
  values[0] = coalesced.sparse_dim();
  values[1] = coalesced.dense_dim();
  values[2] = coalesced._nnz();
  values[3] = static_cast<std::int64_t>(coalesced.scalar_type());
  std::copy(coalesced.sizes().begin(), coalesced.sizes().end(), values + 4);
  return record;
}

}  // namespace

WorkPtr ProcessGroupHybrid::allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  check_alike("all_reduce", tensors);
  const at::Tensor& tensor = tensors.front();
  if (tensor.defined() && tensor.is_sparse() && tensor.is_cpu()) return sparse_allreduce(tensors, opts);
  check_tensors("all_reduce", tensors);
  const TensorReduction what = reduction_of("all_reduce", tensor, opts.reduceOp);
  Call call;
  call.operations.push_back(reduction(schedule::Kind::kAllReduce, what));
  // Several tensors: the reduction is over all tensors of all ranks, and each tensor gets the result, as in gloo.
  call.operations.front().output = {tensors.size() == 1 ? call.buffers.output(tensor, true)
                                                        : call.buffers.output_of_all(tensors, what)};
  return issue(
      std::move(call).of(c10d::OpType::ALLREDUCE, "all_reduce", "hybridps:all_reduce", opts, tensors, tensors));
}

WorkPtr ProcessGroupHybrid::allreduce_sparse(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

WorkPtr ProcessGroupHybrid::allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                const c10d::AllreduceCoalescedOptions& opts) {
  constexpr const char* kName = "allreduce_coalesced";
  check_tensors(kName, tensors);
  for (const auto& tensor : tensors)
    TORCH_CHECK(tensor.scalar_type() == tensors.front().scalar_type(), "hybridps::", kName,
                ": tensors must all have the same type, got ", tensors.front().scalar_type(), " and ",
                tensor.scalar_type());
  Call call;
  call.operations.push_back(reduction(schedule::Kind::kAllReduce, reduction_of(kName, tensors.front(), opts.reduceOp)));
  for (const auto& tensor : tensors) call.operations.front().output.push_back(call.buffers.output(tensor, true));
  return issue(
      std::move(call).of(c10d::OpType::ALLREDUCE_COALESCED, kName, "hybridps:all_reduce", opts, tensors, tensors));
}

WorkPtr ProcessGroupHybrid::reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& opts) {
  const at::Tensor& tensor = single_tensor("reduce", tensors);
  check_root("reduce", opts.rootRank, size_);
  TORCH_CHECK(opts.rootTensor == 0, "hybridps::reduce: invalid root tensor: ", opts.rootTensor);
  Call call;
  call.operations.push_back(reduction(schedule::Kind::kReduce, reduction_of("reduce", tensor, opts.reduceOp)));
  worker::Operation& operation = call.operations.front();
  operation.root = static_cast<int>(opts.rootRank);
  if (rank_ == operation.root) {
    operation.output = {call.buffers.output(tensor, true)};
    operation.input = operation.output;
  } else {
    operation.input = {call.buffers.input(tensor)};
  }
  return issue(std::move(call).of(c10d::OpType::REDUCE, "reduce", "hybridps:reduce", opts, tensors, tensors));
}

WorkPtr ProcessGroupHybrid::reduce_scatter(std::vector<at::Tensor>& outputs,
                                           std::vector<std::vector<at::Tensor>>& inputs,
                                           const c10d::ReduceScatterOptions& opts) {
  constexpr const char* kName = "reduce_scatter";
  const at::Tensor& output = single_tensor(kName, outputs);
  TORCH_CHECK(inputs.size() == 1, "hybridps::", kName, ": requires a single-element input list containing a list with ",
              size_, " tensors");
  TORCH_CHECK(inputs.front().size() == static_cast<std::size_t>(size_), "hybridps::", kName,
              ": Incorrect input list size ", inputs.front().size(), ". Input list size should be ", size_,
              ", same as size of the process group.");
  check_tensors(kName, inputs.front());
  check_same_type(kName, output, inputs.front());
  TORCH_CHECK(inputs.front()[static_cast<std::size_t>(rank_)].numel() == output.numel(), "hybridps::", kName,
              ": invalid tensor size at index ", rank_, ": the output has ", output.numel(),
              " elements, this rank's input ", inputs.front()[static_cast<std::size_t>(rank_)].numel());
  Call call;
  call.operations.push_back(reduction(schedule::Kind::kReduceScatter, reduction_of(kName, output, opts.reduceOp)));
  worker::Operation& operation = call.operations.front();
  operation.output = {call.buffers.output(output, false)};
  for (int r = 0; r < size_; ++r) {
    const at::Tensor& input = inputs.front()[static_cast<std::size_t>(r)];
    worker::Piece piece = call.buffers.input(input);
    call.buffers.separate(piece, input, operation.output, r == rank_ ? 0 : -1);
    operation.input.push_back(piece);
    operation.input_bytes.push_back(piece.bytes);
  }
  return issue(std::move(call).of(c10d::OpType::REDUCE_SCATTER, kName, "hybridps:reduce_scatter", opts, inputs.front(),
                                  outputs));
}

WorkPtr ProcessGroupHybrid::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::ReduceScatterOptions& opts) {
  std::vector<at::Tensor> outputs = {output};
  std::vector<at::Tensor> inputs = {input};
  return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

WorkPtr ProcessGroupHybrid::reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                            std::vector<at::Tensor>& inputs,
                                                            const c10d::ReduceScatterOptions& opts) {
  const char* const name = outputs.size() == 1 ? "reduce_scatter_tensor" : "reduce_scatter_tensor_coalesced";
  TORCH_CHECK(!inputs.empty(), "hybridps::", name, ": requires non-empty input tensor list");
  TORCH_CHECK(inputs.size() == outputs.size(), "hybridps::", name,
              ": requires input/output tensor lists to have the same length");
  for (std::size_t i = 0; i < inputs.size(); ++i) check_reduce_scatter(name, outputs[i], inputs[i], size_);

  // One operation for all tensors of one type. Its input: for each rank in turn, that rank's slice of every tensor.
  Call call;
  std::vector<bool> taken(inputs.size(), false);
  for (std::size_t first = 0; first < inputs.size(); ++first) {
    if (taken[first]) continue;
    worker::Operation operation =
        reduction(schedule::Kind::kReduceScatter, reduction_of(name, inputs[first], opts.reduceOp));
    std::vector<worker::Piece> whole;
    std::vector<std::size_t> members;
    for (std::size_t i = first; i < inputs.size(); ++i) {
      if (taken[i] || inputs[i].scalar_type() != inputs[first].scalar_type()) continue;
      taken[i] = true;
      members.push_back(i);
      operation.output.push_back(call.buffers.output(outputs[i], false));
    }
    for (std::size_t m = 0; m < members.size(); ++m) {
      const at::Tensor& input = inputs[members[m]];
      worker::Piece piece = call.buffers.input(input);
      const worker::Piece& own = operation.output[m];
      const worker::Piece in_place = slice(piece, rank_, size_);
      // The output may be this rank's slice of the input. Any other overlap would lose values that other ranks need.
      if (own.data != in_place.data || own.bytes != in_place.bytes)
        call.buffers.separate(piece, input, operation.output, -1);
      whole.push_back(piece);
    }
    for (int r = 0; r < size_; ++r) {
      std::uint64_t bytes = 0;
      for (const worker::Piece& piece : whole) {
        operation.input.push_back(slice(piece, r, size_));
        bytes += operation.input.back().bytes;
      }
      operation.input_bytes.push_back(bytes);
    }
    call.operations.push_back(std::move(operation));
  }
#if HYBRIDPS_TORCH_AT_LEAST(15)
  const auto type =
      outputs.size() == 1 ? c10d::OpType::_REDUCE_SCATTER_BASE : c10d::OpType::REDUCE_SCATTER_TENSOR_COALESCED;
#else
  const auto type = outputs.size() == 1 ? c10d::OpType::_REDUCE_SCATTER_BASE : c10d::OpType::COALESCED;
#endif
  return issue(std::move(call).of(type, name, "hybridps:_reduce_scatter_base", opts, inputs, outputs));
}

// As in gloo, every rank gets all indices and values, and adds the parts in rank order. The call itself exchanges the
// sizes: a second round from a completion would have no fixed place among the program's collectives.
WorkPtr ProcessGroupHybrid::sparse_allreduce(const std::vector<at::Tensor>& tensors,
                                             const c10d::AllreduceOptions& opts) {
  TORCH_CHECK(opts.reduceOp == c10d::ReduceOp::SUM,
              "hybridps::all_reduce: unsupported reduction operation (allreduce of sparse tensors only works with "
              "ReduceOp.SUM)");
  const at::AutoDispatchBelowADInplaceOrView guard;
  at::Tensor total = tensors.front();
  for (std::size_t i = 1; i < tensors.size(); ++i) total = total + tensors[i];
  const at::Tensor coalesced = total.coalesce();
  const at::Tensor indices = coalesced._indices().contiguous();
  const at::Tensor values = coalesced._values().contiguous();
  const auto dtype = movable_dtype(values);

  at::Tensor record = sparse_record(coalesced);
  at::Tensor records = at::empty({size_, kSparseRecord}, at::kLong);
  c10d::AllgatherOptions gather_options;
  gather_options.timeout = opts.timeout;
  _allgather_base(records, record, gather_options)->wait();

  const auto* all = records.const_data_ptr<std::int64_t>();
  const auto record_of = [&](int r) { return all + r * kSparseRecord; };
  for (int r = 1; r < size_; ++r) {
    const auto* a = record_of(0);
    const auto* b = record_of(r);
    const bool same = a[0] == b[0] && a[1] == b[1] && a[3] == b[3] && std::equal(a + 4, a + kSparseRecord, b + 4);
    TORCH_CHECK(same, "hybridps::all_reduce: Sparse dimensions do not match: rank ", r,
                " brings a tensor of another shape, type or number of sparse dimensions than rank 0");
  }

  Call call;
  call.operations.resize(2);
  worker::Operation& gather_indices = call.operations[0];
  worker::Operation& gather_values = call.operations[1];
  gather_indices.kind = gather_values.kind = schedule::Kind::kAllGather;
  gather_indices.dtype = core::DType::kInt64;
  gather_values.dtype = dtype;
  gather_indices.input = {call.buffers.input(indices)};
  gather_values.input = {call.buffers.input(values)};
  std::vector<at::Tensor> all_indices;
  std::vector<at::Tensor> all_values;
  for (int r = 0; r < size_; ++r) {
    const std::int64_t nnz = record_of(r)[2];
    std::vector<std::int64_t> value_sizes = values.sizes().vec();
    value_sizes.front() = nnz;
    all_indices.push_back(at::empty({coalesced.sparse_dim(), nnz}, indices.options()));
    all_values.push_back(at::empty(value_sizes, values.options()));
    gather_indices.output.push_back(call.buffers.output(all_indices.back(), false));
    gather_values.output.push_back(call.buffers.output(all_values.back(), false));
    gather_indices.output_bytes.push_back(gather_indices.output.back().bytes);
    gather_values.output_bytes.push_back(gather_values.output.back().bytes);
  }
  call.finish = [tensors, all_indices = std::move(all_indices), all_values = std::move(all_values)] {
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto sizes = tensors.front().sizes();
    at::Tensor sum = at::sparse_coo_tensor(all_indices[0], all_values[0], sizes);
    for (std::size_t r = 1; r < all_indices.size(); ++r)
      sum = sum + at::sparse_coo_tensor(all_indices[r], all_values[r], sizes);
    sum = sum.coalesce();
    for (at::Tensor target : tensors) target.copy_(sum);
  };
  return issue(std::move(call).of(c10d::OpType::_ALLREDUCE_SPARSE, "all_reduce (sparse)", "hybridps:sparse_all_reduce",
                                  opts, tensors, tensors));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHybrid::outer_step(at::Tensor tensor, const std::string& what,
                                                              std::int64_t slot, double rate, double momentum) {
  constexpr const char* kName = "outer_step";
  check_tensor(kName, tensor);
  TORCH_CHECK(tensor.scalar_type() == at::kFloat && tensor.is_cpu() && tensor.is_contiguous(), "hybridps::", kName,
              ": a contiguous tensor of float32 on the CPU is needed, this one is of ", tensor.scalar_type(), " on ",
              tensor.device());
  core::ReduceOp op = core::ReduceOp::kNone;
  for (const auto& [name, named] :
       {std::pair("momentum", core::ReduceOp::kMomentumStep), std::pair("nesterov", core::ReduceOp::kNesterovStep),
        std::pair("load", core::ReduceOp::kStateLoad), std::pair("read", core::ReduceOp::kStateRead)})
    if (what == name) op = named;
  TORCH_CHECK(op != core::ReduceOp::kNone, "hybridps::", kName, ": no step is called '", what, "'");
  TORCH_CHECK(slot >= 1 && slot <= 65535, "hybridps::", kName, ": slot ", slot, " is not in 1 to 65535");
  TORCH_CHECK(std::isfinite(rate) && std::isfinite(momentum) && momentum >= 0.0 && momentum < 1.0, "hybridps::", kName,
              ": a finite rate and a momentum of at least 0 and below 1 are needed, not ", rate, " and ", momentum);
  const bool steps = op == core::ReduceOp::kMomentumStep || op == core::ReduceOp::kNesterovStep;
  Call call;
  worker::Operation operation;
  operation.kind = schedule::Kind::kAllReduce;
  operation.dtype = core::DType::kFloat32;
  operation.op = op;
  operation.tensor = static_cast<compress::TensorKey>(slot);
  if (steps) {
    operation.rate = static_cast<float>(rate);
    operation.momentum = static_cast<float>(momentum);
    const auto life = this->life();
    const compress::Codecs* const codecs = life->compression->codecs();
    if (codecs != nullptr && codecs->of(/*warming_up=*/false, operation.dtype) != nullptr) {
      TORCH_CHECK(codecs->spec().momentum == 0.0, "hybridps::", kName,
                  ": the group's codec has a momentum of its own, before the owner's; leave out its momentum=");
      operation.coding = wire::Coding::kFull;
    }
  }
  operation.output = {call.buffers.output(tensor, true)};
  call.operations.push_back(std::move(operation));
  call.type = c10d::OpType::ALLREDUCE;
  call.name = kName;
  call.title = "hybridps:outer_step";
  call.inputs = {tensor};
  call.outputs = {tensor};
  return issue(std::move(call));
}

// Barriers ------------------------------------------------------------------------------------------------------------

WorkPtr ProcessGroupHybrid::barrier(const c10d::BarrierOptions& opts) {
  Call call = Call().of(c10d::OpType::BARRIER, "barrier", "hybridps:barrier", opts, {}, {});
  call.operations.resize(1);
  call.operations.front().kind = schedule::Kind::kBarrier;
  // In a group that works on a GPU, the barrier also follows the current stream's work. Other ranks see no difference.
  auto chosen = device_of(opts);
  if (!chosen || accelerator_of(chosen->type()) == nullptr) chosen = last_device();
  if (chosen) return issue_on_stream(std::move(call), *chosen);
  return issue(std::move(call));
}

// Rank 0 hears from all ranks, then answers all ranks. So either every rank passes or none, and rank 0 can name a
// missing rank. Only rank 0 keeps the timeout: other ranks would give up first and hide the name. Rank 0 answers 0, or
// 1 + the rank that failed, so that the other ranks need not wait for their own timeout.
void ProcessGroupHybrid::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  constexpr const char* kName = "monitored_barrier";
  constexpr const char* kTitle = "hybridps:monitored_barrier";
  constexpr std::uint32_t kReserved = 0x80000000U;  // users' tags are not negative
  const auto timeout = timeout_of(opts.timeout);
  const auto group_timeout = timeout_of(std::chrono::milliseconds(-1));
  const std::uint32_t turn = monitored_barriers_.fetch_add(1) % (kReserved / 2);
  const std::uint32_t arrive = kReserved + 2 * turn;
  const std::uint32_t depart = arrive + 1;

  // In this call, and only here, torch's timeout of 0 means no time at all.
  TORCH_CHECK(rank_ != 0 || opts.timeout.count() != 0,
              "[Rank 0]: Rank 0 timed out in monitoredBarrier after 0 ms. No ranks successfully processed in "
              "monitoredBarrier.");

  const auto patience = group_timeout.count() == 0 ? std::chrono::milliseconds(0) : std::max(timeout, group_timeout);
  if (rank_ != 0) {
    const at::Tensor answer = at::zeros({1}, at::kLong);
    std::string why;
    try {
      const auto sent =
          point_to_point(c10d::OpType::SEND, kName, kTitle, at::full({1}, rank_, at::kLong), 0, arrive, patience);
      const auto received = point_to_point(c10d::OpType::RECV, kName, kTitle, answer, 0, depart, patience);
      sent->wait();
      received->wait();
      if (const auto value = answer.item<std::int64_t>(); value != 0)
        why = c10::str("rank ", value - 1, " failed to pass monitoredBarrier, says rank 0");
    } catch (const c10::Error& error) {
      why = error.what_without_backtrace();
    }
    TORCH_CHECK(why.empty(), "Rank ", rank_,
                " successfully reached monitoredBarrier, but received errors while waiting for send/recv from rank 0. "
                "Please check rank 0 logs for faulty rank.\n Original exception: \n",
                why);
    return;
  }

  const auto answer_all = [&](std::int64_t value, std::chrono::milliseconds within) {
    std::vector<WorkPtr> works;
    for (int r = 1; r < size_; ++r)
      works.push_back(
          point_to_point(c10d::OpType::SEND, kName, kTitle, at::full({1}, value, at::kLong), r, depart, within));
    return works;
  };
  // Waits. Throws with the first rank that failed, or all of them (wait_all_ranks). `tell`: first answers all ranks.
  const auto collect = [&](const std::vector<WorkPtr>& works, bool tell) {
    std::vector<int> failed;
    std::string first;
    for (std::size_t i = 0; i < works.size() && (failed.empty() || wait_all_ranks); ++i) {
      const int rank = static_cast<int>(i) + 1;
      try {
        works[i]->wait();
      } catch (const c10::Error& error) {
        std::string text =
            c10::str("[Rank 0]: Rank ", rank, " failed to pass monitoredBarrier in ", timeout.count(), " ms");
        core::log_error(text);
        if (failed.empty()) first = text + "\n Original exception: \n" + error.what_without_backtrace();
        failed.push_back(rank);
      }
    }
    if (failed.empty()) return;
    try {
      // Nobody waits for these answers: some ranks may be gone. The limit is `patience`, so that a late rank still gets
      // its answer: a send that times out counts as never sent.
      if (tell) answer_all(1 + failed.front(), patience);
    } catch (const c10::Error&) {  // the group has failed, so the other ranks know
    }
    TORCH_CHECK(wait_all_ranks, first);
    TORCH_CHECK(false, "[Rank 0]: Ranks ", c10::Join(", ", failed), " failed to pass monitoredBarrier in ",
                timeout.count(), " ms");
  };
  std::vector<WorkPtr> arrivals;
  for (int r = 1; r < size_; ++r)
    arrivals.push_back(
        point_to_point(c10d::OpType::RECV, kName, kTitle, at::zeros({1}, at::kLong), r, arrive, timeout));
  collect(arrivals, /*tell=*/true);
  collect(answer_all(0, timeout), /*tell=*/false);
}

}  // namespace hybridps::pg
