#include "hybridps/intranode/nccl/nccl_group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <utility>

#include "hybridps/core/float_mode.h"
#include "hybridps/core/fork.h"
#include "hybridps/core/log.h"
#include "hybridps/core/thread.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::intranode {
namespace {

using core::Code;
using core::Status;

constexpr auto kSpin = std::chrono::microseconds(100);
constexpr auto kNap = std::chrono::microseconds(50);
constexpr auto kFinalizePatience = std::chrono::seconds(5);
// A kernel that waits for its counterparts holds one multiprocessor per block. NCCL's default is tens of blocks, and a
// GPU has about 132 multiprocessors. Eight blocks should move more than a network card does (not measured). In NCCL
// itself, NCCL_MAX_CTAS overrides this number.
constexpr int kBlocksBesideTheNetwork = 8;
constexpr auto kAbortTells = std::chrono::milliseconds(20);  // NCCL needs microseconds
// Of the calls that are made first. NCCL chooses algorithm and protocol by size, kind and machine; where it changes
// them was not looked at on a GPU.
constexpr std::array<std::uint64_t, 3> kFirstSizes = {1 << 10, 512 << 10, 16 << 20};

struct NativeType {
  ncclDataType_t type = ncclInt8;
  std::uint64_t bytes = 1;
};

/// A complex number counts as its two parts.
std::optional<NativeType> native_type(core::DType dtype) noexcept {
  switch (dtype) {
    case core::DType::kUint8: return NativeType{ncclUint8, 1};
    case core::DType::kInt8: return NativeType{ncclInt8, 1};
    case core::DType::kInt32: return NativeType{ncclInt32, 4};
    case core::DType::kUint32: return NativeType{ncclUint32, 4};
    case core::DType::kInt64: return NativeType{ncclInt64, 8};
    case core::DType::kUint64: return NativeType{ncclUint64, 8};
    case core::DType::kFloat16: return NativeType{ncclFloat16, 2};
    case core::DType::kBfloat16: return NativeType{ncclBfloat16, 2};
    case core::DType::kFloat32: return NativeType{ncclFloat32, 4};
    case core::DType::kFloat64: return NativeType{ncclFloat64, 8};
    case core::DType::kComplex64: return NativeType{ncclFloat32, 4};
    case core::DType::kComplex128: return NativeType{ncclFloat64, 8};
    default: return std::nullopt;
  }
}

bool is_complex(core::DType dtype) noexcept {
  return dtype == core::DType::kComplex64 || dtype == core::DType::kComplex128;
}

std::optional<ncclRedOp_t> native_op(core::ReduceOp op) noexcept {
  switch (op) {
    case core::ReduceOp::kSum: return ncclSum;
    case core::ReduceOp::kProduct: return ncclProd;
    case core::ReduceOp::kMin: return ncclMin;
    case core::ReduceOp::kMax: return ncclMax;
    case core::ReduceOp::kAvg: return ncclAvg;
    default: return std::nullopt;
  }
}

/// `factor` as an element of `type`.
std::array<std::byte, 8> scalar_of(ncclDataType_t type, double factor) noexcept {
  const core::UsualFloatMode usual;  // the current thread may be the caller's
  std::array<std::byte, 8> scalar{};
  const auto narrow = [&](std::uint16_t one, core::DType dtype) {
    const reduce::Input input{reinterpret_cast<const std::byte*>(&one), factor};
    reduce::combine({&input, 1}, scalar.data(), 1, dtype, core::ReduceOp::kPremulSum);
  };
  if (type == ncclFloat64) {
    std::memcpy(scalar.data(), &factor, sizeof factor);
  } else if (type == ncclFloat32) {
    const auto single = static_cast<float>(factor);
    std::memcpy(scalar.data(), &single, sizeof single);
  } else if (type == ncclFloat16) {
    narrow(0x3c00, core::DType::kFloat16);
  } else if (type == ncclBfloat16) {
    narrow(0x3f80, core::DType::kBfloat16);
  }
  return scalar;
}

/// Threads that outlive every group, because their work may wait for the device. One thread per work item: an item may
/// wait for a stream that goes on only after another item. For example, an abort waits for the kernel of another
/// communicator.
class Closer : core::Pinned {
 public:
  static Closer& instance() {
    static auto& closer = *new Closer();  // never destroyed: its threads may still be waiting at exit
    return closer;
  }
  void post(std::function<void()> work) noexcept {
    const std::lock_guard lock(mutex_);
    work_.push_back(std::move(work));
    try {
      std::thread([this] { run(); }).detach();
      ++running_;
    } catch (const std::system_error& error) {
      core::log_error("cannot start a thread to close a communicator of NCCL's (", error.what(), "); see `ulimit -u`",
                      running_ > 0 ? "; it is closed after others" : "; it is closed with the next");
    }
  }
  bool drain(std::chrono::milliseconds patience) {
    if (core::fork_generation() != generation_) return true;  // a forked child has no such threads
    std::unique_lock lock(mutex_);
    return idle_.wait_for(lock, patience, [&] { return running_ == 0; });
  }

