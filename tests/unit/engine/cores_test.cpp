#include "hybridps/engine/cores.h"

#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <utility>
#include <vector>

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

/// What `check` returned in a child process: one whose parent may run on the same CPUs.
template <typename Check>
int in_child(const Check& check) {
  const pid_t child = fork();
  if (child == 0) _exit(check());
  int status = 0;
  return child > 0 && waitpid(child, &status, 0) == child && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}
int shared_by(const core::Config& config, std::size_t processes, const std::filesystem::path& cgroups) {
  return in_child([&] { return static_cast<int>(cores_for_each(config, processes, cgroups)); });
}
/// Of a process that may run on the first of its parent's CPUs only.
int bind_to_one() {
  cpu_set_t cpus;
  cpu_set_t one;
  CPU_ZERO(&one);
  if (sched_getaffinity(0, sizeof cpus, &cpus) != 0) return -1;
  for (int cpu = 0; cpu < CPU_SETSIZE && CPU_COUNT(&one) == 0; ++cpu)
    if (CPU_ISSET(cpu, &cpus)) CPU_SET(cpu, &one);
  return sched_setaffinity(0, sizeof one, &one);
}
template <typename Check>
int bound_to_one(const Check& check) {
  return in_child([&] { return bind_to_one() == 0 ? check() : 99; });
}

}  // namespace

TEST_CASE("engine/cores: those of the machine, of its container or as set, divided by the ranks", "[engine][fast]") {
  core::Config config;
  const Cgroups files;
  const int here = static_cast<int>(kHere);
  CHECK(shared_by(config, 1, files.path) == here);
  CHECK(shared_by(config, kHere, files.path) == 1);
  CHECK(shared_by(config, kHere + 1, files.path) == 0);

  files.write("cpu/cpu.cfs_period_us", "100000");
  files.write("cpu/cpu.cfs_quota_us", "-1");
  CHECK(shared_by(config, 1, files.path) == here);
  files.write("cpu/cpu.cfs_quota_us", "150000");
  CHECK(shared_by(config, 1, files.path) == 1);
  files.write("cpu/cpu.cfs_quota_us", "20000");
  CHECK(shared_by(config, 1, files.path) == 1);
  // Version 2 is looked at first.
  files.write("cpu.max", "100000000 100000");
  CHECK(shared_by(config, 1, files.path) == here);
  files.write("cpu.max", "100000 100000");
  CHECK(shared_by(config, 1, files.path) == 1);
  files.write("cpu.max", "nonsense");
  files.write("cpu/cpu.cfs_quota_us", "nonsense");
  CHECK(shared_by(config, 1, files.path) == here);
  files.write("cpuset.cpus.effective", "0-511,1024-2047");
  CHECK(shared_by(config, 1, files.path) == here);
  files.write("cpuset.cpus.effective", "3");
  CHECK(shared_by(config, 1, files.path) == 1);

  config.cores = 12;
  CHECK(cores_for_each(config, 4, files.path) == 12);  // each has them
}

TEST_CASE("engine/cores: the ranks of a machine are those of torchrun, or of a launcher that has started the job",
          "[engine][fast]") {
  using Set = std::vector<std::pair<const char*, const char*>>;
  const auto ranks = [](std::size_t of_the_job, const Set& variables) {
    return in_child([&] {
      for (const char* variable : {"LOCAL_WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_SIZE", "PMI_SIZE",
                                   "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_TASKS_PER_NODE"})
        unsetenv(variable);
      for (const auto& [name, value] : variables) setenv(name, value, 1);
      return static_cast<int>(engine::local_ranks(of_the_job));
    });
  };
  CHECK(ranks(16, {}) == 0);
  CHECK(ranks(16, {{"LOCAL_WORLD_SIZE", "4"}}) == 4);
  CHECK(ranks(16, {{"LOCAL_WORLD_SIZE", "none"}}) == 0);
  CHECK(ranks(16, {{"OMPI_COMM_WORLD_SIZE", "16"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}}) == 8);
  CHECK(ranks(16, {{"PMI_SIZE", "16"}, {"MPI_LOCALNRANKS", "2"}}) == 2);
  CHECK(ranks(16, {{"SLURM_STEP_NUM_TASKS", "16"}, {"SLURM_STEP_TASKS_PER_NODE", "6(x2),4"}}) == 6);
  // Each of the launcher's tasks has started processes of its own.
  CHECK(ranks(16, {{"SLURM_STEP_NUM_TASKS", "2"}, {"SLURM_STEP_TASKS_PER_NODE", "1(x2)"}}) == 0);
  CHECK(ranks(0, {{"OMPI_COMM_WORLD_SIZE", "16"}, {"OMPI_COMM_WORLD_LOCAL_SIZE", "8"}}) == 0);
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
  }
  config.data_threads = 0;
  CHECK(plan_data_threads(config, 96, 1, tcp, 8).most == 0);
}

TEST_CASE("engine/cores: CPUs of a rank's own count as such, those of its launcher or container as all ranks'",
          "[engine][fast]") {
  if (kHere < 2) return;  // nothing to tell apart
  core::Config config;
  const Cgroups files;
  const auto own = [&](std::size_t processes) {
    return bound_to_one([&, processes] { return static_cast<int>(cores_for_each(config, processes, files.path)); });
  };
  CHECK(own(kHere) == 1);
  CHECK(own(kHere + 1) == 0);  // more ranks than CPUs: several were bound to one
  CHECK(bound_to_one([&] { return shared_by(config, kHere, files.path); }) == 0);
  files.write("cpuset.cpus.effective", "0");
  CHECK(own(kHere) == 0);
}
