#include "hybridps/staging/channel.h"

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <utility>

#include "hybridps/core/check.h"
#include "hybridps/core/log.h"
#include "hybridps/staging/coded.h"
#include "hybridps/staging/local.h"
#include "hybridps/staging/pairs.h"
#include "hybridps/staging/rails.h"
#include "hybridps/staging/stager.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;
using device::CopyWay;

constexpr std::uint64_t kFlagBytes = 4096;
constexpr std::uint64_t kReadyAt = 0;
constexpr std::uint64_t kDoneAt = 128;  // each flag has its own cache line
constexpr std::uint64_t kEndedAt = 256;
constexpr std::uint64_t kProbeAt = 384;

}  // namespace

Status check_not_captured(device::Device& device, device::DeviceStream stream) {
  const auto capturing = device.is_capturing(stream);
  if (!capturing.is_ok() || !capturing.value()) return capturing.status();
  return Status(Code::kUnsupported,
                "the current stream is recording a CUDA graph, and an operation that crosses the network cannot be "
                "replayed by the GPU alone; take it out of the captured region");
}

Status group_is_gone(const std::string& what) {
  return Status(Code::kClosed, what + ": its process group was destroyed before it could begin");
}

// Channel: life -------------------------------------------------------------------------------------------------------

Channel::Channel(std::shared_ptr<Stager> stager, std::shared_ptr<device::Device> device,
                 std::shared_ptr<DevicePool> pool, std::weak_ptr<engine::Group> group, ChannelOptions options)
    : stager_(std::move(stager)),
      device_(std::move(device)),
      group_(std::move(group)),
      options_(options),
      pool_(std::move(pool)) {
  pool_->channels().fetch_add(1);
  count_streams(options_.one_stream ? 1 : 2);
  opened_ = open();
  if (opened_.is_ok()) return;
  // The other ranks would wait for this one.
  if (const auto joined = group_.lock())
    joined->abort(std::string(opened_.message()) + " (rank " + std::to_string(joined->rank()) + ")");
}

void Channel::count_streams(int more) {
  streams_that_wait_ += more;
  pool_->streams_that_wait().fetch_add(more);
}

core::Status Channel::open() {
  auto in = pool_->take_stream();
  if (!in.is_ok()) return in.status();
  in_ = out_ = in.value();
  if (!options_.one_stream) {
    auto out = pool_->take_stream();
    if (!out.is_ok()) return out.status();
    out_ = out.value();
  }
  auto flags = pool_->take_host(kFlagBytes);
  if (!flags.is_ok())
    return Status(flags.status().code(), std::string(flags.status().message()) +
                                             "; CUDA tensors need a page of it at least: see the memory limit of the "
                                             "container");
  flags_ = flags.value();
  std::memset(flags_.data, 0, kFlagBytes);
  ready_ = flags_.flag_at(kReadyAt);
  done_ = flags_.flag_at(kDoneAt);
  ended_ = flags_.flag_at(kEndedAt);
  const Status status = pool_->check_flags(in_, flags_.flag_at(kProbeAt));
  if (status.code() != Code::kUnsupported) return status;
  return Status(status.code(), "streams of " + device_->describe() +
                                   " cannot write or wait for words of host memory, as with confidential computing: " +
                                   std::string(status.message()) + "; use backend \"cpu:hybridps,cuda:nccl\"");
}

/// What a channel leaves behind. Others may use the remains when the streams have run out of work. An operation that
/// could be put on the streams only in part leaves work there, and no flag reports the end of this work.
struct Channel::Remains {
  std::shared_ptr<DevicePool> pool;
  std::vector<device::DeviceStream> streams;
  std::vector<device::HostMemory> memories;
  std::vector<std::shared_ptr<DirectRing>> rings;
  std::shared_ptr<Local> local;
  std::vector<device::DeviceEvent> tails;
  bool recorded = false;