 private:
  void run() {
    core::begin_thread("hybridps-nccl");
    std::unique_lock lock(mutex_);
    while (!work_.empty()) {
      auto work = std::move(work_.front());
      work_.pop_front();
      lock.unlock();
      work();
      work = nullptr;
      lock.lock();
    }
    if (--running_ == 0) idle_.notify_all();
  }
  const std::uint64_t generation_ = core::fork_generation();
  std::mutex mutex_;
  std::condition_variable idle_;
  std::deque<std::function<void()>> work_;
  int running_ = 0;
};

/// The communicators of a group. Shared with the Closer, which may keep them longer than the group lives.
struct Comms : std::enable_shared_from_this<Comms>, core::Pinned {
  Comms(const NcclApi& a, std::shared_ptr<device::Device> d) : api(a), device(std::move(d)) {}
  const NcclApi& api;
  const std::shared_ptr<device::Device> device;
  std::atomic<bool> aborted{false};
  std::atomic<int> to_stop{kLegs};  // communicators not stopped: kernels that begin on them do not end by themselves
  std::mutex mutex;                 // one NCCL call at a time; no call blocks, or none should
  std::array<ncclComm_t, kLegs> comms{};
  std::array<bool, kLegs> busy{};           // a call is in progress
  std::array<ncclComm_t, kLegs> revoked{};  // revoked communicators that still have their memory
  bool gone = false;                        // the group is destroyed: none of its work is on a stream

  Status in_state(std::size_t leg, const char* call, bool& in_progress) {
    in_progress = false;
    const std::lock_guard lock(mutex);
    ncclComm_t comm = comms[leg];
    if (aborted.load() || comm == nullptr) return Status(Code::kAborted, std::string(call) + ": it was aborted");
    ncclResult_t state = ncclSuccess;
    if (Status status = api.status(api.async_error(comm, &state), "ncclCommGetAsyncError", comm); !status.is_ok())
      return status;
    in_progress = busy[leg] = state == ncclInProgress;
    return api.status(state, call, comm);
  }

  /// Waits until the last call's work is on the stream.
  Status settle(std::size_t leg, const char* call, const Patience& patience) {
    const auto spin_until = core::Clock::now() + kSpin;
    for (bool in_progress = true;;) {
      if (Status status = in_state(leg, call, in_progress); !status.is_ok() || !in_progress) return status;
      if (core::Clock::now() < spin_until) {
        std::this_thread::yield();
        continue;
      }
      if (Status status = patience.check(call); !status.is_ok()) return status;
      std::this_thread::sleep_for(kNap);
    }
  }

