// threads_bench: what HYBRIDPS_LIMITS=data_threads does to a large allreduce between two nodes, emulated over loopback
// TCP.
//
//   cmake --build --preset release --target benchmarks
//   build/release/benchmarks/threads_bench [--share PERCENT] [MiB] [operations] [rounds] [threads[/sockets]...]
//                                                                                  default: 64 10 5 0 1 2 auto auto/2
//
// In every round each number of threads has its turn, with two new processes, as many sockets as threads unless it says
// otherwise, and asynchronous operations one after the other. Per number: medians over the rounds of the wall time of
// an operation and of the CPU time that each thread of rank 0 used for it, user + system. Where cores are free, the
// thread that uses most decides; where they are not, the sum does.
// --share: free cores for everyone, on a machine with few: each thread gets so much of a core in every millisecond and
// no more (SCHED_DEADLINE; root), as though it had a core to itself that is as much slower. Together those of both
// processes must fit the machine: on two cores 45 for `0 1 auto`, 30 for `0 2`. What hands over by itself goes by the
// thread's time on a real core: it does not at 30.
#include <sched.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <sstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/engine/engine.h"
#include "tests/support/directory_store.h"

namespace {

using namespace hybridps;
using Clock = std::chrono::steady_clock;

struct Cpu {
  double user_ms = 0;
  double system_ms = 0;
};

/// Of this process, by the names of its threads; the main one is "caller".
std::map<std::string, Cpu> cpu_by_thread() {
  std::map<std::string, Cpu> times;
  const double ms_per_tick = 1e3 / static_cast<double>(sysconf(_SC_CLK_TCK));
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream file(task.path() / "stat");
    std::string line;
    std::getline(file, line);
    const std::size_t begin = line.find('(');
    const std::size_t end = line.rfind(')');
    if (end == std::string::npos) continue;
    std::istringstream fields(line.substr(end + 2));
    std::string skipped;
    for (int i = 0; i < 11; ++i) fields >> skipped;  // state to cmajflt
    double user = 0;
    double system = 0;
    fields >> user >> system;
    const bool is_main = task.path().filename() == std::to_string(getpid());
    Cpu& cpu = times[is_main ? "caller" : line.substr(begin + 1, end - begin - 1)];
    cpu.user_ms += user * ms_per_tick;
    cpu.system_ms += system * ms_per_tick;
  }
  return times;
}

/// Gives the threads of this process that an operation uses their share of a core, those that come later within 5 ms.
class Limiter {
 public:
  explicit Limiter(int percent) : percent_(percent) {
    if (percent_ > 0) thread_ = std::thread([this] { run(); });
  }
  ~Limiter() {
    stop_.store(true);
    if (thread_.joinable()) thread_.join();
  }

 private:
  struct Attributes {  // of sched_setattr(2), which glibc declares since 2.41 only
    std::uint32_t size = sizeof(Attributes);
    std::uint32_t policy = 6;  // SCHED_DEADLINE
    std::uint64_t flags = 1;   // SCHED_FLAG_RESET_ON_FORK: or the thread could not make others
    std::int32_t nice = 0;
    std::uint32_t priority = 0;
    std::uint64_t runtime = 0;
    std::uint64_t deadline = 1'000'000;
    std::uint64_t period = 1'000'000;  // ns
  };

  void run() {
    std::set<pid_t> limited;
    while (!stop_.load()) {
      for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
        const pid_t id = std::atoi(task.path().filename().c_str());
        std::ifstream file(task.path() / "comm");
        std::string name;
        std::getline(file, name);
        const bool works = name == "hybridps" || name.rfind("hybridps-data", 0) == 0;
        if (!works || !limited.insert(id).second) continue;
        Attributes attributes;
        attributes.runtime = static_cast<std::uint64_t>(percent_) * 10'000;
        if (syscall(SYS_sched_setattr, id, &attributes, 0) != 0 && errno != ESRCH) {
          std::fprintf(stderr, "threads_bench: --share %d: %s; it needs root, and all threads must fit the machine\n",
                       percent_, std::strerror(errno));
          _exit(1);
        }
      }
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  }

