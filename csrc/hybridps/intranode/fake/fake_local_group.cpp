#include "hybridps/intranode/fake/fake_local_group.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <thread>
#include <utility>

#include "hybridps/device/fake/fake_device.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::intranode {
namespace {

using core::Code;
using core::Status;

enum class CallKind { kAllReduce, kReduce, kSpread, kExchange };

struct Work {
  CallKind call = CallKind::kAllReduce;
  std::vector<Part> parts;
  Reduction reduction;
  std::vector<Transfer> messages;

  bool is_like(const Work& other) const {
    if (call != other.call || parts.size() != other.parts.size() || reduction.dtype != other.reduction.dtype ||
        reduction.op != other.reduction.op)
      return false;
    for (std::size_t i = 0; i < parts.size(); ++i)
      if (parts[i].rank != other.parts[i].rank || parts[i].bytes != other.parts[i].bytes ||
          parts[i].follows != other.parts[i].follows)
        return false;
    return true;
  }
  /// Whether every part marked `follows` does follow the part before.
  bool is_true() const {
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (!parts[i].follows) continue;
      if (i == 0) return false;
      const Part& before = parts[i - 1];
      if (call == CallKind::kSpread ? before.to + before.bytes != parts[i].to
                                    : before.from + before.bytes != parts[i].from)
        return false;
    }
    return true;
  }
  /// The messages to `peer` (`sends`), or from `peer`.
  std::vector<Transfer> with(std::size_t peer, bool sends) const {
    std::vector<Transfer> result;
    for (const Transfer& m : messages)
      if (m.peer == static_cast<int>(peer) && (m.from != nullptr) == sends) result.push_back(m);
    return result;
  }
};

/// Whether the messages sent match the messages expected.
bool pair_up(const std::vector<Work>& work) {
  for (std::size_t a = 0; a < work.size(); ++a) {
    for (const Transfer& m : work[a].messages)
      if (m.bytes == 0 || (m.from == nullptr) == (m.to == nullptr) || m.peer < 0 || m.peer == static_cast<int>(a) ||
          static_cast<std::size_t>(m.peer) >= work.size())
        return false;
    for (std::size_t b = 0; b < work.size(); ++b)
      if (!std::ranges::equal(work[a].with(b, true), work[b].with(a, false), {}, &Transfer::bytes, &Transfer::bytes))
        return false;
  }
  return true;
}

/// One leg of one group: the place where the ranks' kernels meet.
struct Meeting {
  explicit Meeting(int n) : size(static_cast<std::size_t>(n)), aborted(size, 0) {}
  struct MeetingTurn {
    std::vector<Work> work;
    std::size_t here = 0;
    std::size_t readers = 0;  // ranks that read other ranks' memory now
    std::size_t computed = 0;
    std::size_t written = 0;
    bool counted = false;  // counted as a mismatch
    bool dead = false;     // the turn will never complete
  };
  const std::size_t size;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<std::uint64_t, MeetingTurn> turns;
  std::size_t joined = 0;
  std::vector<std::uint8_t> aborted;  // by rank
};

}  // namespace

class FakeLocalHub : core::Pinned {
 public:
  std::shared_ptr<Meeting> meeting(const std::string& id, int size) {
    const std::lock_guard lock(mutex_);
    auto& meeting = meetings_[id];
    if (!meeting) meeting = std::make_shared<Meeting>(size);
    return meeting;
  }
  std::string make_id() {
    const std::lock_guard lock(mutex_);
    return "group " + std::to_string(++ids_);
  }
  void log_call(const Meeting* group, int rank, Leg leg) {
    calls.fetch_add(1);
    const std::lock_guard lock(mutex_);
    orders_[group][rank] += leg == Leg::kIn ? 'i' : 'o';
  }
  bool is_one_order() {
    const std::lock_guard lock(mutex_);
    for (const auto& [group, ranks] : orders_)
      for (const auto& [rank, order] : ranks)
        if (order != ranks.begin()->second) return false;
    return true;
  }
  std::atomic<int> mismatches{0};
  std::atomic<int> calls{0};
  std::atomic<int> late_kernels{0};
  std::atomic<std::uint64_t> exchanged_bytes{0};

