#include "hybridps/engine/engine.h"
#include "hybridps/compress/spec.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/directory_store.h"

// Ranks are forked processes, each with an engine of its own over UCX on the loopback interface and shared memory.
namespace {

using namespace hybridps;

struct Rank {
  int rank = 0;
  int size = 1;
  std::filesystem::path folder;
  std::shared_ptr<engine::Group> open(const std::string& name, const std::string& compress = "") const {
    auto engine = engine::Engine::acquire();
    if (!engine.is_ok()) throw std::runtime_error(engine.status().to_string());
    engine::GroupOptions options;
    options.name = name;
    options.incarnation = "test.0.0";
    options.rank = rank;
    options.size = size;
    options.store = std::make_shared<test::DirectoryStore>(folder);
    options.timeout = std::chrono::seconds(30);
    options.compress = compress;
    auto group = engine.value()->open_group(options);
    if (!group.is_ok()) throw std::runtime_error(group.status().to_string());
    return group.value();
  }
};

/// Blocks until one operation is over.
core::Status run(engine::Group& group, worker::Operation operation,
                 std::chrono::milliseconds timeout = std::chrono::seconds(20)) {
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    bool done = false;
    core::Status status;
  };
  auto state = std::make_shared<State>();
  operation.timeout = timeout;
  group.submit(std::move(operation), [state](const worker::Outcome& outcome) {
    const std::lock_guard lock(state->mutex);
    state->done = true;
    state->status = outcome.status;
    state->changed.notify_all();
  });
  std::unique_lock lock(state->mutex);
  state->changed.wait(lock, [&] { return state->done; });
  return state->status;
}

core::Status allreduce(engine::Group& group, std::vector<float>& data) {
  worker::Operation o;
  o.kind = schedule::Kind::kAllReduce;
  o.dtype = core::DType::kFloat32;
  o.op = core::ReduceOp::kSum;
  o.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)}};
  return run(group, std::move(o));
}

void check(bool condition, const std::string& what) {
  if (!condition) throw std::runtime_error(what);
}

/// Forks one process per entry of `nodes` (its HYBRIDPS_NODE), runs `body` in each, returns the exit codes
/// (negative: the signal that ended it). Each has `data_threads`, and as many sockets for data.
std::vector<int> run_ranks(const std::vector<std::string>& nodes, int data_threads,
                           const std::function<void(const Rank&)>& body) {
  char folder[] = "/tmp/hybridps-engine-XXXXXX";
  REQUIRE(mkdtemp(folder) != nullptr);
  std::vector<pid_t> pids;
  for (std::size_t r = 0; r < nodes.size(); ++r) {
    std::fflush(nullptr);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid == 0) {
      setenv("HYBRIDPS_NODE", nodes[r].c_str(), 1);
      setenv("HYBRIDPS_INTERFACE", "lo", 1);
      setenv("HYBRIDPS_LIMITS", ("data_threads=" + std::to_string(data_threads)).c_str(), 1);
      setenv("HYBRIDPS_DATA_SOCKETS", std::to_string(std::max(data_threads, 1)).c_str(), 1);
      alarm(60);  // a hang ends as a failure
      int code = 0;
      try {
        body(Rank{static_cast<int>(r), static_cast<int>(nodes.size()), folder});
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %zu: %s\n", r, error.what());
        code = 1;
      }
      std::fflush(nullptr);
      _exit(code);
    }
    pids.push_back(pid);
  }
  std::vector<int> codes;
  for (const pid_t pid : pids) {
    int status = 0;
    REQUIRE(waitpid(pid, &status, 0) == pid);
    codes.push_back(WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status));
  }
  std::filesystem::remove_all(folder);
  return codes;
}

void leave(std::shared_ptr<engine::Group> group) {
  const std::shared_ptr<engine::Engine> engine = group->engine();
  group->leave();
  engine->linger();
}

}  // namespace

