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
  for (const auto& rows : {config.value().table(), config.value().limits_table()})
    for (const SettingRow& row : rows) {
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

TEST_CASE("core/config: gloo's files of certificates count where data is encrypted", "[core][fast]") {
  Config::Environment environment{{"GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY", " /a.key "},
                                  {"GLOO_DEVICE_TRANSPORT_TCP_TLS_CERT", "/a.pem"},
                                  {"GLOO_DEVICE_TRANSPORT_TCP_TLS_CA_PATH", "/authorities"}};
  CHECK_FALSE(Config::from(environment).value().certificate_paths.any());
  environment["HYBRIDPS_SECURITY"] = "tls";
  const Config config = Config::from(environment).value();
  CHECK(config.certificate_paths.any());
  CHECK(config.certificate_paths.key == "/a.key");
  CHECK(config.certificate_paths.certificates == "/a.pem");
  CHECK(config.certificate_paths.authorities.empty());
  CHECK(config.certificate_paths.folder == "/authorities");
  CHECK(config.warnings.empty());
  // What asks gloo for encryption is enough, with certificates, unless the setting says otherwise.
  environment.erase("HYBRIDPS_SECURITY");
  environment["GLOO_DEVICE_TRANSPORT"] = "tcp_tls";
  CHECK((Config::from(environment).value().tls && Config::from(environment).value().certificate_paths.any()));
  environment["HYBRIDPS_SECURITY"] = "off";
  CHECK_FALSE(Config::from(environment).value().tls);
  environment.erase("HYBRIDPS_SECURITY");
  environment.erase("GLOO_DEVICE_TRANSPORT_TCP_TLS_PKEY");
  CHECK_FALSE(Config::from(environment).value().tls);
}

TEST_CASE("core/config: limits are a list, shown as it would be written", "[core][fast]") {
  const Config config =
      Config::from({{"HYBRIDPS_LIMITS", " window_bytes=4M, chunk_bytes = 16384,data_threads=2 "}}).value();
  CHECK(config.chunk_bytes == 16384);
  CHECK(config.window_bytes == 4u << 20);
  CHECK(config.data_threads == 2);
  CHECK(config.warnings.empty());
  for (const SettingRow& row : config.table())
    if (row.name == "HYBRIDPS_LIMITS") CHECK(row.value == "window_bytes=4M,chunk_bytes=16K,data_threads=2");
  for (const SettingRow& row : config.limits_table()) {
    const bool is_given = row.name == "window_bytes" || row.name == "chunk_bytes" || row.name == "data_threads";
    INFO(row.name);
    CHECK((row.source == "env") == is_given);
    CHECK((row.value != row.default_value) == is_given);
  }
}

TEST_CASE("core/config: an error in the limits says which limit and what is expected", "[core][fast]") {
  const std::pair<const char*, const char*> examples[] = {
      {"chunk_bytes=lots",
       "for chunk_bytes a number of bytes from 1K to 64M, such as 65536, 64K, 1.5M, 2G; not 'lots'"},
      {"window_bytes=4M,chunk_bytes=", "for chunk_bytes a number of bytes from 1K to 64M"},
      {"chunk_bites=4K", "name=value, separated by commas, with names of: eager_bytes, "},
      {"chunk_bytes", "; not 'chunk_bytes'"},
      {"chunk_bytes=4K,", "; not ''"},
      {"=4K", "; not '=4K'"},
      {"pool_bytes=64M", "; not 'pool_bytes=64M'"},
      {"chunk_bytes=4K,chunk_bytes=4K", "chunk_bytes once"},
  };
  for (const auto& [value, wanted] : examples) {
    const auto config = Config::from({{"HYBRIDPS_LIMITS", value}});
    REQUIRE_FALSE(config.is_ok());
    const std::string text(config.status().message());
    INFO(text);
    CHECK(text.starts_with("HYBRIDPS_LIMITS='" + std::string(value) + "' is not valid: expected "));
    CHECK(text.find(wanted) != std::string::npos);
  }
}

TEST_CASE("core/config: limits are taken by their old names, with one warning that has the new form", "[core][fast]") {
  const auto config = Config::from({{"HYBRIDPS_CHUNK_BYTES", "16384"},
                                    {"HYBRIDPS_GRANT_CHUNKS", " 9 "},
                                    {"HYBRIDPS_WINDOW_BYTES", ""},
                                    {"HYBRIDPS_LIMITS", "data_threads=1"}});
  REQUIRE(config.is_ok());
  CHECK(config.value().chunk_bytes == 16384);
  CHECK(config.value().grant_chunks == 9);
  REQUIRE(config.value().warnings.size() == 1);
  CHECK(config.value().warnings[0] ==
        "HYBRIDPS_CHUNK_BYTES and 1 more: old names, which the next version will not know; write "
        "HYBRIDPS_LIMITS=chunk_bytes=16K,grant_chunks=9,data_threads=1");
  Config::Environment all_old;
  for (const SettingRow& row : Config().limits_table()) {
    std::string old_name = "HYBRIDPS_" + row.name;
    for (char& c : old_name) c = static_cast<char>(toupper(c));
    INFO(old_name);
    CHECK(Config::from({{old_name, row.value}}).value().given.contains("HYBRIDPS_LIMITS=" + row.name));
    CHECK_FALSE(Config::from({{old_name, "nonsense"}}).is_ok());
    all_old.emplace(old_name, row.value);
  }
  CHECK(Config::from(all_old).value().warnings.at(0).size() < 400);  // a record's notes have 512 bytes
  CHECK(Config::from({{"HYBRIDPS_LIMITS", "chunk_bytes=16K; grant_chunks=2"}}).value().grant_chunks == 2);

  const auto both = Config::from({{"HYBRIDPS_CHUNK_BYTES", "8K"}, {"HYBRIDPS_LIMITS", "chunk_bytes=16K"}});
  REQUIRE_FALSE(both.is_ok());
  CHECK(both.status().message() ==
        "HYBRIDPS_CHUNK_BYTES='8K' is not valid: expected only HYBRIDPS_LIMITS=chunk_bytes, which is set too");
}

TEST_CASE("core/config: a setting of an earlier version is ignored, and the warning says what to do", "[core][fast]") {
  const std::pair<const char*, const char*> examples[] = {{"HYBRIDPS_HEARTBEAT_SECONDS", "HYBRIDPS_DEAD_SECONDS"},
                                                          {"HYBRIDPS_LINGER_SECONDS", "5 s"},
                                                          {"HYBRIDPS_SMALL_FIRST", "always"},
                                                          {"HYBRIDPS_LEAVE_SIDE_GROUPS", "HYBRIDPS_AS"}};
  for (const auto& [name, instead] : examples) {
    const Config config = Config::from({{name, "1"}}).value();
    REQUIRE(config.warnings.size() == 1);
    CHECK(config.warnings[0].starts_with(std::string(name) + " is ignored, it is no setting any more: "));
    CHECK(config.warnings[0].find(instead) != std::string::npos);
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
  const auto config = Config::from({{"HYBRIDPS_DEAD_SECOND", "2"}, {"HYBRIDPS_UCX_TLS", "tcp"}});
  REQUIRE(config.is_ok());
  REQUIRE(config.value().warnings.size() == 1);
  CHECK(config.value().warnings[0].find("HYBRIDPS_DEAD_SECOND is ignored") != std::string::npos);
  CHECK(config.value().warnings[0].find("mean HYBRIDPS_DEAD_SECONDS?") != std::string::npos);
}

TEST_CASE("core/config: a bad value is an error that names variable and value and expectation", "[core][fast]") {
  const std::pair<const char*, const char*> examples[] = {
      {"HYBRIDPS_POOL_BYTES", "lots"},   {"HYBRIDPS_POOL_BYTES", "1"},      {"HYBRIDPS_POOL_BYTES", "-4K"},
      {"HYBRIDPS_GRANT_CHUNKS", "0"},    {"HYBRIDPS_GRANT_CHUNKS", "1.5"},  {"HYBRIDPS_SHM", "maybe"},
      {"HYBRIDPS_WARN_SECONDS", ""},     {"HYBRIDPS_NIC_GBPS", "nan"},      {"HYBRIDPS_LOG_LEVEL", "loud"},
      {"HYBRIDPS_DATA_SOCKETS", "0"},    {"HYBRIDPS_DATA_SOCKETS", "17"},   {"HYBRIDPS_SPIN_MICROSECONDS", "-2"},
      {"HYBRIDPS_DEAD_SECONDS", "0.01"}, {"HYBRIDPS_DATA_TRANSPORT", "ib"}, {"HYBRIDPS_SECURITY", "ssl"},
      {"HYBRIDPS_DATA_THREADS", "17"},   {"HYBRIDPS_DATA_THREADS", "-2"},   {"HYBRIDPS_CORES", "0"},
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
  REQUIRE(setenv("HYBRIDPS_LIMITS", "grant_chunks=9", 1) == 0);
  const auto config = Config::from_environment();
  REQUIRE(unsetenv("HYBRIDPS_LIMITS") == 0);
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
  REQUIRE(setenv("HYBRIDPS_CHUNK_BYTES", "some", 1) == 0);
  std::vector<std::string> warnings;
  std::vector<SettingRow> parts;
  const auto rows = Config::table_of_environment(warnings, parts);
  CHECK(Config::from({{"HYBRIDPS_TRACE", "/tmp/\xff"}}).value().trace == "/tmp/\xff");  // a path keeps its bytes
  for (const char* name :
       {"HYBRIDPS_POOL_BYTES", "HYBRIDPS_SHM", "HYBRIDPS_POOL_BITES", "HYBRIDPS_TRACE", "HYBRIDPS_CHUNK_BYTES"})
    REQUIRE(unsetenv(name) == 0);
  CHECK(rows.size() == Config().table().size());
  for (const SettingRow& row : rows) {
    INFO(row.name);
    if (row.name == "HYBRIDPS_POOL_BYTES") {
      CHECK(row.value == "lots");
      CHECK(row.source == "env");
      CHECK(row.problem.find("'lots' is not valid: expected a number of bytes") != std::string::npos);
    } else if (row.name == "HYBRIDPS_LIMITS") {
      CHECK(row.value == "chunk_bytes=some");
      CHECK(row.problem.starts_with("HYBRIDPS_CHUNK_BYTES='some' is not valid: expected a number of bytes"));
    } else {
      if (row.name == "HYBRIDPS_TRACE") CHECK(row.value == "/tmp/\\xff");
      CHECK(row.problem.empty());
    }
    if (row.name == "HYBRIDPS_SHM") CHECK(row.value == "0");
  }
  REQUIRE(warnings.size() == 1);
  CHECK(warnings[0].find("did you mean HYBRIDPS_POOL_BYTES?") != std::string::npos);
}