  void hold_stops(bool hold) {
    std::vector<std::function<void()>> stops;
    {
      const std::lock_guard lock(mutex_);
      holds_stops_ = hold;
      if (!hold) stops.swap(held_stops_);
    }
    for (const auto& stop : stops) stop();
  }
  /// Runs `stop` now, or when hold_stops() ends.
  void stop(std::function<void()> stop) {
    {
      const std::lock_guard lock(mutex_);
      if (holds_stops_) {
        held_stops_.push_back(std::move(stop));
        return;
      }
    }
    stop();
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::shared_ptr<Meeting>> meetings_;
  std::map<const Meeting*, std::map<int, std::string>> orders_;  // key: the Meeting of the group's out leg
  int ids_ = 0;
  bool holds_stops_ = false;
  std::vector<std::function<void()>> held_stops_;
};

namespace {

/// What `me` writes at the end: one run of bytes for each part that ends at `me`.
std::vector<std::pair<std::byte*, std::vector<std::byte>>> results_of(const std::vector<Work>& work, std::size_t me) {
  const Work& mine = work[me];
  std::vector<std::pair<std::byte*, std::vector<std::byte>>> results;
  for (std::size_t i = 0; i < mine.parts.size(); ++i) {
    const Part& part = mine.parts[i];
    const auto holder = static_cast<std::size_t>(part.rank);
    const bool sums = mine.call == CallKind::kAllReduce || mine.call == CallKind::kReduce;
    const bool ends_here = mine.call == CallKind::kAllReduce || mine.call == CallKind::kSpread ||
                           (mine.call == CallKind::kReduce && holder == me);
    if (part.bytes == 0 || !ends_here) continue;
    std::vector<std::byte> out(part.bytes);
    if (sums) {
      std::vector<reduce::Input> inputs;
      for (const Work& w : work) inputs.push_back({w.parts[i].from, w.reduction.factor});
      reduce::Finish finish;
      if (mine.reduction.op == core::ReduceOp::kAvg) {
        if (core::is_floating(mine.reduction.dtype))
          finish = {reduce::Finish::Scaling::kMultiply, 1.0 / static_cast<double>(work.size()), 1};
        else
          finish = {reduce::Finish::Scaling::kDivideTruncate, 1.0, static_cast<long long>(work.size())};
      }
      reduce::combine(inputs, out.data(), part.bytes / core::size_of(mine.reduction.dtype), mine.reduction.dtype,
                      mine.reduction.op, finish);
    } else {
      std::memcpy(out.data(), work[holder].parts[i].from, part.bytes);
    }
    results.emplace_back(part.to, std::move(out));
  }
  for (std::size_t peer = 0; peer < work.size(); ++peer) {
    const std::vector<Transfer> sent = work[peer].with(me, true);
    const std::vector<Transfer> received = mine.with(peer, false);
    for (std::size_t i = 0; i < sent.size(); ++i)
      results.emplace_back(received[i].to, std::vector<std::byte>(sent[i].from, sent[i].from + sent[i].bytes));
  }
  return results;
}

/// The kernel of rank `me`.
void meet(Meeting& meeting, FakeLocalHub& hub, std::uint64_t number, std::size_t me, Work mine) {
  std::unique_lock lock(meeting.mutex);
  if (meeting.aborted[me] != 0) return;  // work that begins after is_stopped() ends undone, whichever ranks are there
  Meeting::MeetingTurn& turn = meeting.turns[number];
  turn.work.resize(meeting.size);
  turn.work[me] = std::move(mine);
  ++turn.here;
  meeting.changed.notify_all();
  // An aborted rank leaves when nobody reads its memory any more. The other ranks wait on: only their own abort() ends
  // the wait.
  const auto all = [&](const std::size_t& count) {
    meeting.changed.wait(lock, [&] { return (count == meeting.size && !turn.dead) || meeting.aborted[me] != 0; });
    if (count == meeting.size && !turn.dead) return true;
    turn.dead = true;
    meeting.changed.wait(lock, [&] { return turn.readers == 0; });
    return false;
  };
  if (!all(turn.here)) return;
  for (const Work& work : turn.work) {
    if (work.is_like(turn.work.front()) && work.is_true() && pair_up(turn.work)) continue;
    if (!std::exchange(turn.counted, true)) hub.mismatches.fetch_add(1);
    turn.dead = true;
    all(turn.here);
    return;
  }
  ++turn.readers;
  lock.unlock();
  const auto results = results_of(turn.work, me);
  lock.lock();
  --turn.readers;
  ++turn.computed;  // after this, no rank reads another rank's memory
  meeting.changed.notify_all();
  if (!all(turn.computed)) return;
  lock.unlock();
  for (const auto& [to, bytes] : results) std::memcpy(to, bytes.data(), bytes.size());
  lock.lock();
  if (++turn.written == meeting.size) meeting.turns.erase(number);
}

class FakeLocalGroup final : public LocalGroup {
 public:
  FakeLocalGroup(std::shared_ptr<FakeLocalHub> hub, std::shared_ptr<device::FakeDevice> device, int rank, int size,
                 bool has_first_use)
      : hub_(std::move(hub)),
        device_(std::move(device)),
        rank_(rank),
        size_(size),
        first_use_bytes_(has_first_use ? 4096 : 0) {}
  ~FakeLocalGroup() override {
    if (memory_->kernels.load() > 0) hub_->late_kernels.fetch_add(1);
    memory_->freed.store(true);
  }
  std::shared_ptr<Meeting>& meeting(Leg leg) { return meetings_[static_cast<std::size_t>(leg)]; }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  Status all_reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                    const Patience&) override {
    return put(leg, stream, {CallKind::kAllReduce, {parts.begin(), parts.end()}, reduction, {}});
  }
  Status reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                const Patience&) override {
    return put(leg, stream, {CallKind::kReduce, {parts.begin(), parts.end()}, reduction, {}});
  }
  Status spread(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Patience&) override {
    return put(leg, stream, {CallKind::kSpread, {parts.begin(), parts.end()}, {}, {}});
  }
  Status exchange(Leg leg, device::DeviceStream stream, std::span<const Transfer> messages, const Patience&) override {
    for (const Transfer& m : messages)
      if (m.from != nullptr) hub_->exchanged_bytes.fetch_add(m.bytes);
    return put(leg, stream, {CallKind::kExchange, {}, {}, {messages.begin(), messages.end()}});
  }
  Status first_use(Leg leg, device::DeviceStream stream, std::byte* memory, const Patience& patience) override {
    // Kernels reach device memory by its other address.
    auto* const at = const_cast<std::byte*>(device::FakeDevice::host_view(memory));
    const Part part{0, first_use_bytes_, at, at, false};
    return all_reduce(leg, stream, {&part, 1}, {core::DType::kInt32, core::ReduceOp::kSum, 1.0}, patience);
  }
  std::uint64_t first_use_bytes() const noexcept override { return first_use_bytes_; }
  Status poll() override { return aborted_.load() ? Status(Code::kAborted, "the local group was aborted") : Status(); }
  void abort() noexcept override {
    if (aborted_.exchange(true)) return;
    hub_->stop([meetings = meetings_, me = static_cast<std::size_t>(rank_), memory = memory_] {
      for (const auto& meeting : meetings) {
        if (!meeting) continue;
        const std::lock_guard lock(meeting->mutex);
        meeting->aborted[me] = 1;
        meeting->changed.notify_all();
      }
      memory->stopped.store(true);
    });
  }
  bool is_stopped() const noexcept override { return memory_->stopped.load(); }

