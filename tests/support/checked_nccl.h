// tests/support/checked_nccl.h: an NCCL that does its work on FakeDevices and checks what NCCL demands of its callers.
//
// Demanded (user guide, 2.30)  no call of a communicator while one is in progress, nor after it was aborted, revoked,
//          finalized or destroyed; groups that are ended; the same calls in the same order on all ranks of a
//          communicator; one stream of a communicator; its device current; operations that a launch names alive until
//          it is done; nothing on a stream when it is destroyed. What is not kept is in violations().
// Model    Ranks are threads, each with a FakeDevice. Communicators do not block: what a group holds reaches the stream
//          later, from another thread, and the first launch of a communicator only when all ranks have come. A kernel
//          waits on the stream for those of the other ranks. The first launch of each kind and size class waits for the
//          device.
//          ncclCommAbort() ends them, waits, and frees. While it waits it holds as many multiprocessors of its device
//          as its communicator may have blocks (32 unless told); one that finds too few free begins later.
// Faults   by the number of the call, counted over all: fail, hang (never done); a rank whose kernels never come; an
//          asynchronous error.
#pragma once

#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <functional>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/device/fake/fake_device.h"
#include "hybridps/intranode/nccl/nccl_api.h"
#include "hybridps/reduce/sum.h"

namespace hybridps::test {

class CheckedNccl {
 public:
  CheckedNccl() { self = this; }
  ~CheckedNccl() {
    for (std::thread& thread : threads_) thread.join();
    self = nullptr;
  }

  /// The table for NcclGroups. `revokes`: as of 2.29.
  intranode::NcclApi api(bool revokes = true);

  std::vector<std::string> violations() {
    const std::lock_guard lock(mutex_);
    return violations_;
  }
  int calls() const { return calls_.load(); }
  int alive() const { return alive_.load(); }
  void fail_at(int call) { fail_at_ = call; }
  void hang_at(int call) { hang_at_ = call; }
  void lose(int rank) { lost_ = rank; }
  void fail_later(ncclResult_t error) { async_ = error; }

 private:
  enum class Kind { kAllReduce, kReduce, kReduceScatter, kAllGather, kBroadcast, kSend, kRecv };
  struct Op {
    Kind kind;
    const void* from;
    void* to;
    std::size_t count;
    ncclDataType_t type;
    ncclRedOp_t op;
    int root;  // or peer
    double factor = 1;
    bool is_premul = false;
  };
  struct Round {
    std::map<int, std::vector<Op>> ops;  // by rank
    bool done = false;
    int left = 0;
  };
  struct Comm;
  struct World {
    int size = 0;
    std::mutex mutex;
    std::condition_variable changed;
    std::set<int> comms;  // ranks whose communicator has come; a pointer to it would be a circle, which never goes
    std::map<std::uint64_t, Round> rounds;
    std::set<int> at_first;  // ranks that have come to their first launch
  };
  struct Comm {
    std::shared_ptr<World> world;
    device::FakeDevice* device = nullptr;
    int rank = 0;
    std::atomic<bool> in_progress{true};
    std::atomic<bool> ended{false};  // aborted or revoked: kernels end undone
    std::atomic<bool> freed{false};
    std::atomic<int> kernels{0};  // launched and not done
    std::atomic<ncclResult_t> error{ncclSuccess};
    bool finalized = false;
    std::uint64_t launches = 0;
    void* stream = nullptr;
    int blocks = 32;
    std::map<int, double> premuls;  // by number of the operation
    std::set<std::pair<Kind, int>> used;
  };
  struct Pending {
    Comm* comm;
    cudaStream_t stream;
    Op op;
  };