TEST_CASE("engine/engine: processes on one and on several nodes agree on an allreduce", "[engine]") {
  const int data_threads = GENERATE(0, 2);
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a"}, {"a", "a"}, {"a", "b"}, {"a", "a", "b", "b"}, {"a", "a", "b"}}) {
    const auto codes = run_ranks(nodes, data_threads, [](const Rank& me) {
      auto group = me.open("world");
      const core::Status ready = group->wait_ready();
      check(ready.is_ok(), ready.to_string());
      for (const std::size_t count : {std::size_t{0}, std::size_t{1}, std::size_t{1000}, std::size_t{300007}}) {
        for (int round = 0; round < 3; ++round) {
          std::vector<float> data(count);
          for (std::size_t i = 0; i < count; ++i)
            data[i] = static_cast<float>(me.rank + 1) * static_cast<float>(i % 100);
          const core::Status status = allreduce(*group, data);
          check(status.is_ok(), status.to_string());
          const float ranks = static_cast<float>(me.size * (me.size + 1) / 2);
          for (std::size_t i = 0; i < count; ++i) check(data[i] == ranks * static_cast<float>(i % 100), "wrong sum");
        }
      }
      leave(group);
    });
    REQUIRE(codes == std::vector<int>(nodes.size(), 0));
  }
}