  /// Stops a leg of an aborted group. A revoked communicator ends the work that runs and the work that begins later.
  /// The communicator keeps its memory, so the streams can end before this memory is freed. Without revoke,
  /// ncclCommAbort() tells the kernels, then waits for all launched kernels, then frees (commDestroySync() in NCCL's
  /// init.cc, 2.18 to 2.30). Streams must go on while ncclCommAbort() waits, but NCCL does not report when the kernels
  /// have been told. A kernel that begins before may still exchange invalid data with other ranks. These ranks know of
  /// the failure by then, and no memory is freed yet.
  void stop(std::size_t leg) {
    ncclComm_t comm = nullptr;
    bool revokes = false;
    {
      const std::lock_guard lock(mutex);  // so nobody is in a call now, and nobody finds the communicator later
      comm = std::exchange(comms[leg], nullptr);
      // Not in the middle of a call: NCCL 2.30 frees the call's job in ncclCommRevoke(), and again in the destroy.
      revokes = comm != nullptr && api.comm_revoke != nullptr && !busy[leg];
    }
    if (comm == nullptr) {
      to_stop.fetch_sub(1);
      return;
    }
    if (revokes) {
      Status status = api.status(api.comm_revoke(comm, 0), "ncclCommRevoke");
      if (status.is_ok()) {
        to_stop.fetch_sub(1);
        const std::lock_guard lock(mutex);
        if (!gone) {
          revoked[leg] = comm;
          return;
        }
        free_revoked(comm);
        return;
      }
      core::log_warn(status.message());
    }
    Closer::instance().post([self = shared_from_this()] {
      std::this_thread::sleep_for(kAbortTells);
      self->to_stop.fetch_sub(1);
    });
    abort(comm);
  }

  /// Called when the group is destroyed.
  void free_after_stop() {
    const std::lock_guard lock(mutex);
    gone = true;
    for (ncclComm_t& comm : revoked)
      if (comm != nullptr) free_revoked(std::exchange(comm, nullptr));
  }

  /// ncclCommRevoke() itself waits for the streams, which have ended. Aborted, not destroyed, because other ranks may
  /// be gone.
  void free_revoked(ncclComm_t comm) const {
    const auto until = core::Clock::now() + kFinalizePatience;
    for (ncclResult_t state = ncclInProgress; state == ncclInProgress && core::Clock::now() < until;) {
      if (api.async_error(comm, &state) != ncclSuccess) break;
      if (state == ncclInProgress) std::this_thread::sleep_for(kNap);
    }
    abort(comm);
  }

  void abort(ncclComm_t comm) const {
    if (comm == nullptr) return;
    if (Status status = api.status(api.comm_abort(comm), "ncclCommAbort"); !status.is_ok())
      core::log_warn(status.message());
  }

  void finalize_all() {
    const auto until = core::Deadline::after(kFinalizePatience, core::Clock::now());
    for (std::size_t leg = 0; leg < comms.size(); ++leg) {
      Status status;
      {
        const std::lock_guard lock(mutex);
        if (aborted.load() || comms[leg] == nullptr) continue;
        status = api.status(api.comm_finalize(comms[leg]), "ncclCommFinalize", comms[leg]);
      }
      if (status.is_ok()) status = settle(leg, "ncclCommFinalize", {until, {}});
      const std::lock_guard lock(mutex);
      if (comms[leg] == nullptr) continue;
      ncclComm_t comm = std::exchange(comms[leg], nullptr);
      status = status.is_ok() ? api.status(api.comm_destroy(comm), "ncclCommDestroy")
                              : api.status(api.comm_abort(comm), "ncclCommAbort");
      if (!status.is_ok()) core::log_warn(status.message());
    }
  }
};

class NcclGroup final : public LocalGroup {
 public:
  NcclGroup(const NcclApi& api, std::shared_ptr<device::Device> device, int rank, int size)
      : api_(api), comms_(std::make_shared<Comms>(api, std::move(device))), rank_(rank), size_(size) {}
  ~NcclGroup() override {
    Closer::instance().post([comms = comms_] {
      const Status ignored = comms->device->run_here([&] {
        if (comms->aborted.load())
          comms->free_after_stop();
        else
          comms->finalize_all();
        return Status();
      });
      static_cast<void>(ignored);
    });
  }

