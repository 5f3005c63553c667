#include "tests/simulated/library.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstring>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "hybridps/reduce/sum.h"
#include "tests/simulated/device.h"

namespace hybridps::simulated {
namespace {

using core::Code;
using core::Status;
using intranode::Leg;
using intranode::Part;
using intranode::Patience;
using intranode::Reduction;
using intranode::Transfer;

constexpr std::size_t kRanksMax = 16;
constexpr std::uint64_t kAreaBytes = std::uint64_t{256} << 20;  // address space; pages come when they are used

std::atomic<std::uint64_t> calls{0};

enum class Call : std::uint64_t { kAllReduce, kReduce, kSpread, kExchange };

struct Work {
  Call call = Call::kAllReduce;
  std::vector<Part> parts;
  Reduction reduction;
  std::vector<Transfer> messages;

  bool sums() const { return call == Call::kAllReduce || call == Call::kReduce; }
  /// Of what all ranks must call alike.
  std::uint64_t signature() const {
    std::uint64_t hash = 0xcbf29ce484222325U;
    const auto add = [&](std::uint64_t value) { hash = (hash ^ value) * 0x100000001b3U; };
    add(static_cast<std::uint64_t>(call));
    add(static_cast<std::uint64_t>(reduction.dtype));
    add(static_cast<std::uint64_t>(reduction.op));
    for (const Part& part : parts) {
      add(static_cast<std::uint64_t>(part.rank));
      add(part.bytes);
      add(part.follows ? 1 : 0);
    }
    return hash;
  }
};

const std::byte* seen(const std::byte* address) { return device::FakeDevice::host_view(address); }
std::byte* seen(std::byte* address) {
  return const_cast<std::byte*>(device::FakeDevice::host_view(static_cast<const std::byte*>(address)));
}

/// One leg of one group, mapped by all its ranks.
class Meeting : core::Pinned {
 public:
  static std::shared_ptr<Meeting> open(const std::string& id, int size) {
    const int file = shm_open(id.c_str(), O_CREAT | O_RDWR, 0600);
    if (file < 0) return nullptr;
    const std::uint64_t bytes = sizeof(Head) + static_cast<std::uint64_t>(size) * kAreaBytes;
    void* memory = MAP_FAILED;
    if (ftruncate(file, static_cast<off_t>(bytes)) == 0)
      memory = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    ::close(file);
    if (memory == MAP_FAILED) return nullptr;
    return std::shared_ptr<Meeting>(new Meeting(static_cast<Head*>(memory), bytes, size));
  }
  ~Meeting() { munmap(head_, bytes_); }

  Status join(const std::string& id, int rank, const Patience& patience) {
    head_->joined.fetch_add(1);
    while (head_->joined.load() < size_) {
      if (Status status = patience.check("connecting simulated devices"); !status.is_ok()) {
        shm_unlink(id.c_str());
        return status;
      }
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    if (rank == 0) shm_unlink(id.c_str());
    return {};
  }

  /// The kernel. "": done, or ended.
  std::string meet(std::uint64_t number, std::size_t me, const Work& work, const std::atomic<bool>& ended) {
    const auto all = [&](const std::atomic<std::uint64_t> Rank::* count, std::uint64_t at_least) {
      for (std::size_t r = 0; r < static_cast<std::size_t>(size_);) {
        if ((head_->ranks[r].*count).load(std::memory_order_acquire) >= at_least) {
          ++r;
          continue;
        }
        if (ended.load()) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(20));
      }
      return !ended.load();
    };
    if (!all(&Rank::read, number - 1)) return {};
    Rank& mine = head_->ranks[me];
    mine.signature = work.signature();
    mine.factor = work.reduction.factor;
    std::uint64_t used = 0;
    const auto give = [&](const std::byte* from, std::uint64_t bytes) {
      if (used + bytes > kAreaBytes) return false;
      std::memcpy(area(me) + used, seen(from), bytes);
      used += bytes;
      return true;
    };
    bool fits = true;
    for (const Part& part : work.parts)
      if (work.sums() || part.rank == static_cast<int>(me)) fits = fits && give(part.from, part.bytes);
    for (std::size_t peer = 0; peer < static_cast<std::size_t>(size_); ++peer) {
      mine.sent_from[peer] = used;
      for (const Transfer& message : work.messages)
        if (message.from != nullptr && message.peer == static_cast<int>(peer))
          fits = fits && give(message.from, message.bytes);
      mine.sent_until[peer] = used;
    }
    if (!fits) return "more than the simulated library has room for";
    mine.wrote.store(number, std::memory_order_release);
    if (!all(&Rank::wrote, number)) return {};
    std::string wrong;
    for (std::size_t r = 0; r < static_cast<std::size_t>(size_); ++r)
      if (head_->ranks[r].signature != mine.signature) wrong = "ranks of a node call different things";
    if (wrong.empty()) wrong = take(me, work);
    mine.read.store(number, std::memory_order_release);
    return wrong;
  }

