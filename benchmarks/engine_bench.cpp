// engine_bench: small operations between the engines of one host, in C++: what they cost without torch and Python.
//
//   cmake --build --preset release --target benchmarks
//   build/release/benchmarks/engine_bench [ranks] [seconds per line]        default: 2 1
//
// One process per rank, sharing memory. Operations run back to back. "drive": the caller drives the engine, as torch's
// synchronous calls do; "thread": the engine's thread runs the operation and wakes the caller, as for asynchronous
// ones. Times are of rank 0, in batches of 100: best, median and 99th percentile of the batches' means.
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/core/clock.h"
#include "hybridps/engine/engine.h"
#include "tests/support/directory_store.h"

namespace {

using namespace hybridps;
using Clock = std::chrono::steady_clock;

/// One operation after the other; keeps what a caller of the engine has to keep.
class Caller {
 public:
  explicit Caller(engine::Group& group) : group_(group) {}

  void run(schedule::Kind kind, std::vector<float>& data, bool drives) {
    worker::Operation operation;
    operation.kind = kind;
    if (kind == schedule::Kind::kAllReduce) {
      operation.dtype = core::DType::kFloat32;
      operation.op = core::ReduceOp::kSum;
      operation.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)}};
    }
    operation.timeout = std::chrono::seconds(20);
    done_.store(false);
    const auto completion = [this](const worker::Outcome& outcome) {
      const std::lock_guard lock(mutex_);
      status_ = outcome.status;
      done_.store(true);
      changed_.notify_all();
    };
    group_.submit(std::move(operation), completion, drives);
    if (drives) group_.drive([this] { return done_.load(); }, core::Clock::now() + std::chrono::seconds(20));
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return done_.load(); });
    if (!status_.is_ok()) throw std::runtime_error(status_.to_string());
  }

 private:
  engine::Group& group_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::atomic<bool> done_{false};
  core::Status status_;
};

void measure(Caller& caller, int rank, schedule::Kind kind, std::size_t bytes, bool drives, double seconds) {
  constexpr int kBatch = 100;
  std::vector<float> data(bytes / sizeof(float));
  const auto batch = [&] {
    const auto start = Clock::now();
    for (int i = 0; i < kBatch; ++i) caller.run(kind, data, drives);
    return std::chrono::duration<double, std::micro>(Clock::now() - start).count() / kBatch;
  };
  // All ranks must run the same number of batches: rank 0 finds it, and tells the others by a sum.
  std::vector<float> batches(1, 0.0f);
  const double first = std::min(batch(), batch());
  if (rank == 0) batches[0] = static_cast<float>(std::clamp(seconds * 1e6 / (first * kBatch), 5.0, 1e4));
  caller.run(schedule::Kind::kAllReduce, batches, true);
  std::vector<double> times;
  for (int i = 0; i < static_cast<int>(batches[0]); ++i) times.push_back(batch());
  std::sort(times.begin(), times.end());
  if (rank != 0) return;
  const auto at = [&](double part) {
    return times[static_cast<std::size_t>(part * static_cast<double>(times.size() - 1))];
  };
  std::printf("%-10s %8zu B  %-7s best %7.2f  median %7.2f  p99 %7.2f us\n", schedule::name_of(kind).data(), bytes,
              drives ? "drive" : "thread", times.front(), at(0.5), at(0.99));
  std::fflush(stdout);
}

void rank_main(int rank, int ranks, double seconds, const std::filesystem::path& folder) {
  setenv("HYBRIDPS_INTERFACE", "lo", 0);
  setenv("LOCAL_WORLD_SIZE", std::to_string(ranks).c_str(), 1);  // as torchrun says it: decides whether to spin
  auto engine = engine::Engine::acquire();
  if (!engine.is_ok()) throw std::runtime_error(engine.status().to_string());
  engine::GroupOptions options;
  options.name = "bench";
  options.incarnation = "bench.0.0";
  options.rank = rank;
  options.size = ranks;
  options.store = std::make_shared<test::DirectoryStore>(folder);
  options.timeout = std::chrono::seconds(30);
  auto group = engine.value()->open_group(options);
  if (!group.is_ok()) throw std::runtime_error(group.status().to_string());
  if (core::Status status = group.value()->wait_ready(); !status.is_ok()) throw std::runtime_error(status.to_string());
  {
    Caller caller(*group.value());
    for (const bool drives : {true, false}) {
      measure(caller, rank, schedule::Kind::kBarrier, 0, drives, seconds);
      for (const std::size_t bytes : {std::size_t{64}, std::size_t{4096}, std::size_t{65536}})
        measure(caller, rank, schedule::Kind::kAllReduce, bytes, drives, seconds);
    }
  }
  group.value()->leave();
  engine.value()->linger();
}

}  // namespace

int main(int argc, char** argv) {
  const int ranks = argc > 1 ? std::atoi(argv[1]) : 2;
  const double seconds = argc > 2 ? std::atof(argv[2]) : 1;
  if (ranks < 1 || ranks > 64 || seconds <= 0) {
    std::fprintf(stderr, "usage: engine_bench [ranks, 1 to 64] [seconds per line]\n");
    return 2;
  }
  char folder[] = "/tmp/hybridps-engine-bench-XXXXXX";
  if (mkdtemp(folder) == nullptr) {
    std::perror("engine_bench: mkdtemp");
    return 1;
  }
  std::printf("%d ranks on one host, %u cores\n", ranks, std::thread::hardware_concurrency());
  std::fflush(stdout);
  std::vector<pid_t> pids;
  for (int rank = 0; rank < ranks; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      int code = 0;
      try {
        rank_main(rank, ranks, seconds, folder);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "engine_bench: rank %d: %s\n", rank, error.what());
        code = 1;
      }
      std::fflush(nullptr);
      _exit(code);
    }
    pids.push_back(pid);
  }
  int failed = 0;
  for (const pid_t pid : pids) {
    int status = 0;
    if (pid < 0 || waitpid(pid, &status, 0) != pid || status != 0) failed = 1;
  }
  std::filesystem::remove_all(folder);
  return failed;
}
