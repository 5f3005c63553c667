#include "hybridps/transport/rx_pool.h"

#include <vector>

#include "tests/support/catch.h"
#include "tests/support/core_dump.h"

namespace {

using namespace hybridps::transport;

}  // namespace

TEST_CASE("transport/rx_pool: blocks without use go back, and those in use stay", "[transport][fast]") {
  int registered = 0;
  RxPool pool(~std::size_t{0}, {[&](std::span<std::byte>, void**) {
                                  ++registered;
                                  return true;
                                },
                                [&](void*) { --registered; }});
  RxSlot* const kept = pool.allocate(100);
  std::vector<RxSlot*> many;
  for (int i = 0; i < 100; ++i) many.push_back(pool.allocate(200000));
  const int most = registered;
  CHECK(most > 5);
  CHECK_FALSE(hybridps::test::is_dumped(kept->data));
  for (RxSlot* const slot : many) pool.release(slot);
  pool.trim();
  CHECK(registered == most);  // used since the last time
  many.assign(1, pool.allocate(200000));
  pool.trim();
  CHECK(registered == 2);
  CHECK(pool.bytes_mapped() == 2 * RxPool::kBlockBytes);
  CHECK(pool.slots_in_use() == 2);
  many.push_back(pool.allocate(1 << 20));
  CHECK(registered == 3);
  for (RxSlot* const slot : many) pool.release(slot);
  pool.release(kept);
  for (int i = 0; i < 2; ++i) pool.trim();
  CHECK(registered == 0);
  CHECK(pool.bytes_mapped() == 0);
  RxSlot* const again = pool.allocate(100);
  REQUIRE(again != nullptr);
  again->data[99] = std::byte{1};
}
