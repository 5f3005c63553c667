#include "hybridps/flow/credit.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <deque>
#include <random>
#include <vector>

#include "tests/support/catch.h"

using hybridps::flow::GrantBudget;
using hybridps::flow::kWholeBatchBytes;
using hybridps::flow::ReturnBook;
using hybridps::flow::SendBook;
using hybridps::schedule::WindowTuner;
using namespace std::chrono_literals;

namespace {

constexpr SendBook::Duration kNow = 1s;

/// One sender, one receiver, and what is between them: messages that are consumed in any order, credits that are late.
class Conversation {
 public:
  Conversation(unsigned seed, bool local, std::int64_t allowance, std::int64_t cost_max)
      : random_(seed),
        local_(local),
        allowance_(allowance),
        cost_max_(cost_max),
        send_(allowance, local, 2 * cost_max),
        due_(std::max<std::int64_t>(1, allowance / 4)) {}

  void step() {
    now_ += std::chrono::microseconds(draw(3000));
    switch (draw(8)) {
      case 0:
      case 1: pay(draw(2) == 0); break;
      case 2: pay_whole(); break;
      case 3:
        if (!unused_.empty()) {  // an operation that is cancelled
          send_.unpay(take(unused_));
        }
        break;
      case 4:
        if (!unused_.empty()) {
          arrived_.push_back(take(unused_));
          due_.note_window(send_.window());  // every message says so
        }
        break;
      case 5: consume(); break;
      case 6: deliver_credit(); break;
      default:
        if (draw(20) == 0) send_.set_window(1 + draw(allowance_), WindowTuner::kUsual);
    }
    check();
  }

  /// All is consumed and every credit arrives.
  void settle() {
    while (!unused_.empty()) arrived_.push_back(take(unused_));
    while (!arrived_.empty() || !whole_arrived_.empty()) consume();
    while (!credits_.empty() || !whole_credits_.empty()) deliver_credit();
    check();
  }

  void check() {
    const std::int64_t held = sum(unused_) + sum(arrived_) + sum(credits_) + due_.due();
    CHECK(send_.outstanding() == held);  // nothing lost, nothing twice
    CHECK(send_.outstanding() >= 0);
    CHECK((send_.outstanding() <= allowance_ || alone_));
    CHECK(send_.window() >= 1);
    CHECK(send_.window() <= allowance_);
    const std::int64_t whole = sum(whole_arrived_) + sum(whole_credits_) + whole_due_.due();
    CHECK(send_.whole_outstanding() == whole);
    CHECK(whole >= 0);
    CHECK(whole <= std::max(allowance_, kWholeBatchBytes) + 2 * cost_max_);
  }

  /// A stream that finds no permit announces itself: what is due comes back, and then one message may go in any case.
  void announce() {
    settle();
    credits_.push_back(due_.take_due());
    settle();
    CHECK(send_.outstanding() == 0);
    REQUIRE(send_.pay(cost_max_ + allowance_, /*urgent=*/false));
    send_.unpay(cost_max_ + allowance_);
  }

  /// Nobody announces what may all be sent.
  void whole_never_waits_for_ever() {
    settle();
    REQUIRE(send_.pay_whole(cost_max_));
    send_.unpay_whole(cost_max_);
  }

 private:
  std::int64_t draw(std::int64_t below) { return std::uniform_int_distribution<std::int64_t>(0, below - 1)(random_); }
  std::int64_t take(std::deque<std::int64_t>& from) {
    const auto at = from.begin() + draw(static_cast<std::int64_t>(from.size()));
    const std::int64_t value = *at;
    from.erase(at);
    return value;
  }
  static std::int64_t sum(const std::deque<std::int64_t>& values) {
    std::int64_t total = 0;
    for (const std::int64_t value : values) total += value;
    return total;
  }
  void pay(bool urgent) {
    const std::int64_t cost = 1 + draw(cost_max_);
    const std::int64_t before = send_.outstanding();
    if (send_.pay(cost, urgent)) {
      CHECK((before == 0 || before + cost <= (urgent ? allowance_ : send_.window())));
      alone_ = before == 0;
      unused_.push_back(cost);
    } else {
      CHECK(before > 0);
      CHECK(before + cost > (urgent ? allowance_ : send_.window()));
      if (!urgent && send_.wants_round()) send_.begin_round(now_);
    }
  }
  void pay_whole() {
    const std::int64_t cost = 1 + draw(cost_max_);
    if (send_.pay_whole(cost)) whole_arrived_.push_back(cost);
  }
  void consume() {
    if (!arrived_.empty() && due_.consumed(take(arrived_))) credits_.push_back(due_.take_due());
    if (whole_arrived_.empty()) return;
    const std::int64_t cost = take(whole_arrived_);
    if (local_) {  // it comes back when it has been taken
      send_.unpay_whole(cost);
    } else if (whole_due_.consumed(cost)) {
      whole_credits_.push_back(whole_due_.take_due());
    }
  }
  void deliver_credit() {
    if (!credits_.empty()) send_.on_credit(static_cast<std::uint64_t>(take(credits_)), now_);
    if (!whole_credits_.empty()) send_.on_whole_credit(static_cast<std::uint64_t>(take(whole_credits_)));
  }

