// Issues operations on CUDA tensors to the engine, through the channels of staging/.
#include <algorithm>
#include <mutex>
#include <string>
#include <utility>

#include <ATen/ops/empty.h>
#include <ATen/record_function.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/graph_task.h>

#include "hybridps/core/config.h"
#include "hybridps/core/log.h"
#include "hybridps/pg/accelerator.h"
#include "hybridps/pg/errors.h"
#include "hybridps/pg/process_group_hybrid.h"
#include "hybridps/pg/stream_work.h"
#include "hybridps/pg/work_cast.h"

namespace hybridps::pg {

namespace {

/// Null if the device has no memory left; then the CPU encodes.
std::byte* memory_for_codes(StreamWork::Held& held, c10::Device device, std::uint64_t bytes) {
  try {
    const at::Tensor memory = at::empty({static_cast<std::int64_t>(bytes)}, at::device(device).dtype(at::kByte));
    held.buffers().hold(memory);
    return static_cast<std::byte*>(memory.mutable_data_ptr());
  } catch (const c10::OutOfMemoryError&) {
    return nullptr;
  }
}

/// With the first channel on a GPU and not earlier: asking loads the driver, and a process that has loaded it cannot
/// fork children that use CUDA.
void tell_of_cuda(c10::Device device) {
  static std::once_flag said;
  if (!device.is_cuda() || !core::log_enabled(core::LogLevel::kInfo)) return;
  std::call_once(said, [] { core::log_info("CUDA path: ", describe_cuda_support()); });
}

}  // namespace

std::optional<c10::Device> ProcessGroupHybrid::last_device() const {
  const std::lock_guard lock(channels_mutex_);
  return last_device_;
}

core::Result<std::shared_ptr<staging::Channel>> ProcessGroupHybrid::channel_for(
    Life& life, const ChannelKey& key, c10::Device device, const std::shared_ptr<engine::Group>& group) {
  const std::lock_guard lock(channels_mutex_);
  last_device_ = device;
  if (const auto known = life.channels.find(key); known != life.channels.end()) return known->second;
  Accelerator* const accelerator = accelerator_of(device.type());
  if (accelerator == nullptr) return open_device(device).status();
  if (!channel_options_) {
    const auto config = core::Config::from_environment();
    if (!config.is_ok()) return config.status();
    staging::ChannelOptions options;
    options.limits.slice_bytes = config.value().slice_bytes;
    options.staging_bytes_max = config.value().staging_bytes;
    options.direct = config.value().gpudirect;
    blocking_wait_ = config.value().blocking_wait;
    device_codecs_ = config.value().device_codecs;
    local_library_wanted_ = config.value().local_nccl;
    local_library_asked_for_ = local_library_wanted_ && config.value().given.count("HYBRIDPS_LIMITS=local_nccl") > 0;
    channel_options_ = options;
  }
  staging::ChannelOptions options = *channel_options_;
  options.one_stream = key.direction == 2;
  if (key.direction == 0) {
    staging::LocalOptions local;
    local.wanted = local_library_asked_for_;
    local.off = !local_library_wanted_;
    if (auto library = accelerator->open_local_library(); local.off)
      local.why_not = "HYBRIDPS_LIMITS=local_nccl is 0";
    else if (library.is_ok())
      local.library = library.value();
    else
      local.why_not = library.status().message();
    options.local = std::move(local);
    // The ranks of a node agree only once, about one GPU for each rank.
    for (const auto& [other, known] : life.channels)
      if (other.direction == 0 && known->has_local())
        return core::Status(
            core::Code::kUnsupported,
            "this group works on " + known->device().describe() +
                " with NCCL inside the node. The group cannot take tensors of another GPU. What to do: make another "
                "group for these tensors, or set HYBRIDPS_LIMITS=local_nccl=0");
  }
  auto opened = open_device(device);
  if (!opened.is_ok()) return opened.status();
  if (core::Status status = staging::check_not_captured(*opened.value(), current_stream(device)); !status.is_ok())
    return status;
  tell_of_cuda(device);
  auto channel = Process::instance().stager()->open(opened.value(), group, options);
  if (channel.is_ok()) life.channels.emplace(key, channel.value());
  return channel;
}

std::vector<std::shared_ptr<staging::Channel>> ProcessGroupHybrid::channels_of(
    Life& life, const std::vector<worker::Operation>& operations, c10::Device device,
    const std::shared_ptr<engine::Group>& group, const std::string& what) {
  std::vector<std::shared_ptr<staging::Channel>> channels;
  for (const worker::Operation& operation : operations) {
    ChannelKey key;
    key.type = device.type();
    key.device = device.index();
    if (operation.kind == schedule::Kind::kPointToPoint) {
      key.peer = operation.peer;
      key.direction = operation.sending ? 1 : 2;
    }
    auto channel = channel_for(life, key, device, group);
    check_status(channel.status(), what);
    channels.push_back(channel.value());
  }
  return channels;
}

std::byte* ProcessGroupHybrid::scratch_for(const std::shared_ptr<staging::Channel>& channel,
                                           const worker::Operation& operation, c10::Device device,
                                           const std::shared_ptr<engine::Group>& group, Buffers& buffers,
                                           const std::string& what) const {
  core::Result<std::uint64_t> bytes = std::uint64_t{0};
  if (operation.kind != schedule::Kind::kPointToPoint && !channel->is_connected())
    check_status(staging::check_not_captured(channel->device(), current_stream(device)), what);
  const auto ask = [&] {
    bytes = channel->scratch_bytes(operation);
    return bytes.status();
  };
  // The first operation may have to wait for all members.
  if (operation.kind != schedule::Kind::kPointToPoint)
    check_status(channel->is_connected() ? ask() : wait_for(group, ask), what);
  if (bytes.value() == 0) return nullptr;
  const at::Tensor memory = at::empty({static_cast<std::int64_t>(bytes.value())}, at::device(device).dtype(at::kByte));
  buffers.hold(memory);
  return static_cast<std::byte*>(memory.mutable_data_ptr());
}

/// Whether the device encodes what `slice` sends between nodes. `at`: the slice's elements on the device.
bool ProcessGroupHybrid::choose_coding(Life& life, const std::shared_ptr<engine::Group>& group, core::ReduceOp asked,
                                       worker::Operation& slice, const std::byte* at) const {
  // For rails, an average between nodes has become a sum of products (staging/rails.cpp): choose by the caller's op.
  const core::ReduceOp op = std::exchange(slice.op, asked);
  life.compression->choose(slice, at, torch::autograd::get_current_graph_task_id());
  slice.op = op;
  if (auto vote = life.compression->take_vote()) group->submit(std::move(vote->operation), std::move(vote->done));
  return device_codecs_ && slice.coding == wire::Coding::kFull && life.compression->devices_may_encode() &&
         group->may_code();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHybrid::issue_on_stream(Call call, c10::Device device) {
  const auto life = this->life();
  for (auto& operation : call.operations) operation.priority = priority_of(*life, operation);
  const auto group = group_or_throw(*life, call.name);
  for (const auto* tensors : {&call.inputs, &call.outputs})
    for (const at::Tensor& tensor : *tensors)
      TORCH_CHECK(tensor.device() == device, "hybridps::", call.name,
                  ": all tensors of a call must be on one device, got ", device, " and ", tensor.device());
  const std::string what = std::string(call.name) + " of group " + life->context->group_name + " (rank " +
                           std::to_string(rank_) + " of " + std::to_string(size_) + ")";
  const c10::DeviceGuard on_device(device);
  const bool observed = at::hasCallbacks();
  const bool collective = call.operations.front().kind != schedule::Kind::kPointToPoint;

  if (!observed) call.title = nullptr;
  auto held = std::make_shared<StreamWork::Held>(life->context, call.operations.size());
  held->set_extensions(set_timeout(call));
  const auto channels = channels_of(*life, call.operations, device, group, what);
  auto work = c10::make_intrusive<StreamWork>(life->context, call, device,
                                              call.type == c10d::OpType::BARRIER || blocking_wait_, held);

  // Runs after the last copy back, on the out stream: copies into strided tensors.
  std::function<void()> finish;
  const bool open = !collective && is_coalescing();
  if (call.buffers.needs_finish() || call.finish) {
    finish = [held, device, stream = channels.back()->out_stream(), more = std::move(call.finish)] {
      const c10::StreamGuard guard(as_torch_stream(stream, device));
      held->buffers().finish();
      if (more) more();
    };
  }
  held->buffers() = std::move(call.buffers);

  const auto enqueue = [&] {
    // The order of collectives is the order in which they are put on the streams.
    std::unique_lock lock(issue_mutex_, std::defer_lock);
    if (collective)
      if (const WorkHybrid* const parent = lock_order(lock, *life)) refuse_without_order(group, what, *parent);
    std::vector<std::byte*> scratch;
    for (std::size_t i = 0; i < call.operations.size(); ++i)
      scratch.push_back(scratch_for(channels[i], call.operations[i], device, group, held->buffers(), what));
    for (std::size_t i = 0; i < call.operations.size(); ++i) {
      staging::StagingRequest request;
      request.scratch = scratch[i];
      request.operation = std::move(call.operations[i]);
      request.caller = current_stream(device);
      request.what = what;
      if (i + 1 == call.operations.size()) request.finish = std::move(finish);
      request.done = [held](const core::Status& status) { StreamWork::Held::part_over(held, status); };
      request.leave_open = open;
      if (collective) {
        request.code = [this, &life, &group, asked = request.operation.op](worker::Operation& slice,
                                                                           const std::byte* at) {
          return choose_coding(*life, group, asked, slice, at);
        };
        request.codes = [&held, device](std::uint64_t bytes) { return memory_for_codes(*held, device, bytes); };
      }
      auto staged = channels[i]->enqueue(std::move(request));
      check_status(staged.status(), what);
      work->add(std::move(staged).value(), channels[i]);
    }
  };
  if (observed) {
    recorded(*group, call, enqueue);
  } else {
    enqueue();
  }
  work->enqueued();
  coalesce(work);
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupHybrid::combine_all(std::vector<WorkPtr> works) {
  c10::intrusive_ptr<StreamWork> first;
  for (const auto& work : works)
    if (!first) first = work_cast<StreamWork>(work);
  if (!first) {
    std::vector<WorkHybrid::Ptr> on_host;
    for (const auto& work : works) on_host.push_back(work_cast<WorkHybrid>(work));
    return combine(life()->context, std::move(on_host));
  }
  const auto context = life()->context;
  auto combined = c10::make_intrusive<StreamWork>(context, Call::of_coalesced(), first->device(), /*blocks_host=*/false,
                                                  std::make_shared<StreamWork::Held>(context, 1));
  combined->join(works);
  combined->complete_enqueue();
  return combined;
}

}  // namespace hybridps::pg
