#include "hybridps/flow/grants.h"

#include <algorithm>
#include <deque>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "tests/support/catch.h"

namespace {

using hybridps::flow::GrantBudget;
using hybridps::flow::GrantQueue;

struct Waiter final : GrantQueue::Waiter {
  Waiter(GrantQueue& q, std::uint64_t b, std::vector<Waiter*>& o) : queue(q), bytes(b), order(o) {}
  ~Waiter() override { queue.remove(*this); }

  std::optional<std::uint32_t> next_wanted() override {
    return wanted.empty() ? std::nullopt : std::optional(wanted.front());
  }
  std::uint64_t grant_bytes() const noexcept override { return bytes; }
  void grant(std::uint32_t chunk) override {
    REQUIRE(chunk == wanted.front());
    wanted.pop_front();
    order.push_back(this);
    if (at_once)
      queue.give_back(bytes);
    else
      ++held;
  }
  void give_back() {
    --held;
    queue.give_back(bytes);
  }

  GrantQueue& queue;
  const std::uint64_t bytes;
  std::vector<Waiter*>& order;
  std::deque<std::uint32_t> wanted;
  bool at_once = false;
  std::uint32_t held = 0;
};

}  // namespace

TEST_CASE("flow/grants: units go to waiters in the order in which they came, and keep their place", "[flow][fast]") {
  GrantQueue queue{GrantBudget(2)};
  std::vector<Waiter*> order;
  Waiter a(queue, 1, order);
  Waiter b(queue, 1, order);
  a.wanted = {0, 1, 2};
  b.wanted = {7};
  queue.add(a);
  queue.add(b);
  REQUIRE(order == std::vector<Waiter*>{&a, &a});
  queue.add(a);  // waits already
  a.give_back();
  REQUIRE(order == std::vector<Waiter*>{&a, &a, &a});
  a.wanted = {3};
  queue.add(a);  // it is in front still
  a.give_back();
  REQUIRE(order.back() == &a);
  a.give_back();
  REQUIRE(order.back() == &b);
  REQUIRE(queue.units() == 2);
  b.wanted = {8};
  queue.add(b);  // behind nobody, once it had left
  a.give_back();
  REQUIRE(order.back() == &b);
  b.give_back();
  b.give_back();
  REQUIRE(queue.units() == 0);
}

TEST_CASE("flow/grants: where each gets one at a time, all go on together", "[flow][fast]") {
  GrantQueue queue{GrantBudget(1), GrantQueue::Turn::kOne};
  std::vector<Waiter*> order;
  Waiter a(queue, 1, order);
  Waiter b(queue, 1, order);
  Waiter c(queue, 1, order);
  a.wanted = {0, 1, 2};
  b.wanted = {0, 1};
  c.wanted = {0};
  for (Waiter* waiter : {&a, &b, &c}) queue.add(*waiter);
  while (order.size() < 6) order.back()->give_back();
  CHECK(order == std::vector<Waiter*>{&a, &a, &b, &c, &a, &b});
  order.back()->give_back();
  a.wanted = {3};
  queue.add(a);
  CHECK(order.size() == 7);
  a.give_back();
  CHECK(queue.units() == 0);
}

TEST_CASE("flow/grants: one that is removed gets nothing more, and is in nobody's way", "[flow][fast]") {
  GrantQueue queue{GrantBudget(1)};
  std::vector<Waiter*> order;
  Waiter a(queue, 1, order);
  Waiter c(queue, 1, order);
  a.wanted = {0};
  c.wanted = {1};
  queue.add(a);
  {
    Waiter b(queue, 1, order);
    b.wanted = {0, 1};
    queue.add(b);
    queue.add(c);
  }
  queue.remove(c);
  queue.add(c);
  a.give_back();
  REQUIRE(order == std::vector<Waiter*>{&a, &c});
  c.give_back();
}