  /// Whether the streams have run out of work. Calls the driver.
  bool end() {
    device::Device& device = pool->device();
    if (!std::exchange(recorded, true)) {
      for (const device::DeviceStream stream : streams) {
        auto tail = pool->take_event();
        if (!tail.is_ok()) break;  // the device has failed: no work on it will be done any more
        tails.push_back(tail.value());
        if (!device.record(tail.value(), stream).is_ok()) break;
      }
    }
    for (const device::DeviceEvent tail : tails)
      if (const auto done = device.is_done(tail); done.is_ok() && !done.value()) return false;
    local.reset();
    rings.clear();
    for (const device::DeviceEvent tail : tails) pool->give_back(tail);
    for (const device::DeviceStream stream : streams) pool->give_back(stream);
    for (const device::HostMemory& memory : memories) pool->give_back(memory);
    return true;
  }
};

// A completion in the engine's loop may drop the last reference, so the destructor makes no driver call.
Channel::~Channel() {
  pool_->channels().fetch_sub(1);
  pool_->streams_that_wait().fetch_sub(streams_that_wait_);
  auto remains = std::make_shared<Remains>();
  remains->pool = pool_;
  if (in_.native != nullptr) remains->streams.push_back(in_);
  if (out_.native != nullptr && out_.native != in_.native) remains->streams.push_back(out_);
  for (const device::HostMemory& memory : {memory_, flags_})
    if (memory.data != nullptr) remains->memories.push_back(memory);
  for (const Retired& retired : retired_) remains->memories.push_back(retired.memory);
  remains->rings = std::move(smaller_direct_);
  remains->rings.push_back(std::move(direct_));
  // Work that hangs within the node would not end by itself.
  if (local_ && (!broken_.is_ok() || !local_failed_.is_ok())) local_->abort();
  remains->local = std::move(local_);
  stager_->bury([remains = std::move(remains)] { return remains->end(); });
}

class Channel::Putting {
 public:
  explicit Putting(Channel& channel) : channel_(channel) {
    const std::lock_guard progress(channel_.progress_mutex_);
    ++channel_.putting_;
  }
  ~Putting() {
    const std::lock_guard progress(channel_.progress_mutex_);
    --channel_.putting_;
  }

 private:
  Channel& channel_;
};

std::uint64_t Channel::staging_bytes() const {
  const std::lock_guard lock(mutex_);
  return ring_.bytes();
}

bool Channel::is_direct() const {
  const std::lock_guard lock(progress_mutex_);
  return direct_ != nullptr;
}

// Channel: what the caller does ---------------------------------------------------------------------------------------

core::Result<std::shared_ptr<Staged>> Channel::enqueue(StagingRequest request) {
  if (!opened_.is_ok()) return opened_;
  const auto group = group_.lock();
  if (!group) return group_is_gone(request.what);
  if (Status status = check_not_captured(*device_, request.caller); status.code() == Code::kUnsupported)
    return Status(status.code(), request.what + ": " + std::string(status.message()));
  else if (!status.is_ok())
    return status;
  const std::lock_guard lock(mutex_);
  if (!broken_.is_ok()) return broken_;
  if (Status status = group->status(); !status.is_ok()) return status;
  {
    const std::lock_guard progress(progress_mutex_);
    if (const auto failed = std::exchange(failed_, nullptr); failed && !failed->is_told()) {
      const Status why = failed->status();
      return Status(why.code(), request.what +
                                    " was not begun: an earlier operation of the group failed after its caller "
                                    "had gone on: " +
                                    std::string(why.message()));
    }
  }
  // The Stager must watch the channel while nothing is on the streams yet. The calls below may be held up (by a full
  // queue, a driver's lock, or launches that wait for their end) after the device has begun to wait for the Stager's
  // thread.
  const Putting putting(*this);
  if (Status status = stager_->begin(shared_from_this()); !status.is_ok())
    return Status(status.code(), request.what + ": " + std::string(status.message()));
  // Other kinds, such as a barrier, may run on the GPUs of only some ranks, so these kinds do not ask.
  const bool asks = has_rails(request.operation.kind);
  if (Status status = asks ? agree(*group, request.operation.timeout) : Status(); !status.is_ok()) {
    break_down(status, group.get());
    return status;
  }
  auto staged = std::make_shared<Staged>(shared_from_this(), pool_);
  Status status = put(staged, request, *group);
  if (status.is_ok() && !request.leave_open) status = end(*staged);
  if (!status.is_ok()) {
    staged->forget();
    // The reason for the library's abort says more than "aborted".
    if (Status failed = group->status(); !failed.is_ok()) status = failed;
    const std::lock_guard progress(progress_mutex_);
    if (!local_failed_.is_ok()) status = local_failed_;
  }
  if (!status.is_ok()) {
    break_down(status, group.get());
    return status;
  }
  return staged;
}

