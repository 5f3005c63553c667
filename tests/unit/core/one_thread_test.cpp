#include "hybridps/core/one_thread.h"

#include <thread>

#include "tests/support/catch.h"
#include "tests/support/check.h"

using hybridps::core::checks_failed;
using hybridps::core::OneThread;

TEST_CASE("core/one_thread: calls of one thread may be nested, and threads may take turns", "[core][fast]") {
  OneThread one;
  const auto before = checks_failed();
  const auto use = [&] {
    const OneThread::Inside outer(one);
    {
      const OneThread::Inside inner(one);
    }
    const OneThread::Inside again(one);
  };
  use();
  std::thread(use).join();
  use();
  CHECK(checks_failed() == before);
}

TEST_CASE("core/one_thread: a second thread inside at the same time is noticed, once", "[core][fast]") {
  OneThread one;
  const auto before = checks_failed();
  {
    const OneThread::Inside inside(one);
    std::thread([&] { const OneThread::Inside second(one); }).join();
  }
  ++hybridps::test::checks_expected_to_fail;
  CHECK(checks_failed() == before + 1);
  const OneThread::Inside inside(one);
  CHECK(checks_failed() == before + 1);
}
