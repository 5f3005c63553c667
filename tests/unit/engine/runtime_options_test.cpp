#include "hybridps/engine/runtime_options.h"

#include <string>
#include <utility>

#include "tests/support/catch.h"

namespace hybridps::engine {
namespace {

TEST_CASE("engine/runtime_options: heartbeats follow from the time after which silence means death", "[engine][fast]") {
  for (const auto& [dead, heartbeat] : {std::pair{0.05, 0.0125},
                                        {0.5, 0.125},
                                        {1.0, 0.2},
                                        {5.0, 0.25},
                                        {20.0, 1.0},
                                        {120.0, 1.0},
                                        {1200.0, 10.0},
                                        {86400.0, 720.0}}) {
    const auto config = core::Config::from({{"HYBRIDPS_DEAD_SECONDS", std::to_string(dead)}});
    const RuntimeOptions options = RuntimeOptions::of(config.value(), core::EngineId{1});
    INFO(dead);
    CHECK(options.heartbeat_seconds == Approx(heartbeat));
    CHECK(options.dead_seconds == Approx(dead));
    CHECK(options.quick_dead_seconds == Approx(dead));  // as asked
  }
  const RuntimeOptions usual = RuntimeOptions::of(core::Config::from({}).value(), core::EngineId{1});
  CHECK(usual.heartbeat_seconds == 1);
  CHECK(usual.dead_seconds == 20);
  CHECK(usual.quick_dead_seconds == 5);
}

}  // namespace
}  // namespace hybridps::engine
