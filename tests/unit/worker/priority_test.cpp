#include "hybridps/worker/priority.h"

#include "tests/support/catch.h"

using hybridps::schedule::Kind;
using hybridps::worker::parse_priorities;
using hybridps::worker::Priorities;
using hybridps::worker::text_of;

TEST_CASE("worker/priority: classes and numbers say what goes first", "[worker][fast]") {
  CHECK(parse_priorities("").value() == Priorities{0, 0});
  CHECK(parse_priorities("-128").value() == Priorities{-128, -128});
  CHECK(parse_priorities("127,all_gather=-1").value() == Priorities{127, -1});
  const Priorities tensor = parse_priorities("tensor").value();
  const Priorities sharded = parse_priorities("sharded").value();
  const Priorities data = parse_priorities("data").value();
  CHECK(parse_priorities("pipeline").value() == tensor);
  CHECK(tensor.of(Kind::kAllReduce) > sharded.of(Kind::kAllGather));
  CHECK(sharded.of(Kind::kAllGather) > sharded.of(Kind::kReduceScatter));
  CHECK(sharded.of(Kind::kReduceScatter) > data.of(Kind::kAllReduce));
}

TEST_CASE("worker/priority: the text is one for one meaning", "[worker][fast]") {
  for (const char* text : {"", "5", "-3,all_gather=4", "1,all_gather=2"}) {
    CHECK(text_of(parse_priorities(text).value()) == text);
  }
  CHECK(text_of(parse_priorities("sharded").value()) == "1,all_gather=2");
  CHECK(text_of(parse_priorities("3,all_gather=3").value()) == "3");
  CHECK(text_of(parse_priorities("data").value()).empty());
}

TEST_CASE("worker/priority: anything else is refused with what may be written", "[worker][fast]") {
  for (const char* text :
       {"128", "-129", "high", "1,", "1,all_gather=", "1,all_gather=x", " 1", "1.5", ",all_gather=1"}) {
    INFO(text);
    const auto parsed = parse_priorities(text);
    REQUIRE_FALSE(parsed.is_ok());
    CHECK(parsed.status().message().find(text) != std::string::npos);
    CHECK(parsed.status().message().find("all_gather=NUMBER") != std::string::npos);
  }
}
