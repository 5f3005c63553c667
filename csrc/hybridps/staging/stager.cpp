#include "hybridps/staging/stager.h"

#include <algorithm>
#include <cstdlib>

#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"

namespace hybridps::staging {
namespace {

using core::Code;
using core::Status;

constexpr std::uint64_t kFlagBytes = 4096;
constexpr std::uint64_t kReadyAt = 0;
constexpr std::uint64_t kDoneAt = 128;  // a cache line of its own
constexpr std::uint64_t kStagingBytesMin = std::uint64_t{1} << 20;
constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kNapForStream = std::chrono::microseconds(20);
constexpr auto kNapForEnd = std::chrono::microseconds(200);

std::uint32_t word_of(std::uint64_t number) { return static_cast<std::uint32_t>(number); }

std::string seconds_text(core::Duration duration) {
  const auto tenths = std::chrono::duration_cast<std::chrono::milliseconds>(duration).count() / 100;
  return std::to_string(tenths / 10) + "." + std::to_string(tenths % 10) + " s";
}

void free_memory(device::Device& device, const device::HostMemory& memory) noexcept {
  if (memory.pinned)
    device.free_host(memory);
  else
    std::free(memory.data);
}

Status closed(const std::string& what) {
  return Status(Code::kClosed, what + ": its process group was destroyed before it could begin");
}

}  // namespace

// EventPool -----------------------------------------------------------------------------------------------------------

EventPool::~EventPool() {
  for (const device::Event event : free_) device_->destroy(event);
}

core::Result<device::Event> EventPool::take() {
  {
    const std::lock_guard lock(mutex_);
    if (!free_.empty()) {
      const device::Event event = free_.back();
      free_.pop_back();
      return event;
    }
  }
  return device_->make_event();
}

void EventPool::give_back(device::Event event) {
  if (event.native == nullptr) return;
  const std::lock_guard lock(mutex_);
  free_.push_back(event);
}

// Staged --------------------------------------------------------------------------------------------------------------

Staged::Staged(std::shared_ptr<Channel> channel, std::shared_ptr<EventPool> events) noexcept
    : channel_(channel), events_(std::move(events)) {}

Staged::~Staged() {
  events_->give_back(start_);
  events_->give_back(end_);
}

core::Status Staged::complete_enqueue() {
  const auto channel = channel_.lock();
  return channel ? channel->complete_enqueue(*this) : Status();
}

core::Status Staged::wait_on(device::Stream stream) {
  if (is_over()) return {};
  const auto channel = channel_.lock();
  if (!channel) return {};  // it outlives what is under way on it
  if (Status status = channel->complete_enqueue(*this); !status.is_ok()) return status;
  return channel->device_->wait(stream, end_);
}

bool Staged::is_over() const {
  const std::lock_guard lock(mutex_);
  return over_;
}

core::Status Staged::status() {
  const std::lock_guard lock(mutex_);
  if (!status_.is_ok()) told_ = true;
  return status_;
}

bool Staged::has_failed() const {
  const std::lock_guard lock(mutex_);
  return !status_.is_ok();
}

bool Staged::is_told() const {
  const std::lock_guard lock(mutex_);
  return told_;
}

bool Staged::wait(core::TimePoint until) {
  std::unique_lock lock(mutex_);
  const auto settled = [this] { return over_ || !status_.is_ok(); };
  if (until == core::TimePoint::max()) {
    changed_.wait(lock, settled);
    return true;
  }
  return changed_.wait_until(lock, until, settled);
}

int Staged::source_rank() const {
  const std::lock_guard lock(mutex_);
  return source_rank_;
}

void Staged::set_failed(const Status& status) {
  const std::lock_guard lock(mutex_);
  if (status_.is_ok()) status_ = status;
  changed_.notify_all();
}

void Staged::slice_done(const worker::Outcome& outcome) {
  if (!outcome.status.is_ok()) set_failed(outcome.status);
  if (outcome.source_rank < 0) return;
  const std::lock_guard lock(mutex_);
  source_rank_ = outcome.source_rank;
}

void Staged::set_over() {
  core::OnceFn<void(const Status&)> done;
  Status status;
  {
    const std::lock_guard lock(mutex_);
    over_ = true;
    done = std::move(done_);
    status = status_;
    changed_.notify_all();
  }
  done(status);
}

// Channel: life -------------------------------------------------------------------------------------------------------

Channel::Channel(std::shared_ptr<Stager> stager, std::shared_ptr<device::Device> device,
                 std::weak_ptr<engine::Group> group, ChannelOptions options)
    : stager_(std::move(stager)),
      device_(std::move(device)),
      group_(std::move(group)),
      options_(options),
      events_(std::make_shared<EventPool>(device_)) {
  opened_ = open();
}

core::Status Channel::open() {
  auto in = device_->make_stream();
  if (!in.is_ok()) return in.status();
  in_ = out_ = in.value();
  if (!options_.one_stream) {
    auto out = device_->make_stream();
    if (!out.is_ok()) return out.status();
    out_ = out.value();
  }
  auto flags = device_->allocate_host(kFlagBytes);
  if (!flags.is_ok())
    return Status(flags.status().code(),
                  std::string(flags.status().message()) + "; CUDA tensors need a page of it at least: see `ulimit -l`");
  flags_ = flags.value();
  ready_ = flags_.flag_at(kReadyAt);
  done_ = flags_.flag_at(kDoneAt);
  return {};
}

// The last reference may be dropped by a completion in the engine's loop, which must not wait for a driver.
Channel::~Channel() {
  std::vector<device::HostMemory> memories = {memory_, flags_};
  for (const Retired& retired : retired_) {
    memories.push_back(retired.memory);
    events_->give_back(retired.over);
  }
  for (const auto& [number, event] : over_) events_->give_back(event);
  for (const Way& way : open_ways_) events_->give_back(way.arrived);
  stager_->bury([device = device_, in = in_, out = out_, memories = std::move(memories)] {
    if (in.native != nullptr) device->destroy(in);
    if (out.native != nullptr && out.native != in.native) device->destroy(out);
    for (const device::HostMemory& memory : memories) free_memory(*device, memory);
  });
}

std::uint64_t Channel::staging_bytes() const {
  const std::lock_guard lock(mutex_);
  return memory_.bytes;
}

// Channel: what the caller does ---------------------------------------------------------------------------------------

core::Result<std::shared_ptr<Staged>> Channel::enqueue(Request request) {
  if (!opened_.is_ok()) return opened_;
  const auto group = group_.lock();
  if (!group) return closed(request.what);
  auto capturing = device_->is_capturing(request.caller);
  if (!capturing.is_ok()) return capturing.status();
  if (capturing.value())
    return Status(Code::kUnsupported,
                  request.what +
                      ": the current stream is recording a CUDA graph, and an operation that crosses the "
                      "network cannot be replayed by the GPU alone; take it out of the captured region");
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
  auto staged = std::make_shared<Staged>(shared_from_this(), events_);
  Status status = put(staged, request, *group);
  if (status.is_ok() && !request.leave_open) status = end(*staged);
  if (!status.is_ok()) {
    break_down(status, group.get());
    return status;
  }
  stager_->activate(shared_from_this());
  return staged;
}

core::Status Channel::put(const std::shared_ptr<Staged>& staged, Request& request, engine::Group& group) {
  for (device::Event* event : {&staged->start_, &staged->end_}) {
    auto taken = events_->take();
    if (!taken.is_ok()) return taken.status();
    *event = taken.value();
  }
  const auto timeout = request.operation.timeout;
  staged->timeout_ = timeout;
  request.operation.issued_at = core::Clock::now();
  staged->deadline_ =
      timeout.count() > 0 ? core::Deadline::after(timeout, request.operation.issued_at) : core::Deadline::never();
  staged->what_ = request.what;
  staged->finish_ = std::move(request.finish);

  std::vector<Slice> slices = cut(request.operation, group.rank(), group.size(), options_.limits);
  std::uint64_t largest = 0;
  std::uint64_t together = 0;
  for (const Slice& slice : slices) {
    largest = std::max(largest, slice.staging_bytes);
    together += slice.staging_bytes;
  }
  if (Status status = make_room(largest, together); !status.is_ok()) return status;

  if (Status status = device_->record(staged->start_, request.caller); !status.is_ok()) return status;
  if (Status status = device_->wait(in_, staged->start_); !status.is_ok()) return status;
  staged->last_number_ = numbers_ + slices.size();
  {
    const std::lock_guard progress(progress_mutex_);
    staged->done_ = std::move(request.done);
  }
  for (Slice& slice : slices)
    if (Status status = put_in(staged, std::move(slice), group); !status.is_ok()) return status;
  return {};
}

core::Status Channel::put_in(const std::shared_ptr<Staged>& staged, Slice slice, engine::Group& group) {
  const std::uint64_t number = ++numbers_;
  const Ring::Place place = ring_.take(slice.staging_bytes, number);
  std::byte* const base = memory_.data + place.offset;
  for (const std::uint64_t earlier : place.displaced) {
    // Its end must be on the out stream by now: a stream that waits for an event that is not recorded yet does not wait.
    while (!open_ways_.empty() && open_ways_.front().number <= earlier) {
      if (Status status = put_out(open_ways_.front()); !status.is_ok()) return status;
      open_ways_.pop_front();
    }
    const auto over = over_.find(earlier);
    if (over == over_.end()) continue;
    if (Status status = device_->wait(in_, over->second); !status.is_ok()) return status;
    events_->give_back(over->second);
    over_.erase(over);
  }
  for (const Copy& copy : slice.in)
    if (Status status = device_->copy_to_host(in_, base + copy.offset, copy.device, copy.bytes); !status.is_ok())
      return status;
  const bool collective = slice.operation.kind != schedule::Kind::kPointToPoint;
  Waiting waiting{number, collective ? group.reserve() : 0, {}, staged};
  slice.bind(base);
  waiting.operation = std::move(slice.operation);
  {
    const std::lock_guard progress(progress_mutex_);
    waiting_.push_back(std::move(waiting));
    slices_done_.push_back(false);
  }
  if (Status status = device_->write_flag(in_, ready_, word_of(number)); !status.is_ok()) return status;
  auto arrived = events_->take();
  if (!arrived.is_ok()) return arrived.status();
  open_ways_.push_back({number, std::move(slice.out), base, arrived.value()});
  if (Status status = device_->record(arrived.value(), in_); !status.is_ok()) return status;
  // Memory that is not pinned makes the copies back wait in the call: the slice must be on its way by then.
  if (!memory_.pinned) stager_->activate(shared_from_this());
  return {};
}

core::Status Channel::put_out(const Way& way) {
  auto over = events_->take();
  if (!over.is_ok()) return over.status();
  over_.emplace(way.number, over.value());
  // A slice that failed is done although the in stream has not come to it: what is over must come after both.
  if (out_.native != in_.native)
    if (Status status = device_->wait(out_, way.arrived); !status.is_ok()) return status;
  events_->give_back(way.arrived);
  if (Status status = device_->wait_flag(out_, done_, word_of(way.number)); !status.is_ok()) return status;
  for (const Copy& copy : way.copies)
    if (Status status = device_->copy_to_device(out_, copy.device, way.base + copy.offset, copy.bytes); !status.is_ok())
      return status;
  return device_->record(over.value(), out_);
}

core::Status Channel::end(Staged& staged) {
  if (std::exchange(staged.ended_, true)) return {};
  while (!open_ways_.empty() && open_ways_.front().number <= staged.last_number_) {
    if (Status status = put_out(open_ways_.front()); !status.is_ok()) return status;
    open_ways_.pop_front();
  }
  if (auto finish = std::exchange(staged.finish_, nullptr)) finish();
  if (Status status = device_->record(staged.end_, out_); !status.is_ok()) return status;
  const std::lock_guard progress(progress_mutex_);
  staged_.push_back(staged.shared_from_this());
  return {};
}

core::Status Channel::complete_enqueue(Staged& staged) {
  const std::lock_guard lock(mutex_);
  if (staged.ended_) return {};
  if (!broken_.is_ok()) return broken_;
  Status status = end(staged);
  if (!status.is_ok()) break_down(status, group_.lock().get());
  stager_->activate(shared_from_this());
  return status;
}

core::Status Channel::make_room(std::uint64_t slice_bytes, std::uint64_t operation_bytes) {
  // Twice the largest operation, so that one can be copied while another is on the network; bounded, but for what one
  // slice needs.
  const std::uint64_t wanted = std::max({slice_bytes, std::min(2 * operation_bytes, options_.staging_bytes_max),
                                         std::min(kStagingBytesMin, operation_bytes)});
  if (wanted <= ring_.bytes()) return {};
  std::uint64_t bytes = kStagingBytesMin;
  while (bytes < wanted) bytes *= 2;
  if (wanted <= options_.staging_bytes_max) bytes = std::min(bytes, std::max(wanted, options_.staging_bytes_max));
  const device::HostMemory larger = allocate(bytes);
  if (larger.data == nullptr)
    return Status(Code::kOutOfResources, "no memory for " + std::to_string(bytes) + " bytes of staging");

  // What was in use goes when its last user is through.
  while (!open_ways_.empty()) {
    if (Status status = put_out(open_ways_.front()); !status.is_ok()) return status;
    open_ways_.pop_front();
  }
  if (memory_.data != nullptr) {
    auto over = events_->take();
    if (!over.is_ok()) return over.status();
    if (Status status = device_->record(over.value(), out_); !status.is_ok()) return status;
    const std::lock_guard progress(progress_mutex_);
    retired_.push_back({memory_, over.value()});
  }
  for (const auto& [number, event] : over_) events_->give_back(event);
  over_.clear();
  memory_ = larger;
  ring_ = Ring(bytes);
  return {};
}

device::HostMemory Channel::allocate(std::uint64_t bytes) {
  auto pinned = device_->allocate_host(bytes);
  if (pinned.is_ok()) return pinned.value();
  if (!std::exchange(warned_, true))
    core::log_warn("staging for ", device_->describe(), ": ", pinned.status().message(),
                   "; ordinary memory is used, and calls will wait for the device. Raise `ulimit -l`, or lower "
                   "HYBRIDPS_STAGING_BYTES");
  device::HostMemory memory;
  memory.data = static_cast<std::byte*>(std::aligned_alloc(kFlagBytes, bytes));
  memory.bytes = bytes;
  return memory;
}

/// mutex_ held. Ranks no longer agree on what was issued: the group ends here.
void Channel::break_down(const Status& status, engine::Group* group) {
  if (!broken_.is_ok()) return;
  broken_ = status;
  expire(status, group);
}

// Channel: on the Stager's thread -------------------------------------------------------------------------------------

Channel::Progress Channel::progress(core::TimePoint now) {
  Progress result;
  std::vector<Waiting> ready;
  std::vector<std::shared_ptr<Staged>> over;
  std::vector<Retired> retired;
  Status failure;
  {
    const std::lock_guard lock(progress_mutex_);
    const std::uint32_t reached = ready_.word->load(std::memory_order_acquire);
    while (!waiting_.empty() && device::has_reached(reached, word_of(waiting_.front().number))) {
      ready.push_back(std::move(waiting_.front()));
      waiting_.pop_front();
    }
    if (!waiting_.empty() && waiting_.front().staged->deadline_.has_passed(now)) {
      const Staged& late = *waiting_.front().staged;
      failure = Status(Code::kTimeout, late.what_ + " timed out after " + seconds_text(late.timeout_) + ": " +
                                           device_->describe() +
                                           " has not come to it; see what the program put on the stream before it, and "
                                           "whether that can end, or pass a longer timeout");
    }
    result.waits_for_stream = !waiting_.empty();
    retired = retired_;
  }
  for (Waiting& waiting : ready) submit(std::move(waiting));
  // The driver is asked without the lock, which the engine's loop takes.
  for (bool more = true; more;) {
    std::shared_ptr<Staged> staged;
    {
      const std::lock_guard lock(progress_mutex_);
      if (!staged_.empty()) staged = staged_.front();
    }
    if (!staged) break;
    const auto done = device_->is_done(staged->end_);
    if (!done.is_ok()) failure = done.status();
    more = !done.is_ok() || done.value();
    if (!more) break;  // later ones come later
    over.push_back(std::move(staged));
    const std::lock_guard lock(progress_mutex_);
    staged_.pop_front();
  }
  for (const Retired& old : retired) {
    const auto done = device_->is_done(old.over);
    if (!done.is_ok() || !done.value()) continue;
    free_memory(*device_, old.memory);
    events_->give_back(old.over);
    const std::lock_guard lock(progress_mutex_);
    std::erase_if(retired_, [&](const Retired& other) { return other.memory.data == old.memory.data; });
  }
  result.did = !ready.empty() || !over.empty();
  if (!failure.is_ok()) {
    for (const auto& staged : over) staged->set_failed(failure);
    expire(failure, group_.lock().get());
  }
  for (const auto& staged : over) {
    staged->set_over();
    if (!staged->has_failed()) continue;
    const std::lock_guard lock(progress_mutex_);
    if (!failed_) failed_ = staged;
  }
  return result;
}

bool Channel::is_idle() const {
  const std::lock_guard lock(progress_mutex_);
  return waiting_.empty() && staged_.empty() && retired_.empty();
}

void Channel::submit(Waiting waiting) {
  const auto group = group_.lock();
  if (!group) {
    slice_done(waiting.number, *waiting.staged, worker::Outcome{closed(waiting.staged->what_), -1});
    return;
  }
  auto done = [channel = shared_from_this(), staged = std::move(waiting.staged), number = waiting.number](
                  const worker::Outcome& outcome) { channel->slice_done(number, *staged, outcome); };
  if (waiting.operation.kind == schedule::Kind::kPointToPoint)
    group->submit(std::move(waiting.operation), std::move(done));
  else
    group->submit_reserved(waiting.sequence, std::move(waiting.operation), std::move(done));
}

/// What has not reached the engine never will.
void Channel::expire(const Status& status, engine::Group* group) {
  std::deque<Waiting> waiting;
  {
    const std::lock_guard lock(progress_mutex_);
    waiting.swap(waiting_);
  }
  if (group != nullptr) group->abort(std::string(status.message()) + " (rank " + std::to_string(group->rank()) + ")");
  for (const Waiting& slice : waiting) slice_done(slice.number, *slice.staged, worker::Outcome{status, -1});
}

void Channel::slice_done(std::uint64_t number, Staged& staged, const worker::Outcome& outcome) {
  staged.slice_done(outcome);  // first: who sees the flag sees the failure
  const std::lock_guard lock(progress_mutex_);
  slices_done_[number - done_until_ - 1] = true;
  const std::uint64_t before = done_until_;
  while (!slices_done_.empty() && slices_done_.front()) {
    slices_done_.pop_front();
    ++done_until_;
  }
  if (done_until_ != before) done_.word->store(word_of(done_until_), std::memory_order_release);
}

// Stager --------------------------------------------------------------------------------------------------------------

Stager::~Stager() {
  // The thread holds a reference: it has ended, or is this one, at its end.
  if (thread_.joinable()) thread_.detach();
}

core::Result<std::shared_ptr<Channel>> Stager::open(std::shared_ptr<device::Device> device,
                                                    std::weak_ptr<engine::Group> group, ChannelOptions options) {
  auto channel = std::make_shared<Channel>(shared_from_this(), std::move(device), std::move(group), options);
  if (!channel->opened_.is_ok()) return channel->opened_;
  return channel;
}

std::size_t Stager::active() const {
  const std::lock_guard lock(mutex_);
  return active_.size();
}

void Stager::activate(std::shared_ptr<Channel> channel) {
  const std::lock_guard lock(mutex_);
  if (std::find(active_.begin(), active_.end(), channel) != active_.end()) return;
  active_.push_back(std::move(channel));
  if (!running_) {
    running_ = true;
    stopping_ = false;
    thread_ = std::thread([self = shared_from_this()] { self->run(); });
  }
  changed_.notify_all();
}

void Stager::bury(std::function<void()> funeral) {
  {
    const std::lock_guard lock(mutex_);
    if (running_ && !stopping_) {
      funerals_.push_back(std::move(funeral));
      changed_.notify_all();
      return;
    }
  }
  funeral();
}

void Stager::stop(std::chrono::milliseconds patience) {
  std::thread thread;
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    stop_at_ = core::Clock::now() + patience;
    thread = std::move(thread_);
    changed_.notify_all();
  }
  if (!thread.joinable()) return;
  if (thread.get_id() == std::this_thread::get_id())
    thread.detach();
  else
    thread.join();
}