  Status connect(const std::vector<std::string>& ids, const Patience& patience) {
    return comms_->device->run_here([&]() -> Status {
      const std::size_t first = ids.size() == 1 ? static_cast<std::size_t>(Leg::kOut) : 0;
      for (std::size_t i = 0; i < ids.size(); ++i) {
        ncclUniqueId id{};
        if (ids[i].size() != sizeof id.internal) return Status(Code::kInvalidArgument, "not an id of NCCL");
        std::memcpy(id.internal, ids[i].data(), sizeof id.internal);
        ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
        config.blocking = 0;
        if (ids.size() == kLegs) config.maxCTAs = kBlocksBesideTheNetwork;
        {
          const std::lock_guard lock(comms_->mutex);
          ncclComm_t& comm = comms_->comms[first + i];
          comms_->busy[first + i] = true;
          if (Status status = api_.status(api_.comm_init(&comm, size_, id, rank_, &config), "ncclCommInitRankConfig");
              !status.is_ok())
            return status;
        }
        // One after the other, because each communicator needs all ranks.
        if (Status status = comms_->settle(first + i, "ncclCommInitRankConfig", patience); !status.is_ok())
          return status;
      }
      return {};
    });
  }

  int rank() const noexcept override { return rank_; }
  int size() const noexcept override { return size_; }

  Status all_reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                    const Patience& patience) override {
    return launch(leg, "ncclAllReduce", &reduction, patience, [&](ncclComm_t comm, const Native& native) -> Status {
      for (const Part& part : parts) {
        if (part.bytes == 0) continue;
        if (Status status = check(api_.all_reduce(part.from, part.to, part.bytes / native.bytes, native.type, native.op,
                                                  comm, cuda(stream)),
                                  "ncclAllReduce", comm);
            !status.is_ok())
          return status;
      }
      return {};
    });
  }

  Status reduce(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Reduction& reduction,
                const Patience& patience) override {
    return launch(leg, "ncclReduceScatter", &reduction, patience, [&](ncclComm_t comm, const Native& native) -> Status {
      const auto n = static_cast<std::size_t>(size_);
      for (std::size_t i = 0; i < parts.size();) {
        const std::uint64_t count = parts[i].bytes / native.bytes;
        Status status;
        if (is_even(parts, i)) {
          status = check(api_.reduce_scatter(parts[i].from, parts[i + static_cast<std::size_t>(rank_)].to, count,
                                             native.type, native.op, comm, cuda(stream)),
                         "ncclReduceScatter", comm);
          i += n;
        } else {
          if (count > 0)
            status = check(api_.reduce(parts[i].from, parts[i].rank == rank_ ? parts[i].to : nullptr, count,
                                       native.type, native.op, parts[i].rank, comm, cuda(stream)),
                           "ncclReduce", comm);
          ++i;
        }
        if (!status.is_ok()) return status;
      }
      return {};
    });
  }

  Status spread(Leg leg, device::DeviceStream stream, std::span<const Part> parts, const Patience& patience) override {
    return launch(leg, "ncclAllGather", nullptr, patience, [&](ncclComm_t comm, const Native&) -> Status {
      const auto n = static_cast<std::size_t>(size_);
      for (std::size_t i = 0; i < parts.size();) {
        const Part& part = parts[i];
        Status status;
        if (is_even(parts, i)) {
          status = check(api_.all_gather(parts[i + static_cast<std::size_t>(rank_)].from, part.to, part.bytes, ncclInt8,
                                         comm, cuda(stream)),
                         "ncclAllGather", comm);
          i += n;
        } else {
          // "sendbuff" is read only on the root.
          if (part.bytes > 0)
            status = check(api_.broadcast(part.rank == rank_ ? part.from : part.to, part.to, part.bytes, ncclInt8,
                                          part.rank, comm, cuda(stream)),
                           "ncclBroadcast", comm);
          ++i;
        }
        if (!status.is_ok()) return status;
      }
      return {};
    });
  }

  Status exchange(Leg leg, device::DeviceStream stream, std::span<const Transfer> messages,
                  const Patience& patience) override {
    return launch(leg, "ncclSend/ncclRecv", nullptr, patience, [&](ncclComm_t comm, const Native&) -> Status {
      for (const Transfer& m : messages) {
        Status status = m.from != nullptr
                            ? check(api_.send(m.from, m.bytes, ncclInt8, m.peer, comm, cuda(stream)), "ncclSend", comm)
                            : check(api_.recv(m.to, m.bytes, ncclInt8, m.peer, comm, cuda(stream)), "ncclRecv", comm);
        if (!status.is_ok()) return status;
      }
      return {};
    });
  }