 private:
  struct Rank {
    std::atomic<std::uint64_t> wrote{0};
    std::atomic<std::uint64_t> read{0};
    std::uint64_t signature = 0;
    double factor = 1;
    std::array<std::uint64_t, kRanksMax> sent_from{};  // by peer: in the area
    std::array<std::uint64_t, kRanksMax> sent_until{};
  };
  struct Head {  // zeroed by the kernel
    std::atomic<int> joined{0};
    std::array<Rank, kRanksMax> ranks;
  };

  Meeting(Head* head, std::uint64_t bytes, int size) : head_(head), bytes_(bytes), size_(size) {}
  std::byte* area(std::size_t rank) { return reinterpret_cast<std::byte*>(head_ + 1) + rank * kAreaBytes; }

  std::string take(std::size_t me, const Work& work) {
    std::uint64_t at = 0;                              // of what every rank gives
    std::array<std::uint64_t, kRanksMax> spread_at{};  // of what one does
    for (const Part& part : work.parts) {
      const auto holder = static_cast<std::size_t>(part.rank);
      if (work.sums()) {
        if (part.bytes > 0 && (work.call == Call::kAllReduce || holder == me)) {
          std::vector<reduce::Input> inputs;
          for (std::size_t r = 0; r < static_cast<std::size_t>(size_); ++r)
            inputs.push_back({area(r) + at, head_->ranks[r].factor});
          reduce::Finish finish;
          if (work.reduction.op == core::ReduceOp::kAvg)
            finish = {reduce::Finish::Scaling::kMultiply, 1.0 / static_cast<double>(size_), 1};
          reduce::combine(inputs, seen(part.to), part.bytes / core::size_of(work.reduction.dtype), work.reduction.dtype,
                          work.reduction.op, finish);
        }
        at += part.bytes;
      } else {
        if (part.bytes > 0) std::memcpy(seen(part.to), area(holder) + spread_at[holder], part.bytes);
        spread_at[holder] += part.bytes;
      }
    }
    for (std::size_t peer = 0; peer < static_cast<std::size_t>(size_); ++peer) {
      const Rank& other = head_->ranks[peer];
      std::uint64_t from = other.sent_from[me];
      for (const Transfer& message : work.messages) {
        if (message.to == nullptr || message.peer != static_cast<int>(peer)) continue;
        if (from + message.bytes > other.sent_until[me]) return "a message that is not sent";
        std::memcpy(seen(message.to), area(peer) + from, message.bytes);
        from += message.bytes;
      }
      if (peer != me && from != other.sent_until[me]) return "a message that nobody takes";
    }
    return {};
  }

  Head* const head_;
  const std::uint64_t bytes_;
  const int size_;
};

class Group final : public intranode::LocalGroup {
 public:
  Group(std::shared_ptr<SimulatedDevice> device, int rank, int size)
      : device_(std::move(device)), rank_(rank), size_(size) {}