  std::mt19937 random_;
  const bool local_;
  const std::int64_t allowance_;
  const std::int64_t cost_max_;
  SendBook send_;
  ReturnBook due_;
  ReturnBook whole_due_;
  SendBook::Duration now_{};
  bool alone_ = false;                // the last that was paid had nothing beside it
  std::deque<std::int64_t> unused_;   // permits not used yet
  std::deque<std::int64_t> arrived_;  // sent and not consumed
  std::deque<std::int64_t> credits_;  // on their way
  std::deque<std::int64_t> whole_arrived_;
  std::deque<std::int64_t> whole_credits_;
};

}  // namespace

TEST_CASE("flow/credit: whatever is paid comes back once, within bounds, and nothing waits for ever", "[flow][fast]") {
  for (unsigned seed = 0; seed < 60; ++seed) {
    INFO("seed " << seed);
    const bool local = seed % 2 == 0;
    const std::int64_t allowance = std::vector<std::int64_t>{1, 1000, 65'536, 524'288}[seed / 2 % 4];
    const std::int64_t cost_max = std::vector<std::int64_t>{1024, 16'384, 262'144}[seed / 8 % 3];
    Conversation conversation(seed, local, allowance, cost_max);
    for (int turn = 0; turn < 4; ++turn) {
      for (int i = 0; i < 300; ++i) conversation.step();
      conversation.announce();
      conversation.whole_never_waits_for_ever();
    }
  }
}

TEST_CASE("flow/credit: bulk keeps to the window, what is urgent to the allowance", "[flow][fast]") {
  SendBook book(1000, /*local=*/false, 0);
  CHECK_FALSE(book.set_window(400, WindowTuner::kUsual));  // less than before
  CHECK(book.pay(400, false));
  CHECK_FALSE(book.pay(1, false));
  CHECK(book.pay(600, true));
  CHECK_FALSE(book.pay(1, true));
  CHECK(book.outstanding() == 1000);
  CHECK(book.set_window(500, WindowTuner::kUsual));
  CHECK_FALSE(book.set_window(500, WindowTuner::kUsual));  // nothing new
  book.unpay(600);
  CHECK(book.pay(100, false));
  CHECK_FALSE(book.pay(1, false));
}

TEST_CASE("flow/credit: a peer that returns too much cannot make more than its allowance of it", "[flow][fast]") {
  SendBook book(1000, /*local=*/false, 0);
  CHECK(book.pay(300, false));
  book.on_credit(~std::uint64_t{0}, kNow);
  CHECK(book.outstanding() == 0);
  book.on_credit(5, kNow);
  CHECK(book.pay(1000, false));
  CHECK_FALSE(book.pay(1, false));
  CHECK(book.pay_whole(50));
  book.on_whole_credit(~std::uint64_t{0});
  book.on_whole_credit(7);
  book.unpay_whole(7);
  CHECK(book.whole_outstanding() == 0);
}

TEST_CASE("flow/credit: the window grows with quick rounds across the network, never inside a node", "[flow][fast]") {
  for (const bool local : {true, false}) {
    SendBook book(1000, local, 0);
    book.set_window(400, WindowTuner::kUsual);
    CHECK(book.pay(400, false));
    CHECK_FALSE(book.pay(400, false));
    CHECK(book.wants_round() == !local);
    if (!local) book.begin_round(kNow);
    CHECK_FALSE(book.wants_round());
    book.on_credit(400, kNow + 100us);
    CHECK(book.window() == (local ? 400 : 500));
  }
}

TEST_CASE("flow/credit: a backlog is more than what may be missing for good", "[flow][fast]") {
  SendBook book(100'000, /*local=*/false, 0);
  CHECK(book.pay(50'000 + kWholeBatchBytes, false));
  CHECK_FALSE(book.has_backlog());
  CHECK(book.pay_whole(1));
  CHECK(book.has_backlog());
  SendBook near(100'000, /*local=*/true, 100'000);
  CHECK(near.pay(100'000, false));
  CHECK_FALSE(near.has_backlog());
}

TEST_CASE("flow/credit: credit is returned by quarters of the window that the sender uses", "[flow][fast]") {
  ReturnBook book(1000);
  CHECK_FALSE(book.consumed(999));
  CHECK(book.consumed(1));
  CHECK(book.take_due() == 1000);
  CHECK(book.take_due() == 0);
  book.note_window(40);
  CHECK_FALSE(book.consumed(9));
  CHECK(book.consumed(1));
  CHECK(book.take_due() == 10);
  book.note_window(1);  // at least one byte
  CHECK(book.consumed(1));
  book.take_due();
  book.note_window(1 << 20);  // at most as made
  CHECK_FALSE(book.consumed(999));
  CHECK(book.consumed(1));
}

TEST_CASE("flow/credit: a grant budget counts chunks, and bytes from the second chunk on", "[flow][fast]") {
  GrantBudget budget(3, 1000);
  CHECK(budget.fits(5000));  // one in any case
  budget.take(5000);
  CHECK_FALSE(budget.fits(1));
  budget.give_back(5000);
  budget.take(600);
  CHECK(budget.fits(400));
  CHECK_FALSE(budget.fits(401));
  budget.take(300);
  budget.take(100);
  CHECK_FALSE(budget.has_unit());
  CHECK_FALSE(budget.fits(0));
  budget.give_back(300);
  CHECK(budget.chunks() == 2);
  CHECK(budget.fits(300));
  GrantBudget least(0);
  CHECK(least.has_unit());
  least.take();
  CHECK_FALSE(least.has_unit());
}
