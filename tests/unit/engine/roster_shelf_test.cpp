#include "hybridps/engine/roster_shelf.h"

#include "hybridps/core/ids.h"
#include "tests/support/catch.h"

using namespace hybridps;
using bootstrap::Bytes;
using ShelfClaim = bootstrap::NodeShelf::ShelfClaim;

TEST_CASE("engine/roster_shelf: one has the shelf, and the others get what it puts there", "[engine][fast]") {
  const std::uint64_t name = core::random_u64();
  const auto one = engine::roster_shelf();
  const auto two = engine::roster_shelf();
  const auto three = engine::roster_shelf();
  CHECK(one->claim(name) == ShelfClaim::kOurs);
  CHECK(two->claim(name) == ShelfClaim::kOthers);
  CHECK(three->claim(name) == ShelfClaim::kOthers);
  CHECK_FALSE(two->look(name));
  one->serve();
  CHECK_FALSE(two->look(name));
  const Bytes value(700'000, 9);
  one->put(name, value);
  CHECK(two->look(name) == value);
  CHECK_FALSE(three->look(name));  // it comes later
  one->serve();
  CHECK(three->look(name) == value);
  // Another roster of the same group.
  CHECK(one->claim(name + 1) == ShelfClaim::kOurs);
  CHECK(two->claim(name + 1) == ShelfClaim::kOthers);
  CHECK_FALSE(two->look(name + 1));
  one->put(name + 1, Bytes{1, 2});
  CHECK(two->look(name + 1) == Bytes{1, 2});
  CHECK(three->claim(name) == ShelfClaim::kOurs);
}

TEST_CASE("engine/roster_shelf: who waits for a rank that ends is sent to the Store", "[engine][fast]") {
  const std::uint64_t name = core::random_u64();
  auto one = engine::roster_shelf();
  const auto two = engine::roster_shelf();
  const auto three = engine::roster_shelf();
  CHECK(one->claim(name) == ShelfClaim::kOurs);
  CHECK(two->claim(name) == ShelfClaim::kOthers);
  CHECK(three->claim(name) == ShelfClaim::kOthers);
  CHECK_FALSE(two->look(name));
  one.reset();
  CHECK(two->look(name) == Bytes());
  int looks = 1;
  while (!three->look(name) && looks < 100) ++looks;  // connects only now
  CHECK(looks < 100);
  CHECK(three->look(name) == Bytes());
  // Sent, and then gone: what was sent can be read.
  one = engine::roster_shelf();
  CHECK(one->claim(name) == ShelfClaim::kOurs);
  CHECK_FALSE(two->look(name));
  one->put(name, Bytes{3});
  one.reset();
  CHECK(two->look(name) == Bytes{3});
}