  void violated(std::string what) {
    const std::lock_guard lock(mutex_);
    violations_.push_back(std::move(what));
  }
  static Comm& of(ncclComm_t comm) { return *reinterpret_cast<Comm*>(comm); }
  /// Counts; what it is to answer instead of doing it.
  std::optional<ncclResult_t> call() {
    if (++calls_ == fail_at_.load()) return ncclSystemError;
    return std::nullopt;
  }
  void check(Comm& comm, const char* what) {
    if (comm.freed) violated(std::string(what) + " of a communicator that is freed");
    if (comm.ended) violated(std::string(what) + " of a communicator that was aborted");
    if (comm.in_progress) violated(std::string(what) + " while a call is in progress");
    if (comm.finalized) violated(std::string(what) + " of a finalized communicator");
    if (device::FakeDevice::current() != comm.device) violated(std::string(what) + " without its device current");
  }
  ncclResult_t add(ncclComm_t handle, cudaStream_t stream, Op op, const char* what) {
    Comm& comm = of(handle);
    check(comm, what);
    if (depth == 0) violated(std::string(what) + " outside of a group: it would block");
    if (comm.stream != nullptr && comm.stream != stream && comm.kernels > 0)
      violated(std::string(what) + " on a second stream");
    comm.stream = stream;
    // Kernels reach device memory by its other address.
    op.from = device::FakeDevice::host_view(static_cast<const std::byte*>(op.from));
    op.to = const_cast<std::byte*>(device::FakeDevice::host_view(static_cast<const std::byte*>(op.to)));
    if (op.op > ncclAvg) {
      const auto made = comm.premuls.find(op.op);
      if (made == comm.premuls.end())
        violated(std::string(what) + " with an operation that is gone");
      else
        op.factor = made->second, op.is_premul = true;
    }
    if (auto fault = call()) return *fault;
    pending.push_back({&comm, stream, op});
    return ncclSuccess;
  }
  /// What a kernel holds, once it could have it or its communicator has ended.
  class Multiprocessors {
   public:
    Multiprocessors(CheckedNccl& nccl, Comm& comm) : nccl_(nccl), comm_(comm) {
      std::unique_lock lock(nccl_.mutex_);
      int& used = nccl_.used_[comm_.device];
      while (!comm_.ended && used + comm_.blocks > kMultiprocessors)
        nccl_.freed_.wait_for(lock, std::chrono::milliseconds(5));
      used += comm_.blocks;
    }
    ~Multiprocessors() {
      const std::lock_guard lock(nccl_.mutex_);
      nccl_.used_[comm_.device] -= comm_.blocks;
      nccl_.freed_.notify_all();
    }

   private:
    static constexpr int kMultiprocessors = 132;  // an H100's
    CheckedNccl& nccl_;
    Comm& comm_;
  };
  void pause() { std::this_thread::sleep_for(std::chrono::microseconds(50 + calls_.load() * 37 % 200)); }
  /// On a thread of its own, as NCCL's.
  void later(std::function<void()> work) {
    const std::lock_guard lock(mutex_);
    threads_.emplace_back(std::move(work));
  }
  void launch(Comm& comm, cudaStream_t stream, std::vector<Op> ops);
  void load(Comm& comm, const std::vector<Op>& ops);
  void kernel(Comm& comm, std::uint64_t number, std::vector<Op> ops);
  void carry_out(World& world, Round& round);

  static inline CheckedNccl* self = nullptr;
  static inline thread_local int depth = 0;
  static inline thread_local std::vector<Pending> pending;

