#include "hybridps/pg/handle.h"

#include <algorithm>

#include "tests/support/catch.h"

using namespace hybridps;
using pg::Handle;

namespace {

Handle sample(int rank) {
  Handle handle;
  handle.made_as_rank = rank;
  handle.engine.value = 0xabc0U + static_cast<unsigned>(rank);
  handle.instance = 5;
  handle.protocol_version = 9;
  handle.torch = "2.15";
  handle.where = "host-b pid 812";
  handle.group = "0";
  return handle;
}

}  // namespace

TEST_CASE("pg/handle: what is written is read again, and sorts by rank", "[pg][fast]") {
  std::vector<std::string> texts;
  for (const int rank : {0, 2, 9, 10, 99, 100, 65535}) {
    texts.push_back(to_text(sample(rank)));
    CHECK(pg::parse_handle(texts.back()).value() == sample(rank));
  }
  CHECK(std::is_sorted(texts.begin(), texts.end()));
}

TEST_CASE("pg/handle: a bar in a name does no harm", "[pg][fast]") {
  Handle handle = sample(1);
  handle.group = "a|b";
  CHECK(pg::parse_handle(to_text(handle)).value().group == "a_b");
  CHECK(pg::parse_members({to_text(handle)}, handle).is_ok());
}

TEST_CASE("pg/handle: no text that is cut or changed in a number is taken", "[pg][fast]") {
  const std::string text = to_text(sample(3));
  for (std::size_t bytes = 0; bytes < text.rfind('|'); ++bytes)
    CHECK_FALSE(pg::parse_handle(text.substr(0, bytes)).is_ok());
  for (const std::string_view from : {"0000003", "0000abc3", "|9|"}) {
    std::string changed = text;
    changed.replace(changed.find(from), 2, "x-");
    CHECK_FALSE(pg::parse_handle(changed).is_ok());
  }
  CHECK_FALSE(pg::parse_handle(text + "|more").is_ok());
  CHECK_FALSE(pg::parse_handle(std::string(100'000, 'x')).is_ok());
}

TEST_CASE("pg/handle: members that cannot make a group are named", "[pg][fast]") {
  const Handle ours = sample(0);
  const auto refused = [&](Handle other, const std::string& part) {
    const auto members = pg::parse_members({to_text(ours), to_text(other)}, ours);
    INFO(members.status().message());
    CHECK(members.status().message().find(part) != std::string_view::npos);
  };
  CHECK(pg::parse_members({to_text(ours), to_text(sample(1))}, ours).value().size() == 2);
  CHECK_FALSE(pg::parse_members({}, ours).is_ok());
  refused(ours, "there twice");
  Handle other = sample(1);
  other.torch = "2.14";
  refused(other, "torch 2.14, this process has 2.15");
  other = sample(1);
  other.protocol_version = 8;
  refused(other, "protocol 8");
  other = sample(1);
  other.group = "1";
  refused(other, "group '1', this is group '0'");
}

TEST_CASE("pg/handle: the digest tells lists apart, also by order", "[pg][fast]") {
  CHECK(pg::digest({"a", "b"}) == pg::digest({"a", "b"}));
  CHECK(pg::digest({"a", "b"}) != pg::digest({"b", "a"}));
  CHECK(pg::digest({"ab"}) != pg::digest({"a", "b"}));
}
