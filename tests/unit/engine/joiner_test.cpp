#include "hybridps/engine/joiner.h"

#include <string>

#include "tests/support/catch.h"
#include "tests/support/no_threads.h"

using hybridps::core::Code;
using hybridps::core::Status;
using hybridps::engine::Joiner;

TEST_CASE("engine/joiner: a thread that cannot be started is said, and no group waits for it", "[engine][fast]") {
  CHECK(hybridps::test::holds_without_threads([] {
    Joiner joiner({}, nullptr);
    const Status status = joiner.start();
    return status.code() == Code::kOutOfResources && status.message().find("hybridps-boot") != std::string::npos &&
           !joiner.start().is_ok();
  }));
  Joiner joiner({}, nullptr);
  CHECK(joiner.start().is_ok());
  CHECK(joiner.start().is_ok());
}
