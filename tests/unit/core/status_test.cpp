#include "hybridps/core/status.h"

#include <memory>

#include "tests/support/catch.h"

using namespace hybridps::core;

TEST_CASE("core/status: ok carries nothing", "[core][fast]") {
  const Status status;
  CHECK(status.is_ok());
  CHECK(status.code() == Code::kOk);
  CHECK(status.message().empty());
  CHECK(status.to_string() == "ok");
}

TEST_CASE("core/status: copies share the code and the message", "[core][fast]") {
  const Status status(Code::kTimeout, "push timed out");
  const Status copy = status;
  CHECK(copy.code() == Code::kTimeout);
  CHECK(copy.message().data() == status.message().data());
  CHECK(copy.to_string() == "timeout: push timed out");
}

TEST_CASE("core/status: every code has a name of its own", "[core][fast]") {
  for (int a = 0; a <= static_cast<int>(Code::kInternal); ++a) {
    CHECK(code_name(static_cast<Code>(a)) != "unknown");
    for (int b = 0; b < a; ++b) CHECK(code_name(static_cast<Code>(a)) != code_name(static_cast<Code>(b)));
  }
}

TEST_CASE("core/status: a result is a value or an error", "[core][fast]") {
  Result<std::unique_ptr<int>> value(std::make_unique<int>(3));
  REQUIRE(value.is_ok());
  CHECK(value.status().is_ok());
  const std::unique_ptr<int> taken = std::move(value).value();
  CHECK(*taken == 3);
  const Result<int> error(Status(Code::kBusy, "full"));
  CHECK_FALSE(error.is_ok());
  CHECK(error.status().code() == Code::kBusy);
}
