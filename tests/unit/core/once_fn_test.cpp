#include "hybridps/core/once_fn.h"

#include <memory>

#include "tests/support/catch.h"

using hybridps::core::OnceFn;

TEST_CASE("core/once_fn: runs once and is empty afterwards", "[core][fast]") {
  int sum = 0;
  OnceFn<void(int)> add = [&sum](int value) { sum += value; };
  REQUIRE(add);
  add(2);
  CHECK_FALSE(add);
  add(2);
  CHECK(sum == 2);
}

TEST_CASE("core/once_fn: owns what a lambda moved in and lets go after the call", "[core][fast]") {
  auto owned = std::make_shared<int>(5);
  const std::weak_ptr<int> watch = owned;
  int seen = 0;
  OnceFn<void()> read = [owned = std::move(owned), &seen] { seen = *owned; };
  OnceFn<void()> moved = std::move(read);
  CHECK_FALSE(read);  // NOLINT(bugprone-use-after-move): empty is the promise
  moved();
  CHECK(seen == 5);
  CHECK(watch.expired());
}

TEST_CASE("core/once_fn: dropped without a call it still lets go", "[core][fast]") {
  auto owned = std::make_shared<int>(5);
  const std::weak_ptr<int> watch = owned;
  {
    const OnceFn<void()> never = [owned = std::move(owned)] { static_cast<void>(owned); };
  }
  CHECK(watch.expired());
}

TEST_CASE("core/once_fn: may replace itself while it runs", "[core][fast]") {
  int runs = 0;
  OnceFn<void()> next;
  next = [&] {
    ++runs;
    next = [&] { ++runs; };
  };
  next();
  next();
  next();
  CHECK(runs == 2);
}

TEST_CASE("core/once_fn: passes move-only arguments", "[core][fast]") {
  int seen = 0;
  OnceFn<void(std::unique_ptr<int>)> take = [&seen](std::unique_ptr<int> value) { seen = *value; };
  take(std::make_unique<int>(7));
  CHECK(seen == 7);
}
