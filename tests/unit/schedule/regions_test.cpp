// Which nodes are near each other, from round trips.
#include "hybridps/schedule/regions.h"

#include <random>

#include "tests/support/catch.h"

namespace {

using hybridps::schedule::find_regions;
using Table = std::vector<std::vector<std::uint32_t>>;

/// Round trips where `us(a, b)` gives that of two nodes.
template <typename Us>
Table table(std::size_t nodes, Us us) {
  Table made(nodes, std::vector<std::uint32_t>(nodes, 0));
  for (std::size_t a = 0; a < nodes; ++a)
    for (std::size_t b = 0; b < nodes; ++b)
      if (a != b) made[a][b] = us(std::min(a, b), std::max(a, b));
  return made;
}

Table of_regions(const std::vector<int>& region_of, std::uint32_t near, std::uint32_t far, double noise = 0.0) {
  std::mt19937 random(7);
  std::uniform_real_distribution<double> more(1.0, 1.0 + noise);
  Table made(region_of.size(), std::vector<std::uint32_t>(region_of.size(), 0));
  for (std::size_t a = 0; a < region_of.size(); ++a)
    for (std::size_t b = 0; b < region_of.size(); ++b)
      if (a != b) made[a][b] = static_cast<std::uint32_t>((region_of[a] == region_of[b] ? near : far) * more(random));
  return made;
}

}  // namespace

TEST_CASE("schedule/regions: round trips that fall into clear groups show regions", "[schedule][fast]") {
  for (const std::vector<int>& regions : {std::vector<int>{0, 0, 1, 1},
                                          {0, 1, 0, 1},
                                          {0, 1, 1, 1},
                                          {0, 1, 2, 2, 1, 0},
                                          {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1}}) {
    CHECK(find_regions(of_regions(regions, 100, 2'000)) == regions);
    CHECK(find_regions(of_regions(regions, 100, 2'000, 0.9)) == regions);
    CHECK(find_regions(of_regions(regions, 400, 50'000, 0.9)) == regions);
    CHECK(find_regions(of_regions(regions, 8'000, 80'000, 0.9)) == regions);
  }
}

TEST_CASE("schedule/regions: nodes that are all far from each other are a region each", "[schedule][fast]") {
  CHECK(find_regions(of_regions({0, 1}, 0, 50'000)) == std::vector<int>{0, 1});
  CHECK(find_regions(of_regions({0, 1, 2}, 0, 2'000, 0.5)) == std::vector<int>{0, 1, 2});
}

TEST_CASE("schedule/regions: the largest step counts, not the first one", "[schedule][fast]") {
  // Two racks of one site 2 ms apart, and a site 80 ms away.
  const Table trips = table(6, [](std::size_t a, std::size_t b) -> std::uint32_t {
    return (a < 4) != (b < 4) ? 80'000 : (a < 2) != (b < 2) && a < 4 ? 2'000 : 100;
  });
  CHECK(find_regions(trips) == std::vector<int>{0, 0, 0, 0, 1, 1});
}

TEST_CASE("schedule/regions: a flat network has none", "[schedule][fast]") {
  CHECK(find_regions({}).empty());
  CHECK(find_regions({{0}}).empty());
  CHECK(find_regions(of_regions({0, 0}, 100, 0)).empty());
  CHECK(find_regions(of_regions({0, 0, 0, 0}, 100, 0, 5.0)).empty());
  CHECK(find_regions(of_regions({0, 0, 1, 1}, 30, 240)).empty());     // racks: too near to tell
  CHECK(find_regions(of_regions({0, 0, 1, 1}, 400, 1'400)).empty());  // no clear step
}

TEST_CASE("schedule/regions: round trips that are no groups show nothing", "[schedule][fast]") {
  // A chain: near are neighbours only.
  CHECK(find_regions(table(4, [](std::size_t a, std::size_t b) { return b - a == 1 ? 100U : 5'000U; })).empty());
  // One pair of two regions is near, as over a link of its own.
  CHECK(find_regions(table(4, [](std::size_t a, std::size_t b) {
          return (a < 2) == (b < 2) || (a == 1 && b == 2) ? 100U : 5'000U;
        })).empty());
}

TEST_CASE("schedule/regions: one direction is enough, and a pair that nobody measured shows nothing",
          "[schedule][fast]") {
  Table trips = of_regions({0, 0, 1, 1}, 100, 5'000);
  trips[0][2] = 0;
  trips[3] = {};
  CHECK(find_regions(trips) == std::vector<int>{0, 0, 1, 1});
  trips[0][1] = 20'000;  // a lost packet: the other direction was shorter
  CHECK(find_regions(trips) == std::vector<int>{0, 0, 1, 1});
  trips[2][3] = 0;
  CHECK(find_regions(trips).empty());
}