  std::mutex mutex_;
  std::vector<std::string> violations_;
  std::vector<std::thread> threads_;
  std::map<device::FakeDevice*, int> used_;  // multiprocessors
  std::condition_variable freed_;
  std::map<std::string, std::shared_ptr<World>> worlds_;
  std::vector<std::shared_ptr<Comm>> all_;  // never freed: who uses one later is found
  std::atomic<int> calls_{0};
  std::atomic<int> alive_{0};
  std::atomic<int> fail_at_{-1};
  std::atomic<int> hang_at_{-1};
  std::atomic<int> lost_{-1};
  std::atomic<ncclResult_t> async_{ncclSuccess};
  std::atomic<int> ids_{0};
};

inline void CheckedNccl::launch(Comm& comm, cudaStream_t stream, std::vector<Op> ops) {
  comm.in_progress = true;
  const std::uint64_t number = ++comm.launches;
  if (calls_.load() == hang_at_.load()) return;
  ++comm.kernels;
  later([this, &comm, stream, number, ops = std::move(ops)]() mutable {
    pause();
    World& world = *comm.world;
    if (number == 1) {  // it connects
      std::unique_lock lock(world.mutex);
      if (comm.rank != lost_.load()) world.at_first.insert(comm.rank);
      world.changed.notify_all();
      while (!comm.ended && static_cast<int>(world.at_first.size()) < world.size)
        world.changed.wait_for(lock, std::chrono::milliseconds(5));
    }
    if (comm.ended) {
      --comm.kernels;
      return;
    }
    load(comm, ops);
    comm.device->launch({stream}, [this, &comm, number, ops = std::move(ops)]() mutable {
      kernel(comm, number, std::move(ops));
      --comm.kernels;
    });
    comm.in_progress = false;
  });
}

/// The first launch of an algorithm: NCCL connects for it and CUDA loads a kernel, which may wait for the device. Here
/// the size alone chooses: up to 16 KiB, up to 4 MiB, and above.
inline void CheckedNccl::load(Comm& comm, const std::vector<Op>& ops) {
  bool first = false;
  for (const Op& op : ops) {
    const bool by_rank = op.kind == Kind::kReduceScatter || op.kind == Kind::kAllGather;
    const std::size_t bytes = op.count * (op.type == ncclInt8 ? 1 : 4) * (by_rank ? comm.world->size : 1);
    first |= comm.used.insert({op.kind, bytes <= 16 << 10 ? 0 : bytes <= 4 << 20 ? 1 : 2}).second;
  }
  if (!first) return;
  const auto until = std::chrono::steady_clock::now() + std::chrono::seconds(2);
  while (!comm.device->is_idle() && !comm.ended && std::chrono::steady_clock::now() < until)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  if (!comm.device->is_idle() && !comm.ended) violated("a first use of NCCL behind work that waits");
}

inline void CheckedNccl::kernel(Comm& comm, std::uint64_t number, std::vector<Op> ops) {
  if (comm.freed) return violated("a kernel begins when its communicator is freed");
  const Multiprocessors held(*this, comm);
  World& world = *comm.world;
  std::unique_lock lock(world.mutex);
  Round& round = world.rounds[number];
  if (comm.rank != lost_.load()) round.ops[comm.rank] = std::move(ops);
  if (static_cast<int>(round.ops.size()) == world.size && !round.done) {
    carry_out(world, round);
    round.done = true;
    world.changed.notify_all();
  }
  while (!round.done && !comm.ended) world.changed.wait_for(lock, std::chrono::milliseconds(5));
}

inline void CheckedNccl::carry_out(World& world, Round& round) {
  const auto type_of = [](ncclDataType_t type) {
    switch (type) {
      case ncclFloat32: return core::DType::kFloat32;
      case ncclFloat64: return core::DType::kFloat64;
      case ncclFloat16: return core::DType::kFloat16;
      case ncclBfloat16: return core::DType::kBfloat16;
      case ncclInt32: return core::DType::kInt32;
      case ncclInt64: return core::DType::kInt64;
      case ncclUint8: return core::DType::kUint8;
      default: return core::DType::kInt8;
    }
  };
  const auto n = static_cast<std::size_t>(world.size);
  // Messages: those from one rank to another, in order.
  std::map<std::pair<int, int>, std::vector<Op*>> sent;
  std::map<std::pair<int, int>, std::vector<Op*>> received;
  std::vector<std::vector<Op*>> collectives(n);
  for (auto& [rank, ops] : round.ops)
    for (Op& op : ops) {
      if (op.kind == Kind::kSend)
        sent[{rank, op.root}].push_back(&op);
      else if (op.kind == Kind::kRecv)
        received[{op.root, rank}].push_back(&op);
      else
        collectives[static_cast<std::size_t>(rank)].push_back(&op);
    }
  for (auto& [pair, ops] : sent) {
    auto& others = received[pair];
    if (others.size() != ops.size()) return violated("a send that no recv meets");
    for (std::size_t i = 0; i < ops.size(); ++i) {
      if (ops[i]->count != others[i]->count) return violated("a send of another size than its recv");
      std::memcpy(others[i]->to, ops[i]->from, ops[i]->count);
    }
  }
  for (auto& [pair, ops] : received)
    if (!ops.empty() && sent[pair].size() != ops.size()) return violated("a recv that no send meets");
  for (std::size_t i = 0; i < collectives[0].size(); ++i) {
    const Op& first = *collectives[0][i];
    for (const auto& ops : collectives)
      if (ops.size() != collectives[0].size() || ops[i]->kind != first.kind || ops[i]->count != first.count ||
          ops[i]->type != first.type || ops[i]->root != first.root || (!first.is_premul && ops[i]->op != first.op))
        return violated("ranks call different things");
    const core::DType dtype = type_of(first.type);
    const std::size_t bytes = first.count * core::size_of(dtype);
    if (first.kind == Kind::kAllGather || first.kind == Kind::kBroadcast) {
      std::vector<std::byte> all;
      for (std::size_t r = 0; r < n; ++r) {
        if (first.kind == Kind::kBroadcast && static_cast<int>(r) != first.root) continue;
        const auto* from = static_cast<const std::byte*>(collectives[r][i]->from);
        all.insert(all.end(), from, from + bytes);
      }
      for (std::size_t r = 0; r < n; ++r) std::memcpy(collectives[r][i]->to, all.data(), all.size());
      continue;
    }
    const std::size_t whole = first.kind == Kind::kReduceScatter ? n * first.count : first.count;
    std::vector<reduce::Input> inputs;
    core::ReduceOp op = core::ReduceOp::kSum;
    if (first.op == ncclProd) op = core::ReduceOp::kProduct;
    if (first.op == ncclMin) op = core::ReduceOp::kMin;
    if (first.op == ncclMax) op = core::ReduceOp::kMax;
    if (first.op == ncclAvg || first.is_premul) op = core::ReduceOp::kPremulSum;
    for (std::size_t r = 0; r < n; ++r)
      inputs.push_back({static_cast<const std::byte*>(collectives[r][i]->from),
                        first.op == ncclAvg ? 1.0 / static_cast<double>(n) : collectives[r][i]->factor});
    std::vector<std::byte> sum(whole * core::size_of(dtype));
    reduce::combine(inputs, sum.data(), whole, dtype, op);
    for (std::size_t r = 0; r < n; ++r) {
      Op& own = *collectives[r][i];
      if (first.kind == Kind::kReduce && static_cast<int>(r) != first.root) continue;
      std::memcpy(own.to, sum.data() + (first.kind == Kind::kReduceScatter ? r * bytes : 0), bytes);
    }
  }
}

inline intranode::NcclApi CheckedNccl::api(bool revokes) {
  intranode::NcclApi a;
  a.version = revokes ? 23007 : 22800;
  a.error_string = [](ncclResult_t) { return "an error of the test"; };
  a.last_error = [](ncclComm_t) { return ""; };
  a.unique_id = [](ncclUniqueId* id) {
    std::memset(id, 0, sizeof *id);
    std::snprintf(id->internal, sizeof id->internal, "id %d", ++self->ids_);
    return ncclSuccess;
  };
  a.comm_init = [](ncclComm_t* handle, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    if (config->blocking != 0) self->violated("a communicator that blocks");
    if (device::FakeDevice::current() == nullptr) self->violated("ncclCommInitRankConfig without a device current");
    auto comm = std::make_shared<Comm>();
    comm->rank = rank;
    if (config->maxCTAs != NCCL_CONFIG_UNDEF_INT) comm->blocks = config->maxCTAs;
    comm->device = device::FakeDevice::current();
    {
      const std::lock_guard lock(self->mutex_);
      auto& world = self->worlds_[id.internal];
      if (!world) world = std::make_shared<World>();
      world->size = size;
      comm->world = world;
      self->all_.push_back(comm);
    }
    *handle = reinterpret_cast<ncclComm_t>(comm.get());
    ++self->alive_;
    if (auto fault = self->call()) return *fault;
    if (self->calls_.load() == self->hang_at_.load()) return ncclInProgress;
    self->later([comm] {
      World& world = *comm->world;
      std::unique_lock lock(world.mutex);
      world.comms.insert(comm->rank);
      world.changed.notify_all();
      while (!comm->ended && static_cast<int>(world.comms.size()) < world.size)
        world.changed.wait_for(lock, std::chrono::milliseconds(5));
      comm->in_progress = false;
    });
    return ncclInProgress;
  };
  a.comm_finalize = [](ncclComm_t handle) {
    Comm& comm = of(handle);
    self->check(comm, "ncclCommFinalize");
    if (comm.kernels > 0) self->violated("ncclCommFinalize with kernels on a stream: it would wait");
    comm.finalized = true;
    return ncclSuccess;
  };
  a.comm_destroy = [](ncclComm_t handle) {
    Comm& comm = of(handle);
    if (!comm.finalized) self->violated("ncclCommDestroy of what was not finalized");
    if (comm.kernels > 0) self->violated("ncclCommDestroy with kernels on a stream");
    if (comm.freed.exchange(true)) self->violated("ncclCommDestroy twice");
    --self->alive_;
    return ncclSuccess;
  };
  a.comm_abort = [](ncclComm_t handle) {
    Comm& comm = of(handle);
    if (comm.freed) self->violated("ncclCommAbort of a communicator that is freed");
    comm.ended = true;
    while (comm.kernels > 0) std::this_thread::sleep_for(std::chrono::microseconds(100));
    comm.freed = true;
    --self->alive_;
    return ncclSuccess;
  };
  if (revokes)
    a.comm_revoke = [](ncclComm_t handle, int) {
      Comm& comm = of(handle);
      if (comm.in_progress) self->violated("ncclCommRevoke while a call is in progress");
      if (comm.freed) self->violated("ncclCommRevoke of a communicator that is freed");
      comm.ended = true;
      return ncclSuccess;
    };
  a.async_error = [](ncclComm_t handle, ncclResult_t* state) {
    Comm& comm = of(handle);
    if (comm.freed) self->violated("ncclCommGetAsyncError of a communicator that is freed");
    *state = comm.in_progress ? ncclInProgress : self->async_.load();
    return ncclSuccess;
  };
  a.group_start = [] { return ++depth, ncclSuccess; };
  a.group_end = [] {
    if (--depth < 0) self->violated("ncclGroupEnd without ncclGroupStart");
    const auto fault = self->call();
    std::vector<Pending> ops;
    ops.swap(pending);
    if (fault) return *fault;
    if (ops.empty()) return ncclSuccess;
    std::vector<Op> own;
    for (const Pending& one : ops) {
      if (one.comm != ops.front().comm) self->violated("two communicators in a group");
      own.push_back(one.op);
    }
    self->launch(*ops.front().comm, ops.front().stream, std::move(own));
    return ncclInProgress;
  };
  a.all_reduce = [](const void* f, void* t, std::size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
                    cudaStream_t s) {
    return self->add(c, s, {Kind::kAllReduce, f, t, n, type, op, 0}, "ncclAllReduce");
  };
  a.reduce = [](const void* f, void* t, std::size_t n, ncclDataType_t type, ncclRedOp_t op, int root, ncclComm_t c,
                cudaStream_t s) { return self->add(c, s, {Kind::kReduce, f, t, n, type, op, root}, "ncclReduce"); };
  a.reduce_scatter = [](const void* f, void* t, std::size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t c,
                        cudaStream_t s) {
    return self->add(c, s, {Kind::kReduceScatter, f, t, n, type, op, 0}, "ncclReduceScatter");
  };
  a.all_gather = [](const void* f, void* t, std::size_t n, ncclDataType_t type, ncclComm_t c, cudaStream_t s) {
    return self->add(c, s, {Kind::kAllGather, f, t, n, type, ncclSum, 0}, "ncclAllGather");
  };
  a.broadcast = [](const void* f, void* t, std::size_t n, ncclDataType_t type, int root, ncclComm_t c, cudaStream_t s) {
    return self->add(c, s, {Kind::kBroadcast, f, t, n, type, ncclSum, root}, "ncclBroadcast");
  };
  a.send = [](const void* f, std::size_t n, ncclDataType_t type, int to, ncclComm_t c, cudaStream_t s) {
    return self->add(c, s, {Kind::kSend, f, nullptr, n, type, ncclSum, to}, "ncclSend");
  };
  a.recv = [](void* t, std::size_t n, ncclDataType_t type, int from, ncclComm_t c, cudaStream_t s) {
    return self->add(c, s, {Kind::kRecv, nullptr, t, n, type, ncclSum, from}, "ncclRecv");
  };
  a.create_premul_sum = [](ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t c) {
    Comm& comm = of(c);
    self->check(comm, "ncclRedOpCreatePreMulSum");
    double factor = 0;
    if (type == ncclFloat64)
      std::memcpy(&factor, scalar, sizeof factor);
    else if (type == ncclFloat32)
      factor = *static_cast<float*>(scalar);
    else
      self->violated("the fake knows factors of float32 and float64");
    const int number = ncclAvg + 1 + static_cast<int>(comm.premuls.size());
    comm.premuls[number] = factor;
    *op = static_cast<ncclRedOp_t>(number);
    return ncclSuccess;
  };
  a.destroy_op = [](ncclRedOp_t op, ncclComm_t c) {
    Comm& comm = of(c);
    self->check(comm, "ncclRedOpDestroy");
    if (comm.premuls.erase(op) == 0) self->violated("ncclRedOpDestroy of what is gone");
    return ncclSuccess;
  };
  return a;
}

}  // namespace hybridps::test
