#include "hybridps/engine/cores.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "tests/support/catch.h"

namespace {

using namespace hybridps;
using engine::cores_for_each;
using engine::DataThreadsPlan;
using engine::Interfaces;
using engine::plan_data_threads;

/// A folder as /sys/fs/cgroup, removed at the end.
struct Cgroups {
  Cgroups() : path(std::filesystem::temp_directory_path() / ("hybridps-cgroups-" + std::to_string(getpid()))) {
    std::filesystem::create_directories(path / "cpu");
  }
  ~Cgroups() { std::filesystem::remove_all(path); }
  void write(const std::string& file, const std::string& text) const { std::ofstream(path / file) << text << '\n'; }
  std::filesystem::path path;
};

std::size_t own_cpus() {
  cpu_set_t cpus;
  CPU_ZERO(&cpus);
  (void)sched_getaffinity(0, sizeof cpus, &cpus);
  return static_cast<std::size_t>(CPU_COUNT(&cpus));
}
const std::size_t kHere = own_cpus();

/// What `check` returned in a child process that was bound to one CPU, as well as what it starts.
template <typename Check>
int bound_to_one(const Check& check) {
  const pid_t child = fork();
  if (child == 0) {
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu) {
      cpu_set_t cpus;
      (void)sched_getaffinity(0, sizeof cpus, &cpus);
      if (CPU_ISSET(cpu, &cpus)) CPU_SET(cpu, &one);
    }
    _exit(sched_setaffinity(0, sizeof one, &one) == 0 ? check() : 99);
  }
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

}  // namespace

TEST_CASE("engine/cores: those of the machine, of its container or as set, divided by the ranks", "[engine][fast]") {
  core::Config config;
  const Cgroups none;
  CHECK(cores_for_each(config, 1, none.path) == kHere);
  CHECK(cores_for_each(config, kHere, none.path) == 1);
  CHECK(cores_for_each(config, kHere + 1, none.path) == 0);

  const Cgroups& v1 = none;
  v1.write("cpu/cpu.cfs_period_us", "100000");
  v1.write("cpu/cpu.cfs_quota_us", "-1");
  CHECK(cores_for_each(config, 1, v1.path) == kHere);
  v1.write("cpu/cpu.cfs_quota_us", "150000");
  CHECK(cores_for_each(config, 1, v1.path) == 1);
  v1.write("cpu/cpu.cfs_quota_us", "20000");
  CHECK(cores_for_each(config, 1, v1.path) == 1);
  // Version 2 is looked at first.
  v1.write("cpu.max", "100000000 100000");
  CHECK(cores_for_each(config, 1, v1.path) == kHere);
  v1.write("cpu.max", "100000 100000");
  CHECK(cores_for_each(config, 1, v1.path) == 1);
  v1.write("cpu.max", "nonsense");
  v1.write("cpu/cpu.cfs_quota_us", "nonsense");
  CHECK(cores_for_each(config, 1, v1.path) == kHere);

  config.cores = 12;
  CHECK(cores_for_each(config, 4, v1.path) == 12);  // each has them
}

TEST_CASE("engine/cores: data has threads of its own where cores are free, unless told otherwise", "[engine][fast]") {
  const Interfaces tcp;
  core::Config config;
  const auto automatic = [&](std::size_t cores, std::size_t summing = 1) {
    const DataThreadsPlan plan = plan_data_threads(config, cores, summing, tcp, 1);
    CHECK(plan.when_busy == (plan.most > 0));
    return plan.most;
  };
  CHECK(automatic(0) == 0);
  CHECK(automatic(1) == 0);
  CHECK(automatic(2) == 0);
  CHECK(automatic(3) == 1);
  CHECK(automatic(4) == 2);
  CHECK(automatic(6) == 4);
  CHECK(automatic(96) == 4);
  CHECK(automatic(6, 4) == 1);  // a server of four threads
  CHECK(automatic(4, 4) == 0);

  Interfaces ucx;
  ucx.ucx = true;
  CHECK(plan_data_threads(config, 96, 1, ucx, 1).most == 0);
  config.gpudirect = true;
  CHECK(plan_data_threads(config, 96, 1, tcp, 8).most == 0);

  config.data_threads = 3;
  for (const std::size_t cores : {std::size_t{0}, std::size_t{96}}) {
    const DataThreadsPlan told = plan_data_threads(config, cores, 1, ucx, 8);
    CHECK(told.most == 3);
    CHECK(told.on_machine == 24);
    CHECK_FALSE(told.when_busy);
    CHECK((told.spin.count() > 0) == (cores > 0));
  }
  config.data_threads = 0;
  CHECK(plan_data_threads(config, 96, 1, tcp, 8).most == 0);
  config.spin_microseconds = 7;
  CHECK(plan_data_threads(config, 1, 1, tcp, 1).spin.count() == 7);
}

TEST_CASE("engine/cores: a rank that was bound has its cores alone, one of a job that was bound shares them", "[engine][fast]") {
  if (kHere < 2) return;  // nothing to tell apart
  core::Config config;
  const Cgroups none;
  CHECK(bound_to_one([&] { return static_cast<int>(cores_for_each(config, 4, none.path)); }) == 1);
  CHECK(bound_to_one([&] {
          const pid_t rank = fork();
          if (rank == 0) _exit(static_cast<int>(cores_for_each(config, 4, none.path)));
          int status = 0;
          return waitpid(rank, &status, 0) == rank && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
        }) == 0);
  none.write("cpu.max", "800000 100000");
  CHECK(bound_to_one([&] { return static_cast<int>(cores_for_each(config, 4, none.path)); }) == 1);
}
