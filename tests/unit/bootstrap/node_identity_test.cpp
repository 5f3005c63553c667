#include "hybridps/bootstrap/node_identity.h"

#include "hybridps/bootstrap/record.h"
#include "tests/support/catch.h"

using namespace hybridps;
using bootstrap::node_identity;

TEST_CASE("bootstrap/node_identity: engines of one host have the same identity", "[bootstrap][fast]") {
  const core::Config config;
  const std::string identity = node_identity(config, core::EngineId{1});
  CHECK(identity == node_identity(config, core::EngineId{2}));
  CHECK(identity.starts_with("host:"));
  CHECK(identity.find("net:[") != std::string::npos);
}

TEST_CASE("bootstrap/node_identity: HYBRIDPS_NODE replaces the host's identity", "[bootstrap][fast]") {
  core::Config config;
  config.node = "left";
  CHECK(node_identity(config, core::EngineId{1}) == "node:left");
}

TEST_CASE("bootstrap/node_identity: a name that is no UTF-8 is escaped", "[bootstrap][fast]") {
  core::Config config;
  config.node = "caf\xe9";
  CHECK(node_identity(config, core::EngineId{1}) == "node:caf\\xe9");
}

TEST_CASE("bootstrap/node_identity: without shared memory every engine is a node of its own", "[bootstrap][fast]") {
  core::Config config;
  config.shm = false;
  CHECK(node_identity(config, core::EngineId{1}) != node_identity(config, core::EngineId{2}));
  config.node = "left";
  CHECK(node_identity(config, core::EngineId{1}) != node_identity(config, core::EngineId{2}));
}

TEST_CASE("bootstrap/node_identity: long names are cut and still told apart", "[bootstrap][fast]") {
  core::Config config;
  config.node = std::string(1000, 'x') + "1";
  const std::string first = node_identity(config, core::EngineId{1});
  config.node = std::string(1000, 'x') + "2";
  const std::string second = node_identity(config, core::EngineId{1});
  CHECK(first.size() == bootstrap::kIdentityBytesMax);
  CHECK(first != second);
}

TEST_CASE("bootstrap/node_identity: a process knows when it was started, by the wall clock", "[bootstrap][fast]") {
  const std::uint64_t started = bootstrap::process_started_ms();
  const std::uint64_t now = bootstrap::wall_ms();
  CHECK(started > 0);
  CHECK(started <= now + 20);        // rounded up to the kernel's ticks
  CHECK(now - started < 3'600'000);  // this program takes no hour
  CHECK(bootstrap::machine_id() == bootstrap::machine_id());
}