TEST_CASE("engine/engine: bytes between nodes are the formula's", "[engine]") {
  const int data_threads = GENERATE(0, 2);
  // 2(n-1)/n of the tensor leaves each node, and as much comes in.
  const auto codes = run_ranks({"a", "a", "b", "c"}, data_threads, [](const Rank& me) {
    auto group = me.open("world");
    check(group->wait_ready().is_ok(), "not ready");
    std::vector<float> data(3 * 64 * 1024, 1.0F);
    const auto bytes_sent = [&] {
      for (const auto& sample : group->engine()->stats())
        if (sample.name == "net_tx_payload_bytes") return sample.value;
      return -1.0;
    };
    const double before = bytes_sent();
    check(before >= 0.0, "nothing counts what is sent");
    check(allreduce(*group, data).is_ok(), "failed");
    std::vector<float> sent(4, 0.0F);
    sent[static_cast<std::size_t>(me.rank)] = static_cast<float>(bytes_sent() - before);
    check(allreduce(*group, sent).is_ok(), "failed");
    const float expected = 2.0F * 2.0F / 3.0F * static_cast<float>(data.size() * sizeof(float));
    check(sent[0] + sent[1] == expected,
          "node a sent " + std::to_string(sent[0] + sent[1]) + " bytes, not " + std::to_string(expected));
    check(sent[2] == expected && sent[3] == expected, "node b or c sent something else");
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(4, 0));
}

TEST_CASE("engine/engine: a killed rank is named by all survivors", "[engine]") {
  const int data_threads = GENERATE(0, 2);
  for (const auto& nodes :
       std::vector<std::vector<std::string>>{{"a", "a", "a"}, {"a", "b", "c"}, {"a", "a", "b", "b"}}) {
    const auto codes = run_ranks(nodes, data_threads, [](const Rank& me) {
      auto group = me.open("world");
      check(group->wait_ready().is_ok(), "not ready");
      std::vector<float> data(1000, 1.0F);
      check(allreduce(*group, data).is_ok(), "the first one fails");
      if (me.rank == 1) kill(getpid(), SIGKILL);
      const core::Status status = allreduce(*group, data);
      check(status.code() == core::Code::kPeerDead, "not dead: " + status.to_string());
      check(status.message().find("rank 1 (") != std::string::npos, "not named: " + status.to_string());
      leave(group);
    });
    std::vector<int> expected(nodes.size(), 0);
    expected[1] = -SIGKILL;
    REQUIRE(codes == expected);
  }
}

TEST_CASE("engine/engine: a rank may leave while others are late", "[engine]") {
  const auto codes = run_ranks({"a", "b", "b"}, 0, [](const Rank& me) {
    auto group = me.open("world");
    check(group->wait_ready().is_ok(), "not ready");
    std::vector<float> data(2000, static_cast<float>(me.rank));
    worker::Operation o;
    o.kind = schedule::Kind::kBroadcast;
    o.dtype = core::DType::kFloat32;
    o.root = 0;
    o.output = {{reinterpret_cast<std::byte*>(data.data()), data.size() * sizeof(float)}};
    if (me.rank != 0) usleep(1000000);
    const core::Status status = run(*group, std::move(o));
    check(status.is_ok(), status.to_string());
    check(data.back() == 0.0F, "wrong data");
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(3, 0));
}

TEST_CASE("engine/engine: that quicker ranks disagree about an operation is no failure to make the group", "[engine]") {
  const auto codes = run_ranks({"a", "b", "c"}, 0, [](const Rank& me) {
    const auto group = me.open("world");
    std::vector<float> data(10 + static_cast<std::size_t>(me.rank), 1.0F);
    if (me.rank == 2)  // it waits for the others only when it has heard
      while (group->status().is_ok()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    const core::Status ready = group->wait_ready();
    check(ready.is_ok(), ready.to_string());
    const core::Status status = allreduce(*group, data);
    check(status.code() == core::Code::kMismatch, status.to_string());
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(3, 0));
}

TEST_CASE("engine/engine: an engine can be made again in the same process", "[engine]") {
  const int data_threads = GENERATE(0, 2);
  const auto codes = run_ranks({"a", "b"}, data_threads, [](const Rank& me) {
    for (int life = 0; life < 5; ++life) {
      auto group = me.open("world" + std::to_string(life));
      check(group->wait_ready().is_ok(), "not ready");
      std::vector<float> data(100, 1.0F);
      check(allreduce(*group, data).is_ok(), "failed");
      check(data[0] == 2.0F, "wrong sum");
      leave(group);
      group.reset();
      check(engine::Engine::current() == nullptr, "the engine outlives its last group");
    }
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: all groups of a process have the same engine", "[engine]") {
  const auto codes = run_ranks({"a"}, 0, [](const Rank& me) {
    const auto one = me.open("one");
    const auto other = me.open("other");
    check(one->engine() == other->engine(), "two engines");
    check(engine::Engine::current() == one->engine(), "not the current one");
  });
  REQUIRE(codes == std::vector<int>(1, 0));
}

TEST_CASE("engine/engine: each operation that times out looks anew who is missing", "[engine]") {
  const auto codes = run_ranks({"a", "b"}, 0, [](const Rank& me) {
    const std::filesystem::path one_is_wanted = me.folder / "one_is_wanted";
    const std::filesystem::path over = me.folder / "over";
    const auto wait_for = [](const std::filesystem::path& path) {
      while (!std::filesystem::exists(path)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    };
    Rank of_three = me;
    of_three.size = 3;  // the third one never comes
    if (me.rank == 1) wait_for(one_is_wanted);
    const auto group = of_three.open("world");
    if (me.rank == 1) return wait_for(over);
    const auto missing = [&](const std::string& ranks) {
      worker::Operation barrier;
      barrier.kind = schedule::Kind::kBarrier;
      const core::Status status = run(*group, std::move(barrier), std::chrono::milliseconds(30));
      check(status.code() == core::Code::kTimeout, status.to_string());
      return status.message().find("waiting for ranks " + ranks) != std::string_view::npos;
    };
    const auto comes_to_miss = [&](const std::string& ranks) {
      bool seen = false;
      for (int i = 0; i < 200 && !seen; ++i) seen = missing(ranks);
      return seen;
    };
    check(comes_to_miss("[1, 2]"), "both are missing");
    std::filesystem::create_directory(one_is_wanted);
    const bool seen = comes_to_miss("[2]");
    std::filesystem::create_directory(over);
    check(seen, "rank 1 has come");
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: a member that never comes is named at the deadline", "[engine]") {
  const auto codes = run_ranks({"a", "b"}, 0, [](const Rank& me) {
    if (me.rank == 1) return;
    auto engine = engine::Engine::acquire();
    check(engine.is_ok(), engine.status().to_string());
    engine::GroupOptions options;
    options.name = "world";
    options.incarnation = "test.0.0";
    options.rank = 0;
    options.size = 2;
    options.store = std::make_shared<test::DirectoryStore>(me.folder);
    options.timeout = std::chrono::milliseconds(500);
    auto group = engine.value()->open_group(options).value();
    const core::Status status = group->wait_ready();
    check(!status.is_ok() && status.message().find("[1]") != std::string::npos, status.to_string());
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: memory may be coded unless a region adds elements", "[engine]") {
  const auto scope = GENERATE(compress::CodecScope::kRegions, compress::CodecScope::kNodes);
  const bool has_regions = GENERATE(true, false);
  const auto codes = run_ranks({"a", "b"}, 0, [&](const Rank& me) {
    if (has_regions) setenv("HYBRIDPS_REGION", me.rank == 0 ? "east" : "west", 1);
    compress::Spec spec = compress::parse_spec("int8").value();
    spec.scope = scope;
    auto group = me.open("world", compress::text_of(spec));
    check(group->wait_ready().is_ok(), "not ready");
    check(group->may_code() == (!has_regions || scope == compress::CodecScope::kNodes), "may_code() is wrong");
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: a collective in a forked child is refused and the parent goes on", "[engine]") {
  const int data_threads = GENERATE(0, 2);
  const auto codes = run_ranks({"a", "b"}, data_threads, [](const Rank& me) {
    auto group = me.open("world");
    check(group->wait_ready().is_ok(), "not ready");
    std::vector<float> data(10, 1.0F);
    check(allreduce(*group, data).is_ok(), "failed");
    const pid_t child = fork();
    if (child == 0) {
      alarm(20);
      const core::Status status = allreduce(*group, data);
      group.reset();  // and with it the engine
      _exit(status.code() == core::Code::kUnsupported ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child was not refused");
    check(allreduce(*group, data).is_ok(), "the parent cannot go on");
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: what waits for the engine's thread is refused on that thread and in a forked child",
          "[engine]") {
  const auto codes = run_ranks({"a"}, 0, [](const Rank& me) {
    auto group = me.open("world");
    check(group->wait_ready().is_ok(), "not ready");
    auto late = me.open("late");  // may be ready or not
    std::vector<std::byte> memory(4096);
    const auto attach = [&] {
      return group->attach_device({memory, {}}, nullptr).status().code() == core::Code::kUnsupported;
    };
    struct Answer {
      std::mutex mutex;
      std::condition_variable changed;
      bool done = false;
      bool refused = false;
    } answer;
    worker::Operation barrier;
    barrier.kind = schedule::Kind::kBarrier;
    group->submit(std::move(barrier), [&](const worker::Outcome&) {
      const bool refused = attach();
      group->engine()->linger();
      (void)group->engine()->stats();
      const std::lock_guard lock(answer.mutex);
      answer.done = true;
      answer.refused = refused;
      answer.changed.notify_all();
    });
    {
      std::unique_lock lock(answer.mutex);
      answer.changed.wait(lock, [&] { return answer.done; });
    }
    check(answer.refused, "a completion waited for its own thread");
    const pid_t child = fork();
    if (child == 0) {
      const bool refused = attach() && group->wait_ready().code() == core::Code::kUnsupported;
      group->engine()->linger();
      (void)group->engine()->stats();
      _exit(refused ? 7 : 8);
    }
    int status = 0;
    waitpid(child, &status, 0);
    check(WIFEXITED(status) && WEXITSTATUS(status) == 7, "the child was not refused");
    leave(late);
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(1, 0));
}

TEST_CASE("engine/engine: a group that was aborted while it was being made fails on all members", "[engine]") {
  const auto codes = run_ranks({"a", "b"}, 0, [](const Rank& me) {
    const std::filesystem::path aborted = me.folder / "aborted";
    if (me.rank == 1)  // without it there is no roster yet
      while (!std::filesystem::exists(aborted)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    auto group = me.open("world");
    if (me.rank == 0) {
      group->abort("told to");
      check(!group->wait_ready().is_ok(), "the abort is lost");
      std::filesystem::create_directory(aborted);
    }
    std::vector<float> data(10, 1.0F);
    const core::Status status = allreduce(*group, data);
    check(status.message().find("told to") != std::string::npos, status.to_string());
    if (me.rank == 1) std::filesystem::create_directory(me.folder / "heard");
    while (!std::filesystem::exists(me.folder / "heard")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: members hear of a group that was aborted and left while it was being made", "[engine]") {
  const auto codes = run_ranks({"a", "b"}, 0, [](const Rank& me) {
    auto world = me.open("world");  // the engine goes on
    const std::filesystem::path left = me.folder / "left";
    std::vector<std::shared_ptr<engine::Group>> groups;
    if (me.rank == 0) {
      for (const char* name : {"first", "second"}) groups.push_back(me.open(name));
      for (const auto& group : groups) {
        group->abort("told to");
        group->leave();
      }
      groups.clear();
      std::filesystem::create_directory(left);
    } else {  // without it there is no roster yet
      while (!std::filesystem::exists(left)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      for (const char* name : {"first", "second"}) groups.push_back(me.open(name));
      for (const auto& group : groups) {
        std::vector<float> data(10, 1.0F);
        const core::Status status = allreduce(*group, data);
        check(status.message().find("told to") != std::string::npos, status.to_string());
      }
    }
    std::vector<float> data(10, 1.0F);
    check(allreduce(*world, data).is_ok(), "the other group is harmed");
    groups.clear();
    leave(world);
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}

TEST_CASE("engine/engine: who waits for a member that has aborted their group and ended hears why", "[engine]") {
  const auto codes = run_ranks({"a", "b", "c"}, 0, [](const Rank& me) {
    const std::filesystem::path waits = me.folder / "waits";
    if (me.rank == 2) {  // never comes: there is no roster, ever
      while (!std::filesystem::exists(me.folder / "heard")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    auto group = me.open("world");
    if (me.rank == 0) {
      while (!std::filesystem::exists(waits)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      group->abort("told to");
      leave(std::move(group));  // the engine's last
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has looked at the Store
    std::filesystem::create_directory(waits);
    std::vector<float> data(10, 1.0F);
    const core::Status status = allreduce(*group, data);
    std::filesystem::create_directory(me.folder / "heard");
    check(status.message().find("told to") != std::string::npos, status.to_string());
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(3, 0));
}

TEST_CASE("engine/engine: who waits for a member that has left their group before there was a roster hears of it",
          "[engine]") {
  const auto codes = run_ranks({"a", "b", "c"}, 0, [](const Rank& me) {
    const std::filesystem::path waits = me.folder / "waits";
    if (me.rank == 2) {  // never comes: there is no roster, ever
      while (!std::filesystem::exists(me.folder / "heard")) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      return;
    }
    auto group = me.open("world");
    if (me.rank == 0) {
      while (!std::filesystem::exists(waits)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      leave(std::move(group));  // the engine's last
      return;
    }
    std::this_thread::sleep_for(std::chrono::milliseconds(300));  // it has looked at the Store
    std::filesystem::create_directory(waits);
    std::vector<float> data(10, 1.0F);
    const core::Status status = allreduce(*group, data);
    std::filesystem::create_directory(me.folder / "heard");
    check(status.code() == core::Code::kClosed, status.to_string());
    check(status.message().find("rank 0 (") != std::string::npos &&
              status.message().find("left the group") != std::string::npos,
          status.to_string());
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(3, 0));
}

TEST_CASE("engine/engine: ranks that grant different numbers of chunks are refused with both named", "[engine]") {
  const auto codes = run_ranks({"a", "a"}, 0, [](const Rank& me) {
    if (me.rank == 1) setenv("HYBRIDPS_LIMITS", "grant_chunks=16", 1);
    auto group = me.open("world");
    const core::Status status = group->wait_ready();
    check(status.code() == core::Code::kMismatch, status.to_string());
    check(status.message().find("rank 1 runs protocol") != std::string::npos &&
              status.message().find("HYBRIDPS_LIMITS=grant_chunks=16") != std::string::npos,
          status.to_string());
    leave(group);
  });
  REQUIRE(codes == std::vector<int>(2, 0));
}
