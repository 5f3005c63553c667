#include "hybridps/core/config.h"

#include <stdlib.h>
#include <unistd.h>

#include <set>

#include "tests/support/catch.h"

using namespace hybridps::core;

TEST_CASE("core/config: an empty environment gives the defaults", "[core][fast]") {
  const auto config = Config::from({});
  REQUIRE(config.is_ok());
  CHECK(config.value().pool_bytes == 64u << 20);
  CHECK(config.value().chunk_bytes == 64u << 10);
  CHECK(config.value().spin_microseconds == -1);
  CHECK(config.value().shm);
  CHECK(config.value().warnings.empty());
  for (const SettingRow& row : config.value().table()) {
    CHECK(row.source == "default");
    CHECK(row.value == row.default_value);
    CHECK_FALSE(row.doc.empty());
  }
}

TEST_CASE("core/config: values are read and shown with their source", "[core][fast]") {
  const auto read = Config::from({{"HYBRIDPS_NODE", " left "},
                                  {"HYBRIDPS_POOL_BYTES", "128m"},
                                  {"HYBRIDPS_NIC_GBPS", "12.5"},
                                  {"HYBRIDPS_SHM", "off"},
                                  {"HYBRIDPS_SPIN_MICROSECONDS", "50"},
                                  {"HYBRIDPS_LOG_LEVEL", "Debug"},
                                  {"HYBRIDPS_DATA_TRANSPORT", "rdma"},
                                  {"HYBRIDPS_SECURITY", "tls"},
                                  {"HYBRIDPS_INTERFACE", ""},
                                  {"PATH", "/bin"}});
  REQUIRE(read.is_ok());
  const Config& config = read.value();
  CHECK(config.node == "left");
  CHECK(config.pool_bytes == 128u << 20);
  CHECK(config.nic_gbps == std::vector<double>{12.5});
  CHECK_FALSE(config.shm);
  CHECK(config.spin_microseconds == 50);
  CHECK(config.log_level == LogLevel::kDebug);
  CHECK(config.data_transport == DataTransport::kRdma);
  CHECK(config.tls);
  CHECK_FALSE(Config::from({{"HYBRIDPS_SECURITY", "off"}}).value().tls);
  CHECK_FALSE(config.given.contains("HYBRIDPS_INTERFACE"));  // empty is unset
  for (const SettingRow& row : config.table()) {
    CHECK(row.source == (config.given.contains(row.name) ? "env" : "default"));
    if (row.name == "HYBRIDPS_POOL_BYTES") CHECK(row.value == "128M");
    if (row.name == "HYBRIDPS_POOL_BYTES") CHECK(row.default_value == "64M");
  }
}

TEST_CASE("core/config: rates are one number or a list", "[core][fast]") {
  CHECK(Config::from({{"HYBRIDPS_NIC_GBPS", "25, 10"}}).value().nic_gbps == std::vector<double>{25, 10});
  for (const char* text : {"25,", ",25", "25,x", "25,-1", ","}) {
    INFO(text);
    CHECK_FALSE(Config::from({{"HYBRIDPS_NIC_GBPS", text}}).is_ok());
  }
}

TEST_CASE("core/config: ports are a range or one port", "[core][fast]") {
  const Config config = Config::from({{"HYBRIDPS_PORTS", "20000 - 20099"}}).value();
  CHECK(config.ports.first == 20000);
  CHECK(config.ports.last == 20099);
  CHECK(config.ports.size() == 100);
  CHECK(Config::from({{"HYBRIDPS_PORTS", "7"}}).value().ports.size() == 1);
  CHECK(Config().ports.size() == 0);
  for (const char* text : {"0", "0-5", "9-8", "1-65536", "-", "5-", "-5", "a-b", "1-2-3"}) {
    INFO(text);
    CHECK_FALSE(Config::from({{"HYBRIDPS_PORTS", text}}).is_ok());
  }
}

TEST_CASE("core/config: what the table shows can be set again", "[core][fast]") {
  Config::Environment environment;
  for (const SettingRow& row : Config().table()) environment[row.name] = row.value;
  const auto again = Config::from(environment);
  REQUIRE(again.is_ok());
  for (const SettingRow& row : again.value().table()) CHECK(row.value == row.default_value);
}

TEST_CASE("core/config: names in the table are distinct", "[core][fast]") {
  std::set<std::string> names;
  for (const SettingRow& row : Config().table()) CHECK(names.insert(row.name).second);
}

TEST_CASE("core/config: an unknown name is warned about with the nearest known one", "[core][fast]") {
  const auto config = Config::from({{"HYBRIDPS_HEARTBEAT_SECOND", "2"}, {"HYBRIDPS_UCX_TLS", "tcp"}});
  REQUIRE(config.is_ok());
  REQUIRE(config.value().warnings.size() == 1);
  CHECK(config.value().warnings[0].find("HYBRIDPS_HEARTBEAT_SECOND is ignored") != std::string::npos);
  CHECK(config.value().warnings[0].find("mean HYBRIDPS_HEARTBEAT_SECONDS?") != std::string::npos);
}