void Stager::run() {
  core::begin_thread("hybridps-stage");
  std::vector<std::shared_ptr<Channel>> channels;
  std::vector<std::function<void()>> funerals;
  core::TimePoint busy_since = core::Clock::now();
  const device::Device* relaxed = nullptr;
  for (;;) {
    channels.clear();
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return stopping_ || !active_.empty() || !funerals_.empty(); });
      const bool give_up = stopping_ && core::Clock::now() >= stop_at_;
      funerals.swap(funerals_);
      channels = active_;
      if (stopping_ && (channels.empty() || give_up)) {
        active_.clear();
        running_ = false;
        lock.unlock();
        for (const auto& channel : channels)
          channel->expire(Status(Code::kAborted, "the process is leaving before the operation was complete"), nullptr);
        for (const auto& funeral : funerals) funeral();
        return;
      }
    }
    for (const auto& funeral : funerals) funeral();
    funerals.clear();

    const core::TimePoint now = core::Clock::now();
    bool did = false;
    bool waits_for_stream = false;
    for (const auto& channel : channels) {
      if (std::exchange(relaxed, &channel->device()) != &channel->device()) channel->device().begin_helper_thread();
      const Channel::Progress progress = channel->progress(now);
      did |= progress.did;
      waits_for_stream |= progress.waits_for_stream;
      // activate() comes after something was put on the channel.
      const std::lock_guard lock(mutex_);
      if (channel->is_idle()) std::erase(active_, channel);
    }
    if (did) {
      busy_since = now;
      continue;
    }
    if (channels.empty()) continue;
    // Small operations are over within microseconds; a stream may also be seconds away.
    if (now - busy_since < kSpin)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(waits_for_stream ? kNapForStream : kNapForEnd);
  }
}

}  // namespace hybridps::staging