 private:
  Status put(Leg leg, device::DeviceStream stream, Work work) {
    const auto& at = meeting(leg);
    if (!at) return Status(Code::kInternal, "this leg was not connected");
    if (Status status = poll(); !status.is_ok()) return status;
    hub_->log_call(meeting(Leg::kOut).get(), rank_, leg);
    device_->launch(stream, [at, hub = hub_, number = numbers_[static_cast<std::size_t>(leg)]++,
                             me = static_cast<std::size_t>(rank_), memory = memory_, work = std::move(work)]() mutable {
      memory->kernels.fetch_add(1);
      if (memory->freed.load())
        hub->late_kernels.fetch_add(1);
      else
        meet(*at, *hub, number, me, std::move(work));
      memory->kernels.fetch_sub(1);
    });
    return {};
  }

  /// The memory that kernels of this rank use.
  struct KernelMemory {
    std::atomic<bool> stopped{false};
    std::atomic<bool> freed{false};
    std::atomic<int> kernels{0};  // running kernels
  };

  const std::shared_ptr<FakeLocalHub> hub_;
  const std::shared_ptr<device::FakeDevice> device_;
  const int rank_;
  const int size_;
  const std::uint64_t first_use_bytes_;
  std::array<std::shared_ptr<Meeting>, kLegs> meetings_;
  std::array<std::uint64_t, kLegs> numbers_{};
  const std::shared_ptr<KernelMemory> memory_ = std::make_shared<KernelMemory>();
  std::atomic<bool> aborted_{false};
};

}  // namespace