core::Status Channel::agree(engine::Group& group, std::chrono::milliseconds timeout) {
  if (!options_.local || std::exchange(agreed_, true)) return {};
  auto local = Local::agree(group, *pool_, device_, *options_.local, options_.limits, timeout);
  if (!local.is_ok()) return local.status();
  if (local.value() && local.value()->topology().nodes() == 1)
    count_streams(-streams_that_wait_);  // nothing waits for the network (but barriers, and what a library cannot sum)
  else if (local.value())
    count_streams(2);  // NCCL's own, one per communicator, which wait for its kernels
  stager_->warn_of_few_queues(*pool_);
  const std::lock_guard progress(progress_mutex_);
  local_ = local.value();
  return {};
}

core::Status Channel::connect(std::chrono::milliseconds timeout) {
  if (!opened_.is_ok()) return opened_;
  const auto group = group_.lock();
  if (!group) return group_is_gone("connecting the GPUs of a node");
  const std::lock_guard lock(mutex_);
  if (!broken_.is_ok()) return broken_;
  Status status = agree(*group, timeout);
  if (!status.is_ok()) break_down(status, group.get());
  return status;
}

bool Channel::is_connected() const {
  const std::lock_guard lock(mutex_);
  return !options_.local || agreed_;
}

core::Result<std::uint64_t> Channel::scratch_bytes(const worker::Operation& operation) {
  if (!options_.local || !has_rails(operation.kind)) return std::uint64_t{0};
  if (Status status = connect(operation.timeout); !status.is_ok()) return status;
  const std::lock_guard lock(mutex_);
  if (!local_ || !local_->takes(operation)) return std::uint64_t{0};
  return staging::scratch_bytes(operation, local_->topology(), local_->limits());
}

bool Channel::has_local() const {
  const std::lock_guard lock(progress_mutex_);
  return local_ != nullptr;
}

intranode::Patience Channel::patience_until(core::Deadline deadline) const {
  return {deadline, [group = group_] {
            const auto alive = group.lock();
            return alive ? alive->status() : Status(Code::kClosed, "the process group was destroyed");
          }};
}

/// Ranks of a node check nothing when their GPUs meet, and nodes see only each other's sums. So the engine compares the
/// calls.
core::Status Channel::witness(const std::shared_ptr<Staged>& staged, const worker::Operation& operation,
                              engine::Group& group) {
  group.submit(witness_of(operation, local_->topology()),
               [channel = shared_from_this(), staged](const worker::Outcome& outcome) {
                 if (outcome.status.is_ok()) return;
                 staged->set_failed(outcome.status);
                 {
                   const std::lock_guard progress(channel->progress_mutex_);
                   channel->fail_local(outcome.status);
                 }
                 channel->stager_->activate(channel);
               });
  return {};
}

