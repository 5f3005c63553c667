#include "hybridps/bootstrap/incarnation.h"

#include "tests/support/catch.h"

using hybridps::bootstrap::IncarnationCounter;

TEST_CASE("bootstrap/incarnation: a group name used again is another incarnation", "[bootstrap][fast]") {
  IncarnationCounter counter;
  CHECK(counter.next("0", "job") == "job.0");
  CHECK(counter.next("0", "job") == "job.1");
  CHECK(counter.next("1", "job") == "job.0");
}

TEST_CASE("bootstrap/incarnation: the environment need not be set", "[bootstrap][fast]") {
  IncarnationCounter counter;
  CHECK(counter.next("0").ends_with(".0"));
}
