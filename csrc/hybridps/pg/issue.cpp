#include <algorithm>
#include <string>
#include <tuple>
#include <utility>

#include <ATen/record_function.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include "hybridps/pg/process_group_hybrid.h"

// Newer torch also records whether the caller waits at once. The macros open a scope that ends with the function.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define HYBRIDPS_RECORD(...) RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__)
#else
#define HYBRIDPS_RECORD(seq, group, in, out, rank, name, n_in, n_out, type, in_splits, out_splits, start, stride,   \
                        size, async)                                                                                \
  RECORD_PARAM_COMMS_DATA(seq, group, in, out, rank, name, n_in, n_out, type, in_splits, out_splits, start, stride, \
                          size)
#endif

namespace hybridps::pg {
namespace {

thread_local std::optional<std::int8_t> thread_priority;

}  // namespace

std::chrono::milliseconds ProcessGroupHybrid::timeout_of(std::chrono::milliseconds asked) const {
  if (asked.count() >= 0) return asked;
  return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
}

std::vector<std::shared_ptr<TimeExtension>> ProcessGroupHybrid::set_timeout(Call& call) {
  call.timeout = timeout_of(call.timeout);
  std::vector<std::shared_ptr<TimeExtension>> carried;
  {
    const std::lock_guard lock(extensions_mutex_);
    std::erase_if(extensions_,
                  [](const auto& extension) { return extension->expired.load(std::memory_order_acquire); });
    for (const auto& extension : extensions_) {
      if (call.timeout.count() > 0) call.timeout += extension->extra;
      if (!extension->used.exchange(true)) carried.push_back(extension);
    }
  }
  for (auto& operation : call.operations) operation.timeout = call.timeout;
  return carried;
}

std::shared_ptr<InOrder> ProcessGroupHybrid::order_of_this_lane(Life& life) {
  const auto lane = static_cast<std::size_t>(Lanes::current());
  if (life.orders.size() <= lane) life.orders.resize(lane + 1);
  auto& order = life.orders[lane];
  if (!order) order = std::make_shared<InOrder>(life.context->lanes, static_cast<int>(lane) + 1);
  return order;
}

std::optional<std::int8_t> ProcessGroupHybrid::exchange_thread_priority(std::optional<std::int8_t> priority) noexcept {
  return std::exchange(thread_priority, priority);
}

std::int8_t ProcessGroupHybrid::priority_of(const Life& life, const worker::Operation& operation) noexcept {
  return thread_priority.value_or(life.priorities.of(operation.kind));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHybrid::issue(Call call) {
  for (const auto* tensors : {&call.inputs, &call.outputs})
    for (const at::Tensor& tensor : *tensors)
      if (!tensor.is_cpu()) return issue_on_stream(std::move(call), tensor.device());
  const auto life = this->life();
  for (auto& operation : call.operations) operation.priority = priority_of(*life, operation);
  const auto group = group_or_throw(*life, call.name);
  const bool observed = at::hasCallbacks();

  if (!observed) call.title = nullptr;
  auto extensions = set_timeout(call);
  auto work = c10::make_intrusive<WorkHybrid>(life->context, call, call.operations.size(), std::move(extensions));

  if (observed) {
    recorded(*group, call, [&] { submit(*life, group, work, std::move(call.operations)); });
  } else {
    submit(*life, group, work, std::move(call.operations));
  }
  coalesce(work);
  return work;
}

bool ProcessGroupHybrid::is_coalescing() const {
  if (coalescing_threads_.load(std::memory_order_acquire) == 0) return false;
  const std::lock_guard lock(coalescing_mutex_);
  return coalescing_.count(std::this_thread::get_id()) > 0;
}

void ProcessGroupHybrid::coalesce(const WorkPtr& work) {
  if (coalescing_threads_.load(std::memory_order_acquire) == 0) return;
  const std::lock_guard lock(coalescing_mutex_);
  const auto at = coalescing_.find(std::this_thread::get_id());
  if (at != coalescing_.end()) at->second.push_back(work);
}

const WorkHybrid* ProcessGroupHybrid::lock_order(std::unique_lock<std::mutex>& lock, const Life& life) {
  lock.lock();
  const WorkHybrid* const parent = WorkHybrid::of_running_callback();
  if (parent == nullptr || !parent->overtaken(life.orders)) return nullptr;
  lock.unlock();
  return parent;
}

void ProcessGroupHybrid::refuse_without_order(const std::shared_ptr<engine::Group>& group, const std::string& work,
                                              const WorkHybrid& parent) const {
  const std::string message =
      "hybridps: " + work + " is refused. A callback of " + parent.describe() +
      " issued it, but the program has issued later operations of this group already. The order would differ between "
      "ranks. What to do: let such callbacks finish before you issue more (with a DDP hook: one bucket, bucket_cap_mb "
      "larger than the model), or give the callbacks a group of their own";
  group->abort(message);
  C10_THROW_ERROR(DistBackendError, message);
}

void ProcessGroupHybrid::submit(Life& life, const std::shared_ptr<engine::Group>& group, const WorkHybrid::Ptr& work,
                                std::vector<worker::Operation> operations) {
  const bool collective = operations.front().kind != schedule::Kind::kPointToPoint;
  std::unique_lock lock(issue_mutex_, std::defer_lock);
  if (collective) {
    if (const WorkHybrid* const parent = lock_order(lock, life)) refuse_without_order(group, work->describe(), *parent);
    work->set_order(order_of_this_lane(life));
    for (auto& operation : operations) {
      const auto& pieces = operation.kind == schedule::Kind::kAllReduce ? operation.output : operation.input;
      life.compression->choose(operation, pieces.empty() ? nullptr : pieces.front().data,
                               torch::autograd::get_current_graph_task_id());
    }
    if (auto vote = life.compression->take_vote())
      group->submit(std::move(vote->operation), std::move(vote->done), false);
  }
  for (auto& operation : operations) {
    const auto sequence = group->submit(
        std::move(operation),
        [part = work](const worker::Outcome& outcome) mutable { WorkHybrid::part_done(std::move(part), outcome); },
        work->waited_for());
    work->set_sequence(sequence);
  }
}

void ProcessGroupHybrid::recorded(const engine::Group& group, const Call& call, const std::function<void()>& submit) {
  const auto elements = [](const std::vector<at::Tensor>& tensors) {
    std::int64_t sum = 0;
    for (const auto& tensor : tensors) sum += tensor.is_sparse() ? tensor._nnz() : tensor.numel();
    return sum;
  };
  const bool point_to_point = call.operations.front().kind == schedule::Kind::kPointToPoint;
  const auto sequence = static_cast<std::int64_t>(group.sequence_submitted()) + (point_to_point ? 0 : 1);
  const at::ScalarType type = !call.inputs.empty()    ? call.inputs.front().scalar_type()
                              : !call.outputs.empty() ? call.outputs.front().scalar_type()
                                                      : at::kByte;
  HYBRIDPS_RECORD(std::make_tuple(sequence, point_to_point), std::make_tuple(pg_uid_, pg_desc_), call.inputs,
                  call.outputs, rank_, call.name, elements(call.inputs), elements(call.outputs), type,
                  call.input_splits, call.output_splits, global_rank_start_, global_rank_stride_, size_,
                  call.asynchronous);
  submit();
}

}  // namespace hybridps::pg
