#include "hybridps/pg/lanes.h"

#include <pthread.h>

#include <chrono>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"
#include "tests/support/no_threads.h"

using hybridps::pg::InOrder;
using hybridps::pg::Lanes;
using namespace std::chrono_literals;

namespace {

constexpr auto kLong = 60s;  // for what comes at once

/// What ran, in order, seen from any thread.
class Notes {
 public:
  Lanes::Task note(std::string what) {
    return [this, what = std::move(what)] { add(what); };
  }
  void add(const std::string& what) {
    const std::lock_guard lock(mutex_);
    notes_.push_back(what);
  }
  std::vector<std::string> all() const {
    const std::lock_guard lock(mutex_);
    return notes_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<std::string> notes_;
};

/// A task that does not end before it is let go.
class Gate {
 public:
  Lanes::Task task() {
    return [this] {
      entered_.set_value();
      leave_.get_future().wait();
    };
  }
  void wait_until_entered() { REQUIRE(entered_.get_future().wait_for(kLong) == std::future_status::ready); }
  void open() { leave_.set_value(); }

 private:
  std::promise<void> entered_;
  std::promise<void> leave_;
};

/// Returns when what was posted to the lane before has run.
void run_out(Lanes& lanes, int lane) {
  std::promise<void> done;
  lanes.post(lane, [&] { done.set_value(); });
  REQUIRE(done.get_future().wait_for(kLong) == std::future_status::ready);
}

}  // namespace

TEST_CASE("pg/lanes: the tasks of a lane run one by one, in order, on one thread that knows its number", "[pg][fast]") {
  Lanes lanes;
  CHECK(lanes.thread_count() == 0);
  Notes notes;
  std::vector<std::thread::id> threads;
  std::vector<int> numbers;
  for (int i = 0; i < 100; ++i)
    lanes.post(2, [&, i] {
      notes.add(std::to_string(i));
      threads.push_back(std::this_thread::get_id());
      numbers.push_back(Lanes::current());
    });
  run_out(lanes, 2);
  REQUIRE(threads.size() == 100);
  for (std::size_t i = 0; i < 100; ++i) {
    CHECK(notes.all()[i] == std::to_string(i));
    CHECK(threads[i] == threads[0]);
    CHECK(numbers[i] == 2);
  }
  CHECK(threads[0] != std::this_thread::get_id());
  CHECK(Lanes::current() == 0);
  CHECK(lanes.thread_count() == 1);
  lanes.stop(kLong);
}

TEST_CASE("pg/lanes: a task may wait for one of another lane", "[pg][fast]") {
  Lanes lanes;
  std::promise<bool> outcome;
  lanes.post(1, [&] {
    std::promise<void> inner;
    lanes.post(2, [&] { inner.set_value(); });
    outcome.set_value(inner.get_future().wait_for(kLong) == std::future_status::ready);
  });
  CHECK(outcome.get_future().get());
  lanes.stop(kLong);
}

TEST_CASE("pg/lanes: a task that throws does not end its lane, and lets go of what it holds", "[pg][fast]") {
  Lanes lanes;
  auto held = std::make_shared<int>(1);
  const std::weak_ptr<int> watch = held;
  lanes.post(1, [held = std::move(held)] { throw std::runtime_error("on purpose"); });
  lanes.post(1, [] { throw 7; });  // NOLINT(hicpp-exception-baseclass)
  run_out(lanes, 1);
  CHECK(watch.expired());
  CHECK(lanes.thread_count() == 1);
  lanes.stop(kLong);
}

TEST_CASE("pg/lanes: stop() runs what is queued, and a later task gets a new thread", "[pg][fast]") {
  Lanes lanes;
  Notes notes;
  for (const char* what : {"a", "b", "c"}) lanes.post(1, notes.note(what));
  lanes.stop(kLong);
  CHECK(notes.all() == std::vector<std::string>{"a", "b", "c"});
  CHECK(lanes.thread_count() == 0);
  lanes.post(1, notes.note("d"));
  run_out(lanes, 1);
  CHECK(notes.all().back() == "d");
  lanes.end_when_idle();
  lanes.post(1, notes.note("e"));  // before or after its thread has gone
  run_out(lanes, 1);
  CHECK(notes.all().back() == "e");
  lanes.stop(kLong);
}

TEST_CASE("pg/lanes: a thread that is made after stop() ends by itself, until begin()", "[pg][fast]") {
  Lanes lanes;
  const auto settles_at = [&](std::size_t count) {
    const auto end = std::chrono::steady_clock::now() + kLong;
    while (lanes.thread_count() != count && std::chrono::steady_clock::now() < end) std::this_thread::sleep_for(1ms);
    return lanes.thread_count() == count;
  };
  for (const bool stops : {true, false}) {
    run_out(lanes, 1);
    CHECK(lanes.thread_count() == 1);
    if (stops)
      lanes.stop(kLong);
    else
      lanes.end_when_idle();
    for (int turn = 0; turn < 3; ++turn) {
      Gate gate;  // one that comes while the thread runs another
      lanes.post(1, gate.task());
      gate.wait_until_entered();
      Notes notes;
      lanes.post(1, notes.note("queued"));
      gate.open();
      CHECK(settles_at(0));
      CHECK(notes.all() == std::vector<std::string>{"queued"});
    }
    lanes.begin();
  }
  run_out(lanes, 1);
  std::this_thread::sleep_for(5ms);
  CHECK(lanes.thread_count() == 1);
  lanes.stop(kLong);
}

TEST_CASE("pg/lanes: stop() leaves a stuck lane to itself, which still runs what was queued", "[pg][fast]") {
  Lanes lanes;
  Notes notes;
  Gate gate;
  std::promise<void> last;
  lanes.post(1, gate.task());
  lanes.post(1, notes.note("later"));
  lanes.post(1, [&] { last.set_value(); });
  gate.wait_until_entered();
  lanes.stop(1ms);
  CHECK(notes.all().empty());
  CHECK(lanes.thread_count() == 0);
  lanes.post(1, notes.note("new"));  // on a thread of its own: the stuck one is out of the way
  run_out(lanes, 1);
  CHECK(notes.all() == std::vector<std::string>{"new"});
  gate.open();
  REQUIRE(last.get_future().wait_for(kLong) == std::future_status::ready);
  CHECK(notes.all() == std::vector<std::string>{"new", "later"});
  lanes.stop(kLong);
}

TEST_CASE("pg/lanes: stop() on a lane does not wait for itself", "[pg][fast]") {
  Lanes lanes;
  std::promise<void> stopped;
  lanes.post(1, [&] {
    lanes.stop(kLong);
    stopped.set_value();
  });
  CHECK(stopped.get_future().wait_for(kLong) == std::future_status::ready);
}

TEST_CASE("pg/lanes: a thread that an ending interpreter ends stays where it is, and nothing is unwound",
          "[pg][fast]") {
  // Lost on purpose: the thread holds them for ever.
  static auto& lanes = *new Lanes();
  static std::promise<void> in_task;
  static std::atomic<bool> unwound{false};
  lanes.post(1, [] {
    struct NotToBeUnwound {
      ~NotToBeUnwound() { unwound = true; }  // as pybind11's are, which would abort
    };
    const NotToBeUnwound frame;
    in_task.set_value();
    pthread_exit(nullptr);
  });
  in_task.get_future().wait();
  lanes.stop(50ms);
  CHECK_FALSE(unwound);
  CHECK(lanes.thread_count() == 0);
}

// The order of one group's collectives -------------------------------------------------------------------------------

TEST_CASE("pg/lanes: futures complete in the order of issue, whatever is complete first", "[pg][fast]") {
  const auto lanes = std::make_shared<Lanes>();
  const auto order = std::make_shared<InOrder>(lanes, 1);
  Notes notes;
  const auto a = order->enter();
  const auto b = order->enter();
  const auto c = order->enter();
  CHECK(order->next() == c + 1);
  order->leave(c, notes.note("c"), true);
  order->leave(b, notes.note("b"), true);
  run_out(*lanes, 1);
  CHECK(notes.all().empty());
  order->leave(a, notes.note("a"), true);
  run_out(*lanes, 1);
  CHECK(notes.all() == std::vector<std::string>{"a", "b", "c"});
  lanes->stop(kLong);
}

TEST_CASE("pg/lanes: what is appended comes after the ticket's own task and before later tickets", "[pg][fast]") {
  const auto lanes = std::make_shared<Lanes>();
  const auto order = std::make_shared<InOrder>(lanes, 1);
  Notes notes;
  const auto a = order->enter();
  const auto b = order->enter();
  Lanes::Task early = notes.note("b, appended before");
  REQUIRE(order->append(b, early));
  order->leave(b, notes.note("b"), true);
  Lanes::Task late = notes.note("b, appended after");
  REQUIRE(order->append(b, late));
  CHECK_FALSE(order->is_first(a));
  order->leave(a, notes.note("a"), true);
  run_out(*lanes, 1);
  CHECK(notes.all() == std::vector<std::string>{"a", "b", "b, appended before", "b, appended after"});
  lanes->stop(kLong);
}

TEST_CASE("pg/lanes: nothing is before a ticket once all callbacks up to it are over", "[pg][fast]") {
  const auto lanes = std::make_shared<Lanes>();
  const auto order = std::make_shared<InOrder>(lanes, 1);
  Notes notes;
  Gate gate;
  const auto a = order->enter();
  const auto b = order->enter();
  order->leave(a, gate.task(), true);
  order->leave(b, nullptr, false);
  gate.wait_until_entered();
  CHECK_FALSE(order->is_first(b));
  Lanes::Task after = notes.note("b");
  REQUIRE(order->append(b, after));  // behind the one that runs
  gate.open();
  order->wait_until_first(b, std::chrono::steady_clock::now() + kLong);
  CHECK(order->is_first(b));
  CHECK(notes.all() == std::vector<std::string>{"b"});
  Lanes::Task at_once = notes.note("never");
  CHECK_FALSE(order->append(b, at_once));
  CHECK(at_once != nullptr);
  lanes->stop(kLong);
}

TEST_CASE("pg/lanes: a callback that throws is over, too", "[pg][fast]") {
  const auto lanes = std::make_shared<Lanes>();
  const auto order = std::make_shared<InOrder>(lanes, 1);
  const auto a = order->enter();
  order->leave(a, [] { throw std::runtime_error("on purpose"); }, true);
  order->wait_until_first(a, std::chrono::steady_clock::now() + kLong);
  CHECK(order->is_first(a));
  lanes->stop(kLong);
}

TEST_CASE("pg/lanes: only callbacks of the same group are before a ticket", "[pg][fast]") {
  const auto lanes = std::make_shared<Lanes>();
  const auto order = std::make_shared<InOrder>(lanes, 1);
  const auto other = std::make_shared<InOrder>(lanes, 1);
  Gate gate;
  other->leave(other->enter(), gate.task(), true);
  gate.wait_until_entered();
  const auto a = order->enter();
  order->leave(a, [] {}, false);  // drops references: behind the other's callback, and in nobody's way
  CHECK(order->is_first(a));
  gate.open();
  lanes->stop(kLong);
}

TEST_CASE("pg/lanes: nobody waits for an earlier operation that is not complete", "[pg][fast]") {
  const auto lanes = std::make_shared<Lanes>();
  const auto order = std::make_shared<InOrder>(lanes, 1);
  const auto a = order->enter();
  const auto b = order->enter();
  order->leave(b, nullptr, false);
  order->wait_until_first(b, std::chrono::steady_clock::now() + std::chrono::hours(1));  // else: the test's time limit
  CHECK_FALSE(order->is_first(b));
  order->leave(a, nullptr, false);
  CHECK(order->is_first(b));
}

TEST_CASE("pg/lanes: a thread that cannot be started is said, and the next call tries again", "[pg][fast]") {
  CHECK(hybridps::test::holds_without_threads([] {
    Lanes lanes;
    for (int call = 0; call < 2; ++call) {
      try {
        lanes.start(1);
        return false;
      } catch (const std::runtime_error& error) {
        if (std::string(error.what()).find("ulimit") == std::string::npos) return false;
      }
    }
    return lanes.thread_count() == 0;
  }));
}

TEST_CASE("pg/lanes: where a further thread cannot be started a lane below takes the task", "[pg][fast]") {
  Lanes lanes;
  CHECK(hybridps::test::holds_without_threads(
      [&] {
        std::promise<int> ran_on;
        auto answer = ran_on.get_future();
        lanes.post(3, [&] { ran_on.set_value(Lanes::current()); });
        return answer.wait_for(kLong) == std::future_status::ready && answer.get() == 1 && lanes.thread_count() == 1;
      },
      [&] { lanes.start(1); }));
  CHECK(hybridps::test::holds_without_threads([] {
    Lanes none;
    none.post(1, [] {});  // nobody can run it, and nobody is hurt
    return none.thread_count() == 0;
  }));
}