  /// NCCL connects ranks at the first launch of an algorithm, and CUDA loads a kernel at its first launch.
  Status first_use(Leg leg, device::DeviceStream stream, std::byte* memory, const Patience& patience) override {
    const Reduction sum{core::DType::kFloat32, core::ReduceOp::kSum, 1.0};
    const auto n = static_cast<std::uint64_t>(size_);
    for (const std::uint64_t bytes : kFirstSizes) {
      const std::uint64_t each = std::max<std::uint64_t>(bytes / n / sizeof(float), 1) * sizeof(float);
      std::vector<Part> parts;  // in place
      for (std::uint64_t k = 0; k < n; ++k)
        parts.push_back({static_cast<int>(k), each, memory + k * each, memory + k * each, k > 0});
      const Part whole{0, n * each, memory, memory, false};
      const Transfer ring[] = {{(rank_ + 1) % size_, each, memory, nullptr},
                               {(rank_ + size_ - 1) % size_, each, nullptr, memory + each}};
      Status status = reduce(leg, stream, parts, sum, patience);
      if (status.is_ok()) status = spread(leg, stream, parts, patience);
      if (status.is_ok() && n > 1) status = exchange(leg, stream, ring, patience);
      if (status.is_ok()) status = all_reduce(leg, stream, {&whole, 1}, sum, patience);
      if (n > 1 && status.is_ok()) status = reduce(leg, stream, {&whole, 1}, sum, patience);  // of unequal parts
      if (n > 1 && status.is_ok()) status = spread(leg, stream, {&whole, 1}, patience);
      if (!status.is_ok()) return status;
    }
    return {};
  }
  std::uint64_t first_use_bytes() const noexcept override {
    return std::max<std::uint64_t>(kFirstSizes.back(), static_cast<std::uint64_t>(size_) * sizeof(float));
  }

  Status poll() override {
    if (comms_->aborted.load()) return Status(Code::kAborted, "NCCL: the communicator was aborted");
    const std::unique_lock lock(comms_->mutex, std::try_to_lock);
    if (!lock.owns_lock()) return {};  // the thread with the lock finds errors itself
    for (ncclComm_t comm : comms_->comms) {
      if (comm == nullptr) continue;
      ncclResult_t state = ncclSuccess;
      Status status = api_.status(api_.async_error(comm, &state), "ncclCommGetAsyncError", comm);
      if (status.is_ok()) status = api_.status(state, "a communicator", comm);
      if (!status.is_ok()) return status;
    }
    return {};
  }

  void abort() noexcept override {
    if (comms_->aborted.exchange(true)) return;
    for (std::size_t leg = 0; leg < kLegs; ++leg)
      Closer::instance().post([comms = comms_, leg] {
        const Status ignored = comms->device->run_here([&] { return comms->stop(leg), Status(); });
        static_cast<void>(ignored);
      });
  }
  bool is_stopped() const noexcept override { return comms_->to_stop.load() == 0; }

 private:
  struct Native {
    ncclDataType_t type = ncclInt8;
    std::uint64_t bytes = 1;
    ncclRedOp_t op = ncclSum;
  };
  static cudaStream_t cuda(device::DeviceStream stream) { return static_cast<cudaStream_t>(stream.native); }
  Status check(ncclResult_t result, const char* call, ncclComm_t comm) const { return api_.status(result, call, comm); }

  /// Whether the `size` parts from `i` on form one ncclReduceScatter or ncclAllGather. All ranks get the same answer.
  bool is_even(std::span<const Part> parts, std::size_t i) const noexcept {
    if (parts[i].bytes == 0 || i + static_cast<std::size_t>(size_) > parts.size()) return false;
    for (std::size_t k = 0; k < static_cast<std::size_t>(size_); ++k)
      if (parts[i + k].rank != static_cast<int>(k) || parts[i + k].bytes != parts[i].bytes ||
          (k > 0 && !parts[i + k].follows))
        return false;
    return true;
  }