core::Status Channel::put(const std::shared_ptr<Staged>& staged, StagingRequest& request, engine::Group& group) {
  auto start = pool_->take_event();
  if (!start.is_ok()) return start.status();
  staged->start_ = start.value();
  auto end = DevicePool::share_event(pool_);
  if (!end.is_ok()) return end.status();
  staged->end_ = end.value();
  const auto timeout = request.operation.timeout;
  staged->timeout_ = timeout;
  request.operation.issued_at = core::Clock::now();
  staged->deadline_ =
      timeout.count() > 0 ? core::Deadline::after(timeout, request.operation.issued_at) : core::Deadline::never();
  staged->what_ = request.what;
  staged->finish_ = std::move(request.finish);

  const bool rails = local_ && local_->takes(request.operation);
  const SliceLimits& limits = local_ ? local_->limits() : options_.limits;
  if (rails && is_pairwise(request.operation.kind))
    if (const Status status = check_pairs(request.operation, local_->topology()); !status.is_ok())
      return Status(status.code(), request.what + ": " + std::string(status.message()));
  std::vector<Slice> slices = rails ? cut_for_rails(request.operation, local_->topology(), limits, request.scratch)
                                    : cut(request.operation, group.rank(), group.size(), limits);
  if (rails) {
    if (request.scratch == nullptr && staging::scratch_bytes(request.operation, local_->topology(), limits) > 0)
      return Status(Code::kInvalidArgument, request.what + ": no scratch memory was given");
    if (Status status = witness(staged, request.operation, group); !status.is_ok()) return status;
  }
  choose_codes(slices, request, group, rails);
  make_direct(slices, request.operation, group, rails);
  std::uint64_t largest_pinned = 0;
  std::uint64_t together_pinned = 0;
  for (const Slice& slice : slices) {
    largest_pinned = std::max(largest_pinned, slice.pinned_bytes());
    together_pinned += slice.pinned_bytes();
  }
  if (Status status = make_room(largest_pinned, together_pinned); !status.is_ok()) return status;

  if (Status status = device_->record(staged->start_, request.caller); !status.is_ok()) return status;
  {
    const std::lock_guard progress(progress_mutex_);
    staged->done_ = std::move(request.done);
  }
  staged->last_number_ = numbers_;
  if (rails && !slices.front().crosses) return put_within(staged, slices.front());
  if (Status status = device_->wait(in_, staged->start_); !status.is_ok()) return status;
  if (local_ && request.operation.kind == schedule::Kind::kBarrier) {
    // A barrier covers everything that was put before it, and the engine does not see all of this.
    auto before = pool_->take_event();
    if (!before.is_ok()) return before.status();
    Status status = device_->record(before.value(), out_);
    if (status.is_ok()) status = device_->wait(in_, before.value());
    pool_->give_back(before.value());
    if (!status.is_ok()) return status;
  }
  staged->last_number_ = numbers_ + slices.size();
  ways_open_ = slices.size();
  // Half of the ring is the next operation's, which then does not wait for this one's end.
  frees_each_ = !options_.one_stream && 2 * together_pinned > ring_.bytes();
  for (Slice& slice : slices)
    if (Status status = put_in(staged, std::move(slice), group); !status.is_ok()) return status;
  return {};
}

/// On one node: nothing is staged, and no flag is used.
core::Status Channel::put_within(const std::shared_ptr<Staged>& staged, const Slice& slice) {
  if (Status status = device_->wait(out_, staged->start_); !status.is_ok()) return status;
  if (Status status = device_->copy_all(out_, CopyWay::kWithin, slice.moves); !status.is_ok()) return status;
  return local_->run(slice.after, intranode::Leg::kOut, out_, patience_until(staged->deadline_));
}

