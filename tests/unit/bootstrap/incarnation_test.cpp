#include "hybridps/bootstrap/incarnation.h"

#include "tests/support/catch.h"

using hybridps::bootstrap::IncarnationCounter;

TEST_CASE("bootstrap/incarnation: a group name used again is another incarnation", "[bootstrap][fast]") {
  IncarnationCounter counter;
  CHECK(counter.next("0", "job", "2") == "job.2.0");
  CHECK(counter.next("0", "job", "2") == "job.2.1");
  CHECK(counter.next("1", "job", "2") == "job.2.0");
  CHECK(counter.next("0", "job", "3") == "job.3.2");
}

TEST_CASE("bootstrap/incarnation: the environment need not be set", "[bootstrap][fast]") {
  IncarnationCounter counter;
  CHECK(counter.next("0").ends_with(".0"));
}