  template <typename Body>
  Status launch(Leg leg, const char* what, const Reduction* reduction, const Patience& patience, const Body& body) {
    const auto index = static_cast<std::size_t>(leg);
    return comms_->device->run_here([&]() -> Status {
      std::optional<ncclRedOp_t> made;
      Status status = put(index, what, reduction, made, body);
      if (status.is_ok()) status = comms_->settle(index, what, patience);
      if (made) {
        // Not earlier: the work that uses the operator was enqueued only now.
        const std::lock_guard lock(comms_->mutex);
        if (ncclComm_t comm = comms_->comms[index]; comm != nullptr && status.is_ok())
          status = check(api_.destroy_op(*made, comm), "ncclRedOpDestroy", comm);
      }
      return status;
    });
  }

  template <typename Body>
  Status put(std::size_t leg, const char* what, const Reduction* reduction, std::optional<ncclRedOp_t>& made,
             const Body& body) {
    const std::lock_guard lock(comms_->mutex);
    ncclComm_t comm = comms_->comms[leg];
    if (comms_->aborted.load() || comm == nullptr)
      return Status(Code::kAborted, std::string("NCCL: ") + what + ": the communicator was aborted");
    Native native;
    if (reduction != nullptr) {
      const auto type = native_type(reduction->dtype);
      if (!type)
        return Status(Code::kUnsupported, "NCCL cannot reduce " + std::string(core::name_of(reduction->dtype)));
      native.type = type->type;
      native.bytes = type->bytes;
      if (reduction->op == core::ReduceOp::kPremulSum) {
        auto scalar = scalar_of(native.type, reduction->factor);
        if (Status status =
                check(api_.create_premul_sum(&native.op, scalar.data(), native.type, ncclScalarHostImmediate, comm),
                      "ncclRedOpCreatePreMulSum", comm);
            !status.is_ok())
          return status;
        made = native.op;
      } else {
        const auto op = native_op(reduction->op);
        if (!op)
          return Status(Code::kUnsupported, "NCCL cannot reduce by " + std::string(core::name_of(reduction->op)));
        native.op = *op;
      }
    }
    comms_->busy[leg] = true;
    if (Status status = check(api_.group_start(), "ncclGroupStart", comm); !status.is_ok()) return status;
    Status status = body(comm, native);
    // A started NCCL group must be ended, whatever it contains.
    const Status ended = check(api_.group_end(), "ncclGroupEnd", comm);
    return status.is_ok() ? ended : status;
  }

  const NcclApi& api_;
  const std::shared_ptr<Comms> comms_;
  const int rank_;
  const int size_;
};

}  // namespace

bool NcclGroups::can_reduce(core::DType dtype, core::ReduceOp op) const noexcept {
  if (!native_type(dtype) || !core::is_reducible(dtype, op)) return false;
  if (op == core::ReduceOp::kPremulSum) return core::is_floating(dtype);
  if (!native_op(op)) return false;
  if (op == core::ReduceOp::kAvg) return core::is_floating(dtype);
  return !is_complex(dtype) || op == core::ReduceOp::kSum;
}

core::Result<std::string> NcclGroups::make_id() {
  ncclUniqueId id{};
  static_assert(sizeof id.internal <= kIdBytesMax);
  if (Status status = api_.status(api_.unique_id(&id), "ncclGetUniqueId"); !status.is_ok()) return status;
  return std::string(id.internal, sizeof id.internal);
}

core::Result<std::shared_ptr<LocalGroup>> NcclGroups::connect(std::shared_ptr<device::Device> device, int rank,
                                                              int size, const std::vector<std::string>& ids,
                                                              const Patience& patience) {
  if (ids.empty() || ids.size() > kLegs) return Status(Code::kInvalidArgument, "a communicator per leg");
  auto group = std::make_shared<NcclGroup>(api_, device, rank, size);
  Status status = group->connect(ids, patience);
  if (!status.is_ok()) {
    group->abort();
    return status;
  }
  return std::shared_ptr<LocalGroup>(std::move(group));
}

bool NcclGroups::drain(std::chrono::milliseconds patience) { return Closer::instance().drain(patience); }

}  // namespace hybridps::intranode