core::Status Channel::put_in(const std::shared_ptr<Staged>& staged, Slice slice, engine::Group& group) {
  const std::uint64_t number = ++numbers_;
  while (!open_ways_.empty() && open_ways_.front().number + ways_open_ <= number)
    if (Status status = put_next_out(); !status.is_ok()) return status;
  const Ring::Place place = ring_.take(slice.pinned_bytes(), number);
  std::byte* const base = memory_.data + place.offset;
  if (Status status = wait_for_place(place.displaced); !status.is_ok()) return status;
  DirectRing::Place direct;
  if (slice.is_direct()) {
    direct = direct_->take(slice.device_bytes, number);
    while (!open_ways_.empty() && open_ways_.front().number <= direct.displaced)  // as in wait_for_place()
      if (Status status = put_next_out(); !status.is_ok()) return status;
    if (direct.displaced > 0)
      if (Status status = device_->wait_flag(in_, direct_->released(), word_of(direct.displaced)); !status.is_ok())
        return status;
  }
  if (slice.before.kind != LocalStep::StepKind::kNone)
    if (Status status = local_->run(slice.before, intranode::Leg::kIn, in_, patience_until(staged->deadline_));
        !status.is_ok())
      return status;
  for (const Slice::Coded& coded : slice.coded)
    if (Status status = device_->encode_int8(in_, coded.codes, coded.elements, coded.count, slice.factor);
        !status.is_ok())
      return status;
  std::byte* const to = slice.is_direct() ? direct.data : base;
  std::vector<device::CopyRun> copies;
  for (const Copy& copy : slice.in) copies.push_back({to + copy.offset, copy.device, copy.bytes});
  if (Status status = device_->copy_all(in_, slice.is_direct() ? CopyWay::kWithin : CopyWay::kToHost, copies);
      !status.is_ok())
    return status;
  const bool collective = slice.operation.kind != schedule::Kind::kPointToPoint;
  WaitingSlice waiting{number, collective ? group.reserve() : 0, {}, staged, {}};
  for (const Copy& copy : slice.out) waiting.results.pieces.push_back({base + copy.offset, copy.bytes});
  // Messages are bytes on the wire, and codes have a scale in front that all bits set make NaN.
  const core::DType elements = slice.operation.elements;
  const core::DType dtype = elements != core::DType::kBytes ? elements : slice.operation.dtype;
  waiting.results.mark = slice.operation.coded ? 0xff : mark_of(dtype);
  slice.bind(base, direct.data);
  slice.operation.device_memory = std::move(direct.held);
  waiting.operation = std::move(slice.operation);
  {
    const std::lock_guard progress(progress_mutex_);
    waiting_.push_back(std::move(waiting));
    slices_done_.push_back(false);
  }
  if (Status status = device_->write_flag(in_, ready_, word_of(number)); !status.is_ok()) return status;
  if (Status status = device_->copy_all(in_, CopyWay::kWithin, slice.moves); !status.is_ok()) return status;
  if (slice.beside.kind != LocalStep::StepKind::kNone)
    if (Status status = local_->run(slice.beside, intranode::Leg::kIn, in_, patience_until(staged->deadline_));
        !status.is_ok())
      return status;
  const bool has_place = slice.pinned_bytes() > 0;
  open_ways_.push_back({number, has_place, has_place && frees_each_, std::move(slice.out), base, std::move(slice.coded),
                        std::move(slice.after), staged->deadline_});
  return {};
}

core::Status Channel::wait_for_place(std::uint64_t number) {
  // The slice's way back must be on the out stream by now: a stream does not wait for an event that is not recorded
  // yet.
  while (!open_ways_.empty() && open_ways_.front().number <= number)
    if (Status status = put_next_out(); !status.is_ok()) return status;
  if (options_.one_stream || number <= free_until_) return {};
  while (!freed_.empty() && freed_.front().until < number) freed_.pop_front();
  if (freed_.empty())  // the operation's end is not on the out stream yet
    if (Status status = record_freed(); !status.is_ok()) return status;
  if (Status status = device_->wait(in_, *freed_.front().after); !status.is_ok()) return status;
  free_until_ = freed_.front().until;
  freed_.pop_front();
  return {};
}

core::Status Channel::record_freed() {
  auto after = DevicePool::share_event(pool_);
  if (!after.is_ok()) return after.status();
  if (Status status = device_->record(*after.value(), out_); !status.is_ok()) return status;
  freed_.push_back({placed_out_, std::move(after).value()});
  return {};
}

core::Status Channel::put_next_out() {
  const WayBack way = std::move(open_ways_.front());
  open_ways_.pop_front();
  // A failed slice is done even if the in stream has not reached it. The end must come after both streams. One event
  // stands for all ways in that are on the in stream now: the copies in are as fast as the copies out, and faster than
  // the network, so the first copy out loses nothing by waiting for the last copy in.
  if (!options_.one_stream && way.number > arrived_) {
    auto arrived = pool_->take_event();
    if (!arrived.is_ok()) return arrived.status();
    Status status = device_->record(arrived.value(), in_);
    if (status.is_ok()) status = device_->wait(out_, arrived.value());
    pool_->give_back(arrived.value());
    if (!status.is_ok()) return status;
    arrived_ = open_ways_.empty() ? way.number : open_ways_.back().number;
  }
  if (Status status = device_->wait_flag(out_, done_, word_of(way.number)); !status.is_ok()) return status;
  std::vector<device::CopyRun> copies;
  for (const Copy& copy : way.copies) copies.push_back({copy.device, way.base + copy.offset, copy.bytes});
  if (Status status = device_->copy_all(out_, CopyWay::kToDevice, copies); !status.is_ok()) return status;
  if (way.has_place) placed_out_ = way.number;
  if (way.frees)
    if (Status status = record_freed(); !status.is_ok()) return status;
  for (const Slice::Coded& coded : way.coded)
    if (Status status = device_->decode_int8(out_, coded.elements, coded.codes, coded.count); !status.is_ok())
      return status;
  if (way.after.kind == LocalStep::StepKind::kNone) return {};
  return local_->run(way.after, intranode::Leg::kOut, out_, patience_until(way.deadline));
}

