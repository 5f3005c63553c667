#include "hybridps/intranode/nccl/nccl_group.h"

#include "hybridps/device/cuda/cuda_device.h"

#include <algorithm>
#include <atomic>

namespace {
struct Nccl {
  static std::vector<std::shared_ptr<hybridps::device::Device>> devices(int size) {
    std::vector<std::shared_ptr<hybridps::device::Device>> made;
    const auto& driver = hybridps::device::load_driver();
    if (!driver.is_ok() || !hybridps::intranode::load_nccl().is_ok()) return made;
    for (int r = 0; r < size; ++r) {
      auto device = hybridps::device::CudaDevice::open(driver.value(), r);
      if (!device.is_ok()) return {};
      made.push_back(std::move(device).value());
    }
    return made;
  }
  static std::string why() {
    const auto& nccl = hybridps::intranode::load_nccl();
    return "as many GPUs as ranks are needed: " + hybridps::device::describe_cuda() + "; " +
           (nccl.is_ok() ? "NCCL " + nccl.value().version_text() : std::string(nccl.status().message()));
  }
  static std::shared_ptr<hybridps::intranode::LocalGroups> library() {
    return std::make_shared<hybridps::intranode::NcclGroups>(hybridps::intranode::load_nccl().value());
  }
};
}  // namespace

#define HYBRIDPS_LOCAL_BACKENDS Nccl
#include "tests/unit/intranode/local_group_contract.h"

// --- Without GPUs: the calls, on a library that only takes notes