FakeLocalGroups::FakeLocalGroups(std::shared_ptr<FakeLocalHub> hub, FakeLocalOptions options)
    : hub_(std::move(hub)), options_(std::move(options)) {}

std::shared_ptr<FakeLocalHub> FakeLocalGroups::make_hub() { return std::make_shared<FakeLocalHub>(); }
int FakeLocalGroups::mismatches(const FakeLocalHub& hub) { return hub.mismatches.load(); }
int FakeLocalGroups::calls(const FakeLocalHub& hub) { return hub.calls.load(); }
std::uint64_t FakeLocalGroups::exchanged_bytes(const FakeLocalHub& hub) { return hub.exchanged_bytes.load(); }
int FakeLocalGroups::late_kernels(const FakeLocalHub& hub) { return hub.late_kernels.load(); }
void FakeLocalGroups::hold_stops(FakeLocalHub& hub, bool hold) { hub.hold_stops(hold); }
bool FakeLocalGroups::is_one_order(FakeLocalHub& hub) { return hub.is_one_order(); }

bool FakeLocalGroups::can_reduce(core::DType dtype, core::ReduceOp op) const noexcept {
  // Like NCCL: no bit operations, no 16-bit integers, no bool.
  switch (op) {
    case core::ReduceOp::kBand:
    case core::ReduceOp::kBor:
    case core::ReduceOp::kBxor:
    case core::ReduceOp::kNone: return false;
    default: break;
  }
  return dtype != core::DType::kInt16 && dtype != core::DType::kUint16 && dtype != core::DType::kBool &&
         core::is_reducible(dtype, op);
}

core::Result<std::string> FakeLocalGroups::make_id() { return hub_->make_id(); }

core::Result<std::shared_ptr<LocalGroup>> FakeLocalGroups::connect(std::shared_ptr<device::Device> device, int rank,
                                                                   int size, const std::vector<std::string>& ids,
                                                                   const Patience& patience) {
  if (options_.connect_fails) return Status(Code::kInternal, options_.name + ": out of shared memory");
  auto fake =
      options_.fake_of != nullptr ? options_.fake_of(device) : std::dynamic_pointer_cast<device::FakeDevice>(device);
  if (!fake) return Status(Code::kInvalidArgument, "not a fake device");
  auto group = std::make_shared<FakeLocalGroup>(hub_, std::move(fake), rank, size, options_.has_first_use);
  const std::size_t first = ids.size() == 1 ? 1 : 0;
  for (std::size_t i = 0; i < ids.size(); ++i) {
    auto meeting = hub_->meeting(ids[i], size);
    group->meeting(static_cast<Leg>(first + i)) = meeting;
    std::unique_lock lock(meeting->mutex);
    ++meeting->joined;
    meeting->changed.notify_all();
    while (meeting->joined < meeting->size) {
      meeting->changed.wait_for(lock, std::chrono::milliseconds(1));
      if (Status status = patience.check("fake connect"); !status.is_ok()) return status;
    }
  }
  return std::shared_ptr<LocalGroup>(std::move(group));
}

}  // namespace hybridps::intranode