core::Status Channel::end(Staged& staged) {
  if (std::exchange(staged.ended_, true)) return {};
  while (!open_ways_.empty() && open_ways_.front().number <= staged.last_number_)
    if (Status status = put_next_out(); !status.is_ok()) return status;
  if (auto finish = std::exchange(staged.finish_, nullptr)) finish();
  if (Status status = device_->record(*staged.end_, out_); !status.is_ok()) return status;
  if (!options_.one_stream && placed_out_ > (freed_.empty() ? free_until_ : freed_.back().until))
    freed_.push_back({placed_out_, staged.end_});
  staged.end_number_ = ++ends_;
  if (Status status = device_->write_flag(out_, ended_, word_of(staged.end_number_)); !status.is_ok()) return status;
  const std::lock_guard progress(progress_mutex_);
  staged_.push_back(staged.shared_from_this());
  return {};
}

core::Status Channel::complete_enqueue(Staged& staged) {
  const std::lock_guard lock(mutex_);
  if (staged.end_number_ > 0) return {};
  if (!broken_.is_ok()) return broken_;
  const Putting putting(*this);
  stager_->activate(shared_from_this());
  Status status = end(staged);
  if (!status.is_ok()) break_down(status, group_.lock().get());
  return status;
}

/// mutex_ held. Null: the group is not open yet.
const schedule::Topology* Channel::topology_of(engine::Group& group) {
  if (!topology_) {
    std::vector<int> node_of = group.node_of();
    if (node_of.empty()) return nullptr;
    topology_.emplace(std::move(node_of), group.rank());
  }
  return &*topology_;
}

/// mutex_ held. Chooses the coding of slices between nodes, and which slices the device encodes.
void Channel::choose_codes(std::vector<Slice>& slices, const StagingRequest& request, engine::Group& group,
                           bool rails) {
  if (!request.code) return;
  std::vector<Slice*> here;
  std::uint64_t bytes = 0;
  for (Slice& slice : slices) {
    if (!slice.crosses) continue;
    const bool may = request.code(slice.operation, slice.in.empty() ? nullptr : slice.in.front().device);
    if (!may || !request.codes) continue;
    const schedule::Topology* const topology = topology_of(group);
    if (topology == nullptr || !can_be_coded(slice, *topology, rails)) continue;
    here.push_back(&slice);
    bytes += room_for_codes(slice);
  }
  if (here.empty() || !can_encode()) return;
  std::byte* memory = request.codes(bytes);
  if (memory == nullptr) return;
  for (Slice* slice : here) {
    const std::uint64_t room = room_for_codes(*slice);
    code_on_device(*slice, memory, group.size());
    memory += room;
  }
}

bool Channel::can_encode() {
  if (can_encode_) return *can_encode_;
  const Status status = device_->prepare_int8();
  can_encode_ = status.is_ok();
  static std::atomic<bool> told{false};  // told once for all channels
  if (!status.is_ok() && !told.exchange(true))
    core::log_info("the CPU encodes int8, from pinned memory: ", device_->describe(), ": ", status.message());
  return *can_encode_;
}

/// mutex_ held. Ranks no longer agree on what was issued, so the group ends here.
void Channel::break_down(const Status& status, engine::Group* group) {
  if (!broken_.is_ok()) return;
  broken_ = status;
  expire(status, group);
}

}  // namespace hybridps::staging