namespace {

using namespace hybridps;
using namespace local_group_contract;
using intranode::NcclApi;
using intranode::NcclGroups;

struct Notes {
  std::mutex mutex;
  std::vector<std::string> calls;
  int here = 0;                     // calls made with the device current
  int elsewhere = 0;                // and without
  int depth = 0;                    // of groups
  int in_progress = 0;              // answers of that kind before the next call is done
  ncclResult_t next = ncclSuccess;  // of the next call that takes notes, but for those that end
  ncclResult_t async = ncclSuccess;
  int touched_while_busy = 0;
  int alive = 0;
  double scalar = 0;
  int blocking = 1;
  bool hangs = false;           // never done
  std::atomic<int> kernels{0};  // for which an abort waits, as NCCL's does
  std::atomic<int> aborting{0};
};
Notes* notes = nullptr;
thread_local bool is_here = false;

ncclResult_t note(const std::string& call, bool ends = false) {
  const std::lock_guard lock(notes->mutex);
  notes->calls.push_back(call);
  ++(is_here ? notes->here : notes->elsewhere);
  if (notes->in_progress > 0 && !ends) ++notes->touched_while_busy;
  return ends ? ncclSuccess : std::exchange(notes->next, ncclSuccess);
}

std::string data(const void* pointer) { return std::to_string(reinterpret_cast<std::uintptr_t>(pointer)); }

NcclApi scripted() {
  NcclApi a;
  a.version = 23007;
  a.error_string = [](ncclResult_t) { return "an error of the test"; };
  a.last_error = [](ncclComm_t) { return "with its reason\n"; };
  a.unique_id = [](ncclUniqueId* id) { return std::memset(id, 'u', sizeof *id), ncclSuccess; };
  a.comm_init = [](ncclComm_t* comm, int size, ncclUniqueId id, int rank, ncclConfig_t* config) {
    const ncclResult_t result =
        note("init " + std::to_string(rank) + "/" + std::to_string(size) + " " + id.internal[0]);
    const std::lock_guard lock(notes->mutex);
    notes->blocking = config->blocking;
    *comm = reinterpret_cast<ncclComm_t>(static_cast<std::uintptr_t>(0x100 + notes->alive++));
    notes->in_progress = 3;
    return result == ncclSuccess ? ncclInProgress : result;
  };
  a.comm_finalize = [](ncclComm_t) {
    const ncclResult_t result = note("finalize");
    notes->in_progress = 2;
    return result == ncclSuccess ? ncclInProgress : result;
  };
  a.comm_destroy = [](ncclComm_t) { return --notes->alive, note("destroy"); };
  a.comm_abort = [](ncclComm_t) {
    ++notes->aborting;
    while (notes->kernels.load() > 0) std::this_thread::sleep_for(100us);
    --notes->aborting;
    const ncclResult_t result = note("abort", true);
    const std::lock_guard lock(notes->mutex);
    --notes->alive;
    return result;
  };
  a.async_error = [](ncclComm_t, ncclResult_t* state) {
    const std::lock_guard lock(notes->mutex);
    if (!notes->hangs && notes->in_progress > 0) --notes->in_progress;
    *state = notes->in_progress > 0 || notes->hangs ? ncclInProgress : notes->async;
    return ncclSuccess;
  };
  a.group_start = [] { return ++notes->depth, note("start"); };
  a.group_end = [] {
    --notes->depth;
    const ncclResult_t result = note("end", true);
    notes->in_progress = 2;
    return result == ncclSuccess ? ncclInProgress : result;
  };
  a.all_reduce = [](const void* f, void* t, std::size_t n, ncclDataType_t type, ncclRedOp_t op, ncclComm_t,
                    cudaStream_t) {
    return note("all_reduce " + data(f) + ">" + data(t) + " x" + std::to_string(n) + " t" + std::to_string(type) +
                " o" + std::to_string(op));
  };
  a.reduce = [](const void* f, void* t, std::size_t n, ncclDataType_t, ncclRedOp_t, int root, ncclComm_t,
                cudaStream_t) {
    return note("reduce " + data(f) + ">" + data(t) + " x" + std::to_string(n) + " r" + std::to_string(root));
  };
  a.reduce_scatter = [](const void* f, void* t, std::size_t n, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return note("reduce_scatter " + data(f) + ">" + data(t) + " x" + std::to_string(n));
  };
  a.all_gather = [](const void* f, void* t, std::size_t n, ncclDataType_t, ncclComm_t, cudaStream_t) {
    return note("all_gather " + data(f) + ">" + data(t) + " x" + std::to_string(n));
  };
  a.broadcast = [](const void* f, void* t, std::size_t n, ncclDataType_t, int root, ncclComm_t, cudaStream_t) {
    return note("broadcast " + data(f) + ">" + data(t) + " x" + std::to_string(n) + " r" + std::to_string(root));
  };
  a.send = [](const void* f, std::size_t n, ncclDataType_t, int to, ncclComm_t, cudaStream_t) {
    return note("send " + data(f) + " x" + std::to_string(n) + " to " + std::to_string(to));
  };
  a.recv = [](void* t, std::size_t n, ncclDataType_t, int from, ncclComm_t, cudaStream_t) {
    return note("recv " + data(t) + " x" + std::to_string(n) + " from " + std::to_string(from));
  };
  a.create_premul_sum = [](ncclRedOp_t* op, void* scalar, ncclDataType_t type, ncclScalarResidence_t where,
                           ncclComm_t) {
    *op = static_cast<ncclRedOp_t>(77);
    if (type == ncclFloat64) std::memcpy(&notes->scalar, scalar, sizeof(double));
    if (type == ncclFloat16) notes->scalar = *static_cast<std::uint16_t*>(scalar);
    return where == ncclScalarHostImmediate ? note("create op") : ncclInvalidArgument;
  };
  a.destroy_op = [](ncclRedOp_t op, ncclComm_t) { return op == 77 ? note("destroy op") : ncclInvalidArgument; };
  return a;
}

/// A device that only says where it is.
struct Here final : device::Device {
  int index() const noexcept override { return 0; }
  std::string describe() const override { return "nowhere"; }
  core::Result<std::string> physical_id() override { return std::string("id"); }
  core::Status run_here(const std::function<core::Status()>& call) override {
    is_here = true;
    core::Status status = call();
    is_here = false;
    return status;
  }
  core::Result<device::DeviceStream> make_stream() override { return device::DeviceStream{}; }
  void destroy(device::DeviceStream) noexcept override {}
  core::Result<device::DeviceEvent> make_event() override { return device::DeviceEvent{}; }
  void destroy(device::DeviceEvent) noexcept override {}
  core::Status record(device::DeviceEvent, device::DeviceStream) override { return {}; }
  core::Status wait(device::DeviceStream, device::DeviceEvent) override { return {}; }
  core::Result<bool> is_done(device::DeviceEvent) override { return true; }
  core::Status copy_to_host(device::DeviceStream, void*, const void*, std::uint64_t) override { return {}; }
  core::Status copy_to_device(device::DeviceStream, void*, const void*, std::uint64_t) override { return {}; }
  core::Status copy_within(device::DeviceStream, void*, const void*, std::uint64_t) override { return {}; }
  core::Status write_flag(device::DeviceStream, device::Flag, std::uint32_t) override { return {}; }
  core::Status wait_flag(device::DeviceStream, device::Flag, std::uint32_t) override { return {}; }
  core::Result<bool> is_capturing(device::DeviceStream) override { return false; }
  core::Result<device::HostMemory> allocate_host(std::uint64_t) override {
    return core::Status(core::Code::kInternal, "");
  }
  void free_host(device::HostMemory) noexcept override {}
  core::Result<std::byte*> allocate_device(std::uint64_t) override { return core::Status(core::Code::kInternal, ""); }
  void free_device(std::byte*) noexcept override {}
};

struct Script {
  Script() { notes = &kept; }
  ~Script() { CHECK(NcclGroups::drain(10s)); }
  std::shared_ptr<LocalGroup> connect(int rank = 1, int size = 2, std::size_t legs = 2) {
    auto group = library.connect(std::make_shared<Here>(), rank, size,
                                 std::vector<std::string>(legs, library.make_id().value()), patience());
    REQUIRE(group.status().to_string() == "ok");
    kept.calls.clear();
    return group.value();
  }
  std::vector<std::string> calls() {
    const std::lock_guard lock(kept.mutex);
    return std::exchange(kept.calls, {});
  }
  Notes kept;
  NcclApi api = scripted();
  NcclGroups library{api};
};

std::byte* at(std::uintptr_t address) { return reinterpret_cast<std::byte*>(address); }

using Calls = std::vector<std::string>;
const Reduction kSum{core::DType::kFloat32, core::ReduceOp::kSum, 1.0};

}  // namespace