  std::array<std::shared_ptr<Meeting>, intranode::kLegs> meetings;

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }
  Status all_reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                    const Patience&) override {
    return put(leg, stream, "all-reduce within the node",
               {Call::kAllReduce, {parts.begin(), parts.end()}, reduction, {}});
  }
  Status reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                const Patience&) override {
    return put(leg, stream, "reduce within the node", {Call::kReduce, {parts.begin(), parts.end()}, reduction, {}});
  }
  Status spread(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Patience&) override {
    return put(leg, stream, "spread within the node", {Call::kSpread, {parts.begin(), parts.end()}, {}, {}});
  }
  Status exchange(Leg leg, device::DeviceStream stream, std::span<const Transfer> messages, const Patience&) override {
    return put(leg, stream, "exchange within the node", {Call::kExchange, {}, {}, {messages.begin(), messages.end()}});
  }
  Status poll() override {
    return ended_->load() ? Status(Code::kAborted, "the simulated library was aborted") : Status();
  }
  void abort() noexcept override { ended_->store(true); }
  bool is_stopped() const noexcept override { return ended_->load(); }

 private:
  Status put(Leg leg, device::DeviceStream stream, const char* what, Work work) {
    const auto at = static_cast<std::size_t>(leg);
    const auto& meeting = meetings[at];
    if (!meeting) return Status(Code::kInternal, "this leg was not connected");
    if (Status status = poll(); !status.is_ok()) return status;
    calls.fetch_add(1);
    std::vector<Access> accesses;
    for (const Part& part : work.parts) {
      if (work.sums() || part.rank == rank_) accesses.push_back({part.from, part.bytes, false});
      if (work.call != Call::kReduce || part.rank == rank_)
        if (part.to != part.from) accesses.push_back({part.to, part.bytes, true});
      if (work.sums() && part.to == part.from && (work.call == Call::kAllReduce || part.rank == rank_))
        accesses.push_back({part.to, part.bytes, true});
    }
    for (const Transfer& message : work.messages)
      accesses.push_back(message.from != nullptr ? Access{message.from, message.bytes, false}
                                                 : Access{message.to, message.bytes, true});
    device_->launch(device_->number_of(stream), what, accesses,
                    [meeting, number = ++numbers_[at], me = static_cast<std::size_t>(rank_), ended = ended_,
                     device = device_.get(), work = std::move(work)] {
                      if (const std::string wrong = meeting->meet(number, me, work, *ended); !wrong.empty())
                        device->order().report(wrong);
                    });
    return {};
  }

  const std::shared_ptr<SimulatedDevice> device_;
  const int rank_;
  const int size_;
  std::array<std::uint64_t, intranode::kLegs> numbers_{};
  const std::shared_ptr<std::atomic<bool>> ended_ = std::make_shared<std::atomic<bool>>(false);
};

class Library final : public intranode::LocalGroups {
 public:
  std::string describe() const override { return "simulated library 1"; }
  /// As NCCL.
  bool can_reduce(core::DType dtype, core::ReduceOp op) const noexcept override {
    switch (op) {
      case core::ReduceOp::kSum:
      case core::ReduceOp::kProduct:
      case core::ReduceOp::kMin:
      case core::ReduceOp::kMax: break;
      case core::ReduceOp::kAvg:
      case core::ReduceOp::kPremulSum:
        if (!core::is_floating(dtype)) return false;
        break;
      default: return false;
    }
    return dtype != core::DType::kInt16 && dtype != core::DType::kUint16 && dtype != core::DType::kBool &&
           core::is_reducible(dtype, op);
  }
  core::Result<std::string> make_id() override {
    static std::atomic<int> ids{0};
    return "/hybridps-simulated-" + std::to_string(getpid()) + "-" + std::to_string(++ids);
  }
  core::Result<std::shared_ptr<intranode::LocalGroup>> connect(std::shared_ptr<device::Device> device, int rank,
                                                               int size, const std::vector<std::string>& ids,
                                                               const Patience& patience) override {
    auto simulated = std::dynamic_pointer_cast<SimulatedDevice>(device);
    if (!simulated || size > static_cast<int>(kRanksMax))
      return Status(Code::kInvalidArgument, "not simulated devices");
    auto group = std::make_shared<Group>(std::move(simulated), rank, size);
    const std::size_t first = ids.size() == 1 ? 1 : 0;
    for (std::size_t i = 0; i < ids.size(); ++i) {
      auto meeting = Meeting::open(ids[i], size);
      if (!meeting) return Status(Code::kOutOfResources, "no shared memory for simulated devices");
      if (Status status = meeting->join(ids[i], rank, patience); !status.is_ok()) return status;
      group->meetings[first + i] = std::move(meeting);
    }
    return std::shared_ptr<intranode::LocalGroup>(std::move(group));
  }
};

}  // namespace

std::uint64_t library_calls() { return calls.load(); }
std::shared_ptr<intranode::LocalGroups> make_library() { return std::make_shared<Library>(); }

}  // namespace hybridps::simulated
