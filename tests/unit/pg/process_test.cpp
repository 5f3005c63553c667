#include "hybridps/pg/process.h"

#include <sys/wait.h>
#include <unistd.h>

#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "hybridps/engine/engine.h"
#include "tests/support/catch.h"

using namespace hybridps;
using pg::Membership;
using pg::Process;

namespace {

/// While the last one waits for goodbyes, `meanwhile` happens.
class WaitingEngine final : public engine::Engine {
 public:
  explicit WaitingEngine(std::function<void()> meanwhile) : meanwhile_(std::move(meanwhile)) {}
  core::EngineId id() const noexcept override { return {}; }
  core::Result<std::shared_ptr<engine::Group>> open_group(engine::GroupOptions /*options*/) override {
    return core::Status(core::Code::kUnsupported, "no groups");
  }
  void linger() override { meanwhile_(); }
  std::vector<hybridps::observe::Sample> stats() const override { return {}; }
  std::string describe() const override { return "waiting"; }

 private:
  const std::function<void()> meanwhile_;
};

/// Notes who leaves and who is aborted.
class NotingGroup final : public engine::Group {
 public:
  explicit NotingGroup(std::shared_ptr<engine::Engine> engine = nullptr) : engine_(std::move(engine)) {}
  int rank() const noexcept override { return 0; }
  int size() const noexcept override { return 1; }
  const std::string& name() const noexcept override { return name_; }
  std::shared_ptr<engine::Engine> engine() const noexcept override { return engine_; }
  std::uint64_t submit(worker::Operation /*operation*/, worker::Completion /*done*/, bool /*will_drive*/) override {
    return 0;
  }
  std::uint64_t reserve() override { return 0; }
  void submit_reserved(std::uint64_t /*sequence*/, worker::Operation /*operation*/,
                       worker::Completion /*done*/) override {}
  core::Result<std::shared_ptr<void>> attach_device(transport::DeviceMemory /*memory*/,
                                                    std::shared_ptr<void> /*keep*/) override {
    return core::Status(core::Code::kUnsupported, "no device");
  }
  void drive(const std::function<bool()>& /*done*/, core::TimePoint /*until*/) override {}
  core::Result<std::vector<Remembered>> remembered(std::vector<compress::TensorKey>) override {
    return core::Status(core::Code::kUnsupported, "not here");
  }
  core::Result<RememberedSummary> remembered_summary() override { return RememberedSummary{}; }
  bool may_code() override { return true; }
  core::Status wait_ready() override { return {}; }
  core::Status status() const override { return {}; }
  void abort(const std::string& reason) override { aborts.push_back(reason); }
  void leave() override { ++leaves; }
  void supersede(const std::string& /*reason*/) override { ++leaves; }
  std::uint64_t sequence_submitted() const noexcept override { return 0; }
  std::uint64_t sequence_completed() const noexcept override { return 0; }
  std::vector<int> node_of() const override { return {0}; }
  engine::GroupSummary summary() const override { return {}; }

  int leaves = 0;
  std::vector<std::string> aborts;