TEST_CASE("intranode/nccl: a group is two communicators that do not block, finalized and destroyed in the end",
          "[intranode][fast]") {
  Script script;
  {
    auto group = script.library.connect(std::make_shared<Here>(), 1, 3, {std::string(128, 'a'), std::string(128, 'b')},
                                        patience());
    REQUIRE(group.is_ok());
    CHECK(script.calls() == Calls{"init 1/3 a", "init 1/3 b"});
    CHECK(script.kept.blocking == 0);
    CHECK(script.kept.touched_while_busy == 0);
    CHECK(group.value()->poll().is_ok());
  }
  REQUIRE(NcclGroups::drain(10s));
  CHECK(script.calls() == Calls{"finalize", "destroy", "finalize", "destroy"});
  CHECK(script.kept.touched_while_busy == 0);
  CHECK(script.kept.alive == 0);
  CHECK(script.kept.elsewhere == 0);
}

TEST_CASE("intranode/nccl: equal parts in a row are one call and others one each, in one group", "[intranode][fast]") {
  Script script;
  const auto group = script.connect();
  const Part sums[] = {{0, 40, at(1000), nullptr, false}, {1, 40, at(1040), at(1040), true},
                       {1, 8, at(1080), at(1080), true},  {0, 0, nullptr, nullptr, true},
                       {0, 40, at(2000), nullptr, false}, {1, 40, at(3000), at(3000), false}};  // not in a row
  REQUIRE(group->reduce(Leg::kIn, {}, sums, kSum, patience()).is_ok());
  CHECK(script.calls() == Calls{"start", "reduce_scatter 1000>1040 x10", "reduce 1080>1080 x2 r1",
                                "reduce 2000>0 x10 r0", "reduce 3000>3000 x10 r1", "end"});
  const Part spreads[] = {{0, 40, nullptr, at(1000), false},
                          {1, 40, at(1040), at(1040), true},
                          {1, 8, at(500), at(1080), true},
                          {0, 12, nullptr, at(1088), true}};
  REQUIRE(group->spread(Leg::kOut, {}, spreads, patience()).is_ok());
  CHECK(script.calls() ==
        Calls{"start", "all_gather 1040>1000 x40", "broadcast 500>1080 x8 r1", "broadcast 1088>1088 x12 r0", "end"});
  const Transfer messages[] = {
      {0, 24, at(600), nullptr}, {2, 8, nullptr, at(700)}, {0, 16, nullptr, at(708)}, {0, 4, at(624), nullptr}};
  REQUIRE(group->exchange(Leg::kOut, {}, messages, patience()).is_ok());
  CHECK(script.calls() ==
        Calls{"start", "send 600 x24 to 0", "recv 700 x8 from 2", "recv 708 x16 from 0", "send 624 x4 to 0", "end"});
  REQUIRE(group->exchange(Leg::kOut, {}, {}, patience()).is_ok());
  CHECK(script.calls() == Calls{"start", "end"});
  CHECK(script.kept.touched_while_busy == 0);
  CHECK(script.kept.depth == 0);
  CHECK(script.kept.elsewhere == 0);
}