  const int percent_;
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

/// How a rank moves its data.
struct Way {
  std::string threads;
  std::string sockets;
};
/// "2", "auto/2".
Way way_of(const std::string& text) {
  const std::size_t slash = text.find('/');
  Way way{text.substr(0, slash), slash == std::string::npos ? "" : text.substr(slash + 1)};
  if (way.sockets.empty())
    way.sockets = way.threads == "auto" ? "1" : std::to_string(std::max(std::atoi(way.threads.c_str()), 1));
  return way;
}

void allreduce(engine::Group& group, std::vector<float>& data) {
  std::mutex mutex;
  std::condition_variable changed;
  bool done = false;
  core::Status status;
  worker::Operation operation;
  operation.kind = schedule::Kind::kAllReduce;
  operation.dtype = core::DType::kFloat32;
  operation.op = core::ReduceOp::kSum;
  operation.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)}};
  operation.timeout = std::chrono::seconds(60);
  group.submit(std::move(operation), [&](const worker::Outcome& outcome) {
    const std::lock_guard lock(mutex);
    status = outcome.status;
    done = true;
    changed.notify_all();
  });
  std::unique_lock lock(mutex);
  changed.wait(lock, [&] { return done; });
  if (!status.is_ok()) throw std::runtime_error(status.to_string());
}

void rank_main(int rank, const Way& way, int share, std::size_t bytes, int operations, const std::string& folder,
               int answer) {
  setenv("HYBRIDPS_INTERFACE", "lo", 1);
  setenv("HYBRIDPS_NODE", rank == 0 ? "a" : "b", 1);
  setenv("LOCAL_WORLD_SIZE", "1", 1);
  setenv("HYBRIDPS_LIMITS", ("data_threads=" + way.threads).c_str(), 1);
  setenv("HYBRIDPS_DATA_SOCKETS", way.sockets.c_str(), 1);
  setenv("HYBRIDPS_SPIN_MICROSECONDS", "0", 0);
  if (share > 0) setenv("HYBRIDPS_CORES", "6", 0);
  const Limiter limiter(share);
  auto engine = engine::Engine::acquire();
  if (!engine.is_ok()) throw std::runtime_error(engine.status().to_string());
  engine::GroupOptions options;
  options.name = "bench";
  options.incarnation = "bench.0.0";
  options.rank = rank;
  options.size = 2;
  options.store = std::make_shared<test::DirectoryStore>(folder);
  options.timeout = std::chrono::seconds(60);
  auto group = engine.value()->open_group(options);
  if (!group.is_ok()) throw std::runtime_error(group.status().to_string());
  if (core::Status status = group.value()->wait_ready(); !status.is_ok()) throw std::runtime_error(status.to_string());
  std::vector<float> data(bytes / sizeof(float), 0.0f);
  for (int i = 0; i < 3; ++i) allreduce(*group.value(), data);
  const auto before = cpu_by_thread();
  std::vector<double> times;
  for (int i = 0; i < operations; ++i) {
    const auto start = Clock::now();
    allreduce(*group.value(), data);
    times.push_back(std::chrono::duration<double, std::milli>(Clock::now() - start).count());
  }
  std::sort(times.begin(), times.end());
  std::ostringstream text;
  text << "wall " << times[times.size() / 2] << " 0\n";
  for (auto [name, cpu] : cpu_by_thread()) {
    const auto found = before.find(name);
    const Cpu was = found != before.end() ? found->second : Cpu{};
    text << name << ' ' << (cpu.user_ms - was.user_ms) / operations << ' '
         << (cpu.system_ms - was.system_ms) / operations << '\n';
  }
  if (rank == 0 && ::write(answer, text.str().data(), text.str().size()) < 0) throw std::runtime_error("no pipe");
  group.value()->leave();
  engine.value()->linger();
}