TEST_CASE("flow/grants: who has priority goes first, and of so many grants one is for who waits longest",
          "[flow][fast]") {
  for (const auto turn : {GrantQueue::Turn::kAll, GrantQueue::Turn::kOne}) {
    constexpr std::size_t kTurn = hybridps::flow::kPassesMax + 1;
    GrantQueue queue{GrantBudget(1), turn};
    std::vector<Waiter*> order;
    Waiter first(queue, 1, order);
    Waiter low(queue, 1, order);
    Waiter middle(queue, 1, order);
    Waiter high(queue, 1, order);
    first.wanted = {0};
    queue.add(first);  // has the unit
    for (std::uint32_t chunk = 0; chunk < 7 * kTurn; ++chunk)
      for (Waiter* waiter : {&low, &middle, &high}) waiter->wanted.push_back(chunk);
    queue.add(low, -5);
    queue.add(middle);
    queue.add(high, 7);
    while (order.size() < 1 + 6 * kTurn) order.back()->give_back();
    order.erase(order.begin());
    for (std::size_t i = 0; i < order.size(); ++i) {
      INFO("grant " << i);
      // In turn the middle one comes to its turn, too: the low one goes to the end of the row when it has had its own.
      if (i % kTurn != kTurn - 1)
        CHECK(order[i] == &high);
      else if (turn == GrantQueue::Turn::kAll)
        CHECK(order[i] == &low);
      else
        CHECK(order[i] == (i % (2 * kTurn) == kTurn - 1 ? &low : &middle));
    }
    Waiter& last = *order.back();
    for (Waiter* waiter : {&low, &middle, &high}) queue.remove(*waiter);
    last.give_back();
    CHECK(queue.units() == 0);
  }
}

TEST_CASE("flow/grants: bounded, nothing lost and nobody forgotten, whatever happens", "[flow][fast]") {
  for (std::uint64_t seed = 1; seed <= 300; ++seed) {
    std::mt19937_64 random(seed);
    const auto chunks_max = static_cast<std::uint32_t>(1 + random() % 4);
    const std::uint64_t bytes_max = 10 + random() % 90;
    GrantQueue queue{GrantBudget(chunks_max, bytes_max),
                     seed % 2 == 0 ? GrantQueue::Turn::kOne : GrantQueue::Turn::kAll};
    std::vector<Waiter*> order;
    std::vector<std::unique_ptr<Waiter>> waiters;
    std::size_t wanted = 0;
    std::size_t dropped = 0;
    for (int step = 0; step < 400; ++step) {
      const auto any = [&] { return waiters[random() % waiters.size()].get(); };
      switch (random() % (step < 300 ? 5 : 2)) {
        case 2:
          waiters.push_back(std::make_unique<Waiter>(queue, random() % 50, order));
          waiters.back()->at_once = random() % 4 == 0;
          break;
        case 3:
          if (waiters.empty()) break;
          for (std::uint64_t more = random() % 4; more > 0; --more, ++wanted)
            any()->wanted.push_back(static_cast<std::uint32_t>(random() % 9));
          for (const auto& waiter : waiters)
            if (!waiter->wanted.empty()) queue.add(*waiter, static_cast<std::int8_t>(random() % 3));
          break;
        case 4:
          if (waiters.empty() || random() % 8 != 0) break;
          if (const auto at = waiters.begin() + static_cast<std::ptrdiff_t>(random() % waiters.size());
              (*at)->held == 0) {
            dropped += (*at)->wanted.size();
            waiters.erase(at);
          }
          break;
        default:
          if (waiters.empty()) break;
          if (Waiter* const waiter = any(); waiter->held > 0) waiter->give_back();
      }
      std::uint32_t units = 0;
      std::uint64_t bytes = 0;
      for (const auto& waiter : waiters) {
        units += waiter->held;
        bytes += waiter->held * waiter->bytes;
      }
      REQUIRE(queue.units() == units);
      REQUIRE(units <= chunks_max);
      REQUIRE((units <= 1 || bytes <= bytes_max));
    }
    for (bool more = true; more;) {
      more = false;
      for (const auto& waiter : waiters)
        for (; waiter->held > 0; more = true) waiter->give_back();
    }
    REQUIRE(queue.units() == 0);
    REQUIRE(order.size() == wanted - dropped);
  }
}