TEST_CASE("intranode/nccl: a factor is an operation of its own, in the element's type, until the call is done",
          "[intranode][fast]") {
  Script script;
  const auto group = script.connect();
  const Part part[] = {{0, 160, at(8), at(8), false}};
  REQUIRE(group->all_reduce(Leg::kOut, {}, part, {core::DType::kFloat64, core::ReduceOp::kPremulSum, 0.25}, patience())
              .is_ok());
  CHECK(script.calls() == Calls{"create op", "start", "all_reduce 8>8 x20 t" + std::to_string(ncclFloat64) + " o77",
                                "end", "destroy op"});
  CHECK(script.kept.scalar == 0.25);
  CHECK(script.kept.touched_while_busy == 0);
  REQUIRE(group->all_reduce(Leg::kOut, {}, part, {core::DType::kFloat16, core::ReduceOp::kPremulSum, 0.5}, patience())
              .is_ok());
  CHECK(script.kept.scalar == 0x3800);
  // Complex numbers are pairs.
  script.calls();
  REQUIRE(
      group->all_reduce(Leg::kOut, {}, part, {core::DType::kComplex64, core::ReduceOp::kSum, 1}, patience()).is_ok());
  CHECK(script.calls()[1] == "all_reduce 8>8 x40 t" + std::to_string(ncclFloat32) + " o" + std::to_string(ncclSum));
}

TEST_CASE("intranode/nccl: errors are told with their reason, and a group that was begun is ended",
          "[intranode][fast]") {
  Script script;
  const auto group = script.connect();
  const Part part[] = {{0, 160, at(8), at(8), false}};
  script.kept.next = ncclUnhandledCudaError;  // of ncclGroupStart
  CHECK(group->all_reduce(Leg::kOut, {}, part, kSum, patience()).message() ==
        "NCCL: ncclGroupStart failed: an error of the test (with its reason)");
  script.calls();
  script.kept.depth = 0;
  script.api.all_reduce = [](const void*, void*, std::size_t, ncclDataType_t, ncclRedOp_t, ncclComm_t, cudaStream_t) {
    return ncclInvalidArgument;
  };
  CHECK(group->all_reduce(Leg::kOut, {}, part, kSum, patience()).code() == core::Code::kInvalidArgument);
  CHECK(script.calls() == Calls{"start", "end"});
  CHECK(script.kept.depth == 0);
  script.kept.in_progress = 0;
  script.kept.async = ncclRemoteError;
  CHECK(group->poll().message() == "NCCL: a communicator failed: an error of the test (with its reason)");
  group->abort();
}

TEST_CASE("intranode/nccl: a call that is never done ends by abort from another thread, by its deadline or its reason",
          "[intranode][fast]") {
  Script script;
  const Part part[] = {{0, 160, at(8), at(8), false}};
  {
    const auto group = script.connect();
    script.kept.hangs = true;
    CHECK(group->all_reduce(Leg::kOut, {}, part, kSum, patience(30ms)).code() == core::Code::kTimeout);
    Patience unwanted;
    unwanted.still_wanted = [] { return core::Status(core::Code::kPeerDead, "rank 3 is gone"); };
    CHECK(group->all_reduce(Leg::kOut, {}, part, kSum, unwanted).message() == "rank 3 is gone");
    std::thread other([&] {
      std::this_thread::sleep_for(20ms);
      group->abort();
    });
    CHECK(group->all_reduce(Leg::kOut, {}, part, kSum, {}).code() == core::Code::kAborted);
    other.join();
    REQUIRE(NcclGroups::drain(10s));
    CHECK(script.kept.alive == 0);
    CHECK(group->reduce(Leg::kIn, {}, part, kSum, {}).code() == core::Code::kAborted);
    CHECK(group->poll().code() == core::Code::kAborted);
    script.calls();
  }
  // Nothing is finalized after that.
  REQUIRE(NcclGroups::drain(10s));
  CHECK(script.calls().empty());
  script.kept.hangs = false;
}