/// One turn: what rank 0 found.
std::map<std::string, Cpu> turn(const Way& way, int share, std::size_t bytes, int operations) {
  char folder[] = "/tmp/hybridps-threads-bench-XXXXXX";
  int pipe_fds[2];
  if (mkdtemp(folder) == nullptr || pipe(pipe_fds) != 0) throw std::runtime_error("no folder or pipe");
  std::vector<pid_t> pids;
  for (int rank = 0; rank < 2; ++rank) {
    const pid_t pid = fork();
    if (pid == 0) {
      int code = 0;
      try {
        rank_main(rank, way, share, bytes, operations, folder, pipe_fds[1]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "threads_bench: rank %d: %s\n", rank, error.what());
        code = 1;
      }
      std::fflush(nullptr);
      _exit(code);
    }
    pids.push_back(pid);
  }
  ::close(pipe_fds[1]);
  std::string text;
  char block[4096];
  for (ssize_t got = 0; (got = ::read(pipe_fds[0], block, sizeof block)) > 0;)
    text.append(block, static_cast<std::size_t>(got));
  ::close(pipe_fds[0]);
  bool failed = false;
  for (const pid_t pid : pids) {
    int status = 0;
    failed = pid < 0 || waitpid(pid, &status, 0) != pid || status != 0 || failed;
  }
  std::filesystem::remove_all(folder);
  if (failed) throw std::runtime_error("a rank failed");
  std::map<std::string, Cpu> found;
  std::istringstream lines(text);
  std::string name;
  for (Cpu cpu; lines >> name >> cpu.user_ms >> cpu.system_ms;) found[name] = cpu;
  return found;
}

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values.empty() ? 0 : values[values.size() / 2];
}

}  // namespace

int main(int argc, char** argv) {
  std::vector<std::string> given(argv + 1, argv + argc);
  int share = 0;
  if (given.size() >= 2 && given[0] == "--share") {
    share = std::atoi(given[1].c_str());
    given.erase(given.begin(), given.begin() + 2);
    if (share < 1) share = 101;  // refused below
  }
  const auto argument = [&](std::size_t i, int otherwise) {
    return given.size() > i ? std::atoi(given[i].c_str()) : otherwise;
  };
  const int mib = argument(0, 64);
  const int operations = argument(1, 10);
  const int rounds = argument(2, 5);
  std::vector<std::string> ways;
  for (std::size_t i = 3; i < given.size(); ++i) ways.push_back(given[i]);
  if (ways.empty()) ways = {"0", "1", "2", "auto", "auto/2"};
  if (mib < 1 || operations < 1 || rounds < 1 || share > 100) {
    std::fprintf(stderr, "usage: threads_bench [--share PERCENT] [MiB] [operations] [rounds] [threads[/sockets]...]\n");
    return 2;
  }
  std::map<std::string, std::vector<std::map<std::string, Cpu>>> all;
  try {
    for (int round = 0; round < rounds; ++round)
      for (const std::string& way : ways)
        all[way].push_back(turn(way_of(way), share, static_cast<std::size_t>(mib) << 20, operations));
  } catch (const std::exception& error) {
    std::fprintf(stderr, "threads_bench: %s\n", error.what());
    return 1;
  }
  for (const auto& [threads, turns] : all) {
    std::map<std::string, std::pair<std::vector<double>, std::vector<double>>> by_name;
    for (const auto& one : turns)
      for (const auto& [name, cpu] : one) {
        by_name[name].first.push_back(cpu.user_ms);
        by_name[name].second.push_back(cpu.system_ms);
      }
    const std::vector<double>& wall = by_name["wall"].first;
    std::printf("%s threads, %d MiB: %.1f ms (%.1f to %.1f);", threads.c_str(), mib, median(wall),
                *std::min_element(wall.begin(), wall.end()), *std::max_element(wall.begin(), wall.end()));
    for (const auto& [name, times] : by_name)
      if (name != "wall" && median(times.first) + median(times.second) >= 0.5)
        std::printf("  %s %.1f + %.1f", name.c_str(), median(times.first), median(times.second));
    std::printf("\n");
  }
  return 0;
}
