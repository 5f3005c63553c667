#include "hybridps/core/mailbox.h"

#include <string>
#include <thread>
#include <vector>

#include "tests/support/catch.h"

using hybridps::core::Mailbox;

TEST_CASE("core/mailbox: all that was put is taken at once, in order, until the mailbox is closed", "[core][fast]") {
  Mailbox<std::string> mailbox;
  CHECK_FALSE(mailbox.has_some());
  CHECK(mailbox.put("a"));
  mailbox.change([](std::vector<std::string>& items) { items.insert(items.end(), {"b", "c"}); });
  CHECK(mailbox.has_some());
  CHECK_FALSE(mailbox.close_if_empty());
  std::vector<std::string>& taken = mailbox.take();
  CHECK(taken == std::vector<std::string>{"a", "b", "c"});
  CHECK_FALSE(mailbox.has_some());
  CHECK(mailbox.put("d"));  // while the others are handled
  taken.clear();
  CHECK(mailbox.take() == std::vector<std::string>{"d"});
  CHECK(mailbox.close_if_empty());
  CHECK_FALSE(mailbox.put("e"));
  CHECK_FALSE(mailbox.has_some());
}

TEST_CASE("core/mailbox: nothing is lost or repeated between threads", "[core][fast]") {
  constexpr int kEach = 5000;
  Mailbox<int> mailbox;
  std::vector<std::thread> threads;
  for (int from = 0; from < 3; ++from)
    threads.emplace_back([&mailbox, from] {
      for (int i = 0; i < kEach; ++i) mailbox.put(from * kEach + i);
    });
  std::vector<int> next{0, kEach, 2 * kEach};
  for (int left = 3 * kEach; left > 0;) {
    std::vector<int>& taken = mailbox.take();
    for (const int item : taken) {
      int& expected = next[static_cast<std::size_t>(item / kEach)];
      REQUIRE(item == expected);
      ++expected;
    }
    left -= static_cast<int>(taken.size());
    taken.clear();
  }
  for (std::thread& thread : threads) thread.join();
  CHECK(next == std::vector<int>{kEach, 2 * kEach, 3 * kEach});
}