TEST_CASE("intranode/nccl: an aborted group is stopped at once, whatever is on the streams", "[intranode][fast]") {
  for (const bool revokes : {true, false}) {
    INFO("ncclCommRevoke " << revokes);
    Script script;
    if (revokes)
      script.api.comm_revoke = [](ncclComm_t, int flags) {
        return flags == 0 ? note("revoke", true) : ncclInvalidArgument;
      };
    {
      const auto group = script.connect();
      script.kept.kernels = 1;  // behind a flag that is set when the group is stopped
      CHECK_FALSE(group->is_stopped());
      group->abort();
      const auto until = std::chrono::steady_clock::now() + 30s;
      while (!group->is_stopped() && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(100us);
      REQUIRE(group->is_stopped());
      if (revokes) {
        // Nothing is freed while the group lives.
        std::this_thread::sleep_for(20ms);
        CHECK(script.calls() == Calls{"revoke", "revoke"});
        CHECK(script.kept.aborting == 0);
      } else {
        // Both at the same time: one may wait for a stream that waits for a kernel of the other.
        while (script.kept.aborting < 2 && std::chrono::steady_clock::now() < until) std::this_thread::sleep_for(100us);
        CHECK(script.kept.aborting == 2);
      }
      script.kept.kernels = 0;
    }
    REQUIRE(NcclGroups::drain(10s));
    CHECK(script.calls() == Calls{"abort", "abort"});
    CHECK(script.kept.alive == 0);
    CHECK(script.kept.elsewhere == 0);
  }
}

TEST_CASE("intranode/nccl: a communicator in the middle of a call is not revoked", "[intranode][fast]") {
  Script script;
  script.api.comm_revoke = [](ncclComm_t, int) { return note("revoke", true); };
  const Part part[] = {{0, 160, at(8), at(8), false}};
  const auto group = script.connect();
  script.kept.hangs = true;
  CHECK(group->all_reduce(Leg::kOut, {}, part, kSum, patience(30ms)).code() == core::Code::kTimeout);
  script.calls();
  group->abort();
  REQUIRE(NcclGroups::drain(10s));
  std::vector<std::string> calls = script.calls();
  std::sort(calls.begin(), calls.end());
  CHECK(calls == Calls{"abort", "revoke"});  // of the out leg, of the in leg
  CHECK(group->is_stopped());
  script.kept.hangs = false;
}

TEST_CASE("intranode/nccl: what cannot be joined is aborted", "[intranode][fast]") {
  Script script;
  script.kept.hangs = true;
  const auto failed = script.library.connect(std::make_shared<Here>(), 0, 2, {std::string(128, 'a')}, patience(20ms));
  CHECK(failed.status().message() == "ncclCommInitRankConfig: the other ranks of the node did not come in time");
  REQUIRE(NcclGroups::drain(10s));
  CHECK(script.kept.alive == 0);
  CHECK(script.calls() == Calls{"init 0/2 a", "abort"});
  script.kept.hangs = false;
  CHECK(script.library.connect(std::make_shared<Here>(), 0, 2, {"short"}, patience()).status().code() ==
        core::Code::kInvalidArgument);
}

TEST_CASE("intranode/nccl: knows what NCCL can reduce", "[intranode][fast]") {
  using core::DType;
  using core::ReduceOp;
  Script script;
  const NcclGroups& nccl = script.library;
  CHECK(nccl.describe() == "NCCL 2.30.7");
  for (const DType dtype : {DType::kFloat16, DType::kBfloat16, DType::kFloat32, DType::kFloat64})
    for (const ReduceOp op :
         {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kPremulSum})
      CHECK(nccl.can_reduce(dtype, op));
  for (const DType dtype :
       {DType::kUint8, DType::kInt8, DType::kInt32, DType::kInt64, DType::kUint32, DType::kUint64}) {
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kProduct, ReduceOp::kMin, ReduceOp::kMax})
      CHECK(nccl.can_reduce(dtype, op));
    for (const ReduceOp op : {ReduceOp::kAvg, ReduceOp::kBand, ReduceOp::kPremulSum})
      CHECK_FALSE(nccl.can_reduce(dtype, op));
  }
  for (const DType dtype : {DType::kInt16, DType::kUint16, DType::kBool, DType::kFloat8E4M3fn, DType::kBytes})
    CHECK_FALSE(nccl.can_reduce(dtype, ReduceOp::kSum));
  CHECK(nccl.can_reduce(DType::kComplex64, ReduceOp::kSum));
  CHECK_FALSE(nccl.can_reduce(DType::kComplex64, ReduceOp::kProduct));
}

TEST_CASE("intranode/nccl: the library of this machine is found, or what is missing is said", "[intranode][fast]") {
  const auto& nccl = intranode::load_nccl();
  if (nccl.is_ok())
    CHECK(nccl.value().version >= 21800);
  else
    CHECK(nccl.status().message().find("libnccl.so.2") != std::string::npos);
}