TEST_CASE("core/config: a bad value is an error that names variable and value and expectation", "[core][fast]") {
  const std::pair<const char*, const char*> examples[] = {
      {"HYBRIDPS_POOL_BYTES", "lots"},    {"HYBRIDPS_POOL_BYTES", "1"},      {"HYBRIDPS_POOL_BYTES", "-4K"},
      {"HYBRIDPS_GRANT_CHUNKS", "0"},     {"HYBRIDPS_GRANT_CHUNKS", "1.5"},  {"HYBRIDPS_SHM", "maybe"},
      {"HYBRIDPS_HEARTBEAT_SECONDS", ""}, {"HYBRIDPS_NIC_GBPS", "nan"},      {"HYBRIDPS_LOG_LEVEL", "loud"},
      {"HYBRIDPS_DATA_SOCKETS", "0"},     {"HYBRIDPS_DATA_SOCKETS", "17"},   {"HYBRIDPS_SPIN_MICROSECONDS", "-2"},
      {"HYBRIDPS_DEAD_SECONDS", "0.5"},   {"HYBRIDPS_DATA_TRANSPORT", "ib"}, {"HYBRIDPS_SECURITY", "ssl"},
      {"HYBRIDPS_DATA_THREADS", "17"},    {"HYBRIDPS_DATA_THREADS", "-2"},   {"HYBRIDPS_CORES", "0"},
      {"HYBRIDPS_CORES", "many"},
  };
  for (const auto& [name, value] : examples) {
    INFO(name << "=" << value);
    const auto config = Config::from({{name, value}});
    if (*value == '\0') {
      CHECK(config.is_ok());
      continue;
    }
    REQUIRE_FALSE(config.is_ok());
    CHECK(config.status().code() == Code::kInvalidArgument);
    const std::string text(config.status().message());
    CHECK(text.find(name) != std::string::npos);
    CHECK(text.find(value) != std::string::npos);
    CHECK(text.find("expected") != std::string::npos);
  }
}

TEST_CASE("core/config: the process environment is read", "[core][fast]") {
  REQUIRE(setenv("HYBRIDPS_GRANT_CHUNKS", "9", 1) == 0);
  const auto config = Config::from_environment();
  REQUIRE(unsetenv("HYBRIDPS_GRANT_CHUNKS") == 0);
  REQUIRE(config.is_ok());
  CHECK(config.value().grant_chunks == 9);
}

TEST_CASE("core/config: each %p in the name of the metrics file becomes the process id", "[core][fast]") {
  Config config;
  CHECK(config.metrics_path().empty());
  config.metrics_file = "/tmp/%p/metrics.%p.prom";
  const std::string pid = std::to_string(getpid());
  CHECK(config.metrics_path() == "/tmp/" + pid + "/metrics." + pid + ".prom");
}

TEST_CASE("core/config: the table marks what cannot be used and shows the rest", "[core][fast]") {
  REQUIRE(setenv("HYBRIDPS_POOL_BYTES", "lots", 1) == 0);
  REQUIRE(setenv("HYBRIDPS_SHM", "0", 1) == 0);
  REQUIRE(setenv("HYBRIDPS_POOL_BITES", "1", 1) == 0);
  REQUIRE(setenv("HYBRIDPS_TRACE", "/tmp/\xff", 1) == 0);
  std::vector<std::string> warnings;
  const auto rows = Config::table_of_environment(warnings);
  CHECK(Config::from({{"HYBRIDPS_TRACE", "/tmp/\xff"}}).value().trace == "/tmp/\xff");  // a path keeps its bytes
  for (const char* name : {"HYBRIDPS_POOL_BYTES", "HYBRIDPS_SHM", "HYBRIDPS_POOL_BITES", "HYBRIDPS_TRACE"})
    REQUIRE(unsetenv(name) == 0);
  CHECK(rows.size() == Config().table().size());
  for (const SettingRow& row : rows) {
    INFO(row.name);
    if (row.name == "HYBRIDPS_POOL_BYTES") {
      CHECK(row.value == "lots");
      CHECK(row.source == "env");
      CHECK(row.problem.find("'lots' is not valid: expected a number of bytes") != std::string::npos);
    } else {
      if (row.name == "HYBRIDPS_TRACE") CHECK(row.value == "/tmp/\\xff");
      CHECK(row.problem.empty());
    }
    if (row.name == "HYBRIDPS_SHM") CHECK(row.value == "0");
  }
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("did you mean HYBRIDPS_POOL_BYTES?") != std::string::npos);
}
