// What may be under way on a long path, from its round trip and rate.
#include "hybridps/schedule/far_window.h"

#include <algorithm>

#include "tests/support/catch.h"

using hybridps::schedule::FarWindow;

TEST_CASE("schedule/far_window: a near peer has none, whatever its rate", "[schedule][fast]") {
  FarWindow window;
  CHECK_FALSE(window.look(0.0003, 1e9));
  CHECK(window.bytes() == 0);
  CHECK(window.look(0.05, 0));
  CHECK(window.bytes() == FarWindow::kBytesMin);
  CHECK(window.look(0.0003, 1e9));
  CHECK(window.bytes() == 0);
}

TEST_CASE("schedule/far_window: it grows until the path, not the window, is the limit", "[schedule][fast]") {
  FarWindow window;
  const double round_trip = 0.05;
  const double capacity = 25e6;
  int looks = 0;
  window.look(round_trip, 0);
  for (; looks < 40; ++looks)
    window.look(round_trip, std::min(capacity, static_cast<double>(window.bytes()) / round_trip));
  CHECK(static_cast<double>(window.bytes()) >= 3.5 * capacity * round_trip);
  CHECK(static_cast<double>(window.bytes()) <= 5 * capacity * round_trip);
  // A pause is forgotten only after a while, a slower path at last.
  for (int i = 0; i < 10; ++i) CHECK_FALSE(window.look(round_trip, 0));
  for (std::size_t i = 0; i < FarWindow::kLooks; ++i) window.look(round_trip, capacity / 16);
  CHECK(static_cast<double>(window.bytes()) < 2 * capacity * round_trip);
}