 private:
  const std::shared_ptr<engine::Engine> engine_;
  const std::string name_ = "noting";
};

/// In a child: whether `check` holds there.
template <typename Check>
bool holds_in_child(const Check& check) {
  const pid_t child = fork();
  REQUIRE(child >= 0);
  if (child == 0) _exit(check() ? 0 : 1);
  int status = 0;
  REQUIRE(waitpid(child, &status, 0) == child);
  return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

}  // namespace

TEST_CASE("pg/process: a member leaves its group once, and has none then", "[pg][fast]") {
  Process& process = Process::instance();
  const auto group = std::make_shared<NotingGroup>();
  const auto member = process.join(group);
  CHECK(member->group() == group);
  process.leave(*member);
  process.leave(*member);
  CHECK(group->leaves == 1);
  CHECK(group->aborts.empty());
  CHECK(member->group() == nullptr);
  CHECK(group.use_count() == 1);
}

TEST_CASE("pg/process: at the exit those that are left leave, what they still do is given up, and lanes run out",
          "[pg][fast]") {
  Process& process = Process::instance();
  const auto left = std::make_shared<NotingGroup>();
  const auto open = std::make_shared<NotingGroup>();
  const auto dropped = std::make_shared<NotingGroup>();
  const auto left_member = process.join(left);
  const auto open_member = process.join(open);
  process.join(dropped);
  process.leave(*left_member);
  bool ran = false;
  process.lanes()->post(1, [&] { ran = true; });
  process.at_exit();
  CHECK(ran);
  CHECK(process.lanes()->thread_count() == 0);
  CHECK(left->leaves == 1);
  CHECK(left->aborts.empty());
  CHECK(open->leaves == 1);
  CHECK(open->aborts == std::vector<std::string>{"the process is exiting"});
  CHECK(open_member->group() == nullptr);
  CHECK(dropped->leaves == 0);  // its process group is gone: it has left, or never will
  process.at_exit();
  process.leave(*open_member);
  CHECK(open->leaves == 1);
}

TEST_CASE("pg/process: a callback that does not end holds the exit up for a while, not for ever", "[pg]") {
  Process& process = Process::instance();
  static std::promise<void> entered;  // lost on purpose, as the callback is
  process.lanes()->post(1, [] {
    entered.set_value();
    std::promise<void>().get_future().wait_for(std::chrono::hours(1));
  });
  entered.get_future().wait();
  process.at_exit();
  CHECK(process.lanes()->thread_count() == 0);
}

TEST_CASE("pg/process: in a forked child nothing is left of the parent's groups, and a new one may be joined",
          "[pg][fast]") {
  Process& process = Process::instance();
  const auto group = std::make_shared<NotingGroup>();
  auto member = process.join(group);
  process.lanes()->post(1, [] {});  // a thread that the child lacks
  CHECK(holds_in_child([&] {
    const bool forked = member->is_forked() && member->group() == nullptr;
    Process& of_child = Process::instance();
    of_child.leave(*member);
    of_child.at_exit();
    const bool fresh = &of_child != &process && of_child.lanes()->thread_count() == 0;
    member.reset();
    const bool untouched = group->leaves == 0 && group->aborts.empty() && group.use_count() > 1;
    const auto anew = std::make_shared<NotingGroup>();
    const auto new_member = of_child.join(anew);
    const bool joined = !new_member->is_forked() && new_member->group() == anew;
    of_child.leave(*new_member);
    return forked && fresh && untouched && joined && anew->leaves == 1;
  }));
  CHECK_FALSE(member->is_forked());
  CHECK(member->group() == group);
  process.leave(*member);
  CHECK(group->leaves == 1);
  process.lanes()->stop(std::chrono::seconds(60));
}

TEST_CASE(
    "pg/process: while a group is being made the last one to leave ends no threads; they end if nothing comes of it",
    "[pg][fast]") {
  Process& process = Process::instance();
  std::unique_ptr<Process::Arrival> arrival;
  const auto last = std::make_shared<NotingGroup>(
      std::make_shared<WaitingEngine>([&] { arrival = std::make_unique<Process::Arrival>(process); }));
  const auto member = process.join(last);
  process.leave(*member);
  REQUIRE(arrival);
  CHECK(process.lanes()->thread_count() == 1);
  const auto late = process.join(std::make_shared<NotingGroup>());
  arrival.reset();
  CHECK(process.lanes()->thread_count() == 1);
  arrival = std::make_unique<Process::Arrival>(process);
  process.leave(*late);
  CHECK(process.lanes()->thread_count() == 1);
  arrival.reset();
  for (int i = 0; i < 10000 && process.lanes()->thread_count() > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(process.lanes()->thread_count() == 0);
}

TEST_CASE("pg/process: a group that is joined while the last one waits for goodbyes keeps the threads", "[pg][fast]") {
  Process& process = Process::instance();
  std::shared_ptr<Membership> late;
  const auto last = std::make_shared<NotingGroup>(
      std::make_shared<WaitingEngine>([&] { late = process.join(std::make_shared<NotingGroup>()); }));
  const auto member = process.join(last);
  process.leave(*member);
  REQUIRE(late);
  CHECK(process.lanes()->thread_count() == 1);
  process.lanes()->stop(std::chrono::seconds(60));  // as if it had been the last
  process.leave(*late);
}

TEST_CASE("pg/process: while a stay is there the last group to leave ends nothing, and then its end does",
          "[pg][fast]") {
  Process& process = Process::instance();
  int lingered = 0;
  auto engine = std::make_shared<WaitingEngine>([&] { ++lingered; });
  const std::weak_ptr<engine::Engine> alive = engine;
  auto stay = process.stay(engine);
  CHECK(stay->engine() == engine);
  const auto member = process.join(std::make_shared<NotingGroup>(std::move(engine)));
  process.leave(*member);
  CHECK(lingered == 0);
  CHECK_FALSE(alive.expired());
  CHECK(holds_in_child([&] { return stay->engine() == nullptr; }));
  process.end(*stay);
  process.end(*stay);
  CHECK(lingered == 1);
  CHECK(alive.expired());
  CHECK(stay->engine() == nullptr);
}

TEST_CASE("pg/process: a stay that ends beside a group ends nothing", "[pg][fast]") {
  Process& process = Process::instance();
  int lingered = 0;
  const auto engine = std::make_shared<WaitingEngine>([&] { ++lingered; });
  const auto stay = process.stay(engine);
  const auto member = process.join(std::make_shared<NotingGroup>(engine));
  process.end(*stay);
  CHECK(lingered == 0);
  process.leave(*member);
  CHECK(lingered == 1);
}
